"""What the compiler makes of kernels/decode_attention.py for a Hopper GPU."""

import pytest

from tests.kernels.sm90 import SHARED_MEMORY, compiled

CODE = """
from fenchel.kernels.decode_attention import CacheTensors, attend_decode

B, H, G, R = 8, 64, 8, 32768

def new(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

def attend(D, cache, alpha):
    stored, scales = [new(B, G, R, D, dtype=cache) for _ in "kv"], []
    if cache == torch.int8:
        stored[1] = new(B, G, D, R, dtype=cache)
        scales = [new(B, G, R, dtype=torch.float32) for _ in "kv"]
    angles = new(R, D), new(R, D)
    attend_decode(
        new(B, (H + 2 * G) * D), CacheTensors(*stored, *scales), new(B, dtype=torch.int64),
        new(B, H * D), angles=angles, scale=0.1, alpha=alpha,
    )

"""
ENTMAX = ["_split_scores", "_threshold", "_mix_pages", "_combine"]


@pytest.mark.parametrize(
    ("call", "names"),
    [
        ("attend(128, torch.bfloat16, 1.0)", ["_split_softmax", "_combine"]),
        ("attend(128, torch.int8, 1.0)", ["_split_softmax", "_combine"]),
        ("attend(64, torch.bfloat16, 1.5)", ENTMAX),
    ],
)
def test_keys_arrive_ahead_of_their_use_and_registers_suffice(call: str, names: list[str]) -> None:
    reports = compiled(CODE + call)
    assert [report["kernel"] for report in reports] == names
    for report in reports:
        # Several programs per multiprocessor hide what one waits for.
        assert report["spilled"] == 0, report
        assert report["shared"] <= SHARED_MEMORY // 2, report
        reads_cache = report["kernel"] in ("_split_softmax", "_split_scores", "_mix_pages")
        assert (report["cp_async"] > 0) == reads_cache, report
