"""benchmarks/optimisers/baselines.py against references in plain loops over float64."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.optimisers.baselines import NorMuon, Soap, hyperball
from fenchel.optim import Muon, adamw
from fenchel.optim.muon import QUINTIC

Array = NDArray[np.float64]
SHAPES = [(6, 6), (9, 4), (3, 11), (40, 5), (1, 7)]
LR, DECAY, BETA1, BETA2, STEPS = 0.05, 0.3, 0.8, 0.7, 6


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def moved(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    shape: tuple[int, ...],
    steps: int = STEPS,
) -> Array:
    """The weights after some steps with gradients that are drawn."""
    weight = torch.nn.Parameter(draw(*shape))
    optimiser = make([weight])
    for step in range(steps):
        weight.grad = draw(*shape, seed=1 + step)
        optimiser.step()
    return weight.detach().numpy()


def start(shape: tuple[int, ...]) -> tuple[Array, list[Array]]:
    """The first weights and all gradients."""
    return draw(*shape).numpy(), [draw(*shape, seed=1 + n).numpy() for n in range(STEPS)]


def muon_direction(M: Array) -> Array:
    """Muon's five steps of the quintic, on the singular values alone."""
    a, b, c = QUINTIC
    U, s, V = np.linalg.svd(M, full_matrices=False)
    s = s / math.sqrt(sum(x * x for x in s))
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return (U * s) @ V


# --- NorMuon


def reference_normuon(W: Array, gradients: list[Array]) -> Array:
    rows, columns = W.shape
    M, v = np.zeros_like(W), [0.0] * rows
    for G in gradients:
        M = BETA1 * M + (1 - BETA1) * G
        O = muon_direction(BETA1 * M + (1 - BETA1) * G)  # noqa: E741
        scaled = np.zeros_like(O)
        for i in range(rows):
            v[i] = BETA2 * v[i] + (1 - BETA2) * sum(x * x for x in O[i]) / columns
            for j in range(columns):
                scaled[i, j] = O[i, j] / math.sqrt(v[i])
        rms = math.sqrt(sum(x * x for x in scaled.flat) / scaled.size)
        W = (1 - LR * DECAY) * W - LR * 0.2 * scaled / rms
    return W


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_normuon_is_its_formula(shape: tuple[int, int]) -> None:
    found = moved(
        lambda p: NorMuon(p, lr=LR, momentum=BETA1, beta2=BETA2, weight_decay=DECAY), shape
    )
    np.testing.assert_allclose(found, reference_normuon(*start(shape)), rtol=1e-9, atol=1e-12)


def test_normuon_gives_rows_with_other_gradients_equal_steps() -> None:
    """Muon moves rows that are nearly multiples of each other less; NorMuon evens it out."""
    base = draw(8, 16)
    base[4:] = base[:1] + 0.01 * base[4:]
    sizes = {}
    for name, rule in {"muon": Muon, "normuon": NorMuon}.items():
        weight = torch.nn.Parameter(torch.zeros(8, 16, dtype=torch.float64))
        optimiser = rule([weight], lr=1.0, momentum=0.0, weight_decay=0.0)
        weight.grad = base.clone()
        optimiser.step()
        rows = weight.detach().square().mean(1).sqrt()
        sizes[name] = float(rows.max() / rows.min())
        if name == "normuon":
            assert weight.detach().square().mean().sqrt().item() == pytest.approx(0.2)
    assert sizes["normuon"] == pytest.approx(1.0)
    assert sizes["muon"] > 1.3


def test_matrices_without_gradient_stay_finite() -> None:
    weight = torch.nn.Parameter(draw(2, 4, 6))
    first = weight.detach().clone()
    optimiser = NorMuon([weight], lr=LR, weight_decay=0.0)
    weight.grad = draw(2, 4, 6, seed=1)
    weight.grad[1] = 0.0
    optimiser.step()
    assert torch.equal(weight.detach()[1], first[1])
    assert (weight.detach()[0] != first[0]).all()


# --- SOAP


