"""Attention maps of a run and of an inspection: an overview of all heads and one map enlarged.

The weights are bytes b = round(255 sqrt p), row-major in (layer, head, query, key), so that
p = (b / 255)^2 is exact to within sqrt(p) / 255, at most 0.004. The square root keeps small weights
visible. Drawing, readout and tables all use the same bytes.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fenchel.inspection_result import Maps
from fenchel.report.html import (
    Html,
    Section,
    clean,
    details,
    element,
    format_number,
    notes,
    pluralise,
    shorten,
    table,
)
from fenchel.report.run_data import RunData, mapping

_BYTES = 16 * 2**20  # of maps per page; 16 heads on 256 tokens take one sixteenth of it
_SIZE = 1024
_TOKEN = 40
_TITLE = "Attention in one sentence"


@dataclass(frozen=True)
class AttentionMaps:
    """The attention maps of one sentence: bytes (L, H, T, T) and the T tokens."""

    data: NDArray[np.uint8]
    tokens: tuple[str, ...]

    @property
    def weights(self) -> NDArray[np.float32]:
        """The weights (L, H, T, T), each row rescaled to sum to one as before rounding."""
        p: NDArray[np.float32] = np.square(self.data.astype(np.float32) / np.float32(255))
        p /= np.maximum(p.sum(-1, keepdims=True), np.float32(1e-12))
        return p


def read_maps(sample: Mapping[str, Any]) -> AttentionMaps:
    """The maps of ``sample.json``; raises ValueError if they are missing or damaged."""
    stated = mapping(sample.get("attention"))
    tokens = sample.get("tokens")
    if not stated or not isinstance(tokens, list):
        raise ValueError("sample.json contains no attention maps.")
    shape = tuple(stated.get(name) for name in ("layers", "heads", "size"))
    if not all(isinstance(n, int) and 0 < n <= _SIZE for n in shape):
        raise ValueError(
            f"the attention maps should have whole numbers of layers, heads and tokens from 1 to "
            f"{_SIZE:,}; sample.json has {shorten(str(shape), 80)}."
        )
    L, H, T = (int(n or 0) for n in shape)
    if stated.get("scale") != "sqrt":
        raise ValueError(
            'the attention maps should be on the scale "sqrt"; this page reads no other.'
        )
    if L * H * T * T > _BYTES:
        raise ValueError(f"the attention maps are too large for a page, {L * H * T * T:,} weights.")
    if len(tokens) != T:
        raise ValueError(f"the attention maps are of {T} tokens, sample.json names {len(tokens)}.")
    try:
        raw = base64.b64decode(stated.get("data", ""), validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise ValueError("the attention maps are damaged: their data is not base64.") from None
    if len(raw) != L * H * T * T:
        raise ValueError(
            f"the attention maps are cut short or damaged: {len(raw):,} bytes, "
            f"not {L * H * T * T:,}."
        )
    data = np.frombuffer(raw, dtype=np.uint8).reshape(L, H, T, T)
    return AttentionMaps(data, tuple(shorten(clean(str(token)), _TOKEN) for token in tokens))


def attention_map(run: RunData) -> Section:
    """The section with the overview, the enlarged map and the table of heads."""
    try:
        maps = read_maps(run.sample)
    except ValueError as error:
        sentence = str(error)
        reasons = run.troubles.get("sample.json", ()) or [sentence[0].upper() + sentence[1:]]
        return Section(anchor="maps", title=_TITLE, body=notes(reasons))
    L, H, T, _ = maps.data.shape
    about = (
        f"{pluralise(L, 'layer')} of {pluralise(H, 'head')} on {pluralise(T, 'token')}. Rows are "
        "queries, columns are keys. Colours run from 0 to 1 on a square-root scale, the same for "
        "every head. Choose a head, then point at the map or move through it with the arrow keys. "
        "A weight shows which tokens a head reads, not what it does with them."
    )
    data = base64.b64encode(maps.data.tobytes()).decode()
    return Section(
        anchor="maps",
        title=_TITLE,
        body=_figure(about, "Every head as a table", _head_table(maps)),
        pictures={"attention": _data((L, H, T), maps.tokens, data)},
    )


def head_rows(maps: AttentionMaps) -> list[tuple[str, ...]]:
    """Per head: entropy, effective tokens, weight on the first token and on itself, distance."""
    p = maps.weights
    L, H, T, _ = p.shape
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(p > 0, p * np.log(p), 0.0).sum(-1).mean(-1)
    first = p[..., 0].mean(-1)
    itself = np.diagonal(p, axis1=-2, axis2=-1).mean(-1)
    position = np.arange(T)
    distance = (p * np.abs(position[:, None] - position[None, :])).sum(-1).mean(-1)
    measures = (entropy, np.exp(entropy), first, itself, distance)
    return [
        (
            f"layer {layer + 1}, head {head + 1}",
            *(format_number(float(m[layer, head]), 3) for m in measures),
        )
        for layer in range(L)
        for head in range(H)
    ]


def inspected_maps(maps: Maps, tokens: Sequence[str]) -> Section:
    """The section with the attention maps of the inspected heads on the first tokens."""
    size, layers, heads = maps.size, maps.layers, maps.heads
    part = "" if size == len(tokens) else f"the first {size} of "
    about = (
        f"{pluralise(len(layers), 'layer')} of {pluralise(len(heads), 'head')} on {part}"
        f"{pluralise(len(tokens), 'token')}. Rows are queries, columns are keys; "
        "colours run from 0 to 1 on a square-root scale. A weight shows which tokens a head "
        "reads, not what it does with them."
    )
    if layers != list(range(1, len(layers) + 1)) or heads != list(range(1, len(heads) + 1)):
        lists = [shorten(", ".join(map(str, numbers)), 80) for numbers in (layers, heads)]
        about += (
            f" Numbers count the inspected layers and heads only: layers {lists[0]}, "
            f"heads {lists[1]}."
        )
    shown = [shorten(clean(str(token)), _TOKEN) for token in tokens[:size]]
    rows = [(str(position), token) for position, token in enumerate(shown)]
    caption = "Positions count from 0"
    numbers = table(("position", "token"), rows, caption=caption, numeric=False)
    return Section(
        anchor="maps",
        title="Attention maps",
        body=_figure(about, "The tokens as a table", numbers),
        pictures={"attention": _data((len(layers), len(heads), size), shown, maps.data)},
    )


def _head_table(maps: AttentionMaps) -> Html:
    head = ("head", "entropy", "effective tokens", "on the first", "on itself", "distance")
    caption = (
        "Means over the queries of every head: entropy in nats, weight on the first token and on "
        "the query itself, distance in tokens; from weights of 8 bits"
    )
    return table(head, head_rows(maps), caption=caption)


def _figure(about: str, title: str, numbers: Html) -> Html:
    return element(
        "figure",
        element("figcaption", element("p", about, class_="about")),
        element("div", class_="view", data_picture="attention"),
        details(title, numbers),
    )


def _data(shape: tuple[int, ...], tokens: Sequence[str], data: str) -> dict[str, Any]:
    layers, heads, size = shape
    return {
        "view": "attention",
        "layers": layers,
        "heads": heads,
        "size": size,
        "tokens": list(tokens),
        "data": data,
    }
