"""fenchel/optim/score/exact_step.py against dense least squares and autograd."""

import pytest
import torch
from torch import Tensor

from fenchel.optim import remove_gauge, score_step
from fenchel.optim.score.exact_step import ScoreMap, WeightMove, cg, whitening
from fenchel.optim.score.score_bounds import efficiency_lower, reachable_gradient

SOLVERS = ["raw", "exact", "spectral", "cg"]
SIZES = [(16, 8, 2), (9, 12, 3), (20, 7, 7)]  # tall, fewer tokens than features, full width
CAUSAL = torch.ones(11, 11, dtype=torch.bool).tril()


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def problem(n: int, d: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """X, W_Q, W_K, G with columns of unequal size, as real streams have."""
    X = draw(n, d, seed=seed) * torch.linspace(0.3, 3.0, d, dtype=torch.float64)
    return X, draw(d, k, seed=seed + 1), draw(d, k, seed=seed + 2), draw(n, n, seed=seed + 3)


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    X = draw(3, 11, 6, seed=seed)
    return X, draw(6, 2, seed=seed + 1), draw(6, 2, seed=seed + 2), draw(3, 11, 11, seed=seed + 3)


def dense(scores: ScoreMap) -> Tensor:
    """J as a matrix, column by column: (B n n, 2 d k)."""
    d, k = scores.W_Q.shape
    columns = []
    for e in torch.eye(2 * d * k, dtype=torch.float64):
        Q, K = e.reshape(2, d, k)
        columns.append(scores.linear(WeightMove(Q, K)).flatten())
    return torch.stack(columns, dim=1)


def change(X: Tensor, W_Q: Tensor, W_K: Tensor, dW_Q: Tensor, dW_K: Tensor) -> Tensor:
    return X @ (W_Q + dW_Q) @ (W_K + dW_K).mT @ X.mT - X @ W_Q @ W_K.mT @ X.mT


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("solver", ["exact", "cg"])
def test_the_direction_is_that_of_dense_least_squares(
    size: tuple[int, int, int], solver: str
) -> None:
    X, W_Q, W_K, G = problem(*size)
    step = score_step(X, W_Q, W_K, G, 0.1, solver=solver)
    scores = ScoreMap(X[None], W_Q, W_K)
    ours = scores.linear(WeightMove(step.dW_Q, step.dW_K)).flatten()
    J = dense(scores)
    best = -J @ (torch.linalg.pinv(J, rtol=1e-11) @ G.flatten())
    torch.testing.assert_close(ours / ours.norm(), best / best.norm(), atol=1e-10, rtol=0)


def test_cg_is_least_squares_on_the_batched_masked_operator() -> None:
    X, W_Q, W_K, G = batch()
    step = score_step(X, W_Q, W_K, G, 0.1, solver="cg", mask=CAUSAL)
    scores = ScoreMap(X, W_Q, W_K, CAUSAL)
    ours = scores.linear(WeightMove(step.dW_Q, step.dW_K)).flatten()
    J = dense(scores)
    best = -J @ (torch.linalg.pinv(J, rtol=1e-11) @ (G * CAUSAL).flatten())
    torch.testing.assert_close(ours / ours.norm(), best / best.norm(), atol=1e-10, rtol=0)


def test_the_adjoint_is_the_gradient() -> None:
    X, W_Q, W_K, G = batch()
    W = [W_Q.requires_grad_(), W_K.requires_grad_()]
    S = (X @ W_Q @ W_K.mT @ X.mT) * CAUSAL
    found = torch.autograd.grad((S * G).sum(), W)
    adjoint = ScoreMap(X, W_Q.detach(), W_K.detach(), CAUSAL).adjoint(G)
    torch.testing.assert_close(adjoint, WeightMove(*found))


def test_the_linear_part_of_a_change_pairs_with_the_gradient_through_the_weights() -> None:
    X, W_Q, W_K, G = problem(16, 8, 3)
    dW = WeightMove(draw(8, 3, seed=5), draw(8, 3, seed=6))
    scores, T = ScoreMap(X[None], W_Q, W_K), X.mT @ G @ X
    linear = X @ (W_Q @ dW.K.mT + dW.Q @ W_K.mT) @ X.mT
    torch.testing.assert_close(scores.linear(dW)[0], linear)
    product = X @ dW.Q @ dW.K.mT @ X.mT
    torch.testing.assert_close(change(X, W_Q, W_K, *dW), linear + product)
    paired = (dW.Q * (T @ W_K)).sum() + (dW.K * (T.mT @ W_Q)).sum()
    torch.testing.assert_close((G * linear).sum(), paired)


def test_the_raw_and_the_exact_step_are_their_formulas() -> None:
    X, W_Q, W_K, G = problem(16, 8, 3)
    scores, T, C = ScoreMap(X[None], W_Q, W_K), X.mT @ G @ X, X.mT @ X
    Q, K = X @ W_Q, X @ W_K
    P_X, P_Q, P_K = (M @ torch.linalg.pinv(M) for M in (X, Q, K))
    best = P_Q @ G @ P_X + P_X @ G @ P_K - P_Q @ G @ P_K
    QQ, KK = torch.linalg.inv(Q.mT @ Q), torch.linalg.inv(K.mT @ K)
    half_Q, half_K = (torch.linalg.inv(C) - 0.5 * W @ WW @ W.mT for W, WW in ((W_Q, QQ), (W_K, KK)))
    formulas = {
        "raw": (
            WeightMove(-T @ W_K, -T.mT @ W_Q),
            -(Q @ Q.mT @ G @ X @ X.mT + X @ X.mT @ G @ K @ K.mT),
        ),
        "exact": (WeightMove(-half_Q @ T @ W_K @ KK, -half_K @ T.mT @ W_Q @ QQ), -best),
    }
    for solver, (dW, dS) in formulas.items():
        torch.testing.assert_close(scores.linear(dW)[0], dS)
        small, large = (score_step(X, W_Q, W_K, G, g, solver=solver) for g in (1e-6, 0.5))
        torch.testing.assert_close(small.dS, 1e-6 * dS / dS.norm(), rtol=1e-4, atol=1e-10)
        for step in (small, large):  # gamma sets the length, not the direction
            for ours, formula in zip((step.dW_Q, step.dW_K), dW, strict=True):
                torch.testing.assert_close(ours / step.dW_Q.norm(), formula / dW.Q.norm())
    torch.testing.assert_close(reachable_gradient(X, W_Q, W_K, G), best)
    torch.testing.assert_close(small.predicted, -1e-6 * best.norm(), rtol=1e-5, atol=0)
    # the same length in coordinates in which X^T X is the identity
    values, vectors = torch.linalg.eigh(C)
    root, inverse = (vectors * values**power @ vectors.mT for power in (0.5, -0.5))
    white = inverse @ T @ inverse
    U, Y = (M @ torch.linalg.pinv(M) for M in (root @ W_Q, root @ W_K))
    torch.testing.assert_close((U @ white + white @ Y - U @ white @ Y).norm(), best.norm())


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("gamma", [1e-4, 0.3, 5.0, 200.0])
def test_the_finite_change_of_the_scores_has_norm_gamma(solver: str, gamma: float) -> None:
    X, W_Q, W_K, G = problem(16, 8, 2)
    step = score_step(X, W_Q, W_K, G, gamma, solver=solver)
    finite = change(X, W_Q, W_K, step.dW_Q, step.dW_K)
    torch.testing.assert_close(step.dS, finite, atol=1e-11 * (1 + gamma), rtol=1e-9)
    assert float(step.dS.norm()) == pytest.approx(gamma, rel=1e-9)
    assert float(step.predicted) == pytest.approx(float((G * step.dS).sum()))


@pytest.mark.parametrize("seed", range(40))
def test_no_step_is_longer_than_gamma(seed: int) -> None:
    X, W_Q, W_K, G = problem(12, 6, 3, seed=10 * seed)
    gamma = 10.0 ** (seed % 8 - 3)
    for solver in SOLVERS:
        step = score_step(X, W_Q, W_K, G, gamma, solver=solver)
        assert float(step.dS.norm()) <= gamma * (1 + 1e-9)


@pytest.mark.parametrize("solver", ["raw", "spectral", "cg"])
def test_what_the_mask_hides_is_no_part_of_the_step(solver: str) -> None:
    X, W_Q, W_K, G = batch()
    hidden = G + 100.0 * draw(3, 11, 11, seed=9) * ~CAUSAL
    one, two = (score_step(X, W_Q, W_K, g, 0.5, solver=solver, mask=CAUSAL) for g in (G, hidden))
    assert float(one.dS.norm()) == pytest.approx(0.5, rel=1e-9)
    assert not one.dS[:, ~CAUSAL].any()
    torch.testing.assert_close(one.dW_Q, two.dW_Q)
    finite = change(X, W_Q, W_K, one.dW_Q, one.dW_K) * CAUSAL
    torch.testing.assert_close(one.dS, finite)


@pytest.mark.parametrize("solver", ["exact", "spectral", "cg"])
def test_the_score_change_does_not_depend_on_gauge_or_basis(solver: str) -> None:
    X, W_Q, W_K, G = problem(16, 8, 3)
    A, B = draw(3, 3, seed=7) + 2 * torch.eye(3), draw(8, 8, seed=8) + 4 * torch.eye(8)
    here = score_step(X, W_Q, W_K, G, 0.7, solver=solver)
    gauged = score_step(X, W_Q @ A, W_K @ A.inverse().mT, G, 0.7, solver=solver)
    other = B.inverse()
    moved = score_step(X @ B, other @ W_Q, other @ W_K, G, 0.7, solver=solver)
    torch.testing.assert_close(gauged.dS, here.dS, atol=1e-8, rtol=0)
    torch.testing.assert_close(moved.dS, here.dS, atol=1e-8, rtol=0)


def test_the_raw_step_does_depend_on_the_gauge() -> None:
    X, W_Q, W_K, G = problem(16, 8, 3)
    A = draw(3, 3, seed=7) + 2 * torch.eye(3)
    here = score_step(X, W_Q, W_K, G, 0.7, solver="raw")
    there = score_step(X, W_Q @ A, W_K @ A.inverse().mT, G, 0.7, solver="raw")
    assert (here.dS - there.dS).abs().max() > 1e-3


@pytest.mark.parametrize("seed", range(0, 200, 10))
def test_raw_gains_less_than_exact_and_at_least_the_efficiency_bound(seed: int) -> None:
    X, W_Q, W_K, G = problem(12, 6, 2, seed=seed)
    gamma = 1e-7  # small enough for the linear theory to seven digits
    raw, exact, spectral, cg = (
        float(score_step(X, W_Q, W_K, G, gamma, solver=s).predicted) for s in SOLVERS
    )
    assert cg == pytest.approx(exact, rel=1e-6)
    assert efficiency_lower(X, W_Q, W_K) <= raw / exact + 1e-6
    assert raw / exact <= 1 + 1e-6
    assert 0 < spectral / exact <= 1 + 1e-6


def test_without_the_shared_half_the_step_is_not_the_best() -> None:
    """The -1/2 of the closed form: both halves reach P_Q G P_K, and it must count once."""
    X, W_Q, W_K, G = problem(16, 8, 4)
    scores = ScoreMap(X[None], W_Q, W_K)
    X_, Q_, K_ = (torch.linalg.pinv(M) for M in (X, X @ W_Q, X @ W_K))
    twice = scores.linear(WeightMove(-X_ @ G @ K_.mT, -X_ @ G.mT @ Q_.mT))[0]
    best = score_step(X, W_Q, W_K, G, 1e-6).predicted / 1e-6
    assert float((G * twice).sum() / twice.norm()) > float(best) + 1e-3


@pytest.mark.parametrize("solver", ["exact", "spectral"])
def test_least_gauge_is_the_pseudo_inverse_and_changes_no_score_to_first_order(
    solver: str,
) -> None:
    X, W_Q, W_K, G = problem(16, 8, 3)
    own = score_step(X, W_Q, W_K, G, 1e-6, solver=solver)
    least = remove_gauge(W_Q, W_K, own.dW_Q, own.dW_K)
    scores = ScoreMap(X[None], W_Q, W_K)
    J = scores.linear(WeightMove(own.dW_Q, own.dW_K))
    torch.testing.assert_close(scores.linear(least), J, atol=1e-16, rtol=1e-9)
    shortest = torch.linalg.pinv(dense(scores), rtol=1e-11) @ J.flatten()
    ours = torch.cat([M.flatten() for M in least])
    torch.testing.assert_close(ours, shortest, atol=1e-15, rtol=1e-8)
    step = score_step(X, W_Q, W_K, G, 0.5, solver=solver, gauge="least")
    torch.testing.assert_close(W_Q.mT @ step.dW_Q, step.dW_K.mT @ W_K)
    assert float(step.dS.norm()) == pytest.approx(0.5, rel=1e-9)


def test_damping_shortens_the_weights_step_where_the_inputs_hardly_vary() -> None:
    X, W_Q, W_K, G = problem(16, 8, 2)
    X[:, 0] *= 1e-6
    for solver in ("exact", "spectral", "cg"):
        free = score_step(X, W_Q, W_K, G, 0.1, solver=solver)
        damped = score_step(X, W_Q, W_K, G, 0.1, solver=solver, damping=1e-2)
        assert damped.dW_Q.norm() < 0.1 * free.dW_Q.norm()
        assert damped.predicted < 0
        assert float(damped.dS.norm()) == pytest.approx(0.1, rel=1e-9)


def test_damped_cg_solves_the_damped_normal_equations() -> None:
    """(J^T J + damping) z = -J^T G in the whitened coordinates z, here with a dense J."""
    X, W_Q, W_K, G = batch()
    scores = ScoreMap(X, W_Q, W_K, CAUSAL)
    dW = cg(scores, G, 0.1)
    E_X, E_Q, E_K = whitening(scores, 0.1)
    out = torch.block_diag(torch.kron(E_X, E_K), torch.kron(E_X, E_Q))
    J = dense(scores) @ out
    eye = torch.eye(J.shape[1], dtype=torch.float64)
    z = torch.linalg.solve(J.mT @ J + 0.1 * eye, -J.mT @ (G * CAUSAL).flatten())
    ours = torch.cat([M.flatten() for M in dW])
    torch.testing.assert_close(ours, out @ z, atol=1e-10, rtol=0)


def test_a_gradient_that_no_weight_can_follow_gives_a_zero_step_with_the_reason() -> None:
    X, W_Q, W_K, G = problem(16, 8, 2)
    out = torch.eye(16, dtype=torch.float64) - X @ torch.linalg.pinv(X)
    for solver in SOLVERS:
        step = score_step(X, W_Q, W_K, out @ G @ out, 0.1, solver=solver)
        assert not any(M.any() for M in step)
        assert "T W_K and T^T W_Q vanish" in step.summary
    assert "the loss by -" in score_step(X, W_Q, W_K, G, 0.1).summary


def test_zero_weights_on_one_side_still_move_and_on_both_sides_do_not() -> None:
    X, W_Q, W_K, G = problem(16, 8, 2)
    nothing = torch.zeros_like(W_Q)
    for solver in SOLVERS:
        assert score_step(X, nothing, W_K, G, 0.1, solver=solver).predicted < 0
        assert not score_step(X, nothing, nothing, G, 0.1, solver=solver).dS.any()


def test_the_dtype_of_the_weights_is_kept() -> None:
    X, W_Q, W_K, G = (M.float() for M in problem(16, 8, 2))
    step = score_step(X, W_Q, W_K, G, 0.1)
    assert {M.dtype for M in step} == {torch.float32}
    assert float(step.dS.norm()) == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"solver": "newton"}, "solver='newton'"),
        ({"gauge": "none"}, "gauge='none'"),
        ({"gamma": -1.0}, "gamma=-1.0"),
        ({"damping": float("nan")}, "damping=nan"),
        ({"mask": torch.ones(16, 16)}, 'use solver="cg"'),
        ({"solver": "raw", "damping": 0.1}, "nothing to damp"),
        ({"G": torch.zeros(16, 15)}, "the shape of X X"),
        ({"W_K": torch.zeros(8, 3)}, "both \\(d, k\\)"),
        ({"X": torch.full((16, 8), float("nan"))}, "finite"),
    ],
)
def test_a_wrong_argument_is_answered_in_a_sentence(wrong: dict[str, object], words: str) -> None:
    X, W_Q, W_K, G = problem(16, 8, 2)
    given = {"X": X, "W_Q": W_Q, "W_K": W_K, "G": G, "gamma": 0.1, **wrong}
    with pytest.raises(ValueError, match=words):
        score_step(**given)  # type: ignore[arg-type]
