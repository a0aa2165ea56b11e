"""The public names: those of ``fenchel`` itself, loaded at first use, and every ``__all__``."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

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


PACKAGES = sorted(
    ".".join(("fenchel", *path.parent.relative_to(ROOT).parts))
    for path in ROOT.rglob("__init__.py")
    if "__all__" in path.read_text()
)


class Public(NamedTuple):
    """A public name: where it is listed, and what it is."""

    package: str
    name: str
    value: Any


def public() -> list[Public]:
    """Every function and class of every ``__all__``, once: in the innermost package that lists it.

    Constants and type aliases are not among them: Python gives those no docstring of their own.
    """
    listed: dict[int, Public] = {}
    for package in PACKAGES:  # sorted, so an inner package comes after its outer one
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value):
                listed[id(value)] = Public(package, name, value)
    return sorted(listed.values(), key=lambda one: (one.package, one.name))


def methods(owner: Any) -> list[Any]:
    return [getattr(owner, name) for name in vars(owner) if not name.startswith("_")]


def has_example(value: Any) -> bool:
    """Whether the docstring of a function, of a class or of one of its methods has a doctest."""
    documented = [value, *(methods(value) if inspect.isclass(value) else ())]
    return any(">>> " in (inspect.getdoc(one) or "") for one in documented)


def returned() -> set[str]:
    """Names in the annotations of what public functions and methods return, and of their fields."""
    callables = [
        each
        for one in public()
        for each in (
            [one.value]
            if inspect.isroutine(one.value)
            else methods(one.value)  # of a class, or the functions of a public module
        )
    ]
    annotations = [
        inspect.get_annotations(each).get("return") for each in callables if callable(each)
    ]
    annotations += [
        each.fget.__annotations__.get("return") for each in callables if isinstance(each, property)
    ]
    annotations += [
        annotation
        for one in public()
        if inspect.isclass(one.value)
        for annotation in inspect.get_annotations(one.value).values()
    ]
    return {
        word
        for each in annotations
        for word in re.findall(r"\w+", str(each) + getattr(each, "__name__", ""))
    }


def is_result(one: Public, names: set[str]) -> bool:
    """A NamedTuple or dataclass that a public function returns: its function has the example."""
    record = hasattr(one.value, "_fields") or is_dataclass(one.value)
    return record and inspect.isclass(one.value) and one.name in names


def is_interface(value: Any) -> bool:
    """A Protocol or an abstract class: its members have the examples."""
    return inspect.isclass(value) and (
        getattr(value, "_is_protocol", False) or inspect.isabstract(value)
    )


def test_every_public_name_has_a_docstring() -> None:
    assert not [f"{one.package}.{one.name}" for one in public() if not own_docstring(one.value)]


def test_a_method_without_a_docstring_overrides_one_that_has_it() -> None:
    classes: dict[str, list[ast.ClassDef]] = defaultdict(list)
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(node)

    def documents(name: str, method: str) -> bool:
        """Whether a class of that name, or an ancestor of it, documents the method."""
        if name not in classes:  # of another library
            return name not in ("object", "NamedTuple", "Protocol", "ABC")
        return any(
            (method in own_methods(node) and has_docstring(own_methods(node)[method]))
            or any(documents(base, method) for base in base_names(node))
            for node in classes[name]
        )

    missing = [
        f"{node.name}.{name}"
        for nodes in classes.values()
        for node in nodes
        if not node.name.startswith("_")
        for name, method in own_methods(node).items()
        if not name.startswith("_")
        and not has_docstring(method)
        and not any(documents(base, name) for base in base_names(node))
    ]
    assert not missing


def has_docstring(node: ast.FunctionDef) -> bool:
    return ast.get_docstring(node) is not None


def own_methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """Methods and properties by name, without setters and overloads."""
    return {
        each.name: each
        for each in node.body
        if isinstance(each, ast.FunctionDef)
        and not any(
            isinstance(one, ast.Attribute) or (isinstance(one, ast.Name) and one.id == "overload")
            for one in each.decorator_list
        )
    }


def base_names(node: ast.ClassDef) -> list[str]:
    """The last words of the bases: Module of nn.Module."""
    bases = (each.value if isinstance(each, ast.Subscript) else each for each in node.bases)
    return [ast.unparse(each).rpartition(".")[2] for each in bases]


def own_docstring(value: Any) -> str:
    """Without the text that dataclass and NamedTuple write where there is none."""
    text = inspect.getdoc(value) or ""
    return "" if text.startswith(f"{getattr(value, '__name__', '')}(") else text


def shown_on_pages() -> set[str]:
    """Names that the Python blocks of docs import, and tests/test_docs.py therefore runs."""
    pages = (ROOT.parent / "docs").rglob("*.md")
    blocks = [
        block
        for page in pages
        for block in re.findall(r"(?<!-->\n)^```python\n(.*?)^```$", page.read_text(), FLAGS)
    ]
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block))]
    called = {node.attr for node in nodes if isinstance(node, ast.Attribute)}  # bounds.castin
    return called | {node.id for node in nodes if isinstance(node, ast.Name)}


FLAGS = re.MULTILINE | re.DOTALL
WITHOUT_EXAMPLE = {
    "fenchel.pipeline.speed": "times the default model for seconds; fenchel doctor prints it",
}


def test_every_public_name_has_an_example() -> None:
    names, pages = returned(), shown_on_pages()
    missing = {
        f"{one.package}.{one.name}"
        for one in public()
        if f"{one.package}.{one.name}" not in WITHOUT_EXAMPLE
        and not inspect.ismodule(one.value)
        and not has_example(one.value)
        and one.name not in pages
        and not is_result(one, names)
        and not is_interface(one.value)
    }
    assert not missing


def test_what_is_without_an_example_is_still_public_and_still_without() -> None:
    by_name = {f"{one.package}.{one.name}": one for one in public()}
    assert not [name for name in WITHOUT_EXAMPLE if has_example(by_name[name].value)]


def test_the_top_level_lists_its_names_alone_and_a_wrong_one_gets_the_nearest() -> None:
    leaked = {name for name in dir(fenchel) if not name.startswith("__")}
    assert leaked == {name for name in fenchel.__all__ if name != "__version__"} | fenchel._PACKAGES
    assert {"Prior", "Segments", "Global", "Sink"} <= set(fenchel.__all__)
    for wrong, right in {"entmax": "Entmax", "attention_pair": "attention_pairs"}.items():
        with pytest.raises(AttributeError, match=f"did you mean '{right}'"):
            getattr(fenchel, wrong)
