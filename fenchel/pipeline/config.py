"""The settings of a whole run, which of them a resume may change, and its callback."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Protocol

from fenchel.config import Use, did_you_mean, from_mapping, reference, require_read, to_mapping
from fenchel.data import TextConfig
from fenchel.model import ModelConfig
from fenchel.model.lora import TARGETS, LoraConfig
from fenchel.optim import OptimConfig
from fenchel.optim.config import peak_score_rate
from fenchel.pipeline.lipschitz import default_settings, require_known_constant
from fenchel.pipeline.presets import DEFAULT, expand
from fenchel.train import Callback, TrainConfig

NO_EFFECT_ON_WEIGHTS = {
    f"train.{name}"
    for name in (
        "log_every evaluate_every evaluate_tokens save_every keep max_nonfinite_steps log "
        "timeout".split()
    )
}
UNCHANGEABLE = {
    "optim.optimiser": "its state belongs to the one that wrote it",
    "train.init": "it is past its first step",
    "train.budget": "it was turned into steps, so give --steps",
    "train.loss": "the best step so far was chosen by it",
    "train.loss_alpha": "the best step so far was chosen by it",
}
"""Settings besides the model's and the text's that a resume cannot change, and why."""


LONGEST_ROW = 1024
"""Positions per row of a tuned model with a longer context, where tune.context is not given."""
ADAPTER_RULES = ("adamw", "adam_l2", "sgd", "sgd_average", "nesterov")
"""Optimisers that can train adapters: the others measure the weights beside them."""
_DERIVED = (
    *("model.vocabulary", "train.steps", "train.threads"),
    *("train.accumulate", "train.compile", "train.cuda_graph"),
)


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Settings of a run that tunes a checkpoint; the section is there in no other."""

    checkpoint: str
    """The run directory or Hugging Face directory whose model is tuned."""
    context: int | None = None
    """Positions per row of documents; None is the context of the model, 1024 at most."""
    epochs: float = 3.0
    """Passes over the documents, read when neither train.steps nor train.budget is given."""
    rank: int | None = None
    """r of LoRA adapters, which are trained instead of the weights; None trains the weights."""
    alpha: float | None = None
    """Factor of the adapters, times 1 / r; None is 2 r."""
    targets: tuple[str, ...] = ("q", "k", "v", "out")
    """The linear maps of every block that have adapters: "q", "k", "v" or "qkv", which is one
    adapter for the three, "out", "gate", "up", "down"."""
    kl: float | None = None
    """Budget, in nats per token, of the mean KL divergence of the tuned model from the checkpoint
    on held-out text; it is measured every few steps, and a model beyond it is moved back along the
    line to the checkpoint. None is no budget."""

    USES: ClassVar = (Use(("alpha", "targets"), "rank", lambda c: c.rank is not None),)

    def __post_init__(self) -> None:
        if self.context is not None and self.context < 2:
            raise ValueError(f"tune.context={self.context} should be at least 2.")
        if not 0.0 < self.epochs < math.inf:
            raise ValueError(f"tune.epochs={self.epochs} should be above 0 and finite.")
        if self.kl is not None and not 0.0 < self.kl < math.inf:
            raise ValueError(f"tune.kl={self.kl} should be above 0 and finite, or left out.")
        for target in self.targets:
            if target not in TARGETS:
                raise ValueError(f"tune.targets has {target!r}; {did_you_mean(target, TARGETS)}")
        require_read(self)
        assert self.lora is None or self.lora.rank  # raises where LoRA would

    @property
    def lora(self) -> LoraConfig | None:
        """The adapters; None where all weights are trained."""
        if self.rank is None:
            return None
        alpha = 2.0 * self.rank if self.alpha is None else self.alpha
        return LoraConfig(rank=self.rank, alpha=alpha, targets=self.targets)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Every setting of a run, by stage."""

    seed: int = 0
    """The only source of randomness: initial weights, order of batches, dropout, the sample."""
    text: TextConfig = field(default_factory=TextConfig)
    model: ModelConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    tune: TuneConfig | None = None

    USES: ClassVar = (
        Use(
            ("text.vocabulary", "text.tokenizer_model"),
            "no text.tokenizer",
            lambda c: c.text.tokenizer is None,
        ),
        Use(("train.balance_weight",), "model.experts", lambda c: c.model.experts > 0),
        Use(
            ("text.vocabulary", "text.tokenizer_model", "text.tokenizer", "train.init"),
            "a new model",
            lambda c: c.tune is None,
        ),
    )

    def __post_init__(self) -> None:
        if self.model.kind != "decoder":
            raise ValueError(
                f"model.kind={self.model.kind!r} sees the tokens it would have to predict; a run "
                'trains model.kind="decoder".'
            )
        if self.train.lipschitz is not None:
            require_known_constant(self.model)
        if self.train.spectral_cap is not None and self.model.sigma_reparam:
            raise ValueError(
                "train.spectral_cap limits matrices whose norms model.sigma_reparam learns apart; "
                "choose one."
            )
        if self.tune is not None:
            for name in ("lipschitz", "spectral_cap"):
                if getattr(self.train, name) is not None:
                    raise ValueError(
                        f"train.{name} holds a model to a limit from its first step on, and would "
                        "change the checkpoint that is tuned; leave it out."
                    )
            if (self.tune.context or 0) > self.model.context:
                raise ValueError(
                    f"tune.context={self.tune.context} is more than the {self.model.context} "
                    "positions of the model."
                )
            if self.tune.rank is not None and self.optim.optimiser not in ADAPTER_RULES:
                raise ValueError(
                    f"adapters are moved by one rule for all ({', '.join(ADAPTER_RULES)}), not by "
                    f"optim.optimiser={self.optim.optimiser!r}."
                )
            if self.tune.rank is not None and self.train.qk_clip is not None:
                raise ValueError(
                    "train.qk_clip scales query and key weights, which a run that trains adapters "
                    "leaves as they are; leave it out."
                )
        require_read(self)

    @property
    def lora(self) -> LoraConfig | None:
        """The adapters that are trained; None where the weights are."""
        return None if self.tune is None else self.tune.lora

    @property
    def row_length(self) -> int:
        """Positions per row of a batch, T."""
        if self.tune is None:
            return self.model.context
        return self.tune.context or min(self.model.context, LONGEST_ROW)


class RunCallback(Callback, Protocol):
    """A callback that also follows the stages before training."""

    def progress(self, what: str, done: int, total: int) -> None:
        """``done`` of ``total`` units of the stage ``what`` are complete; 0 is an unknown total."""


def settings(mapping: Mapping[str, Any]) -> RunConfig:
    """Nested plain values to settings.

    Some defaults of the model follow from other sections: the vocabulary is that of the text, the
    largest possible until a text is read whose size decides it, "score" trains with a norm of
    queries and keys, where dot products are the scores, and train.lipschitz with the settings of
    fenchel/pipeline/lipschitz.py. ``preset`` names a row of
    ``fenchel.pipeline.presets.PRESETS``, which all other settings override.

    >>> settings({"text": {"vocabulary": 300}}).model.vocabulary
    300
    >>> settings({"preset": "small", "model": {"layers": 8}}).model.width
    512
    >>> settings({"optim": {"optimiser": "score"}}).model.qk_norm
    True
    """
    rest = dict(mapping)
    preset = rest.pop("preset", DEFAULT)
    names = ("text", "model", "optim", "train")
    given = {name: section(rest, name) for name in names}
    sections = expand(preset, given)
    model, optim = sections["model"], sections["optim"]
    if optim.get("optimiser") == "score" and model.get("scores") != "l2":
        model.setdefault("qk_norm", True)
    if sections["train"].get("lipschitz") is not None:
        shape = ("width",) if preset == DEFAULT else ("width", "heads")
        sizes = {name: model[name] for name in shape if name in model}
        model |= default_settings({**sizes, **given["model"]})
    if sections["train"].get("spectral_cap") is not None:
        model.setdefault("norm_parameters", "none")  # gains would grow in place of the matrices
    return from_mapping(RunConfig, {**rest, **sections})


def changed_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that differ from those of a run without arguments, with the values there.

    Left out are those that follow from the text, the budget, the machine or a checkpoint.

    >>> changed_settings(settings({"seed": 3, "model": {"choice": "entmax"}}))
    {'seed': 0, 'model': {'choice': 'softmax'}}
    """
    own, default = to_mapping(config), to_mapping(settings({}))
    changed: dict[str, Any] = {"seed": default["seed"]} if own["seed"] != default["seed"] else {}
    for name in ("text", "optim", "train") if config.tune else ("text", "model", "optim", "train"):
        keys = {**own[name], **default[name]}
        others = {
            key: default[name].get(key)
            for key in keys
            if own[name].get(key) != default[name].get(key) and f"{name}.{key}" not in _DERIVED
        }
        changed |= {name: others} if others else {}
    return changed


