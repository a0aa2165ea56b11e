"""Softly capped scores, c tanh(s / c): every back end, both directions, twice."""

import pytest
import torch
from torch import Tensor
from torch.func import jvp

from fenchel.attention import (
    ALiBi,
    Causal,
    Prior,
    attend,
    attend_jvp,
    attend_vjp,
    attention_weights,
    backend_support,
    backends,
    health,
    tiles,
    trace,
)
from fenchel.choice import Choice, Entmax, Softmax, Sparsemax

C = 0.8
CHOICES: list[Choice] = [Softmax(), Softmax(1.7), Entmax(1.5, 2.0), Sparsemax(0.8)]
every_choice = pytest.mark.parametrize("choice", CHOICES, ids=repr)
every_backend = pytest.mark.parametrize("backend", ["reference", "blocked", "auto"])
every_prior = pytest.mark.parametrize("prior", [None, Causal(), ALiBi(6) + Causal()], ids=repr)


@pytest.fixture(autouse=True)
def _tiny_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_CACHED", 50)
    monkeypatch.setattr(tiles, "_FEWEST_ROWS", 3)
    monkeypatch.setattr(backends, "_ONE_PIECE", 0)


def definition(q: Tensor, k: Tensor, v: Tensor, choice: Choice, prior: Prior | None) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    z = C * (0.6 * q @ k.mT / C).tanh()
    log_u = None
    if prior is not None:
        log_u = prior.log(q.shape[2], k.shape[2], H=q.shape[1], dtype=q.dtype)
    return choice.weights(z, log_u) @ v


@every_prior
@every_choice
@every_backend
def test_values_and_derivatives_are_those_of_the_definition(
    qkv: tuple[Tensor, Tensor, Tensor], backend: str, choice: Choice, prior: Prior | None
) -> None:
    at = [x.requires_grad_() for x in qkv]

    def ours(*x: Tensor) -> Tensor:
        return attend(*x, choice=choice, prior=prior, scale=0.6, softcap=C, backend=backend)

    def exact(*x: Tensor) -> Tensor:
        return definition(*x, choice, prior)

    def twice(f) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(f(*at).square().sum(), at, create_graph=True)
        return *first, *torch.autograd.grad(sum(x.sin().sum() for x in first), at)

    torch.testing.assert_close(ours(*at), exact(*at))
    torch.testing.assert_close(twice(ours), twice(exact), atol=1e-6, rtol=1e-6)
    tangents = tuple(x.detach().flip(2) for x in at)
    still = tuple(x.detach() for x in at)
    torch.testing.assert_close(
        jvp(ours, still, tangents)[1], jvp(exact, still, tangents)[1], atol=1e-6, rtol=1e-6
    )


@every_choice
def test_the_explicit_derivatives_include_the_cap(
    qkv: tuple[Tensor, Tensor, Tensor], choice: Choice
) -> None:
    tangents = tuple(x.flip(2) for x in qkv)
    settings = {"choice": choice, "prior": Causal(), "scale": 0.6, "softcap": C}
    out, move = jvp(lambda *x: attend(*x, **settings, backend="reference"), qkv, tangents)
    torch.testing.assert_close(attend_jvp(qkv, tangents, **settings).total, move)
    at = [x.clone().requires_grad_() for x in qkv]
    slopes = torch.autograd.grad(attend(*at, **settings), at, out)
    torch.testing.assert_close(attend_vjp(qkv, out, **settings)[:3], slopes)


def test_weights_traces_and_health_see_the_same_scores(
    qkv: tuple[Tensor, Tensor, Tensor],
) -> None:
    q, k, v = qkv
    settings = {"prior": Causal(), "softcap": C}
    _, p = attend(q, k, v, **settings, return_weights=True)
    torch.testing.assert_close(attention_weights(q, k, **settings), p)
    steps = trace(q, k, v, **settings)
    torch.testing.assert_close(steps.weights, p)
    assert steps.scores.abs().max() < C < steps.compatibility.abs().max() / 5**0.5
    assert 0.9 * C < health(q, k, **settings).max_logit < C


def test_a_large_cap_changes_nothing_and_a_huge_score_stays_finite(
    qkv: tuple[Tensor, Tensor, Tensor],
) -> None:
    q, k, v = qkv
    torch.testing.assert_close(attend(q, k, v, softcap=1e6), attend(q, k, v))
    far = (1e200 * q).requires_grad_()
    out = attend(far, k, v, softcap=C)
    assert out.isfinite().all()
    assert torch.autograd.grad(out.sum(), far)[0].isfinite().all()


def test_a_learned_temperature_comes_after_the_cap(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    beta = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    ours = attend(*qkv, choice=Softmax(beta), scale=0.6, softcap=C)
    torch.testing.assert_close(ours, definition(*qkv, Softmax(1.7), None))
    assert torch.autograd.grad(ours.square().sum(), beta)[0] != 0


def test_back_ends_without_a_soft_cap_give_their_reason(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    why = backend_support(*qkv, softcap=C)
    assert why["sdpa"] == "torch's fused kernels have no soft-cap"
    assert why["reference"] is why["blocked"] is why["flex"] is None
    warm = backend_support(*qkv, softcap=C, choice=Softmax(torch.tensor(1.0)))
    assert "temperature" in (warm["blocked"] or "")
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="softcap is a finite number above 0"):
            attend(*qkv, softcap=wrong)
