"""Caches, sampling, decoding."""

from fenchel.generate.cache import KeyValueCache
from fenchel.generate.decode import generate, stream, stream_text
from fenchel.generate.lookup import PromptLookup
from fenchel.generate.sample import Sampling, sample
from fenchel.generate.spelling import Spelling
from fenchel.generate.stopping import StopStrings, Telling

__all__ = [
    "KeyValueCache",
    "PromptLookup",
    "Sampling",
    "Spelling",
    "StopStrings",
    "Telling",
    "generate",
    "sample",
    "stream",
    "stream_text",
]
