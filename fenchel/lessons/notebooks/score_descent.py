"""Descent in the space of scores: the step of the weights that is steepest where it matters."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Descent in the space of scores",
)

with app.setup:
    import math
    from itertools import pairwise
    from statistics import median

    import marimo as mo
    import torch

    import fenchel
    from fenchel.lessons.scene import Scene, all_places
    from fenchel.lessons.widgets import (
        Exercise,
        answer,
        bar_chart,
        claim,
        details,
        footer,
        header,
        line_chart,
        no_run,
        proof,
        question,
        run_picker,
        table,
        what_breaks,
    )
    from fenchel.optim import remove_gauge, score_bounds, score_step
    from fenchel.optim.score.exact_step import ScoreMap, WeightMove, step_length


@app.cell
def _():
    header("score_descent")
    return


@app.cell
def _():
    guess = question(
        "Queries and keys act on a model only through their scores. You may change all scores together "
        "by a fixed amount and want the loss to fall as far as possible. Is the negative gradient of the "
        "weights the best direction? (*Orthonormal*: columns of length 1 at right angles to one another.)",
        [
            "yes, always",
            "yes, if inputs and weights are orthonormal",
            "no, not even then",
        ],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "no, not even then",
        "The gradient is steepest per unit of *weights*. Per unit of *scores* it reaches about two thirds of "
        "the best on random data, less where inputs are lopsided, and about 96 percent with orthonormal ones, where it is never below 94.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    A step that is steepest in the scores is easy to write down, and three questions about it had been left open. When may the product of the two small
    changes, of queries and of keys, be dropped? How far can the prediction be trusted? Is the rule for the length circular?

    ## Knobs and loudness

    A mixing desk has two knobs. One degree of the first changes the loudness of the singer by 10, one
    degree of the second that of the piano by 1. Both are equally too loud. If *turning* costs you, use the first knob almost
    only. If the change of *loudness* does, because the ear should not be startled, lower both by the same amount: turn the second
    knob ten times as far.

    The grey area holds all steps that change the loudness by at most 1. The orange arrow is the plain gradient, the blue one the best step. *Drag the violet ring on either edge: can you do better than
    the blue arrow? Shift the gear up: which arrow follows the knob, and which stays?*
    """)
    return


@app.cell
def circle_and_ellipse():
    desk = Scene(
        "circle_and_ellipse",
        {"gear": 3.0, "angle": 200},
        places=all_places(gear=[i / 2 for i in range(2, 21)], angle=range(0, 360, 5)),
    )
    desk
    return (desk,)


@app.cell
def _(desk):
    _gear, _turn = desk.state["gear"], math.radians(desk.state["angle"])
    _knobs = torch.diag(torch.tensor([_gear, 1.0], dtype=torch.float64))  # loudness per degree
    _trouble = torch.ones(2, dtype=torch.float64)
    _raw = -_knobs @ _knobs.T @ _trouble  # what the plain gradient does to the loudness
    _raw = _trouble @ _raw / _raw.norm()
    _best = -_trouble.norm()
    _yours = _trouble @ torch.tensor([math.cos(_turn), math.sin(_turn)], dtype=torch.float64)
    _floor = 2 * _gear / (1 + _gear**2)
    claim(
        "SD-18",
        f"At the same change of loudness the best step lowers the trouble by {-_best:.3f}, the plain gradient by {-_raw:.3f}, "
        f"{_raw / _best:.0%} of it, and yours by {-_yours:.3f}. With gears $g$ and 1 the gradient never falls below "
        f"$2g/(1+g^2)$ = {_floor:.0%}.",
        _floor - 1e-12 <= (_raw / _best).item() <= 1 + 1e-12 and _yours >= _best - 1e-12,
    )
    return


@app.cell
def _():
    mo.md(r"""
    Gradient descent counts degrees. This lesson counts loudness. The knobs are the weights of queries
    and keys, $W_Q$ and $W_K$, each $d$ by $k$ ($k$ is the width of a head, called $d_k$ in other lessons). Loudness is the matrix of attention scores of $n$ tokens,
    the rows of $X$:

    $$S = X W_Q W_K^\top X^\top .$$

    Everything else in the model is held fixed, so the loss $L$ is a function of $S$ alone. Its gradient is
    $G = \partial L / \partial S$, one number per score: how fast the loss rises with that score.
    """)
    return


@app.cell
def _():
    def draw(*shape, generator):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def regression(seed, n=32, d=16, k=4):
        """X, W_Q, W_K, the loss as a function of S, and G: attention fitted to random targets."""
        g = torch.Generator().manual_seed(seed)
        X = draw(n, d, generator=g) / 4
        W_Q, W_K = draw(d, k, generator=g), draw(d, k, generator=g)
        V, Y = draw(n, d, generator=g), draw(n, d, generator=g)

        def loss(S):
            return 0.5 * (S.softmax(-1) @ V - Y).square().sum()

        G = torch.func.grad(loss)(X @ W_Q @ W_K.T @ X.T)
        return X, W_Q, W_K, loss, G

    X, W_Q, W_K, loss, G = regression(0)
    scores = ScoreMap(X[None], W_Q, W_K)
    return G, W_K, W_Q, X, draw, loss, regression, scores


