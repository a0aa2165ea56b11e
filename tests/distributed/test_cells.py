"""fenchel/distributed/cells.py: the same step, and the same bits, for any number of processes."""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from fenchel.checkpoints.run_checkpoint import flatten
from fenchel.data import Batches
from fenchel.distributed.cells import (
    CellStepper,
    CellSum,
    Pass,
    Sharding,
    cell_count,
    parts_of,
    require_supported,
)
from fenchel.distributed.owners import Owners
from fenchel.distributed.processes import ALONE, World
from fenchel.model import ModelConfig, Transformer
from fenchel.model.transformer import meta_model
from fenchel.optim import OptimConfig, build_optimiser, constant
from fenchel.train import Stepper, TrainConfig
from fenchel.train.loss_scale import LossScale

STEPS, BATCH, CELLS, VOCABULARY = 10, 8, 4, 67


class Case(NamedTuple):
    """Settings of a run."""

    optimiser: str
    model: dict[str, Any]
    train: Mapping[str, Any] = {}
    optim: Mapping[str, Any] = {}
    steps: int = STEPS


CASES = {
    "adamw, dropout": Case("adamw", {"dropout": 0.1}),
    "muon, entmax, untied": Case("muon", {"choice": "entmax", "tied": False}),
    "score, dropout, grouped keys": Case("score", {"dropout": 0.1, "kv_heads": 1}),
    "trust, entmax, qk_norm": Case("trust", {"choice": "entmax", "qk_norm": True}),
    "muon, experts": Case("muon", {"experts": 3, "experts_per_token": 2}),
    "muon, QK-clip": Case("muon", {"bias": True, "dropout": 0.1}, {"qk_clip": 0.5}, steps=4),
    "adamw, entropy floor": Case(
        "adamw", {"choice": "entmax"}, {"entropy_floor": 1.5, "entropy_weight": 1.0}, steps=4
    ),
    "muon, entmax, sigma": Case("muon", {"choice": "entmax", "sigma_reparam": True}, steps=4),
    "trust, entmax, output change": Case(
        "trust",
        {"choice": "entmax", "bias": True, "norm": "layer"},
        optim={"output_change": 0.05},
        steps=4,
    ),
}


def model_of(settings: dict[str, Any]) -> tuple[Transformer, ModelConfig]:
    shape = {"vocabulary": VOCABULARY, "width": 16, "layers": 2, "heads": 2, "context": 8}
    config = ModelConfig(**{**shape, **settings})
    return Transformer(config, generator=torch.Generator().manual_seed(0)), config


def batches_of() -> Batches:
    ids = np.random.default_rng(0).integers(0, VOCABULARY, size=2000)
    return Batches(ids, batch=BATCH, context=8, seed=1)


def stepper_of(
    world: World,
    optimiser: str,
    settings: dict[str, Any],
    *,
    shard: str = "none",
    gather_dtype: str = "float32",
    rate: float = 1e-2,
    optim: Mapping[str, Any] = {},
    **train: Any,
) -> CellStepper:
    model, config = model_of(settings)
    position, train = Pass(), {"cells": CELLS, "precision": "float32", **train}
    exact = train["cells"] is not None
    at, cut = position if exact else None, None
    if shard != "none":
        parts = world.size if shard == "full" else world.local_size
        cut = Sharding(world, gather_dtype=gather_dtype, position=at, parts=parts)
    kind = OptimConfig(optimiser=optimiser, learning_rate=rate, **optim)
    owners = Owners(model, meta_model(config), kind, world, steps=STEPS, exact=exact, shard=cut)
    settings_of_loop = TrainConfig(batch=BATCH, steps=STEPS, **train)
    return CellStepper(
        owners, batches_of(), constant(), config=settings_of_loop, seed=3, position=position
    )


