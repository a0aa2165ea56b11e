"""The training loop: step, log, evaluate, save. It knows no model by name.

A step is a function of its number (fenchel/train/step.py), and so is when to log, evaluate and
save; a run that is stopped anywhere and resumed ends with the same bits as one that never was.
Only the process that holds the lock of the run directory writes.
"""


import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from signal import Signals
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from fenchel.data import Batch
from fenchel.files import NoSpace
from fenchel.train import checkpoint
from fenchel.train.checkpoint import Progress
from fenchel.train.interrupt import Interruption
from fenchel.train.rundir import RunDir
from fenchel.train.step import Stepper, Taken

Measure = Callable[[nn.Module], Mapping[str, float]]
"""A model to metrics of the validation text; "loss" among them decides which is best."""
Probe = Callable[[nn.Module, Batch], Mapping[str, Any]]
"""Something to measure at every line of metrics, such as the health of attention."""


class Listener(Protocol):
    """Whoever watches: a terminal, a logger."""

    def step(self, step: int, steps: int) -> None:
        """A step was taken."""

    def line(self, metrics: Mapping[str, Any]) -> None:
        """A line of metrics was written."""

    def say(self, sentence: str) -> None:
        """Something a person should know."""


class Outcome(NamedTuple):
    """How a run ended."""

    status: str
    """"finished", "interrupted" or "diverged"."""
    progress: Progress
    reason: str = ""
    signal: Signals | None = None


class Loop:
    """One run: its parts, and how far it has come."""

    def __init__(
        self,
        take: Stepper,
        *,
        steps: int,
        run: RunDir,
        settings: Mapping[str, Any],
        validate: Measure,
        probe: Probe,
        listener: Listener,
        progress: Progress,
    ) -> None:
        self.take, self.model, self.config = take, take.model, take.config
        self.steps, self.run, self.settings = steps, run, settings
        self.validate, self.probe, self.listener = validate, probe, listener
        self.progress = progress
        self._started = time.perf_counter() - progress.seconds
        self._mark = (time.perf_counter(), progress.tokens)

    def train(self) -> Outcome:
        """Take the steps that are left and leave the whole story in the run directory."""
        tenth = max(1, self.steps // 10)
        evaluate_every = self.config.evaluate_every or tenth
        save_every = self.config.save_every or tenth
        with Interruption() as signals:
            while self.progress.step < self.steps:
                if signals.asked is not None:
                    return self._interrupted(signals.asked)
                taken = self.take(self.progress.step)
                self._count(taken)
                done, last = self.progress.step, self.progress.step == self.steps
                if taken.broken and self.streak() >= self.config.patience:
                    return self._diverged(taken.broken)
                if done % self.config.log_every == 0 or last:
                    self._log(taken)
                if done % evaluate_every == 0 or last:
                    self._evaluate()
                if (done % save_every == 0 or last) and not self.streak():
                    self._save()
                self.listener.step(done, self.steps)
        return Outcome("finished", self.progress)

    def streak(self) -> int:
        """How many of the newest steps were skipped, one after another."""
        skipped, newest, streak = set(self.progress.skipped), self.progress.step - 1, 0
        while newest - streak in skipped:
            streak += 1
        return streak

    def _count(self, taken: Taken) -> None:
        p = replace(self.progress, step=self.progress.step + 1)
        if taken.broken is None:
            self.progress = replace(
                p,
                tokens=p.tokens + taken.batch.targets.numel(),
                loss_sum=p.loss_sum + taken.loss,
                loss_count=p.loss_count + 1,
            )
        else:
            self.progress = replace(p, skipped=(*p.skipped, p.step - 1))
            self.run.log({"step": p.step, "train/broken": taken.broken})
            self.listener.say(f"Step {p.step} is skipped: {taken.broken}.")

    def _log(self, taken: Taken) -> None:
        p, now = self.progress, time.perf_counter()
        since, before = self._mark
        self.model.eval()
        with torch.no_grad():
            seen = self.probe(self.model, taken.batch)
        self._line(
            {
                "train/loss": p.loss_sum / p.loss_count if p.loss_count else float("nan"),
                "train/learning_rate": taken.learning_rate,
                "train/gradient_norm": taken.gradient_norm,
                "train/tokens": p.tokens,
                "train/skipped": len(p.skipped),
                **seen,
                "time/tokens_per_second": (p.tokens - before) / max(1e-9, now - since),
                "time/elapsed": now - self._started,
            }
        )
        self.progress = replace(p, loss_sum=0.0, loss_count=0)
        self._mark = (time.perf_counter(), p.tokens)

    def _evaluate(self) -> None:
        before = time.perf_counter()
        self.model.eval()
        found = self.validate(self.model)
        self._line({f"validation/{name}": value for name, value in found.items()})
        if self.progress.best is None or found["loss"] < self.progress.best:
            self.progress = replace(
                self.progress, best=found["loss"], best_step=self.progress.step
            )
        since, tokens = self._mark
        self._mark = (since + time.perf_counter() - before, tokens)

    def _line(self, metrics: Mapping[str, Any]) -> None:
        line = {"step": self.progress.step, **metrics}
        self.run.log(line)
        self.listener.line(line)

    def _save(self) -> None:
        self.progress = replace(
            self.progress,
            seconds=time.perf_counter() - self._started,
            metrics_bytes=self.run.position(),
        )
        try:
            checkpoint.save(
                self.run.checkpoints,
                self.progress,
                self.model.state_dict(),
                self.take.optimiser,
                self.settings,
            )
        except NoSpace as error:
            if self.progress.step == self.steps:
                raise
            self.listener.say(f"{error} The run goes on without this checkpoint.")
            return
        if not self.streak():
            checkpoint.rotate(
                self.run.checkpoints, keep=self.config.keep, best_step=self.progress.best_step
            )

    def _interrupted(self, by: Signals) -> Outcome:
        self._save()
        reason = f"stopped by {by.name} after step {self.progress.step}"
        return Outcome("interrupted", self.progress, reason, by)

    def _diverged(self, broken: str) -> Outcome:
        kept, _ = checkpoint.newest(self.run.checkpoints)
        where = f"the last good checkpoint is {kept.name}" if kept else "there is no checkpoint yet"
        reason = (
            f"{self.streak()} steps in a row were not finite: {broken}; {where}. "
            "Try a lower learning rate."
        )
        return Outcome("diverged", self.progress, reason)
