"""fenchel/attention/statistics.py: the entropy of heads, its gradient, and a penalty on it."""

import math

import pytest
import torch
from torch import Tensor

from fenchel.attention import Causal, Padding, Window, attend, head_entropy, tiles
from fenchel.attention.prior import Prior
from fenchel.choice import Choice, Entmax, Softmax, Sparsemax
from fenchel.train.stability import entropy_penalty

CHOICES = [Softmax(), Softmax(2.5), Entmax(1.5), Entmax(1.2), Sparsemax()]
PRIORS = [None, Causal(), Window(2), Padding(torch.tensor([0, 5]))]


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def dense(q: Tensor, k: Tensor, choice: Choice, prior: Prior | None, cap: float | None) -> Tensor:
    """The definition, row by row of the weights that ``attend`` would mix by."""
    R = q.shape[1] // k.shape[1]
    z = q @ k.repeat_interleave(R, 1).mT * q.shape[-1] ** -0.5
    z = z if cap is None else cap * torch.tanh(z / cap)
    (B, H, T, _), S = q.shape, k.shape[2]
    log_u = None if prior is None else prior.log(T, S, B=B, H=H, dtype=z.dtype)
    p = choice.weights(z, log_u)
    safe = torch.where(p > 0, p, 1.0)
    seen = (p > 0).any(-1)
    return -(p * safe.log()).sum(-1).sum((0, 2)) / seen.sum((0, 2)).clamp(min=1)


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("prior", PRIORS, ids=repr)
@pytest.mark.parametrize("choice", CHOICES, ids=repr)
def test_value_and_gradient_are_those_of_the_definition(
    choice: Choice, prior: Prior | None, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "_CACHED", 40)  # several tiles, in rows and in heads
    monkeypatch.setattr(tiles, "_FEWEST_ROWS", 2)
    q, k, g = draw(2, 6, 5, 4), draw(2, 3, 7, 4, seed=1), draw(6, seed=2).detach()
    ours = head_entropy(q, k, choice=choice, prior=prior, softcap=cap)
    theirs = dense(q, k, choice, prior, cap)
    torch.testing.assert_close(ours, theirs)
    ours_g = torch.autograd.grad(ours @ g, (q, k))
    for a, b in zip(ours_g, torch.autograd.grad(theirs @ g, (q, k)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_it_is_the_entropy_of_what_attend_weighs() -> None:
    q, k = draw(2, 4, 6, 3), draw(2, 4, 6, 3, seed=1)
    _, p = attend(q, k, k, choice=Entmax(1.5), prior=Causal(), return_weights=True)
    expected = torch.special.entr(p).sum(-1).mean((0, 2))
    torch.testing.assert_close(head_entropy(q, k, choice=Entmax(1.5), prior=Causal()), expected)


def test_even_rows_reach_the_logarithm_and_a_sharp_head_nothing() -> None:
    even = head_entropy(torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 8, 4))
    torch.testing.assert_close(even, torch.full((2,), math.log(8.0)))
    one = head_entropy(torch.eye(4)[None, None] * 1e4, torch.eye(4)[None, None])
    assert one.item() == 0.0


def test_half_precision_gets_its_gradient_in_half_precision() -> None:
    q, k = (draw(1, 2, 5, 4, seed=s).detach().half().requires_grad_() for s in (0, 1))
    found = head_entropy(q, k, prior=Causal())
    found.sum().backward()
    assert found.dtype == torch.float32
    assert q.grad is not None
    assert q.grad.dtype == torch.float16
    wide = [x.detach().float().requires_grad_() for x in (q, k)]
    head_entropy(*wide, prior=Causal()).sum().backward()
    torch.testing.assert_close(q.grad.float(), wide[0].grad, rtol=2e-3, atol=1e-5)


def test_no_square_of_weights_outlives_the_forward_pass() -> None:
    q, k = draw(1, 2, 300, 4), draw(1, 2, 300, 4, seed=1)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.numel()) or x, lambda x: x
    ):
        head_entropy(q, k, prior=Causal())
    assert max(kept) == q.numel()


def test_the_penalty_counts_only_what_lacks() -> None:
    entropy = torch.tensor([0.5, 2.0, 1.0], requires_grad=True)
    found = entropy_penalty(entropy, 1.0)
    assert found.item() == pytest.approx(0.25 / 3)
    found.backward()
    assert entropy.grad.tolist() == pytest.approx([-2 * 0.5 / 3, 0.0, 0.0])


def test_going_down_the_penalty_opens_a_closed_head() -> None:
    q, k = (draw(1, 1, 6, 4, seed=s).detach() * 3 for s in (0, 1))
    q.requires_grad_()
    before = head_entropy(q, k, prior=Causal()).item()
    for _ in range(50):
        entropy_penalty(head_entropy(q, k, prior=Causal()), 1.0).backward()
        with torch.no_grad():
            q -= 3.0 * q.grad
        q.grad = None
    after = head_entropy(q, k, prior=Causal()).item()
    assert after > before + 0.1


def test_a_second_derivative_is_refused() -> None:
    q, k = draw(1, 1, 3, 2), draw(1, 1, 3, 2, seed=1)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(head_entropy(q, k).sum(), q, create_graph=True)
