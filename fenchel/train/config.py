"""The settings of training: how long, in what portions, what is kept and when it stops."""

import math
import re
from dataclasses import dataclass

PRECISIONS = ("auto", "float32", "bfloat16", "float16")
LOGGERS = ("tensorboard",)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All about the loop, and nothing about the model or the optimiser."""

    steps: int | None = None
    """How many steps; None lets ``budget`` decide."""
    budget: str | float | None = "2m"
    """Time for training and evaluation: "90s", "3m", "1h" or seconds; read when steps is None."""
    batch: int = 32
    """Sequences in a step, B."""
    accumulate: int = 1
    """Parts in which a step's sequences are read; divides ``batch``. Saves memory."""
    clip: float = 1.0
    """Largest global norm of a gradient; longer ones are shortened."""
    smoothing: float = 0.0
    """Share of each target's probability that is spread over all tokens."""
    qk_clip: float | None = None
    """Limit on the scores of a head: what passes it is scaled back after the step. None is none."""
    entropy_floor: float = 0.0
    """Mean entropy in nats below which a head is penalised; 0 is no penalty."""
    entropy_weight: float = 0.1
    """Factor of that penalty in the loss; without a floor nothing reads it."""
    balance_weight: float = 0.01
    """Factor in the loss of how unevenly experts are chosen; without experts nothing reads it."""
    precision: str = "auto"
    """"float32", "bfloat16" (autocast), "float16" (autocast, the loss scaled), or "auto": bfloat16
    where the hardware has it."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1", ..., or "auto": a GPU when there is one."""
    exact: bool = True
    """On a GPU, use only kernels that repeat bit for bit; a CPU always does."""
    compile: bool = False
    """Compile the model's pass by torch.compile: a minute at first, then faster steps on a GPU."""
    threads: int | None = None
    """CPU threads; None tries some and keeps the fastest."""
    log_every: int = 10
    """Steps between lines of metrics."""
    evaluate_every: int | None = None
    """Steps between evaluations; None is a tenth of the run."""
    evaluate_tokens: int = 16384
    """Validation tokens of an evaluation while training; after training all are read."""
    save_every: int | None = None
    """Steps between checkpoints; None is a tenth of the run."""
    keep: int = 3
    """How many of the newest checkpoints stay; the best one stays besides."""
    patience: int = 3
    """Steps in a row whose loss or gradient is not finite before the run stops."""
    log: tuple[str, ...] = ()
    """Loggers beside metrics.jsonl: "tensorboard"."""

    def __post_init__(self) -> None:
        for name in ("batch", "accumulate", "log_every", "keep", "patience", "evaluate_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} should be at least 1.")
        for name in ("steps", "threads", "evaluate_every", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} should be at least 1, or left out.")
        if self.steps is None and self.budget is None:
            raise ValueError("either steps or budget should be given.")
        if self.budget is not None:
            seconds(self.budget)
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate={self.accumulate} does not divide batch={self.batch}.")
        if not self.clip > 0.0:
            raise ValueError(f"clip={self.clip} should be above 0.")
        if self.qk_clip is not None and not 0.0 < self.qk_clip < math.inf:
            raise ValueError(f"qk_clip={self.qk_clip} should be above 0 and finite, or left out.")
        for name in ("entropy_floor", "entropy_weight", "balance_weight"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} should be 0 or above, and finite.")
        if self.compile and (self.qk_clip is not None or self.entropy_floor):
            raise ValueError(
                "compile=true leaves nothing to look at in the pass, which qk_clip and "
                "entropy_floor do; choose one of them."
            )
        if not 0.0 <= self.smoothing < 1.0:
            raise ValueError(f"smoothing={self.smoothing} should be in [0, 1).")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision!r} should be one of {PRECISIONS}.")
        for name in self.log:
            if name not in LOGGERS:
                raise ValueError(f"log={name!r} should be one of {LOGGERS}.")


def seconds(budget: str | float) -> float:
    """ "90s", "3m", "1.5h" or a bare number of seconds, as seconds.

    >>> seconds("3m")
    180.0
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", str(budget))
    length = float(match[1]) * _UNITS[match[2] or "s"] if match else 0.0
    if not 0.0 < length < math.inf:
        raise ValueError(f"budget={budget!r} should be a time such as 90s, 3m or 1h.")
    return length
