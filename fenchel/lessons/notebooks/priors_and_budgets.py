"""Priors and budgets: how far scores may move weights away from a prior."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Priors and budgets",
)

with app.setup:
    import math
    from itertools import pairwise

    import marimo as mo
    import torch

    import fenchel
    from fenchel.choice import beta_for_budget, reverse_kl
    from fenchel.choice.hypothesis_test import divergence, tilted
    from fenchel.lessons.convex_program import ConvexProgram, solve
    from fenchel.lessons.scene import Scene
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
        number,
        proof,
        question,
        run_picker,
        table,
        what_breaks,
    )


@app.cell
def _():
    header("priors_and_budgets")
    return


@app.cell
def _():
    guess = question(
        "Before any score is known, an alternative has the weight 0. Then its score is the highest of all. Which "
        "weight does softmax give it?",
        ["nearly 1", "its fair share, by its score", "0"],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "0",
        "Scores multiply what was there before: $p_i = u_i e^{\\beta z_i} / Z$, and nothing times anything is nothing. This is how a "
        "mask works, and it is the only way to forbid.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## No reason to prefer one

    You look for something in a drawer with $K$ boxes and know nothing. The fair start is to give each box the same weight,
    $u_i = 1/K$, the *prior*: what you believe before you look. As scores come in, weight moves:

    $$p_i = \frac{e^{\beta z_i}}{\sum_j e^{\beta z_j}} .$$

    $\beta$ (beta), the *inverse temperature*, says how much a score is trusted.
    """)
    return


