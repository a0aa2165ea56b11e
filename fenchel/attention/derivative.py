"""The derivative of attention, written out in both directions.

Forward. When q, k, v move by dq, dk, dv, with z = scale q k^T, p the weights and J the derivative
of the choice in its scores,

    dz = scale (dq k^T + q dk^T)                         times 1 - (z / c)^2 if capped at c
    do = (J dz) v  +  p dv
         choosing     values

Autograd gives the same sum; this form keeps its two causes apart, which is what
fenchel.sensitivity bounds one at a time.

Reverse. For a gradient g of the outputs (the same J, since it is symmetric),

    gv = p^T g        gp = g v^T        gz = J gp        gq = scale gz k        gk = scale gz^T q

Rows of gz sum to zero: a common shift of the scores does nothing. Shapes as in ``attend``; p, dz
and gz are (B, H, T, S).

Self-attention as a map of one sequence X to another, and the ways back from it.

    q = X W_Q,   k = X W_K,   v = X W_V
    Att(X) = p(P) X W_V,      P = X A X^T,      A = W_Q W_K^T / sqrt(D)

X is (..., N, M), one row a token; W_Q and W_K are (M, D), W_V is (M, E). p acts on rows. The scale
belongs to the head width D, not to M.

For R of the shape of Att(X), the gradient of <R, Att(X)> follows from that of attention,

    gX = gq W_Q^T + gk W_K^T + gv W_V^T,     gW_Q = X^T gq,   gW_K = X^T gk,   gW_V = X^T gv
"""

from typing import NamedTuple

from torch import Tensor

from fenchel.attention.attend import attend
from fenchel.attention.prior import Prior
from fenchel.attention.reference import cap, cap_slope, log_prior, mix, mix_transposed, score
from fenchel.attention.shapes import check, four_axes
from fenchel.choice import Choice, Softmax


class Move(NamedTuple):
    """A first-order change of the output, split by cause; each is (B, H, T, E)."""

    choosing: Tensor
    """What changes because queries choose otherwise among the keys."""
    values: Tensor
    """What changes because the chosen values move."""

    @property
    def total(self) -> Tensor:
        """The whole derivative."""
        return self.choosing + self.values


class Gradients(NamedTuple):
    """The way back through attention, every step of it."""

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor
    scores: Tensor


def attend_jvp(
    qkv: tuple[Tensor, Tensor, Tensor],
    moves: tuple[Tensor | None, Tensor | None, Tensor | None],
    *,
    choice: Choice,
    prior: Prior | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Move:
    """How the outputs move when q, k, v move by ``moves``; None stands still."""
    for x, dx in zip(qkv, moves, strict=True):
        if dx is not None and dx.shape != x.shape:
            raise ValueError(
                f"a move has the shape of what moves; got {tuple(dx.shape)} for {tuple(x.shape)}."
            )
    q, k, v, scale, axes = _ready(qkv, scale)
    dq, dk, dv = (None if dx is None else four_axes(dx) for dx in moves)
    z = cap(score(q, k, scale), softcap)
    p = choice.weights(z, log_prior(prior, z))
    dz = z.new_zeros(()).expand_as(z)
    if dq is not None:
        dz = dz + score(dq, k, scale)
    if dk is not None:
        dz = dz + score(q, dk, scale)
    if (slope := cap_slope(z, softcap)) is not None:
        dz = dz * slope
    choosing = mix(choice.jacobian_product(p, dz), v)
    values = choosing.new_zeros(choosing.shape) if dv is None else mix(p, dv)
    return Move(
        choosing.reshape(*axes, *values.shape[-2:]), values.reshape(*axes, *values.shape[-2:])
    )


def attend_vjp(
    qkv: tuple[Tensor, Tensor, Tensor],
    g: Tensor,
    *,
    choice: Choice,
    prior: Prior | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Gradients:
    """The gradients of <g, attend(q, k, v)>, with those of the weights and the scores between."""
    q, k, v, scale, axes = _ready(qkv, scale)
    G = k.shape[1]
    z = cap(score(q, k, scale), softcap)
    p = choice.weights(z, log_prior(prior, z))
    wide = four_axes(g).to(p.dtype)
    gp = mix(wide, v.to(p.dtype).transpose(-1, -2))
    gz = choice.jacobian_product(p, gp)
    slope = cap_slope(z, softcap)
    gs = gz if slope is None else gz * slope  # of the scores before they were capped
    found = (
        scale * mix(gs, k.to(p.dtype)),
        scale * mix_transposed(gs, q.to(p.dtype), G),
        mix_transposed(p, wide, G),
    )
    gq, gk, gv = (x.to(y.dtype).reshape(y.shape) for x, y in zip(found, qkv, strict=True))
    weights, scores = (x.reshape(*axes, *x.shape[-2:]) for x in (gp, gz))
    return Gradients(gq, gk, gv, weights, scores)


def _ready(
    qkv: tuple[Tensor, Tensor, Tensor], scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float, tuple[int, ...]]:
    q, k, v = qkv
    check(q, k, v)
    if q.shape[:-3] != k.shape[:-3]:
        raise ValueError(
            f"q and k must hold the same batch; got {tuple(q.shape)}, {tuple(k.shape)}."
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return four_axes(q), four_axes(k), four_axes(v), scale, tuple(q.shape[:-2])


_SOFTMAX = Softmax()


class SelfGradients(NamedTuple):
    """Gradients of <R, Att(X)>, each of the shape of its variable."""

    X: Tensor
    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor


def self_attention(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    *,
    choice: Choice = _SOFTMAX,
    prior: Prior | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Att(X): (..., N, M) -> (..., N, E); one head, so that a prior sees H = 1."""
    q, k, v = ((X @ W).unsqueeze(-3) for W in (W_Q, W_K, W_V))
    return attend(q, k, v, choice=choice, prior=prior, scale=scale, backend=backend).squeeze(-3)


def self_attention_vjp(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    R: Tensor,
    *,
    choice: Choice = _SOFTMAX,
    prior: Prior | None = None,
    scale: float | None = None,
) -> SelfGradients:
    """The gradients of <R, Att(X)> in closed form; weights get the sum over leading axes."""
    qkv = ((X @ W_Q).unsqueeze(-3), (X @ W_K).unsqueeze(-3), (X @ W_V).unsqueeze(-3))
    back = attend_vjp(qkv, R.unsqueeze(-3), choice=choice, prior=prior, scale=scale)
    gq, gk, gv = (g.squeeze(-3) for g in (back.q, back.k, back.v))
    rows = X.flatten(0, -2)
    gW_Q, gW_K, gW_V = (rows.mT @ g.flatten(0, -2) for g in (gq, gk, gv))
    return SelfGradients(gq @ W_Q.mT + gk @ W_K.mT + gv @ W_V.mT, gW_Q, gW_K, gW_V)
