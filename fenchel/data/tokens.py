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
patterns are not known to be quick encodes in a bounded process (``bounded_process``).

Where a text is to have control tokens, as a conversation has, they are given by id between pieces
of text (``encode_pieces``). The pieces are encoded as one text, in which control tokens have names
that no text can spell: the result is what the library makes of the whole text, except that a
spelling of a control token inside a piece stays text.
"""

import json
import os
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from fenchel.data import tokenizer_file
from fenchel.data.bounded_process import EncodingProcess
from fenchel.data.config import LARGEST_VOCABULARY, SMALLEST_VOCABULARY, TOKENIZER_MODELS
from fenchel.files import printable, read_json

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
_LETTER = "a"  # between the control tokens of a template
_BOUNDED: "WeakKeyDictionary[Tokenizer, EncodingProcess]" = WeakKeyDictionary()
"""Tokenizers that encode in a process of their own."""
_UNKNOWN: "WeakKeyDictionary[Tokenizer, int | None]" = WeakKeyDictionary()
"""The id of unknown text in tokenizers with a Unigram model."""
_UNSPELLED: "WeakKeyDictionary[Tokenizer, _Unspelled]" = WeakKeyDictionary()
"""Copies of tokenizers, for ``encode_pieces``."""


def train_tokenizer(texts: Iterable[str], vocabulary: int, model: str = "bpe") -> Tokenizer:
    """A tokenizer of at most ``vocabulary`` tokens, trained on at most ``TRAINED_ON`` bytes.

    >>> tokenizer = train_tokenizer(["the cat sat on the mat"], 300)
    >>> decode(tokenizer, encode(tokenizer, "the hat"))
    'the hat'
    >>> characters = train_tokenizer(["naïve"], 300, "characters")
    >>> len(encode(characters, "naïve")), len(encode(characters, "naîve"))
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
            tokenizer.model = _without_noise(tokenizer)
    # A merge ends with a byte that begins no code point, so words serve characters too.
    tokenizer.pre_tokenizer = words
    return _spell_out_specials(tokenizer)


def _without_noise(tokenizer: Tokenizer) -> models.Unigram:
    """The Unigram model with scores that the same text gives again.

    The library adds in an order that changes from call to call, which shows in the last digits. To
    the bytes that its vocabulary lacks it gives the lowest score plus 0, 0.0001, 0.0002, ..., in an
    order that changes too. So scores are rounded, and these bytes share the lowest.
    """
    rows = {t: s or 0.0 for t, s in json.loads(tokenizer.to_str())["model"]["vocab"]}
    del rows[END], rows[PAD]  # and a score is null where a text of no words gave none
    lowest = min(rows.values())
    added = lowest + 256 * 0.0001
    scores = {t: round(lowest if len(t) == 1 and s < added else s, 3) for t, s in rows.items()}
    ordered = sorted(scores.items(), key=lambda row: (-row[1], row[0]))
    return models.Unigram([(END, 0.0), (PAD, 0.0), *ordered])


def load_tokenizer(path: Path, *, needs_end: bool = True) -> Tokenizer:
    """A tokenizer from an untrusted tokenizer.json; raises ValueError if it is invalid.

    ``needs_end`` refuses one without an end token, which training puts between documents.
    """
    raw = read_json(path, limit=_FILE_LIMIT)
    tokenizer_file.check(raw, path)
    # Truncation, padding and dropout belong to a pipeline; here every text has one full encoding.
    raw["truncation"] = raw["padding"] = None
    if isinstance(model := raw.get("model"), dict) and model.get("dropout"):
        model["dropout"] = None
    text = json.dumps(raw)
    bounded = None
    if not tokenizer_file.is_plain(raw):
        bounded = EncodingProcess(text, printable(path, 200), (_PROBE, _LETTER))
    with _rust(f"read {path}"), _without_panic_lines():
        tokenizer = Tokenizer.from_str(text)
    _check_ids(tokenizer, path)
    if needs_end and not has_end(tokenizer):
        raise ValueError(
            f"{path} has no special token that ends a document; it needs one of {', '.join(_ENDS)}."
        )
    _spell_out_specials(tokenizer)
    # Errors that appear only in use appear here, before any work.
    with _rust(f"use {path}"), _without_panic_lines():
        ids = tokenizer.encode(_PROBE).ids
        tokenizer.decode(ids)
    if max(ids, default=0) >= tokenizer.get_vocab_size():
        raise ValueError(f"{path} has a template with the id {max(ids)}, which no token has.")
    if bounded is not None:
        _BOUNDED[tokenizer] = bounded
    return tokenizer


