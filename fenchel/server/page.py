"""The live page of a server: a prompt, the tokens as they come, and what each of them read.

    facts -> page -> one HTML document, which sends its requests to the server it came from

The page encodes its prompt by ``POST /tokenize`` and generates by ``POST /v1/completions`` from
token ids, with ``stream``, ``echo``, ``logprobs``, ``return_token_ids`` and the ``fenchel`` field.
Ids are what makes a continuation from another token exact: the ids up to that place, the other
token, the same seed. A stream gives per token

    logprobs.content[i]  id, token, bytes, logprob, top_logprobs: [{id, token, bytes, logprob}]
    fenchel[i]           TokenTrace.as_json() (generation/attention_trace.py), of new tokens only

and the positions read that light up are the numbers of the trace as they came. For a token that
is kept on the page, ``POST /lens`` gives the likeliest tokens of every layer at its place. A slider
of a direction draws the text again, with the same seed.

**Colours.** A token is shaded by its surprise -log p in nats, linear up to 8. While a token is
pointed at, the shades are instead the square roots of the weights of the tokens that it read.

**Policy.** ``content_security_policy`` admits the script and the style that carry the nonce, and
requests to the same origin, and nothing else. Text from the model becomes text nodes only. A page
that is saved has its data inside, the policy of a report (report/html.py), and sends nothing.
"""

from collections.abc import Mapping
from string import Template
from typing import Any

from fenchel.report.html import SCRIPTS, STYLES, data_block, join, policy, read_asset


def page(nonce: str, facts: Mapping[str, Any]) -> str:
    """The document for a response whose policy is ``content_security_policy(nonce)``.

    ``facts`` are plain values about the server: model (its name), context, layers, heads,
    fingerprint, chat (whether there is a chat template), stops (ids and strings that end an answer
    of a chat), ends (ids that end a text), sampling (how the checkpoint draws), generates (False
    for a model that gives embeddings only), directions (strengths by name, each of which has a
    slider), lens (whether /lens tells what each layer would write) and key (whether requests need
    one). All but the name may be absent.
    """
    style = "".join(map(read_asset, STYLES)) + read_asset("page.css", __package__)
    script = "".join(map(read_asset, SCRIPTS)) + read_asset("page.js", __package__)
    data = {"facts": dict(facts), "policy": policy(script=script, style=style)}
    return Template(read_asset("page.html", __package__)).substitute(
        nonce=join([nonce]),
        title=join([str(facts["model"])]),
        style=style,
        script=script,
        data=data_block(data),
    )


def content_security_policy(nonce: str) -> str:
    """The policy of the response that carries ``page(nonce, ...)``."""
    return "; ".join(
        (
            "default-src 'none'",
            "connect-src 'self'",
            f"script-src 'nonce-{nonce}'",
            f"style-src 'nonce-{nonce}'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    )
