"""The whole flow on one page: settings in, run directory out.

    text -> tokens -> batches -> model -> loss -> optimiser -> run directory -> report

Each stage is a package; here they are handed to one another and nothing else happens.
``begin`` starts a run, ``resume`` goes on with one, and both end in the same ``_carry_out``.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from fenchel.config import from_mapping, to_mapping
from fenchel.data import (
    Batch,
    Batches,
    Corpus,
    Ids,
    TextConfig,
    open_text,
    prepare,
)
from fenchel.evaluate import (
    Score,
    attention_health,
    bzip2_bits,
    ngram_bits,
    sample,
    score,
)
from fenchel.files import (
    Damaged,
    StorageFailed,
    locked,
    read_json,
    require_space,
    sha256,
    sweep,
    write_atomic,
)
from fenchel.model import ModelConfig, Transformer
from fenchel.optim import (
    OptimConfig,
    Together,
    build_beta2,
    build_optimiser,
    build_schedule,
    constant,
)
from fenchel.report import page
from fenchel.train import (
    Listener,
    Loop,
    Outcome,
    Pace,
    Progress,
    RunDir,
    Several,
    Stepper,
    TensorBoard,
    TrainConfig,
    checkpoint,
    environment,
    measure,
    require_loggers,
    seconds,
)

TOKENS = "tokens"
"""Folder of a run's token files, unless they are shared."""
BASELINE_BYTES = 64 * 2**20
"""A longer text than this would need a table too large; its baselines are left out."""
EVALUATION_SHARE = 0.1
"""Part of a time budget that is left to evaluations and checkpoints."""
HARMLESS = {
    f"train.{name}"
    for name in "log_every evaluate_every evaluate_tokens save_every keep patience log".split()
}
"""Settings that no weight depends on."""
FIXED = {
    "optim.optimiser": "its state belongs to the one that wrote it",
    "train.budget": "it was turned into steps when the run began, so give --steps",
}
"""Settings besides the model's and the text's that a resume cannot change, and why."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Every setting of a run, by stage."""

    seed: int = 0
    """The only source of chance: initial weights, order of batches, dropout, the sample."""
    text: TextConfig = field(default_factory=TextConfig)
    model: ModelConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


class Watch(Listener, Protocol):
    """A listener that also sees the stages before training."""

    def stage(self, what: str, done: int, total: int) -> None:
        """``done`` of ``total`` of something slow."""


def settings(mapping: Mapping[str, Any]) -> RunConfig:
    """Nested plain values to settings; the vocabulary is the tokenizer's unless given."""
    model = dict(mapping.get("model", {}))
    text = mapping.get("text", {})
    model.setdefault("vocabulary", text.get("vocabulary", TextConfig().vocabulary))
    return from_mapping(RunConfig, {**mapping, "model": model})


def fresh_path(parent: Path, config: RunConfig) -> Path:
    """A folder name for a run that begins now: runs/2026-11-15_143205_sotu."""
    name = f"{time.strftime('%Y-%m-%d_%H%M%S')}_{Path(config.text.source).stem or 'text'}"
    names = (name if n == 1 else f"{name}_{n}" for n in count(1))
    return next(parent / name for name in names if not (parent / name).exists())


def begin(config: RunConfig, path: Path, watch: Watch) -> Outcome:
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
            corpus = prepare(config.text, folder, report=watch.stage)
            config = _fit_vocabulary(config, corpus)
            batches = _batches(config, corpus.train)
            config = _resolve(config, batches, watch)
            _require_room(config, run)
            _keep_corpus(run, corpus)
            run.write_settings(to_mapping(config))
        except BaseException:
            if new:
                run.abandon()
            raise
        return _carry_out(config, run, corpus, batches, watch)


def resume(
    path: Path, watch: Watch, *, changes: Mapping[str, Any], accept_new_text: bool = False
) -> Outcome:
    """Go on with the run in ``path`` from its newest intact checkpoint."""
    run = RunDir(path)
    before = run.read_settings()
    with locked(path):
        sweep(path)
        sweep(run.checkpoints)
        config = _changed(before, changes, watch)
        _device(config.train.device)  # refused before anything is written
        require_loggers(config.train.log)
        _require_room(config, run)
        corpus = _reopen(config, path, watch)
        if now := _text_changed(corpus, watch, accept_new_text):
            same_ids = replace(
                config.text, source=corpus.source, tokenizer=str(path / "tokenizer.json")
            )
            corpus = prepare(same_ids, path / f"{TOKENS}-{now[:12]}", report=watch.stage)
            _keep_corpus(run, corpus)
        if config != settings(before):
            run.write_settings(to_mapping(config))
        return _carry_out(config, run, corpus, _batches(config, corpus.train), watch)


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


def _carry_out(
    config: RunConfig, run: RunDir, corpus: Corpus, batches: Batches, watch: Watch
) -> Outcome:
    steps = config.train.steps
    if steps is None:
        raise ValueError(f"{run.path / 'config.toml'} does not say train.steps; give --steps.")
    torch.set_num_threads(config.train.threads or torch.get_num_threads())
    device = _device(config.train.device)
    model = _model(config).to(device)
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


@contextmanager
def _under_way(run: RunDir) -> Iterator[None]:
    """Tell a disk that fails a run in the middle from one that never let it begin."""
    try:
        yield
    except StorageFailed:
        raise
    except OSError as error:
        raise StorageFailed(
            f"{error}; what was saved before is intact, go on with --resume {run.path}."
        ) from error


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


