"""What a family is: a table of settings and a table of names, each read in both directions.

    settings   rows  config.json <-> ModelConfig
    tensors    rows  names in the files <-> names in the Transformer, and how the numbers lie

In and out use the same rows, so they cannot disagree. Whether a ModelConfig can be said in a
family needs no list of exceptions: it is written, read back and compared, and what comes back
different is what the family has no words for.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fenchel.model.config import ModelConfig
from fenchel.model.families.said import Said
from fenchel.model.header import shown

Settings = dict[str, Any]


class Setting(NamedTuple):
    """A row of the first table: what config.json says to ours, and ours to what it says."""

    read: Callable[[Said], Settings]
    write: Callable[[ModelConfig], Settings]


def size(ours: str, theirs: str) -> Setting:
    """A whole number that must be said."""
    return Setting(lambda c: {ours: c.whole(theirs)}, lambda m: {theirs: getattr(m, ours)})


def number(ours: str, theirs: str, default: float) -> Setting:
    """A finite number."""
    return Setting(
        lambda c: {ours: c.number(theirs, default)}, lambda m: {theirs: getattr(m, ours)}
    )


def flag(ours: str, theirs: str, default: bool) -> Setting:
    """True or false."""
    return Setting(lambda c: {ours: c.flag(theirs, default)}, lambda m: {theirs: getattr(m, ours)})


def word(ours: str, theirs: str, words: Mapping[str, str], default: str | None = None) -> Setting:
    """A word; ``words`` is from theirs to ours, and the first of several is the one written."""
    back = {mine: yours for yours, mine in reversed(words.items())}
    return Setting(
        lambda c: {ours: c.word(theirs, words, default)},
        lambda m: {theirs: back.get(getattr(m, ours), next(iter(words)))},
    )


def always(**ours: Any) -> Setting:
    """What is so in every model of the family, and not said."""
    return Setting(lambda _: ours, lambda _: {})


def only(theirs: str, *allowed: Any) -> Setting:
    """Variants that we do not have: anything but ``allowed`` is refused."""

    def read(c: Said) -> Settings:
        c.only(theirs, allowed)
        return {}

    return Setting(read, lambda _: {})


def unread(*theirs: str) -> Setting:
    """Keys that have no bearing on what the model computes."""

    def read(c: Said) -> Settings:
        c.ignore(theirs)
        return {}

    return Setting(read, lambda _: {})


class Lie(Protocol):
    """How the numbers of one of our tensors lie in theirs."""

    def join(self, theirs: Sequence[Tensor], config: ModelConfig) -> Tensor:
        """Theirs to ours."""

    def split(self, ours: Tensor, config: ModelConfig) -> list[Tensor]:
        """Ours to theirs."""


class Row(NamedTuple):
    """A row of the second table; {} stands for the number of a layer."""

    ours: str
    theirs: tuple[str, ...]
    lie: Lie


class _Same:
    """Number for number."""

    def join(self, theirs: Sequence[Tensor], config: ModelConfig) -> Tensor:  # noqa: ARG002
        return theirs[0]

    def split(self, ours: Tensor, config: ModelConfig) -> list[Tensor]:  # noqa: ARG002
        return [ours]


class _Turned:
    """Theirs maps by x W, ours by x W^T; copied, since a checkpoint is saved row by row."""

    def join(self, theirs: Sequence[Tensor], config: ModelConfig) -> Tensor:  # noqa: ARG002
        return theirs[0].t().contiguous()

    def split(self, ours: Tensor, config: ModelConfig) -> list[Tensor]:  # noqa: ARG002
        return [ours.t()]


class _Stacked:
    """Queries, keys and values are one map of ours and three of theirs; joined by copying."""

    def join(self, theirs: Sequence[Tensor], config: ModelConfig) -> Tensor:  # noqa: ARG002
        return torch.cat(list(theirs))

    def split(self, ours: Tensor, config: ModelConfig) -> list[Tensor]:
        H, G, D = config.heads, config.groups, config.head_width
        return list(ours.split([H * D, G * D, G * D]))


class _HeadByHead:
    """Theirs has head 1's query, key and value, then head 2's; ours all queries first."""

    def join(self, theirs: Sequence[Tensor], config: ModelConfig) -> Tensor:
        x = theirs[0]
        return x.unflatten(0, (config.heads, 3, config.head_width)).transpose(0, 1).reshape(x.shape)

    def split(self, ours: Tensor, config: ModelConfig) -> list[Tensor]:
        lie = ours.unflatten(0, (3, config.heads, config.head_width)).transpose(0, 1)
        return [lie.reshape(ours.shape)]


SAME, TURNED, STACKED, HEAD_BY_HEAD = _Same(), _Turned(), _Stacked(), _HeadByHead()


def both(ours: str, theirs: str | Sequence[str], lie: Lie = SAME) -> tuple[Row, Row]:
    """Rows for the weight and the bias of a map or a norm."""
    names = (theirs,) if isinstance(theirs, str) else tuple(theirs)
    weight = Row(f"{ours}.weight", tuple(f"{n}.weight" for n in names), lie)
    return weight, Row(f"{ours}.bias", tuple(f"{n}.bias" for n in names), _of_bias(lie))


def weight(ours: str, theirs: str, lie: Lie = SAME) -> Row:
    """The row for a map or a table without bias."""
    return Row(f"{ours}.weight", (f"{theirs}.weight",), lie)


def _of_bias(lie: Lie) -> Lie:
    return SAME if lie is TURNED else lie


class Match(NamedTuple):
    """One of our tensors, where it lies in theirs, and how."""

    ours: str
    theirs: tuple[str, ...]
    lie: Lie


@dataclass(frozen=True)
class Family:
    """A model_type: its two tables, and the few names that files may hold besides."""

    name: str
    """The model_type."""
    architecture: str
    """The class that transformers loads it into."""
    settings: tuple[Setting, ...]
    tensors: tuple[Row, ...]
    prefix: str = ""
    """Begins the names of all but the head; files saved without a head leave it out."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Names under which a file may repeat another tensor."""
    ignored: tuple[str, ...] = ()
    """Patterns of names that a file may hold and that nothing here needs: masks, tables."""

    def read(self, config: Mapping[str, Any], tensors: Sequence[str], where: Path) -> ModelConfig:
        """Our settings of what a config.json says, with the names of the tensors beside it."""
        said = Said(config, tensors, where)
        said.ignore(HARMLESS)
        said.only("quantization_config", (None,))
        ours = {name: value for row in self.settings for name, value in row.read(said).items()}
        if unasked := said.unasked():
            warnings.warn(
                f"{where}: {shown(unasked[0])} is no setting of {self.name} known here; not used.",
                stacklevel=3,
            )
        try:
            return ModelConfig(**ours)
        except ValueError as error:
            raise ValueError(f"{where} asks for a model that cannot be: {shown(error, 300)}") from None

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """What a config.json of this family says for our settings; see ``unsaid``."""
        theirs: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.name}
        for row in self.settings:
            theirs |= row.write(config)
        return theirs

    def matches(self, ours: Sequence[str]) -> list[Match]:
        """Where each of our tensors lies; ValueError names one that has no place."""
        rows = [(re.compile(_pattern(row.ours)), row) for row in self.tensors]
        return [_match(name, rows, self.name) for name in ours]

    def is_ignored(self, name: str) -> bool:
        """Whether a file may hold ``name`` although nothing here needs it."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def unsaid(self, config: ModelConfig, ours: Sequence[str]) -> list[str]:
        """Settings, as name=value, that this family has no words for."""
        try:
            theirs = [name for match in self.matches(ours) for name in match.theirs]
        except ValueError as error:
            return [str(error)]
        try:
            back = self.read(self.write(config), theirs, Path(self.name))
        except ValueError as error:
            return [str(error)]
        wanted, got = resolved(config), resolved(back)
        return [f"{name}={wanted[name]!r}" for name in wanted if wanted[name] != got[name]]


def resolved(config: ModelConfig) -> dict[str, Any]:
    """What a model computes, by name: defaults filled in, what only training reads left out."""
    kept = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in _TRAINING}
    layers = range(config.layers)
    kept |= {
        "kv_heads": config.groups,
        "head_size": config.head_width,
        "hidden": config.mlp_width,
    }
    if "entmax" not in str(kept.get("choice")) + str(kept.get("layer_choices")):
        kept.pop("alpha")
    if config.positions != "rotary":
        kept.pop("rotary_base")
    return kept | _patterns(config, layers)


def _patterns(config: ModelConfig, layers: range) -> dict[str, Any]:
    return {"choice": tuple(config.choice for _ in layers)}


def _match(name: str, rows: Sequence[tuple[re.Pattern[str], Row]], family: str) -> Match:
    for pattern, row in rows:
        if found := pattern.fullmatch(name):
            numbers = found.groups()
            return Match(name, tuple(theirs.format(*numbers) for theirs in row.theirs), row.lie)
    raise ValueError(f"{family} has no place for {name}")


def _pattern(name: str) -> str:
    return re.escape(name).replace(r"\{\}", r"(\d+)")


_TRAINING = {"dropout"}
HARMLESS = frozenset()


def iterate(families: Sequence[Family]) -> Iterator[str]:
    """Names of families."""
    return (family.name for family in families)
