"""The whole model on one screen: a page that runs the model of the lessons, and its cases.

``model_page`` is one HTML file without a request: the weights in float16, the tokenizer, the
forward pass (model.js) and the view (model_page.js). The page computes by itself, so it carries
``CASES`` of the library too, and compares its numbers with them when it is opened:

    tokens           ids of the text, exactly
    logits           of the last position, one in 64 and the eight largest
    probabilities    of these eight
    weights          of the last query over all keys, per layer and head

The library computes the cases in float64 from the weights as they are stored. A case has a choice
map, a temperature, a prior over the distance and cuts, which are priors of 0: attention of every
layer is ``attend`` with them, which overrides that of the model.
"""

import base64
import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel.attention import Dense, attend
from fenchel.attention.spec import AttentionCall
from fenchel.checkpoints import Loaded, load
from fenchel.choice import by_name
from fenchel.lessons.course import MODEL
from fenchel.report.html import STYLES, Html, data_block, element, join, policy, read_asset

EXAMPLES = (
    "The ships and the sailors need the Secretary of the",
    "The debt and the gold need the Secretary of the",
    "The people of the United",
    "The farmer asked the bank for a loan, because the",
)
TOLERANCE = 1e-4
_LARGEST = 8
_EVERY = 64
_DIGITS = 9
_WINDOW = 4


class Case(NamedTuple):
    """A text, and how attention chooses on it."""

    text: str
    map: str = "softmax"
    temperature: float = 1.0
    prior: str = "uniform"
    cuts: tuple[tuple[int, int, int, int], ...] = ()
    """Each (layer, head, query, key), from 0."""

    def how(self) -> dict[str, Any]:
        """Its settings as ``Model.run`` of model.js takes them."""
        cuts = [list(cut) for cut in self.cuts]
        return {"map": self.map, "beta": 1 / self.temperature, "prior": self.prior, "cuts": cuts}


CASES = (
    *map(Case, EXAMPLES),
    Case("a"),
    Case("Gentlemen of the Senate and Gentlemen of the House of Representatives:"),
    Case("We must provide for the common defense; we'll not   rest; naïve café — $1,234.56\n\n"),
    Case("  two  spaces\ttab \n new line "),
    Case("日本 😀 <|end|> ok, don't"),
    Case("My fellow citizens, I ask the Congress to pass a law that protects the right to vote."),
    Case(EXAMPLES[0], "entmax"),
    Case(EXAMPLES[1], "sparsemax"),
    Case(EXAMPLES[3], "entmax", 0.4),
    Case("The receipts of the Treasury exceeded the expenditures of the year", "sparsemax", 3.0),
    Case("The treaty with Great Britain was signed and", "softmax", 0.1),
    Case("The army and the navy are", "softmax", 10.0),
    Case(EXAMPLES[0], prior="recent"),
    Case(
        "The public lands of the West were sold to settlers, and the money", "entmax", 1.5, "recent"
    ),
    Case("The Indians of the plains have made peace with the", "sparsemax", 0.7, "window"),
    Case(EXAMPLES[0], cuts=((2, 0, 10, 1), (0, 1, 10, 9), (1, 0, 0, 0))),
)


def model_page(links: Html) -> str:
    """The page as text; ``links`` stand at its top."""
    values = _values()
    count = sum(math.prod(shape) for _, shape in values["shapes"])
    about = join(
        [
            f"The model has {count:,} numbers, in float16: three blocks of two heads, trained for "
            "1,500 steps, about four minutes on one core, on the State of the Union messages of "
            "American presidents from 1790 to 1928. What it says is their language and not a "
            "fact. It was trained with softmax at temperature 1; another map, temperature or "
            "prior changes all blocks at once. A text is read without a mark of its beginning, "
            "and of a long one the last 96 tokens. A thick line says what is read, not what it "
            "changes: cut it to see that. Nothing is loaded from elsewhere or sent."
        ]
    )
    body = Template(_asset("model_page.html")).substitute(links=links, about=about)
    return static_page(
        title="The whole model on one screen · fenchel",
        body=body,
        data=values,
        style=_asset("model_page.css"),
        script=_asset("model.js") + _asset("model_page.js"),
    )


def static_page(*, title: str, body: str, data: Any, style: str, script: str) -> str:
    """A page of the course in one file, in the style of the reports, with their strict policy."""
    whole = "".join(map(read_asset, STYLES)) + style
    return Template(_asset("page.html")).substitute(
        policy=policy(script=script, style=whole),
        title=join([title]),
        kind="model",
        body=body,
        style=whole,
        script=script,
        data=data_block(data),
    )


