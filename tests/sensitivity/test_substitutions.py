"""fenchel/sensitivity/substitutions.py: counts of substitutions, by reading all texts."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fenchel.attention import Causal
from fenchel.choice import Sparsemax
from fenchel.sensitivity import decision, substitutions
from fenchel.sensitivity.decision import DecisionBound, DecisionNetwork, Substitutions
from fenchel.sensitivity.layers import LinearLayer, NormLayer
from fenchel.sensitivity.substitutions import SubstitutionSearch, block_sizes
from tests.sensitivity.test_decision import KINDS, Clock, jacobians, network, outside, remainders


def alternatives(X: Tensor, counts: tuple[int, ...], size: float, seed: int) -> dict[int, Tensor]:
    """Rows at a distance of about ``size`` from those of X."""
    generator = torch.Generator().manual_seed(seed)
    return {
        m: X[m] + size * torch.randn(a, X.shape[1], dtype=X.dtype, generator=generator)
        for m, a in enumerate(counts)
    }


def texts(X: Tensor, rows: dict[int, Tensor], most: int) -> list[tuple[tuple[int, ...], Tensor]]:
    """Every allowed text, with the tokens that differ."""
    found = []
    for picks in product(*(range(len(rows[m]) + 1) for m in range(len(X)))):
        changed = tuple(m for m, a in enumerate(picks) if a)
        if len(changed) <= most:
            Y = X.clone()
            for m in changed:
                Y[m] = rows[m][picks[m] - 1]
            found.append((changed, Y))
    return found


def fewest(net: DecisionNetwork, X: Tensor, rows: dict[int, Tensor], keep: int) -> list[float]:
    """Of substitutions that change the decision at each position, by reading all texts."""
    found = [math.inf] * len(X)
    kept = [set(row.topk(keep).indices.tolist()) for row in net(X)]
    for changed, Y in texts(X, rows, len(X)):
        for t, row in enumerate(net(Y)):
            if set(row.topk(keep).indices.tolist()) != kept[t]:
                found[t] = min(found[t], sum(m <= t for m in changed))
    return found


def search_of(
    net: DecisionNetwork, X: Tensor, rows: dict[int, Tensor], most: int = 9, keep: int = 1
) -> SubstitutionSearch:
    kept = {t: row.topk(keep).indices for t, row in enumerate(net(X))}
    return SubstitutionSearch(net, X, rows, kept, most)


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10_000),
    counts=st.tuples(*(st.integers(0, 2) for _ in range(4))),
    size=st.sampled_from((0.003, 0.01, 0.03, 0.3, 2.0)),
    limit=st.sampled_from((0, 2, 9, 10**6)),
    keep=st.integers(1, 2),
)
def test_certified_is_below_the_fewest_and_attacked_is_not(
    kind: str, seed: int, counts: tuple[int, ...], size: float, limit: int, keep: int
) -> None:
    net, X = network(kind, seed, blocks=1 + seed % 2)
    rows = alternatives(X, counts, size, seed)
    true = fewest(net, X, rows, keep)
    search = search_of(net, X, rows, keep=keep)
    search.exhaust(limit)
    bounds = search.bound()
    for t in range(4):
        search.attack(t)
        most = sum(count > 0 for count in counts[: t + 1])
        certified = max(search.certified(t), bounds.get(t, 0))
        attacked = len(search.changed[t]) if t in search.changed else math.inf
        assert search.most[t] == most
        assert certified <= most
        assert certified < true[t] <= attacked
        if limit == 10**6:
            assert attacked == true[t]
            assert certified == min(true[t] - 1, most)
        if t in search.changed:
            Y = X.clone()
            for m, a in search.changed[t]:
                Y[m] = rows[m][a]
            changed = set(net(Y)[t].topk(keep).indices.tolist())
            assert changed != set(search.kept[t].tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_certifies_what_was_not_read(kind: str) -> None:
    """All substitutions at once, and fewer of them where these are too many."""
    found = {"all": 0, "some": 0}
    for seed in range(40 if kind == "entmax" else 60):  # which takes longer to solve
        net, X = network(kind, seed, blocks=1)
        rows = alternatives(X, (1, 2, 1, 1), 0.03, seed)
        bounds = search_of(net, X, rows).bound()
        found["all"] += bounds.get(3, 0) == 4
        found["some"] += 0 < bounds.get(3, 0) < 4
        true = fewest(net, X, rows, 1)
        assert all(certified < true[t] for t, certified in bounds.items())
    assert found["all"] > 0
    assert found["some"] > 0


@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_remainders_and_margins_of_all_texts_are_within_their_bounds(kind: str, most: int) -> None:
    closest = 0.0
    for seed in range(4):
        net, X = network(kind, seed)
        rows = alternatives(X, (2, 1, 2, 1), 0.02, seed)
        bound, J, t = DecisionBound(net, X), jacobians(net, X), 3
        allowed = Substitutions({m: rows[m] - X[m] for m in rows}, most)
        ball = bound.substitution_ball(allowed)
        found = bound.remainders(ball, 1.0)
        assert found.n == len(X)
        gradients = bound.gradients_at(t, "all", None, allowed)
        low, top = bound.margin(t, gradients, found, 1.0).lower, int(net(X)[t].argmax())
        eta = torch.stack([one.sum(0) for one in found.etas])
        J_all = [torch.eye(24, dtype=torch.float64)]
        for jacobian in J:
            J_all.append(jacobian.reshape(24, 24) @ J_all[-1])
        for _, Y in texts(X, rows, most)[1:]:
            vectors = remainders(net, X, J, Y - X)
            assert bool((vectors.norm(dim=-1) <= eta + 1e-13).all())
            for s, shape in enumerate(found.shapes):
                for S, m in zip(shape.S, shape.tokens.tolist(), strict=True):
                    assert outside(S, vectors[s, m]) <= 1.0
            for s, stream in enumerate(net.streams(Y)):
                moved = (stream - bound.streams[s]).norm(dim=-1)
                assert bool((moved <= found.moves[s] * (1.0 + 1e-12)).all())
                linear = (J_all[s] @ (Y - X).flatten()).view(4, 6)
                for m in range(4):
                    assert outside(ball.shape[s][m], linear[m]) <= 1.0
                    closest = max(closest, outside(ball.shape[s][m], linear[m]))
                    assert float(linear[m].norm()) <= float(ball.rho[s][m]) * (1.0 + 1e-12)
            logits = net(Y)[t]
            others = torch.cat((logits[:top], logits[top + 1 :]))
            assert float(logits[top] - others.amax()) >= low
    assert closest > 0.5


def test_the_worst_of_a_finite_set_is_taken_with_its_sign() -> None:
    """The gradient's loss is the sum of the largest, of moves against it alone."""
    net, X = network("llama", 3)
    bound, t = DecisionBound(net, X), 3
    rows = alternatives(X, (2, 0, 1, 2), 0.01, 5)
    moves = {m: rows[m] - X[m] for m in rows}
    (i,) = bound.rivals[t].kept.tolist()
    T = torch.stack(list(bound._row(len(net.stages), 0, t)))
    W = bound._functionals(
        t, i, bound.rivals[t].offsets[0], (net.head.W * net.norm.weight[:, None]).mT
    )
    for most in (1, 2, 3):
        taken = bound.gradients_at(t, "all", None, Substitutions(moves, most)).first[0]
        for j in range(9):
            losses = [
                max(0.0, *(-float(W[j] @ T[m] @ e) for e in M)) for m, M in moves.items() if len(M)
            ]
            expected = sum(sorted(losses)[-most:])
            assert float(taken[j]) == pytest.approx(expected, rel=1e-8, abs=1e-9)


