"""Whether ``backend="auto"`` picks the quickest back end: every back end that serves, beside it.

A case is a prior (or a soft cap, or another map), a number of queries and keys, and a pass: forward
alone, or forward and backward. All back ends that serve it and "auto" are timed in turn in one
process (harness.py); a row gives the median milliseconds of each, the back end that auto picks and

    auto / best      the median over rounds of auto's time by that of the quickest back end

On a CPU: float32, 4 heads of 64. On a GPU: bfloat16, 16 heads of 64, 16384 tokens. The last lines
give, per prior, the number of graphs that torch.compile makes for ten new lengths (0 where nothing
is compiled, or where the kernel for any length exists, which every length but the first of the
process uses) and, on a GPU, the gain of a kernel compiled for exactly its lengths over that one.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.harness import record, time_interleaved
from fenchel.attention import (
    ALiBi,
    AttentionSpec,
    Causal,
    Padding,
    RelativeBias,
    Sink,
    Window,
    attend,
    backend_support,
    flex,
    selected_backend,
)
from fenchel.attention.sdpa import causal_flag
from fenchel.choice import Entmax
from fenchel.torch_internals import compile_error

THREADS = 2
ROUNDS = 5
PILOT = 0.02
"""Seconds: calls quicker than this are repeated within a round."""


class Machine(NamedTuple):
    """What is measured on a kind of device."""

    device: str
    dtype: torch.dtype
    heads: int
    lengths: tuple[int, ...]
    tokens: int
    """Tokens per call: as many sequences as make them up, and at least one."""
    largest_square: int
    """Scores above which the reference back end is left out: it writes all of them, in float32."""
    budget: float
    """Seconds after which no further case is begun."""

    def batch(self, n: int) -> int:
        """Sequences of n tokens per call."""
        return max(1, self.tokens // n)


CPU = Machine("cpu", torch.float32, 4, (64, 256, 1024, 4096), 1, 1 << 26, 900.0)
GPU = Machine("cuda", torch.bfloat16, 16, (256, 1024, 2048, 8192), 1 << 14, 1 << 30, 500.0)
WIDTH = 64


class Case(NamedTuple):
    """One kind of call: how queries choose, and how many of n are queries."""

    spec: AttentionSpec
    queries: Callable[[int], int] = lambda n: n


def cases(machine: Machine, n: int) -> dict[str, Case]:
    """Every kind of call, for n keys."""
    H, device = machine.heads, machine.device
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(32, H, generator=generator).to(device)
    padding = Padding(torch.tensor([n - n // 4] * machine.batch(n), device=device))
    window = Window(max(16, min(512, n // 8)))
    return {
        "none": Case(AttentionSpec()),
        "causal": Case(AttentionSpec(prior=Causal())),
        "causal, n/4 queries": Case(AttentionSpec(prior=Causal()), lambda n: n // 4),
        "causal, 1 query": Case(AttentionSpec(prior=Causal()), lambda _: 1),
        "window": Case(AttentionSpec(prior=window)),
        "ALiBi + causal": Case(AttentionSpec(prior=ALiBi(H) + Causal())),
        "relative bias, learned": Case(
            AttentionSpec(prior=RelativeBias(table.requires_grad_()) + Causal())
        ),
        "padding + causal": Case(AttentionSpec(prior=padding + Causal())),
        "sink + causal": Case(AttentionSpec(prior=Sink(torch.zeros(H, device=device), Causal()))),
        "softcap + causal": Case(AttentionSpec(prior=Causal(), softcap=30.0)),
        "entmax + causal": Case(AttentionSpec(choice=Entmax(1.5), prior=Causal())),
    }


def inputs(machine: Machine, T: int, S: int, train: bool) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(machine.batch(S), machine.heads, n, WIDTH) for n in (T, S, S, T)]
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    placed = [x.to(machine.device, machine.dtype) for x in drawn]
    return [*(x.requires_grad_(train) for x in placed[:3]), placed[3]]


def call(spec: AttentionSpec, backend: str, at: list[Tensor], train: bool) -> Callable[[], Any]:
    """One pass."""
    q, k, v, g = at
    learned = [] if spec.prior is None else [x for x in spec.prior.tensors() if x.requires_grad]

    def forward() -> Any:
        with torch.no_grad():
            return attend(q, k, v, **spec, backend=backend)

    def both() -> Any:
        out = attend(q, k, v, **spec, backend=backend)
        return torch.autograd.grad(out, (q, k, v, *learned), g)

    return both if train else forward


def measure(machine: Machine, name: str, n: int, train: bool) -> dict[str, Any]:
    """Milliseconds per call of every back end that serves, and of auto."""
    case = cases(machine, n)[name]
    T = max(1, case.queries(n))
    at = inputs(machine, T, n, train)
    q, k, v, _ = at
    with torch.set_grad_enabled(train):
        reasons, picked = (
            backend_support(q, k, v, **case.spec),
            selected_backend(q, k, v, **case.spec),
        )
    names = [backend for backend, reason in reasons.items() if reason is None]
    if "sdpa" in names and causal_flag(case.spec.prior, T, n) is not None and "flex" in names:
        names.remove("flex")  # torch's own kernels are ahead of it, and compiling takes long
    scores = machine.batch(n) * machine.heads * T * n
    if scores > machine.largest_square:
        names.remove("reference")
    if machine is GPU and {"sdpa", "flex"} & {*names} and scores > machine.largest_square // 4:
        names.remove("blocked")  # a kernel call per tile, far behind
    calls = {backend: call(case.spec, backend, at, train) for backend in (*names, "auto")}
    for backend in list(calls):  # compiles what is compiled, at the first call
        try:
            calls[backend]()
        except compile_error() as error:  # torch's compiler has its limits
            print(f"  {backend} does not compile: {str(error).splitlines()[0][:90]}")
            if backend == "auto":
                return {"case": name, "keys": n, "picked": picked, "error": str(error)[:400]}
            del calls[backend]
            names.remove(backend)
    started = time.perf_counter()
    calls["auto"]()
    _synchronize(machine)
    repeats = max(1, min(50, int(PILOT / (time.perf_counter() - started))))
    times = time_interleaved(calls, rounds=ROUNDS, warmup=1, calls=repeats)
    best = min(names, key=times.median)
    return {
        "case": name,
        "queries": T,
        "keys": n,
        "pass": "forward+backward" if train else "forward",
        "picked": picked,
        "best": best,
        "auto_by_best": 1.0 / times.ratio("auto", best),
        **{f"{b}_ms": 1e3 * times.median(b) for b in calls},
    }


def graphs(machine: Machine, name: str) -> int:
    """Graphs that torch.compile makes for auto over ten lengths, none of which came before."""
    before = counters["stats"]["unique_graphs"]
    train = machine.device == "cuda"
    for step in range(10):
        n = machine.lengths[-2] + 8 + 72 * step
        case = cases(machine, n)[name]
        at = inputs(machine, max(1, case.queries(n)), n, train)
        call(case.spec, "auto", at, train)()
    return int(counters["stats"]["unique_graphs"] - before)


def exact_gain(machine: Machine, name: str, n: int) -> float:
    """How many times as fast FlexAttention trains when compiled for exactly n."""
    spec = cases(machine, n)[name].spec
    at = inputs(machine, n, n, train=True)

    def timed(exact: bool) -> Callable[[], object]:
        f = call(spec, "flex", at, train=True)

        def run() -> object:
            flex._EXACT[:] = [(n, n)] if exact else [(0, 0)]
            return f()

        return run

    times = time_interleaved({"exact": timed(True), "any": timed(False)}, rounds=ROUNDS, warmup=2)
    return times.ratio("exact", "any")


def _synchronize(machine: Machine) -> None:
    if machine.device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    machine = GPU if torch.cuda.is_available() else CPU
    if machine is CPU:
        torch.set_num_threads(THREADS)
    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    left_out = 0
    flex._EXACT[:] = [(0, 0)]  # kernels for any length, of which there are fewer to compile
    for train in (False, True):
        print("forward and backward" if train else "forward", flush=True)
        for n in reversed(machine.lengths):
            for name in cases(machine, n):
                if time.perf_counter() - began > machine.budget:
                    left_out += 1
                    continue
                row = measure(machine, name, n, train)
                if "error" in row:
                    failed.append(row)
                    continue
                rows.append(row)
                times = "  ".join(
                    f"{key[:-3]} {row[key]:.3f}" for key in row if key.endswith("_ms")
                )
                print(
                    f"  {n:6d}  {name:24s}{row['picked']:>10s}  x {row['auto_by_best']:5.2f}"
                    f"   ms: {times}",
                    flush=True,
                )
    worst = max(rows, key=lambda row: row["auto_by_best"])
    near = sum(row["auto_by_best"] <= 1.05 for row in rows)
    print(
        f"auto is within 5 % of the best in {near} of {len(rows)}; at worst x "
        f"{worst['auto_by_best']:.2f}: {worst['case']}, {worst['keys']} keys, {worst['pass']}"
    )
    if left_out:
        print(f"{left_out} cases were left out: their time was up after {machine.budget:.0f} s")
    compiled = {}
    for name in cases(machine, 64):
        if time.perf_counter() - began < machine.budget:
            compiled[name] = graphs(machine, name)
    print("graphs compiled for ten new lengths:", compiled)
    rows.append({"case": "graphs compiled for ten new lengths", **compiled})
    if machine is GPU:
        gains = {name: exact_gain(machine, name, 8192) for name in ("window", "ALiBi + causal")}
        print("gain of kernels for exactly 8192:", {k: round(x, 3) for k, x in gains.items()})
        rows.append({"case": "gain of kernels for exactly 8192", **gains})
    rows += failed
    print(f"written to {record(f'attention_auto_{machine.device}', rows)}")


if __name__ == "__main__":
    main()
