"""fenchel/inspection/hugging_face.py and recorder.py: transformers' own numbers are the law."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from fenchel.attention import Causal, Dense, Window
from fenchel.inspection import Reading, Subject, open_subject
from fenchel.inspection.hugging_face import HuggingFace, prior_of
from fenchel.inspection.rows import rows, weights

FAMILIES = ("gpt2", "llama", "mistral", "qwen3", "neox", "bert")
IDS = torch.arange(3, 33)[None] * 7 % 300


def eager(folder: Path) -> tuple[Tensor, ...]:
    """(L, H, T, T) of transformers itself, with its streams and logits."""
    kind = AutoModelForMaskedLM if folder.name == "bert" else AutoModelForCausalLM
    model = kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        out = model(input_ids=IDS, output_attentions=True, output_hidden_states=True)
    return torch.stack(out.attentions)[:, 0], out.hidden_states, out.logits[0, -1]


def opened(folder: Path) -> tuple[Subject, Reading]:
    subject = open_subject(folder)
    return subject, subject.read(IDS)


@pytest.mark.parametrize("family", FAMILIES)
def test_maps_and_entropies_are_those_of_eager_attention(
    family: str, save: Callable[[str], Path]
) -> None:
    theirs, *_ = eager(save(family))
    _, reading = opened(save(family))
    ours = torch.stack([weights(p.attention, IDS.shape[1]) for p in reading.passages])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    entropy = torch.stack([rows(p.attention).entropy for p in reading.passages])
    wanted = torch.special.entr(theirs.double()).sum(-1)
    torch.testing.assert_close(entropy.double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_streams_and_logits_are_those_of_the_model(
    family: str, save: Callable[[str], Path]
) -> None:
    _, streams, logits = eager(save(family))
    _, reading = opened(save(family))
    for passage, before in zip(reading.passages, streams, strict=False):
        torch.testing.assert_close(passage.before, before, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(passage.block(passage.before), passage.after)
    assert reading.read_out is not None
    again = reading.read_out(reading.passages[-1].after)
    torch.testing.assert_close(again, logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_read_out_depends_on_the_stream_alone(family: str, save: Callable[[str], Path]) -> None:
    subject, reading = opened(save(family))
    other = subject.read(IDS.flip(1))
    assert reading.read_out is not None
    assert other.read_out is not None
    after = other.passages[-1].after
    torch.testing.assert_close(reading.read_out(after), other.read_out(after))
    assert not torch.allclose(reading.read_out(after), reading.read_out(reading.passages[-1].after))


def test_the_read_out_of_one_token_is_that_of_all_of_them(save: Callable[[str], Path]) -> None:
    subject, reading = opened(save("gpt2"))
    assert isinstance(subject, HuggingFace)
    assert reading.read_out is not None
    last: Any = subject.model.get_submodule("transformer.h.1")
    after = 1.5 * reading.passages[-1].after.flip(1)
    whole = subject._ending(IDS, [last])(after)
    torch.testing.assert_close(reading.read_out(after), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_held_block_has_the_value_of_the_block(family: str, save: Callable[[str], Path]) -> None:
    _, reading = opened(save(family))
    for passage in reading.passages:
        torch.testing.assert_close(passage.near(passage.before), passage.after)


def test_grouped_keys_and_windows_arrive_as_such(save: Callable[[str], Path]) -> None:
    call = opened(save("mistral"))[1].passages[0].attention
    assert call.k.shape[1] == 2
    assert call.q.shape[1] == 4
    assert isinstance(call.prior, Window)
    assert isinstance(opened(save("gpt2"))[1].passages[0].attention.prior, Causal)
    assert opened(save("bert"))[1].passages[0].attention.prior is None


def test_norms_and_branches_are_found_inside_the_blocks(save: Callable[[str], Path]) -> None:
    for family, norms in (("gpt2", ("ln_1", "ln_2")), ("llama", 2), ("neox", 2), ("bert", 2)):
        passage = opened(save(family))[1].passages[0]
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
