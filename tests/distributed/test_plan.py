"""fenchel/distributed/plan.py: the formulas, by hand, by autograd, by torch's own collectives."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fenchel.distributed.cells import Sharding
from fenchel.distributed.plan import (
    GIGA,
    USABLE,
    Bytes,
    Cluster,
    Forecast,
    ParallelLayout,
    Plan,
    Sizes,
    advice,
    plan,
    ring,
    saved_per_position,
    simulate,
    simulated_differs,
)
from fenchel.distributed.processes import World
from fenchel.model import ModelConfig, Transformer
from fenchel.model.flops import forward_flops
from fenchel.optim import OptimConfig, build_optimiser, clip_
from fenchel.optim.config import OPTIMISERS
from fenchel.torch_internals import simulated_ranks
from fenchel.train import TrainConfig, lm_head_loss

ALONE = Cluster(ranks=1)
SEVEN_B = ModelConfig(
    vocabulary=32000, width=4096, layers=32, heads=32, hidden=11008, context=4096, tied=False
)


def small(**settings: Any) -> ModelConfig:
    given = {"vocabulary": 96, "width": 64, "heads": 4, "layers": 2, "context": 64, **settings}
    return ModelConfig(**given)


def of(result: Plan, shard: str, context: int = 1, *, recompute: bool = False) -> Forecast:
    (found,) = (
        f for f in result.forecasts if f.layout == ParallelLayout(shard, context, recompute)
    )
    return found


# Memory

LONG = 576
"""Positions: more than those for which a CPU has its own bfloat16 attention (attention/sdpa.py)."""


def saved_bytes(
    config: ModelConfig,
    *,
    autocast: bool,
    dtype: torch.dtype,
    sequences: int,
    recompute: bool = False,
) -> int:
    """Bytes of the storages that autograd saves in a forward pass, parameters excepted."""
    model = Transformer(config).to(dtype)
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, Any] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage  # held, so that no address is used twice
        return x

    half = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), half:
        ids = torch.zeros(sequences, LONG, dtype=torch.int64)
        hidden = model(ids, return_hidden=True, recompute=recompute)
    assert hidden.requires_grad
    return sum(storage.nbytes() for storage in found.values())


def saved_by_layer(
    dtype: torch.dtype, *, autocast: bool, recompute: bool = False, **settings: Any
) -> int:
    """Of one sequence more and one layer more: neither tables nor casts of weights are in it."""

    def saved(layers: int, sequences: int) -> int:
        config = small(layers=layers, context=LONG, **settings)
        given = {"autocast": autocast, "dtype": dtype, "recompute": recompute}
        return saved_bytes(config, sequences=sequences, **given)

    return (saved(2, 2) - saved(1, 2)) - (saved(2, 1) - saved(1, 1))


@pytest.mark.parametrize("a", [4, 2], ids=["float32", "autocast"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mlp": "gelu"},
        {"kv_heads": 2},
        {"positions": "learned"},
        {"qk_norm": True},
        {"qk_norm": True, "qk_norm_width": "all", "norm_place": "after", "kv_heads": 2},
        {"norm_place": "both"},
        {"rotary_layers": (0,)},
        {"dropout": 0.1, "attention_dropout": 0.0},
        {"heads": 2, "hidden": 100},
        {"value_norm": True},
        {"per_layer_width": 8, "layer_scale": True},
        {"gate": "head", "kv_heads": 2},
        {"gate": "element", "gate_activation": "softplus", "head_size": 24},
    ],
    ids=str,
)
def test_what_autograd_saves_per_position_and_layer(settings: dict[str, Any], a: int) -> None:
    expected = saved_per_position(small(**settings), a)
    assert saved_by_layer(torch.float32, autocast=a == 2, **settings) == LONG * expected
    if a == 2:  # weights gathered in bfloat16; torch composes norms in more steps on a CPU
        gathered = saved_by_layer(torch.bfloat16, autocast=True, **settings)
        assert 0.96 <= gathered / (LONG * expected) < 1.25


def test_a_shared_expert_is_counted() -> None:
    """In float32, beside the experts, whose formula is from below."""
    settings = {"experts": 2, "shared_expert": 48, "shared_expert_gate": True}
    more = [saved_by_layer(torch.float32, autocast=False, **s) for s in (settings, {"experts": 2})]
    counted = [saved_per_position(small(**s), 4) for s in (settings, {"experts": 2})]
    assert more[0] - more[1] == LONG * (counted[0] - counted[1])


@pytest.mark.parametrize("a", [4, 2], ids=["float32", "autocast"])
@pytest.mark.parametrize(
    "settings", [{}, {"dropout": 0.1}, {"choice": "entmax"}, {"experts": 2}], ids=str
)
def test_a_block_that_is_recomputed_saves_its_input_alone(settings: dict[str, Any], a: int) -> None:
    """And, under autocast, no cast of a weight: the last line has one sequence."""
    given = {"autocast": a == 2, "recompute": True}
    assert saved_by_layer(torch.float32, **given, **settings) == LONG * 4 * 64
    one, two = (
        saved_bytes(
            small(layers=layers, context=LONG, **settings),
            **given,
            dtype=torch.float32,
            sequences=1,
        )
        for layers in (1, 2)
    )
    assert two - one == LONG * 4 * 64
    train = TrainConfig(batch=1, precision="float32" if a == 4 else "bfloat16")
    by_depth = [
        of(
            plan(small(layers=layers, context=LONG, **settings), train, OptimConfig(), ALONE),
            "none",
            recompute=True,
        )
        for layers in (1, 2)
    ]
    activations = [f.memory["activations"] for f in by_depth]
    assert activations[1] - activations[0] == LONG * 4 * 64
    assert by_depth[0].memory["casts"] == by_depth[1].memory["casts"]


def test_autocast_keeps_a_cast_of_every_matrix() -> None:
    by_layer = [
        saved_bytes(
            small(layers=layers, context=LONG, positions="learned"),
            autocast=True,
            dtype=torch.float32,
            sequences=1,
        )
        for layers in (1, 2)
    ]
    config = small(positions="learned")
    sizes = Sizes(config, OptimConfig())
    matrices = sum(prod(sizes.shapes[name]) for name in sizes.matrices)
    positions = LONG * saved_per_position(config, 2)
    assert by_layer[1] - by_layer[0] - positions == 2 * matrices // 2  # 2 layers, 2 bytes
    train = TrainConfig(batch=1, precision="bfloat16")
    assert of(plan(config, train, OptimConfig(), Cluster(ranks=1)), "none").memory["casts"] == (
        2 * matrices
    )


@pytest.mark.parametrize("gather_dtype", ["float32", "bfloat16"])
def test_fsdp2_frees_weights_gathered_in_bfloat16_and_not_the_casts_of_float32(
    gather_dtype: str,
) -> None:
    config = small(positions="learned", vocabulary=128)
    matrices = Sizes(config, OptimConfig()).matrices
    saved: dict[int, torch.Tensor] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.bfloat16:
            saved[id(x)] = x
        return x

    with simulated_ranks(2):
        shard = Sharding(World(size=2), gather_dtype=gather_dtype, position=None, parts=2)
        model = Transformer(config)
        shapes = sorted(p.numel() for n, p in model.named_parameters() if n in matrices)
        shard(model)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
        with hooks, torch.autocast("cpu", torch.bfloat16):
            hidden = model(torch.zeros(1, 8, dtype=torch.int64), return_hidden=True)
        assert hidden.requires_grad
        # After the forward pass: FSDP2 has freed the memory of what it gathered, not of casts.
        kept = [x.numel() for x in saved.values() if x.untyped_storage().nbytes()]
    casts = sorted(n for n in kept if n in shapes)
    assert casts == (shapes if gather_dtype == "float32" else [])


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_state_by_rule(optimiser: str) -> None:
    config = small(qk_norm=optimiser == "score")
    settings = OptimConfig(optimiser=optimiser)
    model = Transformer(config)
    moves = build_optimiser(model, settings, steps=10)
    for _ in range(2):
        model(torch.randint(96, (2, 16))).logsumexp(-1).sum().backward()
        moves.step()
        moves.zero_grad()
    members = [m for member in moves.members for m in (member, *getattr(member, "members", ()))]
    states = [state for member in members for state in member.state.values()]
    unique = {id(x): x for state in states for x in state.values() if torch.is_tensor(x)}
    held = sum(x.numel() * 4 for x in unique.values())
    assert Sizes(config, settings).owned(1).state == pytest.approx(held, rel=0.01)


class Live(TorchDispatchMode):
    """The largest number of bytes of tensors that were alive at once."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.known: set[int] = set()
        for x in known:
            self.see(x)

    def see(self, x: Any) -> None:
        if not torch.is_tensor(x) or x.is_sparse:
            return
        storage = x.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if size and key not in self.known:
            self.known.add(key)
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self.free, key, size)

    def free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.bytes -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (list, tuple)) else [result]:
            self.see(x)
        return result


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("batch", "width", "recompute"),
    [(16, 64, False), (16, 64, True), (1, 128, False)],
    ids=["positions", "positions, recomputed", "weights"],
)
def test_the_peak_of_one_process_is_the_predicted_one(
    optimiser: str, batch: int, width: int, recompute: bool
) -> None:
    config = small(width=width, layers=8 if recompute else 4, vocabulary=300)
    train = TrainConfig(batch=batch, precision="float32")
    optim = OptimConfig(optimiser=optimiser)
    one = plan(config, train, optim, Cluster(ranks=1, device="cpu"))
    predicted = of(one, "none", recompute=recompute).peak
    model = Transformer(config)
    moves = build_optimiser(model, optim)
    ids = torch.randint(300, (batch, config.context))
    with Live(*model.parameters()) as live:
        for _ in range(2):
            hidden = model(ids, return_hidden=True, recompute=recompute)
            lm_head_loss(hidden, model.lm_head_weight, ids).backward()
            del hidden
            clip_(model.parameters(), 1.0)
            moves.step()
            moves.zero_grad()
    assert 0.8 * live.peak < predicted < 1.3 * live.peak
    if recompute:  # a pass that keeps everything is told apart
        assert of(one, "none").peak > 1.5 * live.peak


