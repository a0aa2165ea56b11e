"""Quantised weights as the matrices that they stand for.

A matrix W (R, C) is stored as small numbers q and a scale s for every block of b_r x b_c of them:

    W[i, j] = (q[i, j] - z) s[i // b_r, j // b_c]

| ``quant_method``, ``format`` | q | s |
| --- | --- | --- |
| fp8 | ``weight`` F8_E4M3 | ``weight_scale_inv`` of ``weight_block_size``, or one number |
| fbgemm_fp8 | ``weight`` F8_E4M3 | ``weight_scale`` (R, 1) |
| compressed-tensors: int-, float-, naive-quantized | ``weight`` I8 or F8_E4M3 | ``weight_scale`` |
| compressed-tensors: pack-quantized | ``weight_packed`` I32, low bits first | ``weight_scale`` |
| mxfp4 | ``_blocks`` U8, two values of 4 bits per byte | ``_scales`` U8, 2^(s - 127) per 32 |

z is ``weight_zero_point`` where there is one, else 0. A scale of U8 or F8_E8M0 is 2^(byte - 127). A
packed number of b bits stands for itself less 2^(b-1). The 4 bits of MXFP4 index 0, 0.5, 1, 1.5, 2,
3, 4, 6 and their negatives; its stacks of experts (X, O, I) are theirs transposed, (X, I, O).

What a tensor is follows from those beside it, not from lists of modules. The table of tensors then
has W by its plain name, and neither q nor s: shapes are compared with the settings before a byte is
read, as for any other checkpoint. W is computed in float32, some rows at a time, when it is read.
Scales that are not finite and positive are refused, and so is every other method, by its name.
Scales of activations and of a KV cache are left out: activations are not quantised here.

Rouhani et al. (2023), Microscaling data formats for deep learning.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel.checkpoints.safetensors_header import TensorEntry
from fenchel.files import Damaged, printable
from fenchel.model.config import LARGEST

KEY = "quantization_config"
Read = Callable[[str], Tensor]
"""A stored tensor by its name."""
Compute = Callable[[Read, torch.dtype], Tensor]
"""A matrix from stored tensors."""
_FORMATS = ("int-quantized", "naive-quantized", "float-quantized", "pack-quantized")
_PLAIN = ("F64", "F32", "F16", "BF16")
_POWERS = ("U8", "F8_E8M0")  # scales that are exponents of 2
_QUANTISED = ("F8_E4M3", "I8")
_UNUSED = (
    *(".input_scale", ".input_zero_point", ".output_scale", ".activation_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".activation_scale_ub"),
)
"""Endings of tensors that change activations or a KV cache only."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_AT_ONCE = 1 << 22  # numbers that are widened at a time


class Dequantised(NamedTuple):
    """Matrices by their plain names, and the names of the tensors that they are made of."""

    matrices: Mapping[str, tuple[TensorEntry, str, Compute]]
    """The header's entry that each would have, the stored tensor of its numbers, how to compute."""
    absorbed: frozenset[str]


def find_quantised(
    settings: Any, entries: Mapping[str, TensorEntry], where: str
) -> Dequantised | None:
    """The quantised matrices among ``entries``; None where ``settings`` are empty.

    ``settings`` are the object under "quantization_config"; ``where`` names their file.
    """
    if settings in (None, False, "", [], {}):
        return None
    if not isinstance(settings, Mapping):
        raise ValueError(f"{where}: {KEY} should be an object.")
    method, named = settings.get("quant_method"), settings.get("format")
    if method == "compressed-tensors" and named not in _FORMATS:
        method = f"{method} in the format {named}"
    if method not in ("fp8", "fbgemm_fp8", "compressed-tensors", "mxfp4"):
        raise ValueError(
            f"{where}: {KEY} is of {printable(repr(method), 60)}, a variant that fenchel does not "
            "have; fp8, fbgemm_fp8, compressed-tensors and mxfp4 are read, or give the model in "
            "bfloat16 or float32."
        )
    for key in ("sparsity_config", "transform_config"):
        inner = settings.get(key) or {}
        if (
            not isinstance(inner, Mapping)
            or inner.get("format", "dense") != "dense"
            or (key == "transform_config" and inner.get("config_groups"))
        ):
            raise ValueError(f"{where}: {KEY} has a {key}, a variant that fenchel does not have.")
    block, bits = _block_size(settings, where), _packed_bits(settings, where)
    plain = _common_dtype(entries)
    matrices: dict[str, tuple[TensorEntry, str, Compute]] = {}
    absorbed = {name for name in entries if name.endswith(_UNUSED)}
    for name, entry in entries.items():
        found = _matrix(name, entry, entries, block, bits, where)
        if found is not None:
            base, shape, compute, parts = found
            if base in entries and base not in parts:
                raise Damaged(f"{where}: {printable(base)} is stored twice, quantised and plain.")
            size = prod(shape) * (8 if plain == "F64" else 4 if plain == "F32" else 2)
            matrices[base] = TensorEntry(plain, shape, 0, size), name, compute
            absorbed |= parts
    if not matrices:
        raise ValueError(f"{where}: {KEY} is given, and no tensor has scales beside it.")
    return Dequantised(matrices, frozenset(absorbed))


