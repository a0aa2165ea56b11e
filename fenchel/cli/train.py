"""fenchel train: train a model on a text, from settings to a run directory with a report."""

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter

from fenchel.cli.console import Console, Whole, Words, outlive_output, settings_from

if TYPE_CHECKING:
    from fenchel.distributed.processes import World
    from fenchel.train import Outcome

DIVERGED, FAILED = 3, 2


def run(
    config: Path | None = None,
    /,
    *,
    set: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = (),
    preset: str | None = None,
    text: str | None = None,
    budget: Words | None = None,
    steps: Whole | None = None,
    seed: Whole | None = None,
    out: Path | None = None,
    resume: Path | None = None,
    accept_new_text: Annotated[bool, Parameter(negative="")] = False,
    processes: Whole | None = None,
    log: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Train a model on a text and leave a run directory with a report.

    With no arguments: the built-in text, a small model, about two minutes on two cores. Under
    torchrun its processes train together (docs/distributed.md).

    Parameters
    ----------
    config
        A TOML file of settings; config.toml of any run is one.
    set
        One setting, such as model.width=256 or train.loss=entmax; repeatable, overrides the file.
        fenchel settings explains them all.
    preset
        Settings for a size: "demo" (the default), "small", "base", "large", or a published shape
        such as "gpt2" or "llama-1b"; every setting overrides it. fenchel list presets shows all.
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
    processes
        Number of processes to start on this machine by torchrun; they train together.
    log
        Loggers in addition to metrics.jsonl: tensorboard.
    json
        Print the summary as JSON.
    """
    short: dict[str, Any] = {
        "preset": preset,
        "text.source": text,
        "train.budget": budget,
        "train.steps": steps,
        "seed": seed,
    }
    if log:
        short["train.log"] = list(log)
    if resume is not None and (config is not None or out is not None or text is not None):
        raise ValueError("--resume continues a run as it is: no CONFIG, --out or --text with it.")
    if preset is not None and config is not None:
        given = settings_from(config, (), {}).get("model", {})
        if both := [name for name in ("width", "heads", "layers", "context") if name in given]:
            raise ValueError(
                f"--preset {preset} and {config} both give model.{both[0]}; leave out one of them."
            )
    mapping = settings_from(config, set, short)
    given = settings_from(None, set, short).get("train")
    if isinstance(given, dict) and "budget" in given:
        if "steps" in given:
            raise ValueError("give --budget or --steps, not both.")
        mapping["train"].pop("steps", None)  # those of CONFIG, which the budget replaces
    if processes is not None and "RANK" not in os.environ:
        return launch(processes, without_processes(sys.argv[1:]))
    outlive_output()
    first, console = console_of_process(quiet=json)
    with console:
        console.progress("loading torch", 0, 0)  # seconds, in which nothing else could be shown
        path, outcome = _train(mapping, console, out, resume, accept_new_text)
    if outcome is None:
        return FAILED
    if first:
        console.end(path, outcome.status, outcome.reason, json=json)
    if outcome.status == "diverged":
        return DIVERGED
    return 0 if outcome.signal is None else 128 + outcome.signal


def _train(
    mapping: dict[str, Any],
    console: "Console | Silent",
    out: Path | None,
    resume: Path | None,
    accept_new_text: bool,
) -> "tuple[Path, Outcome | None]":
    """The run directory and how the run ended; None where another process reports the failure."""
    from fenchel import pipeline

    def prepare() -> "Start":
        chosen = pipeline.settings(mapping)
        return Start(
            lambda: pipeline.new_run_path(Path("runs"), chosen),
            lambda path, world: pipeline.begin(chosen, path, console, world),
        )

    return run_together(mapping, console, out, resume, accept_new_text, prepare)


class Start(NamedTuple):
    """How a run begins."""

    path: Callable[[], Path]
    """Its directory, where none is given."""
    begin: "Callable[[Path, World], Outcome]"


def run_together(
    mapping: dict[str, Any],
    console: "Console | Silent",
    out: Path | None,
    resume: Path | None,
    accept_new_text: bool,
    prepare: Callable[[], Start],
) -> "tuple[Path, Outcome | None]":
    """Begin or resume a run with the processes that torchrun has started.

    ``prepare`` refuses settings before anything else. Returns the run directory and how the run
    ended; None where another process has reported the failure: the first process that fails raises
    and so prints its sentence, and the others end in silence.
    """
    from fenchel import pipeline
    from fenchel.distributed.processes import (
        ALONE,
        FailedElsewhere,
        ProcessMissing,
        lost_process,
        start,
    )
    from fenchel.train import RunDir, TrainConfig, retain_freed_memory

    retain_freed_memory()
    world: World = ALONE
    path = resume or out or Path()
    try:
        start_of = None if resume else prepare()
        saved = {} if resume is None else RunDir(resume).read_settings().get("train", {})
        given = {**saved, **mapping.get("train", {})}
        device, wait = given.get("device", "auto"), given.get("timeout", TrainConfig.timeout)
        world = start(str(device), seconds=float(wait))
        begun = None if resume else world.on_first(world.recorded_run)
        if begun is not None:  # by an attempt before this one, which torchrun has started again
            path = out = Path(begun)
            if world.on_first((path / "config.toml").exists):
                start_of, mapping = None, {}
        if start_of is None:
            outcome = pipeline.resume(
                path, console, changes=mapping, accept_new_text=accept_new_text, world=world
            )
        else:
            new_path = start_of.path
            path = Path(world.on_first(lambda: str(out or new_path())))
            outcome = start_of.begin(path, world)
    except FailedElsewhere:
        return path, None
    except Exception as error:
        alone = world is ALONE
        if alone and (os.environ.get("RANK", "0") == "0" or isinstance(error, ProcessMissing)):
            raise
        if alone or not world.fails_first():
            return path, None
        if lost_process(error):
            raise ValueError(
                "a process of this run has ended or does not answer; what was saved is whole, go "
                f"on with --resume {path}."
            ) from error
        raise
    finally:
        world.close()
    return path, outcome


class Silent:
    """The console of every process but the first."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def progress(self, stage: str, done: int, total: int) -> None:
        """Nothing is shown."""

    def step(self, step: int, steps: int) -> None:
        """Nothing is shown."""

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Nothing is shown."""

    def message(self, text: str) -> None:
        """Nothing is shown."""

    def end(self, path: Path, status: str, reason: str, *, json: bool) -> None:
        """Nothing is shown."""


def without_processes(words: list[str]) -> list[str]:
    """A command line without --processes.

    >>> without_processes(["train", "--processes", "2", "--seed", "1"])
    ['train', '--seed', '1']
    """
    at = next(n for n, word in enumerate(words) if word.split("=")[0] == "--processes")
    return words[:at] + words[at + (1 if "=" in words[at] else 2) :]


def console_of_process(*, quiet: bool) -> "tuple[bool, Console | Silent]":
    """Whether this process is the first of its run, and what it prints to."""
    if os.environ.get("RANK", "0") == "0":
        return True, Console(quiet=quiet)
    warnings.simplefilter("ignore")  # rank 0 prints what all of them notice
    return False, Silent()


def launch(processes: int, words: list[str]) -> int:
    """Start ``fenchel WORDS`` so many times by the engine of torchrun; returns the exit code.

    torchrun --standalone --nproc-per-node N -m fenchel WORDS does the same, adds a report of some
    forty lines to the sentence of a process that fails, and ends with 1 whatever its exit code.
    """
    import logging

    if processes < 1:
        raise ValueError(f"--processes {processes} should be at least 1.")

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # in this process, which does nothing else
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of libraries that train.threads does not reach
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=f"fenchel-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "fenchel", *words)
    except ChildFailedError as error:
        codes = [error.get_first_failure()[1].exitcode]
        codes += [failure.exitcode for failure in error.failures.values()]
        code = next((code for code in codes if code > FAILED), codes[0])  # FAILED is also silence
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + error.sigval
    return 0
