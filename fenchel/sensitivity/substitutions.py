"""Whether substitutions of tokens change a decision: counts of them, from both sides.

Token m of a text may become any of a_m others, and at most k tokens do so at once. With t the last
token that is read and ``kept`` its K largest logits,

    certified < the fewest substitutions that change the decision <= attacked.

**Reading.** There are

    N(c, m) = a_m e_{c-1}(a_0, ..., a_{m-1})

texts of c substitutions whose last one is at m, e the elementary symmetric polynomials. They are
read in the order of c, then m, while their number is within a limit. Position t reads nothing
behind itself, so the texts with m <= t decide it, and one pass serves all positions. A count at
which all texts were read is exact.

**Bound.** Beyond it the change of the input tokens is one of finitely many vectors, and the
expansion of fenchel/sensitivity/decision.py holds for all of them at r = 1:

    margin >= m_ij - sum of the k largest over m of max_a (-g_m . e_ma)_+ - sum sup |a . err|,

with an ellipsoid around each finite set, sum_a (T e_ma) (T e_ma)^T, in place of a ball.

**Attack.** From the text with the least margin that was read, the substitution that leaves the
least margin is added until the decision changes; then those without which it changes as well are
taken back.

Texts are read in float64: a margin within _UNDECIDED of the largest logit neither certifies nor
changes a decision.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, islice, product
from typing import final

import torch
from torch import Tensor

from fenchel.sensitivity.decision import (
    DecisionBound,
    DecisionNetwork,
    OutOfTime,
    Substitutions,
    _unit,
)
from fenchel.sensitivity.layers import Chain

Edits = tuple[tuple[int, int], ...]
"""Pairs of a token and the index of its alternative, by token."""
_UNDECIDED = 1e-9
_LOGITS = 20_000_000  # at once


@final
class SubstitutionSearch:
    """Texts of a network that differ from X (n, d) by substitutions, and what they decide.

    rows[m] (a, d) are the alternatives of token m; kept[t] the decision at position t.
    """

    def __init__(
        self,
        network: DecisionNetwork,
        X: Tensor,
        rows: Mapping[int, Tensor],
        kept: Mapping[int, Tensor],
        most: int,
    ) -> None:
        self.network, self.X, self.kept = network, X, kept
        self.rows = {m: rows[m] for m in sorted(rows) if len(rows[m])}
        self.most = {t: min(most, sum(m <= t for m in self.rows)) for t in kept}
        """Substitutions that position t may see."""
        self.exact = dict.fromkeys(kept, 0)
        """Every text with at most this many was read, at positions that are not changed."""
        self.changed: dict[int, Edits] = {}
        """The fewest substitutions found that change a decision."""
        self.least: dict[int, tuple[float, Edits]] = dict.fromkeys(kept, (math.inf, ()))
        """The least margin that was read, and its text."""
        self.texts = dict.fromkeys(kept, 1)
        """Read in the order of substitutions, with the original one."""
        self._ceiling = dict(self.most)
        """Below the fewest substitutions of a text that is undecided."""
        self.refused = ""

    def margins(self, batch: Sequence[Edits], positions: Sequence[int]) -> Tensor:
        """The least margin of a kept token, 0 where it is undecided: (texts, positions)."""
        n = positions[-1] + 1
        X = self.X[:n].expand(len(batch), -1, -1).clone()
        for b, edits in enumerate(batch):
            for m, a in edits:
                X[b, m] = self.rows[m][a]
        network = self.network.prefix(n)
        logits = network.head(network.norm(Chain(network.stages)(X)[:, list(positions)]))
        found = []
        for p, t in enumerate(positions):
            kept, others = logits[:, p, self.kept[t]], logits[:, p].clone()
            others[:, self.kept[t]] = -math.inf
            margin = kept.amin(-1) - others.amax(-1)
            far = margin.abs() > _UNDECIDED * logits[:, p].abs().amax(-1)
            found.append(torch.where(far, margin, 0.0))
        return torch.stack(found, -1)

    def exhaust(
        self,
        texts: int,
        deadline: float = math.inf,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Read all texts in the order of their substitutions, at most ``texts`` of them."""
        say = progress or (lambda *_: None)
        sizes = block_sizes({m: len(rows) for m, rows in self.rows.items()})
        reach, done = len(self.X), 0
        whole = sum(map(sum, (level.values() for level in sizes)))
        for c, level in enumerate(sizes[: max(self.most.values(), default=0)], 1):
            for m, size in level.items():
                positions = [t for t in self.kept if t >= m and t not in self.changed]
                if not positions or m >= reach:
                    continue
                if done + size > texts or not self._read(c, m, positions, deadline):
                    reach = m
                    break
                done += size
                say(done, min(whole, texts))
            for t in self.kept:
                if t < reach and t not in self.changed:
                    self.exact[t] = min(c, self.most[t])

    def _read(self, c: int, m: int, positions: list[int], deadline: float) -> bool:
        """Read a block; False where the time ended before its end."""
        V = self.network.head.W.shape[-1]
        batch = _block(c, m, {j: len(rows) for j, rows in self.rows.items()})
        while chunk := list(islice(batch, max(1, min(256, _LOGITS // (V * len(positions)))))):
            if time.monotonic() >= deadline:
                return False
            margins = self.margins(chunk, positions)
            for p, t in enumerate(positions):
                margin, at = float(margins[:, p].amin()), int(margins[:, p].argmin())
                self.texts[t] += len(chunk)
                if margin < self.least[t][0]:
                    self.least[t] = margin, chunk[at]
                if margin < 0.0 and t not in self.changed:
                    self.changed[t] = chunk[at]
                if bool((margins[:, p] == 0.0).any()):
                    self._ceiling[t] = min(self._ceiling[t], c - 1)
        return True

    def certified(self, t: int) -> int:
        """No text with at most this many substitutions changes the decision: all were read."""
        return min(self.exact[t], self._ceiling[t])

    def attack(self, t: int, deadline: float = math.inf) -> None:
        """Add substitutions to the text with the least margin until the decision at t changes."""
        if self.exact[t] == self.most[t]:
            return
        edits = self.least[t][1]
        while t not in self.changed and len(edits) < self.most[t]:
            used = {m for m, _ in edits}
            options = [
                tuple(sorted((*edits, (m, a))))
                for m, rows in self.rows.items()
                if m <= t and m not in used
                for a in range(len(rows))
            ]
            margins = self._margins_at(t, options, deadline)
            if margins is None:
                return
            edits = options[int(margins.argmin())]
            if float(margins.amin()) < 0.0:
                self.changed[t] = edits
        while t in self.changed and len(edits) > self.exact[t] + 1:
            options = [tuple(pair for pair in edits if pair != one) for one in edits]
            margins = self._margins_at(t, options, deadline)
            if margins is None or float(margins.amin()) >= 0.0:
                return
            edits = self.changed[t] = options[int(margins.argmin())]

    def _margins_at(self, t: int, batch: list[Edits], deadline: float) -> Tensor | None:
        """Of position t alone; None where the time ended."""
        found, step = [], max(1, min(256, _LOGITS // self.network.head.W.shape[-1]))
        for begin in range(0, len(batch), step):
            if time.monotonic() >= deadline:
                return None
            found.append(self.margins(batch[begin : begin + step], [t])[:, 0])
        return torch.cat(found)

    def bound(
        self,
        deadline: float = math.inf,
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[int, int]:
        """Counts that the expansion certifies, at positions where texts are left to read.

        Nothing is expanded where the gradient alone takes the margin over the runner-up; what the
        expansion does not cover is named in ``refused``.
        """
        left = {
            t: len(self.changed[t]) - 1 if t in self.changed else self.most[t] for t in self.kept
        }
        left = {t: most for t, most in left.items() if most > self.certified(t)}
        moves = {m: rows - self.X[m] for m, rows in self.rows.items()}
        found: dict[int, int] = {}
        try:
            left = {t: most for t, most in left.items() if self._may_hold(t, moves)}
            if not left:
                return found
            n = max(left) + 1
            keep = len(next(iter(self.kept.values())))
            try:
                expansion = DecisionBound(
                    *(self.network.prefix(n), self.X[:n]),
                    keep=keep,
                    deadline=deadline,
                    progress=progress,
                )
            except ValueError as error:
                self.refused = str(error)
                return found
            known = {t: self.certified(t) for t in left}
            top = max(left.values())
            for c in [top, *range(min(known.values()) + 1, top)]:  # all at once, then one by one
                open_ = [t for t in left if known[t] < left[t] and (c == top or known[t] == c - 1)]
                if not open_:
                    continue
                allowed = Substitutions({m: M for m, M in moves.items() if m < n}, c)
                remainders = expansion.remainders(expansion.substitution_ball(allowed), 1.0)
                for t in open_:
                    gradients = expansion.gradients_at(t, "all", None, allowed)
                    if expansion.margin(t, gradients, remainders, 1.0).lower > 0.0:
                        known[t] = found[t] = min(c, left[t])
        except OutOfTime:
            pass
        return found

    def _may_hold(self, t: int, moves: Mapping[int, Tensor]) -> bool:
        """Whether a margin over the runner-up may survive one more substitution, at first order."""
        cut = self.network.prefix(t + 1)
        with torch.enable_grad():
            X = self.X[: t + 1].clone().requires_grad_()
            last = Chain(cut.stages)(X)[-1:]
            _, size, _ = _unit(cut.norm, last)
            logits = cut.head(cut.norm(last))[0] * (size / size.detach())  # what is expanded
            others = logits.detach().clone()
            others[self.kept[t]] = -math.inf
            margin = logits[self.kept[t]].amin() - logits[int(others.argmax())]
            (g,) = torch.autograd.grad(margin, X)
        losses = [-float((M @ g[m]).amin()) for m, M in moves.items() if m <= t]
        count = self.certified(t) + 1
        return sum(sorted(max(loss, 0.0) for loss in losses)[-count:]) < float(margin.detach())


def block_sizes(alternatives: Mapping[int, int]) -> list[dict[int, int]]:
    """N(c, m), the number of texts of c substitutions with the last one at m, for c = 1, 2, ...

    >>> block_sizes({0: 1, 2: 3})
    [{0: 1, 2: 3}, {0: 0, 2: 3}]
    """
    levels, before = [], dict.fromkeys(alternatives, 1)
    for _ in alternatives:
        level = {m: a * before[m] for m, a in alternatives.items()}
        levels.append(level)
        total, before = 0, {}
        for m, size in level.items():
            before[m], total = total, total + size
    return levels


def _block(c: int, m: int, alternatives: Mapping[int, int]) -> Iterator[Edits]:
    """The texts of c substitutions whose last one is at m."""
    for earlier in combinations([j for j in alternatives if j < m], c - 1):
        tokens = (*earlier, m)
        for picks in product(*(range(alternatives[j]) for j in tokens)):
            yield tuple(zip(tokens, picks, strict=True))
