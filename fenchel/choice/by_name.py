"""A choice map from its name, as settings and commands write it."""

from difflib import get_close_matches

from fenchel.choice.base import Choice
from fenchel.choice.entmax import Entmax, Sparsemax
from fenchel.choice.hard import Hard
from fenchel.choice.softmax import Softmax

NAMES = ("softmax", "entmax", "sparsemax", "hard")


def by_name(name: str, *, alpha: float = 1.5, beta: float = 1.0) -> Choice:
    """The map called ``name``; ``alpha`` is read by "entmax" alone, ``beta`` by all but "hard".

    >>> by_name("entmax", alpha=1.25)
    Entmax(alpha=1.25, beta=1.0)
    """
    if name == "softmax":
        return Softmax(beta)
    if name == "entmax":
        return Entmax(alpha, beta)
    if name == "sparsemax":
        return Sparsemax(beta)
    if name == "hard":
        return Hard()
    near = get_close_matches(name, NAMES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(NAMES)}."
    raise ValueError(f"there is no choice map {name!r}; {hint}")
