"""fenchel/generation/cuda_graph.py: the model's own numbers, from kernels made for one token."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fenchel.generation import KVCache, cuda_graph, generate
from fenchel.generation.cuda_graph import RECORDERS, RecordedStep, Step, capture_graph
from fenchel.generation.plain_decoder import why_not_plain
from fenchel.model import Transformer

Build = Callable[..., Transformer]
Draw = Callable[..., Tensor]
SHAPES: list[dict[str, Any]] = [
    {"kv_heads": 2},
    {"kv_heads": 1, "head_size": 6, "qkv_bias": True, "windows": (5, 0), "score_scale": 0.7},
    {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True},
    {"positions": "none", "mlp": "geglu_tanh", "tied": False, "epsilon": 0.1},
    {"layer_choices": ("entmax", "sparsemax"), "beta": 1.3, "kv_heads": 2},
]
T, B, READ = 8, 2, 5


@pytest.fixture
def recorder(device: str) -> Callable[[Step, torch.device], Step]:
    """A CUDA graph on a GPU, and the step itself elsewhere."""
    return capture_graph if device == "cuda" else lambda step, _: step


@pytest.mark.parametrize(
    ("shape", "rows", "thin"),
    [(shape, B, B) for shape in SHAPES] + [(SHAPES[1], B, 0), (SHAPES[2], B + 1, 0)],
    ids=lambda s: " ".join(s) if isinstance(s, dict) else str(s),
)
@torch.inference_mode()
def test_a_fused_step_gives_the_logits_of_the_model(
    shape: dict[str, Any],
    rows: int,
    thin: int,
    lively: Build,
    prompts: Draw,
    recorder: Any,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where there are more rows than ``thin`` by torch's products, and with a row of no token."""
    monkeypatch.setattr(cuda_graph, "THIN_ROWS", thin)
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
    step = RecordedStep(model, cache, rows=rows, record=recorder, fused=True)
    step.cache.copy_from(cache, fill)
    for t in range(READ, T):
        logits = step.step(ids[:, t])
        torch.testing.assert_close(logits, whole[:, t], atol=1e-4, rtol=1e-4)
        assert torch.equal(step.tokens_BP[:B, t + 1], whole[:, t].argmax(-1))


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4]], ids=lambda s: " ".join(s))
@torch.inference_mode()
def test_a_fused_step_reads_an_int8_cache(
    shape: dict[str, Any], lively: Build, prompts: Draw, recorder: Any, device: str
) -> None:
    """The logits of the model on its own int8 cache, and near those without one."""
    model, ids = lively(**shape, context=T).to(device), prompts(B, T).to(device)
    whole = model(ids)
    cache = KVCache(model.config, batch=B, positions=T, device=device, kind="int8")
    model(ids[:, :READ], cache=cache)
    step = RecordedStep(model, cache, rows=B, record=recorder, fused=True)
    step.cache.copy_from(cache, None)
    assert step.cache.keys[0].dtype == torch.int8
    for t in range(READ, T):
        logits, wanted = step.step(ids[:, t]), model(ids[:, t : t + 1], cache=cache)[:, 0]
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
        assert float((logits - whole[:, t]).norm() / whole[:, t].norm()) < 2e-2
        assert not torch.equal(logits, whole[:, t])


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


@pytest.mark.parametrize("settings", [{"cache": "int8"}, {"temperature": 0.8, "top_p": 0.9}])
def test_every_batch_is_served_by_the_recording_of_its_bucket(
    settings: dict[str, Any],
    lively: Build,
    prompts: Draw,
    recorder: Any,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded: list[int] = []

    def record(step: Step, where: torch.device) -> Step:
        recorded.append(1)
        return recorder(step, where)

    monkeypatch.setitem(RECORDERS, "graph", record)
    monkeypatch.setattr(cuda_graph, "why_not_fused", lambda _: None)
    model = lively(layers=1, width=8, heads=1, context=8).to(device)
    settings = {"temperature": 0.0, **settings, "max_new_tokens": 3}
    for rows in (3, 4):
        ids = prompts(rows, 3).to(device)
        plain, graph = (
            generate(
                model,
                ids,
                **settings,
                record=how,
                generator=torch.Generator(device).manual_seed(3),
            )
            for how in (None, "graph")
        )
        assert torch.equal(graph, plain)
    assert len(recorded) == 1


def test_what_it_cannot_serve_it_names(lively: Build) -> None:
    assert cuda_graph.why_not_fused(lively()) == "it is in torch.float32 on cpu"
    assert "heads are 264 wide" in str(cuda_graph.why_not_fused(lively(width=264, heads=1)))
    model = lively(choice="hard")
    assert "Hard" in str(why_not_plain(model, sparse=True))
    for choice in ("entmax", "sparsemax"):
        assert "choice is" in str(why_not_plain(lively(choice=choice)))
        assert why_not_plain(lively(choice=choice), sparse=True) is None
    assert "Entmax" in str(why_not_plain(lively(choice="entmax", entmax_alpha=2.5), sparse=True))
