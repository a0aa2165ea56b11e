"""fenchel list: built-in texts, presets, families, checkpoints of the cache, runs with results."""

import json as json_format
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fenchel.cli.console import Console, Json, short_count
from fenchel.cli.reference import read
from fenchel.config import did_you_mean
from fenchel.files import printable

if TYPE_CHECKING:
    from fenchel.report.run_list import RunRow

RUNS = Path("runs")
"""Where fenchel train puts runs."""
_NOTES = 5  # sentences about runs below a table
SECTIONS = ("texts", "presets", "families", "checkpoints", "runs")
Rows = list[dict[str, Any]]
Shown = tuple[Table | None, list[str]]
"""A table, and sentences below it."""
Listed = tuple[dict[str, Rows], list[Shown]]
"""Plain values for JSON by section, and the lines for a terminal."""


def run(
    what: str | None = None,
    directory: Path | None = None,
    /,
    *,
    sort: str | None = None,
    json: Json = False,
) -> int:
    """List built-in texts, presets, families of checkpoints, those of the cache, and runs.

    Parameters
    ----------
    what
        texts, presets, families, checkpoints (those of the Hugging Face cache) or runs; by default
        all of them.
    directory
        With runs: where to look for runs and checkpoints, five folders deep; ./runs by default.
    sort
        With runs: time (the default, newest first), name, state, optimiser, parameters, steps,
        bits_per_byte (lowest first), loss or tokens_per_second.
    """
    if what is not None and what not in SECTIONS:
        hint = did_you_mean(what, SECTIONS)
        more = f" The runs below a folder: fenchel list runs {what}" if Path(what).is_dir() else ""
        raise ValueError(f"there is no list {what!r}; {hint}{more}")
    if what != "runs" and (directory is not None or sort is not None):
        given = "--sort" if directory is None else "a directory"
        raise ValueError(f"{given} belongs to runs: fenchel list runs {directory or RUNS}.")
    if sort is not None:
        from fenchel.report.run_list import ORDERS

        if sort not in ORDERS:
            raise ValueError(f"runs are not sorted by {sort!r}; {did_you_mean(sort, ORDERS)}")
    values: dict[str, Any] = {}
    shown: list[Shown] = []
    with Console(quiet=json, aside=True) as stages:
        for section in SECTIONS if what is None else (what,):
            if section == "runs":
                found, parts = runs(directory or RUNS, sort or "time", stages)
            else:
                found, parts = LISTS[section]()
            values |= found
            shown += parts
    if json:
        print(json_format.dumps(values, indent=1))
        return 0
    console = Console()
    for table, notes in shown:
        if table is not None:
            console.terminal.print(table, markup=False, highlight=False)
        for note in notes:
            console.message(note)
    return 0


def texts() -> Listed:
    """The texts that come with the package."""
    from importlib.metadata import PackageNotFoundError, version

    from fenchel.data.text import BUILT_IN

    rows: Rows = []
    for name, text in BUILT_IN.items():
        row: dict[str, Any] = {"name": name, "about": text.about, "package": text.package}
        try:
            size = text.open().tally()
            row |= {"bytes": size.bytes, "documents": size.documents, "missing": None}
            row["package"] = f"{text.package} {version(text.package)}"
        except (ValueError, OSError, PackageNotFoundError) as error:
            row |= {"bytes": None, "documents": None, "missing": str(error)}
        rows.append(row)
    table = _table("text", ">bytes", ">documents", "what", "package")
    for row in rows:
        sizes = [_whole(row["bytes"]), _whole(row["documents"])]
        table.add_row(row["name"], *sizes, row["about"], row["package"])
    missing = [row["missing"] for row in rows if row["missing"]]
    return {"texts": rows}, [
        (table, [*missing, "fenchel train --text NAME, or a file or folder of yours."])
    ]


