"""Attention of one query per row over a long cache, on a GPU: bytes per second of every kernel.

``BATCH`` rows, ``HEADS`` query heads on ``GROUPS`` heads of keys, bfloat16. Every output is
compared with float64 on two rows before it is timed; torch's fused attention (SDPA) is beside it.
Inputs are larger than the L2 cache.

    us             median over replays of a graph of several calls, by their number
    of_read        the bytes that a call must touch over its time, as a share of the bandwidth of a
                   sum over two gigabytes in the same process: keys and values, for entmax the
                   keys, the scores written, and the active pages of scores and values
    to_softmax     its time by that of softmax over the same cache in bfloat16
    pages          share of the pages of values that hold support of any query of a group

The scores of normal keys have standard deviation 1, where every page holds support of entmax. In
``clustered`` keys one page in ten points along the mean query of its group.

    python -m benchmarks decode_kernels            32k, 128k and 256k tokens, heads of 64 and 128
    python -m benchmarks decode_kernels --quick    32k and 128k tokens, heads of 128
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness import record
from fenchel.choice import Entmax, Softmax
from fenchel.generation.kv_cache import quantise_int8

BATCH, HEADS, GROUPS = 8, 64, 8
LENGTHS = (32_768, 131_072, 262_144)
WIDTHS = (64, 128)


def median_us(call: Callable[[], object]) -> float:
    """Median microseconds of a call in a CUDA graph, as generation makes it: no host time."""
    from triton.testing import do_bench_cudagraph

    return 1e3 * float(do_bench_cudagraph(call, rep=60, return_mode="median"))


def read_bandwidth() -> float:
    """Bytes per second of a sum over two gigabytes."""
    x = torch.rand(2**9, 2**20, device="cuda")
    return x.numel() * x.element_size() / (median_us(lambda: x.sum(1)) * 1e-6)


class Cache:
    """Keys and values of ``n`` tokens, and the product of the newest, in the last slot."""

    def __init__(self, n: int, D: int, *, clustered: bool) -> None:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        self.n, self.D = n, D
        self.qkv = normal(BATCH, (HEADS + 2 * GROUPS) * D)
        self.keys, self.values = normal(BATCH, GROUPS, n, D), normal(BATCH, GROUPS, n, D)
        if clustered:
            q = self.qkv[:, : HEADS * D].view(BATCH, GROUPS, HEADS // GROUPS, D)
            mean = q.float().mean(2, keepdim=True)
            pages = torch.rand(BATCH, GROUPS, -(-n // 64), 1, device="cuda") < 0.1
            chosen = pages.repeat_interleave(64, 2)[:, :, :n]
            unit = (6.0 * mean / mean.norm(dim=-1, keepdim=True)).bfloat16()
            self.keys.mul_(0.3).add_(torch.where(chosen, unit, 0.0))
            q.mul_(0.3).add_(3.0 * mean.bfloat16())

    def in_order(self, b: int, int8: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a row in float64, the newest in its slot."""
        q, k, v = self.qkv[b].split([x * self.D for x in (HEADS, GROUPS, GROUPS)])
        stored = []
        for cached, new in ((self.keys[b], k), (self.values[b], v)):
            x = cached.clone()
            x[:, -1] = new.view(GROUPS, self.D)
            n, s = quantise_int8(x)
            stored.append(n.double() * s if int8 else x.double())
        return q.view(GROUPS, -1, self.D).double(), stored[0], stored[1]


def rows(n: int, D: int, bandwidth: float) -> list[dict[str, Any]]:
    """All kernels over one length."""
    lines: list[dict[str, Any]] = []
    for clustered in (False, True):
        cache = Cache(n, D, clustered=clustered)
        softmax = _time(cache, bandwidth, lines, clustered=clustered)
        if not clustered:
            _time(cache, bandwidth, lines, int8=True, softmax=softmax)
            q = cache.qkv[:, : HEADS * D].view(BATCH, HEADS, 1, D)
            us = median_us(
                lambda q=q, cache=cache: scaled_dot_product_attention(
                    q, cache.keys, cache.values, enable_gqa=True
                )
            )
            size = cache.keys.nbytes + cache.values.nbytes
            _add(lines, n=n, D=D, kernel="SDPA", us=us, of_read=size / us / 1e-6 / bandwidth)
        _time(cache, bandwidth, lines, alpha=1.5, softmax=softmax, clustered=clustered)
        del cache
        torch.cuda.empty_cache()
    return lines


