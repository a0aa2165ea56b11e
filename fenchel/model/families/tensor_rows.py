"""Rows of a family's table of tensor names: the tensors that hold one of ours, and in what layout.

    SAME               the same numbers in the same order
    REPEATED           the same numbers twice; the second tensor is the one that is computed with
    TRANSPOSED         theirs computes x W, ours x W^T (GPT-2, and the experts of gpt-oss)
    FUSED_QKV          queries, keys and values are one matrix here and three there
    FLIPPED_QKV        and the halves of each query and key change places: theirs rotate backwards
    FUSED_QK           queries and keys are one matrix here and two there; there are no values
    FUSED_KV           keys and values are one matrix here and two there
    FIRST_HALF,        one tensor there holds the rows of two of ours (gate and up of Phi-3)
    SECOND_HALF
    FIRST_ROWS,        and of every expert (Qwen3.5-MoE, Gemma 4)
    SECOND_ROWS
    EVEN, ODD          and their entries in turn; with _COLUMNS they are transposed too (gpt-oss)
    STACKED            experts are one tensor here and a list there (Qwen3-MoE)
    LAST_ROWS          theirs has rows before ours that no position uses (RoBERTa); written as zeros
    INTERLEAVED_QKV    theirs has query, key and value of head 1, then of head 2 (NeoX, BLOOM)
    GATED_QKV, GATE    as FUSED_QKV, and the rows of each query head are followed by those of its
                       output gate, which is another of ours (Qwen3.5)
    FILTER             a causal filter per channel: (C, K) here, (C, 1, K) there

``join`` maps theirs to ours, ``split`` ours to theirs; each inverts the other. All but SAME and the
halves copy.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.model.config import ModelConfig


class Layout(NamedTuple):
    """How one of our tensors is laid out in the tensors of a family."""

    join: Callable[[Sequence[Tensor], ModelConfig], Tensor]
    """Theirs to ours."""
    split: Callable[[Tensor, ModelConfig], list[Tensor]]
    """Ours to theirs."""
    parts: int = 1
    """How many of ours, equally large, one of theirs holds."""
    part: int = 0
    """The number of this one among them."""
    merge: Callable[[list[Tensor]], Tensor] = torch.cat
    """What ``split`` gives for all of them, to the one tensor that holds them."""
    alone: tuple[int, ...] = ()
    """Of several tensors, the numbers of those that hold this one of ours alone all the same."""


class Row(NamedTuple):
    """One of our tensors and those of the family that hold it; {} is the number of a layer.

    A name of theirs with {expert} stands for as many as there are experts.
    """

    ours: str
    theirs: tuple[str, ...]
    layout: Layout
    when: Callable[[ModelConfig], bool] = lambda _: True
    at: Callable[[ModelConfig, int], bool] = lambda _config, _layer: True
    """Which layers the row is for."""


def _split_qkv(ours: Tensor, config: ModelConfig) -> list[Tensor]:
    H, G, D = config.heads, config.groups, config.head_width
    return list(torch.split(ours, [H * D, G * D, G * D]))


def _split_qk(ours: Tensor, config: ModelConfig) -> list[Tensor]:
    return list(torch.split(ours, [n * config.head_width for n in (config.heads, config.groups)]))


def _flip(rows: Tensor, D: int) -> Tensor:
    """Rows of heads of width D, with the halves of each head exchanged."""
    heads = rows.reshape(-1, 2, D // 2, *rows.shape[1:])
    return heads.flip(1).reshape(rows.shape)


def _join_flipped(theirs: Sequence[Tensor], config: ModelConfig) -> Tensor:
    q, k, v = theirs
    D = config.head_width
    return torch.cat((_flip(q, D), _flip(k, D), v))


def _split_flipped(ours: Tensor, config: ModelConfig) -> list[Tensor]:
    q, k, v = _split_qkv(ours, config)
    return [_flip(q, config.head_width), _flip(k, config.head_width), v]


def _join_interleaved(theirs: Sequence[Tensor], config: ModelConfig) -> Tensor:
    x = theirs[0].reshape(config.heads, 3, config.head_width, *theirs[0].shape[1:])
    return x.transpose(0, 1).reshape(theirs[0].shape)


def _split_interleaved(ours: Tensor, config: ModelConfig) -> list[Tensor]:
    x = ours.reshape(3, config.heads, config.head_width, *ours.shape[1:])
    return [x.transpose(0, 1).reshape(ours.shape)]


SAME = Layout(lambda theirs, _: theirs[0], lambda ours, _: [ours])
# Copied: safetensors refuses tensors that share memory.
REPEATED = Layout(lambda theirs, _: theirs[1], lambda ours, _: [ours, ours.clone()])
# Copied: safetensors needs contiguous tensors.
TRANSPOSED = Layout(lambda theirs, _: theirs[0].mT.contiguous(), lambda ours, _: [ours.mT])
FUSED_QKV = Layout(lambda theirs, _: torch.cat(list(theirs)), _split_qkv)
FUSED_QK = Layout(FUSED_QKV.join, _split_qk)
FLIPPED_QKV = Layout(_join_flipped, _split_flipped)
FUSED_KV = Layout(lambda theirs, _: torch.cat(list(theirs)), lambda ours, _: list(ours.chunk(2)))
FIRST_HALF = Layout(lambda theirs, _: theirs[0].chunk(2)[0], lambda ours, _: [ours], 2, 0)
SECOND_HALF = Layout(lambda theirs, _: theirs[0].chunk(2)[1], lambda ours, _: [ours], 2, 1)


def _rows_of_experts(part: int) -> Layout:
    """A half of the rows (X, 2 F, M) of every expert."""

    def join(theirs: Sequence[Tensor], _: ModelConfig) -> Tensor:
        return theirs[0].chunk(2, 1)[part].contiguous()

    return Layout(join, lambda ours, _: [ours], 2, part, lambda parts: torch.cat(parts, 1))


FIRST_ROWS, SECOND_ROWS = (_rows_of_experts(part) for part in (0, 1))


def _every_second(first: int, *, transposed: bool) -> Layout:
    """Entries of the last axis from ``first`` on; those of the other part lie between them."""

    def join(theirs: Sequence[Tensor], _: ModelConfig) -> Tensor:
        part = theirs[0][..., first::2]
        return (part.mT if transposed else part).contiguous()

    def split(ours: Tensor, _: ModelConfig) -> list[Tensor]:
        return [ours.mT if transposed else ours]

    return Layout(join, split, 2, first, lambda parts: torch.stack(parts, -1).flatten(-2))


EVEN, ODD = (_every_second(n, transposed=False) for n in (0, 1))
EVEN_COLUMNS, ODD_COLUMNS = (_every_second(n, transposed=True) for n in (0, 1))
STACKED = Layout(lambda theirs, _: torch.stack(list(theirs)), lambda ours, _: list(ours.unbind()))
LAST_ROWS = Layout(
    lambda theirs, config: theirs[0][-config.context :],
    lambda ours, _: [torch.cat((ours.new_zeros(2, ours.shape[1]), ours))],
)
INTERLEAVED_QKV = Layout(_join_interleaved, _split_interleaved)


def _beside_gate(ours: Tensor, config: ModelConfig) -> Tensor:
    """Rows of all heads as (H, 1, D, ...)."""
    return ours.reshape(config.heads, 1, config.head_width, *ours.shape[1:])


def _query_or_gate(theirs: Tensor, config: ModelConfig, part: int) -> Tensor:
    """The rows of queries (0) or of gates (1), from those of both side by side per head."""
    heads = theirs.reshape(config.heads, 2, config.head_width, *theirs.shape[1:])
    return heads[:, part].reshape(-1, *theirs.shape[1:])


def _join_gated(theirs: Sequence[Tensor], config: ModelConfig) -> Tensor:
    q, k, v = theirs
    return torch.cat((_query_or_gate(q, config, 0), k, v))


def _split_gated(ours: Tensor, config: ModelConfig) -> list[Tensor]:
    q, k, v = _split_qkv(ours, config)
    return [_beside_gate(q, config), k, v]


def _side_by_side(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, 1).flatten(0, 2)


GATED_QKV = Layout(_join_gated, _split_gated, 2, 0, _side_by_side, alone=(1, 2))
GATE = Layout(
    lambda theirs, config: _query_or_gate(theirs[0], config, 1),
    lambda ours, config: [_beside_gate(ours, config)],
    *(2, 1, _side_by_side),
)
FILTER = Layout(lambda theirs, _: theirs[0].squeeze(1), lambda ours, _: [ours.unsqueeze(1)])


def weight_and_bias(
    ours: str, theirs: str | Sequence[str], layout: Layout = SAME
) -> tuple[Row, Row]:
    """Rows for the weight and the bias of a linear map or a norm."""
    names = (theirs,) if isinstance(theirs, str) else tuple(theirs)
    weight = Row(f"{ours}.weight", tuple(f"{n}.weight" for n in names), layout)
    layout = SAME if layout is TRANSPOSED else layout
    return weight, Row(f"{ours}.bias", tuple(f"{n}.bias" for n in names), layout)


def weight(ours: str, theirs: str, layout: Layout = SAME) -> Row:
    """The row for the weight of a linear map, an embedding or a norm without a bias."""
    return Row(f"{ours}.weight", (f"{theirs}.weight",), layout)
