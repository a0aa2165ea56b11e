"""What steers one sequence among others: its stream, its choice of keys, a budget per token.

    x_l <- x_l + v_l                        after block l, at every token, the prompt's too
    p ~ u exp(z),  log u_j = b              for tokens j of the prompt, in chosen layers and heads
    p = choice(beta z)                      with another beta or another map in chosen heads

Rows of one step have vectors of their own, zero for a row that is not steered; a zero changes no
bit. Keys and values after block l depend on them, so a row serves a later prompt only if both are
steered alike (``Steering.key``).

**Emphasis.** A prior of b on some tokens multiplies their softmax weights by e^b before they are
normalised; below 0 they are attended to less.

**Heads.** ``beta`` is a factor on the scores of a head: below 1 it chooses more evenly. Another
map, such as sparsemax, drops keys that softmax keeps.

**Budget.** With ``budget`` = kappa an unsteered row reads the same tokens. p0 is its law of the
next token and p1 that of the steered row; the token is drawn from

    p = argmax over p of <p, log p1 - log p0>   subject to   KL(p || p0) <= kappa
      ~ p0 (p1 / p0)^lam,                       lam <= 1 the largest within the budget

which is the definition of attention's weights with the law of the unsteered model as the prior
(choice/kl_budget.py). Temperature, penalties and truncation come after it. A token that p0 excludes
has no part in p. One that p1 excludes has none at any lam > 0, so that KL(p || p0) is at least
-log p0(the tokens that both have); where this is above kappa, lam is 0 and p is p0.

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
from torch import Tensor, nn

from fenchel.attention import Dense, attend
from fenchel.attention.spec import AttentionCall
from fenchel.choice import Choice, beta_for_budget, by_name
from fenchel.data import AnyTokenizer, TextTokenizer
from fenchel.files import printable
from fenchel.generation.text_stream import Detokenizer
from fenchel.model import ModelConfig
from fenchel.torch_internals import to_float64

MOST_BIAS, MOST_BETA = 20.0, 100.0
"""Larger ones choose nothing else, or round to one key."""
_HEAD = re.compile(r"([1-9][0-9]{0,3})(?:\.([1-9][0-9]{0,3}))?")


@dataclass(frozen=True)
class Emphasis:
    """A prior on tokens, in chosen layers and heads."""

    tokens: frozenset[int] = frozenset()
    """Positions of the tokens, from 0."""
    bias: float = 1.0
    """log u of these tokens; that of the others is 0."""
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


@dataclass(frozen=True)
class HeadChoice:
    """How one head chooses among the keys."""

    beta: float = 1.0
    """A factor on its scores."""
    choice: Choice | None = None
    """Its map; None is the model's."""

    def require(self) -> None:
        """Raise where no head can choose so."""
        if not 0.0 <= self.beta <= MOST_BETA:
            raise ValueError(f"beta={self.beta:g} should be 0 to {MOST_BETA:g}.")
        if self.choice is not None and self.choice.tensors():
            raise ValueError(f"{self.choice} has tensors; one head takes a map with numbers.")


@dataclass(frozen=True, eq=False)
class Steering:
    """What steers a sequence, and how far its laws may move."""

    vectors: Mapping[int, Tensor] = field(default_factory=dict)
    """(M,) by layer, from 1, after which they are added."""
    emphasis: Emphasis | None = None
    budget: float | None = None
    """KL(law || unsteered law) of every token at most, in nats; None is no limit."""
    heads: Mapping[tuple[int, int], HeadChoice] = field(default_factory=dict)
    """By layer and head, both from 1."""

    @cached_property
    def key(self) -> bytes:
        """Equal for sequences whose keys and values are computed alike."""
        digest = hashlib.sha256()
        if (e := self.emphasis) is not None:
            numbers = [None if x is None else sorted(x) for x in (e.tokens, e.layers, e.heads)]
            digest.update(repr((numbers, e.bias)).encode())
        digest.update(repr(sorted(self.heads.items(), key=lambda item: item[0])).encode())
        for layer, v_M in sorted(self.vectors.items()):
            digest.update(f"{layer}:".encode())
            digest.update(to_float64(v_M.detach()).cpu().numpy().tobytes())
        return digest.digest()

    @property
    def changes_attention(self) -> bool:
        """Whether heads choose otherwise than in the model."""
        return self.emphasis is not None or bool(self.heads)

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
        for (layer, head), one in self.heads.items():
            _require_head(layer, head, config)
            one.require()
        if self.budget is not None and not self.budget > 0.0:
            raise ValueError(f"a budget of {self.budget:g} nats per token should be above 0.")


