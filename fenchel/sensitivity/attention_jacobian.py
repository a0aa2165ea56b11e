"""The Jacobian of attention, streamed: both products in O(n d) memory, for any choice.

With z = scale q k^T, p = choice.weights(z, log_prior), o = p v and J the derivative of the choice,

    forward    do = (J dz) v + p dv,      dz = scale (dq k^T + q dk^T)
    reverse    gv = p^T g,   gz = J (g v^T),   gq = scale gz k,   gk = scale gz^T q

one block of rows at a time. With J_i = diag(s) - s s^T / sum(s) and m_i the s-weighted mean of the
values, rows that are not nearly one-hot use

    (J dz)_i v = (s dz_i) v - <s, dz_i> m_i,       gz_i = s (g_i v^T - <g_i, m_i>),

where the subtracted term is small or one more column of the product. Under a soft cap on the
scores, z = c tanh(scale q k^T / c), dz before J and gz after it take the factor 1 - (z / c)^2.

``attention_jacobian`` is the derivative in (q, k, v), or in some of them;
``self_attention_jacobian`` is the derivative in X for q = X W_Q, k = X W_K, v = X W_V. With
``each`` the operator is a batch, one per sequence and head; without, one operator for all of them.
On a GPU, softmax in float32 goes through the kernels of fenchel/attention/tangent.py where the
weights do not fit in one block: no block of them is written to memory.
Forward and reverse come from the same two lines of algebra, so the identity
<J v, u> = <v, J^T u> tests one against the other.

``OneHead`` is the case of one head whose weights fit in one block, in eight products. With
A = scale W_Q k^T (M, S) and B = scale q W_K^T (T, M),

    dz = dX A + B dX^T                        gz = J(g v^T)
    do = J(dz) v + p (dX W_V)                 gX = gz A^T + gz^T B + (p^T g) W_V^T

Calls, not arithmetic, take the time of a small operator, so this halves the time of a step of
Golub-Kahan. A has M S numbers where k has D S: it is for M not much larger than D.
"""

from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Unpack, final

import torch
from torch import Tensor

from fenchel.attention import AttentionSpec
from fenchel.attention.backends import BACKENDS, describe
from fenchel.attention.bias import add_sink
from fenchel.attention.reference import full_precision
from fenchel.attention.shapes import check, four_axes
from fenchel.attention.spec import AttentionKeywords
from fenchel.attention.tangent import JacobianKernels
from fenchel.sensitivity.bounds.covariance import Terms, factors_of, projection_errors, terms
from fenchel.sensitivity.operator import Operator, Space
from fenchel.sensitivity.rounding import lengths, outward
from fenchel.sensitivity.weight_blocks import (
    Projections,
    WeightBlock,
    WeightBlocks,
    cut,
    flat,
    project,
    repeat_heads,
    wide,
)


class OneHead(Operator):
    """d Att(X) of one head, in the dtype of its arguments."""

    def __init__(
        self,
        block: WeightBlock,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        W: tuple[Tensor, Tensor, Tensor],
        scale: float,
        domain: Space,
        codomain: Space,
    ) -> None:
        """q (T, D), k (S, D), v (S, E) and W_Q, W_K (M, D), W_V (M, E); one block of one head."""
        W_Q, W_K, self.W_V = W
        self.block = block
        self.p, self.v = block.p[0], v
        self.A, self.B = scale * W_Q @ k.mT, scale * q @ W_K.mT
        self.domain, self.codomain = domain, codomain
        self.dtype, self.device = v.dtype, v.device

    @full_precision
    def apply(self, v: Tensor) -> Tensor:
        return torch.stack([self._push(move) for move in v]) if len(v) > 1 else self._push(v)

    @full_precision
    def adjoint(self, u: Tensor) -> Tensor:
        return torch.stack([self._pull(g) for g in u]) if len(u) > 1 else self._pull(u)

    def _push(self, move: Tensor) -> Tensor:
        dX = move.view(self.B.shape)
        dz = torch.mm(dX, self.A).addmm_(self.B, dX.mT)
        out = torch.mm(self._choice_jvp(dz), self.v).addmm_(self.p, torch.mm(dX, self.W_V))
        return out.view(*move.shape[:-1], -1)

    def _pull(self, gradient: Tensor) -> Tensor:
        g = gradient.view(-1, self.v.shape[1])
        gz = self._choice_jvp(torch.mm(g, self.v.mT))
        gX = torch.mm(gz, self.A.mT).addmm_(gz.mT, self.B)
        return gX.addmm_(torch.mm(self.p.mT, g), self.W_V.mT).view(*gradient.shape[:-1], -1)

    def _choice_jvp(self, dz: Tensor) -> Tensor:
        return self.block.choice_jvp_(dz.unsqueeze(0))[0]


