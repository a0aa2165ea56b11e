"""Low-rank adapters: a trained model learns something new in few numbers, and forgets nothing.

    W' = W + (a / r) B A         A (r, I) drawn, B (O, r) zero, W (O, I) stays as it is

A fresh adapter changes nothing, since B is zero. Only A and B learn: r (I + O) numbers instead of
I O. ``merge`` adds the product to W for good; the model is then as large and as quick as before.

Names of parameters: beside ``weight`` stand ``narrow`` (A) and ``widen`` (B).

Hu et al. (2021), LoRA: low-rank adaptation of large language models.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fenchel.model.sigma_linear import SigmaLinear


class Adapted(nn.Linear):
    """A linear map with an adapter of rank ``r`` beside it; its own weight is frozen."""

    def __init__(
        self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator | None
    ) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight, self.bias = base.weight, base.bias
        like = base.weight
        self.scale = alpha / rank
        self.narrow = nn.Parameter(like.new_empty(rank, base.in_features))
        self.widen = nn.Parameter(like.new_zeros(base.out_features, rank))
        with torch.no_grad():
            self.narrow.normal_(0.0, base.in_features**-0.5, generator=generator)
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O): two thin products beside the wide one."""
        beside = linear(linear(x, self.narrow), self.widen)
        return linear(x, self.weight, self.bias) + self.scale * beside

    @property
    def matrix(self) -> Tensor:
        """W', (O, I)."""
        return self.weight + self.scale * self.widen @ self.narrow


def adapt(
    model: nn.Module,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Sequence[str] = ("qkv", "out"),
    generator: torch.Generator | None = None,
) -> list[str]:
    """Freeze ``model`` and put adapters on its linear maps called one of ``targets``.

    Gives the names of the maps. All of ``model`` but the adapters stops learning.
    """
    if rank < 1:
        raise ValueError(f"an adapter needs rank 1 or more, got rank={rank}.")
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets
    ]
    if not found:
        raise ValueError(f"no linear map of this model is called one of {tuple(targets)}.")
    for name, module in found:
        if isinstance(module, Adapted):
            raise ValueError(f"{name} has an adapter already; merge it first.")
        if isinstance(module, SigmaLinear):
            raise ValueError(f"{name} is divided by its norm, which an adapter would not see.")
    model.requires_grad_(requires_grad=False)
    for name, module in found:
        _replace(model, name, Adapted(module, rank, alpha, generator))
    return [name for name, _ in found]


@torch.no_grad()
def merge(model: nn.Module) -> list[str]:
    """Add every adapter to the weight it stands beside and take it away; gives their names.

    What is left learns again as a whole.
    """
    found = list(_adapted(model))
    for name, module in found:
        plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
        plain.weight, plain.bias = module.weight, module.bias
        plain.weight.copy_(module.matrix)
        _replace(model, name, plain.train(module.training))
    model.requires_grad_(requires_grad=True)
    return [name for name, _ in found]


def adapters(model: nn.Module) -> dict[str, Tensor]:
    """The adapters alone, by the names they have in the model: what is worth keeping of it.

    ``model.load_state_dict(kept, strict=False)`` puts them back onto an adapted model.
    """
    return {
        f"{name}.{part}": getattr(module, part).detach()
        for name, module in _adapted(model)
        for part in ("narrow", "widen")
    }


def _adapted(model: nn.Module) -> Iterator[tuple[str, Adapted]]:
    for name, module in model.named_modules():
        if isinstance(module, Adapted):
            yield name, module


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
