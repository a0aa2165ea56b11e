"""Rotary positions as config.json says them: the newer form and the older one.

    newer   "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, ...}
    older   "rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, ...}

The newer form is written. Speeds that depend on the length of what is read ("dynamic",
"longrope") are refused: a key turned once would have to be turned again.
"""

from typing import Any

from fenchel.model.config import ModelConfig
from fenchel.model.families.config_reader import ConfigReader
from fenchel.model.families.setting_rows import Setting, Settings

_TYPES = {"default": "default", "linear": "linear", "yarn": "yarn", "llama3": "llama3"}
_TRAINED = "original_max_position_embeddings"


def rope(base: float = 10000.0, share: float = 1.0) -> Setting:
    """The row of a family whose layers all turn alike; ``base`` and ``share`` where unsaid."""

    def read(c: ConfigReader) -> Settings:
        said = c.part(_which(c))
        older = c.number("rotary_pct", share)
        older = c.number("partial_rotary_factor", older)
        turned = {"rotary_fraction": said.number("partial_rotary_factor", older)}
        return turned | _turned(c, said, base)

    def write(m: ModelConfig) -> Settings:
        said = _said(m, m.rotary_base)
        if m.rotary_fraction != share:
            said["partial_rotary_factor"] = m.rotary_fraction
        return {"rope_parameters": said}

    return Setting(read, write)


def rope_of_two(base: float, local: float, windows: Setting) -> Setting:
    """The rows of a family whose layers with a window turn by a base of their own."""

    def read(c: ConfigReader) -> Settings:
        said = c.part(_which(c))
        nested = said.has("full_attention") or said.has("sliding_attention")
        turned = _turned(c, said.part("full_attention") if nested else said, base)
        near = said.part("sliding_attention") if nested else ConfigReader({}, (), c.where)
        near.only("rope_type", ("default",))
        turned |= windows.read(c)
        older = near.number("rope_theta", c.number("rope_local_base_freq", local))
        return turned | ({"rotary_local_base": older} if "windows" in turned else {})

    def write(m: ModelConfig) -> Settings:
        near = m.rotary_base if m.rotary_local_base is None else m.rotary_local_base
        layers = {
            "full_attention": _said(m, m.rotary_base),
            "sliding_attention": {"rope_type": "default", "rope_theta": near},
        }
        return windows.write(m) | {"rope_parameters": layers}

    return Setting(read, write)


def _which(c: ConfigReader) -> str:
    """The key under which scaling is said; ``rope_scaling`` wins, as it does in transformers."""
    c.ignore(("rope_parameters", "rope_scaling"))
    return "rope_scaling" if c.has("rope_scaling") else "rope_parameters"


def _turned(c: ConfigReader, said: ConfigReader, base: float) -> Settings:
    kind = said.word("rope_type" if said.has("rope_type") else "type", _TYPES, "default")
    older = c.number("rotary_emb_base" if c.has("rotary_emb_base") else "rope_theta", base)
    turned: dict[str, Any] = {
        "positions": "rotary",
        "rotary_base": said.number("rope_theta", older),
    }
    if kind == "default":
        return turned
    turned |= {"rotary_scaling": kind, "rotary_factor": said.number("factor")}
    if kind == "linear":
        return turned
    turned["rotary_trained_context"] = said.whole_or_none(_TRAINED) or c.whole_or_none(_TRAINED)
    if kind == "llama3":
        slow, fast = said.number("low_freq_factor"), said.number("high_freq_factor")
        return turned | {"rotary_slow": slow, "rotary_fast": fast}
    for key in ("mscale", "mscale_all_dim"):
        said.only(key, (None,))
    return turned | {
        "rotary_fast": said.number_or_none("beta_fast"),
        "rotary_slow": said.number_or_none("beta_slow"),
        "rotary_attention": said.number_or_none("attention_factor"),
        "rotary_truncate": said.flag("truncate", True),
    }


def _said(m: ModelConfig, base: float) -> dict[str, Any]:
    kind = _TYPES.get(m.rotary_scaling or "", "default")
    said: dict[str, Any] = {"rope_type": kind, "rope_theta": base}
    if kind == "default":
        return said
    said["factor"] = m.rotary_factor
    if m.rotary_scaling == "linear":
        return said
    said[_TRAINED] = m.rotary_trained_context or m.context
    slow, fast = m.rotary_slow or 1.0, m.rotary_fast
    if m.rotary_scaling == "llama3":
        return said | {"low_freq_factor": slow, "high_freq_factor": fast or 4.0}
    said |= {"beta_slow": slow, "beta_fast": fast or 32.0, "truncate": m.rotary_truncate}
    if m.rotary_attention is not None:
        said["attention_factor"] = m.rotary_attention
    return said
