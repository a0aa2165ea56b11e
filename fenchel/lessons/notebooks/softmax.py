"""Softmax as the solution of a problem: best average score plus a reward for spreading."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Softmax as the solution of a problem",
)

with app.setup:
    from itertools import pairwise

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
        text_field,
        token_ids,
        what_breaks,
    )


@app.cell
def _():
    header("softmax")
    return


@app.cell
def _():
    guess = question(
        "Two restaurants score 5 and 4, two others 2 and 1. In which pair do the weights of "
        "softmax lie further apart?",
        ["in the pair 5 and 4", "in the pair 2 and 1", "in neither: they are equal"],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "in neither: they are equal",
        "Only the difference of two scores counts. One point more multiplies the odds by "
        "$e \\approx 2.718$, wherever the scale begins.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Shares of a budget

    Three restaurants have scores, and you divide a hundred evenings. Always the best one is dull; all equally often wastes
    points. So variety is paid for too: $T$ points per unit.

    Each grey dot is one of a thousand random divisions. All on the orange line have the same total: it falls by $T$ per unit of
    variety. Where it touches the grey region is the best division, *softmax*.

    *Pull the orange ring along the edge. Drag C up to B: what happens to the corner between them? Can a dot lie above the
    line?*
    """)
    return


@app.cell
def points_and_variety():
    drawn = torch.empty(1000, 3, dtype=torch.float64)
    drawn.exponential_(generator=torch.Generator().manual_seed(0))
    rivals = drawn / drawn.sum(-1, keepdim=True)
    _scores = [0.0, 1.0, 2.0, 3.0]
    evenings = Scene(
        "points_and_variety",
        {"T": 1.0, "A": 1.0, "B": 2.0, "C": 0.0},
        rivals=[[round(share, 6) for share in q] for q in rivals.tolist()],
        places=all_places(T=[0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.5], **dict.fromkeys("ABC", _scores)),
    )
    evenings
    return evenings, rivals


@app.cell
def _():
    mo.md(r"""
    Variety is the *entropy* $-\sum_i p_i \log p_i$ of the shares, the average surprise of [cross-entropy](../cross_entropy/), and the
    best division is

    $$p_i = \frac{e^{z_i / T}}{\sum_j e^{z_j / T}}.$$

    $z_i$ is the score, $p_i$ the share, and the *temperature* $T$ says how well variety is
    paid; its inverse $\beta = 1/T$ is the *inverse temperature*. Physics writes the same law with energies $E_i = -z_i$: low energy, large share.
    """)
    return


@app.cell
def _(evenings):
    z = torch.tensor([evenings.state[name] for name in "ABC"], dtype=torch.float64)
    T = evenings.state["T"]
    p = fenchel.Softmax(beta=1 / T).weights(z)
    entropy = -torch.xlogy(p, p).sum()
    return T, entropy, p, z


@app.cell
def _(T, entropy, p, z):
    energies = -z
    reward = (p @ z) + T * entropy
    best = T * torch.logsumexp(z / T, 0)
    mo.vstack(
        [
            table(
                [
                    {
                        "average score": (p @ z).item(),
                        "entropy (nats)": entropy.item(),
                        "average score + T x entropy": reward.item(),
                        "T log sum exp(z / T)": best.item(),
                    }
                ]
            ),
            claim(
                "SM-01 SM-02 SM-03",
                "The shares follow the formula, with scores and with energies. Every share is positive, they sum to 1, and a "
                "better score never gets a smaller share.",
                torch.allclose(p, torch.exp(z / T) / torch.exp(z / T).sum())
                and torch.allclose(p, torch.exp(-energies / T) / torch.exp(-energies / T).sum())
                and (p > 0).all()
                and torch.isclose(p.sum(), p.new_tensor(1.0))
                and torch.equal(p.argsort(stable=True), z.argsort(stable=True)),
            ),
            details(
                claim(
                    "SM-16 SM-17 SM-18 E01",
                    r"The best total, $T \log \sum_i e^{z_i/T}$, is reached. It is the function "
                    r"$\mathrm{lse}_\beta(z) = \frac{1}{\beta} \log \sum_i e^{\beta z_i}$ with "
                    r"$\beta = 1/T$; the factor in front is part of its definition.",
                    torch.isclose(reward, best),
                ),
            ),
        ]
    )
    return


