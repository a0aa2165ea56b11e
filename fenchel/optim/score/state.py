"""What the score optimisers remember between steps, and how it comes back.

Per query weight: "reach", the ball's bound on every head; for ScoreDescent also the momenta of
queries and keys, head by head. All in float32 or better, whatever the weights are in.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fenchel.optim.score.pairs import Pair

OURS = ("reach", "query_momentum", "key_momentum")


def stacked_reach(state: Mapping[Any, Mapping[str, Any]], pairs: list[Pair]) -> Tensor | None:
    """The ball's bounds of the layers of a stack, (L, H); None when one has none yet."""
    found = [state.get(pair.query.weight, {}).get("reach") for pair in pairs]
    known = [reach for reach in found if reach is not None]
    return torch.stack(known) if len(known) == len(pairs) else None


def keep_reach(state: Any, pairs: list[Pair], reach: Tensor | None) -> None:
    """Remember the bounds of a stack, layer by layer."""
    if reach is not None:
        for pair, of_layer in zip(pairs, reach.unbind(), strict=True):
            state[pair.query.weight]["reach"] = of_layer


def keep_dtypes(optimiser: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Put what we remember back as it was saved, on the device of its parameter."""
    indices = chain.from_iterable(group["params"] for group in saved["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimiser.param_groups)
    for index, param in zip(indices, params, strict=True):
        for name, value in saved["state"].get(index, {}).items():
            if name in OURS:
                optimiser.state[param][name] = value.to(param.device, copy=True)
