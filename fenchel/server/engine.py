"""One thread that owns the model: requests in, tokens out, many at a time.

A worker thread calls ``Scheduler.turn`` (generation/scheduler.py) while there is work. Here are the
queue, its limits, and the end.

**Failure.** A logit that is not finite ends its own request with an error. Any other exception in
the worker ends all requests with an error and the engine with it: ``alive`` is False and
``failure`` says why.

The engine does not depend on HTTP. Callbacks run on the worker thread, once per turn and request.
"""

import hashlib
import threading
import time
from collections.abc import Collection
from typing import NamedTuple, Protocol

import torch

from fenchel import __version__
from fenchel.data import TextTokenizer
from fenchel.generation.attention_trace import TokenCalibration
from fenchel.generation.decoder import Decoder
from fenchel.generation.kv_cache import CacheKind
from fenchel.generation.scheduler import Finish, Job, OnUpdate, Request, Scheduler, TurnFacts
from fenchel.model import Transformer, evaluating


class RequestFacts(NamedTuple):
    """The times of a request that has ended; None for what it did not reach."""

    finish: Finish
    prompt_tokens: int
    new_tokens: int
    queue_seconds: float
    first_token_seconds: float | None
    """From its arrival."""
    seconds: float


class EngineObserver(Protocol):
    """Receives numbers for metrics, on the worker thread."""

    def on_step(self, facts: TurnFacts) -> None:
        """After every turn of the worker."""

    def on_finish(self, request: Request, facts: RequestFacts) -> None:
        """After the last update of a request."""


class QueueFull(Exception):
    """There is no place for a request; ``retry_after`` seconds is when there may be one."""

    def __init__(self, reason: str, retry_after: float) -> None:
        super().__init__(f"{reason}; try again in {retry_after:.0f} s.")
        self.retry_after = retry_after


