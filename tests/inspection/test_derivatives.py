"""fenchel/inspection/linearisation.py: derivatives against torch's own, in float64."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian

from fenchel.attention import AttentionCall, AttentionSpec, Causal, Prior, Window, attend
from fenchel.choice import Choice, Entmax, Softmax
from fenchel.inspection import linearisation as held_file
from fenchel.inspection.linearisation import FrozenAttention, GraphJacobian, derivative

H, G, T, D, E = 4, 2, 7, 3, 5


def call(
    prior: Prior | None, choice: Choice, size: float = 1.0, softcap: float | None = None
) -> AttentionCall:
    draw = torch.Generator().manual_seed(0)
    shapes = ((1, H, T, D), (1, G, T, D), (1, G, T, E))
    q, k, v = (size * torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes)
    return AttentionCall(q, k, v, AttentionSpec(choice, prior, 0.5, softcap))


def exact(c: AttentionCall, x: Tensor) -> Tensor:
    """Attention of q, k, v that follow from x (7,)."""
    q, k, v = followed(c, x)
    how = dict(c.spec)
    return attend(q, k, v, **how, backend="reference")


def followed(c: AttentionCall, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    bend = torch.sin(x).sum()
    return c.q + bend * c.q.flip(-1), c.k * (1 + x[0]), c.v + x.view(1, 1, T, 1)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("prior", [None, Causal(), Window(2, 0)])
@pytest.mark.parametrize("choice", [Softmax(), Entmax(1.5)])
@pytest.mark.parametrize(("size", "softcap"), [(1.0, None), (12.0, None), (1.0, 0.6), (4.0, 9.0)])
def test_what_is_held_moves_as_attention_does(
    keep: bool,
    prior: Prior | None,
    choice: Choice,
    size: float,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_file, "_STRIP", 3)
    c = call(prior, choice, size, softcap)
    held = FrozenAttention(c, keep=keep)
    x = torch.zeros(T, dtype=torch.float64)
    J = GraphJacobian(lambda y: held(*followed(c, y)), x)
    wanted = jacobian(lambda y: exact(c, y), x).reshape(-1, T)
    torch.testing.assert_close(J.dense(), wanted, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(J.T.dense(), wanted.mT, rtol=1e-8, atol=1e-9)


def test_a_held_value_ignores_its_arguments() -> None:
    c = call(Causal(), Softmax())
    held = FrozenAttention(c, keep=True)
    out = exact(c, torch.zeros(T, dtype=torch.float64))
    torch.testing.assert_close(held(c.q + 1.0, c.k, c.v), out)


def test_a_graph_has_the_derivative_of_its_function() -> None:
    torch.manual_seed(0)
    f = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 4)).double()
    x = torch.randn(1, 3, 4, dtype=torch.float64)
    J = derivative(lambda y: y + f(y), x)
    wanted = jacobian(lambda y: y + f(y), x[0]).reshape(12, 12)
    torch.testing.assert_close(J.dense(), wanted)
    torch.testing.assert_close(J.T.dense(), wanted.mT)


def test_a_graph_to_numbers_that_are_no_stream_keeps_their_shape() -> None:
    x = torch.randn(1, 3, 4, dtype=torch.float64)
    J = derivative(lambda y: y[0, -1].cumsum(0), x)
    assert J.shape == (4, 12)
    assert (J @ torch.ones(3, 4)).shape == (4,)
