"""A model and a text to plain values: ``inspect`` measures, ``certify_model`` certifies.

    inspect(model, source)                 -> Inspection       heads, blocks, network, precision
    certify_model(model, source, radius)   -> Certification    attention layers over a ball

One forward pass is traced; then the stages run in the order of their cost, and ``progress`` is
called within each. Every random number comes from one seed.

**Opening.** ``open_model`` reads a run directory or a Hugging Face directory of the families in
fenchel/model/families by fenchel's own loader, which starts at once, where importing
``transformers`` takes seconds. ``transformers`` reads every other family, and variants of the known
ones that fenchel does not have: other settings, another head. A damaged directory is refused before
either loads it.

**Precision.** Two questions. Is what is reported right to the digits shown? The head with the
largest sigma is measured again in float64, from the same queries, keys and values. And what would
the model itself lose in coarser numbers? It is run once more with every weight and the stream after
every block rounded to them, sums still in float32, and the streams are compared.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from fenchel.attention import AttentionCall
from fenchel.attention.statistics import pack_weights
from fenchel.checkpoints.directory import CheckpointDirectory, has_file, open_directory
from fenchel.checkpoints.run_checkpoint import is_run
from fenchel.checkpoints.tokenizer import read_tokenizer
from fenchel.data import ProgressCallback, TextTokenizer
from fenchel.data.token_files import no_progress
from fenchel.inspection.blocks import measure_block, network
from fenchel.inspection.certificates import SEARCH, Search, certify_layers, transformer_of
from fenchel.inspection.foreign_model import open_foreign
from fenchel.inspection.heads import heads, row_weights, select_heads, sensitivities
from fenchel.inspection.linearisation import derivative
from fenchel.inspection.our_model import Unsupported, open_known, open_run
from fenchel.inspection.trace import ForwardTrace, InspectedModel, tokenize_text
from fenchel.inspection_result import (
    BlockResult,
    Certification,
    Head,
    Inspection,
    Maps,
    Method,
    Precision,
)
from fenchel.model.families.config_reader import CONFIG
from fenchel.model.families.registry import MODEL_TYPES
from fenchel.sensitivity import Ball

_MAP_BYTES = 4 << 20
_MAP_SIZE = 128
_SMALL = 1 << 20  # numbers in the streams before all blocks
_CONVERGED = 40  # pairs of products: what is left between single and double precision is rounding


def open_model(folder: str | Path) -> InspectedModel:
    """The model in a run directory or a Hugging Face directory."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"there is no directory {path}.")
    if is_run(path):
        return open_run(path)
    if has_file(path, CONFIG):
        directory = open_directory(path)
        return open_checkpoint(directory, read_tokenizer(path, config=directory.config))
    raise ValueError(
        f"{path} is neither a run directory (checkpoints/) nor a Hugging Face directory "
        "(config.json)."
    )


def open_checkpoint(directory: CheckpointDirectory, tokenizer: TextTokenizer) -> InspectedModel:
    """By our own loader where it can, else by transformers."""
    installed = find_spec("transformers") is not None
    if directory.model_type not in MODEL_TYPES:
        if not installed:
            raise ValueError(
                f"the family {directory.model_type!r} is read through transformers: "
                "pip install 'fenchel[hf]'."
            )
        return open_foreign(directory, tokenizer)
    try:
        return open_known(directory, tokenizer)
    except Unsupported as why:
        reason = str(why)
    if not installed:
        sentence = reason.rstrip(".")
        raise ValueError(f"{sentence}; transformers may have it: pip install 'fenchel[hf]'.")
    try:
        return open_foreign(directory, tokenizer)
    except ValueError:
        raise ValueError(reason) from None  # neither can, and ours says what is wrong by its name


