"""What commands share: options, progress and results, a terminal that closes.

**Options.** ``settings_from`` merges a settings file, ``--set`` and short options.
``device_and_dtype`` reads ``--device`` and ``--dtype``; ``load_checkpoint`` follows them.

**Output.** ``Console`` shows a run. On a terminal one line holds the stage under way, its bar and
the time left, and the line below it the metrics that fit. In a pipe or a log file every stage is a
line when it begins, and metrics are plain lines at intervals. ``loading`` covers the seconds in
which torch is imported.

**A terminal that closes.** The command then receives SIGHUP, often twice (from the kernel and from
the shell), and every further write to the terminal fails with EIO. That error would end a run
before it could save its state, so ``may_close`` turns the first SIGHUP into KeyboardInterrupt, like
Ctrl-C, and discards further output.

**A pipe that closes.** A command whose reader has gone, as in ``fenchel generate RUN | head -1``,
ends silently with the exit code of SIGPIPE. Training continues instead (``outlive_output``): its
results are in the run directory. The error is ``OutputClosed`` and not BrokenPipeError, which rich
would turn into its own exit.
"""

import errno
import json as json_format
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TextIO

from cyclopts import Parameter, Token
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console as Terminal
from rich.console import RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

from fenchel.config import assign, parse_toml, parse_value
from fenchel.files import Notice, printable, require_page, write_atomic
from fenchel.hub_cache import find_checkpoint, require_checkpoint
from fenchel.operating_system import SYSTEM

if TYPE_CHECKING:
    import torch

    from fenchel.checkpoints import Loaded

DtypeName = Literal["float32", "bfloat16", "float16", "float64"]
"""What --dtype accepts."""


def _whole(_type: type, tokens: Sequence[Token]) -> int:
    """A whole number; 1.5 is an error, where cyclopts would round it."""
    text = tokens[0].value
    if re.fullmatch(r"[+-]?\d{1,18}", text) is None:
        raise ValueError(f"it takes a whole number, got {text!r}.")
    return int(text)


def _checkpoint(_type: type, tokens: Sequence[Token]) -> Path:
    """A directory, or the snapshot of a model that is named."""
    return find_checkpoint(tokens[0].value)


CheckpointPath = Annotated[Path, Parameter(converter=_checkpoint)]
"""A run directory, a Hugging Face directory, or a name that the Hugging Face cache has."""
ModelPath = Annotated[
    CheckpointPath,
    Parameter(
        help="A run directory, a Hugging Face directory, or ORGANISATION/NAME[@REVISION] of a "
        "model in the Hugging Face cache."
    ),
]
"""The model of a command."""
Whole = Annotated[int, Parameter(converter=_whole)]
"""A flag that takes a whole number."""
Words = Annotated[str, Parameter(allow_leading_hyphen=True)]
"""Text of a person, which may begin with a hyphen."""
Switch = Annotated[bool, Parameter(negative="")]
"""A flag without a value, and without its opposite."""
Json = Annotated[Switch, Parameter(help="Print one JSON object instead of text.")]
"""--json."""
Device = Annotated[
    str | None,
    Parameter(help='"cpu", "cuda", "cuda:1" or "mps"; the GPU by default where there is one.'),
]
"""--device."""
TextStart = Annotated[
    str,
    Parameter(
        help='"sotu", "kjv", a text file, a folder, or a .jsonl file of texts or of conversations; '
        "its first tokens are read."
    ),
]
"""--text of the commands that look at a few tokens."""


