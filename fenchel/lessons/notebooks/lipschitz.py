"""The Lipschitz cone: which layers have a largest sensitivity, and why attention has none."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="The Lipschitz cone, and why attention has none",
)

with app.setup:
    from math import log

    import marimo as mo
    import torch

    import fenchel
    from fenchel.attention import self_attention
    from fenchel.inspection import Search, certify_model, open_model
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
        number,
        proof,
        question,
        run_picker,
        table,
        what_breaks,
    )
    from fenchel.sensitivity import bounds, cone, identity, witness


@app.cell
def _():
    header("lipschitz")
    return


@app.cell
def _():
    guess = question(
        "Attention mixes tokens with weights that sum to 1. Make one token ten times as long. By "
        "what factor can the largest sensitivity of the output grow?",
        ["by 1: the weights still sum to 1", "by 10", "by 100"],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "by 100",
        "The long token pulls ten times as hard on the weights, and each bit of weight that moves "
        "carries ten times as far. Ten times ten. (Nearly so, and the more nearly the longer the token is.)",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## A speed limit

    A train never exceeds 100 km/h. Half an hour from now it is at most 50 km from here, whatever its timetable: a speed
    limit confines the journey to a double cone. A function with a speed limit $L$ is called *Lipschitz* with constant $L$: for all $x$ and $x_0$

    $$|f(x) - f(x_0)| \le L\,|x - x_0| .$$

    Below, $f$ is the sine and the tip of the cone is at $x_0$. *Pull the orange ring down: from which $L$ on does the graph
    leave the cone? Then move the tip: where would a smaller limit do?*
    """)
    return


@app.cell
def double_cone():
    journey = cone(torch.sin, 0.0, 1.0).x  # 600 points
    train = Scene(
        "double_cone",
        {"L": 1.3, "tip": 0.0},
        places=all_places(L=[i / 20 for i in range(10, 31)], tip=[i / 4 for i in range(-12, 13)]),
        x=journey.tolist(),
    )
    train
    return journey, train


@app.cell
def _(journey, train):
    seen = cone(torch.sin, train.state["tip"], train.state["L"], x=journey)
    claim(
        "LP-01",
        f"With the tip at {train.state['tip']:.2f} and the limit {train.state['L']:.2f}, {seen.violations} of "
        "600 points lie outside the cone; from $L = 1$ on none does, wherever the tip is.",
        (seen.violations == 0 or seen.L < 1)
        and seen.violations == int((seen.change > seen.L * seen.distance + 1e-12).sum()),
    )
    return


@app.cell
def _():
    wide, narrow = cone(torch.sin, 0.0, 1.0), cone(torch.sin, 0.0, 0.9)
    _x = wide.x
    _gaps = (_x[:, None] - _x).abs()
    _apart = _gaps > 0
    steepest_pair = ((_x.sin()[:, None] - _x.sin()).abs()[_apart] / _gaps[_apart]).max()
    blunt = wide.x.abs().min()
    mo.vstack(
        [
            details(
                claim(
                    "LP-01",
                    f"Over all pairs of 600 points, $|\\sin x - \\sin x_0|$ is at most {steepest_pair.item():.5f} "
                    "times $|x - x_0|$: wherever among them the tip stands, $L = 1$ is enough, and 0.9999 is not.",
                    0.9999 < steepest_pair <= 1.0,
                ),
                claim(
                    "LP-03",
                    f"With the tip at 0, $L = 1$ leaves {wide.violations} of 600 points outside and $L = 0.9$ leaves "
                    f"{narrow.violations}.",
                    wide.violations == 0 and narrow.violations == 100 and len(wide.x) == 600,
                ),
                claim(
                    "LP-02 E06",
                    f"The 600 points do not contain 0: the nearest lies {blunt.item():.5f} away. A cone drawn "
                    "through them would have a blunt tip, so a drawing must insert the tip as a further point. "
                    "`python -m fenchel.lessons.figures` writes it as `lipschitz_double_cone.svg`.",
                    round(blunt.item(), 5) == 0.00787
                    and blunt > 0
                    and abs(_x[-1].item() - 4.712389) < 1e-6,
                ),
            ),
            mo.md(
                "The smallest speed limit of a smooth function is its steepest slope. For many numbers the "
                "slope is a matrix, the *Jacobian* $J$, and its steepness (sensitivity) "
                "the *spectral norm* $\\|J\\|$: the most by which $J$ stretches an arrow."
            ),
        ]
    )
    return


