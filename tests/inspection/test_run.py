"""fenchel/inspection/run.py: one call, plain values, the same for the same seed."""

import base64
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fenchel.files import Notice
from fenchel.inspection import Inspection, inspect, open_model, trace
from fenchel.inspection.heads import row_weights
from fenchel.inspection.trace import tokenize_text

Save = Callable[[str], Path]


def inspected(save: Save, text: Path, family: str = "gpt2", **how: object) -> Inspection:
    settings = {"max_tokens": 14, "iterations": 4} | how
    return inspect(open_model(save(family)), str(text), **settings)  # type: ignore[arg-type]


def test_an_inspection_is_plain_and_complete(save: Save, text: Path) -> None:
    found = inspected(save, text)
    told = json.loads(json.dumps(found.plain(), allow_nan=False))
    assert [(h["layer"], h["head"]) for h in told["heads"]] == [
        (layer, head) for layer in (1, 2) for head in (1, 2, 3)
    ]
    assert len(told["layers"]) == 2
    assert len(told["tokens"]) == 14
    assert told["subject"]["layers"] == 2
    assert told["method"]["failure"] == 1e-6
    assert told["network"]["influence"]["spans"][0] == [0, 1]
    assert "maps" not in told
    assert "rows" not in told["heads"][0]
    assert len(found.plain(rows=True)["heads"][0]["rows"]["margin"]) == 14
    assert set(told["heads"][0]["sigma"]) == {"q", "k", "v", "qkv"}


def test_what_is_plain_is_every_field_with_none_for_what_is_not_finite(
    save: Save, text: Path
) -> None:
    def finite(value: Any) -> Any:
        """The law, a number at a time."""
        if isinstance(value, dict):
            return {key: finite(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [finite(one) for one in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    found = inspected(save, text)
    whole = found.plain(rows=True)
    everything = finite(asdict(found))
    del everything["maps"]  # for the page only
    assert whole == everything
    assert whole["heads"][0]["rows"]["margin"][0] is None  # the first token has one key
    assert found.precision is not None
    assert whole["precision"]["again_head"] == list(found.precision.again_head)
    for head in whole["heads"]:
        del head["rows"]
    assert found.plain() == whole


def test_the_same_seed_gives_the_same_numbers(save: Save, text: Path) -> None:
    one, two, other = (inspected(save, text, seed=seed).plain() for seed in (3, 3, 4))
    for found in (one, two, other):
        del found["seconds"]
    assert one == two
    assert one["network"]["influence"] != other["network"]["influence"]


def test_chosen_heads_are_measured_as_among_all(save: Save, text: Path) -> None:
    all_ = inspected(save, text, blocks=False, iterations=30)
    some = inspected(save, text, blocks=False, layers=[2], heads=[3, 1], iterations=30)
    assert [(h.layer, h.head) for h in some.heads] == [(2, 1), (2, 3)]
    for head in some.heads:
        same = next(h for h in all_.heads if (h.layer, h.head) == (head.layer, head.head))
        assert same.entropy == head.entropy
        assert (same.nearest_head, same.similarity) == (head.nearest_head, head.similarity)
        assert head.nearest_head not in (None, head.head)
        assert same.sigma["qkv"].lower == pytest.approx(head.sigma["qkv"].lower, rel=0.05)
    assert some.network is None
    assert some.layers == []


def test_maps_are_the_weights_to_eight_bits(save: Save, text: Path) -> None:
    subject = open_model(save("llama"))
    found = inspect(subject, str(text), max_tokens=14, blocks=False, layers=[2], heads=[4, 1])
    raw = np.frombuffer(base64.b64decode(found.maps.data), dtype=np.uint8)
    maps = (raw.reshape(1, 2, 14, 14) / 255.0) ** 2
    ids = tokenize_text(subject, str(text), 14).ids
    exact = row_weights(subject.trace(torch.tensor([ids])).blocks[1].attention, 14)[[0, 3]]
    assert np.abs(maps[0] - exact.numpy()).max() < 0.005
    assert (found.maps.layers, found.maps.heads) == ([2], [1, 4])


def test_progress_reaches_its_end(save: Save, text: Path) -> None:
    told: dict[str, tuple[int, int]] = {}
    inspected(save, text, progress=lambda what, done, total: told.update({what: (done, total)}))
    assert set(told) == {"heads", "blocks", "network"}
    assert all(done == total for done, total in told.values())


def test_a_number_that_no_layer_has_is_refused(save: Save, text: Path) -> None:
    with pytest.raises(ValueError, match="no layer 3: this model has layers 1 to 2"):
        inspected(save, text, layers=[1, 3])
    with pytest.raises(ValueError, match="no head 0"):
        inspected(save, text, heads=[0])


@pytest.mark.parametrize("given", [None, 49])
def test_a_longer_text_is_read_up_to_the_context_with_a_notice(
    given: int | None, save: Save, text: Path
) -> None:
    subject = open_model(save("gpt2"))
    with pytest.warns(Notice, match=r"The first 48 tokens of .* are read, all that .* takes"):
        assert len(tokenize_text(subject, str(text), given).ids) == 48


def test_max_tokens_cuts_a_text_without_a_notice(
    save: Save, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = open_model(save("gpt2"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(tokenize_text(subject, str(text), 48).ids) == 48
    with pytest.raises(ValueError, match="should be 2 or more"):
        tokenize_text(subject, str(text), 1)
    monkeypatch.setattr(trace, "DEFAULT_TOKENS", 10)
    for context in (None, 48, 10**6):  # a stated context may be far more than anybody computes with
        with pytest.warns(Notice, match="The first 10 tokens .* by default"):
            assert len(tokenize_text(replace(subject, context=context), str(text)).ids) == 10


def test_certificates_of_a_model_of_transformers_are_refused_at_once(
    save: Save, text: Path
) -> None:
    model = open_model(save("opt"))
    with pytest.raises(ValueError, match="is read through transformers; certificates cover runs"):
        inspect(model, str(text), max_tokens=8, radius=0.1)


def test_tokens_spell_the_text(save: Save, text: Path, tmp_path: Path) -> None:
    subject = open_model(save("gpt2"))
    assert text.read_text().startswith("".join(tokenize_text(subject, str(text), 20).tokens))
    odd = tmp_path / "odd.txt"
    odd.write_text("peace 中 <|end|>")
    told = tokenize_text(subject, str(odd))
    assert len(told.tokens) == len(told.ids)
    assert "".join(told.tokens).endswith("<|end|>")  # spelt out, not the control token
    assert subject.tokenizer.token_to_id("<|end|>") not in told.ids
    short = tmp_path / "short.txt"
    short.write_text("a")
    with pytest.raises(ValueError, match="at least 2"):
        tokenize_text(subject, str(short))
