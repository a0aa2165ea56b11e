"""The scores that the score optimisers measure are those of the forward pass, in every setting.

The reference takes the queries and keys of the forward pass, multiplies them out in float64 and
counts the pairs that the model may attend to one by one.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from fenchel.model import ModelConfig, Transformer
from fenchel.optim import OptimConfig, build_optimiser

SETTINGS: list[dict[str, Any]] = [
    {},
    {"positions": "learned"},
    {"kv_heads": 2},
    {"qk_norm": True},
    {"windows": (3, 0)},
    {"rotary_layout": "pairs"},
    {"rotary_fraction": 0.5},
    {"score_scale": 0.6},
    {"bias": True},
]


def score_reference(q: Tensor, k: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    """RMS and largest |score| per head over the pairs a causal window admits; 0 is no window."""
    B, H, T, _ = q.shape
    k = k.repeat_interleave(H // k.shape[1], dim=1)
    squares, largest = torch.zeros(H, dtype=torch.float64), torch.zeros(H, dtype=torch.float64)
    pairs = 0
    for i in range(T):
        for j in range(max(0, i - window + 1) if window else 0, i + 1):
            scores_BH = scale * (q[:, :, i].double() * k[:, :, j].double()).sum(-1)
            squares += scores_BH.square().sum(0)
            largest = torch.maximum(largest, scores_BH.abs().amax(0))
            pairs += B
    return (squares / pairs).sqrt(), largest


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("rule", ["score", "trust"])
def test_scores_before_the_step_are_those_of_the_forward_pass(
    rule: str, settings: dict[str, Any]
) -> None:
    """With a step of nearly nothing, scores before and after it are the same."""
    config = ModelConfig(vocabulary=13, context=12, width=32, layers=2, heads=4, **settings)
    model = Transformer(config)
    with torch.no_grad():
        for n, p in enumerate(model.parameters()):
            p.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(n))
    still = {"learning_rate": 1e-9, "matrix_learning_rate": 1e-9, "score_rate": 1e-6}
    optimiser = build_optimiser(model, OptimConfig(optimiser=rule, score_radius=1e6, **still))
    ids = torch.randint(13, (3, 12), generator=torch.Generator().manual_seed(0))
    layers: list[tuple[Tensor, Tensor]] = []

    def observe(_: int, q: Tensor, k: Tensor, *__: Tensor) -> None:
        layers.append((q.detach(), k.detach()))

    model.train()
    model(ids, observe=observe).square().mean().backward()
    optimiser.step()
    scale = settings.get("score_scale", 8**-0.5)
    windows = settings.get("windows", (0, 0))
    stats = list(optimiser.members[0].score_stats().values())  # type: ignore[attr-defined]
    assert len(stats) == len(layers) == 2
    for (q, k), window, measured in zip(layers, windows, stats, strict=True):
        rms, largest = score_reference(q, k, scale, window)
        torch.testing.assert_close(measured.rms_score.double(), rms, rtol=2e-3, atol=1e-3)
        torch.testing.assert_close(measured.max_score.double(), largest, rtol=2e-3, atol=1e-3)
