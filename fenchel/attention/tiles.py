"""The square of scores (B, H, T, S) in tiles of whole rows, and their results joined again.

A tile takes some sequences, some groups of heads and some rows, with the range of keys that the
prior leaves open to any of these rows: keys outside it are never scored. ``tiles`` cuts for speed,
as much as the cache of a CPU core holds or as fills a GPU; ``row_tiles`` cuts rows alone, with all
sequences and heads in every tile. Tiles come in the order sequences, groups, rows, and cover every
query once; a key may lie in several tiles.

``score_tiles`` is the one walk over them. It yields, tile by tile, the scores and log u:

    for scored in score_tiles(q, k, spec):
        tile = scored.tile                    # where: batch, groups, heads, rows, keys
        p = scored.weights()                  # (b, h, t, s), on the keys of the tile
        o = mix(p, tile.items(v))             # (b, h, t, E)

    scored.z                  the scores after the soft cap, (b, h, t, s)
    scored.log_prior()        log u on the tile, None where there is no prior
    scored.add_log_prior_()   z + log u written into z, touching the keys where log u is not 0
    scored.choice             the map, its tensors cut to the tile

``join_rows`` and ``join_gradients`` put what was computed per tile together again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fenchel.attention.prior import Prior, ScoreBlock
from fenchel.attention.reference import cap, score
from fenchel.attention.spec import AttentionSpec, select
from fenchel.choice import Choice

_CACHED = 1 << 18  # scores in a tile on a CPU: 1 MiB of float32, the cache of a core
_MANY = 1 << 26  # scores in a tile on a GPU: 256 MiB of float32
_FEWEST_ROWS = 16  # fewer would starve the matrix product


class Tile(NamedTuple):
    """The part of q (batch, heads, rows) and of k and v (batch, groups, keys) in a tile."""

    batch: slice
    groups: slice
    heads: slice
    rows: slice
    keys: slice

    def queries(self, x: Tensor) -> Tensor:
        """Its part of q, or of anything (B, H, T, .)."""
        return x[self.batch, self.heads, self.rows]

    def items(self, x: Tensor) -> Tensor:
        """Its part of k or v (B, G, S, .)."""
        return x[self.batch, self.groups, self.keys]

    def block(self, q: Tensor, k: Tensor) -> ScoreBlock:
        """Its part of the square of q (B, H, T, D) and k (B, G, S, D), as a prior takes it."""
        B, H, T, _ = q.shape
        return ScoreBlock(
            B, H, T, k.shape[2], q.device, self.batch, self.heads, self.rows, self.keys
        )


def tile_height(T: int, keys: int, device: str) -> int:
    """Rows of a tile, for rows of ``keys`` scores and T rows in all."""
    room = _CACHED if device == "cpu" else _MANY
    return min(max(T, 1), max(room // max(1, keys), _FEWEST_ROWS))


def tiles(q: Tensor, k: Tensor, prior: Prior | None) -> list[Tile]:
    """The tiles of q (B, H, T, D) on k (B, G, S, D), sized for the device."""
    (B, H, T, _), (_, G, S, _) = q.shape, k.shape
    R = H // G
    room = _CACHED if q.device.type == "cpu" else _MANY
    row = max(1, R * S)
    high = tile_height(T, row, q.device.type)
    many = max(1, room // (row * high)) if high >= T else 1
    groups = min(G, many)
    batch = max(1, many // G)
    return [
        Tile(b, g, slice(g.start * R, g.stop * R), rows, _key_range(prior, rows, T, S))
        for b in _parts(B, batch)
        for g in _parts(G, groups)
        for rows in _parts(T, high)
    ]


def row_tiles(
    q: Tensor,
    k: Tensor,
    prior: Prior | None,
    *,
    height: int,
    first: int = 0,
    last: int | None = None,
) -> list[Tile]:
    """Tiles of ``height`` rows, from row ``first`` to ``last``, with all sequences and heads.

    >>> from fenchel.attention import Causal
    >>> cut = row_tiles(*torch.zeros(2, 1, 2, 4, 8), Causal(), height=2)
    >>> [(tile.rows.stop, tile.keys.stop) for tile in cut]
    [(2, 2), (4, 4)]
    """
    (B, H, T, _), (_, G, S, _) = q.shape, k.shape
    stop = T if last is None else last
    cut = [slice(i, min(i + height, stop)) for i in range(first, stop, height)]
    whole = slice(0, B), slice(0, G), slice(0, H)
    return [Tile(*whole, rows, _key_range(prior, rows, T, S)) for rows in cut]


@dataclass(frozen=True, eq=False)
class ScoreTile:
    """The scores of one tile and the prior over its keys."""

    tile: Tile
    z: Tensor
    """scale * q k^T after the soft cap, in float32 or better: (b, h, t, s)."""
    spec: AttentionSpec
    _prior: "_LogPrior"

    @property
    def choice(self) -> Choice:
        """The map, with the entries of its tensors that belong to the tile."""
        return select(self.spec.choice, self.tile.batch, self.tile.heads, self.tile.rows)

    def log_prior(self) -> Tensor | None:
        """log u, which broadcasts to z; None where there is no prior."""
        return None if self.spec.prior is None else self._prior.dense(self.tile, self.z.dtype)

    def add_log_prior_(self, factor: float = 1.0) -> Tensor:
        """z + factor * log u in the memory of z: not for scores that autograd follows."""
        return self._prior.add_(self.z, self.tile, factor)

    def weights(self) -> Tensor:
        """p on the keys of the tile; every other key has weight 0."""
        return self.choice.weights(self.z, self.log_prior())


def score_tiles(
    q: Tensor, k: Tensor, spec: AttentionSpec, cut: Sequence[Tile] | None = None
) -> Iterator[ScoreTile]:
    """The scores of q (B, H, T, D) on k (B, G, S, D), tile by tile; ``cut`` is ``tiles`` of them.

    >>> from fenchel.attention import Causal
    >>> q = torch.zeros(1, 2, 4, 8)
    >>> sum(scored.weights().sum() for scored in score_tiles(q, q, AttentionSpec(prior=Causal())))
    tensor(8.)
    """
    prior = _LogPrior(spec.prior, q, k)
    scale = spec.scale_for(q.shape[-1])
    for tile in tiles(q, k, spec.prior) if cut is None else cut:
        z = cap(score(tile.queries(q), tile.items(k), scale), spec.softcap)
        yield ScoreTile(tile, z, spec, prior)


def join_rows(cut: Sequence[Tile], pieces: Iterable[Tensor]) -> Tensor:
    """Pieces (b, h, t, .), one per tile, side by side: -> (B, H, T, .)."""
    columns: dict[tuple[int, int], list[Tensor]] = {}
    for tile, piece in zip(cut, pieces, strict=True):
        columns.setdefault(_corner(tile), []).append(piece)
    return _join({corner: torch.cat(rows, 2) for corner, rows in columns.items()})


def join_gradients(
    cut: Sequence[Tile], pieces: Iterable[Sequence[Tensor]], S: int
) -> tuple[Tensor, ...]:
    """The gradients of all tiles, each in its part of q, of k, of v and in tensors they share.

    Those in q are put side by side, the others are summed, as they come and out of place:
    derivatives and vmap pass through here.
    """
    of_q: list[Tensor] = []
    of_k: dict[tuple[int, int], Tensor] = {}
    of_v: dict[tuple[int, int], Tensor] = {}
    shared: list[Tensor] = []
    for tile, (gq, gk, gv, *rest) in zip(cut, pieces, strict=True):
        of_q.append(gq)
        for total, piece in ((of_k, gk), (of_v, gv)):
            whole = pad(piece, (0, 0, tile.keys.start, S - tile.keys.stop))
            corner = _corner(tile)
            total[corner] = total[corner] + whole if corner in total else whole
        shared = [x + y for x, y in zip(shared, rest, strict=True)] if shared else rest
    return join_rows(cut, of_q), _join(of_k), _join(of_v), *shared


class _LogPrior:
    """log u tile by tile; keeps the last dense part, which the next heads may share."""

    def __init__(self, prior: Prior | None, q: Tensor, k: Tensor) -> None:
        self.prior, self.q, self.k = prior, q, k
        self.last: tuple[object, Tensor] | None = None

    def add_(self, x: Tensor, tile: Tile, factor: float) -> Tensor:
        """x (b, h, t, s) with factor * log u added where it is not 0."""
        if self.prior is None:
            return x
        T, S = self.q.shape[2], self.k.shape[2]
        rows, keys = tile.rows, tile.keys
        low, high = self.prior.zero_range(rows.start + S - T, rows.stop - 1 + S - T, S)
        low, high = max(low, keys.start), min(high, keys.stop)
        sides = [keys] if low >= high else [slice(keys.start, low), slice(high, keys.stop)]
        for side in sides:
            if side.start < side.stop:
                log_u = self.dense(tile._replace(keys=side), x.dtype)
                part = x[..., side.start - keys.start : side.stop - keys.start]
                part.add_(log_u, alpha=factor)
        return x

    def dense(self, tile: Tile, dtype: torch.dtype) -> Tensor:
        """log u on a tile, which broadcasts to (b, h, t, s)."""
        assert self.prior is not None
        where = (tile.rows.start, tile.rows.stop, tile.keys.start, tile.keys.stop)
        if self.last is not None and self.last[0] == where:
            return self.last[1]
        log_u = self.prior.dense(tile.block(self.q, self.k), dtype)
        if not any(self.prior.varies()):
            self.last = where, log_u  # every head of every sequence has the same
        return log_u


def _join(columns: dict[tuple[int, int], Tensor]) -> Tensor:
    """Columns by their corners (first sequence, first group), side by side."""
    sequences: dict[int, list[Tensor]] = {}
    for (b, _), column in columns.items():
        sequences.setdefault(b, []).append(column)
    return torch.cat([torch.cat(groups, 1) for groups in sequences.values()])


def _corner(tile: Tile) -> tuple[int, int]:
    return tile.batch.start, tile.groups.start


def _parts(length: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, length)) for i in range(0, max(length, 1), size)]


def _key_range(prior: Prior | None, rows: slice, T: int, S: int) -> slice:
    if prior is None or rows.start == rows.stop:
        return slice(0, S)
    return slice(*prior.key_range(rows.start + S - T, rows.stop - 1 + S - T, S))
