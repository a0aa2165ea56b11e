"""fenchel/attention/prior.py: what each prior allows, and how they add."""

import pytest
import torch

from fenchel.attention import (
    ALiBi,
    Causal,
    Dense,
    Forget,
    Padding,
    Prior,
    RelativeBias,
    Segments,
    Window,
)
from fenchel.attention.prior import Positioned, ScoreBlock, ScoreIndex, as_band, outside_band

INF = torch.inf


def allowed(prior: Prior, T: int, S: int, B: int = 1, H: int = 1) -> torch.Tensor:
    return (prior.log(T, S, B=B, H=H) > -INF).expand(B, H, T, S)


def test_a_causal_query_sees_itself_and_the_past() -> None:
    mask = Causal().log(4, 4)[0, 0]
    assert (mask == torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, -INF)).all()


def test_a_strictly_causal_query_does_not_see_itself() -> None:
    seen = allowed(Causal(strict=True), 4, 4)[0, 0]
    assert torch.equal(seen, torch.ones(4, 4, dtype=torch.bool).tril(-1))


@pytest.mark.parametrize(
    "prior",
    [
        Causal(),
        Causal(strict=True),
        Window(2),
        Window(1, 1),
        Causal() + Padding(torch.tensor([4, 7]), side="left"),
    ],
    ids=repr,
)
def test_few_queries_are_the_last_ones_of_many(prior: Prior) -> None:
    whole = prior.log(7, 7, B=2).expand(2, 1, 7, 7)
    for T in (1, 3):
        assert torch.equal(prior.log(T, 7, B=2).expand(2, 1, T, 7), whole[:, :, -T:])


def test_more_queries_than_keys_leave_the_first_ones_nothing() -> None:
    assert torch.equal(allowed(Causal(), 5, 2)[0, 0].sum(-1), torch.tensor([0, 0, 0, 1, 2]))


def test_a_window_is_a_band() -> None:
    seen = allowed(Window(left=2, right=1), 6, 6)[0, 0]
    i, j = torch.arange(6)[:, None], torch.arange(6)
    assert torch.equal(seen, (j >= i - 2) & (j <= i + 1))
    assert torch.equal(allowed(Window(None, None), 3, 5), torch.ones(1, 1, 3, 5, dtype=torch.bool))


def test_padding_keeps_the_real_keys_of_each_sequence() -> None:
    lengths = torch.tensor([1, 3])
    right, left = (
        allowed(Padding(lengths, side), 2, 3, B=2)[:, 0, 0] for side in ("right", "left")
    )
    assert right.tolist() == [[True, False, False], [True, True, True]]
    assert left.tolist() == [[False, False, True], [True, True, True]]


def test_a_dense_prior_is_its_tensor_and_true_means_open() -> None:
    x = torch.randn(6, 1, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Dense(x).log(4, 7, B=2, H=6), x[None])
    mask = x > 0
    assert torch.equal(allowed(Dense(mask), 4, 7, H=6)[0, :, :1], mask)


ALL = {
    "causal": Causal(),
    "window": Window(2, 1),
    "padding": Padding(torch.tensor([5, 2]), "left"),
    "segments": Segments(torch.tensor([[0, 0, 0, 1, 1, 1, 2], [4, 4, 4, 4, 4, 4, 7]])),
    "dense": Dense(torch.randn(6, 4, 7, generator=torch.Generator().manual_seed(1))),
    "mask": Dense(torch.rand(2, 1, 1, 7, generator=torch.Generator().manual_seed(2)) > 0.3),
}
ALL["alibi"] = ALiBi(6)
ALL["forget"] = Forget(-torch.rand(2, 6, 7, generator=torch.Generator().manual_seed(3)))
ALL["forget, shared"] = Forget(-torch.rand(1, 7, generator=torch.Generator().manual_seed(4)))
ALL["sum"] = ALL["causal"] + ALL["padding"] + ALL["dense"]
ALL["two of each"] = sum(
    (Padding(torch.tensor([6, 9])), Window(3, 2), ALL["alibi"], ALiBi(6), ALL["mask"]), ALL["sum"]
)
every_prior = pytest.mark.parametrize("prior", ALL.values(), ids=ALL.keys())


