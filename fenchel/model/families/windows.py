"""Sliding windows as config.json says them: one width, and which layers have it.

    "sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention", ...]

A window counts keys, the query's own among them, there as here.
"""

from collections.abc import Callable

from fenchel.model.config import ModelConfig
from fenchel.model.families.config_reader import ConfigReader
from fenchel.model.families.setting_rows import Setting, Settings

NEAR, ALL = "sliding_attention", "full_attention"
_LAYERS = 4096  # more are not listed one by one


def everywhere() -> Setting:
    """All layers have the window, or none (Mistral)."""

    def read(c: ConfigReader) -> Settings:
        width = c.whole_or_none("sliding_window")
        return {"windows": () if width is None else (width,)}

    return Setting(read, lambda m: {"sliding_window": m.window(0)})


def listed(default_types: Callable[[ConfigReader, int], list[str]]) -> Setting:
    """Layers are listed; ``default_types`` gives the list that an older file leaves out."""

    def read(c: ConfigReader) -> Settings:
        layers = c.whole("num_hidden_layers")
        if layers > _LAYERS:
            raise c.wrong("num_hidden_layers", layers, f"at most {_LAYERS} where layers differ")
        types = c.words("layer_types", (NEAR, ALL), layers) or default_types(c, layers)
        width = c.whole_or_none("sliding_window")
        if width is None or NEAR not in types:
            return {}
        return {"windows": tuple(width if kind == NEAR else 0 for kind in types)}

    return Setting(read, _write)


def _write(m: ModelConfig) -> Settings:
    windows = [m.window(layer) for layer in range(m.layers)]
    width = next((w for w in windows if w is not None), None)
    return {
        "sliding_window": width,
        "layer_types": [ALL if w is None else NEAR for w in windows],
    }


def switched() -> Setting:
    """The list may be switched off, and older files let the first layers see all (Qwen)."""

    def default_types(c: ConfigReader, layers: int) -> list[str]:
        first = c.whole("max_window_layers", 28, least=0)
        return [ALL if layer < first else NEAR for layer in range(layers)]

    rows = listed(default_types)

    def read(c: ConfigReader) -> Settings:
        c.ignore(("layer_types", "sliding_window", "max_window_layers"))
        return rows.read(c) if c.flag("use_sliding_window", False) else {}

    def write(m: ModelConfig) -> Settings:
        return rows.write(m) | {"use_sliding_window": any(m.windows)}

    return Setting(read, write)


def repeated(default: int) -> Setting:
    """Every so many layers one sees all; the others have the window (Gemma)."""

    def default_types(c: ConfigReader, layers: int) -> list[str]:
        key = "sliding_window_pattern"
        every = c.whole(key if c.has(key) else f"_{key}", default)
        return [NEAR if (layer + 1) % every else ALL for layer in range(layers)]

    rows = listed(default_types)

    def read(c: ConfigReader) -> Settings:
        c.ignore(("sliding_window_pattern", "_sliding_window_pattern"))
        return rows.read(c)

    return Setting(read, rows.write)
