"""A page in one HTML file: escaped markup, formatted numbers, and the document with its policy.

**Markup.** ``Html`` marks a string that is markup already. Every other string is data and is
escaped where it enters, in text and in attributes alike. Control characters, which browsers hide
and terminals execute, become visible signs. Style attributes and event handlers cannot be written;
the page's policy forbids both.

**Numbers.** ``format_number``, ``amount``, ``duration`` and ``pluralise`` give text for readers,
``json_numbers`` values for the charts.

**Document.** A ``Section`` has markup and the data of its charts by name. The data of all charts
stands in one ``<script type="application/json">``, which browsers do not run, with every ``<``
written as ``\\u003c`` so that it cannot end early. ``page.js`` fills each element that has
``data-picture="name"`` by calling the function of a script that the data names as its "view".
The only script and style are the files in this folder. The content security policy names their
SHA-256, so that injected markup could neither run, load nor send anything.
"""

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from importlib import resources
from itertools import islice
from string import Template
from typing import Any

STYLES = ("colours.css", "page.css")
"""The style of every page; the colours serve pages of other kinds too."""
SCRIPTS = ("charts.js", "attention_map.js")
"""The views of every page."""
_ROWS = 500  # of a table of settings
_DEPTH = 6  # of nested settings; a file from elsewhere may nest deeper
_VOID = {"meta", "br", "hr", "input"}
_FORBIDDEN = ("style", "on")
_SIGNS: dict[int, int] = {
    **{code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
    **dict.fromkeys(range(0xD800, 0xE000), 0xFFFD),  # lone surrogates cannot be encoded
}


class Html(str):
    """A string that is markup and is not escaped again."""

    __slots__ = ()


Child = Html | str | None


def clean(text: str) -> str:
    """Control characters as visible signs, lone surrogates as the replacement character.

    >>> clean("a" + chr(27) + "[31m")
    'a␛[31m'
    """
    return text.replace("\r\n", "\n").translate(_SIGNS)


def element(name: str, /, *children: Child, **attributes: str | int | bool | None) -> Html:
    """One element. Attribute names lose a trailing underscore; other underscores become hyphens.

    >>> element("p", "1 < 2", class_="note")
    '<p class="note">1 &lt; 2</p>'
    """
    assert not any(key.startswith(_FORBIDDEN) for key in attributes), attributes
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Iterable[Child], separator: str = "") -> Html:
    """Children in a row; plain strings are escaped, None is left out."""
    return Html(
        separator.join(
            child if isinstance(child, Html) else html.escape(clean(child))
            for child in children
            if child
        )
    )


def table(
    head: Sequence[str], rows: Iterable[Sequence[Any]], *, caption: str, numeric: bool = True
) -> Html:
    """A table whose first column names the row; ``numeric`` aligns the others to the right.

    >>> table(("a", "b"), [(1, "<")], caption="c").count("&lt;")
    1
    """
    kind = "numbers" if numeric else "words"
    columns = element("tr", *(element("th", text, scope="col") for text in head))
    body = (
        element(
            "tr",
            element("th", str(row[0]), scope="row"),
            *(element("td", cell if isinstance(cell, Html) else str(cell)) for cell in row[1:]),
        )
        for row in rows
    )
    return element(
        "table",
        element("caption", caption),
        element("thead", columns),
        element("tbody", *body),
        class_=kind,
    )


def facts(values: Mapping[str, Any], *, caption: str) -> Html:
    """A mapping as a table of names and values, nested mappings under dotted names."""
    pairs = list(islice(flatten(values), _ROWS + 1))
    rows = [*pairs[:_ROWS], ("…", "and more")] if len(pairs) > _ROWS else pairs
    return table(("name", "value"), rows, caption=caption, numeric=False)


