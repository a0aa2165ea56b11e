"""Does emphasis on an instruction make a model follow it more often, at an equal divergence?

Small models are trained here on written tasks: a note, an instruction, a word, and an answer that
applies the instruction to the word. Ten instructions are written for it. What is measured is how
often a sampled answer has the form that the instruction asks for, whatever its word is, in two
kinds of prompt:

    one     one instruction, which three of ten answers of the training text ignore
    two     two instructions, of which the training text follows either, as often

Without steering a model that has learned the text follows 7 of 10 and 5 of 10. Settings that are
compared have the same budget: no token's law is further than ``KAPPA`` nats from the unsteered one.

    instruction    the words of the instruction are emphasised
    note           as many words of the note, which say nothing of the answer: the control
    other          with two instructions, the words of the one that is not counted

    python -m benchmarks emphasis [--steps N]
"""

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import record
from fenchel.attention import AttentionCall
from fenchel.checkpoints import load
from fenchel.cli import main as fenchel
from fenchel.data import TextTokenizer
from fenchel.generation import Emphasis, Steering, generate
from fenchel.generation.steering import ChoiceTable, within_budget
from fenchel.model import Transformer

INSTRUCTIONS = {
    "Write it in capitals.": str.upper,
    "Write it twice.": lambda word: f"{word} {word}",
    "Begin with yes.": lambda word: f"yes {word}",
    "End with please.": lambda word: f"{word} please",
    "Put it in brackets.": lambda word: f"({word})",
    "Write the first letter only.": lambda word: word[0],
    "Answer no.": lambda _: "no",
    "Add a number.": lambda word: f"{word} 7",
    "Say it is good.": lambda word: f"{word} is good",
    "Call it old.": lambda word: f"old {word}",
}
NOTES = (
    "The weather is fine today.",
    "The train came late again.",
    "She has read the letter.",
    "They live near the river.",
    "We had soup for dinner.",
    "He paints the door green.",
)
WORDS = (
    "garden window table bottle market teacher mountain picture station morning summer kitchen "
    "doctor village island forest engine ticket pocket bridge letter button carpet candle basket "
    "ladder mirror pencil pillow hammer needle anchor castle desert farmer helmet jacket kettle "
    "lemon magnet napkin orange parrot rabbit saddle tunnel valley wallet yellow zipper"
).split()
ASKED = WORDS[::10]
MODELS = {
    "3 layers of 4 heads, width 128": {"layers": 3, "heads": 4, "width": 128, "seed": 0},
    "4 layers of 3 heads, width 96": {"layers": 4, "heads": 3, "width": 96, "seed": 1},
}
SAMPLES, KAPPA, BIASES = 16, (0.1, 0.3), (1.0, 2.0, 4.0)


def main(options: list[str] | None = None) -> None:
    steps = int(options[1]) if options else 800
    rows = []
    for row in measure(steps):
        rows.append(row)
        record("emphasis_cpu", rows, ["tokenizers"])


def measure(steps: int) -> Iterator[dict[str, Any]]:
    for name, shape in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            model, tokenizer = trained(Path(folder), steps, **shape)
        for kind in ("one", "two"):
            for setting, of, bias, kappa in settings(kind):
                followed, divergence, count = obedience(model, tokenizer, kind, of, bias, kappa)
                row = {
                    "model": name,
                    "prompt": kind,
                    "emphasised": setting,
                    "bias": bias,
                    "kappa": kappa,
                    "followed": followed,
                    "mean_kl": divergence,
                    "answers": count,
                    "steps": steps,
                }
                bits = f"{setting:<12} b {bias:<4g} kappa {kappa}"
                print(f"{name} {kind} {bits:<36} {followed:.3f}  KL {divergence:.3f}", flush=True)
                yield row


def settings(kind: str) -> Iterator[tuple[str, int | None, float, float | None]]:
    """What is emphasised, its place among the lines of a prompt, b and the budget."""
    yield "nothing", None, 0.0, None
    lines = {"instruction": 1, "note": 0} | ({"other": 2} if kind == "two" else {})
    for kappa in KAPPA:
        for setting, at in lines.items():
            for bias in BIASES:
                yield setting, at, bias, kappa


