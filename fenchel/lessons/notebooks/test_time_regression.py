"""Attention as regression at test time: kernels, sums of pairs, and the delta rule."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Attention as regression at test time",
)

with app.setup:
    import marimo as mo
    import torch

    import fenchel
    from fenchel.attention import delta_rule, delta_rule_by_step, entropy
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
        what_breaks,
    )


@app.cell
def _():
    header("test_time_regression")
    return


@app.cell
def _():
    guess = question(
        "A memory has stored two pairs with the same key: first the value 3, then the value 5. Asked for that key, what does "
        "softmax attention answer?",
        ["3, the first", "5, the newest", "4, their mean", "8, their sum"],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "4, their mean",
        "Equal keys get equal weights, and weights sum to 1. Two other memories of this lesson answer otherwise: one that adds "
        "up keys times values says 8, and one that corrects itself says 5.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Weather stations

    Twelve weather stations stand around a lake and report a temperature. What is it where you stand? You would average the
    reports, and let near stations count more. That is all attention does: the stations are *keys* $k_j$, their reports *values*
    $v_j$, your place is the *query* $q$, and the weight of a station falls with its distance. Statisticians call such an average
    *kernel regression*; the *kernel* $K$ says how much a station at $k$ counts for a place $q$:

    $$o(q) = \frac{\sum_j K(q, k_j)\, v_j}{\sum_j K(q, k_j)}, \qquad K(q, k) = e^{\beta\, q \cdot k} .$$

    On a circle all places have length 1, so $q \cdot k$ is the cosine of the angle between them: largest where they are the same.
    Nothing was trained: each query makes its own small fit from the pairs that are there, *at test time*.

    *Move $\beta$: what does the curve become when it is small, and when it is large?*
    """)
    return


@app.cell
def _():
    beta = mo.ui.slider(
        steps=[0.5, 2.0, 8.0, 32.0, 128.0], value=8.0, label=r"$\beta$", show_value=True
    )
    beta
    return (beta,)


@app.cell
def _():
    def on_circle(angle):
        return torch.stack([angle.cos(), angle.sin()], -1)

    draws = torch.Generator().manual_seed(3)
    places = (torch.rand(12, dtype=torch.float64, generator=draws) * 360).sort().values
    noise = 0.25 * torch.randn(12, dtype=torch.float64, generator=draws)
    reports = (places.deg2rad()).sin() + noise
    keys, values = on_circle(places.deg2rad()), reports.unsqueeze(-1)
    grid = torch.arange(0.0, 361.0, 3.0, dtype=torch.float64)
    queries = on_circle(grid.deg2rad())
    return grid, keys, on_circle, places, queries, reports, values


@app.cell
def _(beta, grid, keys, places, queries, reports, values):
    curve = fenchel.attend(queries, keys, values, scale=beta.value, backend="reference")[:, 0]
    kernel = (beta.value * (queries @ keys.T - 1.0)).exp()
    by_hand = (kernel @ values)[:, 0] / kernel.sum(-1)
    nearest = (kernel.amax(-1) / kernel.sum(-1)).mean().item()
    distance = (queries.unsqueeze(1) - keys).square().sum(-1)
    by_distance = torch.softmax(-0.5 * beta.value * distance, -1) @ reports
    pull = (kernel * (reports - curve.unsqueeze(-1))).sum(-1)
    mo.vstack(
        [
            line_chart(
                [
                    {"angle": a, "temperature": t}
                    for a, t in zip(grid.tolist(), curve.tolist(), strict=True)
                ],
                "angle",
                "temperature",
                title="Around the lake: the answer of attention, and the twelve reports (dots)",
                x_range=(0, 360),
                y_range=(-1.6, 1.6),
                cloud=[
                    {"angle": a, "temperature": t}
                    for a, t in zip(places.tolist(), reports.tolist(), strict=True)
                ],
            ),
            claim(
                "EF-18 SM-25",
                f"`attend` is this average. At $\\beta = {beta.value:g}$ the nearest station gets {nearest:.0%} of the weight, averaged over the lake.",
                torch.allclose(curve, by_hand) and 1 / 12 < nearest <= 1,
            ),
            details(
                claim(
                    "EF-18",
                    r"Keys of equal length may be weighed by distance as well: "
                    r"$e^{-\beta |q - k|^2 / 2}$ gives the same curve, since $|q - k|^2 = 2 - 2\, q \cdot k$ and common factors cancel.",
                    torch.allclose(curve, by_distance),
                ),
                claim(
                    "SM-25",
                    r"Its answer is the constant $o$ that fits the reports best where stations count by $K$: the sum $\sum_j K(q, k_j)(v_j - o)^2$ "
                    r"is smallest there, for its slope $-2\sum_j K(q, k_j)(v_j - o)$ is 0 at every angle.",
                    (pull.abs() < 1e-9 * kernel.sum(-1)).all(),
                ),
            ),
        ]
    )
    return


