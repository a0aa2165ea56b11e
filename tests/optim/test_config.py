"""fenchel/optim/config.py: which optimiser moves which parameter, and what decays."""

import copy
import math
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from fenchel.model import ModelConfig, Transformer
from fenchel.optim import (
    CombinedOptimiser,
    OptimConfig,
    build_beta2,
    build_optimiser,
    build_schedule,
)
from fenchel.optim.config import peak_score_rate, split_matrices

PLAIN = ["muon", "adamw", "adam_l2", "sgd", "sgd_average", "nesterov"]
plain_rule = pytest.mark.parametrize("name", PLAIN)
every_rule = pytest.mark.parametrize("name", [*PLAIN, "score", "trust"])


def small(**settings: object) -> Transformer:
    return Transformer(ModelConfig(vocabulary=11, context=4, width=8, **settings))  # type: ignore[arg-type]


@plain_rule
def test_every_parameter_is_moved_by_exactly_one_group(name: str) -> None:
    model = small(tied=False, bias=True)
    groups = build_optimiser(model, OptimConfig(optimiser=name), steps=100).param_groups
    owned = [id(p) for group in groups for p in group["params"]]
    assert sorted(owned) == sorted(id(p) for p in model.parameters())


@plain_rule
def test_matrices_decay_and_nothing_else_does(name: str) -> None:
    model = small(tied=False, bias=True, norm="layer", positions="learned")
    names = {id(p): n for n, p in model.named_parameters()}
    for group in build_optimiser(model, OptimConfig(optimiser=name), steps=100).param_groups:
        for p in group["params"]:
            inside = names[id(p)].startswith("blocks.") and p.ndim == 2
            assert (group["weight_decay"] > 0) == inside, names[id(p)]


@every_rule
def test_experts_decay_as_matrices_and_muon_moves_each(name: str) -> None:
    model = small(experts=3, experts_per_token=2)
    optimiser = build_optimiser(model, OptimConfig(optimiser=name), steps=100)
    experts = {n: p for n, p in model.named_parameters() if p.ndim == 3}
    assert {n.rpartition(".")[2] for n in experts} == {"gate", "up", "down"}
    groups = {id(p): group for group in optimiser.param_groups for p in group["params"]}
    for p in experts.values():
        assert groups[id(p)]["weight_decay"] > 0
        assert ("iterations" in groups[id(p)]) == (name in ("muon", "score", "trust"))
    before = {n: p.detach().clone() for n, p in experts.items()}
    model(torch.tensor([[1, 5, 2, 9]]))
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.1)
    optimiser.step()
    for n, p in experts.items():
        assert (p.detach() != before[n]).flatten(1).any(1).all(), n


def test_a_tied_table_is_not_a_matrix_inside_a_block() -> None:
    model = small()
    matrices, others = split_matrices(model)
    assert any(p is model.embed.weight for p in others)
    assert all(p.ndim == 2 for p in matrices)


def test_adamw_is_the_published_formula() -> None:
    weight = nn.Parameter(torch.tensor([[1.0, -2.0]], dtype=torch.float64))
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 1, bias=False)])})
    model["blocks"][0].weight = weight  # type: ignore[index]
    config = OptimConfig(
        optimiser="adamw", learning_rate=0.1, weight_decay=0.3, beta1=0.9, beta2=0.99
    )
    optimiser = build_optimiser(model, config)
    theta, m, v = weight.detach().clone(), 0.0, 0.0
    for t, g in enumerate((torch.tensor([[0.5, -1.0]]), torch.tensor([[0.1, 3.0]])), start=1):
        weight.grad = g.double()
        optimiser.step()
        m = 0.9 * m + 0.1 * g.double()
        v = 0.99 * v + 0.01 * g.double() ** 2
        step = (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
        theta = (1 - 0.1 * 0.3) * theta - 0.1 * step
    torch.testing.assert_close(weight.detach(), theta)


@every_rule
def test_state_goes_round(name: str) -> None:
    def take_steps(steps: int, optimiser: CombinedOptimiser, model: nn.Module) -> None:
        for step in range(steps):
            model(torch.tensor([[1, 5, 2, 9]]))  # for the probes of the score optimisers
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.1 * (step + 1))
            optimiser.step()

    one, two = small(bias=True), small(bias=True)
    two.load_state_dict(one.state_dict())
    a, b = (build_optimiser(m, OptimConfig(optimiser=name), steps=100) for m in (one, two))
    take_steps(3, a, one)
    two.load_state_dict(one.state_dict())
    b.load_state_dict(copy.deepcopy(a.state_dict()))  # torch would share the tensors
    take_steps(2, a, one)
    take_steps(2, b, two)
    for name, p in one.state_dict().items():
        assert torch.equal(p, two.state_dict()[name]), name


