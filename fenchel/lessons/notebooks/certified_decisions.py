"""Does the next token change? A decision from both sides: certified <= true <= attacked."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Does the next token change?",
)

with app.setup:
    from itertools import product
    from math import cos, sin, tau

    import marimo as mo
    import torch

    import fenchel
    from fenchel.choice import Softmax, Sparsemax, range_over_box
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
    header("certified_decisions")
    return


@app.cell
def _():
    guess = question(
        "After *the United* a model writes *States*. You push the embedding of *United* a hundred times at random, by a "
        "fifth of its length, and it still writes *States*. Is there a push of that length that changes the word?",
        ["no: a hundred trials would have shown it", "yes", "nobody can know"],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "yes",
        "A random direction hardly ever points at the border. A search that follows the slope finds it, below, on a trained model. Trials that "
        "fail prove nothing; what does is a bound for *all* pushes.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## How far is the border?

    Fog, a cliff. A map says: none within 3 metres. A stone thrown 8 metres falls. Together they enclose the edge.

    A *decision* is the token with the largest logit; $r^*$ is the length of the shortest change of the input that gives another.
    A *certificate* is a radius within which none does; an *attack* is a change that does, the *witness*:

    $$\text{certified} \le r^* \le \text{attacked} .$$

    Below, the input is a place and the tokens are three masts (dots). A phone takes the nearest: its logit is
    minus the distance. *Walk: where are both circles the same?*
    """)
    return


@app.cell
def _():
    east = mo.ui.slider(start=0, stop=10, value=3, label="East", show_value=True)
    north = mo.ui.slider(start=0, stop=10, value=8, label="North", show_value=True)
    mo.hstack([east, north], justify="start")
    return east, north


@app.cell
def _():
    masts = torch.tensor([[2.2, 3.1], [7.9, 2.4], [5.3, 8.2]], dtype=torch.float64)
    # The point with the same distance from all masts, and the three borders that begin there.
    _sides = 2 * (masts[1:] - masts[0])
    hub = torch.linalg.solve(_sides, (masts[1:].square() - masts[0].square()).sum(-1))
    border = []
    for _i, _j, _k in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
        _along = (masts[_j] - masts[_i]).flip(0) * torch.tensor([1.0, -1.0])
        _away = _along * torch.sign(_along @ (hub - masts[_k]))
        border += [hub, hub + 3 * _away, hub]

    def radii(place):
        """The lead and the radii at a place, and where the walk to another mast ends."""
        distances = (masts - place).norm(dim=-1)
        first = int(distances.argmin())
        others = [j for j in range(3) if j != first]
        lead = min(distances[j] - distances[first] for j in others)
        exact, walks = [], []
        for j in others:
            across = masts[j] - masts[first]
            gap = (distances[j] ** 2 - distances[first] ** 2) / (2 * across.norm())
            exact.append(gap)
            toward = (masts[j] - place) / distances[j]
            walks.append((gap * across.norm() / (toward @ across), toward))
        attacked, toward = min(walks, key=lambda walk: walk[0])
        return first, lead, lead / 2, min(exact), attacked, place + attacked * toward

    return border, masts, radii


@app.cell
def _(border, east, masts, north, radii):
    here = torch.tensor([east.value, north.value], dtype=torch.float64)
    first, lead, certified, exact, attacked, end = radii(here)

    def circle(radius, name):
        turns = [tau * k / 60 for k in range(61)]
        return [
            {
                "east": round(here[0].item() + radius.item() * cos(a), 2),
                "north": round(here[1].item() + radius.item() * sin(a), 2),
                "line": name,
            }
            for a in turns
        ]

    _turns = torch.linspace(0, tau, 721, dtype=torch.float64)
    _ring = torch.stack((_turns.cos(), _turns.sin()), -1)

    def changed(radius):
        """How many of 721 places at a distance have another mast."""
        return int((torch.cdist(here + radius * _ring, masts).argmin(-1) != first).sum())

    mo.vstack(
        [
            line_chart(
                [
                    *[
                        {"east": p[0].item(), "north": p[1].item(), "line": "border"}
                        for p in border
                    ],
                    *circle(certified, "certified"),
                    *circle(attacked, "attacked"),
                ],
                "east",
                "north",
                "line",
                title="Three masts, the borders between them, and both radii",
                x_range=(0, 10),
                y_range=(0, 10),
                here=[{"east": here[0].item(), "north": here[1].item()}],
                cloud=[{"east": x, "north": y} for x, y in masts.tolist()],
                square=True,
            ),
            claim(
                "LP-01 LP-18",
                f"The nearest mast leads by {lead.item():.2f}. A step of length 1 changes a distance by at most 1, so the lead by at most 2: within "
                f"{certified.item():.2f} nothing changes. The border is {exact.item():.2f} away, and the walk to another mast crosses it after "
                f"{attacked.item():.2f}.",
                0 < certified <= exact * (1 + 1e-12) <= attacked * (1 + 2e-12)
                and changed(certified * (1 - 1e-9)) == 0
                and changed(exact * (1 - 1e-9)) == 0
                and changed(exact * 1.001) > 0
                and int((masts - here - (end - here) * (1 + 1e-9)).norm(dim=-1).argmin()) != first,
            ),
        ]
    )
    return


