"""fenchel/sensitivity/bounds: upper bounds of attention, attacked, and how tight they are."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fenchel.attention import Causal, Padding, Prior
from fenchel.choice import Choice, Entmax, Hard, Softmax, Sparsemax
from fenchel.sensitivity import (
    attention_jacobian,
    bounds,
    self_attention_jacobian,
    spectral_norm,
    witness,
)

Draw = Callable[..., Tensor]
Instance = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
Weights = tuple[Tensor, Tensor, Tensor]
Array = npt.NDArray[Any]
DUST = 1e-13  # the truth is rounded as well


def sigma(X: Tensor, W: Weights, choice: Choice, prior: Prior | None) -> Tensor:
    """The true norms, by singular value decomposition."""
    J = self_attention_jacobian(X, *W, each=True, choice=choice, prior=prior)
    norms: Tensor = torch.linalg.matrix_norm(J.dense(), 2)
    return norms


def at_a_point(X: Tensor, W: Weights, choice: Choice, prior: Prior | None) -> dict[str, Tensor]:
    """Every bound that applies."""
    found = {
        "covariance": bounds.covariance(X, *W, choice=choice, prior=prior),
        "cheap": bounds.covariance(X, *W, choice=choice, prior=prior, cheap=True),
        "yudin": bounds.yudin(X, *W, choice=choice, prior=prior),
    }
    if isinstance(choice, Softmax | Sparsemax):
        found["generic"] = bounds.generic(X, *W, choice=choice, prior=prior)
    if choice == Softmax():
        n, radius = X.shape[-2], X.norm(dim=-1).amax(-1, keepdim=True)
        found["castin_at"] = bounds.castin_at(X, *W)
        found["castin"] = bounds.castin(*W, n=n, radius=radius)
        found["ball"] = bounds.ball(*W, n=n, radius=radius)
    return found


def wild(
    n: int, d: int, count: int, seed: int, token_spread: float, weight_spread: float, drift: float
) -> tuple[Tensor, Weights]:
    """Tokens and weights of every order of magnitude, with outliers and far from the origin."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    def sizes(width: float, *shape: int) -> Tensor:
        return 10.0 ** (width * (2 * torch.rand(*shape, dtype=torch.float64, generator=g) - 1))

    X = normal(count, n, d) * sizes(token_spread, count, n, 1) * sizes(1.0, count, 1, 1)
    X = X + drift * normal(count, 1, d)
    W_Q, W_K, W_V = (
        normal(count, 1, d, d) * sizes(weight_spread, count, 1, 1, 1) for _ in range(3)
    )
    return X, (W_Q, W_K, W_V)


@pytest.mark.parametrize("choice", [Softmax(), Softmax(2.5)], ids=repr)
@pytest.mark.parametrize("prior", [None, Causal()], ids=repr)
def test_no_bound_is_exceeded_by_wild_inputs(prior: Prior | None, choice: Choice) -> None:
    attempts = 0
    for seed, (n, d) in enumerate([(2, 1), (3, 2), (5, 3), (7, 2)]):
        for token_spread, drift in ((0.0, 0.0), (2.0, 0.0), (0.5, 5.0), (1.0, 30.0)):
            X, W = wild(n, d, 200, seed, token_spread, 1.0, drift)
            truth = sigma(X, W, choice, prior)
            for name, bound in at_a_point(X, W, choice, prior).items():
                assert (bound >= truth * (1 - DUST)).all(), (name, n, d)
            attempts += len(X)
    assert 4 * attempts >= 12_000  # every bound, over the four settings of this test


@pytest.mark.parametrize(
    "choice", [Entmax(1.5), Entmax(1.2, 2.0), Sparsemax(), Entmax(2.5), Hard()], ids=repr
)
def test_no_bound_is_exceeded_under_other_choices(choice: Choice) -> None:
    for seed, (n, d) in enumerate([(2, 1), (4, 2), (6, 3)]):
        for token_spread, drift in ((0.0, 0.0), (1.0, 5.0)):
            X, W = wild(n, d, 400, seed, token_spread, 0.7, drift)
            truth = sigma(X, W, choice, None)
            for name, bound in at_a_point(X, W, choice, None).items():
                assert (bound >= truth * (1 - DUST)).all(), (name, n, d)


@settings(max_examples=40)
@given(
    n=st.integers(2, 8),
    d=st.integers(1, 4),
    seed=st.integers(0, 2**31),
    token_spread=st.floats(0.0, 3.0),
    weight_spread=st.floats(0.0, 2.0),
    drift=st.floats(0.0, 100.0),
    mask=st.sampled_from(["none", "causal", "padded"]),
)
def test_no_bound_is_exceeded_by_what_hypothesis_finds(
    n: int,
    d: int,
    seed: int,
    token_spread: float,
    weight_spread: float,
    drift: float,
    mask: str,
) -> None:
    X, W = wild(n, d, 20, seed, token_spread, weight_spread, drift)
    lengths = torch.arange(20) % n + 1
    prior = {"none": None, "causal": Causal(), "padded": Padding(lengths)}[mask]
    truth = sigma(X, W, Softmax(), prior)
    for name, bound in at_a_point(X, W, Softmax(), prior).items():
        assert (bound >= truth * (1 - DUST)).all(), name


