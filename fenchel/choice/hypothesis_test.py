"""Softmax as a test of hypotheses: what the divergence from the prior measures.

The null hypothesis says: the index is drawn from the prior u. The scores z, at inverse temperature
beta, say: from the tilted law

    p_i = u_i exp(beta z_i) / Z,   Z = sum_j u_j exp(beta z_j),   log(p_i / u_i) = beta z_i - log Z.

Bayes. With prior u_i for "i is the relevant one" and log-likelihood beta z_i, p is the posterior;
log(p_i / u_i) is the evidence for i, and the statistic of the best test of p against u.

Along beta.    d E_p z / d beta = Var_p(z),    d KL(p || u) / d beta = beta Var_p(z), hence
               KL(p || u) <= beta^2 range(z)^2 / 8,    total variation <= beta range(z) / 4.

Pinsker.       total variation <= sqrt(KL / 2): one draw tells p from u by no more than this.

Chernoff-Stein. From m draws, keeping the chance of missing p fixed, the chance of a false alarm
               falls like exp(-m KL(p || u)); keeping false alarms fixed, that of a miss falls like
               exp(-m KL(u || p)). Weighing both, the best exponent is the Chernoff information
               max over s in [0, 1] of -log sum_i p_i^s u_i^(1 - s).

Sanov.         If m draws from u have a mean score of c or more, c > E_u z, that had the chance
               exp(-m KL(p_beta || u) + o(m)) for the beta with E_{p_beta} z = c, and given that it
               happened one draw follows p_beta.

Shapes: laws are (..., K), results (...). log_prior is log u up to a constant, None is uniform.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.choice.softmax import Softmax


class Tilt(NamedTuple):
    """The law tilted by beta, and what it makes of the scores."""

    law: Tensor
    mean: Tensor
    variance: Tensor
    divergence: Tensor


class Rare(NamedTuple):
    """How an unlikely mean comes about: the tilt that gives it, and the exponent of its chance."""

    beta: Tensor
    law: Tensor
    rate: Tensor


def entropy(p: Tensor) -> Tensor:
    """-sum_i p_i log p_i, in nats: (..., K) -> (...)."""
    return -Softmax().regulariser(p)


def divergence(p: Tensor, u: Tensor) -> Tensor:
    """KL(p || u) = sum_i p_i log(p_i / u_i), infinite where p leaves u: (..., K) -> (...)."""
    on = p > 0
    ratio = torch.where(on, p, 1.0).log() - torch.where(on, u, 1.0).log()
    return (p * ratio).sum(-1)


def total_variation(p: Tensor, u: Tensor) -> Tensor:
    """Half of sum_i |p_i - u_i|: (..., K) -> (...)."""
    return 0.5 * (p - u).abs().sum(-1)


def evidence(z: Tensor, beta: float | Tensor, log_prior: Tensor | None = None) -> Tensor:
    """log(p_i / u_i) = beta z_i - log Z, with u normalised: (..., K) -> (..., K)."""
    tilt = beta * z
    return tilt - (_log_law(z, log_prior) + tilt).logsumexp(-1, keepdim=True)


def tilted(z: Tensor, beta: float | Tensor, log_prior: Tensor | None = None) -> Tilt:
    """The law at ``beta`` with the mean and variance of z under it and KL(p || u)."""
    log_ratio = evidence(z, beta, log_prior)
    p = (_log_law(z, log_prior) + log_ratio).exp()
    mean = (p * z).sum(-1, keepdim=True)
    variance = (p * (z - mean).square()).sum(-1)
    return Tilt(p, mean.squeeze(-1), variance, (p * log_ratio).sum(-1))


def divergence_upper(z: Tensor, beta: float | Tensor) -> Tensor:
    """beta^2 range(z)^2 / 8, which KL(p || u) never exceeds: (..., K) -> (...)."""
    return (beta * _range(z)).square() / 8.0


def total_variation_upper(z: Tensor, beta: float | Tensor) -> Tensor:
    """beta range(z) / 4, which the total variation never exceeds: (..., K) -> (...)."""
    return beta * _range(z) / 4.0


def pinsker_upper(divergence: Tensor) -> Tensor:
    """sqrt(KL / 2), which the total variation never exceeds."""
    return (0.5 * divergence).sqrt()


def chernoff_information(p: Tensor, u: Tensor) -> Tensor:
    """The best exponent when misses and false alarms both count: (..., K) -> (...)."""
    both = (p > 0) & (u > 0)
    log_p, log_u = (torch.where(both, q, 1.0).log() for q in (p, u))
    low, high = torch.zeros_like(p[..., :1]), torch.ones_like(p[..., :1])
    for _ in range(60):  # log sum p^s u^(1 - s) is convex in s: halve by the sign of its slope
        s = 0.5 * (low + high)
        term = torch.where(both, (s * log_p + (1.0 - s) * log_u).exp(), 0.0)
        rising = (term * (log_p - log_u)).sum(-1, keepdim=True) > 0
        low, high = torch.where(rising, low, s), torch.where(rising, s, high)
    s = 0.5 * (low + high)
    return -torch.where(both, (s * log_p + (1.0 - s) * log_u).exp(), 0.0).sum(-1).log()


def draws_lower(divergence: Tensor, false_alarm: float) -> Tensor:
    """log(1 / false_alarm) / KL: about so many draws are needed, however good the test."""
    if not 0.0 < false_alarm < 1.0:
        raise ValueError(f"false_alarm is a chance between 0 and 1, got {false_alarm}.")
    return math.log(1.0 / false_alarm) / divergence


def rare_mean(z: Tensor, mean: float, log_prior: Tensor | None = None) -> Rare:
    """The tilt whose mean score is ``mean``, and Sanov's rate: (K,) -> beta (), law (K,), rate ().

    ``mean`` lies between the mean of z under the prior and the largest score.
    """
    start = tilted(z, 0.0, log_prior).mean
    top = torch.where(_log_law(z, log_prior) > -math.inf, z, -math.inf).amax()
    if not float(start) <= mean < float(top):
        raise ValueError(
            f"a mean of {mean} cannot be a rare one: it must lie between the mean under the "
            f"prior, {float(start):.6g}, and the largest score, {float(top):.6g}."
        )
    low, high = torch.zeros_like(start), torch.ones_like(start)
    while float(tilted(z, high, log_prior).mean) < mean:
        high = 2.0 * high
    for _ in range(200):  # the mean rises with beta; stop at neighbouring numbers
        beta = 0.5 * (low + high)
        short = tilted(z, beta, log_prior).mean < mean
        low, high = torch.where(short, beta, low), torch.where(short, high, beta)
    found = tilted(z, beta, log_prior)
    return Rare(beta, found.law, found.divergence)


def _log_law(z: Tensor, log_prior: Tensor | None) -> Tensor:
    """log u, normalised."""
    return (torch.zeros_like(z) if log_prior is None else log_prior).log_softmax(-1)


def _range(z: Tensor) -> Tensor:
    return z.amax(-1) - z.amin(-1)
