"""The report of a run: run directory -> RunData -> sections -> document -> report.html.

The page is a function of the files alone: the same run gives the same bytes, whenever and wherever
the page is written.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fenchel.files import seal_text, write_atomic
from fenchel.report.attention_map import attention_map
from fenchel.report.attention_over_time import heads, layers
from fenchel.report.curves import curves
from fenchel.report.html import document, shorten
from fenchel.report.run_data import RunData, read_run
from fenchel.report.summary import (
    environment,
    header,
    headline,
    next_commands,
    sample,
    settings,
)
from fenchel.report.tuning import before_and_after

SECTIONS = (
    headline,
    before_and_after,
    sample,
    next_commands,
    curves,
    layers,
    heads,
    attention_map,
    settings,
    environment,
)
"""The sections in the order of the page; one that has nothing to show is None."""


def page(run: Path, summary: Mapping[str, Any] | None = None) -> Path:
    """Writes ``report.html``, sealed, into the run directory and returns its path.

    ``summary`` stands for the summary.json of a run that has yet to write it.
    """
    target = run / "report.html"
    data = read_run(run, strict=summary is not None)
    if summary is not None:
        troubles = {k: v for k, v in data.troubles.items() if k != "summary.json"}
        data = replace(data, summary=summary, troubles=troubles)
    doctype = "<!doctype html>"
    text = render(data).removeprefix(f"{doctype}\n")
    write_atomic(target, seal_text(text, f"{doctype}<!-- {{}} -->"))
    return target


def render(run: RunData) -> str:
    """The whole page as text."""
    return document(
        title=f"{shorten(run.name, 200)} · fenchel",
        header=header(run),
        sections=[made for section in SECTIONS if (made := section(run)) is not None],
    )
