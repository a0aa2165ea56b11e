"""What the layers of a stack read, side by side, and which pairs of positions are looked at.

Queries are sampled evenly over the positions, keys are all there. A sampled pair counts when it is
open: causal, within the window, and not masked. Where only the layers' own rules hold, the open
pairs are the same at every step and are kept; without any sample the inputs are taken as white:
the rows of the identity.

Shapes: L layers, n sequences, T positions, m sampled queries, M inputs (one more with a bias).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel.attention import Angles
from fenchel.optim.score.pairs import Pair
from fenchel.optim.score.probe import Seen

QUERIES = 64
"""Sampled queries of a sequence."""


class Grid(NamedTuple):
    """The pairs of positions that are looked at."""

    queries: Tensor
    """Positions of the sampled queries, (m,)."""
    open: Tensor
    """(L or 1, n or 1, 1, m, T), True where a sampled query may see a key."""
    share: Tensor
    """One over the number of open pairs of all sequences: (L or 1, 1)."""


class Sample(NamedTuple):
    """The inputs of the layers of a stack."""

    x: Tensor
    """(L, n, T, M)."""
    turn: Angles | None
    """(L or 1, 1 or n, 1, T, W) each."""
    grid: Grid
    real: bool = True
    """False for the identity that stands in for a sample."""


def sample(
    pairs: Sequence[Pair], seen: Sequence[Seen | None], grids: dict[Any, Grid] | None = None
) -> Sample:
    """The probes of equal layers side by side; what needs no new look is kept in ``grids``."""
    grids = {} if grids is None else grids
    present = [s for s in seen if s is not None]
    if len(present) < len(pairs):
        return _white(pairs, grids)
    x = torch.stack([s.x for s in present])
    if pairs[0].query.bias is not None:
        x = torch.cat((x, torch.ones_like(x[..., :1])), dim=-1)
    rules = [(pair.causal, pair.window) for pair in pairs]
    rules = rules[:1] if len(set(rules)) == 1 else rules
    n, T = x.shape[1:3]
    key = (*rules, n, T, x.device, x.dtype)
    if key not in grids:
        grids[key] = _grid(rules, x)
    grid = grids[key]
    masks = [s.mask[:, grid.queries] for s in present if s.mask is not None]
    if masks:
        open_ = grid.open & torch.stack(masks).unsqueeze(2)
        grid = Grid(grid.queries, open_, _share(open_, 1, x.dtype))
    return Sample(x, _turns(present), grid)


def _grid(rules: list[tuple[bool, int | None]], x: Tensor) -> Grid:
    n, T, device = *x.shape[1:3], x.device
    m = min(T, QUERIES)
    queries = ((torch.arange(m, device=device) + 0.5) * (T / m)).long()
    distance = queries.unsqueeze(1) - torch.arange(T, device=device)
    opened = []
    for causal, window in rules:
        open_ = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        opened.append(open_ if window is None else open_ & (distance.abs() < window))
    all_open = torch.stack(opened)[:, None, None]
    return Grid(queries, all_open, _share(all_open, n, x.dtype))


def _share(open_: Tensor, times: int, dtype: torch.dtype) -> Tensor:
    pairs = times * open_.sum(dim=(1, 3, 4)).clamp(min=1)
    return pairs.to(torch.promote_types(dtype, torch.float32)).reciprocal()


def _white(pairs: Sequence[Pair], grids: dict[Any, Grid]) -> Sample:
    first = pairs[0].query
    M = first.weight.shape[0 if first.columns else 1] + (first.bias is not None)
    exact = torch.promote_types(first.weight.dtype, torch.float32)
    x = torch.eye(M, dtype=exact, device=first.weight.device).expand(len(pairs), 1, M, M)
    key = ("white", M, x.device, exact)
    if key not in grids:
        everything = torch.ones(1, 1, 1, M, M, dtype=torch.bool, device=x.device)
        share = _share(everything, 1, exact)
        grids[key] = Grid(torch.arange(M, device=x.device), everything, share)
    return Sample(x, None, grids[key], real=False)


def _turns(seen: Sequence[Seen]) -> Angles | None:
    turns = [s.turn for s in seen if s.turn is not None]
    if not turns:
        return None
    if all(_same(turns[0].cos, turn.cos) for turn in turns):
        turns = turns[:1]  # one table for all layers
    cos, sin = (
        torch.stack([part if part.ndim == 4 else part[None, None] for part in parts])
        for parts in zip(*turns, strict=True)
    )
    return Angles(cos, sin)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether both are one piece of memory, seen alike."""
    where = [(t.data_ptr(), t.shape, t.stride()) for t in (one, other)]
    return one is other or (where[0] == where[1] and not one.is_meta)