def _require_head(layer: int, head: int, config: ModelConfig) -> None:
    if not (1 <= layer <= config.layers and 1 <= head <= config.heads):
        raise ValueError(
            f"there is no head {layer}.{head}; the model has heads 1 to {config.heads} of layers "
            f"1 to {config.layers}."
        )


def head_choices(
    config: ModelConfig, betas: Mapping[str, float], maps: Mapping[str, str]
) -> dict[tuple[int, int], HeadChoice]:
    """What ``Steering.heads`` holds, from heads by their names.

    "2.1" is head 1 of layer 2, "2" every head of layer 2 and "all" every head; later names replace
    earlier ones. A map has the settings that the model has for it, and entmax the alpha of a fresh
    model where it is learned.

    >>> config = ModelConfig(vocabulary=9, width=32, layers=3, heads=2)
    >>> head_choices(config, {"2": 0.5}, {"2.1": "hard"})
    {(2, 1): HeadChoice(beta=0.5, choice=Hard()), (2, 2): HeadChoice(beta=0.5, choice=None)}
    """
    found: dict[tuple[int, int], HeadChoice] = {}
    for name, beta in betas.items():
        for key in _heads_named(name, config):
            found[key] = replace(found.get(key, HeadChoice()), beta=beta)
    for name, words in maps.items():
        choice = by_name(words, alpha=config.entmax_alpha, beta=config.beta)
        for key in _heads_named(name, config):
            found[key] = replace(found.get(key, HeadChoice()), choice=choice)
    return found


def _heads_named(name: str, config: ModelConfig) -> list[tuple[int, int]]:
    layers, heads = (range(1, n + 1) for n in (config.layers, config.heads))
    if name == "all":
        return [(layer, head) for layer in layers for head in heads]
    if (match := _HEAD.fullmatch(name)) is None:
        shown = printable(name, 40)
        raise ValueError(f"{shown!r} names no head; write 2.1 for head 1 of layer 2, 2, or all.")
    layer = int(match[1])
    chosen = [int(match[2])] if match[2] else list(heads)
    _require_head(layer, chosen[0], config)
    return [(layer, head) for head in chosen]


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


