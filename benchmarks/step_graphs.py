"""What training steps cost on a GPU with and without CUDA graphs, beside their kernels.

``Stepper`` takes steps of random tokens, as ``fenchel train`` does: bfloat16, deterministic, one
micro-batch, with the gradient and the optimiser's step as graphs and without.

    step_ms      over 20 steps, the host's clock from one synchronisation to another
    kernels_ms   of the kernels of a step, by torch's profiler
    loss         after 30 steps: the same number in both rows of a pair

    python -m benchmarks step_graphs
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import record
from benchmarks.optimisers.sizes import SIZES
from fenchel.data import Batches
from fenchel.model import ModelConfig, Transformer
from fenchel.optim import OptimConfig, build_optimiser, build_schedule
from fenchel.pipeline import settings
from fenchel.train import Stepper, TrainConfig

WARM, TIMED, PROFILED = 6, 20, 3
DEFAULT, GPT2 = settings({}), settings({"preset": "gpt2"})
SMALL = replace(SIZES["cuda"].model, qk_norm=True)
"""25M parameters."""


class Case(NamedTuple):
    """One kind of step."""

    shape: str
    model: ModelConfig
    batch: int
    optimiser: str
    compiled: bool


CASES = (
    Case("default run", DEFAULT.model, DEFAULT.train.batch, "muon", compiled=False),
    *(Case("25M", SMALL, 32, rule, compiled=True) for rule in ("muon", "score")),
    Case("GPT-2", GPT2.model, GPT2.train.batch, "muon", compiled=True),
    Case("GPT-2", replace(GPT2.model, qk_norm=True), GPT2.train.batch, "muon", compiled=True),
    Case("GPT-2", replace(GPT2.model, qk_norm=True), GPT2.train.batch, "score", compiled=True),
)


def main(options: Sequence[str] = ()) -> None:  # noqa: ARG001
    """Measure every case with graphs and without; write results/step_graphs.json."""
    if not torch.cuda.is_available():
        print("step_graphs needs a GPU")
        return
    torch.set_float32_matmul_precision("high")
    rows: list[dict[str, Any]] = []
    for case in CASES:
        for graphs in (False, True):
            rows.append(measure(case, graphs=graphs))
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
            path = record("step_graphs", rows)
    print(path)


def measure(case: Case, *, graphs: bool) -> dict[str, Any]:
    """A row."""
    take = stepper(case, graphs=graphs)
    for step in range(WARM):
        take(step)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for step in range(WARM, WARM + TIMED):
        take(step)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begun) / TIMED
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for step in range(WARM + TIMED, WARM + TIMED + PROFILED):
            take(step)
        torch.cuda.synchronize()
    kernels = sum(event.self_device_time_total for event in found.key_averages()) / PROFILED
    return {
        "shape": case.shape,
        "qk_norm": case.model.qk_norm,
        "optimiser": case.optimiser,
        "tokens": case.batch * case.model.context,
        "graphs": graphs,
        "step_ms": round(1e3 * seconds, 2),
        "kernels_ms": round(1e-3 * kernels, 2),
        "loss": take(WARM + TIMED + PROFILED).loss,
        "reason": None if take.graph is None else take.graph.reason,
    }


def stepper(case: Case, *, graphs: bool) -> Stepper:
    """A fresh model and what takes its steps."""
    torch.compiler.reset()
    torch.cuda.empty_cache()
    model = Transformer(case.model, generator=torch.Generator().manual_seed(0)).cuda()
    ids = np.random.default_rng(0).integers(0, case.model.vocabulary, 4_000_000).astype(np.int32)
    optim = OptimConfig(optimiser=case.optimiser)
    return Stepper(
        model,
        Batches(ids, batch=case.batch, context=case.model.context, seed=0),
        build_optimiser(model, optim, steps=1000),
        build_schedule(optim, 1000),
        config=TrainConfig(
            steps=1000,
            batch=case.batch,
            precision="bfloat16",
            accumulate=1,
            compile=case.compiled,
            cuda_graph=graphs,
        ),
        seed=0,
    )


if __name__ == "__main__":
    main()
