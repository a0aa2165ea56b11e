"""fenchel/pipeline/preparation.py: a run builds one model, and timing steps moves no bit of it."""

import json
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fenchel import evaluate, pipeline
from fenchel.checkpoints import load, run_checkpoint
from fenchel.data import train_tokenizer
from fenchel.data.config import LARGEST_DEFAULT
from fenchel.distributed.processes import ALONE
from fenchel.model import Transformer
from fenchel.pipeline import preparation
from fenchel.pipeline.config import settings
from fenchel.pipeline.task import Task
from fenchel.pipeline.tuning import TuneTask
from fenchel.torch_internals import has_forward_hooks
from fenchel.train import RunDir, Stepper, StepTime, hardware, loop

SMALL: dict[str, Any] = {
    "text": {"vocabulary": 280},
    "model": {"context": 16, "width": 16, "heads": 2, "layers": 2, "dropout": 0.1},
    "train": {"batch": 2, "steps": 3, "threads": 1, "precision": "float32"},
}


class Silent:
    def step(self, step: int, steps: int) -> None: ...

    def log(self, metrics: Mapping[str, Any]) -> None: ...

    def message(self, text: str) -> None: ...

    def progress(self, what: str, done: int, total: int) -> None: ...


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("she sells sea shells on the sea shore;\n" * 60)
    return path


class Stops(Silent):
    """Ends the run by a signal after a step."""

    def __init__(self, after: int) -> None:
        self.after = after

    def step(self, step: int, steps: int) -> None:  # noqa: ARG002
        if step == self.after:
            signal.raise_signal(signal.SIGTERM)


def config_of(text: Path | None = None, **sections: Mapping[str, Any]) -> pipeline.RunConfig:
    mapping = {name: {**values, **sections.get(name, {})} for name, values in SMALL.items()}
    if text is not None:
        mapping["text"]["source"] = str(text)
    return pipeline.settings({**mapping, "optim": sections.get("optim", {})})


@pytest.mark.parametrize(
    ("optimiser", "model"),
    [
        *((name, {}) for name in ("muon", "score", "trust", "adamw")),
        *((name, {"experts": 3}) for name in ("muon", "score", "trust")),
        ("muon", {"sigma_reparam": True}),
        ("muon", {"tied": False}),
    ],
)
def test_timing_steps_leaves_the_model_as_it_was(optimiser: str, model: dict[str, Any]) -> None:
    config = config_of(model=model, optim={"optimiser": optimiser}, train={"steps": None})
    ids = np.random.default_rng(0).integers(280, size=200).astype("uint16")
    batches, ours = preparation.build_batches(config, ids), preparation.build_model(config)
    moved = []
    hook = ours.register_forward_hook(lambda *_: moved.append(ours.embed.weight.sum().item()))
    preparation.resolve_steps(config, ours, batches, Silent())
    hook.remove()
    assert len(set(moved)) > 1  # or nothing was there to be restored
    fresh = preparation.build_model(config).state_dict()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, fresh[name]), name
    assert all(p.grad is None for p in ours.parameters())
    assert not any(map(has_forward_hooks, ours.modules()))


@pytest.mark.parametrize("rows", [None, 20_000])
@pytest.mark.parametrize("trained", [True, False])
def test_a_model_has_the_rows_of_its_tokenizer_unless_more_are_given(
    text: Path, tmp_path: Path, trained: bool, rows: int | None
) -> None:
    wide = LARGEST_DEFAULT + 100  # more than a tokenizer has that is trained without a number
    of_text, of_model = {"source": str(text)}, dict(SMALL["model"])
    if not trained:
        numbers = np.random.default_rng(0).integers(10**6, 10**7, 20_000)
        train_tokenizer([" ".join(map(str, numbers))], wide).save(str(tmp_path / "wide.json"))
        of_text["tokenizer"] = str(tmp_path / "wide.json")
    if rows is not None:
        of_model["vocabulary"] = rows
    run = tmp_path / "run"
    pipeline.begin(settings({**SMALL, "text": of_text, "model": of_model}), run, Silent())
    model, tokenizer, _ = load(run)
    assert (tokenizer.vocabulary_size == wide) != trained
    assert len(model.embed.weight) == (rows or tokenizer.vocabulary_size)


