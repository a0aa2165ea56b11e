"""fenchel convert: a run, or a checkpoint in another dtype, as a Hugging Face directory."""

import json as json_format
from pathlib import Path
from typing import Literal

from fenchel.cli.console import CheckpointPath, DtypeName, Json, Switch, require_inputs
from fenchel.cli.steer import NO_DIRECTION, DirectionFlags
from fenchel.files import printable, require_output


def run(
    directory: CheckpointPath,
    out: Path,
    /,
    *,
    dtype: DtypeName | None = None,
    which: Literal["best", "newest"] = "best",
    adapter: CheckpointPath | None = None,
    steering: DirectionFlags = NO_DIRECTION,
    peft: Switch = False,
    force: Switch = False,
    json: Json = False,
) -> int:
    """Write a run or a checkpoint as a Hugging Face directory.

    With --steer the direction is written into the weights, as a bias of the last matrix of its
    block: any program that reads the directory computes the steered model. That needs a family of
    checkpoints with such biases, as Llama (mlp_bias) and GPT-2 have them.

    Parameters
    ----------
    directory
        A run directory, or a Hugging Face directory of a family that fenchel reads.
    out
        Where to write; a directory that does not exist yet, or is empty.
    dtype
        The dtype of the weights; unchanged when left out.
    which
        Which checkpoint of a run.
    adapter
        A directory of PEFT with LoRA adapters, which are merged into the weights.
    peft
        Write the adapters of a run (fenchel tune --lora) as a directory of PEFT; without it they
        are merged into the weights.
    force
        Replace OUT, where it is a directory that fenchel has written and holds nothing else.
    """
    require_inputs(directory)
    require_output(out, folder=True, reads=[directory, adapter, steering.steer])

    import torch

    from fenchel.checkpoints import convert, convert_to_peft

    if peft:
        if dtype is not None or adapter is not None or steering != NO_DIRECTION:
            raise ValueError(
                "--peft writes adapters as they are: no --dtype, --adapter or --steer with it."
            )
        count = convert_to_peft(directory, out, which=which, overwrite=force)
        record = {"out": str(out), "adapters": count}
        shown = f"{printable(out, 4096)}: adapters of {count:,} numbers"
        print(json_format.dumps(record) if json else shown)
        return 0
    kind = None if dtype is None else getattr(torch, dtype)
    result = convert(
        directory,
        out,
        dtype=kind,
        which=which,
        adapter=adapter,
        change=None if steering == NO_DIRECTION else steering.steered,
        overwrite=force,
    )
    name = str(result.dtype).removeprefix("torch.")
    if json:
        record = {"out": str(out), "family": result.family, "parameters": result.parameters}
        print(json_format.dumps({**record, "dtype": name}))
    else:
        print(
            f"{printable(out, 4096)}: {result.family}, {result.parameters:,} parameters in {name}"
        )
    return 0
