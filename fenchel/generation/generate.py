"""Prompt ids to longer ids, and to text: ``generate``, ``stream`` and ``stream_text``.

Each call is a request per prompt to a decoder of its own (generation/scheduler.py), so that all
that a served request can have, a call can have too. A ``Decoder`` that is passed in stays: the
beginning that a prompt shares with what it has read is not read again, as in a chat.

    row 0 draws by ``seed``, row j by ``choice_seed(seed, j, 0)``

as choice 0 of prompt j of a served call does. Without a seed one is drawn from ``generator``, or
from torch's own.

B sequences, T positions of the prompt, N new tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Required, TypedDict, Unpack, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fenchel.data import AnyTokenizer, TextTokenizer
from fenchel.generation.attention_trace import TokenCalibration, TraceSettings
from fenchel.generation.decoder import Decoder
from fenchel.generation.kv_cache import CacheKind
from fenchel.generation.sampling import Sampling, choice_seed
from fenchel.generation.scheduler import Request, Scheduler, Token, Update
from fenchel.generation.steering import Steering
from fenchel.model import ModelConfig, Transformer, evaluating

CHUNK = 4096
"""Tokens of prompts that are read at once where no other sequence waits."""
INVARIANT_ROWS = 32
"""Rows of an invariant step, as in a server: the same bits in both."""


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How many tokens to generate, how to draw them, and by which means."""

    max_new_tokens: int
    """Tokens to add to each sequence at most."""
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[int | str] = ()
    """Ids and strings at which a sequence ends; strings need a tokenizer."""
    seed: int | None = None
    """The same seed draws the same numbers on every device and in every batch; None draws one."""
    cache: CacheKind = "model"
    """What keys and values are stored in."""
    draft: int = 0
    """Tokens to guess ahead while a sequence decodes alone and guesses pay. Changes the speed, not
    the text, except in half precision where two tokens are nearly as likely."""
    step: str = "auto"
    """The kind of step (generation/steps.py). A recorded or packed one rounds differently."""
    invariant: bool = False
    """Whether the bits of a sequence must not depend on the other sequences."""
    past_context: bool = True
    """Whether to go on when the context is full, with its newest half; else a sequence ends."""
    logprobs: int | None = None
    """How many of the largest log-probabilities come with a new token; None is none at all."""
    trace: TraceSettings | None = None
    """What is measured of the attention of every new token."""
    steering: Steering | None = None
    """What is added to the streams, and how far the law of a token may move by it."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} should not be negative.")

    def decoder(self, model: Transformer, *, rows: int = 1, longest: int | None = None) -> Decoder:
        """A decoder for these settings and ``rows`` sequences of up to ``longest`` tokens."""
        if self.steering is not None and self.steering.budget is not None:
            rows *= 2  # an unsteered one beside each
        recorded_rows = row_bucket(rows) if model.lm_head_weight.is_cuda else rows
        return Decoder(
            model,
            rows=max(rows, INVARIANT_ROWS) if self.invariant else recorded_rows,
            cache=self.cache,
            invariant=self.invariant,
            step=self.step,
            # An invariant step is that of a server, whatever the number of tokens.
            tokens=None if self.invariant else self.max_new_tokens * rows,
            positions=longest,
            chunk=None if self.invariant else CHUNK,
            slack=self.draft,
            steered=() if self.steering is None else self.steering.vectors,
            one_bucket=model.lm_head_weight.is_cuda,
        )

    def request(
        self, prompt: Sequence[int], number: int = 0, source: Sequence[int] | None = None
    ) -> Request:
        """The request for prompt ``number`` of a call."""
        seed = self.seed if self.seed is not None else int(torch.randint(2**62, ()))
        return Request(
            prompt=tuple(prompt),
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            seed=choice_seed(seed, number, 0),
            stop_ids=frozenset(stop for stop in self.stop if not isinstance(stop, str)),
            stop_strings=tuple(stop for stop in self.stop if isinstance(stop, str)),
            logprobs=self.logprobs,
            trace=self.trace,
            draft=self.draft,
            past_context=self.past_context,
            source=None if source is None else tuple(source),
            steering=self.steering,
        )


class GenerateKeywords(TypedDict, total=False):
    """The keywords of ``generate``, for its overloads."""

    max_new_tokens: Required[int]
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    cache: CacheKind
    draft: int
    step: str
    invariant: bool
    stop: Sequence[int | str]
    tokenizer: AnyTokenizer | None
    source: Tensor | Sequence[Tensor | Sequence[int]] | None
    generator: torch.Generator | None
    steer: Steering | None


@overload
def generate(model: Transformer, ids: Tensor, **keywords: Unpack[GenerateKeywords]) -> Tensor: ...
@overload
def generate(
    model: Transformer, ids: Sequence[Tensor | Sequence[int]], **keywords: Unpack[GenerateKeywords]
) -> list[Tensor]: ...
def generate(
    model: Transformer,
    ids: Tensor | Sequence[Tensor | Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] = MappingProxyType({}),
    seed: int | None = None,
    cache: CacheKind = "model",
    draft: int = 0,
    step: str = "auto",
    invariant: bool = False,
    stop: Sequence[int | str] = (),
    tokenizer: AnyTokenizer | None = None,
    source: Tensor | Sequence[Tensor | Sequence[int]] | None = None,
    generator: torch.Generator | None = None,
    steer: Steering | None = None,
) -> Tensor | list[Tensor]:
    """Prompts with their continuations, up to ``max_new_tokens`` each.

    Prompts (B, T) give (B, T + N): a sequence that has stopped repeats its last token until all
    have. A list of prompts (T_b,) of any lengths, tensors or lists of ids, gives a list, each as
    long as it became.

    ``temperature`` 0 is greedy; ``top_k``, ``top_p``, ``min_p``, the penalties and ``logit_bias``
    as in ``Sampling``. ``stop`` lists ids, and strings if the ``tokenizer`` is given; the token
    that completes a stop is part of the result. ``seed``, ``cache``, ``draft``, ``step`` and
    ``invariant`` as in ``GenerationSettings``. ``source`` is the input of the encoder, in the same
    two forms as the prompts. Without a ``seed`` one is drawn from ``generator``. ``steer`` is added
    to the streams (generation/steering.py, docs/steer.md).

    >>> from fenchel.model import ModelConfig
    >>> model = Transformer(ModelConfig(vocabulary=10, width=8, layers=1, heads=2))
    >>> generate(model, torch.tensor([[1, 2, 3]]), max_new_tokens=4, temperature=0.0).shape
    torch.Size([1, 7])
    """
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=tuple(logit_bias.items()),
    )
    settings = GenerationSettings(
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=stop,
        seed=seed,
        cache=cache,
        draft=draft,
        step=step,
        invariant=invariant,
        steering=steer,
    )
    ids = _tensors(ids)
    rows = _rows(ids)
    new: list[list[int]] = [[] for _ in rows]
    for number, token in _tokens(model, rows, settings, tokenizer, _sources(source), generator):
        new[number].append(token.id)
    if not isinstance(ids, Tensor):
        return [torch.cat([row, row.new_tensor(add)]) for row, add in zip(ids, new, strict=True)]
    N = max(map(len, new))
    filled = [row + row[-1:] * (N - len(row)) for row in new]
    return torch.cat([ids, ids.new_tensor(filled).view(len(rows), N)], dim=-1)


def stream(
    model: Transformer,
    ids: Tensor | Sequence[Tensor | Sequence[int]],
    settings: GenerationSettings,
    *,
    tokenizer: AnyTokenizer | None = None,
    source: Tensor | Sequence[Tensor | Sequence[int]] | None = None,
    decoder: Decoder | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """The new tokens as they are drawn, (B,) each; a sequence that has stopped repeats its last.

    Arguments as in ``generate`` and ``stream_text``.

    >>> from fenchel.model import ModelConfig
    >>> model = Transformer(ModelConfig(vocabulary=10, width=8, layers=1, heads=2))
    >>> tokens = stream(model, torch.tensor([[1, 2]]), GenerationSettings(max_new_tokens=3))
    >>> len(list(tokens))
    3
    """
    ids = _tensors(ids)
    rows = _rows(ids)
    tokens = _tokens(model, rows, settings, tokenizer, _sources(source), generator, decoder)
    like = ids if isinstance(ids, Tensor) else ids[0]
    return _together(tokens, len(rows), like)


def _together(tokens: Iterator[tuple[int, Token]], rows: int, like: Tensor) -> Iterator[Tensor]:
    """Tokens of several rows, which need not come in turn, as one tensor per position."""
    new: list[list[int]] = [[] for _ in range(rows)]
    given = 0

    def at(n: int) -> Tensor:
        return like.new_tensor([row[min(n, len(row) - 1)] for row in new])

    for number, token in tokens:
        new[number].append(token.id)
        while min(map(len, new)) > given:
            yield at(given)
            given += 1
    while given < max(map(len, new)):
        yield at(given)
        given += 1


def stream_text(
    model: Transformer,
    tokenizer: AnyTokenizer,
    ids: Tensor,
    settings: GenerationSettings,
    *,
    source: Tensor | None = None,
    decoder: Decoder | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[str]:
    """The continuation of one prompt (T,) as pieces of text, up to a stop string.

    A piece never contains part of a stop string or of a character; joined, the pieces are what the
    new tokens add to the text of the prompt, cut where the stop string begins. With a ``decoder``
    the beginning that a prompt shares with the text of the call before it is not read again.
    """
    read = None if source is None else source.tolist()
    request = _with_seed(settings, generator).request(ids.tolist(), source=read)
    found = updates(model, [request], settings, tokenizer=tokenizer, decoder=decoder)

    def pieces() -> Iterator[str]:
        for update in found:
            _raise(update)
            yield "".join(token.text for token in update.tokens) + update.flush

    return pieces()


def updates(
    model: Transformer,
    requests: Sequence[Request],
    settings: GenerationSettings,
    *,
    tokenizer: AnyTokenizer | None = None,
    decoder: Decoder | None = None,
    calibration: TokenCalibration | None = None,
) -> Iterator[Update]:
    """The updates of all requests in the order in which they arise."""
    pairs = _updates(model, requests, settings, tokenizer, decoder, calibration)
    return (update for _, update in pairs)


def _updates(
    model: Transformer,
    requests: Sequence[Request],
    settings: GenerationSettings,
    tokenizer: AnyTokenizer | None,
    decoder: Decoder | None = None,
    calibration: TokenCalibration | None = None,
) -> Iterator[tuple[int, Update]]:
    """The updates of requests and their numbers, until all have ended or the caller stops.

    What is wrong with a request is raised here, before anything is read.
    """
    if not requests:
        return iter(())
    new: list[tuple[int, Update]] = []

    def receiver(number: int) -> Callable[[Update], None]:
        return lambda update: new.append((number, update))

    longest = max(len(request.prompt) for request in requests) + settings.max_new_tokens
    own = decoder or _take_decoder(model, settings, len(requests), longest)
    scheduler = Scheduler(own, tokenizer, calibration=calibration)
    jobs = [scheduler.prepare(r, receiver(i)) for i, r in enumerate(requests)]

    def run() -> Iterator[tuple[int, Update]]:
        scheduler.waiting.extend(jobs)
        with evaluating(model):
            try:
                while scheduler.busy:
                    try:
                        scheduler.turn()
                    except BaseException:
                        own.forget()  # a pass was cut off
                        raise
                    ready, new[:] = [*new], []
                    yield from ready
            finally:  # closed early, or interrupted: rows are free for the next call
                for job in [*scheduler.unfinished()]:
                    scheduler.finish(job, "cancelled")
                if decoder is None:
                    _give_back(model, settings, len(requests), longest, own)

    return run()


def _tokens(
    model: Transformer,
    rows: Sequence[Sequence[int]],
    settings: GenerationSettings,
    tokenizer: AnyTokenizer | None,
    sources: Sequence[Sequence[int]] | None,
    generator: torch.Generator | None,
    decoder: Decoder | None = None,
) -> Iterator[tuple[int, Token]]:
    """New tokens and the numbers of their prompts."""
    settings = _with_seed(settings, generator)
    if sources is not None and len(sources) != len(rows):
        raise ValueError(f"{len(rows)} prompts have {len(sources)} sources.")
    requests = [
        settings.request(row, i, None if sources is None else sources[i])
        for i, row in enumerate(rows)
    ]
    texts = settings.steering is not None and settings.steering.emphasis is not None
    texts = texts or any(isinstance(stop, str) for stop in settings.stop)
    needed = tokenizer if texts else None
    if not settings.max_new_tokens:
        return iter(())
    pairs = _updates(model, requests, settings, needed, decoder)

    def tokens() -> Iterator[tuple[int, Token]]:
        for number, update in pairs:
            _raise(update)
            yield from ((number, token) for token in update.tokens)

    return tokens()


def _raise(update: Update) -> None:
    if update.finish == "error":
        raise ValueError(update.error)


def _with_seed(
    settings: GenerationSettings, generator: torch.Generator | None
) -> GenerationSettings:
    if settings.seed is not None:
        return settings
    device = "cpu" if generator is None else generator.device
    drawn = torch.randint(2**62, (), generator=generator, device=device)
    return replace(settings, seed=int(drawn))


def _tensors(prompts: Tensor | Sequence[Tensor | Sequence[int]]) -> Tensor | Sequence[Tensor]:
    if isinstance(prompts, Tensor):
        return prompts
    if isinstance(prompts, str) or any(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("prompts are ids: encode a text by its tokenizer first.")
    return [torch.as_tensor(prompt) for prompt in prompts]


def _rows(prompts: Tensor | Sequence[Tensor]) -> list[list[int]]:
    """The ids of every prompt; raises for one without tokens."""
    if isinstance(prompts, Tensor):
        if prompts.ndim != 2 or prompts.shape[1] < 1:
            raise ValueError(
                f"ids should be (B, T) with T at least 1, got {tuple(prompts.shape)}; "
                "prompts of different lengths go in a list."
            )
        return prompts.tolist()
    shapes = [tuple(prompt.shape) for prompt in prompts]
    if not shapes or any(len(shape) != 1 or shape[0] < 1 for shape in shapes):
        raise ValueError(f"a list of prompts needs ids (T,) with T at least 1, got {shapes}.")
    return [prompt.tolist() for prompt in prompts]


def _sources(source: Tensor | Sequence[Tensor | Sequence[int]] | None) -> list[list[int]] | None:
    return None if source is None else _rows(_tensors(source))


BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
"""Rows of recorded steps, so that a few recordings serve all batches."""


def row_bucket(rows: int) -> int:
    """The rows of the recording that serves so many sequences.

    >>> [row_bucket(rows) for rows in (1, 5, 9, 30, 33, 100, 128, 200)]
    [1, 8, 16, 32, 48, 112, 128, 200]
    """
    return next((bucket for bucket in BUCKETS if bucket >= rows), rows)


_pool: WeakKeyDictionary[Transformer, tuple[object, Decoder]] = WeakKeyDictionary()
"""A decoder with a fused step per model, since recording takes as long as a dozen tokens. It serves
a call with the same weights in the same memory (their values may change), the same bucket of rows,
the same number of positions and the same kind of cache. One call at a time has it."""


def _pool_key(model: Transformer, settings: GenerationSettings, rows: int, longest: int) -> object:
    """What a recorded step depends on."""
    positions = min(longest, model.config.context)
    weights = tuple(p.data_ptr() for p in model.parameters())
    steered: tuple[object, ...] = ()
    if settings.steering is not None:
        steered = *sorted(settings.steering.vectors), settings.steering.budget is None
    how = settings.cache, settings.step, settings.invariant, steered
    return model.config, row_bucket(rows), positions, how, weights


def _take_decoder(
    model: Transformer, settings: GenerationSettings, rows: int, longest: int
) -> Decoder:
    """The decoder of the pool that serves a call, or a new one."""
    entry = _pool.get(model)
    if entry is None or entry[0] != _pool_key(model, settings, rows, longest):
        return settings.decoder(model, rows=rows, longest=longest)
    del _pool[model]
    entry[1].attach(model)
    return entry[1]


def _give_back(
    model: Transformer, settings: GenerationSettings, rows: int, longest: int, decoder: Decoder
) -> None:
    if decoder.kind.name == "fused":
        decoder.detach()  # a reference to the model would keep both alive for ever
        _pool[model] = _pool_key(model, settings, rows, longest), decoder


def prompt_ids(
    prompt: str,
    tokenizer: TextTokenizer,
    config: ModelConfig,
    ends: Sequence[int],
    decoder_start: int | None = None,
) -> tuple[list[int], list[int] | None]:
    """The ids that the decoder continues, and those that an encoder reads; None without one.

    A prompt begins as every text of the model does; an empty one that would begin without any token
    begins with the end of the text before it.
    """
    if config.kind == "encoder-decoder":
        source = tokenizer.encode_whole(prompt)
        source += [] if source[-1:] == list(ends[:1]) else ends[:1]
        return [tokenizer.pad_id if decoder_start is None else decoder_start], source
    ids = [*tokenizer.begin_ids, *tokenizer.encode(prompt)] or list(ends[:1])
    if not ids:
        raise ValueError("no token begins or ends a text of this checkpoint; give a prompt.")
    return ids, None
