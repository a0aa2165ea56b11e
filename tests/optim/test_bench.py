"""benchmarks/optim.py in its quick form: two steps per run, every rule, every study."""

import ast
import hashlib
import io
import json
import math
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.__main__ import main
from benchmarks.optimisers import contest, linux_texts, run_cache, sizes, studies
from benchmarks.optimisers.baselines import NorMuon
from benchmarks.optimisers.compositional import CompositionalMuon, PerHeadMuon
from benchmarks.optimisers.rules import CONTEST, RULES, scaled_qk
from benchmarks.optimisers.run_cache import (
    Job,
    MissingResult,
    OutOfTime,
    Pause,
    RunCache,
    run_missing,
)
from benchmarks.optimisers.runs import (
    measure_pace,
    model_of,
    optimiser_of,
    train_at_length,
)
from benchmarks.optimisers.sizes import SIZES, fresh_text, python_sources, text
from benchmarks.optimisers.studies import STUDIES, tune
from fenchel.model import ModelConfig, Transformer
from fenchel.optim import Muon, OptimConfig
from fenchel.optim.config import peak_score_rate, split_matrices
from fenchel.optim.muon import orthogonal


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """The command line after its name, to what it prints."""

    def run(*words: str) -> str:
        assert main(["optim", "--quick", *words]) == 0
        return capsys.readouterr().out

    threads = torch.get_num_threads()
    yield run
    torch.set_num_threads(threads)


def results(out: Path) -> dict[str, dict[str, Any]]:
    """Result by job, without the times."""
    lines = map(json.loads, (out / "optim_quick.jsonl").read_text().splitlines())
    return {json.dumps(line["job"]): without_times(line["result"]) for line in lines}


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in result.items() if k not in ("seconds", "ms_per_step", "ms_spread")}


def require_plausible_losses(found: dict[str, dict[str, Any]]) -> None:
    """Two steps improve on where each study begins; two steps do not learn to copy."""
    uniform = math.log(SIZES["quick"].model.vocabulary)  # a fresh model predicts this
    jobs = [(json.loads(job), r["loss"]) for job, r in found.items() if "loss" in r]
    by_study = {name: [(j, x) for j, x in jobs if j["study"] == name] for name in STUDIES}
    (checkpoint,) = (loss for job, loss in by_study["finetune"] if job["rate"] == 0.0)
    assert checkpoint < uniform
    for name in ("tuned", "switches", "lengths", "contest"):
        for job, loss in by_study[name]:
            assert 0.6 * uniform < loss < uniform, job
    gentle = [(job, loss) for job, loss in by_study["finetune"] if 0.0 < job["rate"] <= 0.2]
    assert len(gentle) >= 8
    for job, loss in (*gentle, *by_study["qk_rate"]):
        assert 0.6 * uniform < loss < checkpoint, job
    for job, loss in by_study["copy"]:
        assert loss == pytest.approx(math.log(32), rel=0.01), job


def test_every_study_gives_its_table_and_runs_repeat_by_seed(
    bench: Callable[..., str], tmp_path: Path
) -> None:
    out = ("--out", str(tmp_path))
    bench(*out)
    page = json.loads((tmp_path / "optim_quick.json").read_text())
    studies = [row["study"] for row in page["rows"]]
    assert {name: studies.count(name) for name in dict.fromkeys(studies)} == {
        "tuned": 11,
        "switches": 8,
        "finetune": 6,
        "qk_rate": 4,
        "copy": 4,
        "lengths": 20,
        "rates": 6,
        "pace": 13,
        "contest": 52,
    }
    assert (tmp_path / "optim_quick.svg").read_text().startswith("<?xml")
    found = results(tmp_path)
    require_plausible_losses(found)

    kept = (tmp_path / "optim_quick.jsonl").read_text().splitlines(keepends=True)
    lost = [line for line in kept if '"switches"' in line and '"seed": 1' in line][2:4]
    rest = [line for line in kept if line not in lost]
    (tmp_path / "optim_quick.jsonl").write_text("".join(rest))
    late = bench(*out, "--study", "switches", "--minutes", "0")
    assert "call it again to go on" in late  # no time: what was lost is not run
    again = bench(*out, "--study", "switches")
    assert again.count("seconds") == len(lost) == 2  # only that is
    assert results(tmp_path) == found


