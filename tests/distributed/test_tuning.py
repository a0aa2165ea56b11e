"""``fenchel tune`` with several processes: packed documents in cells, adapters beside weights."""

import json
import random
import signal
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from fenchel.data import Corpus
from fenchel.files import read_sealed_json
from fenchel.train import RunDir

from .test_checkpoint import beginning, stop, story

WORDS = "the people of these States have peace and trade with every nation".split()


@pytest.fixture(scope="module")
def checkpoint(launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run of one process."""
    folder, draw = tmp_path_factory.mktemp("checkpoint"), random.Random(0)
    text = folder / "text.txt"
    text.write_text("\n".join(" ".join(draw.choices(WORDS, k=9)) for _ in range(40)))
    words = beginning(folder / "run", text, train__steps=2, model__context=32)
    assert launch.command(1, *words).codes == [0]
    return folder / "run"


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short ones, of which several share a row."""
    path, draw = tmp_path_factory.mktemp("documents") / "documents.jsonl", random.Random(1)
    lines = (" ".join(draw.choices(WORDS, k=draw.randint(1, 5))) for _ in range(60))
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


SETTINGS = {
    "train.cells": 4,
    "train.batch": 4,
    "train.threads": 1,
    "train.steps": 4,
    "train.save_every": 4,
    "train.evaluate_every": 4,
    "train.log_every": 2,
    "train.precision": "float32",
    "train.timeout": 60,
    "tune.context": 32,
    "model.dropout": 0.1,
}
CASES: dict[str, dict[str, Any]] = {
    "all weights": {"train.shard": "full"},
    "adapters": {"tune.rank": 2, "optim.learning_rate": 0.01},
}


def tuning(checkpoint: Path, run: Path, documents: Path, settings: dict[str, Any]) -> list[object]:
    given = {k: v for k, v in {**SETTINGS, **settings}.items() if v is not None}
    flags = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    return ["tune", checkpoint, "--text", documents, "--out", run, *flags]


def tuned(run: Path) -> dict[str, Any]:
    summary = json.loads((run / "summary.json").read_text())
    return {**story(run), "tuning": summary["tuning"], "trained": summary.get("trained")}


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_processes_tunes_to_the_same_bits(
    launch, checkpoint: Path, documents: Path, tmp_path: Path, name: str
) -> None:
    """Begun by 2, resumed by 1; of the measures before and after, those of one process."""
    one, two = tmp_path / "one", tmp_path / "two"
    ended = launch.command(1, *tuning(checkpoint, one, documents, CASES[name]))
    assert ended.codes == [0], ended.output
    words = tuning(checkpoint, two, documents, CASES[name])
    ended = launch.command(2, *words, before=stop(3, rank=1))
    assert ended.codes == [128 + signal.SIGTERM] * 2, ended.output
    assert ended.output[1] == ""
    ended = launch.command(1, "tune", "--resume", two)
    assert ended.codes == [0], ended.output
    expected, found = tuned(one), tuned(two)
    assert found == expected
    if name == "adapters":  # the reference is train/step.py, with as many micro-batches
        ordinary = {"train.cells": None, "train.accumulate": 4, **CASES[name]}
        ended = launch.command(1, *tuning(checkpoint, tmp_path / "0", documents, ordinary))
        assert ended.codes == [0], ended.output
        losses = [
            [line["train/loss"] for line in tuned(run)["metrics"] if "train/loss" in line]
            for run in (tmp_path / "0", two)
        ]
        assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    before, after = (expected["tuning"][when]["loss"] for when in ("before", "after"))
    assert before != after
    assert read_sealed_json(two / "before.json")["loss"] == before


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tune.rank": 2, "train.shard": "full"}, "with adapters every process has the checkpoint"),
        (
            {"train.batch": 6, "train.cells": 3, "train.context_group": 2, "tune.context": 30},
            "30 positions",
        ),
    ],
)
def test_what_cannot_be_tuned_is_refused_once(
    launch, checkpoint: Path, documents: Path, tmp_path: Path, settings: Any, sentence: str
) -> None:
    opens, abandons = Corpus.open, RunDir.abandon

    def slow(rank: int) -> None:
        """Rank 1 is slow to open the token files; rank 0 removes them, and is slow to say why."""
        if rank == 1:
            Corpus.open = lambda folder: (sleep(0.5), opens(folder))[1]
        else:
            RunDir.abandon = lambda run: (abandons(run), sleep(1.0))[0]

    words = tuning(checkpoint, tmp_path / "run", documents, settings)
    ended = launch.command(2, *words, before=slow)
    assert ended.codes == [2, 2], ended.output
    assert "".join(ended.output).count("fenchel: ") == 1
    assert sentence in "".join(ended.output)
    assert not (tmp_path / "run").exists()
