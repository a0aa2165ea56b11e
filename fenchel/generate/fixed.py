"""A step whose shapes never change, so that it can be recorded once and replayed.

On a GPU a step of decoding is hundreds of small kernels, and asking for each takes longer than
running it. A CUDA graph asks once for all of them, torch.compile fuses many into one; both want
the same memory and the same shapes at every step, which a cache that grows does not give. Here
the cache always has all its S slots, and what is not yet there is absent:

    present_BS    True at the slots that hold a token; the model forbids the others

Priors are aligned to the end, where the newest query stands. So slots are filled from the end:
token n stands in slot S - 1 - n. A query at the last slot then sees every slot to its left, and
the n + 1 present ones put it at position n. A layer with a window of W keys has R = min(W, S)
slots and token n stands in slot R - 1 - n mod R: until all R are full they are the last R of the
S, and afterwards all of them are present, so one mask serves all layers. Where keys stand does
not matter to attention as long as their positions came in before (rotary, learned, none);
distances between slots mean nothing here, so ALiBi and buckets cannot be recorded (``why_not``).

The prompt is read by the ordinary cache and taken over.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from fenchel.generate.cache import KeyValueCache, Kind
from fenchel.model import Transformer

Step = Callable[[], Tensor]
Recorder = Callable[[Step, torch.device], Step]
Record = Literal["graph", "compile"]
"""How a step is recorded: as a CUDA graph, or by torch.compile, which fuses kernels as well."""
BY_DISTANCE = ("alibi", "buckets")


def require(model: Transformer, record: Record, *, kind: Kind, fill: bool, draft: int) -> None:
    """Refuse, in one sentence, what cannot be recorded."""
    if record not in get_args(Record):
        raise ValueError(f"record={record!r} should be one of {', '.join(get_args(Record))}.")
    reason = why_not(model, fill=fill)
    if record == "graph" and model.read_weight.device.type != "cuda":
        reason = (
            f"a CUDA graph needs a model on a GPU, and this one is on {model.read_weight.device}"
        )
    if kind != "model":
        reason = f"it holds keys in the model's own dtype, not in {kind}"
    if draft:
        reason = "a step reads one token, and draft reads several"
    if reason is not None:
        raise ValueError(f"record={record!r} cannot serve this call: {reason}.")


def why_not(model: Transformer, *, fill: bool) -> str | None:
    """Why a model's step cannot be recorded, or None; ``fill`` if prompts are unequal."""
    if model.config.kind != "decoder":
        return f"the model is of kind={model.config.kind!r}"
    if model.config.positions in BY_DISTANCE:
        return f"positions={model.config.positions!r} are distances between slots"
    if fill and any(model.config.windows):
        return "prompts of unequal lengths do not fit layers with windows"
    return None


class FixedCache:
    """All slots of every layer, filled from the end, at places that are numbers in memory."""

    def __init__(self, cache: KeyValueCache, *, batch: int) -> None:
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
        self.present_BS = torch.zeros(batch, S, dtype=torch.bool, device=like.device)
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

    def take(self, cache: KeyValueCache, fill_B: Tensor | None) -> None:
        """Hold what another cache has read; ``fill_B`` slots at its left are absent."""
        n = cache.length
        for layer, (room, held) in enumerate(zip(self.rooms, cache.layers, strict=True)):
            end = n - held.gone
            last = min(room, end)
            tokens = torch.arange(n - last, n, device=self.token.device)
            places = room - 1 - tokens % room
            self.keys[layer].index_copy_(2, places, held.keys.read(end - last, end))
            self.values[layer].index_copy_(2, places, held.values.read(end - last, end))
        tokens_S = self.length - torch.arange(self.positions, device=self.token.device)
        present_BS = (tokens_S < n).expand_as(self.present_BS)
        if fill_B is not None:
            present_BS = present_BS & (tokens_S >= fill_B.unsqueeze(-1))
        self.present_BS.copy_(present_BS)
        self.token.fill_(n)
        self.advance(0)


class FixedStep:
    """Reads one token of each sequence, by a step that was recorded."""

    def __init__(
        self,
        model: Transformer,
        cache: KeyValueCache,
        *,
        batch: int,
        record: Recorder,
    ) -> None:
        self.model, self.cache = model, FixedCache(cache, batch=batch)
        device = model.read_weight.device
        self.token_B1 = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self._step = record(self._read, device)

    def step(self, token_B: Tensor) -> Tensor:
        """Logits behind the next token of each sequence: (B,) -> (B, V)."""
        self.token_B1.copy_(token_B.unsqueeze(-1))
        return self._step()

    def _read(self) -> Tensor:
        cache = self.cache
        cache.present_BS.index_fill_(1, cache.places[cache.positions], True)
        logits: Tensor = self.model(
            self.token_B1, cache=cache, present_BS=cache.present_BS, last=True
        )
        return logits[:, -1]


def as_graph(step: Step, device: torch.device) -> Step:
    """A step as a CUDA graph; recording runs it, so its memory is to be filled afterwards."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is made at a first call is made before recording
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


def as_compiled(step: Step, device: torch.device, *, backend: str = "inductor") -> Step:
    """A step through torch.compile, and on a GPU the kernels it made as a CUDA graph."""
    compiled: Step = torch.compile(step, backend=backend, dynamic=False)
    return as_graph(compiled, device) if device.type == "cuda" else compiled


RECORDERS: dict[str, Recorder] = {"graph": as_graph, "compile": as_compiled}