def test_options_are_refused_where_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["entmax_rows", "--quick"]) == 2
    assert "takes no options" in capsys.readouterr().err


# --- lengths


def length_job(rule: str, steps: int = 4) -> Job:
    given = {**SIZES["quick"].fixed, "radius": None, "damping": None, "change": None}
    job = {"study": "lengths", "size": "quick", "rule": rule, "text": "code", "steps": steps}
    return Job(**job, **given, seed=21)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["muon", "score", "score + qk-norm"])
def test_a_run_stopped_after_every_step_ends_as_one_that_was_not(rule: str, tmp_path: Path) -> None:
    whole = train_at_length(Pause(math.inf, tmp_path / "whole"), length_job(rule))
    stopped = Pause(0.0, tmp_path / "stopped")
    for _ in range(3):
        with pytest.raises(OutOfTime):
            train_at_length(stopped, length_job(rule))
    ended = train_at_length(stopped, length_job(rule))
    assert without_times(ended) == without_times(whole)
    assert not list((tmp_path / "stopped").iterdir())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_pauses_ends_the_call_and_loses_no_other_result(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads stand for the processes of the pool."""
    threads = lambda workers, *_: ThreadPoolExecutor(workers)  # noqa: E731
    monkeypatch.setattr(run_cache, "ProcessPoolExecutor", threads)
    jobs = [length_job("muon", steps) for steps in (1, 2, 3)]
    started = Barrier(workers)
    called: list[int | None] = []

    def run(job: Job) -> dict[str, Any]:
        called.append(job.steps)
        if job.steps in (1, 2) and workers == 2:
            started.wait(timeout=60)
        if job.steps == 2:
            raise OutOfTime
        for _ in range(200 if workers == 2 else 0):  # the other run ends after the pause
            if cache.deadline < 0.0:
                break
            time.sleep(0.01)
        return {"loss": float(job.steps or 0)}

    cache = RunCache(tmp_path / "runs.jsonl", minutes=10.0)
    with pytest.raises(OutOfTime):
        run_missing(cache, [lambda: cache(jobs, run)], workers=workers)
    kept = RunCache(tmp_path / "runs.jsonl", minutes=10.0)
    assert kept(jobs[:1], run)[0]["loss"] == 1.0
    assert called.count(2) == 1
    with pytest.raises(MissingResult):
        kept(jobs[1:2], run)


@pytest.mark.parametrize("rule", CONTEST)
def test_a_stopped_run_of_the_contest_ends_as_one_that_was_not(rule: str, tmp_path: Path) -> None:
    """Every rule moves every weight; its state is saved whole."""
    job = replace(contest._first("quick", rule, "sotu"), study="contest", steps=4, initial="xavier")
    whole = train_at_length(Pause(math.inf, tmp_path / "whole"), job)
    stopped = Pause(0.0, tmp_path / "stopped")
    for _ in range(3):
        with pytest.raises(OutOfTime):
            train_at_length(stopped, job)
    assert without_times(train_at_length(stopped, job)) == without_times(whole)

    config = SIZES["quick"].model
    model = model_of(job, config)
    optimiser, _ = optimiser_of(job, model, 4)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for seed in range(2):  # the first gradient of SOAP moves nothing
        ids = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(seed))
        model.zero_grad()
        model(ids).logsumexp(-1).sum().backward()
        optimiser.step()
    for name, p in model.named_parameters():
        moved = (p.detach() != start[name]).flatten(1).any(1) if p.ndim > 1 else p != start[name]
        assert moved.any() if "embed" in name or p.ndim == 1 else moved.all(), name
        if CONTEST[rule].build.keywords.get("sphere") and p.ndim > 1 and "qkv" in name:  # type: ignore[attr-defined]
            D = config.width
            values = slice(2 * D, 3 * D)
            after, before = (torch.linalg.norm(w[values]) for w in (p.detach(), start[name]))
            torch.testing.assert_close(after, before)


def test_a_contest_job_sets_the_parameters_of_its_parts() -> None:
    job = replace(
        contest._first("quick", "score on normuon", "sotu"),
        rate=0.03,
        other_rate=0.004,
        decay=0.2,
        momentum=0.7,
        beta2=0.6,
        total=1.5,
        steps=10,
        warmup=0.3,
    )
    optimiser, config = optimiser_of(job, model_of(job, SIZES["quick"].model), 10)
    score, normuon, other = optimiser.members
    assert isinstance(normuon, NorMuon)
    assert normuon.beta2 == 0.6
    group = normuon.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.03, 0.2, 0.7)
    assert (other.param_groups[0]["lr"], other.param_groups[0]["betas"]) == (0.004, (0.9, 0.95))
    assert score.param_groups[0]["lr"] == peak_score_rate(config, 10)
    assert (config.score_total, config.warmup) == (1.5, 0.3)
    assert model_of(replace(job, initial="xavier"), SIZES["quick"].model).config.initial == "xavier"


def test_a_run_of_the_study_of_lengths_has_the_defaults_for_its_length() -> None:
    model = model_of(length_job("score"), SIZES["quick"].model)
    for steps in (100, 400):
        optimiser, config = optimiser_of(length_job("score"), model, steps)
        group = optimiser.members[0].param_groups[0]
        assert group["lr"] == peak_score_rate(config, steps)
        assert group["lr"] == pytest.approx(2.3 * math.sqrt(3 / steps), rel=0.02)
        defaults = OptimConfig(optimiser="score")
        assert (group["radius"], group["opening"]) == (2.0, defaults.score_opening)
        assert group["damping"] == defaults.score_damping


def test_fresh_text_is_neither_trained_nor_tuned_on() -> None:
    seen, validation = text("sotu", 10_000)
    train, fresh = fresh_text("sotu", 10_000)
    assert np.array_equal(np.concatenate((train, fresh)), seen)
    assert (len(train), len(fresh), len(validation)) == (9600, 200, 200)


def test_source_code_has_an_order_that_does_not_depend_on_where_it_is(tmp_path: Path) -> None:
    """The hash of the path below a root; a root within another one is read once."""
    names = [f"package/module_{n}.py" for n in range(20)]
    texts = []
    for place in ("here", "there/deep"):
        root = tmp_path / place / "lib"
        inner = root / "site-packages"
        for name in names:
            file = (inner if name < names[10] else root) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"# {name} #")
        (root / "package" / "data.txt").write_text("no source")
        texts.append(python_sources([root, inner], 2**20))
    assert texts[0] == texts[1]
    assert sorted(texts[0].decode().split("\n")) == sorted(f"# {name} #" for name in names)
    assert texts[0].decode().split("\n") != sorted(texts[0].decode().split("\n"))
    assert python_sources([root, inner], 100) == texts[0][:100]


def test_results_from_before_a_job_had_all_of_its_fields_are_found(tmp_path: Path) -> None:
    job = Job(study="tuned", size="quick", rule="muon", rate=0.1, seed=0)
    old = {"study": "tuned", "size": "quick", "rule": "muon", "rate": 0.1, "seed": 0, "decay": 0.1}
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps({"job": old, "result": {"loss": 1.5}}) + "\n")
    cache = RunCache(path, minutes=1.0)
    assert cache([job], lambda _: {}) == [{"loss": 1.5}]
    with pytest.raises(MissingResult):
        cache([replace(job, steps=3)], lambda _: {})


# --- tuning


@pytest.mark.parametrize(
    ("rule", "radius", "damping", "change", "momentum"),
    [
        ("score", 12.0, 0.1, 0.4, 0.9),
        ("trust(muon)", 12.0, 1.0, 0.4, 0.9),
        ("trust(adamw)", 12.0, 1.0, 0.4, 0.95),
        ("compositional", 6.0, 0.1, 0.2, 0.9),
        ("muon + qk-norm", 6.0, 1.0, 0.2, 0.9),
        ("adamw", 6.0, 1.0, 0.2, 0.95),
    ],
)
def test_a_rule_is_tuned_in_all_that_it_has(
    rule: str, radius: float, damping: float, change: float, momentum: float
) -> None:
    """Given a loss that is least at one place, and that only what it tunes brings it there."""
    first, least = RULES[rule].rate, {"decay": 0.3, "radius": 12.0, "damping": 0.1}
    least |= {"change": 0.4, "momentum": 0.9}

    def cache(jobs: list[Job], _: Any) -> list[dict[str, float]]:
        off = [sum(abs(getattr(j, key) / to - 1.0) for key, to in least.items()) for j in jobs]
        return [
            {"loss": abs(math.log(j.rate / (1.5 * first))) + 0.01 * far}
            for j, far in zip(jobs, off, strict=True)
        ]

    best = tune(cache, "full", rule)  # type: ignore[arg-type]
    assert (best.rate, best.decay) == (float(f"{1.5 * first:.4g}"), 0.3)
    assert (best.radius, best.damping) == (radius, damping)
    assert (best.change, best.momentum) == (change, momentum)


def test_a_job_sets_the_parameters_of_its_optimiser() -> None:
    job = Job(
        study="tuned",
        size="quick",
        rule="score",
        rate=0.01,
        seed=0,
        decay=0.2,
        radius=3.0,
        damping=2.0,
        change=0.3,
        momentum=0.7,
    )
    optimiser, _ = optimiser_of(job, model_of(job, SIZES["quick"].model))
    groups = {type(m).__name__: m.param_groups[0] for m in optimiser.members}
    score, muon = groups["ScoreDescent"], groups["Muon"]
    assert (score["lr"], score["radius"], score["damping"], score["momentum"]) == (0.3, 3, 2, 0.7)
    assert (muon["lr"], muon["weight_decay"], muon["momentum"]) == (0.01, 0.2, 0.7)


def test_a_checkpoint_is_trained_by_the_muon_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []
    monkeypatch.setattr(studies, "train_on", lambda job, *_: jobs.append(job))
    studies.checkpoint("quick", 0.03, 0.4, 0.6)
    (job,) = jobs
    assert (job.rule, job.rate, job.decay, job.momentum) == ("muon", 0.03, 0.4, 0.6)


class Bowl:
    """Results of a loss with one valley, and the jobs that were run."""

    def __init__(self) -> None:
        self.path, self.pause, self.run = Path("optim_none.jsonl"), None, []  # type: ignore[var-annotated]

    def __call__(self, jobs: list[Job], _: Any) -> list[dict[str, float]]:
        self.run += jobs
        return [
            {
                "loss": abs(math.log(job.rate / 0.045))
                + 0.1 * abs(math.log(job.other_rate / 0.04))
                + abs(job.momentum - 0.95)
                + abs(job.decay - 0.3) * (1 + abs(math.log(job.rate / 0.045)))
            }
            for job in jobs
        ]


def test_the_search_ends_where_no_move_gains_and_counts_its_runs() -> None:
    start = contest._first("full", "muon + qk-norm", "sotu")
    assert (start.rate, start.other_rate, start.momentum, start.decay) == (0.02, 0.01, 0.9, 0.1)
    runs = Bowl()
    fields = CONTEST["muon + qk-norm"].tunes
    best, count, ended = contest.coordinate_search(runs, start, fields, 100)  # type: ignore[arg-type]
    assert (best.rate, best.other_rate, best.momentum, best.decay) == (0.045, 0.04, 0.95, 0.3)
    assert ended
    assert count == len(set(runs.run))
    short = contest.coordinate_search(Bowl(), start, fields, 4)  # type: ignore[arg-type]
    assert short[1:] == (4, False)
    assert short[0].rate == 0.045
    assert short[0].momentum == 0.9


def test_neighbours_stay_within_the_values_and_keep_the_rest() -> None:
    job = contest._first("full", "muonh + qk-norm", "sotu")
    assert [j.rate for j in contest.neighbours(job, "rate")] == [0.03, 0.01333]
    large = contest._first("cuda", "muonh + qk-norm", "sotu")  # a relative rate needs no scale
    assert (large.rate, large.other_rate) == (0.02, 0.002222)
    assert contest.neighbours(large, "rate")[0].rate == 0.03
    assert contest._first("cuda", "muon", "sotu").rate == 0.004444
    assert contest.neighbours(replace(job, rate=0.01333), "rate")[0].rate == 0.02
    assert [j.initial for j in contest.neighbours(job, "initial")] == ["xavier"]
    assert [j.warmup for j in contest.neighbours(job, "warmup")] == [0.25, 0.02]


def test_a_search_is_not_measured_on_the_bytes_of_the_comparison(tmp_path: Path) -> None:
    job = replace(contest._first("quick", "muon", "sotu"), steps=2)
    pause = Pause(math.inf, tmp_path)
    chosen, compared = (
        train_at_length(pause, replace(job, study=study)) for study in ("search", "contest")
    )
    assert chosen["loss"] != compared["loss"]


def test_equal_time_is_the_time_of_the_reference() -> None:
    """A rule of twice the time per step takes half of the steps; gains are per seed."""
    taken: list[Job] = []

    def runs(jobs: list[Job], run: Any) -> list[dict[str, Any]]:
        taken.extend(jobs)
        slow = jobs[0].rule == "score on muon"
        if run is measure_pace:
            given = {"state_bytes": 4.0, "peak_gib": None}
            return [{"ms_per_step": 20.0 if slow else 10.0, **given} for _ in jobs]
        loss = 1.0 if slow else 1.1
        given = {"epochs": 0.5, "max_logit": 3.0, "text_sha256": "abc"}
        return [{"loss": loss + 0.01 * slow * job.seed, **given} for job in jobs]

    runs.pause = None  # type: ignore[attr-defined]
    bout = contest.Bout("score on muon", "linux_c", 400, "time")
    row = contest.contest(runs, "cuda", bout)  # type: ignore[arg-type]
    assert row["steps_taken"] == 200
    steps = {(job.rule, job.steps) for job in taken if job.study == "contest"}
    assert steps == {("score on muon", 200), ("muon + qk-norm", 400)}
    assert row["losses"] == [1.31, 1.32, 1.33]
    assert row["gain"] == pytest.approx(-0.22)
    assert row["error"] == pytest.approx(0.01 / math.sqrt(3), abs=1e-4)
    assert row["search_runs"] <= SIZES["cuda"].contest[0][2]


def test_a_size_begins_where_the_search_of_another_ended(tmp_path: Path) -> None:
    """85M from 25M, of which the results lie in the same folder; without them there is no row."""
    cache = RunCache(tmp_path / "optim_gpt2.jsonl", minutes=1.0)
    with pytest.raises(MissingResult):
        contest.search(cache, "gpt2", "muon", "linux_c", 1000)
    assert not cache.missing


def test_a_line_of_the_results_is_run_again(bench: Callable[..., str], tmp_path: Path) -> None:
    out = ("--out", str(tmp_path))
    bench(
        *out, "--study", "contest", "--rule", "muon + qk-norm", "--by", "steps", "--commit", "abc"
    )
    lines = (tmp_path / "optim_quick.jsonl").read_text().splitlines()
    assert {json.loads(line)["commit"] for line in lines} == {"abc"}
    assert all(json.loads(line)["device"] for line in lines)
    for number, line in enumerate(lines, 1):
        job, result = json.loads(line)["job"], json.loads(line)["result"]
        if job["study"] == "pace":
            continue
        printed = bench(*out, "--again", str(number)).splitlines()[-1].removeprefix("again ")
        found = ast.literal_eval(printed.strip())
        assert without_times(found) == without_times(result)
    with pytest.raises(SystemExit, match=r"has lines 1 to \d+, got 99"):
        bench(*out, "--again", "99")


# --- texts of a package of Debian


def tar_xz(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def package_of(path: Path, files: dict[str, bytes]) -> Path:
    sources = {f"linux-source-0.1/{name}": content for name, content in files.items()}
    data = tar_xz({"./usr/README": b"x", "./usr/src/linux-source-0.1.tar.xz": tar_xz(sources)})
    parts = {b"debian-binary": b"2.0\n", b"control.tar.xz": b"odd", b"data.tar.xz": data}
    with path.open("wb") as file:
        file.write(b"!<arch>\n")
        for name, part in parts.items():
            file.write(name.ljust(48) + str(len(part)).encode().ljust(10) + b"`\n")
            file.write(part + b"\n" * (len(part) % 2))
    return path


def test_texts_of_a_package_are_the_first_files_by_the_hash_of_their_paths(tmp_path: Path) -> None:
    sources = {f"drivers/a{n}.c": f"int a{n};".encode() * (n % 3 + 1) for n in range(30)}
    prose = {f"Documentation/b{n}.rst": f"Text {n}".encode() for n in range(5)}
    other = {"Makefile": b"all:", "tools/c.rst": b"no", "Documentation/d.txt": b"no"}
    package = package_of(tmp_path / "linux.deb", {**sources, **other, **prose})

    def expected(files: dict[str, bytes]) -> bytes:
        order = sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest())
        return b"".join(files[name] + b"\n" for name in order)

    texts = linux_texts.read_texts(package)
    assert texts == {"linux_c": expected(sources), "linux_rst": expected(prose)}
    for limit in (1, 40, 150, len(texts["linux_c"])):
        short = linux_texts.read_texts(package, limit)
        assert short == {name: text[:limit] for name, text in texts.items()}


def test_no_more_files_are_in_memory_than_a_text_needs() -> None:
    files = linux_texts.FirstFiles(100)
    for n in range(200):
        files.add(f"{n}.c", b"x" * 9)
        assert len(files.heap) <= 10
    assert len(files.text()) == 100


def test_what_is_no_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "not.deb").write_bytes(b"hello")
    with pytest.raises(ValueError, match="not a Debian package"):
        linux_texts.read_texts(tmp_path / "not.deb")
    (tmp_path / "empty.deb").write_bytes(b"!<arch>\n")
    with pytest.raises(ValueError, match=r"no data\.tar\.xz"):
        linux_texts.read_texts(tmp_path / "empty.deb")
    monkeypatch.setattr(sizes, "FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"linux_texts.py says how"):
        sizes._read("linux_c", None)
    linux_texts.main(
        [str(package_of(tmp_path / "a.deb", {"a.c": b"int a;"})), "--folder", str(tmp_path)]
    )
    assert "7 bytes" in capsys.readouterr().out
    assert sizes._read("linux_c", None) == b"int a;\n"


# --- queries and keys at another rate


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_only_queries_and_keys_take_the_other_rate(optimiser: str) -> None:
    config = ModelConfig(vocabulary=11, width=24, heads=4, kv_heads=2, layers=2)
    ends = {}
    for times in (1.0, 3.0):
        model = Transformer(config, generator=torch.Generator().manual_seed(0))
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        draw(model)
        scaled_qk(model, OptimConfig(optimiser=optimiser), times=times).step()
        ends[times] = {name: p.detach() - start[name] for name, p in model.named_parameters()}
    for name, move in ends[1.0].items():
        factor = torch.ones(len(move), *[1] * (move.ndim - 1))
        if name.endswith("qkv.weight"):
            factor[: 6 * 6] = 3.0  # four heads of queries and two of keys
        torch.testing.assert_close(ends[3.0][name], factor * move, rtol=1e-5, atol=1e-6)


# --- the baseline


def draw(model: Transformer) -> None:
    for n, p in enumerate(model.parameters()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(n))


def test_per_head_muon_moves_each_head_of_queries_and_keys_by_an_orthogonal_step() -> None:
    config = ModelConfig(vocabulary=11, width=24, heads=4, kv_heads=2, layers=1)
    ours, plain = (Transformer(config, generator=torch.Generator().manual_seed(0)) for _ in "ab")
    attention = ours.blocks[0].attention
    before = attention.qkv.weight.detach().clone()
    settings = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
    for model, optimiser in (
        (ours, PerHeadMuon(split_matrices(ours)[0], [attention], **settings)),
        (plain, Muon(split_matrices(plain)[0], **settings)),
    ):
        draw(model)
        optimiser.step()
    moves = (attention.qkv.weight.detach() - before)[: 6 * 6].view(6, 6, 24)
    values = plain.blocks[0].attention.qkv.weight[6 * 6 :]
    assert torch.equal(attention.qkv.weight[6 * 6 :], values)
    for move in moves:
        assert move.square().mean().sqrt().item() == pytest.approx(0.02, rel=1e-4)
        S = torch.linalg.svdvals(move)
        assert S.max() < 2.0 * S.min()  # Newton-Schulz makes them equal to within that


@pytest.mark.parametrize("kv_heads", [None, 2])
def test_compositional_muon_whitens_queries_and_keys_and_moves_the_rest_as_muon(
    kv_heads: int | None,
) -> None:
    config = ModelConfig(vocabulary=11, width=24, heads=4, kv_heads=kv_heads, layers=1)
    ours, plain = (Transformer(config, generator=torch.Generator().manual_seed(0)) for _ in "ab")
    attention = ours.blocks[0].attention
    before = attention.qkv.weight.detach().clone()
    a = CompositionalMuon(
        split_matrices(ours)[0], [attention], damping=1e-2, lr=0.1, momentum=0.0, weight_decay=0.5
    )
    b = Muon(split_matrices(plain)[0], lr=0.1, momentum=0.0, weight_decay=0.5)
    for model, optimiser in ((ours, a), (plain, b)):
        draw(model)
        optimiser.step()
    H, G, D = 4, attention.groups, 6
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if name.endswith("qkv.weight"):
            p, q = p[(H + G) * D :], q[(H + G) * D :]
        assert torch.equal(p, q), name

    gradient = attention.qkv.weight.grad
    for h in range(H):
        keys = before[(H + h * G // H) * D :][:D]
        root = reference_root(keys @ keys.T)
        U = root @ orthogonal((root @ gradient[h * D : (h + 1) * D])[None])[0]
        U = 0.2 * U / U.square().mean().sqrt()
        expected = 0.95 * before[h * D : (h + 1) * D] - 0.1 * U
        found = attention.qkv.weight[h * D : (h + 1) * D]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def reference_root(A: Tensor) -> Tensor:
    damped = A + 1e-2 * A.diagonal().mean() * torch.eye(len(A))
    U, S, _ = torch.linalg.svd(damped.double())
    return (U @ torch.diag(S.rsqrt()) @ U.T).float()


def test_a_run_has_the_batch_of_its_job(tmp_path: Path) -> None:
    """Runs of 8,000 steps read a quarter of the sequences per step that other runs read."""
    job = studies.length_jobs("quick", studies.Case("muon", "sotu", 3))[0]
    assert job.batch == SIZES["quick"].length_batches[3] != SIZES["quick"].batch
    pause = Pause(math.inf, tmp_path)
    small, usual = (train_at_length(pause, replace(job, batch=B)) for B in (job.batch, None))
    assert small["loss"] != usual["loss"]
    assert usual["epochs"] >= small["epochs"]
