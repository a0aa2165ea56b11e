"""Faults of the file system, kills, flipped bits and readers beside a writer.

    python -m tests.fuzz.faults [--faults 600] [--kills 100] [--flips 200000] [--reads 200]
                                [--processes 25]

A run of a few thousand parameters is disturbed, continued by ``--resume`` (or by the same command
again, if it had not begun), and compared with an undisturbed one: every file of the directory must
have the same bytes. Clocks stand still in these processes, so that metrics and page have no times.

**Faults and kills.** A library in C is loaded before libc (LD_PRELOAD) and counts the calls that
touch the run directory: open, read, write, fsync, rename, ftruncate, mkdir, unlink and their kin,
whether Python, Rust or C makes them. At the n-th call it returns an error, for that call alone or
for all from there on, or it kills the process. n is drawn over the whole length of a scenario:

    begin     a new run
    resume    a run that was interrupted, and so has a page and a sample of an earlier step
    last      a run that has its last checkpoint and lacks its last page

**Flips.** Every bit of the small files of a finished run, and a sample of the others, is flipped.
The check of ``fenchel doctor`` must find it, or what the file says must be the same.

**Readers.** A process trains and saves after every step, keeping one checkpoint, while others load.

Each process is forked from one that has loaded everything, so that a trial takes a second.

**Processes.** ``fenchel train --processes 2``, as a user starts it, meets one fault: a rank killed,
all ranks killed, a rank stopped (it hangs), the command terminated; while it starts, or while it
trains and saves. It must end with the exit code of docs/distributed.md, one sentence at most and no
traceback, within the timeout and the grace of torchrun; continued by one process or two, weights
and optimiser state must have the bits of a run of one process that nothing befell.
"""

import argparse
import ctypes
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
STEPS, SAVE_EVERY, STOPPED_AT = 9, 3, 4
SETTINGS = f"""
text.vocabulary=270 model.context=8 model.width=8 model.layers=1 model.heads=2 train.batch=2
train.threads=1 train.keep=2 train.precision=float32 train.steps={STEPS} train.log_every=1
train.save_every={SAVE_EVERY} train.evaluate_every={SAVE_EVERY} train.evaluate_tokens=16
""".split()
ERRORS = ("ENOSPC", "EDQUOT", "EMFILE", "EIO", "ESTALE", "EACCES", "ENOMEM")
KILL = -1
ALLOWED = {0, 2, 4}
"""Exit codes of a process with a fault: it went on, refused, or said that storage failed."""

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long calls, at = -1;
static int error, lasting, armed;

void fault_arm(const char *path, long number, int code, int all) {
    strncpy(folder, path, PATH_MAX - 1);
    calls = 0; at = number; error = code; lasting = all; armed = 1;
}
long fault_calls(void) { return calls; }

static int inside(const char *path) { return strncmp(path, folder, strlen(folder)) == 0; }

static int inside_fd(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return inside(path);
}

static int inside_at(int fd, const char *path) {
    if (path[0] == '/') return inside(path);
    return fd != AT_FDCWD && inside_fd(fd);
}

/* Whether this call fails; it does not return from a kill. */
static int fails(int ours) {
    if (!armed || !ours) return 0;
    calls++;
    if (at < 0 || calls < at || (calls > at && !lasting)) return 0;
    if (error < 0) { kill(getpid(), SIGKILL); for (;;) pause(); }
    errno = error;
    return 1;
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list more; va_start(more, flags); int mode = va_arg(more, int); va_end(more); \
        if (armed && fails(inside(path))) return -1; \
        return real(path, flags, mode); }
OPEN(open) OPEN(open64)

#define OPENAT(name) \
    int name(int fd, const char *path, int flags, ...) { \
        REAL(name); \
        va_list more; va_start(more, flags); int mode = va_arg(more, int); va_end(more); \
        if (armed && fails(inside_at(fd, path))) return -1; \
        return real(fd, path, flags, mode); }
OPENAT(openat) OPENAT(openat64)

#define FD(name, result, parameters, arguments) \
    result name parameters { \
        REAL(name); \
        if (armed && fails(inside_fd(fd))) return -1; \
        return real arguments; }
