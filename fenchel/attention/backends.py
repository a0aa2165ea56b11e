"""The back ends of attention as one table: what each serves, how it is called, what it costs.

``attend``, ``backend_support``, ``fenchel doctor`` and ``backend="auto"`` read ``BACKENDS``. A new
back end is one entry of it, its file, and a line of the contract test. An entry has

    why_not(call)     the first reason why the back end cannot serve a call, None when it can
    attend(...)       outputs, and the weights where they are returned
    cost(call)        the estimated time of the call; auto takes the cheapest that serves

A call is described by plain facts (``CallFacts``), so that nothing is computed to decide.

**The costs.** A call takes about

    start + score * (scores visited) + entry * (entries of log u)

where the scores visited are all of them, or for back ends that skip keys those that the prior's
``key_range`` leaves open to some row of a tile, and the entries of log u are those written out, for
flex those computed in the kernel. ``_RATES`` has the measured constants.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fenchel.attention import blocked, entmax_triton, flex, reference, sdpa, tangent
from fenchel.attention.bias import Sink
from fenchel.attention.prior import Combined, Prior, outside_band
from fenchel.attention.spec import AttentionSpec, exponent
from fenchel.attention.tiles import tile_height
from fenchel.torch_internals import (
    carries_tangents,
    forward_transforms,
    in_func_transform,
    reverse_transforms,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFacts:
    """What decides between back ends in one call of ``attend``."""

    choice: str
    """Name of the map: "Softmax", "Entmax", ..."""
    prior: Prior | None = None
    device: str
    """The device of q: "cpu", "cuda"."""
    dtype: torch.dtype
    B: int
    H: int
    T: int
    S: int
    D: int
    E: int
    dropout: float = 0.0
    softcap: bool = False
    alpha: float | None = None
    """As ``spec.exponent`` gives it."""
    beta_is_tensor: bool = False
    return_weights: bool = False
    learns: bool = False
    """Whether a tensor of the prior or of the map requires a gradient."""
    gradient: bool = False
    """Whether any tensor of the call requires a gradient."""
    tangent: bool = False
    """Whether forward-mode derivatives are carried."""
    transformed: bool = False
    """Whether the call is inside a transform of torch.func."""
    second: bool = False
    """Whether torch.func takes two derivatives of the call."""
    twice: bool = False
    """Whether torch.func takes two reverse derivatives of the call."""
    beyond_second: bool = False
    """Whether torch.func takes three derivatives of the call, or two forward ones."""
    forward_twice: bool = False
    """Whether torch.func takes two forward derivatives of the call."""
    compiling: bool = False
    """Whether torch.compile traces the call."""


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    dropout: float = 0.0,
    return_weights: bool = False,
    learned: tuple[Tensor | float, ...] = (),
) -> CallFacts:
    """The facts of a call with four axes; ``learned`` may need gradients beside its tensors."""
    tensors = spec.tensors()
    grad = torch.is_grad_enabled()
    learns = grad and any(x.requires_grad for x in tensors)
    compiling = torch.compiler.is_compiling()
    transformed = not compiling and in_func_transform()
    reverse, forward = (reverse_transforms(), forward_transforms()) if transformed else (0, 0)
    return CallFacts(
        choice=type(spec.choice).__name__,
        prior=spec.prior,
        device=q.device.type,
        dtype=q.dtype,
        B=q.shape[0],
        H=q.shape[1],
        T=q.shape[2],
        S=k.shape[2],
        D=q.shape[3],
        E=v.shape[3],
        dropout=dropout,
        softcap=spec.softcap is not None,
        alpha=exponent(spec.choice),
        beta_is_tensor=isinstance(spec.choice.beta, Tensor),
        return_weights=return_weights,
        learns=learns,
        gradient=learns
        or (grad and any(isinstance(x, Tensor) and x.requires_grad for x in (q, k, v, *learned))),
        tangent=carries_tangents(),
        transformed=transformed,
        second=reverse + forward > 1,
        twice=reverse > 1,
        beyond_second=reverse + forward > 2 or forward > 1,
        forward_twice=forward > 1,
        compiling=compiling,
    )


def _reference(call: CallFacts) -> str | None:  # noqa: ARG001
    return None


def _blocked(call: CallFacts) -> str | None:
    if call.return_weights:
        return "the blocked back end never holds all weights; attention_weights gives chosen rows"
    if call.forward_twice:
        return "the blocked back end has one forward derivative; torch would drop a second one"
    if call.softcap and call.beta_is_tensor:
        return "the blocked back end caps scores under a temperature that is a number, not a tensor"
    return None


def _sdpa(call: CallFacts) -> str | None:
    if call.softcap:
        return "torch's fused kernels have no soft-cap"
    if call.transformed and call.learns:
        return "torch's fused kernels refuse a prior that learns inside torch.func"
    return _only_softmax(call, "torch's fused kernels")


def _flex(call: CallFacts) -> str | None:
    if reason := _only_softmax(call, "FlexAttention"):
        return reason
    if call.dropout:
        return "FlexAttention has no dropout"
    if call.dtype == torch.float64 and call.device != "cpu":
        return "FlexAttention's kernels take float16, bfloat16 and float32"
    if call.device == "cpu" and call.gradient:
        return "FlexAttention has no backward on a CPU"
    if call.device != "cpu" and min(call.D, call.E) < 16:
        return "FlexAttention's kernels take heads of width 16 or more"
    if min(call.T, call.S) == 0:
        return "FlexAttention needs at least one query and one key"
    return None


def _triton(call: CallFacts) -> str | None:
    kernels = "the Triton kernels"
    if call.choice not in ("Entmax", "Sparsemax"):
        return f"{kernels} compute entmax, not {call.choice}"
    if call.alpha is None:
        return f"{kernels} take an alpha that is a number from 1.05 to 2"
    if call.return_weights:
        return f"{kernels} cannot return the weights"
    if call.second or (call.tangent and call.gradient):
        return f"{kernels} have one derivative"
    if call.dropout:
        return f"{kernels} have no dropout"
    if call.softcap:
        return f"{kernels} have no soft-cap"
    if call.dtype == torch.float64:
        return f"{kernels} take float16, bfloat16 and float32"
    if max(call.D, call.E) > entmax_triton.WIDEST:
        return f"{kernels} take heads of width {entmax_triton.WIDEST} or less"
    if max(call.T, call.S) > entmax_triton.LONGEST:
        return f"{kernels} take {entmax_triton.LONGEST} queries and keys at most"
    if prior := outside_band(call.prior, entmax_triton.BAND_FIELDS):
        return f"{kernels} have no prior of the kind {prior}"
    return (
        None if entmax_triton.can_run(call.device) else f"{kernels} need a GPU of NVIDIA and Triton"
    )


def _tangent(call: CallFacts) -> str | None:
    if call.compiling:
        return "torch.compile would drop the forward derivative of the tangent kernels"
    if not tangent.runs_on(call.device):
        return "the tangent kernels run on a Hopper GPU (sm_90), with Triton"
    if call.choice != "Softmax":
        return f"the tangent kernels compute softmax, not {call.choice}"
    if call.return_weights:
        return "the tangent kernels cannot return the weights"
    if call.dropout:
        return "the tangent kernels have no dropout"
    if call.softcap:
        return "the tangent kernels have no soft-cap"
    if call.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return "the tangent kernels take float16, bfloat16 and float32"
    if not 0 < max(call.D, call.E) <= (widest := tangent.widest(call.dtype)):
        return f"the tangent kernels take heads of a width up to {widest} in {call.dtype}"
    if part := outside_band(call.prior):
        return f"the tangent kernels have no {part}"
    followed = call.learns or call.transformed or call.tangent
    if followed and call.prior is not None and call.prior.tensors():
        return "the tangent kernels have no derivative in a prior that is a tensor"
    if call.beyond_second:
        return "the tangent kernels have first and second derivatives, one of them forward at most"
    return None


def _only_softmax(call: CallFacts, kernels: str) -> str | None:
    if call.choice != "Softmax":
        verb = "computes" if kernels.endswith("n") else "compute"
        return f"{kernels} {verb} softmax, not {call.choice}"
    if call.return_weights:
        return f"{kernels} cannot return the weights"
    if call.tangent:
        return f"{kernels} cannot carry tangents"
    if call.twice:
        return f"{kernels} cannot be differentiated twice"
    return None


class _Rate(NamedTuple):
    """The time that a back end takes for one call on one kind of device."""

    start: float
    """Microseconds before the first score."""
    score: float
    """Picoseconds per score visited."""
    entry: float = 0.0
    """Picoseconds per entry of log u."""
    mask: float = 0.0
    """Picoseconds per entry of FlexAttention's mask where it is made anew."""


