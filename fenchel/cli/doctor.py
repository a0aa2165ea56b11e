"""fenchel doctor: what this machine can do, and whether a directory and its model are sound."""

import json as json_format
import platform
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fenchel.cli.console import CheckpointPath, Json, loading
from fenchel.files import printable

_TOKENS = 128
_TEXT = """
The river rises in the hills north of the town, where in most years the snow stays until April.
Three mills stood on it once; one of them is a school now, and the children of the town learn to
swim in what was its pond. In the second week of May the water is let out, and everybody helps.
"""
"""The text that a checkpoint reads during the check when it has no text of its own."""

EXTRAS = {
    "hf": ("transformers",),
    "log": ("tensorboard",),
    "serve": ("starlette", "uvicorn", "prometheus-client", "jinja2"),
    "plot": ("matplotlib",),
    "learn": ("marimo",),
}


def run(directory: CheckpointPath | None = None, /, *, json: Json = False) -> int:
    """What this machine can do, and whether a run directory or a checkpoint is sound.

    Parameters
    ----------
    directory
        A run directory to check, every byte of its checkpoints and token files, or a Hugging Face
        directory or one of PEFT: every byte where fenchel wrote it, else settings, headers and
        numbers. The model is then run on a few tokens to find common mistakes, such as a scale
        applied twice.
    """
    checked: dict[str, dict[str, str]] = {}
    intact = True
    if directory is not None:
        with loading("checking every byte"):
            checked = (
                {"checkpoint": check_checkpoint(directory)}
                if is_checkpoint(directory)
                else {"run": check_run(directory)}
            )
            verdicts = {verdict for parts in checked.values() for verdict in parts.values()}
            if intact := verdicts <= {"intact"}:
                checked["pitfalls"] = find_pitfalls(directory)
    if directory is None:
        facts: dict[str, Any] = {}
        with loading("timing a step of the default model"):
            facts |= {"machine": machine(), "extras": extras(), "attention": backends()}
        if json:
            print(json_format.dumps(facts, indent=1))
            return 0
        _show("machine", facts["machine"])
        _show("extras", facts["extras"])
        _show_backends(facts["attention"])
        return 0
    if json:
        print(json_format.dumps(checked, indent=1))
        return 0 if intact else 1
    for title, rows in checked.items():
        _show(title, rows)
    print(_answer(directory, checked, intact))
    return 0 if intact else 1


def _answer(directory: Path, checked: dict[str, dict[str, str]], intact: bool) -> str:
    """The verdict in one sentence."""
    if not intact:
        broken = [name for part in checked.values() for name, v in part.items() if v != "intact"]
        return f"{printable(directory)} is damaged: {printable(', '.join(broken))}."
    found = [name for name, v in checked["pitfalls"].items() if v != "none found"]
    pitfalls = "no pitfall was found" if not found else f"look at: {', '.join(found)}"
    return f"{printable(directory)} is intact; {pitfalls}."


def machine() -> dict[str, Any]:
    """Versions, device, and the speed of one training step of the default model."""
    from fenchel.pipeline import speed
    from fenchel.report.html import pluralise
    from fenchel.train import environment, select_device

    device = select_device()
    pace, tokens = speed()
    facts = environment(device)
    return {
        **{key: facts[key] for key in ("fenchel", "python", "torch", "device", "cores")},
        "platform": platform.platform(),
        "fastest with": pluralise(pace.threads, "thread"),
        "default model": f"{tokens / pace.seconds / 1e3:.1f}k tokens per second",
    }


def extras() -> dict[str, str]:
    """Which optional packages are installed, and how to install the others."""
    versions = {}
    for extra, packages in EXTRAS.items():
        try:
            versions[extra] = ", ".join(f"{name} {version(name)}" for name in packages)
        except PackageNotFoundError:
            versions[extra] = f"missing: pip install 'fenchel[{extra}]'"
    return versions


def backends() -> dict[str, dict[str, str]]:
    """By map, the back end of "auto" and for each back end "yes" or why it does not serve."""
    import torch

    from fenchel.attention import AttentionSpec, Causal, backend_support, selected_backend
    from fenchel.choice import MAPS, by_name
    from fenchel.train import select_device

    q = torch.zeros(1, 2, 4, 8, device=select_device())
    rows = {}
    for name in MAPS:
        call = AttentionSpec(choice=by_name(name), prior=Causal())
        rows[name] = {"auto": selected_backend(q, q, q, **call)} | {
            backend: reason or "yes" for backend, reason in backend_support(q, q, q, **call).items()
        }
    return rows


