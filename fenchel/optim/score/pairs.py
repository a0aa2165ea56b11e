"""Query and key weights of a model: one ``QueryKeyPair`` per attention layer.

The scores of a head are S_ij = scale <R_i n(W_Q x_i + b_Q), R_j n(W_K x_j + b_K)>, with R the
rotation by position (rotary) and n the norm of each query and key (QK-norm), where the model has
them. H query heads share G key heads (GQA), each of width D.

``attention_pairs`` recognises layers by their structure:

    QueryKeyLayer            the protocol below; layers of fenchel declare it
    nn.MultiheadAttention    and so nn.TransformerEncoderLayer; of nn.TransformerDecoderLayer the
                             self-attention
    FUSED                    one linear map: H D rows of queries, G D of keys, G D of values, in
                             this order (GPT-2, nanoGPT, Phi-3, timm, your own)
    SEPARATE                 two linear maps, with q_norm and k_norm where they exist (Llama, Qwen,
                             Gemma, BERT, your own)

The last two need the number or the width of the heads, under one of the names in HEADS and WIDTHS.
What cannot be read from a layer is assumed: that it is causal unless ``is_causal`` is False
(``attention_pairs(model, causal=False)`` for encoders), that scores are q . k / sqrt(D) unless it
has a ``scaling`` or ``scale``, and that rotary angles, where there are any, are an argument of its
forward: (cos, sin) as in transformers, or ``Angles``.

A bias is one more column of the weight, multiplied by a constant input of 1. A layer that cannot be
described this way is refused in one sentence (``REFUSALS``). Cross-attention has no pair and is
left to other optimisers (``CROSS``). Scores are measured before a soft cap and before a position
bias.

**By hand.** A pair needs the rows of queries and of keys, and the module whose input they multiply
(``QueryKeyPair``, docs/cookbook.md); ``read`` is for layers whose input is not their first argument
of shape (B, T, M).

**Remaining parameters.** A fused weight holds rows of queries, keys and values. The rows of the
values become a separate parameter that shares the memory of the fused weight, so moving it
moves the rows, and another optimiser can own it. Before that optimiser steps, the hook of
``pass_gradients`` gives each such parameter its rows of the gradient.
Slices (``remaining_parameters``) point into the memory of the weights: create them after the model
is on its device.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fenchel.attention import AttentionSpec, Prior
from fenchel.attention.prior import as_band, outside_band


@dataclass(frozen=True, eq=False)
class HeadProjection:
    """The rows of a linear map that produce ``heads`` queries or keys, with their biases."""

    weight: Tensor
    """An nn.Parameter, like the bias."""
    start: int
    stop: int
    heads: int
    bias: Tensor | None = None
    columns: bool = False
    """The weight is (in, out), as in GPT-2's Conv1D, instead of (out, in)."""

    def __repr__(self) -> str:
        shape, bias = tuple(self.weight.shape), ", bias" * (self.bias is not None)
        return f"HeadProjection({self.heads} heads: rows {self.start}-{self.stop} of {shape}{bias})"

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The weight, and the bias where there is one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def values(self) -> Tensor:
        """A copy, (heads, D, M), or (heads, D, M + 1) with a bias; float32 or better."""
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.detach()
        return self.select(self.weight.detach(), bias).to(exact, copy=True)

    def gradient(self) -> Tensor | None:
        """The gradient in the shape of ``values``; None where a parameter has none."""
        if self.weight.grad is None or (self.bias is not None and self.bias.grad is None):
            return None
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.grad
        return self.select(self.weight.grad, bias).to(exact)

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Overwrite the rows with values in the shape of ``values``."""
        self.assign(values, self.weight, self.bias)

    def select(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The rows of this projection in a weight and bias, (..., heads, D, M); a view if no bias.

        Leading axes stay: that of the layers, in stacked parameters.
        """
        at = slice(self.start, self.stop)
        rows = weight[..., at].mT if self.columns else weight[..., at, :]
        if bias is not None:
            rows = torch.cat((rows, bias[..., at, None]), dim=-1)
        return torch.unflatten(rows, -2, (self.heads, -1))

    def assign(self, values: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Write values in the shape of ``select`` into a weight and bias."""
        flat, at = values.flatten(-3, -2), slice(self.start, self.stop)
        if bias is not None:
            bias[..., at] = flat[..., -1]
            flat = flat[..., :-1]
        if self.columns:
            weight[..., at] = flat.mT
        else:
            weight[..., at, :] = flat


class LayerArguments(NamedTuple):
    """What an attention layer receives in one forward pass."""

    x: Tensor
    """What the weights multiply, (B, T, M)."""
    angles: Any = None
    """Angles, or (cos, sin) of (B, T, W) as in transformers; None without rotary positions."""
    mask: Tensor | None = None
    """Keys (B, T) or pairs (B, 1, T, T) that count: True, or a number above -1e4."""


Reader = Callable[[tuple[Any, ...], dict[str, Any]], LayerArguments | None]
"""Reads the positional and keyword arguments of a forward pass; None for a pass to ignore."""


@dataclass(frozen=True, eq=False)
class QueryKeyPair:
    """The query and key weights of one attention layer, and what separates them from the scores.

    >>> layer = nn.Linear(8, 24)  # queries, keys and values of two heads
    >>> pair = QueryKeyPair(
    ...     "mine",
    ...     layer,
    ...     HeadProjection(layer.weight, 0, 8, heads=2, bias=layer.bias),
    ...     HeadProjection(layer.weight, 8, 16, heads=2, bias=layer.bias),
    ...     scale=0.5,
    ... )
    >>> pair.query.values().shape  # heads, width, inputs and the bias
    torch.Size([2, 4, 9])
    """

    name: str
    """The path of the layer in the model."""
    module: nn.Module
    """The layer: its first input (B, T, M) is what the weights multiply; a hook samples it."""
    query: HeadProjection
    key: HeadProjection
    scale: float
    """Factor on q . k: the optimisers measure scores as the softmax receives them."""
    q_norm: nn.Module | None = None
    k_norm: nn.Module | None = None
    causal: bool = True
    window: int | None = None
    """A query attends to keys less than this many positions away; None for no window."""
    layout: str = "half"
    """Which entries a rotation pairs, as in fenchel.attention.rotate."""
    read: "Reader | None" = None
    """The input among the arguments of the module's forward; None for the first (B, T, M)."""

    def __repr__(self) -> str:
        norm = ", normalised" * (self.q_norm is not None)
        kind = f"{type(self.module).__name__}, scale={self.scale:.4g}{norm}"
        return f"QueryKeyPair({self.name!r}, {kind}, {self.query}, {self.key})"

    def __post_init__(self) -> None:
        if self.query.heads % self.key.heads:
            raise ValueError(
                f"{self.name} has {self.query.heads} heads of queries and {self.key.heads} of "
                "keys; the second should divide the first."
            )
        trained = [p.requires_grad for p in self.parameters]
        if any(trained) and not all(trained):
            raise ValueError(
                f"{self.name} trains only some of its query and key weights and biases; "
                "freeze all of them or none."
            )

    @cached_property
    def parameters(self) -> list[Tensor]:
        """Weights and biases, each once; a fused weight also holds the values."""
        return list(dict.fromkeys((*self.query.parameters, *self.key.parameters)))

    @cached_property
    def gains(self) -> dict[str, Tensor]:
        """The parameters of q_norm and k_norm by name, such as "q_norm.weight"."""
        norms = {"q_norm": self.q_norm, "k_norm": self.k_norm}
        return {
            f"{which}.{name}": p
            for which, norm in norms.items()
            if norm is not None
            for name, p in norm.named_parameters()
        }

    @cached_property
    def gain_offsets(self) -> dict[str, float]:
        """What q_norm and k_norm add to their weights to get their gains, where these are trained.

        A multiple of the gain and the bias is that multiple of the queries, or keys.
        """
        norms = {"q_norm": self.q_norm, "k_norm": self.k_norm}
        found = {
            which: norm_offset(norm, dict(norm.named_parameters()))
            for which, norm in norms.items()
            if norm is not None and all(p.requires_grad for p in norm.parameters())
        }
        return {which: offset for which, offset in found.items() if offset is not None}

    @property
    def memory(self) -> list[Tensor]:
        """The weights and biases, and the parameters of the norms."""
        return [*self.parameters, *self.gains.values()]

    @property
    def trained(self) -> bool:
        """Whether the weights require a gradient."""
        return self.query.weight.requires_grad


@runtime_checkable
class QueryKeyLayer(Protocol):
    """What an attention layer declares so that the score optimisers can move its weights.

    ``fenchel.model`` implements it; so may a layer of yours.
    """

    qkv: nn.Linear
    """(heads + 2 groups) head_width rows: queries, keys, values."""
    heads: int
    """Query heads."""
    groups: int
    """Key and value heads."""
    head_width: int
    scale: float | None
    """Factor on q . k; None for 1 / sqrt(head_width)."""
    mask: Prior | None
    """``Causal()``, a ``Window`` or None for full attention."""
    rotary_layout: str
    local: bool
    """Whether the layer reads the rotary angles of layers with a window."""
    l2: bool
    """Whether its scores are distances instead of products."""
    q_norm: nn.Module | None
    k_norm: nn.Module | None


def attention_pairs(model: nn.Module, *, causal: bool = True) -> list[QueryKeyPair]:
    """The query and key weights of every self-attention layer of ``model``, first layer first.

    ``causal`` applies to layers without an attribute ``is_causal``.

    >>> from fenchel.model import ModelConfig, Transformer
    >>> pairs = attention_pairs(Transformer(ModelConfig(vocabulary=16, width=32, layers=2)))
    >>> [pair.name for pair in pairs]
    ['blocks.0.attention', 'blocks.1.attention']
    >>> [pair.name for pair in attention_pairs(nn.TransformerEncoderLayer(32, 4))]
    ['self_attn']
    """
    pairs = list(_pairs_of(model, causal))
    if not pairs:
        raise ValueError(
            f"no query and key weights were found in {type(model).__name__}: known are "
            f"nn.MultiheadAttention and modules with one linear map named {' or '.join(FUSED)}, or "
            f"two named {', '.join(map(' and '.join, SEPARATE))}; make a QueryKeyPair by hand for "
            "others."
        )
    return pairs


def _pairs_of(model: nn.Module, causal: bool) -> Iterator[QueryKeyPair]:
    inside_cross: list[str] = []
    for name, module in model.named_modules():
        if any(name == cross or name.startswith(f"{cross}.") for cross in inside_cross):
            continue
        if name.rpartition(".")[2] in CROSS:
            inside_cross.append(name)
            continue
        if reason := _refusal(module):
            raise ValueError(f"{name or type(module).__name__} cannot be paired: {reason}.")
        if isinstance(module, QueryKeyLayer):
            yield _fenchel_pair(name, module)
        elif isinstance(module, nn.MultiheadAttention):
            yield _multihead_pair(name, module)
        elif (pair := _linear_pair(name, module, causal)) is not None:
            yield pair


CROSS = ("cross_attention", "cross_attn", "crossattention", "encoder_attn", "multihead_attn")
"""Names of layers whose queries and keys read two different streams; they have no pair."""
FUSED = ("qkv", "qkv_proj", "c_attn")
"""Names of one linear map with the rows of queries, keys and values, in this order."""
SEPARATE = (("q_proj", "k_proj"), ("query", "key"), ("c_q", "c_k"), ("wq", "wk"), ("to_q", "to_k"))
"""Names of two linear maps, of queries and of keys."""
HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "heads")
"""Attributes, of the layer or of its ``config``, with the number of query heads."""
WIDTHS = ("head_dim", "head_width", "head_size", "attention_head_size")
"""Attributes with the width per head."""

