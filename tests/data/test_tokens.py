"""fenchel/data/tokens.py: exact round trips, no control tokens from text, hostile files."""

import json
import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from fenchel.data import tokenizer_file, tokens
from fenchel.data.config import TOKENIZER_MODELS
from fenchel.data.tokens import (
    END,
    PAD,
    TextTokenizer,
    load_tokenizer,
    train_tokenizer,
)

Load = Callable[[Any], TextTokenizer]
anything = st.text(st.characters(codec="utf-8"), max_size=200)
pieces = st.sampled_from([END, PAD, "<|", "end", "|>", " ", "<", "\n", "é", "<|e", "nd|>", "he"])
spellings = st.lists(pieces, max_size=30).map("".join)


@pytest.fixture
def raw(tokenizer: TextTokenizer) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(tokenizer.to_str())
    return value


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def loaded(value: Any) -> TextTokenizer:
        path = tmp_path / "tokenizer.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return load_tokenizer(path)

    return loaded


# round trips


@given(st.one_of(anything, spellings))
def test_decoding_gives_back_what_was_encoded(tokenizer: TextTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_word_begins_as_within_a_text() -> None:
    # Llama 2: a space before every text, so that " cat" alone begins with a token of two spaces.
    characters = {name: n for n, name in enumerate(["<unk>", "▁", *"acost,"])}
    merges = [("c", "a"), ("ca", "t"), ("▁", "cat"), ("c", "o"), ("co", "t"), ("▁", "cot")]
    vocabulary = characters | {"".join(pair): n for n, pair in enumerate(merges, len(characters))}
    library = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer = TextTokenizer(library)
    for word in ("cat", " cot "):
        assert tokenizer.id_to_token(tokenizer.word_start(word)) == f"▁{word.strip()}"
    with pytest.raises(ValueError, match="a word is empty"):
        tokenizer.word_start(" ")


@given(st.one_of(anything, spellings))
def test_no_text_becomes_a_control_token(tokenizer: TextTokenizer, text: str) -> None:
    assert {tokenizer.end_id, tokenizer.pad_id}.isdisjoint(tokenizer.encode(text))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\x00",
        "a" * 10**5,
        "\u202eright\u202c to left",
        "👩\u200d👩\u200d👧",
        "a" + "\u0301" * 10**4,
    ],
    ids=["empty", "NUL", "one letter", "right to left", "joiners", "marks"],
)
def test_odd_texts_come_back_too(tokenizer: TextTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tokenizer_read_back_encodes_alike(
    raw: dict[str, Any],
    load: Load,
    tokenizer: TextTokenizer,
    verses: list[str],
) -> None:
    again = load(raw)
    assert again.encode_batch(verses) == tokenizer.encode_batch(verses)
    # verses spell <|end|>: the switch that keeps it text is not in the file and is set anew
    assert again.end_id not in again.encode(verses[0])


def test_half_a_surrogate_pair_is_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("a\ud800b")


def test_control_tokens_are_left_out_of_decoded_text(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode("sea shell")
    assert tokenizer.decode([0, *ids, 1, 0]) == "sea shell"


# training


def test_ids_are_end_pad_the_bytes_and_then_merges(tokenizer: TextTokenizer) -> None:
    assert (tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)) == (0, 1)
    assert (tokenizer.end_id, tokenizer.pad_id) == (0, 1)
    assert sorted(tokenizer.library.get_vocab().values()) == list(range(tokenizer.vocabulary_size))
    bare = train_tokenizer([], 258)
    assert bare.vocabulary_size == 258
    assert len(bare.encode("naïve")) == 6
    assert tokenizer.vocabulary_size <= 400


def test_each_merge_is_of_a_pair_that_no_other_exceeds_in_number(verses: list[str]) -> None:
    trained = train_tokenizer(verses, 300)
    words = Counter({tuple(word): n for word, n in words_of(trained, verses).items()})
    merges = json.loads(trained.to_str())["model"]["merges"]
    assert len(merges) == 300 - 258
    for first, second in merges:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, n in words.items():
            for pair in pairwise(word):
                pairs[pair] += n
        assert pairs[first, second] == max(pairs.values())
        merged: Counter[tuple[str, ...]] = Counter()
        for word, n in words.items():
            left: list[str] = []
            for piece in word:
                if left and (left[-1], piece) == (first, second):
                    left[-1] += piece
                else:
                    left.append(piece)
            merged[tuple(left)] += n
        words = merged
    for word in words:
        text = decoders.ByteLevel().decode(["".join(word)])
        assert [trained.id_to_token(i) for i in trained.encode(text)] == list(word)


def test_a_text_full_of_the_spelling_of_end_does_not_learn_it() -> None:
    trained = train_tokenizer([f"{END}{i}{PAD}{END} {i} {PAD}" for i in range(500)], 400)
    for text in (END, PAD, f"{END}{END} {END}{PAD}"):
        assert {0, 1}.isdisjoint(trained.encode(text))


def test_the_same_text_trains_the_same_tokenizer(verses: list[str]) -> None:
    assert train_tokenizer(verses, 350).to_str() == train_tokenizer(verses, 350).to_str()


def test_training_reads_no_more_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "TRAINED_ON", 100)
    early = train_tokenizer(["ab " * 30, "é" * 500, "xyz " * 100], 400)
    assert "xyz" not in early.library.get_vocab()
    assert "ab" in early.library.get_vocab()
    assert "ab" in train_tokenizer(["ab " * 500], 400).library.get_vocab()  # cut, not left out


