"""What defines an attention call beside its tensors: choice, prior, scale and soft cap.

    s = scale * q k^T,     z = c tanh(s / c) with a soft cap c, else s
    p = choice.weights(z, log_prior),     o = p v

``AttentionSpec`` is that record, and every function of the library that scores queries against
keys takes its four fields as keywords. It unpacks into them:

    spec = AttentionSpec(choice=Entmax(1.5), prior=Causal())
    attend(q, k, v, **spec)

``AttentionCall`` adds the tensors: what a layer of a model computes in one forward pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

from torch import Tensor

from fenchel.attention.prior import Prior
from fenchel.choice import Choice, Softmax

SOFTMAX = Softmax()


class AttentionKeywords(TypedDict, total=False):
    """The fields of ``AttentionSpec`` as keywords of a function: ``**spec: Unpack[...]``."""

    choice: Choice
    prior: Prior | None
    scale: float | None
    softcap: float | None


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """How queries choose among keys; the defaults are those of ``attend``.

    >>> AttentionSpec(scale=2.0).scale_for(64), AttentionSpec().scale_for(64)
    (2.0, 0.125)
    """

    choice: Choice = SOFTMAX
    prior: Prior | None = None
    scale: float | None = None
    softcap: float | None = None

    def scale_for(self, D: int) -> float:
        """What multiplies q.k for heads of width D: ``scale``, or 1 / sqrt(D) where it is None."""
        return D**-0.5 if self.scale is None else self.scale

    def keys(self) -> Iterator[str]:
        """The names of the fields, so that ``**spec`` passes them as keywords."""
        yield from ("choice", "prior", "scale", "softcap")

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class AttentionCall(NamedTuple):
    """One call of ``attend``: ``attend(call.q, call.k, call.v, **call.spec)``."""

    q: Tensor
    """(B, H, T, D)."""
    k: Tensor
    """(B, G, S, D)."""
    v: Tensor
    """(B, G, S, E)."""
    spec: AttentionSpec
