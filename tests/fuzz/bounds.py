"""Every bound against attained values: extreme scales, clusters, ties, cancellation, both dtypes.

    python -m tests.fuzz.bounds --attempts 1000000

An attack draws a batch of inputs, evaluates a bound in the dtype of the inputs, and compares it
with a value that is attained at the same inputs, computed with other means: the dense Jacobian
written out in extended precision, autograd in float64, or a closed form. ``ratio`` is bound over
attained for an upper bound and attained over bound for a lower one; below 1 by more than the error
of the oracle is a violation. The table has the number of attempts, of violations, and the smallest
ratio of every bound, and results/bounds.json keeps it.

Inputs of attention come from families: plain, of every size, one coordinate 1e-120 to 1e120 times
another (1e-15 to 1e15 in float32), a cluster far from the other tokens, equal tokens, weights of
rank one, values and scores that cancel, saturated rows. tests/sensitivity/test_bounds_attacked.py
runs the same attacks in a small form, and fails when a function that promises a bound has none.
"""

import math
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.harness import record
from fenchel.attention import Causal, Prior, angles
from fenchel.choice import (
    Capped,
    Choice,
    Entmax,
    Sigmoid,
    Softmax,
    Sparsemax,
    hypothesis_test,
    range_over_box,
)
from fenchel.optim.score import score_bounds
from fenchel.sensitivity import (
    Ball,
    Matrix,
    attention_jacobian,
    bounds,
    certify,
    identity,
    self_attention_jacobian,
    spectral_norm,
    token_norm,
)
from fenchel.sensitivity.bounds.feedforward import SLOPES
from fenchel.sensitivity.certificate import token_function
from fenchel.sensitivity.decision import (
    NORMS,
    DecisionBound,
    DecisionNetwork,
    Substitutions,
    certified_radii,
)
from fenchel.sensitivity.layers import (
    _FUNCTIONS,
    ActivationLayer,
    Chain,
    Diagonal,
    ElementwiseAffine,
    GatedLayer,
    LinearLayer,
    NormLayer,
    OutputGate,
    Residual,
    SelfAttention,
    TokenMap,
    rotation_matrices,
    with_dtype,
)
from fenchel.sensitivity.norms import nonnegative
from fenchel.sensitivity.operator import Operator, Scaled
from fenchel.sensitivity.perturbation import NormEstimator, TokenLayer
from fenchel.sensitivity.rounding import frobenius, lengths
from fenchel.sensitivity.substitutions import SubstitutionSearch
from tests.sensitivity import test_decision as decisions
from tests.sensitivity import test_substitutions as counted
from tests.sensitivity.test_module_trace import KNOWN

Array = npt.NDArray[Any]
Wide = np.longdouble
RESULTS = Path(__file__).parent / "results"
DTYPES = (torch.float32, torch.float64)


class Ratios(NamedTuple):
    """Bound over attained of one batch, and the relative error of what was attained."""

    ratio: Tensor
    error: float


Outcome = dict[str, Ratios]


