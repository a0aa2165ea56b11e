"""Records a forward pass: every block that attends, its inputs and what its attention used.

A block is the outermost member of an ``nn.ModuleList`` inside which attention is called once, or a
member of the same list without attention, such as a layer of gated DeltaNet. That holds for
fenchel's Transformer and for the decoders and encoders of ``transformers``, so one recorder serves
all of them; attention calls arrive through ``record_attention``. A recorded block is a function of
the stream: the same module with the same other arguments.

Inside a block, a module whose class name contains "norm" and that takes the stream is a norm layer.
The direct child in which attention was called is the attention branch. A direct child with weights
that maps the stream to a stream and neither attends nor normalises is the MLP.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fenchel.attention import AttentionCall
from fenchel.inspection.linearisation import freeze, tangent_activations
from fenchel.inspection.trace import BlockTrace, Branch, Map, NormInput


@dataclass(frozen=True)
class CallArguments:
    """The arguments of a module's call, one of which is the residual stream."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def stream(self) -> Tensor | None:
        """The stream: the first argument, or the one named hidden_states."""
        first = self.args[0] if self.args else self.kwargs.get("hidden_states")
        return first if isinstance(first, Tensor) and first.is_floating_point() else None

    def call(self, module: Callable[..., Any], x: Tensor) -> Tensor:
        """``module`` with the stream x and all other arguments as recorded."""
        if self.args:
            return first_of(module(x, *self.args[1:], **self.kwargs))
        return first_of(module(**{**self.kwargs, "hidden_states": x}))


