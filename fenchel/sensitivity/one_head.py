"""One head whose weights fit in one block: its derivative in eight products, without bookkeeping.

With A = scale W_Q k^T (M, S), B = scale q W_K^T (T, M), and J_p the derivative of the choice,

    dz = dX A + B dX^T                        gz = J_p(g v^T)
    do = J_p(dz) v + p (dX W_V)               gX = gz A^T + gz^T B + (p^T g) W_V^T

A small operator spends its time on calls, not on arithmetic, so this halves what a step of
Golub-Kahan takes (fenchel/sensitivity/golub_kahan.py). A has M S numbers where k has D S: it is for
a width M that is not much larger than D.
"""

import torch
from torch import Tensor

from fenchel.sensitivity.operator import Operator, Space
from fenchel.sensitivity.rows import Block


class OneHead(Operator):
    """d Att(X) of one head, in the dtype of what it is given."""

    def __init__(
        self,
        block: Block,
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

    def apply(self, v: Tensor) -> Tensor:
        """J dX."""
        return torch.stack([self._push(one) for one in v]) if len(v) > 1 else self._push(v)

    def adjoint(self, u: Tensor) -> Tensor:
        """J^T g."""
        return torch.stack([self._pull(one) for one in u]) if len(u) > 1 else self._pull(u)

    def _push(self, move: Tensor) -> Tensor:
        dX = move.view(self.B.shape)
        dz = torch.mm(dX, self.A).addmm_(self.B, dX.mT)
        out = torch.mm(self._turned(dz), self.v).addmm_(self.p, torch.mm(dX, self.W_V))
        return out.view(*move.shape[:-1], -1)

    def _pull(self, gradient: Tensor) -> Tensor:
        g = gradient.view(-1, self.v.shape[1])
        gz = self._turned(torch.mm(g, self.v.mT))
        gX = torch.mm(gz, self.A.mT).addmm_(gz.mT, self.B)
        return gX.addmm_(torch.mm(self.p.mT, g), self.W_V.mT).view(*gradient.shape[:-1], -1)

    def _turned(self, dz: Tensor) -> Tensor:
        return self.block.turned(dz.unsqueeze(0))[0]
