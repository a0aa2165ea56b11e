"""What `fenchel inspect` measures in models that are known to be healthy: the scale of its page.

Runs of the default settings, and the same models before their first step. Each reads the first 128
tokens of the built-in text. A range is from the least to the greatest value over all heads, blocks
or models; fenchel/report/inspection_scale.py shows both ranges beside the numbers of a checkpoint.

    python -m benchmarks inspection_scale                    trains two runs, two minutes each
    python -m benchmarks inspection_scale --runs RUN RUN     runs that exist
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import record
from fenchel import pipeline
from fenchel.checkpoints import load
from fenchel.checkpoints.hf_export import save
from fenchel.inspection import inspect, open_model
from fenchel.pipeline.preparation import build_model, start_weights
from fenchel.report.inspection_scale import SCALES
from fenchel.train import RunDir

SEEDS, TOKENS = (0, 1), 128


class Silent:
    """A callback that shows nothing."""

    def step(self, step: int, steps: int) -> None: ...

    def log(self, metrics: Mapping[str, Any]) -> None: ...

    def message(self, text: str) -> None: ...

    def progress(self, what: str, done: int, total: int) -> None: ...


def values(directory: Path) -> dict[str, list[float]]:
    """Every measure of the scale on one model."""
    result = inspect(open_model(directory), "sotu", max_tokens=TOKENS)
    return {scale.name: [value for _, value in scale.of(result)] for scale in SCALES}


def fresh(run: Path, folder: Path) -> Path:
    """The model of a run before its first step, as a directory of its own."""
    _, tokenizer, _ = load(run)
    config = pipeline.settings(RunDir(run).read_settings())
    model = build_model(config)
    start_weights(config, model, pipeline.open_corpus(run).train, torch.device("cpu"))
    save(model, tokenizer, folder / run.name)
    return folder / run.name


def train(folder: Path) -> list[Path]:
    """Runs of the default settings."""
    runs = [folder / f"seed_{seed}" for seed in SEEDS]
    for seed, run in zip(SEEDS, runs, strict=True):
        pipeline.begin(pipeline.settings({"seed": seed}), run, Silent())
    return runs


def main(options: Sequence[str] = ()) -> None:
    """Inspect the runs, print and record the ranges."""
    with tempfile.TemporaryDirectory() as temporary:
        runs = [Path(word) for word in options[1:]] or train(Path(temporary) / "runs")
        collected: dict[str, dict[str, list[float]]] = {"fresh": {}, "trained": {}}
        for n, run in enumerate(runs):
            before = fresh(run, Path(temporary) / str(n))
            for state, directory in (("fresh", before), ("trained", run)):
                for name, found in values(directory).items():
                    collected[state].setdefault(name, []).extend(found)
        steps = [json.loads((run / "summary.json").read_text())["step"] for run in runs]
    rows = []
    for scale in SCALES:
        row: dict[str, Any] = {"measure": scale.name, "steps": steps, "tokens": TOKENS}
        row |= {state: ends(found[scale.name]) for state, found in collected.items()}
        rows.append(row)
        print(row)
    print(record("inspection_scale_cpu", rows))


def ends(found: Sequence[float]) -> list[float]:
    """The least and the greatest value, to three digits."""
    return [float(f"{value:.3g}") for value in (min(found), max(found))]


if __name__ == "__main__":
    main(sys.argv[1:])