def test_fewer_substitutions_have_smaller_ellipsoids() -> None:
    net, X = network("llama", 1)
    bound = DecisionBound(net, X)
    moves = alternatives(torch.zeros_like(X), (2, 2, 2, 2), 0.01, 0)
    traces = [
        float(torch.einsum("naa->", bound.substitution_ball(Substitutions(moves, k)).shape[-1]))
        for k in (1, 2, 3, 4)
    ]
    assert traces == sorted(traces)
    assert traces[0] < 0.6 * traces[-1]


def test_an_attack_takes_back_what_it_does_not_need() -> None:
    """Two substitutions change the decision here; three were added first."""
    net, X = network("gpt", 48)
    rows = alternatives(X, (1, 1, 1, 1), 1.0, 48)
    search = search_of(net, X, rows)
    search.attack(3)
    assert len(search.changed[3]) == fewest(net, X, rows, 1)[3] == 2


def test_the_numbers_of_texts_are_those_of_a_listing() -> None:
    counts = {0: 2, 3: 1, 4: 3}
    listed: dict[tuple[int, int], int] = {}
    for picks in product(*(range(a + 1) for a in counts.values())):
        changed = [m for m, a in zip(counts, picks, strict=True) if a]
        if changed:
            key = len(changed), changed[-1]
            listed[key] = listed.get(key, 0) + 1
    sizes = block_sizes(counts)
    assert {(c, m): s for c, level in enumerate(sizes, 1) for m, s in level.items() if s} == listed
    assert [len(list(substitutions._block(c, m, counts))) for c, m in listed] == [*listed.values()]
    assert block_sizes({}) == []


