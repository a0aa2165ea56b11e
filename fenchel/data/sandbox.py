"""Chat templates and tokenizers of other people, in child processes bounded in time and memory.

A tokenizer.json may hold any regular expression, and some take longer than anyone can wait on a
short text: each match stays below the limit of the regex library, and there are many matches. A
chat template is a program, and jinja2's sandbox bounds neither its loops nor its strings. Both are
read and used in a child process that ends when its time or memory is spent.

    parent                               child
    a tokenizer or a template      ->
                                   <-    nothing, or the error
    texts, or conversations        ->
                                   <-    ids, or text; or the error
                                                  ...

Time is processor time, so that a busy machine changes no answer; a rendering, which takes a
millisecond, has a limit of the clock too. Where the system has no such limits (Windows), all limits
are of the clock and memory is not bounded. The child is this file, run as a script: it imports
``tokenizers`` or ``jinja2`` and of fenchel only ``operating_system``, so that it starts quickly and
is small. It ends with the object it serves or with the parent, whichever is first, and a request
after a child has died starts another.
"""

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

from fenchel.operating_system import SYSTEM

SECONDS = 2.0
"""Processor time to read a tokenizer, and to encode any text."""
BYTES_PER_SECOND = 50_000
"""Text for which a further second is granted; usual tokenizers encode a hundred times as fast."""
MEMORY = 2**30
"""Bytes of address space of a child that encodes."""
RENDER_SECONDS = 2.0
"""Time of the clock, and of the processor, to render a conversation."""
RENDER_MEMORY = 2**28
"""Bytes of address space of a child that renders."""
RENDER_CHARACTERS = 2**22
"""The most characters of a rendered conversation."""
_ROOT = str(Path(__file__).parents[2])
_CHILD = (  # the fenchel of the parent, which -I would not find in a source tree
    "import sys, runpy; sys.path.insert(0, sys.argv[1]); "
    "runpy.run_path(sys.argv[2], run_name='__main__')"
)
_START_SECONDS = 60.0  # of the clock, to import jinja2 on a busy machine

Service = Callable[[str], Callable[[str], Any]]
"""What a child does: the first request gives the function that answers the others."""

EncodedText = tuple[list[int], list[tuple[int, int]]]
"""The ids of a text, and of each the first character that it covers and the one after the last."""


class ChildEnded(Exception):
    """The child has spent its time or memory."""


class BoundedProcess:
    """A child that answers requests within limits; one that has ended is replaced."""

    def __init__(
        self, service: str, setup: str, *, seconds: float, memory: int, clock: float | None = None
    ) -> None:
        """``setup`` is the first request; ``clock`` limits the time of the others by the clock."""
        self._arguments = [service, str(seconds), str(memory)]
        self._setup, self._seconds, self._clock = setup.encode(), seconds, clock
        self._pipe: Connection | None = None
        self._lock = Lock()

    def ask(self, request: str) -> dict[str, Any]:
        """The answer of the child: {"value": ...} or {"error": reason}; raises ChildEnded."""
        with self._lock:
            try:
                if self._pipe is not None and self._pipe.poll():  # it has ended since its answer
                    self._end()
                if self._pipe is None:
                    self._start()
                    answer = self._exchange(self._setup, _START_SECONDS)
                    if "error" in answer:
                        self._end()
                        return answer
                return self._exchange(request.encode(), self._clock)
            except (EOFError, OSError):
                self._end()
                raise ChildEnded from None
            except BaseException:  # an interrupt: the answer would arrive at the next request
                self._end()
                raise

    def _start(self) -> None:
        child, pipe = SYSTEM.start_child(
            [sys.executable, "-I", "-c", _CHILD, _ROOT, __file__, *self._arguments],
            # The archive of locales would take most of the address space.
            {**os.environ, "TOKENIZERS_PARALLELISM": "false", "LC_ALL": "C"},
        )
        self._pipe = pipe
        self._finalizer = weakref.finalize(self, _end_child, child, pipe)

    def _exchange(self, request: bytes, clock: float | None) -> dict[str, Any]:
        assert self._pipe is not None
        self._pipe.send_bytes(request)
        if clock is None and not SYSTEM.limits_children:
            clock = self._seconds + len(request) / BYTES_PER_SECOND
        if not self._pipe.poll(clock):
            raise EOFError
        answer: dict[str, Any] = json.loads(self._pipe.recv_bytes())
        return answer

    def _end(self) -> None:
        if self._pipe is not None:
            self._finalizer()
            self._pipe = None


def _end_child(child: "subprocess.Popen[bytes]", pipe: Connection) -> None:
    pipe.close()
    child.kill()
    child.wait()


class EncodingProcess:
    """A tokenizer that encodes in a bounded child process; a text too slow is a ValueError."""

    def __init__(self, tokenizer: str, name: str, probes: Sequence[str]) -> None:
        """Start a child with the tokenizer.json ``tokenizer``, called ``name`` in messages.

        What it does to ``probes`` it does to them in this process too, in the same time.
        """
        self.name = name
        self._child = BoundedProcess("tokenizer", tokenizer, seconds=SECONDS, memory=MEMORY)
        self._ask([], f"read {name}")
        self.encode(probes)

    def encode(self, texts: Sequence[str], *, offsets: bool = False) -> list[EncodedText]:
        """Of each text its ids without control tokens and, with ``offsets``, what each covers."""
        rows: list[EncodedText] = self._ask(texts, "encode the text", offsets=offsets)
        return rows

    def _ask(self, texts: Sequence[str], action: str, *, offsets: bool = False) -> Any:
        try:
            answer = self._child.ask(json.dumps([list(texts), offsets]))
        except ChildEnded:
            raise ValueError(
                f"cannot {action}: {self.name} needs more than {SECONDS:g} s and a second per "
                f"{BYTES_PER_SECOND // 1000} kB of text, or more than {MEMORY >> 20} MiB; use the "
                "tokenizer of another checkpoint."
            ) from None
        if "error" in answer:
            raise ValueError(f"cannot {action}: {answer['error']}.")
        return answer["value"]


