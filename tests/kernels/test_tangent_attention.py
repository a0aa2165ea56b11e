"""kernels/tangent_attention.py against torch.func on the definition in float64.

Outputs, tangents and the numbers per row, then every gradient of both: the reference of a gradient
of a tangent is a reverse derivative of a forward one. Tiles are small, so that there are several.
"""

import math
from functools import cached_property

import pytest
import torch
from torch import Tensor
from torch.func import jvp, vjp

from fenchel.kernels import tangent_attention as kernels
from fenchel.kernels.band import Band
from fenchel.kernels.tangent_attention import (
    ForwardResult,
    Tangents,
    Tile,
    tangent_attention,
    tangent_attention_vjp,
)
from tests.kernels.sm90 import SHARED_MEMORY, compiled

SCALE = 0.3
TILES = Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), None
T, S, D, E = 37, 53, 16, 20


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "forward_tile", lambda *_, **__: TILES[0])
    monkeypatch.setattr(kernels, "reverse_tiles", lambda *_, **__: TILES)


def log_prior(prior: Band, shape: tuple[int, int, int, int]) -> Tensor:
    """log u as the docstring defines it: (B, H, T, S)."""
    B, _, T, S = shape
    i, j = (torch.arange(T) + S - T)[:, None], torch.arange(S)[None]
    open_ = torch.ones(B, 1, T, S, dtype=torch.bool)
    if prior.left is not None:
        open_ &= j >= i - prior.left
    if prior.right is not None:
        open_ &= j <= i + prior.right
    if prior.start is not None:
        open_ &= j >= prior.start.cpu()[:, None, None, None]
    if prior.stop is not None:
        open_ &= j < prior.stop.cpu()[:, None, None, None]
    log_u = torch.zeros(shape, dtype=torch.float64).masked_fill(~open_, -math.inf)
    if prior.slopes is not None:
        log_u -= prior.slopes.cpu().double()[:, None, None] * (i - j).abs()
    return log_u if prior.bias is None else log_u + prior.bias.cpu().double()


