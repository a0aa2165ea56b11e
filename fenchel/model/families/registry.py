"""The families, the one of a directory, and one that can express a given model."""

import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fenchel.files import printable
from fenchel.model.config import ModelConfig
from fenchel.model.families import bert, gemma, llama, modernbert, qwen3_5
from fenchel.model.families.bloom import BLOOM
from fenchel.model.families.config_reader import CONFIG
from fenchel.model.families.family import Family
from fenchel.model.families.gpt2 import GPT2
from fenchel.model.families.gpt_neox import GPT_NEOX
from fenchel.model.families.t5 import T5

FAMILIES = (
    *(*llama.FAMILIES, *qwen3_5.FAMILIES, GPT2, GPT_NEOX, BLOOM, *gemma.FAMILIES),
    *(*bert.FAMILIES, *modernbert.FAMILIES, T5),
)
"""In the order in which they are tried for a model to be saved, the most common first."""


def _sizes(V: int, M: int, F: int, layers: int, heads: int, context: int) -> Mapping[str, int]:
    """The keys of config.json for the sizes of a model."""
    return {
        "vocab_size": V,
        "hidden_size": M,
        "intermediate_size": F,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": context,
    }


_QWEN3_VL = {"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 5e5}
_TEXT_MODELS: dict[str, dict[str, Mapping[str, Any]]] = {
    "gemma3": {"gemma3_text": _sizes(262208, 2304, 9216, 26, 8, 131072)},
    "gemma4": {"gemma4_text": _sizes(262144, 2304, 9216, 30, 8, 131072)},
    "mistral3": {
        "mistral": _sizes(32000, 4096, 14336, 32, 32, 131072),
        "ministral3": _sizes(131072, 4096, 14336, 34, 32, 262144),
    },
    "qwen3_5": {"qwen3_5_text": _sizes(248320, 4096, 12288, 32, 16, 32768)},
    "qwen3_5_moe": {
        "qwen3_5_moe_text": {
            "vocab_size": 248320,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "max_position_embeddings": 32768,
        }
    },
    "qwen3_vl": {"qwen3_vl_text": {**_sizes(151936, 4096, 22016, 32, 32, 128000), **_QWEN3_VL}},
}
"""Larger models with a text model inside: its families, the first where none is named, and the
settings that their classes have, which older files leave out."""
_SAME_TEXT = {"qwen3_vl_text": "qwen3"}
"""Text models that are those of another family where a text has no images."""
_LONG_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_PARTS = (
    *("vision_tower", "audio_tower", "visual"),
    *("multi_modal_projector", "embed_vision", "embed_audio"),
)
_TOWERS = tuple(f"{outer}{part}." for part in _PARTS for outer in ("", "model."))
MODEL_TYPES = frozenset({*(family.name for family in FAMILIES), *_TEXT_MODELS})
"""Every model_type that is read."""
LARGER = {
    outer: [_SAME_TEXT.get(name, name) for name in known] for outer, known in _TEXT_MODELS.items()
}
"""The families of the text models inside each larger model."""


def family_of(
    model_type: str,
    tensors: Collection[str],
    where: Path,
    config: Mapping[str, Any] | None = None,
) -> Family:
    """The family of a model_type; its marker tensor decides between two of the same name.

    ``config`` are the settings of the directory, from which the family of a text model inside a
    larger one is known, and from which a refusal names an obstacle.
    """
    if model_type in _TEXT_MODELS:
        return _text_model(model_type, tensors, where, config or {})
    for family in FAMILIES:
        if family.name == model_type and (not family.marker or family.marker in tensors):
            return family
    kind = f"{where}: model_type={printable(repr(model_type))}"
    if any(family.name == model_type for family in FAMILIES):
        raise ValueError(f"{kind} is a known family, and its files lack the tensors of one.")
    readers = ""
    if commands := transformers_commands(model_type, config or {}):
        *most, last = commands
        named = f"{', '.join(most)} and {last} read" if most else f"{last} reads"
        readers = f"; fenchel {named} it through transformers"
    obstacle = "" if config is None else _first_obstacle(config, tensors)
    known = "fenchel list families has those that are known."
    raise ValueError(f"{kind} is not a known family{readers}.{obstacle} {known}")


def _text_model(
    model_type: str, tensors: Collection[str], where: Path, config: Mapping[str, Any]
) -> Family:
    """The family of the text model inside a larger one, as it is read from its directory."""
    inner, known = config.get("text_config"), _TEXT_MODELS[model_type]
    named = inner.get("model_type") if isinstance(inner, Mapping) else None
    name = next(iter(known)) if named is None else named
    if not isinstance(name, str) or name not in known:
        raise ValueError(
            f"{where}: the text model of this {model_type} is of {printable(repr(name))}, which is "
            f"not read; {', '.join(known)} would be."
        )
    current = {_current_name(one) for one in tensors}
    family = family_of(_SAME_TEXT.get(name, name), current, where)
    return replace(
        family,
        inner="text_config",
        long_prefixes=_LONG_PREFIXES,
        towers=_TOWERS,
        defaults={**known[name], **family.defaults},
    )


def _current_name(name: str) -> str:
    """A name in the directory of a larger model as its family has it."""
    for long, own in _LONG_PREFIXES.items():
        if name.startswith(long):
            return own + name.removeprefix(long)
    return name


_INSPECTED, _WITHOUT_LAW = ("inspect", "lens", "ablate", "patch"), ("inspect", "attach")
_OTHER_COMMANDS = {
    "diffllama longcat_flash": ("attach",),  # two attentions per block
    "bailing_hybrid minimax olmo_hybrid": _INSPECTED,  # layers that do not attend
    "kimi_linear": _INSPECTED[1:],
    "bart bigbird_pegasus blenderbot blenderbot-small marian mbart": _INSPECTED,  # cross-attention
    "pegasus plbart whisper": _INSPECTED,
    "inkling_text": (*_INSPECTED[1:], "attach"),  # other numbers of heads per layer
    "camembert data2vec-text electra ernie": _WITHOUT_LAW,  # encoders
    "roberta-prelayernorm xlm-roberta-xl emu3 mllama": _WITHOUT_LAW,
    "deepseek_v4 gemma3n_text granite_swa granitemoe_swa inkling2_text jamba qwen4_exp": (),
    "recurrent_gemma xmod": (),
    # Of these no small model was tried.
    "bamba blt cohere_compass_text dbrx dots1 dots3_note dots3_note_text git lfm2_moe": (),
    "musicgen musicgen_melody phi4_multimodal qwen4_exp_text roc_bert zamba zamba2 zaya": (),
}
"""Families of transformers that fewer commands read than others, as tests/model/families/refused.py
finds by trying."""


def transformers_commands(model_type: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The commands that read a directory of an unknown family through transformers.

    By the class that its settings name: images and sounds are not read, and the attention of an
    encoder with a decoder is not inspected.
    """
    classes = config.get("architectures")
    name = str(classes[0]) if isinstance(classes, list) and classes else ""
    masked = name.endswith("ForMaskedLM")
    known = masked or name.endswith(("ForCausalLM", "LMHeadModel"))
    if not known or not _in_transformers(model_type):
        return ()
    if config.get("index_topk"):  # its attention is given the keys to look at
        return ()
    for names, commands in _OTHER_COMMANDS.items():
        if model_type in names.split():
            return commands
    return _WITHOUT_LAW if masked else (*_INSPECTED, "attach")


def _in_transformers(model_type: str) -> bool:
    """Whether transformers is installed and has the family, with attention that can be replaced.

    It is not imported. A family without code of its own has the classes of another.
    """
    found = find_spec("transformers")
    places = () if found is None else found.submodule_search_locations or ()
    folder = model_type.replace("-", "_").removesuffix("_text")  # of a text model inside a larger
    if not re.fullmatch(r"\w+", folder):
        return False
    folders = [Path(place) / "models" / folder for place in places]
    code = [file.read_bytes() for one in folders for file in one.glob("modeling_*.py")]
    replaced = not code or any(b"ALL_ATTENTION_FUNCTIONS" in one for one in code)
    return replaced and any(one.is_dir() for one in folders)


_OBSTACLES = {
    "index_topk": "an indexer chooses the keys",
    "kv_lora_rank": "keys and values are made of one latent vector per token (MLA)",
    "attention_chunk_size": "a query sees its own chunk of the text",
    "mamba_d_state": "Mamba layers",
    "ssm_state_size": "Mamba layers",
    "altup_num_inputs": "several streams beside each other",
}
"""Settings of mechanisms that no known family has, and what they are."""


def _first_obstacle(config: Mapping[str, Any], tensors: Collection[str]) -> str:
    """What stands in the way of a family that is not known: a mechanism by its setting, or what the
    known family with the most tensors in common cannot read; empty without one."""
    inner = config.get("text_config")
    settings = {**config, **inner} if isinstance(inner, Mapping) else config
    if key := next((one for one in _OBSTACLES if settings.get(one) not in (None, 0, False)), None):
        value = printable(repr(settings[key]), 40)
        return f" The first setting in the way is {key}={value}: {_OBSTACLES[key]}."
    nearest = max(FAMILIES, key=lambda family: family.shared_names(tensors))
    if not nearest.shared_names(tensors):
        return ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            nearest.read(config, tensors, Path(CONFIG))
        except ValueError as error:
            obstacle = str(error)
        else:
            obstacle = str(caught[0].message) if caught else ""
    obstacle = obstacle.removeprefix(f"{CONFIG}: ").removeprefix(f"{CONFIG} ")
    return f" Nearest is {nearest.name}, for which {obstacle}" if obstacle else ""


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
