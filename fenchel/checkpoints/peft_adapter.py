"""LoRA adapters as directories of the PEFT library, written and read.

    adapter_config.json          {"peft_type": "LORA", "r": 16, "lora_alpha": 32, ...}
    adapter_model.safetensors    base_model.model.MODULE.lora_A.weight (r, I), lora_B.weight (O, r)

MODULE is a linear map of the model in transformers, W' = W + (lora_alpha / r) B A. Its name and its
layout are those of the family's table of tensors, so that adapters travel as weights do:

    three maps there, one here (Llama)      q_proj has the rows of B that make queries, and A
    one map there, transposed (GPT-2)       the same A and B: PEFT writes them for x W^T always
    one map there, interleaved (NeoX)       the rows of B in the order of that family
    one map there, two here (Phi-3)         A of both, B zero on the rows of the other

Where ours has adapters only on queries, keys or values and the family has one map for all, the
three stand side by side in one of rank P r, B being zero between them; rank_pattern and
alpha_pattern say so. All of it is exact.

``merge_adapter`` adds the product to the weights of a loaded model. A directory from elsewhere is
checked first: variants of LoRA that compute something else (DoRA, trained biases or embeddings) are
refused by name, and so is a tensor that belongs to no linear map of the model.

Hu et al. (2021), LoRA: low-rank adaptation of large language models.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fenchel.checkpoints.directory import (
    DTYPES,
    CheckpointDirectory,
    TensorLocation,
    has_file,
    open_tensors,
    read_bounded_json,
    regular_file,
    require_finite,
    verify_manifest,
)
from fenchel.checkpoints.safetensors_header import read_header
from fenchel.files import printable
from fenchel.model.families import Family, Match, family_for
from fenchel.model.families.config_reader import CONFIG
from fenchel.model.families.tensor_rows import TRANSPOSED
from fenchel.model.lora import LoraLinear, lora_layers
from fenchel.model.sigma_linear import SigmaLinear
from fenchel.model.transformer import Transformer

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_LARGEST_RANK = 2**16
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "lora_bias": (False, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None, {}),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
"""Settings of PEFT that change what an adapter computes, with the values that change nothing."""


class Pair(NamedTuple):
    """An adapter of one linear map of the family."""

    module: str
    """Its name in transformers."""
    A: Tensor
    """(R, I)."""
    B: Tensor
    """(O, R)."""


def family_of_model(model: Transformer) -> Family:
    """The family that a model was loaded from, or the first that expresses it."""
    config = json.loads(model.source_files.get(CONFIG, b"{}"))
    weights = [name for name in model.state_dict() if not name.endswith((".lora_A", ".lora_B"))]
    return family_for(model.config, weights, config.get("model_type"))


def require_exchange(family: Family) -> None:
    """Refuse a family whose queries and gates lie side by side in one matrix, head by head."""
    if any(row.layout.alone for row in family.tensors):
        raise ValueError(
            f"adapters of {family.name} are not exchanged with PEFT: one matrix of its files holds "
            "rows of two of ours in turn; merge them into the weights."
        )


def adapter_files(model: Transformer, *, base: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The files and tensors of a PEFT directory for a model with adapters.

    ``base`` is what adapter_config.json calls the model without them.
    """
    family, layers = family_of_model(model), list(lora_layers(model))
    if not layers:
        raise ValueError("the model has no adapters to write.")
    require_exchange(family)
    rank, scale = layers[0][1].rank, layers[0][1].scale
    modules: dict[str, Pair] = {}
    for name, layer in layers:
        (match,) = family.matches(model.config, [f"{name}.weight"])
        for pair in _pairs(layer, match):
            if (other := modules.get(pair.module)) is not None:  # side by side
                A, B = torch.cat((other.A, pair.A)), torch.cat((other.B, pair.B), dim=1)
                pair = Pair(pair.module, A, B)
            modules[pair.module] = pair
    pairs = list(modules.values())
    tensors = {
        f"{_PREFIX}{module}.lora_{part}.weight": torch.empty_like(
            factor, device="cpu", memory_format=torch.contiguous_format, requires_grad=False
        ).copy_(factor.detach())  # a copy: three modules may share an A, and files do not
        for module, *factors in pairs
        for part, factor in zip("AB", factors, strict=True)
    }
    wider = {module: len(A) for module, A, _ in pairs if len(A) != rank}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": match.layout is TRANSPOSED,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": _targets([module for module, _, _ in pairs], family, model),
        "rank_pattern": wider,
        "alpha_pattern": {module: scale * R for module, R in wider.items()},
    }
    return {ADAPTER_CONFIG: json.dumps(settings, indent=2, sort_keys=True) + "\n"}, tensors


