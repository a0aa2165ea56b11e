"""An inspection as tables for a terminal: layers, the heads that stand out, the network.

Headings and formats are those of fenchel/report/measures.py.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

from rich.markup import escape
from rich.table import Table

from fenchel.cli.console import plain_table
from fenchel.files import printable
from fenchel.inspection_result import (
    BlockResult,
    Certificates,
    DecisionCertification,
    Head,
    Inspection,
    Network,
    ScoreParts,
    SubstitutionCertification,
)
from fenchel.report.measures import (
    BLOCK,
    CERTIFICATE,
    DECISION,
    HEAD,
    HEAD_CERTIFICATE,
    LARGEST_GAIN,
    SUBSTITUTION,
    Item,
    Measure,
    format_value,
    head_measure,
)

_LINE = 72  # columns of a title and a legend, where a table is narrower
_PARTS = 16
"""Parts of a score shown."""
_HEADS = 12
"""Heads shown; the page and --json have all of them."""

_LEGEND = (
    "means over heads and queries: entropy in nats, keys = exp(entropy), first = weight on the "
    "first token; largest: logit = score, row = change of weights per change of scores, head = "
    "gain from q, k, v to the output (sigma, the spectral norm of the Jacobian)"
)
_BLOCK_LEGEND = (
    "; block = gain of the block, token = the same for the largest token (from below), 1/s = gain "
    "of its norm layers, s the deviation that they divide by"
)
_HEAD_LEGEND = (
    "head = layer and head; column = queries that attend to one token; q, k, v = gain from each "
    "alone, all = together, dominant = the largest"
)

_CERTIFIED = {
    "attention": "attention with W_O, in the input of attention",
    "block": "the block, in the stream before it",
}
_CERTIFICATE_LEGEND = (
    "spectral norm of the Jacobian of {}: at the text itself, attained in the ball (lower), "
    "exceeded nowhere in it (upper); token length: mean length of an input token; witness: tokens "
    "by their share of the way to it"
)

_MOVES = {
    "all": "all tokens together",
    "token": "each token",
    "one": "the last token read, alone",
}
_DECISION_LEGEND = (
    "how far the embeddings may move before the next token changes: no change within certified "
    "does it, one of length attacked does; margin in logits over the runner-up; an embedding has "
    "a length of about {:.3g}"
)

_SUBSTITUTION_LEGEND = (
    "of: tokens that may be substituted at once; no text with at most certified substitutions "
    "changes the next token, attacked of them were found that do; exact: no larger count holds, "
    "by so many texts that were read; read: larger ones are open; bound: by a bound of the margin"
)

_OVER_HEADS: tuple[tuple[str, Callable[[Iterable[float]], float]], ...] = (
    ("entropy", fmean),
    ("keys used", fmean),
    ("largest logit", max),
    ("on the first", fmean),
    ("row sensitivity", max),
)
"""Measures of heads in the table of layers, and how they are put together."""
_OF_HEAD = (
    *("head", "entropy", "on the first", "column sum"),
    *("sigma q", "sigma k", "sigma v", "sigma all", "dominant"),
)
_OF_BLOCK = (*(one for one in BLOCK if one.name in ("sigma", "token norm")), LARGEST_GAIN)


def tables(result: Inspection) -> Iterator[Table]:
    """The layers, the most sensitive heads, the network, and the certificates if there are any."""
    yield _layers(result)
    ranked = sorted(result.heads, key=lambda head: -head.sigma["qkv"].lower)
    shown = ranked[:_HEADS]
    title = f"the {len(shown)} most sensitive of {len(ranked)} heads"
    names = {*_OF_HEAD, *(("alpha",) if any(head.alpha is not None for head in shown) else ())}
    yield _measured([one for one in HEAD if one.name in names], shown, title, _HEAD_LEGEND)
    if result.network is not None:
        yield _network(result.network)
    if result.why is not None:
        yield why_table(result.why, result.tokens)
    if result.certificates is not None:
        yield from certificate_tables(result.certificates, result.tokens)


def why_table(why: ScoreParts, tokens: Sequence[str]) -> Table:
    """The parts of a score, the largest of either side first."""
    names = [escape(printable(repr(tokens[at]), 40)) for at in (why.query, why.key)]
    title = (
        f"why head {why.layer}.{why.head} attends from {names[0]} ({why.query}) to {names[1]} "
        f"({why.key})"
    )
    legend = (
        f"weight {why.weight:.3f}; score {why.score:.3f}, by {why.contrast:+.3f} from the mean "
        f"score of the query, {why.mean:.3f} (by {why.above_others:+.2f} from that of its other "
        "keys): what each part of the two streams adds to that. "
        f"Pairs of parts have absolute values of {why.size:.3g} in all; remainder "
        f"{why.remainder:.1g}"
    )
    if why.prior is not None:
        legend += f"; the position bias adds {why.prior:+.3f} beside the score"
    if why.sink is not None:
        legend += f"; the sink has weight {why.sink:.3f}, and the mean is that of the keys"
    if why.softcap is not None:
        legend += f"; scores are capped at {why.softcap:g} after this"
    table = plain_table(title, ["part", "of the query", "of the key"], legend)
    table.min_width = _LINE
    both = zip(why.parts, why.by_query, why.by_key, strict=True)
    rows = sorted(both, key=lambda row: -max(abs(row[1]), abs(row[2])))
    for name, query, key in rows[:_PARTS]:
        table.add_row(name, f"{query:+.3f}", f"{key:+.3f}")
    return table


def _headings(measures: Iterable[Measure[Any]]) -> list[str]:
    return [measure.short or measure.name for measure in measures]


def _measured(
    measures: Sequence[Measure[Item]],
    items: Iterable[Item],
    title: str,
    caption: str | None = None,
) -> Table:
    table = plain_table(title, _headings(measures), caption)
    for item in items:
        table.add_row(*(measure.terminal(item) for measure in measures))
    return table


def _layers(result: Inspection) -> Table:
    s, text = result.subject, f"{result.text}, {len(result.tokens)} tokens"
    title = f"{s['name']} ({s['family']}, {s['parameters']:,} parameters)\non {text}"
    blocks = {layer.layer: layer for layer in result.layers}
    headings = ["layer", *_headings(head_measure(name) for name, _ in _OVER_HEADS), "head"]
    headings += _headings(_OF_BLOCK) if blocks else []
    table = plain_table(title, headings, _LEGEND + (_BLOCK_LEGEND if blocks else ""))
    for number in sorted({head.layer for head in result.heads} | blocks.keys()):
        heads = [head for head in result.heads if head.layer == number]
        table.add_row(str(number), *_over_heads(heads), *_block(blocks.get(number)))
    return table


def _over_heads(heads: Sequence[Head]) -> Iterator[str]:
    """Empty in a layer without heads that choose, as one of gated DeltaNet."""
    if not heads:
        yield from [""] * (len(_OVER_HEADS) + 1)
        return
    for name, combine in _OVER_HEADS:
        measure = head_measure(name)
        yield format(combine(measure.number(head) for head in heads), measure.digits)
    sigma = head_measure("sigma all")
    yield sigma.terminal(max(heads, key=sigma.number))


def _block(block: BlockResult | None) -> list[str]:
    return [] if block is None else [measure.terminal(block) for measure in _OF_BLOCK]


def _network(network: Network) -> Table:
    table = plain_table("the network")
    table.show_header = False
    table.add_row("sigma, stream to stream", format_value(network.stream, to="-"))
    if network.logits is not None:
        table.add_row("sigma, stream to last logits", format_value(network.logits, to="-"))
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
    table = plain_table(
        f"certificates over radius {certificates.radius:g}, {norm} ({certificates.dtype})",
        _headings(CERTIFICATE),
        _CERTIFICATE_LEGEND.format(_CERTIFIED[certificates.level]),
    )
    table.add_column("witness moves", justify="left", overflow="fold")
    for layer in certificates.layers:
        if layer.refused is not None:
            table.add_row(str(layer.layer), *[""] * (len(CERTIFICATE) - 1), layer.refused)
            continue
        cells = (measure.terminal(layer) for measure in CERTIFICATE)
        table.add_row(*cells, _largest_shares(layer.moved, tokens))
    yield table
    heads = [(layer.layer, head) for layer in certificates.layers for head in layer.heads]
    if heads:
        ranked = sorted(heads, key=lambda pair: -(pair[1].upper or math.inf))[:_HEADS]
        title = f"the {len(ranked)} heads with the largest upper ends, of {len(heads)}"
        yield _measured(HEAD_CERTIFICATE, ranked, title)


def decision_table(result: DecisionCertification) -> Table:
    """Certified and attacked radii, position by position."""
    keep = "the next token" if result.keep == 1 else f"the {result.keep} likeliest tokens"
    title = f"decisions about {keep}; moved: {_MOVES[result.norm]}"
    title += "" if result.complete else " (ended by --budget)"
    vacuous = sum(row.vacuous for row in result.rows)
    title += f" ({vacuous} vacuous)" if vacuous else ""
    shown = [one for one in DECISION if one.name not in ("rival", "loses most")]
    legend = _DECISION_LEGEND.format(result.token_norm)
    legend += f"; within --budget {result.not_reached}" if result.not_reached else ""
    return _measured(shown, result.rows, title, legend)


def substitution_tables(result: SubstitutionCertification) -> list[Table]:
    """What may change, counts position by position, and the texts that change a decision."""
    keep = "the next token" if result.keep == 1 else f"the {result.keep} likeliest tokens"
    title = f"substitutions and {keep}" + ("" if result.complete else " (ended by --budget)")
    legend = _SUBSTITUTION_LEGEND + (f"; no bound: {result.refused}" if result.refused else "")
    sets = plain_table("substitutions allowed", ("token", "may become"))
    for token, others in result.alternatives.items():
        sets.add_row(escape(repr(token)), escape(", ".join(map(repr, others))))
    changes = plain_table("texts that change the decision", ("at", "substitutions"))
    for row in result.rows:
        pairs = (f"{m} {a!r} to {b!r}" for m, (a, b) in row.witness.items())
        if row.witness:
            changes.add_row(str(row.position), escape(", ".join(pairs)))
    found = [changes] if changes.row_count else []
    shown = [one for one in SUBSTITUTION if one.name not in ("margin", "texts allowed")]
    return [sets, _measured(shown, result.rows, title, legend), *found]


def _largest_shares(shares: Sequence[float], tokens: Sequence[str], count: int = 3) -> str:
    """The tokens that move most on the way to a witness, with their shares."""
    order = sorted(range(len(shares)), key=lambda i: -shares[i])[:count]
    parts = [f"{i} {tokens[i]!r} {shares[i]:.0%}" for i in order if shares[i] > 0]
    return ", ".join(parts) if parts else "the centre itself"