@pytest.mark.parametrize("vocabulary", [257, 2**19 + 1])
def test_a_vocabulary_out_of_range_is_refused(vocabulary: int) -> None:
    with pytest.raises(ValueError, match=f"vocabulary={vocabulary}"):
        train_tokenizer([], vocabulary)


# tokenizers of other people


def test_a_tokenizer_of_the_library_is_wrapped_and_not_changed(tokenizer: TextTokenizer) -> None:
    theirs = Tokenizer.from_str(tokenizer.to_str())
    theirs.enable_truncation(3)
    wrapped, text = TextTokenizer.wrap(theirs), f"sea {END} sea shells"
    assert wrapped.encode(text) == tokenizer.encode(text)
    assert theirs.encode(END).ids == [0]
    assert len(theirs.encode(text).ids) == 3
    assert wrapped.library is theirs
    assert TextTokenizer.wrap(wrapped) is wrapped


def others(model: models.Model, **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    unknown = [model.unk_token] if model.unk_token else []
    tokenizer.add_special_tokens(["<|endoftext|>", *unknown])
    return tokenizer


def test_the_end_of_another_family_is_found(load: Load) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({letter: i for i, letter in enumerate(alphabet)}, [])
    theirs = others(model, pre_tokenizer=pre_tokenizers.ByteLevel(), decoder=decoders.ByteLevel())
    loaded = load(theirs.to_str())
    assert loaded.end_id == loaded.pad_id == 256


def test_a_model_that_would_choose_a_control_token_is_stopped(
    load: Load,
) -> None:
    words = {"<|endoftext|>": 0, "sea": 1, "[UNK]": 2}
    model = models.WordLevel(words, unk_token="[UNK]")
    loaded = load(others(model, pre_tokenizer=pre_tokenizers.WhitespaceSplit()).to_str())
    assert loaded.encode("sea shell") == [1, 2]
    with pytest.raises(ValueError, match=r"spells '<\|endoftext\|>'"):
        loaded.encode("sea <|endoftext|> sea")


@pytest.mark.parametrize(
    "model",
    [
        models.Unigram([("</s>", 0.0), ("sea", -1.0), ("<unk>", 0.0)], unk_id=2),
        models.WordLevel({"</s>": 0, "sea": 1, "<unk>": 2}, unk_token="<unk>"),
        models.WordPiece({"</s>": 0, "sea": 1, "<unk>": 2}, unk_token="<unk>"),
        models.BPE({"</s>": 0, "sea": 1, "<unk>": 2}, [], unk_token="<unk>", fuse_unk=True),
    ],
)
def test_text_outside_of_the_vocabulary_is_the_unknown_token(
    model: models.Model, load: Load
) -> None:
    theirs = Tokenizer(model)
    theirs.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    theirs.add_special_tokens(["</s>", "<unk>"])
    loaded = load(theirs.to_str())
    assert loaded.encode("京") == [2]
    assert loaded.encode_pieces([0, "京", 0]).ids == [0, 2, 0]


def test_a_pipeline_in_the_file_does_not_cut_pad_or_shuffle(
    raw: dict[str, Any],
    load: Load,
    tokenizer: TextTokenizer,
    verses: list[str],
) -> None:
    theirs = Tokenizer.from_str(json.dumps(raw))
    theirs.enable_truncation(4)
    theirs.enable_padding(length=4000)
    hostile = json.loads(theirs.to_str())
    hostile["model"]["dropout"] = 0.9
    loaded = load(hostile)
    for _ in range(3):
        assert loaded.encode_batch(verses[:3]) == tokenizer.encode_batch(verses[:3])


def change(raw: dict[str, Any], where: str, value: Any) -> dict[str, Any]:
    *parents, last = where.split(".")
    inner: Any = raw
    for name in parents:
        inner = inner[int(name) if name.isdigit() else name]
    inner[int(last) if last.isdigit() else last] = value
    return raw


@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        ("model", None, "cannot read"),
        ("model.type", "Telepathy", "cannot read"),
        ("model.merges", [["absent", "piece"]], "cannot read"),
        ("model.vocab.s", 2, "exactly one token"),
        ("model.vocab.extra", 99999, "exactly one token"),
        ("added_tokens.0.content", "", "added token"),
        ("added_tokens.0.content", "x" * 2**20, "added token"),
        ("added_tokens.0.content", 7, "added token"),
        ("added_tokens.0", "x", "added token"),
        ("added_tokens", {}, "added_tokens"),
        ("added_tokens", [], "ends a document"),
        ("added_tokens.0.special", False, "ends a document"),
        ("added_tokens.0.content", "\ud800", "cannot read"),
        ("version", "9.9", "cannot read"),
    ],
    ids=repr,
)
def test_a_broken_tokenizer_is_refused_in_a_sentence(
    where: str, value: Any, says: str, raw: dict[str, Any], load: Load
) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        load(change(raw, where, value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", "[" * 10_000, '{"a":' * 10_000, '{"a":1,"a":2}']
)
def test_what_is_not_a_json_object_is_refused(text: str, load: Load) -> None:
    with pytest.raises(ValueError, match=r"JSON|object"):
        load(text)


def test_a_file_too_large_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: dict[str, Any]
) -> None:
    monkeypatch.setattr(tokens, "_FILE_LIMIT", 1000)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="more than 1000 is not read"):
        load_tokenizer(path)


