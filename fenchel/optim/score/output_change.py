"""The change of every layer's output in a step, as a share of that output, and its limit.

    W'  = the parameters of a layer after a step of an optimiser,    U = W' - W
    r   = RMS(U x) / RMS(W x)       over sampled tokens x of the step's own forward pass
    W  <- W + t U,                  t = min(1, tau / r)

An output y = W x is linear in W, so a share t of the step moves it by exactly t times as much: one
measurement gives the longest step along U within tau. A bias is one more column of W, multiplied by
an input of 1. The same holds for the rows of an embedding and for the gains of a norm.

Over a model the changes of layers add up to tau times the root of its depth, about, which
docs/maths/score_descent.md derives and measures, as it does |U| / |W| instead of r.

**What is measured.** ``OutputProbes`` finds the layers of a model by their structure:

    nn.Linear, Conv1D    x W^T + b. Of a weight that also has rows of queries and keys, the others;
                         those rows are limited in the scores (trust.py)
    LM head              of a model with ``lm_head_weight``, whose forward with return_hidden=True
                         returns the input of the head (fenchel.train.Trainable)
    nn.Embedding         the rows of the sampled ids. Tied to the LM head: the smaller share of both
    norms                y = g n(x) + b: y is sampled, and n(x) = (y - b) / g; an entry without a
                         gain counts as 1. The gain is the one applied: 1 + weight in some norms
    other matrices       (experts, adapters, a module that was not called) x is taken as white:
                         r = |U| / |W|. Other vectors are not limited

A zero output (fresh blocks end in zero maps) has no share of itself: an output counts as at least a
tenth of its input, and an embedding or a norm is not limited while its output is zero.

A hook copies every k-th token of the input, TOKENS in all, k odd so that positions differ between
sequences; the sample is that of the last forward pass that builds a gradient, with micro-batches of
the last one. It is dropped after the step, and there is no other state: a resumed run measures the
same numbers. With several processes the squares are averaged before a decision is based on them;
in fenchel/distributed the owner of a layer has tokens of all cells instead.

Shapes: L equal layers as one stack, n tokens, M inputs, O outputs.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fenchel.optim.score.pairs import QueryKeyPair, norm_offset, rows_outside
from fenchel.optim.score.probe import FirstPass, mean_over_processes, probe_dtype
from fenchel.torch_internals import foreach_copy_, guard_on_hooks

TOKENS = 128
"""Sampled tokens per layer."""
LEAST_GAIN = 0.1
"""The root mean square of an output counts as at least this share of its input's."""

Region = tuple[slice, ...]


class ParameterRegion(NamedTuple):
    """A parameter, or some of its rows or columns."""

    whole: Tensor
    region: Region

    def values(self) -> Tensor:
        """A view without a gradient."""
        return self.whole.detach()[self.region]


@dataclass(frozen=True, eq=False)
class MeasuredLayer:
    """A layer whose output is linear in its parameters."""

    name: str
    kind: str
    """"linear", "columns" (Conv1D), "embedding", "norm" or "white"."""
    module: nn.Module
    """A hook samples its first input; the output of a norm, and of a model with an LM head."""
    parts: dict[str, ParameterRegion]
    """"weight", and "bias" where there is one."""
    inputs: int = 0
    """M, of a norm its outputs; 0 for embeddings, and where nothing is sampled."""
    of_output: bool = False
    plus: float = 0.0
    """What a norm adds to its weight to get its gain."""

    @property
    def moves(self) -> bool:
        """Whether an optimiser may move a parameter of the layer."""
        return any(part.whole.grad is not None for part in self.parts.values())


class OutputChange(NamedTuple):
    """The effect of the last step on the output of a layer."""

    relative: Tensor
    """RMS change over RMS output, of the whole step."""
    share: Tensor
    """The share of the step that was taken."""


