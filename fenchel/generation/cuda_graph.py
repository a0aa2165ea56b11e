"""A cache whose shapes never change: all S slots from the start, filled from the end.

    token_mask_BS    True at the slots that hold a token; the model forbids the others

Priors are aligned to the end, where the newest query stands. So slots are filled from the end:
token n stands in slot S - 1 - n. A query at the last slot then sees every slot to its left, and
the n + 1 present ones put it at position n. A layer with a window of W keys has R = min(W, S)
slots and token n stands in slot R - 1 - n mod R: until all R are full they are the last R of the
S, and afterwards all of them are present, so one mask serves all layers. Where keys stand does
not matter to attention as long as their positions came in before (rotary, learned, none);
distances between slots mean nothing here.

One token of a few sequences through a plain decoder on a GPU, in five kernels a layer.

    qkv   = norm(x) W_qkv^T                             kernels/thin_matmul.py
    o     = attend(turned q, keys with turned k)        kernels/decode_attention.py, which also
    writes k and v
    x     = x + o W_o^T                                 kernels/thin_matmul.py
    wide  = f(norm(x) W_gate^T) * (norm(x) W_up^T)
    x     = x + wide W_down^T
    z     = norm(x) read^T,  token = argmax z           kernels/argmax_token.py

With one token a step lasts as long as it takes to read the weights once, if nothing else is in the
way: each kernel reads one or two matrices whole and makes what it needs of the stream by itself.
Where we are in the text lies in device memory, so that the step can be recorded once for all tokens
(generation/cuda_graph.py). 22 layers of width 2048 with 32,000 words are 2.07 GB in bfloat16.

B sequences, M width of the stream, H heads, G heads of keys, D width of a head, F width of the MLP.

A step whose shapes never change, so that it can be recorded once and replayed.

On a GPU a step of decoding is hundreds of small kernels, and asking for each takes longer than
running it. A CUDA graph asks once for all of them, and wants the same memory and the same shapes at
every step, which a cache that grows does not give. Here the cache always has all its slots, and
those not yet written are absent (fenchel/generation/cuda_graph.py). Distances between slots mean
nothing
there, so ALiBi and buckets cannot be recorded (``why_not``).

The prompt is read by the ordinary cache and taken over. A step is the model's own forward pass, or
for a plain decoder a few kernels made for one token (fenchel/generation/cuda_graph.py).

Recorded steps that are kept from one call to the next, one a model.

Recording takes as long as a dozen of the tokens it is made for. A step is good as long as it finds
what it was recorded with: the same weights in the same memory (their values may change), the same
number of sequences and of slots. It is handed to one reader at a time, who brings it back; somebody
who decodes meanwhile records another. It lives as long as its model and holds a cache of its own.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fenchel.generation.kv_cache import Kind, KVCache
from fenchel.generation.plain_decoder import Norm as NormModule
from fenchel.generation.plain_decoder import layer_of, norm_of, why_not_plain
from fenchel.model import ModelConfig, Transformer
from fenchel.model.rotary_table import RotaryTable

if TYPE_CHECKING:
    from fenchel.kernels.thin_matmul import NormWeights


class StaticCache:
    """All slots of every layer, filled from the end, at places that are numbers in memory."""

    def __init__(self, cache: KVCache, *, batch: int) -> None:
        self.positions = S = cache.positions
        like = cache.layers[0].keys.read(0, 1)
        _, G, _, D = like.shape
        self.rooms = [
            S if layer.reach is None else min(S, layer.reach + 1) for layer in cache.layers
        ]
        # Zeros, since a slot that is absent still meets a weight of zero.
        self.keys = [like.new_zeros(batch, G, room, D) for room in self.rooms]
        self.values = [like.new_zeros(batch, G, room, D) for room in self.rooms]
        self.token = torch.zeros(1, dtype=torch.long, device=like.device)
        """The number n of the token that is read next."""
        self.places = {room: self.token + room - 1 for room in [*self.rooms, S]}
        self.token_mask_BS = torch.zeros(batch, S, dtype=torch.bool, device=like.device)
        self.fill_B = torch.zeros(batch, dtype=torch.long, device=like.device)
        """How many slots before each sequence hold nothing."""
        self.length = S - 1
        """For the model the newest token stands at the last slot, whatever its number."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write (B, G, 1, D) at the token's place and give back all slots."""
        place = self.places[self.rooms[layer]]
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(2, place, k)
        values.index_copy_(2, place, v)
        return keys, values

    def advance(self, positions: int) -> None:
        """The next token, and its places."""
        self.token.add_(positions)
        for room, place in self.places.items():
            place.copy_(room - 1 - self.token % room)

    def take(self, cache: KVCache, fill_B: Tensor | None) -> None:
        """Hold what another cache has read; ``fill_B`` slots at its left are absent."""
        n, device = cache.length, self.token.device
        tokens = torch.arange(n, device=device)
        places = {room: room - 1 - tokens[-room:] % room for room in set(self.rooms)}
        for layer, (room, held) in enumerate(zip(self.rooms, cache.layers, strict=True)):
            end = n - held.gone
            last = min(room, end)
            at = places[room][-last:]
            self.keys[layer].index_copy_(2, at, held.keys.read(end - last, end))
            self.values[layer].index_copy_(2, at, held.values.read(end - last, end))
        tokens_S = self.length - torch.arange(self.positions, device=device)
        token_mask_BS = (tokens_S < n).expand_as(self.token_mask_BS)
        if fill_B is not None:
            token_mask_BS = token_mask_BS & (tokens_S >= fill_B.unsqueeze(-1))
        self.token_mask_BS.copy_(token_mask_BS)
        self.fill_B.copy_(torch.zeros_like(self.fill_B) if fill_B is None else fill_B)
        self.token.fill_(n)
        self.advance(0)


