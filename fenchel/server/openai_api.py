"""Bodies of the OpenAI API to requests of the engine, and its updates to responses.

Pure functions: no HTTP, no threads. A body is an object that may hold anything. Every field is
obeyed, or refused by its name (``ApiError``, status 400); those of ``UNUSED`` are accepted, since
no answer depends on them. A field that is null counts as absent.

**Seeds.** A call asks for n choices of each of its prompts. Choice i of prompt j draws by
``choice_seed(seed, j, i)``, the first of the first by the seed itself: with the same settings it is
the text of ``fenchel generate --seed``, but for rounding (generation/sampling.py). Without a seed
one is drawn.

**Log-probabilities** are those of the raw logits, before temperature, penalties and filters. Every
token has the same number as a chosen one and among the likeliest. In completions the likeliest are
a mapping of token texts, which may coincide: the larger number counts. -inf, which JSON lacks, is
-9999. With ``return_token_ids`` the entries of a chat carry their ids, and a completion has the
same entries under ``content``.

**Offsets.** text[offset_k : offset_{k+1}] is the text that token k releases: "" while a character
or a stop string may be incomplete. A token's own text, under ``tokens``, is that of its id alone.

**Streams.** A chunk per choice and step, where there is something to send; then one with the finish
reason; then the usage, where it is requested.
"""

import json
import math
import secrets
import struct
import time
from base64 import b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from torch import Tensor

from fenchel.config import did_you_mean
from fenchel.data import ChatTemplate, TextTokenizer
from fenchel.files import no_duplicates, printable
from fenchel.generation.attention_trace import (
    MOST_TOP,
    MOST_WEIGHTS,
    TraceAttention,
    TraceSettings,
)
from fenchel.generation.generate import prompt_ids
from fenchel.generation.sampling import MOST_BIASED, MOST_LOGPROBS, Sampling, choice_seed
from fenchel.generation.scheduler import Request, Token, Update
from fenchel.generation.steering import MOST_BIAS, Emphasis, Steering, head_choices
from fenchel.generation.text_stream import REPLACEMENT, Detokenizer
from fenchel.model import ModelConfig

MOST_PROMPTS = 32
MOST_CHOICES = 8
MOST_STOPS, LONGEST_STOP = 16, 256
DEEPEST = 16
"""Nested objects and lists of a body at most."""
MOST_DRAFT, MOST_TOKENS = 64, 1 << 20
"""Tokens to guess ahead at most, and new tokens of a choice that goes on past the context."""
MOST_STRENGTH = 1e3
"""Of a direction, in units of its vectors."""
TRACE_FIELDS = ("entropy", "attention", "sensitivity", "confidence")
DECODING_FIELDS = (
    *("draft", "past_context"),
    *("steer", "token_kl", "emphasise", "emphasis", "emphasis_layers"),
    *("head_beta", "head_choice"),
)
"""Fields of the field ``fenchel``: of a trace, and all others."""
LOWEST = -9999.0
"""What -inf is written as."""

UNUSED = (
    *("user", "metadata", "store", "service_tier", "parallel_tool_calls"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
)
"""Fields that change nothing of an answer."""
_NO_TOOLS = "no tools are called"
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((1,), "choices are not ranked; use n"),
    "suffix": (("",), "a text is continued and not filled in"),
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "audio": ((), "the model reads and writes text"),
    "modalities": ((["text"],), "the model reads and writes text"),
    "response_format": (({"type": "text"},), "there is no grammar that an answer must follow"),
    "prediction": ((), "no prediction is used"),
    "reasoning_effort": ((), "the chat template has no such setting"),
    "verbosity": ((), "the chat template has no such setting"),
    "web_search_options": ((), "nothing is searched"),
    "moderation": ((), "nothing is moderated"),
    "prompt_cache_options": ((), "prefixes are kept without options"),
}
"""Fields that are refused: the values that mean the same as none, and why."""

