"""The layer that a torch module computes, found by running the module on a traced tensor.

A module is not judged by its type: a subclass, a hook, a parametrisation or an assigned ``forward``
may compute something else. ``layer_of(f, x)`` runs f on a ``Traced`` tensor, which has the shape of
x and no numbers. Every function of torch that receives it is looked up below by its name; what is
not there is refused by the name of the function and of the module that calls it. So are branches
on values (``if x.sum() > 0``), while branches on shapes are constant near x.

A traced tensor is an expression and a rearrangement. The expression has the value of a token matrix
(N, C), as a function of the input matrix: the input, a layer of another expression, or a sum of
expressions. ``entries`` has the shape of the tensor, and says for each entry which entry of that
matrix it is; views, transpositions, slices and copies act on ``entries`` alone, whatever order of
axes the module prefers. At an attention, queries, keys and values are columns of linear maps of one
expression, and ``entries`` has the columns of each head.

The sum at the end of a residual branch is a layer of the last expression through which every path
from the input leads, its immediate dominator: x + g(x) is ``Residual(g)`` of x, wherever x is from.

The numbers of a traced tensor are nan, so that what does not come by torch's functions (a scripted
function, a custom kernel) cannot pass for a constant. At last the layer is compared with f itself
(``require_agreement``): at x, at random points of the ball and beyond it, within rounding.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from fenchel.attention import AttentionSpec, Causal, Dense, Prior, attend
from fenchel.attention.spec import with_temperature
from fenchel.choice import Softmax
from fenchel.sensitivity.attention_ball import bounded
from fenchel.sensitivity.layers import (
    ActivationLayer,
    Chain,
    ElementwiseAffine,
    GatedLayer,
    LinearLayer,
    NormLayer,
    Residual,
    SelfAttention,
    with_dtype,
)
from fenchel.sensitivity.perturbation import Ball, TokenLayer
from fenchel.torch_internals import nn_functions, without_subclasses

KNOWN = (
    "linear maps, LayerNorm and RMSNorm over one axis, elementwise activations, gated MLPs, "
    "scaled_dot_product_attention, attend, MultiheadAttention, residual sums"
)
_POINTS = 3  # random points of the ball, beside the centre and one further away


class Refused(ValueError):
    """No layer is known for a module; names the part and the reason."""


@final
class Expression:
    """A token matrix (N, width) as a function of the input: an input, a layer of one, or a sum."""

    def __init__(
        self,
        width: int,
        layer: TokenLayer | None = None,
        terms: Sequence[tuple[float, "Expression"]] = (),
    ) -> None:
        self.width, self.layer, self.terms = width, layer, tuple(terms)
        paths = [term.path for _, term in self.terms]
        shared = 0
        while paths and all(len(path) > shared for path in paths):
            if any(path[shared] is not paths[0][shared] for path in paths):
                break
            shared += 1
        self.path: tuple[Expression, ...] = (*(paths[0][:shared] if paths else ()), self)
        """The expressions through which every path from the input to this one leads."""

    @property
    def parent(self) -> "Expression":
        """The expression that ``layer`` is applied to."""
        return self.terms[0][1]


def compose(start: Expression, end: Expression) -> TokenLayer:
    """``end`` as a layer of ``start``, which is on its path."""
    steps = end.path[next(i for i, step in enumerate(end.path) if step is start) :]
    layers = [_step(a, b) for a, b in pairwise(steps)]
    return layers[0] if len(layers) == 1 else Chain(tuple(layers))


def _step(start: Expression, end: Expression) -> TokenLayer:
    """``end`` as a layer of its immediate dominator."""
    if end.layer is not None:
        return end.layer
    skip, branches, terms = 0.0, [], list(end.terms)
    while terms:
        factor, term = terms.pop(0)
        if term is start:
            skip += factor
        elif term.layer is None:  # a sum inside: its terms are terms of this one
            terms = [(factor * inner, part) for inner, part in term.terms] + terms
        else:
            branch = compose(start, term)
            branches.append(
                branch if factor == 1.0 else Chain((branch, ElementwiseAffine(_number(factor))))
            )
    if not branches:
        return ElementwiseAffine(_number(skip))
    return Residual(branches[0], tuple(branches[1:]), skip=skip)


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@final
class Traced(Tensor):
    """The ``entries`` of the matrix of ``expression``; its own numbers are nan."""

    expression: Expression
    entries: Tensor
    viewed: bool

    @staticmethod
    def of(expression: Expression, index: Tensor, like: Tensor) -> "Traced":
        """Traced entries with the dtype and device of ``like``."""
        nan = torch.full((), math.nan, dtype=like.dtype, device=like.device).expand(index.shape)
        traced = nan.as_subclass(Traced)
        traced.expression, traced.entries, traced.viewed = expression, index, False
        return traced

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a function of torch, or refuse it."""
        name = func.__name__
        if name == "__get__":  # an attribute such as x.shape
            name = func.__self__.__name__
            if name in _PASSIVE:
                with without_subclasses():
                    return func(*args, **(kwargs or {}))
            if name not in ("T", "mT", "H", "mH"):
                raise _refusal(f"reads .{name} of a tensor that depends on the input")
            return _view(func, *args)
        if func is not attend and not _is_torch(func, name):
            raise _refusal(f"calls {name}, which is not a function of torch")
        if name in _PASSIVE:
            with without_subclasses():
                return func(*args, **(kwargs or {}))
        handler = partial(_view, func) if name in _VIEWS else _HANDLERS.get(name)
        if handler is None:
            raise _refusal(f"calls {name}, for which no bound is known")
        try:
            signature(handler).bind(*args, **(kwargs or {}))
        except TypeError as error:
            raise _refusal(f"calls {name} with arguments that are not known ({error})") from None
        return handler(*args, **(kwargs or {}))


