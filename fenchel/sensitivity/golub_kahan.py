"""The spectral norm of an operator from both sides, by Golub-Kahan bidiagonalisation.

From a random unit v_1, each pair of products gives one more orthonormal vector,

    b_j v_{j+1} = J^T J v_j - a_j v_j - b_{j-1} v_{j-1},        a_j = |J v_j|^2,   b_j > 0,

(the one-sided form: a_j = alpha_j^2 + beta_{j-1}^2 and b_j = alpha_j beta_j in the letters of Golub
and Kahan). So v_{j+1} = p_j(J^T J) v_1 for polynomials of degree j: p_0 = 1 and

    b_j p_j(x) = (x - a_j) p_{j-1}(x) - b_{j-1} p_{j-2}(x).

Lower. The top eigenvector of the tridiagonal matrix of a and b gives v, and u = J v / |J v|. The
number reported is |J^T u|, computed again, and ``right`` = J^T u / |J^T u| attains it:
|J right| >= lower.

Below the first. Since the v_j are orthonormal, the i-th largest eigenvalue of the tridiagonal
matrix is at most the i-th largest of J^T J (Cauchy), so the roots of its largest few, ``values``,
are lower bounds of as many singular values, without further products.

Upper. Let sigma be the norm and gamma the component of v_1 along a right singular vector of it. The
v_{j+1} are orthonormal, and gamma^2 p(sigma^2)^2 <= |p(J^T J) v_1|^2 for every polynomial p; the
best p of degree k turns this into

    gamma^2  sum over j <= k of p_j(sigma^2)^2  <=  1       (Christoffel's function).

For v_1 = g / |g| with g Gaussian, P(|gamma| < c) <= failure for c = failure sqrt(pi / 2) / |g|.
Outside that event sigma^2 is at most the root of sum_j p_j(x)^2 = 1 / c^2 above the Ritz values.
The event does not depend on k, so one may stop when the bracket is narrow enough: the promise holds
for all k together. No polynomial argument does better; in particular the bound of Kuczynski and
Wozniakowski, theta / sqrt(1 - (ln(1.648 sqrt(n) / failure) / (2k - 1))^2), is larger.

When b_j is no larger than rounding, the Krylov space is exhausted to the precision of the dtype.
The recurrence continues with a fresh random vector, and b_j is set to the size of the rounding:
that is exact for an operator that differs from J by rounding, and the bound stays valid, which it
would not if the recurrence simply stopped.

Scale. The squares of |J v| overflow or vanish long before |J v| does. Where the first product is
very large or very small, J is replaced by f J with a power of two f near 1 / |J v_1|, which is
applied to the input, so that every product is of order one; the ends of the bracket are divided
by f.

Precision. A float64 operator may run in float32 (``Operator.single``). What underflows or cancels
there is lost to it: where its ``rounding`` is not far below the norm found, or |J v| in float64 is
not its Ritz value, the operator runs in float64. An operator that was built in float32 is bracketed
as its products define it: where they cancel, that is rounding, and float64 is needed.

New vectors are orthogonalised against all before them, twice. Left vectors are not stored, which
halves the memory and costs no accuracy in the large singular values (Simon and Zha). A batch of
operators advances together, each with its own start and its own bracket.

Golub and Kahan (1965). Kuczynski and Wozniakowski (1992). Hochstenbach (2013), Probabilistic upper
bounds for the matrix two-norm. Simon and Zha (2000), Low-rank matrix approximation.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fenchel.sensitivity.autodiff import jacobian
from fenchel.sensitivity.operator import Matrix, Operator, Scaled
from fenchel.sensitivity.rounding import above

Array = npt.NDArray[np.float64]

# Points at which the polynomials are evaluated at once, and rounds: a root to three digits.
_GRID, _FINE_GRID = (48, 3), (400, 2)
_EVERY = 3  # testing the bracket costs about as much as a product of a small operator
_VALUES = 4  # singular values with lower bounds
_WIDEST = 40.0  # log of the largest ratio of upper to lower that is searched


class Bracket(NamedTuple):
    """lower <= |J|_2 <= upper; tensors of the shape of the operator's batch."""

    lower: Tensor
    """Attained: |J right| >= lower, up to rounding."""
    upper: Tensor
    """Exceeded with probability at most ``failure``, over the random start."""
    failure: float
    iterations: int
    left: Tensor
    """Unit vector of the shape of the output; left . J right = lower."""
    right: Tensor | tuple[Tensor, ...]
    """Unit vector of the shape of the input (a tuple of tensors when the input is one)."""
    values: Tensor
    """Lower bounds of the largest singular values, at most 4, up to rounding: (*batch, values)."""

    @property
    def ratio(self) -> Tensor:
        """upper / lower; 1 where both are 0."""
        return torch.where(self.upper > 0, self.upper / self.lower, 1.0)


