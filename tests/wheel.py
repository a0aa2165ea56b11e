"""The wheel and the sdist of a release: built, checked, installed, used without the source tree.

    python -m tests.wheel DIST      build into DIST, check, install into a new environment, run
    python -m tests.wheel --here    run the commands of the fenchel that is installed here

The commands run in an empty folder, by the console script: the default run of a few steps,
generate, inspect, certify, lens, steer, doctor, learn (its front page) and serve (one answer).
Seconds and megabytes are printed; RELEASE.md has those of the last release. The environment
variable TORCH chooses its version.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL = ["--steps", "20", "--set", "train.threads=1"]
NEEDED = (
    "fenchel/py.typed",
    "fenchel/cli/reference.json",
    "fenchel/lessons/notebooks/softmax.py",
    "fenchel/lessons/model/model.safetensors",
    "fenchel/lessons/model_page.js",
    "fenchel/report/charts.js",
    "fenchel/server/page.html",
)
"""Some files that are not Python, one per kind; all files of the package are compared too."""


def build(dist: Path) -> tuple[Path, Path]:
    """The wheel and the sdist, in an environment that ``build`` makes."""
    shutil.rmtree(dist, ignore_errors=True)
    call(sys.executable, "-m", "build", "--outdir", str(dist), str(ROOT), quiet=True)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    return wheel, sdist


def check(wheel: Path, sdist: Path) -> None:
    """Contents and metadata."""
    call(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = call("git", "-C", str(ROOT), "ls-files", "fenchel", quiet=True).split()
    missing = {*tracked, *NEEDED} - names
    assert not missing, f"the wheel lacks {sorted(missing)}"
    foreign = {name for name in names - set(tracked) if ".dist-info/" not in name}
    assert not foreign, f"the wheel has {sorted(foreign)}"
    metadata = next(name for name in names if name.endswith("/METADATA"))
    header = Parser().parsestr(zipfile.ZipFile(wheel).read(metadata).decode())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert header["Name"] == project["name"]
    assert header["Requires-Python"] == project["requires-python"]
    assert set(header.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", *tracked):
        assert name in inside, f"the sdist lacks {name}"
    sizes = " and ".join(f"{path.stat().st_size / 1e6:.1f} MB" for path in (wheel, sdist))
    print(f"wheel and sdist: {sizes}, {len(tracked)} files of the package")


def install(wheel: Path, folder: Path, torch: str | None) -> str:
    """The Python of a new environment with the wheel and the extras that the commands need."""
    start = time.perf_counter()
    call(sys.executable, "-m", "venv", str(folder))
    python = str(folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    pip = [python, "-m", "pip", "install", "--quiet"]
    call(*pip, f"{wheel}[learn,serve]", *([f"torch=={torch}"] if torch else []))
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"installed in {time.perf_counter() - start:.0f} s, {size / 1e9:.2f} GB on disk")
    return python


def use(python: str) -> None:
    """Every command of an environment, from an empty folder."""
    where = "import sysconfig; print(sysconfig.get_path('scripts'))"
    fenchel = str(Path(call(python, "-c", where).strip()) / "fenchel")
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        timed("import", python, "-c", "import fenchel, sys; assert 'torch' not in sys.modules")
        timed("--version", fenchel, "--version")
        timed("inspect --help", fenchel, "inspect", "--help")
        timed("settings", fenchel, "settings")
        file = call(python, "-c", "import fenchel; print(fenchel.__file__)").strip()
        assert not Path(file).is_relative_to(ROOT), f"{file} is the source tree"
        timed("train, 20 steps", fenchel, "train", *SMALL, "--out", "run")
        prompt = ("--prompt", "Gentlemen of the", "--max-new-tokens", "8")
        assert timed("generate", fenchel, "generate", "run", *prompt).startswith("Gentlemen")
        text = ("--text", "sotu", "--max-tokens", "32")
        assert "dominant" in timed("inspect", fenchel, "inspect", "run", *text)
        json.loads(timed("certify", fenchel, "certify", "run", *text, "--radius", "0.1", "--json"))
        json.loads(timed("lens", fenchel, "lens", "run", *text, "--json"))
        out = ("--word", "war", "--out", "war.safetensors")
        timed("steer", fenchel, "steer", "run", *text, *out)
        timed("steered", fenchel, "generate", "run", *prompt, "--steer", "war.safetensors")
        timed("doctor", fenchel, "doctor")
        timed("doctor of a run", fenchel, "doctor", "run")
        serve(fenchel, "run")
        learn(fenchel)
        os.chdir(ROOT)


def serve(fenchel: str, run: str) -> None:
    """One completion of the server."""
    start = time.perf_counter()
    with address_of(fenchel, "serve", run, "--port", "0") as address:
        body = json.dumps({"prompt": "The", "max_tokens": 4, "model": "run"}).encode()
        headers = {"Content-Type": "application/json"}
        answer = fetch(urllib.request.Request(f"{address}/v1/completions", body, headers))
        assert json.loads(answer)["choices"][0]["text"]
    print(f"serve, one answer: {time.perf_counter() - start:.1f} s")


def learn(fenchel: str) -> None:
    """The front page of the course."""
    start = time.perf_counter()
    with address_of(fenchel, "learn", "--no-browser") as address:
        assert b"fenchel" in fetch(address)
    print(f"learn, the front page: {time.perf_counter() - start:.1f} s")


@contextmanager
def address_of(*words: str) -> Iterator[str]:
    """A server that prints its address, ended afterwards."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = next(line for line in server.stdout if "http://" in line)
            yield "http://" + line.partition("http://")[2].split()[0].rstrip("/.")
        finally:
            server.kill()


def fetch(request: str | urllib.request.Request) -> bytes:
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with opener.open(request, timeout=60) as answer:
        content: bytes = answer.read()
    return content


def timed(name: str, *words: str) -> str:
    """What a command prints; its seconds are printed, by the clock and of the processor."""
    before = os.times()
    output = call(*words, quiet=True)
    spent = [now - then for now, then in zip(os.times(), before, strict=True)]
    print(f"{name}: {spent[4]:.2f} s, {spent[2] + spent[3]:.2f} s of the processor")
    return output


def call(*words: str, quiet: bool = False) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    if not quiet and done.stdout.strip() and "-c" not in words:
        print(done.stdout.strip())
    return done.stdout


def main(words: list[str]) -> None:
    if words == ["--here"]:
        use(sys.executable)
        return
    (where,) = words
    wheel, sdist = build(Path(where).resolve())
    check(wheel, sdist)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        use(install(wheel, Path(folder) / "venv", os.environ.get("TORCH")))


if __name__ == "__main__":
    main(sys.argv[1:])
