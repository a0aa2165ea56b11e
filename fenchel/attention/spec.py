"""What defines an attention call beside its tensors: choice, prior, scale and soft cap.

    s = scale * q k^T,     z = c tanh(s / c) with a soft cap c, else s
    p = choice.weights(z, log_prior),     o = p v

``AttentionSpec`` is that record, and every function of the library that scores queries against
keys takes its four fields as keywords. It unpacks into them:

    spec = AttentionSpec(choice=Entmax(1.5), prior=Causal())
    attend(q, k, v, **spec)

``AttentionCall`` adds the tensors: what a layer of a model computes in one forward pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypedDict

from torch import Tensor

from fenchel.attention.prior import Prior, PriorLike, as_prior
from fenchel.choice import MAPS, Choice, Entmax, Softmax, Sparsemax, by_name
from fenchel.choice.base import require_simplex

SOFTMAX = Softmax()
ChoiceLike = Choice | type[Choice] | str
"""What ``as_choice`` accepts."""


def as_choice(choice: ChoiceLike) -> Choice:
    """A choice map from itself, from its class, or from its name in ``fenchel.choice.MAPS``.

    >>> from fenchel.choice import Sparsemax
    >>> as_choice("entmax"), as_choice(Sparsemax)
    (Entmax(alpha=1.5, beta=1.0), Sparsemax(beta=1.0))
    """
    if isinstance(choice, Choice):
        return choice
    if isinstance(choice, str):
        return by_name(choice)
    if isinstance(choice, type) and issubclass(choice, Choice):
        try:
            return choice()
        except TypeError:
            raise TypeError(
                f"choice={choice.__name__} is a class that needs arguments; pass an instance of it."
            ) from None
    raise TypeError(
        "choice is a map such as Entmax(1.5), its class or its name "
        f"({', '.join(MAPS)}); got {type(choice).__name__}."
    )


def with_temperature(choice: Choice, beta: float | Tensor) -> Choice:
    """The map with its inverse temperature multiplied by ``beta``.

    A tensor broadcasts to (B, H, T, 1): one number per head, query and length, or fewer.

    >>> with_temperature(Softmax(2.0), 0.5)
    Softmax(beta=1.0)
    """
    if not any(field.name == "beta" for field in fields(choice)):  # type: ignore[arg-type]
        raise ValueError(f"{choice!r} has no temperature, so beta has no meaning for it.")
    if isinstance(beta, Tensor) and beta.dim() and beta.shape[-1] != 1:
        raise ValueError(
            "beta broadcasts to (B, H, T, 1), with one entry along the keys; got "
            f"{tuple(beta.shape)}."
        )
    return replace(choice, beta=choice.beta * beta)  # type: ignore[type-var]


class AttentionKeywords(TypedDict, total=False):
    """The fields of ``AttentionSpec`` as keywords of a function: ``**spec: Unpack[...]``."""

    choice: ChoiceLike
    prior: PriorLike
    scale: float | None
    softcap: float | None


@dataclass(frozen=True, eq=False, init=False)
class AttentionSpec:
    """How queries choose among keys; the arguments and their defaults are those of ``attend``.

    >>> AttentionSpec(scale=2.0).scale_for(64), AttentionSpec().scale_for(64)
    (2.0, 0.125)
    """

    choice: Choice
    prior: Prior | None
    scale: float | None
    softcap: float | None

    def __init__(
        self,
        choice: ChoiceLike = "softmax",  # an object here breaks the graphs of torch 2.11
        prior: PriorLike = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        fields = (as_choice(choice), as_prior(prior), scale, softcap)
        for name, value in zip(self.keys(), fields, strict=True):
            object.__setattr__(self, name, value)  # the class is frozen
        if self.fixed_keys:
            require_simplex(self.choice, "a sink")

    def scale_for(self, D: int) -> float:
        """What multiplies q.k for heads of width D: ``scale``, or 1 / sqrt(D) where it is None."""
        return max(D, 1) ** -0.5 if self.scale is None else self.scale

    @property
    def fixed_keys(self) -> int:
        """How many keys in front are constants that no input moves: 1 under a sink."""
        return 0 if self.prior is None else self.prior.fixed_keys

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the map, then those of the prior: what may learn beside q, k and v."""
        return self.choice.tensors() + (() if self.prior is None else self.prior.tensors())

    def with_tensors(self, tensors: Sequence[Tensor]) -> "AttentionSpec":
        """The same with other tensors in place of ``tensors()``."""
        if not tensors:
            return self
        own = len(self.choice.tensors())
        choice, prior = self.choice.with_tensors(tensors[:own]), self.prior
        if prior is not None:
            prior = prior.with_tensors(tensors[own:])
        return replace(self, choice=choice, prior=prior)

    def keys(self) -> Iterator[str]:
        """The names of the fields, so that ``**spec`` passes them as keywords."""
        yield from ("choice", "prior", "scale", "softcap")

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def exponent(choice: Choice) -> float | None:
    """alpha, with 1 for softmax; None for a map whose rows do not follow from one number.

    None for a Tsallis map close to softmax and for one above alpha = 2 too: there
    u^(1 / (alpha - 1)) loses too many digits.
    """
    if isinstance(choice, Softmax):
        return 1.0
    if isinstance(choice, Sparsemax):
        return 2.0
    if isinstance(choice, Entmax) and not isinstance(choice.alpha, Tensor):
        return float(choice.alpha) if 1.05 <= choice.alpha <= 2.0 else None
    return None


Index = slice | Tensor
"""Some entries of an axis: a slice, or a tensor of whole numbers."""


def select(choice: Choice, batch: Index, heads: Index, rows: Index) -> Choice:
    """The map for some sequences, heads and rows of the scores (B, H, T, S).

    Tensors of the map broadcast to the scores; each is cut along the axes on which it varies.
    """
    cut = []
    for x in choice.tensors():
        if x.dim():
            x = x[(None,) * (4 - x.dim())]
            for axis, index in enumerate((batch, heads, rows)):
                x = x if x.shape[axis] == 1 else x[(slice(None),) * axis + (index,)]
        cut.append(x)
    return choice.with_tensors(cut)


class AttentionCall(NamedTuple):
    """One call of ``attend``: ``attend(call.q, call.k, call.v, **call.spec)``."""

    q: Tensor
    """(B, H, T, D)."""
    k: Tensor
    """(B, G, S, D)."""
    v: Tensor
    """(B, G, S, E)."""
    spec: AttentionSpec
