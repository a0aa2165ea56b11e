"""The reference pages of the documentation, made from the code.

    python docs/reference.py

writes docs/quick_reference.md (every concept: formula, meaning, function, lesson), docs/glossary.md,
docs/pitfalls.md (symptom, detector, remedy, lesson; of docs/pitfalls.toml and of fenchel doctor),
docs/errata.md (often said, true, why, by lesson; of docs/errata.toml), docs/attentions.md (every
published attention as one problem) and tests/coverage.md (every requirement: function, test, lesson
or page). tests/test_reference.py holds the pages to the code: names must exist, detectors must
find their mistake, and the pages must be what this module writes.
"""

import ast
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import attentions

from fenchel.evaluate import PITFALLS
from fenchel.lessons.course import COURSE, PARTS, Lesson, lesson

ROOT = Path(__file__).parents[1]


class Concept(NamedTuple):
    """One row of the quick reference; ``function`` is a dotted name, ``lesson`` its name."""

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
        "slopes",
    ),
    Concept(
        "gradient descent",
        r"x \leftarrow x - \eta \nabla f(x)",
        "A step against the slope, of a size that the learning rate sets.",
        "fenchel.optim.sgd",
        "slopes",
    ),
    Concept(
        "gradient flow",
        r"\dot\theta = -\nabla L(\theta)",
        "Descent with steps that are infinitely small; descent is its Euler method.",
        "fenchel.optim.sgd",
        "gradient_flow",
    ),
    Concept(
        "momentum",
        r"v \leftarrow \mu v + (1 - \mu) g, \quad \theta \leftarrow \theta - \eta v",
        "A running mean of gradients; torch's own form leaves out the factor $1 - \\mu$.",
        "fenchel.optim.sgd_average",
        "gradient_flow",
    ),
    Concept(
        "inner product, cosine",
        r"u \cdot v = \sum_i u_i v_i, \quad \cos = \frac{u \cdot v}{|u| |v|}",
        "Similarity with length, and without it.",
        "fenchel.evaluate.nearest_rows",
        "similarity",
    ),
    Concept(
        "backpropagation",
        r"\delta_1 = (\delta_2 W_2^\top) * \sigma'(Z_1), \quad \nabla_{W_1} L = X^\top \delta_1",
        "Errors flow from the output back to each weight.",
        "fenchel.attention.attend_vjp",
        "backpropagation",
    ),
    Concept(
        "entropy",
        r"H(p) = -\sum_i p_i \log p_i",
        "How spread a distribution is, in nats; $e^H$ is an effective number of alternatives.",
        "fenchel.attention.entropy",
        "cross_entropy",
    ),
    Concept(
        "cross-entropy",
        r"L = -\sum_i y_i \log p_i",
        "The surprise of the truth; its gradient in the logits is $p - y$.",
        "fenchel.train.loss.total_loss",
        "cross_entropy",
    ),
    Concept(
        "KKT conditions",
        r"\nabla f + \nu \nabla h + \mu \nabla g = 0, \quad \mu g = 0",
        "Stationarity, feasibility, sign and slackness: what the best point under constraints satisfies.",
        "fenchel.choice.kkt",
        "lagrange",
    ),
    Concept(
        "softmax",
        r"p_i = \frac{u_i e^{\beta z_i}}{\sum_j u_j e^{\beta z_j}}",
        "The weights with the best average score minus divergence from a prior.",
        "fenchel.choice.Softmax",
        "softmax",
    ),
    Concept(
        "log-sum-exp",
        r"\mathrm{lse}_\beta(z) = \frac1\beta \log \sum_i e^{\beta z_i}",
        "The value of the softmax problem; its gradient is softmax.",
        "fenchel.choice.Softmax.value",
        "softmax",
    ),
    Concept(
        "softmax derivative",
        r"J = \beta (\mathrm{diag}(p) - p p^\top), \quad \|J\|_2 \le \beta / 2",
        "What one share gains, the others lose in proportion.",
        "fenchel.choice.Softmax.jacobian_product",
        "softmax",
    ),
    Concept(
        "Fenchel-Young loss",
        r"\Omega^*(z) + \Omega(y) - \langle y, z \rangle \ge 0",
        "The gap that a choice of $y$ leaves; cross-entropy for softmax.",
        "fenchel.choice.Softmax.loss",
        "softmax",
    ),
    Concept(
        "prior",
        r"x = \beta z + \log u",
        "Masks, padding, position biases: all are log-priors over the keys.",
        "fenchel.attention.Causal",
        "priors_and_budgets",
    ),
    Concept(
        "budget",
        r"\max \langle p, z \rangle \;\text{s.t.}\; \mathrm{KL}(p \| u) \le \kappa",
        "The same weights, with the distance from the prior bounded instead of paid for.",
        "fenchel.choice.beta_for_budget",
        "priors_and_budgets",
    ),
    Concept(
        "entmax, sparsemax",
        r"\Omega(p) = \frac{1}{\alpha (\alpha - 1)} \sum_i (p_i^\alpha - p_i)",
        "Choices whose small weights are exactly 0.",
        "fenchel.choice.Entmax",
        "sparse_choice",
    ),
    Concept(
        "scaled dot-product attention",
        r"\mathrm{softmax}(Q K^\top / \sqrt{d_k} + \log u)\, V",
        "A mixture of values, weighted by the similarity of a query to the keys.",
        "fenchel.attention.attend",
        "attention",
    ),
    Concept(
        "multi-head attention",
        r"\mathrm{concat}(\mathrm{head}_1, \ldots, \mathrm{head}_h) W_O",
        "Several attentions, each on its own projection of every feature.",
        "fenchel.model.Transformer",
        "masks_and_heads",
    ),
    Concept(
        "attention derivative",
        r"G_S = P * (G_P - \mathrm{rowsum}(P * G_P)), \quad G_Q = G_S K / \sqrt{d_k}",
        "Exact, in both directions, without storing the square of weights.",
        "fenchel.attention.attend_jvp",
        "attention_derivative",
    ),
    Concept(
        "Lipschitz constant",
        r"|f(x) - f(x_0)| \le L |x - x_0|",
        "The slope of the cone in which a graph stays.",
        "fenchel.sensitivity.spectral_norm",
        "lipschitz",
    ),
    Concept(
        "attention on a ball",
        r"\|W_V\|_2 ((1 + \sqrt n) \|A\|_2 R^2 + \sqrt n)",
        "How far attention can move while every token has norm at most R; without a bound on R there is none.",
        "fenchel.sensitivity.certify",
        "lipschitz",
    ),
    Concept(
        "rotary positions",
        r"\theta_i = b^{-2 i / d_k}",
        "Queries and keys turn with their position; scores see differences only.",
        "fenchel.attention.rotary",
        "positions",
    ),
    Concept(
        "ALiBi",
        r"\log u_{ij} = -m_h (i - j)",
        "A prior that falls with distance, at a rate per head.",
        "fenchel.attention.ALiBi",
        "positions",
    ),
    Concept(
        "LayerNorm, RMSNorm",
        r"\gamma * \frac{x - \bar x}{\sqrt{\mathrm{var} + \epsilon}} + \beta, \quad \gamma * \frac{x}{\sqrt{\overline{x^2} + \epsilon}}",
        "Every token at the same scale, whatever else is in the batch.",
        "fenchel.model.norm.RMSNorm",
        "blocks",
    ),
    Concept(
        "pre-norm block",
        r"h \leftarrow h + F(\mathrm{norm}(h))",
        "A residual branch that reads a normalised stream.",
        "fenchel.model.Transformer",
        "blocks",
    ),
    Concept(
        "GELU",
        r"x\, \Phi(x)",
        "A gate whose probability of being open grows with its input.",
        "fenchel.model.ModelConfig",
        "residuals",
    ),
    Concept(
        "loss scale",
        r"g = \frac1s \nabla (s L)",
        "Keeps gradients of half precision above the smallest number.",
        "fenchel.train.TrainConfig",
        "numerics",
    ),
    Concept(
        "Adam, AdamW",
        r"\theta \leftarrow (1 - \eta\lambda)\theta - \eta \frac{\hat m}{\sqrt{\hat v} + \epsilon}",
        "A step per entry by sign and steadiness of its gradient; decay apart from it.",
        "fenchel.optim.adamw",
        "optimisers",
    ),
    Concept(
        "schedule",
        r"\eta_t = \eta \tfrac12 (1 + \cos \pi \tfrac{t - T_w}{T - T_w})",
        "The learning rate over time: linear at first, then down to its end.",
        "fenchel.optim.warmup_cosine",
        "optimisers",
    ),
    Concept(
        "clipping",
        r"g \leftarrow g \min(1, c / \|g\|)",
        "Shortens a long gradient and keeps its direction.",
        "fenchel.optim.clip_",
        "optimisers",
    ),
    Concept(
        "score step",
        r"\min \langle G, \Delta S \rangle \;\text{s.t.}\; \|\Delta S\| \le \gamma",
        "The change of the weights that is steepest in the scores it causes.",
        "fenchel.optim.ScoreDescent",
        "score_descent",
    ),
    Concept(
        "perplexity, bits per byte",
        r"e^{-\frac1T \sum_t \log p_t}, \quad \frac{-\sum_t \log_2 p_t}{\text{bytes}}",
        "Loss per token, and per byte: the second compares models with different tokenizers.",
        "fenchel.evaluate.score",
        "tokens_and_calibration",
    ),
    Concept(
        "calibration error",
        r"\sum_m \frac{|B_m|}{n} |\mathrm{acc}(B_m) - \mathrm{conf}(B_m)|",
        "How far confidence is from the frequency of being right.",
        "fenchel.evaluate.calibration_error",
        "tokens_and_calibration",
    ),
    Concept(
        "KV cache",
        r"2 B G n d_k \;\text{elements per layer}",
        "Keys and values of tokens that were read, kept for those to come.",
        "fenchel.generation.KVCache",
        "efficient_attention",
    ),
    Concept(
        "tiled attention",
        r"m' = \max(m, \max S), \; l' = l e^{m - m'} + \sum e^{S - m'}",
        "Exact attention by tiles, with one maximum and one sum per row.",
        "fenchel.attention.attend",
        "efficient_attention",
    ),
    Concept(
        "linear attention",
        r"\frac{\phi(Q) (\phi(K)^\top V)}{\phi(Q) (\phi(K)^\top \mathbf 1)}",
        "Another kernel in place of the exponential, in time linear in the length.",
        "fenchel.attention.linear_attend",
        "efficient_attention",
    ),
    Concept(
        "delta rule",
        r"S \leftarrow e^{g} S, \quad S \leftarrow S + b\, k (v - S^\top k)^\top",
        "A table of fixed size that corrects its answer for each key: online least squares.",
        "fenchel.attention.delta_rule",
        "test_time_regression",
    ),
    Concept(
        "kernel regression",
        r"o(q) = \frac{\sum_j K(q, k_j)\, v_j}{\sum_j K(q, k_j)}",
        "Attention: the constant of least squared error, where pairs count by their kernel.",
        "fenchel.attention.attend",
        "test_time_regression",
    ),
    Concept(
        "FLOP model",
        r"8 n d^2 + 4 n^2 d",
        "Projections and scores of a layer; equal at $n = 2 d$.",
        "fenchel.model.forward_flops",
        "efficient_attention",
    ),
    Concept(
        "LoRA",
        r"W + \frac{\alpha}{r} B A",
        "An adapter of low rank beside frozen weights.",
        "fenchel.model.lora.add_lora",
        "scaling",
    ),
    Concept(
        "mixture of experts",
        r"\sum_{e \in \mathrm{top}\,k} p_e F_e(x)",
        "A few of many feed-forward layers per token, chosen by a router.",
        "fenchel.model.ModelConfig",
        "scaling",
    ),
)

