"""Activation patching: which site carries the difference between two prompts.

Two prompts of equal length differ in some words, and so do their laws of the next token. A pass
runs on the corrupt prompt with one site set to its value in the pass on the clean one. Its effect
is the share of the difference that comes back,

    (f_patched - f_corrupt) / (f_clean - f_corrupt),

with f the logit of an answer less that of another token, after the last position: 0 for a site that
carries nothing of it, 1 for one that carries all. Shares need not sum to 1.

Without named tokens the answer is that with the largest term p_clean log(p_clean / p_corrupt) of
the divergence between the two laws, and the other token that with the largest term of the reverse.

Queries, keys, values and outputs are patched per head at all positions, streams and branches per
layer, streams also per position (``sites="stream"`` does both layer and position).
fenchel/interpretability/intervention.py computes the effects.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fenchel.interpretability.ablation import head_counts
from fenchel.interpretability.hooked_model import HookedModel, Model, RecordedPass, hooked
from fenchel.interpretability.intervention import (
    HEAD_PARTS,
    QKV,
    Edit,
    Effects,
    HeadCounts,
    Progress,
    Site,
    effects,
    require_site,
)

PATCHED = ("q", "k", "v", "head", "attention", "mlp", "stream")
"""Parts that can be patched."""
USUAL = ("q", "k", "v", "stream")
_SAME = 1e-6  # of logits


@dataclass(frozen=True, kw_only=True, eq=False)
class Patch(Effects):
    """Shares of the difference between two prompts, largest first; ``base`` is f_corrupt."""

    clean: float
    """f of the clean prompt."""
    answer: int
    against: int
    tokens: int

    def plain(self) -> dict[str, Any]:
        """The result as plain values."""
        return {
            "answer": self.answer,
            "against": self.against,
            "tokens": self.tokens,
            "clean": self.clean,
            "corrupt": self.base,
            **super().plain(),
        }


def patch(
    model: Model,
    clean: Sequence[int],
    corrupt: Sequence[int],
    sites: Sequence[str | Site] = USUAL,
    *,
    answer: int | None = None,
    against: int | None = None,
    exact: int | None = None,
    progress: Progress | None = None,
) -> Patch:
    """The share of the difference between two prompts that each site carries.

    ``sites`` are parts, of which every site is patched, or single sites. ``answer`` and ``against``
    are the tokens whose logits are compared. ``exact`` sites of each part are run exactly, all of
    them where that is cheap.

    >>> from fenchel.model import ModelConfig, Transformer
    >>> config = ModelConfig(vocabulary=16, layers=2, heads=2, width=32, initial="xavier")
    >>> model = Transformer(config)
    >>> found = patch(model, [3, 1, 4, 1], [3, 2, 4, 1], ["stream"])
    >>> {str(e.site): round(e.exact, 4) for e in found.effects}["stream 2 at 3"]
    1.0
    """
    subject = hooked(model)
    if len(clean) != len(corrupt):
        raise ValueError(
            "patching needs two prompts of the same number of tokens; these have "
            f"{len(clean)} and {len(corrupt)}."
        )
    if list(clean) == list(corrupt) or len(clean) < 2:
        raise ValueError("patching needs two prompts of two or more tokens that differ.")
    heads = head_counts(subject, clean)
    chosen: list[Site] = []
    for entry in sites:
        if isinstance(entry, Site):
            chosen.append(entry)
        else:
            chosen += _sites(subject, entry, heads, clean, corrupt)
    for site in chosen:
        require_site(subject, site, heads, len(clean))
        if site.part not in PATCHED:
            raise ValueError(f"{site} cannot be patched; there are {', '.join(PATCHED)}.")
    source = RecordedPass()
    with torch.no_grad():
        laws = [
            subject.logits(subject.batch(ids), taps)[0, -1].double()
            for ids, taps in ((clean, source), (corrupt, RecordedPass()))
        ]
    right, wrong = _tokens(laws[0], laws[1], answer, against)
    total = [float(law[right] - law[wrong]) for law in laws]
    if not abs(total[0] - total[1]) > _SAME:
        raise ValueError("these two tokens have the same logits after both prompts.")

    def metric(logits_BTV: Tensor) -> Tensor:
        return logits_BTV[:, -1, right] - logits_BTV[:, -1, wrong]

    edits = [_edit(site, source) for site in chosen]
    found = effects(subject, corrupt, edits, metric, exact=exact, progress=progress)
    scale = 1.0 / (total[0] - total[1])
    return Patch(
        base=found.base,
        effects=[
            effect._replace(
                estimate=scale * effect.estimate,
                spread=abs(scale) * effect.spread,
                exact=None if effect.exact is None else scale * effect.exact,
            )
            for effect in found.effects
        ],
        agreement=found.agreement,
        clean=total[0],
        answer=right,
        against=wrong,
        tokens=len(clean),
    )


def _sites(
    model: HookedModel,
    part: str,
    heads: HeadCounts,
    clean: Sequence[int],
    corrupt: Sequence[int],
) -> list[Site]:
    """Every site of a part; positions before the first difference carry nothing."""
    layers = range(1, model.layers + 1)
    if part in (*QKV, "head"):
        of = int(part in ("k", "v"))
        counts = heads.items()
        return [Site(part, layer, n) for layer, count in counts for n in range(1, count[of] + 1)]
    if part == "stream":
        same = next(t for t, (a, b) in enumerate(zip(clean, corrupt, strict=True)) if a != b)
        places = range(same, len(clean))
        return [Site(part, layer, None, t) for layer in layers for t in places]
    return [Site(part, layer) for layer in layers]


def _edit(site: Site, source: RecordedPass) -> Edit:
    part, layer, head, position = site
    if part in QKV:
        x = getattr(source.calls[layer], part)[0]
    elif part in HEAD_PARTS:
        x = source.outputs[layer][0]
    else:
        x = (source.streams[layer] if part == "stream" else source.branches[part, layer])[0]
    x = x if head is None else x[head - 1]
    x = x if position is None else x[..., position, :]
    return Edit(site, lambda _: x)


def _tokens(
    clean_V: Tensor, corrupt_V: Tensor, answer: int | None, against: int | None
) -> tuple[int, int]:
    """The answer and the token against it, chosen where they are not given."""
    if any(token is not None and not 0 <= token < len(clean_V) for token in (answer, against)):
        raise ValueError(f"tokens are numbered from 0 to {len(clean_V) - 1}.")
    a, b = clean_V.log_softmax(-1), corrupt_V.log_softmax(-1)
    gap = a - b
    if not float(gap.abs().max()) > _SAME:
        raise ValueError("both prompts have the same law of the next token; nothing is carried.")
    right = int((a.exp() * gap).argmax()) if answer is None else answer
    wrong = int((-b.exp() * gap).argmax()) if against is None else against
    if right == wrong:
        raise ValueError("the answer and the token against it are the same.")
    return right, wrong