class OutputProbes:
    """The layers of a model and their samples; ``before`` and ``limit`` enclose a step."""

    def __init__(self, model: nn.Module, pairs: Iterable[QueryKeyPair] = ()) -> None:
        self.layers = list(_layers_of(model, list(pairs)))
        sampled = (layer for layer in self.layers if layer.kind != "white")
        self.samples = {layer: TokenSample(layer) for layer in sampled}
        self.shared = _layers_that_share(self.layers)
        self.masks: dict[tuple[MeasuredLayer, ...], list[Tensor]] = {}
        self.last: tuple[list[MeasuredLayer], Tensor, Tensor] | None = None
        guard_on_hooks()

    def before(self, layers: Iterable[MeasuredLayer] | None = None) -> "list[LayerStack]":
        """The parameters before a step, equal layers side by side; each sample comes once.

        Of the given layers, or of all.
        """
        by_shape: dict[Any, list[tuple[MeasuredLayer, Tensor | None]]] = defaultdict(list)
        for layer in self.layers if layers is None else layers:
            x = self.samples[layer].take() if layer in self.samples else None
            by_shape[_stack_key(layer, x)].append((layer, x))
        return [_stack(members) for members in by_shape.values()]

    def limit(self, stacks: "list[LayerStack]", most: float) -> None:
        """Shorten the step since ``before`` where an output moved by more than ``most`` of it."""
        layers = [layer for stack in stacks for layer in stack.layers]
        squares = mean_over_processes(torch.cat([stack.squares() for stack in stacks]))
        change, output, least = squares.unbind(-1)
        size = torch.maximum(output, least)
        relative = torch.where(size > 0.0, change / size, 0.0).sqrt()
        share = torch.where(relative > most, most / relative, 1.0)
        for together in self._masks(tuple(layers), share.device):
            share = torch.where(together, torch.where(together, share, 1.0).amin(), share)
        written: set[tuple[Tensor, str]] = set()
        shares = torch.split(share, [len(stack.layers) for stack in stacks])
        for stack, t in zip(stacks, shares, strict=True):
            stack.write(t, written)
        self.last = layers, relative, share

    def _masks(self, layers: tuple[MeasuredLayer, ...], device: torch.device) -> list[Tensor]:
        """(layers,) per group of layers that share a parameter: True for those of the group."""
        if layers not in self.masks:
            self.masks[layers] = [
                torch.tensor([layer in group for layer in layers], device=device)
                for group in self.shared
            ]
        return self.masks[layers]

    def stats(self) -> dict[str, OutputChange]:
        """The relative change of each layer's output that moved, and the share taken, by name."""
        if self.last is None:
            return {}
        layers, relative, share = self.last
        found = zip(layers, relative.unbind(), share.unbind(), strict=True)
        by_name = {layer.name: OutputChange(r, t) for layer, r, t in found}
        return {layer.name: by_name[layer.name] for layer in self.layers if layer.name in by_name}

    def close(self) -> None:
        """Remove the hooks from the model."""
        for sample in self.samples.values():
            sample.handle.remove()


