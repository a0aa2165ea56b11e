"""The change of the scores along a line of weights, on a sample of pairs of positions.

    W(t)   = shrink W + t U                              t and shrink for queries and for keys
    g(s)   = g + s dg                                    parameters of the norms n, where they move
    S(t)   = scale <R_i n(W_Q(t) x_i), R_j n(W_K(t) x_j)>
    change = root mean square over the sampled pairs (i, j) of S(t) - S(0 and no shrink)

These are the scores that the softmax receives, scale included. Without a norm of queries and keys
they are a sum of four parts, <q, k>, <q, dk>, <dq, k> and <dq, dk>, each with a product of t and
shrink before it, so the sixteen inner products of these parts give the change anywhere on the line.
With a norm they give it on a chord, from the start to one point of the curve that q and k describe,
where dq = q(t) - q(0) and dk = k(t) - k(0). The size "closed" needs no pairs at
all: if queries and keys of different positions were independent, the mean square of <q, k> would be

    E <q, k>^2 = <E q q^T, E k k^T>,

and S(t) - S(0) = <(q(t), -q(0)), (k(t), k(0))> is such a product too.

On a GPU the inputs are read in bfloat16, as the model's own pass reads them; sums are float32.

Shapes: L layers, n sequences, T positions, m sampled queries, H query heads, G key heads, D their
width, M inputs (one more with a bias); t and change are (L, H), s is (L,): all heads of a layer
share its norms.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.linalg import vector_norm

from fenchel.attention import Angles, rotate
from fenchel.optim.score.pairs import QueryKeyPair
from fenchel.optim.score.probe import StackInput, mean_over_processes


class HeadWeights(NamedTuple):
    """Query and key weights of the layers of a stack, or a move of them."""

    Q: Tensor
    """(L, H, D, M)."""
    K: Tensor
    """(L, G, D, M)."""


class HeadFactors(NamedTuple):
    """One number per head: a distance along U, or a factor on W."""

    Q: Tensor
    """(L, H)."""
    K: Tensor
    """(L, G)."""


class NormGains(NamedTuple):
    """Parameters of the norms of queries and keys, and their move: one dict per layer.

    The keys are those of ``QueryKeyPair.gains``; the values are float32 or better.
    """

    start: list[dict[str, Tensor]]
    move: list[dict[str, Tensor]]

    @classmethod
    def between(cls, start: list[dict[str, Tensor]], end: list[dict[str, Tensor]]) -> "NormGains":
        """The move from ``start`` to ``end``."""
        layers = zip(start, end, strict=True)
        return cls(start, [{name: y[name] - x[name] for name in x} for x, y in layers])

    def at(self, layer: int, norm: str, s: Tensor | None) -> dict[str, Tensor]:
        """The parameters of one norm at a share ``s`` (L,) of the move; None for the start."""
        return {
            name.removeprefix(f"{norm}."): value
            if s is None
            else torch.addcmul(value, s[layer], self.move[layer][name])
            for name, value in self.start[layer].items()
            if name.startswith(f"{norm}.")
        }


class ScoreLine:
    """Scores along W + t U for the layers of a stack; ``set_direction`` gives U.

    Without ``gains`` the norms are those of the model as it is.
    """

    def __init__(
        self,
        pairs: Sequence[QueryKeyPair],
        inputs: StackInput,
        W: HeadWeights,
        *,
        closed: bool = False,
        gains: NormGains | None = None,
    ) -> None:
        self.pairs, self.inputs, self.closed = pairs, inputs, closed or not inputs.from_batch
        self.gains = gains
        self.has_qk_norm = pairs[0].q_norm is not None or pairs[0].k_norm is not None
        self.scales_gains = all(pair.gain_offsets for pair in pairs)
        self.group = W.Q.shape[1] // W.K.shape[1]
        self.x_q, self.angles_q = inputs.x, inputs.angles
        m, T = len(inputs.grid.queries), inputs.x.shape[2]
        if m < T:
            self.x_q = inputs.x[:, :, inputs.grid.queries]
            if inputs.angles is not None:
                self.angles_q = Angles(
                    *(part[..., inputs.grid.queries, :] for part in inputs.angles)
                )
        self.q, self.k = _project(self.x_q, W.Q), _project(inputs.x, W.K)
        self.dq: Tensor | None = None
        self.dk: Tensor | None = None
        self.start_q, self.start_k = self.queries(self.q), self.keys(self.k)
        self.parts: Tensor | None = None
        self._start: Tensor | None = None

    def set_direction(self, U: HeadWeights) -> None:
        """Set the direction of the line, and compute the products of parts."""
        self.dq, self.dk = _project(self.x_q, U.Q), _project(self.inputs.x, U.K)
        if not self.has_qk_norm:
            self.parts = self._products(self.queries(self.dq), self.keys(self.dk))

    def chord(self, t: HeadFactors) -> Tensor:
        """The products of parts on the chord from the start to a point, (L, H, 4, 4)."""
        q, k = self.point(t, None)
        return self._products(q - self.start_q, k - self.start_k)

    def _products(self, dq: Tensor, dk: Tensor) -> Tensor:
        """Means over pairs of the products of <q, k>, <q, dk>, <dq, k> and <dq, dk>."""
        # norms compute in float32; the inputs, bfloat16 on a GPU, have no more digits than that
        q, k = (
            (x.to(self.q.dtype), dx.to(self.q.dtype))
            for x, dx in ((self.start_q, dq), (self.start_k, dk))
        )
        if self.closed:
            return self._independent_products(q, k)
        sums = score_part_products(q, k, self.inputs.grid.mask)
        mean = sums * (self.pairs[0].scale ** 2 * self.inputs.grid.pair_weight)[..., None, None]
        return mean_over_processes(mean)

    @property
    def start(self) -> Tensor:
        """The scores at the start of the line, (L, n, H, m, T)."""
        if self._start is None:
            self._start = self.scores(self.start_q, self.start_k)
        return self._start

    @property
    def start_rms(self) -> Tensor:
        """The root mean square of these scores, (L, H)."""
        if self.parts is not None:
            return self.parts[..., 0, 0].sqrt()
        if self.closed:
            return self.independent(self.start_q, self.start_k)
        return self.rms(self.start)

    def move(
        self, t: HeadFactors, shrink: HeadFactors | None, s: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(RMS of the change, RMS of the scores) at a point of the line, (L, H) each."""
        if self.parts is not None:
            return (
                rms_by_parts(self.parts, t, shrink, 1.0),
                rms_by_parts(self.parts, t, shrink, 0.0),
            )
        q, k = self.point(t, shrink, s)
        if self.closed:
            both_q, both_k = torch.cat((q, -self.start_q), -1), torch.cat((k, self.start_k), -1)
            return self.independent(both_q, both_k), self.independent(q, k)
        S = self.scores(q, k)
        return self.rms(S - self.start), self.rms(S)

    def point(
        self, t: HeadFactors, shrink: HeadFactors | None, s: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Queries (L, n, H, m, D) and keys (L, n, G, T, D) at a point, after norm and rotation."""
        assert self.dq is not None
        assert self.dk is not None
        q, k = (
            along[:, None, :, None, None] * move
            + (at if shrink is None else shrink[n][:, None, :, None, None] * at)
            for n, (along, move, at) in enumerate(
                zip(t, (self.dq, self.dk), (self.q, self.k), strict=True)
            )
        )
        return self.queries(q, s), self.keys(k, s)

    def release(self) -> None:
        """Free the tensors that only a step needs."""
        del self.q, self.k
        self.dq = self.dk = self._start = self.gains = None

    def same_for_keys(self, t: Tensor) -> HeadFactors:
        """t (L, H) for queries, and for the keys of each group the t of its first head."""
        return HeadFactors(t, t[:, :: self.group])

    def queries(self, q: Tensor, s: Tensor | None = None) -> Tensor:
        """W_Q x with norm and rotation applied."""
        return self._rotate(self._normalise(q, "q_norm", s), self.angles_q)

    def keys(self, k: Tensor, s: Tensor | None = None) -> Tensor:
        """W_K x with norm and rotation applied."""
        return self._rotate(self._normalise(k, "k_norm", s), self.inputs.angles)

    def _normalise(self, x: Tensor, which: str, s: Tensor | None) -> Tensor:
        """x with the norm of each layer applied, at a share ``s`` of the move of the gains."""
        norms: list[nn.Module | None] = [getattr(pair, which) for pair in self.pairs]
        if all(norm is None for norm in norms):
            return x
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.gains is None and (stacked := _stacked_rms_norms(norms)) is not None:
            w, epsilon = stacked
            size: Tensor = vector_norm(x, dim=-1, keepdim=True)
            r = (size.square() / x.shape[-1] + (epsilon or torch.finfo(x.dtype).eps)).rsqrt()
            return (x * r).mul_(w[:, None, None, None])
        rows = []
        for layer, (row, norm) in enumerate(zip(x, norms, strict=True)):
            if norm is None:
                rows.append(row)
            elif self.gains is None:
                rows.append(norm(row))
            else:
                rows.append(functional_call(norm, self.gains.at(layer, which, s), (row,)))
        return torch.stack(rows).to(x.dtype)

    def _rotate(self, x: Tensor, angles: Angles | None) -> Tensor:
        """x rotated where there are rotary positions, and contiguous."""
        if angles is None:
            return x.contiguous()
        if fused(x):
            from fenchel.kernels.rotary_moments import rotate as rotate_kernel

            return rotate_kernel(x, *angles, layout=self.pairs[0].layout)
        return rotate(x.contiguous(), angles, layout=self.pairs[0].layout)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """(L, n, H, m, T), zero outside of the mask."""
        L, n, H, m, D = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        grouped = q.to(wide).reshape(L, n, H // self.group, self.group * m, D)
        S = (grouped * self.pairs[0].scale @ k.to(wide).mT).view(L, n, H, m, -1)
        return S.masked_fill_(~self.inputs.grid.mask, 0.0)

    def rms(self, S: Tensor) -> Tensor:
        """Root mean square over the pairs of the grid, per head: (L, n, H, m, T) -> (L, H)."""
        return mean_over_processes(self.sample_mean_square(S)).sqrt()

    def sample_mean_square(self, S: Tensor) -> Tensor:
        """Mean square over the pairs of this process: (L, n, H, m, T) -> (L, H)."""
        return S.square().sum(dim=(1, 3, 4)) * self.inputs.grid.pair_weight

    def independent(self, q: Tensor, k: Tensor) -> Tensor:
        """RMS of <q, k> if positions were independent: -> (L, H)."""
        A, B = self._moments(q, k)
        return self.pairs[0].scale * (A * B).sum(dim=(-2, -1)).clamp(min=0.0).sqrt()

    def _independent_products(self, q: tuple[Tensor, Tensor], k: tuple[Tensor, Tensor]) -> Tensor:
        """``_products`` if positions were independent: E <a, b> <c, d> = <E a c^T, E b d^T>."""
        A, B = (
            torch.unflatten(torch.unflatten(M, -1, (2, -1)), -3, (2, -1))
            for M in self._moments(torch.cat(q, -1), torch.cat(k, -1))
        )
        products = torch.einsum("lhadce,lhbdfe->lhabcf", A, B)
        return self.pairs[0].scale ** 2 * products.flatten(4).flatten(2, 3)

    def _moments(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """E q q^T and E k k^T for every query head."""
        A, B = second_moment(q), second_moment(k).repeat_interleave(self.group, dim=1)
        if not self.inputs.from_batch:  # rows of the identity: a sum over inputs, not a mean
            A, B = A * q.shape[3], B * k.shape[3]
        return A, B


def rms_by_parts(
    parts: Tensor, t: HeadFactors, shrink: HeadFactors | None, less: float = 0.0
) -> Tensor:
    """RMS of the scores at a point, minus ``less`` times those at the start, (L, H)."""
    a, b = t.Q, per_head(t.K, t.Q.shape[1])
    if shrink is None:
        one = torch.ones_like(a)
        v = torch.stack((one if less == 0.0 else one - less, b, a, a * b), dim=-1)
    else:
        c, d = shrink.Q, per_head(shrink.K, t.Q.shape[1])
        v = torch.stack((c * d - less, c * b, a * d, a * b), dim=-1)
    square = ((parts @ v.unsqueeze(-1)).squeeze(-1) * v).sum(-1)
    return square.clamp(min=0.0).sqrt()


def score_part_products(q: tuple[Tensor, Tensor], k: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
    """Sums over pairs of products of <q, k>, <q, dk>, <dq, k>, <dq, dk>: (L, H, 4, 4).

    ``q`` holds q and dq, (L, n, H, m, D) each, ``k`` holds k and dk, (L, n, G, T, D) each.
    """
    if fused(q[0]):
        from fenchel.kernels.score_products import score_part_products as kernel

        return kernel(q, k, mask)
    L, n, H, m, D = q[0].shape
    G, T = k[0].shape[2:4]
    wide = torch.promote_types(q[0].dtype, torch.float32)
    rows = [x.to(wide).reshape(L * n * G, H // G * m, D) for x in q]
    columns = [x.to(wide).reshape(L * n * G, T, D).mT for x in k]
    S = q[0].new_empty(4, L * n * G, H // G * m, T, dtype=wide)
    for part, (x, y) in zip(S, [(x, y) for x in rows for y in columns], strict=True):
        torch.bmm(x, y, out=part)
    flat = S.view(4, L, n, H, m, T).mul_(mask.to(wide)).view(4, L * n * H, m * T).transpose(0, 1)
    return (flat @ flat.mT).view(L, n, H, 4, 4).sum(1)


def fused(x: Tensor) -> bool:
    """Whether Triton kernels apply: on a GPU, in float32 or below, with Triton installed."""
    return x.is_cuda and x.dtype != torch.float64 and find_spec("triton") is not None


def per_head(x: Tensor, H: int) -> Tensor:
    """The value of each key head for all of its query heads: (L, G) -> (L, H)."""
    return x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], dim=1)


def by_group(x: Tensor, groups: int) -> Tensor:
    """Query heads grouped by their key head: (L, H, ...) -> (L, G, H / G, ...)."""
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:])


def second_moment(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Mean of v v^T over sequences and positions: (L, n, H, T, D) -> (L, H, D, D).

    ``weight`` (L, n, 1, T) is how often each position counts.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if weight is None:
        weight = x.new_ones(x.shape[0], x.shape[1], 1, x.shape[3])
    heads = x.transpose(1, 2).flatten(2, 3)
    heavy = (x * weight.unsqueeze(-1)).transpose(1, 2).flatten(2, 3)
    sums = heavy.mT @ heads / weight.sum(dim=(1, 3)).clamp(min=1)[..., None, None]
    return mean_over_processes(sums)


def _stacked_rms_norms(norms: Sequence[nn.Module | None]) -> tuple[Tensor, float | None] | None:
    """The gains (L, D) and the epsilon of the norms of all layers, where all are equal."""
    kinds = {(type(norm), getattr(norm, "eps", None)) for norm in norms}
    if len(kinds) > 1 or not all(isinstance(norm, nn.RMSNorm) for norm in norms):
        return None
    # a subclass may have a gain that is not its weight
    gains = [getattr(norm, "gain", getattr(norm, "weight", None)) for norm in norms]
    if any(gain is None for gain in gains):
        return None
    return torch.stack(gains), next(iter(kinds))[1]  # type: ignore[arg-type]


def _project(x: Tensor, W: Tensor) -> Tensor:
    """(L, n, T, M), (L, H, D, M) -> (L, n, H, T, D), a view of the product (L, n, T, H, D)."""
    L, n, T, _ = x.shape
    flat = torch.bmm(x.flatten(1, 2), W.flatten(1, 2).to(x.dtype).mT)
    return flat.view(L, n, T, W.shape[1], W.shape[2]).transpose(2, 3)
