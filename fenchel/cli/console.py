"""What commands share: options, progress and results, a terminal that closes.

**Options.** ``settings_from`` merges a settings file, ``--set`` and short options.
``device_and_dtype`` reads ``--device`` and ``--dtype``.

**Output.** ``Console`` shows a run: on a terminal a progress bar with a line of metrics, in a pipe
or a log file plain lines at intervals.

**A terminal that closes.** The command then receives SIGHUP, often twice (from the kernel and from
the shell), and every further write to the terminal fails with EIO. That error would end a run
before it could save its state, so ``may_close`` turns the first SIGHUP into KeyboardInterrupt, like
Ctrl-C, and discards further output.
"""

import errno
import json
import os
import signal
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TextIO

from rich.console import Console as Terminal
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fenchel.config import assign, parse_value

if TYPE_CHECKING:
    import torch

DtypeName = Literal["float32", "bfloat16", "float16", "float64"]
"""What --dtype accepts."""


def device_and_dtype(
    device: str | None, dtype: DtypeName | None = None
) -> "tuple[torch.device, torch.dtype | None]":
    """The flags --device and --dtype: the best device where none is named, and None for a dtype.

    >>> device_and_dtype("cpu", "bfloat16")
    (device(type='cpu'), torch.bfloat16)
    """
    import torch

    from fenchel.train import select_device

    return select_device(device or "auto"), None if dtype is None else getattr(torch, dtype)


@contextmanager
def may_close() -> Iterator[None]:
    """Within, SIGHUP raises KeyboardInterrupt once; output to a closed terminal is discarded."""
    with ExitStack() as stack:
        for redirect, stream in ((redirect_stdout, sys.stdout), (redirect_stderr, sys.stderr)):
            if stream is not None and stream.isatty():
                stack.enter_context(redirect(_TerminalStream(stream)))
        stack.enter_context(_sighup_as_interrupt())
        yield


@contextmanager
def _sighup_as_interrupt() -> Iterator[None]:
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:  # nohup ignores it
        yield
        return
    try:
        signal.signal(signal.SIGHUP, _interrupt)
    except ValueError:  # not in the main thread, where alone handlers can be set
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # the shell sends it a second time
    raise KeyboardInterrupt(signal.Signals(number))


class _TerminalStream:
    """A stream to a terminal that discards its output once the terminal has closed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes, or discards the text if the terminal has closed."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._discard(error)
            return len(text)

    def flush(self) -> None:
        """Likewise."""
        try:
            self._stream.flush()
        except OSError as error:
            self._discard(error)

    def _discard(self, error: OSError) -> None:
        if error.errno != errno.EIO:
            raise error
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())  # buffered output is discarded too
        os.close(null)


PLAIN_EVERY = 5.0
"""Seconds between lines without a terminal."""


def settings_from(
    file: Path | None, assignments: tuple[str, ...], short: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings as nested mappings: the file, overridden by --set, overridden by short options.

    >>> settings_from(None, ("model.width=64",), {"train.steps": 10, "seed": None})
    {'model': {'width': 64}, 'train': {'steps': 10}}
    """
    mapping: dict[str, Any] = {}
    if file is not None:
        try:
            mapping = tomllib.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"there is no settings file {file}.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is not TOML ({error}).") from None
        mapping.pop("format", None)
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name:
            raise ValueError(f"--set takes name=value, got {assignment!r}.")
        mapping = assign(mapping, name.strip(), parse_value(value.strip()))
    for name, given in short.items():
        if given is not None:
            mapping = assign(mapping, name, given)
    return mapping


