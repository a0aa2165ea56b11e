"""Token ids to text while they arrive.

A character of several bytes may be split between tokens, and a token's text may depend on the
one before it, so a token cannot be decoded alone. What is decoded is held back while it ends
in half a character; what was handed out, taken together, is the text of all ids at once.

When to stop: at a token, or at a string.

A stop string may be split over tokens, and a token may hold more than its end. Of a text that
arrives in pieces, what is handed out is certain to stand before any stop string: the longest
end of it that begins a stop string is held back until the next piece decides.

Of several stop strings the one that is complete first counts, and of those that end at one
place the longest; so the answer does not depend on how the text was cut into pieces.
"""

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

HALF = "\ufffd"
ENOUGH = 64
"""Ids that are decoded again with every new one, before the oldest are let go."""


class Detokenizer:
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


class StopStrings:
    """Feed text piece by piece; what stands before the first stop string comes out."""

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty, and would stop before anything is written.")
        self.stops = tuple(stops)
        self.held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """The text that this piece makes certain; none after a stop string was found."""
        if self.found:
            return ""
        text = self.held + piece
        ends = [(text.find(stop) + len(stop), -len(stop)) for stop in self.stops if stop in text]
        if ends:
            end, less = min(ends)
            self.found, self.held = True, ""
            return text[: end + less]
        cut = len(text) - self._undecided(text)
        self.held = text[cut:]
        return text[:cut]

    def rest(self) -> str:
        """What was held back when nothing more comes."""
        held, self.held = self.held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = max(map(len, self.stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self.stops):
                return size
        return 0


class TextStream:
    """Ids to text that is certain, up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._spelling = Detokenizer(tokenizer)
        self._strings = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was written."""
        return self._strings.found

    def add(self, token: int) -> str:
        """The text that this token makes certain, perhaps none."""
        return self._strings.add(self._spelling.add(token))

    def rest(self) -> str:
        """What was held back to the end."""
        return self._strings.add(self._spelling.rest()) + self._strings.rest()


class Stops:
    """Which sequences of a batch have stopped, and how long each became.

    ``ids_BT`` are the prompts; only what is new can stop a sequence.
    """

    def __init__(
        self, stop: Sequence[int | str], tokenizer: Tokenizer | None, ids_BT: Tensor
    ) -> None:
        strings = [one for one in stop if isinstance(one, str)]
        numbers = [one for one in stop if not isinstance(one, str)]
        self._tellings: list[TextStream] = []
        if strings:
            if tokenizer is None:
                raise ValueError(f"to stop at {strings[0]!r} give the tokenizer that spells it.")
            self._tellings = [TextStream(tokenizer, strings) for _ in ids_BT]
        self._ids = torch.tensor(numbers, dtype=ids_BT.dtype)
        self.any = bool(stop)
        """Whether anything stops a sequence before its length does."""
        # On the CPU, where strings are compared and the loop asks: a device is asked once a token.
        self._last_B = ids_BT[:, -1].cpu()
        self._stopped_B = torch.zeros_like(self._last_B, dtype=torch.bool)
        self.counts_B = torch.zeros_like(self._last_B)
        """How many tokens each sequence took, the one that stopped it among them."""

    def take(self, token_B: Tensor) -> Tensor:
        """The next token of each sequence; one that has stopped repeats its last."""
        if not self.any:
            self.counts_B += 1
            return token_B
        self.counts_B += ~self._stopped_B
        self._last_B = torch.where(self._stopped_B, self._last_B, token_B.cpu())
        self._stopped_B = self._stopped_B | torch.isin(self._last_B, self._ids)
        for b, telling in enumerate(self._tellings):
            telling.add(int(self._last_B[b]))
            if telling.stopped:
                self._stopped_B[b] = True
        return self._last_B.to(token_B.device)

    def all_stopped(self) -> bool:
        """Whether nobody goes on."""
        return self.any and bool(self._stopped_B.all())
