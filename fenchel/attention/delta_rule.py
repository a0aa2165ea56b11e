"""The gated delta rule: attention as a linear map, fitted to keys and values one after another.

A state S (D, E) maps keys to values, v ~ S^T k. Token t decays it, corrects it, and reads it:

    S <- e^(g_t) S                                  g_t <= 0, the log of a gate
    S <- S + b_t k_t (v_t - S^T k_t)^T              0 <= b_t <= 1, a rate of learning
    o_t = scale S^T q_t                             scale = 1 / sqrt(D) by default

The correction is one step of gradient descent, of size b_t, on |v_t - S^T k_t|^2 / 2: online least
squares. For a key of length 1 and b_t = 1 the state then maps k_t to v_t exactly. Linear attention
(attention/linear.py) adds b_t k_t v_t^T whatever S maps k_t to already. A token is O(D E) work and
memory whatever T is, and no weight is given to a key: this is no choice map.

**Chunks.** ``delta_rule_by_step`` is the recurrence. ``delta_rule`` computes chunks of C tokens by
products of matrices. Let w_t = b_t (v_t - (e^(g_t) S_(t-1))^T k_t) be the correction of token t, G
the running sum of g inside the chunk and S the state before it. The state after token i is

    S_i = e^(G_i) S + sum_(j <= i) e^(G_i - G_j) k_j w_j^T,

and in it w satisfies a triangular system, with A_ij = b_i e^(G_i - G_j) <k_i, k_j> for j < i,

    (I + A) W = diag(b) V - diag(b e^G) K S      hence W = U - R S, two triangular solves,
    O  = diag(e^G) Q S + (Q K^T * e^(G_i - G_j), j <= i) W
    S' = e^(G_C) S + K^T diag(e^(G_C - G)) W.

All exponents are at most 0. Every derivative is torch's, through these products.

**Documents.** With ``segments``, a number per token, a row is several documents one after another,
and each begins with S = 0: e^(G_i - G_j) is 0 where i and j differ in their document, and so is
e^(G_i) behind the first one of a chunk.

Shapes: q and k (B, G, T, D), v (B, H, T, E), g and b (B, H, T); G divides H, and each head of keys
serves H / G consecutive heads of values. States are (B, H, D, E), in float32 or better.

Yang, Kautz and Hatamizadeh (2025), Gated delta networks. Yang et al. (2024), Parallelizing linear
transformers with the delta rule.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.attention.reference import without_autocast

CHUNK = 64


class DeltaOutput(NamedTuple):
    """What was read, (B, H, T, E), and the state after the last token, (B, H, D, E)."""

    out: Tensor
    state: Tensor


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    segments: Tensor | None = None,
    chunk: int = CHUNK,
) -> DeltaOutput:
    """The gated delta rule in chunks; ``state`` is that before the first token, 0 by default.

    ``segments`` (B, T) numbers the documents of a row; a given ``state`` belongs to its first.

    >>> k = torch.eye(2).view(1, 1, 2, 2)
    >>> v = torch.tensor([[3.0], [5.0]]).view(1, 1, 2, 1)
    >>> none, one = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
    >>> delta_rule(k, k, v, none, one, scale=1.0).state.flatten()  # the table of keys and values
    tensor([3., 5.])
    """
    q, k, v, g, b, S = _checked(q, k, v, log_decay, rate, scale, state)
    T, outputs, carried = v.shape[2], [], None if segments is None else segments[:, :1]
    with without_autocast(v):
        for begin in range(0, T, chunk):
            part = slice(begin, min(begin + chunk, T))
            here = None if segments is None else segments[:, part]
            q_c, k_c, v_c, g_c, b_c = (x[:, :, part] for x in (q, k, v, g, b))
            o, S = _chunk(_Chunk(q_c, k_c, v_c, g_c, b_c, here, carried), S)
            carried = None if here is None else here[:, -1:]
            outputs.append(o)
    return DeltaOutput(torch.cat(outputs, 2) if outputs else v, S)


def delta_rule_by_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
) -> DeltaOutput:
    """``delta_rule`` token by token, as it is defined: for one token, and as the reference.

    >>> k, v, none = torch.ones(1, 1, 3, 1), torch.full((1, 1, 3, 1), 8.0), torch.zeros(1, 1, 3)
    >>> delta_rule_by_step(k, k, v, none, none + 0.5).out.flatten()  # half of the error each time
    tensor([4., 6., 7.])
    """
    q, k, v, g, b, S = _checked(q, k, v, log_decay, rate, scale, state)
    outputs = []
    for t in range(v.shape[2]):
        q_t, k_t, v_t = (x[:, :, t].unsqueeze(-2) for x in (q, k, v))  # rows (B, H, 1, .)
        S = S * g[:, :, t, None, None].exp()
        S = S + k_t.mT * (b[:, :, t, None, None] * (v_t - (k_t.mT * S).sum(-2, keepdim=True)))
        outputs.append((q_t.mT * S).sum(-2, keepdim=True))
    return DeltaOutput(torch.cat(outputs, 2) if outputs else v, S)


class _Chunk(NamedTuple):
    """The inputs of C tokens, and the documents of theirs (B, C) and of the state (B, 1)."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    b: Tensor
    segments: Tensor | None
    carried: Tensor | None