@pytest.mark.parametrize("bias", [False, True])
def test_score_moves_queries_and_keys_and_muon_the_values_of_one_weight(bias: bool) -> None:
    """The values' rows move as they do under Muon alone; the others by their scores."""
    ids = torch.tensor([[1, 5, 2, 9], [3, 3, 7, 0]])
    ends, start = {}, {}
    for name in ("score", "muon"):
        model = small(bias=bias)
        optimiser = build_optimiser(model, OptimConfig(optimiser=name), steps=100)
        generator = torch.Generator().manual_seed(1)
        model(ids)
        for p in model.parameters():
            with torch.no_grad():
                p.normal_(generator=generator)
            p.grad = torch.randn(p.shape, generator=generator)
            if name == "muon" and p.shape == (24, 8):
                p.grad[:16] = 0.0  # so that Muon turns the rows of the values by themselves
        start = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimiser.step()
        ends[name] = {n: p.detach().clone() for n, p in model.named_parameters()}
    for n, p in ends["score"].items():
        theirs = ends["muon"][n]
        if n.endswith("qkv.weight"):
            decayed = (1 - 1e-2 * 0.1) * start[n][16:]
            # Muon's factor is sqrt of the longer side: 24 rows with the others, 8 without
            step, whole = p[16:] - decayed, theirs[16:] - decayed
            torch.testing.assert_close(step * 3**0.5, whole, rtol=1e-4, atol=1e-6)
            assert not torch.equal(p[:16], start[n][:16])
        elif n.endswith("qkv.bias"):
            assert torch.equal(p[16:], theirs[16:])
            assert not torch.equal(p[:16], theirs[:16])
        else:
            assert torch.equal(p, theirs), n


def test_every_row_is_moved_once_under_score() -> None:
    model = small(tied=False, bias=True, kv_heads=1)
    optimiser = build_optimiser(model, OptimConfig(optimiser="score"), steps=100)
    score, *others = optimiser.members
    rows = sum(p.numel() for member in others for g in member.param_groups for p in g["params"])
    pairs = sum(
        rows_.values().numel()
        for pair_probes in score.pair_probes  # type: ignore[attr-defined]
        for pair in pair_probes.probes
        for rows_ in (pair.query, pair.key)
    )
    assert rows + pairs == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("context", "tokens"), [(64, 256), (512, 2048), (1024, 2048)])
