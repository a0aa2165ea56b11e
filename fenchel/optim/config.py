"""Settings to an optimiser and a schedule: which rule moves which parameters, and which decay.

Matrices inside blocks map a vector to a vector: they decay, and Muon may move them; so do the
experts of a mixture, which are stacks of matrices. Embeddings, the output matrix, norms and biases
do not decay: the row of a rare token would fade between its occurrences, and the gain of a norm has
no reason to be small.

Query and key weights may be moved by their scores instead. "score" moves their rows by ScoreDescent
and leaves everything else, the value rows of a fused weight included, to Muon and AdamW; "trust"
lets Muon and AdamW move everything and limits their steps of queries and keys.

**How far the scores move.** A step of ScoreDescent changes the scores of every head by a given root
mean square, gamma_t = gamma f(t), f the schedule. Over a run the changes add up in square, and
the root of the sum is what is fixed, ``score_total`` (docs/maths/score_descent.md says why):

    gamma = score_total / sqrt(sum over t < n of f(t)^2),      half of the radius at most.

A limit is not a target: ScoreTrust's is per step, whatever the length.

**How large the scores are.** Sharp heads are learnt late, so the ball of ScoreDescent opens: its
radius after t steps is ``score_radius`` + ``score_opening`` t. ScoreTrust, which continues from
weights that may be sharp, has a constant radius. Under a norm of queries and keys the ball of
ScoreDescent acts on the gains of the norm, and ScoreTrust has none.

**Resuming.** Rates are computed from the settings, also those of a resumed run. With another number
of steps the rest of the run takes the schedule and the gamma of a run of the new length; changes
of earlier steps are not counted again. The radius goes on from the steps taken, which are saved.

A new optimiser is a row of ``BUILDERS``, a new schedule a row of ``SCHEDULERS``; fields of their
own go into ``OptimConfig``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fenchel.config import Use, read_with, require_read
from fenchel.optim import first_order, schedule
from fenchel.optim.first_order import CombinedOptimiser
from fenchel.optim.muon import Muon
from fenchel.optim.schedule import Schedule
from fenchel.optim.score.descent import ScoreDescent
from fenchel.optim.score.pairs import (
    ParameterSlice,
    attention_pairs,
    pass_gradients,
    remaining_parameters,
)
from fenchel.optim.score.trust import ScoreTrust

BETA2_START = 0.99
"""Where a warm-up of beta2 begins: an average over 100 steps."""
TRUST_RATE, TRUST_RADIUS = 0.2, 6.0
"""ScoreTrust's limits where ``score_rate`` and ``score_radius`` are not set."""
FIRST_RADIUS = 2.0
"""ScoreDescent's radius at the first step where ``score_radius`` is not set."""
SAMPLED_SEQUENCES, SAMPLED_TOKENS = 4, 2048
"""On which ScoreDescent measures scores, per layer: sequences of the context, and tokens at most.
With 16 sequences of 64 tokens a small model learns no more, and a step takes a third longer."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Settings of the optimiser and of its schedule."""

    optimiser: str = "muon"
    """"muon" (matrices by Muon, the rest by AdamW), "score" (queries and keys by ScoreDescent, else
    as "muon") or "trust" ("muon" within ScoreTrust), or everything by one rule of first_order.py:
    "adamw", "adam_l2", "sgd", "sgd_average" or "nesterov"."""
    learning_rate: float = 1e-2
    """Peak rate of AdamW, or of the single rule."""
    matrix_learning_rate: float = 1e-2
    """Peak rate of Muon."""
    score_total: float = 2.3
    """Root of the sum, over the steps of the run, of the squared RMS changes of the scores, per
    head; the peak change of a step follows from it, the schedule and the number of steps."""
    score_rate: float | None = None
    """Peak RMS change of the scores, per head and step; None is what ``score_total`` gives, and for
    "trust", where it is a limit, 0.2."""
    score_radius: float | None = None
    """Largest RMS of the scores, per head, at the first step; None is 2, and for "trust", where it
    is constant, 6."""
    score_opening: float = 0.006
    """How much the radius grows per step."""
    score_damping: float = 1.0
    """The multiple of the mean eigenvalue of a partner Gram that is added to the Gram before a step
    is whitened by it; more damping, less whitening."""
    output_change: float | None = None
    """Largest RMS change of the output of any layer in one step, as a share of that output; None
    for no limit."""
    weight_decay: float = 0.1
    """Share of a matrix, times the rate, that is subtracted in each step."""
    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    beta2: float = 0.95
    """Decay of AdamW's second moment."""
    beta2_warmup: int = 0
    """Steps in which AdamW's or Adam's window grows from 100 steps to that of ``beta2``."""
    momentum: float = 0.9
    """Decay of the momentum of Muon, ScoreDescent, SGD and Nesterov's rule. 0.95 is customary for
    long runs; in nearly all that were tried here, 250 to 900 steps, it was worse."""
    schedule: str = "hold"
    """"hold" (plateau, then linear), "cosine", "linear", "inverse_sqrt" or "constant"."""
    warmup: float = 0.02
    """Share of the steps in which the rate rises."""
    final: float = 0.0
    """Share of the peak rate left at the end."""

    USES: ClassVar = (
        read_with("matrix_learning_rate", "optimiser", "muon", "score", "trust"),
        read_with("score_rate score_radius", "optimiser", "score", "trust"),
        read_with("score_damping score_opening", "optimiser", "score"),
        read_with("output_change", "optimiser", "trust"),
        Use(
            ("score_total",),
            'optimiser="score" without score_rate',
            lambda c: c.optimiser == "score" and c.score_rate is None,
        ),
        read_with(
            "beta1 beta2 beta2_warmup", "optimiser", "muon", "score", "trust", "adamw", "adam_l2"
        ),
        read_with(
            "momentum", "optimiser", "muon", "score", "trust", "sgd", "sgd_average", "nesterov"
        ),
        read_with("warmup", "schedule", "hold", "cosine", "linear", "inverse_sqrt"),
        read_with("final", "schedule", "hold", "cosine", "linear"),
    )

    def __post_init__(self) -> None:
        if self.optimiser not in OPTIMISERS:
            raise ValueError(f"optimiser={self.optimiser!r} should be one of {OPTIMISERS}.")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} should be one of {SCHEDULES}.")
        rates = ("learning_rate", "matrix_learning_rate", "score_rate")
        for name in (*rates, "score_total", "score_radius", "score_damping", "output_change"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise ValueError(f"{name}={value} should be above 0 and finite.")
        radius = _first_radius(self)
        if self.optimiser == "score" and self.score_rate is not None and self.score_rate >= radius:
            raise ValueError(
                f"score_rate={self.score_rate} should be below the radius of the score ball, "
                f"{radius}: a step of that size would shrink the scores to nothing."
            )
        for name in ("warmup", "final", "beta1", "beta2", "momentum"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)} should be in [0, 1).")
        for name in ("weight_decay", "score_opening"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} should be 0 or above, and finite.")
        if self.beta2_warmup < 0 or (self.beta2_warmup and self.beta2 < BETA2_START):
            raise ValueError(
                f"beta2_warmup={self.beta2_warmup} counts steps in which beta2 rises from "
                f"{BETA2_START}; it needs a beta2 of at least that, got beta2={self.beta2}."
            )
        require_read(self)


