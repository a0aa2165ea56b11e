"""Decoding by a step that is recorded once as a CUDA graph and replayed per token.

On a GPU a decoding step is hundreds of small kernels, and launching each takes longer than running
it. A CUDA graph launches all of them at once, and needs the same memory and the same shapes at
every step, which a growing cache does not have.

**Static cache.** All S slots exist from the start and are filled from the end: token n is in slot
S - 1 - n. Priors are aligned to the last key, where the newest query is; a query at the last slot
then sees every slot to its left, and the mask

    token_mask_BS    True at the slots that hold a token

puts it at position n. A layer with a window of W keys has R = min(W, S) slots and token n is in
slot R - 1 - n mod R: until all R are full they are the last R of the S, and afterwards all of them
hold tokens, so one mask serves all layers. The order of keys does not matter to attention as long
as their positions entered before (rotary, learned, none); distances between slots have no meaning
here, so ALiBi and T5's buckets cannot be recorded (``why_not_recorded``). The prompt is read by the
ordinary cache and copied.

**Fused step.** A step is the forward pass of the model, or for a plain decoder five kernels per
layer:

    qkv   = norm(x) W_qkv^T                             kernels/thin_matmul.py
    o     = attend(rotary(q), keys with rotary(k))      kernels/decode_attention.py; stores k and v
    x     = x + o W_o^T                                 kernels/thin_matmul.py
    wide  = f(norm(x) W_gate^T) * (norm(x) W_up^T)
    x     = x + wide W_down^T
    z     = norm(x) lm_head^T,  token = argmax z        kernels/argmax_token.py

With one token a step takes as long as reading the weights once, if nothing else is in the way: each
kernel reads one or two matrices whole and computes its own input from the stream. The position lies
in device memory, so that one recording serves all tokens. 22 layers of width 2048 with a vocabulary
of 32,000 are 2.07 GB in bfloat16. Above ``THIN_ROWS`` sequences the products are those of torch,
with the norm and the activation as kernels of their own: nine kernels per layer. Other choice maps
than softmax are solved by the host, which a recording cannot wait for; the fused step solves entmax
and sparsemax on the device. An int8 cache stays in bytes and is widened inside the kernel.

**Rows.** A fused step is recorded for ``row_bucket`` sequences, so that a few recordings serve all
batches. The rows beyond the batch have no token: their padding is longer than the cache.

**Continuous batching.** In ``RecordedRows`` every row has a token number n of its own, and with it
its own slots: sequences of any lengths decode together without padding, in layers with windows too,
and one joins by a copy into the slots of its row. A free row has a padding longer than any
sequence. There is a recording per bucket of rows; all of them read and write the first rows of the
same cache. Small buckets have a second one for steps in which all sequences are short, with one
kernel for softmax attention instead of two. Every row has its own settings of sampling on the
device (``draw_rows``), so that the draw is part of the recording and the host may launch a step
before it has read the tokens of the step before.

**Choice of the token.** The greedy token is chosen inside the recording. Others are drawn by
ordinary kernels after each replay (``TokenChoice``), which the host launches without waiting for
any, so that the device computes one token while the host requests the next.

**Pool.** Recording takes as long as a dozen tokens, so a fused step is kept for the next call, one
per model. It serves a call with the same weights in the same memory (their values may change), the
same bucket of rows, the same number of slots and the same kind of cache. One session at a time has
it; a second one records its own. It lives as long as its model and has a cache of its own.

B sequences, S slots, M width of the stream, H heads, G heads of keys, D width per head, F width of
the MLP.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fenchel.attention.spec import SOFTMAX, AttentionSpec
from fenchel.generation.kv_cache import CacheKind, Int8Store, KVCache
from fenchel.generation.plain_decoder import (
    LinearWeights,
    PlainNorm,
    block_weights,
    decode_alpha,
    plain_norm,
    why_not_plain,
)
from fenchel.generation.sampling import RowSampling, draw_rows
from fenchel.model import ModelConfig, Transformer
from fenchel.model.attention import Attention
from fenchel.model.forward_context import Observer
from fenchel.model.rotary_table import RotaryTable
from fenchel.torch_internals import has_forward_hooks

if TYPE_CHECKING:
    from fenchel.kernels.thin_matmul import NormWeights


class _CopyIndex(NamedTuple):
    """Which entries are copied where: row and slot here, row and position there, each (N,)."""

    row: Tensor
    slot: Tensor
    source_row: Tensor
    position: Tensor

    @classmethod
    def of(cls, parts_P3: Tensor, size: int, end: int) -> "_CopyIndex":
        """The indices of sequences of which the newest min(size, end) tokens are copied.

        Each of ``parts_P3`` is (row, source row, number of tokens) of a sequence whose last token
        is at position ``end - 1`` of the source; the row here has ``size`` slots.
        """
        row_P, source_P, tokens_P = parts_P3.unbind(1)
        count_P = tokens_P.clamp(max=min(size, end))
        part_N = torch.repeat_interleave(count_P)
        number_N = torch.arange(len(part_N)) - (count_P.cumsum(0) - tokens_P)[part_N]
        position_N = end - tokens_P[part_N] + number_N
        return cls(row_P[part_N], size - 1 - number_N % size, source_P[part_N], position_N)

    def to(self, device: torch.device) -> "_CopyIndex":
        """On a device, by one transfer."""
        return _CopyIndex(*torch.stack(self).to(device))


class StaticCache:
    """All slots of every layer, filled from the end; the slot of the next token is a tensor.

    An int8 cache stays one: ``key_scales`` and ``value_scales`` (B, G, R) are then not empty, and
    the values are (B, G, D, R'), as kernels/decode_attention.py reads them.
    """

    def __init__(self, cache: KVCache, *, batch: int, per_row: bool = False) -> None:
        self.positions = S = cache.positions
        store = cache.layers[0].keys
        self.int8 = isinstance(store, Int8Store)
        key = store.buffers()[0] if self.int8 else store.read(0, 1)
        _, G, _, D = key.shape
        self.sizes = [
            S if layer.lookback is None else min(S, layer.lookback + 1) for layer in cache.layers
        ]
        # Zeros: an empty slot has weight zero, and zero times NaN would be NaN.
        self.keys = [key.new_zeros(batch, G, size, D) for size in self.sizes]
        self.values = [key.new_zeros(batch, G, *self._value_shape(R, D)) for R in self.sizes]
        sizes = self.sizes if self.int8 else []
        scale = torch.zeros((), dtype=torch.float32, device=key.device)
        self.key_scales = [scale.new_zeros(batch, G, size) for size in sizes]
        self.value_scales = [scale.new_zeros(batch, G, size) for size in sizes]
        self.per_row = per_row
        count = batch if per_row else 1
        self.token = torch.zeros(count, dtype=torch.long, device=key.device)
        """The number n of the next token, one for all rows or one per row."""
        self.slots = {size: self.token + size - 1 for size in [*self.sizes, S]}
        self.token_mask_BS = torch.zeros(batch, S, dtype=torch.bool, device=key.device)
        self.padding_B = torch.zeros(batch, dtype=torch.long, device=key.device)
        """How many slots before each sequence are padding."""
        self.length = S - 1
        """To the model the newest token is at the last slot, whatever its number."""

    def _value_shape(self, R: int, D: int) -> tuple[int, int]:
        if not self.int8:
            return R, D
        from fenchel.kernels.decode_attention import padded_slots

        return D, padded_slots(R)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, G, 1, D) in the slot of the token; returns all slots."""
        slot = self.slots[self.sizes[layer]]
        keys, values = self.keys[layer], self.values[layer]
        if self.per_row:
            B = torch.arange(len(slot), device=slot.device)
            keys[B, :, slot], values[B, :, slot] = k[:, :, 0], v[:, :, 0]
            return keys, values
        keys.index_copy_(2, slot, k)
        values.index_copy_(2, slot, v)
        return keys, values

    def first_rows(self, batch: int) -> "StaticCache":
        """The same memory as a cache of the first ``batch`` rows, each with its own number."""
        assert self.per_row
        cache = copy(self)
        for name in ("keys", "values", "key_scales", "value_scales"):
            setattr(cache, name, [x[:batch] for x in getattr(self, name)])
        cache.slots = {size: slot[:batch] for size, slot in self.slots.items()}
        cache.token, cache.padding_B = self.token[:batch], self.padding_B[:batch]
        cache.token_mask_BS = self.token_mask_BS[:batch]
        return cache

    def copy_rows(
        self,
        rows: Sequence[int],
        source: KVCache,
        source_rows: Sequence[int],
        tokens: Sequence[int],
    ) -> None:
        """Copy sequences of another cache, the last ``tokens`` positions of each, into rows.

        All at once: one row after another would be two launches per row, layer and tensor.
        """
        parts_P3 = torch.tensor([*zip(rows, source_rows, tokens, strict=True)])
        indices: dict[tuple[int, int], _CopyIndex] = {}
        for layer, (size, there) in enumerate(zip(self.sizes, source.layers, strict=True)):
            end = source.length - there.first_slot
            if (size, end) not in indices:
                indices[size, end] = _CopyIndex.of(parts_P3, size, end).to(self.token.device)
            to, slot, of, position = indices[size, end]
            for mine, theirs in ((self.keys, there.keys), (self.values, there.values)):
                mine[layer][to, :, slot] = theirs.read(0, end)[of, :, position]

    def move_row(self, row: int, to: int, _: int) -> None:
        """Copy the slots of a row into those of another."""
        for x in (*self.keys, *self.values):
            x[to].copy_(x[row])

    def clear_row(self, row: int) -> None:
        """Overwrite a row with zeros."""
        for x in (*self.keys, *self.values):
            x[row].zero_()

    @property
    def bytes(self) -> int:
        """All memory of the cache."""
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))

    def advance(self, positions: int) -> None:
        """Count tokens, and compute the slots of the next one."""
        self.token.add_(positions)
        for size, slot in self.slots.items():
            slot.copy_(size - 1 - self.token % size)

    def copy_from(self, cache: KVCache, padding_B: Tensor | None) -> None:
        """Copy what another cache holds; ``padding_B`` slots at its left are padding.

        Rows beyond those of the other cache get no token.
        """
        n, device = cache.length, self.token.device
        rows = len(cache.layers[0].keys.buffers()[0])
        tokens = torch.arange(n, device=device)
        slots = {size: size - 1 - tokens[-size:] % size for size in set(self.sizes)}
        for layer, (size, source) in enumerate(zip(self.sizes, cache.layers, strict=True)):
            end = n - source.first_slot
            last = min(size, end)
            at = slots[size][-last:]
            keys, values = self.keys[layer][:rows], self.values[layer][:rows]
            if self.int8:
                (k, ks), (v, vs) = (
                    (x.narrow(2, end - last, last) for x in store.buffers())
                    for store in (source.keys, source.values)
                )
                keys.index_copy_(2, at, k)
                values.index_copy_(3, at, v.transpose(2, 3))
                self.key_scales[layer][:rows].index_copy_(2, at, ks.squeeze(-1))
                self.value_scales[layer][:rows].index_copy_(2, at, vs.squeeze(-1))
            else:
                keys.index_copy_(2, at, source.keys.read(end - last, end))
                values.index_copy_(2, at, source.values.read(end - last, end))
        tokens_S = self.length - torch.arange(self.positions, device=device)
        self.padding_B.fill_(self.positions + 1)
        self.padding_B[:rows] = 0 if padding_B is None else padding_B
        self.token_mask_BS.copy_((tokens_S < n) & (tokens_S >= self.padding_B.unsqueeze(-1)))
        self.token.fill_(n)
        self.advance(0)


