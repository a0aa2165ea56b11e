"""Train, evaluate, report: what a run that begins and one that goes on have in common.

A run from settings to report: one that begins, and one that goes on.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fenchel.checkpoints import Progress, run_checkpoint
from fenchel.config import to_mapping
from fenchel.data import Batch, Batches, Corpus, open_text, prepare
from fenchel.evaluate import Score, attention_health, bzip2_bits, ngram_bits, sample, score
from fenchel.files import Damaged, StorageFailed, locked, read_json, sweep
from fenchel.optim import CombinedOptimiser, build_beta2, build_optimiser, build_schedule
from fenchel.pipeline.config import RunCallback, RunConfig, changed, settings
from fenchel.pipeline.preparation import (
    build_batches,
    build_model,
    record_corpus,
    reopen,
    require_room,
    resolve,
    text_changed,
)
from fenchel.report import page
from fenchel.train import (
    CallbackList,
    Loop,
    Outcome,
    RunDir,
    Stepper,
    TensorBoard,
    environment,
    explain_out_of_memory,
    require_loggers,
    select_device,
)

BASELINE_BYTES = 64 * 2**20
"""A longer text than this would need a table too large; its baselines are left out."""


def train_and_report(
    config: RunConfig, run: RunDir, corpus: Corpus, batches: Batches, callback: RunCallback
) -> Outcome:
    """Train what is left of the run in its directory, read the validation text, write the page."""
    steps = config.train.steps
    if steps is None:
        raise ValueError(f"{run.path / 'config.toml'} does not say train.steps; give --steps.")
    torch.set_num_threads(config.train.threads or torch.get_num_threads())
    device = select_device(config.train.device)
    model = build_model(config).to(device)
    optimiser = build_optimiser(model, config.optim)
    progress = _restore(config, run, model, optimiser, callback)
    if progress.step >= steps:
        callback.message(f"{run.path} is already finished: {progress.step:,} of {steps:,} steps.")
        told = _summary(run).get("status") == "finished"
        if told and (run.path / "report.html").is_file():
            return Outcome("finished", progress)
    _keep_environment(run, device, progress, callback)
    run.write_json("summary.json", {"status": "running", "step": progress.step, "steps": steps})

    def validate(model: nn.Module, limit: int | None = config.train.evaluate_tokens) -> Score:
        return score(
            model,
            corpus.validation,
            bytes=corpus.facts.validation_bytes,
            context=config.model.context,
            limit=limit,
        )

    def probe(batch: Batch) -> dict[str, list[float]]:
        return attention_health(model, batch.inputs[:2])

    loggers = [TensorBoard(run.path / name, step=progress.step) for name in config.train.log]
    loop = Loop(
        Stepper(
            model,
            batches,
            optimiser,
            build_schedule(config.optim, steps),
            config=config.train,
            seed=config.seed,
            beta2=build_beta2(config.optim),
        ),
        steps=steps,
        run=run,
        settings=to_mapping(config.model),
        validate=lambda model: validate(model)._asdict(),
        probe=probe,
        callback=CallbackList(callback, *loggers),
        progress=progress,
    )
    with _under_way(run):
        outcome = loop.train()
        summary: dict[str, Any] = {
            "status": outcome.status,
            "reason": outcome.reason,
            "steps": steps,
            "parameters": sum(p.numel() for p in model.parameters()),
            "text": asdict(corpus.facts),
            **asdict(outcome.progress),
        }
        if outcome.status == "finished":
            callback.message("Reading all of the validation text, and the baselines.")
            summary["validation"] = validate(model, None)._asdict()
            summary["baselines"] = _baselines(corpus, callback)
        run.write_json("summary.json", summary)
        if outcome.status != "diverged":
            run.write_json(
                "sample.json", sample(model, corpus.tokenizer, corpus.validation, seed=config.seed)
            )
        page(run.path)
    return outcome


def _restore(
    config: RunConfig,
    run: RunDir,
    model: nn.Module,
    optimiser: CombinedOptimiser,
    callback: RunCallback,
) -> Progress:
    """Fill the model from the newest intact checkpoint, and forget metrics past it."""
    folder, wrong = run_checkpoint.newest(run.checkpoints)
    for damaged, error in wrong.items():
        instead = f"{folder.name} is used instead" if folder else "it cannot be used"
        callback.message(f"{damaged.name} is damaged, {instead}: {error}")
    if folder is None:
        if wrong or _summary(run).get("step"):  # it has been further than its first step
            raise ValueError(
                f"{run.checkpoints} holds no intact checkpoint; "
                "start a new run, or restore one of them from a backup."
            )
        if run.metrics.exists():
            callback.message(
                "No checkpoint was written yet: the run begins again at its first step."
            )
        run.rewind(0)
        return Progress()
    progress = run_checkpoint.restore(folder, model, optimiser, to_mapping(config.model))
    for damaged in wrong:
        run_checkpoint.set_aside(damaged)
    if lost := run.rewind(progress.metrics_bytes):
        callback.message(lost)
    callback.message(f"Resuming from {folder.name}.")
    return progress


@contextmanager
def _under_way(run: RunDir) -> Iterator[None]:
    """Tell a disk or a memory that fails a run in the middle from one that never let it begin."""
    saved = f"what was saved before is intact, go on with --resume {run.path}"
    try:
        with explain_out_of_memory(saved):
            yield
    except StorageFailed:
        raise
    except OSError as error:
        raise StorageFailed(f"{error}; {saved}.") from error


def _summary(run: RunDir) -> dict[str, Any]:
    """How the run stood when it was last here, as far as that can be read."""
    try:
        return read_json(run.path / "summary.json")
    except Damaged:
        return {}


def _keep_environment(
    run: RunDir, device: torch.device, progress: Progress, callback: RunCallback
) -> None:
    """Record what the bits depend on, and say what has changed since the run was here."""
    now = environment(device)
    try:
        before = read_json(run.path / "environment.json") if progress.step else now
    except Damaged:
        before = now
    for what in ("torch", "device"):
        if before.get(what) != now[what]:
            callback.message(
                f"{what} was {before.get(what)} and is {now[what]}: "
                "the run goes on, no longer bit for bit as begun."
            )
    run.write_json("environment.json", now)


def baselines(corpus: Corpus) -> dict[str, float]:
    """Bits per byte without a model: bzip2 of the whole text, a table of n-grams."""
    if corpus.facts.train_bytes > BASELINE_BYTES:
        return {}
    whole = b"\n".join(d.text.encode() for d in open_text(corpus.source).documents())
    table = ngram_bits(corpus.train_text(), corpus.validation_text(), order=5)
    return {"bzip2": bzip2_bits(whole), "ngram5": table}


def _baselines(corpus: Corpus, callback: RunCallback) -> dict[str, float]:
    """The baselines, unless the text has gone or changed while the run went on."""
    try:
        return baselines(corpus)
    except (ValueError, OSError) as error:
        callback.message(f"The baselines are left out: {error}")
        return {}


TOKENS = "tokens"
"""Folder of a run's token files, unless they are shared."""


