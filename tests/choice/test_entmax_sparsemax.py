"""fenchel/choice/entmax.py: the projection onto the simplex."""

import entmax as peer
import torch
from torch.func import jacrev

from fenchel.choice import Sparsemax


def draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def test_the_sorting_solution_agrees() -> None:
    for scale in (0.01, 1.0, 10.0):
        z = scale * draw(10, 700)
        torch.testing.assert_close(Sparsemax().weights(z), peer.sparsemax(z, -1))


def test_no_law_is_nearer_to_the_scores() -> None:
    z, beta = draw(6), 1.7
    p = Sparsemax(beta).weights(z)
    rivals = draw(500, 6).softmax(-1)
    assert ((rivals - beta * z).norm(dim=-1) >= (p - beta * z).norm()).all()


def test_its_jacobian_is_beta_times_a_projection() -> None:
    J = jacrev(Sparsemax(beta=3.0).weights)(draw(6)) / 3.0
    torch.testing.assert_close(J @ J, J)
    assert Sparsemax(beta=3.0).lipschitz(6) == 3.0
