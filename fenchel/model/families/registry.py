"""The families, the one of a directory, and one that can express a given model."""

from collections.abc import Collection
from pathlib import Path

from fenchel.files import printable
from fenchel.model.config import ModelConfig
from fenchel.model.families.albert import ALBERT
from fenchel.model.families.bert import BERT, BERT_BODY
from fenchel.model.families.bloom import BLOOM
from fenchel.model.families.config_reader import CONFIG
from fenchel.model.families.family import Family
from fenchel.model.families.gemma import GEMMA, GEMMA2, GEMMA3
from fenchel.model.families.gpt2 import GPT2
from fenchel.model.families.gpt_neox import GPT_NEOX
from fenchel.model.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from fenchel.model.families.t5 import T5

FAMILIES = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3),
    *(GPT2, GPT_NEOX, BLOOM),
    *(GEMMA, GEMMA2, GEMMA3),
    *(BERT, BERT_BODY, ALBERT, T5),
)
"""In the order in which they are tried for a model to be saved, the most common first."""


def family_of(model_type: str, tensors: Collection[str], where: Path) -> Family:
    """The family of a model_type; its marker tensor decides between two of the same name."""
    for family in FAMILIES:
        if family.name == model_type and (not family.marker or family.marker in tensors):
            return family
    names = ", ".join(dict.fromkeys(family.name for family in FAMILIES))
    raise ValueError(
        f"{where}: model_type={printable(repr(model_type))} is not a known family ({names}), "
        "or its files lack the tensors of one."
    )


def family_for(
    config: ModelConfig, tensors: Collection[str], preferred: str | None = None
) -> Family:
    """The first family that expresses ``config`` with ``tensors``; raises with the nearest gap.

    That of the name ``preferred`` comes before all others.
    """
    tried = []
    for family in sorted(FAMILIES, key=lambda family: family.name != preferred):
        gaps = family.cannot_express(config, tensors)
        if not gaps:
            return family
        tried.append((gaps[0].startswith(CONFIG), len(gaps), family.name, gaps))
    *_, name, gaps = min(tried)  # one that can be read back, with the fewest gaps
    missing = [gap for gap in gaps if "=" in gap] or gaps  # tensors follow from settings
    raise ValueError(
        f"no Hugging Face family can express this model: the nearest, {name}, has no "
        f"{printable(', '.join(missing[:3]), 200)}; it stays loadable from its run directory."
    )
