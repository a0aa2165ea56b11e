"""Sensitivity on a CPU: our exact constant and bounds beside the dense way and published bounds.

Tokens have length sqrt(d), weights are normal with variance 1/d, and scores get the standard
deviation ``scale``. Every bound is a multiple of the true norm; below 1 would be a violation, and
ends the run.

    point   jacrev and a singular value decomposition against spectral_norm, timed in turn
    bounds  Castin (ball, data), generic, Yudin, the covariance bound (cheap, full)
    worst   the same on the adversarial families
    ball    both sides of a certificate, with Castin's ball bound over the same lower end
    rows    a choice's sensitivity of every row against the time of the row maxima
    scale   what the score scale does to entropy, largest weight and sensitivity
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev

from benchmarks.harness import record, time_interleaved
from fenchel.attention import Causal, Prior
from fenchel.choice import Entmax, Softmax
from fenchel.sensitivity import bounds, certify, self_attention_jacobian, spectral_norm, witness
from fenchel.sensitivity.layers import SelfAttention

THREADS = 2
Row = dict[str, Any]
Weights = tuple[Tensor, Tensor, Tensor]
POINTS = [(32, 8), (64, 8), (128, 8), (256, 8)]
GRID = [
    (8, 8, 1.0),
    (32, 8, 0.3),
    (64, 16, 3.0),
    (256, 16, 1.0),
    (512, 32, 0.3),
    (512, 32, 1.0),
    (512, 32, 10.0),
]
CAUSAL = [(64, 16, 0.3), (256, 16, 3.0), (512, 32, 1.0)]
BALLS = [(16, 8, 0.3), (16, 8, 1.0), (16, 8, 3.0), (64, 8, 1.0), (64, 16, 3.0)]
SHARES = (1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0)


def instance(
    n: int, d: int, seed: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Weights]:
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, dtype=dtype, generator=g)
    X = X / X.norm(dim=-1, keepdim=True) * math.sqrt(d)
    W = [torch.randn(d, d, dtype=dtype, generator=g) / math.sqrt(d) for _ in range(3)]
    return X, (W[0], W[1], W[2])


def point() -> Iterator[Row]:
    """The spectral norm at a point by both methods."""
    for n, d in POINTS:
        X, W = instance(n, d, 0)
        g = torch.Generator().manual_seed(0)

        def plain(X: Tensor, W: Weights = W, d: int = d) -> Tensor:
            q, k, v = (X @ w for w in W)
            return torch.softmax(q @ k.mT / math.sqrt(d), -1) @ v

        def dense(X: Tensor = X, size: int = n * d) -> Tensor:
            return torch.linalg.svd(jacrev(plain)(X).reshape(size, size))[1][0]

        def ours(X: Tensor = X, W: Weights = W, g: torch.Generator = g) -> Tensor:
            return spectral_norm(self_attention_jacobian(X, *W), generator=g).lower

        sigma = spectral_norm(self_attention_jacobian(X, *W), generator=g)
        times = time_interleaved({"dense": dense, "ours": ours}, rounds=9, warmup=2)
        yield {
            "n": n,
            "d": d,
            "dense_s": times.median("dense"),
            "ours_s": times.median("ours"),
            "times_as_fast": times.ratio("ours", "dense"),
            "quartiles": times.spread("ours", "dense"),
            "difference": float(sigma.lower / dense() - 1),
            "iterations": sigma.iterations,
            "bracket": float(sigma.ratio - 1),
        }


def compared(X: Tensor, W: Weights, scale: float, prior: Prior | None) -> Row:
    """Every bound as a multiple of the true norm."""
    n, radius = len(X), float(X.norm(dim=-1).amax())
    J = self_attention_jacobian(X, *W, prior=prior, scale=scale)
    truth = spectral_norm(J, tol=1e-6, generator=torch.Generator().manual_seed(0))
    settings: Row = {"prior": prior, "scale": scale}
    values = {
        "castin": bounds.castin(*W, n=n, radius=radius, scale=scale),
        "castin_at": bounds.castin_at(X, *W, scale=scale),
        "generic": bounds.generic(X, *W, **settings),
        "yudin": bounds.yudin(X, *W, **settings),
        "covariance_cheap": bounds.covariance(X, *W, **settings, cheap=True),
        "covariance": bounds.covariance(X, *W, **settings),
    }
    ratios = {name: float(bound / truth.lower) for name, bound in values.items()}
    if min(ratios.values()) < 1 - 1e-12:
        raise SystemExit(f"a bound is below the truth: {ratios}")
    return {"sigma": float(truth.lower), "iterations": truth.iterations, **ratios}


def grid() -> Iterator[Row]:
    """Random tokens, full and causal."""
    for prior, sizes in ((None, GRID), (Causal(), CAUSAL)):
        for n, d, scale in sizes:
            X, W = instance(n, d, 0)
            row = compared(X, W, scale / math.sqrt(d), prior)
            yield {"mask": "causal" if prior else "full", "n": n, "d": d, "scale": scale, **row}


def worst() -> Iterator[Row]:
    """The families that reach sqrt(n)."""
    eye = torch.eye(4, dtype=torch.float64)
    for family, n, radius in (("minus", 64, 4.0), ("minus", 1024, 2.0), ("plus", 256, 4.0)):
        W = (-eye if family == "minus" else eye, eye, eye)
        X = witness.adversarial(*W, n, radius, family=family, score_scale=1.0).X
        yield {"family": family, "n": n, "radius": radius, **compared(X, W, 1.0, None)}


def balls() -> Iterator[Row]:
    """The five instances, over token balls of growing radius."""
    for n, d, scale in BALLS:
        for seed in (0, 1):
            X, W = instance(n, d, seed)
            layer = SelfAttention(*W, scale=scale / math.sqrt(d))
            for share in SHARES:
                radius = share * math.sqrt(d)
                g = torch.Generator().manual_seed(0)
                certificate = certify(layer, X, radius, "token", steps=60, restarts=1, generator=g)
                far = bounds.castin(
                    *W, n=n, radius=math.sqrt(d) + radius, scale=scale / math.sqrt(d)
                )
                yield {
                    "n": n,
                    "d": d,
                    "scale": scale,
                    "seed": seed,
                    "share": share,
                    "lower": certificate.lower,
                    "ratio": certificate.ratio,
                    "castin": float(far) / certificate.lower,
                }


def rows() -> Iterator[Row]:
    """All rows of a block of 128 queries on 32768 keys."""
    g = torch.Generator().manual_seed(0)
    z = torch.randn(128, 32768, generator=g)
    for choice in (Softmax(), Entmax(1.5)):
        p = choice.weights(z)
        times = time_interleaved(
            {
                "maxima": lambda p=p: p.amax(-1),
                "weights": lambda choice=choice: choice.weights(z),
                "exact": lambda p=p, choice=choice: choice.sensitivity(p),
                "closed form": lambda p=p, choice=choice: bounds.row(choice, p),
            },
            rounds=5,
        )
        yield {
            "choice": str(choice),
            **{f"{name}_s": times.median(name) for name in times.seconds},
            "over_maxima": 1 / times.ratio("exact", "maxima"),
            "over_weights": 1 / times.ratio("exact", "weights"),
        }


def collapse() -> Iterator[Row]:
    """64 keys, with and without 1 / sqrt(width)."""
    for width in (16, 64, 256, 1024):
        g = torch.Generator().manual_seed(0)
        q = torch.randn(400, 1, width, dtype=torch.float64, generator=g)
        k = torch.randn(400, 64, width, dtype=torch.float64, generator=g)
        z = (q @ k.mT).squeeze(1)
        row: Row = {"width": width}
        for name, scale in (("raw", 1.0), ("scaled", width**-0.5)):
            p = Softmax().weights(scale * z)
            row[f"{name}_entropy"] = float(-torch.special.xlogy(p, p).sum(-1).mean())
            row[f"{name}_largest"] = float(p.amax(-1).mean())
            row[f"{name}_sensitivity"] = float(Softmax().sensitivity(p).median())
        yield row


def show(name: str, rows: list[Row]) -> None:
    print(f"\n{name}")
    print("  ".join(f"{key:>16}" for key in rows[0]))
    for row in rows:
        print("  ".join(_cell(value) for value in row.values()))


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:16.4g}"
    if isinstance(value, tuple):
        return f"{'/'.join(f'{part:.3g}' for part in value):>16}"
    return f"{value!s:>16}"


def main() -> None:
    torch.set_num_threads(THREADS)
    records: list[Row] = []
    tables = {
        "point": point,
        "bounds": grid,
        "worst": worst,
        "ball": balls,
        "rows": rows,
        "scale": collapse,
    }
    for name, table in tables.items():
        table_rows = list(table())
        show(name, table_rows)
        records += [{"table": name, **row} for row in table_rows]
    print(f"\n{record('sensitivity_cpu', records)}")
