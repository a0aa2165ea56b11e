"""fenchel/attention/backends.py: every refusal says why, and who serves is who should."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fenchel.attention import (
    ALiBi,
    Causal,
    Dense,
    Padding,
    Prior,
    RelativeBias,
    Sink,
    Window,
    attend,
    backends,
    flex,
)
from fenchel.attention.backends import BACKENDS, CallFacts, backend_named, cheapest
from fenchel.attention.prior import ScoreIndex
from fenchel.torch_internals import compile_error

PLAIN = CallFacts(
    choice="Softmax", device="cuda", dtype=torch.bfloat16, B=2, H=6, T=4, S=7, D=16, E=16
)


SPARSE = replace(PLAIN, choice="Entmax", alpha=1.5)


def test_a_plain_call_is_served_by_all_that_compute_its_map() -> None:
    served = {name for name, backend in BACKENDS.items() if backend.why_not(PLAIN) is None}
    assert served == {*BACKENDS} - {"triton"}
    served = {name for name, backend in BACKENDS.items() if backend.why_not(SPARSE) is None}
    assert served == {"reference", "blocked", "triton"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"choice": "Hard"}, "not Hard"),
        ({"alpha": None}, "from 1.05 to 2"),
        ({"return_weights": True}, "weights"),
        ({"tangent": True}, None),
        ({"transformed": True}, None),
        ({"transformed": True, "second": True}, "one derivative"),
        ({"tangent": True, "gradient": True}, "one derivative"),
        ({"dropout": 0.1}, "dropout"),
        ({"softcap": True}, "soft-cap"),
        ({"dtype": torch.float64}, "float16, bfloat16 and float32"),
        ({"E": 129}, "width 128"),
        ({"S": 1 << 21}, "1048576 queries and keys"),
        ({"prior": Causal() + Dense(torch.zeros(4, 7))}, "Dense"),
        ({"prior": Sink(torch.zeros(6), Causal())}, "Sink"),
        ({"device": "mps"}, "GPU"),
        ({"prior": ALiBi(6) + Window(3) + Padding(torch.tensor([7, 1]))}, None),
    ],
    ids=str,
)
def test_the_triton_kernels_refuse_by_name(change: dict, reason: str | None) -> None:
    found = BACKENDS["triton"].why_not(replace(SPARSE, **change))
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.parametrize("gradient", [False, True])
def test_auto_takes_the_triton_kernels_for_long_entmax_on_a_gpu(gradient: bool) -> None:
    long = replace(SPARSE, B=4, H=16, T=8192, S=8192, D=64, E=64, gradient=gradient)
    for change in ({}, {"prior": Causal()}, {"choice": "Sparsemax", "alpha": 2.0}):
        assert cheapest(replace(long, **change)).name == "triton"
    assert cheapest(replace(long, compiling=True)).name == "triton"
    assert cheapest(replace(long, gradient=False, tangent=True)).name == "triton"
    for change in ({"T": 1, "B": 1}, {"device": "cpu", "dtype": torch.float32}, {"second": True}):
        assert cheapest(replace(long, **change)).name != "triton"


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
        elif name not in ("triton", "tangent"):  # which have tests of their own
            assert reason is None


def test_an_unknown_back_end_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'fast'; known: auto, reference"):
        backend_named("fast", PLAIN)


LONG = replace(PLAIN, B=4, H=16, T=8192, S=8192, D=64, E=64)
PRIORS: dict[str, Prior] = {
    "window": Window(512),
    "ALiBi": ALiBi(16) + Causal(),
    "padding": Padding(torch.tensor([8192, 100, 5000, 7])) + Causal(),
}


@pytest.fixture
def _compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flex, "can_compile", lambda _: True)
    backends.clear_caches()
    yield
    backends.clear_caches()


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())
@pytest.mark.parametrize("gradient", [False, True])
def test_auto_compiles_for_a_long_call_and_only_then(
    prior: Prior, gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = replace(LONG, prior=prior, gradient=gradient)
    if flex.remakes_mask(prior):  # at every call, which costs more than such a call saves
        assert cheapest(replace(long, T=2048, S=2048)).name == "sdpa"
        long = replace(long, T=1 << 16, S=1 << 16)
    assert cheapest(long).name == "flex"
    elsewhere = {"T": 64, "S": 64}, {"learns": True}, {"transformed": True}, {"compiling": True}
    for change in (*elsewhere, {"device": "cpu", "gradient": True}, {"dropout": 0.1}):
        assert cheapest(replace(long, **change)).name != "flex"
    monkeypatch.setattr(flex, "can_compile", lambda _: False)
    backends.clear_caches()
    assert cheapest(long).name == "sdpa"


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("gradient", [False, True])
def test_tables_stay_with_the_dense_mask_and_sinks_with_the_keys_alone(gradient: bool) -> None:
    long = replace(LONG, B=2, T=8192, S=8192, gradient=gradient)
    table = RelativeBias(torch.zeros(32, 16)) + Causal()
    assert cheapest(replace(long, T=2048, S=2048, prior=table)).name == "sdpa"
    for inner, taken in ((Causal(), "sdpa"), (Window(128), "flex")):
        for learns in (False, True):
            scores = torch.zeros(16, requires_grad=learns)
            sink = Sink(scores, inner, padded=True)
            found = cheapest(replace(long, S=8193, prior=sink, learns=learns))
            assert found.name == taken
            assert found is cheapest(replace(long, prior=inner))


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("prior", [Window(512), ALiBi(16) + Causal()], ids=str)
def test_auto_compiles_for_a_long_forward_pass_on_a_cpu(prior: Prior) -> None:
    long = replace(LONG, prior=prior, device="cpu", dtype=torch.float32)
    assert cheapest(long).name == "flex"
    assert cheapest(replace(long, gradient=True)).name != "flex"
    for T in (1, 4096):  # torch's C++ for any length may not compile
        assert cheapest(replace(long, T=T)).name != "flex"


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("gradient", [False, True])
def test_auto_leaves_to_the_fused_kernels_what_needs_no_mask(device: str, gradient: bool) -> None:
    for change in ({}, {"prior": Causal()}, {"prior": Causal(), "T": 1}):
        call = replace(LONG, device=device, gradient=gradient, **change)
        assert cheapest(call).name == "sdpa"


@pytest.mark.parametrize("gradient", [False, True])
def test_auto_on_a_cpu_skips_keys_where_a_window_leaves_few(
    gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "can_compile", lambda _: False)
    backends.clear_caches()
    call = replace(LONG, device="cpu", dtype=torch.float32, prior=Window(512), gradient=gradient)
    assert cheapest(call).name == "blocked"
    assert cheapest(replace(call, prior=Window(8000, 8000))).name == "sdpa"
    assert cheapest(replace(call, T=64, S=64)).name == "sdpa"
    backends.clear_caches()


def test_auto_takes_another_back_end_where_no_kernel_compiles(
    monkeypatch: pytest.MonkeyPatch, qkv: tuple[Tensor, Tensor, Tensor]
) -> None:
    tries = []

    def broken(*_: object) -> tuple[Tensor, None]:
        tries.append(1)
        raise compile_error()("no kernel")

    cheap = replace(backends.BACKENDS["flex"], cost=lambda _: -1.0, attend=broken)
    monkeypatch.setitem(backends.BACKENDS, "flex", cheap)
    monkeypatch.setattr(backends, "_LEFT_OUT", set())
    backends.clear_caches()
    wanted = attend(*qkv, prior=Window(2), backend="reference")
    with pytest.warns(RuntimeWarning, match="did not compile"):
        torch.testing.assert_close(attend(*qkv, prior=Window(2)), wanted)
    torch.testing.assert_close(attend(*qkv, prior=Window(2)), wanted)
    assert len(tries) == 1  # the failure is remembered for calls of this kind
    with pytest.raises(compile_error(), match="no kernel"):  # asked for by name, it is an error
        attend(*qkv, prior=Window(2), backend="flex")
    backends.clear_caches()


class Faulty(Prior):
    """A prior whose bias raises at single points, or while it is traced, and not densely."""

    def __init__(self, kind: str, traced: bool) -> None:
        self.kind, self.traced, self.zero = kind, traced, 0

    def bias(self, at: ScoreIndex) -> Tensor:
        if torch.compiler.is_compiling() if self.traced else at.i.ndim == 0:
            if self.kind == "value":
                raise ValueError("a bias of mine")
            return at.i // (1 // self.zero) if self.kind == "division" else len(3)  # type: ignore
        return -0.1 * (at.i - at.j).abs()


@pytest.mark.filterwarnings("error:back end")
@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("value", ValueError, "of mine"),
        ("division", ZeroDivisionError, "by zero"),
        ("type", TypeError, "no len"),
    ],
)
@pytest.mark.parametrize("traced", [False, True], ids=["called", "traced"])
def test_auto_raises_what_a_prior_raises(
    monkeypatch: pytest.MonkeyPatch,
    qkv: tuple[Tensor, Tensor, Tensor],
    kind: str,
    error: type[Exception],
    words: str,
    traced: bool,
) -> None:
    cheap = replace(backends.BACKENDS["flex"], cost=lambda _: -1.0)
    monkeypatch.setitem(backends.BACKENDS, "flex", cheap)
    backends.clear_caches()
    torch.compiler.reset()
    with pytest.raises(compile_error() if traced else error, match=words):
        attend(*qkv, prior=Faulty(kind, traced))
    backends.clear_caches()


@pytest.mark.parametrize(
    ("prior", "axes"),
    [
        (Causal(), (False, False)),
        (Window(2) + Causal(), (False, False)),
        (Padding(torch.tensor([3, 5])), (True, False)),
        (Causal() + ALiBi(6), (False, True)),
        (Padding(torch.tensor([3, 5])) + ALiBi(6), (True, True)),
        (Dense(torch.zeros(2, 1, 4, 7)), (True, False)),
    ],
)
def test_a_prior_names_the_axes_along_which_it_varies(
    prior: Prior, axes: tuple[bool, bool]
) -> None:
    assert prior.varies() == axes
    log_u = prior.log(4, 7, B=2, H=6, device=torch.device("cpu"), dtype=torch.float64)
    log_u = log_u.expand(2, 6, 4, 7)
    differs = (log_u != log_u[:1]).any(), (log_u != log_u[:, :1]).any()
    assert all(axis or not differ for axis, differ in zip(axes, differs, strict=True))


@pytest.mark.parametrize("sizes", [{}, {"T": 8, "S": 8}], ids=["long", "short"])
def test_under_torch_compile_softmax_goes_to_the_fused_kernels(sizes: dict[str, int]) -> None:
    call = replace(LONG, compiling=True, prior=Window(512), **sizes)
    assert cheapest(call).name == "sdpa"
    assert cheapest(replace(call, B=1, H=1, choice="Entmax")).name == (
        "reference" if sizes else "blocked"
    )
