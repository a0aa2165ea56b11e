"""sensitivity/attention_jacobian.py and every operator's float32 form: the same map, rounded."""

import pytest
import torch

from fenchel.attention import Causal, Prior
from fenchel.choice import Choice, Entmax, Softmax
from fenchel.sensitivity import self_attention_jacobian
from fenchel.sensitivity.attention_jacobian import OneHead


@pytest.mark.parametrize("choice", [Softmax(), Entmax(1.5, beta=2.0)])
@pytest.mark.parametrize("prior", [None, Causal()])
@pytest.mark.parametrize(("heads", "width"), [((), 6), ((), 40), ((3,), 6)])
def test_the_float32_form_is_the_operator_itself(
    choice: Choice, prior: Prior | None, heads: tuple[int, ...], width: int
) -> None:
    g = torch.Generator().manual_seed(0)
    X = torch.randn(11, width, generator=g, dtype=torch.float64)
    W = [torch.randn(*heads, width, 5, generator=g, dtype=torch.float64) / 2 for _ in range(3)]
    W[2] = W[2][..., :4]
    J = self_attention_jacobian(X, *W, choice=choice, prior=prior)
    single = J.single()
    assert single is not None
    assert isinstance(single, OneHead) == (not heads and width == 6)
    m, n = J.shape
    v, u = torch.randn(3, n, generator=g), torch.randn(3, m, generator=g)
    for stack in (slice(0, 1), slice(0, 3)):
        for ours, exact, x in (
            (single.apply, J.apply, v[stack]),
            (single.adjoint, J.adjoint, u[stack]),
        ):
            wanted = exact(x.double())
            assert (ours(x).double() - wanted).norm() <= 1e-5 * wanted.norm()
            assert ours(x).dtype == torch.float32
