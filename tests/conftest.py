"""What every test starts from, however the tests were started."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fenchel.model import ModelConfig, Transformer

if not torch.cuda.is_available():  # kernels then run in Triton's interpreter, if told at its import
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says in one line what a machine without a browser leaves out."""
    skipped = terminalreporter.getreports("skipped")
    count = sum("no browser: " in str(report.longrepr) for report in skipped)
    if count:
        terminalreporter.write_line(
            f"Left out: {count} tests of the report pages in a browser "
            "(tests/report/test_browser.py); apt-get install chromium chromium-driver runs them."
        )


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


Draw = Callable[..., Tensor]


@pytest.fixture
def draw() -> Draw:
    """Normal float64 numbers of a shape, the same in every run."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

    return normal


@pytest.fixture
def qkv(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """B=2, H=6, G=3, T=4, S=7, D=5, E=3."""
    return draw(2, 6, 4, 5), draw(2, 3, 7, 5), draw(2, 3, 7, 3)


SIZES = {
    "vocabulary": 37,
    "context": 11,
    "width": 24,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 20,
}

Build = Callable[..., Transformer]


@pytest.fixture
def settings() -> Callable[..., ModelConfig]:
    """V=37, T up to 11, M=24, H=4, G=2, D=6, hidden=20, 3 layers; any of it changed by name."""
    return lambda **changes: ModelConfig(**{**SIZES, **changes})


@pytest.fixture
def build(settings: Callable[..., ModelConfig]) -> Build:
    """A model in float64 whose every parameter was drawn: a fresh one's branches are zero."""

    def stirred(**changes: Any) -> Transformer:
        generator = torch.Generator().manual_seed(0)
        model = Transformer(settings(**changes), generator=generator).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * torch.randn(
                    parameter.shape, dtype=torch.float64, generator=generator
                )
        return model.eval()

    return stirred


@pytest.fixture
def ids() -> Tensor:
    """(3, 9) of 37."""
    return torch.randint(37, (3, 9), generator=torch.Generator().manual_seed(1))
