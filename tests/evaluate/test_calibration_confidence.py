"""fenchel/evaluate/calibration.py: a model on a text, in halves."""

import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fenchel.evaluate import (
    Calibration,
    Confidence,
    confidence,
    fit_temperature,
    outcomes,
    summarise,
)
from fenchel.evaluate.calibration import read_calibration, write_calibration
from fenchel.files import Notice
from fenchel.generation.attention_trace import TokenCalibration
from fenchel.model import ModelConfig, Transformer

V = 11


class Table(nn.Module):
    """The next token depends on the last one alone, as a table of logits says."""

    def __init__(self, sharpness: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.logits = nn.Parameter(torch.randn(V, V, generator=generator))
        self.sharpness = sharpness

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.sharpness * self.logits[ids_BT]


def drawn(n: int) -> np.ndarray:
    """Text that the table with sharpness 1 wrote."""
    generator = torch.Generator().manual_seed(1)
    p = Table(1.0).logits.detach().softmax(-1)
    ids = [0]
    for _ in range(n - 1):
        ids.append(int(torch.multinomial(p[ids[-1]], 1, generator=generator)))
    return np.array(ids, dtype=np.uint16)


def test_the_temperature_undoes_what_made_the_model_too_sure() -> None:
    found = confidence(Table(3.0), drawn(4000), context=16)
    assert found.temperature == pytest.approx(3.0, rel=0.1)
    assert found.scaled is not None
    assert found.scaled.ece < 0.05 < found.plain.ece
    assert found.scaled.loss < found.plain.loss
    assert found.scaled.brier < found.plain.brier
    assert found.scaled.accuracy == found.plain.accuracy


def test_it_fits_on_the_first_half_and_measures_on_the_second() -> None:
    model, ids = Table(2.0), drawn(301)
    found = confidence(model, ids, context=8)
    rows = model(torch.from_numpy(ids[:-1].astype(np.int64))).detach()
    truths = torch.from_numpy(ids[1:].astype(np.int64))
    fit = fit_temperature(rows[:150], truths[:150])
    assert found.temperature == pytest.approx(fit.temperature, rel=1e-9)
    assert found.fitted_on == 150
    by_hand = summarise(outcomes(rows[150:], truths[150:]))
    assert found.plain.predictions == by_hand.predictions == 150
    assert found.plain.loss == pytest.approx(by_hand.loss, rel=1e-6)
    assert found.plain.ece == pytest.approx(by_hand.ece, rel=1e-6)


def test_of_a_long_text_only_what_fits_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = drawn(2001)
    monkeypatch.setattr(import_module("fenchel.evaluate.calibration"), "FIT_LOGITS", 300 * V)
    found = confidence(Table(2.0), ids, context=15, batch=3)
    assert found.fitted_on == 250  # every fourth of 1000, across the batches
    assert found.temperature == pytest.approx(2.0, rel=0.3)
    assert found.plain.predictions == 1000  # the measured half is read whole


def test_a_model_that_is_always_right_has_no_temperature() -> None:
    class Certain(Table):
        def forward(self, ids_BT: Tensor) -> Tensor:
            return 9.0 * nn.functional.one_hot((ids_BT + 1) % V, V).float()

    found = confidence(Certain(1.0), np.arange(60, dtype=np.uint16) % V, context=8)
    assert found.temperature == 0.0
    assert found.scaled is None
    assert found.plain.accuracy == 1.0
    with pytest.raises(ValueError, match="at least 4"):
        confidence(Certain(1.0), np.arange(3, dtype=np.uint16), context=8)
    assert math.isfinite(found.plain.loss)


def measured(ece: float) -> Calibration:
    return Calibration(500, 1.0, 0.5, 0.6, 0.6, ece, ece, ())


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(vocabulary=19, context=8, width=16, layers=1, heads=2))


@pytest.fixture
def stored(tmp_path: Path, model: Transformer) -> Path:
    result = Confidence(1.25, 400, measured(0.09), measured(0.02))
    return write_calibration(tmp_path, model, result, "a text")


def test_a_stored_temperature_is_read_again(stored: Path, model: Transformer) -> None:
    assert read_calibration(stored.parent, model) == TokenCalibration(1.25, 0.02, 500)
    assert read_calibration(stored.parent, model.bfloat16()) == TokenCalibration(1.25, 0.02, 500)
    model.float()
    assert read_calibration(stored.parent / "nowhere", model) is None


def test_a_temperature_of_other_weights_is_not_used(stored: Path) -> None:
    torch.manual_seed(1)
    other = Transformer(ModelConfig(vocabulary=19, context=8, width=16, layers=1, heads=2))
    with pytest.warns(Notice, match="other weights"):
        assert read_calibration(stored.parent, other) is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"temperature": 1.3}, "does not match its seal"),
        ({"temperature": -1.0, "seal": None}, "numbers of a calibration"),
        ({"temperature": "hot", "seal": None}, "numbers of a calibration"),
        ({"predictions": None, "seal": None}, "numbers of a calibration"),
    ],
)
def test_a_damaged_file_is_not_used(
    stored: Path, model: Transformer, change: dict[str, Any], word: str
) -> None:
    value = {**json.loads(stored.read_text()), **change}
    if change.get("seal", "") is None:
        del value["seal"]
    stored.write_text(json.dumps(value))
    with pytest.warns(Notice, match=word):
        assert read_calibration(stored.parent, model) is None


def test_an_infinite_temperature_is_not_stored(tmp_path: Path, model: Transformer) -> None:
    with pytest.raises(ValueError, match="none to save"):
        write_calibration(tmp_path, model, Confidence(math.inf, 400, measured(0.1), None), "a text")
