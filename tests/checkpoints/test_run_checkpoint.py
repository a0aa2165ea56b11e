"""fenchel/checkpoints/run_checkpoint.py: complete and verified, or not there."""

import json
import os
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fenchel import files
from fenchel.checkpoints import run_checkpoint
from fenchel.checkpoints.run_checkpoint import Progress, check, folders, newest, restore, rotate
from fenchel.files import Damaged, NoSpace, verify
from fenchel.optim import CombinedOptimiser

PROGRESS = Progress(step=6, tokens=192, skipped=(2, 5), loss_sum=0.1, loss_count=1, best=1 / 3)


def saved(s: Any, progress: Progress = PROGRESS) -> Path:
    """A checkpoint of a run ``s`` (see conftest) that has taken two steps."""
    s.stepper(0)
    s.stepper(1)
    return run_checkpoint.save(
        s.run.checkpoints, progress, s.model.state_dict(), s.optimiser.state_dict(), s.settings
    )


def several(s: Any, *steps: int) -> list[Path]:
    return [saved(s, Progress(step=step)) for step in steps]


def reseal(folder: Path, **header: Any) -> None:
    """Make a folder's manifest right again after its files were changed."""
    manifest = json.loads((folder / "manifest.json").read_text()) | header
    shutil.move(folder, folder.with_name("old"))
    manifest.pop("seal")
    manifest.pop("files")
    with files.committed(folder, manifest) as fresh:
        for file in folder.with_name("old").iterdir():
            if file.name != "manifest.json":
                shutil.copy(file, fresh)
    shutil.rmtree(folder.with_name("old"))


# --- saving and restoring


@pytest.mark.parametrize("optimiser", ["muon", "adamw"])
def test_what_is_restored_is_what_was_saved_bit_for_bit(
    small: Callable[..., Any], optimiser: str
) -> None:
    s = small(optim={"optimiser": optimiser})
    folder = saved(s)
    check(folder)
    other = small("other", seed=2, optim={"optimiser": optimiser})
    assert other.bits() != s.bits()
    assert restore(folder, other.model, other.optimiser, other.settings) == PROGRESS
    assert other.bits() == s.bits()


def test_the_rates_of_today_are_kept(small: Callable[..., Any]) -> None:
    folder = saved(small())
    other = small("other", optim={"learning_rate": 0.123})
    restore(folder, other.model, other.optimiser, other.settings)
    assert other.optimiser.param_groups[-1]["lr"] == 0.123


def test_an_optimiser_without_memory_is_saved_too(small: Callable[..., Any]) -> None:
    s = small()
    folder = run_checkpoint.save(
        s.run.checkpoints, Progress(), s.model.state_dict(), s.optimiser.state_dict(), s.settings
    )
    assert restore(folder, s.model, s.optimiser, s.settings) == Progress()


def test_what_is_not_a_tensor_comes_back_too() -> None:
    state = {"0": {"state": {3: {"step": 7, "name": "a.b", "m": torch.ones(2)}}}}
    tensors, rest = run_checkpoint.flatten(state)
    assert tensors.keys() == {"0.3.m"}
    assert run_checkpoint.unflatten(tensors, json.loads(json.dumps(rest))) == state


def test_tensors_that_lie_strided_in_memory_are_saved(tmp_path: Path) -> None:
    weights = {"w": torch.arange(6.0).view(2, 3).T}
    folder = run_checkpoint.save(tmp_path, PROGRESS, weights, CombinedOptimiser().state_dict(), {})
    torch.testing.assert_close(load_file(folder / "model.safetensors")["w"], weights["w"])


def test_a_checkpoint_left_by_another_time_line_is_set_aside(small: Callable[..., Any]) -> None:
    s = small()
    folder = saved(s)
    before = (folder / "model.safetensors").read_bytes()
    assert saved(s) == folder
    assert (folder / "model.safetensors").read_bytes() != before
    aside = folder.with_name("step-000006.damaged")
    assert (aside / "model.safetensors").read_bytes() == before
    assert folders(s.run.checkpoints) == [folder]
    saved(s)  # and again, over what stands aside


def test_files_are_readable_by_others(small: Callable[..., Any]) -> None:
    folder = saved(small())
    readable = folder.stat().st_mode & 0o666
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {readable}


# --- no space


