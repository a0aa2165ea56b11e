"""Sliding windows in config.json: one width, and which layers have it.

    "sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention", ...]

A window counts keys including the query's own position, in transformers as here.
"""

from collections.abc import Callable

from fenchel.model.config import ModelConfig
from fenchel.model.families.config_reader import ConfigReader
from fenchel.model.families.setting_rows import Setting, Settings

SLIDING, FULL = "sliding_attention", "full_attention"
DefaultTypes = Callable[[ConfigReader, int], list[str]]


def uniform() -> Setting:
    """All layers have the window, or none (Mistral)."""

    def read(c: ConfigReader) -> Settings:
        width = c.integer_or_none("sliding_window")
        return {"windows": () if width is None else (width,)}

    return Setting(read, lambda m: {"sliding_window": m.window(0)})


def per_layer(default_types: DefaultTypes, *, needed: bool = False) -> Setting:
    """Layers are listed; ``default_types`` gives the list where an older file has none.

    Some classes of transformers need a width also where no layer has a window.
    """

    def read(c: ConfigReader) -> Settings:
        layers = c.layers()
        types = c.words("layer_types", (SLIDING, FULL), layers) or default_types(c, layers)
        width = c.integer_or_none("sliding_window")
        if width is None or SLIDING not in types:
            return {}
        return {"windows": tuple(width if kind == SLIDING else 0 for kind in types)}

    def write(m: ModelConfig) -> Settings:
        windows = [m.window(layer) for layer in range(m.layers)]
        width = next((w for w in windows if w is not None), m.context if needed else None)
        return {
            "sliding_window": width,
            "layer_types": [FULL if w is None else SLIDING for w in windows],
        }

    return Setting(read, write)


def later_layers(c: ConfigReader, layers: int) -> list[str]:
    """In older files the first layers have no window (Qwen)."""
    first = c.integer("max_window_layers", 28, least=0)
    return [FULL if layer < first else SLIDING for layer in range(layers)]


def switchable(default_types: DefaultTypes = later_layers) -> Setting:
    """Windows may be switched off (Qwen, SmolLM3)."""
    rows = per_layer(default_types)

    def read(c: ConfigReader) -> Settings:
        c.ignore(("layer_types", "sliding_window", "max_window_layers"))
        return rows.read(c) if c.flag("use_sliding_window", False) else {}

    def write(m: ModelConfig) -> Settings:
        return rows.write(m) | {"use_sliding_window": any(m.windows)}

    return Setting(read, write)


def switchable_everywhere() -> Setting:
    """All layers have the window, or, switched off, none (Qwen3-MoE)."""
    rows = uniform()

    def read(c: ConfigReader) -> Settings:
        c.ignore(("sliding_window", "max_window_layers"))
        return rows.read(c) if c.flag("use_sliding_window", False) else {}

    def write(m: ModelConfig) -> Settings:
        return rows.write(m) | {"use_sliding_window": any(m.windows)}

    return Setting(read, write)


def alternating(c: ConfigReader, layers: int) -> list[str]:
    """Every second layer has the window, the first one too (gpt-oss)."""
    del c
    return [FULL if layer % 2 else SLIDING for layer in range(layers)]


def periodic(default: int) -> Setting:
    """One layer of every ``default`` has full attention, the others the window (Gemma)."""

    def default_types(c: ConfigReader, layers: int) -> list[str]:
        key = "sliding_window_pattern"
        every = c.integer(key if c.has(key) else f"_{key}", default)
        return [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]

    rows = per_layer(default_types, needed=True)

    def read(c: ConfigReader) -> Settings:
        c.ignore(("sliding_window_pattern", "_sliding_window_pattern"))
        return rows.read(c)

    return Setting(read, rows.write)
