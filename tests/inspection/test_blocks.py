"""fenchel/inspection/blocks.py: blocks and the network against dense Jacobians."""

import math
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from fenchel.inspection import open_model
from fenchel.inspection.blocks import (
    boyd_ascent,
    gain,
    growth,
    influence,
    measure_block,
    network,
)
from fenchel.inspection.linearisation import GraphJacobian, derivative
from fenchel.inspection.trace import ForwardTrace, NormInput
from fenchel.inspection_result import Method

METHOD = Method(
    dtype="float32",
    device="cpu",
    algorithm="",
    tolerance=0.01,
    iterations=40,
    failure=1e-6,
    seed=0,
)
IDS = torch.tensor([[5, 120, 7, 9, 33, 250, 17]])


def draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module", params=["llama", "bert", "opt"])
def trace(request: pytest.FixtureRequest, save: Callable[[str], Path]) -> ForwardTrace:
    return open_model(save(request.param)).trace(IDS)


@pytest.fixture(scope="module")
def matrices(trace: ForwardTrace) -> list[Tensor]:
    """The dense derivative of every block."""
    return [matrix(block.forward, block.input) for block in trace.blocks]


def matrix(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The dense derivative at x (1, T, M), by torch."""
    y = jacobian(f, x)
    return y.reshape(-1, x.numel()).double()


def steps(trace: ForwardTrace) -> list[GraphJacobian]:
    """The derivative of every block, as an inspection keeps it."""
    return [derivative(block.linearised, block.input) for block in trace.blocks]


def test_a_block_is_bracketed_in_both_norms(trace: ForwardTrace, matrices: list[Tensor]) -> None:
    for block, step, J in zip(trace.blocks, steps(trace), matrices, strict=True):
        found = measure_block(block, step, 1, METHOD, draw(), branches=True)
        T, M = block.input.shape[1:]
        true = float(torch.linalg.matrix_norm(J, 2))
        assert found.block.lower <= true * (1 + 1e-4)
        assert true <= found.block.upper * (1 + 1e-4)
        assert found.block.upper <= 1.02 * found.block.lower
        assert found.top == pytest.approx(torch.linalg.svdvals(J)[:4].tolist(), rel=0.05)
        blocks = torch.linalg.matrix_norm(J.view(T, M, T, M).transpose(1, 2), 2)
        sums = float(blocks.sum(-1).amax())  # the least sure upper bound token by token
        assert true / math.sqrt(T) <= found.token.lower <= sums * (1 + 1e-4)
        assert found.token.upper >= found.token.lower
        left, _, right = torch.linalg.svd(J)
        for ours, theirs in ((found.moved_by, right[0]), (found.shown_at, left[:, 0])):
            mass = theirs.view(T, M).square().sum(-1)
            assert ours == pytest.approx(mass.tolist(), abs=0.05)
        update = (block.output - block.input).norm() / block.input.norm()
        assert found.update == pytest.approx(float(update), rel=1e-5)
        assert found.attention is not None
        branch = block.attention_branch
        assert branch is not None
        own = float(torch.linalg.matrix_norm(matrix(branch.f, branch.x), 2))
        assert found.attention.lower == pytest.approx(own, rel=0.02)


def test_boyd_ascent_attains_its_value_and_never_falls(trace: ForwardTrace) -> None:
    block = trace.blocks[0]
    J = derivative(block.forward, block.input)
    start = torch.randn(block.input[0].shape, generator=draw())
    once, often = boyd_ascent(J, start, 1), boyd_ascent(J, start, 8)
    unit = start / start.norm(dim=-1, keepdim=True)
    assert float((J @ unit).norm(dim=-1).amax()) <= once * (1 + 1e-5)
    assert once <= often * (1 + 1e-5)


def test_climbing_reaches_the_norm_where_it_is_known() -> None:
    T, M = 6, 4
    a, b = (torch.nn.functional.normalize(torch.randn(T, M, generator=draw()), dim=-1),) * 2
    c = torch.randn(T, T, generator=draw())
    c[4] *= 5.0  # blocks c_ij a_i b_j^T: the norm is max_i sum_j |c_ij|, here of row 4
    J = derivative(lambda x: torch.einsum("ij,im,jn,bjn->bim", c, a, b, x), torch.zeros(1, T, M))
    start = torch.randn(T, M, generator=draw())
    assert boyd_ascent(J, start, 4) == pytest.approx(float(c[4].abs().sum()), rel=1e-5)


def test_the_gain_of_a_norm_layer_is_that_of_its_derivative() -> None:
    x = torch.randn(1, 5, 16, generator=draw(), dtype=torch.float64) * torch.arange(1, 6)[:, None]
    weight = torch.linspace(0.2, 1.5, 16, dtype=torch.float64)
    for kind in ("layer", "rms"):
        centred = x[0] - x[0].mean(-1, keepdim=True) if kind == "layer" else x[0]
        s = (centred.square().mean(-1) + 1e-5).sqrt()
        found = gain(NormInput("n", x, weight, 1e-5, kind))
        assert found.least == pytest.approx(float(1 / s.max()))
        assert found.most == pytest.approx(float(1 / s.min()))
        assert found.upper == pytest.approx(1.5 * float(1 / s.min()))

        def f(row: Tensor, kind: str = kind) -> Tensor:
            y = row - row.mean() if kind == "layer" else row
            return weight * y / (y.square().mean() + 1e-5).sqrt()

        true = max(torch.linalg.matrix_norm(jacobian(f, row), 2) for row in x[0])
        assert float(true) <= found.upper
        assert found.upper <= 1.3 * float(true)


def test_the_network_is_the_product_of_its_blocks(
    trace: ForwardTrace, matrices: list[Tensor]
) -> None:
    blocks = steps(trace)
    passed = enumerate(zip(trace.blocks, blocks, strict=True), 1)
    layers = [measure_block(p, step, i, METHOD, draw()) for i, (p, step) in passed]
    found = network(trace, blocks, layers, METHOD, draw(), lambda *_: None)
    parts = matrices
    J = reduce(lambda before, one: one @ before, parts)
    true = float(torch.linalg.matrix_norm(J, 2))
    assert found.stream.lower <= true * (1 + 1e-4)
    assert true <= found.stream.upper * (1 + 1e-4)
    assert found.exponent == pytest.approx(math.log(true) / len(parts), abs=0.01)
    alone = sum(math.log(float(torch.linalg.matrix_norm(part, 2))) for part in parts)
    assert found.blocks_exponent == pytest.approx(alone / len(parts), abs=0.02)
    assert sum(found.growth) == pytest.approx(math.log(found.stream.lower), abs=1e-3)
    assert trace.lm_head is not None
    assert found.logits is not None
    last = matrix(trace.lm_head, trace.blocks[-1].output)
    to_logits = float(torch.linalg.matrix_norm(last @ J, 2))
    assert found.logits.lower <= to_logits * (1 + 1e-4)
    assert to_logits <= found.logits.upper * (1 + 1e-4)


def test_growth_follows_one_direction_through_all_blocks(
    trace: ForwardTrace, matrices: list[Tensor]
) -> None:
    v = torch.randn(trace.blocks[0].input[0].shape, generator=draw())
    moved, wanted = v.flatten().double(), []
    for J in matrices:
        wanted.append(math.log(float((J @ moved).norm() / moved.norm())))
        moved = J @ moved
    assert growth(steps(trace), v) == pytest.approx(wanted, abs=1e-3)


def test_the_influence_map_is_right_on_average() -> None:
    T, M, many = 7, 3, 300
    A = torch.randn(T, M, T, M, generator=draw(), dtype=torch.float64)
    A[:2, :, 5:] = 0.0
    J = derivative(lambda x: torch.einsum("imjn,bjn->bim", A, x), torch.zeros(1, T, M).double())
    squares = A.square().sum((1, 3))  # |J_ij|_F^2
    wanted = torch.stack([squares[a:b].sum(0) for a, b in ((0, 2), (2, 5), (5, 7))])
    drawn = [influence(J, torch.Generator().manual_seed(seed), 3) for seed in range(many)]
    assert drawn[0].spans == [(0, 2), (2, 5), (5, 7)]
    values = torch.tensor([one.values for one in drawn]).double()
    torch.testing.assert_close(values.square().mean(0), wanted, rtol=0.2, atol=0.0)
    assert bool((values[:, 0, 5:] == 0).all())  # what cannot be seen moves nothing
    last = values[:, -1]
    relative = float((last.std(0) / last.mean(0)).square().mean().sqrt())
    stated = sum(one.error for one in drawn) / many
    assert 0.7 * relative <= stated <= 1.4 * relative
