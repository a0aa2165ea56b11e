"""fenchel/inspection/foreign_model.py and recorder.py: transformers' own numbers are the law."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fenchel.attention import Causal, Dense, Window
from fenchel.checkpoints.hf_check import look_at
from fenchel.inspection import Reading, open_subject
from fenchel.inspection.foreign_model import ForeignModel, open_foreign, prior_of

FOREIGN = ("opt", "phi", "distilbert")
"""Families that our own loader does not read."""
FAMILIES = (*FOREIGN, "gpt2", "mistral", "gemma2", "bert")

Save = Callable[[str], Path]
Eager = Callable[[str], Any]


def opened(folder: Path) -> ForeignModel:
    """By transformers, whatever the family."""
    found = look_at(folder)
    assert found is not None
    return open_foreign(found)


def read(folder: Path, ids: Tensor) -> Reading:
    return opened(folder).read(ids)


@pytest.mark.parametrize("family", FOREIGN)
def test_transformers_reads_what_we_do_not(family: str, save: Save) -> None:
    assert isinstance(open_subject(save(family)), ForeignModel)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_read_out_depends_on_the_stream_alone(family: str, save: Save, ids: Tensor) -> None:
    subject = opened(save(family))
    reading, other = subject.read(ids), subject.read(ids.flip(1))
    assert reading.read_out is not None
    assert other.read_out is not None
    after = other.passages[-1].after
    torch.testing.assert_close(reading.read_out(after), other.read_out(after))
    assert not torch.allclose(reading.read_out(after), reading.read_out(reading.passages[-1].after))


def test_the_read_out_of_one_token_is_that_of_all_of_them(save: Save, ids: Tensor) -> None:
    subject = opened(save("gpt2"))
    reading = subject.read(ids)
    assert reading.read_out is not None
    last: Any = subject.model.get_submodule("transformer.h.1")
    after = 1.5 * reading.passages[-1].after.flip(1)
    whole = subject._ending(ids, [last])(after)
    torch.testing.assert_close(reading.read_out(after), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_held_block_has_the_value_of_the_block(family: str, save: Save, ids: Tensor) -> None:
    for passage in read(save(family), ids).passages:
        torch.testing.assert_close(passage.near(passage.before), passage.after)


def test_grouped_keys_and_windows_arrive_as_such(save: Save, ids: Tensor) -> None:
    call = read(save("mistral"), ids).passages[0].attention
    assert call.k.shape[1] == 2
    assert call.q.shape[1] == 4
    assert isinstance(call.prior, Window)
    assert isinstance(read(save("gpt2"), ids).passages[0].attention.prior, Causal)
    assert read(save("bert"), ids).passages[0].attention.prior is None


def test_norms_and_branches_are_found_inside_the_blocks(save: Save, ids: Tensor) -> None:
    for family, norms in (("gpt2", ("ln_1", "ln_2")), ("llama", 2), ("neox", 2), ("bert", 2)):
        passage = read(save(family), ids).passages[0]
        names = tuple(norm.name for norm in passage.norms)
        assert names == norms if isinstance(norms, tuple) else len(names) == norms
        assert passage.attending is not None
        assert (passage.thinking is None) == (family == "bert")  # its MLP is in two parts
        if passage.thinking is not None:  # dropout maps the stream too, to itself
            assert not torch.equal(passage.thinking.f(passage.thinking.x), passage.thinking.x)


def test_a_mask_is_known_by_its_name_or_kept_entry_by_entry() -> None:
    places = torch.arange(5)
    causal = (places[:, None] >= places)[None, None]
    near = causal & (places[:, None] - places < 3)
    assert prior_of(None, causal=True) == Causal()
    assert prior_of(None, causal=False) is None
    assert prior_of(causal, causal=True) == Causal()
    assert prior_of(near, causal=True, window=3) == Window(2, 0)
    assert prior_of(torch.ones_like(causal), causal=False) is None
    holes = causal.clone()
    holes[..., 3, 1] = False
    assert isinstance(prior_of(holes, causal=True), Dense)
    added = torch.where(causal, 0.0, torch.finfo(torch.float32).min)
    assert prior_of(added, causal=True) == Causal()
    biased = prior_of(added + 0.5 * causal, causal=True)
    assert isinstance(biased, Dense)
    assert float(biased.log_prior[0, 0, 0, 1]) == -torch.inf
