"""fenchel eval: how well a model predicts a text, and whether its confidence is calibrated."""

import json as json_format
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter

from fenchel.cli.console import Console, DtypeName, device_and_dtype

if TYPE_CHECKING:
    import torch

    from fenchel.data import Ids
    from fenchel.evaluate import Calibration, Confidence, Evaluation
    from fenchel.model import Transformer

Switch = Annotated[bool, Parameter(negative="")]


def run(
    directory: Path,
    /,
    *,
    text: str | None = None,
    tokens: int | None = None,
    context: int | None = None,
    against: Path | None = None,
    calibration: Switch = False,
    page: Path | None = None,
    device: str | None = None,
    dtype: DtypeName | None = None,
    json: Switch = False,
) -> int:
    """Loss, perplexity, bits per byte and calibration of a model on a text.

    Parameters
    ----------
    directory
        A run directory, or a Hugging Face directory with safetensors and tokenizer.json.
    text
        "sotu", "kjv", a text file, a folder or a .jsonl file; the run's own validation text
        by default.
    tokens
        Number of tokens to predict, from the start of the text; all by default.
    context
        Tokens that the model reads at once; as many as in training by default. Positions that are
        not learned can be read further. A window begins half of them after the one before it, and
        the last ends with the text.
    against
        A second model to evaluate on the same --text: compared by bits per byte, and by
        perplexity where both have the same tokenizer.
    calibration
        Also measure ECE and Brier score on the second half of the text, before and after scaling
        by the temperature that fits its first half best.
    page
        Write the reliability diagram to this file, which must not exist; implies --calibration.
    device
        "cpu", "cuda" or "cuda:1"; the GPU by default where there is one.
    dtype
        "float32", "bfloat16", "float16" or "float64"; that of the checkpoint by default.
    json
        Print one JSON object instead of tables.
    """
    if against is not None and text is None:
        raise ValueError("two models are compared on one text; name it with --text.")
    if page is not None and page.exists():
        raise ValueError(f"{page} exists and is left alone; name another file for the page.")
    with Console(quiet=json, aside=True) as console:
        console.progress("loading torch", 0, 0)

        from fenchel.cli.reliability import page as reliability_page
        from fenchel.evaluate import confidence
        from fenchel.evaluate.score import stride
        from fenchel.files import write_atomic

        if against is not None and tokens is not None:
            _require_one_tokenizer(directory, against)
        place = device_and_dtype(device, dtype)
        measured = _evaluate(directory, text, tokens, context, place, console)
        model, evaluation = measured.model, measured.evaluation
        output: dict[str, Any] = {
            "text": evaluation.text,
            "bytes": measured.bytes,
            "device": str(place[0]),
            "begin": measured.begin,
            "context": measured.context,
            "stride": stride(measured.context),
            **evaluation.score._asdict(),
        }
        lines = _lines(measured, truncated=tokens is not None)
        if calibration or page is not None:
            result = confidence(
                model, measured.ids, context=measured.context, progress=console.progress
            )
            output["calibration"] = _as_json(result)
            lines += _calibration_lines(result)
            if page is not None:
                write_atomic(page, reliability_page(directory.name, evaluation.text, result))
                lines.append(f"reliability diagram  {page}")
        if against is not None:
            second = _evaluate(against, text, tokens, context, place, console).evaluation
            output["against"], comparison_lines = _compare(evaluation, second)
            lines += comparison_lines
    print(json_format.dumps(output) if json else "\n".join(lines))
    return 0


class _Measured(NamedTuple):
    """A model, the text it was evaluated on, and the result."""

    model: "Transformer"
    ids: "Ids"
    bytes: int
    context: int
    """Tokens per window."""
    begin: str
    """How the text begins, in words."""
    evaluation: "Evaluation"


def _require_one_tokenizer(first: Path, second: Path) -> None:
    from fenchel.checkpoints.tokenizer import read_tokenizer
    from fenchel.evaluate import fingerprint

    prints = {fingerprint(read_tokenizer(path)) for path in (first, second)}
    if len(prints) > 1:
        raise ValueError(
            f"{first} and {second} have different tokenizers, whose first tokens are different "
            "texts; leave out --tokens."
        )


def _evaluate(
    directory: Path,
    text: str | None,
    tokens: int | None,
    context: int | None,
    place: "tuple[torch.device, torch.dtype | None]",
    console: Console,
) -> _Measured:
    from fenchel.checkpoints import load
    from fenchel.checkpoints.tokenizer import describe_beginning
    from fenchel.evaluate import Evaluation, fingerprint, score, text_ids, truncate_ids
    from fenchel.evaluate.score import require_decoder
    from fenchel.pipeline import open_corpus

    device, dtype = place
    model, tokenizer, config = load(directory, dtype=dtype)
    require_decoder(model)
    if context is not None and context > config.context:
        model = model.with_context(context)
    elif context is not None and context < 1:
        raise ValueError(f"--context {context} should be 1 or more.")
    context, model = context or config.context, model.to(device)
    if text is None:
        if not (directory / "text.json").is_file():
            raise ValueError(f"{directory} has no text of its own; name one with --text.")
        corpus = open_corpus(directory)
        ids, size = truncate_ids(corpus.validation, corpus.facts.validation_bytes, tokens)
        name = "validation text"
    else:
        ids, size = text_ids(tokenizer, text, limit=tokens, progress=console.progress)
        name = text
    result = score(model, ids, bytes=size, context=context, progress=console.progress)
    evaluation = Evaluation(str(directory), result, fingerprint(tokenizer), name)
    return _Measured(model, ids, size, context, describe_beginning(tokenizer), evaluation)


def _lines(measured: _Measured, *, truncated: bool) -> list[str]:
    from fenchel.evaluate.score import stride

    score, context = measured.evaluation.score, measured.context
    amount = f"{measured.bytes:,} bytes, {score.tokens:,} tokens"
    return [
        f"{measured.evaluation.text}: {'the first, about ' if truncated else ''}{amount}",
        f"{measured.begin} Windows have {context:,} tokens and begin {stride(context):,} apart.",
        f"bits per byte  {score.bits_per_byte:.4f}",
        f"loss           {score.loss:.4f} nats per token",
        f"perplexity     {score.perplexity:.2f} per token (compare within one tokenizer only)",
    ]


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


def _as_json(result: "Confidence") -> dict[str, Any]:
    """Plain values; a temperature of 0 or infinity is None."""

    def plain(calibration: "Calibration") -> dict[str, Any]:
        return {**calibration._asdict(), "bins": [b._asdict() for b in calibration.bins]}

    finite = 0.0 < result.temperature < math.inf
    return {
        "temperature": result.temperature if finite else None,
        "fitted_on": result.fitted_on,
        "plain": plain(result.plain),
        "scaled": plain(result.scaled) if result.scaled is not None else None,
    }


def _compare(first: "Evaluation", second: "Evaluation") -> tuple[dict[str, Any], list[str]]:
    """Two models measure by measure; a measure that cannot be compared gives the reason."""
    from fenchel.evaluate import compare

    output: dict[str, Any] = {"directory": second.name, **second.score._asdict()}
    lines = ["", f"against {second.name}"]
    for measure in ("bits_per_byte", "perplexity"):
        try:
            comparison = compare(first, second, by=measure)
        except ValueError as error:
            output["refused"] = str(error)
            lines.append(str(error))
            continue
        output[f"{measure}_difference"] = comparison.difference
        name = measure.replace("_", " ")
        lines.append(f"{name:<14} {comparison.first:.4f} and {comparison.second:.4f}")
    return output, lines
