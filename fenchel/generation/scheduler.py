"""Requests that decode together: prompts in, tokens and text out.

    submit -> waiting -> reading -> row of the decoder -> tokens, one per step -> finish

``turn`` does a part of the work: it reads a chunk of tokens of prompts and makes one step of all
sequences (generation/decoder.py), so that no sequence waits for more than one chunk. While less
than half of the rows are taken it goes on reading for ``READ_SECONDS`` in all, since steps of a few
rows take nearly as long as those of many. A request that needs no token after its prompt (scores of
a text) never decodes. Whoever calls ``turn`` owns the model: ``generate`` in a loop, a server in a
thread (server/engine.py).

**Order.** Every other chunk is one of the prompt that was begun first, and those in between are of
the prompt with the fewest tokens left; one that waits is begun there if it is less than half as
long. So a short prompt waits for one chunk of long ones, and a long one has every other chunk.
Short prompts that fit into a chunk are read together. The last free row is for the request that
waits longest.

**Draws** depend on the request alone: on its settings, its seed and the position of the token
(generation/sampling.py).

**Ends.** A request ends at a stop id, before a stop string, after ``max_new_tokens``, or when the
context is full; with ``past_context`` the newest half of the context is then read again instead.
A logit that is not finite ends its own request with an error.

**Drafts.** With ``draft`` the next tokens are guessed from earlier text and read along with the
last one, and those after a wrong guess are removed again (generation/prompt_lookup.py). This is
done while the request decodes alone: a step of several rows reads the weights once for all of them.
A recorded step is faster than a pass over a guess.

**Steering.** A request may be steered (generation/steering.py). With a budget per token it has a
second row that is not, which reads the same tokens: its prompt is read first, and the law that a
token is drawn from lies between those of the two rows. A recorded step draws from it on the device.

T tokens of a prompt or of a chunk of it, V vocabulary.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fenchel.data import AnyTokenizer
from fenchel.generation.attention_trace import (
    PassTrace,
    TokenCalibration,
    TokenTrace,
    TracedRow,
    TraceSettings,
)
from fenchel.generation.decoder import Decoder, LaunchedStep, Row
from fenchel.generation.prompt_lookup import DraftControl, PromptLookup
from fenchel.generation.sampling import (
    MOST_LOGPROBS,
    NOT_FINITE,
    Penalties,
    RepeatedDraws,
    RowSampling,
    Sampling,
    draw,
    likeliest,
    log_probabilities,
)
from fenchel.generation.steering import Steering, aim_below, within_budget
from fenchel.generation.text_stream import TextStream

READ_SECONDS = 0.1
"""How long prompts are read between two steps, a chunk at least, while few rows are taken."""
SCORE_ENTRIES = 1 << 22
"""Logits that the scores of a prompt take at once: 16 MiB in float32."""

Finish = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One continuation of one prompt."""

    prompt: tuple[int, ...]
    """Ids, at least one."""
    max_new_tokens: int
    """Tokens at most; 0 only with ``prompt_logprobs``."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    continues: bool = True
    """Whether the text goes on from that of the prompt; an answer in a chat begins anew."""
    logprobs: int | None = None
    """How many of the largest log-probabilities come with a new token; None is none at all."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    trace: TraceSettings | None = None
    """What is measured of the attention of every new token."""
    draft: int = 0
    """Tokens to guess ahead, while guesses pay. Changes the speed, not the text, except in half
    precision where two tokens are nearly as likely."""
    past_context: bool = False
    """Whether a sequence goes on when the context is full. A prompt may then be longer, too: its
    last tokens are read."""
    source: tuple[int, ...] | None = None
    """What the encoder of an encoder-decoder reads."""
    steering: Steering | None = None
    """What is added to its stream."""

    @property
    def budget(self) -> float | None:
        """How far the law of a token may be from the unsteered one, in nats; None is any way."""
        return None if self.steering is None else self.steering.budget

    @property
    def rows(self) -> int:
        """Rows of a decoder that it takes."""
        return 1 if self.budget is None else 2


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
    """What one turn produced for one request."""

    tokens: tuple[Token, ...] = ()
    prompt: tuple[Token, ...] | None = None
    """Once, where ``prompt_logprobs`` is set; the first has no log-probability."""
    finish: Finish | None = None
    error: str = ""
    flush: str = ""
    """Text that was withheld until the end."""


