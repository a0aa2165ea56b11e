"""fenchel/report/run_page.py: the section of a run that tunes a checkpoint."""

from typing import Any

from fenchel.report.run_data import RunData
from fenchel.report.run_page import before_and_after

MEASURES: dict[str, Any] = {
    "loss": 3.0,
    "perplexity": 20.1,
    "bits_per_byte": 2.5,
    "accuracy": 0.25,
    "confidence": 0.5,
    "ece": 0.125,
    "brier": 0.75,
    "attention": {"entropy": [2.0, 1.0], "effective": [7.0, 3.0], "max_logit": [4.0, 9.0]},
    "sensitivity": [[1.0, 1.1], [2.0, 2.2]],
}


def run_of(**summary: Any) -> RunData:
    return RunData(
        name="run",
        config={},
        config_text="",
        environment={},
        rows=(),
        summary=summary,
        sample={},
        troubles={},
    )


def test_a_run_that_tunes_nothing_has_no_such_section() -> None:
    assert before_and_after(run_of()) is None
    assert before_and_after(run_of(tuning={"before": MEASURES})) is None


def test_every_measure_stands_beside_what_it_was() -> None:
    after = {**MEASURES, "loss": 2.5, "sensitivity": [[1.0, 1.1], [3.0, 3.2]]}
    section = before_and_after(run_of(tuning={"before": MEASURES, "after": after}))
    assert section is not None
    for cell in ("2.500", "-0.5000", "2 to 2.20", "3 to 3.20", "+1", "1.500"):
        assert f">{cell}</td>" in section.body, cell
    assert "Held-out text" in section.body


def test_a_file_from_elsewhere_cannot_break_the_page() -> None:
    wrong = {**MEASURES, "loss": "<b>", "attention": [1], "sensitivity": [[1.0], "x", None]}
    section = before_and_after(run_of(tuning={"before": wrong, "after": wrong}))
    assert section is not None
    assert "<b>" not in section.body
