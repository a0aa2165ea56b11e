"""Settings: frozen dataclasses to and from plain mappings and TOML, strictly.

A setting is defined once, in the dataclass of the package that reads it: its type, its default, and
its meaning in the docstring below it. This module converts between such a dataclass and text. An
unknown key is an error that names the nearest known one, and a value of the wrong type one that
names the type. ``reference`` lists all settings. Settings may come from a foreign file: the length
of its lines, its nesting and its numbers are bounded.

A setting may be read under a condition only, as entmax_alpha is with entmax. The class attribute
``USES`` lists these, one ``Use`` per condition, and ``require_read`` refuses a value that nothing
would read.
"""

import ast
import inspect
import json
import math
import textwrap
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from operator import attrgetter
from types import MappingProxyType, UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_TOML_BYTES = 2**20
_TOML_LINE = 2**13  # a dotted key of n parts takes a time of n^2, and a key ends with its line
_DEPTH = 8  # parts of a dotted name; settings have two
_INTEGERS = 2**64  # seeds are below it


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
    name: str, known: Collection[str], *, show: Callable[[str], str] = repr, cutoff: float = 0.65
) -> str:
    """The end of an error about an unknown name: the most similar known one, or all of them.

    >>> did_you_mean("sofmax", ["softmax", "entmax"])
    "did you mean 'softmax'?"
    >>> did_you_mean("alpha", ["choice", "entmax_alpha"])
    "did you mean 'entmax_alpha'?"
    >>> did_you_mean("relu", ["softmax", "entmax"])
    'known: softmax, entmax.'
    """
    near = get_close_matches(name, known, n=1, cutoff=cutoff)
    near = near or [each for each in known if name in each.split("_")]
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


def to_toml(mapping: Mapping[str, Any], comments: Mapping[str, str] = MappingProxyType({})) -> str:
    """Nested mappings of strings, numbers, booleans and lists of them as TOML text.

    ``comments`` stand above the setting whose dotted name they have.

    >>> print(to_toml({"seed": 1, "train": {"steps": 3}}, {"train.steps": "how long"}), end="")
    seed = 1
    <BLANKLINE>
    [train]
    # how long
    steps = 3
    """

    def entry(name: str, key: str, value: Any) -> list[str]:
        about = textwrap.wrap(comments.get(name, ""), 98)
        return [*(f"# {line}" for line in about), f"{key} = {_toml(value)}"]

    lines = []
    for key, value in mapping.items():
        if not isinstance(value, Mapping):
            lines += entry(key, key, value)
    for section, values in mapping.items():
        if isinstance(values, Mapping):
            lines += ["", f"[{section}]"]
            for key, value in values.items():
                lines += entry(f"{section}.{key}", key, value)
    return "\n".join(lines) + "\n"


class Use(NamedTuple):
    """Settings that are read under a condition only."""

    names: tuple[str, ...]
    """Names of fields, or dotted names of fields of a section."""
    needs: str
    """The condition in words, which follow "it needs"."""
    read: Callable[[Any], bool]
    """The condition, a function of the settings."""


def read_with(names: str, setting: str, *values: str) -> Use:
    """The commonest ``Use``: ``names`` are read where ``setting`` has one of ``values``.

    >>> read_with("score_rate score_radius", "optimiser", "score", "trust").needs
    'optimiser="score" or "trust"'
    """
    *others, last = (f'"{value}"' for value in values)
    words = f"{', '.join(others)} or {last}" if others else last
    return Use(tuple(names.split()), f"{setting}={words}", lambda c: getattr(c, setting) in values)


def require_read(settings: Any) -> None:
    """Refuse a setting that differs from its default although nothing would read it.

    >>> from fenchel.optim import OptimConfig
    >>> OptimConfig(optimiser="adamw", score_rate=0.1)
    Traceback (most recent call last):
    ValueError: score_rate=0.1 would do nothing; it needs optimiser="score" or "trust".
    """
    for names, needs, read in settings.USES:
        if read(settings):
            continue
        for name in names:
            section, _, key = name.rpartition(".")
            owner = attrgetter(section)(settings) if section else settings
            (default,) = (_default(field) for field in fields(owner) if field.name == key)
            if (value := getattr(owner, key)) != default:
                raise ValueError(f"{name}={value!r} would do nothing; it needs {needs}.")


def without_unread(
    cls: Any, given: Mapping[str, Any], preset: Mapping[str, Any], *, where: str = ""
) -> dict[str, Any]:
    """``given`` and, where it gives none, the values of ``preset`` that would be read beside it.

    >>> from fenchel.optim import OptimConfig
    >>> rates = {"learning_rate": 3e-3, "matrix_learning_rate": 3e-3}
    >>> without_unread(OptimConfig, {"optimiser": "adamw"}, rates)
    {'learning_rate': 0.003, 'optimiser': 'adamw'}
    """
    values, types = {**preset, **given}, get_type_hints(cls)
    settings = object.__new__(cls)  # without the checks, which refuse what is dropped here
    for field in fields(cls):
        value = values.get(field.name, _default(field))
        if field.name in values:
            value = _convert(types[field.name], value, f"{where}{field.name}")
        object.__setattr__(settings, field.name, value)
    unread = {name for names, _, read in cls.USES if not read(settings) for name in names}
    return {name: value for name, value in values.items() if name in given or name not in unread}


