"""fenchel's attention inside models of transformers and modules of torch, with a proof."""

from fenchel.hf.adapter import Attachment, register, unregister
from fenchel.hf.loader import load_transformers_model
from fenchel.hf.multihead import MultiheadAttachment, attach
from fenchel.hf.verification import Proof, prove

__all__ = [
    "Attachment",
    "MultiheadAttachment",
    "Proof",
    "attach",
    "load_transformers_model",
    "prove",
    "register",
    "unregister",
]
