"""ScoreTrust: any optimiser, its steps limited in attention scores and in the outputs of layers.

    W'  = the weights after a step of the optimiser,   U = W' - W
    W  <- project(W + t U),  t <= 1 per head such that RMS dS <= lr           step_size.py

lr *is* gamma, as in ScoreDescent. It is measured on a sample of the tokens of the step's own
forward passes, with the inputs of the layer as they were. What a head moves by is

    RMS dS <= max(lr, e),     e = by how much other layers have pushed the head out of the ball,

since a head that is out of the ball comes back in one step; a head inside, and one that started
outside, moves by lr at most. Four limits of this promise:

    sample      other sequences move by a little more or less (docs/maths/score_descent.md)
    bfloat16    what is written back to weights in bfloat16 is rounded: moves of up to 1.07 lr were
                seen (heads of width 8), 1.01 lr in GPT-2; float32 weights move by lr to 1e-4
    QK-norm     no ball: the gains of the norms bound the scores, and radius is not used
    sharing     a layer that serves several layers is measured where it is used last

A head whose step is small enough and inside the ball keeps exactly the bits that the optimiser
computed.

All other parameters move as the optimiser moves them, unless ``output_change`` limits them as well:
then no layer's output moves by more than this share of itself in one step (output_change.py). With
it a checkpoint can be trained further at a rate that is far too high; without it only the damage to
queries and keys is prevented.

The first of param_groups holds the limits under keys of their own (``score_change``, ``radius``,
``output_change``); the others are the groups of the optimiser. In every step

    limit = (lr or output_change) x the largest of  rate / highest rate so far  over those groups

The limits therefore follow the rates, whoever sets them: a scheduler over ScoreTrust, one over the
optimiser inside, or a loop ``for g in optimiser.param_groups: g["lr"] = rate``. The highest rate of
a group begins as the one it was built with, so that a warm-up to that rate scales the limits too.
An optimiser whose rates were never above 0 leaves the limits as they are, and heads that are
outside the ball still enter it. state_dict holds the state of the optimiser, of the limits, and the
highest rates.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fenchel.optim.first_order import CombinedOptimiser
from fenchel.optim.score.output_change import OutputChange, OutputProbes
from fenchel.optim.score.pairs import QueryKeyPair
from fenchel.optim.score.score_change import HeadWeights, NormGains, ScoreLine
from fenchel.optim.score.stacked_pairs import (
    STATE_NAMES,
    PairProbes,
    PairStack,
    copy_gains,
    head_weights,
    moves,
    restore_dtypes,
    stack_parameters,
    stacked_bounds,
    state_shapes,
    store_bounds,
    write_gains,
    write_weights,
)
from fenchel.optim.score.step_size import HeadStats, StepLimits, WeightUpdate, take_step


class ScoreTrust(torch.optim.Optimizer):
    """Limits the steps of an optimiser to an RMS change of lr in the scores of every head.

    The exception: a head that other layers have pushed out of the ball by e > lr moves by e.

    ``optimizer`` is the optimiser inside, or a ``CombinedOptimiser``, which moves the whole model;
    ``pairs`` come from ``attention_pairs`` or are made by hand. ``lr`` is the largest RMS
    change of the scores per head and step, over sampled pairs of query and key. Scores are those
    that enter the softmax, scale included: a change of 0.2 multiplies the weight of a key, before
    normalisation, by exp(0.2). ``radius`` is the largest root mean square
    of the scores themselves, the ball; where queries and keys are normalised there is none. Limited
    are queries, keys, their biases and the gains of their norms. ``probe`` is the number of tokens
    per layer on which scores are measured, an equal share of every micro-batch of the step.

    ``output_change``, with the ``model``, is the largest RMS change of the output of any of its
    layers in one step, as a share of that output; 0.02 suits fine-tuning (docs/optimisers.md).

    Both limits are scaled by the rate of the optimiser relative to its highest so far: a schedule
    or ``for g in optimiser.param_groups: g["lr"] = rate`` decays them too, and sets neither.

    >>> import torch
    >>> from fenchel.model import ModelConfig, Transformer
    >>> from fenchel.optim import attention_pairs
    >>> model = Transformer(ModelConfig(vocabulary=16, width=32, layers=1))
    >>> adamw = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> pairs = attention_pairs(model)
    >>> optimiser = ScoreTrust(adamw, pairs, lr=0.05, model=model, output_change=0.02)
    >>> model(torch.arange(8)[None]).logsumexp(-1).sum().backward()
    >>> optimiser.step()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | CombinedOptimiser,
        pairs: Iterable[QueryKeyPair],
        lr: float = 0.2,
        radius: float = 6.0,
        *,
        probe: int = 2048,
        model: nn.Module | None = None,
        output_change: float | None = None,
    ) -> None:
        pairs = list(pairs)
        self.members = (
            optimizer.members if isinstance(optimizer, CombinedOptimiser) else (optimizer,)
        )
        inner = [group for member in self.members for group in member.param_groups]
        _require(lr, radius, probe, pairs, inner)
        _require_outputs(model, output_change)
        # A group of settings only: its parameters are in the optimiser's groups already. Its rate
        # is there for schedulers, which read one of every group; no step reads it.
        limits = {"score_change": lr, "radius": radius, "output_change": output_change}
        super().__init__([{"params": [], **limits}], {"lr": inner[0]["lr"]})
        self.outputs: OutputProbes | None = None
        if model is not None and output_change is not None:
            self.outputs = OutputProbes(model, pairs)
        self.param_groups += inner
        for group in inner:
            group["highest_lr"] = float(group["lr"])
        self.pair_probes = PairProbes(pairs, probe)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of the optimiser, limited in the scores."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        before = [
            (stack, stack_parameters(stack.pairs), copy_gains(stack.pairs))
            for stack in self.pair_probes.stacks(moves)
        ]
        layers = []
        if self.outputs is not None:
            layers = self.outputs.before(layer for layer in self.outputs.layers if layer.moves)
        for member in self.members:
            member.step()
        group, factor = self.param_groups[0], self._rate_factor()
        if self.outputs is not None and layers:
            self.outputs.limit(layers, group["output_change"] * factor)
        limits = StepLimits(group["score_change"] * factor, group["radius"], exact=False)
        for stack, weights, gains in before:
            self._limit(stack, weights, gains, limits)
        return loss

    def _rate_factor(self) -> float:
        """The rates inside relative to the highest that they had; 1 if none was above 0."""
        factors = []
        for group in self.param_groups[1:]:
            rate = float(group["lr"])
            group["highest_lr"] = max(group["highest_lr"], rate)
            if group["highest_lr"]:
                factors.append(rate / group["highest_lr"])
        return max(factors, default=1.0)

    def _limit(
        self,
        stack: PairStack,
        before: list[Tensor],
        gains: list[dict[str, Tensor]],
        limits: StepLimits,
    ) -> None:
        pairs, inputs = stack
        after = stack_parameters(pairs)
        W, proposal = head_weights(pairs, before), head_weights(pairs, after)
        U = HeadWeights(proposal.Q - W.Q, proposal.K - W.K)
        norms = NormGains.between(gains, copy_gains(pairs)) if any(gains) else None
        line = ScoreLine(pairs, inputs, W, gains=norms)
        line.set_direction(U)
        update = take_step(line, W, U, stacked_bounds(self.state, pairs), limits)
        write_weights(pairs, after, _select_limited(update, proposal))
        if norms is not None and update.record.gain_share is not None:
            write_gains(pairs, norms, update.record.gain_share)
        self.pair_probes.record_step(pairs, update.record)
        store_bounds(self.state, pairs, update.bound)

    def score_stats(self) -> dict[str, HeadStats]:
        """The effect of the last step on the scores, by the name of the layer."""
        return self.pair_probes.stats()

    def output_stats(self) -> dict[str, OutputChange]:
        """The change of each layer's output by the last step, by the name of the layer."""
        return {} if self.outputs is None else self.outputs.stats()

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimiser and of the limits, per parameter."""
        own = self.state
        self.state = defaultdict(dict)
        for state in (*(member.state for member in self.members), own):
            for param, values in state.items():
                self.state[param] = {**self.state[param], **values}
        try:
            return super().state_dict()
        finally:
            self.state = own

    def state_shapes(self) -> dict[tuple[Tensor, str], tuple[int, ...]]:
        """The shapes of the state per head, by parameter and name."""
        return state_shapes(self.pair_probes.probes)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of the optimiser and of the limits."""
        super().load_state_dict(dict(state_dict))
        restore_dtypes(self, state_dict)
        begin = 1
        for member in self.members:
            end = begin + len(member.param_groups)
            member.param_groups = self.param_groups[begin:end]
            begin = end
            params = {p for group in member.param_groups for p in group["params"]}
            inner = {p: _select(self.state[p], ours=False) for p in params if p in self.state}
            member.__setstate__({"state": defaultdict(dict, inner)})
        own = {p: _select(values, ours=True) for p, values in self.state.items()}
        self.state = defaultdict(dict, {p: values for p, values in own.items() if values})

    def close(self) -> None:
        """Remove the hooks from the model."""
        self.pair_probes.close()
        if self.outputs is not None:
            self.outputs.close()


