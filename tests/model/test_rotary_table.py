"""model/rotary_table.py: the table of rotations, and the sinusoids of the first Transformer."""

import math

import torch

from fenchel.attention import LinearScaling, Llama3Scaling, NTKScaling, YarnScaling, angles
from fenchel.model import ModelConfig
from fenchel.model.rotary_table import RotaryTable, scaling, sinusoids

POSITIONS = torch.arange(40)


def test_entries_are_those_of_the_formula() -> None:
    table = sinusoids(POSITIONS, 6)
    for pos in (0, 1, 17):
        for i in range(3):
            angle = pos / 10000 ** (2 * i / 6)
            assert math.isclose(table[pos, 2 * i], math.sin(angle))
            assert math.isclose(table[pos, 2 * i + 1], math.cos(angle))


def test_a_shift_is_one_rotation_for_all_positions() -> None:
    table = sinusoids(POSITIONS, 6)
    for i in range(3):
        w = 10000 ** (-2 * i / 6)
        c, s = math.cos(5 * w), math.sin(5 * w)
        turn = torch.tensor([[c, s], [-s, c]], dtype=torch.float64)
        pair = table[:, 2 * i : 2 * i + 2]
        torch.testing.assert_close(pair[5:], pair[:-5] @ turn.T)


def test_products_depend_on_the_distance_alone_when_the_width_is_even() -> None:
    def spread(width: int) -> float:
        table = sinusoids(POSITIONS, width)
        products = table @ table.T
        diagonals = [products.diagonal(k) for k in range(40)]
        return max(float(d.max() - d.min()) for d in diagonals)

    assert spread(64) < 1e-12
    assert spread(7) > 1e-4  # one entry is left without its partner
    table = sinusoids(POSITIONS, 64)
    w = 10000 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    torch.testing.assert_close(table[30] @ table[7], (23 * w).cos().sum())


def test_positions_far_beyond_any_table_are_defined() -> None:
    far = sinusoids(torch.tensor([10**7]), 8)
    torch.testing.assert_close(far.square().sum(), torch.tensor(4.0, dtype=torch.float64))


def config(**settings: object) -> ModelConfig:
    return ModelConfig(vocabulary=9, width=32, heads=2, context=40, **settings)


def test_a_table_that_grew_gives_what_a_fresh_one_would() -> None:
    like = torch.zeros((), dtype=torch.float64)
    turning = RotaryTable(config())
    for start, end in ((0, 3), (2, 7), (0, 40), (5, 6)):
        wanted = angles(torch.arange(start, end), 16, dtype=torch.float64)
        torch.testing.assert_close(turning.between(start, end, like), wanted)
    at = torch.tensor([[0, 3, 3], [7, 1, 0]])
    torch.testing.assert_close(turning.at(at, 8, like), angles(at, 16, dtype=torch.float64))
    assert turning.between(0, 4, like.float()).cos.dtype == torch.float32


def test_settings_become_the_scaling_they_name() -> None:
    assert scaling(config()) is None
    assert scaling(config(rotary_scaling="linear", rotary_factor=2.0)) == LinearScaling(2.0)
    assert scaling(config(rotary_scaling="ntk", rotary_factor=2.0)) == NTKScaling(2.0)
    assert scaling(config(rotary_scaling="yarn", rotary_factor=2.0)) == YarnScaling(
        2.0, 40, 32.0, 1.0
    )
    told = {"rotary_trained_context": 10, "rotary_slow": 2.0, "rotary_fast": 8.0}
    yarn = config(rotary_scaling="yarn", rotary_attention=1.5, rotary_truncate=False, **told)
    assert scaling(yarn) == YarnScaling(1.0, 10, 8.0, 2.0, 1.5, truncate=False)
    assert scaling(config(rotary_scaling="llama3", **told)) == Llama3Scaling(1.0, 10, 2.0, 8.0)


def test_layers_with_a_window_may_turn_by_a_base_of_their_own() -> None:
    both = config(
        windows=(4, 0), rotary_local_base=50.0, rotary_scaling="linear", rotary_factor=2.0
    )
    like = torch.zeros((), dtype=torch.float64)
    local = RotaryTable(both, local=True).between(0, 9, like)
    wide = RotaryTable(both).between(0, 9, like)
    torch.testing.assert_close(local, angles(torch.arange(9), 16, base=50.0, dtype=torch.float64))
    halved = angles(torch.arange(9), 16, scaling=LinearScaling(2.0), dtype=torch.float64)
    torch.testing.assert_close(wide, halved)
