"""Sinks and gates: attention that may leave part of its weight to no token."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Sinks and gates: weight that no token gets",
)

with app.setup:
    import marimo as mo
    import torch

    import fenchel
    from fenchel.attention import attend
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


@app.cell
def _():
    header("gates_and_sinks")
    return


@app.cell
def _():
    guess = question(
        "A head looks for a verb, and there is none: the scores of all five tokens are low, -10 each. "
        "What do the five weights of softmax sum to?",
        ["nearly 0", "exactly 1", "5 times e to the -10"],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "exactly 1",
        "Softmax knows differences only. Five equal scores give five weights of 0.2, whether the scores are -10 or 10: "
        "a head without a reason to read reads all the same.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## A vote with a blank ballot

    In an election where everybody must vote for a candidate, the shares of the candidates sum to 1 even if nobody likes any of
    them. Print one more line on the ballot, *none of these*, and the shares of the candidates may sum to less. Attention has
    the same trouble and the same cure. A *sink* is one more key with a score $r$ and the value 0: what it gets is read by nobody.
    With $Z = \sum_j e^{z_j}$ the sum over the tokens, the weights become

    $$p_j = \frac{e^{z_j}}{Z + e^{r}}, \qquad g = \sum_j p_j = \frac{Z}{Z + e^{r}}.$$

    $g$ is what is left for the tokens, and $1 - g$ is the mass that is not taken.

    *Make all tokens less relevant with the first slider. Then raise the score of the sink: which bars shrink, and does their
    order change?*
    """)
    return


@app.cell
def _():
    relevance = mo.ui.slider(
        steps=[-6, -4, -2, 0, 2, 4],
        value=0,
        label="added to the scores of all tokens",
        show_value=True,
    )
    sink_score = mo.ui.slider(
        steps=[-4, -2, 0, 2, 4], value=0, label="score r of the sink", show_value=True
    )
    mo.vstack([relevance, sink_score])
    return relevance, sink_score


@app.cell
def _(relevance, sink_score):
    words = ["the", "green", "hills", "of", "home"]
    z = torch.tensor([0.0, 1.5, 2.0, -1.0, 0.5], dtype=torch.float64) + relevance.value
    r = torch.tensor(float(sink_score.value), dtype=torch.float64)
    plain = fenchel.Softmax().weights(z)
    with_sink = fenchel.Softmax().weights(torch.cat((r[None], z)))
    p, none = with_sink[1:], with_sink[0]
    Z = z.exp().sum()
    g = Z / (Z + r.exp())
    bar_chart(
        [
            {"key": word, "weight": weight, "attention": kind}
            for kind, weights in (
                ("softmax", [*plain.tolist(), 0.0]),
                ("with a sink", [*p.tolist(), none.item()]),
            )
            for word, weight in zip([*words, "(no token)"], weights, strict=True)
        ],
        "key",
        "weight",
        "attention",
        title=f"Weights of five tokens, and what no token gets: {none.item():.3f}",
        y_range=(0, 1),
    )
    return Z, g, none, p, plain, r, z


@app.cell
def _(Z, g, none, p, plain, r, z):
    mo.vstack(
        [
            claim(
                "SM-04 SM-05",
                f"Without a sink the weights sum to {plain.sum().item():.6f}, wherever the first slider stands, and no weight moves "
                "with it.",
                torch.isclose(plain.sum(), z.new_tensor(1.0))
                and torch.allclose(plain, fenchel.Softmax().weights(z - z.mean())),
            ),
            claim(
                "SM-01 SM-02",
                f"With the sink the tokens get $g = Z / (Z + e^r) = {g.item():.4f}$ and the sink {none.item():.4f}. All tokens shrink by "
                "the same factor $g$, so their order and their ratios stay.",
                torch.isclose(p.sum(), g)
                and torch.allclose(p, g * plain)
                and torch.isclose(none, 1 - g),
            ),
            claim(
                "SM-07",
                r"The factor is the S-curve $\sigma(x) = 1/(1 + e^{-x})$ of how far the tokens stand above the sink: "
                rf"$g = \sigma(\log Z - r)$, here $\sigma({(Z.log() - r).item():.3f})$.",
                torch.isclose(g, torch.sigmoid(Z.log() - r)),
            ),
        ]
    )
    return


@app.cell
def _(Z, g, r):
    curve = [
        {"score of the sink": s, "share of the tokens": torch.sigmoid(Z.log() - s).item()}
        for s in (0.25 * i for i in range(-32, 33))
    ]
    mo.vstack(
        [
            mo.md(
                "The tokens give way where the sink overtakes $\\log Z$, a little above the best score. The vertical line is at "
                "$\\log Z$; the dot is the setting above."
            ),
            line_chart(
                curve,
                "score of the sink",
                "share of the tokens",
                title="What is left for the tokens",
                x_range=(-8, 8),
                y_range=(0, 1),
                here=[
                    {"score of the sink": r.item(), "share of the tokens": g.item()},
                    {"score of the sink": Z.log().item()},
                ],
            ),
        ]
    )
    return


