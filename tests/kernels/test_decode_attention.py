"""kernels/decode_attention.py against rotate and attend in float64, with the slots of
generation/kv_cache.py.
"""

from typing import Any, NamedTuple

import entmax
import pytest
import torch
from torch import Tensor

from fenchel.attention import Angles, Dense, angles, attend
from fenchel.attention.rotary import rotate
from fenchel.choice import Choice, Entmax, Softmax
from fenchel.generation.fused_step import WIDEST_HEAD
from fenchel.generation.kv_cache import quantise_int8
from fenchel.kernels import decode_attention
from fenchel.kernels.decode_attention import (
    CacheTensors,
    attend_decode,
    padded_slots,
    split_count,
)

B = 3
SCALE = 0.7
SMALLEST_PAGE = {"cpu": 4, "cuda": 16}
"""Slots per page: tl.dot adds over 16 at least, which the interpreter does not require."""
NUMBERS: list[tuple[int, tuple[int, int, int]]] = [
    (40, (0, 0, 0)),  # the first token attends to itself alone
    (40, (21, 21, 21)),
    (40, (32, 39, 1)),  # to the last slot, and a sequence that has only just begun
    (10, (25, 25, 25)),  # a window that has gone round twice
    (10, (9, 9, 9)),
    (77, (76, 0, 33)),
    (40, (12, -1, 0)),  # the second row has no token
]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Case(NamedTuple):
    """Inputs of a call in float32, what it should return, and the newest keys and values."""

    qkv: Tensor
    cached: tuple[Tensor, Tensor]
    token: Tensor
    rotation: Angles | None
    wanted: Tensor
    newest: tuple[Tensor, Tensor]


def case(
    R: int,
    numbers: tuple[int, int, int],
    *,
    heads: tuple[int, int] = (6, 2),
    D: int = 8,
    rotates: bool = True,
    choice: Choice | None = None,
    size: float = 1.0,
    round_to: Any = None,
) -> Case:
    """A batch; ``round_to`` is what the cache does to an entry on its way in."""
    H, G = heads
    rotation = angles(torch.arange(max(numbers) + 1), D) if rotates else None
    qkv = draw(B, (H + 2 * G) * D)
    qkv[:, : H * D] *= size
    cached = (torch.full((B, G, R, D), 9.0), torch.full((B, G, R, D), 9.0))
    wanted, newest = torch.zeros(B, H * D), (torch.zeros(B, G, D), torch.zeros(B, G, D))
    for b in range(B):
        n = numbers[b]
        if n < 0:
            continue
        q, k, v = qkv[b].view(1, H + 2 * G, 1, D).split([H, G, G], 1)
        if rotation is not None:
            here = Angles(*(t[n] for t in rotation))
            q, k = rotate(q, here), rotate(k, here)
        # Tokens 0 to n in order, and the same in their slots; arbitrary numbers elsewhere.
        keys, values = (draw(1, G, n + 1, D, seed=s + 3 * b) for s in (1, 2))
        keys[:, :, n:], values[:, :, n:] = k, v
        present = torch.arange(max(0, n + 1 - R), n)
        for cache, source, new in zip(cached, (keys, values), newest, strict=True):
            cache[b, :, present % R] = source[0, :, present]
            new[b] = source[0, :, n]
        forbidden = torch.arange(n + 1) <= n - R
        log_prior = torch.zeros(1, 1, 1, n + 1).masked_fill(forbidden, -torch.inf).double()
        if round_to is not None:
            keys, values = round_to(keys), round_to(values)
        o = attend(
            q.double(),
            keys.double(),
            values.double(),
            choice=choice or Softmax(),
            prior=Dense(log_prior),
            scale=SCALE,
            backend="reference",
        )
        wanted[b] = o.reshape(H * D)
    return Case(qkv, cached, torch.tensor(numbers), rotation, wanted, newest)


