"""ZeRO-1 with whole parameters: each has one owner, a rank whose ordinary optimiser updates it.

An optimiser that reads more than one entry of a matrix (Muon, ScoreDescent, ScoreTrust) needs
the matrix whole. Gathering it on every rank repeats the work W times. Here each parameter has one
*owner*, and a step is

    gradient of every rank   -> owner      summed there, in the order of cells.py
    owner                                  clips, and moves its parameters by its own optimiser
    weights of the owner     -> every rank

W ranks send and receive each gradient and each weight once, as in a reduce-scatter followed by an
all-gather; no rank holds optimiser state of parameters that another owns.

**The optimiser** is the one of ``fenchel.optim``, unchanged, built over a second model whose
parameters are on the meta device except those that this rank owns. Parameters without gradients do
not move, so it moves what is owned. The numbering of its state is that of one process, and so a
checkpoint is the union of the states of all ranks (checkpoint.py).

**Units.** What must move together is a unit: the weights, biases and norm gains of a query-key
pair for the score optimisers, the weight and bias of a layer where the change of its output is
limited, any other single parameter. Units are dealt to the least loaded rank, largest first: a
function of shapes and W. With ``exact`` sums, and for the score optimisers, the optimiser is called
once per unit, with only the gradients of that unit: no product is batched over units, so the bits
of a weight do not depend on which other units its owner has.

**Samples of inputs.** ScoreDescent and ScoreTrust measure scores on the inputs of a layer. Every
rank samples the cells that it reads; the samples of a layer go to its owner, which puts them in the
order of the cells. The sample of P cells of R sequences and T positions takes the first n sequences
of every s-th cell,

    s = the least power of two with ceil(P / s) T <= tokens,    n = tokens / (ceil(P / s) T) <= R.

Where C ranks share a sequence (context_parallel.py), the owner receives its positions from all of
them and puts them in order. With ``optim.output_change`` the owner of a layer also gets tokens of
its input, an equal share of every cell in place of tokens of the last one, 128 in all: one process
takes the same decision, and so does every number of them.

**Replicas.** D consecutive ranks, ``parts``, hold one copy of the weights together, each its rows:
D = 1 where every rank has all of them, W where all divide one copy, S where the ranks of a node do
(HSDP). The owner receives a gradient from each of the W / D replicas, row by row from the ranks of
a replica, and adds the replicas: no all-reduce between nodes comes before, which would bring the
sum to S ranks of every node where only the owner needs it. New weights go to all ranks, to each
its rows. Without FSDP2 (``sharded=False``) an owner's parameter is the model's own memory; with it,
a whole copy. FSDP2 divides no scalar: the model's has one row then, the owner's has none.

**Buffers.** The singular vectors of ``model.sigma_reparam`` belong to the owner of their weight,
which takes one power iteration per step, before the first pass, and sends them to every rank. In
the passes they stay as they are, however many a rank has.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fenchel.distributed.context_parallel import positions_of
from fenchel.distributed.processes import Shape, World
from fenchel.model.sigma_linear import SigmaLinear
from fenchel.optim import (
    CombinedOptimiser,
    LayerArguments,
    OptimConfig,
    QueryKeyPair,
    ScoreDescent,
    ScoreTrust,
    attention_pairs,
    build_optimiser,
)
from fenchel.optim.score.output_change import TOKENS, MeasuredLayer, OutputProbes, TokenSample
from fenchel.optim.score.probe import (
    LayerInput,
    LayerReader,
    crop_angles,
    probe_dtype,
    samples_of_all,
)
from fenchel.optim.score.stacked_pairs import PairProbes

BUCKET = 2**26
"""Numbers per exchange, about: 256 MiB of float32."""
BY_SCORES = ("score", "trust")


def deal(sizes: Sequence[int], ranks: int) -> list[int]:
    """The owner of each unit: the largest first, each to the rank that has least.

    >>> deal([4, 9, 3, 3], ranks=2)
    [1, 0, 1, 1]
    """
    load, owner = [0] * ranks, [0] * len(sizes)
    for unit in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        owner[unit] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[owner[unit]] += sizes[unit]
    return owner


def rows_of(rows: int, rank: int, ranks: int) -> slice:
    """The rows of a tensor that ``Shard(0)`` leaves to a rank: ceil(rows / W), the last fewer.

    >>> [rows_of(5, rank, 4) for rank in range(4)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None), slice(5, 5, None)]
    """
    most = -(-rows // ranks)
    return slice(min(rows, rank * most), min(rows, (rank + 1) * most))


def units_of(model: nn.Module, optim: OptimConfig) -> list[tuple[str, ...]]:
    """The names of the trained parameters that move together, in the order of the model."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    unit: dict[str, tuple[str, ...]] = {name: (name,) for name in names.values()}
    groups: list[Iterable[Tensor]] = []
    if optim.optimiser in BY_SCORES:
        groups += [(*pair.parameters, *pair.gains.values()) for pair in attention_pairs(model)]
    if optim.output_change is not None:
        for module in model.modules():
            own = dict(module.named_parameters(recurse=False))
            groups.append([own[key] for key in ("weight", "bias") if key in own])
    for group in groups:
        trained = (names[id(p)] for p in group if id(p) in names)
        together = tuple(dict.fromkeys(n for name in trained for n in unit[name]))
        unit |= dict.fromkeys(together, together)
    return list(dict.fromkeys(unit.values()))


