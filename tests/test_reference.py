"""The reference pages hold to the code: names exist, pages are current, no id is left out."""

import ast
import importlib
import importlib.util
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fenchel
from fenchel.lessons.course import COURSE
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
    sys.path.append(str(ROOT / "docs"))  # as a script has it
    spec.loader.exec_module(module)
    sys.path.remove(str(ROOT / "docs"))
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
    assert all(one.id in claimed or one.tests for one in reference.requirements())


def test_functions_exist() -> None:
    names = {name for one in reference.requirements() for name in one.functions}
    names |= {one.function for one in reference.CONCEPTS}
    names |= {f"fenchel.evaluate.diagnostics.{one.detect.__name__}" for one in reference.PITFALLS}
    names |= {one.detector for one in reference.mistakes()}
    assert len(names) > 90
    for name in names:
        resolve(name)


def checking(tree: ast.Module) -> dict[str, bool]:
    """The functions of a file, and whether they or a function of the file that they call assert."""
    bodies = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    calls = {
        name: {
            ast.unparse(each.func).split(".")[-1]
            for each in ast.walk(body)
            if isinstance(each, ast.Call)
        }
        for name, body in bodies.items()
    }
    found = {
        name
        for name, body in bodies.items()
        if any(isinstance(each, ast.Assert) for each in ast.walk(body))
        or {"assert_close", "raises", "warns"} & calls[name]
    }
    return {name: name in found or bool(found & calls[name]) for name in bodies}


def test_every_named_test_is_one_test_and_asserts() -> None:
    known: dict[str, list[bool]] = {}
    for file in TESTS.rglob("test_*.py"):
        for name, asserts in checking(ast.parse(file.read_text())).items():
            known.setdefault(name, []).append(asserts)
    named = {name for one in reference.requirements() for name in one.tests}
    assert len(named) > 250
    assert all(name.startswith("test_") for name in named)
    wrong = {name: known.get(name, []) for name in named if known.get(name) != [True]}
    assert wrong == {}, "absent, several of one name, or without an assertion"


def test_every_claim_depends_on_what_was_computed() -> None:
    for claim in reference.claims():
        assert any(isinstance(leaf, ast.Name) for leaf in ast.walk(claim.holds)), claim.ids


def test_pages_exist() -> None:
    for one in reference.requirements():
        for page in one.pages:
            assert (ROOT / "docs" / page).is_file(), page


PHRASES = {
    "PD-01": """| Adam, AdamW |
        | gradient descent |
        | scaled dot-product attention |
        | multi-head attention |
        | rotary positions |""",
    "PD-08": """J = \\beta(\\mathrm{diag}(p) - p p^\\top)
        G_q = c\\, G_z k
        A^\\top G_Y B^\\top
        \\operatorname{tr}(AB)""",
    "PD-09": """**attention collapse**
        **causal mask**
        **KV cache**
        **multi-head attention**
        **position encoding**
        **scaled dot-product attention**""",
    "PD-10": """| pitfall | symptom | detector | remedy |
        | scale |
        | post-norm |
        | neighbours |
        temperature""",
    "PD-17": """Attention is all you need
        BERT: pre-training
        Language models are few-shot learners
        Scaling laws for neural language models
        RoFormer
        FlashAttention
        one write-head is all you need
        Decoupled weight decay
        On layer normalization
        Using the output embedding""",
    "PD-18": """rows are tokens
        ## Shapes
        log-priors, added after scaling
        Positions count from 0
        Equations are named and not numbered""",
    "PD-19": """## kkt
        ## convex_program
        ## Which problems are convex
        ## Mechanisms""",
    "E28": "Equations are named and not numbered",
    "E29": "the order of the lessons is the order of the course",
    "E79": """One letter means one axis
        beta is the inverse temperature and lambda, 1/T or 1/tau elsewhere
        multipliers are nu, mu and eta
        T is a number of queries, and a temperature is written out""",
}
"""What a page must contain for an id that is answered by words, one phrase per line."""


@pytest.mark.parametrize("name", PHRASES)
def test_a_page_says_what_its_requirement_asks(name: str) -> None:
    (pages,) = [one.pages for one in reference.requirements() if one.id == name]
    text = " ".join(" ".join((ROOT / "docs" / page).read_text().split()) for page in pages)
    assert [each for each in PHRASES[name].splitlines() if each.strip() not in text] == []


def test_every_id_of_a_page_has_its_phrases() -> None:
    by_words = test_a_page_says_what_its_requirement_asks.__name__
    assert [one.id for one in reference.requirements() if by_words in one.tests] == list(PHRASES)


def test_concepts_words_and_pitfalls_have_lessons() -> None:
    named = {one.name: one.lesson for one in (*reference.CONCEPTS, *reference.mistakes())}
    named |= {word: name for word, (_, name) in reference.GLOSSARY.items() if name}
    named |= reference.DOCTOR_LESSONS
    lessons = {each.name for each in COURSE}
    assert {what: name for what, name in named.items() if name not in lessons} == {}
    assert len({one.name for one in reference.CONCEPTS}) == len(reference.CONCEPTS)
    assert reference.DOCTOR_LESSONS.keys() == {one.name for one in reference.PITFALLS}
    page = (ROOT / "docs" / "quick_reference.md").read_text()
    assert all(f"| {one.name} |" in page for one in reference.CONCEPTS), "no part is left out"


@pytest.mark.parametrize("mistake", reference.mistakes(), ids=lambda mistake: mistake.name)
def test_a_detector_finds_its_mistake(mistake: Any) -> None:
    assert mistake.detector.split(".")[-1] in mistake.shows
    assert "assert" in mistake.shows
    resolve(mistake.detector)
    seed = torch.Generator().manual_seed(0)
    exec(mistake.shows, {"torch": torch, "math": math, "fenchel": fenchel, "seed": seed})


def test_there_are_thirty_pitfalls_with_names_of_their_own() -> None:
    names = [one.name for one in (*reference.PITFALLS, *reference.mistakes())]
    assert len(set(names)) == len(names) >= 30


@pytest.mark.parametrize("page", sorted(reference.PAGES))
def test_a_page_is_what_the_code_writes(page: str) -> None:
    written = (ROOT / page).read_text()
    assert written == reference.PAGES[page](), "run python docs/reference.py"


def test_the_errata_page_has_every_erratum() -> None:
    ids = [name for one in reference.errata() for name in one.ids] + [*reference.errata_elsewhere()]
    assert sorted(ids, key=lambda name: int(name[1:])) == [f"E{n:02}" for n in range(1, ERRATA + 1)]
    pages = {one.id: one.pages for one in reference.requirements()}
    for name, page in reference.errata_elsewhere().items():
        assert page in pages[name]
    for one in reference.errata():
        assert all(each.strip().endswith((".", ":", "?", "]", ")")) for each in one[1:]), one
        lessons = {name for id_ in one.ids for name in reference.lessons_of().get(id_, [])}
        assert lessons or all(pages[id_] for id_ in one.ids), one.ids


def test_ids_are_named_beside_the_tests_and_on_no_page() -> None:
    an_id = re.compile(rf"\b(E\d\d+|({'|'.join(REQUIREMENTS)})-\d\d)\b")
    assert an_id.search((TESTS / "coverage.md").read_text())
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/README.md")]
    assert {page.name: one[0] for page in pages if (one := an_id.search(page.read_text()))} == {}


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
