"""fenchel generate: continue a prompt."""

import json as json_format
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter


def run(
    directory: Path,
    /,
    *,
    prompt: str = "",
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = 0.95,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: Annotated[list[str] | None, Parameter(negative="")] = None,
    cache: Literal["model", "float16", "int8"] = "model",
    draft: int = 0,
    seed: int = 0,
    stream: bool = True,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Continue a prompt with the model of a run directory or a Hugging Face directory.

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
        0 takes the likeliest token each time; higher is more varied.
    top_k
        Draw among this many of the likeliest tokens.
    top_p
        Draw among the fewest tokens whose probabilities reach this sum.
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

    from fenchel.data import encode, end_id, pad_id
    from fenchel.generate import Sampling, stream_text
    from fenchel.model import load

    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    model, tokenizer, config = load(directory)
    end, words = end_id(tokenizer), encode(tokenizer, prompt)
    # What a tokenizer puts around nothing is how its texts begin; ours leaves that to us.
    ids = [*(tokenizer.encode("").ids or [end]), *words]
    source = None
    if config.kind == "encoder-decoder":
        ids, source = [pad_id(tokenizer)], torch.tensor([*words, end])
    pieces = []
    show = stream and not json
    if show:
        print(prompt, end="", flush=True)
    for piece in stream_text(
        model,
        tokenizer,
        torch.tensor(ids),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        cache=cache,
        draft=draft,
        stop=[end, *(stop or ())],
        source=source,
        generator=torch.Generator().manual_seed(seed),
    ):
        pieces.append(piece)
        if show:
            print(piece, end="", flush=True)
    text = "".join(pieces)
    if json:
        print(json_format.dumps({"prompt": prompt, "text": text, "seed": seed}))
    elif show:
        print()
    else:
        sys.stdout.write(f"{prompt}{text}\n")
    return 0
