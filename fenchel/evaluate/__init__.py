"""Measures of a model on a text: perplexity, bits per byte, calibration, attention, baselines."""

from fenchel.evaluate.attention import attention_health, attention_maps, sample
from fenchel.evaluate.baseline import bzip2_bits, ngram_bits
from fenchel.evaluate.calibration import (
    Bin,
    Calibration,
    Confidence,
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
from fenchel.evaluate.diagnostics import PITFALLS, Pitfall, pitfalls
from fenchel.evaluate.divergence import document_kl
from fenchel.evaluate.embedding_neighbours import Neighbour, Neighbours, nearest_rows, neighbours
from fenchel.evaluate.score import (
    ChoiceScore,
    Score,
    score,
    score_choice,
    score_documents,
    text_ids,
)
from fenchel.evaluate.text import (
    Evaluation,
    EvaluationText,
    TextEvaluation,
    common_text,
    compare,
    evaluate_text,
    fingerprint,
    open_evaluation_text,
)

__all__ = [
    "PITFALLS",
    "Bin",
    "Calibration",
    "ChoiceScore",
    "Confidence",
    "Evaluation",
    "EvaluationText",
    "Neighbour",
    "Neighbours",
    "Pitfall",
    "Score",
    "TextEvaluation",
    "attention_health",
    "attention_maps",
    "brier_score",
    "bzip2_bits",
    "calibration_error",
    "common_text",
    "compare",
    "confidence",
    "document_kl",
    "evaluate_text",
    "fingerprint",
    "fit_temperature",
    "label_smoothing",
    "nearest_rows",
    "neighbours",
    "ngram_bits",
    "open_evaluation_text",
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
]
