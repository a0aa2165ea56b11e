"""fenchel/attention/statistics.py: the steps, with the worked numbers between them."""

import torch

from fenchel.attention import Causal, attend, trace
from fenchel.choice import Entmax


def test_the_steps_of_the_worked_example() -> None:
    q = torch.tensor([[1.0, 0, 1], [0, 1, 1]], dtype=torch.float64)
    k = torch.tensor([[1.0, 1, 0], [1, 0, 1]], dtype=torch.float64)
    v = torch.tensor([[2.0, 0, 1], [1, 1, 0]], dtype=torch.float64)
    steps = trace(q, k, v, prior=Causal())
    assert steps.compatibility.tolist() == [[1, 2], [1, 1]]
    assert steps.scores.round(decimals=3).tolist() == [[0.577, 1.155], [0.577, 0.577]]
    assert steps.log_prior.tolist() == [[0, -torch.inf], [0, 0]]
    assert steps.weights.tolist() == [[1, 0], [0.5, 0.5]]
    assert steps.outputs.tolist() == [[2, 0, 1], [1.5, 0.5, 0.5]]
    free = trace(q, k, v)
    assert free.weights.round(decimals=3).tolist() == [[0.360, 0.640], [0.5, 0.5]]
    assert (free.log_prior == 0).all()


def test_the_last_step_is_what_attend_returns(qkv) -> None:
    q, k, v = qkv
    for prior in (None, Causal()):
        steps = trace(q, k, v, choice=Entmax(1.5), prior=prior, scale=0.3)
        out, p = attend(
            q,
            k,
            v,
            choice=Entmax(1.5),
            prior=prior,
            scale=0.3,
            backend="reference",
            return_weights=True,
        )
        torch.testing.assert_close(steps.outputs, out)
        torch.testing.assert_close(steps.weights, p)
        torch.testing.assert_close(steps.scores, 0.3 * steps.compatibility)
