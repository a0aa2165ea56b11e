"""fenchel generate: continue a prompt."""

import json as json_format
import sys
from pathlib import Path
from typing import Annotated

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
    seed: int = 0,
    stream: bool = True,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Continue a prompt with the model of a run directory.

    Parameters
    ----------
    directory
        A run directory.
    prompt
        The text to continue; empty begins a new document.
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
    seed
        The same seed draws the same text.
    stream
        Print tokens as they are drawn.
    json
        Print one JSON object instead.
    """
    import torch

    from fenchel.data import encode, end_id
    from fenchel.generate import Sampling, Spelling
    from fenchel.generate import stream as draw
    from fenchel.model import load

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    model, tokenizer, _ = load(directory)
    end = end_id(tokenizer)
    ids = torch.tensor([[end, *encode(tokenizer, prompt)]])
    spelling = Spelling(tokenizer)
    pieces = []
    show = stream and not json
    if show:
        print(prompt, end="", flush=True)
    for token in draw(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=[end],
        generator=torch.Generator().manual_seed(seed),
    ):
        pieces.append(spelling.add(int(token)))
        if show:
            print(pieces[-1], end="", flush=True)
    pieces.append(spelling.rest())
    text = "".join(pieces)
    if json:
        print(json_format.dumps({"prompt": prompt, "text": text, "seed": seed}))
    elif show:
        print(pieces[-1])
    else:
        sys.stdout.write(f"{prompt}{text}\n")
    return 0
