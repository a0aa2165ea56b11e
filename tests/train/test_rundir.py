"""fenchel/train/rundir.py: files a person can read, and what a new run may be written over."""

import json
import os
import resource
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

from fenchel.checkpoints.run_checkpoint import FORMAT
from fenchel.files import Damaged, NoSpace, Notice, seal_text
from fenchel.train import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


def lines(run: RunDir) -> list[dict]:
    """The lines, each of which has its checksum."""
    whole = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [{key: line[key] for key in line if key != "crc"} for line in whole if "crc" in line]


# --- the folder


def test_create_makes_the_parents_and_returns_whether_the_folder_is_new(tmp_path: Path) -> None:
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
    (run.path / "config.toml").write_text(seal_text("format = 3\n[future]\nkey = 1\n"))
    with pytest.raises(ValueError, match="has format 3, this fenchel reads format 2"):
        run.read_settings()


@pytest.mark.parametrize(
    "text", ["", "seed = 1", 'format = "1"', "format = true", "format = 0", "= =", "\xff"]
)
def test_settings_that_are_none_are_damage(run: RunDir, text: str) -> None:
    (run.path / "config.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(Damaged, match=r"config\.toml"):
        run.read_settings()


def test_settings_changed_by_hand_are_refused_with_the_way_to_change_them(run: RunDir) -> None:
    run.write_settings({"train": {"batch": 4}})
    path = run.path / "config.toml"
    path.write_text(path.read_text().replace("batch = 4", "batch = 8"))
    with pytest.raises(Damaged, match=r"has changed since it was written.*--set NAME=VALUE"):
        run.read_settings()


def test_every_flipped_bit_of_the_settings_is_found_or_changes_none(run: RunDir) -> None:
    settings = {"seed": 3, "train": {"batch": 4, "log": ["tensorboard"], "clip": 0.5}}
    run.write_settings(settings)
    path = run.path / "config.toml"
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with suppress(ValueError):  # Damaged, or of another format
            assert run.read_settings() == settings


def test_settings_of_an_earlier_version_have_no_seal_and_are_read(run: RunDir) -> None:
    (run.path / "config.toml").write_text(f"format = {FORMAT}\nseed = 3\n")
    assert run.read_settings() == {"seed": 3}


def test_settings_nested_beyond_reason_are_damage(run: RunDir) -> None:
    for text in ("a = " + "[" * 3000 + "]" * 3000, ".".join("a" * 50_000) + " = 1"):
        (run.path / "config.toml").write_text(text)
        with pytest.raises(Damaged, match=r"config\.toml cannot be read"):
            run.read_settings()


def test_a_run_stopped_before_training_names_the_command_to_repeat(run: RunDir) -> None:
    (run.path / "run.lock").touch()
    with pytest.raises(ValueError, match="stopped before it began to train; give the command"):
        run.read_settings()


@pytest.mark.parametrize(
    "name", ["run.lock", "metrics.jsonl", "checkpoints", "tokens", "text.json"]
)
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
def test_what_is_not_a_plain_file_or_folder_of_the_run_is_refused(
    tmp_path: Path, name: str, kind: str
) -> None:
    entry = tmp_path / "run" / name
    entry.parent.mkdir()
    (tmp_path / "outside").mkdir()
    if kind == "pipe":
        os.mkfifo(entry)
    else:
        entry.symlink_to(tmp_path / ("outside" if kind == "link" else "nothing"))
    with pytest.raises(Damaged, match=rf"{name} is (a link|not a plain)"):
        RunDir(entry.parent).require_plain()


def test_names_of_others_are_theirs(run: RunDir) -> None:
    (run.path / "notes").symlink_to("/")
    run.require_plain()
    (run.path / "notes").unlink()
    (run.path / "run.lock").touch()
    (run.path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds other files \(mine.txt\)"):
        run.create()
    run.abandon()
    assert [entry.name for entry in run.path.iterdir()] == ["mine.txt"]


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


def test_a_cut_log_is_reported_and_continues_on_a_new_line(run: RunDir) -> None:
    for step in (1, 2):
        run.log({"step": step})
    position = run.flush()
    os.truncate(run.metrics, position - 4)
    assert "has lost 4 bytes" in (run.rewind(position) or "")
    run.log({"step": 3})
    assert lines(run) == [{"step": 1}, {"step": 3}]


def test_a_missing_log_is_reported_and_begun_again(run: RunDir) -> None:
    run.log({"step": 1})
    position = run.flush()
    run.metrics.unlink()
    assert f"has lost {position} bytes" in (run.rewind(position) or "")
    run.log({"step": 2})
    assert lines(run) == [{"step": 2}]


def test_every_flipped_bit_of_a_log_is_reported_with_its_line_or_changes_nothing(
    run: RunDir,
) -> None:
    for step in (1, 2):
        run.log({"step": step, "train/loss": 1.25})
    position = run.flush()
    whole = run.metrics.read_bytes()
    first = whole.index(b"\n") + 1
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        run.metrics.write_bytes(flipped)
        said = run.rewind(position)
        if said is None:  # the checksum's own name was hit
            rows = [json.loads(line) for line in run.metrics.read_bytes().splitlines()]
            assert [(row["step"], row["train/loss"]) for row in rows] == [(1, 1.25), (2, 1.25)]
        elif "first in line" in said:
            assert f"first in line {1 + (bit // 8 >= first)};" in said
        else:
            assert "has lost" in said


def test_a_torn_write_that_cannot_be_cut_is_written_over(run: RunDir) -> None:
    """A short write, after which the file cannot be truncated."""
    run.log({"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (run.flush() + 5, before[1]))
    run.log({"step": 2})
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with run.metrics.open("ab") as file:
        file.write(b'{"step": 2, "what a torn write may leave": 1, and more of it')
    run.flush()
    assert lines(run) == [{"step": 1}, {"step": 2}]


def test_a_log_removed_during_the_run_is_reported_and_begun_again(run: RunDir) -> None:
    run.log({"step": 1})
    run.metrics.unlink()
    with pytest.warns(Notice, match=r"metrics\.jsonl was cut or removed"):
        run.log({"step": 2})
    assert lines(run) == [{"step": 2}]


def test_each_file_is_checked_and_named(run: RunDir) -> None:
    run.write_settings({"seed": 1})
    run.log({"step": 1})
    run.write_json("summary.json", {"step": 1})
    assert run.check_files() == dict.fromkeys(
        ("config.toml", "metrics.jsonl", "summary.json"), "intact"
    )
    for name in run.check_files():
        path = run.path / name
        path.write_text(path.read_text().replace("1", "2", 1))
    assert all("has changed since it was written" in v for v in run.check_files().values())


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
