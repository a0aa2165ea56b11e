"""A run that tunes a checkpoint: its settings, its files, its documents and its first weights.

    checkpoint -> base/ (tokenizer, templates) -> documents -> packed rows -> the steps of a run

Everything after the first step is that of a run from the start (run.py). What differs is here:

- **The model** is the checkpoint's, in float32; only dropout may be set anew. With ``tune.rank``
  it is frozen, adapters are trained beside it (model/lora.py), and checkpoints hold these alone.
- **The files** beside its weights are copied to the folder base, sealed, so that the run is
  complete without the checkpoint: how a text begins and ends, the chat template, generation
  settings. They are written again when the run is exported.
- **Rows** of ``tune.context`` positions hold whole documents side by side (data/packing.py).
- **Steps.** Where neither steps nor a time is given, ``tune.epochs`` passes over the documents; the
  batch has ``ROWS`` rows, or fewer, so that an epoch has ``EPOCH_STEPS`` steps.

Until its first checkpoint is written, and always with adapters, a run that is resumed reads the
checkpoint again, and refuses one whose weights are not those that it began with
(checkpoints/tuned_run.py).
"""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fenchel.checkpoints import load_model, tuned_run
from fenchel.checkpoints.directory import TOKENIZER
from fenchel.checkpoints.load import build
from fenchel.checkpoints.run_checkpoint import BASE, model_files
from fenchel.checkpoints.tokenizer import (
    CHAT_TEMPLATE,
    COPIED,
    document_end,
    read_chat_template,
    read_files,
    read_tokenizer,
)
from fenchel.checkpoints.tuned_run import TunedCheckpoint, weights_sha256
from fenchel.config import to_mapping
from fenchel.data import (
    ChatTemplate,
    Corpus,
    DocumentEncoder,
    DocumentIds,
    PackedBatches,
)
from fenchel.data.chat import PLAIN_WITH_END
from fenchel.distributed.plan import Cluster, plan
from fenchel.distributed.processes import ALONE, World
from fenchel.evaluate import attention_health, outcomes, summarise
from fenchel.evaluate.attention import attention_sensitivity
from fenchel.evaluate.calibration import Outcomes
from fenchel.evaluate.score import document_predictions
from fenchel.files import Damaged
from fenchel.model import ModelConfig, Transformer
from fenchel.model.families.config_reader import CONFIG
from fenchel.model.lora import add_lora
from fenchel.pipeline.config import RunCallback, RunConfig, settings
from fenchel.train import RunDir
from fenchel.train.step import autocast

ROWS, EPOCH_STEPS = 8, 8
"""Rows of a batch, and the fewest steps of an epoch, where train.batch is not given."""
LONGEST_ROW = 1024
"""Positions per row of a model with a longer context, where tune.context is not given."""
EVALUATED_ROWS = 8
"""Rows per pass of an evaluation."""
MEASURED = 256
"""Tokens on which attention is measured before and after."""
DROPOUT = ("dropout", "attention_dropout", "mlp_dropout")
"""Settings of the model that tuning may change."""


def tune_settings(mapping: Mapping[str, Any], checkpoint: Path, model: ModelConfig) -> RunConfig:
    """The settings of a run that tunes ``checkpoint``, whose model has settings ``model``.

    Defaults are those of fine-tuning (docs/tune.md); ``mapping`` overrides them.
    """
    sections = {name: dict(_section(mapping, name)) for name in ("model", "optim", "train", "tune")}
    for name in sections["model"]:
        if name not in DROPOUT:
            raise ValueError(
                f"model.{name} is the checkpoint's; tuning may change model.{', '.join(DROPOUT)}."
            )
    if "preset" in mapping:
        raise ValueError("a preset is the shape of a new model; leave out preset.")
    if "checkpoint" in sections["tune"]:
        raise ValueError("tune.checkpoint is DIR of fenchel tune DIR; leave it out of --set.")
    if model.kind != "decoder":
        raise ValueError(
            f"{checkpoint} is an {model.kind}, which does not predict the next token of a text; "
            "fenchel tune continues decoders."
        )
    if sections["train"].get("loss", "cross_entropy") != "cross_entropy":
        raise ValueError("tuning trains by cross-entropy; leave out train.loss.")
    adapted = "rank" in sections["tune"]
    rule = sections["optim"].setdefault("optimiser", "adamw" if adapted else "trust")
    rates = _ADAPTERS if adapted else _RULES.get(rule, {})
    sections["optim"] = {**_SCHEDULE, **rates, **sections["optim"]}
    if "steps" not in sections["train"] and "budget" not in sections["train"]:
        sections["train"]["steps"] = 1  # until the rows are counted
    sections["train"].setdefault("batch", ROWS)
    sections["model"] = to_mapping(model) | sections["model"]
    sections["tune"]["checkpoint"] = str(checkpoint.resolve())
    return settings({**mapping, **sections})


