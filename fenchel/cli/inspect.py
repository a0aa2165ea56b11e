"""fenchel inspect: what a checkpoint's attention does on a text."""

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fenchel.cli.console import (
    Device,
    Json,
    MeasuredPage,
    ModelPath,
    Switch,
    TextStart,
    Whole,
    device_and_dtype,
    require_inputs,
    stages,
    text_path,
)
from fenchel.files import printable

NormName = Literal["fro", "token"]
"""What --norm accepts."""


def run(
    directory: ModelPath,
    /,
    *,
    text: TextStart,
    out: Path | None = None,
    max_tokens: Whole | None = None,
    layers: str | None = None,
    heads: str | None = None,
    blocks: bool = True,
    branches: Switch = False,
    radius: float | None = None,
    norm: NormName = "fro",
    rows: Switch = False,
    why: str | None = None,
    iterations: Whole | None = None,
    tolerance: float = 0.05,
    device: Device = None,
    seed: Whole = 0,
    json: Json = False,
) -> int:
    """What a checkpoint's attention does on a text: a table, JSON and a page.

    Parameters
    ----------
    out
        The page; inspection.html when left out, and none with --json.
    max_tokens
        Read this many tokens of a longer text; as many as the model takes, and 1024 at most, when
        left out.
    layers
        Only these layers, counted from 1: 3 or 1-4,12.
    heads
        Only these heads of every layer, counted from 1.
    blocks
        Also differentiate blocks and network, which takes most of the time.
    branches
        Also the attention and the MLP of each block separately, each with the norm before it.
    radius
        Also certify the attention layers over balls of this radius; see fenchel certify.
    norm
        The norm of the radius: "fro" for all tokens together, "token" for each of them.
    rows
        With --json: the numbers of every row, not only their quantiles.
    why
        Also why a head attends where it does: LAYER.HEAD, LAYER.HEAD:QUERY or LAYER.HEAD:QUERY:KEY,
        tokens from 0; the last query and the key with the largest weight when left out.
    iterations
        Largest number of pairs of products per spectral norm; 30 for small models, 9 for large
        ones.
    tolerance
        Relative width of a bracket at which the iteration stops.
    seed
        The same seed gives the same numbers.
    """
    chosen = [numbers(words, name) for words, name in ((layers, "--layers"), (heads, "--heads"))]
    place = None if why is None else head_and_tokens(why)
    page = MeasuredPage(out, "inspection.html", json=json, reads=[directory, text_path(text)])
    require_inputs(directory, text, conversations=True)
    with stages(json=json) as console:
        from fenchel.inspection import inspect, open_model
        from fenchel.inspection.trace import tokenize_text
        from fenchel.interpretability import can_be_hooked, has_score_parts, score_parts

        on, _ = device_and_dtype(device, float64=True)
        subject = open_model(directory)
        parts = None
        if place is not None:
            with warnings.catch_warnings(action="ignore"):  # inspect repeats its notices
                ids = tokenize_text(subject, text, max_tokens).ids
            parts = score_parts(subject, ids, *place)
        result = inspect(
            subject,
            text,
            max_tokens=max_tokens,
            layers=chosen[0],
            heads=chosen[1],
            blocks=blocks,
            branches=branches,
            radius=radius,
            norm=norm,
            iterations=iterations,
            tolerance=tolerance,
            device=str(on),
            seed=seed,
            progress=console.progress,
        )
        result = replace(result, why=parts)
    from fenchel.report.inspection_page import render

    if page.write(lambda: render(result), lambda: result.plain(rows=rows)):
        return 0
    from fenchel.cli.inspection_tables import tables
    from fenchel.report.findings import findings, next_command

    sentences = [result.subject["begin"]]
    sentences += [result.precision.statement] if result.precision else []
    page.show(tables(result), [*sentences, *findings(result)])
    if why is None and can_be_hooked(subject):
        parts_too = has_score_parts(subject)
        command = next_command(result, directory, text, max_tokens, why=parts_too)
        print(f"Next  {printable(command, 4096)}")
    return 0


def head_and_tokens(words: str, name: str = "--why") -> tuple[int, int, int, int | None]:
    """ "2.1:17:3" as layer, head, query and key; -1 for the last query, None for the largest key.

    >>> head_and_tokens("2.1"), head_and_tokens("2.1:17:3")
    ((2, 1, -1, None), (2, 1, 17, 3))
    """
    found = re.fullmatch(r"(\d{1,6})\.(\d{1,6})(?::(\d{1,9}))?(?::(\d{1,9}))?", words.strip())
    if found is None:
        raise ValueError(f"{name} takes LAYER.HEAD or LAYER.HEAD:QUERY[:KEY]; got {words!r}.")
    layer, head, query, key = (None if group is None else int(group) for group in found.groups())
    assert layer is not None
    assert head is not None
    return layer, head, -1 if query is None else query, key


def numbers(words: str | None, name: str) -> list[int] | None:
    """ "1-3,7" as numbers; None for all.

    >>> numbers("1-3,7", "--layers")
    [1, 2, 3, 7]
    """
    if words is None:
        return None
    selected: list[int] = []
    for part in words.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ValueError(f"{name} takes numbers such as 3 or 1-4,12; got {words!r}.")
        last = int(high) if dash else int(low)
        if last < int(low):
            raise ValueError(f"{name} {words} counts down; the smaller number comes first.")
        if last - int(low) > 10_000:
            raise ValueError(f"{name} {words} names more than any model has.")
        selected += range(int(low), last + 1)
    return selected