def test_memory_of_a_small_model_by_hand() -> None:
    config = ModelConfig(
        vocabulary=10, width=8, layers=1, heads=2, hidden=16, context=4, mlp="gelu", tied=True
    )
    train = TrainConfig(batch=4, precision="float32")
    two = plan(config, train, OptimConfig(optimiser="adamw"), Cluster(ranks=2))
    # qkv 24 x 8, out 8 x 8, up 16 x 8, down 8 x 16, two norms of 8; embedding 10 x 8, norm 8.
    block, root = 192 + 64 + 128 + 128 + 16, 80 + 8
    assert two.parameters == block + root == 616
    none, full = of(two, "none"), of(two, "full")
    # Dealt to the owner with least: 192 + 80 + 3 x 8, and 128 + 128 + 64.
    owned = 320
    assert none.memory["weights"] == none.memory["gradients"] == 4 * 616
    assert none.memory["state"] == full.memory["state"] == 8 * owned
    assert full.memory["weights"] == 4 * 308 + 4 * owned
    assert full.memory["gradients"] == 4 * 308
    assert full.memory["gathered"] == 4 * (root + 2 * block) + 8 * block
    assert none.memory["casts"] == full.memory["casts"] == 0
    # 2 sequences of 4 positions; saved 2 x 8 inputs of norms and of products, qkv 24, rotated
    # 16, output 8, inside 2 x 16; 2 norms and 2 heads; then the end of the stream; gradients.
    saved = 4 * (16 + 16 + 24 + 16 + 8 + 32) + 8 + 8
    assert none.memory["activations"] == 8 * (saved + 64 + 3 * 4 * 16 + 64)
    assert none.memory["loss"] == 4 * (8 * 10) + 4 * 10 * 8 + 4 * 8 * 8
    assert full.peak == sum(
        full.memory[name]
        for name in ("weights", "state", "gradients", "gathered", "activations", "loss")
    )
    # Gathers of the block twice and of the root once, the gradient once; the half that is not here.
    assert full.exchanged["gather"] == Bytes(4 * (2 * block + root) / 2, 0.0)
    assert full.exchanged["reduce-scatter"] == Bytes(4 * 616 / 2, 0.0)
    assert full.exchanged["owners"] == Bytes(2 * 4 * owned / 2, 0.0)
    assert none.exchanged["owners"] == Bytes(2 * 4 * owned, 0.0)