def test_too_many_tokens_are_refused(
    raw: dict[str, Any], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_file, "LARGEST_VOCABULARY", 300)
    count = len(raw["model"]["vocab"]) + 2
    with pytest.raises(ValueError, match=f"has {count} tokens; more than 300 is refused"):
        load(raw)


def test_replacements_that_multiply_are_refused(raw: dict[str, Any], load: Load) -> None:
    bomb = {"type": "Replace", "pattern": {"String": "s"}, "content": "s" * 20}
    raw["normalizer"] = {"type": "Sequence", "normalizers": [bomb, bomb]}
    with pytest.raises(ValueError, match="as many as 400"):
        load(raw)
    raw["normalizer"] = {**bomb, "pattern": {"Regex": "s*"}, "content": "s" * 64}
    with pytest.raises(ValueError, match="as many as 65"):
        load(raw)
    raw["normalizer"] = {**bomb, "pattern": {"String": " "}, "content": "▁"}
    assert load(raw).library.normalizer is not None


def test_a_panic_beneath_is_an_ordinary_error(tmp_path: Path, raw: dict[str, Any]) -> None:
    theirs = Tokenizer.from_str(json.dumps(raw))
    slow = Regex(r"^(([a-z])+.)+[A-Z]([a-z])+$")  # exceeds the retry limit of the engine
    theirs.normalizer = normalizers.Replace(slow, "x")
    path = tmp_path / "tokenizer.json"
    path.write_text(theirs.to_str())
    loaded = load_tokenizer(path)
    with pytest.raises(ValueError, match="cannot encode the text"):
        loaded.encode("a" * 200)


# the three ways to train


@pytest.fixture(scope="module", params=["unigram", "characters"])
def other(request: pytest.FixtureRequest, verses: list[str]) -> TextTokenizer:
    return train_tokenizer(verses, 400, request.param)


@pytest.mark.parametrize("vocabulary", [258, 259, 300])
@pytest.mark.parametrize("model", TOKENIZER_MODELS)
def test_no_vocabulary_is_larger_than_requested(
    model: str, vocabulary: int, verses: list[str]
) -> None:
    tokenizer = train_tokenizer(verses, vocabulary, model)
    assert tokenizer.vocabulary_size <= vocabulary
    assert tokenizer.decode(tokenizer.encode("Naïve sea shore")) == "Naïve sea shore"


@given(st.one_of(anything, spellings))
def test_every_model_gives_back_what_was_encoded_and_no_control_token(
    other: TextTokenizer, text: str
) -> None:
    ids = other.encode(text)
    assert other.decode(ids) == text
    assert {other.end_id, other.pad_id}.isdisjoint(ids)


@pytest.mark.parametrize("model", TOKENIZER_MODELS)
def test_every_model_is_trained_alike_from_the_same_text_and_read_back_alike(
    model: str, verses: list[str], load: Load
) -> None:
    first, again = (train_tokenizer(verses, 400, model) for _ in range(2))
    assert first.to_str() == again.to_str()
    assert (first.end_id, first.pad_id) == (0, 1)
    assert first.vocabulary_size <= 400
    text = "".join(verses) + "\x00ÿ<|pad|>"
    assert load(first.to_str()).encode(text) == first.encode(text)


