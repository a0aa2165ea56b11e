"""fenchel/kernels/argmax_token.py against torch's argmax."""

import pytest
import torch
from torch import Tensor

from fenchel.generation import cuda_graph
from fenchel.kernels import argmax_token
from fenchel.kernels.argmax_token import argmax_token as kernel


def chosen(z: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """(token, tokens) of the kernel, after a check that torch's operations give the same."""
    found = []
    for way in (kernel, cuda_graph.store_argmax):
        token = torch.full((len(z),), 99, device=device)
        tokens = torch.full((len(z), 6), 7, device=device)
        way(z.to(device), torch.tensor([4], device=device), token, tokens)
        found.append((token.cpu(), tokens.cpu()))
    assert torch.equal(found[0][1], found[1][1])
    return found[0]


@pytest.mark.parametrize("V", [1, 5, 64, 100, 193])
def test_the_likeliest_is_written_at_its_number(
    V: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(argmax_token, "BLOCK", 64)
    z = torch.randn(7, V, generator=torch.Generator().manual_seed(V))
    for b in range(7):
        z[b, b * V // 7] = 50.0  # in every block once
    token, tokens = chosen(z, device)
    assert torch.equal(token, z.argmax(-1))
    assert torch.equal(tokens[:, 4], token)
    assert (tokens[:, [0, 1, 2, 3, 5]] == 7).all()


def test_of_equals_the_first_is_taken(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argmax_token, "BLOCK", 16)
    z = torch.zeros(3, 40)
    z[1, [9, 20, 25, 39]] = z[2, [36, 39]] = 1.0
    assert chosen(z, device)[0].tolist() == [0, 9, 36]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [3, 37])
def test_a_row_without_a_finite_largest_is_marked(
    bad: float, at: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(argmax_token, "BLOCK", 16)
    z = torch.zeros(3, 40)
    z[1, at] = bad
    z[2] = -torch.inf
    token, tokens = chosen(z, device)
    assert tokens[:, 4].tolist() == [0, -1, -1]
    assert ((token >= 0) & (token < 40)).all()  # the next step embeds it in any case
