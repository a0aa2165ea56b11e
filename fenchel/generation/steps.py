"""The kinds of steps by which a model reads tokens, and which of them serves a call.

    fused     kernels of a plain decoder, recorded as a CUDA graph    generation/fused_step.py
    graph     the model, recorded as a CUDA graph
    packed    a plain decoder on a CPU, by a packed copy of weights   generation/cpu_step.py
    cpu       a plain decoder on a CPU, by its own weights
    model     the model itself

``why_not`` of a kind names the first reason why it cannot serve a call; ``step_kind`` takes the
first kind of the table that can, and for "auto" the first of those that pay. A kind reads several
tokens of some rows (``read``) and one token of all rows (``step``); the recorded ones read several
tokens by the model.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fenchel.attention import Dense, Sink, attend
from fenchel.attention.spec import SOFTMAX, AttentionCall
from fenchel.generation.cpu_step import why_not_cpu, why_not_packed
from fenchel.generation.fused_step import StepRecorder, capture_graph, why_not_fused
from fenchel.generation.kv_cache import CacheKind, KVCache
from fenchel.generation.steering import ChoiceTable
from fenchel.model import Transformer
from fenchel.model.attention import Attention
from fenchel.model.forward_context import AttentionOverride, Observer
from fenchel.torch_internals import has_forward_hooks

NO_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""The kernels of torch's fused attention that serve a new length at once. cuDNN's builds a plan for
every new length: 64 tokens of six layers in bfloat16 took 3.5 s on an H200 instead of 0.16."""
RECORDED_TOKENS = 32
"""New tokens from which recording pays: it takes as long as a dozen."""
PACKED_TOKENS = 256
"""Tokens of several rows from which packing pays. Six layers of width 384 on one core of an EPYC:
steps of 8 rows take 10.6 ms instead of 13.1 and of 32 rows 25.7 instead of 29.6, and packing takes
as long as a few of them; a step of one row takes 7.0 ms either way."""


@dataclass(frozen=True)
class DecodeCall:
    """What the choice of a kind depends on."""

    model: Transformer
    cache: CacheKind = "model"
    invariant: bool = False
    """Whether the bits of a row must not depend on the other rows."""
    rows: int = 1
    tokens: int | None = None
    """How many tokens are read; None is without end, as in a server."""
    record: StepRecorder = capture_graph

    def reads(self, tokens: int) -> bool:
        """Whether so many tokens are read, or more."""
        return self.tokens is None or self.tokens >= tokens


class StepKind(NamedTuple):
    """A row of the table."""

    name: str
    why_not: Callable[[DecodeCall], str | None]
    """The reason why the kind cannot serve a call, or None."""
    pays: Callable[[DecodeCall], bool]
    """Whether "auto" takes the kind for a call that it can serve."""

    @property
    def recorded(self) -> bool:
        """Whether tokens are drawn on the device, inside a recording."""
        return self.name in ("fused", "graph")


def _recorded(call: DecodeCall) -> str | None:
    """Why no step of a model can be recorded, or None."""
    config, device = call.model.config, call.model.lm_head_weight.device
    if call.record is capture_graph and device.type != "cuda":
        return f"a CUDA graph needs a model on a GPU, and this one is on {device}"
    if config.kind != "decoder":
        return f"the model is of kind={config.kind!r}"
    if config.has_delta:
        return "the states of its gated DeltaNet layers are not recorded"
    if call.invariant:
        return "a recorded step has no invariant attention"
    return None


def _fused(call: DecodeCall) -> str | None:
    if call.cache == "float16":
        return "it stores keys in the model's own dtype or in int8, not in float16"
    return _recorded(call) or why_not_fused(call.model)


def _graph(call: DecodeCall) -> str | None:
    config = call.model.config
    if config.has_position_bias:
        return "the bias of its positions is computed with the help of the host"
    if config.experts:
        return "experts take as many tokens as choose them, which varies from step to step"
    if call.cache != "model":
        return "only a fused step reads a smaller cache on the device"
    for module in call.model.modules():
        # The solvers of other maps decide on the host when they have converged, and a capture that
        # fails there leaves the random generators of the device unusable.
        if isinstance(module, Attention) and not isinstance(module.choice, type(SOFTMAX)):
            name = type(module.choice).__name__
            return f"{name} is not softmax, and its solver may need the host"
    return _recorded(call)