class ShardFunction(Protocol):
    """Cuts the parameters of a model into rows per rank."""

    @property
    def parts(self) -> int:
        """D, the consecutive ranks that hold one copy of the weights."""

    def __call__(self, model: nn.Module) -> None:
        """Replace every parameter by a DTensor of the rows of this rank."""


class Owners:
    """The parameters that this rank owns, their optimiser, and the ways to and from the others."""

    def __init__(
        self,
        model: nn.Module,
        meta: nn.Module,
        optim: OptimConfig,
        world: World,
        *,
        steps: int | None = None,
        exact: bool,
        shard: ShardFunction | None = None,
    ) -> None:
        """``meta`` is the model on the meta device, of which the owned parameters are filled.

        ``shard`` cuts the parameters of ``model`` into rows per rank; None leaves them whole. Then
        ``model`` may come on the meta device as well: its rows are allocated, and ``receive`` or
        ``load_state_dict`` gives them values. No rank but the one that draws has all of them.
        """
        by_scores = optim.optimiser in BY_SCORES
        self.model, self.meta, self.world = model, meta, world
        self.units = units_of(meta, optim)
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        self.parameters = _trained(model)
        sigma = [name for name, m in model.named_modules() if isinstance(m, SigmaLinear)]
        self.vectors = {f"{name}.{side}": name for name in sigma for side in ("left", "right")}
        """Name of every buffer to that of its layer."""
        known = self.parameters.keys() | self.vectors.keys() | frozen
        if other := meta.state_dict().keys() ^ known:
            raise ValueError(
                "several processes have a rule for parameters and singular vectors, and the model "
                f"also has {min(other)}."
            )
        sizes = [sum(self.parameters[name].numel() for name in unit) for unit in self.units]
        ranks = deal(sizes, world.size)
        self.owner = {n: r for unit, r in zip(self.units, ranks, strict=True) for n in unit}
        self.owner |= {n: self.owner[f"{layer}.weight"] for n, layer in self.vectors.items()}
        self.sharded, self.parts = shard is not None, 1 if shard is None else shard.parts
        self.owned: dict[str, nn.Parameter] = {}
        self.owned_vectors: dict[str, Tensor] = {}
        for name, p in self.parameters.items():
            if self.owner[name] == world.rank:
                memory = self._memory(p)
                self.owned[name] = _set_parameter(meta, name, nn.Parameter(memory, p.requires_grad))
            if shard is not None and not p.ndim:
                _set_parameter(model, name, nn.Parameter(p.detach().reshape(1), p.requires_grad))
        for name in self.vectors:
            if self.owner[name] == world.rank:
                memory = self.owned_vectors[name] = self._memory(model.get_buffer(name))
                layer, _, side = name.rpartition(".")
                setattr(meta.get_submodule(layer), side, memory)
        whole = {**_trained(model), **{n: model.get_buffer(n) for n in self.vectors}}
        self.shapes = {n: Shape(tuple(x.shape), x.dtype) for n, x in whole.items()}
        for name in sigma:
            model.get_submodule(name).iterations = 0  # type: ignore[assignment]
        if shard is not None:
            empty = any(p.is_meta for p in model.parameters())
            shard(model)
            if empty:
                model.to_empty(device=world.device)
            self.parameters = _trained(model)
        self.buffers = {name: model.get_buffer(name) for name in self.vectors}
        inner = build_optimiser(meta, optim, steps=steps)
        own = [u for u, r in zip(self.units, ranks, strict=True) if r == world.rank]
        one_by_one = [[self.owned[n] for n in unit] for unit in own] if exact or by_scores else None
        self.optimiser = OwnedOptimiser(*inner.members, units=one_by_one)
        self.samples = Samples(self, inner) if by_scores else None
        """The inputs of layers, for the score optimisers."""

    def to_owners(self, tensors: Mapping[str, Tensor], replicas: int) -> dict[str, list[Tensor]]:
        """What each of the first ``replicas`` has under the names that this rank owns, whole.

        ``tensors`` are those of this rank: whole where D = 1, else its rows.
        """
        W, rank, D = self.world.size, self.world.rank, self.parts
        senders, received = replicas * D, dict[str, list[Tensor]]()
        for names in self._buckets():
            by_owner = self._by_owner(names)
            own = by_owner[rank]
            to = [[tensors[n] for n in row] if rank < senders else [] for row in by_owner]
            expected = [
                [self._shape_on(n, r) for n in own] if r < senders else [] for r in range(W)
            ]
            back = self.world.exchange(to, expected)
            for at, name in enumerate(own):
                rows = [back[r][at] for r in range(senders)]
                received[name] = [
                    (torch.cat(rows[first : first + D]) if D > 1 else rows[first]).view(
                        self.owned[name].shape
                    )
                    for first in range(0, senders, D)
                ]
        return received

    @property
    def owned_tensors(self) -> dict[str, Tensor]:
        """The parameters and singular vectors that this rank owns, whole."""
        return {**{n: p.detach() for n, p in self.owned.items()}, **self.owned_vectors}

    def _memory(self, x: Tensor) -> Tensor:
        """Of a parameter or buffer that this rank owns: the model's, or its own where divided."""
        if x.is_meta:
            return torch.empty_like(x, device=self.world.device, requires_grad=False)
        return x.detach().clone() if self.sharded else x.detach()

    @torch.no_grad()
    def receive(self, drawn: Mapping[str, Tensor]) -> None:
        """Send the first weights from rank 0, which has drawn them all, to their owners."""
        W, rank, own = self.world.size, self.world.rank, self.owned_tensors
        for names in (*self._buckets(), list(self.vectors)):
            by_owner = self._by_owner(names)
            to: list[list[Tensor]] = [[] for _ in range(W)]
            if self.world.first:
                to = [[drawn[n].to(self.world.device) for n in row] for row in by_owner]
            expected = [[self.shapes[n] for n in by_owner[rank]], *([] for _ in range(1, W))]
            received, *_ = self.world.exchange(to, expected)
            for n, x in zip(by_owner[rank], received, strict=True):
                own[n].copy_(x.view_as(own[n]))

    @torch.no_grad()
    def spread(self) -> None:
        """Give every rank the weights of the owners: all of them, or its rows."""
        W, rank, D = self.world.size, self.world.rank, self.parts
        for names in self._buckets():
            by_owner = self._by_owner(names)
            own = [self.owned[n].detach().view(self.shapes[n].sizes) for n in by_owner[rank]]
            if self.sharded:
                to = [[x[rows_of(len(x), r % D, D)] for x in own] for r in range(W)]
                expected = [[self._shape_on(n, rank) for n in row] for row in by_owner]
            else:
                to = [own if r != rank else [] for r in range(W)]
                expected = [
                    [self.shapes[n] for n in row] if r != rank else []
                    for r, row in enumerate(by_owner)
                ]
            for row, tensors in zip(by_owner, self.world.exchange(to, expected), strict=True):
                for n, x in zip(row, tensors, strict=False):
                    self._local(n).copy_(x)

    @torch.no_grad()
    def spread_vectors(self) -> None:
        """Give every rank the singular vectors of the owners."""
        if not self.vectors:
            return
        by_owner = self._by_owner(list(self.vectors))
        own = [self.owned_vectors[n] for n in by_owner[self.world.rank]]
        expected = [[self.shapes[n] for n in row] for row in by_owner]
        received = self.world.exchange([own] * self.world.size, expected)
        for row, tensors in zip(by_owner, received, strict=True):
            for n, x in zip(row, tensors, strict=True):
                self.buffers[n].copy_(x)

    def follow_weights(self) -> None:
        """Before the passes of a step: one power iteration of the singular vectors, for all."""
        for name in dict.fromkeys(self.vectors[n] for n in self.owned_vectors):
            layer = self.meta.get_submodule(name)
            assert isinstance(layer, SigmaLinear)
            layer.power_iterate(1)
        self.spread_vectors()

    def state_dict(self) -> dict[str, Tensor]:
        """Names and shapes of all tensors of a checkpoint; only those owned here have values."""
        return {n: x for n, x in self.meta.state_dict().items() if n in self.shapes}

    @torch.no_grad()
    def load_state_dict(self, weights: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Set all parameters and buffers from whole tensors, which every rank has been given."""
        if strict and weights.keys() != self.shapes.keys():
            raise ValueError(f"the weights are not those of {type(self.model).__name__}.")
        own, D = self.owned_tensors, self.parts
        for name, x in weights.items():
            if self.sharded and name in own:
                own[name].copy_(x)
            if name in self.buffers:
                self.buffers[name].copy_(x)
                continue
            x = x.reshape(self.shapes[name].sizes)
            self._local(name).copy_(x[rows_of(len(x), self.world.rank % D, D)] if D > 1 else x)

    def local_gradients(self) -> dict[str, Tensor]:
        """The gradients of this rank, whole or its rows; 0 where the loss did not reach."""
        gradients = {}
        for name, p in self.parameters.items():
            g = p.grad
            if g is None:
                gradients[name] = torch.zeros_like(self._local(name))
            else:
                gradients[name] = g.to_local() if self.sharded else g.to_dense()  # type: ignore[attr-defined]
        return gradients

    def clear_gradients(self) -> None:
        """Drop the gradients of the model."""
        for p in self.parameters.values():
            p.grad = None

    def _local(self, name: str) -> Tensor:
        """The memory of a parameter on this rank."""
        p = self.parameters[name].detach()
        return p.to_local() if self.sharded else p  # type: ignore[attr-defined]

    def _shape_on(self, name: str, rank: int) -> Shape:
        """Of the rows of a parameter that a rank holds."""
        sizes, dtype = self.shapes[name]
        if self.parts == 1:
            return Shape(sizes, dtype)
        rows = rows_of(sizes[0], rank % self.parts, self.parts)
        return Shape((rows.stop - rows.start, *sizes[1:]), dtype)

    def _by_owner(self, names: Sequence[str]) -> list[list[str]]:
        return [[n for n in names if self.owner[n] == rank] for rank in range(self.world.size)]

    def _buckets(self) -> Iterator[list[str]]:
        """The names in order, in groups whose messages stay near ``BUCKET``."""
        bucket: list[str] = []
        size = 0
        for name, p in self.parameters.items():
            bucket.append(name)
            size += p.numel()
            if size >= BUCKET:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


class OwnedOptimiser(CombinedOptimiser):
    """The optimiser of the owned parameters; its state has the numbers that one process gives."""

    def __init__(
        self, *members: torch.optim.Optimizer, units: list[list[nn.Parameter]] | None
    ) -> None:
        """``units`` move one by one; None moves all of them at once."""
        super().__init__(*members)
        self.units = units

    def move(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """One step of the owned parameters by their whole gradients."""
        with samples_of_all():
            for unit in [list(gradients)] if self.units is None else self.units:
                for p in unit:
                    p.grad = gradients.get(p)
                with _state_of_unit(self, unit):
                    self.step()
                for p in unit:
                    p.grad = None
        self.zero_grad()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the owned parameters from that of all."""
        own = {}
        for n, member in enumerate(self.members):
            saved = dict(state[str(n)])
            indices = [index for group in saved["param_groups"] for index in group["params"]]
            parameters = [p for group in member.param_groups for p in group["params"]]
            here = {i for i, p in zip(indices, parameters, strict=True) if not p.is_meta}
            values = _with_steps(saved["state"]) if isinstance(member, ScoreDescent) else None
            saved["state"] = {
                i: value for i, value in (values or saved["state"]).items() if i in here
            }
            own[str(n)] = saved
        super().load_state_dict(own)


def _with_steps(state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The state of ScoreDescent with its count of steps in every pair.

    In one process the first pair of a stack of layers counts for all of them, and that pair may
    have another owner.
    """
    taken = [values["step"] for values in state.values() if "step" in values]
    return {
        index: {"step": max(taken), **values}
        if taken and "query_momentum" in values
        else {**values}
        for index, values in state.items()
    }


@contextmanager
def _state_of_unit(optimiser: CombinedOptimiser, unit: Iterable[Tensor]) -> Iterator[None]:
    """Context manager: ScoreDescent uses the state of one unit, whose steps it counts."""
    parameters, hidden = set(unit), []
    for member in optimiser.members:
        if isinstance(member, ScoreDescent):
            others = {p: member.state.pop(p) for p in list(member.state) if p not in parameters}
            hidden.append((member, others))
    try:
        yield
    finally:
        for member, others in hidden:
            member.state.update(others)


class SampleShape(NamedTuple):
    """Which sequences of a step are sampled."""

    stride: int
    """Every how many cells."""
    sequences: int
    """Of each such cell."""
    positions: int

    @classmethod
    def of(cls, cells: int, rows: int, positions: int, tokens: int) -> "SampleShape":
        """For ``cells`` of ``rows`` sequences, ``tokens`` tokens in all.

        >>> SampleShape.of(cells=8, rows=4, positions=128, tokens=2048)
        SampleShape(stride=1, sequences=2, positions=128)
        >>> SampleShape.of(cells=8, rows=4, positions=1024, tokens=2048)
        SampleShape(stride=4, sequences=1, positions=1024)
        """
        T, stride = min(positions, tokens), 1
        while -(-cells // stride) * T > tokens and stride < cells:
            stride *= 2
        return cls(stride, min(rows, max(1, tokens // (-(-cells // stride) * T))), T)


class Samples:
    """Samples of the inputs of layers, taken on every rank and sent to the owners."""

    def __init__(self, owners: Owners, optimiser: CombinedOptimiser) -> None:
        self.owners, self.world = owners, owners.world
        self.readers: list[_CellProbe | _CellTokens] = []
        modules = dict(owners.model.named_modules())
        names = {id(p): name for name, p in owners.meta.named_parameters()}
        for group in _probed(optimiser):
            for pair, probe in group.probes.items():
                probe.remove()
                rank = owners.owner[names[id(pair.query.weight)]]
                mine = _CellProbe(pair, modules[pair.name], probe.tokens, self.world, rank)
                group.probes[pair] = mine
                self.readers.append(mine)
        of_meta = {module: name for name, module in owners.meta.named_modules()}
        like = next(owners.model.parameters())
        for outputs in _limited_outputs(optimiser):
            for layer, sample in outputs.samples.items():
                sample.handle.remove()
                rank = owners.owner[names[id(layer.parts["weight"].whole)]]
                tokens = _CellTokens(layer, modules[of_meta[layer.module]], like, rank)
                outputs.samples[layer] = tokens
                self.readers.append(tokens)

    def begin(self, cells: int, rows: int, positions: int, group: int) -> None:
        """Before the first pass of a step; ``group`` ranks share every sequence."""
        for reader in self.readers:
            reader.begin(cells, rows, positions, group)

    @contextmanager
    def of_part(self, part: int | None) -> Iterator[None]:
        """Around the two passes of a part of a cell; None for passes that do not count.

        Blocks that are recomputed in the backward pass are sampled again: a compiled block then
        runs the graph of its forward pass, whose bits it is to have. ``keep`` has been called.
        """
        for reader in self.readers:
            reader.sampled = part is not None and part in reader.parts
        yield
        for reader in self.readers:
            reader.sampled = False

    def keep(self, part: int) -> None:
        """Between the two passes: the samples of a part, where it has any."""
        for reader in self.readers:
            if reader.sampled:
                reader.keep(part)

    def send(self) -> None:
        """After the last pass of a step: every owner gets the samples of its layers."""
        W, rank = self.world.size, self.world.rank
        by_owner = [[x for x in self.readers if x.owner == r] for r in range(W)]
        to = [
            [x for reader in row for part in reader.parts_of(rank, W) for x in reader.taken[part]]
            for row in by_owner
        ]
        own = by_owner[rank]
        expected = [
            [s for reader in own for part in reader.parts_of(r, W) for s in reader.shapes(part)]
            for r in range(W)
        ]
        received = [iter(row) for row in self.world.exchange(to, expected)]
        for reader in own:
            whole: dict[int, list[Tensor]] = {}
            for r in range(W):
                for part in reader.parts_of(r, W):
                    whole[part] = [next(received[r]) for _ in reader.shapes(part)]
            reader.join([whole[part] for part in sorted(whole)])
        for reader in self.readers:
            reader.taken.clear()


class _CellProbe(LayerReader):
    """The samples of one attention layer: of its passes here, and, for its owner, of a whole step.

    Where C ranks share a sequence, rank k samples those of its positions that are below T, and the
    owner puts them in order. Rotary angles that differ between sequences or ranks come with them,
    and so do the numbers of documents that share a row.

    As in optim/score/probe.py the hook, which may be part of a compiled graph, does no more than
    copy into memory that is there.
    """

    def __init__(
        self, pair: QueryKeyPair, module: nn.Module, tokens: int, world: World, owner: int
    ) -> None:
        super().__init__(pair, tokens)
        self.owner, self.rank = owner, world.rank
        self.parts: Sequence[int] = ()
        """Those that are sampled, of all ranks."""
        self.sampled = False
        """Whether the pass under way is one of them."""
        weight = next(module.parameters())
        self.dtype = probe_dtype(weight)
        self.buffer = torch.empty(0, 0, self.width, dtype=self.dtype, device=weight.device)
        self.taken: dict[int, list[Tensor]] = {}
        """The samples of the parts that this rank reads."""
        self.sample: LayerInput | None = None
        self.angles: Any = None
        self.segments: Tensor | None = None
        self.handles = [module.register_forward_pre_hook(self, with_kwargs=True)]

    def begin(self, cells: int, rows: int, positions: int, group: int) -> None:
        """Before the first pass of a step: what is sampled, and memory for one part."""
        self.shape, self.group = SampleShape.of(cells, rows, positions, self.tokens), group
        stride, _, T = self.shape
        self.parts = [p for p in range(cells * group) if p // group % stride == 0]
        places = (positions_of(k, group, positions) for k in range(group))
        self.places = [at[at < T] for at in places]
        size = self.shape.sequences, len(self.places[self.rank % group])
        if self.buffer.shape[:2] != size:
            self.buffer = self.buffer.new_empty(*size, self.width)
        self.taken.clear()

    def parts_of(self, rank: int, ranks: int) -> list[int]:
        """The sampled parts that a rank reads."""
        return [part for part in self.parts if part % ranks == rank]

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerArguments | None:
        contexts = (getattr(value, "segments", None) for value in (*args, *kwargs.values()))
        self.segments = next((x for x in contexts if x is not None), None)
        return super()._read(args, kwargs)

    def _store(self, x: Tensor, angles: Any, mask: Any) -> None:
        del mask  # of packed rows, which ``join`` makes of their segments
        self.angles = angles
        if self.sampled:
            n, T, _ = self.buffer.shape
            self.buffer.copy_(x[:n, :T].detach())

    def keep(self, part: int) -> None:
        """After the pass of a part: what its owner gets of it."""
        n, T = self.buffer.shape[:2]
        self.taken[part] = [self.buffer.clone()]
        if self._has_own_angles:
            self.taken[part] += [x[:n, 0, :T].clone() for x in self.angles]
        if self.segments is not None:
            at = self.places[part % self.group].to(self.segments.device)
            self.taken[part].append(self.segments[:n, at])

    @property
    def _has_own_angles(self) -> bool:
        """Whether each sequence has its own angles instead of one table for all."""
        return self.angles is not None and self.angles.cos.ndim == 4

    def shapes(self, part: int) -> list[Shape]:
        """Of the tensors of a part."""
        n, T = self.shape.sequences, len(self.places[part % self.group])
        shapes = [Shape((n, T, self.width), self.dtype)]
        if self._has_own_angles:
            shapes += [Shape((n, T, x.shape[-1]), x.dtype) for x in self.angles]
        if self.segments is not None:
            shapes.append(Shape((n, T), self.segments.dtype))
        return shapes

    def join(self, parts: list[list[Tensor]]) -> None:
        """The sample of a step from those of its parts, in order."""
        C = self.group
        cells = [parts[first : first + C] for first in range(0, len(parts), C)]
        whole = [
            torch.cat([torch.cat([part[n] for part in cell], dim=1) for cell in cells])
            for n in range(len(parts[0]))
        ]
        if C > 1:
            order = torch.cat(self.places).argsort().to(self.buffer.device)
            whole = [values[:, order] for values in whole]
        x, mask = whole[0], None
        angles = crop_angles(self.angles, len(x), self.shape.positions)
        if self._has_own_angles:
            cos, sin = (values.unsqueeze(1) for values in whole[1:3])
            angles = self.angles._replace(cos=cos, sin=sin)
        if self.segments is not None:
            mask = whole[-1].unsqueeze(1) == whole[-1].unsqueeze(2)
        self.sample = LayerInput(x, angles, mask)

    def take(self) -> LayerInput | None:
        """The sample of the step, once."""
        sample, self.sample = self.sample, None
        return sample


class _CellTokens(TokenSample):
    """Tokens of the input of one layer, an equal share of every part of a step.

    A module that no pass calls has none on any rank.
    """

    def __init__(self, layer: MeasuredLayer, module: nn.Module, like: Tensor, owner: int) -> None:
        """``like`` has values on every rank, whereas the weight of ``layer`` may be elsewhere."""
        super().__init__(layer, module)
        dtype = probe_dtype(like) if self.width else torch.long
        self.buffer = torch.empty(self.buffer.shape, dtype=dtype, device=like.device)
        self.owner, self.sampled = owner, False
        self.parts: Sequence[int] = ()
        """Those that are sampled, of all ranks."""
        self.taken: dict[int, list[Tensor]] = {}
        self.sample: Tensor | None = None

    def begin(self, cells: int, rows: int, positions: int, group: int) -> None:
        """Before the first pass of a step."""
        tokens, count = rows * positions // group, cells * group
        stride, self.tokens, _ = SampleShape.of(count, tokens, 1, TOKENS)
        self.parts, self.rows = range(0, count, stride), 0
        self.taken.clear()

    def parts_of(self, rank: int, ranks: int) -> list[int]:
        """The sampled parts that a rank reads."""
        return [part for part in self.parts if part % ranks == rank] if self.rows else []

    def keep(self, part: int) -> None:
        """After the pass of a part: what its owner gets of it."""
        self.taken[part] = [self.buffer[: self.rows].clone()]

    def shapes(self, part: int) -> list[Shape]:
        """Of the tensors of a part, which all have as many tokens."""
        del part
        return [Shape((self.rows, *self.buffer.shape[1:]), self.buffer.dtype)]

    def join(self, parts: list[list[Tensor]]) -> None:
        """The sample of a step from those of its parts, in order."""
        self.sample = torch.cat([x for (x,) in parts]) if parts else None

    def take(self) -> Tensor | None:
        """(n, M), or ids (n,), once."""
        sample, self.sample = self.sample, None
        return sample


def _probed(optimiser: CombinedOptimiser) -> Iterator[PairProbes]:
    """The probes of the score optimisers among the members."""
    for member in optimiser.members:
        if isinstance(member, ScoreDescent):
            yield from member.pair_probes
        elif isinstance(member, ScoreTrust):
            yield member.pair_probes


def _limited_outputs(optimiser: CombinedOptimiser) -> Iterator[OutputProbes]:
    """The limits on outputs of layers among the members."""
    for member in optimiser.members:
        if isinstance(member, ScoreTrust) and member.outputs is not None:
            yield member.outputs


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name; every rank has the others whole."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _set_parameter(model: nn.Module, name: str, p: nn.Parameter) -> nn.Parameter:
    """Replace a parameter of a model by its dotted name."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, p)
    return p
