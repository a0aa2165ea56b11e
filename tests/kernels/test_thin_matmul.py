"""fenchel/kernels/thin_matmul.py against plain operations."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from fenchel.generation.plain_decoder import MLPS
from fenchel.kernels import thin_matmul as page
from fenchel.kernels.thin_matmul import (
    LaunchShape,
    NormWeights,
    activate,
    gated_matmul,
    launch_shape,
    matmul,
    matmul_add,
)
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


def normalise(x: Tensor, norm: NormWeights) -> Tensor:
    """The norm by plain operations: (..., M) -> (..., M), the dtype of x."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    if norm.centred:
        y = y - y.mean(-1, keepdim=True)
    y = y * (y.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt() * norm.gain
    return (y if norm.shift is None else y + norm.shift).to(x.dtype)


def norms(draw: Draw, K: int) -> list[NormWeights]:
    return [
        NormWeights(draw(K), None, EPSILON, centred=False),
        NormWeights(draw(K), draw(K), EPSILON, centred=True),
        NormWeights(draw(K), None, EPSILON, centred=True),
    ]


def test_the_norm_is_torchs(draw: Draw) -> None:
    x, (rms, layer, _) = 3.0 + draw(4, 33), norms(draw, 33)
    assert rms.shift is None
    torch.testing.assert_close(normalise(x, rms), rms_norm(x, (33,), rms.gain, EPSILON))
    wanted = layer_norm(x, (33,), layer.gain, layer.shift, EPSILON)
    torch.testing.assert_close(normalise(x, layer), wanted)


@every_size
def test_a_product_is_that_of_the_normalised_row(B: int, K: int, N: int, draw: Draw) -> None:
    x, W, b = 1.0 + draw(B, K), draw(N, K), draw(N)
    for norm in (None, *norms(draw, K)):
        y = x if norm is None else normalise(x, norm)
        for bias in (None, b):
            found = torch.full_like(y[:, :1].expand(B, N), torch.nan)
            matmul(x, W, bias, found, norm=norm)
            wanted = y @ W.t() if bias is None else y @ W.t() + bias
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@every_size
def test_a_branch_is_added_to_the_stream_in_place(B: int, K: int, N: int, draw: Draw) -> None:
    stream, x, W, b = draw(B, N), draw(B, K), draw(N, K), draw(N)
    for bias in (None, b):
        wanted = stream + x @ W.t() + (0.0 if bias is None else bias)
        matmul_add(stream, x, W, bias)
        torch.testing.assert_close(stream, wanted, atol=1e-4, rtol=1e-4)
    steer, wanted = draw(B, N), wanted + x @ W.t()
    matmul_add(stream, x, W, None, steer_BN=steer)
    torch.testing.assert_close(stream, wanted + steer, atol=1e-4, rtol=1e-4)


@every_size
@pytest.mark.parametrize("activation", sorted(MLPS))
def test_a_gated_product_is_the_activation_of_one_times_the_other(
    activation: str, B: int, K: int, N: int, draw: Draw
) -> None:
    x, V, W, b, c = draw(B, K), draw(N, K), draw(N, K), draw(N), draw(N)
    norm, f = norms(draw, K)[1], ACTIVATIONS[activation]
    y = normalise(x, norm)
    up, gate = y @ W.t() + c, y @ V.t() + b
    for made, wanted in (((V, b), f(gate) * up), (None, f(up))):
        found = torch.empty(B, N, device=x.device)
        gated_matmul(x, made, (W, c), found, activation=activation, norm=norm)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    found = torch.empty(B, N, device=x.device)
    gated_matmul(x, (V, None), (W, None), found, activation=activation, norm=norm)
    torch.testing.assert_close(found, f(gate - b) * (up - c), atol=1e-4, rtol=1e-4)


def test_half_precision_is_rounded_where_the_operations_round(draw: Draw) -> None:
    # In float16: Triton's interpreter cuts bfloat16 off where a device rounds.
    x, W, stream = (draw(*s).half() for s in ((2, 96), (10, 96), (2, 10)))
    norm = NormWeights(draw(96).half(), None, EPSILON, centred=False)
    found = torch.empty_like(stream)
    matmul(x, W, None, found, norm=norm)
    exact = normalise(x, norm).double() @ W.double().t()
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=2**-11)
    wanted = stream + (x.double() @ W.double().t()).half()
    steered, steer = stream.clone(), draw(2, 10).half()
    matmul_add(stream, x, W, None)
    assert torch.equal(stream, wanted)
    matmul_add(steered, x, W, None, steer_BN=steer)
    assert torch.equal(steered, wanted + steer)  # as by an addition of its own


@pytest.mark.parametrize("cut", [LaunchShape(1, 256, 1), LaunchShape(8, 64, 2)])
def test_how_it_is_cut_changes_nothing(
    cut: LaunchShape, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "launch_shape", lambda K, *, matrices=1: cut)  # noqa: ARG005
    x, W = draw(2, 50), draw(11, 50)
    found = torch.empty(2, 11, device=x.device)
    matmul(x, W, None, found)
    torch.testing.assert_close(found, x @ W.t(), atol=1e-4, rtol=1e-4)


def test_a_thread_issues_sixteen_loads_for_every_shape() -> None:
    assert launch_shape(2048) == LaunchShape(rows=8, block=2048, warps=4)
    assert launch_shape(2048, matrices=2) == LaunchShape(rows=4, block=2048, warps=4)
    assert launch_shape(5632) == LaunchShape(rows=4, block=8192, warps=8)
    for K in (64, 300, 1024, 4096, 14336, 28672):
        cut = launch_shape(K)
        assert cut.block >= K
        per_thread = cut.rows * cut.block // (32 * cut.warps)
        assert per_thread <= page.PER_THREAD or cut.rows == 1


@every_size
def test_norms_and_activations_of_whole_rows(B: int, K: int, N: int, draw: Draw) -> None:
    """The same numbers as inside the products, in kernels of their own."""
    x, up, gate = draw(B, K), draw(B, N), draw(B, N)
    for norm in norms(draw, K):
        y = torch.full_like(x, torch.nan)
        page.normalise(x, norm, y)
        torch.testing.assert_close(y, normalise(x, norm))
    for name, f in (("swiglu", torch.nn.functional.silu), ("gelu", torch.nn.functional.gelu)):
        y = torch.full_like(up, torch.nan)
        gated = name == "swiglu"
        activate(gate if gated else None, up, y, activation=name)
        torch.testing.assert_close(y, f(gate) * up if gated else f(up))
