"""A run from settings to report: one that begins, and one that goes on."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fenchel.config import to_mapping
from fenchel.data import Corpus, prepare
from fenchel.files import locked, sweep
from fenchel.flow.carry_out import carry_out
from fenchel.flow.config import RunConfig, Watch, changed, settings
from fenchel.flow.text import keep_corpus, reopen, text_changed
from fenchel.flow.trial import batches_of, device_of, require_room, resolve
from fenchel.train import Outcome, RunDir, enough_memory, require_loggers

TOKENS = "tokens"
"""Folder of a run's token files, unless they are shared."""


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
            batches = batches_of(config, corpus.train)
            with enough_memory("nothing was begun"):
                config = resolve(config, batches, watch)
            require_room(config, run)
            keep_corpus(run, corpus)
            run.write_settings(to_mapping(config))
        except BaseException:
            if new:
                run.abandon()
            raise
        return carry_out(config, run, corpus, batches, watch)


def resume(
    path: Path, watch: Watch, *, changes: Mapping[str, Any], accept_new_text: bool = False
) -> Outcome:
    """Go on with the run in ``path`` from its newest intact checkpoint."""
    run = RunDir(path)
    before = run.read_settings()
    with locked(path):
        sweep(path)
        sweep(run.checkpoints)
        config = changed(before, changes, watch)
        device_of(config.train.device)  # refused before anything is written
        require_loggers(config.train.log)
        require_room(config, run)
        corpus = reopen(config, path, watch)
        if now := text_changed(corpus, watch, accept_new_text):
            same_ids = replace(
                config.text, source=corpus.source, tokenizer=str(path / "tokenizer.json")
            )
            corpus = prepare(same_ids, path / f"{TOKENS}-{now[:12]}", report=watch.stage)
            keep_corpus(run, corpus)
        if config != settings(before):
            run.write_settings(to_mapping(config))
        return carry_out(config, run, corpus, batches_of(config, corpus.train), watch)


def _fit_vocabulary(config: RunConfig, corpus: Corpus) -> RunConfig:
    """The tokenizer's size, unless the settings ask for more rows than it has ids."""
    size = corpus.tokenizer.get_vocab_size()
    asked = config.model.vocabulary
    if asked < size:
        raise ValueError(f"model.vocabulary={asked} is fewer than the tokenizer's {size} ids.")
    given = asked != config.text.vocabulary
    return config if given else replace(config, model=replace(config.model, vocabulary=size))
