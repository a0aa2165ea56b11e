"""fenchel/attention/backends.py: every refusal says why, and who serves is who should."""

from dataclasses import replace

import pytest
import torch

from fenchel.attention import ALiBi, Causal, Padding, Prior, Sink, Window, flex
from fenchel.attention.backends import BACKENDS, CallFacts, backend_named, cheapest

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


LONG = replace(PLAIN, B=4, H=16, T=8192, S=8192, D=64, E=64)
PRIORS: dict[str, Prior] = {
    "window": Window(512),
    "ALiBi": ALiBi(16) + Causal(),
    "padding": Padding(torch.tensor([8192, 100, 5000, 7])) + Causal(),
    "sink": Sink(torch.zeros(16), Causal()),
}


@pytest.fixture
def _compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "can_compile", lambda: True)


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())
@pytest.mark.parametrize("gradient", [False, True])
def test_auto_compiles_for_a_long_call_on_a_gpu_and_only_then(
    prior: Prior, gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = replace(LONG, prior=prior, gradient=gradient)
    assert cheapest(long).name == "flex"
    elsewhere = {"T": 64, "S": 64}, {"learns": True}, {"transformed": True}, {"compiling": True}
    for change in (*elsewhere, {"device": "cpu"}, {"dropout": 0.1}):
        assert cheapest(replace(long, **change)).name != "flex"
    monkeypatch.setattr(flex, "can_compile", lambda: False)
    assert cheapest(long).name == "sdpa"


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("gradient", [False, True])
def test_auto_leaves_to_the_fused_kernels_what_needs_no_mask(device: str, gradient: bool) -> None:
    for change in ({}, {"prior": Causal()}, {"prior": Causal(), "T": 1}):
        call = replace(LONG, device=device, gradient=gradient, **change)
        assert cheapest(call).name == "sdpa"


@pytest.mark.parametrize("gradient", [False, True])
def test_auto_on_a_cpu_skips_keys_where_a_window_leaves_few(gradient: bool) -> None:
    call = replace(LONG, device="cpu", dtype=torch.float32, prior=Window(512), gradient=gradient)
    assert cheapest(call).name == "blocked"
    assert cheapest(replace(call, prior=Window(8000, 8000))).name == "sdpa"
    assert cheapest(replace(call, T=64, S=64)).name == "sdpa"
