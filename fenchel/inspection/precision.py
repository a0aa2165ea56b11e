"""What finite precision does to the numbers of a report, measured on the same text.

Two questions. Is what we report right to the digits shown? The head with the largest sigma is
measured again in float64, from the same queries, keys and values. And what would the model itself
lose in coarser numbers? It is run once more with every weight and the stream after every block
rounded to them, sums still in float32, and the streams are compared.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from fenchel.inspection.heads import select_heads, sensitivities
from fenchel.inspection.trace import ForwardTrace
from fenchel.inspection_result import Head, Method, Precision

_CONVERGED = 40  # pairs of products: what is left between the two is rounding


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