def device_and_dtype(
    device: str | None, dtype: DtypeName | None = None, *, float64: bool = False
) -> "tuple[torch.device, torch.dtype | None]":
    """The flags --device and --dtype: the best device where none is named, and None for a dtype.

    ``float64`` is for commands that measure in it, on whatever dtype: MPS does not serve them, and
    a sentence says so where it would have been the best device.

    >>> device_and_dtype("cpu", "bfloat16")
    (device(type='cpu'), torch.bfloat16)
    """
    import torch

    from fenchel.train import select_device

    on = select_device(device or "auto", float64=float64 or dtype == "float64")
    if on != select_device(device or "auto"):
        warnings.warn(
            "mps has no float64, in which this is computed; it runs on the CPU.",
            Notice,
            stacklevel=2,
        )
    return on, None if dtype is None else getattr(torch, dtype)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """The flags of how a checkpoint is loaded."""

    adapter: CheckpointPath | None = None
    """A directory of PEFT with LoRA adapters for this model, which are merged into its weights."""
    device: Device = None
    dtype: DtypeName | None = None
    """Dtype of the weights; the one they are stored in by default, or float32 on a CPU without
    instructions for it."""

    def load(self, directory: Path, *, float64: bool = False) -> "Loaded":
        """The model as the flags ask for it, and its tokenizer.

        Without a dtype the model has that of its files, unless the machine computes in that one
        slowly (``fenchel.train.hardware.select_dtype``); a sentence then names the other.
        """
        from fenchel.checkpoints import load
        from fenchel.train.hardware import select_dtype

        device, dtype = device_and_dtype(self.device, self.dtype, float64=float64)
        loaded = load(directory, dtype=dtype, adapter=self.adapter)
        stored = loaded.model.lm_head_weight.dtype
        size = sum(p.nbytes for p in loaded.model.parameters())
        chosen = select_dtype(stored, device, bytes=size) if dtype is None else stored
        if chosen != stored:
            names = [str(one).removeprefix("torch.") for one in (stored, chosen)]
            warnings.warn(
                f"The weights are stored in {names[0]}, for which this CPU has no instructions; "
                f"they are used in {names[1]} (--dtype {names[0]} keeps them).",
                Notice,
                stacklevel=2,
            )
        return loaded._replace(model=loaded.model.to(device, chosen))


LOADED_AS_STORED = LoadFlags()


def text_path(text: str | None) -> Path | None:
    """The file or folder that --text names; None for a built-in text."""
    return None if text in (None, "sotu", "kjv") else Path(str(text))


def require_inputs(
    directory: Path | None = None,
    text: str | None = None,
    *,
    conversations: bool = False,
    answered: bool = False,
) -> None:
    """Refuse a directory or a text that is not there, before seconds are spent on torch.

    Of a text the first document is read, which shows most files that are not text; it may hold
    ``conversations``, which a checkpoint that is tuned on them needs ``answered``.
    """
    if directory is not None:
        require_checkpoint(directory)
    if text is not None:
        from fenchel.data.text import holds_conversations, open_text

        with warnings.catch_warnings(action="ignore"):  # the reader repeats its notices
            messages = conversations and holds_conversations(text)
            next(open_text(text, messages=messages, answered=answered).documents())


class OutputClosed(Exception):
    """The reader of standard output has closed it."""


@contextmanager
def may_close() -> Iterator[None]:
    """Context manager: SIGHUP raises KeyboardInterrupt once, and closed output is discarded.

    Output to a closed terminal and to a closed standard error is discarded; that to a closed
    standard output raises OutputClosed.
    """
    with ExitStack() as stack:
        if sys.stdout is not None:
            stack.enter_context(redirect_stdout(_Output(sys.stdout)))
        if sys.stderr is not None:
            stack.enter_context(redirect_stderr(_Output(sys.stderr, needed=False)))
        stack.enter_context(_sighup_as_interrupt())
        yield


def outlive_output() -> None:
    """Continues after standard output is closed or fails; standard error gets one sentence."""
    if isinstance(sys.stdout, _Output):
        sys.stdout.needed = False


