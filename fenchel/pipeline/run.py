"""``begin`` starts a run, ``tune`` one from a checkpoint, ``resume`` continues either.

All end in ``train_and_report``.

A directory becomes a run when its settings are written, after everything that can be refused has
been checked: a run that cannot begin leaves nothing behind, and one that is killed before leaves a
folder that ``begin`` takes over. The summary is written last, after the sample and the page: a run
whose summary says that it is finished has both of the last step.

Several processes run these functions together (``world``). Rank 0 alone locks and writes the run
directory, prepares the text and writes the report; ``World.on_first`` gives the others its result.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fenchel.checkpoints import Progress, load_model, run_checkpoint
from fenchel.checkpoints.run_checkpoint import Weights
from fenchel.checkpoints.tokenizer import end_ids, read_chat_template
from fenchel.config import to_mapping
from fenchel.data import Batch, BatchSource, Corpus, holds_conversations, prepare
from fenchel.data.config import LARGEST_DEFAULT
from fenchel.distributed.cells import reshard
from fenchel.distributed.checkpoint import DistributedLoop, ReadOnlyRunDir
from fenchel.distributed.processes import ALONE, World
from fenchel.evaluate import (
    attention_health,
    bzip2_bits,
    ngram_bits,
    sample,
    score,
    score_choice,
    score_documents,
)
from fenchel.evaluate.attention import PROMPT
from fenchel.files import (
    Busy,
    Damaged,
    NoSpace,
    StorageFailed,
    describe,
    locked,
    read_sealed_json,
    sweep,
)
from fenchel.model import Transformer
from fenchel.model.lora import AdapterWeights
from fenchel.model.transformer import meta_model
from fenchel.optim import CombinedOptimiser, build_beta2, build_optimiser, build_schedule
from fenchel.pipeline.config import (
    RunCallback,
    RunConfig,
    change_settings,
    comments,
    settings,
)
from fenchel.pipeline.preparation import (
    build_batches,
    build_cells,
    first_weights,
    in_cells,
    model_to_train,
    new_text,
    record_corpus,
    reopen_corpus,
    require_cells,
    require_memory,
    require_room,
    resolve_steps,
    run_batches,
    start_weights,
)
from fenchel.pipeline.tuning import (
    count_steps,
    document_batches,
    first_model,
    measure,
    memory,
    memory_sentence,
    read_encoder,
    trainable,
    tune_settings,
    write_base,
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
    named_loss,
    require_loggers,
    select_device,
)
from fenchel.train.loop import newest_checkpoint
from fenchel.train.rundir import TOKENS, is_run_name, plain_json
from fenchel.train.step import autocast

SHORT_VALIDATION = 1000
"""Bytes of held-out text below which its loss is mostly chance."""
BASELINE_BYTES = 64 * 2**20
"""A longer text than this would need too large a table; its baselines are left out."""


def begin(config: RunConfig, path: Path, callback: RunCallback, world: World = ALONE) -> Outcome:
    """Start a run in ``path``: text to tokens, a fresh model, training, the report."""
    run = _run_dir(path, world)
    with _storage_errors(run):
        new = world.first and run.create()
    with _storage_errors(run), _lock(path, world):
        try:

            def begin_text() -> Corpus:
                run.require_free()  # again, under the lock: another process may have been faster
                sweep(path, is_run_name)
                require_loggers(config.train.log)
                require_cells(config, world)
                require_memory(config, world)
                shared = config.text.prepared
                folder = path / TOKENS if shared is None else Path(shared).expanduser()
                owned, progress = shared is None, callback.progress
                corpus = prepare(config.text, folder, owned=owned, progress=progress)
                _warn_of_short_text(corpus, callback)
                return corpus

            if config.tune is not None:
                raise ValueError("the section tune belongs to fenchel tune DIR.")
            corpus = _corpus_of_first(begin_text, world)
            config = _fit_vocabulary(config, corpus)
            batches = build_batches(config, corpus.train)
            with explain_out_of_memory("nothing was begun", recompute=config.train.recompute):
                model = model_to_train(config, world)
                config = resolve_steps(config, model, batches, callback, world)
            if world.first:
                _record(config, model, run, corpus, world)
        except BaseException:
            if new:
                run.abandon()
            raise
        return train_and_report(config, model, run, corpus, batches, callback, world)


def tune(
    checkpoint: Path,
    mapping: Mapping[str, Any],
    path: Path,
    callback: RunCallback,
    world: World = ALONE,
    *,
    template: str | None = None,
) -> Outcome:
    """Start a run in ``path`` that continues ``checkpoint`` on the text of the settings.

    ``mapping`` are settings that differ from the defaults of tuning; ``template`` replaces the chat
    template of the checkpoint ("plain", or the name of a file).
    """
    run = _run_dir(path, world)
    with _storage_errors(run):
        new = world.first and run.create()
    with _storage_errors(run), _lock(path, world):
        try:

            def claim() -> None:
                run.require_free()  # again, under the lock: another process may have been faster
                sweep(path, is_run_name)

            world.on_first(claim)
            callback.progress("reading the checkpoint", 0, 0)
            loaded = load_model(checkpoint)
            config = tune_settings(mapping, checkpoint, loaded.config)
            select_device(config.train.device)  # refused before anything is written

            def begin_text(model: Transformer) -> Corpus:
                require_loggers(config.train.log)
                chats = holds_conversations(config.text.source)
                encoder = write_base(
                    run, model, config, checkpoint, conversations=chats, template=template
                )
                shared = config.text.prepared
                folder = path / TOKENS if shared is None else Path(shared).expanduser()
                owned, shown = shared is None, callback.progress
                return prepare(config.text, folder, owned=owned, progress=shown, encoder=encoder)

            corpus = _corpus_of_first(partial(begin_text, loaded), world)
            config = count_steps(config, mapping, corpus, callback, world)
            require_cells(config, world)
            require_memory(config, world)
            batches = run_batches(config, corpus)
            with explain_out_of_memory("nothing was begun", recompute=config.train.recompute):
                model = model_to_train(config, world, partial(trainable, loaded, config))
                del loaded
                if world.size == 1:
                    callback.message(memory_sentence(memory(config, model)))
                config = resolve_steps(config, model, batches, callback, world)
            if world.first:
                _record(config, model, run, corpus, world)
        except BaseException:
            if new:
                run.abandon()
            raise
        return train_and_report(config, model, run, corpus, batches, callback, world)


def _record(
    config: RunConfig, model: Transformer, run: RunDir, corpus: Corpus, world: World
) -> None:
    """Make the directory a run, after everything that can be refused has been checked."""
    require_room(model, run)
    record_corpus(run, corpus)
    world.record_run(str(run.path))
    run.write_settings(to_mapping(config), comments())


def resume(
    path: Path,
    callback: RunCallback,
    *,
    changes: Mapping[str, Any],
    accept_new_text: bool = False,
    world: World = ALONE,
) -> Outcome:
    """Continue the run in ``path`` from its newest intact checkpoint."""
    run = _run_dir(path, world)
    with _storage_errors(run):
        before = world.on_first(run.read_settings)
        run.require_plain()
    with _storage_errors(run), _lock(path, world):
        config = change_settings(before, changes, callback)
        select_device(config.train.device)  # refused before anything is written

        def reopen_text() -> Corpus:
            sweep(path, is_run_name)
            sweep(run.checkpoints, run_checkpoint.is_checkpoint_name)
            require_loggers(config.train.log)
            require_cells(config, world)
            require_memory(config, world)
            require_room(meta_model(config.model), run)
            corpus = reopen_corpus(config, run, callback)
            if digest := new_text(corpus, callback, accept_new_text):
                encoder = None if config.tune is None else read_encoder(path)
                tokenizer = str(path / "tokenizer.json") if encoder is None else None
                same_ids = replace(config.text, source=corpus.source, tokenizer=tokenizer)
                folder, progress = path / f"{TOKENS}-{digest[:12]}", callback.progress
                corpus = prepare(same_ids, folder, owned=True, progress=progress, encoder=encoder)
                record_corpus(run, corpus)
            if config != settings(before):
                run.write_settings(to_mapping(config), comments())
            return corpus

        corpus = _corpus_of_first(reopen_text, world)
        batches = run_batches(config, corpus)
        begun = world.on_first(lambda: bool(run_checkpoint.folders(run.checkpoints)))
        build = None
        if config.tune is not None and (config.tune.rank is not None or not begun):
            build = partial(first_model, config, path)
        model = model_to_train(config, world, build)
        return train_and_report(config, model, run, corpus, batches, callback, world)


def _run_dir(path: Path, world: World) -> RunDir:
    return RunDir(path) if world.first else ReadOnlyRunDir(path)


def _lock(path: Path, world: World) -> AbstractContextManager[None]:
    """The lock of the run, which rank 0 holds for all."""
    return locked(path) if world.first else nullcontext()


def _corpus_of_first(make: Callable[[], Corpus], world: World) -> Corpus:
    """The corpus that rank 0 makes; the others open its files, before rank 0 goes on.

    It may refuse the run next, and then removes them.
    """
    made: list[Corpus] = []

    def record() -> list[str]:
        made.append(make())
        return [str(made[0].folder), made[0].source]

    folder, source = world.on_first(record)
    corpus = made[0] if made else replace(Corpus.open(Path(folder)), source=source)
    world.gather(None)
    return corpus


def train_and_report(
    config: RunConfig,
    model: Transformer,
    run: RunDir,
    corpus: Corpus,
    batches: BatchSource,
    callback: RunCallback,
    world: World = ALONE,
) -> Outcome:
    """Take the remaining steps of the run, evaluate the model, write the report."""
    steps, device = config.train.steps, select_device(config.train.device)
    if steps is None:
        raise ValueError(f"{run.path / 'config.toml'} does not say train.steps; give --steps.")
    torch.set_num_threads(config.train.threads or torch.get_num_threads())
    fresh = not world.on_first(lambda: bool(run_checkpoint.folders(run.checkpoints)))
    drawn = None
    if fresh and model.embed.weight.is_meta:
        drawn = first_weights(config, run.path, corpus.train, world)
    elif fresh and config.tune is None:
        start_weights(config, model, corpus.train)
    schedule, stepper = build_schedule(config.optim, steps), None
    weights: Weights = model
    if in_cells(config, world):
        stepper = build_cells(config, model, batches, schedule, world, steps=steps, drawn=drawn)
        del drawn
        optimiser, weights = stepper.optimiser, stepper.owners
    else:
        optimiser = build_optimiser(model, config.optim, steps=steps)
        if config.tune is not None and config.tune.rank is not None:
            weights = AdapterWeights(model)
    progress = _restore(config, run, weights, optimiser, callback, world)
    if progress.step >= steps:
        callback.message(f"{run.path} is already finished: {progress.step:,} of {steps:,} steps.")
        if world.on_first(lambda: _is_complete(run, progress.step)):
            return Outcome("finished", progress)
    if world.first:
        _record_environment(config, run, device, progress, callback, world)
    run.write_status(progress.step, steps)
    divided = stepper is not None and stepper.owners.sharded  # no rank has all of the weights
    if config.tune is not None and not progress.step:
        callback.progress("measuring the checkpoint", 0, 0)

        def measure_checkpoint() -> None:
            whole = first_model(config, run.path).to(device) if divided else model
            run.write_json("before.json", measure(config, whole, corpus))

        world.on_first(measure_checkpoint)

    precision = autocast(config.train.precision, device)

    def validate(model: nn.Module, limit: int | None) -> dict[str, float]:
        with nullcontext() if limit is None else precision():
            metrics = _evaluate(config, model, corpus, limit, world)
        reshard(model)
        return metrics

    def probe(batch: Batch) -> dict[str, list[float]]:
        health = attention_health(model, _probed(batch))
        reshard(model)
        return health

    names = config.train.log if world.first else ()
    loggers = [TensorBoard(run.path / name, step=progress.step) for name in names]
    loop = (Loop if stepper is None else DistributedLoop)(
        stepper
        or Stepper(
            model,
            batches,
            optimiser,
            schedule,
            config=config.train,
            seed=config.seed,
            beta2=build_beta2(config.optim),
        ),
        steps=steps,
        run=run,
        settings=to_mapping(config.model),
        validate=lambda model: validate(model, config.train.evaluate_tokens),
        probe=probe,
        callback=CallbackList(callback, *loggers),
        progress=progress,
        weights=weights,
    )
    with _explain_failure(run, config.train.recompute):
        outcome = loop.train()
        summary: dict[str, Any] = {
            "status": outcome.status,
            "reason": outcome.reason,
            "steps": steps,
            "parameters": sum(p.numel() for p in model.parameters()),
            **_adapter_facts(config, model),
            "text": asdict(corpus.facts),
            **asdict(outcome.progress),
        }
        if outcome.status == "finished":
            callback.progress("reading all of the validation text", 0, 0)
            summary["validation"] = validate(model, None)
        if not world.first:
            return outcome
        whole = model
        if divided and outcome.status != "diverged":
            whole = load_model(run.path, which="newest").to(device)
        if outcome.status == "finished":
            callback.progress("computing the baselines", 0, 0)
            summary |= _baselines(corpus, callback)
            summary |= _before_and_after(config, run, whole, corpus, callback)
        if outcome.status != "diverged":
            # Sampling draws from the softmax of the logits, which another loss does not fit; their
            # largest is the most probable token under every map.
            temperature = 0.8 if config.train.loss == "cross_entropy" else 0.0
            run.write_json("sample.json", _sample(config, whole, run, corpus, temperature))
        page(run.path, plain_json(summary))
        run.write_json("summary.json", summary)
    return outcome


def _before_and_after(
    config: RunConfig, run: RunDir, model: Transformer, corpus: Corpus, callback: RunCallback
) -> dict[str, Any]:
    """The measures of a checkpoint and of what was tuned of it."""
    if config.tune is None:
        return {}
    callback.progress("measuring the tuned model", 0, 0)
    try:
        before = read_sealed_json(run.path / "before.json")
    except Damaged as error:
        callback.message(f"{error} The report has no comparison with the checkpoint.")
        return {}
    return {"tuning": {"before": before, "after": measure(config, model, corpus)}}


def _adapter_facts(config: RunConfig, model: nn.Module) -> dict[str, int]:
    """How many numbers are trained, where these are adapters."""
    if config.tune is None or config.tune.rank is None:
        return {}
    return {"trained": sum(p.numel() for p in model.parameters() if p.requires_grad)}


def _probed(batch: Batch) -> Tensor:
    """Ids of a batch for the health of attention: two texts, or the first document of a row."""
    if batch.segments is None:
        return batch.inputs[:2]
    return batch.inputs[:1, batch.segments[0] == batch.segments[0, 0]]


def _sample(
    config: RunConfig, model: Transformer, run: RunDir, corpus: Corpus, temperature: float
) -> dict[str, Any]:
    """A continuation of the validation text, or an answer in its first conversation."""
    tokenizer, ids, prompt = corpus.tokenizer, corpus.validation, PROMPT
    stop = list(end_ids(run.path, tokenizer))
    if (documents := corpus.documents_of) is not None:
        first = documents[True]
        ids = ids[: int(first.starts[1])]
        if first.scored is not None:
            prompt = int(first.scored[: len(ids)].argmax())
            prompt = max(1, min(prompt, config.model.context - 1))
        if corpus.facts.conversations and (template := read_chat_template(run.path)) is not None:
            stop += [one for one in template.stops(tokenizer) if isinstance(one, int)]
    return sample(
        model,
        tokenizer,
        ids,
        seed=config.seed,
        temperature=temperature,
        prompt=prompt,
        stop=stop,
    )


def _evaluate(
    config: RunConfig, model: nn.Module, corpus: Corpus, limit: int | None, world: World
) -> dict[str, float]:
    """Metrics of the validation text, "loss" being the one that was trained.

    With another loss than cross-entropy, perplexity and bits per byte are those of its own choice
    map, and are left out where a target has probability 0.
    """
    if config.tune is not None:
        assert isinstance(model, Transformer)
        rows, size = document_batches(config, corpus, validation=True), corpus.facts.predicted_bytes
        return score_documents(model, rows, bytes=size, limit=limit)._asdict()
    choice = named_loss(config.train.loss, alpha=config.train.loss_alpha)
    ids, size = corpus.validation, corpus.facts.validation_bytes
    context = config.model.context
    if choice is None:
        found = score(model, ids, bytes=size, context=context, limit=limit, shared=world)
        return found._asdict()
    scores = score_choice(
        model, ids, choice=choice, bytes=size, context=context, limit=limit, shared=world
    )
    return {name: value for name, value in scores._asdict().items() if math.isfinite(value)}


def _restore(
    config: RunConfig,
    run: RunDir,
    weights: Weights,
    optimiser: CombinedOptimiser,
    callback: RunCallback,
    world: World,
) -> Progress:
    """Load the newest intact checkpoint into the model, and remove metrics past it."""
    damaged: dict[Path, str] = {}

    def choose() -> str | None:
        folder, wrong = _choose_checkpoint(run, callback)
        damaged.update(wrong)
        return None if folder is None else str(folder)

    chosen = world.on_first(choose)
    if chosen is None:
        return Progress()
    folder = Path(chosen)
    progress = run_checkpoint.restore(folder, weights, optimiser, to_mapping(config.model))
    if world.first:
        for bad in damaged:
            run_checkpoint.set_aside(bad)
        if lost := run.rewind(progress.metrics_bytes):
            callback.message(lost)
        callback.message(f"Resuming from {folder.name}.")
    return progress


def _choose_checkpoint(run: RunDir, callback: RunCallback) -> tuple[Path | None, dict[Path, str]]:
    """The newest intact checkpoint, None at the first step, and the damaged ones after it."""
    folder, damaged = run_checkpoint.newest(run.checkpoints)
    for bad, error in damaged.items():
        instead = f"{folder.name} is used instead" if folder else "it cannot be used"
        callback.message(f"{bad.name} is damaged, {instead}: {error}")
    if folder is None:
        saved = _read_summary(run).get("step")
        if damaged or saved:
            past = f" of a run that has saved step {saved}" if saved and not damaged else ""
            raise ValueError(
                f"{run.checkpoints} holds no intact checkpoint{past}; "
                "start a new run, or restore one of them from a backup."
            )
        if run.metrics.exists():
            callback.message(
                "No checkpoint was written yet: the run begins again at its first step."
            )
        run.rewind(0)
    return folder, damaged


@contextmanager
def _explain_failure(run: RunDir, recompute: str) -> Iterator[None]:
    """Turn a failure of disk or memory into one sentence: what is saved, how to continue."""
    try:
        with _storage_errors(run):
            yield
    except NoSpace as error:
        raise StorageFailed(f"{error} Make room first; {_what_is_saved(run)}.") from error
    except (MemoryError, RuntimeError):
        with explain_out_of_memory(_what_is_saved(run), recompute=recompute):
            raise


@contextmanager
def _storage_errors(run: RunDir) -> Iterator[None]:
    """Turn an error of the system that is not a sentence yet into StorageFailed."""
    try:
        yield
    except (StorageFailed, NoSpace, Busy):
        raise
    except OSError as error:
        raise StorageFailed(f"{describe(error)}; {_what_is_saved(run)}.") from error


def _what_is_saved(run: RunDir) -> str:
    """What is left of a run that has failed, and how to continue, as part of a sentence."""
    if not (run.path / "config.toml").exists():
        return "nothing was begun" if run.path.exists() else f"{run.path} is not there"
    return f"{newest_checkpoint(run)}, go on with --resume {run.path}"


def _is_complete(run: RunDir, step: int) -> bool:
    """Whether summary, sample and page are there and are those of the last step."""
    summary = _read_summary(run)
    wrong = {name for name, verdict in run.check_files().items() if verdict != "intact"}
    return (
        (summary.get("status"), summary.get("step")) == ("finished", step)
        and (run.path / "report.html").exists()
        and (run.path / "sample.json").exists()
        and not wrong & {"summary.json", "sample.json", "report.html"}
    )


def _read_summary(run: RunDir) -> dict[str, Any]:
    """The summary of an earlier process, empty if it cannot be read."""
    try:
        return read_sealed_json(run.path / "summary.json")
    except Damaged:
        return {}


def _record_environment(
    config: RunConfig,
    run: RunDir,
    device: torch.device,
    progress: Progress,
    callback: RunCallback,
    world: World,
) -> None:
    """Record what the bits depend on, and report what has changed since the last process."""
    now = {**environment(device), "processes": world.size}
    try:
        before = read_sealed_json(run.path / "environment.json") if progress.step else now
    except Damaged as error:
        callback.message(f"{error} It is written anew.")
        before = now
    before = {"processes": 1, **before}
    processes = ("processes",) if config.train.cells is None else ()
    for what in ("torch", "device", *processes):
        if before.get(what) != now[what]:
            callback.message(
                f"{what} was {before.get(what)} and is {now[what]}: "
                "the run goes on, no longer bit for bit as begun."
            )
    run.write_json("environment.json", now)


def baselines(corpus: Corpus) -> dict[str, float]:
    """Bits per byte without a model: bzip2 of the whole text, a table of n-grams."""
    if corpus.facts.train_bytes > BASELINE_BYTES:
        raise ValueError(
            f"the training text has {corpus.facts.train_bytes / 2**20:,.0f} MiB, and a table of "
            f"n-grams is made of {BASELINE_BYTES // 2**20} MiB at most."
        )
    table = ngram_bits(corpus.train_text(), corpus.validation_text(), order=5)  # checks the text
    whole = b"\n".join(d.text.encode() for d in corpus.reopen_text().documents())
    return {"bzip2": bzip2_bits(whole), "ngram5": table}


def _baselines(corpus: Corpus, callback: RunCallback) -> dict[str, Any]:
    """The baselines, or why there are none: the text is too long, was removed or has changed."""
    if corpus.facts.conversations:
        return {"baselines": {}}  # they know no difference between questions and answers
    try:
        return {"baselines": baselines(corpus)}
    except (ValueError, OSError) as error:
        callback.message(f"The baselines are left out: {error}")
        return {"baselines": {}, "no_baselines": str(error)}


def _warn_of_short_text(corpus: Corpus, callback: RunCallback) -> None:
    facts = corpus.facts
    if facts.validation_bytes < SHORT_VALIDATION:
        callback.message(
            f"The text has {facts.train_bytes + facts.validation_bytes:,} bytes and its held-out "
            f"part {facts.validation_bytes:,}: too few for numbers that mean much; some hundred "
            "thousand bytes are a beginning."
        )


def _fit_vocabulary(config: RunConfig, corpus: Corpus) -> RunConfig:
    """Set model.vocabulary to the size of the tokenizer, unless a larger one is given."""
    size = corpus.tokenizer.vocabulary_size
    rows = config.model.vocabulary
    if rows == (config.text.vocabulary or LARGEST_DEFAULT):  # as settings() has it: none is given
        return replace(config, model=replace(config.model, vocabulary=size))
    if rows < size:
        raise ValueError(f"model.vocabulary={rows} is fewer than the tokenizer's {size} ids.")
    return config