class TokenSample:
    """The hook of one layer; ``take`` returns its tokens once."""

    def __init__(self, layer: MeasuredLayer, module: nn.Module | None = None) -> None:
        """``module`` replaces the layer's module where another one runs the passes."""
        weight, module = next(iter(layer.parts.values())).whole, module or layer.module
        self.width, self.tokens, self.rows = layer.inputs, TOKENS, 0
        shape, dtype = ((TOKENS,), torch.long) if not self.width else ((TOKENS, self.width), None)
        self.buffer = torch.empty(shape, dtype=dtype or probe_dtype(weight), device=weight.device)
        self.passes_seen = FirstPass()
        if layer.kind == "norm":
            self.handle = module.register_forward_hook(self._after_norm)
        elif layer.of_output:
            self.handle = module.register_forward_hook(self._after, with_kwargs=True)
        else:
            self.handle = module.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                self._store(value)
                return

    def _after(self, _module: nn.Module, _args: Any, kwargs: Any, output: Any) -> None:
        if kwargs.get("return_hidden") and isinstance(output, Tensor):
            self._store(output)

    def _after_norm(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self._store(output)

    def _store(self, x: Tensor) -> None:
        if not self.passes_seen.counts() or (self.width and x.shape[-1] != self.width):
            return
        rows = x.detach().reshape(-1, self.width) if self.width else x.detach().reshape(-1)
        n = min(len(rows), self.tokens)
        if not n:
            return
        if self.buffer.device != x.device:
            self.buffer = self.buffer.to(x.device)
        every = (len(rows) // n - 1) | 1  # odd, and 1 where that is 0
        self.buffer[:n].copy_(rows[: n * every : every])
        self.rows = n

    def take(self) -> Tensor | None:
        """(n, M), or ids (n,); the next pass overwrites its memory."""
        rows, self.rows = self.rows, 0
        return self.buffer[:rows] if rows else None


@dataclass(frozen=True, eq=False)
class LayerStack:
    """Layers of one kind and shape, their samples, and their parameters before a step."""

    layers: list[MeasuredLayer]
    inputs: list[Tensor] | None
    """(n, M) or (n,) per layer, the outputs of a norm; None for white inputs."""
    start: dict[str, Tensor]
    """(L, ...) by name."""

    def squares(self) -> Tensor:
        """(L, 3): mean squares of the change, of the output, and the least that counts as it."""
        change = {name: now - self.start[name] for name, now in _stacked_parts(self.layers).items()}
        kind = self.layers[0].kind
        if kind == "norm":
            return self._norm(change)
        if self.inputs is None:
            return self._white(change)
        if kind == "embedding":
            ids = torch.stack(self.inputs).unsqueeze(-1)
            outputs = [torch.take_along_dim(W["weight"], ids, dim=1) for W in (change, self.start)]
            moved, y = (_mean_square(rows) for rows in outputs)
            return torch.stack((moved, y, torch.zeros_like(y)), dim=-1)
        x = torch.stack(self.inputs)
        moved, y = (self._apply(W, x) for W in (change, self.start))
        least = LEAST_GAIN**2 * _mean_square(x)
        return torch.stack((_mean_square(moved), _mean_square(y), least), dim=-1)

    def _norm(self, change: Mapping[str, Tensor]) -> Tensor:
        """Of y = g n(x) + b, where x was not sampled with entries of n(x) of size 1."""
        gain = self.start["weight"] + self.layers[0].plus
        if self.inputs is None:
            moved, y = (_sum_of_squares(W) for W in (change, {**self.start, "weight": gain}))
            return torch.stack((moved, y, torch.zeros_like(y)), dim=-1)
        y, g = torch.stack(self.inputs).to(gain.dtype), gain.unsqueeze(-2)
        normed, moved = y, change["weight"].unsqueeze(-2)
        if "bias" in self.start:
            normed = y - self.start["bias"].unsqueeze(-2)
        moved = moved * torch.where(g == 0.0, 1.0, normed / torch.where(g == 0.0, 1.0, g))
        if "bias" in change:
            moved = moved + change["bias"].unsqueeze(-2)
        size = _mean_square(y)
        return torch.stack((_mean_square(moved), size, torch.zeros_like(size)), dim=-1)

    def _apply(self, W: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """x W^T + b in the dtype of the sample."""
        weight = W["weight"].to(x.dtype)
        y = x @ (weight if self.layers[0].kind == "columns" else weight.mT)
        return y + W["bias"].to(x.dtype).unsqueeze(-2) if "bias" in W else y

    def _white(self, change: Mapping[str, Tensor]) -> Tensor:
        """Of an input of independent entries of size 1."""
        kind, weight = self.layers[0].kind, self.start["weight"]
        outputs = weight.shape[-1] if kind == "columns" else weight.shape[1:-1].numel()
        moved, y = (_sum_of_squares(W) / outputs for W in (change, self.start))
        least = 0.0 if kind == "embedding" else LEAST_GAIN**2
        return torch.stack((moved, y, torch.full_like(y, least)), dim=-1)

    def write(self, t: Tensor, written: set[tuple[Tensor, str]]) -> None:
        """Set each parameter to a share t (L,) of its move; where it is 1 it keeps its bits."""
        for name, start in self.start.items():
            parts = [layer.parts[name] for layer in self.layers]
            mine = [
                n for n, part in enumerate(parts) if (part.whole, str(part.region)) not in written
            ]
            if not mine:
                continue
            written.update((parts[n].whole, str(parts[n].region)) for n in mine)
            along = t.to(start.dtype).reshape(-1, *(1 for _ in start.shape[1:]))
            moved = torch.lerp(start, _stacked(parts), along)
            targets = [part.values() for part in parts]
            foreach_copy_([targets[n] for n in mine], [moved[n] for n in mine])


def _stacked(parts: list[ParameterRegion]) -> Tensor:
    values = torch.stack([part.values() for part in parts])
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _stacked_parts(layers: list[MeasuredLayer]) -> dict[str, Tensor]:
    return {name: _stacked([layer.parts[name] for layer in layers]) for name in layers[0].parts}


def _stack(members: list[tuple[MeasuredLayer, Tensor | None]]) -> LayerStack:
    layers = [layer for layer, _ in members]
    inputs = [x for _, x in members if x is not None]
    return LayerStack(layers, inputs or None, _stacked_parts(layers))


def _stack_key(layer: MeasuredLayer, x: Tensor | None) -> Any:
    """What layers of one stack have in common."""
    sizes = tuple(
        (name, part.values().shape, part.whole.dtype, part.whole.device)
        for name, part in layer.parts.items()
    )
    return layer.kind, layer.plus, sizes, None if x is None else (x.shape, x.dtype)


def _mean_square(y: Tensor) -> Tensor:
    """(L, ...) -> (L,)."""
    exact = torch.promote_types(y.dtype, torch.float32)
    return y.flatten(1).to(exact).square().mean(1)


def _sum_of_squares(W: Mapping[str, Tensor]) -> Tensor:
    """Of all parameters of each layer: (L,)."""
    return torch.stack([values.flatten(1).square().sum(1) for values in W.values()]).sum(0)


def _layers_that_share(layers: list[MeasuredLayer]) -> list[set[MeasuredLayer]]:
    """Groups of layers that have a parameter in common, such as a tied LM head."""
    owners: dict[tuple[Tensor, str], set[MeasuredLayer]] = defaultdict(set)
    for layer in layers:
        for part in layer.parts.values():
            owners[part.whole, str(part.region)].add(layer)
    groups: list[set[MeasuredLayer]] = []
    for together in owners.values():
        if len(together) > 1:
            touching = [group for group in groups if group & together]
            groups = [group for group in groups if not group & together]
            groups.append(together.union(*touching))
    return groups


def _layers_of(model: nn.Module, pairs: list[QueryKeyPair]) -> Iterator[MeasuredLayer]:
    """The layers with trained parameters, without what ``pairs`` limit."""
    gains = {p for pair in pairs for p in pair.gains.values()}
    head = getattr(model, "lm_head_weight", None)
    for name, module in model.named_modules():
        own = {
            key: p
            for key, p in module.named_parameters(recurse=False)
            if p.requires_grad and p not in gains
        }
        if not own:
            continue
        if isinstance(module, nn.Embedding):
            yield MeasuredLayer(
                name, "embedding", module, {"weight": ParameterRegion(own["weight"], ())}
            )
        elif own.get("weight") is head is not None:
            continue  # the model multiplies by it without calling the module
        elif (kind := _linear_kind(module)) and "weight" in own:
            yield from _linear_layers(name, kind, module, own, pairs)
        elif (plus := norm_offset(module, own)) is not None:
            parts = {key: ParameterRegion(own[key], ()) for key in ("weight", "bias") if key in own}
            width = len(own["weight"])
            yield MeasuredLayer(name, "norm", module, parts, width, plus=plus)
        else:
            yield from _white_layers(name, module, own, pairs)
    if isinstance(head, Tensor) and head.requires_grad:
        parts = {"weight": ParameterRegion(head, ())}
        yield MeasuredLayer("lm_head", "linear", model, parts, head.shape[1], of_output=True)


def _linear_kind(module: nn.Module) -> str | None:
    """How a module multiplies by its weight; None where it does something else."""
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return "linear"
    return "columns" if type(module).__name__ == "Conv1D" else None  # of GPT-2


def _linear_layers(
    name: str, kind: str, module: nn.Module, own: dict[str, Tensor], pairs: list[QueryKeyPair]
) -> Iterator[MeasuredLayer]:
    """A layer, or one per range of its outputs that are neither queries nor keys."""
    weight = own["weight"]
    size = weight.shape[kind == "columns"]
    for start, stop in rows_outside(pairs, weight, size):
        at: Region = () if stop - start == size else (slice(start, stop),)
        parts = {
            "weight": ParameterRegion(
                weight, (slice(None), *at) if at and kind == "columns" else at
            )
        }
        if "bias" in own:
            parts["bias"] = ParameterRegion(own["bias"], at)
        yield MeasuredLayer(name, kind, module, parts, weight.shape[kind != "columns"])


def _white_layers(
    name: str, module: nn.Module, own: dict[str, Tensor], pairs: list[QueryKeyPair]
) -> Iterator[MeasuredLayer]:
    for key, p in own.items():
        if p.ndim > 1:
            for start, stop in rows_outside(pairs, p, len(p)):
                at: Region = () if stop - start == len(p) else (slice(start, stop),)
                part = {"weight": ParameterRegion(p, at)}
                yield MeasuredLayer(f"{name}.{key}".lstrip("."), "white", module, part)
