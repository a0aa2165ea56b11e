"""Rotary positions in config.json: the newer form and the older one.

    newer   "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, ...}
    older   "rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, ...}

The newer form is written. Frequencies that depend on the length of the sequence ("dynamic") are
refused: keys in a cache would have to be rotated again. "longrope" (Phi-3) has two lists of
divisors, of which transformers takes the second for a sequence longer than the trained context and
rotates keys in a cache by the first. A model is read with the trained context and the first list;
``with_context`` of more takes the second for every length.
"""

import math
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fenchel.files import Notice
from fenchel.model.config import ModelConfig
from fenchel.model.families.config_reader import ConfigReader
from fenchel.model.families.setting_rows import Setting, Settings

_TYPES = {"default": "default", "linear": "linear", "yarn": "yarn", "llama3": "llama3"}
_FRACTION = "partial_rotary_factor"
_TRAINED = "original_max_position_embeddings"


def rope(
    base: float = 10000.0,
    types: Mapping[str, str] = _TYPES,
    missing: Mapping[str, Any] = MappingProxyType({}),
) -> Setting:
    """One rotary embedding of whole heads for all layers, one of ``types``.

    ``base`` is the default, ``missing`` are the parameters where a file has none.
    """

    def read(c: ConfigReader) -> Settings:
        parameters = rope_parameters(c, missing)
        settings = _read_parameters(c, parameters, base, types=types)
        _require_whole_heads(c, parameters, scaled="rotary_scaling" in settings)
        return settings

    return Setting(read, lambda m: {"rope_parameters": _parameters(m, m.rotary_base)})


def partial_rope(base: float, fraction: float, types: Mapping[str, str] = _TYPES) -> Setting:
    """Rotary embedding of a fraction of each head (GPT-NeoX, Phi-3), one of ``types``.

    ``base`` and ``fraction`` are the defaults.
    """

    def read(c: ConfigReader) -> Settings:
        parameters = rope_parameters(c)
        older = c.number(_FRACTION, c.number("rotary_pct", fraction))
        settings = {"rotary_fraction": parameters.number(_FRACTION, older)}
        return settings | _read_parameters(c, parameters, base, types=types)

    def write(m: ModelConfig) -> Settings:
        return {"rope_parameters": _parameters(m, m.rotary_base) | {_FRACTION: m.rotary_fraction}}

    return Setting(read, write)


def rope_with_local_base(
    base: float,
    local: float,
    windows: Setting,
    older: tuple[str, str] = ("rope_theta", "rope_local_base_freq"),
    types: Mapping[str, str] = _TYPES,
    missing: Mapping[str, Any] = MappingProxyType({}),
) -> Setting:
    """Layers with a window have their own rotary base, ``local`` by default.

    ``older`` are the keys of the two bases in older files; ``types`` are those of layers without a
    window, and ``missing`` their parameters where a file has none.
    """

    def read(c: ConfigReader) -> Settings:
        parameters, older_full = c.part("rope_parameters"), c.part("rope_scaling").settings
        both = {**parameters.part("full_attention").settings, **older_full} or missing
        full, sliding = ConfigReader(both, (), c.where), parameters.part("sliding_attention")
        base_of_file = c.number(older[0], base)
        settings = _read_parameters(c, full, base_of_file, nested=True, types=types)
        settings |= windows.read(c)
        if settings.get("rotary_scaling") != "proportional":
            _require_whole_heads(c, full, scaled="rotary_scaling" in settings)
        _require_whole_heads(c, sliding, scaled=False)
        sliding.only("rope_type", ("default",))
        local_base = sliding.number("rope_theta", c.number(older[1], local))
        return settings | ({"rotary_local_base": local_base} if "windows" in settings else {})

    def write(m: ModelConfig) -> Settings:
        local_base = m.rotary_base if m.rotary_local_base is None else m.rotary_local_base
        layers = {
            "full_attention": _parameters(m, m.rotary_base),
            "sliding_attention": {"rope_type": "default", "rope_theta": local_base},
        }
        return windows.write(m) | {"rope_parameters": layers}

    return Setting(read, write)


def rope_parameters(
    c: ConfigReader, missing: Mapping[str, Any] = MappingProxyType({})
) -> ConfigReader:
    """A reader of the parameters, or of ``missing`` where there are none."""
    parameters = c.part(_key(c))
    return parameters if parameters.settings else ConfigReader(missing, c.tensors, c.where)


def _key(c: ConfigReader) -> str:
    """The key that holds the parameters; ``rope_scaling`` wins, as it does in transformers."""
    c.ignore(("rope_parameters", "rope_scaling"))
    return "rope_scaling" if c.has("rope_scaling") else "rope_parameters"


