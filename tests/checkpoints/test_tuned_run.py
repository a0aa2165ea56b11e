"""fenchel/checkpoints/tuned_run.py: what a run records of the checkpoint that it tunes."""

from pathlib import Path

import pytest
import torch

from fenchel.checkpoints.tuned_run import TunedCheckpoint, read_base, weights_sha256, write_base
from fenchel.files import Damaged, committed
from fenchel.model import ModelConfig, Transformer
from fenchel.model.lora import LoraConfig

CONFIG = ModelConfig(vocabulary=20, context=8, width=8, heads=1, layers=1)


def model() -> Transformer:
    return Transformer(CONFIG, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, alpha=3.0, targets=("q", "out"))])
def test_a_record_is_read_as_it_was_written(lora: LoraConfig | None, tmp_path: Path) -> None:
    assert read_base(tmp_path) is None
    record = TunedCheckpoint(Path("/elsewhere"), weights_sha256(model()), True, lora)
    write_base(tmp_path, record, {"tokenizer.json": b"{}"})
    assert read_base(tmp_path) == record
    write_base(tmp_path, record._replace(conversations=False), {})
    assert read_base(tmp_path) == record._replace(conversations=False)
    assert not (tmp_path / "base" / "tokenizer.json").exists()


def test_one_number_more_or_less_is_another_checkpoint() -> None:
    record = TunedCheckpoint(Path("/elsewhere"), weights_sha256(model()), False, None)
    record.require_same(model())
    other = model()
    with torch.no_grad():
        other.embed.weight[3, 1] += 1e-6
    for wrong in (other, model().double()):
        with pytest.raises(ValueError, match="other weights"):
            record.require_same(wrong)


def test_an_incomplete_record_is_damaged(tmp_path: Path) -> None:
    with committed(tmp_path / "base", {"checkpoint": 3}):
        pass
    with pytest.raises(Damaged, match="name the checkpoint"):
        read_base(tmp_path)
