"""fenchel/data/tokenizer_file.py and sandbox.py: hostile tokenizers end in a sentence."""

import base64
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from fenchel.data import (
    TextTokenizer,
    load_tokenizer,
    sandbox,
    tokenizer_file,
    train_tokenizer,
)
from fenchel.data.tokenizer_file import _is_plain_pattern, check, is_plain

Load = Callable[..., TextTokenizer]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SLOW = r"(?:[^q]|[^q]|[^q]|[^q]|[^q]){9}(?!)"
LATE = r"(?<=\s)(?=\w{11})(?:\w|\w|\w|\w){11}(?!)"  # quick on a short text


@pytest.fixture(scope="module")
def raw() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(train_tokenizer(["some words and more"], 300).to_str())
    return value


@pytest.fixture
def load(tmp_path: Path, raw: dict[str, Any]) -> Load:
    def loaded(**parts: Any) -> TextTokenizer:
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(raw | parts))
        return load_tokenizer(path)

    return loaded


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [*parts, {**BYTES}]}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize("pattern", [GPT2, CL100K, O200K, r" {2,}", r"\n", r"[\n\r\t]", r"\d"])
def test_patterns_in_use_are_plain(pattern: str, raw: dict[str, Any]) -> None:
    assert _is_plain_pattern({"Regex": pattern})
    assert is_plain(raw | {"pre_tokenizer": sequence(split(pattern))})


@pytest.mark.parametrize(
    "pattern",
    [SLOW, LATE, "(a+)+b", r"\w*\w*(?!)", "a?a?aa", "a+b", r"(?:a|b)", ".*", "a{9}", r"a\1", "^a"],
)
def test_patterns_that_may_be_slow_are_not(pattern: str) -> None:
    assert not _is_plain_pattern({"Regex": pattern})
    assert not _is_plain_pattern({"Regex": f"b|{pattern}"})


ITEMS = st.sampled_from([r"\s", r"\S", r"\w", "a", "[ab]", "[^a]", r"\p{L}", " ", "b", "é"])
REPEATS = st.sampled_from(["", "?", "+", "*", "{2,}", "{1,3}"])
BRANCHES = st.lists(st.tuples(ITEMS, REPEATS).map("".join), max_size=5).map("".join)


@settings(max_examples=40)
@given(st.lists(BRANCHES, min_size=1, max_size=4).map("|".join), st.sampled_from("ab é"))
def test_whatever_is_called_plain_is_linear(pattern: str, letter: str) -> None:
    """A run of one character is where a pattern that is not linear takes longest."""
    if not _is_plain_pattern({"Regex": pattern}):
        return
    splitter = pre_tokenizers.Split(Regex(pattern), "isolated")
    started = time.process_time()
    splitter.pre_tokenize_str((letter * 2999 + "\n") * 4)
    assert time.process_time() - started < 2  # cubic would take minutes, and quadratic seconds


def test_a_quick_pattern_of_another_form_encodes_as_in_this_process(
    load: Load, raw: dict[str, Any]
) -> None:
    parts = sequence(split(r"(?:some|words)+|\w+"))
    loaded = load(pre_tokenizer=parts)
    plain = Tokenizer.from_str(json.dumps(raw | {"pre_tokenizer": parts}))
    process = loaded._encoder.process
    assert process is not None
    for text in ("some words somewords, more", "é中😀 \n", "", "x" * 10_000):
        assert loaded.encode(text) == plain.encode(text, add_special_tokens=False).ids
    copies = loaded.begin_with(0), TextTokenizer.wrap(Tokenizer.from_str(loaded.to_str()))
    assert [copy.encode("some words") for copy in copies] == [loaded.encode("some words")] * 2
    assert all(copy._encoder.process is not None for copy in copies)
    ended = process._child._finalizer
    del loaded, process, copies
    gc.collect()
    assert not ended.alive  # the child ends with its tokenizer


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": sequence(*[split(SLOW)] * 60)},
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Replace", "pattern": {"Regex": SLOW}, "content": ""},
                ]
                * 60,
            }
        },
    ],
    ids=["pre-tokenizer", "normalizer"],
)
def test_a_tokenizer_that_never_ends_is_refused(
    parts: dict[str, Any], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.4)
    with pytest.raises(ValueError, match=r"needs more than 0\.4 s"):
        load(**parts)


