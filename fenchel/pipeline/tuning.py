"""A run that tunes a checkpoint: its settings, its files, its documents and its first weights.

    checkpoint -> base/ (tokenizer, templates) -> documents -> packed rows -> the steps of a run

Everything after the first step is that of a run from the start (run.py). What differs is here:

- **The model** is the checkpoint's, in float32; only dropout may be set anew. With ``tune.rank``
  it is frozen, adapters are trained beside it (model/lora.py), and checkpoints hold these alone.
- **The files** beside its weights are copied to the folder base, sealed, so that the run is
  complete without the checkpoint: how a text begins and ends, the chat template, generation
  settings. They are written again when the run is exported.
- **Rows** of ``tune.context`` positions hold whole documents side by side (data/packing.py).
- **A budget** ``tune.kl`` is a set of models: those whose mean KL from the checkpoint on held-out
  text is at most this. With the trained weights w_0 of the checkpoint and w after a step, a model
  outside becomes w_0 + a (w - w_0), a the largest of 2^-HALVINGS, ..., 1 that bisection finds
  inside. The optimiser's state stays. It depends on the weights alone, so a resumed run repeats it.
- **Steps.** Where neither steps nor a time is given, ``tune.epochs`` passes over the documents; the
  batch has ``ROWS`` rows, or fewer, so that an epoch has ``EPOCH_STEPS`` steps.

Until its first checkpoint is written, and always with adapters, a run that is resumed reads the
checkpoint again, and refuses one whose weights are not those that it began with
(checkpoints/tuned_run.py).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

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
    Ids,
    PackedBatches,
    holds_conversations,
)
from fenchel.data.chat import PLAIN_WITH_END
from fenchel.evaluate import (
    attention_health,
    document_kl,
    score_documents,
    summarise,
)
from fenchel.evaluate.attention import PROMPT, attention_sensitivity
from fenchel.evaluate.calibration import all_outcomes
from fenchel.evaluate.score import changed_laws, document_predictions
from fenchel.files import Damaged, read_sealed_json
from fenchel.model import ModelConfig, Transformer
from fenchel.model.families.config_reader import CONFIG
from fenchel.model.lora import add_lora
from fenchel.pipeline.config import RunConfig, section, settings
from fenchel.pipeline.preparation import memory, memory_sentence
from fenchel.pipeline.task import Task
from fenchel.report.html import pluralise
from fenchel.train import require_loggers
from fenchel.train.loop import ConstrainFunction

ROWS, EPOCH_STEPS = 8, 8
"""Rows of a batch, and the fewest steps of an epoch, where train.batch is not given."""
EVALUATED_ROWS = 8
"""Rows per pass of an evaluation."""
KL_TOKENS, HALVINGS = 2048, 7
"""Held-out targets on which a budget is measured while training; the last step reads all."""
LAWS = 8
"""Positions at which the report has the laws of both models."""
MEASURED = 256
"""Tokens on which attention is measured before and after."""
DROPOUT = ("dropout", "attention_dropout", "mlp_dropout")
"""Settings of the model that tuning may change."""


def tune_settings(mapping: Mapping[str, Any], checkpoint: Path, model: ModelConfig) -> RunConfig:
    """The settings of a run that tunes ``checkpoint``, whose model has settings ``model``.

    Defaults are those of fine-tuning (docs/tune.md); ``mapping`` overrides them.
    """
    sections = {name: dict(section(mapping, name)) for name in ("model", "optim", "train", "tune")}
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
    default = "trust" if _has_pairs(model) and not adapted else "adamw"
    rule = sections["optim"].setdefault("optimiser", default)
    rates = _ADAPTERS if adapted else _RULES.get(rule, {})
    sections["optim"] = {**_SCHEDULE, **rates, **sections["optim"]}
    if "steps" not in sections["train"] and "budget" not in sections["train"]:
        sections["train"]["steps"] = 1  # until the rows are counted
    sections["train"].setdefault("batch", ROWS)
    sections["model"] = to_mapping(model) | sections["model"]
    sections["tune"]["checkpoint"] = str(checkpoint.resolve())
    return settings({**mapping, **sections})


def _has_pairs(model: ModelConfig) -> bool:
    """Whether "trust" can pair the queries and keys of every head (optim/score/pairs.py)."""
    per_head = not model.qk_norm or model.qk_norm_width == "head"
    own_keys = not model.shared_kv_layers and not model.keys_as_values
    return per_head and own_keys and model.scores == "dot" and model.temperature == "none"


_SCHEDULE = {"schedule": "linear", "warmup": 0.1, "weight_decay": 0.0}
_RULES: dict[str, dict[str, Any]] = {
    "trust": {"output_change": 0.02},
    "adamw": {"learning_rate": 2e-5},
}
"""Defaults of the optimiser for fine-tuning, by rule; docs/tune.md says why."""
_ADAPTERS = {"learning_rate": 2e-4}


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
        context=context or config.row_length,
        seed=config.seed,
        begin=tokenizer.begin_ids,
        pad=tokenizer.pad_id if tokenizer.has_end else 0,
        divide=not conversations,
    )


class Source(NamedTuple):
    """The checkpoint that a new run tunes, and what was given with it."""

    checkpoint: Path
    """The directory as the user gave it."""
    model: Transformer
    mapping: Mapping[str, Any]
    """Settings that differ from the defaults of tuning."""
    template: str | None = None
    """Replaces the chat template: "plain" or the name of a file."""


class TuneTask(Task):
    """A checkpoint on rows of documents or conversations."""

    source: Source | None = None
    """None in a run that is resumed, which reads the checkpoint again where it needs it."""

    def prepare_text(self) -> Corpus:
        """The token files, after the files beside the weights have been copied into the run."""
        require_loggers(self.config.train.log)
        return self.prepare_tokens(self._write_base())

    def encoder(self, template_name: str | None = None) -> DocumentEncoder:
        """How the run reads documents, from its folder base.

        ``template_name`` is what messages call its chat template; that of the run by default.
        """
        run, template = self.path, None
        tokenizer = read_tokenizer(run)
        if self._base().conversations:
            template = read_chat_template(run)
            if template is None:
                raise Damaged(f"{run / BASE} has no chat template.")
            if template_name is not None:
                template = ChatTemplate(template.source, template.special_tokens, template_name)
        return DocumentEncoder(tokenizer, end=document_end(run, tokenizer), template=template)

    def _base(self) -> TunedCheckpoint:
        if (base := tuned_run.read_base(self.path)) is None:
            raise Damaged(f"{self.path} has lost its folder {BASE}.")
        return base

    def _write_base(self) -> DocumentEncoder:
        """Copy the files beside the weights into the run; returns how they read documents.

        Errors of the template name what the user gave.
        """
        assert self.source is not None
        checkpoint, model, _, template = self.source
        conversations = holds_conversations(self.config.text.source)
        name = f"the chat template of {checkpoint}"
        if template is not None and not conversations:
            raise ValueError(
                "--template writes conversations, and the text has none; leave it out."
            )
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
            checkpoint.resolve(), weights_sha256(model), conversations, self.config.lora
        )
        tuned_run.write_base(self.path, record, files)
        return self.encoder(name)

    def fit_to_text(self) -> None:
        """Set the batch and the steps that follow from the number of rows."""
        assert self.source is not None
        assert self.config.tune is not None
        given, train = section(self.source.mapping, "train"), self.config.train
        facts, batches = self.corpus.facts, self.training_batches()
        rows = len(batches.rows)
        if "batch" not in given:
            batch = max(1, min(ROWS, rows // EPOCH_STEPS))
            groups = max(1, self.world.size // train.context_group)
            parts = train.cells or math.lcm(train.accumulate or 1, groups)
            train = replace(train, batch=max(parts, batch - batch % parts))
        if "steps" not in given and "budget" not in given:
            epochs = self.config.tune.epochs
            train = replace(train, steps=max(1, math.ceil(epochs * rows / train.batch)))
        documents = "conversation" if facts.conversations else "document"
        self.callback.message(
            f"{pluralise(facts.train_documents or 0, documents)} to train on, in "
            f"{pluralise(rows, 'row')} of {batches.context:,} positions; "
            f"{pluralise(batches.targets, 'token')} to predict, "
            f"{pluralise(train.batch, 'row')} per step."
        )
        if batches.cut_off:
            self.callback.message(
                f"{pluralise(batches.cut_off, 'token')} of answers are beyond {batches.context:,} "
                "positions and are left out; a larger tune.context has room for more."
            )
        self.config = replace(self.config, train=train)
        self.require_possible()

    def repetition(self) -> None:
        """Nothing to say: passes over the documents are what is asked for."""

    def training_batches(self) -> PackedBatches:
        """The documents, packed into rows."""
        return document_batches(self.config, self.corpus, validation=False)

    def build_model(self, *, begun: bool) -> None:
        """As of any task; a new run says how much memory its steps need."""
        super().build_model(begun=begun)
        counted = self.world.size == 1 and not self.config.model.has_delta
        if self.source is not None and counted:
            sizes = memory(self.config, self.model, self.device)
            self.callback.message(memory_sentence(sizes))
        self.source = None  # frees the weights as they were loaded

    def first_model(self) -> Transformer:
        """The checkpoint in float32, off the pages of its file, with the dropout of the settings.

        With adapters it is frozen, and they are drawn from the seed.
        """
        if self.source is not None:
            loaded = self.source.model
        else:
            loaded = load_model(self._base().path)
            self._base().require_same(loaded)
        weights = {name: w.to(torch.float32, copy=True) for name, w in loaded.state_dict().items()}
        model = build(self.config.model, weights)
        model.source_files = loaded.source_files
        if (lora := self.config.lora) is not None:
            seeded = torch.Generator().manual_seed(self.config.seed)
            add_lora(model, **asdict(lora), generator=seeded)
        return model

    def evaluate(self, model: nn.Module, limit: int | None) -> dict[str, float]:
        """Metrics of the held-out documents; of conversations, those of the answers."""
        assert isinstance(model, Transformer)
        rows = document_batches(self.config, self.corpus, validation=True)
        size = self.corpus.predicted_bytes(validation=True)
        return score_documents(model, rows, bytes=size, limit=limit)._asdict()

    def constraint(self) -> ConstrainFunction | None:
        """Keeps the model within ``tune.kl`` of the checkpoint."""
        assert self.config.tune is not None
        budget = self.config.tune.kl
        if budget is None:
            return None
        if self.world.size > 1 or self.config.train.cells is not None:
            raise ValueError("tune.kl is enforced by one process, without train.cells.")
        start = self.first_model().to(self.device)  # its adapters, if any, do nothing yet
        trained = [
            (w, w_0.detach())
            for w, w_0 in zip(self.model.parameters(), start.parameters(), strict=True)
            if w.requires_grad
        ]
        documents = document_batches(self.config, self.corpus, validation=True)

        @torch.no_grad()
        def enforce(_step: int, last: bool) -> dict[str, float]:
            limit = None if last else KL_TOKENS
            ends = [w.detach().clone() for w, _ in trained]

            def kl_at(share: float) -> float:
                for (w, w_0), end in zip(trained, ends, strict=True):
                    w.copy_(end if share == 1.0 else torch.lerp(w_0, end, share))
                return document_kl(self.model, start, documents, limit=limit)

            share, kl = 1.0, kl_at(1.0)
            if not kl <= budget:
                share, kl, high = 0.0, 0.0, 1.0
                for _ in range(HALVINGS):
                    middle = 0.5 * (share + high)
                    found = kl_at(middle)
                    if found <= budget:
                        share, kl = middle, found
                    else:
                        high = middle
                kl_at(share)
            return {"tune/kl": kl, "tune/kl_share": share}

        return enforce

    def sample_prompt(self) -> tuple[Ids, int, list[int]]:
        """The first held-out document, or its first conversation up to the answer."""
        assert self.corpus.documents_of is not None
        first = self.corpus.documents_of[True]
        ids, prompt = self.corpus.validation[: int(first.starts[1])], PROMPT
        if first.scored is not None:
            prompt = int(first.scored[: len(ids)].argmax())
            prompt = max(1, min(prompt, self.config.model.context - 1))
        template = read_chat_template(self.path) if self.corpus.facts.conversations else None
        stops = () if template is None else template.stops(self.corpus.tokenizer)
        return ids, prompt, [one for one in stops if isinstance(one, int)]

    def measure_first(self) -> None:
        """Write the measures of the checkpoint to before.json."""
        self.callback.progress("measuring the checkpoint", 0, 0)

        def measure_checkpoint() -> None:
            whole = self.first_model().to(self.device) if self.divided else self.model
            self.run.write_json("before.json", self.measure(whole))

        self.world.on_first(measure_checkpoint)

    def comparison(self, model: Transformer) -> dict[str, Any]:
        """The measures of the checkpoint and of what was tuned of it."""
        self.callback.progress("measuring the tuned model", 0, 0)
        try:
            before = read_sealed_json(self.path / "before.json")
        except Damaged as error:
            self.callback.message(f"{error} The report has no comparison with the checkpoint.")
            return {}
        return {"tuning": {"before": before, "after": self.measure(model), **self.laws(model)}}

    def laws(self, model: Transformer) -> dict[str, Any]:
        """The KL from the checkpoint on held-out text, and where the laws have changed most."""
        assert self.config.tune is not None
        if self.config.tune.kl is None:
            return {}
        start = self.first_model().to(model.lm_head_weight.device)
        documents = document_batches(self.config, self.corpus, validation=True)
        where = {"count": LAWS, "limit": KL_TOKENS}
        text = self.corpus.tokenizer.decode

        def named(pairs: list[tuple[int, float]]) -> list[tuple[str, float]]:
            return [(text([token]), p) for token, p in pairs]

        budget, measured = self.config.tune.kl, document_kl(model, start, documents)
        self.callback.message(
            f"The tuned model is {measured:.4g} nats per token from the checkpoint on all of the "
            f"held-out text (measured); the budget is {budget:g}."
        )
        return {
            "kl": {"budget": budget, "measured": measured},
            "laws": [
                {
                    "kl": law.kl,
                    "target": text([law.target]),
                    "before": named(law.base),
                    "after": named(law.tuned),
                }
                for law in changed_laws(model, start, documents, **where)
            ],
        }

    def measure(self, model: Transformer) -> dict[str, Any]:
        """What the report compares before and after tuning, as plain values.

        Loss, accuracy and calibration on all of the held-out text; per layer the health and the
        sensitivity of attention on the first ``MEASURED`` tokens of its longest document.
        """
        documents = document_batches(self.config, self.corpus, validation=True)
        [found] = map(summarise, all_outcomes(document_predictions(model, documents)))
        bits = found.loss * (documents.targets + documents.cut_off) / math.log(2.0)
        row = documents.rows[0]  # packing begins with the longest
        assert row.segments is not None
        ids = row.inputs[row.segments == 0][:MEASURED].to(model.lm_head_weight.device)[None]
        health = attention_health(model, ids)
        return {
            "loss": found.loss,
            "perplexity": math.exp(min(found.loss, 700.0)),
            "bits_per_byte": bits / self.corpus.predicted_bytes(validation=True),
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
