"""Query and key weights of a model: one ``QueryKeyPair`` per attention layer.

The scores of a head are S_ij = scale <R_i n(W_Q x_i + b_Q), R_j n(W_K x_j + b_K)>, with R the
rotation by position (rotary) and n the norm of each query and key (QK-norm), where the model has
them. H query heads share G key heads (GQA), each of width D.

``attention_pairs`` recognises layers by their structure. Layers of fenchel declare the protocol
``QueryKeyLayer``; other models are recognised by the attributes in ``ADAPTERS``:

    qkv              one Linear: H D rows of queries, G D of keys, G D of values     fenchel
    c_attn           one Conv1D: the same as columns, H = G                          GPT-2
    q_proj, k_proj   two Linear maps, with q_norm and k_norm where they exist        Llama, Qwen

A bias is one more column of the weight, multiplied by a constant input of 1. A layer that cannot be
described this way is refused in one sentence (``REFUSALS``); a ``QueryKeyPair`` can be constructed
by hand for it. Cross-attention in an encoder-decoder of fenchel has no pair and is left to other
optimisers. Scores are measured before a soft cap and before a position bias.

**Remaining parameters.** A fused weight holds rows of queries, keys and values. The rows of the
values become a parameter of their own that shares the memory of the fused weight, so moving it
moves the rows, and another optimiser can own it. Before that optimiser steps, the hook of
``pass_gradients`` gives each such parameter its rows of the gradient.

    pairs = attention_pairs(model)
    slices = remaining_parameters(pairs, model.parameters())
    muon = Muon([s.part for s in slices if s.part.ndim == 2])
    pass_gradients(muon, slices)

Slices point into the memory of the weights: create them after the model is on its device.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fenchel.attention import AttentionSpec, Causal, Prior, Window


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


@dataclass(frozen=True, eq=False)
class QueryKeyPair:
    """The query and key weights of one attention layer, and what separates them from the scores."""

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


def attention_pairs(model: nn.Module) -> list[QueryKeyPair]:
    """The query and key weights of every attention layer of ``model``, first layer first.

    >>> from fenchel.model import ModelConfig, Transformer
    >>> pairs = attention_pairs(Transformer(ModelConfig(vocabulary=16, width=32, layers=2)))
    >>> [pair.name for pair in pairs]
    ['blocks.0.attention', 'blocks.1.attention']
    """
    pairs = list(_pairs_of(model))
    if not pairs:
        raise ValueError(
            f"no query and key weights were found in {type(model).__name__}: known are modules "
            "with qkv (fenchel), c_attn (GPT-2) or q_proj and k_proj (Llama, Qwen); make a "
            "QueryKeyPair by hand for others."
        )
    return pairs


def _pairs_of(model: nn.Module) -> Iterator[QueryKeyPair]:
    for name, module in model.named_modules():
        if reason := _refusal(module):
            raise ValueError(f"{name or type(module).__name__} cannot be paired: {reason}.")
        if isinstance(module, QueryKeyLayer):
            yield _fenchel_pair(name, module)
            continue
        for attributes, adapter in ADAPTERS:
            if all(hasattr(module, attribute) for attribute in attributes):
                yield adapter(name, module)
                break


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
    for name in ("qkv", "q_proj", "k_proj"):
        linear = getattr(module, name, None)
        if isinstance(linear, nn.Module) and not _is_plain_linear(linear):
            return f"its {name} is not a plain linear map ({type(linear).__name__})"
    if isinstance(module, QueryKeyLayer) and module.l2:
        return "its scores are not products of queries and keys"
    return None


def _is_plain_linear(linear: nn.Module) -> bool:
    """Whether a Linear multiplies by its weight itself: no adapter, quantisation or gain."""
    if not isinstance(linear, nn.Linear) or hasattr(linear, "gain"):
        return False
    return linear.weight.is_floating_point()


def _fenchel_pair(name: str, layer: QueryKeyLayer) -> QueryKeyPair:
    H, G, D, qkv, mask = layer.heads, layer.groups, layer.head_width, layer.qkv, layer.mask
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
        causal=isinstance(mask, Causal) or (isinstance(mask, Window) and mask.right == 0),
        window=mask.left + 1 if isinstance(mask, Window) and mask.left is not None else None,
        layout=layer.rotary_layout,
    )


def _gpt2_pair(name: str, module: Any) -> QueryKeyPair:
    H, M = int(module.num_heads), int(module.split_size)
    weight, bias = module.c_attn.weight, module.c_attn.bias
    return _pair(
        name,
        module,
        HeadProjection(weight, 0, M, H, bias, columns=True),
        HeadProjection(weight, M, 2 * M, H, bias, columns=True),
        scale=module.scaling,
        causal=True,
    )


def _llama_pair(name: str, module: Any) -> QueryKeyPair:
    q, k = module.q_proj, module.k_proj
    D = getattr(module, "head_dim", None)
    if not isinstance(D, int) or q.out_features % D or k.out_features % D:
        raise ValueError(
            f"{name} does not give the width of its heads: head_dim={D} should divide the "
            f"{q.out_features} rows of q_proj and the {k.out_features} of k_proj."
        )
    return _pair(
        name,
        module,
        HeadProjection(q.weight, 0, q.out_features, q.out_features // D, q.bias),
        HeadProjection(k.weight, 0, k.out_features, k.out_features // D, k.bias),
        scale=getattr(module, "scaling", None),
        causal=getattr(module, "is_causal", True),
        window=getattr(module, "sliding_window", None),
    )


ADAPTERS: tuple[tuple[tuple[str, ...], Callable[[str, Any], QueryKeyPair]], ...] = (
    (("c_attn", "num_heads"), _gpt2_pair),
    (("q_proj", "k_proj"), _llama_pair),
)
"""Foreign layers: the attributes that identify a layout of weights, and its reader."""


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
) -> QueryKeyPair:
    D = (query.stop - query.start) // query.heads
    norms = [getattr(module, which, None) for which in ("q_norm", "k_norm")]
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
    )


class ParameterSlice(NamedTuple):
    """A parameter, or those of its rows that no pair moves."""

    part: nn.Parameter
    whole: nn.Parameter
    region: tuple[slice, ...] | None
    """Where the part lies in the whole; None when it is the whole."""


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
    gaps, begin = [], 0
    for start, stop, _ in [*sorted(ranges), (p.shape[axis], p.shape[axis], axis)]:
        if start > begin:
            gaps.append((begin, start))
        begin = max(begin, stop)
    indices = [(*(slice(None),) * axis, slice(start, stop)) for start, stop in gaps]
    return [ParameterSlice(nn.Parameter(p.detach()[i], p.requires_grad), p, i) for i in indices]