def test_score_samples_four_sequences_and_no_more_than_2048_tokens(
    context: int, tokens: int
) -> None:
    model = Transformer(ModelConfig(vocabulary=11, context=context, width=8, layers=1))
    optimiser = build_optimiser(model, OptimConfig(optimiser="score"), steps=100)
    score = optimiser.members[0]
    model(torch.zeros(8, context, dtype=torch.long)).logsumexp(-1).sum().backward()
    (sample,) = (x for _, samples in score.pair_probes[0].samples() for x in samples)
    assert sample is not None
    assert sample.x.shape == (tokens // context, context, 8)


@pytest.mark.parametrize("name", ["score", "trust"])
def test_the_settings_reach_the_score_optimisers(name: str) -> None:
    own = {"score_damping": 0.5} if name == "score" else {}
    config = OptimConfig(optimiser=name, score_rate=0.07, score_radius=3.0, **own)
    first = build_optimiser(small(), config).param_groups[0]
    assert (first["lr" if own else "score_change"], first["radius"]) == (0.07, 3.0)
    assert first.get("damping") == own.get("score_damping")  # ScoreTrust has none


@pytest.mark.parametrize("schedule", ["hold", "cosine", "linear", "inverse_sqrt", "constant"])
@pytest.mark.parametrize("steps", [20, 37, 400, 2000])
def test_the_squared_score_changes_of_a_run_add_up_to_the_total(schedule: str, steps: int) -> None:
    """Whichever schedule and length; so ScoreDescent's rate falls as the root of the steps."""
    config = OptimConfig(optimiser="score", score_total=1.7, schedule=schedule)
    peak = build_optimiser(small(), config, steps=steps).param_groups[0]["lr"]
    factor = build_schedule(config, steps)
    changes = [peak * factor(t) for t in range(steps)]
    assert math.hypot(*changes) == pytest.approx(1.7, rel=1e-12)


def test_the_default_total_is_the_rates_that_were_measured() -> None:
    """Under the schedule of those runs: 0.2 at 400 steps, 0.089 at 2,000, 0.048 at 7,000."""
    config = OptimConfig(optimiser="score", schedule="linear", warmup=0.1)
    rates = [peak_score_rate(config, steps) for steps in (400, 2000, 7000)]
    assert rates == pytest.approx([2.3 * math.sqrt(3 / n) for n in (400, 2000, 7000)], rel=0.01)


@pytest.mark.parametrize("schedule", ["hold", "linear"])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_a_run_of_a_few_steps_does_not_shrink_the_scores_to_nothing(
    steps: int, schedule: str
) -> None:
    """Their gradient is zero at the first step, and at weights of zero it would stay so."""
    model = small()
    optimiser = build_optimiser(
        model, OptimConfig(optimiser="score", schedule=schedule), steps=steps
    )
    before = model.blocks[0].attention.qkv.weight.detach().clone()
    model(torch.tensor([[1, 5, 2, 9]])).logsumexp(-1).sum().backward()
    optimiser.step()
    after = model.blocks[0].attention.qkv.weight.detach()
    assert after[:16].norm() > 0.6 * before[:16].norm()


def test_a_score_rate_that_would_leave_nothing_of_the_scores_is_refused() -> None:
    with pytest.raises(ValueError, match="should be below the radius of the score ball, 2"):
        OptimConfig(optimiser="score", score_rate=2.5)
    with pytest.raises(ValueError, match=r"should be below the radius of the score ball, 0\.1"):
        OptimConfig(optimiser="score", score_rate=0.2, score_radius=0.1)
    OptimConfig(optimiser="trust", score_rate=2.5)  # a limit shrinks nothing


def test_score_without_the_length_of_the_run_is_refused_and_a_given_rate_needs_none() -> None:
    for steps in (None, 0):
        with pytest.raises(ValueError, match="give build_optimiser their number"):
            build_optimiser(small(), OptimConfig(optimiser="score"), steps=steps)
    given = OptimConfig(optimiser="score", score_rate=0.3)
    assert build_optimiser(small(), given).param_groups[0]["lr"] == 0.3
    with pytest.raises(ValueError, match=r"score_total=1\.0 would do nothing; it needs .* without"):
        OptimConfig(optimiser="score", score_rate=0.3, score_total=1.0)


def test_the_limits_of_trust_do_not_depend_on_the_length() -> None:
    for steps in (None, 10, 10_000):
        optimiser = build_optimiser(small(), OptimConfig(optimiser="trust"), steps=steps)
        limits = optimiser.param_groups[0]
        assert (limits["score_change"], limits["radius"]) == (0.2, 6.0)


def test_a_state_of_other_optimisers_is_refused() -> None:
    adamw = build_optimiser(small(), OptimConfig(optimiser="adamw"))
    with pytest.raises(ValueError, match="has 1 optimisers, this one has 2"):
        build_optimiser(small(), OptimConfig()).load_state_dict(adamw.state_dict())


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("sgd", 1.0, 1.5), ("sgd_average", 0.5, 0.75), ("nesterov", 1.5, 1.75)],
)
def test_each_named_momentum_takes_its_steps(name: str, first: float, second: float) -> None:
    """Two gradients of 1 with momentum 1/2: what the two steps are, in rates."""
    model = nn.Linear(1, 1, bias=False)
    optimiser = build_optimiser(model, OptimConfig(optimiser=name, learning_rate=1.0, momentum=0.5))
    moves = []
    for _ in range(2):
        before = model.weight.item()
        model.weight.grad = torch.ones_like(model.weight)
        optimiser.step()
        moves.append(before - model.weight.item())
    assert moves == pytest.approx([first, second], rel=1e-5)


