"""Recorded steps that are kept from one call to the next, one a model.

Recording takes as long as a dozen of the tokens it is made for. A step is good as long as it finds
what it was recorded with: the same weights in the same memory (their values may change), the same
number of sequences and of slots. It is handed to one reader at a time, who brings it back; somebody
who decodes meanwhile records another. It lives as long as its model and holds a cache of its own.
"""

from typing import NamedTuple
from weakref import WeakKeyDictionary

from fenchel.generate.fixed import FixedStep
from fenchel.model import ModelConfig, Transformer


class Fit(NamedTuple):
    """What a recorded step depends on."""

    config: ModelConfig
    batch: int
    positions: int
    weights: tuple[int, ...]
    """Where every parameter lies."""


_kept: WeakKeyDictionary[Transformer, tuple[Fit, FixedStep]] = WeakKeyDictionary()


def fit(model: Transformer, *, batch: int, positions: int) -> Fit:
    """What a step for this call has to fit."""
    return Fit(model.config, batch, positions, tuple(p.data_ptr() for p in model.parameters()))


def take(model: Transformer, wanted: Fit) -> FixedStep | None:
    """The step that was brought back last, if it fits; it is then nobody else's."""
    found = _kept.pop(model, None)
    return found[1] if found is not None and found[0] == wanted else None


def bring_back(model: Transformer, made_for: Fit, step: FixedStep) -> None:
    """Keep a step for the next call; it must not hold the model, or neither would ever go."""
    assert step.model is None
    _kept[model] = made_for, step
