"""The interface between a checkpoint and its measurement: one forward pass, taken apart.

    x_0 = embed(ids),   x_l = block_l(x_{l-1}),   logits = lm_head(x_L)

An ``InspectedModel`` is a model with its tokenizer. Its ``trace`` runs it once on ids (1, T) and
returns a ``ForwardTrace``: for every block its input and output, the block as a function of the
residual stream alone, the attention call it made, the inputs of its norm layers and its two
branches. The measurements read the trace and do not depend on the kind of model.

T tokens, M width of the stream, H heads, G heads of keys and values, D width per head.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fenchel.attention import AttentionCall
from fenchel.checkpoints.tokenizer import (
    conversation_encoder,
    describe_beginning,
    encoded_documents,
)
from fenchel.data import TextTokenizer, open_text
from fenchel.files import Notice

DEFAULT_TOKENS = 1024
"""Tokens that a model reads at most unless a number is given: a context may have a million."""
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
    attention: AttentionCall | None
    """None in a layer that gives no weights to keys, such as one of gated DeltaNet."""
    norms: tuple[NormInput, ...]
    attention_branch: Branch | None
    """The attention module; None where the block does not separate it."""
    mlp_branch: Branch | None
    gate: Tensor | None = None
    """The factor on the outputs of attention, a mean over the entries of each head, (H, T), where
    the layer has a gate."""


class ForwardTrace(NamedTuple):
    """A forward pass on some ids."""

    blocks: tuple[BlockTrace, ...]
    lm_head: Map | None
    """The stream after the last block to the logits of the last token, (1, T, M) -> (V,)."""

    @property
    def causal(self) -> bool:
        """Whether no token attends to the one behind it, so that the logits predict the next."""
        return all(is_causal(call) for call in self.calls.values())

    @property
    def calls(self) -> dict[int, AttentionCall]:
        """The attention calls by the index of their block, of the blocks that attend."""
        blocks = enumerate(self.blocks)
        return {at: block.attention for at, block in blocks if block.attention is not None}


def is_causal(call: AttentionCall) -> bool:
    """Whether no query of a call attends to the key behind its own."""
    q, prior = call.q, call.spec.prior
    (B, H, T, _), S = q.shape, call.k.shape[2]
    if T == 1:
        return True
    if prior is None:
        return False
    behind = 1 + S - T  # a sink stands in front
    rows, keys = slice(0, 1), slice(behind, behind + 1)
    ahead = prior.log(T, S, B=B, H=H, device=q.device, rows=rows, keys=keys)
    return not bool((ahead > -torch.inf).any())


@dataclass(frozen=True, kw_only=True, eq=False)
class InspectedModel(ABC):
    """A model with its tokenizer and a description of both."""

    name: str
    """The name of its folder."""
    family: str
    """The kind of model, such as "gpt2"."""
    model: nn.Module
    tokenizer: TextTokenizer
    context: int | None
    """The longest sequence it accepts; None where it states none."""
    stored: str
    """The dtype of its weights on disk."""
    folder: Path | None = None
    """Where it was read from."""

    @abstractmethod
    def trace(self, ids: Tensor) -> ForwardTrace:
        """Run the model once on (1, T) and record every block."""

    def prompt(self, text: str, *, chat: bool = False) -> list[int]:
        """Ids of a text, or of the message of a user and the beginning of an answer."""
        if not chat:
            return self.tokenizer.encode_whole(text)
        return conversation_encoder(self.tokenizer, self.folder)(
            [{"role": "user", "content": text}]
        )

    def documents(self, source: str) -> Iterator[list[int]]:
        """Ids of the documents of a text, which may be conversations."""
        return encoded_documents(source, self.tokenizer, self.folder)

    def require_known(self, ids: Tensor, known: int) -> None:
        """Refuse ids that the model's table of ``known`` tokens does not have."""
        if (most := int(ids.max())) >= known:
            raise ValueError(
                f"the tokenizer of {self.name} gives the id {most} and the model has {known}; it "
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
            "begin": describe_beginning(self.tokenizer),
        }


class TokenizedText(NamedTuple):
    """One sequence of tokens."""

    name: str
    """The name of the text."""
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    """The text of each id alone."""


def tokenize_text(
    model: InspectedModel, source: str, max_tokens: int | None = None
) -> TokenizedText:
    """The first tokens of a text: ``max_tokens`` and the model's context at most.

    Without ``max_tokens`` at most ``DEFAULT_TOKENS``, and a Notice if the text has more.
    """
    if max_tokens is not None and max_tokens < 2:
        raise ValueError(f"max_tokens={max_tokens} should be 2 or more.")
    limit = max_tokens or DEFAULT_TOKENS
    if model.context is not None:
        limit = min(limit, model.context)
    ids: list[int] = []
    for document in model.documents(source):
        ids += document
        if len(ids) > limit:
            break
    if len(ids) > limit and limit != max_tokens:
        why = f"all that {model.name} takes" if limit == model.context else "by default"
        warnings.warn(
            f"The first {limit:,} tokens of {source} are read, {why}; --max-tokens takes "
            f"{'fewer' if limit == model.context else 'another number'}.",
            Notice,
            stacklevel=2,
        )
    ids = ids[:limit]
    if len(ids) < 2:
        raise ValueError(f"{source} has {len(ids)} tokens; at least 2 are needed to attend.")
    name = open_text(source).name
    return TokenizedText(name, tuple(ids), tuple(token_text(model.tokenizer, i) for i in ids))


def token_text(tokenizer: TextTokenizer, token: int) -> str:
    """The text of one token; a control token by its name, half a character by its bytes."""
    text = tokenizer.decode([token])
    if text and "\ufffd" not in text:
        return text
    return tokenizer.id_to_token(token) or f"[{token}]"
