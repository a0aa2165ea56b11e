"""fenchel/checkpoints/load.py: weights and settings belong together, or nothing is read."""

import json
import shutil
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fenchel.checkpoints import load, run_checkpoint
from fenchel.checkpoints.directory import CheckpointDirectory
from fenchel.checkpoints.run_checkpoint import FORMAT
from fenchel.config import to_mapping
from fenchel.data import train_tokenizer
from fenchel.files import Damaged, committed
from fenchel.model import ModelConfig, Transformer

module = import_module("fenchel.checkpoints.load")  # the package has a function of that name
CONFIG = ModelConfig(vocabulary=300, context=8, width=16, layers=2)


def write_checkpoint(run: Path, step: int, *, best: int, seed: int) -> None:
    model = Transformer(CONFIG, generator=torch.Generator().manual_seed(seed))
    path = run / "checkpoints" / f"step-{step:06d}"
    with committed(path, {"format": FORMAT, "step": step}) as folder:
        save_file(model.state_dict(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(to_mapping(CONFIG)))
        (folder / "state.json").write_text(json.dumps({"step": step, "best_step": best}))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    train_tokenizer(["some words"], 300).save(str(tmp_path / "tokenizer.json"))
    write_checkpoint(tmp_path, 10, best=10, seed=1)
    write_checkpoint(tmp_path, 20, best=10, seed=2)
    return tmp_path


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    return Transformer(CONFIG, generator=torch.Generator().manual_seed(seed)).state_dict()


def reseal(run: Path, change: Callable[[Path], None]) -> None:
    """Change a copy of the newest checkpoint and seal it again, as a hostile writer would."""
    for folder in sorted((run / "checkpoints").iterdir())[:-1]:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    old = run / "checkpoints" / "step-000020"
    with committed(run / "checkpoints" / "step-000030", {"format": FORMAT, "step": 30}) as folder:
        for name in ("model.safetensors", "config.json", "state.json"):
            (folder / name).write_bytes((old / name).read_bytes())
        change(folder)


@pytest.mark.parametrize(("which", "seed"), [("best", 1), ("newest", 2)])
def test_which_selects_the_checkpoint(run: Path, which: str, seed: int) -> None:
    model, tokenizer, config = load(run, which=which)
    assert config == CONFIG
    assert tokenizer.vocabulary_size <= 300
    assert not model.training
    for name, tensor in weights_of(seed).items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_a_damaged_checkpoint_is_passed_over(run: Path) -> None:
    path = run / "checkpoints" / "step-000020" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.warns(UserWarning, match="step-000020 is skipped"):
        model, _, _ = load(run, which="newest")
    assert torch.equal(model.embed.weight, weights_of(1)["embed.weight"])


@pytest.mark.parametrize("error", [RuntimeError, FileNotFoundError, Damaged])
@pytest.mark.parametrize("which", ["best", "newest"])
def test_a_checkpoint_that_a_run_deletes_while_it_is_read_gives_way_to_the_next(
    run: Path, monkeypatch: pytest.MonkeyPatch, which: str, error: type[Exception]
) -> None:
    """Audit F12: safetensors raises any of the three, according to the moment."""
    read, calls = module._read_run, []

    def rotated(directory: CheckpointDirectory, *more: Any) -> Any:
        calls.append(directory.path)
        if len(calls) == 1:
            write_checkpoint(run, 30, best=30, seed=3)
            shutil.rmtree(directory.path)
            raise error(f"{directory.path} is gone")
        return read(directory, *more)

    monkeypatch.setattr(module, "_read_run", rotated)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _, _ = load(run, which=which)
    assert calls[-1].name == "step-000030"
    assert torch.equal(model.embed.weight, weights_of(3)["embed.weight"])


def test_a_checkpoint_that_is_deleted_while_it_is_checked_is_not_called_damaged(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, calls = run_checkpoint.check, []

    def rotated(folder: Path) -> None:
        calls.append(folder)
        if len(calls) <= 2:  # both, one after the other, before a third is there
            if len(calls) == 2:
                write_checkpoint(run, 30, best=30, seed=3)
            shutil.rmtree(folder)
        check(folder)

    monkeypatch.setattr(run_checkpoint, "check", rotated)
    folder, damaged = run_checkpoint.newest(run / "checkpoints")
    assert folder is not None
    assert (folder.name, damaged) == ("step-000030", {})


def test_an_error_about_a_checkpoint_that_is_still_there_is_raised_at_once(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(module, "_read_run", fail)
    with pytest.raises(RuntimeError, match="something else"):
        load(run)


def test_a_checkpoint_renamed_to_another_step_is_passed_over(run: Path) -> None:
    """Audit F13."""
    checkpoints = run / "checkpoints"
    (checkpoints / "step-000010").rename(checkpoints / "step-000040")
    with pytest.warns(UserWarning, match="step-000040 is skipped"):
        model, _, _ = load(run, which="newest")
    assert torch.equal(model.embed.weight, weights_of(2)["embed.weight"])


def test_a_link_to_a_checkpoint_is_passed_over(run: Path, tmp_path: Path) -> None:
    checkpoints = run / "checkpoints"
    (checkpoints / "step-000020").rename(tmp_path / "elsewhere")
    (checkpoints / "step-000020").symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="step-000020 is skipped: .* is a link"):
        load(run, which="newest")


def test_a_run_without_an_intact_checkpoint_is_refused(run: Path) -> None:
    for path in run.glob("checkpoints/*/model.safetensors"):
        path.write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="is skipped"),
        pytest.raises(ValueError, match="no intact checkpoint"),
    ):
        load(run)


