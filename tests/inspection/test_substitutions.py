"""fenchel/inspection/substitutions.py: counts against the model's own reading of every text."""

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import fenchel
from fenchel.data import TextTokenizer, train_tokenizer
from fenchel.files import Damaged
from fenchel.inspection.our_model import OurModel
from fenchel.inspection.substitutions import (
    certify_substitutions,
    certify_text_substitutions,
    read_synonyms,
    token_alternatives,
)
from fenchel.model import Transformer
from tests.inspection.test_certificates import model_of
from tests.inspection.test_decisions import COVERED

IDS = torch.tensor([1, 7, 30, 7, 2])
ALTERNATIVES = {7: [8, 9], 30: [31, 30], 2: [3]}
ALLOWED = ((1,), (7, 8, 9), (30, 31), (7, 8, 9), (2, 3))


def fewest(model: Transformer, most: int, keep: int) -> list[float]:
    """Of substitutions that change the decision, by the model itself."""
    found = [math.inf] * len(IDS)
    texts = [torch.tensor(text) for text in product(*ALLOWED)]
    texts = [text for text in texts if int((text != IDS).sum()) <= most]
    with torch.no_grad():
        rows = model(torch.stack(texts)).topk(keep).indices.sort(-1).values
        kept = model(IDS[None])[0].topk(keep).indices.sort(-1).values
    for text, row in zip(texts, rows, strict=True):
        for t in range(len(IDS)):
            if not torch.equal(row[t], kept[t]):
                found[t] = min(found[t], int((text != IDS)[: t + 1].sum()))
    return found


READ = COVERED | {
    "sparsemax": {"choice": "sparsemax"},
    "normalised queries": {"qk_norm": True},
    "relu": {"mlp": "relu"},
}
"""Reading covers more models than the expansion does."""


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize(("most", "keep"), [(9, 1), (2, 2)])
def test_counts_are_those_of_the_models_own_reading(name: str, most: int, keep: int) -> None:
    model = model_of(**READ[name])
    true = fewest(model, most, keep)
    found = certify_substitutions(model, IDS, ALTERNATIVES, most=most, keep=keep)
    assert found.complete
    for t, one in enumerate(found.positions):
        assert one.how == "exact"
        assert one.most == min(most, (0, 1, 2, 3, 4)[t])
        assert one.certified == min(true[t] - 1, one.most)
        assert (math.inf if one.attacked is None else one.attacked) == true[t]
        if one.witness is not None:
            with torch.no_grad():
                kept = model(torch.tensor([one.witness]))[0, -1].topk(keep).indices
            assert set(kept.tolist()) != set(one.kept)
    assert [one.allowed for one in found.positions] == [1, 3, 6, 18, 36] if most == 9 else True
    assert any(one.attacked for one in found.positions)


def test_few_texts_leave_both_ends_around_the_fewest() -> None:
    model = model_of(mlp="swiglu")
    true = fewest(model, 9, 1)
    for texts in (0, 3, 10):
        found = fenchel.certify_substitutions(model, IDS, ALTERNATIVES, texts=texts)
        assert bool((found.certified < torch.tensor(true)).all())
        assert bool((torch.tensor(true) <= found.attacked).all())
        assert all(one.read <= texts + 1 for one in found.positions)


def test_embeddings_that_nearly_agree_are_certified_without_reading() -> None:
    model = model_of(mlp="swiglu")
    with torch.no_grad():
        model.embed.weight[8] = model.embed.weight[7] * (1.0 + 1e-6)
    found = certify_substitutions(model, IDS, {7: [8]}, texts=0, positions=[4])
    (one,) = found.positions
    assert (one.certified, one.most, one.how, one.read, one.attacked) == (2, 2, "bound", 1, None)