THIN_ROWS = 1
"""Sequences up to which reading the weights dominates; above, torch's products are faster. A step
of 22 layers of width 2048 on an H200 takes 0.83, 1.16, 1.65, 2.73 ms by ``thin_matmul`` for 1, 2,
4, 8 sequences."""
PRODUCT_ROWS = 32
"""Fewest rows of torch's products: the same step takes 1.27 to 1.35 ms by products of 8 rows, and
0.89 ms by products of 32, for which its library has better kernels."""
FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST_HEAD = 256
"""Blocks of keys and values of wider heads exceed the shared memory of a program."""
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)


def row_bucket(rows: int) -> int:
    """The rows of the recording that serves so many sequences.

    >>> [row_bucket(rows) for rows in (1, 5, 9, 30, 33, 100, 128, 200)]
    [1, 8, 16, 32, 48, 112, 128, 200]
    """
    return next((bucket for bucket in BUCKETS if bucket >= rows), rows)


def why_not_fused(model: Transformer) -> str | None:
    """The first reason why the fused step cannot serve a model, or None."""
    if model.config.head_width > WIDEST_HEAD:
        return f"its heads are {model.config.head_width} wide, and the most is {WIDEST_HEAD}"
    table = model.lm_head_weight
    if table.device.type != "cuda" or table.dtype not in FUSED_DTYPES:
        return f"it is in {table.dtype} on {table.device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if not all(p.is_contiguous() for p in model.parameters()):
        return "a parameter is not contiguous"
    return why_not_plain(model, sparse=True)


