"""Caches, sampling, decoding."""

from fenchel.generate.cache import KeyValueCache
from fenchel.generate.decode import generate, stream
from fenchel.generate.sample import Sampling, sample
from fenchel.generate.spelling import Spelling

__all__ = ["KeyValueCache", "Sampling", "Spelling", "generate", "sample", "stream"]