GLOSSARY = {
    "ablation": ("Switching a part of a model off, to measure what depends on it.", None),
    "ALiBi": (
        "A log-prior that falls with the distance of a key, at a rate per head.",
        "positions",
    ),
    "Adam": ("An optimiser that divides each gradient by its usual size.", "optimisers"),
    "attention": ("A mixture of values, weighted by how well a query fits the keys.", "attention"),
    "attention collapse": (
        "Rows whose entropy is too low: one key takes nearly all weight. Uniform weights are another fault.",
        "attention",
    ),
    "attention sink": (
        "A key, often the first, that takes weight which no other key deserves.",
        "attention",
    ),
    "autograd": (
        "Derivatives computed by a program from the steps of a computation.",
        "backpropagation",
    ),
    "backpropagation": ("The chain rule from the output back to every weight.", "backpropagation"),
    "batch": ("The sequences that one step of training reads together.", "numerics"),
    "bits per byte": (
        "Loss in bits per byte of text; comparable across tokenizers.",
        "tokens_and_calibration",
    ),
    "block": ("Attention and a feed-forward layer, each added to the residual stream.", "blocks"),
    "byte-pair encoding": (
        "A tokenizer that merges the most frequent pair of pieces again and again; on bytes it can write every text.",
        "tokens_and_calibration",
    ),
    "calibration": (
        "Agreement of stated probabilities with how often they come true.",
        "tokens_and_calibration",
    ),
    "causal mask": (
        "A prior that is 0 on later keys, so that a token is predicted only from earlier ones.",
        "attention",
    ),
    "certificate": (
        "A bound that holds for every input of a set, with the argument for it.",
        "lipschitz",
    ),
    "choice map": (
        "A function from scores to weights that solves a regularised argmax over the simplex, or over a box.",
        "softmax",
    ),
    "clipping": (
        "Shortening a gradient whose norm is too large, without turning it.",
        "optimisers",
    ),
    "conjugate": (
        "For a convex function, the largest gap between a line and its graph, as a function of the slope.",
        "softmax",
    ),
    "cosine similarity": (
        "The inner product of two vectors divided by their lengths.",
        "similarity",
    ),
    "cross-entropy": (
        "The average surprise of the truth under a forecast: the loss of language models.",
        "cross_entropy",
    ),
    "decoder, encoder": (
        "A model whose tokens see only earlier ones, and one whose tokens see all: the first writes, the second reads.",
        "attention",
    ),
    "delta rule": (
        "A memory writes the error of its answer for a key, not the value: a step of online least squares.",
        "test_time_regression",
    ),
    "dropout": (
        "Setting random numbers to 0 in training, and dividing the others by the share that is kept.",
        "blocks",
    ),
    "effective support": (
        "The exponential of the entropy: how many alternatives a distribution amounts to.",
        "cross_entropy",
    ),
    "embedding": ("The vector of a token; a row of a table.", "similarity"),
    "entmax": ("A choice map between softmax and sparsemax, with exact zeros.", "sparse_choice"),
    "entropy": (
        "The average surprise of a distribution, in nats or bits: how spread it is.",
        "cross_entropy",
    ),
    "epoch": (
        "One pass over the training text; large models often make less than one.",
        "optimisers",
    ),
    "feed-forward layer": (
        "Two linear maps with an activation between, applied to each token alone.",
        "blocks",
    ),
    "fine-tuning": ("Training that goes on from a trained model, on other text.", "scaling"),
    "FlashAttention": (
        "Exact attention by tiles, which never stores the square of weights.",
        "efficient_attention",
    ),
    "gauge": ("A change of the query and key weights that changes no score.", "score_descent"),
    "gradient": ("The slopes of a number by all its inputs; it points uphill, steepest.", "slopes"),
    "grouped-query attention": (
        "Several query heads share the keys and values of one group.",
        "efficient_attention",
    ),
    "head": ("One attention with its own projections.", "attention"),
    "hidden state": ("The vector of a token inside a model; see residual stream.", "blocks"),
    "inverse temperature": (
        "The factor beta on scores, 1/T; standard attention has 1/sqrt(d_k) beside it, as the scale.",
        "softmax",
    ),
    "Jacobian": ("The matrix of all derivatives of outputs by inputs.", "attention_derivative"),
    "key": (
        "The vector by which a token is found: scores are inner products of queries and keys.",
        "attention",
    ),
    "KKT conditions": (
        "What the best point under constraints satisfies: stationarity, feasibility, sign, slackness.",
        "lagrange",
    ),
    "Kullback-Leibler divergence": (
        "KL(p, q): the surprise that q causes where p is true, beyond that of p itself.",
        "priors_and_budgets",
    ),
    "KV cache": (
        "Keys and values of earlier tokens, kept so that each is computed once.",
        "efficient_attention",
    ),
    "Lagrange multiplier": (
        "The price of a constraint: how fast the best value changes if it is moved.",
        "lagrange",
    ),
    "LayerNorm": (
        "Subtracts the mean of a token's numbers and divides by their standard deviation.",
        "blocks",
    ),
    "learning rate": ("The factor between a gradient and the step that is made.", "gradient_flow"),
    "Lipschitz": ("Moving the output at most L times as far as the input.", "lipschitz"),
    "logit": ("A score before softmax.", "softmax"),
    "logit lens": (
        "The residual stream of a middle layer read by the last norm and the LM head.",
        None,
    ),
    "LoRA": ("An adapter of low rank beside frozen weights.", "scaling"),
    "loss": (
        "The number that training lowers; for language models the cross-entropy per token.",
        "cross_entropy",
    ),
    "mask": ("A prior with entries 0 and 1.", "attention"),
    "mixture of experts": (
        "Many feed-forward layers of which a router picks a few per token.",
        "scaling",
    ),
    "momentum": ("A running mean or sum of gradients in place of the last one.", "gradient_flow"),
    "multi-head attention": (
        "Attention in several heads, concatenated and projected.",
        "attention",
    ),
    "nat": (
        "The unit of information with natural logarithms; 1 nat is 1.443 bits.",
        "cross_entropy",
    ),
    "optimiser": ("The rule by which weights move along gradients.", "optimisers"),
    "padding": (
        "Tokens that fill a batch of unequal lengths; masked in attention and left out of the loss.",
        "tokens_and_calibration",
    ),
    "perplexity": (
        "The exponential of the loss per token; depends on the tokenizer.",
        "tokens_and_calibration",
    ),
    "position encoding": (
        "What gives a model the place of a token: rotations, biases, tables or sinusoids.",
        "positions",
    ),
    "pre-norm, post-norm": ("A norm at the beginning of each branch, or after its sum.", "blocks"),
    "prefill": ("Reading a prompt at once, before decoding token by token.", "efficient_attention"),
    "prior": (
        "Weights before any score is seen; its logarithm is added to the scores.",
        "priors_and_budgets",
    ),
    "query": ("The vector with which a token looks for others.", "attention"),
    "residual connection": ("A layer that adds to its input instead of replacing it.", "blocks"),
    "residual stream": ("The vector of a token to which every branch adds.", "blocks"),
    "RMSNorm": ("Divides a token's numbers by the root of their mean square.", "blocks"),
    "RoPE": (
        "Rotary positions: pairs of numbers of queries and keys turn with the position, so scores see differences only.",
        "positions",
    ),
    "scaled dot-product attention": (
        "Attention by inner products divided by the square root of the head width.",
        "attention",
    ),
    "scaling law": (
        "How the loss falls with parameters, text and computing; not the factor 1/sqrt(d_k) on scores.",
        "scaling",
    ),
    "score": ("A query times a key, scaled; what a choice map turns into weights.", "attention"),
    "simplex": ("All vectors of weights that are not negative and sum to 1.", "softmax"),
    "softmax": (
        "Exponentials divided by their sum: the weights with the best average score plus temperature times entropy.",
        "softmax",
    ),
    "sparsemax": (
        "The point of the simplex nearest to the scores; small weights are exactly 0.",
        "sparse_choice",
    ),
    "support": ("The alternatives with a weight above 0.", "sparse_choice"),
    "teacher forcing": (
        "Training each position on the true tokens before it, not on tokens that the model wrote.",
        "tokens_and_calibration",
    ),
    "temperature": ("The divisor of scores: larger is smoother.", "softmax"),
    "token": (
        "A piece of text with a number: a word, a part of one, or a byte.",
        "tokens_and_calibration",
    ),
    "tokenizer": (
        "What cuts text into tokens and puts it together again.",
        "tokens_and_calibration",
    ),
    "value": ("The vector that a token gives to those that attend to it.", "attention"),
    "vocabulary": ("All tokens that a tokenizer has.", "tokens_and_calibration"),
    "warm-up": ("A learning rate that rises over the first steps.", "optimisers"),
    "weight decay": ("Shrinking weights by a small share per step.", "optimisers"),
    "witness": ("An input that attains, or nearly attains, a bound.", "lipschitz"),
}
"""Words with their meaning and the lesson that explains them."""


