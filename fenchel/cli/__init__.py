"""fenchel COMMAND [options]: one module per command, named after it.

The module of a command declares its options and imports the library when it is called, so that
help and usage errors need no torch. Results go to standard output. Errors and notices are one
sentence on standard error. The process is started by fenchel/__main__.py, which loads this package.

Exit codes: 0 success, 1 doctor found damage, 2 wrong input, 3 the run diverged, 4 storage failed,
128 + n stopped by signal n.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGINT
from typing import Any

from cyclopts import App, CycloptsError, Group, MissingArgumentError, UnknownCommandError
from cyclopts.help import DefaultFormatter
from rich.text import Text

from fenchel import __version__
from fenchel.cli.console import OutputClosed, break_lines, may_close, width_of
from fenchel.config import did_you_mean
from fenchel.files import Notice, StorageFailed, describe, printable, require_output
from fenchel.operating_system import EXIT_OF_CLOSED_PIPE

COMMANDS = {
    "train": "Train a model on a text; write a run directory with a report.",
    "tune": "Continue a checkpoint on a text or on conversations; write a run directory.",
    "plan": "Memory, bytes and time of a run on many GPUs, by formula.",
    "generate": "Continue a prompt with a model.",
    "chat": "Hold a conversation with a model in the terminal.",
    "serve": "Serve a model over HTTP, in the manner of the OpenAI API.",
    "steer": "Make a direction that steers a model, with a strength that keeps a budget.",
    "eval": "Loss, perplexity, bits per byte and calibration of a model on a text.",
    "inspect": "Sensitivity of a checkpoint's attention on a text, from rows to the whole network.",
    "lens": "What a model predicts after each of its layers, token by token.",
    "ablate": "What the loss becomes without a head, a layer's attention or its MLP.",
    "patch": "Which part of a model carries the difference between two prompts.",
    "certify": "How sensitive attention can be anywhere in a ball around a text, from both sides.",
    "compare": "Compare runs: results, the settings that differ, and curves in one page.",
    "report": "Write the page of a run directory again.",
    "convert": "Write a run or a checkpoint as a Hugging Face directory.",
    "attach": "Replace the attention of a transformers checkpoint, and prove the replacement.",
    "list": "List built-in texts, presets, families, cached checkpoints, runs.",
    "settings": "Print the meaning and the type of every setting of a run, and when it is read.",
    "doctor": "What this machine supports, and whether a run or a checkpoint is intact.",
    "learn": "Open the lessons in a browser.",
    "bench": "Run a benchmark of the source tree: fenchel and its peers in one process.",
}
"""Every command, by task."""
TASKS = {
    "Train": ("train", "tune", "plan"),
    "Use a model": ("generate", "chat", "serve", "steer"),
    "Measure": ("eval", "inspect", "lens", "ablate", "patch", "certify", "compare", "report"),
    "Checkpoints": ("convert", "attach"),
    "Look up": ("list", "settings", "doctor", "learn", "bench"),
}
"""The groups of the help page."""
EXAMPLES = {
    "train": "fenchel train --text my.txt --budget 10m --out runs/mine",
    "tune": "fenchel tune DIR --text chats.jsonl --lora 16 --out runs/tuned",
    "plan": "fenchel plan llama-7b --gpus 64",
    "generate": 'fenchel generate runs/demo --prompt "Gentlemen of the" --temperature 0.7',
    "chat": 'fenchel chat DIR --system "Answer briefly."',
    "serve": "fenchel serve runs/demo --port 8000",
    "eval": "fenchel eval runs/demo --text my.txt --calibration",
    "inspect": "fenchel inspect runs/demo --text sotu",
    "lens": "fenchel lens runs/demo --text sotu",
    "ablate": "fenchel ablate runs/demo --text sotu",
    "patch": 'fenchel patch DIR "The city of Paris is in" "The city of Rome is in"',
    "certify": "fenchel certify runs/demo --text sotu --radius 0.1",
    "steer": "fenchel steer runs/demo --toward wanted.txt --away other.txt --out kind.safetensors",
    "compare": "fenchel compare runs/one runs/two",
    "report": "fenchel report runs/demo",
    "convert": "fenchel convert runs/demo llama",
    "attach": "fenchel attach llama --map entmax --text sotu",
    "list": "fenchel list runs --sort bits_per_byte",
    "settings": "fenchel settings model.rotary",
    "doctor": "fenchel doctor runs/demo",
    "learn": "fenchel learn",
    "bench": "fenchel bench optim",
}
"""One line to try."""

LESS_MEMORY = {
    "train": "set a smaller train.batch, model.context or model.width",
    "tune": "set a smaller train.batch or tune.context, or more train.accumulate",
    "generate": "give fewer --max-new-tokens, --cache int8 or --dtype bfloat16",
    "chat": "give a shorter --context, --cache int8 or --dtype bfloat16",
    "serve": "give fewer --rows, a shorter --context, --cache int8 or --dtype bfloat16",
    "eval": "give a shorter --context or --dtype bfloat16",
    "inspect": "give fewer --max-tokens",
    "lens": "give fewer --max-tokens or --kind logit",
    "ablate": "give fewer --max-tokens",
    "patch": "give shorter prompts",
    "certify": "give fewer --max-tokens",
    "attach": "give a shorter --context",
    "steer": "give fewer --max-tokens",
}
"""What to change where a command runs out of memory.

