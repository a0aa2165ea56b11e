"""fenchel/optim/score/direction.py against dense least squares in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jacfwd

from fenchel.attention import Angles, angles, rotary, rotate
from fenchel.optim import attention_pairs
from fenchel.optim.score.direction import (
    _rotation_averaged,
    damped,
    direction,
    inverse_root,
    partner_grams,
)
from fenchel.optim.score.score_change import HeadWeights, ScoreLine
from fenchel.optim.score.stacked_pairs import PairProbes, head_weights, stack_parameters

KINDS: dict[str, dict[str, Any]] = {
    "mha": {"positions": "learned"},
    "gqa": {"positions": "learned", "kv_heads": 2},
    "rotary": {},
    "rotary-gqa": {"kv_heads": 2},
}


class Instance:
    """A model that was trained a little, its gradient, and the dense score map of its layers."""

    def __init__(self, model: Any, ids: Tensor, inputs: Any, backward: Any) -> None:
        self.pairs = attention_pairs(model)
        pair_probes = PairProbes(self.pairs, 10**6)
        self.given = inputs(model, self.pairs, ids)
        backward(model, ids)
        (stack,) = pair_probes.stacks()
        self.W, self.inputs = head_weights(self.pairs, stack_parameters(self.pairs)), stack.inputs
        self.gradient = head_weights(self.pairs, stack_parameters(self.pairs, lambda p: p.grad))
        self.line = ScoreLine(self.pairs, self.inputs, self.W)

    def group(self, layer: int, heads: HeadWeights) -> Tensor:
        """The first group of heads with their keys, as one vector."""
        r = self.line.group
        return torch.cat((heads.Q[layer, :r].flatten(), heads.K[layer, :1].flatten()))

    def dense(self, layer: int) -> Tensor:
        """d scores of that group / d weights, by forward differentiation."""
        x, rotation = self.given[layer]
        scale = self.pairs[layer].scale

        def scores(Wq: Tensor, Wk: Tensor) -> Tensor:
            q, k = (torch.einsum("btm,hdm->bhtd", x, W) for W in (Wq, Wk))
            if rotation is not None:
                q, k = rotate(q, rotation), rotate(k, rotation)
            return (scale * q @ k.mT).tril().flatten()

        parts = jacfwd(scores, (0, 1))(self.W.Q[layer, : self.line.group], self.W.K[layer, :1])
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    def attained(self, layer: int, J: Tensor, U: HeadWeights) -> float:
        """-<G, dS> / |dS| of a direction, over that of the least-squares solution."""
        g, u = self.group(layer, self.gradient), self.group(layer, U)
        squares, V = torch.linalg.eigh(J.mT @ J)
        kept = squares > 1e-9 * squares[-1]
        best = ((V.mT @ g)[kept].square() / squares[kept]).sum().sqrt()
        return float(-(g @ u) / (J @ u).norm() / best)


@pytest.fixture
def instance(small: Any, tokens: Any, backward: Any, inputs: Any) -> Any:
    def build(kind: str, seed: int) -> Instance:
        model = small(seed, **KINDS[kind]).double()
        optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(20):
            backward(model, tokens(100 * seed + step, 8))
            optimiser.step()
            optimiser.zero_grad()
        return Instance(model, tokens(seed, 10), inputs, backward)

    return build


@pytest.mark.parametrize("kind", KINDS)
def test_the_frobenius_direction_attains_three_quarters_of_the_best_descent(
    kind: str, instance: Any
) -> None:
    at = instance(kind, 11)
    for layer in range(2):
        J = at.dense(layer)
        share = {
            norm: at.attained(layer, J, direction(at.line, at.W, at.gradient, norm, 1e-2))
            for norm in ("frobenius", "spectral", "raw")
        }
        assert 0.75 <= share["frobenius"] <= 1.0 + 1e-6, (layer, share)
        assert 0.0 < share["raw"] < share["frobenius"]
        assert 0.0 < share["spectral"] < share["frobenius"]


def test_under_rotation_the_unrotated_gram_is_the_wrong_measure(instance: Any) -> None:
    at = instance("rotary", 12)
    still = ScoreLine(at.pairs, at.inputs._replace(angles=None), at.W)
    for layer in range(2):
        J = at.dense(layer)
        averaged, unrotated = (
            at.attained(layer, J, direction(line, at.W, at.gradient, "frobenius", 1e-2))
            for line in (at.line, still)
        )
        assert averaged > unrotated + 0.05, (layer, averaged, unrotated)


@pytest.mark.parametrize("kind", ["gqa", "rotary-gqa"])
def test_partner_grams_are_means_over_the_open_pairs(
    kind: str, instance: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pair by pair, with keys rotated by their position relative to the query."""
    # every position and every sequence, not a sample of them
    monkeypatch.setattr("fenchel.optim.score.direction.ROTATIONS", 24)
    monkeypatch.setattr("fenchel.optim.score.direction.STRIDE", 1)
    at = instance(kind, 13)
    grams = partner_grams(at.line)
    q, k = at.line.q[1], at.line.k[1]  # (n, H, T, D), before any rotation
    rotates = at.inputs.angles is not None
    A_K = torch.zeros_like(grams.K[1])
    A_Q = torch.zeros_like(grams.Q[1])
    pairs = [(i, j) for i in range(24) for j in range(i + 1)]
    for i, j in pairs:
        key, query = k[:, :, j : j + 1], q[:, :, i : i + 1]
        if rotates:
            key = rotary(key, torch.tensor([j - i]))
            query = rotary(query, torch.tensor([i - j]))
        A_K += (key.mT @ key).mean(0)
        A_Q += (query.mT @ query).mean(0)
    torch.testing.assert_close(grams.K[1], A_K / len(pairs))
    torch.testing.assert_close(grams.Q[1], A_Q / len(pairs))


