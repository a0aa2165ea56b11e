"""What marimo shows, as plain HTML that needs neither marimo nor a server.

    marimo-tex               MathML, which browsers draw by themselves
    marimo-accordion         details with a summary
    marimo-callout-output    an aside
    marimo-slider, -dropdown, -radio    inputs, named by the control that they move
    marimo-mime-renderer     a chart of widgets.py: its numbers, which lesson_page.js draws
    iframe                   as it is, without the handler of marimo; a scene with places is named
    marimo-form, -code-editor, -text, -text-area    nothing

Any other element of marimo is refused, so that no part of a page is lost without a word.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from html import escape, unescape
from html.parser import HTMLParser
from typing import Any

import latex2mathml.converter
import marimo as mo

from fenchel.lessons.notebook_states import Control
from fenchel.lessons.scene import Scene

_VOID = {"br", "hr", "img", "input", "meta", "line", "path", "circle", "rect"}
_DROPPED = {"marimo-form", "marimo-code-editor", "marimo-text", "marimo-text-area", "style"}
_LONG = 24
"""Signs of a formula that may be wider than a phone."""
_INPUTS = {"marimo-slider", "marimo-dropdown", "marimo-radio"}


def plain_html(output: Any, controls: Mapping[str, Control]) -> str:
    """The HTML of an output of a cell; its inputs move ``controls``."""
    if output is None:
        return ""
    names = {control.element._id: name for name, control in controls.items()}
    return _convert(mo.as_html(output).text, names, controls)


def _convert(text: str, names: Mapping[str, str], controls: Mapping[str, Control]) -> str:
    parser = _Parser(names, controls)
    parser.feed(text)
    parser.close()
    return "".join(parser.written)


class _Parser(HTMLParser):
    def __init__(self, names: Mapping[str, str], controls: Mapping[str, Control]) -> None:
        super().__init__(convert_charrefs=True)
        self.names, self.controls = names, controls
        self.written: list[str] = []
        self.ends: list[str] = []
        """What ends each open element."""
        self.folds: list[tuple[int, list[str]]] = []
        """Per open accordion: the depth of its parts, and the labels of those to come."""
        self.formula: list[str] | None = None
        self.dropped = 0
        """The depth inside elements that are left out."""
        self.control = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if self.dropped or tag in _DROPPED:
            self.dropped += tag not in _VOID
            return
        start, end = self._element(tag, given)
        if self.folds and len(self.ends) == self.folds[-1][0]:
            label = self.folds[-1][1].pop(0)
            start, end = f"<details><summary>{label}</summary>{start}", f"{end}</details>"
        self.written.append(start)
        if tag not in _VOID:
            self.ends.append(end)
        if tag == "marimo-accordion":
            labels = [_inline(self._inner(each)) for each in _json(given, "labels")]
            self.folds.append((len(self.ends), labels))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in _VOID:
            return
        if self.dropped:
            self.dropped -= 1
            return
        if tag == "marimo-accordion":
            self.folds.pop()
        if tag == "marimo-tex" and self.formula is not None:
            self.written.append(mathml("".join(self.formula)))
            self.formula = None
        self.written.append(self.ends.pop())

    def handle_data(self, data: str) -> None:
        if self.formula is not None:
            self.formula.append(data)
        elif not self.dropped:
            self.written.append(escape(data, quote=False))

    def _element(self, tag: str, given: dict[str, str]) -> tuple[str, str]:
        if tag == "marimo-ui-element":
            self.control = self.names.get(given["object-id"], "")
            return "", ""
        if tag in _INPUTS:
            return self._input(tag, given) if self.control else "", ""
        if tag == "marimo-tex":
            self.formula = []
            return "", ""
        if tag == "marimo-accordion":
            return "<div>", "</div>"
        if tag == "marimo-callout-output":
            inner = self._inner(_json(given, "html"))
            return f'<aside class="callout {escape(_json(given, "kind"))}">{inner}', "</aside>"
        if tag == "marimo-mime-renderer":
            data = _json(given, "data")
            return chart_html(json.loads(data) if isinstance(data, str) else data), ""
        if tag.startswith("marimo-"):
            raise ValueError(f"the web edition has no form for {tag}.")
        return self._plain(tag, given)

    def _plain(self, tag: str, given: dict[str, str]) -> tuple[str, str]:
        classes = given.get("class", "").split()
        if tag == "span" and "paragraph" in classes:
            return "<p>", "</p>"
        if tag == "span" and "markdown" in classes:
            return '<div class="text">', "</div>"
        if tag == "iframe":
            for name in ("onload", "width", "height", "frameborder"):
                given.pop(name, None)
            given["class"] = "scene"
            moved = self.controls.get(self.control)
            if moved is not None and isinstance(moved.element, Scene):
                given["data-scene"] = self.control
                given["srcdoc"] = moved.element.snapping
        style = given.get("style", "")
        if style.startswith("display: flex"):
            direction = "across" if "flex-direction: row" in style else "down"
            given = {"class": direction}
        elif tag in {"th", "td"}:
            given.pop("style", None)
        if "href" in given:
            given["href"] = page_address(given["href"])
        written = "".join(f' {name}="{escape(value)}"' for name, value in given.items())
        return f"<{tag}{written}>", f"</{tag}>"

    def _inner(self, text: str) -> str:
        return _convert(text, self.names, self.controls)

    def _input(self, tag: str, given: dict[str, str]) -> str:
        control = self.controls[self.control]
        name = escape(self.control)
        label = _inline(self._inner(_json(given, "label") or ""))
        positions = range(len(control.labels))
        if tag == "marimo-slider":
            return (
                f'<label class="slide"><span>{label}</span><input type="range" '
                f'data-control="{name}" min="0" max="{len(positions) - 1}" step="1" '
                f'value="{control.start}"><output>{escape(control.labels[control.start])}'
                "</output></label>"
            )
        if tag == "marimo-dropdown":
            options = "".join(
                f'<option value="{i}"{" selected" * (i == control.start)}>'
                f"{escape(control.labels[i])}</option>"
                for i in positions
            )
            return (
                f'<label class="menu"><span>{label}</span><select data-control="{name}">'
                f"{options}</select></label>"
            )
        options = "".join(
            f'<label><input type="radio" name="{name}" data-control="{name}" value="{i}">'
            f"<span>{inline_html(control.labels[i])}</span></label>"
            for i in positions
            if control.labels[i]
        )
        return f'<fieldset class="radios"><legend>{label}</legend>{options}</fieldset>'


def page_address(address: str) -> str:
    """Where a link of a lesson leads in a folder of files.

    >>> page_address("../softmax/"), page_address("/"), page_address("#part")
    ('softmax.html', 'index.html', '#part')
    """
    if found := re.fullmatch(r"\.\./(\w+)/?", address):
        return f"{found[1]}.html"
    pages = {"/": "index.html", "/model": "model.html", "/progress": "progress.html"}
    return pages.get(address, address)


def _json(given: Mapping[str, str], name: str) -> Any:
    return json.loads(given[f"data-{name}"])


def inline_html(text: str) -> str:
    """A line of Markdown without blocks around it: marimo renders the options of a question."""
    return _inline(_convert(mo.md(text).text, {}, {}))


def _inline(html: str) -> str:
    """Without the blocks around it."""
    return re.sub(r"</?(div|p)\b[^>]*>", "", html)


@cache
def mathml(delimited: str) -> str:
    r"""A formula between marimo's ||( ||) or ||[ ||] as MathML.

    >>> mathml("||(x^2||)").count("<msup>")
    1
    """
    found = re.fullmatch(r"\s*\|\|([(\[])(.*)\|\|[)\]]\s*", delimited, re.DOTALL)
    if found is None:
        raise ValueError(f"not a formula of marimo: {delimited!r}.")
    latex = re.sub(r"\\operatorname\*?\{", r"\\mathrm{", found[2])
    latex = re.sub(r"\\\\\[[\d.]+em\]", r"\\\\", latex)  # the height of a line is not known to it
    latex = re.sub(r"\\(log|cos|sin) +(?=[\w\\])", r"\\\1\\, ", latex)  # else log 3 is read log3
    latex = latex.replace(r"\arg", r"\mathrm{arg}").replace("{aligned}", "{align*}")
    display = "block" if found[1] == "[" else "inline"
    made = str(latex2mathml.converter.convert(latex, display=display))
    signs = len(unescape(re.sub(r"<[^>]*>", "", made)))
    # On a phone a long formula of a sentence gets a line of its own, which scrolls.
    return made.replace("<math ", '<math class="long" ', 1) if signs > _LONG else made


# ---- charts: the Vega-Lite of widgets.py, which has a line, dots, a rule, bars or cells


def chart_html(spec: Mapping[str, Any]) -> str:
    """An empty figure with the numbers of a chart; the page draws it."""
    data = json.dumps(chart_data(spec), separators=(",", ":"), allow_nan=False)
    return f'<div class="chart" data-chart="{escape(data)}"></div>'


def chart_data(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a chart: rows of points, and the frame in which they stand."""
    layers = [{**spec, **layer} for layer in spec.get("layer", [spec])]
    kinds = {_mark(layer): layer for layer in layers}
    if "rect" in kinds:
        return _heat(kinds["rect"])
    if "bar" in kinds:
        return _bars(kinds["bar"])
    line = kinds["line"]
    x, y = line["encoding"]["x"], line["encoding"]["y"]
    series = line["encoding"].get("color", {}).get("field")
    lines: dict[str, list[list[float | None]]] = {}
    for row in _rows(line):
        point = [_short(row.get(x["field"])), _short(row.get(y["field"]))]
        lines.setdefault(str(row[series]) if series else "", []).append(point)
    data = {
        "kind": "line",
        "x": _axis(x),
        "y": _axis(y),
        "lines": [{"name": name, "points": points} for name, points in lines.items()],
        "points": bool(line["mark"].get("point")),
        "square": spec.get("width") != "container",
    }
    for kind, name in (("circle", "cloud"), ("point", "here"), ("rule", "walls")):
        if kind in kinds:
            fields = [x["field"], y["field"]] if kind != "rule" else [x["field"]]
            data[name] = [[_short(row[field]) for field in fields] for row in _rows(kinds[kind])]
    return data


