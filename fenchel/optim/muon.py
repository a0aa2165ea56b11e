"""Muon: momentum, then the nearest orthogonal matrix, for the weight matrices inside blocks.

    M <- mu M + (1 - mu) G                     momentum of the gradient
    D  = orthogonal part of  mu M + (1 - mu) G    (Nesterov)
    W <- (1 - lr lambda) W - lr 0.2 sqrt(max(rows, columns)) D

The orthogonal part U V^T of U S V^T is approximated by five steps of an odd quintic,

    X <- a X + (b (X X^T) + c (X X^T)^2) X,     (a, b, c) = (3.4445, -4.7750, 2.0315),

from X = G / |G| in the Frobenius norm. Singular values of X between 0.0016 and 1 end between
0.68 and 1.21, smaller ones grow by a factor of 485; the singular vectors stay. The factor
0.2 sqrt(max) gives the step about the root mean square of an AdamW step, so one learning rate
serves both. A parameter (..., R, C) is a stack of R x C matrices, such as the experts of a mixture,
and each matrix moves independently; one whose gradients were always 0 only decays.

All steps multiply X by polynomials of X X^T, which commute. With A = X X^T of the first X, the same
X is therefore P X, where

    Q = a I + b A + c A^2        P <- Q P        A <- Q A Q

take four products of R x R matrices per step, R the shorter side, where the first form takes one
and two of R x C x R: less work from C = 2 R on, 0.7 of the time at C = 3 R and 4 R. The eigenvalues
of A are the squares of those of X, so that small ones lose digits: 4e-4 of the result in float32
where singular values differ by 1e4, and too many in bfloat16, which keeps the first form.

torch.optim.Muon computes the same in bfloat16, one matrix at a time. Here equal shapes are
stacked into one batched product. On a GPU the iteration runs in bfloat16 as well, whose products
are several times faster than those of float32. On a CPU it runs in the dtype of the weights:
bfloat16 is slower there without instructions for it, and about twice as fast for wide matrices with
them, but runs that differ only in rounding then drift apart in a few steps (docs/log.md).

Jordan et al. (2024), Muon: an optimizer for hidden layers in neural networks.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fenchel.optim.cuda_graph import Capturable, PreparedStep, Rate
from fenchel.torch_internals import foreach_add_, foreach_lerp, foreach_lerp_, foreach_mul_

QUINTIC = (3.4445, -4.7750, 2.0315)


class Muon(Capturable):
    """Orthogonalised momentum for matrices; other parameters need another optimiser.

    >>> import torch
    >>> layer = torch.nn.Linear(4, 3)
    >>> optimiser = Muon([layer.weight], lr=0.01)
    >>> layer(torch.ones(4)).sum().backward()
    >>> optimiser.step()
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-2,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        iterations: int = 5,
    ) -> None:
        if not lr >= 0.0 or not 0.0 <= momentum < 1.0 or not weight_decay >= 0.0 or iterations < 1:
            raise ValueError(
                "Muon needs lr >= 0, momentum in [0, 1), weight_decay >= 0 and iterations >= 1; "
                f"got {lr}, {momentum}, {weight_decay} and {iterations}."
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "iterations": iterations,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.ndim < 2:
                    raise ValueError(
                        f"Muon moves matrices, got a tensor of shape {tuple(weight.shape)}; "
                        "give it to AdamW."
                    )

    refusal: str | None = None
    """Why the steps of a rule that is derived from this one cannot be captured."""

    def prepare(self) -> PreparedStep:
        """Stack the matrices by shape, and create the momenta."""
        stacks: list[tuple[list[Tensor], dict[str, Any]]] = []
        for group in self.param_groups:
            by_shape: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]]
            by_shape = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape[weight.shape, weight.dtype, weight.device].append(weight)
                    if not self.state[weight]:
                        self.state[weight]["momentum"] = torch.zeros_like(weight)
            stacks += [(weights, group) for weights in by_shape.values()]
        moved = [weight for weights, _ in stacks for weight in weights]
        state = (x for weight in moved for x in self.state[weight].values())

        def run(rates: Sequence[Rate], gradients: Sequence[Tensor]) -> None:
            of_stacks, each = iter(rates), iter(gradients)
            for weights, group in stacks:
                given = [next(each) for _ in weights]
                self._move(weights, given, group, decay=next(of_stacks), length=next(of_stacks))

        return PreparedStep(
            run=run,
            rates=[rate for weights, group in stacks for rate in _rates(weights[0], group)],
            inputs=[weight.grad for weight in moved],  # type: ignore[misc]
            memory=[*moved, *(x for x in state if isinstance(x, Tensor))],
            settings=tuple(
                (len(weights), group["momentum"], group["iterations"]) for weights, group in stacks
            ),
            refusal=self.refusal,
        )

    def _move(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        group: dict[str, Any],
        *,
        decay: Rate,
        length: Rate,
    ) -> None:
        mu = group["momentum"]
        momenta = [self.state[weight]["momentum"] for weight in weights]
        foreach_lerp_(momenta, gradients, 1.0 - mu)
        ahead = torch.stack(foreach_lerp(gradients, momenta, mu))
        if ahead.is_cuda and ahead.dtype == torch.float32:
            ahead = ahead.bfloat16()
        directions = orthogonal(ahead.flatten(0, -3), group["iterations"]).view_as(ahead)
        directions = self._rescaled(directions, weights)
        dtype = weights[0].dtype
        foreach_mul_(weights, decay.to(dtype) if isinstance(decay, Tensor) else decay)
        if isinstance(length, Tensor):
            # a scalar in device memory is no alpha; with an axis its dtype counts
            exact = length.to(torch.promote_types(dtype, torch.float32)).view(1)
            foreach_add_(weights, (directions * exact).to(dtype).unbind())
        else:
            foreach_add_(weights, directions.to(dtype).unbind(), alpha=length)

    def _rescaled(self, directions: Tensor, _weights: list[Tensor]) -> Tensor:
        """The stacked directions as they are; rules derived from Muon scale their rows."""
        return directions


def _rates(weight: Tensor, group: dict[str, Any]) -> tuple[float, float]:
    """What a step multiplies a matrix by, and how much of its direction it adds."""
    lr = float(group["lr"])
    size = 0.2 * max(weight.shape[-2:]) ** 0.5
    return 1.0 - lr * group["weight_decay"], -lr * size


def orthogonal(stack: Tensor, iterations: int = 5) -> Tensor:
    """Each matrix with its singular values pushed towards 1: (N, R, C) -> (N, R, C)."""
    a, b, c = QUINTIC
    tall = stack.shape[-2] > stack.shape[-1]
    X = stack.mT if tall else stack
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    R, C = X.shape[-2:]
    if C >= 2 * R and X.dtype.itemsize >= 4:
        X = _polynomial(X @ X.mT, iterations) @ X
    else:
        for _ in range(iterations):
            A = X @ X.mT
            X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.mT if tall else X


def _polynomial(A: Tensor, iterations: int) -> Tensor:
    """P of A = X X^T, by which the iteration multiplies X: (N, R, R) -> (N, R, R)."""
    a, b, c = QUINTIC
    P = None
    for step in range(iterations):
        Q = torch.baddbmm(A, A, A, beta=b, alpha=c)
        Q.diagonal(dim1=-2, dim2=-1).add_(a)
        P = Q if P is None else Q @ P
        if step < iterations - 1:
            A = Q @ A @ Q
    assert P is not None  # there is at least one iteration
    return P
