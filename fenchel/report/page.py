"""The report of a run: run directory -> RunData -> sections -> document -> report.html.

The page is a function of the files alone: the same run gives the same bytes, whenever and wherever
the page is written.
"""

from pathlib import Path

from fenchel.files import write_atomic
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

SECTIONS = (
    headline,
    sample,
    next_commands,
    curves,
    layers,
    heads,
    attention_map,
    settings,
    environment,
)
"""The sections in the order of the page."""


def page(run: Path) -> Path:
    """Writes ``report.html`` into the run directory and returns its path."""
    target = run / "report.html"
    write_atomic(target, render(read_run(run)))
    return target


def render(run: RunData) -> str:
    """The whole page as text."""
    return document(
        title=f"{shorten(run.name, 200)} · fenchel",
        header=header(run),
        sections=[section(run) for section in SECTIONS],
    )