@app.cell
def _(Z, p, r, z):
    drawn = torch.empty(1000, 6, dtype=torch.float64)
    drawn.exponential_(generator=torch.Generator().manual_seed(0))
    rivals = drawn / drawn.sum(-1, keepdim=True)
    held = torch.cat((r[None], z))

    def total(q):
        return q @ held - torch.xlogy(q, q).sum(-1)

    best = total(torch.cat(((1 - p.sum())[None], p)))
    mo.vstack(
        [
            mo.md(
                r"""
                ## The same problem on a larger set

                Softmax was the best division of *all* evenings ([softmax](../softmax/)). Now evenings may be spent at home: the shares $p_j$ are
                positive and sum to at most 1, and an evening at home earns $r$. The problem, its solution and its value are those of
                softmax with one more place,

                $$\max_{p \ge 0,\ \sum p_j \le 1} \ \sum_j p_j z_j + r\,s + H(p, s), \qquad s = 1 - \sum_j p_j ,$$

                with the entropy $H$ of all six shares.
                """
            ),
            claim(
                "SM-16 SM-22",
                rf"The best of 1,000 random divisions stays {(best - total(rivals).max()).item():.4f} below the solution, whose value is "
                rf"$\log(Z + e^r) = {best.item():.4f}$.",
                (total(rivals) <= best + 1e-12).all() and torch.isclose(best, (Z + r.exp()).log()),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## A gate is a sink

    Some models turn a tap instead: they compute the ordinary attention output $o$ of a head and multiply it by a *gate* $g$ between 0
    and 1, which a small linear map reads from the token. Solve $g = \sigma(\log Z - r)$ for the score:

    $$r = \log Z - \log\frac{g}{1 - g} .$$

    So every gate per head is a sink, with a score that follows the scores of its head. The tap and the blank ballot are one
    mechanism, and one number describes both: the mass $1 - g$ that no token gets.

    *Open and close the tap below. Where is the score of the sink that does the same?*
    """)
    return


@app.cell
def _():
    opening = mo.ui.slider(
        steps=[0.05, 0.2, 0.5, 0.8, 0.95], value=0.5, label="gate g", show_value=True
    )
    opening
    return (opening,)


@app.cell
def _(opening):
    generator = torch.Generator().manual_seed(1)
    queries, keys, values = (
        torch.randn(1, 1, 6, 4, dtype=torch.float64, generator=generator) for _ in "qkv"
    )
    scores = queries @ keys.mT / 4**0.5
    log_Z = torch.logsumexp(scores, -1)
    gate = torch.full_like(log_Z, opening.value)
    equivalent = log_Z - torch.logit(gate)
    gated = gate.unsqueeze(-1) * attend(queries, keys, values)
    sunk, left = attend(queries, keys, values, sink=equivalent, return_weights=True)
    difference = (gated - sunk).abs().max().item()
    mo.vstack(
        [
            line_chart(
                [
                    {"query": i, "score": score, "of": name}
                    for name, row in (
                        ("the sink that is the gate", equivalent[0, 0]),
                        ("log Z of the tokens", log_Z[0, 0]),
                    )
                    for i, score in enumerate(row.tolist())
                ],
                "query",
                "score",
                "of",
                title=f"Six queries under the gate g = {opening.value:g}",
                points=True,
                x_range=(0, 5),
                y_range=(-4, 8),
            ),
            claim(
                "SM-25",
                f"Attention times the gate and attention with that sink agree to {difference:.1e}, below $10^{{-6}}$, in every query.",
                difference < 1e-6,
            ),
            claim(
                "SM-25 SM-02",
                f"The weights of the tokens sum to {left.sum(-1).mean().item():.4f}, the gate: the mass not taken is {1 - opening.value:.2f}.",
                torch.allclose(left.sum(-1), gate),
            ),
        ]
    )
    return equivalent, keys, queries, values


@app.cell
def _(equivalent, keys, queries, values):
    z_row = (queries @ keys.mT / 4**0.5)[0, 0, 0]
    r_0 = equivalent[0, 0, 0]
    slope = torch.func.grad(lambda x: torch.sigmoid(torch.logsumexp(x, 0) - r_0))(z_row)
    g_0 = torch.sigmoid(torch.logsumexp(z_row, 0) - r_0)
    law = g_0 * (1 - g_0) * fenchel.Softmax().weights(z_row)
    largest = attend(queries, keys, values, sink=-30.0, return_weights=True)[1].sum(-1)
    details(
        claim(
            "DV-12 DV-14",
            r"How the share of the tokens reacts: $\partial g / \partial z_j = g (1 - g)\, p_j$ with the plain weights $p$. It is largest "
            r"where half is taken, $g = \frac12$, and dies out where all or nothing is.",
            torch.allclose(slope, law),
        ),
        claim(
            "SM-25",
            "No sink opens a tap further than fully: with a score of -30 the weights sum to 1 and never to more. A gate by *softplus*, "
            "which some models have, may be 2; it is no sink, and no choice among keys.",
            (largest <= 1 + 1e-12).all() and (largest > 1 - 1e-6).all(),
        ),
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            Divide the fraction $Z / (Z + e^r)$ above and below by $Z$: it is $1 / (1 + e^r / Z)$. Since $Z = e^{\log Z}$, the quotient is
            $e^{r - \log Z} = e^{-(\log Z - r)}$, and $1 / (1 + e^{-x})$ at $x = \log Z - r$ is the S-curve. To go back, $g = 1/(1 + e^{-x})$
            means $e^{-x} = 1/g - 1 = (1 - g)/g$, so $x = \log \frac{g}{1 - g}$ and $r = \log Z - x$.""",
        undergraduate=r"""
            Softmax over the six scores $(r, z)$ has the normaliser $Z + e^r$, so the tokens have $p_j = e^{z_j}/(Z + e^r) = g\,e^{z_j}/Z$: the
            conditional distribution given a token is plain softmax, and $g$ is the probability of a token. The output is
            $\sum_j p_j v_j + (1 - g) \cdot 0 = g\,o$. For the slope: $\partial \log Z/\partial z_j = e^{z_j}/Z$ and
            $\sigma' = \sigma (1 - \sigma)$; apply the chain rule.""",
        research=r"""
            The feasible set is the corner $\{p \ge 0, \sum p \le 1\}$, the simplex of one more dimension seen from the side; the value is
            $\log(Z + e^r)$, convex in $(z, r)$, so all that follows from conjugacy (KKT, exact sensitivities) holds. Learned sinks per head:
            gpt-oss; score 0: Miller (2023), softmax off by one; gates per head and per element: Qiu et al. (2025), Gated attention for large
            language models. Xiao et al. (2024) describe what models without either do: they park the mass on the first token.
            A gate per element multiplies every coordinate of $o$ by its own factor and is behind the choice.""",
    )
    return


@app.cell
def _():
    def check(names):
        sink_of = names["sink_of"]
        z = torch.tensor([[1.0, -2.0, 0.5], [800.0, 799.0, -5.0]], dtype=torch.float64)
        for g in (0.1, 0.5, 0.99):
            r = sink_of(z, torch.tensor(g, dtype=torch.float64))
            assert torch.is_tensor(r), "Return a tensor."
            assert r.shape == (2,), "One score per row of z."
            assert torch.isfinite(r).all(), "Scores of 800 overflow: there is torch.logsumexp."
            left = fenchel.Softmax().weights(torch.cat((r[:, None], z), -1))[:, 1:].sum(-1)
            assert torch.allclose(left, torch.full_like(left, g)), (
                f"With the gate {g} the tokens get {left.tolist()}."
            )

    exercise = Exercise(
        lesson="gates_and_sinks",
        task="Write `sink_of(z, g)`: the score of the sink that leaves the share `g` to the tokens, for every row of the scores `z`. "
        "The starter forgets that the score follows the tokens.",
        starter="""
    def sink_of(z, g):
        return -torch.log(g / (1 - g)) * torch.ones(len(z))
    """,
        solution="""
    def sink_of(z, g):
        return torch.logsumexp(z, -1) - torch.log(g / (1 - g))
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
        [own.tokenizer.encode_whole("the people of the states")[: own.config.context]]
    )
    seen = []
    with torch.no_grad():
        own.model(ids, observe=lambda *layer: seen.append(layer))
        maps = []
        for number, *qkv in seen:
            call = own.model.attention_call(number, *qkv)
            maps.append(attend(*call[:3], **call.spec, return_weights=True)[1][0])
    sums = torch.stack([rows.sum(-1) for rows in maps])
    mo.vstack(
        [
            mo.md(
                "Each row of a head must place its whole weight. Where does it go? The last column is what the first key, which carries "
                "no news for the last token, gets of it:"
            ),
            table(
                [
                    {
                        "layer": number + 1,
                        "head": head + 1,
                        "sum of the weights": rows[head, -1].sum().item(),
                        "weight of the first key": rows[head, -1, 0].item(),
                    }
                    for number, rows in enumerate(maps)
                    for head in range(len(rows))
                ]
            ),
            claim(
                "SM-02",
                "The weights of every query of every head sum to 1, a sink included if the model has one.",
                torch.allclose(sums, torch.ones_like(sums), atol=1e-5),
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        r"A common factor for all tokens is special to softmax. Under sparsemax or entmax a sink takes from every token the same amount of "
        r"*threshold*, so small weights reach 0 first and ratios change; a gate still multiplies. And the identity is per query: one learned $r$ "
        r"per head cannot imitate a gate, because $\log Z$ differs from query to query."
    )
    return


@app.cell
def _():
    footer("gates_and_sinks")
    return


if __name__ == "__main__":
    app.run()
