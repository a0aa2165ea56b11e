"""What is not inspected, and the one sentence that says so."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GptOssConfig,
    GptOssForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from fenchel.checkpoints.directory import open_directory
from fenchel.hf import adapter
from fenchel.inspection import inspect, open_model
from fenchel.inspection import run as inspection_run
from fenchel.inspection.foreign_model import ForeignModel

Save = Callable[[str], Path]


@pytest.fixture
def folder(save: Save, tmp_path: Path) -> Path:
    """A copy of the GPT-2 that a test may spoil."""
    return Path(shutil.copytree(save("gpt2"), tmp_path / "gpt2"))


def settings(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def spoil(folder: Path, name: str, value: float) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[3] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_weights_that_are_not_finite(folder: Path) -> None:
    spoil(folder, "transformer.h.1.mlp.c_fc.weight", float("nan"))
    with pytest.raises(ValueError, match=r"h\.1\.mlp\.c_fc\.weight holds 1 values that are not"):
        open_model(folder)


def test_a_family_without_attention_is_refused_before_a_text_is_read(
    save: Save, tmp_path: Path
) -> None:
    path = tmp_path / "mamba"
    settings = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "vocab_size": 300}
    MambaForCausalLM(MambaConfig(**settings)).save_pretrained(path)
    shutil.copy(save("gpt2") / "tokenizer.json", path)
    with pytest.raises(ValueError, match=r"(no attention|does not use the attention registry)"):
        open_model(path)


def test_weights_that_break_down_on_the_text(folder: Path, text: Path) -> None:
    spoil(folder, "transformer.h.0.mlp.c_proj.bias", 3e38)
    spoil(folder, "transformer.h.1.mlp.c_proj.bias", 3e38)
    with pytest.raises(ValueError, match="is not finite on this text"):
        inspect(open_model(folder), str(text), max_tokens=8, blocks=False)


@pytest.mark.parametrize("cut", [0, 5, 2000])
def test_a_file_that_is_cut_short(folder: Path, cut: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"is not a safetensors file|it is not whole"):
        open_model(folder)


def test_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickle"):
        open_model(folder)


def test_code_of_its_own(folder: Path) -> None:
    settings(folder, auto_map={"AutoModel": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit('this ran')")
    with pytest.warns(UserWarning, match="its own code"):
        open_model(folder)


def test_an_unknown_family_is_refused(folder: Path) -> None:
    settings(folder, model_type="gpt17")
    with pytest.raises(ValueError, match="has no family 'gpt17'"):
        open_model(folder)


def test_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json"):
        open_model(folder)


def test_settings_that_need_more_than_the_weights_hold(folder: Path) -> None:
    settings(folder, n_layer=3)
    with pytest.raises(ValueError, match=r"lacks transformer\.h\.2"):
        open_model(folder)
    settings(folder, n_layer=10**9)
    with pytest.raises(ValueError, match="n_layer=1000000000"):
        open_model(folder)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"n_embd": "wide"}, "n_embd='wide' should be a whole number"),
        ({"n_embd": -5}, "n_embd=-5 should be"),
        ({"n_head": 0}, "n_head=0 should be"),
        ({"vocab_size": 10**15}, "vocab_size=1000000000000000 should be"),
        ({"vocab_size": True}, "vocab_size=True should be"),
        ({"n_layer": True}, "n_layer=True"),
        ({"n_layer": [2]}, r"n_layer=\[2\]"),
    ],
)
def test_invalid_sizes_are_refused_before_anything_is_read(
    folder: Path, wrong: dict[str, object], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reader in ("open_known", "open_foreign"):
        monkeypatch.setattr(inspection_run, reader, None)
    settings(folder, **wrong)
    with pytest.raises(ValueError, match=sentence):
        open_model(folder)


def test_where_no_loader_can_read_it_our_reason_is_given(folder: Path) -> None:
    settings(folder, activation_function="nobody's")
    with pytest.raises(ValueError, match=r'activation_function="nobody.s" should be one of'):
        open_model(folder)
    settings(folder, activation_function="gelu_new", n_positions=10**12)
    with pytest.raises(ValueError, match="n_positions=1000000000000 should be"):
        open_model(folder)


def test_settings_of_another_width(folder: Path) -> None:
    settings(folder, n_embd=48)
    with pytest.raises(ValueError, match="its settings require"):
        open_model(folder)


def test_an_index_that_names_files_elsewhere(folder: Path) -> None:
    index = {"weight_map": {"a": "../../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    open_directory(folder)  # nothing reads an index beside the whole
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="plain names of files in the directory"):
        open_directory(folder)


def test_a_family_with_sinks_is_read(save: Save, tmp_path: Path, text: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    config = GptOssConfig(**sizes, **heads, vocab_size=300, num_experts_per_tok=1)
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    shutil.copy(save("gpt2") / "tokenizer.json", tmp_path)
    found = inspect(open_model(tmp_path), str(text), max_tokens=8)
    assert all(0.0 < head.not_taken < 1.0 for head in found.heads)
    assert found.subject["causal"]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (
            "FalconForCausalLM",
            {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        ),
        ("GPTJForCausalLM", {"n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4}),
    ],
)
def test_a_family_with_an_attention_of_its_own(
    save: Save, tmp_path: Path, text: Path, kind: str, sizes: dict[str, int]
) -> None:
    made = getattr(transformers, kind)
    made(made.config_class(**sizes, vocab_size=300)).save_pretrained(tmp_path)
    shutil.copy(save("gpt2") / "tokenizer.json", tmp_path)
    with pytest.raises(ValueError, match="does not use the attention registry"):
        inspect(open_model(tmp_path), str(text), max_tokens=8)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_ids_beyond_the_vocabulary_are_refused(save: Save, family: str) -> None:
    with pytest.raises(ValueError, match="gives the id 300 and the model has 300"):
        open_model(save(family)).trace(torch.tensor([[1, 300]]))


@pytest.mark.parametrize(
    ("family", "sentence"), [("gpt2", "the model reads 48"), ("opt", "cannot read this text")]
)
def test_positions_that_the_model_does_not_have(save: Save, family: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        open_model(save(family)).trace(torch.ones(1, 60, dtype=torch.int64))


def test_an_encoder_with_a_decoder(save: Save, tmp_path: Path) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(**sizes, vocab_size=300)).save_pretrained(tmp_path)
    shutil.copy(save("gpt2") / "tokenizer.json", tmp_path)
    with pytest.raises(ValueError, match="an encoder and a decoder"):
        open_model(tmp_path)


def test_a_family_of_transformers_without_transformers(
    save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save("opt")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"'opt' is read through .* pip install 'fenchel\[hf\]'"):
        open_model(folder)


def test_a_setting_that_ours_does_not_have_is_left_to_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(folder, scale_attn_by_inverse_layer_idx=True)
    assert isinstance(open_model(folder), ForeignModel)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"scale_attn_by_inverse_layer_idx=True.*fenchel\[hf\]"):
        open_model(folder)


def test_a_head_that_ours_does_not_have_is_left_to_transformers(
    save: Save, tmp_path: Path, ids: torch.Tensor
) -> None:
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 48, "vocab_size": 300}
    GPT2ForSequenceClassification(GPT2Config(**sizes)).save_pretrained(tmp_path)
    shutil.copy(save("gpt2") / "tokenizer.json", tmp_path)
    subject = open_model(tmp_path)
    assert isinstance(subject, ForeignModel)
    assert subject.trace(ids).lm_head is None


def renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("h.1.ln_2", "h.1.ln_3"): x for name, x in weights.items()}


def cut(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return weights | {"transformer.wpe.weight": weights["transformer.wpe.weight"][:40].clone()}


def strange(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return weights | {"extra": torch.ones(3)}


@pytest.mark.parametrize("spoilt", [renamed, cut, strange])
def test_wrong_weights_are_not_passed_to_transformers(
    folder: Path,
    spoilt: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked(*found: object) -> None:
        raise AssertionError(found)

    monkeypatch.setattr(inspection_run, "open_foreign", asked)
    weights = load_file(folder / "model.safetensors")
    save_file(spoilt(weights), folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="its settings"):
        open_model(folder)


def test_links_out_of_the_directory_are_not_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(ValueError, match=r"symbolic link.*\(cp -rL\)"):
        open_model(folder)


def test_attention_that_is_not_what_the_model_does_itself(
    save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = adapter.attend
    monkeypatch.setattr(adapter, "attend", lambda *a, **k: 1.01 * real(*a, **k))
    with pytest.raises(ValueError, match="does more in its attention"):
        open_model(save("opt")).trace(torch.arange(3, 20)[None])


def test_a_folder_of_neither_kind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a run directory"):
        open_model(tmp_path)
    with pytest.raises(ValueError, match="no directory"):
        open_model(tmp_path / "nowhere")


def test_a_block_with_several_streams_is_refused_in_a_sentence(save: Save, ids: Tensor) -> None:
    with pytest.raises(ValueError, match=r"takes a tensor of \(4, 1, \d+, 24\) and not one stream"):
        open_model(save("gemma3n")).trace(ids)
