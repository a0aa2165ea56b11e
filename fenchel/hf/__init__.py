"""TODO"""

from fenchel.hf.adapter import Attachment, attach, register, unregister
from fenchel.hf.proof import Proof, prove

__all__ = ["Attachment", "Proof", "attach", "prove", "register", "unregister"]
