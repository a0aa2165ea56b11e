"""fenchel/sensitivity/spectrum.py: the top of the spectrum, with its error."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fenchel.choice import Sparsemax
from fenchel.sensitivity import (
    Matrix,
    attention_jacobian,
    identity,
    self_attention_jacobian,
    singular_values,
)

Draw = Callable[..., Tensor]


@pytest.mark.parametrize("k", [1, 3, 6])
def test_the_top_values_are_those_of_the_dense_decomposition(
    k: int, draw: Draw, generator: torch.Generator
) -> None:
    J = self_attention_jacobian(draw(8, 7, 4), *(draw(4, 4) for _ in range(3)), each=True)
    found = singular_values(J, k, generator=generator)
    exact = torch.linalg.svdvals(J.dense())[..., :k]
    torch.testing.assert_close(found.values, exact, rtol=1e-8, atol=0)
    assert ((found.values - exact).abs() <= found.error).all()


def test_vectors_are_orthonormal_and_belong_to_their_values(
    draw: Draw, generator: torch.Generator
) -> None:
    J = attention_jacobian(draw(5, 3), draw(6, 3), draw(6, 4), choice=Sparsemax())
    found = singular_values(J, 4, generator=generator)
    left = found.left.flatten(1)
    right = torch.cat([part.flatten(1) for part in found.right], 1)
    for unit in (left, right):
        torch.testing.assert_close(unit @ unit.mT, torch.eye(4, dtype=torch.float64))
    moved = (J @ found.right).flatten(1)
    torch.testing.assert_close(moved, found.values.unsqueeze(-1) * left)
    rest = J.T.apply(left) - found.values.unsqueeze(-1) * right
    assert (rest.norm(dim=-1) <= found.error).all()


def test_a_value_is_found_as_often_as_it_stands_there(
    draw: Draw, generator: torch.Generator
) -> None:
    values = torch.tensor([3.0, 3.0, 3.0, 2.0, 2.0, 1.0, 0.5, 0.1], dtype=torch.float64)
    turn = torch.linalg.qr(draw(8, 8)).Q
    found = singular_values(Matrix(turn @ values.diag()), 4, generator=generator)
    torch.testing.assert_close(found.values, values[:4])
    ones = singular_values(identity(draw(5, 4)), 5, generator=generator)
    torch.testing.assert_close(ones.values, torch.ones(5, dtype=torch.float64))


def test_all_values_of_a_deficient_matrix(draw: Draw, generator: torch.Generator) -> None:
    A = draw(6, 2) @ draw(2, 5)
    found = singular_values(A, 5, generator=generator)
    torch.testing.assert_close(found.values, torch.linalg.svdvals(A), rtol=1e-10, atol=1e-10)


def test_an_unfinished_iteration_bounds_its_error(generator: torch.Generator) -> None:
    crowd = torch.linspace(0.0, 1.0, 300, dtype=torch.float64)
    found = singular_values(Matrix(crowd.diag()), 3, iterations=3, generator=generator)
    nearest = (found.values.unsqueeze(-1) - crowd).abs().amin(-1)
    assert (nearest <= found.error).all()
    assert found.error.max() > 1e-4


def test_more_values_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="1 to 3"):
        singular_values(torch.eye(3), 4)
