"""fenchel/attention/backends.py: every refusal says why, and who serves is who should."""

from dataclasses import replace

import pytest
import torch

from fenchel.attention.backends import BACKENDS, Call, why_not

PLAIN = Call(choice="Softmax", device="cuda", dtype=torch.bfloat16, H=6, G=3, T=4, S=7, D=5, E=3)


def test_a_plain_call_is_served_by_all() -> None:
    assert [why_not(name, PLAIN) for name in BACKENDS] == [None] * len(BACKENDS)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"choice": "Entmax"}, {"sdpa": "not Entmax", "flex": "not Entmax"}),
        ({"weights": True}, dict.fromkeys(("sdpa", "flex", "blocked"), "weights")),
        ({"tangent": True}, {"sdpa": "tangents", "flex": "tangents"}),
        ({"dropout": 0.1}, {"flex": "dropout"}),
        ({"device": "cpu", "gradient": True}, {"flex": "backward on a CPU"}),
        ({"dtype": torch.float64}, {"flex": "float16, bfloat16 and float32"}),
        ({"S": 0}, {"flex": "one key"}),
        ({"learns": True, "transformed": True}, {"sdpa": "inside torch.func"}),
        ({"softcap": True}, {"sdpa": "soft-cap"}),
        ({"softcap": True, "warms": True}, {"sdpa": "soft-cap", "blocked": "temperature"}),
        ({"learns": True, "gradient": True, "prior": True}, {}),
    ],
    ids=str,
)
def test_each_fact_refuses_those_it_should(change: dict, refused: dict[str, str]) -> None:
    call = replace(PLAIN, **change)
    for name in BACKENDS:
        reason = why_not(name, call)
        if name in refused:
            assert refused[name] in (reason or "")
        else:
            assert reason is None


def test_a_back_end_nobody_knows_is_named() -> None:
    assert "'fast'; known: reference" in (why_not("fast", PLAIN) or "")
