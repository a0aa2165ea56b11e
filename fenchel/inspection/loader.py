"""Opens a folder for inspection, with fenchel's own loader or with transformers.

fenchel's loader reads run directories and Hugging Face directories of the families in
fenchel/model/families; it starts at once, where importing ``transformers`` takes seconds.
``transformers`` reads every other family, and variants of the known ones that fenchel does not
have: other settings, another head. A damaged directory is refused before either loads it.
"""

from importlib.util import find_spec
from pathlib import Path

from fenchel.checkpoints.directory import CheckpointDirectory, has_file, open_directory
from fenchel.checkpoints.run_checkpoint import is_run
from fenchel.checkpoints.tokenizer import read_tokenizer
from fenchel.data import TextTokenizer
from fenchel.inspection.foreign_model import open_foreign
from fenchel.inspection.our_model import Unsupported, open_known, open_run
from fenchel.inspection.trace import InspectedModel
from fenchel.model.families.config_reader import CONFIG
from fenchel.model.families.registry import MODEL_TYPES


def open_model(folder: str | Path) -> InspectedModel:
    """The model in a run directory or a Hugging Face directory."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"there is no directory {path}.")
    if is_run(path):
        return open_run(path)
    if has_file(path, CONFIG):
        directory = open_directory(path)
        return open_checkpoint(directory, read_tokenizer(path, config=directory.config))
    raise ValueError(
        f"{path} is neither a run directory (checkpoints/) nor a Hugging Face directory "
        "(config.json)."
    )


def open_checkpoint(directory: CheckpointDirectory, tokenizer: TextTokenizer) -> InspectedModel:
    """By our own loader where it can, else by transformers."""
    if directory.model_type not in MODEL_TYPES:
        if not _installed():
            raise ValueError(
                f"the family {directory.model_type!r} is read through transformers: "
                "pip install 'fenchel[hf]'."
            )
        return open_foreign(directory, tokenizer)
    try:
        return open_known(directory, tokenizer)
    except Unsupported as why:
        reason = str(why)
    if not _installed():
        sentence = reason.rstrip(".")
        raise ValueError(f"{sentence}; transformers may have it: pip install 'fenchel[hf]'.")
    try:
        return open_foreign(directory, tokenizer)
    except ValueError:
        raise ValueError(reason) from None  # neither can, and ours says what is wrong by its name


def _installed() -> bool:
    return find_spec("transformers") is not None
