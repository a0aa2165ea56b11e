"""Any decoder or encoder that transformers builds and fenchel does not, for inspection.

The model is loaded by ``fenchel.hf.loader`` and its attention is switched by ``fenchel.hf.attach``,
which works for every family that uses the attention registry of transformers: each layer passes its
queries, keys and values to ``fenchel.attention.attend``, which has derivatives in both directions
and stores no n by n weights, and the call is passed to the recorder. A family that computes its
attention itself is refused, and so is one whose attention is more than a choice among keys, sinks
included: on the first tokens the model must agree with its own eager attention before anything is
reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from fenchel.attention.spec import SOFTMAX, AttentionCall
from fenchel.checkpoints.directory import CheckpointDirectory
from fenchel.choice.base import require_simplex
from fenchel.choice.by_name import FIELD, choice_from_record
from fenchel.data import TextTokenizer
from fenchel.hf.adapter import Attachment
from fenchel.hf.loader import gives_logits, load_transformers_model, one_sentence, quiet
from fenchel.hf.multihead import attach
from fenchel.hf.verification import narrow_windows
from fenchel.inspection.recorder import BlockRecorder, CallArguments, Override, first_of
from fenchel.inspection.trace import ForwardTrace, InspectedModel, Map

_CHECKED = 64  # tokens on which the model must agree with its own eager attention
_AGREES = 1e-3  # of the largest output; two orders of float32 sums differ by far less


@dataclass
class _Listener:
    """The attention of an attached model: recorded in a trace, overridden in a linearised block."""

    recorder: BlockRecorder | None = None
    override: Override | None = None

    def observe(self, module: nn.Module, call: AttentionCall, mask: str) -> None:  # noqa: ARG002
        """Pass an attention call on to the recorder."""
        if self.recorder is not None:
            self.recorder.record_attention(call)

    def output(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """The output that replaces attention; None where it is to be computed."""
        return None if self.override is None else self.override(q, k, v)

    def run(
        self, module: nn.Module, arguments: CallArguments, x: Tensor, override: Override | None
    ) -> Tensor:
        """A module of the model on the stream x, with ``override`` for its attention."""
        self.override = override
        try:
            return arguments.call(module, x)
        finally:
            self.override = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ForeignModel(InspectedModel):
    """A model of transformers whose attention is ours."""

    reads_out: bool
    """Whether it gives logits."""
    attachment: Attachment
    listener: _Listener = field(default_factory=_Listener)

    def trace(self, ids: Tensor) -> ForwardTrace:
        """Run it once; its attention reports to the recorder."""
        self.require_ids(ids)
        with one_sentence(f"read this text with this {self.family!r} model"):
            self.require_agreement(ids)
            recorder = self.record(ids)
        blocks = recorder.block_traces()
        if not self.reads_out:
            return ForwardTrace(blocks, None)
        lm_head = self._lm_head(ids, recorder.modules, blocks[-1].output)
        return ForwardTrace(blocks, lm_head)

    def require_ids(self, ids: Tensor) -> None:
        """Refuse ids that its embedding does not have."""
        table: Any = self.model.get_input_embeddings()  # type: ignore[operator]
        self.require_known(ids, table.num_embeddings)

    def record(self, ids: Tensor) -> BlockRecorder:
        """Run the model for a recorder, without its LM head.

        Asked for the logits of the last token alone, Gemma 4 computes its last layers for no other.
        """
        recorder = self.listener.recorder = BlockRecorder(self.model, self.listener.run)
        body: Any = self.model.base_model
        try:
            with torch.no_grad(), recorder:
                body(input_ids=ids, **BARE)
        finally:
            self.listener.recorder = None
        return recorder

    def require_attention(self) -> None:
        """Refuse a family that computes its attention itself, or has none, by two tokens."""
        with one_sentence(f"read a text with this {self.family!r} model"):
            recorder = self.record(torch.zeros(1, 2, dtype=torch.long))
        if not recorder.modules:
            raise ValueError(
                f"the family {self.family!r} does not use the attention registry of transformers, "
                "so it cannot be inspected."
            )

    def _last_logits(self, ids: Tensor) -> Tensor:
        parameters = signature(self.model.forward).parameters
        last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        logits: Tensor = self.model(input_ids=ids, **BARE, **last).logits[0, -1]
        return logits

    def _lm_head(self, ids: Tensor, blocks: Sequence[nn.Module], output: Tensor) -> Map:
        """x_L -> logits of the last token.

        An LM head acts on one token at a time, so the model is run on the last one alone; where
        that does not reproduce its logits it is run on all of them.
        """
        alone = self._ending(ids[:, -1:], blocks)
        with torch.no_grad():
            logits = self._last_logits(ids)
            difference = float((alone(output) - logits).abs().amax())
        return (
            alone
            if difference <= _AGREES * float(logits.abs().amax())
            else self._ending(ids, blocks)
        )

    def _ending(self, ids: Tensor, blocks: Sequence[nn.Module]) -> Map:
        """The whole model on ids with the output of its last block replaced by x."""
        calls = sum(block is blocks[-1] for block in blocks)  # layers may be shared

        def lm_head(x: Tensor) -> Tensor:
            left = calls

            def swap(_: nn.Module, __: Any, out: Any) -> Any:
                nonlocal left
                left -= 1
                instead = x[:, -ids.shape[1] :]
                return out if left else (instead, *out[1:]) if isinstance(out, tuple) else instead

            handle = blocks[-1].register_forward_hook(swap)
            try:
                logits = self._last_logits(ids)
            finally:
                handle.remove()
            return logits

        return lm_head

    @torch.no_grad()
    def require_agreement(self, ids: Tensor) -> None:
        """Refuse a model whose own attention is more than our softmax, whatever map it has now."""
        ids = ids[:, :_CHECKED]
        with narrow_windows(self.model, ids.shape[1]):
            with attach(self.model, SOFTMAX, observer=self.listener.observe, backend="blocked"):
                ours = first_of(self.model(input_ids=ids, **BARE).to_tuple())
            with quiet(), self.attachment.eager():
                theirs = first_of(self.model(input_ids=ids, **BARE).to_tuple())
        if not bool(theirs.isfinite().all()):
            return  # run.require_finite names the block
        size = float(theirs.abs().amax())
        difference = float((ours - theirs).abs().amax())
        if not difference <= _AGREES * max(size, 1e-30):
            raise ValueError(
                f"the family {self.family!r} does more in its attention than choose and mix: its "
                f"own outputs differ from ours by {difference:.3g} of {size:.3g}, so it is not "
                "measured."
            )


BARE = {"use_cache": False, "return_dict": True}


def open_foreign(directory: CheckpointDirectory, tokenizer: TextTokenizer) -> ForeignModel:
    """The model of a Hugging Face directory in float32, built by transformers."""
    if directory.config.get("is_encoder_decoder"):
        raise ValueError(
            f"{directory.model_type!r} is an encoder and a decoder; only one or the other can be "
            "inspected."
        )
    model: Any = load_transformers_model(directory, pooler_optional=True)
    reads_out = gives_logits(model)
    model = (model if reads_out else model.base_model).requires_grad_(False)
    listener = _Listener()
    with quiet():
        stored = directory.config.get(FIELD)
        choice = SOFTMAX if stored is None else choice_from_record(stored)
        require_simplex(choice, f"an inspection of {directory.name}")
        attachment = attach(
            model,
            choice,
            observer=listener.observe,
            override=listener.output,
            backend="blocked",
        )
    foreign = ForeignModel(
        name=directory.name,
        family=directory.model_type + ("" if stored is None else f", {attachment.choice}"),
        model=model,
        tokenizer=tokenizer,
        context=_context(model),
        stored=str(directory.dtype).removeprefix("torch."),
        folder=directory.path,
        reads_out=reads_out,
        attachment=attachment,
        listener=listener,
    )
    foreign.require_attention()  # before a text is read
    return foreign


def _context(model: Any) -> int | None:
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return context if isinstance(context, int) and context > 0 else None
