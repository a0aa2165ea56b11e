"""HTML from values, escaped by construction.

``Html`` marks text that is markup already; every other string is somebody's data and is
escaped where it enters, in text and in attributes alike. Control characters, which a browser
hides and a terminal obeys, become visible signs. There is no way to write a style attribute
or an event handler: the page's policy forbids both.
"""

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

_ROWS = 500  # of a table of facts
_DEPTH = 6  # of nested facts; files from outside nest as deep as they like
_VOID = {"meta", "br", "hr", "input"}
_FORBIDDEN = ("style", "on")
_SIGNS: dict[int, int] = {
    **{code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
    **dict.fromkeys(range(0xD800, 0xE000), 0xFFFD),  # half a character cannot be written
}


class Html(str):
    """A string that is markup; nothing of it is escaped again."""

    __slots__ = ()


Child = Html | str | None


def clean(text: str) -> str:
    """Control characters as visible signs, lone surrogates as the replacement character.

    >>> clean("a" + chr(27) + "[31m")
    'a␛[31m'
    """
    return text.replace("\r\n", "\n").translate(_SIGNS)


def element(name: str, /, *children: Child, **attributes: str | int | bool | None) -> Html:
    """One element. Attribute names lose a last underscore and turn the others to hyphens.

    >>> element("p", "1 < 2", class_="note")
    '<p class="note">1 &lt; 2</p>'
    """
    assert not any(key.startswith(_FORBIDDEN) for key in attributes), attributes
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Iterable[Child], separator: str = "") -> Html:
    """Children one after another; a plain string is escaped, None is nothing."""
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
    """A table whose first column names its row; ``numeric`` aligns the others to the right.

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
    """A mapping as a table of two columns, nested ones under dotted names."""
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
            yield shorten(f"{prefix}{key}", 200), shorten(_word(value), 2000)


def details(summary: str, child: Html, *, open_: bool = False) -> Html:
    """A fold with a line that opens it, and a window that scrolls when there is much in it."""
    window = element("div", child, class_="scroll", tabindex=0, role="region", aria_label=summary)
    return element("details", element("summary", summary), window, open=open_)


def notes(sentences: Iterable[str]) -> Html:
    """What is missing or doubtful, one paragraph each."""
    return join(element("p", sentence, class_="note") for sentence in sentences)


def shorten(text: str, limit: int) -> str:
    """The first ``limit`` characters, with a sign where something was left out."""
    return text if len(text) <= limit else f"{text[:limit]}…"


def _attribute(key: str, value: str | int | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.removesuffix("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(clean(str(value)))}"'


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ", ".join("…" if isinstance(one, list | dict) else _word(one) for one in value)
    return "…" if isinstance(value, Mapping) else "" if value is None else str(value)
