"""Where a model keeps its query and key weights: one Pair for each attention layer.

A head's scores are S_ij = scale <R_i n(W_Q x_i + b_Q), R_j n(W_K x_j + b_K)>, with R a rotation
by position (rotary) and n a norm of each query and key (QK-norm), where the model has them. H
heads of queries share G heads of keys (GQA), each D wide. Found by structure, not by class:

    qkv              one Linear: H D rows of queries, G D of keys, the values       fenchel
    c_attn           one Conv1D: the same as columns, H = G                         GPT-2
    q_proj, k_proj   two Linear maps; q_norm and k_norm when there are              Llama, Qwen

A bias is one more column of the weight, read against a constant input of 1. What does not fit is
refused in one sentence; ``Pair`` can be made by hand for such a layer. Attention to another
stream (the cross-attention of an encoder-decoder) is no pair, and left to other optimisers. Scores
are taken before a soft cap or a bias of positions.

What the pairs leave of a model's parameters, for another optimiser.

A fused weight holds rows of queries, keys and values. The values' rows become a leaf of their own
that lies in the same memory: moving the leaf moves the rows. Just before the other optimiser
steps, each leaf is handed the rows of the gradient that belong to it.

    pairs = attention_pairs(model)
    leaves = leftover(pairs, model.parameters())
    muon = Muon([leaf.part for leaf in leaves if leaf.part.ndim == 2])
    hand_over(muon, leaves)

Leaves point into memory, so they are made after the model is where it will stay.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fenchel.attention import Causal, Window


@dataclass(frozen=True, eq=False)
class HeadProjection:
    """The rows of a linear map that make ``heads`` queries or keys, with their biases."""

    weight: Tensor
    """An nn.Parameter, like the bias."""
    start: int
    stop: int
    heads: int
    bias: Tensor | None = None
    columns: bool = False
    """The weight is (in, out) as in GPT-2's Conv1D instead of (out, in)."""

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The weight, and the bias where there is one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def values(self) -> Tensor:
        """A copy, (heads, D, M), or (heads, D, M + 1) with a bias; float32 or better."""
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.detach()
        return self.cut(self.weight.detach(), bias).to(exact, copy=True)

    def gradient(self) -> Tensor | None:
        """The gradient, shaped as ``values``; None where a parameter has none."""
        if self.weight.grad is None or (self.bias is not None and self.bias.grad is None):
            return None
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        return self.cut(self.weight.grad, None if self.bias is None else self.bias.grad).to(exact)

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Put values of that shape in the place of the rows."""
        self.put(values, self.weight, self.bias)

    def cut(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Ours of a weight and bias like these, (..., heads, D, M); a view without a bias.

        Axes before those of the parameters are kept: layers, in a stack of them.
        """
        at = slice(self.start, self.stop)
        rows = weight[..., at].mT if self.columns else weight[..., at, :]
        if bias is not None:
            rows = torch.cat((rows, bias[..., at, None]), dim=-1)
        return torch.unflatten(rows, -2, (self.heads, -1))

    def put(self, values: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Values shaped as ``cut`` gives them, into the weight and bias."""
        flat, at = values.flatten(-3, -2), slice(self.start, self.stop)
        if bias is not None:
            bias[..., at] = flat[..., -1]
            flat = flat[..., :-1]
        if self.columns:
            weight[..., at] = flat.mT
        else:
            weight[..., at, :] = flat


@dataclass(frozen=True, eq=False)
class QueryKeyPair:
    """The query and key weights of one attention layer, and what lies between them and scores."""

    name: str
    """The layer's path in the model."""
    module: nn.Module
    """Its first input (B, T, M) is what the weights read; its forward pass is watched."""
    query: HeadProjection
    key: HeadProjection
    scale: float
    """Factor on q . k: RMS scores and steps in the optimisers are those the softmax sees."""
    q_norm: nn.Module | None = None
    k_norm: nn.Module | None = None
    causal: bool = True
    window: int | None = None
    """A query sees keys less than so many positions away; None is all."""
    layout: str = "half"
    """Which entries a rotation pairs, as in fenchel.attention.rotate."""

    def __post_init__(self) -> None:
        if self.query.heads % self.key.heads:
            raise ValueError(
                f"{self.name} has {self.query.heads} heads of queries and {self.key.heads} of "
                "keys; the second should divide the first."
            )
        trained = [p.requires_grad for p in self.parameters]
        if any(trained) and not all(trained):
            raise ValueError(
                f"{self.name} trains only some of its query and key weights and biases; "
                "freeze all of them or none."
            )

    @cached_property
    def parameters(self) -> list[Tensor]:
        """Weights and biases, each once; a fused one holds the values too."""
        found = (*self.query.parameters, *self.key.parameters)
        return list(dict.fromkeys(found))

    @property
    def trained(self) -> bool:
        """Whether anything here may move."""
        return self.query.weight.requires_grad


def attention_pairs(model: nn.Module) -> list[QueryKeyPair]:
    """The query/key weights of every attention layer of ``model``, first layer first."""
    pairs = list(_pairs_of(model))
    if not pairs:
        raise ValueError(
            f"no query and key weights were found in {type(model).__name__}: known are modules "
            "with qkv (fenchel), c_attn (GPT-2) or q_proj and k_proj (Llama, Qwen); make a Pair "
            "by hand for others."
        )
    return pairs


def _pairs_of(model: nn.Module) -> Iterator[QueryKeyPair]:
    for name, module in model.named_modules():
        if why := _refusal(module):
            raise ValueError(f"{name or type(module).__name__} cannot be paired: {why}.")
        if hasattr(module, "qkv") and hasattr(module, "head_width"):
            yield _fenchel(name, module)
        elif hasattr(module, "c_attn") and hasattr(module, "num_heads"):
            yield _gpt2(name, module)
        elif hasattr(module, "q_proj") and hasattr(module, "k_proj"):
            yield _llama(name, module)


def _refusal(module: nn.Module) -> str | None:
    """What about an attention layer is not handled; None for everything else."""
    if hasattr(module, "query_key_value"):
        return "its query_key_value mixes the rows of queries, keys and values head by head"
    if hasattr(module, "kv_a_proj_with_mqa") or hasattr(module, "kv_b_proj"):
        return "its keys are made from a latent vector (MLA) and not from the stream"
    if getattr(module, "is_cross_attention", False):
        return "its queries and keys read two different streams (cross-attention)"
    for name in ("qkv", "q_proj", "k_proj"):
        linear = getattr(module, name, None)
        if isinstance(linear, nn.Module) and not _is_plain_linear(linear):
            return f"its {name} is not a plain linear map ({type(linear).__name__})"
    if getattr(module, "l2", False):
        return "its scores are not products of queries and keys"
    return None


def _is_plain_linear(linear: nn.Module) -> bool:
    """A Linear whose weight is what it multiplies by: no adapter, quantisation or gain."""
    if not isinstance(linear, nn.Linear) or hasattr(linear, "gain"):
        return False
    return linear.weight.is_floating_point()


def _fenchel(name: str, module: nn.Module) -> QueryKeyPair:
    H, G, D = (int(getattr(module, size)) for size in ("heads", "groups", "head_width"))
    qkv, shape = module.qkv, getattr(module, "mask", Causal())
    assert isinstance(qkv, nn.Linear)
    if qkv.out_features != (H + 2 * G) * D:
        raise ValueError(
            f"{name}.qkv has {qkv.out_features} rows where {H} heads of queries and {G} of keys "
            f"and values, {D} wide, make {(H + 2 * G) * D}."
        )
    return _pair(
        name,
        module,
        HeadProjection(qkv.weight, 0, H * D, H, qkv.bias),
        HeadProjection(qkv.weight, H * D, (H + G) * D, G, qkv.bias),
        scale=getattr(module, "scale", None),
        causal=isinstance(shape, Causal) or (isinstance(shape, Window) and shape.right == 0),
        window=shape.left + 1 if isinstance(shape, Window) and shape.left is not None else None,
        layout=getattr(module, "rotary_layout", "half"),
    )


def _gpt2(name: str, module: nn.Module) -> QueryKeyPair:
    H, M = int(module.num_heads), int(module.split_size)  # type: ignore[arg-type]
    weight, bias = module.c_attn.weight, module.c_attn.bias  # type: ignore[union-attr]
    assert isinstance(weight, nn.Parameter)
    assert isinstance(bias, nn.Parameter)
    return _pair(
        name,
        module,
        HeadProjection(weight, 0, M, H, bias, columns=True),
        HeadProjection(weight, M, 2 * M, H, bias, columns=True),
        scale=module.scaling,
        causal=True,
    )


def _llama(name: str, module: nn.Module) -> QueryKeyPair:
    q, k = module.q_proj, module.k_proj
    assert isinstance(q, nn.Linear)
    assert isinstance(k, nn.Linear)
    D = getattr(module, "head_dim", None)
    if not isinstance(D, int) or q.out_features % D or k.out_features % D:
        raise ValueError(
            f"{name} does not say the width of its heads: head_dim={D} should divide the "
            f"{q.out_features} rows of q_proj and the {k.out_features} of k_proj."
        )
    return _pair(
        name,
        module,
        HeadProjection(q.weight, 0, q.out_features, q.out_features // D, q.bias),
        HeadProjection(k.weight, 0, k.out_features, k.out_features // D, k.bias),
        scale=getattr(module, "scaling", None),
        causal=getattr(module, "is_causal", True),
        window=getattr(module, "sliding_window", None),
    )


def _pair(
    name: str,
    module: nn.Module,
    query: HeadProjection,
    key: HeadProjection,
    *,
    scale: object,
    causal: object,
    window: object = None,
    layout: object = "half",
) -> QueryKeyPair:
    D = (query.stop - query.start) // query.heads
    norms = [getattr(module, which, None) for which in ("q_norm", "k_norm")]
    for norm in norms:
        gain = getattr(norm, "weight", None)
        if isinstance(gain, Tensor) and gain.shape != (D,):
            raise ValueError(
                f"{name} cannot be paired: its norm of queries and keys reaches over "
                f"{tuple(gain.shape)}, not over the {D} entries of one head."
            )
    return QueryKeyPair(
        name,
        module,
        query,
        key,
        scale=float(scale) if isinstance(scale, int | float) else D**-0.5,
        q_norm=norms[0],
        k_norm=norms[1],
        causal=bool(causal),
        window=window if isinstance(window, int) and window > 0 else None,
        layout=str(layout),
    )


class ParameterSlice(NamedTuple):
    """A parameter, or those of its rows that no pair moves."""

    part: nn.Parameter
    whole: nn.Parameter
    cut: tuple[slice, ...] | None
    """Where the part lies in the whole; None when it is all of it."""


def remaining_parameters(
    pairs: Iterable[QueryKeyPair], parameters: Iterable[nn.Parameter]
) -> list[ParameterSlice]:
    """The parameters without the rows of the pairs, in order; what is all theirs is left out."""
    taken: dict[Tensor, list[tuple[int, int, int]]] = defaultdict(list)
    for pair in pairs:
        for rows in (pair.query, pair.key):
            taken[rows.weight].append((rows.start, rows.stop, int(rows.columns)))
            if rows.bias is not None:
                taken[rows.bias].append((rows.start, rows.stop, 0))
    return [leaf for p in parameters for leaf in _slices_of(p, taken.get(p, []))]


def pass_gradients(optimiser: torch.optim.Optimizer, leaves: Iterable[ParameterSlice]) -> None:
    """Give every leaf that ``optimiser`` moves its gradient, whenever it is about to step."""
    held = {p for group in optimiser.param_groups for p in group["params"]}
    parts = [leaf for leaf in leaves if leaf.cut is not None and leaf.part in held]

    def give(*_: Any) -> None:
        for part, whole, cut in parts:
            part.grad = None if whole.grad is None else whole.grad[cut]

    if parts:
        optimiser.register_step_pre_hook(give)


def _slices_of(p: nn.Parameter, taken: list[tuple[int, int, int]]) -> list[ParameterSlice]:
    if not taken:
        return [ParameterSlice(p, p, None)]
    axis = taken[0][2]
    edges, begin = [], 0
    for start, stop, _ in [*sorted(taken), (p.shape[axis], p.shape[axis], axis)]:
        if start > begin:
            edges.append((begin, start))
        begin = max(begin, stop)
    cuts = [(*(slice(None),) * axis, slice(start, stop)) for start, stop in edges]
    return [ParameterSlice(nn.Parameter(p.detach()[cut], p.requires_grad), p, cut) for cut in cuts]
