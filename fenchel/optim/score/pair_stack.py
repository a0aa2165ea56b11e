"""Means over the processes of a run, so that all of them take the same step.

Every process probes its own part of a batch. What is measured there is averaged before anything
is decided by it; processes that hold the same weights and the same gradients then move alike.

What the score optimisers remember between steps, and how it comes back.

Per query weight: "reach", the ball's bound on every head; for ScoreDescent also the momenta of
queries and keys, head by head. All in float32 or better, whatever the weights are in.

Pairs under watch: their probes, and equal ones side by side.

Layers of one shape become one stack, so that a step is a chain of batched products whose length
does not grow with the depth of the model. Their parameters are copied whole, one stack for each
kind of parameter: queries and keys of a fused weight are views of it, and what belongs to neither
goes back with them, as it was.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel.optim.score.pairs import QueryKeyPair
from fenchel.optim.score.probe import LayerInput, PositionGrid, Probe, StackInput, sample
from fenchel.optim.score.score_line import HeadWeights
from fenchel.optim.score.step_size import HeadStats, StepRecord

STATE_NAMES = ("reach", "query_momentum", "key_momentum")


def stacked_bounds(
    state: Mapping[Any, Mapping[str, Any]], pairs: list[QueryKeyPair]
) -> Tensor | None:
    """The ball's bounds of the layers of a stack, (L, H); None when one has none yet."""
    found = [state.get(pair.query.weight, {}).get("reach") for pair in pairs]
    known = [reach for reach in found if reach is not None]
    return torch.stack(known) if len(known) == len(pairs) else None


def store_bounds(state: Any, pairs: list[QueryKeyPair], reach: Tensor | None) -> None:
    """Remember the bounds of a stack, layer by layer."""
    if reach is not None:
        for pair, of_layer in zip(pairs, reach.unbind(), strict=True):
            state[pair.query.weight]["reach"] = of_layer


def restore_dtypes(optimiser: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Put what we remember back as it was saved, on the device of its parameter."""
    indices = chain.from_iterable(group["params"] for group in saved["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimiser.param_groups)
    for index, param in zip(indices, params, strict=True):
        for name, value in saved["state"].get(index, {}).items():
            if name in STATE_NAMES:
                optimiser.state[param][name] = value.to(param.device, copy=True)


class PairStack(NamedTuple):
    """Layers of one shape."""

    pairs: list[QueryKeyPair]
    at: StackInput


class PairProbes:
    """The probes of some pairs, and what their last step did."""

    def __init__(self, pairs: Iterable[QueryKeyPair], tokens: int) -> None:
        self.probes = {pair: Probe(pair, tokens) for pair in pairs}
        # By default a compiled pass is not checked for hooks: it would run for a model that has
        # some, if it was compiled for one that had none, and the probes would see nothing.
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch.compiler.reset()
        self.moved: list[tuple[list[QueryKeyPair], StepRecord]] = []
        self.grids: dict[Any, PositionGrid] = {}

    def stacks(self) -> Iterator[PairStack]:
        """The pairs that the last backward pass reached, by shape; a sample is handed out once."""
        self.moved.clear()
        by_shape: dict[Any, list[tuple[QueryKeyPair, LayerInput | None]]] = defaultdict(list)
        for pair, probe in self.probes.items():
            if has_gradients(pair):
                seen = probe.take()
                by_shape[_stack_key(pair, seen)].append((pair, seen))
        for members in by_shape.values():
            pairs = [pair for pair, _ in members]
            yield PairStack(pairs, sample(pairs, [seen for _, seen in members], self.grids))

    def record_step(self, pairs: list[QueryKeyPair], moved: StepRecord) -> None:
        """Keep what a step did to a stack until somebody asks."""
        moved.line.release()
        self.moved.append((pairs, moved))

    def stats(self) -> dict[str, HeadStats]:
        """Of the last step, by the layer's name."""
        found: dict[str, HeadStats] = {}
        for pairs, moved in self.moved:
            numbers = moved.stats(heads(pairs, stack_parameters(pairs)))
            for layer, pair in enumerate(pairs):
                found[pair.name] = HeadStats(*(values[layer] for values in numbers))
        return {pair.name: found[pair.name] for pair in self.probes if pair.name in found}

    def close(self) -> None:
        """Take the hooks off the model."""
        for probe in self.probes.values():
            probe.remove()


def stack_parameters(pairs: list[QueryKeyPair], *, gradient: bool = False) -> list[Tensor]:
    """Copies of the parameters, or gradients, of equal layers: (L, ...) for each of a pair's."""
    stacks = []
    for kind in zip(*(pair.parameters for pair in pairs), strict=True):
        tensors = [p.grad if gradient else p.detach() for p in kind]
        exact = torch.promote_types(kind[0].dtype, torch.float32)
        stacks.append(torch.stack(tensors).to(exact))
    return stacks


def heads(pairs: list[QueryKeyPair], stacks: list[Tensor]) -> HeadWeights:
    """Queries and keys in stacks of parameters or gradients."""
    first = pairs[0]
    Q, K = (rows.cut(*_of(first, rows.parameters, stacks)) for rows in (first.query, first.key))
    return HeadWeights(Q, K)


def write(pairs: list[QueryKeyPair], stacks: list[Tensor], W: HeadWeights) -> None:
    """Put queries and keys into the stacks of parameters, and these back where they belong."""
    first = pairs[0]
    for rows, values in zip((first.query, first.key), W, strict=True):
        rows.put(values, *_of(first, rows.parameters, stacks))
    for kind, stack in zip(zip(*(p.parameters for p in pairs), strict=True), stacks, strict=True):
        torch._foreach_copy_(list(kind), list(stack.unbind()))


def has_gradients(pair: QueryKeyPair) -> bool:
    """Whether the last backward pass reached the pair."""
    return all(p.grad is not None for p in pair.parameters)


def _of(
    pair: QueryKeyPair, parameters: tuple[Tensor, ...], stacks: list[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """The stacks of a weight and its bias."""
    places = [next(n for n, p in enumerate(pair.parameters) if p is mine) for mine in parameters]
    return stacks[places[0]], stacks[places[1]] if len(places) > 1 else None


def _stack_key(pair: QueryKeyPair, seen: LayerInput | None) -> Any:
    rows = [
        (r.start, r.stop, r.heads, r.columns, r.bias is None, r.weight is pair.query.weight)
        for r in (pair.query, pair.key)
    ]
    kind = (pair.scale, pair.layout, pair.q_norm is None, pair.k_norm is None)
    sizes = tuple((p.shape, p.dtype, p.device) for p in pair.parameters)
    if seen is None:
        return *rows, kind, sizes, None
    turn = None if seen.angles is None else seen.angles.cos.shape
    return *rows, kind, sizes, seen.x.shape, turn, seen.mask is None
