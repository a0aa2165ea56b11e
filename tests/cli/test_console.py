"""fenchel/cli/console.py: progress on a terminal and in a pipe, SIGHUP, a terminal that closes."""

import errno
import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from threading import Thread
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console as Terminal

from fenchel.cli import console as console_module
from fenchel.cli import main
from fenchel.cli.console import Console, WordWrap, may_close


@pytest.fixture(autouse=True)
def unowned() -> Iterator[None]:
    """Nobody hears SIGHUP, even if the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.needs_posix("hang-ups")
def test_a_hangup_is_an_interruption_once() -> None:
    with may_close():
        with pytest.raises(KeyboardInterrupt) as ended:
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # while the first is being answered
    assert ended.value.args == (signal.SIGHUP,)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


def test_a_name_that_is_not_utf_8_is_escaped_on_a_strict_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "utf-8", "strict"))
    with may_close():
        print("runs/a\udcff")
        sys.stdout.flush()
    assert written.getvalue() == b"runs/a\\udcff\n"


@pytest.mark.parametrize("owned", [signal.SIG_IGN, lambda *_: None], ids=["nohup", "own"])
def test_an_existing_handler_stays(owned: signal.Handlers) -> None:
    signal.signal(signal.SIGHUP, owned)
    with may_close():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == owned


def test_in_another_thread_signals_are_left_to_their_owner() -> None:
    seen: list[object] = []

    def enter() -> None:
        with may_close():
            seen.append(signal.getsignal(signal.SIGHUP))

    thread = Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGHUP)]


def test_words_reach_an_open_terminal_and_are_lost_at_a_closed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal, theirs = pty.openpty()
    stream = os.fdopen(theirs, "w", buffering=1)
    monkeypatch.setattr(sys, "stdout", stream)
    with may_close():
        print("heard")
        assert os.read(terminal, 100) == b"heard\r\n"
        os.close(terminal)
        for _ in range(3):
            print("lost")
        print("half a line", end="", flush=True)
    assert sys.stdout is stream
    stream.close()  # what an interpreter does at its end: nothing is left to fail


def test_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, _: str) -> int:
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OSError, match="full"), may_close():
        print("word")


METRICS = {
    "step": 480,
    "train/loss": 7.0341,
    "train/gradient_norm": 0.53,
    "validation/loss": 4.5,
    "validation/bits_per_byte": 2.189,
    "attention/entropy": [3.4, 3.48],
    "attention/effective": [41.2, 41.2],
    "attention/max_logit": [4.1, 15.0],
    "time/tokens_per_second": 12_345.0,
}


@contextmanager
def terminal(columns: int, lines: int = 24) -> Iterator[int]:
    """Within, standard output is a real terminal; what it shows can be read from the result."""
    shown, theirs = pty.openpty()
    size = {"COLUMNS": str(columns), "LINES": str(lines), "TERM": "xterm-256color"}
    with (
        os.fdopen(theirs, "w", buffering=1) as stream,
        redirect_stdout(stream),
        patch.dict(os.environ, size),
    ):
        yield shown
    os.close(shown)


def rows(console: Console) -> list[str]:
    """The lines that the bars occupy."""
    shown = io.StringIO()
    Terminal(file=shown, width=console.terminal.width).print(console.bars.get_renderable())
    return shown.getvalue().rstrip().splitlines()


@pytest.mark.parametrize(("columns", "lines"), [(40, 20), (60, 24), (80, 24), (120, 40)])
def test_bar_step_and_time_left_stay_on_one_line_above_the_metrics(
    columns: int, lines: int
) -> None:
    with terminal(columns, lines), Console() as console:
        for step in range(39_521, 40_001):
            console.step(step, 48_300)
            if step % 40 == 0:
                console.log(METRICS | {"step": step})
        first, second = rows(console)
    for part in ("training", "step 40,000 of 48,300", " left"):
        assert part in first
    assert ("━━" in first) == (columns >= 60)
    assert second.startswith("loss 7.034 · validation 2.189 bits/byte"[: columns - 2])
    assert not second.endswith(("·", "…"))
    assert max(cell_len(line) for line in (first, second)) <= columns
    if columns >= 80:
        assert "entropy 3.44 nats" in second


def test_a_stage_of_unknown_length_is_named_with_the_time_it_takes() -> None:
    with terminal(80), Console() as console:
        console.progress("reading the text", 35_000_000, 39_000_000)
        assert "90 %" in rows(console)[0]
        console.progress("training the tokenizer", 0, 0)
        (line,) = rows(console)
        assert line.startswith("training the tokenizer")
        assert line.endswith("0:00")
        assert "left" not in line
        console.progress("encoding the text", 10, 10)  # complete: nothing is left to show
        assert rows(console) == []


def test_in_a_pipe_every_stage_is_a_line_when_it_begins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    with Console() as console:
        for done in range(0, 100, 20):
            console.progress("reading the text", done, 100)
            now[0] += 3.0
        console.progress("timing steps", 0, 0)
        console.step(1, 10)
        console.log(METRICS)
    assert capsys.readouterr().out.splitlines() == [
        "Reading the text.",
        "reading the text: 40 of 100",
        "reading the text: 80 of 100",
        "Timing steps.",
        f"step    480  {console_module.one_line(METRICS)}",
    ]


def test_a_command_with_a_result_names_a_stage_in_a_pipe_once_it_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    with Console(aside=True) as console:
        for done in range(0, 100, 20):
            console.progress("reading", done, 100)
            now[0] += 2.0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "reading: 60 of 100\n"


def test_a_stage_of_a_command_with_a_result_begins_its_own_clock(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    with Console(aside=True) as console:
        console.progress("loading torch", 0, 0)
        now[0] += 60.0
        for done in (0, 1):
            console.progress("reading runs", done, 2)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")


@pytest.mark.parametrize("columns", [None, "40"])
def test_sentences_in_a_pipe_have_the_width_of_tables_where_one_is_given(
    columns: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    Console().message("word " * 30)
    longest = max(map(len, capsys.readouterr().out.splitlines()))
    assert longest <= 40 if columns else longest > 100


@pytest.mark.parametrize("place", ["terminal", "pipe"])
def test_the_first_word_comes_before_torch_is_imported(place: str, tmp_path: Path) -> None:
    """Importing torch would raise here, so whatever is shown came first."""
    (tmp_path / "torch.py").write_text("raise ValueError('torch is imported')")
    environment = {
        **os.environ,
        "TERM": "xterm",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
    }
    words = [sys.executable, "-m", "fenchel", "train"]
    if place == "pipe":
        told = subprocess.run(words, capture_output=True, text=True, env=environment)
        assert told.stdout == "Loading torch.\n"
        assert told.stderr == "fenchel: torch is imported\n"
        return
    shown, theirs = pty.openpty()
    with subprocess.Popen(words, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        told_bytes = b""
        while b"is imported" not in told_bytes:
            told_bytes += os.read(shown, 4096)
    assert told_bytes.index(b"loading torch") < told_bytes.index(b"torch is imported")
    os.close(shown)


def test_the_last_line_of_a_run_continues_a_prompt_of_its_own_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sample.json").write_text(
        json.dumps({"prompt": "In Xanadu's halls did", "text": ""})
    )
    Console().end(tmp_path, "finished", "", json=False)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(f"fenchel generate {tmp_path} --prompt 'In Xanadu'\"'\"'s halls'")
    (tmp_path / "summary.json").write_text('{"text": {"validation_answer_bytes": 9}}')
    Console().end(tmp_path, "finished", "", json=False)
    assert capsys.readouterr().out.endswith(f"Try            fenchel chat {tmp_path}\n")


LETTERS = "ab \n\N{CJK UNIFIED IDEOGRAPH-4E2D}"


@given(st.lists(st.text(alphabet=LETTERS, max_size=9)), st.integers(2, 12))
def test_wrapped_text_has_the_same_words_on_lines_that_fit(pieces: list[str], width: int) -> None:
    wrap = WordWrap(width)
    shown = "".join(wrap(piece) for piece in [*pieces, "\n"])
    text = "".join(pieces)
    longest = max(map(cell_len, text.split()), default=0)
    if longest < width:
        assert shown.split() == text.split()
        assert all(cell_len(line) <= width for line in shown.split("\n"))
    assert "".join(shown.split()) == "".join(text.split())
    assert shown.count("\n") >= text.count("\n") + 1
    unchanged = WordWrap(None)
    assert "".join(unchanged(piece) for piece in pieces) == text


def test_words_between_colons_stay_words(capsys: pytest.CaptureFixture[str]) -> None:
    Console().message("runs/a :cat: b")  # rich would draw a cat
    assert capsys.readouterr().out == "runs/a :cat: b\n"


def test_a_path_is_never_broken_in_two() -> None:
    path = "runs/" + "2026-11-16_" * 6
    with terminal(40) as shown:
        Console().message(f"The run was interrupted and can be resumed from {path} at once.")
        lines = os.read(shown, 4096).decode().splitlines()
    assert lines == ["The run was interrupted and can be", "resumed from", path, "at once."]


def test_an_error_on_a_terminal_is_broken_between_words() -> None:
    with terminal(40) as shown, redirect_stderr(sys.stdout):
        assert main(["compare", "one/run/that/is/not/there", "another/run/that/is/not/there"]) == 2
        lines = os.read(shown, 4096).decode().splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 40
    assert "one/run/that/is/not/there" in lines[1]
