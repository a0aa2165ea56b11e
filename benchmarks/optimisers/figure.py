"""The figure of a study, an SVG file: loss and largest score over learning rates."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

MARKERS = "os^Dv<>P"


def draw_figure(tables: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> Path:
    """Two panels per study over learning rates: validation loss, and the largest score."""
    panels = [(name, tables[name]) for name in ("switches", "finetune") if tables.get(name)]
    if not panels:
        raise ValueError("a figure needs the study of switches or of fine-tuning; run one of them.")
    figure, axes = plt.subplots(len(panels), 2, figsize=(11, 4.2 * len(panels)), squeeze=False)
    for (name, rows), (left, right) in zip(panels, axes, strict=True):
        for row, marker in zip(rows, MARKERS, strict=False):
            label = row.get("switch") or row["rule"]
            left.plot(row["rates"], row["losses"], marker=marker, label=label)
            right.plot(row["rates"], row["max_logits"], marker=marker, label=label)
        left.set(title=f"{name}: validation loss", ylabel="nats per byte")
        right.set(title=f"{name}: largest score of any head", yscale="log")
        for axis in (left, right):
            axis.set(xlabel="rate", xscale="log")
            axis.grid(alpha=0.3)
        left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return path
