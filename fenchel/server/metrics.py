"""Numbers about the server in the text format of Prometheus, for GET /metrics.

Every server has its own registry. The engine reports steps and ended requests on its thread;
the event loop reports answers and traces. The share of prompts in the engine's time is

    rate(fenchel_prefill_seconds_total) / (that + rate(fenchel_step_seconds_sum))

and the mean entropy of the attention of traced tokens, per layer,

    fenchel_attention_entropy_nats_sum / fenchel_attention_entropy_nats_count.
"""

from collections.abc import Iterable
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    Summary,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from fenchel.generation.scheduler import Request, Token, TurnFacts
from fenchel.server.engine import Engine, RequestFacts

CONTENT_TYPE: str = CONTENT_TYPE_LATEST
_STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_WAITS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """The registry of one server; an ``EngineObserver``."""

    def __init__(self, routes: Iterable[str]) -> None:
        """``routes`` are the paths that are counted by name; others are counted together."""
        registry = self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        steps, waits = (partial(Histogram, registry=registry, buckets=b) for b in (_STEPS, _WAITS))
        per_layer = partial(Summary, labelnames=["layer"], registry=registry)
        self._routes = frozenset(routes)
        ProcessCollector(registry=registry)
        self._requests = counter(
            "fenchel_requests",
            "Answers by route and status; 499 is a client that left.",
            ["route", "status"],
        )
        self._tokens = counter("fenchel_tokens", "Tokens of prompts and of answers.", ["kind"])
        self._finishes = counter("fenchel_choices", "Choices by how they ended.", ["finish"])
        self._queue = gauge("fenchel_queue_length", "Choices that wait.")
        self._rows = gauge("fenchel_active_rows", "Rows of the batch in use.")
        self._columns = gauge(
            "fenchel_cache_columns", "Columns of the cache that the last step read."
        )
        self._queued = waits("fenchel_queue_seconds", "From arrival to the reading of the prompt.")
        self._first = waits("fenchel_first_token_seconds", "From arrival to the first token.")
        self._whole = waits("fenchel_choice_seconds", "From arrival to the end.")
        self._between = steps(
            "fenchel_between_tokens_seconds", "Between two tokens of a choice, its mean."
        )
        self._steps = steps(
            "fenchel_step_seconds", "One decoding step, by the rows that it computes.", ["rows"]
        )
        self._prefill = counter("fenchel_prefill_seconds", "Time spent on reading prompts.")
        self._entropy = per_layer(
            "fenchel_attention_entropy_nats", "Entropy of the attention of traced tokens."
        )
        self._keys = per_layer(
            "fenchel_attention_effective_keys", "Effective number of keys of traced tokens."
        )

    def watch(self, engine: Engine) -> None:
        """Take the queue and the rows from the engine whenever the numbers are read."""
        self._queue.set_function(lambda: engine.queued)
        self._rows.set_function(lambda: engine.active)

    def on_step(self, facts: TurnFacts) -> None:
        """A turn of the engine."""
        self._columns.set(facts.columns)
        if facts.prompt_tokens:
            self._tokens.labels("prompt").inc(facts.prompt_tokens)
            self._prefill.inc(facts.prefill_seconds)
        if facts.bucket:
            self._steps.labels(str(facts.bucket)).observe(facts.step_seconds)

    def on_finish(self, request: Request, facts: RequestFacts) -> None:  # noqa: ARG002
        """The end of a choice."""
        self._finishes.labels(facts.finish).inc()
        self._tokens.labels("completion").inc(facts.new_tokens)
        self._queued.observe(facts.queue_seconds)
        self._whole.observe(facts.seconds)
        if facts.first_token_seconds is not None:
            self._first.observe(facts.first_token_seconds)
            if facts.new_tokens > 1:
                after = facts.seconds - facts.first_token_seconds
                self._between.observe(after / (facts.new_tokens - 1))

    def on_tokens(self, tokens: Iterable[Token]) -> None:
        """New tokens, with what was traced of them."""
        for layer in (layer for t in tokens if t.trace is not None for layer in t.trace.layers):
            if layer.entropy is not None and layer.keys is not None:
                self._entropy.labels(str(layer.layer)).observe(layer.entropy)
                self._keys.labels(str(layer.layer)).observe(layer.keys)

    def on_answer(self, path: str, status: int) -> None:
        """An answer of a route."""
        self._requests.labels(path if path in self._routes else "other", str(status)).inc()

    def text(self) -> bytes:
        """All of it, in the text format."""
        return generate_latest(self.registry)