def test_evaluations_are_in_the_precision_of_training_until_the_last(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int | None, bool]] = []

    def score(*given: Any, limit: int | None, **settings: Any) -> Any:
        seen.append((limit, torch.is_autocast_enabled("cpu")))
        return evaluate.score(*given, limit=limit, **settings)

    monkeypatch.setattr(import_module("fenchel.pipeline.task"), "score", score)
    config = config_of(text, train={"precision": "bfloat16", "evaluate_tokens": 8})
    pipeline.begin(config, tmp_path / "run", Silent())
    assert seen == [(8, True)] * 3 + [(None, False)]


def test_a_report_of_the_machine_times_one_step_per_thread_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(Stepper, "__call__", lambda *_: threads.append(torch.get_num_threads()))
    monkeypatch.setattr(hardware, "cores", lambda: 2)
    before = torch.get_num_threads()
    preparation.speed()
    assert threads == [2, 2, 1, 1]  # one to warm up, one that counts
    monkeypatch.setattr(preparation, "SPEED_SECONDS", 0.0)
    preparation.speed()
    assert threads[4:] == [2]  # a slow machine: no further one
    torch.set_num_threads(before)


def timed_as(seconds: float) -> Callable[..., StepTime]:
    """Takes the step that is to be timed, twice, and reports another time."""

    def time_steps(step: Callable[[], object], **_: Any) -> StepTime:
        step()
        step()
        return StepTime(1, seconds)

    return time_steps


@pytest.mark.parametrize("optimiser", ["muon", "score"])
def test_a_budget_is_a_deadline_and_the_schedule_ends_with_the_run(
    optimiser: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that becomes 10 times slower after its steps were timed: a clock of our own."""
    now = [0.0]
    clock = type("Clock", (), {"perf_counter": staticmethod(lambda: now[0])})
    monkeypatch.setattr(loop, "time", clock)
    call = Stepper.__call__

    def slow(self: Stepper, step: int) -> Any:
        now[0] += 10.0 if step >= 5 else 1.0
        return call(self, step)

    monkeypatch.setattr(Stepper, "__call__", slow)
    monkeypatch.setattr(preparation, "time_steps", timed_as(1.0))
    train = {"steps": None, "budget": 60.0, "log_every": 1}
    config = config_of(text, optim={"optimiser": optimiser, "warmup": 0.0}, train=train)
    now[0] = 0.0
    outcome = pipeline.begin(config, tmp_path / "run", Silent())
    assert outcome.status == "finished"
    done = outcome.progress.step
    assert 9 <= done <= 10  # 5 steps of 1 s and 4 or 5 of 10 s; 57 were planned
    run = RunDir(tmp_path / "run")
    assert run.read_settings()["train"]["steps"] == done
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    rates = [line["train/learning_rate"] for line in lines if "train/learning_rate" in line]
    assert rates[-1] < 0.35 * rates[0]  # the last step of the schedule, not its plateau
    assert json.loads((run.path / "summary.json").read_text())["steps"] == done
    again = pipeline.resume(run.path, Silent(), changes={})
    assert (again.status, again.progress.step) == ("finished", done)


def test_a_run_stopped_within_its_budget_goes_on_by_the_recorded_plan(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies of it end with the same bits, however long their steps take."""
    monkeypatch.setattr(preparation, "time_steps", timed_as(1.0))
    plans = iter([7, 7, 4, 4, 4, 4, 4, 4])
    monkeypatch.setattr(loop.Loop, "_affordable_steps", lambda *_: next(plans))
    stop = Stops(after=3)
    train = {"steps": None, "budget": 60.0, "save_every": 1}
    outcome = pipeline.begin(config_of(text, train=train), tmp_path / "run", stop)
    assert (outcome.status, outcome.progress.step) == ("interrupted", 3)
    assert RunDir(tmp_path / "run").read_settings()["train"]["steps"] == 7
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    monkeypatch.setattr(loop.Loop, "_affordable_steps", lambda *_: pytest.fail("no deadline"))
    for name in ("run", "copy"):
        resumed = pipeline.resume(tmp_path / name, Silent(), changes={})
        assert (resumed.status, resumed.progress.step) == ("finished", 7)
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "copy")