MOST_ROWS = 8
"""Sequences up to which reading weights is most of the work; for more, products are torch's."""
KINDS = (torch.bfloat16, torch.float16, torch.float32)


def why_not_fused(model: Transformer, *, batch: int) -> str | None:
    """The first reason why a model's step cannot be made of these kernels, or None."""
    table = model.lm_head_weight
    if batch > MOST_ROWS:
        return f"{batch} sequences are more than {MOST_ROWS}"
    if table.device.type != "cuda" or table.dtype not in KINDS:
        return f"it is in {table.dtype} on {table.device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if not all(p.is_contiguous() for p in model.parameters()):
        return "a parameter does not lie in one piece"
    return why_not_plain(model)


class FusedStep:
    """Reads the token of each sequence that stands in ``token_B``, and writes the next there."""

    def __init__(self, model: Transformer, cache: StaticCache, token_B: Tensor) -> None:
        c, table, S = model.config, model.lm_head_weight, cache.positions
        self.cache, self.token_B = cache, token_B
        self.embed, self.lm_head_weight = model.embed.weight, table
        self.pos_embed = None if model.pos_embed is None else model.pos_embed.weight
        self.activation, self.norm = c.mlp, _norm(norm_of(model.norm))
        self.scale = c.head_width**-0.5 if c.score_scale is None else c.score_scale
        self.turn: tuple[Tensor, Tensor] | None = None
        if c.positions == "rotary":
            cos, sin = RotaryTable(c).between(0, S, table)
            self.turn = cos.to(table.dtype).contiguous(), sin.to(table.dtype).contiguous()
        self.layers = [layer_of(block) for block in model.blocks]
        self.norms = [(_norm(layer.before), _norm(layer.between)) for layer in self.layers]
        B, H, G, D = len(token_B), c.heads, c.groups, c.head_width
        new = table.new_empty
        self.x, self.qkv, self.o = new(B, c.width), new(B, (H + 2 * G) * D), new(B, H * D)
        self.wide, self.logits = new(B, c.mlp_width), new(B, c.vocabulary)

    def step(self, said_BP: Tensor) -> Tensor:
        """Logits behind the token, (B, V); the likeliest is the next, also in ``said_BP``.

        The logits are good until the next step.
        """
        from fenchel.kernels.argmax_token import argmax_token
        from fenchel.kernels.decode_attention import DecodePosition, attend_decode
        from fenchel.kernels.thin_matmul import gated_matmul, matmul, matmul_add

        cache, x, turn = self.cache, self.x, self.turn
        place = DecodePosition(cache.token, cache.fill_B)
        torch.index_select(self.embed, 0, self.token_B, out=x)
        if self.pos_embed is not None:
            x.add_(self.pos_embed[cache.token - cache.fill_B])
        for number, (layer, (before, between)) in enumerate(
            zip(self.layers, self.norms, strict=True)
        ):
            keys, values = cache.keys[number], cache.values[number]
            matmul(x, layer.qkv.weight, layer.qkv.bias, self.qkv, norm=before)
            attend_decode(self.qkv, keys, values, place, self.o, angles=turn, scale=self.scale)
            matmul_add(x, self.o, layer.out.weight, layer.out.bias)
            gate = None if layer.gate is None else (layer.gate.weight, layer.gate.bias)
            up, f = (layer.up.weight, layer.up.bias), self.activation
            gated_matmul(x, gate, up, self.wide, activation=f, norm=between)
            matmul_add(x, self.wide, layer.down.weight, layer.down.bias)
        cache.token.add_(1)
        matmul(x, self.lm_head_weight, None, self.logits, norm=self.norm)
        argmax_token(self.logits, cache.token, self.token_B, said_BP)
        return self.logits


