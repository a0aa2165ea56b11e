"""fenchel/attention/attend.py: the definition, worked numbers, shapes and refusals."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, jacrev
from torch.nn.functional import scaled_dot_product_attention

from fenchel.attention import (
    ALiBi,
    Causal,
    Dense,
    Padding,
    Prior,
    Window,
    attend,
    attend_jvp,
    backend_support,
    linear_attend,
    trace,
)
from fenchel.attention.backends import BACKENDS
from fenchel.choice import Capped, Choice, Entmax, Hard, Softmax, Sparsemax
from fenchel.torch_internals import tensors_without_values

QKV = tuple[Tensor, Tensor, Tensor]


def test_rows_are_the_definition_written_query_by_query(draw) -> None:
    q, k, v = draw(4, 5), draw(7, 5), draw(7, 3)
    for scale, beta in ((None, 5**-0.5), (0.7, 0.7)):
        out = attend(q, k, v, scale=scale, backend="reference")
        for t in range(4):
            s = torch.stack([beta * (q[t] @ k[i]) for i in range(7)])
            alpha = s.exp() / s.exp().sum()
            torch.testing.assert_close(out[t], sum(alpha[i] * v[i] for i in range(7)))


Q = torch.tensor([[1.0, 0, 1], [0, 1, 1]], dtype=torch.float64)
K = torch.tensor([[1.0, 1, 0], [1, 0, 1]], dtype=torch.float64)
V = torch.tensor([[2.0, 0, 1], [1, 1, 0]], dtype=torch.float64)


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_the_worked_forward_pass(backend: str) -> None:
    out, p = attend(Q, K, V, return_weights=True, backend="reference")
    assert p.round(decimals=3).tolist() == [[0.360, 0.640], [0.5, 0.5]]
    assert attend(Q, K, V, backend=backend).round(decimals=3).tolist() == [
        [1.360, 0.640, 0.360],
        [1.5, 0.5, 0.5],
    ]
    torch.testing.assert_close(p @ V, out)
    e = (Q @ K.T / 3**0.5).exp()  # unrounded: exp of the rounded 1.155 would be 3.174
    assert round(float(e[0, 1]), 3) == 3.173
    assert round(float(e[1].sum()), 3) == 3.563


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_the_worked_forward_pass_when_causal(backend: str) -> None:
    out = attend(Q, K, V, prior=Causal(), backend=backend)
    torch.testing.assert_close(out, torch.tensor([[2.0, 0, 1], [1.5, 0.5, 0.5]]).double())


@pytest.mark.parametrize("choice", [Softmax(), Softmax(2.5), Entmax(1.5)], ids=repr)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_grouped_heads_are_repeated_heads(qkv: QKV, choice, backend: str) -> None:
    q, *kv = qkv
    for G in (3, 1):  # groups, and one head of keys for all queries
        k, v = (x[:, :G] for x in kv)
        repeated = [x.repeat_interleave(6 // G, dim=1) for x in (k, v)]
        for prior in (None, Causal(), Padding(torch.tensor([5, 2])) + Window(3, 2)):
            ours = attend(q, k, v, choice=choice, prior=prior, backend=backend)
            theirs = attend(q, *repeated, choice=choice, prior=prior, backend="reference")
            torch.testing.assert_close(ours, theirs)


PRIORS = {
    "none": None,
    "causal": Causal(),
    "strict": Causal(strict=True),
    "window": Window(2, 1),
    "padding": Padding(torch.tensor([5, 0])),
    "dense": Dense(torch.randn(6, 4, 7, generator=torch.Generator().manual_seed(3))),
    "sum": Causal() + Padding(torch.tensor([5, 3]), "left"),
}
every_prior = pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())


@every_prior
def test_softmax_goes_to_the_fused_kernels_with_the_same_answer(
    qkv: QKV, prior: Prior | None
) -> None:
    q, k, v = (x.requires_grad_() for x in qkv)
    for choice in (Softmax(), Softmax(1.7)):
        for scale in (None, 0.3):
            call = {"choice": choice, "prior": prior, "scale": scale}
            fused = attend(q, k, v, **call, backend="sdpa")
            plain = attend(q, k, v, **call, backend="reference")
            torch.testing.assert_close(fused, plain)
            torch.testing.assert_close(attend(q, k, v, **call), plain)
            g = torch.cos(torch.arange(plain.numel(), dtype=q.dtype)).view_as(plain)
            ours = torch.autograd.grad(fused, (q, k, v), g)
            torch.testing.assert_close(ours, torch.autograd.grad(plain, (q, k, v), g))


@pytest.mark.parametrize("prior", [None, Causal()], ids=["all", "causal"])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_short_bfloat16_on_a_cpu_is_as_close_to_float64_as_the_fused_kernel(
    prior: Prior | None, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = import_module("fenchel.attention.sdpa")
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, width: int) -> Tensor:
        x = torch.randn(3, 12, heads, width, generator=generator).transpose(1, 2)
        return x.bfloat16().requires_grad_()

    inputs = draw(4, 16), draw(groups, 16), draw(groups, 8)
    g = torch.randn(3, 4, 12, 8, generator=generator).bfloat16()

    def results(inputs: tuple[Tensor, ...]) -> list[Tensor]:
        out = attend(*inputs, prior=prior, choice=Softmax(1.7), scale=0.4)
        return [out, *torch.autograd.grad(out, inputs, g.to(out.dtype))]

    exact = results(tuple(x.detach().double().requires_grad_() for x in inputs))
    short = results(inputs)
    wide = tuple(x.detach().float().requires_grad_() for x in inputs)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = results(wide)
    monkeypatch.setattr(page, "SHORT", 0)
    fused = results(inputs)
    names = ("out", "q", "k", "v")
    for name, truth, *rest in zip(names, exact, short, under_autocast, fused, strict=True):
        ours, cast, theirs = (((x - truth).norm() / truth.norm()).item() for x in rest)
        assert 0.0 < ours < max(1.5 * theirs, 0.006), name
        assert cast == pytest.approx(ours, rel=0.05), name


def test_short_bfloat16_refuses_a_second_derivative() -> None:
    q = torch.ones(1, 1, 3, 4, dtype=torch.bfloat16, requires_grad=True)
    out = attend(q, q, q)
    with pytest.raises(RuntimeError, match="no second derivative on a CPU"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_a_plain_call_builds_no_mask(qkv: QKV, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv
    seen = []

    def spy(*args: object, **kwargs: object) -> Tensor:
        seen.append((args[3:], kwargs))
        return scaled_dot_product_attention(*args, **kwargs)

    page = import_module("fenchel.attention.sdpa")
    monkeypatch.setattr(page, "scaled_dot_product_attention", spy)
    attend(q, k, v)
    attend(q[:, :, :1], k, v, prior=Causal())  # one new query on its whole cache
    attend(k, k, v, prior=Causal())
    masks_and_flags = [(args[0], args[2]) for args, _ in seen]
    assert masks_and_flags == [(None, False), (None, False), (None, True)]


def test_a_step_with_a_cache_is_the_last_row_of_the_whole(draw) -> None:
    q, k, v = draw(2, 6, 7, 5), draw(2, 3, 7, 5), draw(2, 3, 7, 3)
    for choice in (Softmax(), Entmax(1.5)):
        whole = attend(q, k, v, choice=choice, prior=Causal())
        for T in (1, 3):
            few = attend(q[:, :, -T:], k, v, choice=choice, prior=Causal())
            torch.testing.assert_close(few, whole[:, :, -T:])


def test_keys_of_the_future_change_no_output(draw) -> None:
    q, k, v = draw(2, 6, 7, 5), draw(2, 3, 7, 5), draw(2, 3, 7, 3)
    for choice in (Softmax(), Entmax(1.5)):
        before = attend(q, k, v, choice=choice, prior=Causal())
        k2, v2 = k.clone(), v.clone()
        k2[:, :, 4:], v2[:, :, 4:] = 1e3 * draw(2, 3, 3, 5), 1e3 * draw(2, 3, 3, 3)
        after = attend(q, k2, v2, choice=choice, prior=Causal())
        assert torch.equal(before[:, :, :4], after[:, :, :4])


def test_padded_keys_weigh_nothing_and_masks_multiply_nothing(qkv: QKV) -> None:
    q, k, v = qkv
    _, p = attend(q, k, v, prior=Padding(torch.tensor([5, 3])), return_weights=True)
    assert (p[0, :, :, 5:] == 0).all()
    assert (p[1, :, :, 3:] == 0).all()
    torch.testing.assert_close(p.sum(-1), torch.ones(2, 6, 4, dtype=torch.float64))
    # A factor 0 on the scores leaves exp(0); a factor 0 on the weights leaves rows short of 1.
    open_ = torch.arange(7) < 5
    z = q[0, 0] @ k[0, 0].mT / 5**0.5
    assert (torch.softmax(z * open_, -1)[:, 5:] > 0).all()
    assert ((torch.softmax(z, -1) * open_).sum(-1) < 1).all()


def test_a_query_with_no_open_key_gets_zeros_where_a_large_number_would_leak(qkv: QKV) -> None:
    q, k, v = (x.float().requires_grad_() for x in qkv)
    for backend in ("reference", "sdpa"):
        out = attend(q, k, v, prior=Padding(torch.tensor([0, 4])), backend=backend)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert (out[0] == 0).all()
        assert all((g[0] == 0).all() for g in grads)
        assert all(g.isfinite().all() for g in grads)
    leak = attend(q, k, v, prior=Dense(torch.full((1, 7), -1e9)), backend="reference")
    assert (leak.abs() > 1e-3).any()
    forbidden = Dense(torch.full((1, 4), -1e9))
    _, p = attend(q, k[:, :, :4], v[:, :, :4], prior=forbidden, return_weights=True)
    assert (p == 0.25).all()


def test_a_bias_is_added_after_the_scale(draw) -> None:
    """Added before it, a slope of 0.5 would act as 0.0625 at a width of 64."""
    q, k = draw(1, 1, 1, 64), draw(1, 1, 2, 64)
    bias = torch.tensor([0.5, 0.0], dtype=torch.float64)
    _, plain = attend(q, k, k, return_weights=True)
    _, p = attend(q, k, k, prior=Dense(bias), return_weights=True)
    gained = (p.log() - plain.log()).squeeze()
    assert float(gained[0] - gained[1]) == pytest.approx(0.5, rel=1e-12)
    wrong = ((q @ k.mT + bias) / 64**0.5).softmax(-1)
    lost = (wrong.log() - plain.log()).squeeze()
    assert float(lost[0] - lost[1]) == pytest.approx(0.0625, rel=1e-12)


def test_a_sharp_enough_choice_is_the_best_inner_product(draw) -> None:
    q, k, v = draw(1, 5), draw(7, 5), draw(7, 3)
    best = (q @ k.mT).argmax()
    torch.testing.assert_close(attend(q, k, v, choice=Softmax(1e4))[0], v[best])
    scores = torch.tensor([[1.0, 2.0, 1.9]], dtype=torch.float64).mT  # keys of width 1, query 1
    one = torch.ones(1, 1, dtype=torch.float64)
    for beta, top in ((1.0, 0.44), (10.0, 0.73), (100.0, 0.99995)):
        _, p = attend(one, scores, scores, choice=Softmax(beta), return_weights=True)
        assert p.max().item() == pytest.approx(top, abs=0.005)


def test_fewer_and_more_axes_are_the_same_attention(qkv: QKV) -> None:
    q, k, v = qkv
    for choice in (Softmax(), Sparsemax()):
        whole = attend(q, k, v, choice=choice)
        heads = attend(q[0], k[0], v[0], choice=choice)
        torch.testing.assert_close(heads, whole[0])
        one = attend(q[0, 1], k[0, 0], v[0, 0], choice=choice)
        torch.testing.assert_close(one, whole[0, 1])
        five = [x.unflatten(0, (2, 1)) for x in (q, k, v)]
        torch.testing.assert_close(attend(*five, choice=choice), whole.unflatten(0, (2, 1)))
        shared = attend(q, k[:1], v[:1], choice=choice)
        torch.testing.assert_close(shared[1], attend(q[1], k[0], v[0], choice=choice))


def test_under_dropout_the_weights_of_a_row_need_not_sum_to_one() -> None:
    """E60: four even weights, p = 0.1: j dropped leave (4 - j) / 4 / 0.9, 0.833 for one."""
    torch.manual_seed(0)
    q, k, ones = torch.zeros(1, 1, 400, 8), torch.zeros(1, 1, 4, 8), torch.ones(1, 1, 4, 1)
    sums = attend(q, k, ones, dropout=0.1).flatten()
    dropped = (4.0 - 3.6 * sums).round()
    torch.testing.assert_close(sums, (4.0 - dropped) / 3.6)
    assert (sums - 0.8333).abs().min() < 1e-4
    assert float((dropped == 1).float().mean()) == pytest.approx(4 * 0.1 * 0.9**3, abs=0.06)
    assert float(sums.mean()) == pytest.approx(1.0, abs=0.03)
    assert torch.equal(attend(q, k, ones), torch.ones(1, 1, 400, 1))


def test_dropout_keeps_the_mean_and_follows_the_seed(draw) -> None:
    q, k, v = draw(1, 2, 3, 4), draw(1, 2, 5, 4), draw(1, 2, 5, 3)
    call = {"choice": Sparsemax(), "dropout": 0.4}
    torch.manual_seed(1)
    once = attend(q, k, v, **call)
    torch.manual_seed(1)
    assert torch.equal(once, attend(q, k, v, **call))
    many = (x.expand(3000, -1, -1, -1) for x in (q, k, v))
    mean = attend(*many, **call).mean(0, keepdim=True)
    torch.testing.assert_close(mean, attend(q, k, v, choice=Sparsemax()), atol=0.1, rtol=0)
    torch.manual_seed(1)
    _, p = attend(q, k, v, **call, return_weights=True)
    assert (p.sum(-1) - 1).abs().max() > 0.05  # a dropped row no longer sums to one


def test_variance_of_a_score_with_and_without_means() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = 1.5 * torch.randn(2, 200_000, 64, generator=generator)
    assert (q * k).sum(-1).var().item() == pytest.approx(64 * 1.5**4, rel=0.02)
    general = 64 * (1.5**4 + 2 * 1.5**2)
    assert general == 612
    assert ((q + 1) * (k + 1)).sum(-1).var().item() == pytest.approx(general, rel=0.02)
    # deviations 1.5 and 0.75, means 1 and -2: each of the four has its place in the formula
    unequal = 64 * (1.5**2 * 0.75**2 + 1.5**2 * 2**2 + 0.75**2 * 1**2)
    assert ((q + 1) * (k / 2 - 2)).sum(-1).var().item() == pytest.approx(unequal, rel=0.02)
    scaled = (q * k).sum(-1) / 8
    assert scaled.var().item() == pytest.approx(1.5**4, rel=0.02)


def test_the_right_scale_keeps_rows_from_collapsing() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 16, 64, 64, dtype=torch.float64, generator=generator)
    entropy = {}
    for name, scale in (("unscaled", 1.0), ("scaled", None)):
        _, p = attend(q, k, k, scale=scale, return_weights=True)
        entropy[name] = torch.special.entr(p).sum(-1).mean().item()
    assert entropy["unscaled"] == pytest.approx(0.55, abs=0.03)
    assert entropy["scaled"] == pytest.approx(3.68, abs=0.03)


def test_a_learned_temperature_learns_in_both_back_ends(qkv: QKV) -> None:
    q, k, v = qkv
    beta = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    for prior in (None, Causal()):
        grads = []
        for backend in ("reference", "sdpa"):
            out = attend(q, k, v, choice=Softmax(beta), prior=prior, backend=backend)
            grads.append(torch.autograd.grad(out.square().sum(), beta)[0])
        torch.testing.assert_close(*grads)
        assert grads[0].abs() > 1e-3


def test_a_learned_prior_learns_in_both_back_ends(qkv: QKV) -> None:
    q, k, v = qkv
    table = torch.zeros(6, 4, 7, dtype=torch.float64, requires_grad=True)
    grads = []
    for backend in ("reference", "sdpa"):
        out = attend(q, k, v, prior=Dense(table) + Causal(), backend=backend)
        grads.append(torch.autograd.grad(out.square().sum(), table)[0])
    torch.testing.assert_close(*grads)


def test_each_back_end_gives_its_reason(qkv: QKV) -> None:
    reasons = backend_support(*qkv)
    assert [name for name in BACKENDS if reasons[name] is None] == list(BACKENDS)[:4]
    assert "entmax, not Softmax" in (reasons["triton"] or "")
    assert "GPU" in (reasons["tangent"] or "")
    answer = backend_support(*qkv, choice=Entmax(1.5))
    assert answer["reference"] is None
    assert "Entmax" in (answer["sdpa"] or "")
    with pytest.raises(ValueError, match="fused kernels compute softmax, not Entmax"):
        attend(*qkv, choice=Entmax(1.5), backend="sdpa")
    with pytest.raises(ValueError, match="weights"):
        attend(*qkv, backend="sdpa", return_weights=True)
    with pytest.raises(ValueError, match="no back end 'fast'"):
        attend(*qkv, backend="fast")


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((2, 6, 4, 5), (2, 3, 7, 4), (2, 3, 7, 3)), "equally wide"),
        (((2, 6, 4, 5), (2, 3, 7, 5), (2, 3, 6, 3)), "one value for each key"),
        (((2, 6, 4, 5), (2, 3, 7, 5), (2, 3, 70, 3)), "one value for each key"),
        (((2, 6, 1, 5), (2, 3, 7, 5), (2, 3, 9, 5)), "one value for each key"),
        (((2, 6, 9, 5), (2, 3, 7, 5), (2, 3, 5, 5)), "one value for each key"),
        (((2, 6, 4, 5), (2, 6, 7, 5), (2, 3, 7, 5)), "one value for each key"),
        (((2, 6, 4, 5), (2, 6, 7, 5), (2, 1, 7, 5)), "one value for each key"),
        (((2, 6, 4, 5), (2, 1, 7, 5), (2, 6, 7, 5)), "one value for each key"),
        (((2, 6, 4, 5), (2, 3, 7, 5), (1, 3, 7, 5)), "one value for each key"),
        (((2, 6, 4, 5), (1, 3, 7, 5), (2, 3, 7, 5)), "one value for each key"),
        (((2, 6, 4, 5), (2, 3, 7, 5), (3, 7, 5)), "same number of axes"),
        (((2, 6, 4, 5), (2, 3, 7, 5), (1, 2, 3, 7, 5)), "same number of axes"),
        (((2, 6, 4, 5), (2, 0, 7, 5), (2, 0, 7, 5)), "0 heads of keys do not divide 6"),
        (((2, 6, 4, 5), (2, 4, 7, 5), (2, 4, 7, 3)), "4 heads of keys do not divide 6"),
        (((2, 6, 4, 5), (3, 3, 7, 5), (3, 3, 7, 3)), "same batch"),
        (((6, 4, 5), (2, 3, 7, 5), (2, 3, 7, 3)), "same number of axes"),
        (((5,), (5,), (5,)), "2 or more"),
    ],
)
@pytest.mark.parametrize("prior", [None, Causal()], ids=["none", "causal"])
@pytest.mark.parametrize("choice", [Softmax(), Softmax(2.0), Sparsemax()], ids=repr)
def test_shapes_that_do_not_fit_are_refused_in_a_sentence(
    shapes: tuple[tuple[int, ...], ...], words: str, choice, prior: Prior | None
) -> None:
    q, k, v = map(torch.zeros, shapes)
    for backend in ("auto", *BACKENDS):
        with pytest.raises(ValueError, match=words):
            attend(q, k, v, choice=choice, prior=prior, backend=backend)
    for f in (linear_attend, trace):
        with pytest.raises(ValueError, match=words):
            f(q, k, v)
    with pytest.raises(ValueError, match=words):
        attend_jvp((q, k, v), (None, None, None), choice=choice, prior=prior)


@st.composite
def nearly_fitting(draw: st.DrawFn) -> list[list[int]]:
    """Shapes of q, k, v that fit, and in three of four cases one size of them changed."""
    B, G, R, T, S, D, E = (draw(st.integers(0, 3)) for _ in range(7))
    shapes = [[B, G * R, T, D], [B, G, S, D], [B, G, S, E]]
    if draw(st.integers(0, 3)):
        tensor, axis = draw(st.integers(0, 2)), draw(st.integers(0, 3))
        shapes[tensor][axis] = draw(st.integers(0, 4))
    return shapes


@given(shapes=nearly_fitting(), causal=st.booleans())
@settings(max_examples=400)
def test_the_fused_path_accepts_what_the_definition_accepts(
    shapes: list[list[int]], causal: bool
) -> None:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    prior = Causal() if causal else None
    try:
        wanted = attend(q, k, v, prior=prior, backend="reference")
    except ValueError as refusal:
        with pytest.raises(ValueError, match=re.escape(str(refusal))):
            attend(q, k, v, prior=prior)
        return
    torch.testing.assert_close(attend(q, k, v, prior=prior), wanted)


def test_other_arguments_that_do_not_fit_are_refused(qkv: QKV) -> None:
    q, k, v = qkv
    with pytest.raises(ValueError, match="one floating dtype"):
        attend(q.float(), k, v)
    for dropout in (1.0, 1.5, -0.1, float("nan")):
        with pytest.raises(ValueError, match=f"dropout .* got {dropout}"):
            attend(q, k, v, dropout=dropout)
    with pytest.raises(ValueError, match="3 lengths for 2"):
        attend(q, k, v, prior=Padding(torch.tensor([1, 2, 3])))


@pytest.mark.parametrize("backend", ["reference", "blocked", "sdpa", "auto"])
def test_a_scale_of_zero_weighs_the_open_keys_evenly(backend: str, draw) -> None:
    q, v = draw(1, 2, 4, 8), draw(1, 2, 4, 8)
    means = v.cumsum(2) / torch.arange(1.0, 5.0)[:, None]
    ours = attend(q, q, v, prior=Causal(), scale=0.0, backend=backend)
    torch.testing.assert_close(ours, means.to(ours.dtype))


def test_a_mask_tensor_is_understood_as_torch_understands_it(qkv: QKV, draw) -> None:
    q, k, v = qkv
    repeated = [x.repeat_interleave(2, dim=1) for x in (k, v)]
    masks = [draw(4, 7) > 0, draw(2, 1, 4, 7) > 0, draw(6, 4, 7), draw(1, 7)]
    for mask in masks:
        theirs = scaled_dot_product_attention(q, *repeated, attn_mask=mask)
        for backend in ("auto", "reference", "blocked", "sdpa"):
            ours = attend(q, k, v, prior=mask, backend=backend)
            torch.testing.assert_close(ours, torch.nan_to_num(theirs))
    both = attend(q, k, v, prior=Causal() + masks[0])
    torch.testing.assert_close(both, attend(q, k, v, prior=Causal() + Dense(masks[0])))
    assert backend_support(q, k, v, prior=masks[0])["sdpa"] is None
    with pytest.raises(ValueError, match=r"got \(4, 7\) of torch.int64; mask.bool\(\) may attend"):
        attend(q, k, v, prior=masks[0].long())
    with pytest.raises(ValueError, match="does not broadcast"):
        attend(q, k, v, prior=masks[0][:, :6])
    with pytest.raises(TypeError, match=r"prior is a Prior such as Causal\(\), .* got list"):
        attend(q, k, v, prior=[True])
    with pytest.raises(TypeError, match="prior=Window is a class that needs arguments"):
        attend(q, k, v, prior=Window)


def test_a_map_is_understood_by_its_name_and_by_its_class(qkv: QKV) -> None:
    wanted = attend(*qkv, choice=Entmax(1.5), prior=Causal())
    for choice in ("entmax", Entmax):
        assert torch.equal(attend(*qkv, choice=choice, prior=Causal), wanted)
    assert torch.equal(attend(*qkv, choice="softmax"), attend(*qkv))
    assert trace(*qkv, choice="entmax", prior=Causal).weights.shape == (2, 6, 4, 7)
    with pytest.raises(ValueError, match="no choice map 'entmx'"):
        attend(*qkv, choice="entmx")
    with pytest.raises(TypeError, match="choice=Capped is a class that needs arguments"):
        attend(*qkv, choice=Capped)
    with pytest.raises(TypeError, match=r"choice is a map such as Entmax\(1.5\), .* got float"):
        attend(*qkv, choice=1.5)


@pytest.mark.parametrize("choice", ["softmax", "entmax", "sparsemax", "hard"])
@pytest.mark.parametrize("backend", ["auto", "reference", "blocked"])
def test_autocast_takes_mixed_dtypes_for_every_map(choice: str, backend: str, draw) -> None:
    q, k, v = draw(1, 2, 4, 8).bfloat16(), draw(1, 2, 6, 8).float(), draw(1, 2, 6, 8).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = attend(q, k, v, choice=choice, backend=backend)
        same = attend(q, k.bfloat16(), v.bfloat16(), choice=choice, backend=backend)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, same)
    with pytest.raises(ValueError, match="one floating dtype"):
        attend(q, k, v, choice=choice, backend=backend)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match="one floating"),
    ):
        attend(q, k, v.double(), choice=choice, backend=backend)


def test_two_reverse_derivatives_of_softmax(draw) -> None:
    """torch.func is known when attend is called; create_graph is not, and torch raises for it."""
    x = draw(1, 2, 4, 8)

    def slope(backend: str) -> Callable[[Tensor], Tensor]:
        return grad(lambda x: attend(x, x, x, backend=backend).pow(3).sum())

    wanted = jacrev(slope("reference"))(x)
    torch.testing.assert_close(jacrev(slope("auto"))(x), wanted)
    torch.testing.assert_close(jacrev(slope("blocked"))(x), wanted)
    for backend in ("reference", "blocked"):
        leaf = x.clone().requires_grad_()
        out = attend(leaf, leaf, leaf, backend=backend).pow(3).sum()
        (g,) = torch.autograd.grad(out, leaf, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), leaf)
        torch.testing.assert_close(h, wanted.sum((0, 1, 2, 3)))
    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(attend(leaf, leaf, leaf).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(g.sum(), leaf)


def test_the_help_of_attend_names_every_back_end() -> None:
    assert all(f'"{name}"' in (attend.__doc__ or "") for name in ("auto", *BACKENDS))


@pytest.mark.parametrize("prior", [None, Causal(), Causal() + ALiBi(2)], ids=str)
@pytest.mark.parametrize(
    "choice", [Softmax(), Entmax(1.5), Entmax(1.3), Sparsemax(), Hard(), Capped(0.5)], ids=str
)
@pytest.mark.parametrize("fake", [False, True])
def test_shapes_are_computed_without_values(
    choice: Choice, prior: Prior | None, fake: bool
) -> None:
    """On the device "meta" and under FakeTensorMode, as tools that count shapes and memory do."""
    with tensors_without_values() if fake else nullcontext():
        device = "cpu" if fake else "meta"
        q = torch.randn(1, 2, 5, 8, device=device, requires_grad=True)
        v = torch.randn(1, 2, 5, 3, device=device)
        out = attend(q, q, v, choice=choice, prior=prior)
        out.sum().backward()
    assert out.shape == (1, 2, 5, 3)
    assert q.grad is not None
    assert q.grad.shape == q.shape


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"is_causal": True}, r"prior=fenchel\.Causal\(\)"),
        ({"attn_mask": None}, "prior=mask"),
        ({"dropout_p": 0.1}, "dropout="),
        ({"enable_gqa": True}, "grouped by the shapes"),
        ({"prio": None}, "unexpected keyword argument 'prio'"),
    ],
)
def test_arguments_of_torchs_function_get_the_one_that_they_are_here(
    given: dict[str, object], hint: str
) -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(TypeError, match=hint):
        attend(q, q, q, **given)  # type: ignore[call-overload]