class TurnFacts(NamedTuple):
    """What one turn did."""

    bucket: int = 0
    """Rows that the step computed; 0 without one."""
    active: int = 0
    """Rows that held a request, each with a new token."""
    queued: int = 0
    """Requests that wait."""
    columns: int = 0
    """Tokens of the longest sequence."""
    prompt_tokens: int = 0
    """Tokens of prompts that were read."""
    prefill_seconds: float = 0.0
    step_seconds: float = 0.0


OnUpdate = Callable[[Update], None]


@dataclass(eq=False)
class Job:
    """A request that was accepted."""

    request: Request
    on_update: OnUpdate
    text: TextStream | None
    ids: list[int]
    """Prompt and new tokens."""
    penalties: Penalties | None = None
    row: Row | None = None
    unsteered: Row | None = None
    """A second row that reads the same tokens, for a budget per token."""
    unsteered_law: Tensor | None = None
    """Logits (1, V) of that row after the prompt."""
    lookup: PromptLookup | None = None
    drafts: DraftControl | None = None
    scored: list[Token] = field(default_factory=list)
    cancelled: bool = False
    finished: bool = False
    failed: bool = False
    """Whether its keys may not be finite."""
    limits_on_device: bool = False
    """Whether a recorded step draws from the law within the budget."""
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None

    @property
    def left_queue(self) -> bool:
        """Whether it no longer waits."""
        return self.started is not None or self.finished

    @property
    def new_tokens(self) -> int:
        """How many tokens were drawn."""
        return len(self.ids) - len(self.request.prompt)

    @property
    def is_traced(self) -> bool:
        """Whether its attention is observed."""
        return self.request.trace is not None and self.request.trace.observes

    @property
    def needs_tokens_only(self) -> bool:
        """Whether a step needs to return nothing but the tokens drawn on the device."""
        request = self.request
        asked = request.logprobs is not None or request.trace is not None
        return not asked and not self.drawn_here

    @property
    def drawn_here(self) -> bool:
        """Whether its tokens are drawn from other logits than those of its row."""
        limited = self.request.budget is not None
        return self.penalties is not None or (limited and not self.limits_on_device)


