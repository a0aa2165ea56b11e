"""fenchel/generation/session.py: padding is on the left and is masked."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled

from fenchel.data import TextTokenizer
from fenchel.generation import GenerationSettings, PrefixCache, Sampling, generate, stream_text
from fenchel.generation.session import Session, pad_prompts, previous_tokens
from fenchel.model import Transformer

ROWS = [torch.tensor(row) for row in ([7, 8, 9], [5], [3, 3])]


def test_all_prompts_end_together_and_padding_is_masked() -> None:
    ids, mask = pad_prompts(ROWS)
    assert mask is not None
    for row, got, real in zip(ROWS, ids, mask, strict=True):
        assert torch.equal(got[3 - len(row) :], row)
        assert torch.equal(got[real], row)


def test_equal_prompts_have_no_padding() -> None:
    assert pad_prompts(ROWS[:1]).token_mask is None
    assert pad_prompts(torch.stack(ROWS[:1])).token_mask is None


def test_padding_is_not_a_previous_token() -> None:
    has = [row.nonzero().flatten().tolist() for row in previous_tokens(pad_prompts(ROWS), 10)]
    assert has == [[7, 8, 9], [5], [3]]


def test_a_growing_cache_meets_no_kernel_that_is_planned_per_length(
    lively: Callable[..., Transformer], prompts: Callable[..., Tensor], device: str
) -> None:
    model, enabled = lively(positions="alibi").to(device), list[bool]()
    model.blocks[0].register_forward_pre_hook(lambda *_: enabled.append(cudnn_sdp_enabled()))
    before = cudnn_sdp_enabled()
    generate(model, prompts(1, 3).to(device), max_new_tokens=3)
    assert enabled == [before and device == "cpu"] * 3
    assert cudnn_sdp_enabled() == before


SHAPES: dict[str, dict[str, Any]] = {
    "rotary": {},
    "learned": {"positions": "learned", "norm": "layer"},
    "windows": {"windows": (3, 0), "kv_heads": 2},
    "entmax": {"choice": "entmax"},
}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many ids each forward pass of a session reads."""
    sizes: list[int] = []
    forward = Session.forward

    def counted(session: Session, ids_BT: Tensor, *, last: bool = True) -> Tensor:
        sizes.append(ids_BT.shape[1])
        return forward(session, ids_BT, last=last)

    monkeypatch.setattr(Session, "forward", counted)
    return sizes


@pytest.mark.parametrize("cache", ["model", "int8"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_chat_with_a_prefix_cache_has_the_text_of_one_without(
    shape: dict[str, Any],
    cache: Any,
    lively: Callable[..., Transformer],
    tokenizer: TextTokenizer,
    read: list[int],
) -> None:
    """Turns that extend the text, go back in it, repeat it, and begin another."""
    model = lively(**shape, vocabulary=300, context=64)
    settings = GenerationSettings(max_new_tokens=6, sampling=Sampling(temperature=0.0), cache=cache)
    prefix_cache, written, passes = PrefixCache(), torch.tensor([0]), list[int]()
    turns = (
        (None, [5, 6, 7]),
        (None, [8, 9]),
        (9, [4, 3, 2]),
        (None, []),
        (1, [11]),
    )
    for keep, more in turns:
        ids = torch.cat([written[:keep], torch.tensor(more, dtype=torch.long)])
        expected = "".join(stream_text(model, tokenizer, ids, settings))
        read.clear()
        text = "".join(stream_text(model, tokenizer, ids, settings, prefix_cache=prefix_cache))
        passes.append(read[0])
        assert text == expected
        [written] = generate(model, [ids], max_new_tokens=6, temperature=0.0, cache=cache)
    # The last new token of a turn was drawn and not read; a window has dropped the first keys.
    assert passes == [4, 3, 3, 1, 2 if "windows" in shape else 1]


def test_what_an_interrupted_pass_was_given_is_read_again(
    lively: Callable[..., Transformer], tokenizer: TextTokenizer, read: list[int]
) -> None:
    model = lively(vocabulary=300, windows=(2, 0))
    settings = GenerationSettings(max_new_tokens=4, sampling=Sampling(temperature=0.0))
    prefix_cache, first = PrefixCache(), torch.tensor([1, 2, 3])
    ids = torch.tensor([1, 2, 3, 4, 5])

    def answer(ids: Tensor = ids) -> str:
        return "".join(stream_text(model, tokenizer, ids, settings, prefix_cache=prefix_cache))

    expected, failing = answer(), [True]
    answer(first)

    def interrupt(*_: object) -> None:
        if failing:
            raise KeyboardInterrupt

    model.blocks[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        answer()
    failing.clear()
    read.clear()
    assert answer() == expected
    assert read[0] == 5
    next(stream_text(model, tokenizer, ids, settings, prefix_cache=prefix_cache))  # closed early
    read.clear()
    assert answer() == expected
    assert read[0] == 1


def test_another_model_or_kind_of_cache_begins_anew(
    lively: Callable[..., Transformer], tokenizer: TextTokenizer, read: list[int]
) -> None:
    prefix_cache, ids = PrefixCache(), torch.tensor([1, 2, 3])
    one, other = lively(vocabulary=300), lively(vocabulary=300, layers=1)
    calls: list[tuple[Transformer, Any, int]] = [
        (one, "model", 3),
        (one, "model", 1),
        (one, "int8", 3),
        (other, "int8", 3),
    ]
    for model, cache, count in calls:
        settings = GenerationSettings(max_new_tokens=1, cache=cache)
        read.clear()
        list(stream_text(model, tokenizer, ids, settings, prefix_cache=prefix_cache))
        assert read == [count]
