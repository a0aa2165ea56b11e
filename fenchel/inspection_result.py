"""The result of an inspection as plain values: numbers, words and lists that JSON can hold.

A number that was computed exactly (to rounding) stands alone. One that was approached from both
sides is an ``Interval``; ``Method`` says what its ends promise. One number per row is summarised
by its ``Quantiles``. Layers and heads count from 1, tokens from 0.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any


@dataclass(frozen=True)
class Interval:
    """lower <= sigma <= upper."""

    lower: float
    """Attained by a known direction."""
    upper: float
    """Exceeded with probability ``Method.failure`` at the most."""
    iterations: int
    """Pairs of products spent."""


@dataclass(frozen=True)
class Quantiles:
    """Quantiles and mean of one number per row."""

    least: float
    low: float
    """5 % of the rows are below."""
    median: float
    high: float
    """5 % of the rows are above."""
    most: float
    mean: float


@dataclass(frozen=True, kw_only=True)
class Head:
    """One head on one text; p are its weights, z its scores times beta."""

    layer: int
    head: int
    entropy: Quantiles
    """-sum_j p_j log p_j, in nats."""
    effective: Quantiles
    """exp(entropy): how many keys a row uses, as if evenly."""
    support: Quantiles
    """How many keys have any weight."""
    sensitivity: Quantiles
    """Largest eigenvalue of the derivative of the weights in the scores, exact."""
    max_logit: Quantiles
    """max_j |z_j| over the keys that are open."""
    margin: Quantiles
    """Best score less the second, prior included; rows with one open key are left out."""
    first: float
    """Mean weight on the first token: the usual sink."""
    itself: float
    """Mean weight on the token itself."""
    distance: float
    """Mean distance from a query to its keys, in tokens, by weight."""
    not_taken: float = 0.0
    """Mean mass that no token gets: the weight of a sink, and 1 - g under an output gate g."""
    alpha: float | None = None
    """The exponent of entmax, which a head may have learned; None under another map."""
    column: float
    """The largest column sum of the weights: |P|_2 is at most its root."""
    column_token: int
    """Which token that column is."""
    nearest_head: int | None
    """The most similar other head of the layer; None if the layer has one head."""
    similarity: float
    """Similarity to that head: mean over rows of sum_j sqrt(p_j p'_j), 1 if equal."""
    sigma: dict[str, Interval]
    """|d o / d (q)|, (k), (v) and (qkv) in the spectral norm."""
    top: list[float]
    """Lower bounds of the four largest singular values behind sigma["qkv"]."""
    dominant: str
    """Which of "query", "key" and "mixing" moves the outputs most."""
    bound: float
    """A sure upper bound of sigma["qkv"], by the covariance bound."""
    rows: dict[str, list[float]]
    """The numbers of every row behind the spreads."""


@dataclass(frozen=True, kw_only=True)
class NormGain:
    """How much a norm layer magnifies: 1/s, s the root mean square of what it divides by."""

    name: str
    least: float
    median: float
    most: float
    upper: float
    """max|gamma| / s, which no token's gain exceeds."""


@dataclass(frozen=True, kw_only=True)
class BlockResult:
    """One block, stream to stream."""

    layer: int
    norms: list[NormGain]
    attention: Interval | None
    """Spectral norm of the derivative of attention in its own input, behind the norm in front of
    it; None where it is not apart."""
    mlp: Interval | None
    """The same of the MLP."""
    block: Interval
    """Spectral norm of the block's derivative, between token matrices."""
    top: list[float]
    """Lower bounds of its four largest singular values."""
    token: Interval
    """The norm of it for max_i |x_i|; its upper end, sqrt(T) times that of ``block``, is loose."""
    update: float
    """|x_after - x_before| / |x_before|."""
    moved_by: list[float]
    """Share of each input token in the top right singular vector."""
    shown_at: list[float]
    """Share of each output token in the top left singular vector."""


@dataclass(frozen=True, kw_only=True)
class Influence:
    """How far a change at each input token moves a span of output tokens, in Frobenius norm."""

    spans: list[tuple[int, int]]
    """Output tokens [first, end) of every row."""
    values: list[list[float]]
    """(spans, T): the root of the sum over the span of |J_ij|_F^2, estimated by one draw."""
    draws: int
    """Draws of the last row, for the error."""
    error: float
    """Relative standard error of an entry, measured on the last row."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """All blocks together."""

    stream: Interval
    """Spectral norm of the derivative of x_L in x_0."""
    logits: Interval | None
    """The same for the logits of the last token."""
    exponent: float
    """log(stream.lower) / L: the finite-time Lyapunov exponent of one layer."""
    blocks_exponent: float | None
    """sum of log(block.lower) / L, which would be the exponent if top directions lined up."""
    growth: list[float]
    """log of how much each block stretches the direction that grows most over all of them."""
    influence: Influence


@dataclass(frozen=True, kw_only=True)
class Precision:
    """What finite precision does, measured on this text."""

    again: float
    """Relative difference of the largest head sigma measured again in float64."""
    again_head: tuple[int, int]
    rounded: str
    """The coarser numbers tried: weights and the stream between blocks."""
    stream: list[float]
    """Relative error of the stream after each block under that rounding."""
    logits: float | None
    """Largest change of a last-token logit."""
    divergence: float | None
    """KL of the law of the next token, or of the last one in an encoder, exact against rounded, in
    nats."""
    statement: str


@dataclass(frozen=True, kw_only=True)
class HeadCertificate:
    """One head with its rows of W_O, in a ball about the input of its layer's attention."""

    head: int
    centre: Interval
    """Spectral norm of its Jacobian at the input itself."""
    upper: float | None
    """Exceeded nowhere in the ball; None where no finite bound is known."""


@dataclass(frozen=True, kw_only=True)
class LayerCertificate:
    """The attention of one layer with W_O, or its whole block, in a ball about its input."""

    layer: int
    refused: str | None = None
    """Why there is no certificate; the other fields then have no content."""
    centre: Interval | None = None
    """Spectral norm of the Jacobian at the input itself."""
    lower: float | None = None
    """Attained at the witness, a point of the ball."""
    upper: float | None = None
    """Exceeded nowhere in the ball, but with probability ``failure``; None if not finite."""
    failure: float = 0.0
    token_norm: float | None = None
    """Mean length of the input tokens, to compare the radius with."""
    moved: list[float] = field(default_factory=list)
    """Share of each token in the squared distance from the input to the witness."""
    heads: list[HeadCertificate] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        """upper / lower."""
        if self.upper is None or not self.lower:
            return None
        return self.upper / self.lower


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """The attention layers or the blocks of a model over balls of one radius."""

    level: str
    """"attention" or "block"."""
    radius: float
    norm: str
    """"fro": all tokens together move by at most the radius; "token": each of them."""
    dtype: str
    layers: list[LayerCertificate]


@dataclass(frozen=True, kw_only=True)
class Certification:
    """Certificates of a model on a text."""

    subject: dict[str, Any]
    text: str
    tokens: list[str]
    device: str
    seed: int
    certificates: Certificates
    seconds: dict[str, float]

    def plain(self) -> dict[str, Any]:
        """As JSON has it: None for what is not finite."""
        return dict(_plain(self, ()))


VACUOUS = 1e-3
"""Share of the attacked radius below which a certified one is called vacuous."""


@dataclass(frozen=True, kw_only=True)
class DecisionRow:
    """The distance from the text to another next token at one position, from both sides."""

    position: int
    token: str
    """The last token read."""
    kept: list[str]
    """The tokens with the largest logits, which must stay so."""
    rival: str
    """The nearest other token, by margin over gradient."""
    margin: float
    """In logits, over the runner-up."""
    certified: float
    """No change of the embeddings within it changes the decision."""
    attacked: float
    """The length of a change that does; infinite where none was found."""
    first_order: float
    """Margin over gradient: no bound."""
    moved: list[float]
    """Share of each token in the squared length of that change."""
    parts: dict[str, float]
    """What the margin lost at the certified radius, by kind of remainder."""
    stages: dict[str, float]
    """The same by stage, such as "block 2 MLP"."""
    searched: bool = True
    """False where a budget ended before a radius was found: ``certified`` is 0."""
    attempted: bool = True
    """False where it ended before an attack was made: ``attacked`` is infinite."""

    @property
    def vacuous(self) -> bool:
        """Whether the certificate says nothing: less than ``VACUOUS`` of the attacked radius."""
        known = self.searched and self.ratio is not None
        return known and self.certified < VACUOUS * self.attacked

    @property
    def loses_most(self) -> str:
        """The stage whose remainders cost the margin most; "" where nothing was certified."""
        return max(self.stages, key=lambda name: self.stages[name], default="")

    @property
    def ratio(self) -> float | None:
        """certified / attacked."""
        return self.certified / self.attacked if 0.0 < self.attacked < math.inf else None


def _spans(positions: Sequence[int]) -> str:
    """
    >>> _spans([1, 2, 3, 7, 9, 10])
    '1 to 3, 7, 9 to 10'
    """
    begins = [t for t in positions if t - 1 not in positions]
    ends = [t for t in positions if t + 1 not in positions]
    pairs = zip(begins, ends, strict=True)
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in pairs)


