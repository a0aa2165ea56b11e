"""fenchel/kernels/rotary_moments.py against rotating and summing one after the other."""

import pytest
import torch

from fenchel.attention import Angles, angles, rotate
from fenchel.kernels.rotary_moments import rotate as rotate_kernel
from fenchel.kernels.rotary_moments import rotated_moments as moments_kernel
from fenchel.optim.score.direction import PositionSample, rotated_moments

SIZES = [(16, 16, "half"), (20, 12, "half"), (16, 16, "pairs"), (20, 12, "pairs")]


def rotation_tables(L: int, n: int, T: int, W: int, own: bool, g: torch.Generator) -> Angles:
    """Angles of one table for all, or of one per layer and sequence."""
    place = torch.randint(0, 50, (L * n, T) if own else (1, T), generator=g)
    cos, sin = angles(place, W)
    lead = (L, n) if own else (1, 1)
    return Angles(*(part.view(*lead, 1, T, W) for part in (cos, sin)))


@pytest.mark.parametrize(("D", "W", "layout"), SIZES)
@pytest.mark.parametrize("own", [False, True])
def test_heads_of_any_strides_are_rotated(
    D: int, W: int, layout: str, own: bool, device: str
) -> None:
    g = torch.Generator().manual_seed(D + W)
    L, n, T, H = 2, 3, 70, 2
    raw = torch.randn(L, n, T, H, D, generator=g)
    rotation = rotation_tables(L, n, T, W, own, g)
    x = raw.transpose(2, 3)
    wanted = rotate(x.contiguous(), rotation, layout=layout)
    found = rotate_kernel(
        raw.to(device).transpose(2, 3), *(p.to(device) for p in rotation), layout=layout
    )
    assert found.is_contiguous()
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("D", "W", "layout"), SIZES)
@pytest.mark.parametrize("own", [False, True])
def test_moments_are_those_of_heads_rotated_back(
    D: int, W: int, layout: str, own: bool, device: str
) -> None:
    g = torch.Generator().manual_seed(D * W)
    L, n, T, H, S = 2, 4, 70, 2, 9
    x = torch.randn(L, n, H, T, D, generator=g)
    rotation = rotation_tables(L, n, S, W, own, g)
    mask = torch.rand((L, n, 1, S, T) if own else (1, 1, 1, S, T), generator=g) < 0.5
    places = PositionSample(first=1, step=2, stride=2, per_sequence=2)
    wanted = torch.zeros(L, H, D, D, dtype=torch.float64)
    for i in range(n):
        for s in (1 + 2 * (i % 2), 1 + 2 * (i % 2 + 2)):
            at = [part.expand(L, n, 1, S, W)[:, i, :, s : s + 1] for part in rotation]
            back = rotate(x[:, i], Angles(at[0], -at[1]), layout=layout).double()
            heavy = back * mask.expand(L, n, 1, S, T)[:, i, :, s].unsqueeze(-1)
            wanted += heavy.mT @ back
    on = [p.to(device) for p in (x, *rotation, mask)]
    for way in (moments_kernel, rotated_moments):
        found = way(*on, places, layout=layout).cpu().double()
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
