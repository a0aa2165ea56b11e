"""Rules that move queries and keys, tuned alike: losses, rates, fine-tuning, copying.

    fenchel bench optim                      a small model on a CPU, two threads, about 15 minutes
    fenchel bench optim --full --workers 8   the same trained longer, more rates, five seeds
    fenchel bench optim --device cuda        25M parameters on a GPU; give it --workers 3 to keep
                                             the GPU busy and --minutes 9 to stop and go on later
    fenchel bench optim --quick              two steps a run, to see that everything works
    fenchel bench optim --study switches     one study alone, and the tuning that it needs

models   fenchel/model, rotary; sizes and texts in optimisers/sizes.py
rules    AdamW, Muon, QK-norm, QK-clip, Compositional Muon, ScoreTrust, ScoreDescent, and the
         switches of the trainer: optimisers/rules.py
grid     rates of ratio 1.5 around a first guess, then decays and what else a rule tunes:
         optimisers/studies.py, sizes.py
runs     kept line by line in results/optim_SIZE.jsonl (optimisers/ledger.py); on a CPU they repeat
         bit for bit by seed
table    printed, with results/optim_SIZE.json and results/optim_SIZE.svg
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.optimisers.ledger import Ledger, Missing, OutOfTime, complete
from benchmarks.optimisers.picture import draw
from benchmarks.optimisers.studies import STUDIES

THREADS = 2


def main(options: Sequence[str] = ()) -> None:
    """Run the studies that are asked for, print their tables, write results and figure."""
    asked = _parser().parse_args(options)
    size = "quick" if asked.quick else "full" if asked.full else asked.device
    torch.set_num_threads(1 if asked.quick else THREADS)
    ledger = Ledger(asked.out / f"optim_{size}.jsonl", minutes=asked.minutes)
    rows = {
        study: [partial(STUDIES[study].row, ledger, size, rule) for rule in STUDIES[study].rules]
        for study in asked.study or STUDIES
    }
    try:
        complete(ledger, [row for some in rows.values() for row in some], workers=asked.workers)
    except OutOfTime:
        print(f"The {asked.minutes:g} minutes are over; call it again to go on.")
    tables = {study: _those_known(some) for study, some in rows.items()}
    for study, table in tables.items():
        print(f"\n{study}")
        print(as_table(table))
    lines = [{"study": study, **plain(row)} for study, table in tables.items() for row in table]
    print(f"\n{harness.record(f'optim_{size}', lines, folder=asked.out)}")
    if tables.get("switches") or tables.get("finetune"):
        print(draw(tables, asked.out / f"optim_{size}.svg"))


def _those_known(rows: Sequence[partial[dict[str, Any]]]) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        try:
            found.append(row())
        except Missing:
            continue
    return found


def as_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Columns aligned, a row a line."""
    if not rows:
        return "(nothing yet)"
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def plain(value: Any) -> Any:
    """JSON has no inf: it is written as a word."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(_cell(item) for item in value)
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fenchel bench optim", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="two steps a run")
    parser.add_argument("--full", action="store_true", help="five seeds, more rates, longer runs")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--study", choices=tuple(STUDIES), action="append", help="may be repeated")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder of the results")
    return parser


if __name__ == "__main__":
    main()