def _norm(module: NormModule) -> "NormWeights":
    from fenchel.kernels.thin_matmul import NormWeights

    if isinstance(module, nn.LayerNorm):
        return NormWeights(module.weight, module.bias, module.eps, centred=True)
    return NormWeights(module.weight, None, module.eps, centred=False)


Step = Callable[[], Tensor]
Recorder = Callable[[Step, torch.device], Step]
Record = Literal["graph"]
"""How a step is recorded: as a CUDA graph."""
BY_DISTANCE = ("alibi", "buckets")


def require(model: Transformer, record: Record, *, kind: Kind, fill: bool, draft: int) -> None:
    """Refuse, in one sentence, what cannot be recorded."""
    if record not in get_args(Record):
        raise ValueError(f"record={record!r} should be one of {', '.join(get_args(Record))}.")
    reason = why_not_recorded(model, fill=fill)
    if RECORDERS[record] is as_graph and model.lm_head_weight.device.type != "cuda":
        reason = (
            f"a CUDA graph needs a model on a GPU, and this one is on {model.lm_head_weight.device}"
        )
    if kind != "model":
        reason = f"it holds keys in the model's own dtype, not in {kind}"
    if draft:
        reason = "a step reads one token, and draft reads several"
    if reason is not None:
        raise ValueError(f"record={record!r} cannot serve this call: {reason}.")


def why_not_recorded(model: Transformer, *, fill: bool) -> str | None:
    """Why a model's step cannot be recorded, or None; ``fill`` if prompts are unequal."""
    if model.config.kind != "decoder":
        return f"the model is of kind={model.config.kind!r}"
    if model.config.positions in BY_DISTANCE:
        return f"positions={model.config.positions!r} are distances between slots"
    if fill and any(model.config.windows):
        return "prompts of unequal lengths do not fit layers with windows"
    return None


def choose(logits_BV: Tensor, n_1: Tensor, token_B: Tensor, said_BP: Tensor) -> None:
    """Write the likeliest token of every row into ``token_B`` and column n of ``said_BP``.

    There -1 stands for a row whose largest logit is no finite number.
    """
    top_B, chosen_B = logits_BV.max(-1)
    token_B.copy_(chosen_B)
    marked_B = torch.where(top_B.isfinite(), chosen_B, -1)
    said_BP.index_copy_(1, n_1, marked_B.unsqueeze(-1))


