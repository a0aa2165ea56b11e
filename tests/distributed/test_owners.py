"""fenchel/distributed/owners.py: whole tensors at their owners, and back."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fenchel.distributed.owners import Owners, SampleShape, deal, rows_of, units_of
from fenchel.distributed.processes import ALONE, World
from fenchel.model import ModelConfig, Transformer
from fenchel.model.transformer import meta_model
from fenchel.optim import OptimConfig, build_optimiser

SIZES = st.lists(st.integers(0, 1000), max_size=40)
RANKS = st.integers(1, 9)


@given(SIZES, RANKS)
def test_units_are_dealt_evenly(sizes: list[int], ranks: int) -> None:
    owner = deal(sizes, ranks)
    load = [sum(s for s, o in zip(sizes, owner, strict=True) if o == r) for r in range(ranks)]
    assert sum(load) == sum(sizes)
    assert max(load, default=0) - min(load, default=0) <= max(sizes, default=0)
    assert owner == deal(sizes, ranks)


@given(st.integers(0, 50), RANKS)
def test_rows_are_those_of_torch_chunk(rows: int, ranks: int) -> None:
    x = torch.arange(rows)
    pieces = [x[rows_of(rows, rank, ranks)] for rank in range(ranks)]
    assert torch.equal(torch.cat(pieces), x)
    for piece, chunk in zip(pieces, x.chunk(ranks) if rows else (), strict=False):
        assert torch.equal(piece, chunk)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 5000), st.integers(1, 4096))
def test_a_sample_has_its_tokens_at_most_and_a_sequence_at_least(
    cells: int, rows: int, positions: int, tokens: int
) -> None:
    stride, sequences, T = SampleShape.of(cells, rows, positions, tokens)
    read = len(range(0, cells, stride))
    assert 1 <= sequences <= rows
    assert 1 <= T <= positions
    assert read * sequences * T <= tokens or (read, sequences) == (1, 1)


def tiny(**settings: object) -> ModelConfig:
    return ModelConfig(vocabulary=13, width=16, layers=2, heads=2, context=8, **settings)


def test_a_pair_moves_with_its_biases_and_gains() -> None:
    config = tiny(qk_norm=True, bias=True)
    model = meta_model(config)
    units = units_of(model, OptimConfig(optimiser="trust"))
    assert sorted(name for unit in units for name in unit) == sorted(
        name for name, _ in model.named_parameters()
    )
    joint = [unit for unit in units if len(unit) > 1]
    assert [{name.rpartition("attention.")[2] for name in unit} for unit in joint] == [
        {"qkv.weight", "qkv.bias", "q_norm.weight", "k_norm.weight"}
    ] * 2
    assert all(len(unit) == 1 for unit in units_of(model, OptimConfig()))


def test_a_layer_whose_output_is_limited_moves_with_its_bias() -> None:
    """Tied weights are one parameter; the values of a fused weight move with its pair."""
    model = meta_model(tiny(bias=True, norm="layer", qk_norm=True))
    optim = OptimConfig(optimiser="trust", output_change=0.1)
    of = {name: set(unit) for unit in units_of(model, optim) for name in unit}
    attention, mlp = "blocks.0.attention", "blocks.1.mlp"
    assert of["norm.weight"] == {"norm.weight", "norm.bias"}
    assert of[f"{mlp}.down.weight"] == {f"{mlp}.down.weight", f"{mlp}.down.bias"}
    assert of["embed.weight"] == {"embed.weight"}
    norms = {f"{attention}.{k}_norm.{part}" for k in "qk" for part in ("weight", "bias")}
    assert (
        of[f"{attention}.qkv.bias"]
        == {f"{attention}.qkv.{part}" for part in ("weight", "bias")} | norms
    )


def test_one_process_owns_the_memory_of_its_model() -> None:
    model = Transformer(tiny())
    owners = Owners(model, meta_model(tiny()), OptimConfig(), ALONE, exact=True)
    for name, p in model.named_parameters():
        assert owners.owned[name].data_ptr() == p.data_ptr()


def test_buffers_without_a_rule_are_refused() -> None:
    model, meta = Transformer(tiny()), meta_model(tiny())
    for one in (model, meta):
        one.norm.register_buffer("count", torch.zeros(1))
    with pytest.raises(ValueError, match=r"a rule for .*, and the model also has norm\.count"):
        Owners(model, meta, OptimConfig(), ALONE, exact=True)


@pytest.mark.parametrize(("processes", "parts"), [(2, None), (3, None), (2, 2), (3, 3), (4, 2)])
def test_whole_tensors_reach_their_owners_and_every_rank(launch, processes, parts) -> None:
    """Uneven rows, fewer rows than ranks, a vector: each entry arrives where it belongs."""

    def work(world: World) -> list[bool]:
        from fenchel.distributed.cells import Sharding

        config, D = tiny(), parts or 1
        model = Transformer(config, generator=torch.Generator().manual_seed(0))
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        shard = Sharding(world, gather_dtype="float32", position=None, parts=D) if parts else None
        owners = Owners(model, meta_model(config), OptimConfig(), world, exact=True, shard=shard)
        replica = world.rank // D  # whose tensors are larger by its number
        share = {n: owners._local(n) + replica for n in start}
        received = owners.to_owners(share, world.size // D)
        right = [
            torch.equal(x, start[n] + replica) and n in owners.owned
            for n, row in received.items()
            for replica, x in enumerate(row)
        ]
        with torch.no_grad():
            for n, p in owners.owned.items():
                p.copy_(start[n] + 1.0)
        owners.spread()
        for n, x in start.items():
            rows = rows_of(len(x), world.rank % D, D)
            right.append(torch.equal(owners._local(n), x[rows] + 1.0))
        owners.load_state_dict(start)
        back = owners.to_owners({n: owners._local(n) for n in start}, 1)
        right += [torch.equal(x, start[n]) for n, (x,) in back.items()]
        right += [torch.equal(p.detach(), start[n]) for n, p in owners.owned.items()]
        return right

    results = launch(processes, work)
    assert all(right for rank in results for right in rank)
    assert all(len(rank) > 10 for rank in results)


@pytest.mark.parametrize("sharded", [False, True])
def test_score_descent_trains_the_values_of_a_fused_weight(launch, sharded) -> None:
    """Rows of queries, keys and values of every layer move, by two processes."""

    def work(world: World) -> dict[str, list[bool]]:
        from fenchel.data import Batches
        from fenchel.distributed.cells import CellStepper, Pass, Sharding
        from fenchel.optim import constant
        from fenchel.train import TrainConfig

        config, position = tiny(), Pass()
        model = Transformer(config, generator=torch.Generator().manual_seed(0))
        at = {"position": position, "parts": world.size}
        shard = Sharding(world, gather_dtype="float32", **at) if sharded else None
        optim = OptimConfig(optimiser="score")
        owners = Owners(model, meta_model(config), optim, world, steps=3, exact=True, shard=shard)
        before = {n: p.detach().clone() for n, p in owners.owned.items()}
        batches = Batches(np.arange(100) % 13, batch=4, context=8, seed=0)
        train = TrainConfig(batch=4, cells=2, steps=3)
        stepper = CellStepper(owners, batches, constant(), config=train, seed=0, position=position)
        for step in range(3):
            stepper(step)
        moved = {}
        for name, p in owners.owned.items():
            if name.endswith("qkv.weight"):
                thirds = zip(p.detach().chunk(3), before[name].chunk(3), strict=True)
                moved[name] = [bool((x != y).all()) for x, y in thirds]
        return moved

    layers = {name: rows for rank in launch(2, work) for name, rows in rank.items()}
    assert layers == {f"blocks.{n}.attention.qkv.weight": [True] * 3 for n in range(2)}


def test_the_optimiser_moves_what_is_owned_and_nothing_else() -> None:
    """On rank 1 of 2, without an exchange: state exists for owned parameters only."""
    config = tiny()
    world = World(rank=1, size=2)
    owners = Owners(Transformer(config), meta_model(config), OptimConfig(), world, exact=False)
    assert 0 < len(owners.owned) < len(owners.parameters)
    owners.optimiser.move({p: torch.ones_like(p) for p in owners.owned.values()})
    stated = {p for member in owners.optimiser.members for p in member.state}
    assert stated == set(owners.owned.values())
    assert all(isinstance(p, nn.Parameter) and not p.is_meta for p in stated)


def test_every_owner_gets_the_steps_that_one_pair_has_counted() -> None:
    """In one process the first layer of a stack counts for all; the last may have another owner."""
    config = tiny()
    model = Transformer(config)
    optim = OptimConfig(optimiser="score", score_rate=0.1)
    alone = build_optimiser(model, optim)
    for _ in range(3):
        model(torch.arange(8)[None]).logsumexp(-1).sum().backward()
        alone.step()
        alone.zero_grad()
    saved = alone.state_dict()
    assert sum("step" in values for values in saved["0"]["state"].values()) == 1
    counted = []
    for rank in range(2):
        owners = Owners(model, meta_model(config), optim, World(rank=rank, size=2), exact=True)
        owners.optimiser.load_state_dict(saved)
        counted += [values["step"] for values in owners.optimiser.members[0].state.values()]
    assert counted == [3.0, 3.0]
