"""fenchel/generation/session.py: the fill stands on the left and counts for nothing."""

import torch

from fenchel.generation.session import seen, side_by_side

ROWS = [torch.tensor(row) for row in ([7, 8, 9], [5], [3, 3])]


def test_all_prompts_end_together_and_the_fill_is_absent() -> None:
    ids, present = side_by_side(ROWS)
    assert present is not None
    for row, got, real in zip(ROWS, ids, present, strict=True):
        assert torch.equal(got[3 - len(row) :], row)
        assert torch.equal(got[real], row)


def test_equal_prompts_have_no_fill() -> None:
    assert side_by_side(ROWS[:1]).present is None
    assert side_by_side(torch.stack(ROWS[:1])).present is None


def test_the_fill_was_not_seen() -> None:
    has = [row.nonzero().flatten().tolist() for row in seen(side_by_side(ROWS), 10)]
    assert has == [[7, 8, 9], [5], [3]]
