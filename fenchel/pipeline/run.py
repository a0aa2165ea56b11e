"""``begin`` starts a run, ``tune`` one from a checkpoint, ``resume`` continues either.

All end in ``train_and_report``. What differs between training and tuning is in the ``Task``
(task.py, tuning.py). ``start_run`` is what ``fenchel train`` and ``fenchel tune`` call: it also
connects the processes that torchrun has started.

A directory becomes a run when its settings are written, after everything that can be refused has
been checked: a run that cannot begin leaves nothing behind, and one that is killed before leaves a
folder that ``begin`` takes over. The summary is written last, after the sample and the page: a run
whose summary says that it is finished has both of the last step.

Several processes run these functions together (``world``). Rank 0 alone locks and writes the run
directory, prepares the text and writes the report; ``World.on_first`` gives the others its result.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fenchel.checkpoints import Progress, load_model, run_checkpoint
from fenchel.checkpoints.run_checkpoint import Weights
from fenchel.checkpoints.tokenizer import read_tokenizer
from fenchel.choice import Choice
from fenchel.config import to_mapping
from fenchel.data import Corpus
from fenchel.data.text import BUILT_IN
from fenchel.distributed.cells import CellStepper
from fenchel.distributed.checkpoint import DistributedLoop
from fenchel.distributed.processes import (
    ALONE,
    FailedElsewhere,
    ProcessMissing,
    World,
    lost_process,
    start,
)
from fenchel.evaluate import (
    EvaluationText,
    bzip2_bits,
    fingerprint,
    ngram_bits,
)
from fenchel.evaluate.text import SeparateDocuments
from fenchel.files import (
    Busy,
    Damaged,
    NoSpace,
    StorageFailed,
    describe,
    locked,
    read_sealed_json,
)
from fenchel.model.lora import AdapterWeights
from fenchel.optim import build_beta2, build_optimiser, build_schedule
from fenchel.optim.config import peak_score_rate
from fenchel.pipeline.config import (
    RunCallback,
    RunConfig,
    change_settings,
    changed_settings,
    comments,
    new_run_path,
    section,
    settings,
)
from fenchel.pipeline.lipschitz import measure_constant, projection
from fenchel.pipeline.preparation import (
    build_cells,
    in_cells,
    open_corpus,
    record_corpus,
    require_room,
    resolve_steps,
)
from fenchel.pipeline.task import Task
from fenchel.pipeline.tuning import Source, TuneTask, pack_documents, tune_settings
from fenchel.report import page
from fenchel.train import (
    CallbackList,
    Loop,
    Outcome,
    RunDir,
    Stepper,
    TensorBoard,
    TrainConfig,
    environment,
    explain_out_of_memory,
    named_loss,
    retain_freed_memory,
    seconds,
)
from fenchel.train.loop import newest_checkpoint
from fenchel.train.rundir import plain_json

BASELINE_BYTES = 64 * 2**20
"""A longer text than this would need too large a table; its baselines are left out."""


def start_run(
    mapping: Mapping[str, Any],
    callback: RunCallback,
    *,
    out: Path | None = None,
    checkpoint: Path | None = None,
    template: str | None = None,
    resume_from: Path | None = None,
    accept_new_text: bool = False,
) -> tuple[Path, Outcome | None]:
    """Begin, tune or resume a run, together with the processes that torchrun has started.

    ``mapping`` are settings: of a run that is resumed those that change. Without ``out`` a new run
    is in the folder runs. Returns the run directory and how the run ended; None where another
    process has printed why it failed: the first process that fails raises and so prints its
    sentence, and the others end in silence.
    """
    retain_freed_memory()
    world, path, config, train = ALONE, resume_from or out or Path(), None, {}
    try:
        if resume_from is not None:
            train = RunDir(resume_from).read_settings().get("train", {})
        elif checkpoint is None:  # settings are refused before anything else
            if "tune" in mapping:
                raise ValueError("the section tune belongs to fenchel tune DIR.")
            config = settings(mapping)
        train = {**train, **section(mapping, "train")}
        wait = train.get("timeout", TrainConfig.timeout)
        world = start(str(train.get("device", "auto")), seconds=float(wait))
        begun = None if resume_from else world.on_first(world.recorded_run)
        if begun is not None:  # by an attempt before this one, which torchrun has started again
            path = out = Path(begun)
            if world.on_first((path / "config.toml").exists):
                resume_from, mapping = path, {}
        if resume_from is not None:
            return path, resume(
                path, callback, changes=mapping, accept_new_text=accept_new_text, world=world
            )
        text = mapping["text"]["source"] if config is None else config.text.source
        path = Path(world.on_first(lambda: str(out or new_run_path(Path("runs"), str(text)))))
        if world.first:
            reads = [one for one in (text, checkpoint, template) if one not in (*BUILT_IN, "plain")]
            RunDir(path).require_free(reads)
        if config is not None:
            return path, begin(config, path, callback, world)
        assert checkpoint is not None
        return path, tune(checkpoint, mapping, path, callback, world, template=template)
    except FailedElsewhere:
        return path, None
    except Exception as error:
        alone = world is ALONE
        if alone and (os.environ.get("RANK", "0") == "0" or isinstance(error, ProcessMissing)):
            raise
        if alone or not world.fails_first():
            return path, None
        if lost_process(error):
            raise ValueError(
                "a process of this run has ended or does not answer; what was saved is whole, go "
                f"on with --resume {path}."
            ) from error
        raise
    finally:
        world.close()


def begin(config: RunConfig, path: Path, callback: RunCallback, world: World = ALONE) -> Outcome:
    """Start a run in ``path``: text to tokens, a fresh model, training, the report."""
    if config.tune is not None:
        raise ValueError("the section tune belongs to fenchel tune DIR.")
    return _begin(Task(config, path, callback, world))


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
    if world.first:
        RunDir(path).require_free()  # before the checkpoint is read, which may take a while
    callback.progress("reading the checkpoint", 0, 0)
    source = Source(checkpoint, load_model(checkpoint), mapping, template)
    config = tune_settings(mapping, checkpoint, source.model.config)
    task = TuneTask(config, path, callback, world)
    task.source = source
    del source  # the task frees the weights once it has copied them
    return _begin(task)


def _begin(task: Task) -> Outcome:
    run, world = task.run, task.world
    new = world.first and run.create()
    with _storage_errors(run), locked(run.path) if world.first else nullcontext():
        try:
            world.on_first(run.claim)
            task.corpus = _corpus_of_first(task.prepare_text, world)
            task.fit_to_text()
            task.batches = task.training_batches()
            recompute = task.config.train.recompute
            with explain_out_of_memory("nothing was begun", recompute=recompute):
                task.build_model(begun=False)
                timed = task.config.train
                task.config = resolve_steps(
                    task.config, task.model, task.batches, task.callback, world
                )
            if (note := task.repetition()) is not None:
                task.callback.message(note)
            if world.first:  # everything that can be refused has been checked
                require_room(task.model, run)
                record_corpus(run, task.corpus)
                world.record_run(str(run.path))
                run.write_settings(to_mapping(task.config), comments())
        except BaseException:
            if new:
                run.abandon()
            raise
        budget = None if timed.steps is not None else seconds(timed.budget or "")
        return train_and_report(task, budget)


def resume(
    path: Path,
    callback: RunCallback,
    *,
    changes: Mapping[str, Any],
    accept_new_text: bool = False,
    world: World = ALONE,
) -> Outcome:
    """Continue the run in ``path`` from its newest intact checkpoint."""
    run = RunDir(path)
    with _storage_errors(run):
        before = world.on_first(run.read_settings)
        run.require_plain()
    with _storage_errors(run), locked(path) if world.first else nullcontext():
        config = change_settings(before, changes, callback)
        task = (Task if config.tune is None else TuneTask)(config, path, callback, world)
        reopen = partial(task.reopen_text, accept_new=accept_new_text)
        task.corpus = _corpus_of_first(reopen, world)
        if world.first and config != settings(before):
            run.write_settings(to_mapping(config), comments())
        task.batches = task.training_batches()
        task.build_model(begun=_has_checkpoint(task))
        return train_and_report(task)


def _has_checkpoint(task: Task) -> bool:
    return task.world.on_first(lambda: bool(run_checkpoint.folders(task.run.checkpoints)))


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


def train_and_report(task: Task, budget: float | None = None) -> Outcome:
    """Take the remaining steps of the run, evaluate the model, write the report.

    ``budget`` is the time in seconds from which the steps of a run that begins were planned.
    """
    config, run, world = task.config, task.run, task.world
    steps = config.train.steps
    if steps is None:
        raise ValueError(f"{run.path / 'config.toml'} does not say train.steps; give --steps.")
    torch.set_num_threads(config.train.threads or torch.get_num_threads())
    stepper, weights = _build_stepper(task, steps)
    progress = _restore(task, weights, stepper)
    if progress.step >= steps:
        task.callback.message(
            f"{run.path} is already finished: {progress.step:,} of {steps:,} steps."
        )
        if world.on_first(lambda: _is_complete(run, progress.step)):
            return Outcome("finished", progress)
    if world.first:
        _record_environment(task, progress)
    run.write_status(progress.step, steps)
    if not progress.step:
        task.measure_first()
    names = config.train.log if world.first else ()
    loggers = [TensorBoard(run.path / name, step=progress.step) for name in names]
    loop = (DistributedLoop if isinstance(stepper, CellStepper) else Loop)(
        stepper,
        steps=steps,
        run=run,
        settings=to_mapping(config.model),
        validate=partial(task.validate, limit=config.train.evaluate_tokens),
        probe=task.probe,
        callback=CallbackList(task.callback, *loggers),
        progress=progress,
        weights=weights,
        budget=budget,
        replan=partial(_replan, task, stepper),
        constrain=task.constraint(),
    )
    with _explain_failure(run, config.train.recompute):
        outcome = loop.train()
        _report(task, outcome)
    return outcome


def _replan(task: Task, stepper: Stepper, steps: int) -> None:
    """The rest of the run as that of one of ``steps`` steps, which its settings record."""
    optim = task.config.optim
    task.config = replace(task.config, train=replace(task.config.train, steps=steps))
    stepper.schedule = build_schedule(optim, steps)
    if optim.optimiser == "score":
        for group in stepper.optimiser.param_groups:
            if "opening" in group:  # of ScoreDescent, whose rate follows from the steps
                group["initial_lr"] = peak_score_rate(optim, steps)
    if task.world.first:
        task.run.write_settings(to_mapping(task.config), comments())


def _build_stepper(task: Task, steps: int) -> tuple[Stepper, Weights]:
    """The steps, and the weights that a checkpoint holds."""
    config, schedule = task.config, build_schedule(task.config.optim, steps)
    if in_cells(config, task.world):
        drawn: dict[str, Tensor] = {}
        fresh = task.divided and not _has_checkpoint(task)
        if fresh:  # all of the first weights on rank 0, none on the others
            task.world.on_first(lambda: drawn.update(task.first_model().state_dict()))
        first = drawn if fresh else None
        stepper = build_cells(
            config, task.model, task.batches, schedule, task.world, steps=steps, drawn=first
        )
        return stepper, stepper.owners
    optimiser = build_optimiser(task.model, config.optim, steps=steps)
    train, beta2 = config.train, build_beta2(config.optim)
    if (project := projection(task.model, train)) is not None:
        project()  # the first weights
    return Stepper(
        task.model,
        task.batches,
        optimiser,
        schedule,
        config=train,
        seed=config.seed,
        beta2=beta2,
        project=project,
    ), task.model if config.lora is None else AdapterWeights(task.model)


def _report(task: Task, outcome: Outcome) -> None:
    """Measure the model that was trained and write sample, page and summary."""
    config, run, model, callback = task.config, task.run, task.model, task.callback
    summary: dict[str, Any] = {
        "status": outcome.status,
        "reason": outcome.reason,
        "steps": config.train.steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "defaults": changed_settings(config),
    }
    if config.lora is not None:
        summary["trained"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    summary |= {"text": asdict(task.corpus.facts), **asdict(outcome.progress)}
    if outcome.status == "finished":
        limit = task.last_limit
        part = "all" if limit is None else f"the first {limit:,} tokens"
        callback.progress(f"reading {part} of the validation text", 0, 0)
        summary["validation"] = task.validate(model, limit, last=True)
        if limit is not None:
            summary["validation_limit"] = limit
    if not task.world.first:
        return
    if task.divided and outcome.status != "diverged":
        model = load_model(run.path, which="newest").to(task.device)
    if outcome.status == "finished":
        callback.progress("computing the baselines", 0, 0)
        summary |= _baselines(task.corpus, callback)
        summary |= task.comparison(model)
        if config.train.lipschitz is not None:
            callback.progress("attacking the Lipschitz constant", 0, 0)
            found = measure_constant(model, task.corpus.validation, config.train.lipschitz)
            summary["lipschitz"] = found
            callback.message(
                f"No logit moves more than {found['certified']:.4g} times the largest move of a "
                f"token embedding (certified); an attack found {found['attacked']:.4g} times."
            )
    if outcome.status != "diverged":
        run.write_json("sample.json", task.sample(model))
    page(run.path, plain_json(summary))
    run.write_json("summary.json", summary)


def _restore(task: Task, weights: Weights, stepper: Stepper) -> Progress:
    """Load the newest intact checkpoint into the model, and remove metrics past it."""
    run, callback = task.run, task.callback
    damaged: dict[Path, str] = {}

    def choose() -> str | None:
        folder, wrong = _choose_checkpoint(run, callback)
        damaged.update(wrong)
        return None if folder is None else str(folder)

    chosen = task.world.on_first(choose)
    if chosen is None:
        return Progress()
    folder, model = Path(chosen), to_mapping(task.config.model)
    progress = run_checkpoint.restore(folder, weights, stepper.optimiser, model)
    if task.world.first:
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


def _record_environment(task: Task, progress: Progress) -> None:
    """Record what the bits depend on, and report what has changed since the last process."""
    run, callback = task.run, task.callback
    now = {**environment(task.device), "processes": task.world.size}
    try:
        before = read_sealed_json(run.path / "environment.json") if progress.step else now
    except Damaged as error:
        callback.message(f"{error} It is written anew.")
        before = now
    before = {"processes": 1, **before}
    processes = ("processes",) if task.config.train.cells is None else ()
    for what in ("torch", "device", *processes):
        if before.get(what) != now[what]:
            callback.message(
                f"{what} was {before.get(what)} and is {now[what]}: "
                "the run goes on, no longer bit for bit as begun."
            )
    run.write_json("environment.json", now)


def own_text(directory: Path, split: str = "validation") -> EvaluationText:
    """The "validation" or the "train" part of the text of a run, for ``evaluate_text``."""
    if not (directory / "text.json").is_file():
        raise ValueError(f"{directory} has no text; name one with --text.")
    corpus, held_out = open_corpus(directory), split != "train"
    ids = corpus.validation if held_out else corpus.train
    text = EvaluationText(
        f"{split} text of {directory}",
        corpus.predicted_bytes(validation=held_out),
        partial(corpus.documents, validation=held_out),
        ids,
        fingerprint(read_tokenizer(directory)),
    )
    if corpus.documents_of is None:
        return text
    pack = partial(pack_documents, settings(RunDir(directory).read_settings()), corpus)
    documents = corpus.documents_of[held_out]
    return text._replace(ids=SeparateDocuments(documents, pack, corpus.facts.conversations))


def prediction_map(directory: Path) -> Choice | None:
    """The map whose weights are the predictions of a run; None for a softmax."""
    if not run_checkpoint.is_run(directory):
        return None
    train = RunDir(directory).read_settings().get("train", {})
    alpha = train.get("loss_alpha", TrainConfig.loss_alpha)
    return named_loss(train.get("loss", TrainConfig.loss), alpha=alpha)


def baselines(corpus: Corpus) -> dict[str, float]:
    """Bits per byte without a model: bzip2 of the whole text, a table of n-grams."""
    if corpus.facts.train_bytes > BASELINE_BYTES:
        raise ValueError(
            f"the training text has {corpus.facts.train_bytes / 2**20:,.0f} MiB, and a table of "
            f"n-grams is made of {BASELINE_BYTES // 2**20} MiB at most."
        )
    train, test = (corpus.text(validation=held_out) for held_out in (False, True))  # checks it
    table = ngram_bits(train, test, order=5)
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