def run(
    case: Case, device: str, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Tensor, CacheTensors]:
    """The output of a call in float32, and the cache after it; an int8 cache where asked for."""
    int8 = options.pop("int8", False)
    o = torch.full_like(case.wanted, 77.0, dtype=dtype, device=device)
    cache = CacheTensors(*(x.to(dtype).to(device) for x in case.cached))
    if int8:
        (k, ks), (v, vs) = (quantise_int8(x) for x in case.cached)
        padding = padded_slots(v.shape[2]) - v.shape[2]
        v = torch.nn.functional.pad(v.transpose(2, 3), (0, padding), value=99)
        cache = CacheTensors(*(x.to(device) for x in (k, v, ks.squeeze(-1), vs.squeeze(-1))))
    token, at = case.token.to(device), None
    if case.rotation is not None:
        at = (case.rotation.cos.to(dtype).to(device), case.rotation.sin.to(dtype).to(device))
    attend_decode(case.qkv.to(dtype).to(device), cache, token, o, angles=at, scale=SCALE, **options)
    return o.float().cpu(), cache


@pytest.mark.parametrize(("D", "rotates"), [(8, True), (6, False)], ids=["rotary", "no rotary"])
@pytest.mark.parametrize("splits", [None, 2], ids=["per head", "split"])
@pytest.mark.parametrize(("R", "numbers"), NUMBERS)
def test_a_query_attends_to_every_present_token(
    R: int,
    numbers: tuple[int, int, int],
    splits: int | None,
    rotates: bool,
    D: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SLOTS", "PAGE", "MULTIPLE"):
        monkeypatch.setattr(decode_attention, name, 16)  # several blocks of so few slots
    drawn = case(R, numbers, heads=(4, 2), D=D, rotates=rotates)
    o, cache = run(drawn, device, splits=splits)
    torch.testing.assert_close(o, drawn.wanted, atol=1e-5, rtol=1e-5)
    for after, before, new in zip(cache, drawn.cached, drawn.newest, strict=False):
        assert after is not None
        for b, n in enumerate(numbers):
            if n >= 0:  # the newest is stored, and nothing else
                before[b, :, n % R] = new[b]
        torch.testing.assert_close(after.cpu(), before)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0, 1.3])
@pytest.mark.parametrize(
    ("heads", "splits", "case_number"),
    [((2, 2), 1, 2), ((4, 2), 3, 5), ((3, 1), 2, 3), ((2, 1), 2, 6)],
    ids=["MHA", "GQA", "window", "a row without a token"],
)
def test_every_map_and_ratio_of_heads(
    alpha: float,
    heads: tuple[int, int],
    splits: int,
    case_number: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_attention, "PAGE", SMALLEST_PAGE[device])
    monkeypatch.setattr(decode_attention, "CHUNK", 8)
    choice = Softmax() if alpha == 1.0 else Entmax(alpha)
    drawn = case(*NUMBERS[case_number], heads=heads, choice=choice, size=2.0)
    o, _ = run(drawn, device, alpha=alpha, splits=splits)
    torch.testing.assert_close(o, drawn.wanted, atol=2e-5, rtol=2e-5)


def test_more_queries_than_the_rows_of_a_tile(device: str) -> None:
    drawn = case(40, (39, 32, 1), heads=(20, 1))
    o, _ = run(drawn, device, splits=1)
    torch.testing.assert_close(o, drawn.wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_the_number_of_splits_changes_rounding_alone(alpha: float, device: str) -> None:
    drawn = case(250, (249, 101, 3), heads=(1, 1))
    results = [run(drawn, device, alpha=alpha, splits=splits)[0] for splits in (1, 2, 7)]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=2e-6, rtol=2e-6)
    again = run(drawn, device, alpha=alpha, splits=7)[0]
    assert torch.equal(again, results[2])


