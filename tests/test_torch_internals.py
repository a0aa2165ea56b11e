"""fenchel/torch_internals.py: private names of torch are in that file, and this torch has them."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import fenchel
from fenchel import torch_internals

ROOT = Path(fenchel.__file__).parent.parent
OWN = ROOT / "fenchel" / "torch_internals.py"
ON_OBJECTS = {"_forward_hooks", "_forward_pre_hooks", "_dynamo_marked_constant", "_current_level"}
"""Private names of objects of torch, which an expression does not show to be torch's."""
TESTS_ONLY = {
    "torch._dynamo",  # loaded once, before processes are forked
    "torch._dynamo.utils.counters",  # how many graphs were compiled
    "torch.utils._python_dispatch.TorchDispatchMode",  # every operation, with its sizes
}


def private(dotted: str) -> bool:
    return any(re.match("_[a-zA-Z]", part) for part in dotted.split("."))


def private_names(source: str) -> Iterator[str]:
    """Private names below torch that a file uses, as dotted names from its imports."""
    tree = ast.parse(source)
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            names = [a for a in node.names if a.name.split(".")[0] == "torch"]
            known |= {a.asname or "torch": a.name if a.asname else "torch" for a in names}
            yield from (a.name for a in names if private(a.name))
    yield from (name for name in known.values() if private(name))
    inner = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            root, *rest = ast.unparse(node).split(".")
            dotted = ".".join([known.get(root, root), *rest])
            of_torch = re.fullmatch(r"torch\.[\w.]+", dotted) and private(dotted)
            if of_torch or ON_OBJECTS & set(rest):
                yield dotted


@pytest.mark.parametrize("folder", ["fenchel", "tests", "benchmarks"])
def test_no_other_file_uses_a_private_name_of_torch(folder: str) -> None:
    allowed = set() if folder == "fenchel" else TESTS_ONLY
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in (ROOT / folder).rglob("*.py")
        if path not in (OWN, Path(__file__))
        for name in private_names(path.read_text())
    }
    assert not {(path, name) for path, name in found if name not in allowed}


def test_such_names_are_recognised() -> None:
    source = """
import torch, torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch._inductor import config
from torch.utils import _pytree as tree
torch._foreach_add_(a, b)
F._canonical_mask(x)
model.layers[0]._forward_hooks
torch.nn.__name__, x._private, torch.compiler.reset()
"""
    assert set(private_names(source)) == {
        "torch._dynamo",
        "torch._inductor.config",
        "torch.utils._pytree",
        "torch._foreach_add_",
        "torch.nn.functional._canonical_mask",
        "model.layers[0]._forward_hooks",
    }


def test_every_private_name_of_the_file_has_its_entry() -> None:
    used = {
        part
        for name in private_names(OWN.read_text())
        for part in name.split(".")
        if private(part) and part not in {"_C", "_functorch", "_dynamo"}
    }
    assert used >= {"_foreach_add_", "_forward_hooks", "_current_level"}
    entries = torch_internals.__doc__ or ""
    assert not {name for name in used if name not in entries}


def test_the_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch{torch_internals.VERSIONS}" in project["dependencies"]


def test_transforms_tangents_and_hooks_are_noticed() -> None:
    x, seen = torch.ones(3), []

    def f(x: torch.Tensor) -> torch.Tensor:
        state = torch_internals.in_func_transform(), torch_internals.carries_tangents()
        seen.append((*state, torch_internals.is_func_placeholder(x)))
        return x.sum()

    f(x)
    torch.func.grad(f)(x)
    torch.func.jvp(f, (x,), (x,))
    with forward_ad.dual_level():
        f(forward_ad.make_dual(x, x))
    assert seen == [
        (False, False, False),
        (True, False, True),
        (True, True, True),
        (False, True, False),
    ]
    depths = []

    def g(x: torch.Tensor) -> torch.Tensor:
        depths.append(torch_internals.reverse_transforms())
        return x.square().sum()

    torch.func.vmap(torch.func.hessian(g))(torch.ones(2, 3))
    torch.func.jacrev(torch.func.grad(g))(x)
    assert (torch_internals.reverse_transforms(), *depths) == (0, 1, 2)
    layer = nn.Linear(2, 2)
    assert not torch_internals.has_forward_hooks(layer)
    handle = layer.register_forward_hook(lambda *_: None)
    assert torch_internals.has_forward_hooks(layer)
    handle.remove()
    layer.register_forward_pre_hook(lambda *_: None)
    assert torch_internals.has_forward_hooks(layer)


def test_every_error_of_the_compiler_is_of_one_class() -> None:
    def backend(*_: object) -> None:
        raise RuntimeError("no compiler")

    torch.compiler.reset()
    with pytest.raises(torch_internals.compile_error(), match="no compiler"):
        torch.compile(torch.sin, backend=backend)(torch.ones(2))
    for path in ("torch._inductor.exc.InductorError", "torch._dynamo.exc.Unsupported"):
        module, _, name = path.rpartition(".")
        error = getattr(__import__(module, fromlist=[name]), name)
        assert issubclass(error, torch_internals.compile_error())