class Basis:
    """Orthonormal vectors, stored in chunks so that memory grows with their number."""

    CHUNK = 32

    def __init__(self) -> None:
        self.count = 0
        self._chunks: list[Tensor] = []

    def append(self, v: Tensor) -> None:
        """Add one vector: (*batch, n)."""
        place = self.count % self.CHUNK
        if place == 0:
            self._chunks.append(v.new_empty(*v.shape[:-1], self.CHUNK, v.shape[-1]))
        self._chunks[-1][..., place, :] = v
        self.count += 1

    @property
    def chunks(self) -> list[Tensor]:
        """The chunks without unused rows: (*batch, up to CHUNK, n) each."""
        used = self.count - self.CHUNK * (len(self._chunks) - 1)
        return [*self._chunks[:-1], *(chunk[..., :used, :] for chunk in self._chunks[-1:])]

    def without(self, w: Tensor) -> Tensor:
        """w minus its components along the basis, subtracted twice for full precision."""
        chunks = self.chunks
        for _ in range(2):
            for chunk in chunks:
                if w.dim() == 1:
                    w = torch.addmv(w, chunk.mT, torch.mv(chunk, w), alpha=-1.0)
                else:  # as rows: columns of one number are slow to multiply by on a CPU
                    row = w.unsqueeze(-2)
                    w = (row - (row @ chunk.mT) @ chunk).squeeze(-2)
        return w

    def along(self, w: Tensor) -> Tensor:
        """The components of w: (*batch, n) -> (*batch, count)."""
        return torch.cat([(w.unsqueeze(-2) @ chunk.mT).squeeze(-2) for chunk in self.chunks], -1)

    def combine(self, y: Tensor) -> Tensor:
        """sum_j y_j v_j: (*batch, count) -> (*batch, n)."""
        total, first = torch.zeros_like(self._chunks[0][..., 0, :]), 0
        for chunk in self.chunks:
            part = y[..., first : first + chunk.shape[-2]].to(chunk.dtype)
            total += (part.unsqueeze(-2) @ chunk).squeeze(-2)
            first += chunk.shape[-2]
        return total