def begin(config: RunConfig, path: Path, callback: RunCallback) -> Outcome:
    """A new run in ``path``: text to tokens, a fresh model, training, the report."""
    run = RunDir(path)
    new = run.create()
    with locked(path):
        try:
            run.require_free()  # asked again: another process may have been quicker
            sweep(path)
            require_loggers(config.train.log)
            shared = config.text.prepared
            folder = path / TOKENS if shared is None else Path(shared).expanduser()
            corpus = prepare(config.text, folder, progress=callback.progress)
            config = _fit_vocabulary(config, corpus)
            batches = build_batches(config, corpus.train)
            with explain_out_of_memory("nothing was begun"):
                config = resolve(config, batches, callback)
            require_room(config, run)
            record_corpus(run, corpus)
            run.write_settings(to_mapping(config))
        except BaseException:
            if new:
                run.abandon()
            raise
        return train_and_report(config, run, corpus, batches, callback)


def resume(
    path: Path, callback: RunCallback, *, changes: Mapping[str, Any], accept_new_text: bool = False
) -> Outcome:
    """Go on with the run in ``path`` from its newest intact checkpoint."""
    run = RunDir(path)
    before = run.read_settings()
    with locked(path):
        sweep(path)
        sweep(run.checkpoints)
        config = changed(before, changes, callback)
        select_device(config.train.device)  # refused before anything is written
        require_loggers(config.train.log)
        require_room(config, run)
        corpus = reopen(config, path, callback)
        if now := text_changed(corpus, callback, accept_new_text):
            same_ids = replace(
                config.text, source=corpus.source, tokenizer=str(path / "tokenizer.json")
            )
            corpus = prepare(same_ids, path / f"{TOKENS}-{now[:12]}", progress=callback.progress)
            record_corpus(run, corpus)
        if config != settings(before):
            run.write_settings(to_mapping(config))
        return train_and_report(config, run, corpus, build_batches(config, corpus.train), callback)


def _fit_vocabulary(config: RunConfig, corpus: Corpus) -> RunConfig:
    """The tokenizer's size, unless the settings ask for more rows than it has ids."""
    size = corpus.tokenizer.get_vocab_size()
    asked = config.model.vocabulary
    if asked < size:
        raise ValueError(f"model.vocabulary={asked} is fewer than the tokenizer's {size} ids.")
    given = asked != config.text.vocabulary
    return config if given else replace(config, model=replace(config.model, vocabulary=size))
