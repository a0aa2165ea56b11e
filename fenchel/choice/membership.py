"""Is a map from scores to weights the solution of a choice problem? A search for the contrary.

p(z) = argmax over p in C of <p, z> - Omega(p) for some closed convex Omega and C, exactly if p is
the gradient of a convex function, the value of that problem (Fenchel and Moreau; Omega is its
conjugate and C the domain of Omega). Where p is differentiable its Jacobian is then symmetric and
positive semidefinite. Rockafellar's form needs no derivative: p is such a gradient exactly if it
is cyclically monotone,

    gain = sum_k <p(z_k), z_(k+1) - z_k>  <=  0        for every closed cycle of scores z_1 ... z_m.

So a cycle with a positive gain is a proof that there is no Omega, by m values of the map, and it is
what ``membership`` returns. Cycles are made where random points show them:

    asymmetry     J_ij != J_ji at z: a circle about z in the plane (i, j), turned with the curl. Its
                  gain tends to pi h^2 |J_ij - J_ji|, less 2 pi^2 h^2 |J|_2 / m for its m corners
    descent       <d, J d> < 0: there and back along d, gain -4 h^2 <d, J d>
    far away      pairs and triples of random points, for maps with jumps

J is found by central differences, so that a map whose autograd is not its derivative is judged by
its values. The converse is only a search: ``member`` means that no cycle was found.

Shapes: scores and weights are (..., K).

Rockafellar (1966), Characterization of the subdifferentials of convex functions.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]
_STEP = 1e-4  # of the differences
_RADII = (0.3, 0.1, 0.03, 0.01)
_CANDIDATES = 6  # points of the largest asymmetry and of the steepest descent
_CORNERS = 4096  # of a circle, at most
_SIZES = (0.1, 1.0, 4.0)  # of the random scores
_NOISE = 1e-9  # the share of sum |p| |dz| below which a gain is rounding


class Cycle(NamedTuple):
    """Scores z_1 ... z_m, closed, whose sum of <p(z_k), z_(k+1) - z_k> is positive."""

    scores: Tensor
    """(m, K)."""
    gain: float
    pair: tuple[int, int] | None
    """(i, j) with dp_i/dz_j != dp_j/dz_i, where that is the reason."""


class Membership(NamedTuple):
    """Whether a map may be the solution of a choice problem."""

    member: bool
    """False is proved by the witness; True says that none was found."""
    witness: Cycle | None


def membership(
    map: Map,
    K: int = 5,
    *,
    points: int = 64,
    generator: torch.Generator | None = None,
) -> Membership:
    """Whether ``map``, (..., K) -> (..., K), is the gradient of a convex function, or a cycle.

    >>> from fenchel.choice import Entmax
    >>> membership(Entmax(1.5).weights).member
    True
    >>> found = membership(lambda z: z.roll(1, -1))
    >>> found.member, found.witness.gain > 0
    (False, True)
    """
    if K < 2:
        raise ValueError(f"membership needs at least 2 alternatives, got K={K}.")
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    count = -(-points // len(_SIZES))
    drawn = torch.randn(len(_SIZES), count, K, dtype=torch.float64, generator=generator)
    z = (drawn * torch.tensor(_SIZES, dtype=torch.float64).view(-1, 1, 1)).flatten(0, 1)
    with torch.no_grad():
        if map(z).shape != z.shape:
            raise ValueError(f"a map is (..., K) -> (..., K), got {tuple(map(z).shape)}.")
        for scores, pair in _cycles(map, z):
            gain, size = _gain(map, scores)
            if gain > _NOISE * size:
                return Membership(False, Cycle(scores, gain, pair))
    return Membership(True, None)


def _gain(map: Map, scores: Tensor) -> tuple[float, float]:
    """The gain of a cycle (m, K), and the size of its terms."""
    p, step = map(scores), scores.roll(-1, 0) - scores
    return float((p * step).sum()), float((p.norm(dim=-1) * step.norm(dim=-1)).sum())


def _cycles(map: Map, z: Tensor) -> Iterator[tuple[Tensor, tuple[int, int] | None]]:
    """Cycles that may have a positive gain, from points z (n, K)."""
    K = z.shape[-1]
    J = _jacobian(map, z)  # (n, K, K)
    curl = (J - J.mT).triu().abs().flatten(1)
    size = torch.linalg.matrix_norm(J, 2)
    for n in curl.amax(-1).topk(min(_CANDIDATES, len(z))).indices.tolist():
        i, j = divmod(int(curl[n].argmax()), K)
        twist = float(J[n, j, i] - J[n, i, j])  # the curl in the plane (i, j)
        if twist == 0.0:
            continue
        corners = min(_CORNERS, 16 + int(8.0 * math.pi * float(size[n]) / abs(twist)))
        turn = torch.arange(corners, dtype=z.dtype) * math.copysign(2.0 * math.pi / corners, twist)
        for radius in _RADII:
            scores = z[n].repeat(corners, 1)
            scores[:, i] += radius * turn.cos()
            scores[:, j] += radius * turn.sin()
            yield scores, (i, j)
    values, vectors = torch.linalg.eigh(0.5 * (J + J.mT))
    for n in values[:, 0].topk(min(_CANDIDATES, len(z)), largest=False).indices.tolist():
        for radius in _RADII:
            move = radius * vectors[n, :, 0]
            yield torch.stack([z[n] + move, z[n] - move]), None
    for n in range(len(z)):
        yield z[[n, n - 1]], None
        yield z[[n, n - 1, n - 2]], None


def _jacobian(map: Map, z: Tensor) -> Tensor:
    """J_ij = dp_i / dz_j by central differences: (n, K) -> (n, K, K)."""
    step = _STEP * torch.eye(z.shape[-1], dtype=z.dtype).unsqueeze(1)  # (K, 1, K)
    return ((map(z + step) - map(z - step)) / (2.0 * _STEP)).permute(1, 2, 0)