Of a run, outside its steps, which ``explain_out_of_memory`` covers: train.recompute changes nothing
there.
"""

_LONGEST = 800  # characters of a message, which may quote a foreign file


class _App(App):
    """An App whose --install-completion --output FILE replaces nothing."""

    def install_completion(self, *, output: Path | None = None, **options: Any) -> Path:
        """Writes the script of a shell to its own place, or to ``output``."""
        if output is not None:
            require_output(output, new=True)
        return super().install_completion(output=output, **options)


class _Help(DefaultFormatter):
    """Help pages: sentences are broken at the width of the terminal, and no is no default."""

    def __call__(self, console: Any, options: Any, panel: Any) -> None:
        for entry in panel.entries:
            text = getattr(entry.description, "primary_renderable", None)
            if isinstance(text, Text):
                entry.description.primary_renderable = Text(" ".join(text.plain.split()))
            if entry.default in ("False", "()", "[]", '""'):
                entry.default = None
        super().__call__(console, options, panel)


app = _App(
    name="fenchel",
    help_formatter=_Help(),
    help_epilogue=(
        "Begin:  fenchel train --out runs/demo\nMore:   fenchel COMMAND --help, and fenchel learn"
    ),
    group_commands=Group("Flags", sort_key=len(COMMANDS)),
    help="Transformers whose attention can be derived, measured and steered.",
    version=f"fenchel {__version__}",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # main handles it
)
for _task, _names in TASKS.items():
    _group = Group(_task, sort_key=list(TASKS).index(_task))
    for _name in _names:
        app.command(
            f"fenchel.cli.{_name}:run",
            name=_name,
            help=COMMANDS[_name],
            group=_group,
            sort_key=_names.index(_name),
            help_epilogue=f"Example:  {EXAMPLES[_name]}",
        )
app.register_install_completion_command(add_to_startup=False)


def main(argv: list[str] | None = None) -> int:
    """Runs a command line; an error becomes one sentence and an exit code."""
    with may_close(), _plain_notices():
        try:
            code = _dispatch(argv)
            if sys.stdout is not None:
                sys.stdout.flush()
        except OutputClosed:
            return EXIT_OF_CLOSED_PIPE
        return code


def _dispatch(argv: list[str] | None) -> int:
    try:
        code = app(argv, exit_on_error=False, print_error=False, result_action="return_value")
    except UnknownCommandError as error:
        word = next(iter(error.unused_tokens or []), "")
        near = {"version": "--version", "help": "--help"}.get(word)
        hint = f"did you mean fenchel {near}?" if near else did_you_mean(word, COMMANDS, show=str)
        return _error(f"there is no command {word!r}; {hint}", 2)
    except CycloptsError as error:
        return _error(_missing_flag(error) or str(error), 2)
    except StorageFailed as error:
        return _error(str(error), 4)
    except OSError as error:
        return _error(describe(error), 2)
    except ValueError as error:
        return _error(str(error), 2)
    except (MemoryError, RuntimeError) as error:
        from fenchel.train.hardware import out_of_memory  # torch is loaded by then

        if (shortage := out_of_memory(error)) is None:
            raise
        command = next(iter(sys.argv[1:] if argv is None else argv), "")
        advice = LESS_MEMORY.get(command, "close other programs or use a larger machine")
        return _error(f"memory ran out ({shortage}); {advice}.", 2)
    except KeyboardInterrupt as error:
        signal, *sentence = error.args or (SIGINT,)
        reason = sentence or ["stopped at once; what was saved before is unchanged."]
        return _error(reason[0], 128 + signal)
    return code if isinstance(code, int) else 0


def _missing_flag(error: CycloptsError) -> str | None:
    """A sentence for a required flag or argument that is not there at all."""
    argument = error.argument if isinstance(error, MissingArgumentError) else None
    if argument is None or argument.name in (error.root_input_tokens or []):
        return None
    name = argument.name if argument.name.startswith("-") else argument.name.upper()
    return f"{name} is missing; --help lists what the command takes."


def _error(sentence: str, code: int) -> int:
    _print_error(sentence)
    return code


def _print_error(sentence: str) -> None:
    text = f"fenchel: {printable(' '.join(sentence.split()), _LONGEST)}"
    print(break_lines(text, width_of(sys.stderr)), file=sys.stderr)


@contextmanager
def _plain_notices() -> Iterator[None]:
    """Prints a ``Notice`` as one sentence, without the source line of a Python warning."""
    with warnings.catch_warnings():
        default = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, Notice):
                _print_error(str(message))
            else:
                default(message, category, *where, **more)

        warnings.showwarning = show
        yield
