"""Models of two known shapes on a CPU against transformers' models of the same shape.

All in one process, in turn (harness.py): float32, two threads, random weights, equally many
parameters, one sequence. Theirs with each of its ways to attend and, in decoding, its static
cache with the step compiled. A way that cannot run here (torch.compile wants a C++ compiler) has
its reason in its row.

    forward   tokens a second from ids to logits, without derivatives
    train     tokens a second of forward, loss, backward and fused AdamW
    decode    tokens a second of greedy decoding, 128 tokens from a prompt of 32
    ratio     to the fastest of transformers' ways, above 1 is faster; quartiles over the rounds
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from transformers import CompileConfig

from benchmarks.harness import Race, race, record
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
    pair,
    step,
    their_loss,
    their_text,
)
from fenchel.model import ModelConfig, Transformer

Way = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """A model, its counterpart, and how much of it is run."""

    name: str
    model: ModelConfig
    peer: Callable[[ModelConfig], nn.Module]
    tokens: int = 256
    rounds: int = 5


LLAMA = ModelConfig(
    vocabulary=32000, context=1024, width=384, layers=8, heads=6, kv_heads=2, hidden=1536
)
SHAPES = [Shape("gpt2-124M", GPT2, gpt2), Shape("llama-30M", LLAMA, llama, rounds=9)]


def peers(shape: Shape) -> tuple[Transformer, dict[str, Any]]:
    """Ours, and theirs with each way to attend."""
    ours, sdpa = pair(shape.model, shape.peer, {})
    eager: Any = shape.peer(shape.model)
    eager.set_attn_implementation("eager")
    return ours, {"transformers eager": eager, "transformers sdpa": sdpa}


def forward(shape: Shape) -> Iterator[dict[str, Any]]:
    """Ids to logits."""
    ours, theirs = peers(shape)
    inputs = draw(shape.model.vocabulary, 1, shape.tokens)

    def logits(model: nn.Module, **settings: Any) -> Way:
        model.eval()
        return torch.inference_mode()(lambda: model(inputs, **settings))

    ways = {"ours": logits(ours)}
    ways |= {name: logits(model, use_cache=False) for name, model in theirs.items()}
    yield from rows("forward", shape, ways, inputs.numel())


def train(shape: Shape) -> Iterator[dict[str, Any]]:
    """A training step."""
    ours, theirs = peers(shape)
    ids = draw(shape.model.vocabulary, 1, shape.tokens + 1)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    ways: dict[str, Way] = {"ours": step(ours, our_loss(ours, inputs, targets))}
    for name, model in theirs.items():
        ways[name] = step(model, their_loss(model, inputs, targets))
    yield from rows("train", shape, ways, targets.numel())


def decode(shape: Shape) -> Iterator[dict[str, Any]]:
    """Greedy decoding."""
    ours, theirs = peers(shape)
    prompts = draw(shape.model.vocabulary, 1, PROMPT)
    for model in (ours, *theirs.values()):
        model.eval()
    compiled = CompileConfig()
    compiled._compile_all_devices = True  # else it compiles on a GPU only
    static = {"cache_implementation": "static", "compile_config": compiled}
    ways: dict[str, Callable[[], Tensor]] = {
        "ours": our_text(ours, prompts),
        **{name: their_text(model, prompts) for name, model in theirs.items()},
        "transformers static": their_text(theirs["transformers sdpa"], prompts, **static),
    }
    yield from rows("decode", shape, ways, NEW)


def rows(what: str, shape: Shape, ways: dict[str, Way], tokens: int) -> Iterator[dict[str, Any]]:
    """Race those that can run here, and tell why the others cannot."""
    refused = {name: reason for name, way in ways.items() if (reason := why_not(way))}
    found = race({n: w for n, w in ways.items() if n not in refused}, rounds=shape.rounds, warmup=1)
    best = min((n for n in found.seconds if n.startswith("transformers")), key=found.median)
    for name in ways:
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


def why_not(way: Way) -> str | None:
    """Call it once, which also compiles what is compiled; the reason if it cannot run here."""
    try:
        way()
    except TorchDynamoException as error:
        return str(error).strip().splitlines()[0][:200]
    return None


def main() -> None:
    """Race both shapes, print the table, write results/models_cpu.json."""
    torch.set_num_threads(THREADS)
    lines = [line for shape in SHAPES for kind in (forward, train, decode) for line in kind(shape)]
    record("models_cpu", lines, ("transformers",))


if __name__ == "__main__":
    main()
