"""fenchel/attention/forget.py: gates between a key and a query, against sums written out."""

import pytest
import torch
from torch import Tensor

from fenchel.attention import ALiBi, Causal, Forget, attend, backend_support
from fenchel.attention.bias import slope
from fenchel.choice import Choice, Entmax, Softmax


def by_hand(log_f: Tensor, T: int) -> Tensor:
    """log u of the last T queries, summed gate by gate: (B, H, T, S)."""
    B, H, S = log_f.shape
    rows = []
    for i in range(S - T, S):
        row = [
            log_f[..., j + 1 : i + 1].sum(-1) if j <= i else log_f.new_full((B, H), -torch.inf)
            for j in range(S)
        ]
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, -2)


@pytest.mark.parametrize("T", [1, 4, 7])
@pytest.mark.parametrize("shape", [(2, 3, 7), (1, 3, 7), (3, 7), (1, 7)], ids=str)
def test_it_is_the_sum_of_the_gates_between(T: int, shape: tuple[int, ...], draw) -> None:
    log_f = -draw(*shape).abs()
    wide = (log_f if log_f.dim() == 3 else log_f[None]).expand(2, 3, 7)
    found = Forget(log_f).log(T, 7, B=2, H=3, dtype=torch.float64).expand(2, 3, T, 7)
    torch.testing.assert_close(found, by_hand(wide, T))


@pytest.mark.parametrize(
    ("backend", "choice"),
    [
        (backend, choice)
        for choice in (Softmax(), Entmax(1.5))
        for backend in ("reference", "blocked", "sdpa", "auto")
        if backend != "sdpa" or isinstance(choice, Softmax)
    ],
    ids=repr,
)
def test_its_gates_learn(backend: str, choice: Choice, draw) -> None:
    at = [draw(2, 6, 4, 5), draw(2, 3, 7, 5), draw(2, 3, 7, 5), -draw(2, 6, 7).abs()]
    q, k, v, log_f = (x.requires_grad_() for x in at)
    ours = attend(q, k, v, choice=choice, prior=Forget(log_f), backend=backend)
    z = q @ k.repeat_interleave(2, 1).mT / 5**0.5
    exact = choice.weights(z, by_hand(log_f, 4)) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(ours, exact, atol=1e-7, rtol=1e-7)
    slopes = [torch.autograd.grad(x.square().sum(), at) for x in (ours, exact)]
    torch.testing.assert_close(*slopes, atol=1e-6, rtol=1e-6)


def test_constant_gates_are_alibi_and_gates_of_one_are_causal(draw) -> None:
    q, k, v = draw(1, 4, 6, 5), draw(1, 4, 6, 5), draw(1, 4, 6, 3)
    m = slope(torch.arange(4), 4).double()
    ours = attend(q, k, v, prior=Forget(-m.view(4, 1).expand(4, 6)))
    torch.testing.assert_close(ours, attend(q, k, v, prior=ALiBi(4) + Causal()))
    ones = torch.zeros(4, 6, dtype=torch.float64)
    torch.testing.assert_close(attend(q, k, v, prior=Forget(ones)), attend(q, k, v, prior=Causal()))


def test_beside_a_sink_what_is_forgotten_goes_to_the_sink(draw) -> None:
    q, k, v = draw(1, 2, 5, 4), draw(1, 2, 5, 4), draw(1, 2, 5, 4)
    log_f = torch.zeros(2, 5, dtype=torch.float64)
    log_f[:, 3] = -50.0  # token 3 forgets all before it
    _, p = attend(q, k, v, prior=Forget(log_f), sink=0.0, return_weights=True)
    assert (p[..., 3, :3] < 1e-15).all()
    assert (p[..., 3, 3] < 0.999).all()


def test_bad_input_and_kernels_without_it_get_one_sentence(draw) -> None:
    q = draw(1, 2, 4, 3)
    with pytest.raises(ValueError, match=r"do not fit B, H = 1, 2 and 4 queries on 4 keys"):
        attend(q, q, q, prior=Forget(torch.zeros(2, 5)))
    with pytest.raises(ValueError, match=r"a forget gate is log f of every key"):
        Forget(torch.zeros(4))
    q = q.float()
    refused = backend_support(q, q, q, choice="entmax", prior=Forget(torch.zeros(2, 4)))
    assert "no prior of the kind Forget" in (refused["triton"] or "")
