"""checkpoints/safetensors_header.py: a file is what its header says, to the last byte, or it
is refused.
"""

import errno
import json
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fenchel.checkpoints.safetensors_header import (
    TensorEntry,
    printable,
    read_header,
    system_errors,
)
from fenchel.files import Damaged

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [5], "data_offsets": [24, 34]}


def write(path: Path, header: Any, data: int = 34) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_what_safetensors_writes_is_read_as_it_reads_it(file: Path) -> None:
    save_file({"b": torch.zeros(5, dtype=torch.bfloat16), "a": torch.zeros(2, 3)}, file)
    entries = read_header(file)
    assert {name: (e.dtype, e.shape) for name, e in entries.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (5,)),
    }
    assert sum(entry.bytes for entry in entries.values()) == 34


def test_entries_come_in_the_order_in_which_they_lie(file: Path) -> None:
    entries = read_header(write(file, {"b": B, "a": A}))
    assert list(entries) == ["a", "b"]
    assert entries["b"] == TensorEntry("BF16", (5,), 24, 34)


def test_empty_tensors_and_scalars_take_their_place(file: Path) -> None:
    empty = {"dtype": "I64", "shape": [0, 7], "data_offsets": [34, 34]}
    scalar = {"dtype": "F64", "shape": [], "data_offsets": [34, 42]}
    entries = read_header(write(file, {"a": A, "b": B, "e": empty, "s": scalar}, 42))
    assert entries["e"].bytes == 0
    assert entries["s"].bytes == 8


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": A, "b": {**B, "data_offsets": [20, 30]}}, 30, "overlap"),
        ({"a": A, "b": {**B, "data_offsets": [26, 36]}}, 36, "gap"),
        ({"a": A, "b": {**B, "data_offsets": [24, 35]}}, 35, "shape needs 10"),
        ({"a": A, "b": B}, 33, "not whole"),
        ({"a": A, "b": B}, 35, "not whole"),
        ({"a": {**A, "data_offsets": [24, 0]}}, 0, "shape needs 24"),
        ({"a": {**A, "data_offsets": [0, 24, 24]}}, 24, "two data_offsets"),
        ({"a": {**A, "data_offsets": [0, 2**63]}}, 24, "two data_offsets"),
        ({"a": {**A, "data_offsets": [False, 24]}}, 24, "two data_offsets"),
        ({"a": {**A, "shape": [2, -3]}}, 24, "whole numbers"),
        ({"a": {**A, "shape": [2.0, 3]}}, 24, "whole numbers"),
        ({"a": {**A, "shape": [1] * 9 + [6]}}, 24, "at most 8"),
        ({"a": {**A, "shape": [2**40, 2**40]}}, 24, "shape needs"),
        ({"a": {**A, "shape": "23"}}, 24, "whole numbers"),
        ({"a": {**A, "dtype": "F33"}}, 24, "not a known dtype"),
        ({"a": {**A, "dtype": ["F32"]}}, 24, "not a known dtype"),
        ({"a": {**A, "extra": 1}}, 24, "nothing else"),
        ({"a": {"dtype": "F32", "shape": [2, 3]}}, 24, "nothing else"),
        ({"a": [0, 24]}, 24, "nothing else"),
        ({"": A}, 24, "not a plain name"),
        ({"a\x1b[2J": A}, 24, "not a plain name"),
        ({"a" * 513: A}, 24, "not a plain name"),
        ({"__metadata__": {"format": 1}, "a": A}, 24, "__metadata__"),
        ({"__metadata__": [], "a": A}, 24, "__metadata__"),
        (b' {"a": 1}', 24, "begin with"),
        (b"[1, 2]", 24, "begin with"),
        (b'{"a": 1, "a": 1}', 0, "twice"),
        (b'{"a": 1', 0, "not JSON"),
        (b'{"\xff": 1}', 0, "not JSON"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0, "not JSON"),
        (b'{"a":' + b"9" * 10_000 + b"}", 0, "not JSON"),
    ],
)
def test_a_false_header_is_refused(file: Path, header: Any, data: int, says: str) -> None:
    with pytest.raises(Damaged, match=says) as refusal:
        read_header(write(file, header, data))
    assert len(str(refusal.value)) < 400
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize("claim", [0, 1, 3, 2**20, 2**40, 2**63, 2**64 - 1])
def test_a_length_that_the_file_does_not_have_is_refused(file: Path, claim: int) -> None:
    file.write_bytes(claim.to_bytes(8, "little") + b"{}")
    with pytest.raises(Damaged, match=r"not a safetensors file|header"):
        read_header(file)


@pytest.mark.parametrize("size", range(10))
def test_a_file_too_short_for_any_header_is_refused(file: Path, size: int) -> None:
    file.write_bytes(bytes([2, 0, 0, 0, 0, 0, 0, 0, 123, 125])[:size])
    with pytest.raises(Damaged, match="not a safetensors file"):
        read_header(file)


def test_words_of_strangers_are_cut_and_cannot_steer_a_terminal() -> None:
    assert printable("a\nb\x1b[31m") == "a?b?[31m"
    assert printable("x" * 200) == "x" * 80 + "..."


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ENOENT])
def test_an_error_of_the_system_keeps_its_number_through_safetensors(
    tmp_path: Path, number: int
) -> None:
    """Opened by torch, whose words differ from those of safetensors."""
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    words = f"unable to open file <{path}> in read-only mode: {os.strerror(number)} ({number})"
    with pytest.raises(OSError, match=os.strerror(number)) as raised, system_errors(path):
        raise RuntimeError(words)
    assert (raised.value.errno, raised.value.filename) == (number, str(path))


def test_a_real_limit_on_open_files_is_that_error(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, before[1]))
    held = []
    try:
        with suppress(OSError):
            while True:
                held.append(os.open(path, os.O_RDONLY))
        with pytest.raises(OSError, match="Too many open files"), system_errors(path):
            load_file(path)
    finally:
        for handle in held:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_other_complaints_are_damage_and_other_errors_are_themselves(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"no header")
    with pytest.raises(Damaged, match="is not a safetensors file"), system_errors(path):
        load_file(path)
    with pytest.raises(RuntimeError, match="shapes"), system_errors(path):
        raise RuntimeError("shapes do not match (3)")


def test_a_file_of_holes_is_refused(file: Path) -> None:
    """Its header is true, and reading what it claims would take hours."""
    size = 2**40
    text = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + size)
    with pytest.raises(Damaged, match="a file of holes is not read"):
        read_header(file)
