"""Token files of a text: two streams of ids, the tokenizer, and facts about them.

    train.bin, validation.bin   END d1 END d2 END ...   ids as uint16, uint32 for V > 65536
    tokenizer.json              trained on the training stream only, or a given one
    facts.json                  ``CorpusFacts``
    manifest.json               the recipe of the files, sizes and SHA-256 (fenchel/files.py)

Each stream starts with END, so that every byte of the text is predicted from a token before it.
For tuning, streams are divided into documents (fenchel/data/document_tokens.py).
The recipe is the hash of the text, the split and the tokenizer. A folder with the same recipe and
correct checksums is used again, whatever the age of its files and the present place of the text.
The text is read three times (to measure, to train the tokenizer, to encode), in blocks.
"""

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fenchel.config import from_mapping
from fenchel.data import tokens
from fenchel.data.config import TextConfig, vocabulary_for
from fenchel.data.document_tokens import (
    DocumentEncoder,
    DocumentIds,
    DocumentWriter,
    map_documents,
    with_predecessor,
)
from fenchel.data.split import Part, Split
from fenchel.data.text import BUILT_IN, Document, Tally, Text, open_text
from fenchel.data.tokens import Ids, TextTokenizer, load_tokenizer, train_tokenizer
from fenchel.files import (
    MANIFEST,
    Damaged,
    committed,
    discard,
    manifest_of_all,
    read_json,
    require_output,
    require_space,
    sweep_beside,
    verify,
)
from fenchel.files import sha256 as file_sha256

ProgressCallback = Callable[[str, int, int], None]
"""Called with (stage, done, total) while a long job runs, for a progress bar; a total of 0 is an
unknown length."""

_KIND, _VERSION = "tokens", 1
_TOKENIZER, _FACTS = "tokenizer.json", "facts.json"
_NAMES = ("train", "validation")  # of streams, indexed by whether a part is for validation
_STREAMS = tuple(f"{name}.bin" for name in _NAMES)
_BESIDE = {f"{name}_{what}.bin" for name in _NAMES for what in ("starts", "scored")}
_OURS = {*_STREAMS, *_BESIDE, _TOKENIZER, _FACTS, MANIFEST}
_BLOCK = 2**22  # characters encoded at once
_CONVERSATIONS = 2**16  # of conversations, which take longer: for the progress bar
_BETWEEN = b"\f"  # between documents where a baseline reads them as bytes