def spectral_norm(
    J: Operator | Tensor | Callable[..., Any],
    x: Tensor | Sequence[Tensor] | None = None,
    *,
    tol: float = 1e-4,
    failure: float = 1e-6,
    iterations: int = 100,
    generator: torch.Generator | None = None,
) -> Bracket:
    """A bracket of the largest singular value of J, an operator or a matrix.

    ``spectral_norm(f, x)`` is that of ``jacobian(f, x)``, for a module or any function f.

    Stops when upper / lower <= 1 + tol for every operator of the batch, or after ``iterations``
    pairs of products; then the operator's own ceiling, where it has one, may still lower ``upper``.
    With ``failure`` = 0 the upper bound is certain: only that ceiling.

    >>> bracket = spectral_norm(torch.diag(torch.tensor([3.0, 2.0, 1.0])))
    >>> round(float(bracket.lower), 4), round(float(bracket.upper), 4)
    (3.0, 3.0)
    """
    if x is not None:
        J = jacobian(J, x)  # type: ignore[arg-type]
    elif isinstance(J, Tensor):
        J = Matrix(J)
    elif not isinstance(J, Operator):
        raise ValueError(
            f"spectral_norm takes an operator or a matrix, got {type(J).__name__}; the Jacobian of "
            "a function at x is jacobian(f, x), and its norm spectral_norm(f, x)."
        )
    _check(J, tol, failure, iterations)
    quickest = _quickest(J, tol)
    run = _converged(quickest, tol, failure, iterations, generator)
    left, right, lower, rayleigh = run.attained(J)
    if quickest is not J:
        theta = torch.as_tensor(run.singular_values(1)[..., 0], device=lower.device)
        lost = (rayleigh - theta).abs() > 0.5 * quickest.error * lower
        if bool((lost | (quickest.rounding > 1e-3 * tol * lower)).any()):
            run = _converged(J, tol, failure, iterations, generator)
            left, right, lower, _ = run.attained(J)
    upper = torch.full_like(lower, math.inf)
    if failure > 0:
        upper = torch.as_tensor(run.christoffel(failure), device=lower.device)
    # Products are rounded, and so is the recurrence, by the relative error of the operator.
    error = run.J.error
    upper = above(torch.maximum(upper, lower) * (1.0 + error) + J.rounding)
    if failure == 0 or bool((upper > (1 + tol + error) * lower).any()):
        upper = _capped(J, upper, lower, failure)
    return Bracket(
        lower,
        upper,
        failure,
        len(run.a),
        J.codomain.write(left[None], "shaped"),  # type: ignore[arg-type]
        J.domain.write(right[None], "shaped"),
        torch.as_tensor(run.singular_values(_VALUES), device=lower.device),
    )


def _converged(
    J: Operator, tol: float, failure: float, iterations: int, generator: torch.Generator | None
) -> "_Bidiagonalisation":
    """The recurrence, until its bracket is narrow enough."""
    run = _Bidiagonalisation(J, generator)
    for k in range(1, min(iterations, J.domain.size) + 1):
        run.step()
        if failure > 0 and k % _EVERY == 0 and run.closed(tol, failure):
            break
    return run


def _check(J: Operator, tol: float, failure: float, iterations: int) -> None:
    if not (tol > 0 and 0 <= failure < 1 and iterations >= 1):
        raise ValueError(
            "spectral_norm needs tol > 0, 0 <= failure < 1 and iterations >= 1; got "
            f"tol={tol}, failure={failure}, iterations={iterations}."
        )
    if min(J.shape) == 0:
        raise ValueError(f"an operator of shape {J.shape} has no singular value.")


def _quickest(J: Operator, tol: float) -> Operator:
    """J in float32 where that is precise enough to build the Krylov space.

    The attained value is computed afterwards in the precision of J. An error e in a unit vector
    changes |J v| by e^2, so float32 costs no digits of the value.
    """
    if J.dtype != torch.float64 or tol < 10.0 * 32.0 * torch.finfo(torch.float32).eps:
        return J
    single = J.single()
    precise = single is not None and 2.0 * single.error <= tol and math.isfinite(single.rounding)
    return single if single is not None and precise else J


