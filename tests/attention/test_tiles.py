"""fenchel/attention/tiles.py: every query once, every reachable key, and put together again."""

import pytest
import torch
from torch import Tensor

from fenchel.attention import Causal, Prior, Window, tiles
from fenchel.attention.tiles import join_gradients, join_rows


@pytest.mark.parametrize("room", [1, 20, 50, 100, 300, 10_000])
@pytest.mark.parametrize("prior", [None, Causal(), Window(2)], ids=repr)
@pytest.mark.parametrize("G", [1, 2, 6])
def test_tiles_cover_every_query_once_and_every_key_it_can_see(
    monkeypatch: pytest.MonkeyPatch, room: int, prior: Prior | None, G: int
) -> None:
    monkeypatch.setattr(tiles, "_CACHED", room)
    monkeypatch.setattr(tiles, "_FEWEST_ROWS", 2)
    B, H, T, S = 2, 6, 5, 9
    q, k = torch.zeros(B, H, T, 4), torch.zeros(B, G, S, 4)
    seen = torch.zeros(B, H, T, dtype=torch.int64)
    square = torch.zeros(B, H, T, S, dtype=torch.bool)
    cut = tiles.tiles(q, k, prior)
    for tile in cut:
        tile.queries(seen.unsqueeze(-1)).add_(1)
        square[tile.batch, tile.heads, tile.rows, tile.keys] = True
        assert tile.heads == slice(tile.groups.start * H // G, tile.groups.stop * H // G)
        size = tile.queries(q).shape[:3].numel() * (tile.keys.stop - tile.keys.start)
        assert size <= max(room, 2 * H // G * S)
    assert (seen == 1).all()
    if prior is not None:
        assert square[(prior.log(T, S) > -torch.inf).expand_as(square)].all()
    else:
        assert square.all()


def test_what_was_cut_comes_together_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_CACHED", 30)
    monkeypatch.setattr(tiles, "_FEWEST_ROWS", 2)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(s, generator=generator) for s in ((2, 6, 5, 4), (2, 3, 9, 4)))
    cut = tiles.tiles(q, k, Causal())
    assert torch.equal(join_rows(cut, [tile.queries(q) for tile in cut]), q)

    def found() -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        return [(t.queries(q), t.items(k), 2 * t.items(k), torch.ones(())) for t in cut]

    of_q, of_k, of_v, shared = join_gradients(cut, found(), 9)
    visits = torch.zeros_like(k)
    for tile in cut:
        tile.items(visits).add_(1)
    assert torch.equal(of_q, q)
    torch.testing.assert_close(of_k, visits * k)
    torch.testing.assert_close(of_v, 2 * visits * k)
    assert shared == len(cut)
