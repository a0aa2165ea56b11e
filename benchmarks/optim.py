"""Rules that move queries and keys: losses, rates, fine-tuning, copying, lengths; and a contest.

    fenchel bench optim                      a small model on a CPU, two threads, about 15 minutes
    fenchel bench optim --full --workers 8   the same trained longer, more rates, five seeds
    fenchel bench optim --device cuda        25M parameters on a GPU; --workers 8 keeps it busy
                                             (under NVIDIA's MPS daemon), --minutes 9 stops it to
                                             continue later
    fenchel bench optim --quick              two steps per run, a check that everything works
    fenchel bench optim --study switches     one study alone, and the tuning that it needs
    fenchel bench optim --device cuda --study lengths --minutes 9
                                             400 to 8,000 steps; a run that the time cuts goes on
                                             from its last step when called again
    fenchel bench optim --size gpt2 --study lengths
                                             the same with the blocks of GPT-2 of 124M
    fenchel bench optim --size cuda --study pace
    fenchel bench optim --size cuda --study contest --workers 8 --minutes 9
                                             the rules of 2026, tuned one by one, at equal steps and
                                             at equal time (optimisers/contest.py); the texts are
                                             made by optimisers/linux_texts.py. Calls repeated until
                                             nothing is missing make the table
    fenchel bench optim --size cuda --again 17
                                             line 17 of the results, run once more beside its result

models   fenchel/model, rotary; sizes and texts in optimisers/sizes.py
rules    AdamW, Muon, NorMuon, SOAP, Hyperball, QK-norm, QK-clip, Muon per head, Compositional
         Muon, ScoreTrust, ScoreDescent, and the switches of the trainer: optimisers/rules.py
grid     rates of ratio 1.5 around an initial one, then decays and other settings:
         optimisers/studies.py, sizes.py
runs     lines of results/optim_SIZE.jsonl (optimisers/run_cache.py), with the commit and the
         device; on a CPU they repeat bit for bit by seed
table    printed, with results/optim_SIZE.json and results/optim_SIZE.svg
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.optimisers.figure import draw_figure
from benchmarks.optimisers.run_cache import (
    Job,
    MissingResult,
    OutOfTime,
    RunCache,
    run_missing,
)
from benchmarks.optimisers.sizes import SIZES
from benchmarks.optimisers.studies import STUDIES, run_of
from fenchel.train.hardware import commit, device_name


def main(options: Sequence[str] = ()) -> None:
    """Run the selected studies, print their tables, write the results and the figure."""
    arguments = _parser().parse_args(options)
    size = "quick" if arguments.quick else "full" if arguments.full else arguments.size
    size = size or arguments.device
    torch.set_num_threads(SIZES[size].threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    about = {"commit": arguments.commit or commit(), "device": _device(size)}
    cache = RunCache(arguments.out / f"optim_{size}.jsonl", minutes=arguments.minutes, about=about)
    if arguments.again is not None:
        run_again(cache, arguments.again)
        return
    rows = {
        study: [
            partial(STUDIES[study].row, cache, size, case)
            for case in STUDIES[study].cases(size)
            if _selected(case, arguments)
        ]
        for study in arguments.study or STUDIES
    }
    try:
        run_missing(
            cache, [row for table in rows.values() for row in table], workers=arguments.workers
        )
    except OutOfTime:
        print(f"The {arguments.minutes:g} minutes are over; call it again to go on.")
    tables = {study: _complete_rows(table) for study, table in rows.items()}
    for study, table in tables.items():
        print(f"\n{study}")
        print(as_table(table))
    lines = [{"study": study, **plain(row)} for study, table in tables.items() for row in table]
    print(f"\n{harness.record(f'optim_{size}', lines, folder=arguments.out)}")
    if tables.get("switches") or tables.get("finetune"):
        print(draw_figure(tables, arguments.out / f"optim_{size}.svg"))


def run_again(cache: RunCache, number: int) -> None:
    """Run the job of a line of the results once more, and print both results."""
    lines = cache.path.read_text().splitlines() if cache.path.exists() else []
    if not 1 <= number <= len(lines):
        sys.exit(f"{cache.path} has lines 1 to {len(lines)}, got {number}.")
    line = json.loads(lines[number - 1])
    job = Job(**{**line["job"], "start": line["job"].get("start") and tuple(line["job"]["start"])})
    print(f"job     {line['job']}\nbefore  {line['result']}")
    print(f"again   {run_of(job, cache)(job)}")


def _device(size: str) -> str:
    return device_name(torch.device(SIZES[size].device))


def _selected(case: Any, arguments: argparse.Namespace) -> bool:
    """Whether a case, a rule or a rule at a length, is among those that were named."""
    rules, steps, texts = arguments.rule, arguments.steps, arguments.text
    by = arguments.by
    return (
        (not rules or getattr(case, "rule", case) in rules)
        and (not steps or getattr(case, "steps", None) in steps)
        and (not texts or getattr(case, "text", None) in texts)
        and (by is None or getattr(case, "by", by) == by)
    )


def _complete_rows(rows: Sequence[partial[dict[str, Any]]]) -> list[dict[str, Any]]:
    complete = []
    for row in rows:
        try:
            complete.append(row())
        except MissingResult:
            continue
    return complete


def as_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as lines of text with aligned columns."""
    if not rows:
        return "(nothing yet)"
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def plain(value: Any) -> Any:
    """A value for JSON, which has no inf: it becomes a string."""
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
    parser.add_argument("--quick", action="store_true", help="two steps per run")
    parser.add_argument("--full", action="store_true", help="five seeds, more rates, longer runs")
    parser.add_argument("--size", choices=tuple(SIZES), help="instead of --device and --full")
    parser.add_argument("--workers", type=int, default=1, help="runs in parallel")
    parser.add_argument("--study", choices=tuple(STUDIES), action="append", help="may be repeated")
    parser.add_argument("--rule", action="append", help="only the rows of this rule; repeatable")
    parser.add_argument(
        "--steps", type=int, action="append", help="only runs of this length, in lengths and rates"
    )
    parser.add_argument(
        "--text", action="append", help="only runs on this text, in lengths and rates"
    )
    parser.add_argument(
        "--by", choices=("steps", "time"), help="only rows at equal steps, or time, in the contest"
    )
    parser.add_argument(
        "--again", type=int, metavar="LINE", help="run a line of the results again, and stop"
    )
    parser.add_argument("--commit", help="what the lines state as the commit, where git is absent")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder of the results")
    return parser


if __name__ == "__main__":
    main()
