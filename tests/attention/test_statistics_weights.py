"""fenchel/attention/statistics.py: some rows of some heads are what the whole would show."""

import pytest
import torch

from fenchel.attention import ALiBi, Causal, Dense, Padding, attend, attention_weights, tiles
from fenchel.choice import Entmax, Softmax

PRIORS = {
    "none": None,
    "causal": Causal(),
    "sum": ALiBi(6) + Padding(torch.tensor([7, 4])) + Causal(),
    "dense": Dense(torch.randn(6, 4, 7, generator=torch.Generator().manual_seed(0))),
}


@pytest.mark.parametrize("block", [1, 1 << 22])
@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())
@pytest.mark.parametrize("choice", [Softmax(), Entmax(1.5, 2.0)], ids=repr)
def test_chosen_rows_and_heads_are_those_of_the_whole(
    qkv, choice, prior, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "_CACHED", block)
    monkeypatch.setattr(tiles, "_FEWEST_ROWS", 1)
    q, k, v = qkv
    call = {"choice": choice, "prior": prior, "scale": 0.7}
    _, p = attend(q, k, v, **call, return_weights=True)
    torch.testing.assert_close(attention_weights(q, k, **call), p)
    some = attention_weights(q, k, rows=[3, 0, -1], heads=[5, 2], **call)
    torch.testing.assert_close(some, p[:, [5, 2]][:, :, [3, 0, 3]])
    assert attention_weights(q, k, rows=[], heads=[1], **call).shape == (2, 1, 0, 7)


def test_temperatures_that_differ_between_heads_are_chosen_with_them(qkv) -> None:
    q, k, v = qkv
    choice = Entmax(beta=torch.arange(1.0, 7.0).double().view(6, 1, 1))
    _, p = attend(q, k, v, choice=choice, return_weights=True)
    torch.testing.assert_close(
        attention_weights(q, k, rows=[1], heads=[4, 0], choice=choice), p[:, [4, 0], 1:2]
    )


def test_a_row_that_is_not_there_is_refused(qkv) -> None:
    q, k, _ = qkv
    with pytest.raises(ValueError, match="no row 4 among 4"):
        attention_weights(q, k, rows=[0, 4])
    with pytest.raises(ValueError, match="no head -7 among 6"):
        attention_weights(q, k, heads=[-7])