def flatten(
    values: Mapping[str, Any], prefix: str = "", depth: int = _DEPTH
) -> Iterator[tuple[str, str]]:
    """Nested mappings as (dotted name, text).

    >>> list(flatten({"a": {"b": 1}, "c": [2, True]}))
    [('a.b', '1'), ('c', '2, true')]
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and depth:
            yield from flatten(value, f"{prefix}{key}.", depth - 1)
        else:
            yield shorten(f"{prefix}{key}", 200), shorten(_scalar_text(value), 2000)


def details(summary: str, child: Html, *, open_: bool = False) -> Html:
    """A collapsible element whose content scrolls if it is long."""
    return element("details", element("summary", summary), scrolled(child, summary), open=open_)


def scrolled(child: Html, label: str) -> Html:
    """Content that scrolls if it is wide or long."""
    return element("div", child, class_="scroll", tabindex=0, role="region", aria_label=label)


def page_header(kind: str, title: str, *lead: Child, below: Html | None = None) -> Html:
    """The top of a page: what kind of page it is, its heading and a sentence."""
    mark = element("span", "fenchel", class_="mark")
    parts = (
        element("p", mark, f" {kind}", class_="over"),
        element("h1", title),
        element("p", *lead, class_="lead"),
        below,
    )
    return join(parts, "\n")


def notes(sentences: Iterable[str]) -> Html:
    """Notes on missing or doubtful data, one paragraph each."""
    return join(element("p", sentence, class_="note") for sentence in sentences)


def shorten(text: str, limit: int) -> str:
    """The first ``limit`` characters, with an ellipsis if there were more."""
    return text if len(text) <= limit else f"{text[:limit]}…"


def _attribute(key: str, value: str | int | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.removesuffix("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(clean(str(value)))}"'


def _scalar_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ", ".join(
            "…" if isinstance(one, list | dict) else _scalar_text(one) for one in value
        )
    return "…" if isinstance(value, Mapping) else "" if value is None else str(value)


_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


def format_number(value: float | None, digits: int = 4) -> str:
    """A number with its significant digits.

    >>> [format_number(x) for x in (1.77489, 25465.3, 0.00012, math.nan, 3.0)]
    ['1.775', '25,465', '0.00012', 'nan', '3']
    """
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(float(value))
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) < 1e-3 or abs(value) >= 1e15:
        return f"{value:.{digits - 1}g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(decimals, 0), digits)}f}"


def format_bound(value: float, *, up: bool, digits: int = 3) -> str:
    """A finite bound with its significant digits, rounded up or down so that it stays a bound.

    >>> format_bound(6.581, up=True), format_bound(1.359, up=False), format_bound(2.0, up=True)
    ('6.59', '1.35', '2')
    """
    text = format_number(value, digits)
    shown = Decimal(text.replace(",", ""))
    if float(shown) == value or (float(shown) > value) == up:
        return text
    last = Decimal((0, (1,), int(shown.as_tuple().exponent)))
    return f"{shown + last if up else shown - last:,}"


def amount(value: float) -> str:
    """A count, from a million on with an SI prefix.

    >>> amount(950), amount(13572), amount(4_096_000)
    ('950', '13,572', '4.10 M')
    """
    for size, prefix in _PREFIXES:
        if math.isfinite(value) and abs(value) >= size:
            return f"{value / size:,.2f} {prefix}"
    return format_number(value)


def duration(seconds: float) -> str:
    """A duration in its two largest units.

    >>> duration(8.25), duration(161), duration(7384)
    ('8.2 s', '2 min 41 s', '2 h 3 min')
    """
    if not math.isfinite(seconds) or seconds < 0:
        return format_number(seconds)
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"


def pluralise(count: int, word: str) -> str:
    """A count with its noun.

    >>> pluralise(1, "head"), pluralise(1200, "head")
    ('1 head', '1,200 heads')
    """
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def join_words(words: Sequence[str]) -> str:
    """A list of words as English prose.

    >>> join_words(["a", "b", "c"]), join_words(["a"]), join_words([])
    ('a, b and c', 'a', '')
    """
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def json_numbers(values: Iterable[float]) -> list[float | None]:
    """Values with six digits, and None for those that JSON cannot represent.

    >>> json_numbers([1 / 3, math.inf])
    [0.333333, None]
    """
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section of a page."""

    anchor: str
    """Its id, a literal of this package."""
    title: str
    """Its heading."""
    body: Html
    """Its markup below the heading."""
    pictures: Mapping[str, Any] = field(default_factory=dict)
    """The data of its charts by name, each with its "view"."""


