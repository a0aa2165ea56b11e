"""Kernels run on the GPU where there is one, and through Triton's interpreter elsewhere."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's file is loaded


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
