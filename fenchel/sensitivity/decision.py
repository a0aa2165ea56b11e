"""Whether the decision of a causal network changes: a Taylor certificate of its margins.

A network of residual stages x^(s+1) = x^s + f_s(x^s), attention and MLP in turn behind their norms,
ends in a norm and a matrix E of logits. At position t the K largest logits are ``kept``. For every
pair of a kept token i and another one j, the margin is m_ij = logit_i - logit_j. The certificate is
the largest radius r, up to a step of the search, at which a lower bound of all margins is positive
for every change eps of the input tokens x^0 within r:

    "all"      |eps|_F <= r               all tokens together, as one vector
    "token"    |eps_j| <= r               each token
    "one"      |eps_t| <= r               the token at the position alone

**Expansion.** With D_s the Jacobian of the stage at the text, and the remainder err_s = f_s(x + d)
- f_s(x) - Df_s d,

    d^(s+1) = D_s d^s + err_s     exactly, so     d^s = T^(s,0) eps + sum_{k<s} T^(s,k+1) err_k,

T the products of D. Hence, with g_ij the gradient of the margin in the input, a_ijs the gradient
behind stage s and eta_st >= |err_st|,

    margin_ij(x + eps) s'/s >= m_ij - r |g_ij|* - sum_{k,m} sup |a_ijkm . err_km|,

|.|* the dual norm. The last norm divides all margins by the size s' of its token, so their signs
are those of the numerators, which are linear in the stream; a bias of the logits adds b_ij s',
which is convex, and is expanded by its gradient. Only err depends on r.

**Ellipsoids.** The move of each token lies in an ellipsoid of shape S, |y . d|^2 <= y^T S y: a sum
of the images of the ball and of the ellipsoids of earlier remainders (S = sum w sum S_k / w_k).
Every remainder is in a ball and in an ellipsoid of its own; a margin, a score and the stream take
what is smaller in their directions.

**Remainders**, derived in docs/maths/sensitivity.md:

    norm         c1 h + c2 d, c1 = s / s' - 1 + h.d / (d s), c2 = 1/s' - 1/s, behind its branch
    scores       |dq . dk| <= min(l_q l_k, tr(S_q S_k)^1/2), along v_j - o
    softmax      sum_j y_j (v_j - o) with y >= 0, each y_j and their sum bounded
    entmax       the same with |y_j|, the weights in its box of scores, for alpha up to 1.5
    values       |sum_j dp_j O V dh_j|, by Cauchy and Schwarz over a row
    MLP          W_D Gram W_D^T for the second order, third and fourth derivatives beyond it

**Causality.** Nothing about token i depends on later tokens: one set of eta serves all positions.
Behind the last attention nothing depends on any other token.

**Finite sets.** Where tokens may become others, the displacements of a token take the place of its
ball at r = 1 (fenchel/sensitivity/substitutions.py).

**Rounding.** The centres x^s are computed numbers, and d^s is the distance from them, so the error
of a forward pass is a part of err_s. So is that of D_s, relative to the sums of absolute values of
its terms, and that of the products T. Eigenvalues and sums of positive terms are enlarged by _GROW.
Where terms cancel (centred scores, Gram matrices of the MLP) the error is added as a number.

Shapes: n tokens, d width, H heads, D width per head, F width of the MLP, V logits, S stages.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor

from fenchel.choice import Entmax, Softmax
from fenchel.choice.entmax import spread as slopes
from fenchel.choice.entmax import tsallis
from fenchel.sensitivity.bounds.feedforward import SLOPES
from fenchel.sensitivity.layers import (
    _FUNCTIONS,
    ActivationLayer,
    Chain,
    GatedLayer,
    LinearLayer,
    NormLayer,
    Residual,
    SelfAttention,
)
from fenchel.sensitivity.norms import largest
from fenchel.sensitivity.perturbation import Ball, NormEstimator, TokenLayer
from fenchel.sensitivity.rounding import lengths
from fenchel.sensitivity.weight_blocks import repeat_heads

NORMS = ("all", "token", "one")
PARTS = ("norm", "scores", "softmax", "values", "mlp", "mlp, third", "rounding")
_SHAPED = 6  # parts with ellipsoids of their own
_EPS = torch.finfo(torch.float64).eps
_GROW = 1.0 + 1e-9  # more than sums of a few thousand positive terms and eigenvalues lose
_MOST = 4.0  # scores that move further are not expanded
_CUTS = (0.25, 0.5, 0.75, 1.0)  # of the line along which scores move
_STEP = 1.04  # between radii of the search
_STRIDE = 6  # steps at once while a radius is looked for, doubled each time
_TINY = 1e-12
_RESTING = 1e-6  # of the largest move of a token: less is bounded by a ball
_NEAREST = 64  # pairs at once whose margins take remainders in their ellipsoids, not in balls
_TOGETHER = 8  # tokens in a block of a product of Jacobians
_BYTES = 12e9
_SPEED = 1.5e10  # operations per second of a core, measured at 16 and 24 tokens of width 128
_RADII = 12  # that are tried for a position


class Curvature(NamedTuple):
    """Derivatives of an activation."""

    second: Callable[[Tensor], Tensor]
    third: Callable[[Tensor], Tensor]
    most_second: float
    """sup |a''|."""
    most_third: float
    """Of the third derivative."""
    most_fourth: float
    """Of the fourth derivative."""


def _silu_second(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1.0 - s) * (2.0 + x * (1.0 - 2.0 * s))


def _silu_third(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    slope = s * (1.0 - s)
    return slope * (3.0 * (1.0 - 2.0 * s) + x * (1.0 - 6.0 * slope))


def _gelu_second(x: Tensor) -> Tensor:
    return (2.0 - x.square()) * torch.exp(-0.5 * x.square()) / math.sqrt(2.0 * math.pi)


def _gelu_third(x: Tensor) -> Tensor:
    return x * (x.square() - 4.0) * torch.exp(-0.5 * x.square()) / math.sqrt(2.0 * math.pi)


def _tanh_derivatives(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of T = tanh(y), y = sqrt(2 / pi) (x + 0.044715 x^3): T', T'' and T'''."""
    c, a = math.sqrt(2.0 / math.pi), 0.044715
    y = c * (x + a * x**3)
    T, S = torch.tanh(y), torch.cosh(y.clamp(-150.0, 150.0)).square().reciprocal()
    y1, y2, y3 = c * (1.0 + 3.0 * a * x.square()), 6.0 * a * c * x, 6.0 * a * c
    second = S * y2 - 2.0 * T * S * y1.square()
    third = S * (y3 - 6.0 * T * y1 * y2 + (4.0 * T.square() - 2.0 * S) * y1**3)
    return S * y1, second, third


def _gelu_tanh_second(x: Tensor) -> Tensor:
    first, second, _ = _tanh_derivatives(x)
    return first + 0.5 * x * second


def _gelu_tanh_third(x: Tensor) -> Tensor:
    _, second, third = _tanh_derivatives(x)
    return 1.5 * second + 0.5 * x * third


CURVATURES = {
    "silu": Curvature(_silu_second, _silu_third, 0.5, 0.3083, 0.5),
    "gelu": Curvature(_gelu_second, _gelu_third, 0.79789, 0.7790, 1.5958),
    "gelu_tanh": Curvature(_gelu_tanh_second, _gelu_tanh_third, 0.79789, 0.7767, 1.6037),
}
"""Activations with a bounded fourth derivative; others are refused by name."""


@final
@dataclass(frozen=True, eq=False)
class DecisionNetwork:
    """Residual stages, a norm and logits, in float64: tokens (n, d) to logits (n, V)."""

    stages: tuple[Residual, ...]
    norm: NormLayer
    head: LinearLayer

    def __call__(self, X: Tensor) -> Tensor:
        """(..., n, d) -> (..., n, V)."""
        logits: Tensor = self.head(self.norm(Chain(self.stages)(X)))
        return logits

    def last_logits(self, X: Tensor) -> Tensor:
        """Those of the last token: (..., n, d) -> (..., V)."""
        logits: Tensor = self.head(self.norm(Chain(self.stages)(X)[..., -1:, :]))
        return logits[..., 0, :]

    def prefix(self, n: int) -> "DecisionNetwork":
        """The network on the first n tokens: rotations are one matrix per position."""

        def cut(stage: Residual) -> Residual:
            if not isinstance(stage.branch, Chain):
                return stage
            layers = tuple(
                replace(layer, rotations=layer.rotations[:n])
                if isinstance(layer, SelfAttention) and layer.rotations is not None
                else layer
                for layer in stage.branch.layers
            )
            return replace(stage, branch=Chain(layers))

        return replace(self, stages=tuple(cut(stage) for stage in self.stages))

    def streams(self, X: Tensor) -> list[Tensor]:
        """The inputs of all stages and the output of the last."""
        streams = [X]
        for stage in self.stages:
            streams.append(stage(streams[-1]))
        return streams


class _Mlp(NamedTuple):
    """A gated MLP at its centre; a plain one has u = 1 and W_U = 0."""

    G: Tensor
    U: Tensor
    D: Tensor
    u: Tensor
    first: Tensor
    second: Tensor
    third: Tensor
    """Its absolute value, rounded up."""
    spread: Tensor
    """Error of u, first and second."""
    curvature: Curvature


class _Attention(NamedTuple):
    """Attention at its centre; values are behind W_O."""

    Q: Tensor
    """(H, n, D, d): rotated and scaled."""
    K: Tensor
    OV: Tensor
    """(H, d, d)."""
    alpha: float
    """1 for softmax."""
    x: Tensor
    """Scores with the prior: (H, n, n)."""
    p: Tensor
    s: Tensor
    """p^(2 - alpha) on the support: the derivative is diag(s) - s s^T / sum(s)."""
    w: Tensor
    """s / sum(s)."""
    live: Tensor
    """Keys that a row may attend to: (H, n, n)."""
    c: Tensor
    """|v_j - o_i|, with o the mean by w: (H, n, n)."""
    values: Tensor
    """v_j - o_i: (H, i, j, d)."""
    error: Tensor
    """Of their entries, as one vector: ()."""
    Kq: Tensor
    """Derivative of the score in the key's token: (H, i, j, d)."""
    Qk: Tensor
    """In the query's token, centred by w: (H, i, j, d)."""
    loose: Tensor
    """The lengths of both, before they are centred: (H, n, n)."""
    slack: Tensor
    """Error of a score, relative error of a weight of softmax: (H, n)."""