def inspect(
    model: InspectedModel,
    source: str,
    *,
    max_tokens: int | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    blocks: bool = True,
    branches: bool = False,
    radius: float | None = None,
    norm: str = "fro",
    tolerance: float = 0.05,
    iterations: int | None = None,
    failure: float = 1e-6,
    device: str = "cpu",
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> Inspection:
    """Measure ``model`` on the first tokens of ``source``.

    ``layers`` and ``heads`` select by numbers from 1. ``blocks=False`` leaves out the derivatives
    of blocks and network; ``branches`` adds those of each block's attention and MLP alone, in their
    own inputs behind the norms.
    ``radius`` adds certificates of the attention layers over balls in ``norm``. ``iterations``
    defaults to a number that suits the model's size.
    """
    if radius is not None:
        Ball.of(radius, norm, 1)  # a wrong radius, norm or model is refused before it runs
        transformer_of(model)
    text = tokenize_text(model, source, max_tokens)
    clock, report = _Clock(), progress or no_progress
    generator = torch.Generator().manual_seed(seed)
    model.model.to(device)
    with clock("reading"):
        ids = torch.tensor([text.ids], device=device)
        trace = model.trace(ids)
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
    attending = _attending(trace, chosen)
    with clock("heads"):
        head_results = _heads(trace, attending, which, method, generator, report)
    block_results: list[BlockResult] = []
    network_result = precision_result = None
    if blocks:
        with clock("blocks"):
            steps = [derivative(block.linearised, block.input) for block in trace.blocks]
            for done, at in enumerate(chosen):
                report("blocks", done, len(chosen))
                block_results.append(
                    measure_block(
                        trace.blocks[at], steps[at], at + 1, method, generator, branches=branches
                    )
                )
            report("blocks", len(chosen), len(chosen))
        with clock("network"):
            network_result = network(trace, steps, block_results, method, generator, report)
        with clock("precision"):
            precision_result = precision(trace, model.model, head_results, method, generator)
    certificates = None
    if radius is not None:
        with clock("certificates"):
            certificates = certify_layers(
                model, ids, radius, norm, chosen, Search(), generator, report
            )
    return Inspection(
        subject=model.facts() | _sizes(trace) | {"causal": trace.causal},
        text=text.name,
        tokens=list(text.tokens),
        method=method,
        heads=head_results,
        layers=block_results,
        network=network_result,
        precision=precision_result,
        certificates=certificates,
        maps=maps([trace.calls[at] for at in attending], attending, which),
        seconds=clock.seconds,
    )


def certify_model(
    model: InspectedModel,
    source: str,
    radius: float,
    *,
    norm: str = "fro",
    max_tokens: int | None = 64,
    layers: Sequence[int] | None = None,
    search: Search = SEARCH,
    device: str = "cpu",
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> Certification:
    """Certify the attention layers of a model, or its blocks, on the first tokens of ``source``.

    ``radius`` is that of the ball about the input of each attention layer, or of each block with
    ``search.blocks``, in the norm "fro" or "token"; ``layers`` select by numbers from 1.
    """
    Ball.of(radius, norm, 1)  # a wrong radius or norm is refused before the model runs
    chosen = _chosen(layers, transformer_of(model).config.layers, "layer")
    text = tokenize_text(model, source, max_tokens)
    clock = _Clock()
    model.model.to(device)
    with clock("certificates"):
        ids, generator = torch.tensor([text.ids], device=device), torch.Generator()
        certificates = certify_layers(
            model,
            ids,
            radius,
            norm,
            chosen,
            search,
            generator.manual_seed(seed),
            progress or no_progress,
        )
    return Certification(
        subject=model.facts(),
        text=text.name,
        tokens=list(text.tokens),
        device=device,
        seed=seed,
        certificates=certificates,
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
    report: ProgressCallback,
) -> list[Head]:
    results: list[Head] = []
    total = len(layers) * len(which)
    for at in layers:
        call, gate = trace.calls[at], trace.blocks[at].gate
        for head in heads(call, at + 1, which, method, generator, gate):
            results.append(head)
            report("heads", len(results), total)
    return results


def _heads_of(trace: ForwardTrace) -> int:
    counts = {call.q.shape[1] for call in trace.calls.values()}
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


def _attending(trace: ForwardTrace, layers: Sequence[int]) -> list[int]:
    """Those of the chosen layers whose heads can be measured."""
    attending = [at for at in layers if at in trace.calls]
    if not attending:
        numbers = ", ".join(str(at + 1) for at in trace.calls)
        raise ValueError(
            f"the chosen layers give no weights to keys; layers {numbers} of this model do."
        )
    return attending


def _sizes(trace: ForwardTrace) -> dict[str, int]:
    call, stream = next(iter(trace.calls.values())), trace.blocks[0].input
    return {
        "layers": len(trace.blocks),
        "attention_layers": len(trace.calls),
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


@torch.no_grad()
def precision(
    trace: ForwardTrace,
    model: nn.Module,
    heads: list[Head],
    method: Method,
    generator: torch.Generator,
    coarse: torch.dtype = torch.bfloat16,
) -> Precision:
    """Measure both on the trace of a model."""
    top = max(heads, key=lambda head: head.sigma["qkv"].lower)
    call = select_heads(trace.calls[top.layer - 1], [top.head - 1])
    fine = call._replace(q=call.q.double(), k=call.k.double(), v=call.v.double())
    to_the_end = replace(method, tolerance=1e-4, iterations=_CONVERGED)
    single, double = (
        sensitivities(c, to_the_end, generator, which=("qkv",)).sigma["qkv"][0].lower
        for c in (call, fine)
    )
    difference = abs(single / double - 1.0) if double > 0 else 0.0
    streams, logits, divergence = _coarse(trace, model, coarse)
    name = str(coarse).removeprefix("torch.")
    effect = f"after the last block the stream is off by {streams[-1]:.2g}"
    if divergence is not None:
        token = "next" if trace.causal else "last"  # an encoder predicts the token it reads
        effect += f", the probabilities of the {token} token by {divergence:.2g} nats (KL)"
    return Precision(
        again=difference,
        again_head=(top.layer, top.head),
        rounded=name,
        stream=streams,
        logits=logits,
        divergence=divergence,
        statement=(
            f"Measured in {method.dtype}; the largest head norm agrees with float64 to "
            f"{difference:.1e}. With weights and stream rounded to {name}, {effect}."
        ),
    )


def _coarse(
    trace: ForwardTrace, model: nn.Module, coarse: torch.dtype
) -> tuple[list[float], float | None, float | None]:
    """Relative errors of the stream block by block, and what becomes of the last logits."""
    lm_head, last = trace.lm_head, trace.blocks[-1].output
    exact = None if lm_head is None else lm_head(last).double()
    errors = []
    with rounded(model, coarse):
        x = _round(trace.blocks[0].input, coarse)
        for block in trace.blocks:
            x = _round(block.forward(x), coarse)
            errors.append(float((x - block.output).norm() / block.output.norm()))
        off = None if lm_head is None else lm_head(x).double()
    if exact is None or off is None:
        return errors, None, None
    p, q = exact.log_softmax(-1), off.log_softmax(-1)
    return errors, float((exact - off).abs().amax()), float((p.exp() * (p - q)).sum().clamp(min=0))


@contextmanager
def rounded(model: nn.Module, coarse: torch.dtype) -> Iterator[None]:
    """Inside, the model's weights are rounded to ``coarse``; afterwards they are as before."""
    original = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        for p in model.parameters():
            p.copy_(_round(p, coarse))
        yield
    finally:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(original[name])


def _round(x: Tensor, coarse: torch.dtype) -> Tensor:
    return x.detach().to(coarse).to(x.dtype)
