"""The exact constant of one causal head over 32,768 tokens, d = 64: its value, time and memory.

On a GPU when there is one, else on two threads of a CPU (some ten minutes). float32, to a relative
1e-4 at a failure probability of 1e-6. A dense Jacobian would be 2,097,152 squared: 17.6 TB.
"""

import resource
import time
from typing import Any

import torch

from benchmarks.harness import record
from benchmarks.sensitivity_cpu import THREADS, instance, show
from fenchel.attention import Causal
from fenchel.sensitivity import self_attention_jacobian, spectral_norm

N, D = 32768, 64


def measure(device: str, n: int = N) -> dict[str, Any]:
    X, W = instance(n, D, 0, torch.float32)
    X, W = X.to(device), tuple(w.to(device) for w in W)  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(0)
    if device == "cuda":  # the first products compile the kernels and load the libraries
        spectral_norm(self_attention_jacobian(X[:512], *W, prior=Causal()), generator=generator)
        J = self_attention_jacobian(X, *W, prior=Causal())
        J.T @ (J @ torch.ones(J.shape[1], device=device))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = _peak(device)
    started, used = time.perf_counter(), time.process_time()
    J = self_attention_jacobian(X, *W, prior=Causal())
    sigma = spectral_norm(J, tol=1e-4, failure=1e-6, generator=generator)
    return {
        "n": n,
        "d": D,
        "lower": float(sigma.lower),
        "upper": float(sigma.upper),
        "ratio": float(sigma.ratio),
        "failure": sigma.failure,
        "iterations": sigma.iterations,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - used,
        "peak_MB_above_inputs": _peak(device) - before,
    }


def _peak(device: str) -> float:
    """Peak memory so far, in MB."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(THREADS)
    row = measure(device)
    show("long", [row])
    print(f"\n{record(f'sensitivity_long_{device}', [row])}")
