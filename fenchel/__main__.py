"""The process of the console script and of ``python -m fenchel``, which Ctrl-C ends in a sentence.

From its first line on, and before anything large is imported, SIGINT has its own handler:

    while a module is imported    an exception that a signal raises there may be lost, or may become
                                  another one, as numpy's does, so the process ends at once
    later                         KeyboardInterrupt, so that a command removes what it has begun
    a second time                 the process ends at once

While it trains, a run handles the signal itself (fenchel/train/loop.py). A kill at any moment
harms nothing that was saved, so ending at once does not either.
"""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

_IMPORT = "<frozen importlib._bootstrap>"


class _Interrupt:
    """The handler of SIGINT."""

    def __init__(self) -> None:
        self.received = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.received or _is_importing(frame):
            end_at_once(number)
        self.received = True
        raise KeyboardInterrupt(signal.Signals(number))


def main() -> int:
    """Run the command line of this process and return its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # the shell may ignore it
        signal.signal(signal.SIGINT, _Interrupt())
    if sys.platform == "darwin":  # read by torch: what MPS lacks runs on the CPU, and torch says so
        os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    try:
        from fenchel.cli import main as run

        code = run()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command is over; Python still ends
        return code
    except KeyboardInterrupt:
        end_at_once(signal.SIGINT)


def end_at_once(number: int) -> NoReturn:
    """One sentence on standard error, then the exit code of a signal, without any clean-up."""
    restore = b"\r\x1b[K\x1b[?25h" if os.isatty(2) else b""  # a progress bar hides the cursor
    try:
        os.write(2, restore + b"fenchel: stopped at once; what was saved before is unchanged.\n")
    finally:
        os._exit(128 + number)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT:
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    sys.exit(main())
