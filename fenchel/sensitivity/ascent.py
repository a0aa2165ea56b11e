"""Climbing to the point of a ball where a function is most sensitive.

sigma(X) = |J(X)|_2 has, where the top singular value is simple, the gradient

    d sigma = < d/dX of <u, J(X) v>, dX >        u, v the top singular vectors at X,

which is a second derivative of f and costs two reverse passes. Each step moves towards the point of
the ball furthest along it, by a share that grows while sigma does and is halved when it does not;
u and v are kept warm from step to step. Large balls have many hills, so random points are looked at
first and the best of them climbed. Whatever is found is a lower bound, however it was found.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fenchel.sensitivity.autodiff import plain
from fenchel.sensitivity.ball import Ball
from fenchel.sensitivity.operator import Operator


class Peak(NamedTuple):
    """The best point met."""

    X: Tensor
    sigma: float


def climb(
    f: Callable[[Tensor], Tensor],
    derivative: Callable[[Tensor], Operator],
    X: Tensor,
    ball: Ball,
    starts: Iterable[Tensor],
    *,
    steps: int,
    generator: torch.Generator | None = None,
) -> Peak:
    """The largest sigma met within the ball about X, from each of ``starts`` in turn."""
    best = Peak(X, -1.0)
    for start in starts:
        Y = X + ball.within(start - X)
        sigma, u, v = _warm(derivative(Y), _random(X, generator), rounds=8)
        share, moved = 0.5, True
        for _ in range(steps):
            if moved:
                target = X + furthest(ball, slope(f, Y, u, v))
            Z = X + ball.within(Y + share * (target - Y) - X)
            found = _warm(derivative(Z), v, rounds=3)
            moved = found[0] > sigma
            if moved:
                (sigma, u, v), Y, share = found, Z, min(1.0, 1.5 * share)
            else:
                share = 0.4 * share
            if share < 1e-3:
                break
        if sigma > best.sigma:
            best = Peak(Y, sigma)
    return best


def promising(
    derivative: Callable[[Tensor], Operator],
    X: Tensor,
    ball: Ball,
    keep: int,
    *,
    looks: int = 12,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """The ``keep`` most sensitive of ``looks`` random points of the ball's edge, for each."""
    if keep == 0:
        return []
    points = []
    for _ in range(looks * keep):
        Y = X + furthest(ball, _random(X, generator).view_as(X))
        points.append((_warm(derivative(Y), _random(X, generator), rounds=2)[0], Y))
    points.sort(key=lambda point: -point[0])
    return [Y for _, Y in points[:keep]]


def _random(X: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(X.numel(), dtype=X.dtype, generator=generator).to(X)


def slope(f: Callable[[Tensor], Tensor], X: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """The gradient of <u, J(X) v> in X, for flat u and v; 0 where f is linear."""
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        Y = X.detach().clone().requires_grad_()
        out = plain(f)(Y)
        (back,) = torch.autograd.grad(out, Y, u.view_as(out), create_graph=True)
        if not back.requires_grad:
            return torch.zeros_like(X)
        (found,) = torch.autograd.grad(back, Y, v.view_as(Y), allow_unused=True)
    return torch.zeros_like(X) if found is None else found


def furthest(ball: Ball, g: Tensor) -> Tensor:
    """The move of the ball with the largest product with g: (n, d) -> (n, d)."""
    length = g.norm(dim=-1, keepdim=True)
    unit = g / torch.where(length > 0, length, 1.0)
    if ball.total >= ball.token * len(g) ** 0.5 * (1.0 - 1e-12):
        return ball.token * unit
    size = g.norm()
    return ball.within(g * (ball.total / size)) if size > 0 else torch.zeros_like(g)


def _warm(J: Operator, v: Tensor, rounds: int) -> tuple[float, Tensor, Tensor]:
    """sigma, u, v after a few power steps from v."""
    for _ in range(rounds):
        u = J.apply(v[None])[0]
        size = u.norm()
        u = u / torch.where(size > 0, size, 1.0)
        w = J.adjoint(u[None])[0]
        sigma = w.norm()
        v = torch.where(sigma > 0, w / torch.where(sigma > 0, sigma, 1.0), v)
    return float(sigma), u, v