class _Stage(NamedTuple):
    size: Tensor
    """s = sqrt(mean square + eps) of each token."""
    N: Tensor
    """Derivative of the norm, (n, d, d)."""
    h: Tensor
    """x / s, (n, d)."""
    blocks: Tensor
    """B_ij, of the derivative behind the norm: (n, n, d, d)."""
    B: Tensor
    """Their norms."""
    Bh: Tensor
    """B_ij h_j, (n, n, d)."""
    B_lost: Tensor
    """Error of the blocks B: (n, n)."""
    part: _Mlp | _Attention
    lost: Tensor
    """Error of the blocks of D: (n, n)."""
    forward: float
    """Error of the computed output of the stage, as one vector."""
    width: float
    """|D|_F."""


@dataclass(eq=False)
class _Ball:
    """What depends on the norm and the token, and not on r."""

    shape: list[Tensor]
    rho: list[Tensor]
    gram: dict[int, Tensor]
    linear: dict[int, Tensor]
    total: float
    """The length of eps as one vector, for r = 1."""


@dataclass(eq=False)
class Rivals:
    """All pairs of a kept token and another one at one position."""

    kept: Tensor
    """The K largest logits, by index."""
    margins: Tensor
    """(K, V), inf at kept ones; lower ends."""
    vectors: Tensor
    """|E_i - E_j|: (K, V)."""
    offsets: Tensor
    """b_i - b_j: (K, V)."""
    size: Tensor
    h: Tensor
    """The normed token, (d,)."""


def rivals_of(network: DecisionNetwork, X: Tensor, keep: int) -> list[Rivals]:
    """Margins of every token of the last stream X (n, d), rounded down, and the last norm there."""
    h, size, _ = _unit(network.norm, X)
    E, b = _logit_rows(network)
    gamma = _relative_rounding(network, *X.shape)
    plain = replace(network.norm, weight=None, bias=None)
    rivals = []
    for t in range(len(X)):
        logits = (E @ h[t]) + b
        error = gamma * (lengths(E) * float(h[t].norm()) + b.abs())
        error = error + lengths(E) * 2.0 * plain.rounding(X[t : t + 1])
        kept = logits.topk(keep).indices
        margins = logits[kept, None] - logits - error[kept, None] - error
        margins[:, kept] = math.inf
        gaps = torch.stack([lengths(E[i] - E) for i in kept]) * _GROW
        gaps = gaps + gamma * (lengths(E)[kept, None] + lengths(E))
        rivals.append(Rivals(kept, margins, gaps, b[kept, None] - b, size[t], h[t]))
    return rivals


def _logit_rows(network: DecisionNetwork) -> tuple[Tensor, Tensor]:
    """E (V, d) with the gain of the last norm in it, and the bias (V,)."""
    norm, head = network.norm, network.head
    return _folded(norm, head.W).mT, _folded_bias(norm, head.W, head.b)


def _relative_rounding(network: DecisionNetwork, n: int, d: int) -> float:
    """More than that of a few products, each a sum over any axis."""
    widest = max([n * d, *(_widest(stage) for stage in network.stages)])
    return 16.0 * (widest + 64) * _EPS


class OutOfTime(Exception):
    """A deadline has passed."""


class Bound(NamedTuple):
    """The least lower bound of a margin at a position, and what it lost."""

    lower: float
    kept: int
    rival: int
    parts: dict[str, float]
    """By kind of remainder."""
    stages: list[float]
    """By stage, without the gradient and the last norm."""


