"""Softmax attention under any prior by FlexAttention, compiled.

FlexAttention takes log u point by point, as fenchel/attention/prior.py defines it: ``admits``
becomes the mask, from which whole blocks of keys are skipped, and ``bias`` is added to the score
inside the kernel. So no prior is ever written out, and one that learns gets its gradient.

Reverse derivative on a GPU, forward only on a CPU; torch raises on forward mode. The kernel is
compiled for every new kind of prior, which takes seconds: for exactly the lengths of the first call
of the process, as a training run has them, and once more for all other lengths. Lengths enter the
kernel as tensors wherever a prior computes with them, so that a new length compiles nothing. torch
would give up after eight kinds and fall back to a dense square; the limit is raised, and kinds that
a caller compiles do not count towards it. Block masks of priors that carry no tensor are cached for
the next call with the same lengths.
"""

import os
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.util import find_spec
from shutil import which
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from fenchel.attention.bias import Sink
from fenchel.attention.prior import Combined, Prior, PriorSum, ScoreIndex
from fenchel.attention.sink import with_sink_factor
from fenchel.attention.spec import AttentionSpec

_KINDS = 64
_SMALL = {"BLOCK_M": 64, "BLOCK_N": 64} | dict.fromkeys(
    ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), 32
)
"""Tiles for a prior that learns or is a table: torch's own do not fit into shared memory."""


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, dropout: float) -> Tensor:
    """Outputs: (B, H, T, D), (B, G, S, D), (B, G, S, E) -> (B, H, T, E)."""
    assert not dropout
    device = q.device
    if torch.is_autocast_enabled(device.type):  # as torch's fused kernels do; flex does not
        q, k, v = (x.to(torch.get_autocast_dtype(device.type)) for x in (q, k, v))
    if k is v or q is k or q is v:  # torch 2.12 refuses one tensor for two on a CPU
        q, k, v = (x.view_as(x) for x in (q, k, v))
    B, H, T, S = *q.shape[:3], k.shape[2]
    scale, beta, prior = spec.scale_for(q.shape[-1]), spec.choice.beta, spec.prior
    capped = None if spec.softcap is None else _capped(spec.softcap, beta, device)
    if isinstance(beta, Tensor) and capped is None:  # a learned temperature must stay in the graph
        q, beta = q * beta.to(q.dtype), 1.0
    sink = None
    if type(prior) is Sink and (prior.outside or (prior.padded and S > 1)):
        k, v = prior.without_sink(k, v)
        S, sink, prior = k.shape[2], prior, prior.prior
    mask, biased = None, False
    if prior is not None:
        prior = prior.with_tensors([x.float() for x in prior.tensors()]).with_tables(device)
        biased = prior.bias(_probe(device, S)) is not None
        mask = _mask(prior, B, H, T, S, device)
    score = _score(prior if biased else None, capped, T, S, device)
    with torch.compiler.config.patch(recompile_limit=_KINDS):  # type: ignore[attr-defined]
        found = _compiled(_any_length(T, S))(
            q,
            k,
            v,
            score_mod=score,
            block_mask=mask,
            scale=scale * beta if capped is None else scale,
            enable_gqa=k.shape[1] != H,
            kernel_options=_SMALL if q.is_cuda and prior and biased and has_table(prior) else None,
            return_aux=None if sink is None else AuxRequest(lse=True),
        )
    out: Tensor
    if sink is None:
        out = found
        return out
    out, aux = found
    lse: Tensor = aux.lse
    return with_sink_factor(out, lse, sink.by_query.to(lse.device, lse.dtype).expand(lse.shape))


def has_table(prior: Prior) -> bool:
    """Whether log u is looked up, or learns."""
    learns = torch.is_grad_enabled()
    return any(x.ndim > 1 or (learns and x.requires_grad) for x in prior.tensors())


def has_bias(prior: Prior) -> bool:
    """Whether log u has a finite part."""
    return any(type(part).bias is not Prior.bias for part in prior.summands())


