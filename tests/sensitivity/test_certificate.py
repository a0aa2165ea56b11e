"""fenchel/sensitivity/certificate.py: both sides of a ball, and replay."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fenchel.attention import Causal, Dense, self_attention
from fenchel.choice import Entmax
from fenchel.sensitivity import Ball, Certificate, certify, jacobian, self_attention_jacobian
from fenchel.sensitivity.certificate import ascend, linear_maximiser, sigma_gradient
from fenchel.sensitivity.layers import SelfAttention

Draw = Callable[..., Tensor]
Instance = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
# n, d, score scale: the five instances of docs/maths/sensitivity.md
FIVE = [(16, 8, 0.3), (16, 8, 1.0), (16, 8, 3.0), (64, 8, 1.0), (64, 16, 3.0)]


@pytest.mark.parametrize(("n", "d", "scale"), FIVE)
def test_the_two_sides_are_near_on_the_five_instances(
    n: int, d: int, scale: float, instance: Instance, generator: torch.Generator
) -> None:
    X, *W = instance(n, d)
    layer = SelfAttention(*W, scale=scale / math.sqrt(d))
    for share, allowed in ((1e-3, 1.2), (1e-2, 3.0), (0.1, 10.0)):
        radius = share * math.sqrt(d)
        found = certify(layer, X, radius, "token", steps=15, restarts=0, generator=generator)
        assert found.lower <= found.upper <= allowed * found.lower
        assert ((found.witness - X).norm(dim=-1) <= radius * (1 + 1e-12)).all()


def test_climbing_points_exceed_no_certificate(draw: Draw, generator: torch.Generator) -> None:
    attempts, best = 0, 0.0
    for trial in range(12):
        n, d = 4, 3
        X, W = 1.5 * draw(n, d), [draw(d, d) for _ in range(3)]
        norm = "token" if trial % 2 else "fro"
        layer = SelfAttention(*W, prior=Causal() if trial % 3 == 0 else None)
        radius = 10 ** (-2.5 + 0.25 * trial)
        ball = Ball.of(radius, norm, n)
        found = certify(
            layer, X, radius, norm, failure=0.0, steps=12, restarts=0, generator=generator
        )
        # Hill climbing of 40 points at once, by mutation.
        moves = torch.stack([ball.within(1e6 * draw(n, d)) for _ in range(40)])
        top = torch.zeros(40, dtype=torch.float64)
        for generation in range(22):
            tried = moves + radius * 0.8**generation * draw(40, n, d)
            tried = torch.stack([ball.within(move) for move in tried])
            J = self_attention_jacobian(X + tried, *W, each=True, prior=layer.prior)
            sigma = torch.linalg.matrix_norm(J.dense(), 2)
            assert sigma.max() <= found.upper * (1 + 1e-12)
            better = sigma > top
            moves = torch.where(better.view(-1, 1, 1), tried, moves)
            top = torch.maximum(top, sigma)
            attempts += 40
        best = max(best, float(top.max()) / found.upper)
        if radius < 0.3:  # one hill: the ascent is as good as the search, at a fraction of its cost
            assert found.lower > 0.99 * float(top.max())
    assert attempts >= 10_000
    assert best > 0.9


def test_a_certificate_can_be_saved_read_and_replayed(
    tmp_path: Path, draw: Draw, generator: torch.Generator
) -> None:
    X, W = draw(6, 4), [draw(4, 4) for _ in range(3)]
    layer = SelfAttention(*W, choice=Entmax(1.5))
    found = certify(layer, X, 0.1, "fro", steps=10, restarts=1, generator=generator)
    found.save(tmp_path / "ball.safetensors")
    read = Certificate.load(tmp_path / "ball.safetensors")
    assert (read.lower, read.upper, read.radius, read.norm) == (
        found.lower,
        found.upper,
        0.1,
        "fro",
    )
    torch.testing.assert_close(read.witness, found.witness)
    again = read.replay(layer)
    torch.testing.assert_close(float(again.lower), read.lower, rtol=1e-6, atol=0)
    same = read.replay(lambda x: self_attention(x, *W, choice=Entmax(1.5)))
    torch.testing.assert_close(float(same.lower), read.lower, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="another function"):
        read.replay(lambda x: 0.1 * self_attention(x, *W))
    moved = Certificate(**{**vars(read), "witness": read.witness + 1.0})
    with pytest.raises(ValueError, match="outside the ball"):
        moved.replay(layer)


def test_a_file_that_is_no_certificate_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    path.write_bytes(b"not a certificate")
    with pytest.raises(ValueError, match="not a certificate"):
        Certificate.load(path)


def test_a_vanishing_ball_holds_the_exact_value(draw: Draw, generator: torch.Generator) -> None:
    X, W = draw(6, 4), [draw(4, 4) for _ in range(3)]
    exact = float(torch.linalg.matrix_norm(self_attention_jacobian(X, *W).dense(), 2))
    for norm in ("fro", "token"):
        found = certify(SelfAttention(*W), X, 1e-9, norm, steps=2, generator=generator)
        assert found.lower == pytest.approx(exact, rel=1e-6)
        assert found.ratio < 1.002


def test_modules_are_certified_and_unknown_functions_only_from_below(
    draw: Draw, generator: torch.Generator
) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).double()
    X = draw(5, 4)
    known = certify(network, X, 0.01, "token", steps=5, generator=generator)
    assert known.lower <= known.upper < 1.5 * known.lower
    unknown = certify(lambda x: network(x), X, 0.01, "token", steps=5, generator=generator)
    assert math.isinf(unknown.upper)
    assert unknown.failure == 0.0
    assert unknown.lower == pytest.approx(known.lower, rel=1e-3)


def test_the_slope_of_sigma_is_its_derivative(draw: Draw) -> None:
    X, W = draw(5, 3), [draw(3, 3) for _ in range(3)]

    def f(X: Tensor) -> Tensor:
        return self_attention(X, *W)

    U, _, V = torch.linalg.svd(jacobian(f, X).dense())
    g = sigma_gradient(f, X, U[:, 0], V[0])
    d = draw(5, 3)
    near = [torch.linalg.matrix_norm(jacobian(f, X + h * d).dense(), 2) for h in (1e-5, -1e-5)]
    torch.testing.assert_close((g * d).sum(), (near[0] - near[1]) / 2e-5, rtol=1e-5, atol=1e-7)
    assert (sigma_gradient(lambda x: x @ W[0], X, U[:, 0], V[0]) == 0).all()


def test_ascent_stays_in_the_ball_and_never_loses_what_it_found(
    draw: Draw, generator: torch.Generator
) -> None:
    X, W = draw(5, 3), [draw(3, 3) for _ in range(3)]
    layer = SelfAttention(*W)
    for ball in (Ball.of(0.3, "fro", 5), Ball.of(0.3, "token", 5)):
        peak = ascend(layer, layer.jacobian, X, ball, [X], steps=20, generator=generator)
        start = float(torch.linalg.matrix_norm(layer.jacobian(X).dense(), 2))
        assert peak.sigma > 1.05 * start
        move = peak.X - X
        torch.testing.assert_close(ball.within(move), move)
        g = draw(5, 3)
        best = (linear_maximiser(ball, g) * g).sum()
        for _ in range(50):
            assert (ball.within(1e6 * draw(5, 3)) * g).sum() <= best * (1 + 1e-12)


@pytest.mark.parametrize("radius", [1e-8, 1e-3, 0.1])
def test_rounding_takes_no_witness_out_of_the_ball_and_no_lower_end_above_the_upper(
    radius: float,
) -> None:
    """In float32 the two ends of an elementwise map differ by less than the rounding of a point."""
    x = torch.ones(2, 3)
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        certificate = certify(nn.Tanh(), x, radius, generator=generator)
        assert certificate.lower <= certificate.upper
        assert (certificate.witness.double() - x.double()).norm() <= radius


def test_in_float32_the_lower_end_is_not_above_the_norm_at_its_witness() -> None:
    """Scores near 100, whose rounding in float32 is far more than a unit of the last place."""
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        X, *W = (torch.randn(*shape, generator=generator) for shape in ((6, 4), *[(4, 4)] * 3))
        layer = SelfAttention(*W, scale=20.0)
        found = certify(layer, X, 1e-3, steps=4, restarts=0, generator=generator)
        exact = self_attention_jacobian(
            found.witness.double(), *(w.double() for w in W), scale=20.0
        ).dense()
        assert found.lower <= float(torch.linalg.matrix_norm(exact, 2)) * (1 + 1e-14)


def test_a_prior_that_learns_is_a_constant_of_a_certificate(draw: Draw) -> None:
    prior = Dense(nn.Parameter(draw(5, 5)))
    layer = SelfAttention(*(draw(4, 4) for _ in range(3)), prior=prior)
    found = certify(layer, draw(5, 4), 0.01, steps=2, restarts=1)
    assert 0 < found.lower <= found.upper < 2 * found.lower


def test_a_batch_of_sequences_is_refused(draw: Draw) -> None:
    with pytest.raises(ValueError, match="one sequence"):
        certify(torch.sin, draw(2, 3, 4), 0.1)
