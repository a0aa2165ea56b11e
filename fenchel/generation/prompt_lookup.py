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
the same generator it is the text, of decoding one by one.

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
                return self.ids[start : start + most]
        return []

    def _suffixes(self) -> Iterable[tuple[int, ...]]:
        """The n-grams at the end of the sequence, longest first."""
        for size in range(min(LONGEST, len(self.ids)), 0, -1):
            yield tuple(self.ids[-size:])
