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
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class LossScale(NamedTuple):
    """All that the next step depends on."""

    factor: float
    """What the loss is multiplied by."""
    age: int
    """Steps since it changed."""


class LossScaler:
    """The scale of the loss, and how it changes."""

    def __init__(self, device: torch.device, parameters: Iterable[nn.Parameter]) -> None:
        self.scaler = torch.amp.GradScaler(device.type)
        # What the scaler takes in place of a list. Optimisers themselves may hold a parameter
        # twice, and its gradient would be divided twice.
        self._every = torch.optim.SGD(parameters, lr=0.0)

    def gradient(self, read: Callable[[], float]) -> float:
        """Have ``read`` add up a gradient by ``backward`` until none overflows; its loss."""
        before = self.scale
        while True:
            tried = self.scaler.get_scale()
            loss = read()
            self.scaler.unscale_(self._every)
            self.scaler.update()  # halves it if a gradient was not finite
            left = self.scaler.get_scale()
            if left >= tried:
                return loss
            if left < 1.0 or not math.isfinite(loss):
                self.scale = before
                return loss
            self._every.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """The gradient of the loss times the scale, added to what is there."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    @property
    def scale(self) -> LossScale:
        """The scale and its age."""
        state = self.scaler.state_dict()
        return LossScale(state["scale"], state["_growth_tracker"])

    @scale.setter
    def scale(self, scale: LossScale) -> None:
        state = {"scale": scale.factor, "_growth_tracker": scale.age}
        self.scaler.load_state_dict(self.scaler.state_dict() | state)
