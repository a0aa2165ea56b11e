"""optim/score/score_change.py and step_size.py: which pairs count, and the length of a step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fenchel.model.norm import RMSNorm, RMSNormPlusOne
from fenchel.optim import HeadProjection, QueryKeyPair, ScoreDescent, attention_pairs
from fenchel.optim.score.probe import LayerInput, stack_inputs
from fenchel.optim.score.score_change import HeadWeights, ScoreLine
from fenchel.optim.score.step_size import (
    crossing_by_chords,
    crossing_by_parts,
    find_crossing,
    scaling,
)


def pair(**settings: object) -> QueryKeyPair:
    weight = nn.Parameter(torch.zeros(12, 6))
    rows = HeadProjection(weight, 0, 4, 2), HeadProjection(weight, 4, 8, 2)
    return QueryKeyPair("layer", nn.Identity(), *rows, scale=0.5, **settings)  # type: ignore[arg-type]


def allowed_pairs(sample: LayerInput, **settings: object) -> Tensor:
    n = len(sample.x)
    return stack_inputs([pair(**settings)], [sample]).grid.mask.expand(1, n, 1, -1, -1)[0, :, 0]


@pytest.mark.parametrize(
    ("settings", "distances"),
    [
        ({}, range(9)),
        ({"window": 3}, range(3)),
        ({"causal": False}, range(-8, 9)),
        ({"causal": False, "window": 3}, range(-2, 3)),
    ],
)
def test_a_query_sees_what_the_layer_lets_it(settings: dict[str, object], distances: range) -> None:
    mask = allowed_pairs(LayerInput(torch.zeros(2, 9, 6), None, None), **settings)
    for i in range(9):
        for j in range(9):
            assert bool(mask[1, i, j]) == (i - j in distances)


def test_a_mask_closes_pairs_for_its_own_sequence() -> None:
    mask = torch.ones(2, 9, 9, dtype=torch.bool)
    mask[1, :, 4] = False
    allowed = allowed_pairs(LayerInput(torch.zeros(2, 9, 6), None, mask))
    assert allowed[0, 8, 4]
    assert not allowed[1, :, 4].any()


def test_queries_are_sampled_evenly() -> None:
    at = stack_inputs([pair()], [LayerInput(torch.zeros(1, 640, 6), None, None)])
    assert at.grid.queries.tolist() == list(range(5, 640, 10))


def test_independent_positions_give_the_closed_form() -> None:
    """Over all pairs of two long independent samples the mean square is <E qq^T, E kk^T>."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 64, 6, generator=generator, dtype=torch.float64)
    W = HeadWeights(
        *(torch.randn(1, 2, 2, 6, generator=generator, dtype=torch.float64) for _ in "QK")
    )
    layer = pair(causal=False)
    at = stack_inputs([layer], [LayerInput(x, None, None)])
    exact, closed = (ScoreLine([layer], at, W, closed=c).start_rms for c in (False, True))
    torch.testing.assert_close(exact, closed)  # every pair is open, so it is no approximation


CURVES: dict[str, Callable[[Tensor], Tensor]] = {
    "straight": lambda t: 3.0 * t,
    "from the side": lambda t: (0.04 + t.square()).sqrt(),
    "first away": lambda t: (0.09 - 0.3 * t + t.square()).sqrt(),
    "bending up": lambda t: t + 2.0 * t.square(),
    "saturating": lambda t: t / (0.1 + t),
    "steep": lambda t: 1e6 * t,
}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("begin", [0.02, 0.4, 3.0])
def test_a_line_ends_where_the_change_is_gamma(name: str, begin: float) -> None:
    curve, gamma = CURVES[name], torch.full((2, 3), 0.4)
    start = torch.full((2, 3), 1e-6 if name == "steep" else begin)
    t = find_crossing(curve, gamma, start, torch.full((2, 3), torch.inf))
    torch.testing.assert_close(curve(t), gamma, rtol=0.01, atol=0)


def test_a_line_that_never_gets_there_ends_at_its_limit() -> None:
    one = torch.ones(1, 1)
    assert float(find_crossing(lambda t: 0.1 * t, one, one, one)) == 1.0
    assert float(find_crossing(torch.zeros_like, one, one, one)) == 1.0