def reference_soap(
    W: Array, gradients: list[Array], first: dict[int, Array], interval: int = 2
) -> Array:
    """With the momentum in the eigenbasis, turned whenever the basis is; Adam for vectors.

    ``first`` has the eigenvectors after the first gradient, of which those of 0 are not determined.
    """
    stats: dict[int, Array] = {}
    bases: dict[int, Array] = {}
    m, v = np.zeros_like(W), np.zeros_like(W)

    def gram(G: Array, side: int) -> Array:
        n = G.shape[side]
        columns = G if side == 0 else G.T
        return np.array([[sum(columns[i] * columns[j]) for j in range(n)] for i in range(n)])

    def into(X: Array) -> Array:
        for side, Q in bases.items():
            X = Q.T @ X if side == 0 else X @ Q
        return X

    def out_of(X: Array) -> Array:
        for side, Q in bases.items():
            X = Q @ X if side == 0 else X @ Q.T
        return X

    for t, G in enumerate(gradients):
        if t == 0:
            for side, Q in first.items():
                stats[side], bases[side] = (1 - BETA2) * gram(G, side), Q
                inside = Q.T @ stats[side] @ Q
                np.testing.assert_allclose(Q.T @ Q, np.eye(len(Q)), atol=1e-12)
                np.testing.assert_allclose(inside, np.diag(np.diag(inside)), atol=1e-12)
                assert (np.diff(np.diag(inside)) < 1e-12).all()
            continue
        g = into(G)
        for i in np.ndindex(W.shape):
            m[i] = BETA1 * m[i] + (1 - BETA1) * g[i]
            v[i] = BETA2 * v[i] + (1 - BETA2) * g[i] ** 2
        u = np.zeros_like(W)
        for i in np.ndindex(W.shape):
            u[i] = m[i] / (1 - BETA1**t) / (math.sqrt(v[i] / (1 - BETA2**t)) + 1e-8)
        W = (W - LR * out_of(u)) * (1 - LR * DECAY)
        m = out_of(m)
        for side in first:
            stats[side] = BETA2 * stats[side] + (1 - BETA2) * gram(G, side)
            if t % interval == 0:
                Q = bases[side]
                sizes = [Q[:, n] @ stats[side] @ Q[:, n] for n in range(len(Q))]
                order = sorted(range(len(Q)), key=lambda n: -sizes[n])
                v = v[order] if side == 0 else v[:, order]
                bases[side] = gram_schmidt(stats[side] @ Q[:, order])
        m = into(m)
    return W


def gram_schmidt(A: Array) -> Array:
    Q = np.zeros_like(A)
    for n in range(A.shape[1]):
        q = A[:, n].copy()
        for _ in range(2):
            for k in range(n):
                q -= (Q[:, k] @ q) * Q[:, k]
        Q[:, n] = q / np.linalg.norm(q)
    return Q


@pytest.mark.parametrize(
    ("shape", "longest"),
    [
        ((6, 6), 100),
        ((9, 4), 100),
        ((3, 7), 100),
        ((9, 4), 5),
        ((3, 7), 3),
        ((7,), 100),
        ((8, 9), 2),
    ],
    ids=str,
)
def test_soap_is_its_formula(shape: tuple[int, ...], longest: int) -> None:
    """Vectors, and matrices of which no, one or both sides have statistics."""
    optimisers: list[torch.optim.Optimizer] = []

    def make(p: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimisers.append(Soap(p, LR, (BETA1, BETA2), DECAY, interval=2, longest=longest))
        return optimisers[-1]

    found = moved(make, shape)
    moved(make, shape, steps=1)
    ((_, state),) = optimisers[1].state.items()
    names = {0: "left_basis", 1: "right_basis"}
    first = {side: state[name].numpy() for side, name in names.items() if name in state}
    assert list(first) == [
        side for side, length in enumerate(shape) if len(shape) == 2 and length <= longest
    ]
    wanted = reference_soap(*start(shape), first)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-8)


def test_soap_without_statistics_is_adamw_from_the_second_gradient_on() -> None:
    weight, other = (torch.nn.Parameter(draw(5, 4)) for _ in range(2))
    soap = Soap([weight], LR, (BETA1, BETA2), longest=0)
    adam = torch.optim.Adam([other], lr=LR, betas=(BETA1, BETA2))
    for step in range(STEPS):
        weight.grad = draw(5, 4, seed=step)
        soap.step()
        if step:
            other.grad = draw(5, 4, seed=step)
            adam.step()
    torch.testing.assert_close(weight, other)


def test_soap_steps_do_not_depend_on_a_turn_of_the_axes() -> None:
    """Adam in the eigenbasis: turned gradients give turned steps, which Adam alone does not."""
    Q = torch.linalg.qr(draw(6, 6, seed=99)).Q
    ends = []
    for turn in (torch.eye(6, dtype=torch.float64), Q):
        weight = torch.nn.Parameter(turn @ draw(6, 6))
        optimiser = Soap([weight], LR, (BETA1, BETA2), interval=1)
        for step in range(STEPS):
            weight.grad = turn @ draw(6, 6, seed=1 + step)
            optimiser.step()
        ends.append(turn.mT @ weight.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-8)


# --- Hyperball


