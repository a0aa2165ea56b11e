"""Measures of a model on a text: perplexity, bits per byte, calibration, attention, baselines."""

from fenchel.evaluate.attention import attention_health, attention_maps, sample
from fenchel.evaluate.baseline import bzip2_bits, ngram_bits
from fenchel.evaluate.calibration import (
    Bin,
    Calibration,
    Confidence,
    LabelSmoothing,
    Outcomes,
    TemperatureFit,
    brier_score,
    calibration_error,
    confidence,
    fit_temperature,
    label_smoothing,
    outcomes,
    reliability,
    smoothed_targets,
    summarise,
)
from fenchel.evaluate.compare import Comparison, Evaluation, compare, fingerprint
from fenchel.evaluate.diagnostics import PITFALLS, Finding, Pitfall, pitfalls
from fenchel.evaluate.embedding_neighbours import Neighbour, Neighbours, nearest_rows, neighbours
from fenchel.evaluate.harness import HarnessAdapter, harness_model
from fenchel.evaluate.score import (
    ChoiceScore,
    Score,
    score,
    score_choice,
    score_documents,
    text_ids,
    truncate_ids,
)

__all__ = [
    "PITFALLS",
    "Bin",
    "Calibration",
    "ChoiceScore",
    "Comparison",
    "Confidence",
    "Evaluation",
    "Finding",
    "HarnessAdapter",
    "LabelSmoothing",
    "Neighbour",
    "Neighbours",
    "Outcomes",
    "Pitfall",
    "Score",
    "TemperatureFit",
    "attention_health",
    "attention_maps",
    "brier_score",
    "bzip2_bits",
    "calibration_error",
    "compare",
    "confidence",
    "fingerprint",
    "fit_temperature",
    "harness_model",
    "label_smoothing",
    "nearest_rows",
    "neighbours",
    "ngram_bits",
    "outcomes",
    "pitfalls",
    "reliability",
    "sample",
    "score",
    "score_choice",
    "score_documents",
    "smoothed_targets",
    "summarise",
    "text_ids",
    "truncate_ids",
]
