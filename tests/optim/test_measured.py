"""What the score optimisers measure is what the layers of our model score, in every setting."""

from typing import Any

import pytest
import torch

from fenchel.evaluate import attention_health
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
    told = attention_health(model, ids)
    model.train()
    model(ids).square().mean().backward()
    optimiser.step()
    stats = list(optimiser.members[0].score_stats().values())  # type: ignore[attr-defined]
    for name, ours in (("rms", "rms_score"), ("max_logit", "max_score")):
        found = torch.stack([getattr(layer, ours) for layer in stats])
        expected = torch.tensor(told[f"attention/head_{name}"])
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-3)
