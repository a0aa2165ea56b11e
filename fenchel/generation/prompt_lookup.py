"""Prompt lookup: a draft of the next tokens, copied from earlier in the sequence.

Text repeats itself: names, quotations, code. The draft is what followed the last tokens at an
earlier occurrence; the longest match is used, and of equally long ones the most recent.

Checking a draft of n tokens reads n + 1 positions at once, which costs a small model about as
much as reading one, since the weights are loaded once either way. No token depends on a guess:
at each position a token is drawn from the model's own distribution p, and the next position
that was read is used only if the draw is the guess. That is the rejection rule of speculative
sampling for a draft distribution q with all its mass on the guess d: it keeps d with
probability min(1, p_d / q_d) = p_d, and otherwise draws from the positive part of p - q, which
is p without d. Both together are p, draw by draw, so the text has the distribution, and with
the same seed it is the text, of decoding one by one. That holds as far as p is the same
number: reading several positions at once rounds otherwise than reading one. In float32 this is
below any difference that decides; in half precision the two texts may part at a near tie.

A wrong draft costs time: a step that checks one takes about twice as long as a plain step (on one
core of an EPYC, 1.8 to 2.2 times with 15M to 135M parameters, four to five times with 1M), so it
pays if more than one or two of its tokens are right. ``DraftControl`` pauses drafts that are not
accepted. It counts tokens and measures no time, so that the same seed draws the same text.

Leviathan, Kalman and Matias (2023), Fast inference from transformers via speculative decoding.
"""

from collections.abc import Iterable

LONGEST = 3
"""Tokens of a match at most; longer ones seldom decide between two occurrences."""


class PromptLookup:
    """The tokens of a sequence, and what followed its last ones before.

    >>> PromptLookup([5, 6, 7, 5, 6]).guess(2)
    [7, 5]
    """

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        """Where the tokens after the latest occurrence of an n-gram begin."""
        self.add(ids)

    def add(self, ids: Iterable[int]) -> None:
        """Append tokens."""
        for token in ids:
            # An n-gram is entered when the token after it is known, so that none matches itself.
            for ngram in self._suffixes():
                self._after[ngram] = len(self.ids)
            self.ids.append(token)

    def guess(self, most: int) -> list[int]:
        """Up to ``most`` tokens that may come next; empty without a match."""
        for ngram in self._suffixes():
            if (start := self._after.get(ngram)) is not None:
                copied: list[int] = []
                for at in range(start, start + most):
                    known = at < len(self.ids)  # past the end the copy goes on with itself
                    copied.append(self.ids[at] if known else copied[at - len(self.ids)])
                return copied
        return []

    def _suffixes(self) -> Iterable[tuple[int, ...]]:
        """The n-grams at the end of the sequence, longest first."""
        for size in range(min(LONGEST, len(self.ids)), 0, -1):
            yield tuple(self.ids[-size:])


BREAK_EVEN = 2.0
"""Tokens of a draft that must be accepted on average."""
PAUSE, LONGEST_PAUSE = 16, 256
"""Plain steps after drafts that do not pay: the first time, and at most."""


class DraftControl:
    """Whether drafts of up to ``draft`` tokens pay, by how many of their tokens were accepted.

    The mean forgets: a new count enters with weight 1/4. Below ``BREAK_EVEN`` drafts pause, and one
    is tried again after the pause, which doubles each time until a draft is accepted.

    >>> control = DraftControl(8)
    >>> for _ in range(3):
    ...     control.record(0)
    >>> control.ready()
    False
    """

    def __init__(self, draft: int) -> None:
        self._least = min(BREAK_EVEN, 0.75 * draft)  # a draft of one token can only save one
        self._mean, self._pause, self._left = 2.0 * self._least, PAUSE, 0

    def ready(self) -> bool:
        """Whether to guess before the next step; counts the steps of a pause."""
        self._left = max(0, self._left - 1)
        return self._left == 0

    def record(self, accepted: int) -> None:
        """Count a draft of which the first ``accepted`` tokens were right."""
        self._mean += (accepted - self._mean) / 4
        if self._mean >= self._least:
            self._pause = PAUSE
            return
        self._mean, self._left = self._least, self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
