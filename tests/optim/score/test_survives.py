"""ScoreDescent and ScoreTrust under everything a training run does to an optimiser."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from fenchel.model import ModelConfig, Transformer
from fenchel.optim import QueryKeyPair, ScoreDescent, ScoreTrust, attention_pairs

Make = Callable[[nn.Module], torch.optim.Optimizer]


def descent(model: nn.Module) -> ScoreDescent:
    return ScoreDescent(attention_pairs(model), lr=0.2)


def trust(model: nn.Module) -> ScoreTrust:
    inner = torch.optim.AdamW(model.parameters(), lr=0.03)
    return ScoreTrust(inner, attention_pairs(model), lr=0.05, radius=2.0)


both = pytest.mark.parametrize("make", [descent, trust])


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    for name, p in one.items():
        assert torch.equal(p, two[name]), name


@both
def test_a_resumed_run_ends_with_the_same_bits(
    make: Make, small: Any, tokens: Any, backward: Any
) -> None:
    def go(model: nn.Module, optimiser: torch.optim.Optimizer, begin: int, end: int) -> None:
        for step in range(begin, end):
            backward(model, tokens(step))
            optimiser.step()
            model.zero_grad()

    whole, parts = small(kv_heads=2), small(kv_heads=2)
    for model in (whole, parts):  # heads begin outside the ball, so that its bound matters
        model.blocks[0].attention.qkv.weight.data.mul_(4.0)
    one, first = make(whole), make(parts)
    go(whole, one, 0, 4)
    go(parts, first, 0, 2)
    saved = copy.deepcopy((parts.state_dict(), first.state_dict()))
    resumed = small(seed=9, kv_heads=2)
    second = make(resumed)
    resumed.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    go(resumed, second, 2, 4)
    same(weights(whole), weights(resumed))


def test_state_keeps_its_precision_with_bfloat16_weights(
    small: Any, tokens: Any, backward: Any
) -> None:
    model = small().bfloat16()
    score = descent(model)
    backward(model, tokens(0))
    score.step()
    for stats in score.score_stats().values():
        torch.testing.assert_close(
            stats.rms_change, torch.full_like(stats.rms_change, 0.2), rtol=0.02, atol=0
        )
    saved = copy.deepcopy(score.state_dict())
    again = descent(model)
    again.load_state_dict(saved)
    for p, state in score.state.items():
        assert {v.dtype for v in state.values()} == {torch.float32}
        for name, value in state.items():
            assert torch.equal(value, again.state[p][name])


@both
def test_checkpointed_activations_change_nothing(make: Make, small: Any, tokens: Any) -> None:
    class Twice(nn.Module):
        """Every block is run again in the backward pass."""

        def __init__(self, block: nn.Module, reentrant: bool) -> None:
            super().__init__()
            self.block, self.reentrant = block, reentrant

        def forward(self, *given: Any) -> Tensor:
            out: Tensor = checkpoint(self.block, *given, use_reentrant=self.reentrant)
            return out

    ends = []
    for kind in (None, False, True):
        model = small()
        optimiser = make(model)
        if kind is not None:
            model.blocks = nn.ModuleList(Twice(block, kind) for block in model.blocks)
        ids = tokens(0)
        loss = cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimiser.step()
        ends.append([p.detach().clone() for p in model.parameters()])
    for other in ends[1:]:
        for a, b in zip(ends[0], other, strict=True):
            torch.testing.assert_close(a, b)


def test_a_compiled_model_is_probed_too(small: Any, tokens: Any, backward: Any) -> None:
    ends = []
    for compiled in (False, True):
        model = small()
        score = descent(model)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        for step in range(2):
            backward(run, tokens(step))
            score.step()
            model.zero_grad()
        assert all(stats.entropy.isfinite().all() for stats in score.score_stats().values())
        ends.append(weights(model))
    for name, p in ends[0].items():
        torch.testing.assert_close(p, ends[1][name], rtol=1e-4, atol=1e-5)


def rms_together(
    pairs: list[QueryKeyPair], given: list[Any], before: list[Any], scores_of: Any
) -> Tensor:
    """RMS change of the scores of every head over all micro-batches together: (L, H)."""
    rows = []
    for layer, pair in enumerate(pairs):
        squares, count = torch.zeros(4), 0
        for read, start in zip(given, before, strict=True):
            moved = scores_of(pair, *read[layer]) - start[layer]
            squares += moved.square().sum(dim=(0, 2, 3))
            count += moved.shape[0] * moved.shape[-1] * (moved.shape[-1] + 1) // 2
        rows.append((squares / count).sqrt())
    return torch.stack(rows)


@both
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("settings", [{}, {"positions": "learned"}, {"qk_norm": True}], ids=str)
def test_the_scores_of_all_micro_batches_together_move_by_lr(
    make: Make, settings: dict[str, Any], compiled: bool, small: Any, tokens: Any, backward: Any,
    inputs: Any, scores_of: Any,
) -> None:  # fmt: skip
    model = small(**settings)
    pairs = attention_pairs(model)
    torch.compiler.reset()
    optimiser = make(model)
    run = torch.compile(model, backend="eager") if compiled else model
    first = optimiser.param_groups[0]
    lr = float(first.get("score_change", first["lr"]))
    for step in range(2):
        # of different size, and without compilation of different length
        lengths = [(5, 24), (16, 24), (3, 24)] if compiled else [(5, 24), (16, 17), (3, 9)]
        parts = [tokens(10 * step + n, *size) for n, size in enumerate(lengths)]
        given = [inputs(model, pairs, part) for part in parts]
        before = [[scores_of(p, *x) for p, x in zip(pairs, g, strict=True)] for g in given]
        for part in parts:
            backward(run, part)
        optimiser.step()
        moved = rms_together(pairs, given, before, scores_of)
        torch.testing.assert_close(moved, torch.full_like(moved, lr), rtol=1e-3, atol=0)
        model.zero_grad()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_sample_has_an_equal_share_of_every_micro_batch(
    compiled: bool, small: Any, tokens: Any, backward: Any
) -> None:
    model = small()
    torch.compiler.reset()
    score = ScoreDescent(attention_pairs(model)[:1], probe=6 * 24)
    run = torch.compile(model, backend="eager") if compiled else model
    (probe,) = score.pair_probes[0].probes.values()
    layer = next(iter(score.pair_probes[0].probes)).module

    def first_rows(parts: list[Tensor]) -> list[Tensor]:
        rows: list[Tensor] = []
        hook = layer.register_forward_pre_hook(lambda _, args: rows.append(args[0]))
        with torch.no_grad():
            for part in parts:
                model(part)
        hook.remove()
        return rows

    parts = [tokens(n, 4) for n in range(3)]
    for part in parts:
        backward(run, part)
    sample = probe.take()
    assert sample is not None
    expected = torch.cat([rows[:2] for rows in first_rows(parts)])
    torch.testing.assert_close(sample.x, expected)

    # more micro-batches than sequences: evenly spaced ones, and the last; memory stays bounded
    parts = [tokens(n, 4) for n in range(20)]
    for part in parts:
        backward(run, part)
        assert sum(len(earlier.x) for earlier in probe.earlier) <= 6
    sample = probe.take()
    assert sample is not None
    expected = torch.cat([first_rows(parts)[n][:1] for n in (0, 4, 8, 12, 16, 19)])
    torch.testing.assert_close(sample.x, expected)
    assert probe.take() is None


def test_passes_that_do_not_count_are_not_measured(small: Any, tokens: Any, backward: Any) -> None:
    """A pass without a backward pass, and the passes of a step that was not taken."""
    ends = []
    for other in (False, True):
        model = small()
        score = descent(model)
        if other:
            backward(model, tokens(7))
            backward(model, tokens(8))
            model.zero_grad()
        backward(model, tokens(0))
        if other:
            model(tokens(5))
        backward(model, tokens(1))
        if other:
            model(tokens(6))
        score.step()
        ends.append(weights(model))
    same(*ends)


def test_passes_without_gradients_are_not_looked_at(small: Any, tokens: Any, backward: Any) -> None:
    ends = []
    for look in (False, True):
        model = small()
        score = descent(model)
        backward(model, tokens(0))
        if look:
            with torch.no_grad():
                model(tokens(5))
        score.step()
        ends.append(weights(model))
    same(*ends)


@both
def test_a_frozen_layer_stays_and_the_others_move(
    make: Make, small: Any, tokens: Any, backward: Any
) -> None:
    model = small()
    model.blocks[0].requires_grad_(False)
    optimiser = make(model)
    before = weights(model)
    backward(model, tokens(0))
    optimiser.step()
    for name, p in model.named_parameters():
        if name.startswith("blocks.0."):
            assert torch.equal(p, before[name]), name
    assert not torch.equal(
        model.blocks[1].attention.qkv.weight, before["blocks.1.attention.qkv.weight"]
    )


def test_a_raw_step_follows_the_nesterov_momentum(small: Any, tokens: Any, backward: Any) -> None:
    model = small()
    pairs = attention_pairs(model)
    score = ScoreDescent(pairs, momentum=0.8, radius=float("inf"), norm="raw")
    M = [torch.zeros_like(pair.query.values()) for pair in pairs]
    for step in range(3):
        backward(model, tokens(step))
        before = [pair.query.values() for pair in pairs]
        g = [pair.query.gradient() for pair in pairs]
        score.step()
        for layer, pair in enumerate(pairs):
            gradient = g[layer]
            assert gradient is not None
            M[layer] = 0.8 * M[layer] + 0.2 * gradient
            ahead = (0.8 * M[layer] + 0.2 * gradient).flatten(1)
            moved = (pair.query.values() - before[layer]).flatten(1)
            cosine = torch.cosine_similarity(moved, -ahead)
            torch.testing.assert_close(cosine, torch.ones(4), rtol=0, atol=1e-4)
        model.zero_grad()


def test_groups_have_rates_of_their_own(small: Any, tokens: Any, backward: Any) -> None:
    model = small()
    first, second = attention_pairs(model)
    score = ScoreDescent([{"pairs": [first], "lr": 0.05}, {"pairs": [second]}], lr=0.3)
    backward(model, tokens(0))
    score.step()
    found = [float(stats.rms_change.mean()) for stats in score.score_stats().values()]
    assert found == pytest.approx([0.05, 0.3], rel=1e-3)


@both
def test_a_schedule_scales_the_step(make: Make, small: Any, tokens: Any, backward: Any) -> None:
    model = small()
    optimiser = make(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda t: 0.5**t)
    rates = [[g["lr"] for g in optimiser.param_groups]]
    found = []
    for step in range(3):
        backward(model, tokens(step))
        optimiser.step()
        stats = optimiser.score_stats().values()  # type: ignore[attr-defined]
        found.append(max(float(s.rms_change.max()) for s in stats))
        schedule.step()
        model.zero_grad()
    assert [g["lr"] for g in optimiser.param_groups] == [0.125 * r for r in rates[0]]
    peak = 0.05 if isinstance(optimiser, ScoreTrust) else 0.2
    assert found == pytest.approx([peak * 0.5**t for t in range(3)], rel=1e-3)


@pytest.mark.parametrize("by", ["loop", "inside", "outside", "one cycle"])
def test_a_schedule_of_rates_scales_the_limits_of_trust_and_never_sets_them(
    by: str, small: Any, tokens: Any, backward: Any
) -> None:
    """Rates in absolute numbers, as nanoGPT sets them, leave a limit that is their share of 1."""
    model = small()
    inner = torch.optim.AdamW(model.parameters(), lr=0.03)
    optimiser = ScoreTrust(inner, attention_pairs(model), lr=0.002, radius=20.0)
    given = [0.015, 0.03, 0.06, 0.03, 0.0]  # a warm-up, more than the built rate, a decay
    wanted = [0.001, 0.002, 0.002, 0.001, 0.0]
    scheduled = inner if by == "inside" else optimiser
    schedule: Any = None
    if by == "one cycle":  # writes the same absolute rates into every group
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            scheduled, 0.06, total_steps=6, cycle_momentum=False
        )
        wanted = []
    elif by != "loop":
        schedule = torch.optim.lr_scheduler.LambdaLR(scheduled, lambda t: (given * 2)[t] / 0.03)
    highest = 0.03
    for step, rate in enumerate(given):
        if by == "loop":
            for group in optimiser.param_groups:
                group["lr"] = rate
        elif by == "one cycle":
            now = inner.param_groups[0]["lr"]
            highest = max(highest, now)
            wanted.append(0.002 * now / highest)
        if step == 2:  # what is saved here continues with the same limits
            saved = copy.deepcopy(optimiser.state_dict())
            optimiser.load_state_dict(saved)
        backward(model, tokens(step))
        optimiser.step()
        found = max(float(s.rms_change.max()) for s in optimiser.score_stats().values())
        assert found == pytest.approx(wanted[step], rel=2e-3, abs=1e-7), step
        if schedule is not None:
            schedule.step()
        model.zero_grad()
    again = ScoreTrust(torch.optim.AdamW(model.parameters(), lr=1.0), attention_pairs(model))
    again.load_state_dict(optimiser.state_dict())
    limits = again.param_groups[0]
    assert (limits["score_change"], limits["radius"]) == (0.002, 20.0)
    assert again.param_groups[1]["highest_lr"] == pytest.approx(0.06, rel=0.01)


def test_without_a_probe_sizes_are_those_for_white_inputs(
    small: Any, tokens: Any, backward: Any
) -> None:
    model = small(positions="learned")
    pairs = attention_pairs(model)
    backward(model, tokens(0))
    score = ScoreDescent(pairs, lr=0.2)  # created after the pass, so that it has no sample
    before = [(p.query.values(), p.key.values()) for p in pairs]
    score.step()
    for pair, (Q, K) in zip(pairs, before, strict=True):
        change = pair.query.values().mT @ pair.key.values() - Q.mT @ K
        rms = pair.scale * torch.linalg.matrix_norm(change)
        torch.testing.assert_close(rms, torch.full_like(rms, 0.2), rtol=1e-3, atol=0)
    assert all(s.entropy.isnan().all() for s in score.score_stats().values())


@pytest.mark.parametrize("settings", [{"positions": "learned"}, {"kv_heads": 2}], ids=str)
def test_closed_sizes_are_near_the_measured_ones(
    settings: Any, small: Any, tokens: Any, backward: Any, inputs: Any, scores_of: Any
) -> None:
    model = small(**settings)
    pairs = attention_pairs(model)
    score = ScoreDescent(pairs, lr=0.2, size="closed")
    ids = tokens(0, 64)
    read = inputs(model, pairs, ids)
    before = [scores_of(pair, *given) for pair, given in zip(pairs, read, strict=True)]
    backward(model, ids)
    score.step()
    for pair, given, start in zip(pairs, read, before, strict=True):
        moved = scores_of(pair, *given) - start
        rms = (moved.square().sum(dim=(0, 2, 3)) / (64 * 300)).sqrt()
        assert ((rms / 0.2 - 1).abs() < 0.35).all(), rms


@pytest.mark.parametrize("settings", [{}, {"kv_heads": 2}, {"qk_norm": True}], ids=str)
@pytest.mark.parametrize("sampled", [True, False])
def test_closed_sizes_move_by_the_rate_as_they_measure_it(settings: Any, sampled: bool) -> None:
    torch.manual_seed(0)
    config = ModelConfig(vocabulary=16, width=32, heads=4, layers=2, initial="normal", **settings)
    model = Transformer(config).double()
    score = ScoreDescent(attention_pairs(model), lr=0.2, size="closed")
    ids = torch.arange(24).view(2, 12) % 16
    cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    if not sampled:  # white inputs stand for those of a batch
        for probe in score.pair_probes[0].probes.values():
            probe.take()
    score.step()
    for stats in score.score_stats().values():
        torch.testing.assert_close(
            stats.rms_change, torch.full_like(stats.rms_change, 0.2), rtol=1e-3, atol=0
        )


def test_a_closure_is_called_and_its_loss_given_back(
    small: Any, tokens: Any, backward: Any
) -> None:
    model = small()
    for make in (descent, trust):
        optimiser = make(model)
        loss = optimiser.step(lambda: backward(model, tokens(0)))
        assert loss is not None
        assert loss > 0
        assert all(s.entropy.isfinite().all() for s in optimiser.score_stats().values())


def test_closed_hooks_see_nothing_more(small: Any, tokens: Any, backward: Any) -> None:
    model = small()
    score = descent(model)
    score.close()
    backward(model, tokens(0))
    assert all(
        probe.record is None
        for pair_probes in score.pair_probes
        for probe in pair_probes.probes.values()
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"radius": 0.0}, "radius=0.0"),
        ({"norm": "nuclear"}, "norm='nuclear'"),
        ({"size": "guessed"}, "size='guessed'"),
        ({"probe": 0}, "probe=0"),
        ({"damping": 0.0}, "damping=0.0"),
    ],
)
def test_a_wrong_setting_is_refused(wrong: dict[str, Any], words: str, small: Any) -> None:
    with pytest.raises(ValueError, match=words):
        ScoreDescent(attention_pairs(small()), **wrong)


def test_missing_or_foreign_pairs_are_refused(small: Any) -> None:
    model = small()
    with pytest.raises(ValueError, match="give it attention_pairs"):
        ScoreDescent(list(model.parameters()))  # type: ignore[arg-type]
    nothing: list[QueryKeyPair] = []
    with pytest.raises(ValueError, match="needs pairs to limit"):
        ScoreTrust(torch.optim.AdamW(model.parameters()), nothing)
    with pytest.raises(ValueError, match="does not move the query and key weights of blocks"):
        ScoreTrust(torch.optim.AdamW(model.embed.parameters()), attention_pairs(model))
