"""fenchel/generation/cuda_graph.py: the model's own numbers, from kernels made for one token."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fenchel.generation import KVCache, cuda_graph, generate
from fenchel.generation.cuda_graph import RECORDERS, RecordedStep, Step, capture_graph
from fenchel.model import Transformer

Build = Callable[..., Transformer]
Draw = Callable[..., Tensor]
SHAPES: list[dict[str, Any]] = [
    {"kv_heads": 2},
    {"kv_heads": 1, "head_size": 6, "qkv_bias": True, "windows": (5, 0), "score_scale": 0.7},
    {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True},
    {"positions": "none", "mlp": "geglu_tanh", "tied": False, "epsilon": 0.1},
]
T, B, READ = 8, 2, 5


@pytest.fixture
def recorder(device: str) -> Callable[[Step, torch.device], Step]:
    """A CUDA graph on a GPU, and the step itself elsewhere."""
    return capture_graph if device == "cuda" else lambda step, _: step


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: " ".join(s))
@torch.inference_mode()
def test_a_fused_step_gives_the_logits_of_the_model(
    shape: dict[str, Any], lively: Build, prompts: Draw, recorder: Any, device: str
) -> None:
    model, ids = lively(**shape, context=T).to(device), prompts(B, T).to(device)
    for block in model.blocks:
        block.mlp_norm.weight.mul_(1.5)  # unlike the other norm's, which was drawn the same
    fill = None if "windows" in shape else torch.tensor([0, 3], device=device)
    present = None
    if fill is not None:
        present = torch.arange(T, device=device) >= fill.unsqueeze(-1)
    whole = model(ids, token_mask_BS=present)
    cache = KVCache(model.config, batch=B, positions=T, device=device)
    model(ids[:, :READ], cache=cache, token_mask_BS=None if present is None else present[:, :READ])
    step = RecordedStep(model, cache, batch=B, record=recorder, fused=True)
    step.cache.copy_from(cache, fill)
    for t in range(READ, T):
        logits = step.step(ids[:, t])
        torch.testing.assert_close(logits, whole[:, t], atol=1e-4, rtol=1e-4)
        assert torch.equal(step.tokens_BP[:, t + 1], whole[:, t].argmax(-1))


def test_fused_words_are_those_of_the_model(
    lively: Build,
    prompts: Draw,
    recorder: Any,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(RECORDERS, "graph", recorder)
    asked = []
    monkeypatch.setattr(
        cuda_graph, "why_not_fused", lambda *_, **__: asked.append(1)
    )  # serves here too
    model, ids = lively(context=8).to(device), prompts(1, 3).to(device)
    settings: dict[str, Any] = {"max_new_tokens": 9, "temperature": 0.0}
    plain = generate(model, ids, **settings, record=None)
    assert torch.equal(generate(model, ids, **settings, record="graph"), plain)
    assert asked


def test_what_it_cannot_serve_it_names(lively: Build) -> None:
    assert cuda_graph.why_not_fused(lively(), batch=1) == "it is in torch.float32 on cpu"
    assert cuda_graph.why_not_fused(lively(), batch=9) == "9 sequences are more than 8"