def prompt(kind: str, note: str, first: str, second: str, word: str) -> list[str]:
    lines = [f"note: {note}\n", f"do: {first}\n"]
    lines += [f"do: {second}\n"] if kind == "two" else []
    return [*lines, f"word: {word}\nanswer:"]


def trained(
    folder: Path, steps: int, *, layers: int, heads: int, width: int, seed: int
) -> tuple[Transformer, TextTokenizer]:
    """A model of a text in which instructions are followed as the first page says."""
    draw, documents = random.Random(seed), list[dict[str, str]]()
    for _ in range(20_000):
        kind = draw.choice(("one", "two"))
        word = draw.choice(WORDS)
        first, second = draw.sample(list(INSTRUCTIONS), 2)
        followed = draw.choice((first, second)) if kind == "two" else first
        answer = INSTRUCTIONS[followed](word)
        if kind == "one" and draw.random() < 0.3:
            answer = word
        lines = prompt(kind, draw.choice(NOTES), first, second, word)
        documents.append({"text": "".join(lines) + f" {answer}\n"})
    file = folder / "tasks.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in documents))
    settings = {
        "text.vocabulary": 400,
        "train.steps": steps,
        "train.batch": 16,
        "model.context": 128,
        "model.layers": layers,
        "model.heads": heads,
        "model.width": width,
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    words += ["--seed", str(seed), "--out", str(folder / "run")]
    if fenchel(["train", "--text", str(file), *words]):
        raise RuntimeError("the run failed.")
    model, tokenizer, _ = load(folder / "run")
    return model, tokenizer


def obedience(
    model: Transformer,
    tokenizer: TextTokenizer,
    kind: str,
    of: int | None,
    bias: float,
    kappa: float | None,
) -> tuple[float, float, int]:
    """The share of answers that follow the first instruction, their mean KL, and their number."""
    followed, total, kl = 0, 0, list[Tensor]()
    draw = random.Random(7)
    for number, (first, apply) in enumerate(INSTRUCTIONS.items()):
        wanted = {apply(word) for word in WORDS}
        for word in ASKED:
            second = draw.choice([one for one in INSTRUCTIONS if one != first])
            lines = prompt(kind, draw.choice(NOTES), first, second, word)
            ids = tokenizer.encode_whole("".join(lines))
            steering = None
            if of is not None:
                texts = (lines[of].split(": ")[1].strip(),)
                emphasis = Emphasis(texts=texts, bias=bias).found_in(tokenizer, ids)
                steering = Steering(emphasis=emphasis, budget=kappa)
            ids_BT = torch.tensor([ids] * SAMPLES)
            new = generate(
                model, ids_BT, max_new_tokens=10, temperature=1.0, seed=number, steer=steering
            )
            for row in new:
                answer = tokenizer.decode(row[len(ids) :].tolist()).split("\n")[0].strip()
                followed += answer in wanted
                total += 1
            if steering is not None:
                kl.append(divergences(model, new, len(ids), steering))
    return followed / total, float(torch.cat(kl).mean()) if kl else 0.0, total


@torch.no_grad()
def divergences(model: Transformer, ids_BT: Tensor, start: int, steering: Steering) -> Tensor:
    """KL of the law of every new token, within its budget, to the unsteered one: (B T,)."""
    (B, T), heads = ids_BT.shape, model.config.heads
    table, position_1T = ChoiceTable([(steering, 0)] * B, heads), torch.arange(T)[None]

    def override(layer: int, call: AttentionCall) -> Tensor:
        return table.attend(layer, table.applied(layer, call, position_1T))

    laws = [model(ids_BT, attention_override=how)[:, start - 1 : -1] for how in (override, None)]
    steered, plain = (z.flatten(0, 1).double() for z in laws)
    kappa = torch.full((len(plain),), steering.budget or 1e9)
    law, plain = within_budget(steered, plain, kappa), plain.log_softmax(-1)
    return (law.exp() * (law - plain)).sum(-1)
