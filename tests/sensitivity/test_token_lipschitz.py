"""fenchel/sensitivity/token_lipschitz.py: constants attacked, attained where a rule is exact."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from fenchel.attention import Causal
from fenchel.choice import Entmax
from fenchel.sensitivity.layers import (
    ActivationLayer,
    Chain,
    ElementwiseAffine,
    GatedLayer,
    LinearLayer,
    NormLayer,
    Residual,
    SelfAttention,
)
from fenchel.sensitivity.perturbation import TokenLayer
from fenchel.sensitivity.token_lipschitz import largest_stretch, logit_bound, token_bound

Draw = Callable[..., Tensor]
M, H, G, D, V, N = 6, 4, 2, 3, 9, 5


def stages(draw: Draw, size: float, *, eps: float, gated: bool) -> list[TokenLayer]:
    """A block with grouped heads, biases everywhere, and gains on its norms."""

    def norm() -> NormLayer:
        return NormLayer(1.0 + 0.3 * draw(M), 0.3 * draw(M), eps, "layer" if gated else "rms")

    heads = (size * draw(n, M, D) for n in (H, G, G))
    biases = draw(H, D), draw(G, D), draw(G, D)
    attention = SelfAttention(*heads, draw(H * D, M), prior=Causal(), biases=biases)
    up: tuple[TokenLayer, ...] = (LinearLayer(draw(M, 8), draw(8)), ActivationLayer("gelu"))
    if gated:
        up = (GatedLayer(draw(M, 8), draw(M, 8), "silu", (draw(8), draw(8))),)
    return [
        Residual(Chain((norm(), attention)), scale=0.5),
        Residual(Chain((norm(), *up, LinearLayer(draw(8, M)))), scale=0.3, skip=0.9),
        norm(),
    ]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("eps", [1.0, 0.01])
@pytest.mark.parametrize("size", [0.1, 1.0, 3.0])
def test_no_pair_of_inputs_and_no_ascent_exceeds_the_constant(
    draw: Draw, size: float, eps: float, gated: bool
) -> None:
    parts, head = stages(draw, size, eps=eps, gated=gated), LinearLayer(draw(M, V), draw(V))
    network, constant = Chain((*parts, head)), logit_bound(parts, head, M)
    for scale, step in product((0.01, 1.0, 10.0), (1e-3, 0.1, 3.0)):
        X, move = scale * draw(40, N, M), step * scale * draw(40, N, M)
        change = (network(X + move) - network(X)).abs().amax((-2, -1))
        assert (change <= constant * move.norm(dim=-1).amax(-1)).all()
    X = draw(N, M)
    found = largest_stretch(network, X, head.W.mT, steps=8)
    assert 0.0 < found.gain <= constant
    J = torch.autograd.functional.jacobian(lambda x: network(x)[-1, found.output], found.X)
    assert found.gain == pytest.approx(float(J.norm(dim=-1).sum()), rel=1e-9)


def test_the_rules_of_norm_linear_map_and_residual_are_attained(draw: Draw) -> None:
    W = torch.diag(draw(M).abs())
    norm = NormLayer(eps=0.25, kind="rms")
    layer = Residual(Chain((norm, LinearLayer(W))), scale=0.5)
    direction = 1e-9 * torch.nn.functional.one_hot(W.diagonal().argmax(), M).double()[None]
    attained = float((layer(direction) - layer(0.0 * direction)).norm() / direction.norm())
    constant = float(token_bound(layer, M).gain)
    assert attained <= constant <= attained * (1 + 1e-9)
    assert float(token_bound(norm, M).size) == pytest.approx(M**0.5, rel=1e-12)


def test_attention_is_charged_for_its_values_and_for_its_scores() -> None:
    """Values alone attain |W_V|; between two opposite tokens scores cost more than that."""
    one, R = torch.ones(1, 1, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    even = SelfAttention(0.0 * one, one, one, scale=1.0)
    assert float(token_bound(even, 1, R).gain) == pytest.approx(1.0, rel=1e-9)
    X = torch.tensor([[-1.0], [1.0], [0.0]], dtype=torch.float64)
    for scale in (1.0, 2.0, 5.0):
        layer = SelfAttention(one, one, one, scale=scale)
        J = torch.autograd.functional.jacobian(layer, X)[:, 0, :, 0]
        attained = float(J.abs().sum(-1).amax())
        constant = float(token_bound(layer, 1, R).gain)
        assert constant == pytest.approx(1.0 + 2.0 * scale, rel=1e-9)
        assert 1.0 + 0.6 * scale < attained <= constant


def test_matrices_that_cancel_are_charged_for_their_product() -> None:
    """Queries that no key meets cost no scores, values that W_O drops nothing at all."""
    R = torch.tensor(2.0, dtype=torch.float64)
    Q = torch.tensor([[1.0], [0.0]], dtype=torch.float64)  # one number of a token of two
    for K, W_O, constant in (
        (Q, torch.eye(2), 1.0 + 2.0 * 4.0),
        (0.0 * Q, torch.eye(2), 1.0),
        (Q, torch.zeros(2, 2), 0.0),
    ):
        heads = Q[None], K[None], torch.eye(2, dtype=torch.float64)[None]
        layer = SelfAttention(*heads, W_O.double(), scale=1.0)
        assert float(token_bound(layer, 2, R).gain) == pytest.approx(constant, abs=1e-9)
    turn = torch.tensor([[[0.0, -1.0], [1.0, 0.0]]], dtype=torch.float64)
    one = torch.eye(2, dtype=torch.float64)
    Q, K = (torch.outer(e, e)[None] for e in one)  # Q K^T = 0, until a rotation is between them
    still, turned = (
        SelfAttention(Q, K, one[None], scale=1.0, rotations=rotations) for rotations in (None, turn)
    )
    assert float(token_bound(still, 2, R).gain) == pytest.approx(1.0, rel=1e-9)
    assert float(token_bound(turned, 2, R).gain) == pytest.approx(9.0, rel=1e-9)


def test_an_mlp_is_charged_for_the_product_of_its_matrices() -> None:
    one = torch.eye(3, dtype=torch.float64)
    for name, steepest in (("relu", 1.0), ("gelu", 1.1289041), ("silu", 1.0998393)):
        parts = LinearLayer(2.0 * one), ActivationLayer(name), LinearLayer(one)
        assert float(token_bound(Chain(parts), 3).gain) == pytest.approx(2.0 * steepest, rel=1e-6)
    halves = LinearLayer(torch.cat((one, one), 1)), LinearLayer(torch.cat((one, -one), 0))
    nothing = Chain((halves[0], ActivationLayer("relu"), halves[1]))  # relu(x) - relu(x)
    assert float(token_bound(nothing, 3).gain) == pytest.approx(0.5 * 0.0 + 0.5 * 2.0, rel=1e-9)


def test_a_gated_mlp_is_charged_for_both_of_its_factors() -> None:
    """silu(x) x has a slope of nearly 2 R at x = R."""
    one, R = torch.ones(1, 1, dtype=torch.float64), torch.tensor(10.0, dtype=torch.float64)
    layer = GatedLayer(one, one, "silu")
    attained = float(torch.autograd.functional.jacobian(layer, R.view(1, 1)))
    constant = float(token_bound(layer, 1, R).gain)
    assert 0.9 * constant < attained <= constant


def test_a_layer_without_a_rule_is_refused(draw: Draw) -> None:
    heads = [draw(M, D) for _ in range(3)]
    refused = {
        "ElementwiseAffine": ElementwiseAffine(draw(M)),
        "another choice": SelfAttention(*heads, choice=Entmax(1.5)),
        "a sink": SelfAttention(*heads, sink=torch.zeros(1)),
    }
    for words, layer in refused.items():
        with pytest.raises(ValueError, match=words):
            token_bound(Chain((NormLayer(), layer)), M)
    unbounded = token_bound(SelfAttention(*heads), M)  # dot products of tokens of any length
    assert unbounded.gain.isinf()
