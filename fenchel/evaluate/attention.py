"""What a model's attention looks like on some ids: its health in numbers, its maps.

The model attends by a fused kernel that keeps no weights, so its queries and keys are taken as
it reads (``observe``), and what each layer asks of ``attend`` with them (its map, prior, scale, cap
and sink) is computed beside it for these few sequences.

Shapes: ids (B, T); maps (layers, H, T, T), row t the weights of query t.
"""

from typing import Any

import torch
from torch import Tensor

from fenchel.attention import HeadHealth, Health, attend, healths
from fenchel.model import Transformer, evaluating
from fenchel.model.attention import Question


@torch.no_grad()
def attention_health(model: Transformer, ids_BT: Tensor) -> dict[str, list[Any]]:
    """The numbers of fenchel/attention/health.py: one a layer, and under head_ a list a layer."""
    found = [
        healths(
            asked.q,
            asked.k,
            choice=asked.choice,
            prior=asked.prior,
            scale=asked.scale,
            softcap=asked.softcap,
        )
        for asked in questions(model, ids_BT)
    ]
    told = {f"attention/{name}": [getattr(h, name) for h, _ in found] for name in Health._fields}
    heads = {name: [getattr(h, name) for _, h in found] for name in HeadHealth._fields}
    return told | {f"attention/head_{name}": values for name, values in heads.items()}


@torch.no_grad()
def attention_maps(model: Transformer, ids_1T: Tensor) -> Tensor:
    """Every head's weights on one sequence: (1, T) -> (layers, H, T, T)."""
    B, T = ids_1T.shape
    if B != 1:
        raise ValueError(f"maps are drawn of one sequence at a time, got {B}.")
    maps = [
        attend(**asked._asdict(), return_weights=True)[1][0, ..., -T:]  # a sink stands before them
        for asked in questions(model, ids_1T)
    ]
    return torch.stack(maps)


def questions(model: Transformer, ids_BT: Tensor) -> list[Question]:
    """What every layer asks of ``attend`` as it reads some ids."""
    asked: list[Question] = []

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        asked.append(model.question(layer, q, k, v))

    with evaluating(model):
        model(ids_BT, observe=observe, last=True)
    return asked