REFUSALS: dict[str, str] = {
    "query_key_value": (
        "its query_key_value mixes the rows of queries, keys and values head by head"
    ),
    "kv_a_proj_with_mqa": "its keys are made from a latent vector (MLA) and not from the stream",
    "kv_b_proj": "its keys are made from a latent vector (MLA) and not from the stream",
}
"""Attributes of layers whose queries or keys are not rows of a linear map, and the reason."""


def _refusal(module: nn.Module) -> str | None:
    """Why an attention layer cannot be paired; None for every other module."""
    for attribute, reason in REFUSALS.items():
        if hasattr(module, attribute):
            return reason
    if getattr(module, "is_cross_attention", False):
        return "its queries and keys read two different streams (cross-attention)"
    for name in (*FUSED, "q_proj", "k_proj"):
        linear = getattr(module, name, None)
        if isinstance(linear, nn.Module) and not _is_plain_linear(linear):
            if type(linear).__name__ == "Conv1D":  # of GPT-2: a linear map stored by columns
                continue
            return f"its {name} is not a plain linear map ({type(linear).__name__})"
    if isinstance(module, QueryKeyLayer) and module.l2:
        return "its scores are not products of queries and keys"
    if isinstance(module, QueryKeyLayer) and not all(getattr(module, "rows", ())):
        return "its keys are its values too, or those of another layer"
    if isinstance(module, QueryKeyLayer) and getattr(module, "tempered", False):
        return "its queries have a factor that grows with their position"
    if isinstance(module, nn.MultiheadAttention):
        if module.bias_k is not None or module.add_zero_attn:
            return "add_bias_kv and add_zero_attn append keys that no token makes"
        if module.in_proj_weight is None and module.kdim != module.embed_dim:
            return f"its keys read {module.kdim} entries and its queries {module.embed_dim}"
    return None


