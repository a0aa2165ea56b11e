"""Which tokenizer.json of other people is accepted, and which of them may encode in this process.

A tokenizer.json is a model (BPE, Unigram, WordPiece or WordLevel) and parts around it: normalizers,
pre-tokenizers, post-processors, decoders. ``check`` refuses one whose parts could make a short text
very long or a small file very large, in numbers that no tokenizer in use comes near:

    added tokens        of 1 to 256 characters, 2^20 characters in all
    vocabulary          at most ``LARGEST_VOCABULARY``
    tokens of Unigram   1,024 bytes each: they are the depth of a tree that is freed by recursion;
                        2,621,440 bytes that no other token begins with, a node of 330 bytes each
    parts               64, each with a type that is known at its place and no fields of another,
                        by which the library would read it as that other part
    growth              64 characters from one, over all replacements and prefixes together
    character maps      replacements of 256 bytes (a Precompiled normalizer)
    templates           256 tokens

``is_plain`` then decides where it encodes. In this process: patterns that are plain strings or take
a time linear in the text, character maps that no text leads out of. All others encode in a bounded
process of their own (``sandbox``).

A regular expression is linear when each of its alternatives is: one of ``_LINEAR``, or a sequence

    x?  y...  z+  w*...          at most one optional item, required ones, one repeat, optional ones

of single characters and classes. After its repeat nothing can fail, so nothing is tried twice.
"""

import base64
import re
from collections.abc import Iterator
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from fenchel.data.config import LARGEST_VOCABULARY
from fenchel.files import printable

_SPECIAL_LIMIT = 256
_SPECIALS_LIMIT = 2**20
_PART_LIMIT = 64
_GROWTH_LIMIT = 64
_MAP_LIMIT = 256
_TEMPLATE_LIMIT = 256
_TOKEN_LIMIT = 256  # characters of a token; Unigram looks up all its prefixes
_DEPTH_LIMIT = 1024  # bytes of a token of Unigram: about 80 bytes of stack each
_NODE_LIMIT = 5 * 2**19  # the largest in use, of 256,000 tokens, have about a million
_WORD_LIMIT = 256  # characters of a word that WordPiece looks up, in quadratic time

_SLOTS = {
    "normalizer": (
        "normalizers",
        "BertNormalizer ByteLevel Lowercase NFC NFD NFKC NFKD Nmt Precompiled Prepend Replace "
        "Sequence Strip StripAccents",
    ),
    "pre_tokenizer": (
        "pretokenizers",
        "BertPreTokenizer ByteLevel CharDelimiterSplit Digits FixedLength Metaspace Punctuation "
        "Sequence Split UnicodeScripts Whitespace WhitespaceSplit",
    ),
    "post_processor": (
        "processors",
        "BertProcessing ByteLevel RobertaProcessing Sequence TemplateProcessing",
    ),
    "decoder": (
        "decoders",
        "BPEDecoder ByteFallback ByteLevel CTC Fuse Metaspace Replace Sequence Strip WordPiece",
    ),
}
"""Where parts stand: the field with the parts of a Sequence, and the types that are known."""
_OWNERS = {
    "pattern": "Replace Split",
    "content": "Replace Strip",
    "prepend": "Prepend",
    "precompiled_charsmap": "Precompiled",
    "start": "Strip",
    "stop": "Strip",
    **dict.fromkeys(("single", "pair", "special_tokens"), "TemplateProcessing"),
    **{members: "Sequence" for members, _ in _SLOTS.values()},
}
"""Fields that are checked, with the types they belong to."""
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
    placed = list(_parts(raw))
    _require_at_most(_PART_LIMIT, len(placed), path, "has {} parts")
    for slot, part in placed:
        _check_fields(slot, part, path)
    parts = [part for _, part in placed]
    # A ByteLevel writes characters of two bytes, which a second one makes into two characters. The
    # usual three are a pre-tokenizer, a post-processor and a decoder.
    levels = sum(part["type"] == "ByteLevel" for part in parts)
    growth = prod(_growth(part) for part in parts) << max(0, levels - 3)
    _require_at_most(_GROWTH_LIMIT, growth, path, "replaces one character by as many as {}")
    for part in parts:
        if part["type"] == "Precompiled":
            _check_character_map(part, path)
        elif part["type"] == "TemplateProcessing":
            _check_template(part, path)
    for slot, part in placed:
        if slot == "decoder":
            _check_decoder(part, path)


def _require_at_most(limit: int, size: int, path: Path, has: str) -> None:
    """Refuse what is larger than in any tokenizer in use; ``has`` says it, with {} for the size."""
    if size > limit:
        raise ValueError(f"{path} {has.format(size)}; more than {limit} is refused.")


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
        part["type"] != "FixedLength"
        and _is_plain_pattern(part.get("pattern", {"String": "x"}))
        and (part["type"] != "Precompiled" or _is_closed(part))
        for _, part in _parts(raw)
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
    _require_at_most(LARGEST_VOCABULARY, count, path, "has {} tokens")
    if isinstance(vocab, list):  # of a Unigram model: [token, score]
        _check_tree([row[0] for row in vocab if isinstance(row, list) and row], path)
    total = 0
    for token in added:
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str) or not 0 < len(content) <= _SPECIAL_LIMIT:
            raise ValueError(
                f"{path} has an added token that is not a string "
                f"of 1 to {_SPECIAL_LIMIT} characters."
            )
        total += len(content)
    _require_at_most(_SPECIALS_LIMIT, total, path, "has added tokens of {} characters")


