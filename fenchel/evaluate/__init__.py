"""Perplexity, bits per byte, calibration, the look of attention, and what they are read against."""

from fenchel.evaluate.attention import attention_health, attention_maps, sample
from fenchel.evaluate.baseline import bzip2_bits, ngram_bits
from fenchel.evaluate.calibration import (
    Bin,
    Calibration,
    Confidence,
    Fit,
    Outcomes,
    Smoothing,
    brier_score,
    calibration_error,
    confidence,
    fit_temperature,
    outcomes,
    reliability,
    smoothed,
    smoothing,
    summarise,
)
from fenchel.evaluate.compare import Comparison, Reading, compare, fingerprint
from fenchel.evaluate.harness import Answers, harness_model
from fenchel.evaluate.score import Score, beginning, score, text_ids

__all__ = [
    "Answers",
    "Bin",
    "Calibration",
    "Comparison",
    "Confidence",
    "Fit",
    "Outcomes",
    "Reading",
    "Score",
    "Smoothing",
    "attention_health",
    "attention_maps",
    "beginning",
    "brier_score",
    "bzip2_bits",
    "calibration_error",
    "compare",
    "confidence",
    "fingerprint",
    "fit_temperature",
    "harness_model",
    "ngram_bits",
    "outcomes",
    "reliability",
    "sample",
    "score",
    "smoothed",
    "smoothing",
    "summarise",
    "text_ids",
]
