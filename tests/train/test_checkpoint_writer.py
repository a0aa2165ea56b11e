"""Checkpoints beside the steps: what is written, what waits, and what a failed write leaves."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fenchel.checkpoints import run_checkpoint
from fenchel.files import NoSpace
from fenchel.train import checkpoint_writer
from fenchel.train.checkpoint_writer import spacing

SAVE = run_checkpoint.save


class Gate:
    """In the place of ``run_checkpoint.save``: writes wait until the gate is open."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.threads: list[int] = []

    def __call__(self, *args: Any) -> Path:
        self.threads.append(threading.get_ident())
        assert self.open.wait(60)
        return SAVE(*args)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    monkeypatch.setattr(run_checkpoint, "save", found := Gate())
    return found


def test_steps_go_on_while_a_checkpoint_is_written(small: Callable[..., Any], gate: Gate) -> None:
    s = small(steps=6, save_every=2, evaluate_every=99)
    absent: list[bool] = []

    def look() -> None:
        absent.append(run_checkpoint.folders(s.run.checkpoints) == [])
        gate.open.set()

    s.ear.at = {3: look}
    assert s.loop().train().status == "finished"
    assert absent == [True]
    assert [folder.name for folder in run_checkpoint.folders(s.run.checkpoints)] == [
        "step-000002",
        "step-000004",
        "step-000006",
    ]
    assert threading.get_ident() not in gate.threads


def test_it_holds_the_step_it_is_named_after_though_later_steps_have_moved_the_weights(
    small: Callable[..., Any], gate: Gate
) -> None:
    s = small(steps=4, save_every=2, evaluate_every=99)
    then: dict[str, torch.Tensor] = {}
    s.ear.at = {
        2: lambda: then.update({n: x.clone() for n, x in s.model.state_dict().items()}),
        3: gate.open.set,
    }
    s.loop().train()
    folder = run_checkpoint.folders(s.run.checkpoints)[0]
    assert folder.name == "step-000002"
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == then.keys()
    assert all(torch.equal(saved[name], then[name]) for name in then)
    moved = s.model.state_dict()
    assert not all(torch.equal(moved[name], then[name]) for name in then)


def test_one_too_large_for_a_copy_is_written_before_the_next_step(
    small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "memory_of", lambda _: 1)
    s = small(steps=4, save_every=2, evaluate_every=99)
    seen: list[str] = []
    s.ear.at = {2: lambda: seen.extend(f.name for f in run_checkpoint.folders(s.run.checkpoints))}
    s.loop().train()
    assert seen == ["step-000002"]


def test_a_signal_after_a_write_that_failed_saves_the_same_step_again(
    small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Path:
        monkeypatch.setattr(run_checkpoint, "save", SAVE)
        raise NoSpace("no space: the disk is full.")

    monkeypatch.setattr(run_checkpoint, "save", full)
    s = small(steps=6, save_every=3, evaluate_every=99)
    loop = s.loop()

    def fail_then_save() -> None:
        loop._finish_write(must=False)
        loop._save(must=True)

    s.ear.at = {3: fail_then_save}
    loop.train()
    assert "The run goes on without this checkpoint." in s.ear.said[0]
    assert run_checkpoint.folders(s.run.checkpoints)[0].name == "step-000003"


def test_on_a_gpu_short_runs_save_less_often(small: Callable[..., Any]) -> None:
    """The rule depends on steps and sizes alone, so a resumed run saves the same steps."""
    assert spacing(torch.device("cpu"), 1) == 1
    assert spacing(torch.device("cuda"), 32 * 1024) == 128
    assert spacing(torch.device("cuda"), 2**30) == 1
    s = small(steps=12, save_every=None, evaluate_every=2)
    loop = s.loop()
    loop._spacing = lambda _batch: 5  # type: ignore[method-assign]
    outcome = loop.train()
    names = [folder.name for folder in run_checkpoint.folders(s.run.checkpoints)]
    assert names == ["step-000005", "step-000010", "step-000012"]
    assert f"step-{outcome.progress.best_step:06d}" in names
