"""fenchel/generate/fixed.py: fixed shapes change neither the logits nor the words."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fenchel.generate import KeyValueCache, generate
from fenchel.generate.fixed import RECORDERS, FixedStep, Step, as_compiled, why_not
from fenchel.model import Transformer

Build = Callable[..., Transformer]
Draw = Callable[..., Tensor]
SHAPES: list[dict[str, Any]] = [
    {"kv_heads": 2},
    {"positions": "learned", "norm": "layer", "bias": True, "mlp": "gelu"},
    {"positions": "none", "choice": "entmax"},
    {"windows": (5, 0, 30), "layers": 3, "softcap": 3.0, "rotary_local_base": 50.0},
]
T, B = 40, 3


def as_it_is(step: Step, _: torch.device) -> Step:
    """A recording that is the step itself."""
    return step


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: " ".join(s))
@pytest.mark.parametrize("read", [3, 21])
@torch.inference_mode()
def test_a_fixed_step_gives_the_logits_of_the_model(
    shape: dict[str, Any], read: int, lively: Build, prompts: Draw
) -> None:
    model, ids = lively(**shape, context=T).double(), prompts(B, T)
    whole = model(ids)
    cache = KeyValueCache(model.config, batch=B, positions=T, dtype=torch.float64)
    fixed = FixedStep(model, cache, batch=B, record=as_it_is)
    for _ in range(2):  # memory that was used before is as good as new
        cache.clear()
        model(ids[:, :read], cache=cache)
        fixed.cache.take(cache, None)
        for t in range(read, T):
            logits = fixed.step(ids[:, t])
            torch.testing.assert_close(logits, whole[:, t], atol=1e-10, rtol=1e-10)


@torch.inference_mode()
def test_the_fill_of_unequal_prompts_stays_absent(lively: Build, prompts: Draw) -> None:
    model, ids = lively(context=T).double(), prompts(B, T)
    fill = torch.tensor([4, 0, 2])
    present = torch.arange(T) >= fill.unsqueeze(-1)
    whole = model(ids, present_BS=present)
    cache = KeyValueCache(model.config, batch=B, positions=T, dtype=torch.float64)
    model(ids[:, :6], cache=cache, present_BS=present[:, :6])
    fixed = FixedStep(model, cache, batch=B, record=as_it_is)
    fixed.cache.take(cache, fill)
    for t in range(6, T):
        logits = fixed.step(ids[:, t])
        torch.testing.assert_close(logits, whole[:, t], atol=1e-10, rtol=1e-10)


@torch.inference_mode()
def test_a_step_is_traced_once_and_used_for_every_token(lively: Build, prompts: Draw) -> None:
    torch._dynamo.reset()
    model, ids = lively(context=T, layers=1), prompts(1, T)
    cache = KeyValueCache(model.config, batch=1, positions=T)
    model(ids[:, :4], cache=cache)
    fixed = FixedStep(model, cache, batch=1, record=partial(as_compiled, backend="eager"))
    fixed.cache.take(cache, None)
    whole = model(ids)
    for t in range(4, T):
        logits = fixed.step(ids[:, t])
        torch.testing.assert_close(logits, whole[:, t], atol=1e-5, rtol=1e-5)
        if t == 5:
            traced = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == traced


@pytest.mark.parametrize("lengths", [(5, 5), (2, 7)], ids=["equal", "unequal"])
def test_recorded_words_are_the_same_past_the_context(
    lengths: tuple[int, int], lively: Build, prompts: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECORDERS, "compile", as_it_is)  # nothing to compile with here
    model, rows = lively(context=16), [prompts(n, seed=n) for n in lengths]
    plain, recorded = (
        generate(
            model,
            rows,
            max_new_tokens=40,
            record=record,
            generator=torch.Generator().manual_seed(2),  # words that do not go round in circles
        )
        for record in (None, "compile")
    )
    for one, other in zip(plain, recorded, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"record": "graph"}, "needs a model on a GPU"),
        ({"record": "tape"}, "graph, compile"),
        ({"record": "compile", "draft": 3}, "draft reads several"),
        ({"record": "compile", "cache": "int8"}, "not in int8"),
    ],
)
def test_a_call_that_cannot_be_recorded_gets_one_sentence(
    wrong: dict[str, Any], match: str, lively: Build, prompts: Draw
) -> None:
    with pytest.raises(ValueError, match=match):
        generate(lively(), prompts(1, 3), max_new_tokens=2, **wrong)


def test_what_cannot_be_recorded_is_named(lively: Build) -> None:
    assert why_not(lively(), fill=True) is None
    assert why_not(lively(windows=(3,)), fill=False) is None
    assert "unequal" in str(why_not(lively(windows=(3,)), fill=True))
    for positions in ("alibi", "buckets"):
        assert positions in str(why_not(lively(positions=positions), fill=False))
