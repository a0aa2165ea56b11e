"""The back ends of attention as one table: what each serves, how it is called, what it costs.

``attend``, ``serves``, ``fenchel doctor`` and ``backend="auto"`` read ``BACKENDS``. A new back end
is one entry of it, its file, and a line of the contract test. An entry has

    why_not(call)     the first reason why the back end cannot serve a call, None when it can
    attend(...)       outputs, and the weights where they are returned
    cost(call)        the estimated time of the call; auto takes the cheapest that serves

A call is described by plain facts (``CallFacts``), so that nothing is computed to decide.

**The costs.** On a CPU and on a GPU, a pass over the scores takes about

    start + rate * (scores visited)       microseconds

where the scores visited are all of them, or with ``key_range`` those that the prior leaves open
to some row of a tile. The constants are measured by ``python -m benchmarks attention_auto``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fenchel.attention import blocked, flex, reference, sdpa
from fenchel.attention.prior import Prior
from fenchel.attention.spec import AttentionSpec


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
    beta_is_tensor: bool = False
    return_weights: bool = False
    learns: bool = False
    """Whether a gradient is wanted for a tensor of the prior or of the map."""
    gradient: bool = False
    """Whether any gradient is wanted."""
    tangent: bool = False
    """Whether forward-mode derivatives are carried."""
    transformed: bool = False
    """Whether the call is inside a transform of torch.func."""
    compiling: bool = False
    """Whether torch.compile traces the call."""


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    dropout: float = 0.0,
    return_weights: bool = False,
) -> CallFacts:
    """The facts of a call with four axes."""
    tensors = spec.tensors()
    grad = torch.is_grad_enabled()
    learns = grad and any(x.requires_grad for x in tensors)
    compiling = torch.compiler.is_compiling()
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
        beta_is_tensor=isinstance(spec.choice.beta, Tensor),
        return_weights=return_weights,
        learns=learns,
        gradient=learns or (grad and any(x.requires_grad for x in (q, k, v))),
        tangent=forward_ad._current_level >= 0,
        # torch has no public question for it
        transformed=not compiling and torch._C._functorch.peek_interpreter_stack() is not None,
        compiling=compiling,
    )


def _reference(call: CallFacts) -> str | None:  # noqa: ARG001
    return None


def _blocked(call: CallFacts) -> str | None:
    if call.return_weights:
        return "the blocked back end never holds all weights; attention_weights gives chosen rows"
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
    if min(call.T, call.S) == 0:
        return "FlexAttention needs at least one query and one key"
    return None


def _only_softmax(call: CallFacts, who: str) -> str | None:
    if call.choice != "Softmax":
        return f"{who} compute{'s' if who.endswith('n') else ''} softmax, not {call.choice}"
    if call.return_weights:
        return f"{who} cannot return the weights"
    if call.tangent:
        return f"{who} cannot carry tangents"
    return None


_ONE_PIECE = 1 << 16
"""Scores: up to here the square in one piece is quicker than tiles of it."""


def _reference_cost(call: CallFacts) -> float:
    return 1.0 if call.B * call.H * call.T * call.S <= _ONE_PIECE else 3.0


def _blocked_cost(call: CallFacts) -> float:  # noqa: ARG001
    return 2.0


def _sdpa_cost(call: CallFacts) -> float:  # noqa: ARG001
    return 0.0


def _flex_cost(call: CallFacts) -> float:  # noqa: ARG001
    return 4.0


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
    best, least = BACKENDS["reference"], math.inf
    for backend in BACKENDS.values():  # a loop that torch.compile can trace
        if backend.why_not(call) is None and (cost := backend.cost(call)) < least:
            best, least = backend, cost
    return best
