"""Greedy words of every family against transformers: every cache, guesses, unequal prompts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fenchel.checkpoints import load_model
from fenchel.generation import generate

ROWS = [torch.randint(3, 70, (n,), generator=torch.Generator().manual_seed(n)) for n in (4, 9, 6)]
HOW: list[dict[str, Any]] = [{}, {"cache": "float16"}, {"draft": 5}]


def words(theirs: Any, ids: torch.Tensor, present: torch.Tensor, **more: Any) -> list[list[int]]:
    said = theirs.generate(
        ids,
        attention_mask=present,
        max_new_tokens=30,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **more,
    )
    return said.tolist()


@pytest.mark.parametrize("how", HOW, ids=str)
def test_greedy_words_are_theirs(
    decoder: str, how: dict[str, Any], foreign: Callable[[str], Any], written: Callable[..., Path]
) -> None:
    ids = ROWS[1][None]
    ours = generate(load_model(written(decoder)), ids, max_new_tokens=30, temperature=0.0, **how)
    assert ours.tolist() == words(foreign(decoder), ids, torch.ones_like(ids))


def test_unequal_prompts_give_their_words(
    decoder: str, foreign: Callable[[str], Any], written: Callable[..., Path]
) -> None:
    T = max(map(len, ROWS))
    ids, present = torch.zeros(3, T).long(), torch.zeros(3, T).long()
    for b, row in enumerate(ROWS):
        ids[b, T - len(row) :], present[b, T - len(row) :] = row, 1
    ours = generate(load_model(written(decoder)), ROWS, max_new_tokens=30, temperature=0.0)
    for b, said in enumerate(words(foreign(decoder), ids, present)):
        assert ours[b].tolist() == said[T - len(ROWS[b]) :]


@pytest.mark.parametrize("how", HOW[:1], ids=str)
def test_answers_to_a_source_are_theirs(
    pair: str, how: dict[str, Any], foreign: Callable[[str], Any], written: Callable[..., Path]
) -> None:
    source, start = ROWS[1][None], torch.zeros(1, 1).long()
    ours = generate(
        load_model(written(pair)), start, max_new_tokens=30, temperature=0.0, source=source, **how
    )
    assert ours.tolist() == words(foreign(pair), source, torch.ones_like(source), use_cache=False)