class PendingTokens(NamedTuple):
    """Tokens that the device has been asked for, (B, N); -1 where the largest logit is not finite.

    The copy that ``told`` waits for is on its way too, so that waiting for these does not wait for
    what the device is asked for next.
    """

    there: Tensor
    here: Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, there_BN: Tensor) -> "PendingTokens":
        """With a copy for the CPU behind it."""
        here_BN = there_BN.to("cpu", non_blocking=True)
        arrived = None
        if there_BN.is_cuda:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(torch.cuda.current_stream(there_BN.device))
        return cls(there_BN, here_BN, arrived)

    def told(self) -> Tensor:
        """The tokens, on the CPU."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.here


class RecordedStep:
    """Reads one token of each sequence by a step that was recorded, and chooses the next.

    The likeliest token is chosen inside the step and stands where the next step reads, so that
    greedy decoding (``follow``) asks the device for nothing between two tokens.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        batch: int,
        record: Recorder,
        fused: bool = False,
    ) -> None:
        self.cache = StaticCache(cache, batch=batch)
        self.model = None if fused else model
        device = model.lm_head_weight.device
        self.token_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.said_BP = torch.zeros(batch, cache.positions + 1, dtype=torch.long, device=device)
        """Chosen tokens at their numbers."""
        self._fused = FusedStep(model, self.cache, self.token_B) if fused else None
        self._step = record(self._once, device)

    def step(self, token_B: Tensor) -> Tensor:
        """Logits behind the next token of each sequence: (B,) -> (B, V)."""
        self.token_B.copy_(token_B)
        return self._step()

    def follow(self, token_B: Tensor | None, number: int, count: int) -> PendingTokens:
        """The ``count`` likeliest tokens behind token ``number``, each read in turn.

        None for the token that the last step chose.
        """
        if token_B is not None:
            self.token_B.copy_(token_B)
        for _ in range(count):
            self._step()
        return PendingTokens.of(self.said_BP[:, number + 1 : number + 1 + count].clone())

    def _once(self) -> Tensor:
        cache = self.cache
        if self._fused is not None:
            return self._fused.step(self.said_BP)
        assert self.model is not None
        cache.token_mask_BS.index_fill_(1, cache.places[cache.positions], True)
        logits_B1V: Tensor = self.model(
            self.token_B.unsqueeze(-1), cache=cache, token_mask_BS=cache.token_mask_BS, last=True
        )
        logits_BV = logits_B1V[:, -1]
        choose(logits_BV, cache.token, self.token_B, self.said_BP)
        return logits_BV


def as_graph(step: Step, device: torch.device) -> Step:
    """A step as a CUDA graph; recording runs it, so its memory is to be filled afterwards."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is made at a first call is made before recording
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


RECORDERS: dict[str, Recorder] = {"graph": as_graph}


class RecordingFit(NamedTuple):
    """What a recorded step depends on."""

    config: ModelConfig
    batch: int
    positions: int
    weights: tuple[int, ...]
    """Where every parameter lies."""


_kept: WeakKeyDictionary[Transformer, tuple[RecordingFit, RecordedStep]] = WeakKeyDictionary()


def fit(model: Transformer, *, batch: int, positions: int) -> RecordingFit:
    """What a step for this call has to fit."""
    return RecordingFit(
        model.config, batch, positions, tuple(p.data_ptr() for p in model.parameters())
    )


def take(model: Transformer, wanted: RecordingFit) -> RecordedStep | None:
    """The step that was brought back last, if it fits; it is then nobody else's."""
    found = _kept.pop(model, None)
    return found[1] if found is not None and found[0] == wanted else None


def bring_back(model: Transformer, made_for: RecordingFit, step: RecordedStep) -> None:
    """Keep a step for the next call; it must not hold the model, or neither would ever go."""
    assert step.model is None
    _kept[model] = made_for, step
