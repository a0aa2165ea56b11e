"""Every block and all of them together: how much a change grows, and from which token to which.

**A block.** J is the derivative of x_after in x_before, both (T, M).

    block     |J|_2, a bracket; its singular vectors show which input tokens move it (the squared
              norm of each token's part of the right one) and where it shows (of the left one)
    token     the norm of J for |X| = max_i |x_i|. Lower: Boyd's power method from the top right
              singular vector, attained. Upper: sqrt(T) |J|_2, since |X|_F <= sqrt(T) |X|: sure
              given the bracket above, and loose
    norms     1/s of every token, and max|gamma| / s, the sure bound of the layer's gain
    update    |x_after - x_before| / |x_before|

Derivatives are autodiff's, through the module itself.

**The network.** J is the derivative of x_L in x_0: the product of those of the blocks, whose graphs
stay in memory.

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
from fenchel.inspection.linearisation import derivative
from fenchel.inspection.trace import BlockTrace, Branch, ForwardTrace, NormInput
from fenchel.inspection_result import BlockResult, Influence, Interval, Method, Network, NormGain
from fenchel.sensitivity import bounds, spectral_norm
from fenchel.sensitivity.golub_kahan import Bracket as SpectralBracket
from fenchel.sensitivity.norms import unit_rows
from fenchel.sensitivity.operator import Operator

_CLIMB = 2  # steps of Boyd's method, each a pair of products
_STEPS = 3  # of the network: stream, influence, logits
SPANS, AGAIN = 10, 1
"""Rows of the influence map, and how often the last one is drawn again for its error."""


def measure_block(
    block: BlockTrace,
    J: Operator,
    number: int,
    method: Method,
    generator: torch.Generator,
    *,
    branches: bool = False,
) -> BlockResult:
    """Measure the block numbered ``number`` (from 1), whose derivative is J."""
    sigma = operator_norm(J, method, generator)
    assert isinstance(sigma.right, Tensor)
    before, after = block.input.double(), block.output.double()
    return BlockResult(
        layer=number,
        norms=[gain(norm) for norm in block.norms],
        attention=_branch(block.attention_branch, method, generator) if branches else None,
        mlp=_branch(block.mlp_branch, method, generator) if branches else None,
        block=to_interval(sigma),
        top=sigma.values.tolist(),
        token=token_interval(J, sigma),
        update=float((after - before).norm() / before.norm()),
        moved_by=mass(sigma.right),
        shown_at=mass(sigma.left),
    )


def operator_norm(J: Operator, method: Method, generator: torch.Generator) -> SpectralBracket:
    """|J|_2 by Golub and Kahan, with the settings of the method."""
    return spectral_norm(
        J,
        tol=method.tolerance,
        failure=method.failure,
        iterations=method.iterations,
        generator=generator,
    )


def to_interval(sigma: SpectralBracket) -> Interval:
    """A bracket as plain numbers."""
    return Interval(float(sigma.lower), float(sigma.upper), sigma.iterations)


def mass(vector: Tensor) -> list[float]:
    """The share of every token in a unit vector (T, M)."""
    squares = vector.double().square().sum(-1)
    return [float(f"{share:.4g}") for share in (squares / squares.sum()).tolist()]


def gain(norm: NormInput) -> NormGain:
    """1/s over the tokens, and a bound on the gain that no token exceeds."""
    x = norm.x[0].double()
    s = bounds.norm_layer(x, None, eps=norm.epsilon, kind=norm.kind)
    weight = None if norm.weight is None else norm.weight.double()
    upper = bounds.norm_layer(x, weight, eps=norm.epsilon, kind=norm.kind).amax()
    return NormGain(
        name=norm.name,
        least=float(s.amin()),
        median=float(s.median()),
        most=float(s.amax()),
        upper=float(upper),
    )


def token_interval(J: Operator, sigma: SpectralBracket) -> Interval:
    """The norm of J for |X| = max_i |x_i|, from a bracket of its spectral norm."""
    assert isinstance(sigma.right, Tensor)
    T = J.domain.shapes[0][0]
    return Interval(boyd_ascent(J, sigma.right), float(sigma.upper) * T**0.5, _CLIMB)


def boyd_ascent(J: Operator, start: Tensor, steps: int = _CLIMB) -> float:
    """Boyd's method: hold the token that moves most, turn every other towards it, repeat.

    start (T, M); gives the movement of one output token when no input token moves by more than 1.
    """
    d = unit_rows(start)
    reached = 0.0
    for _ in range(steps):
        moved: Tensor = J @ d
        sizes = moved.norm(dim=-1)
        at = int(sizes.argmax())
        reached = max(reached, float(sizes[at]))
        pull = torch.zeros_like(moved)
        pull[at] = unit_rows(moved[at])
        back: Tensor = J.T @ pull
        d = torch.where(back.norm(dim=-1, keepdim=True) > 0, unit_rows(back), d)
        reached = max(reached, float(back.norm(dim=-1).sum()))  # d moves that token by this much
    return reached


def _branch(branch: Branch | None, method: Method, generator: torch.Generator) -> Interval | None:
    if branch is None:
        return None
    return to_interval(operator_norm(derivative(branch.f, branch.x), method, generator))


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
        # Logits are fewer: a better start.
        logits = to_interval(operator_norm(out.T, few, generator))
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
