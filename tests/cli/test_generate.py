"""fenchel generate: what its settings change, and what they do not."""

import json
from pathlib import Path

import pytest

from fenchel.cli import main


@pytest.fixture
def words(run_directory: Path) -> list[str]:
    return ["generate", str(run_directory), "--prompt", "the people", "--max-new-tokens", "40"]


def text_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return str(json.loads(capsys.readouterr().out)["text"])


def test_text_ends_before_the_first_of_several_stops(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = text_of(words, capsys)
    stops = [whole[12:15], whole[7:10]]
    first = min(whole.index(stop) for stop in stops)
    flags = [word for stop in stops for word in ("--stop", stop)]
    assert text_of([*words, *flags], capsys) == whole[:first]
    assert main([*words, *flags]) == 0
    assert capsys.readouterr().out == f"the people{whole[:first]}\n"


def test_guessing_ahead_does_not_change_the_text(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert text_of([*words, "--draft", "4"], capsys) == text_of(words, capsys)


@pytest.mark.parametrize("cache", ["float16", "int8"])
def test_a_smaller_cache_still_writes(
    cache: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert text_of([*words, "--cache", cache], capsys)


def test_a_penalty_changes_what_is_repeated(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    greedy = [*words, "--temperature", "0"]
    assert text_of([*greedy, "--repetition-penalty", "5"], capsys) != text_of(greedy, capsys)


@pytest.mark.parametrize(
    "wrong", [["--draft", "-1"], ["--stop", ""], ["--repetition-penalty", "0"]]
)
def test_a_wrong_flag_gets_one_sentence(
    wrong: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, *wrong]) == 2
    told = capsys.readouterr().err
    assert told.startswith("fenchel: ")
    assert told.count("\n") == 1
