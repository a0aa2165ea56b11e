"""A small change of the input that changes a decision: an upper end of the distance to one.

For a kept token i and a rival j with margin m(x) = logit_i - logit_j and gradient g, the smallest
move d at which the margin vanishes to first order about x + d is

    d = - g (m - <g, d>) / |g|^2                         "all" and, for the one token, "one"
    d_k = - g_k / |g_k| (m - <g, d>) / sum |g_k|         "token"

(Hasofer and Lind, Rackwitz and Fiessler). It is iterated for the nearest rivals at once, with a
step past the boundary, from 0 and from the points at which the rays along g change the decision.
Every iterate at which *any* rival is above a kept token counts; the best ones are shortened along
their rays by bisection. The decision is read off the logits in float64 at the change that is
returned.
"""

import math
import time

import torch
from torch import Tensor

from fenchel.sensitivity.decision import DecisionNetwork

_STEPS = 24
_OVERSHOOT = (0.02, 0.1, 0.0, 0.05)
_HALVINGS = 24


def nearest_change(
    network: DecisionNetwork,
    X: Tensor,
    kept: Tensor,
    norm: str,
    *,
    rivals: int = 8,
    deadline: float = math.inf,
) -> Tensor | None:
    """A small change d (n, d) after which the decision at the last token of X differs, or None.

    After ``deadline``, by time.monotonic, the best change that was found by then is returned.
    """
    X = X.detach().double()
    with torch.enable_grad():
        targets = _targets(network, X, kept, norm, rivals, deadline)
        if not targets:
            return None
        pairs = torch.tensor(targets)
        moves = torch.zeros(len(pairs), *X.shape, dtype=X.dtype)
        margin, g, _ = _margins(network, X, moves, pairs)
        starts, whose = _rays(network, X, kept, _step(g, margin, norm), deadline)
        best = _iterate(network, X, kept, norm, pairs, moves, 1.0, deadline)
        if len(starts):
            best += [(_length(move, norm), move) for move in starts]
            best += _iterate(network, X, kept, norm, pairs[whose], starts, 0.5, deadline)
            best += _iterate(network, X, kept, norm, pairs[whose], starts, 0.2, deadline)
    best = sorted(best, key=lambda pair: pair[0])[:4]
    found = [_shortened(network, X, kept, move) for _, move in best]
    found = [move for move in found if bool(_changed(network.last_logits(X + move)[None], kept)[0])]
    return min(found, key=lambda move: _length(move, norm)) if found else None


def _iterate(
    network: DecisionNetwork,
    X: Tensor,
    kept: Tensor,
    norm: str,
    pairs: Tensor,
    moves: Tensor,
    share: float,
    deadline: float,
) -> list[tuple[float, Tensor]]:
    """The iterates from ``moves`` (R, n, d) that change the decision, with their lengths.

    ``share`` of each step is taken, and half of that in the second half of them.
    """
    best: list[tuple[float, Tensor]] = []
    for step in range(_STEPS):
        if time.monotonic() > deadline:
            break
        margin, g, logits = _margins(network, X, moves, pairs)
        for one in _changed(logits, kept).nonzero()[:, 0].tolist():
            best.append((_length(moves[one], norm), moves[one].clone()))
        best = sorted(best, key=lambda pair: pair[0])[:4]
        need = margin - (g * moves).sum((1, 2))
        need = need + _OVERSHOOT[step % len(_OVERSHOOT)] * margin.abs().clamp(min=1e-9)
        part = share if step < _STEPS // 2 else 0.5 * share
        moves = moves + part * (_step(g, need, norm) - moves)
    return best


