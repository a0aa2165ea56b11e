"""The interface between a checkpoint and its measurement: one forward pass, taken apart.

    x_0 = embed(ids),   x_l = block_l(x_{l-1}),   logits = lm_head(x_L)

An ``InspectedModel`` is a model with its tokenizer. Its ``trace`` runs it once on ids (1, T) and
returns a ``ForwardTrace``: for every block its input and output, the block as a function of the
residual stream alone, the attention call it made, the inputs of its norm layers and its two
branches. The measurements read the trace and do not depend on the kind of model.

T tokens, M width of the stream, H heads, G heads of keys and values, D width of a head.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from torch import Tensor, nn

from fenchel.attention import AttentionCall
from fenchel.data import encode

Map = Callable[[Tensor], Tensor]
"""Stream to stream, both (1, T, M), differentiable forward and in reverse."""


class NormInput(NamedTuple):
    """A norm layer and its input."""

    name: str
    x: Tensor
    """(1, T, M)."""
    weight: Tensor | None
    epsilon: float
    kind: str
    """"layer" or "rms"."""


class Branch(NamedTuple):
    """A part of a block as a function of its input, and that input."""

    f: Map
    x: Tensor
    """(1, T, M)."""


class BlockTrace(NamedTuple):
    """One block during the forward pass."""

    input: Tensor
    """The residual stream before the block, (1, T, M)."""
    output: Tensor
    """The stream after it."""
    forward: Map
    linearised: Map
    """The block for first derivatives at ``input``, and for nothing else: attention and
    activations are replaced by their tangents there."""
    attention: AttentionCall
    norms: tuple[NormInput, ...]
    attention_branch: Branch | None
    """The attention module; None where the block does not separate it."""
    mlp_branch: Branch | None


class ForwardTrace(NamedTuple):
    """A forward pass on some ids."""

    blocks: tuple[BlockTrace, ...]
    lm_head: Map | None
    """The stream after the last block to the logits of the last token, (1, T, M) -> (V,)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class InspectedModel(ABC):
    """A model with its tokenizer and a description of both."""

    name: str
    """The name of its folder."""
    family: str
    """The kind of model, such as "gpt2"."""
    model: nn.Module
    tokenizer: Tokenizer
    context: int | None
    """The longest sequence it accepts; None where it states none."""
    stored: str
    """The dtype of its weights on disk."""
    encode_start: Callable[[Tokenizer, str], list[int]]
    """Ids of a text with the control tokens that begin a sequence of this model."""

    @abstractmethod
    def trace(self, ids: Tensor) -> ForwardTrace:
        """Run the model once on (1, T) and record every block."""

    def encode(self, text: str, *, first: bool) -> list[int]:
        """Ids of a text; only the ``first`` text of a sequence gets its control tokens."""
        return self.encode_start(self.tokenizer, text) if first else encode(self.tokenizer, text)

    def require_known(self, ids: Tensor, known: int) -> None:
        """Refuse ids that the model's table of ``known`` tokens does not have."""
        if (most := int(ids.max())) >= known:
            raise ValueError(
                f"the tokenizer of {self.name} gives the id {most} and the model knows {known}; it "
                "is not the tokenizer of this model."
            )

    def facts(self) -> dict[str, Any]:
        """The description as plain values."""
        return {
            "name": self.name,
            "family": self.family,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "context": self.context,
            "stored": self.stored,
        }