def _bars(spec: Mapping[str, Any]) -> dict[str, Any]:
    x, y, colour = (spec["encoding"].get(name, {}) for name in ("x", "y", "color"))
    rows = _rows(spec)
    series = colour.get("field")
    condition = colour.get("condition")
    chosen = None
    if condition is not None:
        chosen = str(json.loads(condition["test"].split(" === ", 1)[1]))
    names = list(dict.fromkeys(str(row[x["field"]]) for row in rows))
    kinds = list(dict.fromkeys(str(row[series]) for row in rows)) if series else [""]
    values = {
        (str(row[x["field"]]), str(row[series]) if series else ""): _short(row[y["field"]])
        for row in rows
    }
    return {
        "kind": "bar",
        "x": x.get("title"),
        "y": _axis(y),
        "names": names,
        "lines": [
            {"name": kind, "values": [values.get((name, kind)) for name in names]} for kind in kinds
        ],
        "here": names.index(chosen) if chosen in names else None,
    }


def _heat(spec: Mapping[str, Any]) -> dict[str, Any]:
    x, y, colour = (spec["encoding"][name] for name in ("x", "y", "color"))
    rows = _rows(spec)
    down, across = (list(dict.fromkeys(str(row[axis["field"]]) for row in rows)) for axis in (y, x))
    values = [_short(row[colour["field"]]) for row in rows]
    return {
        "kind": "heat",
        "x": x["field"],
        "y": y["field"],
        "of": colour["field"],
        "rows": down,
        "columns": across,
        "values": [values[i : i + len(across)] for i in range(0, len(values), len(across))],
        "domain": colour["scale"]["domain"],
    }


def _mark(layer: Mapping[str, Any]) -> str:
    mark = layer["mark"]
    return str(mark["type"] if isinstance(mark, dict) else mark)


def _rows(layer: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = layer["data"]["values"]
    return rows


def _axis(encoding: Mapping[str, Any]) -> dict[str, Any]:
    scale = encoding.get("scale") or {}
    return {
        "title": encoding.get("title"),
        "log": scale.get("type") == "log",
        "domain": scale.get("domain"),
    }


def _short(value: Any) -> Any:
    """A number with six digits; None where there is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(f"{value:.6g}") if value == value and abs(value) < 1e300 else None
