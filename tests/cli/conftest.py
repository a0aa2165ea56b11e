"""One tiny run, trained once by the command itself, for every test that reads one."""

import json
import random
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fenchel.cli import main
from fenchel.server.app import Server

Ask = Callable[[str, Any], tuple[int, dict[str, Any]]]

TINY = (
    "text.vocabulary=300",
    "model.context=16",
    "model.width=16",
    "model.layers=1",
    "train.batch=4",
    "train.threads=1",
    "train.log_every=5",
)


def tiny_flags() -> list[str]:
    return [word for setting in TINY for word in ("--set", setting)]


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    words = "the people of these States have peace and trade with every nation".split()
    lines = (" ".join(draw.choices(words, k=9)) + "." for _ in range(400))
    path = tmp_path_factory.mktemp("text") / "speech.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def run_directory(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "tiny"
    words = ["train", "--text", str(text_file), "--steps", "20", "--out", str(path)]
    assert main([*words, *tiny_flags()]) == 0
    return path


@pytest.fixture
def flags() -> list[str]:
    return tiny_flags()


@pytest.fixture
def served(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., int]:
    """``served(words, use)``: the command with a function that uses the server while it runs."""
    run = Server.run

    def start(words: list[str], use: Callable[[Ask], None]) -> int:
        def run_aside(server: Server) -> None:
            found = re.search(r"Serving (\S+) at (\S+)", capsys.readouterr().out)
            assert found is not None
            thread = threading.Thread(target=run, args=(server,))
            thread.start()

            def ask(path: str, body: Any) -> tuple[int, dict[str, Any]]:
                request = urllib.request.Request(found[2] + path, json.dumps(body).encode())
                try:
                    with urllib.request.urlopen(request, timeout=30) as answer:
                        return answer.status, json.load(answer)
                except urllib.error.HTTPError as error:
                    return error.code, json.load(error)

            try:
                use(ask)
            finally:
                server.stop()
                thread.join(60)

        monkeypatch.setattr(Server, "run", run_aside)
        return main(["serve", *words, "--port", "0", "--threads", "1"])

    return start
