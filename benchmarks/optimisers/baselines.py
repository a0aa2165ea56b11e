"""Rules of 2024 to 2026 for weight matrices: NorMuon, SOAP, and the sphere of Hyperball.

A parameter (..., R, C) is a stack of R x C matrices W with gradients G, each moved by itself.

**NorMuon** scales the rows of Muon's direction O, one row per output, by their own history:

    v <- b2 v + (1 - b2) mean over columns of O^2          (R,), from v = 0
    D  = O / sqrt(v),  then scaled to a root mean square of 1
    W <- (1 - lr lambda) W - 0.2 lr D

A correction of the start of v would be the same factor for all rows, and cancels.

**SOAP** is Adam in the eigenbasis of Shampoo's statistics:

    G' = Q_L^T G Q_R            M <- b1 M + (1 - b1) G          M' = Q_L^T M Q_R
    v <- b2 v + (1 - b2) G'^2   W <- (1 - lr lambda) (W - lr Q_L (mh / (sqrt(vh) + eps)) Q_R^T)
    L <- b2 L + (1 - b2) G G^T  R <- b2 R + (1 - b2) G^T G

with mh = M' / (1 - b1^t) and vh = v / (1 - b2^t). The first gradient only sets L and R, whose
eigenvectors are the first bases, and moves nothing. Every ``interval`` steps, after the step, the
columns of a basis are ordered by falling q^T L q, the entries of v with them, and one step of
orthogonal iteration follows: Q <- the orthogonal factor of L Q. A side longer than ``longest``
has no statistics and the basis I, so that a tall matrix is treated from one side; a parameter of
less than two axes is moved by Adam, from the second step on. M is in the axes of the weights, so
that a new basis needs no change of it.

**Hyperball** replaces decay by spheres, around any rule. With W_0 the weights before the first step
and U the step of the rule,

    R = |W_0|,    W <- R normalised(W - lr R U / |U|)                   in the Frobenius norm,

so lr is the relative length of a step and the rule's own rate and decay have no effect. A matrix
that starts at 0, as the last map of every branch does here by default, has no such norm. It gets
R = sqrt(rows), that of a map of I inputs drawn from N(0, 1/I), and is kept in the ball of this
radius instead of on its surface.

Li et al. (2025), NorMuon. Vyas et al. (2024), SOAP: improving and stabilizing Shampoo using Adam.
Wen et al. (2026), Fantastic pretraining optimizers II: Hyperball optimization.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fenchel.optim import Muon

TINY = 1e-30
"""Keeps 0 / 0 at 0 in float32."""


class NorMuon(Muon):
    """Muon whose steps have rows of equal size over time."""

    def __init__(self, params: Iterable[Any], *, beta2: float = 0.95, **settings: Any) -> None:
        self.beta2 = beta2
        super().__init__(params, **settings)

    def _rescaled(self, directions: Tensor, weights: list[Tensor]) -> Tensor:
        directions = directions.to(weights[0].dtype)
        rows = directions.square().mean(-1, keepdim=True)
        for weight, now in zip(weights, rows, strict=True):
            state = self.state[weight]
            state.setdefault("row_squares", torch.zeros_like(now)).lerp_(now, 1.0 - self.beta2)
        history = torch.stack([self.state[weight]["row_squares"] for weight in weights])
        scaled = directions / history.sqrt().clamp(min=1e-10)
        rms = scaled.square().mean((-2, -1), keepdim=True).sqrt().clamp(min=1e-10)
        return scaled / rms / max(directions.shape[-2:]) ** 0.5  # which Muon multiplies with


class Soap(torch.optim.Optimizer):
    """Adam in the eigenbasis of Shampoo's statistics, for parameters of any shape."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        weight_decay: float = 0.0,
        *,
        interval: int = 10,
        longest: int = 2048,
        eps: float = 1e-8,
    ) -> None:
        self.interval, self.longest, self.eps = interval, longest, eps
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[Any, list[Tensor]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    taken = int(self.state[weight].get("step", -1))
                    alike[weight.shape, weight.device, taken].append(weight)
            for (*_, taken), weights in alike.items():
                self._move(weights, group, taken + 1)
        return loss

    def _move(self, weights: list[Tensor], group: dict[str, Any], t: int) -> None:
        """Step t of parameters of one shape; step 0 moves nothing."""
        b1, b2 = group["betas"]
        G = torch.stack([w.grad for w in weights])  # type: ignore[misc]
        G = G.float() if G.dtype.itemsize < 4 else G
        names = self._sides(weights[0])
        states = [self.state[w] for w in weights]
        if t == 0:
            for state, g in zip(states, G, strict=True):
                state |= {"step": torch.tensor(0.0), "mean": torch.zeros_like(g)}
                state["square"] = torch.zeros_like(g)
                for side in names:
                    state[side] = (1.0 - b2) * _gram(g, side)
                    state[f"{side}_basis"] = torch.linalg.eigh(state[side]).eigenvectors.flip(-1)
            return
        kept = {
            name: torch.stack([state[name] for state in states])
            for name in ("mean", "square", *names, *(f"{side}_basis" for side in names))
        }
        bases = {side: kept[f"{side}_basis"] for side in names}
        mean = kept["mean"].lerp_(G, 1.0 - b1)
        square = kept["square"].lerp_(_rotated(G, bases).square(), 1.0 - b2)
        direction = (_rotated(mean, bases) / (1.0 - b1**t)) / (
            (square / (1.0 - b2**t)).sqrt() + self.eps
        )
        back = _rotated(direction, {side: basis.mT for side, basis in bases.items()})
        for weight, u in zip(weights, back, strict=True):
            weight.sub_(group["lr"] * u).mul_(1.0 - group["lr"] * group["weight_decay"])
        for side in names:
            kept[side].lerp_(_gram(G, side), 1.0 - b2)
            if t % self.interval == 0:
                square = self._turn(kept, square, side)
        kept["square"] = square
        for n, state in enumerate(states):
            state |= {name: value[n].clone() for name, value in kept.items()}
            state["step"] += 1.0

    def _turn(self, kept: dict[str, Tensor], square: Tensor, side: str) -> Tensor:
        """Bring a basis up to date; returns the squares in the order of its columns."""
        moved = kept[side] @ kept[f"{side}_basis"]
        sizes = (kept[f"{side}_basis"] * moved).sum(-2)
        order = sizes.argsort(dim=-1, descending=True, stable=True)
        columns = order.unsqueeze(-2).expand_as(moved)
        kept[f"{side}_basis"] = torch.linalg.qr(moved.gather(-1, columns)).Q
        if side == "left":
            return square.gather(-2, order.unsqueeze(-1).expand_as(square))
        return square.gather(-1, order.unsqueeze(-2).expand_as(square))

    def _sides(self, weight: Tensor) -> list[str]:
        """The sides of a matrix that have statistics."""
        lengths = zip(("left", "right"), weight.shape[-2:], strict=False) if weight.ndim > 1 else ()
        return [side for side, length in lengths if length <= self.longest]


def _gram(G: Tensor, side: str) -> Tensor:
    return G @ G.mT if side == "left" else G.mT @ G


def _rotated(G: Tensor, bases: dict[str, Tensor]) -> Tensor:
    """Q_L^T G Q_R with the bases that there are."""
    if "left" in bases:
        G = bases["left"].mT @ G
    return G @ bases["right"] if "right" in bases else G


AnyOptimiser = TypeVar("AnyOptimiser", bound=torch.optim.Optimizer)


def hyperball(optimiser: AnyOptimiser) -> AnyOptimiser:
    """The optimiser, whose groups have relative rates from now on, with its matrices on spheres."""
    before: list[tuple[Tensor, Tensor, float]] = []

    def keep(*_: Any) -> None:
        """Let the rule step from 0, which leaves its step in the weights, without rounding."""
        before[:] = [
            (weight, weight.detach().clone(), float(group["lr"]))
            for group in optimiser.param_groups
            for weight in group["params"]
        ]  # also those without a gradient: a later hook may set it
        for weight, _, _ in before:
            weight.detach().zero_()

    def project(*_: Any) -> None:
        for weight, W, lr in before:
            if weight.grad is None:
                weight.detach().copy_(W)
                continue
            U, size = weight.detach(), _norm(W)
            state = optimiser.state[weight]
            if "radius" not in state:
                state["radius"] = torch.where(size > 0.0, size, W.shape[-2] ** 0.5)
                state["inside"] = (size == 0.0).to(W.dtype)
            R = state["radius"]
            W = W + lr * R * U / _norm(U).clamp(min=TINY)
            scale = R / _norm(W).clamp(min=TINY)
            weight.detach().copy_(
                W * torch.where(state["inside"] > 0.0, scale.clamp(max=1.0), scale)
            )

    optimiser.register_step_pre_hook(keep)
    optimiser.register_step_post_hook(project)
    return optimiser


def _norm(W: Tensor) -> Tensor:
    """The Frobenius norm of every matrix of a stack."""
    return torch.linalg.vector_norm(W, dim=(-2, -1), keepdim=True)
