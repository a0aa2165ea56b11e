"""fenchel/sensitivity/layers.py and perturbation.py: Jacobians, bounds over a ball, chains."""

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from fenchel.attention import Causal, angles, rotary
from fenchel.choice import Choice, Entmax, Softmax, Sparsemax
from fenchel.sensitivity import Ball, certify, jacobian
from fenchel.sensitivity.layers import (
    ActivationLayer,
    Chain,
    GatedLayer,
    LinearLayer,
    NormLayer,
    Residual,
    SelfAttention,
    rotation_matrices,
    with_dtype,
)
from fenchel.sensitivity.perturbation import NormEstimator, TokenLayer

Draw = Callable[..., Tensor]


def block(draw: Draw, M: int, H: int = 2) -> TokenLayer:
    """A pre-norm transformer block with every part of it."""
    D = M // H
    W_Q, W_K, W_V = (draw(H, M, D) / M**0.5 for _ in range(3))
    attention = SelfAttention(W_Q, W_K, W_V, draw(M, M) / M**0.5, prior=Causal())
    mlp = (
        LinearLayer(draw(M, 2 * M) / M**0.5, draw(2 * M)),
        ActivationLayer("gelu"),
        LinearLayer(draw(2 * M, M) / M),
    )
    return Chain(
        (
            Residual(Chain((NormLayer(1 + 0.1 * draw(M), draw(M)), attention))),
            Residual(Chain((NormLayer(kind="rms"), *mlp))),
        )
    )


def llama_block(draw: Draw, M: int, *, n: int, qk_norm: bool = False) -> TokenLayer:
    """RMSNorm, grouped rotary attention and SwiGLU, each branch with a skip connection."""
    H, G, D, F = 4, 2, 4, 3 * M
    positions = rotation_matrices(angles(torch.arange(n), D, dtype=torch.float64), D)
    norms = NormLayer(1 + 0.1 * draw(D), kind="rms"), NormLayer(1 + 0.1 * draw(D), kind="rms")
    attention = SelfAttention(
        draw(H, M, D) / M**0.5,
        draw(G, M, D) / M**0.5,
        draw(G, M, D) / M**0.5,
        draw(H * D, M) / (H * D) ** 0.5,
        prior=Causal(),
        rotations=positions,
        qk_norm=norms if qk_norm else None,
    )
    gated = GatedLayer(draw(M, F) / M**0.5, draw(M, F) / M**0.5)
    mlp = (gated, LinearLayer(draw(F, M) / F**0.5))
    return Chain(
        (
            Residual(Chain((NormLayer(1 + 0.1 * draw(M), kind="rms"), attention))),
            Residual(Chain((NormLayer(1 + 0.1 * draw(M), kind="rms"), *mlp))),
        )
    )


def layers(draw: Draw) -> dict[str, TokenLayer]:
    M = 4
    return {
        "swiglu": GatedLayer(draw(M, 6), draw(M, 6), biases=(draw(6), None)),
        "geglu": GatedLayer(draw(M, 3), draw(M, 3), "gelu"),
        "normalised queries": SelfAttention(
            draw(4, M, 2),
            draw(2, M, 2),
            draw(2, M, 3),
            draw(12, M),
            prior=Causal(),
            biases=(draw(4, 2), None, None),
            qk_norm=(NormLayer(draw(2), kind="rms"), NormLayer(kind="rms")),
        ),
        "parallel": Residual(
            SelfAttention(draw(M, 3), draw(M, 3), draw(M, M)), (LinearLayer(draw(M, M)),), 0.5
        ),
        "llama block": llama_block(draw, M, n=5),
        "llama block with normalised queries": llama_block(draw, M, n=5, qk_norm=True),
        "linear": LinearLayer(draw(M, 3), draw(3)),
        "layer norm": NormLayer(draw(M), draw(M)),
        "rms norm": NormLayer(draw(M), draw(M), kind="rms"),
        "plain norm": NormLayer(),
        "gelu": ActivationLayer("gelu"),
        "relu": ActivationLayer("relu"),
        "attention": SelfAttention(draw(M, 3), draw(M, 3), draw(M, 2)),
        "grouped": SelfAttention(draw(4, M, 2), draw(2, M, 2), draw(2, M, 3), prior=Causal()),
        "mixed": SelfAttention(draw(2, M, 2), draw(2, M, 2), draw(2, M, 3), draw(6, M)),
        "rotary": SelfAttention(
            draw(4, M, 4),
            draw(2, M, 4),
            draw(2, M, 3),
            draw(12, M),
            prior=Causal(),
            biases=(draw(4, 4), draw(2, 4), draw(2, 3)),
            rotations=rotation_matrices(angles(torch.arange(5), 4, dtype=torch.float64), 4),
        ),
        "partly rotary": SelfAttention(
            draw(M, 5),
            draw(M, 5),
            draw(M, 2),
            choice=Entmax(1.5),
            biases=(None, draw(5), None),
            rotations=rotation_matrices(
                angles(torch.tensor([3, 4, 9, 10, 40]), 4, dtype=torch.float64), 5
            ),
        ),
        "sparse": SelfAttention(draw(M, 3), draw(M, 3), draw(M, 2), choice=Sparsemax()),
        "residual": Residual(SelfAttention(draw(M, 3), draw(M, 3), draw(M, M), choice=Entmax(1.5))),
        "block": block(draw, M),
    }


