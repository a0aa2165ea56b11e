"""fenchel eval: how well a model predicts a text."""

import json as json_format
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def run(
    directory: Path,
    /,
    *,
    text: str | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Loss, perplexity and bits per byte of a model on a text.

    Parameters
    ----------
    directory
        A run directory.
    text
        "sotu", "kjv", a text file, a folder or a .jsonl file; the run's own validation text
        when left out.
    json
        Print one JSON object instead of a table.
    """
    from fenchel.evaluate import score, text_ids
    from fenchel.flow import open_corpus
    from fenchel.model import load

    model, tokenizer, config = load(directory)
    if text is None:
        corpus = open_corpus(directory)
        ids, size, name = corpus.validation, corpus.facts.validation_bytes, "validation text"
    else:
        ids, size = text_ids(tokenizer, text)
        name = text
    found = score(model, ids, bytes=size, context=config.context)
    if json:
        print(json_format.dumps({"text": name, "bytes": size, **found._asdict()}))
    else:
        print(f"{name}: {size:,} bytes, {found.tokens:,} tokens")
        print(f"bits per byte  {found.bits_per_byte:.4f}")
        print(f"loss           {found.loss:.4f} nats a token")
        print(f"perplexity     {found.perplexity:.2f} a token (compare within one tokenizer only)")
    return 0