class FusedStep:
    """One step of a plain decoder, which reads ``token_B``.

    ``tokens`` as in ``attend_decode``: how many the longest sequence has at most.
    """

    def __init__(
        self, model: Transformer, cache: StaticCache, token_B: Tensor, tokens: int | None = None
    ) -> None:
        c, table, S = model.config, model.lm_head_weight, cache.positions
        self.cache, self.token_B, self.tokens = cache, token_B, tokens
        self.embed, self.lm_head = model.embed.weight, LinearWeights(table.t(), None)
        self.pos_embed = None if model.pos_embed is None else model.pos_embed.weight
        self.activation, self.norm = c.mlp, _norm(plain_norm(model.norm))
        self.scale = AttentionSpec(scale=c.score_scale).scale_for(c.head_width)
        self.rotary: tuple[Tensor, Tensor] | None = None
        if c.positions == "rotary":
            cos, sin = RotaryTable(c).between(0, S, table)
            self.rotary = cos.to(table.dtype).contiguous(), sin.to(table.dtype).contiguous()
        self.layers = [block_weights(block) for block in model.blocks]
        self.norms = [(_norm(layer.attention_norm), _norm(layer.mlp_norm)) for layer in self.layers]
        B, H, G, D = len(token_B), c.heads, c.groups, c.head_width
        self.rows, self.thin = B, B <= THIN_ROWS
        # Rows beyond B are in torch's products alone: zeros go in, and what comes out is not read.
        P = B if self.thin else max(B, PRODUCT_ROWS)
        new = table.new_zeros
        self.x, self.qkv, self.o = new(P, c.width), new(P, (H + 2 * G) * D), new(P, H * D)
        self.wide, self.logits = new(P, c.mlp_width), new(P, c.vocabulary)
        self.y, self.gate, self.up = new(P, c.width), new(P, c.mlp_width), new(P, c.mlp_width)

    def step(self) -> Tensor:
        """Logits after the token, (B, V); the next step overwrites them."""
        cache, x, logits_BV = self.cache, self.x[: self.rows], self.logits[: self.rows]
        torch.index_select(self.embed, 0, self.token_B, out=x)
        if self.pos_embed is not None:
            x.add_(self.pos_embed[(cache.token - cache.padding_B).clamp_(min=0)])
        for number, (layer, (before, between)) in enumerate(
            zip(self.layers, self.norms, strict=True)
        ):
            self._matmul(layer.qkv, self.qkv, before)
            self._attend(number)
            self._matmul_add(layer.out, self.o)
            self._mlp(layer.gate, layer.up, between)
            self._matmul_add(layer.down, self.wide)
        cache.token.add_(1)
        self._matmul(self.lm_head, self.logits, self.norm)
        return logits_BV

    def _attend(self, number: int) -> None:
        from fenchel.kernels.decode_attention import CacheTensors, DecodePosition, attend_decode

        cache, choice = self.cache, self.layers[number].choice
        scales = (
            (cache.key_scales[number], cache.value_scales[number]) if cache.int8 else (None, None)
        )
        alpha, beta = decode_alpha(choice), getattr(choice, "beta", None)
        assert alpha is not None
        assert beta is not None
        attend_decode(
            self.qkv[: self.rows],
            CacheTensors(cache.keys[number], cache.values[number], *scales),
            DecodePosition(cache.token, cache.padding_B),
            self.o[: self.rows],
            angles=self.rotary,
            scale=self.scale * beta,
            alpha=alpha,
            tokens=self.tokens,
        )

    def _matmul(self, weights: LinearWeights, y_BN: Tensor, norm: "NormWeights") -> None:
        """y = norm(x) W^T + b."""
        from fenchel.kernels.thin_matmul import matmul, normalise

        if self.thin:
            matmul(self.x, weights.weight, weights.bias, y_BN, norm=norm)
        else:
            normalise(self.x[: self.rows], norm, self.y[: self.rows])
            weights.into(y_BN, self.y)

    def _matmul_add(self, weights: LinearWeights, y_BK: Tensor) -> None:
        """x = x + y W^T + b."""
        from fenchel.kernels.thin_matmul import matmul_add

        if self.thin:
            matmul_add(self.x, y_BK, weights.weight, weights.bias)
        else:
            weights.add_to(self.x, y_BK)

    def _mlp(self, gate: LinearWeights | None, up: LinearWeights, norm: "NormWeights") -> None:
        """wide = f(norm(x) W_gate^T + b) * (norm(x) W_up^T + c)."""
        from fenchel.kernels.thin_matmul import activate, gated_matmul, normalise

        f = self.activation
        if self.thin:
            pair = None if gate is None else (gate.weight, gate.bias)
            gated_matmul(self.x, pair, (up.weight, up.bias), self.wide, activation=f, norm=norm)
            return
        rows = slice(self.rows)
        normalise(self.x[rows], norm, self.y[rows])
        if gate is not None:
            gate.into(self.gate, self.y)
        up.into(self.up, self.y)
        gate_BF = None if gate is None else self.gate[rows]
        activate(gate_BF, self.up[rows], self.wide[rows], activation=f)


