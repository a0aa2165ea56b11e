"""The settings of training: how long, with which loss, what is logged and saved, when it stops."""

import math
import re
from dataclasses import dataclass
from typing import ClassVar

from fenchel.choice.by_name import MAPS, by_name
from fenchel.config import Use, read_with, require_read

LOSSES = (
    "cross_entropy",
    *(name for name, map in MAPS.items() if name != "softmax" and map.feasible == "simplex"),
)
"""Cross-entropy is the Fenchel-Young loss of softmax; the others have the names of their maps."""
SHARDS, GATHER_DTYPES = ("auto", "none", "full", "node"), ("float32", "bfloat16")
RECOMPUTE = ("none", "block")
PRECISIONS = ("auto", "float32", "bfloat16", "float16")
INITS = ("bigram", "random")
LOGGERS = ("tensorboard",)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of the loop; the model and the optimiser have their own."""

    steps: int | None = None
    """Number of steps; None plans them for ``budget`` and corrects the plan while training."""
    budget: str | float | None = "2m"
    """Time for training and its evaluations: "90s", "3m", "1h" or seconds; read when steps is None.
    At the deadline the run ends, with the learning rate at the end of its schedule."""
    batch: int = 32
    """Sequences per step, B."""
    accumulate: int | None = None
    """Micro-batches that a step is split into, a divisor of ``batch``: the same step, up to
    rounding, in less memory. None is as few as the memory of the device has room for."""
    cells: int | None = None
    """Parts, a divisor of ``batch``, that a step is always divided into, so that its result has the
    same bits for any number of processes up to this one; None makes no such promise."""
    shard: str = "auto"
    """With several processes: "none" replicates the weights, "full" divides them (FSDP2), "node"
    divides them among the processes of each machine (HSDP), "auto" divides them where weights,
    gradients and moments would take over half of the memory, inside machines if that is enough."""
    gather_dtype: str = "float32"
    """Dtype in which divided weights are gathered: "float32" or "bfloat16"."""
    context_group: int = 1
    """Consecutive processes that share every sequence, each with 1/context_group of its positions:
    for contexts whose activations one process cannot hold. Divides the number of processes."""
    recompute: str = "none"
    """Activation recomputation (gradient checkpointing): "block" keeps the input of every block and
    runs the block again in the backward pass, "none" keeps all activations. The same bits, in less
    memory, for about a third more work."""
    timeout: float = 600.0
    """Seconds that a process waits for the others before the run ends with an error."""
    init: str = "bigram"
    """Fresh embedding and LM head: "bigram" from counts of the training text, for cross-entropy and
    logits that are one matrix times a normalised stream; "random" draws them, like all other
    weights."""
    clip: float = 1.0
    """Largest global norm of the gradient; a longer one is scaled down to it."""
    loss: str = "cross_entropy"
    """"cross_entropy", or the Fenchel-Young loss of a map: "entmax", "sparsemax" or "hard"."""
    loss_alpha: float = 1.5
    """alpha of the loss of entmax."""
    smoothing: float = 0.0
    """Label smoothing: share of each target's probability that is spread over all tokens."""
    qk_clip: float | None = None
    """Limit on the scores per head: weights that exceed it are scaled down after the step."""
    lipschitz: float | None = None
    """Limit on the Lipschitz constant: how far a logit moves, at most, when no token embedding
    moves further than 1. Weights are scaled back to it after every step; the report has the
    certified constant. Model settings that are not given are those of a model whose constant is
    known (epsilon=1, gelu, positions="buckets", ...)."""
    certify_margin: float = 0.0
    """r of a loss that bounds the cross-entropy of all texts whose embeddings are within r of those
    of the batch: the target's logit counts 2 L r less, L the limit ``lipschitz``. It widens the
    margins that are certified."""
    spectral_cap: float | None = None
    """Limit on the singular values of every matrix of a block, queries, keys and values apart:
    larger ones are reduced to it after every step. Decisions of the model are then certified
    further (fenchel certify --decision)."""
    entropy_floor: float = 0.0
    """Mean entropy in nats below which a head is penalised; 0 disables the penalty."""
    entropy_weight: float = 0.1
    """Factor of that penalty in the loss."""
    balance_weight: float = 0.01
    """Factor of the load-balancing loss of a mixture of experts."""
    precision: str = "auto"
    """"float32", "bfloat16" (autocast), "float16" (autocast, the loss scaled), or "auto": bfloat16
    where the hardware has it."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1", "mps", ..., or "auto": a GPU when there is one."""
    deterministic: bool = True
    """On a GPU, use only deterministic kernels, so that a run repeats bit for bit."""
    compile: bool | None = None
    """Compile the blocks of the model with torch.compile: some seconds at first, then faster steps.
    None compiles on a GPU where the steps of the run keep it busy for a minute or more."""
    cuda_graph: bool | None = None
    """Launch the gradient of a step of one micro-batch, and the steps of Muon and ScoreDescent, as
    CUDA graphs: the same bits, with less time of the host and more memory. None does so on a GPU
    where a step keeps it busy for less than a quarter of a second."""
    threads: int | None = None
    """CPU threads; None takes the fastest of a few counts that are timed for a budget, and the
    default of torch where steps are given."""
    log_every: int = 10
    """Steps between lines of metrics."""
    evaluate_every: int | None = None
    """Steps between evaluations; None is a tenth of the run."""
    evaluate_tokens: int = 8192
    """Validation tokens per evaluation while training, in the precision of training; after training
    all are read, in float32."""
    save_every: int | None = None
    """Steps between checkpoints; None is a tenth of the run, on a GPU 4 million tokens at least."""
    keep: int = 3
    """How many of the newest checkpoints stay; the best one stays in addition."""
    max_nonfinite_steps: int = 3
    """Steps in a row with a loss or gradient that is not finite before the run stops."""
    log: tuple[str, ...] = ()
    """Loggers in addition to metrics.jsonl: "tensorboard"."""

    USES: ClassVar = (
        read_with("loss_alpha", "loss", "entmax"),
        read_with("gather_dtype", "shard", "auto", "full", "node"),
        Use(("certify_margin",), "lipschitz", lambda c: c.lipschitz is not None),
        Use(("entropy_weight",), "an entropy_floor above 0", lambda c: c.entropy_floor > 0.0),
    )

    def __post_init__(self) -> None:
        counts = "batch context_group log_every keep max_nonfinite_steps evaluate_tokens"
        for name in counts.split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} should be at least 1.")
        for name in ("steps", "threads", "accumulate", "evaluate_every", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} should be at least 1, or left out.")
        if self.steps is None and self.budget is None:
            raise ValueError("either steps or budget should be given.")
        if self.budget is not None:
            seconds(self.budget)
        if self.batch % (self.accumulate or 1):
            raise ValueError(f"accumulate={self.accumulate} does not divide batch={self.batch}.")
        if self.cells is not None:
            if self.accumulate not in (None, 1):
                raise ValueError(
                    f"cells={self.cells} divides a step already; leave out "
                    f"accumulate={self.accumulate}."
                )
            if self.cells < 1 or self.batch % self.cells:
                raise ValueError(f"cells={self.cells} does not divide batch={self.batch}.")
        if not 0.0 < self.timeout < math.inf:
            raise ValueError(f"timeout={self.timeout} should be above 0 and finite.")
        for name, known in (
            ("shard", SHARDS),
            ("gather_dtype", GATHER_DTYPES),
            ("recompute", RECOMPUTE),
            ("loss", LOSSES),
            ("init", INITS),
            ("precision", PRECISIONS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} should be one of {known}.")
        if not self.clip > 0.0:
            raise ValueError(f"clip={self.clip} should be above 0.")
        for name in ("qk_clip", "lipschitz", "spectral_cap"):
            limit = getattr(self, name)
            if limit is not None and not 0.0 < limit < math.inf:
                raise ValueError(f"{name}={limit} should be above 0 and finite, or left out.")
        if self.lipschitz is not None and self.spectral_cap is not None:
            raise ValueError("lipschitz and spectral_cap scale the same matrices; choose one.")
        for name in ("entropy_floor", "entropy_weight", "balance_weight", "certify_margin"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} should be 0 or above, and finite.")
        if self.compile and (self.qk_clip is not None or self.entropy_floor):
            raise ValueError(
                "compile=true hides queries and keys, which qk_clip and entropy_floor read; "
                "choose one of them."
            )
        if self.loss == "entmax":
            by_name("entmax", alpha=self.loss_alpha)  # refuses an alpha that has no map
        if not 0.0 <= self.smoothing < 1.0:
            raise ValueError(f"smoothing={self.smoothing} should be in [0, 1).")
        for name in self.log:
            if name not in LOGGERS:
                raise ValueError(f"log={name!r} should be one of {LOGGERS}.")
        require_read(self)


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
