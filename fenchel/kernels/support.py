"""Which back end can serve which attention call, in one place to read.

``why_not(backend, call)`` gives the first reason a back end cannot serve a call, or None when it
can. A call is described by plain facts, so that nothing here knows a class of another package and
nothing is computed to ask; Triton is not imported.
"""

from dataclasses import dataclass

import torch

BACKENDS = ("reference", "sdpa")


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
    temperature: str = "number"
    """beta: a "number", one learned "scalar", or a "tensor" that differs between rows."""
    learns: bool = False
    """Whether a gradient is wanted for the prior or for a setting of the map."""
    gradient: bool = False
    """Whether a gradient is wanted at all."""
    tangent: bool = False
    """Whether forward-mode derivatives are being carried."""
    dropout: float = 0.0
    weights: bool = False
    """Whether the weights are to be returned."""


def why_not(backend: str, call: Call) -> str | None:
    """The first reason ``backend`` cannot serve ``call``; None when it can."""
    if backend not in BACKENDS:
        return f"there is no back end {backend!r}; known: {', '.join(BACKENDS)}"
    return _ANSWERS[backend](call)


def _reference(call: Call) -> str | None:  # noqa: ARG001
    return None


def _sdpa(call: Call) -> str | None:
    if call.choice != "Softmax":
        return f"torch's fused kernels know softmax, not {call.choice}"
    if call.temperature == "tensor":
        return "beta differs between rows in a way a query cannot carry"
    if call.weights:
        return "torch's fused kernels do not give the weights"
    if call.tangent:
        return "torch's fused kernels carry no tangents"
    return None


_ANSWERS = {"reference": _reference, "sdpa": _sdpa}