@pytest.mark.parametrize("model", TOKENIZER_MODELS)
@pytest.mark.parametrize("texts", [[], [""], ["a"], ["\x00"], ["a" * 5000], ["😀" * 40]])
def test_every_model_is_trained_from_any_text(model: str, texts: list[str]) -> None:
    tokenizer = train_tokenizer(texts, 300, model)
    assert 258 <= tokenizer.vocabulary_size <= 300
    assert tokenizer.decode(tokenizer.encode("aé中😀\n")) == "aé中😀\n"


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ValueError, match="'wordpiece' is none of bpe, unigram, characters"):
        train_tokenizer(["a"], 300, "wordpiece")


def test_characters_of_the_text_are_tokens_and_nothing_longer_is(verses: list[str]) -> None:
    tokenizer = train_tokenizer(verses, 400, "characters")
    for text in verses:
        assert len(tokenizer.encode(text)) == len(text)
    tokens_ = [tokenizer.decode([i]) for i in range(2, tokenizer.vocabulary_size)]
    assert {len(x) for x in tokens_ if "\N{REPLACEMENT CHARACTER}" not in x} == {1}
    assert len(tokenizer.encode("ñ")) == 2  # not in the text: its bytes


Pieces = dict[str, float]
"""Token to log p, in the alphabet of ByteLevel."""


def words_of(tokenizer: TextTokenizer, texts: list[str]) -> Counter[str]:
    split = tokenizer.library.pre_tokenizer.pre_tokenize_str
    return Counter(word for text in texts for word, _ in split(text))


def scores_of(tokenizer: TextTokenizer) -> Pieces:
    rows = json.loads(tokenizer.to_str())["model"]["vocab"]
    return {token: score for token, score in rows if token not in (END, PAD)}


def cuts(word: str, pieces: Pieces) -> list[list[tuple[int, str]]]:
    """Per end, the pieces that end there with their starts."""
    return [
        [(start, word[start:end]) for start in range(end) if word[start:end] in pieces]
        for end in range(len(word) + 1)
    ]


def viterbi(word: str, pieces: Pieces) -> float:
    """The largest sum of scores over all cuts of a word."""
    best = [0.0] + [-math.inf] * len(word)
    for end, row in enumerate(cuts(word, pieces)):
        for start, piece in row:
            best[end] = max(best[end], best[start] + pieces[piece])
    return best[-1]


def em_step(words: Counter[str], pieces: Pieces) -> tuple[Pieces, float]:
    """New scores by one step of expectation maximisation, and the likelihood before it.

    The expected count of a piece is the sum over its places of
    exp(forward(start) + score + backward(end) - forward(whole)).
    """
    expected, likelihood = Counter[str](), 0.0
    for word, count in words.items():
        table = cuts(word, pieces)
        forward = [0.0] + [-math.inf] * len(word)
        for end, row in enumerate(table):
            for start, piece in row:
                forward[end] = np.logaddexp(forward[end], forward[start] + pieces[piece])
        backward = [-math.inf] * len(word) + [0.0]
        for end in range(len(word), 0, -1):
            for start, piece in table[end]:
                backward[start] = np.logaddexp(backward[start], backward[end] + pieces[piece])
        assert backward[0] == pytest.approx(forward[-1])
        for end, row in enumerate(table):
            for start, piece in row:
                log_share = forward[start] + pieces[piece] + backward[end] - forward[-1]
                expected[piece] += count * math.exp(log_share)
        likelihood += count * forward[-1]
    total = sum(expected.values())
    return {x: math.log(max(expected[x], 1e-12) / total) for x in pieces}, likelihood


def test_unigram_cuts_words_at_the_largest_sum_of_scores(verses: list[str]) -> None:
    tokenizer = train_tokenizer(verses, 300, "unigram")
    pieces = scores_of(tokenizer)
    unseen = ["shellsea sheslow, unsurely 中😀 <|end|> QQ"]
    for word in words_of(tokenizer, verses + unseen):
        text = decoders.ByteLevel().decode([word])
        (found,) = tokenizer.encode_batch([text])
        total = sum(pieces[tokenizer.id_to_token(i)] for i in found)
        assert total == pytest.approx(viterbi(word, pieces), abs=1e-9)


def test_unigram_scores_are_near_a_fixed_point_of_expectation_maximisation(
    verses: list[str],
) -> None:
    tokenizer = train_tokenizer(verses, 300, "unigram")
    words, pieces = words_of(tokenizer, verses), scores_of(tokenizer)
    after, before = em_step(words, pieces)
    again, once = em_step(words, after)
    assert before < once < em_step(words, again)[1]  # a step never loses likelihood
    uniform = em_step(words, dict.fromkeys(pieces, -math.log(len(pieces))))[1]
    # Not nearer: the library takes exp(digamma(count)) for a count, and stops after two steps.
    assert once - before < 0.1 * (once - uniform)
