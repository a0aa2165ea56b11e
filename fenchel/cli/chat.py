'''fenchel chat: a conversation with a model, in a terminal or through a pipe.

The conversation itself is generation/conversation.py. Where it grows too long for the context, its
oldest turns are no longer given to the model, and a sentence says so; /save writes all of it.

**Lines.** A line is a message; one that begins with """ opens a message of several lines, which
ends with """. A line that begins with / is a command, and // begins a message with a slash. On a
terminal an error is a sentence and the conversation goes on; in a pipe it ends the command.

**Ctrl-C** on a terminal stops the answer, and what was written of it stays in the conversation. The
signal may come within a forward pass, so the cache is discarded.
'''

import json as json_format
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from fenchel.cli.console import (
    LOADED_AS_STORED,
    Console,
    LoadFlags,
    ModelPath,
    Switch,
    Whole,
    Words,
    WordWrap,
    break_lines,
    for_stdout,
    loading,
    require_inputs,
    width_of,
)
from fenchel.cli.generate import (
    PLAIN_DECODING,
    DecodingFlags,
    SamplingFlags,
    sentence,
    token_json,
)
from fenchel.cli.steer import NOT_STEERED, SteerFlags
from fenchel.config import did_you_mean, parse_value
from fenchel.files import describe, printable, require_output, write_atomic
from fenchel.hub_cache import model_name

if TYPE_CHECKING:
    from fenchel.generation import Answer, Conversation, GenerationSettings

HELP = {
    "/attention [N]": "what the first N tokens of the last answer read",
    "/clear": "begin a new conversation with the same system message",
    "/help": "this list",
    "/quit": "end, like Ctrl-D",
    "/retry": "draw the last answer again",
    "/save FILE": "write the conversation as JSON-lines for fenchel tune",
    "/settings [NAME=VALUE]": "show the settings, or change those of sampling",
    "/system [TEXT]": "replace the system message, or remove it",
    "/undo": "remove the last message and its answer",
    "/why LAYER.HEAD[:N]": "why a head attends there, for token N of the last answer",
    '"""': "begin or end a message of several lines",
    "//": "begin a message with a slash",
}
"""What a line can be beside a message."""
COMMANDS = tuple(words for words in HELP if words[1:].strip('/"'))
MULTILINE = '"""'
SHOWN = 32
"""Tokens of which /attention shows a line, unless it is given a number."""


