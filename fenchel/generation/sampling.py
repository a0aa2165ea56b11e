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
probability p_v, whatever the sum of p. The numbers are counter-based:

    e_v = -log(1 - u_v),    u_v = (x_v + 1/2) 2^-32,    x_v a function of (seed, n, v)

where n is the position of the token in its sequence, the prompt included (``random_words``). The
integers x_v are the same on every device, in every batch and in every command: a seed draws the
same token wherever the logits are the same, and where they differ by rounding, another only if that
moves the draw across a border.

**Restriction without sorting.** In the order of falling p, of equals by rising id, the tokens that
stay are the first ones, and v is among them if and only if, over the tokens before v,

    sum p_i < top_p sum of all (or of the top_k),    their number < top_k,    and p_v >= min_p max p

So one pass decides about one token. The largest p_v / e_v of all tokens is that of the tokens that
stay if its v stays. If not, all that stay are before v, and the search goes on among those. The
share that is left shrinks as in quickselect: about 1 + log(1 / top_p) rounds, hardly ever more than
two. On a GPU a draw is one kernel (kernels/draw_token.py).

**Budgets.** A row with a budget draws from a law between its own and that of another row, and both
read the token (generation/steering.py).

Shapes: logits (B, V) -> ids (B,).

Steele, Lea and Flood (2014), Fast splittable pseudorandom number generators.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from importlib.util import find_spec
from math import isfinite
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from fenchel.generation.steering import aim_below, within_budget

NOT_FINITE = (
    "the largest logit of a row is not finite, so no token can be drawn; "
    "the model's weights are damaged or it has diverged."
)
MOST_BIASED = 300
"""Tokens with a logit bias at most."""
MOST_LOGPROBS = 20
"""Log-probabilities of the likeliest tokens at most."""
MOST_AHEAD, AHEAD_ENTRIES = 16, 1 << 16
"""Tokens whose random numbers are computed at once for one row, and their numbers, at most."""
_MIN_TEMPERATURE = 1e-30
"""Smaller temperatures would be 0 in float32."""


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


