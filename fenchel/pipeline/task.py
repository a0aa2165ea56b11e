"""``Task``: settings, text, batches and model of a run, and how the model is measured.

A task trains a fresh model on windows of a text; a ``TuneTask`` (tuning.py) replaces what differs
for a checkpoint on rows of documents. run.py takes either from its text to the report.

Several processes have a task each (``world``). Rank 0 alone prepares the text; of a model whose
weights are divided it alone draws the first ones.
"""

import math
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from fenchel.checkpoints import run_checkpoint
from fenchel.checkpoints.tokenizer import end_ids
from fenchel.data import Batch, BatchSource, Corpus, DocumentEncoder, Ids, prepare
from fenchel.data.config import LARGEST_DEFAULT
from fenchel.distributed.cells import parts_of, reshard
from fenchel.distributed.checkpoint import ReadOnlyRunDir
from fenchel.distributed.processes import World
from fenchel.evaluate import attention_health, sample, score, score_choice
from fenchel.evaluate.attention import PROMPT
from fenchel.files import sweep
from fenchel.model import Transformer
from fenchel.model.transformer import meta_model
from fenchel.pipeline.config import RunCallback, RunConfig
from fenchel.pipeline.preparation import (
    build_batches,
    build_model,
    divide_step,
    meta_to_train,
    new_text,
    record_corpus,
    reopen_corpus,
    require_cells,
    require_memory,
    require_room,
    start_weights,
)
from fenchel.train import RunDir, named_loss, require_loggers, select_device
from fenchel.train.loop import ConstrainFunction
from fenchel.train.rundir import TOKENS, is_run_name
from fenchel.train.step import autocast

LEAST_VALIDATED = 2**19
"""Targets of the validation text that the last evaluation of a run reads at least."""
SHORT_VALIDATION = 1000
"""Bytes of held-out text below which its loss is mostly chance."""


MANY_PASSES, MANY_PARAMETERS = 4, 10
"""Passes over a text and parameters per token of it from which a run is said to memorise it."""


