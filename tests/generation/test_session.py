"""fenchel/generation/session.py: padding is on the left and is masked."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled

from fenchel.generation import generate
from fenchel.generation.session import pad_prompts, previous_tokens
from fenchel.model import Transformer

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


def test_a_growing_cache_meets_no_kernel_that_is_planned_per_length(
    lively: Callable[..., Transformer], prompts: Callable[..., Tensor], device: str
) -> None:
    model, enabled = lively(positions="alibi").to(device), list[bool]()
    model.blocks[0].register_forward_pre_hook(lambda *_: enabled.append(cudnn_sdp_enabled()))
    before = cudnn_sdp_enabled()
    generate(model, prompts(1, 3).to(device), max_new_tokens=3)
    assert enabled == [before and device == "cpu"] * 3
    assert cudnn_sdp_enabled() == before
