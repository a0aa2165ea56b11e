"""One thread that owns the model: requests in, tokens out, many at a time.

    submit -> queue -> prefill -> row of the batch -> tokens, one per step -> finish

A worker thread takes requests in the order of their arrival. Between two decoding steps of the
batch (generation/continuous_batch.py) it reads at most a chunk of tokens of prompts, so that
no sequence waits for more than one chunk; while less than half of the rows are taken it reads up to
``IDLE_CHUNKS`` times as many, since steps of a few rows take nearly as long as those of many. Short
prompts that fit into a chunk are read together. A request that needs no token after its prompt
(scores of a text) never takes a row.

**Draws.** Each request has a generator of its own, seeded by ``Request.seed``: what it draws does
not depend on the other requests. It is the generator of ``fenchel generate --seed``. Recorded steps
on a GPU draw on the device by the seed and the number of the token instead
(generation/sampling.py), except for requests with penalties or bias.

**Failure.** A logit that is not finite ends its own request with an error. Any other exception in
the worker ends all requests with an error and the engine with it: ``alive`` is False and
``failure`` says why.

The engine does not depend on HTTP. Callbacks run on the worker thread, once per step and request.

T tokens of a prompt or of a chunk of it, V vocabulary.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fenchel.data import TextTokenizer
from fenchel.generation.attention_trace import (
    PassTrace,
    TokenCalibration,
    TokenTrace,
    TracedRow,
    TraceSettings,
)
from fenchel.generation.continuous_batch import (
    ContinuousBatch,
    LaunchedStep,
    NewRow,
    Prefill,
    Row,
)
from fenchel.generation.cuda_graph import Record
from fenchel.generation.kv_cache import CacheKind
from fenchel.generation.sampling import (
    MOST_LOGPROBS,
    NOT_FINITE,
    Penalties,
    Sampling,
    log_probabilities,
    sample_or_mark,
)
from fenchel.generation.text_stream import TextStream
from fenchel.model import Transformer, evaluating

IDLE_CHUNKS = 4
"""How many chunks of prompts are read at once while less than half of the rows are taken."""
SCORE_ENTRIES = 1 << 22
"""Logits that the scores of a prompt take at once: 16 MiB in float32."""

Finish = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One choice of one prompt."""

    prompt: tuple[int, ...]
    """Ids, at least one."""
    max_new_tokens: int
    """Tokens at most; 0 only with ``prompt_logprobs``."""
    sampling: Sampling
    seed: int
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    continues: bool = True
    """Whether the text goes on from that of the prompt; an answer in a chat begins anew."""
    logprobs: int | None = None
    """How many of the largest log-probabilities come with a new token; None is none at all."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    trace: TraceSettings | None = None
    """What to say about the attention of every new token."""


class Token(NamedTuple):
    """A token of the prompt or a new one."""

    id: int
    text: str
    """What this token releases: "" while a character or a stop string may be incomplete, and for
    a token of the prompt."""
    logprob: float | None = None
    """Log-probability from the logits, before temperature, penalties and truncation."""
    top: tuple[tuple[int, float], ...] = ()
    """Ids with the largest log-probabilities, largest first."""
    trace: TokenTrace | None = None


@dataclass(frozen=True)
class Update:
    """What one step of the engine produced for one request."""

    tokens: tuple[Token, ...] = ()
    prompt: tuple[Token, ...] | None = None
    """Once, where ``prompt_logprobs`` is set; the first has no log-probability."""
    finish: Finish | None = None
    error: str = ""
    flush: str = ""
    """Text that was withheld until the end."""


class StepFacts(NamedTuple):
    """What one turn of the worker did."""

    bucket: int
    """Rows that the decoding step computed; 0 without one."""
    active: int
    """Rows that held a request, each with a new token."""
    queued: int
    """Requests that wait."""
    columns: int
    """Columns of the cache that the step read."""
    prompt_tokens: int
    """Tokens of prompts that were read."""
    prefill_seconds: float
    step_seconds: float


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

    def on_step(self, facts: StepFacts) -> None:
        """After every turn of the worker."""

    def on_finish(self, request: Request, facts: RequestFacts) -> None:
        """After the last update of a request."""


class QueueFull(Exception):
    """There is no place for a request; ``retry_after`` seconds is when there may be one."""

    def __init__(self, reason: str, retry_after: float) -> None:
        super().__init__(f"{reason}; try again in {retry_after:.0f} s.")
        self.retry_after = retry_after


OnUpdate = Callable[[Update], None]


@dataclass(eq=False)
class _Job:
    """A request that the engine has accepted."""

    request: Request
    on_update: OnUpdate
    generator: torch.Generator
    text: TextStream
    penalties: Penalties | None = None
    row: Row | None = None
    new_tokens: int = 0
    prompt: list[Token] = field(default_factory=list)
    cancelled: bool = False
    finished: bool = False
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None


class Ticket:
    """A request that was submitted."""

    def __init__(self, job: _Job, wake: Callable[[], None]) -> None:
        self._job, self._wake = job, wake

    @property
    def started(self) -> bool:
        """Whether the request has left the queue."""
        return self._job.started is not None or self._job.finished

    def cancel(self) -> None:
        """End the request; its row is free at the next step."""
        self._job.cancelled = True
        self._wake()


class Engine:
    """Serves requests to a model, up to ``rows`` at a time, from a thread of its own.

    ``context`` bounds prompt and continuation together. With ``invariant`` a request gives the same
    bits whatever else is served. ``record`` as in ``generate``. ``queue`` requests may wait.
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
        record: Record | None = "auto",
        queue: int = 64,
        tracing: int = 4,
        calibration: TokenCalibration | None = None,
        observer: EngineObserver | None = None,
    ) -> None:
        self.model = model if context is None else model.with_context(context)
        self.tokenizer, self.queue_limit, self.tracing = tokenizer, queue, tracing
        self.batch = ContinuousBatch(
            self.model, rows=rows, invariant=invariant, cache=cache, record=record
        )
        self.context, self.vocabulary = self.batch.context, self.model.config.vocabulary
        self.device = self.batch.device
        self.ready = False
        """Whether the worker takes requests from the queue."""
        self.failure: str | None = None
        """Why the worker has ended, where it failed."""
        self._observer, self._calibration = observer, calibration
        self._waiting: deque[_Job] = deque()
        self._jobs: dict[Row, _Job] = {}
        self._prefill: _Reading | None = None
        self._launched: LaunchedStep | None = None
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
        return len(self._jobs)

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

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

    def submit(self, request: Request, on_update: OnUpdate) -> Ticket:
        """Accept a request; ``on_update`` is called on the worker thread until it has finished.

        Raises ``QueueFull``, ``ValueError`` for a request that cannot be served, and
        ``RuntimeError`` where the engine does not run.
        """
        self._require(request)
        job = _Job(
            request,
            on_update,
            torch.Generator(self.device).manual_seed(request.seed),
            TextStream(
                self.tokenizer, request.stop_strings, request.prompt if request.continues else ()
            ),
        )
        with self._condition:
            if self.failure is not None or self._closing is not None or not self.alive:
                raise RuntimeError(self.failure or "the engine does not run.")
            if len(self._waiting) >= self.queue_limit:
                raise QueueFull(f"{len(self._waiting)} requests wait already", self.retry_after)
            if _observed(job) and sum(map(_observed, self._unfinished())) >= self.tracing:
                raise QueueFull(
                    f"the attention of {self.tracing} requests is traced already", self.retry_after
                )
            self._waiting.append(job)
            self._condition.notify()
        return Ticket(job, self._wake)

    @property
    def retry_after(self) -> float:
        """Seconds until a row is free at the latest, and with it a place in the queue."""
        left = [
            min(
                job.request.max_new_tokens - job.new_tokens,
                self.context - len(job.request.prompt) - job.new_tokens,
            )
            for job in list(self._jobs.values())
        ]
        return max(1.0, self._step_seconds * min(left, default=1))

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify()

    def _require(self, request: Request) -> None:
        """Raise for a request that cannot be served."""
        n = len(request.prompt)
        if n < 1:
            raise ValueError("a prompt has at least one token.")
        if n > self.context:
            raise ValueError(f"the prompt has {n} tokens and the model reads {self.context}.")
        least, largest = min(request.prompt), max(request.prompt)
        if least < 0 or largest >= self.vocabulary:
            raise ValueError(
                f"ids run from {least} to {largest} and the model has 0 to {self.vocabulary - 1}."
            )
        biased = max((token for token, _ in request.sampling.logit_bias), default=0)
        if biased >= self.vocabulary:
            raise ValueError(
                f"logit_bias names token {biased} and the model has 0 to {self.vocabulary - 1}."
            )
        if request.max_new_tokens < (request.prompt_logprobs is None):
            raise ValueError(f"max_new_tokens={request.max_new_tokens} should be at least 1.")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(request, name)
            if count is not None and not 0 <= count <= MOST_LOGPROBS:
                raise ValueError(f"{name}={count} should be 0 to {MOST_LOGPROBS}.")

    # What follows runs on the worker thread.

    def _run(self) -> None:
        try:
            with torch.inference_mode(), evaluating(self.model):
                self.batch.warm_up()
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
        for job in list(self._unfinished()):
            self._finish(job, reason, error=self.failure or "")
        self._observe_step()

    def _wait(self) -> bool:
        """Wait for work; False where the engine is to end."""
        with self._condition:
            while not (self._waiting or self._jobs or self._prefill):
                if self._closing is not None:
                    return False
                self._condition.wait()
            return self._closing is None or time.monotonic() < self._closing

    def _turn(self) -> None:
        """End what was cancelled, read a part of the prompts, and make a step of the batch."""
        for job in [job for job in self._unfinished() if job.cancelled]:
            self._finish(job, "cancelled")
        started = time.monotonic()
        prompt_tokens = self._read_prompts()
        between = time.monotonic()
        active, columns = len(self._jobs), self.batch.columns
        bucket = self._step() if self._jobs else 0
        if not self._jobs:
            self._launched = None  # the tokens of requests that have ended
        ended = time.monotonic()
        if bucket:
            self._step_seconds += 0.1 * (ended - started - self._step_seconds)
        self._observe_step(
            bucket=bucket,
            active=active,
            columns=columns,
            prompt_tokens=prompt_tokens,
            prefill_seconds=between - started,
            step_seconds=ended - between,
        )

    def _observe_step(self, **facts: Any) -> None:
        if self._observer is not None:
            nothing = StepFacts(0, 0, len(self._waiting), 0, 0, 0.0, 0.0)
            self._observer.on_step(nothing._replace(**facts))

    def _unfinished(self) -> Iterator[_Job]:
        yield from list(self._jobs.values())
        if self._prefill is not None:
            yield from (job for job in self._prefill.jobs if not job.finished)
        yield from list(self._waiting)

    def _read_prompts(self) -> int:
        """Read prompts, one chunk of tokens or several; returns how many tokens."""
        tokens, idle = 0, True
        while idle:
            tokens += self._read_chunk()
            few = 2 * len(self._jobs) < len(self.batch.rows)
            more = self._prefill is not None or (self._waiting and self.batch.free)
            idle = bool(few and more and tokens < IDLE_CHUNKS * self.batch.prefill_chunk)
        return tokens

    def _read_chunk(self) -> int:
        if self._prefill is None:
            self._prefill = self._begin_prefill()
            if self._prefill is None:
                return 0
        prefill, jobs, numbers = self._prefill
        start, trace = prefill.cache.length, None
        if prefill.at_last_chunk:
            lengths = [len(job.request.prompt) for job in jobs]
            trace = self._pass_trace(jobs, numbers, lengths)
        tokens = prefill.read(None if trace is None else trace.observe)
        for job in jobs:
            if job.request.prompt_logprobs is not None and not job.finished:
                self._score(job, prefill.hidden_TM, start)
        if prefill.done:
            self._enter(self._prefill, trace)
        if prefill.done or all(job.finished for job in jobs):
            self._prefill = None
        return tokens

    def _begin_prefill(self) -> "_Reading | None":
        """Take requests from the queue, as many as one chunk and the free rows hold."""
        jobs: list[_Job] = []
        prompts: list[tuple[int, ...]] = []
        alone = False
        with self._condition:
            while self._waiting and len(jobs) < self.batch.free:
                request = self._waiting[0].request
                alone = alone or self._reads_alone(request)
                new = [] if request.prompt in prompts else [request.prompt]
                lengths = [*map(len, prompts + new)]
                if len(lengths) > 1 and (alone or not self.batch.fits(lengths)):
                    break
                prompts += new
                jobs.append(self._waiting.popleft())
                jobs[-1].started = time.monotonic()
        if not jobs:
            return None
        scored = any(job.request.prompt_logprobs is not None for job in jobs)
        prefill = self.batch.prefill(prompts, scored=scored)
        return _Reading(prefill, jobs, [prompts.index(job.request.prompt) for job in jobs])

    def _reads_alone(self, request: Request) -> bool:
        """Whether no other prompt is read with this one."""
        observed = request.prompt_logprobs is not None or request.trace is not None
        return self.batch.invariant or observed

    def _score(self, job: _Job, hidden_TM: Tensor, start: int) -> None:
        """Log-probabilities of the prompt after each position of a chunk that begins at start."""
        ids, k = job.request.prompt, job.request.prompt_logprobs
        assert k is not None
        if start == 0:
            job.prompt.append(Token(ids[0], ""))
        hidden_TM = hidden_TM[: len(ids) - 1 - start]  # the last position predicts a new token
        for part_TM in torch.split(hidden_TM, max(1, SCORE_ENTRIES // self.vocabulary)):
            at = len(job.prompt)
            targets = ids[at : at + len(part_TM)]
            scores = _scores(self.batch.logits(part_TM), targets, [k] * len(targets))
            job.prompt += [Token(i, "", *score) for i, score in zip(targets, scores, strict=True)]

    def _enter(self, reading: "_Reading", trace: PassTrace | None) -> None:
        """The first token of every prompt that was read; requests that go on join the batch."""
        drawing: list[tuple[_Job, int]] = []
        for job, number in zip(reading.jobs, reading.numbers, strict=True):
            if job.request.max_new_tokens == 0 and not job.finished:
                self._finish(job, "length")
            elif not job.finished:
                drawing.append((job, number))
        if not drawing:
            return
        logits_PV = self.batch.logits(reading.prefill.last_hidden_PM)
        for job, _ in drawing:
            if job.request.sampling.penalised:
                prompt_1V = torch.zeros(1, self.vocabulary, dtype=torch.bool, device=self.device)
                prompt_1V[0, list(job.request.prompt)] = True
                job.penalties = Penalties(job.request.sampling, prompt_1V)
        tokens = self._next_tokens(drawing, logits_PV, trace)
        going_on = [
            (job, number, token)
            for (job, number), token in zip(drawing, tokens, strict=True)
            if token is not None
        ]
        members = []
        for job, number, token in going_on:
            request = job.request
            end = len(request.prompt) + request.max_new_tokens - 1
            members.append(NewRow(number, token, end, request.sampling, request.seed))
        rows = self.batch.join(reading.prefill, members) if members else []
        for (job, _, _), row in zip(going_on, rows, strict=True):
            job.row, self._jobs[row] = row, job

    def _step(self) -> int:
        """A step of the batch; returns how many rows it computed."""
        if self.batch.recorded is not None:
            return self._recorded_step()
        self.batch.fit()
        jobs = [(job, row.index) for row, job in self._jobs.items()]
        trace = self._pass_trace(
            list(self._jobs.values()),
            [row.index for row in self._jobs],
            [row.length + 1 for row in self._jobs],
        )
        logits_BV = self.batch.step(None if trace is None else trace.observe)
        rows = list(self._jobs)
        for row, token in zip(rows, self._next_tokens(jobs, logits_BV, trace), strict=True):
            if token is not None:
                row.token = token
        return len(logits_BV)

    def _recorded_step(self) -> int:
        """The tokens of a step that were drawn on the device; returns how many rows it computed.

        Where nothing else is needed of the step, the next one is launched before its tokens are
        read: the device computes while the host reports. A request that ends by its last token has
        then one token too many, which is dropped.
        """
        launched, self._launched, trace = self._launched, None, None
        if launched is None:
            self.batch.fit()
            active = [(row, job) for row, job in self._jobs.items() if row.length < row.end]
            trace = self._pass_trace(
                [job for _, job in active],
                [row.index for row, _ in active],
                [row.length + 1 for row, _ in active],
            )
            launched = self.batch.launch(None if trace is None else trace.observe)
        ahead = all(_needs_tokens_only(job) for job in self._jobs.values())
        if ahead and any(row.length < row.end for row in self._jobs):
            self._launched = self.batch.launch()
        drawn = launched.tokens.wait().tolist()
        jobs = [(self._jobs[row], i) for row, i in launched.rows if row in self._jobs]
        logits_BV = None if ahead else launched.logits
        tokens = self._next_tokens(jobs, logits_BV, trace, [drawn[i] for _, i in jobs])
        for (job, _), token in zip(jobs, tokens, strict=True):
            if token is not None and job.penalties is not None:
                assert job.row is not None
                job.row.token = token
        return len(drawn)

    def _pass_trace(
        self, jobs: Sequence[_Job], rows: Sequence[int], lengths: Sequence[int]
    ) -> PassTrace | None:
        """The trace of a forward pass in which ``jobs`` have these rows; None where none asks."""
        traced = [
            TracedRow(row, length, job.request.trace)
            for job, row, length in zip(jobs, rows, lengths, strict=True)
            if job.request.trace is not None and job.request.max_new_tokens
        ]
        return PassTrace(self.model, traced, self._calibration) if traced else None

    def _next_tokens(
        self,
        jobs: Sequence[tuple[_Job, int]],
        logits_BV: Tensor | None,
        trace: PassTrace | None,
        drawn: Sequence[int] | None = None,
    ) -> list[int | None]:
        """Draw a token for every request by its row of the logits, and report it.

        None where that ends the request. ``drawn`` are tokens that the device has drawn without
        penalties; where they are all that is needed, there are no logits.
        """
        if logits_BV is None:
            assert drawn is not None
            return [self._take(jobs[i][0], drawn[i], (None, ()), None) for i in range(len(jobs))]
        logits_JV = logits_BV[torch.tensor([row for _, row in jobs], device=self.device)]
        tokens = self._draw([job for job, _ in jobs], logits_JV, drawn)
        scored = [i for i, (job, _) in enumerate(jobs) if job.request.logprobs is not None]
        scores: dict[int, _Score] = {}
        if scored:
            targets = [max(0, tokens[i]) for i in scored]
            counts = [jobs[i][0].request.logprobs or 0 for i in scored]
            scores = dict(zip(scored, _scores(logits_JV[scored], targets, counts), strict=True))
        traces: dict[int, TokenTrace] = {}
        if trace is not None:
            traced = [i for i, (job, _) in enumerate(jobs) if job.request.trace is not None]
            ids_R = torch.tensor([max(0, tokens[i]) for i in traced], device=self.device)
            traces = dict(zip(traced, trace.tokens(logits_JV[traced], ids_R), strict=True))
        return [
            self._take(job, tokens[i], scores.get(i, (None, ())), traces.get(i))
            for i, (job, _) in enumerate(jobs)
        ]

    def _draw(
        self, jobs: Sequence[_Job], logits_JV: Tensor, drawn: Sequence[int] | None
    ) -> list[int]:
        """A token per request, -1 where its logits are not finite.

        Requests with the same settings draw together, each by its own generator. Without penalties
        a token that the device has drawn stands.
        """
        tokens = [0] * len(jobs) if drawn is None else [*drawn]
        together: dict[object, list[int]] = {}
        for i, job in enumerate(jobs):
            if drawn is not None and job.penalties is None:
                continue
            together.setdefault(job.penalties or job.request.sampling, []).append(i)
        for rows in together.values():
            first = jobs[rows[0]]
            token_R = sample_or_mark(
                logits_JV if len(rows) == len(jobs) else logits_JV[rows],
                first.request.sampling,
                penalties=first.penalties,
                generator=[jobs[i].generator for i in rows],
            )
            if first.penalties is not None:
                first.penalties.add(token_R)
            for i, token in zip(rows, token_R.tolist(), strict=True):
                tokens[i] = token
        return tokens

    def _take(self, job: _Job, token: int, score: "_Score", trace: TokenTrace | None) -> int | None:
        """Report a new token of a request; None where it ends the request."""
        request = job.request
        if token < 0:
            self._finish(job, "error", error=NOT_FINITE)
            return None
        job.new_tokens += 1
        job.first_token = job.first_token or time.monotonic()
        new = Token(token, job.text.add(token), *score, trace)
        if token in request.stop_ids or job.text.stopped:
            self._finish(job, "stop", new)
            return None
        full = len(request.prompt) + job.new_tokens > self.context
        if job.new_tokens == request.max_new_tokens or full:
            self._finish(job, "length", new)
            return None
        self._report(job, Update((new,), _prompt(job)))
        return token

    def _finish(self, job: _Job, finish: Finish, *tokens: Token, error: str = "") -> None:
        """Report the end of a request and free what it holds."""
        if job.finished:
            return
        job.finished = True
        if job.row is not None:
            del self._jobs[job.row]
            self.batch.leave(job.row, damaged=finish == "error")
        with self._condition:
            if job in self._waiting:
                self._waiting.remove(job)
        self._report(job, Update(tokens, _prompt(job), finish, error, job.text.flush()))
        if self._observer is not None:
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

    def _report(self, job: _Job, update: Update) -> None:
        try:
            job.on_update(update)
        except Exception:  # a failing receiver must not end the requests of others
            job.cancelled = True


class _Reading(NamedTuple):
    """Prompts that are being read: requests, and the row of each in the prefill."""

    prefill: Prefill
    jobs: list[_Job]
    numbers: list[int]


_Score = tuple[float | None, tuple[tuple[int, float], ...]]
"""The log-probability of a token, and the largest ones with their ids."""


def _scores(logits_TV: Tensor, targets: Sequence[int], counts: Sequence[int]) -> list[_Score]:
    """Per row the log-probability of its target and its ``count`` largest."""
    target_T = torch.tensor(targets, device=logits_TV.device)
    chosen_T, ids_TK, top_TK = log_probabilities(logits_TV, target_T, max(counts, default=0))
    rows = zip(chosen_T.tolist(), ids_TK.tolist(), top_TK.tolist(), counts, strict=True)
    return [(p, tuple(zip(ids[:k], top[:k], strict=True))) for p, ids, top, k in rows]


def _prompt(job: _Job) -> tuple[Token, ...] | None:
    """The scores of the prompt, once: with the first update that comes after the prompt."""
    if job.request.prompt_logprobs is None or job.new_tokens > 1 or not job.prompt:
        return None
    return tuple(job.prompt)


def _needs_tokens_only(job: _Job) -> bool:
    """Whether the tokens that the device draws are all that a request needs of a step."""
    request = job.request
    return job.penalties is None and request.logprobs is None and request.trace is None


def _observed(job: _Job) -> bool:
    """Whether the attention of a request is traced."""
    return job.request.trace is not None and job.request.trace.observes
