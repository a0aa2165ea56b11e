"""fenchel/train/stability.py: scores shrink by exactly what they were too large by."""

import pytest
import torch
from torch import Tensor

from fenchel.attention import Causal, tiles
from fenchel.model import ModelConfig, Transformer
from fenchel.model.attention import Attention
from fenchel.train.stability import largest_scores, qk_clip_


def lively(**settings: object) -> Transformer:
    config = ModelConfig(vocabulary=17, context=8, width=24, layers=2, heads=4, **settings)  # type: ignore[arg-type]
    model = Transformer(config, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        for n, p in enumerate(model.parameters()):
            p.normal_(0.0, 0.4, generator=torch.Generator().manual_seed(n))
    return model


def first_layer(model: Transformer, ids: Tensor) -> tuple[Tensor, Tensor]:
    found: list[tuple[Tensor, Tensor]] = []
    model(ids, observe=lambda _layer, q, k, _v: found.append((q, k)))
    return found[0]


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(17, (3, 8), generator=torch.Generator().manual_seed(0))


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5


@pytest.mark.parametrize("G", [4, 2, 1])
def test_the_largest_score_is_that_of_the_open_keys(
    G: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "_CACHED", 60)
    monkeypatch.setattr(tiles, "_FEWEST_ROWS", 2)
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(3, 4, 7, 5, generator=generator),
        torch.randn(3, G, 7, 5, generator=generator),
    )
    k[:, :, -1] *= 100.0  # only the last query may see it
    q[:, :, -1] = 0.0
    open_ = torch.ones(7, 7, dtype=torch.bool).tril()
    expected = scores(q, k).abs().where(open_, torch.zeros(())).amax((0, 2, 3))
    torch.testing.assert_close(largest_scores(q, k, prior=Causal()), expected)
    torch.testing.assert_close(largest_scores(q, k), scores(q, k).abs().amax((0, 2, 3)))


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_a_head_over_the_limit_ends_on_it_and_the_others_stay(
    kv_heads: int | None, bias: bool, positions: str, ids: Tensor
) -> None:
    model = lively(kv_heads=kv_heads, bias=bias, positions=positions)
    attention: Attention = model.blocks[0].attention
    q, k = first_layer(model, ids)
    before, largest = scores(q, k), largest_scores(q, k, prior=Causal())
    tau = largest.sort().values[1:3].mean().item()  # two heads above, two below
    over = qk_clip_(attention, largest, tau)
    assert over.sum() == 2
    q, k = first_layer(model, ids)
    gamma = (tau / largest).clamp(max=1.0)
    torch.testing.assert_close(scores(q, k), before * gamma[:, None, None])
    after = largest_scores(q, k, prior=Causal())
    torch.testing.assert_close(after, largest.clamp(max=tau))


def test_own_keys_take_half_of_it_and_shared_keys_none() -> None:
    for kv_heads in (None, 2):
        model = lively(kv_heads=kv_heads)
        attention: Attention = model.blocks[0].attention
        H, D = 4, attention.head_width
        before = attention.qkv.weight.detach().clone()
        qk_clip_(attention, torch.tensor([1.0, 40.0, 1.0, 1.0]).double(), 10.0)
        ratio = (attention.qkv.weight / before).detach().view(-1, D, 24).mean((1, 2))
        expected = torch.ones_like(ratio)
        expected[1] = 0.5 if kv_heads is None else 0.25
        if kv_heads is None:
            expected[H + 1] = 0.5
        torch.testing.assert_close(ratio, expected)


@pytest.mark.parametrize("largest", [0.0, 9.0, float("inf"), float("nan")])
def test_what_is_below_the_limit_or_no_number_is_left_alone_to_the_bit(largest: float) -> None:
    attention: Attention = lively().blocks[0].attention
    before = attention.qkv.weight.detach().clone()
    assert not qk_clip_(attention, torch.full((4,), largest).double(), 10.0).any()
    assert torch.equal(attention.qkv.weight, before)
