"""Which back end can serve which attention call, in one place to read.

``why_not(backend, call)`` gives the first reason a back end cannot serve a call, or None when it
can. A call is described by plain facts, so that nothing here knows a class of another package and
nothing is computed to ask; Triton is not imported.
"""

from dataclasses import dataclass

import torch

BACKENDS = ("reference", "blocked", "sdpa", "flex")


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What a back end needs to know of one call of ``attend``; letters as in its page."""

    choice: str
    """Name of the map: "Softmax", "Entmax", "Sparsemax", "Hard", "Capped"."""
    device: str
    """Where q lives: "cpu", "cuda"."""
    dtype: torch.dtype
    H: int
    G: int
    T: int
    S: int
    D: int
    E: int
    prior: bool = False
    """Whether there is a prior that the back end has to be told of."""
    learns: bool = False
    """Whether a gradient is wanted for the prior or for a setting of the map."""
    gradient: bool = False
    """Whether a gradient is wanted at all."""
    tangent: bool = False
    """Whether forward-mode derivatives are being carried."""
    dropout: float = 0.0
    weights: bool = False
    """Whether the weights are to be returned."""
    transformed: bool = False
    """Whether a gradient for the prior is wanted inside a transform of torch.func."""
    softcap: bool = False
    """Whether scores are softly capped."""
    warms: bool = False
    """Whether the temperature of the map is a tensor."""


def why_not(backend: str, call: Call) -> str | None:
    """The first reason ``backend`` cannot serve ``call``; None when it can."""
    if backend not in BACKENDS:
        return f"there is no back end {backend!r}; known: {', '.join(BACKENDS)}"
    return _ANSWERS[backend](call)


def _reference(call: Call) -> str | None:  # noqa: ARG001
    return None


def _blocked(call: Call) -> str | None:
    if call.weights:
        return "the blocked back end never holds all weights; attention_weights gives chosen rows"
    if call.softcap and call.warms:
        return "the blocked back end caps scores under a temperature that is a number, not a tensor"
    return None


def _sdpa(call: Call) -> str | None:
    if call.softcap:
        return "torch's fused kernels have no soft-cap"
    if call.transformed:
        return "torch's fused kernels refuse a prior that learns inside torch.func"
    return _only_softmax(call, "torch's fused kernels")


def _flex(call: Call) -> str | None:
    if reason := _only_softmax(call, "FlexAttention"):
        return reason
    if call.dropout:
        return "FlexAttention has no dropout"
    if call.dtype == torch.float64 and call.device != "cpu":
        return "FlexAttention's kernels know float16, bfloat16 and float32"
    if call.device == "cpu" and call.gradient:
        return "FlexAttention has no backward on a CPU"
    if min(call.T, call.S) == 0:
        return "FlexAttention needs at least one query and one key"
    return None


def _only_softmax(call: Call, who: str) -> str | None:
    if call.choice != "Softmax":
        return f"{who} know{'s' if who.endswith('n') else ''} softmax, not {call.choice}"
    if call.weights:
        return f"{who} cannot return the weights"
    if call.tangent:
        return f"{who} cannot carry tangents"
    return None


_ANSWERS = {"reference": _reference, "blocked": _blocked, "sdpa": _sdpa, "flex": _flex}
