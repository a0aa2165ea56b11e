"""What reads a family that fenchel does not have: small random checkpoints of transformers, tried.

``python -m tests.model.families.refused`` makes one of every causal family, runs the commands that
read a model through transformers, and prints where the refusal of ``load_model`` names others. That
takes some minutes; test_refused.py does it for a few families.
"""

import io
import re
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from fenchel.checkpoints import load_model
from fenchel.cli import main
from fenchel.data import train_tokenizer
from fenchel.model.families.registry import MODEL_TYPES

TEXT = "the sea and the land and the sky " * 30
LAYERS, HEADS, WIDTH = 2, 4, 32
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads"), HEADS),
    **dict.fromkeys(("num_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), HEADS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "moe_intermediate_size"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim"), 2 * WIDTH),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "sliding_window"), 16),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 300),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "decoder_layers": LAYERS,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "laurel_rank": 4,
    "hidden_size_per_layer_input": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_kv_shared_layers": 0,
    "activation_sparsity_pattern": None,
}
"""Sizes by all the names that families have for them."""


def make(model_type: str, folder: Path, kind: str = "CausalLM", **changes: Any) -> None:
    """Write a small random checkpoint of a family."""
    make_config = transformers.CONFIG_MAPPING[model_type]
    default = make_config().to_dict()
    settings = {k: v for k, v in SETTINGS.items() if k in {*default, *make_config.attribute_map}}
    for name in ("layer_types", "mlp_layer_types"):
        if types := default.get(name):
            settings[name] = (2 * sorted(set(types), key=types.index))[:LAYERS]
    config = make_config(**{**settings, **changes})
    auto: Any = getattr(transformers, f"AutoModelFor{kind}")
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config).parameters())
    if size > 5_000_000:
        raise ValueError(f"{size:,} parameters are not a small model.")
    auto.from_config(config).float().save_pretrained(folder)
    tokenizer = train_tokenizer([TEXT], 300)
    tokenizer.save(folder / "tokenizer.json")
    (folder / "text.txt").write_text(TEXT)


def named(folder: Path) -> list[str]:
    """The commands that the refusal of a directory names."""
    try:
        load_model(folder)
    except ValueError as error:
        found = re.search("; fenchel (.+) reads? it through transformers", str(error))
        return re.split(", | and ", found[1]) if found else []
    raise ValueError(f"{folder} is not refused.")


def reason(command: str, folder: Path) -> str | None:
    """Why a command does not read a directory; None where it does."""
    text = ["--text", str(folder / "text.txt"), "--max-tokens", "6"]
    arguments = {
        "inspect": [*text, "--json"],
        "lens": [*text, "--kind", "logit", "--json"],
        "ablate": [*text, "--exact", "1", "--json"],
        "patch": ["the sea", "the sky", "--exact", "1", "--json"],
        "attach": ["--map", "entmax"],
    }[command]
    said = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        status = main([command, str(folder), *arguments])
    return None if not status else said.getvalue().strip()


COMMANDS = ("inspect", "lens", "ablate", "patch", "attach")


def census() -> None:
    """Print every causal family whose refusal names another set of commands than work."""
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for model_type in [one for one in mapping if one not in MODEL_TYPES]:
        with TemporaryDirectory() as place:
            folder = Path(place)
            try:
                make(model_type, folder)
            except Exception as error:  # a family that these sizes do not fit
                print(f"{model_type}: not made, {error!s:.100}")
                continue
            promised = named(folder)
            works = {command: reason(command, folder) for command in COMMANDS}
            for command, why in works.items():
                if (why is None) != (command in promised):
                    print(f"{model_type}: {command} {why or 'works and is not named'!s:.150}")
        sys.stdout.flush()


if __name__ == "__main__":
    census()
