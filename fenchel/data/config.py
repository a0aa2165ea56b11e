"""Settings of a text: its source, its division and its tokenizer.

How large a vocabulary should be depends on the text. The row of a token in the embedding and in the
LM head is learnt from its occurrences alone, so that rare tokens are learnt badly; and with a small
vocabulary a text has more tokens, each with fewer bytes. The number of distinct words in a text of
N bytes grows about as sqrt(N) (Heaps' law), and so does the default,

    V = 2 sqrt(N),

at which the last pair that is merged occurs some 30 to 45 times in 1.6, 4 and 8 MB of text
(docs/log.md has the runs).
"""

import math
from dataclasses import dataclass
from typing import ClassVar

SMALLEST_VOCABULARY = 258
"""256 bytes and two special tokens."""
LARGEST_VOCABULARY = 2**19
"""Twice the largest in use."""
SMALLEST_DEFAULT, LARGEST_DEFAULT = 512, 2**13
"""Bounds of the vocabulary where none is given: beyond the larger one, the LM head of a small model
would take most of its time."""
TOKENIZER_MODELS = ("bpe", "unigram", "characters")
"""How a tokenizer can be trained; the first is the default."""


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The settings from which the token files of a text are made."""

    source: str = "sotu"
    """A built-in text (sotu, kjv), a text file, a folder of them, or a JSON-lines file whose
    objects have a field "text"; compressed by gzip or not."""
    vocabulary: int | None = None
    """The largest size of the trained tokenizer; None is twice the square root of the bytes of the
    text, from 512 to 8192. A given ``tokenizer`` has its own."""
    tokenizer_model: str = "bpe"
    """How the tokenizer is trained: "bpe", "unigram", or "characters", which has no longer tokens.
    """
    tokenizer: str | None = None
    """Path of a tokenizer.json to use instead of a trained one."""
    validation: int = 10
    """k: every k-th document is for validation; of fewer than 2k documents, the last k-th."""
    prepared: str | None = None
    """Folder for token files that runs share; by default inside the run."""

    USES: ClassVar = ()

    def __post_init__(self) -> None:
        for name in ("source", "tokenizer", "prepared"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is empty; name a path or leave the setting out.")
        V = self.vocabulary
        if V is not None and not SMALLEST_VOCABULARY <= V <= LARGEST_VOCABULARY:
            raise ValueError(
                f"vocabulary={V} is outside {SMALLEST_VOCABULARY} (256 bytes and "
                f"two special tokens) to {LARGEST_VOCABULARY}; left out, it follows the text."
            )
        if self.tokenizer_model not in TOKENIZER_MODELS:
            raise ValueError(
                f"tokenizer_model={self.tokenizer_model!r} is none of "
                f"{', '.join(TOKENIZER_MODELS)}."
            )
        if self.validation < 2:
            raise ValueError(
                f"validation={self.validation} would leave nothing to train on; "
                "10 keeps every tenth document for validation."
            )


def vocabulary_for(size: int) -> int:
    """The vocabulary for a text of ``size`` bytes where none is given, a multiple of 64.

    >>> [vocabulary_for(size) for size in (10_000, 1_000_000, 8_000_000, 10**9)]
    [512, 1984, 5632, 8192]
    """
    return min(max(SMALLEST_DEFAULT, math.isqrt(4 * size) // 64 * 64), LARGEST_DEFAULT)
