"""fenchel patch: which site of a model carries the difference between two prompts."""

from pathlib import Path
from typing import Any

from fenchel.cli.ablate import agreement_sentence, effects_table
from fenchel.cli.console import (
    Device,
    Json,
    MeasuredPage,
    ModelPath,
    Switch,
    Whole,
    Words,
    device_and_dtype,
    require_inputs,
    stages,
)
from fenchel.files import printable

_NAMES = {"q": "queries", "k": "keys", "v": "values", "stream": "streams"}


def run(
    directory: ModelPath,
    clean: Words,
    corrupt: Words,
    /,
    *,
    answer: Words | None = None,
    against: Words | None = None,
    sites: str = "q,k,v,stream",
    chat: Switch = False,
    exact: Whole | None = None,
    out: Path | None = None,
    device: Device = None,
    json: Json = False,
) -> int:
    """Which site of a model carries the difference between two prompts.

    The model reads the corrupt prompt with one query, key, value or stream taken from its pass on
    the clean one. The effect is the share of the difference that comes back, 0 to 1, in the logit
    of an answer less that of another token. Small models are run once per site; of large ones all
    sites are ranked by one gradient, with the choice computed anew, and the largest are run.

    Parameters
    ----------
    clean
        The prompt whose answer is looked for.
    corrupt
        A prompt of as many tokens with another answer.
    answer
        The word that follows the clean prompt; the token that the two laws differ most in when left
        out.
    against
        The word that follows the corrupt prompt.
    sites
        What is patched: q, k, v (per head), head (its output), attention, mlp (per layer), stream
        (per layer and token).
    chat
        The prompts are messages of a user, and the answer is that of the assistant.
    exact
        Sites of each kind that are run; all by default where that is cheap, else 20.
    out
        The page; patch.html when left out, and none with --json.
    """
    page = MeasuredPage(out, "patch.html", json=json, reads=[directory])
    if exact is not None and exact < 1:
        raise ValueError(f"--exact {exact} should be 1 or more.")
    require_inputs(directory)
    parts = [part.strip() for part in sites.split(",") if part.strip()]
    with stages(json=json) as console:
        from fenchel.inspection import open_model
        from fenchel.inspection.trace import token_text
        from fenchel.interpretability import patch

        on, _ = device_and_dtype(device, float64=True)
        subject = open_model(directory)
        subject.model.to(on)
        tokenizer = subject.tokenizer
        prompts = [subject.prompt(prompt, chat=chat) for prompt in (clean, corrupt)]
        tokens = [[token_text(tokenizer, i) for i in ids] for ids in prompts]
        if len(prompts[0]) != len(prompts[1]):
            raise ValueError(
                "patching needs two prompts of the same number of tokens; these have "
                f"{len(prompts[0])} and {len(prompts[1])}: {'|'.join(tokens[0])} and "
                f"{'|'.join(tokens[1])}."
            )
        named = [None if word is None else tokenizer.word_start(word) for word in (answer, against)]
        found = patch(
            subject,
            prompts[0],
            prompts[1],
            parts,
            answer=named[0],
            against=named[1],
            exact=exact,
            progress=console.progress,
        )
    record: dict[str, Any] = {
        "subject": subject.facts(),
        "clean_tokens": tokens[0],
        "corrupt_tokens": tokens[1],
        "words": [token_text(tokenizer, i) for i in (found.answer, found.against)],
        **found.plain(),
    }
    from fenchel.report.effects_page import patch_finding, render_patch

    if page.write(lambda: render_patch(record), lambda: record):
        return 0
    right, wrong = (printable(repr(word)) for word in record["words"])
    sentences = [
        f"{subject.name}: the logit of {right} less that of {wrong} is {found.clean:.3f} after the "
        f"clean prompt and {found.base:.3f} after the corrupt one. Share: of that difference, back "
        "with one site of the clean pass. Sites are layer.head; tokens count from 0.",
        patch_finding(record),
        agreement_sentence(record, _NAMES),
    ]
    page.show([effects_table(record, "share")], sentences)
    return 0
