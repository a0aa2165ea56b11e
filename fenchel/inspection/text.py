"""A text to the ids of one sequence that a subject can read, and to the words for them."""

from typing import NamedTuple

from tokenizers import Tokenizer

from fenchel.data import decode, encode, end_id, open_text
from fenchel.inspection.subject import Subject


class Words(NamedTuple):
    """One sequence."""

    name: str
    """What the text is called."""
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    """What each id spells, alone."""


def words(subject: Subject, source: str, max_tokens: int | None = None) -> Words:
    """The first tokens of a text: all of them, or ``max_tokens`` if it has more.

    A text longer than the subject's context is refused unless ``max_tokens`` cuts it.
    """
    context = subject.context
    if max_tokens is not None and max_tokens < 2:
        raise ValueError(f"max_tokens={max_tokens} should be 2 or more.")
    if max_tokens is not None and context is not None and max_tokens > context:
        raise ValueError(
            f"max_tokens={max_tokens} is more than the {context} tokens that {subject.name} reads."
        )
    limit = context if max_tokens is None else max_tokens
    text = open_text(source)
    ids: list[int] = []
    for document in text.documents():
        ids += subject.encode(document.text, first=not ids)
        if limit is not None and len(ids) > limit:
            break
    if max_tokens is None and limit is not None and len(ids) > limit:
        raise ValueError(
            f"{source} has more tokens than the {limit} that {subject.name} reads; take the first "
            f"ones with --max-tokens {limit}."
        )
    ids = ids[:limit]
    if len(ids) < 2:
        raise ValueError(f"{source} has {len(ids)} tokens; at least 2 are needed to attend.")
    return Words(text.name, tuple(ids), tuple(_spelt(subject.tokenizer, i) for i in ids))


def framed(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text between the control tokens that the tokenizer itself puts around one."""
    encode(tokenizer, text)  # what is no text, or spells a control token, is refused there
    return list(tokenizer.encode(text, add_special_tokens=True).ids)


def after_an_end(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text after an end, as documents follow one another in training."""
    return [end_id(tokenizer), *encode(tokenizer, text)]


def _spelt(tokenizer: Tokenizer, token: int) -> str:
    """The text of one token; a control token by its name, half a character by its bytes."""
    text = decode(tokenizer, [token])
    if text and "\ufffd" not in text:
        return text
    return str(tokenizer.id_to_token(token) or f"[{token}]")
