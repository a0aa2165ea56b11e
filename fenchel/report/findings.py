"""Three plain sentences about an inspected model: where it attends, what moves it, what stands out.

    reading       how many tokens a query of the median head reads, the sharpest head, sinks
    sensitivity   the most sensitive head, by which of its inputs, and the growth over all layers
    outstanding   the first of: mass that heads do not take, heads that repeat another, large
                  scores, a mean distance of one token, what rounding changes

Each states numbers of the result and no judgement of the model. ``next_command`` names the head
that the sentences mention.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from fenchel.files import printable
from fenchel.inspection_result import Head, Inspection, ScoreParts
from fenchel.report.html import format_bound, pluralise
from fenchel.report.measures import format_value

_SINK = 0.5  # mean weight on the first token
_NOT_TAKEN = 0.25
_SAME = 0.98  # similarity of two heads that attend alike
_LARGE = 50.0  # a score that bfloat16 knows to a quarter
_NEAR = 1.5  # tokens
_NAMES = {"query": "queries", "key": "keys", "mixing": "values"}


def findings(result: Inspection) -> list[str]:
    """The three sentences; before them the answer where one score was taken apart."""
    asked = [] if result.why is None else [why_finding(result.why, result.tokens)]
    return [*asked, _reading(result), _sensitivity(result), _outstanding(result)]


def why_finding(why: ScoreParts, tokens: Sequence[str]) -> str:
    """By which parts of the two streams a key stands out for a query."""
    names = [token_name(tokens[at]) for at in (why.query, why.key)]
    found = (
        f"Head {why.layer}.{why.head} attends from {names[0]} ({why.query}) to {names[1]} "
        f"({why.key}) with weight {why.weight:.2f}"
    )
    if why.contrast <= 0:
        return f"{found}: its score is not above the mean score of the query."
    sides = []
    for side, values in (("key", why.by_key), ("query", why.by_query)):
        value, part = max(zip(values, why.parts, strict=True))
        name = part.replace("mlp", "MLP")
        sides.append(f"of the {side}'s stream mostly by its {name} ({value / why.contrast:.0%})")
    return f"{found}: its score is {why.contrast:.2f} above the mean, {' and '.join(sides)}."


def token_name(text: str) -> str:
    """
    >>> token_name(" the"), token_name("\\n")
    ('“the”', '“↵”')
    """
    return f"“{printable(text.strip() or text.replace(chr(10), '↵'), 40)}”"


def next_command(
    result: Inspection,
    directory: str | Path,
    text: str,
    max_tokens: int | None = None,
    *,
    why: bool = True,
) -> str:
    """The command that explains the sharpest head, on the same tokens of ``text``.

    Without ``why`` the one that removes every part of the model in turn.
    """
    head, command = _sharpest(result.heads), "inspect" if why else "ablate"
    words = ["fenchel", command, str(directory), "--text", text]
    words += [] if max_tokens is None else ["--max-tokens", str(max_tokens)]
    return shlex.join([*words, "--why", f"{head.layer}.{head.head}"] if why else words)


def _reading(result: Inspection) -> str:
    heads = result.heads
    sharpest, sinks = _sharpest(heads), [head for head in heads if head.first > _SINK]
    middle = median(head.effective.mean for head in heads)
    sentence = (
        f"A query reads {_tokens(middle)} in the median head, as if evenly, and "
        f"{_tokens(sharpest.effective.mean)} in the sharpest, {_name(sharpest)}"
    )
    if not sinks:
        return f"{sentence}; no head has half of its weight on the first token."
    verb = "has" if len(sinks) == 1 else "have"
    return (
        f"{sentence}; {len(sinks)} of {pluralise(len(heads), 'head')} {verb} more than half of the "
        "weight on the first token, a sink."
    )


def _sensitivity(result: Inspection) -> str:
    head = max(result.heads, key=lambda one: one.sigma["qkv"].lower)
    sigma = head.sigma["qkv"]
    sentence = (
        f"The most sensitive head is {_name(head)}: a small change of its input grows "
        f"{format_bound(sigma.lower, up=False)} to {format_bound(sigma.upper, up=True)} times, "
        f"mostly by its {_NAMES.get(head.dominant, head.dominant)}"
    )
    if result.network is None:
        return f"{sentence}."
    stream = result.network.stream
    return (
        f"{sentence}; over all layers it grows {format_bound(stream.lower, up=False)} to "
        f"{format_bound(stream.upper, up=True)} times."
    )


def _outstanding(result: Inspection) -> str:
    heads = result.heads
    idle = max(heads, key=lambda head: head.not_taken)
    if idle.not_taken > _NOT_TAKEN:
        return (
            f"Sinks or gates leave mass that no token gets: {idle.not_taken:.0%} in {_name(idle)}, "
            f"{sum(head.not_taken for head in heads) / len(heads):.0%} on average."
        )
    pairs = [head for head in heads if head.nearest_head is not None and head.similarity > _SAME]
    if pairs:
        head = max(pairs, key=lambda one: one.similarity)
        return (
            f"{len(pairs)} of {pluralise(len(heads), 'head')} attend like another of their layer, "
            f"most of all {_name(head)} and head {head.nearest_head}, with a similarity of "
            f"{head.similarity:.3f} of 1."
        )
    loud = max(heads, key=lambda head: head.max_logit.most)
    if loud.max_logit.most > _LARGE:
        return (
            f"The largest score is {format_value(loud.max_logit.most)}, in {_name(loud)}; bfloat16 "
            f"knows a score of that size to {loud.max_logit.most / 256:.2g}."
        )
    near = [head for head in heads if abs(head.distance - 1.0) < _NEAR - 1.0]
    if near:
        words = "reads" if len(near) == 1 else "read"
        return (
            f"{len(near)} of {pluralise(len(heads), 'head')} {words} the token before, as "
            f"{_name(min(near, key=lambda head: abs(head.distance - 1.0)))} does, and scores are "
            f"{format_value(loud.max_logit.most)} at most."
        )
    return (
        f"Scores are {format_value(loud.max_logit.most)} at most, in {_name(loud)}, and no head "
        "attends like another of its layer."
    )


def _sharpest(heads: list[Head]) -> Head:
    return min(heads, key=lambda head: head.effective.mean)


def _name(head: Head) -> str:
    return f"layer {head.layer} head {head.head}"


def _tokens(count: float) -> str:
    return f"{count:.1f} tokens" if count < 10.0 else f"{count:.0f} tokens"