class ChoiceTable:
    """How the heads of the rows of one pass choose, where that is not as in the model."""

    def __init__(self, rows: Sequence[tuple[Steering | None, int]], heads: int) -> None:
        """``rows`` are what steers each of them and how many of its tokens left the cache."""
        self.heads, self.count = heads, len(rows)
        self.rows = {
            at: (steering, left)
            for at, (steering, left) in enumerate(rows)
            if steering is not None and steering.changes_attention
        }

    def scaled(self, layer: int, q_BHTD: Tensor) -> Tensor:
        """Queries whose scores have the factor beta; ``layer`` from 0."""
        factor = torch.ones(self.count, self.heads)
        for at, (steering, _) in self.rows.items():
            for (number, head), one in steering.heads.items():
                if number == layer + 1:
                    factor[at, head - 1] = one.beta
        return q_BHTD * factor.view(*factor.shape, 1, 1).to(q_BHTD)

    def bias(self, layer: int, position_BS: Tensor) -> Tensor:
        """log u of keys at these positions, in float32: (B or 1, S) -> (B, H, 1, S)."""
        S = position_BS.shape[-1]
        log_u = torch.zeros(self.count, self.heads, 1, S, device=position_BS.device)
        for at, (steering, left) in self.rows.items():
            if (emphasis := steering.emphasis) is None:
                continue
            if emphasis.layers is not None and layer + 1 not in emphasis.layers:
                continue
            tokens = torch.tensor([t - left for t in sorted(emphasis.tokens) if t >= left])
            row_S = position_BS[at if len(position_BS) > 1 else 0]
            found_S = torch.isin(row_S, tokens.to(row_S)).to(log_u.dtype)
            every = range(1, self.heads + 1)
            chosen = [h - 1 for h in (every if emphasis.heads is None else emphasis.heads)]
            log_u[at, chosen, 0] = emphasis.bias * found_S
        return log_u

    def applied(self, layer: int, call: AttentionCall, position_BS: Tensor) -> AttentionCall:
        """The call with changed queries and prior, of keys at these positions."""
        q, k, v, spec = call
        before = k.shape[2] - position_BS.shape[-1]  # a sink stands before the keys
        log_u = nn.functional.pad(self.bias(layer, position_BS), (before, 0))
        prior = Dense(log_u) if spec.prior is None else spec.prior + Dense(log_u)
        return AttentionCall(self.scaled(layer, q), k, v, replace(spec, prior=prior))

    def maps(self, layer: int) -> list[tuple[int, int, Choice]]:
        """Rows, heads and the maps that these heads have instead of the model's; all from 0."""
        return [
            (at, head - 1, one.choice)
            for at, (steering, _) in self.rows.items()
            for (number, head), one in steering.heads.items()
            if number == layer + 1 and one.choice is not None
        ]

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        """The attention of a call whose queries and prior are changed already: (B, H, T, E)."""
        (q, k, v, spec), maps = call, self.maps(layer)
        o_BHTE = attend(q, k, v, **spec)
        if not maps:
            return o_BHTE
        (B, H, T, _), (G, S) = q.shape, k.shape[1:3]
        log_u = None
        if spec.prior is not None:
            wide = torch.promote_types(q.dtype, torch.float32)
            log_u = spec.prior.log(T, S, B=B, H=H, device=q.device, dtype=wide)
            log_u = log_u.expand(B, H, -1, -1)
        o_BHTE = o_BHTE.clone()
        for at, head, choice in maps:
            row, one, group = slice(at, at + 1), slice(head, head + 1), head * G // H
            prior = None if log_u is None else Dense(log_u[row, one])
            own = (x[row, group : group + 1] for x in (k, v))
            changed = replace(spec, choice=choice, prior=prior)
            o_BHTE[row, one] = attend(q[row, one], *own, **changed)
        return o_BHTE

    def row(self, at: int) -> "ChoiceTable | None":
        """That of one row; None where it chooses as the model does."""
        if at not in self.rows:
            return None
        one = copy(self)
        one.rows, one.count = {0: self.rows[at]}, 1
        return one


def stacked_choices(rows: Sequence[tuple[Steering | None, int]], heads: int) -> ChoiceTable | None:
    """The table of several rows; None where all choose as the model does."""
    table = ChoiceTable(rows, heads)
    return table if table.rows else None


def within_budget(steered_BV: Tensor, unsteered_BV: Tensor, kappa_B: Tensor) -> Tensor:
    """Log-probabilities between those of two logits, at most kappa from the second: (B, V).

    >>> steered, unsteered = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    >>> p = within_budget(steered, unsteered, torch.tensor([0.1])).exp()
    >>> p, (p * (p / 0.5).log()).sum()  # 0.88 without a budget
    (tensor([[0.7198, 0.2802]]), tensor(0.1000))
    """
    p0_BV, p1_BV = (to_float64(z).log_softmax(-1) for z in (unsteered_BV, steered_BV))
    excluded_BV = (p0_BV == -torch.inf) | (p1_BV == -torch.inf)
    lost_B = p0_BV.exp().where(excluded_BV, 0.0).sum(-1)
    # KL(p || p0) is that to p0 among the tokens that both have, and -log of their share in p0.
    left_B = to_float64(kappa_B) + torch.log1p(-lost_B.clamp(max=1.0))
    gain_BV = (p1_BV - p0_BV).masked_fill(excluded_BV, -torch.inf)
    lam_B = beta_for_budget(gain_BV, left_B.clamp(min=0.0), p0_BV).clamp(max=1.0)
    moved_BV = (p0_BV + lam_B.unsqueeze(-1) * gain_BV).masked_fill(excluded_BV, -torch.inf)
    law_BV = torch.where((left_B < 0.0).unsqueeze(-1), p0_BV, moved_BV).log_softmax(-1)
    wide = torch.promote_types(steered_BV.dtype, torch.float32)
    return law_BV.to(wide).to(steered_BV.device)


def aim_below(kappa_B: Tensor) -> Tensor:
    """The budgets that laws aim at, so that their rounding in float32 stays within kappa.

    Every way of decoding aims there, so that they draw from the same laws.
    """
    return (kappa_B * (1.0 - 1e-4) - 2e-6).clamp(min=0.0)
