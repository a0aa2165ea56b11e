"""Sparse choices: entmax, sparsemax, hard and capped, beside softmax."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Sparse choices: entmax, sparsemax, hard",
)

with app.setup:
    from itertools import pairwise

    import marimo as mo
    import torch

    import fenchel
    from fenchel.attention import linear_attend
    from fenchel.choice import reverse_kl
    from fenchel.lessons.scene import Scene
    from fenchel.lessons.widgets import (
        Exercise,
        answer,
        bar_chart,
        claim,
        details,
        footer,
        header,
        heat_chart,
        line_chart,
        no_run,
        proof,
        question,
        run_picker,
        table,
        what_breaks,
    )


@app.cell
def _():
    header("sparse_choice")
    return


@app.cell
def _():
    guess = question(
        "A map turns scores into weights, and some weights come out exactly 0. Can such a map be trained by its gradient?",
        [
            "no: where a weight is 0 the gradient is lost",
            "yes: the derivative exists and is exact",
            "only with a trick, such as a smooth copy for the gradient",
        ],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "yes: the derivative exists and is exact",
        "A weight of 0 has the derivative 0, and rightly so: a small change of its score does not lift it. The other weights have an "
        "ordinary derivative. What cannot be trained is the hard choice, whose derivative is 0 for *every* weight.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Land above the sea

    Six scores are six mountains in the sea. Set the sea level so that in total exactly one unit of height is left above the water. What is above it
    is the weight of each mountain; what lies below has the weight 0. This is *sparsemax*:

    $$p_i = \max(z_i - \tau,\ 0), \qquad \sum_i p_i = 1,$$

    with $z_i$ the score and $\tau$ (tau) the sea level. Softmax has no sea: each mountain counts with $e^{z_i}$, however low. Between the two
    lies a family, *entmax*, with an exponent $\alpha$ (alpha): raise the height above the water to a power,

    $$p_i = \max\big((\alpha - 1)\, z_i - \tau,\ 0\big)^{1/(\alpha - 1)} .$$

    $\alpha = 2$ is sparsemax, and $\alpha \to 1$ leads to softmax. Multiplying the scores by $\beta$ makes the mountains steeper. The alternatives
    with a positive weight are the *support*.
    """)
    return


@app.cell
def mountains_and_sea():
    _start = {"A": 2.0, "B": 1.6, "C": 1.0, "D": 0.4, "E": -0.5, "F": -2.0}
    islands = Scene(
        "mountains_and_sea", {**_start, "map": "sparsemax", "beta": 1.0, "sea": "settled"}
    )
    mo.vstack(
        [
            mo.md(
                "*Pull the sea down and up by its ring: at which level is the sum 1? Let it settle, and lift mountain C out of the water: "
                "who pays for it? Then compare the three maps.*"
            ),
            islands,
        ]
    )
    return (islands,)


@app.cell
def _():
    z = torch.tensor([2.0, 1.6, 1.0, 0.4, -0.5, -2.0], dtype=torch.float64)
    names = ["A", "B", "C", "D", "E", "F"]

    def entmax(alpha, beta=1.0):
        return fenchel.Softmax(beta) if alpha == 1 else fenchel.Entmax(alpha, beta)

    return entmax, names, z


