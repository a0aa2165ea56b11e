"""Text to tokens to batches, without a model.

Batches are tensors. They are imported at their first use, so that text is read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fenchel.data.chat import PLAIN, ChatTemplate
from fenchel.data.config import TextConfig
from fenchel.data.document_tokens import DocumentEncoder, DocumentIds
from fenchel.data.split import Split
from fenchel.data.text import Document, Text, holds_conversations, open_text
from fenchel.data.token_files import Corpus, ProgressCallback, prepare
from fenchel.data.tokens import (
    END,
    PAD,
    AnyTokenizer,
    Ids,
    TextTokenizer,
    load_tokenizer,
    train_tokenizer,
)

if TYPE_CHECKING:
    from fenchel.data.batches import Batch as Batch
    from fenchel.data.batches import Batches as Batches
    from fenchel.data.batches import BatchSource as BatchSource
    from fenchel.data.batches import EvalBatch as EvalBatch
    from fenchel.data.batches import windows as windows
    from fenchel.data.packing import PackedBatches as PackedBatches

__all__ = [
    "END",
    "PAD",
    "PLAIN",
    "AnyTokenizer",
    "Batch",
    "BatchSource",
    "Batches",
    "ChatTemplate",
    "Corpus",
    "Document",
    "DocumentEncoder",
    "DocumentIds",
    "EvalBatch",
    "Ids",
    "PackedBatches",
    "ProgressCallback",
    "Split",
    "Text",
    "TextConfig",
    "TextTokenizer",
    "holds_conversations",
    "load_tokenizer",
    "open_text",
    "prepare",
    "train_tokenizer",
    "windows",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a name of batches.py or packing.py."""
        if name not in __all__:
            raise AttributeError(f"module 'fenchel.data' has no attribute {name!r}")
        module = "packing" if name == "PackedBatches" else "batches"
        globals()[name] = value = getattr(import_module(f"fenchel.data.{module}"), name)
        return value
