"""Tokenizers of other families beside their weights: read here, and the same in transformers."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from fenchel.checkpoints import convert, load, read_generation_config, save
from fenchel.checkpoints.directory import open_directory
from fenchel.checkpoints.hf_export import write_copy
from fenchel.checkpoints.tokenizer import end_ids
from fenchel.data import TextTokenizer
from fenchel.model.families.family import resolved
from tests.model.families.conftest import SAMPLING, TEMPLATE, add, distinctive, special_ids

TEXTS = ["the people of these States have peace", "and trade with every nation"] * 5


def word_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=70, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


@pytest.mark.parametrize(("name", "make"), [("bert", word_pieces), ("t5", unigram)])
def test_a_tokenizer_goes_in_and_out_with_its_model(
    name: str,
    make: Callable[[], Tokenizer],
    written: Callable[..., Path],
    reload: Callable[..., Any],
    tmp_path: Path,
) -> None:
    path = written(name)
    made = make()
    made.save(str(path / "tokenizer.json"))
    add(path, "config.json", eos_token_id=TextTokenizer(made).end_id)
    add(path, "generation_config.json", eos_token_id=TextTokenizer(made).end_id)
    model, tokenizer, _ = load(path)
    save(model, tokenizer, tmp_path / "ours")
    reload(tmp_path / "ours", name)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "ours")
    text = "trade with these people"
    assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
    assert theirs.eos_token_id == tokenizer.end_id
    assert read_generation_config(tmp_path / "ours").eos == (tokenizer.end_id,)


WAYS = ("save", "save in another dtype", "convert", "attach")


@pytest.mark.parametrize("way", WAYS)
def test_a_directory_keeps_everything_beside_its_weights(
    name: str, way: str, written: Callable[..., Path], reload: Callable[..., Any], tmp_path: Path
) -> None:
    path, out = written(name), tmp_path / "out"
    distinctive(path, template=name != "llama tied, with biases")
    dtype = torch.bfloat16 if way == "save in another dtype" else torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if way == "convert":
            convert(path, out)
        elif way == "attach":
            record = {"map": "entmax", "beta": 2.0}  # alpha is left to its default
            write_copy(open_directory(path), out, {"fenchel": record})
        else:
            model, tokenizer, _ = load(path)
            save(model, tokenizer, out, dtype=dtype)
    theirs = reload(out, name)
    assert theirs.dtype == dtype
    ids = special_ids(path)
    assert {key: getattr(theirs.config, key) for key in ids} == ids
    assert theirs.config.model_type == json.loads((path / "config.json").read_text())["model_type"]
    generation = transformers.GenerationConfig.from_pretrained(out).to_dict()
    for key, value in (ids | SAMPLING).items():
        assert generation[key] == value
    before, after = (
        transformers.PreTrainedTokenizerFast.from_pretrained(folder) for folder in (path, out)
    )
    for key in ("bos_token", "eos_token", "pad_token", "chat_template"):
        assert getattr(after, key) == getattr(before, key)
    assert after.chat_template == TEMPLATE
    begin = [] if name == "llama tied, with biases" else [11]
    assert after("w3 w4")["input_ids"] == before("w3 w4")["input_ids"] == [*begin, 3, 4]
    assert load(out).tokenizer.begin_ids == begin
    assert end_ids(out, load(out).tokenizer) == (12,)
    if way == "attach":
        again = tmp_path / "again"
        model, tokenizer, config = load(out)
        assert (config.choice, config.entmax_alpha, config.beta) == ("entmax", 1.5, 2.0)
        save(model, tokenizer, again)
        assert resolved(load(again).config) == resolved(config)
        convert(out, tmp_path / "recast", dtype=torch.float16)
        assert resolved(load(tmp_path / "recast").config) == resolved(config)


def test_another_tokenizer_gives_ids_of_its_own(
    written: Callable[..., Path], tmp_path: Path
) -> None:
    path = written("llama")
    distinctive(path, template=True)
    add(path, "config.json", bos_token_id=68)
    model = load(path).model
    save(model, unigram(), tmp_path / "out")
    found = read_generation_config(tmp_path / "out")
    assert (found.eos, found.pad) == ((1,), 0)
