"""The forget gate: a prior over keys that is learned from the input.

A gate f_l in (0, 1] of every token l says how much of the past it keeps. Key j reaches query i
through the gates between them,

    log u_ij = sum over j < l <= i of log f_l = C_i - C_j        C = cumulative sum of log f

for j <= i, and -inf behind the query: the prior is causal by itself. A constant gate is ALiBi with
the slope -log f, and gates of 1 are the causal mask. On the simplex the part C_i of the row
cancels, so a forget gate is a number per key; beside a sink it does not, and a token that forgets
gives its mass to the sink.

Derivative. log u is linear in C: with G = dL/d log u, dL/dC_l = sum_j G_lj - sum_i G_il, and that
of log f is its cumulative sum from the end.

Shapes: log f (B, H, S), (1, H, S) or (H, S), one entry per key and head.

Lin et al. (2025), Forgetting transformer: softmax attention with a forget gate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel.attention.prior import Prior, ScoreBlock, ScoreIndex


@dataclass(frozen=True, eq=False)
class Forget(Prior):
    """log u_ij = C_i - C_j for keys j <= i, C the cumulative sum of ``log_gates``.

    >>> Forget(torch.tensor([[0.5, 0.5, 0.25]]).log()).log(1, 3).exp()
    tensor([[[[0.1250, 0.2500, 1.0000]]]])
    """

    log_gates: Tensor
    totals: Tensor | None = None
    """C, where it is known: a kernel looks it up."""

    def __post_init__(self) -> None:
        x = self.log_gates
        if x.dim() not in (2, 3) or not x.is_floating_point():
            raise ValueError(
                "a forget gate is log f of every key, (B, H, S) or (H, S), in floating point; got "
                f"{tuple(x.shape)} of {x.dtype}."
            )

    def admits(self, at: ScoreIndex) -> Tensor:
        return at.j <= at.i

    def bias(self, at: ScoreIndex) -> Tensor:
        C = self._totals()
        b, h = (
            place if size > 1 else torch.zeros_like(place)
            for place, size in zip((at.b, at.h), C.shape[:2], strict=True)
        )
        return C[b, h, at.i.clamp(min=0)] - C[b, h, at.j]

    def key_range(self, first: int, last: int, S: int) -> tuple[int, int]:  # noqa: ARG002
        return 0, max(0, min(last + 1, S))

    def varies(self) -> tuple[bool, bool]:
        x = self.log_gates
        return x.dim() == 3 and x.shape[0] > 1, x.shape[-2] > 1

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.log_gates,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Prior:
        return Forget(tensors[0])

    def with_tables(self, device: torch.device) -> Prior:
        return Forget(self.log_gates, self._totals().to(device))

    def check(self, B: int, H: int, T: int, S: int) -> None:
        """One gate for every key, and no more queries than keys."""
        sizes = zip(self._totals().shape, (B, H, S), strict=True)
        fits = [size in (1, n) for size, n in sizes]
        if not all(fits) or self.log_gates.shape[-1] != S or T > S:
            raise ValueError(
                f"forget gates of shape {tuple(self.log_gates.shape)} do not fit B, H = {B}, {H} "
                f"and {T} queries on {S} keys."
            )

    def dense(self, block: ScoreBlock, dtype: torch.dtype) -> Tensor:
        """Rows less columns: nothing is gathered."""
        C = self._totals().to(block.device)
        at = block.score_index()
        C = C[block.batch] if C.shape[0] > 1 else C
        C = C[:, block.heads] if C.shape[1] > 1 else C
        i, j = at.i.flatten().clamp(min=0), at.j.flatten()
        log_u = C[..., i].unsqueeze(-1) - C[..., j].unsqueeze(-2)
        return log_u.masked_fill(at.j > at.i, -torch.inf).to(dtype)

    def _totals(self) -> Tensor:
        """C, (B or 1, H or 1, S), in float32 or better."""
        if self.totals is not None:
            return self.totals
        x = self.log_gates if self.log_gates.dim() == 3 else self.log_gates.unsqueeze(0)
        return x.to(torch.promote_types(x.dtype, torch.float32)).cumsum(-1)
