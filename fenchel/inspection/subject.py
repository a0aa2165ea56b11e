"""A checkpoint as something that can be measured: blocks in a row, and what passes through them.

    x_0 = embed(ids),   x_l = block_l(x_{l-1}),   logits = read_out(x_L)

A ``Subject`` is a model with its tokenizer. ``read`` runs it once on ids (1, T) and gives a
``Reading``: for every block the stream before and after it, the block as a function of the stream
alone, the queries, keys and values its attention really used, the inputs of its norm layers, and
its two branches. Nothing downstream knows what kind of model it was.

T tokens, M width of the stream, H heads, G heads of keys and values, D width of a head.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from torch import Tensor, nn

from fenchel.attention import Prior
from fenchel.choice import Choice
from fenchel.data import encode

Map = Callable[[Tensor], Tensor]
"""Stream to stream, both (1, T, M), differentiable forward and in reverse."""


class Attention(NamedTuple):
    """One call of attention: what it chose among, and how."""

    q: Tensor
    """(1, H, T, D)."""
    k: Tensor
    """(1, G, T, D)."""
    v: Tensor
    """(1, G, T, E)."""
    choice: Choice
    prior: Prior | None
    scale: float
    softcap: float | None = None
    """c where the scores are c tanh(z / c)."""


class Norm(NamedTuple):
    """A norm layer and what it was given."""

    name: str
    x: Tensor
    """(1, T, M)."""
    weight: Tensor | None
    epsilon: float
    kind: str
    """"layer" or "rms"."""


class Branch(NamedTuple):
    """A part of a block as a function, and the place where it was called."""

    f: Map
    x: Tensor
    """(1, T, M)."""


class Passage(NamedTuple):
    """The stream through one block."""

    before: Tensor
    """(1, T, M)."""
    after: Tensor
    block: Map
    near: Map
    """The block for derivatives at ``before``, and for nothing else: what it needs is kept."""
    attention: Attention
    norms: tuple[Norm, ...]
    attending: Branch | None
    """The attention branch; None where it could not be told apart."""
    thinking: Branch | None
    """The MLP."""


class Reading(NamedTuple):
    """A model on some ids."""

    passages: tuple[Passage, ...]
    read_out: Map | None
    """The stream after the last block to the logits of the last token, (1, T, M) -> (V,)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject(ABC):
    """A model, its tokenizer, and what there is to say about them."""

    name: str
    """The folder's name."""
    family: str
    """What kind of model it is, such as "gpt2"."""
    model: nn.Module
    tokenizer: Tokenizer
    context: int | None
    """The most tokens it reads; None where it does not say."""
    stored: str
    """What numbers its weights are on disk."""
    begin: Callable[[Tokenizer, str], list[int]]
    """Ids of a text that begins the way the model's own texts begin."""

    @abstractmethod
    def read(self, ids: Tensor) -> Reading:
        """Run it once on (1, T) and take notes."""

    def encode(self, text: str, *, first: bool) -> list[int]:
        """Ids of a text; the ``first`` one has a beginning, further ones are bare."""
        return self.begin(self.tokenizer, text) if first else encode(self.tokenizer, text)

    def require_known(self, ids: Tensor, known: int) -> None:
        """Refuse ids that the model's table of ``known`` tokens does not have."""
        if (most := int(ids.max())) >= known:
            raise ValueError(
                f"the tokenizer of {self.name} gives the id {most} and the model knows {known}; it "
                "is not the tokenizer of this model."
            )

    def facts(self) -> dict[str, Any]:
        """What a reader wants to know of it, as plain values."""
        return {
            "name": self.name,
            "family": self.family,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "context": self.context,
            "stored": self.stored,
        }
