"""fenchel ablate: what the loss becomes without a head, a layer's attention or its MLP."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

_ROWS = 20
_PARTS = {"head": "heads", "attention": "attention of a layer", "mlp": "MLP of a layer"}


def run(
    directory: ModelPath,
    /,
    *,
    text: TextStart,
    to: str = "mean",
    exact: Whole | None = None,
    out: Path | None = None,
    max_tokens: Whole = 128,
    device: Device = None,
    json: Json = False,
) -> int:
    """What the loss becomes without a head, a layer's attention or its MLP.

    Every part is removed by itself and the loss on a text is measured again. Small models are run
    once per part. Of large ones all parts are ranked by one gradient, with the choice of a changed
    head computed anew, the largest of each kind are run, and the table says how far the two agree.

    Parameters
    ----------
    to
        What replaces a part: "mean", its mean over the text; "zero"; "uniform", a head that mixes
        all keys equally; or a map such as "entmax" or "hard" by which heads choose instead.
    exact
        Parts of each kind that are run; all by default where that is cheap, else 20.
    out
        The page; ablation.html when left out, and none with --json.
    max_tokens
        Tokens of the text that the loss is measured on.
    """
    page = MeasuredPage(out, "ablation.html", json=json, reads=[directory, text_path(text)])
    if exact is not None and exact < 1:
        raise ValueError(f"--exact {exact} should be 1 or more.")
    require_inputs(directory, text, conversations=True)
    with stages(json=json) as console:
        from fenchel.inspection import open_model
        from fenchel.inspection.trace import tokenize_text
        from fenchel.interpretability import ablate

        on, _ = device_and_dtype(device, float64=True)
        subject = open_model(directory)
        subject.model.to(on)
        words = tokenize_text(subject, text, max_tokens)
        found = ablate(subject, words.ids, to=to, exact=exact, progress=console.progress)
    record = {"subject": subject.facts(), "text": words.name, **found.plain()}
    from fenchel.report.effects_page import ablation_finding, render_ablation

    if page.write(lambda: render_ablation(record), lambda: record):
        return 0
    facts = record["subject"]
    sentences = [
        f"{facts['name']} ({facts['family']}) on {len(words.ids)} tokens of {words.name}: "
        f"{ablation_finding(record)}",
        f"Change: of the loss with the part replaced by {found.to}; positive where the part is "
        "needed. Estimate: by one gradient.",
        agreement_sentence(record, _PARTS),
    ]
    page.show([effects_table(record, "change")], sentences)
    return 0


def effects_table(record: Mapping[str, Any], exact: str) -> Table:
    """The largest effects that were run."""
    run = sum(one["exact"] is not None for one in record["effects"])
    shown = f"the {min(run, _ROWS)} largest of {len(record['effects'])}"
    table = plain_table(shown, ["part", exact, "estimate"])
    for effect in [one for one in record["effects"] if one["exact"] is not None][:_ROWS]:
        table.add_row(effect["site"], f"{effect['exact']:+.4f}", f"{effect['estimate']:+.4f}")
    return table


def agreement_sentence(record: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """How far estimates and exact effects agree, part by part."""
    said = []
    for row in record["agreement"]:
        run = "all" if row["run"] == row["sites"] else f"the largest {row['run']}"
        rank = "" if row["spearman"] is None else f", rank correlation {row['spearman']:.2f}"
        said.append(
            f"{names.get(row['part'], row['part'])}: {run} of {row['sites']} run{rank}, mean error "
            f"of the estimates {100 * row['error']:.0f} %"
        )
    return f"Estimates against exact passes: {'; '.join(said)}."