@app.cell
def _(entmax, islands, names, z):
    alpha = {"softmax": 1.0, "entmax": 1.5, "sparsemax": 2.0}[islands.state["map"]]
    beta = islands.state["beta"]
    choice = entmax(alpha, beta)
    p = choice.weights(z)
    peaks = torch.tensor([islands.state[n] for n in names], dtype=torch.float64)
    _p = choice.weights(peaks)
    on = _p > 0
    # The sea level, from each weight above it.
    heights = _p[on].log() if alpha == 1 else _p[on] ** (alpha - 1)
    level = max(alpha - 1, float(alpha == 1)) * beta * peaks[on] - heights
    supports = [int((entmax(a, beta).weights(peaks) > 0).sum()) for a in (1.0, 1.25, 1.5, 2.0, 3.0)]
    by_beta = [int((entmax(alpha, b).weights(peaks) > 0).sum()) for b in (0.1, 0.3, 1.0, 3.0, 10.0)]
    _order = peaks.argsort(descending=True)
    mo.vstack(
        [
            claim(
                "SM-26",
                f"The weights are {', '.join(f'{w:.3f}' for w in _p.tolist())}. One sea level explains them all, and the four conditions of optimality ([Lagrange](../lagrange/)) hold: the weights maximise average score minus "
                r"$\Omega(p)/\beta$, where $\Omega(p) = \sum_i (p_i^\alpha - p_i) / (\alpha (\alpha - 1))$ is the *entropy of Tsallis* with its sign reversed, "
                r"for $\alpha \to 1$ the usual $\sum_i p_i \log p_i$.",
                torch.allclose(level, level[0].expand_as(level), atol=1e-8)
                and max(fenchel.kkt(choice, peaks, _p)) < 1e-8,
            ),
            claim(
                "SM-26",
                f"The support consists of the best scores. At this $\\beta$ it has {', '.join(map(str, supports))} members for "
                f"$\\alpha$ = 1, 1.25, 1.5, 2, 3; at this $\\alpha$, {', '.join(map(str, by_beta))} for $\\beta$ = 0.1, 0.3, 1, 3, 10. It never grows as either rises.",
                bool((_p[_order][:-1] >= _p[_order][1:]).all())
                and all(a >= b for a, b in pairwise(supports))
                and all(a >= b for a, b in pairwise(by_beta)),
            ),
        ]
    )
    return alpha, beta, choice, p


@app.cell
def _():
    proof(
        school=r"""
            Why is sparsemax the best division under the cost $\frac12 \sum p_i^2$? Move a little weight $\varepsilon$ from B to A. The score gains
            $\varepsilon (z_A - z_B)$. The cost rises by $\frac12 (p_A + \varepsilon)^2 - \frac12 p_A^2 + \frac12 (p_B - \varepsilon)^2 - \frac12 p_B^2 =
            \varepsilon (p_A - p_B) + \varepsilon^2$. If both have weight, no small move helps in either direction, so $z_A - p_A = z_B - p_B$: the same
            number for all, the sea level $\tau$. If B has no weight, only moves *to* B are possible, and they do not help if
            $z_B \le z_A - p_A = \tau$: B is below the sea. How low must B be? With A alone in the support $p_A = 1$ and $\tau = z_A - 1$: one point below the
            best is enough.

            And no rival $q$ does better, near or far. Its total differs from that of $p$ by $\sum (q_i - p_i) z_i - \frac12 \sum (q_i^2 - p_i^2) =
            \sum (q_i - p_i)(z_i - p_i) - \frac12 \sum (q_i - p_i)^2$. In the support $z_i - p_i = \tau$; below the sea $z_i - p_i \le \tau$ and
            $q_i - p_i \ge 0$. So the first sum is at most $\tau \sum (q_i - p_i) = \tau (1 - 1) = 0$, and the second only takes off.""",
        undergraduate=r"""
            KKT: $\omega'(p_i) = \beta z_i - \nu + \mu_i$ with $\mu_i \ge 0$, $\mu_i p_i = 0$ and $\omega'(p) = \frac{p^{\alpha-1} - 1}{\alpha-1} + \frac1\alpha$, which is
            finite at 0 for $\alpha > 1$; solving gives the formula. Sort the scores. Alternative $k$ is in the support exactly if at the sea level
            $(\alpha-1)\beta z_k$ the better ones hold less than 1: $\sum_{j<k} (d_j/r)^r < 1$ with $d_j = \beta(z_j - z_k)$, $r = \frac1{\alpha - 1}$. Each term has
            $d_j < r$, and $r \mapsto r\log(d/r)$ has the derivative $\log(d/r) - 1 < 0$: a smaller $r$ (larger $\alpha$) or a larger $\beta$ only increases the sum, so
            the support never grows. For a single best score it is alone as soon as the others are $\frac{1}{\beta(\alpha - 1)}$ below.""",
        research=r"""
            Sparsemax is the Euclidean projection onto the simplex (Martins and Astudillo 2016); entmax with $\alpha = 1.5$ has a closed solution after sorting
            (Peters, Niculae and Martins 2019). The Jacobian has rank (size of support $-$ 1), is symmetric, and is the Hessian of the conjugate
            $\Omega^*$; where the support changes, $\Omega^*$ is $C^1$ but for $\alpha \ge 2$ not $C^2$. For $1 < \alpha \le 2$ the global $\ell_2$ constant is
            $\beta$ times the larger of $2^{\alpha-2}$ and a value that tends to 1 with the number of alternatives; above 2 three alternatives suffice for
            an unbounded derivative. Derivations: docs/maths/choice.md.""",
    )
    return


