"""Where every head looks in one sentence: all maps at a glance, one of them enlarged.

The weights come as bytes b = round(255 sqrt p), row by row (layer, head, query, key), so that
p = (b / 255)^2 is right to within sqrt(p) / 255, at most 0.004. The square root keeps small
weights visible; the same bytes are drawn, hovered and tabulated, so the page cannot disagree
with itself.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

_BYTES = 16 * 2**20  # of maps in a page; 16 heads of 256 tokens take one sixteenth of it
_SIZE = 1024
_TOKEN = 40


@dataclass(frozen=True)
class AttentionMaps:
    """The maps of one sentence: bytes (L, H, T, T) and the T tokens."""

    data: NDArray[np.uint8]
    tokens: tuple[str, ...]

    @property
    def weights(self) -> NDArray[np.float32]:
        """The weights (L, H, T, T), each row scaled to sum to one as it did before rounding."""
        p: NDArray[np.float32] = np.square(self.data.astype(np.float32) / np.float32(255))
        p /= np.maximum(p.sum(-1, keepdims=True), np.float32(1e-12))
        return p


def maps(sample: Mapping[str, Any]) -> AttentionMaps:
    """The maps of ``sample.json``; a ValueError says what is wrong with them."""
    stated = mapping(sample.get("attention"))
    tokens = sample.get("tokens")
    if not stated or not isinstance(tokens, list):
        raise ValueError("sample.json holds no attention maps.")
    shape = tuple(stated.get(name) for name in ("layers", "heads", "size"))
    if not all(isinstance(n, int) and 0 < n <= _SIZE for n in shape):
        raise ValueError(
            f"the attention maps should have whole numbers of layers, heads and tokens from 1 to "
            f"{_SIZE:,}; sample.json says {shorten(str(shape), 80)}."
        )
    L, H, T = (int(n or 0) for n in shape)
    if stated.get("scale") != "sqrt":
        raise ValueError("the attention maps are not on the scale this page reads, sqrt.")
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
    found = None
    try:
        found = maps(run.sample)
        body = _figure(found)
    except ValueError as error:
        body = notes(run.troubles.get("sample.json", ()) or [_sentence(error)])
    return Section(
        anchor="maps",
        title="Attention in one sentence",
        body=body,
        pictures={"attention": _data(found)} if found else {},
    )


def heads(found: AttentionMaps) -> list[tuple[str, ...]]:
    """One row a head: entropy, effective tokens, weight on the first token and itself, distance."""
    p = found.weights
    L, H, T, _ = p.shape
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(p > 0, p * np.log(p), 0.0).sum(-1).mean(-1)
    first = p[..., 0].mean(-1)
    itself = np.diagonal(p, axis1=-2, axis2=-1).mean(-1)
    place = np.arange(T)
    distance = (p * np.abs(place[:, None] - place[None, :])).sum(-1).mean(-1)
    measures = (entropy, np.exp(entropy), first, itself, distance)
    return [
        (
            f"layer {layer + 1}, head {head + 1}",
            *(format_number(float(m[layer, head]), 3) for m in measures),
        )
        for layer in range(L)
        for head in range(H)
    ]


def _figure(found: AttentionMaps) -> Html:
    L, H, T, _ = found.data.shape
    about = (
        f"{pluralise(L, 'layer')} of {pluralise(H, 'head')} on {pluralise(T, 'token')}. Rows are "
        "queries, columns are keys. Colours run from 0 to 1 on a square-root scale, the same for "
        "every head. Choose a head, then point at the map or move through it with the arrow keys. "
        "A weight shows which tokens a head reads, not what it does with them."
    )
    head = ("head", "entropy", "effective tokens", "on the first", "on itself", "distance")
    told = (
        "Every head, averaged over the tokens that look: entropy in nats, weight on the first "
        "token and on the token itself, mean distance in tokens; from weights of 8 bits"
    )
    return element(
        "figure",
        element("figcaption", element("p", about, class_="about")),
        element("div", class_="view", data_picture="attention"),
        details("Every head as a table", table(head, heads(found), caption=told)),
    )


def _data(found: AttentionMaps) -> dict[str, Any]:
    L, H, T, _ = found.data.shape
    return {
        "view": "attention",
        "layers": L,
        "heads": H,
        "size": T,
        "tokens": list(found.tokens),
        "data": base64.b64encode(found.data.tobytes()).decode(),
    }


def _sentence(error: ValueError) -> str:
    text = str(error)
    return text[0].upper() + text[1:]