def run(
    directory: ModelPath,
    /,
    *,
    system: Words | None = None,
    template: str | None = None,
    trust_user_tokens: Switch = False,
    max_new_tokens: Whole = 1024,
    sampling: SamplingFlags = SamplingFlags(),  # noqa: B008
    steering: SteerFlags = NOT_STEERED,
    stop: Annotated[list[str] | None, Parameter(negative="")] = None,
    decoding: DecodingFlags = PLAIN_DECODING,
    past_context: Switch = False,
    attention: Switch = False,
    loading_as: LoadFlags = LOADED_AS_STORED,
    json: Switch = False,
) -> int:
    """Hold a conversation with the model of a run directory or a Hugging Face directory.

    Messages are read from standard input, one per line, and answers are written to standard output.
    /help lists the commands that can stand in place of a message. Ctrl-C stops an answer and Ctrl-D
    ends the conversation. A sampling flag that is left out is taken from the directory's
    generation_config.json where that has it.

    Parameters
    ----------
    system
        The system message, before all others.
    template
        "plain" for lines of role and content, or a file with a jinja2 template; the chat template
        of the directory by default.
    trust_user_tokens
        Read control tokens in messages, such as <|im_end|>, as control tokens and not as text.
    max_new_tokens
        Tokens of an answer at most.
    stop
        Text that ends an answer, beside the stops of the template; may be given several times.
    past_context
        Let an answer go on when the context is full, with its newest half.
    attention
        What the attention of every token of an answer read, with --json; /attention shows it.
    json
        Print each answer as a line of JSON.
    """
    if sys.stdin is None:
        raise ValueError("standard input is closed; messages are read from it.")
    if (decoding.logprobs is not None or attention) and not json:
        raise ValueError("--logprobs and --attention need --json; /attention shows the attention.")
    require_inputs(directory)
    if template is None and (directory / "checkpoints").is_dir():
        files = ("base", "chat_template.jinja", "chat_template.json", "tokenizer_config.json")
        if not any((directory / name).exists() for name in files):  # a run that tunes no chat model
            raise ValueError(_no_template(directory))
    with loading():
        from fenchel.checkpoints.tokenizer import (
            end_ids,
            read_chat_template,
            suggested_generation,
        )
        from fenchel.cli.token_attention import TRACED
        from fenchel.generation import Conversation, GenerationSettings
        from fenchel.generation.sampling import resolve_sampling

    suggested, config_file = suggested_generation(directory)
    chosen, from_checkpoint = resolve_sampling(suggested, sampling.given())
    model, tokenizer, config = loading_as.load(directory)
    if config.kind == "encoder":
        raise ValueError(f"a chat needs a decoder, and the model of {directory} is an encoder.")
    model = decoding.within_context(model)
    if (chat_template := read_chat_template(directory, template)) is None:
        raise ValueError(_no_template(directory))
    stops = [*end_ids(directory, tokenizer), *chat_template.stops(tokenizer), *(stop or ())]
    if not stops:
        say("No token or text ends an answer of this model; --stop TEXT can give one.")
    start = None if config.kind == "decoder" else suggested.decoder_start
    if config.kind != "decoder" and start is None:
        start = tokenizer.pad_id
    conversation = Conversation(
        model,
        tokenizer,
        chat_template,
        GenerationSettings(
            max_new_tokens=max_new_tokens,
            sampling=chosen,
            stop=list(dict.fromkeys(stops)),
            past_context=past_context,
            trace=TRACED if attention else None,
            steering=steering.steering(model),
            **decoding.given(),
        ),
        system=system,
        trust_user_tokens=trust_user_tokens,
        decoder_start=start,
        interrupted=lambda error: not _ends_command(error),
        on_left_out=lambda tokens, turns: say(
            f"The conversation has {tokens:,} tokens and the model reads "
            f"{model.config.context:,}: from here on it does not see the first "
            f"{count(turns, 'turn')}."
        ),
        on_missing=lambda words: say(
            f"The conversation has no text {printable(words, 60)!r} to emphasise."
        ),
    )
    if from_checkpoint and not json:
        say(sentence(config_file, from_checkpoint))
    repl = Repl(conversation, json=json, reads=[directory, loading_as.adapter])
    if repl.interactive:
        size = sum(p.numel() for p in model.parameters())
        say(
            f"{printable(model_name(directory))}: {size:,} parameters, context "
            f"{model.config.context:,}. /help lists commands, Ctrl-C stops an answer, Ctrl-D ends."
        )
    with _interrupts() if repl.interactive else nullcontext():
        repl.loop()
    return 0