@dataclass(frozen=True, kw_only=True)
class DecisionCertification:
    """Certified decisions of a model on a text."""

    subject: dict[str, Any]
    text: str
    tokens: list[str]
    norm: str
    """"all": all tokens together move, "token": each of them, "one": the last of each prefix."""
    keep: int
    """How many of the largest logits must stay so."""
    token_norm: float
    """Mean length of an embedding."""
    complete: bool
    """False where the time given ended the search."""
    rows: list[DecisionRow]
    seconds: dict[str, float]

    @property
    def not_reached(self) -> str:
        """What a budget left out, as a sentence without its end; "" where nothing was."""
        left = {
            "no radius was found at": [row.position for row in self.rows if not row.searched],
            "no attack was made at": [row.position for row in self.rows if not row.attempted],
        }
        return ", ".join(f"{what} {_spans(at)}" for what, at in left.items() if at)

    def plain(self) -> dict[str, Any]:
        """As JSON has it, with what follows from each row: None for what is not finite."""
        plain = dict(_plain(self, ()))
        for row, of in zip(plain["rows"], self.rows, strict=True):
            row |= {"ratio": of.ratio, "vacuous": of.vacuous, "loses_most": of.loses_most}
        return plain


@dataclass(frozen=True, kw_only=True)
class SubstitutionRow:
    """How many tokens may be substituted before the next token changes, from both sides."""

    position: int
    token: str
    """The last token read."""
    kept: list[str]
    """The tokens with the largest logits, which must stay so."""
    margin: float
    """In logits, over the runner-up."""
    certified: int
    """No allowed substitution of at most this many tokens changes the decision."""
    attacked: int | None
    """This many do; None where none was found."""
    most: int
    """Tokens up to here that may be substituted at once."""
    read: int
    """Texts that were read to count; those of the attack come on top."""
    allowed: int
    """Texts that may stand here."""
    how: str
    """"exact": ``certified`` is the largest count; "read": all texts up to it were read; "bound":
    by a bound of the margin."""
    witness: dict[str, list[str]]
    """The substitutions of a text that changes the decision: position to (before, after)."""

    @property
    def safe(self) -> bool:
        """Whether no allowed substitution changes the decision."""
        return self.certified == self.most


