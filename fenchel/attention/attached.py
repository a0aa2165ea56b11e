"""A transformers model with our attention in it, for as long as it is wanted.

    with attach(model, Entmax(1.5)) as attached:
        model(**inputs)
        attached.calls            {"model.layers.0.self_attn": 1, ...}
        attached.masks            {"model.layers.0.self_attn": {"causal"}, ...}
        model.save_pretrained(...)

A directory of transformers does not remember which attention a model had: saved with entmax, it
comes back as softmax without a word. So while it is attached, the model's config carries a field

    "fenchel": {"map": "entmax", "alpha": 1.5, "beta": 1.0}

that is saved with it, and ``attach(model)`` without a choice takes the map from there.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from fenchel.attention.register import register, unregister
from fenchel.choice import Choice, named

FIELD = "fenchel"
"""Where a config keeps the map."""
_numbers = count(1)  # every attachment has a name of its own, so that two do not share their counts


class Attached:
    """Our attention in a model; on leaving (or ``detach``) the model is as it was."""

    def __init__(self, model: Any, choice: Choice) -> None:
        self.model, self.choice = model, choice
        self.name = f"fenchel-{next(_numbers)}"
        self._names = {id(module): name for name, module in model.named_modules()}
        self._before = _implementations(model)
        self._calls: Counter[str] = Counter()
        self._masks: defaultdict[str, set[str]] = defaultdict(set)
        self._record = getattr(model.config, FIELD, None)
        register(self.name, choice, seen=self._see)
        try:
            _switch(model, self.name)
        except BaseException:
            self.detach()
            raise
        setattr(model.config, FIELD, record(choice))

    @property
    def calls(self) -> dict[str, int]:
        """How often each layer attended by us."""
        return dict(self._calls)

    @property
    def masks(self) -> dict[str, set[str]]:
        """What kinds of mask each layer was handed: see ``mask_kind``."""
        return {name: set(kinds) for name, kinds in self._masks.items()}

    def detach(self) -> None:
        """Give the model its own attention back."""
        for config, implementation in self._before:
            config._attn_implementation_internal = implementation
        if self._record is not None:
            setattr(self.model.config, FIELD, self._record)
        elif hasattr(self.model.config, FIELD):
            delattr(self.model.config, FIELD)
        unregister(self.name)

    def _see(self, module: nn.Module, mask: Tensor | None, T: int, S: int) -> None:
        name = self._names.get(id(module), type(module).__name__)
        self._calls[name] += 1
        self._masks[name].add(mask_kind(mask, T, S))

    def __enter__(self) -> "Attached":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def attach(model: Any, choice: Choice | None = None) -> Attached:
    """Let a transformers model attend by ``choice``, or by the map its config was saved with."""
    if not isinstance(model, nn.Module) or not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"attach needs a model of transformers, got {type(model).__name__}.")
    if choice is None:
        stored = getattr(model.config, FIELD, None)
        if stored is None:
            raise ValueError(
                f"this {type(model).__name__} was not saved with a map of ours; say which one."
            )
        choice = recorded(stored)
    return Attached(model, choice)


def record(choice: Choice) -> dict[str, Any]:
    """A map in plain values, as a config keeps it."""
    found: dict[str, Any] = {"map": type(choice).__name__.lower()}
    names: list[str] = [one.name for one in fields(choice)] if is_dataclass(choice) else []
    for name in names:
        value = getattr(choice, name)
        found[name] = value.tolist() if isinstance(value, Tensor) else value
    return found


def recorded(stored: object) -> Choice:
    """The map that a config tells of; a file from outside may say anything."""
    known = {"map", "alpha", "beta"}
    if not isinstance(stored, Mapping) or not isinstance(stored.get("map"), str):
        raise ValueError(f'the config\'s field "{FIELD}" should hold a map and its settings.')
    if strange := sorted(str(key)[:40] for key in stored.keys() - known):
        raise ValueError(f'the config\'s field "{FIELD}" holds {strange[0]!r}, unknown here.')
    settings = {key: stored[key] for key in ("alpha", "beta") if key in stored}
    for key, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f'the config\'s field "{FIELD}" should give {key} as a number.')
    return named(stored["map"], **{key: float(value) for key, value in settings.items()})


def mask_kind(mask: Tensor | None, T: int, S: int) -> str:
    """A mask in words: "none", "full", "causal", "window 4" or "other", with " + padding" if some.

    Padding is keys that no query of a sequence may see.
    """
    if mask is None:
        return "none"
    open_ = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    open_ = open_.any(1).expand(-1, T, S)  # (B, T, S)
    keys = torch.arange(S, device=mask.device)
    behind = keys[S - T :, None] - keys  # how many positions before the query a key stands
    real = open_.any(1, keepdim=True)
    padding = "" if bool(real.all()) else " + padding"
    reach = int(torch.where(open_, behind, 0).max()) + 1
    patterns = {
        "full": torch.ones_like(behind, dtype=torch.bool),
        "causal": behind >= 0,
        f"window {reach}": (behind >= 0) & (behind < reach),
    }
    for kind, pattern in patterns.items():
        if bool((open_ == (pattern & real)).all()):
            return kind + padding
    return "other"


def _implementations(model: Any) -> list[tuple[Any, Any]]:
    """Every config in the model with the attention it names."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return [(c, c._attn_implementation_internal) for c in configs.values() if _has(c)]


def _switch(model: Any, name: str) -> None:
    """Name our attention in every config, and see that it was taken."""
    deaf = [model] if not model._can_set_attn_implementation() else []
    if not deaf:  # a model that cannot would say so in a log and carry on
        model.set_attn_implementation(name)
        kept = (m for m in model.modules() if hasattr(m, "config") and _has(m.config))
        deaf = [m for m in kept if m.config._attn_implementation != name]
    if deaf:
        raise ValueError(
            f"{type(deaf[0]).__name__} does not use the attention registry of transformers: it "
            "computes its attention itself, and no other can be put in its place."
        )


def _has(config: Any) -> bool:
    return hasattr(config, "_attn_implementation_internal")
