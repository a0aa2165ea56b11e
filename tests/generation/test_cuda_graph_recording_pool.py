"""fenchel/generation/cuda_graph.py: a recording serves the next call, and only one that it fits."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fenchel.generation import GenerationSettings, Sampling, cuda_graph, generate, stream
from fenchel.generation.cuda_graph import RECORDERS, Step, capture_graph
from fenchel.model import Transformer

Build = Callable[..., Transformer]
Draw = Callable[..., Tensor]
GREEDY: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0.0}


@pytest.fixture
def recorded(device: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every recording of fused steps, which serve here whatever the device."""
    made: list[int] = []

    def record(step: Step, where: torch.device) -> Step:
        made.append(1)
        return capture_graph(step, where) if device == "cuda" else step

    monkeypatch.setitem(RECORDERS, "graph", record)
    monkeypatch.setattr(cuda_graph, "why_not_fused", lambda *_, **__: None)
    return made


@pytest.fixture
def model(lively: Build, device: str) -> Transformer:
    return lively(layers=1, width=8, heads=2, tied=False).to(device)


@pytest.fixture
def ids(prompts: Draw, device: str) -> Tensor:
    return prompts(1, 4).to(device)


def same(model: Transformer, ids: Tensor) -> bool:
    """Whether a recorded call says what the model says."""
    return torch.equal(
        generate(model, ids, **GREEDY, record=None),
        generate(model, ids, **GREEDY, record="graph"),
    )


def test_a_second_call_records_nothing(
    model: Transformer, ids: Tensor, recorded: list[int]
) -> None:
    assert same(model, ids)
    assert same(model, ids.flip(1))
    assert len(recorded) == 1


def test_other_shapes_are_recorded_anew(
    model: Transformer, ids: Tensor, recorded: list[int]
) -> None:
    for prompt in (ids, ids[:, :3], torch.cat((ids, ids + 1))):
        assert same(model, prompt)
    assert len(recorded) == 3


def test_weights_may_change_their_values_but_not_their_place(
    model: Transformer, ids: Tensor, recorded: list[int]
) -> None:
    assert same(model, ids)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    assert same(model, ids)
    assert len(recorded) == 1
    model.lm_head.weight = nn.Parameter(-2.0 * model.lm_head.weight.detach())
    assert same(model, ids)
    assert len(recorded) == 2


def test_two_streams_at_once_do_not_share_a_step(
    model: Transformer, ids: Tensor, recorded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fenchel.generation.decode.CHUNK_WITHOUT_STOPS", 1)
    prompts = [ids, ids.flip(1)]
    wanted = [generate(model, one, **GREEDY, record=None)[0, 4:].tolist() for one in prompts]
    assert same(model, ids)  # there is one to be had, for the first who comes
    greedy = Sampling(temperature=0.0)
    settings = GenerationSettings(max_new_tokens=3, sampling=greedy, record="graph")
    said = [stream(model, one, settings) for one in prompts]
    found = list(zip(*said, strict=True))
    assert [[int(word) for word in words] for words in zip(*found, strict=True)] == wanted
    assert len(recorded) == 2


def test_a_kept_step_does_not_hold_its_model(
    lively: Build, ids: Tensor, recorded: list[int], device: str
) -> None:
    model = lively(layers=1, width=8, heads=2).to(device)
    generate(model, ids, **GREEDY, record="graph")
    assert recorded
    there = weakref.ref(model)
    del model
    gc.collect()
    assert there() is None