@final
class DecisionBound:
    """Lower bounds of the margins of a network about X (n, d), at every position."""

    def __init__(
        self,
        network: DecisionNetwork,
        X: Tensor,
        *,
        keep: int = 1,
        deadline: float = math.inf,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """``progress`` is called with the products of Jacobians that are done, of how many.

        Every method raises OutOfTime after ``deadline``, by time.monotonic.
        """
        self.network, self.deadline = network, deadline
        self.n, self.d = X.shape
        _require_stages(network.stages)
        attends = [isinstance(_parts(one)[1][0], SelfAttention) for one in network.stages]
        self._mixing = max((s for s, one in enumerate(attends) if one), default=-1)
        """The last stage in which tokens meet."""
        require_size(self.n, self.d, len(network.stages))
        self.gamma = _relative_rounding(network, self.n, self.d)
        self.X = X.detach().double()
        with torch.no_grad():
            self.streams = network.streams(self.X)
            self.rivals = rivals_of(network, self.streams[-1], keep)
            self._expand(progress or (lambda *_: None))

    def _require_time(self) -> None:
        if time.monotonic() >= self.deadline:
            raise OutOfTime

    def _expand(self, progress: Callable[[int, int], None]) -> None:
        n, d = self.n, self.d
        self.stages: list[_Stage] = []
        self.gradients: dict[tuple[int, int], list[Tensor]] = {}
        """Of the scores of stage s behind stage k - 1: rows (m, H, j, d) of every query."""
        self.T: dict[tuple[int, int], list[Tensor]] = {}
        """From the output of stage k - 1 to the input of stage s: rows (m, d, d) of every token."""
        self.lengths: dict[tuple[int, int], Tensor] = {}
        current = {0: torch.eye(n * d, dtype=torch.float64)}
        self._keep(0, current)
        S = len(self.network.stages)
        for s, residual in enumerate(self.network.stages):
            self._require_time()
            stage, J = self._stage(residual, self.streams[s])
            self.stages.append(stage)
            if isinstance(stage.part, _Attention):
                for k, T in current.items():
                    self.gradients[s, k] = self._score_gradients(s, T)
            meet = isinstance(stage.part, _Attention)
            for k, T in current.items():  # one by one, so that each replaces its predecessor
                progress(s * (s + 1) // 2 + k, S * (S + 1) // 2)
                current[k] = J if k == s else self._composed(J, T, meet=meet)
            current[s + 1] = torch.eye(n * d, dtype=torch.float64)
            self._keep(s + 1, current)
        self.frobenius = {key: float(t.norm()) for key, t in self.lengths.items()}

    def _composed(self, J: Tensor, T: Tensor, *, meet: bool) -> Tensor:
        """J T of causal Jacobians, lower triangular by tokens of width d; without ``meet`` J is one
        block per token."""
        size, d = len(J), self.d
        if not meet:
            own = J.view(size // d, d, size // d, d).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
            return (own @ T.view(size // d, d, size)).view(size, size)
        product, step = torch.zeros_like(T), _TOGETHER * d
        for i in range(0, size, step):
            self._require_time()
            for m in range(0, i + 1, step):
                block = J[i : i + step, m : i + step] @ T[m : i + step, m : m + step]
                product[i : i + step, m : m + step] = block
        return product

    def _keep(self, s: int, current: dict[int, Tensor]) -> None:
        n, d = self.n, self.d
        for k, T in current.items():
            blocks = T.view(n, d, n, d)
            if k < s:
                rows = (blocks[i, :, : i + 1].permute(1, 0, 2) for i in range(n))
                self.T[s, k] = [row.contiguous() for row in rows]
            self.lengths[s, k] = blocks.square().sum((1, 3)).sqrt() * _GROW

    def _row(self, s: int, k: int, i: int) -> Tensor:
        """Of token i, from the output of stage k - 1 to the input of stage s: (i + 1, d, d)."""
        if k < s:
            return self.T[s, k][i]
        identity = torch.zeros(i + 1, self.d, self.d, dtype=torch.float64)
        identity[i] = torch.eye(self.d, dtype=torch.float64)
        return identity

    def _stage(self, residual: Residual, x: Tensor) -> tuple[_Stage, Tensor]:
        """The stage at its centre, and its Jacobian (n d, n d)."""
        n, d = self.n, self.d
        norm, branch = _parts(residual)
        h, size, N = _unit(norm, x)
        part: _Mlp | _Attention
        if isinstance(branch[0], SelfAttention):
            part, B, lost = self._attention(norm, branch[0], residual.scale, h)
        else:
            part, B, lost = self._mlp(norm, branch, residual.scale, h)
        eye = torch.eye(d, dtype=torch.float64)
        blocks = B.permute(0, 2, 1, 3)
        B_norm = torch.zeros(n, n, dtype=x.dtype)
        at, m = blocks.abs().amax((2, 3)).nonzero(as_tuple=True)
        B_norm[at, m] = largest(blocks[at, m] @ blocks[at, m].mT).sqrt() * _GROW
        B_norm = B_norm + lost
        Bh = torch.einsum("imab,mb->ima", blocks, h)
        J = torch.einsum("imjk,jkl->imjl", B, N)
        index = torch.arange(n)
        J[index, :, index, :] += eye
        B_lost, steep = lost, (1.0 / size)[None, :]
        lost = (lost + self.gamma * B_norm) * steep + self.gamma * torch.eye(n, dtype=x.dtype)
        behind = float(largest(B_norm.mT @ B_norm).sqrt())
        unit = replace(norm, weight=None, bias=None).rounding(x) + 8.0 * _EPS * float(h.norm())
        if norm.bias is not None:
            offset = norm.bias if norm.weight is None else norm.bias / norm.weight
            unit += 8.0 * _EPS * float(offset.norm()) * math.sqrt(n)
        forward = _forward_rounding(branch, norm(x)) * abs(residual.scale) + 2.0 * behind * unit
        forward += 8.0 * _EPS * float(x.norm() + residual(x).norm())
        width = float(J.norm())
        stage = _Stage(size, N, h, blocks, B_norm, Bh, B_lost, part, lost, forward, width)
        return stage, J.reshape(n * d, n * d)

    def _attention(
        self, norm: NormLayer, layer: SelfAttention, scale: float, h: Tensor
    ) -> tuple[_Attention, Tensor, Tensor]:
        n = self.n
        H = len(layer._weights[0])
        W_Q, W_K, W_V = (repeat_heads(_folded(norm, W), H, -3) for W in layer._weights)
        biases = [
            _folded_bias(norm, W, b) for W, b in zip(layer._weights, layer.biases, strict=True)
        ]
        b_Q, b_K, b_V = (repeat_heads(b.unsqueeze(-2), H, -3) for b in biases)
        beta = layer.choice.beta
        assert isinstance(beta, float | int)
        sharp = beta * (W_Q.shape[-1] ** -0.5 if layer.scale is None else layer.scale)
        q, k = h @ W_Q + b_Q, h @ W_K + b_K  # (H, n, D)
        Q, K = (W.mT.unsqueeze(1).expand(-1, n, -1, -1) for W in (sharp * W_Q, W_K))
        q = sharp * q
        if layer.rotations is not None:
            R = layer.rotations
            q, k = (torch.einsum("ned,hnd->hne", R, y) for y in (q, k))
            Q, K = (torch.einsum("ned,hndm->hnem", R, W) for W in (Q, K))
        log = torch.zeros(H, n, n, dtype=torch.float64)
        if layer.prior is not None:
            prior = layer.prior.log(n, n, H=H, device=h.device, dtype=h.dtype).detach()
            log = log + prior.reshape(-1, n, n)
        live = log > -math.inf
        if bool((live & ~torch.ones(n, n, dtype=torch.bool).tril()).any()):
            raise ValueError("a decision is certified for causal attention; this one looks ahead.")
        x = q @ k.mT + log
        alpha = float(layer.choice.alpha) if isinstance(layer.choice, Entmax) else 1.0
        p = x.softmax(-1) if alpha == 1.0 else tsallis(x, alpha)
        s = p if alpha == 1.0 else slopes(p, alpha)
        w = s / s.sum(-1, keepdim=True)
        assert layer.W_O is not None
        W_O = scale * layer.W_O.view(H, -1, layer.W_O.shape[-1])  # (H, E, d)
        OV = (W_V @ W_O).mT  # (H, d, d): out = OV h
        v = h @ OV.mT + b_V @ W_O
        o = w @ v
        c = v[:, None] - o[:, :, None]  # (H, i, j, d)
        Kq = torch.einsum("hjem,hie->hijm", K, q)
        centred = k[:, None] - (w @ k)[:, :, None]
        Qk = torch.einsum("hiem,hije->hijm", Q, centred)
        B = torch.einsum("hij,hmk->imjk", p, OV) + torch.einsum("hij,hijm,hijk->imjk", s, c, Kq)
        index = torch.arange(n)
        B[index, :, index, :] += torch.einsum("hij,hijm,hijk->imk", s, c, Qk)
        # errors: of scores relative to the lengths of queries and keys, of the rest to its terms
        long = lengths(q)[:, :, None] * lengths(k)[:, None] + log.masked_fill(~live, 0.0).abs()
        slack = self.gamma * (4.0 + 4.0 * long.amax(-1))  # (H, n)
        value = (lengths(h).amax() * lengths(OV.flatten(1)) + lengths((b_V @ W_O)[:, 0])).amax()
        error_c = 8.0 * self.gamma * value
        c_norm = torch.where(live, lengths(c) * _GROW + error_c, 0.0)
        Kq_norm = lengths(K.flatten(2))[:, None] * lengths(q)[:, :, None]
        Qk_norm = 2.0 * lengths(Q.flatten(2))[:, :, None] * lengths(k).amax(-1)[:, None, None]
        part = _Attention(
            *(Q, K, OV, alpha, x, p, s, w, live, c_norm, c, error_c),
            *(Kq, Qk, Kq_norm + Qk_norm, slack),
        )
        lost_p, lost_s = slack[..., None] * p, slack[..., None] * p * c_norm
        if alpha > 1.0:
            at = _entmax_box(part, torch.zeros_like(p))
            lost_p, lost_s = at.dp, (at.most - at.least) * c_norm
            lost_s = lost_s + at.most * (at.dw * c_norm).sum(-1, keepdim=True)
        lost_p, lost_s = lost_p + 8.0 * self.gamma * p, lost_s + 8.0 * self.gamma * s * c_norm
        error = lost_p * lengths(OV.flatten(1))[:, None, None] + lost_s * Kq_norm
        lost = error.sum(0) + torch.diag((lost_s * Qk_norm).sum((0, 2)))
        return part, B, lost

    def _mlp(
        self, norm: NormLayer, branch: Sequence[TokenLayer], scale: float, h: Tensor
    ) -> tuple[_Mlp, Tensor, Tensor]:
        n, d = self.n, self.d
        first, down = branch[0], branch[-1]
        assert isinstance(down, LinearLayer)
        if isinstance(first, GatedLayer):
            name, W_G, W_U, (b_G, b_U) = first.name, first.W_G, first.W_U, first.biases
            g = h @ _folded(norm, W_G) + _folded_bias(norm, W_G, b_G)
            u = h @ _folded(norm, W_U) + _folded_bias(norm, W_U, b_U)
            U = _folded(norm, W_U).mT
        else:
            assert isinstance(first, LinearLayer)
            assert isinstance(branch[1], ActivationLayer)
            name, W_G = branch[1].name, first.W
            g = h @ _folded(norm, W_G) + _folded_bias(norm, W_G, first.b)
            u, U = torch.ones_like(g), torch.zeros_like(W_G.mT)
        G, D = _folded(norm, W_G).mT, scale * down.W.mT
        curvature = CURVATURES[name]
        a, a1, a2 = _FUNCTIONS[name](g), SLOPES[name].at(g), curvature.second(g)
        inner = (a1 * u)[:, :, None] * G + a[:, :, None] * U  # (n, F, d)
        B = torch.zeros(n, d, n, d, dtype=torch.float64)
        index = torch.arange(n)
        B[index, :, index, :] = D @ inner
        # an error of g moves a1 u and a by curvature and slope times it
        spread = self.gamma * (lengths(h)[:, None] * (lengths(G) + lengths(U)) + g.abs() + u.abs())
        terms = ((a1 * u).abs() + spread * (1.0 + u.abs())) * lengths(G)
        terms = terms + (a.abs() + 2.0 * spread) * lengths(U)
        move = spread * (2.0 + u.abs()) * (lengths(G) + lengths(U)) + self.gamma * terms
        lost = torch.diag((lengths(D.mT) * move).sum(-1))
        a3 = curvature.third(g).abs() + curvature.most_fourth * spread + _EPS
        part = _Mlp(G, U, D, u, a1, a2, a3, spread, curvature)
        return part, B, lost

    # The ball ------------------------------------------------------------------------------------

    def _score_gradients(self, s: int, T: Tensor) -> list[Tensor]:
        """Gradients of the scores of stage s, centred by w: T (n d, n d) -> rows (m, H, j, d)."""
        n, d = self.n, self.d
        stage = self.stages[s]
        f = stage.part
        assert isinstance(f, _Attention)
        NQ = torch.einsum("hijm,imk->hijk", f.Qk, stage.N)
        NK = torch.einsum("hijm,jmk->hijk", f.Kq, stage.N)
        slabs = [T[i * d : (i + 1) * d, : (i + 1) * d] for i in range(n)]  # (d, m l)
        of_keys = [NK[:, j:, j] @ slab for j, slab in enumerate(slabs)]  # (H, n - j, m l)
        rows = []
        for i, slab in enumerate(slabs):
            self._require_time()
            z = NQ[:, i, : i + 1] @ slab  # (H, j, m l)
            for j in range(i + 1):
                z[:, j, : (j + 1) * d] += of_keys[j][:, i - j]
            z -= f.w[:, i, None, : i + 1] @ z
            z.masked_fill_(~f.live[:, i, : i + 1, None], 0.0)
            rows.append(z.view(*z.shape[:2], i + 1, d).permute(2, 0, 1, 3).contiguous())
        return rows

    def ball(self, norm: str, token: int | None = None) -> _Ball:
        """The images of the unit ball of a norm at every stage; ``token`` for "one"."""
        n = self.n
        shape, rho, gram, linear_ = [], [], {}, {}
        for s in range(len(self.stages) + 1):
            self._require_time()
            S = torch.zeros(n, self.d, self.d, dtype=torch.float64)
            for i in range(n):
                T = self._row(s, 0, i)
                if norm == "all":
                    S[i] = (T @ T.mT).sum(0)
                elif norm == "token":
                    TT = T @ T.mT
                    alpha = (largest(TT) * _GROW).sqrt().clamp(min=1e-12)
                    S[i] = alpha.sum() * torch.einsum("mab,m->ab", TT, 1.0 / alpha)
                elif token is not None and token <= i:
                    S[i] = T[token] @ T[token].mT
            shape.append(S)
            rho.append(largest(S).sqrt() * _GROW + self.gamma * self.frobenius[s, 0])
            part = self.stages[s].part if s < len(self.stages) else None
            if not isinstance(part, _Attention):
                continue
            H = len(part.p)
            parts = n if norm == "token" else 1
            gram[s] = torch.zeros(H, n, parts, n, n, dtype=torch.float64)
            linear_[s] = torch.zeros(H, n, n, dtype=torch.float64)
            for i, z in enumerate(self.gradients[s, 0]):  # (m, H, j, l)
                if norm == "one":
                    z = z[token : token + 1] if token is not None else z[:0]
                each = z @ z.mT  # (m, H, j, k)
                each = each.transpose(0, 1) if norm == "token" else each.sum(0)[:, None]
                gram[s][:, i, : each.shape[1], : i + 1, : i + 1] = each
                long = each.diagonal(dim1=-2, dim2=-1).clamp(min=0.0).sqrt()
                linear_[s][:, i, : i + 1] = long.sum(1) * _GROW
        total = math.sqrt(n) if norm == "token" else 1.0
        return _Ball(shape, rho, gram, linear_, total)

    def substitution_ball(self, allowed: "Substitutions") -> _Ball:
        """The images of all substitutions at every stage, for ``remainders`` at r = 1."""
        n, d, total = self.n, self.d, allowed.total
        shape, rho, gram, linear_ = [], [], {}, {}
        for s in range(len(self.stages) + 1):
            self._require_time()
            S, long = torch.zeros(n, d, d, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
            for i in range(n):
                T = self._row(s, 0, i)
                images = {m: M @ T[m].mT for m, M in allowed.moves.items() if m <= i}
                if images:
                    each = torch.stack([y.mT @ y for y in images.values()])
                    S[i] = _ellipsoid_of_sum(each, allowed.most)
                    farthest = torch.stack([lengths(y).amax() for y in images.values()])
                    long[i] = _largest_sum(farthest, allowed.most)
            lost = self.gamma * self.frobenius[s, 0] * total
            S = _widened(S, torch.full((n, d), lost, dtype=torch.float64))
            shape.append(S)
            rho.append(torch.minimum(largest(S).sqrt(), long + lost) * _GROW)
            part = self.stages[s].part if s < len(self.stages) else None
            if not isinstance(part, _Attention):
                continue
            H = len(part.p)
            gram[s] = torch.zeros(H, n, 1, n, n, dtype=torch.float64)
            linear_[s] = torch.zeros(H, n, n, dtype=torch.float64)
            for i, z in enumerate(self.gradients[s, 0]):  # (m, H, j, l)
                moved = [z[m] @ M.mT for m, M in allowed.moves.items() if m <= i]  # (H, j, a)
                if not moved:
                    continue
                each = torch.stack([y @ y.mT for y in moved])
                lost_j = self.gamma * math.sqrt(i + 1) * total * z.square().sum((0, 3)).sqrt()
                joint = _widened(_ellipsoid_of_sum(each, allowed.most), lost_j)
                gram[s][:, i, 0, : i + 1, : i + 1] = joint
                most = torch.stack([y.abs().amax(-1) for y in moved])
                long = _largest_sum(most, allowed.most) + lost_j
                linear_[s][:, i, : i + 1] = long * _GROW
        return _Ball(shape, rho, gram, linear_, total)

    # Bounds at a radius ---------------------------------------------------------------------------

    def remainders(self, ball: _Ball, r: float, n: int | None = None) -> "_Remainders":
        """eta of all stages and of the first n tokens at radius r.

        A bound that diverges ends the tokens there, up to the keys of the last attention. Beyond
        them tokens do not meet: theirs is infinite, and the others go on.
        """
        n, d = self.n if n is None else n, self.d
        eye = torch.eye(d, dtype=torch.float64)
        etas: list[Tensor] = []
        moves: list[Tensor] = []
        shapes: list[_Shaped] = []
        alive = torch.ones(n, dtype=torch.bool)
        for s in range(len(self.stages) + 1):
            self._require_time()
            err, S_err = self._carried(s, shapes, n)
            lin = r * ball.rho[s][:n]
            rho = (lin + err) * _GROW
            good = rho.isfinite() & (rho < 1e3)
            if s < len(self.stages):
                good = good & (rho < 0.9 * math.sqrt(d) * self.stages[s].size[:n])
            if s <= self._mixing:
                n = _alive(good)
                if n == 0:
                    return _Remainders([], [], [], 0)
                rho, lin, err = rho[:n], lin[:n], err[:n]
                etas, moves = ([t[..., :n] for t in part] for part in (etas, moves))
                shapes = [one.cut(n) for one in shapes]
                alive = alive[:n]
            else:
                alive = alive & good
            moves.append(torch.where(alive, rho, torch.inf))
            if s == len(self.stages):
                break
            # tokens whose bound diverged are computed as ones that stay, and are infinite below
            rho, lin, err = (torch.where(alive, x, 0.0) for x in (rho, lin, err))
            S_err = torch.where(alive[:, None, None], S_err[:n], 0.0)
            S = _minkowski(r * r * ball.shape[s][:n], lin, S_err, err, self.gamma)
            S = torch.where(alive[:, None, None], S, 0.0)
            stage = self.stages[s]
            bent = self._bent(s, S, rho)
            N = stage.N[:n]
            S_h = N @ S @ N
            top = (largest(S_h) * _GROW + self.gamma * (rho / stage.size[:n]).square()).sqrt()
            h = stage.h[:n]
            for part, size in (
                (bent.along.square()[:, None, None] * h[:, :, None] * h[:, None], bent.stretch),
                (bent.across.square()[:, None, None] * bent.S, bent.across * rho),
                (bent.lost.square()[:, None, None] * eye, bent.lost),
            ):
                S_h, top = _minkowski(S_h, top, part, size, self.gamma), top + size
            eta = torch.zeros(len(PARTS), n, dtype=torch.float64)
            shape = torch.zeros(_SHAPED, n, d, d, dtype=torch.float64)
            eta[0], shape[0] = self._norm_remainder(stage, bent, rho)
            if isinstance(stage.part, _Mlp):
                eta[4:6], shape[4:6] = self._mlp_remainder(stage.part, S_h)
            else:
                row = self._row_moves(s, ball, r, S_h, rho, bent, shapes)
                good = row.Z.amax((0, 2)) < _MOST
                if s < self._mixing:
                    n = _alive(good)
                    if n == 0:
                        return _Remainders([], [], [], 0)
                    etas, moves = ([t[..., :n] for t in part] for part in (etas, moves))
                    shapes = [one.cut(n) for one in shapes]
                    eta, shape, alive = eta[:, :n], shape[:, :n], alive[:n]
                    row, rho, bent = row.cut(n), rho[:n], bent.cut(n)
                else:
                    alive = alive & good
                    row = row.only(alive)
                remainder = (
                    self._softmax_remainder if stage.part.alpha == 1.0 else self._entmax_remainder
                )
                eta[1], eta[2], eta[3], eta[6], shape[1:4] = remainder(
                    stage.part, row, ball.gram[s][:, :n, :, :n, :n], r, S_h[:n]
                )
            products = self.frobenius[s, 0] * r * ball.total + sum(
                self.frobenius[s, k + 1] * float(e.sum(0).nan_to_num(posinf=0.0).norm())
                for k, e in enumerate(etas)
            )
            products = self.gamma * stage.width * products
            eta[6] += stage.lost[:n, :n] @ rho + stage.forward + products
            loose = stage.B_lost[:n, :n] + self.gamma * stage.B[:n, :n]
            eta[6] += loose @ (bent.size + bent.stretch + bent.across * rho)
            eta, shape = eta * _GROW, torch.where(alive[:, None, None], shape, 0.0)
            shapes.append(_shaped(torch.where(alive, eta, 0.0), shape, self.gamma))
            etas.append(torch.where(alive, eta, torch.inf))
        return _Remainders(etas, shapes, moves, n)

    def _bent(self, s: int, S: Tensor, rho: Tensor) -> "_Bent":
        """The remainder of the norm of stage s, for moves in ellipsoids S (n, d, d)."""
        stage, d = self.stages[s], self.d
        size, h = stage.size[: len(rho)] * (1.0 - 1e-9), stage.h[: len(rho)]
        norm, _ = _parts(self.network.stages[s])
        if norm.kind == "layer":
            S = S - S.mean(-1, keepdim=True)
            S = S - S.mean(-2, keepdim=True)
        square = ((S @ h[..., None])[..., 0] * h).sum(-1).clamp(min=0.0)
        square = square + self.gamma * d * torch.einsum("iaa->i", S)
        a = torch.minimum(square.sqrt() * _GROW / d, rho / math.sqrt(d)) / size
        b = rho.square() / (d * size.square())
        y = 2.0 * a + b
        across = torch.maximum(a / (1.0 - a), (0.5 * y).clamp(max=1.0)) / size * _GROW
        along = torch.maximum(1.5 * a.square() / (1.0 - a) ** 5, 0.375 * y.square())
        along = torch.maximum(along, 0.5 * b) * _GROW
        stretch = along * math.sqrt(d)
        around = rho.square() / math.sqrt(3.0 * d) / (size - rho / math.sqrt(d)).square() * _GROW
        lost = self.gamma * (rho / size + around + stretch)
        return _Bent(along, across, S, torch.minimum(around, stretch + across * rho), stretch, lost)

    def _norm_remainder(self, stage: _Stage, bent: "_Bent", rho: Tensor) -> tuple[Tensor, Tensor]:
        """Of the norm, behind its branch: its ball (n,), and its ellipsoid (n, d, d)."""
        n = len(rho)
        B, Bh = stage.B[:n, :n], stage.Bh[:n, :n]
        h_length = lengths(Bh) * bent.along
        rest = B * (bent.across * rho)
        ball = torch.minimum(B * bent.size, h_length + rest).sum(-1)
        moving = rho > _RESTING * rho.amax()
        at, m = ((B > 0.0) & moving).nonzero(as_tuple=True)
        blocks = stage.blocks[:n, :n][at, m]
        image = blocks @ (bent.across.square()[:, None, None] * bent.S)[m] @ blocks.mT
        sizes = torch.einsum("paa->p", image).clamp(min=1e-300).sqrt()
        vectors = Bh / lengths(Bh).clamp(min=1e-150)[..., None].sqrt()
        total = torch.einsum("im,ima,imb->iab", bent.along.expand(n, n), vectors, vectors)
        total.index_add_(0, at, image / sizes[:, None, None])
        total = total * h_length.sum(-1).index_add(0, at, sizes)[:, None, None]
        resting = (B * torch.where(moving, 0.0, bent.size)).sum(-1)
        eye, d = torch.eye(self.d, dtype=B.dtype), math.sqrt(self.d)
        sizes = torch.einsum("iaa->i", total).sqrt()
        around = resting.square()[:, None, None] * eye
        return ball, _minkowski(total, sizes, around, resting * d, 0.0)

    def _carried(self, s: int, shapes: "Sequence[_Shaped]", n: int) -> tuple[Tensor, Tensor]:
        """What earlier remainders add to the input of stage s: lengths (n,), shapes (n, d, d)."""
        d = self.d
        small, long = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
        total = torch.zeros(n, d, d, dtype=torch.float64)
        for k, shape in enumerate(shapes):
            small = small + self.lengths[s, k + 1][:n, :n] @ shape.small
            if s == k + 1:  # T is the identity
                size = torch.einsum("paa->p", shape.S).clamp(min=1e-300).sqrt()
                total[shape.tokens] += shape.S / size[:, None, None]
                long[shape.tokens] += size
                continue
            for i, T in enumerate(self.T[s, k + 1][:n]):
                tokens = shape.tokens[shape.tokens <= i]
                if len(tokens) == 0:
                    continue
                T = T if len(tokens) == len(T) else T[tokens]
                image = T @ shape.S[: len(tokens)] @ T.mT
                size = torch.einsum("paa->p", image).clamp(min=1e-300).sqrt()
                total[i] += torch.einsum("pab,p->ab", image, 1.0 / size)
                long[i] += size.sum()
        total = long[:, None, None] * total
        most = (largest(total) * _GROW + self.gamma * long.square()).sqrt()
        ball = small.square()[:, None, None] * torch.eye(d, dtype=torch.float64)
        return (most + small) * _GROW, _minkowski(total, most, ball, small, self.gamma)

    def _mlp_remainder(self, f: _Mlp, S: Tensor) -> tuple[Tensor, Tensor]:
        """Second order and beyond, token by token: S (n, d, d) -> (2, n), (2, n, d, d)."""
        second, third, shapes, beyond = [], [], [], []
        eye = torch.eye(self.d, dtype=torch.float64)
        long_G, long_U, long_D = lengths(f.G), lengths(f.U), lengths(f.D.mT)
        all_u, all_first = f.u.abs() + f.spread, f.first.abs() + f.spread
        for i, S_i in enumerate(S):
            top = float(S_i.diagonal().sum()) * _GROW
            u, first = all_u[i], all_first[i]
            if top < _TINY:  # a token that moves by rounding alone
                each = 0.5 * f.curvature.most_second * u * long_G.square()
                each = each + (first + 0.5) * long_G * long_U
                second.append((long_D * each).sum() * top)
                each = (u * long_G + 3.0 * long_U) * long_G.square()
                third.append((long_D * each).sum() * top**1.5)
                shapes.append(second[-1].square() * eye)
                beyond.append(third[-1].square() * eye)
                continue
            root = _root(S_i)
            A, C = f.G @ root, f.U @ root
            a, c, b = A @ A.mT, A @ C.mT, C @ C.mT
            alpha, beta = 0.5 * f.second[i] * f.u[i], f.first[i]  # with their signs
            mixed = alpha[:, None] * beta * a * c
            gram = alpha[:, None] * alpha * a * a + mixed + mixed.mT
            gram = gram + 0.5 * beta[:, None] * beta * (a * b + c * c.mT)
            dg = (a.diagonal() + self.gamma * top * long_G.square()).sqrt()
            du = (b.diagonal() + self.gamma * top * long_U.square()).sqrt()
            most = 0.5 * f.curvature.most_second * u * dg + first * du
            error = (long_D * (most * dg)).sum()
            behind = f.D @ gram @ f.D.mT
            size = largest(behind) * _GROW + self.gamma * error.square()
            second.append(size.sqrt())
            shapes.append(_GROW * behind + self.gamma * error.square() * eye)
            third_ = f.third[i] / 6.0 + f.curvature.most_fourth / 24.0 * dg
            third_ = third_.clamp(max=f.curvature.most_third / 6.0)
            bent = 0.5 * (f.second[i].abs() + f.spread[i]) + third_ * dg
            bent = bent.clamp(max=0.5 * f.curvature.most_second)
            steep = third_ * u * dg.square() + bent * dg * du
            by_entry = (f.D.abs() @ (steep * dg)).norm()
            half = steep.sqrt()[:, None]
            left = f.D * half.mT
            right = A * half
            slack = self.gamma * top * (steep * long_G.square()).sum()
            longest = largest(right.mT @ right) * _GROW + slack
            behind = longest * (left @ left.mT)
            third.append(torch.minimum(by_entry, largest(behind).sqrt()))
            beyond.append(behind)
        orders = torch.stack((torch.stack(second), torch.stack(third)))
        return orders, torch.stack((torch.stack(shapes), torch.stack(beyond)))

    def _row_moves(
        self,
        s: int,
        ball: _Ball,
        r: float,
        S_h: Tensor,
        rho: Tensor,
        bent: "_Bent",
        shapes: "Sequence[_Shaped]",
    ) -> "_RowMoves":
        """How far the centred scores of every row can move."""
        stage, n = self.stages[s], len(rho)
        f = stage.part
        assert isinstance(f, _Attention)
        Q, K = f.Q[:, :n], f.K[:, :n]
        top = torch.einsum("iaa->i", S_h)
        S_q = torch.einsum("hiem,imk,hifk->hief", Q, S_h, Q)
        S_k = torch.einsum("hiem,imk,hifk->hief", K, S_h, K)
        size_q, size_k = (lengths(W.flatten(2)).square() * top for W in (Q, K))
        l_q = (largest(S_q) * _GROW + self.gamma * size_q).sqrt()
        l_k = (largest(S_k) * _GROW + self.gamma * size_k).sqrt()
        trace = torch.einsum("hief,hjef->hij", S_q, S_k).clamp(min=0.0) * _GROW
        trace = trace + self.gamma * size_q[:, :, None] * size_k[:, None]
        product = torch.minimum(l_q[:, :, None] * l_k[:, None], trace.sqrt())
        w, live = f.w[:, :n, :n], f.live[:, :n, :n]
        Qk = bent.along_rows(f.Qk[:, :n, :n], stage.h[:n], "i")
        Kq = bent.along_rows(f.Kq[:, :n, :n], stage.h[:n], "j")
        # errors of N and of the centred gradients, relative to gradients that are not centred
        tilt = bent.lost + self.gamma * bent.across * rho
        e = (Qk + Kq + product) * _GROW
        e = e + 8.0 * (tilt[:, None] + tilt) * f.loose[:, :n, :n]
        e = torch.where(live, e, 0.0)
        e = e + (w * e).sum(-1, keepdim=True)
        Z = r * ball.linear[s][:, :n, :n] + e
        # the ellipsoids of earlier remainders, jointly over a row, with the weights of their traces
        if f.alpha > 1.0:  # keys without a weight may get one
            w = 0.5 * (w + live / live.sum(-1, keepdim=True))
        gram, total = w.new_zeros(*w.shape, n), torch.zeros_like(w[..., 0])
        for k, shape in enumerate(shapes):
            for i, z in enumerate(self.gradients[s, k + 1][:n]):  # (m, H, j, d)
                if bool((shape.small[: i + 1] > 0.0).any()):
                    small = torch.einsum("mhj,m->hj", z.norm(dim=-1), shape.small[: i + 1])
                    e[:, i, : i + 1] += small
                    Z[:, i, : i + 1] += small
                tokens = shape.tokens[shape.tokens <= i]
                z = z if len(tokens) == len(z) else z[tokens]
                moved = (z.flatten(1, 2) @ shape.S[: len(tokens)]).view(z.shape)
                square = (z * moved).sum(-1).clamp(min=0.0)  # (m, H, j)
                Z[:, i, : i + 1] += square.sqrt().sum(0)
                size = torch.einsum("hj,mhj->mh", w[:, i, : i + 1], square).sqrt()
                size = size.clamp(min=1e-150)
                each = z @ (moved / size[:, :, None, None]).mT
                gram[:, i, : i + 1, : i + 1] += each.sum(0)
                total[:, i] += size.sum(0)
        gram = gram * total[..., None, None]
        Z = torch.where(live, Z * _GROW, 0.0)
        return _RowMoves(Z, torch.where(live, e, 0.0), product, gram)

    def _softmax_remainder(
        self, f: _Attention, row: "_RowMoves", gram: Tensor, r: float, S_h: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Of score products, softmax, weights times values, rounding: (n,) each, and ellipsoids."""
        n = len(S_h)
        p, live, c = f.p[:, :n, :n], f.live[:, :n, :n], f.c[:, :n, :n]
        slack = f.slack[:, :n, None]
        Z, e, product, earlier = row
        spread = partial(_spread, e=e, grams=(r * r * gram, earlier[:, :, None]), gamma=self.gamma)
        value = self._value_moves(f, S_h)
        scores = (p * (1.0 + 8.0 * slack) * c * product).sum((0, 2))
        softmax, values = torch.zeros_like(p[..., 0]), torch.zeros_like(p[..., 0])

        often = torch.zeros_like(p)  # most, its part of the second order, and their joint sizes
        second = torch.zeros_like(p)
        vary, most_second = torch.zeros_like(p[..., 0]), torch.zeros_like(p[..., 0])
        begin, mean = 0.0, 8.0 * (slack * p * Z).sum(-1)
        for end in _CUTS:
            up, down = p * (end * Z).exp(), p * (-end * Z).exp()
            most = up / (up + down.sum(-1, keepdim=True) - down).clamp(min=1e-300)
            most = torch.where(live, torch.minimum(most, up) * (1.0 + 8.0 * slack) * _GROW, 0.0)
            variance = spread(most).square()
            least = down / (down + up.sum(-1, keepdim=True) - up).clamp(min=1e-300)
            least = torch.maximum(least, down * (-0.5 * end * end * variance).exp()[..., None])
            dp = torch.maximum(most - p, p - least * (1.0 - 8.0 * slack) / _GROW)
            dp = torch.where(live, dp + 8.0 * slack * p, 0.0)
            shift = torch.minimum((dp * Z).sum(-1), end * variance) + mean
            w = most * (c + (dp * c).sum(-1, keepdim=True))
            box = (w * (Z + shift[..., None]).square()).sum(-1)
            joint = (spread(w) + shift * w.sum(-1).sqrt()).square()
            far = torch.where(most > 0.0, w / most.clamp(min=1e-300), 0.0).amax(-1) * variance
            smallest = torch.minimum(torch.minimum(box, joint), far)
            part = (end - begin) * (1.0 - 0.5 * (begin + end))
            softmax = softmax + part * smallest
            each = torch.minimum(most * (Z + shift[..., None]).square(), variance[..., None])
            second = second + part * (each + dp * variance[..., None])
            most_second = most_second + part * variance * (1.0 + dp.sum(-1))
            often, vary = often + (end - begin) * most, vary + (end - begin) * variance
            values = values + (end - begin) * torch.minimum(
                (most * value * (Z + shift[..., None])).sum(-1),
                variance.sqrt() * (most * value.square()).sum(-1).sqrt(),
            )
            begin = end
        values = torch.minimum(values, (dp * value).sum(-1))
        weight = p * (1.0 + 8.0 * slack) * product / c.clamp(min=1e-150)
        shapes = self._attention_shapes(
            f, S_h, scores, weight, second * most_second[..., None], often * vary[..., None]
        )
        error = f.error * ((p * product).sum(-1) + most_second).sum(0)
        return scores, softmax.sum(0), values.sum(0), error, shapes

    def _entmax_remainder(
        self, f: _Attention, row: "_RowMoves", gram: Tensor, r: float, S_h: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The same for entmax: sum_j sigma_j (Delta_j - mu)^2 (v_j - o), o and mu by w."""
        n = len(S_h)
        c = f.c[:, :n, :n]
        Z, e, product, earlier = row
        spread = partial(_spread, e=e, grams=(r * r * gram, earlier[:, :, None]), gamma=self.gamma)
        value = self._value_moves(f, S_h)
        at = _entmax_box(f, torch.zeros_like(Z))  # the text itself, up to rounding
        taken, dp = at.most * product, at.dp
        taken = taken + at.dw * taken.sum(-1, keepdim=True)
        scores = (taken * c).sum((0, 2))
        second, often = torch.zeros_like(c), torch.zeros_like(c)
        bent, values, most_second, vary = (torch.zeros_like(c[..., 0]) for _ in range(4))
        begin = 0.0
        for end in _CUTS:
            at = _entmax_box(f, end * Z)
            shift = (at.dw * Z).sum(-1)
            moved = (Z + shift[..., None]).square()
            w = at.sigma * (c + (at.dw * c).sum(-1, keepdim=True))
            joint = (spread(w) + shift * w.sum(-1).sqrt()).square()
            part = (end - begin) * (1.0 - 0.5 * (begin + end))
            bent = bent + part * torch.minimum((w * moved).sum(-1), joint)
            joint = (spread(at.sigma) + shift * at.sigma.sum(-1).sqrt()).square()
            most = torch.minimum((at.sigma * moved).sum(-1), joint)
            each = torch.minimum(at.sigma * moved, most[..., None])
            second = second + part * (each + at.dw * most[..., None])
            most_second = most_second + part * most * (1.0 + at.dw.sum(-1))
            variance = spread(at.most).square()  # about the mean by s, the least there is
            often, vary = often + (end - begin) * at.most, vary + (end - begin) * variance
            values = values + (end - begin) * torch.minimum(
                (at.most * value * moved.sqrt()).sum(-1),
                variance.sqrt() * (at.most * value.square()).sum(-1).sqrt(),
            )
            begin = end
        values = torch.minimum(values, ((at.dp + dp) * value).sum(-1))
        weight = taken / c.clamp(min=1e-150)
        shapes = self._attention_shapes(
            f, S_h, scores, weight, second * most_second[..., None], often * vary[..., None]
        )
        error = f.error * ((at.most * product).sum(-1) + most_second).sum(0)
        return scores, bent.sum(0), values.sum(0), error, shapes

    def _attention_shapes(
        self,
        f: _Attention,
        S_h: Tensor,
        scores: Tensor,
        weight: Tensor,
        second: Tensor,
        often: Tensor,
    ) -> Tensor:
        """Ellipsoids, per head, and their sum over heads: (3, n, d, d)."""
        n = len(S_h)
        v = f.values[:, :n, :n]
        of_scores = torch.einsum("hij,hija,hijb->iab", weight, v, v) * scores[:, None, None]
        of_softmax = torch.einsum("hij,hija,hijb->hiab", second, v, v)
        S_j = torch.einsum("hij,jab->hiab", often, S_h)
        of_values = f.OV[:, None] @ S_j @ f.OV[:, None].mT
        ridge = lengths(f.OV.flatten(1)).square()[:, None] * torch.einsum("hiaa->hi", S_j)
        eye = torch.eye(self.d, dtype=torch.float64)
        of_values = of_values + self.gamma * ridge[..., None, None] * eye
        return torch.stack((of_scores, _sum_of(of_softmax), _sum_of(of_values)))

    def _value_moves(self, f: _Attention, S_h: Tensor) -> Tensor:
        """sup of |OV dh_j|: (H, 1, n)."""
        behind = f.OV[:, None] @ S_h @ f.OV[:, None].mT
        size = lengths(f.OV.flatten(1)).square()[:, None] * torch.einsum("iaa->i", S_h)
        return (largest(behind) * _GROW + self.gamma * size).sqrt()[:, None]

    # Decisions ------------------------------------------------------------------------------------

    def gradients_at(
        self, t: int, norm: str, token: int | None, allowed: "Substitutions | None" = None
    ) -> "_Gradients":
        """|g_ij|* and |a_ijst| of all rivals of position t, for the ball of ``norm``.

        With ``allowed`` the first is the most that substitutions take off a margin.
        """
        rivals, (E, _) = self.rivals[t], _logit_rows(self.network)
        S, one = len(self.stages), norm == "one"
        first, behind = [], []
        for row, i in enumerate(rivals.kept.tolist()):
            W = self._functionals(t, i, rivals.offsets[row], E)
            # tokens that stay or are not read have lengths that matter to rounding alone
            pull = []
            for k in range(S + 1):
                self._require_time()
                start = t if k > self._mixing else (token or 0) if one else 0
                if k > 0 or allowed is None:
                    pull.append(self._pulled(W, k, t, start))
                else:
                    pull.append(self._taken(W, t, allowed))
            g = pull[0]
            if allowed is not None:
                first.append(g)
            elif norm == "all":
                first.append(g.square().sum(-1).sqrt())
            elif norm == "token":
                first.append(g.sum(-1))
            else:
                first.append(g[:, token])
            behind.append(torch.stack(pull[1:]))
        slack = (rivals.vectors + rivals.offsets.abs()) / rivals.size
        many = math.sqrt(self.n) if norm == "token" else 1.0
        many = many if allowed is None else allowed.total
        first_ = torch.stack(first) * _GROW + self.gamma * slack * self.frobenius[S, 0] * many
        frobenius = [self.frobenius[S, k] for k in range(1, S + 1)]
        loose = self.gamma * slack[:, None] * torch.tensor(frobenius, dtype=E.dtype)[None, :, None]
        behind_ = torch.stack(behind) * _GROW + loose[..., None]
        return _Gradients(first_, behind_, loose)

    def _functionals(self, t: int, kept: Tensor | int, offsets: Tensor, E: Tensor) -> Tensor:
        """Gradients of margins in the last stream's token, for rivals with rows E: (c, d)."""
        rivals, (rows, _) = self.rivals[t], _logit_rows(self.network)
        W = rows[kept] - E
        if self.network.norm.kind == "layer":
            W = W - W.mean(-1, keepdim=True)
        functionals: Tensor = (W + offsets[:, None] * rivals.h / self.d) / rivals.size
        return functionals

    def _pulled(self, W: Tensor, k: int, t: int, start: int) -> Tensor:
        """|W_j T_tm| of every rival and token, by |W_j| |T_tm|_F before ``start``: (V, t + 1)."""
        S = len(self.stages)
        before = lengths(W)[:, None] * self.lengths[S, k][t, :start]
        exact = [(W @ block).norm(dim=-1, keepdim=True) for block in self._row(S, k, t)[start:]]
        return torch.cat((before, *exact), -1)

    def _taken(self, W: Tensor, t: int, allowed: "Substitutions") -> Tensor:
        """The most that W_j T_tm e_m, summed over substitutions e, is below 0: (V,)."""
        row = self._row(len(self.stages), 0, t)
        moves = {m: M for m, M in allowed.moves.items() if m <= t}
        if not moves:
            return torch.zeros(len(W), dtype=W.dtype)
        each = [-(W @ (M @ row[m].mT).mT).amin(-1) for m, M in moves.items()]
        return _largest_sum(torch.stack(each).clamp(min=0.0), allowed.most)

    def margin(self, t: int, gradients: "_Gradients", found: "_Remainders", r: float) -> Bound:
        """The least lower bound of a margin of position t at radius r.

        All remainders are taken in balls first, and in their ellipsoids for the pairs whose bounds
        are least: until no other one is negative, or one of these is.
        """
        rivals = self.rivals[t]
        if t >= found.n or not bool(found.moves[-1][t].isfinite()):
            return Bound(-math.inf, 0, 0, {}, [])
        rho, d = float(found.moves[-1][t]), self.d
        least = float(rivals.size) * (1.0 - 1e-9) - rho / math.sqrt(d)
        if least <= 0.0:
            return Bound(-math.inf, 0, 0, {}, [])
        bent = rho * rho / (2.0 * d * least * float(rivals.size)) * _GROW
        last_norm = (-rivals.offsets).clamp(min=0.0) * bent
        last_norm = last_norm + 2.0 * self.gamma * rivals.vectors * rho / rivals.size
        known = gradients.first * r + last_norm
        # behind the last attention no token reaches another one
        errors = torch.stack([eta[:, : t + 1] for eta in found.etas])  # (S, parts, m)
        errors[max(self._mixing, 0) :, :, :t] = 0.0
        balls = torch.einsum("kSvm,Sm->kv", gradients.behind, errors.sum(1))
        low = (rivals.margins - (known + balls) * _GROW).flatten()
        order, V = low.argsort(), rivals.margins.shape[-1]
        worst, least_margin = None, math.inf
        for begin in range(0, len(order), _NEAREST):
            near = order[begin : begin + _NEAREST]
            if worst is not None and (float(low[near[0]]) > 0.0 or least_margin <= 0.0):
                break
            row, rival = near // V, near % V
            lost = self._losses(gradients, t, row, rival, found, errors)  # (pairs, S, parts)
            total = (known[row, rival] + lost.sum((1, 2))) * _GROW
            low[near] = rivals.margins[row, rival] - total
            at = int(low[near].argmin())
            if float(low[near[at]]) < least_margin:
                least_margin, worst = float(low[near[at]]), (int(row[at]), int(rival[at]), lost[at])
        assert worst is not None
        i, j, by_stage = worst
        least_margin = float(low.amin())
        parts = dict(zip(PARTS, by_stage.sum(0).tolist(), strict=True))
        parts |= {"gradient": float(gradients.first[i, j]) * r}
        parts |= {"last norm": float(last_norm[i, j])}
        # the margin is that of the text's size: another size divides it
        size = float(rivals.size)
        other = size + math.copysign(rho / math.sqrt(d), least_margin)
        least_margin *= size / other * (1.0 - math.copysign(1e-9, least_margin))
        return Bound(least_margin, i, j, parts, by_stage.sum(1).tolist())

    def _losses(
        self,
        gradients: "_Gradients",
        t: int,
        row: Tensor,
        rival: Tensor,
        found: "_Remainders",
        errors: Tensor,
    ) -> Tensor:
        """What the margins of pairs (c,) lose, by stage and part: (c, S, parts)."""
        lost = torch.zeros(len(row), *errors.shape[:2], dtype=errors.dtype)
        rivals, (E, _) = self.rivals[t], _logit_rows(self.network)
        W = self._functionals(t, rivals.kept[row], rivals.offsets[row, rival], E[rival])
        for s, shape in enumerate(found.shapes):
            (m,) = errors[s].sum(0).nonzero(as_tuple=True)
            if len(m) == 0:
                continue
            a = W @ self._row(len(self.stages), s + 1, t)[m]  # (m, c, d)
            behind, error = gradients.behind[row, s, rival][:, m, None], errors[s][:, m].mT
            balls = behind * error  # (c, m, parts)
            square = ((a @ shape.parts[:, m]) * a).sum(-1).clamp(min=0.0)  # (parts, m, c)
            along = square.sqrt().permute(2, 1, 0) * _GROW
            loose = gradients.loose[row, s, rival][:, None, None]
            along = along + loose * error[..., :_SHAPED]
            balls[..., :_SHAPED] = torch.minimum(balls[..., :_SHAPED], along)
            lost[:, s] = balls.sum(1)
        return lost


@final
class Substitutions:
    """Displacements that tokens may have, of at most ``most`` tokens at once: m -> (a, d)."""

    def __init__(self, moves: dict[int, Tensor], most: int) -> None:
        self.moves = {m: M for m, M in moves.items() if len(M)}
        self.most = most
        farthest = [float(lengths(M).amax()) ** 2 for M in self.moves.values()]
        self.total = math.sqrt(sum(sorted(farthest)[-most:])) * _GROW if most else 0.0
        """The length of all displacements at once, as one vector, is no larger."""


def _largest_sum(x: Tensor, most: int) -> Tensor:
    """The sum of the ``most`` largest of the first axis."""
    return x.topk(min(most, len(x)), 0).values.sum(0)


def _ellipsoid_of_sum(shapes: Tensor, most: int) -> Tensor:
    """Around the sums of vectors in at most ``most`` of the ellipsoids: (p, ..., D, D).

    (sum_k x_k)^2 is at most sum w sum x_k^2 / w_k, and at most ``most`` sum x_k^2 where all others
    are 0; the one with the smaller trace is taken.
    """
    size = torch.einsum("p...aa->p...", shapes).clamp(min=1e-300).sqrt()[..., None, None]
    weighted = size.sum(0) * (shapes / size).sum(0)
    plain = min(most, len(shapes)) * shapes.sum(0)
    smaller = torch.einsum("...aa->...", weighted) < torch.einsum("...aa->...", plain)
    return torch.where(smaller[..., None, None], weighted, plain)


def _widened(S: Tensor, lost: Tensor) -> Tensor:
    """Around an ellipsoid (..., D, D) and errors in the one with the half-axes ``lost`` (..., D):
    (a + b)^2 <= (1 + 1e-9) a^2 + (1 + 1e9) b^2."""
    return S * (1.0 + 1e-9) * _GROW + 2e9 * torch.diag_embed(lost.square())


class _Gradients(NamedTuple):
    first: Tensor
    """(K, V)."""
    behind: Tensor
    """(K, S, V, t + 1)."""
    loose: Tensor
    """Their error: (K, S, V)."""


class _Remainders(NamedTuple):
    etas: list[Tensor]
    """Per stage, (parts, n)."""
    shapes: "list[_Shaped]"
    """Per stage."""
    moves: list[Tensor]
    n: int
    """Tokens before the first whose bound diverges."""


class _Bent(NamedTuple):
    """The remainder of a norm: c1 h + c2 d, with d the move of the token, centred for LayerNorm."""

    along: Tensor
    """|c1|, (n,)."""
    across: Tensor
    """|c2|."""
    S: Tensor
    """The ellipsoid of d, (n, d, d)."""
    size: Tensor
    """The length of the remainder."""
    stretch: Tensor
    """That of c1 h."""
    lost: Tensor
    """The error of N and of h, relative to the move and to the remainder."""

    def cut(self, n: int) -> "_Bent":
        return _Bent(*(part[:n] for part in self))

    def along_rows(self, rows: Tensor, h: Tensor, token: str) -> Tensor:
        """sup |g . remainder|, g (H, i, j, d), of the query's (i) or the key's (j) token."""
        direct = torch.einsum(f"hijm,{token}m->hij", rows, h).abs()
        moved = torch.einsum(f"hijm,{token}mk->hijk", rows, self.S)
        square = (moved * rows).sum(-1).clamp(min=0.0)
        along, across, size = (
            part[:, None] if token == "i" else part for part in (self.along, self.across, self.size)
        )
        return torch.minimum(along * direct + across * square.sqrt(), size * rows.norm(dim=-1))


class _Shaped(NamedTuple):
    """Where the remainders of a stage are: in ellipsoids, or in small balls."""

    tokens: Tensor
    """Those with an ellipsoid."""
    S: Tensor
    """(tokens, d, d)."""
    small: Tensor
    """Radii of the balls of the other tokens, 0 at ``tokens``: (n,)."""
    parts: Tensor
    """The ellipsoids of the first parts, (_SHAPED, n, d, d)."""

    def cut(self, n: int) -> "_Shaped":
        before = self.tokens < n
        tokens, S = self.tokens[before], self.S[before]
        return _Shaped(tokens, S, self.small[:n], self.parts[:, :n])


def _shaped(eta: Tensor, shapes: Tensor, gamma: float) -> _Shaped:
    """One ellipsoid per token around the sum of all parts: balls (parts, n), (_SHAPED, n, d, d).

    A part is in its ball and in its ellipsoid; the one with the smaller trace is taken.
    """
    d = shapes.shape[-1]
    eye = torch.eye(d, dtype=shapes.dtype)
    balls = eta[:_SHAPED].square()
    trace = torch.einsum("pnaa->pn", shapes)
    shapes = shapes * _GROW + gamma * (trace + balls)[..., None, None] * eye
    trace = torch.einsum("pnaa->pn", shapes)
    better = trace < d * balls
    rest = (eta.sum(0) - torch.where(better, eta[:_SHAPED], 0.0).sum(0)).clamp(min=0.0)
    rest = rest + gamma * eta.sum(0)
    size = torch.where(better, trace.sqrt(), 0.0)
    weight = torch.where(size > 0.0, 1.0 / size.clamp(min=1e-150), 0.0)
    S = size.sum(0)[:, None, None] * torch.einsum("pn,pnab->nab", weight, shapes)
    ball = rest.square()[:, None, None] * eye
    S = _minkowski(S, size.sum(0), ball, rest * math.sqrt(d), gamma)
    sums = eta.sum(0)
    moving = sums > _RESTING * sums.amax()
    tokens = moving.nonzero()[:, 0]
    return _Shaped(tokens, S[tokens], torch.where(moving, 0.0, sums), shapes)


class _EntmaxBox(NamedTuple):
    """Weights of rows over a box of scores, rounding included: (H, n, n) each."""

    most: Tensor
    """Of s."""
    least: Tensor
    sigma: Tensor
    """The most of the derivative of s, (2 - alpha) p^(3 - 2 alpha) on the support."""
    dp: Tensor
    """How far p moves."""
    dw: Tensor
    """How far w = s / sum(s) moves."""


def _entmax_box(f: _Attention, Z: Tensor) -> _EntmaxBox:
    """Every score moves by at most Z (H, n, n); a weight grows with its score and falls with the
    others."""
    n, alpha = Z.shape[-1], f.alpha
    x, p, w, live = (part[:, :n, :n] for part in (f.x, f.p, f.w, f.live))
    Z = torch.where(live, Z + f.slack[:, :n, None], 0.0)
    own = torch.eye(n, dtype=torch.bool)
    corners = [torch.where(own, (x + y)[..., None, :], (x - y)[..., None, :]) for y in (Z, -Z)]
    high, low = (tsallis(one, alpha).diagonal(dim1=-2, dim2=-1) for one in corners)
    most, least = (slopes(part, alpha) for part in (high, low))
    sigma = torch.where(high > 0.0, (2.0 - alpha) * high.pow(3.0 - 2.0 * alpha), 0.0)
    up = most / (most + least.sum(-1, keepdim=True) - least).clamp(min=1e-300)
    down = least / (least + most.sum(-1, keepdim=True) - most).clamp(min=1e-300)
    dp, dw = torch.maximum(high - p, p - low), torch.maximum(up - w, w - down)
    return _EntmaxBox(most * _GROW, least, sigma * _GROW, dp * _GROW, dw.clamp(min=0.0) * _GROW)


def _spread(w: Tensor, e: Tensor, grams: Sequence[Tensor], gamma: float) -> Tensor:
    """sup of (sum_j w_j delta_j^2)^1/2: (H, n, n) -> (H, n)."""
    half = w.sqrt()[:, :, None]
    total = (w * e * e).sum(-1).sqrt()
    for part in grams:
        inner = part * half[..., :, None] * half[..., None, :]
        trace = inner.diagonal(dim1=-2, dim2=-1).sum(-1)
        total = total + (largest(inner) * _GROW + gamma * trace).sqrt().sum(-1)
    return total


def _sum_of(shapes: Tensor) -> Tensor:
    """An ellipsoid around the sum over heads: (H, n, d, d) -> (n, d, d)."""
    size = torch.einsum("hnaa->hn", shapes).clamp(min=1e-300).sqrt()
    total: Tensor = (size.sum(0) / size)[..., None, None] * shapes
    return total.sum(0)


class _RowMoves(NamedTuple):
    Z: Tensor
    """(H, n, n)."""
    e: Tensor
    """The part of Z that is bounded score by score."""
    product: Tensor
    gram: Tensor
    """Of the moves by earlier remainders: (H, n, n, n)."""

    def cut(self, n: int) -> "_RowMoves":
        Z, e, product = (t[:, :n, :n] for t in (self.Z, self.e, self.product))
        return _RowMoves(Z, e, product, self.gram[:, :n, :n, :n])

    def only(self, alive: Tensor) -> "_RowMoves":
        """With the rows of other tokens at rest."""
        rows = alive[:, None]
        Z, e, product = (torch.where(rows, t, 0.0) for t in (self.Z, self.e, self.product))
        return _RowMoves(Z, e, product, torch.where(rows[..., None], self.gram, 0.0))


def _alive(good: Tensor) -> int:
    """The number of tokens before the first that is not good."""
    return int(good.to(torch.int64).cumprod(0).sum())


def _minkowski(S: Tensor, size: Tensor, other: Tensor, more: Tensor, ridge: float) -> Tensor:
    """An ellipsoid around the sum of two, whose half-axes are at most ``size`` and ``more``.

    ``ridge`` times the trace is added in every direction: more than the rounding of the shapes.
    """
    size, more = (length.clamp(min=1e-150)[:, None, None] for length in (size, more))
    total = (size + more) * (S / size + other / more)
    trace = torch.einsum("iaa->i", total)[:, None, None]
    return total + ridge * trace * torch.eye(S.shape[-1], dtype=S.dtype)


def _root(S: Tensor) -> Tensor:
    """R with R R^T = S up to rounding that the ridge of S exceeds."""
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(S)
    if bool(failed):
        values, vectors = torch.linalg.eigh(S)
        root = vectors * values.clamp(min=0.0).sqrt()
    return root


def _unit(norm: NormLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The norm without gain and bias, s, and the derivative (n, d, d)."""
    d = x.shape[-1]
    eye = torch.eye(d, dtype=x.dtype)
    if norm.kind == "layer":
        x, eye = x - x.mean(-1, keepdim=True), eye - 1.0 / d
    size = (x.square().mean(-1) + norm._eps(x)).sqrt()
    h = x / size[:, None]
    return h, size, (eye - h[:, :, None] * h[:, None, :] / d) / size[:, None, None]


def _folded(norm: NormLayer, W: Tensor) -> Tensor:
    """W (..., M, D) behind the gain of a norm."""
    return W if norm.weight is None else norm.weight[:, None] * W


def _folded_bias(norm: NormLayer, W: Tensor, b: Tensor | None) -> Tensor:
    """b (..., D) with what the bias of a norm adds."""
    b = W.new_zeros((*W.shape[:-2], W.shape[-1])) if b is None else b
    return b if norm.bias is None else b + norm.bias @ W


def _parts(residual: Residual) -> tuple[NormLayer, tuple[TokenLayer, ...]]:
    assert isinstance(residual.branch, Chain)
    norm, *branch = residual.branch.layers
    assert isinstance(norm, NormLayer)
    flat: list[TokenLayer] = []
    for layer in branch:
        flat += layer.layers if isinstance(layer, Chain) else [layer]
    return norm, tuple(flat)


def _forward_rounding(branch: Sequence[TokenLayer], h: Tensor) -> float:
    """The error of the computed output of a branch, as one vector."""
    first = branch[0]
    if isinstance(first, SelfAttention):
        return first.rounding(h)
    error = 0.0
    for layer in branch:
        bound = layer.ball_bound(h, Ball(0.0, 0.0), NormEstimator(0.0))
        error, h = bound.upper * error + bound.rounding, layer(h)
    return error


def _widest(residual: Residual) -> int:
    """The longest sum in a stage."""
    _, branch = _parts(residual)
    if isinstance(branch[0], SelfAttention):
        return 0
    assert isinstance(branch[-1], LinearLayer)
    return len(branch[-1].W)


def require_size(n: int, d: int, S: int) -> None:
    """Refuse what needs more memory than _BYTES, with what it would take.

    Every pair of stages has a Jacobian, of which the causal half is stored, and every stage has
    two whole ones. A product of Jacobians takes (n d)^3 / 3 operations behind attention, and each
    radius 2 d (n d)^2 for every pair.
    """

    def bytes_for(n: int) -> float:
        return 8.0 * (n * d) ** 2 * (S * (S + 1) / 4 + 2 * S + 4)

    if bytes_for(n) > _BYTES:
        operations = S * S / 4 * (n * d) ** 3 / 3 + _RADII * S * S / 2 * (n * d) ** 2 * d * 2
        fit = max((k for k in range(1, n) if bytes_for(k) <= _BYTES), default=0)
        advice = f"{fit} tokens fit" if fit else "no token fits"
        raise ValueError(
            f"{n} tokens of width {d} in {S // 2} blocks need about {bytes_for(n) / 1e9:.0f} GB "
            f"for their Jacobians, of {_BYTES / 1e9:.0f} at most, and "
            f"{_duration(operations / _SPEED)} of one core; {advice}."
        )


def _duration(seconds: float) -> str:
    """
    >>> _duration(90.0), _duration(9e4)
    ('2 minutes', '25 hours')
    """
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.0f} hours"


def _require_stages(stages: Sequence[Residual]) -> None:
    """Refuse, by name, what the remainders do not cover."""
    for number, residual in enumerate(stages):
        where = f"block {number // 2 + 1} ({'MLP' if number % 2 else 'attention'})"
        if residual.parallel or residual.skip != 1.0 or not isinstance(residual.branch, Chain):
            raise ValueError(f"{where} is not one branch behind a norm beside the stream.")
        if not residual.branch.layers or not isinstance(residual.branch.layers[0], NormLayer):
            raise ValueError(f"{where} has no norm in front of its branch.")
        norm, branch = _parts(residual)
        no_bias = norm.bias is None or norm.weight is None
        if not no_bias and float(norm.weight.abs().amin()) < 1e-8:  # type: ignore[union-attr]
            raise ValueError(f"{where} has a norm with a bias and a gain of 0.")
        first = branch[0]
        if isinstance(first, SelfAttention):
            if len(branch) > 1:
                raise ValueError(f"{where} has a layer behind its attention.")
            choice = first.choice
            known = isinstance(choice, Softmax) or (
                isinstance(choice, Entmax)
                and isinstance(choice.alpha, float)
                and 1.0 < choice.alpha <= 1.5
            )
            if not known or isinstance(choice.beta, Tensor):
                learned = " and learns" if isinstance(choice.beta, Tensor) else ""
                at = ""
                if isinstance(choice, Entmax):
                    learned = " and learns" if isinstance(choice.alpha, Tensor) else learned
                    at = f" at alpha={choice.alpha}" if isinstance(choice.alpha, float) else ""
                raise ValueError(
                    f"{where} chooses by {type(choice).__name__}{at}{learned}; decisions are "
                    "certified for softmax and for entmax with a fixed alpha up to 1.5."
                )
            if first.qk_norm is not None:
                raise ValueError(f"{where} normalises queries and keys, which is not covered.")
            continue
        gated = len(branch) == 2 and isinstance(first, GatedLayer)
        plain = len(branch) == 3 and isinstance(branch[1], ActivationLayer)
        if not (gated or plain) or not isinstance(branch[-1], LinearLayer):
            raise ValueError(f"{where} is no MLP of two or three matrices.")
        name = first.name if isinstance(first, GatedLayer) else branch[1].name  # type: ignore[attr-defined]
        if name not in CURVATURES:
            raise ValueError(
                f"{where} has the activation {name!r}; decisions are certified for "
                f"{', '.join(CURVATURES)}, whose third derivative is bounded here."
            )


class Radius(NamedTuple):
    """The certificate of one position."""

    certified: float
    """No change within it changes the decision; inf where no change can reach the position."""
    first_order: float
    """Margin over gradient, of the nearest rival: no bound."""
    rival: int
    bound: Bound | None
    """At the certified radius."""


class _Search:
    """The search of one position on the grid of radii _STEP^k: certified at ``low``, not at
    ``high``."""

    def __init__(self, margins: Tensor, gradients: _Gradients) -> None:
        self.gradients = gradients
        ratio = torch.where(
            margins.isfinite(), margins / gradients.first.clamp(min=1e-300), torch.inf
        )
        first_order, at = float(ratio.amin()), int(ratio.argmin()) % ratio.shape[-1]
        self.margin = float(margins.amin())
        self.best = Radius(0.0, max(first_order, 0.0), at, None)
        self.low, self.high = _FLOOR, _grid(first_order) + 1
        self.stride = _STRIDE
        self.bounds: dict[int, float] = {}
        """Of the margin, at the radii that were tried."""

    @property
    def open(self) -> bool:
        return self.best.first_order > 0.0 and self.high - self.low > 1

    @property
    def known(self) -> bool:
        """Whether a radius was found, or none can be."""
        return self.best.certified > 0.0 or not self.open

    def next_step(self) -> int:
        """Away from what is known in growing strides, then by interpolation of the loss."""
        low, high = self.low, self.high
        if not self.bounds:
            step = _grid(self.best.first_order / 8.0)
        elif low not in self.bounds or high not in self.bounds:
            step = low + self.stride if low in self.bounds else high - self.stride
            self.stride *= 2
        else:
            share, ends = 0.5, (self.margin - self.bounds[low], self.margin - self.bounds[high])
            if 0.0 < ends[0] < self.margin < ends[1] < math.inf:
                share = math.log(self.margin / ends[0]) / math.log(ends[1] / ends[0])
            step = low + round(min(max(share, 0.2), 0.8) * (high - low))
        return min(max(step, low + 1), high - 1)

    def take(self, step: int, bound: Bound) -> None:
        self.bounds[step] = bound.lower
        if bound.lower > 0.0:
            self.low = step
            self.best = self.best._replace(certified=_STEP**step / _GROW, bound=bound)
        else:
            self.high = step


def certified_radii(
    bound: DecisionBound,
    norm: str,
    positions: Sequence[int],
    progress: Callable[[int], None] | None = None,
) -> dict[int, Radius]:
    """The certified radius of each position, up to a factor of _STEP below it.

    Radii are tried on one grid, and the remainders of each serve all positions that it may decide;
    those of "one" are of another ball at each position. When the deadline of ``bound`` has passed,
    what is known is returned, without the positions of which no radius is known.
    """
    if norm not in NORMS:
        raise ValueError(f"a decision is certified in norm {', '.join(NORMS)}, got {norm!r}.")
    searches: dict[int, _Search] = {}
    try:
        for together in [[t] for t in positions] if norm == "one" else [positions]:
            token = together[0] if norm == "one" else None
            ball = bound.ball(norm, token)
            for t in together:
                gradients = bound.gradients_at(t, norm, token)
                searches[t] = _Search(bound.rivals[t].margins, gradients)
            while left := [t for t in together if searches[t].open]:
                if progress is not None:
                    progress(len(searches) - len(left))
                # the least, which is small enough for most positions: all of them have an early one
                step = min(searches[t].next_step() for t in left)
                r = _STEP**step
                remainders = bound.remainders(ball, r, max(left) + 1)
                for t in left:
                    search = searches[t]
                    if search.low < step < search.high:
                        search.take(step, bound.margin(t, search.gradients, remainders, r))
    except OutOfTime:
        searches = {t: search for t, search in searches.items() if search.known}
    return {t: search.best for t, search in searches.items()}


_FLOOR = -700  # the least radius that is tried, 1.04^-700 = 1e-12


def _grid(r: float) -> int:
    """The step of the search at a radius or just above it."""
    return math.ceil(math.log(max(r, 1e-12)) / math.log(_STEP))
