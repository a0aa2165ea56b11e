"""fenchel eval: how well a model predicts a text, and whether its confidence can be trusted."""

import json as json_format
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from fenchel.cli.console import Console

if TYPE_CHECKING:
    from fenchel.evaluate import Confidence, Evaluation

Switch = Annotated[bool, Parameter(negative="")]


def run(
    directory: Path,
    /,
    *,
    text: str | None = None,
    tokens: int | None = None,
    against: Path | None = None,
    calibration: Switch = False,
    page: Path | None = None,
    json: Switch = False,
) -> int:
    """Loss, perplexity, bits per byte and calibration of a model on a text.

    Parameters
    ----------
    directory
        A run directory, or a Hugging Face directory with safetensors and tokenizer.json.
    text
        "sotu", "kjv", a text file, a folder or a .jsonl file; the run's own validation text
        when left out.
    tokens
        Predict the first so many tokens of the text; all when left out.
    against
        A second model to read the same text (--text); by bits per byte, and by perplexity where
        the tokenizers are the same.
    calibration
        Also ECE, Brier score and the temperature that suits the model, fitted on the first half
        of the text and measured on the second.
    page
        Write the reliability diagram to this file, which must not exist; implies --calibration.
    json
        Print one JSON object instead of tables.
    """
    from fenchel.cli.reliability import page as drawn
    from fenchel.evaluate import confidence
    from fenchel.files import write_atomic

    if against is not None and text is None:
        raise ValueError("two models are compared on one text; name it with --text.")
    if page is not None and page.exists():
        raise ValueError(f"{page} exists and is left alone; name another file for the page.")
    if against is not None and tokens is not None:
        _require_one_tokenizer(directory, against)
    console = Console(quiet=json, aside=True)
    with console.bars:
        model, ids, size, reading = _read(directory, text, tokens, console)
        told: dict[str, Any] = {"text": reading.text, "bytes": size, **reading.score._asdict()}
        lines = _lines(size, reading, part=tokens is not None)
        if calibration or page is not None:
            sure = confidence(model, ids, context=model.config.context, progress=console.progress)
            told["calibration"] = _plain(sure)
            lines += _calibration_lines(sure)
            if page is not None:
                write_atomic(page, drawn(directory.name, reading.text, sure))
                lines.append(f"reliability diagram  {page}")
        if against is not None:
            told["against"], more = _beside(reading, _read(against, text, tokens, console)[3])
            lines += more
    print(json_format.dumps(told) if json else "\n".join(lines))
    return 0


def _require_one_tokenizer(first: Path, second: Path) -> None:
    from fenchel.data import load_tokenizer
    from fenchel.evaluate import fingerprint

    kinds = {fingerprint(load_tokenizer(one / "tokenizer.json")) for one in (first, second)}
    if len(kinds) > 1:
        raise ValueError(
            f"{first} and {second} have different tokenizers, whose first tokens are different "
            "texts; leave out --tokens."
        )


def _read(
    directory: Path, text: str | None, tokens: int | None, console: Console
) -> tuple[Any, Any, int, "Evaluation"]:
    """The model, the ids of the text, its bytes, and how well the one predicts the other."""
    from fenchel.checkpoints import load
    from fenchel.evaluate import Evaluation, fingerprint, score, text_ids, truncate_ids
    from fenchel.pipeline import open_corpus

    model, tokenizer, config = load(directory)
    if text is None:
        if not (directory / "text.json").is_file():
            raise ValueError(f"{directory} has no text of its own; name one with --text.")
        corpus = open_corpus(directory)
        ids, size = truncate_ids(corpus.validation, corpus.facts.validation_bytes, tokens)
        name = "validation text"
    else:
        ids, size = text_ids(tokenizer, text, limit=tokens, progress=console.progress)
        name = text
    found = score(model, ids, bytes=size, context=config.context, progress=console.progress)
    return model, ids, size, Evaluation(str(directory), found, fingerprint(tokenizer), name)


def _lines(size: int, reading: "Evaluation", *, part: bool) -> list[str]:
    found = reading.score
    whole = f"{size:,} bytes, {found.tokens:,} tokens"
    return [
        f"{reading.text}: {'the first, about ' if part else ''}{whole}",
        f"bits per byte  {found.bits_per_byte:.4f}",
        f"loss           {found.loss:.4f} nats a token",
        f"perplexity     {found.perplexity:.2f} a token (compare within one tokenizer only)",
    ]


def _calibration_lines(sure: "Confidence") -> list[str]:
    kinds = {"as it is": sure.plain}
    if sure.scaled is not None:
        kinds[f"at T = {sure.temperature:.4f}"] = sure.scaled
    head = f"{'':<15}{'loss':>8}{'Brier':>8}{'right':>8}{'sure':>8}{'ECE':>8}{'ECE mass':>10}"
    rows = [
        f"{kind:<15}{c.loss:8.4f}{c.brier:8.4f}{c.accuracy:8.4f}{c.confidence:8.4f}"
        f"{c.ece:8.4f}{c.ece_mass:10.4f}"
        for kind, c in kinds.items()
    ]
    fitted = (
        f"temperature fitted on {sure.fitted_on:,} predictions of the first half, "
        f"measured on {sure.plain.predictions:,} of the second"
    )
    none = "no finite temperature is best on the first half of the text"
    return ["", head, *rows, fitted if sure.scaled is not None else none]


def _plain(sure: "Confidence") -> dict[str, Any]:
    """For JSON, which knows neither infinity nor our tuples."""

    def one(c: Any) -> dict[str, Any]:
        return {**c._asdict(), "bins": [b._asdict() for b in c.bins]}

    finite = 0.0 < sure.temperature < math.inf
    return {
        "temperature": sure.temperature if finite else None,
        "fitted_on": sure.fitted_on,
        "plain": one(sure.plain),
        "scaled": one(sure.scaled) if sure.scaled is not None else None,
    }


def _beside(first: "Evaluation", second: "Evaluation") -> tuple[dict[str, Any], list[str]]:
    """Two models, measure by measure; what may not be compared is said and not computed."""
    from fenchel.evaluate import compare

    told: dict[str, Any] = {"directory": second.name, **second.score._asdict()}
    lines = ["", f"against {second.name}"]
    for by in ("bits_per_byte", "perplexity"):
        try:
            found = compare(first, second, by=by)
        except ValueError as error:
            told["refused"] = str(error)
            lines.append(str(error))
            continue
        told[f"{by}_difference"] = found.difference
        name = by.replace("_", " ")
        lines.append(f"{name:<14} {found.first:.4f} and {found.second:.4f}")
    return told, lines
