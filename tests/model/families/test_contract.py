"""Laws of every family: transformers and fenchel compute the same, whoever wrote the files.

A family joins by one line in conftest.py. Logits are of order 1; float32 rounding in both
leaves differences near 1e-6, and 1e-4 is what is promised.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fenchel.generate import generate
from fenchel.model import load_model, save

IDS = torch.randint(3, 70, (3, 13), generator=torch.Generator().manual_seed(0))


def ours(path: Path) -> Any:
    """Loaded without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_model(path)


def test_their_files_loaded_here_give_their_logits(
    decoder: str, foreign: Callable[[str], Any], written: Callable[..., Path]
) -> None:
    with torch.no_grad():
        theirs, mine = foreign(decoder)(IDS).logits, ours(written(decoder))(IDS)
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)
    assert theirs.std() > 0.1


def test_our_files_loaded_there_give_our_logits(
    decoder: str, written: Callable[..., Path], reload: Callable[[Path], Any], tmp_path: Path
) -> None:
    model = ours(written(decoder))
    save(model, None, tmp_path / "ours")
    with torch.no_grad():
        torch.testing.assert_close(
            reload(tmp_path / "ours")(IDS).logits, model(IDS), atol=1e-4, rtol=0
        )


def test_in_and_out_again_is_the_same_bit_for_bit(
    decoder: str, written: Callable[..., Path], tmp_path: Path
) -> None:
    path = written(decoder)
    save(load_model(path), None, tmp_path / "ours")
    before = load_file(path / "model.safetensors")
    after = load_file(tmp_path / "ours" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_greedy_generation_agrees_token_for_token(
    decoder: str, foreign: Callable[[str], Any], written: Callable[..., Path]
) -> None:
    theirs = foreign(decoder).generate(
        IDS, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    mine = generate(ours(written(decoder)), IDS, max_new_tokens=12, temperature=0.0)
    assert mine.tolist() == theirs.tolist()
