'''fenchel chat: a conversation with a model, in a terminal or through a pipe.

A turn is a message of the user and the answer to it:

    ids     = the conversation by the chat template of the model          data/chat.py
    tokens  = drawn one after another, up to a stop of the template       generation/decode.py
    content = their text, without the white space around it

A ``PrefixCache`` keeps keys and values from turn to turn, so that only what is new is read.

**Context.** An answer needs room for min(max_new_tokens, context / 4) tokens. Where the
conversation leaves less, its oldest turns are no longer given to the model, until it takes at most
half of the context: so this happens every few turns and not at each of them, and a sentence says
so. The system message stays. Nothing is removed from the conversation itself, which /save writes as
a whole.

**Lines.** A line is a message; one that begins with """ opens a message of several lines, which
ends with """. A line that begins with / is a command, and // begins a message with a slash. On a
terminal an error is a sentence and the conversation goes on; in a pipe it ends the command.

**Ctrl-C** on a terminal stops the answer, and what was written of it stays in the conversation. The
signal may come within a forward pass, so the cache is discarded.
'''

import json as json_format
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from cyclopts import Parameter
from rich.console import Console as Terminal

from fenchel.cli.console import (
    DtypeName,
    Whole,
    Words,
    WordWrap,
    break_lines,
    device_and_dtype,
    for_stdout,
    load_checkpoint,
    loading,
    width_of,
)
from fenchel.cli.generate import DEFAULTS, SamplingFlags, sampling_settings, sentence
from fenchel.config import did_you_mean, parse_value
from fenchel.files import describe, printable, write_atomic

if TYPE_CHECKING:
    import torch

    from fenchel.data import ChatTemplate, TextTokenizer
    from fenchel.data.chat import Message
    from fenchel.generation import GenerationSettings
    from fenchel.model import Transformer

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
    '"""': "begin or end a message of several lines",
    "//": "begin a message with a slash",
}
"""What a line can be beside a message."""
COMMANDS = tuple(words for words in HELP if words[1:].strip('/"'))
MULTILINE = '"""'
TRACED = 32
"""Tokens of which /attention shows a line, unless it is given a number."""
End = Literal["stop", "length", "context", "interrupt"]


class Answer(NamedTuple):
    """An answer, and the ids that it was computed from."""

    content: str
    ids: list[int]
    """Those of the conversation, then those of the answer without its stop."""
    start: int
    """Where the answer begins in ``ids``."""
    end: End
    """A stop, max_new_tokens, the context, or Ctrl-C."""


