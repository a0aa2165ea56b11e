"""How far steering moves the law of the next token, and the strength that a budget allows.

    D(s) = mean over the positions t of a text of KL(p_t^s || p_t),    p^s the steered law

s is the strength of a direction, or the bias of an emphasis.

D is about s^2 near 0, so sqrt(2 D) is nearly a straight line through the origin: a secant on it
finds the strength of a budget in two or three passes, between bounds that it keeps. Beyond a nat or
two D need not rise with s any more, so larger budgets are refused.

T positions, V vocabulary. KL in nats.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.generation.steering import (
    MOST_BIAS,
    ChoiceTable,
    Emphasis,
    Steering,
    stacked_choices,
)
from fenchel.model import Transformer, evaluating
from fenchel.model.forward_context import AttentionOverride
from fenchel.steering.direction import Direction, after_block

MOST_NATS = 1.0
"""The largest budget: above it the divergence need not rise with the strength."""
TOLERANCE = 0.02
_PASSES = 24


class Divergence(NamedTuple):
    """KL(steered || unsteered) over the positions of a text, in nats."""

    mean: float
    worst: float
    """That of the position with the largest."""
    loss: float
    """Change of the mean loss on the text, in nats per token; nan of a single law."""


class Strength(NamedTuple):
    """The strength of a budget."""

    value: float
    divergence: Divergence
    passes: int
    """Forward passes that it took."""


@torch.no_grad()
def divergence(
    model: Transformer,
    steering: Direction | Steering,
    ids: Sequence[int],
    base_TV: Tensor | None = None,
    *,
    start: int = 0,
) -> Divergence:
    """How far a direction at its strength, or any steering without a budget, moves laws on a text.

    Those of the tokens after position ``start``, where a prompt ends. ``base_TV`` has the
    unsteered log-probabilities of all (``log_laws``), computed where it is left out.
    """
    base_TV = log_laws(model, ids) if base_TV is None else base_TV
    if isinstance(steering, Direction):
        steering = Steering(steering.scaled)
    steered_TV, base_TV = log_laws(model, ids, steering)[start:], base_TV[start:]
    kl_T = (steered_TV.exp() * (steered_TV - base_TV)).sum(-1).clamp(min=0.0)
    next_T1 = torch.tensor(list(ids[start + 1 :]), device=base_TV.device).unsqueeze(-1)
    loss = (base_TV[:-1] - steered_TV[:-1]).gather(1, next_T1).mean()
    return Divergence(float(kl_T.mean()), float(kl_T.max()), float(loss))


@torch.no_grad()
def log_laws(model: Transformer, ids: Sequence[int], steering: Steering | None = None) -> Tensor:
    """The log-probabilities of the next token after every position: (T, V), in float32."""
    if len(ids) < 2:
        raise ValueError("a text of at least two tokens is needed to compare laws on.")
    with evaluating(model):
        ids_1T = torch.tensor([list(ids)], device=model.lm_head_weight.device)
        vectors = {} if steering is None else steering.vectors
        like = model.lm_head_weight
        steer = {layer - 1: v_M.to(like).view(1, 1, -1) for layer, v_M in vectors.items()}
        override = _attention(stacked_choices([(steering, 0)], model.config.heads), ids_1T)
        logits_1TV: Tensor = model(ids_1T, steer=steer, attention_override=override)
    return logits_1TV[0].float().log_softmax(-1)


def _attention(table: ChoiceTable | None, ids_1T: Tensor) -> AttentionOverride | None:
    """The attention of one sequence whose heads choose as a table says."""
    if table is None:
        return None
    position_1T = torch.arange(ids_1T.shape[1], device=ids_1T.device).unsqueeze(0)
    return lambda layer, call: table.attend(layer, table.applied(layer, call, position_1T))


def find_strength(
    model: Transformer,
    steering: Direction | Emphasis,
    ids: Sequence[int],
    kl: float,
    *,
    negative: bool = False,
    start: int = 0,
) -> Strength:
    """The strength, or the bias, whose mean divergence on a text is ``kl`` nats, to 2 %.

    Over the laws of tokens after position ``start``; with ``negative`` against the direction, or
    with a bias below 0.
    """
    if not 0.0 < kl <= MOST_NATS:
        raise ValueError(
            f"a budget of {kl:g} nats is not in (0, {MOST_NATS:g}]: beyond that the divergence "
            "does not rise with the strength."
        )
    sign, target = -1.0 if negative else 1.0, (2.0 * kl) ** 0.5
    if isinstance(steering, Emphasis):
        base_TV, unit, high = log_laws(model, ids), 1.0, MOST_BIAS
    else:
        base_TV, unit = _laws_and_unit(model, steering, ids)
        high = float("inf")

    def at(s: float) -> Direction | Steering:
        if isinstance(steering, Emphasis):
            return Steering(emphasis=replace(steering, bias=s))
        return steering.at(s)

    low, previous, means = 0.0, (0.0, 0.0), {0.0: 0.0}
    strength = unit * (10.0 * kl) ** 0.5  # most laws move by about a tenth of a nat per unit
    for passes in range(1, _PASSES + 1):
        found = divergence(model, at(sign * strength), ids, base_TV, start=start)
        if abs(found.mean - kl) <= TOLERANCE * kl:
            return Strength(sign * strength, found, passes)
        means[strength] = found.mean
        root = (2.0 * found.mean) ** 0.5
        low, high = (strength, high) if root < target else (low, strength)
        slope = (root - previous[1]) / (strength - previous[0])
        previous = strength, root
        guesses = [
            strength + (target - root) / slope if slope > 0.0 else 0.0,  # secant
            strength * min(8.0, target / root) if root > 0.0 else 8.0 * strength,  # from the origin
            (low + high) / 2.0,
        ]
        strength = next(guess for guess in guesses if low < guess < min(high, 9.0 * strength))
    if low in means and high in means:  # experts, sparse and hard choices change at once
        raise ValueError(
            f"no strength has a divergence of {kl:g} nats on this text: at {sign * high:.4g} it "
            f"jumps from {means[low]:.3g} to {means[high]:.3g}."
        )
    raise ValueError(
        f"no strength was found whose divergence is {kl:g} nats on this text; that of "
        f"{previous[0]:.3g} is {found.mean:.3g}."
    )


def _laws_and_unit(
    model: Transformer, direction: Direction, ids: Sequence[int]
) -> tuple[Tensor, float]:
    """The unsteered laws, and the strength at which a direction is a tenth of the stream."""
    layer, v_M = next(iter(direction.vectors.items()))
    with after_block(model, layer) as stream:
        base_TV = log_laws(model, ids)
    if not (length := float(v_M.norm())) > 0.0:
        raise ValueError("the direction is zero, which no strength changes.")
    typical = float(stream.x[0, 1:].float().norm(dim=-1).median())
    return base_TV, 0.1 * (typical or 1.0) / length
