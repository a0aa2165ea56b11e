"""Prompts of unequal lengths as one batch.

Shorter ones are filled on the left, so that all end together and the next token of each is
read at the same step. The fill is absent: its keys are forbidden and positions do not count
it, so a prompt in a batch is read as it would be alone.

Shapes: B prompts of lengths n_b become ids (B, T), T the largest n_b; present (B, T) is False
at the fill, or None when there is none.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FILL = 0
"""Any id does: what stands there is never looked at."""


class Prompts(NamedTuple):
    """Ids and where they are real."""

    ids: Tensor
    present: Tensor | None


def side_by_side(prompts: Tensor | Sequence[Tensor]) -> Prompts:
    """A batch (B, T), or prompts of one axis each, filled to the longest."""
    if isinstance(prompts, Tensor):
        if prompts.ndim != 2 or prompts.shape[1] < 1:
            raise ValueError(
                f"ids should be (B, T) with T at least 1, got {tuple(prompts.shape)}; "
                "prompts of different lengths go in a list."
            )
        return Prompts(prompts, None)
    shapes = [tuple(one.shape) for one in prompts]
    if not shapes or any(len(shape) != 1 or shape[0] < 1 for shape in shapes):
        raise ValueError(f"a list of prompts needs tensors (T,) with T at least 1, got {shapes}.")
    lengths, T = [n for (n,) in shapes], max(n for (n,) in shapes)
    ids = prompts[0].new_full((len(lengths), T), FILL)
    for row, one in zip(ids, prompts, strict=True):
        row[T - len(one) :] = one
    if min(lengths) == T:
        return Prompts(ids, None)
    places = torch.arange(T, device=ids.device)
    return Prompts(ids, places >= T - torch.tensor(lengths, device=ids.device).unsqueeze(-1))


def seen(prompts: Prompts, vocabulary: int) -> Tensor:
    """Which tokens each prompt has: (B, V), True at those."""
    ids_BT, present_BT = prompts
    # The fill goes to a column of its own, which is cut off again.
    real_BT = ids_BT if present_BT is None else ids_BT.where(present_BT, vocabulary)
    seen_BV = torch.zeros(len(ids_BT), vocabulary + 1, dtype=torch.bool, device=ids_BT.device)
    return seen_BV.scatter_(1, real_BT.long(), True)[:, :vocabulary]
