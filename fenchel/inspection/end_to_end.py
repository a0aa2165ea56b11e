"""All blocks together: how fast a change grows with depth, and from which token to which.

J is the derivative of x_L in x_0: the product of those of the blocks, whose graphs stay in memory.

    stream     |J|_2                    logits    |d logits of the last token / d x_0|_2
    exponent   log|J|_2 / L, the finite-time Lyapunov exponent per layer; beside it the mean of
               log|J_l|_2 over blocks, which would be reached only if the top direction that a
               block produces were the top direction of the next
    growth     with v the top right singular vector of J: log |J_l .. J_1 v| - log |J_(l-1) .. v|,
               one number per block; they sum to log|J|_2

    influence  |J_ij|_F from input token j to output token i. A Gaussian u that is zero outside a
               span of output tokens has E |(J^T u)_j|^2 = sum over i in the span of |J_ij|_F^2, so
               one reverse product gives an unbiased row of squares. Its error is measured by
               drawing the last row again. At most ``SPANS`` spans of equal length.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor

from fenchel.data import ProgressCallback
from fenchel.inspection.blocks import operator_norm, to_interval
from fenchel.inspection.linearisation import derivative
from fenchel.inspection.trace import ForwardTrace
from fenchel.inspection_result import BlockResult, Influence, Method, Network
from fenchel.sensitivity.operator import Operator

_STEPS = 3  # stream, influence, logits
SPANS, AGAIN = 10, 1
"""Rows of the influence map, and how often the last one is drawn again for its error."""


def network(
    trace: ForwardTrace,
    steps: Sequence[Operator],
    layers: list[BlockResult],
    method: Method,
    generator: torch.Generator,
    progress: ProgressCallback,
) -> Network:
    """The network of blocks whose derivatives are ``steps``; ``layers`` are those measured."""
    progress("network", 0, _STEPS)
    L = len(steps)
    J = reduce(lambda before, step: step @ before, steps)
    sigma = operator_norm(J, method, generator)
    assert isinstance(sigma.right, Tensor)
    progress("network", 1, _STEPS)
    tokens = influence(J, generator)
    progress("network", 2, _STEPS)
    logits = None
    if trace.lm_head is not None:
        out = derivative(trace.lm_head, trace.blocks[-1].output) @ J
        few = replace(method, iterations=-(-2 * method.iterations // 3))
        logits = to_interval(
            operator_norm(out.T, few, generator)
        )  # logits are fewer: a better start
    progress("network", _STEPS, _STEPS)
    norms = [_log(layer.block.lower) for layer in layers]
    return Network(
        stream=to_interval(sigma),
        logits=logits,
        exponent=_log(float(sigma.lower)) / L,
        blocks_exponent=sum(norms) / L if len(norms) == L else None,
        growth=growth(steps, sigma.right),
        influence=tokens,
    )


def growth(steps: Sequence[Operator], v: Tensor) -> list[float]:
    """log of the stretch of v (T, M) in each block, carried on from block to block."""
    logs = []
    for J in steps:
        moved: Tensor = J @ v
        size = float(moved.norm())
        logs.append(_log(size / float(v.norm())))
        v = moved / size if size > 0 else moved
    return logs


def influence(J: Operator, generator: torch.Generator, spans: int = SPANS) -> Influence:
    """The map, one reverse product per span and some more for its error; J between (T, M)."""
    T = J.codomain.shapes[0][0]
    edges = [round(i * T / min(spans, T)) for i in range(min(spans, T) + 1)]
    parts = list(pairwise(edges))
    squares = torch.stack([_pulled(J, part, generator) for part in parts])
    last = torch.stack([squares[-1], *(_pulled(J, parts[-1], generator) for _ in range(AGAIN))])
    mean = last.mean(0)
    nonzero = mean > 1e-12 * mean.amax()
    off = last.std(0)[nonzero] / mean[nonzero] / 2.0  # the root halves a relative error
    return Influence(
        spans=parts,
        values=[[float(f"{x:.4g}") for x in row] for row in squares.sqrt().tolist()],
        draws=1 + AGAIN,
        error=float(off.square().mean().sqrt()),
    )


def _pulled(J: Operator, span: tuple[int, int], generator: torch.Generator) -> Tensor:
    """|(J^T u)_j|^2 for a Gaussian u on the tokens of the span: (T,)."""
    T, M = J.codomain.shapes[0]
    u = torch.zeros(T, M, dtype=J.dtype)
    u[slice(*span)] = torch.randn(span[1] - span[0], M, generator=generator, dtype=J.dtype)
    back: Tensor = J.T @ u.to(J.device)
    return back.double().square().sum(-1)


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf
