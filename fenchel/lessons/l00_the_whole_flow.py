"""Lesson 0. The whole flow on one page: text in, report out.

Each line's result is the next line's argument. Follow any name to the file it comes from: the
package is the stage. `fenchel train` does the same, with checks and resume (fenchel/pipeline/).

Run it:  python -m fenchel.lessons.l00_the_whole_flow
"""

# %% text -> tokens: a text of our own, its vocabulary, its ids
import tempfile
from pathlib import Path

import torch

from fenchel.checkpoints import Progress
from fenchel.data import Batches, TextConfig, decode, encode, prepare
from fenchel.evaluate import attention_health, score
from fenchel.generation import generate
from fenchel.model import ModelConfig, Transformer
from fenchel.optim import OptimConfig, build_optimiser, build_schedule
from fenchel.report import page
from fenchel.train import Loop, RunDir, Stepper, TrainConfig

folder = Path(tempfile.mkdtemp())
(folder / "shells.txt").write_text("she sells sea shells on the sea shore;\n" * 200)
text = TextConfig(source=str(folder / "shells.txt"), vocabulary=300)
corpus = prepare(text, folder / "tokens")
print(f"{corpus.facts.train_bytes} bytes became {corpus.facts.train_tokens} tokens")

# %% tokens -> batches: the batch of step 7 depends on the seed and on 7, nothing else
batches = Batches(corpus.train, batch=8, context=32, seed=0)
assert torch.equal(
    batches.at(7).inputs, Batches(corpus.train, batch=8, context=32, seed=0).at(7)[0]
)

# %% model (embed -> blocks -> attention: scores -> choice -> mix)
config = ModelConfig(
    vocabulary=corpus.facts.vocabulary, context=32, width=32, layers=1, choice="entmax"
)
model = Transformer(config, generator=torch.Generator().manual_seed(0))

# %% loss -> optimiser -> run directory
run = RunDir(folder / "run")
run.create()
optim = OptimConfig(learning_rate=1e-2)
step = Stepper(
    model,
    batches,
    build_optimiser(model, optim),
    build_schedule(optim, steps=60),
    config=TrainConfig(steps=60, log_every=20),
    seed=0,
)


class Quiet:
    """A callback that prints messages only."""

    def step(self, step: int, steps: int) -> None:
        """A step is complete."""

    def log(self, metrics: object) -> None:
        """A line of metrics was written."""

    def message(self, text: str) -> None:
        """A sentence for the person who runs it."""
        print(text)


size = corpus.facts.validation_bytes
loop = Loop(
    step,
    steps=60,
    run=run,
    settings={"vocabulary": config.vocabulary},
    validate=lambda m: score(m, corpus.validation, bytes=size, context=32)._asdict(),
    probe=lambda batch: attention_health(model, batch.inputs[:2]),
    callback=Quiet(),
    progress=Progress(),
)
assert loop.train().status == "finished"

# %% evaluate: a repeating text costs almost no bits
bits = score(model, corpus.validation, bytes=size, context=32).bits_per_byte
print(f"{bits:.3f} bits per byte")
assert bits < 0.5

# %% generate: the model continues the sentence
prompt = torch.tensor([encode(corpus.tokenizer, "she sells sea")])
longer = generate(model, prompt, max_new_tokens=8, temperature=0.0)
print(decode(corpus.tokenizer, longer[0].tolist()))
assert "shells on the sea shore" in decode(corpus.tokenizer, longer[0].tolist())

# %% report: one self-contained file
assert page(run.path).stat().st_size > 1000

# %% Try it
# 1. Put choice="softmax" in place of "entmax". Does the support in metrics.jsonl change?
# 2. Take the rotary positions away (positions="none"). Which words can it no longer order?
