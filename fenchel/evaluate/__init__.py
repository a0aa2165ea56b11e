"""Perplexity, bits per byte, the look of attention, and the baselines they are read against."""

from fenchel.evaluate.attention import attention_health, attention_maps
from fenchel.evaluate.baseline import bzip2_bits, ngram_bits
from fenchel.evaluate.sample import sample
from fenchel.evaluate.score import Score, score, text_ids

__all__ = [
    "Score",
    "attention_health",
    "attention_maps",
    "bzip2_bits",
    "ngram_bits",
    "sample",
    "score",
    "text_ids",
]
