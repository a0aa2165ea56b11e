"""fenchel convert: a run, or a checkpoint in another dtype, as a Hugging Face directory."""

import json as json_format
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from fenchel.cli.console import DtypeName


def run(
    directory: Path,
    out: Path,
    /,
    *,
    dtype: DtypeName | None = None,
    which: Literal["best", "newest"] = "best",
    force: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Write a run or a checkpoint as a Hugging Face directory.

    Parameters
    ----------
    directory
        A run directory, or a Hugging Face directory of a family that fenchel reads.
    out
        Where to write; a directory that is not there yet, or is empty.
    dtype
        What numbers the weights should be; as they are when left out.
    which
        Which checkpoint of a run.
    force
        Replace what is in OUT.
    json
        Print one JSON object instead of a sentence.
    """
    import torch

    from fenchel.checkpoints import convert

    kind = None if dtype is None else getattr(torch, dtype)
    found = convert(directory, out, dtype=kind, which=which, overwrite=force)
    name = str(found.dtype).removeprefix("torch.")
    if json:
        said = {"out": str(out), "family": found.family, "parameters": found.parameters}
        print(json_format.dumps({**said, "dtype": name}))
    else:
        print(f"{out}: {found.family}, {found.parameters:,} parameters in {name}")
    return 0
