"""fenchel/sensitivity/decision.py: remainders, margins and radii against points of the ball."""

import math
from collections.abc import Iterator
from dataclasses import replace

import entmax
import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from fenchel.attention import Causal, angles
from fenchel.choice import Entmax, Softmax, Sparsemax
from fenchel.sensitivity import decision
from fenchel.sensitivity.bounds.feedforward import SLOPES
from fenchel.sensitivity.decision import (
    CURVATURES,
    NORMS,
    PARTS,
    DecisionBound,
    DecisionNetwork,
    certified_radii,
    require_size,
)
from fenchel.sensitivity.decision_attack import nearest_change
from fenchel.sensitivity.layers import (
    ActivationLayer,
    Chain,
    GatedLayer,
    LinearLayer,
    NormLayer,
    Residual,
    SelfAttention,
    rotation_matrices,
)

KINDS = ("llama", "gpt", "entmax")


def network(
    kind: str, seed: int = 0, n: int = 4, blocks: int = 2, sharp: float = 1.0
) -> tuple[DecisionNetwork, Tensor]:
    """Rotary, grouped, gated with RMSNorm, or biased and plain with LayerNorm; or the first with
    entmax of alpha 1.5, and 1.25 at every third seed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, fan: int = 1) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator) / fan**0.5

    d, H, G, D, F, V = 6, 4, 2, 4, 10, 9
    llama = kind != "gpt"

    def norm() -> NormLayer:
        gain = 1.0 + 0.2 * normal(d)
        return NormLayer(
            gain, None if llama else 0.2 * normal(d), 1e-5, "rms" if llama else "layer"
        )

    stages: list[Residual] = []
    for _ in range(blocks):
        W_Q, W_K, W_V = (normal(heads, d, D, fan=d) for heads in (H, G, G))
        b_Q, b_K, b_V = (None if llama else 0.2 * normal(heads, D) for heads in (H, G, G))
        rotations = rotation_matrices(angles(torch.arange(n), D, dtype=torch.float64), D)
        attention = SelfAttention(
            *(sharp * W_Q, W_K, W_V, normal(H * D, d, fan=H * D)),
            prior=Causal(),
            choice=Entmax(1.25 if seed % 3 == 2 else 1.5) if kind == "entmax" else Softmax(),
            biases=(b_Q, b_K, b_V),
            rotations=rotations if llama else None,
            bias=None if llama else 0.2 * normal(d),
        )
        down = LinearLayer(normal(F, d, fan=F), None if llama else 0.2 * normal(d))
        mlp: tuple[GatedLayer | LinearLayer | ActivationLayer, ...] = (
            (GatedLayer(normal(d, F, fan=d), normal(d, F, fan=d), "silu"),)
            if llama
            else (LinearLayer(normal(d, F, fan=d), 0.2 * normal(F)), ActivationLayer("gelu"))
        )
        stages += [Residual(Chain((norm(), attention)), (), 0.7)]
        stages += [Residual(Chain((norm(), Chain((*mlp, down)))))]
    return DecisionNetwork(tuple(stages), norm(), LinearLayer(normal(d, V))), normal(n, d)


def within(moves: Tensor, norm: str, r: float, t: int) -> Tensor:
    """Moves (n, d) on the sphere of radius r."""
    if norm == "token":
        return r * moves / moves.norm(dim=-1, keepdim=True)
    if norm == "one":
        only = torch.zeros_like(moves)
        only[t] = moves[t]
        moves = only
    return r * moves / moves.norm()


def points(net: DecisionNetwork, X: Tensor, norm: str, r: float, t: int) -> Iterator[Tensor]:
    """Random moves, along gradients of random functionals of every stage, and of margins."""
    generator = torch.Generator().manual_seed(1)
    for k in range(24):
        u = torch.randn(X.shape, dtype=X.dtype, generator=generator)
        if k % 3:
            Y = X.clone().requires_grad_()
            streams = net.streams(Y)
            target = (streams[1 + k % len(net.stages)] * u).sum()
            if k % 3 == 2:
                logits = net(Y)[t]
                target = logits[int(logits.argsort()[-2 - k % 5])] - logits.amax()
            (u,) = torch.autograd.grad(target, Y)
        u = u + 1e-9 * torch.randn(X.shape, dtype=X.dtype, generator=generator)
        yield within(u, norm, r, t)


def remainders(net: DecisionNetwork, X: Tensor, J: list[Tensor], move: Tensor) -> Tensor:
    """err_st at a point: (S, n, d)."""
    n, d = X.shape
    here, there = net.streams(X), net.streams(X + move)
    found = []
    for s in range(len(J)):
        change = (J[s].reshape(n * d, n * d) @ (there[s] - here[s]).flatten()).view(n, d)
        found.append(there[s + 1] - here[s + 1] - change)
    return torch.stack(found)


def outside(shape: Tensor, vector: Tensor) -> float:
    """How far a vector reaches, in units of an ellipsoid: above 1 it is outside."""
    return math.sqrt(float(vector @ torch.linalg.solve(shape, vector)))


def jacobians(net: DecisionNetwork, X: Tensor) -> list[Tensor]:
    return [jacobian(stage, x) for stage, x in zip(net.stages, net.streams(X)[:-1], strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_composed_jacobian_is_that_of_autograd(kind: str) -> None:
    net, X = network(kind)
    bound = DecisionBound(net, X)
    composed = torch.zeros(4, 6, 4, 6, dtype=torch.float64)
    for i, row in enumerate(bound.T[len(net.stages), 0]):
        composed[i, :, : i + 1] = row.transpose(0, 1)
    torch.testing.assert_close(composed, jacobian(Chain(net.stages), X))
    t, i = 3, int(net(X)[3].argmax())

    def sized(Y: Tensor) -> Tensor:
        """Logits times the size that the last norm divides by, of which the text's is 1."""
        y = torch.stack((X, Y))
        for stage in net.stages:
            y = stage(y)
        y = y[:, t] if kind != "gpt" else y[:, t] - y[:, t].mean(-1, keepdim=True)
        size = (y.square().mean(-1) + 1e-5).sqrt()
        return net(Y)[t] * size[1] / size[0].detach()

    rows = jacobian(sized, X)
    gradients = bound.gradients_at(t, "all", None)
    torch.testing.assert_close(gradients.first[0], (rows[i] - rows).flatten(1).norm(dim=-1))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_remainder_and_no_margin_is_below_its_bound(kind: str, norm: str) -> None:
    closest = 0.0
    for seed, sharp in ((0, 1.0), (1, 3.0), (2, 0.3)):
        net, X = network(kind, seed, sharp=sharp)
        bound, J, t = DecisionBound(net, X), jacobians(net, X), 3
        ball, gradients = bound.ball(norm, t), bound.gradients_at(t, norm, t)
        radius = certified_radii(bound, norm, [t])[t].certified
        top = int(net(X)[t].argmax())
        for r in (1e-3 * radius, 0.3 * radius, radius):
            found = bound.remainders(ball, r)
            assert found.n == len(X)
            eta = torch.stack([one.sum(0) for one in found.etas])
            low = bound.margin(t, gradients, found, r).lower
            assert low >= -1e-9
            for move in points(net, X, norm, r, t):
                vectors = remainders(net, X, J, move)
                err = vectors.norm(dim=-1)
                assert bool((err <= eta + 1e-13).all())
                closest = max(closest, float((err / eta).amax())) if r == radius else closest
                for s, shape in enumerate(found.shapes if r == radius else []):
                    for S, m in zip(shape.S, shape.tokens.tolist(), strict=True):
                        assert outside(S, vectors[s, m]) <= 1.0
                logits = net(X + move)[t]
                rest = torch.cat((logits[:top], logits[top + 1 :]))
                assert float(logits[top] - rest.amax()) >= low
    assert closest > 0.1  # the bounds are not far from what is attained


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_certified_is_below_attacked_and_dropped_remainders_are_seen(
    kind: str, norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without remainders the radius is margin over gradient, which an attack undercuts."""
    unsound = 0
    for seed in range(1 if kind == "entmax" else 3):  # which takes longer to solve
        net, X = network(kind, seed)
        bound = DecisionBound(net, X)
        positions = range(1, len(X))
        radii = certified_radii(bound, norm, positions)
        attacked = {}
        for t in positions:
            cut = net.prefix(t + 1)
            change = nearest_change(cut, X[: t + 1], bound.rivals[t].kept, norm)
            assert change is not None
            rows = change.norm(dim=-1)
            attacked[t] = float(rows.amax() if norm == "token" else rows.norm())
            assert int(cut(X[: t + 1] + change)[-1].argmax()) != int(bound.rivals[t].kept)
            assert 0.0 < radii[t].certified <= attacked[t]

        def dropped(self: DecisionBound, *_: object) -> decision._Remainders:
            none = torch.zeros(len(PARTS), self.n, dtype=torch.float64)
            flat = decision._shaped(none, torch.zeros(6, self.n, self.d, self.d).double(), 0.0)
            return decision._Remainders(
                [none] * len(self.stages), [flat] * len(self.stages), [none[0]], self.n
            )

        with monkeypatch.context() as patch:
            patch.setattr(DecisionBound, "remainders", dropped)
            broken = certified_radii(bound, norm, positions)
            unsound += sum(broken[t].certified > attacked[t] for t in positions)
    assert unsound > 0


def _single(part: str, kind: str) -> tuple[DecisionNetwork, Tensor]:
    """A network of one stage in which one kind of remainder exceeds the others."""
    net, X = network(kind, 3, n=3, blocks=1)
    attention, mlp = net.stages
    plain = NormLayer(None, None, 1e-5, "rms")
    assert isinstance(attention.branch, Chain)
    assert isinstance(mlp.branch, Chain)
    layer = attention.branch.layers[1]
    assert isinstance(layer, SelfAttention)
    if part == "norm":  # GELU far above 0 is the identity
        eye = torch.eye(6, dtype=torch.float64)
        far = torch.full((6,), 40.0, dtype=torch.float64)
        inner = Chain((LinearLayer(eye, far), ActivationLayer("gelu"), LinearLayer(eye)))
        return replace(net, stages=(Residual(Chain((plain, inner))),)), X
    if part == "mlp":
        W = torch.zeros(6, 1, dtype=torch.float64)
        W[0] = 25.0
        inner = Chain((LinearLayer(W, W[0] * 0.0), ActivationLayer("gelu"), LinearLayer(W.mT)))
        X = torch.ones(1, 6, dtype=torch.float64)
        X[:, 0] = 0.0
        return replace(net, stages=(Residual(Chain((plain, inner))),)), X
    sharp = 6.0 if kind == "llama" else 3.0  # where several keys have a weight
    moved = replace(layer, W_Q=sharp * layer.W_Q, W_K=6.0 * layer.W_K)
    if part in ("scores", "values"):  # tokens in a plane that scores, or values, do not read
        X = torch.zeros_like(X)
        X[:, 0] = 2.0
        X[:, 1] = torch.arange(3.0)
        plane = torch.tensor([0, 1])
        names = ("W_Q", "W_K") if part == "scores" else ("W_V",)
        blind = {name: 2.0 * getattr(moved, name).index_fill(1, plane, 0.0) for name in names}
        moved = replace(moved, **blind)
    return replace(net, stages=(Residual(Chain((plain, moved))),)), X


@pytest.mark.parametrize("kind", ["llama", "entmax"])
@pytest.mark.parametrize("part", ["norm", "mlp", "scores", "softmax", "values"])
def test_a_dropped_remainder_is_seen(part: str, kind: str) -> None:
    """err is within eta, and beyond what is left of eta without this part."""
    net, X = _single(part, kind)
    bound, J = DecisionBound(net, X), jacobians(net, X)
    t = len(X) - 1
    ball = bound.ball("all")
    seen, left, reached = False, 0.0, 0.0
    for r in (3e-4, 3e-3, 1e-2):
        found = bound.remainders(ball, r)
        if found.n < len(X):
            continue
        eta = found.etas[0]
        rest = eta.sum(0) - eta[PARTS.index(part)]
        shape, without = found.shapes[0], (eta.clone(), found.shapes[0].parts.clone())
        for tensor in without:
            tensor[PARTS.index(part)] = 0.0
        dropped = decision._shaped(*without, bound.gamma)
        for move in (*points(net, X, "all", r, t), *_aimed(net, X, J, r)):
            vectors = remainders(net, X, J, move)[0]
            err = vectors.norm(dim=-1)
            assert bool((err <= eta.sum(0) + 1e-13).all())
            seen = seen or bool((err > rest + 1e-12).any())
            for S, m in zip(shape.S, shape.tokens.tolist(), strict=True):
                assert outside(S, vectors[m]) <= 1.0
                reached = max(reached, outside(S, vectors[m]))
            for S, m in zip(dropped.S, dropped.tokens.tolist(), strict=True):
                left = max(left, outside(S, vectors[m]))
    assert left > 1.0
    assert reached > 0.15
    assert seen


def _aimed(net: DecisionNetwork, X: Tensor, J: list[Tensor], r: float) -> Iterator[Tensor]:
    """Ascent on the remainder of the first stage from random starts."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(6):
        move = within(
            torch.randn(X.shape, dtype=X.dtype, generator=generator), "all", r, len(X) - 1
        )
        for _ in range(25):
            move = move.detach().requires_grad_()
            err = remainders(net, X, J, move)[0].square().sum()
            (g,) = torch.autograd.grad(err, move)
            move = within(move.detach() / r + g / g.norm().clamp(min=1e-300), "all", r, 0)
            yield move


@pytest.mark.parametrize("resting", [0.0, 0.2])
def test_the_remainder_of_a_norm_is_in_its_ellipsoid(
    resting: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sum_m B_im (c1 h_m + c2 d_m) in random directions, also where tokens are taken in balls."""
    monkeypatch.setattr(decision, "_RESTING", resting)
    net, X = network("llama", 8)
    bound = DecisionBound(net, X)
    stage, generator = bound.stages[0], torch.Generator().manual_seed(0)
    root = torch.randn(4, 6, 6, dtype=torch.float64, generator=generator)
    root *= torch.tensor([0.02, 0.01, 0.003, 0.001], dtype=torch.float64)[:, None, None]
    S, rho = root @ root.mT, torch.linalg.matrix_norm(root, 2)
    bent = bound._bent(0, S, rho)
    _, shape = bound._norm_remainder(stage, bent, rho)
    largest = 0.0
    for _ in range(50):
        a = torch.randn(6, dtype=torch.float64, generator=generator)
        pulled = torch.einsum("a,imab->imb", a, stage.blocks)
        reach = bent.along * (pulled * stage.h).sum(-1).abs()
        reach += bent.across * torch.einsum("imb,mbc,imc->im", pulled, S, pulled).sqrt()
        reach = torch.minimum(reach, bent.size * pulled.norm(dim=-1)).sum(-1)
        ratio = reach.square() / torch.einsum("a,iab,b->i", a, shape, a)
        largest = max(largest, float(ratio.amax()))
    assert 0.1 < largest <= 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_order_of_an_mlp_is_in_its_ellipsoid(kind: str) -> None:
    """W_D e with e_f = a'' u dg^2 / 2 + a' dg du, all with their signs."""
    reached = 0.0
    for seed in range(4):
        net, X = network(kind, seed, n=2, blocks=1)
        bound = DecisionBound(net, X)
        f = bound.stages[1].part
        assert isinstance(f, decision._Mlp)
        generator = torch.Generator().manual_seed(seed)
        root = torch.randn(2, 6, 2, dtype=torch.float64, generator=generator)
        S = root @ root.mT + 1e-3 * torch.eye(6, dtype=torch.float64)
        _, (shapes, _) = bound._mlp_remainder(f, S)
        for i in range(2):
            for k in range(8):
                unit = torch.randn(6, dtype=torch.float64, generator=generator)
                for _ in range(20):  # ascent on the distance in the metric of the ellipsoid
                    unit = (unit / unit.norm()).detach().requires_grad_()
                    move = decision._root(S[i]) @ unit
                    dg, du = f.G @ move, f.U @ move
                    e = f.D @ (0.5 * f.second[i] * f.u[i] * dg.square() + f.first[i] * dg * du)
                    square = e @ torch.linalg.solve(shapes[i], e)
                    assert float(square.detach()) <= 1.0
                    reached = max(reached, float(square.detach()))
                    (g,) = torch.autograd.grad(square, unit)
                    unit = unit + (0.3 + 0.2 * k) * g / g.norm()
    assert reached > 0.7


def test_what_an_mlp_does_beyond_the_second_order_is_bounded() -> None:
    net, X = network("llama", 4, n=2, blocks=1)
    bound = DecisionBound(net, X)
    f = bound.stages[1].part
    assert isinstance(f, decision._Mlp)
    norm, branch = decision._parts(net.stages[1])
    h, _, _ = decision._unit(norm, bound.streams[1])
    assert isinstance(norm.weight, Tensor)
    eye = torch.eye(6, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    seen, reached = 0.0, 0.0
    for size in (0.05, 0.5):
        (_, third), (_, beyond) = bound._mlp_remainder(f, size**2 * eye.expand(2, 6, 6))
        for _ in range(200):
            move = torch.randn(2, 6, dtype=torch.float64, generator=generator)
            move = size * move / move.norm(dim=-1, keepdim=True)

            def exact(z: Tensor) -> Tensor:
                return Chain(branch)(z * norm.weight)

            dg, du = move @ f.G.mT, move @ f.U.mT
            second = (0.5 * f.second * f.u * dg.square() + f.first * dg * du) @ f.D.mT
            _, first = torch.func.jvp(exact, (h,), (move,))
            beside = exact(h + move) - exact(h) - first - second
            rest = beside.norm(dim=-1)
            assert bool((rest <= third + 1e-14).all())
            seen = max(seen, float((rest / third).amax()))
            for S, vector in zip(beyond, beside, strict=True):
                reached = max(reached, outside(S, vector))
    assert seen > 0.02
    assert 0.02 < reached <= 1.0


def test_the_decision_of_one_position_depends_on_no_later_token() -> None:
    net, X = network("llama", 5)
    whole = certified_radii(DecisionBound(net, X), "all", [1])[1]
    alone = certified_radii(DecisionBound(net.prefix(2), X[:2]), "all", [1])[1]
    assert alone.certified == pytest.approx(whole.certified, rel=1e-9)


def test_more_kept_tokens_have_smaller_radii() -> None:
    net, X = network("llama", 6)
    one, three = (
        certified_radii(DecisionBound(net, X, keep=keep), "all", [3])[3] for keep in (1, 3)
    )
    logits = net(X)[3].sort(descending=True).values
    if float(logits[2] - logits[3]) < float(logits[0] - logits[1]):
        assert three.certified <= one.certified
    change = nearest_change(net, X, net(X)[3].topk(3).indices, "all")
    assert change is not None
    assert three.certified <= float(change.norm())
    before, after = (set(net(Y)[3].topk(3).indices.tolist()) for Y in (X, X + change))
    assert before != after


def test_curvatures_are_those_of_the_slopes_and_nowhere_exceeded() -> None:
    x = torch.linspace(-30.0, 30.0, 600_001, dtype=torch.float64).requires_grad_()
    for name, curvature in CURVATURES.items():
        (second,) = torch.autograd.grad(SLOPES[name].at(x).sum(), x)
        torch.testing.assert_close(curvature.second(x).detach(), second, atol=1e-12, rtol=1e-9)
        (third,) = torch.autograd.grad(curvature.second(x).sum(), x)
        torch.testing.assert_close(curvature.third(x).detach(), third, atol=1e-12, rtol=1e-9)
        (fourth,) = torch.autograd.grad(curvature.third(x).sum(), x)
        for most, attained in (
            (curvature.most_second, second),
            (curvature.most_third, third),
            (curvature.most_fourth, fourth),
        ):
            assert 0.999 * most < float(attained.abs().amax()) <= most


def test_what_needs_too_much_memory_is_refused_with_what_it_would_take() -> None:
    sentence = (
        r"32 tokens of width 576 in 30 blocks need about \d+ GB for their Jacobians, of 12 at "
        r"most, and \d+ hours of one core; 2 tokens fit."
    )
    with pytest.raises(ValueError, match=sentence):
        require_size(32, 576, 60)
    require_size(2, 576, 60)
    with pytest.raises(ValueError, match="no token fits"):
        require_size(2, 8192, 160)


def test_pairs_are_refined_until_no_other_bound_is_negative(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One pair at once or all at once: the least margin has the same sign."""
    signs, refined = set(), []
    losses = DecisionBound._losses

    def counted(self: DecisionBound, *given: object) -> Tensor:
        refined.append(given[2])
        return losses(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(DecisionBound, "_losses", counted)
    for seed in range(6):
        net, X = network("llama", seed)
        bound, t = DecisionBound(net, X, keep=2), 3
        ball, gradients = bound.ball("all"), bound.gradients_at(t, "all", None)
        radius = certified_radii(bound, "all", [t])[t].certified
        for r in (0.9 * radius, radius, 1.1 * radius):
            found = bound.remainders(ball, r)
            monkeypatch.setattr(decision, "_NEAREST", 100)
            whole = bound.margin(t, gradients, found, r).lower
            monkeypatch.setattr(decision, "_NEAREST", 1)
            refined.clear()
            single = bound.margin(t, gradients, found, r).lower
            assert (whole > 0.0) == (single > 0.0)
            signs.add((whole > 0.0, len(refined) > 1))
    assert {positive for positive, _ in signs} == {True, False}
    assert (True, True) in signs  # a pair behind the first one was negative in its ball


class Clock:
    """Every reading is a second later than the one before it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_a_deadline_ends_setup_and_search_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known by then holds, and positions of which nothing is known are left out."""
    net, X = network("llama", n=3, blocks=1)
    whole = certified_radii(DecisionBound(net, X), "all", range(3))
    known: list[float] = []
    seen: list[tuple[int, int]] = []
    for deadline in range(1, 400, 7):
        monkeypatch.setattr(decision.time, "monotonic", Clock())
        seen.clear()
        try:
            bound = DecisionBound(
                net, X, deadline=deadline, progress=lambda *counts: seen.append(counts)
            )
        except decision.OutOfTime:
            known.append(-1)
            assert len(seen) < 3
            continue
        assert seen == [(0, 3), (1, 3), (2, 3)]
        found = certified_radii(bound, "all", range(3))
        assert all(0.0 < radius.certified <= whole[t].certified for t, radius in found.items())
        known.append(sum(radius.certified for radius in found.values()))
        if found == whole:
            break
    assert known == sorted(known)
    assert known[0] == -1
    assert 0.0 in known
    assert len(set(known)) > 4
    assert known[-1] == sum(radius.certified for radius in whole.values())


def test_what_is_not_covered_is_refused_by_name() -> None:
    net, X = network("llama")
    attention, mlp = net.stages[:2]
    assert isinstance(attention.branch, Chain)
    norm, layer = attention.branch.layers
    assert isinstance(layer, SelfAttention)
    assert isinstance(norm, NormLayer)

    def refused(stage: Residual, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            DecisionBound(replace(net, stages=(stage, mlp)), X)

    for choice, match in (
        (Sparsemax(), r"chooses by Sparsemax; .* softmax and for entmax"),
        (Entmax(1.8), r"chooses by Entmax at alpha=1.8; "),
        (Entmax(torch.tensor(1.5)), r"chooses by Entmax and learns; "),
        (Softmax(torch.tensor(1.5)), r"chooses by Softmax and learns; "),
    ):
        refused(replace(attention, branch=Chain((norm, replace(layer, choice=choice)))), match)
    unit = NormLayer(kind="rms")
    refused(
        replace(attention, branch=Chain((norm, replace(layer, qk_norm=(unit, unit))))), "queries"
    )
    refused(replace(attention, branch=Chain((norm, replace(layer, prior=None)))), "looks ahead")
    refused(replace(attention, branch=Chain((layer,))), "no norm")
    refused(replace(attention, parallel=(layer,)), "one branch")
    eye = torch.eye(6, dtype=torch.float64)
    relu = Chain((norm, LinearLayer(eye), ActivationLayer("relu"), LinearLayer(eye)))
    refused(Residual(relu), "activation 'relu'")
    with pytest.raises(ValueError, match="norm all, token, one"):
        certified_radii(DecisionBound(net, X), "fro", [0])
    with pytest.raises(ValueError, match="GB"):
        DecisionBound(net, torch.zeros(1, 20_000, dtype=torch.float64))


@pytest.mark.parametrize("alpha", [1.5, 1.25])
def test_weights_of_entmax_over_a_box_of_scores(alpha: float) -> None:
    """Against a solver of others at random points, corners, and across changes of the support."""
    generator = torch.Generator().manual_seed(0)
    net, X = network("entmax", 2 if alpha == 1.25 else 0, blocks=1)
    f = DecisionBound(net, X).stages[0].part
    assert isinstance(f, decision._Attention)
    assert f.alpha == alpha
    near, support = 0.0, set()
    for scale in (0.0, 1e-3, 0.1, 1.0):
        Z = scale * torch.rand(f.x.shape, dtype=torch.float64, generator=generator)
        box = decision._entmax_box(f, Z)
        for k in range(60):
            u = 2.0 * torch.rand(f.x.shape, dtype=torch.float64, generator=generator) - 1.0
            x = f.x + Z * (u.sign() if k % 2 else u)
            # without keys ahead, which weigh nothing
            p = entmax.entmax_bisect(x.masked_fill(~f.live, -1e3), alpha, dim=-1, n_iter=80)
            s = torch.where(p > 0.0, p.pow(2.0 - alpha), 0.0)
            w = s / s.sum(-1, keepdim=True)
            slope = torch.where(p > 0.0, (2.0 - alpha) * p.pow(3.0 - 2.0 * alpha), 0.0)
            support |= {int(count) for count in (p[:, -1] > 0.0).sum(-1)}
            for value, most in (
                (s, box.most),
                (-s, -box.least),
                (slope, box.sigma),
                ((p - f.p).abs(), box.dp),
                ((w - f.w).abs(), box.dw),
            ):
                assert bool((value <= most + 1e-6).all())
            if scale > 0.1:
                moved = box.dp > 1e-3
                near = max(near, float(((p - f.p).abs() / box.dp)[moved].amax()))
    assert near > 0.8
    assert len(support) > 1


def test_rounding_is_a_small_part_and_never_none() -> None:
    net, X = network("llama")
    bound = DecisionBound(net, X)
    found = bound.remainders(bound.ball("all"), 1e-6)
    for eta in found.etas:
        lost = eta[PARTS.index("rounding")]
        assert bool((lost > 0).all())
        assert float(lost.amax()) < 1e-9
    assert math.isfinite(decision._GROW)


@pytest.mark.parametrize("kind", KINDS)
def test_the_remainder_of_a_norm_is_in_its_ball_and_its_ellipsoid(kind: str) -> None:
    """c1 h + c2 d, by aimed ascent; a move along h has a remainder along h alone."""
    net, X = network(kind, 2, n=2, blocks=1)
    bound = DecisionBound(net, X)
    stage = bound.stages[1]
    norm, _ = decision._parts(net.stages[1])
    x = bound.streams[1]
    h, size, N = decision._unit(norm, x)
    generator = torch.Generator().manual_seed(0)
    near, filled = [], []
    unit = h / h.norm(dim=-1, keepdim=True)
    for share, kept in ((0.02, 1.0), (0.3, 1.0), (0.02, 0.0), (0.3, 0.0)):
        rho = share * size  # of moves without their part along h where kept is 0
        plane = torch.eye(6) - (1.0 - kept) * unit[:, :, None] * unit[:, None]
        S = rho.square()[:, None, None] * plane
        bent = bound._bent(1, S, rho)
        ball, shape = bound._norm_remainder(stage, bent, rho)
        for k in range(12):
            move = torch.randn(2, 6, dtype=torch.float64, generator=generator)
            for _ in range(15):
                move = (plane @ move[..., None])[..., 0]
                move = (rho[:, None] * move / move.norm(dim=-1, keepdim=True)).detach()
                move.requires_grad_()
                err = decision._unit(norm, x + move)[0] - h - (N @ move[..., None])[..., 0]
                behind = torch.einsum("iab,ib->ia", stage.blocks[[0, 1], [0, 1]], err)
                assert bool((err.norm(dim=-1) <= bent.size + bent.lost).all())
                assert bool((behind.norm(dim=-1) <= ball * (1.0 + 1e-9)).all())
                near.append(float((err.norm(dim=-1) / bent.size).detach().amax()))
                ridge = 1e-12 * torch.einsum("iaa->i", shape)[:, None, None] * torch.eye(6)
                solved = torch.linalg.solve(shape + ridge, behind[..., None])[..., 0]
                square = (behind * solved).sum(-1)
                assert float(square.detach().amax()) <= 1.0
                filled.append(float(square.detach().amax()))
                aim = (err if k % 2 else behind).square().sum() if k % 3 else square.sum()
                (g,) = torch.autograd.grad(aim, move)
                move = move / rho[:, None] + g / g.norm(dim=-1, keepdim=True)
    assert max(near) > 0.9
    assert max(filled) > 0.1


def test_earlier_remainders_are_seen_in_their_ellipsoids() -> None:
    """The loss of a pair is the smaller of ball and ellipsoid, by gradients of autograd."""
    net, X = network("llama", 7)
    bound, t = DecisionBound(net, X), 3
    ball, gradients = bound.ball("all"), bound.gradients_at(3, "all", None)
    found = bound.remainders(ball, 1e-3)
    s, i, j = 0, int(net(X)[t].argmax()), int(net(X)[t].argmin())
    rest = Chain(net.stages[s + 1 :])

    def pair(Y: Tensor) -> Tensor:
        W = (net.head.W[:, i] - net.head.W[:, j]) * net.norm.weight
        return (rest(Y)[t] @ W) / bound.rivals[t].size

    a = jacobian(pair, bound.streams[s + 1])[:t]
    shape, eta = found.shapes[s], found.etas[s][:, :t]
    balls = a.norm(dim=-1) * eta
    along = torch.einsum("ma,pmab,mb->pm", a, shape.parts[:, :t], a).sqrt()
    balls[:-1] = torch.minimum(balls[:-1], along)
    one = torch.tensor([0]), torch.tensor([j])
    errors = torch.zeros(len(net.stages), len(PARTS), t + 1, dtype=torch.float64)
    errors[s, :, :t] = eta
    lost = bound._losses(gradients, t, *one, found, errors)[0, s]
    torch.testing.assert_close(lost, balls.sum(-1), rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize("where", ["attention", "mlp"])
def test_a_token_that_diverges_in_the_last_block_ends_no_other_position(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens meet in attention alone, and nothing reads the last block but their own logits."""
    net, X = network("llama", 0)
    plain = certified_radii(DecisionBound(net, X), "all", [1, 3])
    row_moves, mlp = DecisionBound._row_moves, DecisionBound._mlp_remainder

    def rows(self: DecisionBound, s: int, *rest: object) -> decision._RowMoves:
        row = row_moves(self, s, *rest)  # type: ignore[arg-type]
        row.Z[:, 1] = 100.0 if s == 2 else row.Z[:, 1]
        return row

    def far(self: DecisionBound, f: decision._Mlp, S: Tensor) -> tuple[Tensor, Tensor]:
        eta, shapes = mlp(self, f, S)
        if f is self.stages[3].part:
            eta[:, 1] = 1e9
        return eta, shapes

    monkeypatch.setattr(
        DecisionBound, *(("_row_moves", rows), ("_mlp_remainder", far))[where == "mlp"]
    )
    bound = DecisionBound(net, X)
    found = bound.remainders(bound.ball("all"), 1e-3)
    assert found.n == len(X)
    assert found.moves[-1].isfinite().tolist() == [True, False, True, True]
    radii = certified_radii(bound, "all", [1, 3])
    assert radii[1].certified == 0.0
    assert radii[3].certified == plain[3].certified > 0.0
