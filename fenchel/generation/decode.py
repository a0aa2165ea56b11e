"""Prompt ids to longer ids, one token after another.

    logits = read(unread)      the prompt, later what was drawn last     generation/session.py
    token  = sample(logits)    fenchel/generation/sampling.py
    unread = token             until ``max_new_tokens``, or all sequences have stopped

With ``draft`` a guess is read along with the token, and what was read in vain is taken back;
the tokens are the same (generation/prompt_lookup.py). A greedy step that is recorded chooses
its
token on the device and goes on with it: the loop asks for some at a time, and for the next before
it looks at these, so that the device never waits; those behind a stop are forgotten.

B sequences, T positions of the prompt, N new tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple, overload

import torch
from tokenizers import Tokenizer
from torch import Tensor

from fenchel.generation.cuda_graph import PendingTokens, Record, require
from fenchel.generation.kv_cache import Kind
from fenchel.generation.prompt_lookup import PromptLookup
from fenchel.generation.sampling import NOT_FINITE, Sampling, sample
from fenchel.generation.session import Prompts, Session, seen, side_by_side
from fenchel.generation.text_stream import Stops, TextStream
from fenchel.model import Transformer, evaluating

AHEAD, FAR_AHEAD = 16, 64
"""Tokens that the device is asked for at once, where it decodes by itself: stops are seen then, and
without stops only whether all went well."""


@overload
def generate(
    model: Transformer,
    ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = ...,
    top_k: int | None = ...,
    top_p: float | None = ...,
    min_p: float | None = ...,
    repetition_penalty: float = ...,
    cache: Kind = ...,
    draft: int = ...,
    record: Record | None = ...,
    stop: Sequence[int | str] = ...,
    tokenizer: Tokenizer | None = ...,
    source: Tensor | Sequence[Tensor] | None = ...,
    generator: torch.Generator | None = ...,
) -> Tensor: ...
@overload
def generate(
    model: Transformer,
    ids: Sequence[Tensor],
    *,
    max_new_tokens: int,
    temperature: float = ...,
    top_k: int | None = ...,
    top_p: float | None = ...,
    min_p: float | None = ...,
    repetition_penalty: float = ...,
    cache: Kind = ...,
    draft: int = ...,
    record: Record | None = ...,
    stop: Sequence[int | str] = ...,
    tokenizer: Tokenizer | None = ...,
    source: Tensor | Sequence[Tensor] | None = ...,
    generator: torch.Generator | None = ...,
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
    cache: Kind = "model",
    draft: int = 0,
    record: Record | None = None,
    stop: Sequence[int | str] = (),
    tokenizer: Tokenizer | None = None,
    source: Tensor | Sequence[Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> Tensor | list[Tensor]:
    """Prompts with their continuations, up to ``max_new_tokens`` each.

    Prompts (B, T) give (B, T + N): a sequence that has stopped repeats its last token until all
    have. A list of prompts (T_b,) of any lengths gives a list, each as long as it became.

    ``stop`` holds ids, and strings if the ``tokenizer`` is given; the token that completes a
    stop is kept. ``cache`` is what keys and values are held in. ``draft`` tokens are guessed
    ahead from what was said before, for a single sequence. ``record`` replays one step of fixed
    shapes, for a GPU: fenchel/generation/cuda_graph.py. ``source`` is what an encoder reads
    before the decoder begins, in the same two forms as the prompts.
    """
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    run = _start(
        model,
        ids,
        count=max_new_tokens,
        sampling=sampling,
        cache=cache,
        draft=draft,
        record=record,
        stop=stop,
        tokenizer=tokenizer,
        source=source,
        generator=generator,
    )
    drawn = list(run.tokens)
    if isinstance(ids, Tensor):
        return torch.cat([ids, *(token_B.unsqueeze(-1) for token_B in drawn)], dim=-1)
    new_BN = torch.stack(drawn, dim=-1) if drawn else run.prompts.ids[:, :0]
    rows = zip(ids, new_BN, run.stops.counts_B.tolist(), strict=True)
    return [torch.cat([prompt, new[:length]]) for prompt, new, length in rows]


def stream(
    model: Transformer,
    ids: Tensor | Sequence[Tensor],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    cache: Kind = "model",
    draft: int = 0,
    record: Record | None = None,
    stop: Sequence[int | str] = (),
    tokenizer: Tokenizer | None = None,
    source: Tensor | Sequence[Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """The new tokens as they are drawn, (B,) each; arguments as in ``generate``."""
    return _start(
        model,
        ids,
        count=max_new_tokens,
        sampling=sampling,
        cache=cache,
        draft=draft,
        record=record,
        stop=stop,
        tokenizer=tokenizer,
        source=source,
        generator=generator,
    ).tokens


def stream_text(
    model: Transformer,
    tokenizer: Tokenizer,
    ids: Tensor,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    cache: Kind = "model",
    draft: int = 0,
    record: Record | None = None,
    stop: Sequence[int | str] = (),
    source: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[str]:
    """The continuation of one prompt (T,) as pieces of text, up to a stop string.

    A piece never holds part of a stop string or of a character; together the pieces are the
    text of all new tokens, cut where the stop string begins.
    """
    tokens = stream(
        model,
        ids.unsqueeze(0),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        cache=cache,
        draft=draft,
        record=record,
        stop=[one for one in stop if not isinstance(one, str)],
        source=None if source is None else source.unsqueeze(0),
        generator=generator,
    )
    return _told(tokens, TextStream(tokenizer, [one for one in stop if isinstance(one, str)]))


def _told(tokens: Iterator[Tensor], telling: TextStream) -> Iterator[str]:
    for token in tokens:
        yield telling.add(int(token))
        if telling.stopped:
            return
    yield telling.rest()


class _Run(NamedTuple):
    """Tokens that are drawn as they are asked for, and who has stopped by then."""

    prompts: Prompts
    stops: Stops
    tokens: Iterator[Tensor]


def _start(
    model: Transformer,
    ids: Tensor | Sequence[Tensor],
    *,
    count: int,
    sampling: Sampling,
    cache: Kind,
    draft: int,
    record: Record | None,
    stop: Sequence[int | str],
    tokenizer: Tokenizer | None,
    source: Tensor | Sequence[Tensor] | None,
    generator: torch.Generator | None,
) -> _Run:
    prompts = side_by_side(ids)
    kind = model.config.kind
    if kind == "encoder":
        raise ValueError("an encoder reads whole texts and cannot continue one; use a decoder.")
    if (source is None) == (kind == "encoder-decoder"):
        raise ValueError(
            f"a model of kind={kind!r} {'needs a' if source is None else 'has no'} source."
        )
    if count < 0:
        raise ValueError(f"max_new_tokens={count} should not be negative.")
    if draft < 0 or (draft and len(prompts.ids) != 1):
        raise ValueError(
            f"draft={draft} for {len(prompts.ids)} sequences; "
            "guess 0 or more tokens ahead, and for one sequence only."
        )
    stops = Stops(stop, tokenizer, prompts.ids)
    heard = None if source is None else side_by_side(source)
    if record is not None:
        require(model, record, kind=cache, fill=prompts.present is not None, draft=draft)
    reader = Session(
        model, prompts, count=count, source=heard, kind=cache, spare=draft, record=record
    )
    seen_BV = None if sampling.repetition_penalty == 1.0 else seen(prompts, model.config.vocabulary)

    def choose(logits_BV: Tensor) -> Tensor:
        token_B = sample(logits_BV, sampling, seen_BV=seen_BV, generator=generator)
        token_B = stops.take(token_B.to(prompts.ids.dtype))
        if seen_BV is not None:
            seen_BV.scatter_(1, token_B.unsqueeze(-1).long(), True)
        return token_B

    plainly_greedy = sampling.temperature == 0.0 and seen_BV is None
    ahead = (AHEAD if stops.any else FAR_AHEAD) if plainly_greedy else 0
    return _Run(prompts, stops, _decode(reader, prompts.ids, count, choose, stops, draft, ahead))


@torch.inference_mode()
def _decode(
    reader: Session,
    ids_BT: Tensor,
    count: int,
    choose: Callable[[Tensor], Tensor],
    stops: Stops,
    draft: int,
    ahead: int,
) -> Iterator[Tensor]:
    """The loop: read, draw, and read what was drawn."""
    lookup = PromptLookup(ids_BT[0].tolist()) if draft else None
    with evaluating(reader.model), closing(reader):
        unread, said = reader.begin(ids_BT, reader.context), [ids_BT]
        while count:
            if unread.shape[1] > reader.left:
                unread = reader.begin(torch.cat(said, dim=-1), max(1, reader.context // 2))
                said = [unread]
            guess: list[int] = []
            if lookup is not None and unread.shape[1] == 1:
                guess = lookup.guess(min(draft, count - 1, reader.left - 1))
            if guess:
                unread = torch.cat([unread, unread.new_tensor([guess])], dim=-1)
            if ahead and reader.replays(unread):
                drawn = _followed(reader, unread, min(count, reader.left), ahead, stops)
            else:
                logits_BTV = reader.read(unread, last=not guess)
                drawn = (choose(logits_BV) for logits_BV in logits_BTV.unbind(1))
            for i, token_B in enumerate(drawn):
                said.append(token_B.unsqueeze(-1))
                yield token_B
                count -= 1
                if stops.all_stopped():
                    return
                if lookup is not None:
                    lookup.add(token_B.tolist())
                if i < len(guess) and token_B.item() != guess[i]:
                    break
            if guess:
                reader.take_back(len(guess) - i)
            unread = said[-1]


def _followed(
    reader: Session, unread_B1: Tensor, count: int, ahead: int, stops: Stops
) -> Iterator[Tensor]:
    """The next ``count`` tokens, chosen on the device, which goes on while these are told."""
    like = unread_B1
    coming: PendingTokens | None = reader.follow(unread_B1, min(ahead, count))
    while coming is not None:
        count -= coming.there.shape[1]
        later = reader.follow(None, min(ahead, count)) if count else None
        told_BN = coming.told()
        lost = bool((told_BN < 0).any())
        for token_B in (told_BN if stops.any else coming.there).unbind(1):
            if lost and bool((token_B < 0).any()):
                raise ValueError(NOT_FINITE)
            yield stops.take(token_B.to(like.dtype)).to(like.device)
        coming = later