def test_a_run_builds_one_model_and_trains_as_if_no_step_had_been_timed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[bool] = []
    build: Callable[..., None] = Transformer.__init__

    def counted(self: Transformer, *args: Any, **keywords: Any) -> None:
        build(self, *args, **keywords)
        built.append(not self.embed.weight.is_meta)

    monkeypatch.setattr(Transformer, "__init__", counted)
    monkeypatch.setattr(preparation, "time_steps", timed_as(20.0))
    by_time = config_of(text, train={"steps": None, "budget": 65.0})
    assert pipeline.begin(by_time, tmp_path / "timed", Silent()).status == "finished"
    assert built.count(True) == 1  # the others are shapes, for the memory
    monkeypatch.delattr(preparation, "time_steps")  # steps that are given are not timed
    pipeline.begin(config_of(text), tmp_path / "not", Silent())
    assert weights_of(tmp_path / "timed") == weights_of(tmp_path / "not")
    built.clear()
    changes = {"train": {"steps": 4}}
    assert pipeline.resume(tmp_path / "timed", Silent(), changes=changes).progress.step == 4
    assert built == [False, False, False, True]  # shapes for memory and disk, then the model
    with pytest.raises(ValueError, match="a step needs"):
        pipeline.resume(tmp_path / "timed", Silent(), changes={"train": {"batch": 10**9}})