@app.cell
def _(G, W_K, W_Q, X, draw, loss, scores):
    _g = torch.Generator().manual_seed(7)
    dQ, dK = (0.1 * draw(*W_Q.shape, generator=_g) for _ in range(2))
    _S = X @ W_Q @ W_K.T @ X.T
    finite = X @ (W_Q + dQ) @ (W_K + dK).T @ X.T - _S
    linear = X @ (W_Q @ dK.T + dQ @ W_K.T) @ X.T
    crossed = X @ dQ @ dK.T @ X.T
    T = X.T @ G @ X
    autograd = torch.func.grad(lambda W: loss(X @ W[0] @ W[1].T @ X.T))((W_Q, W_K))
    shrinking = []
    for _size in (1e-1, 1e-2, 1e-3, 1e-4):
        _R = scores.bilinear(WeightMove(_size * dQ, _size * dK)).norm()
        shrinking.append(
            {
                "size of the step": f"{_size:g}",
                "product term / (|dW_Q| |dW_K|)": (_R / (_size**2 * dQ.norm() * dK.norm())).item(),
                "product term / linear term": (_R / (_size * linear.norm())).item(),
            }
        )
    details(
        mo.md(r"""
    Move both weights at once, by $dW_Q$ and $dW_K$. Multiply out, as $(a + \Delta a)(b + \Delta b)$:

    $$\begin{aligned} dS = {} & X (W_Q\,dW_K^\top + dW_Q\,W_K^\top) X^\top \\ & + X\,dW_Q\,dW_K^\top X^\top . \end{aligned}$$

    The first part is linear in the step, the second is a product of two small things.
    $\langle G, dS \rangle$ means: multiply entry by entry and add up. It predicts by how much the loss changes.
    $\|M\|$ is the *Frobenius norm*, the root of the sum of all squared entries. These scores have no factor $1/\sqrt k$ and no mask; with a factor, $G$ is
    multiplied by it.
    """),
        claim(
            "SD-01 SD-02 SD-03 SD-04",
            "With everything but $S$ fixed, the two parts add up to the change of the scores, to rounding.",
            torch.allclose(finite, linear + crossed, atol=1e-12)
            and torch.allclose(scores.linear(WeightMove(dQ, dK))[0], linear)
            and torch.allclose(scores.bilinear(WeightMove(dQ, dK))[0], crossed),
        ),
        claim(
            "SD-10 SD-11",
            r"With $T = X^\top G X$: $\langle G, dS\rangle = \langle dW_Q, T W_K\rangle + \langle dW_K, T^\top W_Q\rangle$ for the linear "
            r"part. So $-T W_K$ and $-T^\top W_Q$ are the plain negative gradients, as automatic differentiation confirms.",
            torch.isclose((G * linear).sum(), (dQ * (T @ W_K)).sum() + (dK * (T.T @ W_Q)).sum())
            and torch.allclose(autograd[0], T @ W_K, atol=1e-12)
            and torch.allclose(autograd[1], T.T @ W_Q, atol=1e-12),
        ),
        table(shrinking),
        claim(
            "E88 SD-05",
            r"The product term is of the *order* of $\|dW_Q\|\,\|dW_K\|$: their ratio stays at "
            f"{shrinking[0]['product term / (|dW_Q| |dW_K|)']:.3f} however small the step. It is not small against that product, "
            "only against the step itself.",
            all(
                abs(
                    r["product term / (|dW_Q| |dW_K|)"]
                    / shrinking[0]["product term / (|dW_Q| |dW_K|)"]
                    - 1
                )
                < 1e-9
                for r in shrinking
            )
            and all(
                abs(a["product term / linear term"] / b["product term / linear term"] - 10) < 1e-6
                for a, b in pairwise(shrinking)
            ),
        ),
        claim(
            "E92",
            "Behind a softmax each row of $G$ sums to 0, because a shift of all scores of a row changes nothing; the sums "
            f"are at most {G.sum(-1).abs().max().item():.0e}.",
            G.sum(-1).abs().max() < 1e-12 and G.abs().max() > 1e-3,
        ),
        title="What a step does to the scores",
    )
    return (T,)


@app.cell
def _():
    mo.md(r"""
    ## The best step

    The problem in one line: choose $dW_Q$ and $dW_K$ to

    $$\text{minimise } \langle G, dS \rangle \quad\text{subject to}\quad \|dS\| \le \gamma ,$$

    with the linear part for $dS$; $\gamma$ is the allowed change of loudness. If every $dS$ could be produced, the answer
    would be to move straight against $G$. But two knobs cannot
    set a hundred channels. The *reachable* changes are like the floor of a room, and the best direction is
    the shadow of $-G$ on that floor. The shadow, written $\Pi(G)$, has a formula:

    $$\Pi(G) = P_Q G P_X + P_X G P_K - P_Q G P_K .$$

    $P_M$ drops a perpendicular onto the columns of $M$; here $M$ is $Q = X W_Q$, $K = X W_K$ or $X$. The best step is
    $dS^* = -\gamma\,\Pi(G)/\|\Pi(G)\|$.

    How much better is it than the plain gradient? Make the inputs or the weights lopsided: the *condition number* is the longest axis of their
    cloud over the shortest.
    """)
    return


@app.cell
def _():
    spread_X = mo.ui.slider(
        steps=[1, 2, 5, 10, 30, 100], value=1, label="Condition number of $X$", show_value=True
    )
    spread_W = mo.ui.slider(
        steps=[1, 2, 5, 10, 30, 100],
        value=1,
        label="Condition number of the weights",
        show_value=True,
    )
    mo.vstack([spread_X, spread_W])
    return spread_W, spread_X


@app.cell
def _(draw):
    def with_condition(M, condition):
        """M with singular values from 1 down to 1 / condition."""
        U, s, V = torch.linalg.svd(M, full_matrices=False)
        powers = torch.linspace(0.0, 1.0, len(s), dtype=torch.float64)
        return U * condition**-powers @ V

    def problem(n, d, k, seed):
        g = torch.Generator().manual_seed(seed)
        return tuple(draw(*shape, generator=g) for shape in ((n, d), (d, k), (d, k), (n, n)))

    def raw_change(X, W_Q, W_K, G):
        """The first-order score change of the plain negative gradient: (n, n)."""
        moves = ScoreMap(X[None], W_Q, W_K)
        gradient = moves.adjoint(G[None])
        return moves.linear(WeightMove(-gradient.Q, -gradient.K))[0]

    return problem, raw_change, with_condition


