"""Experts of a layer on a CPU: segments of sorted tokens beside torch's grouped product.

Float32, one thread. "segments" is ``fenchel.model.mlp.MixtureOfExperts``; "grouped_mm" the same
with ``torch.nn.functional.grouped_mm`` for its three products, which has no forward-mode
derivative; "one_by_one" takes every expert out of its parameter by its number and adds its tokens
to the result. Outputs are compared before anything is timed.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

from benchmarks.harness import record, time_interleaved
from fenchel.model import ModelConfig
from fenchel.model.initialisation import initialise
from fenchel.model.mlp import MixtureOfExperts

SHAPES = ((1, 256, 128, 64, 8), (64, 256, 128, 64, 8), (1024, 256, 128, 64, 8))
"""Tokens, width, width inside, experts, experts per token."""
ROUNDS = 5


class Grouped(MixtureOfExperts):
    """Products of all experts in one call."""

    def _experts(self, x_NM: Tensor, w_Nk: Tensor, expert_Nk: Tensor) -> Tensor:
        assert self.gate is not None
        order = expert_Nk.flatten().argsort(stable=True)
        ends = expert_Nk.flatten().bincount(minlength=len(self.up)).cumsum(0).int()
        rows = x_NM[order // self.per_token]
        wide = silu(grouped_mm(rows, self.gate.mT, offs=ends))
        wide = wide * grouped_mm(rows, self.up.mT, offs=ends)
        y_NkM = grouped_mm(wide, self.down.mT, offs=ends)[order.argsort()].view(*w_Nk.shape, -1)
        return (w_Nk.unsqueeze(-1) * y_NkM).sum(1)


class OneByOne(MixtureOfExperts):
    """Every expert by its number."""

    def _experts(self, x_NM: Tensor, w_Nk: Tensor, expert_Nk: Tensor) -> Tensor:
        assert self.gate is not None
        y_NM = torch.zeros_like(x_NM)
        for e in range(len(self.up)):
            rows, at = (expert_Nk == e).nonzero(as_tuple=True)
            if len(rows):
                part = self._expert(x_NM[rows], self.gate[e], self.up[e], self.down[e], *3 * [None])
                y_NM = y_NM.index_add(0, rows, w_Nk[rows, at].unsqueeze(-1) * part)
        return y_NM


def measure(N: int, M: int, F: int, X: int, k: int) -> dict[str, object]:
    config = ModelConfig(
        vocabulary=8, width=M, hidden=F, experts=X, experts_per_token=k, initial="normal"
    )
    kinds = {"segments": MixtureOfExperts, "grouped_mm": Grouped, "one_by_one": OneByOne}
    layers = {name: kind(config).eval() for name, kind in kinds.items()}
    initialise(layers["segments"], config, torch.Generator().manual_seed(0))
    for layer in layers.values():
        layer.load_state_dict(layers["segments"].state_dict())
    x = torch.randn(1, N, M, generator=torch.Generator().manual_seed(1))
    outputs = [layer(x).detach() for layer in layers.values()]
    error = max(float((y - outputs[0]).abs().max()) for y in outputs)
    if error > 1e-5:
        raise AssertionError(f"the outputs differ by {error}")

    def forward(layer: MixtureOfExperts) -> object:
        with torch.no_grad():
            return layer(x)

    def both(layer: MixtureOfExperts) -> object:
        return torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))

    row: dict[str, object] = {"tokens": N, "width": M, "hidden": F, "experts": X, "per_token": k}
    for what, run in (("forward", forward), ("forward_backward", both)):
        contenders = {name: partial(run, layer) for name, layer in layers.items()}
        times = time_interleaved(contenders, rounds=ROUNDS, warmup=1)
        row |= {f"{what}_{name}_ms": round(1e3 * times.median(name), 3) for name in layers}
    return row


def main() -> None:
    torch.set_num_threads(1)
    rows = [measure(*shape) for shape in SHAPES]
    for row in rows:
        print(row)
    print(f"written to {record('experts', rows)}")


if __name__ == "__main__":
    main()
