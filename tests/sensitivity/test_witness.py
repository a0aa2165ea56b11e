"""fenchel/sensitivity/witness.py: inputs that attain the growth rates, and why some cannot."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fenchel.attention import Causal, Dense, Padding, Prior, Window, self_attention
from fenchel.choice import Choice, Entmax, Softmax, Sparsemax
from fenchel.sensitivity import bounds, jacobian, self_attention_jacobian, spectral_norm, witness

Draw = Callable[..., Tensor]


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_growth_is_quadratic_with_the_exact_leading_constant(n: int, draw: Draw) -> None:
    for _ in range(5):
        W = draw(6, 3), draw(6, 3), draw(6, 4)
        norms = []
        for t in (100.0, 1000.0, 10_000.0):
            w = witness.blowup(*W, n, t)
            assert w.X.norm(dim=-1).max() == pytest.approx(t)
            assert w.direction.norm() == pytest.approx(1.0)
            moved = (self_attention_jacobian(w.X, *W) @ w.direction).norm()
            assert float(moved) / w.rate == pytest.approx(w.growth, rel=1e-2)
            norms.append(float(moved))
        exact = norms[-1] / 10_000.0**2
        assert exact == pytest.approx(w.growth, rel=1e-6)
        slope = math.log(norms[2] / norms[0]) / math.log(100.0)
        assert slope == pytest.approx(2.0, rel=1e-2)


def test_the_row_moves_by_the_formula_of_the_proof(draw: Draw) -> None:
    # Row i of dAtt(X) w is t^2 kappa (w.Au) W_V^T u + (1/n) W_V^T w, at every t.
    W_Q, W_K, W_V = draw(4, 4), draw(4, 4), draw(4, 4)
    A = W_Q @ W_K.mT / 2.0
    n = 5
    for t in (0.0, 1.0, 10.0, 100.0, 1000.0):
        u, w = draw(4), draw(4)
        X, move = torch.zeros(n, 4).double(), torch.zeros(n, 4).double()
        X[2], move[0] = t * u, w
        moved = torch.func.jvp(lambda X: self_attention(X, W_Q, W_K, W_V), (X,), (move,))[1][0]
        kappa = (n - 1) / n**2
        expected = t**2 * kappa * (w @ A @ u) * (u @ W_V) + (w @ W_V) / n
        torch.testing.assert_close(moved, expected, rtol=1e-12, atol=1e-12)


def test_pairs_of_inputs_at_any_distance_show_it_too(draw: Draw) -> None:
    W = draw(4, 4), draw(4, 4), draw(4, 4)
    ratios = []
    for t in (10.0, 100.0, 1000.0):
        w = witness.blowup(*W, 5, t)
        step = 1e-6 / t
        pair = self_attention(w.X + step * w.direction, *W) - self_attention(w.X, *W)
        ratios.append(float(pair.norm()) / step / t**2)
    assert ratios == pytest.approx([w.growth] * 3, rel=1e-2)


def test_balanced_signs_raise_the_constant() -> None:
    # (n - 1) / n instead of (n - 1) / n^2: Cov of +-t u is not reduced by its mean.
    W_Q = W_K = W_V = torch.eye(3, dtype=torch.float64)
    w = witness.blowup(W_Q, W_K, W_V, 5, 100.0, score_scale=1.0)
    assert w.growth == pytest.approx(4 / 5, rel=1e-9)
    assert sorted(w.X.sum(-1).sign().tolist()) == [-1.0, -1.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("choice", [Softmax(2.0), Entmax(1.5), Sparsemax()], ids=repr)
@pytest.mark.parametrize(
    "prior", [None, Causal(), Window(1, 0), Dense(torch.linspace(-0.3, 0.0, 6).double())], ids=repr
)
def test_it_blows_up_under_any_choice_and_prior(
    choice: Choice, prior: Prior | None, draw: Draw
) -> None:
    W = draw(4, 3), draw(4, 3), draw(4, 3)
    w = witness.blowup(*W, 6, 1e4, choice=choice, prior=prior)
    J = self_attention_jacobian(w.X, *W, choice=choice, prior=prior)
    assert float((J @ w.direction).norm()) / w.rate == pytest.approx(w.growth, rel=1e-3)


def test_scores_that_vanish_on_the_tokens_are_counted_in_full(draw: Draw) -> None:
    skew = draw(4, 4)
    skew = skew - skew.mT  # u^T A u = 0 for every u, so no row ever saturates
    eye = torch.eye(4, dtype=torch.float64)
    for n in (2, 3, 4, 7):
        w = witness.blowup(skew, eye, eye, n, 1e4)
        moved = (self_attention_jacobian(w.X, skew, eye, eye) @ w.direction).norm()
        assert float(moved) / w.rate == pytest.approx(w.growth, rel=1e-6)


def test_deep_kernels_of_the_weights_are_avoided() -> None:
    # A and W_V that almost miss one another: A reads one direction, W_V another.
    W_Q, W_V = torch.zeros(5, 5).double(), torch.zeros(5, 5).double()
    W_Q[0, 0], W_V[4, 4] = 1.0, 1.0
    eye = torch.eye(5, dtype=torch.float64)
    w = witness.blowup(W_Q, eye, W_V, 3, 1e3)
    moved = (self_attention_jacobian(w.X, W_Q, eye, W_V) @ w.direction).norm()
    assert w.growth > 0.01
    assert float(moved) / w.rate == pytest.approx(w.growth, rel=1e-2)


def test_a_lipschitz_map_is_refused_with_its_reason(draw: Draw) -> None:
    W, zero = draw(4, 4), torch.zeros(4, 4).double()
    with pytest.raises(ValueError, match=r"n = 1.*linear"):
        witness.blowup(W, W, W, 1, 10.0)
    with pytest.raises(ValueError, match=r"W_Q W_K\^T = 0.*averages"):
        witness.blowup(W, zero, W, 5, 10.0)
    left, right = torch.zeros(4, 4).double(), torch.zeros(4, 4).double()
    left[:, 0], right[:, 1] = 1.0, 1.0  # neither is 0, and their product is
    with pytest.raises(ValueError, match=r"W_Q W_K\^T = 0"):
        witness.blowup(left, right, W, 5, 10.0)
    with pytest.raises(ValueError, match="W_V = 0"):
        witness.blowup(W, W, zero, 5, 10.0)
    with pytest.raises(ValueError, match="second key"):
        witness.blowup(W, W, W, 5, 10.0, prior=Window(0, 0))


def test_the_exceptions_are_lipschitz_indeed(draw: Draw) -> None:
    W, zero = draw(4, 4), torch.zeros(4, 4).double()
    size = torch.linalg.matrix_norm(W, 2)
    for t in (1.0, 1e3):
        one = jacobian(lambda X: self_attention(X, W, W, W), t * draw(1, 4)).dense()
        torch.testing.assert_close(one, W.mT)
        flat = jacobian(lambda X: self_attention(X, W, zero, W), t * draw(5, 4)).dense()
        assert torch.linalg.matrix_norm(flat, 2) <= size * (1 + 1e-12)
        none = jacobian(lambda X: self_attention(X, W, W, zero), t * draw(5, 4)).dense()
        assert (none == 0).all()


def test_on_a_ball_growth_stays_below_the_bound_of_the_same_order(draw: Draw) -> None:
    W = draw(4, 4), draw(4, 4), draw(4, 4)
    for t in (10.0, 1000.0):
        w = witness.blowup(*W, 6, t)
        upper = bounds.ball(*W, n=6, radius=t)
        reached = w.growth * w.rate
        assert reached <= upper <= 30 * reached  # both are t^2: the bound has the right order


@pytest.mark.parametrize("n", [4, 16, 64, 256])
def test_the_minus_family_reaches_the_root_of_n(n: int) -> None:
    eye = torch.eye(3, dtype=torch.float64)
    w = witness.adversarial(-eye, eye, eye, n, 4.0, score_scale=1.0)
    assert w.growth == pytest.approx(1.0, abs=1e-3)
    assert w.rate == pytest.approx(math.sqrt(n - 1))
    assert w.X.norm(dim=-1).max() == pytest.approx(4.0)


def test_the_plus_family_peaks_and_falls() -> None:
    eye = torch.eye(3, dtype=torch.float64)
    sigma = [
        w.growth * w.rate
        for w in (
            witness.adversarial(eye, eye, eye, n, 4.0, score_scale=1.0) for n in (8, 256, 1024)
        )
    ]
    assert sigma[0] < sigma[1]
    assert sigma[2] < sigma[1]
    assert sigma[1] == pytest.approx(12.2, abs=0.3)


def test_the_direction_attains_the_growth(draw: Draw, generator: torch.Generator) -> None:
    W = draw(4, 4), draw(4, 4), draw(4, 4)
    for family in ("minus", "plus", "auto"):
        w = witness.adversarial(*W, 9, 2.0, family=family, generator=generator)
        J = self_attention_jacobian(w.X, *W)
        assert float((J @ w.direction).norm()) == pytest.approx(w.growth * w.rate, rel=1e-9)
        assert w.growth * w.rate <= float(spectral_norm(J).upper)
    with pytest.raises(ValueError, match="family"):
        witness.adversarial(*W, 9, 2.0, family="none")


def test_padding_too_leaves_a_row_that_grows(draw: Draw) -> None:
    W = draw(4, 4), draw(4, 4), draw(4, 4)
    prior = Padding(torch.tensor([3]))
    w = witness.blowup(*W, 6, 1e4, prior=prior)
    J = self_attention_jacobian(w.X, *W, prior=prior)
    assert float((J @ w.direction).norm()) / w.rate == pytest.approx(w.growth, rel=1e-3)