@app.cell
def _(problem, spread_W, spread_X, with_condition):
    _X, _WQ, _WK, _G = problem(16, 8, 2, seed=1)
    _X = with_condition(_X, spread_X.value)
    _WQ, _WK = (with_condition(W, spread_W.value) for W in (_WQ, _WK))
    share = score_bounds.efficiency(_X, _WQ, _WK, _G)
    guaranteed = score_bounds.efficiency_lower(_X, _WQ, _WK)
    mo.vstack(
        [
            bar_chart(
                [
                    {
                        "step": "guaranteed for the gradient",
                        "share of the best descent": guaranteed,
                    },
                    {"step": "plain gradient", "share of the best descent": share},
                    {"step": "best step", "share of the best descent": 1.0},
                ],
                "step",
                "share of the best descent",
                title="Predicted descent at the same change of the scores",
                y_range=(0, 1),
            ),
            claim(
                "SD-18",
                f"The plain gradient reaches **{share:.2f}** of the best descent. It is never better, and never below "
                rf"$2\sqrt\kappa/(1+\kappa) = {guaranteed:.3f}$, where $\kappa$ is the squared ratio of the largest to the smallest factor "
                "by which a step of the weights is stretched into a change of the scores.",
                guaranteed <= share <= 1.0,
            ),
        ]
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            The mixing desk. Turn the knobs by $p$ and $q$ degrees. The loudness of singer and piano changes by $a = 10p$ and $b = q$, and
            the trouble changes by $a + b$, since both matter equally. Allowed: $a^2 + b^2 \le 1$. On that circle $a + b$ is lowest at $a = b = -0.71$, where it
            is $-1.41$. Counting degrees instead, the trouble is $10p + q$, and the steepest turn goes in the direction $p : q = 10 : 1$, so
            $a : b = 100 : 1$. On the circle that is nearly $a = -1$, $b = -0.01$, with $a + b = -1.01$. This reaches only $1.01/1.41 = 71$ percent. The
            further apart the gears of the knobs, the worse.

            Why the shadow is best: among all arrows of length 1 that lie on the floor, the one that goes furthest along a slanted stick points along the shadow
            of the stick.""",
        undergraduate=r"""
            Let $J$ be the linear map $(dW_Q, dW_K) \mapsto X\,dW_Q K^\top + Q\,dW_K^\top X^\top$. Its range is $\{A K^\top + Q B^\top\}$ with the columns of $A, B$ in those of $X$.
            The maps $Z \mapsto P_X Z P_K$ and $Z \mapsto P_Q Z P_X$ are commuting orthogonal projections with product $Z \mapsto P_Q Z P_K$ (the columns of $Q$ and $K$ lie in those
            of $X$), so the projection onto the sum of their ranges is $\Pi$ above. For $dS$ in the range, $\langle G, dS\rangle = \langle \Pi(G), dS\rangle \ge -\gamma \|\Pi(G)\|$ by Cauchy-Schwarz, with
            equality exactly at $dS^*$.

            The gradient $dW = -J^\top G$ moves the scores by $-JJ^\top G$. With $M = JJ^\top$ restricted to its range and $g = \Pi(G)$ its share of the best is
            $\frac{\langle g, M g\rangle}{\|g\|\,\|M g\|}$. Kantorovich's inequality, for eigenvalues between $m$ and $\kappa m$, bounds it below by $\frac{2\sqrt\kappa}{1 + \kappa}$. It is 1 only if $g$ is an
            eigenvector of $M$.""",
        research=r"""
            In coordinates: with $C = X^\top X$, $U = C^{1/2}W_Q$, $Y = C^{1/2}W_K$ and $\hat G = C^{-1/2} T C^{-1/2}$ the problem is the projection of $\hat G$ onto $\{U B^\top + A Y^\top\}$. One choice of weights is
            $dW_Q = -c\,[C^{-1} - \frac12 W_Q (W_Q^\top C W_Q)^{-1} W_Q^\top]\,T W_K (W_K^\top C W_K)^{-1}$ and the mirror image for $dW_K$, $c = \gamma/\|\Pi(G)\|$; pseudo-inverses where singular. It is a
            Gauss-Newton step for the metric $J^\top J$, which has the kernel $(W_Q M, -W_K M^\top)$. For several sequences the metric is $\sum_b C_b \otimes (\cdot)_b$, which does not factor: conjugate
            gradients. The step is covariant under $(W_Q A, W_K A^{-\top})$; plain gradients, Adam and Muon are not. For a general norm of $dS$ the value is the dual norm of $G$ modulo the
            complement of the range. Details: `docs/maths/score_descent.md`.""",
    )
    return


@app.cell
def _(G, T, W_K, W_Q, X, raw_change, scores):
    _d, _k = W_Q.shape
    _moves = torch.eye(2 * _d * _k, dtype=torch.float64).reshape(-1, 2, _d, _k)
    dense = torch.stack([scores.linear(WeightMove(*m))[0].flatten() for m in _moves], 1)
    rank = int(torch.linalg.matrix_rank(dense))
    _U = torch.linalg.svd(dense, full_matrices=False)[0][:, :rank]
    brute = (_U @ (_U.T @ G.flatten())).view_as(G)
    reach = score_bounds.reachable_gradient(X, W_Q, W_K, G)
    Q, K = X @ W_Q, X @ W_K

    def onto(M):
        return M @ torch.linalg.pinv(M)

    formula = onto(Q) @ G @ onto(X) + onto(X) @ G @ onto(K) - onto(Q) @ G @ onto(K)
    gamma_small = 1e-4
    step = score_step(X, W_Q, W_K, G, gamma_small)
    double = score_step(X, W_Q, W_K, G, 2 * gamma_small)

    _values, _vectors = torch.linalg.eigh(X.T @ X)
    _half = _vectors * _values**-0.5 @ _vectors.T  # C^(-1/2)
    _root = _vectors * _values**0.5 @ _vectors.T
    white = _half @ T @ _half
    _PU, _PY = onto(_root @ W_Q), onto(_root @ W_K)
    white_value = (_PU @ white + white @ _PY - _PU @ white @ _PY).norm()

    C = X.T @ X
    _KK, _QQ = (torch.linalg.inv(W.T @ C @ W) for W in (W_K, W_Q))
    c_form_Q = -(torch.linalg.inv(C) - 0.5 * W_Q @ _QQ @ W_Q.T) @ T @ W_K @ _KK
    c_form_K = -(torch.linalg.inv(C) - 0.5 * W_K @ _KK @ W_K.T) @ T.T @ W_Q @ _QQ
    _XX = X @ X.T
    raw_formula = -(Q @ Q.T @ G @ _XX + _XX @ G @ K @ K.T)
    details(
        mo.md(
            "A formula is worth trusting when another way gives the same number. Here $n = 32$, "
            "$d = 16$, $k = 4$, and $G$ comes from a regression through attention."
        ),
        claim(
            "SD-06 SD-14 E87",
            r"The formula for $\Pi(G)$ agrees with a projection by brute force onto all "
            f"{2 * _d * _k} moves of the weights, and the step reaches $-\\gamma\\|\\Pi(G)\\|$.",
            torch.allclose(formula, brute, atol=1e-10)
            and torch.allclose(reach, brute, atol=1e-10)
            and torch.isclose(step.predicted, -gamma_small * reach.norm(), rtol=1e-4),
        ),
        claim(
            "SD-09",
            r"Twice the $\gamma$, twice the step: the problem for $\gamma$ is $\gamma$ times the problem for 1.",
            torch.allclose(double.dS / 2, step.dS, atol=1e-4 * gamma_small),
        ),
        claim(
            "SD-15",
            r"In whitened coordinates, in which $X^\top X$ becomes the identity, the same length comes out: "
            f"{white_value.item():.6f} and {reach.norm().item():.6f}.",
            torch.isclose(white_value, reach.norm(), rtol=1e-9),
        ),
        claim(
            "SD-16",
            r"The step of the weights has a closed form in $C = X^\top X$ and $T$; both halves take half of what both reach.",
            torch.allclose(scores.linear(WeightMove(c_form_Q, c_form_K))[0], -reach, atol=1e-9)
            and torch.allclose(step.dW_Q / step.dW_Q.norm(), c_form_Q / c_form_Q.norm(), atol=1e-9)
            and torch.allclose(step.dW_K / step.dW_K.norm(), c_form_K / c_form_K.norm(), atol=1e-9),
        ),
        claim(
            "SD-13",
            r"The raw step with the learning rate $\eta$ moves the scores by $-\eta\,(QQ^\top G XX^\top + XX^\top G KK^\top)$: squares of lengths stand where the best step has "
            "projections, so long directions count far too much.",
            torch.allclose(raw_change(X, W_Q, W_K, G), raw_formula, atol=1e-10),
        ),
        claim(
            "SD-19 E93",
            f"Of the {G.numel()} directions in the space of scores, {rank} are reachable: $k(2r - k)$ with $r = {_d}$ the *rank* of $X$ (how many of its columns are independent), "
            f"$k = {_k}$. Over *all* $dS$ the best value would be $-\\gamma\\|G\\|$; the reachable share of it is "
            f"{(reach.norm() / G.norm()).item():.2f}. So a best step must say over which set of changes it is the best.",
            rank == _k * (2 * _d - _k) == score_bounds.reachable_rank(X, W_Q, W_K)
            and reach.norm() < G.norm()
            and torch.linalg.matrix_rank(Q @ K.T) <= _k,
        ),
        title="The same step, four ways",
    )
    return dense, reach


@app.cell
def _(G, W_K, W_Q, X, problem, reach, scores, with_condition):
    unreachable = G - reach
    _blind = score_step(X, W_Q, W_K, unreachable, 0.3)
    _active = score_step(X, W_Q, W_K, G, 0.3)
    _gradient = scores.adjoint(unreachable[None])
    _flat_Q = W_Q.clone()
    _flat_Q[:, 3] = _flat_Q[:, 2]  # rank 3 instead of 4
    _flat = score_step(X, _flat_Q, W_K, G, 0.3)
    _damped = score_step(X, _flat_Q, W_K, G, 0.3, damping=0.01)
    _flat_rank = score_bounds.reachable_rank(X, _flat_Q, W_K)
    share_rows = []
    for _name, _size, _cond_X, _cond_W, _note in (
        ("16, 8, 2", (16, 8, 2), None, None, 0.68),
        ("16, 8, 4", (16, 8, 4), None, None, 0.61),
        ("64, 32, 8", (64, 32, 8), None, None, 0.66),
        ("64, 32, 8, X 10", (64, 32, 8), 10, None, 0.47),
        ("64, 32, 8, X 100", (64, 32, 8), 100, None, 0.28),
        ("64, 32, 8, W 10", (64, 32, 8), None, 10, 0.50),
        ("64, 32, 8, both 100", (64, 32, 8), 100, 100, 0.20),
    ):
        _shares = []
        for _seed in range(12):
            _X, _WQ, _WK, _G = problem(*_size, seed=_seed)
            _X = _X if _cond_X is None else with_condition(_X, _cond_X)
            if _cond_W is not None:
                _WQ, _WK = (with_condition(W, _cond_W) for W in (_WQ, _WK))
            _shares.append(score_bounds.efficiency(_X, _WQ, _WK, _G))
        share_rows.append(
            {
                "n, d, k": _name,
                "median share": median(_shares),
                "least": min(_shares),
                "largest": max(_shares),
                "expected": _note,
            }
        )
    orthonormal = []
    for _seed in range(12):
        _X, _WQ, _WK, _G = problem(64, 32, 8, seed=_seed)
        orthonormal.append(
            score_bounds.efficiency(*(torch.linalg.qr(M)[0] for M in (_X, _WQ, _WK)), _G)
        )
    details(
        mo.md(
            "The share of the best descent that it reaches, medians of 12 random draws; a number behind X or W is its condition "
            "number:"
        ),
        table([{key: r[key] for key in list(r)[:4]} for r in share_rows]),
        claim(
            "E87 SD-18",
            "About two thirds on random data, less where inputs or weights are lopsided. Orthonormal inputs and weights reach "
            f"{median(orthonormal):.3f}, not 1, since the gradient counts what both halves reach twice; the bound is "
            rf"$2\sqrt2/3 = {2 * 2**0.5 / 3:.4f}$.",
            all(
                abs(r["median share"] - r["expected"]) < 0.05 and r["largest"] < 1
                for r in share_rows
            )
            and min(orthonormal) >= 2 * 2**0.5 / 3
            and max(orthonormal) < 0.98,
        ),
        claim(
            "SD-08 E91",
            r"If $\Pi(G) = 0$, that is $T W_K = 0$ and $T^\top W_Q = 0$, no weight can lower the loss to first order and the step is 0. "
            r"Otherwise some $dS$ has $\langle G, dS\rangle < 0$ and the limit is used up: $\|dS\| = \gamma$. ($dS = 0$ always has "
            r"$\langle G, dS\rangle \le 0$, so that condition would say nothing.)",
            max(_gradient.Q.abs().max(), _gradient.K.abs().max()) < 1e-10
            and unreachable.norm() > 0.1
            and _blind.dS.norm() == 0
            and abs(_active.dS.norm().item() - 0.3) < 1e-9
            and _active.predicted < 0,
        ),
        claim(
            "E94",
            f"Weights without full rank leave fewer reachable directions ({_flat_rank} instead of {4 * (2 * 16 - 4)}) and no inverse. A "
            "*pseudo-inverse* (the inverse on what is reachable, 0 on the rest), or a damped solve, still gives a step of the right length.",
            _flat_rank < 4 * (2 * 16 - 4)
            and abs(_flat.dS.norm().item() - 0.3) < 1e-9
            and _flat.predicted < 0
            and torch.isfinite(_damped.dW_Q).all()
            and abs(_damped.dS.norm().item() - 0.3) < 1e-9
            and _damped.predicted < 0,
        ),
        title="What the plain gradient misses",
    )
    return


@app.cell
def _(G, W_K, W_Q, X, raw_change, scores):
    _gamma = 0.3
    full = raw_change(X, W_Q, W_K, G).norm().item()
    _gradient = scores.adjoint(G[None])
    _alpha = _gamma / full
    _linear = scores.linear(WeightMove(-_alpha * _gradient.Q, -_alpha * _gradient.K)).norm().item()
    literal = (_gamma / full) ** 0.5
    loop = [1.0]
    for _ in range(6):
        loop.append(_gamma / (loop[-1] * full))
    finite_lengths = []
    for _size in (0.1, 1.0, 10.0, 100.0):
        _step = score_step(X, W_Q, W_K, G, _size, solver="raw")
        _S = X @ (W_Q + _step.dW_Q) @ (W_K + _step.dW_K).T @ X.T - X @ W_Q @ W_K.T @ X.T
        finite_lengths.append(_S.norm().item() / _size)
    details(
        mo.md(r"""
    A direction is not yet a step. Stretch it by $\alpha$ so that the scores move by $\gamma$. The rule for $\alpha$ must not use the
    stretched step itself, or it is like a recipe that lists its own result among the ingredients.
    """),
        claim(
            "SD-12",
            r"Divide by the change of the *raw* direction, $\alpha = \gamma / \|J(\Delta W)\|$, with $J$ the linear part: then $\|J(\alpha \Delta W)\| = "
            f"{_linear:.4f}$, which is $\\gamma$.",
            abs(_linear - _gamma) < 1e-12,
        ),
        claim(
            "E86 PD-23",
            r"*Is the rule for the length circular?* (The third question of the top.) With the *stretched* step below the line, $\alpha = \gamma/\|J(\alpha \Delta W)\|$ has the solution $\sqrt{\gamma/\|J(\Delta W)\|}$: the scores move by "
            f"{literal * full:.3f} instead of {_gamma:g}. Computing it again and again alternates between two values and never settles.",
            abs(literal - _gamma / (literal * full)) < 1e-12
            and abs(literal * full - (_gamma * full) ** 0.5) < 1e-12
            and abs(literal * full / _gamma - 1) > 0.5
            and all(abs(a - loop[0]) < 1e-12 for a in loop[::2])
            and all(abs(a - loop[1]) < 1e-12 for a in loop[1::2])
            and loop[0] != loop[1],
        ),
        claim(
            "SD-21",
            r"`score_step` solves for the *finite* change, product term included: an equation of degree four in $\alpha$. From $\gamma = 0.1$ to 100 the scores "
            r"move by exactly $\gamma$.",
            all(abs(ratio - 1) < 1e-9 for ratio in finite_lengths),
        ),
        title="How long is a step?",
    )
    return


@app.cell
def _(G, W_K, W_Q, X, dense, draw, scores):
    M = draw(4, 4, generator=torch.Generator().manual_seed(5))
    gauge = WeightMove(W_Q @ M, -W_K @ M.T)
    gauge_linear, gauge_product = (f(gauge).norm().item() for f in (scores.linear, scores.bilinear))
    _exact = score_step(X, W_Q, W_K, G, 0.3)
    least = remove_gauge(W_Q, W_K, _exact.dW_Q, _exact.dW_K)
    _raw = score_step(X, W_Q, W_K, G, 0.3, solver="raw")
    _raw_least = remove_gauge(W_Q, W_K, _raw.dW_Q, _raw.dW_K)
    long_norm = torch.stack([_exact.dW_Q, _exact.dW_K]).norm().item()
    least_norm = torch.stack(least).norm().item()
    _target = scores.linear(WeightMove(_exact.dW_Q, _exact.dW_K))[0].flatten()
    by_pinv = torch.linalg.lstsq(dense, _target[:, None], driver="gelsd").solution.norm().item()
    _A, _B = W_Q.T @ W_Q, W_K.T @ W_K
    _right = _exact.dW_K.T @ W_K - W_Q.T @ _exact.dW_Q
    _I = torch.eye(4, dtype=torch.float64)
    _M = torch.linalg.solve(
        torch.kron(_I, _A) + torch.kron(_B.T.contiguous(), _I), _right.T.flatten()
    ).view(4, 4)
    _M = _M.T
    sylvester = (_exact.dW_Q + W_Q @ _M, _exact.dW_K - W_K @ _M.T)
    remainders = []
    for _size in (0.01, 0.1, 1.0):
        _s = score_step(X, W_Q, W_K, G, _size, gauge="least")
        _dW = WeightMove(_s.dW_Q, _s.dW_K)
        remainders.append(
            {
                "gamma": f"{_size:g}",
                "product term": scores.bilinear(_dW).norm().item(),
                "its bound": score_bounds.remainder_upper(
                    X, W_Q, W_K, scores.linear(_dW).norm().item()
                ),
            }
        )
    details(
        mo.md(r"""
    Turn two gears that mesh, one forward and one back: nothing behind them moves. Weights have such moves as well. For
    any $k$ by $k$ matrix $M$, adding $W_Q M$ to the queries and $-W_K M^\top$ to the keys leaves all scores as they are,
    to first order. Physicists call this a *gauge*. Among all steps with the same effect one is shortest.
    """),
        claim(
            "SD-17",
            r"The shortest one has $M$ from $(W_Q^\top W_Q) M + M (W_K^\top W_K) = dW_K^\top W_K - W_Q^\top dW_Q$. It shortens the exact step from "
            f"{long_norm:.4f} to {least_norm:.4f}, the length of the pseudo-inverse solution, and leaves the raw step as it is.",
            least_norm < long_norm
            and abs(least_norm / by_pinv - 1) < 1e-8
            and all(torch.allclose(a, b, atol=1e-10) for a, b in zip(sylvester, least, strict=True))
            and torch.allclose(_raw_least.Q, _raw.dW_Q, atol=1e-12),
        ),
        table(remainders),
        claim(
            "E89 SD-05 PD-23",
            "*When may the product term be dropped?* (The first question of the top.) Along a gauge move the linear part is "
            f"{gauge_linear:.0e} and the product term {gauge_product:.1f}: there it is all there is. For a step without a gauge part it is "
            r"at most $\|X\|_2^2\gamma^2/(2s^2)$, with $\|X\|_2$ the largest factor by which $X$ stretches an arrow and $s$ the smallest factor other than 0 by which a step of the weights becomes a change of the scores, so it vanishes faster than $\gamma$.",
            gauge_linear < 1e-11
            and gauge_product > 0.1
            and all(r["product term"] <= r["its bound"] for r in remainders),
        ),
        title="Moves that change nothing",
    )
    return


@app.cell
def _():
    gamma_slider = mo.ui.slider(
        steps=[0.1, 0.3, 1.0, 3.0, 10.0],
        value=1.0,
        label=r"Allowed change $\gamma$",
        show_value=True,
    )
    mo.vstack(
        [
            mo.md(r"""
    ## How small must the step be?

    A slope on a map is honest for a short walk. *How far may one trust $\langle G, dS\rangle$?* On a real
    loss, a regression through attention, compare the decrease that is predicted, $\gamma\,\|\Pi(G)\|$, with the one that happens.
    """),
            gamma_slider,
        ]
    )
    return (gamma_slider,)


@app.cell
def _(regression):
    gammas = [0.1, 0.3, 1.0, 3.0, 10.0]
    trust = {name: [] for name in ("exact", "raw")}
    for _seed in range(10):
        _X, _WQ, _WK, _loss, _G = regression(_seed)
        _S = _X @ _WQ @ _WK.T @ _X.T
        _slope = score_bounds.reachable_gradient(_X, _WQ, _WK, _G).norm()
        for _name in ("exact", "raw"):
            _dS = [score_step(_X, _WQ, _WK, _G, g, solver=_name).dS for g in gammas]
            trust[_name].append(
                [
                    ((_loss(_S) - _loss(_S + m)) / (g * _slope)).item()
                    for g, m in zip(gammas, _dS, strict=True)
                ]
            )
    trust = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in trust.items()}
    return gammas, trust


@app.cell
def _(gamma_slider, gammas, trust):
    _at = gammas.index(gamma_slider.value)
    medians = {name: shares.median(0).values.tolist() for name, shares in trust.items()}
    gains = (trust["exact"] / trust["raw"])[:, 0]
    mo.vstack(
        [
            line_chart(
                [
                    {"gamma": g, "true over predicted decrease": value, "step": name}
                    for name in ("exact", "raw")
                    for g, value in zip(gammas, medians[name], strict=True)
                ],
                "gamma",
                "true over predicted decrease",
                "step",
                title="True decrease over the best predicted one, medians of ten draws",
                here=[
                    {"gamma": gamma_slider.value, "true over predicted decrease": each[_at]}
                    for each in medians.values()
                ],
                log_x=True,
                points=True,
            ),
            mo.md(
                f"At $\\gamma = {gamma_slider.value:g}$ the exact step delivers **{medians['exact'][_at]:.3f}** of what was predicted, and the raw "
                f"step of the same length {medians['raw'][_at]:.3f}."
            ),
            claim(
                "SD-07 E90 PD-23",
                f"The ratio falls from {medians['exact'][0]:.3f} to {medians['exact'][2]:.2f}, {medians['exact'][3]:.2f} and {medians['exact'][4]:.2f} "
                r"at $\gamma$ = 0.1, 1, 3, 10. Short steps keep their promise; compare true with predicted to choose the length.",
                (trust["exact"].diff(dim=1) < 0).all()
                and all(
                    abs(value - known) < 0.03
                    for value, known in zip(
                        (medians["exact"][i] for i in (0, 2, 3, 4)),
                        (0.997, 0.97, 0.91, 0.68),
                        strict=True,
                    )
                ),
            ),
            details(
                claim(
                    "E87",
                    f"At $\\gamma = 0.1$ the exact step lowers the true loss {gains.min().item():.2f} to {gains.max().item():.2f} times as much as the raw one.",
                    gains.min() > 1.2 and gains.max() < 2.0,
                ),
            ),
        ]
    )
    return


@app.cell
def _(W_K, W_Q, X, draw, scores):
    b = 0.7
    _S = X @ W_Q @ W_K.T @ X.T
    _goal = _S + draw(*_S.shape, generator=torch.Generator().manual_seed(2))
    bowl_G = b * (_S - _goal)
    bowl_reach = score_bounds.reachable_gradient(X, W_Q, W_K, bowl_G)
    limits = score_bounds.gamma_bounds(X, W_Q, W_K, bowl_G, smoothness=b, tau=0.1)

    def fall(size):
        dS = -size * bowl_reach / bowl_reach.norm()
        return (0.5 * b * ((_S - _goal).square().sum() - (_S + dS - _goal).square().sum())).item()

    _slope = bowl_reach.norm().item()
    _grid = [share * limits.largest for share in (0.1, 0.3, 0.5, 0.7, 0.9, 1.1)]
    _falls = [fall(size) for size in _grid]
    _step = score_step(X, W_Q, W_K, bowl_G, limits.bilinear, gauge="least")
    product_share = (
        scores.bilinear(WeightMove(_step.dW_Q, _step.dW_K)).norm() / limits.bilinear
    ).item()
    mo.vstack(
        [
            details(
                claim(
                    "E90",
                    r"If the gradient of the loss changes by at most $b$ per unit of score, the decrease is at least $\gamma\|\Pi(G)\| - b\gamma^2/2$: any "
                    r"$\gamma < 2\|\Pi(G)\|/b$ lowers the loss, and $\|\Pi(G)\|/b$ is best for the bound. A round bowl attains it: "
                    f"with $b = {b:g}$ the best $\\gamma$ is {limits.best:.2f}, and at {_grid[-1]:.2f} the loss rises.",
                    all(
                        abs(f - (size * _slope - b * size**2 / 2)) < 1e-9 * abs(_falls[2])
                        and f >= score_bounds.decrease_lower(_slope, b, size)
                        for f, size in zip(_falls, _grid, strict=True)
                    )
                    and max(_falls) == _falls[2]
                    and all(f > 0 for f in _falls[:-1])
                    and _falls[-1] < 0,
                ),
                claim(
                    "E90 E89",
                    rf"And $\gamma \le 2\tau s^2/\|X\|_2^2 = {limits.bilinear:.3g}$ keeps the product term below $\tau = 0.1$ of the step; it is {product_share:.1e}.",
                    product_share <= 0.1,
                ),
            ),
            mo.md(r"""
    ## Three questions, three answers

    | question | answer |
    | :--- | :--- |
    | When is the product term negligible? | Off the gauge, where it is of order $\gamma^2$. Along the gauge, never. |
    | How small must $\gamma$ be? | Below $2\lVert\Pi(G)\rVert/b$ for a loss with smoothness $b$; in practice, until true and predicted decrease agree. |
    | Is the rule for the length circular? | Not with the raw direction below the line. |
    """),
        ]
    )
    return


@app.cell
def _(draw):
    def train(seed, gamma=0.5, steps=40):
        """Losses of three optimisers of the same length of steps, on one fit of attention."""
        g = torch.Generator().manual_seed(seed)
        n, d, k = 24, 12, 3
        X = draw(n, d, generator=g) * torch.logspace(0, -1, d, dtype=torch.float64) * 2 / d**0.5
        V = draw(n, 8, generator=g)
        goal_Q, goal_K, first_Q, first_K = (draw(d, k, generator=g) for _ in range(4))
        Y = (X @ goal_Q @ goal_K.T @ X.T).softmax(-1) @ V

        def loss(S):
            return 0.5 * (S.softmax(-1) @ V - Y).square().sum() / n

        histories = {}
        for name in ("gradient", "Adam", "score descent"):
            W_Q, W_K, history = first_Q, first_K, []
            m = v = torch.zeros(2, d, k, dtype=torch.float64)
            for t in range(1, steps + 1):
                G, value = torch.func.grad_and_value(loss)(X @ W_Q @ W_K.T @ X.T)
                history.append(value.item())
                moves = ScoreMap(X[None], W_Q, W_K)
                gradient = torch.stack(moves.adjoint(G[None]))
                m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
                if name == "score descent":
                    step = score_step(X, W_Q, W_K, G, gamma)
                    dW = WeightMove(step.dW_Q, step.dW_K)
                elif name == "Adam":
                    dW = WeightMove(*-(m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-12))
                else:
                    dW = WeightMove(*-gradient)
                a = step_length(moves.linear(dW), moves.bilinear(dW), gamma)
                W_Q, W_K = W_Q + a * dW.Q, W_K + a * dW.K
            histories[name] = history
        return histories

    trained = [train(seed) for seed in range(5)]
    return (trained,)


@app.cell
def _(trained):
    mo.vstack(
        [
            mo.md(r"""
    ## As an optimiser

    `fenchel.ScoreDescent` does this for every head of a model; its learning rate *is* $\gamma$, as a root mean square over
    the scores. Here is the idea alone: attention learns to imitate a teacher, and each of three optimisers moves the scores by
    the same $\gamma = 0.5$ per step.
    """),
            line_chart(
                [
                    {"step": i, "loss": value, "optimiser": name}
                    for name, history in trained[0].items()
                    for i, value in enumerate(history)
                ],
                "step",
                "loss",
                "optimiser",
                title="Loss at equal change of the scores, first of five draws",
            ),
            claim(
                "SD-20",
                "In all five draws score descent ends lowest; its last loss is "
                + ", ".join(
                    f"{h['score descent'][-1] / min(h['gradient'][-1], h['Adam'][-1]):.2f}"
                    for h in trained
                )
                + " of the better of the other two.",
                all(
                    h["score descent"][-1] < min(h["gradient"][-1], h["Adam"][-1]) for h in trained
                ),
            ),
        ]
    )
    return


@app.cell
def _(draw, problem):
    # X is square and invertible, and only the queries move: dS = A K^T with any A.
    _X, _WQ, _WK, _G = problem(5, 5, 2, seed=3)
    _K = _X @ _WK
    _seen = _G @ _K @ torch.linalg.pinv(_K)
    rows_best = -_seen / _seen.norm(dim=1, keepdim=True)
    _U, _s, _Vh = torch.linalg.svd(_seen, full_matrices=False)
    spectral_best = -_U[:, :2] @ _Vh[:2]
    _rivals = draw(2000, 5, 2, generator=torch.Generator().manual_seed(0)) @ _K.T
    _values = (_rivals * _G).sum((1, 2))
    rival_rows = (_values / _rivals.norm(dim=2).amax(1)).min()
    rival_spectral = (_values / torch.linalg.matrix_norm(_rivals, 2)).min()

    # Two sequences and a causal mask: conjugate gradients against dense least squares.
    _g = torch.Generator().manual_seed(11)
    _XB = draw(2, 6, 4, generator=_g)
    _GB, _VQ, _VK = (draw(*s, generator=_g) for s in ((2, 6, 6), (4, 2), (4, 2)))
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    _step = score_step(_XB, _VQ, _VK, _GB, 1e-3, solver="cg", mask=causal)
    _map = ScoreMap(_XB, _VQ, _VK, causal.expand(2, 6, 6))
    _basis = torch.eye(16, dtype=torch.float64).reshape(-1, 2, 4, 2)
    _J = torch.stack([_map.linear(WeightMove(*m)).flatten() for m in _basis], 1)
    _target = -(_GB * causal).flatten()[:, None]
    _fit = (_J @ torch.linalg.lstsq(_J, _target, driver="gelsd").solution).view(2, 6, 6)
    batched = 1e-3 * _fit / _fit.norm()
    details(
        mo.md(r"""
    "How far the scores move" can be measured otherwise, and each measure has its own best step, as a taxi and a bird have different
    shortest ways. $\|\cdot\|$ was the Frobenius norm, which fits $\langle\cdot,\cdot\rangle$.
    """),
        claim(
            "SD-22",
            r"Let $\gamma = 1$, let only the queries move, and let $X$ be invertible. With the *largest row* limited, every row goes its own way, with value "
            f"$-\\sum_i \\|(G P_K)_i\\| = {(_G * rows_best).sum().item():.3f}$; with the *spectral norm* (the largest stretch) limited, the value is minus the sum of the singular "
            f"values of $G P_K$, {(_G * spectral_best).sum().item():.3f}. The best of 2,000 random rivals reach {rival_rows.item():.3f} and "
            f"{rival_spectral.item():.3f}. With both halves neither has a closed form.",
            torch.isclose((_G * rows_best).sum(), -_seen.norm(dim=1).sum())
            and torch.isclose((_G * spectral_best).sum(), -_s.sum())
            and torch.allclose(rows_best @ torch.linalg.pinv(_K.T) @ _K.T, rows_best)
            and torch.allclose(spectral_best @ torch.linalg.pinv(_K.T) @ _K.T, spectral_best)
            and torch.linalg.matrix_norm(spectral_best, 2) <= 1 + 1e-12
            and rival_rows >= (_G * rows_best).sum()
            and rival_spectral >= (_G * spectral_best).sum(),
        ),
        claim(
            "SD-23 E92",
            "Several sequences share the weights, and a mask takes scores out of sums and norms. Then there is no closed form; conjugate "
            "gradients, which solve linear equations by repeated products, find the step that dense least squares confirms, and masked entries stay 0.",
            torch.allclose(_step.dS, batched, atol=1e-6)
            and (_step.dS[:, ~causal] == 0).all()
            and abs(_step.dS.norm().item() - 1e-3) < 1e-9,
        ),
        title="Other limits, many sequences, masks",
    )
    return


@app.cell
def _():
    def check(names):
        best = names["best"]
        g = torch.Generator().manual_seed(1)
        X, W_Q, W_K, G = (
            torch.randn(*s, dtype=torch.float64, generator=g)
            for s in ((10, 6), (6, 2), (6, 2), (10, 10))
        )
        found = best(X, W_Q, W_K, G)
        assert torch.is_tensor(found), "Return a tensor."
        assert found.shape == G.shape, "Return a 10 by 10 tensor."
        expected = score_bounds.reachable_gradient(X, W_Q, W_K, G)
        again = best(X, W_Q, W_K, found)
        assert torch.allclose(again, found, atol=1e-9), (
            "Not a projection: the shadow of a shadow must be the shadow itself. Which part do queries and keys both reach?"
        )
        assert torch.allclose(found, expected, atol=1e-9), (
            "A projection, but onto another space: are both halves in it?"
        )

    exercise = Exercise(
        lesson="score_descent",
        task=r"Write `best(X, W_Q, W_K, G)`: the projection $\Pi(G)$ of $G$ onto the reachable changes of the scores.",
        starter="""
    def onto(M):
        return M @ torch.linalg.pinv(M)      # projects onto the columns of M

    def best(X, W_Q, W_K, G):
        P_X, P_Q, P_K = onto(X), onto(X @ W_Q), onto(X @ W_K)
        return P_Q @ G @ P_X + P_X @ G @ P_K
    """,
        solution="""
    def onto(M):
        return M @ torch.linalg.pinv(M)      # projects onto the columns of M

    def best(X, W_Q, W_K, G):
        P_X, P_Q, P_K = onto(X), onto(X @ W_Q), onto(X @ W_K)
        return P_Q @ G @ P_X + P_X @ G @ P_K - P_Q @ G @ P_K   # what both reach counts once
    """,
        check=check,
    )
    form = exercise.form()
    form
    return exercise, form


@app.cell
def _(exercise, form):
    exercise.verdict(form.value)
    return


@app.cell
def _():
    picker = run_picker()
    picker
    return (picker,)


@app.cell
def _(picker):
    run_path = picker.value
    return (run_path,)


@app.cell
def _(run_path):
    mo.stop(run_path is None, no_run())
    own = fenchel.load(run_path, dtype=torch.float32)
    own_ids = torch.tensor([own.tokenizer.encode_whole("the people of the united states")])
    own_ids = own_ids[:, : own.config.context]
    own_pairs = fenchel.attention_pairs(own.model)
    optimiser = fenchel.ScoreDescent(own_pairs, lr=0.2, radius=1e6)

    def own_scores():
        calls = []
        with torch.no_grad():
            own.model(own_ids, attention_override=lambda _, call: calls.append(call))
        return [
            call.spec.scale_for(call.q.shape[-1])
            * call.q[0]
            @ call.k[0].repeat_interleave(call.q.shape[1] // call.k.shape[1], 0).mT
            for call in calls
        ]

    own_loss = torch.nn.functional.cross_entropy(own.model(own_ids)[0, :-1].float(), own_ids[0, 1:])
    own_loss.backward()
    before = own_scores()
    seen_pairs = torch.ones(before[0].shape[-2:], dtype=torch.bool).tril()
    plain = []
    for _layer, _pair in enumerate(own_pairs):
        _both = [(side, side.values(), side.gradient()) for side in (_pair.query, _pair.key)]
        for _side, _values, _gradient in _both:
            _side.write(_values - 0.1 * _gradient)
        _moved = (own_scores()[_layer] - before[_layer])[:, seen_pairs]
        plain += _moved.square().mean(-1).sqrt().tolist()
        for _side, _values, _ in _both:
            _side.write(_values)
    optimiser.step()
    own_stats = optimiser.score_stats()
    optimiser.close()
    steered = torch.cat([stats.rms_change for stats in own_stats.values()]).tolist()
    scale = 0.2 / median(plain)
    mo.vstack(
        [
            mo.md(
                "One step on your model, on *the people of the united states*, and how far the scores of each head move (root mean "
                "square). The plain gradient, scaled so that its median head moves by 0.2, moves some heads more than others. Score descent "
                "moves each by its learning rate."
            ),
            bar_chart(
                [
                    {"head": str(i + 1), "change of its scores": value, "step": name}
                    for i, pair in enumerate(zip(plain, steered, strict=True))
                    for name, value in (("gradient", scale * pair[0]), ("score descent", pair[1]))
                ],
                "head",
                "change of its scores",
                "step",
                title="How far one step moves the scores of your heads",
            ),
            claim(
                "SD-20 SD-21",
                f"Score descent with the rate 0.2 moves the scores of your {len(steered)} heads by {min(steered):.3f} to {max(steered):.3f}; the gradient "
                f"spreads over a factor of {max(plain) / max(min(plain), 1e-30):.1f}.",
                all(
                    abs(value - 0.2) < 0.01 or bool(capped)
                    for value, capped in zip(
                        steered,
                        torch.cat([stats.capped for stats in own_stats.values()]),
                        strict=True,
                    )
                ),
            ),
        ]
    )
    return (own,)


@app.cell
def _():
    what_breaks(
        r"The closed form needs one sequence, no mask and scores that are products of linear maps. Rotary positions, norms of queries and keys "
        r"and batches break it; the optimisers then use an approximate direction and measure the length. And steepest is a statement about one "
        r"batch: with noisy batches more descent per step is not always faster training; whitening by the inputs also amplifies directions with little signal, which is why `ScoreDescent` damps it."
    )
    return


@app.cell
def _():
    footer("score_descent")
    return


if __name__ == "__main__":
    app.run()
