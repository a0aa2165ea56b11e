"""What a model's attention looks like on some ids: its health in numbers, its maps.

The model attends by a fused kernel that keeps no weights, so its queries and keys are taken as
it reads (``observe``) and the weights of these few sequences are computed beside it.

Shapes: ids (B, T); maps (layers, H, T, T), row t the weights of query t.
"""

import torch
from torch import Tensor

from fenchel.attention import Causal, Health, attend, health
from fenchel.choice import named
from fenchel.model import Transformer, evaluating


@torch.no_grad()
def attention_health(model: Transformer, ids_BT: Tensor) -> dict[str, list[float]]:
    """Largest score, entropy, effective number of keys and support, one number a layer each."""
    choice = named(model.config.choice, alpha=model.config.alpha)
    found: list[Health] = []

    def observe(_layer: int, q: Tensor, k: Tensor, _v: Tensor) -> None:
        found.append(health(q, k, choice=choice, prior=Causal()))

    with evaluating(model):
        model(ids_BT, observe=observe, last=True)
    return {f"attention/{name}": [getattr(h, name) for h in found] for name in Health._fields}


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
