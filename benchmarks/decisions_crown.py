"""Decision certificates beside CROWN and alpha-CROWN of auto_LiRPA, at equal positions.

    python -m benchmarks decisions_crown --sources FOLDER DIR ...

The package index has no auto_LiRPA for this torch; FOLDER holds its sources (0.7.1 was used) and
the plain packages that it imports. The network is written in what it can bound: 1 / sqrt as a
reciprocal, rotations as products, SiLU by a sigmoid, the mask as -30. It bounds the margins over
the RIVALS nearest tokens, fenchel those over all. Every bound of it is compared with sampled
points of its ball before it counts. alpha-CROWN optimises the slopes of the last bound, with the
intermediate bounds of CROWN: those of its own end in the root of a negative number.

Radii are of all tokens as one vector, bisected to a factor of FINE; a ball in which a bound fails
counts as not certified. Seconds are processor time of one thread: of the whole search, and of the
largest certified radius alone.
"""

import math
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.decisions import LESSONS, written_out
from benchmarks.harness import record
from fenchel.sensitivity.decision import (
    DecisionBound,
    DecisionNetwork,
    _folded,
    _parts,
    certified_radii,
)
from fenchel.sensitivity.decision_attack import nearest_change
from fenchel.sensitivity.layers import GatedLayer, LinearLayer, Residual, SelfAttention

RIVALS = 5
FINE = 1.1
SAMPLES = 20
STEPS = 20  # of alpha-CROWN
CALLS = 6
METHODS = ("CROWN", "alpha-CROWN")


