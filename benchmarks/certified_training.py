"""What do limits on the weights cost in loss, and what do they certify?

    equal         a run with train.spectral_cap, and a run without it that is as long as it takes to
                  have the same validation loss: certified / attacked radius of the next token
    characters    next-character accuracy of 2M parameters with train.lipschitz=2, and without

Texts are sotu and kjv, every tenth document for validation; losses are of 256 windows of it.

    python -m benchmarks certified_training [--part equal|characters] [--steps N] [--seeds N]
"""

import statistics
import time
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from benchmarks.harness import record
from fenchel.data import Batches, open_text, train_tokenizer
from fenchel.inspection import certify_constant, certify_decision
from fenchel.model import Transformer
from fenchel.model.bigram import start_from_bigrams
from fenchel.optim import build_optimiser, build_schedule
from fenchel.pipeline import RunConfig, settings
from fenchel.pipeline.lipschitz import projection
from fenchel.train.step import Stepper

SMALL = {"width": 64, "context": 64, "layers": 3}
CAP, NEAR = 1.0, 0.02
"""The cap, and how far the losses of a pair may differ."""
WORDS, POSITIONS = 10, range(2, 10)


class Corpus(NamedTuple):
    """Ids of a text."""

    vocabulary: int
    train: np.ndarray
    validation: np.ndarray
    other: np.ndarray
    """The beginning of another text in the same tokens."""


class Trained(NamedTuple):
    """A model and what it scores on validation text."""

    model: Transformer
    loss: float
    accuracy: float
    seconds: float


def main(options: list[str] | None = None) -> None:
    given = dict(zip((options or [])[::2], (options or [])[1::2], strict=True))
    part, seeds = given.get("--part", "equal"), int(given.get("--seeds", 3))
    parts = {"equal": equal_loss, "characters": characters}
    rows = []
    for row in parts[part](int(given.get("--steps", 300)), seeds):
        rows.append(row)
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        record(f"certified_training_{part}", rows, ["numpy"])


@cache
def corpus(name: str, other: str, vocabulary: int, kind: str) -> Corpus:
    """A text, and the beginning of another, in tokens trained on the first."""
    texts = [document.text for document in open_text(name).documents()]
    train = [text for n, text in enumerate(texts) if n % 10 != 9]
    tokenizer = train_tokenizer(train, vocabulary, kind)

    def ids(texts: list[str]) -> np.ndarray:
        return np.concatenate([np.asarray(tokenizer.encode(text)) for text in texts])

    begins = next(iter(open_text(other).documents())).text[:400]
    return Corpus(tokenizer.vocabulary_size, ids(train), ids(texts[9::10]), ids([begins]))


def trained(config: RunConfig, text: Corpus) -> Trained:
    """A run of ``config.train.steps`` steps."""
    generator = torch.Generator().manual_seed(config.seed)
    model = Transformer(config.model, generator=generator)
    start_from_bigrams(model, text.train[: 2**20], generator)
    steps, started = config.train.steps or 0, time.process_time()
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
    loss = float(cross_entropy(logits.flatten(0, 1), batch.targets.flatten()))
    accuracy = float((logits.argmax(-1) == batch.targets).float().mean())
    return Trained(model, loss, accuracy, time.process_time() - started)


def equal_loss(steps: int, seeds: int) -> Iterator[dict[str, Any]]:
    text = corpus("sotu", "kjv", 512, "bpe")
    for seed in range(seeds):

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


def characters(steps: int, seeds: int) -> Iterator[dict[str, Any]]:
    text = corpus("kjv", "sotu", 512, "characters")
    for seed in range(seeds):
        for limit in (2.0, None):
            sections: Mapping[str, Any] = {
                "seed": seed,
                "text": {"vocabulary": text.vocabulary},
                "model": {"width": 256, "context": 128, "layers": 3, "heads": 4},
                "train": {"steps": steps, "batch": 16, "precision": "float32"}
                | ({} if limit is None else {"lipschitz": limit}),
            }
            one = trained(settings(sections), text)
            begins = torch.from_numpy(text.validation[:16].astype(np.int64))
            known = limit is not None
            yield {
                "seed": seed,
                "lipschitz": limit,
                "certified": certify_constant(one.model, begins).certified if known else None,
                "parameters": sum(p.numel() for p in one.model.parameters()),
                "steps": steps,
                "loss": one.loss,
                "accuracy": one.accuracy,
                "cpu_seconds": one.seconds,
            }