# Fitted to measurements, forward (False) and forward with backward (True).
#   cpu     the cases of benchmarks/attention_auto.py, float32, 4 heads of 64, 512 to 4096 keys, in
#           CPU seconds of one core with AVX-512; the start of blocked and the rates of flex on two.
#   cuda    the same on an H200, bfloat16, 16k tokens in 16 heads of 64, 256 to 8192 keys: all four
#           numbers of sdpa and flex; those of reference and blocked are estimates. A call there
#           takes the longer of what the host and the device need; the starts are a compromise.
#           triton: normal scores at 16,384 keys; tangent: 8,192 keys; their starts are estimates.
_RATES: dict[tuple[str, bool], dict[str, _Rate]] = {
    ("cpu", False): {
        "reference": _Rate(0.0, 10e3),
        "blocked": _Rate(10000.0, 9e3, 1e3),
        "sdpa": _Rate(0.0, 4.5e3, 2.5e3),
        "fused": _Rate(0.0, 4.5e3),
        "flex": _Rate(300.0, 6e3, 0.0, 5e3),
        "flex with a table": _Rate(300.0, 6e3, 0.0, 5e3),
    },
    ("cpu", True): {
        "reference": _Rate(0.0, 19e3),
        "blocked": _Rate(1500.0, 26e3, 9e3),
        "sdpa": _Rate(0.0, 13.8e3, 1e3),
        "fused": _Rate(0.0, 13.8e3),
    },
    ("cuda", False): {
        "reference": _Rate(150.0, 20.0, 8.0),
        "blocked": _Rate(600.0, 15.0, 8.0),
        "sdpa": _Rate(60.0, 1.05, 9.2),
        "fused": _Rate(20.0, 0.6),
        "flex": _Rate(320.0, 0.7, 1.2, 10.0),
        "flex with a table": _Rate(2300.0, 0.7, 8.0, 10.0),
        "triton": _Rate(150.0, 2.6),
        "tangent": _Rate(100.0, 2.0),
    },
    ("cuda", True): {
        "reference": _Rate(400.0, 50.0, 8.0),
        "blocked": _Rate(1500.0, 40.0, 16.0),
        "sdpa": _Rate(200.0, 3.6, 9.0),
        "fused": _Rate(50.0, 2.1),
        "flex": _Rate(1200.0, 2.5, 3.3, 10.0),
        "flex with a table": _Rate(4000.0, 2.5, 300.0, 10.0),
        "triton": _Rate(400.0, 4.4),
        "tangent": _Rate(300.0, 9.0),
    },
}
_ONE_PIECE = 1 << 16
"""Scores up to which a map other than softmax trains on the square in one piece, not in tiles."""
_LARGE_SQUARE = 1 << 20
"""Scores above which the square no longer fits the caches: it then costs three times the rate."""
_WORTH_COMPILING = 1 << 24
"""Scores below which no kernel is compiled: compiling takes seconds and would save microseconds."""
_FLEX_ROWS = 128
"""Rows of a block of FlexAttention's mask."""
_MASK_START = 5500.0
"""Microseconds to make FlexAttention's mask anew, as padding needs it at every call."""
_SAMPLES = 8
"""Bands of rows whose keys are counted to estimate how many scores are visited."""


