"""How much of the attacked radius a decision certificate reaches, and what it costs.

    --part table DIR ...    certified and attacked radii of checkpoints at 16 positions of two texts
    --part growth DIR       seconds and memory by length and by depth, from the blocks of a run

Seconds are processor time of one thread; results are in results/decisions_PART_cpu.json.
"""

import json
import math
import resource
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.harness import record
from fenchel.inspection import open_model
from fenchel.inspection.decisions import length, network_of
from fenchel.inspection.trace import tokenize_text
from fenchel.sensitivity.decision import (
    NORMS,
    DecisionBound,
    DecisionNetwork,
    certified_radii,
)
from fenchel.sensitivity.decision_attack import nearest_change

TEXTS = ("sotu", "kjv")
TOKENS = 32
POSITIONS = (7, 9, 10, 12, 13, 15, 17, 18, 20, 21, 23, 25, 26, 28, 29, 31)
LENGTHS = (8, 16, 24, 32, 48)
DEPTHS = (1, 2, 3, 4)
SMALL = 1e-4  # a radius at which nothing diverges
LESSONS = "fenchel/lessons/model"  # a default run


def written_out(directory: str, text: str, tokens: int) -> tuple[DecisionNetwork, torch.Tensor]:
    """A checkpoint in float64 on the first tokens of a text."""
    model = open_model(directory)
    return network_of(model.model, torch.tensor(tokenize_text(model, text, tokens).ids))


def table(directories: Sequence[str], texts: Sequence[str], norms: Sequence[str]) -> None:
    """A row per checkpoint, text, norm and position."""
    rows: list[dict[str, Any]] = []
    for directory in directories:
        for text in texts:
            network, X = written_out(directory, text, TOKENS)
            started = time.process_time()
            bound = DecisionBound(network, X)
            setup = time.process_time() - started
            for norm in norms:
                radii, searched = {}, 0.0
                for t in POSITIONS:
                    started = time.process_time()
                    if t not in radii:
                        together = [t] if norm == "one" else POSITIONS
                        radii |= certified_radii(bound, norm, together)
                        searched = time.process_time() - started
                        started = time.process_time()
                    kept = bound.rivals[t].kept
                    change = nearest_change(network.prefix(t + 1), X[: t + 1], kept, norm)
                    attacked = math.inf if change is None else length(change, norm)
                    row = {
                        "model": directory,
                        "text": text,
                        "norm": norm,
                        "tokens": t + 1,
                        "margin": round(float(bound.rivals[t].margins.amin()), 4),
                        "certified": round(radii[t].certified, 6),
                        "attacked": round(attacked, 6),
                        "ratio": round(radii[t].certified / attacked, 4),
                        "setup_s": round(setup, 1),
                        "search_s": round(searched, 1),
                        "attack_s": round(time.process_time() - started, 2),
                    }
                    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                    rows.append(row)
                record("decisions_table_cpu", rows)


def growth(directory: str) -> None:
    """Each size in a process of its own, which reports its largest memory."""
    rows = []
    sizes = [(n, 3) for n in LENGTHS] + [(LENGTHS[1], blocks) for blocks in DEPTHS if blocks != 3]
    for n, blocks in sizes:
        command = [sys.executable, "-m", "benchmarks.decisions", "--part", "size", directory]
        out = subprocess.run(
            [*command, "--tokens", str(n), "--blocks", str(blocks)],
            capture_output=True,
            text=True,
            check=True,
        )
        rows.append(json.loads(out.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
        record("decisions_growth_cpu", rows)


def size(directory: str, tokens: int, blocks: int) -> None:
    """Seconds and memory of one size; further blocks are those of the run once more."""
    network, X = written_out(directory, TEXTS[0], tokens)
    stages = (network.stages * 2)[: 2 * blocks]
    network = DecisionNetwork(stages, network.norm, network.head)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    bound = DecisionBound(network, X)
    setup = time.process_time() - started
    started = time.process_time()
    ball = bound.ball("all")
    gradients = bound.gradients_at(tokens - 1, "all", None)
    pulled = time.process_time() - started
    started = time.process_time()
    found = bound.remainders(ball, SMALL)
    bound.margin(tokens - 1, gradients, found, SMALL)
    radius = time.process_time() - started
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row = {"tokens": tokens, "blocks": blocks, "setup_s": round(setup, 2)}
    row |= {"gradients_s": round(pulled, 2), "radius_s": round(radius, 2)}
    print(json.dumps(row | {"gb": round((most - before) / 2**20, 2)}))


def main(options: Sequence[str] | None = None) -> None:
    """Run one part."""
    parser = ArgumentParser(prog="python -m benchmarks decisions")
    parser.add_argument("--part", choices=("table", "growth", "size"), default="table")
    parser.add_argument("directories", nargs="*", default=[LESSONS])
    parser.add_argument("--texts", nargs="+", default=TEXTS)
    parser.add_argument("--norms", nargs="+", default=NORMS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--blocks", type=int, default=3)
    chosen = parser.parse_args(options)
    torch.set_num_threads(1)
    if chosen.part == "table":
        table(chosen.directories, chosen.texts, chosen.norms)
    elif chosen.part == "growth":
        growth(chosen.directories[0])
    elif chosen.part == "size":
        size(chosen.directories[0], chosen.tokens, chosen.blocks)


if __name__ == "__main__":
    main()