@app.cell
def _(keys, queries, reports, values):
    flat = fenchel.attend(queries, keys, values, scale=1e-9, backend="reference")[:, 0]
    sharp = fenchel.attend(queries, keys, values, scale=1e9, backend="reference")[:, 0]
    best_one = reports[(queries @ keys.T).argmax(-1)]
    claim(
        "SM-11 EF-18",
        r"A small $\beta$ gives the mean of all reports everywhere, which is too flat; a large one the report of the nearest station, which is "
        r"as noisy as one report.",
        torch.allclose(flat, reports.mean().expand_as(flat), atol=1e-6)
        and (sharp - best_one).abs().quantile(0.9) < 1e-6,
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## One table for all questions

    Kernel regression keeps every pair: the cache of a model grows with the text. The other
    way is *one* table $S$ of fixed size that turns a key into a value, $v \approx S^\top k$. What should a new pair do to the table?

    - **Add.** Linear attention writes $k v^\top$ on top, whatever the table already says about $k$.
    - **Correct.** Ask the table first. It answers $S^\top k$; the error is $v - S^\top k$. Write a share $b$ of the error, not the value.
      This is the *delta rule*, and it is a [step downhill](../slopes/) on the squared error of the newest pair:

    $$S \leftarrow S + b\, k\,(v - S^\top k)^\top, \qquad 0 \le b \le 1 .$$

    A teacher who only praises adds; one who looks at the answer first corrects what is missing. Below, a table of 8 x 8 numbers reads random
    pairs and is then asked for *all* of them. The error is $|v - \hat v|$ over $|v|$: 0 is perfect recall, 1 that of an empty table.

    *Move the rate $b$: from how many pairs on is no table perfect, and why there?*
    """)
    return


@app.cell
def _():
    rate = mo.ui.slider(
        steps=[0.1, 0.25, 0.5, 0.75, 1.0], value=1.0, label="the rate $b$", show_value=True
    )
    rate
    return (rate,)


@app.cell
def _():
    D, longest = 8, 24
    sample = torch.Generator().manual_seed(0)
    unit_keys = torch.nn.functional.normalize(
        torch.randn(64, longest, D, dtype=torch.float64, generator=sample), dim=-1
    )
    facts = torch.randn(64, longest, D, dtype=torch.float64, generator=sample)

    def recall(S, n):
        """The mean relative error of the first n pairs, over 64 tables."""
        missed = facts[:, :n] - unit_keys[:, :n] @ S
        return (missed.norm(dim=-1) / facts[:, :n].norm(dim=-1)).mean().item()

    def corrected(n, b, passes=1):
        """The table after n pairs by the delta rule."""
        k, v = (x[:, :n].repeat(1, passes, 1).unsqueeze(1) for x in (unit_keys, facts))
        nothing = torch.zeros(k.shape[:3], dtype=torch.float64)
        return delta_rule(k, k, v, nothing, nothing + b).state[:, 0]

    def added(n):
        """The table after n pairs by sums."""
        return unit_keys[:, :n].mT @ facts[:, :n]

    def fitted(n):
        """The table of least squared error over n pairs."""
        return torch.linalg.pinv(unit_keys[:, :n]) @ facts[:, :n]

    return D, added, corrected, facts, fitted, longest, recall, unit_keys


@app.cell
def _(D, added, corrected, facts, fitted, longest, rate, recall, unit_keys):
    counts = range(1, longest + 1)
    newest = facts[:, -1] - (unit_keys[:, -1:] @ corrected(longest, rate.value))[:, 0]
    before = (
        facts[:, -1]
        - (
            unit_keys[:, -1:]
            @ delta_rule(
                *(x[:, None, :-1] for x in (unit_keys, unit_keys, facts)),
                torch.zeros(64, 1, longest - 1, dtype=torch.float64),
                torch.full((64, 1, longest - 1), rate.value, dtype=torch.float64),
            ).state[:, 0]
        )[:, 0]
    )
    few, many = recall(corrected(D, rate.value), D), recall(added(D), D)
    mo.vstack(
        [
            line_chart(
                [
                    {"pairs": n, "error of recall": recall(S, n), "table": name}
                    for name, table_of in (
                        ("correct (delta rule)", lambda n: corrected(n, rate.value)),
                        ("add (linear attention)", added),
                        ("least squares over all pairs", fitted),
                    )
                    for n in counts
                    for S in [table_of(n)]
                ],
                "pairs",
                "error of recall",
                "table",
                title=f"Recall of all pairs by a table of {D} x {D} numbers",
                x_range=(1, longest),
                y_range=(0, 2),
            ),
            claim(
                "EF-21",
                f"A correction leaves the share $1 - b$ of the error of the newest pair, here {1 - rate.value:g}: with $b = 1$ it is stored "
                "exactly.",
                torch.allclose(newest, (1 - rate.value) * before, atol=1e-12),
            ),
            claim(
                "EF-17 EF-21",
                f"After {D} pairs the sum has an error of {many:.2f}; correcting with this rate has {few:.2f}. No table of this size does "
                f"better than least squares, which is perfect up to {D} pairs and no further.",
                recall(fitted(D), D) < 1e-6 < recall(fitted(D + 1), D + 1)
                and all(
                    (facts[:, :n] - unit_keys[:, :n] @ fitted(n)).square().sum()
                    <= (facts[:, :n] - unit_keys[:, :n] @ S).square().sum() + 1e-9
                    for n in (4, D, 16)
                    for S in (corrected(n, rate.value), added(n))
                ),
            ),
        ]
    )
    return


@app.cell
def _(corrected, fitted, unit_keys):
    k, v, nothing = (torch.full((1, 1, 2, 1), x, dtype=torch.float64) for x in (1.0, 3.0, 0.0))
    v[..., 1, :] = 5.0
    nothing = nothing[..., 0]
    total = (k.mT @ v).item()
    mean = fenchel.attend(k, k, v, backend="reference")[0, 0, 0, 0].item()
    last = delta_rule(k, k, v, nothing, nothing + 1.0).state.item()
    again = (corrected(4, 1.0, passes=400) - fitted(4)).abs().max().item()
    corners = torch.eye(8, dtype=torch.float64)[None, None]
    contents = torch.randn(
        1, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    quiet = torch.zeros(1, 1, 8, dtype=torch.float64)
    by_delta = delta_rule(corners, corners, contents, quiet, quiet + 1.0).state
    long = [
        torch.randn(1, 2, 150, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        for n in range(3)
    ]
    long[0], long[1] = (torch.nn.functional.normalize(x, dim=-1) for x in long[:2])
    fade, share = -long[2][..., 0].abs(), long[2][..., 1].sigmoid()
    one_by_one, in_chunks = (f(*long, fade, share).out for f in (delta_rule_by_step, delta_rule))
    mo.vstack(
        [
            claim(
                "EF-21 SM-25",
                f"The key of the first question, with 3 and then 5: the sum answers {total:g}, softmax attention {mean:g}, and the "
                f"delta rule with $b = 1$ answers {last:g}, since the old answer was a mistake that it has corrected.",
                (total, round(mean, 9), last) == (8.0, 4.0, 5.0),
            ),
            details(
                claim(
                    "EF-21",
                    "Where keys are at right angles to each other, adding and correcting agree: a new pair has nothing to correct. The difference "
                    "between the two is made by keys that resemble each other.",
                    torch.allclose(by_delta, corners.mT @ contents),
                ),
                claim(
                    "EF-21",
                    "Four pairs read 400 times over, each correcting what the others have spoilt, lead to the least-squares table, "
                    f"to {again:.0e} here (Kaczmarz 1937).",
                    again < 1e-6 and unit_keys.shape[-1] >= 4,
                ),
                claim(
                    "EF-21",
                    "Models fade the table too, $S \\leftarrow e^{g} S$ with $g \\le 0$ before every pair, and read in chunks of 64 tokens by products of "
                    "matrices: the same numbers as token by token.",
                    torch.allclose(one_by_one, in_chunks, atol=1e-11),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            One number instead of a table: a memory $s$ should satisfy $s \cdot k = v$, with $k = 1$. Its error is $v - s$. Writing the share $b$ of it gives
            $s + b(v - s)$, whose error is $v - s - b(v - s) = (1 - b)(v - s)$: the share $1 - b$ is left. With $b = 1$ nothing is left, and $s = v$ whatever $s$ was
            before. Adding instead gives $s + v$, and its error is $-s$: right only if the memory was empty. For the average: let $o$ be any
            answer and $m = \sum w_j v_j$ the average with weights that sum to 1. Then $\sum w_j (v_j - o)^2 = \sum w_j (v_j - m)^2 + (m - o)^2$, since the mixed
            terms cancel. The first part does not depend on $o$, and the second is smallest, 0, at $o = m$.""",
        undergraduate=r"""
            $\ell(S) = \frac12 |v - S^\top k|^2$ has the gradient $-k (v - S^\top k)^\top$, so the delta rule is one step of gradient descent of size $b$. After it
            $v - S'^\top k = (1 - b |k|^2)(v - S^\top k)$, which vanishes for $|k| = 1$, $b = 1$; the step is then the orthogonal projection of $S$ onto the
            tables that store the pair. Projecting onto one hyperplane after another converges to a point in all of them, if there is one: up to $D$
            linearly independent keys there is. Softmax attention minimises $\sum_j K(q, k_j) |v_j - o|^2$ over constants $o$; over lines in $k$ it would be local linear
            regression.""",
        research=r"""
            Nadaraya and Watson (1964) for the kernel; Widrow and Hoff (1960) for the delta rule; Schlag, Irie and Schmidhuber (2021) read linear
            attention as fast weights and put the delta rule in its place. Yang et al. (2024) compute it in chunks by the triangular system of
            `fenchel.attention.delta_rule`, and gated DeltaNet adds the decay (Qwen3.5, Kimi Linear). Wang, Shi and Fox (2025) order such layers by
            the regression that they solve: its weights, its class of functions, and the algorithm. A layer with $S = (K^\top K + \lambda I)^{-1} K^\top V$ solves
            the whole problem for each query (Mesa layers).""",
    )
    return


