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
@pytest.mark.parametrize("slack", [0, 2, 16])
@pytest.mark.parametrize("sizes", [[1] * 90, [40, 1, 1, 48], [7, 30, 2, 2, 9, 40], [90]])
def test_a_window_returns_the_keys_that_its_queries_see(
    sizes: list[int], slack: int, kind: Any
) -> None:
    """In order for several tokens; for one token at the positions that the cache names."""
    config = plain(layers=1, windows=(6,), context=90)
    cache = KVCache(config, batch=1, positions=90, kind=kind, slack=slack)
    x = torch.arange(90.0).view(1, 1, 90, 1).expand(1, 4, 90, 3)
    start = 0
    for size in sizes:
        k, v = cache.append(0, x[:, :, start : start + size], -x[:, :, start : start + size])
        placed, visible = cache.key_positions(0), cache.visible(0)
        found = k[0, 0, :, 0].tolist()
        if size == 1 and placed is not None:
            assert [int(n) for n in found] == placed[0].tolist()
            if visible is not None:
                found = [n for n, seen in zip(found, visible[0].tolist(), strict=True) if seen]
        first = max(0, start - 5)
        assert sorted(found) == list(range(first, start + size))
        assert size == 1 or found == sorted(found)
        assert torch.equal(k, -v)
        cache.advance(size)
        start += size


def test_layers_that_share_keys_store_them_once(lively: Callable[..., Transformer]) -> None:
    """In every kind of store; the copy of one byte is the one that its layers read."""
    shared = {"layers": 4, "windows": (4, 0), "positions": "learned"}
    model = lively(**shared, shared_kv_layers=2)
    alone = KVCache(lively(**shared).config, batch=1, positions=16)
    cache = KVCache(model.config, batch=1, positions=16)
    assert alone.bytes == 2 * cache.bytes
    assert cache.layers[2] is cache.layers[0]
    ids = torch.arange(12)[None]
    for kind, error in (("model", 1e-5), ("float16", 1e-2), ("int8", 0.2)):
        cache = KVCache(model.config, batch=1, positions=16, kind=kind)
        parts = [model(part, cache=cache) for part in ids.split([7, 1, 3, 1], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids), rtol=0, atol=error)


def test_rows_have_lengths_of_their_own() -> None:
    config = plain(layers=2, windows=(3, 0), context=20)
    cache = KVCache(config, batch=3, positions=20, slack=0)
    lengths = [0, 2, 9]
    for row, n in enumerate(lengths):
        view = cache.select([row], [0])
        for layer in range(2 if n else 0):
            x = 100.0 * row + torch.arange(float(n)).view(1, 1, n, 1).expand(1, 4, n, 3)
            view.append(layer, x, x)
    view = cache.select(slice(0, 3), lengths)
    new = torch.tensor([100.0 * row + n for row, n in enumerate(lengths)])
    x = new.view(3, 1, 1, 1).expand(3, 4, 1, 3)
    for layer, seen in ((0, 3), (1, 99)):
        k, _ = view.append(layer, x, x)
        visible, placed = view.visible(layer), view.key_positions(layer)
        assert visible is not None
        assert placed is not None
        for row, n in enumerate(lengths):
            tokens = sorted(int(t) - 100 * row for t in k[row, 0, visible[row], 0])
            assert tokens == list(range(max(0, n + 1 - seen), n + 1))
            assert sorted(t for t in placed[row].tolist() if t >= 0) == tokens
    positions = view.new_positions(1)
    assert positions is not None
    assert positions[:, 0].tolist() == lengths
    view.advance(1)
    assert view.starts == [1, 3, 10]


def test_a_row_can_go_back_as_far_as_its_windows_have_keys() -> None:
    cache = KVCache(plain(layers=2, windows=(4, 0)), batch=1, positions=100, slack=5)
    for read in range(60):
        for length in range(read + 1):
            first = max(0, read + 1 - 9)  # 9 slots, of which the next token takes one
            assert cache.can_rewind(length, read) == (max(0, length - 3) >= first)
    assert not cache.can_rewind(5, 4)


def test_unequal_rows_take_one_token_at_a_time() -> None:
    cache = KVCache(plain(), batch=2, positions=9).select([0, 1], [1, 3])
    with pytest.raises(ValueError, match="one token at a time"):
        cache.append(0, noise(2, 4, 2, 3), noise(2, 4, 2, 3))


def test_a_full_cache_is_refused_by_its_size() -> None:
    for windows in ((), (2,)):
        cache = KVCache(plain(windows=windows), batch=1, positions=4)
        with pytest.raises(ValueError, match="room for 4 positions, not 5"):
            cache.append(0, noise(1, 4, 5, 3), noise(1, 4, 5, 3))


def test_keys_of_the_encoder_are_computed_once_per_layer() -> None:
    cache = KVCache(plain(), batch=1, positions=4)
    made = list[int]()

    def make(layer: int) -> tuple[Tensor, Tensor]:
        made.append(layer)
        return noise(1, 4, 6, 3, seed=layer), noise(1, 4, 6, 3, seed=-layer)

    first = [cache.cross_kv(layer, lambda n=layer: make(n)) for layer in (0, 1)]  # type: ignore[misc]
    cache.restart([3])
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


def stores() -> list[tuple[Store, float]]:
    """Each kind, with the relative error that its bits allow."""
    work = torch.empty(ROOM)
    return [
        (DenseStore(ROOM, dtype=torch.float32, device="cpu"), 0.0),
        (DenseStore(ROOM, dtype=torch.float16, device="cpu", work=work), 2.0**-11),
        (Int8Store(ROOM, device="cpu", work=work), 0.5 / INT8_MAX),
    ]


@pytest.mark.parametrize("which", range(3))
def test_what_is_written_is_read_to_within_its_bits(which: int) -> None:
    store, error = stores()[which]
    x = entries(2, 3, 4, 5)
    store.write(slice(0, 2), slice(2, 6), x)
    back = store.read(slice(0, 2), 2, 6)
    assert back.dtype == torch.float32
    assert bool(((back - x).abs() <= error * x.abs().amax(-1, keepdim=True) * 1.0001).all())


@pytest.mark.parametrize("which", range(3))
def test_a_token_of_each_row_goes_to_a_slot_of_its_own(which: int) -> None:
    store, error = stores()[which]
    x = entries(2, 3, 1, 5)
    store.write(slice(0, 2), torch.tensor([4, 1]), x)
    for row, slot in enumerate((4, 1)):
        back = store.read(torch.tensor([row]), slot, slot + 1)[0]
        assert bool(((back - x[row]).abs() <= error * x[row].abs().amax() * 1.0001).all())
        others = [store.read(torch.tensor([row]), at, at + 1) for at in range(7) if at != slot]
        assert not any(bool(one.any()) for one in others)


def test_values_for_the_kernel_have_their_slots_along_memory() -> None:
    work = torch.empty(ROOM)
    usual = Int8Store(ROOM, device="cpu", work=work)
    other = Int8Store(ROOM, device="cpu", work=work.clone(), slots_last=16)
    x = entries(2, 3, 7, 5)
    for store in (usual, other):
        store.write(slice(0, 2), slice(0, 7), x)
    assert torch.equal(usual.read(slice(0, 2), 0, 7), other.read(slice(0, 2), 0, 7))
    assert other.memory.shape == (2, 3, 5, 16)
    assert torch.equal(other.memory[..., :7], usual.memory.mT)


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
    sizes = [store.bytes for store, _ in stores()]
    assert sizes == [4 * elements, 2 * elements, elements + 4 * elements // ROOM.D]