def digest(stepper: CellStepper) -> str:
    """SHA-256 of all weights and all tensors of the optimiser's state, by name."""
    owners = stepper.owners
    tensors, rest = flatten(owners.optimiser.state_dict())
    own = {**{f"weights {n}": x for n, x in owners.owned_tensors.items()}, **tensors}
    hashes = {n: hashlib.sha256(x.numpy().tobytes()).hexdigest() for n, x in own.items()}
    gathered = owners.world.gather({**hashes, **rest})
    together = {n: value for row in gathered for n, value in row.items()}
    assert len(together) == sum(map(len, gathered))  # every tensor has one owner
    return hashlib.sha256(json.dumps(together, sort_keys=True).encode()).hexdigest()


def run_cases(
    world: World, *, shard: str, only: str = "", recompute: str = "none"
) -> dict[str, tuple[Any, ...]]:
    results = {}
    for name, (optimiser, settings, train, optim, steps) in CASES.items():
        if only not in name:
            continue
        stepper = stepper_of(
            world, optimiser, settings, shard=shard, optim=optim, recompute=recompute, **train
        )
        taken = [stepper(step) for step in range(steps)]
        results[name] = digest(stepper), taken[-1].loss, [dict(one.metrics) for one in taken]
    return results


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[Any, ...]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run_cases(ALONE, shard="none")
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("processes", "shard", "only"),
    [
        (2, "none", ""),
        (4, "full", ""),
        (4, "none", "untied"),
        (3, "none", "score"),
        (3, "full", "muon"),
        (4, "node", "entmax"),
    ],
)
def test_same_bits_for_any_number_of_processes(launch, alone, processes, shard, only) -> None:
    """Under "node", pairs of processes are machines."""
    results = launch(processes, lambda world: run_cases(world, shard=shard, only=only), per_node=2)
    for result in results:
        assert result
        assert {name: tuple(row) for name, row in result.items()} == {
            name: row for name, row in alone.items() if only in name
        }


ACTS = {
    "muon, QK-clip": "clipped_heads",
    "adamw, entropy floor": "entropy_penalty",
}
"""Case with a switch to the metric that says what it did."""


@pytest.mark.parametrize("name", ACTS)
def test_a_switch_acts_in_cells_as_in_the_ordinary_step(alone, name: str) -> None:
    """The reference is train/step.py with as many micro-batches: equal metrics, equal weights.

    The bits of several processes are those of ``alone``. Without the switch they are others.
    """
    optimiser, settings, train, _, steps = CASES[name]
    model, _ = model_of(settings)
    ordinary = Stepper(
        model,
        batches_of(),
        build_optimiser(model, OptimConfig(optimiser="sgd", learning_rate=0.1), steps=STEPS),
        constant(),
        config=TrainConfig(batch=BATCH, accumulate=CELLS, precision="float32", **train),
        seed=3,
    )
    cells = stepper_of(ALONE, "sgd", settings, rate=0.1, **train)
    acted = 0.0
    for step in range(3):
        expected, found = ordinary(step), cells(step)
        assert found.metrics == pytest.approx(dict(expected.metrics), rel=1e-4)
        acted += found.metrics[ACTS[name]]
    assert acted > 0.0
    for key, p in model.named_parameters():
        assert torch.allclose(cells.owners.owned[key], p, rtol=0.0, atol=2e-5), key
    without = stepper_of(ALONE, optimiser, settings)
    for step in range(steps):
        without(step)
    assert digest(without) != alone[name][0]


def test_singular_vectors_take_one_power_iteration_per_step() -> None:
    """However many passes a step has: the reference is train/step.py with a single one."""
    model, _ = model_of({"sigma_reparam": True})
    ordinary = Stepper(
        model,
        batches_of(),
        build_optimiser(model, OptimConfig(optimiser="sgd", learning_rate=0.5), steps=STEPS),
        constant(),
        config=TrainConfig(batch=BATCH, precision="float32"),
        seed=3,
    )
    cells = stepper_of(ALONE, "sgd", {"sigma_reparam": True}, rate=0.5)
    before = {name: x.clone() for name, x in model.named_buffers()}
    for step in range(3):
        ordinary(step)
        cells(step)
    found = cells.owners.owned_tensors
    assert found.keys() == model.state_dict().keys()
    for name, x in model.state_dict().items():
        assert torch.allclose(found[name], x, rtol=0.0, atol=2e-5), name
    assert max(float((x - before[name]).abs().max()) for name, x in model.named_buffers()) > 1e-3


