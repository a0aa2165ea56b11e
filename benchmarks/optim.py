"""Rules that move queries and keys, tuned alike: losses, rates, fine-tuning, copying.

    fenchel bench optim                      a small model on a CPU, two threads, about 15 minutes
    fenchel bench optim --device cuda        25M parameters, 60M bytes a run; give it --minutes 9
                                             and call it again until it is done
    fenchel bench optim --quick              two steps a run, to see that everything works
    fenchel bench optim --study switches     one study alone, and the tuning that it needs

models   fenchel/model, rotary; sizes and texts in optimisers/sizes.py
rules    AdamW, Muon, QK-norm, QK-clip, Compositional Muon, ScoreTrust, ScoreDescent, and the
         switches of the trainer: optimisers/rules.py
grid     rates of ratio 1.5 around a first guess, then decays 0, 0.1 and 0.3: optimisers/studies.py
runs     deterministic by seed, kept line by line in results/optim_SIZE.jsonl: optimisers/runs.py
table    printed, with results/optim_SIZE.json and results/optim_SIZE.svg
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.optimisers.picture import draw
from benchmarks.optimisers.runs import Ledger, OutOfTime
from benchmarks.optimisers.studies import STUDIES

THREADS = 2


def main(options: Sequence[str] = ()) -> None:
    """Run the studies that are asked for, print their tables, write results and figure."""
    asked = _parser().parse_args(options)
    size = "quick" if asked.quick else asked.device
    torch.set_num_threads(1 if asked.quick else THREADS)
    ledger = Ledger(asked.out / f"optim_{size}.jsonl", minutes=asked.minutes)
    tables: dict[str, list[dict[str, Any]]] = {}
    try:
        for name in asked.study or STUDIES:
            tables[name] = []
            for row in STUDIES[name](ledger, size):
                tables[name].append(row)
    except OutOfTime:
        print(f"The {asked.minutes:g} minutes are over; call it again to go on.")
    for name, rows in tables.items():
        print(f"\n{name}")
        print(as_table(rows))
    rows = [{"study": name, **plain(row)} for name, rows in tables.items() for row in rows]
    print(f"\n{harness.record(f'optim_{size}', rows, folder=asked.out)}")
    if tables.get("switches") or tables.get("finetune"):
        print(draw(tables, asked.out / f"optim_{size}.svg"))


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
    parser.add_argument("--study", choices=tuple(STUDIES), action="append", help="may be repeated")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder of the results")
    return parser


if __name__ == "__main__":
    main()