def _rates(call: CallFacts) -> dict[str, _Rate]:
    return _RATES.get((call.device, call.gradient)) or _RATES["cuda", call.gradient]


def _squares(call: CallFacts) -> int:
    """The number of (T, S) squares in which log u differs."""
    by_sequence, by_head = (False, False) if call.prior is None else call.prior.varies()
    return (call.B if by_sequence else 1) * (call.H if by_head else 1)


def _cost(call: CallFacts, rate: str, visited: float, entries: float = 0.0) -> float:
    """Microseconds; ``visited`` and ``entries`` are parts of the scores of one head."""
    start, score, entry, _ = _rates(call)[rate]
    heads = squares = call.B * call.H
    if entries and rate in ("reference", "sdpa"):  # the others compute log u for every score
        squares = _squares(call)
    return start + 1e-6 * call.T * call.S * (score * visited * heads + entry * entries * squares)


def _reference_cost(call: CallFacts) -> float:
    scores = call.B * call.H * call.T * call.S
    if call.compiling or (call.gradient and call.choice != "Softmax"):
        # Without one number alpha the tiles are solved again for their derivative.
        solved_again = call.choice == "Entmax" and call.alpha is None and not call.compiling
        return 0.0 if scores <= (_LARGE_SQUARE if solved_again else _ONE_PIECE) else math.inf
    return _cost(call, "reference", 1.0 if scores <= _LARGE_SQUARE else 3.0, 1.0)


