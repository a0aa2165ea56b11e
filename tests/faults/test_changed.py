"""The text, the tokenizer, the settings or the machine are no longer what they were."""

import json
import os
import shutil
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fenchel.data import open_text
from fenchel.files import write_sealed_json

STOPPED = 128 + signal.SIGTERM


def text_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "text.json").read_text()))


@pytest.mark.parametrize("tokens", ["intact", "missing"])
def test_a_text_that_is_a_huge_folder_by_now_is_not_read(
    lab: Any, tmp_path: Path, tokens: str
) -> None:
    """The record of a run of other people may name any folder."""
    text, run, huge = tmp_path / "mine", tmp_path / "run", tmp_path / "huge"
    text.mkdir()
    shutil.copy(lab.text, text / "a.txt")
    assert lab.begin(run, text=text, mischief=lab.signalled(3)).code == STOPPED
    documents = text_of(run)["documents"]
    for number in range(10_001 + 100 * documents):
        os.makedirs(huge / f"{number % 99}", exist_ok=True)
        (huge / f"{number % 99}" / f"{number}.txt").touch()
    os.mkfifo(huge / "first.txt")  # a reader would wait
    record = text_of(run) | {"source": str(huge)}
    del record["seal"]
    write_sealed_json(run / "text.json", record)
    if tokens == "missing":
        shutil.rmtree(run / "tokens")
    ended = lab.resume(run, mischief=lab.signalled(5))
    assert ended.code == (STOPPED if tokens == "intact" else 2)
    assert f"more than {10_000 + 100 * documents:,} files" in ended.said


def test_a_text_far_longer_than_it_was_is_not_read_to_its_end(lab: Any, tmp_path: Path) -> None:
    text, run = tmp_path / "mine.txt", tmp_path / "run"
    shutil.copy(lab.text, text)
    assert lab.begin(run, text=text, mischief=lab.signalled(3)).code == STOPPED
    with text.open("ab") as file:
        for _ in range(40):
            file.write(text.read_bytes()[:1000] * 100)
        file.write(b"\xff")  # not text: whoever reads it says so
    ended = lab.resume(run)
    assert ended.code == 2
    assert "has more than twice its length now" in ended.said


def test_a_changed_text_is_refused_with_both_hashes_and_may_be_accepted(
    lab: Any, tmp_path: Path
) -> None:
    """F14."""
    text, run = tmp_path / "mine.txt", tmp_path / "run"
    shutil.copy(lab.text, text)
    old = text.read_bytes()
    assert lab.begin(run, text=text, mischief=lab.signalled(3)).code == STOPPED
    before = text_of(run)

    changes = {
        "one byte more": old + b"!",
        "a line more": old + b"\nand one more line\n",
        "as many bytes": old.replace(b"peace", b"piece", 1),
    }
    for changed in changes.values():
        text.write_bytes(changed)
        ended = lab.resume(run)
        assert ended.code == 2
        for hash_ in (before["text_sha256"], open_text(str(text)).sha256()):
            assert hash_[:12] in ended.said
        assert "--accept-new-text" in ended.said
        assert text_of(run) == before

    text.write_bytes(old)
    os.utime(text, (1, 1))  # another time is not another text
    assert lab.resume(run, mischief=lab.signalled(5)).code == STOPPED

    text.unlink()  # its tokens are all that training needs
    ended = lab.resume(run, mischief=lab.signalled(7))
    assert ended.code == STOPPED
    assert "The run goes on with its own token files." in ended.said

    text.write_bytes(changes["a line more"])
    ended = lab.resume(run, "--accept-new-text")
    assert ended.code == 0
    assert "as accepted" in ended.said
    after = text_of(run)
    assert after["text_sha256"] == open_text(str(text)).sha256()
    assert after["tokenizer_sha256"] == before["tokenizer_sha256"]
    assert (run / after["folder"] / "train.bin").is_file()
    assert lab.resume(run).code == 0, "accepted once, accepted for good"


def test_a_kill_while_a_new_text_is_taken_in_leaves_the_old_state(lab: Any, tmp_path: Path) -> None:
    import fenchel.pipeline

    text, run = tmp_path / "mine.txt", tmp_path / "run"
    shutil.copy(lab.text, text)
    assert lab.begin(run, text=text, mischief=lab.signalled(3)).code == STOPPED
    before = text_of(run)
    old = text.read_bytes()
    text.write_bytes(old + b"\nmore")

    def mischief() -> None:
        fenchel.pipeline.task.record_corpus = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    assert lab.resume(run, "--accept-new-text", mischief=mischief).code == -signal.SIGKILL
    assert text_of(run) == before
    text.write_bytes(old)
    assert lab.resume(run, mischief=lab.signalled(4)).code == STOPPED