def test_a_text_that_never_ends_is_refused(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.4)
    loaded = load(pre_tokenizer=sequence(split(LATE)))
    assert loaded.encode("a few words")
    with pytest.raises(ValueError, match=r"needs more than 0\.4 s and a second per 50 kB"):
        loaded.encode("certificates interchangeable " * 100)


def character_map(longest: int) -> str:
    return encoded_map([0] * 256, b"x" * longest + b"\0")


def encoded_map(units: list[int], replacements: bytes) -> str:
    data = (4 * len(units)).to_bytes(4, "little") + b"".join(
        unit.to_bytes(4, "little") for unit in units
    )
    return base64.b64encode(data + replacements).decode()


def map_of(key: str, start: int = 0) -> list[int]:
    """The trie of one key: block i of 256 units holds the steps after i bytes of it."""
    data = key.encode()
    units, at = [256 << 10] + [0] * (256 * (len(data) + 2) - 1), 0
    for i, byte in enumerate(data):
        at = 256 * (i + 1) + byte
        units[at] = byte | (at ^ 256 * (i + 2)) << 10
    units[at] |= 1 << 8
    units[256 * (len(data) + 1)] = 1 << 31 | start
    return units


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 10**6}}, "as many as 1000001"),
        ({"pre_tokenizer": sequence(*[split("a")] * 64)}, "has 67 parts"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 40}},
            f"as many as {2**39}",
        ),
        (
            {
                "normalizer": {
                    "type": "Precompiled",
                    "precompiled_charsmap": character_map(10**6),
                }
            },
            "as many as 1000000 bytes",
        ),
        (
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}] * 2000,
                    "pair": [],
                    "special_tokens": {},
                }
            },
            "template of 2000 tokens",
        ),
        (
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [],
                    "pair": [],
                    "special_tokens": {"a": {"id": "a", "ids": [0] * 9000, "tokens": ["a"] * 9000}},
                }
            },
            "template of 9000 tokens",
        ),
        (
            {"decoder": {"type": "Replace", "pattern": {"Regex": "(a|a)*b"}, "content": "x"}},
            "decodes by the pattern",
        ),
        (
            {"added_tokens": [{"id": i, "content": f"{i:0256}"} for i in range(5000)]},
            "added tokens of 1280000 characters",
        ),
    ],
    ids=["prepend", "parts", "byte levels", "characters", "template", "ids", "decoder", "added"],
)
def test_what_could_grow_without_bound_is_refused(
    parts: dict[str, Any], says: str, load: Load
) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        load(**parts)
    assert len(str(caught.value)) < 400


def replace_a(content: str) -> dict[str, Any]:
    return {"pattern": {"String": "a"}, "content": content}


