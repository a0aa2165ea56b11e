"""KV caches, sampling, decoding."""

from fenchel.generation.decode import GenerationSettings, generate, stream, stream_text
from fenchel.generation.kv_cache import KVCache
from fenchel.generation.prompt_lookup import PromptLookup
from fenchel.generation.sampling import (
    LogProbabilities,
    Penalties,
    Sampling,
    log_probabilities,
    sample,
)
from fenchel.generation.session import PrefixCache
from fenchel.generation.text_stream import Detokenizer, StopStrings, TextStream

__all__ = [
    "Detokenizer",
    "GenerationSettings",
    "KVCache",
    "LogProbabilities",
    "Penalties",
    "PrefixCache",
    "PromptLookup",
    "Sampling",
    "StopStrings",
    "TextStream",
    "generate",
    "log_probabilities",
    "sample",
    "stream",
    "stream_text",
]