def _norm(module: PlainNorm) -> "NormWeights":
    from fenchel.kernels.thin_matmul import NormWeights

    if isinstance(module, nn.LayerNorm):
        return NormWeights(module.weight, module.bias, module.eps, centred=True)
    return NormWeights(module.weight, None, module.eps, centred=False)


Step = Callable[[], Tensor]
StepRecorder = Callable[[Step, torch.device], Step]
Record = Literal["auto", "graph"]
"""Whether a step is recorded: as a CUDA graph, or "auto" as a graph where that is faster."""
AUTO_TOKENS = 32
"""New tokens from which "auto" records: recording takes as long as a dozen."""
DISTANCE_POSITIONS = ("alibi", "buckets")


def use_recorded_step(
    model: Transformer,
    record: Record | None,
    *,
    cache: CacheKind,
    padded: bool,
    draft: int,
    tokens: int,
) -> bool:
    """Whether a call decodes by a recorded step; raises where "graph" cannot serve it."""
    if record is None:
        return False
    if record not in get_args(Record):
        raise ValueError(
            f"record={record!r} should be one of {', '.join(get_args(Record))}, or None."
        )
    device = model.lm_head_weight.device
    reason = why_not_recorded(model, padded=padded)
    if cache == "int8" and (why := why_not_fused(model)) is not None:
        reason = f"an int8 cache needs a fused step, and {why}"
    if cache == "float16":
        reason = "it stores keys in the model's own dtype or in int8, not in float16"
    if RECORDERS["graph"] is capture_graph and device.type != "cuda":
        reason = f"a CUDA graph needs a model on a GPU, and this one is on {device}"
    if draft:
        reason = "a step reads one token, and draft reads several"
    if record == "auto":
        pays = device.type == "cuda" and tokens >= AUTO_TOKENS
        plain = not torch.is_autocast_enabled(device.type) and not _has_hooks(model)
        return pays and plain and reason is None
    if reason is not None:
        raise ValueError(f"record={record!r} cannot serve this call: {reason}.")
    return True


