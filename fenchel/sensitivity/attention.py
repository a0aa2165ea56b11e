"""The Jacobian of attention, streamed: both products in O(n d) memory, for any choice.

With z = scale q k^T, p = choice.weights(z, log_prior), o = p v and J the derivative of the choice,

    forward    do = (J dz) v + p dv,      dz = scale (dq k^T + q dk^T)
    reverse    gv = p^T g,   gz = J (g v^T),   gq = scale gz k,   gk = scale gz^T q

one block of rows at a time. ``attention_jacobian`` is the derivative in (q, k, v), or in some of
them; ``self_attention_jacobian`` puts q = X W_Q, k = X W_K, v = X W_V before it and is the
derivative in X. With ``each`` the operator is a batch, one for every sequence and head; without,
one operator for all of them together.

Forward and reverse are written from the same two lines of algebra, so the identity
<J v, u> = <v, J^T u> tests one against the other.
"""

from typing import final

import torch
from torch import Tensor

from fenchel.attention import Prior
from fenchel.attention.shapes import check, four
from fenchel.choice import Choice, Softmax
from fenchel.sensitivity.bounds.covariance import Factors, Terms, factor, terms
from fenchel.sensitivity.operator import Operator, Space
from fenchel.sensitivity.rows import Block, Projected, Rows, product, project, pulled, times, wide

_SOFTMAX = Softmax()


@final
class AttentionJacobian(Operator):
    """d attend(q, k, v), in the inputs named by ``wrt``."""

    def __init__(
        self, rows: Rows, v: Tensor, wrt: str, each: bool, axes: tuple[int, ...] | None = None
    ) -> None:
        self.rows, self.v, self.wrt, self.each = rows, v, wrt, each
        self._full = {"q": rows.q.shape, "k": rows.k.shape, "v": v.shape}
        lead = (rows.B, rows.H) if axes is None else axes
        below = {name: tuple(shape[2:]) for name, shape in self._full.items()}
        out = (rows.T, v.shape[-1])
        if each:
            self.domain = Space(tuple(below[name] for name in wrt), lead, len(wrt) > 1)
            self.codomain = Space((out,), lead)
        else:
            grouped = (*lead[:-1], rows.k.shape[1]) if lead else ()
            shapes = tuple((*(lead if n == "q" else grouped), *below[n]) for n in wrt)
            self.domain = Space(shapes, (), len(wrt) > 1)
            self.codomain = Space(((*lead, *out),))
        self.dtype, self.device = v.dtype, v.device

    def apply(self, v: Tensor) -> Tensor:
        """J v, one pass over the weights for the whole stack."""
        moves = {
            name: part.reshape(len(v), *self._full[name])
            for name, part in zip(self.wrt, self.domain.lift(v), strict=True)
        }
        return self.push(**moves).reshape(len(v), *self.codomain.batch, -1)

    def adjoint(self, u: Tensor) -> Tensor:
        """J^T u, one pass over the weights for the whole stack."""
        r = self.rows
        backs = self.pull(u.reshape(len(u), r.B, r.H, r.T, -1))
        lead = (len(u), *self.domain.batch)
        return torch.cat([backs[name].reshape(*lead, -1) for name in self.wrt], -1)

    def push(
        self, q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None
    ) -> Tensor:
        """do for moves dq, dk, dv, each (c, B, heads, n, width) or standing still."""
        r = self.rows
        c = next(len(move) for move in (q, k, v) if move is not None)
        out = self.v.new_zeros(c, r.B, r.H, r.T, self.v.shape[-1])
        for block in r:
            here = out[..., block.rows, :]
            dz = self._score_moves(block, q, k)
            if dz is not None:
                here += times(block.turned(dz), self.v[..., block.keys, :])
            if v is not None:
                here += times(block.p, v[..., block.keys, :])
        return out

    def _score_moves(self, block: Block, q: Tensor | None, k: Tensor | None) -> Tensor | None:
        """dz on a block: scale (dq k^T + q dk^T) as one product of vectors twice as wide."""
        r, rows, keys = self.rows, block.rows, block.keys
        if k is None:
            return None if q is None else times(q[..., rows, :], r.scaled_k[..., keys, :].mT)
        left, right = r.scaled_q[..., rows, :], k[..., keys, :]
        if q is not None:
            left = torch.cat([q[..., rows, :], left.expand(len(q), *left.shape)], -1)
            beside = r.scaled_k[..., keys, :]
            right = torch.cat([beside.expand(len(k), *beside.shape), right], -1)
        return times(left, right.mT)

    def pull(self, g: Tensor) -> dict[str, Tensor]:
        """gq, gk, gv for a gradient g (c, B, H, T, E) of the outputs."""
        r, G = self.rows, self.rows.k.shape[1]
        back = {
            name: x.new_zeros(len(g), *x.shape)
            for name, x in (("q", r.q), ("k", r.k), ("v", self.v))
            if name in self.wrt
        }
        for block in r:
            rows, keys = block.rows, block.keys
            here = g[..., rows, :]
            if "v" in self.wrt:
                back["v"][..., keys, :] += pulled(block.p, here, G)
            if self.wrt == "v":
                continue
            gz = block.turned(times(here, self.v[..., keys, :].mT))
            if "q" in self.wrt:
                back["q"][..., rows, :] = times(gz, r.scaled_k[..., keys, :])
            if "k" in self.wrt:
                back["k"][..., keys, :] += pulled(gz, r.scaled_q[..., rows, :], G)
        return back

    def parts(self) -> Terms:
        """The covariance bound's three numbers for every sequence and head: (B, H)."""
        return terms(self.rows, self.v)

    def ceiling(self) -> Tensor:
        """The covariance bound: (B, H) with ``each``, else one number."""
        t = self.parts()
        chosen = {"q": t.query, "k": t.key, "v": t.mixing}
        # The moves of q, k and v are separate coordinates: |a x + b y| <= sqrt(a^2 + b^2).
        square = sum((chosen[name].square() for name in self.wrt), torch.zeros_like(t.key))
        if self.each:
            return square.sqrt()
        if self.rows.k.shape[1] == self.rows.H:
            return square.amax().sqrt()
        groups = square.reshape(len(square), self.rows.k.shape[1], -1)  # they share their keys
        return groups.sum(2).amax().sqrt()


