"""The attention layers of a model, and how each of them attends.

A model shows the queries and keys of a layer as it reads (``observe``); what becomes of them, the
map, the prior, the scale, stands in the layer itself. Layers are found by what they have, so that
this page knows no model by name.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from fenchel.attention import Causal
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
    scale: float | None = None
    softcap: float | None = None


def attention_layers(model: nn.Module) -> dict[int, Layer]:
    """Layer number, as ``observe`` is told it, to the layer."""
    wanted = ("layer", "heads", "groups", "head_width", "qkv", "choice")
    found = [m for m in model.modules() if all(hasattr(m, name) for name in wanted)]
    if not found:
        raise ValueError("the model has no attention layer of the kind that fenchel.model builds.")
    return {int(m.layer): Layer(m, m.choice, Causal()) for m in found}  # type: ignore[arg-type]
