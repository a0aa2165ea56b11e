"""fenchel/attention/delta_rule.py: chunks are the recurrence, and that is online least squares."""

import pytest
import torch
from torch import Tensor
from torch.func import jvp
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from fenchel.attention.delta_rule import delta_rule, delta_rule_by_step

B, G, H, T, D, E = 2, 2, 4, 11, 5, 3


def inputs(T: int = T, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    q, k = (torch.nn.functional.normalize(draw(B, G, T, D), dim=-1) for _ in range(2))
    v, g, b = draw(B, H, T, E), -draw(B, H, T).exp(), draw(B, H, T).sigmoid()
    return [x.to(dtype).requires_grad_() for x in (q, k, v, g, b)]


@pytest.mark.parametrize("chunk", [1, 3, 4, 64])
def test_chunks_are_the_recurrence_with_all_gradients(chunk: int) -> None:
    at = inputs()
    state = torch.randn(B, H, D, E, dtype=torch.float64).requires_grad_()
    ours, exact = delta_rule(*at, state=state, chunk=chunk), delta_rule_by_step(*at, state=state)
    torch.testing.assert_close(tuple(ours), tuple(exact), atol=1e-12, rtol=1e-10)
    slopes = [
        torch.autograd.grad((x.out.sin().sum() + x.state.cos().sum()), [*at, state])
        for x in (ours, exact)
    ]
    torch.testing.assert_close(slopes[0], slopes[1], atol=1e-11, rtol=1e-9)


def test_single_precision_agrees_over_long_sequences() -> None:
    at = inputs(T=300, dtype=torch.float32)
    ours, exact = delta_rule(*at), delta_rule_by_step(*[x.double() for x in at])
    assert float((ours.out - exact.out).detach().abs().max()) < 1e-5
    slopes, wanted = (
        torch.autograd.grad(x.square().sum(), at) for x in (ours.out, exact.out.float())
    )
    for one, other in zip(slopes, wanted, strict=True):
        assert float((one - other).abs().max()) < 1e-5 * float(other.abs().max().clamp(min=1.0))


def test_it_is_that_of_transformers() -> None:
    q, k, v, g, b = (x.detach().float() for x in inputs(T=90))
    theirs, state = torch_chunk_gated_delta_rule(
        *(x.transpose(1, 2) for x in (q, k, v)),
        g=g.mT,
        beta=b.mT,
        output_final_state=True,
    )
    ours = delta_rule(q, k, v, g, b)
    torch.testing.assert_close(ours.out, theirs.transpose(1, 2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.state, state, atol=1e-5, rtol=1e-5)


def test_tangents_are_carried() -> None:
    at = [x.detach() for x in inputs()]
    moves = [torch.randn_like(x) for x in at]
    _, ours = jvp(lambda *x: delta_rule(*x, chunk=4).out, tuple(at), tuple(moves))
    _, exact = jvp(lambda *x: delta_rule_by_step(*x).out, tuple(at), tuple(moves))
    torch.testing.assert_close(ours, exact, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("chunk", [3, 64])
def test_documents_begin_anew(chunk: int) -> None:
    at, lengths = inputs(), (4, 1, 6)
    segments = torch.tensor([[0] * 4 + [1] + [2] * 6] * B)
    whole = delta_rule(*at, segments=segments, chunk=chunk)
    apart = [
        delta_rule_by_step(*parts) for parts in zip(*(x.split(lengths, 2) for x in at), strict=True)
    ]
    torch.testing.assert_close(whole.out, torch.cat([part.out for part in apart], 2))
    torch.testing.assert_close(whole.state, apart[-1].state)
    gradients = torch.autograd.grad(whole.out.sum(), at)
    assert all(x.isfinite().all() for x in gradients)


def test_a_correction_is_a_step_of_gradient_descent_on_the_squared_error() -> None:
    _, k, v, g, b = (x.detach() for x in inputs(T=1))
    k = k.repeat_interleave(H // G, 1)
    S = torch.randn(B, H, D, E, dtype=torch.float64)

    def error(S: Tensor) -> Tensor:
        return 0.5 * (v[:, :, 0] - torch.einsum("bhd,bhde->bhe", k[:, :, 0], S)).square().sum()

    moved = delta_rule(k, k, v, torch.zeros_like(g), b, state=S).state
    torch.testing.assert_close(moved, S - b[..., None] * torch.func.grad(error)(S))
    exact = delta_rule(k, k, v, torch.zeros_like(g), torch.ones_like(b), state=S)
    torch.testing.assert_close(exact.out * D**0.5, v)  # the new pair is stored without error


def test_shapes_that_do_not_fit_get_one_sentence() -> None:
    q, k, v, g, b = inputs()
    with pytest.raises(ValueError, match="takes q and k"):
        delta_rule(q[0], k[0], v[0], g[0], b[0])
    with pytest.raises(ValueError, match="log_decay and rate"):
        delta_rule(q, k, v, g[:, :1], b)