Members = tuple[torch.optim.Optimizer, ...]
Builder = Callable[[nn.Module, OptimConfig, int | None], Members]


def build_optimiser(
    model: nn.Module, config: OptimConfig, *, steps: int | None = None
) -> CombinedOptimiser:
    """The optimiser of the settings, over all parameters of ``model``.

    ``steps`` is the number of steps of the whole run. "score" cannot be built without it, unless
    ``score_rate`` is set; no other optimiser reads it.

    >>> from fenchel.model import ModelConfig, Transformer
    >>> model = Transformer(ModelConfig(vocabulary=16, width=32, layers=1))
    >>> [type(member).__name__ for member in build_optimiser(model, OptimConfig()).members]
    ['Muon', 'AdamW']
    """
    return CombinedOptimiser(*BUILDERS[config.optimiser](model, config, steps))


def peak_score_rate(config: OptimConfig, steps: int | None) -> float:
    """The peak RMS change of the scores per step of ScoreDescent in a run of ``steps`` steps.

    >>> config = OptimConfig(optimiser="score", score_total=2.0, schedule="constant")
    >>> [peak_score_rate(config, steps) for steps in (1, 100, 400)]
    [1.0, 0.2, 0.1]
    """
    if config.score_rate is not None:
        return config.score_rate
    if steps is None or steps < 1:
        raise ValueError(
            'optimiser="score" divides score_total among the steps of the run; give '
            f"build_optimiser their number (steps={steps}), or set score_rate."
        )
    factor = build_schedule(config, steps)
    rate = config.score_total / math.sqrt(math.fsum(factor(t) ** 2 for t in range(steps)))
    return min(rate, 0.5 * _first_radius(config))


def _first_radius(config: OptimConfig) -> float:
    return FIRST_RADIUS if config.score_radius is None else config.score_radius


def _muon(model: nn.Module, config: OptimConfig, _steps: int | None) -> Members:
    """Muon for matrices, AdamW for the rest."""
    return _muon_and_adamw(config, *split_matrices(model))


def _score(model: nn.Module, config: OptimConfig, steps: int | None) -> Members:
    """ScoreDescent for queries and keys, Muon and AdamW for the remaining rows."""
    return score_beside(_muon_and_adamw, model, config, steps)


Rest = Callable[[OptimConfig, list[nn.Parameter], list[nn.Parameter]], Members]
"""Settings, matrices and other parameters to the optimisers of both."""


def score_beside(rest: Rest, model: nn.Module, config: OptimConfig, steps: int | None) -> Members:
    """ScoreDescent for queries and keys, ``rest`` for the remaining rows."""
    rate = peak_score_rate(config, steps)
    pairs = attention_pairs(model)
    context: int = getattr(getattr(model, "config", None), "context", SAMPLED_TOKENS)
    score = ScoreDescent(
        pairs,
        rate,
        config.momentum,
        _first_radius(config),
        opening=config.score_opening,
        damping=config.score_damping,
        probe=min(SAMPLED_SEQUENCES * context, SAMPLED_TOKENS),
    )
    slices = remaining_parameters(pairs, model.parameters())
    return score, *optimise_slices(rest, model, config, slices)


