"""Softmax as a hypothesis test: what the divergence from the prior measures.

Under the null hypothesis the index is drawn from the prior u. Under the alternative, given by
scores z at inverse temperature beta, it is drawn from the tilted distribution

    p_i = u_i exp(beta z_i) / Z,   Z = sum_j u_j exp(beta z_j),   log(p_i / u_i) = beta z_i - log Z.

Bayes. With prior u_i for "i is the relevant one" and log-likelihood beta z_i, p is the posterior;
log(p_i / u_i) is the evidence for i, and the statistic of the best test of p against u.

Along beta.    d E_p z / d beta = Var_p(z),    d KL(p || u) / d beta = beta Var_p(z), hence
               KL(p || u) <= beta^2 range(z)^2 / 8,    total variation <= beta range(z) / 4.

Pinsker.       total variation <= sqrt(KL / 2): no test on one draw separates p from u better.

Chernoff-Stein. From m draws, at a fixed probability of missing p, the probability of a false alarm
               falls like exp(-m KL(p || u)); at a fixed probability of a false alarm, that of a
               miss falls like exp(-m KL(u || p)). Weighing both, the best exponent is the Chernoff
               information, max over s in [0, 1] of -log sum_i p_i^s u_i^(1 - s).

Sanov.         The probability that m draws from u have a mean score of c or more, c > E_u z, is
               exp(-m KL(p_beta || u) + o(m)) for the beta with E_{p_beta} z = c, and given that
               event one draw is distributed as p_beta.

The lessons ``priors_and_budgets`` and ``hypothesis_tests`` are made of it; no command uses it.

Shapes: distributions are (..., K), results (...). log_prior is log u up to a constant, and
None is uniform.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class TiltedDistribution(NamedTuple):
    """The distribution tilted by beta, the mean and variance of z under it, and KL(p || u)."""

    p: Tensor
    mean: Tensor
    variance: Tensor
    divergence: Tensor


class LargeDeviation(NamedTuple):
    """An unlikely mean score: the tilt that has it, and the exponent of its probability."""

    beta: Tensor
    p: Tensor
    rate: Tensor


def divergence(p: Tensor, u: Tensor) -> Tensor:
    """KL(p || u) = sum_i p_i log(p_i / u_i), infinite where p > 0 = u: (..., K) -> (...).

    >>> import torch
    >>> divergence(torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5]))
    tensor(0.0823)
    """
    on = p > 0
    ratio = torch.where(on, p, 1.0).log() - torch.where(on, u, 1.0).log()
    return (p * ratio).sum(-1)


def total_variation(p: Tensor, u: Tensor) -> Tensor:
    """Half of sum_i |p_i - u_i|: (..., K) -> (...).

    >>> import torch
    >>> total_variation(torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5]))
    tensor(0.2000)
    """
    return 0.5 * (p - u).abs().sum(-1)


def evidence(z: Tensor, beta: float | Tensor, log_prior: Tensor | None = None) -> Tensor:
    """log(p_i / u_i) = beta z_i - log Z, with u normalised: (..., K) -> (..., K).

    >>> import torch
    >>> evidence(torch.tensor([0.0, 1.0, 3.0]), beta=1.0)  # positive: evidence for it
    tensor([-2.0712, -1.0712,  0.9288])
    """
    forbidden = z == -math.inf  # whatever beta is, also where it is 0
    tilt = (beta * z.masked_fill(forbidden, 0.0)).masked_fill(forbidden, -math.inf)
    total = (_log_prior(z, log_prior) + tilt).logsumexp(-1, keepdim=True)
    return tilt - total.masked_fill(total == -math.inf, 0.0)


def tilted(z: Tensor, beta: float | Tensor, log_prior: Tensor | None = None) -> TiltedDistribution:
    """The tilted distribution at ``beta``, the mean and variance of z under it, and KL(p || u).

    A score of -inf forbids, as for the choice maps: the alternative counts as absent from u. Where
    all are forbidden every result is 0.

    >>> import torch
    >>> tilted(torch.tensor([0.0, 1.0, 3.0]), beta=1.0).p  # the softmax
    tensor([0.0420, 0.1142, 0.8438])
    """
    log_ratio = evidence(z, beta, log_prior)
    p = (_log_prior(z, log_prior) + log_ratio).exp()
    z, log_ratio = (torch.where(p > 0, x, 0.0) for x in (z, log_ratio))  # 0 times -inf is nan
    mean = (p * z).sum(-1, keepdim=True)
    variance = (p * (z - mean).square()).sum(-1)
    return TiltedDistribution(p, mean.squeeze(-1), variance, (p * log_ratio).sum(-1))


def divergence_upper(z: Tensor, beta: float | Tensor) -> Tensor:
    """beta^2 range(z)^2 / 8, an upper bound on KL(p || u): (..., K) -> (...).

    >>> import torch
    >>> z = torch.tensor([0.0, 1.0, 3.0])
    >>> tilted(z, 0.5).divergence, divergence_upper(z, 0.5)
    (tensor(0.1927), tensor(0.2813))
    """
    return _rounded_up((beta * _range(z)).square() / 8.0)


def total_variation_upper(z: Tensor, beta: float | Tensor) -> Tensor:
    """beta range(z) / 4, an upper bound on the total variation: (..., K) -> (...)."""
    return _rounded_up(beta * _range(z) / 4.0)


def pinsker_upper(divergence: Tensor) -> Tensor:
    """sqrt(KL / 2), an upper bound on the total variation.

    >>> import torch
    >>> p, u = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5])
    >>> total_variation(p, u), pinsker_upper(divergence(p, u))
    (tensor(0.2000), tensor(0.2028))
    """
    return _rounded_up((0.5 * divergence).sqrt())


def _rounded_up(bound: Tensor) -> Tensor:
    """Larger by more than the rounding of the few operations that gave it."""
    return bound * (1.0 + 8.0 * torch.finfo(bound.dtype).eps)


def chernoff_information(p: Tensor, u: Tensor) -> Tensor:
    """The best error exponent when misses and false alarms both count: (..., K) -> (...).

    >>> import torch
    >>> chernoff_information(torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5]))
    tensor(0.0213)
    """
    both = (p > 0) & (u > 0)
    log_p, log_u = (torch.where(both, q, 1.0).log() for q in (p, u))
    low, high = torch.zeros_like(p[..., :1]), torch.ones_like(p[..., :1])
    for _ in range(60):  # log sum p^s u^(1 - s) is convex in s: bisect by the sign of its slope
        s = 0.5 * (low + high)
        term = torch.where(both, (s * log_p + (1.0 - s) * log_u).exp(), 0.0)
        rising = (term * (log_p - log_u)).sum(-1, keepdim=True) > 0
        low, high = torch.where(rising, low, s), torch.where(rising, s, high)
    s = 0.5 * (low + high)
    return -torch.where(both, (s * log_p + (1.0 - s) * log_u).exp(), 0.0).sum(-1).log()


def sample_size_lower(divergence: Tensor, false_alarm: float) -> Tensor:
    """log(1 / false_alarm) / KL: to first order, the draws that the best test needs.

    >>> import torch
    >>> kl = divergence(torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5]))
    >>> sample_size_lower(kl, false_alarm=1e-3)  # draws to tell a biased coin from a fair one
    tensor(83.9513)
    """
    if not 0.0 < false_alarm < 1.0:
        raise ValueError(f"false_alarm is a probability between 0 and 1, got {false_alarm}.")
    return math.log(1.0 / false_alarm) / divergence


def large_deviation(z: Tensor, mean: float, log_prior: Tensor | None = None) -> LargeDeviation:
    """The tilt whose mean score is ``mean``, and Sanov's rate: (K,) -> beta (), p (K,), rate ().

    ``mean`` lies between the mean of z under the prior and the largest score.

    >>> import torch
    >>> large_deviation(torch.tensor([0.0, 1.0]), mean=0.8).p  # a fair coin, 80 % heads
    tensor([0.2000, 0.8000])
    """
    start = tilted(z, 0.0, log_prior).mean
    top = torch.where(_log_prior(z, log_prior) > -math.inf, z, -math.inf).amax()
    if not float(start) <= mean < float(top):
        raise ValueError(
            f"mean={mean} should lie between the mean under the prior, {float(start):.6g}, and the "
            f"largest score, {float(top):.6g}."
        )
    low, high = torch.zeros_like(start), torch.ones_like(start)
    while float(tilted(z, high, log_prior).mean) < mean:
        high = 2.0 * high
    for _ in range(200):  # the mean rises with beta; bisect to the precision of the dtype
        beta = 0.5 * (low + high)
        short = tilted(z, beta, log_prior).mean < mean
        low, high = torch.where(short, beta, low), torch.where(short, high, beta)
    tilt = tilted(z, beta, log_prior)
    return LargeDeviation(beta, tilt.p, tilt.divergence)


def _log_prior(z: Tensor, log_prior: Tensor | None) -> Tensor:
    """log u, normalised over what neither the prior nor a score of -inf forbids."""
    log_u = torch.zeros_like(z) if log_prior is None else log_prior
    log_u = torch.where(z == -math.inf, -math.inf, log_u)
    empty = (log_u == -math.inf).all(-1, keepdim=True)
    return log_u.masked_fill(empty, 0.0).log_softmax(-1).masked_fill(empty, -math.inf)


def _range(z: Tensor) -> Tensor:
    return z.amax(-1) - z.amin(-1)
