"""LoRA: low-rank adapters beside the frozen linear maps of a trained model.

    W' = W + (alpha / r) B A         A (r, I) drawn, B (O, r) zero, W (O, I) frozen

A fresh adapter changes nothing, since B is zero. Only A and B learn: r (I + O) numbers instead of
I O. ``merge`` adds the product to W; the model is then as large and as fast as before.

Names of parameters: beside ``weight`` are ``lora_A`` and ``lora_B``.

Hu et al. (2021), LoRA: low-rank adaptation of large language models.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fenchel.model.sigma_linear import SigmaLinear


class LoraLinear(nn.Linear):
    """A frozen linear map with an adapter of rank r."""

    def __init__(
        self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator | None
    ) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.scale = alpha / rank
        self.lora_A = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.lora_B = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        with torch.no_grad():
            self.lora_A.normal_(0.0, base.in_features**-0.5, generator=generator)
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        adapter = linear(linear(x, self.lora_A), self.lora_B)
        return linear(x, self.weight, self.bias) + self.scale * adapter

    @property
    def matrix(self) -> Tensor:
        """W', (O, I)."""
        return self.weight + self.scale * self.lora_B @ self.lora_A


def add_lora(
    model: nn.Module,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Sequence[str] = ("qkv", "out"),
    generator: torch.Generator | None = None,
) -> list[str]:
    """Freeze ``model`` and add adapters to its linear maps named in ``targets``.

    Returns the names of the maps. Only the adapters are trainable afterwards.
    """
    if rank < 1:
        raise ValueError(f"an adapter needs rank 1 or more, got rank={rank}.")
    maps = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets
    ]
    if not maps:
        raise ValueError(f"no linear map of this model is called one of {tuple(targets)}.")
    for name, module in maps:
        if isinstance(module, LoraLinear):
            raise ValueError(f"{name} has an adapter already; merge it first.")
        if isinstance(module, SigmaLinear):
            raise ValueError(f"{name} is divided by its norm, which leaves out the adapter.")
    model.requires_grad_(requires_grad=False)
    for name, module in maps:
        _replace(model, name, LoraLinear(module, rank, alpha, generator))
    return [name for name, _ in maps]


@torch.no_grad()
def merge(model: nn.Module) -> list[str]:
    """Add every adapter to its weight and remove it; returns their names.

    All parameters are trainable afterwards.
    """
    maps = list(_lora_layers(model))
    for name, module in maps:
        plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
        plain.weight, plain.bias = module.weight, module.bias
        plain.weight.copy_(module.matrix)
        _replace(model, name, plain.train(module.training))
    model.requires_grad_(requires_grad=True)
    return [name for name, _ in maps]


def adapters(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the adapters by their names in the model, for saving.

    ``model.load_state_dict(tensors, strict=False)`` puts them back onto a model with adapters.
    """
    return {
        f"{name}.{part}": getattr(module, part).detach()
        for name, module in _lora_layers(model)
        for part in ("lora_A", "lora_B")
    }


def _lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