def test_the_derivative_of_every_layer_is_the_one_autograd_gives(draw: Draw) -> None:
    X = draw(5, 4)
    for name, layer in layers(draw).items():
        exact = torch.autograd.functional.jacobian(layer, X)
        dense = layer.jacobian(X).dense()
        torch.testing.assert_close(dense, exact.reshape(dense.shape), msg=name)


@pytest.mark.parametrize("norm", ["token", "fro"])
@pytest.mark.parametrize("radius", [1e-3, 0.05, 0.5])
def test_everywhere_in_a_ball_a_layer_keeps_to_its_reach(
    radius: float, norm: str, draw: Draw
) -> None:
    X = 2 * draw(5, 4)
    ball = Ball.of(radius, norm, 5)
    for name, layer in layers(draw).items():
        reach = layer.ball_bound(X, ball, NormEstimator(0.0))
        here = layer.jacobian(X).dense()
        after = reach.carry(ball)
        for trial in range(12):
            move = draw(5, 4)
            if trial % 2:  # half of them with all of it on one token
                move = move * (torch.arange(5) == trial % 5).unsqueeze(-1)
            move = ball.within(1e6 * move)
            there = layer.jacobian(X + move).dense()
            assert torch.linalg.matrix_norm(there, 2) <= reach.upper * (1 + 1e-12), name
            assert torch.linalg.matrix_norm(there - here, 2) <= reach.variation + 1e-12, name
            moved = layer(X + move) - layer(X)
            assert moved.norm() <= after.total * (1 + 1e-9), name
            assert moved.norm(dim=-1).max() <= after.token * (1 + 1e-9), name


def test_in_a_vanishing_ball_a_network_has_the_norm_of_its_own_jacobian(draw: Draw) -> None:
    X = draw(6, 4)
    network = Chain((block(draw, 4), block(draw, 4), NormLayer(), LinearLayer(draw(4, 3))))
    exact = float(torch.linalg.matrix_norm(network.jacobian(X).dense(), 2))
    estimator = NormEstimator(1e-9, torch.Generator().manual_seed(0))
    reach = network.ball_bound(X, Ball.of(1e-7, "token", 6), estimator)
    assert exact <= reach.upper < 1.01 * exact
    assert 0 < estimator.spent < 1e-7
    product = math.prod(
        float(torch.linalg.matrix_norm(layer.jacobian(Y).dense(), 2))
        for layer, Y in zip(network.layers, _inputs(network, X), strict=True)
    )
    assert exact < product  # and far below what a product of exact block norms would say


def _inputs(network: Chain, X: Tensor) -> list[Tensor]:
    found = []
    for layer in network.layers:
        found.append(X)
        X = layer(X)
    return found


def test_a_choice_without_a_bound_reaches_infinity(draw: Draw) -> None:
    steep: Choice = Entmax(2.5)
    layer = SelfAttention(draw(4, 3), draw(4, 3), draw(4, 2), choice=steep)
    reach = layer.ball_bound(draw(5, 4), Ball.of(0.1, "fro", 5), NormEstimator(1e-9))
    assert math.isinf(reach.upper)
    assert math.isinf(reach.variation)


def test_a_rotation_goes_back_by_the_opposite_angles(draw: Draw) -> None:
    x, u = draw(2, 5, 8), draw(2, 5, 8)
    positions = torch.arange(5)
    J = jacobian(lambda x: rotary(x, positions), x)
    torch.testing.assert_close(J.T @ u, rotary(u, -positions))
    torch.testing.assert_close(torch.linalg.svdvals(J.dense()), torch.ones(80, dtype=torch.float64))


