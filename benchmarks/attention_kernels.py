"""Entmax attention on a GPU beside softmax and its rivals: time, memory, error and sparsity.

A case is a head width D, a number of tokens n and a kind of scores. Causal, bfloat16, n * H * D
constant, so that a call fills the chip:

    near-uniform    0.1 of normal scores: every tile holds weight
    normal          q and k normal: a few tens of keys per query, scattered over all tiles
    clusters 2..7   segments of 256 keys and of 256 queries around one of 2, 4 or 7 centres: about
                    1/2, 1/4, 1/7 of the tiles hold weight, and these evenly

Every output is first compared with the definition in float64 on 64 rows of one head. Then all
contenders run in turn in one process (harness.py), CALLS calls in a row: forward alone, forward and
backward, then ours with the derivative along tangents of q, k and v beside FLASH forward. A row has
the milliseconds of each, the ratio to ours, dense-equivalent TFLOP/s (4 n^2 D per head, halved; 3.5
times that with the backward pass), the memory above the inputs, and the part of the tiles of 128 x
64 scores that ours keeps. AdaSplash-2 is timed if it is installed; it tunes itself for every
length, which takes a minute.

    python -m benchmarks attention_kernels            4,096, 16,384, 65,536 tokens, D = 64, 128
    python -m benchmarks attention_kernels --quick    16,384 tokens, D = 64, no flex, no tangents
"""

import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness import record, time_interleaved
from fenchel.attention import Causal, attend, attend_jvp
from fenchel.choice import Entmax
from fenchel.kernels.band import Band
from fenchel.kernels.entmax_attention import attend_entmax

TOKENS = 1 << 14
WIDTH = 1024
"""H * D."""
ROUNDS, CALLS = 7, 5
SLICE = 64
"""Rows that are compared with float64."""
KINDS = ("near-uniform", "normal", "clusters 2", "clusters 4", "clusters 7")
PASSES = {"forward": 1.0, "forward+backward": 3.5, "forward+tangent": 3.0}
"""Products of T x S x D by those of a forward pass."""
CAUSAL = Band(1 << 30, 0)
SEGMENT = 256


class Case(NamedTuple):
    """One shape and one kind of scores."""

    D: int
    n: int
    kind: str