def _model(call: DecodeCall) -> str | None:
    if call.invariant and call.model.config.has_delta:
        return (
            "gated DeltaNet layers update the states of all rows at once, so that other requests "
            "may change the rounding; decode this model without invariant"
        )
    if call.invariant and call.model.config.experts:
        return (
            "experts compute as many tokens at once as choose them, so that other requests change "
            "the rounding; decode this model without invariant"
        )
    return None


def _recording_pays(call: DecodeCall) -> bool:
    device = call.model.lm_head_weight.device.type
    hooks = any(map(has_forward_hooks, call.model.modules()))  # they would miss the replays
    plain = not torch.is_autocast_enabled(device) and not hooks
    return device == "cuda" and plain and call.reads(RECORDED_TOKENS)


def _packing_pays(call: DecodeCall) -> bool:
    half = call.model.lm_head_weight.dtype.itemsize < 4  # whose products are slow without packing
    return half or (call.rows > 1 and call.reads(PACKED_TOKENS))


STEPS: tuple[StepKind, ...] = (
    StepKind("fused", _fused, _recording_pays),
    StepKind("graph", _graph, _recording_pays),
    StepKind("packed", lambda call: why_not_packed(call.model), _packing_pays),
    StepKind("cpu", lambda call: why_not_cpu(call.model), lambda _: True),
    StepKind("model", _model, lambda _: True),
)


def step_kind(call: DecodeCall, name: str = "auto") -> StepKind:
    """The kind of this name, or the first that serves the call and pays; raises where none does."""
    if call.cache not in get_args(CacheKind):
        raise ValueError(f"cache={call.cache!r} should be one of {', '.join(get_args(CacheKind))}.")
    if name == "auto":
        for kind in STEPS[:-1]:
            if kind.why_not(call) is None and kind.pays(call):
                return kind
        name = STEPS[-1].name
    named = {kind.name: kind for kind in STEPS}
    if name not in named:
        raise ValueError(f"step={name!r} should be one of auto, {', '.join(named)}.")
    reason = named[name].why_not(call)
    if reason is not None:
        raise ValueError(f"step={name!r} cannot serve this call: {reason}.")
    return named[name]


class EncoderOutput(NamedTuple):
    """What the decoder of an encoder-decoder attends to, (B, S, M), and which slots are tokens."""

    memory: Tensor
    mask: Tensor | None = None

    @classmethod
    def stack(cls, rows: Sequence[Tensor]) -> "EncoderOutput":
        """The outputs (S, M) of several rows, padded to the longest."""
        padded = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
        lengths = torch.tensor([len(row) for row in rows], device=padded.device)
        slots = torch.arange(padded.shape[1], device=padded.device)
        return cls(padded, slots < lengths.unsqueeze(-1))