def _keep_corpus(run: RunDir, corpus: Corpus) -> None:
    """Record in the run which token files it reads, and keep its tokenizer."""
    inside = corpus.folder.parent == run.path
    folder = corpus.folder.name if inside else str(corpus.folder.resolve())
    kept = {"folder": folder, "source": corpus.source, **asdict(corpus.facts)}
    run.write_json("text.json", kept)
    write_atomic(run.path / "tokenizer.json", (corpus.folder / "tokenizer.json").read_bytes())


def _read_kept(path: Path) -> dict[str, str]:
    kept = read_json(path / "text.json")
    wanted = ("folder", "source", "text_sha256", "tokenizer_sha256")
    if not all(isinstance(kept.get(name), str) for name in wanted):
        raise Damaged(f"{path / 'text.json'} does not say which text the run reads.")
    return {name: kept[name] for name in wanted}


def _reopen(config: RunConfig, path: Path, watch: Watch) -> Corpus:
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
        watch.say(f"{error} The token files are made again.")
        same_ids = replace(config.text, source=kept["source"], tokenizer=str(own))
        prepare(same_ids, path / kept["folder"], report=watch.stage)
        return open_corpus(path)


def _require_room(config: RunConfig, run: RunDir) -> None:
    """Refuse to train where not even one checkpoint fits: weights, and two moments of each."""
    with torch.device("meta"):
        parameters = Transformer(config.model).parameters()
    weights = sum(p.numel() * p.element_size() for p in parameters)
    require_space(run.path, int(1.2 * 3 * weights) + 2**20)


def _fit_vocabulary(config: RunConfig, corpus: Corpus) -> RunConfig:
    """The tokenizer's size, unless the settings ask for more rows than it has ids."""
    size = corpus.tokenizer.get_vocab_size()
    asked = config.model.vocabulary
    if asked < size:
        raise ValueError(f"model.vocabulary={asked} is fewer than the tokenizer's {size} ids.")
    given = asked != config.text.vocabulary
    return config if given else replace(config, model=replace(config.model, vocabulary=size))


def _batches(config: RunConfig, ids: Ids) -> Batches:
    return Batches(ids, batch=config.train.batch, context=config.model.context, seed=config.seed)


def _model(config: RunConfig) -> Transformer:
    return Transformer(config.model, generator=torch.Generator().manual_seed(config.seed))


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={name!r} cannot be used here: {reason}") from None
    return torch.device(name)


def _resolve(config: RunConfig, batches: Batches, watch: Watch) -> RunConfig:
    """Threads and, from a time budget, steps: measured once, then part of the settings."""
    pace, parameters = _trial(config, batches)
    steps = config.train.steps
    if steps is None:
        budget = seconds(config.train.budget or "")
        steps = max(1, int(budget * (1.0 - EVALUATION_SHARE) / pace.seconds))
    watch.say(
        f"{parameters:,} parameters; {1e3 * pace.seconds:.0f} ms a step with "
        f"{pace.threads} threads; {steps:,} steps."
    )
    return replace(config, train=replace(config.train, threads=pace.threads, steps=steps))


def _trial(config: RunConfig, batches: Batches) -> tuple[Pace, int]:
    """How fast steps of this run are, on a model that is thrown away, and its parameters."""
    model = _model(config).to(_device(config.train.device))
    take = Stepper(
        model,
        batches,
        build_optimiser(model, config.optim),
        constant(),
        config=config.train,
        seed=config.seed,
    )
    pace = measure(lambda: take(0), threads=config.train.threads)
    return pace, sum(p.numel() for p in model.parameters())


def speed() -> tuple[Pace, int]:
    """The pace of the default run on random tokens, and the tokens of one of its steps."""
    config = settings({})
    size = config.train.batch * config.model.context
    ids = np.random.default_rng(0).integers(config.model.vocabulary, size=2 * size)
    return _trial(config, _batches(config, ids))[0], size


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


def _changed(before: Mapping[str, Any], changes: Mapping[str, Any], watch: Watch) -> RunConfig:
    """Settings of a run with some of them changed: refused where the state would not fit."""
    after = {key: dict(v) if isinstance(v, Mapping) else v for key, v in before.items()}
    told = []
    for section, values in changes.items():
        for key, value in values.items() if isinstance(values, Mapping) else [("", values)]:
            name = f"{section}.{key}" if key else section
            place = after.setdefault(section, {}) if key else after
            if not isinstance(place, dict):
                raise ValueError(f"there is no setting {name!r}.")
            if place.get(key or section) == value:
                continue
            if section in ("model", "text") or name in FIXED:
                instead = FIXED.get(name, "start a new run instead")
                raise ValueError(f"{name} cannot change in a run that has begun; {instead}.")
            place[key or section] = value
            exactly = "" if name in HARMLESS else ", no longer bit for bit as begun"
            told.append(f"{name} is now {value}: the run goes on{exactly}.")
    config = settings(after)
    for sentence in told:
        watch.say(sentence)
    return config


def _text_changed(corpus: Corpus, watch: Watch, accept: bool) -> str | None:
    """The hash of the text if it is not the one the run began with; refused unless accepted."""
    try:
        now = open_text(corpus.source).sha256()
    except ValueError as error:
        watch.say(f"{error} The run goes on with its own token files.")
        return None
    then = corpus.facts.text_sha256
    if now == then:
        return None
    if not accept:
        _require_text(corpus.source, now, then)
    watch.say(f"The text has changed from {then[:12]} to {now[:12]}, as accepted.")
    return now


def _require_text(source: str, now: str, then: str) -> None:
    if now != then:
        raise ValueError(
            f"the text {source!r} has changed since the run began (SHA-256 was "
            f"{then[:12]}, is {now[:12]}); put the old text back, or go on with the new one by "
            "--accept-new-text."
        )
