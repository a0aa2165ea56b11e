"""Settings: frozen dataclasses to and from plain mappings and TOML, strictly.

A setting is defined once, in the dataclass of the package that reads it. This module converts
between such a dataclass and text. An unknown key is an error that names the nearest known one, and
a value of the wrong type one that names the type.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def from_mapping(cls: type[T], values: Mapping[str, Any], *, where: str = "") -> T:
    """Build ``cls`` from ``values``, nested mappings into nested dataclasses.

    >>> from fenchel.optim import OptimConfig
    >>> from_mapping(OptimConfig, {"learning_rate": 1}).learning_rate
    1.0
    """
    types = get_type_hints(cls)
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    built = {}
    for key, value in values.items():
        name = f"{where}{key}"
        if key not in known:
            hint = did_you_mean(key, known, show=where.__add__)
            raise ValueError(f"there is no setting {name!r}; {hint}")
        built[key] = _convert(types[key], value, name)
    return cls(**built)


def did_you_mean(
    name: str, known: Collection[str], *, show: Callable[[str], str] = repr, cutoff: float = 0.6
) -> str:
    """The end of an error about an unknown name: the known one most like it, or all of them.

    >>> did_you_mean("sofmax", ["softmax", "entmax"])
    "did you mean 'softmax'?"
    >>> did_you_mean("relu", ["softmax", "entmax"])
    'known: softmax, entmax.'
    """
    near = get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean {show(near[0])}?" if near else f"known: {', '.join(known)}."


def to_mapping(settings: Any) -> dict[str, Any]:
    """The settings as nested plain values; None is left out, as TOML has no null."""
    plain = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            value = to_mapping(value)
        if value is not None:
            plain[field.name] = value
    return plain


def to_toml(mapping: Mapping[str, Any]) -> str:
    """Nested mappings of strings, numbers, booleans and lists of them as TOML text.

    >>> print(to_toml({"seed": 1, "train": {"steps": 3}}), end="")
    seed = 1
    <BLANKLINE>
    [train]
    steps = 3
    """
    lines = [f"{k} = {_toml(v)}" for k, v in mapping.items() if not isinstance(v, Mapping)]
    for name, section in mapping.items():
        if isinstance(section, Mapping):
            lines += ["", f"[{name}]", *(f"{k} = {_toml(v)}" for k, v in section.items())]
    return "\n".join(lines) + "\n"


def assign(mapping: Mapping[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    """A copy of ``mapping`` with ``section.key``, or ``key``, set to a value.

    >>> assign({"seed": 1}, "train.steps", 3)
    {'seed': 1, 'train': {'steps': 3}}
    """
    head, _, rest = dotted.partition(".")
    if not rest:
        return {**mapping, head: value}
    section = mapping.get(head, {})
    if not isinstance(section, Mapping):
        raise ValueError(f"{head} is a value and not a section; there is no setting {dotted!r}.")
    return {**mapping, head: assign(section, rest, value)}


def parse_value(text: str) -> Any:
    """A number, boolean or quoted string as in TOML; anything else is the text itself.

    >>> parse_value("3"), parse_value("true"), parse_value("entmax")
    (3, True, 'entmax')
    """
    if text in ("true", "false"):
        return text == "true"
    for convert in (int, float, json.loads):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def _convert(kind: Any, value: Any, name: str) -> Any:
    choices = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for choice in choices:
        if is_dataclass(choice) and isinstance(value, Mapping):
            return from_mapping(choice, value, where=f"{name}.")  # type: ignore[arg-type]
        if get_origin(choice) is tuple and isinstance(value, list | tuple):
            return tuple(value)
        if choice is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(choice, type) and isinstance(value, choice):
            if choice is int and isinstance(value, bool):
                continue
            return value
        if choice is None and value is None:
            return None
    expected = " or ".join(getattr(c, "__name__", str(c)) for c in choices if c is not type(None))
    raise ValueError(f"setting {name!r} should be {expected}, got {value!r}.")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, str):  # a TOML string is a JSON string that may not hold a raw DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
