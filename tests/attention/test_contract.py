"""Laws that every back end obeys for every choice map. A new back end joins by one line in CLAIMS.

The yardstick is the definition, written below with torch alone but for the choice map, which has a
contract of its own. Tiles are made tiny, so that the blocked back end has many of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vmap

from fenchel import attention
from fenchel.attention import (
    ALiBi,
    Causal,
    Dense,
    Forget,
    Global,
    Padding,
    Prior,
    RelativeBias,
    Segments,
    Sink,
    Strided,
    Window,
    attend,
    backends,
    tangent,
    tiles,
)
from fenchel.choice import Capped, Choice, Entmax, Hard, Sigmoid, Softmax, Sparsemax

B, H, T, S, D, E = 2, 6, 4, 7, 5, 3
SOFT: list[Choice] = [Softmax(), Softmax(1.7)]
ALL = [*SOFT, Entmax(1.5), Entmax(1.25, 2.0), Entmax(3.0), Sparsemax(0.8), Hard(), Capped(0.7)]
ALL += [Sigmoid(1.3, -0.5)]


class Claim(NamedTuple):
    """What a back end says it can do."""

    backend: str
    choices: list[Choice]
    tangents: bool
    second: bool
    groups: tuple[int, ...] = (1, 2, 3, 6)
    dtype: torch.dtype = torch.float64

    def refuses(self, prior: Prior | None) -> bool:
        """Whether it has no prior of that kind."""
        kinds = {"triton": (Dense, Forget, Sink), "tangent": (Forget, Sink)}
        return isinstance(prior, kinds.get(self.backend, ()))


CLAIMS = [
    Claim("reference", ALL, tangents=True, second=True),
    Claim("blocked", ALL, tangents=True, second=True),
    Claim("sdpa", SOFT, tangents=False, second=False),
    Claim("auto", ALL, tangents=True, second=False),
    Claim(  # in Triton's interpreter: one map and one grouping
        "triton", [Entmax(1.5)], True, False, groups=(2,), dtype=torch.float32
    ),
    Claim("tangent", [Softmax(1.7)], True, True, groups=(2,), dtype=torch.float32),
]
INTERPRETED = "triton", "tangent"
PAIRS = [(claim, choice) for claim in CLAIMS for choice in claim.choices]
every_pair = pytest.mark.parametrize(
    ("claim", "choice"), PAIRS, ids=[f"{claim.backend}-{choice}" for claim, choice in PAIRS]
)
QUICK = [(claim, choice) for claim, choice in PAIRS if claim.backend not in INTERPRETED]
every_quick_pair = pytest.mark.parametrize(
    ("claim", "choice"), QUICK, ids=[f"{claim.backend}-{choice}" for claim, choice in QUICK]
)
"""Without the Triton kernels, for which the interpreter takes seconds: see tests/kernels."""
PRIORS: dict[str, Prior | None] = {
    "none": None,
    "causal": Causal(),
    "strict, with an empty row": Causal(strict=True) + Window(2, 0),
    "padding, with an empty sequence": Padding(torch.tensor([5, 0])),
    "bias": ALiBi(H) + Causal(),
    "dense": Dense(torch.randn(B, 1, T, S, generator=torch.Generator().manual_seed(3))),
    "forget": Forget(-torch.rand(B, H, S, generator=torch.Generator().manual_seed(4))),
    "sink": Sink(torch.linspace(-1.0, 2.0, H), Causal()),
    "segments": Segments(torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 1]])) + Causal(),
    "strided": Strided(2),
    "global": Window(1, 1) + Global(2),
    "relative": RelativeBias(torch.linspace(-2.0, 2.0, 8 * H).view(8, H), both_sides=True),
}
STRICT, DENSE = list(PRIORS)[2], list(PRIORS)[5]
TRIPLES = [
    (claim, choice, prior)
    for claim, choice in PAIRS
    for prior in PRIORS
    if claim.backend not in INTERPRETED or prior in (STRICT, DENSE)
]
TANGENT_TRIPLES = [
    (claim, choice, prior)
    for claim, choice in PAIRS
    for prior in list(PRIORS)[: 8 if claim.backend in INTERPRETED else None]
]


def by_triple(triples: list[tuple[Claim, Choice, str]]) -> pytest.MarkDecorator:
    ids = [f"{claim.backend}-{choice}-{name}" for claim, choice, name in triples]
    return pytest.mark.parametrize(("claim", "choice", "name"), triples, ids=ids)


@pytest.fixture(autouse=True)
def _tiny_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_CACHED", 50)
    monkeypatch.setattr(tiles, "_FEWEST_ROWS", 3)
    monkeypatch.setattr(backends, "_ONE_PIECE", 0)
    monkeypatch.setattr(tangent, "runs_on", lambda _: True)  # in the interpreter


def inputs(G: int = 3, T: int = T, S: int = S, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, T, D), (B, G, S, D), (B, G, S, E)
    drawn = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    return [x.to(dtype).requires_grad_() for x in drawn]


def definition(
    q: Tensor, k: Tensor, v: Tensor, choice: Choice, prior: Prior | None, scale: float = 0.6
) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    z = scale * torch.einsum("bhtd,bhsd->bhts", q, k)
    log_u = None
    if prior is not None:
        log_u = prior.log(q.shape[2], k.shape[2], B=q.shape[0], H=q.shape[1], dtype=q.dtype)
    return torch.einsum("bhts,bhse->bhte", choice.weights(z, log_u), v)


def call(claim: Claim, choice: Choice, prior: Prior | None) -> Callable[..., Tensor]:
    return lambda q, k, v: attend(
        q, k, v, choice=choice, prior=prior, scale=0.6, backend=claim.backend
    )


def draw_like(*xs: Tensor) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in xs)


def test_every_prior_is_in_the_contract() -> None:
    kinds = {type(part) for prior in PRIORS.values() for part in getattr(prior, "parts", (prior,))}
    public = [getattr(attention, name) for name in attention.__all__]
    missing = {x for x in public if isinstance(x, type) and issubclass(x, Prior)} - kinds - {Prior}
    assert not missing


@by_triple(TRIPLES)
def test_values_and_gradients_are_those_of_the_definition(
    claim: Claim, choice: Choice, name: str
) -> None:
    prior = PRIORS[name]
    for G in claim.groups:
        at = inputs(G, dtype=claim.dtype)
        if claim.refuses(prior):
            with pytest.raises(ValueError, match="have no prior of the kind Dense"):
                call(claim, choice, prior)(*at)
            return
        wide = [x.detach().double().requires_grad_() for x in at]
        ours = call(claim, choice, prior)(*at)
        exact = definition(*wide, choice, prior)
        near = 1e-7 if claim.dtype == torch.float64 else 3e-6
        torch.testing.assert_close(ours.double(), exact, atol=near, rtol=near)
        (g,) = draw_like(exact)
        slopes = [x.double() for x in torch.autograd.grad(ours, at, g.to(ours.dtype))]
        wanted = list(torch.autograd.grad(exact, wide, g))
        torch.testing.assert_close(slopes, wanted, atol=10 * near, rtol=10 * near)


@by_triple(TANGENT_TRIPLES)
def test_tangents_are_right_or_refused_and_never_silently_zero(
    claim: Claim, choice: Choice, name: str
) -> None:
    prior = PRIORS[name]
    at = [x.detach() for x in inputs(2, dtype=claim.dtype)]
    tangents = draw_like(*at)
    f = call(claim, choice, prior)
    if claim.backend in INTERPRETED and isinstance(prior, Dense | Forget | Sink):
        refusal = r"no (derivative in a prior|prior of the kind|Forget|Sink)"
        with pytest.raises(ValueError, match=refusal):
            jvp(f, tuple(at), tangents)
        return
    if not claim.tangents:
        with pytest.raises(ValueError, match="cannot carry tangents"):
            jvp(f, tuple(at), tangents)
        with forward_ad.dual_level(), pytest.raises(ValueError, match="cannot carry tangents"):
            f(*map(forward_ad.make_dual, at, tangents))
        return
    wide, wide_tangents = (tuple(x.double() for x in xs) for xs in (at, tangents))
    near = 1e-6 if claim.dtype == torch.float64 else 5e-6
    _, exact = jvp(lambda *x: definition(*x, choice, prior), wide, wide_tangents)
    _, ours = jvp(f, tuple(at), tangents)
    torch.testing.assert_close(ours.double(), exact, atol=near, rtol=near)
    with forward_ad.dual_level():
        out = f(*map(forward_ad.make_dual, at, tangents))
        carried = forward_ad.unpack_dual(out).tangent
        only_k = f(at[0], forward_ad.make_dual(at[1], tangents[1]), at[2])
        tangent = forward_ad.unpack_dual(only_k).tangent
    assert carried is not None
    assert tangent is not None
    torch.testing.assert_close(carried.double(), exact, atol=near, rtol=near)
    still = (torch.zeros_like(wide[0]), wide_tangents[1], torch.zeros_like(wide[2]))
    _, exact = jvp(lambda *x: definition(*x, choice, prior), wide, still)
    torch.testing.assert_close(tangent.double(), exact, atol=near, rtol=near)


@pytest.mark.parametrize("prior", list(PRIORS.values())[:4], ids=list(PRIORS)[:4])
@every_quick_pair
def test_second_derivatives_are_right_or_refused(
    claim: Claim, choice: Choice, prior: Prior | None
) -> None:
    at = inputs(3)

    def twice(out: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(out.square().sum(), at, create_graph=True)
        return torch.autograd.grad(sum(x.sin().sum() for x in first), at)

    ours = call(claim, choice, prior)(*at)
    exact = twice(definition(*at, choice, prior))
    try:
        found = twice(ours)
    except RuntimeError as refusal:  # torch picks a kernel by shape, and only some have one
        if claim.second or "not implemented" not in str(refusal):
            raise
    else:
        torch.testing.assert_close(found, exact, atol=1e-6, rtol=1e-6)


def test_a_tangent_turns_auto_away_from_a_fused_kernel_that_cannot_carry_it() -> None:
    q = torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(0))  # a fused shape
    _, exact = jvp(lambda q: attend(q, q, q, backend="reference"), (q,), (q.flip(2),))
    _, ours = jvp(lambda q: attend(q, q, q), (q,), (q.flip(2),))
    assert exact.abs().max() > 0.1
    torch.testing.assert_close(ours, exact)


def test_a_second_derivative_of_a_fused_kernel_raises() -> None:
    q = torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (slope,) = torch.autograd.grad(attend(q, q, q).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(slope.sum(), q)
    (slope,) = torch.autograd.grad(
        attend(q, q, q, backend="blocked").square().sum(), q, create_graph=True
    )
    assert torch.autograd.grad(slope.square().sum(), q)[0].isfinite().all()


@pytest.mark.parametrize(
    ("claim", "choice"),
    [
        (claim, choice) for claim, choice in PAIRS if claim.backend != "tangent"
    ],  # see test_tangent.py
    ids=str,
)
def test_functional_transforms_agree_with_one_another(claim: Claim, choice: Choice) -> None:
    q, k, v = (x.detach()[:, :, :3] for x in inputs(3, dtype=claim.dtype))
    f = call(claim, choice, Causal())

    def loss(q: Tensor) -> Tensor:
        return f(q, k, v).square().sum()

    by_hand = torch.autograd.grad(loss(q.requires_grad_()), q)[0]
    q = q.detach()
    torch.testing.assert_close(grad(loss)(q), by_hand)
    whole = jacrev(lambda q: f(q, k[:1], v[:1]))(q[:1])
    each = vmap(grad(lambda q, k, v: f(q[None], k[None], v[None]).square().sum()))(q, k, v)
    torch.testing.assert_close(each, by_hand)
    if claim.tangents:
        torch.testing.assert_close(jacfwd(lambda q: f(q, k[:1], v[:1]))(q[:1]), whole)
        move = draw_like(q)[0]
        if claim.second:
            _, curve = jvp(grad(loss), (q,), (move,))
            slope = grad(lambda q: (grad(loss)(q) * move).sum())(q)
            torch.testing.assert_close(curve, slope)
            nested = grad(lambda q: jvp(loss, (q,), (move,))[1])(q)
            torch.testing.assert_close(nested, slope)


@every_quick_pair
def test_a_query_with_no_open_key_gets_zeros_and_leaves_no_trace(
    claim: Claim, choice: Choice
) -> None:
    at = inputs(3)
    shut = torch.ones(T, 1, dtype=torch.bool)
    shut[1] = False
    out = call(claim, choice, Dense(shut))(*at)
    assert (out[:, :, 1] == 0).all()
    slopes = torch.autograd.grad(out.sum(), at)
    assert (slopes[0][:, :, 1] == 0).all()
    assert all(x.isfinite().all() for x in slopes)
    if claim.tangents:
        _, move = jvp(call(claim, choice, Dense(shut)), tuple(at), draw_like(*at))
        assert (move[:, :, 1] == 0).all()
        assert move.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@every_quick_pair
def test_narrow_numbers_and_large_scores_give_no_nan(
    claim: Claim, choice: Choice, dtype: torch.dtype
) -> None:
    for size in (1.0, 1e4):
        q, k, v = inputs(3)
        exact_in = [(size * q).to(dtype), k.to(dtype), v.to(dtype)]
        at = [x.detach().requires_grad_() for x in exact_in]
        out = call(claim, choice, Causal())(*at)
        slopes = torch.autograd.grad(out.float().sum(), at)
        assert out.dtype == dtype
        assert out.isfinite().all()
        assert all(x.isfinite().all() for x in slopes)
        if size == 1.0 and not isinstance(choice, Hard):
            exact = definition(*(x.double() for x in exact_in), choice, Causal())
            error = (out.double() - exact).abs().max()
            assert error < 40 * torch.finfo(dtype).eps


@every_pair
def test_one_key_no_key_and_no_query(claim: Claim, choice: Choice) -> None:
    f = call(claim, choice, None)
    q, k, v = inputs(3, S=1, dtype=claim.dtype)
    if choice.feasible == "simplex":
        torch.testing.assert_close(f(q, k, v), v.repeat_interleave(2, 1).expand(B, H, T, E))
    q, k, v = inputs(3, S=0, dtype=claim.dtype)
    out = f(q, k, v)
    assert out.shape == (B, H, T, E)
    assert (out == 0).all()
    q, k, v = inputs(3, T=0, dtype=claim.dtype)
    assert f(q, k, v).shape == (B, H, 0, E)


@every_pair
def test_layouts_in_memory_do_not_matter(claim: Claim, choice: Choice) -> None:
    at = [x.detach() for x in inputs(3, dtype=claim.dtype)]
    laid = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in at]
    f = call(claim, choice, Causal())
    torch.testing.assert_close(f(*laid), f(*at))


@dataclass(frozen=True)
class Tempered(Choice):
    """Softmax whose scores are divided by a tensor under a name that no back end knows."""

    temperature_map: Tensor
    """Broadcasts against the scores, with one entry along the keys."""
    beta: float | Tensor = 1.0

    def choose(self, x: Tensor) -> Tensor:
        shut = x == -torch.inf
        z = x.masked_fill(shut, 0.0) / self.temperature_map
        return Softmax().choose(z.masked_fill(shut, -torch.inf))

    def omega(self, p: Tensor) -> Tensor:
        return self.temperature_map * Softmax().omega(p)

    def slope(self, p: Tensor) -> Tensor:
        return self.temperature_map * Softmax().slope(p)

    def response(self, y: Tensor) -> Tensor:
        return Softmax().response(y / self.temperature_map)

    def spread(self, p: Tensor) -> Tensor:
        return p / self.temperature_map

    def lipschitz(self, K: int) -> float | Tensor:
        return Softmax(self.beta).lipschitz(K) / self.temperature_map.min()


@pytest.mark.parametrize("one_piece", [0, 1 << 16], ids=["in tiles", "in one piece"])
@pytest.mark.parametrize("backend", ["reference", "blocked", "auto"])
@pytest.mark.parametrize("shape", [(), (H, 1, 1), (B, 1, T, 1)], ids=str)
def test_a_tensor_of_a_map_learns_whatever_its_name(
    backend: str, shape: tuple[int, ...], one_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_ONE_PIECE", one_piece)
    at = inputs(3)
    temperature = (1.5 + 0.4 * draw_like(torch.zeros(shape, dtype=torch.float64))[0].sin()).detach()
    temperature.requires_grad_()

    def ours(*x: Tensor) -> Tensor:
        return attend(
            *x[:3], choice=Tempered(x[3], 1.3), prior=Causal(), scale=0.6, backend=backend
        )

    def exact(*x: Tensor) -> Tensor:
        return definition(*x[:3], Tempered(x[3], 1.3), Causal())

    everything = (*at, temperature)
    (g,) = draw_like(exact(*everything))
    torch.testing.assert_close(ours(*everything), exact(*everything))
    slopes = torch.autograd.grad(ours(*everything), everything, g)
    torch.testing.assert_close(slopes, torch.autograd.grad(exact(*everything), everything, g))
    assert slopes[3].abs().max() > 1e-3
    tangents = draw_like(*everything)
    still = [x.detach() for x in everything]
    _, tangent = jvp(ours, tuple(still), tangents)
    torch.testing.assert_close(tangent, jvp(exact, tuple(still), tangents)[1])


OURS = ("reference", "blocked")
"""Back ends whose products autocast must leave alone; torch's kernels sum in float32 anyway."""


@every_quick_pair
def test_autocast_changes_no_number_of_ours(claim: Claim, choice: Choice) -> None:
    at = [x.detach().float().requires_grad_() for x in inputs(3)]
    tangents = draw_like(*at)
    (g,) = draw_like(at[0].new_zeros(B, H, T, E))
    f = call(claim, choice, Causal())

    def numbers() -> list[Tensor]:
        out = f(*at)
        slopes = torch.autograd.grad(out, at, g.to(out.dtype), create_graph=claim.second)
        found = [out, *slopes]
        if claim.second:
            found += torch.autograd.grad(sum(x.sin().sum() for x in slopes), at)
        if claim.tangents:
            still = [x.detach() for x in at]
            found.append(jvp(f, tuple(still), tangents)[1])
            with forward_ad.dual_level():
                dual = f(*map(forward_ad.make_dual, still, tangents))
                found.append(forward_ad.unpack_dual(dual).tangent)
        return [x.detach().float() for x in found]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = numbers()
    fused = isinstance(choice, Softmax) and claim.backend not in OURS
    near = {"atol": 0.1, "rtol": 0.1} if fused else {"atol": 1e-6, "rtol": 1e-6}
    torch.testing.assert_close(narrow, numbers(), **near)
