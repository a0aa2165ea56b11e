"""The one reader and the one writer of run directories and Hugging Face directories."""

from fenchel.checkpoints.generation_config import GenerationConfig, read_generation_config
from fenchel.checkpoints.hf_export import convert, convert_to_peft, save
from fenchel.checkpoints.load import Loaded, load, load_model
from fenchel.checkpoints.run_checkpoint import Progress

__all__ = [
    "GenerationConfig",
    "Loaded",
    "Progress",
    "convert",
    "convert_to_peft",
    "load",
    "load_model",
    "read_generation_config",
    "save",
]
