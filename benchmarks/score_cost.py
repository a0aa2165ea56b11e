"""The cost of ScoreTrust, ScoreDescent and QK-norm beside Muon, on a GPU.

One process, in turn, round by round: the same rotary model of GPT-2's size (124M parameters, 65,536
tokens per step) under bfloat16 autocast, compiled, moved by each optimiser. The forward pass is
included, since it contains the probe.

    step_ms         forward, loss, backward and optimiser
    optimiser_ms    of that the optimiser
    over_muon       how much longer a step is, median of the rounds
    optimiser_share how much longer the optimiser is, as a share of Muon's step
    memory_GB       peak memory of training above that before
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import record
from benchmarks.models_gpu import GPT2
from fenchel.model import Transformer
from fenchel.optim import OptimConfig, build_optimiser
from fenchel.train.loss import lm_head_loss

MODEL = replace(GPT2, positions="rotary", norm="rms", bias=False)
KINDS = {
    "muon": ("muon", False),
    "muon + qk-norm": ("muon", True),
    "trust": ("trust", False),
    "score": ("score", False),
    "score + qk-norm": ("score", True),
}
"""Optimiser, and whether queries and keys are normalised."""
BATCH = 64
ROUNDS, WARMUP = 12, 3

Step = Callable[[], tuple[float, float]]
"""Milliseconds of a whole step, and of its optimiser."""


def step(kind: str, inputs: Tensor, targets: Tensor) -> Step:
    """A training step of a fresh model."""
    name, qk_norm = KINDS[kind]
    config = replace(MODEL, qk_norm=qk_norm)
    model = Transformer(config, generator=torch.Generator().manual_seed(0)).cuda().train()
    optimiser = build_optimiser(model, OptimConfig(optimiser=name), steps=1000)
    forward = torch.compile(model)

    def take() -> tuple[float, float]:
        begin, middle, end = (_moment() for _ in range(3))
        torch.cuda.synchronize()
        begin.record()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = lm_head_loss(forward(inputs, return_hidden=True), model.lm_head_weight, targets)
        (loss / targets.numel()).backward()  # type: ignore[no-untyped-call]
        middle.record()
        optimiser.step()
        optimiser.zero_grad()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end), middle.elapsed_time(end)

    return take


def _moment() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def main(options: Sequence[str] = ()) -> None:
    """Time all of them, or Muon and those that are named; write results/score_cost.json."""
    parser = argparse.ArgumentParser(prog="fenchel bench score_cost")
    parser.add_argument("--kind", action="append", choices=KINDS, help="an optimiser beside Muon")
    named = parser.parse_args(options).kind
    kinds = [kind for kind in KINDS if not named or kind in ("muon", *named)]
    if not torch.cuda.is_available():
        print("there is no GPU here; score_cost measures on one.")
        return
    torch.set_float32_matmul_precision("high")
    ids = torch.randint(MODEL.vocabulary, (BATCH, MODEL.context + 1), device="cuda")
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    steps: dict[str, Step] = {}
    memory = {}
    for kind in kinds:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        steps[kind] = step(kind, inputs, targets)
        for _ in range(WARMUP):
            steps[kind]()
        memory[kind] = (torch.cuda.max_memory_allocated() - before) / 1e9
    for take in [*steps.values()] * WARMUP:  # a new probe triggers a recompilation
        take()
    times_of: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for n in range(ROUNDS):
        for kind in kinds if n % 2 else reversed(kinds):
            times_of[kind].append(steps[kind]())
    lines = [line(kind, times_of[kind], times_of["muon"], memory[kind]) for kind in kinds]
    print(record("score_cost", lines))


def line(
    kind: str, times: list[tuple[float, float]], muon: list[tuple[float, float]], memory: float
) -> dict[str, Any]:
    """The medians of one optimiser."""
    pairs = list(zip(times, muon, strict=True))
    row = {
        "optimiser": kind,
        "step_ms": round(statistics.median(whole for whole, _ in times), 2),
        "optimiser_ms": round(statistics.median(own for _, own in times), 2),
        "over_muon": round(statistics.median(a[0] / b[0] - 1.0 for a, b in pairs), 4),
        "optimiser_share": round(statistics.median((a[1] - b[1]) / b[0] for a, b in pairs), 4),
        "memory_GB": round(memory, 3),
    }
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


if __name__ == "__main__":
    main()
