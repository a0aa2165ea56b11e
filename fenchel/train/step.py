"""Which layer broke first.

A nan spreads: one broken layer makes every later activation and every gradient nan, so what
matters is where it came from. That is, in this order,

    weights that are not finite;
    else the first module, in the order of the forward pass, that gives or is given something
    not finite (what it is given was computed between modules, such as a choice of attention);
    else the loss, which a step reads out of the last of them;
    else the last parameter in that order whose gradient is not finite, since the backward
    pass meets it first;
    else the sum of squares under the gradient's norm.

One step: batch, loss, gradient, clip, move.

Everything in it is a function of (seed, step): the batch, the learning rate and the dropout
noise. The gradient is that of

    (1 / N) sum over the N targets of the step of  their loss,

summed over parts when the step is read in several, and of a penalty where a switch of
fenchel/train/stability.py adds one; its global norm is cut to ``clip``. When the loss or the norm
is not finite the optimiser is not called and no weight moves.

Many processes will join here: ``Batches`` gives rank r of w its share of a step, and the
gradient is complete just before ``clip_``.
"""

import hashlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fenchel.data import Batch, Batches
from fenchel.optim import CombinedOptimiser, Schedule, clip_
from fenchel.train.config import TrainConfig
from fenchel.train.loss import lm_head_loss, named_loss, sparse_embedding_gradient, total_loss
from fenchel.train.loss_scale import LossScaler
from fenchel.train.stability import Stability


def first_broken(model: nn.Module, forward: Callable[[], object], loss: Tensor | float) -> str:
    """A phrase that names the place; ``forward`` reads the offending batch again."""
    parameters = list(model.named_parameters())
    for name, p in parameters:
        if not p.isfinite().all():
            return f"the weights {name} are not finite"
    if place := _first_place(model, forward):
        return f"the {place} is the first that is not finite"
    if not torch.as_tensor(loss).isfinite():
        return "the loss is the first that is not finite"
    for name, p in reversed(parameters):
        if p.grad is not None and not p.grad.isfinite().all():
            return f"the gradient of {name} is the first that is not finite"
    return "the gradient is finite and too large for its norm to be"


