"""A family: a table of settings and a table of tensor names, each read in both directions.

Loading and saving use the same rows, so they cannot disagree. Whether a family can express a
ModelConfig needs no list of exceptions: it is written, read back and compared, and what comes back
different is what the family cannot express.

The directory of a larger model, such as one with an image tower, holds the settings of its text
model under one key (``inner``) and its tensors under longer names; towers are left out, which a
notice says, and the text model is written as one of its own.

Besides its own settings a family reads the choice map that ``fenchel attach`` adds to a
config.json. It writes none, since transformers would silently compute a softmax.
"""

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fenchel.choice.by_name import FIELD, choice_from_record, choice_record, maps_with
from fenchel.files import Notice, printable
from fenchel.model.config import ModelConfig
from fenchel.model.families.config_reader import CONFIG, ConfigReader
from fenchel.model.families.setting_rows import HARMLESS, Setting
from fenchel.model.families.tensor_rows import Layout, Row


class Match(NamedTuple):
    """One of our tensors, the tensors of the family that hold it, and their layout."""

    ours: str
    theirs: tuple[str, ...]
    layout: Layout
    config: ModelConfig
    """The settings, with the sizes of its layer."""

    def split(self, ours: Tensor) -> list[Tensor]:
        """Our tensor as theirs."""
        return self.layout.split(ours, self.config)

    def join(self, theirs: Sequence[Tensor]) -> Tensor:
        """Their tensors as ours."""
        return self.layout.join(theirs, self.config)


_CHOICE_SETTINGS = {"alpha": "entmax_alpha", "beta": "beta", "log_odds": "log_odds"}
"""Settings of a choice map, and of a model."""
_NAMED = 12  # of the settings that are not known, those that a warning names