# What reads shapes, dtypes and the like.
_PASSIVE = frozenset(
    "shape dtype device ndim layout requires_grad is_cuda is_nested is_sparse is_quantized is_meta "
    "is_leaf grad_fn size dim numel nelement __len__ is_floating_point is_complex names "
    "get_device".split()
)
_VIEWS = frozenset(
    "view reshape transpose swapaxes swapdims permute movedim moveaxis flatten unflatten squeeze "
    "unsqueeze chunk split split_with_sizes tensor_split unbind __getitem__ expand expand_as t "
    "narrow select repeat_interleave tile repeat contiguous clone view_as reshape_as flip roll "
    "index_select".split()
)


def _is_torch(func: Any, name: str) -> bool:
    """Whether this is torch's function of that name: patched functions have other objects."""
    homes = (torch, Tensor, functional, torch.special, nn_functions)
    return any(getattr(home, name, None) == func for home in homes)


def _refusal(what: str) -> Refused:
    """Names the innermost module whose code is running."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            return Refused(f"{_names.get(module, '')}{type(module).__name__} {what}")
        frame = frame.f_back  # type: ignore[assignment]
    return Refused(f"f {what}")


_names: dict[nn.Module, str] = {}
"""Submodules of the module that is being traced, as 'path' and a space."""


# Rearrangements -----------------------------------------------------------------------------------


def _view(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A function that moves entries, applied to the indices."""
    sources = [part for part in args if isinstance(part, Traced)]
    x = args[0]
    if not isinstance(x, Traced) or (len(sources) > 1 and func.__name__ not in _AS):
        raise _refusal(f"calls {func.__name__} with an argument that depends on the input")
    moved = func(*(part.entries if isinstance(part, Traced) else part for part in args), **kwargs)
    x.viewed = True
    if isinstance(moved, tuple | list):
        return type(moved)(_shared(x, part) for part in moved)
    return _shared(x, moved)


_AS = ("expand_as", "view_as", "reshape_as")


def _shared(x: Traced, index: Tensor) -> Traced:
    view = Traced.of(x.expression, index, x)
    view.viewed = True
    return view


def _tokens(x: Traced) -> Expression:
    """The expression whose matrix has the entries of x in order, with as many columns as x has."""
    N, C = _N[-1], x.expression.width
    if x.dim() and x.entries.numel() == N * x.shape[-1]:
        index = x.entries.reshape(N, -1)
        columns = index[0]
        if torch.equal(index, torch.arange(N)[:, None] * C + columns) and bool((columns < C).all()):
            if torch.equal(columns, torch.arange(C)):
                return x.expression
            return _select(x.expression, columns, x)
    raise _refusal(
        f"applies a function of tokens to a tensor of shape {tuple(x.shape)}, in which tokens are "
        f"not the {N} rows"
    )


