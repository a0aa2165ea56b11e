"""fenchel/attention/derivative.py: both directions against autograd, and worked numbers."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from fenchel.attention import Causal, Dense, Padding, Prior, attend, attend_jvp, attend_vjp
from fenchel.choice import Choice, Entmax, Softmax, Sparsemax

QKV = tuple[Tensor, Tensor, Tensor]
every_choice = pytest.mark.parametrize(
    "choice", [Softmax(), Softmax(2.5), Entmax(1.5), Sparsemax(0.7)], ids=repr
)
PRIORS = {
    "none": None,
    "causal": Causal(),
    "empty row": Padding(torch.tensor([0, 5])),
    "dense": Dense(torch.randn(6, 4, 7, generator=torch.Generator().manual_seed(3))),
}
every_prior = pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())


@every_choice
@every_prior
def test_a_move_is_the_tangent_of_autograd(
    qkv: QKV, draw, choice: Choice, prior: Prior | None
) -> None:
    tangents = tuple(draw(*x.shape) for x in qkv)

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, choice=choice, prior=prior, scale=0.6, backend="reference")

    _, tangent = torch.func.jvp(f, qkv, tangents)
    ours = attend_jvp(qkv, tangents, choice=choice, prior=prior, scale=0.6)
    torch.testing.assert_close(ours.total, tangent)


def test_the_two_causes_are_kept_apart(qkv: QKV, draw) -> None:
    dq, dk, dv = (draw(*x.shape) for x in qkv)
    choice = Softmax()
    whole = attend_jvp(qkv, (dq, dk, dv), choice=choice)
    still = attend_jvp(qkv, (dq, dk, None), choice=choice)
    mixed = attend_jvp(qkv, (None, None, dv), choice=choice)
    torch.testing.assert_close(still.choosing, whole.choosing)
    torch.testing.assert_close(mixed.values, whole.values)
    assert (still.values == 0).all()
    assert (mixed.choosing == 0).all()


@every_choice
@every_prior
def test_the_written_gradients_are_those_of_autograd(
    qkv: QKV, draw, choice: Choice, prior: Prior | None
) -> None:
    q, k, v = (x.requires_grad_() for x in qkv)
    g = draw(2, 6, 4, 3)
    out = attend(q, k, v, choice=choice, prior=prior, backend="reference")
    ours = attend_vjp((q, k, v), g, choice=choice, prior=prior)
    torch.testing.assert_close(tuple(ours[:3]), torch.autograd.grad(out, (q, k, v), g))
    assert [x.shape for x in ours[:3]] == [x.shape for x in qkv]
    torch.testing.assert_close(ours.scores.sum(-1), torch.zeros(2, 6, 4, dtype=torch.float64))


def test_the_worked_backward_pass() -> None:
    q = torch.tensor([[1.0, 0, 1], [0, 1, 1]], dtype=torch.float64)
    k = torch.tensor([[1.0, 1, 0], [1, 0, 1]], dtype=torch.float64)
    v = torch.tensor([[2.0, 0, 1], [1, 1, 0]], dtype=torch.float64)
    g = torch.tensor([[1.0, 0, 1], [0, 1, 0]], dtype=torch.float64)
    found = attend_vjp((q, k, v), g, choice=Softmax())

    def rounded(x: Tensor, places: int = 4) -> list[list[float]]:
        return (x.round(decimals=places) + 0.0).tolist()

    assert rounded(found.v, 3) == [[0.360, 0.5, 0.360], [0.640, 0.5, 0.640]]
    assert rounded(found.weights) == [[3, 1], [0, 1]]
    assert rounded(found.scores) == [[0.4605, -0.4605], [-0.25, 0.25]]
    assert rounded(found.q) == [[0, 0.2659, -0.2659], [0, -0.1443, 0.1443]]
    assert rounded(found.k) == [[0.2659, -0.1443, 0.1216], [-0.2659, 0.1443, -0.1216]]


def test_attention_passes_a_finite_difference_check(draw) -> None:
    q, k, v = (draw(*s).requires_grad_() for s in ((1, 2, 3, 4), (1, 1, 5, 4), (1, 1, 5, 2)))
    for choice in (Softmax(), Entmax(1.5)):
        assert gradcheck(
            lambda q, k, v, c=choice: attend(
                q, k, v, choice=c, prior=Causal(), backend="reference"
            ),
            (q, k, v),
            check_forward_ad=True,
        )


def test_a_move_of_another_shape_is_refused(qkv: QKV) -> None:
    _, k, v = qkv
    with pytest.raises(ValueError, match="its tensor's shape"):
        attend_jvp(qkv, (k, k, v), choice=Softmax())


def test_a_gradient_of_sparsemax_is_that_of_the_support_which_rounding_chose() -> None:
    """A key at the edge of the support, where the derivative jumps."""
    other = 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        k, v, g = (torch.randn(1, 1, 5, 4, generator=generator) for _ in range(3))
        q = 3.0 * torch.randn(1, 1, 1, 4, generator=generator)
        z = (q.double() @ k.double().mT)[0, 0, 0] / 2
        inside = Sparsemax().weights(z) > 0
        if inside.all():
            continue
        tau, edge = (z[inside].sum() - 1) / inside.sum(), int((~inside).nonzero()[0])
        k[0, 0, edge] += q[0, 0, 0] * float((tau - z[edge]) * 2 / q.double().square().sum())
        q.requires_grad_()
        out, p = attend(q, k, v, choice=Sparsemax(), return_weights=True)
        (found,) = torch.autograd.grad((out * g[:, :, :1]).sum(), q)
        support = p[0, 0, 0] > 0
        c = (v.double() @ g.double()[:, :, :1].mT)[0, 0, :, 0]
        exact = torch.where(support, c - c[support].mean(), 0.0) @ k.double()[0, 0] / 2
        torch.testing.assert_close(found[0, 0, 0].double(), exact, rtol=1e-4, atol=1e-5)
        z = (q.detach().double() @ k.double().mT)[0, 0, 0] / 2
        other += bool(((Sparsemax().weights(z) > 0) != support).any())
    assert other > 0  # some of them are on the other side
