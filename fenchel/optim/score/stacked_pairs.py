"""Query-key pairs of equal shape, stacked for batched products; their probes and saved state.

Layers of one shape become one stack, so that a step is a chain of batched products whose length
does not grow with the depth of the model. Parameters are copied whole, one stacked tensor per kind
of parameter: queries and keys of a fused weight are views of it, and the rows of the values are
written back unchanged.

State per query weight: "score_bound", the bound of the score ball on every head, and for
ScoreDescent the momenta of queries and keys, per head, and, with one weight of a stack, "step", the
steps taken. All of it is float32 or better, whatever the dtype of the weights.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel.attention import Angles
from fenchel.optim.score.pairs import QueryKeyPair
from fenchel.optim.score.probe import (
    LayerInput,
    LayerReader,
    PositionGrid,
    Probe,
    StackInput,
    stack_inputs,
)
from fenchel.optim.score.score_change import HeadWeights, NormGains
from fenchel.optim.score.step_size import HeadStats, StepRecord
from fenchel.torch_internals import foreach_copy_, guard_on_hooks

STATE_NAMES = ("score_bound", "query_momentum", "key_momentum")


def stacked_bounds(
    state: Mapping[Any, Mapping[str, Any]], pairs: list[QueryKeyPair]
) -> Tensor | None:
    """The score bounds of the layers of a stack, (L, H); None when a layer has none yet."""
    stored = [state.get(pair.query.weight, {}).get("score_bound") for pair in pairs]
    bounds = [bound for bound in stored if bound is not None]
    return torch.stack(bounds) if len(bounds) == len(pairs) else None


def store_bounds(state: Any, pairs: list[QueryKeyPair], bounds: Tensor | None) -> None:
    """Write the score bounds of a stack into the state, layer by layer, where it has them."""
    if bounds is None:
        return
    states = [state[pair.query.weight] for pair in pairs]
    if all("score_bound" in values for values in states):
        foreach_copy_([values["score_bound"] for values in states], list(bounds.unbind()))
        return
    for values, bound in zip(states, bounds.unbind(), strict=True):
        values["score_bound"] = bound


def state_tensors(state: Mapping[Any, Mapping[str, Any]], pair: QueryKeyPair) -> Iterator[Tensor]:
    """Our state of a pair in device memory."""
    for weight in dict.fromkeys((pair.query.weight, pair.key.weight)):
        values = state.get(weight, {})
        yield from (values[name] for name in STATE_NAMES if values.get(name) is not None)


def state_shapes(pairs: Iterable[QueryKeyPair]) -> dict[tuple[Tensor, str], tuple[int, ...]]:
    """The shapes of our state, per head, by parameter and name."""
    shapes: dict[tuple[Tensor, str], tuple[int, ...]] = {}
    for pair in pairs:
        shapes[pair.query.weight, "score_bound"] = (pair.query.heads,)
        shapes[pair.query.weight, "query_momentum"] = pair.query.values().shape
        shapes[pair.key.weight, "key_momentum"] = pair.key.values().shape
    return shapes


def restore_dtypes(optimiser: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore our state in its saved dtype, on the device of its parameter."""
    indices = chain.from_iterable(group["params"] for group in saved["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimiser.param_groups)
    for index, param in zip(indices, params, strict=True):
        for name, value in saved["state"].get(index, {}).items():
            if name in STATE_NAMES:
                optimiser.state[param][name] = value.to(param.device, copy=True)


class PairStack(NamedTuple):
    """Pairs of one shape, and the sampled inputs of their layers."""

    pairs: list[QueryKeyPair]
    inputs: StackInput


class PairProbes:
    """The probes of a group of pairs, and the records of their last step."""

    def __init__(self, pairs: Iterable[QueryKeyPair], tokens: int) -> None:
        pairs = list(pairs)
        _require_own_parameters(pairs)
        self.probes: dict[QueryKeyPair, LayerReader] = {pair: Probe(pair, tokens) for pair in pairs}
        # By default torch.compile does not guard on hooks: a graph compiled for a model without
        # hooks would run for one with hooks, and the probes would receive nothing.
        guard_on_hooks()
        self.records: list[tuple[list[QueryKeyPair], StepRecord]] = []
        self.grids: dict[Any, PositionGrid] = {}

    def stacks(self, selected: Callable[[QueryKeyPair], bool] | None = None) -> Iterator[PairStack]:
        """The pairs that have gradients, or are selected, by shape; each sample comes once."""
        self.records.clear()
        for pairs, samples in self.samples(selected):
            yield PairStack(pairs, stack_inputs(pairs, samples, self.grids))

    def samples(
        self, selected: Callable[[QueryKeyPair], bool] | None = None
    ) -> Iterator[tuple[list[QueryKeyPair], list[LayerInput | None]]]:
        """The same before their samples are stacked."""
        selected = selected or has_gradients
        by_shape: dict[Any, list[tuple[QueryKeyPair, LayerInput | None]]] = defaultdict(list)
        for pair, probe in self.probes.items():
            if selected(pair):
                sample = probe.take()
                by_shape[_stack_key(pair, sample)].append((pair, sample))
        for members in by_shape.values():
            yield [pair for pair, _ in members], [sample for _, sample in members]

    def record_step(self, pairs: list[QueryKeyPair], record: StepRecord) -> None:
        """Keep the record of a step for ``stats``."""
        record.line.release()
        self.records.append((pairs, record))

    def stats(self) -> dict[str, HeadStats]:
        """Statistics of the last step, by the name of the layer."""
        by_name: dict[str, HeadStats] = {}
        for pairs, record in self.records:
            numbers = record.stats(head_weights(pairs, stack_parameters(pairs)))
            for layer, pair in enumerate(pairs):
                by_name[pair.name] = HeadStats(*(values[layer] for values in numbers))
        return {pair.name: by_name[pair.name] for pair in self.probes if pair.name in by_name}

    def close(self) -> None:
        """Remove the hooks from the model."""
        for probe in self.probes.values():
            probe.remove()


class InputPlaces(NamedTuple):
    """The indices of a ``LayerInput`` among the inputs of a step."""

    x: int
    cos: int | None
    sin: int | None
    mask: int | None

    def of(self, inputs: Sequence[Tensor]) -> LayerInput:
        """The sample."""
        x, cos, sin, mask = (None if n is None else inputs[n] for n in self)
        assert x is not None
        return LayerInput(x, None if cos is None or sin is None else Angles(cos, sin), mask)


class StepInputs:
    """The tensors that a step reads, each once: all layers may share a table of angles."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._places: dict[Any, int] = {}

    def add(self, x: Tensor) -> int:
        """The index of a tensor, which is added where it is new."""
        where = (x.data_ptr(), x.shape, x.stride(), x.dtype) if x.device.type != "meta" else id(x)
        place = self._places.setdefault(where, len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(x)
        return place

    def add_samples(self, samples: Iterable[LayerInput | None]) -> list[InputPlaces | None]:
        """The indices of the tensors of samples."""
        return [sample and self._add_sample(sample) for sample in samples]

    def _add_sample(self, sample: LayerInput) -> InputPlaces:
        cos, sin = (None, None) if sample.angles is None else map(self.add, sample.angles)
        mask = None if sample.mask is None else self.add(sample.mask)
        return InputPlaces(self.add(sample.x), cos, sin, mask)


def stack_parameters(
    pairs: list[QueryKeyPair], of: Callable[[Tensor], Tensor] = Tensor.detach
) -> list[Tensor]:
    """Copies of the parameters, or of what belongs to them, of equal layers: (L, ...) per kind."""
    stacks = []
    for kind in zip(*(pair.parameters for pair in pairs), strict=True):
        tensors = [of(p) for p in kind]
        exact = torch.promote_types(kind[0].dtype, torch.float32)
        stacks.append(torch.stack(tensors).to(exact))
    return stacks


def head_weights(pairs: list[QueryKeyPair], stacks: list[Tensor]) -> HeadWeights:
    """Queries and keys in stacks of parameters or gradients."""
    first = pairs[0]
    Q, K = (
        rows.select(*_stacks_of(first, rows.parameters, stacks))
        for rows in (first.query, first.key)
    )
    return HeadWeights(Q, K)


def write_weights(pairs: list[QueryKeyPair], stacks: list[Tensor], W: HeadWeights) -> None:
    """Write queries and keys into the stacks of parameters, and the stacks into the model."""
    first = pairs[0]
    for rows, values in zip((first.query, first.key), W, strict=True):
        rows.assign(values, *_stacks_of(first, rows.parameters, stacks))
    for kind, stack in zip(zip(*(p.parameters for p in pairs), strict=True), stacks, strict=True):
        foreach_copy_(list(kind), list(stack.unbind()))


def copy_gains(pairs: list[QueryKeyPair]) -> list[dict[str, Tensor]]:
    """The parameters of the norms of queries and keys, layer by layer; empty where none moves."""
    if all(p.grad is None for pair in pairs for p in pair.gains.values()):
        return []
    return [
        {
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for name, p in pair.gains.items()
        }
        for pair in pairs
    ]


@torch.no_grad()
def write_gains(pairs: list[QueryKeyPair], gains: NormGains, share: Tensor) -> None:
    """Set the norms to a share (L,) of their move; where it is 1 they keep their bits."""
    for layer, pair in enumerate(pairs):
        for name, p in pair.gains.items():
            at = torch.addcmul(gains.start[layer][name], share[layer], gains.move[layer][name])
            p.copy_(torch.where(share[layer] == 1.0, p, at.to(p.dtype)))


@torch.no_grad()
def scale_gains(pairs: list[QueryKeyPair], factor: Tensor) -> None:
    """Scale the norms so that the scores of each layer are ``factor`` (L,) times as large."""
    alike: dict[Any, list[tuple[int, Tensor]]] = defaultdict(list)
    for layer, pair in enumerate(pairs):
        for which, offset in pair.gain_offsets.items():
            for name, p in getattr(pair, which).named_parameters():
                plus = offset if name == "weight" else 0.0
                alike[len(pair.gain_offsets), plus, which, name].append((layer, p))
    for (norms, plus, *_), members in alike.items():
        parameters = [p for _, p in members]
        a = factor if len(members) == len(factor) else factor[[layer for layer, _ in members]]
        a = (a.sqrt() if norms == 2 else a).unsqueeze(1)
        # a factor of 1 leaves the bits of any parameter as they are
        scaled = torch.stack(parameters) * a + plus * (a - 1.0)
        foreach_copy_(parameters, list(scaled.to(parameters[0].dtype).unbind()))


def gradients_of(pairs: Iterable[QueryKeyPair]) -> Iterator[tuple[Tensor, Tensor]]:
    """The parameters of pairs that have gradients, and these."""
    for p in (p for pair in pairs for p in pair.parameters):
        if p.grad is not None:
            yield p, p.grad


def has_gradients(pair: QueryKeyPair) -> bool:
    """Whether the last backward pass reached every weight of the pair."""
    return all(p.grad is not None for p in pair.parameters)


def moves(pair: QueryKeyPair) -> bool:
    """Whether an optimiser may move a weight of the pair or a gain of its norms."""
    return any(p.grad is not None for p in (*pair.parameters, *pair.gains.values()))


def _require_own_parameters(pairs: list[QueryKeyPair]) -> None:
    """Raise where two pairs train one parameter: each of them would overwrite the other's step."""
    owner: dict[Tensor, QueryKeyPair] = {}
    for pair in pairs:
        for p in {*pair.parameters, *pair.gains.values()}:
            if p.requires_grad and owner.setdefault(p, pair) is not pair:
                raise ValueError(
                    f"{owner[p].name} and {pair.name} share a parameter of queries and keys; "
                    "freeze it, or give each layer its own."
                )


def _stacks_of(
    pair: QueryKeyPair, parameters: tuple[Tensor, ...], stacks: list[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """The stacks of a weight and its bias."""
    indices = [next(n for n, p in enumerate(pair.parameters) if p is own) for own in parameters]
    return stacks[indices[0]], stacks[indices[1]] if len(indices) > 1 else None


def _stack_key(pair: QueryKeyPair, sample: LayerInput | None) -> Any:
    """What layers of one stack have in common."""
    rows = [
        (r.start, r.stop, r.heads, r.columns, r.bias is None, r.weight is pair.query.weight)
        for r in (pair.query, pair.key)
    ]
    kind = (pair.scale, pair.layout, pair.q_norm is None, pair.k_norm is None)
    sizes = tuple((p.shape, p.dtype, p.device) for p in pair.parameters)
    if sample is None:
        return *rows, kind, sizes, None
    angles = None if sample.angles is None else sample.angles.cos.shape
    return *rows, kind, sizes, sample.x.shape, angles, sample.mask is None