def _is_plain_linear(linear: nn.Module) -> bool:
    """Whether a Linear multiplies by its weight itself: no adapter, quantisation or gain."""
    if not isinstance(linear, nn.Linear) or hasattr(linear, "gain"):
        return False
    return linear.weight.is_floating_point()


def _fenchel_pair(name: str, layer: QueryKeyLayer) -> QueryKeyPair:
    H, G, D, qkv, mask = layer.heads, layer.groups, layer.head_width, layer.qkv, layer.mask
    band = as_band(None if outside_band(mask) else mask, 0, qkv.weight.device)
    assert isinstance(layer, nn.Module)
    if qkv.out_features != (H + 2 * G) * D:
        raise ValueError(
            f"{name}.qkv has {qkv.out_features} rows where {H} heads of queries and {G} of keys "
            f"and values, {D} wide, make {(H + 2 * G) * D}."
        )
    return _pair(
        name,
        layer,
        HeadProjection(qkv.weight, 0, H * D, H, qkv.bias),
        HeadProjection(qkv.weight, H * D, (H + G) * D, G, qkv.bias),
        scale=layer.scale,
        causal=band.right is not None and band.right <= 0,
        window=None if band.left is None else band.left + 1,
        layout=layer.rotary_layout,
    )


def _multihead_pair(name: str, module: nn.MultiheadAttention) -> QueryKeyPair:
    M, H = module.embed_dim, module.num_heads
    weights, bias = (module.q_proj_weight, module.k_proj_weight), module.in_proj_bias
    if module.in_proj_weight is not None:
        query = HeadProjection(module.in_proj_weight, 0, M, H, bias)
        key = HeadProjection(module.in_proj_weight, M, 2 * M, H, bias)
    elif bias is None:
        query, key = (HeadProjection(weight, 0, M, H) for weight in weights)
    else:
        raise ValueError(
            f"{name} cannot be paired: it has three weights and one bias for all of them; "
            "make it with bias=False, or with vdim equal to embed_dim."
        )
    read = partial(_read_multihead, name, module.batch_first, H)
    return _pair(name, module, query, key, scale=None, causal=False, read=read)


