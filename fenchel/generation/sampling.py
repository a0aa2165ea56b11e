"""Logits to the next token.

    z = the logits, changed by what the sequence has already (``Penalties``):
            z_v / r where z_v > 0, z_v r where z_v < 0, for the tokens v of prompt and continuation
            z_v - frequency n_v - presence [n_v > 0],   n_v times that v was generated
            z_v + bias_v
    p = softmax(z / temperature), restricted to the ``top_k`` largest, then to the fewest largest
        whose share reaches ``top_p``, then to those of at least ``min_p`` times the largest;
        one token is drawn from it. Temperature 0 takes the largest z. Of equally
        likely tokens those with smaller ids are preferred.

**Draws.** With independent exponential variables e_v the largest of p_v / e_v belongs to v with
probability p_v, whatever the sum of p. On a CPU e_v = -log(1 - u_v) with uniform u_v in double
precision, so that a seed draws the same token on every CPU.

**Restriction without sorting.** In the order of falling p, of equals by rising id, the tokens that
stay are the first ones, and v is among them if and only if, over the tokens before v,

    sum p_i < top_p sum of all (or of the top_k),    their number < top_k,    and p_v >= min_p max p

So one pass decides about one token. The largest p_v / e_v of all tokens is that of the tokens that
stay if its v stays. If not, all that stay are before v, and the search goes on among those. The
share that is left shrinks as in quickselect: about 1 + log(1 / top_p) rounds, hardly ever more than
two. Sorting (``filter_probabilities``) costs the same as some twenty rounds.

**Rows with settings of their own.** ``draw_rows`` draws on a device without the host: settings are
tensors, and u_v = (philox(seed; v, n) + 1/2) 2^-32 is a function of the row's seed, the number n of
the token and of v (Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3). On a GPU it is
one kernel (kernels/draw_token.py).

Shapes: logits (B, V) -> ids (B,).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

NOT_FINITE = (
    "the largest logit of a row is not finite, so no token can be drawn; "
    "the model's weights are damaged or it has diverged."
)
MOST_BIASED = 300
"""Tokens with a logit bias at most."""
MOST_LOGPROBS = 20
"""Log-probabilities of the likeliest tokens at most."""
_MIN_TEMPERATURE = 1e-30
"""Smaller temperatures would be 0 in float32."""
Generators = torch.Generator | Sequence[torch.Generator] | None
"""One generator for all rows, or one per row."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from the logits."""

    temperature: float = 1.0
    """0 is greedy; below 1 is sharper, above 1 flatter."""
    top_k: int | None = None
    """Keep this many of the likeliest tokens."""
    top_p: float | None = None
    """Keep the fewest tokens whose probabilities reach this sum."""
    min_p: float | None = None
    """Keep tokens at least this likely, relative to the likeliest."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens that the sequence already has less likely; 1 is no penalty."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that were generated; -2 to 2, 0 is no penalty."""
    frequency_penalty: float = 0.0
    """Subtracted once per time that a token was generated; -2 to 2, 0 is no penalty."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token and what is added to its logit, -100 to 100."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} should be 0 (greedy) or above.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} should be at least 1, or left out.")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value <= 1.0:
                raise ValueError(f"{name}={value} should be in (0, 1], or left out.")
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty} should be a finite number "
                "above 0; 1 is no penalty."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise ValueError(f"{name}={getattr(self, name)} should be between -2 and 2.")
        if len(self.logit_bias) > MOST_BIASED:
            raise ValueError(
                f"logit_bias has {len(self.logit_bias):,} tokens; at most {MOST_BIASED} can be set."
            )
        tokens = [token for token, _ in self.logit_bias]
        if len(set(tokens)) != len(tokens) or min(tokens, default=0) < 0:
            raise ValueError("logit_bias should name tokens by ids of 0 or above, each once.")
        for token, value in self.logit_bias:
            if not -100.0 <= value <= 100.0:
                raise ValueError(f"logit_bias of token {token} is {value}; use -100 to 100.")

    @property
    def penalised(self) -> bool:
        """Whether the logits are changed before the draw (``Penalties``)."""
        additive = self.presence_penalty, self.frequency_penalty
        return self.repetition_penalty != 1.0 or any(additive) or bool(self.logit_bias)


class Penalties:
    """Penalties and logit bias of B sequences with the same settings, and the tokens they count.

    >>> sampling = Sampling(temperature=0.0, frequency_penalty=2.0)
    >>> penalties = Penalties(sampling, torch.zeros(1, 3, dtype=torch.bool))
    >>> penalties.add(torch.tensor([1]))
    >>> penalties.apply(torch.tensor([[0.0, 3.0, 2.0]])).tolist()
    [[0.0, 1.0, 2.0]]
    """

    def __init__(self, sampling: Sampling, prompt_BV: Tensor) -> None:
        """``prompt_BV`` is True at the tokens of each prompt."""
        self.sampling, V, device = sampling, prompt_BV.shape[1], prompt_BV.device
        self._previous_BV = self._counts_BV = self._bias_V = None
        if sampling.repetition_penalty != 1.0:
            self._previous_BV = prompt_BV.clone()
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._counts_BV = torch.zeros(prompt_BV.shape, device=device)
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            if max(ids) >= V:
                raise ValueError(
                    f"logit_bias names token {max(ids)}; the vocabulary has {V:,} tokens."
                )
            self._bias_V = torch.zeros(V, device=device)
            self._bias_V[torch.tensor(ids, device=device)] = torch.tensor(values, device=device)

    def apply(self, logits_BV: Tensor) -> Tensor:
        """The logits to draw from, in float32 at least."""
        z_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
        if self._previous_BV is not None:
            r = self.sampling.repetition_penalty
            z_BV = apply_repetition_penalty(z_BV, self._previous_BV, r)
        if self._counts_BV is not None:
            z_BV = z_BV - self.sampling.frequency_penalty * self._counts_BV
            z_BV = z_BV - self.sampling.presence_penalty * (self._counts_BV > 0)
        return z_BV if self._bias_V is None else z_BV + self._bias_V

    def add(self, token_B: Tensor) -> None:
        """Count the tokens that were drawn; -1 marks a row without one."""
        token_B1 = token_B.long().unsqueeze(-1)
        if self._previous_BV is not None:
            self._previous_BV.scatter_(1, token_B1.clamp(min=0), True)
        if self._counts_BV is not None:
            drawn_B1 = (token_B1 >= 0).to(self._counts_BV.dtype)
            self._counts_BV.scatter_add_(1, token_B1.clamp(min=0), drawn_B1)


def apply_repetition_penalty(logits_BV: Tensor, previous_BV: Tensor, penalty: float) -> Tensor:
    """Logits, lowered at previous tokens when ``penalty`` is above 1.

    Keskar et al. (2019), CTRL.
    """
    smaller = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(previous_BV, smaller, logits_BV)


def sample(
    logits_BV: Tensor,
    sampling: Sampling,
    *,
    penalties: Penalties | None = None,
    generator: Generators = None,
) -> Tensor:
    """The next token of each row: (B, V) -> (B,).

    A row draws by its own logits and, where each row has a ``generator``, by that alone.

    >>> sample(torch.tensor([[0.0, 3.0, 1.0]]), Sampling(temperature=0.0)).tolist()
    [1]
    """
    token_B = sample_or_mark(logits_BV, sampling, penalties=penalties, generator=generator)
    if bool((token_B < 0).any()):
        raise ValueError(NOT_FINITE)
    return token_B


def sample_or_mark(
    logits_BV: Tensor,
    sampling: Sampling,
    *,
    penalties: Penalties | None = None,
    generator: Generators = None,
) -> Tensor:
    """``sample`` that marks a row by -1 where the largest logit is not finite.

    On a GPU nothing is copied to the host.
    """
    if penalties is not None:
        logits_BV = penalties.apply(logits_BV)
    if sampling.temperature == 0.0:
        top_B, token_B = logits_BV.max(-1)
        return torch.where(top_B.isfinite(), token_B, -1)
    top_B1 = logits_BV.amax(-1, keepdim=True).float()
    # With the largest at 0 no division overflows, however small the temperature.
    z_BV = (logits_BV.float() - top_B1) / max(sampling.temperature, _MIN_TEMPERATURE)
    token_B = draw(torch.softmax(z_BV, -1), sampling, generator)
    return torch.where(top_B1.squeeze(-1).isfinite(), token_B, -1)


def draw(p_BV: Tensor, sampling: Sampling, generator: Generators = None) -> Tensor:
    """One token per row, drawn from its restricted distribution: (B, V) -> (B,).

    On a GPU the probabilities are sorted: all shapes are fixed, nothing waits for the host, and a
    CUDA graph can record it.
    """
    if p_BV.is_cuda:
        p_BV = filter_probabilities(p_BV, sampling)
        return p_BV.div(exponentials(p_BV, generator)).argmax(-1)
    ratio_BV, V = p_BV / exponentials(p_BV, generator), p_BV.shape[-1]
    k, top_p = min(sampling.top_k or V, V), sampling.top_p or 1.0
    largest_BK = p_BV.topk(k).values if k < V else p_BV
    if k < V:
        ratio_BV *= p_BV >= largest_BK[:, -1:]  # with equals they may be more than k
    if sampling.min_p is not None:
        ratio_BV *= p_BV >= sampling.min_p * p_BV.amax(-1, keepdim=True)
    token_B1 = ratio_BV.argmax(-1, keepdim=True)
    if k == V and top_p == 1.0:
        return token_B1.squeeze(-1)
    limit_B = largest_BK.sum(-1, dtype=torch.float64) * (top_p if top_p < 1.0 else torch.inf)
    # Equals with larger ids are not before v; to leave them in is cheaper and decides most rows.
    at_least_BV = (p_BV >= p_BV.gather(1, token_B1)).scatter_(1, token_B1, False)
    row_R = _full(p_BV, at_least_BV, limit_B, k).nonzero().squeeze(-1)
    p_RV, ratio_RV, token_R1 = p_BV[row_R], ratio_BV[row_R], token_B1[row_R]
    ids_V = torch.arange(V)
    while len(row_R):
        p_R1 = p_RV.gather(1, token_R1)
        before_RV = (p_RV > p_R1) | ((p_RV == p_R1) & (ids_V < token_R1))
        left_R = _full(p_RV, before_RV, limit_B[row_R], k)
        row_R, p_RV = row_R[left_R], p_RV[left_R]
        ratio_RV = ratio_RV[left_R] * before_RV[left_R]
        token_B1[row_R] = token_R1 = ratio_RV.argmax(-1, keepdim=True)
    return token_B1.squeeze(-1)


def _full(p_RV: Tensor, before_RV: Tensor, limit_R: Tensor, k: int) -> Tensor:
    """Whether the tokens of ``before_RV`` reach the limit of top-p or of top-k: (R, V) -> (R,).

    float32 would lose the tail of a large vocabulary, which decides. False at NaN.
    """
    share_R = (p_RV * before_RV).sum(-1, dtype=torch.float64)
    return (share_R >= limit_R) | (before_RV.sum(-1) >= k)


def exponentials(p_BV: Tensor, generator: Generators) -> Tensor:
    """Independent exponential variables of mean 1 in the shape and dtype of p; never 0."""
    # On a CPU torch's exponential_ takes three times as long, and its numbers depend on the CPU.
    dtype = p_BV.dtype if p_BV.is_cuda else torch.float64
    x_BV = torch.empty(p_BV.shape, dtype=dtype, device=p_BV.device)
    if isinstance(generator, torch.Generator | None):
        parts = [(x_BV, generator)]
    else:
        parts = [*zip(x_BV.unbind(), generator, strict=True)]
    for x, own in parts:
        if p_BV.is_cuda:
            x.exponential_(1.0, generator=own)
        else:
            x.uniform_(generator=own)
    if not p_BV.is_cuda:
        x_BV = x_BV.neg_().log1p_().neg_().to(p_BV.dtype)
    return x_BV.clamp_(min=torch.finfo(p_BV.dtype).tiny)


def filter_probabilities(p_BV: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities after top-k, top-p and min-p, renormalised: (B, V) -> (B, V)."""
    if sampling.top_k is None and sampling.top_p is None and sampling.min_p is None:
        return p_BV
    ordered, order = p_BV.sort(dim=-1, descending=True, stable=True)  # of equals, the first ids
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k is not None:
        keep[:, sampling.top_k :] = False
    if sampling.top_p is not None and sampling.top_p < 1.0:
        reached = (ordered * keep).cumsum(-1, dtype=torch.float64)
        keep[:, 1:] &= reached[:, :-1] < sampling.top_p * reached[:, -1:]
    if sampling.min_p is not None:
        keep &= ordered >= sampling.min_p * ordered[:, :1]
    cut = torch.zeros_like(p_BV).scatter(-1, order, ordered * keep)
    return cut / cut.sum(-1, keepdim=True)