class Repl:
    """Reads messages and commands from standard input and prints answers and results."""

    def __init__(
        self,
        conversation: "Conversation",
        *,
        json: bool = False,
        reads: Sequence[Path | None] = (),
    ) -> None:
        """``reads`` are the directories that /save does not write to."""
        self.conversation, self.json, self.reads = conversation, json, reads
        self.interactive = sys.stdin.isatty()
        self.edited = self.interactive and sys.stdout.isatty()
        """Whether readline edits the lines."""
        if self.edited:
            with suppress(ImportError):  # Python can be built without it
                import readline  # noqa: F401

    def loop(self) -> None:
        """Answer until the input ends or /quit."""
        while True:
            try:
                if not self.step(self.read()):
                    return
            except EOFError:
                if self.edited:
                    print()  # the line of the prompt
                return
            except KeyboardInterrupt as error:
                if _ends_command(error):
                    raise
                say("\nCtrl-D or /quit ends.")
            except (ValueError, OSError, MemoryError, RuntimeError) as error:
                if not self.interactive or (problem := _sentence(error)) is None:
                    raise
                say(f"fenchel: {problem}")

    def read(self) -> str:
        """The next line, or the lines between two \"\"\"; EOFError at the end of the input."""
        line = self._line("> ")
        if not line.startswith(MULTILINE):
            return line
        lines = [line.removeprefix(MULTILINE)]
        while not lines[-1].rstrip().endswith(MULTILINE):
            try:
                lines.append(self._line(". "))
            except EOFError:
                raise ValueError(f"the input ends within {MULTILINE}.") from None
        lines[-1] = lines[-1].rstrip().removesuffix(MULTILINE)
        text = "\n".join(lines)
        return f"/{text}" if text.startswith("/") else text  # a message, not a command

    def _line(self, prompt: str) -> str:
        try:
            if self.edited:
                line = input(prompt)
            else:
                if self.interactive:
                    print(prompt, end="", file=sys.stderr, flush=True)
                line = sys.stdin.readline()
        except OSError:  # a terminal that is gone would fail again and again
            raise EOFError from None
        if not self.edited and not line:
            raise EOFError
        try:
            line.encode()  # other bytes are read as halves of surrogate pairs
        except UnicodeEncodeError:
            raise ValueError("the message is not UTF-8.") from None
        return line.removesuffix("\n")

    def step(self, line: str) -> bool:
        """Answer a message or follow a command; False after /quit."""
        if not line.strip():
            return True
        if not line.startswith("/") or line.startswith("//"):
            message = line.removeprefix("/") if line.startswith("//") else line
            self._print_answer(lambda show: self.conversation.ask(message, show))
            return True
        name, _, rest = line.strip().partition(" ")
        return self._follow(name, rest.strip())

    def _follow(self, name: str, rest: str) -> bool:
        conversation = self.conversation
        takes = {name: words for name, *words in map(str.split, COMMANDS)}
        if name not in takes:
            raise ValueError(
                f"there is no command {printable(name)}, and // begins a message with a slash; "
                f"{did_you_mean(name, takes, show=str)}"
            )
        if rest and not takes[name]:
            raise ValueError(f"{name} takes nothing behind it, got {printable(rest)!r}.")
        match name:
            case "/quit":
                return False
            case "/help":
                width = max(map(len, HELP))
                self._print("\n".join(f"{words:<{width}}  {text}" for words, text in HELP.items()))
            case "/clear":
                conversation.clear()
                say("A new conversation begins.")
            case "/undo":
                message = " ".join(conversation.undo().split())
                say(f"Removed: {printable(message, 60)}")
            case "/system":
                conversation.set_system(rest or None)
                say("The system message is replaced." if rest else "There is no system message.")
            case "/retry":
                self._print_answer(conversation.retry)
            case "/save":
                self._save(rest)
            case "/settings":
                self._settings(rest)
            case "/attention":
                self._attention(rest)
            case "/why":
                self._why(rest)
        return True

    def _print_answer(self, answer: "Callable[[Callable[[str], None]], Answer]") -> None:
        wrap = WordWrap(width_of(sys.stdout))

        def show(piece: str) -> None:
            if not self.json:
                print(wrap(for_stdout(piece)), end="", flush=True)

        given = answer(show)
        if self.json:
            tokens = len(given.ids) - given.start
            value: dict[str, Any] = {"content": given.content, "tokens": tokens, "end": given.end}
            settings = self.conversation.settings
            if settings.logprobs is not None or settings.trace is not None:
                tokenizer = self.conversation.tokenizer
                value["drawn"] = [token_json(token, tokenizer) for token in given.tokens]
            print(json_format.dumps(value, ensure_ascii=False), flush=True)
        else:
            print(wrap("\n"), end="\n" if self.edited else "", flush=True)
        if not self.json:
            self._say_end(given)

    def _say_end(self, answer: "Answer") -> None:
        conversation = self.conversation
        if answer.end == "length":
            most = conversation.settings.max_new_tokens
            say(f"The answer is cut off at {count(most, 'token')} (--max-new-tokens).")
        elif answer.end == "context":
            context = conversation.model.config.context
            say(f"The answer is cut off: the context of {context:,} tokens is full.")
        elif answer.end == "interrupt" and not answer.content:
            say("Stopped before the first word; the message is not part of the conversation.")

    def _save(self, name: str) -> None:
        if not name:
            raise ValueError("/save needs the name of a file.")
        if not self.conversation.turns:
            raise ValueError("there is nothing to save yet.")
        file = Path(os.path.expanduser(name))
        line = json_format.dumps({"messages": self.conversation.messages()}, ensure_ascii=False)
        require_output(file, new=True, reads=self.reads)
        write_atomic(file, line + "\n")
        turns = count(len(self.conversation.turns), "turn")
        say(f"Saved {turns} in {shlex.quote(printable(file, 4096))}.")

    def _settings(self, changes: str) -> None:
        conversation = self.conversation
        settings, config = conversation.settings, conversation.model.config
        for change in changes.split():
            settings = change_setting(settings, change)
        conversation.settings = settings
        if changes:
            return
        stops = (
            printable(conversation.tokenizer.id_to_token(stop) or stop)
            if isinstance(stop, int)
            else repr(stop)
            for stop in settings.stop
        )
        weight = conversation.model.lm_head_weight
        rows = {
            **{name: getattr(settings.sampling, name) for name in SAMPLING},
            "max_new_tokens": settings.max_new_tokens,
            "stops": ", ".join(stops) or "none",
            "cache": settings.cache,
            "draft": settings.draft,
            "template": conversation.template.name,
            "system": "none" if conversation.system is None else printable(conversation.system),
            "context": f"{conversation.used:,} of {config.context:,} tokens, "
            f"{count(len(conversation.turns), 'turn')}, {conversation.left_out} left out",
            "device": f"{weight.device}, {str(weight.dtype).removeprefix('torch.')}",
        }
        self._print("\n".join(f"{n:<18}  {'none' if v is None else v}" for n, v in rows.items()))

    def _attention(self, number: str) -> None:
        from fenchel.cli.token_attention import TRACED, print_attention
        from fenchel.generation.attention_trace import trace_text

        if number and not (number.isdecimal() and int(number)):
            raise ValueError(f"/attention takes a number of tokens, got {printable(number)!r}.")
        conversation, answer = self.conversation, self._last_answer("/attention")
        steering = conversation.settings.steering
        if steering is not None and steering.changes_attention:
            flags = "--emphasise, --head-beta or --head-choice"
            raise ValueError(f"the attention of an answer with {flags} is not traced.")
        ids = answer.ids[: answer.start + int(number or SHOWN)]
        traces = trace_text(
            conversation.model,
            ids,
            answer.start,
            TRACED,
            vectors=None if steering is None else steering.vectors,
        )
        file = sys.stderr if self.json else sys.stdout
        print_attention(conversation.tokenizer, ids, traces, file=file)
        if steering is not None and steering.budget is not None:
            say("p and rank are those of the steered model, before --token-kl.")
        if len(ids) < len(answer.ids):
            say(f"The first {len(traces):,} of {len(answer.ids) - answer.start:,} tokens.")

    def _why(self, place: str) -> None:
        from fenchel.cli.inspect import head_and_tokens
        from fenchel.cli.inspection_tables import why_table
        from fenchel.interpretability import score_parts
        from fenchel.report.findings import why_finding

        layer, head, number, key = head_and_tokens(place, "/why")
        conversation, answer = self.conversation, self._last_answer("/why")
        if conversation.settings.steering is not None:
            raise ValueError("/why takes scores apart that nothing steers; leave out the steering.")
        length = len(answer.ids) - answer.start
        number = length if number == -1 else number
        if not 1 <= number <= length:
            raise ValueError(f"the last answer has tokens 1 to {length}, and no {number}.")
        ids = answer.ids[: answer.start + number - 1]  # token N is drawn after the one before it
        parts = score_parts(conversation.model, ids, layer, head, key=key)
        tokenizer = conversation.tokenizer
        tokens = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
        console = Console(quiet=self.json)
        console.terminal.print(why_table(parts, tokens))
        console.message(why_finding(parts, tokens))

    def _last_answer(self, command: str) -> "Answer":
        """The answer that a command is about."""
        conversation, answer = self.conversation, self.conversation.last
        if conversation.decoder_start is not None:
            raise ValueError(f"{command} needs a decoder without an encoder.")
        if answer is None or answer.start == len(answer.ids):
            raise ValueError("there is no answer whose attention could be shown.")
        return answer

    def _print(self, text: str) -> None:
        """A result of a command; with --json standard output is for answers alone."""
        print(text, file=sys.stderr if self.json else sys.stdout, flush=True)


SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Settings of sampling that /settings changes."""


def _no_template(directory: Path) -> str:
    return (
        f"{directory} has no chat template: its model was not made for conversations. "
        "--template plain writes them as lines of role and content; fenchel generate continues "
        "a text."
    )


def change_setting(settings: "GenerationSettings", change: str) -> "GenerationSettings":
    """The settings with NAME=VALUE, where VALUE is a number or none.

    >>> from fenchel.generation import GenerationSettings
    >>> change_setting(GenerationSettings(max_new_tokens=9), "top_k=5").sampling.top_k
    5
    """
    name, equals, text = change.partition("=")
    if name not in (*SAMPLING, "max_new_tokens"):
        known = did_you_mean(name, (*SAMPLING, "max_new_tokens"))
        raise ValueError(f"{printable(name)!r} is no setting that can be changed; {known}")
    value: Any = (
        None if text == "none" and name in ("top_k", "top_p", "min_p") else parse_value(text)
    )
    kinds = (int,) if name in ("top_k", "max_new_tokens") else (int, float)
    if not equals or not (type(value) in kinds or value is None):
        kind = "a whole number" if kinds == (int,) else "a number"
        raise ValueError(f"{name} takes {kind}, as in /settings {name}=1; got {printable(text)!r}.")
    if name == "max_new_tokens":
        return replace(settings, max_new_tokens=value)
    changed: dict[str, Any] = {name: value}
    return replace(settings, sampling=replace(settings.sampling, **changed))


def say(sentence: str) -> None:
    """A sentence on standard error."""
    text = break_lines(printable(sentence, None), width_of(sys.stderr))
    print(text, file=sys.stderr, flush=True)


def count(n: int, noun: str) -> str:
    """A number with its noun.

    >>> count(1, "turn"), count(1200, "token")
    ('1 turn', '1,200 tokens')
    """
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


@contextmanager
def _interrupts() -> Iterator[None]:
    """Within, Ctrl-C raises KeyboardInterrupt each time, without the signal as its argument."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # the shell may ignore it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _ends_command(error: KeyboardInterrupt) -> bool:
    """Whether it came from a signal that ends the command: a closed terminal, or no terminal."""
    return bool(error.args)


def _sentence(error: Exception) -> str | None:
    """An error after which the conversation can go on, as a sentence; None for any other."""
    if isinstance(error, OSError):
        return describe(error)
    if isinstance(error, ValueError):
        return str(error)
    from fenchel.train.hardware import out_of_memory

    shortage = out_of_memory(error)
    return None if shortage is None else f"memory ran out ({shortage}); /clear frees some."
