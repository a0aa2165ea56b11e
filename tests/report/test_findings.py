"""fenchel/report/findings.py: sentences whose numbers are those of the result."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fenchel.inspection_result import Head, Inspection, Interval, Quantiles, ScoreParts
from fenchel.report.findings import findings, next_command, why_finding


def spread(value: float) -> Quantiles:
    return Quantiles(value, value, value, value, value, value)


def head(layer: int, number: int, **changes: Any) -> Head:
    usual: dict[str, Any] = {
        "entropy": spread(2.0),
        "effective": spread(12.0),
        "support": spread(30.0),
        "sensitivity": spread(0.4),
        "max_logit": spread(7.0),
        "margin": spread(1.0),
        "first": 0.1,
        "itself": 0.1,
        "distance": 9.0,
        "column": 3.0,
        "column_token": 0,
        "nearest_head": 1,
        "similarity": 0.5,
        "sigma": {"qkv": Interval(1.004, 1.006, 5)},
        "top": [1.0],
        "dominant": "key",
        "bound": 2.0,
        "rows": {},
    }
    return Head(layer=layer, head=number, **{**usual, **changes})


def result(*heads: Head) -> Inspection:
    parts = dict.fromkeys(("method", "layers", "network", "precision", "certificates", "maps"))
    given: dict[str, Any] = {"subject": {}, "text": "my text.txt", "tokens": ["a"], "seconds": {}}
    return Inspection(heads=list(heads), **given, **parts)  # type: ignore[arg-type]


def test_the_middle_the_sharpest_and_the_most_sensitive_head_are_named() -> None:
    sharp = head(2, 1, effective=spread(3.25))
    loud = head(3, 2, sigma={"qkv": Interval(5.4561, 5.4912, 9)}, dominant="query")
    reading, sensitivity, other = findings(result(head(1, 1), sharp, loud))
    assert "12 tokens in the median head" in reading
    assert "3.2 tokens in the sharpest, layer 2 head 1;" in reading
    assert "no head has half of its weight on the first token" in reading
    assert "layer 3 head 2" in sensitivity
    assert "grows 5.45 to 5.50 times, mostly by its queries." in sensitivity
    assert other == (
        "Scores are 7 at most, in layer 1 head 1, and no head attends like another of its layer."
    )


def test_sinks_are_counted() -> None:
    heads = [head(1, n + 1, first=first) for n, first in enumerate((0.9, 0.2, 0.51, 0.49))]
    assert "; 2 of 4 heads have more than half of the weight" in findings(result(*heads))[0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"not_taken": 0.4}, "no token gets: 40% in layer 2 head 1, 20% on average"),
        ({"similarity": 0.991, "nearest_head": 3}, "1 of 2 heads attend like another of their"),
        ({"max_logit": spread(128.0)}, "The largest score is 128, in layer 2 head 1; bfloat16"),
        ({"distance": 1.1}, "1 of 2 heads reads the token before, as layer 2 head 1 does"),
    ],
)
def test_what_stands_out_comes_third(changes: dict[str, Any], sentence: str) -> None:
    usual = head(1, 1)
    assert sentence in findings(result(usual, replace(head(2, 1), **changes)))[2]
    assert sentence not in findings(result(usual, usual))[2]


def test_the_next_command_can_be_typed() -> None:
    inspected = result(head(1, 1), head(4, 2, effective=spread(1.0)))
    found = next_command(inspected, Path("my run"), "a b/my text.txt")
    assert found == "fenchel inspect 'my run' --text 'a b/my text.txt' --why 4.2"
    found = next_command(inspected, Path("my run"), "sotu", 12)
    assert found == "fenchel inspect 'my run' --text sotu --max-tokens 12 --why 4.2"


def test_a_score_that_was_taken_apart_is_explained_first() -> None:
    why = ScoreParts(
        layer=2,
        head=1,
        query=4,
        key=2,
        weight=0.9,
        score=6.0,
        mean=4.0,
        parts=["embedding", "attention 1", "mlp 1"],
        pairs=[[0.1, 0.0, 1.5], [0.0, 0.0, 0.5], [0.0, 0.0, -0.1]],
        remainder=0.0,
        prior=None,
        softcap=None,
    )
    tokens = ["<s>", "The", " Secretary", " of", " the"]
    said = why_finding(why, tokens)
    assert said == (
        "Head 2.1 attends from “the” (4) to “Secretary” (2) with weight 0.90: its score is 2.00 "
        "above the mean, of the key's stream mostly by its MLP 1 (95%) and of the query's stream "
        "mostly by its embedding (80%)."
    )
    assert findings(replace(result(head(1, 1)), why=why, tokens=tokens))[0] == said
    low = replace(why, score=3.0)
    assert why_finding(low, tokens).endswith("its score is not above the mean score of the query.")
