"""fenchel/data/token_files.py: what is stored, when it is used again, and how damage is met."""

import errno
import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fenchel import files
from fenchel.data import token_files as module
from fenchel.data.config import SMALLEST_DEFAULT, TextConfig, vocabulary_for
from fenchel.data.token_files import Corpus, prepare
from fenchel.data.tokens import TextTokenizer, train_tokenizer
from fenchel.files import Damaged, NoSpace

FILES = ["facts.json", "manifest.json", "tokenizer.json", "train.bin", "validation.bin"]


@pytest.fixture
def config(folder: Path) -> TextConfig:
    return TextConfig(source=str(folder), vocabulary=400)


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "run" / "tokens"


def documents(ids: Any, tokenizer: TextTokenizer) -> list[str]:
    """A stream taken apart at its END tokens."""
    ends = np.flatnonzero(np.asarray(ids) == 0)
    assert ends[0] == 0
    assert ends[-1] == len(ids) - 1
    return [tokenizer.decode(ids[a + 1 : b].tolist()) for a, b in pairwise(ends)]


# what is stored


def test_the_streams_hold_every_document_and_the_facts_count_them(
    config: TextConfig, there: Path, verses: list[str]
) -> None:
    corpus = prepare(config, there)
    validation = verses[9::10]
    train = [verse for verse in verses if verse not in validation]
    assert documents(corpus.train, corpus.tokenizer) == train
    assert documents(corpus.validation, corpus.tokenizer) == validation
    facts = corpus.facts
    assert facts.train_bytes == sum(len(verse.encode()) for verse in train)
    assert facts.validation_bytes == sum(len(verse.encode()) for verse in validation)
    assert (facts.train_tokens, facts.validation_tokens) == (
        len(corpus.train),
        len(corpus.validation),
    )
    assert facts.split == "every 10th of 30 documents is for validation"
    assert sorted(file.name for file in there.iterdir()) == FILES
    assert list(there.parent.iterdir()) == [there]


def test_the_tokenizer_is_trained_on_the_training_stream_alone(
    config: TextConfig, there: Path, folder: Path, verses: list[str]
) -> None:
    train = [verse for number, verse in enumerate(verses) if number % 10 != 9]
    ours = prepare(config, there).tokenizer
    assert ours.to_str() == train_tokenizer(train, 400).to_str()
    (folder / "09.txt").write_text("wholly other words " * 40)
    elsewhere = prepare(config, there.with_name("other"))
    assert elsewhere.tokenizer.to_str() == ours.to_str()


def test_a_vocabulary_that_is_left_out_is_that_of_the_size_of_the_text(tmp_path: Path) -> None:
    words = np.random.default_rng(0).integers(1, 500_000, 16_000)
    text = tmp_path / "numbers.txt"
    text.write_text(" ".join(map(str, words)))  # more pairs to merge than there is room for
    follows = prepare(TextConfig(source=str(text)), tmp_path / "tokens")
    V = vocabulary_for(text.stat().st_size)
    assert follows.tokenizer.vocabulary_size == V > SMALLEST_DEFAULT
    given = prepare(TextConfig(source=str(text), vocabulary=V), tmp_path / "given")
    assert follows.recipe == given.recipe
    text.write_text(text.read_text() * 4)
    twice = prepare(TextConfig(source=str(text)), tmp_path / "longer")
    assert abs(twice.tokenizer.vocabulary_size - 2 * V) <= 64


def test_the_files_are_mapped_not_read_into_memory(config: TextConfig, there: Path) -> None:
    corpus = prepare(config, there)
    assert isinstance(corpus.train, np.memmap)
    assert corpus.train.dtype == np.uint16
    with pytest.raises(ValueError, match="read-only"):
        corpus.train[0] = 1


