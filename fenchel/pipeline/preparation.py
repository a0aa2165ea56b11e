"""Before a run trains: its text is checked, its steps are timed, its disk space is ensured.

A run records which token files it reads, with the hashes of their text and tokenizer. A resume
opens them again and refuses others; damaged ones are made again from the text, inside the run: the
record of a foreign run cannot name a folder elsewhere that is written to.

The number of steps of a time budget is planned from the time of a step, which is measured on the
model of the run for a twentieth of the budget at most; its initial weights are restored afterwards,
bit for bit. While the run trains, the plan is corrected (fenchel/train/loop.py). A run whose steps
are given is not timed.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fenchel.checkpoints import run_checkpoint
from fenchel.data import Batches, BatchSource, Corpus, Ids, Text, open_text
from fenchel.data.config import vocabulary_for
from fenchel.data.text import Tally
from fenchel.data.token_files import most_files
from fenchel.distributed.cells import (
    CellStepper,
    build_stepper,
    cell_count,
    require_supported,
)
from fenchel.distributed.plan import Cluster, micro_batches, plan
from fenchel.distributed.processes import ALONE, World
from fenchel.files import (
    Damaged,
    read_regular,
    read_sealed_json,
    require_space,
    write_atomic,
)
from fenchel.model import Transformer, training_flops
from fenchel.model.bigram import applies_to, start_from_bigrams
from fenchel.model.lora import add_lora
from fenchel.model.transformer import meta_model
from fenchel.operating_system import SYSTEM
from fenchel.optim import Schedule, build_optimiser, constant
from fenchel.pipeline.config import RunCallback, RunConfig, settings
from fenchel.pipeline.lipschitz import projection
from fenchel.train import RunDir, Stepper, StepTime, seconds, select_device, time_steps
from fenchel.train.hardware import compiler_works, cores, free_memory, memory_of
from fenchel.train.rundir import TOKENS, is_run_name
from fenchel.train.step import autocast, deterministic

EVALUATION_SHARE = 0.04
"""Part of a time budget that is left to evaluations and checkpoints."""
TIMING_SHARE = 0.05
"""Part of a time budget after which no further step is timed."""
SPEED_SECONDS = 4.0
"""Seconds after which ``speed`` times no further step."""
ROOM = 0.8
"""Share of the free memory that the counted memory of a step may take."""
GPU_RATE = 440e12
"""Operations per second of training on an H200, the fastest GPU measured (distributed/plan.py)."""
WORTH_COMPILING = 60.0
"""Seconds of operations at that rate from which compiling gains time."""
WORTH_CAPTURING = 0.25
"""Seconds of operations of a step below which its launches are a part of its time."""


def record_corpus(run: RunDir, corpus: Corpus) -> None:
    """Record in the run which token files it reads, and copy its tokenizer there."""
    inside = corpus.folder.parent == run.path
    folder = corpus.folder.name if inside else str(corpus.folder.resolve())
    record = {"folder": folder, "source": corpus.source, **asdict(corpus.facts)}
    tokenizer = read_regular(corpus.folder / "tokenizer.json", 2**28)
    write_atomic(run.path / "tokenizer.json", tokenizer)
    run.write_json("text.json", record)


def open_corpus(path: Path) -> Corpus:
    """The token files that the run in ``path`` reads, refused if they are of another text."""
    record = _read_record(path)
    corpus = replace(Corpus.open(_tokens(path, record)), source=record["source"])
    for what in ("text_sha256", "tokenizer_sha256"):
        digest = getattr(corpus.facts, what)
        if digest != record[what]:
            raise ValueError(
                f"{corpus.folder} holds token files of another {what.partition('_')[0]} than the "
                f"run began with (SHA-256 {digest[:12]}, was {record[what][:12]})."
            )
    return corpus


def _tokens(path: Path, record: Mapping[str, str]) -> Path:
    """The token files of a run: a folder of its own, or the absolute path of a shared one."""
    folder = Path(record["folder"])
    if not folder.is_absolute() and not is_run_name(record["folder"]):
        raise Damaged(f"{path / 'text.json'} names a folder that is not one of token files.")
    return path / folder


def _read_record(path: Path) -> dict[str, str]:
    record = read_sealed_json(path / "text.json")
    names = ("folder", "source", "text_sha256", "tokenizer_sha256")
    if not all(isinstance(record.get(name), str) for name in names):
        raise Damaged(f"{path / 'text.json'} does not say which text the run reads.")
    return {name: record[name] for name in names}


def reopen_corpus(
    path: Path, callback: RunCallback, prepare_again: Callable[[str, Path], Corpus]
) -> Corpus:
    """The token files of a run; damaged ones are made again, from a source into a folder."""
    record = _read_record(path)
    run_checkpoint.check_tokenizer(path)
    try:
        return open_corpus(path)
    except Damaged as error:
        _require_text(record["source"], _hash_as_recorded(path), record["text_sha256"])
        callback.message(f"{error} The token files are made again.")
        folder = _tokens(path, record)
        if folder.parent != path:  # shared with other runs, which may be reading them
            folder = path / TOKENS
        prepare_again(record["source"], folder)
        return open_corpus(path)


def new_text(corpus: Corpus, callback: RunCallback, accept: bool) -> str | None:
    """The hash of a text that is not the one the run began with, else None, or refused."""
    try:
        if accept:
            messages = corpus.facts.conversations
            now: str | None = open_text(corpus.source, messages=messages).sha256()
        else:
            facts = corpus.facts
            now = _hash(corpus.reopen_text(), facts.train_bytes + facts.validation_bytes)
    except ValueError as error:
        callback.message(f"{error} The run goes on with its own token files.")
        return None
    then = corpus.facts.text_sha256
    if not accept or now is None or now == then:
        _require_text(corpus.source, now, then)
        return None
    callback.message(f"The text has changed from {then[:12]} to {now[:12]}, as accepted.")
    return now


def _hash_as_recorded(path: Path) -> str | None:
    """The hash of the text that text.json of a run names, bounded by the sizes that it records."""
    record = read_sealed_json(path / "text.json")
    sizes = [record.get(name) for name in ("documents", "train_bytes", "validation_bytes")]
    documents, *parts = (size if type(size) is int else 0 for size in sizes)
    messages = type(record.get("validation_answer_bytes")) is int
    text = open_text(record["source"], most=most_files(documents), messages=messages)
    return _hash(text, sum(parts))


def _hash(text: Text, known: int) -> str | None:
    """The SHA-256 of a text; None where it is far longer than ``known`` bytes and was not read."""
    tally = Tally()
    for _ in tally.watch(text.documents()):
        if tally.bytes > 2 * known + 2**20:
            return None
    return tally.sha256()


def _require_text(source: str, now: str | None, then: str) -> None:
    if now != then:
        found = "has more than twice its length now" if now is None else f"is {now[:12]}"
        raise ValueError(
            f"the text {source!r} has changed since the run began (SHA-256 was "
            f"{then[:12]}, {found}); put the old text back, or go on with the new one by "
            "--accept-new-text."
        )


def build_batches(config: RunConfig, ids: Ids) -> Batches:
    """The batches of a run; their order depends on the seed alone."""
    return Batches(ids, batch=config.train.batch, context=config.model.context, seed=config.seed)


def build_model(config: RunConfig) -> Transformer:
    """The model of a run, on the CPU; its initial weights depend on the seed alone."""
    with _one_thread():
        return Transformer(config.model, generator=torch.Generator().manual_seed(config.seed))


def meta_to_train(config: RunConfig) -> Transformer:
    """The model of a run without values, with adapters where the run trains some."""
    model = meta_model(config.model)
    if (lora := config.lora) is not None:
        add_lora(model, **asdict(lora))
    return model


def start_weights(config: RunConfig, model: Transformer, ids: Ids, device: torch.device) -> None:
    """Give a fresh model the embedding and LM head of ``train.init``; ids of the training text.

    The counts are fitted by logits of softmax, and are no start for the loss of another map.
    They are computed on ``device``, that of the run, if it is a GPU by CUDA, else on the CPU.
    """
    train = config.train
    if train.init == "bigram" and train.loss == "cross_entropy" and applies_to(model):
        generator = torch.Generator().manual_seed(config.seed)
        device = device if device.type == "cuda" else torch.device("cpu")
        with _one_thread(), deterministic(device, enabled=train.deterministic):
            start_from_bigrams(model, ids, generator, device)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread: several may add in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def require_memory(config: RunConfig, world: World = ALONE) -> None:
    """Refuse sizes that cannot fit into the memory of the device, before any work is done.

    What is counted is less than what a step needs, so that nothing is refused which would run:
    weights, gradients and one moment of the optimiser, 12 bytes per parameter, and per token and
    layer the inputs of the linear maps, which the backward pass reads, in 2 bytes each; with
    train.recompute the input of every block, and those of one. Of several processes each has its
    cells of the tokens, and its share of weights that are divided. The ids of a batch are on the
    host, as inputs and as targets.
    """
    c, train = config.model, config.train
    # Layers of one size are counted by two small models: there may be absurdly many.
    two_sizes = c.has_delta or c.dense_layers or c.shared_kv_layers
    two_sizes = bool(two_sizes or c.full_head_size or c.full_kv_heads)
    # a pattern is no longer than its layers
    least = max(1, len(c.windows), len(c.layer_choices), len(c.rotary_layers))
    least = c.layers if two_sizes else least
    one, two = (
        sum(p.numel() for p in meta_model(replace(c, layers=n, distinct_layers=None)).parameters())
        for n in (least, least + (not two_sizes))
    )
    parameters = one + (c.block_count - least) * (two - one)
    parts = (train.accumulate or train.batch) if world.size == 1 else 1
    groups = max(1, world.size // train.context_group)
    rows = train.batch // max(parts, train.cells or 1, groups)
    tokens = rows * config.row_length // train.context_group
    parameters //= {"none": 1, "node": world.local_size}.get(train.shard, world.size)
    per_layer = 2 * c.width + c.heads * c.head_width + c.mlp_width
    per_parameter = 12 if config.lora is None else 4
    again = train.recompute != "none"
    kept = c.layers * c.width + per_layer if again else c.layers * per_layer
    needs = per_parameter * parameters + 2 * tokens * kept
    device = select_device(train.device)
    if needs > (there := memory_of(device)):
        less = "or more train.accumulate"
        if not again:
            less = 'more train.accumulate, or train.recompute="block"'
        raise ValueError(
            f"a step needs {amount(needs)} of memory at least, "
            f"{amount(per_parameter * parameters)} for {parameters:,} parameters and the rest for "
            f"{tokens:,} tokens at once, and {device} has {amount(there)}; choose a smaller model "
            f"or batch, {less}."
        )
    ids, host = 16 * train.batch * config.row_length, SYSTEM.memory()
    if ids > host // 2:
        raise ValueError(
            f"train.batch={train.batch} sequences of {config.row_length} tokens need {amount(ids)} "
            f"of memory for their ids alone, and this machine has {amount(host)}; choose a smaller "
            "batch."
        )


def memory(config: RunConfig, model: Transformer, device: torch.device) -> dict[str, int]:
    """Bytes of a step by category, by the formulas of ``fenchel plan`` for one process.

    With adapters, gradients and the optimiser's state are those of the adapters alone.
    """
    narrow = autocast(config.train.precision, device) is not nullcontext
    train = replace(config.train, precision="bfloat16" if narrow else "float32")
    row = replace(config.model, context=config.row_length)
    kind = "cuda" if device.type == "cuda" else "cpu"
    forecasts = plan(row, train, config.optim, Cluster(ranks=1, device=kind)).forecasts
    forecast = forecasts[int(train.recompute != "none")]
    found = {name: int(size) for name, size in forecast.memory.items()}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights = sum(p.nbytes for p in model.parameters())
    adapted = config.lora is not None
    return {
        "weights": weights,
        "gradients": 4 * trained,
        "optimiser": 8 * trained if adapted else found["state"],
        "activations": found["activations"] + found["casts"],
        "logits": found["loss"] - (4 * model.lm_head_weight.numel() if adapted else 0),
    }


def memory_sentence(sizes: Mapping[str, int]) -> str:
    """
    >>> memory_sentence({"weights": 3 * 2**30, "gradients": 5 * 2**20})
    'A step needs about 3.0 GiB of memory: weights 3.0 GiB, gradients 5.0 MiB.'
    """
    parts = ", ".join(f"{name} {amount(size)}" for name, size in sizes.items())
    return f"A step needs about {amount(sum(sizes.values()))} of memory: {parts}."


def amount(size: int) -> str:
    """
    >>> amount(3 * 2**30), amount(5 * 2**20)
    ('3.0 GiB', '5.0 MiB')
    """
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def require_room(model: nn.Module, run: RunDir) -> None:
    """Refuse to train where not even one checkpoint fits: weights, and two moments of each."""
    trained = (p for p in model.parameters() if p.requires_grad)
    weights = sum(p.numel() * p.element_size() for p in trained)
    require_space(run.path, int(1.2 * 3 * weights) + 2**20)


def divide_step(
    config: RunConfig, model: Transformer, device: torch.device, world: World = ALONE
) -> RunConfig:
    """``config`` with as few micro-batches as the free memory has room for, if none are given.

    The fewest where no formula counts the memory of a model (gated DeltaNet). ``model`` is on its
    device, or without values.
    """
    choices = list(micro_batches(config.train, world.size))
    if config.train.accumulate is not None or config.train.cells is not None or not choices:
        return config
    here = 0 if model.lm_head_weight.is_meta else sum(p.nbytes for p in model.parameters())
    room = ROOM * (free_memory(device) + here) / (world.local_size if device.type == "cpu" else 1)
    room = world.on_first(lambda: room)
    for train in choices:
        cells = cell_count(train, world.size)
        one = replace(config, train=replace(train, accumulate=cells, context_group=1))
        if config.model.has_delta or sum(memory(one, model, device).values()) <= room:
            break
    return replace(config, train=train)


def compiles_blocks(config: RunConfig, device: torch.device, steps: int, world: World) -> bool:
    """Whether blocks are compiled: as the settings have it or, where they leave it open, by gain.

    On an H200 compiling takes 3 to 8 s and saves an eighth of the time of GPT-2's steps
    (docs/log.md).
    """
    if config.train.compile is not None:
        return config.train.compile
    if not _is_measured(config, device, world):
        return False
    busy = steps * _busy_seconds(config)
    return busy >= WORTH_COMPILING and compiler_works(device.type)


def captures_steps(config: RunConfig, device: torch.device, world: World) -> bool:
    """Whether steps are CUDA graphs: as the settings have it or, where left open, by gain.

    Only those of one process on a GPU can be.
    """
    train = config.train
    if device.type != "cuda" or in_cells(config, world):
        return False
    if train.cuda_graph is not None:
        return train.cuda_graph
    if train.recompute != "none" or train.precision == "float16" or config.model.sigma_reparam:
        return False
    if config.optim.optimiser == "trust" or not _is_measured(config, device, world):
        return False
    return _busy_seconds(config) < WORTH_CAPTURING


def _busy_seconds(config: RunConfig) -> float:
    """The seconds for which a step keeps the fastest GPU busy."""
    return training_flops(config.model, batch=config.train.batch) / GPU_RATE


def _is_measured(config: RunConfig, device: torch.device, world: World) -> bool:
    """Whether compiling and CUDA graphs were measured on runs of this kind (docs/log.md)."""
    train, model = config.train, config.model
    maps = {model.choice_of(layer) for layer in range(model.layers)}
    other_layers = model.experts or model.has_delta or model.entmax_alpha_learned
    other_maps = not maps <= {"softmax", "entmax", "sparsemax"}
    other_runs = config.tune is not None or in_cells(config, world)
    observed = train.qk_clip is not None or train.entropy_floor > 0.0
    return device.type == "cuda" and not (other_layers or other_maps or other_runs or observed)


def resolve_steps(
    config: RunConfig,
    model: Transformer,
    batches: BatchSource,
    callback: RunCallback,
    world: World = ALONE,
) -> RunConfig:
    """``config`` with its threads, whether it compiles, and the steps planned for a budget."""
    in_parts, steps, pace = in_cells(config, world), config.train.steps, ""
    device, parts = select_device(config.train.device), config.train.accumulate or 1
    captures = captures_steps(config, device, world)
    config = replace(config, train=replace(config.train, cuda_graph=captures))
    if steps is not None:
        threads = config.train.threads or (
            max(1, cores() // world.local_size) if in_parts else torch.get_num_threads()
        )
    else:
        callback.progress("timing steps", 0, 0)
        budget = seconds(config.train.budget or "")
        limit = TIMING_SHARE * budget
        if in_parts:
            time = _time_cells(config, deepcopy(model), batches, world, limit)
        else:
            time = _time_steps(config, model, batches, limit)
        threads = time.threads
        steps = max(1, int(budget * (1.0 - EVALUATION_SHARE) / time.seconds))
        pace = f"{1e3 * time.seconds:.0f} ms per step with "
    parameters = sum(p.numel() for p in model.parameters())
    row = replace(config.model, context=config.row_length)
    operations = training_flops(row, batch=config.train.batch)
    compiles = compiles_blocks(config, device, steps, world)
    callback.message(
        f"{parameters:,} parameters, {1e-9 * operations:.3g} GFLOP per step; {pace}"
        + (f"{world.size} processes, each with " if world.size > 1 else "")
        + f"{threads} thread{'' if threads == 1 else 's'}; {steps:,} "
        f"step{'' if steps == 1 else 's'}"
        + (f" of {parts} micro-batches" if parts > 1 else " as CUDA graphs" if captures else "")
        + (", compiled at the first, which takes some seconds." if compiles else ".")
    )
    callback.step(0, steps)  # the stage that a bar shows from here on
    train = replace(config.train, threads=threads, steps=steps, compile=compiles)
    return replace(config, train=train)


def _time_steps(
    config: RunConfig,
    model: nn.Module,
    batches: BatchSource,
    limit: float = math.inf,
    repeats: int = 3,
) -> StepTime:
    """The time of a step of this run; afterwards ``model`` is as it was, bit for bit."""
    initial = {name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()}
    # before the steps of a time budget are known, any number serves: a step of another size takes
    # the same time
    optimiser = build_optimiser(model, config.optim, steps=config.train.steps or 1000)
    train, project = config.train, projection(model, config.train)
    stepper = Stepper(
        model, batches, optimiser, constant(), config=train, seed=config.seed, project=project
    )
    try:
        threads = config.train.threads
        return time_steps(lambda: stepper(0), threads=threads, repeats=repeats, limit=limit)
    finally:
        optimiser.close()  # its hooks would otherwise stay on the model
        model.load_state_dict(initial)


def in_cells(config: RunConfig, world: World) -> bool:
    """Whether steps are those of fenchel/distributed: several processes, or train.cells."""
    train = config.train
    return world.size > 1 or train.cells is not None or train.context_group > 1


def require_cells(config: RunConfig, world: World) -> None:
    """Refuse settings that these processes cannot train with, before any work is done."""
    if not in_cells(config, world):
        return
    for name in ("lipschitz", "spectral_cap"):
        if getattr(config.train, name) is not None:
            raise ValueError(
                f"train.{name} needs all weights in one process, without train.cells and "
                "train.context_group."
            )
    require_supported(config.train, world, context=config.row_length)
    cell_count(config.train, world.size)
    if config.lora is not None and config.train.shard in ("full", "node"):
        raise ValueError(
            f"train.shard={config.train.shard!r} divides weights that are trained, and with "
            "adapters every process has the checkpoint whole; leave it out."
        )


def build_cells(
    config: RunConfig,
    model: Transformer,
    batches: BatchSource,
    schedule: Schedule,
    world: World,
    *,
    steps: int,
    drawn: Mapping[str, Tensor] | None = None,
) -> CellStepper:
    """The steps of this process together with the others; ``drawn`` as in ``build_stepper``."""
    return build_stepper(
        model,
        meta_to_train(config),
        batches,
        schedule,
        train=config.train,
        optim=config.optim,
        steps=steps,
        seed=config.seed,
        world=world,
        drawn=drawn,
    )


def _time_cells(
    config: RunConfig, model: Transformer, batches: BatchSource, world: World, limit: float
) -> StepTime:
    """The time of a step of all processes, on a model of its own, as rank 0 measures it."""
    threads = config.train.threads or max(1, cores() // world.local_size)
    without_values = model.embed.weight.is_meta
    steps = config.train.steps or 1000
    stepper = build_cells(config, model, batches, constant(), world, steps=steps)
    if without_values:  # any that are finite take as long
        with torch.no_grad():
            for x in stepper.owners.owned_tensors.values():
                x.normal_(0.0, 0.02, generator=torch.Generator(x.device).manual_seed(0))
        stepper.owners.spread()
    step = partial(stepper, 0)
    pace = world.share(time_steps(step, threads=threads, repeats=1).seconds)
    if 6 * pace < limit:  # all processes take the same steps, so that none decides for itself
        pace = world.share(time_steps(step, threads=threads).seconds)
    stepper.optimiser.close()
    return StepTime(threads, pace)


def speed() -> tuple[StepTime, int]:
    """The step time of the default run on random tokens, and the tokens of one of its steps.

    Of one step per thread count after the first: a report is read at once, and plans nothing.
    """
    # The vocabulary of the built-in text, which has 8 MB.
    config = settings({"model": {"vocabulary": vocabulary_for(8 * 10**6)}})
    size = config.train.batch * config.model.context
    ids = np.random.default_rng(0).integers(config.model.vocabulary, size=2 * size)
    model = build_model(config).to(select_device(config.train.device))
    return _time_steps(config, model, build_batches(config, ids), SPEED_SECONDS, repeats=1), size