def _time(
    cache: Cache,
    bandwidth: float,
    lines: list[dict[str, Any]],
    *,
    alpha: float = 1.0,
    int8: bool = False,
    clustered: bool = False,
    softmax: float | None = None,
) -> float:
    from fenchel.kernels.decode_attention import PAGE, CacheTensors, attend_decode, padded_slots

    n, D = cache.n, cache.D
    token_B = torch.full((BATCH,), n - 1, device="cuda")
    tensors = CacheTensors(cache.keys.clone(), cache.values.clone())
    if int8:
        parts = [quantise_int8(x) for b in range(BATCH) for x in (cache.keys[b], cache.values[b])]
        (k, ks), (v, vs) = (
            (torch.stack([x for x, _ in parts[i::2]]), torch.stack([s for _, s in parts[i::2]]))
            for i in (0, 1)
        )
        del parts
        v = torch.nn.functional.pad(v.transpose(2, 3), (0, padded_slots(n) - n)).contiguous()
        tensors = CacheTensors(k, v, ks.squeeze(-1), vs.squeeze(-1))
    o = torch.full((BATCH, HEADS * D), torch.nan, device="cuda", dtype=torch.bfloat16)

    def call() -> None:
        attend_decode(cache.qkv, tensors, token_B, o, angles=None, scale=D**-0.5, alpha=alpha)

    call()
    errors, active = [], []
    for b in (0, BATCH - 1):
        q, keys, values = cache.in_order(b, int8)
        z = q @ keys.transpose(1, 2) * D**-0.5
        p = (Softmax() if alpha == 1.0 else Entmax(alpha)).weights(z)
        wanted = (p @ values).reshape(-1)
        errors.append(float((o[b].double() - wanted).norm() / wanted.norm()))
        held = torch.nn.functional.pad(p > 0, (0, -n % PAGE)).unflatten(2, (-1, PAGE))
        active.append(float(held.any(-1).any(1).double().mean()))
    us = median_us(call)
    pages = sum(active) / len(active)
    sizes = [x.nbytes for x in tensors if x is not None]
    touched = sum(sizes)
    if alpha != 1.0:
        touched = sizes[0] + pages * sizes[1] + (1 + pages) * BATCH * HEADS * n * 4
    _add(
        lines,
        n=n,
        D=D,
        kernel="softmax" if alpha == 1.0 else f"entmax {alpha:g}",
        cache="int8" if int8 else "bfloat16",
        keys="clustered" if clustered else "normal",
        error=max(errors),
        us=us,
        of_read=touched / us / 1e-6 / bandwidth,
        to_softmax=1.0 if softmax is None else us / softmax,
        pages=pages if alpha != 1.0 else 1.0,
    )
    return us


def _add(lines: list[dict[str, Any]], **line: Any) -> None:
    line = {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in line.items()}
    print("  ".join(f"{key} {value}" for key, value in line.items()), flush=True)
    lines.append(line)


def main(options: Sequence[str] = ()) -> None:
    """Check and time on a GPU; write results/decode_kernels_cuda.json."""
    if not torch.cuda.is_available():
        print("decode_kernels needs a GPU.")
        return
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s")
    quick = "--quick" in options
    lines: list[dict[str, Any]] = [{"read_bandwidth": round(bandwidth)}]
    for D, n in product((128,) if quick else WIDTHS, LENGTHS[:2] if quick else LENGTHS):
        lines += rows(n, D, bandwidth)
        path = record("decode_kernels_cuda" + "_quick" * quick, lines)
    print(path)


if __name__ == "__main__":
    main()
