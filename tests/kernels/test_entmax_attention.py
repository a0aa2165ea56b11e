"""kernels/entmax_attention.py against the definition in float64, in tiles of 32 by 32."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp

from fenchel.attention import (
    ALiBi,
    Causal,
    Padding,
    Prior,
    Window,
    attend,
    attend_jvp,
    entmax_triton,
)
from fenchel.attention.reference import logits
from fenchel.attention.spec import AttentionSpec
from fenchel.choice import Choice, Entmax, Sparsemax
from fenchel.kernels import entmax_attention as page
from fenchel.kernels.band import Band
from fenchel.kernels.entmax_attention import Launch, Tiling, attend_entmax, gaussian_start

WIDE = Band(1 << 20, 1 << 20)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "tiling", lambda *_: Tiling(32, 32, 16, *[Launch(4, 1)] * 5))


class Case(NamedTuple):
    """A map, a prior, B, H, G, T, S, D, E, the size of the queries and the dtype."""

    choice: Choice
    prior: Prior | None
    sizes: tuple[int, ...]
    scale: float = 1.0
    dtype: torch.dtype = torch.float32
    tolerance: float = 3e-6


CASES = {
    "plain": Case(Entmax(1.5), None, (1, 1, 1, 33, 70, 16, 16)),
    "causal, odd lengths, grouped": Case(Entmax(1.5), Causal(), (1, 2, 1, 37, 45, 20, 12)),
    "more queries than keys": Case(Entmax(1.5, 2.0), Causal(), (1, 1, 1, 50, 35, 16, 16)),
    "sparsemax, window": Case(Sparsemax(3.0), Window(9, 4), (1, 1, 1, 40, 70, 16, 24)),
    "alpha 1.25, ALiBi": Case(Entmax(1.25, 2.0), ALiBi(2) + Causal(), (1, 2, 1, 33, 40, 16, 16)),
    "alpha 1.8, padding and empty rows": Case(
        Entmax(1.8),
        Padding(torch.tensor([20, 0])) + Causal(strict=True) + Window(12),
        (2, 1, 1, 20, 40, 16, 16),
    ),
    "padding on the left": Case(
        Entmax(1.5), Padding(torch.tensor([37]), side="left"), (1, 1, 1, 5, 70, 16, 16)
    ),
    "near-uniform": Case(Entmax(1.5), None, (1, 1, 1, 32, 128, 16, 16), 0.05),
    "near-uniform sparsemax": Case(Sparsemax(), Causal(), (1, 1, 1, 64, 64, 16, 16), 0.05),
    "scores of 1e4": Case(Entmax(1.5), Causal(), (1, 1, 1, 40, 40, 16, 16), 4e3, tolerance=5e-3),
    "float16": Case(Entmax(1.5), Causal(), (1, 1, 1, 40, 40, 16, 16), 1.0, torch.float16, 2e-3),
    "bfloat16": Case(Sparsemax(), None, (1, 1, 1, 40, 40, 16, 16), 1.0, torch.bfloat16, 1.5e-2),
}


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.cpu().double() - wanted).norm() / wanted.norm().clamp(min=1e-2))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_outputs_and_gradients_are_those_of_the_definition(case: Case, device: str) -> None:
    B, H, G, T, S, D, E = case.sizes
    draw = torch.Generator().manual_seed(0)
    shapes = (B, H, T, D), (B, G, S, D), (B, G, S, E), (B, H, T, E)
    q, k, v, g = (torch.randn(shape, generator=draw).to(case.dtype) for shape in shapes)
    q *= case.scale
    if case.scale > 1.0:  # pairs of equal keys: without ties one key has all weight, no gradient
        k[:, :, 1::2] = k[:, :, ::2]
    at = [x.to(device).requires_grad_() for x in (q, k, v)]
    ours = attend(*at, choice=case.choice, prior=case.prior, backend="triton")
    slopes = torch.autograd.grad(ours, at, g.to(device))
    exact_at = [x.double().requires_grad_() for x in (q, k, v)]
    exact = attend(*exact_at, choice=case.choice, prior=case.prior, backend="reference")
    wanted = torch.autograd.grad(exact, exact_at, g.double())
    assert relative(ours, exact) < case.tolerance
    empty = (exact == 0).all(-1)
    assert (ours.detach().cpu()[empty] == 0).all()
    assert (slopes[0].cpu()[empty] == 0).all()
    for found, expected in zip(slopes, wanted, strict=True):
        assert relative(found, expected) < 2 * case.tolerance


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_the_last_step_is_made_with_the_outputs(
    alpha: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coarse threshold is enough for pass C, which corrects it without a pass of its own."""
    monkeypatch.setitem(page._TOLERANCES, torch.float32, 0.1)
    draw = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(1, 1, n, 16, generator=draw) for n in (32, 128, 128))
    out, saved = attend_entmax(*(x.to(device) for x in (q, k, v)), alpha, 0.25, WIDE)
    exact = attend(*(x.double() for x in (q, k, v)), choice=Entmax(alpha), backend="reference")
    assert relative(out, exact) < 2e-4
    monkeypatch.setitem(page._TOLERANCES, torch.float32, 1e-6)
    _, sharp = attend_entmax(*(x.to(device) for x in (q, k, v)), alpha, 0.25, WIDE)
    assert relative(saved.tau, sharp.tau.cpu().double()) < 2e-4


