"""Prompt ids to longer ids, one token at a time.

The prompt is read once; every later step reads one token against the cache. When the model's
context is full, the newest half of it is read again into an empty cache and decoding goes on:
text of any length comes out, each token with at least half a context behind it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fenchel.generate.cache import KeyValueCache
from fenchel.generate.sample import Sampling, sample
from fenchel.model import Transformer, evaluating


def generate(
    model: Transformer,
    ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> Tensor:
    """Prompts (B, T) to prompts with their continuations (B, T + up to ``max_new_tokens``).

    A sequence that drew a ``stop`` id repeats it until all sequences have stopped.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    drawn = list(
        stream(
            model,
            ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
            generator=generator,
        )
    )
    return torch.cat([ids, *(token_B.unsqueeze(-1) for token_B in drawn)], dim=-1)


@torch.inference_mode()
def stream(
    model: Transformer,
    ids: Tensor,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """The new tokens as they are drawn, (B,) each."""
    if ids.ndim != 2 or ids.shape[1] < 1:
        raise ValueError(f"ids should be (B, T) with T at least 1, got {tuple(ids.shape)}.")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} should not be negative.")
    with evaluating(model):
        yield from _decode(model, ids, max_new_tokens, sampling, stop, generator)


def _decode(
    model: Transformer,
    ids: Tensor,
    count: int,
    sampling: Sampling,
    stop: Sequence[int],
    generator: torch.Generator | None,
) -> Iterator[Tensor]:
    context = model.config.context
    room = min(context, ids.shape[1] + count)
    table = model.read_weight
    cache = KeyValueCache(
        model.config, batch=ids.shape[0], positions=room, dtype=table.dtype, device=table.device
    )
    stops = torch.tensor(list(stop), dtype=ids.dtype, device=ids.device)
    stopped_B = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    unread, drawn = ids[:, -context:], [ids]
    for _ in range(count):
        if cache.length + unread.shape[1] > room:
            cache.clear()
            drawn = [torch.cat(drawn, dim=-1)[:, -context:]]
            unread = drawn[0][:, -max(1, context // 2) :]
        logits_BV = model(unread, cache=cache, last=True)[:, -1]
        token_B = sample(logits_BV, sampling, generator=generator).to(ids.dtype)
        if len(stops):
            token_B = torch.where(stopped_B, unread[:, -1], token_B)
            stopped_B = stopped_B | torch.isin(token_B, stops)
        yield token_B
        if len(stops) and bool(stopped_B.all()):
            return
        unread = token_B.unsqueeze(-1)
        drawn.append(unread)
