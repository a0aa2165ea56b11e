"""Division of a text into a training and a validation stream.

With ``every`` = k, documents k, 2k, 3k, ... are for validation, so that both streams sample the
whole text. A text of fewer than 2k documents is divided by length instead: its last k-th is for
validation, cut at a line end where there is one nearby. Conversations are not cut: of n < k the
last is for validation.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fenchel.data.text import Document


class Part(NamedTuple):
    """A document, or a part of one, and its stream."""

    validation: bool
    document: Document


@dataclass(frozen=True)
class Split:
    """The division of a text of ``documents`` documents and ``bytes`` bytes.

    >>> str(Split(every=10, documents=140, bytes=10**6))
    'every 10th of 140 documents is for validation'
    """

    every: int
    documents: int
    bytes: int
    whole: bool = False
    """Whether documents may not be cut."""

    @property
    def by_document(self) -> bool:
        """Whether every k-th document is taken."""
        return self.whole or self.documents >= 2 * self.every

    @property
    def step(self) -> int:
        """k, or the number of documents if there are fewer."""
        return min(self.every, self.documents)

    def __str__(self) -> str:
        if self.by_document:
            return f"every {_ordinal(self.step)} of {self.documents} documents is for validation"
        return f"the last {_ordinal(self.every)} of the text is for validation"

    def parts(self, documents: Iterable[Document]) -> Iterator[Part]:
        """Every document with its stream, in order; the document at the cut becomes two."""
        if self.by_document:
            for number, document in enumerate(documents, start=1):
                yield Part(number % self.step == 0, document)
        else:
            yield from self._parts_by_length(documents)

    def _parts_by_length(self, documents: Iterable[Document]) -> Iterator[Part]:
        left = self.bytes - self.bytes // self.every  # bytes still to train on
        for name, text, continues in documents:
            size = len(text.encode())
            head = text if size <= left else text[: _cut(text, left)]
            left = max(0, left - size)
            if head:
                yield Part(False, Document(name, head, continues))
            if tail := text[len(head) :]:
                yield Part(True, Document(name, tail, continues and not head))


def _cut(text: str, at: int) -> int:
    """The character at or before byte ``at``, moved past a line end if one follows soon."""
    start = len(text.encode()[:at].decode(errors="ignore"))
    line = text.find("\n", start, start + (len(text) - start) // 2) if start else -1
    return start if line < 0 else line + 1


def _ordinal(k: int) -> str:
    ending = "th" if k % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(k % 10, "th")
    return f"{k}{ending}"
