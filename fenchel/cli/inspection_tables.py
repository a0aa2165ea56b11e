"""An inspection as tables for a terminal: layers, the heads that stand out, the network."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fenchel.inspection import BlockResult, Head, Inspection, Interval
from fenchel.report.html import format_bracket

_HEADS = 12
"""Heads shown; the page and --json have all of them."""

_LEGEND = (
    "means over heads and rows: entropy in nats, keys used, weight on the first token; the "
    "largest: logit, row sensitivity, sigma of a head; sigma of the block, its token "
    "norm from below, 1/s"
)


def tables(found: Inspection) -> Iterator[Table]:
    """What a person wants first: layer by layer, then the most sensitive heads, then the whole."""
    yield _layers(found)
    yield _heads(found)
    if found.network is not None:
        yield _network(found)


def interval(bracket: Interval | None) -> str:
    """A bracket as text; one number if both ends round to it.

    >>> interval(Interval(1.0, 1.25, 12)), interval(Interval(2.0, 2.0001, 9))
    ('1-1.25', '2')
    """
    return format_bracket(None if bracket is None else asdict(bracket), to="-")


def _layers(found: Inspection) -> Table:
    s, text = found.subject, f"{found.text}, {len(found.tokens)} tokens"
    table = Table(
        title=f"{s['name']} ({s['family']}, {s['parameters']:,} parameters) on {text}",
        title_justify="left",
        caption=_LEGEND,
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    blocks = {layer.layer: layer for layer in found.layers}
    names = ["layer", "entropy", "keys", "logit", "first", "row", "head"]
    names += ["block", "token", "1/s"] if blocks else []
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for number in sorted({head.layer for head in found.heads}):
        heads = [head for head in found.heads if head.layer == number]
        row = [
            str(number),
            f"{_mean(heads, lambda h: h.entropy.mean):.2f}",
            f"{_mean(heads, lambda h: h.effective.mean):.1f}",
            f"{max(h.max_logit.most for h in heads):.1f}",
            f"{_mean(heads, lambda h: h.first):.2f}",
            f"{max(h.sensitivity.most for h in heads):.3f}",
            interval(max((h.sigma["qkv"] for h in heads), key=lambda b: b.lower)),
        ]
        table.add_row(*row, *(_block(blocks[number]) if number in blocks else ()))
    return table


def _block(layer: BlockResult) -> tuple[str, str, str]:
    gains = [norm.most for norm in layer.norms]
    return (
        interval(layer.block),
        f"{layer.token.lower:.3g}",
        f"{max(gains):.3g}" if gains else "",
    )


def _heads(found: Inspection) -> Table:
    ranked = sorted(found.heads, key=lambda head: -head.sigma["qkv"].lower)
    some = ranked[:_HEADS]
    table = Table(
        title=f"the {len(some)} most sensitive of {len(ranked)} heads",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    for name in ("head", "entropy", "first", "column", "q", "k", "v", "all", "ruled by"):
        table.add_column(name, justify="right", no_wrap=True)
    for h in some:
        sigma = [f"{h.sigma[name].lower:.3g}" for name in "qkv"]
        table.add_row(
            f"{h.layer}.{h.head}",
            f"{h.entropy.mean:.2f}",
            f"{h.first:.2f}",
            f"{h.column:.1f}",
            *sigma,
            interval(h.sigma["qkv"]),
            h.dominant,
        )
    return table


def _network(found: Inspection) -> Table:
    network = found.network
    assert network is not None
    table = Table(
        title="the network",
        title_justify="left",
        show_header=False,
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    table.add_row("sigma, stream to stream", interval(network.stream))
    if network.logits is not None:
        table.add_row("sigma, stream to last logits", interval(network.logits))
    each = (
        "" if network.blocks_exponent is None else f"; blocks alone {network.blocks_exponent:.3f}"
    )
    grown = math.exp(network.exponent)
    table.add_row(
        "Lyapunov exponent a layer", f"{network.exponent:.3f} ({grown:.2f} times a layer){each}"
    )
    return table


def _mean(heads: list[Head], of: Callable[[Head], float]) -> float:
    return sum(of(head) for head in heads) / len(heads)