@app.cell
def _(masts, radii):
    between = masts[0] + 0.3 * (masts[1] - masts[0])
    _, _, sure, true, found, _ = radii(between)
    mo.vstack(
        [
            details(
                claim(
                    "LP-01",
                    f"On the line between two masts all three agree: {sure.item():.3f}, {true.item():.3f} and {found.item():.3f}. There the first distance grows "
                    "and the second shrinks as fast as they can.",
                    abs(sure - true) < 1e-12 and abs(true - found) < 1e-12,
                ),
                title="Where the bound is exact",
            ),
            mo.md(r"""
            In general: if logit $i$ changes by at most $L_i$ per unit of change of the input ([its Lipschitz constant](../lipschitz/)), then
            the lead over token $j$, the *margin* $m_j$, lasts at least

            $$r_j = \frac{m_j}{L_i + L_j},$$

            since one logit may fall while the other rises. The certificate is the least $r_j$, not always that of the runner-up.
            """),
        ]
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            Let $A$ be the nearest mast, at the distance $a$, and $B$ another one at the distance $b$. You walk a way of length $s$. A detour is never shorter than the straight line, so
            afterwards $A$ is at most $a + s$ away and $B$ at least $b - s$. $A$ stays nearer as long as $a + s < b - s$, so as long as $s < \frac{b - a}{2}$: half of the lead.

            How much is lost? Let $D$ be the distance of the masts. By Pythagoras the border is $\frac{b^2 - a^2}{2D} = \frac{b - a}{2} \cdot \frac{a + b}{D}$ away from you. The detour over your place
            is at least the straight line, $a + b \ge D$: the last factor is at least 1, and it is 1 between the masts.""",
        undergraduate=r"""
            **A row of attention.** Scores lie in a box, $l_k \le z_k \le h_k$; $\langle c, p(z)\rangle$ is to be maximised (for the lowest value put $-c$ in place of $c$), where $p_k = \phi(z_k - \nu)$ with $\phi \ge 0$ continuous and
            non-decreasing, and $\nu$ such that the weights sum to 1. (Softmax has $\phi = \exp$, sparsemax $\phi(t) = \max(t, 0)$.) Order $c_1 \ge \dots \ge c_n$. The *path* begins at $l$; score 1
            rises to $h_1$, then score 2 to $h_2$, and so on.

            *The maximum lies on the path.* Take any $z$ of the box with its $\nu$, and hold $\nu$. Then $p_k$ lies between $\phi(l_k - \nu)$ and $\phi(h_k - \nu)$, and the sum is 1. Among all such numbers $\langle c, p\rangle$ is
            largest if the first ones are as large as they may be, the last ones as small, and one in between takes what is left (move weight from a later to an earlier place: the mean does not fall). That is $p$ at a
            point of the path, by continuity of $\phi$. $\square$

            *Softmax: corners suffice.* Along an edge $\partial \langle c, p \rangle / \partial z_k = p_k (c_k - \langle c, p \rangle)$. As $z_k$ grows the mean approaches $c_k$ and does not pass it: the sign is constant, and the larger end is a corner. The path
            has $n + 1$ corners, of $2^n$.

            *Sparsemax: they do not.* There the derivative is $c_k$ minus the plain mean of $c$ over the scores with weight. That mean jumps when a weight reaches 0, and so the sign may change inside an edge.""",
        research=r"""
            `certify_decision` expands a causal pre-norm network about the text. With $g_j$ the gradient of the margin over token $j$,
            $$m_j(x + \varepsilon)\,\tfrac{s'}{s} \ge m_j - r\,\|g_j\| - \sum_k \sup |a_{jk} \cdot e_k|,$$
            where $e_k$ is the remainder of each norm, score, softmax and MLP, in an ellipsoid, carried to the logits by exactly composed Jacobians $a_{jk}$; $s'/s > 0$ is the ratio of the sizes that the last norm divides by. The first two terms are
            exact to first order; the remainders are of second order in $r$ and lose what the table below shows. Randomised smoothing (Cohen, Rosenfeld and Kolter 2019) certifies another function, the vote over random
            changes, with a probability of error; interval propagation forgets that weights sum to 1. Derivations: `docs/maths/sensitivity.md`, `docs/maths/choice.md`.""",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## One row of attention, exactly

    Three judges give marks, and each may be off by $r$ either way. How low can the result fall? To try the
    ends alone leaves eight cases. Are eight enough?

    A row of attention has three scores $z_k$, each within $r$ of its value: a *box*. Key $k$ adds $c_k$ to the margin, and the
    token stays as long as $\langle c, p \rangle = \sum_k c_k p_k > 0$ with the weights $p$. This mean is lowest on a *path*: all scores low, raise the one with the
    smallest $c_k$, then the next.

    *Choose sparsemax and $r = 1$: what do the corners say, and what is true?*
    """)
    return


@app.cell
def _():
    chooser = mo.ui.dropdown(["softmax", "sparsemax"], value="softmax", label="Weights by")
    half_width = mo.ui.slider(
        steps=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2],
        value=0.5,
        label="$r$",
        show_value=True,
    )
    mo.hstack([chooser, half_width], justify="start")
    return chooser, half_width