def presets() -> Listed:
    """The presets, with the least memory of a step on one GPU."""
    rows = read()["presets"]
    table = _table("preset", ">params", ">blocks", ">heads", ">context", ">vocab.", ">GB", "like")
    for row in rows:
        heads, groups = row["heads"], row["kv_heads"]
        table.add_row(
            row["name"],
            short_count(row["parameters"]),
            f"{row['layers']} x {row['width']}",
            str(heads) if groups == heads else f"{heads}/{groups}",
            str(row["context"]),
            f"{row['vocabulary']}{'*' * row['follows_text']}",
            f"{row['train_bytes'] / 1e9:.1f}",
            row["about"],
        )
    notes = [
        "GB: least memory of training on one GPU in bfloat16, a sequence at a time (fenchel plan).",
        "*: the vocabulary follows the text; this is that of sotu.",
        "fenchel train --preset NAME; any --set overrides it.",
    ]
    return {"presets": rows}, [(table, notes)]


def families() -> Listed:
    """The families of Hugging Face checkpoints, each with its presets."""
    rows = read()["families"]
    table = _table("model_type", "text model of", "class of transformers", "presets of this family")
    for row in rows:
        inside, presets = ", ".join(row["inside"]), ", ".join(row["presets"])
        table.add_row(row["model_type"], inside, row["architecture"], presets)
    about = "All are read, and written by fenchel convert DIR OUT."
    return {"families": rows}, [(table, [about])]


def checkpoints() -> Listed:
    """The models of the Hugging Face cache, and which commands serve each."""
    from fenchel.hub_cache import cache_folder, missing_file, snapshots

    rows: Rows = []
    for one in snapshots():
        row: dict[str, Any] = {"family": None, "parameters": None, "dtype": None}
        if missing := missing_file(one.path):
            row["note"] = f"{missing} is missing: the download did not finish."
        else:
            row = _checkpoint(one.path, one.path)
        note = str(row["note"])
        served = "every command"
        if note:
            through = re.search("; fenchel (.+) reads? it through transformers", note)
            served = through[1].replace(" and ", ", ") if through else "none"
        elif not (one.path / "tokenizer.json").exists():
            served, row["note"] = "convert", "tokenizer.json is missing, and no text is read."
        row |= {"path": str(one.path), "name": one.name, "revision": one.revision}
        rows.append(row | {"served_by": served})
    if not rows:
        return {"cache": []}, [(None, [f"The Hugging Face cache {cache_folder()} has no model."])]
    table = _table("model", "revision", "family", ">params", "dtype", "served by")
    for row in rows:
        table.add_row(
            printable(row["name"], 200),
            printable(str(row["revision"])[:12]),
            printable(row["family"] or ""),
            short_count(row["parameters"]),
            row["dtype"] or "",
            row["served_by"],
        )
    notes = [f"{printable(row['name'])}: {row['note']}" for row in rows if row["note"]]
    more = [f"{len(notes) - _NOTES} more are not read; --json says why."]
    notes = notes[:_NOTES] + (more if len(notes) > _NOTES else [])
    return {"cache": rows}, [(table, [*notes, "fenchel inspect NAME, or NAME@REVISION."])]


def runs(root: Path, sort: str, stages: Console) -> Listed:
    """The runs below a directory with their results, and the checkpoints."""
    from fenchel.report.run_list import find, in_order, run_row

    if root == RUNS and not root.exists():
        return {"runs": [], "checkpoints": []}, [(None, [f"There is no folder {RUNS} here yet."])]
    found = find(root)
    rows = []
    for n, path in enumerate(found.runs):
        stages.progress("reading runs", n, len(found.runs))
        rows.append(run_row(path, root))
    rows = in_order(rows, sort)
    shown: list[Shown] = [(_run_table(rows), _run_notes(rows))]
    if not rows:
        shown = [(None, [f"There is no run below {root}."])]
    checkpoints = [_checkpoint(path, root) for path in found.checkpoints]
    if checkpoints:
        notes = [row["note"] for row in checkpoints if row["note"]]
        shown.append((_checkpoint_table(checkpoints), notes[:_NOTES]))
    if not found.complete:
        shown.append((None, [f"{root} has too many folders; some were not searched."]))
    return {"runs": [row.plain() for row in rows], "checkpoints": checkpoints}, shown