class Erratum(NamedTuple):
    """A statement that is often made, what is true instead, and why."""

    ids: tuple[str, ...]
    said: str
    true: str
    why: str


class Mistake(NamedTuple):
    """A pitfall of the lessons; ``shows`` is code in which its detector finds it."""

    group: str
    name: str
    symptom: str
    detector: str
    remedy: str
    lesson: str
    shows: str


def errata() -> list[Erratum]:
    """The entries of docs/errata.toml."""
    table = tomllib.loads((ROOT / "docs" / "errata.toml").read_text())
    return [Erratum(**{**row, "ids": tuple(row["ids"].split())}) for row in table["erratum"]]


def errata_elsewhere() -> dict[str, str]:
    """Errata that correct no statement, with the page that answers each."""
    table = tomllib.loads((ROOT / "docs" / "errata.toml").read_text())
    return dict(table["elsewhere"])


def mistakes() -> list[Mistake]:
    """The entries of docs/pitfalls.toml."""
    table = tomllib.loads((ROOT / "docs" / "pitfalls.toml").read_text())
    return [
        Mistake(group=group, name=name, **row)
        for group, rows in table.items()
        for name, row in rows.items()
    ]


def quick_reference() -> str:
    """The concepts in tables, one per part of the course."""
    parts = []
    for title, lessons in PARTS.items():
        names = [each.name for each in lessons]
        rows = [
            f"| {one.name} | ${_bars(one.formula)}$ | {one.meaning} | `{one.function}` | {_open(one.lesson)} |"
            for one in CONCEPTS
            if one.lesson in names
        ]
        head = [
            "| concept | formula | meaning | function | lesson |",
            "| --- | --- | --- | --- | --- |",
        ]
        parts += [f"## {title}", "", *head, *rows, ""]
    return "\n".join(
        [
            "# Quick reference",
            "",
            "Every concept on one line, in the order of the [lessons](lessons.md). The command of the last column opens the lesson; symbols and shapes are in",
            "[Notation](notation.md), derivations in the pages on mathematics.",
            "",
            *parts,
        ]
    )