def test_a_checkpoint_that_will_not_fit_is_not_begun(
    small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = small()
    usage = shutil.disk_usage(s.run.path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(NoSpace, match=r"0\.0 MiB free and 0\.1 MiB are needed"):
        saved(s)
    assert not list(s.run.checkpoints.iterdir())


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_a_disk_that_fills_while_writing_leaves_the_last_checkpoint_alone(
    small: Callable[..., Any], share: float
) -> None:
    """A real limit on the size of files: safetensors' own error becomes one of ours."""
    s = small()
    (before,) = several(s, 3)
    size = (before / "model.safetensors").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * size), limits[1]))
    try:
        with pytest.raises(NoSpace, match=r"a checkpoint of 0\.0 MiB does not fit in .*checkpoi"):
            saved(s)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(s.run.checkpoints.iterdir()) == [before]
    check(before)
    check(saved(s))


def test_a_missing_folder_is_an_ordinary_storage_error(small: Callable[..., Any]) -> None:
    s = small()
    shutil.rmtree(s.run.path)
    with pytest.raises(FileNotFoundError):
        saved(s)


def test_checkpoints_deleted_under_a_run_are_a_folder_again(small: Callable[..., Any]) -> None:
    s = small()
    s.run.checkpoints.rmdir()
    run_checkpoint.check(saved(s))


def test_an_error_of_safetensors_keeps_its_errno(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run_checkpoint.write_tensors({"a": torch.ones(1)}, tmp_path / "absent" / "a.safetensors")


# --- choosing


def test_newest_is_the_newest_intact_checkpoint_and_lists_the_damaged(
    small: Callable[..., Any],
) -> None:
    s = small()
    three, six, nine = several(s, 3, 6, 9)
    assert newest(s.run.checkpoints) == (nine, {})
    (nine / "state.json").write_text("{}")
    found, wrong = newest(s.run.checkpoints)
    assert found == six
    assert list(wrong) == [nine]
    assert "state.json has 2 bytes" in wrong[nine]
    (six / "manifest.json").unlink()
    found, wrong = newest(s.run.checkpoints)
    assert found == three
    assert list(wrong) == [nine, six]
    shutil.rmtree(three)
    assert newest(s.run.checkpoints)[0] is None
    assert newest(s.run.path / "nowhere") == (None, {})


def test_order_is_by_number_and_not_by_letters_or_by_time(small: Callable[..., Any]) -> None:
    s = small()
    several(s, 1_000_000, 999_999, 20)
    assert [f.name for f in folders(s.run.checkpoints)] == [
        "step-000020",
        "step-999999",
        "step-1000000",
    ]


def test_what_has_another_name_is_no_checkpoint(small: Callable[..., Any]) -> None:
    s = small()
    for name in ("step-000005.tmp-77", "step-000005.damaged", "step-five", "step-", "latest"):
        (s.run.checkpoints / name).mkdir()
    assert folders(s.run.checkpoints) == []


def test_a_checkpoint_under_the_name_of_another_step_is_refused(small: Callable[..., Any]) -> None:
    s = small()
    three, six = several(s, 3, 6)
    three.rename(six.with_name("step-000009"))
    found, wrong = newest(s.run.checkpoints)
    assert found == six
    assert "holds step 3" in wrong[six.with_name("step-000009")]


def test_a_newer_format_is_refused_and_not_passed_over(small: Callable[..., Any]) -> None:
    s = small()
    _, six = several(s, 3, 6)
    reseal(six, format=3)
    with pytest.raises(ValueError, match=r"has format 3.*use the newer fenchel") as error:
        newest(s.run.checkpoints)
    assert not isinstance(error.value, Damaged)


@pytest.mark.parametrize(
    "name", ["model.safetensors", run_checkpoint.OPTIMISER, run_checkpoint.STATE]
)
def test_files_exchanged_between_checkpoints_are_found(
    small: Callable[..., Any], name: str
) -> None:
    s = small()
    three, six = several(s, 3, 6)
    spare = s.run.path / "spare"
    (three / name).rename(spare)
    (six / name).rename(three / name)
    spare.rename(six / name)
    assert newest(s.run.checkpoints)[0] is None
    (six / name).unlink()
    with pytest.raises(Damaged, match="is missing"):
        check(six)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimiser.safetensors", "config.json", "state.json"]
)
def test_a_file_cut_anywhere_is_refused_by_name(small: Callable[..., Any], name: str) -> None:
    folder = saved(small())
    size = (folder / name).stat().st_size
    for length in (size - 1, size // 2, 1, 0):
        os.truncate(folder / name, length)
        with pytest.raises(Damaged, match=f"{name} has {length} bytes, and {size} in its manifest"):
            check(folder)


def test_two_hundred_flipped_bits_are_two_hundred_times_found(small: Callable[..., Any]) -> None:
    """F8: over all files of a checkpoint, each bit as likely as any other."""
    folder = saved(small())
    draw = random.Random(8)
    every = sorted(folder.iterdir())
    sizes = [file.stat().st_size for file in every]
    found = 0
    for file in draw.choices(every, sizes, k=200):
        whole = file.read_bytes()
        torn = bytearray(whole)
        torn[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        file.write_bytes(torn)
        try:
            check(folder)
        except Damaged as error:
            found += file.name in str(error)
        file.write_bytes(whole)
    assert found == 200
    check(folder)


# --- what does not fit is refused before anything is filled


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    reseal(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w.pop("norm.weight"), "lacks norm.weight"),
        (lambda w: w.update(extra=torch.ones(1)), "holds extra"),
        (lambda w: w.update({"norm.weight": torch.ones(9)}), r"norm.weight has shape \[9\]"),
        (lambda w: w.update({"norm.weight": torch.ones(8).bfloat16()}), "is of BF16"),
        (
            lambda w: w["blocks.1.mlp.up.weight"].view(-1)[:3].fill_(float("nan")),
            "blocks.1.mlp.up.weight holds 3 values that are not finite",
        ),
        (lambda w: w["embed.weight"][0, 0].fill_(-torch.inf), "embed.weight holds 1 values"),
    ],
)
def test_weights_that_are_not_the_models_are_refused_with_their_name(
    small: Callable[..., Any], change: Callable[[dict], object], says: str
) -> None:
    folder = saved(small())
    change_weights(folder, change)
    check(folder)
    other = small("other", seed=2)
    before = other.bits()
    with pytest.raises(ValueError, match=says):
        restore(folder, other.model, other.optimiser, other.settings)
    assert other.bits() == before


