"""The reference pages of the documentation, made from the code.

    python docs/reference.py

writes docs/quick_reference.md (every concept: formula, meaning, function, lesson), docs/glossary.md,
docs/pitfalls.md (symptom, detector, remedy), docs/attentions.md (every published attention as one
problem), docs/coverage.md (every requirement: function, test,
lesson or page) and docs/errata.md, for which every notebook is run and its claims are recorded.
tests/test_reference.py holds the pages to the code: names must exist, and the pages that
need no run must be what this module writes.
"""

import ast
import importlib
import tomllib
from pathlib import Path
from typing import NamedTuple

from fenchel.attention.variants import variants_page
from fenchel.evaluate import PITFALLS
from fenchel.lessons.course import COURSE, Lesson

ROOT = Path(__file__).parents[1]


class Concept(NamedTuple):
    """One row of the quick reference; ``function`` is a dotted name, ``lesson`` a number."""

    name: str
    formula: str
    meaning: str
    function: str
    lesson: str


CONCEPTS = (
    Concept(
        "derivative",
        r"f'(x) = \lim_{h \to 0} \frac{f(x + h) - f(x)}{h}",
        "How fast an output changes with its input.",
        "fenchel.sensitivity.jacobian",
        "1",
    ),
    Concept(
        "gradient descent",
        r"x \leftarrow x - \eta \nabla f(x)",
        "A step against the slope, of a size that the learning rate sets.",
        "fenchel.optim.sgd",
        "1",
    ),
    Concept(
        "gradient flow",
        r"\dot\theta = -\nabla L(\theta)",
        "Descent with steps that are infinitely small; descent is its Euler method.",
        "fenchel.optim.sgd",
        "2",
    ),
    Concept(
        "momentum",
        r"v \leftarrow \mu v + (1 - \mu) g, \quad \theta \leftarrow \theta - \eta v",
        "A running mean of gradients; torch's own form leaves out the factor $1 - \\mu$.",
        "fenchel.optim.sgd_average",
        "2",
    ),
    Concept(
        "inner product, cosine",
        r"u \cdot v = \sum_i u_i v_i, \quad \cos = \frac{u \cdot v}{|u| |v|}",
        "Similarity with length, and without it.",
        "fenchel.evaluate.nearest_rows",
        "3",
    ),
    Concept(
        "backpropagation",
        r"\delta_1 = (\delta_2 W_2^\top) * \sigma'(Z_1), \quad \nabla_{W_1} L = X^\top \delta_1",
        "Errors flow from the output back to each weight.",
        "fenchel.attention.attend_vjp",
        "4",
    ),
    Concept(
        "entropy",
        r"H(p) = -\sum_i p_i \log p_i",
        "How spread a distribution is, in nats; $e^H$ is an effective number of alternatives.",
        "fenchel.attention.entropy",
        "5",
    ),
    Concept(
        "cross-entropy",
        r"L = -\sum_i y_i \log p_i",
        "The surprise of the truth; its gradient in the logits is $p - y$.",
        "fenchel.train.loss.total_loss",
        "5",
    ),
    Concept(
        "KKT conditions",
        r"\nabla f + \nu \nabla h + \mu \nabla g = 0, \quad \mu g = 0",
        "Stationarity, feasibility, sign and slackness: what the best point under constraints satisfies.",
        "fenchel.choice.kkt",
        "6",
    ),
    Concept(
        "softmax",
        r"p_i = \frac{u_i e^{\beta z_i}}{\sum_j u_j e^{\beta z_j}}",
        "The weights with the best average score minus divergence from a prior.",
        "fenchel.choice.Softmax",
        "7",
    ),
    Concept(
        "log-sum-exp",
        r"\mathrm{lse}_\beta(z) = \frac1\beta \log \sum_i e^{\beta z_i}",
        "The value of the softmax problem; its gradient is softmax.",
        "fenchel.choice.Softmax.value",
        "7",
    ),
    Concept(
        "softmax derivative",
        r"J = \beta (\mathrm{diag}(p) - p p^\top), \quad \|J\|_2 \le \beta / 2",
        "What one share gains, the others lose in proportion.",
        "fenchel.choice.Softmax.jacobian_product",
        "7",
    ),
    Concept(
        "Fenchel-Young loss",
        r"\Omega^*(z) + \Omega(y) - \langle y, z \rangle \ge 0",
        "The gap that a choice of $y$ leaves; cross-entropy for softmax.",
        "fenchel.choice.Softmax.loss",
        "7",
    ),
    Concept(
        "prior",
        r"x = \beta z + \log u",
        "Masks, padding, position biases: all are log-priors over the keys.",
        "fenchel.attention.Causal",
        "8",
    ),
    Concept(
        "budget",
        r"\max \langle p, z \rangle \;\text{s.t.}\; \mathrm{KL}(p \| u) \le \kappa",
        "The same weights, with the distance from the prior bounded instead of paid for.",
        "fenchel.choice.beta_for_budget",
        "8",
    ),
    Concept(
        "entmax, sparsemax",
        r"\Omega(p) = \frac{1}{\alpha (\alpha - 1)} \sum_i (p_i^\alpha - p_i)",
        "Choices whose small weights are exactly 0.",
        "fenchel.choice.Entmax",
        "9",
    ),
    Concept(
        "scaled dot-product attention",
        r"\mathrm{softmax}(Q K^\top / \sqrt{d_k} + \log u)\, V",
        "A mixture of values, weighted by the similarity of a query to the keys.",
        "fenchel.attention.attend",
        "10",
    ),
    Concept(
        "multi-head attention",
        r"\mathrm{concat}(\mathrm{head}_1, \ldots, \mathrm{head}_h) W_O",
        "Several attentions, each on its own projection of every feature.",
        "fenchel.model.Transformer",
        "10",
    ),
    Concept(
        "attention derivative",
        r"G_S = P * (G_P - \mathrm{rowsum}(P * G_P)), \quad G_Q = G_S K / \sqrt{d_k}",
        "Exact, in both directions, without storing the square of weights.",
        "fenchel.attention.attend_jvp",
        "11",
    ),
    Concept(
        "Lipschitz constant",
        r"|f(x) - f(x_0)| \le L |x - x_0|",
        "The slope of the cone in which a graph stays.",
        "fenchel.sensitivity.spectral_norm",
        "12",
    ),
    Concept(
        "attention on a ball",
        r"\|W_V\|_2 ((1 + \sqrt n) \|A\|_2 R^2 + \sqrt n)",
        "How far attention can move while every token has norm at most R; without a bound on R there is none.",
        "fenchel.sensitivity.certify",
        "12",
    ),
    Concept(
        "rotary positions",
        r"\theta_i = b^{-2 i / d_k}",
        "Queries and keys turn with their position; scores see differences only.",
        "fenchel.attention.rotary",
        "13",
    ),
    Concept(
        "ALiBi",
        r"\log u_{ij} = -m_h (i - j)",
        "A prior that falls with distance, at a rate per head.",
        "fenchel.attention.ALiBi",
        "13",
    ),
    Concept(
        "LayerNorm, RMSNorm",
        r"\gamma * \frac{x - \bar x}{\sqrt{\mathrm{var} + \epsilon}} + \beta, \quad \gamma * \frac{x}{\sqrt{\overline{x^2} + \epsilon}}",
        "Every token at the same scale, whatever else is in the batch.",
        "fenchel.model.norm.RMSNorm",
        "14",
    ),
    Concept(
        "pre-norm block",
        r"h \leftarrow h + F(\mathrm{norm}(h))",
        "A residual branch that reads a normalised stream.",
        "fenchel.model.Transformer",
        "14",
    ),
    Concept(
        "GELU",
        r"x\, \Phi(x)",
        "A gate whose probability of being open grows with its input.",
        "fenchel.model.ModelConfig",
        "14",
    ),
    Concept(
        "loss scale",
        r"g = \frac1s \nabla (s L)",
        "Keeps gradients of half precision above the smallest number.",
        "fenchel.train.TrainConfig",
        "15",
    ),
    Concept(
        "Adam, AdamW",
        r"\theta \leftarrow (1 - \eta\lambda)\theta - \eta \frac{\hat m}{\sqrt{\hat v} + \epsilon}",
        "A step per entry by sign and steadiness of its gradient; decay apart from it.",
        "fenchel.optim.adamw",
        "16",
    ),
    Concept(
        "schedule",
        r"\eta_t = \eta \tfrac12 (1 + \cos \pi \tfrac{t - T_w}{T - T_w})",
        "The learning rate over time: linear at first, then down to its end.",
        "fenchel.optim.warmup_cosine",
        "16",
    ),
    Concept(
        "clipping",
        r"g \leftarrow g \min(1, c / \|g\|)",
        "Shortens a long gradient and keeps its direction.",
        "fenchel.optim.clip_",
        "16",
    ),
    Concept(
        "score step",
        r"\min \langle G, \Delta S \rangle \;\text{s.t.}\; \|\Delta S\| \le \gamma",
        "The change of the weights that is steepest in the scores it causes.",
        "fenchel.optim.ScoreDescent",
        "17",
    ),
    Concept(
        "perplexity, bits per byte",
        r"e^{-\frac1T \sum_t \log p_t}, \quad \frac{-\sum_t \log_2 p_t}{\text{bytes}}",
        "Loss per token, and per byte: the second compares models with different tokenizers.",
        "fenchel.evaluate.score",
        "18",
    ),
    Concept(
        "calibration error",
        r"\sum_m \frac{|B_m|}{n} |\mathrm{acc}(B_m) - \mathrm{conf}(B_m)|",
        "How far confidence is from the frequency of being right.",
        "fenchel.evaluate.calibration_error",
        "18",
    ),
    Concept(
        "KV cache",
        r"2 B G n d_k \;\text{elements per layer}",
        "Keys and values of tokens that were read, kept for those to come.",
        "fenchel.generation.KVCache",
        "19",
    ),
    Concept(
        "tiled attention",
        r"m' = \max(m, \max S), \; l' = l e^{m - m'} + \sum e^{S - m'}",
        "Exact attention by tiles, with one maximum and one sum per row.",
        "fenchel.attention.attend",
        "19",
    ),
    Concept(
        "linear attention",
        r"\frac{\phi(Q) (\phi(K)^\top V)}{\phi(Q) (\phi(K)^\top \mathbf 1)}",
        "Another kernel in place of the exponential, in time linear in the length.",
        "fenchel.attention.linear_attend",
        "19",
    ),
    Concept(
        "FLOP model",
        r"8 n d^2 + 4 n^2 d",
        "Projections and scores of a layer; equal at $n = 2 d$.",
        "fenchel.model.forward_flops",
        "19",
    ),
    Concept(
        "LoRA",
        r"W + \frac{\alpha}{r} B A",
        "An adapter of low rank beside frozen weights.",
        "fenchel.model.lora.add_lora",
        "20",
    ),
    Concept(
        "mixture of experts",
        r"\sum_{e \in \mathrm{top}\,k} p_e F_e(x)",
        "A few of many feed-forward layers per token, chosen by a router.",
        "fenchel.model.ModelConfig",
        "20",
    ),
)