def _open(name: str) -> str:
    """The command that opens a lesson."""
    return f"`fenchel learn {lesson(name).name}`"


def _bars(formula: str) -> str:
    """A formula whose bars do not end a cell."""
    return formula.replace(r"\|", r"\Vert ").replace("|", r"\vert ")


def _cell(text: str) -> str:
    """Text for a cell of a table: bars in formulas do not end it."""
    return re.sub(r"\$[^$]*\$", lambda found: _bars(found[0]), text)


def glossary() -> str:
    """The words, in order, each with the command that opens its lesson."""
    words = [
        f"**{word}**: {meaning}{f' {_open(name)}' if name else ''}\n"
        for word, (meaning, name) in sorted(GLOSSARY.items(), key=lambda item: item[0].lower())
    ]
    lead = "One sentence each. The command after a word opens the lesson that explains it."
    return "\n".join(["# Glossary", "", lead, "", *words])


DOCTOR_LESSONS = {
    "scale": "attention",
    "collapse": "attention",
    "uniform": "attention",
    "post-norm": "blocks",
    "neighbours": "similarity",
}
"""The lessons of the pitfalls that ``fenchel doctor`` finds."""


def pitfalls_page() -> str:
    """Symptom, detector, remedy and lesson of each common mistake."""
    head = ["| pitfall | symptom | detector | remedy | lesson |", "| --- | --- | --- | --- | --- |"]
    rows = [
        f"| {one.name} | {one.symptom} | `fenchel.evaluate.diagnostics.{one.detect.__name__}` | {one.remedy} | {_open(DOCTOR_LESSONS[one.name])} |"
        for one in PITFALLS
    ]
    found = mistakes()
    groups = []
    for group in dict.fromkeys(one.group for one in found):
        groups += ["", f"## {group.capitalize()}", "", *head]
        groups += [
            f"| {one.name} | {_cell(one.symptom)} | `{one.detector}` | {_cell(one.remedy)} | {_open(one.lesson)} |"
            for one in found
            if one.group == group
        ]
    return "\n".join(
        [
            "# Pitfalls",
            "",
            "Mistakes that raise no error and make a model, or what is said about it, worse. `fenchel doctor DIR` finds the first five in the model of a",
            "run or a checkpoint. For each of the others a function shows it; `docs/pitfalls.toml` has a few lines of code per row in which it does, and",
            "the tests run them.",
            "",
            "## Found by fenchel doctor",
            "",
            *head,
            *rows,
            *groups,
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
    """The rows of tests/coverage.toml."""
    table = tomllib.loads((ROOT / "tests" / "coverage.toml").read_text())
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
        places = [f"lesson `{each.name}`" for each in claimed.get(one.id, [])]
        places += [f"[{page}](../docs/{page})" for page in one.pages]
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
            "reader meets it. The table is made from tests/coverage.toml and from the claims of the lessons, each of which the test suite",
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
    """What is often said, what is true, and why, by lesson."""
    claimed = lessons_of()
    by_lesson: dict[str, list[Erratum]] = {}
    for one in errata():
        found = [each.name for name in one.ids for each in claimed.get(name, [])]
        by_lesson.setdefault(found[0] if found else "", []).append(one)
    parts = []
    for name in [each.name for each in COURSE] + [""]:
        if name not in by_lesson:
            continue
        head = ["| often said | true | why |", "| --- | --- | --- |"]
        rows = [
            f"| {_cell(one.said)} | {_cell(one.true)} | {_cell(one.why)} |"
            for one in by_lesson[name]
        ]
        title = [f"## {lesson(name).title}", "", _open(name)] if name else ["## Notation"]
        parts += [*title, "", *head, *rows, ""]
    return "\n".join(
        [
            "# Errata",
            "",
            "Statements that are often made about transformers and are wrong, inexact or incomplete. The lesson named above each table computes what its",
            "rows say; what has a decimal point under *true* and *why* is a number that the lesson prints and checks.",
            "",
            *parts,
        ]
    )


PAGES = {
    "docs/attentions.md": attentions.page,
    "docs/quick_reference.md": quick_reference,
    "docs/glossary.md": glossary,
    "docs/pitfalls.md": pitfalls_page,
    "docs/errata.md": errata_page,
    "tests/coverage.md": coverage_page,
}


def write() -> None:
    """Write every page."""
    for name, make in PAGES.items():
        (ROOT / name).write_text(make())


if __name__ == "__main__":
    write()
