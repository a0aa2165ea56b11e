"""Certificates of every attention layer of a model on a text: how sensitive it is in a ball.

For the attention of layer l, as a map of its own input x = norm(stream), (T, M), to the stream,

    f(x) = W_O attend(R W_Q x + ..., R W_K x + ..., W_V x + ...),        all heads together,

``fenchel.sensitivity.certify`` bounds the largest spectral norm of its Jacobian over all inputs
x' within a radius of the x that the text produces:

    centre   the norm at x itself, a bracket
    lower    attained at a point of the ball, the witness, found by ascent
    upper    exceeded nowhere in the ball: |f(x') - f(x'')| <= upper |x' - x''|

Rotary positions, grouped keys, biases, windows and position biases are part of f. The norm layer
before it is not: after a norm every token has about the length sqrt(M), so a radius means the same
in every layer. ``certify_layers`` covers the Transformers of fenchel.model: runs, and checkpoints
of the known families. A layer without a known bound is listed with the reason.

Whole blocks (``Search.blocks``): f is the block, a map of the stream to the stream,

    f(x) = y + a mlp(norm(y)),    y = x + a attention(norm(x)),        or its other forms
                                                                       (fenchel/model/block.py),

with norm layers, plain or gated MLP and residual branches as layers of fenchel.sensitivity. The
ball is then about the stream.

Both ends are computed in float64; the ascent is in float64 unless another dtype is given. T
tokens, M width of the stream, H heads, G heads of keys and values, D width per head.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fenchel.attention import AttentionSpec
from fenchel.attention.bias import Sink
from fenchel.attention.prior import Prior, PriorSelection
from fenchel.data import ProgressCallback
from fenchel.inspection.blocks import to_interval
from fenchel.inspection.our_model import OurModel, record_pass
from fenchel.inspection.recorder import BlockRecord
from fenchel.inspection.trace import InspectedModel
from fenchel.inspection_result import Certificates, HeadCertificate, LayerCertificate
from fenchel.model import Transformer
from fenchel.model.attention import GATE_ACTIVATIONS, Attention
from fenchel.model.block import Block
from fenchel.model.forward_context import ForwardContext
from fenchel.model.mlp import ACTIVATIONS, Mlp
from fenchel.model.norm import RMSNormPlusOne
from fenchel.model.sigma_linear import matrix_of
from fenchel.sensitivity import certify, spectral_norm
from fenchel.sensitivity.attention_ball import bounded
from fenchel.sensitivity.layers import (
    ActivationLayer,
    Chain,
    GatedLayer,
    LinearLayer,
    NormLayer,
    OutputGate,
    Residual,
    SelfAttention,
    rotation_matrices,
    with_dtype,
)
from fenchel.sensitivity.perturbation import Ball, NormEstimator, TokenLayer

_AGREEMENT = 1e-3  # of the largest output, between what is written out and the model's own


class Search(NamedTuple):
    """How the ends of a certificate are computed."""

    steps: int = 20
    """Steps of ascent per start, for the lower end."""
    restarts: int = 1
    """Random starts beside the centre and its top singular vector."""
    failure: float = 1e-9
    """Failure probability of one norm at the centre, for the upper end."""
    heads: bool = False
    """Whether every head gets an upper end of its own."""
    dtype: torch.dtype = torch.float64
    blocks: bool = False
    """Whether blocks are certified, rather than the attention in them."""


SEARCH = Search()


def transformer_of(model: InspectedModel) -> Transformer:
    """The Transformer that can be certified; refuses models of transformers."""
    if not isinstance(model, OurModel):
        raise ValueError(
            f"{model.name} is read through transformers; certificates cover runs and the families "
            "that fenchel reads itself (fenchel list families)."
        )
    return model.model


def certify_layers(
    model: InspectedModel,
    ids: Tensor,
    radius: float,
    norm: str,
    layers: Sequence[int],
    search: Search,
    generator: torch.Generator,
    progress: ProgressCallback,
) -> Certificates:
    """Certificates of the layers with indices ``layers`` on ids (1, T)."""
    records = record_pass(transformer_of(model), ids).records
    certificates = []
    for done, index in enumerate(layers):
        progress("certificates", done, len(layers))
        certificates.append(
            certify_layer(records[index], index + 1, radius, norm, search, generator)
        )
    progress("certificates", len(layers), len(layers))
    return Certificates(
        level="block" if search.blocks else "attention",
        radius=radius,
        norm=norm,
        dtype=str(search.dtype).removeprefix("torch."),
        layers=certificates,
    )


def certify_layer(
    record: BlockRecord,
    number: int,
    radius: float,
    norm: str,
    search: Search,
    generator: torch.Generator,
) -> LayerCertificate:
    """The certificate of one attention layer, or of its block, or why there is none."""
    reason = (why_no_block if search.blocks else why_not)(record)
    if reason is not None:
        return LayerCertificate(layer=number, refused=f"layer {number} {reason}.")
    part = record.block if search.blocks else record.attention
    assert part is not None
    x, failure = part.x[0].to(search.dtype), search.failure
    layer: TokenLayer = (block_layer if search.blocks else self_attention_layer)(
        record, search.dtype
    )
    what = "attention" if isinstance(part.module, Attention) else "block"
    require_agreement(layer(x), part.output[0], f"{what} of layer {number}")
    exact: TokenLayer = with_dtype(layer, torch.float64, search.dtype)
    J = exact.jacobian(x.double())
    centre = spectral_norm(J, tol=1e-3, failure=failure, generator=generator)
    certificate = certify(
        layer,
        x,
        radius,
        norm,
        failure=failure,
        steps=search.steps,
        restarts=search.restarts,
        generator=generator,
    )
    moves = (certificate.witness - x).square().sum(-1).double()
    share = moves / moves.sum() if float(moves.sum()) > 0 else torch.zeros_like(moves)
    heads = []
    if search.heads and isinstance(layer, SelfAttention):
        heads = _certify_heads(layer, x, radius, norm, failure, generator)
    return LayerCertificate(
        layer=number,
        centre=to_interval(centre),
        lower=max(certificate.lower, float(centre.lower)),
        upper=certificate.upper if math.isfinite(certificate.upper) else None,
        failure=certificate.failure,
        token_norm=float(x.norm(dim=-1).mean()),
        moved=[float(f"{part:.4g}") for part in share.tolist()],
        heads=heads,
    )


def why_not(record: BlockRecord) -> str | None:
    """Why there is no certificate for this attention; None where there is one."""
    if record.call is None:
        return _unbounded({"is a gated DeltaNet": True})
    (module, context), spec = _attention(record)
    beta = module.temperature(context)
    return _unbounded(
        {
            "scales its queries by their position": beta is not None
            and not bool((beta == 1).all()),
            "makes its sinks of its input": module.sink_map is not None,
            f"attends to the keys of layer {module.kv_source + 1}": module.kv_source
            != module.layer,
            "makes its values by a norm": module.v_norm is not None or not module.rows[2],
            "scores by distance": module.l2,
            "normalises all heads together": module.joint_norm,
            "caps its scores": spec.softcap is not None,
            f"chooses by {spec.choice!r}": not bounded(spec.choice),
        }
    )


def _unbounded(reasons: Mapping[str, bool]) -> str | None:
    """The first of the reasons that holds, as part of a sentence."""
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    return None if reason is None else f"{reason}, for which no bound over a ball is known here"


def why_no_block(record: BlockRecord) -> str | None:
    """Why there is no certificate for this block; None where there is one."""
    block = record.block.module
    assert isinstance(block, Block)
    mlp = block.mlp
    reason = _unbounded(
        {
            "attends to an encoder": block.cross_attention is not None,
            "chooses among experts": not isinstance(mlp, Mlp),
            "goes on after its MLP": block.per_layer_gate is not None
            or block.layer_scale is not None,
            "clamps its gated MLP": isinstance(mlp, Mlp) and mlp.clamped,
        }
    )
    return reason or why_not(record)


def block_layer(record: BlockRecord, dtype: torch.dtype) -> TokenLayer:
    """The block at its input as a layer of fenchel.sensitivity."""
    block = record.block.module
    attention = self_attention_layer(record, dtype)
    assert isinstance(block, Block)
    assert isinstance(block.mlp, Mlp)
    mlp = mlp_layer(block.mlp, dtype)

    def norms(module: nn.Module | None) -> tuple[NormLayer, ...]:
        if module is None or isinstance(module, nn.Identity):
            return ()
        return (norm_layer(module, dtype),)

    before = norms(block.attention_norm), norms(block.mlp_norm)
    if block.post:
        first, second = Residual(attention, (), block.scale), Residual(mlp, (), block.scale)
        return Chain((first, *before[0], second, *before[1]))
    after = norms(block.attention_post_norm), norms(block.mlp_post_norm)
    branches = [
        Chain((*norm, branch, *post))
        for norm, branch, post in zip(before, (attention, mlp), after, strict=True)
    ]
    if block.parallel:
        return Residual(branches[0], (branches[1],), block.scale)
    return Chain(tuple(Residual(branch, (), block.scale) for branch in branches))


def norm_layer(module: nn.Module, dtype: torch.dtype) -> NormLayer:
    """A norm of fenchel.model as a layer of fenchel.sensitivity."""
    assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
    weight, bias = (
        None if part is None else part.detach().to(dtype)
        for part in (module.weight, getattr(module, "bias", None))
    )
    if isinstance(module, RMSNormPlusOne):
        weight = 1.0 + module.weight.detach().to(dtype)
    kind = "layer" if isinstance(module, nn.LayerNorm) else "rms"
    return NormLayer(weight, bias, module.eps, kind)


def mlp_layer(module: Mlp, dtype: torch.dtype) -> Chain:
    """An MLP of fenchel.model, plain or gated, as layers of fenchel.sensitivity."""

    def matrix(part: nn.Linear) -> tuple[Tensor, Tensor | None]:
        bias = None if part.bias is None else part.bias.detach().to(dtype)
        return matrix_of(part).detach().to(dtype).mT, bias

    name = next(name for key, name in _SLOPES.items() if ACTIVATIONS[key] is module.activation)
    (W_U, b_U), (W_D, b_D) = matrix(module.up), matrix(module.down)
    if module.gate is None:
        return Chain((LinearLayer(W_U, b_U), ActivationLayer(name), LinearLayer(W_D, b_D)))
    W_G, b_G = matrix(module.gate)
    return Chain((GatedLayer(W_G, W_U, name, (b_G, b_U)), LinearLayer(W_D, b_D)))


# Settings of an MLP, and the activation in it as fenchel.sensitivity names it.
_SLOPES = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def self_attention_layer(record: BlockRecord, dtype: torch.dtype) -> SelfAttention | Chain:
    """The attention module at its input as a layer of fenchel.sensitivity.

    With an output gate: the heads side by side, their gate, and W_O.
    """
    (module, context), spec = _attention(record)
    H, D = module.heads, module.head_width
    matrices, biases = projections(module, dtype)
    angles, rotations = module.angles(context), None
    if angles is not None:
        rotations = rotation_matrices(angles, D, layout=module.rotary_layout).to(dtype)
    qk_norm = None
    if module.q_norm is not None and module.k_norm is not None:
        qk_norm = norm_layer(module.q_norm, dtype), norm_layer(module.k_norm, dtype)
    prior: Prior | None = spec.prior
    sink = None
    if isinstance(prior, Sink):
        sink = prior.by_query.detach().to(dtype).flatten()
        prior = prior.prior
    W_O = matrix_of(module.out).detach().to(dtype).mT
    b_O = None if module.out.bias is None else module.out.bias.detach().to(dtype)
    layer = SelfAttention(
        *matrices,
        W_O,
        choice=spec.choice,
        prior=prior,
        scale=spec.scale,
        biases=biases,
        rotations=rotations,
        qk_norm=qk_norm,
        bias=b_O,
        sink=sink,
    )
    if module.output_gate is None:
        return layer
    W_G, offset = matrix_of(module.output_gate).detach().to(dtype).mT, module.output_gate.bias
    each = H * D // W_G.shape[-1]  # a gate per head serves all entries of the head
    b_G = None if offset is None else offset.detach().to(dtype).repeat_interleave(each)
    name = next(n for n, f in GATE_ACTIVATIONS.items() if f is module.gate_activation)
    inner = replace(layer, W_O=None, bias=None)
    gate = OutputGate(inner, W_G.repeat_interleave(each, -1), name, b_G)
    return Chain((gate, LinearLayer(W_O, b_O)))


Projections = tuple[Tensor, Tensor, Tensor]


def projections(
    module: Attention, dtype: torch.dtype
) -> tuple[Projections, Projections | tuple[None, None, None]]:
    """W_Q, W_K, W_V (H or G, M, D), and their biases (H or G, D) where there are any."""
    D, bias = module.head_width, module.qkv.bias
    W_Q, W_K, W_V = (
        rows.detach().to(dtype).view(-1, D, rows.shape[-1]).mT
        for rows in torch.split_with_sizes(matrix_of(module.qkv), module.rows)
    )
    if bias is None:
        return (W_Q, W_K, W_V), (None, None, None)
    b_Q, b_K, b_V = (
        rows.detach().to(dtype).view(-1, D) for rows in torch.split_with_sizes(bias, module.rows)
    )
    return (W_Q, W_K, W_V), (b_Q, b_K, b_V)


def _attention(record: BlockRecord) -> tuple[tuple[Attention, ForwardContext], AttentionSpec]:
    """The attention module of a block, the context that it was called with, and how it attends."""
    assert record.attention is not None
    assert record.call is not None
    module, context = record.attention.module, record.attention.arguments.args[1]
    assert isinstance(module, Attention)
    assert isinstance(context, ForwardContext)
    return (module, context), record.call.spec


def split_heads(layer: SelfAttention) -> list[SelfAttention]:
    """One layer per head with its own rows of W_O: their outputs add up to the layer's."""
    assert layer.W_O is not None
    H, G = len(layer.W_Q), len(layer.W_K)
    rows, prior = layer.W_O.reshape(H, -1, layer.W_O.shape[-1]), layer.prior
    b_q, b_k, b_v = layer.biases
    per_head = layer.choice.tensors()

    def head(h: int) -> SelfAttention:
        part = prior
        if part is not None and any(part.varies()):
            part = PriorSelection(part, torch.tensor([h]), H)
        g = h * G // H
        return replace(
            layer,
            W_Q=layer.W_Q[h],
            W_K=layer.W_K[g],
            W_V=layer.W_V[g],
            W_O=rows[h],
            choice=layer.choice.with_tensors([x.expand(H, 1, 1)[h] for x in per_head]),
            biases=(
                None if b_q is None else b_q[h],
                None if b_k is None else b_k[g],
                None if b_v is None else b_v[g],
            ),
            prior=part,
            bias=layer.bias if h == 0 else None,
            sink=None if layer.sink is None else layer.sink[h : h + 1],
        )

    return [head(h) for h in range(H)]


def require_agreement(written: Tensor, own: Tensor, what: str) -> None:
    """Refuse what is written out where its output is not the model's own."""
    difference, size = float((written - own.to(written)).abs().amax()), float(own.abs().amax())
    if not difference <= _AGREEMENT * max(size, 1e-30):
        raise ValueError(
            f"the {what} written out differs from the model's own by {difference:.3g} of "
            f"{size:.3g}, so it is not certified."
        )


def _certify_heads(
    layer: SelfAttention,
    x: Tensor,
    radius: float,
    norm: str,
    failure: float,
    generator: torch.Generator,
) -> list[HeadCertificate]:
    ball = Ball.of(radius, norm, len(x))
    certificates = []
    for number, head in enumerate(split_heads(layer), 1):
        estimator = NormEstimator(failure, generator)
        centre = spectral_norm(head.jacobian(x), tol=1e-3, failure=failure, generator=generator)
        upper = head.ball_bound(x, ball, estimator).upper
        certificates.append(
            HeadCertificate(
                head=number,
                centre=to_interval(centre),
                upper=upper if math.isfinite(upper) else None,
            )
        )
    return certificates
