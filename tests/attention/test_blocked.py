"""fenchel/attention/blocked.py: what learns besides q, k, v; dropout; memory.

The laws it shares with the other back ends are in test_contract.py.
"""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from fenchel.attention import ALiBi, Causal, Dense, Padding, RelativeBias, attend, tiles
from fenchel.choice import Choice, Entmax, Softmax, Sparsemax

QKV = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def _tiny_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_CACHED", 50)
    monkeypatch.setattr(tiles, "_FEWEST_ROWS", 3)


def both(make, learned: list[Tensor], order: int) -> None:
    """Derivatives of ``order`` 1 or 2 and tangents in ``learned``, blocked against reference."""
    found = []
    for backend in ("reference", "blocked"):
        out = make(*learned, backend)
        slopes = torch.autograd.grad(out.square().sum(), learned, create_graph=order == 2)
        if order == 2:
            slopes = torch.autograd.grad(sum(x.square().sum() for x in slopes), learned)
        tangents = tuple(torch.cos(torch.arange(x.numel()).to(x)).view_as(x) for x in learned)
        _, tangent = torch.func.jvp(
            lambda *x, b=backend: make(*x, b), tuple(x.detach() for x in learned), tangents
        )
        found.append((*slopes, tangent))
        assert all(x.abs().max() > 1e-4 for x in found[-1])
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("choice", [Softmax, Entmax, Sparsemax], ids=lambda c: c.__name__)
def test_a_temperature_learns(qkv: QKV, choice: type[Choice], order: int) -> None:
    for shape in ((), (6, 1, 1), (2, 6, 4, 1)):
        beta = torch.full(shape, 1.3, dtype=torch.float64, requires_grad=True)
        both(lambda b, backend: attend(*qkv, choice=choice(beta=b), backend=backend), [beta], order)


@pytest.mark.parametrize("order", [1, 2])
def test_an_exponent_learns(qkv: QKV, order: int) -> None:
    for shape in ((), (6, 1, 1)):
        alpha = torch.full(shape, 1.4, dtype=torch.float64, requires_grad=True)
        both(lambda a, backend: attend(*qkv, choice=Entmax(a), backend=backend), [alpha], order)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("choice", [Softmax(), Entmax(1.5)], ids=repr)
def test_a_prior_learns(qkv: QKV, draw, choice: Choice, order: int) -> None:
    dense = draw(6, 4, 7).requires_grad_()
    table = draw(8, 6).requires_grad_()

    def with_both(dense: Tensor, table: Tensor, backend: str) -> Tensor:
        prior = Causal() + Dense(dense) + Padding(torch.tensor([7, 5])) + RelativeBias(table)
        return attend(*qkv, choice=choice, prior=prior, backend=backend)

    both(with_both, [dense, table], order)


def test_it_passes_the_finite_difference_checks(draw) -> None:
    at = tuple(draw(*s).requires_grad_() for s in ((1, 2, 4, 2), (1, 1, 5, 2), (1, 1, 5, 2)))
    for choice in (Softmax(), Entmax(1.5)):

        def f(q: Tensor, k: Tensor, v: Tensor, c: Choice = choice) -> Tensor:
            return attend(q, k, v, choice=c, prior=Causal() + ALiBi(2), backend="blocked")

        assert gradcheck(f, at, check_forward_ad=True, fast_mode=True)
        assert gradgradcheck(f, at, fast_mode=True)


def test_dropout_draws_the_same_mask_in_both_directions(qkv: QKV) -> None:
    q, k, v = (x.requires_grad_() for x in qkv)
    call = {"choice": Entmax(1.5), "dropout": 0.4, "backend": "blocked"}
    torch.manual_seed(3)
    out = attend(q, k, v, **call)
    torch.manual_seed(3)
    assert torch.equal(out, attend(q, k, v, **call))
    assert not torch.equal(out, attend(q, k, v, **call))
    # o is linear in v for a fixed mask, so <grad, v> = <g, o> only if the masks agree
    (slope,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close((slope * v).sum(), out.sum())
    many = [x[:1].detach().expand(300, -1, -1, -1) for x in (q, k, v)]
    mean = attend(*many, **call).mean(0)
    torch.testing.assert_close(
        mean, attend(*(x[0] for x in many), choice=Entmax(1.5)), atol=0.3, rtol=0
    )


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.entries = max(self.entries, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("choice", [Softmax(), Entmax(1.5), Entmax(1.25)], ids=repr)
def test_memory_grows_with_the_length_and_not_with_its_square(
    choice: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "_CACHED", 1 << 9)
    largest = {}
    for n in (64, 128):
        q = torch.randn(1, 2, n, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with Largest() as seen:
            out = attend(q, q, q, choice=choice, prior=Causal(), backend="blocked")
            (slope,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
            torch.autograd.grad(slope.square().sum(), q)
            torch.func.jvp(
                lambda q: attend(q, q, q, choice=choice, backend="blocked"),
                (q.detach(),),
                (q.detach(),),
            )
        largest[n] = seen.entries
    assert largest[128] <= 2.1 * largest[64]
    assert largest[128] < 128 * 128 / 2


@pytest.mark.parametrize("backend", ["reference", "blocked", "sdpa"])
def test_the_online_recurrence_over_blocks_of_keys_is_exact(backend: str, draw) -> None:
    """The running maximum, sum and numerator of FlashAttention, 16 keys at a time."""
    q, k, v = draw(1, 1, 5, 8), draw(1, 1, 64, 8), draw(1, 1, 64, 3)
    m, total, acc = torch.full((5, 1), -torch.inf).double(), torch.zeros(5, 1), torch.zeros(5, 3)
    for s in range(0, 64, 16):
        S = q[0, 0] @ k[0, 0, s : s + 16].mT / 8**0.5
        new = torch.maximum(m, S.amax(-1, keepdim=True))
        weight = (S - new).exp()
        total = total * (m - new).exp() + weight.sum(-1, keepdim=True)
        acc = acc * (m - new).exp() + weight @ v[0, 0, s : s + 16]
        m = new
    ours = attend(q, k, v, backend=backend)[0, 0]
    assert (ours - acc / total).abs().max() <= 2e-15
