"""What a model's attention looks like on some ids: its health in numbers, its maps.

The model attends by a fused kernel that keeps no weights, so its queries and keys are taken as
it reads (``observe``) and the weights of these few sequences are computed beside it.

Shapes: ids (B, T); maps (layers, H, T, T), row t the weights of query t.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fenchel.attention import Causal, attend, health
from fenchel.model import Transformer


@torch.no_grad()
def attention_health(model: nn.Module, ids_BT: Tensor) -> dict[str, list[float]]:
    """Largest score, entropy, effective number of keys and support, one number a layer each."""
    assert isinstance(model, Transformer)
    found: list[Any] = []

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        found.append(health(q, k, choice=model.blocks[layer].attention.choice, prior=Causal()))

    model(ids_BT, observe=observe, last=True)
    names = found[0]._fields
    return {f"attention/{name}": [float(getattr(h, name)) for h in found] for name in names}


@torch.no_grad()
def attention_maps(model: Transformer, ids_1T: Tensor) -> Tensor:
    """Every head's weights on one sequence: (1, T) -> (layers, H, T, T)."""
    maps: list[Tensor] = []

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        choice = model.blocks[layer].attention.choice
        _, weights = attend(q, k, v, choice=choice, prior=Causal(), return_weights=True)
        maps.append(weights[0])

    model.eval()
    model(ids_1T, observe=observe, last=True)
    return torch.stack(maps)
