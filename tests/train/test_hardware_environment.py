"""fenchel/train/hardware.py: what the numbers of a run depend on."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

import fenchel
from fenchel.train.hardware import commit, device_name, environment, select_device


def test_it_is_plain_and_complete() -> None:
    found = environment(torch.device("cpu"))
    assert json.loads(json.dumps(found)) == found
    assert found["torch"] == torch.__version__
    assert found["fenchel"] == fenchel.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["device"]


def test_without_a_repository_or_git_the_commit_is_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fenchel, "__file__", str(tmp_path / "fenchel" / "__init__.py"))
    assert commit() == "unknown"
    (tmp_path / ".git").mkdir()
    assert commit() == "unknown"  # git finds nothing there

    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", absent)
    assert commit() == "unknown"


def test_a_system_without_cpuinfo_still_names_its_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(*_: object, **__: object) -> str:
        raise FileNotFoundError("/proc/cpuinfo")

    monkeypatch.setattr(Path, "read_text", absent)
    assert device_name(torch.device("cpu"))


@pytest.mark.parametrize("name", ["abacus", "cpu:x", "meta", ""])
def test_a_device_that_cannot_hold_numbers_is_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(ValueError, match=f"there is no device '{name}' here; give "):
        select_device(name)


def test_the_device_chosen_by_itself_can_be_used() -> None:
    device = select_device()
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert torch.ones(2, device=device).sum() == 2