@contextmanager
def _sighup_as_interrupt() -> Iterator[None]:
    hangup = SYSTEM.hangup
    if hangup is None or signal.getsignal(hangup) is not signal.SIG_DFL:  # nohup ignores it
        yield
        return
    try:
        signal.signal(hangup, _interrupt)
    except ValueError:  # handlers can be set only in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(hangup, signal.SIG_DFL)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # the shell sends it a second time
    raise KeyboardInterrupt(signal.Signals(number))


class _Output:
    """A standard stream that may close; unless it is needed, what cannot be written is lost."""

    def __init__(self, stream: TextIO, *, needed: bool = True) -> None:
        self._stream = stream
        self._on_terminal = stream.isatty()  # a closed stream raises
        self.needed = needed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes, or discards the text if the stream has closed.

        Characters that its encoding lacks, such as those of a name that is not UTF-8, are escaped.
        """
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            return self.write(text.encode(encoding, "backslashreplace").decode(encoding))
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
        terminal = error.errno == errno.EIO and self._on_terminal
        if self.needed and error.errno not in SYSTEM.closed_pipe and not terminal:
            raise error
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())  # buffered output is discarded too
        os.close(null)
        if self.needed and not terminal:
            raise OutputClosed
        if not terminal and self is sys.stdout:
            reason = (error.strerror or "closed").lower()
            print(
                f"fenchel: standard output cannot be written ({reason}); the run goes on "
                "without it.",
                file=sys.stderr,
            )


PLAIN_EVERY = 5.0
"""Seconds between lines without a terminal."""
TRAINING = "training"
"""The stage whose progress is counted in steps."""


def settings_from(
    file: Path | None, assignments: tuple[str, ...], short: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings as nested mappings: the file, overridden by --set, overridden by short options.

    >>> settings_from(None, ("model.width=64",), {"train.steps": 10, "seed": None})
    {'model': {'width': 64}, 'train': {'steps': 10}}
    """
    mapping: dict[str, Any] = {}
    if file is not None:
        mapping = _read_settings(file)
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


def _read_settings(file: Path) -> dict[str, Any]:
    if file.is_dir():
        run = (file / "config.toml").exists()
        use = f"continue the run by --resume {file}" if run else f"read its texts by --text {file}"
        raise ValueError(f"{file} is a folder and not a file of settings; {use}.")
    try:
        return parse_toml(file.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"there is no settings file {file}.") from None
    except ValueError as error:
        hint = "" if file.suffix == ".toml" else f"; a text is named by --text {file}"
        raise ValueError(f"{file} is not TOML ({error}){hint}.") from None


class Bars(Progress):
    """The stage under way on one line, and below it a line of metrics."""

    metrics: Mapping[str, Any] = {}

    def get_renderables(self) -> Iterator[RenderableType]:
        """One row per stage, then the metrics that fit into the width of the terminal."""
        yield from super().get_renderables()
        if self.metrics and self.tasks:
            yield Text(one_line(self.metrics, self.console.width), no_wrap=True, overflow="crop")


class _Amount(ProgressColumn):
    """Steps as a count, other stages as a percentage; nothing for a stage without a length."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        if task.description == TRAINING:
            return Text(f"step {int(task.completed):,} of {int(task.total):,}")
        return Text(f"{task.percentage:.0f} %")


class _TimeLeft(ProgressColumn):
    """The time left, and the time since the start of a stage without a length."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text(_clock(task.elapsed))
        return Text(f"{_clock(task.time_remaining)} left")