def _select_limited(update: WeightUpdate, proposal: HeadWeights) -> HeadWeights:
    """The updated weights; heads that were not limited keep the bits of the proposal."""
    weights = []
    t, back = update.record.t, update.record.projection
    for n, (full, limited) in enumerate(zip(proposal, update.W, strict=True)):
        whole = t[n] if back is None else torch.minimum(t[n], back[n])
        weights.append(torch.where((whole == 1.0)[..., None, None], full, limited))
    return HeadWeights(*weights)


def _select(values: dict[str, Any], *, ours: bool) -> dict[str, Any]:
    """The state of the limits, or that of the optimiser inside."""
    return {name: value for name, value in values.items() if (name in STATE_NAMES) == ours}


def _require_outputs(model: nn.Module | None, output_change: float | None) -> None:
    if (model is None) != (output_change is None):
        raise ValueError(
            "output_change limits the outputs of the layers of model; give ScoreTrust both or none."
        )
    if output_change is not None and not 0.0 <= output_change < math.inf:
        raise ValueError(f"output_change={output_change} should be 0 or above, and finite.")


def _require(
    lr: float, radius: float, probe: int, pairs: list[QueryKeyPair], groups: list[dict[str, Any]]
) -> None:
    if not 0.0 <= lr < math.inf or not radius > 0.0 or probe < 1:
        raise ValueError(
            f"lr={lr} should be 0 or above and finite, radius={radius} and probe={probe} above 0."
        )
    if not pairs:
        raise ValueError("ScoreTrust needs pairs to limit; give it attention_pairs(model).")
    moved = {p for group in groups for p in group["params"]}
    for pair in pairs:
        if pair.trained and not moved.issuperset(pair.parameters):
            raise ValueError(
                f"the optimiser inside ScoreTrust does not move the query and key weights of "
                f"{pair.name}; give it those parameters."
            )