def test_settings_with_weights_of_equal_shapes_must_agree_too(small: Callable[..., Any]) -> None:
    s = small()
    folder = saved(s)
    with pytest.raises(ValueError, match="has heads=2, the settings of the run have heads=4"):
        restore(folder, s.model, s.optimiser, {**s.settings, "heads": 4})


def test_a_pattern_of_layers_is_the_same_setting_when_it_comes_from_a_file(
    small: Callable[..., Any],
) -> None:
    s = small()
    s.settings |= {"windows": (3, 0), "layer_choices": ()}
    assert restore(saved(s), s.model, s.optimiser, s.settings) == PROGRESS
    with pytest.raises(ValueError, match="has windows="):
        restore(saved(s), s.model, s.optimiser, s.settings | {"windows": (3,)})


@pytest.mark.parametrize(("wrote", "reads"), [("muon", "adamw"), ("adamw", "muon")])
def test_the_memory_of_another_optimiser_is_refused(
    small: Callable[..., Any], wrote: str, reads: str
) -> None:
    folder = saved(small(optim={"optimiser": wrote}))
    other = small("other", optim={"optimiser": reads})
    with pytest.raises(ValueError, match="saved by another optimiser"):
        restore(folder, other.model, other.optimiser, other.settings)


@pytest.mark.parametrize(
    ("optimiser", "name", "value", "says"),
    [
        ("adamw", "exp_avg", torch.ones(3), r"of shape \[.+\], got \[3\]"),
        ("adamw", "exp_avg_sq", torch.ones(()), r"of shape \[.+\], got \[\]"),
        ("adamw", "exp_avg", torch.ones(3, dtype=torch.int64), r"got \[3\]"),
        ("adamw", "step", torch.ones(2), r"of shape \[\], got \[2\]"),
        ("muon", "momentum", torch.ones(3, 3), r"of shape \[.+\], got \[3, 3\]"),
        ("sgd", "momentum_buffer", torch.ones(1), r"of shape \[.+\], got \[1\]"),
        ("score", "score_bound", torch.ones(3), r"of shape \[2\], got \[3\]"),
        ("score", "key_momentum", torch.ones(2), r"of shape \[2, \d+, \d+\], got \[2\]"),
        ("trust", "score_bound", torch.ones(3), r"of shape \[2\], got \[3\]"),
        ("trust", "momentum", torch.ones(3), r"of shape \[.+\], got \[3\]"),
    ],
)
def test_a_sealed_state_of_the_optimiser_with_other_shapes_is_refused(
    small: Callable[..., Any], optimiser: str, name: str, value: Tensor, says: str
) -> None:
    folder = saved(small(optim={"optimiser": optimiser}))
    tensors = load_file(folder / "optimiser.safetensors")
    named = next(key for key in sorted(tensors) if key.endswith(f".{name}"))
    save_file({**tensors, named: value}, folder / "optimiser.safetensors")
    reseal(folder)
    check(folder)
    other = small("other", seed=2, optim={"optimiser": optimiser})
    before = [p.clone() for p in other.model.parameters()]
    with pytest.raises(ValueError, match=f"{name} of parameter .*{says}"):
        restore(folder, other.model, other.optimiser, other.settings)
    assert all(map(torch.equal, before, other.model.parameters()))


