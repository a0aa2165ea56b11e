"""train.lipschitz: a run whose model has a certified Lipschitz constant L from its first step on.

No logit moves by more than L times the largest move of a token's embedding, for all texts of any
length (fenchel/sensitivity/token_lipschitz.py). After every step the weights are scaled back to

    longest row of the LM head     <= L / (P g),        P = sqrt(1 + L), g the gain of the last norm
    gain of every branch           <= (P^(1 / 2 layers) - 1) / a,       a the factor on the branch

so that the constant, the product g |row| prod (1 + a gain), is at most L. Rows of the LM head are
shortened one by one. In a branch whose gain is K times its limit, the singular values of every
matrix are first cut at K^-1/2 of the largest, which leaves the others what they have learnt. If
that is not enough, since a gain is made of norms of products, all matrices are multiplied by the
K^-1/2 of what is left: a gain is a product of at least two of them, and a sum of such products in
attention, so it falls at least by K. Weights below their limits are not touched, to the bit, and
the limits are functions of the weights alone, so a resumed run repeats the bits of one that was
not interrupted.

A constant has a meaning only beside the size of what it multiplies. Embeddings are therefore held
to the length sqrt(M), that of a token behind a norm layer, M the width of the stream.

``default_settings`` are those that a model of such a run has unless they are given. epsilon = 1
makes the norm layers 1-Lipschitz, at the price that they no longer remove the size of their input.
A learned bias of distances (T5) in place of rotations has no derivative in the tokens: attention
may be as sharp over distances as it likes, at no cost. Heads begin at one distance each, and with
small queries and keys, since scores by content multiply the cost of the values.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fenchel.inspection import certify_constant
from fenchel.inspection.certificates import mlp_layer, norm_layer, projections
from fenchel.model import ModelConfig, Transformer
from fenchel.model.attention import Attention
from fenchel.model.block import Block
from fenchel.model.mlp import Mlp
from fenchel.optim.config import split_matrices
from fenchel.sensitivity.layers import Chain, NormLayer, SelfAttention
from fenchel.sensitivity.token_lipschitz import token_bound
from fenchel.train import TrainConfig

REQUIRED: dict[str, tuple[Any, ...]] = {
    "mlp": ("relu", "gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh"),
    "norm_place": ("pre",),
    "positions": ("rotary", "learned", "sinusoidal", "alibi", "buckets", "none"),
    "rotary_scaling": (None,),
    "choice": ("softmax",),
    "layer_choices": ((),),
    "beta": (1.0,),
    "scores": ("dot",),
    "temperature": ("none",),
    "gate": ("none",),
    "delta_layers": ((),),
    "experts": (0,),
    "shared_kv_layers": (0,),
    "per_layer_width": (0,),
    "embedding_width": (None,),
    "distinct_layers": (None,),
    "softcap": (None,),
    "logit_softcap": (None,),
    **dict.fromkeys(("first_norm", "final_norm", "lm_head"), (True,)),
    **dict.fromkeys(
        (
            *("tied", "parallel", "qk_norm", "value_norm", "sinks", "sigma_reparam"),
            *("keys_as_values", "layer_scale", "embedding_norm", "lm_head_transform"),
            "norm_plus_one",
        ),
        (False,),
    ),
}
"""Settings of a model, and the values for which its constant is known."""
_MARGIN = 1e-4
"""By how much weights are scaled further than to their limit: beyond the rounding of float32."""
_TOKENS = 16
"""Tokens that are attacked."""


def default_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a model with a certified constant, beside those that are given.

    >>> default_settings({"width": 64, "positions": "rotary"})["score_scale"]
    0.015625
    """
    width = given.get("width", ModelConfig.width)
    known: dict[str, Any] = {
        "epsilon": 1.0,
        "norm_parameters": "none",
        "mlp": "gelu",
        "tied": False,
        "residual_scale": "depth",
        "positions": "buckets",
        "heads": math.gcd(4, width),
        "score_scale": 1.0 / width,
        "embedding_scale": 3.0,
    }
    if given.get("positions", "buckets") == "buckets":
        known |= {"initial_distances": True, "initial_qk": 0.1}
    return {**known, **given}


def require_known_constant(config: ModelConfig) -> None:
    """Refuse a model whose Lipschitz constant is not known."""
    for name, values in REQUIRED.items():
        if (value := getattr(config, name)) not in values:
            known = " or ".join(map(repr, values))
            raise ValueError(
                f"train.lipschitz has no Lipschitz constant for model.{name}={value!r}; "
                f"it needs {known}."
            )


class Branch(NamedTuple):
    """A residual branch as a layer, and the matrices that its gain is a product of."""

    layer: Chain
    matrices: tuple[Tensor, ...]


def projection(model: nn.Module, train: TrainConfig) -> Callable[[], None] | None:
    """What holds a model to train.lipschitz or train.spectral_cap; None without a limit."""
    if train.lipschitz is None and train.spectral_cap is None:
        return None
    assert isinstance(model, Transformer)
    if train.lipschitz is not None:
        return LipschitzCap(model, train.lipschitz)
    assert train.spectral_cap is not None
    return SpectralCap(model, train.spectral_cap)


