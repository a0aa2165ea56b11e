"""fenchel/optim/muon.py against the singular value decomposition and torch.optim.Muon."""

import pytest
import torch
from torch import Tensor

from fenchel.optim import Muon
from fenchel.optim.muon import QUINTIC, orthogonal


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 6, 20), (2, 20, 6)], ids=str)
def test_singular_values_end_near_1_and_vectors_stay(shape: tuple[int, ...]) -> None:
    G = draw(*shape).double()
    U, S, Vh = torch.linalg.svd(G, full_matrices=False)
    X = orthogonal(G)
    inside = U.mT @ X @ Vh.mT  # diagonal when the singular vectors stay
    sizes = inside.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(inside, torch.diag_embed(sizes), atol=1e-9, rtol=0)
    share = S / S.square().sum(-1, keepdim=True).sqrt()
    assert (sizes[share > 0.02] > 0.6).all()
    assert (sizes < 1.25).all()


@pytest.mark.parametrize("shape", [(3, 16, 31), (3, 16, 32), (2, 90, 20), (2, 5, 64)])
@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_long_matrices_have_the_values_of_the_plain_iteration(
    shape: tuple[int, ...], iterations: int
) -> None:
    """Singular values between 1 and 1e-4, by the quintic applied to each of them."""
    a, b, c = QUINTIC
    generator = torch.Generator().manual_seed(2)
    U, S, Vt = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    S = torch.logspace(0, -4, S.shape[-1]).expand_as(S)
    s = S.double() / S.double().norm(dim=-1, keepdim=True)
    for _ in range(iterations):
        s = a * s + b * s**3 + c * s**5
    wanted = U.double() @ torch.diag_embed(s) @ Vt.double()
    found = orthogonal(U @ torch.diag_embed(S) @ Vt, iterations)
    assert (found - wanted).norm() <= 1e-3 * wanted.norm()


def test_stacked_is_one_at_a_time() -> None:
    G = draw(5, 7, 4)
    torch.testing.assert_close(orthogonal(G), torch.cat([orthogonal(g[None]) for g in G]))


def test_nothing_to_turn_stays_nothing() -> None:
    assert (orthogonal(torch.zeros(2, 3, 4)) == 0).all()


def test_a_step_is_the_formula_of_the_docstring() -> None:
    weight = torch.nn.Parameter(draw(4, 9))
    start, (g1, g2) = weight.detach().clone(), draw(2, 4, 9, seed=1)
    optimiser = Muon([weight], lr=0.1, momentum=0.9, weight_decay=0.5)
    expected, m = start, torch.zeros_like(start)
    for g in (g1, g2):
        weight.grad = g.clone()
        optimiser.step()
        m = 0.9 * m + 0.1 * g
        direction = orthogonal((0.9 * m + 0.1 * g)[None])[0]
        expected = (1 - 0.1 * 0.5) * expected - 0.1 * 0.2 * 9**0.5 * direction
    torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("stack", [(7,), (2, 3), (1,), (0,)], ids=str)
def test_a_stack_moves_as_its_matrices_do_alone(stack: tuple[int, ...]) -> None:
    together = torch.nn.Parameter(draw(*stack, 5, 4))
    alone = [torch.nn.Parameter(w.clone()) for w in together.detach().flatten(0, -3)]
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5}
    optimisers = [Muon([together], **settings), *(Muon([w], **settings) for w in alone)]
    for seed in (1, 2):
        G = draw(*stack, 5, 4, seed=seed) * torch.logspace(-3, 3, len(alone)).view(*stack, 1, 1)
        together.grad = G.clone()
        for w, g in zip(alone, G.flatten(0, -3), strict=True):
            w.grad = g.clone()
        for optimiser in optimisers:
            optimiser.step()
    expected = torch.stack([w.detach() for w in alone]) if alone else together.detach()
    torch.testing.assert_close(together.detach().flatten(0, -3), expected.view(-1, 5, 4))


def test_a_matrix_of_a_stack_without_gradient_only_decays() -> None:
    weight = torch.nn.Parameter(draw(2, 5, 4))
    start = weight.detach().clone()
    weight.grad = draw(2, 5, 4, seed=1)
    weight.grad[1] = 0.0
    Muon([weight], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(weight.detach()[1], 0.95 * start[1])
    assert (weight.detach()[0] != 0.95 * start[0]).all()


def test_it_moves_as_torchs_muon_does() -> None:
    """Theirs orthogonalises in bfloat16, so the two agree to its three digits."""
    ours, theirs = (torch.nn.Parameter(draw(16, 12)) for _ in range(2))
    a = Muon([ours], lr=0.1, momentum=0.9, weight_decay=0.1)
    b = torch.optim.Muon(
        [theirs], lr=0.1, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for seed in range(3):
        ours.grad, theirs.grad = draw(16, 12, seed=seed), draw(16, 12, seed=seed)
        before = ours.detach().clone()
        a.step()
        b.step()
        moved = (ours - before).norm()
        assert (ours - theirs).norm() < 0.05 * moved * (seed + 1)


def test_a_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="Muon moves matrices"):
        Muon([torch.nn.Parameter(torch.zeros(3))])
