"""Checkpoints that are cut, flipped, exchanged, poisoned or of another model."""

import errno
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fenchel import files
from fenchel.checkpoints import load, run_checkpoint
from fenchel.cli.doctor import check_run
from fenchel.train import RunDir
from tests.fuzz.faults import flip_bits

NAMES = ("model.safetensors", "optimiser.safetensors", "config.json", "state.json", "manifest.json")


def newest(run: Path, place: int = 1) -> Path:
    return sorted((run / "checkpoints").glob("step-??????"))[-place]


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_damaged_newest_one_falls_back_with_a_sentence_that_names_both(
    lab: Any, whole: dict[str, Any], halfway: Path
) -> None:
    """F7: what is damaged is set aside, told of once, and gone when its step is taken again."""
    os.truncate(newest(halfway) / "model.safetensors", 1000)
    ended = lab.resume(halfway, mischief=lab.signalled(21))
    assert "step-000023 is damaged, step-000020 is used instead: " in ended.said
    assert "model.safetensors has 1000 bytes, and" in ended.said
    assert "Resuming from step-000020." in ended.said
    assert lab.kept(halfway) == [15, 20, 21]
    assert (halfway / "checkpoints" / "step-000023.damaged").is_dir()
    ended = lab.resume(halfway)
    assert ended.code == 0
    assert "is damaged" not in ended.said
    assert lab.story(halfway) == whole
    assert not lab.left_over(halfway)


def test_the_third_is_used_when_two_are_damaged(
    lab: Any, whole: dict[str, Any], halfway: Path
) -> None:
    """F10."""
    flip(newest(halfway, 1) / "optimiser.safetensors", 77_777)
    (newest(halfway, 2) / "state.json").unlink()
    ended = lab.resume(halfway)
    assert ended.code == 0
    assert "step-000023 is damaged, step-000015 is used instead" in ended.said
    assert "step-000020 is damaged, step-000015 is used instead" in ended.said
    assert lab.story(halfway) == whole


def test_a_resume_without_an_intact_checkpoint_is_refused_and_does_not_begin_again(
    lab: Any, halfway: Path
) -> None:
    for folder in (halfway / "checkpoints").iterdir():
        flip(folder / "manifest.json", 900)
    before = {path: files.sha256(path) for path in halfway.rglob("*.*") if path.is_file()}
    ended = lab.resume(halfway)
    assert ended.code == 2
    assert "step-000023 is damaged, it cannot be used" in ended.said
    assert "holds no intact checkpoint; start a new run, or restore" in ended.said
    assert ended.step == 0
    after = {path: files.sha256(path) for path in halfway.rglob("*.*") if path.is_file()}
    assert after == before


def test_checkpoints_deleted_while_the_run_trains_are_not_called_intact(
    lab: Any, tmp_path: Path
) -> None:
    """Audit F9: all are deleted, then the process is killed before the next one."""
    run = tmp_path / "run"

    def mischief() -> None:
        lab.written_at_once()
        lab.at_step(8, lambda: shutil.rmtree(run / "checkpoints"))()
        lab.at_step(9, lambda: os.kill(os.getpid(), 9))()

    assert lab.begin(run, mischief=mischief).code == -9
    before = (run / "metrics.jsonl").read_bytes()
    for _ in range(2):
        ended = lab.resume(run)
        assert ended.code == 2
        assert "holds no intact checkpoint of a run that has saved step 5" in ended.said
        assert "begins again" not in ended.said
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_failure_names_the_checkpoint_that_was_checked(lab: Any, halfway: Path) -> None:
    """Not "what was saved before is intact", unseen."""

    def mischief() -> None:
        def lose() -> None:
            flip(newest(halfway) / "model.safetensors", 777)
            run_checkpoint.write_tensors = refuse

        def refuse(*_: object) -> None:
            raise OSError(errno.EIO, "Input/output error", "the disk")

        lab.at_step(24, lose)()

    ended = lab.resume(halfway, mischief=mischief)
    assert ended.code == 4
    assert "the disk: input/output error; the last good checkpoint is step-000020, go on" in (
        ended.said
    )