def test_a_ball_spends_on_the_largest_first() -> None:
    w = torch.tensor([1.0, 5.0, 3.0, 2.0], dtype=torch.float64)
    assert Ball(2.0, 2.0).share(w) == pytest.approx(20.0)  # one token takes all
    assert Ball(1.0, math.sqrt(2.5)).share(w) == pytest.approx(5.0 + 3.0 + 0.5 * 2.0)
    assert Ball.of(1.0, "token", 4).share(w) == pytest.approx(11.0)
    assert Ball(0.0, 0.0).share(w) == 0.0
    move = Ball(1.0, 1.5).within(torch.full((9, 4), 10.0))
    assert move.norm(dim=-1).max() <= 1.0
    assert move.norm() == pytest.approx(1.5)
    with pytest.raises(ValueError, match="fro"):
        Ball.of(1.0, "max", 3)
    with pytest.raises(ValueError, match="finite"):
        Ball.of(-1.0, "fro", 3)


def test_upper_norm_is_certain_or_spends_its_failure(draw: Draw) -> None:
    X = draw(5, 4)
    layer = SelfAttention(draw(4, 3), draw(4, 3), draw(4, 2), choice=Softmax())
    J = layer.jacobian(X)
    exact = float(torch.linalg.matrix_norm(J.dense(), 2))
    assert exact <= NormEstimator(0.0).upper_norm(J) < exact * (1 + 1e-12)
    estimator = NormEstimator(1e-6)
    assert exact <= estimator.upper_norm(J) < exact * 1.01
    assert estimator.spent == 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_without_an_eps_takes_that_of_its_input(dtype: torch.dtype) -> None:
    module = nn.RMSNorm(4).to(dtype)
    x = torch.full((1, 4), 1e-6, dtype=dtype)
    layer = NormLayer(module.weight.detach(), None, module.eps, "rms")
    attained = torch.autograd.functional.jacobian(module, x).reshape(4, 4)
    torch.testing.assert_close(layer.jacobian(x).dense(), attained, rtol=1e-5, atol=0.0)
    upper = layer.ball_bound(x, Ball(1e-7, 1e-7), NormEstimator(0.0)).upper
    assert upper >= float(torch.linalg.matrix_norm(attained, 2))


def test_a_llama_block_is_certified_from_both_sides(draw: Draw) -> None:
    X = 2 * draw(8, 8)
    block = llama_block(draw, 8, n=8)
    for radius, most in ((1e-3, 1.05), (1e-2, 1.6)):
        certificate = certify(block, X, radius, steps=20, restarts=1)
        assert certificate.lower <= certificate.upper
        assert certificate.ratio < most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("behind", ["relu", "layer", "rms", "attention"])
def test_a_chain_holds_where_its_centre_is_rounding(behind: str, dtype: torch.dtype) -> None:
    """A map whose terms cancel, before a kink or a large gain, in a ball smaller than rounding."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

    after: dict[str, Callable[[], TokenLayer]] = {
        "relu": lambda: ActivationLayer("relu"),
        "layer": lambda: NormLayer(eps=1e-30),
        "rms": lambda: NormLayer(eps=1e-30, kind="rms"),
        "attention": lambda: Chain((NormLayer(eps=1e-30), SelfAttention(*normal(3, 4, 4)))),
    }
    for _ in range(12):
        X, W = normal(2, 4), normal(4, 4)
        exact = X[0].double() @ W.double()
        network = Chain((LinearLayer(W, (-exact).to(dtype)), after[behind]()))
        ball = Ball.of(1e-3 * torch.finfo(dtype).eps, "fro", 2)
        upper = network.ball_bound(X, ball, NormEstimator(0.0)).upper
        # The exact value of X W + b, to 1e-16 of its rounding: products and sums of fractions.
        truth = _exact_norm(network, X)
        assert upper >= truth * (1.0 - 1e-9)


def _exact_norm(network: Chain, X: Tensor) -> float:
    """|J| at X, the first map evaluated with fractions and the rest in float64."""
    first, behind = network.layers
    assert isinstance(first, LinearLayer)
    assert first.b is not None
    W = [[Fraction(w) for w in row] for row in first.W.double().tolist()]
    rows = [
        [
            float(sum(Fraction(x) * w[j] for x, w in zip(row, W, strict=True)) + Fraction(b))
            for j, b in enumerate(first.b.double().tolist())
        ]
        for row in X.double().tolist()
    ]
    Y = torch.tensor(rows, dtype=torch.float64)
    J = with_dtype(behind, torch.float64).jacobian(Y) @ with_dtype(first, torch.float64).jacobian(
        X.double()
    )
    return float(torch.linalg.matrix_norm(J.dense(), 2))
