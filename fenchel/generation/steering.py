"""What steers one sequence among others: its stream, its choice of keys, a budget per token.

    x_l <- x_l + v_l                        after block l, at every token, the prompt's too
    p ~ u exp(beta z),  log u_j = b         for tokens j of the prompt, in chosen layers and heads

Rows of one step have vectors of their own, zero for a row that is not steered; a zero changes no
bit. Keys and values after block l depend on them, so a row serves a later prompt only if both are
steered alike (``Steering.key``).

**Emphasis.** A prior of b on some tokens multiplies their softmax weights by e^b before they are
normalised; below 0 they are attended to less. ``beta`` is a factor on the scores of the same heads:
below 1 they choose more evenly.

**Budget.** With ``budget`` = kappa an unsteered row reads the same tokens. p0 is its law of the
next token and p1 that of the steered row; the token is drawn from

    p = argmax over p of <p, log p1 - log p0>   subject to   KL(p || p0) <= kappa
      ~ p0 (p1 / p0)^lam,                       lam <= 1 the largest within the budget

which is the definition of attention's weights with the law of the unsteered model as the prior
(choice/kl_budget.py). Temperature, penalties and truncation come after it.

B rows, T new tokens, S keys, H heads, M width of the stream, V vocabulary. KL in nats.
"""

import hashlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fenchel.choice import beta_for_budget
from fenchel.data import AnyTokenizer, TextTokenizer
from fenchel.files import printable
from fenchel.generation.text_stream import Detokenizer
from fenchel.model import ModelConfig

MOST_BIAS, MOST_BETA = 20.0, 100.0
"""Larger ones choose nothing else, or round to one key."""


@dataclass(frozen=True)
class Emphasis:
    """How chosen heads choose: a prior on tokens, and a factor on the scores."""

    tokens: frozenset[int] = frozenset()
    """Positions of the tokens, from 0."""
    bias: float = 1.0
    """log u of these tokens; that of the others is 0."""
    beta: float = 1.0
    layers: frozenset[int] | None = None
    """From 1; None is all."""
    heads: frozenset[int] | None = None
    """From 1, in each of the layers; None is all."""
    texts: tuple[str, ...] = ()
    """Words of the prompt whose tokens are added to ``tokens``, wherever they stand."""

    def found_in(self, tokenizer: AnyTokenizer, ids: Sequence[int]) -> "Emphasis":
        """The same with the positions of ``texts`` in a prompt; raises where one is not there."""
        if not self.texts:
            return self
        text, begins, ends = _spans(tokenizer, ids)
        tokens = set(self.tokens)
        for words in self.texts:
            starts = [match.start() for match in re.finditer(re.escape(words), text)]
            if not words or not starts:
                raise ValueError(f"the prompt has no text {printable(words, 60)!r} to emphasise.")
            for start in starts:
                after = bisect_left(begins, start + len(words))
                tokens.update(range(bisect_right(ends, start), after))
        return replace(self, tokens=frozenset(tokens), texts=())

    def require(self, config: ModelConfig) -> None:
        """Raise where a model has not such layers or heads, or a number is none."""
        for name, numbers, most in (
            ("layer", self.layers, config.layers),
            ("head", self.heads, config.heads),
        ):
            wrong = [n for n in numbers or () if not 1 <= n <= most]
            if wrong:
                raise ValueError(f"there is no {name} {wrong[0]}; the model has 1 to {most}.")
        if not abs(self.bias) <= MOST_BIAS:
            raise ValueError(f"a bias of {self.bias:g} should be -{MOST_BIAS:g} to {MOST_BIAS:g}.")
        if not 0.0 <= self.beta <= MOST_BETA:
            raise ValueError(f"beta={self.beta:g} should be 0 to {MOST_BETA:g}.")


@dataclass(frozen=True, eq=False)
class Steering:
    """What steers a sequence, and how far its laws may move."""

    vectors: Mapping[int, Tensor] = field(default_factory=dict)
    """(M,) by layer, from 1, after which they are added."""
    emphasis: Emphasis | None = None
    budget: float | None = None
    """KL(law || unsteered law) of every token at most, in nats; None is no limit."""

    @cached_property
    def key(self) -> bytes:
        """Equal for sequences whose keys and values are computed alike."""
        digest = hashlib.sha256()
        if (e := self.emphasis) is not None:
            numbers = [None if x is None else sorted(x) for x in (e.tokens, e.layers, e.heads)]
            digest.update(repr((numbers, e.bias, e.beta)).encode())
        for layer, v_M in sorted(self.vectors.items()):
            digest.update(f"{layer}:".encode())
            digest.update(v_M.detach().double().cpu().numpy().tobytes())
        return digest.digest()

    def require(self, config: ModelConfig) -> None:
        """Raise where a model cannot be steered so."""
        for layer, v_M in self.vectors.items():
            if not 1 <= layer <= config.layers or v_M.shape != (config.width,):
                raise ValueError(
                    f"a vector of {tuple(v_M.shape)} after layer {layer} should be of "
                    f"({config.width},) after layer 1 to {config.layers}."
                )
            if not bool(v_M.isfinite().all()):
                raise ValueError(f"the vector after layer {layer} holds nan or inf.")
        if self.emphasis is not None:
            self.emphasis.require(config)
        if self.budget is not None and not self.budget > 0.0:
            raise ValueError(f"a budget of {self.budget:g} nats per token should be above 0.")