_N: list[int] = []
"""The number of tokens of the trace that is under way."""


def _select(expression: Expression, columns: Tensor, like: Tensor) -> Expression:
    """Some columns of a matrix."""
    layer = expression.layer
    if isinstance(layer, LinearLayer):
        b = None if layer.b is None else layer.b[..., columns.to(layer.b.device)]
        W = layer.W[:, columns.to(layer.W.device)]
        return _apply(LinearLayer(W, b), expression.parent, len(columns))
    W = torch.zeros(expression.width, len(columns), dtype=like.dtype, device=like.device)
    W[columns.to(like.device), torch.arange(len(columns), device=like.device)] = 1.0
    return _apply(LinearLayer(W), expression, len(columns))


def _apply(layer: TokenLayer, expression: Expression, width: int | None = None) -> Expression:
    return Expression(expression.width if width is None else width, layer, [(1.0, expression)])


def _ordered(expression: Expression, like: Tensor) -> Traced:
    """The matrix itself, with the leading axes of ``like``."""
    index = torch.arange(_N[-1] * expression.width)
    return Traced.of(expression, index.reshape(*like.shape[:-1], expression.width), like)


# Functions of tokens ------------------------------------------------------------------------------


def _constant(value: Any, what: str) -> Tensor:
    if isinstance(value, Traced):
        raise _refusal(f"computes {what} from the input")
    if not isinstance(value, Tensor):
        raise _refusal(f"takes {type(value).__name__} for {what}")
    return value.detach()


def _optional(value: Any, what: str) -> Tensor | None:
    return None if value is None else _constant(value, what)


def _linear(input: Any, weight: Any, bias: Any = None) -> Traced:
    W, b = _constant(weight, "a weight"), _optional(bias, "a bias")
    if not isinstance(input, Traced) or W.dim() != 2 or W.shape[1] != input.shape[-1]:
        raise _refusal("calls linear with a weight that is not (M', M)")
    return _linear_map(input, W.mT, b)


def _linear_map(x: Traced, W: Tensor, b: Tensor | None) -> Traced:
    tokens = _tokens(x)
    layer, inner = LinearLayer(W, b), tokens.layer
    if isinstance(inner, SelfAttention) and inner.W_O is None:  # the output projection of heads
        return _ordered(_apply(replace(inner, W_O=W, bias=b), tokens.parent, W.shape[1]), x)
    return _ordered(_apply(layer, tokens, W.shape[1]), x)


def _matmul(input: Any, other: Any) -> Traced:
    if not isinstance(input, Traced) or isinstance(other, Traced) or other.dim() != 2:
        raise _refusal("multiplies matrices that are not tokens times a constant matrix")
    return _linear_map(input, other.detach(), None)


def _layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Traced:
    return _norm("layer", input, normalized_shape, weight, bias, eps)


def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Traced:
    return _norm("rms", input, normalized_shape, weight, None, eps)


def _norm(kind: str, x: Any, shape: Any, weight: Any, bias: Any, eps: float | None) -> Traced:
    if not isinstance(x, Traced) or len(shape) != 1:
        raise _refusal(f"normalises over {len(shape)} axes")
    weight, bias = _optional(weight, "a gain"), _optional(bias, "a bias")
    return _ordered(_apply(NormLayer(weight, bias, eps, kind), _tokens(x)), x)


def _activation(name: str) -> Callable[..., Traced]:
    def handler(input: Any, inplace: bool = False) -> Traced:
        y = _elementwise(name, input)
        return _in_place(input, y) if inplace else y

    return handler


def _elementwise(name: str, x: Any) -> Traced:
    try:
        return _ordered(_apply(ActivationLayer(name), _tokens(x)), x)
    except Refused:  # heads apart: the same function of every entry
        return Traced.of(_apply(ActivationLayer(name), x.expression), x.entries, x)


def _gelu(input: Any, approximate: str = "none") -> Traced:
    return _elementwise("gelu" if approximate == "none" else "gelu_tanh", input)


