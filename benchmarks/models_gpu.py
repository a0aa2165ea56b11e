"""Training steps of models of real size on a GPU: softmax, entmax, and transformers' model.

One process, in turn (harness.py), weights in float32 under bfloat16 autocast, fused AdamW,
torch.compile with its default mode. The loss of ours comes from the LM head in parts
(train/loss.py), theirs from the logits of the whole batch; theirs has sdpa attention.

    ours            softmax in every head
    entmax          the same model with entmax-1.5 in every head, by the Triton kernels
    transformers    GPT-2 of the same shape

The scores of a fresh model have a standard deviation of 1, so the rows of entmax are sparse and
scattered: no tile can be left out. Columns:

    tokens_per_second    of forward, loss, backward and optimiser
    share_of_peak        model FLOPs per second by the rate in the datasheet. Model FLOPs per token:
                         6 per weight of every product, and 12 layers width T for attention (half
                         of it under a causal mask; counted in full, as is the custom)
    kernel_ms            milliseconds per step on the device by kind of kernel, from the profiler:
                         what is left beside matrix products and attention

    python -m benchmarks models_gpu            32 and 64 sequences, all three
    python -m benchmarks models_gpu --quick    32 sequences, ours and entmax
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import record, time_interleaved
from benchmarks.train_cpu import gpt2
from fenchel.model import ModelConfig, Transformer
from fenchel.pipeline import settings
from fenchel.train.loss import lm_head_loss

PEAK = 989e12
"""bfloat16 FLOP/s of an H200 without sparsity, from its datasheet."""
GPT2 = settings({"preset": "gpt2"}).model
BATCHES = (32, 64)
"""Sequences per step."""
KINDS = {
    "attention": ("flash", "fmha", "sdpa", "_thresholds", "_outputs", "_gradients"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "cublas"),
    "loss": ("_softmax_errors",),
    "optimiser": ("adam", "multi_tensor"),
    "copies": ("memcpy", "memset"),
}
"""Parts of the names of kernels; the first kind that fits counts, "other" where none does."""
PROFILED = 3
"""Steps under the profiler."""


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


def our_step(config: ModelConfig, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    """A training step of ours, of a fresh model."""
    with torch.device("cuda"):
        model = Transformer(config).train()
    forward = torch.compile(model)

    def loss() -> Tensor:
        hidden = forward(inputs, return_hidden=True)
        return lm_head_loss(hidden, model.lm_head_weight, targets) / targets.numel()

    return step(model, loss)


def their_step(config: ModelConfig, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    """A training step of transformers' GPT-2."""
    model = gpt2(config).cuda().train()
    forward = torch.compile(model)

    def loss() -> Tensor:
        logits = forward(inputs, use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    return step(model, loss)


def parameters(config: ModelConfig) -> int:
    """The number of weights, which is that of transformers' model too."""
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(config).parameters())


def kernel_times(take: Callable[[], None]) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds per step by kind of kernel, and those of the largest kernels without a kind."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED):
            take()
        torch.cuda.synchronize()
    kinds: Counter[str] = Counter()
    others: Counter[str] = Counter()
    for event in found.key_averages():
        if event.device_type != DeviceType.CUDA:
            continue
        name, ms = event.key.lower(), event.self_device_time_total / 1e3 / PROFILED
        kind = next((k for k, parts in KINDS.items() if any(part in name for part in parts)), None)
        kinds[kind or "other"] += ms
        if kind is None:
            others[event.key[:60]] += ms
    return dict(kinds), dict(others.most_common(12))


def rows(config: ModelConfig, batch: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """A row per contender."""
    torch.compiler.reset()  # else a second batch size would be compiled with dynamic shapes
    ids = torch.randint(config.vocabulary, (batch, config.context + 1), device="cuda")
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    makers = {"ours": our_step, "entmax": our_step, "transformers": their_step}
    configs = {"entmax": replace(config, choice="entmax")}
    contenders, peaks = {}, {}
    for name in names:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        take = makers[name](configs.get(name, config), inputs, targets)
        for _ in range(2):  # compiles, and makes the state of the optimiser
            take()
        contenders[name] = take
        peaks[name] = (torch.cuda.max_memory_allocated() - before) / 1e9
    timings = time_interleaved(contenders, rounds=15, warmup=2)
    size = parameters(config)
    flops = 6 * size + 12 * config.layers * config.width * config.context
    found = []
    for name, take in contenders.items():
        rate = targets.numel() / timings.median(name)
        row: dict[str, Any] = {
            "what": "train",
            "shape": "gpt2-124M",
            "contender": name,
            "parameters": size,
            "tokens_per_step": targets.numel(),
            "tokens_per_second": round(rate),
            "share_of_peak": flops * rate / PEAK,
            "peak_GB": peaks[name],
        }
        if name != "ours":
            row |= {"by_ours": timings.ratio("ours", name), "spread": timings.spread("ours", name)}
        if name != "transformers":
            row["kernel_ms"], row["other_kernels_ms"] = kernel_times(take)
        found.append(row)
        print(row, flush=True)
    return found


def main(options: Sequence[str] = ()) -> None:
    """Time all contenders, or with --quick ours at the smaller batch."""
    if not torch.cuda.is_available():
        print("there is no GPU here; models_gpu measures on one.")
        return
    quick = "--quick" in options
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    names = ("ours", "entmax", "transformers")[: 2 if quick else 3]
    found: list[dict[str, Any]] = []
    for batch in BATCHES[:1] if quick else BATCHES:
        found += rows(GPT2, batch, names)
        path = record("models_gpu" + "_quick" * quick, found, packages=("transformers",))
    print(path)