def end_id(tokenizer: Tokenizer) -> int:
    """The id of the token that ends a document and precedes the first."""
    end = _first_special(tokenizer, _ENDS)
    if end is None:
        raise ValueError(f"the tokenizer has no special token among {', '.join(_ENDS)}.")
    return end


def has_end(tokenizer: Tokenizer) -> bool:
    """Whether a token ends a document; in the tokenizer of a foreign checkpoint none may.

    >>> has_end(train_tokenizer(["aa"], 300)), has_end(Tokenizer(models.BPE()))
    (True, False)
    """
    return _first_special(tokenizer, _ENDS) is not None


def begin_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids of the control tokens that the tokenizer's template puts before a text.

    >>> tokenizer = train_tokenizer(["the cat sat on the mat"], 300)
    >>> begin_ids(tokenizer), begin_ids(begin_with(tokenizer, end_id(tokenizer)))
    ([], [0])
    """
    return _around(tokenizer)[0]


def begin_with(tokenizer: Tokenizer, token: int) -> Tokenizer:
    """The tokenizer with ``token`` before every text in its template.

    >>> begin_with(train_tokenizer(["aa"], 300), 0).encode("a").tokens
    ['<|end|>', 'a']
    """
    name = "BEGIN"  # within the template, whose syntax the token itself might break
    template = processors.TemplateProcessing(
        single=f"{name} $A",
        pair=f"{name} $A {name}:1 $B:1",
        special_tokens=[{"id": name, "ids": [token], "tokens": [tokenizer.id_to_token(token)]}],
    )
    steps = [step for step in (tokenizer.post_processor, template) if step is not None]
    tokenizer.post_processor = template if len(steps) == 1 else processors.Sequence(steps)
    return tokenizer


def encode_whole(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text with the control tokens that the template puts around it.

    >>> tokenizer = begin_with(train_tokenizer(["aa"], 300), 0)
    >>> len(encode(tokenizer, "aa")), len(encode_whole(tokenizer, "aa"))
    (1, 2)
    """
    before, after = _around(tokenizer)
    return [*before, *encode(tokenizer, text), *after]


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids of the control tokens that the template puts before and after a text."""
    with _rust("encode a text"):
        encoded = tokenizer.encode(_LETTER)
    ids, mask = list(encoded.ids), encoded.special_tokens_mask
    if 0 not in mask:
        return ids, []
    return ids[: mask.index(0)], ids[len(mask) - mask[::-1].index(0) :]


def pad_id(tokenizer: Tokenizer) -> int:
    """The id of the padding token; the end token if there is none."""
    pad = _first_special(tokenizer, _PADS)
    return end_id(tokenizer) if pad is None else pad


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text, without control tokens."""
    return encode_batch(tokenizer, [text])[0]


