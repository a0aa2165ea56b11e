"""The training loop: step, log, evaluate, save. It knows no model by name.

A step is a function of its number (fenchel/train/step.py), and so is when to log, evaluate and
save; a run that is stopped anywhere and resumed ends with the same bits as one that never was.
Only the process that holds the lock of the run directory writes.

Steps are numbered from 1 in everything a person reads: after step n, n steps are behind us.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from signal import Signals
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from fenchel.checkpoints import run_checkpoint
from fenchel.checkpoints.run_checkpoint import Progress
from fenchel.data import Batch
from fenchel.files import NoSpace, StorageFailed
from fenchel.train.loss_scale import LossScale
from fenchel.train.machine import Interruption
from fenchel.train.rundir import RunDir
from fenchel.train.step import Stepper, StepResult

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
        if take.scaling is not None and progress.loss_scale is not None:
            take.scaling.scale = LossScale(progress.loss_scale, progress.loss_scale_age)
        self._saved = progress.step
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
                if taken.broken and self.streak() >= self.config.patience:
                    return self._diverged(
                        f"{self.streak()} steps in a row were not finite: {taken.broken}"
                    )
                done, last = self.progress.step, self.progress.step == self.steps
                if done % self.config.log_every == 0 or last:
                    self._log(taken)
                better = (done % evaluate_every == 0 or last) and self._evaluate()
                due = (done % save_every == 0 or better) and not self.streak()
                if (due or last) and (ended := self._save(must=last)):
                    return ended
                self.listener.step(done, self.steps)
        return Outcome("finished", self.progress)

    def streak(self) -> int:
        """How many of the newest steps were skipped, one after another."""
        step = self.progress.step
        for skipped in reversed(self.progress.skipped):
            if skipped != step:
                break
            step -= 1
        return self.progress.step - step

    def _count(self, taken: StepResult) -> None:
        p = replace(self.progress, step=self.progress.step + 1)
        if taken.broken is None:
            self.progress = replace(
                p,
                tokens=p.tokens + taken.batch.targets.numel(),
                loss_sum=p.loss_sum + taken.loss,
                loss_count=p.loss_count + 1,
            )
        else:
            self.progress = replace(p, skipped=(*p.skipped, p.step))
            self.run.log({"step": p.step, "train/broken": taken.broken})
            self.listener.say(f"Step {p.step} is skipped: {taken.broken}.")

    def _log(self, taken: StepResult) -> None:
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
                **{f"train/{name}": value for name, value in taken.told.items()},
                **seen,
                "time/tokens_per_second": (p.tokens - before) / max(1e-9, now - since),
                "time/elapsed": now - self._started,
            }
        )
        self.progress = replace(p, loss_sum=0.0, loss_count=0)
        self._mark = (time.perf_counter(), p.tokens)

    def _evaluate(self) -> bool:
        """Measure the validation text; whether no step before was better."""
        before, p = time.perf_counter(), self.progress
        self.model.eval()
        found = self.validate(self.model)
        self._line({f"validation/{name}": value for name, value in found.items()})
        since, tokens = self._mark
        self._mark = (since + time.perf_counter() - before, tokens)
        better = found["loss"] < (float("inf") if p.best is None else p.best)
        if better:
            self.progress = replace(p, best=found["loss"], best_step=p.step)
        return better

    def _line(self, metrics: Mapping[str, Any]) -> None:
        line = {"step": self.progress.step, **metrics}
        self.run.log(line)
        self.listener.line(line)

    def _save(self, *, must: bool) -> Outcome | None:
        """Commit a checkpoint, or end the run if its weights are beyond saving.

        A full disk is said and survived, unless this checkpoint ``must`` be.
        """
        if self._saved == self.progress.step:
            return None
        if bad := run_checkpoint.not_finite(self.model.state_dict()):
            return self._diverged(f"the weights {bad[0]} hold {bad[1]} nan or inf")
        try:
            self.progress = replace(
                self.progress,
                seconds=time.perf_counter() - self._started,
                metrics_bytes=self.run.settle(),
                **self._scale(),
            )
            run_checkpoint.save(
                self.run.checkpoints,
                self.progress,
                self.model.state_dict(),
                self.take.optimiser,
                self.settings,
            )
        except NoSpace as error:
            if must:
                raise StorageFailed(
                    f"{error} Make room and go on with --resume {self.run.path}; {self._kept()}."
                ) from error
            self.listener.say(f"{error} The run goes on without this checkpoint.")
            return None
        self._saved = self.progress.step
        if not self.streak():  # while steps are being skipped, older ones may be needed yet
            run_checkpoint.rotate(
                self.run.checkpoints, keep=self.config.keep, best_step=self.progress.best_step
            )
        return None

    def _scale(self) -> dict[str, Any]:
        if self.take.scaling is None:
            return {}
        factor, age = self.take.scaling.scale
        return {"loss_scale": factor, "loss_scale_age": age}

    def _kept(self) -> str:
        kept, _ = run_checkpoint.newest(self.run.checkpoints)
        return f"the last good checkpoint is {kept.name}" if kept else "there is no checkpoint yet"

    def _interrupted(self, by: Signals) -> Outcome:
        if ended := self._save(must=True):
            return ended
        reason = f"stopped by {by.name} after step {self.progress.step}"
        return Outcome("interrupted", self.progress, reason, by)

    def _diverged(self, what: str) -> Outcome:
        reason = f"{what}; {self._kept()}. Try a lower learning rate."
        return Outcome("diverged", self.progress, reason)
