"""fenchel/choice/box_range.py: the exact range of <c, weights(z)> over a box of scores."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fenchel.choice import (
    Capped,
    Choice,
    Entmax,
    Hard,
    Sigmoid,
    Softmax,
    Sparsemax,
    box_range,
    range_over_box,
)

MAPS = (
    *(Softmax(), Softmax(2.5), Entmax(1.1), Entmax(1.5), Entmax(1.5, beta=0.5)),
    *(Sparsemax(), Entmax(3.0), Entmax(4.0), Capped(0.4)),
    Sigmoid(1.5, log_odds=-1.0),
)


def boxes(seed: int, N: int, K: int, wide: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    c, middle, reach = torch.randn(3, N, K, dtype=torch.float64, generator=generator)
    return c, 1.5 * middle - wide * reach.abs(), 1.5 * middle + wide * reach.abs()


def values(choice: Choice, c: Tensor, z: Tensor) -> Tensor:
    return (choice.weights(z) * c).sum(-1)


def ascent(choice: Choice, c: Tensor, low: Tensor, high: Tensor, seed: int) -> Tensor:
    """The best value of projected ascent from many starts, coordinate by coordinate on grids."""
    generator = torch.Generator().manual_seed(seed)
    best = torch.full(c.shape[:-1], -torch.inf, dtype=c.dtype)
    shares = torch.linspace(0.0, 1.0, 9, dtype=c.dtype)
    for _ in range(4):
        z = low + (high - low) * torch.rand(c.shape, dtype=c.dtype, generator=generator)
        for _ in range(3):
            for i in range(c.shape[-1]):
                grid = z.expand(len(shares), *z.shape).clone()
                grid[..., i] = low[:, i] + shares[:, None] * (high - low)[:, i]
                reached = values(choice, c, grid)
                best = torch.maximum(best, reached.amax(0))
                z = grid.gather(0, reached.argmax(0)[None, :, None].expand(1, *z.shape))[0]
    return best


def path(choice: Choice, c: Tensor, low: Tensor, high: Tensor, points: int) -> Tensor:
    """The values at points of the K edges of the path: (K, points, N)."""
    order = c.argsort(-1, descending=True)
    rank = order.argsort(-1)
    shares = torch.linspace(0.0, 1.0, points, dtype=c.dtype)[:, None, None]
    edges = []
    for k in range(c.shape[-1]):
        share = torch.where(rank < k, 1.0, torch.where(rank == k, shares, 0.0))
        edges.append(values(choice, c, low + share * (high - low)))
    return torch.stack(edges)


@pytest.mark.parametrize("choice", MAPS, ids=str)
def test_no_point_of_the_box_is_outside_and_a_point_of_the_path_is_near(choice: Choice) -> None:
    for K, wide in ((1, 1.0), (3, 1.0), (6, 0.3)):
        c, low, high = boxes(K, 20, K, wide)
        lower, upper = range_over_box(choice, c, low, high)
        found = ascent(choice, c, low, high, seed=1)
        assert bool((found <= upper).all())
        assert bool((-ascent(choice, -c, low, high, seed=2) >= lower).all())
        reached = path(choice, c, low, high, points=400).amax((0, 1))
        assert bool((reached <= upper).all())
        assert bool((found <= reached + 2e-3).all())
        steep = 0.2 if isinstance(choice, Entmax) and choice.alpha > 2.0 else 2e-2
        assert bool((upper - reached <= steep).all())


@pytest.mark.parametrize("choice", [Entmax(1.5), Sparsemax()], ids=str)
def test_vertices_fall_short_of_the_maximum(choice: Choice) -> None:
    """The maximum of entmax and sparsemax can lie inside an edge; a softmax's cannot."""
    c, low, high = boxes(3, 300, 6)
    edges = path(choice, c, low, high, points=201)
    short = range_over_box(choice, c, low, high)[1] - edges[:, (0, -1)].amax((0, 1))
    assert float(short.amax()) > 0.02
    edges = path(Softmax(), c, low, high, points=201)
    upper = range_over_box(Softmax(), c, low, high)[1]
    assert float((upper - edges[:, (0, -1)].amax((0, 1))).abs().amax()) < 1e-12


