"""fenchel/optim/score/stacked_pairs.py: processes with different samples take the same step."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from fenchel.optim import ScoreDescent, attention_pairs
from fenchel.optim.score import probe


class Two:
    """Two threads in the place of two processes: all_reduce is a meeting."""

    def __init__(self) -> None:
        self.meeting = threading.Barrier(2, timeout=60)
        self.given: dict[int, Tensor] = {}

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def get_world_size(self) -> int:
        return 2

    def all_reduce(self, x: Tensor) -> None:
        self.given[threading.get_ident()] = x.clone()
        self.meeting.wait()
        total = sum(self.given.values())
        self.meeting.wait()
        x.copy_(total)


@pytest.mark.parametrize("settings", [{}, {"normed": True}], ids=str)
@pytest.mark.parametrize("norm", ["spectral", "frobenius"])
def test_all_processes_take_the_same_step(
    settings: dict[str, Any],
    norm: str,
    small: Any,
    tokens: Any,
    backward: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = [small(**settings) for _ in range(2)]
    optimisers = [ScoreDescent(attention_pairs(m), norm=norm) for m in models]
    for rank, model in enumerate(models):
        backward(model, tokens(rank, 4))
    for one, two in zip(*(m.parameters() for m in models), strict=True):
        if one.grad is not None:  # what DistributedDataParallel would leave in both
            mean = (one.grad + two.grad) / 2
            one.grad, two.grad = mean, mean.clone()
    monkeypatch.setattr(probe, "dist", Two())
    threads = [threading.Thread(target=optimiser.step) for optimiser in optimisers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, p in models[0].named_parameters():
        assert torch.equal(p, models[1].get_parameter(name)), name
    moved = [torch.stack([s.rms_change for s in o.score_stats().values()]) for o in optimisers]
    together = ((moved[0].square() + moved[1].square()) / 2).sqrt()
    torch.testing.assert_close(together, torch.full_like(together, 0.2), rtol=0.01, atol=0)
