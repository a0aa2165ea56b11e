"""Greedy tokens of every family against transformers: every cache, step kind and prompt."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fenchel.checkpoints import load_model
from fenchel.generation import Decoder, GenerationSettings, Sampling, generate, steps, stream
from fenchel.generation.plain_decoder import why_not_plain
from fenchel.model import Transformer
from tests.generation.conftest import run_and_keep

ROWS = [torch.randint(3, 70, (n,), generator=torch.Generator().manual_seed(n)) for n in (4, 9, 6)]
HOW: list[dict[str, Any]] = [{}, {"cache": "float16"}, {"draft": 5}]


def tokens(theirs: Any, ids: torch.Tensor, present: torch.Tensor, **more: Any) -> list[list[int]]:
    drawn = theirs.generate(
        ids,
        attention_mask=present,
        max_new_tokens=30,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **more,
    )
    return drawn.tolist()


@pytest.mark.parametrize("how", HOW, ids=str)
def test_greedy_tokens_are_theirs(
    decoder: str, how: dict[str, Any], foreign: Callable[[str], Any], written: Callable[..., Path]
) -> None:
    ids = ROWS[1][None]
    ours = generate(load_model(written(decoder)), ids, max_new_tokens=30, temperature=0.0, **how)
    assert ours.tolist() == tokens(foreign(decoder), ids, torch.ones_like(ids))


def test_unequal_prompts_give_their_tokens(
    decoder: str, foreign: Callable[[str], Any], written: Callable[..., Path]
) -> None:
    T = max(map(len, ROWS))
    ids, present = torch.zeros(3, T).long(), torch.zeros(3, T).long()
    for b, row in enumerate(ROWS):
        ids[b, T - len(row) :], present[b, T - len(row) :] = row, 1
    ours = generate(load_model(written(decoder)), ROWS, max_new_tokens=30, temperature=0.0)
    for b, row in enumerate(tokens(foreign(decoder), ids, present)):
        assert ours[b].tolist() == row[T - len(ROWS[b]) :]


NEW = {"model": 30, "cpu": 30, "packed": 30, "graph": 30, "fused": 3}
"""New tokens per kind of step; fused steps are interpreted where there is no GPU."""


def kind_for(model: Transformer, name: str, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Why a kind of step does not serve a model that could be on a GPU, or None."""
    monkeypatch.setattr(steps, "why_not_fused", lambda model: why_not_plain(model, sparse=True))
    (kind,) = [kind for kind in steps.STEPS if kind.name == name]
    return kind.why_not(steps.DecodeCall(model, record=lambda step, _: step))


@pytest.mark.parametrize("step", NEW)
def test_every_kind_of_step_that_serves_a_family_gives_their_tokens(
    decoder: str,
    step: str,
    foreign: Callable[[str], Any],
    written: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_model(written(decoder))
    if kind_for(model, step, monkeypatch) is not None:
        assert step != "model"
        return
    ids, N = ROWS[1][None], NEW[step]
    own = Decoder(model, rows=2, step=step, record=run_and_keep)
    settings = GenerationSettings(max_new_tokens=N, sampling=Sampling(temperature=0.0))
    ours = [int(token) for token in stream(model, ids, settings, decoder=own)]
    theirs = tokens(foreign(decoder), ids, torch.ones_like(ids))[0]
    assert ours == theirs[len(ROWS[1]) :][:N]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_plain_families_are_served_by_every_kind_of_step(
    family: str, written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(written(family))
    assert {name: kind_for(model, name, monkeypatch) for name in NEW} == dict.fromkeys(NEW)


@pytest.mark.parametrize("how", HOW[:1], ids=str)
def test_answers_to_a_source_are_theirs(
    pair: str, how: dict[str, Any], foreign: Callable[[str], Any], written: Callable[..., Path]
) -> None:
    source, start = ROWS[1][None], torch.zeros(1, 1).long()
    ours = generate(
        load_model(written(pair)), start, max_new_tokens=30, temperature=0.0, source=source, **how
    )
    assert ours.tolist() == tokens(foreign(pair), source, torch.ones_like(source), use_cache=False)
