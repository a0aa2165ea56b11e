"""fenchel/evaluate/calibration.py: what the bins and the scores must say."""

import math
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from fenchel.evaluate import (
    brier_score,
    calibration_error,
    outcomes,
    reliability,
    summarise,
)
from fenchel.evaluate.calibration import Outcomes


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_predictions(n: int = 400, V: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Truths drawn from the predictions, so that some bins are too sure and some too modest."""
    logits = 2.0 * draw(n, V)
    generator = torch.Generator().manual_seed(1)
    return logits, torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def ece_by_hand(confidence: list[float], hit: list[bool], edges: list[float]) -> float:
    total = 0.0
    for low, high in pairwise(edges):
        inside = [i for i, c in enumerate(confidence) if low < c <= high or (c == low == 0.0)]
        if inside:
            c = sum(confidence[i] for i in inside) / len(inside)
            a = sum(hit[i] for i in inside) / len(inside)
            total += len(inside) / len(confidence) * abs(a - c)
    return total


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_ece_is_the_sum_over_bins_written_out(bins: int) -> None:
    found = outcomes(*some_predictions())
    edges = [m / bins for m in range(bins + 1)]
    by_hand = ece_by_hand(found.confidence.tolist(), found.hit.tolist(), edges)
    table = reliability(found.confidence, found.hit, bins=bins)
    assert calibration_error(table) == pytest.approx(by_hand, rel=1e-12)


def test_nine_of_ten_right_at_nine_tenths_is_calibrated() -> None:
    hit = torch.tensor([True] * 9 + [False])
    sure = torch.full((10,), 0.9, dtype=torch.float64)
    assert calibration_error(reliability(sure, hit)) == pytest.approx(0.0, abs=1e-15)
    too_sure = torch.full((10,), 0.99, dtype=torch.float64)
    assert calibration_error(reliability(too_sure, hit)) == pytest.approx(0.09)


def test_a_bin_ends_with_its_upper_edge() -> None:
    c = torch.tensor([0.0, 0.25, 0.5, 0.5000001, 1.0], dtype=torch.float64)
    table = reliability(c, torch.ones(5, dtype=torch.bool), bins=4)
    assert [(b.low, b.high, b.size) for b in table] == [
        (0.0, 0.25, 2),
        (0.25, 0.5, 1),
        (0.5, 0.75, 1),
        (0.75, 1.0, 1),
    ]


def test_empty_bins_are_left_out() -> None:
    c = torch.tensor([0.95, 0.97])
    (only,) = reliability(c, torch.tensor([True, False]), bins=10)
    assert (only.low, only.size, only.accuracy) == (pytest.approx(0.9), 2, 0.5)


@pytest.mark.parametrize(("n", "bins"), [(100, 10), (103, 10), (7, 15)])
def test_bins_of_equal_mass_hold_equal_shares(n: int, bins: int) -> None:
    c = torch.rand(n, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    table = reliability(c, c > 0.5, bins=bins, by="mass")
    counts = [b.size for b in table]
    assert sum(counts) == n
    assert max(counts) - min(counts) <= 1
    highs = [b.high for b in table]
    assert highs == sorted(highs)


def test_equal_confidences_share_a_bin_in_whatever_order_they_come() -> None:
    c = torch.tensor([0.5] * 6 + [0.7] * 6, dtype=torch.float64)
    hit = torch.tensor([True, False] * 6)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    here = reliability(c, hit, bins=4, by="mass")
    assert here == reliability(c[order], hit[order], bins=4, by="mass")
    assert [b.size for b in here] == [6, 6]


def test_outcomes_are_those_of_softmax() -> None:
    logits, targets = some_predictions()
    found = outcomes(logits, targets, temperature=1.7)
    p = (logits / 1.7).softmax(-1)
    torch.testing.assert_close(found.confidence, p.amax(-1))
    torch.testing.assert_close(found.loss, cross_entropy(logits / 1.7, targets, reduction="none"))
    torch.testing.assert_close(found.brier, (p - one_hot(targets, 7)).square().sum(-1))
    assert brier_score(p, targets) == pytest.approx(float(found.brier.mean()), rel=1e-12)
    assert torch.equal(found.hit, logits.argmax(-1) == targets)


def test_a_temperature_never_changes_the_accuracy() -> None:
    logits, targets = some_predictions()
    hits = [outcomes(logits, targets, temperature=T).hit for T in (0.1, 1.0, 10.0)]
    assert torch.equal(hits[0], hits[1])
    assert torch.equal(hits[1], hits[2])
    sure = [float(outcomes(logits, targets, temperature=T).confidence.mean()) for T in (0.5, 1, 2)]
    assert sure == sorted(sure, reverse=True)


def expected_brier(p: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """sum_y truth_y sum_v (p_v - [v = y])^2, by summation over y."""
    corners = torch.eye(len(truth), dtype=truth.dtype)
    return (truth * (p - corners).square().sum(-1)).sum()


def test_counting_errors_is_no_guide_to_probabilities() -> None:
    truth = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    drawn = torch.arange(3).repeat_interleave(torch.tensor([7, 2, 1]))  # in these shares
    z = truth.log().requires_grad_()
    right, sure, vague = (
        outcomes(logits.expand(10, 3), drawn) for logits in (z, 5.0 * z.detach(), 0.1 * z.detach())
    )
    # The same errors whatever the confidence; the loss and the squared error prefer the truth.
    assert right.hit.equal(sure.hit)
    assert right.hit.equal(vague.hit)
    for other in (sure, vague):
        assert other.loss.mean() > right.loss.mean() + 0.05
        assert other.brier.mean() > right.brier.mean() + 0.05
    assert not right.hit.dtype.is_floating_point  # a count, which has no gradient
    for score in (right.loss, right.brier):
        (slope,) = torch.autograd.grad(score[:1].sum(), z, retain_graph=True)
        assert slope.abs().max() > 0.1


def test_the_brier_score_is_proper_like_the_loss() -> None:
    """Both have their least expected value at the truth's own distribution, (0.7, 0.2, 0.1)."""
    truth = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    z = truth.log().requires_grad_()
    for expected in (
        expected_brier(z.softmax(-1), truth),
        -(truth * z.log_softmax(-1)).sum(),
    ):
        (slope,) = torch.autograd.grad(expected, z, retain_graph=True)
        torch.testing.assert_close(slope, torch.zeros(3, dtype=torch.float64), atol=1e-15, rtol=0)
    best = expected_brier(truth, truth)
    for other in draw(50, 3, seed=3).softmax(-1):
        assert expected_brier(other, truth) > best
    # and the score itself averages to it: 7, 2 and 1 of ten truths
    targets = torch.tensor([0] * 7 + [1] * 2 + [2])
    assert brier_score(truth.expand(10, 3), targets) == pytest.approx(float(best), rel=1e-12)


def test_the_summary_holds_both_errors_and_the_means() -> None:
    found = outcomes(*some_predictions())
    told = summarise(found, bins=5)
    assert told.ece == calibration_error(reliability(found.confidence, found.hit, bins=5))
    mass = reliability(found.confidence, found.hit, bins=5, by="mass")
    assert told.ece_mass == calibration_error(mass)
    assert told.ece != told.ece_mass
    assert told.predictions == sum(b.size for b in told.bins) == 400
    assert told.accuracy == pytest.approx(float(found.hit.double().mean()))
    gap = abs(told.accuracy - told.confidence)
    one_bin = calibration_error(reliability(found.confidence, found.hit, bins=1))
    assert one_bin == pytest.approx(gap)
    assert told.ece >= gap - 1e-12  # more bins can only show more


@pytest.mark.parametrize(
    ("logits", "targets", "says"),
    [
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), "at least 1"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), "0 to 2"),
        (torch.zeros(2, 3), torch.tensor([0]), "(N,)"),
        (torch.full((1, 3), math.nan), torch.tensor([0]), "NaN"),
    ],
)
def test_wrong_input_gets_a_sentence(
    logits: torch.Tensor, targets: torch.Tensor, says: str
) -> None:
    with pytest.raises(ValueError) as error:
        outcomes(logits, targets)
    assert says in str(error.value)


def test_wrong_bins_get_a_sentence() -> None:
    c, h = torch.rand(4), torch.ones(4, dtype=torch.bool)
    with pytest.raises(ValueError, match="at least 1"):
        reliability(c, h, bins=0)
    with pytest.raises(ValueError, match="mass"):
        reliability(c, h, by="weight")
    with pytest.raises(ValueError, match="from 0 to 1"):
        reliability(c + 2.0, h)
    with pytest.raises(ValueError, match="positive"):
        outcomes(torch.zeros(1, 2), torch.tensor([0]), temperature=0.0)
    assert isinstance(outcomes(torch.zeros(1, 2), torch.tensor([0])), Outcomes)
