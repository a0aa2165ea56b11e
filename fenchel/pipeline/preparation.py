"""Which text a run reads: recorded when it begins, found again, and not another one.

What a run needs before it begins: a device, room on the disk, its pace and so its steps.
"""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from fenchel.data import Batches, Corpus, Ids, open_text, prepare
from fenchel.files import Damaged, read_json, require_space, sha256, write_atomic
from fenchel.model import Transformer
from fenchel.optim import build_optimiser, constant
from fenchel.pipeline.config import RunCallback, RunConfig, settings
from fenchel.train import RunDir, Stepper, StepTime, seconds, select_device, time_steps


def record_corpus(run: RunDir, corpus: Corpus) -> None:
    """Record in the run which token files it reads, and keep its tokenizer."""
    inside = corpus.folder.parent == run.path
    folder = corpus.folder.name if inside else str(corpus.folder.resolve())
    kept = {"folder": folder, "source": corpus.source, **asdict(corpus.facts)}
    run.write_json("text.json", kept)
    write_atomic(run.path / "tokenizer.json", (corpus.folder / "tokenizer.json").read_bytes())


def open_corpus(path: Path) -> Corpus:
    """The token files that the run in ``path`` reads, if they are still those of its text."""
    kept = _read_kept(path)
    corpus = replace(Corpus.open(path / kept["folder"]), source=kept["source"])
    for what in ("text_sha256", "tokenizer_sha256"):
        there = getattr(corpus.facts, what)
        if there != kept[what]:
            raise ValueError(
                f"{corpus.folder} holds token files of another {what.partition('_')[0]} than the "
                f"run began with (SHA-256 {there[:12]}, was {kept[what][:12]})."
            )
    return corpus


def _read_kept(path: Path) -> dict[str, str]:
    kept = read_json(path / "text.json")
    wanted = ("folder", "source", "text_sha256", "tokenizer_sha256")
    if not all(isinstance(kept.get(name), str) for name in wanted):
        raise Damaged(f"{path / 'text.json'} does not say which text the run reads.")
    return {name: kept[name] for name in wanted}


def reopen(config: RunConfig, path: Path, callback: RunCallback) -> Corpus:
    """The token files of a run, made again from its text if they are damaged."""
    kept, own = _read_kept(path), path / "tokenizer.json"
    if not own.is_file() or sha256(own) != kept["tokenizer_sha256"]:
        raise ValueError(
            f"{own} is not the tokenizer the run began with (SHA-256 was "
            f"{kept['tokenizer_sha256'][:12]}); put that one back."
        )
    try:
        return open_corpus(path)
    except Damaged as error:
        _require_text(kept["source"], open_text(kept["source"]).sha256(), kept["text_sha256"])
        callback.message(f"{error} The token files are made again.")
        same_ids = replace(config.text, source=kept["source"], tokenizer=str(own))
        prepare(same_ids, path / kept["folder"], progress=callback.progress)
        return open_corpus(path)


def text_changed(corpus: Corpus, callback: RunCallback, accept: bool) -> str | None:
    """The hash of the text if it is not the one the run began with; refused unless accepted."""
    try:
        now = open_text(corpus.source).sha256()
    except ValueError as error:
        callback.message(f"{error} The run goes on with its own token files.")
        return None
    then = corpus.facts.text_sha256
    if now == then:
        return None
    if not accept:
        _require_text(corpus.source, now, then)
    callback.message(f"The text has changed from {then[:12]} to {now[:12]}, as accepted.")
    return now


def _require_text(source: str, now: str, then: str) -> None:
    if now != then:
        raise ValueError(
            f"the text {source!r} has changed since the run began (SHA-256 was "
            f"{then[:12]}, is {now[:12]}); put the old text back, or go on with the new one by "
            "--accept-new-text."
        )


EVALUATION_SHARE = 0.1
"""Part of a time budget that is left to evaluations and checkpoints."""


def build_batches(config: RunConfig, ids: Ids) -> Batches:
    """The batches of a run: nothing but the seed decides their order."""
    return Batches(ids, batch=config.train.batch, context=config.model.context, seed=config.seed)


def build_model(config: RunConfig) -> Transformer:
    """A fresh model of a run: nothing but the seed decides its weights."""
    return Transformer(config.model, generator=torch.Generator().manual_seed(config.seed))


def require_room(config: RunConfig, run: RunDir) -> None:
    """Refuse to train where not even one checkpoint fits: weights, and two moments of each."""
    with torch.device("meta"):
        parameters = Transformer(config.model).parameters()
    weights = sum(p.numel() * p.element_size() for p in parameters)
    require_space(run.path, int(1.2 * 3 * weights) + 2**20)


def resolve(config: RunConfig, batches: Batches, callback: RunCallback) -> RunConfig:
    """Threads and, from a time budget, steps: measured once, then part of the settings."""
    pace, parameters = _trial(config, batches)
    steps = config.train.steps
    if steps is None:
        budget = seconds(config.train.budget or "")
        steps = max(1, int(budget * (1.0 - EVALUATION_SHARE) / pace.seconds))
    callback.message(
        f"{parameters:,} parameters; {1e3 * pace.seconds:.0f} ms a step with "
        f"{pace.threads} threads; {steps:,} steps."
    )
    return replace(config, train=replace(config.train, threads=pace.threads, steps=steps))


def _trial(config: RunConfig, batches: Batches) -> tuple[StepTime, int]:
    """How fast steps of this run are, on a model that is thrown away, and its parameters."""
    model = build_model(config).to(select_device(config.train.device))
    stepper = Stepper(
        model,
        batches,
        build_optimiser(model, config.optim),
        constant(),
        config=config.train,
        seed=config.seed,
    )
    pace = time_steps(lambda: stepper(0), threads=config.train.threads)
    return pace, sum(p.numel() for p in model.parameters())


def speed() -> tuple[StepTime, int]:
    """The pace of the default run on random tokens, and the tokens of one of its steps."""
    config = settings({})
    size = config.train.batch * config.model.context
    ids = np.random.default_rng(0).integers(config.model.vocabulary, size=2 * size)
    return _trial(config, build_batches(config, ids))[0], size