@cache
def can_compile(device: str) -> bool:
    """Whether kernels can be compiled: by Triton and a C compiler, for a CPU by a C++ compiler."""
    if device == "cuda":
        compilers = (os.environ.get("CC"), "cc", "gcc", "clang")
        return find_spec("triton") is not None and any(c and which(c) for c in compilers)
    return device == "cpu" and any(c and which(c) for c in (os.environ.get("CXX"), "g++"))


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """A function of our own: torch counts kinds per function, and a caller may compile torch's."""
    return flex_attention(q, k, v, **options)


@cache
def _compiled(any_length: bool) -> Any:
    return torch.compile(_flex_attention, dynamic=True if any_length else None)


_EXACT: list[tuple[int, int]] = []
"""(T, S) of the first call."""


def _any_length(T: int, S: int) -> bool:
    if not _EXACT:
        _EXACT.append((T, S))
    return (T, S) not in _EXACT


def _capped(
    softcap: float, beta: float | Tensor, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """beta c tanh(s / c): the temperature comes after the cap."""
    c = _scalar(softcap, device)  # a Python float is a symbol in a kernel for any length
    factor = (beta if isinstance(beta, Tensor) else _scalar(beta, device)) * c

    def capped(s: Tensor) -> Tensor:
        return factor * torch.tanh(s / c)

    return capped


def _score(
    prior: Prior | None,
    capped: Callable[[Tensor], Tensor] | None,
    T: int,
    S: int,
    device: torch.device,
) -> Callable[..., Tensor] | None:
    """The score_mod of FlexAttention; None for the plain score."""
    if prior is None and capped is None:
        return None
    offset, keys = _lengths(T, S, device)

    def score(z: Tensor, b: Tensor, h: Tensor, t: Tensor, j: Tensor) -> Tensor:
        z = z if capped is None else capped(z)
        bias = None if prior is None else prior.bias(ScoreIndex(b, h, t + offset, j, keys))
        return z if bias is None else z + bias

    return score


def _mask(prior: Prior, B: int, H: int, T: int, S: int, device: torch.device) -> BlockMask | None:
    probe = _probe(device, S)
    parts = tuple(part for part in prior.summands() if part.admits(probe) is not None)
    if not parts:
        return None
    masks = PriorSum(parts)
    make = _cached_block_mask if all(map(has_value_equality, parts)) else _block_mask
    by_sequence, by_head = masks.varies()
    return make(masks, B if by_sequence else None, H if by_head else None, T, S, device)


def _block_mask(
    prior: Prior, B: int | None, H: int | None, T: int, S: int, device: torch.device
) -> BlockMask:
    """Which blocks are open; B or H is None for a mask that does not vary along that axis."""
    offset, keys = _lengths(T, S, device)

    def admits(b: Tensor, h: Tensor, t: Tensor, j: Tensor) -> Tensor:
        open_ = prior.admits(ScoreIndex(b, h, t + offset, j, keys))
        assert open_ is not None
        return open_

    with torch.inference_mode(False):  # cached, it may serve a training step later
        return create_block_mask(admits, B, H, T, S, device=str(device))


_cached_block_mask = lru_cache(maxsize=64)(_block_mask)


def remakes_mask(prior: Prior) -> bool:
    """Whether the block mask is made at every call: a mask that depends on a tensor is."""
    return any(
        type(part).admits is not Prior.admits and not has_value_equality(part)
        for part in prior.summands()
    )


def has_value_equality(prior: Prior) -> bool:
    """Whether equal priors compare equal, so that a mask made for one serves the other."""
    if isinstance(prior, Combined):
        return all(map(has_value_equality, prior.parts))
    return type(prior).__eq__ is not object.__eq__


def _lengths(T: int, S: int, device: torch.device) -> tuple[Any, Any]:
    """(S - T, S) for a kernel: an offset of 0 as a number, all others as tensors."""
    return _scalar(S - T, device) if S != T else 0, _scalar(S, device)


@lru_cache(maxsize=1024, typed=True)  # 1 and 1.0 are tensors of two kinds
def _scalar(n: float, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(n, device=device)


def _probe(device: torch.device, S: int) -> ScoreIndex:
    zero = _scalar(0, device)
    return ScoreIndex(zero, zero, zero, zero, S)
