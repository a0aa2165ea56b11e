"""Attention with its tangent, and the gradients of both, on a GPU: ours beside its peers.

bfloat16, causal, 32,768 tokens of width 1024 (16 heads of 64, 8 heads of 128), in sequences of
2,048, 8,192 and 32,768. All contenders of a case run in turn in one process (harness.py), CALLS
calls in a row, after every output of ours was compared with float64 on the last rows of one head:

    tangent                output and tangent in one pass, tangents of q, k and v
    tangent of q           the same where only the queries have one
    second pass            the tangent alone, from known outputs
    gradients              of output and tangent, in q, k, v and in the three tangents
    FLASH, FLASH backward  plain attention by torch's fused kernels
    MATH                   torch.func.jvp of torch's unfused attention; to 2,048 tokens
    jvp_flash_attention    the package, in float16, if it is installed

    TFLOP/s      2 T S d per product of tiles and head, halved for the causal mask: 6 products for a
                 "tangent", 15 for the gradients (ours executes 21), 2 and 5 for FLASH
    peak_MiB     memory above the inputs during one call

The last rows are the spectral norm of one causal head (sensitivity_long.py), whose products are
these kernels in float32, over 32,768 and 131,072 tokens.

    python -m benchmarks jvp_kernels            all lengths, both widths of a head
    python -m benchmarks jvp_kernels --quick    8,192 tokens at both widths, 32,768 for the norm
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness import record, time_interleaved
from benchmarks.sensitivity_long import measure

TOKENS, WIDTH, ROUNDS, CALLS, SLICE = 32768, 1024, 10, 5, 128
LENGTHS, HEADS = (2048, 8192, 32768), (64, 128)
PRODUCTS = {
    "tangent": 6,
    "tangent of q": 4,
    "second pass": 5,
    "gradients": 15,
    "FLASH": 2,
    "FLASH backward": 5,
    "MATH": 6,
    "jvp_flash_attention": 6,
}
Call = Callable[[], object]


def inputs(n: int, d: int) -> list[Tensor]:
    """q, k, v, their tangents, and gradients of output and tangent."""
    g = torch.Generator("cuda").manual_seed(n + d)
    shape = TOKENS // n, WIDTH // d, n, d
    return [torch.randn(shape, device="cuda", generator=g).to(torch.bfloat16) for _ in range(8)]


def contenders(x: list[Tensor]) -> dict[str, Call]:
    """Every contender of a case by name."""
    from fenchel.kernels.band import Band
    from fenchel.kernels.tangent_attention import (
        Tangents,
        tangent_attention,
        tangent_attention_vjp,
    )

    q, k, v, *tangents, go, gto = x
    d, n = q.shape[-1], q.shape[-2]
    causal: dict[str, Any] = {"scale": d**-0.5, "band": Band(right=0)}
    found = tangent_attention(q, k, v, Tangents(*tangents), **causal)
    calls: dict[str, Call] = {
        "tangent": partial(tangent_attention, q, k, v, Tangents(*tangents), **causal),
        "tangent of q": partial(tangent_attention, q, k, v, Tangents(tangents[0]), **causal),
        "second pass": partial(
            tangent_attention, q, k, v, Tangents(*tangents), known=(found.o, found.lse), **causal
        ),
        "gradients": partial(
            tangent_attention_vjp, q, k, v, Tangents(*tangents), found, go, gto, **causal
        ),
        "FLASH": partial(flash, q, k, v),
        "FLASH backward": flash_backward(q, k, v, go),
    }
    if n <= 2048:
        calls["MATH"] = partial(math_jvp, (q, k, v), tuple(tangents))
    if (package := jvp_flash_attention([y.half() for y in (q, k, v, *tangents)])) is not None:
        calls["jvp_flash_attention"] = package
    return calls


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def flash_backward(q: Tensor, k: Tensor, v: Tensor, go: Tensor) -> Call:
    at = [y.detach().requires_grad_() for y in (q, k, v)]
    o = flash(*at)
    return lambda: torch.autograd.grad(o, at, go, retain_graph=True)


def math_jvp(qkv: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> object:
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        return jvp(partial(scaled_dot_product_attention, is_causal=True), qkv, tangents)


def jvp_flash_attention(x: list[Tensor]) -> Call | None:
    """Output and tangent by the package, or None where it is not installed."""
    try:
        from jvp_flash_attention.jvp_attention import JVPAttn  # type: ignore[import-not-found]
    except ImportError:
        return None

    def both() -> object:
        with torch.no_grad(), forward_ad.dual_level():
            pairs = zip(x[:3], x[3:], strict=True)
            return JVPAttn.fwd_dual(*(forward_ad.make_dual(y, t) for y, t in pairs), causal=True)

    return both


def errors(x: list[Tensor], calls: dict[str, Call]) -> dict[str, float]:
    """Relative errors of outputs, tangents and the gradient of q: last rows of the last head."""
    q, k, v, tq, tk, tv, go, gto = (y[-1, -1].double() for y in x)
    n, d = q.shape
    q, tq, go, gto = (y[-SLICE:] for y in (q, tq, go, gto))
    mask = torch.ones(SLICE, n, dtype=torch.bool, device=q.device).tril(n - SLICE)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax((d**-0.5 * q @ k.mT).masked_fill(~mask, -torch.inf), -1) @ v

    at = q.clone().requires_grad_()
    o, to = jvp(attention, (at, k, v), (tq, tk, tv))
    (gq,) = torch.autograd.grad((o * go).sum() + (to * gto).sum(), at)
    found: Any = calls["tangent"]()
    grads: Any = calls["gradients"]()
    second: Any = calls["second pass"]()
    pairs = {"o": (found.o, o), "to": (found.to, to), "second": (second.to, to)}
    pairs["gq"] = (grads[0].q, gq)
    return {
        name: float(
            (ours[-1, -1, -SLICE:].double() - exact.detach()).norm() / exact.detach().norm()
        )
        for name, (ours, exact) in pairs.items()
    }


def case(n: int, d: int) -> list[dict[str, Any]]:
    """One row per contender; raises where an error of ours is above 5e-3."""
    x = inputs(n, d)
    calls = contenders(x)
    off = errors(x, calls)
    if not max(off.values()) <= 5e-3:
        raise ValueError(f"errors above 5e-3 at n = {n}, d = {d}: {off}.")
    timings = time_interleaved(calls, rounds=ROUNDS, calls=CALLS)
    product = n * n * d * (TOKENS // n) * (WIDTH // d)
    rows = []
    for name, call in calls.items():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        seconds = timings.median(name)
        beside = "FLASH backward" if name == "gradients" else "FLASH"
        rows.append(
            {
                "contender": name,
                "n": n,
                "d": d,
                "ms": 1e3 * seconds,
                "TFLOP/s": PRODUCTS[name] * product / seconds / 1e12,
                f"times {beside}": 1.0 / timings.ratio(name, beside),
                "peak_MiB": (torch.cuda.max_memory_allocated() - before) / 2**20,
                **(
                    {f"error_{key}": value for key, value in off.items()}
                    if name == "tangent"
                    else {}
                ),
            }
        )
    return rows


def main(options: Sequence[str] = ()) -> None:
    """All cases, or with --quick one length and the shorter norm."""
    if not torch.cuda.is_available():
        print("jvp_kernels needs a GPU.")
        return
    quick = "--quick" in options
    rows: list[dict[str, Any]] = []
    for d, n in product(HEADS, (8192,) if quick else LENGTHS):
        for row in case(n, d):
            rows.append(row)
            print(
                "  ".join(
                    f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
                ),
                flush=True,
            )
        record("jvp_kernels" + "_quick" * quick, rows)
        torch.cuda.empty_cache()
    for n in (32768,) if quick else (32768, 131072):
        rows.append({"contender": "spectral_norm", **measure("cuda", n)})
        print(rows[-1], flush=True)
        path = record("jvp_kernels" + "_quick" * quick, rows)
    print(f"\n{path}")
