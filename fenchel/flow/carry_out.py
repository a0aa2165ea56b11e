"""Train, evaluate, report: what a run that begins and one that goes on have in common."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from fenchel.config import to_mapping
from fenchel.data import Batch, Batches, Corpus, open_text
from fenchel.evaluate import Score, attention_health, bzip2_bits, ngram_bits, sample, score
from fenchel.files import Damaged, StorageFailed, read_json
from fenchel.flow.config import RunConfig, Watch
from fenchel.flow.trial import device_of, model_of
from fenchel.optim import Together, build_beta2, build_optimiser, build_schedule
from fenchel.report import page
from fenchel.train import (
    Loop,
    Outcome,
    Progress,
    RunDir,
    Several,
    Stepper,
    TensorBoard,
    checkpoint,
    enough_memory,
    environment,
)

BASELINE_BYTES = 64 * 2**20
"""A longer text than this would need a table too large; its baselines are left out."""


def carry_out(
    config: RunConfig, run: RunDir, corpus: Corpus, batches: Batches, watch: Watch
) -> Outcome:
    """Train what is left of the run in its directory, read the validation text, write the page."""
    steps = config.train.steps
    if steps is None:
        raise ValueError(f"{run.path / 'config.toml'} does not say train.steps; give --steps.")
    torch.set_num_threads(config.train.threads or torch.get_num_threads())
    device = device_of(config.train.device)
    model = model_of(config).to(device)
    optimiser = build_optimiser(model, config.optim)
    progress = _restore(config, run, model, optimiser, watch)
    if progress.step >= steps:
        watch.say(f"{run.path} is already finished: {progress.step:,} of {steps:,} steps.")
        told = _summary(run).get("status") == "finished"
        if told and (run.path / "report.html").is_file():
            return Outcome("finished", progress)
    _keep_environment(run, device, progress, watch)
    run.write_json("summary.json", {"status": "running", "step": progress.step, "steps": steps})

    def validate(model: nn.Module, limit: int | None = config.train.evaluate_tokens) -> Score:
        return score(
            model,
            corpus.validation,
            bytes=corpus.facts.validation_bytes,
            context=config.model.context,
            limit=limit,
        )

    def probe(_: nn.Module, batch: Batch) -> dict[str, list[float]]:
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
        listener=Several(watch, *loggers),
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
            watch.say("Reading all of the validation text, and the baselines.")
            summary["validation"] = validate(model, None)._asdict()
            summary["baselines"] = _baselines(corpus, watch)
        run.write_json("summary.json", summary)
        if outcome.status != "diverged":
            run.write_json(
                "sample.json", sample(model, corpus.tokenizer, corpus.validation, seed=config.seed)
            )
        page(run.path)
    return outcome


def _restore(
    config: RunConfig, run: RunDir, model: nn.Module, optimiser: Together, watch: Watch
) -> Progress:
    """Fill the model from the newest intact checkpoint, and forget metrics past it."""
    folder, wrong = checkpoint.newest(run.checkpoints)
    for damaged, error in wrong.items():
        instead = f"{folder.name} is used instead" if folder else "it cannot be used"
        watch.say(f"{damaged.name} is damaged, {instead}: {error}")
    if folder is None:
        if wrong or _summary(run).get("step"):  # it has been further than its first step
            raise ValueError(
                f"{run.checkpoints} holds no intact checkpoint; "
                "start a new run, or restore one of them from a backup."
            )
        if run.metrics.exists():
            watch.say("No checkpoint was written yet: the run begins again at its first step.")
        run.rewind(0)
        return Progress()
    progress = checkpoint.restore(folder, model, optimiser, to_mapping(config.model))
    for damaged in wrong:
        checkpoint.set_aside(damaged)
    if lost := run.rewind(progress.metrics_bytes):
        watch.say(lost)
    watch.say(f"Resuming from {folder.name}.")
    return progress


@contextmanager
def _under_way(run: RunDir) -> Iterator[None]:
    """Tell a disk or a memory that fails a run in the middle from one that never let it begin."""
    saved = f"what was saved before is intact, go on with --resume {run.path}"
    try:
        with enough_memory(saved):
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


def _keep_environment(run: RunDir, device: torch.device, progress: Progress, watch: Watch) -> None:
    """Record what the bits depend on, and say what has changed since the run was here."""
    now = environment(device)
    try:
        before = read_json(run.path / "environment.json") if progress.step else now
    except Damaged:
        before = now
    for what in ("torch", "device"):
        if before.get(what) != now[what]:
            watch.say(
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


def _baselines(corpus: Corpus, watch: Watch) -> dict[str, float]:
    """The baselines, unless the text has gone or changed while the run went on."""
    try:
        return baselines(corpus)
    except (ValueError, OSError) as error:
        watch.say(f"The baselines are left out: {error}")
        return {}
