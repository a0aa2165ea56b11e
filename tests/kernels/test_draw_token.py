"""fenchel/kernels/draw_token.py against ``draw``, token by token."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fenchel.generation import Sampling
from fenchel.generation.sampling import RowSampling, draw
from fenchel.generation.steering import aim_below
from fenchel.kernels import draw_token
from fenchel.kernels.draw_token import _strength
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


def both(
    z: Tensor,
    settings: list[Sampling],
    n: list[int],
    device: str,
    budgets: dict[int, tuple[int, float]] | None = None,
) -> tuple[Tensor, Tensor]:
    """(token, marked) of the kernel, after a check that torch's operations draw the same."""
    seeds = [(-1) ** i * (i + 3) * 2**37 for i in range(len(settings))]
    rows = RowSampling.of(list(zip(settings, seeds, strict=True)), budgets)
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


@triton.jit
def _strengths(z_ptr, kappa_ptr, lam_ptr, V, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """lam of every second row, the next one being its prior."""
    b = tl.program_id(0)
    kappa = tl.load(kappa_ptr + b)
    lam = _strength(z_ptr + 2 * b * V, z_ptr + (2 * b + 1) * V, kappa, V, BLOCK)
    tl.store(lam_ptr + b, lam)


def test_strengths_keep_their_budget_and_reach_it(device: str) -> None:
    generator = torch.Generator().manual_seed(11)
    R, V, shifts = 60, 700, torch.tensor([0.0, 300.0]).view(1, 2, 1)
    sizes = torch.tensor([0.05, 0.5, 3.0, 12.0, 60.0]).repeat(R // 5).view(R, 1, 1)
    z = sizes * torch.randn(R, 2, V, generator=generator) + shifts
    kappa = 10 ** (4 * torch.rand(R, generator=generator) - 3.5)
    aim, lam = aim_below(kappa).to(device), torch.empty(R, device=device)
    _strengths[(R,)](z.to(device), aim, lam, V, BLOCK=256)
    p, p0 = z.double().log_softmax(-1).unbind(1)

    def divergence(lam: Tensor) -> Tensor:
        law = (p0 + lam.double().unsqueeze(-1) * (p - p0)).log_softmax(-1)
        return (law.exp() * (law - p0)).sum(-1)

    kl, whole, lam = divergence(lam.cpu()), divergence(torch.ones(R)), lam.cpu()
    assert bool((kl <= kappa).all())
    assert bool((lam[whole <= aim.cpu()] == 1.0).all())
    limited = whole > kappa
    assert 20 < int(limited.sum()) < R
    assert bool((kl >= kappa * (1.0 - 3e-4) - 6e-6)[limited].all())


@pytest.mark.parametrize("spread", [0.5, 6.0])
def test_a_row_with_a_budget_draws_between_two_laws_for_both(
    spread: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that a law does not have is drawn only where to leave it out is too far from the
    prior; other rows are as before."""
    monkeypatch.setattr(draw_token, "BLOCK", 32)
    generator = torch.Generator().manual_seed(4)
    settings = [one for one in SETTINGS for _ in range(2)]
    z = spread * torch.randn(len(settings), 93, generator=generator)
    z[:, 40:] = -torch.inf
    z[::2, 39] = z[1::4, 38] = -torch.inf
    z[6, ::2] = z[10, :39] = z[11, 39] = -torch.inf
    z[12, :20] = z[13, 20:] = -torch.inf  # no token that both have
    budgets = {b: (b + 1, 0.02 * b) for b in range(0, len(settings) - 4, 2)}
    n = list(range(len(settings)))
    token, _ = both(z, settings, n, device, budgets)
    alone, _ = both(z, settings, n, device)
    first, second = token[:-4].view(-1, 2).unbind(1)
    assert torch.equal(first, second)
    fallback = torch.tensor([0, 3, 5, 6])  # pairs: without a budget, and with too much to lose
    prior = z[1:-4:2].log_softmax(-1)
    for pair, drawn in enumerate(first.tolist()):
        assert prior[pair, drawn] > -torch.inf
        assert (z[2 * pair, drawn] > -torch.inf) or pair in fallback
    assert torch.equal(token[-4:], alone[-4:])
    assert not torch.equal(token, alone)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_law_that_is_not_finite_marks_both_rows(
    bad: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw_token, "BLOCK", 16)
    z = torch.randn(10, 40, generator=torch.Generator().manual_seed(1))
    z[6] = z[8, :38] = -torch.inf
    z[1, 37] = z[2, 5] = z[8, 39] = bad
    budgets = {b: (b + 1, 0.1) for b in range(0, 10, 2)}
    _, marked = both(z, [Sampling()] * 10, [1] * 10, device, budgets)
    assert (marked >= 0).nonzero().squeeze(-1).tolist() == [4, 5]


def test_registers_of_a_hopper_gpu_suffice() -> None:
    (report,) = compiled(
        """
from fenchel.kernels.draw_token import draw_token

B, V = 128, 32000
settings = *(torch.empty(B, device="meta") for _ in range(3)),
numbers = [torch.empty(B, dtype=torch.int64, device="meta") for _ in range(7)]
z = torch.empty(B, V, dtype=torch.bfloat16, device="meta")
draw_token(z, (*settings, *numbers[:3], settings[0]), *numbers[3:])
"""
    )
    assert report["kernel"] == "_draw_token"
    assert report["spilled"] == 0, report
