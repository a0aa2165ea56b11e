"""Bit-exact micro-batches ("cells"): sums whose order does not depend on the number of processes.

The batch of a step is a function of (seed, step) and is cut into P *cells* of R = batch / P rows.
Of W processes, rank r reads the cells

    c = m W + r,        m = 0, 1, ...  while  c < P,

one forward and backward pass each, with the dropout noise of (seed, step, c). The gradient of the
step is the sum of the gradients of the cells. Where C ranks share every sequence
(context_parallel.py), a cell is read by C of them: the rules for cells below then hold for the P C
*parts* of cells, of which part c C + k belongs to rank k of its group.

**Same bits for any W** (``train.cells``). Floating-point addition is not associative, so what
differs between process counts is only the order of additions. It is fixed here: the sum over cells
is a binary tree over c,

    ((g_0 + g_1) + (g_2 + g_3)) + ((g_4 + g_5) + (g_6 + g_7))

which ``CellSum`` builds as cells arrive, like the carries of a binary counter, with log2 P partial
sums. Processes exchange the gradients of single cells (all-to-all) and each adds those of its own
part: as many bytes as in a reduce-scatter per pass. Then

    replicated    the owner of a parameter receives the gradients of the W cells of a pass, whole
    FSDP2         every rank receives its rows of them, by FSDP2's hook for the reduce-scatter
    HSDP          the same inside each node of S ranks, and the owner adds the sums of the nodes;
                  the cells of a node are neighbours: a subtree where S is a power of two
    the norm      squares are summed in float64 by the owner, per parameter, and added by fsum
    the loss      a vector of P sums, each written by one rank, added in order; so is the entropy
                  penalty
    QK-clip       by the largest scores of all cells, a maximum, the same in any order; the owner
                  scales
    the update    by owners (owners.py), whose work does not depend on what else they own

and every weight and every tensor of the optimiser's state has the same bits for W = 1, 2, ..., P,
replicated or sharded, given the same torch, the same kind of machine and the same number of
threads per process. The price is a reduction per pass instead of one per step, and small passes.

**Without** ``train.cells`` a step has as few cells as ``train.accumulate`` and W allow. Gradients
are added on each rank first, and exchanged once: the same step up to rounding, and with dropout up
to its noise, which belongs to cells.

A loss or norm that is not finite is the same number on all ranks, so all of them skip the step.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fenchel.data import Batch, BatchSource
from fenchel.distributed.context_parallel import ContextPart
from fenchel.distributed.owners import Owners
from fenchel.distributed.processes import World
from fenchel.optim import OptimConfig, Schedule, build_beta2
from fenchel.train import Stepper, StepResult, TrainConfig, count_targets
from fenchel.train.hardware import memory_of
from fenchel.train.stability import Stability
from fenchel.train.step import deterministic, first_place


class CellSum:
    """The sum of tensors that arrive in order, as a binary tree.

    >>> total = CellSum()
    >>> for x in (1e8, 1.0, -1e8, 1.0):
    ...     total.add(torch.tensor(x))
    >>> total.result()  # (1e8 + 1) + (-1e8 + 1), each rounded
    tensor(0.)
    """

    def __init__(self) -> None:
        self._partial: list[tuple[int, Tensor]] = []

    def add(self, x: Tensor) -> None:
        """The next term."""
        level = 0
        while self._partial and self._partial[-1][0] == level:
            x = self._partial.pop()[1] + x
            level += 1
        self._partial.append((level, x))

    def result(self) -> Tensor:
        """The sum, after which the next one begins; the latest partial sums are added first."""
        _, x = self._partial.pop()
        while self._partial:
            x = self._partial.pop()[1] + x
        return x


class _CellReduceScatter:
    """FSDP2's reduce-scatter of one unit: moves bytes, and adds in the order of the cells."""

    def __init__(self, position: "Pass") -> None:
        self.at, self.sum = position, CellSum()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the message."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """The rows of this rank: 0 until the sum is complete, then the sum of the cells so far."""
        del op, async_op
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        for piece in received.view(group.size(), -1)[: self.at.senders]:
            self.sum.add(piece)
        if self.at.complete:
            output_tensor.copy_(self.sum.result().view_as(output_tensor))
        else:
            output_tensor.zero_()


class Pass:
    """Where a step is, as FSDP2's reduce-scatter needs to know it."""

    senders = 0
    """How many ranks of the group that divides the weights have a cell in this pass."""
    complete = False
    """Whether the sum is wanted after this pass: the last of a step or, where several replicas are
    added by owners, any that has a cell."""


