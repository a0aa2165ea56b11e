"""Text to token ids and back: byte-level tokenizers, trained in one of three ways.

A text is UTF-8 bytes. Every byte is a token of its own, so any string has ids without an unknown
token, and decoding returns exactly the string that was encoded. Which sequences of bytes become
tokens beside them is learned, within words and runs of signs, which no token crosses:

bpe
    Byte-pair encoding: the most frequent pair of neighbours is merged until the vocabulary is full;
    a text is encoded by the same merges in the same order.
unigram
    Tokens x have probabilities p(x), a word is cut into the tokens x_1 ... x_n with the largest
    sum of log p(x_i) (Viterbi). p maximises the likelihood of the text, summed over all cuts (EM);
    from a large vocabulary, the tokens are removed that cost the likelihood least.
characters
    The code points of the text, and no longer tokens: byte-pair encoding inside code points.

    id 0  ``END``   after every document, and before the first
    id 1  ``PAD``   fills rows of unequal length; never in a text
    then 256 bytes and the merges in the order of training, or the tokens of unigram by falling p

Control tokens are never the result of encoding a text: a text that contains ``<|end|>`` becomes the
tokens of those seven characters. Which of them begin a text is part of the tokenizer, its template
(``begin_ids``). A tokenizer.json from elsewhere is checked (``tokenizer_file``), and one whose
patterns are not known to be quick, or a copy of it, encodes in a bounded process (``sandbox``).

Where a text is to have control tokens, as a conversation has, they are given by id between pieces
of text (``encode_pieces``). The pieces are encoded as one text, in which control tokens have names
that no text can spell: the result is what the library makes of the whole text, except that a
spelling of a control token inside a piece stays text.
"""

import json
import os
import re
import secrets
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from fenchel.data import tokenizer_file
from fenchel.data.config import LARGEST_VOCABULARY, SMALLEST_VOCABULARY, TOKENIZER_MODELS
from fenchel.data.sandbox import EncodedText, EncodingProcess
from fenchel.files import printable, read_json, write_atomic

Ids = np.ndarray[Any, np.dtype[Any]]
"""An array of token ids, of one or two axes."""
END = "<|end|>"
PAD = "<|pad|>"
TRAINED_ON = 2**26
"""The most bytes that a vocabulary is trained on; more change it little."""

# The last ends a turn, and not a document, where a tokenizer from elsewhere has one of the others.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", END)
_PADS = (PAD, "<pad>", "[PAD]")
_FILE_LIMIT = 48 * 2**20  # the largest in use, of 256,000 tokens, is 33 MB
_PROBE = "Ab 12\n\té中😀"
_LEAST_LONGEST = 32
_LETTER = "a"  # between the control tokens of a template
_BEFORE_A_WORD = ","  # a sign that no token joins with the space after it


