"""What lm-evaluation-harness sends to a server, and the numbers it makes of the answers.

lm_eval is large and no dependency of the tests: the bodies and the slices below are those of
``local-completions`` in lm_eval 0.4.13 (``_create_payload`` and ``parse_logprobs`` of its class,
``get_rolling_token_windows`` and ``make_disjoint_window``). docs/calibration.md has the command
of the harness itself, which was run with the same result.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fenchel.checkpoints import Loaded, load
from fenchel.checkpoints.tokenizer import end_ids
from fenchel.evaluate import score
from fenchel.generation import generate
from fenchel.model import Transformer
from tests.server.conftest import ANSWERS, CONTEXT, RunningServer

PAIRS = [
    ("What is the sea?", " The sea is wide and blue."),
    ("What is the sea? ", "The hill is green"),
    ("größer songs in", " 東京."),
    ("", "What is the bird?"),
    ("is", " the"),
]
TEXT = " ".join(f"What is {thing}? {answer}" for thing, answer in ANSWERS.items())


@pytest.fixture(scope="module")
def loaded(chat_directory: Path) -> Loaded:
    return load(chat_directory)


@torch.no_grad()
def likelihood(model: Transformer, ids: list[int], count: int) -> tuple[float, bool]:
    """log p of the last ``count`` ids, and whether all of them are the most probable."""
    log_p = model.eval()(torch.tensor([ids[:-1]]))[0, -count:].float().log_softmax(-1)
    targets = torch.tensor(ids[-count:])
    scored = log_p.gather(-1, targets[:, None])
    return float(scored.sum()), bool((log_p.argmax(-1) == targets).all())


def ask(running: RunningServer, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{running.address}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": "Bearer "},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def loglikelihoods(
    running: RunningServer, rows: Sequence[Sequence[int]], context_lengths: Sequence[int]
) -> list[tuple[float, bool]]:
    """The body of the harness, and its slices of the answer."""
    body = {
        "model": "parrot",
        "prompt": [list(row) for row in rows],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    results = []
    choices = sorted(ask(running, body)["choices"], key=itemgetter("index"))
    for choice, row, given in zip(choices, rows, context_lengths, strict=True):
        numbers = choice["logprobs"]["token_logprobs"]
        assert len(numbers) == len(row) + 1  # the harness drops the last, which is generated
        assert numbers[0] is None
        best = choice["logprobs"]["top_logprobs"][given:-1]
        scored = numbers[given:-1]
        greedy = all(one == max(top.values()) for one, top in zip(scored, best, strict=True))
        results.append((sum(scored), greedy))
    return results


def test_continuations_are_scored_as_by_the_model(running: RunningServer, loaded: Loaded) -> None:
    model, tokenizer, _ = loaded
    rows, counts = [], []
    for context, continuation in PAIRS:
        given = tokenizer.encode(context.rstrip()) if context else []
        scored = tokenizer.encode(context + continuation)[len(given) :]
        rows.append([*tokenizer.begin_ids, *given, *scored])
        counts.append(len(scored))
    served = loglikelihoods(running, rows, [len(r) - n for r, n in zip(rows, counts, strict=True)])
    for (value, greedy), row, count in zip(served, rows, counts, strict=True):
        other, other_greedy = likelihood(model, row, count)
        assert value == pytest.approx(other, abs=1e-5)
        assert greedy == other_greedy
    assert len({greedy for _, greedy in served}) == 2


def rolling_windows(
    ids: Sequence[int], prefix: int, longest: int
) -> list[tuple[list[int], list[int]]]:
    """(context, continuation) of ``make_disjoint_window(get_rolling_token_windows(...))``."""
    windows = [([prefix], list(ids[:longest]))]
    predicted = len(windows[0][1])
    while predicted < len(ids):
        end = predicted + min(len(ids) - predicted, longest)
        window = list(ids[end - longest - 1 : end])
        count = end - predicted
        windows.append((window[: len(window) - count], window[len(window) - count :]))
        predicted = end
    return windows


@pytest.mark.parametrize("longest", [7, CONTEXT - 1])
def test_a_rolling_text_is_what_eval_measures_in_windows_that_do_not_overlap(
    running: RunningServer, loaded: Loaded, longest: int
) -> None:
    ids = loaded.tokenizer.encode(TEXT)
    (prefix,) = loaded.tokenizer.begin_ids
    windows = rolling_windows(ids, prefix, longest)
    assert len(windows) > 1 or longest > len(ids)
    served = [
        loglikelihoods(running, [[*context, *more]], [len(context)])[0][0]
        for context, more in windows
    ]
    by_eval = score(
        loaded.model, np.array([prefix, *ids]), bytes=1, context=longest, stride=longest
    )
    assert by_eval.tokens == len(ids)
    assert sum(served) / len(ids) == pytest.approx(-by_eval.loss, abs=1e-5)


def test_a_row_may_fill_the_context_and_no_more(running: RunningServer, loaded: Loaded) -> None:
    ids = (loaded.tokenizer.encode(TEXT) * 4)[:CONTEXT]
    ((value, _),) = loglikelihoods(running, [ids], [1])
    expected, _ = likelihood(loaded.model, ids, CONTEXT - 1)
    assert value == pytest.approx(expected, abs=1e-5 * CONTEXT)
    with pytest.raises(urllib.error.HTTPError, match="400"):
        loglikelihoods(running, [[*ids, 1]], [1])


def test_a_task_that_generates_gets_the_text_of_generate(
    running: RunningServer, loaded: Loaded, chat_directory: Path
) -> None:
    model, tokenizer, _ = loaded
    contexts = ["What is the hill?", "The bird sings", "assistant\nThe sea is"]
    prompts = [[*tokenizer.begin_ids, *tokenizer.encode(one)] for one in contexts]
    stops = ["\n", ".", "<stop>"]
    body = {
        "prompt": prompts,
        "model": "parrot",
        "max_tokens": 24,
        "temperature": 0,
        "stop": stops,
        "seed": 1234,
    }
    choices = sorted(ask(running, body)["choices"], key=itemgetter("index"))
    ends, expected = list(end_ids(chat_directory, tokenizer)), []
    for prompt in prompts:
        ids = generate(model, torch.tensor([prompt]), max_new_tokens=24, temperature=0.0, stop=ends)
        new = ids[0, len(prompt) :].tolist()
        text = tokenizer.decode(new[:-1] if new[-1] in ends else new)
        expected.append(
            text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)]
        )
    assert [choice["text"] for choice in choices] == expected
    assert "" in expected  # the end token, which no text shows
    assert any(expected)
