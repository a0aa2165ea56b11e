"""What ``fenchel list`` and ``fenchel settings`` print: reference.json, which needs no torch.

Settings, presets and families are classes of packages that import torch, which takes seconds, and
what is printed of them is constant. ``python -m fenchel.cli.reference`` writes the file again; a
test compares it with the classes.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")


def read() -> dict[str, list[dict[str, Any]]]:
    """The rows of the sections "settings", "presets" and "families"."""
    rows: dict[str, list[dict[str, Any]]] = json.loads(FILE.read_text(encoding="utf-8"))
    return rows


def compute() -> dict[str, list[dict[str, Any]]]:
    """The same rows, from the classes."""
    return {"settings": _settings(), "presets": _presets(), "families": _families()}


def _settings() -> list[dict[str, Any]]:
    """Every setting of a run; its default is that of a run which names no preset."""
    from fenchel.config import reference, to_mapping, to_toml
    from fenchel.pipeline import RunConfig, settings
    from fenchel.pipeline.presets import SETTING

    default = to_mapping(settings({}))
    rows = [SETTING._asdict()]
    for row in reference(RunConfig):
        section, _, key = row.name.rpartition(".")
        own = default.get(section, {}).get(key) if section else default.get(key)
        if row.name != "model.vocabulary" and own is not None:
            row = row._replace(default=to_toml({"x": own}).partition(" = ")[2].strip())
        rows.append(row._asdict())
    return rows


def _presets() -> list[dict[str, Any]]:
    """The presets, with the memory that a step of theirs takes on one GPU."""
    from fenchel.data.config import vocabulary_for
    from fenchel.distributed.plan import Cluster, plan
    from fenchel.pipeline import PRESETS, settings

    rows = []
    for name, preset in PRESETS.items():
        # a vocabulary that follows the text is that of the built-in one, which has 8 MB
        vocabulary = preset.vocabulary or vocabulary_for(8 * 10**6)
        chosen = settings({"preset": name, "model": {"vocabulary": vocabulary}})
        model = chosen.model
        least = replace(chosen.train, accumulate=chosen.train.batch)  # a sequence at a time
        planned = plan(model, least, chosen.optim, Cluster(ranks=1))
        rows.append(
            {
                "name": name,
                "about": preset.about,
                "parameters": planned.parameters,
                "layers": model.layers,
                "width": model.width,
                "heads": model.heads,
                "kv_heads": model.groups,
                "context": model.context,
                "vocabulary": model.vocabulary,
                "follows_text": preset.vocabulary is None,
                "batch": chosen.train.batch,
                "learning_rate": chosen.optim.learning_rate,
                "train_bytes": int(planned.forecasts[0].peak),
                "weight_bytes": 4 * planned.parameters,
            }
        )
    return rows


def _families() -> list[dict[str, Any]]:
    """The families of Hugging Face checkpoints, each with its presets."""
    from fenchel.model.families.registry import FAMILIES, LARGER, family_for
    from fenchel.model.transformer import meta_model
    from fenchel.pipeline import PRESETS, settings

    of: dict[str, list[str]] = {}
    for name in PRESETS:
        config = settings({"preset": name}).model
        tensors = [key for key, _ in meta_model(config).named_parameters()]
        of.setdefault(family_for(config, tensors).architecture, []).append(name)
    return [
        {
            "model_type": family.name,
            "architecture": family.architecture,
            "presets": of.get(family.architecture, []),
            "inside": [outer for outer, names in LARGER.items() if family.name in names],
        }
        for family in {family.architecture: family for family in FAMILIES}.values()
    ]


if __name__ == "__main__":
    FILE.write_text(json.dumps(compute(), indent=1) + "\n", encoding="utf-8")
