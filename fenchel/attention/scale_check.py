"""Is the scale of attention the one that was meant?

For queries and keys whose D entries are independent, with means m and variances s^2, one score q.k
has the variance D (s_q^2 s_k^2 + s_q^2 m_k^2 + s_k^2 m_q^2): it grows with D, and 1/sqrt(D) takes
that growth away. Two slips are common and raise no error,

    scale = 1                  the factor is missing: scores spread sqrt(D) too far
    scale = 1/sqrt(d_model)    the stream's width, H D, in place of a head's: sqrt(H) too little

and two are rarer: 1/D, and sqrt(D) multiplied where it should divide. Each is known by its number.
What it does is read off the weights: too large a scale leaves one key almost all the weight, too
small a one leaves all keys about the same. (Vanishing gradients come later, at widths of some
hundreds; weights show it first.)

A scale of 1 is no slip where the scores stay small by themselves, as with normalised queries and
keys or in T5, whose weights start smaller: it is told only if the scores spread beyond ``WIDE``.
"""

import math

import torch
from torch import Tensor

from fenchel.attention.prior import Prior
from fenchel.attention.reference import log_prior, score
from fenchel.attention.shapes import check, four
from fenchel.choice import Softmax

WIDE = 2.0
"""Scores that spread less are no trouble; normal queries and keys spread by 1."""


@torch.no_grad()
def scale_trouble(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    width: int | None = None,
    prior: Prior | None = None,
) -> str | None:
    """One sentence if ``scale`` looks like a slip on q (B, H, T, D) and k (B, G, S, D), else None.

    ``width`` is d_model, H D unless given. O(T S) memory: a small sample says as much.
    """
    check(q, k, k)
    q, k = four(q), four(k)
    H, D = q.shape[1], q.shape[3]
    width = H * D if width is None else width
    if not math.isfinite(scale) or scale == 0.0:
        return (
            f"scale={scale} makes every score the same or none; with heads of {D} use {_right(D)}."
        )
    slip = _slip(scale, D, width)
    if slip is None:
        return None
    spread, best = _seen(q, k, scale, prior)
    meant, best_meant = _seen(q, k, D**-0.5, prior)
    if scale == 1.0 and spread <= WIDE:
        return None
    return (
        f"scale={scale:.4g} {slip}; with heads of {D} use {_right(D)}: the scores spread by "
        f"{spread:.2g} where {meant:.2g} was meant, and a query gives its best key {best:.2g} of "
        f"its weight instead of {best_meant:.2g}."
    )


def _slip(scale: float, D: int, width: int) -> str | None:
    """Which slip the number is, if it is one."""
    if math.isclose(scale, D**-0.5, rel_tol=1e-3):
        return None
    slips = {
        1.0: "looks as if 1/sqrt(D) were missing",
        width**-0.5: f"is 1/sqrt(d_model) for d_model {width}",
        1.0 / D: "is 1/D, the root is missing",
        D**0.5: "is sqrt(D), which should divide",
    }
    found = (told for number, told in slips.items() if math.isclose(scale, number, rel_tol=1e-3))
    return next(found, None)


def _seen(q: Tensor, k: Tensor, scale: float, prior: Prior | None) -> tuple[float, float]:
    """Standard deviation of the scores that count, and the mean of each row's largest weight."""
    z = score(q, k, scale)
    log_u = log_prior(prior, z)
    p = Softmax().weights(z, log_u)
    open_ = z if log_u is None else z[(log_u > -torch.inf).expand_as(z)]
    return float(open_.std(correction=0)), float(p.amax(-1).mean())


def _right(D: int) -> str:
    return f"1/sqrt({D}) = {D**-0.5:.4g}"
