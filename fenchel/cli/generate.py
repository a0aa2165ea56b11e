"""fenchel generate: continue a prompt."""

import json as json_format
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from cyclopts import Parameter

from fenchel.cli.console import (
    DtypeName,
    Whole,
    Words,
    WordWrap,
    device_and_dtype,
    for_stdout,
    load_checkpoint,
    loading,
    width_of,
)
from fenchel.files import Notice

if TYPE_CHECKING:
    from fenchel.data import TextTokenizer
    from fenchel.generation import Sampling
    from fenchel.model import ModelConfig

DEFAULTS = {
    "temperature": 0.8,
    "top_k": None,
    "top_p": 0.95,
    "min_p": None,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Settings of sampling where neither a flag nor the checkpoint gives one."""
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
"""Settings of a checkpoint that count for greedy decoding too."""
DRAFT_ROUNDS = (
    "Drafts round otherwise than single steps in half precision: the text may part from the one "
    "without --draft at a near tie (--dtype float32 keeps it)."
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """The flags of ``Sampling``; None where one is left out."""

    temperature: float | None = None
    """0 takes the likeliest token each time; higher is more varied. 0.8 by default."""
    top_k: Whole | None = None
    """Draw among this many of the likeliest tokens."""
    top_p: float | None = None
    """Draw among the fewest tokens whose probabilities reach this sum. 0.95 by default."""
    min_p: float | None = None
    """Draw among tokens at least this likely, relative to the likeliest."""
    repetition_penalty: float | None = None
    """Above 1 makes tokens that the text already has less likely."""
    presence_penalty: float | None = None
    """Subtracted from the logits of tokens that were generated; -2 to 2."""
    frequency_penalty: float | None = None
    """Subtracted once per time that a token was generated; -2 to 2."""
    logit_bias: Annotated[list[str] | None, Parameter(negative="")] = None
    """ID=VALUE adds a value of -100 to 100 to the logit of a token; may be given several times."""

    def given(self) -> dict[str, Any]:
        """The flags that were given, as arguments of ``Sampling``."""
        flags = {name: value for name, value in vars(self).items() if value is not None}
        if self.logit_bias is not None:
            flags["logit_bias"] = read_logit_bias(self.logit_bias)
        return flags


def run(
    directory: Path,
    /,
    *words: str,
    prompt: Words = "",
    max_new_tokens: Whole = 200,
    sampling: SamplingFlags = SamplingFlags(),
    stop: Annotated[list[str] | None, Parameter(negative="")] = None,
    cache: Literal["model", "float16", "int8"] = "model",
    draft: Whole = 0,
    context: Whole | None = None,
    adapter: Path | None = None,
    device: str | None = None,
    dtype: DtypeName | None = None,
    seed: Whole = 0,
    stream: bool = True,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Continue a prompt with the model of a run directory or a Hugging Face directory.

    A sampling flag that is left out is taken from the directory's generation_config.json where that
    has it; a line on standard error names what was taken. On a GPU, decoding replays a CUDA graph
    wherever the model allows it.

    Parameters
    ----------
    directory
        A run directory, or a directory with config.json, weights and tokenizer.json.
    words
        The text to continue, instead of --prompt.
    prompt
        The text to continue; "-" reads it from standard input, and an empty one begins a new
        document. In a model with an encoder it is the input of the encoder.
    max_new_tokens
        Tokens to add at most; the end of the document ends the text earlier.
    stop
        Text to stop before; may be given several times.
    cache
        What keys and values are stored in: the model's own dtype, float16 or int8.
    draft
        Tokens to guess ahead from earlier text, while the guesses pay; changes the speed, not the
        text, except in half precision at near ties.
    context
        Positions to read before the oldest half is dropped; as many as in training by default.
        Positions that are not learned can be read further.
    adapter
        A directory of PEFT with LoRA adapters for this model, which are merged into its weights.
    device
        "cpu", "cuda" or "cuda:1"; the GPU where there is one.
    dtype
        Dtype of the weights; the one they are stored in by default, or float32 on a CPU without
        instructions for it.
    seed
        The same seed draws the same text on the same device.
    stream
        Print tokens as they are drawn.
    json
        Print one JSON object instead.
    """
    if words and prompt:
        raise ValueError("give the prompt once: behind the directory, or by --prompt.")
    prompt = " ".join(words) or (sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt)
    with loading():
        import torch

        from fenchel.checkpoints.tokenizer import describe_beginning, end_ids
        from fenchel.generation import GenerationSettings, stream_text

    chosen = sampling_settings(directory, sampling.given())
    on, as_dtype = device_and_dtype(device, dtype)
    model, tokenizer, config = load_checkpoint(directory, on, as_dtype, adapter)
    model = model if context is None else model.with_context(context)
    ends = end_ids(directory, tokenizer)
    ids, source = prompt_ids(prompt, tokenizer, config, chosen.decoder_start, ends)
    from_checkpoint = dict(chosen.from_checkpoint)
    if not (tokenizer.has_end and ends == (tokenizer.end_id,)):
        from_checkpoint["ends"] = list(ends)
    settings = GenerationSettings(
        max_new_tokens=max_new_tokens,
        sampling=chosen.sampling,
        stop=[*ends, *(stop or ())],
        cache=cache,
        draft=draft,
    )
    pieces = stream_text(
        model,
        tokenizer,
        torch.tensor(ids, device=on),
        settings,
        source=None if source is None else torch.tensor(source, device=on),
        generator=torch.Generator(on).manual_seed(seed),
    )
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
        if draft and model.lm_head_weight.dtype.itemsize < 4:
            print(DRAFT_ROUNDS, file=sys.stderr)
        if from_checkpoint:
            print(sentence(chosen.source, from_checkpoint), file=sys.stderr)
    show, text = stream and not json, ""
    wrap = WordWrap(width_of(sys.stdout))
    if show:
        print(wrap(for_stdout(prompt)), end="", flush=True)
    for piece in pieces:
        text += piece
        if show:
            print(wrap(for_stdout(piece)), end="", flush=True)
    if json:
        begin = describe_beginning(tokenizer)
        result: dict[str, Any] = {"prompt": prompt, "text": text, "seed": seed, "begin": begin}
        if from_checkpoint:
            result |= {"settings": from_checkpoint, "settings_from": str(chosen.source)}
        print(json_format.dumps(result))
    elif show:
        print(wrap("\n"), end="")
    else:
        print(wrap(for_stdout(f"{prompt}{text}\n")), end="")
    return 0


def prompt_ids(
    prompt: str,
    tokenizer: "TextTokenizer",
    config: "ModelConfig",
    decoder_start: int | None,
    ends: tuple[int, ...],
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
        raise ValueError("no token begins or ends a text of this checkpoint; give a --prompt.")
    return ids, None


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


class SamplingSettings(NamedTuple):
    """How to sample, and which of it a checkpoint gives."""

    sampling: "Sampling"
    decoder_start: int | None
    """The first token of a decoder with an encoder, according to the checkpoint."""
    from_checkpoint: dict[str, Any]
    """Settings that are the checkpoint's, by name."""
    source: Path
    """The file they come from."""


def sampling_settings(directory: Path, flags: dict[str, Any]) -> SamplingSettings:
    """The flags, else what a Hugging Face directory gives, else DEFAULTS.

    A generation_config.json without do_sample gives no sampling settings; penalties count all the
    same.
    """
    from fenchel.checkpoints import GenerationConfig, read_generation_config
    from fenchel.checkpoints.directory import has_file
    from fenchel.checkpoints.generation_config import GENERATION
    from fenchel.checkpoints.run_checkpoint import is_run, model_files
    from fenchel.generation import Sampling
    from fenchel.model.families.config_reader import CONFIG

    directory, config = model_files(directory), GenerationConfig()
    if has_file(directory, CONFIG) and not is_run(directory):
        config = read_generation_config(directory)
    names = DEFAULTS if config.temperature else PENALTIES
    theirs = {name: getattr(config, name) for name in names}
    from_checkpoint = {
        name: value
        for name, value in theirs.items()
        if name not in flags and value != DEFAULTS[name]
    }
    source = directory / (GENERATION if has_file(directory, GENERATION) else CONFIG)
    sampling = Sampling(**(DEFAULTS | theirs | flags))
    return SamplingSettings(sampling, config.decoder_start, from_checkpoint, source)


def sentence(source: Path, from_checkpoint: dict[str, Any]) -> str:
    """Which settings are the checkpoint's.

    >>> sentence(Path("x/generation_config.json"), {"temperature": 0.6, "top_p": None})
    'Settings of x/generation_config.json: temperature 0.6, no top_p.'
    """
    parts = (
        f"no {name}" if value is None else f"{name} {value}"
        for name, value in from_checkpoint.items()
    )
    return f"Settings of {source}: {', '.join(parts)}."
