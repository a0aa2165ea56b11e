"""Caches, sampling, decoding."""

from fenchel.generate.decode import generate, stream, stream_text
from fenchel.generate.kv_cache import KVCache
from fenchel.generate.prompt_lookup import PromptLookup
from fenchel.generate.sampling import Sampling, sample
from fenchel.generate.text_stream import Detokenizer, StopStrings, TextStream

__all__ = [
    "Detokenizer",
    "KVCache",
    "PromptLookup",
    "Sampling",
    "StopStrings",
    "TextStream",
    "generate",
    "sample",
    "stream",
    "stream_text",
]
