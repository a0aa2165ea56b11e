"""sensitivity/bounds/feedforward.py, attention.py: norm layers, activations, distance attention."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fenchel.sensitivity import bounds, jacobian
from fenchel.sensitivity.bounds.feedforward import SLOPES
from fenchel.sensitivity.layers import ActivationLayer

Draw = Callable[..., Tensor]


def norm(x: Tensor, kind: str, weight: Tensor | None = None) -> Tensor:
    if kind == "layer":
        return functional.layer_norm(x, x.shape[-1:], weight, None, 1e-5)
    return functional.rms_norm(x, x.shape[-1:], weight, 1e-5)


def true_norms(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.matrix_norm(jacobian(f, x, batch=1).dense(), 2)
    return norms


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("d", [3, 8, 40])
def test_a_norm_layer_has_exactly_the_gain_of_its_closed_form(
    kind: str, d: int, draw: Draw, spread_out: Draw
) -> None:
    x = draw(50, d) * spread_out(-3, 2, 50, 1)
    truth = true_norms(lambda x: norm(x, kind), x)
    torch.testing.assert_close(bounds.norm_layer(x, kind=kind), truth, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_with_weights_the_gain_is_never_exceeded_and_seldom_far(
    kind: str, draw: Draw, spread_out: Draw
) -> None:
    worst = 1.0
    for d in (1, 2, 3, 8):
        x, gamma = draw(2600, d) * spread_out(-3, 2, 2600, 1), draw(d)
        truth = true_norms(lambda x, gamma=gamma: norm(x, kind, gamma), x)
        bound = bounds.norm_layer(x, gamma, kind=kind)
        assert (bound >= truth * (1 - 1e-12)).all()
        if d == 8:
            worst = float((bound / truth).median())
    assert worst < 1.1


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_no_token_of_a_ball_exceeds_the_bound_of_the_ball(kind: str, draw: Draw) -> None:
    x = draw(5000, 4)
    radius = float(0.8 * x.norm(dim=-1).median())
    bound = bounds.norm_layer(x, kind=kind, radius=radius)
    inward = -(x - x.mean(-1, keepdim=True)) if kind == "layer" else -x
    for direction in (draw(5000, 4), inward):  # the worst way is towards the constant token
        move = direction / direction.norm(dim=-1, keepdim=True) * radius
        near = move * torch.minimum(torch.ones(()), inward.norm(dim=-1, keepdim=True) / radius)
        for y in (x + move, x + near):
            assert (bounds.norm_layer(y, kind=kind) <= bound * (1 + 1e-12)).all()


def test_the_global_constant_is_reached_by_a_constant_token() -> None:
    x = torch.full((1, 6), 3.0, dtype=torch.float64)
    everywhere = bounds.norm_layer(eps=1e-5)
    assert abs(float(everywhere) - 316.2278) < 1e-3
    truth = true_norms(lambda x: norm(x, "layer"), x)
    torch.testing.assert_close(truth, everywhere.double().reshape(1), rtol=1e-6, atol=0)
    assert bounds.norm_layer(eps=0.0) == math.inf


@pytest.mark.parametrize("name", sorted(SLOPES))
def test_slopes_are_the_derivatives_and_turn_at_their_turns(name: str) -> None:
    x = torch.linspace(-8.0, 8.0, 40_001, dtype=torch.float64)
    x = x[x != 0]
    y = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(ActivationLayer(name)(y).sum(), y)
    torch.testing.assert_close(SLOPES[name].at(x), slope, rtol=1e-9, atol=1e-12)
    steepest = SLOPES[name].steepest
    if math.isfinite(steepest):
        assert slope.abs().max() <= steepest * (1 + 1e-12)
        assert slope.abs().max() >= steepest * (1 - 1e-3)
    for turn in SLOPES[name].turns:
        here, left, right = SLOPES[name].at(
            torch.tensor([turn, turn - 1e-3, turn + 1e-3], dtype=torch.float64)
        )
        assert (left - here) * (right - here) > 0
    # Monotone between turns: as many changes of direction as there are turns.
    steps = slope.diff()
    steps = steps[steps.abs() > 1e-12].sign()
    assert int((steps.diff() != 0).sum()) == len(SLOPES[name].turns)


@pytest.mark.parametrize("name", sorted(SLOPES))
def test_no_number_within_reach_is_steeper_than_the_local_bound(
    name: str, draw: Draw, generator: torch.Generator
) -> None:
    x = 3 * draw(1000)
    for radius in (0.0, 0.1, 1.0, 5.0):
        bound = bounds.activation(name, x, radius=radius)
        share = 2 * torch.rand(10, 1000, dtype=torch.float64, generator=generator) - 1
        assert (SLOPES[name].at(x + radius * share).abs() <= bound).all()
    assert (bounds.activation(name, x, radius=1.0) <= float(bounds.activation(name)) + 1e-12).all()


def test_known_constants() -> None:
    assert float(bounds.activation("relu")) == 1.0
    assert abs(float(bounds.activation("gelu")) - 1.1289) < 1e-4
    found = SLOPES["gelu"].at(torch.tensor(math.sqrt(2.0), dtype=torch.float64))
    assert abs(float(found) - 1.1289041451851548) < 1e-15
    with pytest.raises(ValueError, match="did you mean 'gelu'"):
        bounds.activation("gleu")
    with pytest.raises(ValueError, match="kind"):
        bounds.norm_layer(kind="batch")


def test_distance_attention_is_lipschitz_with_the_square_of_its_query_weights(
    draw: Draw, spread_out: Draw
) -> None:
    attempts, nearest = 0, 0.0
    for n, d, D in ((1, 2, 2), (2, 2, 1), (3, 2, 2), (5, 3, 2)):
        for size in (0.1, 1.0, 10.0):
            W_Q, W_V = size * draw(d, D), draw(d, d)
            X = draw(900, n, d) * spread_out(-2, 1.5, 900, 1, 1) / size

            def f(X: Tensor, W_Q: Tensor = W_Q, W_V: Tensor = W_V) -> Tensor:
                return bounds.distance_attention(X, W_Q, W_V)

            truth = true_norms(f, X)
            bound = bounds.l2_attention(W_Q, W_V, n=n)
            assert (truth <= bound * (1 + 1e-12)).all()
            attempts += len(X)
            nearest = max(nearest, float(truth.max() / bound))
    assert attempts >= 10_000
    assert nearest > 0.2


def test_the_first_power_of_the_query_weights_would_not_do(draw: Draw) -> None:
    W_Q, W_V, X = 30 * torch.eye(2).double(), torch.eye(2).double(), draw(300, 3, 2) / 30
    truth = true_norms(lambda X: bounds.distance_attention(X, W_Q, W_V), X).max()
    right = bounds.l2_attention(W_Q, W_V, n=3)
    quoted = right / torch.linalg.matrix_norm(W_Q, 2)
    assert quoted < truth <= right


def test_distance_attention_with_heads_and_an_output_matrix(draw: Draw) -> None:
    W_Q, W_V, W_O = draw(3, 4, 2), draw(3, 4, 2), draw(6, 5)

    def f(X: Tensor) -> Tensor:
        heads = [bounds.distance_attention(X, W_Q[h], W_V[h]) for h in range(3)]
        return torch.cat(heads, -1) @ W_O

    truth = true_norms(f, draw(500, 4, 4))
    assert (truth <= bounds.l2_attention(W_Q, W_V, W_O, n=4)).all()
    with pytest.raises(ValueError, match="n >= 1"):
        bounds.l2_attention(W_Q, W_V, n=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("short", [1e-3, 1e-6, 1e-8, 1e-12])
def test_a_ball_that_nearly_reaches_the_constant_token(
    short: float, kind: str, dtype: torch.dtype, draw: Draw
) -> None:
    """The point of the ball nearest to it has s = sqrt((short |x|)^2 / d + eps)."""
    for _ in range(20):
        x = (5.0 + draw(1, 6)).to(dtype)
        length = (x.double() - x.double().mean() if kind == "layer" else x.double()).norm()
        radius = float((1 - short) * length)
        near = length - radius  # exact by Sterbenz, up to the rounding of the length itself
        bound = bounds.norm_layer(x, eps=1e-12, kind=kind, radius=radius)
        truth = (near.square() / 6 + 1e-12).rsqrt()
        assert float(bound) >= float(truth) * (1 - 1e-3 * (short < 1e-9))


@pytest.mark.parametrize("size", [1e-300, 1e-160, 1e160, 1e300])
def test_the_gain_of_a_norm_layer_has_no_scale_of_its_own(size: float, draw: Draw) -> None:
    x = draw(5, 4)
    plain = bounds.norm_layer(x, eps=0.0)
    torch.testing.assert_close(bounds.norm_layer(size * x, eps=0.0) * size, plain)


def test_softplus_is_linear_above_twenty_as_in_torch() -> None:
    for x in (19.0, 20.0, 20.5, 25.0, 40.0):
        point = torch.tensor([x], dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(functional.softplus(point).sum(), point)
        for radius in (0.0, 0.5):
            assert bounds.activation("softplus", point.detach(), radius=radius) >= slope
