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

    margin_ij(x + eps) >= m_ij - r |g_ij|* - sum_{s,t} |a_ijst| eta_st(r) - |E_i - E_j| rem(rho_t),

|.|* the dual norm. Only eta depends on r. The move of each token lies in an ellipsoid of shape S,
a sum of the images of the ball and of the balls of earlier remainders (S = sum w sum S_k / w_k).

**Remainders**, derived in docs/maths/sensitivity.md:

    norm         rem = rho^2 / (sqrt(3 d) (s - rho / sqrt d)^2), through the derivative behind it
    scores       |dq . dk| <= min(l_q l_k, tr(S_q S_k)^1/2)
    softmax      1/2 (sup (sum_j w_j delta_j^2)^1/2 + shift (sum w)^1/2)^2
    values       |sum_j dp_j O V dh_j|, by Cauchy and Schwarz over a row
    MLP          |W_D e| <= lambda_max(W_D Gram W_D^T)^1/2 for the second order, sup|a'''| beyond it

**Causality.** Nothing about token i depends on later tokens: one set of eta serves all positions.

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
from typing import NamedTuple, final

import torch
from torch import Tensor

from fenchel.choice import Softmax
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
_EPS = torch.finfo(torch.float64).eps
_GROW = 1.0 + 1e-9  # more than sums of a few thousand positive terms and eigenvalues lose
_MOST = 4.0  # scores that move further are not expanded
_STEP = 1.04  # between radii of the search
_STRIDE = 6  # steps at once while a radius is looked for
_TINY = 1e-12
_BYTES = 12e9


class Curvature(NamedTuple):
    """Derivatives of an activation."""

    second: Callable[[Tensor], Tensor]
    most_second: float
    """sup |a''|."""
    most_third: float
    """sup |a'''|."""


def _silu_second(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1.0 - s) * (2.0 + x * (1.0 - 2.0 * s))


def _gelu_second(x: Tensor) -> Tensor:
    return (2.0 - x.square()) * torch.exp(-0.5 * x.square()) / math.sqrt(2.0 * math.pi)


CURVATURES = {
    "silu": Curvature(_silu_second, 0.5, 0.3083),
    "gelu": Curvature(_gelu_second, 0.79789, 0.7790),
}
"""Activations with a bounded third derivative; others are refused by name."""


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
    curvature: Curvature


class _Attention(NamedTuple):
    """Attention at its centre; values are behind W_O."""

    Q: Tensor
    """(H, n, D, d): rotated and scaled."""
    K: Tensor
    OV: Tensor
    """(H, d, d)."""
    p: Tensor
    live: Tensor
    """Keys that a row may attend to: (H, n, n)."""
    c: Tensor
    """|v_j - o_i|: (H, n, n)."""
    Kq: Tensor
    """Derivative of the score in the key's token: (H, i, j, d)."""
    Qk: Tensor
    """In the query's token, centred by p: (H, i, j, d)."""
    loose: Tensor
    """The lengths of both, before they are centred: (H, n, n)."""
    slack: Tensor
    """Relative error of a weight: (H, n)."""


class _Stage(NamedTuple):
    size: Tensor
    """s = sqrt(mean square + eps) of each token."""
    N: Tensor
    """Derivative of the norm, (n, d, d)."""
    B: Tensor
    """|B_ij|, the blocks of the derivative behind the norm."""
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
    size: Tensor
    N: Tensor


class Bound(NamedTuple):
    """The least lower bound of a margin at a position, and what it lost."""

    lower: float
    kept: int
    rival: int
    parts: dict[str, float]