_GENERATION = (
    *("model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "seed", "n", "stop", "stop_token_ids"),
    *("ignore_eos", "stream", "stream_options", "logprobs", "return_token_ids", "fenchel"),
)
COMPLETION_FIELDS = ("prompt", *_GENERATION, "echo")
EMBEDDING_FIELDS = ("model", "input", "encoding_format", "dimensions")
TOKENIZE_FIELDS = (
    *("model", "prompt", "messages", "add_special_tokens", "add_generation_prompt"),
    "return_token_strs",
)
DETOKENIZE_FIELDS = ("model", "tokens")
LENS_FIELDS = ("model", "tokens", "next", "top")
CHAT_FIELDS = ("messages", *_GENERATION, "max_completion_tokens", "top_logprobs")


class ApiError(Exception):
    """An answer that is an error: its status, and the object that clients expect."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        kind = _ERROR_TYPES.get(self.status, "invalid_request_error")
        if self.status >= 500:
            kind = "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@contextmanager
def _refused(param: str | None = None) -> Iterator[None]:
    """Context manager: what the library refuses is an error of the field ``param``."""
    try:
        yield
    except ValueError as error:
        raise ApiError(str(error), param=param) from None


class NamedDirection(NamedTuple):
    """Vectors (M,) by layer, from 1, and how often they are added unless a request says."""

    vectors: Mapping[int, Tensor]
    strength: float


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The served model and what requests to it depend on."""

    name: str
    config: ModelConfig
    tokenizer: TextTokenizer
    context: int
    ends: tuple[int, ...]
    """Ids that end a text."""
    decoder_start: int | None = None
    """The first token of the decoder of an encoder-decoder, where the checkpoint names one."""
    aliases: frozenset[str] = frozenset({"default"})
    """Other names that requests may give; any name at all where it is empty."""
    defaults: Sampling = field(default_factory=Sampling)
    """How tokens are drawn where a request does not say."""
    template: ChatTemplate | None = None
    template_stops: tuple[int | str, ...] = ()
    """What ends an answer, by the template."""
    trust_user_tokens: bool = False
    """Whether a message may spell control tokens."""
    directions: Mapping[str, NamedDirection] = field(default_factory=dict)
    """Directions that answers are steered by, by the names that requests call them."""
    fingerprint: str = ""
    created: int = 0
    most_choices: int = 64
    """Choices of all prompts of a call at most."""
    most_traced: int = 4
    """Choices whose attention is traced at most."""

    @cached_property
    def token_texts(self) -> "TokenTexts":
        """The text of single tokens."""
        return TokenTexts(self.tokenizer)

    @cached_property
    def longest_text(self) -> int:
        """Characters beyond which a text cannot fit into the context."""
        return self.tokenizer.most_characters(self.context)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A body that was checked: requests of the engine, and how their results are written."""

    served: ServedModel
    is_chat: bool
    requests: tuple[Request, ...]
    """Choice i of prompt j is number j n + i."""
    n: int
    stream: bool
    include_usage: bool
    echoes: tuple[tuple[str, ...], ...]
    """With ``echo``, per prompt the text of each of its tokens; else empty."""
    return_token_ids: bool
    id: str
    created: int


def parse_body(data: bytes) -> dict[str, Any]:
    """The object of a body.

    >>> parse_body(b'{"n": 1}')
    {'n': 1}
    """
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=no_duplicates, parse_constant=_no_constant
        )
        too_deep = _deeper_than(value, DEEPEST)
    except RecursionError:
        too_deep = True
    except ValueError as error:  # not UTF-8, not JSON, a number too long
        raise ApiError(f"the body is not JSON: {printable(error, 200)}.") from None
    if too_deep:
        raise ApiError(f"the body is nested more than {DEEPEST} deep.")
    if not isinstance(value, dict):
        raise ApiError(f"the body should be a JSON object, got a {type(value).__name__}.")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _deeper_than(value: Any, levels: int) -> bool:
    level = [value]
    for _ in range(levels):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return any(isinstance(one, dict | list) for one in level)


# --- bodies to calls


def completion_call(body: Mapping[str, Any], served: ServedModel) -> Call:
    """The call of a body of /v1/completions."""
    fields = _Fields(body, COMPLETION_FIELDS, "/v1/completions")
    fields.model(served)
    prompts = _prompts(fields, served, "prompt", partial(_text_ids, served=served))
    echo = fields.flag("echo")
    if echo and served.config.kind == "encoder-decoder":
        raise ApiError("the encoder reads a prompt, and no score of it can be given.", param="echo")
    top = fields.integer("logprobs", None, 0, MOST_LOGPROBS)
    own = _own_fields(fields, served)
    most = fields.integer("max_tokens", 16, 0, _most_tokens(own, served)) or 0
    if most == 0 and not echo:
        raise ApiError(
            "max_tokens should be at least 1; 0 needs echo, which then returns the prompt alone.",
            param="max_tokens",
        )
    echoes: tuple[tuple[str, ...], ...] = ()
    if echo:
        echoes = tuple(_echo(served.tokenizer, ids, text) for ids, text in prompts)
    template = Request(
        prompt=(0,),
        max_new_tokens=most,
        sampling=_sampling(fields, served),
        stop_ids=_stop_ids(fields, served, served.ends),
        stop_strings=fields.stops(),
        logprobs=top,
        # A prompt that is only echoed takes the way of one whose scores are requested.
        prompt_logprobs=(top or 0) if echo and (top is not None or most == 0) else None,
        **own,
    )
    return _call(fields, served, template, [ids for ids, _ in prompts], is_chat=False, echo=echoes)


def chat_call(body: Mapping[str, Any], served: ServedModel) -> Call:
    """The call of a body of /v1/chat/completions."""
    fields = _Fields(body, CHAT_FIELDS, "/v1/chat/completions")
    fields.model(served)
    ids, own = _conversation_ids(fields.required("messages"), served), _own_fields(fields, served)
    room = served.context - len(ids) + 1
    if room < 1 or not ids:
        raise ApiError(
            f"the messages have {len(ids):,} tokens and the model reads 1 to {served.context:,}.",
            param="messages",
            code="context_length_exceeded",
        )
    if served.config.kind == "encoder-decoder":
        room = served.context  # the decoder reads the answer alone
    limit = _most_tokens(own, served)
    room = limit if own["past_context"] else room
    most = fields.integer("max_tokens", None, 1, limit)
    newer = fields.integer("max_completion_tokens", None, 1, limit)
    if most is not None and newer is not None and most != newer:
        raise ApiError(
            "max_tokens and max_completion_tokens differ; give one of them.", param="max_tokens"
        )
    scored = fields.flag("logprobs")
    top = fields.integer("top_logprobs", None, 0, MOST_LOGPROBS)
    if top is not None and not scored:
        raise ApiError("top_logprobs needs logprobs.", param="top_logprobs")
    ends = [stop for stop in served.template_stops if isinstance(stop, int)]
    texts = [stop for stop in served.template_stops if isinstance(stop, str)]
    template = Request(
        prompt=(0,),
        max_new_tokens=min(room, most or newer or room),
        sampling=_sampling(fields, served),
        stop_ids=_stop_ids(fields, served, (*served.ends, *ends)),
        stop_strings=(*fields.stops(), *texts),
        continues=False,
        logprobs=(top or 0) if scored else None,
        **own,
    )
    return _call(fields, served, template, [ids], is_chat=True)


def _call(
    fields: "_Fields",
    served: ServedModel,
    template: Request,
    prompts: Sequence[Sequence[int]],
    *,
    is_chat: bool,
    echo: tuple[tuple[str, ...], ...] = (),
) -> Call:
    """The call with a request for every choice."""
    n = fields.integer("n", 1, 1, MOST_CHOICES) or 1
    if len(prompts) * n > served.most_choices:
        raise ApiError(
            f"{len(prompts)} prompts with {n} choices are more than {served.most_choices} choices.",
            param="n",
        )
    observed = template.trace is not None and template.trace.observes
    if observed and len(prompts) * n > served.most_traced:
        raise ApiError(
            f"the attention of {served.most_traced} choices at most is traced at a time.",
            param="fenchel",
        )
    seed = fields.integer("seed", None, -(2**63), 2**63 - 1)
    seed = secrets.randbits(63) if seed is None else seed
    stream = fields.flag("stream")
    options = fields.mapping("stream_options", ("include_usage", "include_obfuscation"))
    if options and not stream:
        raise ApiError("stream_options needs stream.", param="stream_options")
    if options.flag("include_obfuscation"):
        raise ApiError("chunks are not padded.", param="stream_options.include_obfuscation")
    return Call(
        served=served,
        is_chat=is_chat,
        requests=tuple(
            replace(_with_prompt(template, served, ids), seed=choice_seed(seed, j, i))
            for j, ids in enumerate(prompts)
            for i in range(n)
        ),
        n=n,
        stream=stream,
        include_usage=options.flag("include_usage"),
        echoes=echo,
        return_token_ids=fields.flag("return_token_ids"),
        id=("chatcmpl-" if is_chat else "cmpl-") + secrets.token_hex(12),
        created=int(time.time()),
    )


class _Fields:
    """The fields of an object from elsewhere, each refused unless it is of its kind."""

    def __init__(
        self, body: Mapping[str, Any], known: Collection[str], where: str, prefix: str = ""
    ) -> None:
        self.prefix = prefix
        self.values = {name: value for name, value in body.items() if value is not None}
        for name, value in self.values.items():
            if name in known or (not prefix and name in UNUSED):
                continue
            shown = f"{prefix}{printable(name, 40)}"
            if not prefix and name in REFUSED:
                harmless, reason = REFUSED[name]
                if value in harmless:
                    continue
                raise ApiError(f"{name} is not supported: {reason}.", param=name)
            hint = did_you_mean(name[:40], sorted(known))
            raise ApiError(f"{where} has no field {shown!r}; {hint}", param=shown)

    def __bool__(self) -> bool:
        return bool(self.values)

    def wrong(self, name: str, expected: str) -> ApiError:
        value = self.values.get(name)
        shown = printable(json.dumps(value)[:100], 60)
        return ApiError(
            f"{self.prefix}{name} should be {expected}, got {shown}.", param=self.prefix + name
        )

    def required(self, name: str) -> Any:
        if name not in self.values:
            raise ApiError(f"{self.prefix}{name} is missing.", param=self.prefix + name)
        return self.values[name]

    def integer(self, name: str, default: int | None, least: int, most: int) -> int | None:
        value = self.values.get(name, default)
        if value is None:
            return None
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float, expected: str) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not least <= value <= most:
            raise self.wrong(name, expected)
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def mapping(self, name: str, known: Collection[str], expected: str = "an object") -> "_Fields":
        value, path = self.values.get(name, {}), f"{self.prefix}{name}"
        if not isinstance(value, dict):
            raise self.wrong(name, expected)
        return _Fields(value, known, path, f"{path}.")

    def listed(self, name: str, kind: type, most: float, expected: str) -> list[Any]:
        """Values of one type, so many at most; empty where the field is left out."""
        value = self.values.get(name, [])
        if (
            not isinstance(value, list)
            or len(value) > most
            or not all(type(one) is kind for one in value)
        ):
            raise self.wrong(name, expected)
        return value

    def token_ids(self, name: str) -> list[int]:
        self.required(name)
        return self.listed(name, int, math.inf, "a list of token ids")

    def model(self, served: ServedModel) -> None:
        """Refuse the name of another model."""
        name = self.values.get("model", served.name)
        if not isinstance(name, str):
            raise self.wrong("model", "a name")
        require_model(name, served)

    def stops(self) -> tuple[str, ...]:
        expected = f"a text of 1 to {LONGEST_STOP} characters, or up to {MOST_STOPS} of them"
        stops = self.values.get("stop")
        stops = (
            [stops] if isinstance(stops, str) else self.listed("stop", str, MOST_STOPS, expected)
        )
        if not all(0 < len(stop) <= LONGEST_STOP for stop in stops):
            raise self.wrong("stop", expected)
        return tuple(stops)


def require_model(name: str, served: ServedModel) -> None:
    """Refuse the name of another model."""
    if served.aliases and name != served.name and name not in served.aliases:
        raise ApiError(
            f"there is no model {printable(name)!r} here; this server has {served.name!r}.",
            status=404,
            param="model",
            code="model_not_found",
        )


def _prompts(
    fields: _Fields, served: ServedModel, name: str, encode: Callable[[str], list[int]]
) -> list[tuple[list[int], str | None]]:
    """Ids of every prompt, and its text where it was given as one."""
    value = fields.required(name)
    expected = (
        f"a text, a list of token ids, or a list of 1 to {MOST_PROMPTS} texts or lists of token ids"
    )
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_PROMPTS:
        raise fields.wrong(name, expected)
    prompts: list[tuple[list[int], str | None]] = []
    for one in value:
        if isinstance(one, str):
            _require_length(len(one), served, name)
            with _refused(name):
                prompts.append((encode(one), one))
        elif isinstance(one, list) and all(type(token) is int for token in one):
            prompts.append((one, None))
        else:
            raise fields.wrong(name, expected)
    for ids, _ in prompts:
        _require_ids(ids, served, name)
    return prompts


def _text_ids(text: str, served: ServedModel) -> list[int]:
    """The ids of a prompt, for the decoder or the encoder."""
    ids, source = prompt_ids(text, served.tokenizer, served.config, served.ends)
    return ids if source is None else source


def _with_prompt(request: Request, served: ServedModel, ids: Sequence[int]) -> Request:
    """The request with ids as prompt of a decoder, or as source of an encoder-decoder."""
    steering = request.steering
    if steering is not None and steering.emphasis is not None:
        with _refused("fenchel.emphasise"):
            emphasis = steering.emphasis.found_in(served.tokenizer, ids)
        request = replace(request, steering=replace(steering, emphasis=emphasis))
    if served.config.kind != "encoder-decoder":
        return replace(request, prompt=tuple(ids))
    start = served.tokenizer.pad_id if served.decoder_start is None else served.decoder_start
    return replace(request, prompt=(start,), source=tuple(ids))


def _require_length(characters: int, served: ServedModel, param: str) -> None:
    """Refuse a text that is far too long before the time is spent to encode it."""
    if characters > served.longest_text:
        raise ApiError(
            f"{param} has {characters:,} characters; for {served.context:,} tokens of context "
            f"{served.longest_text:,} are read at most.",
            param=param,
            code="context_length_exceeded",
        )


def _require_ids(ids: Sequence[int], served: ServedModel, param: str) -> None:
    if not 1 <= len(ids) <= served.context:
        raise ApiError(
            f"a prompt has {len(ids):,} tokens and the model reads 1 to {served.context:,}.",
            param=param,
            code="context_length_exceeded" if ids else None,
        )
    _require_vocabulary(ids, served, param)


def _require_vocabulary(ids: Sequence[int], served: ServedModel, param: str) -> None:
    least, largest = min(ids), max(ids)
    if least < 0 or largest >= served.config.vocabulary:
        wrong = least if least < 0 else largest
        raise ApiError(
            f"the token id {printable(wrong, 40)} is outside of 0 to "
            f"{served.config.vocabulary - 1}.",
            param=param,
        )


def _conversation_ids(
    value: Any, served: ServedModel, *, add_generation_prompt: bool = True
) -> list[int]:
    if served.template is None:
        raise ApiError(
            "this model has no chat template; use /v1/completions, or start the server with "
            "--template plain.",
            code="no_chat_template",
        )
    messages = _messages(value)
    _require_length(sum(len(one["content"]) for one in messages), served, "messages")
    try:
        return served.template.encode(
            served.tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            trust_user_tokens=served.trust_user_tokens,
            context=served.context,
        )
    except ValueError as error:
        # The template is called by its path, which is no client's business.
        message = str(error).replace(served.template.name, "the chat template")
        raise ApiError(message, param="messages") from None


def _messages(value: Any) -> list[dict[str, str]]:
    """Messages with a role and a text each; the roles are checked by the template."""
    if not isinstance(value, list) or not value:
        raise ApiError("messages should be a list of at least one message.", param="messages")
    messages = []
    for number, message in enumerate(value):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise ApiError(f"{where} should be an object with role and content.", param="messages")
        fields = _Fields(message, ("role", "content"), where, f"{where}.")
        role, content = fields.required("role"), fields.required("content")
        if isinstance(content, list):
            content = "\n".join(_part(part, f"{where}.content") for part in content)
        if not isinstance(role, str) or not isinstance(content, str):
            raise ApiError(f"{where} should have a role and a text as content.", param="messages")
        # Newer clients give the instructions of a system message this role.
        messages.append({"role": "system" if role == "developer" else role, "content": content})
    return messages


def _part(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        if stranger := next((name for name in part if name not in ("type", "text")), None):
            raise ApiError(
                f"{where} has a part with the field {printable(stranger, 40)!r}; "
                "a text part has type and text.",
                param="messages",
            )
        return str(part["text"])
    raise ApiError(f"{where} has a part that is not a text; the model reads text.", param=where)


def _sampling(fields: _Fields, served: ServedModel) -> Sampling:
    given: dict[str, Any] = {
        "temperature": fields.number("temperature", 0.0, 1e9, "a number of 0 or above"),
        "top_p": fields.number("top_p", 1e-9, 1.0, "a number above 0 and at most 1"),
        "min_p": fields.number("min_p", 0.0, 1.0, "a number from 0 to 1"),
        "repetition_penalty": fields.number("repetition_penalty", 1e-9, 1e9, "a number above 0"),
        "presence_penalty": fields.number("presence_penalty", -2.0, 2.0, "a number from -2 to 2"),
        "frequency_penalty": fields.number("frequency_penalty", -2.0, 2.0, "a number from -2 to 2"),
        "top_k": fields.integer("top_k", None, -1, 2**31),
    }
    given = {name: value for name, value in given.items() if value is not None}
    for name in ("top_k", "min_p"):  # 0 and -1 restrict nothing
        if name in given and given[name] <= 0:
            given[name] = None
    biases = fields.values.get("logit_bias", {})
    if not isinstance(biases, dict) or len(biases) > MOST_BIASED:
        raise fields.wrong("logit_bias", f"an object of up to {MOST_BIASED} token ids")
    pairs = _Fields(biases, tuple(biases), "logit_bias", "logit_bias.")
    for name in pairs.values:
        pairs.number(name, -100.0, 100.0, "a number from -100 to 100")
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise ApiError(
                f"logit_bias names {printable(name, 40)!r}, which is no token id.",
                param="logit_bias",
            )
        _require_vocabulary([int(name)], served, "logit_bias")
    given["logit_bias"] = tuple((int(name), float(value)) for name, value in pairs.values.items())
    with _refused():
        return replace(served.defaults, **given)


def _stop_ids(fields: _Fields, served: ServedModel, ends: Iterable[int]) -> frozenset[int]:
    expected = f"a list of up to {MOST_STOPS} token ids"
    ids = fields.listed("stop_token_ids", int, MOST_STOPS, expected)
    if ids:
        _require_vocabulary(ids, served, "stop_token_ids")
    return frozenset(ids) if fields.flag("ignore_eos") else frozenset([*ids, *ends])


def _own_fields(fields: _Fields, served: ServedModel) -> dict[str, Any]:
    """What the field ``fenchel`` asks for, as arguments of ``Request``."""
    own = fields.mapping("fenchel", (*DECODING_FIELDS, *TRACE_FIELDS))
    traced = "fenchel" in fields.values and not own.values.keys() & {*DECODING_FIELDS}
    traced = traced or bool(own.values.keys() & {*TRACE_FIELDS})
    return {
        "draft": own.integer("draft", 0, 0, MOST_DRAFT),
        "past_context": own.flag("past_context"),
        "steering": _steering(own, served),
        "trace": _trace(own, served.config) if traced else None,
    }


def _most_tokens(own: Mapping[str, Any], served: ServedModel) -> int:
    """New tokens at most."""
    return MOST_TOKENS if own["past_context"] else served.context


def _trace(fields: _Fields, config: ModelConfig) -> TraceSettings:
    """What is measured of the attention of new tokens."""
    switches = {name: fields.flag(name) for name in ("entropy", "sensitivity", "confidence")}
    attention, chosen = fields.values.get("attention", False), None
    if attention is True:
        chosen = TraceAttention()
    elif attention is not False:
        chosen = _traced_attention(fields.mapping("attention", ("layers", "heads", "top")), config)
    settings = TraceSettings(attention=chosen, **switches)
    if settings.observes and config.sinks and config.sink_score == "token":
        raise ApiError(
            "the sinks of this model are computed from its stream, which the keys in a cache do "
            "not show: the attention of new tokens is not traced.",
            param="fenchel",
        )
    return settings


def _traced_attention(fields: _Fields, config: ModelConfig) -> TraceAttention:
    layers, heads = None, fields.values.get("heads", "mean")
    if fields.values.get("layers", "all") != "all":
        expected = f'"all" or a list of 1 to {config.layers} numbers from 0 to {config.layers - 1}'
        layers = tuple(fields.listed("layers", int, config.layers, expected))
        if not layers or not 0 <= min(layers) <= max(layers) < config.layers:
            raise fields.wrong("layers", expected)
    if heads not in ("mean", "all"):
        raise fields.wrong("heads", '"mean" or "all"')
    top = fields.integer("top", 8, 1, MOST_TOP) or 8
    count = config.layers if layers is None else len(layers)
    weights = count * (1 + config.heads if heads == "all" else 1) * top
    if weights > MOST_WEIGHTS:
        raise ApiError(
            f"fenchel.attention asks for {weights:,} weights per token and gets {MOST_WEIGHTS:,} "
            "at most; name fewer layers or a smaller top.",
            param="fenchel.attention",
        )
    return TraceAttention(layers=layers, heads=heads, top=top)


def _steering(fields: _Fields, served: ServedModel) -> Steering | None:
    """What steers a request: the directions of the server, at its own strengths where it has any.

    Emphasised words are found in the prompts later, by ``_call``.
    """
    strengths = {name: one.strength for name, one in served.directions.items()}
    if "steer" in fields.values:
        expected, strengths = "an object of names and strengths", {}
        named = fields.mapping("steer", served.directions, expected)
        for name in fields.values["steer"]:  # null is the strength of the file
            least, most = -MOST_STRENGTH, MOST_STRENGTH
            strength = named.number(name, least, most, f"a number from {least:g} to {most:g}")
            own = served.directions[name].strength
            strengths[name] = own if strength is None else strength
    vectors: dict[int, Tensor] = {}
    for name, strength in strengths.items():
        for layer, v_M in served.directions[name].vectors.items():
            added = strength * v_M
            vectors[layer] = vectors[layer] + added if layer in vectors else added
    words = fields.listed("emphasise", str, MOST_STOPS, f"a list of up to {MOST_STOPS} texts")
    if not all(words):
        raise fields.wrong("emphasise", f"a list of up to {MOST_STOPS} texts")
    layers = fields.listed("emphasis_layers", int, math.inf, "a list of layers, from 1")
    bias = fields.number("emphasis", -MOST_BIAS, MOST_BIAS, f"a number up to {MOST_BIAS:g}")
    emphasis = None
    if words:
        chosen = frozenset(layers) if "emphasis_layers" in fields.values else None
        bias = 1.0 if bias is None else bias
        emphasis = Emphasis(texts=tuple(words), bias=bias, layers=chosen)
    budget = fields.number("token_kl", 1e-6, 1e6, "a number of nats above 0")
    betas = _named(fields, "head_beta", (int, float), "numbers")
    maps = _named(fields, "head_choice", (str,), "names of maps")
    with _refused("fenchel"):
        heads = head_choices(served.config, betas, maps)
        steering = Steering(vectors, emphasis, budget, heads)
        steering.require(served.config)
    return steering if vectors or steering.changes_attention else None


def _named(fields: _Fields, name: str, kinds: tuple[type, ...], what: str) -> dict[str, Any]:
    """An object of heads and values of these types; empty where the field is left out."""
    value = fields.values.get(name, {})
    if not isinstance(value, dict) or any(type(one) not in kinds for one in value.values()):
        raise fields.wrong(name, f'an object of heads and {what}, as in {{"2.1": ...}}')
    return value


def _echo(tokenizer: TextTokenizer, ids: Sequence[int], text: str | None) -> tuple[str, ...]:
    """The text of each token of a prompt; joined they are the prompt as it was given."""
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(token) for token in ids]
    pieces[-1] += detokenizer.flush()
    if text is None or text == "".join(pieces):
        return tuple(pieces)
    cut, at = [], 0
    for piece in pieces:  # a tokenizer that does not return every text as it was
        cut.append(text[at : at + len(piece)])
        at += len(piece)
    cut[-1] += text[at:]
    return tuple(cut)


# --- updates to responses


class TokenTexts:
    """The text and the bytes of single tokens."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        # The first token of a text may lose its space, so each is decoded after another one.
        probe = tokenizer.encode("a")
        self._before = [*probe, *probe]
        self._skip = len(self._decode(self._before))

    def text(self, token: int) -> str:
        """The text of a token within a text, with control tokens by their names."""
        if token not in self._texts:
            text = self._decode([*self._before, token])[self._skip :]
            if not text and token in self._tokenizer.library.get_added_tokens_decoder():
                text = self._tokenizer.id_to_token(token) or text
            self._texts[token] = text
        return self._texts[token]

    def bytes(self, token: int) -> list[int] | None:
        """The bytes of a token's text; None where they are not known."""
        text = self.text(token)
        if REPLACEMENT not in text:
            return list(text.encode())
        found = self._tokenizer.token_bytes(token)
        return None if found is None else list(found)

    def label(self, token: int) -> str:
        """The text of a token; its bytes in hexadecimal where they are part of a character.

        In the manner of OpenAI: ``bytes:\\xe6\\x9d``.
        """
        text = self.text(token)
        if REPLACEMENT not in text or (found := self.bytes(token)) is None:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


@dataclass
class _Choice:
    """What has arrived of one choice."""

    request: Request
    echo: tuple[str, ...]
    begun: bool = False
    tokens: list[Token] = field(default_factory=list)
    """The new ones."""
    text: str = ""
    """All of it, with an echo."""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    stop_reason: str | None = None


class Reply:
    """The answer to a call, built from the updates of its requests."""

    def __init__(self, call: Call) -> None:
        self.call, self.error = call, ""
        n = call.n
        self.choices = [
            _Choice(request, call.echoes[number // n] if call.echoes else ())
            for number, request in enumerate(call.requests)
        ]
        self._cancel_reason = ""

    @property
    def finished(self) -> bool:
        """Whether every choice has ended, or one has failed."""
        return bool(self.error) or all(choice.finish for choice in self.choices)

    @property
    def has_tokens(self) -> bool:
        """Whether any token has arrived."""
        return any(choice.tokens for choice in self.choices)

    def end_early(self, reason: str) -> None:
        """Requests that are cancelled from here on end with what they have, for this reason."""
        self._cancel_reason = reason

    def add(self, number: int, update: Update) -> list[dict[str, Any]]:
        """Take an update of a choice; returns the chunks that a stream sends for it."""
        choice, call = self.choices[number], self.call
        if update.finish == "error" or (update.finish == "cancelled" and not self._cancel_reason):
            self.error = update.error or "the server stops before the answer is complete."
            return []
        tokens = list(update.tokens)
        shown = tokens
        if not choice.begun:
            choice.begun = True
            shown = [*self._echoed(choice, update), *tokens]
        offset = len(choice.text)
        text = "".join(token.text for token in shown) + update.flush
        logprobs = self._logprobs(choice, shown, offset)
        choice.tokens += tokens
        choice.text += text
        if logprobs is not None:
            choice.logprobs.append(logprobs)
        if update.finish is not None:
            stopped = update.finish == "stop"
            choice.finish = "stop" if stopped else "length"
            if update.finish == "cancelled":
                choice.stop_reason = self._cancel_reason
        if not call.stream:
            return []
        more = self._extras(choice, tokens)
        chunks = []
        if text or logprobs is not None or more:
            chunks.append(self._chunk(number, text, logprobs, None, more))
        if choice.finish is not None:
            reason = {} if choice.stop_reason is None else {"stop_reason": choice.stop_reason}
            chunks.append(self._chunk(number, "", None, choice.finish, reason))
        return chunks

    def first_chunks(self) -> list[dict[str, Any]]:
        """What a stream begins with: the role of each choice of a chat, the ids of the prompt."""
        call, chunks = self.call, []
        for number, choice in enumerate(self.choices):
            ids = {"prompt_token_ids": [*choice.request.prompt]} if call.return_token_ids else {}
            if call.is_chat:
                chunks.append(self._chunk(number, "", None, None, {}, role=True) | ids)
            elif ids:
                chunks.append(self._chunk(number, "", None, None, ids))
        return chunks

    def last_chunks(self) -> list[dict[str, Any]]:
        """What a stream ends with: the usage, where it is requested."""
        return [self._body([]) | {"usage": self.usage()}] if self.call.include_usage else []

    def response(self) -> dict[str, Any]:
        """The whole answer."""
        call, choices = self.call, []
        for number, choice in enumerate(self.choices):
            value: dict[str, Any] = {"index": number}
            if call.is_chat:
                value["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
            else:
                value["text"] = choice.text
            value["logprobs"] = _joined(choice.logprobs)
            value["finish_reason"] = choice.finish
            if choice.stop_reason is not None:
                value["stop_reason"] = choice.stop_reason
            if call.return_token_ids and not call.is_chat:
                value["prompt_token_ids"] = list(choice.request.prompt)
            choices.append(value | self._extras(choice, choice.tokens))
        body = self._body(choices) | {"usage": self.usage()}
        if call.return_token_ids and call.is_chat:
            body["prompt_token_ids"] = list(call.requests[0].prompt)
        return body

    def usage(self) -> dict[str, int]:
        """Tokens of the prompts, each counted once, and of all choices."""
        prompt = sum(len(request.prompt) for request in self.call.requests[:: self.call.n])
        new = sum(len(choice.tokens) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        call = self.call
        kind = "text_completion"
        if call.is_chat:
            kind = "chat.completion.chunk" if call.stream else "chat.completion"
        return {
            "id": call.id,
            "object": kind,
            "created": call.created,
            "model": call.served.name,
            "system_fingerprint": call.served.fingerprint,
            "choices": choices,
        }

    def _chunk(
        self,
        number: int,
        text: str,
        logprobs: dict[str, Any] | None,
        finish: str | None,
        more: Mapping[str, Any],
        *,
        role: bool = False,
    ) -> dict[str, Any]:
        value: dict[str, Any] = {"index": number}
        if not self.call.is_chat:
            value["text"] = text
        elif role:
            value["delta"] = {"role": "assistant", "content": ""}
        else:
            value["delta"] = {} if finish is not None else {"content": text}
        body = self._body([value | {"logprobs": logprobs, "finish_reason": finish, **more}])
        return body | {"usage": None} if self.call.include_usage else body

    def _extras(self, choice: _Choice, tokens: Sequence[Token]) -> dict[str, Any]:
        """The requested fields beyond OpenAI's, of these tokens."""
        more: dict[str, Any] = {}
        if not tokens:
            return more
        if self.call.return_token_ids:
            more["token_ids"] = [token.id for token in tokens]
        if choice.request.trace is not None:
            more["fenchel"] = [t.trace.as_json() for t in tokens if t.trace is not None]
        return more

    def _echoed(self, choice: _Choice, update: Update) -> list[Token]:
        if not choice.echo:
            return []
        scored = update.prompt or tuple(Token(id, "") for id in choice.request.prompt)
        return [token._replace(text=text) for token, text in zip(scored, choice.echo, strict=True)]

    def _logprobs(
        self, choice: _Choice, tokens: Sequence[Token], offset: int
    ) -> dict[str, Any] | None:
        if choice.request.logprobs is None or not tokens:
            return None
        texts, with_ids = self.call.served.token_texts, self.call.return_token_ids
        content = []
        if self.call.is_chat or with_ids:
            content = [_scored(token, texts, with_ids=with_ids) for token in tokens]
        if self.call.is_chat:
            return {"content": content, "refusal": None}
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        columns = {
            "tokens": [texts.label(token.id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [_top(token, texts.label) for token in tokens],
            "text_offset": offsets,
        }
        return {**columns, "content": content} if with_ids else columns


def _joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The log-probabilities of several updates as one object."""
    if not parts:
        return None
    return {
        name: None if value is None else [one for part in parts for one in part[name]]
        for name, value in parts[0].items()
    }


def _top(token: Token, label: Callable[[int], str]) -> dict[str, float] | None:
    """The likeliest tokens and the chosen one, by their texts; of equal texts the likelier."""
    if token.logprob is None:
        return None
    top: dict[str, float] = {}
    for id, logprob in (*token.top, (token.id, token.logprob)):
        top[label(id)] = max(logprob, top.get(label(id), LOWEST))
    return top


def _scored(token: Token, texts: TokenTexts, *, with_ids: bool) -> dict[str, Any]:
    def entry(id: int, logprob: float | None) -> dict[str, Any]:
        text = {"token": texts.text(id), "logprob": _finite(logprob), "bytes": texts.bytes(id)}
        return {"id": id, **text} if with_ids else text

    return entry(token.id, token.logprob) | {"top_logprobs": [entry(*one) for one in token.top]}


def _finite(logprob: float | None) -> float | None:
    return logprob if logprob is None else max(logprob, LOWEST)


def model_card(served: ServedModel) -> dict[str, Any]:
    """The model in /v1/models."""
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "fenchel",
        "max_model_len": served.context,
    }


# --- embeddings and tokens


@dataclass(frozen=True, kw_only=True)
class EmbeddingCall:
    """A body of /v1/embeddings that was checked."""

    served: ServedModel
    inputs: tuple[tuple[int, ...], ...]
    base64: bool

    def response(self, vectors: Sequence[Sequence[float]]) -> dict[str, Any]:
        """The answer, with a vector per input; base64 is that of little-endian float32."""
        tokens = sum(map(len, self.inputs))
        return {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": number,
                    "embedding": _base64(vector) if self.base64 else list(vector),
                }
                for number, vector in enumerate(vectors)
            ],
            "model": self.served.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


def embedding_call(body: Mapping[str, Any], served: ServedModel) -> EmbeddingCall:
    """The call of a body of /v1/embeddings."""
    fields = _Fields(body, EMBEDDING_FIELDS, "/v1/embeddings")
    fields.model(served)
    width = served.config.width
    fields.integer("dimensions", width, width, width)
    form = fields.values.get("encoding_format", "float")
    if form not in ("float", "base64"):
        raise fields.wrong("encoding_format", '"float" or "base64"')
    inputs = _prompts(fields, served, "input", served.tokenizer.encode_whole)
    return EmbeddingCall(
        served=served, inputs=tuple(tuple(ids) for ids, _ in inputs), base64=form == "base64"
    )


def _base64(vector: Sequence[float]) -> str:
    return b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def tokenize(body: Mapping[str, Any], served: ServedModel) -> dict[str, Any]:
    """The answer to a body of /tokenize: the ids of a prompt, or of the messages of a chat.

    A prompt that is the name of a control token and nothing else has its id. In any other text such
    a name is text, as in prompts.
    """
    fields = _Fields(body, TOKENIZE_FIELDS, "/tokenize")
    fields.model(served)
    whole = fields.flag("add_special_tokens", default=True)
    prompted = fields.flag("add_generation_prompt", default=True)
    if ("prompt" in fields.values) == ("messages" in fields.values):
        raise ApiError("/tokenize takes a prompt or messages.", param="prompt")
    if "messages" in fields.values:
        messages = fields.values["messages"]
        ids = _conversation_ids(messages, served, add_generation_prompt=prompted)
    else:
        text = fields.values["prompt"]
        if not isinstance(text, str):
            raise fields.wrong("prompt", "a text")
        control = served.tokenizer.control_tokens.get(text)
        with _refused("prompt"):
            if control is not None:
                ids = [control]
            else:
                ids = _text_ids(text, served) if whole else served.tokenizer.encode(text)
    value = {"count": len(ids), "max_model_len": served.context, "tokens": ids}
    if fields.flag("return_token_strs"):
        value["token_strs"] = [served.token_texts.label(token) for token in ids]
    return value


def detokenize(body: Mapping[str, Any], served: ServedModel) -> dict[str, Any]:
    """The answer to a body of /detokenize: the text of ids, with control tokens by their names."""
    fields = _Fields(body, DETOKENIZE_FIELDS, "/detokenize")
    fields.model(served)
    if ids := fields.token_ids("tokens"):
        _require_vocabulary(ids, served, "tokens")
    return {"prompt": served.tokenizer.decode(ids, skip_special_tokens=False)}


class LensCall(NamedTuple):
    """A body of /lens: what the layers would write after these tokens."""

    ids: list[int]
    next: int | None
    top: int

    def response(self, laws: Iterable[Any], served: ServedModel) -> dict[str, Any]:
        """The answer: the likeliest tokens of every layer, and the probability of ``next``."""
        text = served.token_texts.text
        rows = [
            {
                "layer": law.layer,
                "top": [
                    {"id": id, "token": text(id), "p": p}
                    for id, p in zip(law.tokens, law.probabilities, strict=True)
                ],
                "p": law.next,
            }
            for law in laws
        ]
        return {"object": "lens", "model": served.name, "layers": rows}


def lens_call(body: Mapping[str, Any], served: ServedModel) -> LensCall:
    """The call of a body of /lens."""
    fields = _Fields(body, LENS_FIELDS, "/lens")
    fields.model(served)
    ids = fields.token_ids("tokens")
    _require_ids(ids, served, "tokens")
    last = fields.integer("next", None, 0, served.config.vocabulary - 1)
    return LensCall(ids, last, fields.integer("top", 5, 1, MOST_LOGPROBS) or 5)


def tokenizer_info(served: ServedModel) -> dict[str, Any]:
    """The answer of /tokenizer_info: what a client needs to format a prompt by itself.

    The tokens that a chat template names are those of its directory.
    """
    tokenizer, template = served.tokenizer, served.template
    begin = tokenizer.begin_ids
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": tokenizer.vocabulary_size,
        "model_max_length": served.context,
        "add_bos_token": bool(begin),
        "bos_token": tokenizer.id_to_token(begin[0]) if begin else None,
        "eos_token": tokenizer.id_to_token(served.ends[0]) if served.ends else None,
        **({} if template is None else template.special_tokens),
        "chat_template": None if template is None else template.source,
    }
