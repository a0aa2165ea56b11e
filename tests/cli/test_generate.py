"""fenchel generate: what its settings change, and what they do not."""

import json
from pathlib import Path

import pytest

from fenchel.checkpoints import load
from fenchel.cli import main
from fenchel.data import encode, end_id


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


@pytest.fixture
def exported(run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The run as a Hugging Face directory, whose generation_config.json names tokens only."""
    assert main(["convert", str(run_directory), str(tmp_path / "exported")]) == 0
    capsys.readouterr()
    return tmp_path / "exported"


def say(directory: Path, **settings: object) -> None:
    path = directory / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_a_checkpoint_says_how_to_draw_and_flags_win(
    words: list[str], exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, words[1] = words[1], str(exported)
    silent = text_of(words, capsys)
    assert silent == text_of(["generate", run, *words[2:]], capsys)  # tokens alone change nothing
    assert main(words) == 0
    assert not capsys.readouterr().err
    say(exported, do_sample=True, temperature=1.7, top_k=30, repetition_penalty=1.2)
    flags = ["--temperature", "1.7", "--top-k", "30", "--repetition-penalty", "1.2"]
    by_file = text_of(words, capsys)
    assert by_file == text_of(["generate", run, *words[2:], *flags, "--top-p", "1"], capsys)
    assert by_file != silent
    back = ["--temperature", "0.8", "--top-k", "300", "--top-p", "0.95"]
    assert text_of([*words, *back, "--repetition-penalty", "1"], capsys) == silent
    assert main([*words, "--top-k", "5"]) == 0
    shown = capsys.readouterr()
    source = exported / "generation_config.json"
    taken = "temperature 1.7, no top_p, repetition_penalty 1.2"
    assert shown.err == f"Settings of {source}: {taken}.\n"
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings_from"] == str(source)
    assert found["settings"]["top_k"] == 30


def test_a_checkpoint_says_where_a_text_ends(
    words: list[str], exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words[1] = str(exported)
    whole = text_of(words, capsys)
    tokenizer = load(exported).tokenizer
    third = encode(tokenizer, whole)[2]
    end = end_id(tokenizer)
    say(exported, eos_token_id=[end, third])
    ended = text_of(words, capsys)
    assert whole.startswith(ended)
    assert encode(tokenizer, ended)[-1] == third
    assert third not in encode(tokenizer, ended)[:-1]
    assert main(words) == 0
    assert f"ends [{end}, {third}]." in capsys.readouterr().err


def test_a_damaged_file_beside_a_checkpoint_gets_one_sentence(
    words: list[str], exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say(exported, do_sample=True, temperature=-1.0)
    assert main(["generate", str(exported), *words[2:]]) == 2
    assert "generation_config.json: temperature=" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--draft", "-1"],
        ["--stop", ""],
        ["--repetition-penalty", "0"],
        ["--max-new-tokens", "-3"],
    ],
)
def test_a_wrong_flag_gets_one_sentence(
    wrong: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, *wrong]) == 2
    shown, told = capsys.readouterr()
    assert shown == ""
    assert told.startswith("fenchel: ")
    assert told.count("\n") == 1
