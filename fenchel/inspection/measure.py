"""A text to the ids of one sequence that a subject can read, and to the words for them.

A subject and a text to an inspection: read once, then heads, blocks, network, precision.

    inspect(subject, source) -> Inspection;   for a subject see fenchel.inspection.loader

The order is that of cost and of use: what is known of the heads is known before a block is
differentiated, and ``progress`` is called after every step. Everything random is drawn from one seed.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from fenchel.attention import AttentionCall, pack_weights
from fenchel.data import decode, encode, end_id, open_text
from fenchel.inspection.blocks import layer
from fenchel.inspection.heads import heads, row_weights
from fenchel.inspection.linearisation import derivative
from fenchel.inspection.network import STEPS, network
from fenchel.inspection.precision import precision
from fenchel.inspection.result import BlockResult, Head, Inspection, Maps, Method
from fenchel.inspection.trace import BlockTrace, ForwardTrace, InspectedModel


class TokenizedText(NamedTuple):
    """One sequence."""

    name: str
    """What the text is called."""
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    """What each id spells, alone."""


def tokenize_text(
    subject: InspectedModel, source: str, max_tokens: int | None = None
) -> TokenizedText:
    """The first tokens of a text: all of them, or ``max_tokens`` if it has more.

    A text longer than the subject's context is refused unless ``max_tokens`` cuts it.
    """
    context = subject.context
    if max_tokens is not None and max_tokens < 2:
        raise ValueError(f"max_tokens={max_tokens} should be 2 or more.")
    if max_tokens is not None and context is not None and max_tokens > context:
        raise ValueError(
            f"max_tokens={max_tokens} is more than the {context} tokens that {subject.name} reads."
        )
    limit = context if max_tokens is None else max_tokens
    text = open_text(source)
    ids: list[int] = []
    for document in text.documents():
        ids += subject.encode(document.text, first=not ids)
        if limit is not None and len(ids) > limit:
            break
    if max_tokens is None and limit is not None and len(ids) > limit:
        raise ValueError(
            f"{source} has more tokens than the {limit} that {subject.name} reads; take the first "
            f"ones with --max-tokens {limit}."
        )
    ids = ids[:limit]
    if len(ids) < 2:
        raise ValueError(f"{source} has {len(ids)} tokens; at least 2 are needed to attend.")
    return TokenizedText(text.name, tuple(ids), tuple(_spelt(subject.tokenizer, i) for i in ids))


def framed(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text between the control tokens that the tokenizer itself puts around one."""
    encode(tokenizer, text)  # what is no text, or spells a control token, is refused there
    return list(tokenizer.encode(text, add_special_tokens=True).ids)


