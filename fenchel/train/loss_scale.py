"""Loss scaling: gradients that fit into float16.

Activations and their gradients are computed in float16, weights and their steps in float32. A
gradient of 1e-8 is 0 in float16; of the loss times c = 65536 it is 6.6e-4, and dividing by c in
float32 gives it back. c is halved when a gradient overflows and doubled after 2000 steps in which
none did (``torch.amp.GradScaler``). bfloat16 has float32's range and needs none of this.

A step whose gradient overflows is not skipped: it is computed again at half the scale, as often as
needed while the scale is above 1, so that a step remains a function of its number, the weights
and the scale. A gradient that is not finite at scale 1 has another cause: the scale is restored to
what it was, and the step is skipped like any other that is not finite. The scale and the number of
steps since it last changed are part of a checkpoint.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

_GROWTH_INTERVAL = 2000


class LossScale(NamedTuple):
    """The state of the scaler, all that the next step depends on."""

    factor: float
    """The factor on the loss."""
    age: int
    """Steps since the factor changed."""

    def after(self, *, finite: bool) -> "LossScale":
        """The state after a gradient that was finite or not, as torch.amp.GradScaler has it.

        >>> LossScale(8.0, 1999).after(finite=True), LossScale(8.0, 7).after(finite=False)
        (LossScale(factor=16.0, age=0), LossScale(factor=4.0, age=0))
        """
        if not finite:
            return LossScale(self.factor / 2.0, 0)
        grows = self.age + 1 == _GROWTH_INTERVAL
        return LossScale(2.0 * self.factor, 0) if grows else LossScale(self.factor, self.age + 1)


class LossScaler:
    """Scales the loss, and adapts the scale to overflows."""

    def __init__(self, device: torch.device, parameters: Iterable[nn.Parameter]) -> None:
        self.scaler = torch.amp.GradScaler(device.type)
        # The scaler unscales an optimiser, not a list of parameters. The optimisers of the run may
        # hold a parameter twice, and its gradient would be divided twice.
        self._all_parameters = torch.optim.SGD(parameters, lr=0.0)

    def gradient(
        self, accumulate: Callable[[], float], unscale: Callable[[float], bool] | None = None
    ) -> float:
        """Call ``accumulate``, which calls ``backward``, until no gradient overflows; its loss.

        ``unscale`` divides the gradients by a factor and returns whether they are finite, where
        they are not those of the parameters: several processes send them to owners.
        """
        before = self.scale
        while True:
            scale = self.scaler.get_scale()
            loss = accumulate()
            if unscale is None:
                self.scaler.unscale_(self._all_parameters)
                self.scaler.update()  # halves it if a gradient was not finite
            else:
                self.scale = self.scale.after(finite=unscale(scale))
            halved = self.scaler.get_scale()
            if halved >= scale:
                return loss
            if halved < 1.0 or not math.isfinite(loss):
                self.scale = before
                return loss
            self._all_parameters.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of the loss times the scale."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    @property
    def scale(self) -> LossScale:
        """The factor and its age."""
        state = self.scaler.state_dict()
        return LossScale(state["scale"], state["_growth_tracker"])

    @scale.setter
    def scale(self, scale: LossScale) -> None:
        state = {"scale": scale.factor, "_growth_tracker": scale.age}
        self.scaler.load_state_dict(self.scaler.state_dict() | state)
