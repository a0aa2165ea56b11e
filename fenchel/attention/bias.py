"""Biases as priors: ALiBi, T5's relative bias, and attention sinks.

**Positions.** A bias that depends on the distance between a query and a key:

    ALiBi           log u_ij = -m_h |i - j|                 a fixed slope m_h per head
    RelativeBias    log u_ij = table[bucket(j - i), h]      a learned number per bucket and head

Both are log-priors over the keys: near keys are likelier before any score is known. They are added
after the scale, so 1/sqrt(D) does not weaken them. Under a causal mask -m |i - j|, -m (i - j) and
+m j give the same weights, since a common shift of a row changes nothing.

The slopes of h heads, h a power of two, are 2^(-8k/h), k = 1..h; otherwise those of the next
smaller power of two, then every second one of the next larger. T5's buckets: half of them for the
distances 0, 1, 2, ... one by one, the rest spaced logarithmically up to ``distance``; both
directions share them evenly where a query may attend to later keys.

**A sink** is one more key, whose value is zero. Weights sum to 1, so a head cannot give all true
keys a small weight; a sink takes the rest. With a score r of its own (a number, one per head, or
one per query, as a layer computes it from the token),

    p = choice.weights((r_h, z), (0, log u)),     o = sum over the true keys of p_j v_j,

so that the true weights may sum to less than 1. For softmax the outputs shrink by
Z / (Z + e^(r_h)), Z = sum_j u_j e^(z_j).

The sink is key 0: a key of zeros, whose score before the prior is 0 (and stays 0 under a soft cap),
and a prior that gives it log u = r_h. Queries are aligned to the end of the keys, so nothing else
moves; ``Sink(prior)`` applies its prior to the true keys, one index further on, and is open to
every query. A row that no true key is open to still has the sink, and gives zeros.

Press, Smith and Lewis (2022), ALiBi; Raffel et al. (2020), T5; Xiao et al. (2023), Efficient
streaming language models with attention sinks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from fenchel.attention.prior import Prior, ScoreBlock, ScoreIndex
from fenchel.kernels.band import Band


@dataclass(frozen=True)
class ALiBi(Prior):
    """A penalty of m_h per step of distance; ``heads`` sets the slopes.

    >>> slope(torch.arange(8), 8)
    tensor([0.5000, 0.2500, 0.1250, 0.0625, 0.0312, 0.0156, 0.0078, 0.0039])
    """

    heads: int
    table: Tensor | None = None
    """The slopes as a tensor, made by ``with_tables`` for kernels that look them up."""
    band_fields = ("slopes",)

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise ValueError(f"ALiBi needs 1 head or more, got {self.heads}.")

    def bias(self, at: ScoreIndex) -> Tensor:
        m = slope(at.h, self.heads) if self.table is None else self.table[at.h]
        return -m * (at.i - at.j).abs()

    def with_tables(self, device: torch.device) -> Prior:
        return ALiBi(self.heads, slope(torch.arange(self.heads, device=device), self.heads))

    def band(self, S: int, device: torch.device) -> Band:  # noqa: ARG002
        of_device = _slopes.__wrapped__ if torch.compiler.is_compiling() else _slopes
        return Band(slopes=of_device(self.heads, device))

    def varies(self) -> tuple[bool, bool]:
        return False, True

    def check(self, B: int, H: int, T: int, S: int) -> None:  # noqa: ARG002
        if self.heads != H:
            raise ValueError(f"ALiBi has slopes for {self.heads} heads, the call has {H}.")


@dataclass(frozen=True, eq=False)
class RelativeBias(Prior):
    """T5's bias: a learned ``table`` (buckets, H), one row per bucket of distances."""

    table: Tensor
    both_sides: bool = False
    """Whether keys after the query have their own buckets (an encoder) or share bucket 0."""
    distance: int = 128
    """Distances from here on share the last bucket."""

    def __post_init__(self) -> None:
        if self.table.dim() != 2 or self.table.shape[0] < 4 or self.table.shape[0] % 4:
            raise ValueError(
                "a relative bias needs a table (buckets, heads) with buckets a multiple of 4, got "
                f"{tuple(self.table.shape)}."
            )

    def bias(self, at: ScoreIndex) -> Tensor:
        row = bucket(
            at.j - at.i, self.table.shape[0], both_sides=self.both_sides, distance=self.distance
        )
        return self.table[row, at.h]

    def dense(self, block: ScoreBlock, dtype: torch.dtype) -> Tensor:
        """One entry per distance, then the rows as windows of them.

        A block of t rows and s keys has t + s - 1 distances, and row r is the window that begins at
        t - 1 - r. The gradient is then a sum along diagonals; looked up entry by entry it would be
        a sort of all entries, a hundred times as slow on a GPU.
        """
        heads = range(block.H)[block.heads]
        rows, keys = range(block.T)[block.rows], range(block.S)[block.keys]
        if not rows or not keys or {rows.step, keys.step, heads.step} != {1}:
            return super().dense(block, dtype)
        first = keys[0] - (rows[-1] + block.S - block.T)
        distance = torch.arange(first, first + len(rows) + len(keys) - 1, device=block.device)
        row = bucket(
            distance, self.table.shape[0], both_sides=self.both_sides, distance=self.distance
        )
        by_distance = self.table.to(distance.device)[row, heads.start : heads.stop].T.contiguous()
        # in the table's own precision up to here, since the gradient adds up many entries
        return by_distance.unfold(1, len(keys), 1).to(dtype).flip(1)[None]

    def varies(self) -> tuple[bool, bool]:
        return False, True

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.table,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Prior:
        return RelativeBias(tensors[0], self.both_sides, self.distance)

    def check(self, B: int, H: int, T: int, S: int) -> None:  # noqa: ARG002
        if self.table.shape[1] != H:
            raise ValueError(
                f"a relative bias has columns for {self.table.shape[1]} heads, the call has {H}."
            )


