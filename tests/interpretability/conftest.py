"""Small models with weights far from zero, ours and those of transformers."""

from typing import Any

import pytest
import torch

from fenchel.model import ModelConfig, Transformer

M, L, V, T = 16, 3, 60, 12
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 1},
    "gpt2": {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True},
    "qwen3": {"kv_heads": 2, "qk_norm": True, "heads": 4},
    "both": {"norm_place": "both", "norm_plus_one": True, "softcap": 5.0},
    "parallel": {"parallel": True, "bias": True},
    "post": {"norm_place": "post", "norm": "layer", "final_norm": False},
    "entmax": {"choice": "entmax"},
    "shared": {"distinct_layers": 1},
    "experts": {"experts": 3, "experts_per_token": 2},
    "sinks": {"sinks": True, "windows": (5,)},
    "alibi": {"positions": "alibi", "residual_scale": 0.5},
}


def build(shape: str = "llama", dtype: torch.dtype = torch.float64, **more: Any) -> Transformer:
    usual = {"vocabulary": V, "context": 48, "width": M, "layers": L, "heads": 2}
    usual |= {"initial": "xavier"}
    config = ModelConfig(**{**usual, **SHAPES[shape], **more})  # type: ignore[arg-type]
    model = Transformer(config, generator=torch.Generator().manual_seed(3)).to(dtype).eval()
    with torch.no_grad():
        g = torch.Generator().manual_seed(5)
        for name, p in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                p.add_(0.3 * torch.randn(p.shape, generator=g, dtype=dtype))
            elif "qkv" in name:
                p.mul_(2.0)
    return model


def draw(seed: int, count: int = T) -> list[int]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(V, (count,), generator=g).tolist()


every_shape = pytest.mark.parametrize("shape", SHAPES)
