"""fenchel/sensitivity/operator.py: every layout, adjoints, and the algebra of operators."""

from collections.abc import Callable
from decimal import Decimal

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, scaled_dot_product_attention

from fenchel.attention import Causal, self_attention
from fenchel.choice import Entmax, Softmax, Sparsemax
from fenchel.sensitivity import (
    Matrix,
    Operator,
    attention_jacobian,
    difference_jacobian,
    identity,
    jacobian,
    self_attention_jacobian,
    spectral_norm,
)
from fenchel.sensitivity.layers import (
    ActivationLayer,
    Chain,
    LinearLayer,
    NormLayer,
    Residual,
    SelfAttention,
    TokenMap,
)
from fenchel.sensitivity.operator import Scaled

Draw = Callable[..., Tensor]


def operators(draw: Draw) -> dict[str, Operator]:
    """One of every kind; every size differs."""
    X, W_Q, W_K, W_V = draw(5, 4), draw(4, 3), draw(4, 3), draw(4, 2)
    q, k, v = draw(2, 4, 5, 3), draw(2, 2, 6, 3), draw(2, 2, 6, 7)
    gamma, square = draw(4), draw(4, 4)
    found: dict[str, Operator] = {
        "matrix": Matrix(draw(3, 5)),
        "batch of matrices": Matrix(draw(2, 3, 5)),
        "identity": identity(X),
        "function": jacobian(gelu, X),
        "batch of functions": jacobian(lambda x: gelu(x @ W_V), draw(6, 5, 4), batch=1),
        "several inputs": jacobian(scaled_dot_product_attention, (q, q, q)),
        "in q": attention_jacobian(q, k, v, wrt="q"),
        "in k and v": attention_jacobian(q, k, v, wrt="kv", prior=Causal()),
        "each head": attention_jacobian(q, k, v, each=True, choice=Sparsemax()),
        "one axis of heads": attention_jacobian(q[0], k[0], v[0]),
        "no heads": attention_jacobian(q[0, 0], k[0, 0], v[0, 0], choice=Entmax(1.5)),
        "self-attention": self_attention_jacobian(X, W_Q, W_K, W_V, choice=Softmax(2.0)),
        "heads of one X": self_attention_jacobian(
            draw(3, 5, 4), draw(6, 4, 3), draw(2, 4, 3), draw(2, 4, 8)
        ),
        "each head of X": self_attention_jacobian(
            draw(3, 5, 4), draw(6, 4, 3), draw(2, 4, 3), draw(2, 4, 8), each=True
        ),
        "difference": difference_jacobian(lambda x: gelu(x @ W_V), X),
        "layer norm": NormLayer(gamma).jacobian(X),
        "rms norm": NormLayer(gamma, kind="rms").jacobian(X),
        "activation": ActivationLayer("silu").jacobian(X),
        "linear": LinearLayer(W_V).jacobian(X),
        "block": Residual(Chain((NormLayer(), SelfAttention(W_Q, W_K, square)))).jacobian(X),
    }
    found["transpose"] = found["self-attention"].T
    found["product"] = jacobian(lambda y: y @ W_V.mT, draw(5, 2)) @ found["self-attention"]
    found["sum"] = identity(X) + jacobian(torch.sin, X)
    found["scaled"] = Scaled(jacobian(torch.sin, X), 0.3)
    return found


def test_forward_and_reverse_are_adjoint_on_every_operator(
    draw: Draw, generator: torch.Generator
) -> None:
    for name, J in operators(draw).items():
        v, u = (
            torch.randn(3, *J.batch, size, dtype=J.dtype, generator=generator)
            for size in (J.shape[1], J.shape[0])
        )
        forward = (J.apply(v) * u).sum(-1)
        reverse = (v * J.adjoint(u)).sum(-1)
        torch.testing.assert_close(forward, reverse, rtol=1e-9, atol=1e-9, msg=name)


def test_the_dense_matrix_is_that_of_the_products(draw: Draw) -> None:
    for name, J in operators(draw).items():
        D = J.dense(columns=3)
        assert D.shape == (*J.batch, *J.shape), name
        back = J.T.dense()
        torch.testing.assert_close(D, back.mT, rtol=1e-8, atol=1e-8, msg=name)


def test_a_ceiling_is_above_the_norm_wherever_there_is_one(draw: Draw) -> None:
    for name, J in operators(draw).items():
        ceiling = J.ceiling()
        if ceiling is not None:
            norm = torch.linalg.matrix_norm(J.dense(), 2)
            assert ceiling.shape == J.batch, name
            assert (ceiling >= norm * (1 - 1e-12)).all(), name


