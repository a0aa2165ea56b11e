"""Loss scaling: gradients that float16 can hold.

Activations and their gradients are computed in float16, weights and their steps in float32. A
gradient of 1e-8 is 0 in float16; of the loss times c = 65536 it is 6.6e-4, and dividing by c in
float32 gives it back. c is halved when a gradient overflows and doubled after 2000 steps in which
none did (``torch.amp.GradScaler``). bfloat16 has float32's range and needs none of this.

A step whose gradient overflows is not lost here: it is read again at half the scale, as often as
needed while the scale is above 1, so that a step remains a function of its number, the weights
and the scale. What is not finite at scale 1 was not made so by scaling: the scale is put back to
what it was, and the step is broken like any other. The scale and the count of steps since it last
changed are part of a checkpoint.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.optim import Together


class Scale(NamedTuple):
    """All that the next step depends on."""

    factor: float
    """What the loss is multiplied by."""
    age: int
    """Steps since it changed."""


class Scaling:
    """The scale of the loss, and how it changes."""

    def __init__(self, device: torch.device) -> None:
        self.scaler = torch.amp.GradScaler(device.type)

    def gradient(self, read: Callable[[], float], optimiser: Together) -> float:
        """Have ``read`` add up a gradient by ``backward`` until none overflows; its loss."""
        before = self.scale
        while True:
            tried = self.scaler.get_scale()
            loss = read()
            self._unscale(optimiser)
            left = self.scaler.get_scale()
            if left >= tried:
                return loss
            if left < 1.0 or not math.isfinite(loss):
                self.scale = before
                return loss
            optimiser.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """The gradient of the loss times the scale, added to what is there."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    @property
    def scale(self) -> Scale:
        """The scale and its age."""
        state = self.scaler.state_dict()
        return Scale(state["scale"], state["_growth_tracker"])

    @scale.setter
    def scale(self, scale: Scale) -> None:
        state = {"scale": scale.factor, "_growth_tracker": scale.age}
        self.scaler.load_state_dict(self.scaler.state_dict() | state)

    def _unscale(self, optimiser: Together) -> None:
        """Divide every gradient by the scale, and let the scale learn whether one overflowed."""
        for member in optimiser.members:
            if any(p.grad is not None for group in member.param_groups for p in group["params"]):
                self.scaler.unscale_(member)
        self.scaler.update()
