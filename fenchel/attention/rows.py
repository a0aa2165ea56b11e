"""Rows of scores chosen once, and chosen again from one saved number a row.

For a map whose Omega is a sum of equal terms, the weights follow from one number nu a row. With
y = (alpha - 1) x for a Tsallis map and y = x for softmax (alpha = 1),

    Softmax      p = exp(y - nu)                                s = p
    Tsallis      u = (y - nu)_+ ,   p = u^(1 / (alpha - 1))     s = p^(2 - alpha) on the support

with s as in fenchel/choice/base.py: J = beta (diag(s) - s s^T / sum(s)). The largest score shows
nu: p_max = exp(y_max - nu), or (y_max - nu)^(1 / (alpha - 1)). So a backward pass that kept nu and
not p rebuilds p and s in two or three passes over a block of scores, without solving again.

A row with no open key gets p = 0 and nu = inf, from which p = s = 0 again. What ends in _ writes
into what it is given and must not be seen by autograd.
"""

import torch
from torch import Tensor

from fenchel.choice import Choice, Entmax, Softmax, Sparsemax


def exponent(choice: Choice) -> float | None:
    """alpha, with 1 for softmax; None for a map whose rows do not follow from one number.

    Close to softmax a Tsallis row does not either: u^(1 / (alpha - 1)) loses too many digits.
    """
    if isinstance(choice, Softmax):
        return 1.0
    if isinstance(choice, Sparsemax):
        return 2.0
    if isinstance(choice, Entmax) and not isinstance(choice.alpha, Tensor):
        return float(choice.alpha) if choice.alpha >= 1.05 else None
    return None


def choose_(x: Tensor, choice: Choice, alpha: float) -> tuple[Tensor, Tensor]:
    """(p, nu) for the scores x = beta z + log u, which may be overwritten: (..., K), (..., 1)."""
    if x.shape[-1] == 0:
        return x, x.new_full((*x.shape[:-1], 1), torch.inf)
    top = x.amax(-1, keepdim=True)
    empty = top == -torch.inf
    if alpha == 1.0:
        top = top.masked_fill(empty, 0.0)
        p = x.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        nu = top + total.log()
        p.div_(total.masked_fill_(empty, 1.0))
    else:
        p = choice.choose(x)
        nu = (alpha - 1.0) * top - p.amax(-1, keepdim=True).pow(alpha - 1.0)
    return p, nu.masked_fill(empty, torch.inf)


def again_(y: Tensor, nu: Tensor, alpha: float, work: Tensor) -> tuple[Tensor, Tensor]:
    """(p, s) from y and the saved nu, in the memory of y and ``work``."""
    y.sub_(nu)
    if alpha == 1.0:
        p = y.exp_()
        return p, p
    u = y.clamp_(min=0.0)
    if alpha == 1.5:
        return torch.mul(u, u, out=work), u
    if alpha == 2.0:
        return u, torch.sign(u, out=work)
    r = 1.0 / (alpha - 1.0)
    p = torch.pow(u, r, out=work)
    if alpha > 2.0:  # a negative power: 0 must stay 0
        u.masked_fill_(u == 0.0, torch.inf)
    return p, u.pow_((2.0 - alpha) * r)
