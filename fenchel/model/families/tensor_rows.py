"""Rows of the table of names: where one of our tensors lies in theirs, and how.

    SAME           number for number
    TURNED         theirs maps by x W, ours by x W^T (GPT-2)
    STACKED        our queries, keys and values in one map are three of theirs
    PAIRED         our keys and values in one map are two of theirs
    HEAD_BY_HEAD   theirs has head 1's query, key and value, then head 2's (NeoX, BLOOM)

``join`` gives ours, ``split`` theirs; each undoes the other. All but SAME copy.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fenchel.model.config import ModelConfig


class Layout(Protocol):
    """How the numbers of one of our tensors layout in theirs."""

    def join(self, theirs: Sequence[Tensor], config: ModelConfig) -> Tensor:
        """Theirs to ours."""

    def split(self, ours: Tensor, config: ModelConfig) -> list[Tensor]:
        """Ours to theirs."""


class Row(NamedTuple):
    """A row of the second table; {} stands for the number of a layer."""

    ours: str
    theirs: tuple[str, ...]
    layout: Layout
    when: Callable[[ModelConfig], bool] = lambda _: True


class _Same:
    """Number for number."""

    def join(self, theirs: Sequence[Tensor], config: ModelConfig) -> Tensor:  # noqa: ARG002
        return theirs[0]

    def split(self, ours: Tensor, config: ModelConfig) -> list[Tensor]:  # noqa: ARG002
        return [ours]


class _Turned:
    """Theirs maps by x W, ours by x W^T; copied, since a checkpoint is saved row by row."""

    def join(self, theirs: Sequence[Tensor], config: ModelConfig) -> Tensor:  # noqa: ARG002
        return theirs[0].t().contiguous()

    def split(self, ours: Tensor, config: ModelConfig) -> list[Tensor]:  # noqa: ARG002
        return [ours.t()]


class _Stacked:
    """Queries, keys and values are one map of ours and three of theirs; joined by copying."""

    def join(self, theirs: Sequence[Tensor], config: ModelConfig) -> Tensor:  # noqa: ARG002
        return torch.cat(list(theirs))

    def split(self, ours: Tensor, config: ModelConfig) -> list[Tensor]:
        H, G, D = config.heads, config.groups, config.head_width
        return list(torch.split(ours, [H * D, G * D, G * D]))


class _Paired:
    """Keys and values alone are one map of ours and two of theirs; joined by copying."""

    def join(self, theirs: Sequence[Tensor], config: ModelConfig) -> Tensor:  # noqa: ARG002
        return torch.cat(list(theirs))

    def split(self, ours: Tensor, config: ModelConfig) -> list[Tensor]:  # noqa: ARG002
        return list(ours.chunk(2))


class _HeadByHead:
    """Theirs has head 1's query, key and value, then head 2's; ours all queries first."""

    def join(self, theirs: Sequence[Tensor], config: ModelConfig) -> Tensor:
        H, D = config.heads, config.head_width
        x = theirs[0]
        return x.reshape(H, 3, D, *x.shape[1:]).transpose(0, 1).reshape(x.shape)

    def split(self, ours: Tensor, config: ModelConfig) -> list[Tensor]:
        H, D = config.heads, config.head_width
        x = ours.reshape(3, H, D, *ours.shape[1:]).transpose(0, 1)
        return [x.reshape(ours.shape)]


SAME, TURNED, STACKED, PAIRED = _Same(), _Turned(), _Stacked(), _Paired()
HEAD_BY_HEAD = _HeadByHead()


def both(ours: str, theirs: str | Sequence[str], layout: Layout = SAME) -> tuple[Row, Row]:
    """Rows for the weight and the bias of a map or a norm."""
    names = (theirs,) if isinstance(theirs, str) else tuple(theirs)
    weight = Row(f"{ours}.weight", tuple(f"{n}.weight" for n in names), layout)
    return weight, Row(f"{ours}.bias", tuple(f"{n}.bias" for n in names), _of_bias(layout))


def weight(ours: str, theirs: str, layout: Layout = SAME) -> Row:
    """The row for a map or a table without bias."""
    return Row(f"{ours}.weight", (f"{theirs}.weight",), layout)


def _of_bias(layout: Layout) -> Layout:
    return SAME if layout is TURNED else layout
