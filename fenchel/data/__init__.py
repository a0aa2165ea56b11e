"""Text to tokens to batches, without a model."""

from fenchel.data.batches import Batch, Batches, BatchSource, EvalBatch, windows
from fenchel.data.chat import PLAIN, ChatTemplate
from fenchel.data.config import TextConfig
from fenchel.data.corpus import Corpus, CorpusFacts, ProgressCallback, prepare
from fenchel.data.document_tokens import DocumentEncoder
from fenchel.data.packing import DocumentIds, PackedBatches
from fenchel.data.split import Split
from fenchel.data.text import Document, Text, holds_conversations, open_text
from fenchel.data.tokens import (
    END,
    PAD,
    Ids,
    begin_ids,
    begin_with,
    decode,
    encode,
    encode_batch,
    encode_whole,
    end_id,
    has_end,
    load_tokenizer,
    pad_id,
    train_tokenizer,
)

__all__ = [
    "END",
    "PAD",
    "PLAIN",
    "Batch",
    "BatchSource",
    "Batches",
    "ChatTemplate",
    "Corpus",
    "CorpusFacts",
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
    "begin_ids",
    "begin_with",
    "decode",
    "encode",
    "encode_batch",
    "encode_whole",
    "end_id",
    "has_end",
    "holds_conversations",
    "load_tokenizer",
    "open_text",
    "pad_id",
    "prepare",
    "train_tokenizer",
    "windows",
]