@pytest.mark.parametrize(("alpha", "T"), [(1.5, 70), (1.3, 33)])
def test_the_threshold_and_the_tiles_of_a_long_tailed_row(
    alpha: float, T: int, device: str
) -> None:
    """Student's t: a few scores lead, and most tiles hold no weight."""
    draw = torch.Generator().manual_seed(1)
    q = torch.eye(16).repeat(5, 1)[None, None, :T].contiguous()
    z = torch.randn(1, 1, 128, 16, generator=draw)
    z = z / torch.randn(1, 1, 128, 16, generator=draw).square().clamp(min=0.02).sqrt()
    spec = AttentionSpec(Entmax(alpha), scale=1.0)
    x, _ = logits(q.double(), z.double(), spec)
    p = spec.choice.weights(x)
    top = x.amax(-1)
    tau = (alpha - 1.0) * top - p.amax(-1) ** (alpha - 1.0)
    _, saved = attend_entmax(q.to(device), z.to(device), z.to(device), alpha, 1.0, WIDE)
    assert relative(saved.tau, tau) < 1e-6
    kept = saved.hits.cpu().repeat_interleave(32, 2)[:, :, :T].repeat_interleave(32, 3)
    assert (p[kept == 0] == 0).all()
    _, total = saved.counts.cpu().unbind(-1)
    assert torch.equal(total, saved.hits.cpu().sum(-1))


TANGENTS = {
    "all": Case(Entmax(1.5), Causal(), (1, 2, 1, 20, 40, 16, 12)),
    "q": Case(Sparsemax(2.0), Window(9, 4) + ALiBi(1), (1, 1, 1, 40, 45, 20, 16)),
    "v": Case(Entmax(1.3), None, (1, 1, 1, 20, 40, 16, 16)),
    "k, wide": Case(Entmax(1.5, 2.0), None, (1, 1, 1, 20, 40, 70, 16)),
}


@pytest.mark.parametrize("name", TANGENTS)
def test_the_derivative_along_tangents_by_cause(name: str, device: str) -> None:
    case = TANGENTS[name]
    B, H, G, T, S, D, E = case.sizes
    draw = torch.Generator().manual_seed(7)
    shapes = (B, H, T, D), (B, G, S, D), (B, G, S, E)
    at, drawn = (
        [torch.randn(shape, generator=draw).transpose(1, 2).contiguous() for shape in shapes]
        for _ in range(2)
    )
    at, drawn = ([x.transpose(1, 2) for x in xs] for xs in (at, drawn))  # not contiguous
    drawn[1] = drawn[1].contiguous()
    tangents = [
        x if name == "all" or mark in name.split(",")[0] else None
        for x, mark in zip(drawn, "qkv", strict=True)
    ]
    spec = AttentionSpec(case.choice, case.prior, scale=-0.4)
    ours = entmax_triton.jvp(
        *(x.to(device) for x in at),
        tuple(None if x is None else x.to(device) for x in tangents),
        spec,
    )
    exact = attend_jvp(
        tuple(x.double() for x in at),
        tuple(None if x is None else x.double() for x in tangents),
        **spec,
    )
    for found, wanted in zip(ours, exact, strict=True):
        assert relative(found, wanted) < 5e-6


scores = st.lists(st.floats(-6, 6, width=16), min_size=8, max_size=8)


@given(
    anchors=scores,
    spread=st.sampled_from([0.0, 0.1, 2.0]),
    alpha=st.sampled_from([1.5, 2.0, 1.2]),
    lead=st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=8)
