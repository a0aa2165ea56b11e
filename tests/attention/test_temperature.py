"""fenchel/attention/temperature.py and attend(beta=...): a temperature per row, head and length."""

import math

import pytest
import torch
from torch import Tensor
from torch.func import jvp
from torch.nn.attention.flex_attention import flex_attention
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from fenchel.attention import Causal, attend, backend_support, flex, tangent
from fenchel.attention.temperature import (
    adaptive_length,
    log_length,
    ratio_length,
    stepped_length,
)
from fenchel.choice import Choice, Entmax, Hard, Softmax, Sparsemax

SHAPES = {
    "number": (),
    "per head": (6, 1, 1),
    "per query": (4, 1),
    "per row": (2, 6, 4, 1),
    "per sequence": (2, 1, 1, 1),
}


def definition(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, choice: Choice) -> Tensor:
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    z = beta * (0.6 * q @ k.mT)
    return choice.weights(z, Causal().log(4, 7, dtype=z.dtype)) @ v


def inputs(shape: tuple[int, ...], draw) -> list[Tensor]:
    at = [draw(2, 6, 4, 5), draw(2, 3, 7, 5), draw(2, 3, 7, 3), draw(*shape).exp()]
    return [x.requires_grad_() for x in at]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(
    ("backend", "choice"),
    [
        (name, choice)
        for name in ("reference", "blocked", "sdpa", "auto")
        for choice in (Softmax(), Softmax(1.7), Entmax(1.5), Sparsemax())
        if name != "sdpa" or isinstance(choice, Softmax)
    ],
    ids=str,
)
def test_every_back_end_has_its_value_and_its_gradient(
    backend: str, choice: Choice, shape: tuple[int, ...], draw
) -> None:
    at = inputs(shape, draw)
    *qkv, beta = at
    ours = attend(*qkv, beta=beta, choice=choice, prior=Causal(), scale=0.6, backend=backend)
    exact = definition(*at, choice)
    torch.testing.assert_close(ours, exact, atol=1e-7, rtol=1e-7)
    slopes = [torch.autograd.grad(x.square().sum(), at) for x in (ours, exact)]
    torch.testing.assert_close(*slopes, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "blocked", "auto"])
@pytest.mark.parametrize("choice", [Softmax(), Entmax(1.5)], ids=str)
def test_its_tangent_is_that_of_the_definition(backend: str, choice: Choice, draw) -> None:
    at = tuple(x.detach() for x in inputs((2, 6, 4, 1), draw))
    moves = tuple(torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in at)

    def ours(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        return attend(q, k, v, beta=beta, choice=choice, prior=Causal(), scale=0.6, backend=backend)

    _, exact = jvp(lambda *x: definition(*x, choice), at, moves)
    torch.testing.assert_close(jvp(ours, at, moves)[1], exact, atol=1e-6, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_has_it_too(draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda _: flex_attention)
    at = [x.detach() for x in inputs((2, 6, 4, 1), draw)]
    *qkv, beta = at
    ours = attend(*qkv, beta=beta, prior=Causal(), scale=0.6, backend="flex")
    torch.testing.assert_close(ours, definition(*at, Softmax()), atol=1e-6, rtol=1e-6)


def test_kernels_have_it_in_the_interpreter(draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tangent, "runs_on", lambda _: True)
    wide = [x.detach().requires_grad_() for x in inputs((2, 6, 4, 1), draw)]
    at = [x.detach().float().requires_grad_() for x in wide]
    for backend, choice in (("tangent", Softmax()), ("triton", Entmax(1.5))):
        *qkv, beta = at
        ours = attend(*qkv, beta=beta, choice=choice, prior=Causal(), scale=0.6, backend=backend)
        exact = definition(*wide, choice)
        torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-5)
        slopes = torch.autograd.grad(ours.square().sum(), at)
        wanted = torch.autograd.grad(exact.square().sum(), wide)
        torch.testing.assert_close([x.double() for x in slopes], [*wanted], atol=1e-4, rtol=1e-4)


def test_llama_4_and_ministral_3_have_these_steps() -> None:
    positions = torch.tensor([0, 1, 98, 99, 100, 199, 12345])
    theirs = get_llama_4_attn_scale(positions[None], 0.3, 100)
    ours = stepped_length(positions, 0.3, 100, offset=0)
    torch.testing.assert_close(ours.view(-1), theirs.view(-1))
    by_hand = [1.0 + 0.3 * math.log(1 + (m + 1) // 100) for m in positions.tolist()]
    torch.testing.assert_close(stepped_length(positions, 0.3, 100).view(-1), torch.tensor(by_hand))


def test_scalable_softmax_is_a_softmax_to_the_base_n(draw) -> None:
    q, k, v = draw(2, 6, 7, 5), draw(2, 6, 7, 5), draw(2, 6, 7, 3)
    s = draw(6).exp()
    beta = log_length(torch.arange(7).double(), s)
    assert beta.shape == (6, 7, 1)
    ours = attend(q, k, v, prior=Causal(), beta=beta)
    z = q @ k.mT / 5**0.5
    for t in range(7):
        powers = float(t + 1) ** (s.view(-1, 1) * z[:, :, t, : t + 1])
        exact = (powers / powers.sum(-1, keepdim=True)).unsqueeze(-2) @ v[:, :, : t + 1]
        torch.testing.assert_close(ours[:, :, t], exact.squeeze(-2))


def test_the_best_keys_share_fades_with_a_fixed_temperature_and_stays_with_log_n() -> None:
    shares = []
    for n in (16, 1024):
        z = torch.zeros(1, n)
        z[0, 0] = 1.0
        beta = 3.0 * log_length(torch.tensor([n - 1])).view(1, 1)
        shares.append([float(Softmax(b).weights(z)[0, 0]) for b in (1.0, beta)])
    assert shares[1][0] < shares[0][0] / 10
    assert shares[1][1] > shares[0][1] > 0.98


def test_asentmax_and_inkling_by_hand() -> None:
    positions, b, gamma = torch.tensor([[0, 7], [3, 99]]), torch.tensor([0.5, 2.0]), 1.5
    found = adaptive_length(positions, b, gamma, delta=0.8)
    assert found.shape == (2, 2, 2, 1)
    assert found[1, 1, 1, 0].item() == pytest.approx(0.8 + 2.0 * math.log(100) ** 1.5)
    per_token = torch.rand(2, 2, 2, generator=torch.Generator().manual_seed(0))
    assert adaptive_length(positions, per_token, per_token).shape == (2, 2, 2, 1)
    inkling = ratio_length(positions, 0.1, 20.0)
    assert inkling[1, 0, 1, 0].item() == pytest.approx(1.0 + 0.1 * math.log(5.0))
    assert inkling[0, 0, 0, 0].item() == 1.0


def test_bad_input_gets_one_sentence(draw) -> None:
    q = draw(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"beta broadcasts to \(B, H, T, 1\)"):
        attend(q, q, q, beta=torch.ones(3))
    with pytest.raises(ValueError, match="has no temperature"):
        attend(q, q, q, choice=Hard(), beta=2.0)
    with pytest.raises(ValueError, match="0 < beta"):
        attend(q, q, q, beta=torch.zeros(3, 1))
    with pytest.raises(ValueError, match=r"positions have the shape"):
        log_length(torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match=r"one number per head"):
        log_length(torch.zeros(3), torch.zeros(2, 2))
    assert "a number, not a tensor" in (
        backend_support(q, q, q, beta=torch.ones(3, 1), softcap=2.0)["blocked"] or ""
    )
