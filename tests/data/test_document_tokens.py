"""fenchel/data/document_tokens.py: how documents begin, end and are scored in token files."""

import json
from pathlib import Path

import numpy as np
import pytest

from fenchel.data import (
    PLAIN,
    ChatTemplate,
    Corpus,
    DocumentEncoder,
    TextConfig,
    prepare,
    text,
    train_tokenizer,
)
from fenchel.data.document_tokens import map_documents
from fenchel.data.tokens import END
from fenchel.files import Damaged

END_ID, BEGIN_ID = 0, 1


@pytest.fixture
def encoder() -> DocumentEncoder:
    """Texts begin with one token and end with another."""
    tokenizer = train_tokenizer(["some words"], 270).begin_with(BEGIN_ID)
    return DocumentEncoder(tokenizer, end=END_ID)


def corpus_of(source: Path, encoder: DocumentEncoder, **settings: int) -> Corpus:
    config = TextConfig(source=str(source), **settings)  # type: ignore[arg-type]
    return prepare(config, source.parent / "tokens", encoder=encoder)


def rows(corpus: Corpus, *, validation: bool) -> list[list[int]]:
    assert corpus.documents_of is not None
    ids, starts, _ = corpus.documents_of[validation]
    return [ids[a:b].tolist() for a, b in zip(starts.tolist(), starts.tolist()[1:], strict=False)]


def test_pieces_of_a_long_file_are_one_document(
    encoder: DocumentEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "PIECE", 64)
    whole = "\n".join(f"line {n} of words" for n in range(30)) + "\n"
    source = tmp_path / "long.txt"
    source.write_text(whole)
    corpus = corpus_of(source, encoder, validation=10)
    train, validation = rows(corpus, validation=False), rows(corpus, validation=True)
    assert (len(train), len(validation)) == (1, 1)
    for row in (train[0], validation[0]):
        assert (row[0], row[-1]) == (BEGIN_ID, END_ID)
        assert not {BEGIN_ID, END_ID} & set(row[1:-1])
    both = [encoder.tokenizer.decode(row) for row in (train[0], validation[0])]
    assert "".join(both) == whole


def test_a_piece_whose_predecessor_is_held_out_is_a_document_of_its_own(
    encoder: DocumentEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "PIECE", 20)
    source = tmp_path / "long.txt"
    source.write_text("".join(f"the line {n:02}\n" for n in range(8)))
    corpus = corpus_of(source, encoder, validation=2)  # every second piece
    assert len(rows(corpus, validation=False)) == len(rows(corpus, validation=True)) == 4


def test_of_conversations_the_answers_are_scored_and_counted(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["user: assistant: words"], 280)
    encoder = DocumentEncoder(
        tokenizer, end=END_ID, template=ChatTemplate(PLAIN, {"bos_token": END})
    )
    source = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "wörds?"}, {"role": "assistant", "content": "wörds"}]
    source.write_text(3 * (json.dumps({"messages": messages}) + "\n"))
    corpus = corpus_of(source, encoder)
    facts = corpus.facts
    assert (facts.train_documents, facts.validation_documents) == (2, 1)
    assert (facts.train_answer_bytes, corpus.predicted_bytes(validation=True)) == (12, 6)
    assert corpus.documents_of is not None
    ids, starts, scored = corpus.documents_of[False]
    assert scored is not None
    first = slice(0, int(starts[1]))
    answer = ids[first][np.asarray(scored[first])].tolist()
    assert tokenizer.decode(answer).strip() == "wörds"
    assert ids[0] == END_ID
    assert tokenizer.encode("user")[0] == ids[1]


def test_a_conversation_that_the_template_refuses_is_named_by_its_line(tmp_path: Path) -> None:
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template = ChatTemplate(refuse + PLAIN, {"bos_token": END})
    encoder = DocumentEncoder(train_tokenizer([], 258), end=END_ID, template=template)
    source = tmp_path / "chats.jsonl"
    answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = [answered, answered, [{"role": "system", "content": "s"}, *answered]]
    source.write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"^chats\.jsonl:3: the chat template refuses .*no system"):
        corpus_of(source, encoder)


def test_files_that_do_not_fit_are_damaged(tmp_path: Path) -> None:
    ids = np.arange(5)
    np.array([0, 3, 5], "<u8").tofile(tmp_path / "train_starts.bin")
    np.array([0, 1, 2, 0, 1], "u1").tofile(tmp_path / "train_scored.bin")
    assert map_documents(tmp_path, "train", ids, 2, scored=False).starts.tolist() == [0, 3, 5]
    with pytest.raises(Damaged, match="other numbers"):
        map_documents(tmp_path, "train", ids, 2, scored=True)
    for wrong in ([0, 6, 5], [1, 3, 5], [0, 3, 4]):
        np.array(wrong, "<u8").tofile(tmp_path / "train_starts.bin")
        with pytest.raises(Damaged, match="does not divide"):
            map_documents(tmp_path, "train", ids, 2, scored=False)
    with pytest.raises(Damaged, match="bytes"):
        map_documents(tmp_path, "train", ids, 3, scored=False)