def _first_place(model: nn.Module, forward: Callable[[], object]) -> str | None:
    found: list[str] = []

    def before(name: str) -> Callable[[nn.Module, Any], None]:
        def look(_module: nn.Module, given: Any) -> None:
            if not found and not _finite(given):
                found.append(f"input of {name}")

        return look

    def after(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(_module: nn.Module, _given: Any, output: Any) -> None:
            if not found and not _finite(output):
                found.append(f"output of {name}" if name else "output of the model")

        return look

    handles = []
    for name, module in model.named_modules():
        if not list(module.children()):  # of the others, the parts tell more than the whole
            handles.append(module.register_forward_pre_hook(before(name)))
        handles.append(module.register_forward_hook(after(name)))
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _finite(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_finite(item) for item in value)
    return not isinstance(value, Tensor) or bool(value.isfinite().all())


HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class StepResult(NamedTuple):
    """What a step was."""

    batch: Batch
    loss: float
    gradient_norm: float
    learning_rate: float
    broken: str | None
    """What was not finite; None when the weights moved."""
    metrics: Mapping[str, float] = {}
    """What the switches that are on have to say."""


class Stepper:
    """Takes steps; remembers of them the weights, the optimiser's state and the loss scale."""

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        optimiser: CombinedOptimiser,
        schedule: Schedule,
        *,
        config: TrainConfig,
        seed: int,
        beta2: Schedule | None = None,
    ) -> None:
        self.model, self.batches = model, batches
        self.optimiser, self.schedule, self.beta2 = optimiser, schedule, beta2
        self.config, self.seed = config, seed
        self.device = next(model.parameters()).device
        self.autocast = autocast(config.precision, self.device)
        self.loss_map = named_loss(config.loss, alpha=config.loss_alpha)
        half = config.precision == "float16"
        self.scaling = LossScaler(self.device, model.parameters()) if half else None
        watched = config.qk_clip is not None or config.entropy_floor > 0.0
        self.stability = Stability(model, config) if watched else None
        self.forward: Callable[..., Tensor] = compiled(model) if config.compile else model
        self._shown: dict[str, Any] = {"observe": self.stability.observe} if self.stability else {}
        for group in optimiser.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def __call__(self, step: int) -> StepResult:
        """Take step number ``step``."""
        batch = Batch(*(part.to(self.device) for part in self.batches.at(step)))
        self._set_rates(step)
        self.model.train()
        with deterministic(self.device, exact=self.config.exact):
            loss = self._gradient(batch, step)
        norm, broken = clip_(self.model.parameters(), self.config.clip), None
        if math.isfinite(loss) and math.isfinite(norm):
            self.optimiser.step()
            if self.stability is not None:
                self.stability.clip_scores()
        else:
            broken = first_broken(self.model, lambda: deque(self._read(batch, step), 0), loss)
        self.optimiser.zero_grad()
        rate = self.optimiser.param_groups[-1]["lr"]
        return StepResult(batch, loss, norm, rate, broken, self._metrics())

    def _set_rates(self, step: int) -> None:
        factor = self.schedule(step)
        for group in self.optimiser.param_groups:
            group["lr"] = group["initial_lr"] * factor
            if self.beta2 is not None and "betas" in group:
                group["betas"] = (group["betas"][0], self.beta2(step))

    def _gradient(self, batch: Batch, step: int) -> float:
        """Add up the gradient over the parts of a step; the mean loss."""
        if self.scaling is None:
            return self._add_up(batch, step)
        return self.scaling.gradient(lambda: self._add_up(batch, step))

    def _add_up(self, batch: Batch, step: int) -> float:
        count, total = batch.targets.numel(), 0.0
        targets = batch.targets.chunk(self.config.accumulate)
        if self.stability is not None:
            self.stability.reset()
        for stream, wanted in zip(self._read(batch, step), targets, strict=True):
            with self.autocast():
                loss = self._loss(stream, wanted)
            whole = loss / count
            if (uneven := self._balance()) is not None:
                whole = whole + self.config.balance_weight * uneven * (wanted.numel() / count)
            if self.stability is not None:
                whole = whole + self.stability.penalty(wanted.numel() / count)
            if self.scaling is None:
                whole.backward()  # type: ignore[no-untyped-call]
            else:
                self.scaling.backward(whole)
            total += loss.item()
        return total / count

    def _loss(self, stream: Tensor, wanted: Tensor) -> Tensor:
        """The sum over the targets, from the stream in parts unless logits are more than a table's.

        A bias or a cap of the logits is the model's business, so such a model reads out itself.
        """
        model = self.model
        settings: Any = {"smoothing": self.config.smoothing, "choice": self.loss_map}
        if getattr(model, "lm_head_is_linear", True):
            return lm_head_loss(stream, model.lm_head_weight, wanted, **settings)  # type: ignore[arg-type]
        return total_loss(model.logits(stream), wanted, **settings)  # type: ignore[operator]

    def _balance(self) -> Tensor | None:
        """How unevenly experts were chosen in the pass just made, where there are any."""
        balance: Callable[[], Tensor | None] | None = getattr(self.model, "balance", None)
        return None if balance is None else balance()

    def _metrics(self) -> dict[str, float]:
        metrics = self.stability.metrics() if self.stability is not None else {}
        if self.scaling is not None:
            metrics["loss_scale"] = self.scaling.scale.factor
        return metrics

    def _read(self, batch: Batch, step: int) -> Iterator[Tensor]:
        """The stream of each part of a step, under the noise that is that part's own."""
        cuda = [self.device] if self.device.type == "cuda" else []
        by_rows = (
            nullcontext if self.config.compile else partial(sparse_embedding_gradient, self.model)
        )
        for part, inputs in enumerate(batch.inputs.chunk(self.config.accumulate)):
            with torch.random.fork_rng(devices=cuda), self.autocast(), by_rows():
                torch.manual_seed(mix(self.seed, step, part))
                stream = self.forward(inputs, return_hidden=True, **self._shown)
            yield stream


@contextmanager
def deterministic(device: torch.device, *, exact: bool) -> Iterator[None]:
    """Use only GPU kernels that add in a fixed order, so that a run repeats bit for bit.

    On a CPU with a fixed number of threads torch always does. On a GPU some kernels do not, among
    them the backward pass of fused attention: two runs of the same settings then differ in the
    last digits, and soon in all of them. An operation without such a kernel raises ValueError. A
    fixed order costs some time (docs/log.md); ``exact=False`` declines it.
    """
    if device.type != "cuda" or not exact:
        yield
        return
    # cuBLAS reads this when it first allocates its workspace.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        reason = str(error).partition(". ")[0]
        raise ValueError(f"{reason}; give up exact repetition with train.exact=false.") from error
    finally:
        torch.use_deterministic_algorithms(before)


def compiled(model: nn.Module) -> Callable[..., Tensor]:
    """The model's pass by torch.compile; what it cannot do becomes one sentence."""
    from torch._dynamo.exc import TorchDynamoException  # costs a second, so only who compiles pays

    forward = torch.compile(model)

    def call(*args: Any, **settings: Any) -> Tensor:
        try:
            stream: Tensor = forward(*args, **settings)
        except TorchDynamoException as error:
            reason = str(getattr(error, "inner_exception", error)).strip().splitlines()[0]
            raise ValueError(
                f"the model's pass cannot be compiled here ({reason}); set train.compile=false."
            ) from error
        return stream

    return call


def autocast(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Half-precision autocast where it is asked for, bfloat16 where the hardware has it."""
    if precision == "auto":
        fast = (
            torch.cuda.is_bf16_supported()
            if device.type == "cuda"
            else torch.cpu._is_avx512_bf16_supported()  # torch has no public question for it
        )
        precision = "bfloat16" if fast else "float32"
    if precision in HALF:
        return lambda: torch.autocast(device.type, dtype=HALF[precision])
    return nullcontext


def mix(*numbers: int) -> int:
    """One seed from several numbers, well spread."""
    text = ":".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
