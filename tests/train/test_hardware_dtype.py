"""fenchel/train/hardware.py, select_dtype: no dtype that the CPU has no instructions for."""

from typing import Any

import pytest
import torch

from fenchel.train.hardware import select_dtype

CPU = torch.device("cpu")
HALF = {"avx512_bf16": torch.bfloat16, "amx_bf16": torch.bfloat16, "avx512_fp16": torch.float16}


def machine(monkeypatch: pytest.MonkeyPatch, **capabilities: Any) -> None:
    described = {"architecture": "x86_64", **capabilities}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: described)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_where_it_has_no_instructions(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, avx2=True)
    assert select_dtype(dtype, CPU, bytes=1000) == torch.float32
    assert select_dtype(dtype, CPU, bytes=2**60) == dtype  # the copy would not fit
    assert select_dtype(dtype, torch.device("cuda"), bytes=1000) == dtype
    for name, native in HALF.items():
        machine(monkeypatch, **{name: True})
        expected = dtype if native == dtype else torch.float32
        assert select_dtype(dtype, CPU, bytes=1000) == expected
    machine(monkeypatch, architecture="arm64")
    assert select_dtype(dtype, CPU, bytes=1000) == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_stays(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    assert select_dtype(dtype, CPU, bytes=1000) == dtype