@dataclass(eq=False)
class _Reading:
    """Prompts that are being read: their rows, what is left of each, and the jobs of each row."""

    rows: list[Row]
    parts: list[list[int]]
    jobs: list[list[Job]]
    before: "_Reading | None" = None
    """A reading that waits for this one, which is of unsteered rows of some of its requests."""

    @property
    def left(self) -> int:
        """Tokens that are still to be read."""
        return sum(map(len, self.parts))

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Per row, how many tokens it has and how many it is to read."""
        return [(row.length, len(part)) for row, part in zip(self.rows, self.parts, strict=True)]

    def add(self, row: Row, prompt: Sequence[int], job: Job) -> None:
        """Read what a row does not have of a prompt, for a request."""
        self.rows.append(row)
        self.parts.append([*prompt[row.length :]])
        self.jobs.append([job])

    @property
    def promised(self) -> int:
        """Rows that its requests will need beyond those of the prompts."""
        unfinished = (sum(not job.finished for job in group) for group in self.jobs)
        return sum(max(0, count - 1) for count in unfinished)


class Scheduler:
    """Requests to a decoder; with a ``tokenizer`` tokens have text.

    ``on_finish`` is called after the last update of a request.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: AnyTokenizer | None = None,
        *,
        calibration: TokenCalibration | None = None,
        on_finish: Callable[[Job, Finish], None] | None = None,
    ) -> None:
        self.decoder, self.tokenizer, self.calibration = decoder, tokenizer, calibration
        self.vocabulary, self.device = decoder.model.config.vocabulary, decoder.device
        self.waiting: deque[Job] = deque()
        self.jobs: dict[Row, Job] = {}
        """Those that decode."""
        self._on_finish = on_finish
        self._full: deque[Job] = deque()
        """Those whose newest tokens are to be read again."""
        self._readings: list[_Reading] = []
        """In the order of their beginning."""
        self._shortest = False
        """Whether the last chunk was of the prompt with the fewest tokens left."""
        self._launched: LaunchedStep | None = None
        self._settings: tuple[Sequence[Job], RowSampling, RepeatedDraws] | None = None

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.waiting or self.jobs or self._readings or self._full)

    def unfinished(self) -> Iterator[Job]:
        """Every job that was accepted and has not ended."""
        yield from list(self.jobs.values())
        for reading in list(self._readings):
            yield from (job for jobs in reading.jobs for job in jobs if not job.finished)
        yield from list(self._full)
        yield from list(self.waiting)

    def prepare(self, request: Request, on_update: OnUpdate) -> Job:
        """The job of a request, to be appended to ``waiting``; raises for what cannot be served."""
        request = self._with_emphasis(request)
        self._require(request)
        text = None
        if self.tokenizer is not None:
            before = request.prompt if request.continues else ()
            text = TextStream(self.tokenizer, request.stop_strings, before)
        elif request.stop_strings:
            raise ValueError(f"to stop at {request.stop_strings[0]!r} give the tokenizer.")
        job = Job(request, on_update, text, [*request.prompt])
        job.limits_on_device = self.decoder.kind.recorded and not request.sampling.penalised
        alone = not self.decoder.kind.recorded and not self.decoder.invariant
        alone = alone and not self.decoder.model.config.has_delta  # a state cannot go back
        if request.draft and alone and request.budget is None:
            job.lookup = PromptLookup(request.prompt)
            job.drafts = DraftControl(request.draft)
        return job

    def _with_emphasis(self, request: Request) -> Request:
        """The request with the positions of the words that it emphasises."""
        steering = request.steering
        if steering is None or steering.emphasis is None or not steering.emphasis.texts:
            return request
        if self.tokenizer is None:
            raise ValueError("to emphasise words of a prompt give the tokenizer.")
        emphasis = steering.emphasis.found_in(self.tokenizer, request.prompt)
        return replace(request, steering=replace(steering, emphasis=emphasis))

    def submit(self, request: Request, on_update: OnUpdate) -> Job:
        """Accept a request; ``on_update`` is called in ``turn`` until it has finished."""
        job = self.prepare(request, on_update)
        self.waiting.append(job)
        return job

    def _require(self, request: Request) -> None:
        """Raise for a request that cannot be served."""
        n, V, context = len(request.prompt), self.vocabulary, self.decoder.context
        encoder = self.decoder.model.config.kind == "encoder-decoder"
        if n < 1 or (request.source is not None and not request.source):
            raise ValueError("a prompt has at least one token.")
        if (request.source is None) == encoder:
            kind = self.decoder.model.config.kind
            verb = "needs a" if request.source is None else "has no"
            raise ValueError(f"a model of kind={kind!r} {verb} source.")
        if n > context and not request.past_context:
            raise ValueError(f"the prompt has {n} tokens and the model reads {context}.")
        ids = [*request.prompt, *(request.source or ())]
        if min(ids) < 0 or max(ids) >= V:
            raise ValueError(
                f"ids run from {min(ids)} to {max(ids)} and the model has 0 to {V - 1}."
            )
        biased = max((token for token, _ in request.sampling.logit_bias), default=0)
        if biased >= V:
            raise ValueError(f"logit_bias names token {biased} and the model has 0 to {V - 1}.")
        if request.max_new_tokens < (request.prompt_logprobs is None):
            raise ValueError(f"max_new_tokens={request.max_new_tokens} should be at least 1.")
        self._require_steering(request)
        if request.draft < 0:
            raise ValueError(f"draft={request.draft} should be 0 or more tokens to guess ahead.")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(request, name)
            if count is not None and not 0 <= count <= MOST_LOGPROBS:
                raise ValueError(f"{name}={count} should be 0 to {MOST_LOGPROBS}.")

    def _require_steering(self, request: Request) -> None:
        if request.steering is None:
            return
        request.steering.require(self.decoder.model.config)
        others = set(request.steering.vectors) - self.decoder.steered
        if others and self.decoder.kind.recorded:
            raise ValueError(f"the recorded step adds nothing after layer {min(others)}.")
        if request.rows > len(self.decoder.rows):
            raise ValueError("a budget per token takes a second row, and the decoder has one.")
        if request.steering.changes_attention and request.trace is not None:
            raise ValueError(
                "the attention of a request that changes it (emphasis, heads) is not traced; leave "
                "out one."
            )
        if request.budget is not None and request.prompt_logprobs is not None:
            raise ValueError(
                "the tokens of a prompt have no law within a budget; leave out prompt_logprobs or "
                "the budget."
            )

    @torch.inference_mode()
    def turn(self) -> TurnFacts:
        """End cancelled requests, read a part of the prompts, and run one step."""
        for job in [job for job in self.unfinished() if job.cancelled]:
            self.finish(job, "cancelled")
        started = time.monotonic()
        prompt_tokens = self._read_prompts()
        between = time.monotonic()
        active, columns = len(self.jobs), self.decoder.columns
        bucket = self._step() if self.jobs else 0
        if not self.jobs:
            self._launched = self._settings = None  # of requests that have ended
        ended = time.monotonic()
        return TurnFacts(
            bucket,
            active,
            len(self.waiting),
            columns,
            prompt_tokens,
            between - started,
            ended - between,
        )

    # Prompts

    def _read_prompts(self) -> int:
        """Read prompts, one chunk of tokens or several; returns how many tokens."""
        tokens, started = 0, time.monotonic()
        while read := self._read_chunk():
            tokens += read
            few = 2 * len(self.jobs) < len(self.decoder.rows)
            if not few or time.monotonic() - started >= READ_SECONDS:
                break
        return tokens

    def _read_chunk(self) -> int:
        """Read a chunk of the prompts whose turn it is; returns how many tokens."""
        reading = self._next_reading()
        if reading is None:
            return 0
        decoder, trace = self.decoder, None
        jobs = [job for group in reading.jobs for job in group]
        now = [part[: decoder.chunk] if len(reading.parts) == 1 else part for part in reading.parts]
        last = len(now[0]) == len(reading.parts[0])
        if last and reading.before is None:
            numbers = [i for i, group in enumerate(reading.jobs) for _ in group]
            lengths = [reading.rows[i].length + len(now[i]) for i in numbers]
            trace = self._pass_trace(jobs, numbers, lengths)
        scored = any(job.request.prompt_logprobs is not None for job in jobs)
        start, every = reading.rows[0].length, scored or (decoder.invariant and len(now) == 1)
        observe = None if trace is None else trace.observe
        hidden = decoder.read(reading.rows, now, every=every, observe=observe)
        reading.parts = [part[len(new) :] for part, new in zip(reading.parts, now, strict=True)]
        for job in jobs if scored else ():
            if job.request.prompt_logprobs is not None and not job.finished:
                self._score(job, hidden, start)
        if not last and not all(job.finished for job in jobs):
            return sum(map(len, now))
        at = self._readings.index(reading)
        self._readings.pop(at)
        if reading.before is None:
            if last:
                self._enter(reading, hidden[-1:] if every else hidden, trace)
            else:
                self._drop(reading)
        else:
            laws = torch.split(decoder.logits(hidden[-1:] if every else hidden), 1)
            for job, row, law_1V in zip(jobs, reading.rows, laws, strict=True):
                if job.finished:
                    decoder.leave(row, row.ids, damaged=job.failed)
                else:
                    job.unsteered, job.unsteered_law = row, law_1V
            self._readings.insert(at, reading.before)
        return sum(map(len, now))

    def _next_reading(self) -> _Reading | None:
        """The prompts whose next chunk is to be read."""
        if not (self._full or self._readings or self.waiting):
            return None
        while self._full:
            job = self._full.popleft()
            row, job.row = job.row, None  # the reading has it until the request decodes again
            assert row is not None
            reading = _Reading([row], [self.decoder.slide(row, job.ids)], [[job]])
            if job.unsteered is not None:
                row, job.unsteered = job.unsteered, None
                part = self.decoder.slide(row, job.ids)
                reading = _Reading([row], [part], [[job]], reading)
            self._readings.append(reading)
        self._shortest = not self._shortest
        waiting, readings = list(self.waiting), self._readings
        free = self.decoder.free - sum(reading.promised for reading in readings)
        if not readings:
            return self._begin(waiting, free)
        if not self._shortest:
            return readings[0]
        shortest = min(readings, key=lambda reading: reading.left)
        if free > 1:  # the last one is for the first of the queue
            waiting.sort(key=lambda job: len(job.ids))
            free -= 1
        # One that is nearly as long may share its beginning, which is then not read twice.
        if waiting and 2 * len(waiting[0].ids) < shortest.left:
            return self._begin(waiting, free) or shortest
        return shortest

    def _begin(self, queue: Sequence[Job], free: int) -> _Reading | None:
        """Take requests from the queue, as many as one chunk and the free rows hold."""
        decoder, reading, alone, count = self.decoder, _Reading([], [], []), False, 0
        unsteered: _Reading | None = None
        for job in queue:
            request = job.request
            if count + request.rows > free:
                break
            limited = request.budget is not None
            if reading.rows and limited != (unsteered is not None):
                break
            prompt = job.ids[-decoder.context :]
            same = [jobs for jobs in reading.jobs if _shares_row(jobs[0].request, request)]
            alone = alone or self._reads_alone(request)
            if same:
                same[0].append(job)
            else:
                reuse = request.prompt_logprobs is None
                known = decoder.reusable(prompt, request.steering) if reuse else 0
                sizes = [*reading.sizes, (known, len(prompt) - known)]
                if reading.rows and (alone or not decoder.fits(sizes)):
                    break
                row = decoder.take(prompt, reuse=reuse, steering=request.steering)
                row.left = len(job.ids) - len(prompt)
                reading.add(row, prompt, job)
                if request.source is not None:
                    decoder.encode(row, request.source)
                if limited:
                    plain = decoder.take(prompt)
                    plain.left, plain.encoded = row.left, row.encoded
                    size = plain.length, len(prompt) - plain.length
                    if unsteered is None or not decoder.fits([*unsteered.sizes, size]):
                        unsteered = _Reading([], [], [], unsteered or reading)
                    unsteered.add(plain, prompt, job)
            self.waiting.remove(job)
            job.started, count = time.monotonic(), count + request.rows
        if not reading.rows:
            return None
        reading = unsteered or reading
        self._readings.append(reading)
        return reading

    def _reads_alone(self, request: Request) -> bool:
        """Whether no other prompt is read with this one."""
        observed = request.prompt_logprobs is not None or request.trace is not None
        return self.decoder.invariant or observed or request.source is not None

    def _drop(self, reading: _Reading) -> None:
        """Free the rows of prompts that are not needed any more."""
        for row, group in zip(reading.rows, reading.jobs, strict=True):
            if row not in self.jobs and all(job.row is not row for job in group):
                failed = any(job.failed for job in group)
                self.decoder.leave(row, row.ids, damaged=failed)

    def _score(self, job: Job, hidden_TM: Tensor, start: int) -> None:
        """Log-probabilities of the prompt after each position of a chunk that begins at start."""
        ids, k = job.request.prompt, job.request.prompt_logprobs
        assert k is not None
        if start == 0:
            job.scored.append(Token(ids[0], ""))
        hidden_TM = hidden_TM[: len(ids) - 1 - start]  # the last position predicts a new token
        for part_TM in torch.split(hidden_TM, max(1, SCORE_ENTRIES // self.vocabulary)):
            at = len(job.scored)
            targets = ids[at : at + len(part_TM)]
            scores = _scores(self.decoder.logits(part_TM), targets, [k] * len(targets))
            job.scored += [Token(i, "", *score) for i, score in zip(targets, scores, strict=True)]

    def _enter(self, reading: _Reading, hidden_PM: Tensor, trace: PassTrace | None) -> None:
        """The next token of every prompt that was read; requests that go on decode."""
        drawing: list[tuple[Job, int]] = []
        for number, group in enumerate(reading.jobs):
            for job in group:
                if job.request.max_new_tokens == 0 and not job.finished:
                    self.finish(job, "length")
                elif not job.finished:
                    drawing.append((job, number))
        if drawing:
            logits_PV = self.decoder.logits(hidden_PM)
            for job, _ in drawing:
                if job.request.sampling.penalised and job.penalties is None:
                    shape = (1, self.vocabulary)
                    prompt_1V = torch.zeros(shape, dtype=torch.bool, device=self.device)
                    prompt_1V[0, list(job.request.prompt)] = True
                    job.penalties = Penalties(job.request.sampling, prompt_1V)
            tokens = self._next_tokens(drawing, logits_PV, trace)
            taken: set[Row] = set()
            for (job, number), token in zip(drawing, tokens, strict=True):
                row = reading.rows[number]
                if token is not None:
                    # The first request decodes in the row of the prompt, others in copies.
                    self._join(job, self.decoder.copy(row) if row in taken else row, token)
                    taken.add(row)
        self._drop(reading)

    def _join(self, job: Job, row: Row, token: int) -> None:
        """Let a request decode in a row that has its prompt."""
        request = job.request
        row.token, row.sampling, row.seed = token, request.sampling, request.seed
        # A token after the last one is drawn and not read.
        most = len(request.prompt) + request.max_new_tokens - 1 - row.left
        row.end = min(most, self.decoder.context)
        job.row, self.jobs[row] = row, job
        if job.unsteered is not None:
            job.unsteered.token, job.unsteered.end = token, row.end
            row.prior = job.unsteered if job.limits_on_device else None
        self.decoder.arrived()
        self._continue(job, token)

    def _continue(self, job: Job, token: int | None) -> None:
        """The next token of a request is to be read; None has ended the request.

        Where its row is full it waits until its newest tokens are read again.
        """
        row = job.row
        if token is None or row is None:
            return
        if len(job.ids) - row.left > self.decoder.context:
            del self.jobs[row]
            row.token = token = None
            self._full.append(job)
        if token is None or not self.decoder.kind.recorded or job.drawn_here:
            for one in (row, job.unsteered):
                if one is not None:
                    one.token = token

    # Steps

    def _step(self) -> int:
        """A step of all sequences; returns how many rows it computed."""
        if self.decoder.kind.recorded:
            return self._recorded_step()
        if len(self.jobs) == 1 and self._step_with_draft():
            return 1
        trace = self._step_trace(self.jobs)
        logits_BV = self.decoder.step(None if trace is None else trace.observe)
        jobs = [(job, row.index) for row, job in self.jobs.items()]
        tokens = self._next_tokens(jobs, logits_BV, trace)
        for (job, _), token in zip(jobs, tokens, strict=True):
            self._continue(job, token)
        return len(logits_BV)

    def _step_with_draft(self) -> bool:
        """Read a guess of the next tokens of the only sequence; False where there is none."""
        (row, job), decoder = next(iter(self.jobs.items())), self.decoder
        if job.lookup is None or job.drafts is None or job.request.trace is not None:
            return False
        left = job.request.max_new_tokens - job.new_tokens
        most = min(job.request.draft, left - 1, decoder.context - row.length - 1)
        if most < 1 or not job.drafts.ready():
            return False
        guess = job.lookup.guess(most)
        if not guess:
            return False
        assert row.token is not None
        before = row.length
        logits_TV = decoder.logits(decoder.read([row], [[row.token, *guess]], every=True))
        accepted, token = 0, None
        for logits_V in logits_TV:
            (token,) = self._next_tokens([(job, 0)], logits_V.unsqueeze(0), None)
            if token is None or accepted == len(guess) or token != guess[accepted]:
                break
            accepted += 1
        job.drafts.record(accepted)
        if token is not None:
            decoder.rewind(row, before + 1 + accepted)
        self._continue(job, token)
        return True

    def _recorded_step(self) -> int:
        """The tokens of a step that were drawn on the device; returns how many rows it computed.

        Where nothing else is needed of the step, the next one is launched before its tokens are
        read: the device computes while the host reports. A request that ends by its last token has
        then one token too many, which is dropped.
        """
        launched, self._launched, trace = self._launched, None, None
        if launched is None:
            decoding = {row: job for row, job in self.jobs.items() if row.length < row.end}
            trace = self._step_trace(decoding)
            launched = self.decoder.launch(None if trace is None else trace.observe)
        ahead = all(job.needs_tokens_only for job in self.jobs.values())
        if ahead and any(row.length < row.end for row in self.jobs):
            self._launched = self.decoder.launch()
        drawn = launched.tokens.wait().tolist()
        jobs = [(self.jobs[row], i) for row, i in launched.rows if row in self.jobs]
        logits_BV = None if ahead else launched.logits
        tokens = self._next_tokens(jobs, logits_BV, trace, [drawn[i] for _, i in jobs])
        for (job, _), token in zip(jobs, tokens, strict=True):
            self._continue(job, token)
        return len(drawn)

    def _step_trace(self, jobs: Mapping[Row, Job]) -> PassTrace | None:
        """The trace of the next step of these sequences; None where none asks."""
        if all(job.request.trace is None for job in jobs.values()):
            return None
        bucket = self.decoder.fit()
        rows, lengths = [row.index for row in jobs], [row.length + 1 for row in jobs]
        return self._pass_trace([*jobs.values()], rows, lengths, bucket)

    def _pass_trace(
        self, jobs: Sequence[Job], rows: Sequence[int], lengths: Sequence[int], bucket: int = 0
    ) -> PassTrace | None:
        """The trace of a forward pass in which ``jobs`` have these rows; None where none asks.

        ``bucket`` is the number of rows of a step, 0 for a prompt.
        """
        traced = [
            TracedRow(row, length, job.request.trace)
            for job, row, length in zip(jobs, rows, lengths, strict=True)
            if job.request.trace is not None and job.request.max_new_tokens
        ]
        if not traced:
            return None
        positions = self.decoder.view(bucket).key_positions if bucket else None
        return PassTrace(
            self.decoder.model,
            traced,
            self.calibration,
            key_positions=positions,
            invariant=self.decoder.invariant,
        )

    def _next_tokens(
        self,
        jobs: Sequence[tuple[Job, int]],
        logits_BV: Tensor | None,
        trace: PassTrace | None,
        drawn: Sequence[int] | None = None,
    ) -> list[int | None]:
        """Draw a token for every request by its row of the logits, and report it.

        None where that ends the request. ``drawn`` holds the tokens already drawn on the device,
        without penalties; ``logits_BV`` is None where they are all that is needed.
        """
        if logits_BV is None:
            assert drawn is not None
            return [self._take(jobs[i][0], drawn[i], (None, ()), None) for i in range(len(jobs))]
        logits_JV = logits_BV
        if [row for _, row in jobs] != list(range(len(logits_BV))):
            logits_JV = logits_BV[torch.tensor([row for _, row in jobs], device=self.device)]
        limited = [
            (i, job)
            for i, (job, _) in enumerate(jobs)
            if job.request.budget is not None and (drawn is None or not job.needs_tokens_only)
        ]
        if limited:
            logits_JV = self._within_budgets(limited, logits_JV, logits_BV)
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

    def _within_budgets(
        self, limited: Sequence[tuple[int, Job]], logits_JV: Tensor, logits_BV: Tensor
    ) -> Tensor:
        """The laws of some requests, by their numbers, between those of their two rows."""
        unsteered = []
        for _, job in limited:
            law_1V, job.unsteered_law = job.unsteered_law, None  # of a prompt that was just read
            if law_1V is None:
                assert job.unsteered is not None
                law_1V = logits_BV[job.unsteered.index].unsqueeze(0)
            unsteered.append(law_1V)
        numbers = [i for i, _ in limited]
        kappa = aim_below(torch.tensor([job.request.budget for _, job in limited]))
        laws = within_budget(logits_JV[numbers], torch.cat(unsteered), kappa.to(self.device))
        number_L = torch.tensor(numbers, device=self.device)
        return logits_JV.to(laws.dtype).index_copy(0, number_L, laws)

    def _draw(
        self, jobs: Sequence[Job], logits_JV: Tensor, drawn: Sequence[int] | None
    ) -> list[int]:
        """A token per request, -1 where its logits are not finite.

        A token that the device has drawn stands where it drew from these logits.
        """
        if drawn is not None:
            again = [i for i, job in enumerate(jobs) if job.drawn_here]
            tokens = [*drawn]
            if again:
                redrawn = self._draw([jobs[i] for i in again], logits_JV[again], None)
                for i, token in zip(again, redrawn, strict=True):
                    tokens[i] = token
            return tokens
        if any(job.penalties is not None for job in jobs):
            rows = [
                logits_1V if job.penalties is None else job.penalties.apply(logits_1V)
                for job, logits_1V in zip(jobs, torch.split(logits_JV, 1), strict=True)
            ]
            logits_JV = torch.cat([row.float() for row in rows])
        if not logits_JV.is_cuda and all(job.request.sampling.temperature == 0.0 for job in jobs):
            tokens = likeliest(logits_JV)
        else:
            tokens = self._drawn(jobs, logits_JV)
        for job, token in zip(jobs, tokens, strict=True):
            if job.penalties is not None:
                job.penalties.add(torch.tensor([token], device=self.device))
        return tokens

    def _drawn(self, jobs: Sequence[Job], logits_JV: Tensor) -> list[int]:
        if self._settings is None or self._settings[0] != jobs:
            rows = RowSampling.of([(job.request.sampling, job.request.seed) for job in jobs])
            moved = RowSampling(*(x.to(self.device) for x in rows))
            self._settings = jobs, moved, RepeatedDraws(rows)
        n_J = torch.tensor([len(job.ids) for job in jobs], device=self.device)
        _, settings, repeated = self._settings
        tokens: list[int] = draw(logits_JV, settings, n_J, repeated).tolist()
        return tokens

    def _take(self, job: Job, token: int, score: "_Score", trace: TokenTrace | None) -> int | None:
        """Report a new token of a request; None where it ends the request."""
        request = job.request
        if token < 0:
            self.finish(job, "error", error=NOT_FINITE)
            return None
        job.ids.append(token)
        job.first_token = job.first_token or time.monotonic()
        new = Token(token, "" if job.text is None else job.text.add(token), *score, trace)
        if job.lookup is not None:
            job.lookup.add([token])
        if token in request.stop_ids or (job.text is not None and job.text.stopped):
            self.finish(job, "stop", new)
            return None
        full = len(job.ids) > self.decoder.context and not request.past_context
        if job.new_tokens >= request.max_new_tokens or full:
            self.finish(job, "length", new)
            return None
        self._report(job, Update((new,), _prompt(job)))
        return token

    def finish(self, job: Job, finish: Finish, *tokens: Token, error: str = "") -> None:
        """Report the end of a request and free what it holds."""
        if job.finished:
            return
        job.finished, job.failed = True, finish == "error"
        if job.row is not None:
            self.jobs.pop(job.row, None)
            self.decoder.leave(job.row, job.ids, damaged=job.failed)
            job.row = None
        if job.unsteered is not None:
            self.decoder.leave(job.unsteered, job.ids, damaged=job.failed)
            job.unsteered = None
        for queue in (self.waiting, self._full):
            if job in queue:
                queue.remove(job)
        flush = "" if job.text is None else job.text.flush()
        self._report(job, Update(tokens, _prompt(job), finish, error, flush))
        if self._on_finish is not None:
            self._on_finish(job, finish)

    def _report(self, job: Job, update: Update) -> None:
        try:
            job.on_update(update)
        except Exception:  # a failing receiver must not end the requests of others
            job.cancelled = True


def _shares_row(first: Request, other: Request) -> bool:
    """Whether two requests decode from the prompt that one row has read."""
    keys = [r.steering and r.steering.key for r in (first, other)]
    own = any(r.source is not None or r.budget is not None for r in (first, other))
    return first.prompt == other.prompt and keys[0] == keys[1] and not own


_Score = tuple[float | None, tuple[tuple[int, float], ...]]
"""The log-probability of a token, and the largest ones with their ids."""


def _scores(logits_TV: Tensor, targets: Sequence[int], counts: Sequence[int]) -> list[_Score]:
    """Per row the log-probability of its target and its ``count`` largest."""
    target_T = torch.tensor(targets, device=logits_TV.device)
    chosen_T, ids_TK, top_TK = log_probabilities(logits_TV, target_T, max(counts, default=0))
    rows = zip(chosen_T.tolist(), ids_TK.tolist(), top_TK.tolist(), counts, strict=True)
    return [(p, tuple(zip(ids[:k], top[:k], strict=True))) for p, ids, top, k in rows]


def _prompt(job: Job) -> tuple[Token, ...] | None:
    """The scores of the prompt, once: with the first update that comes after the prompt."""
    if job.request.prompt_logprobs is None or job.new_tokens > 1 or not job.scored:
        return None
    return tuple(job.scored)
