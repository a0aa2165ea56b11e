"""Rows of 1.5-entmax and sparsemax on a CPU, beside the entmax package and torch's softmax.

Float32, two threads, 1024 rows of 4096 normal scores whose standard deviation makes them near
uniform (0.1), ordinary (1) or peaky (3). Before anything is timed the weights are compared with
bisection in float64, and the gradients with the peer's.
"""

from collections.abc import Callable

import entmax
import torch
from torch import Tensor

from benchmarks.harness import record, time_interleaved
from fenchel.choice import Choice, Entmax, Softmax, Sparsemax
from fenchel.choice.entmax_solver import bisect, tsallis_weights

THREADS = 2
ROWS, K, ROUNDS = 1024, 4096, 9
Rows = Callable[[Tensor], Tensor]
PEERS: dict[str, tuple[float, Choice, Rows]] = {
    "entmax 1.5": (1.5, Entmax(1.5), lambda x: entmax.entmax15(x, -1)),
    "sparsemax": (2.0, Sparsemax(), lambda x: entmax.sparsemax(x, -1)),
}


def error(f: Rows, x: Tensor, alpha: float) -> float:
    """The largest error of a weight in the first 64 rows."""
    exact = x[:64].detach().double()
    y = (alpha - 1.0) * (exact - exact.amax(-1, keepdim=True))
    return float((f(x[:64]).double() - tsallis_weights(y + bisect(y, alpha), alpha)).abs().max())


def measure(name: str, std: float) -> dict[str, object]:
    alpha, choice, peer = PEERS[name]
    generator = torch.Generator().manual_seed(0)
    x = (std * torch.randn(ROWS, K, generator=generator)).requires_grad_()
    g = torch.randn(ROWS, K, generator=generator)
    maps = {"ours": choice.weights, "peer": peer, "softmax": Softmax().weights}
    wrong = error(choice.weights, x, alpha)
    slopes = [torch.autograd.grad(f(x), x, g)[0] for f in (choice.weights, peer)]
    difference = float((slopes[0] - slopes[1]).abs().max())
    if wrong > 2e-6 or difference > 1e-3:  # the peer's weight at the edge may be 0 or not
        raise AssertionError(f"{name} is wrong by {wrong} and its gradient by {difference}")

    def forward(f: Rows) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                return f(x)

        return run

    def both(f: Rows) -> Callable[[], object]:
        return lambda: torch.autograd.grad(f(x), x, g)

    row: dict[str, object] = {"map": name, "std": std, "rows": ROWS, "K": K, "error": wrong}
    for what, kind in (("forward", forward), ("forward_backward", both)):
        times = time_interleaved(
            {contender: kind(f) for contender, f in maps.items()}, rounds=ROUNDS, warmup=2
        )
        for contender in maps:
            row[f"{what}_{contender}_ms"] = 1e3 * times.median(contender)
        row[f"{what}_times_faster"] = times.ratio("ours", "peer")
        row[f"{what}_softmaxes"] = 1.0 / times.ratio("ours", "softmax")
    return row


def main() -> None:
    torch.set_num_threads(THREADS)
    rows = []
    print(f"{'':18s}{'ours':>9s}{'peer':>10s}{'faster':>8s}{'softmaxes':>11s}   forward, then both")
    for name in PEERS:
        for std in (0.1, 1.0, 3.0):
            row = measure(name, std)
            rows.append(row)
            for what in ("forward", "forward_backward"):
                print(
                    f"{name:12s}{std:4.1f}  {row[what + '_ours_ms']:7.1f}ms"
                    f"{row[what + '_peer_ms']:8.1f}ms{row[what + '_times_faster']:7.1f}x"
                    f"{row[what + '_softmaxes']:11.1f}",
                    flush=True,
                )
    print(f"written to {record('entmax_rows_cpu', rows, ['entmax'])}")


if __name__ == "__main__":
    main()
