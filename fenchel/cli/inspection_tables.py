"""An inspection as tables for a terminal: layers, the heads that stand out, the network."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fenchel.inspection import (
    BlockResult,
    Certificates,
    Head,
    HeadCertificate,
    Inspection,
    Interval,
)
from fenchel.report.html import format_bracket

_HEADS = 12
"""Heads shown; the page and --json have all of them."""

_LEGEND = (
    "means over heads and rows: entropy in nats, keys used, weight on the first token; the "
    "largest: logit, row sensitivity, sigma of a head"
)
_BLOCK_LEGEND = "; sigma of the block, its token norm from below, 1/s"

_CERTIFIED = {
    "attention": "attention with W_O, in the input of attention",
    "block": "the block, in the stream before it",
}
_CERTIFICATE_LEGEND = (
    "spectral norm of the Jacobian of {}: at the text itself, attained in the ball (lower), "
    "exceeded nowhere in it (upper); token length: mean length of an input token; witness: tokens "
    "by their share of the way to it"
)


def tables(result: Inspection) -> Iterator[Table]:
    """The layers, the most sensitive heads, the network, and the certificates if there are any."""
    yield _layers(result)
    yield _heads(result)
    if result.network is not None:
        yield _network(result)
    if result.certificates is not None:
        yield from certificate_tables(result.certificates, result.tokens)


def interval(bracket: Interval | None) -> str:
    """A bracket as text; one number if both ends round to it.

    >>> interval(Interval(1.0, 1.25, 12)), interval(Interval(2.0, 2.0001, 9))
    ('1-1.25', '2')
    """
    return format_bracket(None if bracket is None else asdict(bracket), to="-")


def _layers(result: Inspection) -> Table:
    s, text = result.subject, f"{result.text}, {len(result.tokens)} tokens"
    table = Table(
        title=f"{s['name']} ({s['family']}, {s['parameters']:,} parameters)\non {text}",
        title_justify="left",
        caption=_LEGEND + (_BLOCK_LEGEND if result.layers else ""),
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    blocks = {layer.layer: layer for layer in result.layers}
    names = ["layer", "entropy", "keys", "logit", "first", "row", "head"]
    names += ["block", "token", "1/s"] if blocks else []
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for number in sorted({head.layer for head in result.heads}):
        heads = [head for head in result.heads if head.layer == number]
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


def _heads(result: Inspection) -> Table:
    ranked = sorted(result.heads, key=lambda head: -head.sigma["qkv"].lower)
    shown = ranked[:_HEADS]
    table = Table(
        title=f"the {len(shown)} most sensitive of {len(ranked)} heads",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    for name in ("head", "entropy", "first", "column", "q", "k", "v", "all", "ruled by"):
        table.add_column(name, justify="right", no_wrap=True)
    for h in shown:
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


def _network(result: Inspection) -> Table:
    network = result.network
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
        "Lyapunov exponent per layer", f"{network.exponent:.3f} ({grown:.2f} times per layer){each}"
    )
    return table


def certificate_tables(certificates: Certificates, tokens: Sequence[str]) -> Iterator[Table]:
    """The certificates layer by layer, and head by head where there are any."""
    norm = "each token" if certificates.norm == "token" else "all tokens together"
    table = Table(
        title=f"certificates over radius {certificates.radius:g}, {norm} ({certificates.dtype})",
        title_justify="left",
        caption=_CERTIFICATE_LEGEND.format(_CERTIFIED[certificates.level]),
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    for name in ("layer", "token length", "centre", "lower", "upper", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("witness moves", justify="left", overflow="fold")
    for layer in certificates.layers:
        if layer.refused is not None:
            table.add_row(str(layer.layer), *[""] * 5, layer.refused)
            continue
        table.add_row(
            str(layer.layer),
            _number(layer.token_norm),
            interval(layer.centre),
            _number(layer.lower),
            "none" if layer.upper is None else _number(layer.upper),
            _number(layer.ratio),
            _largest_shares(layer.moved, tokens),
        )
    yield table
    heads = [(layer.layer, head) for layer in certificates.layers for head in layer.heads]
    if heads:
        yield _head_certificates(heads)


def _head_certificates(heads: list[tuple[int, HeadCertificate]]) -> Table:
    ranked = sorted(heads, key=lambda pair: -(pair[1].upper or math.inf))[:_HEADS]
    table = Table(
        title=f"the {len(ranked)} heads with the largest upper ends, of {len(heads)}",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    for name in ("head", "centre", "upper"):
        table.add_column(name, justify="right", no_wrap=True)
    for layer, head in ranked:
        upper = "none" if head.upper is None else _number(head.upper)
        table.add_row(f"{layer}.{head.head}", interval(head.centre), upper)
    return table


def _largest_shares(shares: Sequence[float], tokens: Sequence[str], count: int = 3) -> str:
    """The tokens that move most on the way to a witness, with their shares."""
    order = sorted(range(len(shares)), key=lambda i: -shares[i])[:count]
    parts = [f"{i} {tokens[i]!r} {shares[i]:.0%}" for i in order if shares[i] > 0]
    return ", ".join(parts) if parts else "the centre itself"


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.3g}"


def _mean(heads: list[Head], of: Callable[[Head], float]) -> float:
    return sum(of(head) for head in heads) / len(heads)
