"""Settings of a text: its source, its division and its tokenizer."""

from dataclasses import dataclass
from typing import ClassVar

SMALLEST_VOCABULARY = 258
"""256 bytes and two special tokens."""
LARGEST_VOCABULARY = 2**19
"""Twice the largest in use."""
TOKENIZER_MODELS = ("bpe", "unigram", "characters")
"""How a tokenizer can be trained; the first is the default."""


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The settings from which the token files of a text are made."""

    source: str = "sotu"
    """A built-in text (sotu, kjv), a text file, a folder of them, or a JSON-lines file whose
    objects have a field "text"; compressed by gzip or not."""
    vocabulary: int = 4096
    """The largest size of the trained tokenizer; a given ``tokenizer`` has its own."""
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
        if not SMALLEST_VOCABULARY <= self.vocabulary <= LARGEST_VOCABULARY:
            raise ValueError(
                f"vocabulary={self.vocabulary} is outside {SMALLEST_VOCABULARY} (256 bytes and "
                f"two special tokens) to {LARGEST_VOCABULARY}; 4096 suits a few megabytes."
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
