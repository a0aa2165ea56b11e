"""fenchel/choice/entmax.py: a learnable alpha, and the form for torch.compile and torch.func."""

import mpmath
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev, jvp, vmap

from fenchel.choice import Entmax
from fenchel.choice.entmax import _traced, tsallis


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def per_head(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)


def test_weights_and_value_are_differentiable_in_alpha_twice_and_both_ways() -> None:
    x = 0.5 * draw(2, 1, 4)
    for alpha in (per_head(1.2, 2.6), torch.tensor(1.5, dtype=torch.float64)):
        inputs = (x.requires_grad_(), alpha.requires_grad_())

        def both(x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
            return Entmax(alpha).weights(x), Entmax(alpha).value(x)

        assert gradcheck(both, inputs, check_forward_ad=True)
        assert gradgradcheck(both, inputs)


def test_a_tensor_alpha_is_the_same_map_as_its_numbers() -> None:
    x, alpha = draw(4, 3, 8), per_head(1.1, 1.5, 2.0, 3.0)
    wanted = torch.stack([tsallis(xi, float(a)) for xi, a in zip(x, alpha, strict=True)])
    torch.testing.assert_close(tsallis(x, alpha), wanted)
    torch.testing.assert_close(tsallis(x, alpha.float()), wanted)
    one_for_all = torch.stack([tsallis(x[0], float(a)) for a in alpha])
    torch.testing.assert_close(tsallis(x[0], alpha), one_for_all)


def test_alpha_follows_the_axis_of_the_choice() -> None:
    z, alpha = draw(3, 5), torch.tensor([[1.2], [1.5], [2.5]], dtype=torch.float64)
    wanted = Entmax(alpha)
    torch.testing.assert_close(Entmax(alpha.T).weights(z.T, dim=0).T, wanted.weights(z))
    torch.testing.assert_close(Entmax(alpha.T).value(z.T, dim=0), wanted.value(z))


def test_vmap_over_scores_alphas_and_both() -> None:
    x, alpha = draw(4, 5), torch.tensor([1.2, 1.5, 2.0, 3.0], dtype=torch.float64)
    each = torch.stack([tsallis(xi, float(a)) for xi, a in zip(x, alpha, strict=True)])
    torch.testing.assert_close(vmap(tsallis)(x, alpha), each)
    torch.testing.assert_close(vmap(tsallis, in_dims=(1, 0))(x.T, alpha), each)
    same = torch.stack([tsallis(x, float(a)) for a in alpha])
    torch.testing.assert_close(vmap(tsallis, in_dims=(None, 0))(x, alpha), same)
    slopes = vmap(jacfwd(tsallis, argnums=1))(x, alpha)
    torch.testing.assert_close(slopes, vmap(jacrev(tsallis, argnums=1))(x, alpha))


def test_an_alpha_along_the_axis_of_the_choice_gets_a_sentence() -> None:
    with pytest.raises(ValueError, match="one entry along the axis"):
        Entmax(torch.full((5,), 1.5)).weights(torch.zeros(2, 5))


@pytest.mark.parametrize("alpha", [1.01, 1.4, 1.5, 1.8, 2.0, 3.0, 4.0])
def test_the_traced_form_has_the_same_value_and_three_derivatives(alpha: float) -> None:
    x, v, w = 0.3 * draw(3, 6), draw(3, 6, seed=1), draw(3, 6, seed=2)
    prior = torch.zeros(3, 6, dtype=torch.float64)
    prior[0, 1], prior[2] = -torch.inf, -torch.inf

    def laws(form: object) -> list[Tensor]:
        def f(x: Tensor) -> Tensor:
            return (form(x + prior, alpha) * w).sum()

        first = grad(f)
        second = lambda x: jvp(first, (x,), (v,))[1]  # noqa: E731
        third = lambda x: jvp(second, (x,), (w,))[1]  # noqa: E731
        return [form(x + prior, alpha), first(x), second(x), third(x)]

    for ours, wanted in zip(laws(_traced), laws(tsallis), strict=True):
        assert wanted.isfinite().all()
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-7)


def test_the_traced_form_follows_alpha_too() -> None:
    x, alpha = 0.5 * draw(4, 6), torch.tensor([[1.2], [1.5], [2.0], [3.0]], dtype=torch.float64)
    for form in (jacrev, jacfwd):
        torch.testing.assert_close(
            form(_traced, argnums=1)(x, alpha), form(tsallis, argnums=1)(x, alpha)
        )
    torch.testing.assert_close(vmap(_traced)(x, alpha), tsallis(x, alpha))


def test_a_compiled_map_learns_alpha_and_beta() -> None:
    x = draw(3, 6)

    def loss(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        return Entmax(alpha, beta).weights(x).square().sum()

    leaves = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (1.4, 0.8)]
    torch.compiler.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    got, wanted = compiled(x, *leaves), loss(x, *leaves)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(got, leaves), torch.autograd.grad(wanted, leaves)
    )


def test_the_backward_pass_saves_the_weights_alone() -> None:
    saved: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    x = draw(4, 300).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        p = tsallis(x, 1.5)
    assert [t.shape for t in saved] == [p.shape]


NEAR_ONE = [1.0 + 1e-6, 1.00001, 1.0001, 1.001, 1.01, 1.2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [*NEAR_ONE, 1.49, 1.5, 1.7, 2.0, 2.5, 3.0, 4.0])
def test_both_derivatives_in_alpha_have_their_digits(
    alpha: float, dtype: torch.dtype, mp_weights
) -> None:
    """Against differences in 60 digits; the plain form, the traced form, and the value."""
    a = torch.tensor(alpha, dtype=dtype, requires_grad=True)
    x = torch.tensor([0.3, -0.2, 0.6, 0.0], dtype=dtype) / max(1.0, alpha - 1.0)
    with mpmath.workdps(60):
        h, centre, scores = mpmath.mpf(10) ** -15, mpmath.mpf(a.item()), x.tolist()
        low, mid, high = (mp_weights(scores, centre + k * h) for k in (-1, 0, 1))
        first = [float((q - p) / (2 * h)) for p, q in zip(low, high, strict=True)]
        rows = zip(low, mid, high, strict=True)
        second = [float((r - 2 * q + p) / h**2) for p, q, r in rows]

        def best(p: list[mpmath.mpf], c: mpmath.mpf) -> mpmath.mpf:
            terms = zip(p, scores, strict=True)
            return sum(t * s - (t**c - t) / (c * (c - 1)) for t, s in terms)

        slope = float((best(high, centre + h) - best(low, centre - h)) / (2 * h))

    def close(found: Tensor, wanted: list[float] | float, units: float) -> bool:
        exact = torch.tensor(wanted, dtype=torch.float64)
        error = (found.detach().double() - exact).abs().max()
        return bool(error <= units * torch.finfo(dtype).eps * exact.abs().max())

    p = tsallis(x, a)
    once = torch.stack([torch.autograd.grad(t, a, create_graph=True)[0] for t in p])
    twice = torch.stack([torch.autograd.grad(t, a, retain_graph=True)[0] for t in once])
    assert close(once, first, 20)
    assert close(twice, second, 60)
    traced = jacfwd(lambda a: _traced(x, a))
    assert close(traced(a.detach()), first, 20)
    assert close(jacfwd(traced)(a.detach()), second, 200)
    (found,) = torch.autograd.grad(Entmax(a).value(x), a)
    assert close(found, slope, 20)