def _read_multihead(
    name: str, batch_first: bool, heads: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LayerArguments:
    """The arguments of nn.MultiheadAttention: its masks are True, or -inf, where nothing counts."""
    names = (
        "query", "key", "value", "key_padding_mask", "need_weights", "attn_mask",
    )  # fmt: skip
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, key = given["query"], given["key"]
    if x is not key:
        raise ValueError(
            f"{name} receives queries and keys that are two tensors (cross-attention), which has "
            "no pair; leave it out of the pairs."
        )
    if x.ndim == 2:
        x = x.unsqueeze(0)
    elif not batch_first:
        x = x.transpose(0, 1)
    B, T = x.shape[:2]
    allowed: Tensor | None = None
    if (padding := given.get("key_padding_mask")) is not None:
        keys = padding.reshape(B, T)
        keys = ~keys if keys.dtype == torch.bool else keys > -1e4
        allowed = keys[:, None, None, :].expand(B, 1, T, T)
    if (mask := given.get("attn_mask")) is not None:
        pairs = ~mask if mask.dtype == torch.bool else mask > -1e4
        if pairs.ndim == 3:  # per sequence and head, of which the first stands for all
            pairs = pairs.unflatten(0, (B, heads))[:, :1]
        pairs = pairs.expand(B, 1, T, T)
        allowed = pairs if allowed is None else allowed & pairs
    return LayerArguments(x, None, allowed)


def _linear_pair(name: str, module: Any, causal: bool) -> QueryKeyPair | None:
    """The pair of a layer with one fused or two separate linear maps; None for other modules."""
    fused = next((n for n in FUSED if isinstance(getattr(module, n, None), nn.Module)), None)
    if fused is not None:
        linear = getattr(module, fused)
        columns = not isinstance(linear, nn.Linear)  # the Conv1D of GPT-2
        rows = linear.weight.shape[1 if columns else 0]
        H, D = _heads_and_width(f"{name}.{fused}", module, rows, 3)
        G, rest = divmod(rows - H * D, 2 * D)
        if G < 1 or rest:
            raise ValueError(
                f"{name}.{fused} has {rows} rows, which {H} heads of queries, {D} wide, and as "
                "many rows of keys as of values do not make; make a QueryKeyPair by hand."
            )
        weight, bias = linear.weight, linear.bias
        query = HeadProjection(weight, 0, H * D, H, bias, columns)
        key = HeadProjection(weight, H * D, (H + G) * D, G, bias, columns)
    else:
        for names in SEPARATE:
            q, k = (getattr(module, n, None) for n in names)
            if isinstance(q, nn.Linear) and isinstance(k, nn.Linear):
                break
        else:
            return None
        _, D = _heads_and_width(f"{name}.{names[0]}", module, q.out_features, 1)
        if k.out_features % D:
            raise ValueError(
                f"{name} has heads {D} wide, which do not divide the {k.out_features} rows of "
                f"{names[1]}; make a QueryKeyPair by hand."
            )
        query = HeadProjection(q.weight, 0, q.out_features, q.out_features // D, q.bias)
        key = HeadProjection(k.weight, 0, k.out_features, k.out_features // D, k.bias)
    return _pair(
        name,
        module,
        query,
        key,
        scale=_scale_of(name, module, D),
        causal=getattr(module, "is_causal", causal),
        window=getattr(module, "sliding_window", None),
    )


def _heads_and_width(where: str, module: Any, rows: int, blocks: int) -> tuple[int, int]:
    """(H, D): the query heads and their width, where ``rows`` are ``blocks`` times H D or fewer."""
    D, H = _first_whole(module, WIDTHS), _first_whole(module, HEADS)
    if H is None and D is not None and rows % (blocks * D) == 0:
        H = rows // (blocks * D)
    if D is None and H is not None and rows % (blocks * H) == 0:
        D = rows // (blocks * H)
    if H is None or D is None or (blocks == 1 and rows % D):
        raise ValueError(
            f"{where} has {rows} rows, and its layer does not split them into heads: give "
            f"it an attribute num_heads or head_dim, whole and a divisor (here "
            f"num_heads={_first_whole(module, HEADS)}, head_dim={_first_whole(module, WIDTHS)}), "
            "or make a QueryKeyPair by hand."
        )
    return H, D


def _first_whole(module: Any, names: tuple[str, ...]) -> int | None:
    """The first of the attributes, of a layer or its config, that is a whole number above 0."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _scale_of(where: str, module: Any, D: int) -> float | None:
    """The factor on q . k; ``scale`` may also be the root that the product is divided by."""
    for name in ("scaling", "scale", "logit_scale", "temperature"):
        value = getattr(module, name, None)
        if isinstance(value, Tensor) and value.requires_grad:
            raise ValueError(
                f"{where} cannot be paired: its {name} is a parameter, which moves the scores "
                "beside queries and keys; freeze it and make a QueryKeyPair by hand."
            )
        if isinstance(value, float) and value > 0.0:
            return None if D > 1 and math.isclose(value, D**0.5) else value
    return None


def _pair(
    name: str,
    module: nn.Module,
    query: HeadProjection,
    key: HeadProjection,
    *,
    scale: float | None,
    causal: bool,
    window: int | None = None,
    layout: str = "half",
    read: Reader | None = None,
) -> QueryKeyPair:
    D = (query.stop - query.start) // query.heads
    norms = [getattr(module, which, None) for which in ("q_norm", "k_norm")]
    norms = [None if isinstance(norm, nn.Identity) else norm for norm in norms]
    for norm in norms:
        gain = getattr(norm, "weight", None)
        if isinstance(gain, Tensor) and gain.shape != (D,):
            raise ValueError(
                f"{name} cannot be paired: its norm of queries and keys reaches over "
                f"{tuple(gain.shape)}, not over the {D} entries of one head."
            )
    return QueryKeyPair(
        name,
        module,
        query,
        key,
        scale=float(AttentionSpec(scale=scale).scale_for(D)),
        q_norm=norms[0],
        k_norm=norms[1],
        causal=bool(causal),
        window=window if isinstance(window, int) and window > 0 else None,
        layout=layout,
        read=read,
    )


class ParameterSlice(NamedTuple):
    """A parameter, or those of its rows that no pair moves."""

    part: nn.Parameter
    whole: nn.Parameter
    region: tuple[slice, ...] | None
    """The place of the part in the whole; None when it is the whole."""


def remaining_parameters(
    pairs: Iterable[QueryKeyPair], parameters: Iterable[nn.Parameter]
) -> list[ParameterSlice]:
    """The parameters without the rows of the pairs, in order.

    A parameter that belongs to the pairs entirely is omitted.

    >>> from fenchel.model import ModelConfig, Transformer
    >>> model = Transformer(ModelConfig(vocabulary=16, width=32, heads=4, layers=1))
    >>> pairs, qkv = attention_pairs(model), model.blocks[0].attention.qkv.weight
    >>> (values,) = remaining_parameters(pairs, [qkv])
    >>> qkv.shape, values.part.shape  # the rows of queries and keys are taken out
    (torch.Size([96, 32]), torch.Size([32, 32]))
    """
    ranges: dict[Tensor, list[tuple[int, int, int]]] = defaultdict(list)
    for pair in pairs:
        for rows in (pair.query, pair.key):
            ranges[rows.weight].append((rows.start, rows.stop, int(rows.columns)))
            if rows.bias is not None:
                ranges[rows.bias].append((rows.start, rows.stop, 0))
    return [piece for p in parameters for piece in _slices_outside(p, ranges.get(p, []))]


def rows_outside(pairs: Iterable[QueryKeyPair], weight: Tensor, size: int) -> list[tuple[int, int]]:
    """The ranges (start, stop) of the ``size`` outputs of a weight that no pair has."""
    taken = [
        (rows.start, rows.stop)
        for pair in pairs
        for rows in (pair.query, pair.key)
        if rows.weight is weight
    ]
    return _gaps(taken, size)


def pass_gradients(optimiser: torch.optim.Optimizer, slices: Iterable[ParameterSlice]) -> None:
    """Before each step of ``optimiser``, set the gradients of the slices that it owns.

    >>> from fenchel.model import ModelConfig, Transformer
    >>> model = Transformer(ModelConfig(vocabulary=16, width=32, heads=4, layers=1))
    >>> slices = remaining_parameters(attention_pairs(model), model.parameters())
    >>> optimiser = torch.optim.SGD([piece.part for piece in slices], lr=0.1)
    >>> pass_gradients(optimiser, slices)
    >>> model(torch.arange(8)[None]).sum().backward()
    >>> optimiser.step()  # moves the value rows of the fused weight, and the rest of the model
    """
    owned = {p for group in optimiser.param_groups for p in group["params"]}
    parts = [piece for piece in slices if piece.region is not None and piece.part in owned]

    def set_gradients(*_: Any) -> None:
        for part, whole, region in parts:
            part.grad = None if whole.grad is None else whole.grad[region]

    if parts:
        optimiser.register_step_pre_hook(set_gradients)


def _slices_outside(p: nn.Parameter, ranges: list[tuple[int, int, int]]) -> list[ParameterSlice]:
    """The parts of p outside of ``ranges`` (start, stop, axis)."""
    if not ranges:
        return [ParameterSlice(p, p, None)]
    axis = ranges[0][2]
    gaps = _gaps([(start, stop) for start, stop, _ in ranges], p.shape[axis])
    indices = [(*(slice(None),) * axis, slice(start, stop)) for start, stop in gaps]
    return [ParameterSlice(nn.Parameter(p.detach()[i], p.requires_grad), p, i) for i in indices]


def _gaps(taken: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """What the ranges leave of 0 to ``size``."""
    gaps, begin = [], 0
    for start, stop in [*sorted(taken), (size, size)]:
        if start > begin:
            gaps.append((begin, start))
        begin = max(begin, stop)
    return gaps


def norm_offset(module: nn.Module, own: Mapping[str, Tensor]) -> float | None:
    """What a norm adds to its weight to get its gain, 0 or 1; None for other modules.

    ``own`` are those of its parameters that count. Entries of alternating sign and size 1 are their
    own norm: the output is the gain and the bias. The module is called with parameters made for it,
    since its own may have no values yet.
    """
    weight = own.get("weight")
    if weight is None or weight.ndim != 1 or list(module.children()):
        return None
    device = torch.device("cpu") if weight.is_meta else weight.device
    gain = torch.linspace(0.5, 1.5, len(weight), dtype=weight.dtype, device=device)
    given, signs = {"weight": gain}, torch.ones_like(gain)
    if "bias" in own:
        given["bias"] = torch.zeros_like(own["bias"], device=device, requires_grad=False)
    signs[1::2] = -1.0
    try:
        with torch.no_grad():
            found = functional_call(module, given, (signs[None],))[0] * signs
        for plus in (0.0, 1.0):
            if torch.allclose(found.float(), gain.float() + plus, rtol=1e-2, atol=1e-2):
                return plus
    except Exception:  # a module with other arguments; what it raises is its own affair
        pass
    return None