@app.cell
def _():
    _g = torch.Generator().manual_seed(0)
    keys = torch.randn(6, 4, dtype=torch.float64, generator=_g)
    values = torch.randn(6, 4, dtype=torch.float64, generator=_g)
    query = torch.randn(4, dtype=torch.float64, generator=_g)

    def _attend(q, beta):
        q, k, v = (x.reshape(1, 1, -1, 4) for x in (q, keys, values))
        out, weights = fenchel.attend(q, k, v, scale=beta, return_weights=True)
        return out.flatten(), weights.flatten()

    _powers = (0.7 * keys @ query).exp()
    mo.vstack(
        [
            details(
                mo.md(r"""
                Attention starts in the same way. It has a *query* $q$ (what is looked for), *keys* $k_1, \dots, k_K$ (what each box
                offers) and *values* (what is in it). The score of box $i$ is the product $z_i = k_i \cdot q$ (multiply entry by entry
                and add), large when both point the same way.
                """),
                claim(
                    "SM-47",
                    "A query of zeros has no reason to prefer a key: attention returns the plain mean of the values.",
                    torch.allclose(_attend(torch.zeros_like(query), 0.7)[0], values.mean(0)),
                ),
                claim(
                    "SM-34",
                    "With a query, the weights of `fenchel.attend` are the formula above, at $\\beta = 0.7$ as at any other.",
                    torch.allclose(_attend(query, 0.7)[1], _powers / _powers.sum()),
                ),
                claim(
                    "E96",
                    "Softmax takes the whole list of scores and gives a whole list of weights. The softmax of a single number is "
                    "always 1, so $p_i$ is entry $i$ of the softmax of all scores together, not the softmax of the one number "
                    "$\\beta\\, k_i \\cdot q$; and what maximises below is the list $p$, not one $p_i$.",
                    all(
                        fenchel.Softmax(0.7).weights((keys[i] @ query).reshape(1)) == 1
                        for i in range(6)
                    )
                    and torch.allclose(
                        fenchel.Softmax(0.7).weights(keys @ query)[2], _powers[2] / _powers.sum()
                    ),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## A leash

    Tie a dog to a post. The post is the prior $u$; the scores are smells that pull; the leash is elastic, and stretching it costs.
    The dog stops where going on costs more than it gains. The stretch is the *divergence*
    $\mathrm{KL}(p \| u) = \sum_i p_i \log (p_i / u_i)$, in *nats*. The best distribution

    $$p^* = \arg\max_p\; \sum_i p_i z_i - \frac1\beta\, \mathrm{KL}(p \| u)$$

    is softmax with the prior in front,
    $p^*_i = u_i e^{\beta z_i} / Z$ with $Z = \sum_j u_j e^{\beta z_j}$. A weak leash is a large $\beta$. From here on the example has the
    scores 0, 1 and 3.
    """)
    return


@app.cell
def dog_on_a_leash():
    z = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    leash = Scene(
        "dog_on_a_leash",
        {"beta": 0.3918, "A": 0.5, "B": 0.3, "C": 0.2},
        scores=[0, 1, 3],
        places=[
            {"beta": beta, "A": a / 10, "B": b / 10, "C": (10 - a - b) / 10}
            for beta in (0.05, 0.1, 0.2, 0.3918, 0.6, 1.0, 2.0, 5.0)
            for a in range(11)
            for b in range(11 - a)
        ],
    )
    mo.vstack(
        [
            mo.md(
                "Every point of the triangle is a distribution: at a corner one alternative has everything, on a side one has nothing. *Loosen the "
                "leash. How does the blue ring, all places with as much leash, meet the dashed line, all places with the same average score? Then put "
                "the post onto a side: can the dog leave it?*"
            ),
            leash,
        ]
    )
    return leash, z


@app.cell
def _(leash, z):
    beta = leash.state["beta"]
    chosen = torch.tensor([leash.state[name] for name in "ABC"], dtype=torch.float64)
    chosen = chosen / chosen.sum()
    p = fenchel.Softmax(beta).weights(z, chosen.log())
    by_formula = chosen * (beta * z).exp()
    by_formula = by_formula / by_formula.sum()
    top = ((chosen * (beta * z).exp()).sum().log() / beta).item()

    def total(q):
        """Average score minus the price of leaving the prior."""
        return q @ z - divergence(q, chosen) / beta

    _drawn = torch.empty(2000, 3, dtype=torch.float64)
    _drawn.exponential_(generator=torch.Generator().manual_seed(0))
    others = _drawn * (chosen > 0)
    others = others / others.sum(-1, keepdim=True)
    lost = top - total(others)
    if (chosen > 0).sum() == 1:
        _rivals = "From a corner every other distribution costs infinitely much"
    else:
        _rivals = (
            "Each of 2,000 random rivals $q$ earns less, by exactly $\\mathrm{KL}(q \\| p)/\\beta$ (to "
            f"{number((lost - divergence(others, p) / beta).abs().max().item(), 1)}, the rounding of the computer)"
        )
    mo.vstack(
        [
            table(
                [
                    {
                        "average score": (p @ z).item(),
                        "KL(p || u), nats": divergence(p, chosen).item(),
                        "average - KL / beta": total(p).item(),
                        "log Z / beta": top,
                    }
                ]
            ),
            claim(
                "SM-35 SM-37 E95",
                f"Softmax reaches $\\frac1\\beta \\log Z = {top:.4f}$. {_rivals}. The maximum is "
                "reached at softmax and nowhere else: the *variational principle of Gibbs*.",
                torch.allclose(p, by_formula, atol=1e-12)
                and abs(total(p).item() - top) < 1e-12
                and torch.allclose(lost, divergence(others, p) / beta, atol=1e-10)
                and ((lost > 0).all() or (chosen > 0).sum() == 1),
            ),
            claim(
                "SM-38",
                "A prior of 0 stays 0 for every score and every $\\beta$: a *mask*, a list of what is forbidden, is a prior, and what is added to "
                "$\\beta z$ is $\\log u$, which is $-\\infty$ there.",
                (p[chosen == 0] == 0).all()
                and (p[chosen > 0] > 0).all()
                and torch.allclose(torch.softmax(beta * z + chosen.log(), 0), p),
            ),
        ]
    )
    return


@app.cell
def _(z):
    u = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    kl_problem = ConvexProgram(
        lambda p: (p * (p / u).log()).sum() / 0.7 - p @ z,
        lambda p: -p,
        lambda p: (p.sum() - 1.0).reshape(1),
    )
    solved = solve(kl_problem, torch.full((3,), 1 / 3, dtype=torch.float64), gap=1e-9).x
    details(
        claim(
            "SM-35 E97 PD-21",
            "A general solver for convex problems, "
            f"given only the problem at $\\beta = 0.7$, finds {', '.join(f'{w:.4f}' for w in solved.tolist())}, which is the formula.",
            torch.allclose(solved, fenchel.Softmax(0.7).weights(z, u.log()), atol=1e-6),
        ),
    )
    return (u,)


@app.cell
def _():
    proof(
        school=r"""
            Only algebra is needed. Softmax says $p_i = u_i e^{\beta z_i}/Z$. Take logarithms: $\beta z_i = \log\frac{p_i}{u_i} + \log Z$. Now let
            $q$ be any rival, multiply this by $q_i$ and add up over $i$; the $q_i$ sum to 1, so
            $\beta \sum q_i z_i = \sum q_i \log\frac{p_i}{u_i} + \log Z$. Subtract the stretch $\sum q_i \log\frac{q_i}{u_i}$ of the rival.
            The $u_i$ cancel, and its total, times $\beta$, is $\log Z - \sum q_i \log\frac{q_i}{p_i}$. The last sum is what the rival loses. It is never
            negative: the curve $\log x$ lies below the line $x - 1$ and touches it only at 1, so
            $\sum q_i \log\frac{p_i}{q_i} \le \sum q_i (\frac{p_i}{q_i} - 1) = 1 - 1 = 0$, with equality only if $q = p$.""",
        undergraduate=r"""
            By multipliers: $L = \langle p, z\rangle - \frac1\beta \sum p_i \log\frac{p_i}{u_i} - \nu(\sum p_i - 1)$ is stationary where
            $z_i - \frac1\beta(\log\frac{p_i}{u_i} + 1) = \nu$, so $p_i \propto u_i e^{\beta z_i}$. The slope of the divergence is $-\infty$ at $p_i = 0$,
            so no constraint $p_i \ge 0$ is active where $u_i > 0$; the objective is strictly concave, so the point is the only maximiser. Inserting it
            gives $\frac1\beta \log Z$. Differentiate $\log Z$: $\frac{d}{d\beta}\log Z = E_p z$ and $\frac{d}{d\beta} E_p z = \mathrm{Var}_p z$; since
            $\mathrm{KL}(p\|u) = \beta E_p z - \log Z$, its derivative is $\beta\,\mathrm{Var}_p z$. A variable within an interval of length $r$ has variance at
            most $r^2/4$, and integration gives $\mathrm{KL} \le \beta^2 r^2/8$.""",
        research=r"""
            This is the Donsker-Varadhan formula, $\log E_u e^{\beta z} = \sup_q \beta E_q z - \mathrm{KL}(q\|u)$: $\log Z$ is the
            cumulant generating function of the score under the prior, and its conjugate is Cramér's rate function. That one function
            carries everything below: its derivative is the mean, its second derivative the variance, its conjugate the exponent of
            large deviations and, through the Neyman-Pearson statistic $\log(p/u)$, of the best test. In statistics $p_\beta$ is an exponential
            family with base measure $u$ (Csiszár 1975, I-projections).""",
    )
    return


@app.cell
def _(u, z):
    sizes = torch.logspace(-2, 1.3, 34, dtype=torch.float64)
    path = [tilted(z, s, u.log()) for s in sizes]
    _at = torch.tensor([0.05, 0.3918, 2.0], dtype=torch.float64)
    _slopes = [
        (
            torch.func.grad(lambda s: tilted(z, s, u.log()).mean)(s),
            torch.func.grad(lambda s: tilted(z, s, u.log()).divergence)(s),
            tilted(z, s, u.log()).variance,
            s,
        )
        for s in _at
    ]
    tied = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    tie_prior = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)
    split = fenchel.Softmax(200.0).weights(tied, tie_prior.log())
    far = tilted(tied, 200.0, tie_prior.log()).divergence
    small = tilted(z, 1e-4, u.log())
    _variance = (u @ z.square()) - (u @ z) ** 2
    mo.vstack(
        [
            mo.md("## From caution to a decision"),
            mo.md(
                "Turn $\\beta$ up from 0. The dog starts at the post and ends at the strongest smell. Two curves say how far it got."
            ),
            line_chart(
                [
                    {"beta": s, "value": v, "what": name}
                    for s, t in zip(sizes.tolist(), path, strict=True)
                    for name, v in (
                        ("average score", t.mean.item()),
                        ("KL(p || u)", t.divergence.item()),
                    )
                ],
                "beta",
                "value",
                "what",
                title="Average score and divergence",
                log_x=True,
            ),
            claim(
                "SM-40 E101",
                "$\\beta \\to \\infty$: all weight goes to the best scores, a hard choice. It is a single one only without ties: scores 1, 1, 0 "
                f"with the prior 0.1, 0.3, 0.6 end at {split[0]:.2f}, {split[1]:.2f}, {split[2]:.2f}; the tie is split in proportion "
                "to the prior.",
                torch.allclose(
                    split, torch.tensor([0.25, 0.75, 0.0], dtype=torch.float64), atol=1e-9
                )
                and torch.allclose(split, fenchel.Hard().weights(tied, tie_prior.log()), atol=1e-9)
                and fenchel.Softmax(200.0).weights(z, u.log())[2] > 1 - 1e-9,
            ),
            details(
                claim(
                    "SM-41",
                    "$\\beta \\to 0$: the weights tend to the prior, full caution. At $\\beta = 10^{-4}$ they differ from it by "
                    f"{(small.p - u).abs().max().item():.0e}.",
                    (small.p - u).abs().max() < 1e-3
                    and (tilted(z, 1e-8, u.log()).p - u).abs().max() < 1e-7,
                ),
                claim(
                    "SM-42",
                    "On the way both curves only rise: the average score at the rate $\\mathrm{Var}_p(z)$ (the *variance*: the mean squared "
                    "distance of a score from the mean, weighted by $p$), the divergence at the rate $\\beta\\,\\mathrm{Var}_p(z)$. At first "
                    f"$\\mathrm{{KL}} \\approx \\beta^2 \\mathrm{{Var}}_u(z)/2$, with $\\mathrm{{Var}}_u(z) = {_variance.item():.2f}$; in the end "
                    f"$-\\log u(\\text{{best}})$, with the prior of all the best scores together, in the tie above $-\\log 0.4 = {far.item():.4f}$.",
                    all(a.mean < b.mean and a.divergence < b.divergence for a, b in pairwise(path))
                    and all(
                        torch.isclose(mean, var) and torch.isclose(kl, s * var)
                        for mean, kl, var, s in _slopes
                    )
                    and abs(small.divergence.item() / (0.5e-8 * _variance.item()) - 1) < 1e-3
                    and abs(far.item() + math.log(0.4)) < 1e-9,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## A budget instead of a price

    In the problem above leaving the prior has a *price*, $1/\beta$ per nat, and no limit: with larger scores the dog runs further. Give it a
    leash of fixed length instead. You may spend at most $\kappa$ (kappa) nats:

    $$\max_p \; \sum_i p_i z_i \quad \text{subject to} \quad \mathrm{KL}(p \| u) \le \kappa.$$

    The answer is softmax again, at the $\beta$ that spends the budget (as long as $\kappa$ is below the $-\log u(\text{best})$ at which
    the hard choice is affordable). Its price $1/\beta$ is now *found*: it is the multiplier of
    the constraint, the score that one more nat would earn.
    """)
    return


@app.cell
def _():
    budget = mo.ui.slider(
        steps=[0.01, 0.05, 0.1, 0.1228, 0.2, 0.5, 1.0, 1.5],
        value=0.1228,
        label=r"Budget $\kappa$ in nats",
        show_value=True,
    )
    budget
    return (budget,)


@app.cell
def _(budget, u, z):
    kappa = torch.tensor(budget.value, dtype=torch.float64)

    def best_average(k, scores=z):
        return tilted(scores, beta_for_budget(scores, k, u.log()), u.log()).mean

    found_beta = beta_for_budget(z, kappa, u.log())
    spent = tilted(z, found_beta, u.log())
    marginal = torch.func.grad(best_average)(kappa)
    _steps = [0.02 * i for i in range(1, 80)]
    mo.vstack(
        [
            line_chart(
                [
                    {
                        "budget": k,
                        "best average score": best_average(
                            torch.tensor(k, dtype=torch.float64)
                        ).item(),
                    }
                    for k in _steps
                ],
                "budget",
                "best average score",
                title="What a budget buys",
                x_range=(0, 1.6),
                y_range=(0.9, 3.1),
                here=[{"budget": budget.value, "best average score": spent.mean.item()}],
            ),
            table(
                [
                    {
                        "budget": budget.value,
                        "beta": found_beta.item(),
                        "spent": spent.divergence.item(),
                        "average score": spent.mean.item(),
                        "price 1 / beta": 1 / found_beta.item(),
                    }
                ]
            ),
            claim(
                "SM-43",
                f"$\\beta = {found_beta.item():.4f}$ spends the budget exactly, and a little more budget would earn "
                f"{marginal.item():.3f} points per nat: $1/\\beta$.",
                torch.isclose(spent.divergence, kappa)
                and torch.isclose(marginal, 1 / found_beta, rtol=1e-5),
            ),
        ]
    )
    return


@app.cell
def _(u, z):
    grown = [tilted(c * z, 0.3918, u.log()).divergence.item() for c in (1.0, 2.0, 4.0)]
    held = [
        tilted(c * z, beta_for_budget(c * z, 0.1228, u.log()), u.log()).divergence.item()
        for c in (1.0, 2.0, 4.0)
    ]
    claim(
        "E100 SM-43",
        "A price penalises the divergence, it does not bound it: with $\\beta$ fixed and scores once, twice, four times as large it is "
        f"{', '.join(f'{x:.3f}' for x in grown)}. With a budget it stays at {', '.join(f'{x:.4f}' for x in held)}.",
        all(a < b for a, b in pairwise(grown)) and all(abs(x - 0.1228) < 1e-9 for x in held),
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Why this divergence, and not another?

    Measure the stretch the other way round, by $\mathrm{KL}(u \| p) = \sum u_i \log (u_i/p_i)$. The same argument then gives

    $$p_i = \frac{u_i}{\beta(\nu - z_i)},$$

    with $\nu$ above all scores, such that the weights sum to 1. Weights fall like one over a distance instead of exponentially. Below, one good score against 19 that are worse by the gap that you
    choose, each with prior 1/20.
    """)
    return


@app.cell
def _():
    gap = mo.ui.slider(
        steps=[0.5, 1.0, 2.0, 4.0, 8.0, 16.0],
        value=4.0,
        label="Gap of the scores",
        show_value=True,
    )
    gap
    return (gap,)


@app.cell
def _(gap):
    _depths = torch.tensor([0.0, *([-gap.value] * 19)], dtype=torch.float64)
    kl_way = fenchel.Softmax().weights(_depths)
    other = reverse_kl(_depths).p
    level = 1 / 20 / other + _depths  # nu, the same for every i
    square = fenchel.Sparsemax().weights(_depths)
    _gaps = [0.25 * i for i in range(65)]

    def _left(choose, g):
        return choose(torch.tensor([0.0, *([-g] * 19)], dtype=torch.float64))[1:].sum().item()

    _maps = {
        "KL(p || u): softmax": fenchel.Softmax().weights,
        "KL(u || p)": lambda s: reverse_kl(s).p,
        "squared norm: sparsemax": fenchel.Sparsemax().weights,
    }
    jacobian = torch.func.jacrev(lambda s: reverse_kl(s).p)(_depths)
    s_other = other.square() * 20
    mo.vstack(
        [
            line_chart(
                [
                    {"gap": g, "weight on the 19 others": _left(choose, g), "regulariser": name}
                    for name, choose in _maps.items()
                    for g in _gaps
                ],
                "gap",
                "weight on the 19 others",
                "regulariser",
                title="What the bad scores keep together",
                here=[
                    {"gap": gap.value, "weight on the 19 others": w[1:].sum().item()}
                    for w in (kl_way, other, square)
                ],
            ),
            claim(
                "SM-26",
                f"At a gap of {gap.value:g} the 19 others keep {kl_way[1:].sum().item():.4f} under softmax, "
                f"{other[1:].sum().item():.4f} under the reverse divergence and {square[1:].sum().item():.4f} under sparsemax. The formula with one "
                r"$\nu$ holds; the Jacobian is $\beta(\mathrm{diag}(s) - s s^\top / \sum s)$ with $s_i = p_i^2/u_i$, where softmax has $s_i = p_i$.",
                torch.allclose(level, level[0].expand(20), rtol=1e-9)
                and level[0] > _depths.max()
                and torch.allclose(other.sum(), other.new_tensor(1.0))
                and torch.allclose(
                    jacobian,
                    torch.diag(s_other) - torch.outer(s_other, s_other) / s_other.sum(),
                    atol=1e-9,
                ),
            ),
        ]
    )
    return


@app.cell
def _(u, z):
    _tail = torch.tensor([0.0, -50.0], dtype=torch.float64)
    mo.vstack(
        [
            details(
                claim(
                    "SM-26",
                    "Both have the same two limits, the prior for $\\beta \\to 0$ and the best score for $\\beta \\to \\infty$, and both keep every allowed "
                    f"alternative. But of two scores 50 apart, softmax leaves the worse one {number(fenchel.Softmax().weights(_tail)[1].item(), 1)} and the reverse "
                    f"divergence {reverse_kl(_tail).p[1].item():.3f}: it forgets slowly, like one over the gap.",
                    (reverse_kl(z, 1e-8, u.log()).p - u).abs().max() < 1e-6
                    and reverse_kl(z, 1e9, u.log()).p[2] > 1 - 1e-6
                    and 0 < fenchel.Softmax().weights(_tail)[1] < 1e-20
                    and reverse_kl(_tail).p[1] > 0.005,
                ),
            ),
            mo.md(
                "And of the three only $\\mathrm{KL}(p\\|u)$ has a meaning that can be counted: [hypothesis tests](../hypothesis_tests/) shows which."
            ),
        ]
    )
    return


@app.cell
def _():
    def check(names):
        weights = names["weights"]
        z = torch.tensor([0.0, 1.0, 3.0, 9.0], dtype=torch.float64)
        u = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
        for beta in (1e-6, 0.5, 3.0):
            p = weights(z, u, beta)
            assert torch.is_tensor(p), "Return a tensor."
            assert torch.isfinite(p).all(), (
                "There is a NaN or an infinity: is 0 times infinity computed?"
            )
            assert abs(float(p.sum()) - 1) < 1e-9, "The weights must sum to 1."
            assert float(p[3]) == 0, "The last alternative has the prior 0: its weight is 0."
            if beta < 1e-3:
                assert torch.allclose(p, u, atol=1e-4), (
                    "Scores that hardly count must leave the prior: which part does beta multiply?"
                )
            expected = fenchel.Softmax(beta).weights(z, u.log())
            assert torch.allclose(p, expected), f"At beta = {beta} the weights differ."

    exercise = Exercise(
        lesson="priors_and_budgets",
        task="Mend `weights(z, u, beta)`: softmax of the scores `z` with the prior `u` and the inverse temperature `beta`. One entry of "
        "`u` is 0. The starter has a mistake that is common in programs: it trusts the prior the less, the smaller `beta` is.",
        starter="""
    def weights(z, u, beta):
        return torch.softmax(beta * (z + torch.log(u)), 0)
    """,
        solution="""
    def weights(z, u, beta):
        return torch.softmax(beta * z + torch.log(u), 0)  # beta trusts the scores, not the prior
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
    _ids = torch.tensor([own.tokenizer.encode_whole("the people of the")[: own.config.context]])
    with torch.no_grad():
        _logits = own.model(_ids)[0, -1].double()
    _even = torch.full_like(_logits, 1 / len(_logits))
    _spent = divergence(fenchel.Softmax().weights(_logits), _even)
    _shares = (0.1, 0.5, 1.0)
    _betas = [beta_for_budget(_logits, share * _spent) for share in _shares]
    _top = _logits.topk(5).indices
    mo.vstack(
        [
            mo.md(
                f"The model knows {len(_logits):,} tokens; with no reason to prefer one, each has the prior 1/{len(_logits):,}. After *the people of the* "
                f"its softmax has moved {_spent.item():.2f} nats away from that. What would a tenth of this budget buy, or a half?"
            ),
            bar_chart(
                [
                    {
                        "token": repr(own.tokenizer.decode([i])),
                        "weight": fenchel.Softmax(b.item()).weights(_logits)[i].item(),
                        "budget": f"{100 * share:.0f} %",
                    }
                    for share, b in zip(_shares, _betas, strict=True)
                    for i in _top.tolist()
                ],
                "token",
                "weight",
                "budget",
                title="The next token under three budgets",
                y_range=(0, 1),
            ),
            claim(
                "SM-43",
                f"The whole budget leads back to $\\beta = {_betas[-1].item():.4f}$, the softmax that the model was trained with; a tenth of it "
                f"to $\\beta = {_betas[0].item():.2f}$.",
                abs(_betas[-1].item() - 1) < 1e-4 and _betas[0] < _betas[1] < _betas[2],
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        r"A prior of 0 is for ever: no score brings the alternative back, so a wrong mask cannot be learned away. The price $1/\beta$ is one number "
        r"for all rows, while a budget finds another price for each row. And the hard choice is affordable once "
        r"$\kappa \ge -\log u(\text{best})$; beyond that a larger budget buys nothing."
    )
    return


@app.cell
def _():
    footer("priors_and_budgets")
    return


if __name__ == "__main__":
    app.run()
