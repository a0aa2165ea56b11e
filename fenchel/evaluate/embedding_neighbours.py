"""Neighbours of a token in the embedding: the rows that point in its direction.

    cosine   <e, f> / (|e| |f|)         between two rows of the embedding, in [-1, 1]
    product  <e, f>                     what a tied LM head adds to the logit of f where the stream
                                        is e; it favours long rows, those of frequent tokens

Rows are compared after the mean row is subtracted, since all rows of a trained embedding share a
large common part that carries no information about a token (``centred=False`` leaves it in). In d
dimensions the cosine of two random directions has mean 0 and standard deviation 1 / sqrt(d),
whatever d is: in 3, 10, 100 and 1000 dimensions |cos| exceeds 0.2 with probability 0.80, 0.56, 0.04
and 0, so ``spread`` is the scale on which a cosine is large or small.

Tokens that occur in the same contexts get the same gradient through the LM head and drift together:
"king" and "queen" in a model of a large text, two words for one thing in a small one.

Mu and Viswanath (2018), All-but-the-top: simple and effective postprocessing for word
representations.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.data import TextTokenizer
from fenchel.model import Transformer


class Neighbour(NamedTuple):
    """A token of the vocabulary, and how near its row lies."""

    token: str
    id: int
    cosine: float
    product: float


class Neighbours(NamedTuple):
    """The nearest tokens, nearest first."""

    rows: list[Neighbour]
    spread: float
    """Standard deviation of the cosine between random directions: 1 / sqrt(d)."""


def nearest_rows(
    table_VE: Tensor, row_E: Tensor, count: int, *, centred: bool = True
) -> tuple[Tensor, Tensor]:
    """(ids, cosines) of the rows nearest to ``row_E`` by cosine, (count,) each.

    >>> table = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [-1.0, 0.0]])
    >>> nearest_rows(table, table[0], 2, centred=False)[0].tolist()
    [0, 1]
    """
    table, row = table_VE.detach().float(), row_E.detach().float()
    if centred:
        mean = table.mean(0)
        table, row = table - mean, row - mean
    unit = torch.nn.functional.normalize(table, dim=-1)
    cosines = unit @ torch.nn.functional.normalize(row, dim=-1)
    top = cosines.topk(min(count, len(cosines)))
    return top.indices, top.values


def neighbours(
    model: Transformer,
    tokenizer: TextTokenizer,
    text: str,
    count: int = 10,
    *,
    centred: bool = True,
) -> Neighbours:
    """The tokens nearest to ``text`` in the embedding of a model, its own tokens left out.

    A text of several tokens is the mean of their rows. In most tokenizers " king" with a space in
    front is one token and "king" another.

    >>> from fenchel.data import train_tokenizer
    >>> from fenchel.model import ModelConfig
    >>> tokenizer = train_tokenizer(["a small text"], 258)
    >>> model = Transformer(ModelConfig(vocabulary=258, width=32, layers=1))
    >>> len(neighbours(model, tokenizer, "a", count=3).rows)
    3
    """
    ids = tokenizer.encode(text)
    if not ids:
        raise ValueError("an empty text has no neighbours; give a word.")
    table = model.embed.weight
    row = table[torch.tensor(ids, device=table.device)].mean(0)
    places, cosines = nearest_rows(table, row, count + len(set(ids)), centred=centred)
    products = (table[places] @ row).tolist()
    pairs = zip(places.tolist(), cosines.tolist(), products, strict=True)
    rows = [
        Neighbour(tokenizer.decode([n]) if n < tokenizer.vocabulary_size else "", n, cosine, dot)
        for n, cosine, dot in pairs
        if n not in ids
    ]
    return Neighbours(rows[:count], table.shape[1] ** -0.5)