DEFAULTS = Sampling(temperature=0.8, top_p=0.95)
"""How every command draws where neither a flag nor the checkpoint says."""
SETTINGS = ("temperature", "top_k", "top_p", "min_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
"""Settings of a checkpoint that count for greedy decoding too."""


class SuggestedSampling(Protocol):
    """What a checkpoint suggests; temperature 0 suggests no way of sampling."""

    @property
    def temperature(self) -> float:
        """Temperature; the other settings have the names of ``Sampling``."""


def resolve_sampling(
    suggested: SuggestedSampling, given: Mapping[str, Any]
) -> tuple[Sampling, dict[str, Any]]:
    """The ``given`` settings, else what a checkpoint suggests, else ``DEFAULTS``.

    The second value has the settings that are the checkpoint's. A suggestion to decode greedily
    gives no sampling settings; its penalties count all the same.
    """
    names = (*SETTINGS, *PENALTIES) if suggested.temperature else PENALTIES
    theirs = {name: getattr(suggested, name) for name in names if name not in given}
    sampling = replace(DEFAULTS, **theirs, **given)
    changed = {name: one for name, one in theirs.items() if one != getattr(DEFAULTS, name)}
    return sampling, changed


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
            self._bias_V[torch.tensor(ids, device=device)] = torch.tensor(
                values, dtype=torch.float32, device=device
            )

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


class RowSampling(NamedTuple):
    """The settings of B rows as tensors (B,), without penalties and bias."""

    temperature: Tensor
    top_p: Tensor
    """1 keeps all."""
    min_p: Tensor
    """0 keeps all."""
    top_k: Tensor
    """The vocabulary or more keeps all."""
    key: Tensor
    """Of the seed (``seed_key``)."""
    prior: Tensor
    """The row whose law is the prior of a budget, itself where there is none; -1 for such a prior,
    which reads the token of the other."""
    kappa: Tensor
    """KL to the prior at most, in nats; inf where there is none."""

    @classmethod
    def of(
        cls,
        rows: Sequence[tuple[Sampling, int]],
        budgets: Mapping[int, tuple[int, float]] | None = None,
    ) -> "RowSampling":
        """From settings and seeds, on the CPU: float32 and int64.

        ``budgets`` are priors and kappas by row.
        """
        prior_B, kappa_B = torch.arange(len(rows)), torch.full((len(rows),), torch.inf)
        for b, (u, kappa) in (budgets or {}).items():
            prior_B[b], prior_B[u], kappa_B[b] = u, -1, kappa
        everything = torch.iinfo(torch.int32).max
        return cls(
            torch.tensor([s.temperature and max(s.temperature, _MIN_TEMPERATURE) for s, _ in rows]),
            torch.tensor([s.top_p or 1.0 for s, _ in rows]),
            torch.tensor([s.min_p or 0.0 for s, _ in rows]),
            torch.tensor([min(s.top_k or everything, everything) for s, _ in rows]),
            seed_key(torch.tensor([seed for _, seed in rows], dtype=torch.int64)),
            prior_B,
            aim_below(kappa_B),
        )

    def used(self) -> frozenset[str]:
        """The settings that some row has, and "greedy" where a row draws nothing."""
        some = {
            "greedy": self.temperature == 0,
            "temperature": self.temperature > 0,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
            "top_k": self.top_k < torch.iinfo(torch.int32).max,
            "kappa": self.kappa.isfinite(),
        }
        return frozenset(name for name, rows_B in some.items() if rows_B.any())


class RepeatedDraws:
    """What the draws of the same rows have in common at every step: ``used``, and random numbers.

    Of one row of a small vocabulary the numbers take less time than the calls that compute them, so
    they are computed for up to ``MOST_AHEAD`` tokens at once.
    """

    def __init__(self, settings: RowSampling) -> None:
        """``settings`` are on the CPU."""
        self.used = settings.used()
        self._first, self._e_NV = 0, torch.empty(0, 0)

    def exponentials(self, key_B: Tensor, n_B: Tensor, V: int) -> Tensor:
        """e of every token of token number n: (B, V)."""
        ahead = min(MOST_AHEAD, AHEAD_ENTRIES // V)
        if len(key_B) > 1 or ahead < 2:
            return exponentials(key_B, n_B, V)
        n = int(n_B)
        if not 0 <= n - self._first < len(self._e_NV):
            n_N = torch.arange(n, n + ahead, device=n_B.device)
            self._first, self._e_NV = n, exponentials(key_B.expand(ahead), n_N, V)
        return self._e_NV.narrow(0, n - self._first, 1)


def draw(
    logits_BV: Tensor, settings: RowSampling, n_B: Tensor, repeated: RepeatedDraws | None = None
) -> Tensor:
    """Token n of every row, -1 where its largest logit is not finite: (B, V) -> (B,).

    ``repeated`` belongs to these settings.

    >>> settings = RowSampling.of([(Sampling(temperature=0.0), 0), (Sampling(top_k=1), 7)])
    >>> draw(torch.tensor([[0.0, 3.0], [2.0, 1.0]]), settings, torch.tensor([5, 9])).tolist()
    [1, 0]
    """
    if logits_BV.is_cuda and find_spec("triton") is not None:
        from fenchel.kernels.draw_token import draw_token

        token_B, marked_B = torch.empty_like(n_B), torch.empty_like(n_B)
        draw_token(logits_BV, settings, n_B, torch.zeros_like(n_B), token_B, marked_B)
        return marked_B
    if logits_BV.device.type == "mps":  # which has no float64
        there = RowSampling(*(x.cpu() for x in settings))
        return draw(logits_BV.cpu(), there, n_B.cpu(), repeated).to(logits_BV.device)
    used = settings.used() if repeated is None else repeated.used
    if "kappa" in used:
        return _draw_within_budgets(logits_BV, settings, n_B)
    top_B1 = logits_BV.amax(-1, keepdim=True)
    if "temperature" not in used:
        token_B = _argmax(logits_BV)
    else:
        T_B = settings.temperature
        if "greedy" in used:
            T_B = T_B.where(T_B > 0, 1.0)
        # With the largest at 0 no division overflows, however small the temperature.
        p_BV = (logits_BV.float() - top_B1.float()).div_(T_B.unsqueeze(-1)).exp_()
        numbers = exponentials if repeated is None else repeated.exponentials
        e_BV = numbers(settings.key, n_B, p_BV.shape[-1])
        token_B = _draw(p_BV, e_BV, settings, used)
        if "greedy" in used:
            token_B = token_B.where(settings.temperature > 0, _argmax(logits_BV))
    top_B = top_B1.squeeze(-1)
    if all(map(isfinite, top_B.tolist())):
        return token_B
    return token_B.where(top_B.isfinite(), -1)


def likeliest(logits_BV: Tensor) -> list[int]:
    """The token of temperature 0 per row, -1 where its logit is not finite; on the host.

    >>> likeliest(torch.tensor([[0.0, 3.0, 3.0], [0.0, torch.nan, 1.0]]))
    [1, -1]
    """
    z = _as_numpy(logits_BV.cpu())
    tokens = z.argmax(-1).tolist()
    return [v if isfinite(z[b, v]) else -1 for b, v in enumerate(tokens)]


def _argmax(x_BV: Tensor) -> Tensor:
    """The first of the largest entries of each row; numpy takes a fifth of the time of torch."""
    if x_BV.is_cuda:
        return x_BV.argmax(-1)
    return torch.from_numpy(_as_numpy(x_BV).argmax(-1))


def _as_numpy(x: Tensor) -> NDArray[Any]:
    return (x.float() if x.dtype.itemsize < 4 else x).detach().numpy()


def _draw_within_budgets(logits_BV: Tensor, settings: RowSampling, n_B: Tensor) -> Tensor:
    """The same where some rows draw within a budget, for themselves and a prior."""
    limited_L = settings.kappa.isfinite().nonzero().squeeze(-1)
    prior_L = settings.prior[limited_L]
    laws_LV = within_budget(logits_BV[limited_L], logits_BV[prior_L], settings.kappa[limited_L])
    logits_BV = logits_BV.to(laws_LV.dtype).index_copy(0, limited_L, laws_LV)
    free = settings._replace(kappa=torch.full_like(settings.kappa, torch.inf))
    token_B = draw(logits_BV, free, n_B)
    return token_B.index_copy(0, prior_L, token_B[limited_L])


def _draw(p_BV: Tensor, e_BV: Tensor, settings: RowSampling, used: frozenset[str]) -> Tensor:
    """Tokens drawn from p, whose largest entries are 1, after its restriction.

    Masks are numbers of the dtype of p: a product by booleans takes six times as long.
    """
    V, top_p_B, k_B = p_BV.shape[-1], settings.top_p, settings.top_k
    ratio_BV = p_BV / e_BV
    some_p, some_k = "top_p" in used, "top_k" in used and bool((k_B < V).any())
    total_B = p_BV.sum(-1, dtype=torch.float64) if some_p else top_p_B.double()
    if some_k:
        largest_BK = p_BV.topk(int(k_B[k_B < V].max())).values
        last_B1 = (k_B.clamp(max=largest_BK.shape[1]) - 1).unsqueeze(-1)
        least_B1 = largest_BK.gather(1, last_B1).where(k_B.unsqueeze(-1) < V, 0.0)
        ratio_BV *= _at_least(p_BV, least_B1)  # with equals they may be more than k
        shares_BK = largest_BK.cumsum(-1, dtype=torch.float64)
        total_B = torch.where(k_B < V, shares_BK.gather(1, last_B1).squeeze(-1), total_B)
    if "min_p" in used:
        ratio_BV *= _at_least(p_BV, settings.min_p.unsqueeze(-1))
    token_B1 = _argmax(ratio_BV).unsqueeze(-1)
    if not (some_k or some_p):
        return token_B1.squeeze(-1)
    limits = torch.where(top_p_B < 1.0, total_B * top_p_B, torch.inf), k_B
    # Equals with larger ids are not before v; to leave them in is cheaper and decides most rows.
    at_least_BV = _at_least(p_BV, p_BV.gather(1, token_B1)).scatter_(1, token_B1, 0.0)
    full_B = _full(p_BV, at_least_BV, *limits, count=some_k)
    if not bool(full_B.any()):
        return token_B1.squeeze(-1)
    row_R = full_B.nonzero().squeeze(-1)
    p_RV, ratio_RV, token_R1 = p_BV[row_R], ratio_BV[row_R], token_B1[row_R]
    ids_V = torch.arange(V, device=p_BV.device)
    while len(row_R):
        p_R1 = p_RV.gather(1, token_R1)
        before_RV = ((p_RV > p_R1) | ((p_RV == p_R1) & (ids_V < token_R1))).to(p_RV.dtype)
        left_R = _full(p_RV, before_RV, *(x[row_R] for x in limits), count=some_k)
        row_R, p_RV = row_R[left_R], p_RV[left_R]
        ratio_RV = ratio_RV[left_R] * before_RV[left_R]
        token_B1[row_R] = token_R1 = _argmax(ratio_RV).unsqueeze(-1)
    return token_B1.squeeze(-1)


def _at_least(p_BV: Tensor, least_B1: Tensor) -> Tensor:
    """1 where p is at least so large, else 0."""
    return torch.ge(p_BV, least_B1, out=torch.empty_like(p_BV))


def _full(p_RV: Tensor, before_RV: Tensor, limit_R: Tensor, k_R: Tensor, *, count: bool) -> Tensor:
    """Whether the tokens of ``before_RV`` reach the limit of top-p or of top-k: (R, V) -> (R,).

    float32 would lose the tail of a large vocabulary, which decides. False at NaN.
    """
    full_R = (p_RV * before_RV).sum(-1, dtype=torch.float64) >= limit_R
    return full_R | (before_RV.sum(-1) >= k_R) if count else full_R


def exponentials(key_B: Tensor, n_B: Tensor, V: int) -> Tensor:
    """e of every token of token number n: (B, V), in float32."""
    x_BV = random_words(key_B, n_B, V).double()
    u_BV = x_BV.add_(2.0**31 + 0.5).mul_(-(2.0**-32)).float()  # -u, of float32 to the last bit
    return u_BV.clamp_(min=2.0**-24 - 1).log1p_().neg_()


GOLDEN, MIX_1, MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""The constants of SplitMix64 as signed numbers of 64 bits."""


def seed_key(seed_B: Tensor) -> Tensor:
    """h(seed + golden), what ``random_words`` takes: (B,) of int64."""
    return _mix(seed_B + GOLDEN)


def random_words(key_B: Tensor, n_B: Tensor, V: int) -> Tensor:
    """V random integers per row, each a function of seed, n and its number: (B, V) of int32.

    SplitMix64: h(x) is a bijection of 64 bits, and words 2 i and 2 i + 1 are the halves of
    h(state + (i + 1) golden), with state = h(key + n golden) and key = h(seed + golden).
    """
    state_B = _mix(key_B + n_B * GOLDEN)
    words_BP2 = _mix(state_B.unsqueeze(-1) + _counters(V // 2 + 1, key_B.device)).view(torch.int32)
    return words_BP2[:, :V]


@lru_cache(maxsize=8)
def _counters(P: int, device: torch.device) -> Tensor:
    """golden, 2 golden, ..., P golden."""
    return torch.arange(1, P + 1, device=device).mul_(GOLDEN)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64, in place: products of int64 wrap around."""
    for shift, factor in ((30, MIX_1), (27, MIX_2), (31, 1)):
        high = (x >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        x.bitwise_xor_(high)
        if factor != 1:
            x.mul_(factor)
    return x


def choice_seed(seed: int, prompt: int, choice: int) -> int:
    """The seed of a choice of a prompt of one call; the first of both draws by the seed itself.

    >>> choice_seed(5, 0, 0), choice_seed(5, 0, 1) == choice_seed(5, 0, 2)
    (5, False)
    """
    if prompt == choice == 0:
        return seed
    digest = sha256(f"{seed} {prompt} {choice}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


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
