"""Ablation: the change of the loss when a head, a layer's attention or its MLP is removed.

What it is replaced by decides what is measured:

    zero       nothing: the output of the head, of the attention module or of the MLP is 0
    mean       the mean of that output over the positions of the text, which leaves what is the
               same everywhere
    uniform    the head mixes all keys that it may see equally (scores of 0), so that only its
               choice is removed
    a map      the head chooses by another map, with its own scores

Zero and mean are often far apart in which heads they name. The last two are about choices and leave
MLPs out. Effects are in nats per token of the loss on the text; the part is
needed where they are positive. fenchel/interpretability/intervention.py computes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fenchel.attention import AttentionSpec
from fenchel.attention.spec import ChoiceLike, as_choice
from fenchel.choice import MAPS, Choice
from fenchel.interpretability.hooked_model import (
    BRANCHES,
    HookedModel,
    Model,
    RecordedPass,
    hooked,
)
from fenchel.interpretability.intervention import (
    Edit,
    Effects,
    HeadCounts,
    Progress,
    Site,
    effects,
    require_site,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Ablation(Effects):
    """The changes of the loss, largest first; ``base`` is the loss of the whole model."""

    to: str
    """What a removed part is replaced by."""
    tokens: int

    def plain(self) -> dict[str, Any]:
        """The result as plain values."""
        return {
            "to": self.to,
            "tokens": self.tokens,
            "loss": self.base,
            **super().plain(),
        }


def ablate(
    model: Model,
    ids: Sequence[int],
    *,
    to: str | ChoiceLike = "mean",
    sites: Sequence[Site] | None = None,
    exact: int | None = None,
    progress: Progress | None = None,
) -> Ablation:
    """The change of the loss on a text as each part of a model is removed.

    ``to`` is "zero", "mean", "uniform", or the map by which heads choose instead. ``sites`` are
    those of parts "head", "attention" and "mlp" that are removed one at a time; all by default.
    ``exact`` of each part are run exactly, all of them where that is cheap.

    >>> from fenchel.model import ModelConfig, Transformer
    >>> model = Transformer(ModelConfig(vocabulary=16, layers=2, heads=2, width=32))
    >>> found = ablate(model, [3, 1, 4, 1, 5, 9, 2, 6], to="zero")
    >>> sorted(str(effect.site) for effect in found.effects)[:3]
    ['attention 1', 'attention 2', 'head 1.1']
    """
    subject = hooked(model)
    if len(ids) < 3:
        raise ValueError(f"a loss needs a text of at least three tokens, got {len(ids)}.")
    heads = head_counts(subject, ids)
    choice = None if to in ("zero", "mean", "uniform") else _map(to)
    chosen = (
        list(sites) if sites is not None else _all_sites(subject, heads, choices=_of_choice(to))
    )
    for site in chosen:
        require_site(subject, site, heads, len(ids))
        if site.part not in ("head", *BRANCHES):
            raise ValueError(
                f"{site} is not a part that is removed: give heads, attention or MLPs."
            )
        if site.part == "mlp" and _of_choice(to):
            raise ValueError(f"an MLP has no choice to make {to}; remove it by zero or mean.")
        if site.layer not in heads and _of_choice(to):
            raise ValueError(f"layer {site.layer} gives no weights to keys; it has no choice.")
    targets_T = torch.tensor(list(ids[1:]), device=subject.device)

    def loss(logits_BTV: Tensor) -> Tensor:
        B, T, V = logits_BTV.shape
        flat = cross_entropy(
            logits_BTV[:, :-1].reshape(-1, V), targets_T.repeat(B), reduction="none"
        )
        return flat.view(B, T - 1).mean(1)

    edits = [_edit(site, to, choice) for site in chosen]
    found = effects(subject, ids, edits, loss, stationary=True, exact=exact, progress=progress)
    return Ablation(
        base=found.base,
        effects=found.effects,
        agreement=found.agreement,
        to=to if isinstance(to, str) else str(choice),
        tokens=len(ids),
    )


def head_counts(model: HookedModel, ids: Sequence[int]) -> HeadCounts:
    """The heads of every layer that attends, and its heads of keys and values."""
    recorded = RecordedPass()
    with torch.no_grad():
        model.logits(model.batch(ids[:2]), recorded)
    calls = recorded.calls.items()
    return {layer: (call.q.shape[1], call.k.shape[1]) for layer, call in calls}


def _of_choice(to: str | ChoiceLike) -> bool:
    return to not in ("zero", "mean")


def _map(to: str | ChoiceLike) -> Choice:
    if isinstance(to, str) and to not in MAPS:
        known = ", ".join(("zero", "mean", "uniform", *MAPS))
        raise ValueError(f"to={to!r} is not known; there are {known}.")
    return as_choice(to)


def _all_sites(model: HookedModel, heads: HeadCounts, *, choices: bool) -> list[Site]:
    """Every head, and the attention and MLP of every layer that separates them."""
    sites = []
    for layer, modules in enumerate(model.blocks, 1):
        count, _ = heads.get(layer, (0, 0))
        sites += [Site("head", layer, head) for head in range(1, count + 1)]
        if not choices:
            sites += [Site(p, layer) for p in BRANCHES if getattr(modules, p) is not None]
        elif count:
            sites.append(Site("attention", layer))
    return sites


def _edit(site: Site, to: str | ChoiceLike, choice: Choice | None) -> Edit:
    if choice is not None or to == "uniform":

        def changed(spec: AttentionSpec) -> AttentionSpec:
            return replace(spec, scale=0.0) if choice is None else replace(spec, choice=choice)

        return Edit(site, spec=changed)
    if to == "zero":
        return Edit(site, torch.zeros_like)
    return Edit(site, lambda x_TD: x_TD.mean(0, keepdim=True).expand_as(x_TD))
