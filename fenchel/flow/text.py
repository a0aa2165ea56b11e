"""Which text a run reads: recorded when it begins, found again, and not another one."""

from dataclasses import asdict, replace
from pathlib import Path

from fenchel.data import Corpus, open_text, prepare
from fenchel.files import Damaged, read_json, sha256, write_atomic
from fenchel.flow.config import RunConfig, Watch
from fenchel.train import RunDir


def keep_corpus(run: RunDir, corpus: Corpus) -> None:
    """Record in the run which token files it reads, and keep its tokenizer."""
    inside = corpus.folder.parent == run.path
    folder = corpus.folder.name if inside else str(corpus.folder.resolve())
    kept = {"folder": folder, "source": corpus.source, **asdict(corpus.facts)}
    run.write_json("text.json", kept)
    write_atomic(run.path / "tokenizer.json", (corpus.folder / "tokenizer.json").read_bytes())


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


def _read_kept(path: Path) -> dict[str, str]:
    kept = read_json(path / "text.json")
    wanted = ("folder", "source", "text_sha256", "tokenizer_sha256")
    if not all(isinstance(kept.get(name), str) for name in wanted):
        raise Damaged(f"{path / 'text.json'} does not say which text the run reads.")
    return {name: kept[name] for name in wanted}


def reopen(config: RunConfig, path: Path, watch: Watch) -> Corpus:
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


def text_changed(corpus: Corpus, watch: Watch, accept: bool) -> str | None:
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