def test_a_sealed_state_of_the_optimiser_without_tensors_is_refused(
    small: Callable[..., Any],
) -> None:
    s = small(optim={"optimiser": "adamw"})
    folder = saved(s)
    state = json.loads((folder / "state.json").read_text())
    state["optimiser"]["0.0.exp_avg"] = 5
    (folder / "state.json").write_text(json.dumps(state))
    reseal(folder)
    with pytest.raises(ValueError, match=r"optimiser\.safetensors: .*numbers of shape .* got 5"):
        restore(folder, s.model, s.optimiser, s.settings)


def test_a_state_of_wrong_types_is_refused(small: Callable[..., Any]) -> None:
    s = small()
    folder = saved(s)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "step": "six"}))
    reseal(folder)
    with pytest.raises(ValueError, match="'step' should be int"):
        restore(folder, s.model, s.optimiser, s.settings)


def test_what_is_no_safetensors_file_is_damage(small: Callable[..., Any]) -> None:
    s = small()
    folder = saved(s)
    (folder / "model.safetensors").write_bytes(b"pickle")
    reseal(folder)
    with pytest.raises(Damaged, match="not a safetensors file"):
        restore(folder, s.model, s.optimiser, s.settings)


# --- rotation


def steps(path: Path) -> list[str]:
    return sorted(folder.name for folder in path.iterdir())


def test_the_newest_and_the_best_stay(small: Callable[..., Any]) -> None:
    s = small()
    several(s, 1, 2, 3, 4, 5)
    rotate(s.run.checkpoints, keep=2, best_step=2)
    assert steps(s.run.checkpoints) == ["step-000002", "step-000004", "step-000005"]
    rotate(s.run.checkpoints, keep=2, best_step=5)
    assert steps(s.run.checkpoints) == ["step-000004", "step-000005"]
    rotate(s.run.checkpoints, keep=9, best_step=None)
    assert steps(s.run.checkpoints) == ["step-000004", "step-000005"]


def test_what_was_set_aside_goes_when_its_step_has_been_taken_again(
    small: Callable[..., Any],
) -> None:
    s = small()
    for folder in several(s, 4, 8):
        run_checkpoint.set_aside(folder)
    rotate(s.run.checkpoints, keep=2, best_step=None)
    assert steps(s.run.checkpoints) == ["step-000004.damaged", "step-000008.damaged"]
    several(s, 6)
    rotate(s.run.checkpoints, keep=2, best_step=None)
    assert steps(s.run.checkpoints) == ["step-000006", "step-000008.damaged"]


def test_one_that_cannot_be_deleted_stops_nothing(
    small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = small()
    several(s, 1, 2, 3, 4)
    discard = files.discard

    def stubborn(folder: Path) -> None:
        if folder.name == "step-000001":
            raise PermissionError(13, "Permission denied")
        discard(folder)

    monkeypatch.setattr(run_checkpoint, "discard", stubborn)
    rotate(s.run.checkpoints, keep=2, best_step=None)
    assert steps(s.run.checkpoints) == ["step-000001", "step-000003", "step-000004"]
    assert verify(s.run.checkpoints / "step-000004")["step"] == 4


def test_a_folder_with_another_file_is_not_rotated_away(
    small: Callable[..., Any],
) -> None:
    s = small()
    first, second, _ = several(s, 1, 2, 3)
    (first / "notes.txt").write_text("mine")
    run_checkpoint.rotate(s.run.checkpoints, keep=1, best_step=None)
    assert (first / "notes.txt").exists()
    assert not second.exists()
