"""README, the pages beside it and docs are true: their Python runs, their commands and links exist.

Every ``python`` block is executed, the blocks of a page one after another in one namespace, in a
folder that holds ``speech.txt``, a run ``runs/demo`` and the same model as a Hugging Face directory
``llama``. Every ``print`` is one line and has a comment behind it: the words of the comment, up to
a colon, must begin the words that are printed. A block that cannot run here stands below a line
``<!-- not run: reason -->``, and NOT_RUN lists it.
"""

import io
import random
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

import fenchel
from fenchel.cli import COMMANDS, app, main
from fenchel.cli.console import settings_from
from fenchel.pipeline import settings

ROOT = Path(fenchel.__file__).parents[1]
HISTORY = ROOT / "docs/log/2026-11-18-what-changed-before-the-first-release.md"
"""Names and flags that are no more."""
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("examples", "benchmarks")),
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path != HISTORY),
]
NOT_RUN = {
    "docs/serve.md": ["it needs a server"] * 2,
}

FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>.+?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
COMMENTED_PRINT = re.compile(r"^print\(.*\)  # (.*)$", re.MULTILINE)
PLACEHOLDERS = re.compile(r"\.\.\.|\b[A-Z]{1,}\b")


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int
    language: str
    text: str
    reason: str | None
    """Why it is not run."""


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    content = page.read_text()
    return [
        Block(
            content.count("\n", 0, match.start("text")) + 1,
            match["language"],
            match["text"],
            match["reason"],
        )
        for match in FENCE.finditer(content)
    ]


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, a run and a Hugging Face directory."""
    folder = tmp_path_factory.mktemp("workspace")
    draw = random.Random(0)
    words = "the people of these States have peace and trade with every nation".split()
    lines = (" ".join(draw.choices(words, k=9)) + "." for _ in range(400))
    (folder / "speech.txt").write_text("\n".join(lines))
    sizes = "text.vocabulary=300 model.context=32 model.width=16 model.layers=2 train.threads=1"
    sets = [word for size in sizes.split() for word in ("--set", size)]
    text, run = str(folder / "speech.txt"), str(folder / "runs/demo")
    assert main(["train", "--text", text, "--steps", "20", "--out", run, *sets]) == 0
    assert main(["convert", run, str(folder / "llama")]) == 0
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=name)
def test_the_python_of_a_page_runs(
    page: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)
    namespace: dict[str, object] = {"__name__": "page"}
    for block in python_blocks(page):
        if block.reason is not None:
            continue
        padding = "\n" * (block.line - 1)  # a traceback then names the line of the page
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(padding + block.text, str(page), "exec"), namespace)
        comments = COMMENTED_PRINT.findall(block.text)
        assert prints_agree(comments, printed.getvalue().splitlines()), printed.getvalue()


def prints_agree(comments: list[str], lines: list[str]) -> bool:
    """Whether the words of each comment, up to a colon, begin the words of its line."""
    if len(comments) != len(lines):
        return False
    stated = [comment.split(":")[0].split() for comment in comments]
    printed = [line.split() for line in lines]
    return all(
        len(ours) == len(theirs)
        and all(word.startswith(start) for start, word in zip(ours, theirs, strict=True))
        for ours, theirs in zip(stated, printed, strict=True)
    )


def test_comments_behind_prints_are_compared() -> None:
    assert prints_agree(["2.08 5.3: lower, upper"], ["2.0842 5.31"])
    assert not prints_agree(["2.09 5.3"], ["2.0842 5.31"])
    assert not prints_agree(["2.08"], ["2.0842 5.31"])


def test_what_is_not_run_is_listed() -> None:
    reasons = {
        name(page): [block.reason for block in blocks(page) if block.reason] for page in PAGES
    }
    assert {page: listed for page, listed in reasons.items() if listed} == NOT_RUN


def command_lines(page: Path) -> Iterator[str]:
    """Every ``fenchel ...`` in a block that is not Python, or between single backticks."""
    for block in blocks(page):
        if block.language != "python":
            for line in block.text.splitlines():
                if re.match(r"(\$ )?(python -m )?fenchel [a-z]", line):
                    yield line.partition("fenchel ")[2]
    outside = FENCE.sub("", page.read_text())
    yield from re.findall(r"(?<!`)`fenchel ([a-z][^`\n]*)`(?!`)", outside)


def flags(command: str) -> set[str]:
    arguments = app[command].assemble_argument_collection()
    return {flag for argument in arguments for flag in argument.names} | {"--help"}


LINES = sorted({(name(page), line) for page in PAGES for line in command_lines(page)})


@pytest.mark.parametrize(("page", "line"), LINES)
def test_a_command_of_a_page_exists_with_its_flags(page: str, line: str) -> None:
    words = shlex.split(re.sub(r"[\[\]]", " ", line), comments=True)
    command, *rest = words
    assert command in COMMANDS, f"{page}: {line}"
    if command == "bench":  # its options are those of the benchmark
        assert (ROOT / "benchmarks" / f"{rest[0]}.py").exists() or rest[0] == "NAME"
        return
    stated = {word.partition("=")[0] for word in rest if word.startswith("--")}
    assert stated <= flags(command), f"{page}: {line}"
    if PLACEHOLDERS.search(line) or re.search(r"[\[\]]|key=value", line) or not rest:
        return  # a synopsis: its values stand for others
    app.parse_args(words, exit_on_error=False, print_error=False)
    sets = [after for before, after in pairwise(rest) if before == "--set"]
    if command == "train":
        settings(settings_from(None, tuple(sets), {}))


SHOWN = [
    (name(page), line, shown)
    for page in PAGES
    for block in blocks(page)
    for line, shown in re.findall(r"^\$ fenchel (.*)\n((?:[^$\n].*\n)*)", block.text, re.MULTILINE)
    if line.split()[1] == "fenchel/lessons/model"
]
"""Commands of the course's model with what a page shows of their output; ``...`` is left out."""


@pytest.mark.parametrize(("page", "line", "shown"), SHOWN)
def test_a_command_prints_what_its_page_shows(
    page: str,
    line: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(ROOT / word) if "/" in word else word for word in shlex.split(line)]) == 0
    printed = " ".join(capsys.readouterr().out.replace("─", " ").split())
    parts = [" ".join(part.split()) for part in re.split(r"^ *\.\.\.$", shown, flags=re.MULTILINE)]
    assert parts[0], f"{page}: {line}"
    assert not [part for part in parts if part not in printed]


def test_pages_show_commands() -> None:
    assert {page for page, _ in LINES} >= {"README.md", "docs/inspect.md"}
    assert {page for page, _, _ in SHOWN} >= {"README.md", "docs/gallery.md"}


def test_every_command_is_in_the_readme() -> None:
    shown = {line.split()[0] for page, line in LINES if page == "README.md"}
    assert shown >= set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)", text)
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_make_targets_of_pages_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        target for page in PAGES for target in re.findall(r"`(?:\$ )?make (\w+)`", page.read_text())
    }
    assert named
    assert named <= targets
