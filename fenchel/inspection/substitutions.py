"""Certified decisions under substitutions: which tokens may become another one of a given set.

    certified < the fewest substitutions that change the decision <= attacked

No text with at most ``certified`` substitutions changes the decision; ``attacked`` of them were
found that do. Where all texts can be read both are exact; fenchel/sensitivity/substitutions.py has
the bound beyond. A substitution changes the row of its token in the input of the first block and no
other row; this, and the logits of a text with each alternative, are compared with the model's own.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fenchel.data import ProgressCallback, TextTokenizer
from fenchel.files import Damaged, printable, read_json
from fenchel.inspection.decisions import decoder_of, network_of, require_same_logits
from fenchel.inspection.our_model import record_pass
from fenchel.inspection.trace import InspectedModel, token_text, tokenize_text
from fenchel.inspection_result import SubstitutionCertification, SubstitutionRow
from fenchel.model import Transformer
from fenchel.sensitivity.decision import DecisionNetwork
from fenchel.sensitivity.substitutions import SubstitutionSearch, block_sizes

TEXTS = 20_000
"""Texts that are read at most."""
_ENDS = (0.7, 0.85)  # of a budget: of reading, of attacks


@dataclass(frozen=True, eq=False)
class PositionSubstitutions:
    """The decision after the tokens up to ``position``."""

    position: int
    kept: list[int]
    """The ``keep`` tokens with the largest logits."""
    margin: float
    """The least margin of a kept token over another, in logits."""
    certified: int
    """No allowed substitution of at most this many tokens changes the decision."""
    attacked: int | None
    """This many do; None where none was found."""
    most: int
    """Tokens up to here that may be substituted at once."""
    read: int
    """Texts that were read to count, with the original one; those of the attack come on top."""
    allowed: int
    """Texts that may stand here."""
    how: str
    """Of ``certified``: "exact", no larger count holds, by the texts that were read; "read", the
    same without the next count; "bound", by the expansion."""
    witness: list[int] | None
    """The tokens up to ``position`` of a text with ``attacked`` substitutions that does."""


@dataclass(frozen=True, eq=False)
class SubstitutionDecision:
    """Counts of substitutions from both sides, at every position."""

    keep: int
    positions: list[PositionSubstitutions]
    seconds: float
    complete: bool
    """False where a budget ended the search."""
    refused: str
    """Why the expansion does not cover the model; "" where it does or was not needed."""

    @property
    def certified(self) -> Tensor:
        """(positions,)."""
        return torch.tensor([one.certified for one in self.positions])

    @property
    def attacked(self) -> Tensor:
        """(positions,), inf where no change was found."""
        found = [math.inf if one.attacked is None else one.attacked for one in self.positions]
        return torch.tensor(found, dtype=torch.float64)


@torch.no_grad()
def certify_substitutions(
    model: Transformer,
    ids: Tensor,
    alternatives: Mapping[int, Sequence[int]],
    *,
    most: int | None = None,
    keep: int = 1,
    texts: int = TEXTS,
    budget: float | None = None,
    positions: Sequence[int] | None = None,
    progress: ProgressCallback | None = None,
) -> SubstitutionDecision:
    """How many tokens of ids (T,) may be substituted before a decision changes, from both sides.

    Every occurrence of a token in ``alternatives`` may become any of its alternatives, ``most`` of
    them at once (all, when left out). At most ``texts`` texts are read to count exactly; ``budget``
    is in seconds.

    >>> from fenchel.model import ModelConfig, Transformer
    >>> config = ModelConfig(vocabulary=16, width=8, layers=1, heads=2, initial="normal")
    >>> model = Transformer(config, generator=torch.Generator().manual_seed(0))
    >>> decision = certify_substitutions(model, torch.tensor([3, 1, 2]), {3: [4, 5], 2: [6]})
    >>> [one.how for one in decision.positions]
    ['exact', 'exact', 'exact']
    >>> bool((decision.certified < decision.attacked).all())
    True
    """
    begin = time.monotonic()
    ids = ids[0] if ids.ndim == 2 and len(ids) == 1 else ids
    if ids.ndim != 1 or len(ids) == 0:
        raise ValueError(f"a decision is about one sequence of ids (T,), got {tuple(ids.shape)}.")
    V = model.config.vocabulary
    if not 1 <= keep < V:
        raise ValueError(f"keep is 1 to {V - 1}, got {keep}.")
    if most is not None and most < 1:
        raise ValueError(f"at least 1 token is substituted at once, got {most}.")
    if texts < 0:
        raise ValueError(f"the number of texts is 0 or more, got {texts}.")
    chosen = list(range(len(ids))) if positions is None else sorted(set(positions))
    if not chosen or not 0 <= chosen[0] <= chosen[-1] < len(ids):
        raise ValueError(f"positions are 0 to {len(ids) - 1}, got {positions}.")
    tokens = {m: _others(alternatives, int(id), V) for m, id in enumerate(ids)}
    if not any(tokens[m] for m in range(chosen[-1] + 1)):
        raise ValueError("no token of the text has an alternative.")
    say = progress or (lambda *_: None)
    network, X = network_of(model, ids)
    logits = network(X)[chosen]
    kept = {t: row.topk(keep).indices for t, row in zip(chosen, logits, strict=True)}
    n = chosen[-1] + 1
    rows = {m: row for m, row in _rows(model, ids, network, X, tokens).items() if m < n}
    search = SubstitutionSearch(
        network.prefix(n), X[:n], rows, kept, len(ids) if most is None else most
    )
    ends = [math.inf if budget is None else begin + share * budget for share in (*_ENDS, 1.0)]
    search.exhaust(texts, ends[0], lambda done, total: say("texts", done, total))
    for done, t in enumerate(chosen):
        say("attacks", done, len(chosen))
        search.attack(t, ends[1])
    bounds = search.bound(ends[2], lambda done, total: say("setup", done, total))
    sizes = block_sizes({m: len(row) for m, row in search.rows.items()})
    results = []
    for t in chosen:
        at, found = search.kept[t], search.changed.get(t)
        gaps = logits[chosen.index(t)]
        others = gaps.clone()
        others[at] = -math.inf
        certified = max(search.certified(t), bounds.get(t, 0))
        exact = certified == search.most[t] or (found is not None and certified == len(found) - 1)
        witness = ids[: t + 1].tolist()
        for m, a in found or ():
            witness[m] = tokens[m][a]
        results.append(
            PositionSubstitutions(
                position=t,
                kept=at.tolist(),
                margin=float(gaps[at].amin() - others.amax()),
                certified=certified,
                attacked=None if found is None else len(found),
                most=search.most[t],
                read=search.texts[t],
                allowed=1
                + sum(
                    size for level in sizes[: search.most[t]] for m, size in level.items() if m <= t
                ),
                how="bound" if t in bounds else "exact" if exact else "read",
                witness=None if found is None else witness,
            )
        )
    now = time.monotonic()
    return SubstitutionDecision(keep, results, now - begin, now < ends[2], search.refused)


def _others(alternatives: Mapping[int, Sequence[int]], id: int, V: int) -> list[int]:
    """The alternatives of a token, each once and without itself."""
    others = list(dict.fromkeys(int(other) for other in alternatives.get(id, ())))
    if wrong := [other for other in others if not 0 <= other < V]:
        raise ValueError(f"an alternative of token {id} is {wrong[0]}; ids are 0 to {V - 1}.")
    return [other for other in others if other != id]


def _rows(
    model: Transformer,
    ids: Tensor,
    network: DecisionNetwork,
    X: Tensor,
    tokens: Mapping[int, Sequence[int]],
) -> dict[int, Tensor]:
    """The rows of all alternatives in the input of the first block: m -> (a, d)."""
    rows = {m: X.new_empty(len(others), X.shape[-1]) for m, others in tokens.items()}
    for a in range(max(map(len, tokens.values()))):
        changed = [m for m, others in tokens.items() if a < len(others)]
        other = ids.clone()
        other[changed] = torch.tensor([tokens[m][a] for m in changed])
        Y = record_pass(model, other[None]).records[0].block.x[0].double()
        same = torch.ones(len(ids), dtype=torch.bool)
        same[changed] = False
        if not torch.equal(Y[same], X[same]):
            raise ValueError("a token of this model changes the embeddings of other tokens.")
        require_same_logits(network, Y, model, other)
        for m in changed:
            rows[m][a] = Y[m]
    return rows


def read_synonyms(path: Path) -> dict[str, list[str]]:
    """Words and their alternatives, a JSON object of lists of words."""
    words = read_json(path)
    for word, others in words.items():
        if not isinstance(others, list) or not all(isinstance(other, str) for other in others):
            raise Damaged(f"{path} has no list of words for {printable(word)!r}.")
        if not [other for other in others if other != word]:
            raise Damaged(f"{path} has no other word for {printable(word)!r}.")
    return words


def token_alternatives(
    tokenizer: TextTokenizer, ids: Sequence[int], synonyms: Mapping[str, Sequence[str]]
) -> dict[int, list[int]]:
    """Alternatives by token, for those in ``ids``: a word with a space in front of it, or without.

    Words of several tokens are refused, since a substitution keeps the others where they are.
    """
    found: dict[int, list[int]] = {}
    for word, others in synonyms.items():
        known = [front for front in ("", " ") if len(_encoded(tokenizer, front + word)) == 1]
        if not known:
            raise ValueError(_several(tokenizer, word, "a word to substitute"))
        for front in known:
            (token,) = _encoded(tokenizer, front + word)
            if token not in ids:
                continue
            for other in others:
                encoded = _encoded(tokenizer, front + other)
                if len(encoded) != 1:
                    what = f"an alternative of {printable(word)!r}"
                    raise ValueError(_several(tokenizer, other, what, front))
                if encoded[0] not in found.setdefault(token, []):
                    found[token] += encoded
    if not found:
        raise ValueError("no token of the text is one of the words to substitute.")
    return found


def _encoded(tokenizer: TextTokenizer, word: str) -> list[int]:
    """The ids of a word; none where the tokenizer does not know it, or it is empty."""
    ids = tokenizer.encode(word) if word.strip() else []
    return ids if tokenizer.decode(ids).strip() == word.strip() else []


def _several(tokenizer: TextTokenizer, word: str, what: str, front: str = " ") -> str:
    """Why a word is refused."""
    count = len(_encoded(tokenizer, front + word))
    has = f"{count} tokens" if count else "no token"
    return f"{printable(front + word)!r}, {what}, is {has} of this tokenizer; it should be one."


def certify_text_substitutions(
    model: InspectedModel,
    source: str,
    synonyms: Mapping[str, Sequence[str]],
    *,
    most: int | None = None,
    keep: int = 1,
    texts: int = TEXTS,
    max_tokens: int = 16,
    budget: float | None = None,
    progress: ProgressCallback | None = None,
) -> SubstitutionCertification:
    """``certify_substitutions`` on the first tokens of ``source``, as plain values."""
    transformer, text = decoder_of(model), tokenize_text(model, source, max_tokens)
    alternatives = token_alternatives(model.tokenizer, text.ids, synonyms)
    found = certify_substitutions(
        *(transformer, torch.tensor(text.ids), alternatives),
        most=most,
        keep=keep,
        texts=texts,
        budget=budget,
        progress=progress,
    )

    def name(token: int) -> str:
        return token_text(model.tokenizer, token)

    def row(one: PositionSubstitutions) -> SubstitutionRow:
        changed = zip(text.ids, one.witness or (), strict=False)
        return SubstitutionRow(
            position=one.position,
            token=text.tokens[one.position],
            kept=[name(token) for token in one.kept],
            margin=one.margin,
            certified=one.certified,
            attacked=one.attacked,
            most=one.most,
            read=one.read,
            allowed=one.allowed,
            how=one.how,
            witness={
                str(m): [name(before), name(after)]
                for m, (before, after) in enumerate(changed)
                if before != after
            },
        )

    return SubstitutionCertification(
        subject=model.facts(),
        text=text.name,
        tokens=list(text.tokens),
        alternatives={
            name(id): [name(one) for one in others] for id, others in alternatives.items()
        },
        keep=keep,
        complete=found.complete,
        refused=found.refused,
        rows=[row(one) for one in found.positions],
        seconds={"substitutions": found.seconds},
    )
