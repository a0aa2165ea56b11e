"""The figure of a study: loss and largest score over rates, as a file that any browser shows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

MARKS = "os^Dv<>P"


def draw(tables: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> Path:
    """Two panels a study over rates: what it costs to miss the rate, and what the scores do."""
    shown = [(name, tables[name]) for name in ("switches", "finetune") if tables.get(name)]
    if not shown:
        raise ValueError("a figure needs the study of switches or of fine-tuning; run one of them.")
    figure, axes = plt.subplots(len(shown), 2, figsize=(11, 4.2 * len(shown)), squeeze=False)
    for (name, rows), (left, right) in zip(shown, axes, strict=True):
        for row, mark in zip(rows, MARKS, strict=False):
            label = row.get("switch") or row["rule"]
            left.plot(row["rates"], row["losses"], marker=mark, label=label)
            right.plot(row["rates"], row["max_logits"], marker=mark, label=label)
        left.set(title=f"{name}: validation loss", ylabel="nats a byte")
        right.set(title=f"{name}: largest score of any head", yscale="log")
        for axis in (left, right):
            axis.set(xlabel="rate", xscale="log")
            axis.grid(alpha=0.3)
        left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return path