def test_a_resume_without_any_checkpoint_is_refused_if_some_were_saved(
    lab: Any, halfway: Path
) -> None:
    shutil.rmtree(halfway / "checkpoints")
    (halfway / "checkpoints").mkdir()
    before = (halfway / "metrics.jsonl").read_bytes()
    ended = lab.resume(halfway)
    assert ended.code == 2
    assert "holds no intact checkpoint" in ended.said
    assert (halfway / "metrics.jsonl").read_bytes() == before


def test_a_run_killed_before_its_first_checkpoint_begins_again(
    lab: Any, whole: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"

    def mischief() -> None:
        lab.at_step(5, lambda: os.kill(os.getpid(), 9))()

    assert lab.begin(run, "--set", "train.log_every=2", mischief=mischief).code == -9
    ended = lab.resume(run, "--set", "train.log_every=5")
    assert ended.code == 0
    assert "No checkpoint was written yet: the run begins again at its first step." in ended.said
    assert lab.story(run) == whole


def test_checkpoints_exchanged_or_renamed_are_never_mixed(
    lab: Any, whole: dict[str, Any], halfway: Path
) -> None:
    """F9."""
    new, old = newest(halfway), newest(halfway, 2)
    spare = halfway / "spare"
    new.rename(spare)
    old.rename(new)
    spare.rename(old)
    ended = lab.resume(halfway)
    assert ended.code == 0
    assert "step-000023 is damaged, step-000015 is used instead" in ended.said
    assert "holds step 20 of format 2, which differs from its name" in ended.said
    assert lab.story(halfway) == whole


def rewrite(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Put other weights in a checkpoint and seal it again, so that only they are wrong."""
    manifest = json.loads((folder / "manifest.json").read_text())
    header = {k: v for k, v in manifest.items() if k not in ("files", "seal")}
    kept = shutil.move(folder, folder.with_name("kept"))
    with files.committed(folder, header) as fresh:
        for name in ("optimiser.safetensors", "config.json", "state.json"):
            shutil.copy(Path(kept) / name, fresh)
        save_file(weights, fresh / "model.safetensors")
    shutil.rmtree(kept)


def test_weights_that_are_not_finite_are_refused_by_name_and_number(
    lab: Any, halfway: Path
) -> None:
    """F13."""
    weights = load_file(newest(halfway) / "model.safetensors")
    weights["blocks.1.attention.out.weight"][0, :3] = float("nan")
    rewrite(newest(halfway), weights)
    ended = lab.resume(halfway)
    assert ended.code == 2
    assert "blocks.1.attention.out.weight holds 3 values that are not finite" in ended.said


@pytest.mark.parametrize(
    ("setting", "other", "says"),
    [
        ("heads = 2", "heads = 4", "has heads=2, the settings of the run have heads=4"),
        ("layers = 2", "layers = 3", "has layers=2, the settings of the run have layers=3"),
        ("tied = false", "tied = true", "has tied=False, the settings of the run have tied=True"),
        ("bias = false", "bias = true", "has bias=False, the settings of the run have bias=True"),
        ('optimiser = "muon"', 'optimiser = "adamw"', "saved by another optimiser"),
        ("steps = 40", "", "does not say train.steps"),
    ],
)
def test_settings_edited_by_hand_are_refused_and_sealed_anew_if_they_do_not_fit_the_weights(
    lab: Any, halfway: Path, setting: str, other: str, says: str
) -> None:
    path = halfway / "config.toml"
    assert f"\n{setting}" in path.read_text()
    path.write_text(path.read_text().replace(f"\n{setting}", f"\n{other}"))
    ended = lab.resume(halfway)
    assert ended.code == 2
    assert "config.toml has changed since it was written" in ended.said
    assert "change a setting by --resume" in ended.said
    reseal(path)
    ended = lab.resume(halfway)
    assert ended.code == 2
    assert says in ended.said
    assert lab.kept(halfway)[-1] == 23


def reseal(path: Path) -> None:
    """Seal a text again, as only an ill-meaning hand would."""
    path.write_text(files.seal_text(path.read_text().partition("\n")[2]))


def test_damaged_token_files_are_made_again_from_the_same_text(
    lab: Any, whole: dict[str, Any], halfway: Path
) -> None:
    flip(halfway / "tokens" / "train.bin", 12_345)
    ended = lab.resume(halfway)
    assert ended.code == 0
    assert "has changed since it was written" in ended.said
    assert "The token files are made again." in ended.said
    assert lab.story(halfway) == whole


def test_a_cut_log_is_reported_and_changes_no_weight(
    lab: Any, whole: dict[str, Any], halfway: Path
) -> None:
    """F18."""
    os.truncate(halfway / "metrics.jsonl", 700)
    ended = lab.resume(halfway)
    assert ended.code == 0
    assert "bytes since the checkpoint; the run goes on" in ended.said
    story = lab.story(halfway)  # which reads every line
    assert story["weights"] == whole["weights"]
    assert story["metrics"][-3:] == whole["metrics"][-3:]


def test_a_run_of_a_newer_fenchel_is_refused_in_one_sentence(lab: Any, halfway: Path) -> None:
    path = halfway / "config.toml"
    path.write_text(path.read_text().replace("format = 2", "format = 3"))
    reseal(path)
    ended = lab.resume(halfway)
    assert ended.code == 2
    assert ended.said.removeprefix("Loading torch. ").startswith("fenchel: ")
    assert "has format 3, this fenchel reads format 2; use the newer" in ended.said


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.update(optimiser=5), "is not the state of a run after step 23"),
        (lambda s: s.update(optimiser={"step": 1}), "does not hold the state of an optimiser"),
        (lambda s: s.update(loss_sum=10**400), "should be a number below 2^64"),
        (lambda s: s.update(step=10**4000), "should be a number below 2^64"),
        (lambda s: s.update(step=39), "is not the state of a run after step 23"),
        (lambda s: s.update(metrics_bytes=-1), "is not the state of a run after step 23"),
        (lambda s: s.update(skipped=["a"]), "'skipped[0]' should be int"),
    ],
)
def test_a_state_that_is_none_is_refused_though_it_is_sealed(
    lab: Any, halfway: Path, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    """Audit F11."""
    folder = newest(halfway)
    state = json.loads((folder / "state.json").read_text())
    change(state)
    (folder / "state.json").write_text(json.dumps(state))
    manifest = json.loads((folder / "manifest.json").read_text())
    content = (folder / "state.json").read_bytes()
    manifest["files"]["state.json"] = {
        "bytes": len(content),
        "sha256": files.sha256(folder / "state.json"),
    }
    manifest["seal"] = files._seal(manifest)
    (folder / "manifest.json").write_text(files._text(manifest))
    ended = lab.resume(halfway)
    assert ended.code == 2
    assert says in ended.said
    assert (halfway / "metrics.jsonl").stat().st_size


def test_a_changed_line_of_metrics_is_reported_and_left_out_of_the_page(
    lab: Any, whole: dict[str, Any], halfway: Path
) -> None:
    """Audit F7."""
    path = halfway / "metrics.jsonl"
    flip(path, 8 * (path.read_bytes().index(b"train/loss") + len('train/loss": ')))
    ended = lab.resume(halfway)
    assert ended.code == 0
    assert "has changed since it was written, first in line 1;" in ended.said
    assert lab.story(halfway)["weights"] == whole["weights"]
    assert "1 line of metrics.jsonl could not be read" in (halfway / "report.html").read_text()


@pytest.mark.parametrize("name", ["sample.json", "report.html", "summary.json"])
def test_a_changed_file_of_a_finished_run_is_made_again_by_a_resume(
    lab: Any, whole: dict[str, Any], tmp_path: Path, name: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(lab.folder / "whole", run)
    flip(run / name, 8_000)
    assert lab.resume(run).code == 0
    assert lab.story(run) == whole
    assert set(RunDir(run).check_files().values()) == {"intact"}


def test_shared_token_files_that_are_damaged_are_made_again_inside_the_run(
    lab: Any, whole: dict[str, Any], tmp_path: Path
) -> None:
    """Audit F8: what the record of a run names elsewhere is never written to."""
    shared, run = tmp_path / "shared", tmp_path / "run"
    sharing = ("--set", f"text.prepared={shared}")
    assert lab.begin(run, *sharing, mischief=lab.signalled(3)).code == 143
    flip(shared / "train.bin", 777)
    before = {path: path.read_bytes() for path in shared.iterdir()}
    ended = lab.resume(run)
    assert ended.code == 0
    assert "The token files are made again." in ended.said
    assert {path: path.read_bytes() for path in shared.iterdir()} == before
    assert (run / "tokens" / "train.bin").is_file()
    assert lab.story(run) == whole


@pytest.mark.parametrize("folder", ["../outside", ".", "", "checkpoints/../../outside", "notes"])
def test_a_record_that_names_a_folder_elsewhere_is_refused(
    lab: Any, halfway: Path, folder: str
) -> None:
    path = halfway / "text.json"
    record = json.loads(path.read_text())
    del record["seal"]
    files.write_sealed_json(path, {**record, "folder": folder})
    before = sorted(halfway.parent.iterdir())
    ended = lab.resume(halfway)
    assert ended.code == 2
    assert "names a folder that is not one of token files" in ended.said
    assert sorted(halfway.parent.iterdir()) == before


@pytest.mark.parametrize("name", ["run.lock", "metrics.jsonl", "checkpoints", "tokens"])
@pytest.mark.parametrize("kind", ["link", "pipe", "hard link"])
def test_a_foreign_run_writes_nowhere_else_and_waits_for_nothing(
    lab: Any, halfway: Path, tmp_path: Path, name: str, kind: str
) -> None:
    """Audit F10."""
    entry, outside = halfway / name, tmp_path / "outside"
    if kind == "hard link" and entry.is_dir():
        return  # a folder has one name
    entry.rename(outside)
    match kind:
        case "link":
            entry.symlink_to(outside)
        case "pipe":
            os.mkfifo(entry)
        case "hard link":
            entry.hardlink_to(outside)
    before = tree(outside)
    ended = lab.resume(halfway)
    assert ended.code == 2
    assert "is a link" in ended.said or "is not a plain" in ended.said or "hard link" in ended.said
    assert tree(outside) == before


def tree(path: Path) -> dict[str, bytes]:
    every = path.rglob("*") if path.is_dir() else [path]
    return {str(file): file.read_bytes() for file in every if file.is_file()}


def test_no_flipped_bit_in_any_file_of_a_run_passes_unseen(
    lab: Any, whole: dict[str, Any], tmp_path: Path
) -> None:
    """Audit F7: some thousand bits; python -m tests.fuzz.faults flips more."""
    assert whole["step"] == "step-000040"
    run = tmp_path / "run"
    shutil.copytree(lab.folder / "whole", run)
    assert set(check_run(run).values()) == {"intact"}
    flips = flip_bits(run, 3000, seed=1)
    assert {"config.toml", "metrics.jsonl", "report.html", "tokens/train.bin"} <= flips.keys()
    total = sum(flips.values(), Counter())
    assert total["unseen"] == 0, flips
    assert total["found"] > 1000


def test_another_tokenizer_is_refused_by_every_reader(lab: Any, halfway: Path) -> None:
    flip(halfway / "tokenizer.json", 12_345)
    with pytest.raises(files.Damaged, match="is not the tokenizer the run began with"):
        load(halfway)
    assert lab.resume(halfway).code == 2