@pytest.mark.parametrize(
    ("alpha", "dtype", "heads", "D"),
    [
        (1.0, torch.float32, (2, 1), 8),
        (1.0, torch.float16, (2, 1), 8),
        (1.0, torch.bfloat16, (2, 1), 8),
        (1.5, torch.bfloat16, (2, 1), 8),
        (1.0, torch.float32, (12, 2), 64),
        (1.5, torch.float32, (20, 1), 24),
    ],
)
def test_an_int8_cache_is_read_as_its_rounded_entries(
    alpha: float, dtype: torch.dtype, heads: tuple[int, int], D: int, device: str
) -> None:
    """Against float64 on the entries s n; the rest is the rounding of the dtype."""

    def rounded(x: Tensor) -> Tensor:
        n, s = quantise_int8(x.to(dtype))
        return n * s

    choice = Softmax() if alpha == 1.0 else Entmax(alpha)
    drawn = case(
        150, (149, 0, 40), heads=heads, D=D, choice=choice, rotates=False,
        round_to=rounded,
    )  # fmt: skip
    drawn = drawn._replace(cached=tuple(x.to(dtype).float() for x in drawn.cached))
    tolerance = {torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for splits in (1, 2):
        o, cache = run(drawn, device, dtype, alpha=alpha, int8=True, splits=splits)
        error = float((o - drawn.wanted).norm() / drawn.wanted.norm())
        assert error < tolerance
        entries = cache.keys, cache.values.transpose(2, 3)
        for stored, scales, new in zip(entries, cache[2:], drawn.newest, strict=True):
            n, s = quantise_int8(new.to(dtype))
            assert scales is not None
            for b, slot in enumerate((149, 0, 40)):  # the newest is stored as the cache stores it
                assert torch.equal(stored[b, :, slot].cpu(), n[b])
                torch.testing.assert_close(scales[b, :, slot].cpu(), s[b, :, 0], rtol=0, atol=0)


def test_the_largest_products_of_bytes_are_exact(device: str) -> None:
    """Every byte of queries and keys is 127: sums of 127^2 D, at the widest head."""
    D, R, token = WIDEST_HEAD, 40, torch.full((B,), 39)
    sizes = torch.linspace(1.5, 0.5, R)  # of the keys; the newest, of size 0.5, is in the last slot
    keys = sizes.view(1, 1, R, 1).expand(B, 1, R, D).contiguous()
    values, query = draw(B, 1, R, D), 4.0 / (SCALE * D)
    qkv = torch.full((B, 3 * D), query)
    qkv[:, D : 2 * D], qkv[:, 2 * D :] = 0.5, values[:, 0, -1]
    n, s = quantise_int8(values)
    wanted = (4.0 * sizes).double().softmax(0) @ (n.double() * s)[:, 0]
    drawn = Case(qkv, (keys, values), token, None, wanted, (keys, values))
    o, _ = run(drawn, device, int8=True, splits=1)
    torch.testing.assert_close(o.double(), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_half_precision_rounds_and_no_more(alpha: float, dtype: torch.dtype, device: str) -> None:
    choice = Softmax() if alpha == 1.0 else Entmax(alpha)
    drawn = case(150, (149, 0, 40), heads=(3, 1), D=16, choice=choice)
    o, _ = run(drawn, device, dtype, alpha=alpha, splits=2)
    error = float((o - drawn.wanted).norm() / drawn.wanted.norm())
    assert error < {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]


@pytest.mark.parametrize("splits", [None, 2])
def test_large_scores_do_no_harm(splits: int | None, device: str) -> None:
    drawn = case(20, (11, 11, 11), size=100.0, rotates=False)
    o, _ = run(drawn, device, splits=splits)
    torch.testing.assert_close(o, drawn.wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 1e4])
@pytest.mark.parametrize("alpha", [1.5, 2.0, 1.2])
def test_thresholds_of_equal_close_and_distant_scores(
    alpha: float, size: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights by the package entmax: values that are unit vectors make the output the weights."""
    monkeypatch.setattr(decode_attention, "PAGE", SMALLEST_PAGE[device])
    R = D = 64
    qkv = draw(1, 3 * D) * torch.cat((torch.full((D,), size), torch.ones(2 * D)))
    keys, values = draw(1, 1, R, D, seed=1), torch.eye(D).view(1, 1, R, D).clone()
    qkv[:, 2 * D :] = values[0, 0, -1]  # the newest, in the last slot
    keys[0, 0, -1] = qkv[0, D : 2 * D]
    z = keys[0, 0].double() @ qkv[0, :D].double() * 0.5
    wanted = entmax.entmax_bisect(z, alpha=alpha, n_iter=100)
    o = torch.empty(1, D, device=device)
    token = torch.tensor([R - 1], device=device)
    cache = CacheTensors(keys.to(device), values.to(device))
    attend_decode(qkv.to(device), cache, token, o, angles=None, scale=0.5, alpha=alpha, splits=1)
    tolerance = 1e-5 if size < 1e3 else 0.02  # scores of 1e4 are themselves rounded by 1e-3
    torch.testing.assert_close(o[0].double().cpu(), wanted, atol=tolerance, rtol=tolerance)


def test_splits_fill_the_device_and_none_is_nearly_empty() -> None:
    assert split_count(1056, 100_000) == 1
    assert split_count(64, 32_768) == 17
    assert split_count(4, 32_768) == 128
    assert split_count(1, 300) == 2
