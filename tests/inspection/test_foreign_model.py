"""fenchel/inspection/foreign_model.py and recorder.py: transformers' own numbers are the law."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.opt.modeling_opt import OPTAttention

from fenchel.attention import Causal, Window
from fenchel.checkpoints import directory, tokenizer
from fenchel.checkpoints.directory import open_directory
from fenchel.checkpoints.tokenizer import read_tokenizer
from fenchel.choice import Entmax
from fenchel.hf import register, unregister
from fenchel.inspection import open_model
from fenchel.inspection.foreign_model import ForeignModel, open_foreign
from fenchel.inspection.trace import ForwardTrace

FOREIGN = ("opt", "phi")
"""Families that our own loader does not read."""
FAMILIES = (*FOREIGN, "distilbert", "gpt2", "mistral", "gemma2", "bert")

Save = Callable[[str], Path]
Eager = Callable[[str], Any]


def opened(folder: Path) -> ForeignModel:
    """By transformers, whatever the family."""
    return open_foreign(open_directory(folder), read_tokenizer(folder))


def read(folder: Path, ids: Tensor) -> ForwardTrace:
    return opened(folder).trace(ids)


@pytest.mark.parametrize("family", FOREIGN)
def test_transformers_reads_what_we_do_not(family: str, save: Save) -> None:
    assert isinstance(open_model(save(family)), ForeignModel)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_read_out_depends_on_the_stream_alone(family: str, save: Save, ids: Tensor) -> None:
    subject = opened(save(family))
    trace, other = subject.trace(ids), subject.trace(ids.flip(1))
    assert trace.lm_head is not None
    assert other.lm_head is not None
    after = other.blocks[-1].output
    torch.testing.assert_close(trace.lm_head(after), other.lm_head(after))
    assert not torch.allclose(trace.lm_head(after), trace.lm_head(trace.blocks[-1].output))


def test_the_read_out_of_one_token_is_that_of_all_of_them(save: Save, ids: Tensor) -> None:
    subject = opened(save("gpt2"))
    trace = subject.trace(ids)
    assert trace.lm_head is not None
    last: Any = subject.model.get_submodule("transformer.h.1")
    after = 1.5 * trace.blocks[-1].output.flip(1)
    whole = subject._ending(ids, [last])(after)
    torch.testing.assert_close(trace.lm_head(after), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_held_block_has_the_value_of_the_block(family: str, save: Save, ids: Tensor) -> None:
    for block in read(save(family), ids).blocks:
        torch.testing.assert_close(block.linearised(block.input), block.output)


def test_grouped_keys_and_windows_arrive_as_such(save: Save, ids: Tensor) -> None:
    call = read(save("mistral"), ids).blocks[0].attention
    assert call.k.shape[1] == 2
    assert call.q.shape[1] == 4
    assert isinstance(call.spec.prior, Window)
    assert isinstance(read(save("gpt2"), ids).blocks[0].attention.spec.prior, Causal)
    assert read(save("bert"), ids).blocks[0].attention.spec.prior is None


def test_norms_and_branches_are_found_inside_the_blocks(save: Save, ids: Tensor) -> None:
    for family, norms in (("gpt2", ("ln_1", "ln_2")), ("llama", 2), ("neox", 2), ("bert", 2)):
        block = read(save(family), ids).blocks[0]
        names = tuple(norm.name for norm in block.norms)
        assert names == norms if isinstance(norms, tuple) else len(names) == norms
        assert block.attention_branch is not None
        assert (block.mlp_branch is None) == (family == "bert")  # its MLP is in two parts
        if block.mlp_branch is not None:  # dropout maps the stream too, to itself
            assert not torch.equal(block.mlp_branch.f(block.mlp_branch.x), block.mlp_branch.x)


def test_a_name_that_a_user_registered_survives_an_inspection(save: Save, ids: Tensor) -> None:
    register("fenchel", Entmax(1.5))
    try:
        before = AttentionInterface()["fenchel"], AttentionMaskInterface()["fenchel"]
        read(save("opt"), ids)
        assert (AttentionInterface()["fenchel"], AttentionMaskInterface()["fenchel"]) == before
        assert before[0].choice == Entmax(1.5)
    finally:
        unregister("fenchel")


def test_a_keyword_that_is_not_known_stops_an_inspection(
    save: Save, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = opened(save("opt"))
    real = OPTAttention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return real(self, *args, **kwargs, tree_mask=torch.ones(1))

    monkeypatch.setattr(OPTAttention, "forward", forward)
    with pytest.raises(ValueError, match="OPTAttention passes tree_mask to its attention"):
        subject.trace(ids)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_settings_and_headers_are_read_once(
    family: str, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By fenchel; transformers reads the files of a family that only it has once more."""
    paths: list[Path] = []

    def counted(read: Callable[..., Any]) -> Callable[..., Any]:
        def reader(path: Path, **options: Any) -> Any:
            paths.append(path)
            return read(path, **options)

        return reader

    folder = save(family)
    for module, name in (
        (directory, "read_json"),
        (directory, "read_header"),
        (tokenizer, "load_tokenizer"),
    ):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    open_model(folder)
    files = ("config.json", "model.safetensors", "tokenizer.json")
    assert sorted(paths) == sorted(folder / name for name in files)


def test_a_map_that_was_attached_is_the_map_that_is_inspected(
    save: Save, ids: Tensor, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(save("opt"), tmp_path / "opt"))
    plain = opened(folder).trace(ids)
    settings = json.loads((folder / "config.json").read_text())
    settings["fenchel"] = {"map": "entmax", "alpha": 1.5, "beta": 2.0}
    (folder / "config.json").write_text(json.dumps(settings))
    subject = opened(folder)
    assert subject.facts()["family"] == "opt, Entmax(alpha=1.5, beta=2.0)"
    trace = subject.trace(ids)
    assert {str(block.attention.spec.choice) for block in trace.blocks} == {
        "Entmax(alpha=1.5, beta=2.0)"
    }
    assert not torch.allclose(trace.blocks[-1].output, plain.blocks[-1].output)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trace_distinguishes_a_decoder_from_an_encoder(
    family: str, save: Callable[[str], Path], ids: Tensor
) -> None:
    assert read(save(family), ids).causal == ("bert" not in family)