@dataclass(frozen=True, kw_only=True)
class SubstitutionCertification:
    """Certified substitutions of a model on a text."""

    subject: dict[str, Any]
    text: str
    tokens: list[str]
    alternatives: dict[str, list[str]]
    """Tokens of the text, and what they may become."""
    keep: int
    """How many of the largest logits must stay so."""
    complete: bool
    """False where the time given ended the search."""
    refused: str
    """Why there is no bound beyond texts that were read; "" where none is missing."""
    rows: list[SubstitutionRow]
    seconds: dict[str, float]

    def plain(self) -> dict[str, Any]:
        """As JSON has it, with what follows from each row."""
        plain = dict(_plain(self, ()))
        for row, of in zip(plain["rows"], self.rows, strict=True):
            row["safe"] = of.safe
        return plain


@dataclass(frozen=True, kw_only=True)
class Method:
    """The algorithm and the settings behind every bracket."""

    dtype: str
    device: str
    algorithm: str
    tolerance: float
    """Where the brackets stop early: upper / lower <= 1 + tolerance."""
    iterations: int
    """Where they stop at the latest."""
    failure: float
    """Chance of one upper end being too small, over its random start."""
    seed: int


@dataclass(frozen=True, kw_only=True)
class Maps:
    """Every inspected head's weights on the first tokens, as bytes round(255 sqrt p)."""

    layers: list[int]
    heads: list[int]
    size: int
    data: str
    """base64 of (layer, head, query, key)."""


