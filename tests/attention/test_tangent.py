"""attention/tangent.py: first and second derivatives by torch.func and autograd, interpreted.

The reference is the reference back end in float64, differentiated by torch.func in the same order.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

from fenchel.attention import (
    ALiBi,
    Causal,
    Dense,
    Padding,
    Prior,
    Sink,
    Window,
    attend,
    attend_jvp,
    attend_with_tangent,
    backend_support,
    backends,
    selected_backend,
    tangent,
)
from fenchel.attention.backends import BACKENDS, CallFacts, cheapest, clear_caches
from fenchel.choice import Entmax, Softmax
from fenchel.kernels import tangent_attention as kernels
from fenchel.sensitivity import attention_jacobian, self_attention_jacobian, spectral_norm

TILE = kernels.Tile(32, 32, 4, 1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on which the kernels are interpreted
Three = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def _kernels_run_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tangent, "runs_on", lambda _: True)
    monkeypatch.setattr(kernels, "forward_tile", lambda *_, **__: TILE)
    monkeypatch.setattr(kernels, "reverse_tiles", lambda *_, **__: (TILE, TILE, None))
    clear_caches()
    yield
    clear_caches()


def draw(seed: int, T: int = 9, S: int = 11) -> Three:
    g = torch.Generator().manual_seed(seed)
    shapes = (1, 2, T, 8), (1, 1, S, 8), (1, 1, S, 6)
    q, k, v = (torch.randn(shape, generator=g).to(DEVICE) for shape in shapes)
    return q, k, v


X, TANGENTS = draw(0), draw(1)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, prior=Causal(), choice=Softmax(1.3), backend="tangent")


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, prior=Causal(), choice=Softmax(1.3), backend="reference")


def wide(x: Three) -> Three:
    q, k, v = (y.double() for y in x)
    return q, k, v


def near(found: Any, wanted: Any, tolerance: float = 3e-6) -> None:
    found = [found] if isinstance(found, Tensor) else list(found)
    wanted = [wanted] if isinstance(wanted, Tensor) else list(wanted)
    for one, other in zip(found, wanted, strict=True):
        size = float(other.abs().max())
        torch.testing.assert_close(one.double(), other.double(), rtol=0.0, atol=tolerance * size)


Derivative = Callable[[Callable[..., Tensor], Three, Three], Any]


def forward(f: Callable[..., Tensor], x: Three, t: Three) -> Any:
    return jvp(f, x, t)[1]


def gradient(f: Callable[..., Tensor]) -> Callable[..., Any]:
    return grad(lambda *x: f(*x).sin().sum(), argnums=(0, 1, 2))


def reverse(f: Callable[..., Tensor], x: Three, t: Three) -> Any:
    del t
    return gradient(f)(*x)


def forward_of_reverse(f: Callable[..., Tensor], x: Three, t: Three) -> Any:
    return jvp(gradient(f), x, t)[1]


def reverse_of_forward(f: Callable[..., Tensor], x: Three, t: Three) -> Any:
    return grad(lambda *x: jvp(f, x, t)[1].sin().sum(), argnums=(0, 1, 2))(*x)


def reverse_of_reverse(f: Callable[..., Tensor], x: Three, t: Three) -> Any:
    def along(*x: Tensor) -> Tensor:
        return sum(
            ((g * m).sum() for g, m in zip(gradient(f)(*x), t, strict=True)), x[0].new_zeros(())
        )

    return grad(along, argnums=(0, 1, 2))(*x)


@pytest.mark.parametrize(
    "derivative",
    [forward, reverse, forward_of_reverse, reverse_of_forward, reverse_of_reverse],
    ids=lambda f: f.__name__,
)
def test_derivatives_up_to_the_second_by_torch_func(derivative: Derivative) -> None:
    near(derivative(ours, X, TANGENTS), derivative(exact, wide(X), wide(TANGENTS)))


def test_a_second_backward_pass_and_no_third() -> None:
    x = [y.clone().requires_grad_() for y in X]
    first = torch.autograd.grad(ours(*x).sin().sum(), x, create_graph=True)
    along = sum(((g * m).sum() for g, m in zip(first, TANGENTS, strict=True)), X[0].new_zeros(()))
    second = torch.autograd.grad(along, x, create_graph=True)
    near([y.detach() for y in second], reverse_of_reverse(exact, wide(X), wide(TANGENTS)))
    with pytest.raises(NotImplementedError, match="third one needs"):
        torch.autograd.grad(second[0].sum(), x)


def test_dual_numbers_carry_the_tangent() -> None:
    with forward_ad.dual_level():
        out = ours(X[0], forward_ad.make_dual(X[1], TANGENTS[1]), X[2])
        found = forward_ad.unpack_dual(out).tangent
    assert found is not None
    q, k, v = wide(X)
    near(found, jvp(lambda k: exact(q, k, v), (k,), (TANGENTS[1].double(),))[1])


def test_vmap_runs_element_by_element() -> None:
    q, k, v = X
    found = vmap(ours, in_dims=(0, None, None))(torch.stack([q, q.flip(2)]), k, v)
    near(found[1], exact(q.flip(2), k, v))


def test_a_second_forward_derivative_is_refused_or_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch drops it without an error where a Function has a forward rule."""
    monkeypatch.setattr(backends, "_ONE_PIECE", 0)

    def twice(backend: str) -> Tensor:
        def moved(q: Tensor) -> Tensor:
            call = lambda q: attend(q, X[1], X[2], backend=backend)  # noqa: E731
            out: Tensor = jvp(call, (q,), (TANGENTS[0],))[1]
            return out

        out: Tensor = jvp(moved, (X[0],), (TANGENTS[0],))[1]
        return out

    for backend in ("tangent", "blocked"):
        with pytest.raises(ValueError, match=r"one (of them )?forward"):
            twice(backend)
    near(twice("auto"), twice("reference"))


