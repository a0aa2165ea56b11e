"""Linear attention: a kernel in place of the choice, and time linear in the length.

With features phi(x) > 0 and the kernel phi(q).phi(k) in place of exp(q.k),

    o_t = sum_j phi(q_t).phi(k_j) v_j / sum_j phi(q_t).phi(k_j)
        = phi(q_t) M / (phi(q_t) n),        M = sum_j phi(k_j)^T v_j,    n = sum_j phi(k_j)

M and n do not depend on t: O(S m E) time for m features instead of O(T S D), better once the length
exceeds m. Causal attention sums j <= t; the sums up to the start of each chunk carry over, and
inside a chunk the masked square is small. In decoding, (M, n) is the whole state.

Two feature maps. "elu": phi(x) = elu(x) + 1, a kernel of its own, not close to softmax.
``RandomFeatures``: phi(x) = exp(w.x' - |x'|^2 / 2) / sqrt(m), x' = x / D^(1/4), w normal, for which
phi(q).phi(k) has the mean exp(q.k / sqrt(D)): softmax attention in the limit of many features, with
an error that falls like 1/sqrt(m) and is large for large scores. phi of a long x is below the least
number of the dtype. A factor per query cancels in the quotient, and so does one per feature that
multiplies phi(k) and divides phi(q): without a causal order the largest phi(k) of each feature is
moved over to the queries, and no query loses all its keys. In causal sums it is not known before
the end; a query whose kernel is 0 at all its keys raises there, in place of an output of 0.

This is no choice map: rows of phi(q) phi(k)^T sum to one only after the division, and the weights
are the argmax of no problem. Shapes and grouped heads as in ``attend``; the T queries are aligned
to the end of the S keys.

Katharopoulos et al. (2020), Transformers are RNNs; Choromanski et al. (2021), Performers.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fenchel.attention.reference import full_precision, mix, score
from fenchel.attention.shapes import broadcast_batch, check, output_axes
from fenchel.choice.base import is_plain

_CHUNK = 64


@dataclass(frozen=True, eq=False)
class RandomFeatures:
    """Positive random features, ``w`` (m, D) rows of normal numbers; see ``random_features``."""

    w: Tensor


class LinearState(NamedTuple):
    """The sums over past keys: M (B, G, m, E) and n (B, G, m, 1), in float32 or better."""

    M: Tensor
    n: Tensor


def random_features(
    width: int, count: int, *, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> RandomFeatures:
    """``count`` rows for heads of ``width``, orthogonal in groups of ``width``.

    Orthogonal directions lower the error; lengths drawn apart from them keep every row normal.

    >>> random_features(4, 6, generator=torch.Generator().manual_seed(0)).w.shape
    torch.Size([6, 4])
    """
    blocks = []
    for _ in range(-(-count // width)):
        square = torch.randn(width, width, generator=generator, dtype=torch.float64)
        length = torch.randn(width, width, generator=generator, dtype=torch.float64).norm(dim=1)
        Q, R = torch.linalg.qr(square)
        # Without the signs Q is not uniform over rotations, and the kernel would be biased.
        blocks.append(length[:, None] * Q * R.diagonal().sign())
    return RandomFeatures(torch.cat(blocks)[:count].to(dtype))


@full_precision
def linear_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    features: str | RandomFeatures = "elu",
    causal: bool = False,
) -> Tensor:
    """Outputs: q (B, H, T, D), k (B, G, S, D), v (B, G, S, E) -> (B, H, T, E).

    >>> q = torch.zeros(1, 1, 2, 4)
    >>> linear_attend(q, q, torch.eye(2).view(1, 1, 2, 2), causal=True)
    tensor([[[[1.0000, 0.0000],
              [0.5000, 0.5000]]]])
    """
    check(q, k, v)
    axes = output_axes(q, k)
    q, k, v = broadcast_batch(q, k, v)
    phi_q, phi_k = _features(q, k, features, shared=not causal)
    wide = _wide(v)
    if causal:
        top, bottom = _causal(phi_q, phi_k, wide)
        _require_kernel(bottom[:, :, max(0, q.shape[2] - k.shape[2]) :], features)
    else:
        state = _sums(phi_k, wide)
        top, bottom = mix(phi_q, state.M), mix(phi_q, state.n)
    return _divide(top, bottom).to(v.dtype).reshape(*axes, q.shape[2], v.shape[3])


@full_precision
def linear_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState | None = None,
    *,
    features: str | RandomFeatures = "elu",
) -> tuple[Tensor, LinearState]:
    """(outputs, state) after one more token or a few; a ``state`` of None is an empty past."""
    check(q, k, v)
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"a step needs one key per query; got {k.shape[-2]} keys for {q.shape[-2]} queries."
        )
    q, k, v = broadcast_batch(q, k, v)
    phi_q, phi_k = _features(q, k, features, shared=False)
    wide = _wide(v)
    top, bottom = _inside(phi_q, phi_k, wide)
    new = _sums(phi_k, wide)
    if state is not None:
        top, bottom = top + mix(phi_q, state.M), bottom + mix(phi_q, state.n)
        new = LinearState(state.M + new.M, state.n + new.n)
    _require_kernel(bottom, features)
    return _divide(top, bottom).to(v.dtype), new


def _features(
    q: Tensor, k: Tensor, features: str | RandomFeatures, *, shared: bool
) -> tuple[Tensor, Tensor]:
    """phi(q) and phi(k), up to factors that cancel; ``shared`` if each query has every key."""
    if isinstance(features, RandomFeatures):
        log_q, log_k = (_log_features(x, features) for x in (q, k))
        if shared and k.shape[2]:
            largest = log_k.detach().amax(2, keepdim=True)
            log_k = log_k - largest
            log_q = log_q + largest.repeat_interleave(q.shape[1] // k.shape[1], 1)
        log_q = log_q - log_q.detach().amax(-1, keepdim=True)
        return log_q.exp(), log_k.exp()
    if features == "elu":
        return _elu(q), _elu(k)
    raise ValueError(f'features are "elu" or RandomFeatures, got {features!r}.')


def _elu(x: Tensor) -> Tensor:
    x = _wide(x)
    return torch.where(x > 0, x + 1.0, x.clamp(max=0.0).exp())


def _log_features(x: Tensor, features: RandomFeatures) -> Tensor:
    m, D = features.w.shape
    if x.shape[-1] != D:
        raise ValueError(f"the features are for heads {D} wide, the call has {x.shape[-1]}.")
    x = _wide(x) / D**0.25
    return x @ features.w.to(x).mT - x.square().sum(-1, keepdim=True) / 2 - math.log(m) / 2


def _require_kernel(bottom: Tensor, features: str | RandomFeatures) -> None:
    """Raises where random features are 0 at all keys of a query."""
    if isinstance(features, RandomFeatures) and is_plain(bottom) and bool((bottom == 0).any()):
        raise ValueError(
            f"the random features of the keys are below the range of {bottom.dtype} for some "
            'query; use shorter keys, a wider dtype, or features="elu".'
        )


def _causal(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Numerators (B, H, T, E), denominators (B, H, T, 1): each query on the keys up to its own."""
    T, S = phi_q.shape[2], phi_k.shape[2]
    if T > S:  # the first queries come before every key
        top, bottom = _causal(phi_q[:, :, T - S :], phi_k, v)
        return pad(top, (0, 0, T - S, 0)), pad(bottom, (0, 0, T - S, 0))
    past = _sums(phi_k[:, :, : S - T], v[:, :, : S - T])
    q_c, k_c, v_c = (_chunks(x) for x in (phi_q, phi_k[:, :, S - T :], v[:, :, S - T :]))
    # The sum of each chunk, then of all chunks before it. Subtracting the last term from an
    # inclusive sum would leak the future through rounding, so it is left out before the cumsum.
    own = _sums(k_c, v_c)
    before = [
        torch.cat((x.unsqueeze(2), y[:, :, :-1]), 2).cumsum(2)
        for x, y in zip(past, own, strict=True)
    ]
    R = phi_q.shape[1] // phi_k.shape[1]
    M, n, k_c, v_c = (x.repeat_interleave(R, 1) if R > 1 else x for x in (*before, k_c, v_c))
    square = (q_c @ k_c.mT).tril()
    top, bottom = square @ v_c + q_c @ M, square.sum(-1, keepdim=True) + q_c @ n
    return top.flatten(2, 3)[:, :, :T], bottom.flatten(2, 3)[:, :, :T]


def _inside(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Numerators and denominators of queries on the keys that came with them."""
    square = score(phi_q, phi_k, 1.0).tril()
    return mix(square, v), square.sum(-1, keepdim=True)


def _sums(phi_k: Tensor, v: Tensor) -> LinearState:
    return LinearState(phi_k.mT @ v, phi_k.sum(-2).unsqueeze(-1))


def _chunks(x: Tensor) -> Tensor:
    """(B, H, T, m) -> (B, H, chunks, C, m), zeros at the end; at least one chunk."""
    B, H, T, m = x.shape
    chunks = max(1, -(-T // _CHUNK))
    return pad(x, (0, 0, 0, chunks * _CHUNK - T)).reshape(B, H, chunks, _CHUNK, m)


def _divide(top: Tensor, bottom: Tensor) -> Tensor:
    """top / bottom; 0 for a query with no key, or none whose kernel is above 0."""
    return torch.where(bottom > 0, top / torch.where(bottom > 0, bottom, 1.0), 0.0)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