def _pairs(layer: LoraLinear, match: Match) -> list[Pair]:
    """The adapters of one of our maps, as those of the maps of the family that hold it."""
    modules = [name.removesuffix(".weight") for name in match.theirs]
    A: Tensor = layer.lora_A
    B: Tensor = layer.lora_B
    single = layer.parts == ((0, layer.out_features),)
    if len(modules) == 1:
        if not single:  # side by side, each on its own rows
            B = B.new_zeros(layer.out_features, len(A))
            for n, ((start, stop), (_, B_p)) in enumerate(
                zip(layer.parts, layer.pairs(), strict=True)
            ):
                B[start:stop, n * layer.rank : (n + 1) * layer.rank] = B_p
        rows = B if match.layout is TRANSPOSED else match.split(B)[0]
        before = match.layout.part * len(rows)
        after = (match.layout.parts - 1) * len(rows) - before
        return [Pair(modules[0], A, pad(rows, (0, 0, before, after)))]
    if single:
        return [Pair(module, A, rows) for module, rows in zip(modules, match.split(B), strict=True)]
    sizes = [len(rows) for rows in match.split(layer.weight)]
    stops = list(accumulate(sizes))
    ranges = [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    pairs = []
    for (start, stop), (A_p, B_p) in zip(layer.parts, layer.pairs(), strict=True):
        rows = B_p.new_zeros(layer.out_features, B_p.shape[1])
        rows[start:stop] = B_p
        number = ranges.index((start, stop))
        pairs.append(Pair(modules[number], A_p, match.split(rows)[number]))
    return pairs


def _targets(modules: Sequence[str], family: Family, model: Transformer) -> list[str]:
    """Names that PEFT finds the modules by: the last part, or two where that has other modules."""
    others = _linear_maps(family, model).keys() - set(modules)
    last = {module.rpartition(".")[2] for module in modules}
    shared = {other.rpartition(".")[2] for other in others}
    if last & shared:
        return sorted({".".join(module.split(".")[-2:]) for module in modules})
    return sorted(last)


class _Place(NamedTuple):
    """One of our linear maps that holds a map of the family, or some of its rows."""

    linear: nn.Linear
    match: Match
    number: int
    """Which of the family's maps that it holds."""

    def outputs(self) -> int:
        """How many rows of the family's map are in ours."""
        part = self.match.split(self.linear.weight)[self.number]
        return part.shape[1 if self.match.layout is TRANSPOSED else 0]

    def add(self, product: Tensor) -> None:
        """Add those rows of the product of an adapter, (O, I), in its dtype."""
        layout, weight = self.match.layout, self.linear.weight
        theirs = [part.to(product.dtype) for part in self.match.split(weight)]
        theirs[self.number] = theirs[self.number] + (
            product.t() if layout is TRANSPOSED else product
        )
        joined = theirs[0] if layout.parts > 1 else self.match.join(theirs)
        whole = joined.to(weight.dtype)
        self.linear.weight = nn.Parameter(whole.contiguous(), weight.requires_grad)


def _linear_maps(family: Family, model: Transformer) -> dict[str, list[_Place]]:
    """The linear maps inside blocks by their names in transformers, in the order of their rows."""
    linears = {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("blocks.")
    }
    places: dict[str, list[_Place]] = {}
    for match in sorted(family.matches(model.config, linears), key=lambda match: match.layout.part):
        for number, theirs in enumerate(match.theirs):
            place = _Place(linears[match.ours], match, number)
            places.setdefault(theirs.removesuffix(".weight"), []).append(place)
    return places


@torch.no_grad()
def merge_adapter(model: Transformer, path: str | Path) -> list[str]:
    """Add the adapter of a PEFT directory to the weights of a loaded model.

    Returns the names of the linear maps in transformers. Sums are made in float32 at least.
    """
    path = Path(path)
    if not path.is_dir() or not has_file(path, ADAPTER_CONFIG):
        raise ValueError(f"{path} is not an adapter: it has no {ADAPTER_CONFIG}.")
    if any(isinstance(module, SigmaLinear | LoraLinear) for module in model.modules()):
        raise ValueError(f"{path} needs a model of plain linear maps; convert the model first.")
    directory = open_adapter(path)
    family = family_of_model(model)
    require_exchange(family)
    places = _linear_maps(family, model)
    with open_tensors(directory) as tensors:
        merged = []
        for module, names in _modules(directory, places, family):
            weight = places[module][0].linear.weight
            rows = [place.outputs() for place in places[module]]
            outputs, inputs = sum(rows), places[module][0].linear.in_features
            A, B = (directory.tensors[names[part]].entry for part in "AB")
            R = A.shape[0]
            if A.shape != (R, inputs) or B.shape != (outputs, R) or not 0 < R <= _LARGEST_RANK:
                raise ValueError(
                    f"{path}: the adapter of {module} has shapes {list(A.shape)} and "
                    f"{list(B.shape)}, and the map has {inputs} inputs and {outputs} outputs."
                )
            wide = torch.promote_types(weight.dtype, torch.float32)
            factors = [tensors[names[part]].to(weight.device, wide) for part in "AB"]
            for part, factor in zip("AB", factors, strict=True):
                require_finite(factor, f"{path}: {names[part]}")
            product = _scale(directory, module, R) * (factors[1] @ factors[0])
            for place, part_OI in zip(places[module], torch.split(product, rows), strict=True):
                place.add(part_OI)
            merged.append(module)
    return merged


def open_adapter(path: Path) -> CheckpointDirectory:
    """The checked settings and tensor table of a PEFT directory.

    Where it has a manifest of ours, every file that this names is compared with it.
    """
    digests = verify_manifest(path)
    settings = read_bounded_json(path, ADAPTER_CONFIG)
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{path} is a {printable(repr(kind))} adapter; LORA is read.")
    for name, neutral in _NEUTRAL.items():
        if name in settings and settings[name] not in neutral:
            raise ValueError(
                f"{path}: {name}={printable(repr(settings[name]))} is not part of plain LoRA; "
                "merge the adapter with peft (merge_and_unload) and give the result."
            )
    if not has_file(path, ADAPTER_WEIGHTS):
        raise ValueError(f"{path} has no {ADAPTER_WEIGHTS}; pickles are not read.")
    file = regular_file(path, ADAPTER_WEIGHTS)
    entries = read_header(file)
    if not entries:
        raise ValueError(f"{file} holds no tensors.")
    for name, entry in entries.items():
        if entry.dtype not in DTYPES or len(entry.shape) != 2:
            raise ValueError(
                f"{file}: {printable(name)} is {entry.dtype} of {list(entry.shape)}; the matrices "
                f"of an adapter are of {', '.join(DTYPES)}."
            )
    tensors = {name: TensorLocation(file, name, entry) for name, entry in entries.items()}
    return CheckpointDirectory(path, settings, tensors, digests)


def _modules(
    directory: CheckpointDirectory, places: Collection[str], family: Family
) -> Iterator[tuple[str, dict[str, str]]]:
    """Every module with an adapter, and the names of its two tensors."""
    modules: dict[str, dict[str, str]] = {}
    for name in directory.tensors:
        match = _NAME.fullmatch(name)
        if match is None or match[1] not in places:
            raise ValueError(
                f"{directory.path} holds {printable(name)}, which is an adapter of no linear map "
                f"in the blocks of this {family.name}."
            )
        modules.setdefault(match[1], {})[match[2]] = name
    for module, names in modules.items():
        if names.keys() != {"A", "B"}:
            raise ValueError(f"{directory.path} has one of two matrices for {module}.")
        yield module, names


def _scale(directory: CheckpointDirectory, module: str, R: int) -> float:
    """lora_alpha / r of a module, or lora_alpha / sqrt(r) with use_rslora."""
    settings, where = directory.config, directory.path / ADAPTER_CONFIG
    rank = _by_module(settings, "rank_pattern", module, settings.get("r"), where)
    alpha = _by_module(settings, "alpha_pattern", module, settings.get("lora_alpha"), where)
    if rank != R:
        raise ValueError(f"{where} has rank {rank:g} for {module}, and its matrices have {R}.")
    return alpha / (math.sqrt(R) if settings.get("use_rslora") is True else R)


def _by_module(
    settings: Mapping[str, Any], pattern: str, module: str, default: Any, where: Path
) -> float:
    """A number of the settings, or that of the first name in ``pattern`` that ends the module."""
    named = settings.get(pattern) or {}
    if not isinstance(named, dict) or not all(re.fullmatch(r"[\w.]+", key) for key in named):
        raise ValueError(f"{where}: {pattern} should name modules by their names.")
    names = (key for key in named if module == key or module.endswith(f".{key}"))
    key = next(names, None)
    value = default if key is None else named[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        name = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}[pattern]
        raise ValueError(f"{where}: {name} should be above 0, got {printable(repr(value))}.")
    return float(value)
