"""Presets: named sets of settings, the one table of model sizes.

``fenchel train --preset NAME``, ``preset = "NAME"`` in a settings file and ``fenchel plan NAME``
read it, ``fenchel list presets`` prints it, and benchmarks take published shapes from it. A preset
gives values to settings that are not given: any setting overrides it, and a value of the preset
that would then do nothing, such as the base of rotary positions under model.positions="alibi", is
left out.

*Ours* are blocks of the Llama kind (rotary positions, RMS norm, SwiGLU) with heads of width 64, for
which kernels of attention are fastest, at the depth of the original Transformer (6), of GPT-2 and
BERT base (12) and of GPT-2 medium and BERT large (24). Blocks have 12 L M^2 parameters: 0.6, 19, 85
and 302 million. Their vocabulary follows the text (data/config.py). "demo" is the preset of a run
that names none, three blocks, a depth for two minutes on two cores (docs/log.md); its LM head
is not tied, which costs no time and lets it start at bigram counts (model/bigram.py).

*Published* shapes have the blocks, the vocabulary and the number of parameters of the models whose
names they bear, at the context of their pre-training. fenchel convert writes a run of one as a
directory of its family. With text.tokenizer the vocabulary is still the published one, which is
that of the published tokenizer.

Training settings are by size (``Training``). Rates of 0.01 at "demo" and of 0.003 at 25 and 85
million parameters are measured (docs/log.md); those of larger models follow the fall of published
peak rates and are not measured here. How long a run is, train.steps or train.budget, is given by
the user.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fenchel.config import Setting, did_you_mean, without_unread
from fenchel.data.config import LARGEST_DEFAULT
from fenchel.model import ModelConfig
from fenchel.optim import OptimConfig
from fenchel.train import TrainConfig

DEFAULT = "demo"
SETTING = Setting(
    name="preset",
    kind="str",
    default=f'"{DEFAULT}"',
    about=(
        "A row of fenchel list presets, which gives values to settings that are not given. "
        "config.toml of a run holds these settings and not the name."
    ),
    needs="",
)
"""Its row in the reference of settings: no field of a run, since a run is all other settings."""


class Training(NamedTuple):
    """Rate and batch for models of about one size."""

    rate: float
    """Peak learning rate of matrices and of all else."""
    tokens: int
    """Per step."""


SMALL = Training(3e-3, 2**14)
BASE = Training(3e-3, 2**16)
LARGE = Training(1e-3, 2**18)
HUGE = Training(5e-4, 2**22)


@dataclass(frozen=True)
class Preset:
    """Settings of a run; those that are left out have their defaults."""

    about: str
    """A phrase for a table."""
    model: Mapping[str, Any]
    training: Training | None = None
    vocabulary: int | None = None
    """Of the tokenizer that is trained, and of the model; None follows the text."""

    def sections(self) -> dict[str, dict[str, Any]]:
        """Settings of the model, the optimiser and the loop."""
        optim: dict[str, Any] = {}
        train: dict[str, Any] = {}
        if self.training is not None:
            optim = dict.fromkeys(("learning_rate", "matrix_learning_rate"), self.training.rate)
            train = {"batch": self.training.tokens // self.model["context"]}
        return {"model": dict(self.model), "optim": optim, "train": train}


def _shape(context: int, width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {"context": context, "width": width, "layers": layers, "heads": heads, **more}


def _gpt2(about: str, training: Training, *sizes: int) -> Preset:
    blocks: dict[str, Any] = {
        "norm": "layer",
        "positions": "learned",
        "mlp": "gelu_tanh",
        "bias": True,
    }
    return Preset(about, _shape(1024, *sizes, **blocks), training, 50257)


def _pythia(about: str, training: Training, *sizes: int) -> Preset:
    blocks: dict[str, Any] = {
        "norm": "layer",
        "mlp": "gelu",
        "bias": True,
        "tied": False,
        "parallel": True,
    }
    return Preset(about, _shape(2048, *sizes, **blocks, rotary_fraction=0.25), training, 50304)


def _llama3(about: str, *sizes: int, hidden: int, tied: bool = True) -> Preset:
    blocks: dict[str, Any] = {"kv_heads": 8, "hidden": hidden, "rotary_base": 5e5, "tied": tied}
    return Preset(about, _shape(8192, *sizes, **blocks), HUGE, 128256)


PRESETS: Mapping[str, Preset] = {
    "demo": Preset("the default", _shape(128, 128, 3, 2, tied=False)),
    "small": Preset("for a laptop", _shape(512, 512, 6, 8), SMALL),
    "base": Preset("GPT-2's size", _shape(1024, 768, 12, 12), BASE),
    "large": Preset("GPT-2 medium's", _shape(1024, 1024, 24, 16), LARGE),
    "gpt2": _gpt2("GPT-2", BASE, 768, 12, 12),
    "gpt2-medium": _gpt2("GPT-2 medium", LARGE, 1024, 24, 16),
    "gpt2-large": _gpt2("GPT-2 large", LARGE, 1280, 36, 20),
    "gpt2-xl": _gpt2("GPT-2 XL", LARGE, 1600, 48, 25),
    "pythia-70m": _pythia("Pythia 70M", BASE, 512, 6, 8),
    "pythia-160m": _pythia("Pythia 160M", BASE, 768, 12, 12),
    "pythia-410m": _pythia("Pythia 410M", LARGE, 1024, 24, 16),
    "smollm-135m": Preset(
        "SmolLM 135M", _shape(2048, 576, 30, 9, kv_heads=3, hidden=1536), BASE, 49152
    ),
    "smollm-360m": Preset(
        "SmolLM 360M", _shape(2048, 960, 32, 15, kv_heads=5, hidden=2560), LARGE, 49152
    ),
    "qwen3-0.6b": Preset(
        "Qwen3 0.6B",
        _shape(
            *(4096, 1024, 28, 16),
            kv_heads=8,
            head_size=128,
            hidden=3072,
            qk_norm=True,
            rotary_base=1e6,
            epsilon=1e-6,
        ),
        LARGE,
        151936,
    ),
    "tinyllama": Preset(
        "TinyLlama 1.1B",
        _shape(2048, 2048, 22, 32, kv_heads=4, hidden=5632, tied=False),
        LARGE,
        32000,
    ),
    "llama-1b": _llama3("Llama 3.2 1B", 2048, 16, 32, hidden=8192),
    "llama-3b": _llama3("Llama 3.2 3B", 3072, 28, 24, hidden=8192),
    "llama-7b": Preset(
        "Llama 2 7B", _shape(4096, 4096, 32, 32, hidden=11008, tied=False), HUGE, 32000
    ),
    "llama-8b": _llama3("Llama 3.1 8B", 4096, 32, 32, hidden=14336, tied=False),
}
"""Every preset by its name, ours first."""


def expand(name: Any, sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The sections text, model, optim and train with the values of a preset where none is given.

    >>> expand("gpt2", {"model": {"layers": 2}})["model"]["layers"]
    2
    >>> expand("gpt-2", {})
    Traceback (most recent call last):
    ValueError: there is no preset 'gpt-2'; did you mean 'gpt2'?
    """
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; {did_you_mean(str(name), PRESETS)}")
    preset = PRESETS[name]
    text = dict(sections.get("text", {}))
    vocabulary = text.get("vocabulary", preset.vocabulary)
    if vocabulary is not None and "tokenizer" not in text:  # which has a vocabulary of its own
        text["vocabulary"] = vocabulary
    values = preset.sections()
    values["model"]["vocabulary"] = LARGEST_DEFAULT if vocabulary is None else vocabulary
    given = {key: sections.get(key, {}) for key in values}
    classes = {"model": ModelConfig, "optim": OptimConfig, "train": TrainConfig}
    read = {
        key: without_unread(cls, given[key], values[key], where=f"{key}.")
        for key, cls in classes.items()
    }
    return {"text": text, **read}