def _has_hooks(model: nn.Module) -> bool:
    """Whether a hook would miss the replays of a graph."""
    return any(map(has_forward_hooks, model.modules()))


def why_not_recorded(model: Transformer, *, padded: bool) -> str | None:
    """Why a step of a model cannot be recorded, or None; ``padded`` if prompts are unequal."""
    if model.config.kind != "decoder":
        return f"the model is of kind={model.config.kind!r}"
    if model.config.positions in DISTANCE_POSITIONS:
        return f"positions={model.config.positions!r} are distances between slots"
    if model.config.experts:
        return "experts take as many tokens as choose them, which varies from step to step"
    for module in model.modules():
        # The solvers of other maps decide on the host when they have converged, and a capture that
        # fails there leaves the random generators of the device unusable.
        if isinstance(module, Attention) and not isinstance(module.choice, type(SOFTMAX)):
            if why_not_fused(model) is None:
                break
            return f"{module.choice} is solved by iterations that the host counts"
    if padded and any(model.config.windows):
        return "prompts of unequal lengths do not fit layers with windows"
    return None


def store_argmax(logits_BV: Tensor, n_1: Tensor, token_B: Tensor, tokens_BP: Tensor) -> None:
    """Write the argmax of every row into ``token_B`` and into column n of ``tokens_BP``.

    There -1 marks a row whose largest logit is not finite.
    """
    top_B, argmax_B = logits_BV.max(-1)
    token_B.copy_(argmax_B)
    marked_B = torch.where(top_B.isfinite(), argmax_B, -1)
    tokens_BP.index_copy_(1, n_1, marked_B.unsqueeze(-1))