@final
class SelfAttentionJacobian(Operator):
    """d Att(X) for Att(X) = attend(X W_Q, X W_K, X W_V)."""

    def __init__(self, inner: AttentionJacobian, x: Projected) -> None:
        self.inner, self.W = inner, x.W
        N, M = x.X.shape[-2:]
        out = (inner.rows.T, inner.v.shape[-1])
        if inner.each:
            self.domain, self.codomain = Space(((N, M),), x.axes), Space((out,), x.axes)
        else:
            self.domain, self.codomain = Space((tuple(x.X.shape),)), Space(((*x.axes, *out),))
        self.dtype, self.device = inner.dtype, inner.device

    def apply(self, v: Tensor) -> Tensor:
        """J dX."""
        r = self.inner.rows
        heads = r.H if self.inner.each else 1
        dX = v.reshape(len(v), r.B, heads, r.T, -1)
        moved = self.inner.push(*(product(dX, w) for w in self.W))
        return moved.reshape(len(v), *self.codomain.batch, -1)

    def adjoint(self, u: Tensor) -> Tensor:
        """J^T G."""
        r = self.inner.rows
        back = self.inner.pull(u.reshape(len(u), r.B, r.H, r.T, -1))
        ways = [product(back[name], w.mT) for name, w in zip("qkv", self.W, strict=True)]
        if not self.inner.each:
            ways = [way.sum(2) for way in ways]  # one X feeds every head
        return (ways[0] + ways[1] + ways[2]).reshape(len(u), *self.domain.batch, -1)

    def parts(self) -> Terms:
        """The covariance bound's three numbers for every sequence and head: (B, H)."""
        return terms(self.inner.rows, self.inner.v, Factors(*(factor(w) for w in self.W)))

    def ceiling(self) -> Tensor:
        """The covariance bound; heads taken together stand on one another, so squares add."""
        total = self.parts().total
        if self.inner.each:
            return total.reshape(self.domain.batch)
        return total.square().sum(1).amax().sqrt()


def attention_jacobian(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    choice: Choice = _SOFTMAX,
    prior: Prior | None = None,
    scale: float | None = None,
    wrt: str = "qkv",
    each: bool = False,
    budget: int | None = None,
) -> AttentionJacobian:
    """The Jacobian of ``attend`` at q (B, H, T, D), k (B, G, S, D), v (B, G, S, E).

    ``wrt`` names the inputs that move; vectors are a tuple when there are several. ``each`` gives
    one operator a sequence and head, batch (B, H), where grouped keys count for each head anew.
    """
    if not wrt or any(name not in "qkv" for name in wrt) or len(set(wrt)) < len(wrt):
        raise ValueError(f'wrt names some of "q", "k", "v", each once; got {wrt!r}.')
    check(q, k, v)
    if q.shape[:-3] != k.shape[:-3]:
        raise ValueError(
            f"q and k must hold the same batch; got {tuple(q.shape)}, {tuple(k.shape)}."
        )
    axes = tuple(q.shape[:-2])
    q, k, v = (four(x) for x in wide(q, k, v))
    if each and k.shape[1] < q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return AttentionJacobian(Rows(q, k, choice, prior, scale, budget), v, wrt, each, axes)


def self_attention_jacobian(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    *,
    choice: Choice = _SOFTMAX,
    prior: Prior | None = None,
    scale: float | None = None,
    each: bool = False,
    budget: int | None = None,
) -> SelfAttentionJacobian:
    """The Jacobian of Att in X (..., N, M), by W_Q, W_K (M, D) and W_V (M, E).

    Weights with more axes bring heads: W_Q (H, M, D), W_K (G, M, D), W_V (G, M, E), and outputs
    (..., H, N, E); axes before the heads go along with those of X. ``each`` gives one operator a
    sequence and head.
    """
    x = project(X, W_Q, W_K, W_V, each=each)
    scale = x.q.shape[-1] ** -0.5 if scale is None else scale
    rows = Rows(x.q, x.k, choice, prior, scale, budget)
    return SelfAttentionJacobian(AttentionJacobian(rows, x.v, "qkv", each), x)
