"""fenchel lens: what a model predicts after each of its layers."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.markup import escape
from rich.table import Table

from fenchel.cli.console import (
    Device,
    Json,
    MeasuredPage,
    ModelPath,
    TextStart,
    Whole,
    device_and_dtype,
    plain_table,
    require_inputs,
    stages,
    text_path,
)
from fenchel.files import printable, require_output

if TYPE_CHECKING:
    from fenchel.inspection import InspectedModel
    from fenchel.interpretability import HookedModel, JacobianLens, Lens

Kind = Literal["logit", "jacobian"]
Targets = Literal["later", "same"]
_STRETCHES = 8  # of a text, to fit a lens
_ERROR = 0.1  # of every layer, at which fitting stops
_QUICK = {"cpu": 4e12, "cuda": 4e14}  # operations of a fit without a flag
_TOKENS = 64
_CERTIFIED = 32  # tokens of which the error of a lens is certified
_SHOWN = 6  # last positions, in a terminal


def run(
    directory: ModelPath,
    /,
    *,
    text: TextStart,
    lens: Path | None = None,
    kind: Kind | None = None,
    fit: str | None = None,
    stretches: Whole = _STRETCHES,
    targets: Targets = "later",
    save: Path | None = None,
    out: Path | None = None,
    max_tokens: Whole = _TOKENS,
    radius: float | None = None,
    device: Device = None,
    json: Json = False,
) -> int:
    """What a model predicts after each of its layers: a table, JSON and a page.

    The law of the next token is read off the stream after every layer: as it is (logit lens), and
    through the average derivative of the later layers (Jacobian lens), with and without the offset
    that makes it an approximation of them. The table states how far each agrees with the model's
    own law, and the page shows the words, layer by layer and token by token.

    Without --lens a Jacobian lens is fitted to what follows in the text, if that takes seconds;
    else only the logit lens is shown, and a sentence says so.

    Parameters
    ----------
    lens
        A lens that --save has written for this model.
    kind
        "logit" fits nothing; "jacobian" fits a lens whatever it costs.
    fit
        The text that the lens is fitted to; what follows the tokens of --text when left out.
    stretches
        Stretches of that text, of 64 tokens each, at most; fewer where the error bar of every layer
        is below 10 %.
    targets
        Whose changes a lens is made of: "later", those of a token and all after it, as published;
        "same", those of the token alone, which mostly agree better with its own next word.
    save
        Write the fitted lens to this file, of safetensors.
    out
        The page; lens.html when left out, and none with --json.
    max_tokens
        Tokens of the text that are shown.
    radius
        Also certify how far the fitted lens is from the last stream for every stream this near, as
        a share of its length, such as 0.001.
    """
    if lens is not None and (fit, save, kind, targets) != (None, None, None, "later"):
        raise ValueError("--lens has a lens already; leave out --fit, --save, --kind, --targets.")
    if kind == "logit" and (fit is not None or save is not None):
        raise ValueError("--kind logit fits no lens; leave out --fit and --save.")
    if stretches < 1:
        raise ValueError(f"--stretches {stretches} should be 1 or more.")
    reads = [directory, lens, text_path(text), text_path(fit)]
    page = MeasuredPage(out, "lens.html", json=json, reads=reads)
    if save is not None:
        require_output(save, new=True, reads=reads)
    require_inputs(directory, text, conversations=True)
    if fit is not None:
        require_inputs(text=fit, conversations=True)
    with stages(json=json) as console:
        from fenchel.inspection import open_model
        from fenchel.inspection.trace import tokenize_text
        from fenchel.interpretability import JacobianLens, fit_lens, hooked, lens_errors
        from fenchel.interpretability import lens as read

        on, _ = device_and_dtype(device, float64=True)
        subject = open_model(directory)
        subject.model.to(on)
        model = hooked(subject)
        words = tokenize_text(subject, text, max_tokens)
        found = [read(model, words.ids)]
        if lens is not None:
            fitted: JacobianLens | None = JacobianLens.load(lens, model)
            did = f"The lens is that of {printable(lens, 4096)}"
        else:
            source, skipped = printable(fit or text), 0 if fit else len(words.ids)
            length = min(_TOKENS, subject.context or _TOKENS)
            requested = kind == "jacobian" or fit is not None or save is not None
            fitted = None
            if (why := _why_not(model, words.ids, length, kind, requested=requested)) is None:
                most = stretches if requested else min(stretches, _quick(model, length))
                texts = _stretches(subject, fit or text, skipped, length, most)
                if not texts and not skipped:
                    raise ValueError(f"--fit {source} has fewer tokens than a stretch of {length}.")
                did = f"The lens is fitted to {source}{' after these tokens' if skipped else ''}"
                did = did if texts else "The lens is fitted to these tokens themselves"
                texts = texts or [list(words.ids)]
                skip = min(16, len(texts[0]) // 4)
                fitted = fit_lens(
                    model,
                    texts,
                    skip=skip,
                    targets=targets,
                    error=_ERROR,
                    progress=console.progress,
                )
                about = f"{_count(fitted.texts)} of {len(texts[0])} tokens of {source}"
                fitted = replace(fitted, about=about)
        if fitted is None:
            did = f"Only the logit lens is shown: {why}"
        else:
            console.progress("reading the layers", 0, 0)
            did += f", from {_count(fitted.texts)}"
            did += f" with {fitted.positions} positions in all." if fitted.positions else "."
            offsets = (False, True) if fitted.has_offset else (False,)
            found += [read(model, words.ids, "jacobian", fit=fitted, offset=o) for o in offsets]
        errors = None
        if radius is not None:
            if fitted is None:
                raise ValueError("--radius certifies a fitted lens; --kind jacobian fits one.")
            console.progress("certifying the lens", 0, 0)
            errors = lens_errors(model, fitted, words.ids[:_CERTIFIED], radius)
    if save is not None and fitted is not None:
        fitted.save(save)
        did += f" It is saved in {printable(save, 4096)}."
    record = _record(subject, words.name, words.tokens, found, fitted, did)
    if errors is not None:
        record["errors"] = [{**row._asdict(), "vacuous": row.vacuous} for row in errors]
    from fenchel.report.lens_page import finding, render

    if page.write(lambda: render(record), lambda: record):
        return 0
    tables = [*_tables(record), *([_errors(record, radius)] if errors is not None else [])]
    page.show(tables, [finding(record), did])
    return 0


def _stretches(
    subject: "InspectedModel", text: str, skipped: int, length: int, count: int
) -> list[list[int]]:
    """At most ``count`` stretches of a text, after its first ``skipped`` tokens."""
    found, ids, left = list[list[int]](), list[int](), skipped
    for document in subject.documents(text) if count else ():
        ids += document
        cut = min(left, len(ids))
        ids, left = ids[cut:], left - cut
        while len(ids) >= length and len(found) < count:
            found.append(ids[:length])
            ids = ids[length:]
        if len(found) == count:
            break
    return found


def _quick(model: "HookedModel", length: int) -> int:
    """The number of stretches that a fit takes by default: as many as are quick."""
    from fenchel.interpretability.jacobian_lens import fit_flops

    return int(_QUICK.get(model.device.type, 4e12) // fit_flops(model, length))


def _why_not(
    model: "HookedModel", own: Sequence[int], length: int, kind: Kind | None, *, requested: bool
) -> str | None:
    """Why no lens is fitted; None where it is."""
    if kind == "logit":
        return "--kind logit."
    if model.layers < 2:
        if requested:
            raise ValueError("a model of one layer has no stream between its layers to read.")
        return "the model has one layer, whose law is its own."
    if not requested and _quick(model, length) < 2:
        return (
            f"a Jacobian lens takes about {_fit_time(model, own, length)} per stretch of "
            f"{length} tokens here; --kind jacobian fits one, and --save keeps it."
        )
    return None


def _fit_time(model: "HookedModel", own: Sequence[int], length: int) -> str:
    """About how long a stretch takes: a forward pass per row of the matrices, as measured."""
    import torch

    from fenchel.interpretability.hooked_model import Taps

    ids = model.batch((list(own) * length)[:length])
    with torch.no_grad():
        model.logits(ids, Taps())  # the first pass is slower
        begun = time.perf_counter()
        model.logits(ids, Taps())
    seconds = model.width * (time.perf_counter() - begun)
    return f"{max(seconds, 1.0):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def _record(
    subject: "InspectedModel",
    text: str,
    tokens: Sequence[str],
    found: "Sequence[Lens]",
    fitted: "JacobianLens | None",
    did: str,
) -> dict[str, Any]:
    """The result as plain values; ``words`` has the text of every token that a law names."""
    from fenchel.inspection.trace import token_text

    used = sorted({i for one in found for i in one.top.flatten().tolist()})
    return {
        "subject": subject.facts(),
        "text": text,
        "tokens": list(tokens),
        "did": did,
        "fit": None
        if fitted is None
        else {
            "about": fitted.about,
            "texts": fitted.texts,
            "positions": fitted.positions,
            "skip": fitted.skip,
            "targets": fitted.targets,
            "error": {n: _finite(fitted.error(n)) for n in fitted.layers},
            "spread_texts": dict(fitted.spread_texts),
            "spread_positions": dict(fitted.spread_positions),
        },
        "words": {i: token_text(subject.tokenizer, i) for i in used},
        "lenses": [one.plain() for one in found],
    }


def _tables(record: dict[str, Any]) -> Iterator[Table]:
    """Agreement by layer, and what the layers say at the last positions."""
    subject, lenses, tokens = record["subject"], record["lenses"], record["tokens"]
    title = escape(
        f"{subject['name']} ({subject['family']}, {subject['parameters']:,} parameters)\n"
        f"on {record['text']}, {len(tokens)} tokens"
    )
    names = {"logit": "logit", "jacobian without offset": "J x", "jacobian": "offset"}
    headings = ["layer", *(x for one in lenses for x in (f"{names[one['kind']]} top", "KL"))]
    errors = (record["fit"] or {}).get("error", {})
    legend = (
        "top: share of tokens whose most likely next word is already the model's own; KL: from the "
        "model's own law to that of the layer, in nats; settled: share whose answer stays on top "
        "from this layer on"
    )
    legend += "; error: relative standard error of the matrix of a layer" if errors else ""
    extra = ["settled", *(["error"] if errors else [])]
    table = plain_table(title, [*headings, *extra], legend)
    best = lenses[-1]
    for place, layer in enumerate(best["layers"]):
        cells = [str(layer)]
        for one in lenses:
            row = one["agreement"][one["layers"].index(layer)]
            cells += [f"{row['top']:.2f}", f"{row['kl']:.2f}"]
        first = best["first"][1:]
        cells.append(f"{sum(n <= layer for n in first) / len(first):.2f}")
        if errors:
            error = errors.get(layer)
            last = place == len(best["layers"]) - 1
            cells.append("" if last else "?" if error is None else f"{error:.2f}")
        table.add_row(*cells)
    yield table
    shown = list(range(max(0, len(tokens) - _SHOWN), len(tokens)))
    said = plain_table(
        f"what each layer predicts next ({best['kind']} lens)",
        ["after", *(_word(tokens[t]) for t in shown)],
    )
    count = len(best["layers"])
    step = max(1, math.ceil(count / 12))
    for place in [*range(count - 1, -1, -step)][::-1]:
        tops = (best["top"][place][t][0] for t in shown)
        said.add_row(str(best["layers"][place]), *(_word(record["words"][i]) for i in tops))
    yield said


def _errors(record: dict[str, Any], share: float | None) -> Table:
    """What is certified of the lens of every layer."""
    legend = (
        "measured: distance of what the lens reads from the last stream, over all tokens but the "
        f"first; certified: for no stream within {share:g} of its length more than this; vacuous "
        f"where the mean stream alone is as near. The first {_CERTIFIED} tokens at most"
    )
    headings = ["layer", "measured", "certified", "mean stream alone"]
    table = plain_table("error of the lens", headings, legend)
    for row in record["errors"]:
        certified = "vacuous" if row["vacuous"] else f"{row['certified']:.3g}"
        layer, measured, mean = row["layer"], row["measured"], row["mean"]
        table.add_row(str(layer), f"{measured:.3g}", certified, f"{mean:.3g}")
    return table


def _word(text: str) -> str:
    return escape(printable(text.replace(" ", "·").replace("\n", "↵"), 12))


def _count(texts: int) -> str:
    return "one stretch" if texts == 1 else f"{texts} stretches"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