def _blocked_cost(call: CallFacts) -> float:
    if call.compiling:  # whose sizes may be symbols: no comparison of costs
        return 2.0
    if call.device == "cuda" and _sdpa(call) is None:  # far behind the fused kernels there
        return math.inf
    visited, entries = _visited(call, tile_height(call.T, call.S, call.device))
    return _cost(call, "blocked", visited, entries)


def _sdpa_cost(call: CallFacts) -> float:
    if call.compiling:
        return -1.0
    prior, S = call.prior, call.S
    if type(prior) is Sink and prior.padded and _sdpa_fuses_sink(prior.prior, S - 1, call):
        prior, S = prior.prior, S - 1
    flag = sdpa.causal_flag(prior, call.T, S)
    if flag is None:
        return _cost(call, "sdpa", 1.0, 1.0)
    return _cost(call, "fused", 0.5 if flag else 1.0)


def _sdpa_fuses_sink(prior: Prior | None, S: int, call: CallFacts) -> bool:
    sizes = (call.T, S, call.D, call.E)
    return sdpa.fuses_sink(prior, call.device, call.dtype, sizes, call.dropout)


def takes_sink_as_factor(name: str, call: CallFacts) -> bool:
    """Whether the back end serves a sink outside of the keys, for a call described without it."""
    if name == "auto":
        name = "sdpa" if call.compiling else cheapest(call).name
    if name == "sdpa":
        return _sdpa(call) is None and _sdpa_fuses_sink(call.prior, call.S, call)
    return name == "flex" and _flex(call) is None


def _flex_cost(call: CallFacts) -> float:
    """The cost of flex, infinite where auto leaves it out though it serves.

    The gradient of a prior that learns is added up in no fixed order, so that two runs would
    differ. Inside torch.func and torch.compile it has not been proved.
    """
    if type(call.prior) is Sink and call.prior.padded:  # a factor behind the kernel
        inner = call.prior.prior
        learns = call.learns and (call.beta_is_tensor or (inner is not None and _learns(inner)))
        call = replace(call, prior=inner, S=call.S - 1, learns=learns)
    prior = call.prior
    if call.learns or call.compiling or call.transformed or call.tangent:
        return math.inf
    scores = call.B * call.H * call.T * call.S
    if scores < _WORTH_COMPILING or not flex.can_compile(call.device):
        return math.inf
    if call.device == "cpu" and call.T != call.S:  # torch's C++ for any length may not compile
        return math.inf
    visited, _ = _visited(call, _FLEX_ROWS)
    if prior is None:
        return _cost(call, "flex", visited)
    rate = "flex with a table" if flex.has_table(prior) else "flex"
    cost = _cost(call, rate, visited, visited if flex.has_bias(prior) else 0.0)
    if flex.remakes_mask(prior):
        cost += _MASK_START + 1e-6 * _rates(call)[rate].mask * _squares(call) * call.T * call.S
    return cost


def _learns(prior: Prior) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in prior.tensors())


def _triton_cost(call: CallFacts) -> float:
    """The cost of the Triton kernels, infinite for calls too small to compile them."""
    if call.device != "cuda":  # the interpreter is for tests
        return math.inf
    if call.compiling:
        return 1.0
    if call.B * call.H * call.T * call.S < _WORTH_COMPILING // 16:
        return math.inf
    visited, _ = _visited(call, _FLEX_ROWS)
    return _cost(call, "triton", visited)


def _tangent_cost(call: CallFacts) -> float:
    """Infinite where torch's own kernels serve, which are quicker without tangents."""
    if call.device != "cuda" or not (call.tangent or call.twice):
        return math.inf
    visited, _ = _visited(call, _FLEX_ROWS)
    return _cost(call, "tangent", visited)


