"""A step whose shapes never change, so that it can be recorded once and replayed.

On a GPU a step of decoding is hundreds of small kernels, and asking for each takes longer than
running it. A CUDA graph asks once for all of them, and wants the same memory and the same shapes at
every step, which a cache that grows does not give. Here the cache always has all its slots, and
those not yet written are absent (fenchel/generate/slots.py). Distances between slots mean nothing
there, so ALiBi and buckets cannot be recorded (``why_not``).

The prompt is read by the ordinary cache and taken over. A step is the model's own forward pass, or
for a plain decoder a few kernels made for one token (fenchel/generate/fused.py).
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fenchel.generate.cache import KeyValueCache, Kind
from fenchel.generate.fused import Fused
from fenchel.generate.slots import FixedCache
from fenchel.model import Transformer

Step = Callable[[], Tensor]
Recorder = Callable[[Step, torch.device], Step]
Record = Literal["graph"]
"""How a step is recorded: as a CUDA graph."""
BY_DISTANCE = ("alibi", "buckets")


def require(model: Transformer, record: Record, *, kind: Kind, fill: bool, draft: int) -> None:
    """Refuse, in one sentence, what cannot be recorded."""
    if record not in get_args(Record):
        raise ValueError(f"record={record!r} should be one of {', '.join(get_args(Record))}.")
    reason = why_not(model, fill=fill)
    if RECORDERS[record] is as_graph and model.read_weight.device.type != "cuda":
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


def choose(logits_BV: Tensor, n_1: Tensor, token_B: Tensor, said_BP: Tensor) -> None:
    """Write the likeliest token of every row into ``token_B`` and column n of ``said_BP``.

    There -1 stands for a row whose largest logit is no finite number.
    """
    top_B, chosen_B = logits_BV.max(-1)
    token_B.copy_(chosen_B)
    marked_B = torch.where(top_B.isfinite(), chosen_B, -1)
    said_BP.index_copy_(1, n_1, marked_B.unsqueeze(-1))


class Coming(NamedTuple):
    """Tokens that the device has been asked for, (B, N); -1 where the largest logit is not finite.

    The copy that ``told`` waits for is on its way too, so that waiting for these does not wait for
    what the device is asked for next.
    """

    there: Tensor
    here: Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, there_BN: Tensor) -> "Coming":
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


class FixedStep:
    """Reads one token of each sequence by a step that was recorded, and chooses the next.

    The likeliest token is chosen inside the step and stands where the next step reads, so that
    greedy decoding (``follow``) asks the device for nothing between two tokens.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KeyValueCache,
        *,
        batch: int,
        record: Recorder,
        fused: bool = False,
    ) -> None:
        self.cache = FixedCache(cache, batch=batch)
        self.model = None if fused else model
        device = model.read_weight.device
        self.token_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.said_BP = torch.zeros(batch, cache.positions + 1, dtype=torch.long, device=device)
        """Chosen tokens at their numbers."""
        self._fused = Fused(model, self.cache, self.token_B) if fused else None
        self._step = record(self._once, device)

    def step(self, token_B: Tensor) -> Tensor:
        """Logits behind the next token of each sequence: (B,) -> (B, V)."""
        self.token_B.copy_(token_B)
        return self._step()

    def follow(self, token_B: Tensor | None, number: int, count: int) -> Coming:
        """The ``count`` likeliest tokens behind token ``number``, each read in turn.

        None for the token that the last step chose.
        """
        if token_B is not None:
            self.token_B.copy_(token_B)
        for _ in range(count):
            self._step()
        return Coming.of(self.said_BP[:, number + 1 : number + 1 + count].clone())

    def _once(self) -> Tensor:
        cache = self.cache
        if self._fused is not None:
            return self._fused.step(self.said_BP)
        assert self.model is not None
        cache.present_BS.index_fill_(1, cache.places[cache.positions], True)
        logits_B1V: Tensor = self.model(
            self.token_B.unsqueeze(-1), cache=cache, present_BS=cache.present_BS, last=True
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
