"""fenchel/evaluate/calibration.py against torch's own label smoothing."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fenchel.evaluate import label_smoothing, outcomes, smoothed_targets, summarise


def test_the_worked_numbers() -> None:
    best = label_smoothing(10, 0.1)
    assert best.confidence == pytest.approx(0.91)
    assert best.gap == pytest.approx(4.511, abs=5e-4)
    assert best.minimum == pytest.approx(0.5003, abs=5e-5)


@pytest.mark.parametrize(("V", "a"), [(10, 0.1), (2, 0.3), (50, 0.01), (3, 1.0)])
def test_the_loss_is_least_at_the_gap(V: int, a: float) -> None:
    best = label_smoothing(V, a)
    z = torch.zeros(1, V, dtype=torch.float64)
    z[0, 1] = best.gap
    z.requires_grad_()
    loss = cross_entropy(z, torch.tensor([1]), label_smoothing=a)
    assert loss.item() == pytest.approx(best.minimum, rel=1e-12)
    (slope,) = torch.autograd.grad(loss, z)
    assert float(slope.abs().max()) < 1e-15
    assert z.softmax(-1)[0, 1].item() == pytest.approx(best.confidence, rel=1e-12)


def test_the_gradient_is_the_prediction_less_the_smoothed_truth() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(4, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 5, 2, 2])
    loss = cross_entropy(z, y, label_smoothing=0.2, reduction="sum")
    (slope,) = torch.autograd.grad(loss, z)
    q = smoothed_targets(y, 6, 0.2).double()
    torch.testing.assert_close(slope, z.detach().softmax(-1) - q, atol=1e-7, rtol=0)
    torch.testing.assert_close(q.sum(-1), torch.ones(4, dtype=torch.float64), atol=1e-6, rtol=0)


def test_without_smoothing_certainty_is_best() -> None:
    assert label_smoothing(7, 0.0) == (1.0, 0.0, math.inf, 0.0)


def fitted(x: Tensor, y: Tensor, V: int, a: float) -> Tensor:
    """Weights of a linear classifier, trained until it believes its few examples."""
    W = torch.zeros(x.shape[1], V, dtype=x.dtype, requires_grad=True)
    optimiser = torch.optim.LBFGS([W], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = cross_entropy(x @ W, y, label_smoothing=a)
        loss.backward()
        return loss

    optimiser.step(closure)
    return W.detach()


def test_an_overfitted_classifier_is_better_calibrated_with_smoothing() -> None:
    """What is empirical in general is plain here: 40 examples, 30 features, noisy labels."""
    V, D = 4, 30
    generator = torch.Generator().manual_seed(5)
    truth = torch.randn(D, V, generator=generator, dtype=torch.float64)
    x = torch.randn(2040, D, generator=generator, dtype=torch.float64)
    y = torch.multinomial((0.3 * x @ truth).softmax(-1), 1, generator=generator)[:, 0]
    errors = {
        a: summarise(outcomes(x[40:] @ fitted(x[:40], y[:40], V, a), y[40:]), bins=10).ece
        for a in (0.0, 0.2)
    }
    assert errors[0.2] < errors[0.0] - 0.1


@pytest.mark.parametrize(("V", "a"), [(0, 0.1), (3, -0.1), (3, 1.1)])
def test_wrong_settings_get_a_sentence(V: int, a: float) -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        label_smoothing(V, a)
