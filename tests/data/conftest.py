"""A small text, deterministic and not quite regular, and a tokenizer trained on it."""

from pathlib import Path

import pytest

from fenchel.data.tokens import TextTokenizer, train_tokenizer

WORDS = ("sea", "shell", "shore", "she", "sells", "surely", "seven", "slow", "ships", "sail")


def verse(number: int, words: int = 60) -> str:
    state, lines = number + 1, []
    for place in range(words):
        state = (1103515245 * state + 12345) % 2**31
        lines.append(WORDS[(state >> 16) % len(WORDS)] + ("\n" if place % 9 == 8 else " "))
    return "".join(lines) + f"<|end|> verse {number}, naïve 中 😀.\n"


@pytest.fixture(scope="session")
def verses() -> list[str]:
    return [verse(number) for number in range(30)]


@pytest.fixture
def folder(tmp_path: Path, verses: list[str]) -> Path:
    """Thirty files, their names in the order of the verses."""
    where = tmp_path / "verses"
    where.mkdir()
    for number, text in enumerate(verses):
        (where / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    return where


@pytest.fixture(scope="session")
def tokenizer(verses: list[str]) -> TextTokenizer:
    return train_tokenizer(verses, 400)
