"""fenchel/attention/bias.py: slopes, buckets, and what a bias means as a prior."""

import itertools

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from fenchel.attention import ALiBi, Causal, RelativeBias, attend
from fenchel.attention.bias import bucket, slope
from fenchel.attention.prior import Prior, ScoreBlock
from fenchel.choice import Softmax


def test_slopes_of_a_power_of_two_halve() -> None:
    assert slope(torch.arange(8), 8).tolist() == [2.0**-k for k in range(1, 9)]


def test_slopes_for_kernels_are_made_once_and_serve_training_after_inference() -> None:
    device = torch.device("cpu")
    with torch.inference_mode():
        first = ALiBi(7).band(4, device).slopes
    assert first is not None
    assert first is ALiBi(7).band(9, device).slopes
    assert not first.is_inference()


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 8, 12, 16, 20])
def test_slopes_are_those_of_bloom(heads: int) -> None:
    theirs = build_alibi_tensor(torch.ones(1, 4), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(slope(torch.arange(heads), heads), theirs)


def test_alibi_is_a_slope_times_the_distance() -> None:
    bias = ALiBi(2).log(3, 5, H=2)[0]
    i, j = torch.arange(2, 5)[:, None], torch.arange(5)
    assert torch.equal(bias[0], -(2.0**-4) * (i - j).abs())
    assert torch.equal(bias[1], -(2.0**-8) * (i - j).abs())


def test_under_a_causal_mask_three_forms_of_alibi_are_one(draw) -> None:
    z, m = draw(5, 5), 0.5
    i, j = torch.arange(5)[:, None], torch.arange(5)
    past = Causal().log(5, 5, dtype=torch.float64)[0, 0]
    forms = [-m * (i - j).abs(), -m * (i - j), m * j]
    causal = [Softmax().weights(z, form + past) for form in forms]
    torch.testing.assert_close(causal[0], causal[1], atol=1e-15, rtol=0)
    torch.testing.assert_close(causal[0], causal[2], atol=1e-15, rtol=0)
    free = [Softmax().weights(z, form.double()) for form in forms]
    assert (free[0] - free[1]).abs().max() > 0.1


@pytest.mark.parametrize("both_sides", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 9), (7, 7), (5, 40), (9, 4), (0, 3), (200, 200)])
def test_a_relative_bias_written_out_is_the_table_entry_by_entry(
    draw, both_sides: bool, dtype: torch.dtype, T: int, S: int
) -> None:
    table = draw(8, 4).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    prior = RelativeBias(table, both_sides, distance=20)
    some = slice(1, None), slice(1, 3), slice(0, None, 2)
    for rows, keys, heads in itertools.product((slice(None), *some), repeat=3):
        block = ScoreBlock(1, 4, T, S, None, slice(None), heads, rows, keys)
        quick, plain = prior.dense(block, dtype), Prior.dense(prior, block, dtype)
        assert torch.equal(quick, plain)
        if quick.numel() and dtype == torch.float64:
            towards = torch.linspace(-1, 1, quick.numel(), dtype=dtype).view(quick.shape)
            gradients = [torch.autograd.grad(x, table, towards)[0] for x in (quick, plain)]
            torch.testing.assert_close(*gradients)


def test_the_gradient_of_a_relative_bias_adds_up_in_the_precision_of_the_table() -> None:
    table = torch.zeros(4, 1, requires_grad=True)
    log_u = RelativeBias(table).log(600, 600, dtype=torch.bfloat16)
    log_u.sum().backward()
    assert table.grad.sum() == 600 * 600  # bfloat16 stops counting at 256


def test_a_bias_is_a_prior_that_multiplies_the_weights(draw) -> None:
    q, k, v = draw(1, 2, 4, 5), draw(1, 2, 4, 5), draw(1, 2, 4, 3)
    _, p = attend(q, k, v, prior=ALiBi(2), return_weights=True)
    _, plain = attend(q, k, v, return_weights=True)
    u = ALiBi(2).log(4, 4, H=2, dtype=torch.float64).exp()
    torch.testing.assert_close(p, plain * u / (plain * u).sum(-1, keepdim=True))


def test_the_worked_buckets() -> None:
    far = torch.tensor([0, 1, 8, 15, 16, 20, 32, 64, 127, 128])
    assert bucket(-far).tolist() == [0, 1, 8, 15, 16, 17, 21, 26, 31, 31]
    assert bucket(far).tolist() == [0] * 10  # the future shares bucket 0 when nobody looks there


@pytest.mark.parametrize("both_sides", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (16, 50), (64, 1000)])
def test_buckets_are_those_of_t5(both_sides: bool, buckets: int, distance: int) -> None:
    relative = torch.arange(-1500, 1501)
    theirs = T5Attention._relative_position_bucket(relative, both_sides, buckets, distance)
    ours = bucket(relative, buckets, both_sides=both_sides, distance=distance)
    assert torch.equal(ours, theirs)


def test_a_relative_bias_is_indexed_by_key_minus_query(draw) -> None:
    table = draw(32, 3)
    bias = RelativeBias(table, both_sides=True).log(4, 6, H=3, dtype=torch.float64)[0]
    for h in range(3):
        for t in range(4):
            for j in range(6):
                here = bucket(torch.tensor(j - (t + 2)), 32, both_sides=True)
                assert bias[h, t, j] == table[here, h]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: ALiBi(0), "1 head or more"),
        (lambda: ALiBi(4).log(2, 2, H=3), "slopes for 4 heads, the call has 3"),
        (lambda: RelativeBias(torch.zeros(6, 2)), "multiple of 4"),
        (lambda: RelativeBias(torch.zeros(8, 2)).log(2, 2, H=3), "2 heads, the call has 3"),
    ],
)
def test_a_bias_that_does_not_fit_is_refused(build, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build()
