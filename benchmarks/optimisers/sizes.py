"""What is trained on what: a small model for a CPU, one of 25M parameters for a GPU, on bytes.

The text is that of the package: messages of presidents to train on, the King James Bible as the
other text of the fine-tuning study. Its bytes are the tokens, so no tokenizer stands between two
rules, and losses are in nats a byte. The last 2 % of a text are its validation.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from fenchel.data import Ids, open_text
from fenchel.model import ModelConfig

VALIDATION = 0.02


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, how long it is trained, and how much of the study is done at this size."""

    model: ModelConfig
    batch: int
    steps: int
    seeds: tuple[int, ...]
    """Fresh seeds of the tuned study; tuning itself uses seed 0."""
    precision: str = "float32"
    copy_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    copy_steps: int = 300
    most: int = 7
    """Rates a rule may try while it is tuned."""
    validation: int = 2**16
    """Validation bytes that are read."""
    bytes: int | None = None
    """Bytes of a text that are used; None is all."""


SIZES = {
    "quick": Size(
        model=ModelConfig(vocabulary=256, context=16, width=16, layers=2, heads=2),
        batch=2,
        steps=2,
        seeds=(1,),
        copy_seeds=(0,),
        copy_steps=2,
        most=1,
        validation=256,
        bytes=20_000,
    ),
    "cpu": Size(
        model=ModelConfig(vocabulary=256, context=64, width=64, layers=3, heads=4),
        batch=16,
        steps=160,
        seeds=(1, 2),
        most=4,
    ),
    "cuda": Size(
        model=ModelConfig(vocabulary=256, context=1024, width=512, layers=8, heads=8),
        batch=64,
        steps=920,
        seeds=(1, 2, 3, 4),
        precision="bfloat16",
        copy_steps=1500,
        validation=2**20,
    ),
}


@cache
def text(source: str, limit: int | None) -> tuple[Ids, Ids]:
    """Bytes to train on and bytes to validate on, out of the first ``limit``."""
    whole = "\n".join(document.text for document in open_text(source).documents()).encode()
    ids = np.frombuffer(whole, dtype=np.uint8)[:limit]
    cut = int(len(ids) * (1.0 - VALIDATION))
    return ids[:cut], ids[cut:]
