"""The rules that are compared: settings of the model, the optimiser and the trainer, under a name.

A rule is what ``fenchel train --set`` could ask for, but for two that are built here: AdamW within
ScoreTrust, and the baseline after Compositional Muon. Tuned for each are one rate, AdamW's
for everything or Muon's and that of the AdamW beside it alike, the decay, and the radius of the
score ball where there is one; the largest change of the scores in a step stays at 0.2.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from benchmarks.optimisers.compositional import CompositionalMuon
from fenchel.optim import (
    OptimConfig,
    ScoreTrust,
    Together,
    adamw,
    attention_pairs,
    build_optimiser,
)
from fenchel.optim.build import split

Build = Callable[[nn.Module, OptimConfig], Together]


def trusted_adamw(model: nn.Module, config: OptimConfig) -> Together:
    """AdamW for everything, its query and key steps cut to size by ScoreTrust."""
    inner = build_optimiser(model, config)
    rate, radius = config.score_rate, config.score_radius
    return Together(ScoreTrust(inner, attention_pairs(model), lr=rate, radius=radius))


def compositional(model: Any, config: OptimConfig) -> Together:
    """Compositional Muon for matrices, AdamW for the others."""
    matrices, others = split(model)
    muon = CompositionalMuon(
        matrices,
        [block.attention for block in model.blocks],
        lr=config.matrix_learning_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )
    betas = (config.beta1, config.beta2)
    return Together(muon, adamw(others, lr=config.learning_rate, betas=betas))


@dataclass(frozen=True)
class Rule:
    """One contender."""

    optimiser: str
    rate: float
    """Where the search for its rate begins, at the size of a small model."""
    model: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    build: Build = build_optimiser
    balled: bool = False
    """Whether it has a score ball."""


MUON, ADAM = 0.02, 0.0067
NORMED, CLIPPED = {"qk_norm": True}, {"qk_clip": 30.0}

RULES: dict[str, Rule] = {
    "adamw": Rule("adamw", ADAM),
    "adamw + qk-norm": Rule("adamw", ADAM, NORMED),
    "trust(adamw)": Rule("adamw", ADAM, build=trusted_adamw, balled=True),
    "muon": Rule("muon", MUON),
    "muon + qk-norm": Rule("muon", MUON, NORMED),
    "muon + qk-clip": Rule("muon", MUON, train=CLIPPED),
    "compositional": Rule("muon", MUON, build=compositional),
    "trust(muon)": Rule("trust", MUON, balled=True),
    "score": Rule("score", MUON, balled=True),
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

COPIERS = ("muon", "muon + qk-norm", "trust(muon)", "score")
"""Rules of the copy task."""
