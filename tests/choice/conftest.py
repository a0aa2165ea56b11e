"""The weights of the choice maps in as many digits as wanted, by bisection alone."""

from collections.abc import Callable, Sequence

import mpmath
import pytest

Solver = Callable[..., list[mpmath.mpf]]


@pytest.fixture(scope="session")
def mp_weights() -> Solver:
    """Tsallis weights of exponent ``alpha``, 1 for Shannon's entropy, and none above ``cap``.

    To be called inside ``mpmath.workdps``.
    """

    def weights(
        x: Sequence[float], alpha: float | mpmath.mpf, cap: float = 1.0
    ) -> list[mpmath.mpf]:
        rate, scores = mpmath.mpf(alpha) - 1, [mpmath.mpf(t) for t in x]
        allowed = [t for t in scores if t > -mpmath.inf]
        most = max(mpmath.mpf(cap), mpmath.mpf(1) / len(allowed))

        def at(nu: mpmath.mpf) -> list[mpmath.mpf]:
            if rate == 0:
                return [min(most, mpmath.exp(t - nu)) for t in scores]
            up = (rate * (t - nu) for t in scores)
            return [u ** (1 / rate) if u > 0 else mpmath.mpf(0) for u in up]

        low = min(allowed) - 1 - abs(mpmath.log(most)) - (1 / rate if rate else 0)
        high = max(allowed) + len(scores)
        for _ in range(int(3.4 * mpmath.mp.dps) + 30):
            nu = (low + high) / 2
            low, high = (nu, high) if sum(at(nu)) > 1 else (low, nu)
        p = at(low)
        return [t / sum(p) for t in p]

    return weights
