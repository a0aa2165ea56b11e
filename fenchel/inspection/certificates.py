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

Everything is computed in float64 unless another dtype is given. T tokens, M width of the stream, H
heads, G heads of keys and values, D width of a head.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.attention import AttentionCall
from fenchel.inspection.heads import HeadSubset
from fenchel.inspection.our_model import OurModel
from fenchel.inspection.result import HeadCertificate, Interval, LayerCertificate
from fenchel.inspection.trace import InspectedModel
from fenchel.model import Transformer, evaluating
from fenchel.model.attention import Attention
from fenchel.model.forward_context import ForwardContext
from fenchel.model.sigma_linear import matrix_of
from fenchel.sensitivity import certify, spectral_norm
from fenchel.sensitivity.attention_ball import bounded
from fenchel.sensitivity.layers import SelfAttention, rotation_matrices
from fenchel.sensitivity.perturbation import Ball, NormEstimator

_AGREEMENT = 1e-3  # of the largest output, between a layer written out and the model's own


class AttentionInput(NamedTuple):
    """One attention module during a forward pass."""

    module: Attention
    x: Tensor
    """Its input, (T, M)."""
    output: Tensor
    """Its output, (T, M)."""
    call: AttentionCall
    context: ForwardContext


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


SEARCH = Search()


def layer_count(model: InspectedModel) -> int:
    """The number of layers that can be certified; refuses models of transformers."""
    if not isinstance(model, OurModel):
        raise ValueError(
            f"{model.name} is read through transformers; certificates cover runs and the families "
            "that fenchel reads itself (docs/checkpoints.md)."
        )
    return model.model.config.layers


def certify_layers(
    model: InspectedModel,
    ids: Tensor,
    radius: float,
    norm: str,
    layers: Sequence[int],
    search: Search,
    generator: torch.Generator,
    progress: Callable[[int], None],
) -> list[LayerCertificate]:
    """Certificates of the attention layers with indices ``layers`` on ids (1, T).

    ``progress`` is called with the number of layers done.
    """
    layer_count(model)
    assert isinstance(model, OurModel)
    inputs = attention_inputs(model.model, ids)
    certificates = []
    for done, index in enumerate(layers):
        progress(done)
        certificates.append(
            certify_layer(inputs[index], index + 1, radius, norm, search, generator)
        )
    progress(len(layers))
    return certificates


@torch.no_grad()
def attention_inputs(model: Transformer, ids: Tensor) -> list[AttentionInput]:
    """Run ``model`` on ids (1, T) and return what every layer's attention received."""
    calls: list[AttentionCall] = []
    inputs: list[AttentionInput] = []

    def override(_layer: int, call: AttentionCall) -> None:
        calls.append(call)

    def record(module: Attention, args: tuple[Tensor, ForwardContext], out: Tensor) -> None:
        x, context = args[:2]
        inputs.append(AttentionInput(module, x[0], out[0], calls[-1], context))

    modules = [module for module in model.modules() if isinstance(module, Attention)]
    handles = [module.register_forward_hook(record) for module in modules]
    try:
        with evaluating(model):
            model(ids, attention_override=override, last=True, return_hidden=True)
    finally:
        for handle in handles:
            handle.remove()
    return inputs


def certify_layer(
    given: AttentionInput,
    number: int,
    radius: float,
    norm: str,
    search: Search,
    generator: torch.Generator,
) -> LayerCertificate:
    """The certificate of one layer, or the reason why there is none."""
    x, failure = given.x.to(search.dtype), search.failure
    reason = why_not(given)
    if reason is not None:
        return LayerCertificate(layer=number, refused=f"layer {number} {reason}.")
    layer = self_attention_layer(given, search.dtype)
    _require_agreement(layer, given, number)
    centre = spectral_norm(layer.jacobian(x), tol=1e-3, failure=failure, generator=generator)
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
    return LayerCertificate(
        layer=number,
        centre=Interval(float(centre.lower), float(centre.upper), centre.iterations),
        lower=max(certificate.lower, float(centre.lower)),
        upper=certificate.upper if math.isfinite(certificate.upper) else None,
        failure=certificate.failure,
        token_norm=float(x.norm(dim=-1).mean()),
        moved=[float(f"{part:.4g}") for part in share.tolist()],
        heads=_certify_heads(layer, x, radius, norm, failure, generator) if search.heads else [],
    )


