"""fenchel/attention/bias.py: weights that may sum to less than one."""

import pytest
import torch
from torch import Tensor

from fenchel.attention import ALiBi, Causal, Dense, Padding, Prior, Sink, Window, attend, with_sink
from fenchel.choice import Choice, Entmax, Softmax, Sparsemax

PRIORS: dict[str, Prior | None] = {
    "none": None,
    "causal": Causal(),
    "window": Window(1, 0),
    "padding": Padding(torch.tensor([5, 0])) + Causal(),
    "bias": ALiBi(6) + Causal(),
    "dense": Dense(torch.randn(6, 4, 7, generator=torch.Generator().manual_seed(3))),
}
every_prior = pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())


@every_prior
@pytest.mark.parametrize("choice", [Softmax(), Entmax(1.5), Sparsemax()], ids=repr)
@pytest.mark.parametrize("backend", ["reference", "blocked", "auto"])
def test_it_is_one_more_column_that_is_thrown_away(
    qkv: tuple[Tensor, Tensor, Tensor], backend: str, choice: Choice, prior: Prior | None, draw
) -> None:
    q, k, v = qkv
    r = draw(6).requires_grad_()
    ours = attend(
        q, *with_sink(k, v), choice=choice, prior=Sink(r, prior), scale=0.6, backend=backend
    )
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    z = 0.6 * q @ k.mT
    if prior is not None:
        z = z + prior.log(4, 7, B=2, H=6, dtype=z.dtype)
    row = torch.cat([r.view(1, 6, 1, 1).expand(2, 6, 4, 1), z], -1)
    exact = choice.weights(row)[..., 1:] @ v
    torch.testing.assert_close(ours, exact)
    slopes = [torch.autograd.grad(x.square().sum(), r)[0] for x in (ours, exact)]
    torch.testing.assert_close(*slopes, atol=1e-6, rtol=1e-6)


def test_under_softmax_it_shrinks_the_outputs(qkv: tuple[Tensor, Tensor, Tensor], draw) -> None:
    q, k, v = qkv
    r = draw(6)
    Z = (q @ k.repeat_interleave(2, 1).mT / 5**0.5).exp().sum(-1, keepdim=True)
    share = Z / (Z + r.exp().view(1, 6, 1, 1))
    ours = attend(q, *with_sink(k, v), prior=Sink(r))
    torch.testing.assert_close(ours, share * attend(q, k, v))


def test_a_sink_far_below_takes_nothing(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = qkv
    none = torch.full((6,), -torch.inf, dtype=q.dtype)
    ours = attend(q, *with_sink(k, v), prior=Sink(none, Causal()))
    torch.testing.assert_close(ours, attend(q, k, v, prior=Causal()))


def test_the_number_of_heads_must_fit(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = qkv
    with pytest.raises(ValueError, match="a sink has scores for 5 heads"):
        attend(q, *with_sink(k, v), prior=Sink(torch.zeros(5)))
    with pytest.raises(ValueError, match="one score per head"):
        Sink(torch.zeros(2, 3))
