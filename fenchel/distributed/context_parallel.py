"""Context parallelism: every sequence is divided among the processes of a context group.

C consecutive ranks share every sequence (``train.context_group``). T positions are cut into 2 C
chunks of n = T / 2C, and rank k of a group has two of them,

    chunks k and 2 C - 1 - k,

one from the head and one from the tail: under a causal mask a query at position i has i + 1 keys,
and the two chunks of every rank have the same number together. All but attention is computed per
position. In attention each rank gathers the keys and values of its group, layer by layer, and its
queries attend to them chunk by chunk,

    K, V = gather(k), gather(v)                                         all T positions, in order
    o    = attend(q of a chunk, K up to its end, V up to its end)       priors end at the last key

so every causal choice map, mask and bias works unchanged: a query reads the same numbers as in one
process. A ring of partial results, as in other libraries, needs a rule that merges them, which
softmax has and entmax lacks.

**Backward.** The gradients of K and V on the C ranks are added by the rank that has the position,
in the order of the ranks and in float32. Those of the weights are added like cells (cells.py): rank
k of the group that reads cell c is leaf c C + k of the tree.

**Memory and bytes.** Keys and values of all T positions are kept per layer; everything else of an
activation is 1 / C. A rank receives 2 (C - 1) / C of the keys and values of a sequence per layer,
forward and again as gradients backward.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fenchel.distributed.processes import World


def positions_of(rank: int, size: int, length: int, device: torch.device | None = None) -> Tensor:
    """The positions of a rank of a group of ``size`` in sequences of ``length``, (T / C,).

    >>> positions_of(1, size=2, length=8)
    tensor([2, 3, 4, 5])
    """
    if size == 1:
        return torch.arange(length, device=device)
    n = length // (2 * size)
    chunks = rank, 2 * size - 1 - rank
    return torch.cat([torch.arange(c * n, (c + 1) * n, device=device) for c in chunks])


class ContextPart:
    """The positions of this rank, and how it gathers the keys and values of its group."""

    def __init__(self, world: World, size: int) -> None:
        """Groups of ``size`` consecutive ranks."""
        from torch.distributed.device_mesh import init_device_mesh

        shape, names = (world.size // size, size), ("cells", "context")
        mesh = init_device_mesh(world.device, shape, mesh_dim_names=names)
        self.size, self.rank, self.group = size, world.rank % size, mesh["context"].get_group()

    def positions(self, length: int, device: torch.device) -> Tensor:
        """The positions of this rank in sequences of ``length``, (T / C,)."""
        return positions_of(self.rank, self.size, length, device)

    def chunks(self, length: int) -> list[tuple[slice, int]]:
        """The queries of each chunk among those of this rank, and the end of its keys."""
        n = length // (2 * self.size)
        return [
            (slice(0, n), (self.rank + 1) * n),
            (slice(n, 2 * n), (2 * self.size - self.rank) * n),
        ]

    def gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B, G, T / C, D) and values of this rank to those of all T positions, in order."""
        message = torch.cat((k, v.to(k.dtype)), -1)
        ranks: Tensor = _Gather.apply(message, self.group)  # type: ignore[no-untyped-call]
        heads, tails = ranks.chunk(2, dim=3)  # (C, B, G, n, 2 D) each
        whole = torch.cat((*heads.unbind(), *reversed(tails.unbind())), dim=2)
        keys, values = torch.split(whole, [k.shape[-1], v.shape[-1]], dim=-1)
        return keys, values

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the group, in the order of the ranks; its gradient is that of ``x`` here.

        Where a loss is a function of the mean, each rank has its own term of the gradient.
        """
        gathered = x.new_empty(self.size * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.detach().contiguous(), group=self.group)
        terms = list(gathered.chunk(self.size))
        terms[self.rank] = x
        return torch.stack(terms).mean(0)


class _Gather(torch.autograd.Function):
    """The tensor of every rank of a group, one after another on a new first axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        gathered = x.new_empty(group.size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered.view(group.size(), *x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Every rank receives what the others have for it, and adds in the order of the ranks."""
        (g,) = gradients
        received = torch.empty_like(g, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, g.contiguous(), group=ctx.group)
        total = received[0].float()
        for term in received[1:]:
            total = total + term.float()
        return total.to(g.dtype), None
