"""fenchel/attention/rotary.py: laws of rotation, and the scalings against transformers."""

import math

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from fenchel.attention.rotary import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    RotaryScaling,
    YarnScaling,
    angles,
    rotary,
    rotate,
    to_half,
    to_pairs,
)

LAYOUTS = pytest.mark.parametrize("layout", ["half", "pairs"])


def explicit(x: Tensor, position: float, layout: str) -> Tensor:
    """The rotation as a matrix, block by block."""
    W = x.shape[-1]
    R = torch.zeros(W, W, dtype=x.dtype)
    for i in range(W // 2):
        a, b = (i, i + W // 2) if layout == "half" else (2 * i, 2 * i + 1)
        angle = position * 10000.0 ** (-2 * i / W)
        R[a, a] = R[b, b] = math.cos(angle)
        R[a, b], R[b, a] = -math.sin(angle), math.sin(angle)
    return x @ R.mT


@LAYOUTS
def test_entries_turn_as_the_explicit_matrix_turns_them(draw, layout: str) -> None:
    x = draw(2, 3, 5, 8)
    turned = rotary(x, torch.arange(5), layout=layout)
    for m in range(5):
        torch.testing.assert_close(turned[:, :, m], explicit(x[:, :, m], m, layout))


@LAYOUTS
def test_scores_depend_on_the_distance_and_its_sign(draw, layout: str) -> None:
    q, k = draw(1, 1, 1, 8), draw(1, 1, 1, 8)

    def product(m: int, n: int) -> Tensor:
        a = rotary(q, torch.tensor([m]), layout=layout)
        return (a * rotary(k, torch.tensor([n]), layout=layout)).sum()

    torch.testing.assert_close(product(9, 4), product(105, 100))
    assert (product(9, 4) - product(4, 9)).abs() > 1e-3


def test_norms_stay_and_position_0_is_untouched(draw) -> None:
    x = draw(2, 3, 5, 8)
    turned = rotary(x, torch.arange(5))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[:, :, 0], x[:, :, 0])


def test_the_two_layouts_are_one_up_to_order_and_never_the_same(draw) -> None:
    x, positions = draw(2, 3, 5, 8), torch.arange(5)
    pairs = rotary(x, positions, layout="pairs")
    torch.testing.assert_close(rotary(to_half(x), positions, layout="half"), to_half(pairs))
    assert torch.equal(to_pairs(to_half(x)), x)
    assert (rotary(x, positions, layout="half") - pairs).abs().max() > 0.1


def test_positions_may_differ_between_sequences(draw) -> None:
    x, positions = draw(2, 3, 5, 8), torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]])
    both = rotary(x, positions)
    for b in range(2):
        torch.testing.assert_close(both[b : b + 1], rotary(x[b : b + 1], positions[b]))


def test_entries_beyond_the_angles_pass_unchanged(draw) -> None:
    x, turn = draw(2, 3, 5, 8), angles(torch.arange(5), 6, dtype=torch.float64)
    turned = rotate(x, turn)
    assert torch.equal(turned[..., 6:], x[..., 6:])
    torch.testing.assert_close(turned[..., :6], rotary(x[..., :6], torch.arange(5)))


def test_it_turns_as_transformers_turns() -> None:
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
    speed = 1.0 / 10000.0 ** (torch.arange(0, 8, 2).float() / 8)
    angle = torch.arange(5.0)[:, None] * speed
    full = torch.cat((angle, angle), -1)[None]
    theirs, _ = apply_rotary_pos_emb(x, x, full.cos(), full.sin())
    torch.testing.assert_close(rotary(x, torch.arange(5)), theirs)


def their_frequencies(
    kind: str, seq_len: int | None = None, **settings: float
) -> tuple[Tensor, float]:
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **settings},
    )
    return ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"), seq_len=seq_len)


def our_frequencies(scaling: RotaryScaling, width: int = 64) -> Tensor:
    t = 1.0 / 10000.0 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    return scaling.frequencies(t, 10000.0, width)


