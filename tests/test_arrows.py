"""The arrows between packages, as drawn in docs/architecture.md."""

import ast
from collections.abc import Iterator
from pathlib import Path

import fenchel

ROOT = Path(fenchel.__file__).parent
ARROWS: dict[str, set[str]] = {
    "kernels": set(),
    "choice": set(),
    "attention": {"choice"},
    "sensitivity": {"choice", "attention"},
    "optim": {"choice", "attention", "kernels"},
    "model": {"choice", "attention"},
    "checkpoints": {"model", "data"},  # data for the tokenizer beside the weights
    "generation": {"attention", "model", "kernels"},
    "data": set(),
    "train": {"attention", "checkpoints", "choice", "optim", "data", "kernels"},
    "evaluate": {"attention", "choice", "checkpoints", "data", "generation", "model"},
    "hf": {"attention", "choice"},
    "inspection": {"attention", "checkpoints", "choice", "sensitivity", "model", "data"},
    "report": set(),
}
ARROWS["pipeline"] = set(ARROWS) - {"kernels"}
ARROWS["lessons"] = set(ARROWS) - {"kernels"}
ARROWS["cli"] = set(ARROWS)
GROUND = {"config", "files"}  # single files that anybody may use and that use nobody


def imports(file: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether the import is hidden inside a function)."""
    tree = ast.parse(file.read_text())
    at_top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, id(node) not in at_top
        elif isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, id(node) not in at_top


def files_of(package: str) -> list[Path]:
    folder = ROOT / package
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [ROOT / f"{package}.py"]


def test_every_package_is_in_the_drawing() -> None:
    there = {p.name for p in ROOT.iterdir() if (p / "__init__.py").exists()}
    there |= {p.stem for p in ROOT.glob("*.py")} - {"__init__", "__main__"}
    assert there == ARROWS.keys() | GROUND


def test_imports_follow_the_arrows() -> None:
    strays = {
        (str(file.relative_to(ROOT)), module)
        for package, allowed in ARROWS.items()
        for file in files_of(package)
        for module, _ in imports(file)
        if module.startswith("fenchel.")
        and module.split(".")[1] not in allowed | GROUND | {package}
    }
    assert not strays


def test_the_ground_uses_nobody() -> None:
    strays = {
        (name, module)
        for name in GROUND
        for module, _ in imports(ROOT / f"{name}.py")
        if module.startswith("fenchel.")
    }
    assert not strays


def test_only_kernels_and_commands_are_imported_inside_functions() -> None:
    hidden = {
        (str(file.relative_to(ROOT)), module)
        for package in ARROWS.keys() - {"cli"}  # a command loads torch when it is called
        for file in files_of(package)
        for module, inside in imports(file)
        if inside and module.startswith("fenchel.") and not module.startswith("fenchel.kernels")
    }
    assert not hidden
