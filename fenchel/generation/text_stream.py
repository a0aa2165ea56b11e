"""Token ids to text while they arrive, up to a stop.

**Detokenizing.** A character of several bytes may be split between tokens, and the text of a token
may depend on the one before it: tokenizers of SentencePiece remove the space before the first word
of a text. So a token cannot be decoded alone, and the first new one not without the prompt. Text is
withheld while it ends in an incomplete character; all pieces joined are what the ids add to the
text of those before them.
``tokenizers.decoders.DecodeStream`` does the same for valid text. It has no way to flush an
incomplete character at the end, and it raises where the ids of a tokenizer with byte fallback are
not valid UTF-8 ("Invalid prefix encountered", tokenizers 0.23), which a model may well produce.

Of the ids before the new ones only the last few are decoded, from the beginning of a character on.
Their text may end with an incomplete character, which new ids complete, or with U+FFFD itself,
which they do not: the bytes of the tokens tell the two apart.

**Stop strings.** A stop string may be split over tokens, and a token may contain more than its end.
Text is released when it certainly precedes any stop string: its longest suffix that begins a stop
string is withheld until the next piece decides. Of several stop strings the one that is complete
first counts, and of those that end at one position the longest; so the result does not depend on
how the text was cut into pieces.
"""

from codecs import getincrementaldecoder
from collections.abc import Sequence

from fenchel.data import AnyTokenizer, TextTokenizer

REPLACEMENT = "\ufffd"
"""What an incomplete character decodes to."""
WINDOW = 8
"""Ids that are decoded again with every new one, those of the prompt included, before the oldest
are dropped."""


class Detokenizer:
    """Ids to text, one by one, without incomplete characters.

    ``before`` are the ids that they follow, whose text is not returned.
    """

    def __init__(self, tokenizer: AnyTokenizer, before: Sequence[int] = ()) -> None:
        self.tokenizer = TextTokenizer.wrap(tokenizer)
        start = max(0, len(before) - WINDOW)
        while start and self._begins_within_character(before[start]):
            start -= 1
        self.ids: list[int] = list(before[start:])
        self.released = self._complete()
        """How many characters of the text of ``ids`` were returned."""

    def add(self, token: int) -> str:
        """The text that this token completes; may be empty."""
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        return "" if text.endswith(REPLACEMENT) else self._release(text)

    def flush(self) -> str:
        """The withheld text, incomplete characters included."""
        return self._release(self.tokenizer.decode(self.ids))

    def _release(self, text: str) -> str:
        new, self.released = text[self.released :], len(text)
        if len(self.ids) > WINDOW:
            last = self.tokenizer.decode(self.ids[-1:])
            if last and REPLACEMENT not in last:  # the text before a whole token no longer changes
                self.ids, self.released = self.ids[-1:], len(last)
        return new

    def _begins_within_character(self, token: int) -> bool:
        data = self.tokenizer.token_bytes(token) or b"a"
        return 0x80 <= data[0] < 0xC0

    def _complete(self) -> int:
        """Characters of the text of ``ids``, without one at its end that is incomplete."""
        text = self.tokenizer.decode(self.ids)
        if not text.endswith(REPLACEMENT):
            return len(text)
        tail = [self.tokenizer.token_bytes(token) or b"" for token in self.ids[-3:]]
        decoder = getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(tail))
        if not (incomplete := decoder.getstate()[0]):
            return len(text)
        if self.tokenizer.fallback_byte(self.ids[-1]) is None:
            return len(text) - 1
        # With byte fallback all bytes before an incomplete character are replaced with it.
        return len(self.tokenizer.decode(self.ids[: -len(incomplete)]))


class StopStrings:
    """Text piece by piece, up to the first stop string.

    >>> strings = StopStrings(["END"])
    >>> strings.add("so it E"), strings.add("NDs")
    ('so it ', '')
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty, and would stop before anything is written.")
        self.stops = tuple(stops)
        self.withheld = ""
        self.stopped = False

    def add(self, piece: str) -> str:
        """The text that this piece releases; empty after a stop string."""
        if self.stopped or not self.stops:
            return "" if self.stopped else piece
        text = self.withheld + piece
        ends = [(text.find(stop) + len(stop), -len(stop)) for stop in self.stops if stop in text]
        if ends:
            end, less = min(ends)
            self.stopped, self.withheld = True, ""
            return text[: end + less]
        cut = len(text) - self._undecided(text)
        self.withheld = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The withheld text, at the end of the stream."""
        text, self.withheld = self.withheld, ""
        return text

    def _undecided(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that begins a stop string."""
        longest = max(map(len, self.stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self.stops):
                return size
        return 0


class TextStream:
    """Ids to text, one by one, up to a stop string; ``before`` as in ``Detokenizer``."""

    def __init__(
        self, tokenizer: AnyTokenizer, stops: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, before)
        self._strings = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._strings.stopped

    def add(self, token: int) -> str:
        """The text that this token releases; may be empty."""
        return self._strings.add(self._detokenizer.add(token))

    def flush(self) -> str:
        """The withheld text, at the end of the stream."""
        return self._strings.add(self._detokenizer.flush()) + self._strings.flush()
