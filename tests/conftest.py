"""What every test starts from, however the tests were started."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():  # kernels then run in Triton's interpreter, if told at its import
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> str:
    """Where kernels run: on the GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def usual_signals() -> Iterator[None]:
    """A shell that starts us in the background has us ignore Ctrl-C, and nohup a hang-up."""
    usual = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGTERM: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