def _leaky_relu(input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Traced:
    if negative_slope != 0.01:
        raise _refusal(f"has a leaky ReLU of slope {negative_slope}; 0.01 is known")
    return _activation("leaky_relu")(input, inplace)


def _elu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Traced:
    if alpha != 1.0:
        raise _refusal(f"has an ELU of alpha {alpha}; 1 is known")
    return _activation("elu")(input, inplace)


def _softplus(input: Any, beta: float = 1.0, threshold: float = 20.0) -> Traced:
    if (beta, threshold) != (1.0, 20.0):
        raise _refusal("has a softplus of another beta or threshold than torch's own")
    return _elementwise("softplus", input)


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if training and p > 0.0:
        raise _refusal(f"drops a share of {p} at random; call f.eval() first")
    return input if inplace else _view(torch.clone, input)


def _to(input: Any, *args: Any, **kwargs: Any) -> Traced:
    """A conversion to the same dtype and device."""
    with without_subclasses():
        like: list[Any] = [part.dtype if isinstance(part, Traced) else part for part in args]
        target: Tensor = torch.empty_like(input[..., :0]).to(*like, **kwargs)
    if (target.dtype, target.device) != (input.dtype, input.device):
        raise _refusal(f"converts from {input.dtype} to {target.dtype}")
    return _view(torch.clone, input)  # type: ignore[no-any-return]


def _same_dtype(dtype: torch.dtype) -> Callable[[Any], Traced]:
    return lambda input: _to(input, dtype)


# Arithmetic ---------------------------------------------------------------------------------------


def _add(input: Any, other: Any, *, alpha: float = 1) -> Traced:
    return _sum(input, other, 1.0, float(alpha))


def _sub(input: Any, other: Any, *, alpha: float = 1) -> Traced:
    return _sum(input, other, 1.0, -float(alpha))


def _rsub(input: Any, other: Any) -> Traced:
    return _sum(input, other, -1.0, 1.0)


def _sum(a: Any, b: Any, first: float, second: float) -> Traced:
    """first a + second b."""
    if not isinstance(a, Traced):
        a, b, first, second = b, a, second, first
    if not isinstance(b, Traced):
        return _affine(a, _number(first) if first != 1.0 else None, _spread(b, a) * second)
    if a.shape != b.shape:
        raise _refusal(f"adds tensors of shapes {tuple(a.shape)} and {tuple(b.shape)}")
    if a.expression.width == b.expression.width and torch.equal(a.entries, b.entries):
        total = Expression(
            a.expression.width, terms=[(first, a.expression), (second, b.expression)]
        )
        return Traced.of(total, a.entries, a)
    left, right = _tokens(a), _tokens(b)
    return _ordered(Expression(left.width, terms=[(first, left), (second, right)]), a)


def _mul(input: Any, other: Any) -> Traced:
    if not isinstance(input, Traced):
        input, other = other, input
    if not isinstance(other, Traced):
        return _affine(input, _spread(other, input), None)
    a, b = _tokens(input), _tokens(other)
    for gate, up in ((a, b), (b, a)):
        gated = _gated(gate, up)
        if gated is not None and input.shape == other.shape:
            return _ordered(gated, input)
    raise _refusal("multiplies two tensors that depend on the input, other than a gate")


def _gated(gate: Expression, up: Expression) -> Expression | None:
    """activation(x W_G) * x W_U as one layer, where the two are that."""
    name = "identity"
    if isinstance(gate.layer, ActivationLayer):
        name, gate = gate.layer.name, gate.parent
    G, U = gate.layer, up.layer
    if not isinstance(G, LinearLayer) or not isinstance(U, LinearLayer):
        return None
    if gate.parent is not up.parent:
        return None
    layer = GatedLayer(G.W, U.W, name, (G.b, U.b))
    return _apply(layer, gate.parent, up.width)


def _div(input: Any, other: Any) -> Traced:
    if not isinstance(input, Traced) or isinstance(other, Traced):
        raise _refusal("divides by a tensor that depends on the input")
    return _affine(input, 1.0 / _spread(other, input), None)


def _neg(input: Any) -> Traced:
    return _affine(input, _spread(-1.0, input), None)


def _spread(constant: Any, x: Traced) -> Tensor:
    """A constant as entries of the matrix of x: a number, a row (C,) or a matrix (N, C).

    In float64, after the rounding to the dtype of x that torch applies to it.
    """
    with without_subclasses():
        value: Tensor = torch.as_tensor(constant, device=x.device).detach()
        if value.dim() and value.is_floating_point() and value.dtype != x.dtype:
            raise _refusal(f"combines {x.dtype} and {value.dtype}")
        value = value.to(x.dtype).double()
        if value.numel() == 1 and value.dim() <= x.dim():
            return value.reshape(())
        over = zip(value.shape[::-1], x.shape[::-1], strict=False)
        if value.dim() > x.dim() or any(a not in (1, b) for a, b in over):
            raise _refusal(
                f"combines shapes {tuple(x.shape)} and {tuple(value.shape)} into a larger one"
            )
        if value.dim() == 1 or value.shape[:-1].numel() == 1:
            return value.reshape(-1).expand(x.shape[-1])
        return value.expand(x.shape).reshape(_N[-1], -1)


def _affine(x: Traced, weight: Tensor | None, shift: Tensor | None) -> Traced:
    number = all(part is None or part.dim() == 0 for part in (weight, shift))
    layer = ElementwiseAffine(weight, shift)
    if number:
        return Traced.of(_apply(layer, x.expression), x.entries, x)
    return _ordered(_apply(layer, _tokens(x)), x)


def _in_place(x: Any, value: Traced) -> Traced:
    """x becomes ``value``; refused where another tensor may share its memory."""
    if not isinstance(x, Traced) or x.viewed or x.shape != value.shape:
        raise _refusal("changes a tensor in place that others may be views of")
    x.expression, x.entries = value.expression, value.entries
    return x


def _changing(handler: Callable[..., Traced]) -> Callable[..., Traced]:
    return lambda input, *args, **kwargs: _in_place(input, handler(input, *args, **kwargs))


# Attention ----------------------------------------------------------------------------------------


def _heads(x: Any) -> list[tuple[Expression, Tensor, Tensor | None]]:
    """Ways to write x (..., heads, N, D) as linear maps per head: expression, W (H, M, D), b."""
    N, C = _N[-1], x.expression.width if isinstance(x, Traced) else 0
    if not isinstance(x, Traced) or x.dim() < 2 or x.shape[-2] != N:
        raise _refusal("attends with queries, keys or values that are not tokens of the input")
    index = x.entries.reshape(-1, N, x.shape[-1])
    columns = index[:, 0]
    if not torch.equal(index, torch.arange(N)[:, None] * C + columns[:, None]) or bool(
        (columns >= C).any()
    ):
        raise _refusal("attends among tensors whose rows are not the tokens")
    eye = torch.eye(C, dtype=x.dtype, device=x.device)
    ways = [(x.expression, eye[:, columns.to(eye.device)].transpose(0, 1), None)]
    layer = x.expression.layer
    if isinstance(layer, LinearLayer):
        W = layer.W[:, columns.to(layer.W.device)].transpose(0, 1)
        b = None if layer.b is None else layer.b[columns.to(layer.b.device)]
        ways.insert(0, (x.expression.parent, W, b))  # type: ignore[arg-type]
    return ways  # type: ignore[return-value]


def _self_attention(
    q: Any, k: Any, v: Any, spec: AttentionSpec, sink: Tensor | None = None
) -> Traced:
    ways = [_heads(x) for x in (q, k, v)]
    for expression in (way[0] for way in ways[0]):
        parts = [next((w for w in way if w[0] is expression), None) for way in ways]
        if None not in parts:
            break
    else:
        raise _refusal("attends with queries, keys and values that are not linear maps of one x")
    if not bounded(spec.choice) or spec.softcap is not None:
        raise _refusal(f"chooses by {spec.choice!r} with softcap={spec.softcap}, without a bound")
    (W_Q, W_K, W_V), biases = zip(*(part[1:] for part in parts if part), strict=True)
    H, E = W_Q.shape[0], W_V.shape[-1]
    if W_K.shape[0] != W_V.shape[0] or H % W_K.shape[0]:
        raise _refusal(f"attends with {H} heads of queries and {W_K.shape[0]} of keys")
    layer = SelfAttention(
        W_Q,
        W_K,
        W_V,
        choice=spec.choice,
        prior=spec.prior,
        scale=spec.scale,
        biases=tuple(biases),
        sink=None if sink is None else sink.to(W_Q.dtype).expand(H),
    )
    index = torch.arange(_N[-1] * H * E).reshape(_N[-1], H, E).transpose(0, 1)
    shape = (*q.shape[:-1], E)
    return Traced.of(_apply(layer, expression, H * E), index.reshape(shape), q)


def _sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Traced:
    if dropout_p > 0.0:
        raise _refusal(f"drops a share of {dropout_p} at random; call f.eval() first")
    if not enable_gqa and any(x.shape[:-2] != query.shape[:-2] for x in (key, value)):
        raise _refusal("attends with other heads of keys than of queries and no enable_gqa")
    prior: Prior | None = Causal() if is_causal else None
    if attn_mask is not None:
        prior = _dense(_constant(attn_mask, "a mask"))
    return _self_attention(query, key, value, AttentionSpec(Softmax(), prior, scale))


def _dense(mask: Tensor) -> Dense:
    return Dense(mask.reshape(mask.shape[-4:]) if mask.dim() > 4 else mask)


def _attend(
    q: Any,
    k: Any,
    v: Any,
    *,
    sink: Any = None,
    beta: Any = None,
    dropout: float = 0.0,
    backend: str = "auto",  # noqa: ARG001
    return_weights: bool = False,
    **keywords: Any,
) -> Any:
    if dropout > 0.0:
        raise _refusal(f"drops a share of {dropout} at random; call f.eval() first")
    spec = AttentionSpec(**keywords)
    if beta is not None:
        spec = replace(spec, choice=with_temperature(spec.choice, _number_or(beta, "a beta")))
    if sink is not None:
        sink = torch.as_tensor(_number_or(sink, "a sink"), dtype=torch.float64)
        if sink.dim() > 1:
            raise _refusal("attends with a sink per query, for which no bound is known")
    out = _self_attention(q, k, v, spec, sink)
    return (out, _unknown(out)) if return_weights else out


def _number_or(x: Any, what: str) -> Any:
    return _constant(x, what) if isinstance(x, Tensor) else x


def _unknown(like: Tensor) -> Tensor:
    """A value that the layer does not follow: whatever uses it becomes nan, and differs from f."""
    return torch.full((), math.nan, dtype=like.dtype, device=like.device)


def _multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,  # noqa: ARG001
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,  # noqa: ARG001
    is_causal: bool = False,
) -> tuple[Traced, Tensor | None]:
    """torch.nn.MultiheadAttention after its axes are in order: (N, M) or (N, 1, M)."""
    if training and dropout_p > 0.0:
        raise _refusal(f"drops a share of {dropout_p} of the weights; call f.eval() first")
    extra = {"bias_k": bias_k, "bias_v": bias_v, "static_k": static_k, "static_v": static_v}
    extra |= {"key_padding_mask": key_padding_mask, "add_zero_attn": add_zero_attn or None}
    named = [name for name, part in extra.items() if part is not None]
    if named:
        raise _refusal(f"attends with {named[0]}, for which no bound is known")
    if query.dim() == 3 and query.shape[1] != 1:
        raise _refusal(
            f"takes {query.shape[1]} sequences of {query.shape[0]} tokens; without "
            "batch_first=True the tokens are the first axis"
        )
    if use_separate_proj_weight:
        matrices = [_constant(w, "a weight") for w in (q_proj_weight, k_proj_weight, v_proj_weight)]
    else:
        matrices = list(_constant(in_proj_weight, "a weight").chunk(3))
    b = _optional(in_proj_bias, "a bias")
    biases = [None] * 3 if b is None else list(b.chunk(3))
    q, k, v = (
        _linear(x, W, bias).reshape(_N[-1], num_heads, -1).transpose(0, 1)
        for x, W, bias in zip((query, key, value), matrices, biases, strict=True)
    )
    prior: Prior | None = None
    if attn_mask is not None:
        mask = _constant(attn_mask, "a mask")
        prior = Dense(~mask if mask.dtype == torch.bool else mask)
    elif is_causal:
        prior = Causal()
    out = _self_attention(q, k, v, AttentionSpec(Softmax(), prior, None))
    joined = out.transpose(0, 1).reshape(*query.shape[:-1], -1)
    y = _linear(joined, out_proj_weight, out_proj_bias)
    return y, _unknown(y) if need_weights else None


