"""fenchel/choice/sigmoid.py: what is true of a choice over the box alone."""

import mpmath
import pytest
import torch
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from fenchel.attention import Causal, attend, head_entropy
from fenchel.choice import Sigmoid, Softmax, kkt, membership, multipliers
from fenchel.choice.base import require_simplex
from fenchel.generation import generate
from fenchel.generation.attention_trace import TraceSettings, trace_text
from fenchel.inspection.our_model import record_pass
from fenchel.model import ModelConfig, Transformer
from fenchel.sensitivity import attention_jacobian, spectral_norm


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def test_the_prior_holds_odds() -> None:
    """p minimises the divergence from the prior's probabilities, less the score."""
    z, prob = (
        draw(5),
        torch.rand(5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    )
    p = Sigmoid(beta=2.0).weights(z, (prob / (1.0 - prob)).log())
    posterior = prob * (2.0 * z).exp() / (prob * (2.0 * z).exp() + 1.0 - prob)
    torch.testing.assert_close(p, posterior)


def test_one_alternative_against_a_sink_of_score_zero_is_a_softmax_of_two() -> None:
    z = draw(6, 1)
    pair = Softmax().weights(torch.cat([z, torch.zeros_like(z)], -1))[:, :1]
    torch.testing.assert_close(Sigmoid().weights(z), pair)


def test_log_odds_of_one_in_n_keep_the_sum_below_one_at_equal_scores_of_zero() -> None:
    n = 50
    b = -torch.tensor(float(n)).log().item()
    total = Sigmoid(log_odds=b).weights(torch.zeros(n)).sum()
    torch.testing.assert_close(total, torch.tensor(n / (n + 1.0)))


def test_the_loss_is_the_binary_cross_entropy_less_its_least_value() -> None:
    z, y = 3.0 * draw(4, 6), torch.rand(4, 6, dtype=torch.float64).clamp(0.01, 0.99)
    wanted = binary_cross_entropy_with_logits(z, y, reduction="none")
    wanted = (wanted - binary_cross_entropy(y, y, reduction="none")).sum(-1)
    torch.testing.assert_close(Sigmoid().loss(z, y), wanted)
    index = torch.tensor([0, 5, 2, 2])
    sure = torch.nn.functional.one_hot(index, 6).double()
    wanted = binary_cross_entropy_with_logits(z, sure, reduction="none").sum(-1)
    torch.testing.assert_close(Sigmoid().loss(z, index), wanted)


def test_saturated_scores_have_a_finite_loss_and_a_certificate() -> None:
    for dtype in (torch.float64, torch.float32):
        z = torch.tensor([60.0, -120.0, 25.0, -800.0, 0.3], dtype=dtype)
        p = Sigmoid().weights(z)
        assert max(float(r) for r in kkt(Sigmoid(), z, p)) < 1e-6
        assert float(Sigmoid().loss(z, p)) == 0.0
        flipped = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0], dtype=dtype)
        wanted = 60.0 + 120.0 + 25.0 + 800.0 + 0.5543552
        assert float(Sigmoid().loss(z, flipped)) == pytest.approx(wanted, rel=1e-6)
        assert max(float(r) for r in kkt(Sigmoid(), z, flipped)) > 1.0


def test_no_price_is_set_on_the_sum() -> None:
    z = draw(3, 5)
    prices = multipliers(Sigmoid(), z, Sigmoid().weights(z))
    assert (prices.total == 0).all()


def test_a_half_attains_the_constant() -> None:
    z = torch.zeros(3, dtype=torch.float64)
    choice = Sigmoid(beta=3.0)
    p = choice.weights(z)
    assert float(choice.sensitivity(p)) == choice.lipschitz(3) == choice.lipschitz(1) == 0.75
    lower, upper = choice.sensitivity_bounds(p)
    assert lower < 0.75 < upper < 0.75 + 1e-12


def test_the_value_has_all_its_digits() -> None:
    z = torch.tensor([25.0, 1e-3, -40.0], dtype=torch.float64)
    with mpmath.workdps(50):
        wanted = sum(mpmath.log1p(mpmath.exp(mpmath.mpf(x))) for x in z.tolist())
    assert float(Sigmoid().value(z)) == pytest.approx(float(wanted), rel=1e-15)


def test_tensors_per_head_learn() -> None:
    b = torch.zeros(4, 1, 1, dtype=torch.float64, requires_grad=True)
    z = draw(4, 3, 5)
    p = Sigmoid(beta=torch.full((4, 1, 1), 2.0, dtype=torch.float64), log_odds=b).weights(z)
    torch.testing.assert_close(p, torch.sigmoid(2.0 * z))
    (slope,) = torch.autograd.grad(p.sum(), b)
    torch.testing.assert_close(slope, (p * (1.0 - p)).sum((1, 2), keepdim=True).detach())


def test_it_is_a_member_of_the_family_and_no_map_of_the_simplex() -> None:
    assert membership(Sigmoid().weights).member
    with pytest.raises(ValueError, match="by itself"):
        require_simplex(Sigmoid(), "a sink")
    for wrong in ({"beta": 0.0}, {"log_odds": float("inf")}):
        with pytest.raises(ValueError, match="Sigmoid needs"):
            Sigmoid(**wrong)


def test_what_needs_the_simplex_is_refused_by_a_sentence() -> None:
    q = torch.zeros(1, 1, 3, 4)
    call = {"choice": Sigmoid(), "prior": Causal()}
    config = ModelConfig(vocabulary=9, choice="sigmoid", log_odds=-2.0)
    for refused in (
        lambda: attend(q, q, q, sink=0.0, **call),
        lambda: head_entropy(q, q, **call),
        lambda: spectral_norm(attention_jacobian(q, q, q, **call)),
        lambda: record_pass(Transformer(config), torch.tensor([[1, 2]])),
        lambda: trace_text(Transformer(config), [1, 2, 3], 1, TraceSettings(entropy=True)),
    ):
        with pytest.raises(ValueError, match="weighs every alternative by itself"):
            refused()
    with pytest.raises(ValueError, match="compute softmax, not Sigmoid"):
        attend(q, q, q, backend="sdpa", **call)


def test_a_model_that_chooses_by_it_learns_and_generates() -> None:
    config = ModelConfig(vocabulary=9, choice="sigmoid", log_odds=-2.0, initial="normal")
    model = Transformer(config, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[1, 2, 3, 4]])
    model(ids).square().sum().backward()
    assert float(model.blocks[0].attention.qkv.weight.grad.abs().max()) > 0
    again = generate(model, ids, max_new_tokens=4, temperature=0.0)
    for n in range(4, 8):  # step by step beside the cache, as in one pass
        assert int(model(again[:, :n])[0, -1].argmax()) == int(again[0, n])
