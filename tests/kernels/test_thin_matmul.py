"""fenchel/kernels/thin_matmul.py against the operations it stands for."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from fenchel.kernels import thin_matmul as page
from fenchel.kernels.thin_matmul import Launch, Norm, gated, launch, normed, onto, product
from fenchel.model.mlp import ACTIVATIONS

Draw = Callable[..., Tensor]
SIZES = [(1, 64, 13), (3, 48, 20), (8, 7, 5)]
"""B, K, N: whole blocks and parts of them, rows that do and do not fill the last program."""
every_size = pytest.mark.parametrize(("B", "K", "N"), SIZES)
EPSILON = 0.03


@pytest.fixture
def draw(device: str) -> Draw:
    """Normal numbers, other ones at every call."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device)


def norms(draw: Draw, K: int) -> list[Norm]:
    return [
        Norm(draw(K), None, EPSILON, centred=False),
        Norm(draw(K), draw(K), EPSILON, centred=True),
        Norm(draw(K), None, EPSILON, centred=True),
    ]


def test_the_norm_is_torchs(draw: Draw) -> None:
    x, (rms, layer, _) = 3.0 + draw(4, 33), norms(draw, 33)
    assert rms.shift is None
    torch.testing.assert_close(normed(x, rms), rms_norm(x, (33,), rms.gain, EPSILON))
    wanted = layer_norm(x, (33,), layer.gain, layer.shift, EPSILON)
    torch.testing.assert_close(normed(x, layer), wanted)


@every_size
def test_a_product_is_of_the_normed_row(B: int, K: int, N: int, draw: Draw) -> None:
    x, W, b = 1.0 + draw(B, K), draw(N, K), draw(N)
    for norm in (None, *norms(draw, K)):
        y = x if norm is None else normed(x, norm)
        for bias in (None, b):
            found = torch.full_like(y[:, :1].expand(B, N), torch.nan)
            product(x, W, bias, found, norm=norm)
            wanted = y @ W.t() if bias is None else y @ W.t() + bias
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@every_size
def test_a_branch_is_added_to_the_stream_in_place(B: int, K: int, N: int, draw: Draw) -> None:
    stream, x, W, b = draw(B, N), draw(B, K), draw(N, K), draw(N)
    for bias in (None, b):
        wanted = stream + x @ W.t() + (0.0 if bias is None else bias)
        onto(stream, x, W, bias)
        torch.testing.assert_close(stream, wanted, atol=1e-4, rtol=1e-4)


@every_size
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_a_gate_bends_one_product_and_weighs_the_other(
    activation: str, B: int, K: int, N: int, draw: Draw
) -> None:
    x, V, W, b, c = draw(B, K), draw(N, K), draw(N, K), draw(N), draw(N)
    norm, f = norms(draw, K)[1], ACTIVATIONS[activation]
    y = normed(x, norm)
    up, gate = y @ W.t() + c, y @ V.t() + b
    for made, wanted in (((V, b), f(gate) * up), (None, f(up))):
        found = torch.empty(B, N, device=x.device)
        gated(x, made, (W, c), found, activation=activation, norm=norm)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    found = torch.empty(B, N, device=x.device)
    gated(x, (V, None), (W, None), found, activation=activation, norm=norm)
    torch.testing.assert_close(found, f(gate - b) * (up - c), atol=1e-4, rtol=1e-4)


def test_half_precision_is_rounded_where_the_operations_round(draw: Draw) -> None:
    # In float16: Triton's interpreter cuts bfloat16 off where a device rounds.
    x, W, stream = (draw(*s).half() for s in ((2, 96), (10, 96), (2, 10)))
    norm = Norm(draw(96).half(), None, EPSILON, centred=False)
    found = torch.empty_like(stream)
    product(x, W, None, found, norm=norm)
    exact = normed(x, norm).double() @ W.double().t()
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=2**-11)
    wanted = stream + (x.double() @ W.double().t()).half()
    onto(stream, x, W, None)
    assert torch.equal(stream, wanted)


@pytest.mark.parametrize("cut", [Launch(1, 256, 1), Launch(8, 64, 2)])
def test_how_it_is_cut_changes_nothing(
    cut: Launch, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "launch", lambda K, *, matrices=1: cut)  # noqa: ARG005
    x, W = draw(2, 50), draw(11, 50)
    found = torch.empty(2, 11, device=x.device)
    product(x, W, None, found)
    torch.testing.assert_close(found, x @ W.t(), atol=1e-4, rtol=1e-4)


def test_a_thread_asks_for_sixteen_loads_whatever_the_shape() -> None:
    assert launch(2048) == Launch(rows=8, block=2048, warps=4)
    assert launch(2048, matrices=2) == Launch(rows=4, block=2048, warps=4)
    assert launch(5632) == Launch(rows=4, block=8192, warps=8)
    for K in (64, 300, 1024, 4096, 14336, 28672):
        cut = launch(K)
        assert cut.block >= K
        held = cut.rows * cut.block // (32 * cut.warps)
        assert held <= page.HELD or cut.rows == 1
