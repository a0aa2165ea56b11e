"""One tiny run, trained once by the command itself, for every test that reads one."""

import random
from pathlib import Path

import pytest

from fenchel.cli import main

TINY = (
    "text.vocabulary=300",
    "model.context=16",
    "model.width=16",
    "model.layers=1",
    "train.batch=4",
    "train.threads=1",
    "train.log_every=5",
)


def tiny_flags() -> list[str]:
    return [word for setting in TINY for word in ("--set", setting)]


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    words = "the people of these States have peace and trade with every nation".split()
    lines = (" ".join(draw.choices(words, k=9)) + "." for _ in range(400))
    path = tmp_path_factory.mktemp("text") / "speech.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def run_directory(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "tiny"
    words = ["train", "--text", str(text_file), "--steps", "20", "--out", str(path)]
    assert main([*words, *tiny_flags()]) == 0
    return path


@pytest.fixture
def flags() -> list[str]:
    return tiny_flags()
