"""One draw per row under top-p on a CPU: without sorting the vocabulary, and by sorting it.

32 rows of normal logits, whose standard deviation makes them flat (1), ordinary (3) or peaky (6),
over a vocabulary of 8,192 and of 50,257; float32, one thread, time of the CPU. Contenders are
``fenchel.generation``, the same restriction by sorting (``filter_probabilities``, which defines
it), transformers' processor followed by torch.multinomial, and the largest logit. Before anything
is timed, ours and the one that sorts have to draw the same tokens with the same seed.
"""

from collections.abc import Callable
from time import process_time

import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from benchmarks.harness import Timings, record
from fenchel.generation.sampling import Sampling, exponentials, filter_probabilities, sample

ROWS, ROUNDS, DRAWS = 32, 9, 20
VOCABULARIES, STDS = (8192, 50257), (1.0, 3.0, 6.0)
TOP_P = 0.95


def by_sorting(logits_BV: Tensor, generator: torch.Generator) -> Tensor:
    """The same draw from the probabilities that are left."""
    p_BV = filter_probabilities(torch.softmax(logits_BV, -1), Sampling(top_p=TOP_P))
    return p_BV.div(exponentials(p_BV, generator)).argmax(-1)


def by_transformers(logits_BV: Tensor, generator: torch.Generator) -> Tensor:
    """Logits outside of the restriction become -inf, then a draw by torch."""
    ids = torch.zeros(len(logits_BV), 0, dtype=torch.long)  # which it does not read
    p_BV = TopPLogitsWarper(TOP_P)(ids, logits_BV).softmax(-1)
    return torch.multinomial(p_BV, 1, generator=generator).squeeze(-1)


CONTENDERS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "ours": lambda z, generator: sample(z, Sampling(top_p=TOP_P), generator=generator),
    "sorted": by_sorting,
    "transformers": by_transformers,
    "greedy": lambda z, _: z.argmax(-1),
}


def measure(V: int, std: float) -> dict[str, object]:
    """Milliseconds of the CPU per draw of all rows, the contenders in turn."""
    z_BV = std * torch.randn(ROWS, V, generator=torch.Generator().manual_seed(0))
    for seed in range(DRAWS):
        drawn = [
            CONTENDERS[name](z_BV, torch.Generator().manual_seed(seed))
            for name in ("ours", "sorted")
        ]
        if not torch.equal(*drawn):
            raise AssertionError(f"the draws with seed {seed} differ")
    generator = torch.Generator().manual_seed(1)
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(ROUNDS):
        for name, contender in CONTENDERS.items():
            started = process_time()
            contender(z_BV, generator)
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
