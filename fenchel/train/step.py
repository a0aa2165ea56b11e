"""One step: batch, loss, gradient, clip, move.

Everything in it is a function of (seed, step): the batch, the learning rate and the dropout
noise. The gradient is that of

    (1 / N) sum over the N targets of the step of  their loss,

summed over parts when the step is read in several; its global norm is cut to ``clip``. When the
loss or the norm is not finite the optimiser is not called and no weight moves.

Many processes will join here: ``Batches`` gives rank r of w its share of a step, and the
gradient is complete just before ``get_total_norm``.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fenchel.data import Batch, Batches
from fenchel.optim import Schedule, Together
from fenchel.train.config import TrainConfig
from fenchel.train.exact import fixed_order
from fenchel.train.guard import first_broken
from fenchel.train.readout import readout_loss


class Taken(NamedTuple):
    """What a step was."""

    batch: Batch
    loss: float
    gradient_norm: float
    learning_rate: float
    broken: str | None
    """What was not finite; None when the weights moved."""


class Stepper:
    """Takes steps; holds no memory of them besides the weights and the optimiser's state."""

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        optimiser: Together,
        schedule: Schedule,
        *,
        config: TrainConfig,
        seed: int,
    ) -> None:
        self.model, self.batches = model, batches
        self.optimiser, self.schedule = optimiser, schedule
        self.config, self.seed = config, seed
        self.device = next(model.parameters()).device
        self.autocast = autocast(config.precision, self.device)
        for group in optimiser.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def __call__(self, step: int) -> Taken:
        """Take step number ``step``."""
        batch = Batch(*(part.to(self.device) for part in self.batches.at(step)))
        factor = self.schedule(step)
        for group in self.optimiser.param_groups:
            group["lr"] = group["initial_lr"] * factor
        self.model.train()
        with fixed_order(self.device, exact=self.config.exact):
            loss = self._gradient(batch, step)
        moved = [p for p in self.model.parameters() if p.grad is not None]
        norm_ = get_total_norm([p.grad for p in moved if p.grad is not None])
        norm, broken = norm_.item(), None
        if math.isfinite(loss) and math.isfinite(norm):
            clip_grads_with_norm_(moved, self.config.clip, norm_)
            self.optimiser.step()
        else:
            broken = first_broken(self.model, lambda: deque(self._read(batch, step), 0), loss)
        self.optimiser.zero_grad()
        rate = self.optimiser.param_groups[-1]["lr"]
        return Taken(batch, loss, norm, rate, broken)

    def _gradient(self, batch: Batch, step: int) -> float:
        """Add up the gradient over the parts of a step; the mean loss."""
        count, total = batch.targets.numel(), 0.0
        targets = batch.targets.chunk(self.config.accumulate)
        for stream, wanted in zip(self._read(batch, step), targets, strict=True):
            with self.autocast():
                table: Tensor = self.model.read_weight  # type: ignore[assignment]
                loss = readout_loss(stream, table, wanted, smoothing=self.config.smoothing)
            (loss / count).backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total / count

    def _read(self, batch: Batch, step: int) -> Iterator[Tensor]:
        """The stream of each part of a step, under the noise that is that part's own."""
        cuda = [self.device] if self.device.type == "cuda" else []
        for part, inputs in enumerate(batch.inputs.chunk(self.config.accumulate)):
            with torch.random.fork_rng(devices=cuda), self.autocast():
                torch.manual_seed(mix(self.seed, step, part))
                stream: Tensor = self.model(inputs, read=False)
            yield stream


def autocast(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """bfloat16 autocast where it is asked for, or where the hardware has it."""
    if precision == "auto":
        fast = (
            torch.cuda.is_bf16_supported()
            if device.type == "cuda"
            else torch.cpu._is_avx512_bf16_supported()  # torch has no public question for it
        )
        precision = "bfloat16" if fast else "float32"
    if precision == "bfloat16":
        return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext


def mix(*numbers: int) -> int:
    """One seed from several numbers, well spread."""
    text = ":".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