class Conversation:
    """Messages and the model that answers them."""

    def __init__(
        self,
        model: "Transformer",
        tokenizer: "TextTokenizer",
        template: "ChatTemplate",
        settings: "GenerationSettings",
        *,
        system: str | None = None,
        trust_user_tokens: bool = False,
        generator: "torch.Generator | None" = None,
    ) -> None:
        from fenchel.generation import PrefixCache

        self.model, self.tokenizer, self.template = model, tokenizer, template
        self.settings, self.trust_user_tokens = settings, trust_user_tokens
        self.generator = generator
        self.system: str | None = None
        self.turns: list[tuple[str, str]] = []
        """Messages of the user, and their answers."""
        self.left_out = 0
        """Turns at the beginning that the model does not read again."""
        self.last: Answer | None = None
        """The answer of the last turn, if it has been computed and not removed."""
        self.used = 0
        """Tokens of the conversation at the last answer."""
        self._prefix_cache = PrefixCache()
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Replace the system message; refused where the template has no place for one."""
        self._encode(text, [], "Hello.")
        self.system = text

    def messages(self) -> "list[Message]":
        """The whole conversation."""
        return _messages(self.system, self.turns)

    def ask(self, message: str, show: Callable[[str], None]) -> Answer:
        """The answer to a message, whose text ``show`` receives as it is drawn."""
        answer = self._answer(message, self.turns, show)
        if answer.content or answer.end != "interrupt":
            self.turns.append((message, answer.content))
            self.last = answer
        return answer

    def retry(self, show: Callable[[str], None]) -> Answer:
        """Another answer to the last message, in place of its answer."""
        if not self.turns:
            raise ValueError("there is no answer to draw again.")
        message, _ = self.turns[-1]
        answer = self._answer(message, self.turns[:-1], show)
        if answer.content or answer.end != "interrupt":
            self.turns[-1] = message, answer.content
            self.last = answer
        return answer

    def undo(self) -> str:
        """Remove the last turn; returns its message."""
        if not self.turns:
            raise ValueError("there is no message to remove.")
        message, _ = self.turns.pop()
        self.last, self.left_out = None, 0
        return message

    def clear(self) -> None:
        """Remove all turns."""
        self.turns.clear()
        self.last, self.left_out, self.used = None, 0, 0

    def _answer(
        self, message: str, turns: list[tuple[str, str]], show: Callable[[str], None]
    ) -> Answer:
        import torch

        from fenchel.generation import PrefixCache, TextStream, stream

        ids, left_out = self._fit(message, turns)
        room = self.model.config.context - len(ids)
        stops = [stop for stop in self.settings.stop if isinstance(stop, str)]
        settings = replace(
            self.settings,
            max_new_tokens=min(room, self.settings.max_new_tokens),
            stop=[stop for stop in self.settings.stop if not isinstance(stop, str)],
        )
        text, new = TextStream(self.tokenizer, stops), list[int]()
        written, content, size = "", "", 0
        end: End = "interrupt"

        def add(piece: str) -> None:
            nonlocal written, content, size
            written += piece
            if len(stripped := written.strip()) > len(content):
                show(stripped[len(content) :])
                content, size = stripped, len(new)

        tokens = stream(
            self.model,
            torch.tensor([ids], device=self.model.lm_head_weight.device),
            settings,
            prefix_cache=self._prefix_cache,
            generator=self.generator,
        )
        try:
            for token in tokens:
                new.append(int(token))
                add(text.add(new[-1]))
                if text.stopped:
                    break
            add(text.flush())
            stopped = text.stopped or (bool(new) and new[-1] in settings.stop)
            end = "stop" if stopped else "length" if len(new) < room else "context"
        except KeyboardInterrupt as error:
            self._prefix_cache = PrefixCache()
            if _ends_command(error):
                raise
        except BaseException:
            self._prefix_cache = PrefixCache()
            raise
        self.left_out, self.used = left_out, len(ids) + len(new)
        return Answer(content, [*ids, *new[:size]], len(ids), end)

    def _fit(self, message: str, turns: list[tuple[str, str]]) -> tuple[list[int], int]:
        """The ids that an answer is drawn from, and how many turns are left out of them."""
        context, left_out = self.model.config.context, min(self.left_out, len(turns))
        ids = self._encode(self.system, turns[left_out:], message)
        whole, before = len(ids), left_out
        if whole + min(self.settings.max_new_tokens, context // 4) > context:
            while len(ids) > context // 2 and left_out < len(turns):
                left_out += 1
                ids = self._encode(self.system, turns[left_out:], message)
        if len(ids) >= context:
            raise ValueError(
                f"the message has {len(ids):,} tokens with the system message and the template; "
                f"the model reads {context:,} and needs one for its answer."
            )
        if left_out > before:
            say(
                f"The conversation has {whole:,} tokens and the model reads {context:,}: from here "
                f"on it does not see the first {count(left_out, 'turn')}."
            )
        return ids, left_out

    def _encode(self, system: str | None, turns: list[tuple[str, str]], message: str) -> list[int]:
        return self.template.encode(
            self.tokenizer,
            [*_messages(system, turns), {"role": "user", "content": message}],
            add_generation_prompt=True,
            trust_user_tokens=self.trust_user_tokens,
        )


def run(
    directory: Path,
    /,
    *,
    system: Words | None = None,
    template: str | None = None,
    trust_user_tokens: Annotated[bool, Parameter(negative="")] = False,
    max_new_tokens: Whole = 1024,
    sampling: SamplingFlags = SamplingFlags(),  # noqa: B008
    stop: Annotated[list[str] | None, Parameter(negative="")] = None,
    cache: Literal["model", "float16", "int8"] = "model",
    draft: Whole = 0,
    context: Whole | None = None,
    adapter: Path | None = None,
    device: str | None = None,
    dtype: DtypeName | None = None,
    seed: Whole = 0,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Hold a conversation with the model of a run directory or a Hugging Face directory.

    Messages are read from standard input, one per line, and answers are written to standard output.
    /help lists the commands that can stand in place of a message. Ctrl-C stops an answer and Ctrl-D
    ends the conversation. A sampling flag that is left out is taken from the directory's
    generation_config.json where that has it.

    Parameters
    ----------
    directory
        A run directory, or a directory with config.json, weights and tokenizer.json.
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
    cache
        What keys and values are stored in: the model's own dtype, float16 or int8.
    draft
        Tokens to guess ahead from earlier text, while the guesses pay; changes the speed, not the
        text, except in half precision at near ties.
    context
        Positions to read before the oldest turns are left out; as many as in training by default.
        Positions that are not learned can be read further.
    adapter
        A directory of PEFT with LoRA adapters for this model, which are merged into its weights.
    device
        "cpu", "cuda" or "cuda:1"; the GPU where there is one.
    dtype
        Dtype of the weights; the one they are stored in by default, or float32 on a CPU without
        instructions for it.
    seed
        The same seed and the same messages give the same answers on the same device.
    json
        Print each answer as a line of JSON.
    """
    if sys.stdin is None:
        raise ValueError("standard input is closed; messages are read from it.")
    with loading():
        import torch

        from fenchel.checkpoints.tokenizer import end_ids, read_chat_template
        from fenchel.generation import GenerationSettings

    chosen = sampling_settings(directory, sampling.given())
    on, as_dtype = device_and_dtype(device, dtype)
    model, tokenizer, config = load_checkpoint(directory, on, as_dtype, adapter)
    if config.kind != "decoder":
        raise ValueError(
            f"a chat needs a decoder, and the model of {directory} is an {config.kind}."
        )
    model = model if context is None else model.with_context(context)
    if (chat_template := read_chat_template(directory, template)) is None:
        raise ValueError(
            f"{directory} has no chat template: its model was not made for conversations. "
            "--template plain writes them as lines of role and content; fenchel generate continues "
            "a text."
        )
    stops = [*end_ids(directory, tokenizer), *chat_template.stops(tokenizer), *(stop or ())]
    if not stops:
        say("No token or text ends an answer of this model; --stop TEXT can give one.")
    conversation = Conversation(
        model,
        tokenizer,
        chat_template,
        GenerationSettings(
            max_new_tokens=max_new_tokens,
            sampling=chosen.sampling,
            stop=list(dict.fromkeys(stops)),
            cache=cache,
            draft=draft,
        ),
        system=system,
        trust_user_tokens=trust_user_tokens,
        generator=torch.Generator(on).manual_seed(seed),
    )
    if chosen.from_checkpoint and not json:
        say(sentence(chosen.source, chosen.from_checkpoint))
    repl = Repl(conversation, json=json)
    if repl.interactive:
        size = sum(p.numel() for p in model.parameters())
        say(
            f"{printable(directory.resolve().name)}: {size:,} parameters, context "
            f"{model.config.context:,}. /help lists commands, Ctrl-C stops an answer, Ctrl-D ends."
        )
    with _interrupts() if repl.interactive else nullcontext():
        repl.loop()
    return 0


