"""fenchel/generation/session.py: padding is on the left and is masked."""

import torch

from fenchel.generation.session import pad_prompts, previous_tokens

ROWS = [torch.tensor(row) for row in ([7, 8, 9], [5], [3, 3])]


def test_all_prompts_end_together_and_padding_is_masked() -> None:
    ids, mask = pad_prompts(ROWS)
    assert mask is not None
    for row, got, real in zip(ROWS, ids, mask, strict=True):
        assert torch.equal(got[3 - len(row) :], row)
        assert torch.equal(got[real], row)


def test_equal_prompts_have_no_padding() -> None:
    assert pad_prompts(ROWS[:1]).token_mask is None
    assert pad_prompts(torch.stack(ROWS[:1])).token_mask is None


def test_padding_is_not_a_previous_token() -> None:
    has = [row.nonzero().flatten().tolist() for row in previous_tokens(pad_prompts(ROWS), 10)]
    assert has == [[7, 8, 9], [5], [3]]
