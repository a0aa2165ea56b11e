"""Pairs under watch: their probes, and equal ones side by side.

Layers of one shape become one stack, so that a step is a chain of batched products whose length
does not grow with the depth of the model.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from fenchel.optim.score.line import Heads, Sample, sample
from fenchel.optim.score.pairs import Pair
from fenchel.optim.score.probe import Probe, Seen
from fenchel.optim.score.stats import HeadStats


class Stack(NamedTuple):
    """Layers of one shape."""

    pairs: list[Pair]
    W: Heads
    """Copies of their weights."""
    at: Sample


class Watch:
    """The probes of some pairs, and the statistics of their last step."""

    def __init__(self, pairs: Iterable[Pair], tokens: int) -> None:
        self.probes = {pair: Probe(pair, tokens) for pair in pairs}
        self.stats: dict[str, HeadStats] = {}

    def stacks(self, weights: dict[Pair, Heads]) -> Iterator[Stack]:
        """The pairs whose weights are given, by shape; each sample is handed out once."""
        by_shape: dict[Any, list[tuple[Pair, Seen | None]]] = defaultdict(list)
        for pair, W in weights.items():
            seen = self.probes[pair].take()
            by_shape[_shape(pair, W, seen)].append((pair, seen))
        for members in by_shape.values():
            pairs = [pair for pair, _ in members]
            W = Heads(
                *(torch.stack(parts) for parts in zip(*(weights[p] for p in pairs), strict=True))
            )
            yield Stack(pairs, W, sample(pairs, [seen for _, seen in members], W.Q))

    def remember(self, pairs: list[Pair], stats: HeadStats) -> None:
        """Keep the statistics (L, H) of a stack, layer by layer."""
        for layer, pair in enumerate(pairs):
            self.stats[pair.name] = HeadStats(*(values[layer] for values in stats))


def read(pair: Pair) -> Heads:
    """Copies of the weights of a pair, without the axis of layers."""
    return Heads(pair.query.values(), pair.key.values())


def write(pairs: list[Pair], W: Heads) -> None:
    """Put the weights of a stack back where they belong."""
    for layer, pair in enumerate(pairs):
        pair.query.write(W.Q[layer])
        pair.key.write(W.K[layer])


def moving(pair: Pair) -> bool:
    """Whether the last backward pass reached the pair."""
    return all(p.grad is not None for p in pair.parameters)


def _shape(pair: Pair, W: Heads, seen: Seen | None) -> Any:
    kind = (pair.scale, pair.layout, pair.q_norm is None, pair.k_norm is None)
    sizes = (W.Q.shape, W.K.shape, W.Q.dtype, W.Q.device)
    if seen is None:
        return kind, sizes, None
    return kind, sizes, seen.x.shape, None if seen.turn is None else seen.turn.cos.shape