_NAMED: dict[Callable[..., Any], str] = {
    _add: "add __add__ __radd__",
    _sub: "sub subtract __sub__",
    _rsub: "rsub __rsub__",
    _mul: "mul multiply __mul__ __rmul__",
    _div: "div divide true_divide __truediv__",
    _neg: "neg negative __neg__",
    _linear: "linear",
    _matmul: "matmul mm __matmul__",
    _layer_norm: "layer_norm",
    _rms_norm: "rms_norm",
    **{_activation(name): name for name in ("relu", "silu", "mish", "tanh", "sigmoid")},
    _gelu: "gelu",
    _leaky_relu: "leaky_relu",
    _elu: "elu",
    _softplus: "softplus",
    _dropout: "dropout",
    _to: "to type_as",
    _same_dtype(torch.float32): "float",
    _same_dtype(torch.float64): "double",
    _sdpa: "scaled_dot_product_attention",
    _multi_head_attention: "multi_head_attention_forward",
    _attend: "attend",
    _changing(_add): "add_ __iadd__",
    _changing(_sub): "sub_ __isub__",
    _changing(_mul): "mul_ __imul__",
    _changing(_div): "div_ __itruediv__",
    **{_changing(_activation(name)): f"{name}_" for name in ("relu", "tanh", "sigmoid")},
}
_HANDLERS = {name: handler for handler, names in _NAMED.items() for name in names.split()}


