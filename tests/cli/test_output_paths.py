"""Every command with an output path, on targets that it must refuse before any work is done.

The work itself is replaced by an error of its own, so that a target which is allowed is one where
that error is reached. Whatever the answer, nothing in the whole tree has changed afterwards.
"""

import errno
import hashlib
import io
import json
import os
import socket
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from fenchel.checkpoints.tuned_run import TunedCheckpoint, write_base
from fenchel.cli import main
from fenchel.cli.chat import Repl
from fenchel.cli.console import text_path
from fenchel.data import train_tokenizer
from fenchel.data.text import BUILT_IN
from fenchel.files import committed, printable, write_atomic
from fenchel.lessons import COURSE
from fenchel.model.lora import LoraConfig
from fenchel.sensitivity import certify
from tests.conftest import require_device

WORK = "the work begins"
PAGE = '<!doctype html><html><meta name="generator" content="fenchel">'
FILE, PAGES, FOLDER, FORCE = "file", "page", "folder", "force"
"""What a command writes: a new file, a page, a new folder, a folder in place of an export."""


class Target(NamedTuple):
    """An output path, what may be written there, and what it overlaps with."""

    name: str
    allowed: Collection[str] = ()
    overlaps: str | None = None
    """"source", "text", "adapter" or "base": refused by the commands that read it."""


NEW = (FILE, PAGES, FOLDER, FORCE)
FOLDERS = (FOLDER, FORCE)
TARGETS = [
    Target("device"),
    Target("block"),
    Target("pipe"),
    Target("socket"),
    Target("link_to_file"),
    Target("link_to_page"),
    Target("link_to_folder"),
    Target("link_to_device"),
    Target("dangling"),
    Target("loop"),
    Target("loop_of_two"),
    Target("loop/x"),
    Target("dangling/x"),
    Target("file/x"),
    Target("device/x"),
    Target("pipe/x"),
    Target("missing/x", FOLDERS),
    Target("missing/there/x", FOLDERS),
    Target("link_to_folder/x", NEW),
    Target("with_file"),
    Target("with_folder"),
    Target("empty", FOLDERS),
    Target("file"),
    Target("page.html", (PAGES,)),
    Target("other_run"),
    Target("other_run/base"),
    Target("other_run/checkpoints"),
    Target("other_run/checkpoints/step-000001"),
    Target("export", (FORCE,)),
    Target("export_with_more"),
    Target("export_with_folder"),
    Target("export_with_other_manifest"),
    Target("runs/source", (), "source"),
    Target("runs", (), "source"),
    Target("runs/source/x", NEW, "source"),
    Target("runs/source/checkpoints", (), "source"),
    Target("runs/source/checkpoints/x", NEW, "source"),
    Target("link_to_source/x", NEW, "source"),
    Target("empty/../runs/source", (), "source"),
    Target("texts", (), "text"),
    Target("texts/a.txt", (), "text"),
    Target("texts/x", NEW, "text"),
    Target("adapter", (FORCE,), "adapter"),
    Target("adapter/x", NEW, "adapter"),
    Target("checkpoint", (FORCE,), "base"),
    Target("checkpoint/x", NEW, "base"),
    Target(""),
    Target("."),
    Target(".."),
    Target("/"),
    Target("~nouser/x", FOLDERS),
    Target("x\x1b[31m\x07", NEW),
    Target("x\ny", NEW),
    Target("x\udcff", NEW),
    Target("x" * 250),
    Target("x" * 300),
    Target("/proc/x"),
    Target("x", NEW),
]