@dataclass(frozen=True)
class Family:
    """A model_type: its two tables, and the few other names that its files may hold."""

    name: str
    """The model_type."""
    architecture: str
    """The class that transformers loads it into."""
    settings: tuple[Setting, ...]
    """config.json <-> ModelConfig."""
    tensors: tuple[Row, ...]
    """Names in the files <-> names in the Transformer."""
    prefix: str = ""
    """Prefix of all names but those of the head; files saved without a head leave it out."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Names under which a file may repeat another tensor."""
    ignored: tuple[str, ...] = ()
    """Patterns of names that a file may hold and the model does not need: masks, tables."""
    unused: Callable[[ModelConfig], str | None] = lambda _: None
    """A pattern of names that a file may hold and a model of these settings does not need."""
    legacy_suffixes: Mapping[str, str] = field(default_factory=dict)
    """Suffixes of names in older files, and their current form."""
    inner: str = ""
    """The key of config.json that holds the settings, in the directory of a larger model."""
    long_prefixes: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of names in the directory of a larger model, and those of the family."""
    towers: tuple[str, ...] = ()
    """Prefixes of the names of its other parts, which are left out."""
    marker: str = ""
    """A tensor that distinguishes this family from others of the same model_type."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that a config.json may leave out, where those of the rows are others."""

    def read(self, config: Mapping[str, Any], tensors: Collection[str], where: Path) -> ModelConfig:
        """The ModelConfig of a config.json, given the names of the tensors beside it."""
        names = [self.current_name(name) for name in tensors]
        reader = ConfigReader({**self.defaults, **self.settings_in(config, names)}, names, where)
        reader.ignore(HARMLESS)
        ours = {name: value for row in self.settings for name, value in row.read(reader).items()}
        ours |= _attached_choice(reader)
        if self.inner:
            self._name_left_out(config, tensors, where)
        if unread := reader.unread_keys():
            listed = ", ".join(printable(key, 40) for key in unread[:_NAMED])
            more = f" and {len(unread) - _NAMED} more" if len(unread) > _NAMED else ""
            verb = "is" if len(unread) == 1 else "are each"
            warnings.warn(
                f"{where}: {listed}{more} {verb} no setting of {self.name} known here; not used.",
                Notice,
                stacklevel=3,
            )
        try:
            return ModelConfig(**ours)
        except ValueError as error:
            raise ValueError(
                f"{where} describes an impossible model: {printable(error, 300)}"
            ) from None

    def settings_in(self, config: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
        """The settings of the family in a config.json, given the current names of the tensors.

        In the directory of a larger model the outer settings decide whether the LM head is tied, as
        in transformers, which then uses an LM head of its own where the files have one.
        """
        if not self.inner:
            return config
        inner = config.get(self.inner) or {}
        if not isinstance(inner, Mapping):
            raise ValueError(f"{CONFIG}: {self.inner} should be an object.")
        given = {key: value for key, value in config.items() if value is not None}
        own = {key: given[key] for key in given if key in HARMLESS or key == FIELD}
        tied = False if "lm_head.weight" in names else config.get("tie_word_embeddings", True)
        own |= {"architectures": [self.architecture], "model_type": self.name}
        return {**self.defaults, **inner, **own, "tie_word_embeddings": tied}

    def _name_left_out(
        self, config: Mapping[str, Any], tensors: Collection[str], where: Path
    ) -> None:
        """A notice of the settings and tensors that belong to other parts of a larger model."""
        known = {*HARMLESS, FIELD, self.inner, "tie_word_embeddings"}
        keys = [printable(key, 40) for key in config if key not in known][:_NAMED]
        counts = {tower: sum(name.startswith(tower) for name in tensors) for tower in self.towers}
        parts = [f"{tower}* ({count} tensors)" for tower, count in counts.items() if count]
        warnings.warn(
            f"{where}: the text model is read, as {self.name}; left out are "
            f"{', '.join([*parts, *sorted(keys)]) or 'no other parts'}.",
            Notice,
            stacklevel=4,
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """The config.json of this family for a ModelConfig; see ``cannot_express``."""
        theirs: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.name}
        for row in self.settings:
            theirs |= row.write(config)
        return theirs

    def matches(self, config: ModelConfig, ours: Iterable[str]) -> list[Match]:
        """The match of each of our tensors; raises for one that the family has no tensor for."""
        matches, unmatched = self._match_all(config, ours)
        if unmatched:
            raise ValueError(f"{self.name} has no place for {unmatched[0]}.")
        return matches

    def _match_all(self, config: ModelConfig, ours: Iterable[str]) -> tuple[list[Match], list[str]]:
        """The matches of our tensors, and the names of those without one."""
        rows = [row for row in self.tensors if row.when(config)]
        matches = {name: _match(name, rows, config) for name in ours}
        unmatched = [name for name, match in matches.items() if match is None]
        return [match for match in matches.values() if match is not None], unmatched

    def shared_names(self, tensors: Iterable[str]) -> int:
        """How many of these names are names of tensors of the family."""
        patterns = {_pattern(name) for row in self.tensors for name in row.theirs}
        return sum(any(one.fullmatch(name) for one in patterns) for name in tensors)

    @property
    def lists_experts(self) -> bool:
        """Whether each expert has tensors of its own."""
        return any(_EXPERT in name for row in self.tensors for name in row.theirs)

    def is_ignored(self, name: str) -> bool:
        """Whether a file may hold ``name`` although the model does not need it."""
        ignored = any(re.fullmatch(pattern, name) for pattern in self.ignored)
        return ignored or name.startswith(self.towers)

    def current_name(self, name: str) -> str:
        """The current form of a name of an older file, or of the directory of a larger model."""
        for long, own in self.long_prefixes.items():
            if name.startswith(long):
                return own + name.removeprefix(long)
        for old, new in self.legacy_suffixes.items():
            if name.endswith(old):
                return name.removesuffix(old) + new
        return name

    def cannot_express(self, config: ModelConfig, ours: Iterable[str]) -> list[str]:
        """What this family has no place for: settings, as name=value, and tensors."""
        matches, unmatched = self._match_all(config, ours)
        theirs = [name for match in matches for name in match.theirs]
        try:
            back = self.read(self.write(config), theirs, Path(CONFIG))
        except ValueError as error:
            return [str(error), *unmatched]
        before, after = resolved(config), resolved(back)
        lost = [name for name in before if before[name] != after.get(name)]
        return [*(f"{name}={before[name]!r}" for name in lost), *unmatched]


def _attached_choice(reader: ConfigReader) -> dict[str, Any]:
    """The choice map that ``fenchel attach`` wrote into a config.json; empty where it did not."""
    if not reader.has(FIELD):
        return {}
    try:
        record = choice_record(choice_from_record(reader.settings[FIELD]))
    except ValueError as error:
        raise ValueError(f"{reader.where}: {printable(error, 200)}") from None
    name = record.pop("map")
    if unknown := sorted(record.keys() - _CHOICE_SETTINGS.keys()):
        raise ValueError(
            f"{reader.where}: {unknown[0]} of {name} is not a setting of a model here."
        )
    return {"choice": name, **{_CHOICE_SETTINGS[key]: value for key, value in record.items()}}


def resolved(config: ModelConfig) -> dict[str, Any]:
    """The settings that decide what a model computes, with defaults filled in."""
    layers = range(config.layers)
    settings = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in _TRAINING}
    settings |= {
        "kv_heads": config.groups,
        "head_size": config.head_width,
        "hidden": config.mlp_width,
        "full_head_size": config.full_head_size or config.head_width,
        "full_kv_heads": config.full_kv_heads or config.groups,
        "shared_hidden": config.shared_hidden or config.mlp_width,
        "qkv_bias": config.has_qkv_bias,
        "residual_scale": config.branch_scale,
        "distinct_layers": config.distinct_layers or config.layers,
        "encoder_layers": config.encoder_layers or config.layers,
        "score_scale": config.score_scale or config.head_width**-0.5,
        "temperature_growth": config.temperature_growth or 0.1,
        "temperature_floor": config.temperature_step,
        "temperature_layers": _alike(config.tempered(layer) for layer in layers),
        "dense_hidden": config.dense_hidden or config.mlp_width,
        "dense_layers": _alike(config.has_experts(layer) for layer in layers),
        "rotary_layers": _alike(config.rotates(layer) for layer in layers),
        "windows": _alike(config.window(layer) for layer in layers),
        "delta_layers": _alike(config.is_delta(layer) for layer in layers),
        "choice": _alike(config.choice_of(layer) for layer in layers),
    }
    del settings["layer_choices"]
    if config.temperature != "stepped":
        settings |= dict.fromkeys(("temperature_growth", "temperature_floor"))
    choices = {config.choice_of(layer) for layer in layers}
    for key, name in _CHOICE_SETTINGS.items():
        if choices.isdisjoint(maps_with(key)):
            del settings[name]
    if config.positions != "rotary":
        return {name: value for name, value in settings.items() if not name.startswith("rotary_")}
    return settings | _resolved_rotary(config)


