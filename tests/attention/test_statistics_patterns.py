"""fenchel/attention/statistics.py: heads whose head_patterns are known."""

import math

import pytest
import torch
from torch import Tensor

from fenchel.attention import Causal, attend, head_patterns

T = 6


def heads() -> Tensor:
    """(1, 4, T, T): to itself, to the previous, to the first, evenly back."""
    here = torch.eye(T)
    back = torch.zeros(T, T)
    back[torch.arange(T), (torch.arange(T) - 1).clamp(min=0)] = 1.0
    first = torch.zeros(T, T)
    first[:, 0] = 1.0
    even = torch.ones(T, T).tril()
    return torch.stack([here, back, first, even / even.sum(-1, keepdim=True)])[None]


def test_each_head_has_the_pattern_of_its_weights() -> None:
    found = head_patterns(heads())
    rows = torch.arange(T)
    evenly = torch.log(rows + 1.0).mean()
    torch.testing.assert_close(found.entropy, torch.tensor([0.0, 0, 0, evenly]))
    wanted = [0.0, (T - 1) / T, rows.float().mean(), (rows / 2).mean()]
    torch.testing.assert_close(found.distance, torch.tensor(wanted))
    torch.testing.assert_close(found.first[2], torch.tensor(1.0))
    torch.testing.assert_close(found.previous[:2], torch.tensor([0.0, (T - 1) / T]))


def test_similarity_is_one_for_the_same_weights_and_zero_for_none_shared() -> None:
    p = torch.zeros(2, 3, T, T)
    p[:, 0, :, 0] = p[:, 1, :, 0] = p[:, 2, :, 1] = 1.0
    wanted = torch.tensor([[1.0, 1, 0], [1, 1, 0], [0, 0, 1]])
    torch.testing.assert_close(head_patterns(p).similarity, wanted)


def test_similarity_is_by_the_divergence_of_jensen_and_shannon(
    qkv: tuple[Tensor, Tensor, Tensor],
) -> None:
    _, p = attend(*qkv, prior=Causal(), return_weights=True)
    a, b = p[:, 1], p[:, 4]
    m = (a + b) / 2

    def kl(x: Tensor) -> Tensor:
        return torch.where(x > 0, x * (x / m).log(), 0.0).sum(-1)

    js = (kl(a) + kl(b)) / 2
    found = head_patterns(p).similarity
    torch.testing.assert_close(found[1, 4], 1 - js.mean() / math.log(2))
    torch.testing.assert_close(found, found.T)
    torch.testing.assert_close(found.diagonal(), torch.ones(6, dtype=p.dtype))


def test_positions_count_from_the_end_and_empty_rows_are_left_out() -> None:
    p = torch.zeros(1, 1, 2, 5)
    p[..., 1, 2] = 1.0  # the last query, at position 4
    found = head_patterns(p)
    assert found.distance.item() == 2.0
    assert found.similarity.item() == 1.0
    with pytest.raises(ValueError, match=r"weights should be \(B, H, T, S\)"):
        head_patterns(p[0])
