"""Muon that treats queries and keys head by head: two baselines.

For head h with query rows W_Q and key rows W_K, both (D, M), and G a row block of the momentum,

    PerHeadMuon          U_Q = msign(G_Q)
    CompositionalMuon    U_Q = C_K^-1 msign(C_K^-1 G_Q),     C_K = (W_K W_K^T + lambda)^(1/2),

the latter Muon in the metric of the product W_Q^T W_K, after Compositional Muon (Tilde, 2026),

and likewise for the keys, whose partner is the sum of the Grams of all query heads they serve. A
step so whitened moves the product by equally much in all directions. U is then given the root
mean square of Muon's own step, 0.2, so that one rate means the same in both. Value rows, and all
other matrices, move as Muon moves them. lambda is ``damping`` times the Gram's mean eigenvalue.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fenchel.optim import Muon
from fenchel.optim.muon import orthogonal
from fenchel.optim.score.direction import damped_inverse_root

RMS = 0.2


class PerHeadMuon(Muon):
    """Muon whose query and key rows move by an orthogonal step per head."""

    refusal = "it reads the rate on the host"

    def __init__(self, params: list[nn.Parameter], attentions: list[Any], **settings: Any) -> None:
        super().__init__(params, **settings)
        self.attentions = {attention.qkv.weight: attention for attention in attentions}

    def _move(
        self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any], **rates: Any
    ) -> None:
        before = {w: w.detach().clone() for w in weights if w in self.attentions}
        super()._move(weights, gradients, group, **rates)
        for weight, W in before.items():
            self._move_heads(weight, W, group)

    def _move_heads(self, weight: Tensor, W: Tensor, group: dict[str, Any]) -> None:
        """Replace what Muon did to the query and key rows, from W, by the step per head."""
        a, mu = self.attentions[weight], group["momentum"]
        H, G, D = a.heads, a.groups, a.head_width
        ahead = weight.grad.lerp(self.state[weight]["momentum"], mu)  # type: ignore[union-attr]
        W_HDM, g_HDM = (x[: (H + G) * D].view(H + G, D, -1) for x in (W, ahead))
        U = self._direction(W_HDM, g_HDM, H, G)
        U = U * (RMS / U.square().mean((1, 2), keepdim=True).sqrt().clamp(min=1e-12))
        moved = (1.0 - group["lr"] * group["weight_decay"]) * W_HDM - group["lr"] * U
        weight[: (H + G) * D] = moved.flatten(0, 1)

    def _direction(self, _W: Tensor, gradient: Tensor, _heads: int, _groups: int) -> Tensor:
        return orthogonal(gradient)


class CompositionalMuon(PerHeadMuon):
    """Muon whose query and key rows are whitened by their partner's weights."""

    def __init__(
        self, params: list[nn.Parameter], attentions: list[Any], *, damping: float, **settings: Any
    ) -> None:
        super().__init__(params, attentions, **settings)
        self.damping = damping

    def _direction(self, W: Tensor, gradient: Tensor, heads: int, groups: int) -> Tensor:
        grams = W @ W.mT
        of_keys = grams[heads:].repeat_interleave(heads // groups, 0)
        of_queries = grams[:heads].unflatten(0, (groups, -1)).sum(1)
        both = torch.cat((of_keys, of_queries)).float()
        root = damped_inverse_root(both, self.damping).to(W.dtype)
        return root @ orthogonal(root @ gradient)