def _spans(tokenizer: AnyTokenizer, ids: Sequence[int]) -> tuple[str, list[int], list[int]]:
    """The text of a prompt, and where in it each token begins and ends; neither falls.

    Tokens that are bytes of one character all have the whole of it, and control tokens nothing.
    """
    tokenizer = TextTokenizer.wrap(tokenizer)
    detokenizer, text = Detokenizer(tokenizer), ""
    begins, ends = list[int](), list[int]()
    for token in ids:
        complete = len(ends) == len(begins)  # no byte waits for the rest of its character
        begins.append(len(text))
        text += detokenizer.add(token)
        if len(text) > begins[-1] or (complete and not tokenizer.decode([token])):
            ends += [len(text)] * (len(begins) - len(ends))
    text += detokenizer.flush()
    return text, begins, ends + [len(text)] * (len(begins) - len(ends))


def stacked_vectors(
    rows: Sequence[Steering | None], like: Tensor, repeats: Sequence[int] | None = None
) -> dict[int, Tensor] | None:
    """The vectors of several rows by layer, from 0: (B, M), or (N, M) with ``repeats`` of each.

    In the dtype and on the device of ``like``; None where no row has any.
    """
    layers = {layer for row in rows if row is not None for layer in row.vectors}
    if not layers:
        return None
    tables = {}
    for layer in sorted(layers):
        vectors = [None if row is None else row.vectors.get(layer) for row in rows]
        M = next(len(v_M) for v_M in vectors if v_M is not None)
        table_BM = like.new_zeros(len(rows), M)
        for at, v_M in enumerate(vectors):
            if v_M is not None:
                table_BM[at] = v_M.to(table_BM)
        if repeats is not None:
            counts = torch.tensor(repeats, device=like.device)
            table_BM = table_BM.repeat_interleave(counts, 0)
        tables[layer - 1] = table_BM
    return tables


class EmphasisTable:
    """What emphasis changes in the attention of the rows of one pass."""

    def __init__(self, rows: Sequence[tuple[Steering | None, int]], heads: int) -> None:
        """``rows`` are what steers each of them and how many of its tokens left the cache."""
        self.heads = heads
        self.rows = [
            (steering.emphasis, left)
            for steering, left in rows
            if steering is not None and steering.emphasis is not None
        ]
        self.numbers = [
            at for at, (s, _) in enumerate(rows) if s is not None and s.emphasis is not None
        ]
        self.count = len(rows)

    def scaled(self, layer: int, q_BHTD: Tensor) -> Tensor:
        """Queries whose scores have the factor beta; ``layer`` from 0."""
        factor = torch.ones(self.count, self.heads)
        for at, (emphasis, _) in zip(self.numbers, self.rows, strict=True):
            factor[at] = 1.0 + (emphasis.beta - 1.0) * _chosen(emphasis, layer, self.heads)
        return q_BHTD * factor.view(*factor.shape, 1, 1).to(q_BHTD)

    def bias(self, layer: int, position_BS: Tensor) -> Tensor:
        """log u of keys at these positions, in float32: (B or 1, S) -> (B, H, 1, S)."""
        S = position_BS.shape[-1]
        log_u = torch.zeros(self.count, self.heads, 1, S, device=position_BS.device)
        for at, (emphasis, left) in zip(self.numbers, self.rows, strict=True):
            tokens = torch.tensor([t - left for t in sorted(emphasis.tokens) if t >= left])
            row_S = position_BS[at if len(position_BS) > 1 else 0]
            found_S = torch.isin(row_S, tokens.to(row_S)).to(log_u.dtype)
            chosen_H = _chosen(emphasis, layer, self.heads).to(log_u.device)
            log_u[at, :, 0] = emphasis.bias * chosen_H.unsqueeze(-1) * found_S
        return log_u

    def row(self, at: int) -> "EmphasisTable | None":
        """That of one row; None where it has no emphasis."""
        if at not in self.numbers:
            return None
        one = copy(self)
        one.rows, one.numbers, one.count = [self.rows[self.numbers.index(at)]], [0], 1
        return one


def stacked_emphasis(
    rows: Sequence[tuple[Steering | None, int]], heads: int
) -> EmphasisTable | None:
    """The table of several rows; None where none has an emphasis."""
    table = EmphasisTable(rows, heads)
    return table if table.numbers else None


def _chosen(emphasis: Emphasis, layer: int, heads: int) -> Tensor:
    """1 for the heads of a layer, from 0, that the emphasis is in, else 0: (H,)."""
    if emphasis.layers is not None and layer + 1 not in emphasis.layers:
        return torch.zeros(heads)
    every = emphasis.heads is None
    return torch.tensor([float(every or h + 1 in (emphasis.heads or ())) for h in range(heads)])


def within_budget(steered_BV: Tensor, unsteered_BV: Tensor, kappa_B: Tensor) -> Tensor:
    """Log-probabilities between those of two logits, at most kappa from the second: (B, V).

    >>> steered, unsteered = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    >>> p = within_budget(steered, unsteered, torch.tensor([0.1])).exp()
    >>> p, (p * (p / 0.5).log()).sum()  # 0.88 without a budget
    (tensor([[0.7198, 0.2802]]), tensor(0.1000))
    """
    p0_BV, p1_BV = (z.double().log_softmax(-1) for z in (unsteered_BV, steered_BV))
    gain_BV = torch.where(p0_BV == -torch.inf, 0.0, p1_BV - p0_BV)
    lam_B = beta_for_budget(gain_BV, kappa_B.double(), p0_BV).clamp(max=1.0)
    mixed_BV = p0_BV + lam_B.unsqueeze(-1) * gain_BV
    return mixed_BV.log_softmax(-1).to(steered_BV.dtype)
