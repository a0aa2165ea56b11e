"""Models of real size on a GPU against transformers' models of the same shape.

Both sides: one process, in turn (harness.py), weights in float32 under bfloat16 autocast, fused
AdamW, torch.compile with its default mode. Theirs: sdpa attention, logits of the whole batch.
Ours: the loss from the LM head in parts (train/loss.py).

    train     tokens per second of forward, loss, backward and optimiser; share of the peak rate

Model FLOPs per token: 6 per weight of every product and 12 layers width T for attention (half of
it under a causal mask; counted in full, as is the custom).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.harness import record, time_interleaved
from benchmarks.train_cpu import gpt2
from fenchel.model import ModelConfig, Transformer
from fenchel.train.loss import lm_head_loss

PEAK = 989e12
"""bfloat16 FLOP/s of an H200 without sparsity, from its datasheet."""
GPT2 = ModelConfig(
    vocabulary=50257,
    context=1024,
    width=768,
    layers=12,
    heads=12,
    norm="layer",
    positions="learned",
    mlp="gelu_tanh",
    bias=True,
)
BATCHES = (32, 64)
"""Sequences per step."""


def step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """One training step under autocast."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def take() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            total = loss()
        total.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return take


def train(config: ModelConfig, batch: int) -> dict[str, Any]:
    """Time a training step of ours and of theirs."""
    torch.compiler.reset()  # else a second batch size would be compiled with dynamic shapes
    torch.cuda.reset_peak_memory_stats()
    ids = torch.randint(config.vocabulary, (batch, config.context + 1), device="cuda")
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    ours, theirs = Transformer(config).cuda().train(), gpt2(config).cuda().train()
    sizes = [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)]
    assert sizes[0] == sizes[1], sizes
    our_pass, their_pass = torch.compile(ours), torch.compile(theirs)

    def our_loss() -> Tensor:
        stream = our_pass(inputs, return_hidden=True)
        return lm_head_loss(stream, ours.lm_head_weight, targets) / targets.numel()

    def their_loss() -> Tensor:
        logits = their_pass(inputs, use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    contenders = {"ours": step(ours, our_loss), "transformers": step(theirs, their_loss)}
    timings = time_interleaved(contenders, rounds=15, warmup=4)
    flops = 6 * sizes[0] + 12 * config.layers * config.width * config.context
    rates = {name: targets.numel() / timings.median(name) for name in contenders}
    return {
        "what": "train",
        "shape": "gpt2-124M",
        "parameters": sizes[0],
        "tokens_per_step": targets.numel(),
        **{f"{name}_tokens_per_second": round(rate) for name, rate in rates.items()},
        **{f"{name}_share_of_peak": flops * rate / PEAK for name, rate in rates.items()},
        "ratio": timings.ratio("ours", "transformers"),
        "quartiles": timings.spread("ours", "transformers"),
        "peak_GB": torch.cuda.max_memory_allocated() / 1e9,
    }


def main() -> None:
    if not torch.cuda.is_available():
        print("there is no GPU here; models_gpu measures on one.")
        return
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    rows = [train(GPT2, batch) for batch in BATCHES]
    for row in rows:
        print(row)
    print(record("models_gpu", rows, packages=("transformers",)))