def points(prior: Prior) -> torch.Tensor:
    """log u asked one point at a time, as a kernel or FlexAttention would."""
    out = torch.zeros(2, 6, 4, 7)
    for b, h, t, j in torch.cartesian_prod(*map(torch.arange, out.shape)):
        place = ScoreIndex(b, h, t + 7 - 4, j, 7)
        admitted, bias = prior.admits(place), prior.bias(place)
        value = torch.zeros(()) if bias is None else bias
        out[b, h, t, j] = value if admitted is None or admitted else -INF
    return out


@every_prior
def test_dense_blocks_and_points_agree(prior: Prior) -> None:
    whole = prior.log(4, 7, B=2, H=6).expand(2, 6, 4, 7)
    assert torch.equal(whole, points(prior))
    block = prior.log(4, 7, B=2, H=6, rows=slice(1, 3), keys=slice(2, 6)).expand(2, 6, 2, 4)
    assert torch.equal(block, whole[:, :, 1:3, 2:6])


@every_prior
def test_nothing_outside_its_reach_is_open(prior: Prior) -> None:
    seen = allowed(prior, 4, 7, 2, 6)
    for first in range(4):
        for last in range(first, 4):
            low, high = prior.key_range(first + 3, last + 3, 7)
            assert not seen[:, :, first : last + 1, :low].any()
            assert not seen[:, :, first : last + 1, high:].any()


@every_prior
def test_what_is_free_has_logarithm_0(prior: Prior) -> None:
    log_u = prior.log(4, 7, B=2, H=6).expand(2, 6, 4, 7)
    for first in range(4):
        for last in range(first, 4):
            low, high = prior.zero_range(first + 3, last + 3, 7)
            assert (log_u[:, :, first : last + 1, low:high] == 0).all()


@every_prior
def test_numbers_taken_out_can_be_put_back(prior: Prior) -> None:
    shape = {"B": 2, "H": 6}
    same = prior.with_tensors(prior.tensors())
    assert torch.equal(same.log(4, 7, **shape), prior.log(4, 7, **shape))
    twice = prior.with_tensors([2 * x for x in prior.tensors()])
    changed = not torch.equal(twice.log(4, 7, **shape), prior.log(4, 7, **shape))
    assert changed == bool(prior.tensors())


@every_prior
def test_a_block_is_cut_along_every_axis(prior: Prior) -> None:
    whole = prior.log(4, 7, B=2, H=6).expand(2, 6, 4, 7)
    parts = (slice(1, 2), slice(2, 5), slice(1, 3), slice(2, 6))
    block = prior.dense(ScoreBlock(2, 6, 4, 7, None, *parts), torch.float32).expand(1, 3, 2, 4)
    assert torch.equal(block, whole[1:2, 2:5, 1:3, 2:6])


def test_logarithms_add_and_the_order_does_not_matter() -> None:
    a, b = ALL["dense"], ALL["padding"]
    shape = {"B": 2, "H": 6}
    both = a.log(4, 7, **shape) + b.log(4, 7, **shape)
    assert torch.equal((a + b).log(4, 7, **shape), both)
    assert torch.equal((b + a).log(4, 7, **shape), both)