def slope(head: Tensor, heads: int) -> Tensor:
    """m of head 0, 1, ... of ``heads``: an integer tensor of any shape."""
    lower = 2 ** int(math.log2(heads))
    plain = -8.0 / lower * (head + 1)
    between = -4.0 / lower * (2 * (head - lower) + 1)
    return torch.where(head < lower, plain, between).exp2()


@cache
def _slopes(heads: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # cached, it may serve a training step later
        return slope(torch.arange(heads), heads).to(device)


def bucket(
    relative: Tensor, buckets: int = 32, *, both_sides: bool = False, distance: int = 128
) -> Tensor:
    """T5's bucket of a relative position j - i, an integer tensor of any shape."""
    later = torch.zeros_like(relative)
    if both_sides:
        buckets //= 2
        later = (relative > 0).long() * buckets
        far = relative.abs()
    else:
        far = (-relative).clamp(min=0)
    exact = buckets // 2
    spread = (far.clamp(min=1).float() / exact).log() / math.log(distance / exact)
    rough = exact + (spread * (buckets - exact)).long()
    return later + torch.where(far < exact, far, rough.clamp(max=buckets - 1))


@dataclass(frozen=True, eq=False)
class Sink(Prior):
    """``prior`` over all keys but the first, the sink, whose log u is given by ``scores``.

    One number for all heads, one per head (H,), or one per query, which broadcasts to (B, H, T).

    >>> from fenchel.attention import Causal
    >>> Sink(1.5, Causal()).log(1, 3)  # the sink, then two keys
    tensor([[[[1.5000, 0.0000, 0.0000]]]])
    """

    scores: Tensor | float
    prior: Prior | None = None
    padded: bool = False
    """Whether the first key and value are the zeros of ``with_sink``: fused kernels skip them."""
    outside: bool = False
    """Whether the sink is not among the keys at all, for kernels that take it as a factor."""

    def __post_init__(self) -> None:
        scores = self.scores
        if not isinstance(scores, Tensor):
            object.__setattr__(self, "scores", torch.tensor(float(scores)))
        elif scores.dim() not in (0, 1, 3) or not scores.is_floating_point():
            raise ValueError(
                "a sink needs a number, one score per head, shape (H,), or one per query, "
                f"(B, H, T); got {tuple(scores.shape)} of {scores.dtype}."
            )

    @property
    def fixed_keys(self) -> int:
        """The sink, where it is the zeros of ``with_sink``."""
        return int(self.padded)

    def without_sink(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The other keys and values, where the sink is zeros or outside."""
        return (k, v) if self.outside else (k[:, :, 1:], v[:, :, 1:])

    @property
    def by_query(self) -> Tensor:
        """The scores with three axes, which broadcast to (B, H, T)."""
        assert isinstance(self.scores, Tensor)
        return self.scores if self.scores.dim() == 3 else self.scores.view(1, -1, 1)

    def admits(self, at: ScoreIndex) -> Tensor | None:
        """The keys that the prior admits, and the sink."""
        open_ = None if self.prior is None else self.prior.admits(_inner(at))
        return None if open_ is None else open_ | (at.j == 0)

    def bias(self, at: ScoreIndex) -> Tensor:
        bias = None if self.prior is None else self.prior.bias(_inner(at))
        x = self.by_query
        t = at.i - (at.S - x.shape[2])  # from a position among the keys to the number of a query
        places = zip((at.b, at.h, t), x.shape, strict=True)
        sink = x[tuple(i if size > 1 else torch.zeros_like(i) for i, size in places)]
        return torch.where(at.j == 0, sink, 0.0 if bias is None else bias)

    def key_range(self, first: int, last: int, S: int) -> tuple[int, int]:
        if self.prior is None:
            return 0, S
        return 0, 1 + self.prior.key_range(first - 1, last - 1, S - 1)[1]

    def zero_range(self, first: int, last: int, S: int) -> tuple[int, int]:
        if self.prior is None:
            return 1, S
        low, high = self.prior.zero_range(first - 1, last - 1, S - 1)
        return low + 1, high + 1

    def varies(self) -> tuple[bool, bool]:
        B, H, _ = self.by_query.shape
        by_sequence, by_head = (False, False) if self.prior is None else self.prior.varies()
        return B > 1 or by_sequence, H > 1 or by_head

    def tensors(self) -> tuple[Tensor, ...]:
        assert isinstance(self.scores, Tensor)
        return (self.scores, *(() if self.prior is None else self.prior.tensors()))

    def with_tensors(self, tensors: Sequence[Tensor]) -> Prior:
        inner = None if self.prior is None else self.prior.with_tensors(tensors[1:])
        return replace(self, scores=tensors[0], prior=inner)

    def with_tables(self, device: torch.device) -> Prior:
        return self if self.prior is None else replace(self, prior=self.prior.with_tables(device))

    def check(self, B: int, H: int, T: int, S: int) -> None:
        """Scores that broadcast, a key to be the sink, and a prior that fits the others."""
        sizes = zip(self.by_query.shape, (B, H, T), strict=True)
        if S < 1 or any(size not in (1, n) for size, n in sizes):
            shape = tuple(self.scores.shape) if isinstance(self.scores, Tensor) else ()
            raise ValueError(
                f"a sink of scores {shape} is one key; the call has B, H, T = {B}, {H}, {T} and "
                f"{S} keys."
            )
        if self.prior is not None:
            self.prior.check(B, H, T, S - 1)


def with_sink(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with zeros in front: (..., S, D), (..., S, E) -> the same with S + 1.

    >>> k, v = with_sink(torch.ones(1, 2), torch.ones(1, 3))
    >>> k
    tensor([[0., 0.],
            [1., 1.]])
    """
    return pad(k, (0, 0, 1, 0)), pad(v, (0, 0, 1, 0))


def add_sink(
    k: Tensor, v: Tensor, scores: Tensor | float, prior: Prior | None
) -> tuple[Tensor, Tensor, Sink]:
    """Keys, values and prior of the same call with a sink, as ``attend(sink=scores)`` takes it."""
    return *with_sink(k, v), Sink(scores, prior, padded=True)


def _inner(at: ScoreIndex) -> ScoreIndex:
    # The sink is looked up as key 0 of the others; the caller replaces that value.
    return ScoreIndex(at.b, at.h, at.i - 1, (at.j - 1).clamp(min=0), at.S - 1)
