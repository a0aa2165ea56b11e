"""The course: its lessons in order, and what this reader has done in each.

A lesson is a marimo notebook in ``notebooks/``. The order is that of the flow of a transformer:
gradients, similarity, choice, attention, blocks, training, inference. ``fenchel learn`` shows the
list; nothing here imports torch or marimo, so that it appears at once.
"""

import json
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

NOTEBOOKS = Path(__file__).parent / "notebooks"
MODEL = Path(__file__).parent / "model"
"""A small trained model, a Hugging Face directory in float16: ``make lesson-model`` writes it."""


class Lesson(NamedTuple):
    """One lesson of ``COURSE``."""

    name: str
    """The stem of its file in ``notebooks/``."""
    title: str
    question: str
    """What the reader predicts first."""
    minutes: int
    """For a reader at school: 110 words, two checked statements or one control per minute, and 20
    for the proof and the exercise."""
    needs: tuple[str, ...] = ()
    """Names of lessons to read before."""
    research: bool = False
    """Whether it is for those who want to go on, and no later lesson needs it."""

    @property
    def path(self) -> Path:
        """Its notebook."""
        return NOTEBOOKS / f"{self.name}.py"

    @property
    def number(self) -> int:
        """Its place in the course, from 0: it changes when a lesson is added before it."""
        return COURSE.index(self)


