"""fenchel/kernels/cross_entropy.py against plain operations and against autograd."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from fenchel.kernels.cross_entropy import softmax_errors
from fenchel.train import loss as loss_module
from fenchel.train.loss import lm_head_loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("V", [2, 100, 4096, 5000])
def test_it_is_the_softmax_less_the_target(V: int, smoothing: float, device: str) -> None:
    g = torch.Generator().manual_seed(V)
    z = 3.0 * torch.randn(7, V, generator=g)
    z[0] += 1e4  # a large common shift changes nothing
    targets = torch.randint(V, (7,), generator=g)
    exact = z.double().requires_grad_()
    wanted = cross_entropy(exact, targets, reduction="none", label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad(wanted.sum(), exact)
    e = z.clone().to(device)
    loss = softmax_errors(e, targets.to(device), smoothing)
    tolerance = {"atol": 2e-3, "rtol": 1e-5}  # of 1e4 in float32
    torch.testing.assert_close(loss.cpu().double(), wanted.detach(), **tolerance)
    torch.testing.assert_close(e.cpu().double(), gradient, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(e[1:].cpu().double(), gradient[1:], atol=1e-6, rtol=1e-5)


def test_it_stays_in_its_rows_and_its_dtype(device: str) -> None:
    room = torch.full((4, 40), 7.0, dtype=torch.bfloat16, device=device)
    z = room[:3, :33]
    z.copy_(torch.randn(3, 33, generator=torch.Generator().manual_seed(0)))
    wanted = torch.softmax(z.float(), -1)
    softmax_errors(z, torch.full((3,), 40, device=device) % 33, 0.0)
    wanted[:, 7] -= 1.0
    torch.testing.assert_close(z.float(), wanted, atol=4e-3, rtol=8e-3)
    assert (room[3] == 7.0).all()
    assert (room[:, 33:] == 7.0).all()


@pytest.mark.parametrize("padded", [False, True])
def test_the_loss_through_it_has_the_gradient_of_the_operations(
    device: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator().manual_seed(0)
    found = {}
    for fused in (False, True):
        g.manual_seed(0)
        h = torch.randn(3, 11, 8, generator=g).to(device).requires_grad_()
        W = torch.randn(50, 8, generator=g).to(device).requires_grad_()
        targets = torch.randint(50, (3, 11), generator=g).to(device)
        if padded:
            targets[1, 3:] = -100
        monkeypatch.setattr(loss_module, "_fused", lambda _, fused=fused: fused)
        loss = lm_head_loss(h, W, targets, smoothing=0.1)
        found[fused] = (loss.detach(), *torch.autograd.grad(loss, (h, W)))
    for one, other in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