def climbing(n: int, d: int, seed: int) -> Iterator[tuple[Tensor, Weights]]:
    """Inputs that come nearer and nearer to exceeding the covariance bound."""
    g = torch.Generator().manual_seed(seed)
    X, W = wild(n, d, 100, seed, 0.5, 0.5, 1.0)
    ratio = sigma(X, W, Softmax(), None) / bounds.covariance(X, *W)
    for generation in range(30):
        size = 0.5 * 0.85**generation

        def shaken(A: Tensor, size: float = size) -> Tensor:
            noise = torch.randn(A.shape, dtype=A.dtype, generator=g)
            return A + size * A.abs().amax((-2, -1), keepdim=True) * noise

        Y, V = shaken(X), (shaken(W[0]), shaken(W[1]), shaken(W[2]))
        yield Y, V
        new = sigma(Y, V, Softmax(), None) / bounds.covariance(Y, *V)
        better = (new > ratio).squeeze(-1)
        pick = better.view(-1, 1, 1)
        X, ratio = torch.where(pick, Y, X), torch.maximum(new, ratio)
        W = tuple(torch.where(pick.unsqueeze(-1), b, a) for a, b in zip(W, V, strict=True))  # type: ignore[assignment]


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_no_bound_is_exceeded_by_inputs_that_climb_towards_it(seed: int) -> None:
    nearest = 0.0
    for X, W in climbing(4, 2, seed):  # 4 times 30 generations of 100
        truth = sigma(X, W, Softmax(), None)
        for name, bound in at_a_point(X, W, Softmax(), None).items():
            assert (bound >= truth * (1 - DUST)).all(), name
            nearest = max(nearest, float((truth / bound).max()))
    assert nearest > 0.99  # the climb gets there, so the bound was really attacked


@pytest.mark.parametrize("family", ["minus", "plus"])
def test_the_known_worst_inputs_exceed_nothing(family: str, draw: Draw) -> None:
    for _ in range(5):
        W = tuple(draw(3, 3) for _ in range(3))
        for n, radius in ((4, 0.5), (16, 2.0), (64, 4.0)):
            X = witness.adversarial(*W, n, radius, family=family).X
            truth = sigma(X, W, Softmax(), None)
            for name, bound in at_a_point(X, W, Softmax(), None).items():
                assert (bound >= truth * (1 - DUST)).all(), name


GRID = [
    (n, d, scale, prior)
    for n, d in ((8, 8), (32, 8), (64, 16), (128, 8))
    for scale in (0.3, 1.0, 3.0, 10.0)
    for prior in (None, Causal())
]


@pytest.mark.parametrize(("n", "d", "scale", "prior"), GRID)
def test_the_covariance_bound_is_within_three_on_random_tokens(
    n: int,
    d: int,
    scale: float,
    prior: Prior | None,
    instance: Instance,
    generator: torch.Generator,
) -> None:
    X, *W = instance(n, d, (2,))
    J = self_attention_jacobian(X, *W, each=True, prior=prior, scale=scale / math.sqrt(d))
    lower = spectral_norm(J, tol=1e-2, generator=generator).lower
    bound = bounds.covariance(X, *W, prior=prior, scale=scale / math.sqrt(d))
    assert (bound / lower < 3.0).all()


@pytest.mark.parametrize("n", [4, 64, 512])
def test_the_covariance_bound_is_exact_on_the_worst_family(n: int) -> None:
    eye = torch.eye(4, dtype=torch.float64)
    w = witness.adversarial(-eye, eye, eye, n, 4.0, family="minus", score_scale=1.0)
    bound = bounds.covariance(w.X, -eye, eye, eye, scale=1.0)
    assert bound / (w.growth * w.rate) < 1.01
    cheap = bounds.covariance(w.X, -eye, eye, eye, scale=1.0, cheap=True)
    assert cheap / (w.growth * w.rate) < 1.01


def test_the_three_causes_are_bounded_one_by_one(draw: Draw) -> None:
    X, W = draw(7, 4), tuple(draw(4, 4) for _ in range(3))
    terms = bounds.covariance_terms(X, *W, prior=Causal())
    q, k, v = (X @ w for w in W)
    for name, w, term in (
        ("v", W[2], terms.mixing),
        ("q", W[0], terms.query),
        ("k", W[1], terms.key),
    ):
        D = attention_jacobian(q, k, v, prior=Causal(), wrt=name).dense()
        alone = torch.linalg.matrix_norm(D @ torch.block_diag(*[w.mT] * 7), 2)
        assert alone <= term * (1 + 1e-12)
    torch.testing.assert_close(terms.total, terms.mixing + terms.query + terms.key)


