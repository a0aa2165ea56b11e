"""Softmax attention under any prior by FlexAttention, compiled.

FlexAttention takes log u point by point, as fenchel/attention/prior.py writes it: ``admits``
becomes the mask, from which whole blocks of keys are skipped, and ``bias`` is added to the score
inside the kernel. So no prior is ever written out, and one that learns gets its gradient.

Reverse derivative on a GPU, forward only on a CPU; torch raises on forward mode. The kernel is
compiled at the first call of a process and again for a new kind of prior, which takes seconds;
torch would give up after eight kinds and fall back to a dense square, so it is allowed more. Block
masks of priors that carry no tensor are kept for the next call with the same lengths.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from fenchel.attention.prior import Combined, Prior, ScoreIndex, Sum
from fenchel.choice import Choice

_KINDS = 64
_SMALL = {"BLOCK_M": 64, "BLOCK_N": 64} | dict.fromkeys(
    ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), 32
)
"""Tiles for a prior that learns: torch's own choice leaves it no room in shared memory."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: Choice,
    prior: Prior | None,
    scale: float,
    dropout: float,
    softcap: float | None = None,
) -> Tensor:
    """Outputs: (B, H, T, D), (B, G, S, D), (B, G, S, E) -> (B, H, T, E)."""
    assert not dropout
    B, H, T, S = *q.shape[:3], k.shape[2]
    beta = choice.beta
    capped = None if softcap is None else _capped(softcap, beta)
    if isinstance(beta, Tensor) and capped is None:  # a learned temperature must stay in the graph
        q, beta = q * beta.to(q.dtype), 1.0
    mask, biased = None, False
    if prior is not None:
        prior = prior.with_tensors([x.float() for x in prior.tensors()]).with_tables(q.device)
        biased = prior.bias(_probe(q, S)) is not None
        mask = _mask(prior, B, H, T, S, q)
    score = _score(prior if biased else None, capped, T, S)
    with torch._dynamo.config.patch(recompile_limit=_KINDS):
        out: Tensor = _compiled()(
            q,
            k,
            v,
            score_mod=score,
            block_mask=mask,
            scale=scale * beta if capped is None else scale,
            enable_gqa=k.shape[1] != H,
            kernel_options=_SMALL if q.is_cuda and prior is not None and _learns(prior) else None,
        )
    return out


def _learns(prior: Prior) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in prior.tensors())


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)


def _capped(softcap: float, beta: float | Tensor) -> Callable[[Tensor], Tensor]:
    """beta c tanh(s / c): the temperature comes after the cap."""

    def capped(s: Tensor) -> Tensor:
        return beta * (softcap * torch.tanh(s / softcap))

    return capped


def _score(
    prior: Prior | None, capped: Callable[[Tensor], Tensor] | None, T: int, S: int
) -> Callable[..., Tensor] | None:
    """What happens to a score inside the kernel; None is nothing."""
    if prior is None and capped is None:
        return None

    def score(z: Tensor, b: Tensor, h: Tensor, t: Tensor, j: Tensor) -> Tensor:
        z = z if capped is None else capped(z)
        bias = None if prior is None else prior.bias(ScoreIndex(b, h, t + (S - T), j, S))
        return z if bias is None else z + bias

    return score


def _mask(prior: Prior, B: int, H: int, T: int, S: int, q: Tensor) -> BlockMask | None:
    parts = prior.parts if isinstance(prior, Sum) else (prior,)
    parts = tuple(part for part in parts if part.admits(_probe(q, S)) is not None)
    if not parts:
        return None
    masks = Sum(parts)
    make = _kept_mask if all(map(_by_value, parts)) else _fresh_mask
    return make(masks, B, H, T, S, q.device)


def _fresh_mask(prior: Prior, B: int, H: int, T: int, S: int, device: torch.device) -> BlockMask:
    def open_(b: Tensor, h: Tensor, t: Tensor, j: Tensor) -> Tensor:
        seen = prior.admits(ScoreIndex(b, h, t + (S - T), j, S))
        assert seen is not None
        return seen

    batch, heads = (B, H) if prior.varies() else (None, None)
    return create_block_mask(open_, batch, heads, T, S, device=str(device))


_kept_mask = lru_cache(maxsize=64)(_fresh_mask)


def _by_value(prior: Prior) -> bool:
    """Whether equal priors compare equal, so that what was made for one serves the other."""
    if isinstance(prior, Combined):
        return all(map(_by_value, prior.parts))
    return type(prior).__eq__ is not object.__eq__


def _probe(q: Tensor, S: int) -> ScoreIndex:
    zero = torch.zeros((), dtype=torch.int64, device=q.device)
    return ScoreIndex(zero, zero, zero, zero, S)
