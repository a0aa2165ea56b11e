"""LoRA: low-rank adapters of the frozen linear maps of a trained model.

    W' = W + (alpha / r) B A         A (r, I) drawn, B (O, r) zero, W (O, I) frozen

A fresh adapter changes nothing, since B is zero. Only A and B learn: r (I + O) numbers instead of
I O. ``merge`` adds the product to W; the model is then as large and as fast as before.

Queries, keys and values are one map here, ``qkv``. The target "qkv" gives it one adapter; the
targets "q", "k" and "v" give the rows of each its own adapter, as three maps would have:

    W'_p = W_p + (alpha / r) B_p A_p       p in q, k, v;  W_p the rows of W that make p

Both are exact: a file that stores three maps (Llama) or one (GPT-2) holds the same numbers
(fenchel/checkpoints/peft_adapter.py).

Names of parameters: beside ``weight`` are ``lora_A`` (P r, I) and ``lora_B`` (rows, r), those of P
adapters one below the other.

Hu et al. (2021), LoRA: low-rank adaptation of large language models.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn, split
from torch.nn.functional import linear

from fenchel.model.attention import Attention
from fenchel.model.sigma_linear import SigmaLinear

QKV_PARTS = ("q", "k", "v")
"""Targets that are rows of ``qkv``, in their order there."""
TARGETS = ("qkv", *QKV_PARTS, "out", "gate", "up", "down")
"""What an adapter can be added to in every block."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The adapters of a model."""

    rank: int
    alpha: float = 16.0
    targets: tuple[str, ...] = ("qkv", "out")

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"an adapter needs rank 1 or more, got rank={self.rank}.")
        if not 0.0 < self.alpha < math.inf:
            raise ValueError(f"alpha={self.alpha} should be above 0 and finite.")
        if "qkv" in self.targets and not set(QKV_PARTS).isdisjoint(self.targets):
            raise ValueError('the target "qkv" holds "q", "k" and "v"; name it or them.')


class LoraLinear(nn.Linear):
    """A frozen linear map with an adapter of rank r, or with several on different rows."""

    def __init__(
        self,
        base: nn.Linear,
        rank: int,
        alpha: float,
        generator: torch.Generator | None,
        parts: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """``parts`` are the ranges of rows that have an adapter each; None is one for all rows."""
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.scale, self.rank = alpha / rank, rank
        self.parts = tuple(parts or ((0, base.out_features),))
        rows = sum(stop - start for start, stop in self.parts)
        wide = torch.promote_types(base.weight.dtype, torch.float32)
        self.lora_A = nn.Parameter(
            base.weight.new_empty(len(self.parts) * rank, base.in_features, dtype=wide)
        )
        self.lora_B = nn.Parameter(base.weight.new_zeros(rows, rank, dtype=wide))
        if not self.lora_A.is_meta:
            with torch.no_grad():
                self.lora_A.normal_(0.0, base.in_features**-0.5, generator=generator)
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        inner = split(linear(x, self.lora_A), self.rank, -1)
        outer = [linear(a, B) for a, (_, B) in zip(inner, self.pairs(), strict=True)]
        return linear(x, self.weight, self.bias) + self.scale * self._on_rows(outer, -1)

    @property
    def matrix(self) -> Tensor:
        """W', (O, I)."""
        return self.weight + self.scale * self._on_rows([B @ A for A, B in self.pairs()], 0)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """A (r, I) and B (rows, r) of every part."""
        rows = [stop - start for start, stop in self.parts]
        return zip(split(self.lora_A, self.rank), split(self.lora_B, rows), strict=True)

    def _on_rows(self, outputs: Sequence[Tensor], dim: int) -> Tensor:
        """The outputs of all parts at their rows along ``dim``; zeros at rows without one."""
        pieces: list[Tensor] = []
        end, like = 0, outputs[0]
        for (start, stop), output in zip(self.parts, outputs, strict=True):
            pieces += [_zeros(like, start - end, dim)] * (start > end) + [output]
            end = stop
        pieces += [_zeros(like, self.out_features - end, dim)] * (self.out_features > end)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _zeros(like: Tensor, size: int, dim: int) -> Tensor:
    shape = list(like.shape)
    shape[dim] = size
    return like.new_zeros(shape)


def add_lora(
    model: nn.Module,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Sequence[str] = ("qkv", "out"),
    generator: torch.Generator | None = None,
) -> list[str]:
    """Freeze ``model`` and add adapters to its linear maps named in ``targets``.

    "q", "k" and "v" are rows of the map ``qkv``. Returns the names of the maps. Only the adapters
    are trainable afterwards.
    """
    LoraConfig(rank=rank, alpha=alpha, targets=tuple(targets))  # raises
    parts = _qkv_rows(model, [part for part in QKV_PARTS if part in targets])
    maps = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (name in parts or name.rpartition(".")[2] in targets)
    ]
    found = {name.rpartition(".")[2] for name, _ in maps} | (set(QKV_PARTS) if parts else set())
    if missing := [target for target in targets if target not in found]:
        raise ValueError(f"no linear map of this model is called {missing[0]!r}.")
    for name, module in maps:
        if isinstance(module, LoraLinear):
            raise ValueError(f"{name} has an adapter already; merge it first.")
        if isinstance(module, SigmaLinear):
            raise ValueError(f"{name} is divided by its norm, which leaves out the adapter.")
    model.requires_grad_(requires_grad=False)
    for name, module in maps:
        _replace(model, name, LoraLinear(module, rank, alpha, generator, parts.get(name)))
    return [name for name, _ in maps]


def _qkv_rows(model: nn.Module, which: Sequence[str]) -> dict[str, list[tuple[int, int]]]:
    """The rows of those of queries, keys and values that ``which`` names, by the name of a map."""
    if not which:
        return {}
    rows = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Attention):
            if layer.l2:
                raise ValueError(
                    f"{name} scores by distance and makes queries and keys of the same rows; "
                    'name the target "qkv".'
                )
            first, ends = 0, {}
            for part, count in zip("qkv", layer.rows, strict=True):
                ends[part] = first, first + count
                first += count
            if own := [ends[part] for part in which if ends[part][1] > ends[part][0]]:
                rows[f"{name}.qkv"] = own  # a layer may have no keys or values
    return rows


@torch.no_grad()
def merge(model: nn.Module) -> list[str]:
    """Add every adapter to its weight and remove it; returns their names.

    All parameters are trainable afterwards.
    """
    maps = list(lora_layers(model))
    for name, module in maps:
        plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
        plain.weight, plain.bias = module.weight, module.bias
        plain.weight.copy_(module.matrix)  # in the dtype of the weight
        _replace(model, name, plain.train(module.training))
    model.requires_grad_(requires_grad=True)
    return [name for name, _ in maps]


def adapters(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the adapters by their names in the model, for saving.

    ``model.load_state_dict(tensors, strict=False)`` puts them back onto a model with adapters.
    """
    return {
        f"{name}.{part}": getattr(module, part).detach()
        for name, module in lora_layers(model)
        for part in ("lora_A", "lora_B")
    }


class AdapterWeights:
    """The adapters of a model as what a checkpoint holds: all that training moves."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors of ``adapters``."""
        return adapters(self.model)

    def load_state_dict(self, weights: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Set all of them."""
        assert not strict or weights.keys() == adapters(self.model).keys()
        self.model.load_state_dict(weights, strict=False)


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """The maps with adapters, by name."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
