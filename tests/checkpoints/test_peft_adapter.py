"""fenchel/checkpoints/peft_adapter.py: adapters of ours in PEFT, and those of PEFT here."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fenchel.checkpoints import load_model
from fenchel.checkpoints.hf_export import write_directory
from fenchel.checkpoints.peft_adapter import ADAPTER_WEIGHTS, adapter_files, merge_adapter
from fenchel.model.lora import add_lora

SIZES = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
IDS = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
PARTS = {
    "llama": ["q_proj", "v_proj", "up_proj"],
    "phi3": ["qkv_proj", "gate_up_proj"],
    "gpt2": ["c_attn", "mlp.c_proj"],
    "gpt_neox": ["query_key_value", "dense_h_to_4h"],
}


def reference(kind: str) -> Any:
    """A small model of transformers, every weight of it drawn."""
    torch.manual_seed(1)
    wide = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    model: Any
    if kind == "llama":
        config: Any = transformers.LlamaConfig(
            intermediate_size=20, num_key_value_heads=2, **wide, **SIZES
        )
        model = transformers.LlamaForCausalLM(config)
    elif kind == "phi3":
        config = transformers.Phi3Config(
            intermediate_size=20, num_key_value_heads=2, **wide, **SIZES
        )
        model = transformers.Phi3ForCausalLM(config)
    elif kind == "gpt2":
        config = transformers.GPT2Config(n_embd=24, n_layer=2, n_head=4, n_positions=16, **SIZES)
        model = transformers.GPT2LMHeadModel(config)
    else:
        wide["hidden_size"] = 32  # a quarter of a head has rotary positions
        config = transformers.GPTNeoXConfig(intermediate_size=20, **wide, **SIZES)
        model = transformers.GPTNeoXForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


@pytest.fixture(scope="module", params=["llama", "phi3", "gpt2", "gpt_neox"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def base(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(kind)
    reference(kind).save_pretrained(path)
    return path


@pytest.mark.parametrize("targets", [("qkv", "out"), ("q", "v", "up", "down"), ("k",)])
def test_peft_computes_what_our_adapters_compute(
    targets: tuple[str, ...], kind: str, base: Path, tmp_path: Path
) -> None:
    ours = load_model(base)
    generator = torch.Generator().manual_seed(2)
    add_lora(ours, rank=3, alpha=5.0, targets=targets, generator=generator)
    for name, parameter in ours.named_parameters():
        if name.endswith("lora_B"):
            parameter.data.normal_(generator=generator)
    files, tensors = adapter_files(ours, base=str(base))
    write_directory(tmp_path / "out", files, tensors, overwrite=False, weights=ADAPTER_WEIGHTS)
    plain = reference(kind)
    with torch.no_grad():
        before = plain(IDS).logits
        theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "out")
        expected, found = theirs(IDS).logits, ours(IDS)
        assert (expected - before).abs().max() > 0.1
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        merged = load_model(base, adapter=tmp_path / "out")
        torch.testing.assert_close(merged(IDS), expected, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def theirs(kind: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """An adapter that PEFT wrote, with a rank and a factor of its own in one place."""
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=PARTS[kind],
        rank_pattern={PARTS[kind][0]: 2},
        alpha_pattern={PARTS[kind][0]: 7},
        use_rslora=kind == "llama",
        fan_in_fan_out=kind == "gpt2",
        init_lora_weights=False,  # B is drawn too
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(3)
    model = peft.get_peft_model(reference(kind), config)
    path = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(path)
    return path, model.eval()


def test_we_compute_what_adapters_of_peft_compute(
    kind: str, base: Path, theirs: tuple[Path, Any]
) -> None:
    path, model = theirs
    ours = load_model(base)
    with torch.no_grad():
        plain, expected = ours(IDS), model(IDS).logits
        assert len(merge_adapter(ours, path)) == 2 * len(PARTS[kind])
        assert (expected - plain).abs().max() > 0.1
        torch.testing.assert_close(ours(IDS), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(load_model(base)(IDS), plain)  # the file is as it was


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"peft_type": "IA3"}, "'IA3' adapter; LORA is read"),
        ({"use_dora": True}, "use_dora=True is not part of plain LoRA"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 9, "rank_pattern": {}}, "has rank 9"),
        ({"lora_alpha": "x", "alpha_pattern": {}}, "lora_alpha should be above 0"),
        ({"alpha_pattern": {"(a+)+$": 2}}, "by their names"),
    ],
)
def test_other_adapters_are_refused_by_name(
    changes: dict[str, Any], sentence: str, base: Path, theirs: tuple[Path, Any], tmp_path: Path
) -> None:
    shutil.copytree(theirs[0], tmp_path / "a")
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(ValueError, match=sentence):
        load_model(base, adapter=tmp_path / "a")


def test_tensors_without_a_place_are_refused(
    base: Path, theirs: tuple[Path, Any], tmp_path: Path
) -> None:
    def written(**changes: Any) -> Path:
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        shutil.copytree(theirs[0], tmp_path / "a")
        tensors = load_file(theirs[0] / ADAPTER_WEIGHTS)
        kept = {k: v for k, v in (tensors | changes).items() if v is not None}
        save_file(kept, tmp_path / "a" / ADAPTER_WEIGHTS)
        return tmp_path / "a"

    first = sorted(load_file(theirs[0] / ADAPTER_WEIGHTS))[0]  # of an A
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(2, 2)}, "no linear map"),
        ({"elsewhere": torch.ones(2, 2)}, "no linear map"),
        ({first: None}, "one of two matrices"),
        ({first: torch.ones(2, 3)}, "has shapes"),
        ({first: torch.ones(2)}, "the matrices"),
        ({first: torch.nan * load_file(theirs[0] / ADAPTER_WEIGHTS)[first]}, "not finite"),
    ]
    for changes, sentence in wrong:
        with pytest.raises(ValueError, match=sentence):
            load_model(base, adapter=written(**changes))
    with pytest.raises(ValueError, match="is not an adapter"):
        load_model(base, adapter=tmp_path)
