"""ScoreDescent and ScoreTrust against scores recomputed from the weights, sample held out."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fenchel.optim import Muon, QueryKeyPair, ScoreDescent, ScoreTrust, attention_pairs

KINDS: dict[str, dict[str, Any]] = {
    "mha": {"positions": "learned"},
    "gqa": {"positions": "learned", "kv_heads": 2},
    "rotary": {},
    "rotary-gqa-bias": {"kv_heads": 2, "bias": True},
    "qk-norm": {"normed": True},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
PAIRS = 24 * 25 // 2  # open pairs of a causal sequence of 24


def rms(S: Tensor) -> Tensor:
    """Per head, over the causal pairs: (B, H, T, T) -> (H,)."""
    return (S.square().sum(dim=(0, 2, 3)) / (S.shape[0] * PAIRS)).sqrt()


Change = Callable[[], tuple[Tensor, Tensor]]


@pytest.fixture
def held_out(inputs: Any, scores_of: Any) -> Any:
    """A function that gives (RMS change, RMS score) of every head since the last call."""

    def measure(model: nn.Module, pairs: list[QueryKeyPair], ids: Tensor) -> Change:
        read = inputs(model, pairs, ids)
        before = [scores_of(p, *given) for p, given in zip(pairs, read, strict=True)]

        def change() -> tuple[Tensor, Tensor]:
            after = [scores_of(p, *given) for p, given in zip(pairs, read, strict=True)]
            moved = [rms(a - b) for a, b in zip(after, before, strict=True)]
            return torch.stack(moved), torch.stack([rms(a) for a in after])

        return change

    return measure


@every_kind
def test_the_scores_of_other_sequences_move_by_lr_every_step(
    kind: str, small: Any, tokens: Any, backward: Any, held_out: Any
) -> None:
    model = small(**KINDS[kind])
    pairs = attention_pairs(model)
    score = ScoreDescent(pairs, lr=0.2, probe=6144)
    own = {p for pair in pairs for p in pair.parameters}
    rest = torch.optim.AdamW([p for p in model.parameters() if p not in own], lr=3e-3)
    for step in range(4):
        backward(model, tokens(step, 256))
        change = held_out(model, pairs, tokens(1000 + step, 256))
        score.step()
        moved, _ = change()
        assert (moved / 0.2 - 1).abs().max() < 0.1, (kind, step, moved)
        assert abs(float(moved.mean()) / 0.2 - 1) < 0.01, (kind, step, moved)
        rest.step()
        model.zero_grad()


@every_kind
@pytest.mark.parametrize("method", ["descent", "trust"])
def test_inputs_read_in_bfloat16_as_on_a_gpu_are_good_enough(
    kind: str,
    method: str,
    small: Any,
    tokens: Any,
    backward: Any,
    held_out: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fenchel.optim.score.probe.probe_dtype", lambda _: torch.bfloat16)
    model = small(**KINDS[kind])
    pairs = attention_pairs(model)
    optimiser: Any = ScoreDescent(pairs, lr=0.05)
    if method == "trust":
        weights = [p for name, p in model.named_parameters() if not name.endswith("norm.weight")]
        optimiser = ScoreTrust(torch.optim.AdamW(weights, lr=0.03), pairs, lr=0.05)
    ids = tokens(0, 64)
    backward(model, ids)
    change = held_out(model, pairs, ids)
    optimiser.step()
    moved, _ = change()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.05), rtol=0.01, atol=0)


def test_sampled_queries_of_long_sequences_estimate_the_whole(
    small: Any, tokens: Any, backward: Any, inputs: Any, scores_of: Any
) -> None:
    model = small(context=160)  # 64 of 160 positions ask
    pairs = attention_pairs(model)
    score, ids = ScoreDescent(pairs, lr=0.2), tokens(0, 12, 160)
    read = inputs(model, pairs, ids)
    before = [scores_of(p, *given) for p, given in zip(pairs, read, strict=True)]
    backward(model, ids)
    score.step()
    for pair, given, start in zip(pairs, read, before, strict=True):
        moved = (scores_of(pair, *given) - start).square().sum(dim=(0, 2, 3)) / (12 * 80 * 161)
        torch.testing.assert_close(moved.sqrt(), torch.full((4,), 0.2), rtol=0.05, atol=0)


def test_under_a_norm_of_queries_and_keys_the_weights_keep_their_size(
    small: Any, tokens: Any, backward: Any
) -> None:
    """Scores do not see the size of the weights, and steps of one size would make it grow."""
    model = small(normed=True)
    pairs = attention_pairs(model)
    before = [torch.linalg.matrix_norm(pair.key.values()) for pair in pairs]
    score = ScoreDescent(pairs, lr=0.5)
    for step in range(4):
        backward(model, tokens(step))
        score.step()
        model.zero_grad()
    for pair, size in zip(pairs, before, strict=True):
        torch.testing.assert_close(torch.linalg.matrix_norm(pair.key.values()), size)


@every_kind
@pytest.mark.parametrize("norm", ["frobenius", "raw"])
def test_the_size_does_not_depend_on_the_direction(
    kind: str, norm: str, small: Any, tokens: Any, backward: Any
) -> None:
    model = small(**KINDS[kind])
    score = ScoreDescent(attention_pairs(model), lr=0.1, norm=norm)
    for step in range(2):
        backward(model, tokens(step))
        score.step()
        for stats in score.score_stats().values():
            torch.testing.assert_close(
                stats.rms_change, torch.full_like(stats.rms_change, 0.1), rtol=0.01, atol=0
            )
        model.zero_grad()


@pytest.mark.parametrize(
    ("kind", "wrapped"),
    [
        ("mha", "muon"),
        ("gqa", "muon"),
        ("rotary", "adamw"),
        ("rotary-gqa-bias", "adamw"),
        ("qk-norm", "adamw"),
    ],
)
def test_trust_cuts_every_head_to_lr_and_no_further(
    kind: str, wrapped: str, small: Any, tokens: Any, backward: Any, held_out: Any
) -> None:
    model = small(**KINDS[kind])
    pairs = attention_pairs(model)
    if wrapped == "adamw":
        # the gains of a norm belong to the rest of the model and move the scores as well
        weights = [p for name, p in model.named_parameters() if not name.endswith("norm.weight")]
        inner: torch.optim.Optimizer = torch.optim.AdamW(weights, lr=0.03)
    else:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        inner = Muon(matrices, lr=0.3)
    trust = ScoreTrust(inner, pairs, lr=0.05)
    for step in range(2):
        backward(model, tokens(step, 256))
        change = held_out(model, pairs, tokens(1000 + step, 256))
        trust.step()
        moved, _ = change()
        assert (moved / 0.05 - 1).abs().max() < 0.1, (kind, step, moved)
        trust.zero_grad()


@pytest.mark.parametrize("lr", [0.2, 0.05, 0.001])
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_to_bfloat16_weights_adds_a_few_hundredths_of_a_move(
    kind: str, lr: float, small: Any, tokens: Any, backward: Any, held_out: Any
) -> None:
    model = small(**KINDS[kind]).bfloat16()
    pairs, ids = attention_pairs(model), tokens(0, 64)
    trust = ScoreTrust(torch.optim.AdamW(model.parameters(), lr=0.03), pairs, lr=lr)
    backward(model, ids)
    model.float()  # the layers' inputs are measured in float32; the weights stay as they are
    change = held_out(model, pairs, ids)
    model.bfloat16()
    trust.step()
    model.float()
    moved, _ = change()
    assert (moved / lr).max() <= 1.1, moved / lr


def test_trust_leaves_a_small_step_exactly_as_it_was(
    small: Any, tokens: Any, backward: Any
) -> None:
    one, two = small(kv_heads=2), small(kv_heads=2)
    bare = torch.optim.AdamW(one.parameters(), lr=1e-3)
    trust = ScoreTrust(
        torch.optim.AdamW(two.parameters(), lr=1e-3), attention_pairs(two), lr=1e3, radius=1e3
    )
    for step in range(3):
        for model, optimiser in ((one, bare), (two, trust)):
            backward(model, tokens(step))
            optimiser.step()
            optimiser.zero_grad()
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not any(stats.capped.any() for stats in trust.score_stats().values())


@pytest.mark.parametrize("kind", ["mha", "rotary-gqa-bias"])
@pytest.mark.parametrize("method", ["descent", "trust"])
def test_scores_stay_in_the_ball_at_a_rate_ten_times_too_high(
    kind: str, method: str, small: Any, tokens: Any, backward: Any, held_out: Any
) -> None:
    """AdamW at 0.1 (its best here is near 0.01) moves the inputs wildly between steps."""
    model, radius = small(**KINDS[kind]), 2.0
    pairs = attention_pairs(model)
    own = {p for pair in pairs for p in pair.parameters}
    optimisers: list[torch.optim.Optimizer]
    if method == "descent":
        rest = torch.optim.AdamW([p for p in model.parameters() if p not in own], lr=0.1)
        optimisers = [rest, ScoreDescent(pairs, lr=1.0, radius=radius)]
    else:
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        optimisers = [ScoreTrust(inner, pairs, lr=1.0, radius=radius)]
    reached = []
    for step in range(25):
        backward(model, tokens(step))
        change = held_out(model, pairs, tokens(step))
        for optimiser in optimisers:
            optimiser.step()
        reached.append(change()[1])
        model.zero_grad()
    assert torch.stack(reached).max() <= 1.1 * radius
    assert torch.stack(reached).max() > 0.8 * radius  # the ball was needed


def test_under_a_norm_the_gains_hold_the_ball_at_a_rate_ten_times_too_high(
    small: Any, tokens: Any, backward: Any, held_out: Any
) -> None:
    reached: dict[float, list[Tensor]] = {2.0: [], math.inf: []}
    for radius, scores in reached.items():
        model = small(normed=True)
        pairs, ids = attention_pairs(model), tokens(0, 64)
        own = {p for pair in pairs for p in pair.parameters}
        rest = torch.optim.AdamW([p for p in model.parameters() if p not in own], lr=0.1)
        score = ScoreDescent(pairs, lr=0.05, radius=radius)
        for _ in range(40):
            model.zero_grad()
            backward(model, ids)
            change = held_out(model, pairs, ids)
            score.step()
            scores.append(change()[1])
            rest.step()
    assert torch.stack(reached[2.0]).max() <= 2.0 + 1.1 * 0.05
    assert torch.stack(reached[math.inf]).max() > 4.0  # the ball was needed


def test_the_ball_opens_by_the_same_amount_with_every_step(
    small: Any, tokens: Any, backward: Any
) -> None:
    """Steps far too large for it: after step t the scores have the radius of step t."""
    model = small()
    score = ScoreDescent(attention_pairs(model), lr=1.0, radius=1.0, opening=0.25)
    for step in range(9):
        backward(model, tokens(step))
        score.step()
        model.zero_grad()
        scores = torch.stack([stats.rms_score for stats in score.score_stats().values()])
        radius = 1.0 + 0.25 * step
        assert (scores <= 1.001 * radius).all()
        if step > 3:
            assert scores.max() > 0.99 * radius


def test_a_pair_that_rests_does_not_hold_the_ball_of_its_group(
    small: Any, tokens: Any, backward: Any
) -> None:
    model = small()
    first, second = attention_pairs(model)
    score = ScoreDescent([first, second], lr=1.0, radius=1.0, opening=0.25)
    for step in range(6):
        backward(model, tokens(step))
        if step < 5:
            for p in first.parameters:
                p.grad = None
        score.step()
        model.zero_grad()
    bounds = [score.state[pair.query.weight]["score_bound"] for pair in (first, second)]
    assert torch.equal(bounds[1], torch.full_like(bounds[1], 2.25))
    assert (bounds[0] >= 2.25).all()


@pytest.mark.parametrize("method", ["descent", "trust"])
def test_the_statistics_show_a_step_that_the_ball_cut(
    method: str, small: Any, tokens: Any, backward: Any, held_out: Any
) -> None:
    model = small(kv_heads=2)
    pairs, capped = attention_pairs(model), []
    optimiser: Any = ScoreDescent(pairs, lr=0.5, radius=1.2)
    if method == "trust":
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        optimiser = ScoreTrust(inner, pairs, lr=0.5, radius=1.2)
    for step in range(4):
        backward(model, tokens(step))
        change = held_out(model, pairs, tokens(step))
        optimiser.step()
        moved, after = change()
        stats = optimiser.score_stats().values()
        torch.testing.assert_close(torch.stack([s.rms_change for s in stats]), moved)
        torch.testing.assert_close(torch.stack([s.rms_score for s in stats]), after)
        capped += [s.capped.any() for s in stats]
        model.zero_grad()
    assert any(capped)


@pytest.mark.parametrize(("method", "rate"), [("descent", 0.0), ("trust", 0.0), ("trust", 0.03)])
@pytest.mark.parametrize("push", [1.02, 1.5, 30.0])
def test_a_head_that_other_layers_push_out_of_the_ball_moves_by_that_or_by_lr(
    method: str, rate: float, push: float, small: Any, tokens: Any, backward: Any, held_out: Any
) -> None:
    model, lr, radius = small(kv_heads=2), 0.2, 0.8
    pairs, ids = attention_pairs(model), tokens(0, 32)
    optimiser: Any = ScoreDescent(pairs, lr=lr, radius=radius)
    if method == "trust":
        inner = torch.optim.AdamW(model.parameters(), lr=rate)
        optimiser = ScoreTrust(inner, pairs, lr=lr, radius=radius)
    bound = held_out(model, pairs, ids)()[1] + lr
    for step in range(4):
        backward(model, ids)
        r = held_out(model, pairs, ids)()[1]
        bound = (bound - lr).clamp(min=radius)
        change = held_out(model, pairs, ids)
        optimiser.step()
        moved, after = change()
        allowed = (r - bound).clamp(min=lr)
        assert (moved <= 1.001 * allowed).all(), (step, moved / allowed)
        assert (after <= 1.001 * bound).all()
        if step and push == 30.0:
            torch.testing.assert_close(moved, r - bound, rtol=1e-3, atol=0)
        model.zero_grad()
        with torch.no_grad():
            for block in model.blocks:
                block.attention_norm.weight.mul_(push)


@pytest.mark.parametrize("method", ["descent", "trust"])
def test_a_head_that_starts_outside_the_ball_comes_in_by_lr_a_step(
    method: str, small: Any, tokens: Any, backward: Any, held_out: Any
) -> None:
    model = small(positions="learned")
    with torch.no_grad():
        model.blocks[0].attention.qkv.weight.mul_(3.0)
    pairs, ids = attention_pairs(model), tokens(0, 32)
    start = held_out(model, pairs, ids)()[1]
    assert (start[0] > 4.0).all()
    optimiser: Any
    if method == "descent":
        optimiser = ScoreDescent(pairs, lr=0.5, radius=2.0)
    else:
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        optimiser = ScoreTrust(inner, pairs, lr=0.5, radius=2.0)
    before = start
    for step in range(6):
        backward(model, ids)
        change = held_out(model, pairs, ids)
        optimiser.step()
        moved, after = change()
        assert (after <= (start - 0.5 * step).clamp(min=2.0) * 1.001).all(), (step, after)
        assert (moved <= 0.5 * 1.001).all(), (step, moved)
        before = after
        model.zero_grad()
    assert (before[0] < start[0] - 2.4).all()
