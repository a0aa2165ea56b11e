"""fenchel/model/bigram.py against a dense decomposition, and what a model begins with."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from fenchel.model import ModelConfig, Transformer, bigram
from fenchel.model.bigram import applies_to, bigram_factors, start_from_bigrams

V = 24


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    """A chain in which every token has a few successors; the last three tokens never occur."""
    rng = np.random.default_rng(0)
    table = rng.dirichlet(np.full(V - 3, 0.1), size=V - 3)
    chain = [0]
    for _ in range(20_000):
        chain.append(int(rng.choice(V - 3, p=table[chain[-1]])))
    return np.array(chain, dtype=np.uint16)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def estimate(ids: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """q_ij, p_j and n_i by the definition, dense, in float64."""
    c = torch.zeros(V, V, dtype=torch.float64)
    for i, j in pairwise(ids.tolist()):
        c[i, j] += 1
    p, n = c.sum(0) + 1, c.sum(1)
    p = p / p.sum()
    return (c + bigram.PRIOR * p) / (n[:, None] + bigram.PRIOR), p, n


def divergence(q: Tensor, logits: Tensor, n: Tensor) -> float:
    """Mean over the text of KL(q_i || softmax(logits_i)), in nats."""
    rows = (q * (q.log() - logits.double().log_softmax(-1))).sum(-1)
    return float((n / n.sum()) @ rows)


def test_the_decomposition_is_that_of_the_centred_log_ratios(ids: np.ndarray) -> None:
    q, p, n = estimate(ids)
    ratios = (q / p).log()
    ratios -= (ratios @ p)[:, None]
    weights = ((n + 1) / (n + 1).sum()).sqrt()[:, None] * p.sqrt()
    U, D, Vt = torch.linalg.svd(weights * ratios)
    dense = (U[:, :6] * D[:6]) @ Vt[:6] / weights
    seen = {}

    def spy(*arguments: object) -> tuple[Tensor, Tensor, Tensor]:
        seen["svd"] = truncated(*arguments)
        return seen["svd"]

    truncated = bigram._truncated_svd
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bigram, "_truncated_svd", spy)
        bigram_factors(ids, V, 7, seeded())
    U, D, Vt = seen["svd"]
    ours = ((U * D) @ Vt).double() / weights
    torch.testing.assert_close(ours, dense, rtol=1e-4, atol=1e-4)


def test_more_width_comes_nearer_to_the_counts_and_all_of_it_close(ids: np.ndarray) -> None:
    q, p, n = estimate(ids)
    unigram = divergence(q, p.log().expand(V, V), n)
    gaps = []
    for M in (4, 8, 32):
        e, W = bigram_factors(ids, V, M, seeded())
        gaps.append(divergence(q, e @ W.T, n))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] < 0.7 * unigram
    assert gaps[-1] < 0.1 * unigram


def test_rows_are_equally_long_and_a_seed_only_rotates(ids: np.ndarray) -> None:
    one, other = (bigram_factors(ids, V, 8, seeded(seed)) for seed in (0, 1))
    for e, _ in (one, other):
        torch.testing.assert_close(e.square().mean(1), torch.ones(V))
    assert (one.embedding - other.embedding).abs().max() > 0.1
    torch.testing.assert_close(
        one.embedding @ one.lm_head.T, other.embedding @ other.lm_head.T, atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize("logit_scale", [1.0, 0.5])
def test_a_fresh_model_predicts_by_the_counts(ids: np.ndarray, logit_scale: float) -> None:
    q, p, n = estimate(ids)
    config = ModelConfig(vocabulary=V, width=32, tied=False, logit_scale=logit_scale)
    model = Transformer(config, generator=seeded())
    assert applies_to(model)
    start_from_bigrams(model, ids, seeded())
    logits = model(torch.arange(V)[:, None])[:, 0].detach()
    assert divergence(q, logits, n) < 0.1 * divergence(q, p.log().expand(V, V), n)
    size = model.embed.weight.square().mean().sqrt().item()
    assert size == pytest.approx(bigram.SIZE, rel=1e-3)


def test_tokens_with_the_same_successors_are_near_in_a_tied_model() -> None:
    rng = np.random.default_rng(0)
    after = {0: (2, 3), 1: (2, 3), 2: (4, 5), 3: (4, 5), 4: (0, 1), 5: (0, 1)}
    chain = [0]
    for _ in range(4000):
        chain.append(int(rng.choice(after[chain[-1]])))
    model = Transformer(ModelConfig(vocabulary=6, width=16), generator=seeded())
    start_from_bigrams(model, np.array(chain), seeded())
    assert model.lm_head is None
    e = torch.nn.functional.normalize(model.embed.weight.detach(), dim=-1)
    near = (e @ e.T - 2 * torch.eye(6)).argmax(-1)
    assert near.tolist() == [1, 0, 3, 2, 5, 4]


@pytest.mark.parametrize("width", [32, 256])
def test_a_wide_tied_model_does_not_begin_by_repeating_its_input(
    ids: np.ndarray, width: int
) -> None:
    model = Transformer(ModelConfig(vocabulary=V, width=width, tied=True, positions="rotary"))
    start_from_bigrams(model, ids, seeded())
    logits = model(torch.arange(V)[:, None])[:, 0]
    largest = min(bigram.SIZE * width, bigram.SELF_LOGIT)
    torch.testing.assert_close(logits.diagonal(), torch.full((V,), largest), rtol=1e-2, atol=0.0)


def test_models_whose_logits_are_no_product_with_one_matrix_are_left_alone() -> None:
    for settings in ({"logit_softcap": 30.0}, {"embedding_width": 8}, {"lm_head_bias": True}):
        assert not applies_to(Transformer(ModelConfig(vocabulary=V, width=16, **settings)))


def test_of_a_long_text_blocks_from_all_over_it_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bigram, "LARGEST_COUNT", 40)
    monkeypatch.setattr(bigram, "_BLOCK", 10)
    assert bigram._sample(np.arange(40)).tolist() == list(range(40))
    assert bigram._sample(np.arange(100)).tolist() == [
        start + k for start in (0, 30, 60, 90) for k in range(10)
    ]


def test_the_prior_is_what_few_counts_are_mixed_with() -> None:
    """One count beside k of the prior moves a rare token's log ratio by log(1 + 1 / (k p))."""
    ids = np.array([0, 1] * 500 + [0, 2])
    i, j, c = bigram._count_pairs(ids, 3)
    counts = dict(zip(zip(i.tolist(), j.tolist(), strict=True), c.tolist(), strict=True))
    assert counts == {(0, 1): 500.0, (1, 0): 500.0, (0, 2): 1.0}
    p = torch.tensor([501.0, 501.0, 2.0], dtype=torch.float64) / 1004
    q = (1 + bigram.PRIOR * p[2]) / (501 + bigram.PRIOR)
    constant = math.log(bigram.PRIOR / (501 + bigram.PRIOR))
    ours = math.log(p[2]) + math.log1p(1 / (bigram.PRIOR * p[2])) + constant
    assert ours == pytest.approx(math.log(q))
