"""fenchel/distributed/context_parallel.py: several processes compute what one does."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fenchel.data import Batches, BatchSource, DocumentIds, PackedBatches
from fenchel.distributed.cells import CellStepper, build_stepper, cell_count, require_supported
from fenchel.distributed.context_parallel import ContextPart
from fenchel.distributed.processes import World
from fenchel.model import ModelConfig, Transformer
from fenchel.model.forward_context import SequencePart
from fenchel.model.transformer import meta_model
from fenchel.optim import OptimConfig, build_optimiser, constant
from fenchel.train import Stepper, StepResult, TrainConfig

from .test_cells import digest

T, VOCABULARY = 64, 61
BATCH, CELLS, STEPS = 4, 4, 3
CASES: dict[str, dict[str, Any]] = {
    "softmax, rotary": {},
    "entmax": {"choice": "entmax"},
    "entmax, grouped keys, qk_norm": {"choice": "entmax", "kv_heads": 1, "qk_norm": True},
    "sparsemax, learned positions": {"choice": "sparsemax", "positions": "learned"},
    "entmax, alibi": {"choice": "entmax", "positions": "alibi"},
    "entmax, window": {"choice": "entmax", "windows": (12, 0)},
    "entmax, buckets": {"choice": "entmax", "positions": "buckets"},
    "entmax, sinks, soft cap": {"choice": "entmax", "sinks": True, "softcap": 8.0},
    "softmax, l2": {"scores": "l2"},
    "softmax, gates": {"gate": "head"},
    "entmax, packed documents": {"choice": "entmax"},
}
"""Name to settings of the model."""


class InOneProcess:
    """All positions in one process, whose queries attend chunk by chunk as those of a group do."""

    def positions(self, length: int, device: torch.device) -> Tensor:
        return torch.arange(length, device=device)

    def chunks(self, length: int) -> list[tuple[slice, int]]:
        n = length // 4
        return [(slice(end - n, end), end) for end in range(n, length + 1, n)]

    def gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v


def run(name: str, part: SequencePart | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states of two sequences at the positions of a part, and gradients of the weights."""
    shape = {"vocabulary": VOCABULARY, "width": 32, "layers": 2, "heads": 2, "context": T}
    settings = {"initial": "normal", "initial_std": 0.1, **CASES[name]}
    model = Transformer(ModelConfig(**shape, **settings), generator=torch.manual_seed(0))
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (2, T), generator=draw)
    weight = torch.randn(2, T, 32, generator=draw)
    packed = {}
    if "packed" in name:
        packed = {"segments_BT": torch.arange(T).expand(2, T) // torch.tensor([[23], [40]])}
    hidden = model(ids, return_hidden=True, part=part, **packed)
    if part is not None:
        weight = weight[:, part.positions(T, ids.device)]
    (hidden * weight).sum().backward()
    return hidden.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def divided(launch) -> list[dict[str, Any]]:
    """By rank of two: hidden states and gradients, by case."""

    def work(world: World) -> dict[str, Any]:
        part, results = ContextPart(world, 2), {}
        for name in CASES:
            hidden, gradients = run(name, part)
            numbers = {n: world.sum(g.clone()).tolist() for n, g in gradients.items()}
            results[name] = [hidden.tolist(), numbers]
        return results

    return launch(2, work)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_compute_what_one_does(divided, name: str) -> None:
    """Forward to the bit of the same calls in one process, and to 2e-6 of one call per layer.

    Kernels add in another order where a call has other numbers of queries and keys. Gradients, the
    terms of two processes, are right to 2e-6.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    by_chunks, _ = run(name, InOneProcess())
    hidden, gradients = run(name, None)
    torch.set_num_threads(threads)
    for rank, at in enumerate([[*range(16), *range(48, 64)], [*range(16, 48)]]):
        found, numbers = divided[rank][name]
        assert torch.equal(torch.tensor(found), by_chunks[:, at])
        assert torch.allclose(torch.tensor(found), hidden[:, at], rtol=0.0, atol=2e-6)
        assert numbers.keys() == gradients.keys()
        for n, g in gradients.items():
            scale = max(1.0, float(g.abs().max()))
            assert torch.allclose(torch.tensor(numbers[n]), g, rtol=0.0, atol=2e-6 * scale)


ADAMW = OptimConfig(optimiser="adamw", learning_rate=1e-3)
BY_SCORES = {
    "score": OptimConfig(optimiser="score"),
    "trust": OptimConfig(optimiser="trust", output_change=0.1),
}
SWITCHES = {"qk_clip": 0.5, "entropy_floor": 2.0, "entropy_weight": 1.0}


def config_of(**settings: Any) -> ModelConfig:
    shape = {"vocabulary": VOCABULARY, "width": 16, "layers": 2, "heads": 2, "context": 16}
    return ModelConfig(**shape, choice="entmax", **settings)


def batches_of() -> Batches:
    ids = np.random.default_rng(0).integers(0, VOCABULARY, size=2000)
    return Batches(ids, batch=BATCH, context=16, seed=1)


def stepper_of(
    world: World,
    optim: OptimConfig = ADAMW,
    batches: BatchSource | None = None,
    *,
    dropout: float = 0.0,
    **settings: Any,
) -> CellStepper:
    config = config_of(dropout=dropout)
    model = Transformer(config, generator=torch.Generator().manual_seed(0))
    given = {"batch": BATCH, "precision": "float32", "context_group": 2, **SWITCHES, **settings}
    kinds = {"train": TrainConfig(**given), "optim": optim, "world": world}
    meta = meta_model(config)
    batches = batches or batches_of()
    return build_stepper(model, meta, batches, constant(), steps=STEPS, seed=3, **kinds)


def numbers_of(result: StepResult) -> dict[str, float]:
    return {"loss": result.loss, "norm": result.gradient_norm, **result.metrics}


@pytest.fixture(scope="module")
def trained(launch) -> dict[str, list[Any]]:
    """Digest after steps in cells with dropout, and numbers of steps without, by processes."""

    def work(shard: str, recompute: str = "none") -> Any:
        given = {"shard": shard, "recompute": recompute}

        def run(world: World) -> list[Any]:
            digests = {}
            for optim in (ADAMW, *BY_SCORES.values()):
                exact = stepper_of(world, optim, dropout=0.1, cells=CELLS, **given)
                for step in range(STEPS):
                    exact(step)
                digests[optim.optimiser] = digest(exact)
            ordinary = stepper_of(world, **given)
            return [digests, [numbers_of(ordinary(step)) for step in range(STEPS)]]

        return run

    return {
        "2": launch(2, work("none")),
        "4, full": launch(4, work("full")),
        "2, recomputed": launch(2, work("none", "block")),
    }


def test_same_bits_for_any_number_of_context_groups(trained) -> None:
    first, *others = [row[0] for rows in trained.values() for row in rows]
    assert others == [first] * 7
    assert len(set(first.values())) == 3


def packed_batches(shortest: int = 2) -> PackedBatches:
    """Documents of ``shortest`` to 5 more tokens; of 2 to 7, several in a row."""
    ids, starts = np.random.default_rng(0).integers(0, VOCABULARY, size=400), [0]
    while starts[-1] < 400:
        starts.append(min(400, starts[-1] + shortest + len(starts) % 6))
    documents = DocumentIds(ids, np.array(starts))
    return PackedBatches(documents, batch=BATCH, context=16, seed=1)


@pytest.mark.parametrize(
    ("cells", "tokens", "packed"), [(4, 2048, False), (1, 10, False), (2, 2048, True)]
)
def test_owners_get_the_sequences_that_one_process_samples(launch, cells, tokens, packed) -> None:
    """Positions in order, with their angles; of a probe of 10 tokens the first 10 of one sequence.

    Where documents share rows, with the pairs of positions of one document. The reference is the
    probe of one process, with as many micro-batches.
    """
    batches = packed_batches() if packed else batches_of()

    def work(world: World) -> dict[str, Any]:
        stepper = stepper_of(world, BY_SCORES["score"], batches, cells=cells)
        samples = stepper.owners.samples
        assert samples is not None
        for reader in samples.readers:
            reader.tokens = tokens
        stepper.owners.optimiser.move = lambda _: None  # type: ignore[method-assign]
        stepper(0)
        own = [reader for reader in samples.readers if reader.owner == world.rank]
        return {
            x.name: [
                *(y.tolist() for y in (x.sample.x, *x.sample.angles)),
                x.sample.mask if x.sample.mask is None else x.sample.mask.tolist(),
            ]
            for x in own
        }

    found = {name: row for rank in launch(2, work) for name, row in rank.items()}
    model = Transformer(config_of(), generator=torch.Generator().manual_seed(0))
    optimiser = build_optimiser(model, BY_SCORES["score"], steps=STEPS)
    (group,) = optimiser.members[0].pair_probes
    for probe in group.probes.values():
        probe.tokens = tokens
    train = TrainConfig(batch=BATCH, accumulate=cells, precision="float32")
    one = Stepper(model, batches, optimiser, constant(), config=train, seed=3)
    optimiser.step = lambda: None  # type: ignore[method-assign]
    optimiser.zero_grad = lambda: None  # type: ignore[method-assign]
    one(0)
    assert len(found) == len(group.probes) == 2
    for probe in group.probes.values():
        sample = probe.take()
        assert sample is not None
        x, cos, sin = (torch.tensor(values) for values in found[probe.name][:3])
        assert x.shape == ((1, 10, 16) if tokens == 10 else (4, 16, 16))
        assert torch.allclose(x, sample.x, rtol=0.0, atol=2e-6)
        assert torch.equal(cos, sample.angles.cos.expand_as(cos))
        assert torch.equal(sin, sample.angles.sin.expand_as(sin))
        mask = found[probe.name][3]
        assert (mask is None) == (sample.mask is None) == (not packed)
        if packed:
            assert torch.equal(torch.tensor(mask), sample.mask)


@pytest.mark.parametrize("which", ["2", "4, full", "2, recomputed"])
def test_groups_take_the_steps_of_one_process(trained, which: str) -> None:
    """With QK-clip and the entropy penalty, a function of means over all positions of a cell.

    One process has as many micro-batches as there are groups.
    """
    config = config_of()
    model = Transformer(config, generator=torch.Generator().manual_seed(0))
    optimiser = build_optimiser(
        model, OptimConfig(optimiser="adamw", learning_rate=1e-3), steps=STEPS
    )
    groups = int(which[0]) // 2
    train = TrainConfig(batch=BATCH, accumulate=groups, precision="float32", **SWITCHES)
    one = Stepper(model, batches_of(), optimiser, constant(), config=train, seed=3)
    expected = [numbers_of(one(step)) for step in range(STEPS)]
    assert all(row["clipped_heads"] and row["entropy_penalty"] > 0.01 for row in expected)
    for _, found in trained[which]:
        for numbers, others in zip(found, expected, strict=True):
            assert numbers == pytest.approx(others, rel=1e-5, abs=1e-5)


def test_groups_measure_packed_documents_as_one_process_does(launch) -> None:
    """Chunks at the ends of rows have more padding, and the entropy is a mean without it."""

    def work(world: World) -> list[dict[str, float]]:
        stepper = stepper_of(world, batches=packed_batches(9))
        return [numbers_of(stepper(step)) for step in range(STEPS)]

    batches = packed_batches(9)
    tail = batches.at(0).targets[:, 12:]
    assert 0.3 < float((tail < 0).float().mean()) < 1.0
    model = Transformer(config_of(), generator=torch.Generator().manual_seed(0))
    train = TrainConfig(batch=BATCH, precision="float32", **SWITCHES)
    optimiser = build_optimiser(model, ADAMW, steps=STEPS)
    one = Stepper(model, batches, optimiser, constant(), config=train, seed=3)
    expected = [numbers_of(one(step)) for step in range(STEPS)]
    assert all(row["clipped_heads"] and row["entropy_penalty"] > 0.01 for row in expected)
    for found in launch(2, work):
        for numbers, others in zip(found, expected, strict=True):
            assert numbers == pytest.approx(others, rel=1e-5, abs=1e-5)


def test_groups_need_chunks_of_equal_length() -> None:
    world = World(size=6, local_size=6)
    with pytest.raises(ValueError, match="its 64 positions are not a multiple of 6"):
        require_supported(TrainConfig(context_group=3), world, context=T)


def test_groups_need_their_processes() -> None:
    assert cell_count(TrainConfig(batch=8, context_group=2), 8) == 4
    with pytest.raises(ValueError, match="context_group=2 needs a multiple of 2 processes"):
        cell_count(TrainConfig(batch=8, context_group=2), 1)
    with pytest.raises(ValueError, match="cells=2 serves 4 processes at most, not 8"):
        cell_count(TrainConfig(batch=8, cells=2, context_group=2), 8)
