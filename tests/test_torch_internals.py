"""fenchel/torch_internals.py: private names of torch are in that file, and this torch has them."""

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import cross_entropy
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import fenchel
from fenchel import torch_internals
from fenchel.attention import Causal, attend
from fenchel.choice import Capped, Choice, Entmax, Hard, Softmax, Sparsemax
from fenchel.model import Transformer
from fenchel.optim import OptimConfig, build_optimiser

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
    handle = layer.register_forward_pre_hook(lambda *_: None)
    assert torch_internals.has_forward_hooks(layer)
    handle.remove()
    for register in (register_module_forward_hook, register_module_forward_pre_hook):
        assert not torch_internals.has_forward_hooks(layer)
        handle = register(lambda *_: None)  # of all modules
        assert torch_internals.has_forward_hooks(layer)
        handle.remove()


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


def test_a_failure_of_the_compiler_differs_from_an_exception_of_the_function() -> None:
    def failure(compiled: Callable[[], object]) -> Exception:
        torch.compiler.reset()
        with pytest.raises(Exception) as caught:
            compiled()
        return caught.value

    def backend(*_: object) -> None:
        raise RuntimeError("no compiler")

    def raises(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise ValueError("mine")
        return x

    def mismatched(x: Tensor) -> Tensor:
        return x + torch.ones(3)

    x = torch.ones(2)
    assert torch_internals.is_compiler_failure(
        failure(lambda: torch.compile(torch.sin, backend=backend)(x))
    )
    from torch._inductor.exc import CppCompileError

    assert torch_internals.is_compiler_failure(CppCompileError(["c++"], "no such header"))
    for function in (raises, mismatched):
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        assert not torch_internals.is_compiler_failure(failure(lambda f=compiled: f(x)))
    assert not torch_internals.is_compiler_failure(failure(lambda: int("x")))


def test_a_failure_of_triton_is_known_by_the_frames_it_passed() -> None:
    for module, failed in (("triton.compiler.compiler", True), ("triton.runtime.driver", False)):
        names = {"__name__": module}
        exec("def run(): raise RuntimeError('PassManager::run failed')", names)
        with pytest.raises(RuntimeError) as caught:
            names["run"]()  # type: ignore[operator]
        assert torch_internals.is_compiler_failure(caught.value) == failed


# the same numbers with every version

NUMBERS = {
    "Softmax": 26.190613418563,
    "Softmax loss": 88.690176186374,
    "Entmax": 15.992342455346,
    "Entmax loss": 75.547550098094,
    "Sparsemax": 6.379197114290,
    "Sparsemax loss": 73.272252140087,
    "Capped": 35.448621487061,
    "Hard": -0.669119162843,
    "Hard loss": 72.574577903263,
    "muon": 2.827307513685,
    "adamw": 2.177422395241,
    "score": 2.672900226670,
}
"""What torch 2.11, 2.13 and 2.15 compute, in float64 and equal in all digits of it."""


@pytest.fixture
def waves() -> list[Tensor]:
    """q, k and v of shape (2, 2, 7, 4), by a formula."""
    places = torch.arange(2 * 2 * 7 * 4, dtype=torch.float64)
    return [3.0 * torch.sin(places * f).view(2, 2, 7, 4) for f in (1.3, 0.7, 2.1)]


@pytest.mark.parametrize("backend", ["auto", "blocked", "reference"])
@pytest.mark.parametrize("choice", [Softmax(0.7), Entmax(1.3), Sparsemax(), Capped(0.4), Hard()])
def test_attention_is_the_same_with_every_version(
    choice: Choice, backend: str, waves: list[Tensor]
) -> None:
    q, k, v = waves
    out = attend(q, k, v, choice=choice, prior=Causal(), backend=backend)
    assert (out * v.flip(2)).sum().item() == pytest.approx(NUMBERS[type(choice).__name__], 1e-11)


@pytest.mark.parametrize("choice", [Softmax(0.7), Entmax(1.3), Sparsemax(), Hard()])
def test_losses_are_the_same_with_every_version(choice: Choice, waves: list[Tensor]) -> None:
    z = waves[0].reshape(-1, 4)
    loss = choice.loss(z, torch.arange(len(z)) % 3).sum().item()
    assert loss == pytest.approx(NUMBERS[f"{type(choice).__name__} loss"], 1e-11)


@pytest.mark.parametrize("optimiser", ["muon", "adamw", "score"])
def test_training_is_the_same_with_every_version(
    optimiser: str, build: Callable[..., Transformer], ids: Tensor
) -> None:
    model = build().train()
    given = {"score_rate": 0.2, "score_radius": 6.0, "score_opening": 0.0}
    config = OptimConfig(optimiser=optimiser, **given if optimiser == "score" else {})
    members = build_optimiser(model, config)
    for _ in range(4):
        loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        members.zero_grad()
        loss.backward()
        members.step()
    assert loss.item() == pytest.approx(NUMBERS[optimiser], 1e-8)
