"""fenchel/hf/loader.py: transformers opens no file, and allocates what the files can fill."""

import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from fenchel.checkpoints.directory import open_directory
from fenchel.files import Notice
from fenchel.hf import load_transformers_model
from fenchel.hf.loader import one_sentence

SIZES = {
    "opt": {"vocab_size": 300, "hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "xglm": {"vocab_size": 300, "d_model": 32, "ffn_dim": 48, "attention_heads": 4},
    "biogpt": {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48},
    "gpt_neo": {"vocab_size": 300, "hidden_size": 32, "attention_types": [[["global"], 2]]},
    "phi": {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48},
    "internlm3": {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48},  # a Llama's class
    "granitemoehybrid": {  # whose settings have an infinite number
        "vocab_size": 300,
        "hidden_size": 32,
        "shared_intermediate_size": 48,
        "num_key_value_heads": 2,
        "num_local_experts": 0,
        "mamba_n_heads": 8,
        "layer_types": ["attention", "attention"],
    },
    "bart": {
        "vocab_size": 300,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
    },
}
LAYERS = {"num_hidden_layers": 2, "num_layers": 2, "num_attention_heads": 4, "num_heads": 4}
LENGTH = {"max_position_embeddings": 64}


@pytest.fixture(scope="module", autouse=True)
def silent() -> None:
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    saved: dict[str, Path] = {}

    def written(family: str) -> Path:
        if family not in saved:
            saved[family] = tmp_path_factory.mktemp(family)
            torch.manual_seed(1)
            names = LAYERS | LENGTH
            config = hf.CONFIG_MAPPING[family](**(names | SIZES[family]))
            kind = hf.AutoModelForSeq2SeqLM if family == "bart" else hf.AutoModelForCausalLM
            kind.from_config(config).save_pretrained(saved[family])
        return saved[family]

    return written


@pytest.fixture
def folder(save: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(save("opt"), tmp_path / "opt"))


def change(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def load(folder: Path) -> Any:
    return load_transformers_model(open_directory(folder))


@pytest.mark.parametrize("family", SIZES)
def test_the_model_is_that_of_from_pretrained(family: str, save: Callable[[str], Path]) -> None:
    ours = load(save(family))
    theirs = type(ours).from_pretrained(save(family), attn_implementation="eager").eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=0, atol=0)


opened: list[Path] | None = None


def _listen(event: str, args: tuple[Any, ...]) -> None:
    if opened is not None and event == "open" and isinstance(args[0], str):
        opened.append(Path(args[0]))


sys.addaudithook(_listen)


@pytest.fixture
def recorded() -> Iterator[list[Path]]:
    global opened
    opened = []
    yield opened
    opened = None


def test_transformers_opens_no_file_of_the_directory(folder: Path, recorded: list[Path]) -> None:
    for name in ("generation_config.json", "adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_text("{")  # not read, so not an error
    directory = open_directory(folder)
    recorded.clear()
    load_transformers_model(directory)
    assert not [path for path in recorded if folder in path.parents]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("opt", {"ffn_dim": 2**24}),
        ("opt", {"ffn_dim": 2**40}),
        ("opt", {"max_position_embeddings": 2**26}),
        ("opt", {"vocab_size": 2**24, "hidden_size": 2**14}),
        ("xglm", {"d_model": 2**16, "ffn_dim": 2**20}),
        ("xglm", {"max_position_embeddings": 2**26}),
        ("biogpt", {"intermediate_size": 2**28}),
        ("gpt_neo", {"max_position_embeddings": 2**17}),
        ("bart", {"encoder_layers": 10**5}),
        ("bart", {"decoder_layers": 10**5}),
        ("phi", {"intermediate_size": 2**30}),
    ],
)
def test_sizes_beyond_the_files_are_refused_before_memory_is_taken(
    family: str,
    changes: dict[str, Any],
    save: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(shutil.copytree(save(family), tmp_path / family))
    change(folder, **changes)
    filled: list[str] = []
    loading = hf.PreTrainedModel._load_pretrained_model

    def load_weights(*args: Any, **settings: Any) -> Any:
        filled.append("called")
        return loading(*args, **settings)

    monkeypatch.setattr(hf.PreTrainedModel, "_load_pretrained_model", load_weights)
    with pytest.raises(ValueError, match=r"larger model than its files|does not fit the|should be"):
        load(folder)
    assert not filled


def test_a_tensor_too_many_too_few_or_misshapen_is_refused_by_name(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"planted": torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="holds planted, which its settings have no place for"):
        load(folder)
    name = "model.decoder.layers.1.fc1.bias"
    save_file({k: v for k, v in weights.items() if k != name}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"lacks 1 tensors .* {name}"):
        load(folder)
    save_file(weights | {name: torch.ones(47)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} has shape \[47\], its settings require \[48\]"):
        load(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"transformers_weights": "x.safetensors.index.json"},
        {"transformers_weights": "model.safetensors"},
        {"inner": {"quantization_config": {"bits": 4}}},
        {"fusion_config": {"patch_embeddings": True}},
        {"adapters": ["a"]},
        {"backbone": "resnet18"},
        {"some_file": "other.safetensors"},
        {"inner": {"list": ["/etc/passwd"]}},
        {"address": "https://example.com/x"},
    ],
    ids=str,
)
def test_settings_that_lead_elsewhere_are_refused(folder: Path, settings: dict[str, Any]) -> None:
    outside = folder.parent / "x.safetensors.index.json"
    outside.write_text("{}")
    change(folder, **settings)
    with pytest.raises(ValueError, match=r"is not followed|a variant|names a file"):
        load(folder)


def test_names_of_kernels_and_code_do_not_reach_transformers(folder: Path) -> None:
    change(
        folder,
        attn_implementation="someone/kernel",
        _attn_implementation="someone/kernel",
        experts_implementation="someone/kernel",
        _name_or_path="../elsewhere",
        auto_map={"AutoModelForCausalLM": "evil.Model"},
    )
    with pytest.warns(UserWarning, match="its own code"):
        model = load(folder)
    assert model.config._attn_implementation == "eager"
    assert not hasattr(model.config, "auto_map")


def test_a_class_that_is_not_known_gives_the_bare_model_or_is_refused(folder: Path) -> None:
    change(folder, architectures=["OwnModelForCausalLM"])
    assert type(load(folder)).__name__ == "OPTModel"
    with pytest.raises(ValueError, match="names no architecture of transformers"):
        load_transformers_model(open_directory(folder), bare_otherwise=False)


def test_warnings_of_transformers_are_not_shown_and_ours_are() -> None:
    with warnings.catch_warnings(record=True) as shown, one_sentence("build it"):
        warnings.warn("`rope_scaling` is deprecated", FutureWarning, stacklevel=1)
        warnings.warn("a sentence of ours", Notice, stacklevel=1)
    assert [str(one.message) for one in shown] == ["a sentence of ours"]
