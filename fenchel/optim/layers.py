"""The attention layers of a model, and how each of them attends.

A model shows the queries and keys of a layer as it reads (``observe``); what becomes of them, the
map, the prior, the scale, stands in the layer itself. Layers are known by what they have, so that
this page knows no model by name.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from fenchel.attention.prior import Prior
from fenchel.choice import Choice


class Projected(Protocol):
    """Attention with one map for queries, keys and values, rows in that order."""

    heads: int
    groups: int
    head_width: int
    qkv: nn.Linear


@dataclass(frozen=True)
class Layer:
    """One attention layer: its module and the arguments of ``attend`` that it uses."""

    attention: Any
    choice: Choice
    prior: Prior | None
    scale: float | None
    softcap: float | None


def attention_layers(model: nn.Module) -> list[Layer]:
    """The layers in the order of their numbers, as ``observe`` is told them."""
    blocks: Any = getattr(model, "blocks", ())
    found = [block.attention for block in blocks if hasattr(block, "attention")]
    if not found:
        raise ValueError("the model has no attention layer of the kind that fenchel.model builds.")
    config: Any = model.config
    each = config.layers // len(found)  # a block may serve several layers in a row
    return [Layer(a, a.choice, a.shape, a.scale, a.softcap) for a in found for _ in range(each)]


def why_not_entropy(model: nn.Module) -> str | None:
    """Why the scores of this model are not those of its q and k alone, or None if they are."""
    config: Any = model.config
    if config.positions in ("alibi", "buckets"):
        return f'positions="{config.positions}" add to its scores'
    if config.sinks:
        return "its heads may look at nothing (sinks)"
    if config.scores != "dot":
        return f'its scores are of kind "{config.scores}"'
    return None


def why_not_clip(model: nn.Module) -> str | None:
    """Why scaling the query and key weights would not scale the scores, or None if it does."""
    config: Any = model.config
    for name in ("qk_norm", "sigma_reparam"):
        if getattr(config, name):
            return f"{name} would undo it"
    return None if config.scores == "dot" else f'its scores are of kind "{config.scores}"'
