"""One token per row of logits, drawn on the device by settings that every row has for itself.

    w_v  = exp((z_v - max z) / temperature)
    e_v  = -log(1 - u_v),    u_v = (x_v + 1/2) 2^-32,    x_v of (seed, n, v) by SplitMix64
    v    = argmax of log w_v - log e_v over the tokens that stay

Which tokens stay, and why the search below ends soon, is said in generation/sampling.py: in the
order of falling z, of equals by rising id, v stays if and only if the tokens before it are fewer
than ``top_k`` with a share below ``top_p`` of the sum over the ``top_k`` largest, and
w_v >= ``min_p``. If the argmax over all does not stay, all that stay are before it, and the next
round looks among those. Temperature 0 takes the first largest z.

**Budget.** A row b with prior[b] = u, another row, draws from a law between its own and that of u:

    z = z_b + (1 - lam) (z_u - z_b),    lam <= 1 the largest with KL(p || p_u) <= kappa

over the tokens that both laws p and p_u have, or z = z_u where the loss of the others alone is
above kappa: -log p_u(the tokens that both have). KL rises with lam, and sqrt(2 KL) is a straight
line near 0: a few steps of Newton's method, confined between two bounds, each a pass over both
rows. Sums are float32, so lam is accepted from kappa (1 - 1e-4) on. The row u reads the token of b
and draws none: prior[u] = -1. Of every other row the prior is the row itself.

x depends on the seed of the row, the position n of the token and on v alone: not on other rows, and
not on what was drawn before. ``draw`` of generation/sampling.py defines the same in torch. n is the
sum of two numbers in device memory: how many tokens the cache has, and how many left it.

One program per row, since a row is short (64 kB for 32,000 in bfloat16): one pass for the largest
z, one for the sum and the argmax, and for a row with a restriction one for the share of every round
and one for its argmax if there is another. A pass with random numbers is some 50 instructions per
entry, the others are a few us of one multiprocessor for 32,000. A row with ``top_k`` and
``top_p`` needs the sum over the ``top_k`` largest: the k-th largest z is found by bisection of its
bits in 32 passes.

Shapes: z (B, V), all settings, n, token and marked (B,); -1 in ``marked`` where the largest logit
is not finite.
"""

import triton
import triton.language as tl
from torch import Tensor

from fenchel.kernels.primitives import pdl_launch, wait_for_previous

BLOCK = 4096
"""Entries of a row per iteration: one load of 16 bytes in flight per thread."""
WARPS = 16
ROUNDS = tl.constexpr(64)
"""Rounds at most; more are hardly possible, since each leaves a random share of the rest."""
NEWTON_STEPS = tl.constexpr(30)
"""Steps to lam at most; a bisection would need 14 for the accuracy of kappa."""


def draw_token(
    z_BV: Tensor,
    settings: tuple[Tensor, ...],
    n_B: Tensor,
    left_B: Tensor,
    token_B: Tensor,
    marked_B: Tensor,
) -> None:
    """Draw token n + left of every row into ``token_B`` and, or -1, into ``marked_B``.

    ``settings`` are temperature, top_p and min_p (float32), top_k, key and prior (int64), and kappa
    (float32).
    """
    B, V = z_BV.shape
    block = min(BLOCK, max(16, triton.next_power_of_2(V)))
    _draw_token[(B,)](
        z_BV, *settings, n_B, left_B, token_B, marked_B, V, z_BV.stride(0), BLOCK=block,
        num_warps=WARPS if block == BLOCK else 4, **pdl_launch(z_BV),
    )  # fmt: skip


