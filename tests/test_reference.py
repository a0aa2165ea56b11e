"""The reference pages hold to the code: names exist, pages are current, no id is left out."""

import ast
import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fenchel
from fenchel.lessons.course import COURSE, lesson
from fenchel.model import ModelConfig, Transformer

ROOT = Path(fenchel.__file__).parents[1]
TESTS = ROOT / "tests"
REQUIREMENTS = {
    "SM": 47, "AT": 43, "DV": 31, "LP": 19, "SD": 23, "PO": 25, "NB": 29, "BP": 17, "OP": 29,
    "EF": 23, "TR": 21, "RG": 13, "GE": 16, "PD": 26,
}  # fmt: skip
ERRATA = 104


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = load()


def resolve(name: str) -> Any:
    """The value of a dotted name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            value = getattr(value, part)
        return value
    raise ImportError(name)


def all_ids() -> list[str]:
    names = [
        f"{prefix}-{n:02}" for prefix, last in REQUIREMENTS.items() for n in range(1, last + 1)
    ]
    return names + [f"E{n:02}" for n in range(1, ERRATA + 1)]


def test_every_id_has_its_row() -> None:
    assert [one.id for one in reference.requirements()] == all_ids()


def test_claims_name_ids_that_exist() -> None:
    assert {name for claim in reference.claims() for name in claim.ids} <= set(all_ids())


def test_every_id_has_a_lesson_or_a_page() -> None:
    claimed = reference.lessons_of()
    missing = [
        one.id for one in reference.requirements() if one.id not in claimed and not one.pages
    ]
    assert not missing


def test_every_id_is_tested() -> None:
    """By a test of the library, or by the claim of a lesson, which the suite evaluates."""
    claimed = reference.lessons_of()
    documents = {"PD-01", "PD-07", "PD-08", "PD-09", "PD-17", "PD-18", "PD-19", "PD-26"}
    errata_of_words = {"E28", "E29", "E79", "E82", "E97"}
    missing = {
        one.id for one in reference.requirements() if one.id not in claimed and not one.tests
    }
    assert missing <= documents | errata_of_words


def test_functions_exist() -> None:
    names = {name for one in reference.requirements() for name in one.functions}
    names |= {one.function for one in reference.CONCEPTS}
    names |= {f"fenchel.evaluate.diagnostics.{one.detect.__name__}" for one in reference.PITFALLS}
    assert len(names) > 90
    for name in names:
        resolve(name)


def test_tests_exist() -> None:
    known = {
        node.name
        for file in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    named = {name for one in reference.requirements() for name in one.tests}
    assert len(named) > 150
    assert named <= known


def test_pages_exist() -> None:
    for one in reference.requirements():
        for page in one.pages:
            assert (ROOT / "docs" / page).is_file(), page


def test_concepts_have_lessons_and_words_are_in_order() -> None:
    for one in reference.CONCEPTS:
        assert lesson(one.lesson) in COURSE
    assert len({one.name for one in reference.CONCEPTS}) == len(reference.CONCEPTS)


@pytest.mark.parametrize("page", sorted(reference.PAGES))
def test_a_page_is_what_the_code_writes(page: str) -> None:
    written = (ROOT / "docs" / page).read_text()
    assert written == reference.PAGES[page](), "run python docs/reference.py"


def test_the_errata_page_has_every_erratum() -> None:
    page = (ROOT / "docs" / "errata.md").read_text()
    assert re.findall(r"^\*\*(E\d+)\.\*\*", page, re.MULTILINE) == [
        f"E{n:02}" for n in range(1, ERRATA + 1)
    ]


def test_the_shapes_of_the_notation_are_those_of_the_code() -> None:
    B, T, M, H, G, V = 2, 5, 24, 4, 2, 11
    model = Transformer(ModelConfig(vocabulary=V, width=M, layers=1, heads=H, kv_heads=G))
    ids = torch.zeros(B, T, dtype=torch.long)
    seen: dict[str, torch.Tensor] = {"ids": ids, "logits": model(ids)}
    seen["hidden"] = model(ids, return_hidden=True)

    def observe(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        seen.update(q=q, k=k, v=v)

    model(ids, observe=observe)
    output, weights = fenchel.attend(seen["q"], seen["k"], seen["v"], return_weights=True)
    seen.update(output=output, weights=weights)
    size = {"B": B, "T": T, "S": T, "M": M, "H": H, "G": G, "D": M // H, "E": M // H, "V": V}
    text = (ROOT / "docs" / "notation.md").read_text().split("## Shapes")[1]
    table = re.findall(r"^\| `?(\w+)`? \| \(([\w, ]+)\)", text, re.MULTILINE)
    assert {name for name, _ in table} == seen.keys()
    for name, letters in table:
        assert seen[name].shape == tuple(size[letter] for letter in letters.split(", ")), name