class Setting(NamedTuple):
    """One row of the reference of settings."""

    name: str
    """Dotted: the section and the key."""
    kind: str
    """Its type in words."""
    default: str
    """As in TOML; empty where there is none, or where it is left out."""
    about: str
    needs: str
    """What it needs to be read; empty where it is always read."""


def reference(cls: Any, where: str = "", uses: Collection[Use] = ()) -> Iterator[Setting]:
    """Every setting of a settings class and of its sections, as text.

    >>> from fenchel.data import TextConfig
    >>> next(reference(TextConfig, "text."))[:3]
    ('text.source', 'str', '"sotu"')
    """
    types, about, sections = get_type_hints(cls), _docstrings(cls), []
    uses = (*uses, *(u._replace(names=[where + n for n in u.names]) for u in cls.USES))
    for field in fields(cls):
        kind, name = types[field.name], f"{where}{field.name}"
        if (section := next(filter(is_dataclass, (kind, *get_args(kind))), None)) is not None:
            sections.append((section, f"{name}."))
            continue
        default = _default(field)
        shown = "" if default in (None, MISSING) else _toml(default)
        needs = [use.needs for use in uses if name in use.names]
        text = about.get(field.name, "").replace("``", "")
        yield Setting(name, _kind_name(kind), shown, text, " and ".join(needs))
    for section, prefix in sections:
        yield from reference(section, prefix, uses)


def _default(field: "Field[Any]") -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _docstrings(cls: type) -> dict[str, str]:
    """The docstrings below the fields of a class, each as one line; none without its source."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, SyntaxError):  # a frozen program, a file that is being edited
        return {}
    assert isinstance(definition, ast.ClassDef)
    pairs = zip(definition.body, definition.body[1:], strict=False)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairs
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _kind_name(kind: Any) -> str:
    """
    >>> _kind_name(int | None), _kind_name(tuple[str, ...])
    ('int', 'list of str')
    """
    if get_origin(kind) is tuple:
        return f"list of {_kind_name(get_args(kind)[0])}"
    choices = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return " or ".join(choice.__name__ for choice in choices if choice is not type(None))


def parse_toml(data: bytes) -> dict[str, Any]:
    """TOML text as nested mappings, in bounded time; ValueError if it is not TOML.

    >>> parse_toml(b"seed = 1")
    {'seed': 1}
    """
    if len(data) > _TOML_BYTES:
        raise ValueError(f"it has {len(data)} bytes; more than {_TOML_BYTES} is not read")
    if (longest := max(map(len, data.splitlines()), default=0)) > _TOML_LINE:
        raise ValueError(f"it has a line of {longest} bytes; more than {_TOML_LINE} is not read")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def assign(mapping: Mapping[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    """A copy of ``mapping`` with ``section.key``, or ``key``, set to a value.

    >>> assign({"seed": 1}, "train.steps", 3)
    {'seed': 1, 'train': {'steps': 3}}
    """
    head, _, rest = dotted.partition(".")
    if rest.count(".") >= _DEPTH:
        raise ValueError(f"there is no setting {_short(dotted)}.")
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
            value = convert(text)
        except (ValueError, RecursionError):  # a number of too many digits, a list too deep
            continue
        if isinstance(value, float) and math.isinf(value) and "inf" not in text.lower():
            break  # a number beyond the largest float
        return value
    return text


def _convert(kind: Any, value: Any, name: str) -> Any:
    choices = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for choice in choices:
        if is_dataclass(choice) and isinstance(value, Mapping):
            return from_mapping(choice, value, where=f"{name}.")  # type: ignore[arg-type]
        if get_origin(choice) is tuple and isinstance(value, list | tuple):
            element = get_args(choice)[0]  # every list of settings is of one type
            return tuple(_convert(element, v, f"{name}[{n}]") for n, v in enumerate(value))
        if isinstance(value, int) and abs(value) >= _INTEGERS:
            raise ValueError(
                f"setting {name!r} should be a number below 2^64, got one of "
                f"{value.bit_length()} bits."
            )
        if choice is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(choice, type) and isinstance(value, choice):
            if choice is int and isinstance(value, bool):
                continue
            return value
        if choice is None and value is None:
            return None
    expected = " or ".join(getattr(c, "__name__", str(c)) for c in choices if c is not type(None))
    raise ValueError(f"setting {name!r} should be {expected}, got {_short(value)}.")


def _short(value: Any) -> str:
    """A value from anywhere as part of a message."""
    try:
        text = ascii(value) if len(str(value)) > 80 else repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits, a list too deep
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."


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