class RenderingProcess:
    """A chat template that renders in a bounded child process; what fails is a ValueError."""

    def __init__(self, source: str, variables: Mapping[str, Any], name: str) -> None:
        """The template's text, what it may name beside the messages, its name in messages."""
        self.name = name
        self._seconds = RENDER_SECONDS
        self._child = BoundedProcess(
            "template",
            json.dumps({"source": source, "variables": dict(variables)}),
            seconds=self._seconds,
            memory=RENDER_MEMORY,
            clock=self._seconds,
        )

    def render(
        self, conversations: Sequence[tuple[Sequence[Mapping[str, str]], bool]], marks: str
    ) -> list[str]:
        """The text of each conversation: its messages, and whether an answer is to follow.

        The two characters ``marks`` stand before and after what the template puts between
        {% generation %} and {% endgeneration %}.
        """
        request = {"conversations": conversations, "marks": marks, "most": RENDER_CHARACTERS}
        try:
            answer = self._child.ask(json.dumps(request))
        except ChildEnded:
            raise ValueError(
                f"{self.name} needs more than {self._seconds:g} s or "
                f"{RENDER_MEMORY >> 20} MiB and was stopped; use another template."
            ) from None
        if "error" in answer:
            raise ValueError(f"{self.name} {answer['error']}.")
        texts: list[str] = answer["value"]
        return texts


def _serve(pipe: Connection, service: Service, seconds: float, memory: int) -> None:
    """The child: set up a service, then answer what arrives, each within its allowance."""
    SYSTEM.limit_memory(memory)
    action: Callable[[str], Any] | None = None

    def begin(setup: str) -> None:
        nonlocal action
        action = service(setup)

    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        answer = _answer(begin if action is None else action, request, seconds)
        pipe.send_bytes(json.dumps(answer).encode())


def _answer(action: Callable[[str], Any], request: bytes, seconds: float) -> dict[str, Any]:
    SYSTEM.limit_time(seconds + len(request) / BYTES_PER_SECOND)
    try:
        return {"value": action(request.decode())}
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is a BaseException and not an Exception
        reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        return {"error": "".join(c if c.isprintable() else "?" for c in reason)}


def _tokenizer_service(setup: str) -> Callable[[str], Any]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(setup)
    tokenizer.encode_special_tokens = True  # as in fenchel.data.tokens

    def encode(request: str) -> list[EncodedText]:
        texts, offsets = json.loads(request)
        batch = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
        encoded = batch(texts, add_special_tokens=False)
        return [(row.ids, row.offsets if offsets else []) for row in encoded]

    return encode


class _Failed(Exception):
    """What follows the name of the template in a sentence."""


def _template_service(setup: str) -> Callable[[str], Any]:
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    marks = ["", ""]

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %} around what the model is to write."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Callable[[], str]) -> str:
            return f"{marks[0]}{caller()}{marks[1]}"

    def raise_exception(message: object) -> NoReturn:
        raise _Failed(f"refuses this conversation: {message}")

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson  # jinja2's own is for HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    given = json.loads(setup)

    def sentence(error: Exception) -> _Failed:
        if isinstance(error, _Failed):
            return error
        if isinstance(error, TemplateSyntaxError):
            return _Failed(f"is not valid jinja2: line {error.lineno}: {error.message}")
        if isinstance(error, SecurityError):
            return _Failed(f"does what the sandbox forbids: {error}")
        if isinstance(error, MemoryError):
            return _Failed("needs more memory than it may have")
        if isinstance(error, RecursionError):
            return _Failed("calls itself without end")
        kind = "" if isinstance(error, TemplateError) else f" ({type(error).__name__})"
        return _Failed(f"fails on this conversation{kind}: {error}")

    try:
        template = environment.from_string(given["source"])
    except Exception as error:
        raise sentence(error) from None

    def render_one(messages: list[dict[str, str]], add_generation_prompt: bool, most: int) -> str:
        parts, length = [], 0
        for part in template.generate(
            **{"tools": None, "documents": None, **given["variables"]},
            messages=messages,
            add_generation_prompt=add_generation_prompt,
        ):
            parts.append(part)
            length += len(part)
            if length > most:
                raise _Failed(f"makes a text of more than {most:,} characters")
        return "".join(parts)

    def render(request: str) -> list[str]:
        asked = json.loads(request)
        marks[:] = asked["marks"]
        try:
            return [
                render_one(messages, prompt, asked["most"])
                for messages, prompt in asked["conversations"]
            ]
        except Exception as error:
            raise sentence(error) from None

    return render


if __name__ == "__main__":
    _name, _seconds, _memory, _pipe = sys.argv[-4:]
    _serve(
        SYSTEM.pipe_of_child(_pipe),
        {"tokenizer": _tokenizer_service, "template": _template_service}[_name],
        float(_seconds),
        int(_memory),
    )
