"""The public names: those of ``fenchel`` itself, loaded at first use, and every ``__all__``."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import fenchel

ROOT = Path(fenchel.__file__).parent


def typed_imports() -> dict[str, str]:
    """Name to package, as type checkers read them in fenchel/__init__.py."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.name: (node.module or "").partition(".")[2]
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name  # without it, strict type checkers hide the name
    }


def test_type_checkers_and_the_interpreter_read_the_same_names() -> None:
    typed = typed_imports()
    assert {name: package for name, package in typed.items() if package} == fenchel._PACKAGE_OF
    assert {name for name, package in typed.items() if not package} == fenchel._PACKAGES


@pytest.mark.parametrize("name", sorted(fenchel._PACKAGE_OF))
def test_a_name_at_the_top_is_the_public_name_of_its_package(name: str) -> None:
    package = importlib.import_module(f"fenchel.{fenchel._PACKAGE_OF[name]}")
    assert name in package.__all__
    assert getattr(fenchel, name) is getattr(package, name)


def test_no_name_at_the_top_is_hidden_by_a_module() -> None:
    modules = {path.stem for path in ROOT.iterdir()}  # importing one sets the attribute
    assert not modules & fenchel._PACKAGE_OF.keys()


def test_every_name_is_listed_and_an_unknown_one_is_an_attribute_error() -> None:
    assert set(fenchel.__all__) | fenchel._PACKAGES <= set(dir(fenchel))
    assert {name: fenchel.__getattr__(name).__name__ for name in fenchel._PACKAGES} == {
        name: f"fenchel.{name}" for name in fenchel._PACKAGES
    }
    with pytest.raises(AttributeError, match="no attribute 'atend'"):
        _ = fenchel.atend


def test_importing_fenchel_loads_neither_torch_nor_a_package() -> None:
    program = (
        "import sys, fenchel\n"
        "print(sorted(m for m in sys.modules if m == 'torch' or m.startswith('fenchel.')))\n"
        "fenchel.Softmax\n"
        "print('torch' in sys.modules, 'fenchel.optim' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.splitlines() == ["[]", "True False"], run.stderr
