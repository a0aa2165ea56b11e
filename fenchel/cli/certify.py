"""fenchel certify: how sensitive attention can be in a ball around a text, and what it decides."""

import json as json_format
from pathlib import Path
from typing import Any, Literal

from fenchel.cli.console import (
    CheckpointPath,
    Device,
    Json,
    MeasuredPage,
    Switch,
    TextStart,
    Whole,
    Words,
    device_and_dtype,
    require_inputs,
    stages,
    text_path,
)
from fenchel.cli.inspect import numbers

_DECISION = ("--keep", "--budget", "--synonyms", "--substitutions", "--texts")


def run(
    directory: CheckpointPath,
    /,
    *,
    text: TextStart,
    radius: float | None = None,
    norm: Literal["fro", "token", "all", "one"] | None = None,
    decision: Switch = False,
    lipschitz: Switch = False,
    keep: Whole = 1,
    synonyms: Path | None = None,
    substitutions: Whole | None = None,
    texts: Whole | None = None,
    budget: Words | None = None,
    out: Path | None = None,
    max_tokens: Whole | None = None,
    layers: str | None = None,
    heads: Switch = False,
    blocks: Switch = False,
    steps: Whole = 20,
    restarts: Whole = 1,
    failure: float = 1e-9,
    device: Device = None,
    dtype: Literal["float64", "float32"] = "float64",
    seed: Whole = 0,
    json: Json = False,
) -> int:
    """How sensitive attention can be anywhere in a ball around a text: a table, JSON and a page.

    For every attention layer, or every block with --blocks, the spectral norm of its Jacobian at
    the text itself, the largest norm found in the ball with the point that attains it, and a bound
    that no point of the ball exceeds. The ball is around the input of attention, after its norm
    layer. With --decision, for every position, how far the embeddings may move before the next
    token changes: a radius within which none does, and one at which an attack succeeds; with
    --synonyms, how many of its tokens may become others. With --lipschitz, how far any logit can
    move for any text when no embedding moves further than 1.

    Parameters
    ----------
    directory
        A run directory, or a Hugging Face directory of a family that fenchel reads itself.
    radius
        The radius of the ball. An input token has a length of about sqrt(width).
    norm
        "fro", or "all" with --decision: all tokens together move by at most the radius; "token":
        each of them; "one", with --decision: the last token of each prefix alone.
    decision
        Certify the next token at every position, instead of layers.
    lipschitz
        A Lipschitz constant of the logits, from the weights alone, beside the largest stretch that
        an attack found from the text; as a sentence, without a page.
    keep
        With --decision: this many of the likeliest tokens must stay so.
    synonyms
        With --decision: a JSON file of words and what each may become, {"great": ["good"]}; all
        are of one token, with a space in front or without, as the word stands in the text.
    substitutions
        With --synonyms: at most this many tokens at once; all when left out.
    texts
        With --synonyms: read at most this many texts, 20,000 when left out, to count exactly.
    budget
        With --decision: a time such as 90s or 3m; what is known by then is shown, shorter prefixes
        of the text first.
    out
        The page; certificates.html when left out, and none with --json.
    max_tokens
        Read this many tokens, 64, or 16 with --decision, when left out; time grows with their
        square, or faster.
    layers
        Only these layers, counted from 1: 3 or 1-4,12.
    heads
        Also an upper end for every single head.
    blocks
        Whole blocks, with norm layers, MLP and residual branches; the ball is around the stream.
    steps
        Steps of the ascent to the lower end.
    restarts
        Random points of the ball from which it starts, in addition to others.
    failure
        Probability that a norm at the centre, from which upper ends follow, is too small.
    dtype
        float32 makes the search for the lower end faster; both ends are computed in float64.
    seed
        The same seed gives the same numbers.
    """
    given = {
        "--radius": radius is not None,
        "--norm": norm is not None,
        "--keep": keep != 1,
        "--budget": budget is not None,
        "--synonyms": synonyms is not None,
        "--substitutions": substitutions is not None,
        "--texts": texts is not None,
        "--out": out is not None,
        "--layers": layers is not None,
        "--heads": heads,
        "--blocks": blocks,
        "--steps": steps != 20,
        "--restarts": restarts != 1,
        "--failure": failure != 1e-9,
        "--dtype": dtype != "float64",
        "--device": device is not None,
        "--seed": seed != 0,
    }
    if lipschitz:
        if decision or any(given.values()):
            raise ValueError("--lipschitz reads --text, --max-tokens and --json only.")
        return _constant(directory, text, 16 if max_tokens is None else max_tokens, json=json)
    chosen = numbers(layers, "--layers")
    if not decision and radius is None:
        raise ValueError(
            "give --radius R to certify layers, --decision for the next token, or --lipschitz."
        )
    both = ("--norm", "--out", "--seed")
    for flag in (flag for flag, is_given in given.items() if is_given and flag not in both):
        if (flag in _DECISION) != decision:
            raise ValueError(f"{flag} is read {'without' if decision else 'with'} --decision only.")
    for flag in ("--substitutions", "--texts"):
        if given[flag] and synonyms is None:
            raise ValueError(f"{flag} is read with --synonyms only.")
    if synonyms is not None and norm is not None:
        raise ValueError("--norm is of embeddings that move; leave it out with --synonyms.")
    names = ("all", "token", "one") if decision else ("fro", "token")
    if norm is not None and norm not in names:
        raise ValueError(
            f"--norm is {', '.join(names)} {'with' if decision else 'without'} --decision, "
            f"got {norm}."
        )
    reads = [directory, text_path(text), synonyms]
    page = MeasuredPage(out, "certificates.html", json=json, reads=reads)
    require_inputs(directory, text, conversations=True)
    certification: Any
    with stages(json=json) as console:
        from fenchel.inspection import (
            Search,
            certify_model,
            certify_text_decisions,
            certify_text_substitutions,
            open_model,
            read_synonyms,
        )

        if decision:
            from fenchel.train.config import seconds

            words = None if synonyms is None else read_synonyms(synonyms)
            settings: dict[str, Any] = {
                "keep": keep,
                "max_tokens": 16 if max_tokens is None else max_tokens,
                "budget": None if budget is None else seconds(budget),
                "progress": console.progress,
            }
            if words is None:
                settings |= {"norm": norm or "all"}
                certification = certify_text_decisions(open_model(directory), text, **settings)
            else:
                settings |= {"most": substitutions} | ({} if texts is None else {"texts": texts})
                certification = certify_text_substitutions(
                    open_model(directory), text, words, **settings
                )
        else:
            on, kind = device_and_dtype(device, dtype, float64=True)
            assert kind is not None
            assert radius is not None
            certification = certify_model(
                open_model(directory),
                text,
                radius,
                norm=norm or "fro",
                max_tokens=64 if max_tokens is None else max_tokens,
                layers=chosen,
                search=Search(steps, restarts, failure, heads, kind, blocks),
                device=str(on),
                seed=seed,
                progress=console.progress,
            )
    from fenchel.report.certificates import render, render_decisions, render_substitutions

    write = render_substitutions if synonyms else render_decisions if decision else render
    if page.write(lambda: write(certification), certification.plain):
        return 0
    from fenchel.cli.inspection_tables import (
        certificate_tables,
        decision_table,
        substitution_tables,
    )

    if synonyms:
        tables = substitution_tables(certification)
    elif decision:
        tables = [decision_table(certification)]
    else:
        tables = [*certificate_tables(certification.certificates, certification.tokens)]
    page.show(tables, [certification.subject["begin"]])
    return 0


def _constant(directory: Path, text: str, max_tokens: int, *, json: bool) -> int:
    """Print the Lipschitz constant of the logits, from both sides."""
    require_inputs(directory, text, conversations=True)
    with stages(json=json):
        from fenchel.inspection import certify_text_constant, open_model

        found = certify_text_constant(open_model(directory), text, max_tokens=max_tokens)
    if json:
        print(json_format.dumps(found._asdict()))
    else:
        print(
            f"certified  {found.certified:.6g}   no logit moves further when no token embedding "
            f"moves further than 1\nattacked   {found.attacked:.6g}   the largest stretch found\n"
            f"embedding  {found.embedding:.6g}   mean length of one"
        )
    return 0