def tree(root: Path) -> None:
    """What the targets name."""
    os.chdir(root)
    if os.geteuid() == 0:
        os.mknod("device", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        os.mknod("block", 0o666 | stat.S_IFBLK, os.makedev(7, 250))
    else:
        Path("device").symlink_to("/dev/null")
        Path("block").symlink_to("/dev/null")
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket")
    for name, to in {
        "link_to_file": "file",
        "link_to_page": "page.html",
        "link_to_folder": "empty",
        "link_to_device": "device",
        "link_to_source": "runs/source",
        "dangling": "nowhere",
        "loop": "loop",
        "loop_of_two": "loop_back",
        "loop_back": "loop_of_two",
    }.items():
        Path(name).symlink_to(to)
    for name in ("empty", "with_file", "with_folder/x", "texts", "runs/other"):
        Path(name).mkdir(parents=True)
    Path("file").write_text("mine")
    Path("page.html").write_text(PAGE)
    Path("with_file/thesis.txt").write_text("mine")
    Path("texts/a.txt").write_text("the people of these States")
    Path("runs/notes.txt").write_text("mine")
    for name in ("export", "export_with_more", "export_with_folder", "adapter", "checkpoint"):
        _export(Path(name))
    Path("export_with_more/notes.txt").write_text("mine")
    Path("export_with_folder/notes").mkdir()
    _export(Path("export_with_other_manifest"))
    Path("export_with_other_manifest/manifest.json").write_text('{"files": {}}')
    for name in ("runs/source", "other_run"):
        base = TunedCheckpoint(root / "checkpoint", "0", False, LoraConfig(rank=1))
        write_base(Path(name), base, {"tokenizer.json": b"{}"})
        Path(name, "config.toml").write_text("format = 1\n")
        with committed(Path(name, "checkpoints/step-000001"), {"format": 1, "step": 1}) as folder:
            (folder / "model.safetensors").write_bytes(b"0")


def _export(path: Path) -> None:
    with committed(path, {"format": 1}) as folder:
        (folder / "config.json").write_text("{}")


def digest(root: Path) -> dict[str, Any]:
    """Kind, mode and content of everything below a folder."""
    found: dict[str, Any] = {}
    for place, folders, files in os.walk(root):
        for name in folders + files:
            path = os.path.join(place, name)
            facts = os.lstat(path)
            content: Any = facts.st_rdev
            if stat.S_ISLNK(facts.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(facts.st_mode):
                content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            found[os.path.relpath(path, root)] = (facts.st_mode, facts.st_ino, content)
    return found


class Command(NamedTuple):
    """The words of a command around its target, what it writes, and what it reads."""

    words: str
    writes: str
    reads: Collection[str] = ("source",)


COMMANDS = [
    Command("train --steps 1 --text texts --out TARGET", FOLDER, ("text",)),
    Command("tune runs/source --text texts --out TARGET", FOLDER, ("source", "text")),
    Command("tune runs/source --text texts --export TARGET", FOLDER, ("source", "text", "base")),
    Command("tune --resume runs/source --export TARGET", FOLDER, ("source", "base")),
    Command("convert runs/source TARGET", FOLDER, ("source", "base")),
    Command("convert runs/source TARGET --force", FORCE, ("source", "base")),
    Command("convert runs/source TARGET --force --peft", FORCE, ("source", "base")),
    Command("convert checkpoint TARGET --force --adapter adapter", FORCE, ("adapter", "base")),
    Command("attach checkpoint --map entmax --text texts --out TARGET", FOLDER, ("base", "text")),
    Command("inspect runs/source --text texts --out TARGET", PAGES, ("source", "text")),
    Command("lens runs/source --text texts --out TARGET", PAGES, ("source", "text")),
    Command("lens runs/source --text texts --save TARGET", FILE, ("source", "text")),
    Command("ablate runs/source --text texts --out TARGET", PAGES, ("source", "text")),
    Command("patch runs/source one two --out TARGET", PAGES, ("source",)),
    Command("certify runs/source --text texts --radius 1 --out TARGET", PAGES, ("source", "text")),
    Command(
        "eval checkpoint --text texts --adapter adapter --against runs/source --page TARGET",
        FILE,
        ("source", "text", "adapter", "base"),
    ),
    Command(
        "steer checkpoint --word a --text texts --adapter adapter --out TARGET",
        FILE,
        ("text", "adapter", "base"),
    ),
    Command("compare runs/source runs/other --out TARGET", PAGES),
    Command("chat /save TARGET", FILE),
    Command("--install-completion --shell bash --output TARGET", FILE, ()),
]
STUBS = """
fenchel.pipeline.run.begin fenchel.pipeline.run.tune fenchel.pipeline.run.resume
fenchel.checkpoints.hf_export.load
fenchel.checkpoints.hf_export.load_adapted fenchel.checkpoints.hf_export._recast
fenchel.checkpoints.directory.open_directory fenchel.inspection.open_model
fenchel.cli.eval.device_and_dtype
fenchel.cli.console.LoadFlags.load
fenchel.report.comparison.compare_runs fenchel.cli.chat.write_atomic
cyclopts.App.install_completion
""".split()


def _work(*_: object, **__: object) -> None:
    raise ValueError(WORK)


@pytest.fixture
def answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str]], tuple[int, str]]:
    """The exit code and the sentence of a command line in a fresh tree, without its work."""
    monkeypatch.chdir(tmp_path)
    tree(tmp_path)
    for name in STUBS:
        monkeypatch.setattr(name, _work)
    monkeypatch.setattr("fenchel.pipeline.run.RunDir.read_settings", lambda _: {})

    def run(words: list[str]) -> tuple[int, str]:
        capsys.readouterr()
        if words[0] == "chat":
            conversation: Any = type("", (), {"turns": [("a", "b")], "messages": lambda _: []})()
            monkeypatch.setattr("sys.stdin", io.StringIO())
            try:
                Repl(conversation, reads=[Path("runs/source")]).step(" ".join(words[1:]))
            except (ValueError, OSError) as error:
                return 2, printable(error, 800)
        code = main(words)
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: one.words)
def test_a_target_is_refused_in_a_sentence_and_nothing_changes(
    command: Command, answer: Callable[[list[str]], tuple[int, str]], tmp_path: Path
) -> None:
    before = digest(tmp_path)
    wrong = []
    for target in TARGETS:
        words = [target.name if word == "TARGET" else word for word in command.words.split()]
        code, sentence = answer(words)
        allowed = command.writes in target.allowed and target.overlaps not in command.reads
        reached = WORK in sentence
        one_line = sentence.strip().count("\n") == 0 and sentence.strip().isprintable()
        if target.overlaps in command.reads and command.writes == FORCE:
            assert "which is read" in sentence, (target.name, sentence)
        if code != 2 or reached != allowed or not sentence.strip() or not one_line:
            wrong.append((target.name, code, sentence))
        if (after := digest(tmp_path)) != before:
            changed = {name for name, _ in set(before.items()) ^ set(after.items())}
            pytest.fail(f"{words}: {changed} changed")
    assert not wrong, "\n".join(map(repr, wrong))