def optimise_slices(
    rest: Rest, model: nn.Module, config: OptimConfig, slices: list[ParameterSlice]
) -> Members:
    """``rest`` over parts of the parameters, which get the gradients of their places."""
    matrices, others = (
        [piece.part for piece in slices if any(piece.whole is p for p in kind)]
        for kind in split_matrices(model)
    )
    members = rest(config, matrices, others)
    for optimiser in members:
        pass_gradients(optimiser, slices)
    return members


def _trust(model: nn.Module, config: OptimConfig, steps: int | None) -> Members:
    """Muon and AdamW, their query and key steps limited by ScoreTrust."""
    inner = CombinedOptimiser(*_muon(model, config, steps))
    return (trusted(inner, model, config),)


def trusted(
    inner: torch.optim.Optimizer | CombinedOptimiser, model: nn.Module, config: OptimConfig
) -> ScoreTrust:
    """ScoreTrust with the limits of the settings, around any optimiser."""
    change = config.output_change
    watched = None if change is None else model
    pairs = attention_pairs(model)
    return ScoreTrust(inner, pairs, *trust_limits(config), model=watched, output_change=change)


def trust_limits(config: OptimConfig) -> tuple[float, float]:
    """The rate and the radius of ScoreTrust, constant, and independent of the number of steps.

    >>> trust_limits(OptimConfig(optimiser="trust", score_radius=4.0))
    (0.2, 4.0)
    """
    return (
        TRUST_RATE if config.score_rate is None else config.score_rate,
        TRUST_RADIUS if config.score_radius is None else config.score_radius,
    )


def _muon_and_adamw(
    config: OptimConfig, matrices: list[nn.Parameter], others: list[nn.Parameter]
) -> Members:
    muon = Muon(
        matrices,
        lr=config.matrix_learning_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )
    betas = (config.beta1, config.beta2)
    return muon, first_order.adamw(others, lr=config.learning_rate, betas=betas)


def _single_rule(rule: Callable[..., torch.optim.Optimizer], *settings: str) -> Builder:
    """One rule of first_order.py for every parameter; matrices decay."""

    def build(model: nn.Module, config: OptimConfig, _steps: int | None) -> Members:
        values = {
            "momentum": config.momentum,
            "betas": (config.beta1, config.beta2),
        }
        matrices, others = split_matrices(model)
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others},
        ]
        return (rule(groups, lr=config.learning_rate, **{name: values[name] for name in settings}),)

    return build


BUILDERS: dict[str, Builder] = {
    "muon": _muon,
    "adamw": _single_rule(first_order.adamw, "betas"),
    "score": _score,
    "trust": _trust,
    "adam_l2": _single_rule(first_order.adam_l2, "betas"),
    "sgd": _single_rule(first_order.sgd, "momentum"),
    "sgd_average": _single_rule(first_order.sgd_average, "momentum"),
    "nesterov": _single_rule(first_order.nesterov, "momentum"),
}
"""One row per optimiser that ``optim.optimiser`` can name."""
OPTIMISERS = tuple(BUILDERS)


def split_matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices of linear maps inside blocks, or stacks of them; the rest), each parameter once."""
    inside = {
        id(module.weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("blocks.")
    }
    inside |= {
        id(p) for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim > 2
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if id(p) in inside]
    return matrices, [p for p in trained if id(p) not in inside]


def build_schedule(config: OptimConfig, steps: int) -> Schedule:
    """The factor on the peak rate at each step.

    >>> factor = build_schedule(OptimConfig(schedule="cosine", warmup=0.0), steps=100)
    >>> [round(factor(t), 6) for t in (0, 50, 100)]
    [1.0, 0.5, 0.0]
    """
    return SCHEDULERS[config.schedule](round(config.warmup * steps), steps, config.final)


SCHEDULERS: dict[str, Callable[[int, int, float], Schedule]] = {
    "hold": schedule.warmup_hold,
    "cosine": schedule.warmup_cosine,
    "linear": schedule.warmup_linear,
    "inverse_sqrt": lambda warmup, _steps, _final: schedule.inverse_sqrt(warmup),
    "constant": lambda _warmup, _steps, _final: schedule.constant(),
}
"""One row per schedule that ``optim.schedule`` can name: (warm-up steps, steps, final factor)."""
SCHEDULES = tuple(SCHEDULERS)


def build_beta2(config: OptimConfig) -> Schedule | None:
    """Adam's second decay at each step, or None when it is constant.

    >>> build_beta2(OptimConfig()) is None
    True
    >>> build_beta2(OptimConfig(beta2=0.999, beta2_warmup=1000))(0)
    0.99
    """
    if not config.beta2_warmup:
        return None
    return schedule.beta2_warmup(config.beta2_warmup, BETA2_START, config.beta2)
