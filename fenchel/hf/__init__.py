"""fenchel's attention inside models of transformers: one loader, one adapter, one proof."""

from fenchel.hf.adapter import Attachment, attach, register, unregister
from fenchel.hf.loader import load_transformers_model
from fenchel.hf.verification import Proof, prove

__all__ = [
    "Attachment",
    "Proof",
    "attach",
    "load_transformers_model",
    "prove",
    "register",
    "unregister",
]
