"""fenchel COMMAND [options]: one file a command, named for it.

A command's file states its words and loads the library when it is called, so that help and
mistakes are answered at once. Results go to standard output; a trouble is one sentence on
standard error, and so is a notice. Exit codes: 0 done, 1 doctor found damage, 2 wrong input, 3 the
run diverged, 4 storage failed, 128 + n stopped by signal n.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGINT
from typing import Any

from cyclopts import App, CycloptsError

from fenchel import __version__
from fenchel.cli.console import may_close
from fenchel.files import Notice, StorageFailed

COMMANDS = {
    "train": "Train a model on a text and leave a run directory with a report.",
    "generate": "Continue a prompt with a model.",
    "eval": "Loss, perplexity, bits per byte and calibration of a model on a text.",
    "inspect": "How sensitive a checkpoint's attention is on a text, row by row to the network.",
    "certify": "How sensitive attention can be anywhere in a ball around a text, from both sides.",
    "convert": "Write a run or a checkpoint as a Hugging Face directory.",
    "attach": "Swap the attention of a transformers checkpoint, and prove that it happened.",
    "report": "Make the page of a run directory again.",
    "bench": "Run a benchmark of the source tree: peers and ours in one process.",
    "doctor": "What this machine can do, and whether a run directory is sound.",
}

app = App(
    name="fenchel",
    help="Transformers whose attention can be derived, measured and steered.",
    version=__version__,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # main answers it
)
for _name, _does in COMMANDS.items():
    app.command(f"fenchel.cli.{_name}:run", name=_name, help=_does)
app.register_install_completion_command(add_to_startup=False)


def main(argv: list[str] | None = None) -> int:
    """Hand the line to its command; a trouble becomes one sentence and an exit code."""
    with may_close(), _plain_notices():
        return _answer(argv)


def _answer(argv: list[str] | None) -> int:
    try:
        code = app(argv, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        return _trouble(str(error), 2)
    except StorageFailed as error:
        return _trouble(str(error), 4)
    except (ValueError, OSError) as error:
        return _trouble(str(error), 2)
    except (MemoryError, RuntimeError) as error:
        from fenchel.train.machine import (
            out_of_memory,  # a command that came so far has loaded torch
        )

        if (wanted := out_of_memory(error)) is None:
            raise
        return _trouble(f"memory ran out ({wanted}); give it less to do at once.", 2)
    except KeyboardInterrupt as error:
        signal = error.args[0] if error.args else SIGINT
        return _trouble("stopped at once; what was saved before is intact.", 128 + signal)
    return code if isinstance(code, int) else 0


def _trouble(sentence: str, code: int) -> int:
    _say(sentence)
    return code


def _say(sentence: str) -> None:
    print(f"fenchel: {' '.join(sentence.split())}", file=sys.stderr)


@contextmanager
def _plain_notices() -> Iterator[None]:
    """Within, a notice is one sentence too, without the line of the source that it came from."""
    with warnings.catch_warnings():
        otherwise = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, Notice):
                _say(str(message))
            else:
                otherwise(message, category, *where, **more)

        warnings.showwarning = show
        yield
