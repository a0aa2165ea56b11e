"""What a model writes and where it looks, on the first words of a text: a picture for a report.

The maps go out as bytes, value = round(255 sqrt(p)), row-major in (layer, head, query, key):
the root keeps small weights visible in eight bits.
"""

from base64 import b64encode
from typing import Any

import torch
from tokenizers import Tokenizer

from fenchel.data import Ids, decode, end_id
from fenchel.evaluate.attention import attention_maps
from fenchel.generate import generate
from fenchel.model import Transformer

SENTENCE, PROMPT = 48, 16
"""Tokens whose attention is shown, and tokens that are continued."""


def sample(
    model: Transformer, tokenizer: Tokenizer, ids: Ids, *, seed: int, tokens: int = 160
) -> dict[str, Any]:
    """A continuation of the first ``ids``, and every head's map on them, as plain values."""
    device = model.read_weight.device
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
    data = (maps_LHTT.clamp(0, 1).sqrt() * 255).round().to(torch.uint8).cpu().numpy().tobytes()
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
            "data": b64encode(data).decode(),
        },
    }