GLOSSARY = {
    "attention collapse": "Rows whose entropy is too low: one key takes nearly all weight. Uniform weights are another fault.",
    "attention sink": "A key, often the first, that takes weight which no other key deserves.",
    "bits per byte": "Loss in bits per byte of text; comparable across tokenizers.",
    "causal mask": "A prior that is 0 on later keys, so that a token is predicted only from earlier ones.",
    "certificate": "A bound that holds for every input of a set, with the argument for it.",
    "choice map": "A function from scores to weights that solves a regularised argmax over the simplex.",
    "conjugate": "For a convex function, the largest gap between a line and its graph, as a function of the slope.",
    "effective support": "The exponential of the entropy: how many alternatives a distribution amounts to.",
    "embedding": "The vector of a token; a row of a table.",
    "gauge": "A change of the query and key weights that changes no score.",
    "grouped-query attention": "Several query heads share the keys and values of one group.",
    "head": "One attention with its own projections.",
    "inverse temperature": "The factor beta on scores, 1/T; standard attention has 1/sqrt(d_k) beside it, as the scale.",
    "Jacobian": "The matrix of all derivatives of outputs by inputs.",
    "KV cache": "Keys and values of earlier tokens, kept so that each is computed once.",
    "Lipschitz": "Moving the output at most L times as far as the input.",
    "logit": "A score before softmax.",
    "mask": "A prior with entries 0 and 1.",
    "multi-head attention": "Attention in several heads, concatenated and projected.",
    "nat": "The unit of information with natural logarithms; 1 nat is 1.443 bits.",
    "perplexity": "The exponential of the loss per token; depends on the tokenizer.",
    "position encoding": "What gives a model the place of a token: rotations, biases, tables or sinusoids.",
    "prefill": "Reading a prompt at once, before decoding token by token.",
    "prior": "Weights before any score is seen; its logarithm is added to the scores.",
    "residual stream": "The vector of a token to which every branch adds.",
    "scaled dot-product attention": "Attention by inner products divided by the square root of the head width.",
    "scaling law": "How the loss falls with parameters, text and computing (lesson 20); not the factor 1/sqrt(d_k) on scores.",
    "simplex": "All vectors of weights that are not negative and sum to 1.",
    "support": "The alternatives with a weight above 0.",
    "teacher forcing": "Training each position on the true tokens before it, not on tokens that the model wrote.",
    "temperature": "The divisor of scores: larger is smoother.",
    "witness": "An input that attains, or nearly attains, a bound.",
}