@pytest.mark.parametrize(
    ("scaling", "kind", "settings"),
    [
        (LinearScaling(4.0), "linear", {"factor": 4.0}),
        (NTKScaling(5.0), "dynamic", {"factor": 2.0, "seq_len": 3 * 2048}),  # 2 * 3 - (2 - 1) = 5
        (YarnScaling(4.0, 2048), "yarn", {"factor": 4.0, "original_max_position_embeddings": 2048}),
        (
            YarnScaling(16.0, 512, fast=20.0, slow=2.0, attention=1.3, truncate=False),
            "yarn",
            {
                "factor": 16.0,
                "original_max_position_embeddings": 512,
                "beta_fast": 20.0,
                "beta_slow": 2.0,
                "attention_factor": 1.3,
                "truncate": False,
            },
        ),
        (
            Llama3Scaling(8.0, 8192),
            "llama3",
            {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        (
            Llama3Scaling(32.0, 1000, low=2.0, high=7.0),
            "llama3",
            {
                "factor": 32.0,
                "low_freq_factor": 2.0,
                "high_freq_factor": 7.0,
                "original_max_position_embeddings": 1000,
            },
        ),
    ],
    ids=lambda x: repr(x) if not isinstance(x, dict) else "",
)
def test_scaled_frequencies_are_those_of_transformers(
    scaling: RotaryScaling, kind: str, settings: dict[str, float]
) -> None:
    theirs, magnitude = their_frequencies(kind, **settings)  # type: ignore[arg-type]
    torch.testing.assert_close(our_frequencies(scaling).float(), theirs, rtol=1e-5, atol=0)
    assert scaling.magnitude == pytest.approx(magnitude)


def test_ntk_divides_the_slowest_speed_by_exactly_its_factor() -> None:
    plain, scaled = our_frequencies(LinearScaling(1.0)), our_frequencies(NTKScaling(8.0))
    assert plain[-1] / scaled[-1] == pytest.approx(8.0, rel=1e-12)
    assert scaled[0] == plain[0]
    base = 10000.0 * 8.0 ** (64 / 62)
    assert base == pytest.approx(85550, rel=1e-4)
    eight_fold = 80000.0 ** (-torch.arange(0, 64, 2).double() / 64)  # the factor itself as base
    assert float(plain[-1] / eight_fold[-1]) == pytest.approx(7.497, abs=5e-4)


def test_the_slowest_speed_follows_from_the_width_of_a_head() -> None:
    """Width 64 in a model of 512: with the model's width the slowest pair turns in 19 positions."""
    slowest = float(our_frequencies(LinearScaling(1.0))[-1])
    assert slowest == pytest.approx(1.334e-4, rel=5e-4)
    assert round(2 * math.pi / slowest) == 47117
    wrong = 10000.0 ** (-62 / 512)
    assert wrong == pytest.approx(0.3278, abs=5e-5)
    assert round(2 * math.pi / wrong) == 19


def test_a_larger_base_is_a_smaller_speed_power_by_power() -> None:
    at = torch.arange(3)
    x = torch.randn(1, 1, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    speed = 4.0 ** (-torch.arange(0, 8, 2).double() / 8) * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    expected = angles(at, 8, base=40000.0, dtype=torch.float64)
    torch.testing.assert_close(expected.cos[:, :4], (at[:, None] * speed).cos())
    torch.testing.assert_close(rotary(x, at, base=40000.0), rotate(x, expected))


def test_yarn_tempers_the_scores_by_the_square_of_its_magnitude(draw) -> None:
    x, scaling = draw(1, 1, 2, 64), YarnScaling(4.0, 2048)
    grown = rotary(x, torch.arange(2), scaling=scaling)
    torch.testing.assert_close(grown[0, 0, 0], x[0, 0, 0] * (0.1 * math.log(4.0) + 1.0))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: angles(torch.arange(3), 5), "even"),
        (lambda: angles(torch.zeros(1, 1, 1), 4), "positions"),
        (lambda: rotate(torch.zeros(1, 1, 3, 4), angles(torch.arange(3), 6)), "6 wide"),
        (lambda: rotary(torch.zeros(1, 1, 3, 4), torch.arange(3), layout="x"), "half"),
        (
            lambda: rotary(torch.zeros(1, 1, 3, 2), torch.arange(3), scaling=NTKScaling(2.0)),
            "4 or more",
        ),
    ],
)
def test_what_cannot_turn_is_refused_in_a_sentence(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]
