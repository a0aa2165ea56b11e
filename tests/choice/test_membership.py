"""fenchel/choice/membership.py: members pass, and whoever fails shows a cycle that proves it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fenchel.choice import MAPS, Capped, Entmax, Softmax, by_name, membership, reverse_kl
from tests.test_reference import reference

softpick, stick_breaking = reference.attentions.softpick, reference.attentions.stick_breaking
Map = Callable[[Tensor], Tensor]
PRIOR = torch.tensor([0.0, -2.0, 1.0, 0.5, -torch.inf], dtype=torch.float64)


def with_sink(z: Tensor) -> Tensor:
    """Softmax beside a key of score 0.3: weights that sum to less than 1."""
    return torch.softmax(torch.cat([z, torch.full_like(z[..., :1], 0.3)], -1), -1)[..., :-1]


def one_hot_by_autograd(z: Tensor) -> Tensor:
    """A map whose autograd is that of softpick and whose values are those of softmax."""
    return (softpick(z) - softpick(z).detach()) + torch.softmax(z, -1)


MEMBERS: dict[str, Map] = {
    **{name: by_name(name).weights for name in MAPS},
    "softmax, cold": Softmax(7.0).weights,
    "entmax 3": Entmax(3.0).weights,
    "capped": Capped(0.4).weights,
    "under a prior": lambda z: Entmax(1.25).weights(z, PRIOR),
    "sink": with_sink,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "cog": lambda z: z.sign() * torch.softmax(z.abs(), -1),  # the gradient of log sum exp |z|
    "other derivative": one_hot_by_autograd,
    "constant": torch.ones_like,
}
OUTSIDE: dict[str, Map] = {
    "stick-breaking": stick_breaking,
    "softpick": softpick,
    "softmax, normalised by position": lambda z: torch.softmax(z, -1) * torch.arange(1, 6),
    "hard the wrong way": lambda z: (z == z.amin(-1, keepdim=True)).to(z.dtype),
    "minus softmax": lambda z: -torch.softmax(z, -1),
    "rotation": lambda z: z.roll(1, -1),
}


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("seed", [0, 1])
def test_members_pass(name: str, seed: int) -> None:
    found = membership(MEMBERS[name], generator=torch.Generator().manual_seed(seed))
    assert found == (True, None)


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("seed", [0, 1])
def test_others_show_a_cycle_along_which_they_gain(name: str, seed: int) -> None:
    found = membership(OUTSIDE[name], generator=torch.Generator().manual_seed(seed))
    assert not found.member
    assert found.witness is not None
    scores, gain, _ = found.witness
    by_hand = 0.0  # the definition of cyclic monotonicity, corner by corner
    for k in range(len(scores)):
        there = scores[(k + 1) % len(scores)] - scores[k]
        by_hand += float(OUTSIDE[name](scores[k : k + 1])[0] @ there)
    assert by_hand == pytest.approx(gain, rel=1e-6)
    assert gain > 0


@pytest.mark.parametrize("name", ["stick-breaking", "softpick"])
def test_the_pair_is_where_the_derivative_is_not_symmetric(name: str) -> None:
    found = membership(OUTSIDE[name])
    assert found.witness is not None
    assert found.witness.pair is not None
    i, j = found.witness.pair
    J = torch.func.jacrev(OUTSIDE[name])(found.witness.scores.mean(0))
    assert (J[i, j] - J[j, i]).abs() > 1e-3


def test_the_sum_of_a_member_over_its_cycles_is_never_positive() -> None:
    """Along the witnesses of the others a member of the family gains nothing."""
    for outside in OUTSIDE.values():
        witness = membership(outside).witness
        assert witness is not None
        step = witness.scores.roll(-1, 0) - witness.scores
        for member in (Softmax().weights, Entmax(1.5).weights, torch.sigmoid):
            assert float((member(witness.scores) * step).sum()) <= 1e-12


def test_the_solution_of_the_reverse_divergence_is_a_member_too() -> None:
    def weights(z: Tensor) -> Tensor:
        return reverse_kl(z).p

    assert membership(weights, K=4).member


def test_bad_input_gets_one_sentence() -> None:
    with pytest.raises(ValueError, match="at least 2 alternatives"):
        membership(torch.sigmoid, K=1)
    with pytest.raises(ValueError, match=r"a map is \(..., K\) -> \(..., K\)"):
        membership(lambda z: z[..., :1])