class PendingTokens(NamedTuple):
    """Tokens requested from the device, (B, N); -1 where the largest logit is not finite.

    Their copy to the host is requested too, so that ``wait`` does not wait for the tokens that are
    requested next.
    """

    on_device: Tensor
    on_host: Tensor
    copied: torch.cuda.Event | None

    @classmethod
    def of(cls, tokens_BN: Tensor) -> "PendingTokens":
        """Request the copy of these tokens to the host."""
        on_host = tokens_BN.to("cpu", non_blocking=True)
        copied = None
        if tokens_BN.is_cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(tokens_BN.device))
        return cls(tokens_BN, on_host, copied)

    def wait(self) -> Tensor:
        """The tokens on the host, once they are there."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.on_host


TokenChoice = Callable[[Tensor], Tensor]
"""Logits (B, V) to tokens (B,), -1 where the largest logit is not finite, without a transfer."""


class RecordedStep:
    """A recorded step: reads one token of each sequence, and chooses the next.

    The greedy token is chosen inside the step and written where the next step reads, so that
    decoding (``decode``) needs no transfer between two tokens. ``rows`` are recorded for a batch of
    that many sequences or fewer.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        rows: int,
        record: StepRecorder,
        fused: bool = False,
    ) -> None:
        self.cache = StaticCache(cache, batch=rows)
        self.model = None if fused else model
        device = model.lm_head_weight.device
        self.token_B = torch.zeros(rows, dtype=torch.long, device=device)
        self.tokens_BP = torch.zeros(rows, cache.positions + 1, dtype=torch.long, device=device)
        """Chosen tokens by their numbers."""
        self._fused = FusedStep(model, self.cache, self.token_B) if fused else None
        self._step = record(self._forward, device)

    def step(self, token_B: Tensor) -> Tensor:
        """Logits after one more token of each sequence: (B,) -> (B, V)."""
        self.token_B[: len(token_B)] = token_B
        return self._step()[: len(token_B)]

    def decode(
        self,
        token_B: Tensor | None,
        number: int,
        count: int,
        *,
        batch: int,
        choose: TokenChoice | None = None,
    ) -> PendingTokens:
        """The ``count`` tokens after token ``number``, each read in turn; greedy by default.

        None continues from the token that was chosen last.
        """
        if token_B is not None:
            self.token_B[:batch] = token_B
        for column in range(number + 1, number + 1 + count):
            logits_BV = self._step()[:batch]
            if choose is not None:
                chosen_B = choose(logits_BV)
                self.tokens_BP[:batch, column] = chosen_B
                self.token_B[:batch] = chosen_B.clamp(min=0)  # a mark is no row of the embedding
        return PendingTokens.of(self.tokens_BP[:batch, number + 1 : number + 1 + count].clone())

    def _forward(self) -> Tensor:
        cache = self.cache
        if self._fused is not None:
            from fenchel.kernels.argmax_token import argmax_token

            logits_BV = self._fused.step()
            argmax_token(logits_BV, cache.token, self.token_B, self.tokens_BP)
            return logits_BV
        assert self.model is not None
        cache.token_mask_BS.index_fill_(1, cache.slots[cache.positions], True)
        logits_B1V: Tensor = self.model(
            self.token_B.unsqueeze(-1), cache=cache, token_mask_BS=cache.token_mask_BS, last=True
        )
        logits_BV = logits_B1V[:, -1]
        store_argmax(logits_BV, cache.token, self.token_B, self.tokens_BP)
        return logits_BV