def test_beta2_warms_up_to_the_setting_only_with_beta2_warmup() -> None:
    assert build_beta2(OptimConfig()) is None
    beta2 = build_beta2(OptimConfig(beta2=0.998, beta2_warmup=50))
    assert beta2 is not None
    assert (beta2(0), beta2(50), beta2(9999)) == pytest.approx((0.99, 0.998, 0.998))


@pytest.mark.parametrize("name", ["hold", "cosine", "linear", "inverse_sqrt", "constant"])
def test_every_named_schedule_peaks_at_1(name: str) -> None:
    warmup = {} if name == "constant" else {"warmup": 0.1}
    schedule = build_schedule(OptimConfig(schedule=name, **warmup), 100)
    assert max(schedule(t) for t in range(100)) == pytest.approx(1.0)


RATES = ("learning_rate", "matrix_learning_rate")
SCORE = ("score_total", "score_rate", "score_radius", "score_opening", "score_damping")
CHANGED = {
    **dict.fromkeys((*RATES, *SCORE), 0.003),
    "weight_decay": 0.7,
    "beta1": 0.5,
    "beta2": 0.995,
    "momentum": 0.5,
    "output_change": 0.003,
}
"""Another value of every number that an optimiser is built from."""


@pytest.mark.parametrize("setting", CHANGED)
@every_rule
def test_a_setting_changes_the_step_or_is_refused(name: str, setting: str) -> None:
    ids = torch.tensor([[1, 5, 2, 9], [3, 1, 1, 7]])

    def weights(config: OptimConfig) -> Tensor:
        model = small()
        with torch.no_grad():
            for n, p in enumerate(model.parameters()):
                p.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(n))
        optimiser = build_optimiser(model, config, steps=3)
        for _ in range(3):
            optimiser.zero_grad()
            model(ids).logsumexp(-1).square().sum().backward()
            optimiser.step()
        return nn.utils.parameters_to_vector(model.parameters())

    changed: dict[str, Any] = {"optimiser": name, setting: CHANGED[setting]}
    with patch.object(OptimConfig, "USES", ()):  # nothing is refused
        unread = torch.equal(weights(OptimConfig(optimiser=name)), weights(OptimConfig(**changed)))
    with pytest.raises(ValueError, match="would do nothing") if unread else nullcontext():
        OptimConfig(**changed)


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({"schedule": "constant", "warmup": 0.1}, 'schedule="hold"'),
        ({"schedule": "inverse_sqrt", "final": 0.1}, 'schedule="hold"'),
        ({"optimiser": "sgd", "beta2": 0.999, "beta2_warmup": 10}, 'optimiser="muon"'),
    ],
)
def test_a_setting_that_the_schedule_does_not_read_is_refused(
    settings: dict[str, Any], needs: str
) -> None:
    with pytest.raises(ValueError, match="would do nothing; it needs " + needs):
        OptimConfig(**settings)


@pytest.mark.parametrize(
    "wrong",
    [
        {"optimiser": "descent"},
        {"schedule": "up"},
        {"learning_rate": 0.0},
        {"score_rate": 0.0},
        {"score_total": 0.0},
        {"score_radius": -1.0},
        {"score_opening": -0.1},
        {"output_change": 0.0},
        {"warmup": 1.0},
        {"beta2": -0.1},
        {"beta2_warmup": -1},
        {"beta2_warmup": 10, "beta2": 0.95},
        {"weight_decay": -1.0},
    ],
)
def test_a_wrong_setting_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        OptimConfig(**wrong)  # type: ignore[arg-type]
