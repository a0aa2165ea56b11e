"""Decoding: plain, recorded, guessed ahead and with smaller caches, against transformers.

On a GPU in bfloat16 (``graph`` replays a step of fixed shapes), on a CPU in float32 on two threads;
all in one process, in turn (harness.py). Random weights of the shape of a Llama, on a GPU one of
1.1 thousand million parameters; greedy, ``NEW`` tokens from a prompt of ``PROMPT``. Theirs has sdpa
attention and its default cache, and on a GPU also its compiled static cache.

    tokens_per_second    of all sequences together, the prompt counted
    steps_per_second     without the prompt: from the time of NEW tokens less that of one
    ratio                of whole calls to transformers' default, above 1 is faster
    cache_bytes          what keys and values take
    of_datasheet         steps a second times the bytes of the weights that a step reads, as a share
                         of the 4.8 TB/s that the maker of an H200 names; on a GPU only
    of_copy              the same as a share of the 4.3 TB/s that a copy reaches there
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import race, record
from benchmarks.train_cpu import draw, llama
from fenchel.generation import KVCache, generate
from fenchel.model import ModelConfig, Transformer

THREADS = 2
PROMPT, NEW = 32, 256
DATASHEET, COPY = 4.8e12, 4.3e12
"""Bytes a second of an H200's memory: as its maker says, and as a large copy was measured."""
SMALL = ModelConfig(vocabulary=8192, context=512, width=384, layers=6, heads=6)
LARGE = ModelConfig(
    vocabulary=32000,
    context=2048,
    width=2048,
    layers=22,
    heads=32,
    kv_heads=4,
    hidden=5632,
    tied=False,
)
Words = Callable[[int], Tensor]
"""How many new tokens, to the whole text."""


@dataclass(frozen=True)
class Place:
    """Where it runs, on what, and how our decoding is told to go."""

    device: str
    dtype: torch.dtype
    model: ModelConfig
    batches: tuple[int, ...]
    settings: tuple[dict[str, Any], ...]
    rounds: int


CPU = Place(
    "cpu",
    torch.float32,
    SMALL,
    batches=(1, 8),
    settings=({}, {"cache": "float16"}, {"cache": "int8"}, {"draft": 8}),
    rounds=7,
)
GPU = Place("cuda", torch.bfloat16, LARGE, (1,), ({"record": None}, {"record": "graph"}), rounds=3)


def ways(place: Place, model: Any, prompts: Tensor) -> dict[str, Words]:
    """Our contenders; only one sequence can be guessed ahead."""

    def words(chosen: dict[str, Any]) -> Words:
        return lambda new: generate(model, prompts, max_new_tokens=new, temperature=0.0, **chosen)

    settings = [s for s in place.settings if "draft" not in s or len(prompts) == 1]
    names = (" ".join(f"{key} {value}" for key, value in s.items()) for s in settings)
    return {name or "plain": words(s) for name, s in zip(names, settings, strict=True)}


def theirs(place: Place, model: Any, prompts: Tensor) -> dict[str, Words]:
    """transformers' contenders."""

    def words(**settings: Any) -> Words:
        return lambda new: model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            **settings,
        )

    found = {"transformers": words()}
    if place.device == "cuda":
        found["transformers static"] = words(cache_implementation="static")
    return found


def bytes_read(model: Transformer) -> int:
    """What a step reads of the weights: all but a table that serves to look up one row."""
    every = sum(p.numel() * p.element_size() for p in model.parameters())
    table = model.embed.weight
    return every if model.read is None else every - table.numel() * table.element_size()


def rows(place: Place, batch: int) -> list[dict[str, Any]]:
    """All contenders on one batch."""
    config = place.model
    ours = Transformer(config).to(place.device, place.dtype).eval()
    prompts = draw(config.vocabulary, batch, PROMPT).to(place.device)
    contenders = ways(place, ours, prompts)
    contenders |= theirs(place, llama(config).to(place.device, place.dtype).eval(), prompts)
    found, begun = (
        race({name: partial(way, new) for name, way in contenders.items()}, rounds=place.rounds)
        for new in (NEW, 1)
    )
    lines = []
    for name in contenders:
        line: dict[str, Any] = {
            "device": place.device,
            "batch": batch,
            "way": name,
            "tokens_per_second": round(batch * NEW / found.median(name)),
            "steps_per_second": round((NEW - 1) / (found.median(name) - begun.median(name))),
            "ratio": round(found.ratio(name, "transformers"), 3),
        }
        if place.device == "cuda":
            traffic = line["steps_per_second"] * bytes_read(ours)
            line["of_datasheet"] = round(traffic / DATASHEET, 3)
            line["of_copy"] = round(traffic / COPY, 3)
        if name == "plain" or name.startswith("cache"):
            cache_kind: Any = "model" if name == "plain" else name.split()[-1]
            sizes: dict[str, Any] = {"batch": batch, "positions": PROMPT + NEW, "device": "meta"}
            cache = KVCache(config, kind=cache_kind, dtype=place.dtype, **sizes)
            line["cache_bytes"] = cache.bytes
        print("  ".join(f"{key} {value}" for key, value in line.items()))
        lines.append(line)
    return lines


def main() -> None:
    """Race on the GPU where there is one, else on the CPU; write results/decode_DEVICE.json."""
    torch.set_num_threads(THREADS)
    place = GPU if torch.cuda.is_available() else CPU
    lines = [line for batch in place.batches for line in rows(place, batch)]
    record(f"decode_{place.device}", lines, ("transformers",))


if __name__ == "__main__":
    main()
