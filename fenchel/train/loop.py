"""The training loop: step, log, evaluate, save.

A step is a function of its number (fenchel/train/step.py), and so is when to log, evaluate and
save: a run that is stopped anywhere and resumed ends with the same bits as one that was not. Only
the process that holds the lock of the run directory writes to it. Checkpoints are written in a
thread, beside the next steps (fenchel/train/checkpoint_writer.py).

The first SIGINT (Ctrl-C), SIGTERM or SIGHUP stops the loop after the step under way, with a
checkpoint; the second stops it at once.

Steps are numbered from 1 in everything a person reads: after step n, n steps are complete.

A run by a time budget has a plan of steps. After every step the loop compares the time left with
the time that the rest takes at the pace of the latest steps. Where the two part it plans fewer, or
again more up to the first plan; ``replan`` then moves the schedule of rates to the new end and
records the number. Past the deadline no step begins. A resume takes the recorded plan and has no
deadline, so that what follows a checkpoint is a function of it.
"""

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from signal import Signals
from statistics import fmean, median
from types import FrameType
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import nn

from fenchel.checkpoints import run_checkpoint
from fenchel.checkpoints.run_checkpoint import Progress, Weights
from fenchel.data import Batch
from fenchel.files import NoSpace, StorageFailed, describe
from fenchel.operating_system import SYSTEM
from fenchel.train.checkpoint_writer import CheckpointWriter, spacing
from fenchel.train.loss import count_targets
from fenchel.train.loss_scale import LossScale
from fenchel.train.rundir import RunDir
from fenchel.train.step import Stepper, StepResult

ValidationFunction = Callable[[nn.Module], Mapping[str, float]]
"""A model to metrics of the validation text; the smallest "loss" decides which step is best."""
ProbeFunction = Callable[[Batch], Mapping[str, Any]]
"""The batch of a step to extra metrics of its line, such as the health of attention."""
ConstrainFunction = Callable[[int, bool], Mapping[str, float]]
"""After a step, which may be the last: moves the weights where they must be; returns metrics."""
CONSTRAIN_EVERY = 8
"""Steps after which a constraint is enforced, and before every planned checkpoint."""
ReplanFunction = Callable[[int], None]
"""A new number of steps: move the schedule, and record it."""
STOP_SIGNALS = SYSTEM.stop_signals


class Callback(Protocol):
    """What a run reports to: a terminal, a logger."""

    def step(self, step: int, steps: int) -> None:
        """Step number ``step`` of ``steps`` is complete."""

    def log(self, metrics: Mapping[str, Any]) -> None:
        """A line of metrics was written."""

    def message(self, text: str) -> None:
        """A sentence for the user."""


class Outcome(NamedTuple):
    """How a run ended."""

    status: str
    """"finished", "interrupted" or "diverged"."""
    progress: Progress
    reason: str = ""
    signal: Signals | None = None