def test_no_tile_with_weight_is_left_out(
    anchors: list[float], spread: float, alpha: float, lead: float
) -> None:
    """Eight groups of keys around eight scores, in another order for every query.

    Then the last key leads, which is visited first: others have weight well below it.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = torch.Generator().manual_seed(2)
    orders = torch.stack([torch.randperm(8, generator=draw) for _ in range(16)], 1)
    z = torch.tensor(anchors)[orders].repeat_interleave(16, 0)
    z = z + spread * torch.randn(z.shape, generator=draw)
    z[-1] = z.amax(0) + lead
    q, k = torch.eye(16)[None, None], z[None, None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "tiling", lambda *_: Tiling(16, 16, 16, *[Launch(4, 1)] * 5))
        out, saved = attend_entmax(*(x.to(device) for x in (q, k, k)), alpha, 1.0, WIDE)
    p = Entmax(alpha).weights(z.T.double().contiguous())
    kept = saved.hits[0, 0].cpu().repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert float(p[kept == 0].sum()) == 0.0
    torch.testing.assert_close(out[0, 0].cpu().double(), p @ z.double(), atol=2e-5, rtol=2e-5)


def test_bits_repeat_and_a_score_that_is_no_number_is_not_hidden(device: str) -> None:
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, 40, 16, generator=draw, dtype=torch.float16) for _ in range(3))
    q[0, 0, 3, 5], q[0, 0, 35, 0] = torch.nan, torch.inf
    at = [x.to(device) for x in (q, k, v)]
    first, second = (attend_entmax(*at, 1.5, 0.25, Band(1 << 20, 0)) for _ in range(2))
    for one, other in zip((first[0], *first[1][:2]), (second[0], *second[1][:2]), strict=True):
        assert torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0))
    broken = first[0][0, 0].isnan().all(-1).cpu()
    assert broken.nonzero().flatten().tolist() == [3, 35]
    assert torch.equal(first[0].isnan().any(-1), first[0].isnan().all(-1))


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_the_start_is_the_threshold_of_a_normal_row(alpha: float) -> None:
    centre, half, *coefficients = gaussian_start(alpha)
    for z in (-2.9, -1.0, 0.0, 1.5, 3.0, 4.9):
        density = math.exp(-z * z / 2.0) / math.sqrt(2.0 * math.pi)
        beyond = math.erfc(z / math.sqrt(2.0)) / 2.0
        squares, excess = (1.0 + z * z) * beyond - z * density, density - z * beyond
        x = (math.log(squares if alpha == 1.5 else excess) - centre) / half
        assert abs(x) <= 1.0
        assert abs(np.polynomial.polynomial.polyval(x, coefficients) - z) < 0.01


def test_second_derivatives_are_refused_and_never_zero(device: str) -> None:
    q = torch.randn(1, 1, 4, 16, generator=torch.Generator().manual_seed(5)).to(device)
    call = {"choice": "entmax", "prior": Causal(), "backend": "triton"}

    def loss(q: Tensor) -> Tensor:
        return attend(q, q, q, **call).square().sum()

    for second in (
        lambda: jvp(grad(loss), (q,), (q,)),
        lambda: grad(lambda q: jvp(loss, (q,), (q,))[1])(q),
        lambda: jvp(lambda q: jvp(loss, (q,), (q,))[1], (q,), (q,)),
    ):
        with pytest.raises(ValueError, match="have one derivative"):
            second()
    q.requires_grad_()
    with forward_ad.dual_level(), pytest.raises(ValueError, match="have one derivative"):
        loss(forward_ad.make_dual(q, q.detach()))
    (g,) = torch.autograd.grad(attend(q, q, q, **call).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"second derivative .* is not implemented"):
        torch.autograd.grad(g.sum(), q)


def test_outputs_and_gradients_lie_in_memory_as_the_queries_do(device: str) -> None:
    """Heads within positions, as a projection leaves them, or positions within heads."""
    draw = torch.Generator().manual_seed(9)
    B, H, G, T, D = 2, 4, 2, 40, 16
    qkv, g = (torch.randn(B, T, n * D, generator=draw).to(device) for n in (H + 2 * G, H))
    heads = torch.split(qkv.unflatten(2, (-1, D)).transpose(1, 2), [H, G, G], dim=1)
    by_layout = []
    for contiguous in (False, True):
        at = [(x.contiguous() if contiguous else x).detach().requires_grad_() for x in heads]
        out = attend(*at, choice=Entmax(1.5), prior=Causal(), backend="triton")
        slopes = torch.autograd.grad(out, at, g.unflatten(2, (H, D)).transpose(1, 2))
        by_layout.append([out.detach(), *slopes])
        for x in by_layout[-1]:
            assert (x if contiguous else x.transpose(1, 2)).is_contiguous()
    for one, other in zip(*by_layout, strict=True):
        assert torch.equal(one, other)


def test_it_is_one_operation_of_a_compiled_graph(device: str) -> None:
    draw = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(1, 20, 2, 16, generator=draw).to(device) for _ in range(3))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # heads within positions
    q.requires_grad_()

    def loss(q: Tensor) -> Tensor:
        prior = Causal() + Padding(torch.tensor([12], device=device)) + ALiBi(2)
        return attend(q, k, v, choice=Entmax(1.5), prior=prior, backend="triton").square().sum()

    found = torch.compile(loss, backend="aot_eager", fullgraph=True)(q)
    torch.testing.assert_close(found, loss(q))
    slopes = (torch.autograd.grad(x, q)[0] for x in (found, loss(q)))
    torch.testing.assert_close(*slopes)