def after_an_end(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text after an end, as documents follow one another in training."""
    return [end_id(tokenizer), *encode(tokenizer, text)]


def _spelt(tokenizer: Tokenizer, token: int) -> str:
    """The text of one token; a control token by its name, half a character by its bytes."""
    text = decode(tokenizer, [token])
    if text and "\ufffd" not in text:
        return text
    return str(tokenizer.id_to_token(token) or f"[{token}]")


Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, how much of it is done, and its total."""

_MAP_BYTES = 4 << 20
_MAP_SIZE = 128
_SMALL = 1 << 20  # numbers in the streams before all blocks


def inspect(
    subject: InspectedModel,
    source: str,
    *,
    max_tokens: int | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    blocks: bool = True,
    branches: bool = False,
    tolerance: float = 0.05,
    iterations: int | None = None,
    failure: float = 1e-6,
    device: str = "cpu",
    seed: int = 0,
    progress: Progress | None = None,
) -> Inspection:
    """Measure ``subject`` on the first tokens of ``source``.

    ``layers`` and ``heads`` count from 1 and choose; ``blocks=False`` leaves the derivatives of
    blocks and network out; ``branches`` adds those of each block's attention and MLP alone.
    ``iterations`` follow from the model's size if left out.
    """
    text = tokenize_text(subject, source, max_tokens)
    clock, report = _Clock(), progress or _no_progress
    generator = torch.Generator().manual_seed(seed)
    subject.model.to(device)
    with clock("reading"):
        trace = subject.trace(torch.tensor([text.ids], device=device))
    require_finite(trace)
    method = Method(
        dtype="float32",
        device=device,
        algorithm="Golub-Kahan, Christoffel upper end",
        tolerance=tolerance,
        iterations=affordable(trace) if iterations is None else iterations,
        failure=failure,
        seed=seed,
    )
    L, H = len(trace.blocks), _heads_of(trace)
    chosen, which = _chosen(layers, L, "layer"), _chosen(heads, H, "head")
    with clock("heads"):
        found = _heads(trace, chosen, which, method, generator, report)
    measured: list[BlockResult] = []
    one = partial(layer, method=method, generator=generator, branches=branches)
    whole = exact = None
    if blocks:
        with clock("blocks"):
            steps = [derivative(block.linearised, block.input) for block in trace.blocks]
            for done, at in enumerate(chosen):
                report("blocks", done, len(chosen))
                measured.append(one(trace.blocks[at], steps[at], at + 1))
            report("blocks", len(chosen), len(chosen))
        with clock("network"):
            so_far = partial(_network_progress, report)
            whole = network(trace, steps, measured, method, generator, so_far)
        with clock("precision"):
            exact = precision(trace, subject.model, found, method, generator)
    return Inspection(
        subject=subject.facts() | _sizes(trace.blocks),
        text=text.name,
        tokens=list(text.tokens),
        method=method,
        heads=found,
        layers=measured,
        network=whole,
        precision=exact,
        maps=maps([trace.blocks[at].attention for at in chosen], chosen, which),
        seconds=clock.seconds,
    )


def maps(calls: Sequence[AttentionCall], layers: Sequence[int], heads: Sequence[int]) -> Maps:
    """The weights of every chosen head on as many first tokens as a page can hold."""
    T, count = calls[0].q.shape[2], len(calls) * len(heads)
    size = min(T, _MAP_SIZE, int((_MAP_BYTES / count) ** 0.5))
    weights = torch.stack([row_weights(call, size)[list(heads)] for call in calls])
    return Maps(
        layers=[at + 1 for at in layers],
        heads=[at + 1 for at in heads],
        size=size,
        data=pack_weights(weights),
    )


def affordable(trace: ForwardTrace) -> int:
    """Pairs of products for every norm: many where they are cheap, since each narrows a bracket.

    Nine let a model of GPT-2's size on 1024 tokens end in about three minutes on two cores.
    """
    numbers = sum(block.input.numel() for block in trace.blocks)
    return 30 if numbers <= _SMALL else 9


def require_finite(trace: ForwardTrace) -> None:
    """Refuse a model that breaks down on this text: nothing about it can be measured."""
    for number, block in enumerate(trace.blocks, 1):
        if not bool(block.output.isfinite().all()):
            raise ValueError(
                f"the stream after block {number} is not finite on this text, so there is nothing "
                "to measure; the weights overflow float32."
            )


def _heads(
    trace: ForwardTrace,
    layers: Sequence[int],
    which: list[int],
    method: Method,
    generator: torch.Generator,
    report: Progress,
) -> list[Head]:
    found: list[Head] = []
    total = len(layers) * len(which)
    for at in layers:
        call = trace.blocks[at].attention
        for head in heads(call, at + 1, which, method, generator):
            found.append(head)
            report("heads", len(found), total)
    return found


def _heads_of(trace: ForwardTrace) -> int:
    counts = {block.attention.q.shape[1] for block in trace.blocks}
    if len(counts) > 1:
        raise ValueError(
            f"this model has {min(counts)} to {max(counts)} heads in a layer; only models with as "
            "many in every layer can be inspected."
        )
    return counts.pop()


def _chosen(which: Sequence[int] | None, count: int, name: str) -> list[int]:
    """Numbers from 1 as places from 0, in order and once each."""
    if which is None:
        return list(range(count))
    wrong = next((n for n in which if not 1 <= n <= count), None)
    if wrong is not None or not which:
        raise ValueError(f"there is no {name} {wrong}: this model has {name}s 1 to {count}.")
    return sorted({n - 1 for n in which})


def _sizes(blocks: Sequence[BlockTrace]) -> dict[str, int]:
    call: AttentionCall = blocks[0].attention
    stream: Tensor = blocks[0].input
    return {
        "layers": len(blocks),
        "heads": call.q.shape[1],
        "kv_heads": call.k.shape[1],
        "head_width": call.q.shape[3],
        "width": stream.shape[2],
    }


class _Clock:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - begun, 3)


def _network_progress(report: Progress, done: int) -> None:
    report("network", done, STEPS)


def _no_progress(_stage: str, _done: int, _total: int) -> None:
    """Ignores every report."""
