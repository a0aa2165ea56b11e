"""One page in one file: markup, style, script and data, and a policy that admits nothing else.

The data of all pictures stands in one ``<script type="application/json">``, which no browser
runs, with every ``<`` written as ``\\u003c`` so that it cannot end early. The only script and
the only style are the files beside this one; the policy names their SHA-256, so that even if
markup of a stranger slipped in, nothing of it would run, load or be sent anywhere.

A ``Part`` is a section: its markup, and the data of its pictures under their names. The element
with ``data-picture="name"`` is filled from ``pictures[name]`` by ``page.js``, which calls the
function of ``viewer.js`` that the data names as its "view".
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from string import Template
from typing import Any

from fenchel.report.markup import Html, details, element, join


@dataclass(frozen=True, kw_only=True)
class Part:
    """One section of a page."""

    anchor: str
    """Its name in the address, ours and never data."""
    title: str
    """Its heading."""
    body: Html
    """Its markup below the heading."""
    pictures: Mapping[str, Any] = field(default_factory=dict)
    """The data of its pictures, by name; each says its "view"."""


def document(*, title: str, header: Html, parts: Sequence[Part], views: Sequence[str] = ()) -> str:
    """The whole page as text; ``views`` are files of more views beside those of viewer.js."""
    style = _ours("page.css")
    script = "".join(_ours(name) for name in ("viewer.js", *views, "page.js"))
    pictures = {name: picture for part in parts for name, picture in part.pictures.items()}
    links = (element("a", part.title, href=f"#{part.anchor}") for part in parts)
    return Template(_ours("page.html")).substitute(
        policy=policy(script=script, style=style),
        title=join([title]),
        header=header,
        links=join(links, "\n"),
        parts=join((_section(part) for part in parts), "\n"),
        style=style,
        script=script,
        data=data_block({"pictures": pictures}),
    )


def picture(name: str, title: str, caption: str, numbers: Html, *, width: str = "half") -> Html:
    """A drawing with its heading, its explanation and the same numbers as a table."""
    return element(
        "figure",
        element("figcaption", element("h3", title), element("p", caption)),
        element("div", class_="view", data_picture=name, aria_label=title),
        details(f"{title} as a table", numbers),
        class_=width,
    )


def policy(*, script: str, style: str) -> str:
    """The content security policy: nothing but this one script and this one style."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_fingerprint(script)}'",
            f"style-src '{_fingerprint(style)}'",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
        )
    )


def data_block(value: Any) -> str:
    """JSON that can stand inside a script element: ASCII, without a ``<``.

    >>> data_block({"name": "</script>"})
    '{"name":"\\\\u003c/script>"}'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _section(part: Part) -> Html:
    heading = element("h2", part.title, id=f"{part.anchor}-title")
    return element(
        "section", heading, part.body, id=part.anchor, aria_labelledby=f"{part.anchor}-title"
    )


def _fingerprint(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _ours(name: str) -> str:
    return resources.files("fenchel.report").joinpath(name).read_text(encoding="utf-8")
