"""The page of a reliability diagram: how far the confidence of predictions is their accuracy.

record (plain values of ``fenchel eval --page``) -> section -> one document

Every bin of predictions is a point: its mean confidence to the right, its accuracy upwards. On the
diagonal the two agree; below it the model is overconfident, above it underconfident. The area of a
point is its share of the predictions. The diagram is drawn as SVG, without a script.
"""

from collections.abc import Mapping
from typing import Any

from fenchel.report.html import (
    Html,
    Section,
    details,
    document,
    element,
    format_number,
    notes,
    page_header,
    shorten,
    table,
)

_SIDE, _LEFT, _TOP = 320, 40, 10
_RADIUS = 14.0  # of a point with all predictions


Record = Mapping[str, Any]


def render(name: str, text: str, record: Record) -> str:
    """The page as text."""
    kinds: dict[str, Record] = {"T = 1": record["plain"]}
    if record["scaled"] is not None:
        kinds[f"T = {record['temperature']:.3f}"] = record["scaled"]
    figure_ = element(
        "figure",
        element(
            "figcaption",
            element("h3", "Confidence and accuracy"),
            element(
                "p",
                "Confidence to the right, accuracy upwards; dashed: perfect calibration.",
            ),
        ),
        _picture(kinds),
        *(details(f"Bins at {kind}", _bins(kind, one)) for kind, one in kinds.items()),
        class_="half",
    )
    beside = element("div", _sentences(record), _measures(kinds), class_="half")
    charts = element("div", figure_, beside, class_="charts")
    section = Section(anchor="reliability", title="Reliability", body=charts)
    header = page_header("calibration", shorten(name, 200), f"on {shorten(text, 200)}")
    return document(title=f"{shorten(name, 200)} · calibration", header=header, sections=[section])


def _sentences(record: Record) -> Html:
    if record["scaled"] is None:
        return notes(["No finite temperature is best on the first half of the text."])
    return notes(
        [
            f"The temperature {record['temperature']:.4g} minimises the loss of "
            f"{record['fitted_on']:,} "
            "predictions of the first half of the text; all numbers are measured on the second."
        ]
    )


def _picture(kinds: Mapping[str, Record]) -> Html:
    label = "; ".join(f"{kind}: ECE {one['ece']:.4f}" for kind, one in kinds.items())
    marks = [0.0, 0.25, 0.5, 0.75, 1.0]
    parts: list[Html] = []
    for value in marks:
        parts += [
            element("line", x1=_x(0.0), x2=_x(1.0), y1=_y(value), y2=_y(value), class_="rule"),
            element("text", f"{value:g}", x=_LEFT - 8, y=_y(value), class_="end"),
            element("text", f"{value:g}", x=_x(value), y=_y(0.0) + 16, class_="middle"),
        ]
    parts.append(
        element("line", x1=_x(0.0), y1=_y(0.0), x2=_x(1.0), y2=_y(1.0), class_="reference r0")
    )
    for tone, (kind, one) in enumerate(kinds.items()):
        parts += _points(one, tone)
        parts.append(element("text", kind, x=_LEFT + 26, y=_TOP + 14 + 18 * tone, class_="label"))
        parts.append(_dot(_LEFT + 14, _TOP + 14 + 18 * tone, 5.0, tone))
    size = f"0 0 {_LEFT + _SIDE + 20} {_TOP + _SIDE + 30}"
    return element("svg", *parts, viewBox=size, role="img", aria_label=label)


def _points(one: Record, tone: int) -> list[Html]:
    route = " ".join(
        f"{'L' if i else 'M'}{_x(b['confidence'])} {_y(b['accuracy'])}"
        for i, b in enumerate(one["bins"])
    )
    line = element("path", d=route, class_=f"line s{tone}")
    return [line, *(_point(b, one["predictions"], tone) for b in one["bins"])]


def _point(one: Record, total: int, tone: int) -> Html:
    radius = max(2.0, _RADIUS * (one["size"] / total) ** 0.5)
    return _dot(_x(one["confidence"]), _y(one["accuracy"]), radius, tone)


def _dot(x: float, y: float, radius: float, tone: int) -> Html:
    return element("circle", cx=str(x), cy=str(y), r=f"{radius:.1f}", class_=f"dot s{tone}")


def _x(value: float) -> int:
    return round(_LEFT + _SIDE * value)


def _y(value: float) -> int:
    return round(_TOP + _SIDE * (1.0 - value))


def _bins(kind: str, one: Record) -> Html:
    rows = [
        (
            f"{b['low']:.3f} to {b['high']:.3f}",
            f"{b['size']:,}",
            format_number(b["confidence"]),
            format_number(b["accuracy"]),
        )
        for b in one["bins"]
    ]
    head = ("confidence", "predictions", "mean confidence", "accuracy")
    return table(head, rows, caption=f"Bins at {kind}, without empty ones")


def _measures(kinds: Mapping[str, Record]) -> Html:
    names = {
        "loss": "loss, nats",
        "brier": "Brier score",
        "accuracy": "accuracy",
        "confidence": "mean confidence",
        "ece": "ECE, bins of equal width",
        "ece_mass": "ECE, bins of equal mass",
    }
    rows = [
        (label, *(format_number(one[name]) for one in kinds.values()))
        for name, label in names.items()
    ]
    return table(("", *kinds), rows, caption="Measured on the second half of the text")
