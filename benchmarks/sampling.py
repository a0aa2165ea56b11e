"""One draw per row under top-p on a CPU: without sorting the vocabulary, and by sorting it.

32 rows of normal logits, whose standard deviation makes them flat (1), ordinary (3) or peaky (6),
over a vocabulary of 8,192 and of 50,257; float32, one thread, time of the CPU. Contenders are
``draw`` of ``fenchel.generation``, the same restriction and the same random numbers by sorting,
transformers' processor followed by torch.multinomial, and the largest logit. Before anything is
timed, ours and the one that sorts have to draw the same tokens with the same seed.
"""

from collections.abc import Callable
from time import process_time

import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from benchmarks.harness import Timings, record
from fenchel.generation.sampling import RowSampling, Sampling, draw, exponentials

ROWS, ROUNDS, DRAWS = 32, 9, 20
VOCABULARIES, STDS = (8192, 50257), (1.0, 3.0, 6.0)
TOP_P = 0.95


def by_draw(logits_BV: Tensor, seed: int) -> Tensor:
    """Ours: token ``seed`` of rows whose seeds are their numbers."""
    settings = RowSampling.of([(Sampling(top_p=TOP_P), row) for row in range(len(logits_BV))])
    return draw(logits_BV, settings, torch.full((len(logits_BV),), seed))


def by_sorting(logits_BV: Tensor, seed: int) -> Tensor:
    """The same draw: the fewest largest probabilities whose sum reaches top-p stay."""
    B, V = logits_BV.shape
    ordered_BV, order_BV = logits_BV.softmax(-1).sort(dim=-1, descending=True, stable=True)
    reached_BV = ordered_BV.cumsum(-1, dtype=torch.float64)
    before_BV = reached_BV - ordered_BV
    kept_BV = ordered_BV * (before_BV < TOP_P * reached_BV[:, -1:])
    e_BV = exponentials(torch.arange(B), torch.full((B,), seed), V).gather(1, order_BV)
    return order_BV.gather(1, (kept_BV / e_BV).argmax(-1, keepdim=True)).squeeze(-1)


def by_transformers(logits_BV: Tensor, seed: int) -> Tensor:
    """Logits outside of the restriction become -inf, then a draw by torch."""
    ids = torch.zeros(len(logits_BV), 0, dtype=torch.long)  # which it does not read
    p_BV = TopPLogitsWarper(TOP_P)(ids, logits_BV).softmax(-1)
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(p_BV, 1, generator=generator).squeeze(-1)


CONTENDERS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "ours": by_draw,
    "sorted": by_sorting,
    "transformers": by_transformers,
    "greedy": lambda z, _: z.argmax(-1),
}


def measure(V: int, std: float) -> dict[str, object]:
    """Milliseconds of the CPU per draw of all rows, the contenders in turn."""
    z_BV = std * torch.randn(ROWS, V, generator=torch.Generator().manual_seed(0))
    for seed in range(DRAWS):
        if not torch.equal(by_draw(z_BV, seed), by_sorting(z_BV, seed)):
            raise AssertionError(f"the draws with seed {seed} differ")
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for seed in range(ROUNDS):
        for name, contender in CONTENDERS.items():
            started = process_time()
            contender(z_BV, seed)
            seconds[name].append(process_time() - started)
    times = Timings(seconds)
    row: dict[str, object] = {"rows": ROWS, "vocabulary": V, "std": std, "top_p": TOP_P}
    row |= {f"{name}_ms": 1e3 * times.median(name) for name in CONTENDERS}
    row["times_faster_than_sorted"] = times.ratio("ours", "sorted")
    row["times_faster_than_transformers"] = times.ratio("ours", "transformers")
    return row


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    print(f"{'vocabulary':>10} {'std':>4}" + "".join(f"{name:>15}" for name in CONTENDERS))
    for V in VOCABULARIES:
        for std in STDS:
            row = measure(V, std)
            rows.append(row)
            cells = "".join(f"{row[f'{name}_ms']:12.2f} ms" for name in CONTENDERS)
            print(f"{V:10,} {std:4.0f}{cells}", flush=True)
    print(f"written to {record('sampling_cpu', rows, ['transformers'])}")


if __name__ == "__main__":
    main()
