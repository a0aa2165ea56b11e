"""Prompt ids to longer ids, one token after another.

    logits = session.forward(new)    the prompt, then the last token     generation/session.py
    token  = sample(logits)          generation/sampling.py
    new    = token                   until ``max_new_tokens``, or until all sequences have stopped

With ``draft`` the next tokens are guessed and read along with the last one, and those after a wrong
guess are removed from the cache; the result is the same but for rounding
(generation/prompt_lookup.py). On a GPU a
step is recorded as a CUDA graph (generation/cuda_graph.py). Its tokens are chosen on the device,
which continues from them: the loop requests a chunk of tokens, and the next chunk before it reads
this one, so that the device never waits; tokens after a stop are dropped, though a generator has
drawn for them.

B sequences, T positions of the prompt, N new tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Required, TypedDict, Unpack, overload

import torch
from torch import Tensor

from fenchel.data import AnyTokenizer
from fenchel.generation.cuda_graph import PendingTokens, Record, TokenChoice, use_recorded_step
from fenchel.generation.kv_cache import CacheKind
from fenchel.generation.prompt_lookup import DraftControl, PromptLookup
from fenchel.generation.sampling import (
    NOT_FINITE,
    Penalties,
    Sampling,
    sample,
    sample_or_mark,
)
from fenchel.generation.session import PrefixCache, Prompts, Session, pad_prompts, previous_tokens
from fenchel.generation.text_stream import StopCriteria, TextStream
from fenchel.model import Transformer, evaluating

CHUNK, CHUNK_WITHOUT_STOPS = 16, 64
"""Tokens requested from the device at once where it decodes by itself. Stops are checked per chunk;
without stops only whether all logits were finite."""


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How many tokens to generate, how to draw them, and by which means."""

    max_new_tokens: int
    """Tokens to add to each sequence at most."""
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[int | str] = ()
    """Ids and strings at which a sequence ends; strings need a tokenizer."""
    cache: CacheKind = "model"
    """What keys and values are stored in."""
    draft: int = 0
    """Tokens to guess ahead, for a single sequence, while guesses pay. Changes the speed, not the
    text, except in half precision where two tokens are nearly as likely."""
    record: Record | None = "auto"
    """Whether to replay a recorded step: "graph", None for never, "auto" on a GPU where it pays. A
    recorded step rounds differently in half precision."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} should not be negative.")


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
    cache: CacheKind
    draft: int
    record: Record | None
    stop: Sequence[int | str]
    tokenizer: AnyTokenizer | None
    source: Tensor | Sequence[Tensor] | None
    generator: torch.Generator | None


@overload
def generate(model: Transformer, ids: Tensor, **keywords: Unpack[GenerateKeywords]) -> Tensor: ...
@overload
def generate(
    model: Transformer, ids: Sequence[Tensor], **keywords: Unpack[GenerateKeywords]
) -> list[Tensor]: ...
def generate(
    model: Transformer,
    ids: Tensor | Sequence[Tensor],
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
    cache: CacheKind = "model",
    draft: int = 0,
    record: Record | None = "auto",
    stop: Sequence[int | str] = (),
    tokenizer: AnyTokenizer | None = None,
    source: Tensor | Sequence[Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> Tensor | list[Tensor]:
    """Prompts with their continuations, up to ``max_new_tokens`` each.

    Prompts (B, T) give (B, T + N): a sequence that has stopped repeats its last token until all
    have. A list of prompts (T_b,) of any lengths gives a list, each as long as it became.

    ``temperature`` 0 is greedy; ``top_k``, ``top_p``, ``min_p``, the penalties and ``logit_bias``
    as in ``Sampling``. ``stop`` lists ids, and strings if the ``tokenizer`` is given; the token
    that completes a stop is part of the result. ``cache``, ``draft`` and ``record`` as in
    ``GenerationSettings``. ``source`` is the input of the encoder, in the same two forms as the
    prompts. ``generator`` is on the device of the model.

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
        cache=cache,
        draft=draft,
        record=record,
    )
    run = _start(model, ids, settings, tokenizer=tokenizer, source=source, generator=generator)
    new = list(run.tokens)
    if isinstance(ids, Tensor):
        return torch.cat([ids, *(token_B.unsqueeze(-1) for token_B in new)], dim=-1)
    new_BN = torch.stack(new, dim=-1) if new else run.prompts.ids[:, :0]
    rows = zip(ids, new_BN, run.stops.counts_B.tolist(), strict=True)
    return [torch.cat([prompt, tokens[:length]]) for prompt, tokens, length in rows]


