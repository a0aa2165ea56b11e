"""The rules that are compared: named settings of the model, the optimiser and the trainer.

Most rules can be selected by ``fenchel train --set``. Built here are AdamW within ScoreTrust, two
baselines that treat queries and keys head by head (compositional.py), and rules that move queries
and keys alone at a multiple of the rate. Each rule is tuned in one learning rate, which Muon and
the AdamW beside it share, and then in the fields of a ``Job`` that ``Rule.tunes`` lists.

The rules of the contest (contest.py) are composed of settings (``composed``): what moves the
matrices of the blocks (Muon, NorMuon, SOAP, Adam), whether they are on spheres instead of decaying
(baselines.py), and whether queries and keys are moved by ScoreDescent. Queries, keys and values are
three matrices there, as in the papers, where Muon by its setting moves the fused one. Embeddings,
the LM head and norms are moved by AdamW at a rate of their own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.optimisers.baselines import NorMuon, Soap, hyperball
from benchmarks.optimisers.compositional import CompositionalMuon, PerHeadMuon
from fenchel.optim import (
    CombinedOptimiser,
    Muon,
    OptimConfig,
    adamw,
    attention_pairs,
    build_optimiser,
    remaining_parameters,
)
from fenchel.optim.config import (
    Members,
    optimise_slices,
    score_beside,
    split_matrices,
    trusted,
)
from fenchel.optim.score.pairs import ParameterSlice

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


OTHER_BETAS = (0.9, 0.95)
"""Adam's decays for embeddings, the LM head and norms."""


def composed(
    model: nn.Module,
    config: OptimConfig,
    *,
    steps: int | None = None,
    matrices: str = "muon",
    sphere: bool = False,
    score: bool = False,
    everywhere: bool = False,
) -> CombinedOptimiser:
    """Settings that compose; ``everywhere`` gives SOAP the embeddings and the norms as well."""

    def rest(config: OptimConfig, maps: list[nn.Parameter], others: list[nn.Parameter]) -> Members:
        if everywhere:
            both = [
                {"params": maps, "lr": config.matrix_learning_rate},
                {"params": others, "lr": config.learning_rate, "weight_decay": 0.0},
            ]
            return (MATRIX_RULES[matrices](both, config, config.weight_decay),)
        rule = MATRIX_RULES[matrices](maps, config, 0.0 if sphere else config.weight_decay)
        aside = adamw(others, lr=config.learning_rate, betas=OTHER_BETAS)
        return hyperball(rule) if sphere else rule, aside

    if score:
        return CombinedOptimiser(*score_beside(rest, model, config, steps))
    slices = projections(model)
    members = optimise_slices(rest, model, config, slices)

    def clear(*_: Any) -> None:
        for piece in slices:  # no member has the whole weight, so none would clear its gradient
            piece.whole.grad = None

    members[-1].register_step_post_hook(clear)
    return CombinedOptimiser(*members)


def projections(model: nn.Module) -> list[ParameterSlice]:
    """All parameters, with the rows of queries, of keys and of values as matrices of their own."""
    pairs = attention_pairs(model)
    slices = remaining_parameters(pairs, model.parameters())
    for pair in pairs:
        for rows in (pair.query, pair.key):
            region = (slice(rows.start, rows.stop),)
            part = nn.Parameter(rows.weight.detach()[region])
            slices.append(ParameterSlice(part, rows.weight, region))  # type: ignore[arg-type]
    return slices


def _muon(params: Any, config: OptimConfig, decay: float) -> Muon:
    return Muon(params, config.matrix_learning_rate, momentum=config.momentum, weight_decay=decay)


def _normuon(params: Any, config: OptimConfig, decay: float) -> NorMuon:
    settings = {"lr": config.matrix_learning_rate, "momentum": config.momentum}
    return NorMuon(params, beta2=config.beta2, weight_decay=decay, **settings)


def _soap(params: Any, config: OptimConfig, decay: float) -> Soap:
    betas = (config.momentum, config.beta2)
    return Soap(params, config.matrix_learning_rate, betas, weight_decay=decay)


def _adam(params: Any, config: OptimConfig, decay: float) -> torch.optim.AdamW:
    betas = (config.momentum, config.beta2)
    return adamw(params, lr=config.matrix_learning_rate, betas=betas, weight_decay=decay)


MATRIX_RULES: dict[str, Callable[[Any, OptimConfig, float], torch.optim.Optimizer]] = {
    "muon": _muon,
    "normuon": _normuon,
    "soap": _soap,
    "adam": _adam,
}
"""What moves the matrices of the blocks: (parameters, settings, decay) to an optimiser."""


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
    starts: Mapping[str, Any] = field(default_factory=dict)
    """Where the search of the contest begins, apart from the rate."""


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


def _contender(rate: float, tunes: str, *, norm: bool = True, **parts: Any) -> Rule:
    """A rule of the contest; on spheres nothing decays, and the start of the branches is tuned."""
    on_sphere = parts.get("sphere", False)
    score = parts.get("score", False)
    fields = ("rate", "other_rate", "initial" if on_sphere else "decay", *tunes.split(), "warmup")
    return Rule(
        "score" if score else "muon",
        rate,
        {"qk_norm": norm},
        build=partial(composed, **parts),
        tunes=(*fields, "total") if score else fields,
        starts={"other_rate": 0.01, "momentum": 0.9, "decay": 0.0 if on_sphere else 0.1}
        | ({"initial": "zero"} if on_sphere else {}),
    )


SOAP, SPHERE = 0.005, 0.02
CONTEST: dict[str, Rule] = {
    "adamw + qk-norm": _contender(ADAM, "momentum beta2", matrices="adam"),
    "adamh + qk-norm": _contender(SPHERE, "momentum beta2", matrices="adam", sphere=True),
    "muon": _contender(MUON, "momentum", norm=False),
    "muon + qk-norm": _contender(MUON, "momentum"),
    "muonh + qk-norm": _contender(SPHERE, "momentum", sphere=True),
    "normuon + qk-norm": _contender(MUON, "momentum beta2", matrices="normuon"),
    "normuonh + qk-norm": _contender(SPHERE, "momentum beta2", matrices="normuon", sphere=True),
    "soap + qk-norm": _contender(SOAP, "momentum beta2", matrices="soap"),
    "soap on all + qk-norm": _contender(SOAP, "momentum beta2", matrices="soap", everywhere=True),
    "score on muon": _contender(MUON, "momentum", score=True),
    "score on muonh": _contender(SPHERE, "momentum", score=True, sphere=True),
    "score on normuon": _contender(MUON, "momentum beta2", score=True, matrices="normuon"),
    "score on soap": _contender(SOAP, "momentum beta2", score=True, matrices="soap"),
}
"""The contest: what is composed of which parts, and where its search begins at the small size."""
REFERENCE = "muon + qk-norm"
"""The rule beside which the others are set, and whose time is the equal time."""

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
