"""Rotary positions in config.json: the newer form and the older one.

    newer   "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, ...}
    older   "rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, ...}

The newer form is written. Frequencies that depend on the length of the sequence ("dynamic",
"longrope") are refused: keys in a cache would have to be rotated again.
"""

from typing import Any

from fenchel.model.config import ModelConfig
from fenchel.model.families.config_reader import ConfigReader
from fenchel.model.families.setting_rows import Setting, Settings

_TYPES = {"default": "default", "linear": "linear", "yarn": "yarn", "llama3": "llama3"}
_TRAINED = "original_max_position_embeddings"


def rope(base: float = 10000.0, share: float = 1.0) -> Setting:
    """One rotary embedding for all layers; ``base`` and ``share`` are the defaults."""

    def read(c: ConfigReader) -> Settings:
        parameters = c.part(_key(c))
        older = c.number("rotary_pct", share)
        older = c.number("partial_rotary_factor", older)
        settings = {"rotary_fraction": parameters.number("partial_rotary_factor", older)}
        return settings | _read_parameters(c, parameters, base)

    def write(m: ModelConfig) -> Settings:
        parameters = _parameters(m, m.rotary_base)
        if m.rotary_fraction != share:
            parameters["partial_rotary_factor"] = m.rotary_fraction
        return {"rope_parameters": parameters}

    return Setting(read, write)


def rope_with_local_base(base: float, local: float, windows: Setting) -> Setting:
    """Layers with a window have their own rotary base, ``local`` by default."""

    def read(c: ConfigReader) -> Settings:
        parameters = c.part(_key(c))
        nested = parameters.has("full_attention") or parameters.has("sliding_attention")
        full = parameters.part("full_attention") if nested else parameters
        sliding = parameters.part("sliding_attention") if nested else ConfigReader({}, (), c.where)
        settings = _read_parameters(c, full, base) | windows.read(c)
        sliding.only("rope_type", ("default",))
        older = c.number("rope_local_base_freq", local)
        local_base = sliding.number("rope_theta", older)
        return settings | ({"rotary_local_base": local_base} if "windows" in settings else {})

    def write(m: ModelConfig) -> Settings:
        local_base = m.rotary_base if m.rotary_local_base is None else m.rotary_local_base
        layers = {
            "full_attention": _parameters(m, m.rotary_base),
            "sliding_attention": {"rope_type": "default", "rope_theta": local_base},
        }
        return windows.write(m) | {"rope_parameters": layers}

    return Setting(read, write)


def _key(c: ConfigReader) -> str:
    """The key that holds the parameters; ``rope_scaling`` wins, as it does in transformers."""
    c.ignore(("rope_parameters", "rope_scaling"))
    return "rope_scaling" if c.has("rope_scaling") else "rope_parameters"


def _read_parameters(c: ConfigReader, parameters: ConfigReader, base: float) -> Settings:
    key = "rope_type" if parameters.has("rope_type") else "type"
    kind = parameters.word(key, _TYPES, "default")
    older = c.number("rotary_emb_base" if c.has("rotary_emb_base") else "rope_theta", base)
    settings: dict[str, Any] = {
        "positions": "rotary",
        "rotary_base": parameters.number("rope_theta", older),
    }
    if kind == "default":
        return settings
    settings |= {"rotary_scaling": kind, "rotary_factor": parameters.number("factor")}
    if kind == "linear":
        return settings
    older_length = c.integer_or_none(_TRAINED)
    settings["rotary_trained_context"] = parameters.integer_or_none(_TRAINED) or older_length
    if kind == "llama3":
        slow, fast = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
        return settings | {"rotary_slow": slow, "rotary_fast": fast}
    for key in ("mscale", "mscale_all_dim"):
        parameters.only(key, (None,))
    return settings | {
        "rotary_fast": parameters.number_or_none("beta_fast"),
        "rotary_slow": parameters.number_or_none("beta_slow"),
        "rotary_attention": parameters.number_or_none("attention_factor"),
        "rotary_truncate": parameters.flag("truncate", True),
    }


def _parameters(m: ModelConfig, base: float) -> dict[str, Any]:
    kind = _TYPES.get(m.rotary_scaling or "", "default")
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": base}
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