@pytest.mark.parametrize(
    ("optim", "says"),
    [
        ({}, "change the scores by 0.7326 at the peak of the schedule, not 1:"),
        ({"score_rate": 0.2}, None),
    ],
)
def test_a_resume_with_another_number_of_steps_reports_the_new_score_rate(
    optim: dict[str, Any], says: str | None, text: Path, tmp_path: Path
) -> None:
    """Half of the radius for 6 steps, then 2.3 over the schedule "hold" of 14 steps."""
    config = config_of(text, train={"steps": 6}, optim={"optimiser": "score", **optim})
    pipeline.begin(config, tmp_path / "run", Silent())
    said: list[str] = []

    class Ear(Silent):
        def message(self, text: str) -> None:
            said.append(text)

    outcome = pipeline.resume(tmp_path / "run", Ear(), changes={"train": {"steps": 14}})
    assert outcome.progress.step == 14
    assert [line for line in said if "peak" in line] == [
        line for line in said if says is not None and says in line
    ]
    assert any("peak" in line for line in said) == (says is not None)


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"layers": 7, "windows": (4, 4, 0)},
        {"layers": 6, "distinct_layers": 3},
        {"experts": 3, "tied": False, "positions": "learned"},
        {"layers": 6, "rotary_layers": (1, 1, 1, 0)},
        {"layers": 5, "experts": 3, "dense_layers": (1, 0, 0)},
        {"layers": 6, "windows": (4, 0), "shared_kv_layers": 3},
        {"layers": 6, "windows": (4, 4, 0), "full_head_size": 64},
    ],
    ids=str,
)
def test_sizes_that_cannot_fit_are_refused_by_a_count_that_is_exact_and_low(
    model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(model=model, train={"accumulate": 1})
    monkeypatch.setattr(preparation, "memory_of", lambda _: 1000)
    with pytest.raises(ValueError, match=r"a step needs .* of memory at least") as refused:
        preparation.require_memory(config)
    said = re.search(
        r"for ([\d,]+) parameters and the rest for ([\d,]+) tokens", str(refused.value)
    )
    assert said is not None
    built = preparation.build_model(config)
    count = sum(p.numel() for p in built.parameters())
    assert int(said[1].replace(",", "")) == count
    assert int(said[2].replace(",", "")) == config.train.batch * config.model.context
    # What autograd itself stores for one step is more than what was counted.
    stored: dict[int, int] = {}

    def store(tensor: torch.Tensor) -> torch.Tensor:
        stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.zeros(config.train.batch, config.model.context, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor):
        loss = built(ids).sum()
    activations = sum(stored.values()) - 4 * count
    assert loss.requires_grad
    for there, fits in ((12 * count + activations, True), (12 * count - 1, False)):
        monkeypatch.setattr(preparation, "memory_of", lambda _, there=there: there)
        with nullcontext() if fits else pytest.raises(ValueError, match="a step needs"):
            preparation.require_memory(config)


def test_recomputed_blocks_are_counted_by_their_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted is what a pass that is recomputed keeps, at least, and one block."""
    model, needs = {"layers": 6}, {}
    for recompute in ("none", "block"):
        config = config_of(model=model, train={"recompute": recompute, "accumulate": 1})
        low, high, sentence = 0, 2**26, ""
        while low < high:  # the least memory that is not refused
            there = (low + high) // 2
            monkeypatch.setattr(preparation, "memory_of", lambda _, there=there: there)
            try:
                preparation.require_memory(config)
                high = there
            except ValueError as error:
                low, sentence = there + 1, str(error)
        needs[recompute] = low, sentence
    c, tokens = config.model, config.train.batch * config.model.context
    per_layer = 2 * c.width + c.heads * c.head_width + c.mlp_width
    less = needs["none"][0] - needs["block"][0]
    assert less == 2 * tokens * (6 * per_layer - (6 * c.width + per_layer))
    assert needs["none"][1].endswith('more train.accumulate, or train.recompute="block".')
    assert needs["block"][1].endswith("or more train.accumulate.")


def weights_of(run: Path) -> dict[str, bytes]:
    folder, _ = run_checkpoint.newest(run / "checkpoints")
    assert folder is not None
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def test_the_start_of_a_run_is_its_setting_and_the_same_again() -> None:
    ids = np.random.default_rng(0).integers(16, size=500)
    model = {"vocabulary": 32, "width": 16, "layers": 1}

    def started(**train: str) -> dict[str, torch.Tensor]:
        config = settings({"model": model, "train": train})
        built = preparation.build_model(config)
        preparation.start_weights(config, built, ids, torch.device("cpu"))
        return built.state_dict()

    drawn = preparation.build_model(settings({"model": model})).state_dict()
    counted, again = started(), started()
    assert {name for name in drawn if not torch.equal(drawn[name], counted[name])} == {
        "embed.weight",
        "lm_head.weight",
    }
    assert all(torch.equal(counted[name], again[name]) for name in drawn)
    for train in ({"init": "random"}, {"loss": "sparsemax"}):
        same = started(**train)
        assert all(torch.equal(drawn[name], same[name]) for name in drawn), train


CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_step_has_as_few_micro_batches_as_the_memory_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(train={"batch": 12, "precision": "float32"})
    model, sizes = preparation.build_model(config), {}
    for parts in (1, 2, 3, 4, 6, 12):
        one = replace(config, train=replace(config.train, accumulate=parts))
        sizes[parts] = sum(preparation.memory(one, model, CPU).values())
    assert sorted(sizes.values(), reverse=True) == list(sizes.values())

    def chosen(room: float, given: Any = config) -> int | None:
        weights = sum(p.nbytes for p in model.parameters())
        free = room / preparation.ROOM - weights
        monkeypatch.setattr(preparation, "free_memory", lambda _: free)
        return preparation.divide_step(given, model, CPU).train.accumulate

    for parts, size in sizes.items():
        assert chosen(size + 1) == parts
    assert chosen(sizes[12] / 2) == 12  # refused, if it must be, where memory runs out
    assert chosen(sizes[12], replace(config, train=replace(config.train, accumulate=2))) == 2
    in_cells = replace(config, train=replace(config.train, cells=4))
    assert chosen(sizes[12], in_cells) is None


def test_the_micro_batches_of_a_run_are_recorded(text: Path, tmp_path: Path) -> None:
    pipeline.begin(config_of(text), tmp_path / "run", Silent())
    train = RunDir(tmp_path / "run").read_settings()["train"]
    assert [train[name] for name in ("accumulate", "compile", "cuda_graph")] == [1, False, False]


@pytest.mark.parametrize(
    ("given", "compiles"),
    [
        ({}, True),
        ({"model": {"choice": "entmax"}}, True),
        ({"model": {"choice": "hard"}}, False),
        ({"model": {"experts": 4}}, False),
        ({"model": {"choice": "entmax", "entmax_alpha_learned": True}}, False),
        ({"train": {"qk_clip": 30.0}}, False),
        ({"train": {"entropy_floor": 1.0}}, False),
        ({"train": {"cells": 4}}, False),
        ({"train": {"compile": False}}, False),
    ],
)
def test_blocks_are_compiled_where_a_gpu_is_busy_for_a_minute(
    given: dict[str, Any], compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "compiler_works", lambda _: True)
    config = settings({"preset": "gpt2", **given})

    def decided(steps: int, device: torch.device = GPU) -> bool:
        return preparation.compiles_blocks(config, device, steps, ALONE)

    assert decided(600) is compiles
    assert not decided(60)
    assert not decided(600, CPU)
    monkeypatch.setattr(preparation, "compiler_works", lambda _: False)
    assert not decided(600)


def test_compiling_that_is_asked_for_needs_no_gpu() -> None:
    config = settings({"train": {"compile": True}})
    assert preparation.compiles_blocks(config, CPU, 1, ALONE)


@pytest.mark.parametrize(
    ("given", "captured"),
    [
        ({}, True),
        ({"preset": "tinyllama", "train": {"batch": 4}}, True),
        ({"preset": "tinyllama", "train": {"batch": 64}}, False),
        ({"model": {"experts": 4}}, False),
        ({"model": {"choice": "hard"}}, False),
        ({"train": {"entropy_floor": 1.0}}, False),
        ({"train": {"cells": 4}}, False),
        ({"train": {"recompute": "block"}}, False),
        ({"train": {"precision": "float16"}}, False),
        ({"model": {"sigma_reparam": True}}, False),
        ({"optim": {"optimiser": "trust"}}, False),
        ({"train": {"cuda_graph": False}}, False),
        ({"train": {"cuda_graph": True, "batch": 4096}}, True),
        ({"train": {"cuda_graph": True, "cells": 4}}, False),
    ],
)
def test_short_steps_on_a_gpu_are_graphs(given: dict[str, Any], captured: bool) -> None:
    config = settings({"preset": "gpt2", **given})
    assert preparation.captures_steps(config, GPU, ALONE) is captured
    assert not preparation.captures_steps(config, CPU, ALONE)


@pytest.mark.parametrize("captured", [True, False])
def test_a_run_says_whether_its_steps_are_graphs(
    captured: bool, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    callback = Silent()
    monkeypatch.setattr(callback, "message", said.append, raising=False)
    monkeypatch.setattr(preparation, "captures_steps", lambda *_: captured)
    pipeline.begin(config_of(text), tmp_path / "run", callback)
    assert ("CUDA graphs" in "".join(said)) is captured
    assert RunDir(tmp_path / "run").read_settings()["train"]["cuda_graph"] is captured


def test_a_large_model_that_reads_a_short_text_many_times_says_so() -> None:
    model = torch.nn.Linear(100, 50, bias=False)

    def said(passes: float, tokens: int, task: type[Task] = Task) -> str | None:
        steps = int(passes * tokens / 32)  # two rows of 16 tokens per step
        facts = SimpleNamespace(facts=SimpleNamespace(train_tokens=tokens))
        config = config_of(train={"steps": steps})
        run: Any = SimpleNamespace(config=config, corpus=facts, model=model)
        return task.repetition(run)

    assert "480 tokens 5 times with 5,000 parameters" in str(said(5.0, 480))
    assert said(3.9, 480) is None
    assert said(5.0, 640) is None
    assert said(5.0, 480, TuneTask) is None