def _alike(values: Iterable[Any]) -> Any:
    """One value where all layers have the same."""
    each = tuple(values)
    return each[0] if len(set(each)) == 1 else each


def _resolved_rotary(config: ModelConfig) -> dict[str, Any]:
    local = config.rotary_local_base  # its frequencies are not scaled
    if local is None and config.rotary_scaling is None:
        local = config.rotary_base
    blended = config.rotary_scaling in ("yarn", "llama3")
    fast = 32.0 if config.rotary_scaling == "yarn" else 4.0
    growth = 0.1 * math.log(config.rotary_factor) + 1.0 if config.rotary_factor > 1 else 1.0
    return {
        "rotary_trained_context": config.rotary_trained_context or config.context
        if blended or config.rotary_scaling == "longrope"
        else None,
        "rotary_slow": config.rotary_slow or 1.0 if blended else None,
        "rotary_fast": config.rotary_fast or fast if blended else None,
        "rotary_attention": config.rotary_attention or growth,
        "rotary_local_base": local if any(config.windows) else None,
    }


def _match(name: str, rows: Iterable[Row], config: ModelConfig) -> Match | None:
    for row in rows:
        if match := _pattern(row.ours).fullmatch(name):
            layer = int(match[1]) if match.groups() else None
            if layer is not None and not row.at(config, layer):
                continue
            theirs = tuple(
                their_name.format(*match.groups(), expert=expert)
                for their_name in row.theirs
                for expert in range(config.experts if _EXPERT in their_name else 1)
            )
            return Match(
                name, theirs, row.layout, config if layer is None else config.at_layer(layer)
            )
    return None


_EXPERT = "{expert}"


@cache
def _pattern(name: str) -> re.Pattern[str]:
    """A name of the table as a pattern; {} is the number of a layer, {expert} of an expert."""
    return re.compile(re.escape(name.replace(_EXPERT, "{}")).replace(r"\{\}", r"(\d+)"))


_TRAINING = {
    *("dropout", "attention_dropout", "mlp_dropout"),
    *("initial", "initial_std", "initial_qk", "initial_distances", "initial_depth"),
}
