"""The measures of an inspection: one table for the page and for the terminal.

A ``Measure`` is one number of a head, a block or a certificate: its heading, where it stands in the
results (fenchel/inspection_result.py), what it means, and how it is written. ``HEAD``, ``BLOCK``,
``CERTIFICATE``, ``DECISION`` and ``SUBSTITUTION`` are the columns of the tables, and those of
``HEAD`` with an explanation are also drawn as heat maps. The terminal shows some of them under
shorter headings.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fenchel.inspection_result import (
    BlockResult,
    DecisionRow,
    Head,
    HeadCertificate,
    Interval,
    LayerCertificate,
    SubstitutionRow,
)
from fenchel.report.html import Html, clean, format_bound, format_number, shorten, table

Item = TypeVar("Item")
Value = float | str | Interval | None


@dataclass(frozen=True)
class Measure(Generic[Item]):
    """One number of an item."""

    name: str
    """Its heading."""
    of: Callable[[Item], Value]
    about: str = ""
    """What it means, below its heat map."""
    bend: str = ""
    """The colour scale of its heat map: "" linear, "log" or "root"."""
    short: str = ""
    """Its heading in a terminal, where it is another."""
    digits: str = ""
    """Its format in a terminal, with which a bracket is written by its lower end."""
    bound: str = ""
    """"lower" or "upper" if it is a bound, which is then rounded down or up."""

    def number(self, item: Item) -> float:
        """The value, a bracket by its lower end; nan for a value that is no number."""
        value = self.of(item)
        if isinstance(value, Interval):
            return value.lower
        return value if isinstance(value, float | int) else math.nan

    def text(self, item: Item) -> str:
        """The value on a page; "" where there is none or it is not finite."""
        value = self.of(item)
        if self.bound and isinstance(value, float | int) and math.isfinite(value):
            return format_bound(value, up=self.bound == "upper")
        return format_value(value)

    def terminal(self, item: Item) -> str:
        """The value in a terminal."""
        if self.bound:
            return self.text(item)
        if self.digits and math.isfinite(self.number(item)):
            return format(self.number(item), self.digits)
        return format_value(self.of(item), to="-")


def format_value(value: Value, *, to: str = " to ") -> str:
    """A value as text with three digits; a bracket by both ends, rounded outward, or by one number
    if that is both to three digits.

    >>> [format_value(Interval(2.0, upper, 9)) for upper in (2.251, 2.0001)]
    ['2 to 2.26', '2']
    """
    if isinstance(value, Interval):
        low, high = (format_number(float(f"{end:.3g}"), 3) for end in (value.lower, value.upper))
        if low == high or not math.isfinite(value.upper):
            return low if low == high else f"{low}{to}{high}"
        return f"{format_bound(value.lower, up=False)}{to}{format_bound(value.upper, up=True)}"
    if value is None or isinstance(value, str):
        return value or ""
    return format_number(value, 3) if math.isfinite(value) else ""


def measures_table(
    measures: Sequence[Measure[Item]], items: Iterable[Item], *, caption: str
) -> Html:
    """One row per item, one column per measure."""
    rows = [[measure.text(item) for measure in measures] for item in items]
    return table([measure.name for measure in measures], rows, caption=caption)


def top_tokens(shares: Sequence[float], tokens: Sequence[str], count: int) -> list[str]:
    """The tokens with the largest shares as "position: token (share)"; "" where there are fewer.

    >>> top_tokens([0.2, 0.8], ["a", "b"], 3)
    ['1: b (0.80)', '0: a (0.20)', '']
    """
    order = sorted(range(len(shares)), key=lambda i: -shares[i])[:count]
    cells = [f"{i}: {shorten(clean(tokens[i]), 20)} ({format_number(shares[i], 2)})" for i in order]
    return cells + [""] * (count - len(cells))


def head_name(head: Head) -> str:
    """Layer and head by their numbers, counted from 1."""
    return f"L{head.layer} H{head.head}"


def _sigma(key: str, inputs: str, cause: str) -> Measure[Head]:
    name = "all" if key == "qkv" else key
    about = f"Largest singular value of d output / d {inputs}: {cause}."
    digits = "" if key == "qkv" else ".3g"
    return Measure(f"sigma {name}", lambda h: h.sigma[key], about, "log", name, digits)


HEAD: tuple[Measure[Head], ...] = (
    Measure("head", head_name),
    Measure(
        "entropy",
        lambda h: h.entropy.mean,
        "Mean over queries, in nats; 0 is one key.",
        digits=".2f",
    ),
    Measure("5 %", lambda h: h.entropy.low),
    Measure("95 %", lambda h: h.entropy.high),
    Measure(
        "keys used",
        lambda h: h.effective.mean,
        "Mean over queries of exp(entropy), the number of equally weighted keys of each.",
        bend="log",
        short="keys",
        digits=".1f",
    ),
    Measure("support", lambda h: h.support.mean),
    Measure(
        "row sensitivity",
        lambda h: h.sensitivity.most,
        "Exact norm of d weights / d scores, largest over queries; at most 0.5 for softmax.",
        short="row",
        digits=".3f",
    ),
    Measure(
        "largest logit",
        lambda h: h.max_logit.most,
        "The largest absolute score before the choice map.",
        bend="log",
        short="logit",
        digits=".1f",
    ),
    Measure(
        "margin",
        lambda h: h.margin.median,
        "Largest score less the second largest; median over queries.",
    ),
    Measure(
        "on the first",
        lambda h: h.first,
        "Mean weight on the first token, a common attention sink.",
        short="first",
        digits=".2f",
    ),
    Measure("on itself", lambda h: h.itself),
    Measure("distance", lambda h: h.distance, "Mean distance in tokens from a query to its keys."),
    Measure("not taken", lambda h: h.not_taken),
    Measure("alpha", lambda h: h.alpha, digits=".3f"),
    Measure(
        "column sum",
        lambda h: h.column,
        "The largest column sum of the weights: how many queries attend to one token.",
        bend="log",
        short="column",
        digits=".1f",
    ),
    Measure("at token", lambda h: str(h.column_token)),
    Measure("nearest head", lambda h: h.nearest_head and str(h.nearest_head)),
    Measure(
        "similarity",
        lambda h: h.similarity,
        "Overlap of the weights with the most similar head of the layer; 1 is equal.",
    ),
    _sigma("q", "queries", "query"),
    _sigma("k", "keys", "key"),
    _sigma("v", "values", "mixing"),
    _sigma("qkv", "(q, k, v) together", "all causes"),
    Measure("bound", lambda h: h.bound, bound="upper"),
    Measure("dominant", lambda h: h.dominant),
)

BLOCK: tuple[Measure[BlockResult], ...] = (
    Measure("layer", lambda b: str(b.layer)),
    Measure("sigma", lambda b: b.block, short="block"),
    Measure("token norm", lambda b: b.token, short="token", digits=".3g"),
    Measure("attention alone", lambda b: b.attention),
    Measure("MLP alone", lambda b: b.mlp),
    Measure("update", lambda b: b.update),
    Measure(
        "norm gains 1/s",
        lambda b: "; ".join(f"{format_value(n.least)} to {format_value(n.most)}" for n in b.norms),
    ),
    Measure("at most", lambda b: "; ".join(format_bound(n.upper, up=True) for n in b.norms)),
)

LARGEST_GAIN: Measure[BlockResult] = Measure(
    "largest norm gain",
    lambda b: max((norm.most for norm in b.norms), default=None),
    short="1/s",
    digits=".3g",
)
"""Of the norm layers of a block, in a terminal."""

CERTIFICATE: tuple[Measure[LayerCertificate], ...] = (
    Measure("layer", lambda c: str(c.layer)),
    Measure("token length", lambda c: c.token_norm, digits=".3g"),
    Measure("at the text", lambda c: c.centre, short="centre"),
    Measure("lower", lambda c: c.lower, bound="lower"),
    Measure("upper", lambda c: "none" if c.upper is None else c.upper, bound="upper"),
    Measure("upper / lower", lambda c: c.ratio, short="ratio", bound="upper"),
)

HEAD_CERTIFICATE: tuple[Measure[tuple[int, HeadCertificate]], ...] = (
    Measure("head", lambda pair: f"L{pair[0]} H{pair[1].head}"),
    Measure("at the text", lambda pair: pair[1].centre, short="centre"),
    Measure(
        "upper", lambda pair: "none" if pair[1].upper is None else pair[1].upper, bound="upper"
    ),
)
"""Of (layer, head)."""


def _quoted(*tokens: str) -> str:
    """Tokens with their spaces and line ends visible."""
    return ", ".join(shorten(clean(repr(token)), 14) for token in tokens)


DECISION: tuple[Measure[DecisionRow], ...] = (
    Measure("position", lambda d: str(d.position), short="at"),
    Measure("after", lambda d: _quoted(d.token)),
    Measure("next token", lambda d: _quoted(*d.kept)),
    Measure("rival", lambda d: _quoted(d.rival)),
    Measure("margin", lambda d: d.margin, digits=".2f"),
    Measure("certified", lambda d: d.certified if d.searched else "not reached", bound="lower"),
    Measure("attacked", lambda d: d.attacked if d.attempted else "not reached", bound="upper"),
    Measure("certified / attacked", lambda d: d.ratio, short="ratio", bound="lower"),
    Measure("loses most", lambda d: "vacuous" if d.vacuous else d.loses_most),
)


SUBSTITUTION: tuple[Measure[SubstitutionRow], ...] = (
    Measure("position", lambda d: str(d.position), short="at"),
    Measure("after", lambda d: _quoted(d.token)),
    Measure("next token", lambda d: _quoted(*d.kept)),
    Measure("margin", lambda d: d.margin, digits=".2f"),
    Measure("may change", lambda d: str(d.most), short="of"),
    Measure("certified", lambda d: ("all" if d.safe else str(d.certified)) if d.most else "-"),
    Measure("attacked", lambda d: "-" if d.attacked is None else str(d.attacked)),
    Measure("how", lambda d: d.how if d.most else "-"),
    Measure("texts read", lambda d: f"{d.read:,}", short="texts"),
    Measure("texts allowed", lambda d: f"{d.allowed:,}"),
)


def head_measure(name: str) -> Measure[Head]:
    """A measure of a head by its name."""
    return next(measure for measure in HEAD if measure.name == name)