# Reading a module ---------------------------------------------------------------------------------


def layer_of(f: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> TokenLayer:
    """The layer that ``call``, f as a function of tokens (N, M), computes on tensors like x."""
    if x.dim() != 2 or not len(x):
        raise Refused("f has an input without tokens")
    start = Expression(x.shape[1])
    with _tracing(f, len(x)):
        traced = Traced.of(start, torch.arange(x.numel()).reshape(x.shape), x)
        out = call(traced)
        if not isinstance(out, Traced):
            raise Refused("f gives a tensor that does not come from its input by torch's functions")
        end = _tokens(out)
    return ActivationLayer("identity") if end is start else compose(start, end)


@contextmanager
def _tracing(f: nn.Module, N: int) -> Iterator[None]:
    """Eager modules with names; attributes that a forward assigns are taken back."""
    names = {module: f"{name} " if name else "" for name, module in f.named_modules()}
    attributes = [(module.__dict__, dict(module.__dict__)) for module in f.modules()]
    buffers = [(module._buffers, dict(module._buffers)) for module in f.modules()]
    _names.update(names)
    _N.append(N)
    try:
        # Without dynamo nothing is compiled, and importing it takes a second.
        compiles = "torch._dynamo" in sys.modules
        eager = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
        with torch.no_grad(), eager:
            yield
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"f cannot be followed ({type(error).__name__}: {error})") from error
    finally:
        _N.pop()
        _names.clear()
        for live, saved in attributes + buffers:
            live.clear()
            live.update(saved)