def _visited(call: CallFacts, height: int) -> tuple[float, float]:
    """The parts of the square that bands of ``height`` rows visit, and where log u is not 0."""
    prior, T, S = call.prior, call.T, call.S
    if prior is None or not T or not S:
        return 1.0, 0.0
    keys = entries = 0
    for i in range(_SAMPLES):
        row = i * max(0, T - height) // (_SAMPLES - 1)
        first, last = row + S - T, min(row + height, T) - 1 + S - T
        low, high = prior.key_range(first, last, S)
        zero_low, zero_high = prior.zero_range(first, last, S)
        keys += high - low
        entries += high - low - max(0, min(high, zero_high) - max(low, zero_low))
    return keys / (_SAMPLES * S), entries / (_SAMPLES * S)


def _without_weights(attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    return lambda *call: (attend(*call), None)


@dataclass(frozen=True)
class Backend:
    """One way to compute attention."""

    name: str
    why_not: Callable[[CallFacts], str | None]
    """The first reason why it cannot serve a call; None when it can."""
    attend: Callable[[Tensor, Tensor, Tensor, AttentionSpec, float], tuple[Tensor, Tensor | None]]
    """(outputs, weights or None) from q, k, v with four axes, the spec and dropout."""
    cost: Callable[[CallFacts], float]
    """The estimated time of a call it serves, for comparison with the others."""


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("reference", _reference, reference.attend, _reference_cost),
        Backend("blocked", _blocked, _without_weights(blocked.attend), _blocked_cost),
        Backend("sdpa", _sdpa, _without_weights(sdpa.attend), _sdpa_cost),
        Backend("flex", _flex, _without_weights(flex.attend), _flex_cost),
        Backend("triton", _triton, _without_weights(entmax_triton.attend), _triton_cost),
        Backend("tangent", _tangent, _without_weights(tangent.attend), _tangent_cost),
    )
}


def backend_named(name: str, call: CallFacts) -> Backend:
    """The back end of that name, or for "auto" the cheapest; raises where it cannot serve."""
    if name == "auto":
        return cheapest(call)
    if name not in BACKENDS:
        raise ValueError(f"there is no back end {name!r}; known: auto, {', '.join(BACKENDS)}.")
    if reason := BACKENDS[name].why_not(call):
        raise ValueError(f'backend "{name}" cannot serve this call: {reason}.')
    return BACKENDS[name]


def cheapest(call: CallFacts) -> Backend:
    """The back end that ``auto`` takes."""
    if call.compiling:
        return _cheapest(call)
    if call.prior is None or flex.has_value_equality(call.prior):
        return _cached_cheapest(call)
    by_facts = _BY_PRIOR.setdefault(call.prior, {})
    facts = tuple(getattr(call, name) for name in _FACTS)
    if facts not in by_facts:
        by_facts[facts] = _cheapest(call)
    return by_facts[facts]


def _cheapest(call: CallFacts) -> Backend:
    best, least = BACKENDS["reference"], math.inf
    for backend in BACKENDS.values():  # a loop that torch.compile can trace
        if (
            backend.why_not(call) is None
            and (cost := backend.cost(call)) < least
            and not (_LEFT_OUT and (backend.name, *_kind(call)) in _LEFT_OUT)
        ):
            best, least = backend, cost
    return best


_cached_cheapest = lru_cache(maxsize=1024)(_cheapest)
_BY_PRIOR: WeakKeyDictionary[Prior, dict[tuple[object, ...], Backend]] = WeakKeyDictionary()
"""The choice for priors that carry tensors, which are equal only to themselves."""
_FACTS = tuple(field.name for field in fields(CallFacts) if field.name != "prior")
_LEFT_OUT: set[tuple[object, ...]] = set()
"""Back ends and kinds of calls for which no kernel could be compiled on this machine."""


def leave_out(backend: Backend, call: CallFacts) -> None:
    """Let ``auto`` take another back end for calls of this kind from now on."""
    _LEFT_OUT.add((backend.name, *_kind(call)))
    clear_caches()


def clear_caches() -> None:
    """Decide anew at the next calls."""
    _cached_cheapest.cache_clear()
    _BY_PRIOR.clear()


def _kind(call: CallFacts) -> tuple[object, ...]:
    """What a compiled kernel depends on."""
    parts = call.prior.parts if isinstance(call.prior, Combined) else (call.prior,)
    return *(type(part) for part in parts), call.softcap, call.gradient, call.dtype, call.D, call.E
