"""fenchel/attention/linear.py: three forms of one thing, and how near it comes to softmax."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn.functional import elu

from fenchel.attention import attend, linear_attend, linear_step, random_features
from fenchel.attention import linear as page

FEATURES = ["elu", random_features(5, 16, generator=torch.Generator().manual_seed(0))]
every_feature = pytest.mark.parametrize("features", FEATURES, ids=["elu", "random"])


def phi(x: Tensor, features) -> Tensor:
    if features == "elu":
        return elu(x) + 1
    x = x / x.shape[-1] ** 0.25
    w = features.w.to(x)
    return (x @ w.mT - x.square().sum(-1, keepdim=True) / 2).exp() / len(w) ** 0.5


def quadratic(q: Tensor, k: Tensor, v: Tensor, features, causal: bool) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    A = phi(q, features) @ phi(k, features).mT
    if causal:
        A = A.tril(k.shape[2] - q.shape[2])
    return A @ v / A.sum(-1, keepdim=True)


@every_feature
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T", [1, 4, 7])
def test_it_is_the_kernel_written_as_a_square(
    draw, features, causal: bool, T: int, monkeypatch
) -> None:
    monkeypatch.setattr(page, "_CHUNK", 3)
    at = tuple(draw(*s).requires_grad_() for s in ((2, 6, T, 5), (2, 3, 7, 5), (2, 3, 7, 4)))
    ours = linear_attend(*at, features=features, causal=causal)
    exact = quadratic(*at, features, causal)
    torch.testing.assert_close(ours, exact)
    g = torch.cos(torch.arange(exact.numel()).double()).view_as(exact)
    torch.testing.assert_close(torch.autograd.grad(ours, at, g), torch.autograd.grad(exact, at, g))


@every_feature
def test_step_by_step_gives_the_causal_form(draw, features) -> None:
    q, k, v = draw(2, 6, 7, 5), draw(2, 3, 7, 5), draw(2, 3, 7, 4)
    whole = linear_attend(q, k, v, features=features, causal=True)
    state, outs = None, []
    for start, stop in ((0, 1), (1, 2), (2, 5), (5, 7)):
        new = (x[:, :, start:stop] for x in (q, k, v))
        out, state = linear_step(*new, state, features=features)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), whole)


@every_feature
def test_keys_of_the_future_change_no_linear_output(draw, features) -> None:
    q, k, v = draw(1, 2, 150, 5), draw(1, 2, 150, 5), draw(1, 2, 150, 4)
    before = linear_attend(q, k, v, features=features, causal=True)
    k[:, :, 100:], v[:, :, 100:] = 1e3, 1e30
    after = linear_attend(q, k, v, features=features, causal=True)
    assert torch.equal(before[:, :, :100], after[:, :, :100])


def test_the_kernel_of_random_features_has_the_exponential_for_its_mean(draw) -> None:
    q, k = 0.5 * draw(6, 16), 0.5 * draw(7, 16)
    features = random_features(16, 1 << 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        phi(q, features) @ phi(k, features).mT, (q @ k.mT / 4).exp(), atol=0, rtol=0.05
    )


def test_random_features_come_near_softmax_slowly_as_they_grow(draw) -> None:
    q, k, v = draw(1, 1, 16, 16), draw(1, 1, 16, 16), draw(1, 1, 16, 4)
    exact = attend(q, k, v)
    generator = torch.Generator().manual_seed(1)
    error = {}
    for m in (64, 1024, 16384):
        draws = (random_features(16, m, generator=generator) for _ in range(8))
        near = torch.stack([linear_attend(q, k, v, features=f) for f in draws])
        error[m] = ((near - exact).norm() / 8**0.5 / exact.norm()).item()
    assert error[64] > error[1024] > error[16384]
    assert error[64] > 0.5  # unit-variance scores are already much for 64 features
    assert error[16384] < 0.5
    elus = linear_attend(q, k, v)
    assert ((elus - exact).norm() / exact.norm()) > 0.3  # another kernel, not a poor softmax


def test_both_directions_pass_the_finite_difference_check(draw) -> None:
    at = tuple(draw(*s).requires_grad_() for s in ((1, 2, 5, 3), (1, 1, 5, 3), (1, 1, 5, 2)))
    for causal in (False, True):
        assert gradcheck(
            lambda *x, c=causal: linear_attend(*x, causal=c),
            at,
            check_forward_ad=True,
            fast_mode=True,
        )


def test_edges_are_defined(draw) -> None:
    q, k, v = draw(1, 2, 5, 3), draw(1, 1, 2, 3), draw(1, 1, 2, 4)
    early = linear_attend(q, k, v, causal=True)  # three queries stand before every key
    assert (early[:, :, :3] == 0).all()
    torch.testing.assert_close(early[:, :, 3:], linear_attend(q[:, :, 3:], k, v, causal=True))
    none = linear_attend(q, k[:, :, :0], v[:, :, :0])
    assert (none == 0).all()
    for dtype in (torch.float16, torch.bfloat16):
        wild = linear_attend(1e3 * q.to(dtype), 1e3 * k.to(dtype), v.to(dtype))
        assert wild.isfinite().all()
        assert wild.dtype == dtype
    with pytest.raises(ValueError, match="'relu'"):
        linear_attend(q, k, v, features="relu")
    with pytest.raises(ValueError, match="5 wide, the call has 3"):
        linear_attend(q, k, v, features=FEATURES[1])
    with pytest.raises(ValueError, match="one key per query"):
        linear_step(q, k, v)


@pytest.mark.parametrize("size", [1.0, 20.0, 300.0])
@pytest.mark.parametrize("G", [1, 2])
def test_random_features_of_long_keys_still_average_the_values(size: float, G: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = size * torch.randn(1, 2, 5, 16, generator=generator)
    k = size * torch.randn(1, G, 9, 16, generator=generator)
    features = random_features(16, 32, generator=generator)
    ones = torch.ones(1, G, 9, 3)
    torch.testing.assert_close(linear_attend(q, k, ones, features=features), torch.ones(1, 2, 5, 3))
    v = torch.randn(1, G, 9, 3, generator=generator)
    ours = linear_attend(q, k, v, features=features)
    scaled = (x.double().repeat_interleave(2 // x.shape[1], 1) / 16**0.25 for x in (q, k))
    log_q, log_k = (
        x @ features.w.double().mT - x.square().sum(-1, keepdim=True) / 2 for x in scaled
    )
    kernel = torch.logsumexp(log_q.unsqueeze(3) + log_k.unsqueeze(2), -1)  # no exp before the sum
    wanted = kernel.softmax(-1) @ v.double().repeat_interleave(2 // G, 1)
    torch.testing.assert_close(ours.double(), wanted, atol=1e-3 * size, rtol=1e-3)


def test_a_causal_query_that_loses_all_its_keys_raises() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = 20.0 * torch.randn(2, 1, 1, 5, 16, generator=generator)
    features = random_features(16, 32, generator=generator)
    with pytest.raises(ValueError, match=r"below the range of torch.float32 .* features=\"elu\""):
        linear_attend(q, k, torch.ones_like(k), features=features, causal=True)
    with pytest.raises(ValueError, match="below the range"):
        linear_step(q, k, torch.ones_like(k), features=features)
    more = torch.cat([q, q], 2)  # queries before every key have nothing to average
    short = linear_attend(more / 20, k / 20, torch.ones_like(k), features=features, causal=True)
    assert (short[:, :, :5] == 0).all()
    torch.testing.assert_close(short[:, :, 5:], torch.ones_like(k))