def _clock(seconds: float | None) -> str:
    """
    >>> _clock(8.2), _clock(3725), _clock(None)
    ('0:08', '1:02:05', '-:--')
    """
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Console:
    """Shows a run on the terminal; a ``fenchel.pipeline.RunCallback``."""

    def __init__(self, *, quiet: bool = False, aside: bool = False, silent: bool = False) -> None:
        """``aside`` keeps standard output for results: stages and messages go to standard error.

        ``silent`` is the console of every process of a run but the first: nothing is shown.
        """
        silent = silent or (quiet and not sys.stderr.isatty())
        self.terminal = Terminal(stderr=quiet or aside, quiet=silent, emoji=False)
        self.live = self.terminal.is_terminal and not quiet and not silent
        length = min(24, self.terminal.width - 50)
        self.bars = Bars(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            *([BarColumn(bar_width=length)] if length >= 4 else []),  # the numbers come first
            _Amount(table_column=Column(no_wrap=True)),
            _TimeLeft(table_column=Column(no_wrap=True)),
            console=self.terminal,
            transient=True,
            disable=not self.live,
        )
        self.aside = aside
        self.stage = ""
        self.task: TaskID | None = None
        self.printed = time.monotonic()
        self.metrics: dict[str, Any] = {}

    def __enter__(self) -> Self:
        """Shows bars from here on."""
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Removes the bars, so that an error or a result follows on its own line."""
        self.bars.stop()

    def progress(self, stage: str, done: int, total: int) -> None:
        """Progress of a stage, which ends the one before it; a total of 0 is an unknown length.

        In a pipe a stage is named when it begins, and again every PLAIN_EVERY seconds. A command
        whose result goes to standard output names a stage only once it has taken that long.
        """
        begun = stage != self.stage
        self.stage = stage
        if self.live:
            self._bar(stage, done, total, begun)
            return
        now = time.monotonic()
        if begun and self.aside:
            pass
        elif begun:
            self.message(f"{stage[0].upper()}{stage[1:]}.")
        elif now - self.printed > PLAIN_EVERY and total:
            self.message(f"{stage}: {done:,} of {total:,}")
        else:
            return
        self.printed = now

    def step(self, step: int, steps: int) -> None:
        """Called after every training step."""
        if self.live:
            self._bar(TRAINING, step, steps, self.stage != TRAINING)
        self.stage = TRAINING

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Called with every line of metrics."""
        self.metrics.update(metrics)
        if self.live:
            self.bars.metrics = self.metrics
        elif "validation/loss" in metrics or time.monotonic() - self.printed > PLAIN_EVERY:
            self.printed = time.monotonic()
            self.message(f"step {metrics['step']:6d}  {one_line(self.metrics)}")

    def message(self, text: str) -> None:
        """Prints a sentence without control characters; a terminal breaks it between words."""
        known = self.terminal.is_terminal or "COLUMNS" in os.environ  # as tables have it
        width = self.terminal.width if known else None
        shown = break_lines(printable(text, None), width)
        self.terminal.print(shown, highlight=False, markup=False, soft_wrap=True)

    def end(self, path: Path, status: str, reason: str, *, json: bool) -> None:
        """Prints the result of a run and the commands that follow it."""
        summary = _read(path / "summary.json")
        if json:
            print(json_format.dumps({"run": str(path), **summary}, indent=1))
            return
        if status != "finished":
            was = "was interrupted" if status == "interrupted" else status
            self.message(f"The run {was}: {reason}")
            if status == "interrupted":
                self.message(f"Go on with:  fenchel train --resume {path}")
        sample = _read(path / "sample.json")
        prompt, text = (printable(sample.get(name, ""), None) for name in ("prompt", "text"))
        if "validation" in summary:
            self.terminal.print(baseline_table(summary))
            self.terminal.print(
                f"\n[dim]A sample; the bar ends the prompt:[/dim]\n"
                f"{escape(prompt)}[bold]|[/bold]{escape(text)}\n",
                highlight=False,
            )
        self.message(f"Run directory  {path}\nReport         {path / 'report.html'}")
        if summary.get("text", {}).get("validation_answer_bytes") is not None:
            self.message(f"Try            fenchel chat {shlex.quote(str(path))}")
        elif prompt:
            self.message(f"Try            {generate_command(path, prompt)}")

    def _bar(self, stage: str, done: int, total: int, begun: bool) -> None:
        if self.task is not None and (begun or done >= total > 0):
            self.bars.remove_task(self.task)
            self.task = None
        if self.task is None and not done >= total > 0:
            self.task = self.bars.add_task(stage, total=total or None)
            self.bars.refresh()  # the work may hold the interpreter for a while
        if self.task is not None:
            self.bars.update(self.task, completed=done, total=total or None)


