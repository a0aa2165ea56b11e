"""fenchel eval: how well a model predicts a text, and whether its confidence is calibrated."""

import json as json_format
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fenchel.cli.console import (
    LOADED_AS_STORED,
    CheckpointPath,
    Json,
    LoadFlags,
    ModelPath,
    Switch,
    Whole,
    break_lines,
    device_and_dtype,
    require_inputs,
    stages,
    text_path,
    width_of,
)
from fenchel.cli.steer import NO_DIRECTION, DirectionFlags
from fenchel.files import printable, require_output, write_atomic
from fenchel.hub_cache import model_name

if TYPE_CHECKING:
    from fenchel.evaluate import (
        ChoiceScore,
        Confidence,
        Evaluation,
        Score,
        TextEvaluation,
    )


def run(
    directory: ModelPath,
    /,
    *,
    text: str | None = None,
    split: Literal["validation", "train"] | None = None,
    tokens: Whole | None = None,
    context: Whole | None = None,
    stride: Whole | None = None,
    against: CheckpointPath | None = None,
    calibration: Switch = False,
    save: Switch = False,
    page: Path | None = None,
    loading_as: LoadFlags = LOADED_AS_STORED,
    steering: DirectionFlags = NO_DIRECTION,
    json: Json = False,
) -> int:
    """Loss, perplexity, bits per byte and calibration of a model on a text.

    Parameters
    ----------
    text
        "sotu", "kjv", a text file, a folder or a .jsonl file; the validation part of the run's own
        text by default. That of a tuned run is read document by document, as it was tuned, and of
        conversations the answers are predicted; any other text is read in windows.
    split
        The part of the run's own text: "validation", which was held out, or "train".
    tokens
        Number of tokens to predict, from the start of the text; all by default.
    context
        Tokens that the model reads at once, a window; as many as in training by default. Positions
        that are not learned can be read further.
    stride
        Tokens between the beginnings of two windows; half of a window by default, so that a token
        is predicted from at least half of one. The last window ends with the text.
    against
        A second model to evaluate on the same text: compared by bits per byte, and by perplexity
        where both have the same tokenizer.
    calibration
        Also measure ECE and Brier score on the second half of the text, before and after scaling
        by the temperature that fits its first half best.
    save
        Store the fitted temperature as calibration.json in the directory, for the confidence of
        served tokens; implies --calibration.
    page
        Write the reliability diagram to this file, which must not exist; implies --calibration.
    """
    if text is not None and split is not None:
        raise ValueError("--split names a part of the run's own text: leave out --text.")
    if tokens is not None and tokens < 1:
        raise ValueError(f"--tokens {tokens} leaves nothing to predict; give at least 1.")
    if save and (loading_as.adapter, steering) != (None, NO_DIRECTION):
        raise ValueError("--save stores the temperature of the model without --adapter or --steer.")
    calibration = calibration or save or page is not None
    if page is not None:
        reads = [directory, loading_as.adapter, against, text_path(text)]
        require_output(page, new=True, reads=reads)
    require_inputs(directory, text)
    with stages(json=json) as console:
        from fenchel.checkpoints.tokenizer import describe_beginning, read_tokenizer
        from fenchel.evaluate import common_text, evaluate_text, open_evaluation_text
        from fenchel.evaluate.calibration import CALIBRATION, write_calibration
        from fenchel.pipeline import own_text, prediction_map
        from fenchel.report.reliability import render

        if calibration and prediction_map(directory) is not None:
            raise ValueError(
                f"{directory} was trained by another loss than cross-entropy; calibration is "
                "measured on the softmax of the logits, so leave out --calibration, --save "
                "and --page."
            )
        if save and directory.is_dir():
            require_output(directory / CALIBRATION)
        on, _ = device_and_dtype(loading_as.device, loading_as.dtype)
        if text is not None:
            source = open_evaluation_text(text)
        else:
            source = own_text(directory, split or "validation")
        if against is not None:
            tokenizers = read_tokenizer(directory), read_tokenizer(against)
            names = str(directory), str(against)
            both = common_text(source, *tokenizers, limit=tokens, names=names)
            tokens, source = (tokens if both is source else None), both

        how: dict[str, Any] = {"limit": tokens, "context": context, "stride": stride}
        how["progress"] = console.progress

        def evaluate(
            path: Path, loading_as: LoadFlags, flags: DirectionFlags = NO_DIRECTION
        ) -> "tuple[TextEvaluation, str]":
            """The result of a model and how its texts begin, in words."""
            model, tokenizer, _ = loading_as.load(path)
            if (direction := flags.direction(model)) is not None:
                direction.hook_into(model)
            choice = prediction_map(path)
            measured = evaluate_text(model, tokenizer, source, name=str(path), choice=choice, **how)
            return measured, describe_beginning(tokenizer)

        measured, begin = evaluate(directory, loading_as, steering)
        if measured.documents is not None and measured.documents.conversations:
            begin = "A conversation is written by the chat template of the run."
        model, evaluation = measured.model, measured.evaluation
        output: dict[str, Any] = {
            "text": evaluation.text,
            "bytes": measured.bytes,
            "device": str(on),
            "dtype": str(model.lm_head_weight.dtype).removeprefix("torch."),
            "begin": begin,
            "context": measured.context,
            "stride": measured.stride,
            **_finite(evaluation.score),
        }
        if measured.documents is not None:
            output["documents"] = measured.documents.number
        lines = _lines(measured, begin, truncated=tokens is not None)
        if calibration:
            result = measured.confidence(console.progress)
            output["calibration"] = record = result.record()
            lines += _calibration_lines(result)
            if save:
                saved = write_calibration(directory, model, result, evaluation.text)
                lines.append(f"temperature stored  {printable(saved, 4096)}")
            if page is not None:
                write_atomic(page, render(model_name(directory), evaluation.text, record))
                lines.append(f"reliability diagram  {printable(page, 4096)}")
        if against is not None:
            second, _ = evaluate(against, replace(loading_as, adapter=None))
            output["against"], comparison_lines = _compare(evaluation, second.evaluation)
            lines += comparison_lines
    shown = break_lines(printable("\n".join(lines), None), width_of(sys.stdout))
    print(json_format.dumps(output) if json else shown)
    return 0


