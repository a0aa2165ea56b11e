"""fenchel/generation/cuda_graph.py: fixed shapes change neither the logits nor the words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fenchel.generation import (
    GenerationSettings,
    KVCache,
    Sampling,
    cuda_graph,
    generate,
    stream,
)
from fenchel.generation.cuda_graph import (
    AUTO_TOKENS,
    RECORDERS,
    PendingTokens,
    RecordedStep,
    Step,
    use_recorded_step,
    why_not_recorded,
)
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
    cache = KVCache(model.config, batch=B, positions=T, dtype=torch.float64)
    fixed = RecordedStep(model, cache, rows=B, record=as_it_is)
    for _ in range(2):  # memory that was used before is as good as new
        cache.clear()
        model(ids[:, :read], cache=cache)
        fixed.cache.copy_from(cache, None)
        for t in range(read, T):
            logits = fixed.step(ids[:, t])
            torch.testing.assert_close(logits, whole[:, t], atol=1e-10, rtol=1e-10)


@torch.inference_mode()
def test_the_fill_of_unequal_prompts_stays_absent(lively: Build, prompts: Draw) -> None:
    model, ids = lively(context=T).double(), prompts(B, T)
    fill = torch.tensor([4, 0, 2])
    present = torch.arange(T) >= fill.unsqueeze(-1)
    whole = model(ids, token_mask_BS=present)
    cache = KVCache(model.config, batch=B, positions=T, dtype=torch.float64)
    model(ids[:, :6], cache=cache, token_mask_BS=present[:, :6])
    fixed = RecordedStep(model, cache, rows=B, record=as_it_is)
    fixed.cache.copy_from(cache, fill)
    for t in range(6, T):
        logits = fixed.step(ids[:, t])
        torch.testing.assert_close(logits, whole[:, t], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("lengths", [(5, 5), (2, 7)], ids=["equal", "unequal"])
def test_recorded_words_are_the_same_past_the_context(
    lengths: tuple[int, int], lively: Build, prompts: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECORDERS, "graph", as_it_is)  # no GPU to record on
    model, rows = lively(context=16), [prompts(n, seed=n) for n in lengths]
    plain, recorded = (
        generate(
            model,
            rows,
            max_new_tokens=40,
            record=record,
            generator=torch.Generator().manual_seed(2),  # words that do not go round in circles
        )
        for record in (None, "graph")
    )
    for one, other in zip(plain, recorded, strict=True):
        assert torch.equal(one, other)


def ways(model: Transformer, ids: Any, **settings: Any) -> tuple[Any, Any]:
    """Greedy words one by one, and by a recorded step that goes on by itself."""
    usual = {"max_new_tokens": 40, "temperature": 0.0, **settings}
    plain = generate(model, ids, **usual, record=None)
    return plain, generate(model, ids, **usual, record="graph")


@pytest.mark.parametrize("read", [1, 3, 15])
@pytest.mark.parametrize("count", [1, 16, 40])
def test_greedy_words_are_the_same_without_a_question_in_between(
    read: int, count: int, lively: Build, prompts: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECORDERS, "graph", as_it_is)
    model, ids = lively(context=16, kv_heads=2), prompts(2, read)
    assert torch.equal(*ways(model, ids, max_new_tokens=count))
    rows = [prompts(read), prompts(read + 1, seed=2)]
    for one, other in zip(*ways(model, rows, max_new_tokens=count), strict=True):
        assert torch.equal(one, other)


def test_a_penalty_is_still_paid_token_by_token(
    lively: Build, prompts: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECORDERS, "graph", as_it_is)
    model, ids = lively(context=64), prompts(1, 5)
    plain, recorded = ways(model, ids, repetition_penalty=1.5)
    assert torch.equal(plain, recorded)
    assert not torch.equal(plain, generate(model, ids, max_new_tokens=40, temperature=0.0))


def test_what_came_behind_a_stop_is_cut_off(
    lively: Build, prompts: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECORDERS, "graph", as_it_is)
    model, ids = lively(context=64), prompts(3, 5)
    said = generate(model, ids, max_new_tokens=40, temperature=0.0)[:, 5:].tolist()
    # One word of each row from inside a stretch the device goes by itself, not at its end.
    stop = [said[0][7], said[1][21], said[2][2]]
    plain, recorded = ways(model, ids, stop=stop)
    assert torch.equal(plain, recorded)
    assert plain.shape[1] < 5 + 40
    for one, other in zip(*ways(model, list(ids), stop=stop), strict=True):
        assert torch.equal(one, other)


def test_the_device_is_asked_once_for_many_words(
    lively: Build, prompts: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECORDERS, "graph", as_it_is)
    asked = []
    decode = RecordedStep.decode

    def counted(
        self: RecordedStep, token_B: Tensor | None, number: int, count: int, **options: Any
    ) -> PendingTokens:
        asked.append(count)
        return decode(self, token_B, number, count, **options)

    monkeypatch.setattr(RecordedStep, "decode", counted)
    monkeypatch.setattr(RecordedStep, "step", None)  # what a call for one word would use
    model, ids = lively(context=64), prompts(1, 5)
    greedy = {"max_new_tokens": 40, "temperature": 0.0, "record": "graph"}
    said = generate(model, ids, **greedy)[0].tolist()
    assert asked == [39]  # the first word comes from reading the prompt
    asked.clear()
    never = next(word for word in range(model.config.vocabulary) if word not in said)
    assert generate(model, ids, stop=[never], **greedy)[0].tolist() == said
    assert asked == [16, 16, 7]
    asked.clear()
    settings = GenerationSettings(
        max_new_tokens=40, sampling=Sampling(temperature=0.0), record="graph", stop=[never]
    )
    words = stream(model, ids, settings)
    assert [int(next(words)) for _ in range(2)] == said[5:7]
    assert asked == [16, 16]  # the next before the first of these is told


def test_a_logit_that_is_not_finite_is_told_behind_the_words_before_it(
    lively: Build, prompts: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECORDERS, "graph", as_it_is)
    model, ids = lively(context=64, positions="learned"), prompts(1, 5)
    said = generate(model, ids, max_new_tokens=12, temperature=0.0)[0, 5:].tolist()
    with torch.no_grad():
        model.pos_embed.weight[9] = torch.nan  # the fifth new word is written and cannot be read
    greedy = Sampling(temperature=0.0)
    settings = GenerationSettings(max_new_tokens=12, sampling=greedy, record="graph")
    words = stream(model, ids, settings)
    assert [int(next(words)) for _ in range(5)] == said[:5]
    with pytest.raises(ValueError, match="not finite"):
        next(words)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"record": "graph"}, "needs a model on a GPU"),
        ({"record": "tape"}, "one of auto, graph"),
        ({"record": "graph", "draft": 3}, "draft reads several"),
    ],
)
def test_a_call_that_cannot_be_recorded_gets_one_sentence(
    wrong: dict[str, Any], match: str, lively: Build, prompts: Draw
) -> None:
    with pytest.raises(ValueError, match=match):
        generate(lively(), prompts(1, 3), max_new_tokens=2, **wrong)


def test_a_smaller_cache_is_recorded_only_as_int8_by_a_fused_step(
    lively: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECORDERS, "graph", as_it_is)
    call: dict[str, Any] = {"padded": False, "draft": 0, "tokens": 9}
    with pytest.raises(ValueError, match="not in float16"):
        use_recorded_step(lively(), "graph", cache="float16", **call)
    with pytest.raises(ValueError, match=r"needs a fused step, and it is in torch\.float32 on cpu"):
        use_recorded_step(lively(), "graph", cache="int8", **call)
    monkeypatch.setattr(cuda_graph, "why_not_fused", lambda _: None)
    assert use_recorded_step(lively(), "graph", cache="int8", **call)
    with pytest.raises(ValueError, match="unequal"):
        use_recorded_step(lively(windows=(3,)), "graph", cache="int8", **call | {"padded": True})


def test_a_graph_is_replayed_by_itself_where_that_pays(
    lively: Build, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, for enough tokens, and unless a hook would miss them."""
    monkeypatch.setitem(RECORDERS, "graph", as_it_is)  # what a CPU could record, were it asked
    call: dict[str, Any] = {"cache": "model", "padded": False, "draft": 0, "tokens": AUTO_TOKENS}
    model = lively().to(device)
    assert use_recorded_step(model, "auto", **call) == (device == "cuda")
    assert use_recorded_step(model, "graph", **call)
    assert not use_recorded_step(model, None, **call)
    assert use_recorded_step(model, "auto", **call | {"cache": "int8"}) == (device == "cuda")
    for other in ({"tokens": AUTO_TOKENS - 1}, {"cache": "float16"}, {"draft": 2}):
        assert not use_recorded_step(model, "auto", **call | other)
    assert not use_recorded_step(lively(positions="alibi").to(device), "auto", **call)
    model.blocks[0].register_forward_hook(lambda *_: None)
    assert not use_recorded_step(model, "auto", **call)


def test_what_cannot_be_recorded_is_named(lively: Build) -> None:
    assert "Entmax" in str(why_not_recorded(lively(choice="entmax"), padded=False))
    assert "Sparsemax" in str(
        why_not_recorded(lively(layer_choices=("softmax", "sparsemax")), padded=False)
    )
    assert "experts" in str(why_not_recorded(lively(experts=2), padded=False))
    assert why_not_recorded(lively(), padded=True) is None
    assert why_not_recorded(lively(windows=(3,)), padded=False) is None
    assert "unequal" in str(why_not_recorded(lively(windows=(3,)), padded=True))
    for positions in ("alibi", "buckets"):
        assert positions in str(why_not_recorded(lively(positions=positions), padded=False))
