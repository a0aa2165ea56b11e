"""pipeline/presets.py: the shapes that are promised, and how settings override them."""

from typing import Any

import pytest
import torch
import transformers

from fenchel.model.families.registry import family_for
from fenchel.model.transformer import meta_model
from fenchel.pipeline import PRESETS, settings
from fenchel.train import TrainConfig

PUBLISHED = {
    "gpt2": ("gpt2", 124_439_808),
    "gpt2-medium": ("gpt2", 354_823_168),
    "gpt2-large": ("gpt2", 774_030_080),
    "gpt2-xl": ("gpt2", 1_557_611_200),
    "pythia-70m": ("gpt_neox", 70_426_624),
    "pythia-160m": ("gpt_neox", 162_322_944),
    "pythia-410m": ("gpt_neox", 405_334_016),
    "smollm-135m": ("llama", 134_515_008),
    "smollm-360m": ("llama", 361_821_120),
    "qwen3-0.6b": ("qwen3", 596_049_920),
    "tinyllama": ("llama", 1_100_048_384),
    "llama-1b": ("llama", 1_235_814_400),
    "llama-3b": ("llama", 3_212_749_824),
    "llama-7b": ("llama", 6_738_415_616),
    "llama-8b": ("llama", 8_030_261_248),
}
"""Family and number of parameters, of the model cards; a tied matrix counts once."""
OURS = {"demo": 0.59e6, "small": 19e6, "base": 85e6, "large": 302e6}
"""Parameters of the blocks."""


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_preset_is_a_size_of_ours_or_a_published_model() -> None:
    assert list(PRESETS) == [*OURS, *PUBLISHED]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_shape_has_the_parameters_of_its_model_and_is_of_its_family(name: str) -> None:
    config = settings({"preset": name}).model
    model = meta_model(config)
    family = family_for(config, [key for key, _ in model.named_parameters()])
    assert (family.name, count(model)) == PUBLISHED[name]
    theirs = {k: v for k, v in family.write(config).items() if k != "architectures"}
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**theirs)
        )
    assert count(reference) == count(model)


@pytest.mark.parametrize("name", OURS)
def test_sizes_of_ours_have_heads_of_64_and_the_blocks_that_are_stated(name: str) -> None:
    model = settings({"preset": name}).model
    assert model.head_width == 64
    assert 12 * model.layers * model.width**2 == pytest.approx(OURS[name], rel=0.02)


def test_the_three_usual_sizes() -> None:
    models = [settings({"preset": name}).model for name in ("small", "base", "large")]
    assert [(m.width, m.heads) for m in models] == [(512, 8), (768, 12), (1024, 16)]


def test_a_run_without_a_preset_is_demo_with_the_defaults_of_training() -> None:
    assert settings({"preset": "demo"}) == settings({})
    assert settings({}).train == TrainConfig()


@pytest.mark.parametrize(
    ("given", "dropped"),
    [
        ({"model": {"positions": "alibi"}}, "model.rotary_base"),
        ({"optim": {"optimiser": "adamw"}}, "optim.matrix_learning_rate"),
    ],
)
def test_a_value_that_nothing_would_read_beside_those_given_is_left_out(
    given: dict[str, Any], dropped: str
) -> None:
    section, _, name = dropped.partition(".")
    plain, changed = (
        getattr(getattr(settings({"preset": preset, **more}), section), name)
        for preset, more in (("demo", {}), ("llama-1b", given))
    )
    assert changed == plain
    assert getattr(getattr(settings({"preset": "llama-1b"}), section), name) != plain


def test_a_given_value_that_nothing_reads_is_refused_also_beside_a_preset() -> None:
    given = {"positions": "alibi", "rotary_base": 5e5}
    with pytest.raises(ValueError, match=r"rotary_base=500000\.0 would do nothing"):
        settings({"preset": "llama-1b", "model": given})


def test_the_vocabulary_is_that_of_the_preset_unless_the_text_has_one() -> None:
    config = settings({"preset": "gpt2"})
    assert (config.text.vocabulary, config.model.vocabulary) == (50257, 50257)
    config = settings({"preset": "gpt2", "text": {"vocabulary": 300}})
    assert (config.text.vocabulary, config.model.vocabulary) == (300, 300)
    config = settings({"preset": "gpt2", "text": {"tokenizer": "tokenizer.json"}})
    assert config.model.vocabulary == 50257


@pytest.mark.parametrize("name", [3, None, ["gpt2"], "GPT2 "])
def test_a_name_of_no_preset_is_refused_in_one_sentence(name: object) -> None:
    with pytest.raises(ValueError, match="there is no preset"):
        settings({"preset": name})
