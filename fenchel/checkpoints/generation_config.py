"""What a directory says about generating: which tokens begin, end and fill, and how to draw.

generation_config.json, or config.json where a file is older, in the words of Hugging Face. A
value outside its range is refused; what is not here (beams, other penalties, processors) is not
used by fenchel.generation and so not read.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fenchel.checkpoints.directory import has_file, read_bounded_json
from fenchel.model.families.config_reader import CONFIG, ConfigReader

GENERATION = "generation_config.json"
_MOST_EOS = 64


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Tokens and settings for drawing; None or empty where nothing is said."""

    bos: int | None = None
    """Token before the first of a text."""
    eos: tuple[int, ...] = ()
    """Tokens after which a text is over."""
    pad: int | None = None
    """Token that fills rows."""
    decoder_start: int | None = None
    """Token with which the decoder of an encoder-decoder begins."""
    temperature: float = 0.0
    """0 takes the likeliest token, as Hugging Face does unless told to draw."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    """Counts whether drawn or not, as it does there."""


def read_generation_config(path: str | Path) -> GenerationConfig:
    """What the Hugging Face directory ``path`` says about generating."""
    path = Path(path)
    name = GENERATION if has_file(path, GENERATION) else CONFIG
    said = ConfigReader(read_bounded_json(path, name), (), path / name)
    drawn = said.has("do_sample") and said.flag("do_sample")
    return GenerationConfig(
        bos=said.integer_or_none("bos_token_id", least=0),
        eos=_eos(said),
        pad=said.integer_or_none("pad_token_id", least=0),
        decoder_start=said.integer_or_none("decoder_start_token_id", least=0),
        temperature=_within(said, "temperature", 100.0) or 1.0 if drawn else 0.0,
        top_k=(said.integer_or_none("top_k", least=0) or None) if drawn else None,
        top_p=_within(said, "top_p", 1.0) if drawn else None,
        min_p=(_within(said, "min_p", 1.0) or None) if drawn else None,
        repetition_penalty=_within(said, "repetition_penalty", 100.0) or 1.0,
    )


def _eos(said: ConfigReader) -> tuple[int, ...]:
    """One token or a list of them."""
    value: Any = said.settings.get("eos_token_id")
    if not isinstance(value, list):
        one = said.integer_or_none("eos_token_id", least=0)
        return () if one is None else (one,)
    if len(value) > _MOST_EOS:
        raise said.wrong("eos_token_id", value, f"at most {_MOST_EOS} tokens")
    each = (ConfigReader({"eos_token_id": one}, (), said.where) for one in value)
    return tuple(one.integer("eos_token_id", least=0) for one in each)


def _within(said: ConfigReader, key: str, most: float) -> float | None:
    value = said.number_or_none(key)
    if value is not None and not 0.0 <= value <= most:
        raise said.wrong(key, value, f"0 to {most:g}")
    return value