def capture_graph(step: Step, device: torch.device) -> Step:
    """A step as a CUDA graph. Capturing runs the step, so its memory is to be filled afterwards.

    The graph replays in the memory of the step, which the caller keeps: only what is allocated
    during the capture belongs to the graph.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what a first call allocates is allocated before capturing
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


RECORDERS: dict[str, StepRecorder] = {"graph": capture_graph}


FREE = 1 << 30
"""The padding of a row without a sequence, longer than any."""


class RecordedRows:
    """Recorded steps of a continuous batch: one per bucket of rows, with one cache of all rows.

    Each row has its number, its token and its settings of sampling in device memory. A step reads
    the token of every row and draws the next, which the step after it reads: ``set_rows`` is needed
    only when a row joins, leaves or reads another token than the drawn one.
    """

    def __init__(self, model: Transformer, buckets: Sequence[int]) -> None:
        table, B = model.lm_head_weight, buckets[-1]
        self.model, self.device = model, table.device
        self._is_fused = why_not_fused(model) is None
        self._kernel = table.is_cuda and find_spec("triton") is not None
        S = model.config.context
        shapes = KVCache(model.config, batch=1, positions=S, dtype=table.dtype, device=self.device)
        self.cache = StaticCache(shapes, batch=B, per_row=True)
        self.cache.padding_B.fill_(FREE)
        self.token_B, self.drawn_B = (torch.zeros_like(self.cache.token) for _ in range(2))
        """What the next step reads, and what the last one drew: -1 where it could not."""
        ones, numbers = torch.ones(B, device=self.device), torch.ones_like(self.token_B)
        self.settings = RowSampling(ones, ones.clone(), ones.clone(), numbers, seed=numbers.clone())
        self._caches = {rows: self.cache.first_rows(rows) for rows in buckets}
        self._fused: list[FusedStep] = []
        """Held here, since a graph does not keep the memory that it replays in."""
        self._steps: dict[tuple[int, int], Step] = {}
        """Recordings by their rows and by how many tokens a sequence has at most, ascending."""

    def record(self) -> None:
        """Record all buckets, once. Recording runs the steps, so no row may hold a sequence yet."""
        if self._steps:
            return
        for rows, cache in self._caches.items():
            for tokens in self._lengths(rows):
                fused = None
                if self._is_fused:
                    fused = FusedStep(self.model, cache, self.token_B[:rows], tokens)
                    self._fused.append(fused)
                step = partial(self._forward, rows, fused)
                self._steps[rows, tokens] = RECORDERS["graph"](step, self.device)

    def _lengths(self, rows: int) -> list[int]:
        """How many tokens a sequence has at most in the recordings of a bucket, ascending."""
        S = self.cache.positions
        softmax = any(
            isinstance(module, Attention) and isinstance(module.choice, type(SOFTMAX))
            for module in self.model.modules()
        )
        if not (self._is_fused and softmax):
            return [S]
        from fenchel.kernels.decode_attention import SHORT, one_per_head

        return [SHORT, S] if SHORT < S and one_per_head(rows * self.model.config.groups, 1) else [S]

    def set_rows(self, numbers: Sequence[int | None], tokens: Sequence[int]) -> None:
        """The number of tokens that each row has read, None for a free row, and the next token.

        A token of -1 is the one that the last step has drawn.
        """
        ints = [[n or 0 for n in numbers], [FREE if n is None else 0 for n in numbers], [*tokens]]
        number_B, padding_B, token_B = self._upload(torch.tensor(ints))
        self.cache.token.copy_(number_B)
        self.cache.padding_B.copy_(padding_B)
        self.cache.advance(0)
        self.token_B.copy_(torch.where(token_B >= 0, token_B, self.token_B))

    def set_sampling(self, settings: RowSampling) -> None:
        """How the first rows draw their tokens."""
        for mine, new in zip(self.settings, settings, strict=True):
            mine[: len(new)] = self._upload(new)

    def _upload(self, x: Tensor) -> Tensor:
        """On the device, without a wait for what it computes."""
        if self.device.type != "cuda":
            return x
        return x.pin_memory().to(self.device, non_blocking=True)

    def move_row(self, row: int, to: int) -> None:
        """Copy the token of a row and what it has read into another."""
        self.cache.move_row(row, to, 0)
        self.token_B[to] = self.token_B[row]

    def step(
        self, rows: int, observe: Observer | None = None, *, longest: int | None = None
    ) -> Tensor:
        """Logits of the first ``rows``, (B, V); ``drawn_B`` is then drawn from them.

        ``longest`` is how many tokens the longest sequence has with the one that is read; None is
        any number. ``observe`` as in the forward pass of the model, which is then called itself;
        keys and values come with the newest at the end, as many as the longest row has. The next
        step overwrites the logits.
        """
        if observe is None:
            most = self.cache.positions if longest is None else longest
            return next(
                step for (B, tokens), step in self._steps.items() if rows == B and tokens >= most
            )()
        self._caches[rows].advance(0)  # a fused step leaves the slots to its kernel
        return self._forward(rows, None, _in_order(observe, self._caches[rows]))

    def _forward(
        self, rows: int, fused: FusedStep | None, observe: Observer | None = None
    ) -> Tensor:
        cache = self._caches[rows]
        if fused is not None:
            logits_BV = fused.step()
        else:
            S, n_B1 = cache.positions, cache.token.unsqueeze(-1)
            tokens_S = S - 1 - torch.arange(S, device=self.device)
            logits_B1V: Tensor = self.model(
                self.token_B[:rows].unsqueeze(-1),
                cache=cache,
                token_mask_BS=tokens_S <= n_B1,
                observe=observe,
                last=True,
            )
            logits_BV = logits_B1V[:, -1]
        settings = RowSampling(*(x[:rows] for x in self.settings))
        if self._kernel:
            from fenchel.kernels.draw_token import draw_token

            draw_token(logits_BV, settings, cache.token, self.token_B[:rows], self.drawn_B[:rows])
        else:
            self.drawn_B[:rows] = draw_rows(logits_BV, settings, cache.token)
            self.token_B[:rows] = self.drawn_B[:rows].clamp(min=0)
        return logits_BV


def _in_order(observe: Observer, cache: StaticCache) -> Observer:
    """An observer of keys and values in the order of their tokens, each row's newest at the end."""
    n_B1 = cache.token.clone().unsqueeze(-1)
    longest = int(n_B1.max()) + 1

    def observe_in_order(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        R = cache.sizes[layer]
        S = min(R, longest)
        number_BS = n_B1 - (S - 1) + torch.arange(S, device=n_B1.device)
        slot_BS = R - 1 - number_BS.clamp(min=0) % R
        index = slot_BS[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
        observe(layer, q, k.gather(2, index), v.gather(2, index))

    return observe_in_order


class RecordingKey(NamedTuple):
    """What a recorded step depends on."""

    config: ModelConfig
    rows: int
    positions: int
    int8: bool
    weights: tuple[int, ...]
    """The address of every parameter."""


_pool: WeakKeyDictionary[Transformer, tuple[RecordingKey, RecordedStep]] = WeakKeyDictionary()


def recording_key(model: Transformer, cache: KVCache, *, rows: int) -> RecordingKey:
    """The key of the step that serves this call."""
    return RecordingKey(
        model.config,
        rows,
        cache.positions,
        isinstance(cache.layers[0].keys, Int8Store),
        tuple(p.data_ptr() for p in model.parameters()),
    )


def acquire(model: Transformer, key: RecordingKey) -> RecordedStep | None:
    """Take the step of a model out of the pool; None where there is none with this key."""
    entry = _pool.pop(model, None)
    return entry[1] if entry is not None and entry[0] == key else None


def release(model: Transformer, key: RecordingKey, step: RecordedStep) -> None:
    """Put a step into the pool; a reference to the model would keep both alive for ever."""
    assert step.model is None
    _pool[model] = key, step