def test_memory_falls_with_the_ranks_and_with_recomputation() -> None:
    config, train = small(width=128, layers=4, vocabulary=512), TrainConfig(batch=64)
    by_ranks = [plan(config, train, OptimConfig(), Cluster(ranks=n)) for n in (2, 4, 8, 16, 32, 64)]
    for fewer, more in pairwise(by_ranks):
        for name in ("weights", "gradients", "activations"):
            assert of(more, "full").memory[name] < of(fewer, "full").memory[name]
        assert of(more, "full").memory["state"] <= of(fewer, "full").memory["state"]
        assert of(more, "full").peak < of(fewer, "full").peak
    for one in by_ranks:
        for plain, again in zip(one.forecasts[::2], one.forecasts[1::2], strict=True):
            assert again.peak <= plain.peak
            assert again.memory["activations"] < plain.memory["activations"]
            assert again.compute > plain.compute


def test_replicated_weights_are_fullest_where_gradients_arrive_at_their_owner() -> None:
    train = TrainConfig(batch=64, precision="bfloat16")
    result = plan(SEVEN_B, train, OptimConfig(optimiser="adamw"), Cluster(ranks=64))
    none = of(result, "none", recompute=True)
    owned = 3 * 4096 * 11008  # the owner with most has three matrices of MLPs, 64 gradients of each
    assert none.memory["exchange"] == 4 * 64 * owned + 8 * (2**26 + 32000 * 4096)
    names = ("weights", "state", "gradients", "exchange")
    assert none.peak == sum(none.memory[name] for name in names)


