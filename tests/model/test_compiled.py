"""A model compiles as one graph: nothing in it falls back to the interpreter."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from fenchel.model import ModelConfig, Transformer

KINDS: list[dict[str, Any]] = [
    {},
    {"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True},
    {"qk_norm": True, "kv_heads": 1, "windows": (4, 0)},
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_pass_is_one_graph(kind: dict[str, Any]) -> None:
    config = ModelConfig(vocabulary=64, context=12, width=16, layers=2, heads=2, **kind)
    model = Transformer(config, generator=torch.Generator().manual_seed(0)).train()
    ids = torch.arange(24).view(2, 12)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    got, wanted = compiled(ids, return_hidden=True), model(ids, return_hidden=True)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    got.square().sum().backward()
    assert all(p.grad is not None for p in model.blocks.parameters())


def test_a_model_with_rotary_positions_is_compiled_once() -> None:
    model = Transformer(ModelConfig(vocabulary=64, context=12, width=16, layers=2, heads=2))
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    for _ in range(3):
        compiled(torch.arange(24).view(2, 12), return_hidden=True)
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_any_length_need_two_graphs(kind: dict[str, Any]) -> None:
    """One for the first length, one for all others."""
    config = ModelConfig(vocabulary=64, context=24, width=16, layers=2, heads=2, **kind)
    model = Transformer(config, generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for T in (12, 10, 24, 9, 7):
        ids = torch.arange(2 * T).view(2, T)
        torch.testing.assert_close(compiled(ids), model(ids), atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 2


def test_a_compiled_pass_computes_no_angles() -> None:
    """They are a table that it is given; else a kernel would have a cosine for every entry."""
    model = Transformer(ModelConfig(vocabulary=64, context=12, width=16, layers=2, heads=2))
    torch._dynamo.reset()
    done: list[str] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        done.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compile(model, backend=note)(torch.arange(24).view(2, 12), return_hidden=True)
    assert any("scaled_dot_product" in name for name in done)
    assert not any(word in name for name in done for word in ("cos", "sin", "arange"))
