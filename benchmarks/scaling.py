"""How time and memory of attention grow with the length n, and where linear attention overtakes.

Float32, 4 heads of 64, normal inputs, forward pass. For every back end and every n the median time
in turns with the others, and the peak memory above that before the call. An exponent is the
slope of the least-squares line of log y on log n: scores cost 2 n^2 D operations per head in every
back end, so time should grow like n^2; memory like n^2 where scores are stored and like n where
they are not. Small n are flattened by fixed costs; the line is drawn through the larger half.

Linear attention costs about 4 n m E operations per head for m features, softmax 4 n^2 D: with
m = E = D they are even at n = D. Where the times cross is measured here, by a straight line in
log-log between the two lengths around it.

    python -m benchmarks scaling                 all lengths, written to results/scaling_cpu.json
    python -m benchmarks.scaling 128 256 512     these lengths, printed only
"""

import ctypes
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import record, time_interleaved
from fenchel.attention import Causal, attend, linear_attend
from fenchel.choice import Entmax, Softmax

THREADS = 2
HEADS, WIDTH, ROUNDS = 4, 64, 5
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
LONGEST_REFERENCE = 4096  # 8192 would hold two gigabytes of scores and weights
LINEAR, SOFTMAX = "linear, elu", "softmax, sdpa"

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def contenders(n: int, causal: bool) -> dict[str, Attention]:
    prior = Causal() if causal else None
    calls: dict[str, Attention] = {
        SOFTMAX: lambda q, k, v: attend(q, k, v, prior=prior, backend="sdpa"),
        "softmax, blocked": lambda q, k, v: attend(q, k, v, prior=prior, backend="blocked"),
        "entmax 1.5, blocked": lambda q, k, v: attend(
            q, k, v, choice=Entmax(1.5), prior=prior, backend="blocked"
        ),
        LINEAR: lambda q, k, v: linear_attend(q, k, v, causal=causal),
    }
    if n <= LONGEST_REFERENCE:
        calls["softmax, reference"] = lambda q, k, v: attend(
            q, k, v, choice=Softmax(), prior=prior, backend="reference"
        )
    return calls


def measure(n: int, causal: bool) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, n, WIDTH, generator=generator) for _ in range(3))
    calls = {name: (lambda f=f: f(q, k, v)) for name, f in contenders(n, causal).items()}
    with torch.no_grad():
        memory = {name: peak(call) for name, call in calls.items()}
        times = time_interleaved(calls, rounds=ROUNDS, warmup=1)
    return [
        {
            "name": name,
            "n": n,
            "causal": causal,
            "ms": 1e3 * times.median(name),
            "mib": memory[name],
        }
        for name in calls
    ]


def peak(call: Callable[[], object]) -> float | None:
    """Peak memory of a call in MiB above that before it; None where it cannot be measured."""
    call()  # memory that stays allocated after the first call does not count
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    ctypes.CDLL(None).malloc_trim(0)  # freed pages would be used again without a trace
    before = _pages(status, "VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    call()
    return (_pages(status, "VmHWM") - before) / 2**10


def _pages(status: Path, name: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float:
    """The slope of the least-squares line of log value on log length."""
    x, y = [math.log(n) for n in lengths], [math.log(max(v, 1e-12)) for v in values]
    return statistics.linear_regression(x, y).slope


def exponents(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Exponents of time and memory of every contender, over the larger half of its lengths."""
    fits = []
    for name, causal in dict.fromkeys((row["name"], row["causal"]) for row in rows):
        own = [row for row in rows if (row["name"], row["causal"]) == (name, causal)]
        upper = own[len(own) // 2 :] if len(own) > 3 else own
        lengths = [row["n"] for row in upper]
        memory = [row["mib"] for row in upper if row["mib"] is not None and row["mib"] > 1.0]
        fits.append(
            {
                "name": name,
                "causal": causal,
                "lengths": lengths,
                "time": exponent(lengths, [row["ms"] for row in upper]),
                "memory": exponent(lengths, memory) if len(memory) == len(lengths) > 1 else None,
            }
        )
    return fits


def crossover(rows: Sequence[dict[str, Any]], causal: bool) -> float | None:
    """The length from which linear attention is faster for good; None if it never is."""
    times = {
        name: {
            row["n"]: row["ms"] for row in rows if (row["name"], row["causal"]) == (name, causal)
        }
        for name in (LINEAR, SOFTMAX)
    }
    lengths = sorted(times[LINEAR])
    behind = [n for n in lengths if times[LINEAR][n] >= times[SOFTMAX][n]]
    if not behind:
        return float(lengths[0])
    if behind[-1] == lengths[-1]:
        return None
    low, high = behind[-1], lengths[lengths.index(behind[-1]) + 1]
    gaps = [math.log(times[LINEAR][n] / times[SOFTMAX][n]) for n in (low, high)]
    share = gaps[0] / (gaps[0] - gaps[1])
    return float(low * (high / low) ** share)


def main(lengths: Sequence[int] = LENGTHS, *, keep: bool = True) -> None:
    torch.set_num_threads(THREADS)
    rows: list[dict[str, Any]] = []
    for causal in (False, True):
        print("causal" if causal else "all keys")
        for n in lengths:
            for row in measure(n, causal):
                rows.append(row)
                memory = "?" if row["mib"] is None else f"{row['mib']:.1f}"
                print(
                    f"  n {n:6} {row['name']:22}{row['ms']:10.2f} ms {memory:>10} MiB", flush=True
                )
    fits = exponents(rows)
    for fit in fits:
        memory = "-" if fit["memory"] is None else f"{fit['memory']:.2f}"
        kind = "causal" if fit["causal"] else "all keys"
        print(f"{fit['name']:22} {kind:9} time n^{fit['time']:.2f}  memory n^{memory}")
    crossings = {str(causal): crossover(rows, causal) for causal in (False, True)}
    for causal, n in crossings.items():
        where = "not in these lengths" if n is None else f"from n = {n:.0f}"
        print(f"linear attention (elu) is faster than sdpa, causal {causal}: {where}")
    if keep:
        summary = {"exponents": fits, "linear_faster_from": crossings}
        print(f"written to {record('scaling_cpu', [*rows, summary])}")


if __name__ == "__main__":
    main([int(n) for n in sys.argv[1:]] or LENGTHS, keep=len(sys.argv) < 2)
