"""fenchel/model/flops.py against the products that torch counts while they run."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fenchel.model import ModelConfig, Transformer
from fenchel.model.flops import attention_entries, forward_flops, training_flops

SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gelu": {"mlp": "gelu", "bias": True},
    "grouped": {"kv_heads": 2},
    "wide heads": {"head_size": 24},
    "untied": {"tied": False},
    "narrow embedding": {"embedding_width": 16},
    "narrow embedding, untied": {"embedding_width": 16, "tied": False},
    "bert": {
        "kind": "encoder", "positions": "learned", "lm_head_transform": True, "mlp": "gelu",
    },
    "albert": {
        "kind": "encoder", "positions": "learned", "lm_head_transform": True, "mlp": "gelu",
        "embedding_width": 16, "distinct_layers": 1,
    },
    "entmax": {"choice": "entmax"},
    "experts": {"experts": 4, "experts_per_token": 4},
    "experts in some layers": {
        "experts": 4, "experts_per_token": 4, "dense_layers": (1, 0), "dense_hidden": 20,
    },
    "experts beside a shared one": {
        "experts": 4, "experts_per_token": 4, "shared_expert": 20, "shared_expert_gate": True,
    },
    "no head": {"lm_head": False, "kind": "encoder", "positions": "learned"},
    "no head, narrow embedding": {
        "lm_head": False, "kind": "encoder", "positions": "learned", "embedding_width": 16,
    },
    "l2": {"scores": "l2"},
    "gemma 4": {
        "windows": (5, 0, 0), "head_size": 8, "full_head_size": 24, "kv_heads": 2,
        "full_kv_heads": 1, "keys_as_values": True, "shared_kv_layers": 1, "shared_hidden": 80,
        "per_layer_width": 6,
    },
    "gate per head": {"gate": "head"},
    "gate per element": {"gate": "element", "head_size": 24},
}  # fmt: skip


def model_of(**settings: Any) -> Transformer:
    sizes = {"vocabulary": 50, "context": 40, "width": 48, "layers": 3, "heads": 4}
    return Transformer(ModelConfig(**{**sizes, **settings}))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("T", [1, 8, 33])
def test_products_are_those_that_run(name: str, T: int) -> None:
    model = model_of(**SETTINGS[name]).eval()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(torch.zeros(1, T, dtype=torch.long), return_hidden=not model.config.lm_head)
    counted = counter.get_total_flops()
    stated = forward_flops(model.config, T).total
    if name.startswith(
        "experts"
    ):  # the router chooses among all of them here, whatever it computes
        assert counted == pytest.approx(stated, rel=0.01)
    else:
        assert counted == stated


def test_a_backward_pass_takes_twice_the_forward_pass() -> None:
    model = model_of(mlp="gelu", tied=False)
    ids = torch.zeros(2, 20, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids).sum().backward()
    counted = counter.get_total_flops()
    assert counted == pytest.approx(training_flops(model.config, batch=2, T=20), rel=0.01)


def test_attention_is_half_its_projections_at_twice_the_width() -> None:
    """E57: 8 n d^2 against 4 n^2 d, equal at n = 2 d; h n^2 entries."""
    config = ModelConfig(vocabulary=50, width=512, heads=8, layers=1, mlp="gelu")
    n, d = 300, 512
    flops = forward_flops(config, n)
    assert (flops.projections, flops.scores) == (8 * n * d**2, 4 * n**2 * d)
    assert forward_flops(config, 2 * d).projections == forward_flops(config, 2 * d).scores
    assert forward_flops(config, 2 * d + 1).projections < forward_flops(config, 2 * d + 1).scores
    assert flops.mlp == 16 * n * d**2
    assert attention_entries(config, n) == 8 * n**2


def test_decoding_one_token_attends_to_the_cache() -> None:
    config = ModelConfig(vocabulary=50, width=64, heads=4, layers=2)
    step = forward_flops(config, 1, S=100)
    assert step.scores == 2 * 4 * 100 * 64
    assert step.projections == forward_flops(config, 1).projections


def test_two_stacks_are_refused() -> None:
    with pytest.raises(ValueError, match="has two"):
        forward_flops(ModelConfig(vocabulary=50, kind="encoder-decoder"), 8)
