"""Settings of a config.json, read one at a time and checked for type and range.

Each read returns a plain value, or raises a sentence that names the file, the key and what was
expected. Sizes are bounded here, before any two of them are multiplied. Keys that were never read
are listed at the end (``unread_keys``), so that no setting is accepted and then silently unused.
"""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fenchel.files import printable
from fenchel.model.config import LARGEST

CONFIG = "config.json"
LISTED_LAYERS = 4096
"""More are not listed one by one."""
_MISSING = object()


class ConfigReader:
    """The settings of a config.json, the names of the tensors beside it, and the keys read so far.

    >>> reader = ConfigReader({"n_layer": 12, "n_head": 0}, (), Path("config.json"))
    >>> reader.integer("n_layer"), reader.unread_keys()
    (12, ['n_head'])
    >>> reader.integer("n_head")
    Traceback (most recent call last):
        ...
    ValueError: config.json: n_head=0 should be a whole number, 1 to 16777216.
    """

    def __init__(self, settings: Mapping[str, Any], tensors: Collection[str], where: Path) -> None:
        self.settings, self.tensors, self.where = settings, tensors, where
        self.read_keys: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key has a value other than null."""
        return self._get(key, None) is not None

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer, ``least`` to 2^24."""
        value = self._value(key, default)
        if type(value) is not int or not least <= value <= LARGEST:
            raise self.wrong(key, value, f"a whole number, {least} to {LARGEST}")
        return value

    def layers(self) -> int:
        """``num_hidden_layers`` of a family whose layers differ."""
        layers = self.integer("num_hidden_layers")
        if layers > LISTED_LAYERS:
            raise self.wrong("num_hidden_layers", layers, f"at most {LISTED_LAYERS}")
        return layers

    def integer_or_none(self, key: str, *, least: int = 1) -> int | None:
        """An integer, or None where there is none or null."""
        return self.integer(key, least=least) if self.has(key) else None

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, value, "a number")
        if not abs(value) < 1e30 or math.isnan(value):
            raise self.wrong(key, value, "a finite number")
        return float(value)

    def positive(self, key: str, default: float) -> float:
        """A finite number above 0."""
        value = self.number(key, default)
        if not value > 0:
            raise self.wrong(key, value, "a number above 0")
        return value

    def number_or_none(self, key: str, default: float | None = None) -> float | None:
        """A finite number, None for null, or the default for a missing key."""
        if key in self.settings:
            return self.number(key) if self.has(key) else None
        return default

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def word(self, key: str, words: Mapping[str, str], default: str | None = None) -> str:
        """Our value for one of the strings that a family uses."""
        value = self._value(key, default)
        if not isinstance(value, str) or value not in words:
            raise self.wrong(key, value, f"one of {', '.join(words)}")
        return words[value]

    def part(self, key: str) -> "ConfigReader":
        """A reader of the object under a key; empty where it is missing or null."""
        value = self._get(key, None)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.wrong(key, value, "an object")
        return ConfigReader(value, self.tensors, self.where)

    def words(self, key: str, words: Collection[str], count: int) -> list[str] | None:
        """A list of ``count`` strings out of ``words``, or None where it is missing or null."""
        value = self._get(key, None)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count:
            raise self.wrong(key, value, f"a list of {count}, one for each layer")
        for word in value:
            if not isinstance(word, str) or word not in words:
                raise self.wrong(key, word, f"a list of {' and '.join(words)}")
        return value

    def switches(self, key: str, count: int) -> list[int] | None:
        """A list of at least ``count`` zeros and ones, or None where it is missing or null."""
        value = self._get(key, None)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < count or any(x not in (0, 1) for x in value):
            raise self.wrong(key, value, f"a list of 0 and 1, at least {count}")
        return [int(x) for x in value[:count]]

    def integers(self, key: str) -> list[int]:
        """A list of whole numbers, such as those of layers; empty where it is missing or null."""
        value = self._get(key, None)
        if value is None:
            return []
        whole = isinstance(value, list) and len(value) <= LISTED_LAYERS
        if not whole or any(type(n) is not int for n in value):
            raise self.wrong(key, value, "a list of whole numbers")
        return list(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        value = self._value(key, None)
        if not isinstance(value, list):
            raise self.wrong(key, value, "a list of numbers")
        each = ConfigReader({key: None}, (), self.where)
        for number in value:
            each.settings = {key: number}
            each.number(key)
        return tuple(float(number) for number in value)

    def only(self, key: str, allowed: Collection[Any]) -> None:
        """Raise ValueError for a value that is present and not one of ``allowed``."""
        value = self._get(key, _MISSING)
        if value is not _MISSING and not any(value is a or _same(value, a) for a in allowed):
            raise ValueError(
                f"{self.where}: {key}={printable(repr(value))} is a variant that fenchel does "
                "not have."
            )

    def ignore(self, keys: Collection[str]) -> None:
        """Count these keys as read: they do not affect what the model computes."""
        self.read_keys.update(keys)

    def unread_keys(self) -> list[str]:
        """Keys with a value other than null that were not read."""
        return sorted(
            k for k, v in self.settings.items() if k not in self.read_keys and v is not None
        )

    def wrong(self, key: str, value: Any, expected: str) -> ValueError:
        """The error for a value that is not what was ``expected``."""
        if value is _MISSING:
            return ValueError(f"{self.where} lacks {key}, which should be {expected}.")
        return ValueError(f"{self.where}: {key}={printable(repr(value))} should be {expected}.")

    def _get(self, key: str, default: Any) -> Any:
        self.read_keys.add(key)
        return self.settings.get(key, default)

    def _value(self, key: str, default: Any) -> Any:
        return self._get(key, _MISSING if default is None else default)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)
