"""fenchel attach on a small Llama that plain transformers wrote."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer

from fenchel.cli import main
from fenchel.data import train_tokenizer

LINE = "the people of these States have peace and trade with every nation. "
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tokenizer = train_tokenizer([LINE], 290)
    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = hf.LlamaConfig(vocab_size=tokenizer.get_vocab_size(), **SIZES)
    model = hf.LlamaForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5.0) if p.dim() > 1 else p
    model.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "speech.txt"
    path.write_text(LINE * 12)
    return path


def told(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_proof_is_printed(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["attach", str(checkpoint), "--map", "entmax", "--alpha", "1.25"]
    found = told(words, capsys)
    assert found["map"] == {"map": "entmax", "alpha": 1.25, "beta": 1.0}
    assert [layer["name"] for layer in found["layers"]] == [
        f"model.layers.{i}.self_attn" for i in range(3)
    ]
    assert found["calls"] == 3
    assert found["masks"] == ["causal"]
    assert max(found["softmax_difference"], found["leak"]) <= found["tolerance"] < found["change"]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "     3  LlamaAttention           1  causal" in shown.out
    assert f"{found['softmax_difference']:.1e}" in shown.out
    assert shown.err == ""


def test_the_losses_are_those_of_the_model(
    checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All targets of a short text in one window, against transformers' own loss."""
    words = ["attach", str(checkpoint), "--text", str(text), "--tokens", "63", "--map"]
    same, other = (told([*words, name], capsys)["text"] for name in ("softmax", "sparsemax"))
    assert same["softmax"]["loss"] == pytest.approx(same["eager"]["loss"], rel=1e-5)
    assert other["eager"] == same["eager"]
    assert abs(other["sparsemax"]["loss"] - other["eager"]["loss"]) > 1e-3
    model = hf.LlamaForCausalLM.from_pretrained(checkpoint)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = torch.tensor([[0, *tokenizer.encode(LINE * 12).ids][:64]])
    with torch.no_grad():
        direct = float(model(ids, labels=ids).loss)
    assert same["eager"]["tokens"] == 63
    assert same["eager"]["loss"] == pytest.approx(direct, rel=1e-4)


def test_what_is_saved_remembers_its_map(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sparse"
    words = ["--text", str(text), "--tokens", "40"]
    first = told(
        ["attach", str(checkpoint), "--map", "entmax", "--beta", "2", "--out", str(out), *words],
        capsys,
    )
    again = told(["attach", str(out), *words], capsys)
    assert again["map"] == first["map"] == {"map": "entmax", "alpha": 1.5, "beta": 2.0}
    assert again["text"]["entmax"] == pytest.approx(first["text"]["entmax"])
    assert main(["attach", str(checkpoint), "--map", "hard", "--out", str(out)]) == 2
    assert "exists and is left alone" in capsys.readouterr().err


def broken(checkpoint: Path, to: Path, **changes: Any) -> Path:
    shutil.copytree(checkpoint, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **changes}))
    return to


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["pipeline"]}, "names no architecture"),
        ({"architectures": "LlamaForCausalLM"}, "names no architecture"),
        ({"num_hidden_layers": 4}, "lacks 9 tensors"),
        ({"fenchel": {"map": "entmax", "alpha": "big"}}, "alpha as a number"),
        ({}, "name one with --map"),
    ],
)
def test_a_checkpoint_that_is_wrong_gets_a_sentence(
    changes: dict[str, Any],
    says: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["attach", str(broken(checkpoint, tmp_path / "broken", **changes))]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fenchel: ")
    assert error.count("\n") == 1
    assert says in error


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--map", "softmix"], "did you mean 'softmax'"),
        (["--map", "softmax", "--alpha", "2"], "--alpha is for --map entmax"),
        (["--map", "hard", "--beta", "2"], "--beta is for --map softmax"),
        (["--beta", "2"], "--beta is for --map softmax"),
    ],
)
def test_wrong_words_get_a_sentence(
    words: list[str], says: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attach", str(checkpoint), *words]) == 2
    assert says in capsys.readouterr().err


def test_other_weights_and_other_folders_are_not_read(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attach", str(tmp_path), "--map", "entmax"]) == 2
    assert "no config.json" in capsys.readouterr().err
    folder = tmp_path / "pickled"
    shutil.copytree(checkpoint, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert main(["attach", str(folder), "--map", "entmax"]) == 2
    assert "pickle" in capsys.readouterr().err
    (folder / "model.safetensors").write_bytes(b"not weights")
    assert main(["attach", str(folder), "--map", "entmax"]) == 2
    assert "not a safetensors file" in capsys.readouterr().err


def test_a_model_without_the_registry_or_a_next_token_is_refused(
    text: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"vocab_size": 300, "hidden_size": 32}
    hf.BloomForCausalLM(hf.BloomConfig(**sizes, n_layer=2, n_head=4)).save_pretrained(
        tmp_path / "bloom"
    )
    assert main(["attach", str(tmp_path / "bloom"), "--map", "entmax"]) == 2
    assert "does not use the attention registry" in capsys.readouterr().err
    config = hf.BertConfig(
        **sizes, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32
    )
    hf.BertModel(config).save_pretrained(tmp_path / "bert")
    assert told(["attach", str(tmp_path / "bert"), "--map", "entmax"], capsys)["masks"] == ["none"]
    shutil.copyfile(checkpoint / "tokenizer.json", tmp_path / "bert" / "tokenizer.json")
    assert main(["attach", str(tmp_path / "bert"), "--map", "entmax", "--text", str(text)]) == 2
    assert "does not predict the next token" in capsys.readouterr().err