class SpectralCap:
    """Holds every matrix of the blocks to a largest singular value of at most ``limit``.

    Queries, keys and values are three matrices.
    """

    def __init__(self, model: Transformer, limit: float) -> None:
        fused = {
            id(module.qkv.weight): module.rows
            for module in model.modules()
            if isinstance(module, Attention)
        }
        self.limit = limit
        self.matrices = [
            part
            for weight in split_matrices(model)[0]
            for part in torch.split(
                weight.detach(), fused.get(id(weight), weight.shape[-2]), dim=-2
            )
            if part.numel()
        ]

    @torch.no_grad()
    def __call__(self) -> None:
        """Reduce the singular values that are above the limit to it."""
        for matrix in self.matrices:
            cap_singular_values_(matrix, self.limit)


@torch.no_grad()
def cap_singular_values_(matrix: Tensor, limit: float) -> None:
    """Replace every singular value s by min(s, limit): (..., R, C); others keep their bits.

    >>> W = torch.diag(torch.tensor([5.0, 2.0]))
    >>> cap_singular_values_(W, 3.0)
    >>> W.diagonal()
    tensor([2.9997, 2.0000])
    """
    if not bool((matrix.norm(dim=(-2, -1)) > limit).any()):
        return
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    tall = matrix.shape[-2] > matrix.shape[-1]
    squares, vectors = torch.linalg.eigh(wide.mT @ wide if tall else wide @ wide.mT)
    size = squares.clamp(min=0.0).sqrt()
    if not bool((size > limit).any()):
        return
    factor = torch.where(size > limit, (1.0 - _MARGIN) * limit / size, 1.0)
    scale = (vectors * factor.unsqueeze(-2)) @ vectors.mT
    matrix.copy_(wide @ scale if tall else scale @ wide)


class LipschitzCap:
    """Holds a model to the constant ``limit``; called after every step, and once before them."""

    def __init__(self, model: Transformer, limit: float) -> None:
        require_known_constant(model.config)
        self.model, config = model, model.config
        share = math.sqrt(1.0 + limit)
        growth = share ** (1.0 / (2 * config.layers)) - 1.0
        self.branch_limit: float = growth / config.branch_scale
        self.head_limit = limit / share
        self.longest_embedding = math.sqrt(config.width) / config.embedding_scale

    @torch.no_grad()
    def __call__(self) -> None:
        """Scale the weights back to their limits."""
        model, M = self.model, self.model.config.width
        for branch in branches(model):
            if (excess := self._excess(branch)) > 1.0:
                for matrix in branch.matrices:
                    largest = float(torch.linalg.matrix_norm(matrix, 2))
                    cap_singular_values_(matrix, largest * excess**-0.5)
                if (rest := self._excess(branch)) > 1.0:
                    for matrix in branch.matrices:
                        matrix.mul_((1.0 - _MARGIN) * rest**-0.5)
        gain = float(token_bound(_last_norm(model), M).gain)
        shorten_rows_(model.lm_head_weight, self.head_limit / gain / model.config.logit_scale)
        shorten_rows_(model.embed.weight, self.longest_embedding)

    def _excess(self, branch: "Branch") -> float:
        return float(token_bound(branch.layer, self.model.config.width).gain) / self.branch_limit


@torch.no_grad()
def shorten_rows_(matrix: Tensor, longest: float) -> None:
    """Scale the rows that are longer than ``longest`` down to it; others keep their bits.

    >>> W = torch.tensor([[3.0, 4.0], [0.6, 0.8]])
    >>> shorten_rows_(W, 2.0)
    >>> W.norm(dim=1)
    tensor([1.9998, 1.0000])
    """
    size = matrix.double().norm(dim=-1, keepdim=True)
    factor = torch.where(size > longest, (1.0 - _MARGIN) * longest / size, 1.0)
    matrix.mul_(factor.to(matrix.dtype))


def branches(model: Transformer) -> Iterator[Branch]:
    """Attention and MLP of every block, in order."""
    dtype = model.lm_head_weight.dtype
    for block in model.blocks:
        assert isinstance(block, Block)
        attention, mlp = block.attention, block.mlp
        assert isinstance(attention, Attention)  # by REQUIRED
        assert isinstance(mlp, Mlp)
        assert block.attention_norm is not None
        assert block.mlp_norm is not None
        matrices, biases = projections(attention, dtype)
        W_O, norm = attention.out.weight.mT, norm_layer(block.attention_norm, dtype)
        # a rotation by any angle has norm 1; that there is one is all that a constant depends on
        identity = torch.eye(attention.head_width, dtype=dtype, device=W_O.device)[None]
        layer = SelfAttention(
            *matrices,
            W_O,
            scale=attention.scale,
            biases=biases,
            rotations=identity if attention.rotates else None,
        )
        parts = torch.split_with_sizes(attention.qkv.weight.detach(), attention.rows)
        yield Branch(Chain((norm, layer)), (*parts, attention.out.weight.detach()))
        maps = (mlp.up, mlp.down) if mlp.gate is None else (mlp.gate, mlp.up, mlp.down)
        yield Branch(
            Chain((norm_layer(block.mlp_norm, dtype), *mlp_layer(mlp, dtype).layers)),
            tuple(part.weight.detach() for part in maps),
        )


def _last_norm(model: Transformer) -> NormLayer:
    assert model.norm is not None  # by REQUIRED
    return norm_layer(model.norm, model.lm_head_weight.dtype)


def measure_constant(model: Transformer, ids: np.ndarray, limit: float) -> dict[str, float]:
    """The limit of a run, the certified constant, and the largest stretch that was found.

    The attack begins at the embeddings of the first ids, in float64 on the CPU.
    """
    wide = copy.deepcopy(model).cpu().double().eval()
    text = torch.from_numpy(np.asarray(ids[:_TOKENS], dtype=np.int64))
    return {"limit": limit, **certify_constant(wide, text)._asdict()}