def test_a_maximum_inside_an_edge_by_hand() -> None:
    """x = (0.4, s, 0): the value rises until alternative 3 leaves the support at s = 0.6."""
    c, low, high = torch.tensor(
        [[1.0, 0.0, -2.0], [0.4, 0.0, 0.0], [0.4, 2.0, 0.0]], dtype=torch.float64
    )
    lower, upper = range_over_box(Sparsemax(), c, low, high)
    assert float(upper) == pytest.approx(0.4, abs=1e-11)  # 0.2 and 0 at the vertices
    assert float(lower) == pytest.approx(0.0, abs=1e-11)


def test_the_search_agrees_with_the_vertices_of_softmax() -> None:
    c, low, high = boxes(0, 60, 7)
    allowed = torch.ones_like(c, dtype=torch.bool)
    response = box_range._response(Softmax())
    found = box_range._search(response, c, low, high, allowed)
    vertices = box_range._at_vertices(response, c, low, high, allowed)
    torch.testing.assert_close(found, vertices, rtol=0.0, atol=1e-10)


def test_a_point_has_one_value() -> None:
    c, z, _ = boxes(4, 20, 5)
    for choice in MAPS:
        lower, upper = range_over_box(choice, c, z, z)
        value = values(choice, c, z)
        steep = 1e-4 if isinstance(choice, Entmax) and choice.alpha > 2.0 else 1e-10
        assert bool((lower <= value + 1e-15).all() and (value - 1e-15 <= upper).all())
        assert float((upper - lower).amax()) < steep


def test_priors_forbid_and_tilt() -> None:
    c, low, high = boxes(5, 30, 5)
    prior = torch.tensor([0.0, -1.0, float("-inf"), 0.5, 0.0], dtype=torch.float64)
    for choice in (Softmax(2.0), Entmax(1.5), Capped(0.4), Sigmoid(2.0)):
        lower, upper = range_over_box(choice, c, low, high, prior)
        x = choice.beta * low + prior, choice.beta * high + prior
        one = type(choice)(0.4) if isinstance(choice, Capped) else type(choice)()
        again = range_over_box(one, c, *x)
        torch.testing.assert_close((lower, upper), again, rtol=0.0, atol=1e-10)
    empty = torch.full((5,), float("-inf"), dtype=torch.float64)
    for end in range_over_box(Softmax(), c, low, high, empty):
        assert bool((end == 0).all())


def test_ends_keep_the_dtype_and_round_outward() -> None:
    c, low, high = (t.float() for t in boxes(6, 30, 5))
    for choice in (Softmax(), Sparsemax(), Sigmoid()):
        lower, upper = range_over_box(choice, c, low, high)
        wide = range_over_box(choice, c.double(), low.double(), high.double())
        assert lower.dtype == upper.dtype == torch.float32
        assert bool((lower <= wide[0]).all() and (upper >= wide[1]).all())
        assert float((upper - wide[1]).amax()) < 1e-6


@settings(max_examples=60)
@given(
    st.sampled_from(MAPS),
    st.lists(st.tuples(*[st.floats(-50, 50)] * 3), min_size=1, max_size=6),
    st.lists(st.floats(0, 1), min_size=6, max_size=6),
)
def test_any_point_of_any_box_is_within(
    choice: Choice, entries: list[tuple[float, float, float]], shares: list[float]
) -> None:
    c, one, other = torch.tensor(entries, dtype=torch.float64).unbind(-1)
    low, high = torch.minimum(one, other), torch.maximum(one, other)
    share = torch.tensor(shares[: len(c)], dtype=torch.float64)
    lower, upper = range_over_box(choice, c, low, high)
    z = torch.minimum(low + share * (high - low), high)
    noise = 1e-3 if isinstance(choice, Entmax) and choice.alpha > 2.0 else 1e-9
    value = float(values(choice, c, z))
    assert float(lower) - noise <= value <= float(upper) + noise


def test_boxes_and_maps_that_have_no_range_are_refused() -> None:
    c, low, high = boxes(7, 1, 3)
    with pytest.raises(ValueError, match="Hard jump"):
        range_over_box(Hard(), c, low, high)
    with pytest.raises(ValueError, match="low <= high"):
        range_over_box(Softmax(), c, high + 1.0, low)
    with pytest.raises(ValueError, match="finite numbers"):
        range_over_box(Softmax(), c, low, high * float("nan"))
    with pytest.raises(ValueError, match="floating point"):
        range_over_box(Softmax(), c.long(), low, high)
    with pytest.raises(ValueError, match="one alpha"):
        range_over_box(Entmax(torch.tensor([1.5, 2.0])), c, low, high)
    assert range_over_box(Softmax(), c[:, :0], low[:, :0], high[:, :0])[0].shape == (1,)