@contextmanager
def stages(*, json: bool) -> Iterator[Console]:
    """Context manager: the stages of a command, of which the first is to load torch."""
    with Console(quiet=json, aside=True) as console:
        console.progress("loading torch", 0, 0)
        yield console


class MeasuredPage:
    """What a command that measures gives: a page, and one JSON object or tables."""

    def __init__(
        self, out: Path | None, usual: str, *, json: bool, reads: Iterable[Path | None]
    ) -> None:
        """``usual`` is the page where none is named; with --json there is none then."""
        self.path, self.json = out if json else out or Path(usual), json
        if self.path is not None:
            require_page(self.path, reads=[*reads])

    def write(self, text: Callable[[], str], plain: Callable[[], Any]) -> bool:
        """Write the page, and print JSON where that is wanted; False where tables are."""
        if self.path is not None:
            write_atomic(self.path, text())
        if self.json:
            print(json_format.dumps(plain()))
        return self.json

    def show(self, tables: Iterable[Table], sentences: Iterable[str]) -> None:
        """Print tables, sentences below them, and where the page is."""
        console = Console()
        for table in tables:
            console.terminal.print(table)
        for sentence in sentences:
            console.message(sentence)
        print(f"Page  {printable(self.path, 4096)}")


@contextmanager
def loading(what: str = "loading torch") -> Iterator[None]:
    """Context manager: a terminal shows ``what`` on its last line; a pipe receives nothing."""
    with Terminal(stderr=True).status(what, spinner="line"):
        yield