def _lines(measured: "TextEvaluation", begin: str, *, truncated: bool) -> list[str]:
    score = measured.evaluation.score
    amount = f"{measured.bytes:,} bytes, {score.tokens:,} tokens"
    lines = [
        f"{measured.evaluation.text}: {'the first, about ' if truncated else ''}{amount}",
        f"{begin} {_reading(measured)}",
        f"bits per byte  {score.bits_per_byte:.4f}",
    ]
    numbers = score._asdict()
    if "uncovered" not in numbers:
        lines.append(f"loss           {score.loss:.4f} nats per token")
    else:  # of another map than softmax, which may give a target probability 0
        lines += [
            f"loss           {score.loss:.4f} per token, the Fenchel-Young loss of train.loss",
            f"accuracy       {numbers['accuracy']:.4f}",
            f"support        {numbers['support']:.1f} tokens with a probability above 0",
            f"uncovered      {numbers['uncovered']:.4f} of the targets have probability 0",
        ]
    word = "per token (compare within one tokenizer only)"
    return [*lines, f"perplexity     {score.perplexity:.2f} {word}"]


def _reading(measured: "TextEvaluation") -> str:
    """How the text was read, as a sentence."""
    if (documents := measured.documents) is not None:
        number, context = documents.number, measured.context
        noun = "Conversations" if documents.conversations else "Documents"
        rest = f", and {measured.left_out:,} beyond them are left out" if measured.left_out else ""
        return f"{noun} are read one by one, {number:,} in all, by {context:,} tokens{rest}."
    return f"Windows have {measured.context:,} tokens and begin {measured.stride:,} apart."


def _calibration_lines(result: "Confidence") -> list[str]:
    rows = {"T = 1": result.plain}
    if result.scaled is not None:
        rows[f"T = {result.temperature:.4f}"] = result.scaled
    names = ("loss", "Brier", "accuracy", "confidence", "ECE", "ECE mass")
    lines = ["", f"{'':<12}" + "".join(f"{name:>11}" for name in names)]
    for name, c in rows.items():
        values = (c.loss, c.brier, c.accuracy, c.confidence, c.ece, c.ece_mass)
        lines.append(f"{name:<12}" + "".join(f"{value:11.4f}" for value in values))
    if result.scaled is None:
        return [*lines, "no finite temperature is best on the first half of the text"]
    return [
        *lines,
        f"temperature fitted on {result.fitted_on:,} predictions of the first half, "
        f"measured on {result.plain.predictions:,} of the second",
    ]


def _finite(score: "Score | ChoiceScore") -> dict[str, Any]:
    """The numbers of a score; JSON has no infinity, so an infinite one is None."""
    return {name: x if math.isfinite(x) else None for name, x in score._asdict().items()}


def _compare(first: "Evaluation", second: "Evaluation") -> tuple[dict[str, Any], list[str]]:
    """Two models measure by measure; a measure that cannot be compared gives the reason."""
    from fenchel.evaluate import compare

    output: dict[str, Any] = {"directory": second.name, **_finite(second.score)}
    lines = ["", f"against {second.name}"]
    for measure in ("bits_per_byte", "perplexity"):
        try:
            comparison = compare(first, second, by=measure)
        except ValueError as error:
            output["refused"] = str(error)
            lines.append(str(error))
            continue
        if math.isfinite(comparison.difference):
            output[f"{measure}_difference"] = comparison.difference
        name = measure.replace("_", " ")
        lines.append(f"{name:<14} {comparison.first:.4f} and {comparison.second:.4f}")
    return output, lines
