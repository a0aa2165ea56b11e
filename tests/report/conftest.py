"""A run directory as a training run would leave it, and the data of an inspection; no model runs.

The numbers have the shapes of a real run: a loss that falls like a power law with noise, a
warm-up and a cosine, entropies that fall layer by layer, causal maps of several kinds (first
token, previous token, itself, far and wide). Everything follows from one seed.
"""

import base64
import json
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import is_dataclass
from html.parser import HTMLParser
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest

SENTENCE = (
    "To the Congress of the United States : The year now closing has been one of peace , of "
    "good harvests and of steady labor , and the people have met its burdens with a calm and "
    "generous spirit that does honor to them ."
)
CONTINUATION = (
    " of the Senate and House of Representatives: The condition of the Treasury is such as to "
    "require the attention of the Congress at an early day. The receipts of the year have been "
    "less than the expenditures, and it is the duty of the Government to provide for the "
    "payment of the public debt.\n\nOur relations with foreign powers continue to be friendly, "
    "and the commerce of the country has been extended to every part of the world."
)


def write_run(
    folder: Path,
    *,
    layers: int = 4,
    heads: int = 4,
    steps: int = 1000,
    every: int = 10,
    size: int | None = None,
    status: str = "finished",
    reason: str = "",
    seed: int = 0,
) -> Path:
    """Write all five files of a run and return its folder."""
    chance = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [word if i == 0 else f" {word}" for i, word in enumerate(SENTENCE.split())]
    if size is not None:
        tokens = (tokens * (size // len(tokens) + 1))[:size]
    lines = _metrics(chance, layers, heads, steps, every)
    evaluated = [line for line in lines if "validation/loss" in line]
    write_lines(folder / "metrics.jsonl", lines)
    (folder / "config.toml").write_text(
        f'seed = {seed}\n\n[text]\nname = "sotu"\nvocabulary = 2048\nvalidation = 0.05\n\n'
        f"[model]\ncontext = 128\nwidth = 192\nlayers = {layers}\nheads = {heads}\n"
        'choice = "softmax"\npositions = "rotary"\ndropout = 0.0\ntied = true\n\n'
        f"[train]\nsteps = {steps}\nbatch = 16\nrate = 0.003\nwarmup = 60\nclip = 1.0\n"
        'betas = [0.9, 0.95]\ndecay = 0.1\nbudget = "3m"\n'
    )
    write_json(
        folder / "environment.json",
        {
            "fenchel": "0.1.0",
            "torch": "2.13.0+cpu",
            "python": "3.11.9",
            "platform": "Linux-6.1-x86_64",
            "device": "cpu",
            "threads": 2,
            "commit": "146d21e",
            "started": "2026-11-15T09:20:11+00:00",
        },
    )
    write_json(
        folder / "summary.json",
        {
            "status": status,
            "reason": reason,
            "step": lines[-1]["step"],
            "steps": steps,
            "parameters": 2_167_488,
            "tokens": lines[-1]["step"] * 4096,
            "seconds": 161.4,
            "text": {"name": "sotu", "bytes": 7_512_331, "tokens": 2_101_442, "until": 1928},
            "validation": {
                name: evaluated[-1][f"validation/{name}"]
                for name in ("loss", "perplexity", "bits_per_byte")
            },
            "baselines": {"bzip2": 1.775, "ngram5": 1.569},
            "best_step": evaluated[-1]["step"],
        },
    )
    write_json(
        folder / "sample.json",
        {
            "prompt": "Fellow-Citizens",
            "text": CONTINUATION,
            "sentence": "".join(tokens),
            "tokens": tokens,
            "attention": pack(maps(chance, layers, heads, len(tokens))),
        },
    )
    return folder


def maps(chance: np.random.Generator, layers: int, heads: int, size: int) -> np.ndarray:
    """Causal attention (L, H, T, T) with heads that differ as real ones do."""
    query, key = np.mgrid[:size, :size]
    scores = np.empty((layers, heads, size, size))
    for layer in range(layers):
        for head in range(heads):
            kind = (layer + 2 * head) % 4
            base = chance.normal(size=(size, size)) * (0.6 + 0.3 * layer)
            base += chance.normal(size=size)[None, :]
            if kind == 0:
                base += 4.0 * (key == 0)
            elif kind == 1:
                base += 5.0 * (key == query - 1)
            elif kind == 2:
                base -= 0.35 * (query - key)
            else:
                base += 3.0 * (chance.random((size, size)) < 0.04)
            scores[layer, head] = base
    scores = np.where(key <= query, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def pack(p: np.ndarray) -> dict[str, Any]:
    """Weights as sample.json holds them."""
    layers, heads, size, _ = p.shape
    data = np.round(255 * np.sqrt(p)).astype(np.uint8).tobytes()
    return {
        "layers": layers,
        "heads": heads,
        "size": size,
        "scale": "sqrt",
        "data": base64.b64encode(data).decode(),
    }


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _metrics(
    chance: np.random.Generator, layers: int, heads: int, steps: int, every: int
) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for step in range(every, steps + 1, every):
        part = step / steps
        loss = 2.75 + 4.9 * (1 + step / 22) ** -0.62
        entropy = [3.6 - (0.5 + 0.32 * i) * (1 - math.exp(-3 * part)) for i in range(layers)]
        entropy = [max(h, 0.1) + 0.03 * chance.normal() for h in entropy]
        lines.append(
            {
                "step": step,
                "train/loss": loss + 0.07 * chance.normal(),
                "train/learning_rate": 0.003
                * min(step / 60, 0.55 + 0.45 * math.cos(math.pi * part)),
                "train/gradient_norm": 0.4 + 6 / (1 + step / 15) + 0.08 * abs(chance.normal()),
                "train/tokens": step * 4096,
                "train/skipped": 0,
                "attention/max_logit": [
                    3 + (2 + i) * part**0.5 + 0.2 * chance.normal() for i in range(layers)
                ],
                "attention/entropy": entropy,
                "attention/effective": [math.exp(h) for h in entropy],
                "attention/support": [64.5] * layers,
                "attention/head_max_logit": [
                    [3 + (i + 2 * j) * part for j in range(heads)] for i in range(layers)
                ],
                "attention/head_rms": [
                    [1 + (i + j) * part for j in range(heads)] for i in range(layers)
                ],
                "attention/head_entropy": [
                    [max(h - 0.4 * j * part, 0.0) for j in range(heads)] for h in entropy
                ],
                "time/tokens_per_second": 25_400 + 900 * chance.normal(),
                "time/elapsed": step * 0.1614,
            }
        )
        if step % (10 * every) == 0 or step == steps:
            held = loss + 0.05
            lines.append(
                {
                    "step": step,
                    "validation/loss": held,
                    "validation/perplexity": math.exp(held),
                    "validation/bits_per_byte": held / math.log(2) / 2.85,
                }
            )
    return lines


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that writes a run in a folder of its own; see ``write_run``."""

    def make(name: str = "demo", **options: Any) -> Path:
        return write_run(tmp_path_factory.mktemp("runs") / name, **options)

    return make


@pytest.fixture(scope="session")
def causal_maps() -> Callable[[int, int, int], np.ndarray]:
    """A function from layers, heads and tokens to weights (L, H, T, T) in float64."""
    return lambda layers, heads, size: maps(np.random.default_rng(1), layers, heads, size)


@pytest.fixture(scope="session")
def packed() -> Callable[[np.ndarray], dict[str, Any]]:
    """A function from weights to the mapping that sample.json holds."""
    return pack


class Outline(HTMLParser):
    """What a browser would make of a page: elements, attributes, nesting, text by element."""

    VOID = frozenset({"meta", "br", "hr", "input", "link", "img"})

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: Counter[str] = Counter()
        self.attributes: Counter[tuple[str, str]] = Counter()
        self.values: list[tuple[str, str, str]] = []
        self.text: dict[str, list[str]] = {}
        self.strays: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        self.strays += self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        for name, value in attrs:
            self.attributes[tag, name] += 1
            self.values.append((tag, name, value or ""))
        if tag not in self.VOID:
            self._open.append(tag)
            self.text.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.strays.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        for tag in set(self._open):
            self.text[tag][-1] += data

    def value(self, tag: str, name: str) -> list[str]:
        """Every value of the attribute ``name`` on elements ``tag``."""
        return [value for t, n, value in self.values if (t, n) == (tag, name)]


@pytest.fixture(scope="session")
def outline() -> type[Outline]:
    """The parser that tells what a page is made of."""
    return Outline


HOSTILE = "</script><img src=https://evil.example/x onerror=alert(1)>"


def spread(draw: random.Random) -> dict[str, float]:
    low = draw.random()
    names = ("least", "low", "median", "high", "most", "mean")
    return {name: low + i for i, name in enumerate(names)}


def bracket(draw: random.Random) -> dict[str, float]:
    lower = draw.uniform(0.5, 9.0)
    return {"lower": lower, "upper": 1.2 * lower, "iterations": 12}


def plain_inspection(layers: int = 3, heads: int = 4, tokens: int = 9) -> dict[str, Any]:
    """What ``Inspection.plain(rows=True)`` gives, with maps, drawn at random."""
    draw = random.Random(0)
    spreads = ("entropy", "effective", "support", "sensitivity", "max_logit", "margin")
    size = min(tokens, 8)
    shares = [1.0 / tokens] * tokens
    norm = {"name": "ln", "least": 0.5, "median": 0.7, "most": 0.9, "upper": 1.1}
    return {
        "subject": {
            "name": HOSTILE,
            "family": "gpt2",
            "parameters": 12345,
            "context": 64,
            "stored": "bfloat16",
            "layers": layers,
            "heads": heads,
            "kv_heads": heads,
            "head_width": 8,
            "width": 32,
        },
        "text": HOSTILE,
        "tokens": [HOSTILE, *(f" token{i}" for i in range(1, tokens))],
        "method": {
            "dtype": "float32",
            "device": "cpu",
            "algorithm": "Golub-Kahan",
            "tolerance": 0.05,
            "iterations": 12,
            "failure": 1e-6,
            "seed": 0,
        },
        "heads": [
            {
                "layer": layer + 1,
                "head": head + 1,
                **{name: spread(draw) for name in spreads},
                **{name: draw.random() for name in ("first", "itself", "distance", "column")},
                "column_token": 0,
                "nearest_head": None,
                "similarity": 0.5,
                "sigma": {name: bracket(draw) for name in ("q", "k", "v", "qkv")},
                "top": [2.0, 1.0],
                "dominant": "mixing",
                "bound": 9.0,
                "rows": {name: [draw.random() for _ in range(tokens)] for name in spreads},
            }
            for layer in range(layers)
            for head in range(heads)
        ],
        "layers": [
            {
                "layer": layer + 1,
                "norms": [norm, norm],
                "attention": bracket(draw),
                "mlp": None,
                "block": bracket(draw),
                "top": [2.0, 1.0],
                "token": bracket(draw),
                "update": draw.random(),
                "moved_by": shares,
                "shown_at": shares,
            }
            for layer in range(layers)
        ],
        "network": {
            "stream": bracket(draw),
            "logits": bracket(draw),
            "exponent": 0.2,
            "blocks_exponent": 0.4,
            "growth": [0.1] * layers,
            "influence": {
                "spans": [[i, i + 1] for i in range(5)],
                "values": [[draw.random() for _ in range(tokens)] for _ in range(5)],
                "draws": 4,
                "error": 0.1,
            },
        },
        "precision": {
            "again": 1e-7,
            "again_head": [1, 1],
            "rounded": "bfloat16",
            "stream": [0.001] * layers,
            "logits": 0.1,
            "divergence": 0.01,
            "statement": "Measured in float32.",
        },
        "certificates": None,
        "maps": {
            "layers": list(range(1, layers + 1)),
            "heads": list(range(1, heads + 1)),
            "size": size,
            "data": base64.b64encode(bytes(layers * heads * size * size)).decode(),
        },
        "seconds": {"heads": 1.0},
    }


def typed(kind: Any, value: Any) -> Any:
    """A result of fenchel/inspection_result.py from its plain form; None for a number is nan."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        assert value.keys() <= hints.keys()
        return kind(**{name: typed(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    arguments = get_args(kind)
    if value is None:
        return math.nan if kind is float else None
    if isinstance(kind, UnionType):
        return typed(next(one for one in arguments if one is not type(None)), value)
    if get_origin(kind) is list:
        return [typed(arguments[0], item) for item in value]
    if get_origin(kind) is dict:
        return {name: typed(arguments[1], item) for name, item in value.items()}
    return tuple(value) if get_origin(kind) is tuple else value


@pytest.fixture(scope="session")
def inspection() -> Callable[..., dict[str, Any]]:
    """A function that gives the data of an inspection page; see ``plain_inspection``."""
    return plain_inspection