@final
class AttentionJacobian(Operator):
    """d attend(q, k, v), in the inputs named by ``wrt``; N is B H, c the vectors of a stack."""

    def __init__(
        self,
        rows: WeightBlocks,
        v: Tensor,
        wrt: str,
        each: bool,
        G: int | None = None,
        axes: tuple[int, ...] | None = None,
        fixed: int = 0,
    ) -> None:
        """The first ``fixed`` keys and values are constants, as a sink is: no move has them."""
        self.rows, self.wrt, self.each, self.fixed = rows, wrt, each, fixed
        self.v = flat(v)
        self.G = rows.H if G is None else G
        (_, T, D), (_, S, E) = rows.q.shape, self.v.shape
        below = {"q": (T, D), "k": (S - fixed, D), "v": (S - fixed, E)}
        lead = rows.lead if axes is None else axes
        if each:
            self.domain = Space(tuple(below[name] for name in wrt), lead, len(wrt) > 1)
            self.codomain = Space(((T, E),), lead)
        else:
            shared = (*lead[:-1], self.G) if lead else ()
            shapes = tuple((*(lead if n == "q" else shared), *below[n]) for n in wrt)
            self.domain = Space(shapes, (), len(wrt) > 1)
            self.codomain = Space(((*lead, T, E),))
        self.dtype, self.device = v.dtype, v.device

    @full_precision
    def apply(self, v: Tensor) -> Tensor:
        """J v, one pass over the weights for the whole stack."""
        moves = {
            name: self._for_every_head(part, name)
            for name, part in zip(self.wrt, self.domain.unflatten(v), strict=True)
        }
        return self.push(**moves).reshape(len(v), *self.codomain.batch, -1)

    @full_precision
    def adjoint(self, u: Tensor) -> Tensor:
        """J^T u, one pass over the weights for the whole stack."""
        backs = self.pull(u.reshape(len(u), len(self.v), self.rows.T, -1))
        lead = (len(u), *self.domain.batch)
        parts = [self._of_every_group(backs[name], name).reshape(*lead, -1) for name in self.wrt]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def push(
        self, q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None
    ) -> Tensor:
        """do for moves dq (c, N, T, D), dk (c, N, S, D), dv (c, N, S, E); None is a move of 0."""
        c = next(len(move) for move in (q, k, v) if move is not None)
        if self._kernels is not None:
            stack = [
                self._kernels.push((self._heads(q, i), self._heads(k, i), self._heads(v, i)))
                for i in range(c)
            ]
            return torch.stack(stack).view(c, len(self.v), self.rows.T, -1)
        if self.rows.whole and c == 1:  # the usual case of a small operator, with nothing to gather
            for block in self.rows:
                if block.keys == slice(0, self.rows.S):
                    return self._moved(block, 0, q, k, v).unsqueeze(0)
        out = self.v.new_zeros(c, len(self.v), self.rows.T, self.v.shape[-1])
        for block in self.rows:
            for i in range(c):
                out[i, :, block.rows] = self._moved(block, i, q, k, v)
        return out

    def _moved(
        self, block: WeightBlock, i: int, q: Tensor | None, k: Tensor | None, v: Tensor | None
    ) -> Tensor:
        """(J dz) v + p dv on a block, for vector i of the stack."""
        rows, keys, r = block.rows, block.keys, self.rows
        dz = None
        if q is not None:
            dz = torch.bmm(cut(q[i], rows), cut(r.scaled_k, keys).mT)
        if k is not None:
            scaled_q, dk = cut(r.scaled_q, rows), cut(k[i], keys).mT
            dz = torch.bmm(scaled_q, dk) if dz is None else dz.baddbmm_(scaled_q, dk)
        if dz is not None and block.slope is not None:
            dz *= block.slope
        moved = None if dz is None else self._moved_by_choice(block, dz)
        if v is not None:
            dv = cut(v[i], keys)
            moved = torch.bmm(block.p, dv) if moved is None else moved.baddbmm_(block.p, dv)
        assert moved is not None
        return moved

    def _moved_by_choice(self, block: WeightBlock, dz: Tensor) -> Tensor:
        """(J dz) v on a block: (N, t, E); dz is overwritten."""
        v = cut(self.v, block.keys)
        if block.heaviest is not None:
            return torch.bmm(block.choice_jvp_(dz), v)
        dz *= block.s
        drop = dz.sum(-1, keepdim=True)
        return torch.bmm(dz, v).addcmul_(drop, cut(self._mean, block.rows), value=-1.0)

    def _score_gradient(self, block: WeightBlock, g_rows: Tensor, g_and_mean: Tensor) -> Tensor:
        """gz on a block, for its rows of the gradient (N, t, E), and (g, -<g, m>) (N, T, E + 1)."""
        if block.heaviest is not None:
            gz = block.choice_jvp_(torch.bmm(g_rows, cut(self.v, block.keys).mT))
        else:
            gz = torch.bmm(cut(g_and_mean, block.rows), cut(self._values_and_one, block.keys).mT)
            gz *= block.s
        return gz if block.slope is None else gz.mul_(block.slope)

    @cached_property
    def _kernels(self) -> JacobianKernels | None:
        """Fused products, where they serve and the weights are not cached.

        They subtract the mean of T and of g v^T without the shift of ``WeightBlock``, so a nearly
        one-hot row is off by the rounding of its scores: little compared with the values, whose
        weights sum to 1, and so it is used where the values move.
        """
        if self.rows.cache or "v" not in self.wrt or self.dtype != torch.float32:
            return None
        q, k, v = (
            x.view(*self.rows.lead, *x.shape[1:]) for x in (self.rows.q, self.rows.k, self.v)
        )
        facts = describe(q, k, v, self.rows.spec)
        if facts.beta_is_tensor or BACKENDS["tangent"].why_not(facts) is not None:
            return None
        return JacobianKernels(q, k, v, self.rows.spec)

    def _heads(self, x: Tensor | None, i: int) -> Tensor | None:
        """Vector i of a stack (c, N, n, w) as (B, H, n, w)."""
        return None if x is None else x[i].reshape(*self.rows.lead, *x.shape[2:])

    @cached_property
    def _mean(self) -> Tensor:
        """m, the values weighted by s: (N, T, E)."""
        mean = self.v.new_zeros(len(self.v), self.rows.T, self.v.shape[-1])
        for block in self.rows:
            mean[:, block.rows] = torch.bmm(block.s, cut(self.v, block.keys)) * block.inverse
        return mean

    @cached_property
    def _values_and_one(self) -> Tensor:
        """(N, S, E + 1), the last column 1."""
        return torch.nn.functional.pad(self.v, (0, 1), value=1.0)

    def pull(self, g: Tensor, into: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """gq, gk, gv, (c, N, ...) each, for a gradient g (c, N, T, E) of the outputs.

        ``into`` are tensors of zeros to write into; None allocates them.
        """
        r = self.rows
        back = into or {
            name: x.new_zeros(len(g), *x.shape)
            for name, x in (("q", r.q), ("k", r.k), ("v", self.v))
            if name in self.wrt
        }
        if self._kernels is not None:
            for i in range(len(g)):
                g_i = self._heads(g, i)
                assert g_i is not None
                for name, grad in zip("qkv", self._kernels.pull(g_i), strict=True):
                    if name in back and grad is not None:
                        back[name][i] = flat(grad)
            return back
        g_and_mean = g
        if self.wrt != "v" and any(block.heaviest is None for block in r.cached()):
            g_and_mean = torch.cat([g, (g * self._mean).sum(-1, keepdim=True).neg_()], -1)
        for block in r:
            rows, keys = block.rows, block.keys
            for i, gradient in enumerate(g):
                g_rows = cut(gradient, rows)
                if "v" in self.wrt:
                    cut(back["v"][i], keys).baddbmm_(block.p.mT, g_rows)
                if self.wrt == "v":
                    continue
                gz = self._score_gradient(block, g_rows, g_and_mean[i])
                if "q" in self.wrt:
                    cut(back["q"][i], rows).baddbmm_(gz, cut(r.scaled_k, keys))
                if "k" in self.wrt:
                    cut(back["k"][i], keys).baddbmm_(gz.mT, cut(r.scaled_q, rows))
        return back

    def _for_every_head(self, move: Tensor, name: str) -> Tensor:
        """A move as (c, N, n, w), with shared heads repeated."""
        B, H = self.rows.lead
        own = H if name == "q" or self.each else self.G
        if name != "q" and self.fixed:
            move = torch.nn.functional.pad(move, (0, 0, self.fixed, 0))
        move = move.reshape(len(move), B, own, *move.shape[-2:])
        return repeat_heads(move, H, 2).reshape(len(move), B * H, *move.shape[-2:])

    def _of_every_group(self, back: Tensor, name: str) -> Tensor:
        """A gradient (c, N, n, w), summed over the query heads that share its keys or values."""
        B, H = self.rows.lead
        if name != "q" and self.fixed:
            back = back[..., self.fixed :, :]
        if name == "q" or self.each or self.G == H:
            return back
        return back.reshape(len(back), B, self.G, H // self.G, *back.shape[-2:]).sum(3)

    @full_precision
    def single(self) -> Operator:
        """The same operator in float32; cached weights are rounded, not computed again."""
        return self._single()

    def _single(self) -> "AttentionJacobian":
        other = copy(self)
        other.rows, other.v, other.dtype = self.rows.single(), self.v.float(), torch.float32
        for name in ("_mean", "_values_and_one", "_kernels"):
            other.__dict__.pop(name, None)
        # Weights below the least float32 are lost: S of them, times the largest values and scores.
        r = self.rows
        sizes = [float(lengths(x).amax()) if x.numel() else 0.0 for x in (r.q, r.k, self.v)]
        moved = abs(r.scale) * sizes[2] * (sizes[0] + sizes[1])
        other.rounding = torch.finfo(torch.float32).tiny * r.S * (1.0 + moved)
        return other

    @property
    def error(self) -> float:
        """That of products, and that of the weights, which is the error of a score."""
        return super().error + self.rows.error

    @full_precision
    def parts(self) -> Terms:
        """The covariance bound's three numbers for every sequence and head: (B, H)."""
        v = self.v.view(*self.rows.lead, *self.v.shape[1:])
        return terms(self.rows, v, fixed=self.fixed)

    @full_precision
    def ceiling(self) -> Tensor:
        """The covariance bound: (B, H) with ``each``, else one number."""
        bound = self.parts().separate(self.wrt)
        if self.each:
            return bound.reshape(self.domain.batch)
        if self.G == self.rows.H:
            return bound.amax()
        groups = bound.reshape(len(bound), self.G, -1)  # the heads of a group share their keys
        return outward(lengths(groups), groups.shape[-1]).amax()


@final
class SelfAttentionJacobian(Operator):
    """d Att(X) for Att(X) = attend(X W_Q, X W_K, X W_V)."""

    def __init__(self, inner: AttentionJacobian, x: Projections) -> None:
        self.inner, self.X, self.W = inner, x.X, x.W
        self.widths = [w.shape[-1] for w in x.W]
        # Concatenated, (B or 1, H, M, 2 D + E): one product instead of three.
        self.W_QKV = torch.cat(x.W, -1)
        N, M = x.X.shape[-2:]
        out = (inner.rows.T, inner.v.shape[-1])
        if inner.each:
            self.domain, self.codomain = Space(((N, M),), x.axes), Space((out,), x.axes)
        else:
            self.domain, self.codomain = Space((tuple(x.X.shape),)), Space(((*x.axes, *out),))
        self.dtype, self.device = inner.dtype, inner.device
        self.score_error = 0.0
        if self.dtype == torch.float64:
            # The rounding of q, k and v counts in full where differences of them cancel. Bounds of
            # it by norms are useful only in float64.
            sizes = [float(lengths(w.flatten(-2)).amax()) for w in x.W]
            size = float(lengths(x.X).amax()) if x.X.numel() else 0.0
            eps = 4.0 * (M + 4) * torch.finfo(self.dtype).eps
            self.score_error = eps * abs(inner.rows.scale) * size * size * sizes[0] * sizes[1]
            self.rounding = 4.0 * self.score_error * sizes[2]

    @full_precision
    def apply(self, v: Tensor) -> Tensor:
        rows, c = self.inner.rows, len(v)
        own = rows.H if self.inner.each else 1
        moved = v.reshape(c, rows.B, own, rows.T, -1) @ self.W_QKV
        moves = moved.view(c, -1, rows.T, moved.shape[-1]).split_with_sizes(self.widths, -1)
        return self.inner.push(*moves).reshape(c, *self.codomain.batch, -1)

    @full_precision
    def adjoint(self, u: Tensor) -> Tensor:
        rows, c = self.inner.rows, len(u)
        g = u.reshape(c, rows.B * rows.H, rows.T, -1)
        back = u.new_zeros(c, g.shape[1], rows.T, self.W_QKV.shape[-1])
        parts = back.split_with_sizes(self.widths, -1)
        self.inner.pull(g, {"q": parts[0], "k": parts[1], "v": parts[2]})
        total = back.view(c, rows.B, rows.H, rows.T, -1) @ self.W_QKV.mT
        if not self.inner.each:
            total = total.sum(2)  # one X feeds every head
        return total.reshape(c, *self.domain.batch, -1)

    @full_precision
    def single(self) -> Operator:
        """The same operator in float32; ``OneHead`` where there is one small head."""
        inner = self.inner._single()
        rows, M = inner.rows, self.W_QKV.shape[-2]
        one_small_head = len(rows.q) == 1 and rows.whole and 2 * rows.q.shape[-1] >= M
        block = next(iter(rows), None) if one_small_head else None
        rounding = inner.rounding * float(lengths(self.W_QKV.flatten()))
        if block is not None and block.keys == slice(0, rows.S) and block.slope is None:
            W_Q, W_K, W_V = (w[0, 0].float() for w in self.W)
            q, k, v = rows.q[0], rows.k[0], inner.v[0]
            J = OneHead(block, q, k, v, (W_Q, W_K, W_V), rows.scale, self.domain, self.codomain)
            J.rounding = rounding
            return J
        other = copy(self)
        other.inner, other.dtype, other.W_QKV = inner, torch.float32, self.W_QKV.float()
        other.rounding = rounding
        return other

    @property
    def error(self) -> float:
        """That of attention in (q, k, v), whose scores carry the rounding of X W."""
        return self.inner.error + self.score_error

    @full_precision
    def parts(self) -> Terms:
        """The covariance bound's three numbers for every sequence and head: (B, H)."""
        X = self.X.double().reshape(-1, 1, *self.X.shape[-2:])
        W = [w.double() for w in self.W]
        q, k, v = (X @ w for w in W)
        x = Projections(X[:, 0], q, k, v, (W[0], W[1], W[2]), self.inner.rows.lead)
        rows = WeightBlocks(q, k, self.inner.rows.spec, self.inner.rows.budget)
        return terms(rows, v, factors_of(x), errors=projection_errors(x))

    @full_precision
    def ceiling(self) -> Tensor:
        """The covariance bound; without ``each`` the heads are stacked, so squares add."""
        total = self.parts().total
        if self.inner.each:
            return total.reshape(self.domain.batch)
        return outward(lengths(total), total.shape[-1]).amax()


def attention_jacobian(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    wrt: str = "qkv",
    each: bool = False,
    budget: int | None = None,
    cache: bool = False,
    sink: Tensor | float | None = None,
    **keywords: Unpack[AttentionKeywords],
) -> AttentionJacobian:
    """The Jacobian of ``attend`` at q (B, H, T, D), k (B, G, S, D), v (B, G, S, E).

    ``wrt`` names the inputs that move; vectors are a tuple when there are several. ``each`` gives
    one operator per sequence and head, batch (B, H), in which shared keys count once per head.
    ``sink`` is that of ``attend``: a key that takes part and never moves.

    >>> q = torch.eye(2).view(1, 1, 2, 2)
    >>> attention_jacobian(q, q, q, wrt="v", scale=0.0) @ q  # the mean of the moves of the values
    tensor([[[[0.5000, 0.5000],
              [0.5000, 0.5000]]]])
    """
    if not wrt or any(name not in "qkv" for name in wrt) or len(set(wrt)) < len(wrt):
        raise ValueError(f'wrt names some of "q", "k", "v", each once; got {wrt!r}.')
    spec = AttentionSpec(**keywords)
    check(q, k, v, softcap=spec.softcap)
    if q.shape[:-3] != k.shape[:-3]:
        raise ValueError(
            f"q and k must hold the same batch; got {tuple(q.shape)}, {tuple(k.shape)}."
        )
    axes = tuple(q.shape[:-2])
    q, k, v = (four_axes(x) for x in wide(q, k, v))
    H, G = q.shape[1], k.shape[1]
    if sink is not None:
        k, v, prior = add_sink(k, v, sink, spec.prior)
        spec = replace(spec, prior=prior)
    rows = WeightBlocks(q, repeat_heads(k, H), spec, budget, cache=cache)
    return AttentionJacobian(rows, repeat_heads(v, H), wrt, each, G, axes, int(sink is not None))


@full_precision
def self_attention_jacobian(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    *,
    each: bool = False,
    budget: int | None = None,
    **keywords: Unpack[AttentionKeywords],
) -> SelfAttentionJacobian:
    """The Jacobian of Att in X (..., N, M), by W_Q, W_K (M, D) and W_V (M, E).

    Weights with more axes bring heads: W_Q (H, M, D), W_K (G, M, D), W_V (G, M, E), and outputs
    (..., H, N, E); axes before the heads broadcast with those of X. ``each`` gives one operator per
    sequence and head.

    >>> X = torch.eye(2)
    >>> self_attention_jacobian(X, X, X, X).shape
    (4, 4)
    """
    x = project(X, W_Q, W_K, W_V)
    rows = WeightBlocks(x.q, x.k, AttentionSpec(**keywords), budget)
    return SelfAttentionJacobian(AttentionJacobian(rows, x.v, "qkv", each), x)