def quick_reference() -> str:
    """The table of all concepts."""
    rows = [
        f"| {one.name} | ${_in_table(one.formula)}$ | {one.meaning} `{one.function}`, lesson {one.lesson} |"
        for one in CONCEPTS
    ]
    return "\n".join(
        [
            "# Quick reference",
            "",
            "Every concept on one line. Lessons open with `fenchel learn NUMBER`; symbols and shapes are in",
            "[Notation](notation.md), derivations in the pages on mathematics.",
            "",
            "| concept | formula | meaning, function and lesson |",
            "| --- | --- | --- |",
            *rows,
            "",
        ]
    )


def _in_table(formula: str) -> str:
    """A formula whose bars do not end a cell."""
    return formula.replace(r"\|", r"\Vert ").replace("|", r"\vert ")


def glossary() -> str:
    """The words, in order."""
    words = [
        f"**{word}**: {meaning}\n"
        for word, meaning in sorted(GLOSSARY.items(), key=lambda item: item[0].lower())
    ]
    return "\n".join(["# Glossary", "", *words])


def pitfalls_page() -> str:
    """Symptom, detector and remedy of each common mistake."""
    rows = [
        f"| {one.name} | {one.symptom} | `fenchel.evaluate.diagnostics.{one.detect.__name__}` | {one.remedy} |"
        for one in PITFALLS
    ]
    return "\n".join(
        [
            "# Pitfalls",
            "",
            "Mistakes that raise no error and make a model worse. `fenchel doctor DIR` runs every detector on the model of",
            "a run or a checkpoint.",
            "",
            "| pitfall | symptom | detector | remedy |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


class Claim(NamedTuple):
    """A call of ``claim`` in the source of a lesson."""

    lesson: Lesson
    ids: tuple[str, ...]
    holds: ast.expr


def claims() -> list[Claim]:
    """Every claim of the course, in order, by reading the notebooks without running them."""
    found = []
    for each in COURSE:
        for node in ast.walk(ast.parse(each.path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "claim":
                ids, _, holds = node.args
                found.append(Claim(each, tuple(ast.literal_eval(ids).split()), holds))
    return found


class Requirement(NamedTuple):
    """What answers an id: functions, tests, and pages beside the lessons that claim it."""

    id: str
    functions: tuple[str, ...]
    tests: tuple[str, ...]
    pages: tuple[str, ...]


def requirements() -> list[Requirement]:
    """The rows of docs/coverage.toml."""
    table = tomllib.loads((ROOT / "docs" / "coverage.toml").read_text())
    return [
        Requirement(
            name,
            tuple(row.get("functions", ())),
            tuple(row.get("tests", ())),
            tuple(row.get("pages", ())),
        )
        for name, row in table.items()
    ]


def lessons_of() -> dict[str, list[Lesson]]:
    """Every id that a lesson claims, with its lessons."""
    found: dict[str, list[Lesson]] = {}
    for each in claims():
        for name in each.ids:
            if each.lesson not in found.setdefault(name, []):
                found[name].append(each.lesson)
    return found


def coverage_page() -> str:
    """Every requirement with its functions, tests, lessons and pages."""
    claimed = lessons_of()
    rows = []
    for one in requirements():
        places = [f"lesson {COURSE.index(each) + 1}" for each in claimed.get(one.id, [])]
        places += [f"[{page}]({page})" for page in one.pages]
        functions = ", ".join(f"`{name}`" for name in one.functions)
        tests = ", ".join(f"`{name}`" for name in one.tests)
        cells = (
            one.id,
            functions or ("computed in the lesson" if one.id in claimed else "a page"),
            tests or "the claim of the lesson",
            ", ".join(places),
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(
        [
            "# Coverage",
            "",
            "Every requirement and erratum of the project, with the function that answers it, a test, and the lesson or page where a",
            "reader meets it. The table is made from docs/coverage.toml and from the claims of the lessons, each of which the test suite",
            "evaluates: a claim states its ids beside the condition that must hold. A test is named where it checks the id itself; where none",
            "does, the claim of the lesson is the check. The build fails if an id has neither.",
            "",
            "| id | function | test | lesson or page |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def errata_page() -> str:
    """Every corrected statement as the lesson prints it, with its numbers: runs the notebooks."""
    from fenchel.lessons import widgets

    spoken: dict[str, list[str]] = {}
    for each in COURSE:
        with widgets.recorded_claims() as record:
            importlib.import_module(f"fenchel.lessons.notebooks.{each.name}").app.run()
        for ids, text in record:
            for name in ids.split():
                if name.startswith("E") and name[1:].isdigit():
                    number = COURSE.index(each) + 1
                    spoken.setdefault(name, []).append(f"{text} (lesson {number})")
    pages = {one.id: one.pages for one in requirements()}
    rows = []
    for name in sorted(pages, key=lambda name: int(name[1:]) if name[1:].isdigit() else 0):
        if name[0] == "E" and name[1:].isdigit():
            said = spoken.get(name, []) + [f"see [{page}]({page})" for page in pages[name]]
            rows.append(f"**{name}.** {' '.join(said)}\n")
    return "\n".join(
        [
            "# Errata",
            "",
            "Statements that are often made about transformers and are wrong, inexact or incomplete, as they should read. Each sentence is",
            "printed by the lesson that computes it; its numbers are those of the run that made this page.",
            "",
            *rows,
        ]
    )


PAGES = {
    "attentions.md": variants_page,
    "quick_reference.md": quick_reference,
    "glossary.md": glossary,
    "pitfalls.md": pitfalls_page,
    "coverage.md": coverage_page,
}
"""The pages that need no run."""


def write() -> None:
    """Write every page."""
    folder = ROOT / "docs"
    for name, make in {**PAGES, "errata.md": errata_page}.items():
        (folder / name).write_text(make())


if __name__ == "__main__":
    write()