@app.cell
def _(z):
    worked = fenchel.Sparsemax().weights(torch.tensor([1.0, 0.8, -3.0], dtype=torch.float64))
    _drawn = torch.empty(5000, 6, dtype=torch.float64)
    _drawn.exponential_(generator=torch.Generator().manual_seed(0))
    _rivals = _drawn / _drawn.sum(-1, keepdim=True)
    nearest = fenchel.Sparsemax().weights(z)
    _near_soft = (
        (fenchel.Entmax(1.0001).weights(z) - fenchel.Softmax().weights(z)).abs().max().item()
    )
    prices = {
        "softmax": fenchel.choice.multipliers(
            fenchel.Softmax(), z, fenchel.Softmax().weights(z)
        ).floor,
        "sparsemax": fenchel.choice.multipliers(fenchel.Sparsemax(), z, nearest).floor,
    }
    mo.vstack(
        [
            details(
                claim(
                    "SM-26",
                    f"Scores 1, 0.8, -3 give {', '.join(f'{w:.1f}' for w in worked.tolist())}, sea level 0.4. Sparsemax is entmax at $\\alpha = 2$, and the "
                    "distribution nearest to the scores in ordinary distance: none of 5,000 random ones is nearer. At $\\alpha = 1.0001$ entmax differs from "
                    f"softmax by {_near_soft:.0e}.",
                    torch.allclose(worked, torch.tensor([0.6, 0.4, 0.0], dtype=torch.float64))
                    and torch.allclose(fenchel.Entmax(2.0).weights(z), nearest)
                    and ((_rivals - z).norm(dim=-1) >= (nearest - z).norm()).all()
                    and _near_soft < 1e-3,
                ),
                claim(
                    "SM-33",
                    "Seen as constraints $p_i \\ge 0$: under softmax none pushes. Under sparsemax each alternative below the sea is held at 0 by a push as "
                    f"large as its depth: {', '.join(f'{m:.2f}' for m in prices['sparsemax'].tolist())}.",
                    (prices["softmax"].abs() < 1e-9).all()
                    and torch.allclose(
                        prices["sparsemax"],
                        ((z[0] - nearest[0]) - z).clamp(min=0.0),
                        atol=1e-9,
                    )
                    and torch.equal(prices["sparsemax"] > 1e-9, nearest == 0),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## The derivative lives on the support

    Push mountain A up by a little. Only one unit of land may stay above the water, so the sea rises and every other island shrinks; mountains below the
    water stay at 0. In formulas, with $s_i = p_i^{2 - \alpha}$ on the support and $s_i = 0$ off it, the *Jacobian* (the table of all derivatives
    $\partial p_i / \partial z_j$) is

    $$J = \beta \Big(\mathrm{diag}(s) - \frac{s\, s^\top}{\sum_i s_i}\Big).$$

    $\mathrm{diag}(s)$ has $s$ on its diagonal, and $s\,s^\top$ has the entries $s_i s_j$. For softmax $s = p$; for sparsemax $s_i = 1$ on the support. The table below belongs to the map and the $\beta$ that you chose above, and to the scores 2, 1.6, 1, 0.4, -0.5, -2.
    """)
    return


@app.cell
def _(alpha, beta, choice, names, p, z):
    J = torch.func.jacrev(choice.weights)(z)
    s = torch.where(p > 0, p ** (2.0 - alpha), 0.0)
    by_hand = beta * (torch.diag(s) - torch.outer(s, s) / s.sum())
    _tiny = 1e-6
    _nudge = torch.eye(6, dtype=torch.float64) * _tiny
    measured = torch.stack(
        [(choice.weights(z + e) - choice.weights(z - e)) / (2 * _tiny) for e in _nudge], -1
    )
    mo.vstack(
        [
            heat_chart(
                J,
                title="How each weight follows each score",
                of="slope",
                rows=names,
                columns=names,
                axes=("weight of", "score of"),
            ),
            claim(
                "SM-26",
                f"Automatic differentiation, the formula and a measured difference agree to {(J - measured).abs().max().item():.0e}. Rows and columns off "
                f"the support are exactly 0; the largest eigenvalue, the strongest reaction to a change of the scores of length 1, is {choice.sensitivity(p).item():.3f}.",
                torch.allclose(J, by_hand, atol=1e-9)
                and (J - measured).abs().max() < 1e-4
                and (J[p == 0] == 0).all()
                and (J[:, p == 0] == 0).all()
                and torch.isclose(choice.sensitivity(p), torch.linalg.eigvalsh(J).max(), atol=1e-9),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Hard: the limit, and a dead end for gradients

    The winner takes all: this is the hard choice, *argmax*. A stairway has slope 0 on every step and a jump between them. A ball on a step does not
    roll, however far down the next one is. So it is with the hard choice: its derivative is 0 almost everywhere, and training gets no signal. Divide the scores by a
    *temperature* $T = 1/\beta$ and let it fall: every map above ends there, if one score is the best.
    """)
    return


@app.cell
def _():
    _leads = torch.linspace(-2.0, 2.0, 81, dtype=torch.float64)
    _pairs = torch.stack([_leads, torch.zeros_like(_leads)], -1)
    _maps = {
        "softmax": fenchel.Softmax(),
        "softmax, T = 0.1": fenchel.Softmax(10.0),
        "sparsemax": fenchel.Sparsemax(),
        "hard": fenchel.Hard(),
    }
    line_chart(
        [
            {"lead of A over B": x, "weight of A": w, "map": name}
            for name, each in _maps.items()
            for x, w in zip(_leads.tolist(), each.weights(_pairs)[:, 0].tolist(), strict=True)
        ],
        "lead of A over B",
        "weight of A",
        "map",
        title="Two alternatives",
    )
    return


@app.cell
def _(z):
    temperatures = [1.0, 0.3, 0.1, 0.03]
    winner = fenchel.Hard().weights(z)
    distances = [
        (fenchel.Softmax(1 / T).weights(z) - winner).abs().max().item() for T in temperatures
    ]
    _points = torch.randn(1000, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _points.requires_grad_()
    _target = torch.arange(6.0, dtype=torch.float64)
    (dead,) = torch.autograd.grad((fenchel.Hard().weights(_points) @ _target).sum(), _points)
    (alive,) = torch.autograd.grad((fenchel.Softmax().weights(_points) @ _target).sum(), _points)
    _tie = torch.tensor([[1e-9, 0.0], [-1e-9, 0.0]], dtype=torch.float64)
    jump = fenchel.Hard().weights(_tie)[:, 0]
    mo.vstack(
        [
            claim(
                "SM-09",
                "Softmax of $z/T$ tends to the hard choice: its distance is "
                f"{', '.join(f'{x:.0e}' for x in distances)} at $T$ = {', '.join(map(str, temperatures))}. Entmax and sparsemax reach it *exactly* at a "
                "finite temperature.",
                all(a > b for a, b in pairwise(distances))
                and distances[-1] < 1e-5
                and torch.equal(fenchel.Sparsemax(1 / 0.3).weights(z), winner)
                and torch.equal(fenchel.Entmax(1.5, 1 / 0.1).weights(z), winner),
            ),
            details(
                claim(
                    "SM-09",
                    f"At 1,000 random points the gradient through the hard choice is {dead.abs().max().item():g}; through softmax it is never 0, on average "
                    f"{alive.norm(dim=-1).mean().item():.2f}. At a tie the hard weight jumps from {jump[1].item():.0f} to {jump[0].item():.0f}.",
                    (dead == 0).all()
                    and (alive.norm(dim=-1) > 0).all()
                    and jump.tolist() == [1.0, 0.0],
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Capped: no weight above a share

    The opposite wish: spread out. A fund may put at most 40 % into one share. The choice of largest entropy under $p_i \le c$ is
    $p_i = \min(c,\ e^{\beta z_i - \nu})$: softmax, with its largest weights cut off and the rest scaled up. Now the *upper* constraints push, with
    $\nu$ such that the weights sum to 1. Their multipliers $\mu_i$ say what the cap costs.
    """)
    return


@app.cell
def _():
    cap = mo.ui.slider(
        steps=[0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0], value=0.4, label="Cap $c$", show_value=True
    )
    cap
    return (cap,)


@app.cell
def _(cap, names, z):
    steep = 2.0 * z
    capped = fenchel.Capped(cap.value)
    held = capped.weights(steep)
    push = fenchel.choice.multipliers(capped, steep, held).ceiling
    free = held < cap.value
    _ratio = (held[free].log() - steep[free]) if free.any() else steep[:0]
    price = 0.0
    if cap.value < 1.0:
        price = (
            fenchel.Capped(cap.value + 1e-6).value(steep)
            - fenchel.Capped(cap.value - 1e-6).value(steep)
        ).item() / 2e-6
    mo.vstack(
        [
            bar_chart(
                [
                    {"alternative": n, "map": name, "weight": w, "push mu": e}
                    for name, weights, etas in (
                        ("softmax", fenchel.Softmax().weights(steep), torch.zeros(6)),
                        ("capped", held, push),
                    )
                    for n, w, e in zip(names, weights.tolist(), etas.tolist(), strict=True)
                ],
                "alternative",
                "weight",
                "map",
                title="Softmax and capped, scores doubled",
                y_range=(0, 1),
            ),
            claim(
                "SM-33 SM-26",
                f"{int((push > 1e-9).sum())} weights are at the cap and pushed; the others keep the proportions of softmax. Raising the cap would gain "
                f"{price:.3f} per unit, the sum of the pushes.",
                max(fenchel.kkt(capped, steep, held)) < 1e-8
                and (held <= cap.value + 1e-12).all()
                and (len(_ratio) == 0 or torch.allclose(_ratio, _ratio[0].expand_as(_ratio)))
                and abs(price - push.sum().item()) < 1e-3 * (1 + price),
            ),
        ]
    )
    return


@app.cell
def _(z):
    all_maps = {
        "softmax": fenchel.Softmax,
        "entmax 1.5": lambda beta=1.0: fenchel.Entmax(1.5, beta),
        "sparsemax": fenchel.Sparsemax,
        "capped 0.4": lambda beta=1.0: fenchel.Capped(0.4, beta),
    }

    def _row(name, weights, limit):
        w = weights(z, 1.0)
        steepest = torch.linalg.eigvalsh(torch.func.jacrev(lambda x: weights(x, 1.0))(z)).max()
        return {
            "map": name,
            "support": int((w > 0).sum()),
            "largest weight": w.max().item(),
            "largest eigenvalue of J": steepest.item(),
            "constant, 6 scores": limit,
            "beta -> 0": "uniform" if (weights(z, 1e-6) - 1 / 6).abs().max() < 1e-5 else "other",
            "beta -> inf": "hard"
            if (weights(z, 1e4) - fenchel.Hard().weights(z)).abs().max() < 1e-3
            else "other",
        }

    compared = [
        _row(name, lambda x, b, make=make: make(beta=b).weights(x), float(make().lipschitz(6)))
        for name, make in all_maps.items()
    ]
    compared.append(_row("reverse KL", lambda x, b: reverse_kl(x, b).p, "-"))
    compared.append(
        _row("hard", lambda x, b: fenchel.Hard().weights(x), fenchel.Hard().lipschitz(6))  # noqa: ARG005
    )
    mo.vstack(
        [
            mo.md("## Side by side"),
            table(compared),
            claim(
                "SM-26 SM-09",
                "On the same six scores the supports are "
                f"{', '.join(str(row['support']) for row in compared)}. For $\\beta \\to 0$ all but the hard choice tend to uniform; for $\\beta \\to \\infty$ all but "
                "the capped one tend to the hard choice. No derivative exceeds its constant, which bounds it for all scores.",
                [row["support"] for row in compared] == [6, 3, 2, 6, 6, 1]
                and [row["beta -> 0"] for row in compared] == ["uniform"] * 5 + ["other"]
                and [row["beta -> inf"] for row in compared]
                == ["hard"] * 3 + ["other", "hard", "hard"]
                and all(
                    row["largest eigenvalue of J"] <= row["constant, 6 scores"] + 1e-9
                    for row in compared[:4]
                )
                and compared[-1]["largest eigenvalue of J"] == 0,
            ),
        ]
    )
    return


@app.cell
def _():
    _leads = torch.linspace(-2.0, 4.0, 61, dtype=torch.float64)
    _pairs = torch.stack([_leads, torch.zeros_like(_leads)], -1)
    _first = torch.zeros(61, dtype=torch.long)
    _maps = {
        "softmax: cross-entropy": fenchel.Softmax(),
        "entmax 1.5, margin 2": fenchel.Entmax(1.5),
        "sparsemax, margin 1": fenchel.Sparsemax(),
        "hard: perceptron, margin 0": fenchel.Hard(),
    }
    _twenty = torch.randn(200, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _labels = torch.arange(200) % 20

    def at_lead(each, lead):
        """Loss and gradient where the right answer leads the best of 19 others by ``lead``."""
        rest = _twenty.scatter(1, _labels[:, None], -torch.inf).amax(1, keepdim=True)
        scores = _twenty.scatter(1, _labels[:, None], rest + lead)
        return each.loss(scores, _labels), torch.func.grad(lambda x: each.loss(x, _labels).sum())(
            scores
        )

    enough = {
        1.5: at_lead(fenchel.Entmax(1.5), 2.0 + 1e-9),
        2.0: at_lead(fenchel.Sparsemax(), 1.0 + 1e-9),
    }
    short = {1.5: at_lead(fenchel.Entmax(1.5), 1.98), 2.0: at_lead(fenchel.Sparsemax(), 0.98)}
    never = at_lead(fenchel.Softmax(), 20.0)
    details(
        mo.md(r"""
    A teacher marks an exam. One grades by certainty: 99 % sure is better than 95 %, and there is always something left to improve. Another
    gives full marks as soon as the right answer leads by a clear margin, and stops correcting. Each choice map comes with its own loss, that of *Fenchel and Young*. With
    $V(z)$ the best value (average score minus cost) and $y$ the right answer,

    $$L(z, y) = V(z) + \Omega(y)/\beta - \langle y, z\rangle \ge 0,$$

    and its gradient is $p(z) - y$.

    For softmax $L$ is the cross-entropy, the first teacher. For entmax it is exactly 0 once $z_y$ leads all others by the *margin* $\frac{1}{\beta(\alpha - 1)}$.
    """),
        line_chart(
            [
                {"lead of the right answer": x, "loss": v, "map": name}
                for name, each in _maps.items()
                for x, v in zip(_leads.tolist(), each.loss(_pairs, _first).tolist(), strict=True)
            ],
            "lead of the right answer",
            "loss",
            "map",
            title="Loss against the lead",
        ),
        claim(
            "SM-26",
            "200 questions with 20 answers: at a lead of 2 the loss of entmax 1.5 is exactly 0, and so is its gradient; for sparsemax from a lead of 1. "
            "A little below it is positive. The cross-entropy at a lead of 20 is still "
            f"{never[0].min().item():.0e}, never 0.",
            all((v == 0).all() and (g == 0).all() for v, g in enough.values())
            and all((v > 0).all() for v, _ in short.values())
            and (never[0] > 0).all(),
        ),
        title="Losses with a margin",
    )
    return


@app.cell
def _():
    _scores = torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _wanted = fenchel.Entmax(1.7).weights(_scores)

    def mismatch(a):
        return (fenchel.Entmax(a).weights(_scores) - _wanted).square().sum(-1).mean()

    learned = torch.tensor(1.2, dtype=torch.float64, requires_grad=True)
    alphas = [learned.item()]
    for _ in range(40):
        (_slope,) = torch.autograd.grad(mismatch(learned), learned)
        with torch.no_grad():
            learned -= 1.5 * _slope
        alphas.append(learned.item())
    _at = torch.tensor(1.4, dtype=torch.float64)
    _slope_there = torch.func.grad(mismatch)(_at).item()
    _difference = (mismatch(_at + 1e-6) - mismatch(_at - 1e-6)).item() / 2e-6
    details(
        mo.md(r"""
    $\alpha$ may be a parameter like any other. The weights depend on it smoothly while the support stays the same, so it has a gradient:
    a change of $\alpha$ acts on the weights exactly as a certain change of the scores would. Below, the weights of 64 lists of 8 scores were made with
    $\alpha = 1.7$. Gradient descent is given only scores and weights and starts at 1.2.
    """),
        line_chart(
            [{"step": i, "alpha": a} for i, a in enumerate(alphas)],
            "step",
            "alpha",
            title="Alpha during the descent",
        ),
        claim(
            "SM-26",
            f"After 40 steps $\\alpha = {alphas[-1]:.3f}$. Its derivative at 1.4, {_slope_there:.5f}, is that of a measured difference.",
            abs(alphas[-1] - 1.7) < 0.01
            and abs(_slope_there - _difference) < 1e-6
            and abs(_slope_there) > 1e-4,
        ),
        title="Learning how sparse to be",
    )
    return


@app.cell
def _():
    sizes = [16, 64, 256, 1024]
    _g = torch.Generator().manual_seed(0)
    _q = torch.randn(1, 1, 64, 16, dtype=torch.float64, generator=_g)
    _k = torch.randn(1, 1, 1024, 16, dtype=torch.float64, generator=_g)
    _maps = {
        "softmax": fenchel.Softmax(),
        "entmax 1.5": fenchel.Entmax(1.5),
        "sparsemax": fenchel.Sparsemax(),
    }

    def _support(choice, n):
        _, w = fenchel.attend(_q, _k[:, :, :n], _k[:, :, :n], choice=choice, return_weights=True)
        return (w > 0).sum(-1).double().mean().item()

    mean_support = {name: [_support(each, n) for n in sizes] for name, each in _maps.items()}
    _band = fenchel.attend(
        _q, _k[:, :, :64], _k[:, :, :64], prior=fenchel.Window(3), return_weights=True
    )[1]
    # Attention without softmax: weights proportional to phi(q) . phi(k), phi = elu + 1.
    _phi_q, _phi_k = (torch.nn.functional.elu(x) + 1 for x in (_q, _k[:, :, :64]))
    _kernel = _phi_q @ _phi_k.mT
    _kernel = _kernel / _kernel.sum(-1, keepdim=True)
    mo.vstack(
        [
            mo.md(r"""
            ## Sparse attention

            In attention the alternatives are tokens, often thousands. Softmax gives each of them something; a token of weight 0 need not be looked up. There are two ways to
            get zeros: fix *where* they are beforehand (a window of near tokens, a mask), or let the scores decide (entmax). A third way leaves softmax altogether:
            weights proportional to a product $\phi(q) \cdot \phi(k)$ of positive features, whose sums can be formed once for all queries.
            """),
            line_chart(
                [
                    {"keys": n, "keys with weight": c, "map": name}
                    for name, row in mean_support.items()
                    for n, c in zip(sizes, row, strict=True)
                ],
                "keys",
                "keys with weight",
                "map",
                title="Support of attention, random keys",
                log_x=True,
                log_y=True,
                points=True,
            ),
            claim(
                "PD-16",
                f"Of 1,024 random keys softmax uses {mean_support['softmax'][-1]:.0f}, entmax 1.5 on average {mean_support['entmax 1.5'][-1]:.1f}, sparsemax "
                f"{mean_support['sparsemax'][-1]:.1f}. A window of 3 leaves at most 4 per query, whatever the scores.",
                mean_support["softmax"] == sizes
                and all(
                    a > b > c
                    for a, b, c in zip(
                        mean_support["softmax"],
                        mean_support["entmax 1.5"],
                        mean_support["sparsemax"],
                        strict=True,
                    )
                )
                and mean_support["entmax 1.5"][-1] < 200
                and (_band > 0).sum(-1).max() == 4,
            ),
            details(
                claim(
                    "PD-16",
                    "`linear_attend` is the third way: it returns the mean under these product weights without forming them. None of them is 0.",
                    torch.allclose(
                        linear_attend(_q, _k[:, :, :64], _k[:, :, :64]),
                        _kernel @ _k[:, :, :64],
                        atol=1e-9,
                    )
                    and (_kernel > 0).all(),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    def check(names):
        sparsemax = names["sparsemax"]
        cases = ([1.0, 0.8, -3.0], [2.0, 1.6, 1.0, 0.4, -0.5, -2.0], [0.1, 0.0, 0.2], [5.0, 5.0])
        for case in cases:
            z = torch.tensor(case, dtype=torch.float64)
            p = sparsemax(z)
            assert torch.is_tensor(p), "Return a tensor."
            assert p.shape == z.shape, "Return one weight per score."
            assert (p >= 0).all(), f"For {case} a weight is negative: cut off at 0."
            assert abs(float(p.sum()) - 1) < 1e-6, (
                f"For {case} the weights sum to {float(p.sum()):.3f}."
            )
            expected = fenchel.Sparsemax().weights(z)
            assert torch.allclose(p, expected, atol=1e-6), (
                f"For {case} the weights are not those of sparsemax, {expected.tolist()}."
            )

    exercise = Exercise(
        lesson="sparse_choice",
        task="Write `sparsemax(z)`. With the sea at $\\tau$ the land above it is $\\sum_i \\max(z_i - \\tau, 0)$, which falls as $\\tau$ rises. Find "
        "the $\\tau$ where it is 1, between the highest score minus 1 and the highest score: try the middle, and keep the half that "
        "still holds it.",
        starter="""
    def sparsemax(z):
        low, high = z.max() - 1.0, z.max()
        tau = low
        return torch.clamp(z - tau, min=0.0)
    """,
        solution="""
    def sparsemax(z):
        low, high = z.max() - 1.0, z.max()
        for _ in range(60):
            tau = (low + high) / 2
            if torch.clamp(z - tau, min=0.0).sum() > 1.0:
                low = tau  # too much land: the sea must rise
            else:
                high = tau
        return torch.clamp(z - tau, min=0.0)
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
    ids = torch.tensor(
        [own.tokenizer.encode_whole("we the people of the united states")[: own.config.context]]
    )
    calls = {}

    def _observe(layer, q, k, v):
        calls[layer] = own.model.attention_call(layer, q, k, v)

    with torch.no_grad():
        own.model(ids, observe=_observe)

    def _count(call, choice):
        """How many tokens the last one gives weight to, per head."""
        spec = {**call.spec, "choice": choice}
        _, w = fenchel.attend(call.q, call.k, call.v, **spec, return_weights=True)
        return (w[0, :, -1] > 0).sum(-1).tolist()

    _maps = {
        "softmax": fenchel.Softmax(),
        "entmax 1.5": fenchel.Entmax(1.5),
        "sparsemax": fenchel.Sparsemax(),
    }
    own_support = [
        {"head": f"{layer}.{head}", "map": name, "tokens with weight": count}
        for layer, call in calls.items()
        for name, each in _maps.items()
        for head, count in enumerate(_count(call, each))
    ]
    _by_map = {
        name: [row["tokens with weight"] for row in own_support if row["map"] == name]
        for name in _maps
    }
    mo.vstack(
        [
            mo.md(
                f"The scores of your model on *we the people of the united states* ({ids.shape[1]} tokens), at the last token, put through three maps. It was "
                "trained with one of them; `model.choice` in its settings says which. The label is layer.head."
            ),
            bar_chart(
                own_support, "head", "tokens with weight", "map", title="Support in each head"
            ),
            claim(
                "SM-26 PD-16",
                "On the same scores sparsemax never uses more tokens than entmax 1.5, and that never more than softmax, in every head.",
                all(a >= b >= c for a, b, c in zip(*_by_map.values(), strict=True)),
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        r"The kink. Exactly where an alternative enters the support the derivative of sparsemax jumps: it has one value from the left and another from the right. "
        r"Scores lie exactly there with probability 0, and training is hardly disturbed. Worse is an alternative that starts deep below the sea: it gets no gradient at all, and "
        r"stays where it is unless the others move. Softmax always leaves a small signal."
    )
    return


@app.cell
def _():
    footer("sparse_choice")
    return


if __name__ == "__main__":
    app.run()
