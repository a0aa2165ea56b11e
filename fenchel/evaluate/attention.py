"""What a model's attention looks like on some ids: its health in numbers, its maps.

The model attends by a fused kernel that keeps no weights, so its queries and keys are taken as
it reads (``observe``), and what each layer asks of ``attend`` with them (its map, prior, scale, cap
and sink) is computed beside it for these few sequences.

Shapes: ids (B, T); maps (layers, H, T, T), row t the weights of query t.

What a model writes and where it looks, on the first words of a text: a picture for a report.

The maps go out as bytes, value = round(255 sqrt(p)), row-major in (layer, head, query, key):
the root keeps small weights visible in eight bits.
"""

from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from fenchel.attention import HeadHealth, Health, attend, health_per_head, pack_weights
from fenchel.attention.spec import AttentionCall
from fenchel.data import Ids, decode, end_id
from fenchel.generation import generate
from fenchel.model import Transformer, evaluating


@torch.no_grad()
def attention_health(model: Transformer, ids_BT: Tensor) -> dict[str, list[Any]]:
    """The numbers of fenchel/attention/measure.py: one a layer, and under head_ a list a layer."""
    found = [
        health_per_head(
            call.q,
            call.k,
            **call.spec,
        )
        for call in attention_calls(model, ids_BT)
    ]
    told = {f"attention/{name}": [getattr(h, name) for h, _ in found] for name in Health._fields}
    heads = {name: [getattr(h, name) for _, h in found] for name in HeadHealth._fields}
    return told | {f"attention/head_{name}": values for name, values in heads.items()}


@torch.no_grad()
def attention_maps(model: Transformer, ids_1T: Tensor) -> Tensor:
    """Every head's weights on one sequence: (1, T) -> (layers, H, T, T)."""
    B, T = ids_1T.shape
    if B != 1:
        raise ValueError(f"maps are drawn of one sequence at a time, got {B}.")
    maps = [
        # A sink is the first key; the T tokens are the last.
        attend(call.q, call.k, call.v, **call.spec, return_weights=True)[1][0, ..., -T:]
        for call in attention_calls(model, ids_1T)
    ]
    return torch.stack(maps)


def attention_calls(model: Transformer, ids_BT: Tensor) -> list[AttentionCall]:
    """The call of ``attend`` of every layer, in a pass over some ids."""
    calls: list[AttentionCall] = []

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        calls.append(model.attention_call(layer, q, k, v))

    with evaluating(model):
        model(ids_BT, observe=observe, last=True)
    return calls


SENTENCE, PROMPT = 48, 16
"""Tokens whose attention is shown, and tokens that are continued."""


def sample(
    model: Transformer, tokenizer: Tokenizer, ids: Ids, *, seed: int, tokens: int = 160
) -> dict[str, Any]:
    """A continuation of the first ``ids``, and every head's map on them, as plain values."""
    device = model.lm_head_weight.device
    shown = torch.from_numpy(ids[: min(SENTENCE, model.config.context)].astype("int64")).to(device)
    prompt, words = shown[:PROMPT], shown.tolist()
    drawn = generate(
        model,
        prompt[None],
        max_new_tokens=tokens,
        temperature=0.8,
        top_p=0.95,
        stop=[end_id(tokenizer)],
        generator=torch.Generator(device).manual_seed(seed),
    )[0]
    maps_LHTT = attention_maps(model, shown[None])
    return {
        "prompt": decode(tokenizer, prompt.tolist()),
        "text": decode(tokenizer, drawn[len(prompt) :].tolist()),
        "sentence": decode(tokenizer, words),
        "tokens": [decode(tokenizer, [i]) for i in words],
        "attention": {
            "layers": maps_LHTT.shape[0],
            "heads": maps_LHTT.shape[1],
            "size": len(words),
            "scale": "sqrt",
            "data": pack_weights(maps_LHTT),
        },
    }
