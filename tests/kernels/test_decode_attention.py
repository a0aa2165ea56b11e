"""kernels/decode_attention.py against rotate and attend, with the slots and the fill of
generation/cuda_graph.py.
"""

import pytest
import torch
from torch import Tensor

from fenchel.attention import Angles, Dense, angles, attend
from fenchel.attention.rotary import rotate
from fenchel.kernels import decode_attention
from fenchel.kernels.decode_attention import DecodePosition, attend_decode

B, H, G = 3, 6, 2


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("D", [8, 6])
@pytest.mark.parametrize("rotates", [True, False], ids=["rotary", "no rotary"])
@pytest.mark.parametrize(
    ("R", "n", "fill"),
    [
        (40, 0, (0, 0, 0)),  # the first token attends to itself alone
        (40, 21, (0, 0, 0)),
        (40, 39, (7, 0, 38)),  # to the last slot, and a sequence that has only just begun
        (10, 25, (0, 0, 0)),  # a window that has gone round twice
        (10, 9, (0, 0, 0)),
    ],
)
def test_a_query_attends_to_every_present_token(
    R: int,
    n: int,
    fill: tuple[int, ...],
    rotates: bool,
    D: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_attention, "SLOTS", 16)  # several blocks of so few slots
    fill_B = torch.tensor(fill)
    rotation = angles(torch.arange(n + 1), D)
    qkv = draw(B, (H + 2 * G) * D)
    heads = qkv.view(B, H + 2 * G, 1, D)
    q, k, v = heads.split([H, G, G], 1)
    if rotates:
        here = Angles(*(t[n - fill_B][:, None, None] for t in rotation))
        q, k = rotate(q, here), rotate(k, here)
    # Tokens 0 to n in order, and the same in their slots; arbitrary numbers elsewhere.
    keys, values = draw(B, G, n + 1, D, seed=1), draw(B, G, n + 1, D, seed=2)
    present = torch.arange(max(0, n + 1 - R), n)
    cached = [torch.full((B, G, R, D), 9.0) for _ in range(2)]
    for cache, source in zip(cached, (keys, values), strict=True):
        cache[:, :, R - 1 - present % R] = source[:, :, present]
    keys[:, :, n:], values[:, :, n:] = k, v
    token = torch.arange(n + 1)
    forbidden = (token < fill_B[:, None]) | (token <= n - R)
    log_prior = torch.zeros(B, 1, 1, n + 1).masked_fill(forbidden[:, None, None], -torch.inf)
    wanted = attend(q, keys, values, prior=Dense(log_prior), scale=0.7)

    o = torch.empty(B, H * D, device=device)
    k_cache, v_cache = (cache.to(device) for cache in cached)
    before = k_cache.clone(), v_cache.clone()
    place = DecodePosition(torch.tensor([n], device=device), fill_B.to(device))
    at = (rotation.cos.to(device), rotation.sin.to(device)) if rotates else None
    attend_decode(qkv.to(device), k_cache, v_cache, place, o, angles=at, scale=0.7)
    torch.testing.assert_close(o.cpu(), wanted.reshape(B, H * D), atol=1e-5, rtol=1e-5)
    slot = R - 1 - n % R
    for cache, old, new in zip((k_cache, v_cache), before, (k, v), strict=True):
        torch.testing.assert_close(cache[:, :, slot : slot + 1].cpu(), new)
        old[:, :, slot] = cache[:, :, slot]
        assert torch.equal(cache, old)  # and nothing else was written


def test_large_scores_do_no_harm(device: str) -> None:
    D, R, n = 8, 20, 11
    qkv = 100.0 * draw(1, 3 * D)
    keys, values = (draw(1, 1, R, D, seed=s) for s in (1, 2))
    q, k, v = (qkv[:, i * D : (i + 1) * D].view(1, 1, 1, D) for i in range(3))
    slots = torch.arange(R - n, R)
    every_key = torch.cat((keys[:, :, slots], k), 2)
    wanted = attend(q, every_key, torch.cat((values[:, :, slots], v), 2), scale=1.0)
    o = torch.empty(1, D, device=device)
    place = DecodePosition(
        torch.tensor([n], device=device), torch.zeros(1, dtype=torch.long, device=device)
    )
    keys, values = keys.to(device), values.to(device)
    attend_decode(qkv.to(device), keys, values, place, o, angles=None, scale=1.0)
    torch.testing.assert_close(o.cpu(), wanted.view(1, D), atol=1e-4, rtol=1e-4)