def _chunk(inputs: _Chunk, S: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of one chunk and the state after it."""
    q, k, v, g, b, segments, carried = inputs
    G = g.cumsum(-1)
    causal = torch.ones(2 * (v.shape[2],), dtype=torch.bool, device=v.device).tril()
    between = G.unsqueeze(-1) - G.unsqueeze(-2)
    to_end, from_start = G[..., -1:] - G, G
    if segments is not None and carried is not None:
        same = segments.unsqueeze(-1) == segments.unsqueeze(-2)  # (B, C, C)
        causal = causal & same.unsqueeze(1)
        to_end = to_end.masked_fill(~same[:, None, -1], -torch.inf)
        from_start = G.masked_fill((segments != carried).unsqueeze(1), -torch.inf)
    decay = torch.where(causal, between, -torch.inf).exp()
    from_start = from_start.exp().unsqueeze(-1)
    A = b.unsqueeze(-1) * decay * (k @ k.mT)  # its diagonal is not read
    right = torch.cat((v, from_start * k), -1) * b.unsqueeze(-1)
    U, R = torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    W = U - R @ S
    out = from_start * (q @ S) + (decay * (q @ k.mT)) @ W
    return out, from_start[..., -1:, :] * S + (to_end.exp().unsqueeze(-1) * k).mT @ W


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    scale: float | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All in float32 or better with H heads, q scaled, and the first state."""
    shapes = [tuple(x.shape) for x in (q, k, v, log_decay, rate)]
    if any(x.dim() != 4 for x in (q, k, v)) or q.shape != k.shape or k.shape[2] != v.shape[2]:
        raise ValueError(
            f"the delta rule takes q and k (B, G, T, D) and v (B, H, T, E); got {shapes[:3]}."
        )
    B, H, T, E = v.shape
    if shapes[3:] != [(B, H, T)] * 2 or H % k.shape[1]:
        raise ValueError(
            "the delta rule takes log_decay and rate (B, H, T), and heads of keys that divide H; "
            f"got {shapes}."
        )
    wide = torch.promote_types(v.dtype, torch.float32)
    q, k = (x.to(wide).repeat_interleave(H // k.shape[1], 1) for x in (q, k))
    D = k.shape[-1]
    S = v.new_zeros(B, H, D, E, dtype=wide) if state is None else state.to(wide)
    q = q * (max(D, 1) ** -0.5 if scale is None else scale)
    return q, k, v.to(wide), log_decay.to(wide), rate.to(wide), S
