"""What steering costs per token on a GPU: a constant direction, and a budget per token.

A Llama of 1.1 thousand million random weights in bfloat16, as in decode.py; ``generate`` from
prompts of 32, not steered, with a direction after one layer and after three, and with a direction
under a budget per token, which reads an unsteered row beside each. In turn (harness.py).

    ms_per_step    from the time of NEW tokens less that of one
    cost           of a step above one that is not steered
    cost_of_call   the same for whole calls, the median over rounds
"""

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch

from benchmarks.decode import LARGE, NEW, PROMPT
from benchmarks.harness import record, time_interleaved
from benchmarks.train_cpu import draw
from fenchel.generation import Steering, generate
from fenchel.model import Transformer

ROWS = (1, 8, 32)
ROUNDS = 5
BUDGET = 0.1
DRAW: dict[str, Any] = {"temperature": 0.8, "seed": 1}


def main(options: Sequence[str] = ()) -> None:  # noqa: ARG001
    """Time all of them and write results/steering_cost.json."""
    if not torch.cuda.is_available():
        print("steering_cost needs a GPU")
        return
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Transformer(LARGE).to(torch.bfloat16).eval()
    for p in model.parameters():  # a new model has matrices of zeros
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    direction = torch.randn(LARGE.width, device="cuda") / 8
    steerings = {
        "none": None,
        "one layer": Steering(vectors={11: direction}),
        "three layers": Steering(vectors={6: direction, 11: direction, 16: direction}),
        "budget": Steering(vectors={11: direction}, budget=BUDGET),
    }
    lines: list[dict[str, Any]] = []
    for rows in ROWS:
        prompts = draw(LARGE.vocabulary, rows, PROMPT).to("cuda")

        # A model keeps one recorded step, and another kind of call would replace it.
        calls = {
            name: partial(generate, deepcopy(model), prompts, steer=steering, **DRAW)
            for name, steering in steerings.items()
        }
        whole, first = (
            time_interleaved(
                {name: partial(call, max_new_tokens=new) for name, call in calls.items()},
                rounds=ROUNDS,
                warmup=1,
            )
            for new in (NEW, 1)
        )
        del calls
        for name in steerings:
            ms = 1e3 * (whole.median(name) - first.median(name)) / (NEW - 1)
            plain = 1e3 * (whole.median("none") - first.median("none")) / (NEW - 1)
            line = {
                "rows": rows,
                "steering": name,
                "ms_per_step": round(ms, 4),
                "cost": round(ms / plain - 1.0, 4),
                "cost_of_call": round(1.0 / whole.ratio(name, "none") - 1.0, 4),
            }
            print("  ".join(f"{key} {value}" for key, value in line.items()), flush=True)
            lines.append(line)
            record("steering_cost", lines)


if __name__ == "__main__":
    main()
