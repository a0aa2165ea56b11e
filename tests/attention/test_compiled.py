"""Attention under torch.compile: whole graphs, right gradients, and no tangent lost on the way."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import jvp
from torch.torch_version import TorchVersion

from fenchel.attention import Causal, attend
from fenchel.choice import Choice, Softmax, Sparsemax
from fenchel.torch_internals import compile_error

TANGENTS_ENTER_GRAPHS = torch.__version__ < TorchVersion("2.14")
PAIRS = [("auto", Softmax()), ("blocked", Softmax()), ("auto", Sparsemax())]


@pytest.fixture(params=PAIRS, ids=str)
def plain(request: pytest.FixtureRequest):
    backend, choice = request.param

    def f(q: Tensor, k: Tensor, v: Tensor, backend: str = backend, c: Choice = choice) -> Tensor:
        return attend(q, k, v, choice=c, prior=Causal(), backend=backend)

    return f


@pytest.fixture
def at() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 8, 4, generator=generator) for _ in range(3)]


def compiled(f, *, fullgraph: bool = True):
    torch.compiler.reset()
    return torch.compile(f, backend="aot_eager", fullgraph=fullgraph)


def test_gradients_survive(plain, at) -> None:
    at = [x.requires_grad_() for x in at]
    out = compiled(plain)(*at)
    torch.testing.assert_close(out, plain(*at))
    ours = torch.autograd.grad(out.square().sum(), at)
    exact = torch.autograd.grad(plain(*at).square().sum(), at)
    torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5)


def test_tangents_inside_a_compiled_function_survive(plain, at) -> None:
    tangents = tuple(x.flip(-2) for x in at)
    _, exact = jvp(plain, tuple(at), tangents)
    assert exact.abs().max() > 0.1
    inside = compiled(lambda at, tangents: jvp(plain, at, tangents)[1])(tuple(at), tangents)
    torch.testing.assert_close(inside, exact, atol=1e-5, rtol=1e-5)


def test_tangents_through_a_compiled_function_survive(plain, at) -> None:
    tangents = tuple(x.flip(-2) for x in at)
    _, exact = jvp(plain, tuple(at), tangents)

    def tangent(f) -> Tensor | None:
        with forward_ad.dual_level():
            out = f(*map(forward_ad.make_dual, at, tangents))
            return forward_ad.unpack_dual(out).tangent

    if TANGENTS_ENTER_GRAPHS:
        torch.testing.assert_close(tangent(compiled(plain)), exact, atol=1e-5, rtol=1e-5)
    else:
        with pytest.raises(compile_error(), match="dual tensor"):
            tangent(compiled(plain))
    broken = compiled(plain, fullgraph=False)
    torch.testing.assert_close(tangent(broken), exact, atol=1e-5, rtol=1e-5)
    broken = compiled(plain, fullgraph=False)
    broken(*at)  # a graph without tangents is there when they come
    torch.testing.assert_close(tangent(broken), exact, atol=1e-5, rtol=1e-5)