class RowSampling(NamedTuple):
    """The settings of B rows as tensors (B,), without penalties and bias."""

    temperature: Tensor
    top_p: Tensor
    """1 keeps all."""
    min_p: Tensor
    """0 keeps all."""
    top_k: Tensor
    """The vocabulary or more keeps all."""
    seed: Tensor

    @classmethod
    def of(cls, rows: Sequence[tuple[Sampling, int]]) -> "RowSampling":
        """From settings and seeds, on the CPU: float32 and int64."""
        everything = torch.iinfo(torch.int32).max
        return cls(
            torch.tensor([s.temperature and max(s.temperature, _MIN_TEMPERATURE) for s, _ in rows]),
            torch.tensor([s.top_p or 1.0 for s, _ in rows]),
            torch.tensor([s.min_p or 0.0 for s, _ in rows]),
            torch.tensor([min(s.top_k or everything, everything) for s, _ in rows]),
            torch.tensor([seed for _, seed in rows], dtype=torch.int64),
        )


def draw_rows(logits_BV: Tensor, settings: RowSampling, n_B: Tensor) -> Tensor:
    """Token n of every row, -1 where its largest logit is not finite: (B, V) -> (B,).

    >>> settings = RowSampling.of([(Sampling(temperature=0.0), 0), (Sampling(top_k=1), 7)])
    >>> draw_rows(torch.tensor([[0.0, 3.0], [2.0, 1.0]]), settings, torch.tensor([5, 9])).tolist()
    [1, 0]
    """
    z_BV, V = logits_BV.float(), logits_BV.shape[-1]
    top_B, greedy_B = z_BV.max(-1)
    T_B1, top_p_B1, min_p_B1, k_B1, _ = (x.unsqueeze(-1) for x in settings)
    score_BV = (z_BV - top_B.unsqueeze(-1)) / torch.where(T_B1 > 0, T_B1, 1.0)
    ordered_BV, order_BV = score_BV.exp().sort(dim=-1, descending=True, stable=True)
    keep_BV = (torch.arange(V, device=z_BV.device) < k_B1) & (ordered_BV >= min_p_B1)
    reached_BV = (ordered_BV * (torch.arange(V, device=z_BV.device) < k_B1)).cumsum(
        -1, dtype=torch.float64
    )
    keep_BV[:, 1:] &= (reached_BV[:, :-1] < top_p_B1 * reached_BV[:, -1:]) | (top_p_B1 >= 1.0)
    stays_BV = torch.zeros_like(keep_BV).scatter_(-1, order_BV, keep_BV)
    key_BV = score_BV - _exponentials_of(settings.seed, n_B, V).log()
    drawn_B = key_BV.where(stays_BV, -torch.inf).argmax(-1)
    token_B = torch.where(settings.temperature > 0, drawn_B, greedy_B)
    return torch.where(top_B.isfinite(), token_B, -1)