@pytest.mark.parametrize("groups", [6, 2])
@pytest.mark.parametrize("shrinks", [False, True])
def test_parts_end_where_the_change_is_first_gamma(groups: int, shrinks: bool) -> None:
    """Against the scores themselves at ten thousand points, in float64, easy and hard heads."""
    H, g = 6, torch.Generator().manual_seed(groups)
    S, J_K, J_Q, R = torch.randn(4, 1, H, 40, generator=g, dtype=torch.float64)
    R[:, 1] *= 1e4  # all but bilinear
    J_K[:, 2], R[:, 2] = -J_Q[:, 2], 0.01 * R[:, 2]  # a move that leaves the scores, or nearly
    J = (J_K + J_Q)[:, 3]
    R[:, 3] = -J * (J.square().mean().sqrt() / 1.32)  # reaches 0.33, comes back, and goes on
    flat = torch.stack((S, J_K, J_Q, R), dim=2)
    gamma = torch.full((1, H), 0.3, dtype=torch.float64)
    c = torch.linspace(0.97, 1.0, H, dtype=torch.float64).view(1, H) if shrinks else gamma / gamma
    shrink = scaling(c, groups)
    limit = torch.full_like(gamma, torch.inf)
    t = crossing_by_parts(flat @ flat.mT / 40, gamma, shrink if shrinks else None, limit, groups)

    def change(t_Q: Tensor, t_K: Tensor) -> Tensor:
        c, d = (x.repeat_interleave(H // x.shape[1], dim=1).unsqueeze(-1) for x in shrink)
        a, b = t_Q.unsqueeze(-1), t_K.unsqueeze(-1)
        return ((c * d - 1) * S + c * b * J_K + d * a * J_Q + a * b * R).square().mean(-1).sqrt()

    t_K = t.K.repeat_interleave(H // groups, dim=1)
    torch.testing.assert_close(change(t.Q, t_K), gamma, rtol=1e-4, atol=0)
    before = [change(t_K * x, t_K * x) for x in torch.linspace(0, 0.9999, 10000)]
    assert (torch.stack(before) <= gamma).all()
    nearest = change(t_K, t_K).view(1, groups, -1).amax(2)  # the head that stopped its group
    torch.testing.assert_close(nearest, gamma[:, :groups], rtol=1e-4, atol=0)


def test_parts_go_no_further_than_their_limit_and_exactly_there() -> None:
    one = torch.ones(2, 3)
    small, nothing = 0.01 * torch.eye(4).expand(2, 3, 4, 4), torch.zeros(2, 3, 4, 4)
    for parts in (small, nothing):
        assert torch.equal(crossing_by_parts(parts, one, None, one, 3).Q, one)
    limit = torch.full_like(one, torch.inf)
    assert torch.equal(crossing_by_parts(nothing, one, None, limit, 3).Q, torch.zeros(2, 3))


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("gamma", "error"), [(0.02, 1e-5), (0.1, 1e-4), (0.3, 1e-3), (1.0, 0.03)])
@torch.no_grad()
def test_chords_end_where_the_change_under_a_norm_is_gamma(
    kv_heads: int, gamma: float, error: float
) -> None:
    """Against the scores at the end of the step; 1 is half of the scores themselves."""
    draw = torch.Generator().manual_seed(0)
    norms = nn.RMSNorm(8, dtype=torch.float64), nn.RMSNorm(8, dtype=torch.float64)
    nn.init.constant_(norms[0].weight, 2.0)
    weight = nn.Parameter(torch.zeros(64, 16, dtype=torch.float64))
    rows = HeadProjection(weight, 0, 32, 8), HeadProjection(weight, 32, 32 + 8 * kv_heads, 8)
    layer = QueryKeyPair(
        "layer", nn.Identity(), *rows, scale=8**-0.5, q_norm=norms[0], k_norm=norms[1]
    )
    x = torch.randn(3, 20, 16, generator=draw, dtype=torch.float64)
    W, U = (
        HeadWeights(
            *(torch.randn(1, H, 8, 16, generator=draw, dtype=torch.float64) for H in (4, kv_heads))
        )
        for _ in "WU"
    )
    line = ScoreLine([layer], stack_inputs([layer], [LayerInput(x, None, None)]), W)
    line.set_direction(U)
    wanted, one = (torch.full((1, 4), x, dtype=torch.float64) for x in (gamma, 1.0))
    t_0 = line.same_for_keys(1e-3 * one)
    t = crossing_by_chords(line, line.chord(t_0), t_0, wanted, one)
    exact, _ = line.move(t, None)
    if kv_heads == 4:
        torch.testing.assert_close(exact, wanted, rtol=error, atol=0)
    else:  # the keys stop at the first head of a group that has moved by gamma
        assert (exact <= wanted * (1 + error)).all()
        assert (exact.amax(1) >= wanted[:, 0] * (1 - error)).all()


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_step_through_the_kernels_is_that_of_the_operations(
    qk_norm: bool, small: Any, tokens: Any, backward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    for fused in (False, True):
        for page in ("score_change", "direction"):
            place = f"fenchel.optim.score.{page}.fused"
            monkeypatch.setattr(place, lambda _, fused=fused: fused)
        model = small(kv_heads=2, qk_norm=qk_norm)
        score = ScoreDescent(attention_pairs(model))
        backward(model, tokens(0, 2))
        score.step()
        ends.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "kind",
    [partial(RMSNorm, eps=0.1), partial(RMSNormPlusOne, eps=0.1), nn.RMSNorm, nn.LayerNorm],
)
@torch.no_grad()
def test_norms_of_all_layers_at_once_are_those_of_each(kind: Callable[[int], Any]) -> None:
    draw = torch.Generator().manual_seed(1)
    layers = []
    for _ in range(3):
        norms = kind(2), kind(2)
        for norm in norms:
            norm.weight.normal_(generator=draw)
        layers.append(pair(q_norm=norms[0], k_norm=norms[1]))
    x = torch.randn(3, 1, 9, 6, generator=draw)
    W = HeadWeights(*(torch.randn(3, 2, 2, 6, generator=draw) for _ in "QK"))
    at = stack_inputs(layers, [LayerInput(row, None, None) for row in x])
    line = ScoreLine(layers, at, W)
    for layer, q, k, start_q, start_k in zip(
        layers, line.q, line.k, line.start_q, line.start_k, strict=True
    ):
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        torch.testing.assert_close(start_q, layer.q_norm(q))
        torch.testing.assert_close(start_k, layer.k_norm(k))
