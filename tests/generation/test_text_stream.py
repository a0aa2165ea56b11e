"""fenchel/generation/text_stream.py: the pieces are the whole text, up to a stop string."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from fenchel.data import TextTokenizer, train_tokenizer
from fenchel.generation import Detokenizer, StopStrings, TextStream

TOKENIZER = train_tokenizer(["the sea shells, the shore; größer 東京 🐚\n" * 9], 300)


def byte_fallback() -> TextTokenizer:
    """Two words, and every other character by its bytes, as in Llama 2 and Gemma."""
    words = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581sea", "shells"]
    vocabulary = {word: number for number, word in enumerate(["<unk>", *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return TextTokenizer(tokenizer)


def byte_id(tokenizer: TextTokenizer, byte: int) -> int:
    """The id of the token that is this byte alone."""
    return next(i for i in range(258) if tokenizer.token_bytes(i) == bytes([byte]))


@settings(max_examples=150)
@given(st.text(max_size=120))
def test_the_pieces_join_to_the_whole(text: str) -> None:
    ids = TOKENIZER.encode(text)
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.add(i) for i in ids]
    assert "".join([*pieces, detokenizer.flush()]) == TOKENIZER.decode(ids)


def test_half_a_character_is_held_back() -> None:
    ids = TOKENIZER.encode("𝄞")
    assert len(ids) > 1
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.add(i) for i in ids] == [""] * (len(ids) - 1) + ["𝄞"]


def test_half_a_character_at_the_end_is_given_at_last() -> None:
    ids = TOKENIZER.encode("a𝄞")[:-1]
    detokenizer = Detokenizer(TOKENIZER)
    assert "".join(map(detokenizer.add, ids)) + detokenizer.flush() == TOKENIZER.decode(ids)


def test_bytes_that_are_no_text_are_replaced_and_the_text_goes_on() -> None:
    """A model with byte fallback may draw half a character and then a word."""
    tokenizer = byte_fallback()
    words = ("shells", "<0xE6>", "<0x9D>", "\u2581sea", "<0xF0>")
    ids = [tokenizer.token_to_id(word) for word in words]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(i) for i in ids]
    assert pieces == ["shells", "", "", "\ufffd\ufffd sea", ""]
    assert detokenizer.flush() == "\ufffd"


@settings(max_examples=100)
@given(st.text(max_size=60), st.integers(0, 60))
def test_new_ids_give_what_they_add_to_the_text_before_them(text: str, cut: int) -> None:
    assume("\ufffd" not in text)
    ids = TOKENIZER.encode(text)
    before, new = ids[:cut], ids[cut:]
    detokenizer = Detokenizer(TOKENIZER, before)
    pieces = [detokenizer.add(i) for i in new]
    complete = TOKENIZER.decode(before).rstrip("\ufffd")
    assert complete + "".join([*pieces, detokenizer.flush()]) == text


@pytest.mark.parametrize("tokenizer", [TOKENIZER, byte_fallback()], ids=["bytes", "fallback"])
@settings(max_examples=200)
@given(
    st.text(alphabet="a\ufffdß東👩\u200d", max_size=12),
    st.text(alphabet="a\ufffdß東👩\u200d", max_size=4),
    st.integers(0, 3),
)
def test_a_prompt_may_end_with_any_character_or_within_one(
    tokenizer: TextTokenizer, prompt: str, text: str, cut: int
) -> None:
    """Characters of the prompt never come again, and one that new ids complete comes whole."""
    whole = (prompt + text).encode()
    ids = [byte_id(tokenizer, byte) for byte in whole]
    size = max(0, len(prompt.encode()) - cut)
    before, new = ids[:size], ids[size:]
    detokenizer = Detokenizer(tokenizer.library, before)  # as a user may have it
    pieces = [detokenizer.add(i) for i in new]
    complete = whole[:size].decode(errors="ignore")
    assert complete + "".join([*pieces, detokenizer.flush()]) == prompt + text


def test_the_first_new_word_keeps_its_space() -> None:
    """Tokenizers of SentencePiece remove the space before the first word of a text."""
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "\u2581the", "\u2581sea"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    assert tokenizer.decode([1, 2, 3]) == "the sea"
    assert Detokenizer(tokenizer, [1, 2]).add(3) == " sea"
    assert Detokenizer(tokenizer, [1]).add(2) == "the"


letters = st.text(alphabet="abc", max_size=30)


def one_by_one(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first, letter by letter."""
    for end in range(len(text) + 1):
        ends = [stop for stop in stops if text[:end].endswith(stop)]
        if ends:
            return text[: end - max(map(len, ends))]
    return text


@settings(max_examples=300)
@given(
    pieces=st.lists(letters, max_size=6),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
)
def test_pieces_give_the_text_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    strings = StopStrings(stops)
    out = [strings.add(piece) for piece in pieces]
    found = strings.stopped
    expected = one_by_one("".join(pieces), stops)
    assert "".join(out) + strings.flush() == expected
    assert found == any(stop in "".join(pieces) for stop in stops)


def test_no_more_is_held_back_than_may_be_a_stop() -> None:
    strings = StopStrings(["\nUser:", "###"])
    assert [strings.add(piece) for piece in ("a #", "#", "b\n", "Us", "e #")] == [
        "a ",
        "",
        "##b",
        "",
        "\nUse ",
    ]
    assert strings.flush() == "#"


def test_a_stop_split_over_tokens_is_found_and_left_out(tokenizer: TextTokenizer) -> None:
    telling = TextStream(tokenizer, ["shells, the"])
    pieces = []
    for token in tokenizer.encode("größer sea shells, the shore"):
        pieces.append(telling.add(token))
        if telling.stopped:
            break
    assert "".join(pieces) == "größer sea "
    assert telling.flush() == ""


def test_a_stop_string_is_not_empty(tokenizer: TextTokenizer) -> None:
    with pytest.raises(ValueError, match="empty"):
        TextStream(tokenizer, [""])