def test_a_vector_may_be_shaped_or_flat_or_stacked_or_in_columns(draw: Draw) -> None:
    X, W = draw(5, 4), draw(4, 2)
    J = jacobian(lambda x: x @ W, X)
    v = draw(5, 4)
    out = v @ W
    torch.testing.assert_close(J @ v, out)
    torch.testing.assert_close(J @ v.flatten(), out.flatten())
    torch.testing.assert_close(J @ torch.stack([v, -v, 2 * v]), torch.stack([out, -out, 2 * out]))
    columns = torch.stack([v.flatten(), -v.flatten()], 1)
    torch.testing.assert_close(J @ columns, torch.stack([out.flatten(), -out.flatten()], 1))
    assert J.shape == (10, 20)
    torch.testing.assert_close(J.T @ out, out @ W.mT)


def test_several_inputs_travel_as_a_tuple(draw: Draw) -> None:
    q, k, v = draw(1, 2, 4, 3), draw(1, 1, 5, 3), draw(1, 1, 5, 6)
    J = attention_jacobian(q, k, v)
    assert J.shape == (48, 24 + 15 + 30)
    moved = J @ (q, k, v)
    assert moved.shape == (1, 2, 4, 6)
    back = J.T @ moved
    assert [g.shape for g in back] == [q.shape, k.shape, v.shape]
    stacked = J @ tuple(torch.stack([x, -x]) for x in (q, k, v))
    torch.testing.assert_close(stacked, torch.stack([moved, -moved]))
    flat = torch.cat([x.flatten() for x in (q, k, v)])
    torch.testing.assert_close(J @ flat, moved.flatten())


def test_operators_add_and_multiply_as_their_matrices_do(draw: Draw) -> None:
    X, W = draw(5, 4), draw(4, 4)
    A, B = jacobian(torch.sin, X), jacobian(lambda x: torch.tanh(x @ W), X)
    torch.testing.assert_close((A @ B).dense(), A.dense() @ B.dense())
    torch.testing.assert_close((A + B).dense(), A.dense() + B.dense())
    torch.testing.assert_close(Scaled(A, 0.3).dense(), 0.3 * A.dense())
    torch.testing.assert_close(Scaled(A, 0.3).T.dense(), 0.3 * A.dense().mT)
    assert A.T.T is A


def test_a_block_of_a_network_is_written_as_it_is_drawn(draw: Draw) -> None:
    X, gamma, W = draw(6, 4), draw(4), [draw(4, 4) for _ in range(3)]
    norm = NormLayer(gamma)
    Y = norm(X)
    block = identity(X) + self_attention_jacobian(Y, *W) @ norm.jacobian(X)
    whole = jacobian(lambda x: x + self_attention(norm(x), *W), X)
    torch.testing.assert_close(block.dense(), whole.dense())


def test_mistakes_are_answered_with_the_shapes(draw: Draw) -> None:
    J = jacobian(torch.sin, draw(5, 4))
    with pytest.raises(ValueError, match=r"\(5, 4\).*got \(3, 3\)"):
        J @ draw(3, 3)
    with pytest.raises(ValueError, match="one size"):
        J + jacobian(torch.sin, draw(4, 4))
    with pytest.raises(ValueError, match="output of B"):
        J @ jacobian(torch.sin, draw(4, 4))
    with pytest.raises(ValueError, match="two or more axes"):
        Matrix(draw(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ceiling_is_rounded_up(dtype: torch.dtype) -> None:
    """Of rank one the Frobenius norm is the spectral norm, |a| |b|, known to 40 digits."""
    g = torch.Generator().manual_seed(0)
    for _ in range(100):
        a, b = (torch.randn(n, dtype=dtype, generator=g) for n in (5, 3))
        a, b = (x.mul(64).round().div(64) for x in (a, b))  # products of these are exact
        truth = _length(a) * _length(b)
        outer = torch.outer(a, b)
        ceilings = {
            "matrix": Matrix(outer).ceiling(),
            "token map": TokenMap(torch.zeros(2, 5, dtype=dtype), outer).ceiling(),
            "scaled": Scaled(Matrix(outer), -1.0).ceiling(),
            "product": (Matrix(a[:, None]) @ Matrix(b[None])).ceiling(),
            "sum": (Matrix(0.25 * outer) + Matrix(0.75 * outer)).ceiling(),
        }
        for name, ceiling in ceilings.items():
            assert ceiling is not None
            assert Decimal(float(ceiling)) >= truth, name
        bracket = spectral_norm(outer, failure=0.0, generator=g)
        assert Decimal(float(bracket.upper)) >= truth


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_the_ceiling_of_a_norm_layer_is_rounded_up(kind: str) -> None:
    g = torch.Generator().manual_seed(1)
    for _ in range(50):
        x = torch.randn(1, 8, generator=g)
        exact = NormLayer(eps=1e-5, kind=kind).jacobian(x.double()).dense()
        truth = float(torch.linalg.matrix_norm(exact, 2))
        assert float(NormLayer(eps=1e-5, kind=kind).jacobian(x).ceiling()) >= truth * (1 - 1e-15)  # type: ignore[arg-type]


def _length(x: Tensor) -> Decimal:
    return sum((Decimal(float(part)) ** 2 for part in x), Decimal(0)).sqrt()
