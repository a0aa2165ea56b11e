"""fenchel/data/batches.py: pure in the seed and the step, and nothing lost or counted twice."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fenchel.data.batches import Batch, Batches, windows

quickly = settings(max_examples=150)
sizes = st.integers(1, 9)


def places(count: int) -> np.ndarray:
    """Ids that are their own positions, so that a batch shows where it was read."""
    return np.arange(count, dtype=np.uint32)


def same(a: Batch, b: Batch) -> bool:
    return torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)


# training


@quickly
@given(st.data())
def test_a_batch_is_a_function_of_the_seed_and_the_step(data: st.DataObject) -> None:
    context, batch = data.draw(sizes), data.draw(sizes)
    ids = places(data.draw(st.integers(context + 1, 200)))
    seed = data.draw(st.integers(0, 2**64 - 1))

    def fresh() -> Batches:
        return Batches(ids, batch=batch, context=context, seed=seed)

    in_order = [fresh().at(step) for step in range(12)]
    reader = fresh()
    for step in data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=24)):
        assert same(reader.at(step), in_order[step])
    assert same(fresh().at(10**9), reader.at(10**9))


@quickly
@given(sizes, sizes, st.integers(2, 120), st.integers(0, 5))
def test_an_epoch_predicts_every_token_once_but_a_remainder(
    context: int, batch: int, count: int, seed: int
) -> None:
    count = max(count, context + 1)
    batches = Batches(places(count), batch=batch, context=context, seed=seed)
    W = batches.per_epoch
    steps = -(-2 * W // batch)  # enough to cross from the first epoch into the second
    read = [batches.at(step) for step in range(steps)]
    targets = torch.cat([each.targets for each in read])[: 2 * W]
    for epoch in (targets[:W], targets[W:]):
        seen = epoch.flatten().tolist()
        assert len(set(seen)) == len(seen) == W * context
        assert count - len(seen) < context
    for each in read:
        # a target is the id after its input, and an input the id after the input before
        assert torch.equal(each.targets, (each.inputs + 1) % count)
        assert torch.equal(each.inputs[:, 1:], each.targets[:, :-1])


def test_batches_are_contiguous_int64_of_batch_times_context() -> None:
    inputs, targets, _ = Batches(places(100), batch=3, context=7, seed=0).at(0)
    for each in (inputs, targets):
        assert each.shape == (3, 7)
        assert each.dtype == torch.int64
        assert each.is_contiguous()


def test_epochs_and_seeds_give_other_orders_and_other_tilings() -> None:
    ids, context = places(1000), 10
    starts = {}
    for seed in range(3):
        batches = Batches(ids, batch=100, context=context, seed=seed)
        for epoch in range(3):
            starts[seed, epoch] = batches.at(epoch).inputs[:, 0].tolist()
    assert len({tuple(order) for order in starts.values()}) == 9
    assert len({order[0] % context for order in starts.values()}) > 3
    assert all(order != sorted(order) for order in starts.values())


def test_the_bits_of_the_first_batch_are_those_of_the_day_it_was_written() -> None:
    batches = Batches(places(50), batch=4, context=5, seed=7)
    assert batches.at(0).inputs[:, 0].tolist() == [27, 7, 42, 17]
    assert batches.at(3).inputs[:, 0].tolist() == [23, 48, 28, 43]


def test_a_batch_larger_than_the_text_runs_through_several_epochs() -> None:
    batch = Batches(places(7), batch=20, context=6, seed=0).at(0)
    assert batch.inputs.shape == (20, 6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"context": 50}, "50 tokens and context=50 needs 51"),
        ({"context": 0}, "context=0"),
        ({"batch": 0}, "batch=0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed="),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused_with_its_numbers(change: dict[str, int], says: str) -> None:
    arguments = {"batch": 4, "context": 5, "seed": 0, **change}
    with pytest.raises(ValueError, match=says):
        Batches(places(50), **arguments)


def test_a_step_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match="step=-1"):
        Batches(places(50), batch=6, context=5, seed=0).at(-1)


# evaluation


@settings(max_examples=400)
@given(st.integers(2, 60), st.integers(1, 12), st.data(), st.integers(1, 5))
def test_every_token_but_the_first_counts_exactly_once(
    count: int, context: int, data: st.DataObject, batch: int
) -> None:
    stride = data.draw(st.integers(1, context))
    counted: list[int] = []
    for inputs, targets, scored in windows(
        places(count), context=context, stride=stride, batch=batch
    ):
        assert inputs.shape == targets.shape == scored.shape
        assert inputs.shape[0] <= batch
        assert inputs.shape[1] == min(context, count - 1)
        assert torch.equal(targets, inputs + 1)
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(inputs.shape[1]))
        counted += targets[scored].tolist()
        # before its own input a counted target sees context - stride tokens, or all there are
        before = torch.arange(inputs.shape[1]).expand_as(inputs)[scored]
        enough = torch.minimum(torch.tensor(context - stride), inputs[scored])
        assert (before >= enough).all()
    assert counted == list(range(1, count))


def test_without_a_stride_windows_do_not_overlap_but_the_last() -> None:
    scored = torch.cat([each.scored for each in windows(places(22), context=5, batch=3)])
    assert scored.sum(-1).tolist() == [5, 5, 5, 5, 1]


@pytest.mark.parametrize(
    ("count", "context", "stride", "says"),
    [
        (9, 4, 5, "stride=5"),
        (9, 4, 0, "stride=0"),
        (9, 0, None, "context=0"),
        (1, 4, 2, "1 tokens"),
    ],
)
def test_windows_that_would_miss_tokens_are_refused_at_once(
    count: int, context: int, stride: int | None, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        windows(places(count), context=context, stride=stride)
