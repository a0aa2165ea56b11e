"""Token ids to text while they arrive.

A character of several bytes may be split between tokens, and a token's text may depend on the
one before it, so a token cannot be decoded alone. What is decoded is held back while it ends
in half a character; what was handed out, taken together, is the text of all ids at once.
"""

from tokenizers import Tokenizer

HALF = "\ufffd"
ENOUGH = 64
"""Ids that are decoded again with every new one, before the oldest are let go."""


class Spelling:
    """Feed ids one by one; text comes out as soon as it is certain."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.given = 0
        """How many characters of the text of ``ids`` were handed out."""

    def add(self, token: int) -> str:
        """The text that this token completes, perhaps none."""
        self.ids.append(token)
        text = self._decode(self.ids)
        return "" if text.endswith(HALF) else self._hand_out(text)

    def rest(self) -> str:
        """What was held back to the end, half characters included."""
        return self._hand_out(self._decode(self.ids))

    def _hand_out(self, text: str) -> str:
        new, self.given = text[self.given :], len(text)
        if len(self.ids) > ENOUGH:
            last = self._decode(self.ids[-1:])
            if last and HALF not in last:  # a clean cut: nothing before it can change any more
                self.ids, self.given = self.ids[-1:], len(last)
        return new

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))
