"""Attention on a CPU: our back ends beside torch's and the entmax package, in one process.

Float32, two threads, 4 heads of 64, normal inputs. A row gives the time of the forward pass alone
and of forward and backward, as multiples of torch's scaled_dot_product_attention in the same
round. Before anything is timed, the last 64 rows are compared with the reference in float64.
"""

from collections.abc import Callable

import entmax
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness import Timings, record, time_interleaved
from fenchel.attention import Causal, attend
from fenchel.choice import Choice, Entmax, Softmax, Sparsemax

THREADS = 2
HEADS, WIDTH, ROUNDS = 4, 64, 5
LENGTHS = (1024, 2048, 4096)
PEER = "sdpa (torch)"
OURS: dict[str, tuple[Choice, str]] = {
    "softmax, auto": (Softmax(), "auto"),
    "softmax, blocked": (Softmax(), "blocked"),
    "entmax 1.5, blocked": (Entmax(1.5), "blocked"),
    "sparsemax, blocked": (Sparsemax(), "blocked"),
    "entmax 1.25, blocked": (Entmax(1.25), "blocked"),
    "entmax 1.5, reference": (Entmax(1.5), "reference"),
}
PACKAGE = "entmax15 (entmax)"
SLOW = {PACKAGE, "entmax 1.25, blocked", "entmax 1.5, reference"}  # timed at the first length only
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def contenders(causal: bool) -> dict[str, Attention]:
    prior = Causal() if causal else None

    def ours(choice: Choice, backend: str) -> Attention:
        return lambda q, k, v: attend(q, k, v, choice=choice, prior=prior, backend=backend)

    def package(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = q @ k.mT / q.shape[-1] ** 0.5
        if causal:
            n = q.shape[-2]
            z = z.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
        return entmax.entmax15(z, dim=-1) @ v

    return {
        PEER: lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal),
        **{name: ours(*how) for name, how in OURS.items()},
        PACKAGE: package,
    }


def error(name: str, f: Attention, at: list[Tensor], causal: bool) -> float:
    """The largest error in the last 64 rows against the reference in float64."""
    choice = {PEER: Softmax(), PACKAGE: Entmax(1.5)}.get(name) or OURS[name][0]
    q, k, v = (x.detach() for x in at)
    exact = attend(
        *(x.double() for x in (q[:, :, -64:], k, v)),
        choice=choice,
        prior=Causal() if causal else None,
        backend="reference",
    )
    with torch.no_grad():
        return float((f(q, k, v)[:, :, -64:].double() - exact).abs().max())


def measure(n: int, causal: bool) -> list[dict[str, object]]:
    generator = torch.Generator().manual_seed(0)
    at = [torch.randn(1, HEADS, n, WIDTH, generator=generator).requires_grad_() for _ in range(3)]
    g = torch.randn(1, HEADS, n, WIDTH, generator=generator)
    timed = {
        name: f for name, f in contenders(causal).items() if n == LENGTHS[0] or name not in SLOW
    }

    def forward(f: Attention) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                return f(*at)

        return run

    def both(f: Attention) -> Callable[[], object]:
        return lambda: torch.autograd.grad(f(*at), at, g)

    errors = {name: error(name, f, at, causal) for name, f in timed.items()}
    alone = time_interleaved(
        {name: forward(f) for name, f in timed.items()}, rounds=ROUNDS, warmup=1
    )
    whole = time_interleaved({name: both(f) for name, f in timed.items()}, rounds=ROUNDS, warmup=1)
    return [
        {
            "name": name,
            "n": n,
            "causal": causal,
            "error": errors[name],
            **times("forward", alone, name),
            **times("forward_backward", whole, name),
        }
        for name in timed
    ]


def times(what: str, timings: Timings, name: str) -> dict[str, float]:
    return {
        f"{what}_ms": 1e3 * timings.median(name),
        f"{what}_times_sdpa": 1.0 / timings.ratio(name, PEER),
    }


def main() -> None:
    torch.set_num_threads(THREADS)
    rows = []
    print(f"{'':26s}{'forward':>12s}{'x sdpa':>8s}{'fwd+bwd':>12s}{'x sdpa':>8s}{'error':>10s}")
    for n in LENGTHS:
        for causal in (False, True):
            print(f"n = {n}, {'causal' if causal else 'all keys'}")
            for row in measure(n, causal):
                rows.append(row)
                print(
                    "  {name:24s}{forward_ms:10.1f}ms{forward_times_sdpa:8.2f}"
                    "{forward_backward_ms:10.1f}ms{forward_backward_times_sdpa:8.2f}"
                    "{error:10.1e}".format(**row),
                    flush=True,
                )
    print(f"written to {record('attention_cpu', rows, ['entmax'])}")


if __name__ == "__main__":
    main()
