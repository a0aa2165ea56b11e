"""sensitivity/attention_jacobian.py, weight_blocks.py: streamed products equal dense ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from fenchel.attention import (
    ALiBi,
    AttentionSpec,
    Causal,
    Dense,
    Padding,
    Prior,
    Window,
    attend,
    attend_jvp,
    self_attention,
)
from fenchel.choice import Choice, Entmax, Hard, Softmax, Sparsemax
from fenchel.sensitivity import attention_jacobian, jacobian, self_attention_jacobian
from fenchel.sensitivity.bounds.covariance import terms
from fenchel.sensitivity.weight_blocks import WeightBlocks

Draw = Callable[..., Tensor]
CHOICES = [Softmax(), Softmax(2.5), Entmax(1.5), Entmax(1.25, 2.0), Sparsemax(), Hard()]
PRIORS: list[Prior | None] = [
    None,
    Causal(),
    Window(2, 1),
    ALiBi(4),
    Causal() + Padding(torch.tensor([7, 4])),
    Dense(torch.linspace(-2.0, 0.0, 7, dtype=torch.float64)),
]


@pytest.mark.parametrize("choice", CHOICES, ids=repr)
@pytest.mark.parametrize("prior", PRIORS, ids=lambda prior: type(prior).__name__)
@pytest.mark.parametrize("budget", [1, None], ids=["row by row", "whole"])
def test_it_is_the_derivative_of_attend(
    choice: Choice, prior: Prior | None, budget: int | None, draw: Draw
) -> None:
    q, k, v = draw(2, 4, 5, 3), draw(2, 2, 7, 3), draw(2, 2, 7, 6)
    J = attention_jacobian(q, k, v, choice=choice, prior=prior, budget=budget)

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, choice=choice, prior=prior, backend="reference")

    dq, dk, dv = draw(2, 4, 5, 3), draw(2, 2, 7, 3), draw(2, 2, 7, 6)
    _, moved = torch.func.jvp(f, (q, k, v), (dq, dk, dv))
    torch.testing.assert_close(J @ (dq, dk, dv), moved)
    u = draw(2, 4, 5, 6)
    _, pull = torch.func.vjp(f, q, k, v)
    torch.testing.assert_close(J.T @ u, pull(u))


@pytest.mark.parametrize("choice", [Softmax(2.5), Entmax(1.5), Sparsemax()], ids=repr)
@pytest.mark.parametrize("prior", PRIORS[:4], ids=lambda prior: type(prior).__name__)
@pytest.mark.parametrize("budget", [1, None], ids=["row by row", "whole"])
def test_a_sink_takes_part_and_does_not_move(
    choice: Choice, prior: Prior | None, budget: int | None, draw: Draw
) -> None:
    q, k, v, r = draw(2, 4, 5, 3), draw(2, 2, 7, 3), draw(2, 2, 7, 6), draw(4)
    J = attention_jacobian(q, k, v, choice=choice, prior=prior, budget=budget, sink=r)

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, choice=choice, prior=prior, sink=r, backend="reference")

    dq, dk, dv = draw(2, 4, 5, 3), draw(2, 2, 7, 3), draw(2, 2, 7, 6)
    torch.testing.assert_close(J @ (dq, dk, dv), torch.func.jvp(f, (q, k, v), (dq, dk, dv))[1])
    u = draw(2, 4, 5, 6)
    torch.testing.assert_close(J.T @ u, torch.func.vjp(f, q, k, v)[1](u))
    norms = torch.linalg.matrix_norm(J.dense(), 2)
    assert norms <= J.ceiling()
    each = attention_jacobian(q, k, v, choice=choice, prior=prior, each=True, sink=r)
    assert (torch.linalg.matrix_norm(each.dense(), 2) <= each.ceiling()).all()
    plain = attention_jacobian(q, k, v, choice=choice, prior=prior, each=True)
    heavy = attention_jacobian(q, k, v, choice=choice, prior=prior, each=True, sink=50.0)
    assert (heavy.ceiling() < 1e-3 * plain.ceiling()).all()  # all is the sink's: nothing moves


@pytest.mark.parametrize("choice", [Softmax(), Softmax(2.5), Entmax(1.5), Sparsemax()], ids=repr)
@pytest.mark.parametrize("prior", PRIORS[:4], ids=lambda prior: type(prior).__name__)
@pytest.mark.parametrize("budget", [1, None], ids=["row by row", "whole"])
@pytest.mark.parametrize("softcap", [0.4, 2.0, 50.0])
def test_under_a_cap_it_is_the_derivative_of_capped_attention(
    choice: Choice, prior: Prior | None, budget: int | None, softcap: float, draw: Draw
) -> None:
    q, k, v = 3.0 * draw(2, 4, 5, 3), draw(2, 2, 7, 3), draw(2, 2, 7, 6)
    how = {"choice": choice, "prior": prior, "softcap": softcap}
    J = attention_jacobian(q, k, v, **how, budget=budget)

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, **how, backend="reference")

    moves, u = (draw(2, 4, 5, 3), draw(2, 2, 7, 3), draw(2, 2, 7, 6)), draw(2, 4, 5, 6)
    _, moved = torch.func.jvp(f, (q, k, v), moves)
    torch.testing.assert_close(J @ moves, moved)
    _, pull = torch.func.vjp(f, q, k, v)
    torch.testing.assert_close(J.T @ u, pull(u))
    single = J.single()
    assert single.dtype == torch.float32
    few = tuple(move.float() for move in moves)
    torch.testing.assert_close(single @ few, moved.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("softcap", [0.3, 1.0, 5.0, 50.0])
@pytest.mark.parametrize("offset", [0.0, 40.0])
def test_under_a_cap_no_head_exceeds_its_bound(softcap: float, offset: float, draw: Draw) -> None:
    for size in (0.3, 2.0, 8.0):
        q, k, v = size * draw(1, 3, 6, 3), draw(1, 3, 6, 3) + offset, draw(1, 3, 6, 4)
        for dtype in (torch.float64, torch.float32):
            at = [x.to(dtype) for x in (q, k, v)]
            for wrt in ("q", "k", "v", "qkv"):
                J = attention_jacobian(*at, softcap=softcap, prior=Causal(), wrt=wrt, each=True)
                wide = [x.double() for x in at]
                exact = attention_jacobian(
                    *wide, softcap=softcap, prior=Causal(), wrt=wrt, each=True
                )
                true = torch.linalg.matrix_norm(exact.dense(), 2)
                parts = {cheap: terms(J.rows, at[2], cheap=cheap) for cheap in (True, False)}
                for found in parts.values():
                    named = {"q": found.query, "k": found.key, "v": found.mixing}
                    squares = sum(named[name].double().square() for name in wrt)
                    assert bool((squares.sqrt() >= true * (1 - 1e-12)).all())  # type: ignore[union-attr]
                assert bool((J.ceiling().double() >= true * (1 - 1e-12)).all())


def test_under_a_cap_the_bound_allows_for_keys_far_from_the_origin(draw: Draw) -> None:
    for offset in (10.0, 37.0, 100.0, 333.0, 1000.0):
        apart = draw(1, 8, 6, 1)
        k = (offset + 0.05 * apart).float()
        q, v = (0.2 / offset) * draw(1, 8, 6, 1).float(), apart.float()  # values go with keys
        wide = attention_jacobian(
            *(x.double() for x in (q, k, v)), softcap=50.0, wrt="q", each=True
        )
        true = torch.linalg.matrix_norm(wide.dense(), 2)
        J = attention_jacobian(q, k, v, softcap=50.0, wrt="q", each=True)
        assert bool((terms(J.rows, v, cheap=True).query.double() >= true).all())


def test_it_agrees_with_the_derivative_written_out(draw: Draw) -> None:
    qkv, moves = [tuple(draw(2, 3, 5, 4) for _ in range(3)) for _ in range(2)]
    J = attention_jacobian(*qkv, choice=Entmax(1.5), prior=Causal())
    torch.testing.assert_close(
        J @ moves, attend_jvp(qkv, moves, choice=Entmax(1.5), prior=Causal()).total
    )


@pytest.mark.parametrize("budget", [1, 13, 60, 10_000])
def test_the_size_of_a_block_changes_nothing(budget: int, draw: Draw) -> None:
    X, W = draw(11, 4), [draw(4, 4) for _ in range(3)]
    prior = Causal() + Window(6, 0)
    J, whole = (
        self_attention_jacobian(X, *W, prior=prior, budget=b, choice=Softmax(1.5))
        for b in (budget, 1 << 20)
    )
    torch.testing.assert_close(J.dense(), whole.dense())
    torch.testing.assert_close(J.T.dense(), whole.T.dense())


def test_no_block_is_larger_than_its_budget_and_forbidden_keys_are_never_touched(
    draw: Draw,
) -> None:
    q = draw(1, 1, 64, 4)
    blocks = list(WeightBlocks(q, q, AttentionSpec(prior=Causal(), scale=0.5), budget=64 * 8))
    assert len(blocks) == 8
    assert all(block.p.numel() <= 64 * 8 for block in blocks)
    assert [block.keys.stop for block in blocks] == [8, 16, 24, 32, 40, 48, 56, 64]


def test_each_head_is_an_operator_of_its_own(draw: Draw) -> None:
    q, k, v = draw(2, 4, 5, 3), draw(2, 2, 6, 3), draw(2, 2, 6, 2)
    J = attention_jacobian(q, k, v, each=True)
    assert (J.batch, J.shape) == ((2, 4), (10, 15 + 18 + 12))
    head = attention_jacobian(q[1, 3], k[1, 1], v[1, 1])
    torch.testing.assert_close(J.dense()[1, 3], head.dense())


def test_self_attention_of_heads_that_share_keys(draw: Draw) -> None:
    X, W_Q, W_K, W_V = draw(6, 5), draw(4, 5, 3), draw(2, 5, 3), draw(2, 5, 2)

    def f(X: Tensor) -> Tensor:
        return attend(*(X @ w for w in (W_Q, W_K, W_V)), prior=Causal(), backend="reference")

    J = self_attention_jacobian(X, W_Q, W_K, W_V, prior=Causal())
    torch.testing.assert_close(J.dense(), jacrev(f)(X).reshape(4 * 6 * 2, 30))
    each = self_attention_jacobian(X, W_Q, W_K, W_V, prior=Causal(), each=True)
    assert each.batch == (4,)
    torch.testing.assert_close(each.dense().flatten(0, 1), J.dense())


def test_a_batch_of_sequences_with_weights_of_their_own(draw: Draw) -> None:
    X, W = draw(3, 6, 4), [draw(3, 1, 4, 4) for _ in range(3)]
    J = self_attention_jacobian(X, *W, each=True, choice=Sparsemax())
    assert J.batch == (3, 1)
    for b in range(3):
        w = [m[b, 0] for m in W]
        alone = jacobian(lambda x, w=w: self_attention(x, *w, choice=Sparsemax()), X[b])
        torch.testing.assert_close(J.dense()[b, 0], alone.dense())


def test_a_saturated_row_moves_exactly_as_little_as_it_should() -> None:
    # Weights 1 - 2e, e, e with e = exp(-60): the difference of large numbers would be pure noise.
    k = torch.tensor([[0.0], [-60.0], [-60.0]], dtype=torch.float64)
    q = torch.ones(1, 1, dtype=torch.float64)
    v = torch.tensor([[1.0], [2.0], [5.0]], dtype=torch.float64)
    J = attention_jacobian(q, k, v, scale=1.0, wrt="q")
    e = torch.tensor(-60.0, dtype=torch.float64).exp()
    torch.testing.assert_close(J.dense()[0, 0], -60 * e * (1.0 + 4.0), rtol=1e-12, atol=0)


def test_rows_that_see_nothing_move_nothing(draw: Draw) -> None:
    q = draw(1, 1, 4, 3)
    J = attention_jacobian(q, q, q, prior=Causal(strict=True))
    D = J.dense().reshape(4, 3, 36)
    assert (D[0] == 0).all()
    assert (D[1:] != 0).any()


def test_half_precision_is_measured_in_float32(draw: Draw) -> None:
    q = draw(1, 1, 4, 3).bfloat16()
    J = attention_jacobian(q, q, q)
    assert J.dtype == torch.float32
    torch.testing.assert_close(J.dense(), attention_jacobian(*[q.float()] * 3).dense())


def test_mistakes_are_refused_in_one_sentence(draw: Draw) -> None:
    q = draw(2, 4, 5, 3)
    with pytest.raises(ValueError, match="each once"):
        attention_jacobian(q, q, q, wrt="qq")
    with pytest.raises(ValueError, match="same batch"):
        attention_jacobian(q, q[:1], q[:1])
    with pytest.raises(ValueError, match="divide"):
        self_attention_jacobian(draw(5, 4), draw(3, 4, 2), draw(2, 4, 2), draw(2, 4, 2))
    with pytest.raises(ValueError, match=r"weights \(\.\.\., M, D\)"):
        self_attention_jacobian(draw(5, 4), draw(3, 3), draw(4, 3), draw(4, 3))


@pytest.mark.parametrize("choice", [Softmax(), Entmax(1.5)], ids=repr)
def test_autocast_changes_no_number(choice: Choice) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, X = (torch.randn(1, 2, 6, 4, generator=generator) for _ in range(4))
    W = torch.randn(4, 4, generator=generator)

    def numbers() -> list[Tensor]:
        J = attention_jacobian(q, k, v, wrt="qk", choice=choice)
        of_self = self_attention_jacobian(X[0], W, W, W, choice=choice)
        return [J @ (q, k), *(J.T @ v), J.ceiling(), of_self @ X[0], of_self.ceiling()]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = numbers()
    torch.testing.assert_close(narrow, numbers(), atol=1e-6, rtol=1e-6)