def stream(
    model: Transformer,
    ids: Tensor | Sequence[Tensor],
    settings: GenerationSettings,
    *,
    tokenizer: AnyTokenizer | None = None,
    source: Tensor | Sequence[Tensor] | None = None,
    prefix_cache: PrefixCache | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """The new tokens as they are drawn, (B,) each; arguments as in ``generate`` and
    ``stream_text``.

    >>> from fenchel.model import ModelConfig
    >>> model = Transformer(ModelConfig(vocabulary=10, width=8, layers=1, heads=2))
    >>> tokens = stream(model, torch.tensor([[1, 2]]), GenerationSettings(max_new_tokens=3))
    >>> len(list(tokens))
    3
    """
    run = _start(
        model,
        ids,
        settings,
        tokenizer=tokenizer,
        source=source,
        prefix_cache=prefix_cache,
        generator=generator,
    )
    return run.tokens


def stream_text(
    model: Transformer,
    tokenizer: AnyTokenizer,
    ids: Tensor,
    settings: GenerationSettings,
    *,
    source: Tensor | None = None,
    prefix_cache: PrefixCache | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[str]:
    """The continuation of one prompt (T,) as pieces of text, up to a stop string.

    A piece never contains part of a stop string or of a character; joined, the pieces are what the
    new tokens add to the text of the prompt, cut where the stop string begins. With a
    ``prefix_cache`` the beginning that a prompt shares with the text of the call before it is not
    read again.
    """
    strings = [stop for stop in settings.stop if isinstance(stop, str)]
    text = TextStream(tokenizer, strings, ids.tolist())
    run = _start(
        model,
        ids.unsqueeze(0),
        settings,
        stop=[stop for stop in settings.stop if not isinstance(stop, str)],
        source=None if source is None else source.unsqueeze(0),
        prefix_cache=prefix_cache,
        generator=generator,
    )
    return _pieces(run.tokens, text)


def _pieces(tokens: Iterator[Tensor], text: TextStream) -> Iterator[str]:
    for token in tokens:
        yield text.add(int(token))
        if text.stopped:
            return
    yield text.flush()


class _Generation(NamedTuple):
    """Tokens that are computed as the iterator advances, and which sequences have stopped."""

    prompts: Prompts
    stops: StopCriteria
    tokens: Iterator[Tensor]


def _start(
    model: Transformer,
    ids: Tensor | Sequence[Tensor],
    settings: GenerationSettings,
    *,
    stop: Sequence[int | str] | None = None,
    tokenizer: AnyTokenizer | None = None,
    source: Tensor | Sequence[Tensor] | None = None,
    prefix_cache: PrefixCache | None = None,
    generator: torch.Generator | None = None,
) -> _Generation:
    """A generation that is ready to run; ``stop`` replaces that of the settings if it is given."""
    prompts, kind = pad_prompts(ids), model.config.kind
    count, draft, sampling = settings.max_new_tokens, settings.draft, settings.sampling
    if kind == "encoder":
        raise ValueError("an encoder reads whole texts and cannot continue one; use a decoder.")
    if (source is None) == (kind == "encoder-decoder"):
        raise ValueError(
            f"a model of kind={kind!r} {'needs a' if source is None else 'has no'} source."
        )
    if draft < 0 or (draft and len(prompts.ids) != 1):
        raise ValueError(
            f"draft={draft} for {len(prompts.ids)} sequences; "
            "guess 0 or more tokens ahead, and for one sequence only."
        )
    stops = StopCriteria(settings.stop if stop is None else stop, tokenizer, prompts.ids)
    recorded = use_recorded_step(
        model,
        settings.record,
        cache=settings.cache,
        padded=prompts.token_mask is not None,
        draft=draft,
        tokens=count,
    )
    if prefix_cache is not None and source is None:
        session = prefix_cache.session(
            model, prompts, cache=settings.cache, rewindable=draft, recorded=recorded
        )
    else:
        session = Session(
            model,
            prompts,
            count=count,
            source=None if source is None else pad_prompts(source),
            cache=settings.cache,
            rewindable=draft,
            recorded=recorded,
        )
    penalties = None
    if sampling.penalised:
        penalties = Penalties(sampling, previous_tokens(prompts, model.config.vocabulary))

    def next_token(logits_BV: Tensor) -> Tensor:
        token_B = sample(logits_BV, sampling, penalties=penalties, generator=generator)
        token_B = stops.update(token_B.to(prompts.ids.dtype))
        if penalties is not None:
            penalties.add(token_B)
        return token_B

    def choose(logits_BV: Tensor) -> Tensor:
        token_B = sample_or_mark(logits_BV, sampling, penalties=penalties, generator=generator)
        if penalties is not None:
            penalties.add(token_B)
        return token_B

    greedy = sampling.temperature == 0.0 and penalties is None
    tokens = _decode(
        session, prompts.ids, count, next_token, None if greedy else choose, stops, draft
    )
    return _Generation(prompts, stops, tokens)


@torch.inference_mode()
def _decode(
    session: Session,
    ids_BT: Tensor,
    count: int,
    next_token: Callable[[Tensor], Tensor],
    choose: TokenChoice | None,
    stops: StopCriteria,
    draft: int,
) -> Iterator[Tensor]:
    """The loop: forward pass, draw, forward pass over what was drawn."""
    lookup = PromptLookup(ids_BT[0].tolist()) if draft else None
    control = DraftControl(draft)
    with evaluating(session.model), closing(session):
        new, history = session.begin(ids_BT), [ids_BT]
        while count:
            if new.shape[1] > session.free:
                new = session.restart(torch.cat(history, dim=-1), max(1, session.context // 2))
                history = [new]
            guess: list[int] = []
            if lookup is not None and new.shape[1] == 1 and control.ready():
                guess = lookup.guess(min(draft, count - 1, session.free - 1))
            if guess:
                new = torch.cat([new, new.new_tensor([guess])], dim=-1)
            if session.uses_recorded_step(new):
                tokens = _decode_on_device(session, new, min(count, session.free), choose, stops)
            else:
                logits_BTV = session.forward(new, last=not guess)
                tokens = (next_token(logits_BV) for logits_BV in logits_BTV.unbind(1))
            for i, token_B in enumerate(tokens):
                history.append(token_B.unsqueeze(-1))
                yield token_B
                count -= 1
                if stops.all_stopped():
                    return
                if lookup is not None:
                    lookup.add(token_B.tolist())
                if i < len(guess) and token_B.item() != guess[i]:
                    break
            if guess:
                control.record(i)
                session.rewind(len(guess) - i)
            new = history[-1]


def _decode_on_device(
    session: Session,
    last_B1: Tensor,
    count: int,
    choose: TokenChoice | None,
    stops: StopCriteria,
) -> Iterator[Tensor]:
    """The next ``count`` tokens, chosen on the device, which computes the next chunk meanwhile."""
    chunk = CHUNK if stops.active else CHUNK_WITHOUT_STOPS
    pending: PendingTokens | None = session.decode(last_B1, min(chunk, count), choose)
    while pending is not None:
        count -= pending.on_device.shape[1]
        following = session.decode(None, min(chunk, count), choose) if count else None
        tokens_BN = pending.wait()
        failed = bool((tokens_BN < 0).any())
        for token_B in (tokens_BN if stops.active else pending.on_device).unbind(1):
            if failed and bool((token_B < 0).any()):
                raise ValueError(NOT_FINITE)
            yield stops.update(token_B.to(last_B1.dtype)).to(last_B1.device)
        pending = following
