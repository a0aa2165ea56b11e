"""What sinks and output gates cost on a GPU, beside the same without them.

**Sinks.** Attention of gpt-oss's shape, 64 heads of 64 on 8 heads of keys, bfloat16, causal and in
its window of 128, and two other shapes: ``attend`` with a score per head of one more key, and the
same call without it, in turn (harness.py). Outputs and gradients are first compared with the
definition in float64 on a part of the shape.

**Gates.** Training steps of the shape of TinyLlama (1.1 thousand million parameters), blocks
compiled one by one as ``fenchel train`` does, fused AdamW, with ``model.gate`` none, per head and
per element. A gate per element is one more matrix as large as the queries': ``flops`` is the ratio
of the operations that the weights ask for.

    python -m benchmarks sinks_and_gates             both
    python -m benchmarks sinks_and_gates --only sinks
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import record, time_interleaved
from benchmarks.models_gpu import parameters
from fenchel.attention import Causal, Prior, Window, attend
from fenchel.model import Transformer
from fenchel.pipeline import settings
from fenchel.train.loss import lm_head_loss

ROUNDS, CALLS = 9, 5
LLAMA = settings({"preset": "tinyllama"}).model
SEQUENCES = 8
"""Per step of the 1.1B shape, of 2,048 tokens."""


class Shape(NamedTuple):
    """Sizes of one call."""

    B: int
    H: int
    G: int
    T: int
    D: int


SHAPES = (Shape(4, 64, 8, 4096, 64), Shape(2, 16, 16, 8192, 128), Shape(16, 12, 12, 1024, 64))
"""gpt-oss, and two others."""
PRIORS: dict[str, Prior] = {"causal": Causal(), "window of 128": Window(127)}


def draw(shape: Shape) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    B, H, G, T, D = shape
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = [(B, H, T, D), (B, G, T, D), (B, G, T, D), (B, H, T, D)]
    return [
        torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator)
        for size in sizes
    ]


def calls(
    at: list[Tensor], prior: Prior, sink: Tensor | None, backward: bool
) -> Callable[[], object]:
    """One pass of ``attend``."""
    q, k, v, g = at
    learned = () if sink is None else (sink,)

    def forward() -> object:
        with torch.no_grad():
            return attend(q, k, v, prior=prior, sink=sink)

    def both() -> object:
        out = attend(q, k, v, prior=prior, sink=sink)
        return torch.autograd.grad(out, (q, k, v, *learned), g)

    return both if backward else forward


def error(shape: Shape, prior: Prior) -> float:
    """The largest relative error of outputs and gradients, one sequence and one group of heads."""
    small = shape._replace(B=1, H=shape.H // shape.G, G=1, T=512)
    at = [x.requires_grad_() for x in draw(small)]
    sink = torch.linspace(-1.0, 3.0, small.H, device="cuda").requires_grad_()
    worst = 0.0
    exact = [x.detach().double().requires_grad_() for x in (*at, sink)]
    for ours, theirs in zip(
        _outputs(at, prior, sink, "auto"), _outputs(exact[:4], prior, exact[4], "reference"),
        strict=True,
    ):  # fmt: skip
        worst = max(worst, float((ours.double() - theirs).norm() / theirs.norm()))
    return worst


def _outputs(at: list[Tensor], prior: Prior, sink: Tensor, backend: str) -> list[Tensor]:
    q, k, v, g = at
    out = attend(q, k, v, prior=prior, sink=sink, backend=backend)
    return [out, *torch.autograd.grad(out, (q, k, v, sink), g.detach())]


def sinks() -> list[dict[str, Any]]:
    """A row per shape, prior and pass."""
    rows = []
    for shape in SHAPES:
        at = [x.requires_grad_() for x in draw(shape)]
        for name, prior in PRIORS.items():
            worst = error(shape, prior)
            for backward in (False, True):
                sink = torch.linspace(-1.0, 3.0, shape.H, device="cuda").requires_grad_()
                contenders = {
                    "without": calls(at, prior, None, backward),
                    "with": calls(at, prior, sink, backward),
                }
                times = time_interleaved(contenders, rounds=ROUNDS, warmup=2, calls=CALLS)
                row = {
                    "what": "sink",
                    **shape._asdict(),
                    "prior": name,
                    "pass": "forward+backward" if backward else "forward",
                    "without_ms": 1e3 * times.median("without"),
                    "with_ms": 1e3 * times.median("with"),
                    "cost": 1.0 / times.ratio("with", "without") - 1.0,
                    "error": worst,
                }
                rows.append(row)
                _show(row)
    return rows


def gates() -> list[dict[str, Any]]:
    """A row per gate."""
    torch.set_float32_matmul_precision("high")
    configs = {gate: replace(LLAMA, gate=gate) for gate in ("none", "head", "element")}
    size = (SEQUENCES, LLAMA.context + 1)
    ids = torch.randint(LLAMA.vocabulary, size, device="cuda")
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step(gate: str) -> Callable[[], None]:
        with torch.device("cuda"):
            model = Transformer(configs[gate]).train()
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        for block in model.blocks:
            block.compile()

        def take() -> None:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                hidden = model(inputs, return_hidden=True)
                loss = lm_head_loss(hidden, model.lm_head_weight, targets) / targets.numel()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

        return take

    steps = {gate: step(gate) for gate in configs}
    times = time_interleaved(steps, rounds=ROUNDS, warmup=3)
    rows = []
    for gate, config in configs.items():
        row = {
            "what": "gate",
            "gate": gate,
            "parameters": parameters(config),
            "flops": parameters(config) / parameters(LLAMA),
            "step_ms": 1e3 * times.median(gate),
            "tokens_per_second": round(targets.numel() / times.median(gate)),
            "cost": 1.0 / times.ratio(gate, "none") - 1.0,
        }
        rows.append(row)
        _show(row)
    return rows


def _show(row: dict[str, Any]) -> None:
    shown = {key: f"{x:.4g}" if isinstance(x, float) else x for key, x in row.items()}
    print("  ".join(f"{key} {value}" for key, value in shown.items()), flush=True)


def main(options: Sequence[str] = ()) -> None:
    """Both parts, or one; write results/sinks_and_gates.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks sinks_and_gates")
    parser.add_argument("--only", choices=("sinks", "gates"))
    only = parser.parse_args(list(options)).only
    if not torch.cuda.is_available():
        print("sinks_and_gates needs a GPU")
        return
    rows: list[dict[str, Any]] = []
    for name, part in (("sinks", sinks), ("gates", gates)):
        if only in (None, name):
            rows += part()
            path = record("sinks_and_gates", rows)
    print(path)


if __name__ == "__main__":
    main()