def _matrix(
    name: str,
    entry: TensorEntry,
    entries: Mapping[str, TensorEntry],
    block: tuple[int, int] | None,
    bits: int | None,
    where: str,
) -> tuple[str, tuple[int, ...], Compute, set[str]] | None:
    """The matrix whose numbers are the tensor ``name``: name, shape, how to compute it, parts."""
    if name.endswith("_blocks") and entry.dtype == "U8":
        base = name.removesuffix("_blocks")
        scales = f"{base}_scales"
        *outer, count, half = entry.shape if len(entry.shape) == 4 else (0, 0, 0, 0)
        _require(scales, entries, (*outer, count), ("U8",), where)
        if half != 16:
            raise Damaged(f"{where}: {printable(name)} should have blocks of 16 bytes.")
        shape = (outer[0], 32 * count, outer[1])
        return base, shape, partial(_expand_fp4, name, scales), {name, scales}
    if name.endswith(".weight_packed") and entry.dtype == "I32":
        stem = name.removesuffix("_packed")
        shape_name, scale = f"{stem}_shape", f"{stem}_scale"
        for other in (f"{stem}_zero_point", f"{stem}_g_idx"):
            if other in entries:
                raise ValueError(f"{where}: {printable(other)} is not read.")
        if bits is None or len(entry.shape) != 2:
            raise ValueError(f"{where}: {printable(name)} needs num_bits of 4 or 8 in {KEY}.")
        _require(shape_name, entries, (2,), ("I64", "I32"), where)
        rows, columns = entry.shape[0], entry.shape[1] * (32 // bits)
        size = _grid(scale, entries, (rows, columns), None, where)
        compute = partial(_unpack, name, scale, shape_name, bits, size)
        return stem, (rows, columns), compute, {name, scale, shape_name}
    if not name.endswith(".weight") or entry.dtype not in _QUANTISED:
        return None
    beside = next((s for s in (f"{name}_scale_inv", f"{name}_scale") if s in entries), None)
    if beside is None or len(entry.shape) != 2:
        raise ValueError(f"{where}: {printable(name)} is of {entry.dtype} without a scale.")
    rows, columns = entry.shape
    size = _grid(beside, entries, (rows, columns), block, where)
    parts, zero = {name, beside}, f"{name}_zero_point"
    if zero in entries:
        _require(zero, entries, entries[beside].shape, ("I8",), where)
        parts.add(zero)
    compute = partial(_multiply, name, beside, zero if zero in parts else None, size)
    return name, (rows, columns), compute, parts


def _block_size(settings: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """Rows and columns that share a scale, where the settings name them."""
    found = settings.get("weight_block_size")
    for scheme in _schemes(settings, where):
        if scheme.get("strategy") == "block":
            found = scheme.get("block_structure")
    if (
        found is None
        and settings.get("quant_method") == "fp8"
        and "weight_block_size" not in settings
    ):
        found = [128, 128]
    if found is None:
        return None
    if (
        not isinstance(found, list)
        or len(found) != 2
        or not all(type(n) is int and 0 < n <= LARGEST for n in found)
    ):
        raise ValueError(f"{where}: blocks of {printable(repr(found), 60)} should be two sizes.")
    return found[0], found[1]


def _packed_bits(settings: Mapping[str, Any], where: str) -> int | None:
    """Bits of a packed number; None where there are none, or several kinds."""
    bits = [scheme.get("num_bits") for scheme in _schemes(settings, where)]
    first = bits[0] if bits and all(one == bits[0] for one in bits) else None
    return first if type(first) is int and first in (4, 8) else None


def _schemes(settings: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """How weights are quantised in each group of modules of compressed-tensors."""
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise ValueError(f"{where}: config_groups should be an object.")
    schemes = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
    return [scheme for scheme in schemes if isinstance(scheme, Mapping)]


def _common_dtype(entries: Mapping[str, TensorEntry]) -> str:
    """The dtype of the weights that are not quantised: norms and the embedding."""
    sizes = dict.fromkeys(_PLAIN, 0)
    for name, entry in entries.items():
        if entry.dtype in sizes and "_scale" not in name:
            sizes[entry.dtype] += entry.bytes
    return max(sizes, key=lambda dtype: sizes[dtype]) if any(sizes.values()) else "BF16"


def _grid(
    scale: str,
    entries: Mapping[str, TensorEntry],
    shape: tuple[int, int],
    block: tuple[int, int] | None,
    where: str,
) -> tuple[int, int]:
    """Rows and columns per number of ``scale``, whose shape must cover a matrix of ``shape``."""
    _require(scale, entries, None, (*_PLAIN, *_POWERS), where)
    grid = entries[scale].shape
    if prod(grid) == 1:
        return max(1, shape[0]), max(1, shape[1])
    blocks = None if block is None else tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
    if block is not None and grid == blocks:
        return min(block[0], shape[0]), min(block[1], shape[1])
    if block is not None and scale.endswith("_scale_inv"):
        raise Damaged(
            f"{where}: {printable(scale)} of shape {list(grid)} is not one number per block of "
            f"{list(block)} of a matrix of {list(shape)}."
        )
    if len(grid) == 2 and all(g and not n % g for n, g in zip(shape, grid, strict=True)):
        return shape[0] // grid[0], shape[1] // grid[1]
    raise Damaged(
        f"{where}: {printable(scale)} of shape {list(grid)} does not divide a matrix of "
        f"{list(shape)}."
    )


def _require(
    name: str,
    entries: Mapping[str, TensorEntry],
    shape: tuple[int, ...] | None,
    dtypes: tuple[str, ...],
    where: str,
) -> None:
    """Refuse a part of a matrix that is missing, misshapen or of another dtype."""
    entry = entries.get(name)
    if entry is None:
        raise Damaged(f"{where}: there is no {printable(name)}, which quantised weights need.")
    if entry.dtype not in dtypes or (shape is not None and entry.shape != shape):
        raise Damaged(
            f"{where}: {printable(name)} is of {entry.dtype} and shape {list(entry.shape)}, which "
            "does not fit the weights that it belongs to."
        )


def _scales(read: Read, name: str) -> Tensor:
    """Scales in float32; refused unless finite and positive."""
    s = read(name)
    if s.dtype == torch.uint8:
        s = torch.ldexp(torch.ones_like(s, dtype=torch.float32), s.to(torch.int32) - 127)
    s = s.float()
    if s.numel() and not bool((s > 0).all() and s.isfinite().all()):
        raise Damaged(f"{printable(name)} holds scales that are not finite and positive.")
    return s


def _multiply(
    name: str, scale: str, zero: str | None, size: tuple[int, int], read: Read, dtype: torch.dtype
) -> Tensor:
    """(q - z) s."""
    z = None if zero is None else read(zero).float()
    return _scaled(
        lambda rows: read(name)[rows].float(),
        read(name).shape,
        _scales(read, scale),
        z,
        size,
        dtype,
    )


def _unpack(
    name: str,
    scale: str,
    shape_name: str,
    bits: int,
    size: tuple[int, int],
    read: Read,
    dtype: torch.dtype,
) -> Tensor:
    """Numbers of ``bits`` in words of 32, the lowest bits first."""
    packed, per_word = read(name), 32 // bits
    shape = (packed.shape[0], packed.shape[1] * per_word)
    if tuple(read(shape_name).tolist()) != shape:
        raise Damaged(f"{printable(shape_name)} is not the shape {list(shape)} of what is packed.")
    shifts = bits * torch.arange(per_word, dtype=torch.int32)

    def values(rows: slice) -> Tensor:
        words = packed[rows].unsqueeze(-1) >> shifts
        numbers: Tensor = (words & (2**bits - 1)) - 2 ** (bits - 1)
        return numbers.flatten(1).float()

    return _scaled(values, shape, _scales(read, scale), None, size, dtype)


def _scaled(
    values: Callable[[slice], Tensor],
    shape: tuple[int, ...],
    s: Tensor,
    z: Tensor | None,
    size: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """W of ``shape`` from its numbers, some rows at a time."""
    (R, C), (height, width) = shape, size

    def spread(x: Tensor, at: Tensor) -> Tensor:
        x = x if x.dim() == 2 else x.reshape(1, 1)
        return x[at].repeat_interleave(width, 1)[:, :C]

    out = torch.empty(R, C, dtype=dtype)
    step = max(1, _AT_ONCE // max(1, C))
    for start in range(0, R, step):
        rows = slice(start, min(R, start + step))
        at = torch.arange(rows.start, rows.stop) // height
        part = values(rows) if z is None else values(rows) - spread(z, at)
        out[rows] = part * spread(s, at)
    return out


def _expand_fp4(blocks: str, scales: str, read: Read, dtype: torch.dtype) -> Tensor:
    """Experts (X, O, I) of MXFP4, one at a time; returned as (X, I, O)."""
    q, s = read(blocks), _scales(read, scales)
    X, outputs, count, half = q.shape
    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    out = torch.empty(X, outputs, 2 * half * count, dtype=dtype)
    for x in range(X):
        pairs = torch.stack((q[x] & 15, q[x] >> 4), -1).long()  # (outputs, count, 16, 2)
        out[x] = (table[pairs].flatten(2) * s[x].unsqueeze(-1)).flatten(1)
    return out.mT