class ModelStep:
    """Reads tokens by the model itself."""

    def __init__(self, model: Transformer, *, invariant: bool = False) -> None:
        self.model, self.invariant = model, invariant

    def read(
        self,
        cache: KVCache,
        parts: Sequence[Sequence[int]],
        *,
        every: bool = False,
        observe: Observer | None = None,
        encoded: EncoderOutput | None = None,
        steer: Mapping[int, Tensor] | None = None,
        choices: ChoiceTable | None = None,
    ) -> Tensor:
        """What the LM head takes at the last token of every part, or at ``every`` token of one.

        Part b continues row b of the ``cache``; shorter ones are padded on the right. ``steer`` is
        added to the streams after layers, (P, M) each. -> (P or T, M)
        """
        counts = [len(part) for part in parts]
        ids_PT = torch.zeros(len(parts), max(counts), dtype=torch.long)
        for row, part in zip(ids_PT, parts, strict=True):
            row[: len(part)] = torch.tensor(part)
        cache.counts = counts
        ids_PT = ids_PT.to(cache.device)
        hidden_PTM = self._call(ids_PT, cache, observe, encoded, steer, choices, hidden=True)
        if every:
            return hidden_PTM[0]
        return hidden_PTM[range(len(parts)), [n - 1 for n in counts]]

    def step(
        self,
        cache: KVCache,
        token_B: Tensor,
        observe: Observer | None = None,
        encoded: EncoderOutput | None = None,
        steer: Mapping[int, Tensor] | None = None,
        choices: ChoiceTable | None = None,
    ) -> Tensor:
        """Logits after one more token of every row: (B,) -> (B, V)."""
        return self._call(token_B.unsqueeze(-1), cache, observe, encoded, steer, choices)[:, -1]

    def logits(self, x_NM: Tensor) -> Tensor:
        """The LM head: (N, M) -> (N, V)."""
        return self.model.logits(x_NM)

    def _call(
        self,
        ids_BT: Tensor,
        cache: KVCache,
        observe: Observer | None,
        encoded: EncoderOutput | None,
        steer: Mapping[int, Tensor] | None,
        choices: ChoiceTable | None,
        *,
        hidden: bool = False,
    ) -> Tensor:
        override: AttentionOverride | None = None
        vectors = None
        if steer is not None:
            vectors = {layer: v_BM.unsqueeze(1) for layer, v_BM in steer.items()}
        if self.invariant and ids_BT.shape[1] == 1:
            override = RowByRow(cache, choices)
        if choices is not None:
            override = SteeredAttention(choices, cache, override)
        with sdpa_kernel(NO_PLANS) if ids_BT.is_cuda else nullcontext():
            result: Tensor = self.model(
                ids_BT,
                cache=cache,
                memory_BSM=None if encoded is None else encoded.memory,
                memory_mask_BS=None if encoded is None else encoded.mask,
                observe=observe,
                attention_override=override,
                steer=vectors,
                return_hidden=hidden,
            )
        return result


class SteeredAttention:
    """The attention of a layer whose rows choose as a table says, for ``attention_override``."""

    def __init__(
        self, table: ChoiceTable, cache: KVCache, inner: AttentionOverride | None = None
    ) -> None:
        self.table, self.cache, self.inner = table, cache, inner

    def __call__(self, layer: int, call: AttentionCall) -> Tensor | None:
        """q (B, H, T, D), k and v (B, G, S, D) -> (B, H, T, D)."""
        before = int(isinstance(call.spec.prior, Sink))  # a sink stands before the keys
        keys = call.k.shape[2] - before
        position_BS = self.cache.positions_of(layer, keys, call.q.shape[2])
        changed = self.table.applied(layer, call, position_BS)
        if self.inner is not None:
            return self.inner(layer, changed)
        return self.table.attend(layer, changed)


class RowByRow:
    """The attention of a layer by one call per row, over the keys of that row alone.

    For ``attention_override`` of the forward pass: the rounding of a row then does not depend on
    how long the others are, and a map that is solved by iterations does not wait for them.
    """

    def __init__(self, cache: KVCache, table: ChoiceTable | None = None) -> None:
        self.cache, self.table = cache, table

    def __call__(self, layer: int, call: AttentionCall) -> Tensor:
        """q (B, H, 1, D), k and v (B, G, S, D) -> (B, H, 1, D)."""
        q, k, v, spec = call
        B, H, T, _ = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        assert spec.prior is not None  # a decoder has a causal mask at least
        log_u = spec.prior.log(T, k.shape[2], B=B, H=H, device=q.device, dtype=wide)
        before = k.shape[2] - self.cache.span(layer)[1]  # a sink stands before the keys
        rows, R = [], self.cache.layers[layer].slots
        for b, n in enumerate(self.cache.starts):
            row, S = slice(b, b + 1), before + min(n + 1, R)
            prior = Dense(log_u[row if len(log_u) > 1 else slice(1), ..., :S])
            own = q[row], k[row, :, :S], v[row, :, :S], replace(spec, prior=prior)
            table = None if self.table is None else self.table.row(b)
            if table is None:
                rows.append(attend(*own[:3], **own[3]))
            else:
                rows.append(table.attend(layer, AttentionCall(*own)))
        return torch.cat(rows)