@dataclass(frozen=True, kw_only=True)
class ScoreParts:
    """One score, less the mean score of its query, as a sum over pairs of parts of two streams."""

    layer: int
    head: int
    query: int
    key: int
    weight: float
    """That of the key in the choice of the query."""
    score: float
    """scale q.k, before a soft cap and without the prior."""
    mean: float
    """sum_j p_j z_j: no choice depends on a shift of all scores, so that is what it stands out
    from."""
    parts: list[str]
    """What the streams are sums of, in the order of the layers."""
    pairs: list[list[float]]
    """(parts of the query, parts of the key); their sum is score - mean."""
    remainder: float
    """score - mean less that sum: rounding."""
    prior: float | None
    """Log-prior of the key less its mean under p; None where the layer has only a mask."""
    softcap: float | None
    sink: float | None = None
    """The weight of a sink, which is no key: the mean is over the others. None without one."""

    @property
    def contrast(self) -> float:
        """score - mean."""
        return self.score - self.mean

    @property
    def above_others(self) -> float:
        """The score less the mean of the other keys: contrast / (1 - weight among the keys)."""
        weight = self.weight / (1.0 - (self.sink or 0.0))
        return self.contrast / (1.0 - weight) if weight < 1.0 else math.nan

    @property
    def by_query(self) -> list[float]:
        """What each part of the query's stream contributes."""
        return [math.fsum(row) for row in self.pairs]

    @property
    def by_key(self) -> list[float]:
        """What each part of the key's stream contributes."""
        return [math.fsum(column) for column in zip(*self.pairs, strict=True)]

    @property
    def size(self) -> float:
        """The sum of the absolute values of all pairs; far above |contrast| they cancel."""
        return math.fsum(abs(x) for row in self.pairs for x in row)

    def largest(self, count: int) -> list[tuple[str, str, float]]:
        """The largest pairs without their signs: part of the query, part of the key, value."""
        cells = [
            (self.parts[c], self.parts[e], x)
            for c, row in enumerate(self.pairs)
            for e, x in enumerate(row)
        ]
        return sorted(cells, key=lambda cell: -abs(cell[2]))[:count]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Everything that ``inspect`` measures."""

    subject: dict[str, Any]
    text: str
    tokens: list[str]
    method: Method
    heads: list[Head]
    layers: list[BlockResult]
    network: Network | None
    precision: Precision | None
    certificates: Certificates | None
    """None without a radius."""
    maps: Maps
    seconds: dict[str, float]
    why: ScoreParts | None = None
    """The parts of one score, where it was named."""

    def plain(self, *, rows: bool = False) -> dict[str, Any]:
        """As JSON has it, without maps: None for what is not finite; ``rows`` of heads if asked."""
        return dict(_plain(self, ("maps",) if rows else ("maps", "rows")))


def _plain(value: Any, without: Collection[str]) -> Any:
    """A value as JSON has it, less the fields of these names."""
    if is_dataclass(value):
        named = ((f.name, getattr(value, f.name)) for f in fields(value))
        return {name: _plain(item, without) for name, item in named if name not in without}
    if isinstance(value, dict):
        return {key: _plain(item, without) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return _numbers(value) or [_plain(item, without) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _numbers(values: Sequence[Any]) -> list[float | None] | None:
    """Floats as JSON has them, in one pass; None for a list of anything else."""
    if set(map(type, values)) != {float}:
        return None
    if all(map(math.isfinite, values)):
        return list(values)
    return [value if math.isfinite(value) else None for value in values]