def _check_tree(tokens: list[Any], path: Path) -> None:
    """Refuse a tree of prefixes that is too deep or too large."""
    ordered = sorted(t.encode(errors="replace") for t in tokens if isinstance(t, str))
    longest, model = max(map(len, ordered), default=0), "has a Unigram model with"
    _require_at_most(_DEPTH_LIMIT, longest, path, f"{model} a token of {{}} bytes")
    nodes = sum(map(len, ordered))
    if nodes > _NODE_LIMIT:  # or fewer: neighbours in order share the most
        nodes -= sum(_shared(a, b) for a, b in pairwise(ordered))
    _require_at_most(_NODE_LIMIT, nodes, path, f"{model} {{}} prefixes of tokens")


def _shared(a: bytes, b: bytes) -> int:
    """The length of the longest common prefix.

    >>> _shared(b"there", b"then"), _shared(b"a", b"ab")
    (3, 1)
    """
    differ = (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, min(len(a), len(b)))


def _check_fields(slot: str, part: Any, path: Path) -> None:
    """Refuse a part that the library may read as one of another type.

    It tries one type after another where the type is missing, unknown or lacks a field, and takes a
    list for an object.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _SLOTS[slot][1].split():
        raise ValueError(f"{path} has a {slot} of the type {printable(kind)}, which is unknown.")
    for field, owners in _OWNERS.items():
        if field in part and kind not in owners.split():
            raise ValueError(
                f"{path} has a {slot} of the type {kind} with {field!r}, a field of "
                f"{owners.replace(' ', ' and ')}."
            )


def _check_decoder(part: dict[str, Any], path: Path) -> None:
    """Decoding is done in this process, so nothing in it may be slow or panic."""
    if not _is_plain_pattern(part.get("pattern", {"String": "x"})):
        raise ValueError(
            f"{path} decodes by the pattern {printable(part.get('pattern'))}, which may be "
            "slow; only plain strings are decoded."
        )
    if part.get("stop"):  # the library panics on a token with fewer characters
        raise ValueError(
            f"{path} decodes by stripping {printable(part['stop'])} characters from the end, which "
            "fails on shorter tokens."
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
    """Refuse long replacements.

    The size of a trie comes first, then its units of 32 bits, then replacements that end with a
    zero byte.
    """
    try:
        data = base64.b64decode(part.get("precompiled_charsmap") or "", validate=True)
    except (TypeError, ValueError):
        raise ValueError(f"{path} has a precompiled_charsmap that is not base64.") from None
    trie = int.from_bytes(data[:4], "little")
    if not 0 < trie <= len(data) - 4 or trie % 4:
        raise ValueError(f"{path} has a precompiled_charsmap that is not whole.")
    longest = max(map(len, data[4 + trie :].split(b"\0")))
    _require_at_most(_MAP_LIMIT, longest, path, "replaces one character by as many as {} bytes")


def _is_closed(part: dict[str, Any]) -> bool:
    """Whether no text leads out of the trie of a checked character map, where the library panics.

    A unit u at p leads to (p ^ offset(u)) ^ byte for any byte of a text, and where it ends a
    character to its replacement at (p ^ offset(u)). Such an end has the highest bit.
    """
    data = base64.b64decode(part["precompiled_charsmap"])
    trie = int.from_bytes(data[:4], "little")
    units = np.frombuffer(data, "<u4", trie // 4, 4).astype(np.int64)
    inner = np.flatnonzero(units < 2**31)
    bits = units[inner]
    base = inner ^ ((bits >> 10) << ((bits & 512) >> 6))
    if not inner.size or inner[0] > 0 or ((base | 255) >= units.size).any():
        return False
    starts = units[base[(bits >> 8 & 1) == 1]] & (2**31 - 1)
    text = np.frombuffer(data[4 + trie :] + b"\0", np.uint8)
    return bool((starts < text.size).all()) and not ((text[starts] & 0xC0) == 0x80).any()


def _check_template(part: dict[str, Any], path: Path) -> None:
    specials = part.get("special_tokens")
    values = specials.values() if isinstance(specials, dict) else ()
    if not all(isinstance(one, dict) for one in values):
        raise ValueError(f"{path} has a template with a special token that is not an object.")
    ids = [one.get("ids") for one in values]
    lists = (part.get("single"), part.get("pair"), *ids)
    size = sum(len(one) for one in lists if isinstance(one, list | str))
    _require_at_most(_TEMPLATE_LIMIT, size, path, "has a template of {} tokens")


def _parts(raw: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every part and where it stands, those of a Sequence after it."""
    for slot, (members, _) in _SLOTS.items():
        pending: list[Any] = [raw.get(slot)]
        while pending:
            part = pending.pop()
            if part is not None:
                yield slot, part
            if isinstance(part, dict) and isinstance(part.get(members), list):
                pending.extend(part[members])