class TextTokenizer:
    """Text to token ids and back, by a tokenizer of the library ``tokenizers``.

    ``library`` is that tokenizer. What is known of it is computed once: it should not change.

    >>> tokenizer = train_tokenizer(["the cat sat on the mat"], 300)
    >>> tokenizer.decode(tokenizer.encode("the hat"))
    'the hat'
    >>> tokenizer.control_tokens, tokenizer.begin_ids, tokenizer.begin_with(0).begin_ids
    ({'<|end|>': 0, '<|pad|>': 1}, [], [0])
    """

    def __init__(self, library: Tokenizer, encoder: "_Encoder | None" = None) -> None:
        """``encoder`` is known where the tokenizer was read or trained here."""
        self.library = library
        if encoder is not None:
            self._encoder = encoder

    @classmethod
    def wrap(cls, tokenizer: "AnyTokenizer") -> "TextTokenizer":
        """The tokenizer itself, or one of the library, which it leaves as it is."""
        return tokenizer if isinstance(tokenizer, TextTokenizer) else cls(tokenizer)

    @classmethod
    def from_json(cls, raw: dict[str, Any], name: str = "the tokenizer") -> "TextTokenizer":
        """The tokenizer of a tokenizer.json, called ``name`` in messages."""
        encoder = _Encoder(raw, name)
        return cls(encoder.library, encoder)

    def to_str(self, *, pretty: bool = False) -> str:
        """The text of tokenizer.json."""
        return str(self.library.to_str(pretty=pretty))

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json."""
        write_atomic(Path(path), self.to_str(pretty=True))

    @property
    def vocabulary_size(self) -> int:
        """The number of ids, control tokens included."""
        return int(self.library.get_vocab_size())

    def id_to_token(self, id: int) -> str | None:
        """The name of a token in the vocabulary; None if no token has the id."""
        name: str | None = self.library.id_to_token(id)
        return name

    def token_to_id(self, name: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        id: int | None = self.library.token_to_id(name)
        return id

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """The spellings of all control tokens, with their ids."""
        added = self.library.get_added_tokens_decoder()
        return {token.content: id for id, token in sorted(added.items()) if token.special}

    @property
    def has_end(self) -> bool:
        """Whether a token ends a document; in the tokenizer of a foreign checkpoint none may."""
        return self._first_control(_ENDS) is not None

    @property
    def end_id(self) -> int:
        """The id of the token that ends a document and precedes the first."""
        end = self._first_control(_ENDS)
        if end is None:
            raise ValueError(f"the tokenizer has no special token among {', '.join(_ENDS)}.")
        return end

    @property
    def pad_id(self) -> int:
        """The id of the padding token; the end token if there is none."""
        pad = self._first_control(_PADS)
        return self.end_id if pad is None else pad

    @property
    def begin_ids(self) -> list[int]:
        """The ids of the control tokens that the template puts before a text."""
        return list(self._around[0])

    def begin_with(self, token: int) -> "TextTokenizer":
        """A copy with ``token`` before every text in its template.

        >>> train_tokenizer(["aa"], 300).begin_with(0).library.encode("a").tokens
        ['<|end|>', 'a']
        """
        return self._with_template([token], [], keep=True)

    def enclose_with(self, before: Sequence[int], after: Sequence[int]) -> "TextTokenizer":
        """A copy whose template puts these tokens around every text, and no others.

        >>> train_tokenizer(["aa"], 300).enclose_with([], [0]).library.encode("a").tokens
        ['a', '<|end|>']
        """
        return self._with_template(before, after, keep=False)

    def _with_template(
        self, before: Sequence[int], after: Sequence[int], *, keep: bool
    ) -> "TextTokenizer":
        """A copy with a template, after the present one with ``keep``, else instead of it."""
        # Names within the template, whose syntax the tokens themselves might break.
        name = {token: f"TOKEN{token}" for token in (*before, *after)}
        single = [*(name[token] for token in before), "$A", *(name[token] for token in after)]
        second = ["$B", *single[len(before) + 1 :]] if after else [*single[:-1], "$B"]
        template = processors.TemplateProcessing(
            single=single,
            pair=[*single, *(f"{part}:1" for part in second)],
            special_tokens=[
                {"id": name[token], "ids": [token], "tokens": [self.id_to_token(token)]}
                for token in name
            ],
        )
        copy = _spell_out_specials(Tokenizer.from_str(self.to_str()))
        present = copy.post_processor if keep else None
        copy.post_processor = (
            template if present is None else processors.Sequence([present, template])
        )
        return TextTokenizer(copy, self._encoder)  # which adds no control tokens

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without control tokens."""
        return self.encode_batch([text])[0]

    def encode_whole(self, text: str) -> list[int]:
        """The ids of a text with the control tokens that the template puts around it.

        >>> tokenizer = train_tokenizer(["aa"], 300).begin_with(0)
        >>> len(tokenizer.encode("aa")), len(tokenizer.encode_whole("aa"))
        (1, 2)
        """
        before, after = self._around
        return [*before, *self.encode(text), *after]

    def word_start(self, word: str) -> int:
        """The token with which a word begins within a text, after a space.

        The ids of " word" alone do not tell: tokenizers that put a space before every text
        (SentencePiece) begin it with a token of that space.

        >>> tokenizer = train_tokenizer(["the cat. the cat"], 300)
        >>> tokenizer.id_to_token(tokenizer.word_start("cat"))
        'Ġcat'
        """
        if not (word := word.strip()):
            raise ValueError("a word is empty; give one with at least one character.")
        before, ids = self.encode_batch([_BEFORE_A_WORD, f"{_BEFORE_A_WORD} {word}"])
        same = [a == b for a, b in zip(before, ids, strict=False)]
        ids = ids[same.index(False) if False in same else len(same) :]
        if not ids:
            raise ValueError(f"the tokenizer has no token for {printable(repr(word), 60)}.")
        return ids[0]

    def most_characters(self, tokens: int) -> int:
        """Characters beyond which a text cannot have as few tokens as ``tokens``.

        No token has more than the longest of the vocabulary; the least is for tokenizers that
        remove characters.
        """
        return tokens * max(self._longest, _LEAST_LONGEST)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.library.get_vocab()), default=0)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` of many texts, on all cores."""
        rows = [ids for ids, _ in self._encoder.encode(texts)]
        for row in rows:
            if not self._refused.isdisjoint(row):
                raise _spells(self.id_to_token(next(i for i in row if i in self._refused)))
        return rows

    def encode_pieces(self, pieces: Sequence[str | int]) -> "PieceTokens":
        """The ids of a text in pieces, of which an int is a control token by its id.

        >>> tokenizer = train_tokenizer(["aa"], 300)
        >>> tokenizer.encode_pieces(["a", 0, "aa<|end|>", 1]).ids[:3]
        [66, 0, 258]
        >>> tokenizer.encode_pieces(["a", "a", 0]).pieces
        [range(0, 2), range(2, 3)]
        """
        return self._unspelled.encode(pieces)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; an incomplete character becomes U+FFFD."""
        with _rust("decode the tokens"):
            return str(self.library.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes by which a token is named, which may be a part of a character.

        A byte-level tokenizer writes a character for every byte, one with byte fallback ``<0xE6>``
        for a byte alone. None where the name is of neither kind.
        """
        if (byte := self.fallback_byte(token)) is not None:
            return bytes([byte])
        found = [_bytes_by_character().get(sign) for sign in self.id_to_token(token) or ""]
        return None if None in found else bytes(byte for byte in found if byte is not None)

    def spelled_bytes(self, ids: Iterable[int]) -> int:
        """How many bytes of a text tokens spell, each alone; a control token spells none."""
        counts = Counter(int(token) for token in ids)
        return sum(
            number * len(self.token_bytes(token) or self.decode([token]).encode())
            for token, number in counts.items()
            if token not in self.control_tokens.values()
        )

    def fallback_byte(self, token: int) -> int | None:
        """The byte that a token of byte fallback stands for; None for other tokens."""
        name = re.fullmatch("<0x([0-9A-Fa-f]{2})>", self.id_to_token(token) or "")
        return None if name is None else int(name[1], 16)

    @cached_property
    def _encoder(self) -> "_Encoder":
        return _Encoder(json.loads(self.to_str()), "the tokenizer")

    @cached_property
    def _unspelled(self) -> "_Unspelled":
        return _Unspelled(self)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The ids of the control tokens that the template puts before and after a text."""
        with _rust("encode a text"):
            encoded = self.library.encode(_LETTER)
        ids, mask = list(encoded.ids), encoded.special_tokens_mask
        if 0 not in mask:
            return ids, []
        return ids[: mask.index(0)], ids[len(mask) - mask[::-1].index(0) :]

    @cached_property
    def _refused(self) -> frozenset[int]:
        """Control tokens, without the one for text outside of the vocabulary."""
        model = self.library.model
        if isinstance(model, models.Unigram):  # the state of the model is the one place that has it
            unknown = json.loads(model.__getstate__()).get("unk_id")
        else:
            name = getattr(model, "unk_token", None)
            unknown = None if name is None else self.token_to_id(name)
        return frozenset(self.control_tokens.values()) - {unknown}

    def _first_control(self, spellings: Sequence[str]) -> int | None:
        known = self.control_tokens
        return next((known[s] for s in spellings if s in known), None)


AnyTokenizer = TextTokenizer | Tokenizer
"""What ``TextTokenizer.wrap`` takes."""


class PieceTokens(NamedTuple):
    """Token ids, and for each the pieces that it covers."""

    ids: list[int]
    pieces: list[range]


class _Encoder:
    """Texts to ids without control tokens, in a bounded process unless it is known to be quick."""

    def __init__(self, raw: dict[str, Any], name: str) -> None:
        # Truncation, padding and dropout belong to a pipeline; here a text has one full encoding.
        raw["truncation"] = raw["padding"] = None
        if isinstance(model := raw.get("model"), dict) and model.get("dropout"):
            model["dropout"] = None
        self.name, self.process, text = name, None, json.dumps(raw)
        if not tokenizer_file.is_plain(raw):
            self.process = EncodingProcess(text, name, (_PROBE, _LETTER))
        with _rust(f"read {name}"), _without_panic_lines():
            self.library = _spell_out_specials(Tokenizer.from_str(text))

    def encode(self, texts: Sequence[str], *, offsets: bool = False) -> list[EncodedText]:
        """The ids of each text and, with ``offsets``, which characters each id covers."""
        for text in texts:
            _require_unicode(text)
        if self.process is not None:
            return self.process.encode(texts, offsets=offsets)
        batch = self.library.encode_batch if offsets else self.library.encode_batch_fast
        with _rust("encode the text"):
            encoded = batch(list(texts), add_special_tokens=False)
            return [(row.ids, row.offsets if offsets else []) for row in encoded]


class _Unspelled:
    """A tokenizer whose control tokens have names that no text can spell."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        raw, secret = json.loads(tokenizer.to_str()), secrets.token_hex(8)
        raw["post_processor"] = None  # pieces have all control tokens already
        self.names: dict[int, str] = {}
        for token in raw["added_tokens"]:
            if token["special"]:
                self.names[token["id"]] = token["content"] = f"{secret}{token['id']:08x}"
                token["special"] = token["single_word"] = False
        added = {token["content"]: token["id"] for token in raw["added_tokens"]}
        self.encoder = _Encoder(raw, tokenizer._encoder.name)
        # A new name that the model's vocabulary lacks has a new id, and so have those after it.
        new_id = self.encoder.library.token_to_id
        self.ids = {new_id(name): id for name, id in added.items()}
        self.given = {new_id(name) for name in self.names.values()}
        self.refused = {id: tokenizer.id_to_token(id) for id in tokenizer._refused}

    def encode(self, pieces: Sequence[str | int]) -> PieceTokens:
        texts = [piece if isinstance(piece, str) else self.names[piece] for piece in pieces]
        given = [number for number, piece in enumerate(pieces) if not isinstance(piece, str)]
        [(ids, offsets)] = self.encoder.encode(["".join(texts)], offsets=True)
        spelled = (id for id in ids if id in self.refused and id not in self.ids)
        if (id := next(spelled, None)) is not None:
            raise _spells(self.refused[id])
        ends = list(accumulate(map(len, texts)))
        starts = [end - len(text) for end, text in zip(ends, texts, strict=True)]
        # A control token may cover spaces beside it, which belong to other pieces.
        control = iter(given)
        covered = [
            range(number := next(control), number + 1)
            if id in self.given
            else range(bisect_right(ends, start), bisect_left(starts, end))
            for id, (start, end) in zip(ids, offsets, strict=True)
        ]
        return PieceTokens([self.ids.get(id, id) for id in ids], covered)


def train_tokenizer(texts: Iterable[str], vocabulary: int, model: str = "bpe") -> TextTokenizer:
    """A tokenizer of at most ``vocabulary`` tokens, trained on at most ``TRAINED_ON`` bytes.

    >>> characters = train_tokenizer(["naïve"], 300, "characters")
    >>> len(characters.encode("naïve")), len(characters.encode("naîve"))
    (5, 6)
    """
    if not SMALLEST_VOCABULARY <= vocabulary <= LARGEST_VOCABULARY:
        raise ValueError(
            f"vocabulary={vocabulary} is outside {SMALLEST_VOCABULARY} to {LARGEST_VOCABULARY}."
        )
    if model not in TOKENIZER_MODELS:
        raise ValueError(f"model={model!r} is none of {', '.join(TOKENIZER_MODELS)}.")
    # The pattern of use_regex separates letters from signs, so that no merge can spell END or PAD
    # and thereby take the id of the control token.
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    unigram = model == "unigram"
    tokenizer = Tokenizer(models.Unigram() if unigram else models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = words
    if model == "characters":  # each alone while training: a merge stays inside a code point
        alone = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([alone, bytes_])
    trainer = (trainers.UnigramTrainer if unigram else trainers.BpeTrainer)(
        vocab_size=vocabulary,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with _rust("train a tokenizer"):
        tokenizer.train_from_iterator(_at_most(TRAINED_ON, texts), trainer)
        if unigram:
            tokenizer.model = _without_noise(tokenizer, vocabulary)
    # A merge ends with a byte that begins no code point, so words serve characters too.
    tokenizer.pre_tokenizer = words
    return TextTokenizer.from_json(json.loads(tokenizer.to_str()))


def _without_noise(tokenizer: Tokenizer, vocabulary: int) -> models.Unigram:
    """The Unigram model with scores that the same text gives again.

    The library adds in an order that changes from call to call, which shows in the last digits. To
    the bytes that its vocabulary lacks it gives the lowest score plus 0, 0.0001, 0.0002, ..., in an
    order that changes too. So scores are rounded, and these bytes share the lowest. Just above the
    number of bytes it also leaves more tokens than were requested; then the likeliest stay.
    """
    rows = {t: s or 0.0 for t, s in json.loads(tokenizer.to_str())["model"]["vocab"]}
    del rows[END], rows[PAD]  # and a score is null where a text of no words gave none
    lowest = min(rows.values())
    added = lowest + 256 * 0.0001
    scores = {t: round(lowest if len(t) == 1 and s < added else s, 3) for t, s in rows.items()}
    ordered = sorted(scores.items(), key=lambda row: (-row[1], row[0]))
    longer = [row for row in ordered if len(row[0]) > 1]
    left_out = {token for token, _ in longer[max(0, vocabulary - 2 - len(ordered) + len(longer)) :]}
    ordered = [row for row in ordered if row[0] not in left_out]
    return models.Unigram([(END, 0.0), (PAD, 0.0), *ordered])


def load_tokenizer(path: Path, *, needs_end: bool = True) -> TextTokenizer:
    """A tokenizer from an untrusted tokenizer.json; raises ValueError if it is invalid.

    ``needs_end`` refuses one without an end token, which training puts between documents.
    """
    raw = read_json(path, limit=_FILE_LIMIT)
    tokenizer_file.check(raw, path)
    tokenizer = TextTokenizer.from_json(raw, printable(path, 200))
    _check_ids(tokenizer.library, path)
    if needs_end and not tokenizer.has_end:
        raise ValueError(
            f"{path} has no special token that ends a document; it needs one of {', '.join(_ENDS)}."
        )
    # Errors that appear only in use appear here, before any work.
    with _rust(f"use {path}"), _without_panic_lines():
        ids = tokenizer.library.encode(_PROBE).ids
        tokenizer.library.decode(ids)
    if max(ids, default=0) >= tokenizer.vocabulary_size:
        raise ValueError(f"{path} has a template with the id {max(ids)}, which no token has.")
    return tokenizer


@cache
def _bytes_by_character() -> dict[str, int]:
    """The characters by which byte-level tokenizers write bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    named = {chr(byte) if byte in plain else chr(next(others)): byte for byte in range(256)}
    assert set(named) == set(pre_tokenizers.ByteLevel.alphabet())
    return named


@contextmanager
def _rust(doing: str) -> Iterator[None]:
    """Turns every error of the Rust library into a ValueError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, OSError, ValueError):
        raise
    except BaseException as error:  # a Rust panic is a BaseException and not an Exception
        reason = printable(" ".join(str(error).split()), 300).rstrip(".")
        raise ValueError(f"cannot {doing}: {reason}.") from None


@contextmanager
def _without_panic_lines() -> Iterator[None]:
    """Within, file descriptor 2 leads nowhere: a Rust panic writes lines of its own to it."""
    try:
        terminal = os.dup(2)
    except OSError:  # closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def _at_most(limit: int, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        data = text.encode()
        if len(data) > limit:
            yield data[:limit].decode(errors="ignore")
            return
        limit -= len(data)
        yield text


def _spell_out_specials(tokenizer: Tokenizer) -> Tokenizer:
    # tokenizer.json does not store this switch, so it is set whenever a tokenizer is made or read.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            "the text contains a lone surrogate, which UTF-8 cannot represent."
        ) from None


def _spells(token: str | None) -> ValueError:
    """The error of a model whose vocabulary has the whole spelling, and which produces it."""
    return ValueError(
        f"the text spells {token!r}, which this tokenizer makes a control token; "
        "take it out of the text or use another tokenizer."
    )


def _check_ids(tokenizer: Tokenizer, path: Path) -> None:
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if len(set(ids)) != len(ids) or max(ids, default=-1) != len(ids) - 1:
        raise ValueError(
            f"{path} has {len(ids)} tokens and its ids run to {max(ids, default=-1)}; "
            "every id from 0 must belong to exactly one token."
        )