class Repl:
    """Reads messages and commands from standard input and prints answers and results."""

    def __init__(self, conversation: Conversation, *, json: bool = False) -> None:
        self.conversation, self.json = conversation, json
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
        return True

    def _print_answer(self, answer: Callable[[Callable[[str], None]], Answer]) -> None:
        wrap = WordWrap(width_of(sys.stdout))

        def show(piece: str) -> None:
            if not self.json:
                print(wrap(for_stdout(piece)), end="", flush=True)

        given = answer(show)
        if self.json:
            tokens = len(given.ids) - given.start
            value = {"content": given.content, "tokens": tokens, "end": given.end}
            print(json_format.dumps(value, ensure_ascii=False), flush=True)
        else:
            print(wrap("\n"), end="\n" if self.edited else "", flush=True)
        if not self.json:
            self._say_end(given)

    def _say_end(self, answer: Answer) -> None:
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
        file = Path(name).expanduser()
        line = json_format.dumps({"messages": self.conversation.messages()}, ensure_ascii=False)
        try:
            file.touch(exist_ok=False)
        except FileExistsError:
            raise ValueError(f"{printable(file, 200)} exists and is not written over.") from None
        try:
            write_atomic(file, line + "\n")
        except BaseException:
            file.unlink()
            raise
        turns = count(len(self.conversation.turns), "turn")
        say(f"Saved {turns} in {shlex.quote(str(file))}.")

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
        from fenchel.cli.token_attention import attention_lines
        from fenchel.generation.attention_trace import (
            AttentionSettings,
            TraceSettings,
            trace_text,
        )

        if number and not (number.isdecimal() and int(number)):
            raise ValueError(f"/attention takes a number of tokens, got {printable(number)!r}.")
        conversation, answer = self.conversation, self.conversation.last
        if answer is None or answer.start == len(answer.ids):
            raise ValueError("there is no answer whose attention could be shown.")
        ids = answer.ids[: answer.start + int(number or TRACED)]
        traces = trace_text(
            conversation.model,
            ids,
            answer.start,
            TraceSettings(entropy=True, attention=AttentionSettings()),
        )
        terminal, tokenizer = Terminal(), conversation.tokenizer
        lines = attention_lines(
            [tokenizer.decode([token], skip_special_tokens=False) for token in ids],
            traces,
            width=width_of(sys.stdout) or 80,
            colour=terminal.color_system == "truecolor" and not terminal.no_color,
        )
        self._print("\n".join(lines))
        if len(ids) < len(answer.ids):
            say(f"The first {len(traces):,} of {len(answer.ids) - answer.start:,} tokens.")

    def _print(self, text: str) -> None:
        """A result of a command; with --json standard output is for answers alone."""
        print(text, file=sys.stderr if self.json else sys.stdout, flush=True)


SAMPLING = (*DEFAULTS,)
"""Settings of sampling that /settings changes."""


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
    print(break_lines(sentence, width_of(sys.stderr)), file=sys.stderr, flush=True)


def count(n: int, noun: str) -> str:
    """A number with its noun.

    >>> count(1, "turn"), count(1200, "token")
    ('1 turn', '1,200 tokens')
    """
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def _messages(system: str | None, turns: list[tuple[str, str]]) -> "list[Message]":
    first = [] if system is None else [{"role": "system", "content": system}]
    rest = (
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    )
    return [*first, *rest]


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