@pytest.mark.parametrize("n", [4, 6, 7])
def test_under_a_mask_each_sequence_counts_its_own_pairs(n: int) -> None:
    """Rotated by its own angles at its own positions, one after another."""
    generator = torch.Generator().manual_seed(n)
    x, dtype = torch.randn(2, n, 3, 16, 4, generator=generator).double(), torch.float64
    mask = torch.rand(2, n, 1, 16, 16, generator=generator) < 0.5
    positions = torch.randint(50, (n, 16), generator=generator)
    rotation = Angles(*(part[None] for part in angles(positions, 4, dtype=dtype)))
    j = {4: 4, 6: 2, 7: 1}[n]
    A, count = torch.zeros(2, 3, 4, 4, dtype=dtype), torch.zeros(2, dtype=dtype)
    for place, s in enumerate(range(1, 16, 2)):
        for i in range(place % j, n, j):
            cos, sin = (part[0, i, 0, s] for part in rotation)
            y = rotate(x[:, i], Angles(cos, -sin)) * mask[:, i, :, s].unsqueeze(-1)
            A += y.mT @ y
            count += mask[:, i, 0, s].sum(-1)
    torch.testing.assert_close(
        _rotation_averaged(x, rotation, mask, "half"), A / count.view(2, 1, 1, 1)
    )


def test_the_inverse_root_is_that_of_the_eigenvalues() -> None:
    generator = torch.Generator().manual_seed(0)
    M = torch.randn(3, 2, 16, 5, generator=generator)
    A = damped(M @ M.mT, 1e-2)  # eleven of sixteen directions empty
    e, V = torch.linalg.eigh(A.double())
    expected = V * e.rsqrt().unsqueeze(-2) @ V.mT
    torch.testing.assert_close(inverse_root(A).double(), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(inverse_root(A.double()), expected, rtol=1e-9, atol=1e-9)


def test_an_empty_gram_has_a_finite_inverse_root() -> None:
    assert inverse_root(damped(torch.zeros(2, 4, 4), 1e-2)).isfinite().all()