def why_not(given: AttentionInput) -> str | None:
    """Why there is no certificate for this attention; None where there is one."""
    module, spec = given.module, given.call.spec
    if module.q_norm is not None or module.k_norm is not None:
        return "normalises its queries and keys, for which no bound over a ball is known here"
    if module.l2:
        return "scores by distance, for which no bound over a ball is known here"
    if spec.softcap is not None:
        return "caps its scores, for which no bound over a ball is known here"
    if module.sink is not None:
        return "has an attention sink that is no key, for which no bound over a ball is known here"
    if not bounded(spec.choice):
        return f"chooses by {spec.choice!r}, whose weights have no bound over a ball here"
    return None


def self_attention_layer(given: AttentionInput, dtype: torch.dtype) -> SelfAttention:
    """The attention module at its input as a layer of fenchel.sensitivity."""
    module, spec = given.module, given.call.spec
    H, G, D = module.heads, module.groups, module.head_width
    sizes = [H * D, G * D, G * D]
    matrix, bias = matrix_of(module.qkv), module.qkv.bias
    W_Q, W_K, W_V = (
        rows.detach().to(dtype).view(-1, D, rows.shape[-1]).mT  # (H or G, M, D)
        for rows in torch.split_with_sizes(matrix, sizes)
    )
    b_q = b_k = b_v = None
    if bias is not None:
        b_q, b_k, b_v = (
            rows.detach().to(dtype).view(-1, D) for rows in torch.split_with_sizes(bias, sizes)
        )
    angles, rotations = given.context.rotary[int(module.local)], None
    if angles is not None:
        rotations = rotation_matrices(angles, D, layout=module.rotary_layout).to(dtype)
    return SelfAttention(
        W_Q,
        W_K,
        W_V,
        matrix_of(module.out).detach().to(dtype).mT,
        choice=spec.choice,
        prior=spec.prior,
        scale=spec.scale,
        biases=(b_q, b_k, b_v),
        rotations=rotations,
    )


def split_heads(layer: SelfAttention) -> list[SelfAttention]:
    """One layer per head with its own rows of W_O: their outputs add up to the layer's."""
    assert layer.W_O is not None
    H, G = len(layer.W_Q), len(layer.W_K)
    rows, prior = layer.W_O.reshape(H, -1, layer.W_O.shape[-1]), layer.prior
    b_q, b_k, b_v = layer.biases

    def head(h: int) -> SelfAttention:
        g = h * G // H
        return replace(
            layer,
            W_Q=layer.W_Q[h],
            W_K=layer.W_K[g],
            W_V=layer.W_V[g],
            W_O=rows[h],
            biases=(
                None if b_q is None else b_q[h],
                None if b_k is None else b_k[g],
                None if b_v is None else b_v[g],
            ),
            prior=prior if prior is None or not any(prior.varies()) else HeadSubset(prior, (h,), H),
        )

    return [head(h) for h in range(H)]


def _require_agreement(layer: SelfAttention, given: AttentionInput, number: int) -> None:
    """Refuse a layer that does not compute what the model computes."""
    out = layer(given.x.to(layer.W_Q))
    if given.module.out.bias is not None:
        out = out + given.module.out.bias.to(out)
    difference = float((out - given.output.to(out)).abs().amax())
    size = float(given.output.abs().amax())
    if not difference <= _AGREEMENT * max(size, 1e-30):
        raise ValueError(
            f"the attention of layer {number} written out differs from the model's own by "
            f"{difference:.3g} of {size:.3g}, so it is not certified."
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
                centre=Interval(float(centre.lower), float(centre.upper), centre.iterations),
                upper=upper if math.isfinite(upper) else None,
            )
        )
    return certificates
