"""A decoder whose forward pass can be read and changed at every site: ours, or of transformers.

    x_0 = embedding,   x_l = block_l(x_{l-1}),   logits = unembed(x_L)

The sites of a pass, with layers from 1:

    stream       x_l after block l, (B, T, M); x_0 is the stream before the first block
    branch       what the attention module or the MLP of a block returns, (B, T, M): after W_o and
                 its bias, before a norm on the branch and the scale of the residual
    attention    the call of ``attend`` in a block, and the output of its heads (B, H, T, D)

``HookedModel.logits`` runs a batch and passes each of them to a ``Taps``, which returns what the
pass continues with. Reading is a Taps that stores what it gets, and an intervention is one that
returns something else, so both serve every model in which blocks and attention can be found.

B rows, T tokens, M width of the stream, H heads, G heads of keys and values, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fenchel.attention import AttentionCall, AttentionSpec, attend
from fenchel.hf.loader import one_sentence
from fenchel.inspection.foreign_model import BARE, ForeignModel
from fenchel.inspection.our_model import OurModel
from fenchel.inspection.recorder import BlockRecord, CallArguments, first_of
from fenchel.inspection.trace import InspectedModel, is_causal
from fenchel.model import Transformer, evaluating
from fenchel.model.block import Block

BRANCHES = ("attention", "mlp")


class Taps:
    """What a pass calls at its sites; this one changes nothing."""

    def stream(self, layer: int, x_BTM: Tensor) -> Tensor:  # noqa: ARG002
        """The stream after a block, or before the first for layer 0."""
        return x_BTM

    def branch(self, part: str, layer: int, y_BTM: Tensor) -> Tensor:  # noqa: ARG002
        """The output of a module of ``BRANCHES``."""
        return y_BTM

    def attention(self, layer: int, call: AttentionCall) -> Tensor | None:  # noqa: ARG002
        """The output (B, H, T, D) in place of that of ``call``; None leaves it to the model."""
        return None


class BlockModules(NamedTuple):
    """The modules of one layer."""

    block: nn.Module
    attention: nn.Module | None
    """None where the block does not separate it."""
    mlp: nn.Module | None


class HookedModel(ABC):
    """A decoder with an LM head, and the modules of its layers."""

    model: nn.Module
    blocks: Sequence[BlockModules]
    name: str

    @property
    def layers(self) -> int:
        """The number of blocks that a pass runs."""
        return len(self.blocks)

    @property
    def parameters(self) -> int:
        """How many numbers the model has."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        return next(self.model.parameters()).dtype

    @property
    @abstractmethod
    def width(self) -> int:
        """M."""

    @abstractmethod
    def unembed(self, x_NM: Tensor) -> Tensor:
        """The logits that the model reads off streams after its last block: (N, M) -> (N, V)."""

    @abstractmethod
    def _run(self, ids_BT: Tensor, taps: Taps) -> Tensor:
        """The logits (B, T, V) of a pass whose attention calls go to ``taps``."""

    def logits(self, ids_BT: Tensor, taps: Taps) -> Tensor:
        """(B, T) -> (B, T, V), through ``taps``."""
        with _hooks(self.blocks, taps):
            return self._run(ids_BT, taps)

    def batch(self, ids: Sequence[int], rows: int = 1) -> Tensor:
        """A sequence as ids (rows, T) on the device of the model."""
        return torch.tensor([list(ids)], device=self.device).expand(rows, -1)


