"""How far a direction moves the law of the next token, and the strength that a budget allows.

    D(s) = mean over the positions t of a text of KL(p_t^s || p_t),    p^s the steered law

D is about s^2 near 0, so sqrt(2 D) is nearly a straight line through the origin: a secant on it
finds the strength of a budget in two or three passes, between bounds that it keeps. Beyond a nat or
two D need not rise with s any more, so larger budgets are refused.

T positions, V vocabulary. KL in nats.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.model import Transformer, evaluating
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
    """Change of the mean loss on the text, in nats per token."""


class Strength(NamedTuple):
    """The strength of a budget."""

    value: float
    divergence: Divergence
    passes: int
    """Forward passes that it took."""


@torch.no_grad()
def divergence(
    model: Transformer, direction: Direction, ids: Sequence[int], base_TV: Tensor | None = None
) -> Divergence:
    """How far a direction at its strength moves the laws on a text.

    ``base_TV`` has the unsteered log-probabilities (``log_laws``), computed where it is left out.
    """
    base_TV = log_laws(model, ids) if base_TV is None else base_TV
    steered_TV = log_laws(model, ids, direction)
    kl_T = (steered_TV.exp() * (steered_TV - base_TV)).sum(-1).clamp(min=0.0)
    next_T1 = torch.tensor(list(ids[1:]), device=base_TV.device).unsqueeze(-1)
    loss = (base_TV[:-1] - steered_TV[:-1]).gather(1, next_T1).mean()
    return Divergence(float(kl_T.mean()), float(kl_T.max()), float(loss))


@torch.no_grad()
def log_laws(model: Transformer, ids: Sequence[int], direction: Direction | None = None) -> Tensor:
    """The log-probabilities of the next token after every position: (T, V), in float32."""
    if len(ids) < 2:
        raise ValueError("a text of at least two tokens is needed to compare laws on.")
    with evaluating(model):
        ids_1T = torch.tensor([list(ids)], device=model.lm_head_weight.device)
        vectors = {} if direction is None else direction.scaled
        like = model.lm_head_weight
        steer = {layer - 1: v_M.to(like).view(1, 1, -1) for layer, v_M in vectors.items()}
        logits_1TV: Tensor = model(ids_1T, steer=steer)
    return logits_1TV[0].float().log_softmax(-1)


def find_strength(
    model: Transformer,
    direction: Direction,
    ids: Sequence[int],
    kl: float,
    *,
    negative: bool = False,
) -> Strength:
    """The strength whose mean divergence on a text is ``kl`` nats, to 2 %.

    With ``negative`` against the direction.
    """
    if not 0.0 < kl <= MOST_NATS:
        raise ValueError(
            f"a budget of {kl:g} nats is not in (0, {MOST_NATS:g}]: beyond that the divergence "
            "does not rise with the strength."
        )
    layer, v_M = next(iter(direction.vectors.items()))
    with after_block(model, layer) as stream:
        base_TV = log_laws(model, ids)
    if not (length := float(v_M.norm())) > 0.0:
        raise ValueError("the direction is zero, which no strength changes.")
    sign, target = -1.0 if negative else 1.0, (2.0 * kl) ** 0.5
    # A tenth of the stream moves most laws by about a tenth of a nat.
    typical = float(stream.x[0, 1:].float().norm(dim=-1).median())
    low, high, previous = 0.0, float("inf"), (0.0, 0.0)
    strength = 0.1 * (typical or 1.0) / length * (10.0 * kl) ** 0.5
    for passes in range(1, _PASSES + 1):
        found = divergence(model, direction.at(sign * strength), ids, base_TV)
        if abs(found.mean - kl) <= TOLERANCE * kl:
            return Strength(sign * strength, found, passes)
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
    raise ValueError(
        f"no strength up to {strength:.3g} has a divergence of {kl:g} nats on this text; that of "
        f"the last one tried is {found.mean:.3g}."
    )