def require_agreement(
    layer: TokenLayer,
    call: Callable[[Tensor], Tensor],
    x: Tensor,
    ball: Ball,
    generator: torch.Generator | None,
) -> None:
    """Compare the layer with the function at x, in the ball, and at a distance of |x|."""
    exact, rough = (with_dtype(layer, d, x.dtype) for d in (torch.float64, torch.float32))
    moves = [torch.zeros_like(x)]
    for scale in (ball.total,) * _POINTS + (float(x.norm()) or 1.0,):
        move = torch.randn(x.shape, dtype=torch.float64, generator=generator).to(x)
        moves.append(move * (scale / move.norm()) if scale == ball.total else 0.5 * scale * move)
    eps, single = torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps
    for index, move in enumerate(moves):
        point = x + (ball.within(move) if index <= _POINTS else move)
        with torch.no_grad():
            found, expected = call(point.clone()).double(), exact(point.double())
            if found.shape != expected.shape:
                raise Refused(
                    f"f gives {tuple(found.shape)} and its layers {tuple(expected.shape)}"
                )
            near = rough(point.float()).double()
        size = float(expected.abs().amax()) if expected.numel() else 0.0
        # The rounding of the same steps in float32, at the precision of x.
        rounding = float((near - expected).abs().amax()) * eps / single if near.numel() else 0.0
        allowed = 64.0 * rounding + 256.0 * eps * size
        gap = float((found - expected).abs().amax()) if found.numel() else 0.0
        if not (gap <= allowed and math.isfinite(size)):
            raise Refused(
                f"f differs by {gap:.3g} of {size:.3g} from the layers that its code shows, so it "
                "changes from call to call or computes by other means"
            )
