"""Documents to the ids that a checkpoint reads, for tuning: how each begins, ends and is scored.

    a text            begin, its tokens, end                     every token but the first is scored
    a conversation    what the chat template makes of it, end    its answers are scored

``begin`` and ``end`` are the control tokens that the template of the tokenizer puts around a text,
and the token that ends a document of this model, unless the template has put it there. That token
ends a conversation too, where the chat template writes no control token after answers. Pieces of a
document that was too long to be read at once are one document again.

Token files (``token_files``) have, beside the ids of all documents of a stream, where each
begins, and for conversations which tokens are scored:

    train_starts.bin    (documents + 1,), as uint64, the last is the number of ids
    train_scored.bin    (N,), 1 at tokens that are to be predicted
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from fenchel.data.chat import ChatTemplate
from fenchel.data.split import Part
from fenchel.data.text import Document
from fenchel.data.tokens import Ids, TextTokenizer
from fenchel.files import Damaged, printable

STARTS, SCORED = np.dtype("<u8"), np.dtype("u1")


class DocumentIds(NamedTuple):
    """The tokens of several documents, one after another.

    >>> two = DocumentIds(np.array([1, 5, 2, 1, 6, 7, 2]), np.array([0, 3, 7]))
    >>> two.ids[two.starts[1] : two.starts[2]]
    array([1, 6, 7, 2])
    """

    ids: Ids
    """(N,), with the tokens that begin and end a document."""
    starts: Ids
    """Where each document begins, and N: (documents + 1,)."""
    scored: Ids | None = None
    """(N,), true at tokens that are to be predicted; None where all are."""

    def targets(self) -> Ids:
        """Places of the tokens that are to be predicted and have a token before them.

        >>> DocumentIds(np.arange(7), np.array([0, 3, 7])).targets()
        array([1, 2, 4, 5, 6])
        """
        N, starts = len(self.ids), self.starts.astype(np.int64)
        mask = np.ones(N, dtype=bool) if self.scored is None else np.array(self.scored, dtype=bool)
        mask[starts[starts < N]] = False
        return np.flatnonzero(mask)

    def split(self, targets: int) -> tuple["DocumentIds", "DocumentIds"]:
        """The documents up to that many targets, and the rest.

        A document that is divided continues in the rest, after the last token of the first part.

        >>> first, rest = DocumentIds(np.arange(7), np.array([0, 3, 7])).split(3)
        >>> first.ids, first.starts, rest.ids, rest.starts
        (array([0, 1, 2, 3, 4]), array([0, 3, 5]), array([4, 5, 6]), array([0, 3]))
        """
        places = self.targets()
        if targets >= len(places):
            return self, DocumentIds(self.ids[:0], self.starts[:1])
        last, starts = int(places[targets - 1]), self.starts.astype(np.int64)
        before, after = np.append(starts[starts <= last], last + 1), starts[starts > last] - last
        first = DocumentIds(self.ids[: last + 1], before)
        rest = DocumentIds(self.ids[last:], np.insert(after, 0, 0))
        if (scored := self.scored) is None:
            return first, rest
        return first._replace(scored=scored[: last + 1]), rest._replace(scored=scored[last:])


class EncodedDocument(NamedTuple):
    """The ids of a document or of a piece of one."""

    ids: list[int]
    scored: list[bool] | None
    bytes: int
    """Of the text that is predicted: all, or the answers of a conversation."""


class DocumentEncoder:
    """Documents to ids by the tokenizer of a checkpoint, or conversations by its chat template.

    >>> from fenchel.data.tokens import train_tokenizer
    >>> tokenizer = train_tokenizer(["aa"], 300).begin_with(0)
    >>> encoder = DocumentEncoder(tokenizer, end=1)
    >>> encoder.begin, encoder.encode([Document("a.txt", "aa")])[0].ids, encoder.end
    ([0], [258], [1])
    """

    def __init__(
        self, tokenizer: TextTokenizer, *, end: int | None, template: ChatTemplate | None = None
    ) -> None:
        """``end`` is the token that ends a document; None if the model knows none."""
        self.tokenizer, self.template = tokenizer, template
        if template is not None:
            template.require_answers()
        self.begin = tokenizer.begin_ids
        letter = tokenizer.encode("a")
        after = tokenizer.encode_whole("a")[len(self.begin) + len(letter) :]
        self.end = after if end is None or end in after else [*after, end]
        self.answer_end = end

    @property
    def tokenizer_json(self) -> bytes:
        """The tokenizer as the token files hold it."""
        return self.tokenizer.to_str(pretty=True).encode()

    @property
    def recipe(self) -> str:
        """What the ids depend on beside the text and the tokenizer."""
        if self.template is None:
            return f"begin {self.begin}, end {self.end}"
        source = hashlib.sha256(self.template.source.encode()).hexdigest()
        return f"template {source}, end {self.answer_end}"

    def encode(self, documents: Sequence[Document]) -> list[EncodedDocument]:
        """The ids of texts without those that begin and end them, or of whole conversations."""
        if self.template is not None:
            return [self._conversation(document) for document in documents]
        texts = [document.text for document in documents]
        rows = self.tokenizer.encode_batch(texts)
        pairs = zip(rows, texts, strict=True)
        return [EncodedDocument(row, None, len(text.encode())) for row, text in pairs]

    def _conversation(self, document: Document) -> EncodedDocument:
        assert self.template is not None
        messages: list[dict[str, str]] = json.loads(document.text)
        try:
            ids, scored = self.template.encode_answers(self.tokenizer, messages, self.answer_end)
        except ValueError as error:  # of which line, a file of many does not show
            raise ValueError(f"{printable(document.name)}: {error}") from None
        answers = (m["content"] for m in messages if m["role"] == "assistant")
        return EncodedDocument(ids, scored, sum(len(answer.encode()) for answer in answers))


class DocumentWriter:
    """Writes the documents of one stream to its files, one after another."""

    def __init__(self, folder: Path, name: str, encoder: DocumentEncoder, dtype: Any) -> None:
        """``name`` is that of the stream, such as "train"."""
        self.encoder, self.dtype = encoder, dtype
        self.documents = self.length = self.bytes = 0
        self._stack = ExitStack()
        open_file = self._stack.enter_context
        self._ids = open_file((folder / f"{name}.bin").open("wb"))
        self._starts = open_file((folder / f"{name}_starts.bin").open("wb"))
        self._scored = None
        if encoder.template is not None:
            self._scored = open_file((folder / f"{name}_scored.bin").open("wb"))

    def write(self, document: EncodedDocument, *, continues: bool) -> None:
        """Append a document, or a further piece of the one before it."""
        self.bytes += document.bytes
        if self._scored is not None:
            self._begin()
            self._scored.write(np.array(document.scored, SCORED).tobytes())
        elif not continues or not self.documents:
            self._end()
            self._begin()
            self._append(self.encoder.begin)
        self._append(document.ids)

    def _begin(self) -> None:
        self._starts.write(np.array([self.length], STARTS).tobytes())
        self.documents += 1

    def _end(self) -> None:
        if self.documents and self._scored is None:
            self._append(self.encoder.end)

    def _append(self, ids: list[int]) -> None:
        self._ids.write(np.array(ids, self.dtype).tobytes())
        self.length += len(ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Ends the last document."""
        if kind is None:
            self._end()
            self._starts.write(np.array([self.length], STARTS).tobytes())
        self._stack.close()


