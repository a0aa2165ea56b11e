"""fenchel train: train a model on a text, from settings to a run directory with a report."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from fenchel.cli.console import Console, Whole, Words, outlive_output, settings_from

DIVERGED = 3


def run(
    config: Path | None = None,
    /,
    *,
    set: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = (),
    size: str | None = None,
    text: str | None = None,
    budget: Words | None = None,
    steps: Whole | None = None,
    seed: Whole | None = None,
    out: Path | None = None,
    resume: Path | None = None,
    accept_new_text: Annotated[bool, Parameter(negative="")] = False,
    log: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Train a model on a text and leave a run directory with a report.

    With no arguments: the built-in text, a small model, about two minutes on two cores.

    Parameters
    ----------
    config
        A TOML file of settings; config.toml of any run is one.
    set
        One setting, such as model.width=256 or train.loss=entmax; repeatable, overrides the file.
        fenchel settings explains them all.
    size
        "demo" (the default, 4 layers of width 128), "small" (6 x 512), "base" (12 x 768) or "large"
        (24 x 1024); settings of the model override it.
    text
        "sotu", "kjv", a text file, a folder of them, or a .jsonl file. Short for text.source.
    budget
        Time for training, such as 90s, 3m or 1h. Short for train.budget.
    steps
        Steps instead of a time. Short for train.steps.
    seed
        Seed of the initial weights, the order of batches and dropout.
    out
        The run directory, by default runs/DATE_TIME_TEXT; refused if it holds a run.
    resume
        Continue the run in this directory, bit for bit as if it had not stopped.
    accept_new_text
        With --resume: continue although the text has changed.
    log
        Loggers beside metrics.jsonl: tensorboard.
    json
        Print the summary as JSON.
    """
    short: dict[str, Any] = {
        "model.size": size,
        "text.source": text,
        "train.budget": budget,
        "train.steps": steps,
        "seed": seed,
    }
    if log:
        short["train.log"] = list(log)
    if resume is not None and (config is not None or out is not None or text is not None):
        raise ValueError("--resume continues a run as it is: no CONFIG, --out or --text with it.")
    if size is not None and config is not None:
        given = settings_from(config, (), {}).get("model", {})
        if both := [name for name in ("width", "heads", "layers", "context") if name in given]:
            raise ValueError(
                f"--size {size} and {config} both give model.{both[0]}; leave out one of them."
            )
    mapping = settings_from(config, set, short)
    given = settings_from(None, set, short).get("train")
    if isinstance(given, dict) and "budget" in given:
        if "steps" in given:
            raise ValueError("give --budget or --steps, not both.")
        mapping["train"].pop("steps", None)  # those of CONFIG, which the budget replaces
    outlive_output()
    console = Console(quiet=json)
    with console:
        console.progress("loading torch", 0, 0)  # seconds, in which nothing else could be shown

        from fenchel import pipeline
        from fenchel.train import retain_freed_memory

        retain_freed_memory()
        if resume is not None:
            path = resume
            outcome = pipeline.resume(
                path, console, changes=mapping, accept_new_text=accept_new_text
            )
        else:
            chosen = pipeline.settings(mapping)
            path = out or pipeline.new_run_path(Path("runs"), chosen)
            outcome = pipeline.begin(chosen, path, console)
    console.end(path, outcome.status, outcome.reason, json=json)
    if outcome.status == "diverged":
        return DIVERGED
    return 0 if outcome.signal is None else 128 + outcome.signal