def test_token_by_token_no_bound_is_exceeded(draw: Draw, spread_out: Draw) -> None:
    count = 0
    for n, d in ((2, 1), (4, 2), (5, 3)):
        for choice in (Softmax(), Entmax(1.5)):
            B = 250
            X = draw(B, n, d) * spread_out(-1, 1, B, n, 1)
            W = [draw(B, 1, d, d) * spread_out(-1, 0.5, B, 1, 1, 1) for _ in range(3)]
            J = self_attention_jacobian(X, *W, each=True, choice=choice)
            D = J.dense().reshape(B, n, d, n, d)
            bound = bounds.token_max(X, *W, choice=choice).reshape(B)
            for row in range(n):  # climb towards the largest move of each row
                block = D[:, row]  # (B, d, n, d)
                move = draw(B, n, d)
                for _ in range(8):
                    move = move / move.norm(dim=-1, keepdim=True).clamp(min=1e-300)
                    out = torch.einsum("benm,bnm->be", block, move)
                    assert (out.norm(dim=-1) <= bound * (1 + DUST)).all()
                    move = torch.einsum("benm,be->bnm", block, out)
                    count += B
            if choice == Softmax():
                wide = bounds.token_max_ball(*W, radius=X.norm(dim=-1).amax(-1, keepdim=True))
                assert (wide.reshape(B) >= bound * (1 - DUST)).all()
    assert count >= 10_000


def test_norm_layers_bound_the_radius(draw: Draw) -> None:
    gamma, beta = draw(6), draw(6)
    y = torch.nn.functional.layer_norm(100 * draw(500, 6), (6,), gamma, beta)
    assert y.norm(dim=-1).max() <= bounds.normalised_radius(6, gamma, beta)
    assert bounds.normalised_radius(9) == 3.0


def near_cluster(n: int, d: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Weights]:
    """Rows attend inside a cluster of spread about sqrt(eps), one far token at distance 1.

    Coordinate 0 is 1 for every token and makes the queries; scores fall off towards the far token.
    """
    g = torch.Generator().manual_seed(n)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    def sizes(low: float, high: float) -> Tensor:
        u = torch.rand(count, 1, 1, dtype=torch.float64, generator=g)
        return 10.0 ** (low + (high - low) * u)

    delta = sizes(-1.0, 1.0) * torch.finfo(dtype).eps ** 0.5
    X = delta * normal(count, n, d)
    X[:, -1] = 0.0
    X[:, -1, -1] = -1.0
    X[..., 0] = 1.0
    W_Q, W_K = torch.zeros(2, count, d, 1, dtype=torch.float64)
    W_Q[:, :1] = sizes(0.0, 1.3) / delta
    W_K[:, 1:] = normal(count, d - 1, 1)
    W_K[:, -1] = 1.0
    W = (W_Q, W_K, normal(count, d, d))
    return X.to(dtype), tuple(w.to(dtype).unsqueeze(1) for w in W)  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [3, 4, 6])
def test_no_bound_is_exceeded_in_a_cluster_far_from_other_tokens(
    n: int, dtype: torch.dtype
) -> None:
    X, W = near_cluster(n, 3, 300, dtype)
    exact = attention_matrix(*(np.asarray(A.double(), dtype=np.longdouble) for A in (X, *W)))
    truth = torch.linalg.matrix_norm(torch.from_numpy(exact.astype(np.float64)), 2)
    for cheap in (False, True):
        bound = bounds.covariance(X, *W, scale=1.0, cheap=cheap).double().reshape(-1)
        assert (bound >= truth * (1 - DUST)).all()
        assert cheap or (bound / truth).median() < 1.6
    blocks = torch.from_numpy(exact.astype(np.float64)).view(300, n, 3, n, 3)
    # One output coordinate moves by the sum of the lengths of its rows, in the token norm.
    tokens = blocks.norm(dim=-1).sum(-1).amax((1, 2))
    bound = bounds.token_max(X, *W, scale=1.0).double().reshape(-1)
    assert (bound >= tokens * (1 - DUST)).all()


def attention_matrix(X: Array, W_Q: Array, W_K: Array, W_V: Array) -> Array:
    """d Att(X) for scale 1 as matrices (B, n E, n M), in extended precision."""
    W_Q, W_K, W_V = (w[:, 0] for w in (W_Q, W_K, W_V))
    q, k, v = (np.einsum("bnm,bmd->bnd", X, w) for w in (W_Q, W_K, W_V))
    z = np.einsum("bid,bjd->bij", q, k)
    p = np.exp(z - z.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    far, wide = (y[:, None] - np.einsum("bij,bjd->bid", p, y)[:, :, None] for y in (v, k))
    key = np.einsum("bij,bije,bid,bmd->biejm", p, far, q, W_K)
    J = np.einsum("bij,bme->biejm", p, W_V) + key
    query = np.einsum("bij,bije,bijd,bmd->biem", p, far, wide, W_Q)
    for i in range(X.shape[1]):
        J[:, i, :, i] += query[:, i]
    return J.reshape(len(X), X.shape[1] * W_V.shape[-1], -1)
