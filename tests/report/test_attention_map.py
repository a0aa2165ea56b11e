"""fenchel/report/attention_map.py: bytes back to weights, and what is said of damaged ones."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fenchel.report.attention_map import attention_map, head_rows, read_maps
from fenchel.report.run_data import RunData

CausalMaps = Callable[[int, int, int], np.ndarray]
Packed = Callable[[np.ndarray], dict[str, Any]]


@pytest.fixture
def weights(causal_maps: CausalMaps) -> np.ndarray:
    return causal_maps(2, 3, 7)


@pytest.fixture
def sample(weights: np.ndarray, packed: Packed) -> dict[str, Any]:
    return {"tokens": [f"t{i}" for i in range(7)], "attention": packed(weights)}


def test_decoded_weights_have_the_stated_error(weights: np.ndarray, sample: dict[str, Any]) -> None:
    bytes_ = read_maps(sample).data.astype(np.float64)
    assert bytes_.shape == (2, 3, 7, 7)
    error = np.abs((bytes_ / 255) ** 2 - weights)
    assert (error <= np.sqrt(weights) / 255 + 1 / 510**2).all()
    assert error.max() <= 0.004


def test_the_table_of_heads_describes_the_weights(
    weights: np.ndarray, sample: dict[str, Any]
) -> None:
    rows = head_rows(read_maps(sample))
    assert [row[0] for row in rows[:4]] == [
        "layer 1, head 1",
        "layer 1, head 2",
        "layer 1, head 3",
        "layer 2, head 1",
    ]
    told = np.array([[float(cell) for cell in row[1:]] for row in rows]).reshape(2, 3, 5)
    safe = np.where(weights > 0, weights, 1.0)
    entropy = -(weights * np.log(safe)).sum(-1).mean(-1)
    query, key = np.mgrid[:7, :7]
    exact = (
        entropy,
        np.exp(entropy),
        weights[..., 0].mean(-1),
        weights[..., range(7), range(7)].mean(-1),
        (weights * (query - key)).sum(-1).mean(-1),
    )
    for index, expected in enumerate(exact):
        np.testing.assert_allclose(told[..., index], expected, rtol=0.02, atol=0.01)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": "!"}, "base64"),
        ({"data": 7}, "base64"),
        ({"data": "AAAA"}, "cut short or damaged: 3 bytes, not 294"),
        ({"layers": 0}, "whole numbers"),
        ({"layers": 2.0}, "whole numbers"),
        ({"heads": "3"}, "whole numbers"),
        ({"size": 10**9}, "whole numbers"),
        ({"size": None}, "whole numbers"),
        ({"layers": 1024, "heads": 1024, "size": 7}, "too large"),
        ({"size": 6}, "6 tokens, sample.json names 7"),
        ({"scale": "linear"}, "sqrt"),
    ],
)
def test_damaged_maps_are_reported_in_a_sentence_and_not_drawn(
    sample: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    damaged = {**sample, "attention": {**sample["attention"], **change}}
    with pytest.raises(ValueError, match=said):
        read_maps(damaged)
    run = RunData(
        name="r",
        config={},
        config_text="",
        environment={},
        rows=(),
        summary={},
        sample=damaged,
        troubles={},
    )
    part = attention_map(run)
    assert said in part.body
    assert not part.pictures


def test_tokens_are_shown_short_and_without_hidden_signs(sample: dict[str, Any]) -> None:
    odd = {**sample, "tokens": ["\x1b[31m", "x" * 1000, 7, None, "\ud800", "a\nb", " the"]}
    tokens = read_maps(odd).tokens
    assert tokens == ("␛[31m", "x" * 40 + "…", "7", "None", "�", "a\nb", " the")


@pytest.mark.parametrize("sample", [{}, {"tokens": 3, "attention": {}}, {"attention": [1]}])
def test_a_sample_without_maps_is_refused(sample: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="contains no attention maps"):
        read_maps(sample)