@dataclass(frozen=True, kw_only=True)
class CorpusFacts:
    """Facts about a text that a run records, and compares when it resumes."""

    text_name: str
    text_sha256: str
    tokenizer_sha256: str
    split: str
    """The split as a sentence."""
    documents: int
    vocabulary: int
    """The size of the tokenizer, which may be below the setting."""
    train_bytes: int
    validation_bytes: int
    train_tokens: int
    validation_tokens: int
    train_documents: int | None = None
    """Documents of the stream in a text for tuning; None where streams are not divided."""
    validation_documents: int | None = None
    train_answer_bytes: int | None = None
    """Bytes of the assistant's answers in conversations; None where a text is no conversation."""
    validation_answer_bytes: int | None = None

    @property
    def conversations(self) -> bool:
        """Whether the documents are conversations, of which the answers are predicted."""
        return self.validation_answer_bytes is not None


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token files, memory-mapped."""

    folder: Path
    tokenizer: TextTokenizer
    train: Ids
    """Ids for training: (N,)."""
    validation: Ids
    """Ids for validation: (N,)."""
    facts: CorpusFacts
    source: str
    """The source of the text, which the baselines read again."""
    recipe: Mapping[str, Any]
    documents_of: tuple[DocumentIds, DocumentIds] | None = None
    """Both streams as documents, those for training first; only in a text for tuning."""

    @classmethod
    def open(cls, folder: Path) -> "Corpus":
        """The token files in ``folder``, after checking every byte of them."""
        manifest = verify(folder)
        if manifest.get("kind") != _KIND:
            raise ValueError(f"{folder} does not hold token files.")
        if manifest.get("version") != _VERSION:
            raise ValueError(
                f"{folder} was written by a newer fenchel (version {manifest.get('version')} "
                f"of the token files, {_VERSION} is known); upgrade, or make them anew elsewhere."
            )
        source, recipe = _read_recipe(manifest, folder)
        facts = _read_facts(folder / _FACTS)
        if facts.documents > facts.train_tokens + facts.validation_tokens:
            raise Damaged(f"{folder / _FACTS} counts more documents than tokens.")
        counts = (facts.train_documents, facts.validation_documents)
        tokenizer = load_tokenizer(folder / _TOKENIZER, needs_end=None in counts)
        if tokenizer.vocabulary_size != facts.vocabulary:
            raise Damaged(f"{folder / _TOKENIZER} has not as many tokens as {_FACTS} says.")
        corpus = cls(
            folder=folder,
            tokenizer=tokenizer,
            train=_map(folder / _STREAMS[False], facts.train_tokens, facts.vocabulary),
            validation=_map(folder / _STREAMS[True], facts.validation_tokens, facts.vocabulary),
            facts=facts,
            source=source,
            recipe=recipe,
        )
        if None in counts:
            return corpus
        train, validation = (
            map_documents(folder, name, ids, count or 0, facts.conversations)
            for name, ids, count in zip(
                _NAMES, (corpus.train, corpus.validation), counts, strict=True
            )
        )
        return replace(corpus, documents_of=(train, validation))

    def predicted_bytes(self, *, validation: bool) -> int:
        """Bytes of one stream whose tokens are predicted: not those of the first token.

        Of documents that are read one by one, not the first of each; of conversations, the answers.
        """
        facts, ids = self.facts, self.validation if validation else self.train
        answers = facts.validation_answer_bytes if validation else facts.train_answer_bytes
        if answers is not None:
            return answers
        first = ids[:1]
        if self.documents_of is not None:
            first = ids[self.documents_of[validation].starts[:-1]]
        size = facts.validation_bytes if validation else facts.train_bytes
        return max(1, size - self.tokenizer.spelled_bytes(first))

    def documents(self, *, validation: bool) -> Iterator[Document]:
        """The documents of one stream, decoded: they need no source, and no tokenizer of a model.

        A given tokenizer that does not decode to the same text changes them.
        """
        ids = self.validation if validation else self.train
        if self.documents_of is not None:
            starts = self.documents_of[validation].starts.tolist()
            for n, (start, stop) in enumerate(pairwise(starts)):
                yield Document(str(n), self.tokenizer.decode(ids[start:stop].tolist()))
            return
        ends = np.flatnonzero(ids == self.tokenizer.end_id)
        for n, (start, stop) in enumerate(pairwise(ends.tolist())):
            yield Document(str(n), self.tokenizer.decode(ids[start + 1 : stop].tolist()))

    def reopen_text(self) -> Text:
        """The text of the source; a folder with far more files than documents is refused.

        A run of other people may name any folder.
        """
        most = most_files(self.facts.documents)
        return open_text(self.source, most=most, messages=self.facts.conversations)

    def text(self, *, validation: bool) -> bytes:
        """The text of one stream, read from its source, documents separated by form feeds."""
        tally = Tally()
        facts = self.facts
        bytes_read = facts.train_bytes + facts.validation_bytes
        every, whole = self.recipe["validation"], facts.conversations
        split = Split(every, facts.documents, bytes_read, whole)
        documents = []
        for part in split.parts(tally.watch(self.reopen_text().documents())):
            if tally.bytes > bytes_read:
                break  # another text, whatever follows
            if part.validation == validation:
                documents.append(part.document.text.encode())
        _require_same(facts.text_sha256, tally.sha256(), self.source)
        return _BETWEEN.join(documents)


def most_files(documents: int) -> int:
    """Files and folders below a folder whose text had ``documents``, hidden and empty ones too."""
    return 10_000 + 100 * documents


def prepare(
    config: TextConfig,
    folder: Path,
    *,
    owned: bool = False,
    progress: ProgressCallback | None = None,
    encoder: DocumentEncoder | None = None,
) -> Corpus:
    """Makes the token files of a text in ``folder``, or opens those that are there.

    With an ``encoder`` they are those of a text for tuning, by its tokenizer.

    Damaged files that an intact manifest names are made again. A folder that holds another text or
    other files is refused and not changed, unless it is ``owned`` by the caller and holds nothing
    but token files. Temporary files of an earlier call that was killed are removed.
    """
    progress = progress or no_progress
    if not folder.is_dir():  # one that is there is only replaced where it holds token files
        reads = [] if owned or config.source in BUILT_IN else [config.source]
        require_output(folder, folder=True, reads=reads)
    _require_token_files(folder, owned)
    sweep_beside(folder, _OURS)
    conversations = encoder is not None and encoder.template is not None
    text = open_text(config.source, messages=conversations)
    tally = _measure(text, progress)
    given = None if encoder is None else encoder.tokenizer_json
    if given is None and config.tokenizer is not None:
        path = Path(os.path.expanduser(config.tokenizer))
        load_tokenizer(path)  # an unusable file is refused before any work
        given = path.read_bytes()
    model, vocabulary = config.tokenizer_model, config.vocabulary or vocabulary_for(tally.bytes)
    recipe = {
        "text": tally.sha256(),
        "validation": config.validation,
        "tokenizer": _recipe(model, vocabulary) if given is None else _sha256(given),
    }
    if encoder is not None:
        recipe["documents"] = encoder.recipe
    if (corpus := _reusable(folder, recipe, owned)) is None:
        split = Split(config.validation, tally.documents, tally.bytes, conversations)
        with _new_folder(folder, text, tally, recipe) as fresh:
            if given is None:
                given = _train(text, split, vocabulary, model, progress)
            (fresh / _TOKENIZER).write_bytes(given)
            if encoder is None:
                facts = _encode(fresh, text, split, tally.sha256(), progress)
            else:
                facts = _encode_documents(fresh, text, split, tally.sha256(), progress, encoder)
            (fresh / _FACTS).write_text(
                json.dumps(asdict(facts), indent=1) + "\n", encoding="utf-8"
            )
        corpus = Corpus.open(folder)
        _require_recipe(corpus, recipe)
    return replace(corpus, source=text.source)


def _measure(text: Text, progress: ProgressCallback) -> Tally:
    tally = Tally()
    size = text.size
    for _ in tally.watch(text.documents()):
        progress("reading the text", min(tally.bytes, size), size)
    progress("reading the text", size, size)
    return tally


def _reusable(folder: Path, recipe: Mapping[str, Any], owned: bool) -> Corpus | None:
    """The corpus in ``folder`` if it was made by ``recipe``; None if it must be made."""
    while os.path.lexists(folder):
        _require_token_files(folder, owned)
        before = _identity(folder)
        try:
            corpus = Corpus.open(folder)
        except Damaged as error:
            if _identity(folder) != before:  # another process has replaced it meanwhile
                continue
            if not owned and (manifest_of_all(folder) or {}).get("kind") != _KIND:
                raise ValueError(
                    f"{error} No intact manifest names the files in {folder}, so they are not "
                    "replaced; name another folder, or remove this one."
                ) from None
        else:
            if not owned or not _differences(corpus, recipe):
                _require_recipe(corpus, recipe)
                return corpus
        with suppress(FileNotFoundError):
            discard(folder)
    return None


def _require_token_files(folder: Path, owned: bool) -> None:
    """Refuse a folder that holds anything else, and a link in place of one of a run."""
    if folder.is_symlink() and owned:
        raise ValueError(f"{folder} is a link, which a run does not write through.")
    if not _names(folder) <= _OURS:
        raise ValueError(f"{folder} holds something other than token files; name another folder.")


def _names(folder: Path) -> set[str]:
    try:
        return {file.name for file in folder.iterdir()}
    except FileNotFoundError:  # another process replaces it
        return set()


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        facts = folder.stat()
    except FileNotFoundError:
        return None
    return facts.st_dev, facts.st_ino


def _differences(corpus: Corpus, recipe: Mapping[str, Any]) -> list[str]:
    return [key for key, expected in recipe.items() if corpus.recipe.get(key) != expected]


def _require_recipe(corpus: Corpus, recipe: Mapping[str, Any]) -> None:
    for key in _differences(corpus, recipe):
        raise ValueError(
            f"{corpus.folder} holds token files with another {key} ({corpus.recipe.get(key)}, now "
            f"{recipe[key]}); name another folder, or remove it to make them anew."
        )


@contextmanager
def _new_folder(
    folder: Path, text: Text, tally: Tally, recipe: Mapping[str, Any]
) -> Iterator[Path]:
    """A temporary folder that becomes ``folder`` when it is complete."""
    header = {"kind": _KIND, "version": _VERSION, "recipe": recipe, "source": text.source}
    folder.parent.mkdir(parents=True, exist_ok=True)
    require_space(folder.parent, tally.bytes // 2)  # about four bytes per token, two for its id
    try:
        with committed(folder, header) as fresh:
            yield fresh
    except OSError as error:
        # Two runs may make the same files at once: the second to finish uses those of the first.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


def _recipe(model: str, vocabulary: int) -> str:
    """What a trained tokenizer depends on, beside its text."""
    trained = f"trained for {vocabulary}"
    return trained if model == "bpe" else f"{model} {trained}"


def _train(
    text: Text, split: Split, vocabulary: int, model: str, progress: ProgressCallback
) -> bytes:
    """A tokenizer of the training stream, or of every k-th document of a large one."""
    stride = math.ceil(split.bytes / tokens.TRAINED_ON)
    total = split.bytes // stride

    def sample() -> Iterator[str]:
        done = 0
        parts = (part for part in split.parts(text.documents()) if not part.validation)
        for part in islice(parts, 0, None, stride):
            yield part.document.text
            done += len(part.document.text.encode())
            progress("counting words", min(done, total), total)
        progress("counting words", total, total)
        progress("training the tokenizer", 0, 0)  # the merges, whose time is unknown

    tokenizer = train_tokenizer(sample(), vocabulary, model)
    return tokenizer.to_str(pretty=True).encode()


def _encode(
    folder: Path, text: Text, split: Split, sha256: str, progress: ProgressCallback
) -> CorpusFacts:
    """Writes both streams with the tokenizer in ``folder`` and returns the facts."""
    tokenizer = load_tokenizer(folder / _TOKENIZER)
    end = tokenizer.end_id
    dtype = _dtype(tokenizer.vocabulary_size)
    tally = Tally()
    bytes_of, tokens_of = [0, 0], [1, 1]
    with (
        (folder / _STREAMS[False]).open("wb") as train,
        (folder / _STREAMS[True]).open("wb") as validation,
    ):
        files = (train, validation)
        for file in files:
            file.write(np.array([end], dtype).tobytes())
        for block in _blocks(split.parts(tally.watch(text.documents()))):
            rows = tokenizer.encode_batch([part.document.text for part in block])
            for part, row in zip(block, rows, strict=True):
                if part.validation:
                    _require_exact(tokenizer, row, part.document)
                files[part.validation].write(np.array([*row, end], dtype).tobytes())
                bytes_of[part.validation] += len(part.document.text.encode())
                tokens_of[part.validation] += len(row) + 1
            progress("encoding the text", min(sum(bytes_of), split.bytes), split.bytes)
    _require_same(sha256, tally.sha256(), text.source)
    return _facts(folder, text, split, tally, bytes_of, tokens_of)


def _encode_documents(
    folder: Path,
    text: Text,
    split: Split,
    sha256: str,
    progress: ProgressCallback,
    encoder: DocumentEncoder,
) -> CorpusFacts:
    """``_encode`` of a text for tuning, divided into documents."""
    tally = Tally()
    bytes_of = [0, 0]
    before: Part | None = None
    dtype = _dtype(encoder.tokenizer.vocabulary_size)
    with (
        DocumentWriter(folder, _NAMES[False], encoder, dtype) as train,
        DocumentWriter(folder, _NAMES[True], encoder, dtype) as validation,
    ):
        writers = (train, validation)
        most = _CONVERSATIONS if split.whole else _BLOCK
        for block in _blocks(split.parts(tally.watch(text.documents())), most):
            rows = encoder.encode([part.document for part in block])
            pairs = zip(with_predecessor(block, before), rows, strict=True)
            for (part, continues), row in pairs:
                writers[part.validation].write(row, continues=continues)
                bytes_of[part.validation] += len(part.document.text.encode())
            before = block[-1]
            progress("encoding the text", min(sum(bytes_of), split.bytes), split.bytes)
    _require_same(sha256, tally.sha256(), text.source)
    facts = _facts(folder, text, split, tally, bytes_of, [w.length for w in writers])
    answers = [w.bytes if split.whole else None for w in writers]
    return replace(
        facts,
        train_documents=train.documents,
        validation_documents=validation.documents,
        train_answer_bytes=answers[False],
        validation_answer_bytes=answers[True],
    )


def _facts(
    folder: Path, text: Text, split: Split, tally: Tally, bytes_of: list[int], tokens_of: list[int]
) -> CorpusFacts:
    """The facts of a text that was encoded; ValueError if a stream is empty."""
    for size, use in zip(bytes_of, ("train on", "validate on"), strict=True):
        if not size:
            raise ValueError(
                f"{text.source} has {tally.bytes} bytes, which leaves nothing to {use} "
                f"({split}); use more text."
            )
    tokenizer = load_tokenizer(folder / _TOKENIZER, needs_end=False)
    return CorpusFacts(
        text_name=text.name,
        text_sha256=tally.sha256(),
        tokenizer_sha256=file_sha256(folder / _TOKENIZER),
        split=str(split),
        documents=tally.documents,
        vocabulary=tokenizer.vocabulary_size,
        train_bytes=bytes_of[False],
        validation_bytes=bytes_of[True],
        train_tokens=tokens_of[False],
        validation_tokens=tokens_of[True],
    )


def _blocks(parts: Iterator[Part], most: int = _BLOCK) -> Iterator[list[Part]]:
    block: list[Part] = []
    size = 0
    for part in parts:
        block.append(part)
        size += len(part.document.text)
        if size >= most:
            yield block
            block, size = [], 0
    if block:
        yield block


def _require_exact(tokenizer: TextTokenizer, ids: list[int], document: Document) -> None:
    """Bits per byte are meaningful only if the tokens represent all bytes."""
    if tokenizer.decode(ids) != document.text:
        raise ValueError(
            f"decoding the tokens of {document.name!r} does not give its text back, "
            "so bits per byte would be wrong; use a lossless tokenizer, or train one."
        )


def _require_same(expected: str, actual: str, source: str) -> None:
    if actual != expected:
        raise ValueError(
            f"{source} has changed since its tokens were made "
            f"(SHA-256 {actual[:16]}, was {expected[:16]}); prepare it again."
        )


def _read_recipe(manifest: Mapping[str, Any], folder: Path) -> tuple[str, dict[str, Any]]:
    source, recipe = manifest.get("source"), manifest.get("recipe")
    if isinstance(source, str) and isinstance(recipe, dict):
        every = recipe.get("validation")
        if isinstance(every, int) and every >= 2:
            return source, recipe
    raise Damaged(f"{folder / MANIFEST} does not say how the token files were made.")


def _read_facts(path: Path) -> CorpusFacts:
    try:
        return from_mapping(CorpusFacts, read_json(path))
    except (TypeError, ValueError) as error:
        raise Damaged(f"{path} does not contain the facts of a text ({error}).") from None


def _map(path: Path, count: int, vocabulary: int) -> Ids:
    dtype = _dtype(vocabulary)
    size = path.stat().st_size if path.is_file() else 0
    if size != count * dtype.itemsize or not count:
        raise Damaged(f"{path} has {size} bytes, {count} tokens of {dtype.itemsize} were expected.")
    ids = np.memmap(path, dtype, mode="r")
    if (largest := int(ids.max())) >= vocabulary:
        raise Damaged(f"{path} holds the token {largest}; there are {vocabulary}.")
    return ids


def _dtype(vocabulary: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocabulary <= 2**16 else "<u4")


def no_progress(_stage: str, _done: int, _total: int) -> None:
    """A ``ProgressCallback`` that does nothing."""


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
