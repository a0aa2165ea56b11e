"""Switches that keep attention stable while a step is taken.

    entropy_floor    heads below it are pushed up: the loss of a part of the step gains
                     entropy_weight * mean over layers and heads of max(0, floor - H_head)^2
    qk_clip          after the step, heads whose largest score in it passed the limit are scaled
                     back (fenchel/optim/qk_clip.py)

Both need the queries and keys of the forward pass, which the model shows as it reads. What they
do is a function of the step alone, so a run that is resumed needs nothing of them. QK-norm,
soft-capping and sigma-reparametrisation change the model instead, and are its settings.
"""

from typing import cast

import torch
from torch import Tensor, nn

from fenchel.optim.entropy import entropy_penalty, head_entropy
from fenchel.optim.layers import Projected, attention_layers, why_not_clip, why_not_entropy
from fenchel.optim.qk_clip import largest_scores, qk_clip_
from fenchel.train.config import TrainConfig


class Stability:
    """What one step sees of attention, and does about it."""

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self.limit, self.floor = config.qk_clip, config.entropy_floor
        self.weight = config.entropy_weight
        self.layers = attention_layers(model)
        if self.limit is not None and (reason := why_not_clip(model)):
            raise ValueError(f"qk_clip scales query and key weights, and {reason}; choose one.")
        if self.floor and (reason := why_not_entropy(model)):
            raise ValueError(f"entropy_floor cannot serve this model: {reason}.")
        self.begin()

    def begin(self) -> None:
        """Forget the step before."""
        self._entropies: list[Tensor] = []
        self._largest: dict[nn.Module, Tensor] = {}  # a module may serve several layers
        self._told: dict[str, Tensor] = {}

    def observe(self, number: int, q: Tensor, k: Tensor, _v: Tensor) -> None:
        """Look at the queries (B, H, T, D) and keys (B, G, S, D) of one layer."""
        layer = self.layers[number]
        if self.floor:
            self._entropies.append(
                head_entropy(
                    q,
                    k,
                    choice=layer.choice,
                    prior=layer.prior,
                    scale=layer.scale,
                    softcap=layer.softcap,
                )
            )
        if self.limit is not None:
            found_H = largest_scores(q, k, prior=layer.prior, scale=layer.scale)
            before_H = self._largest.get(layer.attention, found_H)
            self._largest[layer.attention] = torch.maximum(before_H, found_H)

    def penalty(self, share: float) -> Tensor | float:
        """What the part just read, ``share`` of the step, adds to the loss."""
        if not self.floor:
            return 0.0
        found = share * self.weight * entropy_penalty(torch.cat(self._entropies), self.floor)
        self._entropies = []
        self._told["entropy_penalty"] = self._told.get("entropy_penalty", 0.0) + found.detach()
        return found

    def settle(self) -> None:
        """After the weights have moved: scale back what was too large."""
        if self.limit is None:
            return
        over = [
            qk_clip_(cast(Projected, attention), largest_H, self.limit)
            for attention, largest_H in self._largest.items()
        ]
        self._told["clipped_heads"] = torch.cat(over).sum()

    def told(self) -> dict[str, float]:
        """The penalty of the step, and how many heads were scaled back after it."""
        return {name: float(value) for name, value in self._told.items()}