def test_casts_are_kept_unless_weights_are_gathered_in_bfloat16() -> None:
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    for gather_dtype, casts in (("float32", 2 * matrices), ("bfloat16", 0)):
        train = TrainConfig(batch=64, gather_dtype=gather_dtype, precision="bfloat16")
        result = plan(SEVEN_B, train, OptimConfig(), Cluster(ranks=64))
        assert of(result, "full").memory["casts"] == casts
        assert of(result, "none").memory["casts"] == 2 * matrices


# Bytes and time


def test_a_ring_between_nodes_leaves_a_node_once() -> None:
    assert ring(1.0, 1, 8) == (0.0, 0.0)
    within, across = ring(64.0, 8, 8), ring(64.0, 64, 8)
    assert within == (56.0, 0.0)
    assert sum(across) == 63.0
    assert across.between == 63.0 / 8
    assert ring(64.0, 64, 1) == (0.0, 63.0)  # every rank a node of its own


def test_bytes_and_times_of_seven_billion_on_sixty_four() -> None:
    """The arithmetic of one adapter per GPU that carries everything, done apart from the module."""
    cluster = Cluster(ranks=64, per_node=1, rate=400.0, attention_rate=400.0, between=50.0)
    train = TrainConfig(batch=64, gather_dtype="bfloat16", precision="bfloat16")
    full = of(plan(SEVEN_B, train, OptimConfig(optimiser="adamw"), cluster), "full")
    block = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    N = 32 * block + 2 * 32000 * 4096 + 4096
    assert N == 6_738_415_616
    rings = (2 * (N + 32 * block) + 4 * N) * 63 / 64
    assert full.exchanged["gather"].between + full.exchanged["reduce-scatter"].between == rings
    assert rings == pytest.approx(8 * N * 63 / 64, rel=0.01)  # the root is gathered once, not twice
    products = 6 * 4096 * (N - 32000 * 4096 - 65 * 4096)
    attention = 6 * 4096**2 * 4096 * 32
    assert full.compute == pytest.approx((products + attention) / 400e12)
    assert full.step == pytest.approx(
        max(full.compute, rings / 50e9) + 2 * 4 * 3 * 4096 * 11008 * 63 / 64 / 50e9
    )


def test_owners_add_the_sums_of_nodes() -> None:
    """Two nodes of two: an owner has its rows from one other rank, a whole from the other node."""
    config = small(vocabulary=64)
    sizes = Sizes(config, OptimConfig())
    o = 4 * sizes.owned(4).numbers
    for cells, sent in ((None, 1), (8, 2)):  # two passes of four cells
        train = TrainConfig(batch=8, accumulate=1 if cells else 8, cells=cells)
        node = of(plan(config, train, OptimConfig(), Cluster(ranks=4, per_node=2)), "node")
        assert node.passes == 2
        assert node.exchanged["owners"] == Bytes(o / 2, o).times(1 + sent)