def reference_ball(W: Array, steps: list[Array], radius: float, *, surface: bool) -> Array:
    for U in steps:
        length = math.sqrt(sum(x * x for x in U.flat))
        W = W + LR * radius * U / length
        norm = math.sqrt(sum(x * x for x in W.flat))
        W = W * (radius / norm if surface else min(1.0, radius / norm))
    return W


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("zero", [False, True], ids=["sphere", "from 0"])
def test_hyperball_around_muon_is_its_formula(shape: tuple[int, int], zero: bool) -> None:
    W, gradients = start(shape)
    W = 0.0 * W if zero else W
    M, steps = np.zeros_like(W), []
    for G in gradients:
        M = BETA1 * M + (1 - BETA1) * G
        steps.append(-muon_direction(BETA1 * M + (1 - BETA1) * G))
    radius = math.sqrt(shape[0]) if zero else math.sqrt(sum(x * x for x in W.flat))
    weight = torch.nn.Parameter(torch.from_numpy(W.copy()))
    optimiser = hyperball(Muon([weight], lr=LR, momentum=BETA1, weight_decay=DECAY))
    for G in gradients:
        weight.grad = torch.from_numpy(G)
        optimiser.step()
    wanted = reference_ball(W, steps, radius, surface=not zero)
    np.testing.assert_allclose(weight.detach().numpy(), wanted, rtol=1e-9, atol=1e-12)


def test_hyperball_around_adam_is_its_formula() -> None:
    W, gradients = start((4, 5))
    m, v, steps = np.zeros_like(W), np.zeros_like(W), []
    for t, G in enumerate(gradients, 1):
        m, v = BETA1 * m + (1 - BETA1) * G, BETA2 * v + (1 - BETA2) * G**2
        steps.append(-(m / (1 - BETA1**t)) / (np.sqrt(v / (1 - BETA2**t)) + 1e-8))
    wanted = reference_ball(W, steps, float(np.linalg.norm(W)), surface=True)
    found = moved(lambda p: hyperball(adamw(p, lr=LR, betas=(BETA1, BETA2))), (4, 5))
    np.testing.assert_allclose(found, wanted, rtol=1e-7, atol=1e-10)


def test_matrices_of_a_stack_have_spheres_of_their_own() -> None:
    stack = draw(3, 4, 5) * torch.tensor([1.0, 10.0, 0.0]).view(3, 1, 1)
    weight = torch.nn.Parameter(stack.clone())
    optimiser = hyperball(Muon([weight], lr=LR))
    for step in range(60):
        weight.grad = draw(3, 4, 5, seed=step % 3)  # a steady direction, to the edge of the ball
        optimiser.step()
    norms = torch.linalg.vector_norm(weight.detach(), dim=(1, 2))
    first = torch.linalg.vector_norm(stack, dim=(1, 2))
    torch.testing.assert_close(norms[:2], first[:2])
    assert norms[2].item() == pytest.approx(2.0)


def test_a_weight_without_gradient_and_a_rate_of_0_leave_the_weights() -> None:
    still, moving = (torch.nn.Parameter(draw(4, 5, seed=n)) for n in range(2))
    before = [w.detach().clone() for w in (still, moving)]
    optimiser = hyperball(Muon([still, moving], lr=0.0))
    moving.grad = draw(4, 5, seed=3)
    optimiser.step()
    assert torch.equal(still.detach(), before[0])
    torch.testing.assert_close(moving.detach(), before[1])


def test_adam_on_spheres_may_get_a_gradient_late() -> None:
    """What the sphere notes of a weight does not stop Adam from making its own state."""
    late, early = (torch.nn.Parameter(draw(4, 5, seed=n)) for n in range(2))
    optimiser = hyperball(adamw([late, early], lr=LR))
    early.grad = draw(4, 5, seed=2)
    optimiser.step()
    late.grad = draw(4, 5, seed=3)
    before = late.detach().clone()
    optimiser.step()
    assert (late != before).any()
    torch.testing.assert_close(late.norm(), before.norm())


# --- states


RULES: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "normuon": lambda p: NorMuon(p, lr=LR, beta2=BETA2),
    "soap": lambda p: Soap(p, LR, interval=3, longest=8),
    "muonh": lambda p: hyperball(Muon(p, lr=LR)),
    "adamh": lambda p: hyperball(adamw(p, lr=LR)),
    "normuonh": lambda p: hyperball(NorMuon(p, lr=LR)),
    "soaph": lambda p: hyperball(Soap(p, LR, interval=3)),
}


@pytest.mark.parametrize("name", RULES)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(name: str) -> None:
    shapes = [(6, 4), (6, 4), (3, 9), (2, 5, 5), (256, 4)]
    whole = [torch.nn.Parameter(draw(*s, seed=n).float()) for n, s in enumerate(shapes)]
    optimiser = RULES[name](whole)

    def run(weights: list[torch.nn.Parameter], rule: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            for n, weight in enumerate(weights):
                weight.grad = draw(*weight.shape, seed=100 * step + n).float()
            rule.step()

    run(whole, optimiser, range(4))
    half = [torch.nn.Parameter(weight.detach().clone()) for weight in whole]
    state = copy.deepcopy(optimiser.state_dict())
    resumed = RULES[name](half)
    resumed.load_state_dict(state)
    run(whole, optimiser, range(4, 9))
    run(half, resumed, range(4, 9))
    for a, b in zip(whole, half, strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()