def test_a_vocabulary_beyond_65536_is_stored_in_four_bytes(tmp_path: Path, folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = alphabet + [f"{a}{b}" for a in alphabet for b in alphabet][: 2**16]
    wide = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    wide.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    wide.decoder = decoders.ByteLevel()
    wide.add_special_tokens(["<|endoftext|>"])
    wide.save(str(tmp_path / "wide.json"))
    config = TextConfig(source=str(folder), tokenizer=str(tmp_path / "wide.json"))
    corpus = prepare(config, tmp_path / "tokens")
    assert corpus.train.dtype == np.uint32
    assert corpus.train[0] == corpus.facts.vocabulary - 1 == 2**16 + 256


def test_blocks_do_not_change_the_streams(
    config: TextConfig, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare(config, there)
    monkeypatch.setattr(module, "_BLOCK", 100)
    pieces = prepare(config, there.with_name("pieces"))
    np.testing.assert_array_equal(whole.train, pieces.train)
    np.testing.assert_array_equal(whole.validation, pieces.validation)


def test_a_large_text_trains_its_tokenizer_on_documents_from_all_over(
    config: TextConfig, there: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        (folder / f"{number:02d}.txt").write_text(f"word{chr(97 + number % 26)} " * 50)
    monkeypatch.setattr(module.tokens, "TRAINED_ON", 2000)
    vocabulary = prepare(config, there).tokenizer.library.get_vocab()
    assert "Ġworda" in vocabulary
    assert any(f"Ġword{letter}" in vocabulary for letter in "uvwxyz")  # and not the first alone


def test_progress_runs_from_the_reading_to_the_end_of_each_stage(
    config: TextConfig, there: Path
) -> None:
    told: list[tuple[str, int, int]] = []
    prepare(config, there, progress=lambda *all: told.append(all))
    stages = [
        "reading the text",
        "counting words",
        "training the tokenizer",
        "encoding the text",
    ]
    assert list(dict.fromkeys(what for what, _, _ in told)) == stages
    for stage in stages:
        done = [(d, t) for what, d, t in told if what == stage]
        assert done == sorted(done)
        assert done[-1][0] == done[-1][1]
    told.clear()
    prepare(config, there, progress=lambda *all: told.append(all))
    assert {what for what, _, _ in told} == {"reading the text"}


# the text, read again


def test_the_documents_are_decoded_from_the_streams_without_the_text(
    config: TextConfig, there: Path, verses: list[str]
) -> None:
    prepare(config, there)
    corpus = replace(Corpus.open(there), source="gone")
    held_out = [document.text for document in corpus.documents(validation=True)]
    trained = [document.text for document in corpus.documents(validation=False)]
    assert held_out == verses[9::10]
    assert trained == [verse for n, verse in enumerate(verses) if n % 10 != 9]


def test_the_texts_for_baselines_are_those_of_the_streams(
    config: TextConfig, there: Path, verses: list[str]
) -> None:
    corpus = prepare(config, there)
    for each in (corpus, Corpus.open(there)):
        assert each.text(validation=True) == "\f".join(verses[9::10]).encode()
        assert each.text(validation=False).count(b"\f") == 26


def test_a_text_that_changed_is_not_passed_off_as_the_one_encoded(
    config: TextConfig, there: Path, folder: Path
) -> None:
    corpus = prepare(config, there)
    (folder / "03.txt").write_text("changed")
    with pytest.raises(ValueError, match="has changed since its tokens were made"):
        corpus.text(validation=False)


def test_a_text_that_changes_while_it_is_read_is_refused(
    config: TextConfig, there: Path, folder: Path
) -> None:
    def meddle(what: str, done: int, total: int) -> None:
        if what == "training the tokenizer" and done == total:
            (folder / "03.txt").write_text("changed in the middle")

    with pytest.raises(ValueError, match="has changed"):
        prepare(config, there, progress=meddle)
    assert list(there.parent.iterdir()) == []


# using a folder again


def test_an_intact_folder_is_used_again_even_if_the_text_was_touched_or_moved(
    config: TextConfig, there: Path, folder: Path
) -> None:
    prepare(config, there)
    before = {file.name: file.stat().st_mtime_ns for file in there.iterdir()}
    for file in folder.iterdir():
        os.utime(file, (1, 1))
    moved = folder.rename(folder.with_name("moved"))
    again = prepare(TextConfig(source=str(moved), vocabulary=400), there)
    assert {file.name: file.stat().st_mtime_ns for file in there.iterdir()} == before
    assert again.text(validation=True)  # read from where the text is now


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vocabulary": 300}, "another tokenizer"),
        ({"tokenizer_model": "unigram"}, "another tokenizer"),
        ({"validation": 5}, "another validation"),
        ({"source": "kjv"}, "another text"),
    ],
)
def test_a_folder_of_other_settings_is_refused_and_kept(
    change: dict[str, Any], says: str, config: TextConfig, there: Path, folder: Path
) -> None:
    prepare(config, there)
    before = (there / "manifest.json").read_bytes()
    with pytest.raises(ValueError, match=says):
        prepare(TextConfig(**{"source": str(folder), "vocabulary": 400, **change}), there)
    assert (there / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("model", ["unigram", "characters"])
def test_streams_of_every_tokenizer_model_decode_to_the_text(
    model: str, there: Path, folder: Path, verses: list[str]
) -> None:
    config = TextConfig(source=str(folder), vocabulary=400, tokenizer_model=model)
    corpus = prepare(config, there)
    parts = (*corpus.documents(validation=False), *corpus.documents(validation=True))
    assert sorted(part.text for part in parts) == sorted(verses)
    assert json.loads((there / "tokenizer.json").read_text())["model"]["type"] == (
        "Unigram" if model == "unigram" else "BPE"
    )
    again = prepare(config, there)
    assert again.facts == corpus.facts


def test_one_byte_of_the_text_is_another_text(
    config: TextConfig, there: Path, folder: Path
) -> None:
    prepare(config, there)
    path = folder / "11.txt"
    path.write_bytes(path.read_bytes().replace(b"sea", b"see", 1))
    with pytest.raises(ValueError, match="another text"):
        prepare(config, there)


def test_a_given_tokenizer_is_kept_byte_for_byte_and_is_part_of_the_recipe(
    config: TextConfig, there: Path, tmp_path: Path, folder: Path
) -> None:
    trained = prepare(config, there)
    given = TextConfig(source=str(folder), tokenizer=str(there / "tokenizer.json"))
    other = tmp_path / "given"
    corpus = prepare(given, other)
    assert (other / "tokenizer.json").read_bytes() == (there / "tokenizer.json").read_bytes()
    np.testing.assert_array_equal(corpus.train, trained.train)
    assert corpus.facts == trained.facts
    with pytest.raises(ValueError, match="another tokenizer"):
        prepare(config, other)


@pytest.mark.parametrize("name", ["pipe", "dangling", "loop", "loop/x", "file/x", "text/x"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_text_is_read(
    name: str, config: TextConfig, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    target = folder / "x" if name == "text/x" else tmp_path / name
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(module, "open_text", None)
    with pytest.raises(ValueError, match=r"not written to|cannot be written|lies in"):
        prepare(config, target)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_with_other_files_is_left_unchanged(config: TextConfig, there: Path) -> None:
    there.mkdir(parents=True)
    (there / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="something other than token files"):
        prepare(config, there)
    assert (there / "thesis.txt").read_text() == "years of work"


def test_the_second_of_two_that_finish_together_uses_the_files_of_the_first(
    config: TextConfig, there: Path
) -> None:
    def overtake(what: str, done: int, total: int) -> None:
        if what == "encoding the text" and done == total:
            rival = prepare(config, there.with_name("rival"))
            rival.folder.rename(there)

    assert prepare(config, there, progress=overtake).facts == Corpus.open(there).facts
    assert list(there.parent.iterdir()) == [there]


def test_the_files_of_a_rival_that_read_another_text_are_not_taken_for_ours(
    config: TextConfig, there: Path, tmp_path: Path
) -> None:
    (tmp_path / "other.txt").write_text("another text " * 20)

    def overtake(what: str, done: int, total: int) -> None:
        if what == "encoding the text" and done == total:
            other = TextConfig(source=str(tmp_path / "other.txt"))
            prepare(other, there.with_name("rival")).folder.rename(there)

    with pytest.raises(ValueError, match="another text"):
        prepare(config, there, progress=overtake)


# damage


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_found_named_and_mended(
    name: str, config: TextConfig, there: Path
) -> None:
    prepare(config, there)
    path = there / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match=name):
        Corpus.open(there)
    if name == "manifest.json":  # without it nothing says that the files are not the user's own
        with pytest.raises(ValueError, match=r"No intact manifest names the files"):
            prepare(config, there)
        assert path.read_bytes() == data
    data[len(data) // 2] ^= 1
    prepare(config, there, owned=name == "manifest.json")
    assert Corpus.open(there).folder == there
    if name != "manifest.json":
        assert path.read_bytes() == data


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_user_under_one_of_our_names_is_left_alone(
    name: str, config: TextConfig, there: Path
) -> None:
    there.mkdir(parents=True)
    (there / name).write_text("mine")
    with pytest.raises(ValueError, match=r"so they are not replaced; name another folder"):
        prepare(config, there)
    assert {file.name: file.read_text() for file in there.iterdir()} == {name: "mine"}


def test_a_file_that_the_manifest_does_not_name_keeps_the_folder(
    config: TextConfig, there: Path
) -> None:
    prepare(config, there)
    manifest = json.loads((there / "manifest.json").read_text())
    del manifest["files"]["tokenizer.json"]
    manifest["seal"] = files._seal(manifest)
    (there / "manifest.json").write_text(files._text(manifest))
    with pytest.raises(ValueError, match="so they are not replaced"):
        prepare(config, there)


def test_files_of_another_recipe_in_a_folder_of_ones_own_are_made_anew(
    config: TextConfig, there: Path
) -> None:
    prepare(config, there)
    other = replace(config, vocabulary=config.vocabulary + 1)
    with pytest.raises(ValueError, match="with another tokenizer"):
        prepare(other, there)
    prepare(other, there, owned=True)
    assert Corpus.open(there).recipe["tokenizer"] == f"trained for {other.vocabulary}"
    assert [path.name for path in there.parent.glob(f"{there.name}*")] == [there.name]


def test_a_damaged_folder_that_another_process_mends_meanwhile_is_used(
    config: TextConfig, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(config, there)
    (there / "train.bin").write_bytes(b"")
    prepare(config, tmp_path / "mended")
    opened, calls = Corpus.open, []

    def rival(folder: Path) -> Corpus:
        calls.append(folder)
        try:
            return opened(folder)
        finally:
            if len(calls) == 1:
                there.rename(tmp_path / "old")
                (tmp_path / "mended").rename(there)

    monkeypatch.setattr(Corpus, "open", rival)
    prepare(config, there)
    assert len(calls) == 2
    assert (tmp_path / "old").is_dir(), "what the rival removed is not ours to remove"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ESTALE])
def test_a_read_error_is_not_taken_for_damage(
    number: int, config: TextConfig, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(config, there)
    before = {file: file.stat().st_ino for file in there.iterdir()}

    def fail(path: Path) -> str:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(files, "sha256", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        prepare(config, there, owned=True)
    assert {file: file.stat().st_ino for file in there.iterdir()} == before


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_shortened_file_is_found_and_named(
    name: str, config: TextConfig, there: Path
) -> None:
    prepare(config, there)
    path = there / name
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(Damaged, match=name):
        Corpus.open(there)
    path.unlink()
    with pytest.raises(Damaged, match=name):
        Corpus.open(there)


def sealed(there: Path, name: str, content: bytes, **header: Any) -> None:
    """Change a file and seal the folder again, as a forger would."""
    manifest = json.loads((there / "manifest.json").read_text())
    contents = {file: (there / file).read_bytes() for file in manifest["files"]} | {name: content}
    for file in there.iterdir():
        file.unlink()
    there.rmdir()
    kept = {k: v for k, v in manifest.items() if k not in ("files", "seal")}
    with module.committed(there, {**kept, **header}) as fresh:
        for file, data in contents.items():
            (fresh / file).write_bytes(data)


def test_ids_beyond_the_vocabulary_are_refused_even_with_a_valid_seal(
    config: TextConfig, there: Path
) -> None:
    count = len(prepare(config, there).train)
    sealed(there, "train.bin", np.full(count, 400, np.uint16).tobytes())
    with pytest.raises(Damaged, match=r"train\.bin holds the token 400; there are"):
        Corpus.open(there)


def test_facts_that_do_not_fit_the_files_are_refused(config: TextConfig, there: Path) -> None:
    prepare(config, there)
    facts = json.loads((there / "facts.json").read_text())
    for change, says in (
        ({"train_tokens": 7}, r"train\.bin has"),
        ({"vocabulary": facts["vocabulary"] + 1}, r"tokenizer\.json has not as many tokens"),
        ({"train_tokens": "many"}, r"facts\.json does not contain"),
        ({"odd": 1}, r"facts\.json does not contain"),
    ):
        sealed(there, "facts.json", json.dumps({**facts, **change}).encode())
        with pytest.raises(Damaged, match=says):
            Corpus.open(there)
    del facts["split"]
    sealed(there, "facts.json", json.dumps(facts).encode())
    with pytest.raises(Damaged, match=r"facts\.json.*split"):
        Corpus.open(there)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"version": 2}, "newer fenchel"),
        ({"kind": "weights"}, "does not hold token files"),
        ({"recipe": {}}, "does not say how"),
        ({"recipe": "stew"}, "does not say how"),
        ({"source": 3}, "does not say how"),
    ],
)
def test_a_manifest_of_another_kind_or_time_is_refused(
    header: dict[str, Any], says: str, config: TextConfig, there: Path
) -> None:
    prepare(config, there)
    sealed(there, "facts.json", (there / "facts.json").read_bytes(), **header)
    with pytest.raises(ValueError, match=says):
        Corpus.open(there)


def test_files_of_a_newer_version_are_not_replaced(config: TextConfig, there: Path) -> None:
    prepare(config, there)
    sealed(there, "facts.json", b"{}", version=2)
    with pytest.raises(ValueError, match="newer fenchel"):
        prepare(config, there)
    assert (there / "facts.json").read_bytes() == b"{}"


# what cannot be prepared


@pytest.mark.parametrize("text", ["a", "abcdefghi"])
def test_a_text_too_short_to_divide_is_refused(text: str, tmp_path: Path, there: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match="leaves nothing to validate on"):
        prepare(TextConfig(source=str(path)), there)
    assert not there.exists()


def test_a_short_text_gives_its_last_tenth(tmp_path: Path, there: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("abcdefghij" * 10)
    corpus = prepare(TextConfig(source=str(path)), there)
    assert documents(corpus.validation, corpus.tokenizer) == ["abcdefghij"]
    assert corpus.facts.split == "the last 10th of the text is for validation"
    assert corpus.text(validation=False) + corpus.text(validation=True) == b"abcdefghij" * 10


def test_a_tokenizer_that_loses_letters_is_refused(
    tmp_path: Path, there: Path, folder: Path
) -> None:
    lossy = Tokenizer(models.WordLevel({"sea": 0, "[UNK]": 1}, unk_token="[UNK]"))
    lossy.pre_tokenizer = pre_tokenizers.Whitespace()
    lossy.add_special_tokens(["</s>"])
    lossy.save(str(tmp_path / "lossy.json"))
    with pytest.raises(ValueError, match=r"the tokens of '09\.txt' does not give its text back"):
        prepare(TextConfig(source=str(folder), tokenizer=str(tmp_path / "lossy.json")), there)


def test_missing_space_is_reported_before_and_during_the_work(
    config: TextConfig, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_encode", full)
        with pytest.raises(NoSpace, match="full"):
            prepare(config, there)
    monkeypatch.setattr("fenchel.files.shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(NoSpace, match="MiB are needed"):
        prepare(config, there)
    assert list(there.parent.iterdir()) == []