def test_muon_by_owners() -> None:
    """5 (4 p^2 q + 2 p^3) per matrix, 6.4e14 for all: 1.6 s of one GPU at 400 TFLOP/s."""
    alone = Sizes(SEVEN_B, OptimConfig()).owned(1)
    by_hand = (
        32
        * 5
        * ((4 * 3 + 2) * 4096**3 + (4 + 2) * 4096**3 + 3 * (4 * 4096**2 * 11008 + 2 * 4096**3))
    )
    assert alone.flops == by_hand == pytest.approx(6.9e14, rel=0.1)
    matrices = {(12288, 4096): 1, (4096, 4096): 1, (11008, 4096): 2, (4096, 11008): 1}
    assert alone.matrices == {shape: 32 * n * prod(shape) for shape, n in matrices.items()}
    assert Sizes(SEVEN_B, OptimConfig()).owned(64).flops < 2 * by_hand / 64
    assert Sizes(SEVEN_B, OptimConfig(optimiser="adamw")).owned(1).flops == 0


def test_links_that_are_fast_enough_are_hidden() -> None:
    train = TrainConfig(batch=128, gather_dtype="bfloat16", steps=1000)
    fast, slow = (
        of(plan(SEVEN_B, train, OptimConfig(), Cluster(ranks=64, between=rate)), "full")
        for rate in (50.0, 1.0)
    )
    assert fast.step < 1.1 * fast.compute
    assert slow.step > slow.communication > slow.compute
    assert fast.compute == slow.compute
    assert fast.days == pytest.approx(1000 * fast.step / 86400)
    assert fast.tokens_per_second == pytest.approx(128 * 4096 / fast.step)
    flops = 3 * 128 * forward_flops(SEVEN_B, 4096).total
    assert fast.efficiency == pytest.approx(flops / (64 * 989e12 * fast.step))


def test_context_groups_share_a_sequence() -> None:
    config = replace(SEVEN_B, context=32768)
    train = TrainConfig(batch=8, gather_dtype="bfloat16", precision="bfloat16")
    result = plan(config, train, OptimConfig(), Cluster(ranks=64))
    assert {f.layout.context for f in result.forecasts} == {8}  # 8 sequences for 64 ranks
    eight = of(result, "full", 8)
    kv = 2 * 2 * 32 * 128 * 32768  # keys and values of one layer and sequence
    assert eight.memory["kv"] == 32 * kv
    assert eight.exchanged["context"] == Bytes(2 * 32 * kv * 7 / 8, 0.0)
    assert "train.batch=8 does not split into 64 cells" in result.refused["shard=full"]