@app.cell
def _():
    scores = torch.tensor([-0.5, 0.7, 0.9], dtype=torch.float64)
    worth = torch.tensor([-0.15, 0.05, 0.85], dtype=torch.float64)

    def way(r, steps=100):
        """The points of the path on which the mean is lowest: (3 steps + 1, 3)."""
        rises = torch.linspace(0, 3, 3 * steps + 1, dtype=torch.float64)[:, None]
        return scores - r + 2 * r * (rises - torch.arange(3)).clamp(0, 1)

    def corners(r):
        """All eight corners of the box: (8, 3)."""
        return scores + r * torch.tensor(list(product((-1, 1), repeat=3)), dtype=torch.float64)

    return corners, scores, way, worth


@app.cell
def _(chooser, corners, half_width, scores, way, worth):
    r = half_width.value
    chosen = Softmax() if chooser.value == "softmax" else Sparsemax()
    lower, upper = range_over_box(chosen, worth, scores - r, scores + r)
    means = chosen.weights(way(r)) @ worth
    at_corners = chosen.weights(corners(r)) @ worth
    _inside = torch.rand(2000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    anywhere = chosen.weights(scores - r + 2 * r * _inside) @ worth
    mo.vstack(
        [
            line_chart(
                [
                    {"scores raised": i / 100, "margin": m, "line": "on the path"}
                    for i, m in enumerate(means.tolist())
                    if i % 2 == 0
                ]
                + [
                    {"scores raised": x, "margin": level, "line": name}
                    for name, level in (
                        ("lowest over the box", lower.item()),
                        ("another token", 0.0),
                    )
                    for x in (0.0, 3.0)
                ],
                "scores raised",
                "margin",
                "line",
                title="The margin along the path, with corners at 0, 1, 2 and 3",
                x_range=(0, 3),
                y_range=(-0.2, 0.9),
            ),
            claim(
                "LP-05",
                f"Over the whole box the margin lies between {lower.item():.3f} and {upper.item():.3f}: the token "
                f"{'stays' if lower > 0 else 'can change'}. The lowest of the eight corners has {at_corners.min().item():.3f}.",
                abs(means.min() - lower) < 0.01
                and lower <= anywhere.min()
                and anywhere.max() <= upper
                and lower <= at_corners.min() + 1e-12
                and (chooser.value != "softmax" or abs(means[::100].min() - lower) < 1e-9),
            ),
        ]
    )
    return


@app.cell
def _(corners, scores, way, worth):
    soft, sparse = Softmax(), Sparsemax()
    sparse_low = range_over_box(sparse, worth, scores - 1, scores + 1)[0]
    corner_low = (sparse.weights(corners(1.0)) @ worth).min()
    _slopes = (soft.weights(way(1.0)) @ worth).diff().reshape(3, 100)
    turns = int(((_slopes > 0).any(-1) & (_slopes < 0).any(-1)).sum())
    # Softmax moves by at most half of the change of its scores, at most sqrt(3) in this box; what all c have in common moves nothing.
    _fall = 0.5 * 3**0.5 * (worth - worth.mean()).norm()
    by_constant = (soft.weights(scores) @ worth - _fall).item()
    by_box = range_over_box(soft, worth, scores - 1, scores + 1)[0].item()
    mo.vstack(
        [
            claim(
                "LP-05",
                f"With sparsemax and $r = 1$ every corner keeps the token, by {corner_low.item():.2f} at least. Inside an edge the margin is "
                f"{sparse_low.item():.2f}: a proof by corners would be wrong.",
                corner_low > 0.04 and sparse_low < -0.06,
            ),
            claim(
                "LP-05",
                f"Softmax turns inside {turns or 'no'} edge: the $n + 1$ corners of the path are enough, 4 of 8 here and 101 of $2^{{100}}$ for 100 scores.",
                turns == 0,
            ),
            details(
                claim(
                    "LP-05 LP-06",
                    f"The Lipschitz constant of softmax, 1/2, also bounds the margin: for $r = 1$ it cannot fall below {by_constant:.2f}. The range over the box gives {by_box:.2f}. "
                    "Both are true, and only the second is a certificate.",
                    by_constant < 0 < by_box,
                ),
                title="A constant is coarser",
            ),
        ]
    )
    return


@app.cell
def _():
    def check(names):
        certified_radius = names["certified_radius"]
        for logits, rates, expected in (
            ([3.0, 0.0], [0.5, 0.5], 3.0),
            ([1.0, 5.0, 3.0], [1.0, 1.0, 1.0], 1.0),
            ([4.0, 3.0, 1.0], [0.5, 0.1, 3.5], 0.75),
            ([2.0, 2.0, 0.0], [1.0, 1.0, 1.0], 0.0),
        ):
            got = float(certified_radius(torch.tensor(logits), torch.tensor(rates)))
            assert got <= expected + 1e-5, (
                "Too far: one logit may fall while another rises, and a token other than the runner-up may rise faster."
            )
            assert got >= expected - 1e-5, (
                "Too careful: each pair has its own rates, that of the first and that of its rival."
            )

    exercise = Exercise(
        lesson="certified_decisions",
        task="Write `certified_radius(logits, rates)`: logit $k$ changes by at most `rates[k]` per unit of change of the input. Up to which change is "
        "the first choice certain to stay? Two tensors come in, a number goes out. The starter looks at the runner-up and lets one logit move.",
        starter="""
    def certified_radius(logits, rates):
        best, second = logits.topk(2).values
        return float((best - second) / rates.max())
    """,
        solution="""
    def certified_radius(logits, rates):
        i = int(logits.argmax())
        others = [j for j in range(len(logits)) if j != i]
        return min(float((logits[i] - logits[j]) / (rates[i] + rates[j])) for j in others)
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
    mo.md(r"""
    ## A whole network

    Within one step a hill is a ramp: it falls by the slope times the step, up to a small error. A
    network has no list of corners, but near a text its margin is nearly a ramp. With its gradient $g$,

    $$\text{margin after a change of length } r \;\ge\; m - r\,\|g\| - \text{remainder}(r) .$$

    The remainder is bounded layer by layer, for all changes at once; the certificate ends where the right side reaches 0. The attack follows the gradient.
    """)
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
    own_ids = own.tokenizer.encode_whole("the United")[:4]
    last = len(own_ids) - 1
    decision = fenchel.certify_decision(
        own.model, torch.tensor(own_ids), norm="one", positions=[last]
    )
    (one,) = decision.positions
    (kept_at_witness,), witness_length = decision.replay(0)
    own_length = decision.embeddings[last].norm().item()

    def pushes(radius):
        """How many of 100 random changes of the last token, of this length, give another token."""
        push = torch.Generator().manual_seed(0)
        ways = torch.randn(100, len(decision.embeddings[last]), generator=push, dtype=torch.float64)
        moved = decision.embeddings.expand(100, -1, -1).clone()
        moved[:, last] += radius * torch.nn.functional.normalize(ways, dim=-1)
        return sum(int(decision.network(each)[-1].argmax()) != one.kept[0] for each in moved)

    at_attacked, at_certified = pushes(one.attacked), pushes(one.certified)
    mo.vstack(
        [
            mo.md(
                f"The model after *the United*: “{own.tokenizer.decode(one.kept).strip()}”, by a margin of {one.margin:.2f}. How far may the embedding of the last token move?"
            ),
            bar_chart(
                [
                    {"what": what, "length": radius}
                    for what, radius in (
                        ("certified", one.certified),
                        ("margin / slope, no bound", one.first_order),
                        ("attacked", one.attacked),
                    )
                ],
                "what",
                "length",
                title="Length of the change",
            ),
            claim(
                "LP-13",
                f"No change up to {one.certified:.3f} gives another token; one of {one.attacked:.3f} does, {one.attacked / own_length:.0%} of the "
                f"length of the embedding: “{own.tokenizer.decode([kept_at_witness]).strip()}”.",
                0 < one.certified <= one.attacked
                and kept_at_witness != one.kept[0]
                and abs(witness_length / one.attacked - 1) < 1e-9,
            ),
            claim(
                "LP-13 GE-15",
                f"Of 100 random changes of that length {at_attacked} give another token; of 100 within the certificate, {at_certified}.",
                at_attacked < 50 and at_certified == 0,
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        "The certificate speaks of vectors: whether one belongs to a word is not asked. It is about exact numbers, and a lead of 0.00001 may turn "
        "by rounding. And the remainder grows faster than the radius: where the margin is large, a wide gap says that the proof is weak, not that the decision is."
    )
    return


@app.cell
def _():
    footer("certified_decisions")
    return


if __name__ == "__main__":
    app.run()
