"""A folder to a subject: who reads which.

A run directory is ours, and so is a Hugging Face directory of a family that ``fenchel.model``
reads: its loader is there at once, where importing ``transformers`` alone takes seconds.
``transformers`` reads every other family, and of ours what ours does not have: a variant of the
settings, another head. What was found damaged is handed on to nobody.
"""

from importlib.util import find_spec
from pathlib import Path

from fenchel.checkpoints.hf_check import Checkpoint, look_at
from fenchel.inspection.foreign_model import open_foreign
from fenchel.inspection.our_model import Unsupported, open_known, open_run
from fenchel.inspection.trace import InspectedModel
from fenchel.model.families import FAMILIES

KNOWN = frozenset(family.name for family in FAMILIES)
"""The families that our own loader reads."""


def open_model(folder: str | Path) -> InspectedModel:
    """The model in a run directory or a Hugging Face directory."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"there is no directory {path}.")
    run = open_run(path)
    if run is not None:
        return run
    found = look_at(path)
    if found is not None:
        return open_checkpoint(found)
    raise ValueError(
        f"{path} is neither a run directory (checkpoints/) nor a Hugging Face directory "
        "(config.json)."
    )


def open_checkpoint(found: Checkpoint) -> InspectedModel:
    """By our own loader where it can, else by transformers."""
    if found.family not in KNOWN:
        if not _installed():
            raise ValueError(
                f"the family {found.family!r} is read through transformers: "
                "pip install 'fenchel[hf]'."
            )
        return open_foreign(found)
    try:
        return open_known(found)
    except Unsupported as why:
        reason = str(why)
    if not _installed():
        told = reason.rstrip(".")
        raise ValueError(f"{told}; transformers may have it: pip install 'fenchel[hf]'.")
    try:
        return open_foreign(found)
    except ValueError:
        raise ValueError(reason) from None  # neither can, and ours says what is wrong by its name


def _installed() -> bool:
    return find_spec("transformers") is not None
