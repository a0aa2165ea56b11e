"""Models and texts of the studies: a small model for a CPU, one of 25M parameters for a GPU.

    quick   two steps per run, a check that everything works
    cpu     the small model, about a quarter of an hour on two cores
    full    the same, trained twice as long, more rates and five seeds: some hours on one core
    cuda    25M parameters, 8 layers of width 512 at context 512, 6.6M bytes per run: less than
            one epoch, since a model of this size memorises the text within a few

The texts are those of the package: messages of presidents to train on, the King James Bible to
fine-tune on. Bytes are the tokens, so that no tokenizer affects a comparison, and losses are in
nats per byte. The last 2 % of a text are for validation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from fenchel.data import Ids, open_text
from fenchel.model import ModelConfig

VALIDATION = 0.02


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, its training, and the extent of the studies at this size."""

    model: ModelConfig
    batch: int
    steps: int
    seeds: tuple[int, ...]
    """Fresh seeds of the tuned study; tuning itself uses seed 0."""
    device: str = "cpu"
    precision: str = "float32"
    scale: float = 1.0
    """Factor on the initial rates of the search (rules.py)."""
    copy_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    copy_steps: int = 300
    max_rates: int = 7
    """The most learning rates tried per rule."""
    grid: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Values tried for each other field of a ``Job`` that a rule tunes."""
    validation: int = 2**16
    """Bytes of validation text."""
    bytes: int | None = None
    """Bytes used of each text; None uses all."""


GRID = {
    "decay": (0.0, 0.1, 0.3, 1.0),
    "radius": (2.5, 4.0, 6.0, 12.0),
    "damping": (0.01, 0.1, 1.0, 3.0, 10.0),
    "change": (0.1, 0.2, 0.4),
    "momentum": (0.9, 0.95),
}

SMALL = ModelConfig(vocabulary=256, context=64, width=64, layers=3, heads=4)

SIZES = {
    "quick": Size(
        model=ModelConfig(vocabulary=256, context=16, width=16, layers=2, heads=2),
        batch=2,
        steps=2,
        seeds=(1,),
        copy_seeds=(0,),
        copy_steps=2,
        max_rates=1,
        validation=256,
        bytes=20_000,
    ),
    "cpu": Size(
        model=SMALL,
        batch=16,
        steps=160,
        seeds=(1, 2),
        max_rates=4,
        grid={**GRID, "decay": (0.1, 0.3, 1.0)},
        copy_seeds=(0, 1, 2),
    ),
    "full": Size(model=SMALL, batch=16, steps=300, seeds=(1, 2, 3, 4, 5), grid=GRID),
    "cuda": Size(
        model=ModelConfig(vocabulary=256, context=512, width=512, layers=8, heads=8),
        batch=32,
        steps=400,
        seeds=(1, 2, 3),
        device="cuda",
        precision="bfloat16",
        scale=2 / 9,
        max_rates=5,
        grid={**GRID, "decay": (0.1, 0.3)},
        copy_steps=600,
        validation=2**18,
    ),
}


@cache
def text(source: str, limit: int | None) -> tuple[Ids, Ids]:
    """Training bytes and validation bytes among the first ``limit`` of a text."""
    whole = "\n".join(document.text for document in open_text(source).documents()).encode()
    ids = np.frombuffer(whole, dtype=np.uint8)[:limit]
    cut = int(len(ids) * (1.0 - VALIDATION))
    return ids[:cut], ids[cut:]
