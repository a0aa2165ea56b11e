"""A Lipschitz constant of a whole network in the per-token norm, from its weights alone.

For tokens X (n, d) measured by |X| = max_i |x_i|, and any number of them,

    |f(X') - f(X)| <= gain |X' - X|         for all X and X', not only near a text.

``token_bound`` composes it layer by layer, and carries with it ``size``, the largest length that a
token can have behind a layer, which a norm layer makes finite:

    norm         gain max|gamma| / sqrt(eps),  size sqrt(d) max|gamma| + |beta|
    linear       gain |W|,  size |W| size + |b|
    activation   gain the steepest slope
    gated MLP    gain a (u |W_G| + g |W_U|)      |a(g) u| moves by a'(g) u dg + a(g) du, a(0) = 0,
                                                 a the steepest slope, u and g the largest entries
    attention    gain |W_O| (sum_h c_h^2)^1/2, or sum_h |W_O^h| c_h if that is smaller
                 c_h = |W_V| (1 + scale R (|W_Q| R_k + R_q |W_K|))
    residual     gain |skip| + |scale| sum of the gains of the branches

with R the size of the input of attention, R_q = |W_Q| R + |b_Q| the longest query, R_k the longest
key. In attention a token of head h moves by sum_j p_ij dv_j + sum_j p_ij (dz_ij - mean) v_j. The
first is at most |W_V|, since the weights sum to one. The second is a covariance under p_i, at most
the root mean square of dz_ij = scale (dq_i . k_j + q_i . dk_j) times that of v_j, centred, in one
direction: centring removes the bias and leaves |W_V| R. Rotations of queries and keys (RoPE) change
no length, and a prior no derivative. The set {|x_i| <= R} and the whole space are convex, so a
bound of the derivative is a Lipschitz constant.

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
from fenchel.sensitivity.bounds.feedforward import activation, linear, norm_layer
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
        for part in layer.layers:
            own, size, width = token_bound(part, width, size)
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
    (q, longest_q), (k, longest_k), (v, _) = (
        (_norm(W), _image(W, b, R)) for W, b in zip((Q, K, V), layer.biases, strict=True)
    )
    turn = 1.0 if layer.rotations is None else float(linear(layer.rotations.double()).amax())
    k, longest_k, v = (x.repeat_interleave(H // len(x)) for x in (k, longest_k, v))
    c = outward(v * (1.0 + turn * turn * scale * R * (q * longest_k + longest_q * k)))
    c = torch.where(v == 0, 0.0, c)  # 0 times an input of unknown size
    together = outward(lengths(c), H)
    if layer.W_O is None:
        return together
    W_O = layer.W_O.double()
    parts = _norm(W_O.view(H, E, -1))
    return outward(torch.minimum(_norm(W_O) * together, outward((parts * c).sum(), H)))


def _norm(W: Tensor) -> Tensor:
    """|W| in float64, from above: (..., m, n) -> (...)."""
    return linear(W.double()).cpu()


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
