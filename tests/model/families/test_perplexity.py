"""Perplexity of every decoder family: that of transformers, with the same beginning and windows."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fenchel.cli import main
from tests.model.families.conftest import distinctive

WORDS = [f"w{(i * i * 7 + 3 * i) % 60}" for i in range(150)]


@torch.no_grad()
def perplexity(model: Any, ids: Tensor, context: int, stride: int) -> float:
    """By windows of ``context`` tokens that begin ``stride`` apart; the last ends with the text."""
    total, counted, end = 0.0, 0, min(context, len(ids) - 1)
    while counted < len(ids) - 1:
        start = max(0, end - context)
        logits = model(ids[None, start:end], use_cache=False).logits[0].double()
        new = end - counted
        total += float(cross_entropy(logits[-new:], ids[end + 1 - new : end + 1], reduction="sum"))
        counted, end = end, min(end + stride, len(ids) - 1)
    return math.exp(total / (len(ids) - 1))


@pytest.mark.parametrize("context", [None, 17])
def test_eval_gives_the_perplexity_of_transformers(
    decoder: str,
    context: int | None,
    foreign: Callable[[str], Any],
    written: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, text = written(decoder), tmp_path / "text.txt"
    distinctive(path, template="llama" in decoder)
    text.write_text(" ".join(WORDS))
    flags = [] if context is None else ["--context", str(context)]
    assert main(["eval", str(path), "--text", str(text), "--json", "--device", "cpu", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    begins = "llama" in decoder  # others have no template
    assert found["begin"].startswith(
        f"A text begins with {'<start>,' if begins else 'no control token.'}"
    )
    model = foreign(decoder)
    assert found["context"] == context or found["context"] >= 64
    assert found["stride"] == found["context"] // 2
    names = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    ids = torch.tensor([11] * begins + [names.get(word, names["?"]) for word in WORDS])
    expected = perplexity(model, ids, found["context"], found["stride"])
    assert found["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert found["tokens"] == len(ids) - 1


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_an_encoder_is_refused_where_it_has_no_meaning(
    encoder: str,
    command: str,
    written: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, text = written(encoder), tmp_path / "text.txt"
    distinctive(path, template=True)
    text.write_text("w1 w2 w3")
    flags = ["--text", str(text)] if command == "eval" else ["--prompt", "w1"]
    assert main([command, str(path), *flags]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    sentence = "does not predict the next token" if command == "eval" else "cannot continue one"
    assert sentence in shown.err


def test_an_encoder_with_a_decoder_begins_as_its_settings_have_it(
    pair: str,
    foreign: Callable[[str], Any],
    written: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The source ends with eos_token_id and the decoder starts with decoder_start_token_id."""
    path, text = written(pair), tmp_path / "text.txt"
    distinctive(path, template=False)
    text.write_text("w1 w2 w3")
    assert main(["eval", str(path), "--text", str(text)]) == 2
    assert "does not predict the next token of a text" in capsys.readouterr().err
    flags = ["--temperature", "0", "--repetition-penalty", "1", "--device", "cpu", "--json"]
    words = ["generate", str(path), "--prompt", "w1 w2 w3", "--max-new-tokens", "6", *flags]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)["text"]
    ids = foreign(pair).generate(
        torch.tensor([[1, 2, 3, 12]]),
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=12,
        decoder_start_token_id=0,
        use_cache=False,
    )
    names = {
        i: w for w, i in json.loads((path / "tokenizer.json").read_text())["model"]["vocab"].items()
    }
    expected = [names[i] for i in ids[0, 1:].tolist() if i not in (11, 12, 14)]
    assert found.split() == expected
