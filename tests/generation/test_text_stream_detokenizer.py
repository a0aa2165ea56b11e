"""fenchel/generation/text_stream.py: streaming spells what decoding at once would."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fenchel.data import decode, encode, train_tokenizer
from fenchel.generation import Detokenizer

TOKENIZER = train_tokenizer(["the sea shells, the shore; größer 東京 🐚\n" * 9], 300)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=120))
def test_the_pieces_join_to_the_whole(text: str) -> None:
    ids = encode(TOKENIZER, text)
    spelling = Detokenizer(TOKENIZER)
    pieces = [spelling.add(i) for i in ids]
    assert "".join([*pieces, spelling.rest()]) == decode(TOKENIZER, ids)


def test_half_a_character_is_held_back() -> None:
    ids = encode(TOKENIZER, "𝄞")
    assert len(ids) > 1
    spelling = Detokenizer(TOKENIZER)
    assert [spelling.add(i) for i in ids] == [""] * (len(ids) - 1) + ["𝄞"]


def test_half_a_character_at_the_end_is_given_at_last() -> None:
    ids = encode(TOKENIZER, "a𝄞")[:-1]
    spelling = Detokenizer(TOKENIZER)
    assert "".join(map(spelling.add, ids)) + spelling.rest() == decode(TOKENIZER, ids)
