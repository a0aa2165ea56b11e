"""The rules that are compared: named settings of the model, the optimiser and the trainer.

Most rules can be selected by ``fenchel train --set``. Built here are AdamW within ScoreTrust, two
baselines that treat queries and keys head by head (compositional.py), and rules that move queries
and keys alone at a multiple of the rate. Each rule is tuned in one learning rate, which Muon and
the AdamW beside it share, and then in the fields of a ``Job`` that ``Rule.tunes`` lists.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from benchmarks.optimisers.compositional import CompositionalMuon, PerHeadMuon
from fenchel.optim import (
    CombinedOptimiser,
    OptimConfig,
    adamw,
    attention_pairs,
    build_optimiser,
)
from fenchel.optim.config import split_matrices, trusted

Build = Callable[..., CombinedOptimiser]
"""(model, settings, steps=) to an optimiser."""


def score_trust(
    model: nn.Module, config: OptimConfig, *, steps: int | None = None, times: float = 1.0
) -> CombinedOptimiser:
    """The optimiser of ``scaled_qk`` within ScoreTrust."""
    inner = scaled_qk(model, config, steps=steps, times=times)
    return CombinedOptimiser(trusted(inner, model, config))


def scaled_qk(
    model: nn.Module, config: OptimConfig, *, steps: int | None = None, times: float = 1.0
) -> CombinedOptimiser:
    """The optimiser of the settings, with every step of queries and keys scaled by ``times``."""
    optimiser = build_optimiser(model, config, steps=steps)
    rows = [
        row.weight.detach()[row.start : row.stop]
        for pair in attention_pairs(model)
        for row in (pair.query, pair.key)
    ]
    previous: list[Tensor] = []

    def before(*_: Any) -> None:
        previous[:] = [row.clone() for row in rows]

    def after(*_: Any) -> None:
        for row, old in zip(rows, previous, strict=True):
            row.add_(row - old, alpha=times - 1.0)

    if times != 1.0:
        optimiser.members[0].register_step_pre_hook(before)
        optimiser.members[-1].register_step_post_hook(after)
    return optimiser


def compositional(model: Any, config: OptimConfig, **_: Any) -> CombinedOptimiser:
    """Compositional Muon for matrices, AdamW for the others."""
    return _head_by_head(model, config, partial(CompositionalMuon, damping=config.score_damping))


def per_head(model: Any, config: OptimConfig, **_: Any) -> CombinedOptimiser:
    """Muon with an orthogonal step per head of queries and keys, AdamW for the others."""
    return _head_by_head(model, config, PerHeadMuon)


def _head_by_head(
    model: Any, config: OptimConfig, rule: Callable[..., PerHeadMuon]
) -> CombinedOptimiser:
    matrices, others = split_matrices(model)
    muon = rule(
        matrices,
        [block.attention for block in model.blocks],
        lr=config.matrix_learning_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )
    betas = (config.beta1, config.beta2)
    return CombinedOptimiser(muon, adamw(others, lr=config.learning_rate, betas=betas))


@dataclass(frozen=True)
class Rule:
    """One contender."""

    optimiser: str
    rate: float
    """Initial rate of the search, for the small model."""
    model: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    optim: Mapping[str, Any] = field(default_factory=dict)
    build: Build = build_optimiser
    tunes: tuple[str, ...] = ("decay",)
    """Fields of a ``Job`` that are tuned after the rate, one after the other."""


MUON, ADAM = 0.02, 0.0067
QK_NORM, QK_CLIP = {"qk_norm": True}, {"qk_clip": 30.0}
MUON_TUNES = ("decay", "momentum")

RULES: dict[str, Rule] = {
    "adamw": Rule("adamw", ADAM),
    "adamw + qk-norm": Rule("adamw", ADAM, QK_NORM),
    "trust(adamw)": Rule("adamw", ADAM, build=score_trust, tunes=("decay", "radius", "change")),
    "muon": Rule("muon", MUON, tunes=MUON_TUNES),
    "muon + qk-norm": Rule("muon", MUON, QK_NORM, tunes=MUON_TUNES),
    "muon + qk-clip": Rule("muon", MUON, train=QK_CLIP, tunes=MUON_TUNES),
    "per-head muon": Rule("muon", MUON, build=per_head, tunes=MUON_TUNES),
    "compositional": Rule(
        "muon", MUON, build=compositional, tunes=("decay", "damping", "momentum")
    ),
    "trust(muon)": Rule("trust", MUON, tunes=("decay", "radius", "change", "momentum")),
    "score": Rule("score", MUON, tunes=("decay", "radius", "damping", "change", "momentum")),
    "score + qk-norm": Rule(
        "score", MUON, QK_NORM, tunes=("decay", "damping", "change", "momentum")
    ),
}
"""The tuned study."""

SWITCHES: dict[str, Rule] = {
    "muon": RULES["muon"],
    "+ qk-norm": RULES["muon + qk-norm"],
    "+ qk-clip": RULES["muon + qk-clip"],
    "+ soft-cap": Rule("muon", MUON, {"softcap": 30.0}),
    "+ sigma": Rule("muon", MUON, {"sigma_reparam": True}),
    "+ entropy floor": Rule("muon", MUON, train={"entropy_floor": 1.0}),
    "+ trust": RULES["trust(muon)"],
    "score": RULES["score"],
}
"""Means that keep Muon stable, compared over rates."""

FINETUNE_RULES = ("adamw", "trust(adamw)", "muon", "trust(muon)")
"""Rules that can fine-tune a checkpoint trained without QK-norm."""

OUTPUT_RULES = {
    f"{name} + outputs": replace(RULES[name], optim={"output_change": 0.02})
    for name in ("trust(adamw)", "trust(muon)")
}
"""The same, limited in the output of every layer; for the study of fine-tuning at all rates."""


def inside_trust(name: str) -> str:
    """The name of the optimiser inside ScoreTrust, or of the rule itself.

    >>> inside_trust("trust(adamw) + outputs")
    'adamw'
    """
    return name.removesuffix(" + outputs").removeprefix("trust(").removesuffix(")")


RATE_FACTORS = (1.0, 3.0, 10.0, 30.0)
"""Multiples of the best rate in fine-tuning."""


def with_qk_rate(name: str, times: float) -> Rule:
    """The rule with queries and keys alone at ``times`` the rate."""
    inner = inside_trust(name)
    build = scaled_qk if inner == name else score_trust
    return replace(RULES[name], optimiser=inner, build=partial(build, times=times))


QK_RATE_RULES = {
    f"{name} x{times:g}": with_qk_rate(name, times)
    for name in FINETUNE_RULES
    for times in RATE_FACTORS
}

LENGTH_RULES = ("muon", "muon + qk-norm", "per-head muon", "score", "score + qk-norm")
"""Rules compared over lengths of the run, each at the defaults of ``OptimConfig``."""

RATE_RULES = ("muon", "muon + qk-norm", "score + qk-norm")
"""Rules compared over rates in runs of some length."""

COPY_RULES = ("muon", "muon + qk-norm", "trust(muon)", "score")
"""Rules of the copy task."""
