"""fenchel/report/inspection_scale.py: numbers beside those of healthy models."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fenchel
from fenchel.inspection_result import Inspection
from fenchel.report.html import Section
from fenchel.report.inspection_scale import SCALES, Scale, scale
from fenchel.report.inspection_scale import meaning as section
from tests.report.conftest import typed

ROOT = Path(fenchel.__file__).parents[1]
Inspect = Callable[..., dict[str, Any]]


def meaning(data: dict[str, Any]) -> Section:
    return section(typed(Inspection, data))


@pytest.fixture
def usual(inspection: Inspect) -> dict[str, Any]:
    """An inspection on 128 tokens with every measure in the middle of its range after training."""
    result = inspection()
    result["tokens"] = ["x"] * 128
    result["subject"]["causal"] = True
    middle = {one.name: sum(one.trained) / 2 for one in SCALES}
    for head in result["heads"]:
        head["entropy"]["mean"] = middle["entropy share"] * math.lgamma(129) / 128
        head["max_logit"]["most"] = middle["largest logit"]
        head["first"] = middle["weight on the first token"]
        head["sigma"]["qkv"]["lower"] = middle["sigma of a head"]
    for layer in result["layers"]:
        layer["block"]["lower"] = middle["sigma of a block"]
    result["network"]["exponent"] = middle["Lyapunov exponent"]
    return result


@pytest.mark.parametrize("one", SCALES, ids=lambda one: one.name)
def test_the_ranges_are_those_of_the_benchmark_and_of_the_page(one: Scale) -> None:
    results = json.loads((ROOT / "benchmarks/results/inspection_scale_cpu.json").read_text())
    (row,) = (row for row in results["rows"] if row["measure"] == one.name)
    assert list(one.trained) == row["trained"]
    assert list(one.fresh) == pytest.approx(row["fresh"], abs=1e-6)
    low, high = one.trained
    stated = f"{low:g} to {high:g}" if low < high else f"{low:g}"
    (line,) = (
        line
        for line in (ROOT / "docs/inspect.md").read_text().splitlines()
        if line.startswith(f"| {one.name} |")
    )
    assert f"| {stated} |" in line


def test_usual_numbers_get_no_remark(usual: dict[str, Any]) -> None:
    body = meaning(usual).body
    assert "No measure lies far outside" in body
    for one in SCALES:
        assert body.count(f">{one.name}<") == 1
        assert one.usual in body


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("largest logit", 31.0, "Largest logit: L2 H1 (31), above 30. Scores of this size"),
        ("weight on the first token", 0.31, "L2 H1 (0.310), above 0.300. An attention sink"),
        ("sigma of a head", 22.0, "dominated by queries or keys"),
        ("entropy share", 0.1, "below 0.136. Each query attends to hardly more"),
    ],
)
def test_a_head_far_outside_is_named_with_advice(
    usual: dict[str, Any], name: str, value: float, says: str
) -> None:
    (head,) = (h for h in usual["heads"] if (h["layer"], h["head"]) == (2, 1))
    if name == "entropy share":
        head["entropy"]["mean"] = value * math.lgamma(129) / 128
    elif name == "sigma of a head":
        head["sigma"]["qkv"]["lower"] = value
    elif name == "largest logit":
        head["max_logit"]["most"] = value
    else:
        head["first"] = value
    body = meaning(usual).body
    assert says in body
    assert body.count('class="note"') == 1


def test_many_heads_are_counted_and_not_all_named(usual: dict[str, Any]) -> None:
    for head in usual["heads"]:
        head["max_logit"]["most"] = 90.0
    assert f"and {len(usual['heads']) - 6} more, above 30." in meaning(usual).body


def test_settings_of_training_are_named_for_a_run_and_not_for_a_foreign_checkpoint(
    usual: dict[str, Any],
) -> None:
    for head in usual["heads"]:
        head["max_logit"]["most"] = 90.0
    for family, named in (("llama", False), ("fenchel, softmax", True)):
        usual["subject"]["family"] = family
        body = meaning(usual).body
        assert "saturate the choice map" in body
        assert ("model.qk_norm" in body) is named
    usual["network"]["exponent"] = -0.5
    assert "model.residual_scale" not in meaning(usual).body  # advice against growth, not decay


def test_growth_and_decay_with_depth_have_different_sentences(usual: dict[str, Any]) -> None:
    usual["network"]["exponent"] = 3.0
    assert "grow by a constant factor per layer" in meaning(usual).body
    usual["network"]["exponent"] = -0.5
    assert "die out with depth" in meaning(usual).body


def test_a_few_tokens_give_no_sentence_about_sinks(usual: dict[str, Any]) -> None:
    usual["tokens"] = ["x"] * 12
    for head in usual["heads"]:
        head["first"] = 0.4
    assert "attention sink" not in meaning(usual).body


def test_measures_that_are_missing_or_not_finite_have_no_row(usual: dict[str, Any]) -> None:
    usual["layers"], usual["network"] = [], None
    for head in usual["heads"]:
        head["max_logit"]["most"] = None
    body = meaning(usual).body
    assert "Lyapunov" not in body
    assert ">largest logit<" not in body
    assert ">sigma of a head<" in body


def test_even_attention_has_the_entropy_share_1(usual: dict[str, Any]) -> None:
    even = {True: sum(math.log(i) for i in range(1, 129)) / 128, False: math.log(128)}
    for causal, entropy in even.items():
        usual["subject"]["causal"] = causal
        for head in usual["heads"]:
            head["entropy"]["mean"] = entropy
        assert all(
            v == pytest.approx(1.0) for _, v in scale("entropy share").of(typed(Inspection, usual))
        )