Override = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v of the attention call inside a module to the output that replaces attention."""
Run = Callable[[nn.Module, CallArguments, Tensor, Override | None], Tensor]
"""Runs a recorded module on another stream, with an attention override or without."""


class ModuleCall(NamedTuple):
    """One call of a module."""

    module: nn.Module
    arguments: CallArguments
    output: Tensor
    """The stream among its outputs, (1, T, M)."""

    @property
    def x(self) -> Tensor:
        """The stream among its arguments, (1, T, M)."""
        stream = self.arguments.stream
        assert stream is not None
        return stream.detach()

    def function(self, run: Run, override: Override | None) -> Map:
        """The module as a function of the stream."""
        return lambda x: run(self.module, self.arguments, x, override)

    def branch(self, run: Run, override: Override | None) -> Branch:
        """The module for first derivatives at its recorded input."""
        return Branch(tangent_activations(self.module, self.function(run, override)), self.x)


class BlockRecord(NamedTuple):
    """One block of the forward pass."""

    block: ModuleCall
    call: AttentionCall | None
    """None where the block does not attend."""
    norms: tuple[NormInput, ...]
    attention: ModuleCall | None
    """The attention module; None where the block does not separate it."""
    mlp: ModuleCall | None


@dataclass
class _OpenBlock:
    """A block that has not returned."""

    module: nn.Module
    stream: Tensor | None
    calls: list[AttentionCall] = field(default_factory=list)
    norms: list[NormInput] = field(default_factory=list)
    attention: ModuleCall | None = None
    mlp: ModuleCall | None = None


class BlockRecorder:
    """Hooks on a model within a ``with`` statement; ``records`` has what they recorded, at its end.

    ``run`` is how the model's modules are called again, with or without an attention override.
    """

    def __init__(self, model: nn.Module, run: Run) -> None:
        self.model, self.run = model, run
        self.records: list[BlockRecord] = []
        self._closed: list[tuple[int, BlockRecord]] = []
        """Of every block the list that it is a member of, and its record."""
        self._open: _OpenBlock | None = None
        self._handles: list[Any] = []
        self._names = {id(module): name for name, module in model.named_modules()}
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        self._members = {id(child): id(members) for members in lists for child in members}
        """The list of every member."""

    @property
    def modules(self) -> list[nn.Module]:
        """The module of every recorded block; a shared module appears several times."""
        return [record.block.module for record in self.records]

    def require_one_stream(self) -> None:
        """Refuse blocks that take several streams beside each other."""
        for record in self.records:
            if record.block.x.dim() != 3:
                raise ValueError(
                    f"a block of this model takes a tensor of {tuple(record.block.x.shape)} and "
                    "not one stream (1, T, M), so it cannot be taken apart."
                )

    def block_traces(self) -> tuple[BlockTrace, ...]:
        """All recorded blocks, with their attention linearised for derivatives."""
        self.require_one_stream()
        frozen = iter(freeze([record.call for record in self.records if record.call is not None]))
        overrides = [None if record.call is None else next(frozen) for record in self.records]
        pairs = zip(self.records, overrides, strict=True)
        return tuple(self._trace(record, override) for record, override in pairs)

    def __enter__(self) -> "BlockRecorder":
        for module in self.model.modules():
            self._handles += [
                module.register_forward_pre_hook(self._enter, with_kwargs=True),
                module.register_forward_hook(self._leave, with_kwargs=True),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        stacks = {stack for stack, record in self._closed if record.call is not None}
        self.records = [record for stack, record in self._closed if stack in stacks]
        self._handles, self._open = [], None

    def record_attention(self, call: AttentionCall) -> None:
        """Add an attention call to the block that is running."""
        if self._open is None:
            raise ValueError(
                "attention was called outside of any block, so this model cannot be taken apart; "
                "only stacks of equal blocks can be inspected."
            )
        q, k, v, spec = call
        spec = replace(spec, scale=spec.scale_for(q.shape[-1]))
        self._open.calls.append(AttentionCall(q.detach(), k.detach(), v.detach(), spec))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._open is None and id(module) in self._members:
            self._open = _OpenBlock(module, CallArguments(args, kwargs).stream)

    def _leave(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        block = self._open
        if block is None:
            return
        arguments = CallArguments(args, kwargs)
        if module is block.module:
            self._open = None
            x, y = block.stream, out[0] if isinstance(out, tuple) else out
            maps_stream = isinstance(y, Tensor) and x is not None and y.shape == x.shape
            if block.calls or maps_stream:
                self._close(block, ModuleCall(module, arguments, first_of(out).detach()))
            return
        x, y = arguments.stream, out[0] if isinstance(out, tuple) else out
        if x is None or block.stream is None or x.shape != block.stream.shape:
            return
        if is_norm(module) and isinstance(y, Tensor):
            block.norms.append(self._norm(module, x, y))
        elif isinstance(y, Tensor) and y.shape == x.shape and _is_part(module, block.module):
            call = ModuleCall(module, arguments, y.detach())
            if block.calls and block.attention is None:
                block.attention = call
            else:
                block.mlp = call

    def _close(self, block: _OpenBlock, call: ModuleCall) -> None:
        if len(block.calls) > 1:
            raise ValueError(
                f"a block of this model calls attention {len(block.calls)} times; only blocks "
                "with one attention can be inspected (decoders or encoders, not both in one)."
            )
        norms, made = tuple(block.norms), next(iter(block.calls), None)
        record = BlockRecord(call, made, norms, block.attention, block.mlp)
        self._closed.append((self._members[id(block.module)], record))

    def _trace(self, record: BlockRecord, override: Override | None) -> BlockTrace:
        linearised = record.block.branch(self.run, override)
        return BlockTrace(
            linearised.x,
            record.block.output,
            record.block.function(self.run, None),
            linearised.f,
            record.call,
            record.norms,
            None if record.attention is None else record.attention.branch(self.run, override),
            None if record.mlp is None else record.mlp.branch(self.run, None),
        )

    def _norm(self, module: nn.Module, x: Tensor, y: Tensor) -> NormInput:
        values = [getattr(module, name, None) for name in ("eps", "variance_epsilon", "epsilon")]
        epsilon = next((value for value in values if isinstance(value, float)), None)
        if epsilon is None:  # torch's RMSNorm then takes the eps of the dtype in which it computes
            wide = torch.promote_types(x.dtype, torch.float32)
            epsilon = torch.finfo(wide).eps if isinstance(module, nn.RMSNorm) else 0.0
        kind = "layer" if isinstance(module, nn.LayerNorm) else "rms"
        name = self._names[id(module)].rpartition(".")[2]
        return NormInput(name, x.detach(), _gain(module, x, y, kind), epsilon, kind)


def is_norm(module: nn.Module) -> bool:
    """Whether the module's class name contains "norm"."""
    return "norm" in type(module).__name__.lower()


def first_of(out: Any) -> Tensor:
    """The stream among the outputs of a module: itself, or the first of a tuple."""
    first = out[0] if isinstance(out, tuple) else out
    assert isinstance(first, Tensor), type(out)
    return first


def _gain(module: nn.Module, x: Tensor, y: Tensor, kind: str) -> Tensor | None:
    """The gain of a norm layer: its weight, or 1 + weight (Gemma), whichever reproduces y."""
    weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
    if not isinstance(weight, Tensor):
        return None
    x = x.detach() - x.mean(-1, keepdim=True) if kind == "layer" else x.detach()
    size = x / x.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30)
    scaled = y.detach() - bias if isinstance(bias, Tensor) else y.detach()
    off = [(size * gain - scaled).square().sum() for gain in (weight, 1.0 + weight)]
    return (weight if bool(off[0] <= off[1]) else 1.0 + weight).detach()


def _is_part(module: nn.Module, block: nn.Module) -> bool:
    """Whether it is a direct child with weights, which dropout is not."""
    own = any(child is module for child in block.children())
    return own and next(module.parameters(), None) is not None
