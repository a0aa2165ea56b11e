"""fenchel settings: every setting of a run with its type, default and meaning."""

import json as json_format
from collections.abc import Iterable
from itertools import groupby
from textwrap import fill

from fenchel.cli.console import Console, Switch
from fenchel.cli.reference import read
from fenchel.config import Setting, did_you_mean


def run(prefix: str = "", /, *, markdown: Switch = False, json: Switch = False) -> int:
    """Print the meaning and the type of every setting of a run, and when it is read.

    Parameters
    ----------
    prefix
        Only settings whose name begins with this, such as optim or model.rotary.
    markdown
        Print the tables as Markdown.
    json
        Print one JSON object, settings by name.
    """
    rows = [Setting(**row) for row in read()["settings"]]
    chosen = [row for row in rows if row.name.startswith(prefix)]
    if not chosen:
        sections = dict.fromkeys(row.name.partition(".")[0] for row in rows)
        known = [row.name for row in rows] if "." in prefix else list(sections)
        raise ValueError(
            f"no setting begins with {prefix!r}; {did_you_mean(prefix, known, show=str)}"
        )
    if json:
        print(json_format.dumps({row.name: row._asdict() for row in chosen}, indent=1))
    else:
        print(tables(chosen) if markdown else plain(chosen, Console().terminal.width))
    return 0


def plain(rows: Iterable[Setting], width: int) -> str:
    """One paragraph per setting."""
    paragraphs = []
    for row in rows:
        default = f", {row.default} by default" if row.default else ""
        meaning = fill(_meaning(row), min(width, 100), initial_indent="  ", subsequent_indent="  ")
        paragraphs.append(f"{row.name} ({row.kind}{default})\n{meaning}")
    return "\n".join(paragraphs)


def _meaning(row: Setting) -> str:
    return f"{row.about} Needs {row.needs}." if row.needs else row.about


def tables(rows: Iterable[Setting]) -> str:
    """One table in Markdown per section."""
    lines = []
    for section, group in groupby(rows, lambda row: row.name.rpartition(".")[0]):
        lines += ["", f"## {section}", ""] if section else []
        lines += ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
        for row in group:
            default = f"`{row.default}`" if row.default else ""
            meaning = _meaning(row).replace("|", "\\|")
            lines.append(f"| `{row.name}` | {row.kind} | {default} | {meaning} |")
    return "\n".join(lines)