# Refusals and advice


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"ranks": 0}, "ranks=0 should be at least 1."),
        ({"ranks": 12}, "12 GPUs do not fill nodes of 8; give a multiple of 8."),
        ({"ranks": 8, "memory": 0.0}, "memory=0.0 should be above 0 and finite."),
        ({"ranks": 8, "between": float("nan")}, "between=nan should be above 0 and finite."),
    ],
)
def test_a_cluster_that_cannot_be(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Cluster(**given)


def test_a_batch_that_no_layout_can_divide() -> None:
    with pytest.raises(ValueError, match=r"train\.batch=3 does not split into 64 cells"):
        plan(small(), TrainConfig(batch=3), OptimConfig(), Cluster(ranks=64))


def test_advice_names_a_change_that_fits() -> None:
    optim, cluster = OptimConfig(), Cluster(ranks=64)
    train = TrainConfig(batch=512, accumulate=1, gather_dtype="bfloat16", precision="bfloat16")
    result = plan(SEVEN_B, train, optim, cluster)
    assert result.fastest(recompute=False) is None
    again = result.fastest()
    assert again is not None
    assert again.layout.recompute
    words = advice(SEVEN_B, train, optim, cluster, recompute=False)
    assert words is not None
    assert words.startswith("shard=full with context_group=2 fits with train.accumulate=128 (")
    changed = plan(SEVEN_B, replace(train, accumulate=128), optim, cluster)
    assert not of(changed, "full").fits
    assert of(changed, "full", 2).fits
    small_gpus = replace(cluster, ranks=8, memory=40.0)
    few = advice(SEVEN_B, replace(train, batch=8), optim, small_gpus, recompute=False)
    assert "16 GPUs with train.batch=16 (" in str(few)
    less = advice(SEVEN_B, train, optim, replace(cluster, memory=20.0))
    assert less is not None
    assert less.startswith("shard=full with context_group=2 and recompute=block fits with train.ac")
    assert advice(SEVEN_B, train, optim, replace(cluster, memory=1.0)) is None


# torch's own FSDP2, simulated


@contextmanager
def one_formula_wrong(sizes: Sizes) -> Iterator[None]:
    root = sizes.root
    sizes.root = root[1:]
    yield
    sizes.root = root


@pytest.mark.parametrize(
    ("gather_dtype", "ranks", "parts", "optimiser"),
    [
        ("bfloat16", 64, 64, "muon"),
        ("float32", 3, 3, "adamw"),
        ("float32", 4, 4, "score"),
        ("bfloat16", 12, 4, "muon"),
    ],
)
def test_fsdp2_holds_and_sends_the_bytes_of_the_formulas(
    gather_dtype: str, ranks: int, parts: int, optimiser: str
) -> None:
    """Divided among all ranks, or inside nodes of ``parts``."""
    config = small(vocabulary=515, layers=3, tied=False, kv_heads=2)  # 515 rows: no equal parts
    optim = OptimConfig(optimiser=optimiser)
    sizes, given = (
        Sizes(config, optim),
        {"ranks": ranks, "gather_dtype": gather_dtype, "parts": parts},
    )
    found = simulate(config, optim, **given)
    assert simulated_differs(found, sizes, optim, **given) is None
    assert (found.gathers, found.reductions) == (7, 4)
    if parts < ranks:  # a block is recomputed from weights that its backward pass has gathered
        again = simulate(config, optim, recompute=True, **given)
        assert again._replace(seconds=found.seconds) == found
    train, shard = (
        TrainConfig(batch=ranks, gather_dtype=gather_dtype),
        "full" if parts == ranks else "node",
    )
    full = of(plan(config, train, optim, Cluster(ranks=ranks, per_node=parts)), shard)
    assert full.exchanged["gather"].inside == pytest.approx(found.gather_bytes)
    assert full.exchanged["reduce-scatter"].inside == pytest.approx(found.reduce_bytes)
    assert full.memory["gradients"] == 4 * found.rows
    with one_formula_wrong(sizes):
        wrong = simulated_differs(found, sizes, optim, **given)
        assert wrong is not None
        assert "gather_bytes should be" in wrong


def test_a_block_of_several_layers_is_gathered_for_each() -> None:
    config, optim = (
        small(layers=4, distinct_layers=2, choice="entmax", entmax_alpha=1.25),
        OptimConfig(),
    )
    found = simulate(config, optim, ranks=8, gather_dtype="float32")
    assert (found.gathers, found.reductions) == (9, 3)
    assert (
        simulated_differs(found, Sizes(config, optim), optim, ranks=8, gather_dtype="float32")
        is None
    )
    with pytest.raises(ValueError, match="experts are chosen by values"):
        simulate(small(experts=4), optim, ranks=8, gather_dtype="float32")
    learned = small(choice="entmax", entmax_alpha_learned=True)
    with pytest.raises(ValueError, match="learned exponents of entmax need values"):
        simulate(learned, optim, ranks=8, gather_dtype="float32")


def test_a_plan_without_micro_batches_has_the_fewest_that_fit() -> None:
    model = ModelConfig(vocabulary=1000, context=512, width=256, layers=4, heads=4)
    train, optim = TrainConfig(batch=24, precision="bfloat16"), OptimConfig()

    def forecast(parts: int | None, memory: float) -> Forecast:
        cluster = Cluster(ranks=2, memory=memory)
        return plan(model, replace(train, accumulate=parts), optim, cluster).forecasts[0]

    whole = forecast(2, 80.0).peak / GIGA / USABLE
    third = forecast(6, 80.0).peak / GIGA / USABLE
    assert forecast(None, 1.001 * whole).passes == 1
    assert forecast(None, 0.999 * whole).passes == 2
    assert forecast(None, 1.001 * third).passes == 3
    least = forecast(None, 0.01)
    assert (least.passes, least.fits) == (12, False)
