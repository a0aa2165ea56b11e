"""Decoding against transformers: by kinds of steps, speculative, with smaller caches.

On a GPU in bfloat16 (``fused`` replays a recorded step of fixed shapes), on a CPU in float32 on two
threads; all in one process, in turn (harness.py). Random weights of the shape of a Llama, on a GPU
one of 1.1 thousand million parameters; greedy, ``NEW`` tokens from a prompt of ``PROMPT``. Theirs
has sdpa attention and its default cache, and on a GPU also its compiled static cache.

    tokens_per_second    of all sequences together, prefill included
    steps_per_second     without prefill: from the time of NEW tokens less that of one
    ratio                of whole calls to transformers' default, above 1 is faster
    cache_bytes          size of the KV cache
    of_datasheet         steps per second times the bytes of the weights that a step reads, as a
                         share of the 4.8 TB/s in the datasheet of an H200; on a GPU only
    of_copy              the same as a share of the 4.3 TB/s that a copy reaches there
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import record, time_interleaved
from benchmarks.train_cpu import draw, llama
from fenchel.generation import KVCache, generate
from fenchel.model import ModelConfig, Transformer
from fenchel.pipeline import settings

THREADS = 2
PROMPT, NEW = 32, 256
DATASHEET, COPY = 4.8e12, 4.3e12
"""Bytes per second of an H200's memory: by its datasheet, and measured for a large copy."""
SMALL = ModelConfig(vocabulary=8192, context=512, width=384, layers=6, heads=6)
LARGE = settings({"preset": "tinyllama"}).model
Decode = Callable[[int], Tensor]
"""The number of new tokens to the ids of prompt and continuation."""


@dataclass(frozen=True)
class Machine:
    """The device, the model, and the settings of our decoding that are timed on it."""

    device: str
    dtype: torch.dtype
    model: ModelConfig
    batches: tuple[int, ...]
    settings: tuple[dict[str, Any], ...]
    rounds: int


CPU = Machine(
    "cpu",
    torch.float32,
    SMALL,
    batches=(1, 8),
    settings=({}, {"cache": "float16"}, {"cache": "int8"}, {"draft": 8}),
    rounds=7,
)
GPU = Machine(
    "cuda",
    torch.bfloat16,
    LARGE,
    batches=(1, 8, 32, 128),
    settings=({"step": "model"}, {"step": "fused"}, {"step": "fused", "cache": "int8"}),
    rounds=3,
)


def our_decoders(machine: Machine, model: Any, prompts: Tensor) -> dict[str, Decode]:
    """Our contenders; drafts are used while a sequence decodes alone."""

    def decode(chosen: dict[str, Any]) -> Decode:
        own = deepcopy(model)  # a model keeps one recorded step, and another would replace it
        return lambda new: generate(own, prompts, max_new_tokens=new, temperature=0.0, **chosen)

    settings = [s for s in machine.settings if "draft" not in s or len(prompts) == 1]
    names = (" ".join(f"{key} {value}" for key, value in s.items()) for s in settings)
    return {name or "plain": decode(s) for name, s in zip(names, settings, strict=True)}


def their_decoders(machine: Machine, model: Any, prompts: Tensor) -> dict[str, Decode]:
    """transformers' contenders."""

    def decode(**settings: Any) -> Decode:
        return lambda new: model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            **settings,
        )

    decoders = {"transformers": decode()}
    if machine.device == "cuda":
        decoders["transformers static"] = decode(cache_implementation="static")
    return decoders


def bytes_read(model: Transformer) -> int:
    """Bytes of weights that a step reads: all, but of an untied embedding only one row."""
    every = sum(p.numel() * p.element_size() for p in model.parameters())
    table = model.embed.weight
    return every if model.lm_head is None else every - table.numel() * table.element_size()


def rows(machine: Machine, batch: int) -> list[dict[str, Any]]:
    """All contenders on one batch."""
    config = machine.model
    ours = Transformer(config).to(machine.device, machine.dtype).eval()
    prompts = draw(config.vocabulary, batch, PROMPT).to(machine.device)
    contenders = our_decoders(machine, ours, prompts)
    contenders |= their_decoders(
        machine, llama(config).to(machine.device, machine.dtype).eval(), prompts
    )
    timings, first_token = (
        time_interleaved(
            {name: partial(decode, new) for name, decode in contenders.items()},
            rounds=machine.rounds,
        )
        for new in (NEW, 1)
    )
    lines = []
    for name in contenders:
        line: dict[str, Any] = {
            "device": machine.device,
            "batch": batch,
            "way": name,
            "tokens_per_second": round(batch * NEW / timings.median(name)),
            "steps_per_second": round(
                (NEW - 1) / (timings.median(name) - first_token.median(name))
            ),
            "ratio": round(timings.ratio(name, "transformers"), 3),
        }
        if machine.device == "cuda":
            traffic = line["steps_per_second"] * bytes_read(ours)
            line["of_datasheet"] = round(traffic / DATASHEET, 3)
            line["of_copy"] = round(traffic / COPY, 3)
        if "cache" in name or name in ("plain", "step fused"):
            cache_kind: Any = name.split()[-1] if "cache" in name else "model"
            sizes: dict[str, Any] = {"batch": batch, "positions": PROMPT + NEW, "device": "meta"}
            cache = KVCache(config, kind=cache_kind, dtype=machine.dtype, **sizes)
            line["cache_bytes"] = cache.bytes
        print("  ".join(f"{key} {value}" for key, value in line.items()))
        lines.append(line)
    return lines


def main() -> None:
    """Time on the GPU where there is one, else on the CPU; write results/decode_DEVICE.json."""
    torch.set_num_threads(THREADS)
    machine = GPU if torch.cuda.is_available() else CPU
    lines = [line for batch in machine.batches for line in rows(machine, batch)]
    record(f"decode_{machine.device}", lines, ("transformers",))


if __name__ == "__main__":
    main()
