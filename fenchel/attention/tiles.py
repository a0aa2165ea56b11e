"""The square of scores (B, H, T, S) cut into tiles of whole rows, and put together again.

A tile takes some sequences, some groups of heads and some rows, with every key those rows can
reach. On a CPU it is as large as the cache; on a GPU as large as fills it. Tiles come in the order
sequences, groups, rows, and cover every query once; a key may lie in several tiles.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fenchel.attention.prior import Block, Prior

_CACHED = 1 << 18  # scores in a tile on a CPU: 1 MiB of float32, the cache of a core
_MANY = 1 << 26  # scores in a tile on a GPU: 256 MiB of float32
_FEWEST_ROWS = 16  # fewer would starve the matrix product


class Tile(NamedTuple):
    """Where a tile lies in q (batch, heads, rows) and in k and v (batch, groups, keys)."""

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

    def block(self, q: Tensor, k: Tensor) -> Block:
        """Where a prior is asked for it, in the square of q (B, H, T, D) on k (B, G, S, D)."""
        B, H, T, _ = q.shape
        return Block(B, H, T, k.shape[2], q.device, self.batch, self.heads, self.rows, self.keys)


def tiles(q: Tensor, k: Tensor, prior: Prior | None) -> list[Tile]:
    """The tiles of q (B, H, T, D) on k (B, G, S, D)."""
    (B, H, T, _), (_, G, S, _) = q.shape, k.shape
    R = H // G
    room = _CACHED if q.device.type == "cpu" else _MANY
    row = max(1, R * S)
    high = min(max(T, 1), max(room // row, _FEWEST_ROWS))
    many = max(1, room // (row * high)) if high >= T else 1
    groups = min(G, many)
    batch = max(1, many // G)
    return [
        Tile(b, g, slice(g.start * R, g.stop * R), rows, _reach(prior, rows, T, S))
        for b in _parts(B, batch)
        for g in _parts(G, groups)
        for rows in _parts(T, high)
    ]


def join_rows(cut: Sequence[Tile], pieces: Iterable[Tensor]) -> Tensor:
    """Pieces (b, h, t, .) of all tiles side by side: -> (B, H, T, .)."""
    columns: dict[tuple[int, int], list[Tensor]] = {}
    for tile, piece in zip(cut, pieces, strict=True):
        columns.setdefault(_corner(tile), []).append(piece)
    return _join({corner: torch.cat(rows, 2) for corner, rows in columns.items()})


def join_gradients(
    cut: Sequence[Tile], found: Iterable[Sequence[Tensor]], S: int
) -> tuple[Tensor, ...]:
    """What each tile found for q, for k, for v and for tensors that all share, put together.

    For q side by side, for the others summed, as they come and out of place: derivatives and vmap
    pass through here.
    """
    of_q: list[Tensor] = []
    of_k: dict[tuple[int, int], Tensor] = {}
    of_v: dict[tuple[int, int], Tensor] = {}
    shared: list[Tensor] = []
    for tile, (a, b, c, *rest) in zip(cut, found, strict=True):
        of_q.append(a)
        for total, piece in ((of_k, b), (of_v, c)):
            whole = pad(piece, (0, 0, tile.keys.start, S - tile.keys.stop))
            corner = _corner(tile)
            total[corner] = total[corner] + whole if corner in total else whole
        shared = [x + y for x, y in zip(shared, rest, strict=True)] if shared else rest
    return join_rows(cut, of_q), _join(of_k), _join(of_v), *shared


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


def _reach(prior: Prior | None, rows: slice, T: int, S: int) -> slice:
    if prior is None or rows.start == rows.stop:
        return slice(0, S)
    return slice(*prior.key_range(rows.start + S - T, rows.stop - 1 + S - T, S))