FD(read, ssize_t, (int fd, void *b, size_t n), (fd, b, n))
FD(pread, ssize_t, (int fd, void *b, size_t n, off_t o), (fd, b, n, o))
FD(pread64, ssize_t, (int fd, void *b, size_t n, off64_t o), (fd, b, n, o))
FD(fsync, int, (int fd), (fd))
FD(fdatasync, int, (int fd), (fd))
FD(ftruncate, int, (int fd, off_t n), (fd, n))
FD(ftruncate64, int, (int fd, off64_t n), (fd, n))
FD(flock, int, (int fd, int how), (fd, how))

/* Every other failing write is short, as on a disk that fills. */
#define WRITE(name, parameters, arguments, half) \
    ssize_t name parameters { \
        REAL(name); \
        if (armed && fails(inside_fd(fd))) { \
            if (n > 1 && calls % 2) { lasting = 1; return real half; } \
            return -1; } \
        return real arguments; }
WRITE(write, (int fd, const void *b, size_t n), (fd, b, n), (fd, b, n / 2))
WRITE(pwrite, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o), (fd, b, n / 2, o))
WRITE(pwrite64, (int fd, const void *b, size_t n, off64_t o), (fd, b, n, o), (fd, b, n / 2, o))

#define PATH(name, parameters, arguments, test) \
    int name parameters { \
        REAL(name); \
        if (armed && fails(test)) return -1; \
        return real arguments; }