@app.cell
def _():
    grid = torch.linspace(-8, 8, 160_001, dtype=torch.float64)
    gelu_slopes = torch.func.vmap(torch.func.grad(torch.nn.functional.gelu))(grid)
    gelu_top = gelu_slopes.max()
    relu_top = torch.func.vmap(torch.func.grad(torch.relu))(grid).max()
    constant_token = torch.full((6,), 3.0, dtype=torch.float64)
    norm_jacobian = torch.func.jacrev(lambda x: torch.nn.functional.layer_norm(x, (6,), eps=1e-5))(
        constant_token
    )
    norm_top = torch.linalg.matrix_norm(norm_jacobian, 2)
    _tied = torch.func.jacrev(lambda z: z.softmax(-1))(torch.zeros(2, dtype=torch.float64))
    softmax_top = torch.linalg.matrix_norm(_tied, 2)
    _scores = 3 * torch.randn(
        500, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    _each = torch.func.vmap(torch.func.jacrev(lambda z: z.softmax(-1)))(_scores)
    softmax_elsewhere = torch.linalg.matrix_norm(_each, 2).max()
    details(
        table(
            [
                {"layer": "ReLU", "largest sensitivity": relu_top.item(), "where": "x > 0"},
                {
                    "layer": "GELU",
                    "largest sensitivity": gelu_top.item(),
                    "where": "x = root of 2",
                },
                {
                    "layer": "LayerNorm, eps = 0.00001",
                    "largest sensitivity": norm_top.item(),
                    "where": "a token whose entries are all equal",
                },
                {
                    "layer": "softmax, beta = 1",
                    "largest sensitivity": softmax_top.item(),
                    "where": "two equal scores",
                },
            ]
        ),
        claim(
            "LP-18",
            f"ReLU: {relu_top.item():g}. GELU: {gelu_top.item():.4f}, at $x = {grid[gelu_slopes.argmax()].item():.4f}$, "
            f"which is $\\sqrt 2$. LayerNorm: {norm_top.item():.1f} $= 1/\\sqrt\\epsilon$ at a token without "
            "spread, because it divides by the spread. Softmax: "
            f"{softmax_top.item():g}; the steepest of 500 random inputs of six scores has {softmax_elsewhere.item():.3f}.",
            relu_top == 1
            and abs(softmax_top.item() - 0.5) < 1e-12
            and softmax_elsewhere <= 0.5
            and round(gelu_top.item(), 4) == 1.1289
            and abs(grid[gelu_slopes.argmax()].item() - 2**0.5) < 2e-4
            and round(norm_top.item(), 1) == 316.2
            and bounds.activation("relu") == 1
            and round(bounds.activation("gelu").item(), 4) == 1.1289
            and round(bounds.norm_layer(eps=1e-5).item(), 1) == 316.2,
        ),
        title="Layers that have a limit",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Two tokens, one number each

    A lever on a lever multiplies. Attention is such a pair.

    Take two tokens, $x$ and $t$, each a number. The first asks: its scores are $x \cdot x$ and $x \cdot t$, softmax makes
    them weights, the output is the weighted mean. At $x = 0$ both weights are one half. Move $x$ a little.

    - First lever: the score of the other moves $t$ times as much.
    - Second lever: each weight takes the output $t$ times as far.
    """)
    return


@app.cell
def _():
    length = mo.ui.slider(
        steps=[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0],
        value=10.0,
        label="Length $t$ of the second token",
        show_value=True,
    )
    length
    return (length,)


@app.cell
def _(length):
    one = torch.ones(1, 1, dtype=torch.float64)

    def first_output(x, t):
        """The output of the first of two tokens, x and t: two numbers to one number."""
        pair = torch.stack([x, t]).reshape(2, 1)
        return self_attention(pair, one, one, one, scale=1.0, backend="reference")[0, 0]

    t_now = torch.tensor(length.value, dtype=torch.float64)
    near_zero = torch.linspace(-1, 1, 401, dtype=torch.float64) ** 3  # dense where it is steep
    outputs = torch.func.vmap(first_output, in_dims=(0, None))(near_zero, t_now)
    slope_at_zero = torch.func.grad(first_output)(torch.zeros((), dtype=torch.float64), t_now)
    move = 0.01 / t_now**2
    by_hand = (
        first_output(move, t_now) - first_output(torch.zeros((), dtype=torch.float64), t_now)
    ) / move
    mo.vstack(
        [
            line_chart(
                [
                    {"x": x, "output": y}
                    for x, y in zip(near_zero.tolist(), outputs.tolist(), strict=True)
                ],
                "x",
                "output",
                title="Output of the first token against x",
                x_range=(-1, 1),
                y_range=(0, 100),
                here=[{"x": 0.0, "output": t_now.item() / 2}],
            ),
            claim(
                "LP-11",
                f"At $x = 0$ the output has the slope $t^2/4 + 1/2$. For $t = {length.value:g}$ that is "
                f"{slope_at_zero.item():,.2f}; moving $x$ by {move.item():.3g} moves the output by "
                f"{by_hand.item():,.2f} times as much. For a long token, ten times the length is nearly a hundred times the slope.",
                torch.isclose(slope_at_zero, t_now**2 / 4 + 0.5, rtol=1e-12)
                and torch.isclose(by_hand, slope_at_zero, rtol=1e-2),
            ),
        ]
    )
    return (first_output,)


@app.cell
def _():
    mo.md(r"""
    ## The theorem, and all its exceptions

    A speed limit $L$ would have to be larger than $t^2/4 + 1/2$ for every $t$. No number is. The
    same happens with any number of tokens of any width:

    **Theorem.** $\mathrm{Att}$ has a Lipschitz constant on the set of *all* inputs $X$ (in symbols $\mathbb{R}^{n \times d}$) if and
    only if $n = 1$, or $W_Q W_K^\top = 0$, or $W_V = 0$.

    The three exceptions switch off the levers. One token has all the weight. Scores that are always 0 never
    move a weight. Values that are 0 have nothing to carry. It is easy to remember only
    $W_Q W_K^\top \ne 0$ and to forget the other two.
    """)
    return


@app.cell
def _():
    details(
        mo.md(r"""
        $X$ is the matrix of $n$ tokens, one per row, each of $d$ numbers. Attention multiplies it by three learned matrices: $X W_Q$
        are the queries, $X W_K$ the keys, $X W_V$ the values. With $A = W_Q W_K^\top$, which is $d$ by $d$
        (the factor $1/\sqrt{d_k}$ of [attention](../attention/) is taken to be part of $W_Q$ here),

        $$\mathrm{Att}(X) = P\,X\,W_V,$$

        where row $i$ of $P$ is the softmax of row $i$ of the scores $X A X^\top$. The distance of two such tables is the root of the sum of
        the squared differences of their entries.
        """),
        title="The letters",
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            Two tokens, $0$ and $t$, with equal scores: the weights are $\frac12$ and $\frac12$, the output is
            $\frac t2$. Move the first token to $x$, very close to 0. Its score for the other token becomes $xt$, and for
            itself $x^2$, which is too small to matter. The weight of the other token becomes
            $\frac{1}{1 + e^{-xt}}$. For a small exponent $e^{-xt} \approx 1 - xt$, so the weight is about
            $\frac{1}{2 - xt} \approx \frac12 + \frac{xt}{4}$. It has grown by $\frac{xt}{4}$: the first lever. The output grows by that weight
            times $t$, so by $\frac{x t^2}{4}$: the second lever; the token's own move adds $\frac x2$. Per unit of $x$ this is
            $\frac{t^2}{4} + \frac12$. Whatever the limit $L$, $t = 2\sqrt L$ breaks it.""",
        undergraduate=r"""
            *If.* $n = 1$: the only weight is 1 and $\mathrm{Att}(X) = X W_V$. $A = 0$: all weights are $1/n$. $W_V = 0$: the output is 0. All three are linear.

            *Only if.* Let $n \ge 2$, $A \ne 0$, $W_V \ne 0$.

            1. Pick $w$ with $v = A^\top w \ne 0$ (a vector of $d$ numbers). Fix a row $i$. Let $\tilde X$ have row $i$ equal to $w$ and zeros elsewhere.
            2. $\{u : v \cdot u = 0\}$ and $\{u : W_V^\top u = 0\}$ are proper subspaces of $\mathbb{R}^d$, and two proper subspaces do not cover it: if $a$ lies outside the first and $b$ outside
               the second, then $a$, $b$ or $a + b$ lies outside both. Pick such a $u$.
            3. Pick $j \ne i$. Let $X(t)$ have row $j$ equal to $t u$ and all other rows 0. Row $i$ of $X$ is 0, so row $i$ of the scores is 0 for every $t$, and its weights are uniform,
               $p = \frac1n \mathbf 1$. A move $\tilde X$ changes row $i$ of the scores by $X A^\top w = X v$; the other term of the product rule, $\tilde X A^\top x_i$, vanishes with $x_i$. Softmax turns this into
               $dp = \frac1n (I - \frac1n \mathbf 1 \mathbf 1^\top) X v$.
            4. Row $i$ of $d\mathrm{Att}(X)\tilde X$ is $dp^\top X W_V + p^\top \tilde X W_V = v^\top \mathrm{Cov}(X)\, W_V + \frac1n w^\top W_V$, where
               $\mathrm{Cov}(X) = \frac1n X^\top (I - \frac1n \mathbf 1 \mathbf 1^\top) X = t^2 \frac{n-1}{n^2}\, u u^\top$. So it equals
               $$t^2\,\frac{n-1}{n^2}\,(v \cdot u)\,u^\top W_V + \frac1n\,w^\top W_V .$$
               The second term does not depend on $t$. The first is not zero and grows like $t^2$. $\|\tilde X\|$ is fixed.
            5. $\mathrm{Att}$ is continuously differentiable. With a Lipschitz constant $L$, $\|d\mathrm{Att}(X)\| \le L$ for all $X$; step 4 contradicts this for large $t$. $\square$""",
        research=r"""
            Kim, Papamakarios and Mnih (2021, Theorem 3.1) prove it for $n \ge 2$. Signs $\pm t u$ in equal numbers on the other rows raise $\frac{n-1}{n^2}$ to $\frac{n-1}{n}$, and
            $w = Au/\|Au\|$ makes the constant $\|Au\|\,\|W_V^\top u\|$ times that; `fenchel.sensitivity.witness.blowup` returns such an input for any choice map and prior. If every row has norm at most $R$,
            $$\|d\mathrm{Att}\| \le \|W_V\|\big((1 + \sqrt n)\,\|A\| R^2 + \sqrt n\big):$$
            row $i$ of $d\mathrm{Att}\,\tilde X$ is $[\tilde x_i^\top A\,\mathrm{Cov}_i + \sum_j p_{ij}(x_i^\top A \tilde x_j)(x_j - m_i)^\top + \sum_j p_{ij}\tilde x_j^\top] W_V$ with mean $m_i$ and covariance $\mathrm{Cov}_i$ of the tokens under row $i$'s weights; use
            $\|\mathrm{Cov}_i\| \le R^2$, Cauchy-Schwarz under $p_i$, and $\sum_i p_{ij} \le n$. So $R^2$ is the exact order. Castin, Ablin and Peyré (2024) treat the $\sqrt n$, which is attained by attention sinks. For the
            norm $\max_i \|x_i\|$ it disappears: $\|W_V\|(1 + 2\|A\|R^2)$. Proofs, and bounds at a point: `docs/maths/sensitivity.md`.""",
    )
    return


@app.cell
def _():
    generator = torch.Generator().manual_seed(12)
    n, d = 5, 4
    W_Q, W_K, W_V = (torch.randn(d, d, dtype=torch.float64, generator=generator) for _ in range(3))
    u, w = torch.randn(2, d, dtype=torch.float64, generator=generator)
    A = W_Q @ W_K.T
    v = A.T @ w

    def att(X, **spec):
        return self_attention(X, W_Q, W_K, W_V, scale=1.0, backend="reference", **spec)

    nudge = torch.zeros(n, d, dtype=torch.float64)
    nudge[0] = w

    def proof_input(t):
        """X(t) of step 3: row 2 is t u, the others are 0."""
        X = torch.zeros(n, d, dtype=torch.float64)
        X[2] = t * u
        return X

    def moved(X, direction, **spec):
        """dAtt(X) direction."""
        return torch.func.jvp(lambda Y: att(Y, **spec), (X,), (direction,))[1]

    proof_rows, proof_errors = [], []
    for _t in (0.0, 1.0, 10.0, 100.0, 1000.0):
        _row = moved(proof_input(_t), nudge)[0]
        _formula = _t**2 * (n - 1) / n**2 * (v @ u) * (u @ W_V) + w @ W_V / n
        proof_errors.append(((_row - _formula).norm() / _formula.norm()).item())
        proof_rows.append(
            {
                "t": f"{_t:g}",
                "length of row i, automatic derivative": _row.norm().item(),
                "length by the formula": _formula.norm().item(),
            }
        )
    _scores = proof_input(7.0) @ A @ proof_input(7.0).T
    mo.vstack(
        [
            mo.md(f"The proof in numbers: $n = {n}$ tokens of width $d = {d}$, random weights."),
            table(proof_rows),
            details(
                claim(
                    "LP-09 E10",
                    f"Row $i$ of $X$ is 0, so row $i$ of the scores is 0 and its {n} weights are all {1 / n:g}. "
                    f"$A$ is {d} by {d} and $v = A^\\top w$ has {d} entries, whatever the number of tokens.",
                    _scores[0].abs().max() == 0
                    and torch.allclose(_scores.softmax(-1)[0], torch.full((n,), 1 / n).double())
                    and A.shape == (d, d)
                    and v.shape == (d,)
                    and v.norm() > 0,
                ),
                claim(
                    "LP-08 LP-10 E13 PD-22",
                    f"Row $i$ of $d\\mathrm{{Att}}\\,\\tilde X$ equals the formula of step 4 at every $t$, to "
                    f"{max(proof_errors):.0e} of its length; both factors of its first term differ from 0, so it has no bound.",
                    max(proof_errors) < 1e-12 and (v @ u).abs() > 0.1 and (u @ W_V).norm() > 0.1,
                ),
            ),
        ]
    )
    return A, W_K, W_Q, W_V, att, d, moved, n, nudge, proof_input, u, v, w


@app.cell
def _(A, W_K, W_Q, W_V, att, d, n):
    _zero = torch.zeros(d, d, dtype=torch.float64)
    _far = 1e3 * torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _single = fenchel.jacobian(att, _far[:1]).dense()
    _flat = fenchel.jacobian(lambda X: self_attention(X, _zero, W_K, W_V), _far).dense()
    _none = fenchel.jacobian(lambda X: self_attention(X, W_Q, W_K, _zero), _far).dense()
    _left, _right = _zero.clone(), _zero.clone()
    _left[:, 0], _right[:, 1] = 1.0, 1.0

    def why_not(*arguments):
        try:
            witness.blowup(*arguments, 10.0)
        except ValueError as error:
            return str(error).rsplit(": ", 1)[-1].rstrip(".")
        return ""

    reasons = [
        why_not(W_Q, W_K, W_V, 1),
        why_not(W_Q, _zero, W_V, n),
        why_not(W_Q, W_K, _zero, n),
    ]
    mo.vstack(
        [
            claim(
                "LP-12 E11",
                r"The exceptions hold with $W_Q W_K^\top \ne 0$: one token gives the Jacobian $W_V^\top$ exactly, "
                "however long it is; $W_V = 0$ gives 0. Scores of 0 give an average, with norm at most "
                r"$\|W_V\|$, even for tokens of length 1,000.",
                torch.allclose(_single, W_V.T)
                and A.norm() > 0
                and (_none == 0).all()
                and torch.linalg.matrix_norm(_flat, 2)
                <= torch.linalg.matrix_norm(W_V, 2) * (1 + 1e-12)
                and all(reasons)
                and why_not(_left, _right, W_V, n) == reasons[1]
                and why_not(W_Q, W_K, W_V, n) == "",
            ),
            mo.md("`witness.blowup` says why nothing grows: `" + "`; `".join(reasons) + "`."),
        ]
    )
    return


@app.cell
def _():
    mask = mo.ui.dropdown(
        ["every token", "itself and those before (causal)", "itself and the one before"],
        value="every token",
        label="A token attends to",
    )
    mask
    return (mask,)


@app.cell
def _(W_K, W_Q, W_V, mask, n):
    prior = {
        "every token": None,
        "itself and those before (causal)": fenchel.Causal(),
        "itself and the one before": fenchel.Window(1, 0),
    }[mask.value]
    lengths = torch.logspace(0, 3, 13, dtype=torch.float64).tolist()
    _keys = W_Q / torch.linalg.matrix_norm(W_Q, 2)
    growth_rows, pair_rows, distance_norms, dot_norms = [], [], [], []
    for _t in lengths:
        _w = witness.blowup(W_Q, W_K, W_V, n, _t, prior=prior)
        _J = fenchel.self_attention_jacobian(_w.X, W_Q, W_K, W_V, prior=prior)
        dot_norms.append((_J @ _w.direction).norm().item())
        _D = fenchel.jacobian(lambda X: bounds.distance_attention(X, _keys, W_V), _w.X).dense()
        distance_norms.append(torch.linalg.matrix_norm(_D, 2).item())
        growth_rows += [
            {"length t": _t, "sensitivity": dot_norms[-1], "scores": "products"},
            {"length t": _t, "sensitivity": distance_norms[-1], "scores": "distances"},
        ]
    for _t in (10.0, 100.0, 1000.0):
        _w = witness.blowup(W_Q, W_K, W_V, n, _t, prior=prior)
        _step = 1e-6 / _t
        _pair = [
            self_attention(X, W_Q, W_K, W_V, prior=prior)
            for X in (_w.X + _step * _w.direction, _w.X)
        ]
        pair_rows.append(
            {
                "t": f"{_t:g}",
                "ratio of a pair": ((_pair[0] - _pair[1]).norm() / _step).item(),
                "growth x t^2": _w.growth * _w.rate,
            }
        )
    log_slope = log(dot_norms[-1] / dot_norms[4]) / log(lengths[-1] / lengths[4])
    distance_bound = bounds.l2_attention(_keys, W_V, n=n).item()
    mo.vstack(
        [
            line_chart(
                growth_rows,
                "length t",
                "sensitivity",
                "scores",
                title="Sensitivity against the length of tokens, both axes logarithmic",
                y_range=(0.5, 1e7),
                log_x=True,
                log_y=True,
            ),
            claim(
                "LP-11 LP-16",
                f"From $t = 10$ to 1,000 the line of products has the slope {log_slope:.3f}: growth like $t^2$. A mask "
                "does not help as long as some token attends to two.",
                abs(log_slope - 2) < 0.02,
            ),
            mo.md(
                "No derivative is needed to see it. Two inputs that differ by a tiny step have outputs that differ by "
                "this many times the step:"
            ),
            table(pair_rows),
            details(
                claim(
                    "LP-11",
                    "The ratios of pairs agree with the derivative, to one percent.",
                    all(
                        abs(r["ratio of a pair"] / r["growth x t^2"] - 1) < 0.01 for r in pair_rows
                    ),
                ),
                claim(
                    "LP-15",
                    "Scores that are minus squared *distances* between tokens, with queries equal to keys, do have a constant "
                    f"(Kim, Papamakarios and Mnih 2021): {distance_bound:.1f} here, never exceeded by the second line, whose largest value is "
                    f"{max(distance_norms):.2f}. Products pass it at some length.",
                    max(distance_norms) <= distance_bound < dot_norms[-1],
                ),
            ),
        ]
    )
    return


@app.cell
def _(A, d, moved, n, nudge, proof_input, u, v, w, W_V):
    _X = proof_input(100.0)
    _signs = torch.tensor([0.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    _balanced = 100.0 * _signs[:, None] * u
    _rest = w @ W_V / n
    _one = (moved(_X, nudge)[0] - _rest).norm()
    _signed = (moved(_balanced, nudge)[0] - _rest).norm()
    balance = (_signed / _one).item()
    # Under a causal mask, row 3 of the tokens (number 2) attends to m = 3 keys.
    _m = 3
    _Y, _move = torch.zeros(2, n, d, dtype=torch.float64)
    _Y[0], _move[_m - 1] = 50.0 * u, w
    _masked = moved(_Y, _move, prior=fenchel.Causal())[_m - 1]
    _expected = 50.0**2 * (_m - 1) / _m**2 * (v @ u) * (u @ W_V) + w @ W_V / _m
    mo.vstack(
        [
            details(
                claim(
                    "E13",
                    f"One long token gives the constant $(n-1)/n^2 = {(n - 1) / n**2:g}$. Long tokens of opposite signs give "
                    f"$(n-1)/n = {(n - 1) / n:g}$, here {balance:.4f} times as much: opposite signs pull the mean back to 0.",
                    abs(balance - n) < 1e-9,
                ),
                claim(
                    "LP-16 E14",
                    f"With a causal mask the third token attends to $m = {_m}$ keys, and the formula holds with $m$ in place of $n$.",
                    torch.allclose(_masked, _expected, rtol=1e-12) and A.norm() > 0,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Short tokens: the limit comes back

    A lever of bounded length has a bounded effect. If no token is longer than $R$, the sensitivity is
    at most

    $$\|W_V\|\,\big((1 + \sqrt n)\,\|A\|\,R^2 + \sqrt n\big),$$

    where $\|\cdot\|$ of a matrix is its spectral norm. The $R^2$ is the same $t^2$ as before, seen from above.
    And a model keeps its tokens short: a *LayerNorm* or *RMSNorm* before attention gives every token a
    length of at most $\max_k|\gamma_k|\,\sqrt d + \|b\|$, with its weight $\gamma$ and bias $b$.
    """)
    return


@app.cell
def _():
    radius_R = mo.ui.slider(
        steps=[0.25, 0.5, 1.0, 2.0, 4.0], value=1.0, label="Longest token $R$", show_value=True
    )
    radius_R
    return (radius_R,)


@app.cell
def _(A, W_K, W_Q, W_V, att, d, n, radius_R):
    R = radius_R.value
    ball_bound = torch.linalg.matrix_norm(W_V, 2) * (
        (1 + n**0.5) * torch.linalg.matrix_norm(A, 2) * R**2 + n**0.5
    )
    g_ball = torch.Generator().manual_seed(3)
    in_ball = torch.randn(300, n, d, dtype=torch.float64, generator=g_ball)
    in_ball = in_ball * (R / in_ball.norm(dim=-1).amax(-1))[:, None, None]
    jacobians = torch.func.vmap(torch.func.jacrev(att))(in_ball).reshape(300, n * d, n * d)
    ball_norms = torch.linalg.matrix_norm(jacobians, 2)
    _blowup = witness.blowup(W_Q, W_K, W_V, n, R, score_scale=1.0)
    reached = (fenchel.self_attention_jacobian(_blowup.X, W_Q, W_K, W_V, scale=1.0)) @ (
        _blowup.direction
    )
    # The row formula behind the bound, for one input and one direction.
    _X, _D = in_ball[0], in_ball[1]
    _P = (_X @ A @ _X.T).softmax(-1)
    _centred = _X[None] - (_P @ _X)[:, None]  # (row, key, d)
    _cov = torch.einsum("ij,ijk,ijl->ikl", _P, _centred, _centred)
    _query = torch.einsum("ik,kl,ilm->im", _D, A, _cov)
    _key = torch.einsum("ij,ij,ijk->ik", _P, _X @ A @ _D.T, _centred)
    by_terms = (_query + _key + _P @ _D) @ W_V
    mo.vstack(
        [
            bar_chart(
                [
                    {"what": what, "share of the bound": (norm / ball_bound).item()}
                    for what, norm in (
                        ("median of 300 inputs", ball_norms.median()),
                        ("largest of 300", ball_norms.max()),
                        ("the input of the proof", reached.norm()),
                    )
                ],
                "what",
                "share of the bound",
                title=f"Sensitivity for tokens no longer than R; the bound is {number(ball_bound.item())}",
                y_range=(0, 1),
            ),
            claim(
                "LP-13 E14",
                f"For $R = {R:g}$, the largest sensitivity of 300 random inputs is {(ball_norms.max() / ball_bound).item():.2f} of the "
                f"bound {ball_bound.item():,.1f}; the input of the proof reaches {(reached.norm() / ball_bound).item():.2f} of it.",
                (ball_norms <= ball_bound).all()
                and reached.norm() <= ball_bound
                and torch.isclose(
                    bounds.ball(W_Q, W_K, W_V, n=n, radius=R, scale=1.0), ball_bound, rtol=1e-9
                ),
            ),
            details(
                claim(
                    "E14",
                    "The derivative of row $i$ is the sum of three terms, which the bound bounds one by one: the query "
                    "moves, the keys move, the values move.",
                    torch.allclose(torch.func.jvp(att, (_X,), (_D,))[1], by_terms, atol=1e-12),
                ),
            ),
        ]
    )
    return


@app.cell
def _(W_K, W_Q, W_V, att, d, n):
    gamma = torch.tensor([1.5, 0.5, 1.0, 0.8], dtype=torch.float64)
    bias = torch.tensor([0.1, -0.2, 0.0, 0.3], dtype=torch.float64)
    _any = torch.randn(200, n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    _any = _any * torch.logspace(-3, 4, 200, dtype=torch.float64)[:, None, None]
    normed = torch.nn.functional.layer_norm(_any, (d,), gamma, bias)
    longest = gamma.abs().max() * d**0.5 + bias.norm()
    after_norm = bounds.ball(W_Q, W_K, W_V, n=n, radius=longest, scale=1.0)
    _J = torch.func.vmap(torch.func.jacrev(att))(normed).reshape(200, n * d, n * d)
    norm_after = torch.linalg.matrix_norm(_J, 2).max()
    _J0 = fenchel.jacobian(att, normed[0])
    bracket = fenchel.spectral_norm(_J0, generator=torch.Generator().manual_seed(0))
    by_svd = torch.linalg.svdvals(_J0.dense())[0]
    mo.vstack(
        [
            details(
                claim(
                    "LP-14",
                    f"Tokens of lengths from 0.001 to 10,000 are at most {normed.norm(dim=-1).max().item():.3f} long after a LayerNorm, within "
                    f"{longest.item():.3f}; attention there has a sensitivity of at most {norm_after.item():.1f}, below the bound "
                    f"{after_norm.item():.1f} that knows only the weights.",
                    normed.norm(dim=-1).max() <= longest
                    and abs(bounds.normalised_radius(d, gamma, bias) / longest.item() - 1) < 1e-9
                    and norm_after <= after_norm,
                ),
            ),
            mo.md(
                "At a single input nothing needs to be bounded: the sensitivity can be *measured*, for any part "
                "of a network. `fenchel.spectral_norm(fenchel.jacobian(f, x))` only multiplies by the Jacobian "
                "and by its transpose, forward and backward, and never writes the matrix down."
            ),
            details(
                claim(
                    "LP-19",
                    f"It finds {bracket.lower.item():.6f} to {bracket.upper.item():.6f} in {bracket.iterations} rounds; the matrix "
                    f"written out gives {by_svd.item():.6f}.",
                    bracket.lower * (1 - 1e-9) <= by_svd <= bracket.upper
                    and bracket.upper / bracket.lower < 1.001,
                ),
            ),
        ]
    )
    return


@app.cell
def _(att, d, n):
    _x = torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def branch(X):
        return 0.3 * att(torch.nn.functional.rms_norm(X, (d,)))

    F = fenchel.jacobian(branch, _x)
    values_F = torch.linalg.svdvals(F.dense())
    values_skip = torch.linalg.svdvals((identity(_x) + F).dense())
    mo.vstack(
        [
            mo.md(r"""
    ## Beside a skip connection

    A block adds its branch to what comes in: $x + F(x)$. The *singular values* of a Jacobian are the
    factors by which it stretches directions at right angles to one another; the largest is the
    sensitivity. Where the smallest is near 0, a direction is forgotten.
    """),
            line_chart(
                [
                    {"number": i + 1, "singular value": s, "map": name}
                    for name, values in (("F", values_F), ("I + F", values_skip))
                    for i, s in enumerate(values.tolist())
                ],
                "number",
                "singular value",
                "map",
                title="Singular values of a residual branch, and with its skip connection",
                points=True,
            ),
            claim(
                "LP-17",
                f"The branch alone stretches by {values_F[-1].item():.3f} to {values_F[0].item():.3f}; with the skip connection by "
                f"{values_skip[-1].item():.3f} to {values_skip[0].item():.3f}. No singular value of $I + F$ is further than "
                r"$\|F\|$ from 1.",
                values_skip[0] <= 1 + values_F[0]
                and values_skip[-1] >= 1 - values_F[0]
                and values_F[-1] < 0.1 * values_skip[-1],
            ),
        ]
    )
    return


@app.cell
def _():
    def check(names):
        counterexample = names["counterexample"]
        for L in (1.0, 30.0, 1e4):
            X, Y = counterexample(L)
            X, Y = (torch.as_tensor(M, dtype=torch.float64) for M in (X, Y))
            assert X.shape == Y.shape == (2, 1), "Return two inputs of shape (2, 1)."
            assert (X - Y).norm() > 0, "The two inputs are equal."
            eye = torch.ones(1, 1, dtype=torch.float64)
            out = [self_attention(M, eye, eye, eye, scale=1.0) for M in (X, Y)]
            ratio = ((out[0] - out[1]).norm() / (X - Y).norm()).item()
            assert ratio > L, (
                f"For L = {L:g} the outputs are only {ratio:.3g} times as far apart as the inputs. "
                "How long must the second token be, if the slope is t^2/4 + 1/2? And how small the step, "
                "if the slope is only there near 0?"
            )

    exercise = Exercise(
        lesson="lipschitz",
        task="Write `counterexample(L)`: two inputs of two tokens with one number each (tensors of shape "
        "(2, 1)) whose outputs are more than `L` times as far apart as the inputs. All three weight "
        "matrices are 1.",
        starter="""
    def counterexample(L):
        t = 10.0
        X = torch.tensor([[0.0], [t]])
        Y = torch.tensor([[0.1], [t]])
        return X, Y
    """,
        solution="""
    def counterexample(L):
        t = 4 * (L + 1) ** 0.5      # then t^2 / 4 = 4 (L + 1)
        step = 0.01 / t             # so that the score moves by 0.01
        X = torch.tensor([[0.0], [t]], dtype=torch.float64)
        Y = torch.tensor([[step], [t]], dtype=torch.float64)
        return X, Y
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
    own_model = open_model(run_path)
    own_tokens = min(12, own.config.context)
    own_ids = torch.tensor([own.tokenizer.encode_whole("the people of the united states")])
    own_block = own_model.trace(own_ids[:, :own_tokens]).blocks[0]
    own_J = fenchel.jacobian(own_block.forward, own_block.input)
    own_bracket = fenchel.spectral_norm(own_J, generator=torch.Generator().manual_seed(0))
    own_dense = own_J.dense().double()
    own_skip = torch.linalg.svdvals(own_dense)
    own_F = torch.linalg.svdvals(own_dense - torch.eye(len(own_dense), dtype=torch.float64))
    mo.vstack(
        [
            mo.md(
                "The first block of your model, on *the people of the united states*. Its singular values, "
                "without and with its skip connections:"
            ),
            line_chart(
                [
                    {"number": i + 1, "singular value": s, "map": name}
                    for name, values in (("F", own_F), ("I + F", own_skip))
                    for i, s in enumerate(values.tolist())
                    if i % max(1, len(values) // 60) == 0 or i == len(values) - 1
                ],
                "number",
                "singular value",
                "map",
                title="Singular values of the first block",
            ),
            details(
                claim(
                    "LP-17 LP-19",
                    f"`spectral_norm` finds {own_bracket.lower.item():.4f} to {own_bracket.upper.item():.4f} for the block; the matrix of "
                    f"{len(own_dense)} rows written out gives {own_skip[0].item():.4f}. All of its singular values lie within "
                    f"{own_F[0].item():.3f} of 1, the norm of its branches.",
                    own_bracket.lower * (1 - 1e-3) <= own_skip[0] <= own_bracket.upper * (1 + 1e-3)
                    and own_skip[0] <= 1 + own_F[0] + 1e-4
                    and own_skip[-1] >= 1 - own_F[0] - 1e-4,
                ),
            ),
        ]
    )
    return own, own_model, own_tokens


@app.cell
def _(run_path):
    mo.stop(run_path is None)
    ball_size = mo.ui.slider(
        steps=[0.01, 0.03, 0.1, 0.3], value=0.03, label="Radius of the ball", show_value=True
    )
    ball_size
    return (ball_size,)


@app.cell
def _(ball_size, own_model, own_tokens):
    certification = certify_model(
        own_model, "sotu", ball_size.value, max_tokens=own_tokens, search=Search(steps=5)
    )
    certified = [c for c in certification.certificates.layers if c.refused is None]
    mo.vstack(
        [
            mo.md(
                "A certificate: how sensitive each attention layer can be anywhere within "
                f"{ball_size.value:g} of a built-in text."
            ),
            table(
                [
                    {
                        "layer": c.layer,
                        "length of a token": c.token_norm,
                        "at the text": c.centre.lower,
                        "reached in the ball": c.lower,
                        "exceeded nowhere in it": "no bound" if c.upper is None else c.upper,
                    }
                    for c in certified
                ]
            ),
            details(
                claim(
                    "LP-13 LP-19",
                    "In every layer: at the text, at most what is reached in the ball, at most the bound.",
                    all(
                        c.centre.lower <= c.lower * (1 + 1e-9)
                        and (c.upper is None or c.lower <= c.upper)
                        for c in certified
                    ),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        r"The theorem is about *all* inputs. In a model a norm layer keeps tokens short, and the bound with $R$ "
        r"applies; but it divides by the spread of its token, its own constant is $1/\sqrt\epsilon$, and the bound for the whole block is far "
        r"too wide to be useful. What is useful is local: the measured norm at a text, and a certificate in a ball around it."
    )
    return


@app.cell
def _():
    footer("lipschitz")
    return


if __name__ == "__main__":
    app.run()