class StopSignals:
    """While entered, records the first stop signal instead of ending the process.

    The second raises KeyboardInterrupt. A terminal that closes sends SIGHUP twice, from the kernel
    and from the shell, so a second SIGHUP means no more than the first.
    """

    def __init__(self) -> None:
        self.first: Signals | None = None
        self._handlers: dict[Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            # The parent may have set a signal to be ignored: nohup does so with SIGHUP.
            # None is a handler of another language, which could not be restored.
            if signal.getsignal(number) in (signal.SIG_IGN, None):
                continue
            try:
                self._handlers[number] = signal.signal(number, self._record)
            except ValueError:  # signals are handled in the main thread only
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _record(self, number: int, _frame: FrameType | None) -> None:
        if self.first == number == SYSTEM.hangup:
            return
        if self.first is not None:
            raise KeyboardInterrupt(Signals(number))
        self.first = Signals(number)


class Loop:
    """The steps of one run, from ``progress`` to ``steps``."""

    def __init__(
        self,
        stepper: Stepper,
        *,
        steps: int,
        run: RunDir,
        settings: Mapping[str, Any],
        validate: ValidationFunction,
        probe: ProbeFunction,
        callback: Callback,
        progress: Progress,
        weights: Weights | None = None,
        budget: float | None = None,
        replan: ReplanFunction | None = None,
        constrain: ConstrainFunction | None = None,
    ) -> None:
        """``settings`` are those of the model, which every checkpoint holds beside ``weights``.

        These are the model's, unless it has parameters that are not trained. ``budget`` is the time
        in seconds for a run at its first step, which ``replan`` follows where it changes its steps.
        """
        self.weights = stepper.model if weights is None else weights
        self.constrain = constrain
        self.stepper, self.model, self.config = stepper, stepper.model, stepper.config
        self.steps, self.run, self.settings = steps, run, settings
        self.validate, self.probe, self.callback = validate, probe, callback
        self.progress = progress
        if stepper.scaling is not None and progress.loss_scale is not None:
            stepper.scaling.scale = LossScale(progress.loss_scale, progress.loss_scale_age)
        self.writer = CheckpointWriter()
        self._saved_step = self._written_step = progress.step
        """The step of the newest checkpoint; of the newest that is on the disk."""
        self._started = time.perf_counter() - progress.seconds
        self._mark = (time.perf_counter(), progress.tokens)
        self.budget, self.replan, self._first_plan = budget, replan, steps
        self._announced = steps
        # The first step may compile, so it does not decide alone.
        self._paces = deque([] if budget is None else [budget / steps] * 2, maxlen=9)
        self._stepping = 0.0

    def train(self) -> Outcome:
        """Take the remaining steps; metrics and checkpoints go to the run directory."""
        try:
            return self._train()
        finally:
            self.writer.close()

    def _train(self) -> Outcome:
        tenth = max(1, self.steps // 10)
        evaluate_every = self.config.evaluate_every or tenth
        save_every = self.config.save_every or tenth
        with StopSignals() as signals:
            while self.progress.step < self.steps:
                if (signal := self._stop_signal(signals)) is not None:
                    return self._interrupted(signal)
                begun = time.perf_counter()
                result = self.stepper(self.progress.step)
                self._count(result)
                self._keep_to_budget(time.perf_counter() - begun)
                skipped = skipped_in_a_row(self.progress)
                if skipped >= self.config.max_nonfinite_steps:
                    return self._diverged(
                        f"{skipped} steps in a row were not finite: {result.broken}"
                    )
                done, last = self.progress.step, self.progress.step == self.steps
                planned = any(done % n == 0 for n in (CONSTRAIN_EVERY, evaluate_every, save_every))
                if self.constrain is not None and (planned or last):
                    self._write(self.constrain(done, last))
                if done % self.config.log_every == 0 or last:
                    self._log(result)
                apart = done - self._saved_step >= self._spacing(result.batch)
                better = (done % evaluate_every == 0 or last) and self._evaluate(apart or last)
                due = apart and not skipped and (done % save_every == 0 or better)
                if self.writer.done:
                    self._finish_write(must=False)
                if (due or last) and (outcome := self._save(must=last)):
                    return outcome
                self.callback.step(done, self.steps)
        return Outcome("finished", self.progress)

    def _keep_to_budget(self, seconds: float) -> None:
        """Change the number of steps where the rest of the plan does not take the time left."""
        if self.budget is None or self.replan is None:
            return
        done, affordable = self.progress.step, self._affordable_steps(seconds)
        steps = min(self._first_plan, done + affordable)
        if not 0.95 <= (steps - done) / max(1, self.steps - done) <= 1.1 and steps != self.steps:
            if abs(steps - self._announced) > 0.1 * self._first_plan:
                self._announce(steps)
            self.steps = steps
            self.replan(steps)

    def _announce(self, steps: int) -> None:
        """Tell the user a plan that is more than a tenth off the last one that was told."""
        reason = "Steps take longer than they did when they were timed"
        if steps > self._announced:
            reason = "The run is faster again"
        told = "all" if steps == self._first_plan else f"about {steps:,} of"
        self.callback.message(
            f"{reason}: the budget allows {told} the {self._first_plan:,} that were planned."
        )
        self._announced = steps

    def _affordable_steps(self, seconds: float) -> int:
        """How many more steps end before the deadline, after one that took ``seconds``."""
        assert self.budget is not None
        self._paces.append(seconds)
        self._stepping += seconds
        elapsed = time.perf_counter() - self._started
        others = (elapsed - self._stepping) / self.progress.step  # evaluations, checkpoints
        usual, latest = median(self._paces), fmean(list(self._paces)[-3:])
        pace = latest if latest > 1.5 * usual else usual  # a machine that has become slower
        return max(0, int((self.budget - elapsed) / (pace + others)))

    def _stop_signal(self, signals: StopSignals) -> Signals | None:
        """The signal that ends the run before its next step."""
        return signals.first

    def _count(self, result: StepResult) -> None:
        p = replace(self.progress, step=self.progress.step + 1)
        if result.broken is None:
            self.progress = replace(
                p,
                tokens=p.tokens + count_targets(result.batch.targets),
                loss_sum=p.loss_sum + result.loss,
                loss_count=p.loss_count + 1,
            )
        else:
            self.progress = replace(p, skipped=(*p.skipped, p.step))
            self.run.log({"step": p.step, "train/broken": result.broken})
            self.callback.message(f"Step {p.step} is skipped: {result.broken}.")

    def _log(self, result: StepResult) -> None:
        p, now = self.progress, time.perf_counter()
        since, before = self._mark
        self.model.eval()
        with torch.no_grad():
            probed = self.probe(result.batch)
        self._write(
            {
                "train/loss": p.loss_sum / p.loss_count if p.loss_count else float("nan"),
                "train/learning_rate": result.learning_rate,
                "train/gradient_norm": result.gradient_norm,
                "train/tokens": p.tokens,
                "train/skipped": len(p.skipped),
                **{f"train/{name}": value for name, value in result.metrics.items()},
                **probed,
                "time/tokens_per_second": (p.tokens - before) / max(1e-9, now - since),
                "time/elapsed": now - self._started,
            }
        )
        self.progress = replace(p, loss_sum=0.0, loss_count=0)
        self._mark = (time.perf_counter(), p.tokens)

    def _spacing(self, batch: Batch) -> int:
        """Least number of steps between two checkpoints."""
        if self.config.save_every is not None:
            return 1
        return spacing(self.stepper.device, batch.inputs.numel())

    def _evaluate(self, may_save: bool) -> bool:
        """Measure the validation text; return whether this step is the best of those saved."""
        before, p = time.perf_counter(), self.progress
        self.model.eval()
        metrics = self.validate(self.model)
        self._write({f"validation/{name}": value for name, value in metrics.items()})
        since, tokens = self._mark
        self._mark = (since + time.perf_counter() - before, tokens)
        better = may_save and metrics["loss"] < (float("inf") if p.best is None else p.best)
        if better:
            self.progress = replace(p, best=metrics["loss"], best_step=p.step)
        return better

    def _write(self, metrics: Mapping[str, Any]) -> None:
        line = {"step": self.progress.step, **metrics}
        self.run.log(line)
        self.callback.log(line)

    def _save(self, *, must: bool) -> Outcome | None:
        """Begin to write a checkpoint, or end the run if a weight is not finite.

        One that ``must`` be written is waited for.
        """
        if self._saved_step != self.progress.step:
            self._finish_write(must=must)
            if bad := self._not_finite():
                return self._diverged(f"the weights {bad[0]} hold {bad[1]} nan or inf")
            with self._full_disk_reported(must=must):
                self.progress = replace(
                    self.progress,
                    seconds=time.perf_counter() - self._started,
                    metrics_bytes=self._flush(),
                    **self._loss_scale(),
                )
                self._commit()
                self._saved_step = self.progress.step
        if must:
            self._finish_write(must=True)
        return None

    def _finish_write(self, *, must: bool) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        with self._full_disk_reported(must=must):
            self.writer.wait()

    @contextmanager
    def _full_disk_reported(self, *, must: bool) -> Iterator[None]:
        """A full disk is reported and the run goes on, unless a checkpoint ``must`` be written."""
        try:
            yield
        except NoSpace as error:
            if must:
                raise StorageFailed(
                    f"{error} Make room and go on with --resume {self.run.path}; "
                    f"{newest_checkpoint(self.run)}."
                ) from error
            self._saved_step = self._written_step
            self.callback.message(f"{error} The run goes on without this checkpoint.")

    def _flush(self) -> int:
        """Write all metrics to the disk; returns the size of their file."""
        return self.run.flush()

    def _not_finite(self) -> tuple[str, int] | None:
        """The first weights that are not finite, and how many of them."""
        return run_checkpoint.not_finite(self.weights.state_dict())

    def _commit(self) -> None:
        """Write the checkpoint of this step beside the next ones."""
        now = self.weights.state_dict(), self.stepper.optimiser.state_dict()
        progress, copy = self.progress, self.writer.copy(*now)
        weights, state = copy or now

        def write() -> None:
            run_checkpoint.save(self.run.checkpoints, progress, weights, state, self.settings)
            self._committed(progress)

        self.writer.start(write)
        if copy is None:
            self.writer.wait()

    def _committed(self, progress: Progress) -> None:
        """What follows a checkpoint that is on the disk."""
        if self._written_step == 0:  # from now on a run without a checkpoint has lost some
            with suppress(OSError):
                self.run.write_status(progress.step, self.steps)
        self._written_step = progress.step
        if not skipped_in_a_row(progress):  # while steps are skipped, older ones may be needed
            self._rotate(progress.best_step)

    def _rotate(self, best_step: int | None) -> None:
        run_checkpoint.rotate(self.run.checkpoints, keep=self.config.keep, best_step=best_step)

    def _loss_scale(self) -> dict[str, Any]:
        if self.stepper.scaling is None:
            return {}
        factor, age = self.stepper.scaling.scale
        return {"loss_scale": factor, "loss_scale_age": age}

    def _interrupted(self, by: Signals) -> Outcome:
        if outcome := self._save(must=True):
            return outcome
        reason = f"stopped by {by.name} after step {self.progress.step}"
        return Outcome("interrupted", self.progress, reason, by)

    def _diverged(self, what: str) -> Outcome:
        self._finish_write(must=False)
        reason = f"{what}; {newest_checkpoint(self.run)}. Try a lower learning rate."
        return Outcome("diverged", self.progress, reason)


def skipped_in_a_row(progress: Progress) -> int:
    """How many of the latest steps were skipped, without a complete one after them.

    >>> skipped_in_a_row(Progress(step=7, skipped=(2, 6, 7)))
    2
    """
    step = progress.step
    for skipped in reversed(progress.skipped):
        if skipped != step:
            break
        step -= 1
    return progress.step - step


def newest_checkpoint(run: RunDir) -> str:
    """The newest checkpoint of a run, after checking it, as part of a sentence."""
    try:
        folder, _ = run_checkpoint.newest(run.checkpoints)
    except OSError as error:
        return f"its checkpoints cannot be read now ({describe(error)})"
    except ValueError as error:  # of another format
        return f"its checkpoints cannot be read ({error})"
    return f"the last good checkpoint is {folder.name}" if folder else "there is no checkpoint"
