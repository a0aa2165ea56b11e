"""First-order optimisers of torch, each under the name of its formula; combination; clipping.

With g the gradient at theta, eta the rate, mu the momentum and lambda the decay,

    sgd           v <- mu v + g               theta <- theta - eta v             (mu = 0: descent)
    sgd_average   v <- mu v + (1 - mu) g      theta <- theta - eta v
    nesterov      v <- mu v + g               theta <- theta - eta (g + mu v)

where g includes lambda theta. ``sgd_average`` at eta is ``sgd`` at (1 - mu) eta, and is implemented
that way (docs/maths/optimisers.md).

    m <- beta1 m + (1 - beta1) g              mh = m / (1 - beta1^t)
    v <- beta2 v + (1 - beta2) g^2            vh = v / (1 - beta2^t)

    adam_l2       g = gradient + lambda theta      theta <- theta - eta mh / (sqrt(vh) + eps)
    adamw         g = gradient      theta <- (1 - eta lambda) theta - eta mh / (sqrt(vh) + eps)

In all of them a parameter group may bring its own ``weight_decay`` and ``lr``.

``CombinedOptimiser`` steps several optimisers, each with its own parameters, as one.

``clip_`` clips by the global norm, one factor for all gradients, so that their direction stays:

    |g|^2 = sum over all parameters of the squares of their gradients,     g <- g min(1, c / |g|)

torch divides by |g| + 1e-6, so a gradient of 0 stays 0 and the clipped norm is c or slightly below.
When |g| is inf or nan no factor would help, and the product would spread the nan: the gradients
stay as they are, so that fenchel/train/step.py can name the parameter at fault.

Lessons: gradient_flow and optimisers. Loshchilov and Hutter (2019), Decoupled weight decay
regularization.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fenchel.files import printable

Params = Iterable[Tensor] | Iterable[dict[str, Any]]


def sgd(
    params: Params, *, lr: float, momentum: float = 0.0, weight_decay: float = 0.0
) -> torch.optim.SGD:
    """Descent along the decaying sum of gradients.

    >>> import torch
    >>> w = torch.nn.Parameter(torch.ones(1))
    >>> optimiser = sgd([w], lr=0.1)
    >>> (w**2).sum().backward()
    >>> optimiser.step(); w.data
    tensor([0.8000])
    """
    return torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=weight_decay)


def sgd_average(
    params: Params, *, lr: float, momentum: float = 0.9, weight_decay: float = 0.0
) -> torch.optim.SGD:
    """Descent along the decaying average of gradients; the rate in the groups is (1 - mu) lr.

    >>> import torch
    >>> round(sgd_average([torch.nn.Parameter(torch.ones(1))], lr=1.0).param_groups[0]["lr"], 6)
    0.1
    """
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"an average needs momentum in [0, 1), got {momentum}.")
    return torch.optim.SGD(
        params, lr=(1.0 - momentum) * lr, momentum=momentum, weight_decay=weight_decay
    )


def nesterov(
    params: Params, *, lr: float, momentum: float = 0.9, weight_decay: float = 0.0
) -> torch.optim.SGD:
    """Descent along the decaying sum, extrapolated by one step of the current gradient.

    >>> import torch
    >>> w = torch.nn.Parameter(torch.ones(1))
    >>> optimiser = nesterov([w], lr=0.1)
    >>> w.sum().backward()
    >>> optimiser.step(); w.data  # 1 - 0.1 (1 + 0.9)
    tensor([0.8100])
    """
    return torch.optim.SGD(
        params, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=True
    )


def adam_l2(
    params: Params,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
) -> torch.optim.Adam:
    """Adam on the loss plus lambda / 2 times the squared weights.

    >>> import torch
    >>> w = torch.nn.Parameter(torch.ones(1))
    >>> optimiser = adam_l2([w], lr=0.1, weight_decay=0.5)
    >>> w.sum().backward()
    >>> optimiser.step(); w.data  # the first step has length lr, decay included
    tensor([0.9000])
    """
    return torch.optim.Adam(params, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)


def adamw(
    params: Params,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
) -> torch.optim.AdamW:
    """Adam on the loss, with decoupled weight decay.

    >>> import torch
    >>> w = torch.nn.Parameter(torch.ones(1))
    >>> optimiser = adamw([w], lr=0.1, weight_decay=0.5)
    >>> w.sum().backward()
    >>> optimiser.step(); w.data  # the decay 0.1 * 0.5 comes on top of the step
    tensor([0.8500])
    """
    return torch.optim.AdamW(params, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)


@runtime_checkable
class _Hooked(Protocol):
    """An optimiser that registers hooks on a model, such as ``ScoreDescent``."""

    def close(self) -> None:
        """Remove them."""


@runtime_checkable
class _PerHead(Protocol):
    """An optimiser with state that has other shapes than its parameters."""

    def state_shapes(self) -> dict[tuple[Tensor, str], tuple[int, ...]]:
        """The shape of such state by parameter and name."""


class CombinedOptimiser:
    """Several optimisers as one: steps its members in order, and its state is theirs by number.

    >>> import torch
    >>> layer = torch.nn.Linear(4, 3)
    >>> both = CombinedOptimiser(sgd([layer.weight], lr=0.1), adamw([layer.bias], lr=0.01))
    >>> [group["lr"] for group in both.param_groups]
    [0.1, 0.01]
    """

    def __init__(self, *members: torch.optim.Optimizer) -> None:
        self.members = members

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all members; setting ``lr`` in one of them works as usual."""
        return [group for member in self.members for group in member.param_groups]

    def step(self) -> None:
        """One step of every member."""
        for member in self.members:
            member.step()

    def zero_grad(self) -> None:
        """Set every gradient to None."""
        for member in self.members:
            member.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Remove the hooks that members have registered on a model."""
        for member in self.members:
            if isinstance(member, _Hooked):
                member.close()

    def state_dict(self) -> dict[str, Any]:
        """{"0": state of the first member, "1": ...}."""
        return {str(n): member.state_dict() for n, member in enumerate(self.members)}

    def require_shapes(self, state: Mapping[str, Any]) -> None:
        """Refuse a state with tensors that a step of the optimisers of this package cannot use.

        A value is None, a number ("step") or a tensor of the shape of its parameter, or of the
        shape that its optimiser states.
        """
        for n, member in enumerate(self.members):
            shapes = member.state_shapes() if isinstance(member, _PerHead) else {}
            saved = state[str(n)]
            indices = (index for group in saved["param_groups"] for index in group["params"])
            parameters = (
                parameter for group in member.param_groups for parameter in group["params"]
            )
            for index, parameter in zip(indices, parameters, strict=True):
                for name, value in saved["state"].get(index, {}).items():
                    shape = () if name == "step" else parameter.shape
                    shape = shapes.get((parameter, name), shape)
                    if value is not None and not _has_shape(value, shape):
                        got = list(value.shape) if isinstance(value, Tensor) else value
                        raise ValueError(
                            f"the state {printable(name)} of parameter {index} should be a tensor "
                            f"of numbers of shape {list(shape)}, got {printable(got)}."
                        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state_dict``."""
        if set(state) != {str(n) for n in range(len(self.members))}:
            raise ValueError(
                f"the saved state has {len(state)} optimisers, this one has {len(self.members)}."
            )
        for n, member in enumerate(self.members):
            member.load_state_dict(state[str(n)])


def _has_shape(value: Any, shape: Iterable[int]) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and tuple(value.shape) == tuple(shape)
    )


def clip_(parameters: Iterable[Tensor], largest: float) -> float:
    """Scale all gradients to a global norm of at most ``largest``; returns the norm before.

    >>> import torch
    >>> w = torch.nn.Parameter(torch.zeros(2))
    >>> w.grad = torch.tensor([3.0, 4.0])
    >>> clip_([w], 1.0), w.grad
    (5.0, tensor([0.6000, 0.8000]))
    """
    trained = [p for p in parameters if p.grad is not None]
    norm = get_total_norm([p.grad for p in trained if p.grad is not None])
    length = norm.item()
    if math.isfinite(length):
        clip_grads_with_norm_(trained, largest, norm)
    return length
