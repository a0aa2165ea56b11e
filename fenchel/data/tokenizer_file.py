"""Which tokenizer.json of other people is accepted, and which of them may encode in this process.

A tokenizer.json is a model (BPE, Unigram, WordPiece or WordLevel) and parts around it: normalizers,
pre-tokenizers, post-processors, decoders. ``check`` refuses one whose parts could make a short text
very long or a small file very large, in numbers that no tokenizer in use comes near:

    added tokens        of 1 to 256 characters, 2^20 characters in all
    vocabulary          at most ``LARGEST_VOCABULARY``
    parts               64
    growth              64 characters from one, over all replacements and prefixes together
    character maps      replacements of 256 bytes (a Precompiled normalizer)
    templates           256 tokens

``is_plain`` then decides where it encodes. In this process: known parts, whose patterns are plain
strings or take a time linear in the text. All others encode in a bounded process of their own
(``tokenizer_process``).

A regular expression is linear when each of its alternatives is: one of ``_LINEAR``, or a sequence

    x?  y...  z+  w*...          at most one optional item, required ones, one repeat, optional ones

of single characters and classes. After its repeat nothing can fail, so nothing is tried twice.
"""

import base64
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from fenchel.data.config import LARGEST_VOCABULARY
from fenchel.files import printable

_SPECIAL_LIMIT = 256
_SPECIALS_LIMIT = 2**20
_PART_LIMIT = 64
_GROWTH_LIMIT = 64
_MAP_LIMIT = 256
_TEMPLATE_LIMIT = 256
_TOKEN_LIMIT = 256  # characters of a token; Unigram looks up all its prefixes
_WORD_LIMIT = 256  # characters of a word that WordPiece looks up, in quadratic time

_PLAIN_PARTS = frozenset(
    """
    BertNormalizer ByteLevel Lowercase NFC NFD NFKC NFKD Nmt Precompiled Prepend Replace Sequence
    Strip StripAccents
    BertPreTokenizer CharDelimiterSplit Digits Metaspace Punctuation Split UnicodeScripts Whitespace
    WhitespaceSplit
    BertProcessing RobertaProcessing TemplateProcessing
    BPEDecoder ByteFallback CTC Fuse WordPiece
    """.split()
)
_PLAIN_MODELS = ("BPE", "Unigram", "WordLevel", "WordPiece")
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LINEAR = frozenset(
    {
        r"\s+(?!\S)",
        r"\s*[\r\n]+",
        r"\s*[\r\n]",
        r"^▁+$",
        _CONTRACTIONS,
        r"'(?i:[sdmt]|ll|ve|re)",
        r"'(?:[sdmt]|ll|ve|re)",
        r"(?:'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD]))",
        r" ?[^(\s|[.,!?…。，、।۔،])]+",
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?{first}{last}{suffix}"
            for first, last in ((_UPPER + "*", _LOWER + "+"), (_UPPER + "+", _LOWER + "*"))
            for suffix in ("", _CONTRACTIONS + "?")
        ),
    }
)
"""Alternatives of patterns in use that are linear and of another form."""
_PROPERTY = r"\\[pP]\{\^?\w{1,30}\}"
_CLASS = rf"\[\^?(?:{_PROPERTY}|\\.|[^\[\]\\&])+\]"
_ITEM = rf"(?:{_PROPERTY}|\\[sSdDwWrnt]|\\[^\w\s]|{_CLASS}|[^\\\[\](){{}}*+?|.^$])"
_REPEAT = r"(?:\+|\*|\{[1-4](?:,\d{0,4})?\})"
_SEQUENCE = re.compile(rf"(?:{_ITEM}\?)?{_ITEM}{{0,64}}(?:{_ITEM}{_REPEAT})?(?:{_ITEM}[?*])*")


def check(raw: dict[str, Any], path: Path) -> None:
    """Refuse a tokenizer.json that could take memory or time out of proportion to its size."""
    _check_tokens(raw, path)
    parts = list(_typed_parts(raw))
    if len(parts) > _PART_LIMIT:
        raise ValueError(f"{path} has {len(parts)} parts; more than {_PART_LIMIT} is refused.")
    # A ByteLevel writes characters of two bytes, which a second one makes into two characters. The
    # usual three are a pre-tokenizer, a post-processor and a decoder.
    levels = sum(part["type"] == "ByteLevel" for part in parts)
    growth = prod(_growth(part) for part in parts) << max(0, levels - 3)
    if growth > _GROWTH_LIMIT:
        raise ValueError(
            f"{path} replaces one character by as many as {growth}; "
            f"more than {_GROWTH_LIMIT} is refused."
        )
    for part in parts:
        if part["type"] == "Precompiled":
            _check_character_map(part, path)
        elif part["type"] == "TemplateProcessing":
            _check_template(part, path)
    for part in _typed_parts({"decoder": raw.get("decoder")}):
        if not _is_plain_pattern(part.get("pattern", {"String": "x"})):
            raise ValueError(
                f"{path} decodes by the pattern {printable(part.get('pattern'))}, which may be "
                "slow; only plain strings are decoded."
            )