@every_prior
def test_the_band_of_a_prior_is_the_prior(prior: Prior) -> None:
    if isinstance(prior, Segments | Forget):
        assert outside_band(prior) == type(prior).__name__
        return
    assert outside_band(prior) is None
    filled = {name for part in prior.summands() for name in part.band_fields or ()}
    band = as_band(prior, 7, torch.device("cpu"))
    assert {name for name, x in band._asdict().items() if x is not None} <= filled
    i, j = torch.arange(4)[:, None] + 3, torch.arange(7)
    open_ = torch.ones(2, 1, 4, 7, dtype=torch.bool)
    log_u = torch.zeros(2, 6, 4, 7)
    for bound, edge in ((band.left, i - j), (band.right, j - i)):
        open_ &= edge <= (7 if bound is None else bound)
    if band.start is not None:
        open_ &= j >= band.start.view(2, 1, 1, 1)
    if band.stop is not None:
        open_ &= j < band.stop.view(2, 1, 1, 1)
    if band.slopes is not None:
        log_u -= band.slopes[:, None, None] * (i - j).abs()
    log_u += 0.0 if band.bias is None else band.bias
    wanted = prior.log(4, 7, B=2, H=6).expand(2, 6, 4, 7)
    torch.testing.assert_close(log_u.where(open_, -INF), wanted)


def test_a_subclass_of_a_band_is_a_band_only_if_it_defines_it() -> None:
    class Odd(Causal):
        def admits(self, at: ScoreIndex) -> torch.Tensor:
            return super().admits(at) & (at.j % 2 == 1)

    assert outside_band(Odd() + Window(2)) == "Odd"
    assert outside_band(Dense(torch.zeros(3)), ("left", "right")) == "Dense"
    assert outside_band(None) is None


def test_causal_and_window_reach_as_little_as_they_can() -> None:
    assert Causal().key_range(3, 5, 100) == (0, 6)
    assert Causal(strict=True).key_range(3, 5, 100) == (0, 5)
    assert (Causal() + Window(2, 9)).key_range(10, 12, 100) == (8, 13)
    assert Causal().zero_range(3, 5, 100) == (0, 4)
    assert (Causal() + Window(4, 9)).zero_range(10, 12, 100) == (8, 11)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Window(-1), "left=-1"),
        (lambda: Padding(torch.tensor([1.0])), "whole number"),
        (lambda: Padding(torch.tensor([1]), "middle"), "middle"),
        (lambda: Padding(torch.tensor([1, 2, 3])).log(2, 2, B=2), "3 lengths for 2"),
        (lambda: Segments(torch.tensor([1, 2])), r"shape \(B, S\)"),
        (lambda: Segments(torch.tensor([[1, 2]])).log(2, 2, B=2), "2 keys of 2"),
        (lambda: Dense(torch.zeros(3, 3)).log(2, 3), "does not broadcast"),
        (lambda: Dense(torch.zeros(3, 3, dtype=torch.int64)), "float or bool"),
    ],
)
def test_a_prior_that_cannot_be_is_refused_in_a_sentence(build: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build()  # type: ignore[operator]


@pytest.mark.parametrize(
    "prior",
    [
        Causal(),
        Window(3),
        ALiBi(2),
        Window(2) + ALiBi(2),
        RelativeBias(torch.arange(16.0).view(8, 2), False, 12),
    ],
    ids=lambda prior: type(prior).__name__,
)
def test_a_prior_at_positions_is_the_prior_whatever_the_order_of_the_keys(prior: Prior) -> None:
    """Rows of 6 and 3 keys in shuffled order, and absent ones between them."""
    positions = torch.tensor([[4, 0, -1, 5, 1, 3, 2], [-1, 2, -1, -1, 0, 1, -1]])
    placed = Positioned(prior, positions).log(1, 7, B=2, H=2, dtype=torch.float64)
    placed = placed.expand(2, 2, 1, 7)
    for row, keys in enumerate((6, 3)):
        whole = prior.log(1, keys, B=1, H=2, dtype=torch.float64).expand(1, 2, 1, keys)
        for slot, position in enumerate(positions[row].tolist()):
            wanted = whole[0, :, 0, position] if position >= 0 else torch.full((2,), -INF)
            assert placed[row, :, 0, slot].tolist() == wanted.tolist()
    assert Positioned(prior, positions).varies() == (True, prior.varies()[1])
