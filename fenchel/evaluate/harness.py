"""Adapter to lm-evaluation-harness (interface of lm_eval 0.4.13).

The harness calls a model with lists of requests, whose ``args`` are strings:

    loglikelihood          (context, continuation)   (log p(continuation | context), is it greedy)
    loglikelihood_rolling  (text,)                   log p(text | beginning)
    generate_until         (context, settings)       the continuation, up to a string in "until"

The results follow its rules: spaces at the end of a context belong to the continuation; the tokens
of the continuation are those of the whole string after as many as the context has; a row that is
too long loses its oldest tokens; a long text is read in windows of a full context in which every
token is predicted once, and the last window ends with the text. Every context and every text begins
as the tokenizer's template begins one (``TextTokenizer.begin_ids``); where that is without a token
and there is no other, the end token comes first.

    lm = harness_model("runs/one")
    lm_eval.simple_evaluate(model=lm, tasks=[...])

``HarnessAdapter`` does the work without the harness; ``harness_model`` wraps it in the harness's
base class.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fenchel.checkpoints import load
from fenchel.checkpoints.tokenizer import end_ids
from fenchel.data import TextTokenizer, windows
from fenchel.evaluate.score import LOGITS, require_decoder
from fenchel.generation import GenerationSettings, Sampling, stream
from fenchel.model import Transformer, evaluating

_SETTINGS = frozenset("until max_gen_toks do_sample temperature top_k top_p min_p".split())
_NEW_TOKENS = 256  # the harness's default for a task without one


@dataclass(frozen=True)
class HarnessAdapter:
    """The three requests of the harness, answered by a model and its tokenizer."""

    model: Transformer
    tokenizer: TextTokenizer
    batch: int = 16
    """Rows per forward pass."""
    seed: int = 0
    """Seed of tasks that sample."""
    ends: Sequence[int] = ()
    """Ids that end a text; the tokenizer's end token where none is given."""

    def __post_init__(self) -> None:
        require_decoder(self.model)

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """log p(continuation | context), and whether greedy decoding gives the continuation."""
        return self._scores([self._row(*pair) for pair in pairs])

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """log p of each whole text after its beginning."""
        context = self.model.config.context
        rows: list[tuple[list[int], int]] = []
        owners: list[int] = []
        for owner, text in enumerate(texts):
            begin, scored = self._begin([]), self.tokenizer.encode(text)
            if not scored:
                continue  # the empty text has probability 1
            # The template's last token is the one before the first target; others are context.
            for number, window in enumerate(
                windows(np.array([begin[-1], *scored]), context=context)
            ):
                row = [*window.inputs[0].tolist(), int(window.targets[0, -1])]
                rows.append(([*begin[:-1], *row] if number == 0 else row, int(window.scored.sum())))
                owners.append(owner)
        totals = [0.0] * len(texts)
        for owner, (value, _) in zip(owners, self._scores(rows), strict=True):
            totals[owner] += value
        return totals

    def generate_until(self, context: str, settings: Mapping[str, Any]) -> str:
        """The continuation of a context, greedy unless ``do_sample``, cut before the first stop."""
        if unknown := sorted(settings.keys() - _SETTINGS):
            raise ValueError(
                f"the task sets {', '.join(unknown)} for generation; "
                f"known are {', '.join(sorted(_SETTINGS))}."
            )
        ends = list(self.ends or (self.tokenizer.end_id,))
        stops = settings.get("until") or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        device = self.model.lm_head_weight.device
        prompt = torch.tensor([self._begin(self.tokenizer.encode(context))], device=device)
        drawn: list[int] = []
        how = GenerationSettings(
            max_new_tokens=int(settings.get("max_gen_toks", _NEW_TOKENS)),
            sampling=_sampling(settings),
            stop=ends,
        )
        generator = torch.Generator(device).manual_seed(self.seed)
        for token_B in stream(self.model, prompt, how, generator=generator):
            if int(token_B[0]) in ends:
                break
            drawn.append(int(token_B[0]))
            text = self.tokenizer.decode(drawn)
            if ends := [at for stop in stops if stop and (at := text.find(stop)) >= 0]:
                return text[: min(ends)]
        return self.tokenizer.decode(drawn)

    def _row(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Ids of both, and the number of ids of the continuation, which come last."""
        given = self.tokenizer.encode(context.rstrip()) if context else []
        scored = self.tokenizer.encode(context + continuation)[len(given) :]
        return [*self._begin(given), *scored], len(scored)

    def _begin(self, ids: list[int]) -> list[int]:
        """Ids after the tokens that begin a text, at least one."""
        return [*self.tokenizer.begin_ids, *ids] or [self.tokenizer.end_id]

    @torch.no_grad()
    def _scores(self, rows: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """For each (ids, count): log p of the last ``count`` ids; whether all are the argmax."""
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        context = self.model.config.context
        for _, count in rows:
            if count > context:
                raise ValueError(
                    f"a continuation has {count} tokens and the model reads {context}; "
                    "use a model with a longer context for this task."
                )
        # Rows of similar length share a batch. Padding comes last: no scored token attends to it.
        order = sorted(
            (i for i, (_, count) in enumerate(rows) if count), key=lambda i: -len(rows[i][0])
        )
        device = self.model.lm_head_weight.device
        with evaluating(self.model):
            for first in range(0, len(order), self.batch):
                part = order[first : first + self.batch]
                cut = [rows[i][0][-(context + 1) :] for i in part]
                wide = max(map(len, cut)) - 1
                inputs = torch.tensor([[*row[:-1], *[0] * (wide + 1 - len(row))] for row in cut])
                x_BTM = self.model(inputs.to(device), return_hidden=True)
                for i, row, x_TM in zip(part, cut, x_BTM, strict=True):
                    count = rows[i][1]
                    targets = torch.tensor(row[-count:], device=device)
                    scores[i] = self._score(x_TM[len(row) - 1 - count : len(row) - 1], targets)
        return scores

    def _score(self, x_NM: torch.Tensor, targets_N: torch.Tensor) -> tuple[float, bool]:
        """log p of the targets, and whether all are the argmax, with few logits at a time."""
        value, greedy, rows = 0.0, True, max(1, LOGITS // self.model.config.vocabulary)
        blocks = zip(torch.split(x_NM, rows), torch.split(targets_N, rows), strict=True)
        for x, targets in blocks:
            log_p = self.model.logits(x).float().log_softmax(-1)
            value += float(log_p.gather(-1, targets[:, None]).sum(dtype=torch.float64))
            greedy = greedy and bool((log_p.argmax(-1) == targets).all())
        return value, greedy


def harness_model(directory: str | Path, *, batch: int = 16, seed: int = 0) -> Any:
    """The model of a directory as an ``lm_eval.api.model.LM``, for ``simple_evaluate``."""
    try:
        LM: Any = import_module("lm_eval.api.model").LM
    except ImportError:
        raise ValueError(
            "lm-evaluation-harness is not installed; pip install 'fenchel[eval]'."
        ) from None

    class FenchelLM(LM):  # type: ignore[misc]
        """The harness's interface to ``HarnessAdapter``; results also go to its cache."""

        def __init__(self, adapter: HarnessAdapter) -> None:
            super().__init__()
            self.adapter = adapter

        @property
        def tokenizer_name(self) -> str:
            return str(directory)

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            results = self.adapter.loglikelihood([request.args for request in requests])
            return self._cached("loglikelihood", requests, results)

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            results = self.adapter.loglikelihood_rolling([request.args[0] for request in requests])
            return self._cached("loglikelihood_rolling", requests, results)

        def generate_until(self, requests: list[Any]) -> list[str]:
            results = [self.adapter.generate_until(*request.args) for request in requests]
            return self._cached("generate_until", requests, results)

        def _cached(self, kind: str, requests: list[Any], results: list[Any]) -> list[Any]:
            for request, result in zip(requests, results, strict=True):
                self.cache_hook.add_partial(kind, request.args, result)
            return results

    model, tokenizer, _ = load(directory)
    return FenchelLM(HarnessAdapter(model, tokenizer, batch, seed, end_ids(directory, tokenizer)))


def _sampling(settings: Mapping[str, Any]) -> Sampling:
    """Greedy unless the task samples: without ``do_sample`` a temperature has no effect."""
    if not settings.get("do_sample"):
        return Sampling(temperature=0.0)
    return Sampling(
        temperature=float(settings.get("temperature", 1.0)),
        top_k=settings.get("top_k"),
        top_p=settings.get("top_p"),
        min_p=settings.get("min_p"),
    )