def _run_table(rows: "Iterable[RunRow]") -> Table:
    table = _table(
        "run", "begun", "state", ">params", ">steps", "optim", ">bits/\nbyte", ">tokens\n/s"
    )
    for row in rows:
        steps = _whole(row.step)
        if row.state != "finished" and row.steps is not None:
            steps = f"{steps or 0}/{_whole(row.steps)}"
        table.add_row(
            printable(row.path, 200),
            printable((row.time or "")[5:16]),  # without year and seconds
            row.state,
            short_count(row.parameters),
            steps,
            printable(row.optimiser or ""),
            "" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}",
            short_count(row.tokens_per_second),
        )
    return table


def _run_notes(rows: "Sequence[RunRow]") -> list[str]:
    noted = [row for row in rows if row.note and row.state in ("damaged", "diverged", "stopped")]
    notes = [f"{row.path}: {row.note}" for row in noted[:_NOTES]]
    if len(noted) > _NOTES:
        notes.append(f"{len(noted) - _NOTES} more are not as they should be; --json names all.")
    if any(row.state == "damaged" for row in rows):
        notes.append("fenchel doctor RUN checks every byte of a run.")
    texts = {row.text for row in rows if row.bits_per_byte is not None}
    if len(texts) > 1:
        names = ", ".join(sorted(map(str, texts))[:4])
        notes.append(f"Bits per byte of different texts ({names}) are not comparable.")
    return [*notes, "fenchel compare RUN RUN shows where runs differ."] if len(rows) > 1 else notes


def _checkpoint(path: Path, root: Path) -> dict[str, Any]:
    """A Hugging Face directory, or that of an adapter: settings and headers, no weight is read."""
    from math import prod

    from fenchel.checkpoints.directory import open_directory
    from fenchel.checkpoints.peft_adapter import ADAPTER_CONFIG, open_adapter
    from fenchel.model.families.registry import family_of

    name = str(path.relative_to(root)) if path != root else str(path)
    row: dict[str, Any] = {"path": name, "family": None, "parameters": None, "dtype": None}
    try:
        adapter = (path / ADAPTER_CONFIG).exists()
        checked = open_adapter(path) if adapter else open_directory(path)
        row["family"] = "adapter" if adapter else checked.model_type
        row["parameters"] = sum(prod(one.entry.shape) for one in checked.tensors.values())
        row["dtype"] = str(checked.dtype).removeprefix("torch.")
        if not adapter:
            family_of(checked.model_type, checked.tensors, path, checked.config)
    except (ValueError, OSError) as error:
        return row | {"note": str(error)}
    return row | {"note": ""}


def _checkpoint_table(rows: Rows) -> Table:
    table = _table("checkpoint", "family", ">params", "dtype", "state")
    for row in rows:
        names = printable(row["path"], 200), printable(row["family"] or "")
        state = "not read" if row["note"] else "readable"
        table.add_row(*names, short_count(row["parameters"]), row["dtype"] or "", state)
    return table


def _table(*headings: str) -> Table:
    """Columns that are aligned to the right where their heading begins with >."""
    table = Table(box=SIMPLE_HEAD, padding=0)
    for heading in headings:
        right = heading.startswith(">")
        table.add_column(
            heading.lstrip(">"),
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=right or heading in ("begun", "state"),
        )
    return table


def _whole(value: float | None) -> str:
    """
    >>> _whole(7044902), _whole(None)
    ('7,044,902', '')
    """
    return "" if value is None else f"{int(value):,}"


LISTS = {"texts": texts, "presets": presets, "families": families, "checkpoints": checkpoints}