def test_a_limit_leaves_late_positions_to_fewer_substitutions() -> None:
    """Early positions are decided by few texts, and stay exact."""
    net, X = network("llama", 1)
    rows = alternatives(X, (1, 1, 1, 1), 1e-5, 0)
    for limit, exact in (
        (0, [0, 0, 0, 0]),
        (4, [1, 1, 1, 1]),
        (8, [1, 2, 3, 1]),
        (15, [1, 2, 3, 4]),
    ):
        search = search_of(net, X, rows)
        search.exhaust(limit)
        assert list(search.exact.values()) == exact
        assert not search.changed
        assert [search.certified(t) for t in range(4)] == exact


def test_an_equal_logit_neither_certifies_nor_attacks() -> None:
    """Tokens that become another one with the same two largest logits."""
    W = torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.5, -1.0]], dtype=torch.float64)
    net = DecisionNetwork((), NormLayer(None, None, 0.0, "rms"), LinearLayer(W))
    X = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    tied = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    near = [tied + torch.tensor([[0.0, nudge]], dtype=torch.float64) for nudge in (-1e-12, 1e-12)]
    for other, certified in ((tied, 0), (near[0], 0), (near[1], 0), (X + 0.1, 1)):
        search = search_of(net, X, {0: other})
        search.exhaust(9)
        search.attack(0)
        assert (search.certified(0), 0 in search.changed) == (certified, False)


def test_a_deadline_ends_reading_attack_and_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read by then holds."""
    net, X = network("llama", 3)
    rows = alternatives(X, (2, 2, 2, 2), 2.0, 3)
    true, counts = fewest(net, X, rows, 1), []
    for deadline in range(0, 40, 4):
        monkeypatch.setattr(decision.time, "monotonic", Clock())
        search = search_of(net, X, rows)
        search.exhaust(10**6, deadline)
        bounds = search.bound(deadline)
        search.attack(3, deadline)
        for t in range(4):
            assert max(search.certified(t), bounds.get(t, 0)) < true[t]
            assert t not in search.changed or len(search.changed[t]) >= true[t]
        counts.append(sum(search.exact.values()) + len(search.changed))
    assert counts == sorted(counts)
    assert counts[0] == 0 < counts[-1]


def test_what_the_expansion_does_not_cover_is_named() -> None:
    """Texts are read all the same."""
    net, X = network("llama", 1)
    stage = net.stages[0]
    norm, attention = stage.branch.layers  # type: ignore[attr-defined]
    other = replace(attention, choice=Sparsemax(), prior=Causal())
    changed = replace(stage, branch=replace(stage.branch, layers=(norm, other)))
    net = replace(net, stages=(changed, *net.stages[1:]))
    search = search_of(net, X, alternatives(X, (1, 1, 1, 1), 1e-4, 0))
    search.exhaust(4)
    assert search.bound() == {}
    assert "chooses by" in search.refused
    assert list(search.exact.values()) == [1, 1, 1, 1]
