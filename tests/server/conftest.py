"""One tiny trained model with a beginning token, control tokens and a chat template of its own."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.functional import cross_entropy

from fenchel.checkpoints import load, save
from fenchel.checkpoints.tokenizer import end_ids, read_chat_template
from fenchel.data import TextTokenizer, train_tokenizer
from fenchel.interpretability import last_laws
from fenchel.interpretability.hooked_model import separate
from fenchel.model import ModelConfig, Transformer
from fenchel.server.app import App, Relay, Server, ServerSettings, address, listen
from fenchel.server.engine import Engine
from fenchel.server.openai_api import ServedModel

BEGIN, STOP, TURN = "<begin>", "<stop>", "<turn>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<turn>' + message.role + '\\n' + message.content + '<stop>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>assistant\\n' }}{% endif %}"
)
CONTEXT = 96
ANSWERS = {
    "the sea": "The sea is wide and blue.",
    "the hill": "The hill is green and steep.",
    "the bird": "The bird sings größer songs in 東京.",
}


def conversation(thing: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"What is {thing}?"},
        {"role": "assistant", "content": ANSWERS[thing]},
    ]


def chat_tokenizer() -> TextTokenizer:
    texts = [one["content"] + "user assistant\n" for t in ANSWERS for one in conversation(t)] * 9
    tokenizer = train_tokenizer(texts, 320)
    tokenizer.library.add_special_tokens([BEGIN, STOP, TURN])
    return tokenizer


def training_text(tokenizer: TextTokenizer, thing: str) -> list[int]:
    ids = [tokenizer.token_to_id(BEGIN)]
    for message in conversation(thing):
        text = f"{message['role']}\n{message['content']}"
        ids += [tokenizer.token_to_id(TURN), *tokenizer.encode(text)]
        ids.append(tokenizer.token_to_id(STOP))
    return ids


@pytest.fixture(scope="session")
def chat_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that answers three questions word for word."""
    path = tmp_path_factory.mktemp("served") / "parrot"
    tokenizer = chat_tokenizer()
    torch.manual_seed(0)
    config = ModelConfig(
        vocabulary=tokenizer.vocabulary_size,
        context=CONTEXT,
        width=48,
        heads=4,
        kv_heads=2,
        layers=2,
    )
    model = Transformer(config)
    rows = [torch.tensor(training_text(tokenizer, thing)) for thing in ANSWERS]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(150):
        logits = model(ids[:, :-1].clamp(min=0))
        loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=-100)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss < 0.07  # which thing is asked for cannot be known
    save(model.eval(), tokenizer.begin_with(tokenizer.token_to_id(BEGIN)), path)
    ids_of = {name: tokenizer.token_to_id(name) for name in (BEGIN, STOP)}
    special = {"bos_token_id": ids_of[BEGIN], "eos_token_id": ids_of[STOP]}
    for name, changes in (
        ("config.json", special),
        ("generation_config.json", special),
        ("tokenizer_config.json", {"bos_token": BEGIN, "eos_token": STOP}),
    ):
        file = path / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    (path / "manifest.json").unlink()  # the files are others than those that were written
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


class RunningServer(NamedTuple):
    """A server in a thread of this process."""

    address: str
    engine: Engine
    served: ServedModel
    server: Server

    @property
    def place(self) -> tuple[str, int]:
        """For a socket."""
        host, _, port = self.address.removeprefix("http://").partition(":")
        return host, int(port)


@contextmanager
def serving(
    directory: Path, *, rows: int = 4, queue: int = 64, invariant: bool = False, **changes: Any
) -> Iterator[RunningServer]:
    """Serve a directory on a free port; ``changes`` are fields of ServerSettings."""
    model, tokenizer, config = load(directory)
    relay = Relay()
    engine = Engine(
        model, tokenizer, rows=rows, queue=queue, invariant=invariant, tracing=2, observer=relay
    )
    template = read_chat_template(directory)
    assert template is not None
    served = ServedModel(
        name="parrot",
        config=config,
        tokenizer=tokenizer,
        context=engine.context,
        ends=end_ids(directory, tokenizer),
        template=template,
        template_stops=tuple(template.stops(tokenizer)),
        fingerprint="0123456789ab",
        most_choices=queue,
        most_traced=2,
    )
    listener, laws = listen("127.0.0.1", 0), partial(last_laws, separate(model))
    server = Server(App(served, engine, model, relay, ServerSettings(**changes), laws), listener)
    engine.start()
    while not engine.ready:
        time.sleep(0.01)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield RunningServer(address("127.0.0.1", listener), engine, served, server)
    finally:
        server.stop()
        thread.join(60)
        assert not thread.is_alive()
        assert not engine.alive


@pytest.fixture(scope="module")
def running(chat_directory: Path) -> Iterator[RunningServer]:
    """One server for all tests of a module."""
    with serving(chat_directory) as server:
        yield server
