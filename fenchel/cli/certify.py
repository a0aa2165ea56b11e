"""fenchel certify: how sensitive attention can be anywhere in a ball around a text."""

import json as json_format
from pathlib import Path
from typing import Literal

from fenchel.cli.console import (
    CheckpointPath,
    Console,
    Device,
    Json,
    Switch,
    Whole,
    device_and_dtype,
    require_inputs,
    text_path,
)
from fenchel.cli.inspect import NormName, numbers, show
from fenchel.files import require_page

PAGE = Path("certificates.html")


def run(
    directory: CheckpointPath,
    /,
    *,
    text: str,
    radius: float,
    norm: NormName = "fro",
    out: Path | None = None,
    max_tokens: Whole = 64,
    layers: str | None = None,
    heads: Switch = False,
    blocks: Switch = False,
    steps: Whole = 20,
    restarts: Whole = 1,
    failure: float = 1e-9,
    device: Device = None,
    dtype: Literal["float64", "float32"] = "float64",
    seed: Whole = 0,
    json: Json = False,
) -> int:
    """How sensitive attention can be anywhere in a ball around a text: a table, JSON and a page.

    For every attention layer, or every block with --blocks, the spectral norm of its Jacobian at
    the text itself, the largest norm found in the ball with the point that attains it, and a bound
    that no point of the ball exceeds. The ball is around the input of attention, after its norm
    layer.

    Parameters
    ----------
    directory
        A run directory, or a Hugging Face directory of a family that fenchel reads itself.
    text
        "sotu", "kjv", a text file, a folder or a .jsonl file; its first tokens are read.
    radius
        The radius of the ball. An input token has a length of about sqrt(width).
    norm
        "fro": all tokens together move by at most the radius; "token": each of them.
    out
        The page; certificates.html when left out, and none with --json.
    max_tokens
        Read this many tokens; time grows with their square.
    layers
        Only these layers, counted from 1: 3 or 1-4,12.
    heads
        Also an upper end for every single head.
    blocks
        Whole blocks, with norm layers, MLP and residual branches; the ball is around the stream.
    steps
        Steps of the ascent to the lower end.
    restarts
        Random points of the ball from which it starts, in addition to others.
    failure
        Probability that a norm at the centre, from which upper ends follow, is too small.
    dtype
        float32 makes the search for the lower end faster; both ends are computed in float64.
    seed
        The same seed gives the same numbers.
    """
    chosen = numbers(layers, "--layers")
    target = out if json else out or PAGE
    if target is not None:
        require_page(target, reads=[directory, text_path(text)])

    require_inputs(directory, text)
    with Console(quiet=json, aside=True) as console:
        console.progress("loading torch", 0, 0)

        from fenchel.inspection import Search, certify_model, open_model

        on, kind = device_and_dtype(device, dtype)
        assert kind is not None
        certification = certify_model(
            open_model(directory),
            text,
            radius,
            norm=norm,
            max_tokens=max_tokens,
            layers=chosen,
            search=Search(steps, restarts, failure, heads, kind, blocks),
            device=str(on),
            seed=seed,
            progress=console.progress,
        )
    if target is not None:
        from fenchel.files import write_atomic
        from fenchel.report.certificates import render

        write_atomic(target, render(certification))
    if json:
        print(json_format.dumps(certification.plain()))
        return 0
    from fenchel.cli.inspection_tables import certificate_tables

    certified = certificate_tables(certification.certificates, certification.tokens)
    show(certified, [certification.subject["begin"]], target)
    return 0