def _require_whole_heads(c: ConfigReader, parameters: ConfigReader, *, scaled: bool) -> None:
    """Warn of a fraction of rotated entries, which transformers reads in scaled frequencies only.

    There it fails: the frequencies of a fraction do not fit the head.
    """
    for reader in (c, parameters):
        if reader.number(_FRACTION, 1.0) == 1.0:
            continue
        if scaled:
            reader.only(_FRACTION, ())
        warnings.warn(
            f"{c.where}: {_FRACTION}={reader.number(_FRACTION):g} is not used; models of this "
            "family rotate whole heads, in transformers as here.",
            Notice,
            stacklevel=5,
        )


def _read_parameters(
    c: ConfigReader,
    parameters: ConfigReader,
    base: float,
    *,
    nested: bool = False,
    types: Mapping[str, str] = _TYPES,
) -> Settings:
    """The settings of ``parameters``, those of one kind of layers where they are ``nested``.

    A trained context outside the parameters wins over the one inside, and does not exist for nested
    ones; nested ones have no ``truncate``. Both as in transformers.
    """
    key = "rope_type" if parameters.has("rope_type") else "type"
    kind = parameters.word(key, types, "default")
    older = c.number("rotary_emb_base" if c.has("rotary_emb_base") else "rope_theta", base)
    settings: dict[str, Any] = {
        "positions": "rotary",
        "rotary_base": parameters.number("rope_theta", older),
    }
    if kind == "default":
        return settings
    if kind == "longrope":
        return settings | _read_longrope(c, parameters)
    if kind == "proportional":
        return settings | {
            "rotary_scaling": kind,
            "rotary_fraction": parameters.number(_FRACTION, 1.0),
            "rotary_factor": parameters.number("factor", 1.0),
        }
    settings |= {"rotary_scaling": kind, "rotary_factor": parameters.number("factor")}
    if kind == "linear":
        return settings
    outside = None if nested else c.integer_or_none(_TRAINED)
    settings["rotary_trained_context"] = outside or parameters.integer_or_none(_TRAINED)
    if kind == "llama3":
        slow, fast = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
        return settings | {"rotary_slow": slow, "rotary_fast": fast}
    attention = parameters.number_or_none("attention_factor")
    growth = [parameters.number_or_none(key) for key in ("mscale", "mscale_all_dim")]
    if attention is None and all(growth):  # of DeepSeek; one of them alone is not read
        log = math.log(max(1.0, settings["rotary_factor"]))
        one, other = (1.0 + 0.1 * (m or 0.0) * log for m in growth)
        attention = one / other
    return settings | {
        "rotary_fast": parameters.number_or_none("beta_fast"),
        "rotary_slow": parameters.number_or_none("beta_slow"),
        "rotary_attention": attention,
        "rotary_truncate": nested or parameters.flag("truncate", True),
    }


def _read_longrope(c: ConfigReader, parameters: ConfigReader) -> Settings:
    """Lists of divisors, and a factor on cos and sin that grows with the context."""
    longest = c.integer("max_position_embeddings")
    trained = c.integer_or_none(_TRAINED) or parameters.integer(_TRAINED, 4096)
    attention = parameters.number_or_none("attention_factor")
    if attention is None:
        factor = parameters.number_or_none("factor") or longest / trained
        grown = math.log(factor) / math.log(trained) if factor > 1 and trained > 1 else 0.0
        attention = math.sqrt(1.0 + grown)
    return {
        "context": min(longest, trained),
        "rotary_scaling": "longrope",
        "rotary_trained_context": trained,
        "rotary_attention": attention,
        "rotary_short": parameters.numbers("short_factor"),
        "rotary_long": parameters.numbers("long_factor"),
    }


def _parameters(m: ModelConfig, base: float) -> dict[str, Any]:
    kind = _TYPES.get(m.rotary_scaling or "", "default")
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": base}
    if m.rotary_scaling == "longrope":
        return parameters | {
            "rope_type": "longrope",
            "short_factor": list(m.rotary_short),
            "long_factor": list(m.rotary_long),
            "attention_factor": m.rotary_attention or 1.0,
        }
    if m.rotary_scaling == "proportional":
        factor = {"factor": m.rotary_factor} if m.rotary_factor != 1.0 else {}
        return {**parameters, "rope_type": "proportional", _FRACTION: m.rotary_fraction, **factor}
    if kind == "default":
        return parameters
    parameters["factor"] = m.rotary_factor
    if m.rotary_scaling == "linear":
        return parameters
    parameters[_TRAINED] = m.rotary_trained_context or m.context
    slow, fast = m.rotary_slow or 1.0, m.rotary_fast
    if m.rotary_scaling == "llama3":
        return parameters | {"low_freq_factor": slow, "high_freq_factor": fast or 4.0}
    parameters |= {"beta_slow": slow, "beta_fast": fast or 32.0, "truncate": m.rotary_truncate}
    if m.rotary_attention is not None:
        parameters["attention_factor"] = m.rotary_attention
    return parameters
