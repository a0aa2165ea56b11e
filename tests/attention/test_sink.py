"""fenchel/attention/sink.py and kernels/sink_factor.py: a sink as a factor of attention."""

import math

import pytest
import torch
from torch import Tensor

from fenchel.attention import sink
from fenchel.attention.sink import with_sink_factor
from fenchel.kernels import sink_factor

WILD = [0.0, 3.0, -3.0, 90.0, -90.0, math.inf, -math.inf]


def drawn(device: str, B: int, H: int, T: int, E: int, *, swapped: bool) -> tuple[Tensor, ...]:
    """o and go (B, H, T, E), in memory as heads within positions if ``swapped``, lse and r."""
    generator = torch.Generator().manual_seed(0)

    def values() -> Tensor:
        x = torch.randn(B, T, H, E, generator=generator).transpose(1, 2)
        return (x if swapped else x.contiguous()).to(device)

    lse = 4.0 * torch.randn(B, H, T, generator=generator)
    lse.view(-1)[: len(WILD)] = torch.tensor(WILD)
    lse[:, :, -1] = -math.inf
    r = torch.linspace(-2.0, 3.0, H).view(1, H, 1).expand(B, H, T)
    return values(), values(), lse.to(device), r.to(device)


def definition(o: Tensor, lse: Tensor, r: Tensor) -> Tensor:
    """Z / (Z + e^r) o, in float64; 0 for a query without a key."""
    share = torch.sigmoid(lse.double() - r.double())
    return torch.where(lse == -math.inf, 0.0, share).unsqueeze(-1) * o.double()


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("T", "E"), [(5, 16), (130, 64), (33, 24)])
def test_the_kernels_give_outputs_normalisers_and_gradients(
    device: str, T: int, E: int, swapped: bool
) -> None:
    o, go, lse, r = drawn(device, 2, 3, T, E, swapped=swapped)
    out = torch.empty_like(o)
    total = sink_factor.apply_sink(o, lse, r, out)
    exact = definition(o, lse, r)
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(total, torch.logaddexp(lse, r), rtol=1e-6, atol=1e-6)
    gr, g_o = sink_factor.sink_gradients(go, out, lse, r, of_o=True)
    rest = torch.sigmoid(r.double() - lse.double())
    m = torch.where(lse == -math.inf, 0.0, (go.double() * exact).sum(-1))
    torch.testing.assert_close(gr.double(), -rest * m, rtol=1e-5, atol=1e-6)
    assert g_o is not None
    torch.testing.assert_close(g_o.double(), definition(go, lse, r), rtol=1e-6, atol=1e-7)
    same = o.clone()
    sink_factor.apply_sink(same, lse, r, same)  # in place
    assert torch.equal(same, out)


@pytest.mark.parametrize("kernels", [False, True])
def test_derivatives_are_those_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, device: str, kernels: bool
) -> None:
    monkeypatch.setattr(sink, "_has_kernel", lambda _: kernels)
    o, go, lse, r = drawn(device, 2, 3, 9, 16, swapped=True)
    lse = lse.clamp(-50.0, 50.0)  # where the definition has derivatives too
    at = [o.requires_grad_(), lse.requires_grad_(), r.clone().requires_grad_()]
    out = with_sink_factor(*at)
    found = torch.autograd.grad(out, at, go)
    wanted = torch.autograd.grad(definition(*at), at, go.double())
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


def test_without_gradients_the_outputs_take_no_more_memory(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(sink, "_has_kernel", lambda _: True)
    o, _, lse, r = drawn(device, 1, 2, 7, 16, swapped=False)
    exact = definition(o, lse, r)
    out = with_sink_factor(o, lse, r)
    assert out.data_ptr() == o.data_ptr()
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-7)
