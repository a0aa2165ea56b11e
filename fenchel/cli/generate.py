"""fenchel generate: continue a prompt."""

import json as json_format
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from fenchel.cli.console import (
    LOADED_AS_STORED,
    LoadFlags,
    ModelPath,
    Switch,
    Whole,
    Words,
    WordWrap,
    for_stdout,
    loading,
    require_inputs,
    width_of,
)
from fenchel.cli.steer import NOT_STEERED, SteerFlags
from fenchel.files import Notice, printable

if TYPE_CHECKING:
    from fenchel.data import TextTokenizer
    from fenchel.generation import Steering, Token
    from fenchel.model import Transformer

_ANSWER = 32  # tokens of an unsteered answer, on which an emphasis is measured
DRAFT_ROUNDS = (
    "Drafts round otherwise than single steps in half precision: the text may part from the one "
    "without --draft at a near tie (--dtype float32 keeps it)."
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """The flags of ``Sampling``; None where one is left out."""

    temperature: Annotated[float | None, Parameter(validator=Number(gte=0))] = None
    """0 takes the likeliest token each time; higher is more varied. 0.8 by default."""
    top_k: Annotated[Whole | None, Parameter(validator=Number(gte=1))] = None
    """Draw among this many of the likeliest tokens."""
    top_p: Annotated[float | None, Parameter(validator=Number(gt=0, lte=1))] = None
    """Draw among the fewest tokens whose probabilities reach this sum. 0.95 by default."""
    min_p: Annotated[float | None, Parameter(validator=Number(gt=0, lte=1))] = None
    """Draw among tokens at least this likely, relative to the likeliest."""
    repetition_penalty: Annotated[float | None, Parameter(validator=Number(gt=0))] = None
    """Above 1 makes tokens that the text already has less likely."""
    presence_penalty: Annotated[float | None, Parameter(validator=Number(gte=-2, lte=2))] = None
    """Subtracted from the logits of tokens that were generated; -2 to 2."""
    frequency_penalty: Annotated[float | None, Parameter(validator=Number(gte=-2, lte=2))] = None
    """Subtracted once per time that a token was generated; -2 to 2."""
    logit_bias: Annotated[list[str] | None, Parameter(negative="")] = None
    """ID=VALUE adds a value of -100 to 100 to the logit of a token; may be given several times."""

    def given(self) -> dict[str, Any]:
        """The flags that were given, as arguments of ``Sampling``."""
        flags = {name: value for name, value in vars(self).items() if value is not None}
        if self.logit_bias is not None:
            flags["logit_bias"] = read_logit_bias(self.logit_bias)
        return flags


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DecodingFlags:
    """The flags of decoding that generate and chat share."""

    cache: Literal["model", "float16", "int8"] = "model"
    """What keys and values are stored in: the model's own dtype, float16 or int8."""
    draft: Whole = 0
    """Tokens to guess ahead from earlier text, while the guesses pay; changes the speed, not the
    text, except in half precision at near ties."""
    context: Whole | None = None
    """Positions to read before the oldest half of a text, or the oldest turns of a conversation,
    are left out; as many as in training by default. Positions that are not learned can be read
    further."""
    invariant: Switch = False
    """Compute with the shapes of `fenchel serve --invariant`, whose bits do not depend on other
    sequences."""
    logprobs: Whole | None = None
    """Log-probabilities of the tokens and of so many of the likeliest, with --json."""
    seed: Whole = 0
    """The same seed and the same input give the same text in every command and on every device,
    unless rounding moves a draw across a border."""

    def given(self) -> dict[str, Any]:
        """The flags as arguments of ``GenerationSettings``."""
        return {name: value for name, value in vars(self).items() if name != "context"}

    def within_context(self, model: "Transformer") -> "Transformer":
        """The model with as many positions as --context asks for."""
        return model if self.context is None else model.with_context(self.context)


PLAIN_DECODING = DecodingFlags()


def run(
    directory: ModelPath,
    /,
    *words: str,
    prompt: Words = "",
    max_new_tokens: Whole = 200,
    sampling: SamplingFlags = SamplingFlags(),
    steering: SteerFlags = NOT_STEERED,
    emphasis_kl: float | None = None,
    stop: Annotated[list[str] | None, Parameter(negative="")] = None,
    decoding: DecodingFlags = PLAIN_DECODING,
    past_context: bool = True,
    attention: Switch = False,
    loading_as: LoadFlags = LOADED_AS_STORED,
    stream: bool = True,
    json: Switch = False,
) -> int:
    """Continue a prompt with the model of a run directory or a Hugging Face directory.

    A sampling flag that is left out is taken from the directory's generation_config.json where that
    has it; a line on standard error names what was taken. On a GPU, decoding replays a CUDA graph
    wherever the model allows it.

    Parameters
    ----------
    words
        The text to continue, instead of --prompt.
    prompt
        The text to continue; "-" reads it from standard input, and an empty one begins a new
        document. In a model with an encoder it is the input of the encoder.
    max_new_tokens
        Tokens to add at most; the end of the document ends the text earlier.
    stop
        Text to stop before; may be given several times.
    past_context
        Go on when the context is full, with its newest half; else the text ends there.
    emphasis_kl
        Find --emphasis so that the laws of the text that the model writes without it move by so
        much on average, in nats; at most 1.
    attention
        What the attention of every new token read: lines after the text, or numbers with --json.
    stream
        Print tokens as they are drawn.
    json
        Print one JSON object instead.
    """
    if words and prompt:
        raise ValueError("give the prompt once: behind the directory, or by --prompt.")
    prompt = " ".join(words) or (sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt)
    if emphasis_kl is not None and (steering.emphasise is None or steering.emphasis is not None):
        raise ValueError("--emphasis-kl belongs to --emphasise WORDS; it finds their --emphasis.")
    if decoding.logprobs is not None and not json:
        raise ValueError("--logprobs needs --json, which has a place for numbers.")
    require_inputs(directory)
    with loading():
        from fenchel.checkpoints.tokenizer import (
            describe_beginning,
            end_ids,
            suggested_generation,
        )
        from fenchel.cli.token_attention import TRACED, print_attention
        from fenchel.generation import GenerationSettings, prompt_ids, updates
        from fenchel.generation.sampling import resolve_sampling

    config, config_file = suggested_generation(directory)
    chosen, from_checkpoint = resolve_sampling(config, sampling.given())
    model, tokenizer, model_config = loading_as.load(directory)
    model = decoding.within_context(model)
    ends = end_ids(directory, tokenizer)
    ids, source = prompt_ids(prompt, tokenizer, model_config, ends, config.decoder_start)
    if not (tokenizer.has_end and ends == (tokenizer.end_id,)):
        from_checkpoint["ends"] = list(ends)
    steered = steering.steering(model)
    if emphasis_kl is not None and steered is not None:
        steered = _emphasis_within(model, tokenizer, steered, ids, ends, emphasis_kl)
    settings = GenerationSettings(
        max_new_tokens=max_new_tokens,
        sampling=chosen,
        stop=[*ends, *(stop or ())],
        past_context=past_context,
        trace=TRACED if attention else None,
        steering=steered,
        **decoding.given(),
    )
    requests = [settings.request(ids, source=source)] if max_new_tokens else []
    found = updates(model, requests, settings, tokenizer=tokenizer)
    if len(ids) > model.config.context:
        left_out = len(ids) - model.config.context
        warnings.warn(
            f"the prompt has {len(ids):,} tokens and the model reads {model.config.context:,}: its "
            f"first {left_out:,} are left out.",
            Notice,
            stacklevel=1,
        )
    if not json:
        print(describe_beginning(tokenizer), file=sys.stderr)
        if decoding.draft and model.lm_head_weight.dtype.itemsize < 4:
            print(DRAFT_ROUNDS, file=sys.stderr)
        if from_checkpoint:
            print(sentence(config_file, from_checkpoint), file=sys.stderr)
    show, text = stream and not json, ""
    tokens: list[Token] = []
    wrap = WordWrap(width_of(sys.stdout))
    if show:
        print(wrap(for_stdout(prompt)), end="", flush=True)
    finish = "length"
    for update in found:
        finish = update.finish or finish
        if update.finish == "error":
            raise ValueError(update.error)
        piece = "".join(token.text for token in update.tokens) + update.flush
        text += piece
        tokens += update.tokens
        if show:
            print(wrap(for_stdout(piece)), end="", flush=True)
    if json:
        result: dict[str, Any] = {"prompt": prompt, "text": text, "seed": decoding.seed}
        result |= {"begin": describe_beginning(tokenizer), "prompt_tokens": len(ids)}
        result |= {"new_tokens": len(tokens), "finish": finish}
        if from_checkpoint:
            result |= {"settings": from_checkpoint, "settings_from": str(config_file)}
        if decoding.logprobs is not None or attention:
            result["tokens"] = [token_json(token, tokenizer) for token in tokens]
        print(json_format.dumps(result))
        return 0
    print(wrap("\n") if show else wrap(for_stdout(f"{prompt}{text}\n")), end="")
    if attention:
        whole = [*ids, *(token.id for token in tokens)]
        print_attention(tokenizer, whole, [token.trace for token in tokens if token.trace])
    return 0


def _emphasis_within(
    model: "Transformer",
    tokenizer: "TextTokenizer",
    steering: "Steering",
    ids: list[int],
    ends: Sequence[int],
    kl: float,
) -> "Steering":
    """The steering with the bias that moves the laws of an unsteered answer by ``kl`` nats."""
    import torch

    from fenchel.generation import generate
    from fenchel.steering import find_strength

    assert steering.emphasis is not None
    emphasis = steering.emphasis.found_in(tokenizer, ids)
    room = min(_ANSWER, model.config.context - len(ids))
    if room < 1:
        raise ValueError(
            "the prompt fills the context, so that --emphasis-kl has no answer to read."
        )
    prompt = torch.tensor([ids], device=model.lm_head_weight.device)
    answer = generate(model, prompt, max_new_tokens=room, temperature=0.0, stop=ends)
    text = answer[0].tolist()
    found = find_strength(model, emphasis, text[:-1], kl, start=len(ids) - 1)
    print(
        f"An emphasis of {found.value:.3g} moves the laws of {len(text) - len(ids)} tokens by "
        f"{found.divergence.mean:.3g} nats on average, by {found.divergence.worst:.3g} at most.",
        file=sys.stderr,
    )
    return replace(steering, emphasis=replace(emphasis, bias=found.value))


def token_json(token: "Token", tokenizer: "TextTokenizer") -> dict[str, Any]:
    """A token with its numbers, as plain values."""
    value: dict[str, Any] = {"id": token.id, "text": token.text}
    if token.logprob is not None:
        named = [[tokenizer.id_to_token(id), id, p] for id, p in token.top]
        value |= {"logprob": token.logprob, "top": named}
    if token.trace is not None:
        value["fenchel"] = token.trace.as_json()
    return value


def read_logit_bias(pairs: list[str]) -> tuple[tuple[int, float], ...]:
    """Ids and values of ``--logit-bias ID=VALUE``.

    >>> read_logit_bias(["50256=-100", "11=2.5"])
    ((50256, -100.0), (11, 2.5))
    """
    biases = []
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            biases.append((int(token), float(value)))
        except ValueError:
            raise ValueError(
                f"--logit-bias {pair!r} should be ID=VALUE, as in 50256=-100."
            ) from None
    return tuple(biases)


def sentence(source: Path, from_checkpoint: dict[str, Any]) -> str:
    """Which settings are the checkpoint's.

    >>> sentence(Path("x/generation_config.json"), {"temperature": 0.6, "top_p": None})
    'Settings of x/generation_config.json: temperature 0.6, no top_p.'
    """
    parts = (
        f"no {name}" if value is None else f"{name} {value}"
        for name, value in from_checkpoint.items()
    )
    return f"Settings of {printable(source, 4096)}: {', '.join(parts)}."
