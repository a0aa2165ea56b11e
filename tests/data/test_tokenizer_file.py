"""fenchel/data/tokenizer_file.py and tokenizer_process.py: hostile tokenizers end in a sentence."""

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

from fenchel.data import encode, load_tokenizer, tokenizer_process, tokens, train_tokenizer
from fenchel.data.tokenizer_file import _is_plain_pattern, check, is_plain

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
def load(tmp_path: Path, raw: dict[str, Any]) -> Callable[..., Tokenizer]:
    def loaded(**parts: Any) -> Tokenizer:
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


@settings(deadline=None, max_examples=40)
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
    load: Callable[..., Tokenizer], raw: dict[str, Any]
) -> None:
    parts = sequence(split(r"(?:some|words)+|\w+"))
    loaded = load(pre_tokenizer=parts)
    plain = Tokenizer.from_str(json.dumps(raw | {"pre_tokenizer": parts}))
    assert loaded in tokens._BOUNDED
    for text in ("some words somewords, more", "é中😀 \n", "", "x" * 10_000):
        assert encode(loaded, text) == plain.encode(text, add_special_tokens=False).ids
    child = tokens._BOUNDED[loaded]._child
    del loaded
    gc.collect()
    assert child.poll() is not None  # ends with its tokenizer


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
    parts: dict[str, Any], load: Callable[..., Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_process, "SECONDS", 0.4)
    with pytest.raises(ValueError, match=r"needs more than 0\.4 s"):
        load(**parts)


def test_a_text_that_never_ends_is_refused(
    load: Callable[..., Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_process, "SECONDS", 0.4)
    loaded = load(pre_tokenizer=sequence(split(LATE)))
    assert encode(loaded, "a few words")
    with pytest.raises(ValueError, match=r"needs more than 0\.4 s and a second per 50 kB"):
        encode(loaded, "certificates interchangeable " * 100)


def character_map(longest: int) -> str:
    return base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"x" * longest + b"\0").decode()


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
    parts: dict[str, Any], says: str, load: Callable[..., Tokenizer]
) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        load(**parts)
    assert len(str(caught.value)) < 400


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


def test_a_panic_writes_nothing(
    load: Callable[..., Tokenizer], capfd: pytest.CaptureFixture[str]
) -> None:
    broken = base64.b64encode((8).to_bytes(4, "little") + b"\xff" * 8 + b"x\0").decode()
    normalizer = {"type": "Precompiled", "precompiled_charsmap": broken}
    with pytest.raises(ValueError, match=r"cannot (read|use)"):
        load(normalizer=normalizer)
    assert capfd.readouterr().err == ""


def test_a_template_with_an_id_of_no_token_is_refused(load: Callable[..., Tokenizer]) -> None:
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
        "from fenchel.data.tokenizer_process import EncodingProcess\n"
        "print(len(EncodingProcess(sys.stdin.read(), 'x', ['a']).encode(['abc', 'd'])))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], input=text, capture_output=True, text=True, check=False
    )
    assert (ran.stdout, ran.stderr) == ("2\n", "")


def test_the_child_ends_with_the_error_of_a_file_that_is_none() -> None:
    with pytest.raises(ValueError, match="cannot read x:"):
        tokenizer_process.EncodingProcess("{", "x", ["a"])
    with pytest.raises(ValueError, match="cannot read x:"):
        tokenizer_process.EncodingProcess(Tokenizer(models.BPE()).to_str()[:-5], "x", ["a"])