def test_same_bits_where_some_ranks_have_no_sampled_cell(launch) -> None:
    """Of 4 cells the probes read the first and the third; all ranks own layers."""
    settings = {"layers": 5, "initial": "normal", "initial_std": 0.1}

    def work(world: World) -> list[str]:
        stepper = stepper_of(world, "score", settings)
        assert stepper.owners.samples is not None
        for reader in stepper.owners.samples.readers:
            reader.tokens = 16
        stepper(0)
        return [digest(stepper)]

    assert launch(4, work) == [work(ALONE)] * 4


def test_no_output_moves_by_more_than_its_limit(launch) -> None:
    """Outputs of all tokens of all cells, computed here from the weights before and after a step.

    The rates are far too high, so that every layer is limited.
    """
    tau, settings = 0.05, {"bias": True, "norm": "layer", "initial": "normal", "initial_std": 0.2}
    high = {"optim": {"output_change": tau, "matrix_learning_rate": 0.5}, "rate": 0.1}

    def work(world: World) -> list[dict[str, Any]]:
        found = []
        for shard in ("none", "full"):
            stepper = stepper_of(world, "trust", settings, shard=shard, **high)
            stepper(0)
            found.append({n: p.tolist() for n, p in stepper.owners.owned.items()})
        return found

    model, _ = model_of(settings)
    inputs: dict[str, torch.Tensor] = {}
    normed: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, x, name=name: inputs.update({name: x[0]}))
        elif name.endswith("norm"):
            module.register_forward_hook(lambda _m, _x, y, name=name: normed.update({name: y}))
    ids = batches_of().at(0).inputs
    with torch.no_grad():
        hidden = model(ids, return_hidden=True)
    before = {name: p.detach() for name, p in model.named_parameters()}

    def shares(after: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        def share(change: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
            return change.norm() / output.norm()

        moved = {name: after[name] - W for name, W in before.items()}
        found = {}
        for name, x in inputs.items():
            rows = slice(2 * 16 if name.endswith("qkv") else 0, None)  # the values alone
            found[name] = share(
                *(
                    x @ W[f"{name}.weight"][rows].T + W[f"{name}.bias"][rows]
                    for W in (moved, before)
                )
            )
        for name, y in normed.items():
            n = (y - before[f"{name}.bias"]) / before[f"{name}.weight"]
            found[name] = share(n * moved[f"{name}.weight"] + moved[f"{name}.bias"], y)
        table = moved["embed.weight"], before["embed.weight"]
        found["embed"] = max(share(*(W[ids] for W in table)), share(*(hidden @ W.T for W in table)))
        return found

    for ranks in zip(*launch(2, work), strict=True):
        after = {name: torch.tensor(x) for rank in ranks for name, x in rank.items()}
        found = shares(after)
        assert len(found) == len(inputs) + 5 + 1
        for name, one in found.items():
            assert float(one) == pytest.approx(tau, rel=1e-3), name


@pytest.mark.parametrize(
    ("processes", "shard", "only"), [(1, "none", ""), (2, "full", ""), (2, "none", "score")]
)
def test_same_bits_where_blocks_are_recomputed(launch, alone, processes, shard, only) -> None:
    """FSDP2 gathers the weights of a block for its backward pass, of which that is a part."""
    given = {"shard": shard, "only": only, "recompute": "block"}
    for result in launch(processes, lambda world: run_cases(world, **given)):
        assert result
        assert {name: tuple(row) for name, row in result.items()} == {
            name: row for name, row in alone.items() if only in name
        }


def test_weights_gathered_in_bfloat16_are_there_for_both_passes(launch) -> None:
    def work(world: World) -> list[str]:
        digests = []
        for recompute in ("none", "block"):
            given = {"gather_dtype": "bfloat16", "precision": "bfloat16", "recompute": recompute}
            stepper = stepper_of(world, "adamw", {"dropout": 0.1}, shard="full", **given)
            stepper(0)
            stepper(1)
            digests.append(digest(stepper))
        return digests

    (kept, again), _ = launch(2, work)
    assert again == kept


def test_same_bits_where_a_machine_has_no_cell_in_the_last_pass(launch) -> None:
    """Three machines of two processes; of 8 cells, the second pass has those of the first alone."""

    def work(world: World) -> str:
        stepper = stepper_of(world, "muon", {}, shard="node", cells=8)
        stepper(0)
        stepper(1)
        return digest(stepper)

    alone = stepper_of(ALONE, "muon", {}, cells=8)
    alone(0)
    alone(1)
    assert launch(6, work, per_node=2) == [digest(alone)] * 6


def test_replicas_are_equal_on_every_rank(launch) -> None:
    def work(world: World) -> list[str]:
        stepper = stepper_of(world, "muon", {})
        stepper(0)
        weights = stepper.model.state_dict().values()
        return [hashlib.sha256(x.numpy().tobytes()).hexdigest() for x in weights]

    first, second = launch(2, work)
    assert first == second


@pytest.mark.parametrize("optimiser", ["muon", "score", "trust", "adamw"])
def test_one_process_in_cells_is_the_ordinary_step_up_to_rounding(optimiser: str) -> None:
    """The reference is train/step.py with as many micro-batches, dropout included.

    Muon may iterate in bfloat16, which rounds two sums in two orders to other digits.
    """
    close = 2e-5 if optimiser == "adamw" else 1e-3
    model, _ = model_of({"dropout": 0.1})
    ordinary = Stepper(
        model,
        batches_of(),
        build_optimiser(model, OptimConfig(optimiser=optimiser), steps=STEPS),
        constant(),
        config=TrainConfig(batch=BATCH, accumulate=CELLS, steps=STEPS, precision="float32"),
        seed=3,
    )
    cells = stepper_of(ALONE, optimiser, {"dropout": 0.1})
    for step in range(5):
        expected, found = ordinary(step), cells(step)
        assert found.loss == pytest.approx(expected.loss, abs=close)
        assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=20 * close)


@pytest.mark.parametrize("shard", ["none", "full", "node"])
def test_ordinary_sums_agree_with_one_process(launch, shard: str) -> None:
    """Without cells: losses within 1e-5 over 20 steps."""
    model, _ = model_of({})
    ordinary = Stepper(
        model,
        batches_of(),
        build_optimiser(model, OptimConfig(optimiser="adamw", learning_rate=2e-3), steps=STEPS),
        constant(),
        config=TrainConfig(batch=BATCH, accumulate=2, steps=STEPS, precision="float32"),
        seed=3,
    )
    expected = [ordinary(step).loss for step in range(20)]

    def work(world: World) -> list[float]:
        given = {"cells": None, "accumulate": 4, "rate": 2e-3}
        stepper = stepper_of(world, "adamw", {}, shard=shard, **given)
        return [stepper(step).loss for step in range(20)]

    processes = 4 if shard == "node" else 2
    for found in launch(processes, work, per_node=2):
        assert found == pytest.approx(expected, abs=1e-5)


def test_gathers_in_bfloat16_stay_close_and_move_float32_weights(launch) -> None:
    """Scalars among the weights, and buffers, which stay in float32."""
    sigma = {"sigma_reparam": True}

    def work(world: World) -> list[Any]:
        stepper = stepper_of(world, "adamw", sigma, shard="full", gather_dtype="bfloat16")
        losses = [stepper(step).loss for step in range(5)]
        return [losses, [str(p.dtype) for p in stepper.owners.owned.values()]]

    exact = stepper_of(ALONE, "adamw", sigma)
    expected = [exact(step).loss for step in range(5)]
    for losses, dtypes in launch(2, work):
        assert losses == pytest.approx(expected, abs=0.02)
        assert losses != pytest.approx(expected, abs=1e-6)  # they are bfloat16 indeed
        assert set(dtypes) == {"torch.float32"}


def test_compiled_blocks_take_the_same_steps(launch, monkeypatch) -> None:
    """The hooks of "trust" in a graph, weights whole or divided: the same bits.

    "aot_eager" has the graphs and hooks of the compiler without a minute of C++; what cannot be one
    graph raises.
    """
    compiler, compiled = torch.compile, []
    settings, optim = {"dropout": 0.1, "layers": 1}, {"output_change": 0.1}

    def whole_graph(function: Any) -> Any:
        fast = compiler(function, backend="aot_eager", fullgraph=True)
        return lambda *given: compiled.append(function) or fast(*given)

    def work(world: World, recompute: str = "none") -> list[Any]:
        monkeypatch.setattr(torch, "compile", whole_graph)
        counters["stats"].clear()
        given = {"shard": "full" if world.size > 1 else "none", "recompute": recompute}
        stepper = stepper_of(world, "trust", settings, optim=optim, compile=True, **given)
        losses = [stepper(step).loss for step in range(2)]
        calls, graphs = len(compiled), counters["stats"]["unique_graphs"]
        stepper.model(torch.zeros(1, 8, dtype=torch.int64))  # as an evaluation does
        return [losses, digest(stepper), graphs, calls, len(compiled) - calls]

    eager = stepper_of(ALONE, "trust", settings, optim=optim)
    expected = [eager(step).loss for step in range(2)]
    rows = [*launch(1, work), *launch(2, work), *launch(2, lambda world: work(world, "block"))]
    for losses, *found, calls, others in rows:
        assert losses == pytest.approx(expected, abs=1e-4)
        assert found == rows[0][1:3]  # blocks that are recomputed need no other graph
        assert calls > 0
        assert others == 0


def test_float16_scales_the_loss_alike_on_all_ranks(launch) -> None:
    """Gradients overflow at first: the scale of all is halved until none does, no step is lost.

    Passes that are repeated are measured once.
    """
    switches = {"qk_clip": 0.5, "entropy_floor": 1.5}

    def run(world: World, shard: str) -> list[Any]:
        given = {**switches, "precision": "float16"}
        stepper = stepper_of(world, "adamw", {}, shard=shard, **given)
        assert stepper.scaling is not None
        stepper.scaling.scale = LossScale(2.0**28, 7)
        results = [stepper(step) for step in range(2)]
        scale = stepper.scaling.scale
        assert [r.metrics["loss_scale"] for r in results] == [scale.factor] * 2
        penalties = [r.metrics["entropy_penalty"] for r in results]
        assert 0.01 < penalties[0] < 0.1 * 1.5**2
        numbers = [[r.loss, r.gradient_norm, r.broken] for r in results]
        return [digest(stepper), *scale, numbers, penalties]

    expected, alone = stepper_of(ALONE, "adamw", {}, **switches)(0), run(ALONE, "none")
    assert launch(2, lambda world: [run(world, "none"), run(world, "full")]) == [[alone] * 2] * 2
    _, factor, age, [[loss, norm, broken], _], penalties = alone
    assert penalties[0] == pytest.approx(expected.metrics["entropy_penalty"], rel=1e-2)
    assert 1.0 < factor < 2.0**24
    assert age == 2
    assert broken is None
    assert loss == pytest.approx(expected.loss, rel=2e-3)
    assert norm == pytest.approx(expected.gradient_norm, rel=2e-2)


@pytest.mark.parametrize("shard", ["none", "full"])
def test_a_gradient_that_is_not_finite_is_skipped_by_all(launch, shard: str) -> None:
    """Rank 1 alone meets the nan, in the middle of its pass; no weight moves anywhere."""

    def work(world: World) -> list[Any]:
        stepper = stepper_of(world, "muon", {}, shard=shard)
        before = digest(stepper)
        block = stepper.model.blocks[1].mlp
        if world.rank == 1:
            handle = block.register_forward_hook(lambda *given: given[2] * math.nan)
        result = stepper(0)
        if world.rank == 1:
            handle.remove()
        return [result.broken, digest(stepper) == before, stepper(1).broken]

    sentence = "the output of blocks.1.mlp is the first that is not finite"
    assert launch(2, work) == [[sentence, True, None]] * 2


def test_the_norm_is_that_of_the_whole_gradient_and_is_clipped(launch) -> None:
    """The reference is autograd in one process on the whole batch."""
    model, _ = model_of({})
    batch = batches_of().at(0)
    loss = torch.nn.functional.cross_entropy(
        model(batch.inputs).flatten(0, 1), batch.targets.flatten()
    )
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))

    def work(world: World) -> list[float]:
        stepper = stepper_of(world, "adamw", {}, clip=0.01)
        seen: list[torch.Tensor] = []
        move = stepper.owners.optimiser.move

        def keep(gradients: dict[Any, torch.Tensor]) -> None:
            seen.extend(gradients.values())
            move(gradients)

        stepper.owners.optimiser.move = keep  # type: ignore[method-assign]
        result = stepper(0)
        return [result.gradient_norm, sum(float(g.double().square().sum()) for g in seen)]

    rows = launch(2, work)
    assert [row[0] for row in rows] == pytest.approx([norm] * 2, rel=1e-5)
    assert math.sqrt(sum(row[1] for row in rows)) == pytest.approx(0.01, rel=1e-3)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40))