class Engine:
    """Serves requests to a model, up to ``rows`` at a time, from a thread of its own.

    ``context`` bounds prompt and continuation together. With ``invariant`` a request gives the same
    bits whatever else is served. ``step`` as in ``generate``. Without ``prefixes`` every prompt is
    read from its beginning. Vectors may be added after the layers ``steered``. ``queue`` requests
    may wait.
    ``tracing`` requests at a time may have their attention traced, with ``calibration`` for their
    confidence.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: TextTokenizer,
        *,
        rows: int = 32,
        context: int | None = None,
        invariant: bool = False,
        cache: CacheKind = "model",
        step: str = "auto",
        prefixes: bool = True,
        steered: Collection[int] = (),
        queue: int = 64,
        tracing: int = 4,
        calibration: TokenCalibration | None = None,
        observer: EngineObserver | None = None,
    ) -> None:
        self.model = model if context is None else model.with_context(context)
        self.decoder = Decoder(
            self.model,
            rows=rows,
            invariant=invariant,
            cache=cache,
            step=step,
            prefixes=prefixes,
            steered=steered,
        )
        self.scheduler = Scheduler(
            self.decoder, tokenizer, calibration=calibration, on_finish=self._on_finish
        )
        self.tokenizer, self.cache = tokenizer, cache
        self.queue_limit, self.tracing = queue, tracing
        self.context = self.decoder.context
        self.ready = False
        """Whether the worker takes requests from the queue."""
        self.failure: str | None = None
        """Why the worker has ended, where it failed."""
        self._observer = observer
        self._condition = threading.Condition()
        self._closing: float | None = None
        self._step_seconds = 0.05
        self._thread = threading.Thread(target=self._run, name="fenchel-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the worker runs; False after ``close`` and after a failure."""
        return self._thread.is_alive() and self.failure is None

    @property
    def active(self) -> int:
        """Rows that hold a request."""
        return len(self.scheduler.jobs)

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self.scheduler.waiting)

    def start(self) -> None:
        """Start the worker; ``ready`` is True once every bucket has made a step."""
        self._thread.start()

    def close(self, seconds: float = 30.0) -> None:
        """Refuse new requests, finish the accepted ones within ``seconds``, end the rest."""
        with self._condition:
            self._closing = time.monotonic() + seconds
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def submit(self, request: Request, on_update: OnUpdate) -> Job:
        """Accept a request; ``on_update`` is called on the worker thread until it has finished.

        Raises ``QueueFull``, ``ValueError`` for a request that cannot be served, and
        ``RuntimeError`` where the engine does not run.
        """
        job = self.scheduler.prepare(request, on_update)
        with self._condition:
            if self.failure is not None or self._closing is not None or not self.alive:
                raise RuntimeError(self.failure or "the engine does not run.")
            if self.queued >= self.queue_limit:
                raise QueueFull(f"{self.queued} requests wait already", self.retry_after)
            traced = sum(job.is_traced for job in self.scheduler.unfinished())
            if job.is_traced and traced >= self.tracing:
                raise QueueFull(
                    f"the attention of {self.tracing} requests is traced already", self.retry_after
                )
            self.scheduler.waiting.append(job)
            self._condition.notify()
        return job

    def cancel(self, job: Job) -> None:
        """End a request; its row is free at the next step."""
        job.cancelled = True
        with self._condition:
            self._condition.notify()

    @property
    def retry_after(self) -> float:
        """Seconds until a row is free at the latest, and with it a place in the queue."""
        left = [
            min(job.request.max_new_tokens - job.new_tokens, self.context - len(job.ids))
            for job in list(self.scheduler.jobs.values())
        ]
        return max(1.0, self._step_seconds * min(left, default=1))

    def fingerprint(self) -> str:
        """Twelve digits that change with the weights, the tokenizer and how steps are computed.

        Each tensor counts by the sum of its bits as integers.
        """
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        rows, invariant = len(self.decoder.rows), self.decoder.invariant
        facts = (
            *(__version__, torch.__version__, self.decoder.device.type, self.decoder.kind.name),
            *(rows, invariant, self.cache, self.model.config),
        )
        digest = hashlib.sha256(repr(facts).encode())
        digest.update(self.tokenizer.to_str().encode(errors="replace"))
        for name, tensor in self.model.state_dict().items():
            bits = tensor.detach().reshape(-1).view(integers[tensor.element_size()])
            total = int(bits.sum(dtype=torch.int64))
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {total}\n".encode())
        return digest.hexdigest()[:12]

    # What follows runs on the worker thread.

    def _run(self) -> None:
        try:
            with torch.inference_mode(), evaluating(self.model):
                self.decoder.warm_up()
                self.ready = True
                while self._wait():
                    self._turn()
            reason: Finish = "cancelled"
        except BaseException as error:  # every request gets an error instead of silence
            self.failure = f"the engine has stopped: {type(error).__name__}: {error}"
            reason = "error"
        self.ready = False
        with self._condition:
            self._closing = self._closing or 0.0
        for job in list(self.scheduler.unfinished()):
            self.scheduler.finish(job, reason, error=self.failure or "")
        self._observe(TurnFacts(queued=self.queued))

    def _wait(self) -> bool:
        """Wait for work; False where the engine is to end."""
        with self._condition:
            while not self.scheduler.busy:
                if self._closing is not None:
                    return False
                self._condition.wait()
            return self._closing is None or time.monotonic() < self._closing

    def _turn(self) -> None:
        facts = self.scheduler.turn()
        if facts.bucket:
            seconds = facts.prefill_seconds + facts.step_seconds
            self._step_seconds += 0.1 * (seconds - self._step_seconds)
        self._observe(facts)

    def _observe(self, facts: TurnFacts) -> None:
        if self._observer is not None:
            self._observer.on_step(facts)

    def _on_finish(self, job: Job, finish: Finish) -> None:
        if self._observer is None:
            return
        now = time.monotonic()
        facts = RequestFacts(
            finish,
            len(job.request.prompt),
            job.new_tokens,
            (job.started or now) - job.arrived,
            None if job.first_token is None else job.first_token - job.arrived,
            now - job.arrived,
        )
        self._observer.on_finish(job.request, facts)
