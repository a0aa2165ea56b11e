"""fenchel/evaluate/embedding_neighbours.py: cosines, their spread, words that match."""

import pytest
import torch
from scipy.stats import beta
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy

from fenchel.data import TextTokenizer
from fenchel.evaluate import nearest_rows, neighbours
from fenchel.model import ModelConfig, Transformer

WORDS = "the old young king queen cat dog rules sleeps here there <|end|>".split()
PAIRS = [("king", "queen"), ("cat", "dog")]


def word_tokenizer() -> TextTokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, "<|end|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return TextTokenizer(tokenizer)


def sentences(seed: int, count: int) -> torch.Tensor:
    """the old|young king|queen rules here|there, the old|young cat|dog sleeps here|there."""
    generator = torch.Generator().manual_seed(seed)
    coins = torch.randint(2, (count, 4), generator=generator).tolist()
    rows = [
        ["the", WORDS[1 + a], PAIRS[pair][b], ("rules", "sleeps")[pair], WORDS[9 + c]]
        for a, b, c, pair in coins
    ]
    return torch.tensor([[WORDS.index(word) for word in row] for row in rows])


@pytest.fixture(scope="module")
def model() -> Transformer:
    config = ModelConfig(vocabulary=len(WORDS), context=8, width=32, layers=1)
    model = Transformer(config, generator=torch.Generator().manual_seed(0))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(80):
        ids = sentences(step, 16)
        cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimiser.step()
        optimiser.zero_grad()
    return model


@pytest.mark.parametrize("pair", [*PAIRS, ("old", "young"), ("here", "there")])
def test_words_with_the_same_contexts_become_neighbours(
    model: Transformer, pair: tuple[str, str]
) -> None:
    for word, other in (pair, pair[::-1]):
        found = neighbours(model, word_tokenizer(), word, count=3)
        assert found.rows[0].token == other
        assert found.rows[0].cosine > 2 * found.spread
        assert all(row.token != word for row in found.rows)


def test_cosines_and_products_are_those_of_the_rows(model: Transformer) -> None:
    row = neighbours(model, word_tokenizer(), "king", count=1, centred=False).rows[0]
    e, f = model.embed.weight[3].detach(), model.embed.weight[row.id].detach()
    assert row.product == pytest.approx(float(e @ f), rel=1e-5)
    assert row.cosine == pytest.approx(float(e @ f / (e.norm() * f.norm())), rel=1e-5)
    both = neighbours(model, word_tokenizer(), "king queen", count=20).rows
    assert not {"king", "queen"} & {row.token for row in both}
    with pytest.raises(ValueError, match="an empty text has no neighbours"):
        neighbours(model, word_tokenizer(), "")


def test_a_part_that_all_rows_share_is_taken_out() -> None:
    table = torch.eye(4) + torch.tensor([[9.0, 9.0, 9.0, 9.0]])
    _, shared = nearest_rows(table, table[0], 2, centred=False)
    _, centred = nearest_rows(table, table[0], 2)
    assert shared[1] > 0.99
    assert centred[1] < 0.0


@pytest.mark.parametrize(("d", "beyond"), [(3, 0.8), (10, 0.5554), (100, 0.0449), (1000, 1.72e-10)])
def test_the_cosine_of_random_directions_spreads_by_one_over_root_d(d: int, beyond: float) -> None:
    """E83: no dimension is a threshold; cos^2 has the law Beta(1/2, (d - 1)/2)."""
    assert float(beta.sf(0.04, 0.5, (d - 1) / 2)) == pytest.approx(beyond, rel=0.02)
    x, y = torch.randn(2, 20_000, d, generator=torch.Generator().manual_seed(d)).unbind()
    cosine = torch.nn.functional.cosine_similarity(x, y)
    assert float(cosine.std()) == pytest.approx(d**-0.5, rel=0.02)
    assert float((cosine.abs() > 0.2).float().mean()) == pytest.approx(beyond, abs=0.01)
