"""The choice maps that settings and commands can name: one row of ``MAPS`` per map.

The settings ``model.choice`` and ``model.router``, ``fenchel attach --map``, ``fenchel doctor``
and the contract tests read this table. A new map is therefore one file with its class, one row
here and one export in ``fenchel/choice/__init__.py``. The settings of a map are the fields of its
dataclass, and each has a default. ``Capped`` has none for its cap, so it has no name.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from fenchel.choice.base import Choice
from fenchel.choice.entmax import Entmax, Sparsemax
from fenchel.choice.hard import Hard
from fenchel.choice.sigmoid import Sigmoid
from fenchel.choice.softmax import Softmax
from fenchel.config import did_you_mean

MAPS: dict[str, type[Choice]] = {
    "softmax": Softmax,
    "entmax": Entmax,
    "sparsemax": Sparsemax,
    "hard": Hard,
    "sigmoid": Sigmoid,
}


def by_name(name: str, **settings: float) -> Choice:
    """The map called ``name``; it reads those of ``settings`` that are its fields.

    >>> by_name("entmax", alpha=1.25)
    Entmax(alpha=1.25, beta=1.0)
    >>> by_name("softmax", alpha=1.25)  # alpha is a setting of entmax alone
    Softmax(beta=1.0)
    """
    if name not in MAPS:
        raise ValueError(f"there is no choice map {name!r}; {did_you_mean(name, MAPS)}")
    if unknown := sorted(settings.keys() - set(SETTINGS)):
        raise TypeError(f"no map has a setting {unknown[0]!r}; known: {', '.join(SETTINGS)}.")
    own = settings_of(name)
    return MAPS[name](**{key: value for key, value in settings.items() if key in own})


def settings_of(name: str) -> tuple[str, ...]:
    """The settings of the map called ``name``.

    >>> settings_of("entmax"), settings_of("hard")
    (('alpha', 'beta'), ())
    """
    return tuple(field.name for field in fields(MAPS[name]))  # type: ignore[arg-type]


def maps_with(setting: str) -> list[str]:
    """The names of the maps that have ``setting``.

    >>> maps_with("alpha")
    ['entmax']
    """
    return [name for name in MAPS if setting in settings_of(name)]


SETTINGS = tuple(dict.fromkeys(setting for name in MAPS for setting in settings_of(name)))
"""The settings of all maps, each once."""

FIELD = "fenchel"
"""The field of a config.json that holds the map of the attention: see ``choice_record``."""


def choice_record(choice: Choice) -> dict[str, Any]:
    """A choice map as plain values, for a config.

    >>> from fenchel.choice import Entmax
    >>> choice_record(Entmax(1.5))
    {'map': 'entmax', 'alpha': 1.5, 'beta': 1.0}
    """
    record: dict[str, Any] = {"map": type(choice).__name__.lower()}
    names: list[str] = [field.name for field in fields(choice)] if is_dataclass(choice) else []
    for name in names:
        value = getattr(choice, name)
        record[name] = value.tolist() if isinstance(value, Tensor) else value
    return record


_LARGEST = 1e30


def choice_from_record(record: object) -> Choice:
    """The choice map of a config's field, which may hold anything.

    >>> choice_from_record({"map": "entmax", "alpha": 1.5})
    Entmax(alpha=1.5, beta=1.0)
    """
    known = {"map", *SETTINGS}
    if not isinstance(record, Mapping) or not isinstance(record.get("map"), str):
        raise ValueError(f'the config\'s field "{FIELD}" should hold a map and its settings.')
    if unknown := sorted(str(key)[:40] for key in record.keys() - known):
        raise ValueError(f'the config\'s field "{FIELD}" holds {unknown[0]!r}, unknown here.')
    settings = {key: record[key] for key in SETTINGS if key in record}
    for key, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f'the config\'s field "{FIELD}" should give {key} as a number.')
        if not abs(value) < _LARGEST:  # no float32, and maybe no float at all
            raise ValueError(
                f'the config\'s field "{FIELD}" should give {key} as a number below {_LARGEST:g}.'
            )
    return by_name(record["map"], **{key: float(value) for key, value in settings.items()})