def _show_backends(rows: dict[str, dict[str, str]]) -> None:
    """A grid of maps and back ends; reasons are footnotes."""
    reasons: list[str] = []
    table = Table(title="attention", title_justify="left")
    for heading in ("map", *next(iter(rows.values()))):
        table.add_column(heading)
    for name, answers in rows.items():
        cells = []
        for backend, answer in answers.items():
            if backend == "auto" or answer == "yes":
                cells.append(answer)
                continue
            why = answer.partition(", not ")[0]  # the row has the name of the map
            reasons += [why] if why not in reasons else []
            cells.append(f"no ({reasons.index(why) + 1})")
        table.add_row(name, *cells)
    console = Console()
    console.print(table, markup=False)
    for number, reason in enumerate(reasons, start=1):
        console.print(f"({number}) {reason}", markup=False, highlight=False)


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory is a Hugging Face directory, or one of PEFT, and not a run."""
    from fenchel.checkpoints.directory import has_file
    from fenchel.checkpoints.peft_adapter import ADAPTER_CONFIG
    from fenchel.checkpoints.run_checkpoint import is_run
    from fenchel.model.families.config_reader import CONFIG

    named = any(has_file(directory, name) for name in (CONFIG, ADAPTER_CONFIG))
    return directory.is_dir() and not is_run(directory) and named


def check_checkpoint(directory: Path) -> dict[str, str]:
    """The files of a Hugging Face or PEFT directory: every byte where it has a manifest of ours.

    Without one, settings, headers and the numbers of the weights.
    """
    from fenchel.checkpoints import read_generation_config
    from fenchel.checkpoints.directory import (
        TOKENIZER,
        has_file,
        open_directory,
        open_tensors,
        require_finite,
        verify_manifest,
    )
    from fenchel.checkpoints.generation_config import GENERATION
    from fenchel.checkpoints.peft_adapter import open_adapter
    from fenchel.checkpoints.tokenizer import read_tokenizer
    from fenchel.files import MANIFEST
    from fenchel.model.families.config_reader import CONFIG

    def weights() -> None:
        checked = (open_directory if has_file(directory, CONFIG) else open_adapter)(directory)
        with open_tensors(checked) as tensors:
            for name in checked.tensors:
                if tensors[name].is_floating_point():
                    require_finite(tensors[name], printable(name))

    parts: dict[str, Callable[[], object]] = {
        MANIFEST: lambda: verify_manifest(directory),
        "weights": weights,
        TOKENIZER: lambda: read_tokenizer(directory),
        GENERATION: lambda: read_generation_config(directory),
    }
    present = (name for name in parts if name == "weights" or has_file(directory, name))
    return {name: _verdict(parts[name]) for name in present}


def find_pitfalls(directory: Path) -> dict[str, str]:
    """What the detectors of fenchel.evaluate find in the model of a directory, by pitfall."""
    import torch

    from fenchel.checkpoints import load
    from fenchel.checkpoints.run_checkpoint import is_run
    from fenchel.evaluate import PITFALLS, pitfalls
    from fenchel.pipeline import open_corpus

    try:
        model, tokenizer, config = load(directory)
    except ValueError as error:
        return {"not looked for": str(error)}
    if config.kind == "encoder-decoder":
        return {"not looked for": "the detectors read models of one stack."}
    length = min(_TOKENS, config.context)
    if is_run(directory):
        ids = open_corpus(directory).validation[:length].astype("int64").tolist()
    else:
        ids = tokenizer.encode(_TEXT)[:length]
    found = pitfalls(model, torch.tensor([ids]))
    said = {each.name: list[str]() for each in PITFALLS}
    for one in found:
        said[one.pitfall].append(one.sentence)
    remedies = {one.pitfall: [one.remedy] for one in found}
    return {
        name: "\n".join(sentences + remedies[name]) if sentences else "none found"
        for name, sentences in said.items()
    }


def _verdict(check_part: Callable[[], object]) -> str:
    try:
        check_part()
    except (ValueError, OSError) as error:
        return str(error)
    return "intact"


def check_run(directory: Path) -> dict[str, str]:
    """Each file and sealed folder of a run, with "intact" or what is wrong with it."""
    from fenchel.checkpoints import run_checkpoint
    from fenchel.checkpoints.load import load_adapted
    from fenchel.checkpoints.tuned_run import read_base
    from fenchel.files import verify
    from fenchel.pipeline import open_corpus
    from fenchel.train import RunDir

    run = RunDir(directory)
    run.require_run()
    verdicts = run.check_files()
    for folder in run_checkpoint.folders(run.checkpoints):
        verdicts[folder.name] = _verdict(partial(run_checkpoint.check, folder))
    base = directory / run_checkpoint.BASE
    tunes = verdicts["config.toml"] == "intact" and run.read_settings().get("tune") is not None
    if tunes or base.exists():
        verdicts[base.name] = _verdict(lambda: verify(base))
    if verdicts.get(base.name) == "intact" and (tuned := read_base(directory)) and tuned.lora:
        verdicts[f"the checkpoint {tuned.path}"] = _verdict(lambda: load_adapted(directory))
    return verdicts | {"tokens": _verdict(lambda: open_corpus(directory))}


def _show(title: str, rows: dict[str, Any]) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(str(name), printable(value, 200))
    Console().print(table, markup=False)
