"""checkpoints/hf_export.py: a directory is there whole or not at all."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fenchel.checkpoints import convert, load, load_model, save
from fenchel.checkpoints.directory import open_directory
from fenchel.checkpoints.hf_export import write_copy
from fenchel.data import TextTokenizer, train_tokenizer
from fenchel.files import Notice, verify
from fenchel.model import ModelConfig, Transformer

SIZES = {"vocabulary": 300, "context": 16, "width": 24, "layers": 2, "heads": 4, "kv_heads": 2}


def model_of(**changes: Any) -> Transformer:
    generator = torch.Generator().manual_seed(0)
    model = Transformer(ModelConfig(**{**SIZES, **changes}), generator=generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_tokenizer(["some words"], 300)


def test_what_was_saved_is_loaded_bit_for_bit(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    model = model_of()
    save(model, tokenizer, tmp_path / "out")
    loaded = load(tmp_path / "out")
    assert loaded.tokenizer.to_str() == tokenizer.to_str()
    for name, given in (("again", loaded.tokenizer), ("library", loaded.tokenizer.library)):
        save(loaded.model, given, tmp_path / name)
        assert load(tmp_path / name).tokenizer.to_str() == tokenizer.to_str()
    weights = loaded.model.state_dict()
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())


def test_a_copy_names_the_files_that_it_leaves_out(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save(model_of(), None, source)
    for name in ("modules.json", "sentence_bert_config.json", "README.md", "LICENSE", ".hidden"):
        (source / name).write_text("{}")
    (source / "1_Pooling").mkdir()
    left = "1_Pooling, modules.json, sentence_bert_config.json are not copied"
    with pytest.warns(Notice, match=left):
        convert(source, tmp_path / "converted")
    with pytest.warns(Notice, match=left):
        write_copy(open_directory(source), tmp_path / "attached", {})


def test_large_weights_are_written_in_shards_that_load_alike(tmp_path: Path) -> None:
    model = model_of(tied=False)
    save(model, None, tmp_path / "out", shard=20_000)
    shards = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    weights = load_model(tmp_path / "out").state_dict()
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())


def test_the_directory_is_sealed(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    save(model_of(), tokenizer, tmp_path / "out")
    assert verify(tmp_path / "out")["files"].keys() == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"choice": "entmax"}, "choice="),
        ({"layer_choices": ("softmax", "sparsemax")}, "choice="),
        ({"positions": "sinusoidal"}, "positions='sinusoidal'"),
        ({"sinks": True}, "sinks=True"),
        ({"gate": "head"}, "gate='head'"),
        ({"gate": "element"}, "qwen3_5_text, has no norm_plus_one=False"),
        ({"rotary_layout": "pairs"}, "rotary_layout='pairs'"),
        ({"residual_scale": "depth", "qk_norm": True}, "qk_norm=True"),
        ({"scores": "l2", "kv_heads": None}, "scores='l2'"),
        ({"rotary_scaling": "ntk", "rotary_factor": 2.0}, "rotary_scaling='ntk'"),
        ({"experts": 3, "hidden": 8}, "qwen3_moe, has no qk_norm=False"),
        ({"windows": (4, 6)}, "windows="),
    ],
)
def test_a_model_that_no_family_can_express_is_refused_and_nothing_written(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="no Hugging Face family can express") as refusal:
        save(model_of(**changes), None, tmp_path / "out")
    assert says in str(refusal.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "llama"),
        ({"bias": True, "tied": False}, "llama"),
        ({"head_size": 10}, "llama"),
        ({"width": 26, "head_size": 10}, "mistral"),
        ({"windows": (5,)}, "mistral"),
        ({"residual_scale": "depth"}, "granite"),
        ({"qkv_bias": True}, "qwen2"),
        ({"qk_norm": True, "windows": (5, 0)}, "qwen3"),
        (
            {"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True, "kv_heads": 4},
            "gpt2",
        ),
        ({"norm": "layer", "mlp": "gelu", "bias": True, "kv_heads": 4}, "gpt_neox"),
        ({"choice": "softmax", "dropout": 0.3, "initial": "xavier"}, "llama"),
    ],
)
def test_the_first_family_that_expresses_the_model_is_used(
    changes: dict[str, Any], family: str, tmp_path: Path
) -> None:
    model = model_of(**changes)
    save(model, None, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == family
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "out")(ids), model(ids))


def test_a_reparametrised_map_is_saved_as_the_matrix_it_is(tmp_path: Path) -> None:
    model = model_of(sigma_reparam=True)
    save(model, None, tmp_path / "out")
    loaded, ids = load_model(tmp_path / "out"), torch.arange(12)[None]
    assert not loaded.config.sigma_reparam
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids), model(ids), atol=1e-5, rtol=0)


def test_a_dtype_too_narrow_for_the_weights_is_refused(tmp_path: Path) -> None:
    model = model_of()
    with torch.no_grad():
        model.embed.weight[3, 4] = 1e5
    with pytest.raises(ValueError, match=r"embed_tokens\.weight.*not finite as torch\.float16"):
        save(model, None, tmp_path / "out", dtype=torch.float16)
    assert not list(tmp_path.iterdir())
    save(model, None, tmp_path / "out", dtype=torch.bfloat16)
    kinds = {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()}
    assert kinds == {torch.bfloat16}


def test_an_empty_directory_may_be_filled_and_a_file_may_not(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    save(model_of(), None, tmp_path / "out")
    with pytest.raises(ValueError, match="not empty"):
        save(model_of(), None, tmp_path / "out")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a file"):
        save(model_of(), None, tmp_path / "file", overwrite=True)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(model_of(), None, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(import_module("fenchel.checkpoints.hf_export"), "save_file", full)
    with pytest.raises(OSError, match="space"):
        save(model_of(tied=False), None, tmp_path / "out", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_without_a_tokenizer_load_names_load_model(tmp_path: Path) -> None:
    save(model_of(), None, tmp_path / "out")
    with pytest.raises(ValueError, match=r"no tokenizer\.json; .*fenchel\.checkpoints\.load_model"):
        load(tmp_path / "out")