@final
class DecisionBound:
    """Lower bounds of the margins of a network about X (n, d), at every position."""

    def __init__(self, network: DecisionNetwork, X: Tensor, *, keep: int = 1) -> None:
        self.network, self.keep = network, keep
        self.n, self.d = X.shape
        _require_stages(network.stages)
        need = 8.0 * (self.n * self.d) ** 2 * (len(network.stages) + 1) ** 2
        if need > _BYTES:
            raise ValueError(
                f"{self.n} tokens of width {self.d} in {len(network.stages) // 2} blocks need "
                f"{need / 1e9:.0f} GB for their Jacobians; give fewer tokens."
            )
        widest = max(self.n * self.d, *(_widest(stage) for stage in network.stages))
        self.gamma = 16.0 * (widest + 64) * _EPS
        """More than the relative rounding of a few products, each a sum over any axis."""
        self.X = X.detach().double()
        with torch.no_grad():
            self.streams = network.streams(self.X)
            self._expand()

    def _expand(self) -> None:
        n, d = self.n, self.d
        self.stages: list[_Stage] = []
        self.alpha: dict[tuple[int, int], Tensor] = {}
        self.TT: dict[tuple[int, int], Tensor] = {}
        self.gradients: dict[tuple[int, int], Tensor] = {}
        self._traces: dict[tuple[int, int], Tensor] = {}
        self.T0 = [torch.eye(n * d, dtype=torch.float64).view(n, d, n, d)]
        current = {0: self.T0[0]}
        self._norms(0, current)
        for s, residual in enumerate(self.network.stages):
            stage, J = self._stage(residual, self.streams[s])
            self.stages.append(stage)
            if isinstance(stage.part, _Attention):
                for k, T in current.items():
                    if k > 0:
                        self.gradients[s, k] = self._score_gradients(s, T).norm(dim=-1) * _GROW
            flat = J.reshape(n * d, n * d)
            moved = {
                k: (flat @ T.reshape(n * d, n * d)).view(n, d, n, d) for k, T in current.items()
            }
            current = {**moved, s + 1: self.T0[0]}
            self.T0.append(current[0])
            self._norms(s + 1, current)
        self.last = current
        self.frobenius = {key: float(t.sum().sqrt()) for key, t in self._traces.items()}
        self.rivals = [self._rivals(t) for t in range(n)]

    def _norms(self, s: int, current: dict[int, Tensor]) -> None:
        """|T_im| and T_im T_im^T of all pairs of tokens, by the causal triangle."""
        n, d = self.n, self.d
        i, m = torch.tril_indices(n, n)
        for k, T in current.items():
            blocks = T.permute(0, 2, 1, 3)[i, m]
            TT = torch.zeros(n, n, d, d, dtype=torch.float64)
            TT[i, m] = blocks @ blocks.mT
            alpha = torch.zeros(n, n, dtype=torch.float64)
            if k == s and s > 0:  # the identity
                alpha = torch.eye(n, dtype=torch.float64)
            else:
                alpha[i, m] = largest(TT[i, m]).sqrt()
            self.TT[s, k] = TT
            self.alpha[s, k] = torch.where(
                torch.ones(n, n, dtype=torch.bool).tril(), (alpha * _GROW).clamp(min=1e-12), 0.0
            )
            self._traces[s, k] = TT.diagonal(dim1=-2, dim2=-1).sum(-1)

    def _stage(self, residual: Residual, x: Tensor) -> tuple[_Stage, Tensor]:
        """The stage at its centre, and its Jacobian (n, d, n, d)."""
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
        B_norm = largest(blocks @ blocks.mT).sqrt() * _GROW + lost
        J = torch.einsum("imjk,jkl->imjl", B, N)
        index = torch.arange(n)
        J[index, :, index, :] += eye
        steep = (1.0 / size)[None, :]
        lost = (lost + self.gamma * B_norm) * steep + self.gamma * torch.eye(n, dtype=x.dtype)
        behind = float(largest(B_norm.mT @ B_norm).sqrt())
        unit = replace(norm, weight=None, bias=None).rounding(x) + 8.0 * _EPS * float(h.norm())
        if norm.bias is not None:
            offset = norm.bias if norm.weight is None else norm.bias / norm.weight
            unit += 8.0 * _EPS * float(offset.norm()) * math.sqrt(n)
        forward = _forward_rounding(branch, norm(x)) * abs(residual.scale) + 2.0 * behind * unit
        forward += 8.0 * _EPS * float(x.norm() + residual(x).norm())
        return _Stage(size, N, B_norm, part, lost, forward, float(J.norm())), J

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
        p = (q @ k.mT + log).softmax(-1)
        assert layer.W_O is not None
        W_O = scale * layer.W_O.view(H, -1, layer.W_O.shape[-1])  # (H, E, d)
        OV = (W_V @ W_O).mT  # (H, d, d): out = OV h
        v = h @ OV.mT + b_V @ W_O
        o = p @ v
        c = v[:, None] - o[:, :, None]  # (H, i, j, d)
        Kq = torch.einsum("hjem,hie->hijm", K, q)
        centred = k[:, None] - (p @ k)[:, :, None]
        Qk = torch.einsum("hiem,hije->hijm", Q, centred)
        B = torch.einsum("hij,hmk->imjk", p, OV) + torch.einsum("hij,hijm,hijk->imjk", p, c, Kq)
        index = torch.arange(n)
        B[index, :, index, :] += torch.einsum("hij,hijm,hijk->imk", p, c, Qk)
        # errors: of scores relative to the lengths of queries and keys, of the rest to its terms
        long = lengths(q)[:, :, None] * lengths(k)[:, None] + log.masked_fill(~live, 0.0).abs()
        slack = self.gamma * (4.0 + 4.0 * long.amax(-1))  # (H, n)
        value = (lengths(h).amax() * lengths(OV.flatten(1)) + lengths((b_V @ W_O)[:, 0])).amax()
        c_norm = torch.where(live, lengths(c) * _GROW + 8.0 * self.gamma * value, 0.0)
        Kq_norm = lengths(K.flatten(2))[:, None] * lengths(q)[:, :, None]
        Qk_norm = 2.0 * lengths(Q.flatten(2))[:, :, None] * lengths(k).amax(-1)[:, None, None]
        error = p * (lengths(OV.flatten(1))[:, None, None] + c_norm * Kq_norm)
        error = (slack[..., None] + 8.0 * self.gamma) * error
        own = ((slack[..., None] + 8.0 * self.gamma) * p * c_norm * Qk_norm).sum((0, 2))
        lost = error.sum(0) + torch.diag(own)
        part = _Attention(Q, K, OV, p, live, c_norm, Kq, Qk, Kq_norm + Qk_norm, slack)
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
        return _Mlp(G, U, D, u.abs() + spread, a1.abs() + spread, a2, curvature), B, lost

    # The ball ------------------------------------------------------------------------------------

    def _score_gradients(self, s: int, T: Tensor) -> Tensor:
        """Gradients of the scores of stage s, centred by p: T (n, d, c, l) -> (H, n, n, c, l)."""
        stage = self.stages[s]
        f = stage.part
        assert isinstance(f, _Attention)
        NQ = torch.einsum("hijm,imk->hijk", f.Qk, stage.N)
        NK = torch.einsum("hijm,jmk->hijk", f.Kq, stage.N)
        z = torch.einsum("hijk,ikcl->hijcl", NQ, T) + torch.einsum("hijk,jkcl->hijcl", NK, T)
        z = z - torch.einsum("hij,hijcl->hicl", f.p, z)[:, :, None]
        return z.masked_fill_(~f.live[..., None, None], 0.0)

    def ball(self, norm: str, token: int | None = None) -> _Ball:
        """The images of the unit ball of a norm at every stage; ``token`` for "one"."""
        n = self.n
        shape, rho, gram, linear_ = [], [], {}, {}
        for s in range(len(self.stages) + 1):
            TT, alpha = self.TT[s, 0], self.alpha[s, 0]
            if norm == "all":
                S = TT.sum(1)
            elif norm == "one":
                S = TT[:, token]
            else:
                S = alpha.sum(1)[:, None, None] * torch.einsum(
                    "imab,im->iab", TT, torch.where(alpha > 0, 1.0 / alpha, 0.0)
                )
            shape.append(S)
            rho.append(largest(S).sqrt() * _GROW + self.gamma * self.frobenius[s, 0])
            if s == len(self.stages) or not isinstance(self.stages[s].part, _Attention):
                continue
            T = self.T0[s] if norm != "one" else self.T0[s][:, :, token : token + 1]  # type: ignore[operator]
            z = self._score_gradients(s, T)
            if norm == "all":
                z = z.flatten(3).unsqueeze(3)
            gram[s] = torch.einsum("hijcl,hikcl->hicjk", z, z)
            linear_[s] = z.norm(dim=-1).sum(-1) * _GROW
        total = math.sqrt(n) if norm == "token" else 1.0
        return _Ball(shape, rho, gram, linear_, total)

    # Bounds at a radius ---------------------------------------------------------------------------

    def remainders(self, ball: _Ball, r: float, n: int | None = None) -> "_Remainders":
        """eta of all stages and of the first n tokens at radius r, up to one that diverges."""
        n, d = self.n if n is None else n, self.d
        etas: list[Tensor] = []
        moves: list[Tensor] = []
        for s in range(len(self.stages) + 1):
            sums = [eta.sum(0) for eta in etas]
            err = torch.zeros(n, dtype=torch.float64)
            S_err = torch.zeros(n, d, d, dtype=torch.float64)
            for k, eta in enumerate(sums):
                alpha = self.alpha[s, k + 1][:n, :n]
                err = err + alpha @ eta
                weight = torch.where(alpha > 0, eta / alpha.clamp(min=1e-300), 0.0)
                S_err = S_err + torch.einsum("imab,im->iab", self.TT[s, k + 1][:n, :n], weight)
            lin = r * ball.rho[s][:n]
            rho = (lin + err) * _GROW
            good = rho.isfinite() & (rho < 1e3)
            if s < len(self.stages):
                good = good & (rho < 0.9 * math.sqrt(d) * self.stages[s].size[:n])
            n = _alive(good)
            if n == 0:
                return _Remainders([], [], 0)
            rho, lin, err = rho[:n], lin[:n], err[:n]
            etas, sums, moves = ([t[..., :n] for t in part] for part in (etas, sums, moves))
            moves.append(rho)
            if s == len(self.stages):
                break
            shapes = r * r * ball.shape[s][:n], err[:, None, None] * S_err[:n]
            S = _minkowski(shapes[0], lin, shapes[1], err, self.gamma)
            stage = self.stages[s]
            rem = rho.square() / math.sqrt(3.0 * d)
            rem = rem / (stage.size[:n] * (1.0 - 1e-9) - rho / math.sqrt(d)).square() * _GROW
            N = stage.N[:n]
            S_h = N @ S @ N
            top = largest(S_h) * _GROW + self.gamma * (rho / stage.size[:n]).square()
            eye = torch.eye(d, dtype=torch.float64)
            # the error of N and of the product, as a ball
            around = rem + self.gamma * rho / stage.size[:n]
            balls = around.square()[:, None, None] * eye
            S_h = _minkowski(S_h, top.sqrt(), balls, around, self.gamma)
            eta = torch.zeros(len(PARTS), n, dtype=torch.float64)
            eta[0] = stage.B[:n, :n] @ rem
            if isinstance(stage.part, _Mlp):
                eta[4], eta[5] = self._mlp_remainder(stage.part, S_h)
            else:
                row = self._row_moves(s, ball, r, S_h, rho, rem, sums)
                n = _alive(row.Z.amax((0, 2)) < _MOST)
                if n == 0:
                    return _Remainders([], [], 0)
                eta = eta[:, :n]
                etas, sums, moves = ([t[..., :n] for t in part] for part in (etas, sums, moves))
                eta[1], eta[2], eta[3] = self._attention_remainder(
                    stage.part, row.cut(n), ball.gram[s][:, :n, :, :n, :n], r, S_h[:n]
                )
                rho = rho[:n]
            products = self.frobenius[s, 0] * r * ball.total + sum(
                self.frobenius[s, k + 1] * float(e.norm()) for k, e in enumerate(sums)
            )
            products = self.gamma * stage.width * products
            eta[6] = stage.lost[:n, :n] @ rho + stage.forward + products
            etas.append(eta * _GROW)
        return _Remainders(etas, moves, n)

    def _mlp_remainder(self, f: _Mlp, S: Tensor) -> tuple[Tensor, Tensor]:
        """Second order and beyond, token by token: S (n, d, d) -> (n,), (n,)."""
        second, third = [], []
        long_G, long_U, long_D = lengths(f.G), lengths(f.U), lengths(f.D.mT)
        for i, S_i in enumerate(S):
            top = float(S_i.diagonal().sum()) * _GROW
            if top < _TINY:  # a token that moves by rounding alone
                each = 0.5 * f.curvature.most_second * f.u[i] * long_G.square()
                each = each + (f.first[i] + 0.5) * long_G * long_U
                second.append((long_D * each).sum() * top)
                each = (f.u[i] * long_G + 3.0 * long_U) * long_G.square()
                third.append((long_D * each).sum() * top**1.5)
                continue
            root = _root(S_i)
            A, C = f.G @ root, f.U @ root
            a, c, b = A @ A.mT, A @ C.mT, C @ C.mT
            alpha, beta = 0.5 * f.second[i] * f.u[i], f.first[i]
            mixed = alpha[:, None] * beta * a * c
            gram = alpha[:, None] * alpha * a * a + mixed + mixed.mT
            gram = gram + 0.5 * beta[:, None] * beta * (a * b + c * c.mT)
            dg = (a.diagonal() + self.gamma * top * long_G.square()).sqrt()
            du = (b.diagonal() + self.gamma * top * long_U.square()).sqrt()
            most = 0.5 * f.curvature.most_second * f.u[i] * dg + beta * du
            error = (long_D * (most * dg)).sum()
            size = largest(f.D @ gram @ f.D.mT) * _GROW + self.gamma * error.square()
            second.append(size.sqrt())
            steep = f.curvature.most_third / 6.0 * f.u[i] * dg.square()
            steep = steep + 0.5 * f.curvature.most_second * dg * du
            by_entry = (f.D.abs() @ (steep * dg)).norm()
            half = steep.sqrt()[:, None]
            left = f.D * half.mT
            right = A * half
            factors = largest(left @ left.mT), largest(right.mT @ right)
            slack = self.gamma * top * (steep * long_G.square()).sum()
            by_norm = factors[0].sqrt() * (factors[1] + slack).sqrt()
            third.append(torch.minimum(by_entry, by_norm))
        return torch.stack(second), torch.stack(third)

    def _row_moves(
        self,
        s: int,
        ball: _Ball,
        r: float,
        S_h: Tensor,
        rho: Tensor,
        rem: Tensor,
        sums: Sequence[Tensor],
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
        p, live = f.p[:, :n, :n], f.live[:, :n, :n]
        Qk, Kq = f.Qk[:, :n, :n].norm(dim=-1), f.Kq[:, :n, :n].norm(dim=-1)
        # errors of N and of the centred gradients, relative to gradients that are not centred
        tilt = self.gamma * rho / stage.size[:n] + self.gamma * rem
        e = (rem[:, None] * Qk + rem * Kq + product) * _GROW
        e = e + 8.0 * (tilt[:, None] + tilt) * f.loose[:, :n, :n]
        e = torch.where(live, e, 0.0)
        e = e + (p * e).sum(-1, keepdim=True)
        for k, eta in enumerate(sums):
            e = e + self.gradients[s, k + 1][:, :n, :n, :n] @ eta
        linear_ = r * ball.linear[s][:, :n, :n]
        Z = torch.where(live, (linear_ + e) * _GROW, 0.0)
        return _RowMoves(Z, torch.where(live, e, 0.0), product)

    def _attention_remainder(
        self, f: _Attention, row: "_RowMoves", gram: Tensor, r: float, S_h: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of score products, of softmax, of weights times values: (n,) each."""
        n = len(S_h)
        p, live, c = f.p[:, :n, :n], f.live[:, :n, :n], f.c[:, :n, :n]
        slack = f.slack[:, :n, None]
        Z, e, product = row
        up, down = p * Z.exp(), p * (-Z).exp()
        most = up / (up + down.sum(-1, keepdim=True) - down).clamp(min=1e-300)
        least = down / (down + up.sum(-1, keepdim=True) - up).clamp(min=1e-300)
        most = torch.where(live, most * (1.0 + 4.0 * slack) * _GROW, 0.0)
        dp = torch.maximum(most - p, p - least * (1.0 - 4.0 * slack) / _GROW)
        dp = torch.where(live, dp + 4.0 * slack * p, 0.0)
        scores = (p * (1.0 + 4.0 * slack) * c * product).sum((0, 2))
        drift = (dp * c).sum(-1, keepdim=True)
        shift = (dp * Z).sum(-1)

        def spread(w: Tensor) -> Tensor:
            """sup of (sum_j w_j (delta_j - mean)^2)^1/2: (H, n, n) -> (H, n)."""
            half = w.sqrt()[:, :, None]
            inner = gram * half[..., :, None] * half[..., None, :]
            trace = inner.diagonal(dim1=-2, dim2=-1).sum(-1)
            lin = r * (largest(inner) * _GROW + self.gamma * trace).sqrt().sum(-1)
            return lin + (w * e * e).sum(-1).sqrt() + shift * w.sum(-1).sqrt()

        w = most * (c + drift)
        box = (0.5 * w * (Z + shift[..., None]).square()).sum(-1)
        softmax = torch.minimum(box, 0.5 * spread(w).square()).sum(0)
        behind = f.OV[:, None] @ S_h @ f.OV[:, None].mT
        size = lengths(f.OV.flatten(1)).square()[:, None] * torch.einsum("iaa->i", S_h)
        value = (largest(behind) * _GROW + self.gamma * size).sqrt()[:, None]  # (H, 1, n)
        plain = (dp * value).sum(-1)
        joint = spread(most) * (most * value.square()).sum(-1).sqrt()
        return scores, softmax, torch.minimum(plain, joint).sum(0)

    # Decisions ------------------------------------------------------------------------------------

    def _rivals(self, t: int) -> Rivals:
        """Margins of position t, rounded down, and the norm in front of the logits."""
        x, norm = self.streams[-1][t : t + 1], self.network.norm
        h, size, N = _unit(norm, x)
        E, b = self._logit_rows
        logits = (E @ h[0]) + b
        error = self.gamma * (lengths(E) * float(h.norm()) + b.abs())
        error = error + lengths(E) * 2.0 * self._unit_error(x)
        kept = logits.topk(self.keep).indices
        margins = logits[kept, None] - logits - error[kept, None] - error
        margins[:, kept] = math.inf
        gaps = torch.stack([lengths(E[i] - E) for i in kept]) * _GROW
        gaps = gaps + self.gamma * (lengths(E)[kept, None] + lengths(E))
        return Rivals(kept, margins, gaps, size[0], N[0])

    def _unit_error(self, x: Tensor) -> float:
        plain = replace(self.network.norm, weight=None, bias=None)
        return plain.rounding(x)

    @property
    def _logit_rows(self) -> tuple[Tensor, Tensor]:
        """E (V, d) with the gain of the last norm in it, and the bias (V,)."""
        norm, head = self.network.norm, self.network.head
        return _folded(norm, head.W).mT, _folded_bias(norm, head.W, head.b)

    def gradients_at(self, t: int, ball_norm: str, token: int | None) -> "_Gradients":
        """|g_ij|* and |a_ijst| of all rivals of position t."""
        rivals, (E, _) = self.rivals[t], self._logit_rows
        first, behind = [], []
        for i in rivals.kept.tolist():
            W = (E[i] - E) @ rivals.N
            pull = [self._pulled(W, k, t) for k in range(len(self.stages) + 1)]
            g = pull[0]
            if ball_norm == "all":
                first.append(g.square().sum(-1).sqrt())
            elif ball_norm == "token":
                first.append(g.sum(-1))
            else:
                first.append(g[:, token])
            behind.append(torch.stack(pull[1:]))
        slack = rivals.vectors / rivals.size
        first_ = torch.stack(first) * _GROW + self.gamma * slack * self.frobenius[
            len(self.stages), 0
        ] * (math.sqrt(self.n) if ball_norm == "token" else 1.0)
        frobenius = [self.frobenius[len(self.stages), k] for k in range(1, len(self.stages) + 1)]
        loose = self.gamma * slack[:, None] * torch.tensor(frobenius, dtype=E.dtype)[None, :, None]
        return _Gradients(first_, torch.stack(behind) * _GROW + loose[..., None])

    def _pulled(self, W: Tensor, k: int, t: int) -> Tensor:
        """|W_j T_tm| of every rival and token: (V, d) -> (V, t + 1)."""
        T = self.last[k][t].reshape(self.d, self.n, self.d)[:, : t + 1]
        lengths_ = [(W @ T[:, m]).norm(dim=-1) for m in range(t + 1)]
        return torch.stack(lengths_, -1)

    def margin(self, t: int, gradients: "_Gradients", found: "_Remainders", r: float) -> Bound:
        """The least lower bound of a margin of position t at radius r."""
        rivals = self.rivals[t]
        if t >= found.n:
            return Bound(-math.inf, 0, 0, {})
        rho, d = float(found.moves[-1][t]), self.d
        least = float(rivals.size) * (1.0 - 1e-9) - rho / math.sqrt(d)
        if least <= 0.0:
            return Bound(-math.inf, 0, 0, {})
        final_norm = rivals.vectors * (rho * rho / (math.sqrt(3.0 * d) * least * least))
        final_norm = final_norm * _GROW + self.gamma * rivals.vectors * rho / rivals.size
        errors = torch.stack([eta[:, : t + 1] for eta in found.etas])  # (S, parts, t + 1)
        lost = torch.einsum("kSvt,Spt->kpv", gradients.behind, errors)
        total = (gradients.first * r + final_norm + lost.sum(1)) * _GROW
        low = rivals.margins - total
        at = int(low.argmin())
        i, j = divmod(at, low.shape[-1])
        parts = dict(zip(PARTS, lost[i, :, j].tolist(), strict=True))
        parts |= {"gradient": float(gradients.first[i, j]) * r}
        parts |= {"last norm": float(final_norm[i, j])}
        return Bound(float(low[i, j]), i, j, parts)


class _Gradients(NamedTuple):
    first: Tensor
    """(K, V)."""
    behind: Tensor
    """(K, S, V, t + 1)."""


class _Remainders(NamedTuple):
    etas: list[Tensor]
    """Per stage, (parts, n)."""
    moves: list[Tensor]
    n: int
    """Tokens before the first whose bound diverges."""


class _RowMoves(NamedTuple):
    Z: Tensor
    """(H, n, n)."""
    e: Tensor
    product: Tensor

    def cut(self, n: int) -> "_RowMoves":
        return _RowMoves(*(t[:, :n, :n] for t in self))


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
    values, vectors = torch.linalg.eigh(S)
    root: Tensor = vectors * values.clamp(min=0.0).sqrt()
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


def _require_stages(stages: Sequence[Residual]) -> None:
    """Refuse, by name, what the remainders do not cover."""
    for number, residual in enumerate(stages):
        where = f"stage {number + 1}"
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
            if not isinstance(first.choice, Softmax) or isinstance(first.choice.beta, Tensor):
                raise ValueError(
                    f"{where} chooses by {first.choice!r}; decisions are certified for softmax."
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


def certified_radii(
    bound: DecisionBound,
    norm: str,
    positions: Sequence[int],
    deadline: float = math.inf,
    progress: Callable[[int], None] | None = None,
) -> dict[int, Radius]:
    """The certified radius of each position, up to a factor of _STEP below it.

    Radii are tried on one grid, so positions share their remainders. After ``deadline``, by
    time.monotonic, what is known by then is returned.
    """
    if norm not in NORMS:
        raise ValueError(f"a decision is certified in norm {', '.join(NORMS)}, got {norm!r}.")
    found: dict[int, Radius] = {}
    known: dict[int, _Remainders] = {}
    ball = None if norm == "one" else bound.ball(norm)
    last: int | None = None
    for done, t in enumerate(positions):
        if progress is not None:
            progress(done)
        if norm == "one":
            known, ball = {}, bound.ball(norm, t)
        assert ball is not None
        gradients = bound.gradients_at(t, norm, t if norm == "one" else None)
        margins = bound.rivals[t].margins
        ratio = torch.where(
            margins.isfinite(), margins / gradients.first.clamp(min=1e-300), torch.inf
        )
        first_order, at = float(ratio.amin()), int(ratio.argmin()) % ratio.shape[-1]
        best = Radius(0.0, max(first_order, 0.0), at, None)
        low, high = _FLOOR, _grid(first_order) + 1
        middle = _grid(first_order / 16.0) if last is None else last
        while high - low > 1 and first_order > 0.0 and time.monotonic() < deadline:
            middle = min(max(middle, low + 1), high - 1)
            r = _STEP**middle
            if middle not in known:
                known[middle] = bound.remainders(ball, r, t + 1 if norm == "one" else None)
            here = bound.margin(t, gradients, known[middle], r)
            if here.lower > 0.0:
                low, best = middle, Radius(r / _GROW, first_order, at, here)
            else:
                high = middle
            inside = low > _FLOOR and high <= _grid(first_order)
            stride = _STRIDE if here.lower > 0.0 else -_STRIDE
            middle = (low + high) // 2 if inside else middle + stride
        last = low if low > _FLOOR else None
        found[t] = best
    return found


_FLOOR = -700  # the least radius that is tried, 1.04^-700 = 1e-12


def _grid(r: float) -> int:
    """The step of the search at a radius or just above it."""
    return math.ceil(math.log(max(r, 1e-12)) / math.log(_STEP))
