"""What every test starts from, however the tests were started."""

import os
import signal
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from fenchel.checkpoints import Progress, run_checkpoint
from fenchel.data import Batches
from fenchel.model import ModelConfig, Transformer
from fenchel.operating_system import SYSTEM, Posix
from fenchel.optim import OptimConfig, build_beta2, build_optimiser, build_schedule
from fenchel.optim.cuda_graph import Capture, capture_graph
from fenchel.train import Loop, RunDir, Stepper, TrainConfig
from tests.recorded_graph import record

if not torch.cuda.is_available():  # kernels then run in Triton's interpreter, if told at its import
    os.environ["TRITON_INTERPRET"] = "1"

# The process that started the workers has imported readline, which exports the size of no terminal.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

# The same examples in every run, however slowly a busy machine draws them.
settings.register_profile(
    "suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")


POSIX = {
    "hang-ups": SYSTEM.hangup is not None,
    "sessions": isinstance(SYSTEM, Posix),
    "locked folders": isinstance(SYSTEM, Posix),
    "several processes": SYSTEM.trains_in_parallel,
}
"""What a test of POSIX itself needs, as in ``needs_posix("hang-ups")``, and whether it is here."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The one rule by which tests of POSIX itself are left out on Windows and its stand-in."""
    for marker in item.iter_markers("needs_posix"):
        for name in marker.args:
            if not POSIX[name]:
                pytest.skip(f"needs {name}, which {type(SYSTEM).__name__} lacks")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says in one line what a machine without a browser leaves out."""
    skipped = terminalreporter.getreports("skipped")
    count = sum("no browser: " in str(report.longrepr) for report in skipped)
    if count:
        terminalreporter.write_line(
            f"Left out: {count} tests of the report pages and lessons in a browser; "
            "apt-get install chromium chromium-driver runs them."
        )


@pytest.fixture
def device() -> str:
    """Where kernels run: on the GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def capture(device: str) -> Capture:
    """A CUDA graph, or on a machine without a GPU what stands in for it."""
    return capture_graph if device == "cuda" else record


@pytest.fixture(autouse=True)
def usual_signals() -> Iterator[None]:
    """A shell that starts us in the background has us ignore Ctrl-C, and nohup a hang-up."""
    usual = dict.fromkeys(SYSTEM.stop_signals, signal.SIG_DFL)
    usual[signal.SIGINT] = signal.default_int_handler
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def require_device(path: str) -> None:
    """Fails the test that has put a file in the place of a device, as a rename over it does."""
    assert stat.S_ISCHR(os.stat(path).st_mode), f"this test has replaced {path} by a file"


@pytest.fixture(autouse=True)
def null_device() -> Iterator[None]:
    """Every test leaves /dev/null a device."""
    yield
    if os.name == "posix":
        require_device(os.devnull)


Draw = Callable[..., Tensor]


@pytest.fixture
def draw() -> Draw:
    """Normal float64 numbers of a shape, the same in every run."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

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


# --- a training run of two thousand parameters

MODEL = ModelConfig(vocabulary=31, context=8, width=8, layers=2, heads=2, dropout=0.1)


class Ear:
    """A callback that remembers, and does something at a chosen step."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.lines: list[Mapping[str, Any]] = []
        self.said: list[str] = []
        self.at: dict[int, Callable[[], object]] = {}

    def step(self, step: int, steps: int) -> None:
        assert step <= steps
        self.steps.append(step)
        self.at.get(step, lambda: None)()

    def log(self, metrics: Mapping[str, Any]) -> None:
        self.lines.append(metrics)

    def message(self, text: str) -> None:
        self.said.append(text)


class Small:
    """A run directory and the parts of a run; ``loop`` goes on from the newest checkpoint."""

    def __init__(
        self,
        path: Path,
        *,
        model: ModelConfig = MODEL,
        optim: Mapping[str, Any] | None = None,
        seed: int = 1,
        probe: Callable[..., Mapping[str, Any]] = lambda *_: {},
        **train: Any,
    ) -> None:
        settings = {"steps": 12, "batch": 4, "save_every": 3, "log_every": 2, "evaluate_every": 4}
        self.config = TrainConfig(**{**settings, "threads": 1, "precision": "float32", **train})
        self.settings = {"width": model.width, "heads": model.heads}
        self.seed, self.probe, self.ear = seed, probe, Ear()
        self.run = RunDir(path)
        if not path.exists():
            self.run.create()
        drawn = np.random.default_rng(0).integers(model.vocabulary, size=200)
        self.batches = Batches(
            drawn.astype("uint16"), batch=self.config.batch, context=model.context, seed=seed
        )
        self.optim = OptimConfig(**(optim or {}))
        self.model = Transformer(model, generator=torch.Generator().manual_seed(seed))
        self.optimiser = build_optimiser(self.model, self.optim, steps=self.steps)
        self.stepper = Stepper(
            self.model,
            self.batches,
            self.optimiser,
            build_schedule(self.optim, self.steps),
            config=self.config,
            seed=seed,
            beta2=build_beta2(self.optim),
        )

    @property
    def steps(self) -> int:
        assert self.config.steps is not None
        return self.config.steps

    def loop(self, **budget: Any) -> Loop:
        folder, wrong = run_checkpoint.newest(self.run.checkpoints)
        assert not wrong
        progress = Progress()
        if folder is not None:
            progress = run_checkpoint.restore(folder, self.model, self.optimiser, self.settings)
        self.run.rewind(progress.metrics_bytes)
        return Loop(
            self.stepper,
            steps=self.steps,
            run=self.run,
            settings=self.settings,
            validate=self.validate,
            probe=self.probe,
            callback=self.ear,
            progress=progress,
            **budget,
        )

    @torch.no_grad()
    def validate(self, model: torch.nn.Module) -> Mapping[str, float]:
        logits = model(self.batches.at(0).inputs)
        return {"loss": float(logits.square().mean())}

    def bits(self) -> dict[str, bytes]:
        """Every tensor of the model and the optimiser, as bytes."""
        tensors, _ = run_checkpoint.flatten(self.optimiser.state_dict())
        every = {**self.model.state_dict(), **tensors}
        return {name: tensor.numpy().tobytes() for name, tensor in every.items()}


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Callable[..., Small]]:
    """``small(name="run", **train)``: a run in its own folder; the same name goes on with it."""

    def build(name: str = "run", **settings: Any) -> Small:
        return Small(tmp_path / name, **settings)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two thousand parameters gain nothing from more
    yield build
    torch.set_num_threads(threads)
