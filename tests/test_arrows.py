"""docs/architecture.md compared with the tree: packages, imports in both directions, files.

The page has a drawing of layers, in which a package imports only from layers above its own, and a
table with one row per package: what it imports, and its files. Both are read here, so that the
page, and not a copy in this test, is what the code is held to.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fenchel

ROOT = Path(fenchel.__file__).parent
PAGE = (ROOT.parent / "docs" / "architecture.md").read_text()
GROUND = {
    "config",
    "files",
    "hub_cache",
    "operating_system",
    "inspection_result",
    "torch_internals",
}  # single files that every package may import and that import no package


def section(title: str) -> str:
    """The text below a heading of the page, up to the next heading."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def drawn_layers() -> list[set[str]]:
    """The packages of each line of the drawing, the lowest layer first."""
    drawing = section("Layers").split("```")[1]
    return [set(re.findall(r"\w+", line)) for line in drawing.splitlines() if line.strip()]


def table() -> dict[str, tuple[set[str], set[str]]]:
    """Package to (the packages it imports, its files), from the rows of the table."""
    row = re.compile(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|([^|]*)\|$", re.MULTILINE)
    return {
        package: (set(re.findall(r"\w+", imported)), set(re.findall(r"[\w/]+", files)))
        for package, imported, files in row.findall(section("Packages"))
    }


def modules(node: ast.AST) -> list[str]:
    """The modules that an import statement names."""
    if isinstance(node, ast.ImportFrom) and node.module == "fenchel":
        return [f"fenchel.{alias.name}" for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def imports(file: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether the import stands inside a function) for every import of fenchel."""
    tree = ast.parse(file.read_text())
    at_top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        for module in modules(node):
            if module.startswith("fenchel.") and module != "fenchel.__version__":
                yield module, id(node) not in at_top


NOTEBOOKS = ROOT / "lessons" / "notebooks"
"""They use the public names of every package, as a reader's own code does; course.py lists them."""


def imported_packages(package: str) -> set[str]:
    files = [file for file in (ROOT / package).rglob("*.py") if NOTEBOOKS not in file.parents]
    used = {module.split(".")[1] for file in files for module, _ in imports(file)}
    return used - GROUND - {package}


def packages() -> set[str]:
    return {path.parent.name for path in ROOT.glob("*/__init__.py")}


def test_every_package_is_in_the_drawing_and_in_the_table() -> None:
    layers = drawn_layers()
    assert set.union(*layers) == packages() | GROUND
    assert sum(map(len, layers)) == len(set.union(*layers))
    assert table().keys() == packages()


def test_the_ground_is_all_single_modules_and_imports_nothing() -> None:
    assert {path.stem for path in ROOT.glob("*.py")} - {"__init__", "__main__"} == GROUND
    assert drawn_layers()[0] == GROUND
    used = {module for name in GROUND for module, _ in imports(ROOT / f"{name}.py")}
    assert used == {"fenchel.operating_system"}  # by files.py


@pytest.mark.parametrize("package", sorted(packages()))
def test_a_package_imports_exactly_the_packages_of_its_row(package: str) -> None:
    assert imported_packages(package) == table()[package][0]


@pytest.mark.parametrize("package", sorted(packages()))
def test_a_package_imports_only_from_lines_above_its_own(package: str) -> None:
    layers = drawn_layers()
    own = next(index for index, layer in enumerate(layers) if package in layer)
    assert imported_packages(package) <= set().union(*layers[:own])


@pytest.mark.parametrize("package", sorted(packages()))
def test_the_row_of_a_package_names_its_files(package: str) -> None:
    folder = ROOT / package
    files = [path for path in folder.rglob("*") if path.suffix in {".py", ".js", ".css", ".html"}]
    stems = {
        path.relative_to(folder).with_suffix("").as_posix()
        for path in files
        if path.name != "__init__.py" and NOTEBOOKS not in path.parents
    }
    assert stems == table()[package][1]


def test_paths_on_the_page_exist() -> None:
    bases = (ROOT, ROOT.parent)
    paths = re.findall(r"`([\w/]+\.py|[\w/]+/)`", PAGE)
    assert len(paths) > 30
    assert not [path for path in paths if not any((base / path).exists() for base in bases)]


def test_only_kernels_and_commands_are_imported_inside_functions() -> None:
    hidden = {
        (file.relative_to(ROOT).as_posix(), module)
        for file in ROOT.rglob("*.py")
        if file.relative_to(ROOT).parts[0] not in {"cli", "__main__.py"}
        if file.name != "__init__.py"  # may import its own modules at their first use
        if NOTEBOOKS not in file.parents
        for module, inside in imports(file)
        if inside and not module.startswith("fenchel.kernels")
    }
    assert not hidden
