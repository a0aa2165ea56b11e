"""ScoreDescent: query and key weights moved by a given change of their scores.

In every step, for every head of every pair,

    M   <- mu M + (1 - mu) g,   g' = mu M + (1 - mu) g       momentum with Nesterov's lookahead
    U    = direction(g')                                     direction.py: spectral by default
    W   <- project(shrink W + t U),  RMS dS = lr             step_size.py

lr *is* gamma: the root mean square by which the scores that the softmax receives (scale included)
move in one step, on a sample of the step's own forward passes, all micro-batches together; a head
that other layers have pushed out of the ball by e > lr moves by e. Any schedule of learning rates
therefore applies, and a rate means the same in every layer, at every width and time. A step without
a forward pass since the last one uses closed-form sizes for white inputs, and no ball.

The root mean square of the scores themselves stays below radius + opening t, t the steps that the
group has taken, which are saved with the state: sharp heads are learnt late (optim/config.py).

Only the rows of queries and keys move. Where they share a parameter with the values,
``remaining_parameters`` (pairs.py) gives the rows of the values to another optimiser. The gains of
a norm of queries and keys belong to that optimiser too: what they move comes on top of lr. Where
they have brought the scores out of the ball, a step begins by scaling them back.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel.optim.cuda_graph import Capturable, PreparedStep, Rate
from fenchel.optim.score.direction import NORMS, direction
from fenchel.optim.score.pairs import HeadProjection, QueryKeyPair
from fenchel.optim.score.probe import stack_inputs
from fenchel.optim.score.score_change import HeadWeights, ScoreLine
from fenchel.optim.score.stacked_pairs import (
    InputPlaces,
    PairProbes,
    StepInputs,
    gradients_of,
    head_weights,
    restore_dtypes,
    scale_gains,
    stack_parameters,
    stacked_bounds,
    state_shapes,
    state_tensors,
    store_bounds,
    write_weights,
)
from fenchel.optim.score.step_size import HeadStats, StepLimits, take_step
from fenchel.torch_internals import foreach_lerp_

SIZES = ("measured", "closed")


class ScoreDescent(Capturable):
    """Steepest descent of query and key weights, measured in the scores.

    >>> import torch
    >>> from fenchel.model import ModelConfig, Transformer
    >>> from fenchel.optim import attention_pairs
    >>> model = Transformer(ModelConfig(vocabulary=16, width=32, heads=4, layers=1))
    >>> optimiser = ScoreDescent(attention_pairs(model), lr=0.2)
    >>> model(torch.arange(8)[None]).logsumexp(-1).sum().backward()
    >>> optimiser.step()
    >>> optimiser.score_stats()["blocks.0.attention"].rms_change.shape
    torch.Size([4])
    """

    def __init__(
        self,
        pairs: Iterable[QueryKeyPair] | Iterable[dict[str, Any]],
        lr: float = 0.2,
        momentum: float = 0.95,
        radius: float = 6.0,
        norm: str = "spectral",
        *,
        opening: float = 0.0,
        damping: float = 1.0,
        size: str = "measured",
        probe: int = 2048,
    ) -> None:
        """``pairs`` are QueryKeyPairs, or groups of them: {"pairs": ..., "lr": ...}.

        ``lr`` is far from the rates of other optimisers; a loop that sets one absolute rate in all
        groups sets it too. Scale each group's first rate by a factor instead, as LambdaLR does.
        ``radius`` may be inf, for no ball: for checkpoints whose sharp heads should stay sharp.
        ``opening`` is how much the radius grows per step.
        ``size`` is "measured" or "closed"; ``probe`` is the number of sampled tokens per layer.
        """
        self.pair_probes: list[PairProbes] = []
        self.probe = probe
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "radius": radius,
            "opening": opening,
            "norm": norm,
            "damping": damping,
            "size": size,
        }
        members: list[Any] = list(pairs)
        grouped = bool(members) and isinstance(members[0], dict)
        groups = members if grouped else [{"pairs": members}]
        super().__init__(groups, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add more pairs: {"pairs": ..., and their own settings}."""
        group = dict(param_group)
        pairs = list(group.pop("pairs", []))
        _require({**self.defaults, **group}, pairs, self.probe)
        group["params"] = list(dict.fromkeys(p for pair in pairs for p in pair.parameters))
        super().add_param_group(group)
        self.pair_probes.append(PairProbes(pairs, self.probe))

    def prepare(self) -> PreparedStep:
        """Take the samples, and count the step."""
        stacks: list[_Stack] = []
        rates: list[float] = []
        inputs = StepInputs()
        for group, probes in zip(self.param_groups, self.pair_probes, strict=True):
            taken = self._steps_taken(probes)
            for pairs, samples in probes.samples():
                gradients = {p: inputs.add(g) for p, g in gradients_of(pairs)}
                stacks.append(_Stack(group, probes, pairs, gradients, inputs.add_samples(samples)))
                rates += [float(group["lr"]), group["radius"] + group["opening"] * taken]
                self.state[pairs[0].query.weight]["step"] = torch.tensor(taken + 1.0)
        moved = [pair for stack in stacks for pair in stack.pairs]

        def run(rates: Sequence[Rate], inputs: Sequence[Tensor]) -> None:
            for probes in self.pair_probes:
                probes.records.clear()
            for n, stack in enumerate(stacks):
                self._move(stack, inputs, *rates[2 * n : 2 * n + 2])

        return PreparedStep(
            run=run,
            rates=rates,
            inputs=inputs.tensors,
            memory=[x for pair in moved for x in (*pair.memory, *state_tensors(self.state, pair))],
            settings=tuple(stack.settings() for stack in stacks),
            refusal=next((reason for stack in stacks if (reason := stack.refusal())), None),
        )

    def _steps_taken(self, probes: PairProbes) -> float:
        """The steps of a group, counted with the first pair of every stack that moves."""
        states = (self.state.get(pair.query.weight, {}) for pair in probes.probes)
        return max(float(state.get("step", 0.0)) for state in states)

    def _move(self, stack: "_Stack", inputs: Sequence[Tensor], gamma: Rate, radius: Rate) -> None:
        group, probes, pairs = stack.group, stack.probes, stack.pairs
        samples = [sample and sample.of(inputs) for sample in stack.samples]
        stacks = stack_parameters(pairs)
        W = head_weights(pairs, stacks)
        gradients = stack_parameters(pairs, lambda p: inputs[stack.gradients[p]])
        gradient = head_weights(pairs, gradients)
        ahead = HeadWeights(
            self._nesterov([p.query for p in pairs], gradient.Q, "query", group["momentum"]),
            self._nesterov([p.key for p in pairs], gradient.K, "key", group["momentum"]),
        )
        given = stack_inputs(pairs, samples, probes.grids)
        line = ScoreLine(pairs, given, W, closed=group["size"] == "closed")
        U = direction(line, W, ahead, group["norm"], group["damping"])
        line.set_direction(U)
        gamma, radius = (x.to(W.Q.dtype) if isinstance(x, Tensor) else x for x in (gamma, radius))
        limits = StepLimits(gamma, radius, exact=True)
        update = take_step(line, W, U, stacked_bounds(self.state, pairs), limits)
        write_weights(pairs, stacks, update.W)
        if update.record.gain_factor is not None:
            scale_gains(pairs, update.record.gain_factor)
        probes.record_step(pairs, update.record)
        store_bounds(self.state, pairs, update.bound)

    def _nesterov(
        self, rows: list[HeadProjection], gradient: Tensor, name: str, mu: float
    ) -> Tensor:
        """Update the momentum with gradients (L, H, D, M); returns it with the lookahead."""
        key = f"{name}_momentum"
        for layer, row in enumerate(rows):
            if key not in self.state[row.weight]:
                self.state[row.weight][key] = torch.zeros_like(
                    gradient[layer], memory_format=torch.contiguous_format
                )
        momenta = [self.state[row.weight][key] for row in rows]
        foreach_lerp_(momenta, list(gradient.unbind()), 1.0 - mu)
        return gradient.lerp(torch.stack(momenta), mu)

    def replayed(self) -> Callable[[], None]:
        """A function that restores the records of the probes after a replay."""
        parts = [probe.replayed() for own in self.pair_probes for probe in own.probes.values()]

        def leave() -> None:
            for part in parts:
                part()

        return leave

    def score_stats(self) -> dict[str, HeadStats]:
        """The effect of the last step on the scores, by the name of the layer."""
        return {
            name: stats for probes in self.pair_probes for name, stats in probes.stats().items()
        }

    def state_shapes(self) -> dict[tuple[Tensor, str], tuple[int, ...]]:
        """The shapes of the state per head, by parameter and name."""
        return state_shapes(pair for probes in self.pair_probes for pair in probes.probes)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state in its saved dtype; torch would cast it to that of the weights."""
        super().load_state_dict(dict(state_dict))
        restore_dtypes(self, state_dict)

    def close(self) -> None:
        """Remove the hooks from the model."""
        for probes in self.pair_probes:
            probes.close()


class _Stack(NamedTuple):
    """Pairs of one shape that a step moves, and where their gradients and samples are."""

    group: dict[str, Any]
    probes: PairProbes
    pairs: list[QueryKeyPair]
    gradients: dict[Tensor, int]
    samples: list[InputPlaces | None]

    def settings(self) -> Any:
        """The values that a step depends on, without those that are rates."""
        names = ("momentum", "norm", "damping", "size")
        pairs = tuple((id(pair), pair.causal, pair.window, pair.scale) for pair in self.pairs)
        return *(self.group[name] for name in names), pairs, *self.samples

    def refusal(self) -> str | None:
        """Why a step of the stack cannot be captured."""
        if any(sample is None for sample in self.samples) or self.group["size"] == "closed":
            return "closed sizes are taken without a graph"
        if self.group["norm"] == "frobenius":
            return "the solver of norm='frobenius' waits for the device"
        return None


def _require(group: Mapping[str, Any], pairs: list[Any], probe: int) -> None:
    if not pairs or not all(isinstance(pair, QueryKeyPair) for pair in pairs):
        raise ValueError(
            "ScoreDescent moves pairs of query and key weights; give it attention_pairs(model), "
            'or groups of them as {"pairs": ...}.'
        )
    if not 0.0 <= group["lr"] < math.inf or not 0.0 <= group["momentum"] < 1.0:
        raise ValueError(
            f"lr={group['lr']} should be 0 or above and finite, "
            f"and momentum={group['momentum']} in [0, 1)."
        )
    if not group["radius"] > 0.0 or not 0.0 < group["damping"] < math.inf or probe < 1:
        raise ValueError(
            f"radius={group['radius']}, damping={group['damping']} and probe={probe} "
            "should be above 0."
        )
    if not 0.0 <= group["opening"] < math.inf:
        raise ValueError(f"opening={group['opening']} should be 0 or above, and finite.")
    for name, known in (("norm", NORMS), ("size", SIZES)):
        if group[name] not in known:
            raise ValueError(f"{name}={group[name]!r} should be one of {known}.")
