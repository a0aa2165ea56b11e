"""fenchel/kernels/draw_token.py against ``draw``, token by token."""

import pytest
import torch
from torch import Tensor

from fenchel.generation import Sampling
from fenchel.generation.sampling import RowSampling, draw
from fenchel.kernels import draw_token
from fenchel.kernels.draw_token import draw_token as kernel
from tests.kernels.sm90 import compiled

SETTINGS = [
    Sampling(temperature=0.0),
    Sampling(),
    Sampling(temperature=0.3),
    Sampling(temperature=1.5, top_k=3),
    Sampling(top_p=0.5),
    Sampling(top_p=0.9, top_k=20),
    Sampling(top_p=0.2, top_k=2, min_p=0.01),
    Sampling(min_p=0.4),
    Sampling(top_k=1),
    Sampling(temperature=1e-3, top_p=0.999),
]


def both(z: Tensor, settings: list[Sampling], n: list[int], device: str) -> tuple[Tensor, Tensor]:
    """(token, marked) of the kernel, after a check that torch's operations draw the same."""
    rows = RowSampling.of([(s, (-1) ** i * (i + 3) * 2**37) for i, s in enumerate(settings)])
    wanted = draw(z, rows, torch.tensor(n))
    token, marked = (torch.full((len(z),), 99, device=device) for _ in "tm")
    there = tuple(x.to(device) for x in rows)
    left = torch.tensor([b % 3 for b in range(len(n))], device=device)
    number = torch.tensor(n, device=device) - left
    kernel(z.to(device), there, number, left, token, marked)  # type: ignore[arg-type]
    assert torch.equal(marked.cpu(), wanted)
    return token.cpu(), marked.cpu()


@pytest.mark.parametrize(("V", "spread"), [(1, 1.0), (50, 0.5), (93, 4.0)])
def test_every_row_draws_by_its_own_settings(
    V: int, spread: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw_token, "BLOCK", 64)
    generator = torch.Generator().manual_seed(V)
    rows = len(SETTINGS)
    z = spread * torch.randn(rows, V, generator=generator)
    both(z, SETTINGS, [1000 * b for b in range(rows)], device)


def test_of_equal_tokens_those_with_smaller_ids_stay(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw_token, "BLOCK", 32)
    z = torch.zeros(4, 40)
    z[2:, [9, 20, 25, 39]] = z[3, [36]] = 5.0
    settings = [Sampling(temperature=0.0), Sampling(top_k=1), *[Sampling(top_k=2, top_p=0.9)] * 2]
    token, _ = both(z, settings, [1, 2, 3, 4], device)
    assert token[:2].tolist() == [0, 0]
    assert {int(t) for t in token[2:]} <= {9, 20}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_without_a_finite_largest_is_marked(
    bad: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw_token, "BLOCK", 16)
    z = torch.zeros(3, 40)
    z[1, 37] = bad
    z[2] = -torch.inf
    token, marked = both(z, [Sampling(top_p=0.9)] * 3, [1, 2, 3], device)
    assert marked[0] >= 0
    assert marked[1:].tolist() == [-1, -1]
    assert ((token >= 0) & (token < 40)).all()  # the next step embeds it in any case


def test_registers_of_a_hopper_gpu_suffice() -> None:
    (report,) = compiled(
        """
from fenchel.kernels.draw_token import draw_token

B, V = 128, 32000
settings = *(torch.empty(B, device="meta") for _ in range(3)),
numbers = [torch.empty(B, dtype=torch.int64, device="meta") for _ in range(6)]
z = torch.empty(B, V, dtype=torch.bfloat16, device="meta")
draw_token(z, (*settings, *numbers[:2]), *numbers[2:])
"""
    )
    assert report["kernel"] == "_draw_token"
    assert report["spilled"] == 0, report
