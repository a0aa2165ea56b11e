"""The scores of several layers along a line of weights, on a sample of pairs of positions.

    W(t)   = shrink W + t U                              t and shrink for queries and for keys
    S(t)   = scale <R_i n(W_Q(t) x_i), R_j n(W_K(t) x_j)>
    change = root mean square over the sampled open pairs (i, j) of S(t) - S(0 and no shrink)

These are the scores that the softmax sees, scale included. Without a norm they are a sum of four
parts, <q, k>, <q, dk>, <dq, k> and <dq, dk> with products of t and shrink before them, so the
sixteen inner products of these parts give the change anywhere on the line; with one, a point
costs a product of queries and keys. Queries are sampled evenly over the positions, keys are all
there. "closed" sizes need no pairs at all: were queries and keys of different positions
independent, the mean square of <q, k> would be

    E <q, k>^2 = <E q q^T, E k k^T>,

and S(t) - S(0) = <(q(t), -q(0)), (k(t), k(0))> is such a product too. Without any sample the
inputs are taken as white: the rows of the identity.

Shapes: L layers, n sequences, T positions, m sampled queries, H heads, G heads of keys, D their
width, M inputs (one more with a bias); t and change (L, H).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fenchel.attention import Angles, rotate
from fenchel.optim.score.pairs import Pair
from fenchel.optim.score.probe import Seen
from fenchel.optim.score.processes import mean_over_processes

QUERIES = 64
"""Sampled queries of a sequence."""


class Heads(NamedTuple):
    """Weights, or a move of them, of the layers of a stack."""

    Q: Tensor
    """(L, H, D, M)."""
    K: Tensor
    """(L, G, D, M)."""


class Factors(NamedTuple):
    """A number for every head: how far along U, or a scaling of W."""

    Q: Tensor
    """(L, H)."""
    K: Tensor
    """(L, G)."""


class Sample(NamedTuple):
    """The inputs of the layers of a stack, and which pairs of positions are looked at."""

    x: Tensor
    """(L, n, T, M)."""
    turn: Angles | None
    """(L, 1 or n, 1, T, W) each."""
    queries: Tensor
    """Positions of the sampled queries, (m,)."""
    open: Tensor
    """(L, n, 1, m, T), True where a sampled query may see a key."""
    real: bool = True
    """False for the identity that stands in for a sample."""


def sample(pairs: Sequence[Pair], seen: Sequence[Seen | None], like: Tensor) -> Sample:
    """The probes of equal layers side by side, in the dtype and on the device of ``like``."""
    present = [s for s in seen if s is not None]
    if len(present) < len(pairs):
        M = like.shape[-1]
        x = torch.eye(M, dtype=like.dtype, device=like.device).expand(len(pairs), 1, M, M)
        queries = torch.arange(M, device=like.device)
        everything = torch.ones(len(pairs), 1, 1, M, M, dtype=torch.bool, device=like.device)
        return Sample(x, None, queries, everything, real=False)
    x = torch.stack([s.x for s in present]).to(like.dtype)
    if pairs[0].query.bias is not None:
        x = torch.cat((x, torch.ones_like(x[..., :1])), dim=-1)
    T = x.shape[2]
    m = min(T, QUERIES)
    queries = ((torch.arange(m, device=x.device) + 0.5) * (T / m)).long()
    open_ = torch.stack([_open(p, s, queries) for p, s in zip(pairs, present, strict=True)])
    return Sample(x, _turns(present, like), queries, open_.unsqueeze(2))


def _open(pair: Pair, seen: Seen, queries: Tensor) -> Tensor:
    """(n, m, T): causal, within the window, and not masked."""
    n, T, _ = seen.x.shape
    distance = queries.unsqueeze(1) - torch.arange(T, device=queries.device)
    open_ = distance >= 0 if pair.causal else torch.ones_like(distance, dtype=torch.bool)
    if pair.window is not None:
        open_ = open_ & (distance.abs() < pair.window)
    if seen.mask is not None:
        return open_ & seen.mask[:, queries]
    return open_.expand(n, -1, -1)


def _turns(seen: Sequence[Seen], like: Tensor) -> Angles | None:
    turns = [s.turn for s in seen if s.turn is not None]
    if not turns:
        return None
    cos, sin = (
        torch.stack([part if part.ndim == 4 else part[None, None] for part in parts])
        for parts in zip(*turns, strict=True)
    )
    return Angles(cos.to(like.dtype), sin.to(like.dtype))


class Line:
    """Scores along W + t U for the layers of a stack; a point until ``toward`` says where."""

    def __init__(
        self, pairs: Sequence[Pair], at: Sample, W: Heads, *, closed: bool = False
    ) -> None:
        self.pairs, self.at, self.closed = pairs, at, closed or not at.real
        self.q, self.k = _project(at.x[:, :, at.queries], W.Q), _project(at.x, W.K)
        self.dq, self.dk = self.q.new_zeros(()), self.k.new_zeros(())
        self.normed = pairs[0].q_norm is not None or pairs[0].k_norm is not None
        self.parts: Tensor | None = None
        self.group = W.Q.shape[1] // W.K.shape[1]
        self.start_q, self.start_k = self.queries(self.q), self.keys(self.k)
        self.pairs_open = at.open.sum(dim=(1, 3, 4)).clamp(min=1)
        self.start = None if self.closed else self.scores(self.start_q, self.start_k)
        self.start_rms = (
            self.independent(self.start_q, self.start_k)
            if self.start is None
            else self.rms(self.start)
        )

    def toward(self, U: Heads) -> None:
        """Run along U from here on."""
        self.dq = _project(self.at.x[:, :, self.at.queries], U.Q)
        self.dk = _project(self.at.x, U.K)
        if self.start is not None and not self.normed:
            dq, dk = self.queries(self.dq), self.keys(self.dk)
            S = self.start, self.scores(self.start_q, dk), self.scores(dq, self.start_k)
            flat = torch.stack((*S, self.scores(dq, dk)), 3).flatten(4)
            products = (flat @ flat.mT).sum(1) / self.pairs_open[..., None, None]
            self.parts = mean_over_processes(products)

    def move(self, t: Factors, shrink: Factors) -> tuple[Tensor, Tensor]:
        """(RMS of the change, RMS of the scores) at a point of the line, (L, H) each."""
        if self.parts is not None:
            return self._by_parts(t, shrink)
        q, k = self.point(t, shrink)
        if self.start is None:
            both_q, both_k = torch.cat((q, -self.start_q), -1), torch.cat((k, self.start_k), -1)
            return self.independent(both_q, both_k), self.independent(q, k)
        S = self.scores(q, k)
        return self.rms(S - self.start), self.rms(S)

    def _by_parts(self, t: Factors, shrink: Factors) -> tuple[Tensor, Tensor]:
        a, b = t.Q, t.K.repeat_interleave(self.group, dim=1)
        c, d = shrink.Q, shrink.K.repeat_interleave(self.group, dim=1)
        there = torch.stack((c * d, c * b, a * d, a * b), dim=-1)
        moved = torch.stack((c * d - 1.0, c * b, a * d, a * b), dim=-1)
        squares = [torch.einsum("lha,lhab,lhb->lh", x, self.parts, x) for x in (moved, there)]
        return squares[0].clamp(min=0.0).sqrt(), squares[1].clamp(min=0.0).sqrt()

    def point(self, t: Factors, shrink: Factors) -> tuple[Tensor, Tensor]:
        """Queries (L, n, H, m, D) and keys (L, n, G, T, D) there, as they enter the product."""
        q, k = (
            along[:, None, :, None, None] * move + by[:, None, :, None, None] * at
            for along, by, move, at in zip(
                t, shrink, (self.dq, self.dk), (self.q, self.k), strict=True
            )
        )
        return self.queries(q), self.keys(k)

    def alike(self, t: Tensor) -> Factors:
        """The same (L, H) for queries, and for the keys of each group that of its first head."""
        return Factors(t, t[:, :: self.group])

    def queries(self, q: Tensor) -> Tensor:
        """From W_Q x to what enters the product."""
        q = _normed(q, [pair.q_norm for pair in self.pairs])
        if self.at.turn is None:
            return q
        turn = Angles(*(part[..., self.at.queries, :] for part in self.at.turn))
        return rotate(q, turn, layout=self.pairs[0].layout)

    def keys(self, k: Tensor) -> Tensor:
        """From W_K x to what enters the product."""
        k = _normed(k, [pair.k_norm for pair in self.pairs])
        if self.at.turn is None:
            return k
        return rotate(k, self.at.turn, layout=self.pairs[0].layout)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """(L, n, H, m, T), zero where closed."""
        L, n, H, m, D = q.shape
        grouped = q.reshape(L, n, H // self.group, self.group * m, D)
        S = (grouped * self.pairs[0].scale @ k.mT).view(L, n, H, m, -1)
        return S.masked_fill_(~self.at.open, 0.0)

    def rms(self, S: Tensor) -> Tensor:
        """Over the open pairs of every head: (L, n, H, m, T) -> (L, H)."""
        squares = S.square().sum(dim=(1, 3, 4)) / self.pairs_open
        return mean_over_processes(squares).sqrt()

    def independent(self, q: Tensor, k: Tensor) -> Tensor:
        """RMS of <q, k> as if positions were independent: -> (L, H)."""
        A, B = second_moment(q), second_moment(k).repeat_interleave(self.group, dim=1)
        if not self.at.real:  # rows of the identity: a sum over inputs, not a mean
            A, B = A * q.shape[3], B * k.shape[3]
        return self.pairs[0].scale * (A * B).sum(dim=(-2, -1)).clamp(min=0.0).sqrt()


def by_group(x: Tensor, groups: int) -> Tensor:
    """Heads beside the heads they share keys with: (L, H, ...) -> (L, G, H / G, ...)."""
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:])


def second_moment(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Mean of v v^T over sequences and positions: (L, n, H, T, D) -> (L, H, D, D).

    ``weight`` (L, n, 1, T) counts positions more than once.
    """
    if weight is None:
        weight = x.new_ones(x.shape[0], x.shape[1], 1, x.shape[3])
    heads = x.transpose(1, 2).flatten(2, 3)
    heavy = (x * weight.unsqueeze(-1)).transpose(1, 2).flatten(2, 3)
    sums = heavy.mT @ heads / weight.sum(dim=(1, 3)).clamp(min=1)[..., None, None]
    return mean_over_processes(sums)


def _project(x: Tensor, W: Tensor) -> Tensor:
    """(L, n, T, M), (L, H, D, M) -> (L, n, H, T, D)."""
    L, n, T, _ = x.shape
    flat = x.flatten(1, 2) @ W.flatten(1, 2).mT
    return flat.view(L, n, T, W.shape[1], W.shape[2]).transpose(2, 3).contiguous()


def _normed(x: Tensor, norms: Sequence[nn.Module | None]) -> Tensor:
    layers = [row if norm is None else norm(row) for row, norm in zip(x, norms, strict=True)]
    return x if all(norm is None for norm in norms) else torch.stack(layers).to(x.dtype)
