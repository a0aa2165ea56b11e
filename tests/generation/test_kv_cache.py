"""fenchel/generation/kv_cache.py: reading in pieces is reading at once, in less memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fenchel.generation import KVCache
from fenchel.generation.kv_cache import (
    INT8_MAX,
    DenseStore,
    Int8Store,
    Store,
    StoreShape,
    quantise_int8,
)
from fenchel.model import ModelConfig, Transformer

MIB = 2**20
CONTEXT = 16
ERROR = {"model": 1e-5, "float16": 2e-3, "int8": 1e-2}
"""How far logits may be off, relative to their size."""


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain(**settings: Any) -> ModelConfig:
    return ModelConfig(
        **{"vocabulary": 8, "width": 12, "heads": 4, "positions": "none", **settings}
    )


@pytest.mark.parametrize("kind", ERROR)
@pytest.mark.parametrize("groups", [4, 2, 1])
@torch.no_grad()
def test_every_kind_reads_in_pieces_as_at_once_to_within_its_error(
    kind: Any, groups: int, lively: Callable[..., Transformer], prompts: Callable[..., Tensor]
) -> None:
    model, ids = lively(kv_heads=groups, width=64, layers=3), prompts(3, CONTEXT)
    whole = model(ids)
    cache = KVCache(model.config, batch=3, positions=CONTEXT, kind=kind)
    parts = torch.cat([model(one, cache=cache) for one in ids.split([5, 1, 1, 6, 3], -1)], dim=1)
    assert float((parts - whole).norm() / whole.norm()) < ERROR[kind]
    assert cache.length == CONTEXT


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_fewer_bits_are_really_used(kind: Any) -> None:
    cache = KVCache(plain(), batch=1, positions=9, kind=kind)
    x = noise(1, 4, 9, 3)
    k, v = cache.append(0, x, -x)
    assert k.dtype == v.dtype == torch.float32
    assert not torch.equal(k, x)
    torch.testing.assert_close(k, -v)


@pytest.mark.parametrize(("groups", "mebibytes"), [(32, 64), (1, 2), (8, 16)])
def test_the_worked_sizes_of_a_layer_in_half_precision(groups: int, mebibytes: int) -> None:
    config = ModelConfig(
        vocabulary=8, context=4096, width=4096, heads=32, kv_heads=groups, layers=1
    )
    sizes = {"batch": 1, "positions": 4096, "dtype": torch.float16, "device": "meta"}
    cache = KVCache(config, **sizes)  # type: ignore[arg-type]
    assert cache.bytes == mebibytes * MIB == 2 * groups * 4096 * 128 * 2
    deep = ModelConfig(vocabulary=8, context=4096, width=4096, heads=32, kv_heads=groups, layers=40)
    small = KVCache(deep, kind="int8", **sizes)  # type: ignore[arg-type]
    # A byte and 4 / 128 an element, and one layer widened.
    assert small.bytes == mebibytes * MIB * (40 * (1 + 4 / 128) / 2 + 1)


def test_a_windowed_layer_holds_its_window_and_not_the_text() -> None:
    config = plain(layers=2, context=1000, windows=(8, 0))
    cache = KVCache(config, batch=1, positions=1000, device="meta")
    near, far = (here.keys.bytes for here in cache.layers)
    assert near <= (8 + 16) * far / 1000


@pytest.mark.parametrize("kind", ["model", "float16"])
@pytest.mark.parametrize("sizes", [[1] * 90, [40, 1, 1, 48], [7, 30, 2, 2, 9, 40], [90]])
def test_a_window_sees_its_last_keys_in_order_however_they_came(
    sizes: list[int], kind: Any
) -> None:
    config = plain(layers=1, windows=(6,), context=90)
    cache = KVCache(config, batch=1, positions=90, kind=kind)
    x = torch.arange(90.0).view(1, 1, 90, 1).expand(1, 4, 90, 3)
    start = 0
    for size in sizes:
        k, v = cache.append(0, x[:, :, start : start + size], -x[:, :, start : start + size])
        cache.advance(size)
        first = max(0, start - 5)
        assert k[0, 0, :, 0].tolist() == list(range(first, start + size))
        assert torch.equal(k, -v)
        start += size


@pytest.mark.parametrize("sizes", [[5], [1] * 5], ids=["at once", "one by one"])
@pytest.mark.parametrize("windows", [(), (6,)])
def test_what_was_taken_back_leaves_no_trace(windows: tuple[int, ...], sizes: list[int]) -> None:
    config = plain(layers=1, windows=windows, context=300)
    cache = KVCache(config, batch=1, positions=300, rewindable=4)
    x = torch.arange(300.0).view(1, 1, 300, 1).expand(1, 4, 300, 3)
    wrong = torch.full((1, 4, 5, 3), torch.nan)
    while cache.length < 290:
        at = cache.length
        wrong[:, :, 0] = x[:, :, at]
        for part in wrong.split(sizes, dim=2):
            cache.append(0, part, part)
            cache.advance(part.shape[2])
        cache.rewind(at + 1)  # the four guesses were in vain
        k, _ = cache.append(0, x[:, :, at + 1 : at + 2], x[:, :, at + 1 : at + 2])
        cache.advance(1)
        first = max(0, at + 1 - 5) if windows else 0
        assert k[0, 0, :, 0].tolist() == list(range(first, at + 2))


def test_what_cannot_be_taken_back_is_refused() -> None:
    cache = KVCache(plain(layers=1, windows=(4,)), batch=1, positions=100)
    for _ in range(60):
        cache.append(0, noise(1, 4, 1, 3), noise(1, 4, 1, 3))
        cache.advance(1)
    for length in (5, 61):
        with pytest.raises(ValueError, match=f"cannot go back to {length}"):
            cache.rewind(length)


def test_a_full_cache_says_so() -> None:
    for windows in ((), (2,)):
        cache = KVCache(plain(windows=windows), batch=1, positions=4)
        with pytest.raises(ValueError, match="room for 4 positions, not 5"):
            cache.append(0, noise(1, 4, 5, 3), noise(1, 4, 5, 3))


def test_what_an_encoder_read_is_made_once_a_layer_and_outlives_the_context() -> None:
    cache = KVCache(plain(), batch=1, positions=4)
    made = list[int]()

    def make(layer: int) -> tuple[Tensor, Tensor]:
        made.append(layer)
        return noise(1, 4, 6, 3, seed=layer), noise(1, 4, 6, 3, seed=-layer)

    first = [cache.cross_kv(layer, lambda n=layer: make(n)) for layer in (0, 1)]  # type: ignore[misc]
    cache.clear()
    again = [cache.cross_kv(layer, lambda n=layer: make(n)) for layer in (0, 1)]  # type: ignore[misc]
    assert made == [0, 1]
    assert all(
        a is b for one, two in zip(first, again, strict=True) for a, b in zip(one, two, strict=True)
    )


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="model, float16, int8"):
        KVCache(plain(), batch=1, positions=4, kind="int4")  # type: ignore[arg-type]


ROOM = StoreShape(2, 3, 7, 5)


def entries(*shape: int, seed: int = 0) -> torch.Tensor:
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
    store, error = shelves()[which]
    x = entries(2, 3, 4, 5)
    store.write(2, x)
    back = store.read(2, 6)
    assert back.dtype == torch.float32
    assert bool(((back - x).abs() <= error * x.abs().amax(-1, keepdim=True) * 1.0001).all())


@pytest.mark.parametrize("which", range(3))
def test_what_slides_to_the_front_is_the_same(which: int) -> None:
    store, _ = shelves()[which]
    store.write(0, entries(2, 3, 7, 5))
    before = store.read(1, 6).clone()
    store.slide(1, 6)  # onto itself: the places overlap
    assert torch.equal(store.read(0, 5), before)


def test_normal_numbers_lose_two_thirds_of_a_percent_in_int8() -> None:
    x = entries(4096, 128)
    n, s = quantise_int8(x)
    assert float((s * n - x).norm() / x.norm()) == pytest.approx(0.0066, abs=2e-4)


def test_the_largest_entry_of_every_token_is_exact_and_rounding_again_changes_nothing() -> None:
    x = entries(3, 4, 6) * 10.0 ** torch.arange(-4, 0).unsqueeze(-1)
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
    sizes = [store.bytes for store, _ in shelves()]
    assert sizes == [4 * elements, 2 * elements, elements + 4 * elements // ROOM.D]