class Draw:
    """Random inputs of one dtype; numbers are drawn in float64 and rounded by the attack."""

    def __init__(self, seed: int, dtype: torch.dtype, count: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.count = dtype, count
        self.eps = torch.finfo(dtype).eps
        self.reach = 15.0 if dtype == torch.float32 else 120.0
        """Exponents of ten between which sizes may lie so that scores remain numbers."""

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator)

    def sizes(self, low: float, high: float, *shape: int) -> Tensor:
        u = torch.rand(*shape, dtype=torch.float64, generator=self.generator)
        return torch.exp((low + (high - low) * u) * math.log(10.0))

    def integer(self, low: int, high: int) -> int:
        """low <= i < high."""
        return int(torch.randint(low, high, (), generator=self.generator))

    def pick(self, options: Any) -> Any:
        return options[self.integer(0, len(options))]

    def rounded(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class Attack(NamedTuple):
    """A way to attack some bounds."""

    names: tuple[str, ...]
    """The functions attacked, as module.qualified name below fenchel."""
    run: Callable[[Draw], Outcome]
    share: float = 1.0
    """Of the attempts; less where an attempt is slow."""
    batch: int = 500


ATTACKS: list[Attack] = []


def attack(
    *names: str, share: float = 1.0, batch: int = 500
) -> Callable[[Callable[[Draw], Outcome]], Callable[[Draw], Outcome]]:
    """Register a function of a Draw as an attack on the functions named."""

    def register(run: Callable[[Draw], Outcome]) -> Callable[[Draw], Outcome]:
        ATTACKS.append(Attack(names, run, share, batch))
        return run

    return register


def upper(
    bound: Tensor, attained: Tensor | Array, error: float = 1e-13, noise: Array | float = 0.0
) -> Ratios:
    """The ratios of an upper bound; ``noise`` is the absolute error of what is attained."""
    top = np.asarray(bound.detach().double().reshape(-1), dtype=Wide)
    low = np.maximum(np.asarray(attained, dtype=Wide).reshape(-1) - noise, 0)
    with np.errstate(all="ignore"):
        ratio = np.where(
            low == 0, np.where(top >= 0, np.inf, -np.inf), top / np.where(low == 0, 1, low)
        )
        ratio = np.where(np.isnan(top), -np.inf, ratio).astype(np.float64)
    return Ratios(torch.from_numpy(ratio), error)


def lower(bound: Tensor, attained: Tensor | Array, error: float = 1e-13) -> Ratios:
    """The ratios of a lower bound."""
    return upper(torch.from_numpy(np.asarray(attained).astype(np.float64)), bound.double(), error)


# Oracles ------------------------------------------------------------------------------------------


def wide(x: Tensor) -> Array:
    return x.detach().double().numpy().astype(Wide)


def norms(J: Array) -> Array:
    """Spectral norms of matrices (B, m, n) of any size: (B,)."""
    size = np.abs(J).max((1, 2), keepdims=True)
    size = np.where(size > 0, size, 1)
    values = torch.linalg.matrix_norm(torch.from_numpy((J / size).astype(np.float64)), 2)
    return values.numpy().astype(Wide) * size[:, 0, 0]


class Pieces(NamedTuple):
    """The Jacobian of self-attention in X as three arrays (B, n, E, n, M)."""

    mixing: Array
    query: Array
    key: Array
    noise: "Noise"

    @property
    def whole(self) -> Array:
        return self.mixing + self.query + self.key


def matrix(J: Array) -> Array:
    """(B, n, E, n, M) -> (B, n E, n M)."""
    return J.reshape(len(J), J.shape[1] * J.shape[2], -1)


def attention_pieces(
    X: Tensor, W: list[Tensor], scale: float, choice: Choice, causal: bool
) -> Pieces:
    """d Att(X), written out in extended precision."""
    x, (W_Q, W_K, W_V) = wide(X), (wide(w)[:, 0] for w in W)
    q, k, v = (np.einsum("bnm,bmd->bnd", x, w) for w in (W_Q, W_K, W_V))
    c = Wide(scale)
    p, s = weights_and_spread(np.einsum("bid,bjd->bij", q, k) * c, choice, causal)
    total = s.sum(-1, keepdims=True)
    share = s / np.where(total > 0, total, 1)
    far, other = (y[:, None] - np.einsum("bij,bjd->bid", share, y)[:, :, None] for y in (v, k))
    n, M = x.shape[1:]
    query = np.zeros((len(x), n, W_V.shape[-1], n, M), dtype=Wide)
    own = c * np.einsum("bij,bije,bijd,bmd->biem", s, far, other, W_Q, optimize=True)
    for i in range(n):
        query[:, i, :, i] = own[:, i]
    key = np.einsum("bij,bije,bim->biejm", s, far, np.einsum("bid,bmd->bim", q, W_K))
    token = np.sqrt((x**2).sum(-1)).max(-1)
    sizes = [np.sqrt((w**2).sum((1, 2))) for w in (W_Q, W_K, W_V)]
    noise = oracle_noise(*(token * size for size in sizes), 2 * token * sizes[0] * sizes[1], c)
    return Pieces(np.einsum("bij,bme->biejm", p, W_V), query, c * key, noise)


class Noise(NamedTuple):
    """What rounding in extended precision can add to a Jacobian of attention: (B,) each."""

    absolute: Array
    """Where differences of values or keys cancel."""
    relative: Array
    """By the weights, whose error is that of a score."""

    def of(self, value: Array) -> Array:
        return self.absolute + self.relative * value


def oracle_noise(q: Array, k: Array, v: Array, moved: Array, scale: Any) -> Noise:
    """For queries, keys and values of these lengths; ``moved`` bounds how far q and k move."""
    eps = 64 * np.finfo(Wide).eps
    return Noise(eps * np.abs(scale) * v * moved, 4 * eps * (1 + np.abs(scale) * q * k))


def weights_and_spread(z: Array, choice: Choice, causal: bool) -> tuple[Array, Array]:
    """p and beta times the spread, by the closed forms of four maps."""
    n = z.shape[-1]
    closed = np.triu(np.ones((n, n), dtype=bool), 1) if causal else np.zeros((n, n), dtype=bool)
    z = np.where(closed, -np.inf, z)
    if isinstance(choice, Sigmoid):
        p = np.where(
            z > 0, 1 / (1 + np.exp(-np.abs(z))), np.exp(-np.abs(z)) / (1 + np.exp(-np.abs(z)))
        )
        return p, p * (1 - p)
    z = z - z.max(-1, keepdims=True)
    if isinstance(choice, Softmax):
        p = np.exp(z)
        p = p / p.sum(-1, keepdims=True)
        return p, p
    alpha = 2.0 if isinstance(choice, Sparsemax) else 1.5
    y = (alpha - 1) * z
    ordered = np.sort(np.where(np.isfinite(y), y, -1e30), -1)[..., ::-1]
    rank = np.arange(1, n + 1, dtype=Wide)
    mean = ordered.cumsum(-1) / rank
    if alpha == 2.0:
        tau = mean - 1 / rank
    else:
        scatter = (ordered**2).cumsum(-1) - rank * mean**2
        tau = mean - np.sqrt(np.maximum(0, (1 - scatter) / rank))
    support = (tau <= ordered).sum(-1, keepdims=True)
    tau = np.take_along_axis(tau, support - 1, -1)
    p = np.maximum(y - tau, 0) ** (1 if alpha == 2.0 else 2)
    return p, (p > 0).astype(Wide) if alpha == 2.0 else np.sqrt(p)


def token_moves(J: Array) -> Array:
    """How far some token moves when none moves by more than 1: (B, n, E, n, M) -> (B,)."""
    best = np.zeros(len(J), dtype=Wide)
    for i in range(J.shape[1]):
        rows = J[:, i]  # (B, E, n, M)
        size = np.abs(rows).max((1, 2, 3), keepdims=True)
        size = np.where(size > 0, size, 1)
        scaled = (rows / size).astype(np.float64)
        u = torch.linalg.svd(torch.from_numpy(scaled).flatten(2)).U[:, :, 0].numpy()
        moved = np.sqrt((np.einsum("be,bejm->bjm", u, scaled) ** 2).sum(-1)).sum(-1)
        best = np.maximum(best, moved * size[:, 0, 0, 0])
    return best


# Attention at a point -----------------------------------------------------------------------------


def attention_inputs(draw: Draw) -> tuple[str, Tensor, list[Tensor], float]:
    """A family, X (B, n, M), [W_Q, W_K, W_V] (B, 1, M, .) and the scale of the scores."""
    B, n, M = draw.count, draw.integer(2, 6), draw.integer(1, 4)
    D, E = draw.integer(1, 4), draw.integer(1, 4)
    family = draw.pick(
        (
            "plain",
            "sizes",
            "scales",
            "cluster",
            "far cluster",
            "ties",
            "rank one",
            "cancel",
            "saturated",
        )
    )
    X, W_Q, W_K, W_V = (draw.normal(B, *shape) for shape in ((n, M), (M, D), (M, D), (M, E)))
    scale = 1.0
    if family == "sizes":
        X = X * draw.sizes(-2, 1.5, B, n, 1)
        W_Q, W_K, W_V = (w * draw.sizes(-1.5, 1.5, B, 1, 1) for w in (W_Q, W_K, W_V))
    elif family == "scales":  # scores stay near 1, everything else is of any size
        a, b, c = (draw.sizes(-draw.reach / 3, draw.reach / 3, B, 1, 1) for _ in range(3))
        X, W_Q, W_K, W_V = X * a, W_Q / (a * b), W_K * b / a, W_V * c
    elif family in ("cluster", "far cluster"):
        delta = draw.sizes(-2, 1, B, 1, 1) * draw.eps**0.5
        X = delta * X
        X[:, -1] = 0.0
        X[:, -1, -1] = -1.0 if family == "cluster" else -1e3
        if M > 1:  # coordinate 0 makes the queries, which all rows share
            X[..., 0] = 1.0
            W_Q, W_K = torch.zeros(2, B, M, D, dtype=torch.float64)
            W_Q[:, 0] = draw.sizes(-1, 1.5, B, D) / delta[:, 0]
            W_K[:, 1:] = draw.normal(B, M - 1, D)
            W_K[:, -1] = 1.0
    elif family == "ties":
        X[:, 1:] = X[:, :1] * draw.pick((1.0, -1.0, 0.0))
        X = X + draw.pick((0.0, 4.0 * draw.eps)) * draw.normal(B, n, M)
    elif family == "rank one":
        W_Q, W_K, W_V = (
            draw.normal(B, M, 1) * draw.normal(B, 1, w.shape[-1]) for w in (W_Q, W_K, W_V)
        )
    elif family == "cancel":  # tokens share a large part that the weights remove
        common = draw.normal(B, 1, M)
        X = X * draw.sizes(-3, 0, B, 1, 1) + common * draw.sizes(0, 4, B, 1, 1)
        unit = common / common.norm(dim=-1, keepdim=True)
        W_Q, W_K, W_V = (w - unit.mT @ (unit @ w) * draw.pick((1.0, 0.0)) for w in (W_Q, W_K, W_V))
    elif family == "saturated":
        scale = float(draw.sizes(0.5, 3.0, 1))
    X, *W = (draw.rounded(x) for x in (X, W_Q[:, None], W_K[:, None], W_V[:, None]))
    return family, X, W, scale


_POINT = "sensitivity.bounds.attention."
_COVARIANCE = "sensitivity.bounds.covariance."


@attack(
    *(_POINT + name for name in ("generic", "yudin", "castin_at", "token_max")),
    *(_POINT + name for name in ("ball", "castin", "token_max_ball")),
    *(_COVARIANCE + name for name in ("covariance", "covariance_terms", "mixing")),
    share=2.0,
    batch=250,
)
def at_a_point(draw: Draw) -> Outcome:
    """Self-attention at a point and on the ball about 0 that holds its tokens."""
    _, X, W, scale = attention_inputs(draw)
    causal, choice = (
        draw.pick((False, False, True)),
        draw.pick((Softmax(),) * 3 + (Entmax(1.5), Sparsemax())),
    )
    prior: Prior | None = Causal() if causal else None
    pieces = attention_pieces(X, W, scale, choice, causal)
    truth, keywords = (
        norms(matrix(pieces.whole)),
        {"scale": scale, "prior": prior, "choice": choice},
    )
    parts = bounds.covariance_terms(X, *W, **keywords)
    moves = token_moves(pieces.whole)
    point = {
        _COVARIANCE + "covariance": bounds.covariance(X, *W, **keywords),
        _COVARIANCE + "covariance cheap": bounds.covariance(X, *W, cheap=True, **keywords),
        _POINT + "yudin": bounds.yudin(X, *W, **keywords),
    }
    if not isinstance(choice, Entmax):
        point[_POINT + "generic"] = bounds.generic(X, *W, **keywords)
    tokens = {_POINT + "token_max": bounds.token_max(X, *W, **keywords)}
    if isinstance(choice, Softmax):
        n, R = X.shape[1], lengths(X.double()).amax(-1, keepdim=True) * (1 + 1e-15)
        point[_POINT + "castin_at"] = bounds.castin_at(X, *W, scale=scale)
        point[_POINT + "ball"] = bounds.ball(*W, n=n, radius=R, scale=scale)
        point[_POINT + "castin"] = bounds.castin(*W, n=n, radius=R, scale=scale)
        tokens[_POINT + "token_max_ball"] = bounds.token_max_ball(*W, radius=R, scale=scale)
    found = {name: _above(bound, truth, pieces.noise) for name, bound in point.items()}
    found |= {name: _above(bound, moves, pieces.noise) for name, bound in tokens.items()}
    for name in ("mixing", "query", "key"):
        alone = norms(matrix(getattr(pieces, name)))
        term = _above(getattr(parts, name), alone, pieces.noise)
        found[f"{_COVARIANCE}covariance_terms {name}"] = term
    return found


def _above(bound: Tensor, attained: Array, noise: Noise) -> Ratios:
    return upper(bound, attained, 1e-13, noise.of(attained))


_JACOBIAN = "sensitivity.attention_jacobian."


@attack(
    _JACOBIAN + "AttentionJacobian.ceiling",
    _JACOBIAN + "SelfAttentionJacobian.ceiling",
    "sensitivity.golub_kahan.spectral_norm",
    _COVARIANCE + "Terms.separate",
    share=0.5,
    batch=100,
)
def attention_operators(draw: Draw) -> Outcome:
    """The ceilings of both Jacobians of attention, and their brackets by Golub and Kahan."""
    family, X, W, scale = attention_inputs(draw)
    pieces = attention_pieces(X, W, scale, Softmax(), causal=False)
    J = self_attention_jacobian(X, *W, each=True, scale=scale)
    truth = norms(matrix(pieces.whole))
    bracket = spectral_norm(J, failure=1e-12, generator=draw.generator)
    q, k, v = (X[:, None] @ w for w in W)
    name = "sensitivity.golub_kahan.spectral_norm attention"
    found = _separate(draw, q, k, v, scale)
    found[_JACOBIAN + "SelfAttentionJacobian.ceiling"] = _above(J.ceiling(), truth, pieces.noise)
    if draw.dtype == torch.float64:
        found[name] = _above(bracket.upper, truth, pieces.noise)
    elif family in ("plain", "sizes", "scales"):  # in float32 products that cancel are rounding
        found[name] = upper(bracket.upper, norms(wide(J.dense()).reshape(len(X), *J.shape)), 1e-5)
    return found


def _separate(draw: Draw, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Outcome:
    """Queries, keys and values as inputs of their own: X is the identity of each in turn."""
    x, y, z = wide(q)[:, 0], wide(k)[:, 0], wide(v)[:, 0]
    p, s = weights_and_spread(np.einsum("bid,bjd->bij", x, y) * Wide(scale), Softmax(), False)
    far, other = (a[:, None] - np.einsum("bij,bjd->bid", p, a)[:, :, None] for a in (z, y))
    B, n, E = z.shape
    wrt = draw.pick(("q", "k", "v", "qk", "qkv"))
    columns = []
    if "q" in wrt:
        J = np.zeros((B, n, E, n, x.shape[-1]), dtype=Wide)
        own = Wide(scale) * np.einsum("bij,bije,bijd->bied", s, far, other)
        for i in range(n):
            J[:, i, :, i] = own[:, i]
        columns.append(matrix(J))
    if "k" in wrt:
        columns.append(matrix(Wide(scale) * np.einsum("bij,bije,bid->biejd", s, far, x)))
    if "v" in wrt:
        columns.append(matrix(np.einsum("bij,ef->biejf", p, np.eye(E, dtype=Wide))))
    truth = norms(np.concatenate(columns, -1))
    ceiling = attention_jacobian(q, k, v, wrt=wrt, each=True, scale=scale).ceiling()
    sizes = [np.sqrt((a**2).sum(-1)).max(-1) for a in (x, y, z)]
    noise = oracle_noise(*sizes, sizes[0] + sizes[1], Wide(scale))
    return {_JACOBIAN + "AttentionJacobian.ceiling": _above(ceiling, truth, noise)}


# Matrices and operators ---------------------------------------------------------------------------


def matrices(draw: Draw, *, nonnegative_entries: bool = False) -> Tensor:
    """(B, m, n) of every size and shape of spectrum."""
    B, m, n = draw.count, draw.integer(1, 7), draw.integer(1, 7)
    A = draw.normal(B, m, n)
    kind = draw.pick(("plain", "rank one", "graded", "crowd", "zero rows"))
    if kind == "rank one":
        A = draw.normal(B, m, 1) * draw.normal(B, 1, n)
    elif kind == "graded":
        A = A * draw.sizes(-8, 8, B, 1, n)
    elif kind == "crowd":
        U, _, V = torch.linalg.svd(A, full_matrices=False)
        A = U * (1.0 + 1e-9 * draw.normal(B, 1, U.shape[-1])) @ V
    elif kind == "zero rows":
        A = A * (draw.normal(B, m, 1) > 0)
    A = A.abs() if nonnegative_entries else A
    span = (-44.0, 37.0) if draw.dtype == torch.float32 else (-310.0, 300.0)
    exponent = span[0] + (span[1] - span[0]) * draw.sizes(-2, 0, B, 1, 1)
    half = torch.exp(0.5 * exponent * math.log(10.0))
    size = 10.0 * A.abs().amax((-2, -1), keepdim=True).clamp(min=1e-300)
    return draw.rounded(A / size * half * half)


@attack(
    "sensitivity.operator.Matrix.ceiling",
    "sensitivity.operator.Product.ceiling",
    "sensitivity.operator.Sum.ceiling",
    "sensitivity.operator.Scaled.ceiling",
    "sensitivity.operator.Transpose.ceiling",
    "sensitivity.operator.Identity.ceiling",
    "sensitivity.layers.TokenMap.ceiling",
    "sensitivity.layers.Diagonal.ceiling",
    "sensitivity.rounding.frobenius",
    "sensitivity.bounds.feedforward.linear",
    share=0.5,
)
def ceilings(draw: Draw) -> Outcome:
    """Linear maps at every scale."""
    A = matrices(draw)
    exact = wide(A)
    truth, J = norms(exact), Matrix(A)
    B = Matrix(A.mT)
    square = norms(np.einsum("bij,bkj->bik", exact, exact))
    found = {
        "sensitivity.operator.Matrix.ceiling": upper(J.ceiling(), truth),
        "sensitivity.operator.Product.ceiling": upper(_known((J @ B).ceiling()), square),
        "sensitivity.operator.Sum.ceiling": upper(_known((J + J).ceiling()), 2 * truth),
        "sensitivity.operator.Scaled.ceiling": upper(_known(Scaled(J, -1.0).ceiling()), truth),
        "sensitivity.operator.Transpose.ceiling": upper(_known(J.T.ceiling()), truth),
        "sensitivity.rounding.frobenius": upper(frobenius(A), truth),
        "sensitivity.bounds.feedforward.linear": upper(bounds.linear(A), truth),
    }
    one = A[0]
    maps: dict[str, tuple[Operator, Any]] = {
        "sensitivity.layers.TokenMap.ceiling": (TokenMap(torch.zeros_like(one), one.mT), truth[:1]),
        "sensitivity.layers.Diagonal.ceiling": (Diagonal(one), np.abs(exact[0]).max()),
        "sensitivity.operator.Identity.ceiling": (identity(one), 1.0),
    }
    for name, (operator, value) in maps.items():
        found[name] = upper(_known(operator.ceiling()), np.asarray(value))
    return found


def _known(ceiling: Tensor | None) -> Tensor:
    assert ceiling is not None
    return ceiling


@attack("sensitivity.golub_kahan.spectral_norm", share=0.5, batch=300)
def brackets(draw: Draw) -> Outcome:
    """Brackets of matrices at every scale, from both sides."""
    A = matrices(draw)
    truth = norms(wide(A))
    bracket = spectral_norm(A, failure=1e-12, generator=draw.generator)
    spacing = 1e-44 if draw.dtype == torch.float32 else 1e-323
    slack = truth * Wide(8 * draw.eps) + Wide(spacing)
    return {
        "sensitivity.golub_kahan.spectral_norm upper": upper(bracket.upper, truth),
        "sensitivity.golub_kahan.spectral_norm lower": lower(
            bracket.lower, np.asarray(truth + slack, dtype=np.float64)
        ),
    }


@attack("sensitivity.norms.nonnegative", "sensitivity.norms.perron")
def nonnegative_matrices(draw: Draw) -> Outcome:
    """Collatz and Wielandt's bound."""
    P = matrices(draw, nonnegative_entries=True)
    return {"sensitivity.norms.nonnegative": upper(nonnegative(P.double()), norms(wide(P)))}


# Layers around attention --------------------------------------------------------------------------


@attack(
    "sensitivity.bounds.feedforward.norm_layer",
    "sensitivity.layers.NormJacobian.ceiling",
    "sensitivity.bounds.attention.normalised_radius",
)
def norm_layers(draw: Draw) -> Outcome:
    """Norm layers on a ball: the worst point is that nearest to the constant token."""
    B, d, kind = draw.count, draw.integer(3, 7), draw.pick(("layer", "rms"))
    x = draw.normal(B, d) * draw.sizes(-6, 3, B, 1) + draw.pick((0.0, 1.0)) * draw.sizes(
        -2, 6, B, 1
    )
    x = draw.rounded(x * draw.sizes(*draw.pick(((0, 0), (-draw.reach, draw.reach))), B, 1))
    eps = float(draw.sizes(-12, -4, 1)) * draw.pick((1.0, 0.0))
    exact = wide(x)
    centred = exact - exact.mean(-1, keepdims=True) if kind == "layer" else exact
    length = np.sqrt((centred**2).sum(-1))
    share = 1.0 - draw.sizes(-14, 0, 1)
    radius = torch.from_numpy(length.astype(np.float64)) * share * draw.pick((0.0, 1.0))
    near = np.maximum(length - wide(radius), 0)
    with np.errstate(divide="ignore"):
        truth = 1 / np.sqrt(near**2 / d + Wide(eps))
    bound = bounds.norm_layer(x, eps=eps, kind=kind, radius=radius)
    gamma, beta = draw.rounded(draw.normal(d)), draw.rounded(draw.normal(d))
    J = NormLayer(gamma, None, eps, kind).jacobian(x[:1])
    at = int(gamma.abs().argmax())
    aligned = torch.zeros_like(beta)
    aligned[at] = beta[at]
    reach = torch.tensor(bounds.normalised_radius(d, gamma, aligned), dtype=torch.float64)
    attained = np.sqrt(Wide(d)) * np.abs(wide(gamma)[at]) + np.abs(wide(aligned)[at])
    finite = np.isfinite(truth)
    return {
        "sensitivity.bounds.feedforward.norm_layer": upper(
            bound[torch.from_numpy(finite)], truth[finite]
        ),
        "sensitivity.layers.NormJacobian.ceiling": upper(
            _known(J.ceiling()), norms(_norm_matrix(exact[:1], wide(gamma), Wide(eps), kind)), 1e-12
        ),
        "sensitivity.bounds.attention.normalised_radius": upper(reach, np.asarray(attained)),
    }


def _norm_matrix(x: Array, gamma: Array, eps: Any, kind: str) -> Array:
    """d (gamma x^), (B, d, d)."""
    d = x.shape[-1]
    P = np.eye(d, dtype=Wide) - (1 / Wide(d) if kind == "layer" else 0)
    y = x @ P
    s = np.sqrt((y**2).mean(-1, keepdims=True) + eps)
    s = np.where(s > 0, s, 1)
    hat = y / s
    inner = P - np.einsum("bi,bj->bij", hat, hat) / d
    return gamma[None, :, None] * inner / s[..., None]


@attack("sensitivity.bounds.feedforward.activation", "sensitivity.bounds.feedforward.slope_range")
def activations(draw: Draw) -> Outcome:
    """Slopes within an interval, by autograd through torch's own functions in float64."""
    name = draw.pick(sorted(SLOPES))
    x = draw.rounded(draw.normal(draw.count) * draw.sizes(-3, 2.5, draw.count))
    radius = draw.sizes(-9, 2, draw.count) * draw.pick((0.0, 1.0))
    share = 2 * torch.rand(draw.count, dtype=torch.float64, generator=draw.generator) - 1
    worst = torch.zeros_like(radius)
    turns = [torch.full_like(radius, turn) for turn in SLOPES[name].turns]
    ends = [x.double() + t * radius for t in (-1.0, 0.0, 1.0, share)]
    for at in (*ends, *turns):
        y = at.clone().requires_grad_()
        (slope,) = torch.autograd.grad(_FUNCTIONS[name](y).sum(), y)
        inside = (at - x.double()).abs() <= radius
        worst = torch.where(inside, torch.maximum(worst, slope.abs()), worst)
    bound = bounds.activation(name, x, radius=radius)
    found = {"sensitivity.bounds.feedforward.activation": upper(bound, worst)}
    if math.isfinite(SLOPES[name].steepest):
        everywhere = bounds.activation(name).expand_as(worst)
        found["sensitivity.bounds.feedforward.activation everywhere"] = upper(
            everywhere, worst, 1e-14
        )
    return found


@attack("sensitivity.bounds.attention.l2_attention", share=0.25, batch=200)
def distance_attention(draw: Draw) -> Outcome:
    """Attention by distances, its Jacobian by autograd."""
    B, n, M, D = draw.count, draw.integer(1, 5), draw.integer(1, 4), draw.integer(1, 3)
    size = float(draw.sizes(-draw.reach / 3, draw.reach / 3, 1))
    W_Q, W_V = (draw.rounded(x) for x in (size * draw.normal(M, D), draw.normal(M, M)))
    X = draw.rounded(draw.normal(B, n, M) * draw.sizes(-1.5, 1.0, B, 1, 1) / size)
    Q, V = W_Q.double(), W_V.double()
    J = batched_jacobian(lambda Y: bounds.distance_attention(Y, Q, V), X.double())
    bound = bounds.l2_attention(W_Q, W_V, n=n).expand(B)
    return {"sensitivity.bounds.attention.l2_attention": upper(bound, norms(wide(J)), 1e-9)}


def batched_jacobian(f: Callable[[Tensor], Tensor], X: Tensor) -> Tensor:
    """J of f at every X[b], f acting on each b alone: (B, n, M) -> (B, n M', n M)."""
    Y = X.detach().clone().requires_grad_()
    out = f(Y).flatten(1)
    rows = [
        torch.autograd.grad(out[:, i].sum(), Y, retain_graph=True)[0].flatten(1)
        for i in range(out.shape[1])
    ]
    return torch.stack(rows, 1)


# Layers over balls --------------------------------------------------------------------------------


def token_layers(draw: Draw, n: int, M: int) -> tuple[str, TokenLayer]:
    """One layer of a random kind, weights of many sizes, in the dtype of the draw."""

    def normal(*shape: int) -> Tensor:
        return draw.rounded(draw.normal(*shape) * size)

    size = float(draw.sizes(-1.0, 0.5, 1))

    def attention(width: int = M, *, qk_norm: bool = False, sink: bool = False) -> SelfAttention:
        H, G, D = draw.pick(((1, 1, 2), (2, 2, 2), (4, 2, 2)))
        positions = angles(torch.arange(n), D, dtype=draw.dtype)
        return SelfAttention(
            normal(H, M, D),
            normal(G, M, D),
            normal(G, M, D),
            normal(H * D, width),
            choice=draw.pick((Softmax(), Softmax(), Softmax(2.0), Entmax(1.5), Sparsemax())),
            prior=draw.pick((None, Causal())),
            biases=draw.pick(((None, None, None), (normal(H, D), normal(G, D), normal(G, D)))),
            rotations=draw.pick((None, rotation_matrices(positions, D))),
            qk_norm=(norm(D), norm(D)) if qk_norm else None,
            sink=draw.rounded(draw.normal(H) * draw.pick((1.0, 10.0))) if sink else None,
        )

    def gated_attention() -> Chain:
        inner = replace(attention(sink=draw.pick((True, False))), W_O=None)
        H, D = inner.W_Q.shape[0], inner.W_Q.shape[2]
        W = draw.pick((normal(M, H * D), normal(M, H).repeat_interleave(D, -1)))
        bias = draw.pick((None, normal(H * D)))
        gate = OutputGate(inner, W, draw.pick(("sigmoid", "softplus")), bias)
        return Chain((gate, LinearLayer(normal(H * D, M))))

    def norm(width: int = M) -> NormLayer:
        eps = draw.pick((1e-5, 1e-6, None))
        kind = "rms" if eps is None else draw.pick(("layer", "rms"))
        return NormLayer(draw.pick((None, normal(width))), None, eps, kind)

    def gated() -> GatedLayer:
        return GatedLayer(normal(M, 4), normal(M, 4), draw.pick(("silu", "gelu", "gelu_tanh")))

    def mlp() -> Chain:
        name = draw.pick(("gelu", "relu", "silu"))
        plain = (LinearLayer(normal(M, 4)), ActivationLayer(name), LinearLayer(normal(4, M)))
        return Chain(draw.pick((plain, (gated(), LinearLayer(normal(4, M))))))

    def block() -> Chain:
        first = Chain((norm(), attention(qk_norm=draw.pick((False, False, True)))))
        if draw.pick((True, False, False)):
            return Chain((Residual(first, (Chain((norm(), mlp())),), draw.pick((1.0, 0.5))),))
        return Chain((Residual(first), Residual(Chain((norm(), mlp())))))

    def cancelling() -> Chain:
        """Terms that cancel before a layer with a kink or a large gain."""
        b = normal(M)
        shift = ElementwiseAffine(None, draw.rounded(-b.double() * (1.0 + draw.eps)))
        behind = draw.pick((norm(), ActivationLayer("relu"), gated(), attention()))
        near_zero = ElementwiseAffine(
            draw.rounded(torch.tensor(draw.eps * float(draw.sizes(-2, 2, 1))))
        )
        return Chain((near_zero, LinearLayer(normal(M, M), b), shift, behind))

    kinds: dict[str, Callable[[], TokenLayer]] = {
        "SelfAttention": attention,
        "SelfAttention qk_norm": lambda: attention(qk_norm=True),
        "SelfAttention sink": lambda: attention(sink=True),
        "SelfAttention sink, qk_norm": lambda: attention(sink=True, qk_norm=True),
        "OutputGate": lambda: gated_attention().layers[0],
        "Chain gated attention": gated_attention,
        "NormLayer": norm,
        "LinearLayer": lambda: LinearLayer(normal(M, 3), normal(3)),
        "ActivationLayer": lambda: ActivationLayer(draw.pick(sorted(SLOPES))),
        "GatedLayer": gated,
        "ElementwiseAffine": lambda: ElementwiseAffine(
            draw.pick((normal(M), normal(n, M), normal(1)[0])), draw.pick((None, normal(M)))
        ),
        "Residual": lambda: Residual(
            attention(), (), draw.pick((1.0, 0.3)), draw.pick((1.0, 0.0, -0.5))
        ),
        "Chain cancelling": cancelling,
        "Chain mlp": mlp,
        "Chain block": block,
    }
    kind = draw.pick(sorted(kinds))
    return kind, kinds[kind]()


def in_double(value: Any) -> Any:
    """A layer with the same numbers in float64: the function whose Jacobian is attained."""
    if isinstance(value, Tensor):
        return value.double()
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(in_double(part) for part in value)
    if isinstance(value, NormLayer) and value.eps is None:
        raise AssertionError("resolve eps first")
    if is_dataclass(value) and isinstance(value, TokenLayer):
        parts = {f.name: in_double(getattr(value, f.name)) for f in fields(value)}
        return replace(value, **parts)  # type: ignore[type-var]
    return value


def with_eps(value: Any, eps: float) -> Any:
    """A layer whose norm layers name the eps that their dtype implies."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(with_eps(part, eps) for part in value)
    if is_dataclass(value) and isinstance(value, TokenLayer):
        parts = {f.name: with_eps(getattr(value, f.name), eps) for f in fields(value)}
        if isinstance(value, NormLayer) and value.eps is None:
            parts["eps"] = eps
        return replace(value, **parts)  # type: ignore[type-var]
    return value


_LAYER = "sensitivity.layers."


@attack(
    *(
        f"{_LAYER}{name}.ball_bound"
        for name in (
            "SelfAttention",
            "NormLayer",
            "LinearLayer",
            "ActivationLayer",
            "GatedLayer",
            "OutputGate",
            "ElementwiseAffine",
            "Residual",
            "Chain",
        )
    ),
    _LAYER + "SelfAttention.head_bounds",
    _LAYER + "NormLayer.gain",
    "sensitivity.attention_ball.head_bounds",
    "sensitivity.perturbation.NormEstimator.upper_norm",
    "sensitivity.perturbation.NormEstimator.from_centre",
    "sensitivity.perturbation.BallBound.after",
    "sensitivity.perturbation.BallBound.plus",
    "sensitivity.perturbation.BallBound.carry",
    share=4.0,
    batch=100,
)
def over_a_ball(draw: Draw) -> Outcome:
    """One layer and ball, many points of it: |J'|, |J' - J| and the gain in the token norm."""
    n, M = draw.integer(2, 5), draw.integer(2, 5)
    kind, layer = token_layers(draw, n, M)
    size = float(draw.sizes(-2, 1, 1))
    X = draw.rounded(draw.normal(n, M) * size + draw.pick((0.0, 3.0 * size)))
    norm = draw.pick(("fro", "token"))
    longest = float(X.double().norm(dim=-1).amax())
    ball = Ball.of(float(draw.sizes(-6, 0.3, 1)) * longest, norm, n)
    bound = layer.ball_bound(X, ball, NormEstimator(0.0))
    exact: TokenLayer = in_double(with_eps(layer, draw.eps))
    points = torch.cat((X.double()[None], X.double() + moves_in(ball, X.double(), draw)))
    J = batched_jacobian(exact, points)
    values = norms(wide(J))
    rounding = 1e-12 * float(values.max())
    away = norms(wide(J - J[:1]))[1:]
    blocks = wide(J).reshape(len(J), n, -1, n, M)
    name = (
        f"{_LAYER}{kind.split()[0]}.ball_bound{' ' + kind.partition(' ')[2] if ' ' in kind else ''}"
    )
    # Where values cancel, autograd in float64 is off by rounding of the largest of them.
    clear = away > 1e3 * rounding
    count = torch.ones(len(points), dtype=torch.float64)
    found = {
        f"{name} upper": upper(bound.upper * count, values, 1e-11),
        f"{name} token": upper(bound.token * count, token_moves(blocks), 1e-11),
    }
    if clear.any():
        found[f"{name} variation"] = upper(
            bound.variation * count[1:][torch.from_numpy(clear)], away[clear], 2e-3
        )
    return found


def moves_in(ball: Ball, X: Tensor, draw: Draw) -> Tensor:
    """Moves to the boundary of a ball: random, on one token, towards 0 and the mean: (B, n, M)."""
    n = len(X)
    moves = draw.normal(draw.count, *X.shape)
    third = draw.count // 3
    moves[:third] *= (torch.arange(n) == torch.arange(third)[:, None] % n).unsqueeze(-1)
    moves[third] = -X
    moves[third + 1] = X.mean(0) - X
    moves[third + 2] = X.mean(1, keepdim=True) - X
    moves[third + 3 : 2 * third] = moves[third + 3 : 2 * third].sign()
    share = draw.sizes(-1, 0, draw.count).clamp(max=1.0)
    share[::2] = 1.0
    whole = [ball.within(1e9 * ball.total * move / move.norm().clamp(min=1e-30)) for move in moves]
    return torch.stack(whole) * share.view(-1, 1, 1) * (1.0 - 1e-15)


@attack("sensitivity.certificate.certify", "sensitivity.norms.token_norm", share=0.05, batch=20)
def certificates(draw: Draw) -> Outcome:
    """Both ends of a certificate, and of the norm token by token."""
    n, M = 3, 3
    _, layer = token_layers(draw, n, M)
    layer = with_eps(layer, draw.eps)
    X = draw.rounded(draw.normal(n, M))
    radius = float(draw.sizes(-4, -0.5, 1))
    certificate = certify(layer, X, radius, steps=3, restarts=0, generator=draw.generator)
    ball = Ball.of(radius, "fro", n)
    points = X.double() + moves_in(ball, X.double(), draw)
    J = batched_jacobian(in_double(layer), points)
    count = torch.ones(len(points), dtype=torch.float64)
    bracket = token_norm(layer.jacobian(X), generator=draw.generator)
    here = wide(batched_jacobian(in_double(layer), X.double()[None])).reshape(1, n, -1, n, M)
    error = 1e-10 if draw.dtype == torch.float64 else 1e-4
    return {
        "sensitivity.certificate.certify": upper(certificate.upper * count, norms(wide(J)), error),
        "sensitivity.norms.token_norm": upper(bracket.upper, token_moves(here), error),
    }


@attack("sensitivity.certificate.certify", share=4.0, batch=40)
def modules_of_users(draw: Draw) -> Outcome:
    """Torch modules with their own forward, hooks, parametrisations; refused, or both ends hold."""
    name = draw.pick(sorted(KNOWN))
    torch.manual_seed(draw.integer(0, 1 << 30))
    module = KNOWN[name]().to(draw.dtype).eval()
    size = float(draw.sizes(-0.5, 0.5, 1))
    with torch.no_grad():
        for part in module.parameters():
            part.mul_(size)
    X = draw.rounded(draw.normal(5, 8) * draw.sizes(-1.0, 1.0, 1))
    radius = float(draw.sizes(-6, -0.3, 1)) * float(X.norm())
    norm = draw.pick(("fro", "token"))
    try:
        found = certify(module, X, radius, norm, steps=2, restarts=0, generator=draw.generator)
    except ValueError as error:
        if "no upper bound is known" not in str(error):
            raise
        return {}
    call, _ = token_function(module.double(), X.double())
    ball = Ball.of(radius, norm, len(X))
    points = torch.cat((X.double()[None], X.double() + moves_in(ball, X.double(), draw)))
    J = torch.stack([dense_jacobian(call, Y) for Y in (*points, found.witness.double())])
    values = norms(wide(J))
    count = torch.ones(len(values), dtype=torch.float64)
    error = 1e-9 if draw.dtype == torch.float64 else 1e-5  # parametrisations are rounded by torch
    at = torch.tensor([found.lower], dtype=torch.float64)
    return {
        f"sensitivity.certificate.certify {name} upper": upper(found.upper * count, values, error),
        f"sensitivity.certificate.certify {name} lower": lower(at, values[-1:], error),
    }


def dense_jacobian(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """(n M', n M), by reverse mode."""
    J: Tensor = torch.autograd.functional.jacobian(f, x)  # type: ignore[no-untyped-call]
    return J.reshape(-1, x.numel())


# Choice maps --------------------------------------------------------------------------------------


def distributions(draw: Draw) -> Tensor:
    """Weights (B, K): ties, saturated rows, tiny weights."""
    B, K = draw.count, draw.integer(2, 9)
    kind = draw.pick(("plain", "saturated", "top tie", "all equal", "near tie"))
    z = draw.normal(B, K) * draw.sizes(-1, 1, B, 1)
    if kind == "saturated":
        z = z * draw.sizes(0, 2, B, 1)
    elif kind in ("top tie", "near tie"):
        z[:, 0] = z.amax(-1) + 1.0
        z[:, 1] = z[:, 0] * (1.0 + (0.0 if kind == "top tie" else 1.0) * draw.eps * draw.normal(B))
    elif kind == "all equal":
        z = z * 0.0
    return draw.rounded(torch.softmax(z, -1))


def largest_eigenvalues(s: Array) -> Array:
    """Of diag(s) - s s^T / sum(s), entry by entry without cancellation: (B, K) -> (B,)."""
    total = s.sum(-1, keepdims=True)
    J = -s[:, :, None] * s[:, None] / total[..., None]
    K = s.shape[-1]
    rest = np.stack([np.delete(s, i, -1).sum(-1) for i in range(K)], -1)
    J[:, np.arange(K), np.arange(K)] = s * (rest / total)
    return norms(J)


@attack(
    "sensitivity.bounds.attention.row",
    "choice.base.Choice.sensitivity",
    "choice.base.Choice.sensitivity_bounds",
    "choice.secular.largest_eigenvalue",
    "choice.secular.eigenvalue_bounds",
)
def rows(draw: Draw) -> Outcome:
    """The sensitivity of a row of weights: its closed bound, and the value from both sides."""
    p = distributions(draw)
    choice = draw.pick((Softmax(), Softmax(2.5), Sparsemax(), Entmax(1.5), Sigmoid(1.5)))
    s = wide(p)
    if isinstance(choice, Sigmoid):
        s = s * (1 - s)
    elif isinstance(choice, Sparsemax):
        s = (s > 0).astype(Wide)
    elif isinstance(choice, Entmax):
        s = np.sqrt(s)
    s = s * Wide(choice.beta)
    truth = s.max(-1) if choice.feasible == "box" else largest_eigenvalues(s)
    exact, (low, high) = choice.sensitivity(p).double(), choice.sensitivity_bounds(p)
    near, least = 64 * draw.eps, torch.finfo(p.dtype).smallest_normal * draw.eps
    return {
        "sensitivity.bounds.attention.row": upper(bounds.row(choice, p), truth, 4 * draw.eps),
        # below the normal numbers of the dtype, rounding is absolute
        "choice.base.Choice.sensitivity, above": upper(exact + least, truth, near),
        "choice.base.Choice.sensitivity, below": lower(exact - least, truth, near),
        "choice.base.Choice.sensitivity_bounds, above": upper(high, truth),
        "choice.base.Choice.sensitivity_bounds, below": lower(low, truth),
    }


@attack(
    *(
        f"choice.{name}.lipschitz"
        for name in (
            "base.Choice",
            "softmax.Softmax",
            "entmax.Entmax",
            "entmax.Sparsemax",
            "capped.Capped",
            "sigmoid.Sigmoid",
        )
    ),
    "choice.capped.Capped.ceiling",
)
def constants(draw: Draw) -> Outcome:
    """The Lipschitz constants of the maps, against the sensitivity at many weights."""
    p = distributions(draw)
    K, s = p.shape[-1], wide(p)
    found = {}
    for name, choice, spread in (
        ("softmax.Softmax", Softmax(3.0), s),
        ("entmax.Entmax", Entmax(1.5), np.sqrt(s)),
        ("entmax.Sparsemax", Sparsemax(), (s > 0).astype(Wide)),
        ("capped.Capped", Capped(0.4), np.where(s < 0.4, s, 0)),
        ("sigmoid.Sigmoid", Sigmoid(3.0), s * (1 - s)),
    ):
        if name == "capped.Capped":
            z = draw.rounded(draw.normal(*p.shape) * draw.sizes(-1, 2, len(p), 1))
            weights = choice.weights(z)
            held = np.minimum(wide(weights), Wide(0.4))
            spread = np.where(held < 0.4, held, 0)
            ceiling = torch.full((len(p),), choice.ceiling, dtype=torch.float64)
            if K * 0.4 >= 1.0:
                found["choice.capped.Capped.ceiling"] = upper(
                    ceiling, weights.amax(-1), 4 * draw.eps
                )
        positive = spread.sum(-1) > 0
        if not positive.any():
            continue
        box = choice.feasible == "box"
        largest = spread[positive].max(-1) if box else largest_eigenvalues(spread[positive])
        attained = float(choice.score_scale) * largest
        constant = torch.full(
            (int(positive.sum()),), float(choice.lipschitz(K)), dtype=torch.float64
        )
        found[f"choice.{name}.lipschitz"] = upper(constant, attained, 8 * draw.eps)
    return found


@attack("choice.box_range.range_over_box")
def ranges(draw: Draw) -> Outcome:
    """<c, weights(z)> over boxes of every size, at vertices and inside edges of the path."""
    B, K = draw.count, draw.integer(1, 7)
    choice = draw.pick((Softmax(), Entmax(1.5), Sparsemax(), Sigmoid()))
    c = draw.rounded(draw.normal(B, K).abs() * draw.sizes(-3, 3, B, 1 if K < 3 else K))
    middle = draw.normal(B, K) * draw.sizes(-2, 1.5, B, 1) + draw.pick((0.0, 30.0))
    middle = middle if draw.pick((True, True, False)) else middle[:, :1].expand(B, K)
    reach = draw.normal(B, K).abs() * draw.sizes(-6, 1, B, 1)
    low, high = draw.rounded(middle - reach), draw.rounded(middle + reach)
    least, most = range_over_box(choice, c, low, high)
    value, left, right = wide(c), wide(low), wide(high)
    rank = value.argsort(-1).argsort(-1)
    down, up = np.full(B, np.inf, dtype=Wide), np.full(B, -np.inf, dtype=Wide)
    for order in (rank, K - 1 - rank):
        for k in range(K):
            for share in (0.0, 1.0, *draw.sizes(-2, 0, 3).tolist()):
                at = np.where(order < k, 1, np.where(order == k, Wide(share), 0))
                z = left + at * (right - left)
                p = weights_and_spread(z[:, None], choice, causal=False)[0][:, 0]
                reached = (p * value).sum(-1)
                down, up = np.minimum(down, reached), np.maximum(up, reached)
    name = "choice.box_range.range_over_box"
    return {f"{name}, above": upper(most, up, 1e-15), f"{name}, below": lower(least, down, 1e-15)}


_TEST = "choice.hypothesis_test."


@attack(
    *(_TEST + name for name in ("divergence_upper", "total_variation_upper", "pinsker_upper")),
    "sensitivity.bounds.attention.entropy",
)
def divergences(draw: Draw) -> Outcome:
    """Bounds on the divergence from the prior, and the least entropy of scores of one length."""
    B, K = draw.count, draw.integer(2, 7)
    z = draw.rounded(draw.normal(B, K) * draw.sizes(-6, 0.7, B, 1) + draw.pick((0.0, 3.0)))
    exact = wide(z)
    p = np.exp(exact - exact.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    q = np.exp(np.log(p))
    divergence = np.maximum((p * (np.log(q) + np.log(Wide(K)))).sum(-1), 0)
    variation = 0.5 * np.abs(p - 1 / Wide(K)).sum(-1)
    near = 1e-9  # the divergence of nearly equal scores is a difference, in extended precision too
    clear = divergence > 1e-8
    top = torch.from_numpy(clear)
    given = torch.from_numpy(divergence.astype(np.float64)).to(draw.dtype)
    given = torch.nextafter(given, torch.full_like(given, torch.inf))
    size = float(draw.sizes(-2, 2, 1))
    scores = np.full(K, -1 / Wide(K - 1))
    scores[0] = 1
    scores = scores * Wide(size) * np.sqrt(Wide(K - 1) / K)
    law = np.exp(scores - scores.max())
    rest, total = law[1:].sum(), law.sum()
    # -log p = log(total) - z, and the total of a saturated row differs from 1 by rest alone
    entropy = np.log1p(rest) - (law * (scores - scores.max())).sum() / total
    found = {
        _TEST + "total_variation_upper": upper(
            hypothesis_test.total_variation_upper(z, 1.0)[top], variation[clear], near
        ),
        _TEST + "divergence_upper": upper(
            hypothesis_test.divergence_upper(z, 1.0)[top], divergence[clear], near
        ),
        _TEST + "pinsker_upper": upper(
            hypothesis_test.pinsker_upper(given)[top], variation[clear], near
        ),
        "sensitivity.bounds.attention.entropy": lower(
            torch.tensor(bounds.entropy(K, size), dtype=torch.float64), np.asarray(entropy)
        ),
    }
    return {name: ratios for name, ratios in found.items() if len(ratios.ratio)}


# Score space --------------------------------------------------------------------------------------


_SCORE = "optim.score.score_bounds."


@attack(
    *(
        _SCORE + n
        for n in ("efficiency_lower", "remainder_upper", "gamma_bounds", "decrease_lower")
    ),
    share=0.25,
    batch=50,
)
def score_descent(draw: Draw) -> Outcome:
    """Gradients between singular vectors, moves along the least one, for one X of any condition."""
    n, d, k = draw.integer(3, 8), draw.integer(2, 5), draw.integer(1, 3)
    U, _, V = torch.linalg.svd(draw.normal(n, d), full_matrices=False)
    spectrum = draw.sizes(-9.0 * float(draw.sizes(-2, 0, 1)), 0, U.shape[-1])
    size = float(draw.sizes(-draw.reach / 4, draw.reach / 4, 1))
    X = draw.rounded(size * U * spectrum @ V)
    W_Q, W_K = draw.rounded(draw.normal(d, k)), draw.rounded(draw.normal(d, k))
    x, w_q, w_k = wide(X), wide(W_Q), wide(W_K)
    Q, K = x @ w_q, x @ w_k
    J = np.concatenate(
        (
            np.einsum("ia,jb->ijab", x, K).reshape(n * n, -1),
            np.einsum("ib,ja->ijab", Q, x).reshape(n * n, -1),
        ),
        -1,
    )
    unit = np.abs(J).max()
    left, s, right = torch.linalg.svd(torch.from_numpy((J / unit).astype(np.float64)))
    rank = min(score_bounds.reachable_rank(X.double(), W_Q.double(), W_K.double()), len(s))
    share = draw.sizes(-6, 0, draw.count).numpy().astype(Wide)[:, None]
    G = wide(left[:, 0])[None] * share + wide(left[:, rank - 1])[None] * np.sqrt(1 - share**2)
    back = G @ J
    moved = back @ J.T
    length = np.sqrt((moved**2).sum(-1))
    attained = (G * moved).sum(-1) / np.where(length > 0, length, 1)
    efficiency = torch.tensor(score_bounds.efficiency_lower(X, W_Q, W_K), dtype=torch.float64)
    clear = bool(s[rank - 1] > 1e-13 * s[0])  # else the vectors of the oracle are rounding
    dW = wide(right[rank - 1])[None] * np.sqrt(1 - share**2) + wide(right[0])[None] * share
    dQ, dK = dW[:, : d * k].reshape(-1, d, k), dW[:, d * k :].reshape(-1, d, k)
    remainder = np.einsum("nd,bdk,bek,me->bnm", x, dQ, dK, x, optimize=True)
    remainder = np.sqrt((remainder**2).sum((1, 2)))
    gamma = np.sqrt(((dW @ J.T) ** 2).sum(-1))
    tops = torch.tensor(
        [score_bounds.remainder_upper(X, W_Q, W_K, float(g)) for g in gamma], dtype=torch.float64
    )
    tau = score_bounds.gamma_bounds(X, W_Q, W_K, torch.ones(n, n), smoothness=1.0, tau=0.1).bilinear
    # |R| grows with the square of the move, so that along dW it is 0.1 gamma at this length.
    share_of = 0.1 * gamma * gamma / np.where(remainder > 0, remainder, 1)
    slope, smooth, step = (float(draw.sizes(-3, 3, 1)) for _ in range(3))
    fall = Wide(step) * Wide(slope) - Wide(0.5) * Wide(smooth) * Wide(step) ** 2
    margin = fall - Wide(score_bounds.decrease_lower(slope, smooth, step))
    found = {
        _SCORE + "decrease_lower": Ratios(torch.tensor([1.0 + float(margin / abs(fall))]), 0.0)
    }
    if clear:
        found |= {
            _SCORE + "efficiency_lower": lower(efficiency.expand(draw.count), attained, 1e-6),
            _SCORE + "remainder_upper": upper(tops, remainder, 1e-6),
            _SCORE + "gamma_bounds": lower(
                torch.full((draw.count,), tau, dtype=torch.float64),
                share_of.astype(np.float64),
                1e-6,
            ),
        }
    return found


# Decisions ----------------------------------------------------------------------------------------


_DECISION = "sensitivity.decision."


@attack(
    *(_DECISION + name for name in ("DecisionBound.remainders", "DecisionBound.margin")),
    _DECISION + "certified_radii",
    share=0.25,
    batch=24,
)
def decision_margins(draw: Draw) -> Outcome:
    """Remainders of stages, margins at points of a ball, and the decision within its radius."""
    kind, norm = draw.pick(decisions.KINDS), draw.pick(NORMS)
    n = draw.integer(1, 4)
    net, X = decisions.network(
        kind,
        draw.integer(0, 1 << 30),
        n=n,
        blocks=draw.integer(1, 2),
        sharp=float(draw.sizes(-1, 1, 1)),
    )
    stages, last, head = (
        with_dtype(with_dtype(part, draw.dtype), torch.float64)
        for part in (net.stages, net.norm, net.head)
    )
    net = DecisionNetwork(stages, last, head)
    X = draw.rounded(X * float(draw.sizes(-1, 1.5, 1))).double()
    bound, J, t = DecisionBound(net, X), decisions.jacobians(net, X), n - 1
    radius = certified_radii(bound, norm, [t])[t].certified
    r = max(radius, 1e-9) * draw.pick((0.03, 0.5, 1.0))
    found = bound.remainders(bound.ball(norm, t), r)
    low = bound.margin(t, bound.gradients_at(t, norm, t), found, r).lower
    eta = torch.stack([one.sum(0) for one in found.etas])
    logits = net(X)[t]
    top, size = int(logits.argmax()), float(logits.abs().amax())
    errors, margins, reached = [], [], 0.0
    for at, move in enumerate(decisions.points(net, X, norm, r * (1.0 - 1e-12), t)):
        if at >= draw.count:
            break
        vectors = decisions.remainders(net, X, J, move)
        errors.append(vectors.norm(dim=-1))
        for s, shape in enumerate(found.shapes):
            for S, m in zip(shape.S, shape.tokens.tolist(), strict=True):
                if float(errors[-1][s, m]) > 1e7 * 1e-13 * (1.0 + float(X.norm())):
                    reached = max(reached, decisions.outside(S, vectors[s, m]))
        logits = net(X + move)[t]
        others = torch.cat((logits[:top], logits[top + 1 :]))
        margins.append(float(logits[top] - others.amax()))
    noise = 1e-13 * (1.0 + float(X.norm()))  # of the differences of streams
    attained = torch.stack(errors).amax(0).flatten()
    # a margin may be 0 or less, so that both are moved by the size of the logits
    least = torch.tensor([min(margins) + 4.0 * size])
    lower_end = torch.tensor([max(low, -2.0 * size) + 4.0 * size])
    outcome = {
        f"{_DECISION}DecisionBound.remainders": upper(eta.flatten(), attained, noise=noise),
        f"{_DECISION}DecisionBound.margin": lower(lower_end, least, 1e-13),
    }
    if reached > 0.0:
        inside = torch.tensor([1.0 / reached], dtype=torch.float64)
        outcome[f"{_DECISION}DecisionBound.remainders"] = Ratios(
            torch.cat((outcome[f"{_DECISION}DecisionBound.remainders"].ratio, inside)), 1e-9
        )
    if radius > 0.0 and r <= radius:
        stays = torch.tensor([1.0 if min(margins) >= -1e-13 * size else 0.0])
        outcome[f"{_DECISION}certified_radii"] = Ratios(stays, 1e-9)
    return outcome


@attack(
    *(_DECISION + name for name in ("DecisionBound.remainders", "DecisionBound.margin")),
    "sensitivity.substitutions.SubstitutionSearch.bound",
    share=0.25,
    batch=24,
)
def substitutions(draw: Draw) -> Outcome:
    """The same for finite sets of moves, and counts of substitutions, at every allowed text."""
    n = draw.integer(1, 5)
    net, X = decisions.network(
        draw.pick(decisions.KINDS),
        draw.integer(0, 1 << 30),
        n=n,
        blocks=draw.integer(1, 3),
        sharp=float(draw.sizes(-1, 1, 1)),
    )
    X = draw.rounded(X * float(draw.sizes(-1, 1.5, 1))).double()
    size, alike = float(draw.sizes(-4, 0, 1)) * float(X.norm(dim=-1).mean()), draw.integer(0, 2)
    rows = {}
    for m in range(n):
        far = draw.normal(draw.integer(0, 3), X.shape[1])
        far = far if not alike else far[:1] * draw.normal(len(far), 1)  # along one line
        rows[m] = draw.rounded(X[m] + size * far).double()
    most, t = draw.integer(1, n + 1), n - 1
    texts = counted.texts(X, rows, most)
    true = math.inf
    kept = net(X)[t].topk(1).indices
    search = SubstitutionSearch(net, X, rows, {t: kept}, most)
    certified = search.bound().get(t, 0)
    bound, J = DecisionBound(net, X), decisions.jacobians(net, X)
    allowed = Substitutions({m: row - X[m] for m, row in rows.items()}, most)
    found = bound.remainders(bound.substitution_ball(allowed), 1.0)
    low = bound.margin(t, bound.gradients_at(t, "all", None, allowed), found, 1.0).lower
    top, scale = int(kept), float(net(X)[t].abs().amax())
    errors, margins, reached = [], [], 0.0
    noise = 1e-13 * (1.0 + float(X.norm()))  # of the differences of streams
    for changed, Y in texts:
        logits = net(Y)[t]
        scale = max(scale, float(logits.abs().amax()))
        margins.append(float(logits[top] - torch.cat((logits[:top], logits[top + 1 :])).amax()))
        if margins[-1] < -1e-13 * scale:
            true = min(true, len(changed))
        if found.n < n:
            continue
        vectors = decisions.remainders(net, X, J, Y - X)
        errors.append(vectors.norm(dim=-1))
        for s, shape in enumerate(found.shapes):
            for S, m in zip(shape.S, shape.tokens.tolist(), strict=True):
                if float(errors[-1][s, m]) > 1e7 * noise:
                    reached = max(reached, decisions.outside(S, vectors[s, m]))
    least = torch.tensor([min(margins) + 4.0 * scale])
    lower_end = torch.tensor([max(low, -2.0 * scale) + 4.0 * scale])
    counts = torch.tensor([1.0 if certified < true else 0.0])
    outcome = {
        f"{_DECISION}DecisionBound.margin": lower(lower_end, least, 1e-13),
        "sensitivity.substitutions.SubstitutionSearch.bound": Ratios(counts, 1e-9),
    }
    if errors:
        eta = torch.stack([one.sum(0) for one in found.etas]).flatten()
        attained = torch.stack(errors).amax(0).flatten()
        ratios = upper(eta, attained, noise=noise)
        inside = torch.tensor([1.0 / reached if reached else math.inf], dtype=torch.float64)
        ratios = Ratios(torch.cat((ratios.ratio, inside)), 1e-9)
        outcome[f"{_DECISION}DecisionBound.remainders"] = ratios
    return outcome


# The run ------------------------------------------------------------------------------------------


class Tally:
    """Attempts, violations and the smallest ratio of every bound."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], dict[str, Any]] = {}

    def add(self, outcome: Outcome, dtype: torch.dtype, seed: int) -> None:
        for name, (ratio, error) in outcome.items():
            kind = str(dtype).removeprefix("torch.")
            row = self.rows.setdefault(
                (name, kind),
                {"bound": name, "dtype": kind, "attempts": 0, "violations": 0, "least": math.inf},
            )
            row["attempts"] += len(ratio)
            wrong = int((ratio < 1.0 - error).sum())
            row["violations"] += wrong
            if wrong and "seed" not in row:
                row["seed"] = seed  # to reproduce the first violation
            row["least"] = min(row["least"], float(ratio.amin()) if len(ratio) else math.inf)

    def total(self, key: str) -> int:
        return sum(row[key] for row in self.rows.values())


def run(attempts: int, seed: int = 0, *, batch: int | None = None) -> Tally:
    """Attack in turn until there are ``attempts`` comparisons, equally in both dtypes."""
    tally, turn = Tally(), seed
    credit = [0.0] * len(ATTACKS)
    while tally.total("attempts") < attempts:
        for at, one in enumerate(ATTACKS):
            credit[at] += one.share
            for _ in range(int(credit[at] * _PER_TURN)):
                for dtype in DTYPES:
                    draw = Draw(turn, dtype, one.batch if batch is None else min(batch, one.batch))
                    tally.add(one.run(draw), dtype, turn)
                turn += 1
                credit[at] = 0.0
    return tally


_PER_TURN = 4  # batches of an attack with share 1 in one round of all


def main(options: list[str] | None = None) -> None:
    """Attack every bound and record the table."""
    parser = ArgumentParser(prog="python -m tests.fuzz.bounds")
    parser.add_argument("--attempts", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(options)
    torch.set_num_threads(1)
    started = time.perf_counter()
    tally = run(chosen.attempts, chosen.seed)
    rows = [tally.rows[key] for key in sorted(tally.rows)]
    for row in rows:
        counts = f"{row['dtype']:8} {row['attempts']:9} {row['violations']:5}"
        print(f"{row['bound']:64} {counts} {row['least']:.12g}")
    totals = {key: tally.total(key) for key in ("attempts", "violations")}
    seconds = round(time.perf_counter() - started, 1)
    print(f"{totals['attempts']} attempts, {totals['violations']} violations, {seconds} s")
    record("bounds", [{**totals, "seed": chosen.seed, "seconds": seconds}, *rows], folder=RESULTS)


def outcomes(seed: int, dtype: torch.dtype, batch: int) -> Iterator[tuple[Attack, Outcome]]:
    """Every attack once."""
    for one in ATTACKS:
        yield one, one.run(Draw(seed, dtype, min(batch, one.batch)))


if __name__ == "__main__":
    main()
