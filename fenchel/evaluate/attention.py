"""What a model's attention looks like on some ids: its health in numbers, its maps.

The model attends by a fused kernel that keeps no weights, so its queries and keys are taken as
it reads (``observe``) and the weights of these few sequences are computed beside it.

Shapes: ids (B, T); maps (layers, H, T, T), row t the weights of query t.
"""

from typing import Any

import torch
from torch import Tensor

from fenchel.attention import Causal, HeadHealth, Health, attend, healths
from fenchel.choice import named
from fenchel.model import Transformer, evaluating


@torch.no_grad()
def attention_health(model: Transformer, ids_BT: Tensor) -> dict[str, list[Any]]:
    """The numbers of fenchel/attention/health.py: one a layer, and under head_ a list a layer."""
    found: list[Health] = []
    by_head: list[HeadHealth] = []

    def observe(layer: int, q: Tensor, k: Tensor, _v: Tensor) -> None:
        one: Any = model.blocks[layer * len(model.blocks) // model.config.layers].attention
        whole, heads = healths(
            q, k, choice=one.choice, prior=one.shape, scale=one.scale, softcap=one.softcap
        )
        found.append(whole)
        by_head.append(heads)

    with evaluating(model):
        model(ids_BT, observe=observe, last=True)
    told = {f"attention/{name}": [getattr(h, name) for h in found] for name in Health._fields}
    heads = {name: [getattr(h, name) for h in by_head] for name in HeadHealth._fields}
    return told | {f"attention/head_{name}": values for name, values in heads.items()}


@torch.no_grad()
def attention_maps(model: Transformer, ids_1T: Tensor) -> Tensor:
    """Every head's weights on one sequence: (1, T) -> (layers, H, T, T)."""
    if ids_1T.shape[0] != 1:
        raise ValueError(f"maps are drawn of one sequence at a time, got {len(ids_1T)}.")
    choice = named(model.config.choice, alpha=model.config.alpha)
    maps: list[Tensor] = []

    def observe(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        _, weights = attend(q, k, v, choice=choice, prior=Causal(), return_weights=True)
        maps.append(weights[0])

    with evaluating(model):
        model(ids_1T, observe=observe, last=True)
    return torch.stack(maps)