def test_a_damaged_best_checkpoint_gives_way_to_the_newest(run: Path) -> None:
    (run / "checkpoints" / "step-000010" / "config.json").write_text("{}")
    with pytest.warns(UserWarning, match="step-000010 is skipped"):
        model, _, _ = load(run)
    assert torch.equal(model.embed.weight, weights_of(2)["embed.weight"])


def test_the_newest_has_the_largest_number_and_leftovers_are_no_checkpoints(run: Path) -> None:
    write_checkpoint(run, 1_000_000, best=10, seed=3)
    write_checkpoint(run, 999_999, best=10, seed=4)
    (run / "checkpoints" / "step-999999").rename(run / "checkpoints" / "step-999999.tmp-trash")
    model, _, _ = load(run, which="newest")
    assert torch.equal(model.embed.weight, weights_of(3)["embed.weight"])


def test_neither_best_nor_newest_is_refused(run: Path) -> None:
    with pytest.raises(ValueError, match='"best" or "newest"'):
        load(run, which="latest")


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run directory"):
        load(tmp_path / "nowhere")


def test_a_directory_of_neither_kind_gets_the_names_of_the_expected_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither the checkpoints of a run nor the config\.json"):
        load(tmp_path)


def test_an_adapter_in_place_of_a_model_is_named_with_its_flag_and_its_merge(
    tmp_path: Path,
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    merge = rf"is an adapter and no model.*--adapter {tmp_path}, or .* OUT --adapter {tmp_path}\.$"
    with pytest.raises(ValueError, match=merge):
        load(tmp_path)


def test_dtype_casts_the_weights_of_a_run(run: Path) -> None:
    model, _, _ = load(run, dtype=torch.bfloat16)
    exact = weights_of(1)
    assert all(torch.equal(w, exact[name].bfloat16()) for name, w in model.state_dict().items())


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("layers", 3, "lacks blocks.2.attention"),
        ("layers", 1, "no place for"),
        ("layers", 20_000, "too few for 20000 layers"),
        ("layers", -1, "whole number"),
        ("layers", "5", "should be int"),
        ("width", 32, "shape"),
        ("vocabulary", 10**12, "whole number"),
        ("vocabulary", 299, "shape"),
        ("tied", False, "lacks lm_head.weight"),
        ("bias", True, "lacks"),
        ("epsilon", float("nan"), "epsilon"),
        ("unheard_of", 1, "no setting"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    run: Path, setting: str, value: Any, says: str
) -> None:
    def change(folder: Path) -> None:
        settings = {**to_mapping(CONFIG), setting: value}
        (folder / "config.json").write_text(json.dumps(settings))

    reseal(run, change)
    with pytest.raises(ValueError, match=says):
        load(run, which="newest")


def test_a_weight_that_is_not_finite_is_refused_by_name(run: Path) -> None:
    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights["blocks.1.mlp.down.weight"][0, 3] = float("nan")
        save_file(weights, folder / "model.safetensors")

    reseal(run, change)
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp\.down\.weight holds 1 values"):
        load(run, which="newest")


def test_a_file_that_is_no_safetensors_is_refused(run: Path) -> None:
    reseal(
        run, lambda folder: (folder / "model.safetensors").write_bytes(b"\x80\x04K\x01.") and None
    )
    with pytest.raises(ValueError, match="not a safetensors file"):
        load(run, which="newest")
