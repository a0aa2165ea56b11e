"""On a Mac: models run on MPS, what is measured in float64 on the CPU, and a sentence says so.

The device is that of tests/mps.py, which has no float64. Results are those of the CPU.
"""

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from fenchel.cli import main
from fenchel.model import Transformer
from tests.cli.conftest import Ask, tiny_flags
from tests.mps import simulated_mps

SENTENCE = "mps has no float64, in which this is computed; it runs on the CPU."
RUN_THERE = {
    "generate": "--prompt people --max-new-tokens 6 --top-p 0.9",
    "generate steered": "--prompt people --max-new-tokens 6 --emphasise people --token-kl 0.1",
    "generate by divergence": "--prompt people --max-new-tokens 6 --emphasise people "
    "--emphasis-kl 1e-4",
    "generate drafted": "--prompt people --max-new-tokens 6 --cache int8 --draft 3",
    "eval": "--text TEXT --calibration",
}
MEASURED = {
    "inspect": "--text TEXT --max-tokens 8",
    "lens": "--text TEXT --max-tokens 8",
    "ablate": "--text TEXT --max-tokens 8",
    "patch": "nation States",
    "steer": "--text TEXT --max-tokens 8 --word trade --out OUT",
    "certify": "--text TEXT --max-tokens 8 --radius 0.1",
}


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Where a model has computed logits or hidden states since the test began."""
    seen: set[str] = set()
    forward = Transformer.forward

    def watched(model: Transformer, *words: Any, **named: Any) -> Any:
        seen.add(model.lm_head_weight.device.type)
        return forward(model, *words, **named)

    monkeypatch.setattr(Transformer, "forward", watched)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return seen


def numbers(record: Any) -> dict[str, float]:
    """Every number of a record by its path, without what the clock gives."""

    def flat(value: Any, path: str) -> Iterator[tuple[str, float]]:
        if isinstance(value, dict | list):
            named = value.items() if isinstance(value, dict) else enumerate(value)
            for name, one in named:
                yield from flat(one, f"{path}/{name}")
        elif isinstance(value, int | float) and "seconds" not in path:
            yield path, value

    return dict(flat(record, ""))


@pytest.mark.parametrize("name", RUN_THERE | MEASURED)
def test_a_command_gives_the_results_of_the_cpu(
    name: str,
    run_directory: Path,
    text_file: Path,
    tmp_path: Path,
    devices: set[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, flags = name.split()[0], (RUN_THERE | MEASURED)[name]
    found = []
    for there in (False, True):
        places = {"TEXT": str(text_file), "OUT": str(tmp_path / f"{there}.safetensors")}
        given = [places.get(word, word) for word in flags.split()]
        words = [command, str(run_directory), *given, "--json"]
        devices.clear()
        capsys.readouterr()
        with simulated_mps() if there else nullcontext():
            assert main(words) == 0
        shown = capsys.readouterr()
        found.append(json.loads(shown.out))
        assert shown.err.count(SENTENCE) == (there and name in MEASURED)
        assert devices <= {"mps" if there and name in RUN_THERE else "cpu"}
        assert devices or not there  # on the CPU a step of decoding has a forward pass of its own
    assert found[1].get("text") == found[0].get("text")  # of generate what it has written
    assert numbers(found[1]) == pytest.approx(numbers(found[0]), rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("name", MEASURED)
def test_what_is_measured_in_float64_refuses_mps(
    name: str, run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"TEXT": "sotu", "OUT": str(tmp_path / "out")}
    words = [places.get(word, word) for word in MEASURED[name].split()]
    with simulated_mps():
        assert main([name, str(run_directory), *words, "--device", "mps"]) == 2
    assert "mps has no float64, in which this is computed; give cpu" in capsys.readouterr().err


def test_a_run_begins_resumes_is_tuned_and_chats_there(
    text_file: Path,
    tmp_path: Path,
    devices: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Tuned by adapters on conversations, and whole; both measure the checkpoint's attention."""
    run, tuned = tmp_path / "run", tmp_path / "tuned"
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "people"}, {"role": "assistant", "content": "of peace"}]
    chats.write_text((json.dumps({"messages": turns}) + "\n") * 20)
    begin = ["train", "--text", str(text_file), "--out", str(run), *tiny_flags()]
    chat = ["--text", str(chats), "--template", "plain", "--lora", "2", "--out", f"{tuned}-chat"]
    quick = ["--steps", "2", "--set", "train.threads=1", "--json"]
    with simulated_mps():
        assert main([*begin, "--set", "model.context=64", *quick]) == 0
        assert main(["train", "--resume", str(run), "--steps", "3", "--json"]) == 0
        assert main(["tune", str(run), *chat, *quick]) == 0
        assert main(["tune", str(run), "--text", str(text_file), "--out", str(tuned), *quick]) == 0
        monkeypatch.setattr(sys, "stdin", io.StringIO("of\n"))
        capsys.readouterr()
        assert main(["chat", str(run), "--template", "plain", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.strip()
    assert devices == {"mps"}
    for path in (run, tuned, tmp_path / "tuned-chat"):
        assert json.loads((path / "summary.json").read_text())["status"] == "finished"


def test_a_server_answers_from_there(
    run_directory: Path, served: Callable[..., int], devices: set[str]
) -> None:
    """Its model computes in another thread."""

    def use(ask: Ask) -> None:
        status, answer = ask("/v1/completions", {"prompt": "the people", "max_tokens": 3})
        assert status == 200
        assert answer["choices"][0]["text"]

    with simulated_mps():
        assert served([str(run_directory)], use) == 0
    assert devices == {"mps"}
