"""fenchel/inspection/heads.py: brackets against singular values of the dense Jacobian."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from fenchel.attention import ALiBi, AttentionCall, AttentionSpec, Causal, Prior, attend
from fenchel.choice import Choice, Entmax, Softmax
from fenchel.inspection.heads import heads, quantiles, row_stats, select_heads, sensitivities
from fenchel.inspection_result import Method

H, G, T, D, E = 4, 2, 6, 3, 5
METHOD = Method(
    dtype="float32",
    device="cpu",
    algorithm="",
    tolerance=1e-3,
    iterations=60,
    failure=1e-6,
    seed=0,
)


def call(
    size: float = 1.5,
    choice: Choice | None = None,
    prior: Prior | None = None,
    softcap: float | None = None,
) -> AttentionCall:
    draw = torch.Generator().manual_seed(1)
    q = size * torch.randn(1, H, T, D, generator=draw)
    k = size * torch.randn(1, G, T, D, generator=draw)
    v = torch.randn(1, G, T, E, generator=draw)
    return AttentionCall(q, k, v, AttentionSpec(choice or Softmax(), prior, 0.6, softcap))


def dense(c: AttentionCall, head: int) -> dict[str, Tensor]:
    """The singular values of one head's Jacobian, by automatic differentiation in float64."""
    g = head // (H // G)
    at = tuple(x.double() for x in (c.q[0, head], c.k[0, g], c.v[0, g]))

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        how = dict(c.spec)
        return attend(q, k, v, **how, backend="reference")

    parts = [J.reshape(T * E, -1) for J in jacobian(f, at)]
    matrices = dict(zip("qkv", parts, strict=True)) | {"qkv": torch.cat(parts, 1)}
    return {name: torch.linalg.svdvals(J) for name, J in matrices.items()}


@pytest.mark.parametrize("prior", [None, Causal()])
@pytest.mark.parametrize("choice", [Softmax(), Entmax(1.5)])
@pytest.mark.parametrize("softcap", [None, 1.0])
def test_every_bracket_holds_the_singular_value(
    prior: Prior | None, choice: Choice, softcap: float | None
) -> None:
    c = call(choice=choice, prior=prior, softcap=softcap)
    draw = torch.Generator().manual_seed(0)
    sigma, bound, _ = sensitivities(select_heads(c, [0, 1, 2, 3]), METHOD, draw)
    for head in range(H):
        wanted = dense(c, head)
        for name, brackets in sigma.items():
            true = float(wanted[name][0])
            assert brackets[head].lower <= true * (1 + 1e-5)
            assert true <= brackets[head].upper * (1 + 1e-5)
            assert brackets[head].upper <= 1.01 * brackets[head].lower + 1e-6
        assert bound[head] >= float(wanted["qkv"][0]) * (1 - 1e-5)


def test_a_head_is_ruled_by_its_largest_part() -> None:
    causes = {"q": "query", "k": "key", "v": "mixing"}
    for size in (0.1, 3.0):
        c = call(size)
        for head in heads(c, 7, [1, 3], METHOD, torch.Generator().manual_seed(0)):
            wanted = dense(c, head.head - 1)
            assert head.dominant == causes[max("qkv", key=lambda name: wanted[name][0])]
            assert head.layer == 7


def test_the_four_largest_singular_values_are_bounded_from_below() -> None:
    c = call(prior=Causal())
    for steps, near in ((5, 0.0), (60, 1e-3)):
        method = replace(METHOD, iterations=steps, tolerance=1e-9)
        for head in heads(c, 1, [0, 3], method, torch.Generator().manual_seed(0)):
            wanted = dense(c, head.head - 1)["qkv"][:4].tolist()
            assert len(head.top) == 4
            for ours, theirs in zip(head.top, wanted, strict=True):
                assert near * theirs < ours <= theirs * (1 + 1e-5)
            if near:
                assert head.top == pytest.approx(wanted, rel=near)


def test_some_heads_of_a_prior_keep_their_own_part_of_it() -> None:
    c = call(prior=Causal() + ALiBi(H))
    whole, some = row_stats(c), row_stats(select_heads(c, [3, 1]))
    for name in ("entropy", "margin", "columns"):
        ours, theirs = getattr(some, name), getattr(whole, name)[[3, 1]]
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_few_iterations_widen_a_bracket_and_never_break_it() -> None:
    c = call(prior=Causal())
    quick = replace(METHOD, iterations=2)
    sigma = sensitivities(select_heads(c, [2]), quick, torch.Generator().manual_seed(0)).sigma
    true = float(dense(c, 2)["qkv"][0])
    assert sigma["qkv"][0].lower <= true <= sigma["qkv"][0].upper
    assert sigma["qkv"][0].iterations == 2


def test_a_spread_is_that_of_its_rows() -> None:
    found = next(heads(call(), 1, [0], METHOD, torch.Generator().manual_seed(0)))
    assert len(found.rows["entropy"]) == T
    assert found.entropy.most == pytest.approx(max(found.rows["entropy"]))
    assert found.effective.mean == pytest.approx(sum(found.rows["effective"]) / T)


def test_a_spread_leaves_out_what_is_not_there() -> None:
    found = quantiles(torch.tensor([1.0, torch.nan, 3.0]))
    assert (found.least, found.median, found.most, found.mean) == (1.0, 2.0, 3.0, 2.0)