def document(
    *,
    title: str,
    header: Html,
    sections: Sequence[Section],
    views: Sequence[str] = (),
    footer: str = "Written by fenchel. This page is one file: it loads nothing and sends nothing.",
) -> str:
    """The page as text; ``views`` are files with views beside those of ``SCRIPTS``."""
    style = "".join(map(read_asset, STYLES))
    script = "".join(read_asset(name) for name in (*SCRIPTS, *views, "page.js"))
    pictures = {name: data for part in sections for name, data in part.pictures.items()}
    links = (element("a", part.title, href=f"#{part.anchor}") for part in sections)
    return Template(read_asset("page.html")).substitute(
        policy=policy(script=script, style=style),
        title=join([title]),
        header=header,
        links=join(links, "\n"),
        sections=join((_section(part) for part in sections), "\n"),
        style=style,
        script=script,
        footer=join([footer]),
        data=data_block({"pictures": pictures}),
    )


def subject_page(
    kind: str,
    done: str,
    subject: Mapping[str, Any],
    sentence: str,
    sections: Sequence[Section],
    *views: str,
) -> str:
    """A page about the model that ``subject`` describes, which was ``done``, such as "ablated"."""
    name = shorten(clean(str(subject["name"])), 200)
    return document(
        title=f"{name} {done} · fenchel",
        header=page_header(kind, name, sentence),
        sections=sections,
        views=("heat_map.js", *views),
    )


def picture(
    name: str, title: str, caption: str, numbers: Html, *, width: str = "half", open_: bool = False
) -> Html:
    """A figure: heading, caption, the chart called ``name``, and its numbers as a table."""
    return element(
        "figure",
        element("figcaption", element("h3", title), element("p", caption)),
        element("div", class_="view", data_picture=name, aria_label=title),
        details(f"{title} as a table", numbers, open_=open_),
        class_=width,
    )


def number_cards(entries: Iterable[tuple[str, str, str]]) -> Html:
    """Numbers to read first: what each is, its value, and its unit or place."""
    return element(
        "dl",
        *(
            element("div", element("dt", name), element("dd", value, element("small", unit)))
            for name, value, unit in entries
        ),
    )


def method_section(
    title: str,
    about: str,
    tables: Mapping[str, Mapping[str, Any]],
    seconds: Mapping[str, float] | None = None,
) -> Section:
    """How the numbers of a page were computed: in words, as tables of facts by caption, in time."""
    if seconds is not None:
        tables = {**tables, "time": {name: duration(spent) for name, spent in seconds.items()}}
    cards = (facts(values, caption=caption) for caption, values in tables.items())
    body = (element("p", about, class_="about"), element("div", *cards, class_="cards"))
    return Section(anchor="method", title=title, body=join(body, "\n"))


def policy(*, script: str, style: str) -> str:
    """The content security policy that admits this script and this style only."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_sha256(script)}'",
            f"style-src '{_sha256(style)}'",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
        )
    )


def data_block(value: Any) -> str:
    """JSON for the inside of a script element: ASCII, without a ``<``.

    >>> data_block({"name": "</script>"})
    '{"name":"\\\\u003c/script>"}'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _section(part: Section) -> Html:
    heading = element("h2", part.title, id=f"{part.anchor}-title")
    return element(
        "section", heading, part.body, id=part.anchor, aria_labelledby=f"{part.anchor}-title"
    )


def _sha256(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def read_asset(name: str, package: str = "fenchel.report") -> str:
    """The text of a script, style or template of a package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