def test_output_and_tangent_in_one_pass_with_gradients_of_both() -> None:
    def loss(x: Three, t: Three, pair: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        at = [y.clone().requires_grad_() for y in (*x, *t)]
        o, to = pair(tuple(at[:3]), tuple(at[3:]))
        value = o.sin().sum() + to.cos().sum()
        return [o.detach(), to.detach(), *torch.autograd.grad(value, at)]

    def by_definition(x: Three, t: Three) -> tuple[Tensor, Tensor]:
        call = lambda *x: attend(*x, prior=Causal(), backend="reference")  # noqa: E731
        o, to = jvp(call, x, t)
        return o, to

    found = loss(X, TANGENTS, lambda x, t: attend_with_tangent(x, t, prior=Causal()))
    near(found, loss(wide(X), wide(TANGENTS), by_definition))


@pytest.mark.parametrize("moving", ["q", "v", "qkv"])
def test_attend_jvp_keeps_its_two_causes_apart(
    moving: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tangents = tuple(m if n in moving else None for n, m in zip("qkv", TANGENTS, strict=True))
    found = attend_jvp(X, tangents, prior=Causal())
    monkeypatch.setattr(tangent, "runs_on", lambda _: False)
    wanted = attend_jvp(X, tangents, prior=Causal())
    assert float(wanted.total.abs().max()) > 0.0
    near(found, wanted)
    near(attend_with_tangent(X, tangents, prior=Causal())[1], wanted.total)


PRIORS: list[Prior] = [
    Causal(strict=True) + Window(4, 1),
    Padding(torch.tensor([7])) + ALiBi(2),
    Padding(torch.tensor([7]), side="left")
    + Dense(torch.eye(9, 11, dtype=torch.bool).logical_not()),
]


@pytest.mark.parametrize("prior", PRIORS, ids=lambda p: " ".join(type(x).__name__ for x in p.parts))
def test_priors_arrive_in_the_kernels(prior: Prior) -> None:
    q, k, v = X
    assert backend_support(q, k, v, prior=prior)["tangent"] is None
    near(attend(q, k, v, prior=prior, backend="tangent"), attend(*wide(X), prior=prior))


PLAIN = CallFacts(
    choice="Softmax", device="cuda", dtype=torch.bfloat16, B=4, H=16, T=8192, S=8192, D=64, E=64
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"choice": "Entmax"}, "not Entmax"),
        ({"return_weights": True}, "weights"),
        ({"dropout": 0.1}, "dropout"),
        ({"softcap": True}, "soft-cap"),
        ({"dtype": torch.float64}, "float16, bfloat16 and float32"),
        ({"E": 129}, "width up to 128"),
        ({"dtype": torch.float32, "D": 65}, "width up to 64"),
        ({"prior": Sink(torch.zeros(16), Causal())}, "no Sink"),
        ({"prior": Dense(torch.zeros(1, 1)), "tangent": True}, "in a prior that is a tensor"),
        ({"prior": Dense(torch.zeros(1, 1))}, None),
        ({"beyond_second": True}, "first and second"),
        ({"compiling": True}, "torch.compile would drop"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(change: dict, reason: str | None) -> None:
    found = BACKENDS["tangent"].why_not(replace(PLAIN, **change))
    assert found is None if reason is None else reason in (found or "")


def test_auto_takes_it_on_a_gpu_where_tangents_are_carried_or_two_derivatives_taken() -> None:
    assert cheapest(PLAIN).name == "sdpa"
    assert cheapest(replace(PLAIN, tangent=True)).name == "tangent"
    assert cheapest(replace(PLAIN, transformed=True, twice=True, gradient=True)).name == "tangent"
    assert cheapest(replace(PLAIN, tangent=True, compiling=True)).name != "tangent"
    assert cheapest(replace(PLAIN, tangent=True, choice="Entmax")).name != "tangent"


def test_on_a_cpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    q, k, v = (x.cpu() for x in X)
    with pytest.raises(ValueError, match="run on a Hopper GPU"):
        attend(q, k, v, backend="tangent")
    assert selected_backend(q, k, v, choice=Entmax(1.5)) != "tangent"


def test_torch_compile_is_refused_by_name_and_loses_no_tangent() -> None:
    def call(*x: Tensor) -> Tensor:
        return attend(*x, prior=Causal(), backend="tangent")

    torch.compiler.reset()
    with pytest.raises(Exception, match=r"torch\.compile would drop"):
        torch.compile(call, backend="eager", fullgraph=True)(*X)
    torch.compiler.reset()
    inside = torch.compile(
        lambda x, t: attend_with_tangent(x, t, prior=Causal())[1], backend="eager"
    )
    near(inside(X, TANGENTS), jvp(call, X, TANGENTS)[1])


def test_the_jacobian_operators_use_it_for_weights_that_do_not_fit_in_a_block() -> None:
    q, k, v = X
    J = attention_jacobian(q, k, v, prior=Causal(), budget=11)
    assert J._kernels is not None
    whole = attention_jacobian(*wide(X), prior=Causal())
    assert whole._kernels is None
    near(J @ TANGENTS, whole @ wide(TANGENTS))
    g = draw(2)[0][..., :6].contiguous()
    near(J.T @ g, whole.T @ g.double())
    assert attention_jacobian(q, k, v, wrt="q", prior=Causal(), budget=11)._kernels is None


def test_a_spectral_norm_through_it_is_that_of_the_dense_jacobian() -> None:
    g = torch.Generator().manual_seed(0)
    shapes = (9, 8), (8, 8), (8, 8), (8, 8)
    x, *W = ((torch.randn(shape, generator=g) / 2).to(DEVICE) for shape in shapes)
    J = self_attention_jacobian(x, *W, prior=Causal(), budget=9)
    assert J.inner._kernels is not None
    found = spectral_norm(J, iterations=30, generator=g)
    dense = self_attention_jacobian(*(y.double() for y in (x, *W)), prior=Causal()).dense()
    sigma = float(torch.linalg.matrix_norm(dense, 2))
    assert math.isclose(float(found.lower), sigma, rel_tol=1e-4)
    assert float(found.lower) * (1 - 1e-6) <= sigma <= float(found.upper)
