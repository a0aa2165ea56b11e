"""Our models under lm-evaluation-harness, by the interface of lm_eval 0.4.13.

The harness hands a model lists of requests, whose ``args`` are strings, and wants

    loglikelihood          (context, continuation)   (log p(continuation | context), is it greedy)
    loglikelihood_rolling  (text,)                   log p(text | end)
    generate_until         (context, settings)       the continuation, up to a string in "until"

and the numbers are those of its own rules: spaces that end a context belong to the continuation;
the continuation's tokens are those of the whole string after as many as the context has; an empty
context is the end of a document; a row that is too long loses its oldest tokens; a long text is
read in windows of a full context in which every token is predicted once, the last window being
moved back to end with the text.

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
from tokenizers import Tokenizer

from fenchel.checkpoints import load
from fenchel.data import decode, encode, end_id, windows
from fenchel.generation import Sampling, stream
from fenchel.model import Transformer, evaluating

_SETTINGS = frozenset("until max_gen_toks do_sample temperature top_k top_p min_p".split())
_NEW_TOKENS = 256  # where a task does not say, as the harness has it


@dataclass(frozen=True)
class HarnessAdapter:
    """A model and its tokenizer, asked as the harness asks."""

    model: Transformer
    tokenizer: Tokenizer
    batch: int = 16
    """Rows read at once."""
    seed: int = 0
    """Of tasks that sample."""

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """log p(continuation | context), and whether every token of it was the likeliest."""
        return self._scores([self._row(*pair) for pair in pairs])

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """log p of each whole text, after the end of a document."""
        context = self.model.config.context
        rows: list[tuple[list[int], int]] = []
        owners: list[int] = []
        for owner, text in enumerate(texts):
            ids = np.array([end_id(self.tokenizer), *encode(self.tokenizer, text)])
            if len(ids) < 2:
                continue  # the empty text is certain
            for window in windows(ids, context=context):
                row = [*window.inputs[0].tolist(), int(window.targets[0, -1])]
                rows.append((row, int(window.scored.sum())))
                owners.append(owner)
        totals = [0.0] * len(texts)
        for owner, (value, _) in zip(owners, self._scores(rows), strict=True):
            totals[owner] += value
        return totals

    def generate_until(self, context: str, settings: Mapping[str, Any]) -> str:
        """The continuation of a context, greedy unless asked to sample, cut before a stop."""
        if unknown := sorted(settings.keys() - _SETTINGS):
            raise ValueError(
                f"the task asks for {', '.join(unknown)} in generation; "
                f"known are {', '.join(sorted(_SETTINGS))}."
            )
        end = end_id(self.tokenizer)
        stops = settings.get("until") or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        device = self.model.lm_head_weight.device
        prompt = torch.tensor([encode(self.tokenizer, context) or [end]], device=device)
        drawn: list[int] = []
        for token_B in stream(
            self.model,
            prompt,
            max_new_tokens=int(settings.get("max_gen_toks", _NEW_TOKENS)),
            sampling=_sampling(settings),
            stop=[end],
            generator=torch.Generator(device).manual_seed(self.seed),
        ):
            if int(token_B[0]) == end:
                break
            drawn.append(int(token_B[0]))
            text = decode(self.tokenizer, drawn)
            if found := [at for stop in stops if stop and (at := text.find(stop)) >= 0]:
                return text[: min(found)]
        return decode(self.tokenizer, drawn)

    def _row(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Ids of both, and how many of them, the last ones, are asked about."""
        if not context:
            asked = encode(self.tokenizer, continuation)
            return [end_id(self.tokenizer), *asked], len(asked)
        bare = context.rstrip()
        given = encode(self.tokenizer, bare)
        whole = encode(self.tokenizer, context + continuation)
        asked = whole[len(given) :]
        return [*(given or [end_id(self.tokenizer)]), *asked], len(asked)

    @torch.no_grad()
    def _scores(self, rows: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """log p of the last ``asked`` ids of each row given those before, and whether greedy."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        context = self.model.config.context
        for _, asked in rows:
            if asked > context:
                raise ValueError(
                    f"a continuation has {asked} tokens and the model reads {context}; "
                    "use a model with a longer context for this task."
                )
        # Rows of like length are read together; what fills a row stands after what counts.
        order = sorted(
            (i for i, (_, asked) in enumerate(rows) if asked), key=lambda i: -len(rows[i][0])
        )
        device = self.model.lm_head_weight.device
        with evaluating(self.model):
            for first in range(0, len(order), self.batch):
                part = order[first : first + self.batch]
                cut = [rows[i][0][-(context + 1) :] for i in part]
                wide = max(map(len, cut)) - 1
                inputs = torch.tensor([[*row[:-1], *[0] * (wide + 1 - len(row))] for row in cut])
                log_p = self.model(inputs.to(device)).float().log_softmax(-1)
                for i, row, log_p_TV in zip(part, cut, log_p, strict=True):
                    asked = rows[i][1]
                    targets = torch.tensor(row[-asked:], device=device)
                    mine = log_p_TV[len(row) - 1 - asked : len(row) - 1]
                    value = mine.gather(-1, targets[:, None]).sum(dtype=torch.float64)
                    found[i] = float(value), bool((mine.argmax(-1) == targets).all())
        return found


def harness_model(directory: str | Path, *, batch: int = 16, seed: int = 0) -> Any:
    """The model of a directory as an ``lm_eval.api.model.LM``, for ``simple_evaluate``."""
    try:
        LM: Any = import_module("lm_eval.api.model").LM
    except ImportError:
        raise ValueError(
            "lm-evaluation-harness is not installed; pip install 'fenchel[eval]'."
        ) from None

    class FenchelLM(LM):  # type: ignore[misc]
        """Requests in, answers out; each answer is also offered to the harness's cache."""

        def __init__(self, answers: HarnessAdapter) -> None:
            super().__init__()
            self.answers = answers

        @property
        def tokenizer_name(self) -> str:
            return str(directory)

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            found = self.answers.loglikelihood([request.args for request in requests])
            return self._kept("loglikelihood", requests, found)

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            found = self.answers.loglikelihood_rolling([request.args[0] for request in requests])
            return self._kept("loglikelihood_rolling", requests, found)

        def generate_until(self, requests: list[Any]) -> list[str]:
            found = [self.answers.generate_until(*request.args) for request in requests]
            return self._kept("generate_until", requests, found)

        def _kept(self, kind: str, requests: list[Any], found: list[Any]) -> list[Any]:
            for request, answer in zip(requests, found, strict=True):
                self.cache_hook.add_partial(kind, request.args, answer)
            return found

    model, tokenizer, _ = load(directory)
    return FenchelLM(HarnessAdapter(model, tokenizer, batch, seed))


def _sampling(settings: Mapping[str, Any]) -> Sampling:
    """Greedy unless the task samples; a temperature without sampling asks for nothing."""
    if not settings.get("do_sample"):
        return Sampling(temperature=0.0)
    return Sampling(
        temperature=float(settings.get("temperature", 1.0)),
        top_k=settings.get("top_k"),
        top_p=settings.get("top_p"),
        min_p=settings.get("min_p"),
    )