class Console:
    """Shows a run on the terminal; a ``fenchel.pipeline.RunCallback``."""

    def __init__(self, *, quiet: bool = False, aside: bool = False) -> None:
        """``aside`` keeps standard output for results and also reports progress in a pipe."""
        self.aside = aside
        self.terminal = Terminal(stderr=quiet or aside, quiet=quiet and not sys.stderr.isatty())
        self.live = self.terminal.is_terminal and not quiet
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"),
            console=self.terminal,
            transient=True,
            disable=not self.live,
        )
        self.tasks: dict[str, Any] = {}
        self.printed = 0.0
        self.staged = time.monotonic()
        self.metrics: dict[str, Any] = {}

    def progress(self, stage: str, done: int, total: int) -> None:
        """Progress of a stage other than training."""
        self._bar(stage, done, total)
        if self.aside and not self.live and time.monotonic() - self.staged > PLAIN_EVERY:
            self.staged = time.monotonic()
            self.message(f"{stage}: {done:,} of {total:,}")

    def step(self, step: int, steps: int) -> None:
        """Called after every training step."""
        self._bar("training", step, steps)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Called with every line of metrics."""
        self.metrics.update(metrics)
        validated = "validation/loss" in metrics
        if self.live and "training" in self.tasks:
            self.bars.update(self.tasks["training"], metrics=one_line(self.metrics))
        elif validated or time.monotonic() - self.printed > PLAIN_EVERY:
            self.printed = time.monotonic()
            self.terminal.print(
                f"step {metrics['step']:6d}  {one_line(self.metrics)}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    def message(self, text: str) -> None:
        """Prints a sentence without control characters."""
        self.terminal.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def end(self, path: Path, status: str, reason: str, *, json: bool) -> None:
        """Prints the result of a run and the commands that follow it."""
        self.bars.stop()
        summary = _read(path / "summary.json")
        if json:
            print(_dumps({"run": str(path), **summary}))
            return
        if status != "finished":
            was = "was interrupted" if status == "interrupted" else status
            self.message(f"The run {was}: {reason}")
            if status == "interrupted":
                self.message(f"Go on with:  fenchel train --resume {path}")
        if "validation" in summary:
            self.terminal.print(baseline_table(summary))
            sample = _read(path / "sample.json")
            prompt, text = (escape(printable(sample.get(k, ""))) for k in ("prompt", "text"))
            self.terminal.print(
                f"\n[dim]A sample; the bar ends the prompt:[/dim]\n{prompt}[bold]|[/bold]{text}\n",
                highlight=False,
            )
        self.message(f"Run directory  {path}\nReport         {path / 'report.html'}")
        self.message(f'Try            fenchel generate {path} --prompt "The people"')

    def _bar(self, stage: str, done: int, total: int) -> None:
        if not self.live:
            return
        if stage not in self.tasks:
            self.bars.start()
            self.tasks[stage] = self.bars.add_task(stage, total=total, metrics="")
        self.bars.update(self.tasks[stage], completed=done, total=total)
        if done >= total:
            self.bars.remove_task(self.tasks.pop(stage))


def one_line(metrics: Mapping[str, Any]) -> str:
    """The state of a run in one line; of values per layer the mean or the largest."""
    parts = []
    if "train/loss" in metrics:
        parts.append(f"loss {metrics['train/loss']:.3f}")
    if "validation/bits_per_byte" in metrics:
        parts.append(f"validation {metrics['validation/bits_per_byte']:.3f} bits/byte")
    elif "validation/accuracy" in metrics:  # a sparse loss: bits per byte may be infinite
        parts.append(
            f"validation loss {metrics['validation/loss']:.3f}, "
            f"accuracy {100 * metrics['validation/accuracy']:.1f} %"
        )
    if "attention/entropy" in metrics:
        keys = fmean(metrics["attention/effective"])
        parts.append(f"entropy {fmean(metrics['attention/entropy']):.2f} nats ({keys:.1f} keys)")
        parts.append(f"max logit {max(metrics['attention/max_logit']):.1f}")
    if "train/gradient_norm" in metrics:
        parts.append(f"gradient {metrics['train/gradient_norm']:.2f}")
    if "time/tokens_per_second" in metrics:
        parts.append(f"{metrics['time/tokens_per_second'] / 1e3:.1f}k tokens/s")
    return " · ".join(parts)


def baseline_table(summary: Mapping[str, Any]) -> Table:
    """Bits per byte of the model and of the baselines, as a table."""
    validation, baselines = summary["validation"], summary.get("baselines", {})
    table = Table(title="validation text, bits per byte (lower is better)", title_justify="left")
    table.add_column("")
    table.add_column("bits/byte", justify="right")
    rows = {
        f"this model ({summary['parameters']:,} parameters)": validation.get("bits_per_byte"),
        "5-byte n-gram, Witten-Bell": baselines.get("ngram5"),
        "bzip2 -9": baselines.get("bzip2"),
    }
    for name, value in sorted(rows.items(), key=lambda row: row[1] or 99.0):
        table.add_row(name, "not computed" if value is None else f"{value:.3f}")
    if "uncovered" in validation:
        table.caption = (
            f"loss {validation['loss']:.3f}, accuracy {100 * validation['accuracy']:.1f} %; "
            f"{100 * validation['uncovered']:.1f} % of the targets have probability 0, "
            "and one is enough to make bits per byte infinite"
        )
    return table


def printable(text: str) -> str:
    """Text without control characters, so that text from a file cannot control the terminal."""
    return "".join(c for c in text if c in "\n\t" or c.isprintable())


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _dumps(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1)
