"""Generation settings of a directory: special tokens, and how to sample.

They come from generation_config.json under the names of Hugging Face, or from config.json in older
directories, and a token that the former does not name from the latter. A value outside its range is
refused. Settings that ``fenchel.generation`` does not
have (beams, other penalties, logits processors) are not read.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fenchel.checkpoints.directory import has_file, read_bounded_json
from fenchel.model.families.config_reader import CONFIG, ConfigReader

GENERATION = "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_MOST_EOS = 64


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Special tokens and sampling settings; None or empty where the file has none."""

    bos: int | None = None
    """Id of the token before the first of a text."""
    eos: tuple[int, ...] = ()
    """Ids of the tokens that end a text."""
    pad: int | None = None
    """Id of the token that pads shorter rows."""
    decoder_start: int | None = None
    """Id of the first token of the decoder in an encoder-decoder."""
    temperature: float = 0.0
    """0 is greedy decoding, the default of Hugging Face without ``do_sample``."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    """Applies to greedy decoding too, as in Hugging Face."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """As in ``Sampling``; servers write them, Hugging Face has no such setting."""


def read_generation_config(path: str | Path) -> GenerationConfig:
    """The generation settings of a Hugging Face directory."""
    path = Path(path)
    name = GENERATION if has_file(path, GENERATION) else CONFIG
    config = read_bounded_json(path, CONFIG) if has_file(path, CONFIG) else {}
    settings = config
    if name == GENERATION:
        tokens = {key: config[key] for key in TOKEN_IDS if key in config}
        settings = tokens | read_bounded_json(path, name)
    reader = ConfigReader(settings, (), path / name)
    sampled = reader.has("do_sample") and reader.flag("do_sample")
    return GenerationConfig(
        bos=reader.integer_or_none("bos_token_id", least=0),
        eos=_eos(reader),
        pad=reader.integer_or_none("pad_token_id", least=0),
        decoder_start=reader.integer_or_none("decoder_start_token_id", least=0),
        temperature=_within(reader, "temperature", 100.0) or 1.0 if sampled else 0.0,
        top_k=(reader.integer_or_none("top_k", least=0) or None) if sampled else None,
        top_p=_within(reader, "top_p", 1.0) if sampled else None,
        min_p=(_within(reader, "min_p", 1.0) or None) if sampled else None,
        repetition_penalty=_within(reader, "repetition_penalty", 100.0) or 1.0,
        presence_penalty=_within(reader, "presence_penalty", 2.0, least=-2.0) or 0.0,
        frequency_penalty=_within(reader, "frequency_penalty", 2.0, least=-2.0) or 0.0,
    )


def _eos(reader: ConfigReader) -> tuple[int, ...]:
    """One id or a list of them."""
    value: Any = reader.settings.get("eos_token_id")
    if not isinstance(value, list):
        token = reader.integer_or_none("eos_token_id", least=0)
        return () if token is None else (token,)
    if len(value) > _MOST_EOS:
        raise reader.wrong("eos_token_id", value, f"at most {_MOST_EOS} tokens")
    readers = (ConfigReader({"eos_token_id": token}, (), reader.where) for token in value)
    return tuple(reader.integer("eos_token_id", least=0) for reader in readers)


def _within(reader: ConfigReader, key: str, most: float, *, least: float = 0.0) -> float | None:
    value = reader.number_or_none(key)
    if value is not None and not least <= value <= most:
        raise reader.wrong(key, value, f"{least:g} to {most:g}")
    return value
