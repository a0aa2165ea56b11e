"""What a family is: a table of settings and a table of names, each read in both directions.

In and out use the same rows, so they cannot disagree. Whether a ModelConfig can be said in a
family needs no list of exceptions: it is written, read back and compared, and what comes back
different is what the family has no words for.
"""

import math
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fenchel.files import Notice, printable
from fenchel.model.config import ModelConfig
from fenchel.model.families.config_reader import CONFIG, ConfigReader
from fenchel.model.families.setting_rows import HARMLESS, Setting
from fenchel.model.families.tensor_rows import Layout, Row


class Match(NamedTuple):
    """One of our tensors, where it lies in theirs, and how."""

    ours: str
    theirs: tuple[str, ...]
    layout: Layout


@dataclass(frozen=True)
class Family:
    """A model_type: its two tables, and the few names that files may hold besides."""

    name: str
    """The model_type."""
    architecture: str
    """The class that transformers loads it into."""
    settings: tuple[Setting, ...]
    """config.json <-> ModelConfig."""
    tensors: tuple[Row, ...]
    """Names in the files <-> names in the Transformer."""
    prefix: str = ""
    """Begins the names of all but the head; files saved without a head leave it out."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Names under which a file may repeat another tensor."""
    ignored: tuple[str, ...] = ()
    """Patterns of names that a file may hold and that nothing here needs: masks, tables."""
    older: Mapping[str, str] = field(default_factory=dict)
    """Endings of names in older files, and what they became."""
    known_by: str = ""
    """A tensor that tells this one from others of the same model_type."""

    def read(self, config: Mapping[str, Any], tensors: Collection[str], where: Path) -> ModelConfig:
        """Our settings of what a config.json says, with the names of the tensors beside it."""
        said = ConfigReader(config, tensors, where)
        said.ignore(HARMLESS)
        said.only("quantization_config", (None,))
        ours = {name: value for row in self.settings for name, value in row.read(said).items()}
        if unread := said.unread_keys():
            warnings.warn(
                f"{where}: {printable(unread[0])} is no setting of {self.name} "
                "known here; not used.",
                Notice,
                stacklevel=3,
            )
        try:
            return ModelConfig(**ours)
        except ValueError as error:
            raise ValueError(
                f"{where} asks for a model that cannot be: {printable(error, 300)}"
            ) from None

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """What a config.json of this family says for our settings; see ``cannot_express``."""
        theirs: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.name}
        for row in self.settings:
            theirs |= row.write(config)
        return theirs

    def matches(self, config: ModelConfig, ours: Iterable[str]) -> list[Match]:
        """Where each of our tensors lies; ValueError names one that has no place."""
        found, homeless = self._placed(config, ours)
        if homeless:
            raise ValueError(f"{self.name} has no place for {homeless[0]}.")
        return found

    def _placed(self, config: ModelConfig, ours: Iterable[str]) -> tuple[list[Match], list[str]]:
        """Where our tensors layout, and those that have no place."""
        rows = [row for row in self.tensors if row.when(config)]
        tried = {name: _match(name, rows) for name in ours}
        found = [match for match in tried.values() if match is not None]
        return found, [name for name, match in tried.items() if match is None]

    def is_ignored(self, name: str) -> bool:
        """Whether a file may hold ``name`` although nothing here needs it."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def current_name(self, name: str) -> str:
        """The name that newer files give what an older one calls ``name``."""
        for old, new in self.older.items():
            if name.endswith(old):
                return name.removesuffix(old) + new
        return name

    def cannot_express(self, config: ModelConfig, ours: Iterable[str]) -> list[str]:
        """What this family has no words for: settings, as name=value, and tensors."""
        found, homeless = self._placed(config, ours)
        theirs = [name for match in found for name in match.theirs]
        try:
            back = self.read(self.write(config), theirs, Path(CONFIG))
        except ValueError as error:
            return [str(error), *homeless]
        wanted, got = resolved(config), resolved(back)
        other = [name for name in wanted if wanted[name] != got.get(name)]
        return [*(f"{name}={wanted[name]!r}" for name in other), *homeless]


def resolved(config: ModelConfig) -> dict[str, Any]:
    """What a model computes, by setting: defaults filled in, what only training reads left out."""
    layers = range(config.layers)
    kept = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in _TRAINING}
    kept |= {
        "kv_heads": config.groups,
        "head_size": config.head_width,
        "hidden": config.mlp_width,
        "qkv_bias": config.has_qkv_bias,
        "residual_scale": config.branch_scale,
        "distinct_layers": config.distinct_layers or config.layers,
        "encoder_layers": config.encoder_layers or config.layers,
        "score_scale": config.score_scale or config.head_width**-0.5,
        "windows": _alike(config.window(layer) for layer in layers),
        "choice": _alike(config.choice_of(layer) for layer in layers),
    }
    del kept["layer_choices"]
    if "entmax" not in kept["choice"]:
        del kept["alpha"]
    if config.positions != "rotary":
        return {name: value for name, value in kept.items() if not name.startswith("rotary_")}
    return kept | _resolved_rotary(config)


def _alike(values: Iterable[Any]) -> Any:
    """One value where all layers have the same."""
    each = tuple(values)
    return each[0] if len(set(each)) == 1 else each


def _resolved_rotary(config: ModelConfig) -> dict[str, Any]:
    local = config.rotary_local_base or config.rotary_base
    blended = config.rotary_scaling in ("yarn", "llama3")
    fast = 32.0 if config.rotary_scaling == "yarn" else 4.0
    growth = 0.1 * math.log(config.rotary_factor) + 1.0 if config.rotary_factor > 1 else 1.0
    return {
        "rotary_trained_context": config.rotary_trained_context or config.context
        if blended
        else None,
        "rotary_slow": config.rotary_slow or 1.0 if blended else None,
        "rotary_fast": config.rotary_fast or fast if blended else None,
        "rotary_attention": config.rotary_attention or growth,
        "rotary_local_base": local if any(config.windows) else None,
    }


def _match(name: str, rows: Iterable[Row]) -> Match | None:
    for row in rows:
        if found := _pattern(row.ours).fullmatch(name):
            theirs = tuple(one.format(*found.groups()) for one in row.theirs)
            return Match(name, theirs, row.layout)
    return None


@cache
def _pattern(name: str) -> re.Pattern[str]:
    """A name of the table as a pattern; {} is the number of a layer."""
    return re.compile(re.escape(name).replace(r"\{\}", r"(\d+)"))


_TRAINING = {
    *("dropout", "attention_dropout", "mlp_dropout"),
    *("initial", "initial_std", "initial_qk", "initial_depth"),
}
