"""fenchel learn: the lessons, in a browser."""

import os
import shutil
import sys
import threading
import webbrowser
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fenchel.cli.console import Switch
from fenchel.files import require_output
from fenchel.lessons import COURSE, Lesson, completed
from fenchel.lessons import lesson as lesson_of


def run(
    lesson: str | None = None,
    /,
    *,
    port: int | None = None,
    edit: Switch = False,
    freeze: Path | None = None,
    print_: Annotated[Path | None, Parameter(name="--print")] = None,
    list_: Annotated[bool, Parameter(name="--list", negative="")] = False,
    browser: bool = True,
) -> int:
    """Open the lessons in a browser; Ctrl-C ends it.

    Parameters
    ----------
    lesson
        A lesson by its number or name, such as 7 or softmax; by default the list of all.
    port
        The port on 127.0.0.1; by default 8765, or a free one if that is in use.
    edit
        Copy the lesson to lessons/ here and open the copy in marimo's editor.
    freeze
        Write the course, or LESSON alone, into this folder as pages that need no Python, and end.
    print_
        Write sheets for a class into this folder, with the key on a page of its own, and end.
    list_
        Print the lessons and end.
    browser
        Open the page in a browser.
    """
    if list_:
        _print_list()
        return 0
    chosen = None if lesson is None else lesson_of(lesson)
    needed = ("marimo", "altair", "zmq", "latex2mathml")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ValueError("the lessons need an extra: pip install 'fenchel[learn]'")
    if sum((freeze is not None, print_ is not None, bool(edit))) > 1:
        raise ValueError("--freeze and --print write pages, --edit opens an editor: give one.")
    if freeze is not None:
        _freeze(freeze, chosen)
        return 0
    if print_ is not None:
        from fenchel.lessons.handout import write_handouts

        write_handouts(print_, COURSE if chosen is None else (chosen,))
        print(f"Open a sheet of {print_} in a browser and print it.")
        return 0
    if edit:
        if chosen is None:
            raise ValueError("--edit needs a lesson, such as fenchel learn softmax --edit")
        _edit(chosen.path, port, browser=browser)

    from fenchel.lessons.server import LessonServer

    server = LessonServer(port)
    address = server.address(None if chosen is None else chosen.name)
    print(f"Lessons at {address}\nCtrl-C ends it.", flush=True)
    if browser:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    with suppress(KeyboardInterrupt):  # how it is ended
        server.run()
    print("Ended.", flush=True)
    os._exit(0)  # threads of lessons may still compute


def _print_list() -> None:
    solved = completed()
    for each in COURSE:
        print(f"{each.number:2}  {'solved' if each.name in solved else '':6}  {each.title}")
        research = " Research." if each.research else ""
        print(f"            {each.minutes} minutes.{research} {each.question}")


def _freeze(folder: Path, chosen: Lesson | None) -> None:
    require_output(folder, folder=True)
    print("Computing every position of every control.", flush=True)
    from fenchel.lessons.web_edition import Written, write_course

    def report(page: Written) -> None:
        size = f"{page.bytes / 1e6:6.2f} MB  {page.states:5,} outputs  {page.seconds:5.1f} s"
        print(f"{page.name:34} {size}", flush=True)

    written = write_course(folder, COURSE if chosen is None else (chosen,), report)
    total = sum(page.bytes for page in written) / 1e6
    print(f"{total:.1f} MB. Open {folder / 'index.html'} in a browser.")


def _edit(notebook: Path, port: int | None, *, browser: bool) -> None:
    """Does not return: marimo's editor takes the place of this process."""
    copy = Path("lessons") / notebook.name
    require_output(copy.parent, folder=True)
    copy.parent.mkdir(exist_ok=True)
    require_output(copy)
    if copy.exists():
        print(f"{copy} is here already and is opened as it is.", flush=True)
    else:
        shutil.copyfile(notebook, copy)
        print(f"Copied to {copy}.", flush=True)
    options = [] if port is None else ["--port", str(port)]
    options += [] if browser else ["--headless"]
    command = [sys.executable, "-m", "marimo", "edit", str(copy), *options]
    os.execv(sys.executable, command)