@triton.jit
def _mix(x):
    """The finaliser of SplitMix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _key(z, top, temperature, state, v):
    """log w - log e of the tokens v."""
    pair = _mix(state + ((v >> 1) + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    half = tl.where((v & 1) == 1, pair >> 32, pair & 0xFFFFFFFF)
    x = (half ^ 0x80000000).to(tl.uint32)
    u = tl.minimum((x.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # 1 - u has no small u left, and those decide which unlikely token is drawn.
    small = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    e = tl.where(u < 0.01, small, -tl.log(1.0 - u))
    return (z - top) / temperature - tl.log(e)


@triton.jit
def _is_before(z, v, z_chosen, chosen, V):
    """Whether the tokens v precede the chosen one in the order of falling z."""
    return (v < V) & ((z > z_chosen) | ((z == z_chosen) & (v < chosen)))


@triton.jit
def _ordered(z):
    """int32 in the order of the floats."""
    bits = z.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit(z_ptr, u_ptr, share_u, mixed, v, V):
    """z of the tokens v, -inf beyond the vocabulary.

    ``share_u`` is 1 - lam; above 1 it stands for z_u, also at tokens that the row does not have.
    """
    z = tl.load(z_ptr + v, mask=v < V, other=-float("inf")).to(tl.float32)
    if mixed:
        z_u = tl.load(u_ptr + v, mask=v < V, other=-float("inf")).to(tl.float32)
        none = (z == -float("inf")) | (z_u == -float("inf"))
        z = tl.where(none, -float("inf"), z + share_u * (z_u - z))
        z = tl.where(share_u > 1.0, z_u, z)
    return z


@triton.jit
def _pair(z_ptr, u_ptr, top_z, top_u, v, V):
    """Whether both laws have the tokens v, log p_u and log p - log p_u but for constants.

    And log p_u of those that only p_u has; NaN where z is not finite above.
    """
    z = tl.load(z_ptr + v, mask=v < V, other=-float("inf")).to(tl.float32)
    z_u = tl.load(u_ptr + v, mask=v < V, other=-float("inf")).to(tl.float32)
    both = (z > -float("inf")) & (z_u > -float("inf"))
    log_u = tl.where(both, z_u - top_u, -float("inf"))
    only_u = tl.where(z == -float("inf"), -float("inf"), z * 0.0 - float("inf"))
    only_u = tl.where((z == -float("inf")) & (z_u > -float("inf")), z_u - top_u, only_u)
    return both, log_u, tl.where(both, (z - top_z) - (z_u - top_u), 0.0), only_u


@triton.jit
def _strength(z_ptr, u_ptr, kappa, V, BLOCK: tl.constexpr):
    """lam of a row and its prior; -1 where the law is that of the prior."""
    lane = tl.arange(0, BLOCK)
    low = -float("inf")
    top_z = tl.full((BLOCK,), low, tl.float32)
    top_u = tl.full((BLOCK,), low, tl.float32)
    top = tl.full((BLOCK,), low, tl.float32)
    for start in range(0, V, BLOCK):
        z = tl.load(z_ptr + start + lane, mask=start + lane < V, other=low).to(tl.float32)
        top = tl.maximum(top, z)
        both, z_u, d, _ = _pair(z_ptr, u_ptr, 0.0, 0.0, start + lane, V)
        top_z = tl.maximum(top_z, tl.where(both, z_u + d, low))
        top_u = tl.maximum(top_u, z_u)
    top_z = tl.max(top_z, 0)
    top_u = tl.max(top_u, 0)

    sum_u = tl.zeros((BLOCK,), tl.float32)
    lost = tl.zeros((BLOCK,), tl.float32)
    gain_u = tl.zeros((BLOCK,), tl.float32)
    square_u = tl.zeros((BLOCK,), tl.float32)
    sum_z = tl.zeros((BLOCK,), tl.float32)
    gain_z = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        both, log_u, d, only_u = _pair(z_ptr, u_ptr, top_z, top_u, start + lane, V)
        w = tl.exp(log_u)
        sum_u += w
        lost += tl.exp(only_u)
        gain_u += w * d
        square_u += w * d * d
        w = tl.exp(log_u + d)
        sum_z += w
        gain_z += w * d
    total = tl.sum(sum_u, 0).to(tl.float64)
    centre = tl.sum(gain_u, 0) / tl.sum(sum_u, 0)
    variance = tl.sum(square_u, 0) / tl.sum(sum_u, 0) - centre * centre
    at_1 = tl.sum(sum_z, 0).to(tl.float64)
    kl = tl.sum(gain_z, 0).to(tl.float64) / at_1 - tl.log(at_1 / total)

    budget = kappa.to(tl.float64) + tl.log(total / (total + tl.sum(lost, 0)))
    goal = budget * (1.0 - 5e-5)
    below = tl.where(kl <= budget, 1.0, 0.0).to(tl.float64)
    above = tl.full((), 1.0, tl.float64)
    start_at = tl.sqrt(2.0 * goal / tl.maximum(variance, 1e-12).to(tl.float64))
    lam = tl.minimum(start_at, 1.0)
    steps = tl.where((kl <= budget) | ~(budget > 0.0), NEWTON_STEPS, 0)
    while steps < NEWTON_STEPS:
        sum_w = tl.zeros((BLOCK,), tl.float32)
        gain_w = tl.zeros((BLOCK,), tl.float32)
        square_w = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            both, log_u, d, _ = _pair(z_ptr, u_ptr, top_z, top_u, start + lane, V)
            w = tl.exp(log_u + lam.to(tl.float32) * d)
            d -= centre
            sum_w += w
            gain_w += w * d
            square_w += w * d * d
        at_lam = tl.sum(sum_w, 0).to(tl.float64)
        mean = tl.sum(gain_w, 0).to(tl.float64) / at_lam
        variance_w = tl.sum(square_w, 0).to(tl.float64) / at_lam - mean * mean
        kl = lam * (mean + centre) - tl.log(at_lam / total)
        within = kl <= budget
        below = tl.where(within, lam, below)
        above = tl.where(within, above, lam)
        root = tl.sqrt(2.0 * tl.maximum(kl, 1e-30))
        trial = lam + (tl.sqrt(2.0 * goal) - root) * root / (lam * variance_w)
        inside = (trial > below) & (trial < above)
        enough = within & (kl >= budget * (1.0 - 1e-4))
        steps = tl.where(enough, NEWTON_STEPS, steps + 1)
        lam = tl.where(inside, trial, 0.5 * (below + above))
    return tl.where((budget < 0.0) & (tl.max(top, 0) > low), -1.0, below).to(tl.float32)


@triton.jit
def _draw_token(
    z_ptr, temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, key_ptr, prior_ptr, kappa_ptr, n_ptr,
    left_ptr, token_ptr, marked_ptr, V, stride, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    low = -float("inf")
    wait_for_previous(AHEAD)
    prior = tl.load(prior_ptr + b)
    mixed = (prior >= 0) & (prior != b)
    u_ptr = z_ptr + tl.maximum(prior, 0) * stride
    z_ptr += b * stride
    share_u = tl.full((), 0.0, tl.float32)
    if mixed:
        share_u = 1.0 - _strength(z_ptr, u_ptr, tl.load(kappa_ptr + b), V, BLOCK)
    temperature = tl.load(temperature_ptr + b)
    top_p = tl.load(top_p_ptr + b)
    min_p = tl.load(min_p_ptr + b)
    k = tl.load(top_k_ptr + b).to(tl.int32)
    state = tl.load(key_ptr + b).to(tl.uint64, bitcast=True)
    n = tl.load(n_ptr + b) + tl.load(left_ptr + b)
    state = _mix(state + n.to(tl.uint64) * 0x9E3779B97F4A7C15)

    best = tl.full((BLOCK,), low, tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    sound = tl.full((BLOCK,), 1, tl.int32)
    for start in range(0, V, BLOCK):
        v = start + lane
        z = _logit(z_ptr, u_ptr, share_u, mixed, v, V)
        sound = tl.where(z == z, sound, 0)
        better = z > best
        best = tl.where(better, z, best)
        where = tl.where(better, v, where)
    top = tl.max(best, 0)
    chosen = tl.min(tl.where(best == top, where, V - 1), 0)
    fine = (tl.min(sound, 0) == 1) & (tl.abs(top) < float("inf"))

    if fine & (temperature > 0.0):
        limited = (k < V) | (top_p < 1.0)
        highest = tl.full((BLOCK,), low, tl.float32)
        at = tl.zeros((BLOCK,), tl.int32)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            v = start + lane
            z = _logit(z_ptr, u_ptr, share_u, mixed, v, V)
            w = tl.exp((z - top) / temperature)
            total += w
            key = tl.where((v < V) & (w >= min_p), _key(z, top, temperature, state, v), low)
            better = key > highest
            highest = tl.where(better, key, highest)
            at = tl.where(better, v, at)
        peak = tl.max(highest, 0)
        chosen = tl.min(tl.where(highest == peak, at, V - 1), 0)
        limit = top_p * tl.sum(total, 0)
        if (k < V) & (top_p < 1.0):
            # The largest t with at least k entries that are not below it.
            below = _ordered(tl.zeros((1,), tl.float32) + low).to(tl.int64)
            above = _ordered(tl.zeros((1,), tl.float32) + top).to(tl.int64) + 1
            for _ in range(33):
                middle = (below + above) >> 1
                count = tl.zeros((BLOCK,), tl.int32)
                for start in range(0, V, BLOCK):
                    v = start + lane
                    z = _logit(z_ptr, u_ptr, share_u, mixed, v, V)
                    count += ((v < V) & (_ordered(z).to(tl.int64) >= middle)).to(tl.int32)
                enough = tl.sum(count, 0) >= k
                below = tl.where(enough, middle, below)
                above = tl.where(enough, above, middle)
            share = tl.zeros((BLOCK,), tl.float32)
            equal = tl.zeros((BLOCK,), tl.float32)
            count = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, V, BLOCK):
                v = start + lane
                z = _logit(z_ptr, u_ptr, share_u, mixed, v, V)
                w = tl.exp((z - top) / temperature)
                larger = (v < V) & (_ordered(z).to(tl.int64) > below)
                share += tl.where(larger, w, 0.0)
                count += larger.to(tl.int32)
                equal = tl.maximum(equal, tl.where(_ordered(z).to(tl.int64) == below, w, 0.0))
            rest = (k - tl.sum(count, 0)).to(tl.float32)
            limit = top_p * (tl.sum(share, 0) + rest * tl.max(equal, 0))
        limit = tl.where(top_p < 1.0, limit, float("inf"))
        rounds = tl.where(limited, 0, ROUNDS)
        while rounds < ROUNDS:
            z_chosen = _logit(z_ptr, u_ptr, share_u, mixed, chosen, V)
            share = tl.zeros((BLOCK,), tl.float32)
            count = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, V, BLOCK):
                v = start + lane
                z = _logit(z_ptr, u_ptr, share_u, mixed, v, V)
                before = _is_before(z, v, z_chosen, chosen, V)
                share += tl.where(before, tl.exp((z - top) / temperature), 0.0)
                count += before.to(tl.int32)
            full = (tl.sum(share, 0) >= limit) | (tl.sum(count, 0) >= k)
            full = full & (tl.sum(count, 0) > 0)
            rounds = tl.where(full, rounds + 1, ROUNDS)
            if full:  # most rows end without the random numbers of another round
                highest = tl.full((BLOCK,), low, tl.float32)
                at = tl.zeros((BLOCK,), tl.int32)
                for start in range(0, V, BLOCK):
                    v = start + lane
                    z = _logit(z_ptr, u_ptr, share_u, mixed, v, V)
                    stays = tl.exp((z - top) / temperature) >= min_p
                    stays = stays & _is_before(z, v, z_chosen, chosen, V)
                    key = tl.where(stays, _key(z, top, temperature, state, v), low)
                    better = key > highest
                    highest = tl.where(better, key, highest)
                    at = tl.where(better, v, at)
                peak = tl.max(highest, 0)
                chosen = tl.min(tl.where(highest == peak, at, V - 1), 0)
    marked = tl.where(fine, chosen, -1).to(tl.int64)
    tl.store(token_ptr + b, chosen.to(tl.int64), mask=prior >= 0)
    tl.store(marked_ptr + b, marked, mask=prior >= 0)
    tl.store(token_ptr + prior, chosen.to(tl.int64), mask=mixed)
    tl.store(marked_ptr + prior, marked, mask=mixed)