class Task:
    """A fresh model on windows of a text."""

    corpus: Corpus
    batches: BatchSource
    model: Transformer
    divided = False
    """Whether no process has all of the weights."""

    def __init__(self, config: RunConfig, path: Path, callback: RunCallback, world: World) -> None:
        """Refuses a device that is not there, before anything is written."""
        self.config, self.callback, self.world = config, callback, world
        self.device = select_device(config.train.device)
        self.path = path
        self.run = RunDir(path) if world.first else ReadOnlyRunDir(path)

    def prepare_text(self) -> Corpus:
        """The token files of a new run, made by rank 0."""
        self.require_possible()
        corpus = self.prepare_tokens()
        facts = corpus.facts
        if facts.validation_bytes < SHORT_VALIDATION:
            self.callback.message(
                f"The text has {facts.train_bytes + facts.validation_bytes:,} bytes and its "
                f"held-out part {facts.validation_bytes:,}: too few for numbers that mean much; "
                "some hundred thousand bytes are a beginning."
            )
        return corpus

    def require_possible(self) -> None:
        """Refuse settings that this machine and these processes cannot train with."""
        require_loggers(self.config.train.log)
        require_cells(self.config, self.world)
        require_memory(self.config, self.world)

    def prepare_tokens(self, encoder: DocumentEncoder | None = None) -> Corpus:
        """The token files of the text, in the run or where they are shared."""
        text, shared = self.config.text, self.config.text.prepared
        folder = self.path / TOKENS if shared is None else Path(os.path.expanduser(shared))
        owned, progress = shared is None, self.callback.progress
        return prepare(text, folder, owned=owned, progress=progress, encoder=encoder)

    def reopen_text(self, *, accept_new: bool) -> Corpus:
        """The token files of a run that is resumed."""
        sweep(self.path, is_run_name)
        sweep(self.run.checkpoints, run_checkpoint.is_checkpoint_name)
        self.require_possible()
        require_room(meta_model(self.config.model), self.run)
        corpus = reopen_corpus(self.path, self.callback, self.prepare_again)
        if digest := new_text(corpus, self.callback, accept_new):
            return self.prepare_again(corpus.source, self.path / f"{TOKENS}-{digest[:12]}")
        return corpus

    def prepare_again(self, source: str, folder: Path) -> Corpus:
        """Token files of a text by the tokenizer of the run, and their record."""
        encoder = self.encoder()
        tokenizer = str(self.path / "tokenizer.json") if encoder is None else None
        text = replace(self.config.text, source=source, tokenizer=tokenizer)
        progress = self.callback.progress
        corpus = prepare(text, folder, owned=True, progress=progress, encoder=encoder)
        record_corpus(self.run, corpus)
        return corpus

    def encoder(self) -> DocumentEncoder | None:
        """How documents become tokens; None for the tokenizer of the run alone."""
        return None

    def fit_to_text(self) -> None:
        """Set model.vocabulary to the size of the tokenizer, unless a larger one is given."""
        config, size = self.config, self.corpus.tokenizer.vocabulary_size
        rows = config.model.vocabulary
        if rows == (config.text.vocabulary or LARGEST_DEFAULT):  # as settings() has it: not given
            self.config = replace(config, model=replace(config.model, vocabulary=size))
        elif rows < size:
            raise ValueError(f"model.vocabulary={rows} is fewer than the tokenizer's {size} ids.")

    def training_batches(self) -> BatchSource:
        """The batches; their order depends on the seed alone."""
        return build_batches(self.config, self.corpus.train)

    def build_model(self, *, begun: bool) -> None:
        """The model on its device, or without values where they are divided among processes.

        Then rank 0 draws them and sends every tensor to its owner: as many copies of a large model
        as processes would not fit into the memory of a machine. Where a checkpoint of the run has
        been written (``begun``), its weights come from there.
        """
        if self.world.size > 1:
            self.model = meta_to_train(self.config)
            self.divided = parts_of(self.model, self.config.train, self.world) > 1
        if not self.divided:
            saved = begun and self.config.lora is None
            model = build_model(self.config) if saved else self.first_model()
            self.model = model.to(self.device)
        self.config = divide_step(self.config, self.model, self.device, self.world)

    def first_model(self) -> Transformer:
        """The model at its first step, on the CPU: drawn, with the start of ``train.init``."""
        model = build_model(self.config)
        start_weights(self.config, model, self.corpus.train, self.device)
        return model

    @property
    def last_limit(self) -> int | None:
        """Targets of the validation text that the last evaluation reads; None for all.

        A target costs a third of what it costs to train on one: a quarter of those of the run is a
        twelfth of its time. Of a short run at least ``LEAST_VALIDATED``.
        """
        train = self.config.train
        trained = (train.steps or 0) * train.batch * self.config.row_length
        limit = max(LEAST_VALIDATED, trained // 4)
        return None if self.corpus.facts.validation_tokens <= limit else limit

    def validate(
        self, model: nn.Module, limit: int | None, *, last: bool = False
    ) -> dict[str, float]:
        """Metrics of the first ``limit`` targets of the validation text, or of all.

        In the training precision, unless it is the ``last`` evaluation.
        """
        narrow = autocast(self.config.train.precision, self.device)
        with nullcontext() if last else narrow():
            metrics = self.evaluate(model, limit)
        reshard(model)
        return metrics

    def evaluate(self, model: nn.Module, limit: int | None) -> dict[str, float]:
        """Metrics of the validation text, "loss" being the one that is trained.

        With another loss than cross-entropy, perplexity and bits per byte are those of its own
        choice map, and are left out where a target has probability 0.
        """
        train, ids = self.config.train, self.corpus.validation
        size = self.corpus.predicted_bytes(validation=True)
        context = self.config.model.context
        where: dict[str, Any] = {"bytes": size, "context": context, "limit": limit}
        choice = named_loss(train.loss, alpha=train.loss_alpha)
        if choice is None:
            return score(model, ids, **where, shared=self.world)._asdict()
        scores = score_choice(model, ids, choice=choice, **where, shared=self.world)._asdict()
        return {name: value for name, value in scores.items() if math.isfinite(value)}

    def probe(self, batch: Batch) -> dict[str, list[float]]:
        """The health of attention on two texts of a batch, or the first document of a row."""
        ids = batch.inputs[:2]
        if batch.segments is not None:
            ids = batch.inputs[:1, batch.segments[0] == batch.segments[0, 0]]
        health = attention_health(self.model, ids.to(self.device))
        reshard(self.model)
        return health

    def repetition(self) -> str | None:
        """A sentence where a large model reads a short text many times."""
        train, tokens = self.config.train, max(1, self.corpus.facts.train_tokens)
        passes = (train.steps or 0) * train.batch * self.config.row_length / tokens
        parameters = sum(p.numel() for p in self.model.parameters())
        if passes < MANY_PASSES or parameters < MANY_PARAMETERS * tokens:
            return None
        return (
            f"The run reads {tokens:,} tokens {passes:.0f} times with {parameters:,} parameters, "
            "which memorise them: more text or fewer steps predict new text better. The best "
            "checkpoint is kept."
        )

    def constraint(self) -> ConstrainFunction | None:
        """What moves the weights back after a step; None where nothing does."""
        return None

    def measure_first(self) -> None:
        """Measure the model before its first step, where the report compares with it."""

    def comparison(self, model: Transformer) -> dict[str, Any]:  # noqa: ARG002
        """The part of the summary that compares with the model before its first step."""
        return {}

    def sample(self, model: Transformer) -> dict[str, Any]:
        """A continuation of the validation text, or an answer in its first conversation."""
        ids, prompt, stop = self.sample_prompt()
        tokenizer, seed = self.corpus.tokenizer, self.config.seed
        # Drawn from the softmax of the logits, which another loss does not fit; their largest is
        # the most probable token under every map.
        temperature = 0.8 if self.config.train.loss == "cross_entropy" else 0.0
        stop = [*end_ids(self.path, tokenizer), *stop]
        return sample(
            model, tokenizer, ids, seed=seed, temperature=temperature, prompt=prompt, stop=stop
        )

    def sample_prompt(self) -> tuple[Ids, int, list[int]]:
        """Ids of the validation text, how many of them are the prompt, further ids that end it."""
        return self.corpus.validation, PROMPT, []
