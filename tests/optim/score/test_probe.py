"""fenchel/optim/score/probe.py in a compiled pass: one graph, and no memory beside its buffer."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from fenchel.optim import ScoreDescent, attention_pairs

KINDS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "learned": {"positions": "learned", "bias": True},
    "windows": {"windows": (4, 0), "kv_heads": 2},
    "qk-norm": {"qk_norm": True},
    "not rotated": {"rotary_layers": (0, 1), "norm_place": "after"},
}


class Graphs:
    """A back end that runs what it is given as it is, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        self.count += 1
        return graph.forward


@pytest.mark.parametrize(
    ("kind", "when"), [*((kind, "before") for kind in KINDS), ("rotary", "after")]
)
def test_a_probed_pass_is_one_graph(kind: str, when: str, small: Any, tokens: Any) -> None:
    model = small(**KINDS[kind])
    torch.compiler.reset()
    score = ScoreDescent(attention_pairs(model)) if when == "before" else None
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    score = score or ScoreDescent(attention_pairs(model))
    inputs: dict[nn.Module, Tensor] = {}
    ids = tokens(0)
    compiled(ids, return_hidden=True).square().mean().backward()
    seen = {pair: probe.take() for pair, probe in score.pair_probes[0].probes.items()}
    score.close()
    for pair in seen:
        pair.module.register_forward_pre_hook(lambda m, args: inputs.update({m: args[0]}))
    model(ids)
    for pair, sample in seen.items():
        assert sample is not None
        torch.testing.assert_close(sample.x, inputs[pair.module].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", ["itself", "its twin"])
@pytest.mark.parametrize("when", ["before the hooks", "after"])
def test_a_forward_pass_compiled_without_hooks_is_probed_too(
    which: str, when: str, small: Any, tokens: Any
) -> None:
    torch.compiler.reset()
    model, twin = small(), small()
    compiled = torch.compile(model, backend="eager")
    other = compiled if which == "itself" else torch.compile(twin, backend="eager")

    def run(a_pass: Any) -> None:
        a_pass(tokens(0), return_hidden=True).square().mean().backward()

    if when == "before the hooks":
        run(other)
    score = ScoreDescent(attention_pairs(model))
    run(other)
    run(compiled)
    assert all(probe.take() is not None for probe in score.pair_probes[0].probes.values())


def test_a_probe_breaks_no_graph_of_transformers(tokens: Any) -> None:
    config = LlamaConfig(
        vocab_size=31, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    counts = []
    for probed in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        score = ScoreDescent(attention_pairs(model)) if probed else None
        torch.compiler.reset()
        graphs = Graphs()
        torch.compile(model, backend=graphs)(tokens(0)).logits.square().mean().backward()
        counts.append(graphs.count)
        if score is not None:
            score.step()
            assert all(s.entropy.isfinite().all() for s in score.score_stats().values())
    assert counts[0] == counts[1]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_probe_holds_its_tokens_and_no_more(compiled: bool, small: Any, tokens: Any) -> None:
    """Neither the rest of the batch nor the rest of what its sample was cut from."""
    model = small()
    score = ScoreDescent(attention_pairs(model), probe=48)
    torch.compiler.reset()
    run = torch.compile(model, backend="aot_eager") if compiled else model
    run(tokens(0)).square().mean().backward()
    for probe in score.pair_probes[0].probes.values():
        before = probe.buffer.data_ptr()
        seen = probe.take()
        assert seen is not None
        assert seen.x.shape == (2, 24, 32)
        assert seen.x.untyped_storage().nbytes() == 48 * 32 * 4
        assert seen.x.data_ptr() == before
        assert probe.take() is None


@pytest.mark.parametrize("settings", [{}, {"normed": True}], ids=str)
def test_between_steps_little_is_kept(
    settings: dict[str, Any], small: Any, tokens: Any, backward: Any
) -> None:
    """For the statistics the sample and its first queries and keys; no scores, no weights."""
    model = small(**settings)
    score = ScoreDescent(attention_pairs(model), probe=48)
    for step in range(2):
        backward(model, tokens(step))
        score.step()
    (pair_probes,) = score.pair_probes
    ((_, moved),) = pair_probes.records
    held = [moved.line.inputs.x, *(v for v in vars(moved.line).values() if isinstance(v, Tensor))]
    room = sum(probe.buffer.nbytes for probe in pair_probes.probes.values())
    stored = {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in held}
    assert sum(stored.values()) <= 4.2 * room  # x, q, k of as many rows, and the products of parts
