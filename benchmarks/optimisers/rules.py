"""The rules that are compared: settings of the model, the optimiser and the trainer, under a name.

A rule is what ``fenchel train --set`` could ask for, but for those that are built here: AdamW
within ScoreTrust, the baseline after Compositional Muon, and rules whose queries and keys alone go
faster. Tuned for each are one rate, AdamW's for everything or Muon's and that of the AdamW beside
it alike, and what else the rule has of ``Rule.tunes``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from benchmarks.optimisers.compositional import CompositionalMuon
from fenchel.optim import (
    CombinedOptimiser,
    OptimConfig,
    ScoreTrust,
    adamw,
    attention_pairs,
    build_optimiser,
)
from fenchel.optim.config import split_matrices

Build = Callable[[nn.Module, OptimConfig], CombinedOptimiser]


def trusted(model: nn.Module, config: OptimConfig, *, times: float = 1.0) -> CombinedOptimiser:
    """What ``bare`` builds, its query and key steps cut to size by ScoreTrust."""
    inner, pairs = bare(model, config, times=times), attention_pairs(model)
    return CombinedOptimiser(
        ScoreTrust(inner, pairs, lr=config.score_rate, radius=config.score_radius)
    )


def bare(model: nn.Module, config: OptimConfig, *, times: float = 1.0) -> CombinedOptimiser:
    """The optimiser of the settings; queries and keys move ``times`` as far as it moves them."""
    optimiser = build_optimiser(model, config)
    rows = [
        row.weight.detach()[row.start : row.stop]
        for pair in attention_pairs(model)
        for row in (pair.query, pair.key)
    ]
    kept: list[Tensor] = []

    def before(*_: Any) -> None:
        kept[:] = [row.clone() for row in rows]

    def after(*_: Any) -> None:
        for row, was in zip(rows, kept, strict=True):
            row.add_(row - was, alpha=times - 1.0)

    if times != 1.0:
        optimiser.members[0].register_step_pre_hook(before)
        optimiser.members[-1].register_step_post_hook(after)
    return optimiser


def compositional(model: Any, config: OptimConfig) -> CombinedOptimiser:
    """Compositional Muon for matrices, AdamW for the others."""
    matrices, others = split_matrices(model)
    muon = CompositionalMuon(
        matrices,
        [block.attention for block in model.blocks],
        lr=config.matrix_learning_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        damping=config.score_damping,
    )
    betas = (config.beta1, config.beta2)
    return CombinedOptimiser(muon, adamw(others, lr=config.learning_rate, betas=betas))


@dataclass(frozen=True)
class Rule:
    """One contender."""

    optimiser: str
    rate: float
    """Where the search for its rate begins, at the size of a small model."""
    model: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    build: Build = build_optimiser
    tunes: tuple[str, ...] = ("decay",)
    """Fields of a ``Job`` that are tuned after the rate, one after the other."""


MUON, ADAM = 0.02, 0.0067
NORMED, CLIPPED = {"qk_norm": True}, {"qk_clip": 30.0}
MOVING = ("decay", "momentum")

RULES: dict[str, Rule] = {
    "adamw": Rule("adamw", ADAM),
    "adamw + qk-norm": Rule("adamw", ADAM, NORMED),
    "trust(adamw)": Rule("adamw", ADAM, build=trusted, tunes=("decay", "radius", "change")),
    "muon": Rule("muon", MUON, tunes=MOVING),
    "muon + qk-norm": Rule("muon", MUON, NORMED, tunes=MOVING),
    "muon + qk-clip": Rule("muon", MUON, train=CLIPPED, tunes=MOVING),
    "compositional": Rule(
        "muon", MUON, build=compositional, tunes=("decay", "damping", "momentum")
    ),
    "trust(muon)": Rule("trust", MUON, tunes=("decay", "radius", "change", "momentum")),
    "score": Rule("score", MUON, tunes=("decay", "radius", "damping", "change", "momentum")),
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
"""What keeps Muon stable, over rates."""

FINETUNED = ("adamw", "trust(adamw)", "muon", "trust(muon)")
"""Rules that a checkpoint without QK-norm can be continued by."""

FURTHER = (1.0, 3.0, 10.0, 30.0)
"""Times the best rate, when it is."""


def hastened(name: str, times: float) -> Rule:
    """The rule with queries and keys alone at so many times the rate."""
    inner = name.removeprefix("trust(").removesuffix(")")
    build = bare if inner == name else trusted
    return replace(RULES[name], optimiser=inner, build=partial(build, times=times))


HASTENED = {f"{name} x{times:g}": hastened(name, times) for name in FINETUNED for times in FURTHER}

COPIERS = ("muon", "muon + qk-norm", "trust(muon)", "score")
"""Rules of the copy task."""
