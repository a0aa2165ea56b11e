"""Rows of a family's table of tensor names: the tensors that hold one of ours, and in what layout.

    SAME               the same numbers in the same order
    TRANSPOSED         theirs computes x W, ours x W^T (GPT-2)
    FUSED_QKV          queries, keys and values are one matrix here and three there
    FUSED_KV           keys and values are one matrix here and two there
    INTERLEAVED_QKV    theirs has query, key and value of head 1, then of head 2 (NeoX, BLOOM)

``join`` maps theirs to ours, ``split`` ours to theirs; each inverts the other. All but SAME copy.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fenchel.model.config import ModelConfig


class Layout(Protocol):
    """How one of our tensors is laid out in the tensors of a family."""

    def join(self, theirs: Sequence[Tensor], config: ModelConfig) -> Tensor:
        """Theirs to ours."""

    def split(self, ours: Tensor, config: ModelConfig) -> list[Tensor]:
        """Ours to theirs."""


class Row(NamedTuple):
    """One of our tensors and those of the family that hold it; {} is the number of a layer."""

    ours: str
    theirs: tuple[str, ...]
    layout: Layout
    when: Callable[[ModelConfig], bool] = lambda _: True


class _Same:
    """The same numbers in the same order."""

    def join(self, theirs: Sequence[Tensor], config: ModelConfig) -> Tensor:  # noqa: ARG002
        return theirs[0]

    def split(self, ours: Tensor, config: ModelConfig) -> list[Tensor]:  # noqa: ARG002
        return [ours]


class _Transposed:
    """Theirs computes x W, ours x W^T; copied, since safetensors needs contiguous tensors."""

    def join(self, theirs: Sequence[Tensor], config: ModelConfig) -> Tensor:  # noqa: ARG002
        return theirs[0].t().contiguous()

    def split(self, ours: Tensor, config: ModelConfig) -> list[Tensor]:  # noqa: ARG002
        return [ours.t()]


class _FusedQKV:
    """Queries, keys and values are one matrix of ours and three of theirs; joined by a copy."""

    def join(self, theirs: Sequence[Tensor], config: ModelConfig) -> Tensor:  # noqa: ARG002
        return torch.cat(list(theirs))

    def split(self, ours: Tensor, config: ModelConfig) -> list[Tensor]:
        H, G, D = config.heads, config.groups, config.head_width
        return list(torch.split(ours, [H * D, G * D, G * D]))


class _FusedKV:
    """Keys and values are one matrix of ours and two of theirs; joined by a copy."""

    def join(self, theirs: Sequence[Tensor], config: ModelConfig) -> Tensor:  # noqa: ARG002
        return torch.cat(list(theirs))

    def split(self, ours: Tensor, config: ModelConfig) -> list[Tensor]:  # noqa: ARG002
        return list(ours.chunk(2))


class _InterleavedQKV:
    """Theirs has query, key and value of head 1, then of head 2; ours has all queries first."""

    def join(self, theirs: Sequence[Tensor], config: ModelConfig) -> Tensor:
        H, D = config.heads, config.head_width
        x = theirs[0]
        return x.reshape(H, 3, D, *x.shape[1:]).transpose(0, 1).reshape(x.shape)

    def split(self, ours: Tensor, config: ModelConfig) -> list[Tensor]:
        H, D = config.heads, config.head_width
        x = ours.reshape(3, H, D, *ours.shape[1:]).transpose(0, 1)
        return [x.reshape(ours.shape)]


SAME, TRANSPOSED, FUSED_QKV, FUSED_KV = _Same(), _Transposed(), _FusedQKV(), _FusedKV()
INTERLEAVED_QKV = _InterleavedQKV()


def weight_and_bias(
    ours: str, theirs: str | Sequence[str], layout: Layout = SAME
) -> tuple[Row, Row]:
    """Rows for the weight and the bias of a linear map or a norm."""
    names = (theirs,) if isinstance(theirs, str) else tuple(theirs)
    weight = Row(f"{ours}.weight", tuple(f"{n}.weight" for n in names), layout)
    return weight, Row(f"{ours}.bias", tuple(f"{n}.bias" for n in names), _bias_layout(layout))


def weight(ours: str, theirs: str, layout: Layout = SAME) -> Row:
    """The row for the weight of a linear map, an embedding or a norm without a bias."""
    return Row(f"{ours}.weight", (f"{theirs}.weight",), layout)


def _bias_layout(layout: Layout) -> Layout:
    return SAME if layout is TRANSPOSED else layout
