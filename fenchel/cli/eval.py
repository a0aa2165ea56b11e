"""fenchel eval: how well a model predicts a text, and whether its confidence is calibrated."""

import json as json_format
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from cyclopts import Parameter

from fenchel.cli.console import (
    Console,
    DtypeName,
    Whole,
    break_lines,
    device_and_dtype,
    load_checkpoint,
    width_of,
)

if TYPE_CHECKING:
    import torch

    from fenchel.choice import Choice
    from fenchel.data import Document, DocumentIds, Ids, PackedBatches, ProgressCallback
    from fenchel.evaluate import Calibration, ChoiceScore, Confidence, Evaluation, Score
    from fenchel.model import Transformer

Switch = Annotated[bool, Parameter(negative="")]


def run(
    directory: Path,
    /,
    *,
    text: str | None = None,
    split: Literal["validation", "train"] | None = None,
    tokens: Whole | None = None,
    context: Whole | None = None,
    stride: Whole | None = None,
    against: Path | None = None,
    calibration: Switch = False,
    save: Switch = False,
    page: Path | None = None,
    adapter: Path | None = None,
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
    adapter
        A directory of PEFT with LoRA adapters for this model, which are merged into its weights.
    device
        "cpu", "cuda" or "cuda:1"; the GPU by default where there is one.
    dtype
        "float32", "bfloat16", "float16" or "float64"; that of the checkpoint by default, or
        float32 on a CPU without instructions for it.
    json
        Print one JSON object instead of tables.
    """
    if text is not None and split is not None:
        raise ValueError("--split names a part of the run's own text: leave out --text.")
    if tokens is not None and tokens < 1:
        raise ValueError(f"--tokens {tokens} leaves nothing to predict; give at least 1.")
    if adapter is not None and save:
        raise ValueError("--save stores the temperature of the model without --adapter.")
    calibration = calibration or save or page is not None
    if page is not None and page.exists():
        raise ValueError(f"{page} exists and is not overwritten; name another file for the page.")
    with Console(quiet=json, aside=True) as console:
        console.progress("loading torch", 0, 0)

        from fenchel.cli.reliability import page as reliability_page
        from fenchel.evaluate.calibration import write_calibration
        from fenchel.files import write_atomic

        if calibration and _choice_of(directory) is not None:
            raise ValueError(
                f"{directory} was trained by another loss than cross-entropy; calibration is "
                "measured on the softmax of the logits, so leave out --calibration, --save "
                "and --page."
            )
        place = device_and_dtype(device, dtype)
        source = _source(directory, text, split)
        if against is not None:
            both = _source_of_both(source, directory, against, tokens)
            tokens, source = (tokens if both is source else None), both
        measured = _evaluate(directory, source, tokens, (context, stride), place, console, adapter)
        model, evaluation = measured.model, measured.evaluation
        output: dict[str, Any] = {
            "text": evaluation.text,
            "bytes": measured.bytes,
            "device": str(place[0]),
            "dtype": str(model.lm_head_weight.dtype).removeprefix("torch."),
            "begin": measured.begin,
            "context": measured.context,
            "stride": measured.stride,
            **_finite(evaluation.score),
        }
        if isinstance(measured.ids, _Documents):
            output["documents"] = measured.ids.number
        lines = _lines(measured, truncated=tokens is not None)
        if calibration:
            result = _confidence(measured, console.progress)
            output["calibration"] = _as_json(result)
            lines += _calibration_lines(result)
            if save:
                saved = write_calibration(directory, model, result, evaluation.text)
                lines.append(f"temperature stored  {saved}")
            if page is not None:
                write_atomic(page, reliability_page(directory.name, evaluation.text, result))
                lines.append(f"reliability diagram  {page}")
        if against is not None:
            second = _evaluate(against, source, tokens, (context, stride), place, console)
            output["against"], comparison_lines = _compare(evaluation, second.evaluation)
            lines += comparison_lines
    shown = break_lines("\n".join(lines), width_of(sys.stdout))
    print(json_format.dumps(output) if json else shown)
    return 0


class _Measured(NamedTuple):
    """A model, the text it was evaluated on, and the result."""

    model: "Transformer"
    ids: "Ids | _Documents"
    bytes: int
    context: int
    """Tokens per window, or of a document at once."""
    stride: int | None
    """Tokens between the beginnings of two windows; None where documents are read one by one."""
    begin: str
    """How the text begins, in words."""
    evaluation: "Evaluation"
    left_out: int = 0
    """Tokens of answers beyond the context, which are not predicted."""


class _Documents(NamedTuple):
    """Documents of a tuned run, which are read one by one."""

    ids: "DocumentIds"
    pack: "Callable[[DocumentIds, int | None], PackedBatches]"
    """Documents to rows of a number of positions, or of as many as in training."""
    conversations: bool

    @property
    def number(self) -> int:
        """How many there are."""
        return len(self.ids.starts) - 1


class _Source(NamedTuple):
    """A text that one or two models are evaluated on."""

    name: str
    bytes: int
    documents: "Callable[[], Iterator[Document]]"
    ids: "Ids | _Documents | None" = None
    """Its tokens, for a model with the tokenizer of ``fingerprint``."""
    fingerprint: str = ""


def _source(directory: Path, text: str | None, split: str | None) -> _Source:
    """The text of --text, else a part of the run's own."""
    from fenchel.checkpoints.tokenizer import read_tokenizer
    from fenchel.data import open_text
    from fenchel.evaluate import fingerprint
    from fenchel.pipeline import open_corpus, settings
    from fenchel.pipeline.tuning import pack_documents
    from fenchel.train import RunDir

    if text is not None:
        opened = open_text(text)
        return _Source(text, opened.size, opened.documents)
    if not (directory / "text.json").is_file():
        raise ValueError(f"{directory} has no text; name one with --text.")
    corpus, held_out = open_corpus(directory), split != "train"
    source = _Source(
        f"{split or 'validation'} text of {directory}",
        corpus.facts.predicted_bytes if held_out else corpus.facts.train_predicted_bytes,
        lambda: corpus.documents(validation=held_out),
        corpus.validation if held_out else corpus.train,
        fingerprint(read_tokenizer(directory)),
    )
    if corpus.documents_of is None:
        return source
    config = settings(RunDir(directory).read_settings())

    def pack(documents: "DocumentIds", context: int | None) -> "PackedBatches":
        return pack_documents(config, corpus, documents, context=context)

    own = _Documents(corpus.documents_of[held_out], pack, corpus.facts.conversations)
    return source._replace(ids=own)


def _source_of_both(source: _Source, first: Path, second: Path, tokens: int | None) -> _Source:
    """The text for two models: where their tokenizers differ, documents and not tokens.

    A number of tokens is then the number of the first model's, whose text both read.
    """
    from fenchel.checkpoints.tokenizer import read_tokenizer
    from fenchel.data import Document
    from fenchel.evaluate import fingerprint

    tokenizer = read_tokenizer(first)
    if fingerprint(tokenizer) == fingerprint(read_tokenizer(second)):
        return source
    if isinstance(source.ids, _Documents) and source.ids.conversations:
        raise ValueError(
            f"{first} was tuned on conversations, which are tokens of its own template, and "
            f"{second} has another tokenizer; name a text with --text."
        )
    if tokens is None:
        return source._replace(ids=None)
    documents: list[Document] = []
    left = tokens
    for document in source.documents():
        ids = tokenizer.encode(document.text)
        if len(ids) >= left:  # a cut inside a character would decode to U+FFFD
            begin = tokenizer.decode(ids[:left]).rstrip("\ufffd")
            documents.append(document._replace(text=document.text[: len(begin)]))
            break
        documents.append(document)
        left -= len(ids)
    size = sum(len(document.text.encode()) for document in documents)
    return _Source(f"{source.name}, its first {tokens:,} tokens", size, lambda: iter(documents))


def _evaluate(
    directory: Path,
    source: _Source,
    tokens: int | None,
    windows: tuple[int | None, int | None],
    place: "tuple[torch.device, torch.dtype | None]",
    console: Console,
    adapter: Path | None = None,
) -> _Measured:
    from fenchel.checkpoints.tokenizer import describe_beginning
    from fenchel.evaluate import (
        Evaluation,
        fingerprint,
        score,
        score_choice,
        score_documents,
        truncate_ids,
    )
    from fenchel.evaluate.score import default_stride, document_ids, require_decoder

    device, dtype = place
    context, stride = windows
    model, tokenizer, config = load_checkpoint(directory, device, dtype, adapter)
    require_decoder(model)
    if context is not None and context > config.context:
        model = model.with_context(context)
    elif context is not None and context < 1:
        raise ValueError(f"--context {context} should be 1 or more.")
    own = source.ids if source.fingerprint == fingerprint(tokenizer) else None
    if isinstance(own, _Documents):
        if stride is not None:
            raise ValueError(
                "--stride is the distance of windows, and the documents of a tuned run are read "
                "one by one; leave it out, or name a text with --text."
            )
        documents, size = _first_documents(own, source.bytes, tokens)
        rows = documents.pack(documents.ids, context)
        # The second model of --against may have a shorter context than the run.
        if context is None and rows.context > config.context:
            rows = documents.pack(documents.ids, config.context)
        found = score_documents(model, rows, bytes=size, progress=console.progress)
        evaluation = Evaluation(str(directory), found, fingerprint(tokenizer), source.name)
        begin = describe_beginning(tokenizer)
        if documents.conversations:
            begin = "A conversation is written by the chat template of the run."
        measured = _Measured(model, documents, size, rows.context, None, begin, evaluation)
        return measured._replace(left_out=rows.cut_off)
    context = context or config.context
    stride = default_stride(context) if stride is None else stride
    if not 1 <= stride <= context:
        raise ValueError(f"--stride {stride} should be 1 to {context}, the tokens of a window.")
    if own is not None:
        ids, size = truncate_ids(own, source.bytes, tokens)
    else:
        ids, size = document_ids(
            tokenizer, source.documents(), source.bytes, limit=tokens, progress=console.progress
        )
    result: Score | ChoiceScore
    options: dict[str, Any] = {"bytes": size, "context": context, "stride": stride}
    if (choice := _choice_of(directory)) is None:
        result = score(model, ids, progress=console.progress, **options)
    else:
        console.progress("reading", 0, 0)
        result = score_choice(model, ids, choice=choice, **options)
    evaluation = Evaluation(str(directory), result, fingerprint(tokenizer), source.name)
    begin = describe_beginning(tokenizer)
    return _Measured(model, ids, size, context, stride, begin, evaluation)


def _first_documents(
    documents: _Documents, bytes: int, tokens: int | None
) -> tuple[_Documents, int]:
    """The documents up to a number of tokens to predict, and their share of the bytes."""
    if tokens is None or tokens >= (count := len(documents.ids.targets())):
        return documents, bytes
    first, _ = documents.ids.split(tokens)
    return documents._replace(ids=first), max(1, round(bytes * tokens / count))


def _confidence(measured: _Measured, progress: "ProgressCallback") -> "Confidence":
    """Calibration on the second half of what was evaluated, by the temperature of the first."""
    from fenchel.evaluate import confidence
    from fenchel.evaluate.calibration import document_confidence

    model, ids, context = measured.model, measured.ids, measured.context
    if isinstance(ids, _Documents):
        count = len(ids.ids.targets())
        if count < 4:
            raise ValueError(f"the text has {count} tokens to predict; calibration needs 4.")
        first, second = (ids.pack(half, context) for half in ids.ids.split(count // 2))
        return document_confidence(model, first, second, progress=progress)
    return confidence(model, ids, context=context, stride=measured.stride, progress=progress)


def _choice_of(directory: Path) -> "Choice | None":
    """The map whose weights are the predictions of a run; None for a softmax."""
    from fenchel.checkpoints.run_checkpoint import is_run
    from fenchel.train import RunDir, TrainConfig, named_loss

    if not is_run(directory):
        return None
    train = RunDir(directory).read_settings().get("train", {})
    defaults = TrainConfig()
    return named_loss(
        train.get("loss", defaults.loss), alpha=train.get("loss_alpha", defaults.loss_alpha)
    )


def _lines(measured: _Measured, *, truncated: bool) -> list[str]:
    score = measured.evaluation.score
    amount = f"{measured.bytes:,} bytes, {score.tokens:,} tokens"
    lines = [
        f"{measured.evaluation.text}: {'the first, about ' if truncated else ''}{amount}",
        f"{measured.begin} {_reading(measured)}",
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


def _reading(measured: _Measured) -> str:
    """How the text was read, as a sentence."""
    if isinstance(measured.ids, _Documents):
        number, context = measured.ids.number, measured.context
        noun = "Conversations" if measured.ids.conversations else "Documents"
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
