"""fenchel/data/packing.py: every token is a target once, in a row with its own beginning."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fenchel.data import DocumentIds, PackedBatches
from fenchel.data.packing import IGNORED, pack


def documents(lengths: list[int], begin: int = 1) -> DocumentIds:
    """Documents of ``begin`` tokens 0 and then numbers that no other place has."""
    starts = np.cumsum([0, *lengths])
    ids = np.arange(100, 100 + starts[-1])
    for start, length in zip(starts, lengths, strict=False):
        ids[start : start + min(begin, length)] = 0
    return DocumentIds(ids, starts)


@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=12),
    st.integers(2, 12),
    st.integers(0, 1),
)
@settings(max_examples=60)
def test_every_token_is_a_target_once_and_follows_its_own_document(
    lengths: list[int], context: int, begin: int
) -> None:
    given = documents(lengths, begin)
    batches = PackedBatches(given, batch=3, context=context, seed=0, begin=[0] * begin, pad=7)
    targets: Counter[int] = Counter()
    for batch in batches.in_order():
        assert batch.segments is not None
        for inputs, following, segments in zip(*batch, strict=True):
            for number in segments.unique():
                own = segments == number
                x, y = inputs[own], following[own]
                if (y == IGNORED).all():
                    assert (x == 7).all()  # the room that is left
                    continue
                assert begin == 0 or int(x[0]) == 0
                assert (y[1:] != IGNORED).all()
                assert torch.equal(y[1:-1], x[2:])
                targets.update(y[y != IGNORED].tolist())
    wanted = Counter(int(n) for n in given.ids if n != 0)
    if not begin:  # the first token of a document has none before it
        wanted -= Counter(int(given.ids[start]) for start in given.starts[:-1])
    assert targets == wanted


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
@settings(max_examples=40)
def test_rows_hold_every_part_once_and_less_than_half_is_wasted(sizes: list[int]) -> None:
    rows = pack(sizes, 20)
    assert sorted(number for row in rows for number in row) == list(range(len(sizes)))
    filled = [sum(sizes[number] for number in row) for row in rows]
    assert max(filled) <= 20
    assert len(rows) <= max(1, 2 * sum(sizes) / 20 + 1)


def test_a_batch_is_a_function_of_seed_and_step_and_an_epoch_has_every_row() -> None:
    given = documents([9, 3, 5, 8, 2, 7, 7, 4, 6])
    one, two = (PackedBatches(given, batch=2, context=8, seed=3, begin=[0]) for _ in range(2))
    two.at(9)
    assert all(torch.equal(x, y) for x, y in zip(one.at(4), two.at(4), strict=True))
    count = len(one.rows)
    seen = Counter(tuple(row.tolist()) for s in range(count) for row in one.at(s).inputs)
    assert set(seen.values()) == {2}  # two rows per step: two epochs
    other = PackedBatches(given, batch=2, context=8, seed=4, begin=[0])
    assert any(not torch.equal(one.at(s).inputs, other.at(s).inputs) for s in range(count))


def test_an_undivided_document_is_cut_off_and_what_is_not_scored_is_no_target() -> None:
    ids, starts = np.arange(10, 22), np.array([0, 8, 12])
    scored = np.array([0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 0, 0], np.uint8)
    given = DocumentIds(ids, starts, scored)
    batches = PackedBatches(given, batch=1, context=4, seed=0, divide=False)
    (batch,) = batches.in_order()  # the second document has nothing to predict
    assert batch.inputs.tolist() == [[10, 11, 12, 13]]
    assert batch.targets.tolist() == [[IGNORED, 12, IGNORED, 14]]
    assert batches.cut_off == 2
    with pytest.raises(ValueError, match="no document of the text has a token to predict"):
        PackedBatches(DocumentIds(ids, starts, 0 * scored), batch=1, context=4, seed=0)


def test_wrong_sizes_are_refused() -> None:
    for wrong, match in (
        ({"batch": 0}, "batch=0"),
        ({"context": 1, "begin": [0]}, "no room beside the 1 tokens"),
        ({"seed": -1}, "seed=-1"),
    ):
        with pytest.raises(ValueError, match=match):
            PackedBatches(documents([4]), **{"batch": 1, "context": 4, "seed": 0, **wrong})
    with pytest.raises(ValueError, match="step=-1"):
        PackedBatches(documents([4]), batch=1, context=4, seed=0).at(-1)


@pytest.mark.parametrize("answers", [False, True])
def test_a_split_has_every_target_once_and_continues_a_divided_document(answers: bool) -> None:
    starts = np.array([0, 4, 4, 5, 11], dtype=np.uint64)  # an empty document, and one of a token
    scored = np.array([1, 0, 1, 1, 1, 1, 0, 1, 0, 1, 1], dtype=bool) if answers else None
    whole = DocumentIds(np.arange(11), starts, scored)
    places = whole.targets().tolist()
    assert places == ([2, 3, 7, 9, 10] if answers else [1, 2, 3, 6, 7, 8, 9, 10])
    for count in range(1, len(places) + 3):
        first, rest = whole.split(count)
        found = [part.ids[part.targets()].tolist() for part in (first, rest)]
        assert found == [places[:count], places[count:]]
        for part in (first, rest):  # a document continues after the token before its next one
            for start, stop in pairwise(part.starts.astype(int)):
                own = part.ids[start:stop]
                assert (np.diff(own) == 1).all()
                assert len({int((starts <= token).sum()) for token in own}) <= 1
