"""fenchel/sensitivity/decision_attack.py: changes that change a decision, and are short."""

import math
import time

import pytest
import torch

from fenchel.sensitivity.decision import NORMS, DecisionNetwork
from fenchel.sensitivity.decision_attack import nearest_change
from fenchel.sensitivity.layers import LinearLayer, NormLayer
from tests.sensitivity.test_decision import network


@pytest.mark.parametrize("norm", NORMS)
def test_a_change_changes_the_decision_and_lies_on_its_boundary(norm: str) -> None:
    for seed in range(3):
        net, X = network("llama", seed)
        kept = net(X)[-1].topk(1).indices
        change = nearest_change(net, X, kept, norm)
        assert change is not None
        assert int(net(X + change)[-1].argmax()) != int(kept)
        assert int(net(X + (1.0 - 1e-5) * change)[-1].argmax()) == int(kept)
        if norm == "one":
            assert bool((change[:-1] == 0).all())
        if norm == "token":
            rows = change.norm(dim=-1)
            assert float(rows.amin()) > 0.1 * float(rows.amax())


def test_it_finds_the_shortest_change_of_a_norm_and_logits() -> None:
    """Without stages the decision is that of E x / |x|: the angle to the nearest boundary."""
    generator = torch.Generator().manual_seed(0)
    E = torch.randn(5, 3, dtype=torch.float64, generator=generator)
    net = DecisionNetwork((), NormLayer(None, None, 0.0, "rms"), LinearLayer(E.mT))
    X = torch.randn(1, 3, dtype=torch.float64, generator=generator)
    kept = net(X)[-1].topk(1).indices
    change = nearest_change(net, X, kept, "all")
    assert change is not None
    gaps = E[kept] - E
    lengths = torch.where(gaps.norm(dim=-1) > 0, (gaps @ X[0]) / gaps.norm(dim=-1), math.inf)
    assert float(change.norm()) == pytest.approx(float(lengths.amin()), rel=1e-4)


def test_no_change_of_equal_logits_and_none_after_a_deadline_without_one() -> None:
    net = DecisionNetwork(
        (), NormLayer(None, None, 0.0, "rms"), LinearLayer(torch.zeros(3, 4, dtype=torch.float64))
    )
    X = torch.ones(1, 3, dtype=torch.float64)
    assert nearest_change(net, X, torch.tensor([0]), "all") is None
    net, X = network("llama")
    kept = net(X)[-1].topk(1).indices
    change = nearest_change(net, X, kept, "all", deadline=time.monotonic())
    assert change is None or int(net(X + change)[-1].argmax()) != int(kept)
