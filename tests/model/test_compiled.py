"""A model compiles as one graph: nothing in it falls back to the interpreter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fenchel.model import ModelConfig, Transformer

KINDS: list[dict[str, Any]] = [
    {},
    {"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True},
    {"qk_norm": True, "kv_heads": 1, "windows": (4, 0)},
    {"choice": "entmax", "entmax_alpha_learned": True},
]


def graph_list() -> tuple[list[torch.fx.GraphModule], Callable[..., Any]]:
    """A back end of torch.compile that runs graphs as they are, and the list of its graphs."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return graphs, backend


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_pass_is_one_graph(kind: dict[str, Any]) -> None:
    config = ModelConfig(vocabulary=64, context=12, width=16, layers=2, heads=2, **kind)
    model = Transformer(config, generator=torch.Generator().manual_seed(0)).train()
    ids = torch.arange(24).view(2, 12)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    got, wanted = compiled(ids, return_hidden=True), model(ids, return_hidden=True)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    got.square().sum().backward()
    assert all(p.grad is not None for p in model.blocks.parameters())


def test_a_model_with_rotary_positions_is_compiled_once() -> None:
    model = Transformer(ModelConfig(vocabulary=64, context=12, width=16, layers=2, heads=2))
    torch.compiler.reset()
    graphs, backend = graph_list()
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        compiled(torch.arange(24).view(2, 12), return_hidden=True)
    assert len(graphs) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_any_length_need_two_graphs(kind: dict[str, Any]) -> None:
    """One for the first length, one for all others."""
    config = ModelConfig(vocabulary=64, context=24, width=16, layers=2, heads=2, **kind)
    model = Transformer(config, generator=torch.Generator().manual_seed(0))
    torch.compiler.reset()
    graphs, backend = graph_list()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for T in (12, 10, 24, 9, 7):
        ids = torch.arange(2 * T).view(2, T)
        torch.testing.assert_close(compiled(ids), model(ids), atol=1e-5, rtol=1e-5)
    assert len(graphs) == 2


def test_a_compiled_pass_computes_no_angles() -> None:
    """They are a table that it is given; else a kernel would have a cosine for every entry."""
    model = Transformer(ModelConfig(vocabulary=64, context=12, width=16, layers=2, heads=2))
    torch.compiler.reset()
    graphs, backend = graph_list()
    torch.compile(model, backend=backend)(torch.arange(24).view(2, 12), return_hidden=True)
    done = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert any("scaled_dot_product" in name for name in done)
    assert not any(word in name for name in done for word in ("cos", "sin", "arange"))
