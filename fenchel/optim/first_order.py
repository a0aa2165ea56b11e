"""The ordinary optimisers: torch's, each under the name of its formula.

With g the gradient at theta, eta the rate, mu the momentum and lambda the decay,

    sgd           v <- mu v + g               theta <- theta - eta v             (mu = 0: descent)
    sgd_average   v <- mu v + (1 - mu) g      theta <- theta - eta v
    nesterov      v <- mu v + g               theta <- theta - eta (g + mu v)

where g already holds lambda theta. The first two are one method: from v = 0 the average is
(1 - mu) times the sum, so ``sgd_average`` at eta is ``sgd`` at (1 - mu) eta, ten times shorter
at mu = 0.9, and that is how it is built. (torch's ``dampening`` = mu is neither: it leaves the
first gradient undamped.)

    m <- beta1 m + (1 - beta1) g              mh = m / (1 - beta1^t)
    v <- beta2 v + (1 - beta2) g^2            vh = v / (1 - beta2^t)

    adam_l2       g = gradient + lambda theta      theta <- theta - eta mh / (sqrt(vh) + eps)
    adamw         g = gradient      theta <- (1 - eta lambda) theta - eta mh / (sqrt(vh) + eps)

In ``adam_l2`` the decay is divided by sqrt(vh) like any gradient, so weights with large gradients
hardly decay; in ``adamw`` all decay alike. Without the hats the first step would be
(1 - beta1) / sqrt(1 - beta2) = 3.16 eta long. All of them keep a setting of its group
(``weight_decay``, ``lr``) where a parameter group brings its own.

Loshchilov and Hutter (2019), Decoupled weight decay regularization.

Several optimisers behind one: each moves its own parameters.

Global-norm clipping: one factor for all gradients, so that their common direction stays.

    |g|^2 = sum over all parameters of the squares of their gradients,     g <- g min(1, c / |g|)

A gradient of 0 stays 0: torch divides by |g| + 1e-6, so the clipped norm is c or a hair below
it. When |g| is inf or nan no factor would help, and the product would spread the nan: the gradients
are left as they are, for whoever asks which of them it was (fenchel/train/step.py).
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

Params = Iterable[Tensor] | Iterable[dict[str, Any]]


def sgd(
    params: Params, *, lr: float, momentum: float = 0.0, weight_decay: float = 0.0
) -> torch.optim.SGD:
    """Descent along the decaying sum of gradients."""
    return torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=weight_decay)


def sgd_average(
    params: Params, *, lr: float, momentum: float = 0.9, weight_decay: float = 0.0
) -> torch.optim.SGD:
    """Descent along the decaying average of gradients; the groups hold the rate (1 - mu) lr."""
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"an average needs momentum in [0, 1), got {momentum}.")
    return torch.optim.SGD(
        params, lr=(1.0 - momentum) * lr, momentum=momentum, weight_decay=weight_decay
    )


def nesterov(
    params: Params, *, lr: float, momentum: float = 0.9, weight_decay: float = 0.0
) -> torch.optim.SGD:
    """Descent along the sum as the next step would find it, were the gradient to stay."""
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
    """Adam on the loss plus lambda / 2 times the squared weights."""
    return torch.optim.Adam(params, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)


def adamw(
    params: Params,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
) -> torch.optim.AdamW:
    """Adam on the loss, with decay beside it."""
    return torch.optim.AdamW(params, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)


class CombinedOptimiser:
    """Calls its members in order; its state is theirs, side by side."""

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
        """Forget every gradient."""
        for member in self.members:
            member.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """{"0": state of the first member, "1": ...}."""
        return {str(n): member.state_dict() for n, member in enumerate(self.members)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` gave."""
        if set(state) != {str(n) for n in range(len(self.members))}:
            raise ValueError(
                f"the saved state is of {len(state)} optimisers, here are {len(self.members)}."
            )
        for n, member in enumerate(self.members):
            member.load_state_dict(state[str(n)])


def clip_(parameters: Iterable[Tensor], largest: float) -> float:
    """Shorten the gradients together to at most ``largest``; the norm they had before."""
    moved = [p for p in parameters if p.grad is not None]
    norm = get_total_norm([p.grad for p in moved if p.grad is not None])
    length = norm.item()
    if math.isfinite(length):
        clip_grads_with_norm_(moved, largest, norm)
    return length
