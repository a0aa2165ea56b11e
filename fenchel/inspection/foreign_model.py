"""Any decoder or encoder that ``transformers`` can build and we cannot, as a subject.

One mechanism for every family: ``transformers`` lets an attention function be registered by name,
and a model that is told this name hands it the queries, keys and values of every layer. Ours turns
the mask into a prior, reports the call to the recorder that is listening, and answers with
``fenchel.attention.attend``, which has derivatives in both directions and keeps no n by n weights.
A family that does not ask the registry is refused, and so is one whose attention is not a plain
choice (a sink that is no key): on the first tokens the model must agree with its own eager
attention before anything is reported.

The directory is data: it was looked over (``fenchel.inspection.loader``) before a model is
built, and nothing in it is run.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from fenchel.attention import AttentionCall, AttentionSpec, Causal, Dense, Prior, Window, attend
from fenchel.checkpoints.hf_check import Checkpoint
from fenchel.inspection.linearisation import answer, hold
from fenchel.inspection.measure import framed
from fenchel.inspection.recorder import Recorder, first_of
from fenchel.inspection.trace import ForwardTrace, InspectedModel, Map

NAME = "fenchel"
"""What our attention is called in the registry."""
_CHECKED = 64  # tokens on which the model must agree with its own eager attention
_AGREES = 1e-3  # of the largest output; two orders of float32 sums differ by far less
_listening: ContextVar[Recorder | None] = ContextVar("listening", default=None)


@dataclass(frozen=True, kw_only=True, eq=False)
class ForeignModel(InspectedModel):
    """A model of transformers whose attention is ours."""

    reads_out: bool
    """Whether it gives logits."""

    def trace(self, ids: Tensor) -> ForwardTrace:
        """Run it once; its attention reports to the recorder."""
        table: Any = self.model.get_input_embeddings()  # type: ignore[operator]
        self.require_known(ids, table.num_embeddings)
        recorder = Recorder(self.model)
        with _sentences(f"read this text with this {self.family!r} model", self.family):
            self._require_agreement(ids[:, :_CHECKED])
            told = self._note(recorder, ids)
        found = tuple(recorder.traces)
        if not found:
            raise ValueError(_elsewhere(self.family))
        blocks = hold(found)
        if told is None:
            return ForwardTrace(blocks, None)
        return ForwardTrace(blocks, self._read_out(ids, recorder.modules, found[-1].output, told))

    def _note(self, recorder: Recorder, ids: Tensor) -> Tensor | None:
        """Run it for the recorder; the logits of the last token, (V,), where it gives any."""
        token = _listening.set(recorder)
        try:
            with torch.no_grad(), recorder:
                return self._last_logits(ids)
        finally:
            _listening.reset(token)

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
        with _quiet():
            self.model.set_attn_implementation("eager")  # type: ignore[operator]
            try:
                theirs = first_of(self.model(input_ids=ids, **_BARE).to_tuple())
            finally:
                self.model.set_attn_implementation(NAME)  # type: ignore[operator]
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


def open_foreign(found: Checkpoint) -> ForeignModel:
    """The model of a Hugging Face directory in float32, by transformers."""
    model, reads_out = _build(found)
    return ForeignModel(
        name=found.name,
        family=found.family,
        model=model,
        tokenizer=found.tokenizer,
        context=_context(model),
        stored=found.weights.kind,
        encode_start=framed,
        reads_out=reads_out,
    )


def _build(found: Checkpoint) -> tuple[nn.Module, bool]:
    import transformers
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.auto import modeling_auto

    folder, family = found.folder, found.family
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    if family not in transformers.CONFIG_MAPPING:
        raise ValueError(f"transformers {transformers.__version__} knows no family {family!r}.")
    kinds = {
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family): "AutoModelForCausalLM",
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(family): "AutoModelForMaskedLM",
    }
    named = found.architecture
    kind = "AutoModel" if named is None else kinds.get(named, "AutoModel")
    with _quiet(), _sentences(f"build this {family!r} model", family):
        model, told = getattr(transformers, kind).from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            attn_implementation=NAME,
            output_loading_info=True,
        )
    missing = sorted(told["missing_keys"])
    if kind == "AutoModel":
        missing = [name for name in missing if "pooler" not in name]
    if missing:
        raise ValueError(f"{folder} lacks {missing[0]}, which its config.json asks for.")
    return model.eval().requires_grad_(False), kind != "AutoModel"


def _context(model: Any) -> int | None:
    text = model.config.get_text_config()
    found = getattr(text, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """What a module of transformers calls: (1, H, T, D) and so on -> (1, T, H, E)."""
    held = answer(query, key, value)
    if held is not None:
        return held.transpose(1, 2).contiguous(), None
    if rest.get("s_aux") is not None:
        raise ValueError(
            "this family's attention has a sink that is not a key, which cannot be inspected."
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    prior = prior_of(attention_mask, causal=bool(causal), window=sliding_window)
    if position_bias is not None:
        prior = Dense(position_bias) if prior is None else prior + Dense(position_bias)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    recorder = _listening.get()
    if recorder is not None:
        spec = AttentionSpec(prior=prior, scale=scale, softcap=softcap)
        recorder.attended(AttentionCall(query, key, value, spec))
    out = attend(query, key, value, prior=prior, scale=scale, softcap=softcap, backend="blocked")
    return out.transpose(1, 2).contiguous(), None


def prior_of(mask: Tensor | None, *, causal: bool, window: int | None = None) -> Prior | None:
    """A mask of transformers as a prior, by its name where it has one.

    (1, 1, T, S): bool, True where a query may look; or floats that are added to the scores.
    """
    if mask is None:
        return Causal() if causal else None
    if mask.dtype != torch.bool:
        closed = mask <= torch.finfo(mask.dtype).min / 2
        if bool(((mask == 0) | closed).all()):
            return prior_of(~closed, causal=causal, window=window)
        return Dense(mask.masked_fill(closed, -torch.inf))
    T, S = mask.shape[-2:]
    known: list[Prior] = [Causal()]
    if window is not None:
        known += [Window(max(0, window - 1), 0), Window(window, 0)]
    for prior in known:
        if bool((mask == (prior.log(T, S, device=mask.device) == 0)).all()):
            return prior
    return None if bool(mask.all()) else Dense(mask)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers without its remarks and bars, which are meant for its own users."""
    from transformers.utils import logging as theirs

    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity(logging.CRITICAL)
    theirs.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _sentences(doing: str, family: str) -> Iterator[None]:
    """The one boundary to another library: whatever goes wrong there is a ValueError."""
    try:
        yield
    except (MemoryError, ValueError):
        raise
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (NAME,):  # a table of its own
            raise ValueError(_elsewhere(family)) from None
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise ValueError(f"transformers cannot {doing}: {reason}.") from None


def _elsewhere(family: str) -> str:
    return (
        f"the family {family!r} does not take its attention from the registry of transformers, "
        "so it cannot be inspected."
    )
