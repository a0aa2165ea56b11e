"""fenchel attach on a small Llama that plain transformers wrote."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from fenchel.cli import main
from fenchel.cli.attach import _require_next_token
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
    config = hf.LlamaConfig(vocab_size=tokenizer.vocabulary_size, **SIZES)
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
    ids = torch.tensor([tokenizer.encode(LINE * 12).ids[:64]])
    with torch.no_grad():
        direct = float(model(ids, labels=ids).loss)
    assert same["eager"]["tokens"] == 63
    assert same["eager"]["loss"] == pytest.approx(direct, rel=1e-4)


def test_a_saved_checkpoint_keeps_its_map(
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
    assert "exists and is not overwritten" in capsys.readouterr().err


def test_what_is_saved_is_the_same_checkpoint(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights in their own dtype, template and generation settings; sealed by a manifest."""
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(checkpoint, source)
    weights = {
        name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()
    }
    save_file(weights, source / "model.safetensors")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "generation_config.json").write_text('{"bos_token_id": 7, "top_p": 3}')
    assert main(["attach", str(source), "--map", "entmax", "--out", str(out)]) == 0
    written = load_file(out / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    assert written["lm_head.weight"].dtype == torch.bfloat16
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    (out / "chat_template.jinja").write_text("{{ message }}")
    capsys.readouterr()
    assert main(["attach", str(out)]) == 2
    assert "chat_template.jinja has" in capsys.readouterr().err


def test_nothing_outside_the_directory_is_read_or_copied(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(checkpoint, outside)

    def refused(change: Callable[[Path], object]) -> str:
        folder, out = tmp_path / "hostile", tmp_path / "out"
        shutil.copytree(checkpoint, folder)
        change(folder)
        words = ["attach", str(folder), "--map", "entmax", "--out", str(out)]
        assert main(words) == 2
        assert not out.exists()
        assert not list(tmp_path.glob("out.tmp-*"))
        shutil.rmtree(folder)
        return capsys.readouterr().err

    def link(name: str, target: Path) -> Callable[[Path], None]:
        def change(folder: Path) -> None:
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(target)

        return change

    def index(name: str) -> Callable[[Path], None]:
        def change(folder: Path) -> None:
            (folder / "model.safetensors").unlink()
            tensors = load_file(outside / "model.safetensors")
            (folder / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": dict.fromkeys(tensors, name)})
            )

        return change

    weights = outside / "model.safetensors"
    assert "symbolic link" in refused(link("model.safetensors", weights))
    assert "symbolic link" in refused(link("tokenizer_config.json", Path("/etc/hostname")))
    assert "symbolic link" in refused(link("chat_template.jinja", Path("/proc/self/mem")))
    assert "plain names" in refused(index("../outside/model.safetensors"))
    assert "plain names" in refused(index(str(weights)))

    def sparse(folder: Path) -> None:
        with (folder / "special_tokens_map.json").open("wb") as file:
            file.truncate(2**38)

    assert "is not read" in refused(sparse)
    assert "has no place" not in refused(lambda f: (f / "vocab.txt").mkdir())


def test_a_model_without_a_vocabulary_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "image_size": 8, "patch_size": 4}
    config = hf.ViTConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    hf.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    capsys.readouterr()
    assert main(["attach", str(tmp_path / "vit"), "--map", "entmax"]) == 2
    assert "has no vocabulary; attach needs a model of text" in capsys.readouterr().err


def test_an_error_of_the_model_is_a_sentence(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vocabulary that is smaller than the tokenizer says is refused; an id beyond it, too."""
    folder = broken(checkpoint, tmp_path / "small")
    raw = json.loads((folder / "tokenizer.json").read_text())
    template = {"type": "BertProcessing", "sep": ["a", 3], "cls": ["b", 900]}
    (folder / "tokenizer.json").write_text(json.dumps(raw | {"post_processor": template}))
    assert main(["attach", str(folder), "--map", "entmax", "--text", str(text)]) == 2
    assert "the id 900, which no token has" in capsys.readouterr().err


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
    assert "is not a checkpoint of transformers." in capsys.readouterr().err
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


@pytest.mark.parametrize(
    ("kind", "nested", "says"),
    [
        ("LlamaForCausalLM", False, None),
        ("Gemma3ForConditionalGeneration", True, "reads more than text"),
        ("BertForMaskedLM", False, "does not predict the next token"),
    ],
)
def test_a_model_without_a_loss_on_text_is_refused_for_its_own_reason(
    kind: str, nested: bool, says: str | None
) -> None:
    config: Any = SimpleNamespace()
    config.get_text_config = lambda: SimpleNamespace() if nested else config
    model = type(kind, (), {"config": config})()
    if says is None:
        _require_next_token(model)
        return
    with pytest.raises(ValueError, match=f"{kind} {says}"):
        _require_next_token(model)
