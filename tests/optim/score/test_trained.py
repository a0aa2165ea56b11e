"""The score optimisers inside the training step and its checkpoints, as ``fenchel train`` runs."""

from pathlib import Path

import numpy as np
import torch

from fenchel.checkpoints import Progress, run_checkpoint
from fenchel.data import Batches
from fenchel.model import ModelConfig, Transformer
from fenchel.optim import OptimConfig, build_optimiser, build_schedule
from fenchel.train import Stepper, TrainConfig

MODEL = ModelConfig(
    vocabulary=31, context=8, width=16, layers=2, heads=4, kv_heads=2, bias=True, dropout=0.1
)


def stepper(name: str, seed: int = 0) -> Stepper:
    model = Transformer(MODEL, generator=torch.Generator().manual_seed(seed))
    ids = np.random.default_rng(0).integers(31, size=300)
    optim = OptimConfig(optimiser=name)
    return Stepper(
        model,
        Batches(ids, batch=4, context=8, seed=1),
        build_optimiser(model, optim, steps=6),
        build_schedule(optim, 6),
        config=TrainConfig(steps=6, batch=4, accumulate=2, threads=1, precision="float32"),
        seed=1,
    )


def test_the_steps_that_opened_the_ball_are_saved(tmp_path: Path) -> None:
    begun, resumed = stepper("score"), stepper("score", seed=7)
    for step in range(3):
        begun(step)
    folder = run_checkpoint.save(
        tmp_path, Progress(step=3), begun.model.state_dict(), begun.optimiser.state_dict(), {}
    )
    run_checkpoint.restore(folder, resumed.model, resumed.optimiser, {})
    resumed(3)
    score = resumed.optimiser.members[0]
    bounds = [state["score_bound"] for state in score.state.values() if "score_bound" in state]
    assert len(bounds) == 2
    for bound in bounds:
        torch.testing.assert_close(bound, torch.full_like(bound, 2.0 + 3 * 0.006))


def test_the_scheduled_rate_is_the_score_change() -> None:
    take = stepper("score")
    score = take.optimiser.members[0]
    take(0)  # a fresh block ends in zeros: queries and keys get their first gradient at step 1
    for step in range(1, 6):
        take(step)
        rate = score.param_groups[0]["lr"]
        for stats in score.score_stats().values():  # type: ignore[attr-defined]
            inside = ~stats.capped
            torch.testing.assert_close(
                stats.rms_change[inside],
                torch.full_like(stats.rms_change[inside], rate),
                rtol=0.01,
                atol=0,
            )
