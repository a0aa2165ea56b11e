"""The attention of each token of an answer, drawn as lines of text for a terminal.

A line per token: its probability and rank, the effective number of keys (mean over the layers),
and the earlier tokens with the largest weights, mean over the heads of the last third of the
layers. Below them the whole text, each token shaded by the weight it got from the answer in all:
the share of the largest on a square-root scale, as background colour or, without colours, as a bar
behind the token.
"""

import sys
from collections.abc import Sequence
from statistics import fmean
from typing import TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console

from fenchel.cli.console import width_of
from fenchel.data import TextTokenizer
from fenchel.files import printable
from fenchel.generation.attention_trace import (
    PositionsRead,
    TokenTrace,
    TraceAttention,
    TraceSettings,
)

TRACED = TraceSettings(entropy=True, attention=TraceAttention())
"""What the lines are made of."""
RAMP = ((207, 229, 222), (125, 191, 196), (44, 132, 173), (26, 76, 140), (15, 31, 75))
"""The colours of the reports, without their lightest."""
BARS = "▁▂▃▄▅▆▇█"
_TOKEN = 14
"""Columns of a token at the beginning of a line."""
_LEAST = 0.01
"""Weights below this are part of the rest."""


def attention_lines(
    tokens: Sequence[str],
    traces: Sequence[TokenTrace],
    *,
    width: int = 80,
    colour: bool = False,
) -> list[str]:
    """The lines for ``traces``, which belong to the last of ``tokens``, the whole text.

    The traces need ``attention`` of all layers.
    """
    if not traces or len(traces) > len(tokens):
        raise ValueError(f"{len(traces)} traces do not fit {len(tokens)} tokens.")
    first = len(tokens) - len(traces)
    shown = [_visible(token) for token in tokens]
    lines = [f"{'token':<{_TOKEN}} {'p':>6} {'rank':>5} {'keys':>6}  read"]
    totals = [0.0] * len(tokens)
    for token, trace in zip(shown[first:], traces, strict=True):
        read = trace.last_third
        if read is None:
            raise ValueError("these traces have no positions; trace the attention of all layers.")
        for position, weight in read.top:
            totals[position] += weight
        keys = [layer.keys for layer in trace.layers if layer.keys is not None]
        mean = f"{fmean(keys):6.1f}" if keys else " " * 6
        start = f"{set_cell_size(token, _TOKEN)} {trace.p:6.3f} {trace.rank:5} {mean}  "
        lines.append(start + _fit(_positions(read, shown), width - cell_len(start)))
    return [*lines, "", *_shaded(shown, totals, width, colour=colour)]


def print_attention(
    tokenizer: TextTokenizer,
    ids: Sequence[int],
    traces: Sequence[TokenTrace],
    *,
    file: TextIO | None = None,
) -> None:
    """Print the lines for a terminal or a pipe; ``ids`` is the whole text."""
    terminal = Console()
    lines = attention_lines(
        [tokenizer.decode([token], skip_special_tokens=False) for token in ids],
        traces,
        width=width_of(sys.stdout) or 80,
        colour=terminal.color_system == "truecolor" and not terminal.no_color,
    )
    print("\n".join(lines), file=file, flush=True)


def _positions(read: PositionsRead, shown: Sequence[str]) -> list[str]:
    """The tokens read, each with its weight, then what is left."""
    named = [(position, weight) for position, weight in read.top if weight >= _LEAST]
    rest = read.rest + sum(weight for _, weight in read.top) - sum(weight for _, weight in named)
    parts = [f"{shown[position]} {weight:.2f}" for position, weight in named]
    if read.sink is not None and read.sink >= _LEAST:
        parts.append(f"(sink {read.sink:.2f})")
    return [*parts, f"(rest {rest:.2f})"] if rest >= _LEAST else parts


def _fit(parts: Sequence[str], columns: int) -> str:
    """As many of ``parts`` as fit, at least one."""
    line = parts[0] if parts else ""
    for part in parts[1:]:
        if cell_len(line) + 2 + cell_len(part) > columns:
            break
        line += f"  {part}"
    return line


def _shaded(
    shown: Sequence[str], totals: Sequence[float], width: int, *, colour: bool
) -> list[str]:
    """The text, each token with its share of the largest total."""
    largest = max(totals) or 1.0
    parts = [
        _shade(token, (total / largest) ** 0.5, colour=colour)
        for token, total in zip(shown, totals, strict=True)
    ]
    line, lines = 0, [""]
    for token, part in zip(shown, parts, strict=True):
        size = cell_len(token) + (0 if colour else 1)
        if line and line + size > width:
            lines.append("")
            line = 0
        lines[-1] += part
        line += size
    return lines


def _shade(token: str, share: float, *, colour: bool) -> str:
    level = min(int(share * len(BARS)), len(BARS) - 1)
    if not colour:
        return token + (BARS[level] if share > 0.0 else " ")
    if share == 0.0:
        return token
    r, g, b = RAMP[level * len(RAMP) // len(BARS)]
    text = "30" if 3 * r + 6 * g + b > 1250 else "97"
    return f"\x1b[{text};48;2;{r};{g};{b}m{token}\x1b[0m"


def _visible(token: str) -> str:
    """A token on one line: spaces as dots, line ends as arrows, no control characters."""
    return printable(token, None).replace(" ", "·").replace("\n", "↵").replace("\t", "⇥") or "∅"
