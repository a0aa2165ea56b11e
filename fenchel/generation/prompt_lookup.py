"""Guessing what comes next from what was said before.

Text repeats itself: names, quotations, code. The draft is what followed the last tokens when
they stood earlier in the sequence; the longest match counts, and of equals the most recent.

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
"""Tokens that a match may have at the most; longer ones are seldom told apart by more."""


class PromptLookup:
    """Feed ids; ask what came after the last of them the time before."""

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        """Where the tokens that followed a run of tokens begin; the last time counts."""
        self.add(ids)

    def add(self, ids: Iterable[int]) -> None:
        """Read on."""
        for token in ids:
            # What ends here is entered when its follower is known, so that nothing finds itself.
            for run in self._ends():
                self._after[run] = len(self.ids)
            self.ids.append(token)

    def guess(self, most: int) -> list[int]:
        """Up to ``most`` tokens that may come next, perhaps none."""
        for run in self._ends():
            if (start := self._after.get(run)) is not None:
                return self.ids[start : start + most]
        return []

    def _ends(self) -> Iterable[tuple[int, ...]]:
        """The last tokens, longest run first."""
        for size in range(min(LONGEST, len(self.ids)), 0, -1):
            yield tuple(self.ids[-size:])
