"""Names of models on the Hugging Face hub, looked up in the cache of this machine.

    NAME, ORGANISATION/NAME, either with @REVISION

    models--ORGANISATION--NAME/
        refs/REVISION           the commit that a branch, tag or pull request had when it was read
        snapshots/COMMIT/       the files of a commit, links to
        blobs/                  the files by their checksums

The network is not used: what is not in the cache is answered with the command that downloads it.
The files of a snapshot are read like those of any other directory (checkpoints/directory.py).
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}\w)?"
_NAME = re.compile(rf"((?:{_PART}/)?{_PART})(?:@([\w./-]{{1,200}}))?", re.ASCII)
_FILE = re.compile(r"[\w.-]{1,200}", re.ASCII)
_PREFIX = "models--"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_READ = (".json", ".jinja", ".safetensors")
_LARGEST_INDEX = 8 * 2**20


class Snapshot(NamedTuple):
    """A revision of a model in the cache."""

    name: str
    """ORGANISATION/NAME."""
    revision: str
    """A branch, tag or pull request, or the commit where none of these has it."""
    path: Path


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the hub's own library keeps its cache, by the variables that it reads.

    >>> cache_folder({"HF_HOME": "/data/hf"}).as_posix()
    '/data/hf/hub'
    """
    for variable, below in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if folder := environment.get(variable):
            return Path(os.path.expandvars(os.path.expanduser(folder)), below)
    return Path(os.path.expanduser("~/.cache/huggingface/hub"))


def find_checkpoint(source: str | Path) -> Path:
    """A path itself, or the snapshot of a model that is named and lies in the cache.

    A path that exists is never taken for a name, and what the cache does not have is returned as it
    is (``require_checkpoint``).
    """
    path, found = Path(source), _name_and_revision(str(source))
    if os.path.lexists(path) or found is None:
        return path
    name, revision = found
    folder = cache_folder() / f"{_PREFIX}{name.replace('/', '--')}"
    if not folder.is_dir():
        return path
    commit = revision if _COMMIT.fullmatch(revision) else _commit_of(folder, revision)
    snapshot = folder / "snapshots" / (commit or "")
    if commit is None or snapshot.is_symlink() or not snapshot.is_dir():
        others = ", ".join(one.revision for one in _snapshots(folder)) or "no other"
        raise ValueError(
            f"the Hugging Face cache has no revision {revision} of {name} (it has {others}); this "
            f"puts it there: {_download(name, revision)}"
        )
    if missing := missing_file(snapshot):
        raise ValueError(
            f"the Hugging Face cache has {name} without {missing}: its download did not finish; "
            f"this completes it: {_download(name, revision)}"
        )
    return snapshot


def require_checkpoint(path: Path) -> None:
    """Refuse a directory that is not there, with the command that downloads a model of its name."""
    if path.is_dir():
        return
    absent, found = f"there is no run directory or checkpoint {path}", _name_and_revision(str(path))
    if found is None or "/" not in found[0] or path.parent.exists() or path.parts[0] == "runs":
        raise ValueError(f"{absent}.")
    raise ValueError(
        f"{absent}, nor a model of that name in the Hugging Face cache {cache_folder()}; this puts "
        f"one there: {_download(*found)}"
    )


def _name_and_revision(source: str) -> tuple[str, str] | None:
    """Of a model on the hub; None for what is no name of one."""
    found = _NAME.fullmatch(source)
    if found is None or ".." in source or "--" in found[1]:
        return None
    return found[1], found[2] or "main"


def model_name(path: Path) -> str:
    """The name of the model whose snapshot a path is; the last part of any other path.

    >>> model_name(Path("hub/models--openai--gpt-oss-20b/snapshots/ab12"))
    'openai/gpt-oss-20b'
    """
    path = path.resolve()
    folder = path.parent.parent.name
    if not folder.startswith(_PREFIX) or path.parent.name != "snapshots":
        return path.name
    return folder.removeprefix(_PREFIX).replace("--", "/", 1)


def snapshots() -> list[Snapshot]:
    """What the cache holds, by name."""
    try:
        folders = sorted(cache_folder().iterdir())
    except OSError:
        return []
    return [
        one for folder in folders if folder.name.startswith(_PREFIX) for one in _snapshots(folder)
    ]


def _snapshots(folder: Path) -> Iterator[Snapshot]:
    """The revisions of one model; none of a folder that no model on the hub can have."""
    name = folder.name.removeprefix(_PREFIX).replace("--", "/", 1)
    if _name_and_revision(name) is None:
        return
    refs: dict[str, str] = {}
    for file in sorted((folder / "refs").rglob("*")):
        revision = file.relative_to(folder / "refs").as_posix()
        if file.is_file() and (commit := _commit_of(folder, revision)) is not None:
            refs.setdefault(commit, revision)
    try:
        paths = sorted((folder / "snapshots").iterdir())
    except OSError:
        return
    for path in paths:
        if _COMMIT.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            yield Snapshot(name, refs.get(path.name, path.name), path)


def _commit_of(folder: Path, revision: str) -> str | None:
    """The commit that a branch or tag had, or None."""
    file = folder / "refs" / revision
    try:
        readable = file.is_file() and not file.is_symlink() and file.stat().st_size < 100
        commit = file.read_text("ascii").strip() if readable else ""
    except (OSError, ValueError):
        return None
    return commit if _COMMIT.fullmatch(commit) else None


def missing_file(snapshot: Path) -> str | None:
    """A file that a download has left out; None where all are there or none is known.

    A link appears when its blob is complete; one without a blob is what a cleaned cache leaves.
    """
    links = sorted(one for one in snapshot.iterdir() if one.suffix in _READ and one.is_symlink())
    if dangling := next((link.name for link in links if not link.exists()), None):
        return dangling
    if not (snapshot / _CONFIG).is_file():
        return _CONFIG
    index = snapshot / _INDEX
    if index.is_file() and not (snapshot / _WEIGHTS).is_file():
        if index.stat().st_size > _LARGEST_INDEX:
            return None  # refused by the reader
        try:
            table = json.loads(index.read_bytes())["weight_map"]
            files = sorted({file for file in table.values() if _FILE.fullmatch(file)})
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return None
        return next((file for file in files if not (snapshot / file).is_file()), None)
    if any(snapshot.glob("*.safetensors")) or any(snapshot.glob("*.bin")):
        return None
    return _WEIGHTS


def _download(name: str, revision: str) -> str:
    return f"hf download {name}" + ("" if revision == "main" else f" --revision {revision}")
