"""Notes taken while a model runs: every block that attends, what it was given and what it used.

A block is the outermost member of an ``nn.ModuleList`` inside which attention is called once. That
holds of our own Transformer and of the decoders and encoders of ``transformers``, so one recorder
serves all of them; the attention itself reports through ``attended``. A block is kept as a
function of the stream: the same module with the same other arguments.

Inside a block, a module whose class calls itself a norm and that takes the stream is a norm layer;
the direct child in which attention was called is the attending branch, and a direct child that
maps the stream to a stream by weights, without attending or normalising is the MLP.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from fenchel.attention import AttentionCall
from fenchel.inspection.linearisation import tangent_activations
from fenchel.inspection.trace import BlockTrace, Branch, Map, NormInput


@dataclass
class _OpenBlock:
    """A block that has begun and not ended."""

    module: nn.Module
    given: "CallArguments"
    calls: list[AttentionCall] = field(default_factory=list)
    norms: list[NormInput] = field(default_factory=list)
    attention_branch: Branch | None = None
    mlp_branch: Branch | None = None


@dataclass(frozen=True)
class CallArguments:
    """The arguments of a call, of which one is the stream."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def stream(self) -> Tensor | None:
        """The stream among them: the first argument, or the one called hidden_states."""
        first = self.args[0] if self.args else self.kwargs.get("hidden_states")
        return first if isinstance(first, Tensor) and first.is_floating_point() else None

    def call(self, module: Callable[..., Any], x: Tensor) -> Tensor:
        """``module`` on another stream, everything else as it was."""
        args, kwargs = self.swapped(x)
        return first_of(module(*args, **kwargs))

    def swapped(self, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments with another stream among them."""
        if self.args:
            return (x, *self.args[1:]), self.kwargs
        return (), {**self.kwargs, "hidden_states": x}


class Recorder:
    """Hooks on a model for as long as the ``with`` block lasts."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.traces: list[BlockTrace] = []
        self.modules: list[nn.Module] = []
        """The module behind each trace; a shared module appears several times."""
        self._open: _OpenBlock | None = None
        self._handles: list[Any] = []
        self._names = {id(module): name for name, module in model.named_modules()}
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        self._members = {id(child) for members in lists for child in members}

    def __enter__(self) -> "Recorder":
        for module in self.model.modules():
            self._handles += [
                module.register_forward_pre_hook(self._enter, with_kwargs=True),
                module.register_forward_hook(self._leave, with_kwargs=True),
            ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._open = [], None

    def attended(self, call: AttentionCall) -> None:
        """Attention was called, here and now."""
        if self._open is None:
            raise ValueError(
                "attention was called outside of any block, so this model cannot be taken apart; "
                "only stacks of equal blocks can be inspected."
            )
        self._open.calls.append(
            AttentionCall(call.q.detach(), call.k.detach(), call.v.detach(), call.spec)
        )

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._open is None and id(module) in self._members:
            self._open = _OpenBlock(module, CallArguments(args, kwargs))

    def _leave(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        block = self._open
        if block is None:
            return
        if module is block.module:
            self._open = None
            if block.calls:
                self.modules.append(module)
                self.traces.append(self._trace(block, first_of(out)))
            return
        given = CallArguments(args, kwargs)
        x, stream = given.stream, block.given.stream
        if x is None or stream is None or x.shape != stream.shape:
            return
        y = out[0] if isinstance(out, tuple) else out
        if is_norm(module) and isinstance(y, Tensor):
            block.norms.append(self._norm(module, x, y))
        elif isinstance(y, Tensor) and y.shape == x.shape and _is_part(module, block.module):
            branch = Branch(tangent_activations(module, _function(module, given)), x.detach())
            if block.calls and block.attention_branch is None:
                block.attention_branch = branch
            else:
                block.mlp_branch = branch

    def _trace(self, block: _OpenBlock, after: Tensor) -> BlockTrace:
        if len(block.calls) != 1:
            raise ValueError(
                f"a block of this model calls attention {len(block.calls)} times; only blocks "
                "with one attention can be inspected (decoders or encoders, not both in one)."
            )
        before = block.given.stream
        assert before is not None
        f = _function(block.module, block.given)
        return BlockTrace(
            before.detach(),
            after.detach(),
            f,
            tangent_activations(block.module, f),
            block.calls[0],
            tuple(block.norms),
            block.attention_branch,
            block.mlp_branch,
        )

    def _norm(self, module: nn.Module, x: Tensor, y: Tensor) -> NormInput:
        found = [getattr(module, name, None) for name in ("eps", "variance_epsilon", "epsilon")]
        epsilon = next((one for one in found if isinstance(one, float)), 0.0)
        kind = "layer" if isinstance(module, nn.LayerNorm) else "rms"
        name = self._names[id(module)].rpartition(".")[2]
        return NormInput(name, x.detach(), _gain(module, x, y, kind), epsilon, kind)


def is_norm(module: nn.Module) -> bool:
    """Whether the module's class calls itself a norm."""
    return "norm" in type(module).__name__.lower()


def first_of(out: Any) -> Tensor:
    """The stream among the outputs of a module: itself, or the first of a tuple."""
    first = out[0] if isinstance(out, tuple) else out
    assert isinstance(first, Tensor), type(out)
    return first


def _gain(module: nn.Module, x: Tensor, y: Tensor, kind: str) -> Tensor | None:
    """What a norm layer multiplies by: its weight, or 1 + weight where that is what gave y.

    Models differ in it (Gemma's is the second) and not in their names, so the output decides.
    """
    weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
    if not isinstance(weight, Tensor):
        return None
    x = x.detach() - x.mean(-1, keepdim=True) if kind == "layer" else x.detach()
    size = x / x.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30)
    there = y.detach() - bias if isinstance(bias, Tensor) else y.detach()
    off = [(size * gain - there).square().sum() for gain in (weight, 1.0 + weight)]
    return (weight if bool(off[0] <= off[1]) else 1.0 + weight).detach()


def _function(module: nn.Module, given: CallArguments) -> Map:
    def f(x: Tensor) -> Tensor:
        return given.call(module, x)

    return f


def _is_part(module: nn.Module, block: nn.Module) -> bool:
    """Whether it is a direct child with weights: dropout maps the stream too, and does nothing."""
    own = any(child is module for child in block.children())
    return own and next(module.parameters(), None) is not None
