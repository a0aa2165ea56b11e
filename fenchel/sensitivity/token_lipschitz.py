"""A Lipschitz constant of a whole network in the per-token norm, from its weights alone.

For tokens X (n, d) measured by |X| = max_i |x_i|, and any number of them,

    |f(X') - f(X)| <= gain |X' - X|         for all X and X', not only near a text.

``token_bound`` composes it layer by layer, and carries with it ``size``, the largest length that a
token can have behind a layer, which a norm layer makes finite:

    norm         gain max|gamma| / sqrt(eps),  size sqrt(d) max|gamma| + |beta|
    linear       gain |W|,  size |W| size + |b|
    activation   gain the steepest slope
    MLP          gain a |W_U W_D| + b |W_U| |W_D|    slopes of the activation are a - b to a + b
    gated MLP    gain a (u |W_G| + g |W_U|)      |a(g) u| moves by a'(g) u dg + a(g) du, a(0) = 0,
                                                 a the steepest slope, u and g the largest entries
    attention    gain |W_O| (sum_h |W_V|^2 s_h^2)^1/2, or sum_h |W_V W_O^h| s_h if that is smaller
                 s_h = 1 + scale R (K_h + Q_h),   K_h the largest |W_Q k|, Q_h the largest |W_K q|
    residual     gain |skip| + |scale| sum of the gains of the branches

with R the size of the input of attention. The Jacobian of a plain MLP is W_U diag(slopes) W_D, and
diag(slopes) is a I and a rest of norm at most b; ReLU has a = b = 1/2, GELU .5 and .63, so that a
product that is smaller than its factors counts half. In attention a token of head h moves by
sum_j p_ij dv_j + sum_j p_ij (dz_ij - mean) v_j. The first is at most |W_V|, since the weights sum
to one. The second is a covariance under p_i, at most the root mean square of dz_ij =
scale (dq_i . k_j + q_i . dk_j) times that of v_j, centred, in one direction: centring removes the
bias and leaves |W_V| R. Behind W_O, W_V W_O^h is in the place of W_V. With k_j = W_K x_j + b_K,
|W_Q k_j| <= |W_Q W_K^T| R + |W_Q b_K|. A rotation (RoPE) is between the two matrices, depends on
the distance and changes no length: then only |W_Q| (|W_K| R + |b_K|) is known. A prior (ALiBi, a
learned bias of distances) has no derivative. The set {|x_i| <= R} and the whole space are convex,
so a bound of the derivative is a Lipschitz constant.

A norm layer is the reason for a finite constant, and its eps for the size of it: at x = 0 its slope
is eps^-1/2. With eps = 1e-5 every norm costs a factor of 316, with eps = 1 none.

The logits are measured one by one, so the last layer costs the longest row of its matrix:

    |logit_j(X') - logit_j(X)| <= gain |X' - X|   for every position and every j,

which is free of the size of the vocabulary. A margin m between two logits is safe while no token
moves by m / (2 gain).

``largest_stretch`` is the other side: the largest sum_i |d logit_j / d x_i|, which is the gain of
one logit at one point, that ascent finds. The constant lies between the two.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.choice import Softmax
from fenchel.sensitivity.autodiff import plain_kernels
from fenchel.sensitivity.bounds.attention import normalised_radius
from fenchel.sensitivity.bounds.feedforward import activation, linear, norm_layer, slope_limits
from fenchel.sensitivity.layers import (
    ActivationLayer,
    Chain,
    GatedLayer,
    LinearLayer,
    NormLayer,
    Residual,
    SelfAttention,
)
from fenchel.sensitivity.perturbation import TokenLayer
from fenchel.sensitivity.rounding import lengths, outward

_ZERO_AT_ZERO = ("relu", "silu", "gelu", "gelu_tanh")
_OUTPUTS = 6
"""Logits among which an attack chooses."""


class TokenBound(NamedTuple):
    """Of a layer whose input has tokens of a known width and size: () float64 each."""

    gain: Tensor
    """Lipschitz constant in max_i |x_i|."""
    size: Tensor
    """The largest length of an output token; inf where none is known."""
    width: int
    """Entries of an output token."""


@torch.no_grad()
def token_bound(layer: TokenLayer, width: int, size: Tensor | None = None) -> TokenBound:
    """The constant of ``layer`` for tokens of ``width`` entries and length at most ``size``.

    Rounded outward. A layer without a rule is refused with a ValueError.

    >>> norm = NormLayer(eps=1.0, kind="rms")
    >>> float(token_bound(Chain((norm, LinearLayer(2.0 * torch.eye(4)))), 4).gain) - 2.0 < 1e-9
    True
    """
    unbounded = torch.tensor(torch.inf, dtype=torch.float64)
    size = unbounded if size is None else size
    if isinstance(layer, Chain):
        gain = torch.ones((), dtype=torch.float64)
        parts = list(layer.layers)
        while parts:
            if (mlp := _plain_mlp(parts)) is not None:
                own, size, width = mlp
                del parts[:3]
            else:
                own, size, width = token_bound(parts.pop(0), width, size)
            gain = outward(gain * own)
        return TokenBound(gain, size, width)
    if isinstance(layer, Residual):
        branches = [token_bound(part, width, size) for part in (layer.branch, *layer.parallel)]
        gain = abs(layer.skip) + abs(layer.scale) * torch.stack([b.gain for b in branches]).sum()
        return TokenBound(outward(gain, len(branches)), unbounded, width)
    if isinstance(layer, NormLayer) and layer.eps is not None:
        weight, bias = (None if x is None else x.double() for x in (layer.weight, layer.bias))
        gain = norm_layer(weight=weight, eps=layer.eps, kind=layer.kind).cpu()
        longest = torch.tensor(normalised_radius(width, weight, bias), dtype=torch.float64)
        return TokenBound(gain, longest, width)
    if isinstance(layer, LinearLayer):
        gain = _norm(layer.W)
        return TokenBound(gain, _image(layer.W, layer.b, size), layer.W.shape[-1])
    if isinstance(layer, ActivationLayer):
        return TokenBound(activation(layer.name), unbounded, width)
    if isinstance(layer, GatedLayer) and layer.name in _ZERO_AT_ZERO:
        g, u = (
            _largest_entry(W, b, size)
            for W, b in zip((layer.W_G, layer.W_U), layer.biases, strict=True)
        )
        gain = activation(layer.name) * (u * _norm(layer.W_G) + g * _norm(layer.W_U))
        return TokenBound(outward(gain), unbounded, layer.W_U.shape[-1])
    if isinstance(layer, SelfAttention) and (reason := _why_not(layer)) is None:
        return TokenBound(_attention_gain(layer, size), unbounded, _output_width(layer))
    what = f"attention {reason}" if isinstance(layer, SelfAttention) else type(layer).__name__
    raise ValueError(f"no Lipschitz constant is known for {what}.")


def _plain_mlp(parts: Sequence[TokenLayer]) -> TokenBound | None:
    """The constant of the first three of ``parts``, where they are a plain MLP."""
    match parts:
        case [LinearLayer() as up, ActivationLayer() as middle, LinearLayer() as down, *_]:
            low, high = slope_limits(middle.name)
            together, apart = _product_norm(up.W, down.W), outward(_norm(up.W) * _norm(down.W))
            gain = 0.5 * (abs(high + low) * together + (high - low) * apart)
            unbounded = torch.tensor(torch.inf, dtype=torch.float64)
            return TokenBound(outward(gain), unbounded, down.W.shape[-1])
    return None


def _why_not(layer: SelfAttention) -> str | None:
    choice = layer.choice
    if not isinstance(choice, Softmax) or isinstance(choice.beta, Tensor) or choice.beta != 1.0:
        return "by another choice than softmax with beta=1"
    if layer.qk_norm is not None:
        return "with a norm of queries and keys"
    return None if layer.sink is None else "with a sink"


def _attention_gain(layer: SelfAttention, R: Tensor) -> Tensor:
    Q, K, V = (
        W.double() if W.dim() == 3 else W.double()[None] for W in (layer.W_Q, layer.W_K, layer.W_V)
    )
    H, D, E = len(Q), Q.shape[-1], V.shape[-1]
    scale = D**-0.5 if layer.scale is None else abs(layer.scale)
    K, V = (W.repeat_interleave(H // len(W), dim=0) for W in (K, V))
    b_Q, b_K = (
        None if b is None else b.double().view(-1, D).repeat_interleave(H * D // b.numel(), dim=0)
        for b in layer.biases[:2]
    )
    reach = _longest_partner(Q, K, b_K, R, layer.rotations) + _longest_partner(
        K, Q, b_Q, R, layer.rotations
    )
    share = outward(1.0 + scale * R * reach)

    def gain(values: Tensor) -> Tensor:
        return torch.where(values == 0, 0.0, outward(values * share))  # 0 times an unknown size

    together = outward(lengths(gain(_norm(V))), H)
    if layer.W_O is None:
        return together
    W_O = layer.W_O.double()
    apart = outward(gain(_product_norm(V, W_O.view(H, E, -1))).sum(), H)
    return torch.minimum(_norm(W_O) * together, apart)


def _longest_partner(
    Q: Tensor, K: Tensor, b: Tensor | None, R: Tensor, rotations: Tensor | None
) -> Tensor:
    """The largest |W_Q k| for k = W_K x + b, |x| <= R: (H, M, D), (H, M, D), (H, D) -> (H,)."""
    if rotations is not None:
        turn = float(linear(rotations.double()).amax()) ** 2
        return outward(turn * _norm(Q) * _image(K, b, R))
    longest = _product_norm(Q, K.mT) * R
    if b is not None:
        longest = longest + outward(_norm(Q) * lengths(b).cpu(), b.shape[-1])
    return outward(longest)


def _norm(W: Tensor) -> Tensor:
    """|W| in float64, from above: (..., m, n) -> (...)."""
    return linear(W.double()).cpu()


def _product_norm(A: Tensor, B: Tensor) -> Tensor:
    """|A B| in float64, from above: (..., m, k), (..., k, n) -> (...)."""
    A, B = A.double(), B.double()
    rounding = (
        A.shape[-1] * torch.finfo(A.dtype).eps * (A.norm(dim=(-2, -1)) * B.norm(dim=(-2, -1)))
    )
    return outward(torch.minimum(_norm(A @ B) + rounding.cpu(), _norm(A) * _norm(B)))


def _image(W: Tensor, b: Tensor | None, size: Tensor) -> Tensor:
    """The largest |x W + b| for |x| <= size."""
    longest = _norm(W) * size
    if b is not None:
        longest = longest + outward(lengths(b.double()), b.shape[-1]).cpu()
    return outward(longest)


def _largest_entry(W: Tensor, b: Tensor | None, size: Tensor) -> Tensor:
    """The largest entry of x W + b, in absolute value, for |x| <= size."""
    entries = outward(lengths(W.double().mT), len(W)).cpu() * size
    entries = entries if b is None else entries + b.double().abs().cpu()
    return outward(entries).amax()


def _output_width(layer: SelfAttention) -> int:
    if layer.W_O is not None:
        return layer.W_O.shape[-1]
    return layer.W_V.shape[-1] * (len(layer.W_Q) if layer.W_Q.dim() == 3 else 1)


@torch.no_grad()
def logit_bound(stages: Sequence[TokenLayer], head: LinearLayer, width: int) -> float:
    """The constant of any one logit: ``stages`` one after another, then ``head``."""
    gain = token_bound(Chain(tuple(stages)), width).gain
    longest = outward(lengths(head.W.double().mT), width).amax().cpu()
    return float(outward(gain * longest))


class Stretch(NamedTuple):
    """The most sensitive point that an attack has found."""

    gain: float
    """sum_i |d logit / d x_i| there: a lower bound of every Lipschitz constant."""
    X: Tensor
    """The tokens, (n, d)."""
    output: int
    """The logit, of the last token."""


def largest_stretch(
    logits: Callable[[Tensor], Tensor], X: Tensor, head: Tensor, *, steps: int = 20
) -> Stretch:
    """The largest gain of a logit of the last token that ascent from X (n, d) finds.

    ``logits`` (n, d) -> (n, V) is called in the dtype of X, and ends with the matrix ``head``
    (V, d): of the logits with its longest rows the most sensitive one is followed. Further starts
    are a tenth and a hundredth of X, where norm layers are steeper.
    """
    outputs = lengths(head.detach()).topk(min(_OUTPUTS, len(head))).indices.tolist()

    def measure(X: Tensor, j: int, *, climb: bool) -> tuple[float, Tensor]:
        with torch.enable_grad(), plain_kernels():
            X = X.detach().clone().requires_grad_()
            (g,) = torch.autograd.grad(logits(X)[-1, j], X, create_graph=climb)
            gain = torch.linalg.vector_norm(g, dim=-1).sum()
            up = torch.autograd.grad(gain, X)[0] if climb and gain.requires_grad else g
        return float(gain.detach()), up.detach()

    best = Stretch(0.0, torch.empty(0), 0)
    for size in (1.0, 0.1, 0.01):
        Y = size * X
        gain, j = max((measure(Y, j, climb=False)[0], j) for j in outputs)
        best = max(best, Stretch(gain, Y, j), key=lambda found: found.gain)
        share = 0.3
        for _ in range(steps):
            gain, up = measure(Y, j, climb=True)
            length = float(up.norm())
            if length == 0.0 or share < 1e-3:
                break
            trial = Y + up * (share * float(Y.norm()) / length)
            higher = measure(trial, j, climb=False)[0]
            if higher > gain:
                Y, share = trial, 1.5 * share
                best = max(best, Stretch(higher, Y, j), key=lambda found: found.gain)
            else:
                share *= 0.4
    return best
