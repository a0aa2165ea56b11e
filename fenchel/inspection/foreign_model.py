"""Any decoder or encoder that transformers builds and fenchel does not, as a subject.

The model is loaded by ``fenchel.hf.loader`` and its attention is switched by ``fenchel.hf.attach``,
which works for every family that uses the attention registry of transformers: each layer passes its
queries, keys and values to ``fenchel.attention.attend``, which has derivatives in both directions
and keeps no n by n weights, and the call is reported to the recorder of the reading. A family that
computes its attention itself is refused, and so is one whose attention is not a plain choice (a
sink that is not a key): on the first tokens the model must agree with its own eager attention
before anything is reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from fenchel.attention.bias import Sink
from fenchel.attention.spec import SOFTMAX, AttentionCall
from fenchel.checkpoints.directory import CheckpointDirectory
from fenchel.hf.adapter import Attachment, attach
from fenchel.hf.loader import gives_logits, load_transformers_model, one_sentence, quiet
from fenchel.inspection.linearisation import answer, hold
from fenchel.inspection.recorder import Recorder, first_of
from fenchel.inspection.trace import ForwardTrace, InspectedModel, Map, with_special_tokens

_CHECKED = 64  # tokens on which the model must agree with its own eager attention
_AGREES = 1e-3  # of the largest output; two orders of float32 sums differ by far less


@dataclass
class _Listener:
    """Passes every attention call of a model on to the recorder of the reading in progress."""

    recorder: Recorder | None = None

    def __call__(self, module: nn.Module, call: AttentionCall, mask: str) -> None:  # noqa: ARG002
        q, k, v, spec = call
        if isinstance(spec.prior, Sink):
            raise ValueError(
                "this family's attention has a sink that is not a key, which cannot be inspected."
            )
        if self.recorder is not None:
            spec = replace(spec, scale=spec.scale_for(q.shape[-1]))
            self.recorder.attended(AttentionCall(q, k, v, spec))


@dataclass(frozen=True, kw_only=True, eq=False)
class ForeignModel(InspectedModel):
    """A model of transformers whose attention is ours."""

    reads_out: bool
    """Whether it gives logits."""
    attachment: Attachment
    listener: _Listener = field(default_factory=_Listener)

    def trace(self, ids: Tensor) -> ForwardTrace:
        """Run it once; its attention reports to the recorder."""
        table: Any = self.model.get_input_embeddings()  # type: ignore[operator]
        self.require_known(ids, table.num_embeddings)
        recorder = Recorder(self.model)
        with one_sentence(f"read this text with this {self.family!r} model"):
            self._require_agreement(ids[:, :_CHECKED])
            told = self._note(recorder, ids)
        found = tuple(recorder.traces)
        if not found:
            raise ValueError(
                f"the family {self.family!r} does not use the attention registry of transformers, "
                "so it cannot be inspected."
            )
        blocks = hold(found)
        if told is None:
            return ForwardTrace(blocks, None)
        return ForwardTrace(blocks, self._read_out(ids, recorder.modules, found[-1].output, told))

    def _note(self, recorder: Recorder, ids: Tensor) -> Tensor | None:
        """Run it for the recorder; the logits of the last token, (V,), where it gives any."""
        self.listener.recorder = recorder
        try:
            with torch.no_grad(), recorder:
                return self._last_logits(ids)
        finally:
            self.listener.recorder = None

    def _last_logits(self, ids: Tensor) -> Tensor | None:
        asks = signature(self.model.forward).parameters
        last = {"logits_to_keep": 1} if "logits_to_keep" in asks else {}
        out = self.model(input_ids=ids, **_BARE, **last)
        return out.logits[0, -1] if self.reads_out else None

    def _read_out(
        self, ids: Tensor, blocks: Sequence[nn.Module], after: Tensor, told: Tensor
    ) -> Map:
        """x_L -> logits of the last token, as the model told them.

        A read-out looks at one token at a time, so the model is run on the last one alone; one
        that looks further is found out by its logits, and run on all of them.
        """
        alone = self._ending(ids[:, -1:], blocks)
        with torch.no_grad():
            off = float((alone(after) - told).abs().amax())
        return alone if off <= _AGREES * float(told.abs().amax()) else self._ending(ids, blocks)

    def _ending(self, ids: Tensor, blocks: Sequence[nn.Module]) -> Map:
        """The whole model on ids, but its last block gives what it is told to."""
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
                found = self._last_logits(ids)
            finally:
                handle.remove()
            assert found is not None
            return found

        return lm_head

    @torch.no_grad()
    def _require_agreement(self, ids: Tensor) -> None:
        ours = first_of(self.model(input_ids=ids, **_BARE).to_tuple())
        with quiet(), self.attachment.eager():
            theirs = first_of(self.model(input_ids=ids, **_BARE).to_tuple())
        if not bool(theirs.isfinite().all()):
            return  # which block it was is said later
        size = float(theirs.abs().amax())
        apart = float((ours - theirs).abs().amax())
        if not apart <= _AGREES * max(size, 1e-30):
            raise ValueError(
                f"the family {self.family!r} does more in its attention than choose and mix: its "
                f"own outputs differ from ours by {apart:.3g} of {size:.3g}, so it is not measured."
            )


_BARE = {"use_cache": False, "return_dict": True}


def open_foreign(directory: CheckpointDirectory, tokenizer: Tokenizer) -> ForeignModel:
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
        attachment = attach(model, SOFTMAX, observer=listener, override=answer, backend="blocked")
    return ForeignModel(
        name=directory.name,
        family=directory.model_type,
        model=model,
        tokenizer=tokenizer,
        context=_context(model),
        stored=str(directory.dtype).removeprefix("torch."),
        encode_start=with_special_tokens,
        reads_out=reads_out,
        attachment=attachment,
        listener=listener,
    )


def _context(model: Any) -> int | None:
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return context if isinstance(context, int) and context > 0 else None
