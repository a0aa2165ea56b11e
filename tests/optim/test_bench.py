"""benchmarks/optim.py in its quick form: two steps per run, every rule, every study."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.__main__ import main
from benchmarks.optimisers import studies
from benchmarks.optimisers.compositional import CompositionalMuon
from benchmarks.optimisers.rules import RULES, scaled_qk
from benchmarks.optimisers.run_cache import Job
from benchmarks.optimisers.runs import model_of, optimiser_of
from benchmarks.optimisers.sizes import SIZES
from benchmarks.optimisers.studies import STUDIES, tune
from fenchel.model import ModelConfig, Transformer
from fenchel.optim import Muon, OptimConfig
from fenchel.optim.config import split_matrices
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
    """Result by job, without the seconds."""
    lines = map(json.loads, (out / "optim_quick.jsonl").read_text().splitlines())
    return {
        json.dumps(line["job"]): {k: v for k, v in line["result"].items() if k != "seconds"}
        for line in lines
    }


def require_plausible_losses(found: dict[str, dict[str, Any]]) -> None:
    """Two steps improve on where each study begins; two steps do not learn to copy."""
    uniform = math.log(SIZES["quick"].model.vocabulary)  # a fresh model predicts this
    jobs = [(json.loads(job), result["loss"]) for job, result in found.items()]
    by_study = {name: [(j, x) for j, x in jobs if j["study"] == name] for name in STUDIES}
    (checkpoint,) = (loss for job, loss in by_study["finetune"] if job["rate"] == 0.0)
    assert checkpoint < uniform
    for name in ("tuned", "switches"):
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
        "tuned": 9,
        "switches": 8,
        "finetune": 4,
        "qk_rate": 4,
        "copy": 4,
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


def test_a_run_is_moved_as_its_job_says() -> None:
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
