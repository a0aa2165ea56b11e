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
from signal import SIGINT, SIGPIPE
from typing import Any

from cyclopts import App, CycloptsError

from fenchel import __version__
from fenchel.cli.console import OutputClosed, break_lines, may_close, width_of
from fenchel.files import Notice, StorageFailed, describe, printable

COMMANDS = {
    "train": "Train a model on a text; write a run directory with a report.",
    "tune": "Continue a checkpoint on a text or on conversations; write a run directory.",
    "generate": "Continue a prompt with a model.",
    "chat": "Hold a conversation with a model in the terminal.",
    "serve": "Serve a model over HTTP, in the manner of the OpenAI API.",
    "eval": "Loss, perplexity, bits per byte and calibration of a model on a text.",
    "inspect": "Sensitivity of a checkpoint's attention on a text, from rows to the whole network.",
    "certify": "How sensitive attention can be anywhere in a ball around a text, from both sides.",
    "convert": "Write a run or a checkpoint as a Hugging Face directory.",
    "attach": "Replace the attention of a transformers checkpoint, and prove the replacement.",
    "compare": "Compare runs: results, the settings that differ, and curves in one page.",
    "list": "List built-in texts, presets, families of checkpoints, runs.",
    "plan": "Memory, bytes and time of a run on many GPUs, by formula.",
    "settings": "Print the meaning and the type of every setting of a run, and when it is read.",
    "report": "Write the page of a run directory again.",
    "learn": "Open the lessons in a browser.",
    "bench": "Run a benchmark of the source tree: fenchel and its peers in one process.",
    "doctor": "What this machine supports, and whether a run or a checkpoint is intact.",
}

LESS_MEMORY = {
    "train": "set a smaller train.batch, model.context or model.width",
    "tune": "set a smaller train.batch or tune.context, or more train.accumulate",
    "generate": "give fewer --max-new-tokens, --cache int8 or --dtype bfloat16",
    "chat": "give a shorter --context, --cache int8 or --dtype bfloat16",
    "serve": "give fewer --rows, a shorter --context, --cache int8 or --dtype bfloat16",
    "eval": "give a shorter --context or --dtype bfloat16",
    "inspect": "give fewer --max-tokens",
    "certify": "give fewer --max-tokens",
    "attach": "give a shorter --context",
}
"""What to change where a command runs out of memory.

Of a run, outside its steps, which ``explain_out_of_memory`` covers: train.recompute changes nothing
there.
"""

_LONGEST = 800  # characters of a message, which may quote a foreign file

app = App(
    name="fenchel",
    help="Transformers whose attention can be derived, measured and steered.",
    version=__version__,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # main handles it
)
for _name, _help in COMMANDS.items():
    app.command(f"fenchel.cli.{_name}:run", name=_name, help=_help)
app.register_install_completion_command(add_to_startup=False)


def main(argv: list[str] | None = None) -> int:
    """Runs a command line; an error becomes one sentence and an exit code."""
    with may_close(), _plain_notices():
        try:
            code = _dispatch(argv)
            if sys.stdout is not None:
                sys.stdout.flush()
        except OutputClosed:
            return 128 + SIGPIPE
        return code


def _dispatch(argv: list[str] | None) -> int:
    try:
        code = app(argv, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        return _error(str(error), 2)
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
        signal = error.args[0] if error.args else SIGINT
        return _error("stopped at once; what was saved before is unchanged.", 128 + signal)
    return code if isinstance(code, int) else 0


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