PATH(rename, (const char *a, const char *b), (a, b), inside(a) || inside(b))
PATH(renameat, (int x, const char *a, int y, const char *b), (x, a, y, b), inside_at(x, a))
PATH(mkdir, (const char *a, mode_t m), (a, m), inside(a))
PATH(mkdirat, (int x, const char *a, mode_t m), (x, a, m), inside_at(x, a))
PATH(unlink, (const char *a), (a), inside(a))
PATH(unlinkat, (int x, const char *a, int f), (x, a, f), inside_at(x, a))
PATH(rmdir, (const char *a), (a), inside(a))
PATH(chmod, (const char *a, mode_t m), (a, m), inside(a))
PATH(truncate, (const char *a, off_t n), (a, n), inside(a))
PATH(truncate64, (const char *a, off64_t n), (a, n), inside(a))
"""


class Trial(NamedTuple):
    """One disturbance: the scenario, the call, and the error or KILL, lasting or not."""

    scenario: str
    call: int
    code: int
    lasting: bool


class Ended(NamedTuple):
    """How a process ended: its exit code or minus the signal, its output, the calls it made."""

    code: int
    output: str
    calls: int


class Laboratory:
    """A folder of runs; ``run`` is the one that is disturbed, always under the same path."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.text = folder, folder / "run", folder / "text.txt"
        self.library = ctypes.CDLL(None)
        self.library.fault_calls.restype = ctypes.c_long
        draw = random.Random(0)
        words = "the people of these States have peace and trade with every nation".split()
        self.text.write_text("\n".join(" ".join(draw.choices(words, k=9)) for _ in range(60)))
        self.start: dict[str, Path | None] = {"begin": None}
        self.calls: dict[str, int] = {}
        self._prepare()

    def begin(self, trial: Trial | None = None, *extra: str) -> Ended:
        words = ["train", "--text", str(self.text), "--out", str(self.run)]
        for setting in (*SETTINGS, *extra):
            words += ["--set", setting]
        return self.process(words, trial)

    def resume(self, trial: Trial | None = None) -> Ended:
        return self.process(["train", "--resume", str(self.run)], trial)

    def process(
        self, words: list[str], trial: Trial | None, before: Callable[[], object] | None = None
    ) -> Ended:
        """Run a command in a process of its own, with the disturbance of ``trial``."""
        log = self.folder / "log"
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            os.close(ours)
            os._exit(self._child(words, trial, before, log, theirs))
        os.close(theirs)
        with os.fdopen(ours, "rb") as pipe:
            made = pipe.read()
        _, status = os.waitpid(child, 0)
        calls = int(made) if made else 0
        return Ended(os.waitstatus_to_exitcode(status), log.read_text(errors="replace"), calls)

    def _child(
        self,
        words: list[str],
        trial: Trial | None,
        before: Callable[[], object] | None,
        log: Path,
        pipe: int,
    ) -> int:
        try:
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1) for n in (1, 2))
            time.perf_counter = lambda: 0.0
            time.strftime = lambda *_: "2026-01-01 00:00:00"
            if before is not None:
                before()
            call, code, lasting = (-1, 0, False) if trial is None else trial[1:]
            from fenchel.cli import main

            self.library.fault_arm(str(self.run).encode(), call, code, int(lasting))
            ended = main(words)
            os.write(pipe, str(self.library.fault_calls()).encode())
            return ended
        except BaseException:
            traceback.print_exc()
            return 99

    def _prepare(self) -> None:
        """The undisturbed runs, and where each scenario starts."""
        from fenchel.train.step import Stepper

        whole = self.begin(None, "train.keep=99")
        assert whole.code == 0, whole.output
        self.steps = tree(self.run / "checkpoints")  # of every step, for those that a run keeps
        shutil.rmtree(self.run)
        whole = self.begin()
        assert whole.code == 0, whole.output
        self.calls["begin"] = whole.calls
        self.whole = tree(self.run)

        def stop_early() -> None:
            take = Stepper.__call__

            def watched(stepper: Stepper, step: int) -> Any:
                if step + 1 == STOPPED_AT:
                    os.kill(os.getpid(), signal.SIGTERM)
                return take(stepper, step)

            Stepper.__call__ = watched  # type: ignore[method-assign]

        self._scenario("resume", stop_early)
        self.steps |= tree(self.folder / "start-resume" / "checkpoints")
        last = {p: c for p, c in self.whole.items() if p not in ("report.html", "sample.json")}
        self.restore(None)
        write(self.run, last)
        from fenchel.train import RunDir

        RunDir(self.run).write_status(STEPS, STEPS)
        for name in ("report.html", "sample.json"):  # of the earlier step
            source = self.start["resume"]
            assert source is not None
            shutil.copy(source / name, self.run / name)
        self._keep("last")
        self.restore("resume")

    def _scenario(self, name: str, before: Callable[[], object]) -> None:
        self.restore(None)
        words = ["train", "--text", str(self.text), "--out", str(self.run)]
        for setting in SETTINGS:
            words += ["--set", setting]
        assert self.process(words, None, before).code == 128 + signal.SIGTERM
        self._keep(name)

    def _keep(self, name: str) -> None:
        self.start[name] = self.folder / f"start-{name}"
        shutil.copytree(self.run, self.folder / f"start-{name}")
        resumed = self.resume()
        assert resumed.code == 0, resumed.output
        self.calls[name] = resumed.calls
        assert not (wrong := self.differences()), (name, wrong)

    def restore(self, scenario: str | None) -> None:
        """Put ``run`` where a scenario starts; None leaves no folder."""
        shutil.rmtree(self.run, ignore_errors=True)
        source = None if scenario is None else self.start[scenario]
        if source is not None:
            shutil.copytree(source, self.run)

    def differences(self) -> list[str]:
        """Files of ``run`` that are not those of the undisturbed run."""
        present = tree(self.run)
        wrong = []
        for name in sorted({*present, *self.whole}):
            step = name.removeprefix("checkpoints/")
            older = step != name and f"step-{STEPS:06d}" not in name
            if name in ("run.lock", "tokens/manifest.json"):  # names its process, or the recipe
                continue
            if older:  # which of them are kept depends on the saves that failed
                if name in present and present[name] != self.steps.get(step):
                    wrong.append(name)
            elif present.get(name) != self.whole.get(name):
                wrong.append(name)
        return wrong

    def attempt(self, trial: Trial) -> tuple[Ended, list[str]]:
        """Disturb, continue undisturbed, and return what is not as it should be."""
        self.restore(trial.scenario)
        ended = self.begin(trial) if trial.scenario == "begin" else self.resume(trial)
        problems = []
        if "Traceback" in ended.output:
            problems.append("a traceback")
        killed = trial.code == KILL
        if ended.code not in ({0, -signal.SIGKILL} if killed else ALLOWED):
            problems.append(f"exit code {ended.code}")
        if ended.code in (2, 4) and not ended.output.splitlines()[-1].startswith("fenchel: "):
            problems.append("no sentence at the end")
        if "[Errno" in ended.output:
            problems.append("a bare errno")
        begun = (self.run / "config.toml").exists()
        again = self.resume() if begun else self.begin()
        if again.code != 0:
            problems.append(f"it does not continue ({again.code}): {again.output[-300:]}")
        elif wrong := self.differences():
            problems.append(f"other bytes in {', '.join(wrong)}")
        return ended, problems


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder by its relative path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def trials(calls: dict[str, int], count: int, seed: int, *, kills: bool) -> Iterator[Trial]:
    """Disturbances drawn over the whole length of every scenario."""
    draw = random.Random(seed)
    for n in range(count):
        scenario = ("begin", "resume", "last")[n % 3]
        code = KILL if kills else getattr(errno, draw.choice(ERRORS))
        lasting = not kills and draw.random() < 0.3
        yield Trial(scenario, draw.randrange(1, calls[scenario] + 1), code, lasting)


