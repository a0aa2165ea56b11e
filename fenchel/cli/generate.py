"""fenchel generate: continue a prompt."""

import json as json_format
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from cyclopts import Parameter

from fenchel.cli.console import DtypeName, device_and_dtype

if TYPE_CHECKING:
    from fenchel.generation import Sampling

DEFAULTS = {
    "temperature": 0.8,
    "top_k": None,
    "top_p": 0.95,
    "min_p": None,
    "repetition_penalty": 1.0,
}
"""Settings of sampling where neither a flag nor the checkpoint gives one."""


def run(
    directory: Path,
    /,
    *,
    prompt: str = "",
    max_new_tokens: int = 200,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    stop: Annotated[list[str] | None, Parameter(negative="")] = None,
    cache: Literal["model", "float16", "int8"] = "model",
    draft: int = 0,
    device: str | None = None,
    dtype: DtypeName | None = None,
    seed: int = 0,
    stream: bool = True,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Continue a prompt with the model of a run directory or a Hugging Face directory.

    A sampling flag that is left out is taken from the directory's generation_config.json where that
    has it; a line on standard error names what was taken. On a GPU, decoding replays a CUDA graph
    wherever the model allows it.

    Parameters
    ----------
    directory
        A run directory, or a directory with config.json, weights and tokenizer.json.
    prompt
        The text to continue; empty begins a new document. In a model with an encoder it is the
        input of the encoder.
    max_new_tokens
        Tokens to add at most; the end of the document ends the text earlier.
    temperature
        0 takes the likeliest token each time; higher is more varied. 0.8 by default.
    top_k
        Draw among this many of the likeliest tokens.
    top_p
        Draw among the fewest tokens whose probabilities reach this sum. 0.95 by default.
    min_p
        Draw among tokens at least this likely, relative to the likeliest.
    repetition_penalty
        Above 1 makes tokens that the text already has less likely.
    stop
        Text to stop before; may be given several times.
    cache
        What keys and values are stored in: the model's own dtype, float16 or int8.
    draft
        Tokens to guess ahead from earlier text; changes the speed, not the text.
    device
        "cpu", "cuda" or "cuda:1"; the GPU where there is one.
    dtype
        Dtype of the weights; the one they are stored in by default.
    seed
        The same seed draws the same text on the same device.
    stream
        Print tokens as they are drawn.
    json
        Print one JSON object instead.
    """
    import torch

    from fenchel.checkpoints import load
    from fenchel.data import encode, end_id, pad_id
    from fenchel.generation import GenerationSettings, stream_text

    flags = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    flags = {name: value for name, value in flags.items() if value is not None}
    sampling = sampling_settings(directory, flags)
    on, as_dtype = device_and_dtype(device, dtype)
    model, tokenizer, config = load(directory, dtype=as_dtype)
    model.to(on)
    end, prompt_ids = end_id(tokenizer), encode(tokenizer, prompt)
    # What a tokenizer adds to an empty text is how its texts begin; ours adds nothing.
    ids = [*(tokenizer.encode("").ids or [end]), *prompt_ids]
    source = None
    if config.kind == "encoder-decoder":
        ids, source = [pad_id(tokenizer)], torch.tensor([*prompt_ids, end], device=on)
    ends = sampling.ends or (end,)
    from_checkpoint = (
        sampling.from_checkpoint
        if ends == (end,)
        else {**sampling.from_checkpoint, "ends": list(ends)}
    )
    settings = GenerationSettings(
        max_new_tokens=max_new_tokens,
        sampling=sampling.sampling,
        stop=[*ends, *(stop or ())],
        cache=cache,
        draft=draft,
    )
    pieces = stream_text(
        model,
        tokenizer,
        torch.tensor(ids, device=on),
        settings,
        source=source,
        generator=torch.Generator(on).manual_seed(seed),
    )
    if from_checkpoint and not json:
        print(sentence(sampling.source, from_checkpoint), file=sys.stderr)
    show, text = stream and not json, ""
    if show:
        print(prompt, end="", flush=True)
    for piece in pieces:
        text += piece
        if show:
            print(piece, end="", flush=True)
    if json:
        result: dict[str, Any] = {"prompt": prompt, "text": text, "seed": seed}
        if from_checkpoint:
            result |= {"settings": from_checkpoint, "settings_from": str(sampling.source)}
        print(json_format.dumps(result))
    elif show:
        print()
    else:
        sys.stdout.write(f"{prompt}{text}\n")
    return 0


class SamplingSettings(NamedTuple):
    """How to sample and where to end, and which of it a checkpoint gives."""

    sampling: "Sampling"
    ends: tuple[int, ...]
    """Tokens that end a text according to the checkpoint; empty where it names none."""
    from_checkpoint: dict[str, Any]
    """Settings that are the checkpoint's, by name."""
    source: Path
    """The file they come from."""


def sampling_settings(directory: Path, flags: dict[str, Any]) -> SamplingSettings:
    """The flags, else what a Hugging Face directory gives, else DEFAULTS.

    A generation_config.json without do_sample gives no sampling settings; a repetition penalty and
    the tokens that end a text count all the same.
    """
    from fenchel.checkpoints import GenerationConfig, read_generation_config
    from fenchel.checkpoints.directory import has_file
    from fenchel.checkpoints.generation_config import GENERATION
    from fenchel.checkpoints.run_checkpoint import is_run
    from fenchel.generation import Sampling
    from fenchel.model.families.config_reader import CONFIG

    config = GenerationConfig()
    if has_file(directory, CONFIG) and not is_run(directory):
        config = read_generation_config(directory)
    names = DEFAULTS if config.temperature else ("repetition_penalty",)
    theirs = {name: getattr(config, name) for name in names}
    from_checkpoint = {
        name: value
        for name, value in theirs.items()
        if name not in flags and value != DEFAULTS[name]
    }
    source = directory / (GENERATION if has_file(directory, GENERATION) else CONFIG)
    sampling = Sampling(**(DEFAULTS | theirs | flags))
    return SamplingSettings(sampling, config.eos, from_checkpoint, source)


def sentence(source: Path, from_checkpoint: dict[str, Any]) -> str:
    """Which settings are the checkpoint's.

    >>> sentence(Path("x/generation_config.json"), {"temperature": 0.6, "top_p": None})
    'Settings of x/generation_config.json: temperature 0.6, no top_p.'
    """
    parts = (
        f"no {name}" if value is None else f"{name} {value}"
        for name, value in from_checkpoint.items()
    )
    return f"Settings of {source}: {', '.join(parts)}."