PARTS = {
    "Foundations": (
        Lesson(
            "sums_and_tables",
            "Sums, tables and a little Python",
            "Two shops, two shopping lists: how many multiplications give all four bills?",
            35,
        ),
        Lesson(
            "slopes",
            "Slopes and gradients",
            "Ten steps downhill from 3, each a tenth of the slope: how close to 0 do they end?",
            40,
        ),
        Lesson(
            "gradient_flow",
            "Gradient flow and the learning rate",
            "On the parabola, which learning rate arrives in one step, and which one never does?",
            45,
            ("slopes",),
        ),
        Lesson(
            "similarity",
            "Vectors and similarity in high dimension",
            "Two random directions in 1,000 dimensions: what is the angle between them?",
            45,
        ),
        Lesson(
            "backpropagation",
            "Multilayer perceptrons and backpropagation by hand",
            "Which way does the error travel through a network, and what does it meet on the way?",
            45,
            ("sums_and_tables", "slopes"),
        ),
        Lesson(
            "cross_entropy",
            "Probability, entropy and cross-entropy",
            "Being sure and wrong against being unsure: how much more does it cost?",
            40,
        ),
        Lesson(
            "lagrange",
            "Constraints: Lagrange multipliers and the KKT conditions",
            "At the best point on a fence, in which direction does the slope of the hill point?",
            45,
            ("slopes",),
        ),
    ),
    "Choice": (
        Lesson(
            "softmax",
            "Softmax as the solution of a problem",
            "Scores 5 and 4, or 2 and 1: which pair gives weights that lie further apart?",
            45,
            ("cross_entropy", "lagrange"),
        ),
        Lesson(
            "priors_and_budgets",
            "Priors and budgets",
            "Excluded beforehand, but with the best score: which weight does softmax give it?",
            40,
            ("softmax",),
        ),
        Lesson(
            "hypothesis_tests",
            "Hypothesis tests: what a nat means",
            "How many draws does it take to tell softmax weights from the prior they started with?",
            35,
            ("priors_and_budgets",),
        ),
        Lesson(
            "sparse_choice",
            "Sparse choices: entmax, sparsemax, hard",
            "Can a weight be exactly zero and its gradient still be right?",
            40,
            ("softmax",),
        ),
    ),
    "Attention": (
        Lesson(
            "attention",
            "Attention from similarity",
            "What happens to attention when the width of a head grows and nothing is rescaled?",
            50,
            ("similarity", "softmax"),
        ),
        Lesson(
            "masks_and_heads",
            "Masks and heads",
            "Eight heads of an eighth of the width in place of one: how many parameters more?",
            45,
            ("attention",),
        ),
        Lesson(
            "attention_derivative",
            "The derivative of attention",
            "Two tokens: what do you know about the gradient of their keys before you compute it?",
            45,
            ("backpropagation", "attention"),
        ),
        Lesson(
            "lipschitz",
            "The Lipschitz cone, and why attention has none",
            "Make a token ten times as long: by what factor can the sensitivity of attention grow?",
            50,
            ("attention_derivative",),
        ),
        Lesson(
            "positions",
            "Positions",
            "Trained on 32 tokens and asked to read 128: which position encoding still works?",
            60,
            ("masks_and_heads",),
        ),
    ),
    "Models and training": (
        Lesson(
            "residuals",
            "Residuals and the feed-forward layer",
            "Fifty layers without skip connections: does the gradient of the first one vanish?",
            45,
            ("backpropagation", "masks_and_heads"),
        ),
        Lesson(
            "blocks",
            "Norms and blocks",
            "Twelve blocks with norms before each part, or after each sum: which of them learns?",
            45,
            ("residuals",),
        ),
        Lesson(
            "numerics",
            "Numbers in a computer: overflow, half precision, accumulation",
            "What is the largest score whose exponential a 16-bit number can hold?",
            45,
            ("softmax",),
        ),
        Lesson(
            "optimisers",
            "Optimisers, schedules and clipping",
            "A gradient a million times smaller: how much smaller is the step of Adam?",
            45,
            ("gradient_flow",),
        ),
        Lesson(
            "score_descent",
            "Descent in the space of scores",
            "Is the negative gradient of the weights the steepest way to change the scores?",
            80,
            ("attention_derivative", "optimisers"),
            research=True,
        ),
        Lesson(
            "tokens_and_calibration",
            "Tokenizers, perplexity and calibration",
            "Two models give a text the same probability. Can their perplexities differ?",
            55,
            ("cross_entropy",),
        ),
    ),
    "Scale, and the whole": (
        Lesson(
            "efficient_attention",
            "Efficient attention and caches",
            "From which length on do the scores cost more than the projections?",
            50,
            ("masks_and_heads", "numerics"),
        ),
        Lesson(
            "scaling",
            "Scaling laws, adapters, retrieval and experts",
            "A hundred times the compute: a larger model, or more text?",
            45,
            ("blocks", "tokens_and_calibration"),
        ),
        Lesson(
            "gates_and_sinks",
            "Sinks and gates: weight that no token gets",
            "No token is worth reading: what do the weights of softmax sum to?",
            35,
            ("softmax", "attention"),
        ),
        Lesson(
            "test_time_regression",
            "Attention as regression at test time",
            "The same key twice, with the values 3 and 5: what does attention answer for it?",
            35,
            ("slopes", "efficient_attention"),
        ),
        Lesson(
            "lens",
            "What does layer 2 know?",
            "A model of three layers: how many of its answers stand already after the first?",
            35,
            ("cross_entropy", "blocks"),
        ),
        Lesson(
            "certified_decisions",
            "Does the next token change?",
            "A hundred random pushes leave the next token as it is: is there one that changes it?",
            35,
            ("sparse_choice", "lipschitz"),
        ),
        Lesson(
            "whole_flow",
            "The whole flow on one page",
            "How long does it take to train a model that finishes the sentence she sells sea?",
            40,
            ("blocks", "optimisers", "tokens_and_calibration"),
        ),
    ),
}
"""The lessons in groups, by title, in order."""

COURSE = tuple(each for lessons in PARTS.values() for each in lessons)