TEMPLATE = {
    "single": [
        {"SpecialToken": {"id": "x", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
}
LONG = {"id": "x", "ids": [0] * 9000, "tokens": ["a"] * 9000}


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"normalizer": replace_a("b" * 9000)}, "of the type None"),
        ({"normalizer": {"type": 5, **replace_a("b" * 9000)}}, "of the type 5"),
        ({"normalizer": {"type": "Fuse", **replace_a("b" * 9000)}}, "of the type Fuse"),
        ({"normalizer": {"type": ["Replace"], **replace_a("b" * 9000)}}, r"type \['Replace'\]"),
        ({"normalizer": {"type": "BertNormalizer", **replace_a("b" * 9000)}}, "with 'pattern'"),
        ({"normalizer": {"type": "BertNormalizer", "prepend": "b" * 9000}}, "with 'prepend'"),
        ({"normalizer": [{"String": "a"}, "b" * 9000]}, "of the type None"),
        ({"normalizer": ["b" * 9000]}, "of the type None"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [replace_a("b" * 9000)]}},
            "normalizer of the type None",
        ),
        (
            {"post_processor": {"type": "ByteLevel", **TEMPLATE, "special_tokens": {"x": LONG}}},
            "with 'single'",
        ),
        (
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    **TEMPLATE,
                    "special_tokens": {"x": [*LONG.values()]},
                }
            },
            "a special token that is not an object",
        ),
        ({"post_processor": [*TEMPLATE.values(), {"x": LONG}]}, "post_processor of the type None"),
    ],
)
def test_a_part_that_is_read_as_another_is_refused(
    parts: dict[str, Any], says: str, raw: dict[str, Any], load: Load
) -> None:
    """The library accepts each of them, reads it by its fields, and makes a short text long."""
    tokenizer = Tokenizer.from_str(json.dumps(raw | parts))
    assert len(tokenizer.encode("a").ids) > 100 or len(tokenizer.normalizer.normalize_str("a")) > 99
    with pytest.raises(ValueError, match=says):
        load(**parts)


FREED = """
import json, sys, threading
from pathlib import Path
from fenchel.data import load_tokenizer

def load():
    try:
        load_tokenizer(Path(sys.argv[1]), needs_end=False)
    except ValueError as error:
        print(error)

threading.stack_size(2**17)
thread = threading.Thread(target=load)
thread.start()
thread.join()
"""


