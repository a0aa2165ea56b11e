"""fenchel/attention/statistics.py: the four numbers, on rows where they are known."""

import math

import pytest
import torch

from fenchel.attention import (
    Causal,
    Dense,
    Padding,
    attend,
    attention_weights,
    head_entropy,
    health,
    health_per_head,
    scale_warning,
)
from fenchel.choice import Entmax, Softmax, Sparsemax


def test_even_rows_use_every_key() -> None:
    q, k = torch.zeros(2, 6, 4, 5), torch.ones(2, 3, 7, 5)
    for choice in (Softmax(), Sparsemax()):
        found = health(q, k, choice=choice)
        assert found == pytest.approx((0.0, math.log(7), 7.0, 7.0), rel=1e-6)


def test_a_sparse_map_counts_its_support() -> None:
    q = torch.ones(1, 1, 1, 1)
    k = torch.tensor([1.0, 0.8, -3.0])[None, None, :, None]
    found = health(q, k, choice=Sparsemax())
    entropy = -0.6 * math.log(0.6) - 0.4 * math.log(0.4)
    assert found == pytest.approx((3.0, entropy, math.exp(entropy), 2.0), rel=1e-6)
    assert health(q, k, choice=Softmax()).support == 3.0


def test_forbidden_scores_and_empty_rows_are_left_out(qkv) -> None:
    q, k, _ = qkv
    k[0, :, 5:] = 1e6
    full = health(q[1:], k[1:])
    assert health(q, k, prior=Padding(torch.tensor([0, 7]))) == pytest.approx(full)
    assert health(q, k, prior=Padding(torch.tensor([0, 0]))) == (0.0, 0.0, 0.0, 0.0)


def test_temperature_and_scale_raise_the_largest_logit(qkv) -> None:
    q, k, _ = qkv
    plain = health(q, k).max_logit
    assert health(q, k, choice=Softmax(3.0)).max_logit == pytest.approx(3 * plain)
    assert health(q, k, scale=2 / 5**0.5).max_logit == pytest.approx(2 * plain)


def test_the_means_are_those_of_the_weights(qkv) -> None:
    q, k, v = qkv
    prior = Causal() + Dense(torch.randn(4, 7, generator=torch.Generator().manual_seed(0)))
    for choice in (Softmax(), Entmax(1.5)):
        _, p = attend(q, k, v, choice=choice, prior=prior, return_weights=True)
        entropy = torch.special.entr(p).sum(-1)
        found = health(q, k, choice=choice, prior=prior)
        assert found.entropy == pytest.approx(entropy.mean().item())
        assert found.effective == pytest.approx(entropy.exp().mean().item())
        assert found.support == pytest.approx((p > 0).sum(-1).double().mean().item())


def test_it_leaves_no_gradient(qkv) -> None:
    q, k, _ = qkv
    assert all(isinstance(x, float) for x in health(q.requires_grad_(), k))


def test_by_head_it_is_the_health_of_that_head_alone(qkv) -> None:
    q, k, _ = qkv
    R = q.shape[1] // k.shape[1]
    for prior in (None, Causal(), Padding(torch.tensor([0, 5]))):
        _, heads = health_per_head(q, k, prior=prior)
        for h in range(q.shape[1]):
            one = q[:, h : h + 1], k[:, h // R : h // R + 1]
            alone = health(*one, prior=prior)
            assert heads.max_logit[h] == pytest.approx(alone.max_logit)
            assert heads.entropy[h] == pytest.approx(alone.entropy)
            z = one[0] @ one[1].mT * q.shape[-1] ** -0.5
            T, S, B = z.shape[2], z.shape[3], len(z)
            open_ = torch.ones_like(z, dtype=torch.bool)
            if prior is not None:
                open_ = (prior.log(T, S, B=B) > -torch.inf).expand_as(z)
            assert heads.rms[h] == pytest.approx(z[open_].square().mean().sqrt().item(), rel=1e-5)


@pytest.mark.parametrize(("batch_q", "batch_k"), [(1, 3), (3, 1)])
def test_one_batch_broadcasts_against_the_other_in_every_measure(
    draw, batch_q: int, batch_k: int
) -> None:
    q, k = draw(batch_q, 4, 5, 8), draw(batch_k, 2, 6, 8)
    Q, K = q.expand(3, -1, -1, -1), k.expand(3, -1, -1, -1)
    assert health_per_head(q, k) == health_per_head(Q, K)
    assert scale_warning(q, k, scale=1.0) == scale_warning(Q, K, scale=1.0)
    assert torch.equal(head_entropy(q, k), head_entropy(Q, K))
    ours, theirs = (attention_weights(*call, rows=[1]) for call in ((q, k), (Q, K)))
    assert torch.equal(ours, theirs)