def meaning(name: str, content: bytes) -> Any:
    """What a sealed file says besides its seal; an error for one that cannot be read."""
    match Path(name).suffix:
        case ".toml":
            return tomllib.loads(content.decode())
        case ".html":
            return content.partition(b"\n")[2]
        case ".json":
            return json.loads(content)
        case ".jsonl":
            return [json.loads(line) for line in content.splitlines()]
    return content


def says_the_same(name: str, before: bytes, after: bytes) -> bool:
    """Whether every value that ``before`` has under a key is in ``after``, seals not counted."""
    try:
        old, new = meaning(name, before), meaning(name, after)
    except ValueError:
        return False
    rows = zip(old, new, strict=True) if isinstance(old, list) else [(old, new)]
    if isinstance(old, list) and len(old) != len(new):
        return False
    seals = ("seal", "crc")
    return all(
        {k: v for k, v in x.items() if k not in seals} == {k: y.get(k) for k in x if k not in seals}
        if isinstance(x, dict) and isinstance(y, dict)
        else x == y
        for x, y in rows
    )


def flip_bits(run: Path, count: int, seed: int) -> dict[str, Counter[str]]:
    """Per file: how many flipped bits were found, were harmless, or passed unseen."""
    from fenchel.data import Corpus
    from fenchel.train import RunDir

    directory = RunDir(run)
    from fenchel.checkpoints import run_checkpoint

    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.name != "run.lock"]
    small = [path for path in files if path.parent == run]
    draw = random.Random(seed)
    results: dict[str, Counter[str]] = {}
    for path in files:
        content = path.read_bytes()
        bits = 8 * len(content)
        share = count // (2 * len(small)) if path in small else count // (20 * len(files))
        chosen = range(bits) if bits <= share else [draw.randrange(bits) for _ in range(share)]
        name = path.relative_to(run).as_posix()
        tally: Counter[str] = Counter()
        for bit in chosen:
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            if path.parent == run:
                found = directory.check_file(path.name) != "intact"
            else:
                check = Corpus.open if path.parent.name == "tokens" else run_checkpoint.check
                try:
                    check(path.parent)
                    found = False
                except ValueError:
                    found = True
            if found:
                tally["found"] += 1
            elif says_the_same(name, content, bytes(flipped)):
                tally["harmless"] += 1
            else:
                tally["unseen"] += 1
        path.write_bytes(content)
        results[name] = tally
    return results