@pytest.mark.parametrize("failure", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_is_full_or_read_only_is_refused_before_the_work(
    failure: int,
    answer: Callable[[list[str]], tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(failure, os.strerror(failure))

    if failure == errno.ENOSPC:
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    else:
        monkeypatch.setattr(Path, "mkdir", fails)
    for command in COMMANDS:
        words = ["x" if word == "TARGET" else word for word in command.words.split()]
        code, sentence = answer(words)
        assert code == 2
        assert "no space" in sentence or "read-only file system" in sentence, sentence


def test_an_export_larger_than_the_disk_is_refused_before_the_tuning(
    answer: Callable[[list[str]], tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("checkpoint/model.safetensors").write_bytes(bytes(2**17))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2**17 - 1))
    words = ["tune", "checkpoint", "--text", "texts", "--export", "x"]
    assert "no space" in answer(words)[1]
    assert WORK in answer([*words, "--lora", "1"])[1]


def test_conversations_are_a_text_to_tune_on(
    answer: Callable[[list[str]], tuple[int, str]],
) -> None:
    messages = [{"role": role, "content": "Yes."} for role in ("user", "assistant")]
    Path("chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    assert WORK in answer(["tune", "checkpoint", "--text", "chats.jsonl", "--out", "x"])[1]
    assert "messages" in answer(["train", "--text", "chats.jsonl", "--out", "x"])[1]


def test_a_lesson_is_not_copied_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lesson = COURSE[0]
    (tmp_path / "lessons").mkdir()
    (tmp_path / "lessons" / lesson.path.name).symlink_to(tmp_path / "nowhere")
    assert main(["learn", lesson.name, "--edit"]) == 2
    assert "is a link" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["device", "pipe", "socket", "link_to_file", "dangling", "empty"])
def test_library_functions_replace_regular_files_only(name: str, tmp_path: Path) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    tree(root)
    os.chdir(tmp_path)
    before = digest(root)
    certificate = certify(torch.nn.Linear(2, 2), torch.zeros(1, 2), 0.1)
    writers: list[Callable[[Path], object]] = [
        certificate.save,
        train_tokenizer(["aa"], 300).save,
        lambda path: write_atomic(path, "x"),
    ]
    for write in writers:
        with pytest.raises(ValueError, match="not written to or replaced"):
            write(root / name)
    assert digest(root) == before


def test_the_guard_of_the_null_device_sees_a_file_in_its_place(tmp_path: Path) -> None:
    require_device(os.devnull)
    (tmp_path / "null").touch()
    with pytest.raises(AssertionError, match="this test has replaced"):
        require_device(str(tmp_path / "null"))


def test_built_in_texts_are_not_paths() -> None:
    assert {name for name in BUILT_IN if text_path(name) is None} == set(BUILT_IN)
    assert text_path("./sotu") == Path("sotu")
