"""Every block: how much it magnifies, in two norms, and through which tokens.

J is the derivative of x_after in x_before, both (T, M).

    block     |J|_2, a bracket; its singular vectors show which input tokens move it (the squared
              norm of each token's part of the right one) and where it shows (of the left one)
    token     the norm of J for |X| = max_i |x_i|. Lower: Boyd's power method from the top right
              singular vector, attained. Upper: sqrt(T) |J|_2, since |X|_F <= sqrt(T) |X|: sure
              given the bracket above, and loose
    norms     1/s of every token, and max|gamma| / s, the sure bound of the layer's gain
    update    |x_after - x_before| / |x_before|

Derivatives are autodiff's, through the module itself.
"""

import torch
from torch import Tensor

from fenchel.inspection.linearisation import derivative
from fenchel.inspection.trace import BlockTrace, Branch, NormInput
from fenchel.inspection_result import BlockResult, Interval, Method, NormGain
from fenchel.sensitivity import bounds, spectral_norm
from fenchel.sensitivity.golub_kahan import Bracket as SpectralBracket
from fenchel.sensitivity.norms import unit_rows
from fenchel.sensitivity.operator import Operator

_CLIMB = 2  # steps of Boyd's method, each a pair of products


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
