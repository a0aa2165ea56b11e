"""fenchel/kernels/score_products.py against sums over all pairs in float64."""

import pytest
import torch

from fenchel.kernels.score_products import score_part_products


@pytest.mark.parametrize(("H", "G", "m", "T", "D"), [(2, 2, 16, 16, 16), (4, 2, 24, 70, 20)])
@pytest.mark.parametrize("own", [False, True])
def test_it_is_the_sum_over_the_open_pairs(
    H: int, G: int, m: int, T: int, D: int, own: bool, device: str
) -> None:
    g = torch.Generator().manual_seed(T)
    L, n = 2, 3
    q, dq = (torch.randn(L, n, H, m, D, generator=g) for _ in range(2))
    k, dk = (torch.randn(L, n, G, T, D, generator=g) for _ in range(2))
    open_ = torch.rand((L, n, 1, m, T) if own else (1, 1, 1, m, T), generator=g) < 0.5
    heads = [x.double().repeat_interleave(H // G, dim=2) for x in (k, dk)]
    S = torch.stack([x.double() @ y.mT * open_ for x in (q, dq) for y in heads])
    wanted = torch.einsum("alnhmt,blnhmt->lhab", S, S)
    q, dq, k, dk, open_ = (x.to(device) for x in (q, dq, k, dk, open_))
    found = score_part_products((q, dq), (k, dk), open_).cpu().double()
    size = wanted.diagonal(dim1=-2, dim2=-1).amax()
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3 * float(size))
