"""Attention of a model on given ids: health per layer and head, maps, and a sample for the report.

The fused attention kernels of the forward pass do not return their weights. The call of every layer
is therefore recorded (queries, keys, choice map, prior, scale, soft cap and sink), and the
statistics and maps are computed from the recorded calls.

Shapes: ids (B, T); maps (layers, H, T, T), where row t holds the weights of query t.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fenchel.attention import HeadHealth, Health, attend, health_per_head
from fenchel.attention.spec import AttentionCall
from fenchel.attention.statistics import pack_weights
from fenchel.data import Ids, TextTokenizer
from fenchel.generation import generate
from fenchel.model import Transformer, evaluating
from fenchel.sensitivity import attention_jacobian, spectral_norm
from fenchel.torch_internals import off_mps


@torch.no_grad()
def attention_health(model: Transformer, ids_BT: Tensor) -> dict[str, list[Any]]:
    """Health of the attention: per name one number per layer, under head_ one list per layer.

    The names are "attention/" followed by the fields of ``Health``, and "attention/head_" followed
    by those of ``HeadHealth``.
    """
    layers = [
        health_per_head(call.q, call.k, **call.spec) for call in attention_calls(model, ids_BT)
    ]
    return {
        f"attention/{name}": [getattr(layer, name) for layer, _ in layers]
        for name in Health._fields
    } | {
        f"attention/head_{name}": [getattr(heads, name) for _, heads in layers]
        for name in HeadHealth._fields
    }


@torch.no_grad()
def attention_maps(model: Transformer, ids_1T: Tensor) -> Tensor:
    """Attention weights of every head on one sequence: (1, T) -> (layers, H, T, T)."""
    B, T = ids_1T.shape
    if B != 1:
        raise ValueError(f"attention maps need one sequence, got {B}.")
    maps = [
        # A sink is the first key; the T tokens are the last.
        attend(call.q, call.k, call.v, **call.spec, return_weights=True)[1][0, ..., -T:]
        for call in attention_calls(model, ids_1T)
    ]
    return torch.stack(maps)


def attention_calls(model: Transformer, ids_BT: Tensor) -> list[AttentionCall]:
    """The call of ``attend`` of every layer, in a pass over some ids."""
    calls: list[AttentionCall] = []

    def record(_layer: int, call: AttentionCall) -> None:
        calls.append(call)

    with evaluating(model):
        model(ids_BT, attention_override=record, last=True, return_hidden=True)
    return calls


def attention_sensitivity(model: Transformer, ids_1T: Tensor) -> list[tuple[float, float]]:
    """The spectral norm of every layer's attention in its queries, keys and values, bracketed.

    (1, T) -> per layer a lower end that is attained and an upper one that is exceeded with
    probability 1e-6; that of a layer is the largest of its heads. Layers whose weights do not sum
    to 1, and those without attention, are left out.

    >>> from fenchel.model import ModelConfig
    >>> model = Transformer(ModelConfig(vocabulary=9, context=8, width=8, heads=1, layers=1))
    >>> [(lower, upper)] = attention_sensitivity(model, torch.tensor([[1, 2, 3]]))
    >>> 0 < lower <= upper < 1.1 * lower
    True
    """
    generator = torch.Generator().manual_seed(0)
    norms = []
    for call in attention_calls(model, ids_1T):
        if call.spec.choice.feasible == "box":
            continue
        q, k, v = (off_mps(x.detach().float()) for x in (call.q, call.k, call.v))
        spec = call.spec.with_tensors([off_mps(x) for x in call.spec.tensors()])
        J = attention_jacobian(q, k, v, **spec)
        bracket = spectral_norm(J, tol=0.02, generator=generator)
        norms.append((float(bracket.lower.max()), float(bracket.upper.max())))
    return norms


SENTENCE, PROMPT = 48, 16
"""Tokens of the attention maps, and tokens of the prompt."""


def sample(
    model: Transformer,
    tokenizer: TextTokenizer,
    ids: Ids,
    *,
    seed: int,
    tokens: int = 160,
    temperature: float = 0.8,
    prompt: int = PROMPT,
    stop: Sequence[int] | None = None,
) -> dict[str, Any]:
    """A generated continuation of the first ``ids`` and the attention maps on them, for a report.

    ``prompt`` of the ids are continued until one of ``stop``, by default the end token. The values
    are plain (JSON); the maps are packed by ``pack_weights``.
    """
    device = model.lm_head_weight.device
    shown = torch.from_numpy(ids[: min(SENTENCE, model.config.context)].astype("int64")).to(device)
    given = torch.from_numpy(ids[:prompt].astype("int64")).to(device)
    words = shown.tolist()
    drawn = generate(
        model,
        given[None],
        max_new_tokens=tokens,
        temperature=temperature,
        top_p=0.95,
        stop=[tokenizer.end_id] if stop is None else stop,
        seed=seed,
    )[0]
    maps_LHTT = attention_maps(model, shown[None])
    return {
        "prompt": tokenizer.decode(given.tolist()),
        "text": tokenizer.decode(drawn[len(given) :].tolist()),
        "sentence": tokenizer.decode(words),
        "tokens": [tokenizer.decode([i]) for i in words],
        "attention": {
            "layers": maps_LHTT.shape[0],
            "heads": maps_LHTT.shape[1],
            "size": len(words),
            "scale": "sqrt",
            "data": pack_weights(maps_LHTT),
        },
    }
