"""What the pairs leave of a model's parameters, for another optimiser.

A fused weight holds rows of queries, keys and values. The values' rows become a leaf of their own
that lies in the same memory: moving the leaf moves the rows. Just before the other optimiser
steps, each leaf is handed the rows of the gradient that belong to it.

    pairs = attention_pairs(model)
    leaves = leftover(pairs, model.parameters())
    muon = Muon([leaf.part for leaf in leaves if leaf.part.ndim == 2])
    hand_over(muon, leaves)

Leaves point into memory, so they are made after the model is where it will stay.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fenchel.optim.score.pairs import Pair


class Leaf(NamedTuple):
    """A parameter, or those of its rows that no pair moves."""

    part: nn.Parameter
    whole: nn.Parameter
    cut: tuple[slice, ...] | None
    """Where the part lies in the whole; None when it is all of it."""


def leftover(pairs: Iterable[Pair], parameters: Iterable[nn.Parameter]) -> list[Leaf]:
    """The parameters without the rows of the pairs, in order; what is all theirs is left out."""
    taken: dict[Tensor, list[tuple[int, int, int]]] = defaultdict(list)
    for pair in pairs:
        for rows in (pair.query, pair.key):
            taken[rows.weight].append((rows.start, rows.stop, int(rows.columns)))
            if rows.bias is not None:
                taken[rows.bias].append((rows.start, rows.stop, 0))
    return [leaf for p in parameters for leaf in _leaves(p, taken.get(p, []))]


def hand_over(optimiser: torch.optim.Optimizer, leaves: Iterable[Leaf]) -> None:
    """Give every leaf that ``optimiser`` moves its gradient, whenever it is about to step."""
    held = {p for group in optimiser.param_groups for p in group["params"]}
    parts = [leaf for leaf in leaves if leaf.cut is not None and leaf.part in held]

    def give(*_: Any) -> None:
        for part, whole, cut in parts:
            part.grad = None if whole.grad is None else whole.grad[cut]

    if parts:
        optimiser.register_step_pre_hook(give)


def _leaves(p: nn.Parameter, taken: list[tuple[int, int, int]]) -> list[Leaf]:
    if not taken:
        return [Leaf(p, p, None)]
    axis = taken[0][2]
    edges, begin = [], 0
    for start, stop, _ in [*sorted(taken), (p.shape[axis], p.shape[axis], axis)]:
        if start > begin:
            edges.append((begin, start))
        begin = max(begin, stop)
    cuts = [(*(slice(None),) * axis, slice(start, stop)) for start, stop in edges]
    return [Leaf(nn.Parameter(p.detach()[cut], p.requires_grad), p, cut) for cut in cuts]
