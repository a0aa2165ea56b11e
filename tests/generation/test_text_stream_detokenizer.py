"""fenchel/generation/text_stream.py: streaming spells what decoding at once would."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from fenchel.data import decode, encode, train_tokenizer
from fenchel.generation import Detokenizer

TOKENIZER = train_tokenizer(["the sea shells, the shore; größer 東京 🐚\n" * 9], 300)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=120))
def test_the_pieces_join_to_the_whole(text: str) -> None:
    ids = encode(TOKENIZER, text)
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.add(i) for i in ids]
    assert "".join([*pieces, detokenizer.flush()]) == decode(TOKENIZER, ids)


def test_half_a_character_is_held_back() -> None:
    ids = encode(TOKENIZER, "𝄞")
    assert len(ids) > 1
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.add(i) for i in ids] == [""] * (len(ids) - 1) + ["𝄞"]


def test_half_a_character_at_the_end_is_given_at_last() -> None:
    ids = encode(TOKENIZER, "a𝄞")[:-1]
    detokenizer = Detokenizer(TOKENIZER)
    assert "".join(map(detokenizer.add, ids)) + detokenizer.flush() == decode(TOKENIZER, ids)


def test_bytes_that_are_no_text_are_replaced_and_the_text_goes_on() -> None:
    """A model with byte fallback may draw half a character and then a word."""
    words = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581sea", "shells"]
    vocabulary = {word: number for number, word in enumerate(["<unk>", *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    ids = [vocabulary[word] for word in ("shells", "<0xE6>", "<0x9D>", "\u2581sea", "<0xF0>")]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(i) for i in ids]
    assert pieces == ["shells", "", "", "\ufffd\ufffd sea", ""]
    assert detokenizer.flush() == "\ufffd"
