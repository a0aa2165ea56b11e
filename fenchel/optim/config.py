"""Settings to an optimiser: which parameters it moves how, and which of them decay.

Matrices inside blocks turn a vector into a vector: they decay, and Muon may move them; so do the
experts of a mixture, which are stacks of matrices.
Embeddings, the read-out, norms and biases do not decay: a rare token's row would fade
between its visits, and a norm's gain has no reason to be small.

Query and key weights may go by their scores instead. "score" moves their rows by ScoreDescent and
leaves everything else, the values' rows of a fused weight included, to Muon and AdamW; "trust"
lets Muon and AdamW move everything and cuts what they do to queries and keys.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fenchel.optim import first_order, schedule
from fenchel.optim.first_order import CombinedOptimiser
from fenchel.optim.muon import Muon
from fenchel.optim.schedule import Schedule
from fenchel.optim.score import ScoreDescent, ScoreTrust, attention_pairs
from fenchel.optim.score.pairs import ParameterSlice, pass_gradients, remaining_parameters

OPTIMISERS = ("muon", "adamw", "score", "trust", "adam_l2", "sgd", "sgd_average", "nesterov")
BETA2_START = 0.99
"""Where a warm-up of beta2 begins: an average over 100 steps."""
SCHEDULES = ("hold", "cosine", "linear", "inverse_sqrt", "constant")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How parameters move."""

    optimiser: str = "muon"
    """"muon" (matrices by Muon, the rest by AdamW), "score" (queries and keys by ScoreDescent, else
    as "muon") or "trust" ("muon" within ScoreTrust), or everything by one rule of ordinary.py:
    "adamw", "adam_l2", "sgd", "sgd_average" or "nesterov"."""
    learning_rate: float = 1e-2
    """Peak rate of AdamW, or of the one rule."""
    matrix_learning_rate: float = 1e-2
    """Peak rate of Muon."""
    score_rate: float = 0.2
    """Peak RMS change of a head's scores in a step, for "score" and "trust"."""
    score_radius: float = 6.0
    """Largest RMS of a head's scores, for "score" and "trust"."""
    score_damping: float = 1.0
    """How little "score" whitens a step by its partner: the share of the mean eigenvalue of the
    partner's Gram that is added to it first."""
    weight_decay: float = 0.1
    """Share of a matrix, times the rate, that is taken away each step."""
    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    beta2: float = 0.95
    """Decay of AdamW's second moment."""
    beta2_warmup: int = 0
    """Steps in which AdamW's or Adam's window grows from 100 steps to that of ``beta2``."""
    momentum: float = 0.9
    """Decay of the momentum of Muon, ScoreDescent, SGD and Nesterov's rule. 0.95 is customary for
    long runs; in nearly all that were tried here, 250 to 900 steps, it was worse (docs/log.md)."""
    schedule: str = "hold"
    """"hold" (plateau, then linear), "cosine", "linear", "inverse_sqrt" or "constant"."""
    warmup: float = 0.02
    """Share of the steps in which the rate rises; "constant" does not read it."""
    final: float = 0.0
    """Share of the peak rate left at the end of "hold", "cosine" and "linear"."""

    def __post_init__(self) -> None:
        if self.optimiser not in OPTIMISERS:
            raise ValueError(f"optimiser={self.optimiser!r} should be one of {OPTIMISERS}.")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} should be one of {SCHEDULES}.")
        rates = ("learning_rate", "matrix_learning_rate", "score_rate")
        for name in (*rates, "score_radius", "score_damping"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} should be above 0 and finite.")
        for name in ("warmup", "final", "beta1", "beta2", "momentum"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)} should be in [0, 1).")
        if not 0.0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay={self.weight_decay} should be 0 or above, and finite.")
        if self.beta2_warmup < 0 or (self.beta2_warmup and self.beta2 < BETA2_START):
            raise ValueError(
                f"beta2_warmup={self.beta2_warmup} counts steps in which beta2 rises from "
                f"{BETA2_START}; it needs a beta2 of at least that, got beta2={self.beta2}."
            )


def build_optimiser(model: nn.Module, config: OptimConfig) -> CombinedOptimiser:
    """The optimiser the settings ask for, over all parameters of ``model``."""
    rate, radius = config.score_rate, config.score_radius
    match config.optimiser:
        case "muon":
            return CombinedOptimiser(*_muon(model, config))
        case "score":
            pairs = attention_pairs(model)
            score = ScoreDescent(pairs, rate, config.momentum, radius, damping=config.score_damping)
            return CombinedOptimiser(
                score, *_muon(model, config, remaining_parameters(pairs, model.parameters()))
            )
        case "trust":
            inner = CombinedOptimiser(*_muon(model, config))
            return CombinedOptimiser(
                ScoreTrust(inner, attention_pairs(model), lr=rate, radius=radius)
            )
        case _:
            return CombinedOptimiser(_single_rule(model, config))


def _muon(
    model: nn.Module, config: OptimConfig, leaves: list[ParameterSlice] | None = None
) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for matrices and AdamW for the others: of the whole model, or of what is left of it."""
    matrices, others = split(model)
    if leaves is not None:
        matrices, others = (
            [leaf.part for leaf in leaves if any(leaf.whole is p for p in kind)]
            for kind in (matrices, others)
        )
    muon = Muon(
        matrices,
        lr=config.matrix_learning_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )
    betas = (config.beta1, config.beta2)
    adamw = first_order.adamw(others, lr=config.learning_rate, betas=betas)
    for optimiser in (muon, adamw):
        pass_gradients(optimiser, leaves or [])
    return muon, adamw


def _single_rule(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """One of fenchel/optim/first_order.py for every parameter; matrices decay."""
    matrices, others = split(model)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others},
    ]
    rate, momentum = config.learning_rate, config.momentum
    betas = (config.beta1, config.beta2)
    match config.optimiser:
        case "adam_l2":
            return first_order.adam_l2(groups, lr=rate, betas=betas)
        case "sgd":
            return first_order.sgd(groups, lr=rate, momentum=momentum)
        case "sgd_average":
            return first_order.sgd_average(groups, lr=rate, momentum=momentum)
        case "nesterov":
            return first_order.nesterov(groups, lr=rate, momentum=momentum)
        case _:
            return first_order.adamw(groups, lr=rate, betas=betas)


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices of linear maps inside blocks, or stacks of them; the rest), each once."""
    inside = {
        id(module.weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("blocks.")
    }
    inside |= {
        id(p) for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim > 2
    }
    learning = [p for p in model.parameters() if p.requires_grad]  # not what adapters stand beside
    matrices = [p for p in learning if id(p) in inside]
    return matrices, [p for p in learning if id(p) not in inside]


def build_schedule(config: OptimConfig, steps: int) -> Schedule:
    """The factor on the peak rate at each step."""
    warmup = round(config.warmup * steps)
    match config.schedule:
        case "cosine":
            return schedule.warmup_cosine(warmup, steps, config.final)
        case "linear":
            return schedule.warmup_linear(warmup, steps, config.final)
        case "inverse_sqrt":
            return schedule.inverse_sqrt(warmup)
        case "constant":
            return schedule.constant()
        case _:
            return schedule.warmup_hold(warmup, steps, config.final)


def build_beta2(config: OptimConfig) -> Schedule | None:
    """Adam's second decay at each step, or None when it does not change."""
    if not config.beta2_warmup:
        return None
    return schedule.beta2_warmup(config.beta2_warmup, BETA2_START, config.beta2)
