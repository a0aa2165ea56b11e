"""A sink: one more key to look at, whose value is zero.

Weights sum to 1, so a head that has nothing to say must still say something. A sink takes the
rest: with a score r_h of its own in head h,

    p = choice.weights((r_h, z), (0, log u)),     o = sum over the true keys of p_j v_j,

so that the true weights may sum to less than 1. For softmax the outputs shrink by
Z / (Z + e^(r_h)), Z = sum_j u_j e^(z_j).

The sink is key 0: a key of zeros, whose score before the prior is 0 (and stays 0 under a soft-cap),
and a prior that gives it log u = r_h. Queries are aligned to the end of the keys, so nothing else
moves; ``Sink(prior)`` looks at the true keys one place further on and is open to every query. A row
that no true key is open to still chooses the sink, and gives zeros.

Xiao et al. (2023), Efficient streaming language models with attention sinks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fenchel.attention.prior import Place, Prior


@dataclass(frozen=True, eq=False)
class Sink(Prior):
    """``prior`` over all keys but the first, which every query of head h sees by ``scores[h]``."""

    scores: Tensor
    prior: Prior | None = None

    def __post_init__(self) -> None:
        if self.scores.dim() != 1 or not self.scores.is_floating_point():
            raise ValueError(
                "a sink needs one score a head, shape (H,), got "
                f"{tuple(self.scores.shape)} of {self.scores.dtype}."
            )

    def admits(self, at: Place) -> Tensor | None:
        """What the prior admits, and the sink."""
        open_ = None if self.prior is None else self.prior.admits(_inner(at))
        return None if open_ is None else open_ | (at.j == 0)

    def bias(self, at: Place) -> Tensor:
        """The score of the sink, the bias of the prior elsewhere."""
        bias = None if self.prior is None else self.prior.bias(_inner(at))
        sink = self.scores[at.h]
        return torch.where(at.j == 0, sink, 0.0 if bias is None else bias.to(sink.dtype))

    def reach(self, first: int, last: int, S: int) -> tuple[int, int]:
        """From the sink to the last key that the prior reaches."""
        return 0, 1 + self._inside(first, last, S, "reach")[1]

    def free(self, first: int, last: int, S: int) -> tuple[int, int]:
        """What the prior leaves free."""
        low, high = self._inside(first, last, S, "free")
        return low + 1, high + 1

    def varies(self) -> bool:
        """Between heads."""
        return True

    def tensors(self) -> tuple[Tensor, ...]:
        """The scores, then what the prior carries."""
        return (self.scores, *(() if self.prior is None else self.prior.tensors()))

    def with_tensors(self, tensors: Sequence[Tensor]) -> Prior:
        """Others in their place."""
        inner = None if self.prior is None else self.prior.with_tensors(tensors[1:])
        return Sink(tensors[0], inner)

    def ready(self, device: torch.device) -> Prior:
        """The prior made ready."""
        return Sink(self.scores, None if self.prior is None else self.prior.ready(device))

    def check(self, B: int, H: int, T: int, S: int) -> None:
        """A score a head, a key to be the sink, and a prior that fits the others."""
        if len(self.scores) != H or S < 1:
            raise ValueError(
                f"a sink has scores for {len(self.scores)} heads and is one key; "
                f"the call has {H} heads and {S} keys."
            )
        if self.prior is not None:
            self.prior.check(B, H, T, S - 1)

    def _inside(self, first: int, last: int, S: int, what: str) -> tuple[int, int]:
        if self.prior is None:
            return 0, S - 1
        low, high = getattr(self.prior, what)(first - 1, last - 1, S - 1)
        return low, high


def with_sink(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values behind one of zeros: (..., S, D), (..., S, E) -> the same with S + 1."""
    return pad(k, (0, 0, 1, 0)), pad(v, (0, 0, 1, 0))


def _inner(at: Place) -> Place:
    # The sink itself is asked about as key 0 of the others: any answer, which is then replaced.
    return Place(at.b, at.h, at.i - 1, (at.j - 1).clamp(min=0), at.S - 1)
