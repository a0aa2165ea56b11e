"""fenchel generate: continue a prompt."""

import json as json_format
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from cyclopts import Parameter

if TYPE_CHECKING:
    from fenchel.generation import Sampling

OURS = {
    "temperature": 0.8,
    "top_k": None,
    "top_p": 0.95,
    "min_p": None,
    "repetition_penalty": 1.0,
}
"""How to draw where neither a flag nor the checkpoint says."""


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
    seed: int = 0,
    stream: bool = True,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Continue a prompt with the model of a run directory or a Hugging Face directory.

    A flag that is left out is what the directory's generation_config.json says of drawing, if it
    does, and that is told on standard error.

    Parameters
    ----------
    directory
        A run directory, or a directory with config.json, weights and tokenizer.json.
    prompt
        The text to continue; empty begins a new document. A model with an encoder reads it
        there, and answers.
    max_new_tokens
        How many tokens to add at the most; the end of the document ends it earlier.
    temperature
        0 takes the likeliest token each time; higher is more varied. 0.8 if nothing is said.
    top_k
        Draw among this many of the likeliest tokens.
    top_p
        Draw among the fewest tokens whose probabilities reach this sum. 0.95 if nothing is said.
    min_p
        Draw among tokens at least this likely, relative to the likeliest.
    repetition_penalty
        Above 1 holds back tokens that were there before.
    stop
        Text to stop before; may be given several times.
    cache
        What keys and values are held in: the model's own numbers, half precision, or bytes.
    draft
        Tokens to guess ahead from what was said before; changes the speed, not the text.
    seed
        The same seed draws the same text.
    stream
        Print tokens as they are drawn.
    json
        Print one JSON object instead.
    """
    import torch

    from fenchel.checkpoints import load
    from fenchel.data import encode, end_id, pad_id
    from fenchel.generation import stream_text

    flags = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    chosen = choose(directory, {name: value for name, value in flags.items() if value is not None})
    model, tokenizer, config = load(directory)
    end, words = end_id(tokenizer), encode(tokenizer, prompt)
    # What a tokenizer puts around nothing is how its texts begin; ours leaves that to us.
    ids = [*(tokenizer.encode("").ids or [end]), *words]
    source = None
    if config.kind == "encoder-decoder":
        ids, source = [pad_id(tokenizer)], torch.tensor([*words, end])
    ends = chosen.ends or (end,)
    taken = chosen.taken if ends == (end,) else {**chosen.taken, "ends": list(ends)}
    if taken and not json:
        print(sentence(chosen.source, taken), file=sys.stderr)
    coming = stream_text(
        model,
        tokenizer,
        torch.tensor(ids),
        max_new_tokens=max_new_tokens,
        sampling=chosen.sampling,
        cache=cache,
        draft=draft,
        stop=[*ends, *(stop or ())],
        source=source,
        generator=torch.Generator().manual_seed(seed),
    )
    pieces = []
    show = stream and not json
    if show:
        print(prompt, end="", flush=True)
    for piece in coming:
        pieces.append(piece)
        if show:
            print(piece, end="", flush=True)
    text = "".join(pieces)
    if json:
        found: dict[str, Any] = {"prompt": prompt, "text": text, "seed": seed}
        if taken:
            found |= {"settings": taken, "settings_from": str(chosen.source)}
        print(json_format.dumps(found))
    elif show:
        print()
    else:
        sys.stdout.write(f"{prompt}{text}\n")
    return 0


class Chosen(NamedTuple):
    """How to draw and where to end, and what of it a checkpoint says."""

    sampling: "Sampling"
    ends: tuple[int, ...]
    """Tokens that the checkpoint says end a text, if it does."""
    taken: dict[str, Any]
    """Settings that are the checkpoint's, by name."""
    source: Path
    """Its file."""


def choose(directory: Path, flags: dict[str, Any]) -> Chosen:
    """The flags, else what a Hugging Face directory says of drawing, else OURS.

    One that does not say do_sample says nothing of drawing; a repetition penalty is another
    matter, and so are the tokens that end a text.
    """
    from fenchel.checkpoints import GenerationConfig, read_generation_config
    from fenchel.checkpoints.directory import has_file
    from fenchel.checkpoints.generation_config import GENERATION
    from fenchel.checkpoints.run_checkpoint import is_run
    from fenchel.generation import Sampling
    from fenchel.model.families.config_reader import CONFIG

    said = GenerationConfig()
    if has_file(directory, CONFIG) and not is_run(directory):
        said = read_generation_config(directory)
    names = OURS if said.temperature else ("repetition_penalty",)
    theirs = {name: getattr(said, name) for name in names}
    taken = {
        name: value for name, value in theirs.items() if name not in flags and value != OURS[name]
    }
    source = directory / (GENERATION if has_file(directory, GENERATION) else CONFIG)
    return Chosen(Sampling(**(OURS | theirs | flags)), said.eos, taken, source)


def sentence(source: Path, taken: dict[str, Any]) -> str:
    """Which settings are the checkpoint's.

    >>> sentence(Path("x/generation_config.json"), {"temperature": 0.6, "top_p": None})
    'Settings of x/generation_config.json: temperature 0.6, no top_p.'
    """
    words = (f"no {name}" if value is None else f"{name} {value}" for name, value in taken.items())
    return f"Settings of {source}: {', '.join(words)}."