_SCHEDULE = {"schedule": "linear", "warmup": 0.1, "weight_decay": 0.0}
_RULES: dict[str, dict[str, Any]] = {
    "trust": {"output_change": 0.02},
    "adamw": {"learning_rate": 2e-5},
}
"""Defaults of the optimiser for fine-tuning, by rule; docs/tune.md says why."""
_ADAPTERS = {"learning_rate": 2e-4}


def _section(mapping: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = mapping.get(name, {})
    if not isinstance(section, Mapping):
        raise ValueError(f"{name}={section!r} should be a section, with settings in it.")
    return section


def write_base(
    run: RunDir,
    model: Transformer,
    config: RunConfig,
    checkpoint: Path,
    *,
    conversations: bool,
    template: str | None,
) -> DocumentEncoder:
    """Copy the files beside the weights into the run; returns how they read documents.

    ``checkpoint`` is the directory as the user gave it. ``template`` replaces the chat template:
    "plain" or the name of a file. Errors of the template name what the user gave.
    """
    assert config.tune is not None
    name = f"the chat template of {checkpoint}"
    if template is not None and not conversations:
        raise ValueError("--template writes conversations, and the text has none; leave it out.")
    source = model_files(checkpoint)
    files = read_files(source, (CONFIG, *COPIED))
    tokenizer = read_tokenizer(checkpoint, model.config.vocabulary)
    if CONFIG not in files:  # a run of ours: its beginning of a text is written down here
        files[TOKENIZER] = tokenizer.to_str(pretty=True).encode()
    if conversations:
        chat = read_chat_template(checkpoint, template)
        if chat is None:
            raise ValueError(
                f"{checkpoint} has no chat template, and the text holds conversations; give "
                "--template plain, or a file with a template."
            )
        if template is not None:
            text = PLAIN_WITH_END if template == "plain" else chat.source
            files[CHAT_TEMPLATE], name = text.encode(), chat.name
    record = TunedCheckpoint(
        checkpoint.resolve(), weights_sha256(model), conversations, config.tune.lora
    )
    tuned_run.write_base(run.path, record, files)
    return read_encoder(run.path, name)


def read_encoder(run: Path, template_name: str | None = None) -> DocumentEncoder:
    """How a run that tunes a checkpoint reads documents, from its folder base.

    ``template_name`` is what messages call its chat template; that of the run by default.
    """
    tokenizer, template = read_tokenizer(run), None
    if _base(run).conversations:
        template = read_chat_template(run)
        if template is None:
            raise Damaged(f"{run / BASE} has no chat template.")
        if template_name is not None:
            template = ChatTemplate(template.source, template.special_tokens, template_name)
    return DocumentEncoder(tokenizer, end=document_end(run, tokenizer), template=template)


def _base(run: Path) -> TunedCheckpoint:
    if (base := tuned_run.read_base(run)) is None:
        raise Damaged(f"{run} has lost its folder {BASE}.")
    return base


def first_model(config: RunConfig, run: Path) -> Transformer:
    """The model of a run at its first step, from the checkpoint that the run tunes."""
    base = _base(run)
    model = load_model(base.path)
    base.require_same(model)
    return trainable(model, config)


def trainable(model: Transformer, config: RunConfig) -> Transformer:
    """A loaded model in float32, off the pages of its file, with the dropout of the settings.

    With adapters it is frozen, and they are drawn from the seed.
    """
    assert config.tune is not None
    weights = {name: w.to(torch.float32, copy=True) for name, w in model.state_dict().items()}
    files, model = model.source_files, build(config.model, weights)
    model.source_files = files
    if (lora := config.tune.lora) is not None:
        add_lora(model, **asdict(lora), generator=torch.Generator().manual_seed(config.seed))
    return model


def row_length(config: RunConfig) -> int:
    """Positions per row: T."""
    context = config.model.context
    if config.tune is None:
        return context
    return config.tune.context or min(context, LONGEST_ROW)


def document_batches(config: RunConfig, corpus: Corpus, *, validation: bool) -> PackedBatches:
    """The documents of one stream, packed."""
    assert corpus.documents_of is not None
    batch = EVALUATED_ROWS if validation else config.train.batch
    return pack_documents(config, corpus, corpus.documents_of[validation], batch=batch)


def pack_documents(
    config: RunConfig,
    corpus: Corpus,
    documents: DocumentIds,
    *,
    batch: int = EVALUATED_ROWS,
    context: int | None = None,
) -> PackedBatches:
    """Some documents of the text, packed into rows of ``context`` positions, or of the run's."""
    tokenizer, conversations = corpus.tokenizer, corpus.facts.conversations
    return PackedBatches(
        documents,
        batch=batch,
        context=context or row_length(config),
        seed=config.seed,
        begin=tokenizer.begin_ids,
        pad=tokenizer.pad_id if tokenizer.has_end else 0,
        divide=not conversations,
    )


def measure(config: RunConfig, model: Transformer, corpus: Corpus) -> dict[str, Any]:
    """What the report compares before and after tuning, as plain values.

    Loss, accuracy and calibration on all of the held-out text; per layer the health and the
    sensitivity of attention on the first ``MEASURED`` tokens of its longest document.
    """
    documents = document_batches(config, corpus, validation=True)
    parts = [
        Outcomes(*(x.cpu() for x in outcomes(*pair)))
        for pair in document_predictions(model, documents)
    ]
    columns = (torch.cat(column) for column in zip(*parts, strict=True))
    found = summarise(Outcomes(*columns))
    bits = found.loss * (documents.targets + documents.cut_off) / math.log(2.0)
    row = documents.rows[0]  # packing begins with the longest
    assert row.segments is not None
    ids = row.inputs[row.segments == 0][:MEASURED].to(model.lm_head_weight.device)[None]
    health = attention_health(model, ids)
    return {
        "loss": found.loss,
        "perplexity": math.exp(min(found.loss, 700.0)),
        "bits_per_byte": bits / corpus.facts.predicted_bytes,
        "accuracy": found.accuracy,
        "confidence": found.confidence,
        "ece": found.ece,
        "brier": found.brier,
        "tokens": found.predictions,
        "attention": {
            name: health[f"attention/{name}"] for name in ("entropy", "effective", "max_logit")
        },
        "sensitivity": attention_sensitivity(model, ids),
    }


def count_steps(
    config: RunConfig,
    mapping: Mapping[str, Any],
    corpus: Corpus,
    callback: RunCallback,
    world: World = ALONE,
) -> RunConfig:
    """``config`` with the batch and the steps that follow from the number of rows."""
    assert config.tune is not None
    given, train = _section(mapping, "train"), config.train
    batches = document_batches(config, corpus, validation=False)
    rows = len(batches.rows)
    if "batch" not in given:
        batch = max(1, min(ROWS, rows // EPOCH_STEPS))
        groups = max(1, world.size // train.context_group)
        parts = train.cells or math.lcm(train.accumulate, groups)
        train = replace(train, batch=max(parts, batch - batch % parts))
    if "steps" not in given and "budget" not in given:
        train = replace(train, steps=max(1, math.ceil(config.tune.epochs * rows / train.batch)))
    documents = "conversation" if corpus.facts.conversations else "document"
    callback.message(
        f"{_count(corpus.facts.train_documents or 0, documents)} to train on, in "
        f"{_count(rows, 'row')} of {batches.context:,} positions; "
        f"{_count(batches.targets, 'token')} to predict, {_count(train.batch, 'row')} per step."
    )
    if batches.cut_off:
        callback.message(
            f"{_count(batches.cut_off, 'token')} of answers are beyond {batches.context:,} "
            "positions and are left out; a larger tune.context has room for more."
        )
    return replace(config, train=train)


def memory(config: RunConfig, model: Transformer) -> dict[str, int]:
    """Bytes of a step by category, by the formulas of ``fenchel plan`` for one process.

    With adapters, gradients and the optimiser's state are those of the adapters alone.
    """
    device = model.lm_head_weight.device
    narrow = autocast(config.train.precision, device) is not nullcontext
    train = replace(config.train, precision="bfloat16" if narrow else "float32")
    row = replace(config.model, context=row_length(config))
    kind = "cuda" if device.type == "cuda" else "cpu"
    forecasts = plan(row, train, config.optim, Cluster(ranks=1, device=kind)).forecasts
    forecast = forecasts[int(train.recompute != "none")]
    found = {name: int(size) for name, size in forecast.memory.items()}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights = sum(p.nbytes for p in model.parameters())
    adapted = config.tune is not None and config.tune.rank is not None
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


def _count(number: int, noun: str) -> str:
    """
    >>> _count(1, "row"), _count(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
