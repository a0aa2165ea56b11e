"""Models of two known shapes on a CPU against transformers' models of the same shape.

Each contender in a process of its own, in turn (harness.py): float32, two threads, random weights,
equally many parameters, one sequence. Theirs with each of its ways to attend and, in decoding, its
static cache with the step compiled. Ours trains as ``fenchel train`` does, which keeps freed memory
(fenchel/train/machine.py). A way that cannot run here (torch.compile wants a C++ compiler) has its
reason in its row.

    forward   tokens a second from ids to logits, without derivatives
    train     tokens a second of forward, loss, backward and fused AdamW
    decode    tokens a second of greedy decoding, 128 tokens from a prompt of 32
    ratio     to the fastest of transformers' ways, above 1 is faster; quartiles over the rounds
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import CompileConfig

from benchmarks.harness import Maker, Race, race_apart, record
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

Way = Callable[[], object]


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
    """Theirs with one way to attend, as large as ours."""
    model: Any = shape.peer(shape.model)
    model.set_attn_implementation(attention)
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, Transformer(shape.model))]
    assert sizes[0] == sizes[1], sizes
    return model


# --- what a contender's process runs


def our_forward(shape: Shape) -> Way:
    """Ids to logits by ours."""
    return _logits(Transformer(shape.model), shape)


def their_forward(shape: Shape, attention: str) -> Way:
    """Ids to logits by theirs."""
    return _logits(their_model(shape, attention), shape, use_cache=False)


def _logits(model: nn.Module, shape: Shape, **settings: Any) -> Way:
    torch.set_num_threads(THREADS)
    model.eval()
    inputs = draw(shape.model.vocabulary, 1, shape.tokens)
    return torch.inference_mode()(lambda: model(inputs, **settings))


def our_training(shape: Shape) -> Way:
    """A step of ours."""
    torch.set_num_threads(THREADS)
    retain_freed_memory()
    model, ids = Transformer(shape.model), draw(shape.model.vocabulary, 1, shape.tokens + 1)
    return step(model, our_loss(model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))


def their_training(shape: Shape, attention: str) -> Way:
    """A step of theirs."""
    torch.set_num_threads(THREADS)
    model, ids = (
        their_model(shape, attention),
        draw(shape.model.vocabulary, 1, shape.tokens + 1),
    )
    return step(model, their_loss(model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))


def our_decoding(shape: Shape) -> Way:
    """A text by ours."""
    torch.set_num_threads(THREADS)
    prompts = draw(shape.model.vocabulary, 1, PROMPT)
    return our_text(Transformer(shape.model).eval(), prompts)


def their_decoding(shape: Shape, attention: str, *, static: bool = False) -> Way:
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


def ways(what: str, shape: Shape) -> dict[str, Maker]:
    """The contenders."""
    ours, theirs = {
        "forward": (our_forward, their_forward),
        "train": (our_training, their_training),
        "decode": (our_decoding, their_decoding),
    }[what]
    found: dict[str, Maker] = {"ours": partial(ours, shape)}
    for attention in ("eager", "sdpa"):
        found[f"transformers {attention}"] = partial(theirs, shape, attention)
    if what == "decode":
        found["transformers static"] = partial(their_decoding, shape, "sdpa", static=True)
    return found


def rows(what: str, shape: Shape) -> Iterator[dict[str, Any]]:
    """Race those that can run here, and tell why the others cannot."""
    contenders = ways(what, shape)
    found, refused = race_apart(contenders, rounds=shape.rounds)
    best = min((n for n in found.seconds if n.startswith("transformers")), key=found.median)
    tokens = NEW if what == "decode" else shape.tokens
    for name in contenders:
        line = {"what": what, "shape": shape.name, "way": name}
        if name in refused:
            line["missing"] = refused[name]
        else:
            line |= measured(found, name, best, tokens)
        print("  ".join(f"{key} {value}" for key, value in line.items()), flush=True)
        yield line


def measured(found: Race, name: str, best: str, tokens: int) -> dict[str, Any]:
    """The numbers of one way."""
    return {
        "tokens_per_second": round(tokens / found.median(name), 1),
        "ratio": round(found.ratio(name, best), 3),
        "quartiles": [round(one, 3) for one in found.spread(name, best)],
    }


def main() -> None:
    """Race both shapes, print the table, write results/models_cpu.json."""
    torch.set_num_threads(THREADS)
    kinds = ("forward", "train", "decode")
    lines = [line for shape in SHAPES for what in kinds for line in rows(what, shape)]
    record("models_cpu", lines, ("transformers",))


if __name__ == "__main__":
    main()
