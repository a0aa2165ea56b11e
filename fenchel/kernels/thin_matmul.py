"""Products of a few rows with a large matrix, for a decoder that reads one token per sequence.

    matmul         y = n(x) W^T + b                          n the norm of a row x, or the identity
    matmul_add     x <- x + y W^T + b, and + v where a row of the stream has a direction
    gated_matmul   f(n(x) W_gate^T + b) * (n(x) W_up^T + c)  or  f(n(x) W_up^T + c)  without a gate
    normalise      y = n(x)                                  for products by the library of torch,
    activate       f(gate) * up  or  f(up)                   which are faster from a few rows on

    rms            n(x) = r x g,              r = (mean(x^2) + epsilon)^(-1/2)
    layer          n(x) = r (x - m) g + h,    m = mean(x), r = (mean((x - m)^2) + epsilon)^(-1/2)

Each number of W is used B times and never again, so the speed at which W arrives decides: bytes
2 N K in bfloat16 for 2 B N K operations, one operation per byte at B = 1 where the device could do
two hundred. 4.3 TB/s times a latency of 0.7 us is 3 MB that must be in flight at any moment, 23 kB
per multiprocessor. So a program takes ``rows`` of W whole, with no loop over K: every thread issues
all of its loads (``PER_THREAD`` numbers, sixteen loads of 16 bytes) before it uses the first, which
is 32 kB per program of four warps, and several programs run on a multiprocessor. The row x and its
norm are recomputed in every program while W is in flight: 4 kB from the L1 cache, instead of a pass
and a kernel of its own. W bypasses that cache (".cg"), so that x stays in it.

By programmatic dependent launch (``pdl_launch``) the next kernel loads its weights before this one
has ended, so they must not be what this one writes. ``wait_for_previous`` stands between the
weights and everything that an earlier kernel wrote; every kernel here waits, so each is complete
before the next but one starts to read or write.

Sums are in float32; results are rounded where the model's own operations round, to the dtype of x.

Shapes: x (B, K), W (N, K) contiguous, gains (K,), biases (N,), y (B, N).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fenchel.kernels.primitives import padded_width, pdl_launch, wait_for_previous


class NormWeights(NamedTuple):
    """g, h, epsilon, and whether the mean m is subtracted."""

    gain: Tensor
    shift: Tensor | None
    epsilon: float
    centred: bool


PER_THREAD = 128
"""Numbers of W in flight per thread: sixteen loads of 16 bytes in bfloat16. Measured on an H200
with 1.1 billion weights: 32, 64, 128 give 1,172, 1,285, 1,296 steps per second."""
SPAN = 512
"""Numbers of a row per warp: two loads of 16 bytes per thread."""
WARPS = 8
"""Largest number of warps per program; in a longer row each thread takes more numbers."""
ROWS = 16
"""Largest number of rows per program, for narrow matrices."""
ACTIVATE = 1024
"""Entries per program of ``activate``: one load of 16 bytes per thread in bfloat16."""


class LaunchShape(NamedTuple):
    """Rows of W per program, entries of a row with its padding, warps per program."""

    rows: int
    block: int
    warps: int


def launch_shape(K: int, *, matrices: int = 1) -> LaunchShape:
    """The launch shape for rows of K numbers, of one matrix or of two read side by side."""
    block = padded_width(K)
    warps = max(1, min(WARPS, block // SPAN))
    rows = PER_THREAD * 32 * warps // (block * matrices)
    return LaunchShape(max(1, min(ROWS, rows)), block, warps)


def matmul(
    x_BK: Tensor,
    W_NK: Tensor,
    bias_N: Tensor | None,
    y_BN: Tensor,
    *,
    norm: NormWeights | None = None,
) -> None:
    """y = n(x) W^T + b, written into y."""
    _launch_matmul(x_BK, W_NK, bias_N, None, y_BN, norm)


def matmul_add(
    stream_BN: Tensor,
    x_BK: Tensor,
    W_NK: Tensor,
    bias_N: Tensor | None,
    *,
    steer_BN: Tensor | None = None,
) -> None:
    """stream <- stream + x W^T + b + v, in place; without ``steer_BN`` there is no v."""
    _launch_matmul(x_BK, W_NK, bias_N, stream_BN, stream_BN, None, steer_BN)


def _launch_matmul(
    x_BK: Tensor,
    W_NK: Tensor,
    bias_N: Tensor | None,
    stream_BN: Tensor | None,
    y_BN: Tensor,
    norm: NormWeights | None,
    steer_BN: Tensor | None = None,
) -> None:
    B, K = x_BK.shape
    N = len(W_NK)
    cut = launch_shape(K)
    _matmul[(triton.cdiv(N, cut.rows),)](
        x_BK, W_NK, bias_N, stream_BN, steer_BN, y_BN, *_norm_arguments(norm), N, B=B, K=K,
        BLOCK=cut.block, ROWS=cut.rows, num_warps=cut.warps, **pdl_launch(x_BK),
    )  # fmt: skip


def gated_matmul(
    x_BM: Tensor,
    gate: tuple[Tensor, Tensor | None] | None,
    up: tuple[Tensor, Tensor | None],
    y_BF: Tensor,
    *,
    activation: str,
    norm: NormWeights,
) -> None:
    """f(n(x) gate) * (n(x) up), or f(n(x) up), written into y; each map is (matrix, bias)."""
    B, K = x_BM.shape
    N = len(up[0])
    cut = launch_shape(K, matrices=1 if gate is None else 2)
    _gated_matmul[(triton.cdiv(N, cut.rows),)](
        x_BM, *(gate or (None, None)), *up, y_BF, *_norm_arguments(norm), N, B=B, K=K,
        BLOCK=cut.block, ROWS=cut.rows, F=activation, num_warps=cut.warps, **pdl_launch(x_BM),
    )  # fmt: skip


def normalise(x_BK: Tensor, norm: NormWeights, y_BK: Tensor) -> None:
    """y = n(x), one program per row."""
    B, K = x_BK.shape
    block = padded_width(K)
    warps = max(1, min(WARPS, block // SPAN))
    _normalise_rows[(B,)](
        x_BK, *_norm_arguments(norm), y_BK, K=K, BLOCK=block, num_warps=warps, **pdl_launch(x_BK)
    )


def activate(gate_BF: Tensor | None, up_BF: Tensor, y_BF: Tensor, *, activation: str) -> None:
    """f(gate) * up, or f(up) without a gate, written into y."""
    size = up_BF.numel()
    _activate[(triton.cdiv(size, ACTIVATE),)](
        gate_BF, up_BF, y_BF, size, F=activation, BLOCK=ACTIVATE, num_warps=4, **pdl_launch(up_BF)
    )


def _norm_arguments(norm: NormWeights | None) -> tuple[Tensor | None, Tensor | None, float, bool]:
    return (None, None, 0.0, False) if norm is None else norm


# Below, an argument that may be None is resolved at compile time: code for it is not generated.


@triton.jit
def _load_rows(w_ptr, rows, at, K: tl.constexpr, BLOCK: tl.constexpr):
    where = w_ptr + rows.to(tl.int64)[:, None] * K + at[None, :]
    if K == BLOCK:  # no mask: a mask that may end anywhere is loaded number by number
        w = tl.load(where, cache_modifier=".cg")
    else:
        w = tl.load(where, mask=(at < K)[None, :], other=0.0, cache_modifier=".cg")
    return w


@triton.jit
def _load_row(x_ptr, at, K: tl.constexpr, BLOCK: tl.constexpr):
    if K == BLOCK:  # noqa: SIM108
        x = tl.load(x_ptr + at)
    else:
        x = tl.load(x_ptr + at, mask=at < K, other=0.0)
    return x


@triton.jit
def _load_gain(gain_ptr, shift_ptr, at, K: tl.constexpr, BLOCK: tl.constexpr):
    gain = 1.0
    shift = 0.0
    if gain_ptr is not None:
        gain = _load_row(gain_ptr, at, K, BLOCK).to(tl.float32)
    if shift_ptr is not None:
        shift = _load_row(shift_ptr, at, K, BLOCK).to(tl.float32)
    return gain, shift


@triton.jit
def _normalise(x, gain, shift, at, epsilon, centred: tl.constexpr, K: tl.constexpr):
    """n(x) in float32, rounded as x is."""
    y = x.to(tl.float32)
    if centred:
        y = tl.where(at < K, y - tl.sum(y, 0) / K, 0.0)
    r = tl.rsqrt(tl.sum(y * y, 0) / K + epsilon)
    return (y * r * gain + shift).to(x.dtype).to(tl.float32)


@triton.jit
def _matmul(
    x_ptr, w_ptr, bias_ptr, stream_ptr, steer_ptr, y_ptr, gain_ptr, shift_ptr, epsilon,
    centred: tl.constexpr, N, B: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < N
    row = tl.minimum(row, N - 1)  # rows past the end read the last one and are not written
    at = tl.arange(0, BLOCK)
    w = _load_rows(w_ptr, row, at, K, BLOCK)
    gain, shift = _load_gain(gain_ptr, shift_ptr, at, K, BLOCK)
    wait_for_previous(AHEAD)
    for b in range(B):
        x = _load_row(x_ptr + b * K, at, K, BLOCK)
        y = x.to(tl.float32)
        if gain_ptr is not None:
            y = _normalise(x, gain, shift, at, epsilon, centred, K)
        total = tl.sum(w.to(tl.float32) * y[None, :], 1)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + row).to(tl.float32)
        if stream_ptr is not None:
            total = total.to(x.dtype).to(tl.float32)
            total += tl.load(stream_ptr + b * N + row).to(tl.float32)
        if steer_ptr is not None:
            total = total.to(x.dtype).to(tl.float32)
            total += tl.load(steer_ptr + b * N + row).to(tl.float32)
        tl.store(y_ptr + b * N + row, total.to(y_ptr.dtype.element_ty), mask=there)


@triton.jit
def _activation(z, F: tl.constexpr):
    """f(z), by its name in fenchel/model/mlp.py."""
    if F == "relu":
        y = tl.maximum(z, 0.0)
    elif F == "swiglu":
        y = z * tl.sigmoid(z)
    elif F == "geglu" or F == "gelu":
        y = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    else:  # by tanh, and 1 + tanh(u) is 2 sigmoid(2 u)
        tl.static_assert(F == "geglu_tanh" or F == "gelu_tanh")
        y = z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    return y


@triton.jit
def _gated_matmul(
    x_ptr, gate_ptr, gate_bias_ptr, up_ptr, up_bias_ptr, y_ptr, gain_ptr, shift_ptr, epsilon,
    centred: tl.constexpr, N, B: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, F: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < N
    row = tl.minimum(row, N - 1)
    at = tl.arange(0, BLOCK)
    w = _load_rows(up_ptr, row, at, K, BLOCK)
    if gate_ptr is not None:
        v = _load_rows(gate_ptr, row, at, K, BLOCK)
    gain, shift = _load_gain(gain_ptr, shift_ptr, at, K, BLOCK)
    wait_for_previous(AHEAD)
    for b in range(B):
        x = _load_row(x_ptr + b * K, at, K, BLOCK)
        y = _normalise(x, gain, shift, at, epsilon, centred, K)
        wide = tl.sum(w.to(tl.float32) * y[None, :], 1)
        if up_bias_ptr is not None:
            wide += tl.load(up_bias_ptr + row).to(tl.float32)
        wide = wide.to(x.dtype).to(tl.float32)
        if gate_ptr is not None:
            gate = tl.sum(v.to(tl.float32) * y[None, :], 1)
            if gate_bias_ptr is not None:
                gate += tl.load(gate_bias_ptr + row).to(tl.float32)
            gate = gate.to(x.dtype).to(tl.float32)
            wide *= _activation(gate, F).to(x.dtype).to(tl.float32)
        else:
            wide = _activation(wide, F)
        tl.store(y_ptr + b * N + row, wide.to(y_ptr.dtype.element_ty), mask=there)


@triton.jit
def _normalise_rows(
    x_ptr, gain_ptr, shift_ptr, epsilon, centred: tl.constexpr, y_ptr, K: tl.constexpr,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    gain, shift = _load_gain(gain_ptr, shift_ptr, at, K, BLOCK)
    wait_for_previous(AHEAD)
    row = tl.program_id(0).to(tl.int64) * K
    x = _load_row(x_ptr + row, at, K, BLOCK)
    y = _normalise(x, gain, shift, at, epsilon, centred, K)
    tl.store(y_ptr + row + at, y.to(y_ptr.dtype.element_ty), mask=at < K)


@triton.jit
def _activate(
    gate_ptr, up_ptr, y_ptr, size, F: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(AHEAD)
    up = tl.load(up_ptr + at, mask=at < size, other=0.0)
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + at, mask=at < size, other=0.0)
        y = up.to(tl.float32) * _activation(gate.to(tl.float32), F).to(up.dtype).to(tl.float32)
    else:
        y = _activation(up.to(tl.float32), F)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < size)
