"""Text to tokens to batches, without a model."""

from fenchel.data.batches import Batch, Batches, BatchSource, EvalBatch, windows
from fenchel.data.chat import PLAIN, ChatTemplate
from fenchel.data.config import TextConfig
from fenchel.data.document_tokens import DocumentEncoder
from fenchel.data.packing import DocumentIds, PackedBatches
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
