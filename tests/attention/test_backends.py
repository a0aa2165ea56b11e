"""fenchel/attention/backends.py: every refusal says why, and who serves is who should."""

from dataclasses import replace

import pytest
import torch

from fenchel.attention import ALiBi
from fenchel.attention.backends import BACKENDS, CallFacts, backend_named

PLAIN = CallFacts(
    choice="Softmax", device="cuda", dtype=torch.bfloat16, B=2, H=6, T=4, S=7, D=16, E=16
)


def test_a_plain_call_is_served_by_all() -> None:
    assert [backend.why_not(PLAIN) for backend in BACKENDS.values()] == [None] * len(BACKENDS)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"choice": "Entmax"}, {"sdpa": "not Entmax", "flex": "not Entmax"}),
        ({"return_weights": True}, dict.fromkeys(("sdpa", "flex", "blocked"), "weights")),
        ({"tangent": True}, {"sdpa": "tangents", "flex": "tangents"}),
        ({"dropout": 0.1}, {"flex": "dropout"}),
        ({"device": "cpu", "gradient": True}, {"flex": "backward on a CPU"}),
        ({"dtype": torch.float64}, {"flex": "float16, bfloat16 and float32"}),
        ({"S": 0}, {"flex": "one key"}),
        ({"learns": True, "transformed": True}, {"sdpa": "inside torch.func"}),
        ({"softcap": True}, {"sdpa": "soft-cap"}),
        ({"softcap": True, "beta_is_tensor": True}, {"sdpa": "soft-cap", "blocked": "temperature"}),
        ({"learns": True, "gradient": True, "prior": ALiBi(6)}, {}),
    ],
    ids=str,
)
def test_each_fact_refuses_those_it_should(change: dict, refused: dict[str, str]) -> None:
    call = replace(PLAIN, **change)
    for name, backend in BACKENDS.items():
        reason = backend.why_not(call)
        if name in refused:
            assert refused[name] in (reason or "")
        else:
            assert reason is None


def test_an_unknown_back_end_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'fast'; known: auto, reference"):
        backend_named("fast", PLAIN)