class Block(nn.Module):
    """A Llama block in operations that auto_LiRPA bounds, norm gains in its matrices."""

    def __init__(self, attention: Residual, mlp: Residual, n: int) -> None:
        super().__init__()
        norm, (layer,) = _parts(attention)
        assert isinstance(layer, SelfAttention)
        assert layer.rotations is not None
        assert layer.W_O is not None
        Q, K, V = (_folded(norm, W) for W in layer._weights)
        H, D, beta = len(Q), Q.shape[-1], layer.choice.beta
        assert isinstance(beta, float | int)
        sharp = beta * (D**-0.5 if layer.scale is None else layer.scale)
        out = attention.scale * layer.W_O.view(H, D, -1)
        self.q = nn.ModuleList([linear(sharp * Q[h]) for h in range(H)])
        self.k = nn.ModuleList([linear(K[h]) for h in range(H)])
        self.v = nn.ModuleList([linear(V[h] @ out[h]) for h in range(H)])
        R, at = layer.rotations[:n].float(), torch.arange(D)
        self.swapped = linear(torch.eye(D).roll(D // 2, -1))
        self.register_buffer("cos", R.diagonal(dim1=1, dim2=2).clone())
        self.register_buffer("sin", R[:, at, (at + D // 2) % D].clone())
        self.register_buffer("mask", torch.full((n, n), -30.0).triu(1))
        norm, (gated, down) = _parts(mlp)
        assert isinstance(gated, GatedLayer)
        assert isinstance(down, LinearLayer)
        self.gate = linear(_folded(norm, gated.W_G))
        self.up = linear(_folded(norm, gated.W_U))
        self.down = linear(mlp.scale * down.W)
        self.eps = norm._eps(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = normed(x, self.eps)
        for of_q, of_k, of_v in zip(self.q, self.k, self.v, strict=True):
            q, k = of_q(h), of_k(h)
            q = q * self.cos + self.swapped(q) * self.sin
            k = k * self.cos + self.swapped(k) * self.sin
            weights = torch.softmax(torch.matmul(q, k.transpose(1, 2)) + self.mask, -1)
            x = x + torch.matmul(weights, of_v(h))
        h = normed(x, self.eps)
        g = self.gate(h)
        moved: Tensor = x + self.down(g * torch.sigmoid(g) * self.up(h))
        return moved


class Margins(nn.Module):
    """The margins of the last token over ``rivals``, (1, n, d) -> (1, rivals)."""

    def __init__(self, network: DecisionNetwork, n: int, kept: int, rivals: Tensor) -> None:
        super().__init__()
        pairs = zip(network.stages[::2], network.stages[1::2], strict=True)
        self.blocks = nn.ModuleList([Block(attention, mlp, n) for attention, mlp in pairs])
        E = _folded(network.norm, network.head.W)
        self.gaps = linear(E[:, kept, None] - E[:, rivals])
        self.eps = network.norm._eps(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        margins: Tensor = self.gaps(normed(x, self.eps)[:, -1])
        return margins


def linear(W: Tensor) -> nn.Linear:
    layer = nn.Linear(*W.shape, bias=False)
    layer.weight.data = W.mT.float().contiguous()
    return layer


def normed(x: Tensor, eps: float) -> Tensor:
    return x * torch.reciprocal(torch.sqrt((x * x).mean(-1, keepdim=True) + eps))


class Peer(NamedTuple):
    model: Margins
    x: Tensor
    bounded: Any
    ball: Any

    def certifies(self, r: float, method: str) -> bool:
        """Whether all margins are positive in the ball; raises where a sampled one is below."""
        x = self.ball(self.x, r)
        try:
            low = self.bounded.compute_bounds(x=(x,), method="CROWN", bound_upper=False)[0]
            if method == "alpha-CROWN":
                between = self.bounded.save_intermediate()
                low = self.bounded.compute_bounds(
                    x=(x,), method="CROWN-Optimized", bound_upper=False, interm_bounds=between
                )[0]
        except AssertionError:  # the root of a number that is not bounded away from 0
            return False
        except RuntimeError as error:
            if "allocate" in str(error):
                raise MemoryError from error
            raise
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for _ in range(SAMPLES):
                u = torch.randn(self.x.shape, generator=generator)
                attained = self.model(self.x + r * u / u.norm())
                if not bool((attained >= low - 1e-4).all()):
                    raise RuntimeError(f"a bound of {method} at radius {r} is not one.")
        return bool((low > 0.0).all())


def largest_radius(peer: Peer, method: str, start: float) -> tuple[float, float]:
    """The largest certified radius within a factor of FINE, and the seconds of its call."""
    low, high, r, spent = 0.0, math.inf, start, 0.0
    for _ in range(CALLS):
        started = time.process_time()
        if peer.certifies(r, method):
            low, spent = r, time.process_time() - started
        else:
            high = r
        if low > 0.0 and high / low < FINE:
            break
        r = 2.0 * low if high == math.inf else math.sqrt(low * high) if low > 0.0 else high / 4.0
    return low, spent


def compare(directory: str, n: int, lirpa: Any) -> dict[str, Any]:
    """One position: the last of n tokens."""
    network, X = written_out(directory, "sotu", n)
    started = time.process_time()
    bound = DecisionBound(network, X)
    radius = certified_radii(bound, "all", [n - 1])[n - 1]
    row: dict[str, Any] = {"model": directory, "blocks": len(network.stages) // 2, "tokens": n}
    row |= {"margin": round(float(bound.rivals[-1].margins.amin()), 3)}
    row |= {"ours": radius.certified, "ours_s": round(time.process_time() - started, 2)}
    change = nearest_change(network, X, bound.rivals[-1].kept, "all")
    row["attacked"] = math.inf if change is None else float(change.norm())
    logits = network(X)[-1]
    order = logits.argsort(descending=True)
    model = Margins(network, n, int(order[0]), order[1 : RIVALS + 1]).eval()
    x = X[None].float()
    with torch.no_grad():
        exact = logits[order[0]] - logits[order[1 : RIVALS + 1]]
        assert float((model(x)[0].double() - exact).abs().amax()) < 1e-3
    optimised = {"iteration": STEPS, "early_stop_patience": STEPS, "fix_interm_bounds": True}
    options = {"sparse_intermediate_bounds": False, "optimize_bound_args": optimised}
    bounded = lirpa.BoundedModule(model, x, bound_opts=options)

    def ball(x: Tensor, r: float) -> Any:
        return lirpa.BoundedTensor(x, lirpa.PerturbationLpNorm(norm=2, eps=r))

    peer, start = Peer(model, x, bounded, ball), 0.25 * radius.certified
    for method in METHODS:
        started = time.process_time()
        try:
            found, alone = largest_radius(peer, method, start)
        except MemoryError:
            row[method] = "out of memory"
            continue
        row[method] = found
        row[f"{method}_s"] = round(time.process_time() - started, 2)
        row[f"{method}_alone_s"] = round(alone, 2)
        start = found or start
    return row


def main(options: Sequence[str] = ()) -> None:
    """Compare at each number of tokens and write results/decisions_crown_cpu.json."""
    parser = ArgumentParser(prog="python -m benchmarks decisions_crown")
    parser.add_argument("directories", nargs="*", default=[LESSONS])
    parser.add_argument("--sources", nargs="+", default=[])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4, 8])
    chosen = parser.parse_args(options)
    sys.path += chosen.sources
    torch.set_num_threads(1)
    try:
        import auto_LiRPA as lirpa
    except ImportError as error:
        print(f"decisions_crown needs the sources of auto_LiRPA (--sources FOLDER): {error}")
        return
    rows = []
    for directory in chosen.directories:
        for n in chosen.tokens:
            rows.append(compare(directory, n, lirpa))
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
            record("decisions_crown_cpu", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