def plain_table(title: str, headings: Iterable[str] = (), caption: str | None = None) -> Table:
    """A table of columns to the right, in the form of all results."""
    table = Table(
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def break_lines(text: str, width: int | None) -> str:
    """Long lines broken between words; a word stays in one piece, so that a path can be copied.

    >>> break_lines("go on with --resume runs/2026-11-16_sotu", 20).splitlines()
    ['go on with --resume', 'runs/2026-11-16_sotu']
    """
    if width is None:
        return text
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    lines = text.split("\n")
    return "\n".join(wrapper.fill(line) if cell_len(line) > width else line for line in lines)


def width_of(stream: TextIO) -> int | None:
    """The columns of a terminal; None for a pipe or a file."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


class WordWrap:
    """Text that arrives in pieces, broken between words to fit a width; None changes nothing.

    A word is returned once the space after it has arrived, or as much of it as fills a line.

    >>> wrap = WordWrap(9)
    >>> [wrap(piece) for piece in ("the peo", "ple of", " these", " States\\n")]
    ['the', '\\npeople', ' of', '\\nthese\\nStates\\n']
    """

    def __init__(self, width: int | None) -> None:
        self.width, self.column = width, 0
        self.space, self.word = "", ""

    def __call__(self, text: str) -> str:
        """The part of ``text``, and of what was held back, that can be printed now."""
        if self.width is None:
            return text
        parts = []
        for character in text:
            if not character.isspace():
                self.word += character
                if cell_len(self.word) < self.width:
                    continue
            parts.append(self._place_word())
            if character == "\n":
                parts.append("\n")
                self.column, self.space = 0, ""
            elif character.isspace():
                self.space += character
        return "".join(parts)

    def _place_word(self) -> str:
        if not self.word:
            return ""
        assert self.width is not None
        placed, length = self.space + self.word, cell_len(self.space) + cell_len(self.word)
        if (self.column or self.space) and self.column + length > self.width:
            placed, length, self.column = "\n" + self.word, cell_len(self.word), 0
        self.column += length
        if self.column > self.width:  # the terminal breaks a word that is longer than a line
            self.column %= self.width
        self.space = self.word = ""
        return placed


def generate_command(path: Path, prompt: str, words: int = 3) -> str:
    """The command that continues the first words of a prompt.

    >>> generate_command(Path("runs/a"), "We the people of")
    "fenchel generate runs/a --prompt 'We the people'"
    """
    begin = " ".join(prompt.split()[:words])
    return f"fenchel generate {shlex.quote(str(path))} --prompt {shlex.quote(begin)}"


def one_line(metrics: Mapping[str, Any], width: int | None = None) -> str:
    """The state of a run in one line; of values per layer the mean or the largest.

    Parts that do not fit into ``width`` columns are left out, the last ones first.

    >>> one_line({"train/loss": 2.5, "train/gradient_norm": 0.5}, 12)
    'loss 2.500'
    """
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
    if "time/tokens_per_second" in metrics:
        parts.append(f"{metrics['time/tokens_per_second'] / 1e3:.1f}k tokens/s")
    if "attention/entropy" in metrics:
        parts.append(f"entropy {fmean(metrics['attention/entropy']):.2f} nats")
        parts.append(f"{fmean(metrics['attention/effective']):.1f} keys")
        parts.append(f"max logit {max(metrics['attention/max_logit']):.1f}")
    if "train/gradient_norm" in metrics:
        parts.append(f"gradient {metrics['train/gradient_norm']:.2f}")
    while width is not None and len(parts) > 1 and len(" · ".join(parts)) > width:
        parts.pop()
    return " · ".join(parts)


def baseline_table(summary: Mapping[str, Any]) -> Table:
    """Bits per byte of the model and of the baselines, as a table."""
    validation, baselines = summary["validation"], summary.get("baselines", {})
    limit = summary.get("validation_limit")
    part = "all validation text" if limit is None else f"first {limit:,} tokens of validation text"
    table = Table(title=f"{part}, lower is better", title_justify="left")
    table.add_column("")
    table.add_column("bits/byte", justify="right")
    rows = {
        f"this model ({summary['parameters']:,} parameters)": validation.get("bits_per_byte"),
    }
    if "tuning" in summary:
        rows["the checkpoint before tuning"] = summary["tuning"]["before"]["bits_per_byte"]
    if summary.get("text", {}).get("validation_answer_bytes") is None:  # answers have no baseline
        rows["5-byte n-gram, Witten-Bell"] = baselines.get("ngram5")
        rows["bzip2 -9"] = baselines.get("bzip2")
    for name, value in sorted(rows.items(), key=lambda row: row[1] or 99.0):
        table.add_row(name, "not computed" if value is None else f"{value:.3f}")
    captions = []
    if "uncovered" in validation:
        captions.append(
            f"loss {validation['loss']:.3f}, accuracy {100 * validation['accuracy']:.1f} %; "
            f"{100 * validation['uncovered']:.1f} % of the targets have probability 0, "
            "and one is enough to make bits per byte infinite"
        )
    if reason := summary.get("no_baselines"):
        captions.append(f"baselines not computed: {printable(reason, 300)}")
    table.caption = "\n".join(captions) or None
    return table


def for_stdout(text: str) -> str:
    """Text of a model or a file for standard output: as it is in a pipe, ``printable`` on a
    terminal."""
    return printable(text, None) if sys.stdout.isatty() else text


def _read(path: Path) -> dict[str, Any]:
    values = json_format.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: value for name, value in values.items() if name != "seal"}


def short_count(value: float | None) -> str:
    """Three digits and a unit.

    >>> [short_count(x) for x in (124_439_808, 279_104, 1.1e9, 950.4, None)]
    ['124M', '279k', '1.10B', '950', '']
    """
    if value is None:
        return ""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            x = value / size
            return f"{x:.{2 if x < 10 else 1 if x < 100 else 0}f}{unit}"
    return f"{value:.0f}"