@app.cell
def _(T, p, rivals, z):
    totals = rivals @ z - T * torch.xlogy(rivals, rivals).sum(-1)
    lost = fenchel.Softmax(beta=1 / T).value(z) - totals
    divergence = torch.xlogy(rivals, rivals / p).sum(-1)
    cost = torch.xlogy(rivals, rivals).sum(-1)
    guesses = 3 * torch.randn(
        1000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    excess = (guesses * rivals).sum(-1) - torch.logsumexp(guesses, -1) - cost
    mo.vstack(
        [
            claim(
                "SM-22 SM-23",
                f"The best of 1,000 random divisions stays {lost.min().item():.4f} below softmax; "
                r"no $q$ exceeds it: $\mathrm{lse}_\beta(z) + T\,\Omega(q) \ge \langle z, q \rangle$, the "
                r"inequality of Fenchel and Young. Here $\langle z, q \rangle = \sum_i q_i z_i$ is the average score and "
                r"$\Omega(q) = \sum_i q_i \log q_i$ is the entropy with its sign reversed.",
                (lost >= -1e-12).all(),
            ),
            claim(
                "SM-39",
                r"What a division $q$ loses is exactly $T \cdot \mathrm{KL}(q \| p)$, with the *divergence* "
                r"$\mathrm{KL}(q \| p) = \sum_i q_i \log (q_i / p_i)$ of [cross-entropy](../cross_entropy/): leaving softmax has this price.",
                torch.allclose(lost, T * divergence, atol=1e-10),
            ),
            details(
                claim(
                    "SM-22",
                    r"Read the other way, for a fixed $q$: no scores $z$ make $\langle z, q \rangle - \mathrm{lse}_1(z)$ larger than $\Omega(q)$, and "
                    r"$z_i = \log q_i$ reach it. Each of the two functions is the *convex conjugate* of the other.",
                    (excess <= 1e-12).all()
                    and torch.allclose(
                        (rivals * rivals.log()).sum(-1) - torch.logsumexp(rivals.log(), -1), cost
                    ),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            Only algebra is needed. Let $Z = \sum_j e^{z_j/T}$, so that softmax is $p_i = e^{z_i/T}/Z$. Take logarithms:
            $z_i = T \log p_i + T \log Z$. Now let $q$ be any division of the evenings. Multiply by $q_i$ and add up; the $q_i$ sum
            to 1, so its average score is $\sum q_i z_i = T \sum q_i \log p_i + T \log Z$. Add its reward for variety,
            $-T \sum q_i \log q_i$: the total is $T \log Z - T \sum q_i \log\frac{q_i}{p_i}$. The first part is the same for all. The
            last sum is never negative, as in [cross-entropy](../cross_entropy/): the curve $\log x$ lies below the line $x - 1$ and touches it only at 1, so
            $\sum q_i \log\frac{p_i}{q_i} \le \sum q_i \left(\frac{p_i}{q_i} - 1\right) \le 1 - 1 = 0$, with equality only if $q = p$. So softmax reaches
            $T \log Z$, and every other division earns less.""",
        undergraduate=r"""
            Maximise $\langle p, z \rangle - T \sum_i p_i \log p_i$ subject to $\sum_i p_i = 1$. The Lagrangian is
            stationary where $z_i - T(\log p_i + 1) - \nu = 0$, so $p_i \propto e^{z_i/T}$. The slope of
            $-p \log p$ at 0 is infinite, hence no $p_i = 0$ is optimal and the constraints
            $p_i \ge 0$ stay inactive. The objective is strictly concave, so the stationary point is the only
            maximiser. Inserting it gives the value $T \log \sum_i e^{z_i/T}$, and the gap of any other
            $q$ is $T\,\mathrm{KL}(q \| p)$: insert $z_i = T \log p_i + \text{const}$.""",
        research=r"""
            $\mathrm{lse}$ is the convex conjugate of negative entropy on the simplex, and softmax its gradient;
            conversely $-H(p) = \max_z \langle z, p \rangle - \mathrm{lse}(z)$ (Rockafellar 1970). The gap is a Fenchel-Young
            loss (Blondel, Martins and Niculae 2020); with one-hot $y$ it is the cross-entropy. Replacing $H$ by another
            concave function gives the other maps of `fenchel.choice`, with the same derivation.""",
    )
    return


@app.cell
def _():
    five, two = (fenchel.Softmax().weights(torch.tensor(pair)) for pair in ([5.0, 4.0], [2.0, 1.0]))
    scores_of_shares = torch.tensor([0.3, 0.5, 0.2]).log()
    raw = torch.tensor([2.0, -1.0, 0.5])
    tamed = fenchel.Softmax().weights(raw)
    mo.vstack(
        [
            mo.md("## Which properties does it have?"),
            claim(
                "SM-04 SM-05 E21",
                f"Scores 5 and 4 give {five[0]:.4f} and {five[1]:.4f}; so do 2 and 1. Adding the same "
                "number to all scores changes nothing.",
                torch.allclose(five, two) and round(five[0].item(), 4) == 0.7311,
            ),
            details(
                claim(
                    "SM-06",
                    "Shares 0.30, 0.50, 0.20 come from the scores log 0.30, log 0.50, log 0.20, up to a "
                    "constant: softmax takes them back.",
                    torch.allclose(
                        fenchel.Softmax().weights(scores_of_shares + 7.0), scores_of_shares.exp()
                    ),
                ),
                claim(
                    "SM-07",
                    "The ratio of two shares is the exponential of the difference of their scores.",
                    torch.isclose(five[0] / five[1], torch.tensor(1.0).exp()),
                ),
                claim(
                    "SM-08",
                    "Scores are not shares: of 2, -1 and 0.5 one is negative, and they sum to 1.5. "
                    f"Softmax maps any scores to a distribution, these to {', '.join(f'{w:.3f}' for w in tamed.tolist())}.",
                    (raw < 0).any()
                    and raw.sum() == 1.5
                    and (tamed > 0).all()
                    and torch.isclose(tamed.sum(), torch.tensor(1.0)),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    scales = torch.logspace(-1, 1.2, 23, dtype=torch.float64)
    base = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    entropies = [
        -torch.xlogy(w, w).sum().item()
        for w in (fenchel.Softmax().weights(s * base) for s in scales)
    ]
    mo.vstack(
        [
            line_chart(
                [
                    {"scale of the scores": s, "entropy": h}
                    for s, h in zip(scales.tolist(), entropies, strict=True)
                ],
                "scale of the scores",
                "entropy",
                title="Entropy against the scale of the scores",
                log_x=True,
            ),
            claim(
                "SM-10 SM-11 E45",
                "Doubling all scores is not harmless: the entropy falls with their scale, from "
                f"{entropies[0]:.2f} to {entropies[-1]:.2f} nats. Softmax ignores a shift of the scores, "
                "not their scale, and a temperature divides the scale.",
                all(a > b for a, b in pairwise(entropies)),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## How it reacts

    A committee has a fixed number of votes. When one candidate gains, the votes come from the
    others, in proportion to what each of them has. This is what the derivative says, at $T = 1$:

    $$\frac{\partial p_i}{\partial z_j} = p_i (\delta_{ij} - p_j), \qquad
    J = \mathrm{diag}(p) - p\,p^\top .$$

    $J$, the *Jacobian*, is the table of all these slopes. At another temperature it is multiplied by $\beta$.
    """)
    return


@app.cell
def _():
    details(
        mo.md(r"""
        Raise $z_j$ by a tiny $\varepsilon$. Then $e^{z_j}$ grows by the share $\varepsilon$ of itself and the sum of all by the share
        $\varepsilon p_j$. Each $p_i$ is divided by that larger sum and loses $\varepsilon p_i p_j$; $p_j$ alone gains $\varepsilon p_j$ first.

        $\delta_{ij}$, Kronecker's delta, is 1 where $i = j$ and 0 elsewhere; $\mathrm{diag}(p)$ has $p$ on its diagonal and
        $p\,p^\top$ the entries $p_i p_j$.
        """),
        title="In numbers",
    )
    return


@app.cell
def _(z):
    J = torch.func.jacrev(lambda s: fenchel.Softmax().weights(s))(z)
    q = fenchel.Softmax().weights(z)
    formula = torch.diag(q) - torch.outer(q, q)
    g = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    gradient = torch.func.grad(lambda s: fenchel.Softmax(beta=4.0).value(s))(z)
    hessian = torch.func.hessian(lambda s: fenchel.Softmax(beta=4.0).value(s))(z)
    sharp = fenchel.Softmax(beta=4.0).weights(z)
    uniform = fenchel.Softmax().weights(torch.zeros(5, dtype=torch.float64))
    at_zero = torch.func.jacrev(lambda s: fenchel.Softmax().weights(s))(
        torch.zeros(5, dtype=torch.float64)
    )
    ones = torch.ones(5, 5, dtype=torch.float64)
    mo.vstack(
        [
            claim(
                "DV-12 DV-13 DV-30 PD-08",
                r"Automatic differentiation gives $p_i(1 - p_i)$ on the diagonal and $-p_i p_j$ beside it.",
                torch.allclose(J, formula, atol=1e-12),
            ),
            details(
                claim(
                    "DV-16",
                    r"$J$ is symmetric and its rows sum to 0, $J \mathbf{1} = 0$ with $\mathbf{1}$ a list of ones: shares that rise are taken from others.",
                    torch.allclose(J, J.T) and J.sum(-1).abs().max() < 1e-12,
                ),
                claim(
                    "DV-17",
                    r"$J g = p * (g - \langle p, g \rangle)$, where $*$ multiplies entry by entry: the product needs no matrix.",
                    torch.allclose(
                        fenchel.Softmax().jacobian_product(q, g), formula @ g, atol=1e-12
                    ),
                ),
                claim(
                    "DV-14 DV-15",
                    r"The gradient of $\mathrm{lse}_\beta$ is softmax of $\beta z$; its second derivative is "
                    r"$\beta (\mathrm{diag}(p) - p p^\top)$, which has no negative eigenvalue: in no direction does $\mathrm{lse}_\beta$ bend "
                    r"downwards.",
                    torch.allclose(gradient, sharp)
                    and torch.allclose(hessian, 4 * (torch.diag(sharp) - torch.outer(sharp, sharp)))
                    and torch.linalg.eigvalsh(hessian).min() > -1e-12,
                ),
                claim(
                    "DV-25",
                    r"At equal scores each of $n$ shares is $1/n$ and $J = \frac1n I - \frac1{n^2} \mathbf{1}\mathbf{1}^\top$.",
                    torch.allclose(uniform, uniform.new_full((5,), 0.2))
                    and torch.allclose(
                        at_zero, torch.eye(5, dtype=torch.float64) / 5 - ones / 25, atol=1e-12
                    ),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    beta = mo.ui.slider(
        steps=[0.5, 1.0, 2.0, 4.0, 8.0], value=1.0, label=r"$\beta = 1/T$", show_value=True
    )
    beta
    return (beta,)


@app.cell
def _(beta):
    softmax = fenchel.Softmax(beta=beta.value)
    pairs = torch.randn(2, 2000, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    near = pairs[0] + 0.1 * pairs[1]
    ratio = (softmax.weights(near) - softmax.weights(pairs[0])).norm(dim=-1) / (
        near - pairs[0]
    ).norm(dim=-1)
    tie = torch.tensor([0.0, 0.0], dtype=torch.float64)
    depths = torch.tensor([1.0, 5.0, 20.0, 60.0], dtype=torch.float64)
    five_scores = torch.zeros(4, 5, dtype=torch.float64)
    five_scores[:, 2:] = -depths[:, None]
    one = fenchel.Softmax()
    norms = one.sensitivity(one.weights(five_scores))
    row_sums = 2 * (w := one.weights(pairs[0])) * (1 - w)
    mo.vstack(
        [
            mo.md(
                "How strong can the reaction be? Never more than $\\beta / 2$ per unit of score. With two "
                "alternatives it is strongest where their scores are equal, and the steeper the larger $\\beta$ is:"
            ),
            line_chart(
                [
                    {"score of A minus score of B": lead, "weight of A": w}
                    for lead in (0.1 * i for i in range(-40, 41))
                    for w in [softmax.weights(torch.tensor([lead, 0.0]))[0].item()]
                ],
                "score of A minus score of B",
                "weight of A",
                title=f"Two alternatives, β = {beta.value:g}",
                y_range=(0, 1),
            ),
            claim(
                "LP-04 LP-05",
                f"Over 2,000 pairs of score vectors the weights move at most {ratio.max().item():.3f} "
                f"per unit; the bound is {beta.value / 2:g}.",
                ratio.max() <= beta.value / 2,
            ),
            details(
                claim(
                    "LP-06 E02",
                    r"Two equal scores attain $\beta/2$; five equal ones have $\beta/5$. Five scores only approach $\beta/2$, as three of them go "
                    f"down by 1, 5, 20 and 60: {', '.join(f'{n:.5f}' for n in norms.tolist())} with $\\beta = 1$.",
                    torch.isclose(
                        softmax.sensitivity(softmax.weights(tie)), tie.new_tensor(beta.value / 2)
                    )
                    and torch.isclose(
                        softmax.sensitivity(softmax.weights(tie.new_zeros(5))),
                        tie.new_tensor(beta.value / 5),
                    )
                    and (norms.diff() > 0).all()
                    and norms[0] < 0.33
                    and norms[1] < 0.5,
                ),
                claim(
                    "LP-07 E03",
                    r"The proof is one line: a symmetric table stretches no vector by more than its largest row sum of absolute values "
                    r"(Gershgorin), and row $i$ of $J$ has $2 \beta p_i (1 - p_i) \le \beta/2$. The same bound holds in the 1- and the "
                    r"$\infty$-norm.",
                    row_sums.max() <= 0.5
                    and torch.allclose(
                        row_sums[0], (torch.diag(w[0]) - torch.outer(w[0], w[0])).abs().sum(-1)
                    ),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    K = 4
    uniform_prior = torch.full((K,), -torch.tensor(float(K)).log().item(), dtype=torch.float64)
    scores = torch.tensor([1.0, 0.0, 2.0, -1.0], dtype=torch.float64)
    map_ = fenchel.Softmax(beta=2.0)
    index = torch.tensor(2)
    grid = torch.linspace(0, 1, 9, dtype=torch.float64)
    ends = torch.tensor([[3.0, -1.0, 0.5, 0.0], [-2.0, 1.0, 4.0, 0.0]], dtype=torch.float64)
    along = torch.stack([torch.logsumexp((1 - t) * ends[0] + t * ends[1], 0) for t in grid])
    chord = (1 - grid) * along[0] + grid * along[-1]
    q_, k_ = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = fenchel.Softmax().weights(q_ @ k_.T / 8**0.5)
    details(
        claim(
            "SM-36 E102",
            r"Charging for the divergence from the uniform distribution (as in *Priors and budgets*) instead of paying for entropy changes the value "
            r"by the constant $\log K / \beta$, and not the shares.",
            torch.allclose(map_.weights(scores), map_.weights(scores, uniform_prior))
            and torch.isclose(
                map_.value(scores) - map_.value(scores, uniform_prior),
                scores.new_tensor(K).log() / 2,
            ),
        ),
        claim(
            "SM-24",
            r"With $\beta = 1$ the gap of the inequality at a one-hot $y$ is the cross-entropy.",
            torch.isclose(
                fenchel.Softmax().loss(scores, index),
                torch.nn.functional.cross_entropy(scores, index),
            ),
        ),
        claim(
            "SM-13",
            "Log-sum-exp is convex: between two score vectors it stays below the chord.",
            (along <= chord + 1e-12).all(),
        ),
        claim(
            "SM-25",
            "Each row of [attention](../attention/) solves this problem: average score plus entropy.",
            torch.allclose(rows.sum(-1), torch.ones(5, dtype=torch.float64))
            and fenchel.kkt(fenchel.Softmax(), q_ @ k_.T / 8**0.5, rows).gap.max() < 1e-9,
        ),
        title="Where you meet it again",
    )
    return


@app.cell
def _():
    def check(names):
        weights = names["weights"]
        z = torch.tensor([800.0, 799.0, -500.0], dtype=torch.float64)
        for T in (0.5, 1.0, 4.0):
            p = weights(z, T)
            assert torch.is_tensor(p), "Return a tensor."
            assert torch.isfinite(p).all(), (
                "Scores of 800 overflow: take the largest score off first."
            )
            expected = fenchel.Softmax(beta=1 / T).weights(z)
            assert torch.allclose(p, expected), f"At T = {T} the shares differ from softmax."

    exercise = Exercise(
        lesson="softmax",
        task="Write `weights(z, T)`: softmax at temperature `T` of a vector, for scores of any size, "
        "without a ready-made softmax. The starter is the formula; a computer cannot hold $e^{800}$, and a shift of all scores "
        "changes nothing.",
        starter="""
    def weights(z, T):
        powers = torch.exp(z / T)
        return powers / powers.sum()
    """,
        solution="""
    def weights(z, T):
        powers = torch.exp((z - z.max()) / T)  # a common shift changes nothing
        return powers / powers.sum()
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
def _():
    own_text = text_field("the people of the")
    own_text
    return (own_text,)


@app.cell
def _(own_text, run_path):
    mo.stop(run_path is None, no_run())
    own = fenchel.load(run_path, dtype=torch.float32)
    ids = torch.tensor([token_ids(own_text.value, own.tokenizer, own.config.context)])
    with torch.no_grad():
        logits = own.model(ids)[0, -1].double()
    next_token = fenchel.Softmax().weights(logits)
    top = next_token.topk(5)
    mo.vstack(
        [
            mo.md("The last layer of the model is a softmax over its vocabulary. It goes on with:"),
            bar_chart(
                [
                    {
                        "token": repr(own.tokenizer.decode([i])),
                        "share": w,
                        "logit": logits[i].item(),
                    }
                    for w, i in zip(top.values.tolist(), top.indices.tolist(), strict=True)
                ],
                "token",
                "share",
                title="The next token",
                y_range=(0, 1),
            ),
            claim(
                "SM-07",
                "The ratio of the first two shares is the exponential of the difference of their logits.",
                torch.isclose(
                    (top.values[0] / top.values[1]).log(),
                    logits[top.indices[0]] - logits[top.indices[1]],
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        r"Entropy is one reward for variety among many. With another concave reward the same argument gives other "
        r"weights: the squared norm gives sparsemax, whose small weights are exactly 0 and whose "
        r"constraints $p_i \ge 0$ become active. And $\beta/2$ bounds the reaction to *scores*; in attention the "
        r"scores themselves are products of tokens, and no single bound holds for all inputs ([Lipschitz](../lipschitz/))."
    )
    return


@app.cell
def _():
    footer("softmax")
    return


if __name__ == "__main__":
    app.run()
