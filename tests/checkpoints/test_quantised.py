"""fenchel/checkpoints/quantised.py: weights that are stored small are read as what they stand for.

The reference is the plain directory of the dequantised numbers, computed here entry by entry.
"""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from fenchel.checkpoints import convert, load_model, save
from fenchel.checkpoints.directory import open_directory, open_tensors
from fenchel.files import Notice
from fenchel.model import ModelConfig, Transformer

WEIGHTS, CONFIG = "model.safetensors", "config.json"
IDS = torch.arange(3, 29).view(2, 13)
SHAPE: dict[str, Any] = {"vocabulary": 40, "context": 32, "width": 48, "heads": 4, "layers": 2}
FP8 = torch.float8_e4m3fn
Stored = dict[str, Tensor]
Quantise = Callable[[str, Tensor], tuple[Stored, Tensor]]
"""A matrix to the tensors that store it and to the matrix that they stand for."""


def in_blocks(rows: int, columns: int, kind: torch.dtype = torch.float32) -> Quantise:
    def quantise(name: str, w: Tensor) -> tuple[Stored, Tensor]:
        R, C = w.shape
        grid = -(-R // rows), -(-C // columns)
        exponents = torch.randint(120, 125, grid, dtype=torch.uint8)
        powers = 2.0 ** (exponents.int() - 127)
        s = torch.rand(grid) * 0.01 + 1e-3 if kind == torch.float32 else powers
        wide = s[torch.arange(R) // rows][:, torch.arange(C) // columns]
        q = (w / wide).to(FP8)
        stored = s if kind == torch.float32 else exponents.view(kind)
        return {name: q, f"{name}_scale_inv": stored}, q.float() * wide

    return quantise


def by_rows(kind: torch.dtype, groups: int = 1, *, zero: bool = False) -> Quantise:
    def quantise(name: str, w: Tensor) -> tuple[Stored, Tensor]:
        size = w.shape[1] // groups
        s = torch.rand(w.shape[0], groups) * 0.01 + 1e-3
        z = torch.randint(-9, 9, s.shape, dtype=torch.int8) if zero else torch.zeros_like(s)
        wide_s, wide_z = (x.float().repeat_interleave(size, 1) for x in (s, z))
        q = w / wide_s + wide_z
        q = q.to(kind) if kind == FP8 else q.round().clamp(-128, 127).to(kind)
        stored = {
            name: q,
            f"{name}_scale": s,
            f"{name.removesuffix('.weight')}.input_scale": s[:1].clone(),
        }
        if zero:
            stored[f"{name}_zero_point"] = z
        return stored, (q.float() - wide_z) * wide_s

    return quantise


def one_number(name: str, w: Tensor) -> tuple[Stored, Tensor]:
    q = (w / 0.01).to(FP8)
    return {name: q, f"{name}_scale_inv": torch.tensor(0.01)}, q.float() * 0.01


def packed(name: str, w: Tensor) -> tuple[Stored, Tensor]:
    """Eight numbers of 4 bits to a word, the first in the lowest bits; groups of 8."""
    s = torch.rand(w.shape[0], w.shape[1] // 8) * 0.1 + 1e-2
    wide = s.repeat_interleave(8, 1)
    q = (w / wide).round().clamp(-8, 7).int()
    words = torch.zeros(w.shape[0], w.shape[1] // 8, dtype=torch.int64)
    for j in range(w.shape[1]):
        words[:, j // 8] |= (q[:, j] + 8).long() << (4 * (j % 8))
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    stored = {f"{name}_packed": words, f"{name}_shape": torch.tensor(w.shape), f"{name}_scale": s}
    return stored, q * wide


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}


BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 20]}
METHODS: dict[str, tuple[dict[str, Any], Quantise]] = {
    "fp8 in blocks": (BLOCKS, in_blocks(32, 20)),
    "fp8 in blocks, powers": (BLOCKS, in_blocks(32, 20, torch.uint8)),
    "fp8 in blocks, e8m0": (BLOCKS, in_blocks(32, 20, torch.float8_e8m0fnu)),
    "fp8, blocks of the method": ({"quant_method": "fp8"}, in_blocks(128, 128)),
    "fp8, one number": ({"quant_method": "fp8", "weight_block_size": None}, one_number),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, by_rows(FP8)),
    "int8": (compressed("int-quantized", num_bits=8), by_rows(torch.int8)),
    "int8 with zeros": (compressed("int-quantized", num_bits=8), by_rows(torch.int8, 4, zero=True)),
    "float8": (compressed("float-quantized", num_bits=8), by_rows(FP8)),
    "int4": (compressed("pack-quantized", num_bits=4), packed),
}


def directory(path: Path, quantise: Quantise, settings: Any) -> tuple[Path, Path]:
    """A Llama whose matrices are quantised, and the plain one of the same numbers."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**SHAPE, kv_heads=2, tied=False))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.1)
    save(model, None, path / "plain")
    shutil.copytree(path / "plain", path / "small")
    (path / "small" / "manifest.json").unlink()
    (path / "plain" / "manifest.json").unlink()
    plain, small = load_file(path / "plain" / WEIGHTS), {}
    for name, w in plain.items():
        stored, value = {name: w}, w
        if "_proj" in name:
            stored, value = quantise(name, w)
        small |= {key: x.contiguous() for key, x in stored.items()}
        plain[name] = value
    save_file(plain, path / "plain" / WEIGHTS)
    save_file(small, path / "small" / WEIGHTS)
    config = json.loads((path / "small" / CONFIG).read_text())
    (path / "small" / CONFIG).write_text(json.dumps(config | {"quantization_config": settings}))
    return path / "small", path / "plain"


@pytest.mark.parametrize("method", METHODS)
def test_they_are_read_as_what_they_stand_for(method: str, tmp_path: Path) -> None:
    settings, quantise = METHODS[method]
    small, plain = directory(tmp_path, quantise, settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load_model(small)
    (notice,) = caught
    assert notice.category is Notice
    assert "14 quantised matrices are read in F32; activations are not" in str(notice.message)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), load_model(plain)(IDS), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore::fenchel.files.Notice")
def test_they_are_written_plain(tmp_path: Path) -> None:
    small, plain = directory(tmp_path, in_blocks(32, 20), BLOCKS)
    convert(small, tmp_path / "out", dtype=torch.bfloat16)
    assert "quantization_config" not in json.loads((tmp_path / "out" / CONFIG).read_text())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = load_model(plain, dtype=torch.bfloat16)
    assert theirs.dtype == torch.bfloat16
    with torch.no_grad():
        found, wanted = theirs(IDS).logits, expected(IDS)
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0, atol=0.05)
    save(load_model(small), None, tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / CONFIG).read_text())


def oss(path: Path) -> Path:
    """A small gpt-oss as transformers saves it."""
    config = transformers.GptOssConfig(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.GptOssForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.filterwarnings("ignore::fenchel.files.Notice")
def test_experts_of_four_bits_are_those_that_transformers_expands(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    path = oss(tmp_path / "oss")
    weights, small = load_file(path / WEIGHTS), {}
    generator = torch.Generator().manual_seed(1)
    for name, w in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            small[name] = w
            continue
        X, inputs, outputs = w.shape
        shape = (X, outputs, inputs // 32, 16)
        blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, shape[:3], generator=generator, dtype=torch.uint8)
        small |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    shutil.copytree(path, tmp_path / "plain")
    save_file(weights, tmp_path / "plain" / WEIGHTS)
    save_file(small, path / WEIGHTS)
    config = json.loads((path / CONFIG).read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (path / CONFIG).write_text(json.dumps(config))
    found = open_directory(path)
    with open_tensors(found) as tensors:
        for name in weights:
            assert torch.equal(tensors[name], weights[name]), name
    with torch.no_grad():
        ours, plain = load_model(path)(IDS), load_model(tmp_path / "plain")(IDS)
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)


NAME = "model.layers.0.mlp.up_proj.weight"
HOSTILE: dict[str, tuple[Callable[[Stored, dict[str, Any]], Any], str]] = {
    "a scale of 0": (lambda w, _: w[f"{NAME}_scale_inv"].zero_(), "finite and positive"),
    "a scale below 0": (lambda w, _: w[f"{NAME}_scale_inv"].neg_(), "finite and positive"),
    "a scale of nan": (lambda w, _: w[f"{NAME}_scale_inv"].fill_(torch.nan), "finite and pos"),
    "a scale of inf": (lambda w, _: w[f"{NAME}_scale_inv"].fill_(torch.inf), "finite and pos"),
    "too large": (lambda w, _: w[f"{NAME}_scale_inv"].fill_(3e38), "not finite"),
    "nan among the numbers": (
        lambda w, _: w.update({NAME: torch.full_like(w[NAME].float(), torch.nan).to(FP8)}),
        "values that are not finite",
    ),
    "no scale": (lambda w, _: w.pop(f"{NAME}_scale_inv"), "without a scale"),
    "a scale without numbers": (lambda w, _: w.pop(NAME), "lacks|no place for"),
    "a scale of another shape": (
        lambda w, _: w.update({f"{NAME}_scale_inv": torch.ones(3, 3)}),
        "is not one number per block",
    ),
    "a scale of integers": (
        lambda w, _: w.update({f"{NAME}_scale_inv": torch.ones(4, 3, dtype=torch.int32)}),
        "does not fit the weights",
    ),
    "numbers of another shape": (
        lambda w, _: w.update({NAME: w[NAME][:64].contiguous()}),
        "is not one number per block|has shape",
    ),
    "three axes": (lambda w, _: w.update({NAME: w[NAME][None].contiguous()}), "without a scale"),
    "no settings": (lambda _, c: c.pop("quantization_config"), "no quantization_config says"),
    "settings of another kind": (lambda _, c: c.update(quantization_config=7), "an object"),
    "another method": (
        lambda _, c: c.update(quantization_config={"quant_method": "gptq", "bits": 4}),
        "is of 'gptq', a variant that fenchel does not have",
    ),
    "another format": (
        lambda _, c: c.update(quantization_config=compressed("marlin-24", num_bits=4)),
        "compressed-tensors in the format marlin-24",
    ),
    "sparse": (
        lambda _, c: c["quantization_config"].update(sparsity_config={"format": "sparse-24"}),
        "sparsity_config",
    ),
    "blocks of no size": (
        lambda _, c: c["quantization_config"].update(weight_block_size=[0, 20]),
        "should be two sizes",
    ),
    "blocks of another size": (
        lambda _, c: c["quantization_config"].update(weight_block_size=[64, 40]),
        r"is not one number per block of \[64, 40\]",
    ),
    "huge blocks": (
        lambda _, c: c["quantization_config"].update(weight_block_size=[2**40, 1]),
        "should be two sizes",
    ),
    "settings below another key": (
        lambda _, c: c.update(inner={"quantization_config": {"quant_method": "fp8"}}),
        "quantization_config is",
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directory(tmp_path_factory.mktemp("sound"), in_blocks(32, 20), BLOCKS)[0]


@pytest.mark.filterwarnings("ignore::fenchel.files.Notice")
@pytest.mark.parametrize("how", HOSTILE)
def test_what_cannot_be_is_refused_in_one_sentence(how: str, sound: Path, tmp_path: Path) -> None:
    change, says = HOSTILE[how]
    small = Path(shutil.copytree(sound, tmp_path / "small"))
    weights = {name: w.clone() for name, w in load_file(small / WEIGHTS).items()}
    config = json.loads((small / CONFIG).read_text())
    change(weights, config)
    save_file(weights, small / WEIGHTS)
    (small / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ValueError, match=says) as caught:
        load_model(small)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bits", [[4], {}, None, 3, True])
def test_packed_numbers_of_an_unknown_size_are_refused(bits: Any, tmp_path: Path) -> None:
    small, _ = directory(tmp_path, packed, compressed("pack-quantized", num_bits=bits))
    with pytest.raises(ValueError, match="needs num_bits of 4 or 8"):
        load_model(small)


@pytest.mark.filterwarnings("ignore::fenchel.files.Notice")
@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("shape", torch.tensor([7, 48]), "is not the shape"),
        ("zero_point", torch.zeros(4), "weight_zero_point is not read"),
        ("g_idx", torch.zeros(4), "weight_g_idx is not read"),
    ],
)
def test_packed_numbers_of_another_kind_are_refused(
    part: str, value: Tensor, says: str, tmp_path: Path
) -> None:
    small, _ = directory(tmp_path, packed, compressed("pack-quantized", num_bits=4))
    weights = load_file(small / WEIGHTS)
    save_file(weights | {f"{NAME}_{part}": value}, small / WEIGHTS)
    with pytest.raises(ValueError, match=says):
        load_model(small)