def test_a_text_that_goes_while_the_run_trains_costs_only_the_baselines(
    lab: Any, whole: dict[str, Any], tmp_path: Path
) -> None:
    text, run = tmp_path / "text.txt", tmp_path / "run"
    shutil.copy(lab.text, text)
    ended = lab.begin(run, text=text, mischief=lab.at_step(30, text.unlink))
    assert ended.code == 0
    assert "The baselines are left out: there is no text" in ended.said
    assert lab.story(run)["weights"] == whole["weights"]
    assert (run / "report.html").exists()


@pytest.mark.parametrize("change", ["changed", "missing"])
def test_another_tokenizer_is_refused(lab: Any, halfway: Path, change: str) -> None:
    path = halfway / "tokenizer.json"
    if change == "changed":
        path.write_text(path.read_text() + " ")
    else:
        path.unlink()
    ended = lab.resume(halfway)
    assert ended.code == 2
    assert "is not the tokenizer the run began with" in ended.said


def test_token_files_of_another_text_are_refused(lab: Any, halfway: Path, tmp_path: Path) -> None:
    text, other = tmp_path / "other.txt", tmp_path / "other"
    text.write_bytes(lab.text.read_bytes()[::-1])
    assert lab.begin(other, text=text, mischief=lab.signalled(2)).code == STOPPED
    shutil.rmtree(halfway / "tokens")
    (other / "tokens").rename(halfway / "tokens")
    ended = lab.resume(halfway)
    assert ended.code == 2
    assert "holds token files of another text than the run began with" in ended.said


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("model.width=32", "model.width cannot change in a run that has begun"),
        ("text.vocabulary=300", "text.vocabulary cannot change"),
        ("optim.optimiser=adamw", "optim.optimiser cannot change"),
        ("train.budget=5m", "it was turned into steps, so give --steps"),
        ("train.bach=8", "did you mean train.batch?"),
        ("train.device=abacus", "abacus"),
        ("seed.of=3", "there is no setting 'seed.of'"),
    ],
)
def test_settings_that_cannot_change_are_refused_and_not_kept(
    lab: Any, halfway: Path, setting: str, says: str
) -> None:
    before = (halfway / "config.toml").read_text()
    ended = lab.resume(halfway, "--set", setting)
    assert ended.code == 2
    assert says in ended.said
    assert (halfway / "config.toml").read_text() == before


def test_harmless_settings_take_effect_are_reported_and_change_no_bit(
    lab: Any, whole: dict[str, Any], halfway: Path
) -> None:
    words = ["--set", "train.keep=5", "--set", "train.save_every=4", "--set", "train.batch=4"]
    ended = lab.resume(halfway, *words)
    assert ended.code == 0
    assert "train.keep is now 5: the run goes on." in ended.said
    assert "train.save_every is now 4: the run goes on." in ended.said
    assert "train.batch" not in ended.said, "it was 4 before"
    assert lab.kept(halfway)[-3:] == [32, 36, 40]
    assert len(lab.kept(halfway)) > 4
    assert tomllib.loads((halfway / "config.toml").read_text())["train"]["keep"] == 5
    assert lab.story(halfway)["weights"] == whole["weights"]
    assert lab.story(halfway)["metrics"] == whole["metrics"]


def test_other_settings_take_effect_and_the_run_is_no_longer_bit_exact(
    lab: Any, whole: dict[str, Any], halfway: Path
) -> None:
    ended = lab.resume(halfway, "--set", "optim.learning_rate=0.02", "--steps", "45")
    assert ended.code == 0
    assert "optim.learning_rate is now 0.02: the run goes on, no longer bit for bit" in ended.said
    assert "train.steps is now 45: the run goes on, no longer bit for bit" in ended.said
    story = lab.story(halfway)
    assert story["step"] == "step-000045"
    assert story["metrics"][:4] == whole["metrics"][:4]
    assert story["weights"] != whole["weights"]


def test_a_change_of_machine_is_reported_and_the_run_goes_on(lab: Any, halfway: Path) -> None:
    path = halfway / "environment.json"
    kept = json.loads(path.read_text())
    del kept["seal"]
    write_sealed_json(path, {**kept, "torch": "2.11.0"})
    ended = lab.resume(halfway, mischief=lab.signalled(24))
    assert ended.code == STOPPED
    assert f"torch was 2.11.0 and is {kept['torch']}" in ended.said


def test_a_finished_run_can_be_given_more_steps(
    lab: Any, whole: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(lab.folder / "whole", run)
    assert whole["step"] == "step-000040"
    ended = lab.resume(run, "--steps", 42)
    assert ended.code == 0
    assert "already finished" not in ended.said
    assert lab.story(run)["step"] == "step-000042"
