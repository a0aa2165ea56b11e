"""fenchel/generation/kv_cache.py: what is written comes back, as nearly as it was promised."""

import pytest
import torch

from fenchel.generation.kv_cache import (
    INT8_MAX,
    DenseStore,
    Int8Store,
    Store,
    StoreShape,
    quantise_int8,
)

ROOM = StoreShape(2, 3, 7, 5)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shelves() -> list[tuple[Store, float]]:
    """Each kind, with the relative error that its bits allow."""
    work = torch.empty(ROOM)
    return [
        (DenseStore(ROOM, dtype=torch.float32, device="cpu"), 0.0),
        (DenseStore(ROOM, dtype=torch.float16, device="cpu", work=work), 2.0**-11),
        (Int8Store(ROOM, device="cpu", work=work), 0.5 / INT8_MAX),
    ]


@pytest.mark.parametrize("which", range(3))
def test_what_is_written_is_read_to_within_its_bits(which: int) -> None:
    shelf, error = shelves()[which]
    x = noise(2, 3, 4, 5)
    shelf.write(2, x)
    back = shelf.read(2, 6)
    assert back.dtype == torch.float32
    assert bool(((back - x).abs() <= error * x.abs().amax(-1, keepdim=True) * 1.0001).all())


@pytest.mark.parametrize("which", range(3))
def test_what_slides_to_the_front_is_the_same(which: int) -> None:
    shelf, _ = shelves()[which]
    shelf.write(0, noise(2, 3, 7, 5))
    before = shelf.read(1, 6).clone()
    shelf.slide(1, 6)  # onto itself: the places overlap
    assert torch.equal(shelf.read(0, 5), before)


def test_normal_numbers_lose_two_thirds_of_a_percent_in_int8() -> None:
    x = noise(4096, 128)
    n, s = quantise_int8(x)
    assert float((s * n - x).norm() / x.norm()) == pytest.approx(0.0066, abs=2e-4)


def test_the_largest_entry_of_every_token_is_exact_and_rounding_again_changes_nothing() -> None:
    x = noise(3, 4, 6) * 10.0 ** torch.arange(-4, 0).unsqueeze(-1)
    n, s = quantise_int8(x)
    assert bool((n.abs().amax(-1) == INT8_MAX).all())
    again, _ = quantise_int8(s * n)
    assert torch.equal(again, n)


@pytest.mark.parametrize("x", [0.0, 1e-44, -1e-44, 3e38])
def test_no_size_of_entry_gives_nan(x: float) -> None:
    n, s = quantise_int8(torch.tensor([[x, 0.0]]))
    assert float((s * n)[0, 0]) == pytest.approx(x, rel=1e-5, abs=1e-40)


def test_int8_and_half_precision_count_their_bytes() -> None:
    elements = ROOM.B * ROOM.G * ROOM.R * ROOM.D
    sizes = [shelf.bytes for shelf, _ in shelves()]
    assert sizes == [4 * elements, 2 * elements, elements + 4 * elements // ROOM.D]
