"""Encoding in a process of its own, bounded in time and memory.

A tokenizer.json may hold any regular expression, and some take longer than anyone can wait on a
short text: each match stays below the limit of the regex library, and there are many matches. Such
a tokenizer is read and used in a child process that the system ends when its time or memory is
spent. Time is processor time, so that a busy machine changes no answer.

    parent                               child
    tokenizer.json as text         ->
                                   <-    nothing, or the error
    texts                          ->
                                   <-    ids of each text, or the error
                                                  ...

The child is this file, run as a script: it imports ``tokenizers`` and nothing of fenchel. It ends
with the tokenizer it serves or with the parent, whichever is first.
"""

import json
import math
import os
import resource
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

SECONDS = 2.0
"""Processor time to read a tokenizer, and to encode any text."""
BYTES_PER_SECOND = 50_000
"""Text for which a further second is granted; usual tokenizers encode a hundred times as fast."""
MEMORY = 2**30
"""Bytes of address space of the child."""


class EncodingProcess:
    """A tokenizer that encodes in a bounded child process; a text too slow is a ValueError."""

    def __init__(self, tokenizer: str, name: str, probes: Sequence[str]) -> None:
        """Start a child with the tokenizer.json ``tokenizer``, called ``name`` in messages.

        What it does to ``probes`` it does to them in this process too, in the same time.
        """
        self.name = name
        self._pipe, theirs = Pipe()
        self._child = subprocess.Popen(
            [sys.executable, "-I", __file__, str(theirs.fileno()), str(SECONDS)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # the lines of a Rust panic
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        theirs.close()
        self._finalizer = weakref.finalize(self, _end, self._child, self._pipe)
        self._ask(tokenizer.encode(), f"read {name}")
        self.encode(probes)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without control tokens."""
        ids: list[list[int]] = self._ask(json.dumps(list(texts)).encode(), "encode the text")
        return ids

    def _ask(self, request: bytes, action: str) -> Any:
        try:
            self._pipe.send_bytes(request)
            answer = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):  # the system ended the child
            self._finalizer()
            raise ValueError(
                f"cannot {action}: {self.name} needs more than {SECONDS:g} s and a second per "
                f"{BYTES_PER_SECOND // 1000} kB of text, or more than {MEMORY >> 20} MiB; use the "
                "tokenizer of another checkpoint."
            ) from None
        if "error" in answer:
            raise ValueError(f"cannot {action}: {answer['error']}.")
        return answer["ids"]


def _end(child: "subprocess.Popen[bytes]", pipe: Connection) -> None:
    pipe.close()
    child.kill()
    child.wait()


def _serve(pipe: Connection, seconds: float) -> None:
    """The child: read a tokenizer, then encode what arrives, each within its allowance."""
    _limit(resource.RLIMIT_AS, MEMORY)
    from tokenizers import Tokenizer

    tokenizer: Any = None

    def read(text: str) -> list[list[int]]:
        nonlocal tokenizer
        tokenizer = Tokenizer.from_str(text)
        tokenizer.encode_special_tokens = True  # as in fenchel.data.tokens
        return []

    def encode(texts: str) -> list[list[int]]:
        encoded = tokenizer.encode_batch_fast(json.loads(texts), add_special_tokens=False)
        return [row.ids for row in encoded]

    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        action = encode if tokenizer is not None else read
        answer = _answer(action, request, seconds)
        pipe.send_bytes(json.dumps(answer).encode())


def _limit(kind: int, amount: int) -> None:
    """Limit a resource of this process, within the limit that it was started with."""
    hard = resource.getrlimit(kind)[1]
    soft = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    with suppress(ValueError, OSError):  # macOS has no limit of address space
        resource.setrlimit(kind, (soft, hard))


def _answer(
    action: Callable[[str], list[list[int]]], request: bytes, seconds: float
) -> dict[str, Any]:
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    limit = math.ceil(used + seconds + len(request) / BYTES_PER_SECOND)
    _limit(resource.RLIMIT_CPU, limit)
    try:
        return {"ids": action(request.decode())}
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is a BaseException and not an Exception
        reason = " ".join(str(error).split())[:300].rstrip(".")
        return {"error": "".join(c if c.isprintable() else "?" for c in reason)}


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), float(sys.argv[2]))