def _margins(
    network: DecisionNetwork, X: Tensor, moves: Tensor, pairs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The margins (R,) of pairs (R, 2) at X + moves, their gradients, and the logits (R, V)."""
    moves = moves.detach().requires_grad_()
    logits = network.last_logits(X + moves)
    margin = (logits.gather(-1, pairs[:, :1]) - logits.gather(-1, pairs[:, 1:]))[:, 0]
    (g,) = torch.autograd.grad(margin.sum(), moves)
    return margin.detach(), g, logits.detach()


def _targets(
    network: DecisionNetwork, X: Tensor, kept: Tensor, norm: str, rivals: int, deadline: float
) -> list[tuple[int, int]]:
    """Pairs of a kept token and a rival, the nearest by margin over gradient first.

    Gradients are taken of the pairs with the smallest margins, several times as many.
    """
    moves = torch.zeros_like(X).requires_grad_()
    logits = network.last_logits(X + moves)
    gaps = (logits[kept, None] - logits).detach()
    gaps[:, kept] = math.inf
    V = gaps.shape[-1]
    count = min(4 * rivals, gaps.numel() - len(kept) ** 2)
    near: list[tuple[float, int, int]] = []
    for flat in gaps.flatten().topk(count, largest=False).indices.tolist():
        if near and time.monotonic() > deadline:
            break
        i, j = int(kept[flat // V]), flat % V
        (g,) = torch.autograd.grad(logits[i] - logits[j], moves, retain_graph=True)
        dual = _dual(g, norm)
        if dual > 0.0:
            near.append((float(gaps.flatten()[flat]) / dual, i, j))
    return [(i, j) for _, i, j in sorted(near)[:rivals]]


def _rays(
    network: DecisionNetwork, X: Tensor, kept: Tensor, moves: Tensor, deadline: float
) -> tuple[Tensor, Tensor]:
    """The first points of rays (R, n, d) at which the decision changes, and whose rays they are."""
    scales = 2.0 ** torch.arange(-1.0, 4.25, 0.25, dtype=X.dtype)
    points, whose = [], []
    with torch.no_grad():
        for one, move in enumerate(moves):
            if time.monotonic() > deadline:
                break
            changed = _changed(network.last_logits(X + scales[:, None, None] * move), kept)
            if bool(changed.any()):
                points.append(scales[int(changed.to(torch.int64).argmax())] * move)
                whose.append(one)
    starts = torch.stack(points) if points else moves[:0]
    return starts, torch.tensor(whose, dtype=torch.int64)


def _dual(g: Tensor, norm: str) -> float:
    rows = g.norm(dim=-1)
    return float(rows.sum() if norm == "token" else rows[-1] if norm == "one" else rows.norm())


def _length(moves: Tensor, norm: str) -> float:
    rows = moves.norm(dim=-1)
    return float(rows.amax() if norm == "token" else rows.norm())


def _step(g: Tensor, need: Tensor, norm: str) -> Tensor:
    """The shortest d with <g, d> = -need: (R, n, d), (R,) -> (R, n, d)."""
    if norm == "token":
        rows = g.norm(dim=-1, keepdim=True)
        unit = g / rows.clamp(min=1e-300)
        towards: Tensor = -unit * (need / rows.sum((1, 2)).clamp(min=1e-300))[:, None, None]
        return towards
    if norm == "one":
        only = torch.zeros_like(g)
        only[:, -1] = g[:, -1]
        g = only
    return -g * (need / g.square().sum((1, 2)).clamp(min=1e-300))[:, None, None]


def _changed(logits: Tensor, kept: Tensor) -> Tensor:
    """Whether a rival is above the least kept token: (R, V) -> (R,)."""
    others = logits.clone()
    others[:, kept] = -math.inf
    changed: Tensor = others.amax(-1) > logits[:, kept].amin(-1)
    return changed


def _shortened(network: DecisionNetwork, X: Tensor, kept: Tensor, move: Tensor) -> Tensor:
    """The move scaled down to the boundary, on the side of the changed decision."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        changed = bool(_changed(network.last_logits(X + middle * move)[None], kept)[0])
        low, high = (low, middle) if changed else (middle, high)
    shortened: Tensor = high * move
    return shortened
