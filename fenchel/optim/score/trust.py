"""ScoreTrust: any optimiser, with its query and key steps kept to a given change of the scores.

    W'  = what the optimiser makes of W,   U = W' - W
    W  <- project(W + t U),  t <= 1 for every head so that RMS dS <= lr       settle.py

lr *is* gamma, as in ScoreDescent: the largest root mean square by which a head's scores, as the
softmax sees them, may move in one step; radius bounds that of the scores. A head whose step is
small enough and inside the ball is left exactly as the optimiser made it. Everything else in the
model moves as the optimiser moves it.

param_groups begins with the group of lr and radius, followed by those of the optimiser, so a
scheduler over ScoreTrust scales gamma and the optimiser's own rates alike; state_dict holds both.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fenchel.optim.first_order import CombinedOptimiser
from fenchel.optim.score.pair_stack import (
    STATE_NAMES,
    PairProbes,
    PairStack,
    heads,
    restore_dtypes,
    stack_parameters,
    stacked_bounds,
    store_bounds,
    write,
)
from fenchel.optim.score.pairs import QueryKeyPair
from fenchel.optim.score.score_line import HeadWeights, ScoreLine
from fenchel.optim.score.step_size import HeadStats, StepLimits, WeightUpdate, take_step


class ScoreTrust(torch.optim.Optimizer):
    """Wraps an optimiser, or several behind one; see the module."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | CombinedOptimiser,
        pairs: Iterable[QueryKeyPair],
        lr: float = 0.2,
        radius: float = 6.0,
        *,
        probe: int = 2048,
    ) -> None:
        """``probe`` counts the tokens on which scores are measured."""
        pairs = list(pairs)
        self.members = (
            optimizer.members if isinstance(optimizer, CombinedOptimiser) else (optimizer,)
        )
        inner = [group for member in self.members for group in member.param_groups]
        _require(lr, radius, probe, pairs, inner)
        # a group of settings only: its parameters are in the optimiser's groups already
        super().__init__([{"params": []}], {"lr": lr, "radius": radius})
        self.param_groups += inner
        self.pair_probes = PairProbes(pairs, probe)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of the optimiser, cut to size in the scores."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        before = [(stack, stack_parameters(stack.pairs)) for stack in self.pair_probes.stacks()]
        for member in self.members:
            member.step()
        for stack, stacks in before:
            self._cut(stack, stacks)
        return loss

    def _cut(self, stack: PairStack, before: list[Tensor]) -> None:
        pairs, at = stack
        after = stack_parameters(pairs)
        W, made = heads(pairs, before), heads(pairs, after)
        U = HeadWeights(made.Q - W.Q, made.K - W.K)
        group = self.param_groups[0]
        rule = StepLimits(float(group["lr"]), group["radius"], exactly=False)
        line = ScoreLine(pairs, at, W)
        line.set_direction(U)
        settled = take_step(line, W, U, stacked_bounds(self.state, pairs), rule)
        write(pairs, after, _select_limited(settled, made))
        self.pair_probes.record_step(pairs, settled.moved)
        store_bounds(self.state, pairs, settled.reach)

    def score_stats(self) -> dict[str, HeadStats]:
        """What the last step did to each layer's scores, by the layer's name."""
        return self.pair_probes.stats()

    def state_dict(self) -> dict[str, Any]:
        """The optimiser's state and ours, parameter by parameter."""
        own = self.state
        self.state = defaultdict(dict)
        for state in (*(member.state for member in self.members), own):
            for param, values in state.items():
                self.state[param] = {**self.state[param], **values}
        try:
            return super().state_dict()
        finally:
            self.state = own

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore both."""
        super().load_state_dict(dict(state_dict))
        restore_dtypes(self, state_dict)
        begin = 1
        for member in self.members:
            end = begin + len(member.param_groups)
            member.param_groups = self.param_groups[begin:end]
            begin = end
            held = {p for group in member.param_groups for p in group["params"]}
            theirs = {p: _without(STATE_NAMES, self.state[p]) for p in held if p in self.state}
            member.__setstate__({"state": defaultdict(dict, theirs)})
        mine = {p: _only(STATE_NAMES, values) for p, values in self.state.items()}
        self.state = defaultdict(dict, {p: values for p, values in mine.items() if values})

    def close(self) -> None:
        """Take the hooks off the model."""
        self.pair_probes.close()


def _select_limited(settled: WeightUpdate, made: HeadWeights) -> HeadWeights:
    """Heads that nothing was taken from keep the very bits the optimiser made."""
    chosen = []
    t, back = settled.moved.t, settled.moved.back
    for n, (as_made, cut) in enumerate(zip(made, settled.W, strict=True)):
        whole = t[n] if back is None else torch.minimum(t[n], back[n])
        chosen.append(torch.where((whole == 1.0)[..., None, None], as_made, cut))
    return HeadWeights(*chosen)


def _without(names: tuple[str, ...], values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _only(names: tuple[str, ...], values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def _require(
    lr: float, radius: float, probe: int, pairs: list[QueryKeyPair], groups: list[dict[str, Any]]
) -> None:
    if not 0.0 <= lr < math.inf or not radius > 0.0 or probe < 1:
        raise ValueError(
            f"lr={lr} should be 0 or above and finite, radius={radius} and probe={probe} above 0."
        )
    if not pairs:
        raise ValueError("ScoreTrust needs pairs to watch; give it attention_pairs(model).")
    moved = {p for group in groups for p in group["params"]}
    for pair in pairs:
        if pair.trained and not moved.issuperset(pair.parameters):
            raise ValueError(
                f"the optimiser inside ScoreTrust does not move the query and key weights of "
                f"{pair.name}; give it those parameters."
            )
