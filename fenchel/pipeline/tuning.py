"""A run that tunes a checkpoint: its settings, its files, its documents and its first weights.

    checkpoint -> base/ (tokenizer, templates) -> documents -> packed rows -> the steps of a run

Everything after the first step is that of a run from the start (run.py). What differs is here:

- **The model** is the checkpoint's, in float32; only dropout may be set anew.
- **The files** beside its weights are copied to the folder base, sealed, so that the run is
  complete without the checkpoint: how a text begins and ends, the chat template, generation
  settings. They are written again when the run is exported.
- **Rows** of ``tune.context`` positions hold whole documents side by side (data/packing.py).
- **Steps.** Where neither steps nor a time is given, ``tune.epochs`` passes over the documents; the
  batch has ``ROWS`` rows, or fewer, so that an epoch has ``EPOCH_STEPS`` steps.

Until its first checkpoint is written, a run that is resumed reads the checkpoint again, and refuses
one whose weights are not those that it began with (SHA-256 in the manifest of base).
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fenchel.checkpoints import load_model
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
from fenchel.config import to_mapping
from fenchel.data import Corpus, DocumentEncoder, PackedBatches, begin_ids, has_end, pad_id
from fenchel.files import Damaged, committed, discard, read_manifest
from fenchel.model import ModelConfig, Transformer
from fenchel.model.families.config_reader import CONFIG
from fenchel.pipeline.config import RunCallback, RunConfig, settings
from fenchel.train import RunDir

ROWS, EPOCH_STEPS = 8, 8
"""Rows of a batch, and the fewest steps of an epoch, where train.batch is not given."""
LONGEST_ROW = 1024
"""Positions per row of a model with a longer context, where tune.context is not given."""
EVALUATED_ROWS = 8
"""Rows per pass of an evaluation."""
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
    rule = sections["optim"].setdefault("optimiser", "trust")
    sections["optim"] = {**_SCHEDULE, **_RULES.get(rule, {}), **sections["optim"]}
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


def _section(mapping: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = mapping.get(name, {})
    if not isinstance(section, Mapping):
        raise ValueError(f"{name}={section!r} should be a section, with settings in it.")
    return section


def write_base(
    run: RunDir, checkpoint: Path, model: Transformer, *, conversations: bool, template: str | None
) -> DocumentEncoder:
    """Copy the files beside the weights into the run; returns how they read documents.

    ``template`` replaces the chat template: "plain" or the name of a file.
    """
    if template is not None and not conversations:
        raise ValueError("--template writes conversations, and the text has none; leave it out.")
    source = model_files(checkpoint)
    files = read_files(source, (CONFIG, *COPIED))
    tokenizer = read_tokenizer(checkpoint, model.config.vocabulary)
    if CONFIG not in files:  # a run of ours: its beginning of a text is written down here
        files[TOKENIZER] = str(tokenizer.to_str(pretty=True)).encode()
    if conversations:
        chat = read_chat_template(checkpoint, template)
        if chat is None:
            raise ValueError(
                f"{checkpoint} has no chat template, and the text holds conversations; give "
                "--template plain, or a file with a template."
            )
        if template is not None:
            files[CHAT_TEMPLATE] = chat.source.encode()
    header = {
        "kind": BASE,
        "checkpoint": str(checkpoint.resolve()),
        "weights": weights_sha256(model),
        "conversations": conversations,
    }
    if (run.path / BASE).exists():  # of a start that was killed
        discard(run.path / BASE)
    with committed(run.path / BASE, header) as folder:
        for name, content in files.items():
            (folder / name).write_bytes(content)
    return read_encoder(run.path)


def read_encoder(run: Path) -> DocumentEncoder:
    """How a run that tunes a checkpoint reads documents, from its folder base."""
    tokenizer = read_tokenizer(run)
    template = None
    if _base_record(run)["conversations"]:
        template = read_chat_template(run)
        if template is None:
            raise Damaged(f"{run / BASE} has no chat template.")
    return DocumentEncoder(tokenizer, end=document_end(run, tokenizer), template=template)


def _base_record(run: Path) -> dict[str, Any]:
    record = read_manifest(run / BASE)
    expected = {"checkpoint": str, "weights": str, "conversations": bool}
    if not all(isinstance(record.get(name), kind) for name, kind in expected.items()):
        raise Damaged(f"{run / BASE} does not say which checkpoint the run tunes.")
    return record


def weights_sha256(model: Transformer) -> str:
    """The SHA-256 of the names, dtypes, shapes and bytes of all weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def first_model(config: RunConfig, run: Path) -> Transformer:
    """The model of a run at its first step, from the checkpoint that the run tunes."""
    assert config.tune is not None
    model = load_model(config.tune.checkpoint)
    if weights_sha256(model) != _base_record(run)["weights"]:
        raise ValueError(
            f"{config.tune.checkpoint} has other weights than when the run began, which has no "
            "checkpoint of its own yet; put the old ones back, or start a new run."
        )
    return trainable(model, config.model)


def trainable(model: Transformer, config: ModelConfig) -> Transformer:
    """A loaded model in float32, off the pages of its file, with the dropout of ``config``."""
    weights = model.state_dict()
    return build(config, {name: w.to(torch.float32, copy=True) for name, w in weights.items()})


def row_length(config: RunConfig) -> int:
    """Positions per row: T."""
    context = config.model.context
    if config.tune is None:
        return context
    return config.tune.context or min(context, LONGEST_ROW)


def document_batches(config: RunConfig, corpus: Corpus, *, validation: bool) -> PackedBatches:
    """The documents of one stream, packed."""
    assert corpus.documents_of is not None
    tokenizer, conversations = corpus.tokenizer, corpus.facts.conversations
    return PackedBatches(
        corpus.documents_of[validation],
        batch=EVALUATED_ROWS if validation else config.train.batch,
        context=row_length(config),
        seed=config.seed,
        begin=begin_ids(tokenizer),
        pad=pad_id(tokenizer) if has_end(tokenizer) else 0,
        divide=not conversations,
    )


def count_steps(
    config: RunConfig, mapping: Mapping[str, Any], corpus: Corpus, callback: RunCallback
) -> RunConfig:
    """``config`` with the batch and the steps that follow from the number of rows."""
    assert config.tune is not None
    given, train = _section(mapping, "train"), config.train
    batches = document_batches(config, corpus, validation=False)
    rows = len(batches.rows)
    if "batch" not in given:
        batch = max(1, min(ROWS, rows // EPOCH_STEPS))
        parts = train.accumulate
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


def _count(number: int, noun: str) -> str:
    """
    >>> _count(1, "row"), _count(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