def is_plain(raw: dict[str, Any]) -> bool:
    """Whether a checked tokenizer.json encodes any text in a time about linear in its length."""
    model = raw.get("model")
    if not isinstance(model, dict) or model.get("type") not in _PLAIN_MODELS:
        return False
    word = model.get("max_input_chars_per_word", 100)
    if type(word) is not int or not 0 <= word <= _WORD_LIMIT:
        return False
    names = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    if any(len(str(model.get(name) or "")) > _SPECIAL_LIMIT for name in names):
        return False
    rows = model.get("vocab")
    if isinstance(rows, list):  # of a Unigram model: [token, score]
        rows = [row[0] if isinstance(row, list) and row else None for row in rows]
        if not all(isinstance(token, str) and len(token) <= _TOKEN_LIMIT for token in rows):
            return False
    return all(
        part["type"] in _PLAIN_PARTS and _is_plain_pattern(part.get("pattern", {"String": "x"}))
        for part in _typed_parts(raw)
    )


def _is_plain_pattern(pattern: Any) -> bool:
    """Whether a pattern is a string, or a regular expression that is linear.

    >>> _is_plain_pattern({"Regex": r"'s| ?[a-z]+|\\s+(?!\\S)|\\s+"})
    True
    >>> _is_plain_pattern({"Regex": "(a|a)*b"})
    False
    """
    if isinstance(pattern, dict) and len(pattern) == 1:
        if isinstance(literal := pattern.get("String"), str):
            return 0 < len(literal) <= _SPECIAL_LIMIT
        if isinstance(expression := pattern.get("Regex"), str) and len(expression) <= 4096:
            branches = _alternatives(expression)
            return len(branches) <= _PART_LIMIT and all(
                branch in _LINEAR or bool(_SEQUENCE.fullmatch(branch)) for branch in branches
            )
    return False


def _alternatives(expression: str) -> list[str]:
    """The parts of a regular expression between the bars outside of groups and classes.

    >>> _alternatives("(?:a|b)|[c|d]|e")
    ['(?:a|b)', '[c|d]', 'e']
    """
    branches, depth, start = [], 0, 0
    for sign in re.finditer(r"\\.|[\[\](){}|]", expression, re.DOTALL):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(sign[0], 0)
        if sign[0] == "|" and depth == 0:
            branches.append(expression[start : sign.start()])
            start = sign.end()
    return [*branches, expression[start:]]


def _check_tokens(raw: dict[str, Any], path: Path) -> None:
    added = raw.get("added_tokens", [])
    if not isinstance(added, list):
        raise ValueError(f"{path} should list its added_tokens, got {type(added).__name__}.")
    model = raw.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    count = len(added) + (len(vocab) if isinstance(vocab, dict | list) else 0)
    if count > LARGEST_VOCABULARY:
        raise ValueError(f"{path} has {count} tokens; more than {LARGEST_VOCABULARY} is refused.")
    total = 0
    for token in added:
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str) or not 0 < len(content) <= _SPECIAL_LIMIT:
            raise ValueError(
                f"{path} has an added token that is not a string "
                f"of 1 to {_SPECIAL_LIMIT} characters."
            )
        total += len(content)
    if total > _SPECIALS_LIMIT:
        raise ValueError(
            f"{path} has added tokens of {total} characters; more than {_SPECIALS_LIMIT} is "
            "refused."
        )


def _growth(part: dict[str, Any]) -> int:
    """The most characters that a part makes from one."""
    if part["type"] == "Prepend":
        return 1 + len(str(part.get("prepend", "")))
    if part["type"] != "Replace":
        return 1
    size = len(str(part.get("content", "")))
    pattern = part.get("pattern")
    literal = isinstance(pattern, dict) and bool(pattern.get("String"))
    return max(1, size if literal else 1 + size)  # an empty match inserts text


def _check_character_map(part: dict[str, Any], path: Path) -> None:
    """Refuse long replacements: after a trie, whose size comes first, they end with a zero byte."""
    try:
        data = base64.b64decode(part.get("precompiled_charsmap") or "", validate=True)
    except (TypeError, ValueError):
        raise ValueError(f"{path} has a precompiled_charsmap that is not base64.") from None
    trie = int.from_bytes(data[:4], "little")
    if len(data) < 4 or trie > len(data) - 4:
        raise ValueError(f"{path} has a precompiled_charsmap that is not whole.")
    if (longest := max(map(len, data[4 + trie :].split(b"\0")))) > _MAP_LIMIT:
        raise ValueError(
            f"{path} replaces one character by as many as {longest} bytes; "
            f"more than {_MAP_LIMIT} is refused."
        )


def _check_template(part: dict[str, Any], path: Path) -> None:
    specials = part.get("special_tokens")
    values = specials.values() if isinstance(specials, dict) else ()
    ids = [one.get("ids") for one in values if isinstance(one, dict)]
    lists = (part.get("single"), part.get("pair"), *ids)
    size = sum(len(one) for one in lists if isinstance(one, list | str))
    if size > _TEMPLATE_LIMIT:
        raise ValueError(
            f"{path} has a template of {size} tokens; more than {_TEMPLATE_LIMIT} is refused."
        )


def _typed_parts(raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    pending: list[Any] = [v for k, v in raw.items() if k not in ("model", "added_tokens")]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if isinstance(value.get("type"), str):
                yield value
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
