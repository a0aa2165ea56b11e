"""fenchel/generate/decode.py and cache.py: a cache changes the work, not the words."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fenchel.generate import KeyValueCache, Sampling, generate, stream
from fenchel.model import ModelConfig, Transformer

V, CONTEXT = 31, 16
SHAPES: list[dict[str, Any]] = [
    {"positions": "rotary"},
    {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True},
    {"positions": "none"},
    {"kv_heads": 1},
    {"kv_heads": 2, "choice": "entmax"},
]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: " ".join(map(str, s.values())))


def lively(**settings: Any) -> Transformer:
    config = ModelConfig(vocabulary=V, context=CONTEXT, width=32, heads=4, layers=2, **settings)
    model = Transformer(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
            p.copy_(noise * (p.shape[-1] ** -0.5 if p.ndim > 1 else 0.2) + (p.ndim == 1))
    return model


def prompts(*shape: int) -> Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(5))


@every_shape
@torch.no_grad()
def test_reading_in_pieces_is_reading_at_once(shape: dict[str, Any]) -> None:
    model, ids = lively(**shape), prompts(3, CONTEXT)
    whole = model(ids)
    cache = KeyValueCache(model.config, batch=3, positions=CONTEXT)
    pieces = [model(part, cache=cache) for part in ids.split([1, 6, 1, 5, 3], dim=-1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-5, rtol=1e-5)
    assert cache.length == CONTEXT


@every_shape
@pytest.mark.parametrize("length", [1, 5, CONTEXT])
def test_greedy_words_are_those_of_reading_everything_again(
    shape: dict[str, Any], length: int
) -> None:
    model, ids = lively(**shape), prompts(2, length)
    slow, held = ids, ids
    for _ in range(2 * CONTEXT):  # far past the context
        if held.shape[1] > CONTEXT:
            held = slow[:, -(CONTEXT // 2) :]
        token = model(held)[:, -1].argmax(-1, keepdim=True)
        slow, held = (torch.cat([t, token], dim=-1) for t in (slow, held))
    fast = generate(model, ids, max_new_tokens=2 * CONTEXT, temperature=0.0)
    assert torch.equal(fast, slow)


def test_the_same_seed_draws_the_same_words() -> None:
    model, ids = lively(), prompts(2, 4)
    one, two, other = (
        generate(model, ids, max_new_tokens=9, generator=torch.Generator().manual_seed(s))
        for s in (1, 1, 2)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_a_stopped_sequence_repeats_its_stop_and_all_stopped_ends() -> None:
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


def test_a_model_in_training_is_given_back_in_training() -> None:
    model = lively(dropout=0.5).train()
    one, two = (
        torch.stack(list(stream(model, prompts(1, 3), max_new_tokens=5, sampling=GREEDY)))
        for _ in range(2)
    )
    assert torch.equal(one, two)  # no dropout while it writes
    assert model.training


GREEDY = Sampling(temperature=0.0)


@pytest.mark.parametrize("ids", [torch.zeros(3, dtype=torch.long), torch.zeros(1, 0).long()])
def test_a_prompt_without_tokens_is_refused(ids: Tensor) -> None:
    with pytest.raises(ValueError, match="T at least 1"):
        generate(lively(), ids, max_new_tokens=1)


def test_a_full_cache_says_so() -> None:
    model = lively()
    cache = KeyValueCache(model.config, batch=1, positions=4)
    with pytest.raises(ValueError, match="room for 4 positions"):
        model(prompts(1, 5), cache=cache)