class _HookedTransformer(HookedModel):
    """A Transformer of fenchel.model."""

    def __init__(self, model: Transformer, name: str) -> None:
        config = model.config
        if config.kind != "decoder" or not config.lm_head:
            headless = "" if config.lm_head else " without an LM head"
            raise ValueError(
                f"{name} is of kind {config.kind!r}{headless}; only decoders have a law of the "
                "next token."
            )
        self.model: Transformer = model
        self.name = name
        repeats = config.layers // len(model.blocks)
        blocks = [block for block in model.blocks if isinstance(block, Block)]
        self.blocks = [BlockModules(b, b.attention, b.mlp) for b in blocks for _ in range(repeats)]

    @property
    def width(self) -> int:
        return self.model.config.width

    def unembed(self, x_NM: Tensor) -> Tensor:
        return self.model.logits(self.model.lm_head_input(x_NM[None]))[0]

    def _run(self, ids_BT: Tensor, taps: Taps) -> Tensor:
        def override(layer: int, call: AttentionCall) -> Tensor | None:
            return taps.attention(layer + 1, call)

        with evaluating(self.model):
            logits_BTV: Tensor = self.model(ids_BT, attention_override=override)
        return logits_BTV


class _HookedForeign(HookedModel):
    """A model of transformers whose attention is ours."""

    def __init__(self, subject: ForeignModel) -> None:
        if not subject.reads_out:
            raise ValueError(f"{subject.name} has no LM head, and so no law of the next token.")
        self.subject, self.model, self.name = subject, subject.model, subject.name
        self._specs: dict[int, list[tuple[int, AttentionSpec]]] = {}
        """By the length of a text: the number of every layer that attends, and how it does."""
        records = self._records(torch.zeros(1, 2, dtype=torch.long, device=self.device))
        calls = [record.call for record in records if record.call is not None]
        if not all(is_causal(call) for call in calls):
            raise ValueError(f"{self.name} is not a decoder, so it has no law of the next token.")
        self._width = records[0].block.x.shape[-1]
        modules = ((r.attention, r.mlp) for r in records)
        parts = [[None if call is None else call.module for call in pair] for pair in modules]
        self.blocks = [
            BlockModules(record.block.module, *pair)
            for record, pair in zip(records, parts, strict=True)
        ]

    @property
    def width(self) -> int:
        return self._width

    def unembed(self, x_NM: Tensor) -> Tensor:
        """An LM head acts on one token at a time: N rows of one token, with their last stream."""

        class Last(Taps):
            def stream(self, layer: int, x_BTM: Tensor) -> Tensor:
                return x_NM[:, None].to(x_BTM.dtype) if layer == layers else x_BTM

        layers = self.layers
        ids_N1 = torch.zeros(len(x_NM), 1, dtype=torch.long, device=x_NM.device)
        return self.logits(ids_N1, Last())[:, 0]

    def logits(self, ids_BT: Tensor, taps: Taps) -> Tensor:
        self.subject.require_ids(ids_BT)
        T = ids_BT.shape[1]
        if T not in self._specs:  # an override of transformers is not given the mask of its call
            if not self._specs:
                with one_sentence(f"read this text with this {self.subject.family!r} model"):
                    self.subject.require_agreement(ids_BT[:1])
            records = enumerate(self._records(ids_BT[:1]), 1)
            calls = [(layer, record.call) for layer, record in records]
            self._specs[T] = [(layer, call.spec) for layer, call in calls if call is not None]
        return super().logits(ids_BT, taps)

    def _run(self, ids_BT: Tensor, taps: Taps) -> Tensor:
        specs = iter(self._specs[ids_BT.shape[1]])

        def override(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
            layer, spec = next(specs)
            return taps.attention(layer, AttentionCall(q, k, v, spec))

        listener: Any = self.subject.listener
        listener.override = override
        try:
            logits_BTV: Tensor = self.model(input_ids=ids_BT, **BARE).logits
        finally:
            listener.override = None
        return logits_BTV

    def _records(self, ids_1T: Tensor) -> list[BlockRecord]:
        with one_sentence(f"read this text with this {self.subject.family!r} model"):
            recorder = self.subject.record(ids_1T)
        recorder.require_one_stream()
        return recorder.records


Model = Transformer | InspectedModel | HookedModel
"""What the functions of this package take."""


def hooked(model: Model) -> HookedModel:
    """A model for reading and changing its passes.

    >>> from fenchel.model import ModelConfig, Transformer
    >>> hooked(Transformer(ModelConfig(vocabulary=16, layers=3, width=32))).layers
    3
    """
    if isinstance(model, HookedModel):
        return model
    if isinstance(model, Transformer):
        return _HookedTransformer(model, "the model")
    if isinstance(model, OurModel):
        return _HookedTransformer(model.model, model.name)
    if isinstance(model, ForeignModel):
        return _HookedForeign(model)
    raise ValueError(f"a Transformer or an opened model is needed, got {type(model).__name__}.")


def can_be_hooked(model: Model) -> bool:
    """Whether the sites of a model are found: it is a decoder with an LM head.

    >>> from fenchel.model import ModelConfig
    >>> can_be_hooked(Transformer(ModelConfig(vocabulary=16, kind="encoder")))
    False
    """
    try:
        hooked(model)
    except ValueError:
        return False
    return True


def separate(model: Transformer) -> Transformer:
    """A copy of the modules with the same weights: passes of ``model`` do not meet its hooks."""
    weights = [*model.parameters(), *model.buffers()]
    return deepcopy(model, {id(weight): weight for weight in weights})


@contextmanager
def _hooks(blocks: Sequence[BlockModules], taps: Taps) -> Iterator[None]:
    """Context manager: the outputs of blocks and branches pass through ``taps``.

    A module that serves several layers is called once for each, in order.
    """
    places: defaultdict[nn.Module, list[tuple[str, int]]] = defaultdict(list)
    for layer, (block, *parts) in enumerate(blocks, 1):
        places[block].append(("stream", layer))
        for name, part in zip(BRANCHES, parts, strict=True):
            if part is not None:
                places[part].append((name, layer))
    calls: defaultdict[nn.Module, int] = defaultdict(int)

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if calls[blocks[0].block]:
            return None
        x = CallArguments(args, kwargs).stream
        assert x is not None
        y = taps.stream(0, x)
        return ((y, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": y})

    def leave(module: nn.Module, _: Any, out: Any) -> Any:
        part, layer = places[module][calls[module] % len(places[module])]
        calls[module] += 1
        y = first_of(out)
        new = taps.stream(layer, y) if part == "stream" else taps.branch(part, layer, y)
        return out if new is y else (new, *out[1:]) if isinstance(out, tuple) else new

    handles = [blocks[0].block.register_forward_pre_hook(enter, with_kwargs=True)]
    handles += [module.register_forward_hook(leave) for module in places]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class RecordedPass(Taps):
    """A Taps that stores every site of one pass; with ``grad`` as parts of its graph.

    The graph begins at the stream before the first block.
    """

    def __init__(self, *, grad: bool = False) -> None:
        self.grad = grad
        self.streams: dict[int, Tensor] = {}
        self.branches: dict[tuple[str, int], Tensor] = {}
        self.calls: dict[int, AttentionCall] = {}
        self.outputs: dict[int, Tensor] = {}

    def stream(self, layer: int, x_BTM: Tensor) -> Tensor:
        """Store it."""
        if layer == 0 and self.grad:
            x_BTM = x_BTM.detach().requires_grad_()
        if self.grad and not x_BTM.requires_grad:
            raise ValueError(
                f"layer {layer} of this model runs without gradients, so the stream after it has "
                "no derivative."
            )
        self.streams[layer] = x_BTM
        return x_BTM

    def branch(self, part: str, layer: int, y_BTM: Tensor) -> Tensor:
        """Store it."""
        self.branches[part, layer] = y_BTM
        return y_BTM

    def attention(self, layer: int, call: AttentionCall) -> Tensor | None:
        """Store the call and compute its output."""
        scaled = replace(call.spec, scale=call.spec.scale_for(call.q.shape[-1]))
        self.calls[layer] = call._replace(spec=scaled)
        self.outputs[layer] = output = attend(call.q, call.k, call.v, **call.spec)
        return output