class Case:
    """Drawn inputs with their tangents, the kernels' results, and the same by float64."""

    def __init__(
        self,
        device: str,
        prior: Band = Band(),  # noqa: B008
        moving: str = "qkv",
        *,
        heads: tuple[int, int] = (1, 1),
        dtype: torch.dtype = torch.float32,
        size: float = 1.0,
        seed: int = 0,
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        B = 1 if prior.stop is None else len(prior.stop)
        shapes = (B, heads[0], T, D), (B, heads[1], S, D), (B, heads[1], S, E)
        x = [torch.randn(shape, generator=g) for shape in shapes]
        x[0] *= size
        self.floor = 0.0
        if size > 1.0:  # every key twice, so that no row is one-hot; the gradient of q is 0 then
            x[1][:, :, 1::2] = x[1][:, :, :-1:2]
            self.floor = 1.0
        t = [torch.randn(shape, generator=g) for shape in shapes]
        self.x = tuple(y.to(device, dtype) for y in x)
        self.t = tuple(
            y.to(device, dtype) if name in moving else None
            for y, name in zip(t, "qkv", strict=True)
        )
        self.go, self.gto = (
            torch.randn(B, heads[0], T, E, generator=g).to(device, dtype) for _ in range(2)
        )
        self.prior = prior
        log_u = log_prior(prior, (B, heads[0], T, S))

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (y.repeat_interleave(heads[0] // heads[1], 1) for y in (k, v))
            seen = (log_u > -math.inf).any(-1, keepdim=True)
            p = torch.softmax(SCALE * q @ k.mT + torch.where(seen, log_u, 0.0), -1)
            return (p * seen) @ v

        def both(*at: Tensor) -> tuple[Tensor, Tensor]:
            o, to = jvp(attention, at[:3], at[3:])
            return o, to

        at = [y.cpu().double() for y in self.x]
        at += [
            torch.zeros_like(y) if move is None else move.cpu().double()
            for y, move in zip(at, self.t, strict=True)
        ]
        k = at[1].repeat_interleave(heads[0] // heads[1], 1)
        z = SCALE * at[0] @ k.mT + log_u
        self.lse = torch.logsumexp(z, -1)
        self.lse = torch.where(self.lse == -math.inf, math.inf, self.lse)
        (self.o, self.to), self.pull = vjp(both, *at)

    def run(self, known: tuple[Tensor, Tensor] | None = None) -> ForwardResult:
        return tangent_attention(
            *self.x, Tangents(*self.t), scale=SCALE, band=self.prior, known=known
        )

    @cached_property
    def found(self) -> ForwardResult:
        return self.run()

    def gradients(self, go: Tensor | None, gto: Tensor | None) -> tuple[Tensor | None, ...]:
        first, second = tangent_attention_vjp(
            *self.x, Tangents(*self.t), self.found, go, gto, scale=SCALE, band=self.prior
        )
        return *first, *second

    def wanted(self, go: Tensor | None, gto: Tensor | None) -> tuple[Tensor, ...]:
        both = (torch.zeros_like(self.o) if g is None else g.cpu().double() for g in (go, gto))
        wanted: tuple[Tensor, ...] = self.pull(tuple(both))
        return wanted

    def check(self, tolerance: float = 2e-6, *, each: bool = False) -> None:
        """Errors are relative to the largest entry; ``each`` gradient alone, too."""
        found = self.found
        self.near(found.o, self.o, tolerance)
        finite = self.lse < math.inf
        assert torch.equal(found.lse.cpu() < math.inf, finite)
        self.near(found.lse[finite.to(found.lse.device)], self.lse[finite], max(tolerance, 1e-6))
        if found.to is not None:
            second = self.run((found.o, found.lse))
            self.near(found.to, self.to, tolerance)
            self.near(second.to, self.to, 2 * tolerance)
            self.near(second.mu, found.mu, 2 * tolerance)
        cotangents = [(self.go, None if found.to is None else self.gto)]
        if each and found.to is not None:
            cotangents += [(self.go, None), (None, self.gto)]
        for go, gto in cotangents:
            for one, other in zip(self.gradients(go, gto), self.wanted(go, gto), strict=True):
                if one is not None:
                    self.near(one, other, 2 * tolerance)

    def near(self, found: Tensor | None, wanted: Tensor | None, tolerance: float) -> None:
        assert found is not None
        assert wanted is not None
        wanted = wanted.cpu().double()
        size = max(float(wanted.abs().max()) if wanted.numel() else 0.0, self.floor)
        torch.testing.assert_close(found.cpu().double(), wanted, rtol=0.0, atol=tolerance * size)


@pytest.mark.parametrize("moving", ["", "q", "k", "v", "qkv"])
def test_products_of_absent_tangents_are_left_out(moving: str, device: str) -> None:
    case = Case(device, Band(right=0), moving)
    case.check(each=moving == "qkv")
    grads = case.gradients(case.go, case.gto if moving else None)
    assert [name for name, x in zip("qkv", grads[3:], strict=True) if x is not None] == [*moving]


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


HOLES = torch.zeros(1, 1, T, S)
HOLES[..., ::3] = 1.5
HOLES[:, :, 5:9] = -math.inf  # rows without a key
PRIORS = {
    "none": Band(),
    "window": Band(left=7, right=3),
    "strict, with empty rows": Band(left=S, right=-1 - (S - T)),
    "padding, with an empty sequence": Band(start=int32(0, 50), stop=int32(47, 50)),
    "padding, ALiBi, causal": Band(right=0, stop=int32(40), slopes=torch.tensor([0.5, 0.0625])),
    "bias": Band(bias=HOLES),
}


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())
def test_under_priors_every_gradient_is_that_of_the_definition(prior: Band, device: str) -> None:
    moved = (x.to(device) if isinstance(x, Tensor) else x for x in prior)
    heads = (1, 1) if prior.slopes is None else (len(prior.slopes), 1)  # which share their keys
    Case(device, Band(*moved), heads=heads).check()


@pytest.mark.parametrize(
    ("size", "tolerance"),
    [
        (1e-3, 2e-6),  # near-uniform rows
        (2e3, 2e-3),  # scores of 1e4, whose rounding in float32 is up to 1e-3 of a weight
    ],
)
def test_scores_of_any_size(size: float, tolerance: float, device: str) -> None:
    Case(device, Band(right=0), size=size).check(tolerance)


def test_keys_and_values_that_are_computed_apart(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = TILES[0], TILES[1], Tile(64, 32, 4, 1)
    monkeypatch.setattr(kernels, "reverse_tiles", lambda *_, **__: apart)
    Case(device, Band(right=0), heads=(2, 1)).check()


def test_half_precision(device: str) -> None:
    Case(device, Band(right=0), dtype=torch.bfloat16).check(1.5e-2)


def test_the_same_bits_in_every_run(device: str) -> None:
    case = Case(device, Band(left=11, right=2))
    one, other = ((*case.run(), *case.gradients(case.go, case.gto)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


COMPILED = """
from fenchel.kernels.band import Band
from fenchel.kernels.tangent_attention import *
x = [torch.empty(1, 16, 4096, 64, dtype=torch.bfloat16, device="meta") for _ in range(8)]
causal = {"scale": 0.125, "band": Band(right=0)}
found = tangent_attention(*x[:3], Tangents(*x[3:6]), **causal)
tangent_attention_vjp(*x[:3], Tangents(*x[3:6]), found, *x[6:], **causal)
"""


def test_for_a_hopper_gpu_they_use_its_matrix_units_and_fit() -> None:
    reports = compiled(COMPILED)
    names = [report["kernel"] for report in reports]
    assert names == ["_tangent_rows", "_rows_vjp", "_keys_vjp"]
    for report in reports:
        assert report["wgmma"] > 0, report
        assert report["cp_async"] > 0, report
        assert report["shared"] <= SHARED_MEMORY, report
        # Gradients with a few spilled registers are quicker than in tiles that need none.
        assert report["spilled"] <= (0 if report["kernel"] == "_tangent_rows" else 160), report