def section(mapping: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """One section of settings, empty where none is given; refused if it is a value."""
    values = mapping.get(name, {})
    if not isinstance(values, Mapping):
        raise ValueError(f"{name}={values!r} should be a section, with settings in it.")
    return values


def comments() -> dict[str, str]:
    """The meaning of every setting, by its dotted name.

    >>> comments()["train.batch"]
    'Sequences per step, B.'
    """
    return {
        row.name: f"{row.about} Needs {row.needs}." if row.needs else row.about
        for row in reference(RunConfig)
    }


def change_settings(
    before: Mapping[str, Any], changes: Mapping[str, Any], callback: RunCallback
) -> RunConfig:
    """The settings of a run with ``changes``; refused where its state would not fit them."""
    after = {key: dict(v) if isinstance(v, Mapping) else v for key, v in before.items()}
    messages = []
    train = settings(before).train
    same_bits = {*NO_EFFECT_ON_WEIGHTS, "train.recompute"}
    if train.cells is not None:
        same_bits.add("train.shard")
    for section, values in changes.items():
        for key, value in values.items() if isinstance(values, Mapping) else [("", values)]:
            name = f"{section}.{key}" if key else section
            place = after.setdefault(section, {}) if key else after
            if not isinstance(place, dict):
                raise ValueError(f"there is no setting {name!r}.")
            if place.get(key or section) == value:
                continue
            if section in ("model", "text", "tune", "preset") or name in UNCHANGEABLE:
                instead = UNCHANGEABLE.get(name, "start a new run instead")
                raise ValueError(f"{name} cannot change in a run that has begun; {instead}.")
            place[key or section] = value
            exactly = "" if name in same_bits else ", no longer bit for bit as begun"
            messages.append(f"{name} is now {value}: the run goes on{exactly}.")
    config = settings(after)
    for message in (*messages, *_new_score_rate(settings(before), config)):
        callback.message(message)
    return config


def _new_score_rate(before: RunConfig, after: RunConfig) -> list[str]:
    """A message where ScoreDescent's change per step follows from another number of steps."""
    steps, same = after.train.steps, before.optim.score_rate == after.optim.score_rate is None
    if after.optim.optimiser != "score" or not same or None in (steps, before.train.steps):
        return []
    rates = [peak_score_rate(config.optim, config.train.steps) for config in (before, after)]
    if rates[0] == rates[1]:
        return []
    return [
        f"The steps to come change the scores by {rates[1]:.4g} at the peak of the schedule, not "
        f"{rates[0]:.4g}: optim.score_total={after.optim.score_total:g} over {steps:,} steps."
    ]


def new_run_path(parent: Path, source: str) -> Path:
    """The folder of a run that begins now on a text: runs/2026-11-15_143205_sotu."""
    name = f"{time.strftime('%Y-%m-%d_%H%M%S')}_{Path(source).stem or 'text'}"
    names = (name if n == 1 else f"{name}_{n}" for n in count(1))
    return next(parent / name for name in names if not (parent / name).exists())
