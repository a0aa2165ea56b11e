"""The course: its lessons in order, and which of them this reader has completed.

A lesson is a marimo notebook in ``notebooks/``. The order is that of the flow of a transformer:
gradients, similarity, choice, attention, blocks, training, inference. ``fenchel learn`` shows the
list; nothing here imports torch or marimo, so that it appears at once.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

NOTEBOOKS = Path(__file__).parent / "notebooks"
MODEL = Path(__file__).parent / "model"
"""A small trained model, a Hugging Face directory in float16: ``make lesson-model`` writes it."""


class Lesson(NamedTuple):
    """One lesson; its number is its place in ``COURSE``."""

    name: str
    """The stem of its file in ``notebooks/``."""
    title: str
    question: str
    """What the reader predicts first."""
    minutes: int
    """For a reader at school, with the exercise: 110 words or two checked statements per minute."""
    needs: tuple[str, ...] = ()
    """Names of lessons to read before."""
    research: bool = False
    """Whether it is for those who want to go on, and no later lesson needs it."""

    @property
    def path(self) -> Path:
        """Its notebook."""
        return NOTEBOOKS / f"{self.name}.py"


COURSE = (
    Lesson(
        "l01_slopes",
        "Slopes and gradients",
        "Ten steps downhill from 3, each a tenth of the slope: how close to 0 do they end?",
        35,
    ),
    Lesson(
        "l02_gradient_flow",
        "Gradient flow and the learning rate",
        "On the parabola, which learning rate arrives in a single step, and which one never does?",
        45,
        ("l01_slopes",),
    ),
    Lesson(
        "l03_similarity",
        "Vectors and similarity in high dimension",
        "Two random directions in 1,000 dimensions: what is the angle between them?",
        50,
    ),
    Lesson(
        "l04_backpropagation",
        "Multilayer perceptrons and backpropagation by hand",
        "Which way does the error travel through a network, and what does it meet on the way?",
        55,
        ("l01_slopes",),
    ),
    Lesson(
        "l05_cross_entropy",
        "Probability, entropy and cross-entropy",
        "Being sure and wrong against being unsure: how much more does it cost?",
        45,
    ),
    Lesson(
        "l06_lagrange",
        "Constraints: Lagrange multipliers and the KKT conditions",
        "At the best point on a fence, in which direction does the slope of the hill point?",
        55,
        ("l01_slopes",),
    ),
    Lesson(
        "l07_softmax",
        "Softmax as the solution of a problem",
        "Scores 5 and 4, or 2 and 1: which pair gives weights that lie further apart?",
        45,
        ("l05_cross_entropy", "l06_lagrange"),
    ),
    Lesson(
        "l08_why_softmax",
        "Why softmax: priors, budgets and hypothesis tests",
        "How many draws does it take to tell softmax weights from the prior they started with?",
        70,
        ("l07_softmax",),
    ),
    Lesson(
        "l09_sparse_choice",
        "Sparse choices: entmax, sparsemax, hard",
        "Can a weight be exactly zero and its gradient still be right?",
        45,
        ("l07_softmax",),
    ),
    Lesson(
        "l10_attention",
        "Attention from similarity",
        "What happens to attention when the width of a head grows and nothing is rescaled?",
        90,
        ("l03_similarity", "l07_softmax"),
    ),
    Lesson(
        "l11_attention_derivative",
        "The derivative of attention",
        "Two tokens: what do you know about the gradient of their keys before you compute it?",
        60,
        ("l04_backpropagation", "l10_attention"),
    ),
    Lesson(
        "l12_lipschitz",
        "The Lipschitz cone, and why attention has none",
        "Make a token ten times as long: by what factor can the sensitivity of attention grow?",
        60,
        ("l11_attention_derivative",),
    ),
    Lesson(
        "l13_positions",
        "Positions",
        "Trained on 32 tokens and asked to read 128: which position encoding still works?",
        65,
        ("l10_attention",),
    ),
    Lesson(
        "l14_blocks",
        "Normalisation, residuals and blocks",
        "Fifty layers without skip connections: does the gradient of the first one vanish?",
        75,
        ("l04_backpropagation", "l10_attention"),
    ),
    Lesson(
        "l15_numerics",
        "Numbers in a computer: overflow, half precision, accumulation",
        "What is the largest score whose exponential a 16-bit number can hold?",
        45,
        ("l07_softmax",),
    ),
    Lesson(
        "l16_optimisers",
        "Optimisers, schedules and clipping",
        "A gradient a million times smaller: how much smaller is the step of Adam?",
        50,
        ("l02_gradient_flow",),
    ),
    Lesson(
        "l17_score_descent",
        "Descent in the space of scores",
        "Is the negative gradient of the weights the steepest way to change the scores?",
        80,
        ("l11_attention_derivative", "l16_optimisers"),
        research=True,
    ),
    Lesson(
        "l18_tokens_and_calibration",
        "Tokenizers, perplexity and calibration",
        "Two models give a text the same probability. Can their perplexities differ?",
        65,
        ("l05_cross_entropy",),
    ),
    Lesson(
        "l19_efficient_attention",
        "Efficient attention and caches",
        "From which length on do the scores cost more than the projections?",
        60,
        ("l10_attention", "l15_numerics"),
    ),
    Lesson(
        "l20_scaling",
        "Scaling laws, adapters, retrieval and experts",
        "A hundred times the compute: a larger model, or more text?",
        45,
        ("l14_blocks", "l18_tokens_and_calibration"),
    ),
    Lesson(
        "l21_whole_flow",
        "The whole flow on one page",
        "How long does it take to train a model that finishes the sentence she sells sea?",
        35,
        ("l14_blocks", "l16_optimisers", "l18_tokens_and_calibration"),
    ),
)


PARTS = {
    "Foundations": COURSE[:6],
    "Choice": COURSE[6:9],
    "Attention": COURSE[9:13],
    "Models and training": COURSE[13:18],
    "Scale, and the whole": COURSE[18:],
}
"""The lessons in groups, by title."""


def lesson(name: str) -> Lesson:
    """The lesson of a name, of its number, or of the beginning of its name.

    >>> lesson("7").name, lesson("softmax").title
    ('l07_softmax', 'Softmax as the solution of a problem')
    """
    found = [
        each
        for number, each in enumerate(COURSE, start=1)
        if name in {str(number), each.name} or each.name.split("_", 1)[1].startswith(name)
    ]
    if len(found) != 1:
        names = ", ".join(each.name for each in found or COURSE)
        raise ValueError(f"{name!r} names {'no' if not found else 'more than one'} lesson: {names}")
    return found[0]


class Answer(NamedTuple):
    """What a reader has done in the exercise of a lesson."""

    code: str = ""
    """The last code that was checked."""
    tries: int = 0
    """How many answers were wrong."""
    solved: bool = False


def completed() -> set[str]:
    """The lessons whose exercise this reader has solved.

    >>> completed() <= {each.name for each in COURSE}
    True
    """
    return {name for name, answer in _answers().items() if answer.solved}


def kept_answer(name: str) -> Answer:
    """The reader's answer to the exercise of a lesson; an empty one if there is none."""
    return _answers().get(name, Answer())


def keep_answer(name: str, code: str, *, solved: bool) -> Answer:
    """Record an answer that was checked; what was solved once stays solved."""
    before = kept_answer(name)
    answer = Answer(code, before.tries + (not solved), before.solved or solved)
    path = _progress_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    everything = _answers() | {name: answer}
    draft.write_text(json.dumps({key: each._asdict() for key, each in everything.items()}))
    draft.replace(path)
    return answer


def _answers() -> dict[str, Answer]:
    try:
        stored = json.loads(_progress_file().read_text())
        found = {each.name: Answer(**stored[each.name]) for each in COURSE if each.name in stored}
    except (OSError, ValueError, TypeError):
        return {}
    return {
        name: answer
        for name, answer in found.items()
        if (type(answer.code), type(answer.tries), type(answer.solved)) == (str, int, bool)
    }


def _progress_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "fenchel" / "lessons.json"