def _exponentials_of(seed_B: Tensor, n_B: Tensor, V: int) -> Tensor:
    """e of every token of token number n: (B, V), in float32."""
    low_B1 = (seed_B & _WORD).unsqueeze(-1)
    high_B1 = ((seed_B >> 32) & _WORD).unsqueeze(-1)
    counter_V = torch.arange(V, device=seed_B.device)
    x_BV = philox(counter_V, (n_B & _WORD).unsqueeze(-1), low_B1, high_B1)
    u_BV = ((x_BV.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log1p(-u_BV)


_WORD = 0xFFFFFFFF


def philox(c0: Tensor, c1: Tensor, k0: Tensor, k1: Tensor) -> Tensor:
    """The first of the four words of Philox-4x32-10 at counter (c0, c1, 0, 0) and key (k0, k1).

    Words of 32 bits in int64; the arguments broadcast.
    """
    A, B = 0xD2511F53, 0xCD9E8D57
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(10):
        c0, c1, c2, c3 = (
            _high_word(B, c2) ^ c1 ^ k0,
            (B * c2) & _WORD,
            _high_word(A, c0) ^ c3 ^ k1,
            (A * c0) & _WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0


def _high_word(a: int, b: Tensor) -> Tensor:
    """The upper 32 bits of a product of two words, without overflow."""
    return ((a >> 16) * b + (((a & 0xFFFF) * b) >> 16)) >> 16


class LogProbabilities(NamedTuple):
    """Natural logarithms of the softmax of the raw logits, in float32."""

    chosen: Tensor
    """Those of the tokens that were chosen, (B,)."""
    top_ids: Tensor
    top: Tensor
    """The K likeliest tokens and theirs, (B, K), likeliest first, of equals by rising id."""


def log_probabilities(logits_BV: Tensor, token_B: Tensor, count: int = 0) -> LogProbabilities:
    """Log-probabilities of the tokens and of the ``count`` likeliest, before any setting.

    A token among the likeliest has the same number in both.

    >>> result = log_probabilities(torch.tensor([[0.0, 2.0, 2.0]]), torch.tensor([2]), count=2)
    >>> result.top_ids.tolist(), bool(result.chosen == result.top[:, 1])
    ([[1, 2]], True)
    """
    if not 0 <= count <= MOST_LOGPROBS:
        raise ValueError(f"count={count} log-probabilities should be 0 to {MOST_LOGPROBS}.")
    z_BV = logits_BV.float()
    normaliser_B1 = z_BV.logsumexp(-1, keepdim=True)
    chosen_B1 = z_BV.gather(1, token_B.long().unsqueeze(-1)) - normaliser_B1
    top_BK, ids_BK = z_BV.topk(min(count, z_BV.shape[-1]))
    # torch.topk leaves the order of equals open.
    ids_BK, order_BK = ids_BK.sort(-1)
    top_BK, by_size_BK = top_BK.gather(1, order_BK).sort(dim=-1, descending=True, stable=True)
    ids_BK = ids_BK.gather(1, by_size_BK)
    return LogProbabilities(chosen_B1.squeeze(-1), ids_BK, top_BK - normaliser_B1)
