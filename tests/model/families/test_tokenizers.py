"""Tokenizers of other families beside their weights: read here, and the same in transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from fenchel.checkpoints import load, read_generation_config, save
from fenchel.data import encode, end_id

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
    make().save(str(path / "tokenizer.json"))
    model, tokenizer, _ = load(path)
    save(model, tokenizer, tmp_path / "ours")
    reload(tmp_path / "ours", name)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "ours")
    text = "trade with these people"
    assert theirs(text, add_special_tokens=False)["input_ids"] == encode(tokenizer, text)
    assert theirs.eos_token_id == end_id(tokenizer)
    assert read_generation_config(tmp_path / "ours").eos == (end_id(tokenizer),)
