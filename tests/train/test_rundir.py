"""fenchel/train/rundir.py: files a person can read, and what a new run may be written over."""

import json
import os
import resource
import tomllib
from pathlib import Path

import pytest

from fenchel.checkpoints.run_checkpoint import FORMAT
from fenchel.files import Damaged, NoSpace
from fenchel.train import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


def lines(run: RunDir) -> list[dict]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


# --- the folder


def test_a_new_folder_is_made_with_its_parents_and_said_to_be_new(tmp_path: Path) -> None:
    assert RunDir(tmp_path / "a" / "b").create()
    assert not RunDir(tmp_path / "a" / "b").create()


def test_a_start_that_was_cut_short_may_be_started_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    (tmp_path / "run.lock").touch()
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "tokens.tmp-7").mkdir()
    assert not run.create()


@pytest.mark.parametrize("name", ["config.toml", "checkpoints/step-000005"])
def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    (tmp_path / "run.lock").touch()
    with pytest.raises(ValueError, match=r"holds a run already; continue it with --resume"):
        RunDir(tmp_path).create()


def test_a_folder_of_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("mine")
    with pytest.raises(ValueError, match=r"holds other files \(tokenizer.json\)"):
        RunDir(tmp_path).create()
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(ValueError, match="is a file"):
        RunDir(tmp_path / "f").create()


def test_only_a_folder_whose_run_never_began_is_abandoned(run: RunDir) -> None:
    run.write_settings({"seed": 1})
    run.abandon()
    assert run.path.exists()
    (run.path / "config.toml").unlink()
    run.abandon()
    assert not run.path.exists()


# --- the settings


def test_settings_come_back(run: RunDir) -> None:
    settings = {"seed": 3, "train": {"batch": 4, "log": ["tensorboard"], "clip": 1.0}}
    run.write_settings(settings)
    assert run.read_settings() == settings
    assert tomllib.loads((run.path / "config.toml").read_text())["format"] == FORMAT


def test_a_newer_format_is_refused_in_one_sentence(run: RunDir) -> None:
    (run.path / "config.toml").write_text("format = 3\n[future]\nkey = 1\n")
    with pytest.raises(ValueError, match="has format 3, this fenchel reads format 2"):
        run.read_settings()


@pytest.mark.parametrize(
    "text", ["", "seed = 1", 'format = "1"', "format = true", "format = 0", "= =", "\xff"]
)
def test_settings_that_are_none_are_damage(run: RunDir, text: str) -> None:
    (run.path / "config.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(Damaged, match=r"config\.toml"):
        run.read_settings()


def test_a_folder_without_settings_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a run directory"):
        RunDir(tmp_path).read_settings()


# --- the metrics


def test_what_json_has_no_number_for_is_written_as_a_word(run: RunDir) -> None:
    run.log({"step": 1, "a": float("nan"), "b": [float("inf"), 1.0], "c": {"d": -float("inf")}})
    assert lines(run) == [{"step": 1, "a": "nan", "b": ["inf", 1.0], "c": {"d": "-inf"}}]


def test_a_rewound_log_ends_where_the_checkpoint_was(run: RunDir) -> None:
    run.log({"step": 1})
    position = run.flush()
    run.log({"step": 2})
    assert run.rewind(position) is None
    assert lines(run) == [{"step": 1}]
    assert run.rewind(position) is None


def test_a_log_that_was_cut_is_said_and_goes_on_at_a_line_of_its_own(run: RunDir) -> None:
    for step in (1, 2):
        run.log({"step": step})
    position = run.flush()
    os.truncate(run.metrics, position - 4)
    assert "has lost 4 bytes" in (run.rewind(position) or "")
    run.log({"step": 3})
    assert lines(run) == [{"step": 1}, {"step": 3}]


def test_a_log_that_is_gone_is_said_and_begun_again(run: RunDir) -> None:
    run.log({"step": 1})
    position = run.flush()
    run.metrics.unlink()
    assert f"has lost {position} bytes" in (run.rewind(position) or "")
    run.log({"step": 2})
    assert lines(run) == [{"step": 2}]


def test_a_log_without_lines_has_a_length_too(run: RunDir) -> None:
    assert run.flush() == 0


def test_lines_that_a_full_disk_kept_back_come_when_there_is_room(run: RunDir) -> None:
    """A real limit on the size of files, which tears the write in the middle."""
    run.log({"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (run.flush() + 5, before[1]))
    try:
        run.log({"step": 2})
        run.log({"step": 3})
        assert lines(run) == [{"step": 1}], "a torn line stays"
        with pytest.raises(NoSpace, match=r"metrics\.jsonl"):
            run.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run.log({"step": 4})
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4]
