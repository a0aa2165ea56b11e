"""What the compiler makes of kernels/entmax_attention.py for a Hopper GPU."""

import pytest

from tests.kernels.sm90 import SHARED_MEMORY, compiled

CODE = """
from fenchel.kernels.entmax_attention import *
x = torch.empty(1, 4096, 2, WIDTH, dtype=torch.bfloat16, device="meta").transpose(1, 2)
q, k, v, g = x, x, x, x  # heads within positions, as in a model
call = 1.5, 0.125, Band(1 << 20, 0)
_, saved = attend_entmax(q, k, v, *call)
"""
BACKWARD = "attend_entmax_backward(g, q, k, v, saved, *call)"
TANGENTS = "attend_entmax_jvp(q, k, v, (q, k, v), saved, *call)"


@pytest.mark.parametrize(
    ("width", "derivative", "kernels"),
    [(64, TANGENTS, ["_tangents"]), (128, BACKWARD, ["_query_gradients", "_key_gradients"])],
    ids=["64, along tangents", "128, reverse"],
)
def test_tensor_cores_are_used_and_registers_suffice(
    width: int, derivative: str, kernels: list[str]
) -> None:
    reports = compiled(CODE.replace("WIDTH", str(width)) + derivative)
    assert [report["kernel"] for report in reports] == ["_thresholds", "_outputs", *kernels]
    for report in reports:
        assert report["wgmma"] > 0, report
        assert report["cp_async"] > 0, report
        assert report["spilled"] == 0, report
        assert report["shared"] <= SHARED_MEMORY, report
