"""An independent solution of every choice map, in more digits than any dtype has."""

from collections.abc import Callable, Sequence

import mpmath
import pytest

from fenchel.choice import Capped, Choice, Softmax, Sparsemax

Solver = Callable[[Choice, Sequence[float]], list[mpmath.mpf]]


def alpha_of(choice: Choice) -> mpmath.mpf:
    """The Tsallis exponent of a map; 1 is Shannon's entropy."""
    if isinstance(choice, Softmax | Capped):
        return mpmath.mpf(1)
    return mpmath.mpf(2) if isinstance(choice, Sparsemax) else mpmath.mpf(float(choice.alpha))


@pytest.fixture
def mp_weights() -> Solver:
    """p for the scores x, by bisection for the threshold; call it inside ``mpmath.workdps``."""

    def solve(choice: Choice, x: Sequence[float]) -> list[mpmath.mpf]:
        a, scores = alpha_of(choice), [mpmath.mpf(t) for t in x]
        allowed = sum(t > -mpmath.inf for t in scores)
        cap = max(mpmath.mpf(min(choice.ceiling, 1.0)), mpmath.mpf(1) / allowed)

        def weights(tau: mpmath.mpf) -> list[mpmath.mpf]:
            if a == 1:
                return [min(cap, mpmath.exp(t - tau)) for t in scores]
            up = ((a - 1) * (t - tau) for t in scores)
            return [u ** (1 / (a - 1)) if u > 0 else mpmath.mpf(0) for u in up]

        top = max(scores)
        low, high = top - 1 - abs(mpmath.log(cap)) - 1 / (a - 1 if a > 1 else 1), top + len(scores)
        if a == 1 and cap < 1:  # capped scores may lie anywhere above
            low = min(t for t in scores if t > -mpmath.inf) - 1 - abs(mpmath.log(cap))
        for _ in range(int(3.5 * mpmath.mp.dps) + 20):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(weights(middle)) > 1 else (low, middle)
        p = weights(low)
        return [w / sum(p) for w in p]

    return solve