def draw(case: Case) -> list[Tensor]:
    """q, k, v and the gradient of the output, (B, H, n, D)."""
    D, n, kind = case
    generator = torch.Generator("cuda").manual_seed(0)
    B, H = max(1, TOKENS // n), WIDTH // D

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    q, k, v, g = (normal(B, H, n, D) for _ in range(4))
    if kind == "near-uniform":
        q *= 0.1
    elif kind.startswith("clusters"):
        count = int(kind.split()[1])
        centres = 1.25 * (64 / D) ** 0.25 * normal(B, H, count, D).sign()

        def around() -> Tensor:
            shape = (B, H, n // SEGMENT)
            own = torch.randint(count, shape, device="cuda", generator=generator)
            index = own.repeat_interleave(SEGMENT, 2)[..., None].expand(B, H, n, D)
            return centres.gather(2, index)

        q, k = around() + 0.2 * q, around() + 0.2 * k
    return [x.bfloat16() for x in (q, k, v, g)]


def contenders() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Attention by name; softmax by torch's kernels, entmax by ours and by AdaSplash-2."""

    def by_torch(kernel: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(kernel):
                return scaled_dot_product_attention(q, k, v, is_causal=True)

        return softmax

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, choice=Entmax(1.5), prior=Causal(), backend="triton")

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, prior=Causal(), backend="flex")

    found = {
        "ours": ours,
        "flash": by_torch(SDPBackend.FLASH_ATTENTION),
        "cudnn": by_torch(SDPBackend.CUDNN_ATTENTION),
        "flex": flex,
    }
    if find_spec("adasplash") is None:
        print("adasplash is not installed: AdaSplash-2 is left out")
        return found
    from adasplash import adasplash  # type: ignore[import-not-found]

    def rival(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = adasplash(q, k, v, is_causal=True)
        return out

    return {**found, "adasplash": rival}


def error(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """The relative error of the last rows of the first head under entmax-1.5."""
    one = [x[:1, :1].double() for x in (q[:, :, -SLICE:], k, v)]
    exact = attend(*one, choice=Entmax(1.5), prior=Causal(), backend="reference")
    return float((out[:1, :1, -SLICE:].double() - exact).norm() / exact.norm())


def kept(q: Tensor, k: Tensor, v: Tensor) -> float:
    """The part of the tiles on or below the diagonal that hold weight."""
    _, saved = attend_entmax(q, k, v, 1.5, q.shape[-1] ** -0.5, CAUSAL)
    rows, columns = saved.hits.shape[2:]
    each = torch.arange(1, rows + 1, device="cuda") * columns / rows
    return float(saved.hits.sum() / (each.ceil().sum() * saved.hits[..., 0, 0].numel()))


def measure(case: Case, names: Sequence[str], passes: Sequence[str]) -> list[dict[str, Any]]:
    """A row per pass."""
    q, k, v, g = draw(case)
    with torch.no_grad():
        part = kept(q, k, v)
    for x in (q, k, v):
        x.requires_grad_()
    maps = {name: f for name, f in contenders().items() if name in names}
    errors, memory = {}, {}
    calls: dict[str, Callable[[], object]] = {}
    for name, f in maps.items():

        def both(f: Callable[..., Tensor] = f) -> object:
            return torch.autograd.grad(f(q, k, v), (q, k, v), g)

        try:
            out = f(q, k, v)
            both()
        except Exception as refusal:  # a rival that cannot take the shape must not end the run
            print(f"  {name} does not run: {str(refusal).strip().splitlines()[-1][:90]}")
            continue
        if name in ("ours", "adasplash"):
            errors[f"{name}_error"] = error(out.detach(), *(x.detach() for x in (q, k, v)))
        del out
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        both()
        memory[f"{name}_MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        calls[name] = both

    def forward(f: Callable[..., Tensor]) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                return f(q, k, v)

        return run

    def with_tangent() -> object:
        with torch.no_grad():
            return attend_jvp((q, k, v), (k, q, g), choice=Entmax(1.5), prior=Causal())

    flop = 2.0 * case.n**2 * WIDTH * max(1, TOKENS // case.n)
    timed_by_pass: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {name: forward(maps[name]) for name in calls},
        "forward+backward": calls,
        "forward+tangent": {"ours": with_tangent, "flash": forward(maps["flash"])},
    }
    rows = []
    for name in passes:
        timed = timed_by_pass[name]
        times = time_interleaved(timed, rounds=ROUNDS, warmup=2, calls=CALLS)
        work = PASSES[name] * flop
        row = {
            **case._asdict(),
            "pass": name,
            "kept": part,
            **errors,
            **(memory if name == "forward+backward" else {}),
            **{f"{each}_ms": 1e3 * times.median(each) for each in timed},
            **{f"{each}_TFLOPs": 1e-12 * work / times.median(each) for each in timed},
            **{f"{each}_by_ours": times.ratio("ours", each) for each in timed if each != "ours"},
        }
        rows.append(row)
        shown = "  ".join(f"{each} {row[f'{each}_ms']:.2f}" for each in timed)
        print(
            f"  {case.D:4d} {case.n:6d}  {case.kind:13s} {name:17s} kept {part:.2f}  ms: {shown}",
            flush=True,
        )
    return rows


def main(options: Sequence[str] = ()) -> None:
    """All cases, or with --quick those that decide how entmax compares with softmax."""
    if not torch.cuda.is_available():
        print("attention_kernels needs a GPU")
        return
    quick = "--quick" in options
    lengths, widths = ((1 << 14,), (64,)) if quick else ((1 << 12, 1 << 14, 1 << 16), (64, 128))
    kinds = [kind for kind in KINDS if kind != "normal"] if quick else KINDS
    passes = ("forward", "forward+backward") if quick else tuple(PASSES)
    names = [name for name in contenders() if name != "flex" or not quick]
    packages = [name for name in ("triton", "adasplash") if find_spec(name)]
    began, rows = time.perf_counter(), []
    for n, D, kind in product(lengths, widths, kinds):
        rows += measure(Case(D, n, kind), names, passes)
        path = record("attention_kernels" + "_quick" * quick, rows, packages)
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - began:.0f} s, {path}")


if __name__ == "__main__":
    main()