@cache
def _values() -> dict[str, Any]:
    """What the page reads: settings, tokenizer, weights and cases."""
    stored = load(MODEL)
    state = stored.model.state_dict()
    packed = b"".join(value.to(torch.float16).numpy().tobytes() for value in state.values())
    exact = load(MODEL, dtype=torch.float64)
    return {
        "settings": settings(stored),
        "tokenizer": tokenizer_tables(MODEL / "tokenizer.json"),
        "shapes": [(name, list(value.shape)) for name, value in state.items()],
        "weights": base64.b64encode(packed).decode(),
        "examples": EXAMPLES,
        "tolerance": TOLERANCE,
        "cases": [expected(exact, case) for case in CASES],
    }


def settings(loaded: Loaded) -> dict[str, Any]:
    """The settings of ``Model`` in model.js; those that it does not have are refused."""
    config = loaded.config
    has = (config.norm, config.positions, config.rotary_layout, config.mlp, config.kind)
    if has != ("rms", "rotary", "half", "swiglu", "decoder") or config.qk_norm or config.tied:
        raise ValueError("model.js runs decoders with RMS norm, rotary positions and SwiGLU.")
    return {
        "width": config.width,
        "heads": config.heads,
        "layers": config.layers,
        "vocabulary": config.vocabulary,
        "context": config.context,
        "epsilon": config.epsilon,
        "base": config.rotary_base,
    }


def tokenizer_tables(path: Path) -> dict[str, Any]:
    """The pieces in the order of their ids, the merges in theirs, and the ids that are no text."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    vocabulary: Mapping[str, int] = stored["model"]["vocab"]
    return {
        "vocab": sorted(vocabulary, key=vocabulary.__getitem__),
        "merges": [" ".join(pair) for pair in stored["model"]["merges"]],
        "control": [token["id"] for token in stored["added_tokens"]],
    }


class Result(NamedTuple):
    """What the library computes for a case."""

    ids: list[int]
    logits: Tensor
    """Of the last position."""
    weights: list[Tensor]
    """Per layer (H, S), of the last position."""


@torch.no_grad()
def result(loaded: Loaded, case: Case) -> Result:
    """A case by the library: its attention is ``attend`` with the map and prior of the case."""
    ids = loaded.tokenizer.encode(case.text)
    choice = by_name(case.map, alpha=1.5, beta=1 / case.temperature)
    log_prior = _log_prior(case.prior, len(ids))
    weights = []

    def override(layer: int, call: AttentionCall) -> Tensor:
        prior = log_prior.repeat(loaded.config.heads, 1, 1)
        for cut_layer, head, query, key in case.cuts:
            if cut_layer == layer:
                prior[head, query, key] = -math.inf
        mixed, p = attend(
            call.q, call.k, call.v, choice=choice, prior=Dense(prior), return_weights=True
        )
        weights.append(p[0, :, -1])
        return mixed

    logits = loaded.model(torch.tensor([ids]), attention_override=override)[0, -1]
    return Result(ids, logits, weights)


def _log_prior(name: str, length: int) -> Tensor:
    """log u of key j (column) for query i (row), -inf after the query."""
    place = torch.arange(length, dtype=torch.float64)
    back = place[:, None] - place
    log_u = {
        "uniform": torch.zeros_like(back),
        "recent": -math.log(2) * back,
        "window": torch.where(back < _WINDOW, 0.0, -math.inf),
    }[name]
    return torch.where(back >= 0, log_u, -math.inf)


def expected(loaded: Loaded, case: Case) -> dict[str, Any]:
    """A case with the numbers that the page compares."""
    found = result(loaded, case)
    logits = found.logits.tolist()
    p = found.logits.softmax(-1)
    top = p.topk(_LARGEST).indices.tolist()
    return {
        "text": case.text,
        "ids": found.ids,
        "how": case.how(),
        "logits": [(i, round(logits[i], _DIGITS)) for i in [*top, *range(0, len(logits), _EVERY)]],
        "probabilities": [(i, round(float(p[i]), _DIGITS)) for i in top],
        "weights": [
            [[round(value, _DIGITS) for value in row] for row in layer.tolist()]
            for layer in found.weights
        ],
    }


def page_links(**addresses: str) -> Html:
    """Links by their words: underscores are spaces."""
    return join([element("a", words.replace("_", " "), href=to) for words, to in addresses.items()])


def _asset(name: str) -> str:
    return read_asset(name, "fenchel.lessons")
