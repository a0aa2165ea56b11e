"""fenchel serve: a model behind an HTTP port, in the manner of the OpenAI API."""

import os
import signal
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from fenchel.cli.console import (
    LOADED_AS_STORED,
    LoadFlags,
    ModelPath,
    Switch,
    Whole,
    loading,
    require_inputs,
)
from fenchel.files import printable, read_regular
from fenchel.hub_cache import model_name

FAILED = 4
"""Exit code after the engine has failed."""
_EXTRA = {"starlette": "starlette", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}


def run(
    directory: ModelPath,
    /,
    *,
    host: str = "127.0.0.1",
    port: Whole = 8000,
    name: str | None = None,
    any_model: Switch = False,
    rows: Whole = 32,
    context: Whole | None = None,
    invariant: Switch = False,
    cache: Literal["model", "float16", "int8"] = "model",
    prefixes: bool = True,
    loading_as: LoadFlags = LOADED_AS_STORED,
    steer: Annotated[list[Path] | None, Parameter(negative="")] = None,
    threads: Whole | None = None,
    queue: Whole = 64,
    queue_seconds: float = 60.0,
    deadline: float | None = None,
    key_file: Path | None = None,
    without_key: Switch = False,
    origin: Annotated[list[str] | None, Parameter(negative="")] = None,
    template: str | None = None,
    trust_user_tokens: Switch = False,
    trace_rows: Whole = 4,
    log_text: Switch = False,
) -> int:
    """Serve a model of a run directory or a Hugging Face directory over HTTP.

    The API is OpenAI's: /v1/completions, /v1/chat/completions, /v1/embeddings; "/" is a page for a
    browser. A line on standard output gives the address once the model is ready; every request is
    a line of JSON on standard error. SIGTERM and Ctrl-C end it after the requests that run.

    Parameters
    ----------
    host
        The address to listen on; one that other machines reach needs a key.
    port
        The port; 0 takes a free one.
    name
        The name of the model in the API; that of the directory by default.
    any_model
        Answer requests for any model's name.
    rows
        Sequences that decode together at most.
    context
        Tokens of prompt and answer at most; as many as in training by default.
    invariant
        Make a request's bits independent of all other requests; steps always have all rows.
    cache
        What keys and values are stored in: the model's own dtype, float16 or int8.
    prefixes
        Keep the keys of earlier prompts and answers, so that a prompt that begins alike is read
        from where it differs. The time to the first token then tells a client whether a beginning
        was read before.
    steer
        A direction that fenchel steer has written for this model, added to the stream of every
        answer; may be given several times. A request may give other strengths, by the names of the
        files: "fenchel": {"steer": {"kind": 1.5}}.
    threads
        Threads of the model on a CPU; one less than there are cores by default.
    queue
        Requests that may wait for a row; further ones get 429.
    queue_seconds
        A request that has waited this long gets 503.
    deadline
        Seconds after which an answer ends with what it has; none by default.
    key_file
        A file with the key that requests must send. The variable FENCHEL_KEY may hold it instead.
    without_key
        Listen on an address that other machines reach although there is no key.
    origin
        A web origin whose pages may send requests, as in http://localhost:3000; may be given
        several times.
    template
        A file with a chat template, or "plain" for lines of role and content; the checkpoint's own
        by default.
    trust_user_tokens
        Let messages spell control tokens, as other servers do.
    trace_rows
        Choices at a time whose attention may be traced; 0 allows none.
    log_text
        Write prompts and answers into the log.
    """
    missing = [package for module, package in _EXTRA.items() if find_spec(module) is None]
    if missing:
        raise ValueError(f"serving needs {missing[0]}: pip install 'fenchel[serve]'.")
    key = read_key(key_file)
    _require_range("rows", rows)
    _require_range("queue", queue)
    _require_range("trace-rows", trace_rows, least=0)
    if threads is not None:
        _require_range("threads", threads)
    for flag, seconds in (("queue-seconds", queue_seconds), ("deadline", deadline)):
        if seconds is not None and not 0.0 < seconds < float("inf"):
            raise ValueError(f"--{flag} {seconds} should be a number of seconds above 0.")
    for one in origin or ():
        if not one.startswith(("http://", "https://")) or one.rstrip("/").count("/") != 2:
            raise ValueError(f"--origin {one} should be as in http://localhost:3000.")
    require_inputs(directory)
    with loading():
        import torch

        from fenchel.checkpoints.tokenizer import (
            end_ids,
            read_chat_template,
            suggested_generation,
        )
        from fenchel.evaluate.calibration import read_calibration
        from fenchel.generation.sampling import resolve_sampling
        from fenchel.interpretability import last_laws
        from fenchel.interpretability.hooked_model import separate
        from fenchel.server.app import (
            App,
            Relay,
            Server,
            ServerSettings,
            address,
            is_loopback,
            listen,
        )
        from fenchel.server.engine import Engine
        from fenchel.server.openai_api import NamedDirection, ServedModel
        from fenchel.steering import Direction
        from fenchel.train.hardware import cores

    listener = listen(host, port)
    if key is None and not without_key and not is_loopback(listener):
        raise ValueError(
            f"other machines reach {host}: give a key by --key-file or FENCHEL_KEY, or "
            "--without-key."
        )
    fewer = min(torch.get_num_threads(), max(1, cores() - 1))  # one is for HTTP
    torch.set_num_threads(threads or fewer)
    model, tokenizer, config = loading_as.load(directory)
    directions = {file.stem: Direction.load(file, model) for file in steer or ()}
    if len(directions) < len(steer or ()):
        raise ValueError("two files of --steer have the same name, by which requests call them.")
    served_name = name or model_name(directory)
    chat_template = read_chat_template(directory, template)
    relay = Relay()
    engine = None
    if config.kind != "encoder":
        engine = Engine(
            model,
            tokenizer,
            rows=rows,
            context=context,
            invariant=invariant,
            cache=cache,
            prefixes=prefixes,
            steered={layer for one in directions.values() for layer in one.vectors},
            queue=queue,
            tracing=trace_rows,
            calibration=read_calibration(directory, model),
            observer=relay,
        )
    elif context is not None:
        raise ValueError(f"--context is for decoders; this is a model of kind {config.kind}.")
    suggested, _ = suggested_generation(directory)
    served = ServedModel(
        name=served_name,
        aliases=frozenset() if any_model else frozenset({"default", model_name(directory)}),
        config=config,
        tokenizer=tokenizer,
        context=config.context if engine is None else engine.context,
        ends=end_ids(directory, tokenizer),
        decoder_start=suggested.decoder_start,
        defaults=resolve_sampling(suggested, {})[0],
        template=chat_template,
        template_stops=() if chat_template is None else tuple(chat_template.stops(tokenizer)),
        trust_user_tokens=trust_user_tokens,
        fingerprint="" if engine is None else engine.fingerprint(),
        created=int(time.time()),
        directions={
            name: NamedDirection(one.vectors, one.strength) for name, one in directions.items()
        },
        most_choices=min(64, queue),
        most_traced=trace_rows,
    )
    settings = ServerSettings(
        host=host,
        key=key,
        origins=tuple(one.rstrip("/") for one in origin or ()),
        queue_seconds=queue_seconds,
        deadline=deadline,
        embedding_queue=queue,
        log_text=log_text,
    )
    if engine is not None:
        engine.start()
        while engine.alive and not engine.ready:
            time.sleep(0.01)
        if engine.failure is not None:
            raise ValueError(engine.failure)
    laws = None
    if config.kind == "decoder" and config.lm_head:
        laws = partial(last_laws, separate(model))
    app = App(served, engine, model, relay, settings, laws)
    server = Server(app, listener)
    print(f"Serving {printable(served_name)} at {address(host, listener)}", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn handles both, and raises them again after it has ended.
        signal.signal(number, lambda *_: None)
    server.run()
    return FAILED if engine is not None and engine.failure is not None else 0


def read_key(file: Path | None) -> str | None:
    """The key of a file or of FENCHEL_KEY; None without either."""
    if file is None:
        key, source = os.environ.get("FENCHEL_KEY"), "FENCHEL_KEY"
        if key is None:
            return None
    else:
        key, source = read_regular(file, 4096).decode(errors="replace"), str(file)
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{source} should hold one word of printable ASCII as the key.")
    return key


def _require_range(flag: str, value: int, *, least: int = 1) -> None:
    if not least <= value <= 4096:
        raise ValueError(f"--{flag} {value} should be {least} to 4096.")