def test_what_depends_on_tokens_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose embeddings mix tokens, and one that reads the ids once more."""
    model, embed = model_of(), torch.nn.Embedding.forward
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Embedding, "forward", lambda self, ids: embed(self, ids).cumsum(-2))
        with pytest.raises(ValueError, match="changes the embeddings of other tokens"):
            certify_substitutions(model, IDS, ALTERNATIVES)
    forward = type(model).forward

    def shifted(self: Transformer, ids: torch.Tensor, **given: Any) -> torch.Tensor:
        return forward(self, ids, **given) + (ids == 9).any()

    monkeypatch.setattr(type(model), "forward", shifted)
    with pytest.raises(ValueError, match="differs from the model's own"):
        certify_substitutions(model, IDS, ALTERNATIVES)


def test_a_budget_ends_with_what_is_known() -> None:
    found = certify_substitutions(model_of(), IDS, ALTERNATIVES, budget=1e-9)
    assert not found.complete
    assert found.certified.tolist() == [0] * 5
    assert found.attacked.tolist() == [math.inf] * 5
    assert [one.how for one in found.positions] == ["exact", *["read"] * 4]


def test_wrong_arguments_are_refused() -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"alternatives": {5: [6]}}, "no token of the text has an alternative"),
        ({"alternatives": {7: [7]}}, "no token of the text has an alternative"),
        ({"alternatives": {2: [3]}, "positions": [1]}, "no token of the text has an alternative"),
        ({"alternatives": {7: [40]}}, "an alternative of token 7 is 40; ids are 0 to 39"),
        ({"most": 0}, "at least 1 token is substituted at once, got 0"),
        ({"texts": -1}, "the number of texts is 0 or more, got -1"),
        ({"keep": 40}, "keep is 1 to 39"),
        ({"positions": [5]}, "positions are 0 to 4"),
        ({"ids": IDS.view(5, 1)}, "one sequence of ids"),
    )
    for given, sentence in wrong:
        with pytest.raises(ValueError, match=sentence):
            certify_substitutions(model_of(), **{"ids": IDS, "alternatives": ALTERNATIVES} | given)


TEXT = "the people of these States have peace and trade with every nation. " * 30


def test_a_word_stands_for_its_token_with_and_without_a_space() -> None:
    tokenizer = train_tokenizer([TEXT], 400)
    ids = tokenizer.encode("the people and the nation")
    the, first = tokenizer.encode(" the"), tokenizer.encode("the")
    assert len(the) == len(first) == 1
    found = token_alternatives(tokenizer, ids, {"the": ["of"], "people": ["peace", "trade"]})
    assert found[the[0]] == tokenizer.encode(" of")
    assert found[first[0]] == tokenizer.encode("of")
    (people,) = tokenizer.encode(" people")
    assert found[people] == [*tokenizer.encode(" peace"), *tokenizer.encode(" trade")]
    alone = token_alternatives(tokenizer, ids, {" the": [" of"], "have": ["these"]})
    assert alone == {the[0]: tokenizer.encode(" of")}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"zebra": ["the"]}, "' zebra', a word to substitute, is . tokens of this tokenizer"),
        ({"": ["the"]}, "a word to substitute, is no token of this tokenizer"),
        ({"the": ["zebra"]}, "' zebra', an alternative of 'the', is . tokens"),
        ({"the": ["of", ""]}, "an alternative of 'the', is no token"),
        ({"these": ["of"]}, "no token of the text is one of the words to substitute"),
        ({}, "no token of the text is one of the words to substitute"),
    ],
)
def test_words_that_are_no_token_are_refused(words: dict[str, list[str]], sentence: str) -> None:
    tokenizer = train_tokenizer([TEXT], 400)
    with pytest.raises(ValueError, match=sentence):
        token_alternatives(tokenizer, tokenizer.encode(" the people"), words)


def test_a_word_that_the_vocabulary_lacks_is_no_token() -> None:
    """It would be read as the token for unknown words."""
    library = Tokenizer(WordLevel({"[UNK]": 0, "the": 1, "of": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = Whitespace()
    tokenizer = TextTokenizer.wrap(library)
    assert token_alternatives(tokenizer, [1], {"the": ["of"]}) == {1: [2]}
    for words in ({"the": ["zebra"]}, {"zebra": ["the"]}):
        with pytest.raises(ValueError, match=r"zebra', a.*, is no token of this tokenizer"):
            token_alternatives(tokenizer, [0, 1], words)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[]", "holds a list, an object was expected"),
        ("{", "is not JSON"),
        ('{"the": "of"}', "has no list of words for 'the'"),
        ('{"the": [1]}', "has no list of words for 'the'"),
        ('{"the": null}', "has no list of words for 'the'"),
        ('{"the": []}', "has no other word for 'the'"),
        ('{"the": ["the"]}', "has no other word for 'the'"),
        ('{"the": ["of"], "the": ["a"]}', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_file_that_is_no_table_of_words_is_refused(
    content: str, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "words.json"
    path.write_text(content)
    with pytest.raises(Damaged, match=sentence):
        read_synonyms(path)


def test_a_text_becomes_plain_values(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([TEXT], 400)
    model = OurModel(
        name="tiny",
        family="llama",
        model=model_of(vocabulary=400),
        tokenizer=tokenizer,
        context=16,
        stored="float32",
        reads_out=True,
    )
    speech = tmp_path / "speech.txt"
    speech.write_text(TEXT)
    path = tmp_path / "words.json"
    path.write_text(json.dumps({"people": ["nation", "trade"], "of": ["with"]}))
    result = certify_text_substitutions(model, str(speech), read_synonyms(path), max_tokens=4)
    plain = result.plain()
    assert json.loads(json.dumps(plain)) == plain
    for row, of in zip(plain["rows"], result.rows, strict=True):
        assert row["safe"] == (row["certified"] == row["most"])
        assert len(row["witness"]) == (row["attacked"] or 0)
        assert all(result.tokens[int(m)] == before for m, (before, _) in of.witness.items())
