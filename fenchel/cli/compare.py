"""fenchel compare: runs side by side, as a table and as one page with overlaid curves."""

import json as json_format
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fenchel.cli.console import Console, Json
from fenchel.files import printable, require_page, write_atomic


def run(
    *runs: Path,
    out: Path | None = None,
    json: Json = False,
) -> int:
    """Compare runs: results, the settings that differ, and curves in one page.

    Parameters
    ----------
    runs
        Two or more run directories; of an unfinished run, what exists.
    out
        Write a page with the curves of all runs to this file.
    """
    if out is not None:
        require_page(out, reads=runs)

    from fenchel.report.comparison import COLUMNS, compare_runs, render

    comparison = compare_runs(runs)
    if out is not None:
        write_atomic(out, render(comparison))
    if json:
        print(json_format.dumps(comparison.plain(), indent=1))
        return 0
    console = Console()
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("run", overflow="fold")
    for column in COLUMNS:
        table.add_column(column.title, justify="right", no_wrap=True)
    for n, (name, result) in enumerate(zip(comparison.names, comparison.results, strict=True), 1):
        table.add_row(f"{n} {printable(name, 200)}", *(column.cell(result) for column in COLUMNS))
    console.terminal.print(table, markup=False)
    if comparison.settings:
        differences = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
        for heading in ("setting", *(f"run {n}" for n in range(1, len(runs) + 1))):
            differences.add_column(heading, overflow="fold")
        for name, values in comparison.settings.items():
            differences.add_row(*(printable(word, 200) for word in (name, *values)))
        console.terminal.print(differences, markup=False)
    for sentence in comparison.notes:
        console.message(sentence)
    if out is not None:
        console.message(f"Page  {out}")
    return 0