class Sharding:
    """Cuts a model by FSDP2: every block a unit, and the rest one."""

    def __init__(
        self, world: World, *, gather_dtype: str, position: Pass | None, parts: int
    ) -> None:
        """``parts`` consecutive ranks divide the weights.

        Weights are gathered in ``gather_dtype``. ``position`` is given for sums in the order of the
        cells; None leaves them to FSDP2.
        """
        # Loaded here: it takes a second, which a run of one process need not wait.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy

        self.parts, self.position = parts, position
        shape, names = (world.size // parts, parts), ("replicate", "shard")
        self.mesh = init_device_mesh(world.device, shape, mesh_dim_names=names)["shard"]
        self.policy = MixedPrecisionPolicy()
        if gather_dtype == "bfloat16":
            half, full = torch.bfloat16, torch.float32
            self.policy = MixedPrecisionPolicy(half, full, cast_forward_inputs=False)

    def __call__(self, model: nn.Module) -> None:
        """Replace every parameter by a DTensor of the rows of this rank."""
        from torch.distributed.fsdp import FSDPModule, fully_shard

        for block in getattr(model, "blocks", ()):
            fully_shard(block, mesh=self.mesh, mp_policy=self.policy)
        fully_shard(model, mesh=self.mesh, mp_policy=self.policy)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # the loss is divided by all targets already
                module.set_force_sum_reduction_for_comms(True)
                if self.position is not None:
                    hook = _CellReduceScatter(self.position)
                    module.set_custom_reduce_scatter(hook)  # type: ignore[arg-type]


def reshard(model: nn.Module) -> None:
    """Free the weights that a forward pass without a backward pass leaves gathered."""
    if callable(free := getattr(model, "reshard", None)):
        free()


def cell_count(config: TrainConfig, ranks: int) -> int:
    """P: ``train.cells``, or the fewest that accumulation and the processes allow.

    >>> cell_count(TrainConfig(batch=12, accumulate=3), ranks=2)
    4
    """
    C = config.context_group
    if ranks % C:
        raise ValueError(
            f"train.context_group={C} needs a multiple of {C} processes, and there are {ranks}."
        )
    groups = ranks // C
    cells = config.cells or groups * -(-(config.accumulate or 1) // groups)
    if config.cells is not None and cells < groups:
        raise ValueError(f"train.cells={cells} serves {cells * C} processes at most, not {ranks}.")
    if config.batch % cells:
        raise ValueError(
            f"train.batch={config.batch} does not split into {cells} cells for {ranks} processes; "
            f"make it a multiple of {cells}."
        )
    return cells


def require_supported(config: TrainConfig, world: World, *, context: int) -> None:
    """Refuse settings that these processes cannot divide; sequences have ``context`` positions."""
    if (C := config.context_group) > 1 and context % (2 * C):
        raise ValueError(
            f"train.context_group={C} cuts a sequence into {2 * C} equal chunks, and its "
            f"{context} positions are not a multiple of {2 * C}."
        )
    W, S = world.size, world.local_size
    if config.shard == "node" and W % S:
        raise ValueError('train.shard="node" needs as many processes on every machine.')
    if config.shard == "node" and config.cells is not None and S < W and not _is_power_of_2(S):
        raise ValueError(
            f'train.shard="node" adds the cells of {S} processes per machine first, which has the '
            "bits of train.cells where that is 1, 2, 4, 8, ...; leave one of them out."
        )


def _is_power_of_2(number: int) -> bool:
    """
    >>> [n for n in range(1, 10) if _is_power_of_2(n)]
    [1, 2, 4, 8]
    """
    return number & (number - 1) == 0


def parts_of(meta: nn.Module, config: TrainConfig, world: World) -> int:
    """D: how many ranks divide one copy of the weights, which rank 0 decides for all."""
    W, S = world.size, world.local_size
    if not all(p.requires_grad for p in meta.parameters()):  # adapters beside whole weights
        return 1
    if config.shard in ("none", "full") or W == 1:
        return W if config.shard == "full" else 1
    if config.shard == "node":
        if set(world.gather(S)) != {S}:
            raise ValueError('train.shard="node" needs as many processes on every machine.')
        return S
    device = torch.device(world.device)
    needs = 2 * 16 * sum(p.numel() for p in meta.parameters())  # weights, gradients, two moments
    there = memory_of(device) // (S if device.type == "cpu" else 1)
    inside = S < W and set(world.gather(S)) == {S} and (config.cells is None or _is_power_of_2(S))
    return world.share(1 if needs <= there else S if inside and needs <= there * S else W)


def build_stepper(
    model: nn.Module,
    meta: nn.Module,
    batches: BatchSource,
    schedule: Schedule,
    *,
    train: TrainConfig,
    optim: OptimConfig,
    steps: int | None,
    seed: int,
    world: World,
    drawn: Mapping[str, Tensor] | None = None,
) -> "CellStepper":
    """The steps of this process; ``meta`` is the model without values.

    ``model`` has its first weights or, where they are divided, is without values too: then
    ``drawn`` are the first weights, on rank 0, and nothing on the others; None leaves them to a
    checkpoint.
    """
    exact, position, shard = train.cells is not None, Pass(), None
    if (parts := parts_of(meta, train, world)) > 1:
        at = position if exact else None
        shard = Sharding(world, gather_dtype=train.gather_dtype, position=at, parts=parts)
    owners = Owners(model, meta, optim, world, steps=steps, exact=exact, shard=shard)
    if drawn is not None:
        owners.receive(drawn)
    owners.spread()  # the first weights, which machines of several kinds may round differently
    owners.spread_vectors()
    beta2 = build_beta2(optim)
    return CellStepper(
        owners, batches, schedule, config=train, seed=seed, position=position, beta2=beta2
    )


class CellStability(Stability):
    """Measures the attention of the cells of this rank, and acts by that of all."""

    def __init__(
        self, owners: Owners, config: TrainConfig, parts: int, context: ContextPart | None
    ) -> None:
        """``parts`` counts the forward passes of a step over all ranks, cells x context group."""
        self.world, self.parts, self.context = owners.world, parts, context
        super().__init__(owners.model, config)
        owned: Any = owners.meta
        self.owned = owned.attention_layers()

    def reset(self) -> None:
        """Discard the measurements of the step before."""
        super().reset()
        self.penalties = torch.zeros(self.parts, dtype=torch.float64)

    def penalty_of(self, number: int, share: float, *, counts: bool) -> Tensor | float:
        """The entropy penalty of the cell just observed, ``share`` of the step.

        The ranks of a context group have the same one, and each its own term of the gradient.
        """
        penalty = self.penalty(share)
        if counts and number % (1 if self.context is None else self.context.size) == 0:
            self.penalties[number] = torch.as_tensor(penalty).detach()
        return penalty

    def _head_entropies(self) -> Tensor:
        mean = super()._head_entropies()
        return mean if self.context is None else self.context.mean(mean)

    def exchange(self) -> None:
        """After the last pass of a step: take over what the other ranks have measured."""
        if self.floor:
            total = sum(self.world.sum(self.penalties).tolist())
            self._metrics["entropy_penalty"] = torch.tensor(total, dtype=torch.float64)
        if self.limit is not None:
            # No score that is not finite leads to a clip, and a maximum of nan would be one of
            # several numbers.
            own = torch.stack(list(self._largest.values())).nan_to_num(nan=math.inf)
            whole = self.world.maximum(own.cpu()).to(own.device)
            self._largest = dict(zip(self._largest, whole.unbind(), strict=True))

    def clip_scores(self) -> None:
        """Apply QK-clip to the weights that this rank owns, after the optimiser has moved them."""
        self._clip(self.owned)


class CellStepper(Stepper):
    """Takes steps together with the other processes."""

    stability: CellStability | None

    def __init__(
        self,
        owners: Owners,
        batches: BatchSource,
        schedule: Schedule,
        *,
        config: TrainConfig,
        seed: int,
        position: Pass,
        beta2: Schedule | None = None,
    ) -> None:
        """``position`` is the one that ``Sharding`` was given."""
        optimiser = owners.optimiser
        super().__init__(
            owners.model, batches, optimiser, schedule, config=config, seed=seed, beta2=beta2
        )
        self.owners, self.world, self.at = owners, owners.world, position
        self.cells, self.exact = cell_count(config, owners.world.size), config.cells is not None
        self.context: ContextPart | None = None
        if config.context_group > 1:
            self.context = self._arguments["part"] = ContextPart(self.world, config.context_group)
        self.parts = self.cells * config.context_group
        if self.stability is not None:
            self.stability = CellStability(owners, config, self.parts, self.context)
            self._arguments["observe"] = self.stability.observe
        self.one_copy = owners.sharded and owners.parts == owners.world.size
        """Whether FSDP2's reduce-scatter adds over all ranks; else owners add replicas."""
        self.senders = 0

    def __call__(self, step: int) -> StepResult:
        """Take step number ``step``, counted from 0."""
        batch = self.batches.at(step).to(self.device)
        self._set_rates(step)
        self.model.train()
        with deterministic(self.device, enabled=self.config.deterministic):
            self.owners.follow_weights()
            loss, gradients = self._unscaled_gradients(batch, step)
        norm, broken, owners = self._clip(gradients), None, self.owners
        if math.isfinite(loss) and math.isfinite(norm):
            if owners.samples is not None:
                owners.samples.send()
            owners.optimiser.move({owners.owned[n]: g for n, g in gradients.items()})
            if self.stability is not None:
                self.stability.clip_scores()
            owners.spread()
        else:
            broken = self._source(batch, step, loss, gradients)
        owners.clear_gradients()
        rate = self.optimiser.param_groups[-1]["lr"]
        return StepResult(batch, loss, norm, rate, broken, self._metrics())

    def _unscaled_gradients(self, batch: Batch, step: int) -> tuple[float, dict[str, Tensor]]:
        """``_gradients`` where the loss is scaled or not; all ranks adapt the scale equally."""
        if self.scaling is None:
            return self._gradients(batch, step)
        gradients: dict[str, Tensor] = {}

        def accumulate() -> float:
            nonlocal gradients
            loss, gradients = self._gradients(batch, step)
            return loss

        def unscale(factor: float) -> bool:
            finite = True
            for g in gradients.values():
                finite = finite and bool(g.div_(factor).isfinite().all())
            return not self.world.largest(int(not finite))

        return self.scaling.gradient(accumulate, unscale), gradients

    def _passes(self) -> Iterator[tuple[int, bool]]:
        """The cells of this rank, by the number of its part, and whether they count.

        Where a last pass has fewer cells than ranks, the others do nothing, or with FSDP2, whose
        passes gather weights from all ranks, repeat a cell that does not count.
        """
        W, rank, D, parts = self.world.size, self.world.rank, self.owners.parts, self.parts
        for first in range(0, parts, W):
            self.senders, last = min(W, parts - first), first + W >= parts
            self.at.senders = min(D, max(0, self.senders - rank // D * D))
            self.at.complete = last if self.one_copy else self.at.senders > 0
            yield (first + rank) % parts, rank < self.senders

    def _gradients(self, batch: Batch, step: int) -> tuple[float, dict[str, Tensor]]:
        """The mean loss, and the whole gradients of the parameters that this rank owns."""
        owners, count = self.owners, max(1, count_targets(batch.targets))
        rows, T = len(batch.inputs) // self.cells, batch.inputs.shape[1]
        losses = torch.zeros(self.parts, dtype=torch.float64)
        sums: dict[str, CellSum] = {name: CellSum() for name in owners.owned}
        if owners.samples is not None:
            owners.samples.begin(self.cells, rows, T, self.config.context_group)
        if self.stability is not None:
            self.stability.reset()
        for number, counts in self._passes():
            if counts or owners.sharded:
                total = self._backward(batch, step, number, counts, count)
                if counts:
                    losses[number] = total
            if self.exact and not self.one_copy:
                self._add(sums, self.senders)
            elif self.exact and not self.at.complete:
                owners.clear_gradients()
        if self.one_copy or not self.exact:
            self._add(sums, self.world.size)
        gradients = {name: total.result() for name, total in sums.items()}
        if self.stability is not None:
            self.stability.exchange()
        return sum(self.world.sum(losses).tolist()) / count, gradients

    def _add(self, sums: dict[str, CellSum], senders: int) -> None:
        """Send the gradients to their owners, and add those of the replicas in order."""
        replicas = -(-senders // self.owners.parts)
        received = self.owners.to_owners(self.owners.local_gradients(), replicas)
        self.owners.clear_gradients()
        for name, terms in received.items():
            for term in terms:
                sums[name].add(term)

    def _backward(self, batch: Batch, step: int, number: int, counts: bool, count: int) -> float:
        """Forward and backward pass of one cell, or its part; returns the sum of its losses."""
        samples = self.owners.samples
        with nullcontext() if samples is None else samples.of_part(number if counts else None):
            return self._both_passes(self._cell(batch, number), step, number, counts, count)

    def _both_passes(self, cell: Batch, step: int, number: int, counts: bool, count: int) -> float:
        hidden, targets = self._hidden_of_part(cell, step, number), cell.targets
        if self.owners.samples is not None:
            self.owners.samples.keep(number)
        own, stability, penalty = count_targets(targets), self.stability, None
        if stability is not None:
            penalty = partial(stability.penalty_of, number, own / count, counts=counts)
        if self.context is not None:
            targets = targets[:, self.context.positions(targets.shape[1], self.device)]
            own = count_targets(targets)
        return self._backward_of_part(hidden, targets, own, count, penalty).item()

    def _cell(self, batch: Batch, number: int) -> Batch:
        """The sequences of the cell of a part."""
        rows, cell = len(batch.inputs) // self.cells, number // self.config.context_group
        return batch.rows(cell * rows, (cell + 1) * rows)

    def _clip(self, gradients: dict[str, Tensor]) -> float:
        """Scale the gradients to the largest global norm; returns the norm before."""
        names = list(self.owners.parameters)
        squares = torch.zeros(len(names), dtype=torch.float64)
        if gradients:
            exact = torch.float64
            norms = [torch.linalg.vector_norm(g, dtype=exact) for g in gradients.values()]
            squares[[names.index(n) for n in gradients]] = torch.stack(norms).square().cpu()
        terms = self.world.sum(squares).tolist()
        if not all(map(math.isfinite, terms)):
            return math.nan
        norm = math.sqrt(math.fsum(terms))
        factor = self.config.clip / (norm + 1e-6)
        if factor < 1.0:
            for g in gradients.values():
                g.mul_(factor)
        return norm

    def _source(self, batch: Batch, step: int, loss: float, gradients: dict[str, Tensor]) -> str:
        """Name the source of a nan or inf, the same on all ranks (train/step.py has the order)."""
        owners = self.owners
        names = list(owners.parameters)
        weights = [n for n in names if n in owners.owned and not owners.owned[n].isfinite().all()]
        if bad := self._among(weights):
            return f"the weights {min(bad, key=names.index)} are not finite"

        def forward() -> None:
            for number, counts in self._passes():
                if counts or owners.sharded:
                    self._hidden_of_part(self._cell(batch, number), step, number)

        place = first_place(self.model, forward)
        reshard(self.model)
        if places := self._among([place] if place else []):
            return f"the {places[0]} is the first that is not finite"
        if not math.isfinite(loss):
            return "the loss is the first that is not finite"
        broken = [n for n, g in gradients.items() if not g.isfinite().all()]
        if bad := self._among(broken):
            last = max(bad, key=names.index)
            return f"the gradient of {last} is the first that is not finite"
        return "the gradient is finite and too large for its norm to be"

    def _among(self, found: list[str]) -> list[str]:
        """What the ranks have found, the lowest rank first."""
        return [name for row in self.world.gather(found) for name in row]