@app.cell
def _():
    def check(names):
        store = names["store"]
        generator = torch.Generator().manual_seed(5)
        S = torch.randn(4, 3, dtype=torch.float64, generator=generator)
        k = torch.randn(4, dtype=torch.float64, generator=generator)
        k, v = k / k.norm(), torch.randn(3, dtype=torch.float64, generator=generator)
        new = store(S.clone(), k, v, 1.0)
        assert torch.is_tensor(new), "Return a tensor."
        assert new.shape == S.shape, "Return a table of the shape of S."
        assert torch.allclose(new.T @ k, v), (
            "With b = 1 the table should answer v for k, whatever it said before."
        )
        other = torch.linalg.svd(k[None]).Vh[1]
        assert torch.allclose(new.T @ other, S.T @ other), (
            "What the table says for a direction at right angles to k should stay."
        )
        half = store(S.clone(), k, v, 0.5)
        assert torch.allclose(half, (S + new) / 2), "With b = 1/2 it should go half of the way."

    exercise = Exercise(
        lesson="test_time_regression",
        task="Write `store(S, k, v, b)`: the table after one correction with the rate `b`. `S` has a row for every entry of the key and "
        "a column for every entry of the value, so its answer is `S.T @ k`. The starter adds, as linear attention does.",
        starter="""
    def store(S, k, v, b):
        return S + b * torch.outer(k, v)
    """,
        solution="""
    def store(S, k, v, b):
        error = v - S.T @ k  # ask first
        return S + b * torch.outer(k, error)
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
    ids = torch.tensor([own.tokenizer.encode_whole("the people of the united states")])
    ids = ids[:, : own.config.context]
    calls = []

    def record(layer, q, k, v):
        calls.append(own.model.attention_call(layer, q, k, v))

    with torch.no_grad():
        own.model(ids, observe=record)
        call = calls[0]
        q_, k_, v_ = (x.double() for x in (call.q, call.k, call.v))
        o_, p_ = fenchel.attend(q_, k_, v_, **call.spec, return_weights=True)
    R = p_.shape[1] // v_.shape[1]
    wide = v_.repeat_interleave(R, 1)
    slope = (p_.unsqueeze(-1) * (wide.unsqueeze(2) - o_.unsqueeze(3))).sum(3)
    effective = entropy(p_[0, :, -1]).exp()
    mo.vstack(
        [
            mo.md(
                "The first layer of the model reads *the people of the united states*. Every head makes its own regression. How wide is its kernel: over how "
                "many tokens does it average for the last one?"
            ),
            bar_chart(
                [
                    {"head": f"head {h}", "tokens that count": n}
                    for h, n in enumerate(effective.tolist(), 1)
                ],
                "head",
                "tokens that count",
                title=f"Tokens that count, of {p_.shape[-1]}",
                y_range=(0, p_.shape[-1]),
            ),
            claim(
                "SM-25",
                "At every token and in every head the output is the constant of least weighted error: the slope "
                f"$\\sum_j p_j (v_j - o)$ is {slope.abs().max().item():.0e} at most.",
                slope.abs().max() < 1e-9,
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        r"A table of $D \times D$ numbers holds $D$ pairs at most without error, and a text has more; what it forgets, "
        r"no later question brings back. Kernel regression forgets nothing and pays with "
        r"a cache that grows. Models of 2026 mix both, three layers of tables to one of attention. And an average is a regression only while its weights "
        r"sum to 1: sigmoid attention answers with a sum again."
    )
    return


@app.cell
def _():
    footer("test_time_regression")
    return


if __name__ == "__main__":
    app.run()
