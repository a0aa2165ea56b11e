"""fenchel/evaluate/text.py: what fenchel eval measures, called from Python."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fenchel.data import DocumentIds, PackedBatches, train_tokenizer
from fenchel.data.tokens import TextTokenizer
from fenchel.evaluate import (
    EvaluationText,
    common_text,
    compare,
    confidence,
    evaluate_text,
    fingerprint,
    open_evaluation_text,
    score,
    score_documents,
    text_ids,
)
from fenchel.evaluate.text import SeparateDocuments
from fenchel.model import ModelConfig, Transformer

TEXT = "the größer people have peace and trade; " * 12


def model_for(tokenizer: TextTokenizer) -> Transformer:
    size = tokenizer.vocabulary_size
    config = ModelConfig(vocabulary=size, context=16, width=16, heads=2, layers=1)
    generator = torch.Generator().manual_seed(0)
    model = Transformer(config, generator=generator)
    with torch.no_grad():  # the branches of a fresh block are zero, and hide what was read before
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def tokenizers() -> tuple[TextTokenizer, TextTokenizer]:
    return train_tokenizer([TEXT], 270), train_tokenizer([TEXT], 300)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_a_text_is_scored_and_calibrated_in_windows(
    file: Path, tokenizers: tuple[TextTokenizer, TextTokenizer]
) -> None:
    tokenizer, text = tokenizers[0], open_evaluation_text(str(file))
    model = model_for(tokenizer)
    ids, size = text_ids(tokenizer, str(file))
    found = evaluate_text(model, tokenizer, text, name="one", stride=5)
    assert found.evaluation.score == score(model, ids, bytes=size, context=16, stride=5)
    assert (found.bytes, found.context, found.stride, found.documents) == (size, 16, 5, None)
    assert found.confidence() == confidence(model, ids, context=16, stride=5)
    few = evaluate_text(model, tokenizer, text, limit=30, context=8)
    assert few.evaluation.score.tokens == 30
    assert few.bytes == round(size * 30 / (len(ids) - 1))
    assert (few.context, few.stride) == (8, 4)
    with pytest.raises(ValueError, match="should be 1 to 16"):
        evaluate_text(model, tokenizer, text, stride=17)


def test_two_tokenizers_read_the_text_of_the_tokens_of_the_first(
    file: Path, tokenizers: tuple[TextTokenizer, TextTokenizer]
) -> None:
    first, second = tokenizers
    text = open_evaluation_text(str(file))
    assert common_text(text, first, first, limit=9) is text
    ids = first.encode(TEXT)
    inside = next(n for n in range(len(ids)) if first.decode(ids[:n]).endswith("\ufffd"))
    both = common_text(text, first, second, limit=inside)  # ends within a character
    (document,) = both.documents()
    assert document.text == first.decode(ids[:inside]).rstrip("\ufffd")
    assert both.bytes == len(document.text.encode())
    results = [
        evaluate_text(model_for(one), one, common_text(text, first, second, limit=40)).evaluation
        for one in tokenizers
    ]
    assert results[0].text == results[1].text == f"{file}, its first 40 tokens"
    assert compare(*results).difference != 0.0
    with pytest.raises(ValueError, match="different tokenizers"):
        compare(*results, by="perplexity")


def test_documents_are_read_one_by_one_by_the_tokenizer_that_they_are_of(
    tokenizers: tuple[TextTokenizer, TextTokenizer],
) -> None:
    first, second = tokenizers
    documents = DocumentIds(np.arange(2, 22), np.array([0, 6, 14, 20]))

    def pack(ids: DocumentIds, context: int | None = None) -> PackedBatches:
        return PackedBatches(ids, batch=2, context=context or 32, seed=0)

    own = SeparateDocuments(documents, pack, conversations=True)
    text = EvaluationText("own", 40, partial(iter, ()), own, fingerprint(first))
    model = model_for(first)
    found = evaluate_text(model, first, text)
    assert found.context == 16  # of the model, which has fewer positions than the rows
    expected = score_documents(model, pack(documents, 16), bytes=40)
    assert found.evaluation.score == expected
    assert expected.tokens == 17
    few = evaluate_text(model, first, text, limit=8)
    assert few.documents is not None
    assert (few.evaluation.score.tokens, few.bytes) == (8, round(40 * 8 / 17))
    assert found.confidence().plain.predictions == 9
    with pytest.raises(ValueError, match="few answers was tuned on conversations"):
        common_text(text, first, second, names=("few answers", "other"))
    with pytest.raises(ValueError, match="--stride is the distance of windows"):
        evaluate_text(model, first, text, stride=3)