def unit_scale(J: Operator, v: Tensor, size: Tensor) -> Tensor | None:
    """f for J, given |J v| for a random unit v: None where that is a moderate number already."""
    reach = int(0.75 * math.log2(torch.finfo(J.dtype).max))
    low, high = 2.0 ** (-reach // 3), 2.0 ** (reach // 3)
    if bool(((size > low) & (size < high)).all()):
        return None
    f = torch.ones_like(size).masked_fill(~(size > low), 2.0**reach)
    f = f.masked_fill(~(size < high), 2.0**-reach)  # inf and nan as well
    size = length(Scaled(J, f).apply(v[None])[0])
    exponent = torch.frexp(torch.where((size > 0) & size.isfinite(), size, 1.0)).exponent
    # v may be nearly orthogonal to the top vector: leave room for products 2^32 times as large.
    limit = max(0, int(math.log2(torch.finfo(J.dtype).max)) - 32)
    exponent = (torch.frexp(f).exponent - exponent).clamp(-limit, limit)
    return torch.where(size > 0, torch.ldexp(torch.ones_like(f), exponent), 1.0)


def _capped(J: Operator, upper: Tensor, lower: Tensor, failure: float) -> Tensor:
    """``upper``, or the operator's ceiling where that is smaller."""
    ceiling = J.ceiling()
    if ceiling is None:
        if failure == 0:
            raise ValueError(
                "failure=0 needs a certain upper bound and this operator has none; allow a "
                "failure such as 1e-9, or take the norm of J.dense()."
            )
        return upper
    return torch.maximum(torch.minimum(upper, ceiling.to(upper)), lower)


class _Bidiagonalisation:
    """The state of the recurrence, for a batch of operators.

    Vectors are tensors of torch. The coefficients a and b are arrays of numpy, which takes a
    fraction of the time on arrays this small.
    """

    def __init__(self, J: Operator, generator: torch.Generator | None) -> None:
        self.J, self.generator = J, generator
        self.f: Tensor | None = None
        """The recurrence is that of f J; None is 1."""
        self.start(gaussian(J, generator))

    def start(self, g: Tensor) -> None:
        """Begin with v_1 = g / |g|."""
        size = length(g)
        self.size = _array(size)
        self.v = scaled(g, size)
        self.basis = Basis()
        self.largest_a = np.zeros_like(self.size)
        self.a: list[Array] = []
        self.b: list[Array] = []

    def step(self) -> None:
        """One product with J and one with J^T."""
        self.basis.append(self.v)
        w = self.J.apply(self.v[None])[0]
        size = length(w)
        if not self.a:
            self.f = unit_scale(self.J, self.v, size)
            if self.f is not None:
                self.J = Scaled(self.J, self.f)
                w = self.J.apply(self.v[None])[0]
                size = length(w)
        self.a.append(_array(size) ** 2)
        self.largest_a = np.maximum(self.largest_a, self.a[-1])
        w = self.basis.without(self.J.adjoint(w[None])[0])
        rest = length(w)
        b = _array(rest)
        rounding = self.J.error * self.largest_a
        clear = b > rounding
        if clear.all():
            self.v = w / (rest.unsqueeze(-1).to(w.dtype) if b.ndim else float(b))
        else:
            fresh, usable = self._fresh(b), torch.as_tensor(clear, device=w.device)
            self.v = torch.where(usable.unsqueeze(-1), scaled(w, rest), fresh)
        self.b.append(np.maximum(b, rounding))

    def _fresh(self, b: Array) -> Tensor:
        """A random unit vector orthogonal to the basis; used when w is only rounding error."""
        if not np.isfinite(b).all():
            raise ValueError("a product of this operator is inf or nan; it has no norm there.")
        random = self.basis.without(gaussian(self.J, self.generator))
        return scaled(random, length(random))

    def ritz(self, count: int = 1) -> Array:
        """Roots of the largest eigenvalues of the tridiagonal matrix, descending: (*batch, count).

        There are at most as many as steps.
        """
        top = np.linalg.eigvalsh(self._tridiagonal())[..., : -count - 1 : -1]
        return np.asarray(np.sqrt(np.maximum(top, 0.0)), dtype=np.float64)

    def attained(self, J: Operator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """left = J v / |J v|, right, lower = |J^T left|, computed again, and |J v|."""
        J = J if self.f is None else Scaled(J, self.f)
        y = np.linalg.eigh(self._tridiagonal()).eigenvectors[..., -1]
        v = self.basis.combine(torch.as_tensor(y, device=self.v.device)).to(J.dtype)
        w = J.apply(v[None])[0]
        rayleigh = length(w)
        left = scaled(w, rayleigh)
        w = J.adjoint(left[None])[0]
        lower = length(w)
        right = torch.where(lower.unsqueeze(-1) > 0, scaled(w, lower), v)
        if self.f is None:
            return left, right, lower, rayleigh
        return left, right, lower / self.f.to(lower), rayleigh / self.f.to(lower)

    def singular_values(self, count: int) -> Array:
        """``ritz``, in the units of J."""
        values = self.ritz(count)
        return values if self.f is None else values / _array(self.f)[..., None]

    def closed(self, tol: float, failure: float) -> bool:
        """Whether every upper end is within 1 + tol of its Ritz value."""
        theta = self.ritz()[..., 0]
        near = self._growth((1.0 + tol) * theta) >= self._target(failure)
        return bool((near | (theta == 0.0)).all())  # theta is 0 only for the zero operator

    def christoffel(self, failure: float) -> Array:
        """The root above theta of sum_j p_j(sigma^2)^2 = 1 / c^2, approached from above."""
        root = self._root(failure)
        return root if self.f is None else np.nextafter(root / _array(self.f), np.inf)

    def _root(self, failure: float) -> Array:
        theta = self.ritz()[..., 0]
        if len(self.a) == self.J.domain.size:
            return theta  # nothing is left outside the basis
        target = self._target(failure)
        low, high = np.full_like(theta, -36.0), np.full_like(theta, _WIDEST)
        places, rounds = _GRID if theta.size > 8 else _FINE_GRID
        grid = np.linspace(0.0, 1.0, places).reshape(-1, *(1,) * theta.ndim)
        for _ in range(rounds):
            gap = low + grid * (high - low)  # log of sigma / theta - 1
            below = self._growth((1.0 + np.exp(gap)) * theta) < target
            last = below.sum(0).clip(1, places - 1)[None]
            low, high = (np.take_along_axis(gap, at, 0)[0] for at in (last - 1, last))
        return theta * (1.0 + np.exp(high))

    def _target(self, failure: float) -> Array:
        """log(1 / c), which ``_growth`` reaches at the upper bound."""
        return np.log(self.size) - math.log(failure * math.sqrt(math.pi / 2.0))

    def _growth(self, sigma: Array) -> Array:
        """log sqrt(sum_j p_j(sigma^2)^2), scaled at every step so that nothing overflows."""
        x: Any = sigma**2
        a, b = np.stack(self.a), np.stack(self.b)
        b[b == 0.0] = 1.0  # only for the zero operator
        hypot: Any = np.hypot
        logarithm: Any = np.log
        rows: Any = zip(a, b, strict=True)
        if x.size == 1:  # one operator at one point: Python floats are quicker still
            x, hypot, logarithm = x.item(), math.hypot, math.log
            rows = zip(a.ravel().tolist(), b.ravel().tolist(), strict=True)
        before, p, log, last = 0.0 * x, 1.0 + 0.0 * x, 0.0 * x, 0.0
        for a_j, b_j in rows:
            before, p = p, ((x - a_j) * p - last * before) / b_j
            size = hypot(1.0, p)  # the sum so far is scaled to 1
            before, p, log, last = before / size, p / size, log + logarithm(size), b_j
        return np.asarray(log, dtype=np.float64).reshape(sigma.shape)

    def _tridiagonal(self) -> Array:
        """(*batch, k, k)."""
        k = len(self.a)
        T = np.zeros((*self.a[0].shape, k, k))
        i = np.arange(k)
        T[..., i, i] = np.stack(self.a, -1)
        if k > 1:
            T[..., i[1:], i[:-1]] = np.stack(self.b[:-1], -1)  # the lower triangle is read
        return T


def _array(x: Tensor) -> Array:
    array: Array = x.detach().cpu().numpy()
    return array


def gaussian(J: Operator, generator: torch.Generator | None) -> Tensor:
    """A standard normal vector of the operator's domain: (*batch, n)."""
    device = J.device if generator is None else generator.device
    shape = (*J.batch, J.domain.size)
    return torch.randn(shape, dtype=J.dtype, device=device, generator=generator).to(J.device)


def length(w: Tensor) -> Tensor:
    """|w| in float64: (*batch, n) -> (*batch)."""
    size: Tensor = torch.linalg.vector_norm(w, dim=-1, dtype=torch.float64)
    return size


def scaled(w: Tensor, length: Tensor) -> Tensor:
    """w / length, and 0 where the length is."""
    return w * torch.where(length > 0, 1.0 / length, 0.0).unsqueeze(-1).to(w)
