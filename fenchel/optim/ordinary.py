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
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

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
