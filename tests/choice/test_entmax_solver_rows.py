"""fenchel/choice/entmax_solver.py: blocks and the narrow table change nothing."""

import math

import pytest
import torch
from torch import Tensor

from fenchel.choice import entmax_solver
from fenchel.choice.base import centred
from fenchel.choice.entmax import spread, tsallis
from fenchel.choice.entmax_solver import bisect, tsallis_weights


def scores(scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = scale * torch.randn(3, 5, 70, dtype=torch.float64, generator=generator)
    x[0, 1, 3:60] = -math.inf
    x[2, 4] = -math.inf
    return x


def reference(x: Tensor, alpha: float | Tensor) -> Tensor:
    top = x.amax(-1, keepdim=True)
    y = (alpha - 1.0) * (x - torch.where(top.isinf(), 0.0, top))
    p = tsallis_weights(y + bisect(y, alpha), alpha)
    return torch.where(top.isinf(), 0.0, p / p.sum(-1, keepdim=True))


@pytest.mark.parametrize("few", [1, 8, 10**9], ids=["all in the table", "mixed", "no table"])
@pytest.mark.parametrize("block", [1, 150, 10**6])
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0, 3.0])
def test_blocks_and_table_give_the_reference(
    alpha: float, block: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entmax_solver, "_BLOCK", block)
    monkeypatch.setattr(entmax_solver, "_SPARSE", few)
    for scale in (0.2, 2.0, 20.0):
        x = scores(scale)
        p = entmax_solver.solve(x, alpha)
        torch.testing.assert_close(p, reference(x, alpha), atol=1e-9, rtol=1e-7)
        assert (p[2, 4] == 0).all()


def test_each_row_keeps_its_alpha(monkeypatch: pytest.MonkeyPatch) -> None:
    x = scores(2.0)
    alpha = torch.tensor([1.2, 1.5, 1.9, 2.5, 4.0], dtype=torch.float64)[:, None]
    wanted = torch.stack([reference(x[:, i], float(a)) for i, a in enumerate(alpha)], 1)
    for block in (1, 10**6):
        monkeypatch.setattr(entmax_solver, "_BLOCK", block)
        torch.testing.assert_close(entmax_solver.solve(x, alpha), wanted, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("block", [1, 150, 10**6])
def test_the_jacobian_product_is_that_of_the_spread(
    alpha: float, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entmax_solver, "_BLOCK", block)
    p = entmax_solver.solve(scores(1.0), alpha)
    v = scores(1.0).flip(-1).nan_to_num(neginf=0.5)
    torch.testing.assert_close(
        entmax_solver.jacobian_product(p, v, alpha), centred(spread(p, alpha), v)
    )
    each = torch.full((5, 1), alpha, dtype=torch.float64)
    torch.testing.assert_close(
        entmax_solver.jacobian_product(p, v, each), centred(spread(p, alpha), v)
    )


def test_the_caller_may_be_in_inference_mode_or_want_a_gradient() -> None:
    x = scores(1.0)
    wanted = reference(x, 1.5)
    with torch.inference_mode():
        torch.testing.assert_close(tsallis(x.clone(), 1.5), wanted, atol=1e-9, rtol=1e-7)
    leaf = x.clone().requires_grad_()
    p, v = tsallis(leaf, 1.5), x.flip(-1).nan_to_num(neginf=0.5)
    (g,) = torch.autograd.grad(p, leaf, v)
    torch.testing.assert_close(g, centred(spread(p.detach(), 1.5), v))


def test_scores_in_any_memory_order() -> None:
    x = scores(1.0)
    wanted = entmax_solver.solve(x, 1.5)
    torch.testing.assert_close(entmax_solver.solve(x.transpose(0, 1), 1.5), wanted.transpose(0, 1))
    columns = (40.0 * x[0]).T.contiguous().T  # few entries with weight, in a table of columns
    torch.testing.assert_close(
        entmax_solver.solve(columns, 1.5), entmax_solver.solve(columns.contiguous(), 1.5)
    )
    wide = x[:1].expand(4, 5, 70)
    torch.testing.assert_close(entmax_solver.solve(wide, 1.5), wanted[:1].expand(4, 5, 70))
    assert entmax_solver.solve(x[:0], 1.5).shape == (0, 5, 70)