def with_predecessor(parts: Sequence[Part], before: Part | None) -> Iterator[tuple[Part, bool]]:
    """Parts, and whether each continues the part before it in the same stream."""
    for part in parts:
        same = before is not None and before.validation == part.validation
        yield part, part.document.continues and same
        before = part


def map_documents(folder: Path, name: str, ids: Ids, documents: int, scored: bool) -> DocumentIds:
    """The documents of a stream, memory-mapped, after checking the files beside its ids."""
    starts = _map(folder / f"{name}_starts.bin", STARTS, documents + 1)
    ordered = bool((starts[1:] >= starts[:-1]).all())
    if starts[0] != 0 or starts[-1] != len(ids) or not ordered:
        raise Damaged(f"{folder / f'{name}_starts.bin'} does not divide {len(ids)} tokens.")
    mask = _map(folder / f"{name}_scored.bin", SCORED, len(ids)).view(bool) if scored else None
    if mask is not None and mask.view(SCORED).max() > 1:
        raise Damaged(f"{folder / f'{name}_scored.bin'} holds other numbers than 0 and 1.")
    return DocumentIds(ids, starts, mask)


def _map(path: Path, dtype: np.dtype[Any], count: int) -> Ids:
    size = path.stat().st_size if path.is_file() else 0
    if size != count * dtype.itemsize:
        raise Damaged(f"{path} has {size} bytes, {count} of {dtype.itemsize} were expected.")
    return np.memmap(path, dtype, mode="r")
