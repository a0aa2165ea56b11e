"""The text model inside the directory of a larger one: read alone, written as one of its own."""

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fenchel.checkpoints import convert, load, load_model, save
from fenchel.checkpoints.weights import meta_state_dict
from fenchel.files import Notice
from fenchel.generation import generate
from fenchel.inspection import open_model
from fenchel.inspection.our_model import OurModel
from fenchel.model.families import family_of
from tests.model.families.conftest import (
    ALL,
    GEMMA4,
    GROUPED,
    NEAR,
    QWEN3_MOE,
    YARN,
    distinctive,
    stirred,
)

WEIGHTS, CONFIG = "model.safetensors", "config.json"
IDS = torch.randint(3, 70, (2, 13), generator=torch.Generator().manual_seed(0))
TEXT = {**GROUPED, "head_dim": 16}
EYES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "image_size": 16,
    "patch_size": 8,
}
QWEN_EYES = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}
LARGER: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {
            "text_config": {**TEXT, "sliding_window": 4, "layer_types": [NEAR, ALL, NEAR]},
            "vision_config": EYES,
            "mm_tokens_per_image": 4,
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            "text_config": {
                **GEMMA4,
                "layer_types": [NEAR, ALL, NEAR, NEAR, ALL],
                "hidden_size_per_layer_input": 6,
                "num_kv_shared_layers": 1,
            },
            "vision_config": {**EYES, "num_key_value_heads": 2, "head_dim": 8},
            "audio_config": None,
        },
    ),
    "mistral3": (
        "Mistral3",
        {
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": 5},
            "vision_config": {**EYES, "model_type": "pixtral", "head_dim": 8},
            "tie_word_embeddings": False,
        },
    ),
    "mistral3 of 2512": (
        "Mistral3",
        {
            "text_config": {
                **TEXT,
                "model_type": "ministral3",
                "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5},
            },
            "vision_config": {**EYES, "model_type": "pixtral", "head_dim": 8},
        },
    ),
    "qwen3.5": (
        "Qwen3_5",
        {
            "text_config": {
                **TEXT,
                "layer_types": ["linear_attention", "linear_attention", ALL],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 10,
                "linear_value_head_dim": 12,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 700.0,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [2, 1, 1],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": QWEN_EYES,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {
            "text_config": {
                **QWEN3_MOE,
                "shared_expert_intermediate_size": 20,
                "layer_types": ["linear_attention", "linear_attention", ALL],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 10,
                "linear_value_head_dim": 12,
            },
            "vision_config": QWEN_EYES,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-vl": (
        "Qwen3VL",
        {
            "text_config": {
                **TEXT,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 700.0,
                    "mrope_section": [4, 2, 2],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {**QWEN_EYES, "deepstack_visual_indexes": [0]},
            "tie_word_embeddings": True,
        },
    ),
}
WRITTEN_AS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "mistral3": "mistral",
    "mistral3 of 2512": "ministral3",
    "qwen3.5": "qwen3_5_text",
    "qwen3.5-moe": "qwen3_5_moe_text",
    "qwen3-vl": "qwen3",
}


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """A model with an image tower, and its directory as transformers writes it."""
    folder, made = tmp_path_factory.mktemp("larger"), {}

    def build(name: str) -> tuple[Any, Path]:
        if name not in made:
            kind, settings = LARGER[name]
            config = getattr(transformers, f"{kind}Config")(**settings)
            config._attn_implementation = "eager"
            with torch.random.fork_rng():
                torch.manual_seed(0)
                whole = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
            stirred(whole).save_pretrained(folder / name)
            made[name] = whole, folder / name
        return made[name]

    return build


def copy(source: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(source, target)
    settings = json.loads((target / CONFIG).read_text())
    for key, value in changes.items():
        settings.pop(key) if value is ... else settings.update({key: value})
    (target / CONFIG).write_text(json.dumps(settings))
    return target


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out = model(IDS)
    return out if isinstance(out, torch.Tensor) else out.logits


@pytest.mark.parametrize("name", LARGER)
def test_its_text_model_is_read_and_what_is_left_out_is_said_once(
    name: str, larger: Callable[[str], tuple[Any, Path]]
) -> None:
    theirs, path = larger(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load_model(path)
    (notice,) = caught
    assert notice.category is Notice
    eyes = r"(model\.)?(vision_tower|visual)\.\* \(\d+ tensors\), "
    said = rf"as {WRITTEN_AS[name]}; left out are {eyes}"
    bridge = r"(multi_modal_projector|model\.embed_vision)\.\* \(\d tensors\), "
    assert re.search(said + ("" if "qwen" in name else bridge) + ".*vision_", str(notice))
    torch.testing.assert_close(logits_of(model), logits_of(theirs), atol=2e-5, rtol=0)
    greedy = theirs.generate(IDS, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert generate(model, IDS, max_new_tokens=8, temperature=0.0).tolist() == greedy.tolist()


@pytest.mark.filterwarnings("ignore::fenchel.files.Notice")
@pytest.mark.parametrize("name", LARGER)
def test_it_is_written_as_a_text_model(
    name: str, larger: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    theirs, path = larger(name)
    distinctive(copy(path, tmp_path / "whole"), template=True)
    model, tokenizer, _ = load(tmp_path / "whole")
    save(model, tokenizer, tmp_path / "saved")
    convert(tmp_path / "whole", tmp_path / "converted")
    for way in ("saved", "converted"):
        back, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / way, output_loading_info=True, attn_implementation="eager"
        )
        assert not any(info.values())
        assert back.config.model_type == WRITTEN_AS[name]
        assert (back.config.bos_token_id, back.config.pad_token_id) == (11, 14)
        torch.testing.assert_close(logits_of(back), logits_of(theirs), atol=2e-5, rtol=0)
    assert isinstance(open_model(tmp_path / "whole"), OurModel)


@pytest.mark.filterwarnings("ignore::fenchel.files.Notice")
def test_names_of_files_between_two_versions_are_read(
    larger: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    theirs, path = larger("mistral3")
    target = copy(path, tmp_path / "other")
    names = {"language_model.model.": "model.language_model.", "language_model.lm_head": "lm_head"}
    weights = load_file(target / WEIGHTS)
    for name in list(weights):
        new = next((n + name.removeprefix(o) for o, n in names.items() if name.startswith(o)), "")
        weights[new or f"model.{name}"] = weights.pop(name)
    save_file(weights, target / WEIGHTS)
    torch.testing.assert_close(logits_of(load_model(target)), logits_of(theirs), atol=2e-5, rtol=0)


@pytest.mark.filterwarnings("ignore::fenchel.files.Notice")
def test_experts_that_lie_in_one_tensor_are_read(
    larger: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    """Files hold the experts of Qwen3.5 one by one, or as transformers computes with them."""
    theirs, path = larger("qwen3.5-moe")
    target = copy(path, tmp_path / "stacked")
    weights = load_file(target / WEIGHTS)
    for mlp in {name.partition(".experts.")[0] for name in weights if ".experts." in name}:
        gate, up, down = (
            torch.stack([weights.pop(f"{mlp}.experts.{e}.{x}_proj.weight") for e in range(5)])
            for x in ("gate", "up", "down")
        )
        weights[f"{mlp}.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        weights[f"{mlp}.experts.down_proj"] = down
    save_file(weights, target / WEIGHTS)
    model = load_model(target)
    torch.testing.assert_close(logits_of(model), logits_of(theirs), atol=2e-5, rtol=0)
    save(model, None, tmp_path / "written")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "written")
    torch.testing.assert_close(logits_of(back), logits_of(theirs), atol=2e-5, rtol=0)
    weights = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    save_file(weights, target / WEIGHTS)
    with pytest.raises(ValueError, match="is a known family, and its files lack the tensors"):
        load_model(target)


@pytest.mark.filterwarnings("ignore::fenchel.files.Notice")
def test_the_outer_settings_and_the_files_decide_whether_the_head_is_tied(
    larger: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    _, path = larger("mistral3")
    for outer in (..., True, False):  # the files have a head of their own, which is used
        model = load_model(copy(path, tmp_path / f"own {outer}", tie_word_embeddings=outer))
        assert not model.config.tied
    _, path = larger("gemma3")
    inner = json.loads((path / CONFIG).read_text())["text_config"] | {"tie_word_embeddings": False}
    target = copy(path, tmp_path / "inner", tie_word_embeddings=..., text_config=inner)
    assert load_model(target).config.tied
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        load_model(copy(path, tmp_path / "none", tie_word_embeddings=False))
    with pytest.raises(ValueError, match="should be true or false"):
        load_model(copy(path, tmp_path / "word", tie_word_embeddings="x"))


@pytest.mark.parametrize(
    ("inner", "says"),
    [
        ([1], "text_config should be an object"),
        ({"model_type": "bert"}, "text model of this gemma3 is of 'bert', which is not read"),
        ({"model_type": [7]}, r"is of '?\[7\]'?, which is not read"),
        ({"num_hidden_layers": 10**9}, "does not fit the"),
        ({}, "262208 for the vocabulary does not fit the files"),
    ],
)
@pytest.mark.filterwarnings("ignore::fenchel.files.Notice")
def test_settings_that_cannot_be_are_refused(
    inner: Any, says: str, larger: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says):
        load_model(copy(larger("gemma3")[1], tmp_path / "other", text_config=inner))


def test_settings_that_older_files_leave_out_are_those_of_the_class() -> None:
    """Gemma 3 4B has six settings of its text model."""
    inner = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {"model_type": "gemma3", "text_config": inner, "mm_tokens_per_image": 256}
    family = family_of("gemma3", (), Path(CONFIG), config)
    with pytest.warns(Notice):
        ours = family.read(config, (), Path(CONFIG))
    theirs = transformers.Gemma3Config(**config).text_config
    with torch.device("meta"):
        count = sum(p.numel() for p in transformers.Gemma3ForCausalLM(theirs).parameters())
    assert sum(tensor.numel() for tensor in meta_state_dict(ours).values()) == count
    assert (ours.context, ours.head_width, ours.groups) == (131072, 256, 4)
    assert (ours.rotary_scaling, ours.rotary_factor, ours.rotary_local_base) == ("linear", 8, 1e4)
    assert [ours.window(n) for n in (0, 5)] == [1024, None]
