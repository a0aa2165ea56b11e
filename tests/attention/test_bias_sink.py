"""fenchel/attention/bias.py: weights that may sum to less than one."""

import pytest
import torch
from torch import Tensor
from torch.func import jvp
from torch.nn.attention.flex_attention import flex_attention

from fenchel.attention import (
    ALiBi,
    Causal,
    Dense,
    Padding,
    Prior,
    Sink,
    Window,
    attend,
    backend_support,
    flex,
    selected_backend,
    with_sink,
)
from fenchel.choice import Choice, Entmax, Softmax, Sparsemax

PRIORS: dict[str, Prior | None] = {
    "none": None,
    "causal": Causal(),
    "window": Window(1, 0),
    "padding": Padding(torch.tensor([5, 0])) + Causal(),
    "bias": ALiBi(6) + Causal(),
    "dense": Dense(torch.randn(6, 4, 7, generator=torch.Generator().manual_seed(3))),
}
every_prior = pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())


@every_prior
@pytest.mark.parametrize("choice", [Softmax(), Entmax(1.5), Sparsemax()], ids=repr)
@pytest.mark.parametrize("backend", ["reference", "blocked", "auto"])
def test_it_is_one_more_column_that_is_thrown_away(
    qkv: tuple[Tensor, Tensor, Tensor], backend: str, choice: Choice, prior: Prior | None, draw
) -> None:
    q, k, v = qkv
    r = draw(6).requires_grad_()
    ours = attend(
        q, *with_sink(k, v), choice=choice, prior=Sink(r, prior), scale=0.6, backend=backend
    )
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    z = 0.6 * q @ k.mT
    if prior is not None:
        z = z + prior.log(4, 7, B=2, H=6, dtype=z.dtype)
    row = torch.cat([r.view(1, 6, 1, 1).expand(2, 6, 4, 1), z], -1)
    exact = choice.weights(row)[..., 1:] @ v
    torch.testing.assert_close(ours, exact)
    slopes = [torch.autograd.grad(x.square().sum(), r)[0] for x in (ours, exact)]
    torch.testing.assert_close(*slopes, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("width", [5, 3])
def test_the_temperature_of_the_map_counts_once(
    width: int, qkv: tuple[Tensor, Tensor, Tensor]
) -> None:
    q, k, v = qkv
    v, choice = v[..., :width], Softmax(beta=0.5)
    ours, exact = (attend(q, k, v, choice=choice, sink=0.7, backend=b) for b in ("auto", "sdpa"))
    torch.testing.assert_close(ours, exact)
    torch.testing.assert_close(ours, attend(q, k, v, scale=0.5 / 5**0.5, sink=0.7))


def test_a_narrow_score_does_not_round_the_other_biases(
    qkv: tuple[Tensor, Tensor, Tensor], draw
) -> None:
    q, k, v = qkv
    prior, r = Dense(draw(4, 7)), torch.tensor(0.5, dtype=torch.bfloat16)
    narrow, wide = (attend(q, k, v, prior=prior, sink=x, backend="reference") for x in (r, r.to(q)))
    torch.testing.assert_close(narrow, wide, atol=0.0, rtol=0.0)


def test_under_softmax_it_shrinks_the_outputs(qkv: tuple[Tensor, Tensor, Tensor], draw) -> None:
    q, k, v = qkv
    r = draw(6)
    Z = (q @ k.repeat_interleave(2, 1).mT / 5**0.5).exp().sum(-1, keepdim=True)
    share = Z / (Z + r.exp().view(1, 6, 1, 1))
    ours = attend(q, *with_sink(k, v), prior=Sink(r))
    torch.testing.assert_close(ours, share * attend(q, k, v))


def test_a_sink_far_below_takes_nothing(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = qkv
    none = torch.full((6,), -torch.inf, dtype=q.dtype)
    ours = attend(q, *with_sink(k, v), prior=Sink(none, Causal()))
    torch.testing.assert_close(ours, attend(q, k, v, prior=Causal()))


SCORES = {"number": (), "per head": (6,), "per query": (2, 6, 4), "per query of a row": (1, 6, 4)}
every_score = pytest.mark.parametrize("shape", SCORES.values(), ids=SCORES.keys())


def by_hand(q: Tensor, k: Tensor, v: Tensor, r: Tensor, prior: Prior | None) -> Tensor:
    """softmax((r, z)) of the true keys times the values, written with torch alone."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    z = 0.6 * q @ k.mT
    if prior is not None:
        z = z + prior.log(4, 7, B=2, H=6, dtype=z.dtype)
    r = (r if r.dim() == 3 else r.view(1, -1, 1)).expand(2, 6, 4)
    return torch.softmax(torch.cat([r.unsqueeze(-1), z], -1), -1)[..., 1:] @ v


@every_score
@every_prior
@pytest.mark.parametrize("backend", ["reference", "blocked", "sdpa", "auto"])
def test_a_score_per_query_learns_in_every_back_end(
    backend: str, prior: Prior | None, shape: tuple[int, ...], draw
) -> None:
    at = [draw(2, 6, 4, 5), draw(2, 3, 7, 5), draw(2, 3, 7, 5), draw(*shape)]  # E = D: fused
    at = [x.requires_grad_() for x in at]
    *qkv, r = at
    ours = attend(*qkv, sink=r, prior=prior, scale=0.6, backend=backend)
    exact = by_hand(*at, prior)
    torch.testing.assert_close(ours, exact, atol=1e-7, rtol=1e-7)
    g = torch.linspace(-1.0, 2.0, exact.numel(), dtype=exact.dtype).view_as(exact)
    slopes = [torch.autograd.grad(x, at, g) for x in (ours, exact)]
    torch.testing.assert_close(*slopes, atol=1e-6, rtol=1e-6)


@every_score
@pytest.mark.parametrize("backend", ["reference", "blocked", "auto"])
def test_its_tangents_are_those_of_the_definition(
    backend: str, shape: tuple[int, ...], draw
) -> None:
    at = draw(2, 6, 4, 5), draw(2, 3, 7, 5), draw(2, 3, 7, 5), draw(*shape)
    moves = tuple(torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in at)

    def ours(q: Tensor, k: Tensor, v: Tensor, r: Tensor) -> Tensor:
        return attend(q, k, v, sink=r, prior=Causal(), scale=0.6, backend=backend)

    _, exact = jvp(lambda *x: by_hand(*x, Causal()), at, moves)
    torch.testing.assert_close(jvp(ours, at, moves)[1], exact, atol=1e-6, rtol=1e-6)


@every_score
@every_prior
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_has_it_as_a_factor(
    prior: Prior | None, shape: tuple[int, ...], draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda _: flex_attention)
    q, k, v, r = draw(2, 6, 4, 5), draw(2, 3, 7, 5), draw(2, 3, 7, 3), draw(*shape)
    ours = attend(q, k, v, sink=r, prior=prior, scale=0.6, backend="flex")
    torch.testing.assert_close(ours, by_hand(q, k, v, r, prior), atol=1e-6, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_kernels_that_take_it_as_a_factor_get_no_copy_of_the_keys(
    draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda _: flex_attention)
    calls = [("auto", Causal()), ("auto", None), ("sdpa", Window(2)), ("flex", Window(2))]
    qkv, r = (draw(2, 6, 7, 5), draw(2, 3, 7, 5), draw(2, 3, 7, 5)), draw(6)
    exact = [attend(*qkv, sink=r, prior=prior, backend="reference") for _, prior in calls]

    def refuse(*_: Tensor) -> None:
        raise AssertionError("the keys were copied")

    monkeypatch.setattr("fenchel.attention.bias.pad", refuse)
    for (backend, prior), wanted in zip(calls, exact, strict=True):
        torch.testing.assert_close(attend(*qkv, sink=r, prior=prior, backend=backend), wanted)
    with pytest.raises(AssertionError, match="copied"):
        attend(*qkv, sink=r, prior=Causal(), backend="reference")


def test_a_gate_per_head_is_a_sink(qkv: tuple[Tensor, Tensor, Tensor], draw) -> None:
    """Z / (Z + e^r) = sigmoid(log Z - r): the sink of a gate g has r = log Z - logit g."""
    q, k, v = qkv
    g = torch.sigmoid(draw(2, 6, 4))
    z = q @ k.repeat_interleave(2, 1).mT / 5**0.5 + Causal().log(4, 7, dtype=q.dtype)
    r = Softmax().value(z) - torch.logit(g)  # the value of the problem is log Z
    gated = g.unsqueeze(-1) * attend(q, k, v, prior=Causal())
    out, p = attend(q, k, v, sink=r, prior=Causal(), return_weights=True)
    torch.testing.assert_close(out, gated, atol=1e-9, rtol=1e-9)
    assert p.shape == (2, 6, 4, 7)
    torch.testing.assert_close(p.sum(-1), g)  # what is left to the tokens; 1 - g is not taken


def test_a_sink_under_a_causal_mask_stays_with_the_fused_kernels(draw) -> None:
    q = draw(1, 6, 8, 16).float()
    assert selected_backend(q, q, q, prior=Causal(), sink=torch.zeros(6)) == "sdpa"
    refusals = backend_support(q, q, q, prior=Causal(), sink=torch.zeros(6), choice="entmax")
    assert "no prior of the kind Sink" in (refusals["triton"] or "")
    assert "softmax, not Entmax" in (refusals["sdpa"] or "")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_narrow_numbers_and_large_scores_leave_it_finite(
    size: float, dtype: torch.dtype, draw
) -> None:
    at = [(size * draw(1, 6, 8, 16)).to(dtype).requires_grad_() for _ in range(3)]
    r = torch.tensor([-torch.inf, -1e4, 0.0, 1.0, 1e4, 1e8], requires_grad=True)
    out = attend(*at, prior=Causal(), sink=r)
    slopes = torch.autograd.grad(out.float().sum(), [*at, r])
    assert out.dtype == dtype
    assert out.isfinite().all()
    assert all(x.isfinite().all() for x in slopes)
    plain = attend(*at, prior=Causal())
    near = 0.02 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out[:, 0], plain[:, 0], atol=near * size, rtol=near)  # -inf: nothing


def test_a_second_derivative_of_the_fused_kernel_raises(draw) -> None:
    q, r = draw(1, 2, 8, 4).requires_grad_(), torch.zeros(2, requires_grad=True)
    slope = torch.autograd.grad(attend(q, q, q, sink=r).square().sum(), [q, r], create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(slope[0].sum(), q)
    slope = torch.autograd.grad(
        attend(q, q, q, sink=r, backend="blocked").square().sum(), [q, r], create_graph=True
    )
    assert torch.autograd.grad(slope[1].square().sum(), q)[0].isfinite().all()


def test_compiled_it_is_the_same(draw) -> None:
    q, r = draw(1, 2, 8, 4).float(), torch.zeros(2, requires_grad=True)
    layer = torch.compile(lambda q, r: attend(q, q, q, sink=r, prior=Causal()), backend="eager")
    ours, exact = layer(q, r), attend(q, q, q, sink=r, prior=Causal(), backend="reference")
    torch.testing.assert_close(ours, exact)
    slopes = [torch.autograd.grad(x.square().sum(), r)[0] for x in (ours, exact)]
    torch.testing.assert_close(*slopes)


def test_its_shape_must_fit(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = qkv
    with pytest.raises(ValueError, match=r"a sink of scores \(5,\) is one key"):
        attend(q, k, v, sink=torch.zeros(5))
    with pytest.raises(ValueError, match=r"a sink of scores \(2, 6, 3\)"):
        attend(q, k, v, sink=torch.zeros(2, 6, 3))
    with pytest.raises(ValueError, match="one score per head"):
        Sink(torch.zeros(2, 3))
