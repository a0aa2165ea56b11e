"""What attention did for each generated token: entropy, keys, positions read, sensitivity.

A token is drawn from the logits of one query, the last of a forward pass. Per layer and head that
query has the weights p over the keys, those of ``attend`` on the whole text, and from them come

    entropy     H(p) = -sum_j p_j log p_j, in nats
    keys        exp H(p): the number of keys, as if they were used evenly
    support     how many p_j > 0, for maps whose weights can be 0; None for softmax
    top         the largest p_j with the positions j of their tokens, counted from 0
    first       p_0, the weight on the first token, on which many models leave what they do not use
    sink        the weight on a learned sink, where the model has one
    rest        1 - sink - the sum of ``top``
    sensitivity |J|_2, J the Jacobian of the choice map at p: how far p moves per unit of score

and from the logits z of the query, with p = softmax(z) and y the token that was drawn,

    p           p_y                rank        1 + how many tokens are likelier
    entropy     H(p)               effective   exp H(p)
    confidence  softmax(z / T)_y   T fitted on held-out text (evaluate/calibration.py)

A layer's entropy, keys and support are means over its heads, its top, first, sink and rest those of
the mean of p over its heads. ``last_third`` is the mean over the heads of the last third of the
layers. The sensitivity of a layer is that of its most sensitive head; ``lower`` and ``upper``
enclose it, for exactly the weights that were computed, and ``certified`` says that the enclosure
holds after rounding. All of it is about the maps of single rows: what was read, and not why.

**During a pass.** The kernels that compute the pass return no weights. ``PassTrace.observe`` is an
observer of the forward pass (model/forward_context.py): it scores the last query of the rows that
are traced against the keys of the cache, while they are at hand, and ``tokens`` computes the rest
for all layers at once. A row is one sequence of a batch. It has ``length`` tokens, whose keys are
the last ones in order, or those of ``key_positions`` (generation/kv_cache.py).

**Afterwards.** ``trace_text`` reads a finished text once and traces any number of its last tokens.

Shapes: L traced layers, R rows (or tokens), H heads, S positions, preceded by the sink if there is
one, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fenchel.attention import attention_weights, entropy
from fenchel.attention.reference import cap, logits, product
from fenchel.attention.spec import AttentionCall
from fenchel.choice import Choice, Softmax
from fenchel.choice.base import require_simplex
from fenchel.model import ModelConfig, Transformer, evaluating
from fenchel.model.attention import layer_choice
from fenchel.model.forward_context import Observer
from fenchel.torch_internals import to_float64

MOST_TOP = 64
"""Positions per layer or head at most."""
MOST_WEIGHTS = 1 << 14
"""Weights per token at most: layers, times heads where each is requested, times positions."""
_CHUNK = 1 << 23
"""Weights of all layers that ``trace_text`` computes at once."""


@dataclass(frozen=True, kw_only=True)
class TraceAttention:
    """Of which layers and heads the positions read are given, and how many."""

    layers: tuple[int, ...] | None = None
    """None for all."""
    heads: Literal["mean", "all"] = "mean"
    """The mean over the heads, or also each of them."""
    top: int = 8


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """What to trace for each token; the measures of the next-token distribution always are."""

    entropy: bool = False
    """Entropy, effective number of keys and support per layer."""
    attention: TraceAttention | None = None
    """The positions read; its layers are also those of the entropy and the sensitivity."""
    sensitivity: bool = False
    confidence: bool = False

    @property
    def observes(self) -> bool:
        """Whether the attention of the pass is needed."""
        return self.entropy or self.sensitivity or self.attention is not None

    def layers(self, config: ModelConfig) -> tuple[int, ...]:
        """The layers that are traced, in increasing order."""
        if not self.observes:
            return ()
        chosen = None if self.attention is None else self.attention.layers
        if chosen is not None:
            return tuple(sorted(set(chosen)))
        return tuple(layer for layer in range(config.layers) if not config.is_delta(layer))


class TokenCalibration(NamedTuple):
    """The temperature that fits held-out text best, the calibration error at it, and its size."""

    temperature: float
    error: float
    predictions: int
    """How many predictions the error was measured on."""


class PositionsRead(NamedTuple):
    """Where weights lie; ``top``, ``rest`` and ``sink`` sum to 1."""

    top: tuple[tuple[int, float], ...]
    """(position, weight), the largest first; positions without weight are left out."""
    rest: float
    first: float
    sink: float | None


class HeadTrace(NamedTuple):
    """The row of one head."""

    entropy: float
    keys: float
    support: int | None
    read: PositionsRead


class RowSensitivity(NamedTuple):
    """|J|_2 of the most sensitive head of a layer is between ``lower`` and ``upper``."""

    head: int
    lower: float
    upper: float
    certified: bool


class LayerTrace(NamedTuple):
    """One layer; what was not requested is None."""

    layer: int
    entropy: float | None
    keys: float | None
    support: float | None
    read: PositionsRead | None
    heads: tuple[HeadTrace, ...]
    sensitivity: RowSensitivity | None


class TokenTrace(NamedTuple):
    """One generated token."""

    p: float
    rank: int
    entropy: float
    effective: float
    confidence: float | None
    calibration: TokenCalibration | None
    position: int
    """That of the query, the token before this one."""
    layers: tuple[LayerTrace, ...]
    last_third: PositionsRead | None

    def as_json(self) -> dict[str, Any]:
        """Plain values with six digits; what was not requested is absent."""
        names = ("p", "rank", "entropy", "effective")
        value: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.confidence is not None and self.calibration is not None:
            value["confidence"] = {"p": self.confidence, **self.calibration._asdict()}
        about = [_layer_json(layer) for layer in self.layers]
        if any(len(layer) > 1 for layer in about):
            value["attention"] = {"position": self.position, "layers": about}
            if self.last_third is not None:
                value["attention"]["last_third"] = _present(self.last_third._asdict())
        moved = [_sensitivity_json(layer) for layer in self.layers if layer.sensitivity is not None]
        if moved:
            value["sensitivity"] = {"layers": moved}
        plain: dict[str, Any] = _short(value)
        return plain


def _present(fields: Mapping[str, Any], *left_out: str) -> dict[str, Any]:
    """The fields that are not None."""
    return {k: v for k, v in fields.items() if v is not None and k not in left_out}


def _layer_json(layer: LayerTrace) -> dict[str, Any]:
    value = _present(layer._asdict(), "read", "heads", "sensitivity")
    if layer.read is not None:
        value |= _present(layer.read._asdict())
    if layer.heads:
        value["heads"] = [
            _present(head._asdict(), "read") | _present(head.read._asdict()) for head in layer.heads
        ]
    return value


def _sensitivity_json(layer: LayerTrace) -> dict[str, Any]:
    found = layer.sensitivity
    assert found is not None
    upper = _short_bound(found.upper, ROUND_CEILING)
    return {
        "layer": layer.layer,
        "head": found.head,
        "lower": _short_bound(found.lower, ROUND_FLOOR),
        "upper": upper if upper < math.inf else None,  # JSON has no infinity
        "certified": found.certified,
    }


_DIGITS = 6


def _short(value: Any) -> Any:
    """Nested plain values with their floats rounded."""
    if isinstance(value, dict):
        return {name: _short(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_short(one) for one in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _short_bound(x: float, rounding: str) -> float:
    """A bound that still holds."""
    return float(Context(prec=_DIGITS, rounding=rounding).create_decimal(Decimal(x)))


class TracedRow(NamedTuple):
    """A row of a batch whose next token is traced."""

    row: int
    length: int
    """Its tokens, with those of this pass."""
    settings: TraceSettings


class PassTrace:
    """The traces of the tokens that are drawn after one forward pass.

    With ``invariant`` every row is measured by calls of its own, so that the rounding of its
    numbers does not depend on the other rows.
    """

    def __init__(
        self,
        model: Transformer,
        rows: Sequence[TracedRow],
        calibration: TokenCalibration | None = None,
        *,
        key_positions: Callable[[int], Tensor | None] | None = None,
        invariant: bool = False,
    ) -> None:
        self.model, self.rows, self.calibration = model, tuple(rows), calibration
        self._key_positions, self._invariant = key_positions, invariant
        self.layers = _layers([row.settings for row in rows], model.config)
        self.observe: Observer | None = self._observe if self.layers else None
        """To be called in each layer of the pass; None where no row needs it."""
        self._z: dict[tuple[int, int], Tensor] = {}
        self._log_u: dict[tuple[int, int], Tensor] = {}
        config = model.config
        biased = config.has_position_bias
        self._plain = not (biased or config.sinks or config.scores == "l2" or config.full_head_size)
        self._wide = torch.promote_types(model.lm_head_weight.dtype, torch.float32)

    @torch.no_grad()
    def _observe(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:  # noqa: ARG002
        """Score the last query of each traced row against the keys that it may choose."""
        if layer not in self.layers:
            return
        window = self.model.config.window(layer)
        placed = None if self._key_positions is None else self._key_positions(layer)
        for r, row in enumerate(self.rows):
            n = min(row.length, k.shape[2], window or row.length)
            k_GSD = k[row.row]
            if placed is not None:  # absent keys are at -1 and come first
                order = placed[row.row if len(placed) > 1 else 0].argsort()
                k_GSD = k_GSD[:, order]
            k_GSD = k_GSD.narrow(1, k.shape[2] - n, n)
            if self._plain:  # nothing but dot products, scaled and capped for all layers at once
                q_GRD = q[row.row, :, -1].reshape(len(k_GSD), -1, q.shape[3])
                z = product(q_GRD.to(self._wide), k_GSD.to(self._wide).mT).flatten(0, 1)
            else:
                # Values have no part in the scores: the keys stand for them.
                q_1H1D, k_1GSD = q[row.row, :, -1:].unsqueeze(0), k_GSD.unsqueeze(0)
                call = self.model.attention_call(layer, q_1H1D, k_1GSD, k_1GSD)
                scores, log_u = logits(call.q, call.k, call.spec)
                z = scores[0, :, 0]
                if log_u is not None:
                    self._log_u[layer, r] = log_u.expand_as(scores)[0, :, 0]
            self._z[layer, r] = z

    @torch.no_grad()
    def tokens(self, logits_RV: Tensor, ids_R: Tensor) -> list[TokenTrace]:
        """The trace of the token that each row has drawn, in the order of ``rows``.

        ``logits_RV`` are those of the rows as the model gives them, before temperature, penalties
        and filters.
        """
        if not self._invariant:
            return self._tokens(range(len(self.rows)), logits_RV, ids_R)
        return [
            self._tokens([r], logits_RV[r : r + 1], ids_R[r : r + 1])[0]
            for r in range(len(self.rows))
        ]

    def _tokens(self, rows: Sequence[int], logits_RV: Tensor, ids_R: Tensor) -> list[TokenTrace]:
        settings = [self.rows[r].settings for r in rows]
        weights = None
        if self.layers:
            z_LRHS = self._by_position(rows, self._z, -torch.inf)
            if self._plain:
                spec = self.model.attention(self.layers[0]).spec
                z_LRHS *= spec.scale_for(self.model.config.head_width)
                if spec.softcap is not None:
                    absent = z_LRHS == -torch.inf
                    z_LRHS = cap(z_LRHS, spec.softcap).masked_fill_(absent, -torch.inf)
            log_u_LRHS = self._by_position(rows, self._log_u, 0.0) if self._log_u else None
            choices = tuple(self.model.attention(layer).choice for layer in self.layers)
            p_LRHS = _choose(choices, z_LRHS, log_u_LRHS)
            weights = _Weights(self.layers, choices, p_LRHS, int(self.model.config.sinks))
        lengths = [self.rows[r].length for r in rows]
        return _traces(settings, lengths, logits_RV, ids_R, self.calibration, weights)

    def _by_position(
        self, rows: Sequence[int], parts: dict[tuple[int, int], Tensor], absent: float
    ) -> Tensor:
        """Parts (H, S) of layers and rows as one tensor, each key at the position of its token."""
        sink, lengths = int(self.model.config.sinks), [self.rows[r].length for r in rows]
        one = next(iter(parts.values()))
        shape = (len(self.layers), len(lengths), len(one), sink + max(lengths))
        x_LRHS = one.new_full(shape, absent)
        for x_RHS, layer in zip(x_LRHS, self.layers, strict=True):
            for x_HS, r, length in zip(x_RHS, rows, lengths, strict=True):
                if (layer, r) not in parts:  # a prior of other layers
                    continue
                part, end = parts[layer, r], sink + length
                x_HS[:, end + sink - part.shape[1] : end] = part[:, sink:]
                if sink:
                    x_HS[:, 0] = part[:, 0]
        return x_LRHS


@torch.no_grad()
def trace_text(
    model: Transformer,
    ids: Sequence[int],
    start: int,
    settings: TraceSettings,
    vectors: Mapping[int, Tensor] | None = None,
) -> list[TokenTrace]:
    """The traces of ``ids[start:]``, from one pass over the text.

    ``vectors`` (M,) are added to the stream, by the layer, from 1, after which they are.
    """
    if not 1 <= start <= len(ids):
        raise ValueError(f"start={start} should be from 1 to the {len(ids)} tokens of the text.")
    layers = _layers([settings], model.config)
    calls: list[AttentionCall] = []

    def record(layer: int, call: AttentionCall) -> None:
        if layer in layers:
            calls.append(call)

    ids_1N = torch.tensor([ids], device=model.lm_head_weight.device)
    steer = {
        n - 1: v_M.to(model.lm_head_weight).view(1, 1, -1) for n, v_M in (vectors or {}).items()
    }
    with evaluating(model):
        x_1TM = model(ids_1N[:, :-1], attention_override=record, return_hidden=True, steer=steer)
    config, T = model.config, len(ids) - 1
    per_token = max(len(layers) * config.heads * T, config.vocabulary)
    traces: list[TokenTrace] = []
    for first in range(start - 1, T, max(1, _CHUNK // per_token)):
        queries = range(first, min(T, first + max(1, _CHUNK // per_token)))
        weights = _weights_of_queries(layers, calls, queries, int(config.sinks)) if layers else None
        traces += _traces(
            [settings] * len(queries),
            [query + 1 for query in queries],
            model.logits(x_1TM[:, queries.start : queries.stop])[0],
            ids_1N[0, queries.start + 1 : queries.stop + 1],
            None,
            weights,
        )
    return traces


class _Weights(NamedTuple):
    """The weights of the traced layers, and the map that chose them in each."""

    layers: tuple[int, ...]
    choices: tuple[Choice, ...]
    p: Tensor
    """(L, R, H, S)."""
    sink: int
    """1 where the first weight is that of a sink, else 0."""


def _choose(choices: Sequence[Choice], z_LRHS: Tensor, log_u_LRHS: Tensor | None) -> Tensor:
    """The weights for scores, by the map of each layer; -inf is the score of an absent key.

    A map may have a number per head, which broadcasts to (B, H, T, S): layers count as sequences,
    rows as queries.
    """
    p_LRHS = torch.empty_like(z_LRHS)
    for choice, index in _groups(choices):
        log_u = None if log_u_LRHS is None else log_u_LRHS[index].transpose(1, 2)
        p_LRHS[index] = choice.weights(z_LRHS[index].transpose(1, 2), log_u).transpose(1, 2)
    return p_LRHS


def _weights_of_queries(
    layers: tuple[int, ...], calls: Sequence[AttentionCall], queries: range, sink: int
) -> _Weights:
    """The weights of some queries of one sequence."""
    p = [
        # Wide, so that the weights of a model in half precision are not rounded.
        attention_weights(call.q.float(), call.k.float(), rows=queries, **call.spec)[0]
        for call in calls
    ]
    choices = tuple(call.spec.choice for call in calls)
    return _Weights(layers, choices, torch.stack(p).transpose(1, 2), sink)


def _layers(settings: Sequence[TraceSettings], config: ModelConfig) -> tuple[int, ...]:
    layers = tuple(sorted({layer for one in settings for layer in one.layers(config)}))
    for layer in layers:
        if config.is_delta(layer):
            raise ValueError(f"layer {layer} is a gated DeltaNet, without attention to trace.")
        require_simplex(layer_choice(config, layer), "a trace of attention")
    return layers


def _groups(choices: Sequence[Choice]) -> list[tuple[Choice, slice | list[int]]]:
    """Each map with the places where it stands."""
    places: dict[Choice, list[int]] = {}
    for place, choice in enumerate(choices):
        places.setdefault(choice, []).append(place)
    if len(places) == 1:
        return [(choices[0], slice(None))]
    return list(places.items())


def _traces(
    settings: Sequence[TraceSettings],
    lengths: Sequence[int],
    logits_RV: Tensor,
    ids_R: Tensor,
    calibration: TokenCalibration | None,
    weights: _Weights | None,
) -> list[TokenTrace]:
    """The traces of R tokens, each from its own settings."""
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    z_RV, ids_R1 = logits_RV.to(wide), ids_R.unsqueeze(-1)
    p_RV = z_RV.softmax(-1)
    entropy_R = entropy(p_RV)
    columns = [
        p_RV.gather(-1, ids_R1)[:, 0],
        (z_RV > z_RV.gather(-1, ids_R1)).sum(-1) + 1,
        entropy_R,
        entropy_R.exp(),
    ]
    if calibration is not None:
        columns.append((z_RV / calibration.temperature).softmax(-1).gather(-1, ids_R1)[:, 0])
    measured = None if weights is None else _Measured(weights, settings)
    traces = []
    rows = torch.stack([to_float64(column) for column in columns], 1).tolist()
    for r, (one, length, row) in enumerate(zip(settings, lengths, rows, strict=True)):
        p, rank, nats, effective, *confidence = row
        asked = calibration if one.confidence else None
        traces.append(
            TokenTrace(
                p,
                int(rank),
                nats,
                effective,
                confidence[0] if asked else None,
                asked,
                length - 1,
                () if measured is None else measured.layers(r, one),
                None if measured is None else measured.last_third(r, one),
            )
        )
    return traces


class _Measured:
    """The measures of weights that any row asks for, as plain values."""

    def __init__(self, weights: _Weights, settings: Sequence[TraceSettings]) -> None:
        self.weights, p_LRHS, sink = weights, weights.p, weights.sink
        attention = [one.attention for one in settings if one.attention is not None]
        top = max((one.top for one in attention), default=0)
        heads = any(one.heads == "all" for one in attention)
        if heads or any(one.entropy for one in settings):
            nats_LRH = entropy(p_LRHS)
            keys_LRH, support_LRH = nats_LRH.exp(), (p_LRHS > 0).sum(-1)
            measures = (nats_LRH, keys_LRH, support_LRH)
            self.heads = [x.tolist() for x in measures]
            self.means = [to_float64(x).mean(-1).tolist() for x in measures]
        if attention:
            mean_LRS = p_LRHS.mean(2)
            self.read = _Reads(mean_LRS, top, sink)
            third = math.ceil(len(mean_LRS) / 3)
            self.read_last = _Reads(mean_LRS[-third:].mean(0), top, sink)
            self.read_heads = _Reads(p_LRHS, top, sink) if heads else None
        if any(one.sensitivity for one in settings):
            self.sensitivity = self._sensitivity()

    def _sensitivity(self) -> list[list[RowSensitivity]]:
        """Per layer and row, for the head of the largest lower bound."""
        p_LRHS = self.weights.p
        bounds_LRH = [torch.empty_like(to_float64(p_LRHS[..., 0])) for _ in range(2)]
        for choice, index in _groups(self.weights.choices):
            bounds = choice.sensitivity_bounds(p_LRHS[index].transpose(1, 2))  # as in _choose
            for to, bound in zip(bounds_LRH, bounds, strict=True):
                to[index] = bound.transpose(1, 2)
        (lower_LR, head_LR), upper_LR = bounds_LRH[0].max(-1), bounds_LRH[1].amax(-1)
        columns = zip(head_LR.tolist(), lower_LR.tolist(), upper_LR.tolist(), strict=True)
        return [
            [
                RowSensitivity(h, low, high, high < math.inf)
                for h, low, high in zip(*layer, strict=True)
            ]
            for layer in columns
        ]

    def layers(self, r: int, settings: TraceSettings) -> tuple[LayerTrace, ...]:
        """The layers of row r."""
        chosen = None if settings.attention is None else settings.attention.layers
        return tuple(
            self._layer(index, r, settings)
            for index, layer in enumerate(self.weights.layers)
            if settings.observes and (chosen is None or layer in chosen)
        )

    def _layer(self, index: int, r: int, settings: TraceSettings) -> LayerTrace:
        attention, layer = settings.attention, self.weights.layers[index]
        sparse = not isinstance(self.weights.choices[index], Softmax)
        nats = keys = support = read = None
        heads: tuple[HeadTrace, ...] = ()
        if settings.entropy:
            nats, keys, support = (means[index][r] for means in self.means)
        if attention is not None:
            read = self.read.take(attention.top, index, r)
        if attention is not None and attention.heads == "all" and self.read_heads is not None:
            rows = zip(*(x[index][r] for x in self.heads), strict=True)
            heads = tuple(
                HeadTrace(
                    nats_h,
                    keys_h,
                    support_h if sparse else None,
                    self.read_heads.take(attention.top, index, r, h),
                )
                for h, (nats_h, keys_h, support_h) in enumerate(rows)
            )
        return LayerTrace(
            layer,
            nats,
            keys,
            support if sparse else None,
            read,
            heads,
            self.sensitivity[index][r] if settings.sensitivity else None,
        )

    def last_third(self, r: int, settings: TraceSettings) -> PositionsRead | None:
        """The mean over the last third of the layers, where all are traced."""
        if settings.attention is None or settings.attention.layers is not None:
            return None
        return self.read_last.take(settings.attention.top, r)


class _Reads:
    """``PositionsRead`` of weights (..., S), by the indices of the axes before the last."""

    def __init__(self, p: Tensor, top: int, sink: int) -> None:
        tokens = p[..., sink:]
        self.values, self.positions = (x.tolist() for x in tokens.topk(min(top, tokens.shape[-1])))
        self.first = tokens[..., 0].tolist()
        self.sink = p[..., 0].tolist() if sink else None

    def take(self, top: int, *index: int) -> PositionsRead:
        """The reading of one row, cut to its ``top`` positions."""
        values, positions, first, sink = (
            _at(x, index) for x in (self.values, self.positions, self.first, self.sink)
        )
        shown = tuple(
            (position, weight)
            for position, weight in zip(positions[:top], values[:top], strict=True)
            if weight > 0.0
        )
        rest = 1.0 - (sink or 0.0) - math.fsum(weight for _, weight in shown)
        return PositionsRead(shown, max(rest, 0.0), first, sink)


def _at(nested: Any, index: tuple[int, ...]) -> Any:
    for i in index:
        nested = None if nested is None else nested[i]
    return nested