def test_a_cell_sum_is_the_sum(terms: list[float]) -> None:
    total = CellSum()
    for x in terms:
        total.add(torch.tensor(x, dtype=torch.float64))
    assert float(total.result()) == pytest.approx(math.fsum(terms), abs=1e-6)


@given(st.integers(0, 5))
def test_a_cell_sum_is_the_complete_tree(depth: int) -> None:
    x = torch.randn(2**depth, 7, generator=torch.Generator().manual_seed(depth))
    total = CellSum()
    for row in x:
        total.add(row)
    tree = x
    while len(tree) > 1:
        tree = tree[::2] + tree[1::2]
    assert torch.equal(total.result(), tree[0])


def test_cells_have_room_for_every_process() -> None:
    assert cell_count(TrainConfig(batch=8, cells=4), ranks=3) == 4
    assert cell_count(TrainConfig(batch=8), ranks=4) == 4
    with pytest.raises(ValueError, match="cells=2 serves 2 processes at most, not 3"):
        cell_count(TrainConfig(batch=8, cells=2), ranks=3)
    with pytest.raises(ValueError, match="batch=8 does not split into 3 cells for 3 processes"):
        cell_count(TrainConfig(batch=8), ranks=3)


def test_nodes_whose_sums_are_no_subtrees_are_refused() -> None:
    config = TrainConfig(shard="node", cells=8, batch=8)
    require_supported(config, World(size=8, local_size=4), context=8)
    require_supported(config, World(size=3, local_size=3), context=8)
    with pytest.raises(ValueError, match="adds the cells of 3 processes per machine first"):
        require_supported(config, World(size=6, local_size=3), context=8)
    with pytest.raises(ValueError, match="as many processes on every machine"):
        require_supported(config, World(size=6, local_size=4), context=8)


def test_auto_divides_inside_a_machine_where_that_is_enough(monkeypatch) -> None:
    """A quarter of the ranks has room for a fourth of the weights; of 4 machines one suffices."""
    from fenchel.distributed import cells

    model, _ = model_of({})
    needs = 32 * sum(p.numel() for p in model.parameters())
    world = World(size=8, local_size=2)
    monkeypatch.setattr(World, "gather", lambda self, value: [value] * self.size)
    found = {}
    for share in (1.0, 0.5, 0.25):
        monkeypatch.setattr(cells, "memory_of", lambda _, s=share: int(needs * s) * 2)
        found[share] = [
            parts_of(model, TrainConfig(shard=name), world) for name in ("auto", "none", "node")
        ]
    assert found == {1.0: [1, 1, 2], 0.5: [2, 1, 2], 0.25: [8, 1, 2]}