@pytest.mark.parametrize(("size", "says"), [(1024, ""), (1025, "1025 bytes"), (10**6, "1000000")])
def test_a_long_token_of_a_unigram_model_ends_no_process(
    size: int, says: str, tmp_path: Path
) -> None:
    """Its tree is freed by recursion: a million bytes are more than the stack of a process."""
    path = tmp_path / "tokenizer.json"
    vocab = [["a", 0.0], ["x" * size, -1.0]]
    model = {"type": "Unigram", "unk_id": 0, "vocab": vocab}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    ran = subprocess.run(
        [sys.executable, "-c", FREED, str(path)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0
    assert says in ran.stdout
    assert bool(says) == bool(ran.stdout)


@pytest.mark.parametrize("refused", [False, True])
def test_the_tree_of_a_unigram_model_is_bounded(
    refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a", *("a" * 99 + chr(98 + n % 3) + f"{n:0100}"[::-1] for n in range(30))]
    prefixes = {token[:n] for token in names for n in range(1, len(token) + 1)}
    vocab = [[token, 0.0] for token in names]
    monkeypatch.setattr(tokenizer_file, "_NODE_LIMIT", len(prefixes) - refused)
    raw = {"model": {"type": "Unigram", "unk_id": 0, "vocab": vocab}}
    if refused:
        with pytest.raises(ValueError, match=f"{len(prefixes)} prefixes of tokens; more than"):
            check(raw, tmp_path)
    else:
        check(raw, tmp_path)


def test_a_character_map_is_read(load: Load) -> None:
    charsmap = encoded_map(map_of("ﬁ"), b"fi\0")
    loaded = load(normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap})
    assert loaded._encoder.process is None
    assert loaded.encode("ﬁ") == loaded.encode("fi")


@pytest.mark.parametrize(
    ("units", "replacements"),
    [
        ([0], b"x\0"),  # any byte leads out
        ([0] * 200, b"x\0"),
        ([256 << 10, *[0] * 255], b"x\0"),  # the root leads to a block that is missing
        ([1 << 31, *[0] * 255], b"x\0"),
        (map_of("ﬁ", start=3), b"x\0"),  # a replacement after the last
        (map_of("ﬁ", start=1), "é\0".encode()),  # in the middle of a character
        ([(2**21 - 1) << 10 | 1 << 9, *[0] * 255], b"x\0"),
    ],
)
def test_a_character_map_that_leads_out_of_itself_panics_elsewhere(
    units: list[int],
    replacements: bytes,
    load: Load,
    capfd: pytest.CaptureFixture[str],
) -> None:
    charsmap = encoded_map(units, replacements)
    with pytest.raises(ValueError, match="cannot encode the text"):
        load(normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap}).encode("ﬁ")
    assert capfd.readouterr().err == ""


def test_a_decoder_that_fails_on_short_tokens_is_refused(
    load: Load,
) -> None:
    strip = {"type": "Strip", "content": "a", "start": 1, "stop": 0}
    load(decoder=strip)
    with pytest.raises(ValueError, match="stripping 2 characters from the end"):
        load(decoder={"type": "Sequence", "decoders": [strip | {"stop": 2}]})


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram"])
def test_models_that_are_slow_on_long_words_are_not_plain(kind: str) -> None:
    words = {"type": kind, "vocab": {"a": 0}, "max_input_chars_per_word": 10**9}
    long = {"type": kind, "vocab": [["a" * 5000, 0.0]]}
    assert is_plain({"model": {"type": kind, "vocab": [["a", 0.0]]}})
    assert not is_plain({"model": words})
    assert not is_plain({"model": long})
    assert not is_plain({"model": {"type": kind, "vocab": [5]}})


ANYTHING = [5, 1.5, None, True, "x", [], {}, [[]], [[5, 1]], {"a": []}, {"type": 5}, {"a": {}}]


@pytest.mark.parametrize("value", ANYTHING, ids=repr)
def test_a_value_of_another_type_is_no_error_of_ours(
    value: Any, raw: dict[str, Any], tmp_path: Path
) -> None:
    template = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
    parts: list[dict[str, Any]] = [{"model": raw["model"] | {key: value}} for key in raw["model"]]
    parts += [{"model": raw["model"] | {"max_input_chars_per_word": value}}]
    parts += [{key: value} for key in raw]
    parts += [{"normalizer": {"type": "Precompiled", "precompiled_charsmap": value}}]
    parts += [{"normalizer": {"type": "Replace", "pattern": value, "content": value}}]
    parts += [{"post_processor": template | {key: value}} for key in template]
    parts += [{"post_processor": template | {"special_tokens": {"a": {"ids": value}}}}]
    for part in parts:
        whole = raw | part
        with suppress(ValueError):
            check(whole, tmp_path)
            is_plain(whole)


def test_a_panic_writes_nothing(load: Load, capfd: pytest.CaptureFixture[str]) -> None:
    broken = encoded_map([0] * 256, b"\xff\0")  # is not UTF-8
    normalizer = {"type": "Precompiled", "precompiled_charsmap": broken}
    with pytest.raises(ValueError, match=r"cannot (read|use)"):
        load(normalizer=normalizer)
    assert capfd.readouterr().err == ""


def test_a_template_with_an_id_of_no_token_is_refused(load: Load) -> None:
    template = {"type": "RobertaProcessing", "sep": ["a", 3], "cls": ["b", 900]}
    with pytest.raises(ValueError, match="template with the id 900"):
        load(post_processor={**template, "trim_offsets": True, "add_prefix_space": False})


def test_the_child_serves_where_the_system_limits_time_and_memory(raw: dict[str, Any]) -> None:
    """As under ulimit: a hard limit cannot be raised."""
    text = json.dumps(raw | {"pre_tokenizer": {"type": "FixedLength", "length": 5}})
    program = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (60, 60))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))\n"
        "from fenchel.data.sandbox import EncodingProcess\n"
        "print(len(EncodingProcess(sys.stdin.read(), 'x', ['a']).encode(['abc', 'd'])))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], input=text, capture_output=True, text=True, check=False
    )
    assert (ran.stdout, ran.stderr) == ("2\n", "")


def test_the_child_ends_with_the_error_of_a_file_that_is_none() -> None:
    with pytest.raises(ValueError, match="cannot read x:"):
        sandbox.EncodingProcess("{", "x", ["a"])
    with pytest.raises(ValueError, match="cannot read x:"):
        sandbox.EncodingProcess(Tokenizer(models.BPE()).to_str()[:-5], "x", ["a"])
