"""Models of two known shapes on a CPU against transformers' models of the same shape.

Each contender in a process of its own, in turn (harness.py): float32, two threads, random weights,
equally many parameters, one sequence. Theirs with each of its attention implementations and, in
decoding, its static cache with the step compiled. Ours trains as ``fenchel train`` does, which
retains freed memory (fenchel/train/hardware.py). The row of a contender that cannot run here
(torch.compile needs a C++ compiler) gives the reason.

    forward   tokens per second from ids to logits, without derivatives
    train     tokens per second of forward, loss, backward and fused AdamW
    decode    tokens per second of greedy decoding, 128 tokens from a prompt of 32
    ratio     to the fastest contender of transformers, above 1 is faster; quartiles over rounds
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import CompileConfig

from benchmarks.harness import Maker, Timings, record, time_in_processes
from benchmarks.models_gpu import GPT2
from benchmarks.train_cpu import (
    NEW,
    PROMPT,
    THREADS,
    draw,
    gpt2,
    llama,
    our_loss,
    our_text,
    step,
    their_loss,
    their_text,
)
from fenchel.model import ModelConfig, Transformer
from fenchel.train import retain_freed_memory

Call = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """A model, its counterpart, and how much of it is run."""

    name: str
    model: ModelConfig
    peer: Callable[[ModelConfig], nn.Module]
    tokens: int = 256
    rounds: int = 9


LLAMA = ModelConfig(
    vocabulary=32000, context=1024, width=384, layers=8, heads=6, kv_heads=2, hidden=1536
)
SHAPES = [Shape("gpt2-124M", GPT2, gpt2), Shape("llama-30M", LLAMA, llama, rounds=15)]


def their_model(shape: Shape, attention: str) -> Any:
    """Theirs with one attention implementation, as large as ours."""
    model: Any = shape.peer(shape.model)
    model.set_attn_implementation(attention)
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, Transformer(shape.model))]
    assert sizes[0] == sizes[1], sizes
    return model


# --- the calls of a contender, built in its own process


def our_forward(shape: Shape) -> Call:
    """Ids to logits by ours."""
    return _logits(Transformer(shape.model), shape)


def their_forward(shape: Shape, attention: str) -> Call:
    """Ids to logits by theirs."""
    return _logits(their_model(shape, attention), shape, use_cache=False)


def _logits(model: nn.Module, shape: Shape, **settings: Any) -> Call:
    torch.set_num_threads(THREADS)
    model.eval()
    inputs = draw(shape.model.vocabulary, 1, shape.tokens)
    return torch.inference_mode()(lambda: model(inputs, **settings))


def our_training(shape: Shape) -> Call:
    """A step of ours."""
    torch.set_num_threads(THREADS)
    retain_freed_memory()
    model, ids = Transformer(shape.model), draw(shape.model.vocabulary, 1, shape.tokens + 1)
    return step(model, our_loss(model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))


def their_training(shape: Shape, attention: str) -> Call:
    """A step of theirs."""
    torch.set_num_threads(THREADS)
    model, ids = (
        their_model(shape, attention),
        draw(shape.model.vocabulary, 1, shape.tokens + 1),
    )
    return step(model, their_loss(model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))


def our_decoding(shape: Shape) -> Call:
    """A text by ours."""
    torch.set_num_threads(THREADS)
    prompts = draw(shape.model.vocabulary, 1, PROMPT)
    return our_text(Transformer(shape.model).eval(), prompts)


def their_decoding(shape: Shape, attention: str, *, static: bool = False) -> Call:
    """A text by theirs."""
    torch.set_num_threads(THREADS)
    settings: dict[str, Any] = {}
    if static:
        compiled = CompileConfig()
        setattr(compiled, "_compile_all_devices", True)  # noqa: B010 - else on a GPU only
        settings = {"cache_implementation": "static", "compile_config": compiled}
    prompts = draw(shape.model.vocabulary, 1, PROMPT)
    return their_text(their_model(shape, attention).eval(), prompts, **settings)


# --- the table


def make_contenders(what: str, shape: Shape) -> dict[str, Maker]:
    """The contenders of a row, to be built in their own processes."""
    ours, theirs = {
        "forward": (our_forward, their_forward),
        "train": (our_training, their_training),
        "decode": (our_decoding, their_decoding),
    }[what]
    makers: dict[str, Maker] = {"ours": partial(ours, shape)}
    for attention in ("eager", "sdpa"):
        makers[f"transformers {attention}"] = partial(theirs, shape, attention)
    if what == "decode":
        makers["transformers static"] = partial(their_decoding, shape, "sdpa", static=True)
    return makers


def rows(what: str, shape: Shape) -> Iterator[dict[str, Any]]:
    """Time the contenders that can run here; the row of another gives the reason."""
    contenders = make_contenders(what, shape)
    timings, refused = time_in_processes(contenders, rounds=shape.rounds)
    best = min((n for n in timings.seconds if n.startswith("transformers")), key=timings.median)
    tokens = NEW if what == "decode" else shape.tokens
    for name in contenders:
        line = {"what": what, "shape": shape.name, "way": name}
        if name in refused:
            line["missing"] = refused[name]
        else:
            line |= timing_columns(timings, name, best, tokens)
        print("  ".join(f"{key} {value}" for key, value in line.items()), flush=True)
        yield line


def timing_columns(timings: Timings, name: str, best: str, tokens: int) -> dict[str, Any]:
    """The numbers of one contender."""
    return {
        "tokens_per_second": round(tokens / timings.median(name), 1),
        "ratio": round(timings.ratio(name, best), 3),
        "quartiles": [round(quartile, 3) for quartile in timings.spread(name, best)],
    }


def main() -> None:
    """Time both shapes, print the table, write results/models_cpu.json."""
    torch.set_num_threads(THREADS)
    kinds = ("forward", "train", "decode")
    lines = [line for shape in SHAPES for what in kinds for line in rows(what, shape)]
    record("models_cpu", lines, ("transformers",))


if __name__ == "__main__":
    main()