def read_beside_a_writer(laboratory: Laboratory, count: int) -> Counter[str]:
    """Load the newest checkpoint again and again while a process saves after every step."""
    from fenchel.checkpoints import load

    laboratory.restore(None)
    words = ["train", "--text", str(laboratory.text), "--out", str(laboratory.run)]
    extra = ("train.save_every=1", "train.keep=1", f"train.steps={40 * count}")
    for setting in (*(s for s in SETTINGS if not s.startswith(extra[0][:14])), *extra):
        words += ["--set", setting]
    writer = os.fork()
    if not writer:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        from fenchel.cli import main

        os._exit(main(words))
    tally: Counter[str] = Counter()
    try:
        while not list(laboratory.run.glob("checkpoints/step-??????")):
            time.sleep(0.05)
        for n in range(count):
            try:
                load(laboratory.run, which=("newest", "best")[n % 2])
                tally["read"] += 1
            except (ValueError, OSError, RuntimeError) as error:
                tally[f"{type(error).__name__}: {error}"[:160]] += 1
        alive = os.waitpid(writer, os.WNOHANG) == (0, 0)
        tally["the writer still saved at the end"] = int(alive)
    finally:
        os.kill(writer, signal.SIGKILL)
        if alive:
            os.waitpid(writer, 0)
    return tally


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All parts, inside a process that has the library loaded."""
    import torch._dynamo  # noqa: F401  an optimiser loads it at its first step, for seconds

    import fenchel.cli.train
    import fenchel.pipeline  # noqa: F401

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        laboratory = Laboratory(Path(folder).resolve())
        print("calls on the run directory:", laboratory.calls, flush=True)
        for what, count, kills in (
            ("faults", options.faults, False),
            ("kills", options.kills, True),
        ):
            codes: Counter[str] = Counter()
            failures = []
            for n, trial in enumerate(trials(laboratory.calls, count, options.seed, kills=kills)):
                ended, problems = laboratory.attempt(trial)
                codes[str(ended.code)] += 1
                if problems:
                    failures.append({"trial": list(trial), "problems": problems})
                    print(trial, problems, flush=True)
                    print("   ", " ".join(ended.output.split())[-400:], flush=True)
                if n % 100 == 99:
                    print(f"{what}: {n + 1}, {len(failures)} failures", flush=True)
            rows.append(
                {
                    "what": what,
                    "attempts": count,
                    "failures": len(failures),
                    "exit_codes": dict(codes),
                    "calls": laboratory.calls,
                    "first_failures": failures[:20],
                }
            )
        if options.flips:
            laboratory.restore(None)
            write(laboratory.run, laboratory.whole)
            flips = flip_bits(laboratory.run, options.flips, options.seed)
            total = sum(flips.values(), Counter[str]())
            rows.append({"what": "flips", **total, "files": {k: dict(v) for k, v in flips.items()}})
        if options.reads:
            rows.append({"what": "reads", **read_beside_a_writer(laboratory, options.reads)})
    for row in rows:
        print({key: value for key, value in row.items() if key not in ("files", "first_failures")})
    return rows


MANY_STEPS, TIMEOUT, GRACE = 80, 10, 4
"""Steps of a run of processes; seconds of train.timeout; seconds from SIGTERM to SIGKILL."""
PROCESS_FAULTS = {
    "a rank killed": {128 + signal.SIGKILL},
    "all ranks killed": {128 + signal.SIGKILL},
    "a rank hangs": {2},
    "terminated": {128 + signal.SIGTERM},
}
"""What happens, and the exit codes of the command; 0 where the run was faster."""


class ProcessTrials:
    """Runs of real commands that are disturbed, continued and compared."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.draw = folder, random.Random(seed)
        self.text = folder / "text.txt"
        words = "the people of these States have peace and trade with every nation".split()
        lines = (" ".join(self.draw.choices(words, k=9)) for _ in range(60))
        self.text.write_text("\n".join(lines))
        whole = self.command(folder / "whole", 1).wait()
        assert whole == 0, (folder / "log").read_text()
        self.whole = self.tensors(folder / "whole")

    def command(self, run: Path, processes: int) -> subprocess.Popen[bytes]:
        """Begin the run, or continue it where it has begun."""
        words = ["--resume", str(run)]
        if not (run / "config.toml").exists():
            words = ["--text", str(self.text), "--out", str(run)]
            own = (f"train.steps={MANY_STEPS}", "train.cells=2", f"train.timeout={TIMEOUT}")
            for setting in (*SETTINGS, *own):
                words += ["--set", setting]
        if processes > 1:
            words += ["--processes", str(processes)]
        environment = {**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE)}
        log = (self.folder / "log").open("wb")
        return subprocess.Popen(
            [sys.executable, "-m", "fenchel", "train", *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )

    def attempt(self, fault: str, started: bool, processes: int) -> tuple[int, list[str]]:
        """The exit code of the command, and what is not as it should be."""
        run, problems = self.folder / "run", list[str]()
        shutil.rmtree(run, ignore_errors=True)
        command = self.command(run, 2)
        ranks = self._ranks(command)
        while started and command.poll() is None and not list(run.glob("checkpoints/step-??????")):
            time.sleep(0.01)
        time.sleep(self.draw.uniform(0.0, 1.5 if started else 6.0))
        for process in self._victims(fault, ranks):
            with suppress(ProcessLookupError):  # the run was faster
                os.kill(process, signal.SIGSTOP if fault == "a rank hangs" else signal.SIGKILL)
        if fault == "terminated":
            command.terminate()
        try:
            code = command.wait(6 * TIMEOUT + GRACE)
        except subprocess.TimeoutExpired:
            problems.append("it did not end")
            command.kill()
            code = command.wait()
        output = (self.folder / "log").read_text(errors="replace")
        if code not in PROCESS_FAULTS[fault] | {0}:
            problems.append(f"exit code {code}")
        if output.count("fenchel: ") > 1 or "Traceback" in output:
            problems.append(f"no single sentence: {output[-300:]}")
        for process in ranks:  # torchrun ends those that it knows of; none may be left
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if self.command(run, processes).wait():
            problems.append("it does not continue: " + (self.folder / "log").read_text()[-300:])
        elif self.tensors(run) != self.whole:
            problems.append("other bits")
        return code, problems

    def _ranks(self, command: subprocess.Popen[bytes]) -> list[int]:
        """The processes that the command has started."""
        children = Path(f"/proc/{command.pid}/task/{command.pid}/children")
        while command.poll() is None:
            if len(ranks := [int(word) for word in children.read_text().split()]) == 2:
                return ranks
            time.sleep(0.01)
        return []

    def _victims(self, fault: str, ranks: list[int]) -> list[int]:
        if fault == "terminated":
            return []
        return ranks if fault == "all ranks killed" else self.draw.sample(ranks, min(1, len(ranks)))

    @staticmethod
    def tensors(run: Path) -> dict[str, bytes]:
        """Weights and optimiser state of the last checkpoint, as bytes."""
        from fenchel.checkpoints import load_model, run_checkpoint

        folder, wrong = run_checkpoint.newest(run / "checkpoints")
        assert folder is not None
        assert not wrong
        weights = load_model(run, which="newest").state_dict()
        state = run_checkpoint._load_optimiser(folder)
        return {name: x.numpy().tobytes() for name, x in (*weights.items(), *state.items())}


def disturb_processes(count: int, seed: int) -> dict[str, Any]:
    """The row of ``count`` runs of two processes that meet a fault."""
    codes: dict[str, Counter[str]] = {fault: Counter() for fault in PROCESS_FAULTS}
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        trials = ProcessTrials(Path(folder).resolve(), seed)
        for n in range(count):
            fault, started = list(PROCESS_FAULTS)[n % len(PROCESS_FAULTS)], n % 3 > 0
            processes = 1 + n % 2
            code, problems = trials.attempt(fault, started, processes)
            codes[fault][str(code)] += 1
            print(f"{fault}, continued by {processes}: exit code {code} {problems}", flush=True)
            failures += [{"fault": fault, "started": started, "problems": problems}] * bool(
                problems
            )
    exits = {fault: dict(codes[fault]) for fault in codes}
    row = {"what": "processes", "attempts": count, "failures": len(failures), "exit_codes": exits}
    return row | {"seed": seed, "first_failures": failures[:20]}


def compile_library(folder: Path) -> Path:
    """The library that counts calls; needs a C compiler."""
    source, library = folder / "faults.c", folder / "faults.so"
    source.write_text(SOURCE)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-w", str(source), "-o", str(library), "-ldl"], check=True
    )
    return library


def main(words: list[str] | None = None) -> None:
    """Compile the library, start this file again with it, and record the figures."""
    parser = argparse.ArgumentParser("python -m tests.fuzz.faults")
    for name, value in (("faults", 600), ("kills", 100), ("flips", 200_000), ("reads", 200)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--processes", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the rows there instead of results/")
    options = parser.parse_args(words)
    if "FENCHEL_FAULTS" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            library = compile_library(Path(folder))
            environment = {
                **os.environ,
                "LD_PRELOAD": str(library),
                "FENCHEL_FAULTS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "OMP_NUM_THREADS": "1",
            }
            again = [sys.executable, "-m", "tests.fuzz.faults", *(words or [])]
            subprocess.run(again, env=environment, check=True)
        return
    rows = run(options) if options.faults or options.kills or options.flips else []
    if options.processes:
        os.environ.pop("LD_PRELOAD")  # the library is for the parts above
        rows.append(disturb_processes(options.processes, options.seed))
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1))
        return
    from benchmarks.harness import record

    record("faults", rows, ["safetensors", "tokenizers"], folder=RESULTS)


if __name__ == "__main__":
    main(sys.argv[1:])