def lesson(name: str) -> Lesson:
    """The lesson of a name, of its number, or of the beginning of its name.

    >>> lesson("7").name, lesson("softmax").title
    ('softmax', 'Softmax as the solution of a problem')
    """
    named = [each for each in COURSE if name in {str(each.number), each.name}]
    found = named or [each for each in COURSE if name and each.name.startswith(name)]
    if len(found) != 1:
        names = ", ".join(each.name for each in found or COURSE)
        raise ValueError(f"{name!r} names {'no' if not found else 'more than one'} lesson: {names}")
    return found[0]


@dataclass(frozen=True)
class Record:
    """What a reader has done in a lesson; ladder.js has the same fields."""

    opened: bool = False
    prediction: str = ""
    """The option that was chosen for the first question."""
    pencil: str = ""
    """The number that was written last."""
    pencil_tries: int = 0
    """How many were wrong."""
    pencil_right: bool = False
    choice: str = ""
    choice_tries: int = 0
    choice_right: bool = False
    code: str = ""
    """The code that was checked last."""
    tries: int = 0
    """How many answers in code were wrong."""
    hints: int = 0
    """How many hints of the exercise are open."""
    solved: bool = False
    cards: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By the number of a recap card: its box, 0 for one that is weak, and the day it is due."""

    @property
    def steps(self) -> dict[str, bool]:
        """What is done; three of the four need no code."""
        return {
            "prediction": bool(self.prediction),
            "pencil": self.pencil_right,
            "choice": self.choice_right,
            "code": self.solved,
        }


def completed() -> set[str]:
    """The lessons whose exercise this reader has solved.

    >>> completed() <= {each.name for each in COURSE}
    True
    """
    return {name for name, record in records().items() if record.solved}


def records() -> dict[str, Record]:
    """What this reader has done, by the name of the lesson."""
    stored = _stored()
    return {each.name: _sound(stored[each.name]) for each in COURSE if each.name in stored}


def record_of(name: str) -> Record:
    """What this reader has done in a lesson; an empty record if nothing."""
    return records().get(name, Record())


def keep(name: str, fields: Mapping[str, Any]) -> Record:
    """Change fields of a record; a field that is not of its type is refused."""
    if name not in {each.name for each in COURSE}:
        raise ValueError(f"{name!r} names no lesson.")
    given = asdict(_sound(fields))
    if wrong := [key for key, value in fields.items() if repr(given.get(key)) != repr(value)]:
        raise ValueError(f"a record of a lesson has no such value of {', '.join(wrong)}.")
    with _writing:
        stored = _stored()
        record = replace(_sound(stored.get(name)), **fields)
        path = _progress_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        if not stored and path.exists() and path.stat().st_size:  # it cannot be read: keep it
            path.replace(path.with_suffix(".damaged"))
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps({**stored, name: asdict(record)}), encoding="utf-8")
        draft.replace(path)
    return record


def keep_answer(name: str, code: str, *, solved: bool) -> Record:
    """Record code that was checked; what was solved once stays solved."""
    before = record_of(name)
    tries = before.tries + (not solved)
    return keep(name, {"code": code, "tries": tries, "solved": before.solved or solved})


_writing = threading.Lock()
"""The pages of ``fenchel learn`` are threads of one process."""
_CARDS = ("box", "due")


def _stored() -> dict[str, Any]:
    """The file as it is; nothing where it cannot be read."""
    try:
        stored = json.loads(_progress_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _sound(given: Any) -> Record:
    """A record from outside: a field that is not of its type counts as absent, the others stay."""
    if not isinstance(given, dict):
        return Record()
    found = {
        key: given[key]
        for key, default in asdict(Record()).items()
        if type(given.get(key)) is type(default)
    }
    cards = found.get("cards", {})
    found["cards"] = {
        key: card
        for key, card in cards.items()
        if key in {"0", "1", "2"}
        and isinstance(card, dict)
        and tuple(card) == _CARDS
        and type(card["box"]) is int
        and re.fullmatch(r"\d{4}-\d\d-\d\d", str(card["due"]))
    }
    return Record(**found)


def _progress_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "fenchel" / "lessons.json"