def encode_batch(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """``encode`` of many texts, on all cores."""
    for text in texts:
        _require_unicode(text)
    if (bounded := _BOUNDED.get(tokenizer)) is not None:
        rows = bounded.encode(texts)
    else:
        with _rust("encode the text"):
            encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            rows = [row.ids for row in encoded]
    control = _control_ids(tokenizer)
    for row in rows:
        if not control.isdisjoint(row):
            raise _spells(tokenizer.id_to_token(next(i for i in row if i in control)))
    return rows


class PieceTokens(NamedTuple):
    """Token ids, and for each the pieces that it covers."""

    ids: list[int]
    pieces: list[range]


def encode_pieces(tokenizer: Tokenizer, pieces: Sequence[str | int]) -> PieceTokens:
    """The ids of a text in pieces, of which an int is a control token by its id.

    >>> tokenizer = train_tokenizer(["aa"], 300)
    >>> encode_pieces(tokenizer, ["a", 0, "aa<|end|>", 1]).ids[:3]
    [66, 0, 258]
    >>> encode_pieces(tokenizer, ["a", "a", 0]).pieces
    [range(0, 2), range(2, 3)]
    """
    if (unspelled := _UNSPELLED.get(tokenizer)) is None:
        unspelled = _UNSPELLED[tokenizer] = _Unspelled(tokenizer)
    return unspelled.encode(pieces)


class _Unspelled:
    """A tokenizer whose control tokens have names that no text can spell."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        raw, secret = json.loads(tokenizer.to_str()), secrets.token_hex(8)
        raw["post_processor"] = None  # pieces have all control tokens already
        self.names: dict[int, str] = {}
        for token in raw["added_tokens"]:
            if token["special"]:
                self.names[token["id"]] = token["content"] = f"{secret}{token['id']:08x}"
                token["special"] = token["single_word"] = False
        added = {token["content"]: token["id"] for token in raw["added_tokens"]}
        text = json.dumps(raw)
        self.bounded: EncodingProcess | None = None
        if tokenizer in _BOUNDED:
            self.bounded = EncodingProcess(text, _BOUNDED[tokenizer].name, (_PROBE, _LETTER))
        with _rust("read the tokenizer"):
            self.tokenizer = _spell_out_specials(Tokenizer.from_str(text))
        # A new name that the model's vocabulary lacks has a new id, and so have those after it.
        self.ids = {self.tokenizer.token_to_id(name): id for name, id in added.items()}
        self.given = {self.tokenizer.token_to_id(name) for name in self.names.values()}
        self.control = {id: tokenizer.id_to_token(id) for id in _control_ids(tokenizer)}

    def encode(self, pieces: Sequence[str | int]) -> PieceTokens:
        texts = [piece if isinstance(piece, str) else self.names[piece] for piece in pieces]
        given = [number for number, piece in enumerate(pieces) if not isinstance(piece, str)]
        text = "".join(texts)
        _require_unicode(text)
        if self.bounded is not None:
            ids, offsets = self.bounded.encode_with_offsets(text)
        else:
            with _rust("encode the text"):
                encoded = self.tokenizer.encode(text, add_special_tokens=False)
                ids, offsets = encoded.ids, encoded.offsets
        spelled = (id for id in ids if id in self.control and id not in self.ids)
        if (id := next(spelled, None)) is not None:
            raise _spells(self.control[id])
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


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of ids, without control tokens; an incomplete character becomes U+FFFD."""
    with _rust("decode the tokens"):
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))


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


def control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The spellings of all control tokens, with their ids.

    >>> control_tokens(train_tokenizer(["aa"], 300))
    {'<|end|>': 0, '<|pad|>': 1}
    """
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: id for id, token in sorted(added.items()) if token.special}


def _first_special(tokenizer: Tokenizer, spellings: Sequence[str]) -> int | None:
    special = control_tokens(tokenizer)
    return next((special[s] for s in spellings if s in special), None)


def _control_ids(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder()
    special = frozenset(id for id, token in added.items() if token.special)
    return special - {_unknown_id(tokenizer)}


def _unknown_id(tokenizer: Tokenizer) -> int | None:
    """The id that stands for text outside of the vocabulary, and controls nothing."""
    model = tokenizer.model
    if not isinstance(model, models.Unigram):
        name = getattr(model, "unk_token", None)
        return None if name is None else tokenizer.token_to_id(name)
    if tokenizer not in _UNKNOWN:  # the state of the model is the one place that has it
        _UNKNOWN[tokenizer] = json.loads(model.__getstate__()).get("unk_id")
    return _UNKNOWN[tokenizer]


def _check_ids(tokenizer: Tokenizer, path: Path) -> None:
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if len(set(ids)) != len(ids) or max(ids, default=-1) != len(ids) - 1:
        raise ValueError(
            f"{path} has {len(ids)} tokens and its ids run to {max(ids, default=-1)}; "
            "every id from 0 must belong to exactly one token."
        )
