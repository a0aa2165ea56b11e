"""fenchel/generation/generate.py: a cache changes the work, not the tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fenchel.data import TextTokenizer
from fenchel.generation import GenerationSettings, KVCache, Sampling, generate, stream, stream_text
from fenchel.model import Transformer

CONTEXT = 16
GREEDY = Sampling(temperature=0.0)
Build = Callable[..., Transformer]
Draw = Callable[..., Tensor]
GPT2 = {"positions": "learned", "norm": "layer", "mlp": "gelu_tanh", "bias": True}
SHAPES: dict[str, dict[str, Any]] = {
    "rotary": {},
    "gpt2": GPT2,
    "none": {"positions": "none"},
    "one head of keys": {"kv_heads": 1},
    "entmax": {"kv_heads": 2, "choice": "entmax"},
    "sinusoidal, post-norm": {"positions": "sinusoidal", "norm_place": "post"},
    "buckets": {"positions": "buckets", "score_scale": 1.0, "norm_place": "both"},
    "mistral": {"kv_heads": 2, "windows": (3,)},
    "qwen3": {"kv_heads": 2, "head_size": 10, "qk_norm": True},
    "gemma 2": {
        "windows": (5, 0),
        "softcap": 3.0,
        "logit_softcap": 5.0,
        "norm_place": "both",
        "norm_plus_one": True,
        "embedding_scale": 32**0.5,
        "mlp": "geglu_tanh",
        "score_scale": 0.3,
    },
    "gemma 3": {"windows": (4, 4, 0), "rotary_local_base": 100.0, "qk_norm": True, "layers": 3},
    "neox": {
        "rotary_fraction": 0.5,
        "parallel": True,
        "norm": "layer",
        "mlp": "gelu",
        "bias": True,
    },
    "bloom": {**GPT2, "positions": "alibi", "embedding_norm": True},
    "alibi in a window": {"positions": "alibi", "windows": (4, 0)},
    "sinks, pairs": {"sinks": True, "rotary_layout": "pairs"},
    "gates": {"gate": "element"},
    "yarn": {"rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_trained_context": 4},
    "distances": {"scores": "l2"},
    "experts, shared": {"experts": 4, "distinct_layers": 1},
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@torch.no_grad()
def slowly(model: Transformer, ids: Tensor, **inputs: Tensor) -> Tensor:
    """Greedy words far past the context, everything read again for each of them."""
    said, held = ids, ids
    for _ in range(2 * CONTEXT):
        if held.shape[1] > CONTEXT:
            held = said[:, -(CONTEXT // 2) :]
        token = model(held, **inputs)[:, -1].argmax(-1, keepdim=True)
        said, held = (torch.cat([t, token], dim=-1) for t in (said, held))
    return said


@every_shape
@torch.no_grad()
def test_reading_in_pieces_is_reading_at_once(
    shape: dict[str, Any], lively: Build, prompts: Draw
) -> None:
    model, ids = lively(**shape), prompts(3, CONTEXT)
    whole = model(ids)
    cache = KVCache(model.config, batch=3, positions=CONTEXT)
    pieces = [model(part, cache=cache) for part in ids.split([1, 6, 1, 5, 3], dim=-1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-5, rtol=1e-5)
    assert cache.length == CONTEXT


@pytest.mark.parametrize("sizes", [[1] * 90, [50, 1, 3, 36]], ids=["one by one", "long prompt"])
@pytest.mark.parametrize("positions", ["rotary", "alibi", "buckets", "none"])
@torch.no_grad()
def test_keys_that_left_the_window_are_not_missed(
    positions: str, sizes: list[int], lively: Build, prompts: Draw
) -> None:
    model = lively(positions=positions, windows=(7, 0, 2), layers=3, context=90)
    ids = prompts(2, 90)
    cache = KVCache(model.config, batch=2, positions=90)
    pieces = [model(part, cache=cache) for part in ids.split(sizes, dim=-1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(ids), atol=1e-5, rtol=1e-5)
    assert cache.layers[0].slots < 30  # the memory was used more than once


@every_shape
@pytest.mark.parametrize("length", [1, 5, CONTEXT])
def test_greedy_tokens_are_those_of_reading_everything_again(
    shape: dict[str, Any], length: int, lively: Build, prompts: Draw
) -> None:
    model, ids = lively(**shape), prompts(2, length)
    fast = generate(model, ids, max_new_tokens=2 * CONTEXT, temperature=0.0)
    assert torch.equal(fast, slowly(model, ids))


def test_the_same_seed_draws_the_same_tokens(lively: Build, prompts: Draw) -> None:
    model, ids = lively(), prompts(2, 4)
    one, two, other = (
        generate(model, ids, max_new_tokens=9, generator=torch.Generator().manual_seed(s))
        for s in (1, 1, 2)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    one, two, other = (generate(model, ids, max_new_tokens=9, seed=s) for s in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_a_stopped_sequence_repeats_its_stop_and_all_stopped_ends(
    lively: Build, prompts: Draw
) -> None:
    model, ids = lively(), prompts(4, 3)
    free = generate(model, ids, max_new_tokens=12, temperature=0.0)[:, 3:]
    stop = int(free[0, 4])
    held = generate(model, ids, max_new_tokens=12, temperature=0.0, stop=[stop])[:, 3:]
    for row, full in zip(held.tolist(), free.tolist(), strict=True):
        upto = full.index(stop) if stop in full else len(row)
        assert row[:upto] == full[: len(row)][:upto]
        assert set(row[upto:]) <= {stop}
    alone = generate(model, ids[:1], max_new_tokens=12, temperature=0.0, stop=[stop])
    assert alone.shape[1] == 3 + free[0].tolist().index(stop) + 1


@every_shape
def test_unequal_prompts_are_continued_as_each_would_be_alone(
    shape: dict[str, Any], lively: Build, prompts: Draw
) -> None:
    model = lively(**shape)
    rows = [prompts(n, seed=n) for n in (2, 7, 1, 5)]
    together = generate(model, rows, max_new_tokens=9, temperature=0.0, repetition_penalty=1.3)
    for row, longer in zip(rows, together, strict=True):
        settings: dict[str, Any] = {"max_new_tokens": 9, "repetition_penalty": 1.3}
        alone = generate(model, row[None], temperature=0.0, **settings)
        assert torch.equal(longer, alone[0])


@torch.no_grad()
def test_past_the_context_every_prompt_keeps_its_newest_half(lively: Build, prompts: Draw) -> None:
    model = lively()
    rows = [prompts(n, seed=n) for n in (2, CONTEXT + 3, CONTEXT - 1)]
    together = generate(model, rows, max_new_tokens=2 * CONTEXT, temperature=0.0)
    for row, fast in zip(rows, together, strict=True):
        newest = row[-CONTEXT:]
        assert torch.equal(fast[len(row) :], slowly(model, newest[None])[0, len(newest) :])


def test_an_encoder_reads_a_source_once_and_the_text_is_that_without_a_cache(
    lively: Build, prompts: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lively(kind="encoder-decoder", positions="buckets", vocabulary=13)
    sources = [prompts(n, vocabulary=13, seed=n) for n in (3, 8)]
    starts = torch.zeros(2, 1, dtype=torch.long)
    with torch.no_grad():
        memories = [model.encode(source[None]) for source in sources]
    slow = torch.cat([slowly(model, starts[:1], memory_BSM=memory) for memory in memories])
    encode, calls = model.encode, []
    monkeypatch.setattr(model, "encode", lambda *a, **k: calls.append(1) or encode(*a, **k))
    fast = generate(model, starts, max_new_tokens=2 * CONTEXT, temperature=0.0, source=sources)
    assert torch.equal(fast, slow)
    assert len(calls) == 2  # one per prompt


def test_each_of_a_list_ends_at_its_own_stop(lively: Build, prompts: Draw) -> None:
    model, rows = lively(), [prompts(3, seed=s) for s in range(4)]
    free = generate(model, rows, max_new_tokens=9, temperature=0.0)
    stop = int(free[1][5])
    for full, ended in zip(
        free, generate(model, rows, max_new_tokens=9, temperature=0.0, stop=[stop]), strict=True
    ):
        new = full[3:].tolist()
        length = new.index(stop) + 1 if stop in new else len(new)
        assert torch.equal(ended, full[: 3 + length])


def test_no_new_tokens_add_nothing(lively: Build, prompts: Draw) -> None:
    model, ids = lively(), prompts(2, 3)
    assert torch.equal(generate(model, ids, max_new_tokens=0), ids)
    assert torch.equal(generate(model, list(ids), max_new_tokens=0)[1], ids[1])


def test_a_repetition_penalty_keeps_tokens_from_coming_again(lively: Build, prompts: Draw) -> None:
    model, ids = lively(), prompts(2, 4)
    plain, varied = (
        generate(model, ids, max_new_tokens=12, temperature=0.0, repetition_penalty=r)
        for r in (1.0, 1e4)
    )
    assert all(len(set(row)) < 16 for row in plain.tolist())
    assert all(len(set(row)) == 16 - _repeated(row[:4]) for row in varied.tolist())


@torch.no_grad()
def test_generated_tokens_are_counted_and_those_of_the_prompt_are_not(
    lively: Build, prompts: Draw
) -> None:
    """Greedy by hand: z - 0.9 n - 0.3 [n > 0], and one token is banned."""
    model, ids = lively(), prompts(2, 4)
    banned = int(generate(model, ids, max_new_tokens=1, temperature=0.0)[0, -1])
    expected = ids
    for _ in range(12):
        z = model(expected)[:, -1].double()
        z[:, banned] -= 100.0
        for row, generated in zip(z, expected[:, 4:].tolist(), strict=True):
            for token in set(generated):
                row[token] -= 0.9 * generated.count(token) + 0.3
        expected = torch.cat([expected, z.argmax(-1, keepdim=True)], dim=-1)
    found = generate(
        model,
        ids,
        max_new_tokens=12,
        temperature=0.0,
        presence_penalty=0.3,
        frequency_penalty=0.9,
        logit_bias={banned: -100.0},
    )
    assert torch.equal(found, expected)


def _repeated(prompt: list[int]) -> int:
    return len(prompt) - len(set(prompt))


@pytest.mark.parametrize("draft", [0, 3])
def test_text_comes_in_pieces_up_to_the_stop(
    draft: int, lively: Build, tokenizer: TextTokenizer
) -> None:
    model = lively(vocabulary=300, context=64)
    ids = torch.tensor(tokenizer.encode("the sea"))
    settings = GenerationSettings(max_new_tokens=30, sampling=GREEDY, draft=draft)
    whole = "".join(stream_text(model, tokenizer, ids, settings))
    new = generate(model, ids[None], max_new_tokens=30, temperature=0.0)[0, len(ids) :]
    assert whole == tokenizer.decode(new.tolist())
    stop = whole[9:13]
    pieces = list(stream_text(model, tokenizer, ids, replace(settings, stop=[stop])))
    assert "".join(pieces) == whole[: whole.index(stop)]
    held = generate(
        model, [ids], max_new_tokens=30, temperature=0.0, stop=[stop], tokenizer=tokenizer
    )[0]
    told = tokenizer.decode(held[len(ids) :].tolist())
    assert stop in told
    assert stop not in tokenizer.decode(held[len(ids) : -1].tolist())


def test_a_model_in_training_is_given_back_in_training(lively: Build, prompts: Draw) -> None:
    model = lively(dropout=0.5).train()
    one, two = (
        torch.stack(
            list(
                stream(model, prompts(1, 3), GenerationSettings(max_new_tokens=5, sampling=GREEDY))
            )
        )
        for _ in range(2)
    )
    assert torch.equal(one, two)  # no dropout while it writes
    assert model.training


@pytest.mark.parametrize(
    "ids",
    [
        torch.zeros(3, dtype=torch.long),
        torch.zeros(1, 0).long(),
        [],
        [torch.zeros(2).long(), torch.zeros(0).long()],
    ],
)
def test_a_prompt_without_tokens_is_refused(ids: Any, lively: Build) -> None:
    with pytest.raises(ValueError, match="T at least 1"):
        generate(lively(), ids, max_new_tokens=1)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"draft": -1}, "draft=-1"),
        ({"cache": "int4"}, "cache='int4'"),
        ({"stop": ["."]}, "give the tokenizer"),
        ({"source": torch.zeros(2, 3).long()}, "has no source"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_read(
    wrong: dict[str, Any], match: str, lively: Build, prompts: Draw
) -> None:
    with pytest.raises(ValueError, match=match):
        generate(lively(), prompts(2, 3), **{"max_new_tokens": 4, "temperature": 0.0, **wrong})


def test_a_model_that_cannot_continue_a_text_is_refused(lively: Build, prompts: Draw) -> None:
    with pytest.raises(ValueError, match="needs a source"):
        generate(lively(kind="encoder-decoder"), prompts(1, 3), max_new_tokens=1)
    with pytest.raises(ValueError, match="an encoder reads whole texts"):
        generate(lively(kind="encoder"), prompts(1, 3), max_new_tokens=1)


def test_prompts_are_tensors_or_lists_of_ids(lively: Build) -> None:
    model, greedy = lively(), {"max_new_tokens": 3, "temperature": 0.0}
    lists: list[list[int]] = [[1, 2, 3], [4]]
    found = generate(model, lists, **greedy)  # type: ignore[arg-type]
    wanted = generate(model, [torch.tensor(ids) for ids in lists], **greedy)  # type: ignore[arg-type]
    assert [row.tolist() for row in found] == [row.tolist() for row in wanted]
    for text in ("the sea", ["the", "sea"]):
        with pytest.raises(ValueError, match="encode a text by its tokenizer"):
            generate(model, text, max_new_tokens=1)
