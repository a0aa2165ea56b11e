"""fenchel train: train a model on a text, from settings to a run directory with a report."""

import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from fenchel.cli.console import (
    Console,
    Switch,
    Whole,
    Words,
    outlive_output,
    require_inputs,
    settings_from,
)
from fenchel.files import require_output


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """The flags of a run, whether it trains or tunes."""

    set: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = ()
    """One setting, such as train.batch=16; repeatable. fenchel settings explains them all."""
    budget: Words | None = None
    """Time for training, such as 90s, 3m or 1h: training ends by then. Short for train.budget."""
    steps: Whole | None = None
    """Number of steps, instead of a time. Short for train.steps."""
    seed: Whole | None = None
    """Seed of the initial weights, the order of batches and dropout."""
    out: Path | None = None
    """The run directory, by default runs/DATE_TIME_TEXT; refused if it holds a run."""
    resume: Path | None = None
    """Continue the run in this directory, bit for bit as if it had not stopped."""
    accept_new_text: Switch = False
    """With --resume: continue although the text has changed."""
    processes: Whole | None = None
    """Number of processes to start on this machine by torchrun; they train together."""
    log: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """Loggers in addition to metrics.jsonl: tensorboard."""
    json: Switch = False
    """Print the summary as JSON."""

    def short(self) -> dict[str, Any]:
        """The settings that flags are short for; None where one is left out."""
        log = list(self.log) or None
        names = {"budget": self.budget, "steps": self.steps, "log": log}
        return {"seed": self.seed, **{f"train.{name}": value for name, value in names.items()}}

    def start(
        self,
        mapping: dict[str, Any],
        *,
        export: Path | None = None,
        merge: bool = False,
        checkpoint: Path | None = None,
        template: str | None = None,
    ) -> int:
        """``pipeline.start_run`` in this process or in several; prints, and returns the exit code.

        ``export`` is the directory for the model of a run that has finished: of Hugging Face, or of
        PEFT for adapters that are not to ``merge``.
        """
        if self.out is not None:
            require_output(self.out, folder=True)
        if self.processes is not None and "RANK" not in os.environ:
            if self.processes < 1:
                raise ValueError(f"--processes {self.processes} should be at least 1.")
            from fenchel.distributed.processes import launch

            return launch(self.processes, sys.argv[1:])
        source = mapping["text"].get("source") if isinstance(mapping.get("text"), dict) else None
        if isinstance(source, str) and source:
            require_inputs(text=source, conversations=checkpoint is not None, answered=True)
        outlive_output()
        if not (first := os.environ.get("RANK", "0") == "0"):
            warnings.simplefilter("ignore")  # rank 0 prints what all of them notice
        with Console(quiet=self.json, silent=not first) as console:
            console.progress("loading torch", 0, 0)  # seconds, in which nothing else could be shown
            from fenchel.checkpoints import convert, convert_to_peft
            from fenchel.checkpoints.hf_export import require_free
            from fenchel.checkpoints.tuned_run import bases, read_base
            from fenchel.pipeline import start_run

            if export is not None and (source := checkpoint or self.resume) is not None:
                require_free(export, overwrite=False, reads=bases(source))
            path, outcome = start_run(
                mapping,
                console,
                out=self.out,
                checkpoint=checkpoint,
                template=template,
                resume_from=self.resume,
                accept_new_text=self.accept_new_text,
            )
            if outcome is None:
                return 2  # as the process that has printed why
            if export is not None and outcome.status == "finished" and first:
                console.progress("writing the model", 0, 0)
                base = read_base(path)
                adapted = base is not None and base.lora is not None and not merge
                (convert_to_peft if adapted else convert)(path, export)
        if first:
            console.end(path, outcome.status, outcome.reason, json=self.json)
        if export is not None and not self.json:
            written = outcome.status == "finished"
            console.message(f"Model          {export}" if written else f"{export} was not written.")
        if outcome.status == "diverged":
            return 3
        return 0 if outcome.signal is None else 128 + outcome.signal


def run(
    config: Path | None = None,
    /,
    *,
    preset: str | None = None,
    text: str | None = None,
    flags: RunFlags = RunFlags(),
) -> int:
    """Train a model on a text and leave a run directory with a report.

    With no arguments: the built-in text, a small model, about two minutes on two cores. Under
    torchrun its processes train together.

    Parameters
    ----------
    config
        A TOML file of settings; config.toml of any run is one.
    preset
        Settings for a size: "demo" (the default), "small", "base", "large", or a published shape
        such as "gpt2" or "llama-1b"; every setting overrides it. fenchel list presets shows all.
    text
        "sotu", "kjv", a text file, a folder of them, or a .jsonl file. Short for text.source.
    """
    short = {"preset": preset, "text.source": text, **flags.short()}
    if flags.resume is not None and (config, flags.out, text) != (None, None, None):
        raise ValueError("--resume continues a run as it is: no CONFIG, --out or --text with it.")
    if preset is not None and config is not None:
        given = settings_from(config, (), {}).get("model", {})
        if both := [name for name in ("width", "heads", "layers", "context") if name in given]:
            raise ValueError(
                f"--preset {preset} and {config} both give model.{both[0]}; leave out one of them."
            )
    mapping = settings_from(config, flags.set, short)
    given = settings_from(None, flags.set, short).get("train")
    if isinstance(given, dict) and "budget" in given:
        if "steps" in given:
            raise ValueError("give --budget or --steps, not both.")
        mapping["train"].pop("steps", None)  # those of CONFIG, which the budget replaces
    return flags.start(mapping)
