"""What depth does: residual blocks as Euler steps, gradients with and without skips, variances."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fenchel.model import ModelConfig, Transformer


def euler(steps: int) -> Transformer:
    """One block, used ``steps`` times with a step of 1 / steps."""
    config = ModelConfig(
        vocabulary=20, context=8, width=32, heads=4, layers=steps, distinct_layers=1,
        residual_scale=1.0 / steps, initial="xavier", initial_std=1.0,
    )  # fmt: skip
    return Transformer(config, generator=torch.Generator().manual_seed(0)).double()


@torch.no_grad()
def last_stream(model: Transformer) -> Tensor:
    seen: list[Tensor] = []
    hook = model.blocks[0].register_forward_hook(lambda _, __, out: seen.append(out))
    model(torch.arange(8)[None])
    hook.remove()
    return seen[-1]


def test_residual_blocks_are_euler_steps_of_a_flow() -> None:
    """NB-23, E63: x + f(x) is a step of size 1 of dx/dt = f(x); shorter steps near the flow.

    Each branch by itself is a step of its own part of f, in turn: first order too.
    """
    flow = last_stream(euler(512))
    gaps = [
        float((last_stream(euler(n)) - flow).norm() / flow.norm()) for n in (1, 2, 4, 8, 16, 32)
    ]
    assert 0.2 < gaps[0] < 0.5  # a step of size 1 is not the flow
    halved = [b / a for a, b in pairwise(gaps[1:])]
    assert halved == pytest.approx([0.5] * 4, abs=0.03)


def gradients(gain: float, *, skips: bool, seed: int) -> tuple[float, float]:
    """Norms of the gradients of the first and the last of 50 layers tanh(h W)."""
    generator = torch.Generator().manual_seed(seed)
    n, layers = 64, 50
    weights = [
        (gain * n**-0.5 * torch.randn(n, n, generator=generator)).requires_grad_()
        for _ in range(layers)
    ]
    h, target = torch.randn(2, 32, n, generator=generator).unbind()
    for W in weights:
        h = torch.tanh(h @ W) + (h if skips else 0.0)
    grads = torch.autograd.grad(0.5 * (h - target).square().mean(), [weights[0], weights[-1]])
    return float(grads[0].norm()), float(grads[1].norm())


@pytest.mark.parametrize("seed", range(3))
def test_whether_gradients_vanish_in_50_layers_depends_on_the_gain(seed: int) -> None:
    """NB-24, E64: skips prevent vanishing, not growth."""
    first, last = gradients(1.0, skips=False, seed=seed)
    assert 0.3 < first / last < 3.0  # at gain 1 nothing vanishes
    assert gradients(0.5, skips=False, seed=seed)[0] < 1e-12
    first, last = gradients(2.0, skips=False, seed=seed)
    assert first > 100.0 > 100.0 * last
    first, last = gradients(0.5, skips=True, seed=seed)
    assert 1.0 < first / last < 5.0  # with skips the small gain is no harm
    first, last = gradients(1.0, skips=True, seed=seed)
    assert 5.0 < first / last < 20.0  # and gain 1 grows, which it did not without
    assert gradients(2.0, skips=True, seed=seed)[0] > 100.0


def test_xavier_is_a_variance_and_preserves_it_between_equal_widths_alone() -> None:
    """E46: 2 I / (I + O) of the variance: 1, 0.40 and 1.60; 0.002 where it is taken for a root."""

    assert 512 * math.sqrt(2 / 1024) ** 2 == pytest.approx(1.0)
    assert pytest.approx(0.002, abs=5e-5) == 512 * (2 / 1024) ** 2
    config = ModelConfig(vocabulary=16, width=512, heads=8, layers=1, mlp="gelu", initial="xavier")
    block: Any = Transformer(config, generator=torch.Generator().manual_seed(0)).blocks[0]
    up, down = block.mlp.up.weight.detach(), block.mlp.down.weight.detach()
    assert 512 * float(up.var()) == pytest.approx(0.40, abs=0.005)
    assert 2048 * float(down.var()) == pytest.approx(1.60, abs=0.02)
    # half of the second moment is lost in a ReLU, which He's gain of 2 restores
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    assert float(x.relu().square().mean()) == pytest.approx(0.5, abs=0.01)


def growth(layers: int) -> float:
    config = ModelConfig(
        vocabulary=60, context=16, width=96, heads=4, kv_heads=2, hidden=200, layers=layers,
        initial="xavier", final_norm=False, initial_std=1.0,
    )  # fmt: skip
    model = Transformer(config, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(48).view(3, 16)
    with torch.no_grad():
        before, after = model._embed(ids, 0, None, None), model(ids, return_hidden=True)
    return float(after.var() / before.var())


def test_without_a_last_norm_the_stream_grows_with_depth() -> None:
    """E61: by 3.6, 15.7 and 38.0 in the notes; here 6.4, 28.8 and 83.4, a fixed draw."""
    assert [growth(n) for n in (6, 24, 54)] == pytest.approx([6.4, 28.8, 83.4], rel=0.02)


def test_a_factor_below_one_bounds_nothing_and_the_depth_rule_does() -> None:
    """E62: (1 + a^2)^n of the variance after n branches that preserve it."""
    assert pytest.approx(2.0e9, rel=0.01) == (1 + 0.5**2) ** 96
    for kind, branches, bound in (("decoder", 2, math.e), ("encoder-decoder", 3, math.e**1.5)):
        for layers in (1, 6, 96, 1000):
            config = ModelConfig(vocabulary=16, layers=layers, residual_scale="depth", kind=kind)
            a = config.branch_scale
            assert (1 + a * a) ** (branches * layers) < bound
