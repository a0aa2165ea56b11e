"""Token ids to text while they arrive.

A character of several bytes may be split between tokens, and a token's text may depend on the
one before it, so a token cannot be decoded alone. What is decoded is held back while it ends
in half a character.
"""

from tokenizers import Tokenizer

HALF = "\ufffd"


class Spelling:
    """Feed ids one by one; text comes out as soon as it is certain."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.given = 0

    def add(self, token: int) -> str:
        """The text that this token completes, perhaps none."""
        self.ids.append(token)
        text = self._text()
        if text.endswith(HALF):
            return ""
        return self._hand_out(text)

    def rest(self) -> str:
        """What was held back to the end, half characters included."""
        return self._hand_out(self._text())

    def _text(self) -> str:
        return str(self.tokenizer.decode(self.ids, skip_special_tokens=True))

    def _hand_out(self, text: str) -> str:
        new, self.given = text[self.given :], len(text)
        if text.endswith("\n") or len(self.ids) > 64:  # keep the work a token needs bounded
            self.ids, self.given = self.ids[-1:], len(str(self.tokenizer.decode(self.ids[-1:])))
        return new
