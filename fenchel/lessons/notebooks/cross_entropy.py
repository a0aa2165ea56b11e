"""Probability, entropy and cross-entropy: what a prediction costs, and why its slope is an error."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Probability, entropy and cross-entropy",
)

with app.setup:
    import math
    from itertools import pairwise

    import marimo as mo
    import torch

    import fenchel
    from fenchel.attention import entropy
    from fenchel.evaluate import brier_score
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
    from fenchel.train import target_losses, total_loss


@app.cell
def _():
    header("cross_entropy")
    return


@app.cell
def _():
    guess = question(
        "It rains. One forecaster had said 50% rain, another only 1%. By the cost used to train language models, how "
        "much more does the second one pay?",
        ["about twice as much", "about seven times as much", "about fifty times as much"],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "about seven times as much",
        "The costs are $-\\log 0.5 = 0.69$ and $-\\log 0.01 = 4.6$. Fifty times less likely is not fifty times as "
        "expensive: the logarithm grows slowly. But it has no ceiling, and a forecast of 0% would cost infinitely much.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Surprise

    "The sun has risen" is no news. "It snowed in July" is. The news value of an event should be larger the less likely it
    was, and the news values of two unrelated events should add. Probabilities of unrelated events multiply, and what turns
    multiplying into adding is a logarithm:

    $$s = -\log p .$$

    $p$ is the probability that was given to what then happened, and $s$ is the *surprise*. With the natural logarithm (the one of
    $e \approx 2.718$) its unit is the *nat*; with the logarithm to base 2 it is the *bit*, the number of yes-or-no questions.
    A fair coin holds 1 bit = 0.693 nats.
    """)
    return


@app.cell
def _():
    given = mo.ui.slider(
        steps=[0.0001, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99],
        value=0.5,
        label="Probability $p$ given to what happened",
        show_value=True,
    )
    given
    return (given,)


@app.cell
def _(given):
    p_given = given.value
    nats = -math.log(p_given)
    curve = [i / 200 for i in range(1, 200)]
    line_chart(
        [{"probability": x, "surprise in nats": -math.log(x), "curve": "-log p"} for x in curve]
        + [
            {"probability": x, "surprise in nats": s, "curve": "your p"}
            for x, s in ((p_given, 0.0), (p_given, nats))
        ],
        "probability",
        "surprise in nats",
        "curve",
        title=f"p = {p_given:g} costs {nats:.4g} nats, or {nats / math.log(2):.4g} bits",
        x_range=(0, 1),
        y_range=(0, 10),
    )
    return nats, p_given


@app.cell
def _(nats, p_given):
    penalties = {p: -math.log(p) for p in (0.0001, 0.1, 0.5, 0.9, 0.99)}
    by_torch = {
        p: total_loss(
            torch.tensor([[[p, 1 - p]]], dtype=torch.float64).log(), torch.tensor([[0]])
        ).item()
        for p in penalties
    }
    guess_50257 = math.log(50_257)
    mo.vstack(
        [
            claim(
                "TR-02",
                "Worked penalties: "
                + ", ".join(f"$p = {p:g}$ costs {s:.4g}" for p, s in penalties.items())
                + " nats. The training loss of the library gives the same numbers.",
                f"{penalties[0.0001]:.2f} {penalties[0.99]:.5f} {penalties[0.9]:.3f} "
                f"{penalties[0.5]:.3f} {penalties[0.1]:.3f}"
                == "9.21 0.01005 0.105 0.693 2.303"
                and all(abs(by_torch[p] - s) < 1e-12 for p, s in penalties.items()),
            ),
            details(
                claim(
                    "TR-03",
                    f"Surprises add: two unrelated events of probability {p_given:g} have probability {p_given**2:.3g} together, "
                    f"and {2 * nats:.4g} nats. A nat is 1.443 bits; from 1 down to {p_given:g} the probability is halved {nats / math.log(2):.4g} times.",
                    math.isclose(-math.log(p_given * p_given), 2 * nats)
                    and math.isclose(2 ** -(nats / math.log(2)), p_given)
                    and f"{1 / math.log(2):.3f}" == "1.443",
                ),
                claim(
                    "E49",
                    "The logarithm grows *slowly*: from $p = 0.01$ to $p = 0.0001$, a hundred times less likely, the cost only "
                    f"doubles, {-math.log(0.01):.2f} to {-math.log(0.0001):.2f}. Near 1 it is almost a straight line, $-\\log p \\approx 1 - p$: a small "
                    "doubt costs little. Only confident mistakes are expensive. And what is a large loss? A uniform guess "
                    f"over a vocabulary of 50,257 *tokens* (words and pieces of words) already costs {guess_50257:.1f}.",
                    math.isclose(-math.log(0.0001), 2 * -math.log(0.01))
                    and f"{guess_50257:.1f}" == "10.8"
                    and abs(-math.log(0.99) - 0.01) < 1e-4
                    and f"{-math.log(0.01):.1f}" == "4.6",
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Entropy: surprise on average

    About how many yes-or-no questions does it take, on average, to find out which of $n$ things happened? A thing of probability $p_i$
    surprises by $-\log p_i$ and happens in a share $p_i$ of the cases. The average is the *entropy*

    $$H(p) = -\sum_i p_i \log p_i .$$

    In nats as it stands; divided by $\log 2$ it counts questions. Something that never happens adds nothing to an average:
    $0 \log 0$ counts as 0. A program must say so: in floating point $\log 0$ is minus infinity, and 0 times that is not a
    number (NaN).
    """)
    return


@app.cell
def _():
    sure = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    naive = -(sure * sure.log()).sum()
    rng = torch.Generator().manual_seed(0)
    n = 5
    drawn = torch.empty(2, 2000, n, dtype=torch.float64).exponential_(generator=rng)
    a, b = drawn / drawn.sum(-1, keepdim=True)
    t = torch.rand(2000, 1, dtype=torch.float64, generator=rng)
    uniform = torch.full((n,), 1 / n, dtype=torch.float64)
    between = entropy((1 - t) * a + t * b)
    chord = (1 - t[:, 0]) * entropy(a) + t[:, 0] * entropy(b)
    negative = fenchel.Softmax().regulariser
    negative_chord = (1 - t[:, 0]) * negative(a) + t[:, 0] * negative(b)
    mo.vstack(
        [
            claim(
                "SM-20 E08",
                f"(0.5, 0.5, 0) has the entropy {entropy(sure).item():.3f} nats, one bit. Written as `-(p * p.log()).sum()` it is "
                f"{naive.item()}; `torch.xlogy(p, p)` computes $p \\log p$ with $0 \\log 0 = 0$.",
                naive.isnan()
                and torch.isclose(entropy(sure), sure.new_tensor(math.log(2)))
                and torch.isclose(-torch.xlogy(sure, sure).sum(), sure.new_tensor(math.log(2))),
            ),
            details(
                claim(
                    "SM-20",
                    f"Of 2,000 random distributions over {n} things none has more entropy than the uniform one, "
                    f"$\\log {n}$ = {math.log(n):.3f}; the most is {entropy(a).max().item():.3f}. Certainty has 0.",
                    (entropy(a) <= math.log(n)).all()
                    and torch.isclose(entropy(uniform), uniform.new_tensor(math.log(n)))
                    and entropy(torch.eye(n, dtype=torch.float64)).abs().max() == 0,
                ),
                claim(
                    "SM-20 SM-21",
                    "Mixing two sources never lowers the average uncertainty: $H$ is concave (it lies above each *chord*, "
                    r"the straight line between two of its points), and $\sum_i p_i \log p_i$ is convex (below each chord).",
                    (between >= chord - 1e-12).all()
                    and (negative((1 - t) * a + t * b) <= negative_chord + 1e-12).all()
                    and torch.allclose(negative(a), -entropy(a)),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Cross-entropy: whose probabilities?

    A packing list written for July is poor in January. Let things happen with probabilities $y_i$ while the forecast
    says $p_i$. The average surprise is now

    $$L = -\sum_i y_i \log p_i ,$$

    the *cross-entropy*. If we know what happened, $y$ is *one-hot*: 1 at that place and 0 elsewhere. Then only one
    term is left, the surprise from above. This is the loss of nearly every language model.

    Which forecast pays best in the long run? Set how often it truly rains. The chart shows, for every
    forecast, three costs on average: cross-entropy, squared error (the *Brier score*), and the share of wrong yes-or-no calls,
    where more than 50% counts as "yes".
    """)
    return


@app.cell
def _():
    truth = mo.ui.slider(
        0.05, 0.95, step=0.05, value=0.7, label="Share of rainy days $y$", show_value=True
    )
    truth
    return (truth,)


@app.cell
def _(truth):
    y_rain = round(truth.value, 2)
    forecasts = torch.arange(1, 100, dtype=torch.float64) / 100
    both = torch.stack([forecasts, 1 - forecasts], -1)
    y_two = torch.tensor([y_rain, 1 - y_rain], dtype=torch.float64)
    on_average = {
        "cross-entropy": -(y_two * both.log()).sum(-1),
        "Brier score": (y_rain * 2 * (1 - forecasts) ** 2 + (1 - y_rain) * 2 * forecasts**2),
        "wrong calls": torch.where(forecasts > 0.5, 1 - y_rain, y_rain),
    }
    line_chart(
        [
            {"forecast": f, "average cost": c, "cost": name}
            for name, costs in on_average.items()
            for f, c in zip(forecasts.tolist(), costs.tolist(), strict=True)
            if c < 2.5
        ],
        "forecast",
        "average cost",
        "cost",
        title=f"Three costs of a forecast where it rains on {y_rain:.0%} of the days",
        x_range=(0, 1),
        y_range=(0, 2.5),
    )
    return both, forecasts, on_average, y_rain, y_two


@app.cell
def _(both, forecasts, on_average, y_rain, y_two):
    best = {name: forecasts[costs.argmin()].item() for name, costs in on_average.items()}
    wrong = on_average["wrong calls"]
    flat = int((wrong <= wrong.min() + 1e-12).sum())
    floor = entropy(y_two)
    divergence = torch.xlogy(y_two, y_two / both).sum(-1)
    logits = torch.tensor([1.5, -0.3, 0.4], dtype=torch.float64)
    probabilities = logits.softmax(-1)
    one_hot = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    by_formula = -(one_hot * probabilities.log()).sum()
    three = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    grid3 = (
        torch.tensor(
            [[i, j, 20 - i - j] for i in range(21) for j in range(21 - i)], dtype=torch.float64
        )
        / 20
    )
    brier3 = sum(
        three[k] * (grid3 - torch.eye(3, dtype=torch.float64)[k]).square().sum(-1) for k in range(3)
    )
    as_library = sum(three[k] * brier_score(grid3[:1], torch.tensor([k])) for k in range(3))
    mo.vstack(
        [
            claim(
                "RG-10 TR-05",
                f"The best forecast is the truth: {best['cross-entropy']:.2f} by cross-entropy, where the cost is the entropy "
                f"{floor.item():.3f}, not 0. Every other forecast pays the *divergence* $\\sum_i y_i \\log (y_i / p_i)$ on top.",
                abs(best["cross-entropy"] - y_rain) < 1e-9
                and torch.isclose(on_average["cross-entropy"].min(), floor)
                and torch.allclose(on_average["cross-entropy"] - floor, divergence, atol=1e-12),
            ),
            claim(
                "TR-05",
                f"Counting wrong calls is no guide: {flat} of the 99 forecasts are equally good, however far from {y_rain:.2f}.",
                flat >= 49,
            ),
            details(
                claim(
                    "TR-01",
                    f"For a one-hot $y$ the sum has one term: {by_formula.item():.4f} nats in an example of three classes, and "
                    "torch's `cross_entropy` and the library's loss agree.",
                    torch.isclose(by_formula, -probabilities[2].log())
                    and torch.isclose(
                        by_formula, torch.nn.functional.cross_entropy(logits, torch.tensor(2))
                    )
                    and torch.isclose(
                        by_formula, total_loss(logits[None, None], torch.tensor([[2]]))
                    ),
                ),
                claim(
                    "RG-10 E48 TR-05",
                    f"Squared error is just as honest: its best forecast is {best['Brier score']:.2f} too. And for three outcomes of "
                    "probabilities (0.7, 0.2, 0.1), of 231 forecasts the best by Brier score is (0.7, 0.2, 0.1). Such costs are called *proper*.",
                    abs(best["Brier score"] - y_rain) < 1e-9
                    and torch.equal(grid3[brier3.argmin()], three)
                    and abs(float(as_library) - brier3[0].item()) < 1e-12,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            **Squared error.** Let it rain in a share $y$ of the days. The forecast $p$ costs
            $y (1 - p)^2 + (1 - y) p^2$ on average. Multiply out and complete the square: this is
            $(p - y)^2 + y(1 - y)$. The second part does not depend on $p$, the first is least, 0, at $p = y$.

            **Cross-entropy.** The curve of the logarithm lies below the straight line that touches it at 1:
            $\log x \le x - 1$ (draw both). The forecast $p$ costs more than the forecast $y$ by
            $\sum_i y_i \log \frac{y_i}{p_i} = -\sum_i y_i \log \frac{p_i}{y_i} \ge -\sum_i y_i \left(\frac{p_i}{y_i} - 1\right)
            = -\sum_i p_i + \sum_i y_i \ge -1 + 1 = 0$. (The sums run over the things with $y_i > 0$; their $p_i$ sum to 1 at most.) So no
            forecast beats the truth.""",
        undergraduate=r"""
            $-\sum y_i \log p_i = H(y) + \mathrm{KL}(y \| p)$, and $\mathrm{KL} \ge 0$ by Jensen's inequality for the strictly convex
            $-\log$, with equality only at $p = y$ (on the support of $y$). With a uniform $p$ the same inequality gives
            $H(y) \le \log n$. Concavity of $H$: the second derivative of $-x \log x$ is $-1/x < 0$. The Brier score is
            $\|p - y\|^2 + 1 - \|y\|^2$ on average, minimal at $p = y$. The share of wrong calls is a step function of $p$: constant almost
            everywhere, so it has no gradient either.""",
        research=r"""
            Both are strictly proper scoring rules (Brier 1950, Good 1952, Gneiting and Raftery 2007): each comes from a strictly convex
            function, negative entropy and the squared norm, and its regret is the Bregman divergence of that function. The 0-1 cost is proper and not
            strictly so. The logarithm is the only *local* one for three or more classes: it reads $p$ at the outcome alone. That a
            minimiser is calibrated is a statement about the population: a network that has memorised its training set has a low
            training loss and may be badly calibrated ([calibration](../tokens_and_calibration/)). Each has a companion that is convex in the
            logits, the Fenchel-Young loss of its regulariser (Blondel, Martins and Niculae 2020): cross-entropy after softmax, and the
            sparsemax loss, which bounds half the Brier regret of sparsemax from above.""",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## The slope is the error

    A thermostat that is 3 degrees off corrects by 3 degrees' worth. A loss trains well if its slope does the same: a large
    correction for a large error. A network puts out scores $z_i$, called *logits*, and softmax makes probabilities of them,
    $p_i = e^{z_i} / \sum_j e^{z_j}$. The slope of the cross-entropy with respect to the logits is

    $$\frac{\partial L}{\partial z_i} = p_i - y_i .$$

    ($\partial L / \partial z_i$ says how fast $L$ grows when only $z_i$ grows.) Forecast minus truth, nothing else. Squared error
    on the same probabilities has no such slope: where the network is sure and wrong, its curve is flat.
    """)
    return


@app.cell
def _():
    wrong_by = torch.linspace(-8, 8, 33, dtype=torch.float64)
    two_logits = torch.stack([torch.zeros_like(wrong_by), wrong_by], -1).requires_grad_()
    target_0 = torch.zeros(33, dtype=torch.long)
    ce_slope = torch.autograd.grad(total_loss(two_logits[None], target_0[None]), two_logits)[0]
    p_two = two_logits.softmax(-1)
    truth_0 = torch.tensor([1.0, 0.0], dtype=torch.float64)
    brier_slope = torch.autograd.grad((p_two - truth_0).square().sum(), two_logits)[0]
    line_chart(
        [
            {"logit of the wrong class": w, "slope": s, "cost": name}
            for name, slopes in (("cross-entropy", ce_slope), ("squared error", brier_slope))
            for w, s in zip(wrong_by.tolist(), slopes[:, 1].tolist(), strict=True)
        ],
        "logit of the wrong class",
        "slope",
        "cost",
        title="Slope in the logit of the wrong class; the right one has logit 0",
    )
    return brier_slope, ce_slope, truth_0, two_logits


@app.cell
def _(brier_slope, ce_slope, truth_0, two_logits):
    rng2 = torch.Generator().manual_seed(1)
    z = (3 * torch.randn(64, 7, dtype=torch.float64, generator=rng2)).requires_grad_()
    targets = torch.randint(7, (64,), generator=rng2)
    slope = torch.autograd.grad(total_loss(z[None], targets[None]), z)[0]
    y = torch.nn.functional.one_hot(targets, 7).double()
    rare_p = torch.tensor([1e-2, 1e-4, 1e-8], dtype=torch.float64, requires_grad=True)
    in_p = torch.autograd.grad(-rare_p.log().sum(), rare_p)[0]
    mo.vstack(
        [
            claim(
                "DV-23",
                "64 random cases of 7 classes: automatic differentiation gives $p - y$.",
                torch.allclose(slope, z.detach().softmax(-1) - y, atol=1e-12)
                and torch.allclose(ce_slope, two_logits.detach().softmax(-1) - truth_0, atol=1e-12),
            ),
            claim(
                "TR-05 E48",
                f"Sure and wrong by 8 logits, cross-entropy has the slope {ce_slope[-1, 1].item():.4f} and squared error "
                f"{brier_slope[-1, 1].item():.4f}: it hardly learns there. This, and not honesty, is the difference.",
                ce_slope[-1, 1] > 0.999
                and brier_slope[-1, 1] < 0.002
                and all(u <= v + 1e-12 for u, v in pairwise(ce_slope[:, 1].tolist())),
            ),
            details(
                claim(
                    "DV-23 E49",
                    "In the logits no entry of the slope exceeds 1. In the probability itself the slope is $-1/p$: "
                    + ", ".join(f"{s:,.0f}" for s in in_p.tolist())
                    + " at $p$ = 0.01, 0.0001, 0.00000001. So the tidy gradient belongs to the logits.",
                    (slope.abs() <= 1).all() and torch.allclose(in_p, -1 / rare_p.detach()),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            Write the loss of the right class $k$ as $L = \log(e^{z_1} + \dots + e^{z_n}) - z_k$. Raise $z_i$ by a tiny $\varepsilon$.
            The term $e^{z_i}$ is multiplied by $e^\varepsilon \approx 1 + \varepsilon$, so the sum grows by $\varepsilon e^{z_i}$, that is
            by the share $\varepsilon p_i$ of itself, and its logarithm by $\log(1 + \varepsilon p_i) \approx \varepsilon p_i$. If $i = k$, the second term takes $\varepsilon$
            off. Per unit of $\varepsilon$: $p_i$, less 1 for the right class. That is $p_i - y_i$.""",
        undergraduate=r"""
            $L(z) = \mathrm{lse}(z) - \langle y, z \rangle$ with $\mathrm{lse}(z) = \log \sum_j e^{z_j}$, for any $y$ that sums to 1.
            $\nabla\, \mathrm{lse} = \mathrm{softmax}$, so $\nabla L = p - y$; the Hessian $\mathrm{diag}(p) - p p^\top$ is positive semidefinite:
            convex in $z$. By the chain rule the Brier score has the gradient $2 (\mathrm{diag}(p) - p p^\top)(p - y)$, and the matrix vanishes as $p$
            approaches any corner, right or wrong.""",
        research=r"""
            $p - y$ is the residual of an exponential family in its natural parameters; the logit link is canonical for the log loss. Any
            Fenchel-Young loss has the gradient $\nabla \Omega^*(z) - y$ (`fenchel.choice`), so sparsemax does for the squared norm
            what softmax does for entropy. Composing the Brier score with softmax mixes two regularisers, and loses convexity in $z$.""",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## When one class is rare

    A test looks for an illness that one person in 20 has. "Healthy" for everybody is right in 95% of the cases, and useless.
    Two remedies: count every case of the rare class $w$ times in the loss (*class weights*), or show it $w$ times as often
    (*resampling*). Two measurements per person, two overlapping clouds, a *linear classifier* (each class gets
    a weighted sum of the measurements plus a constant as its logit), 2,000 people to learn from and
    10,000 others to judge by:
    """)
    return


@app.cell
def _():
    def people(healthy, ill, rng):
        x = torch.randn(healthy + ill, 2, dtype=torch.float64, generator=rng)
        y = torch.zeros(healthy + ill, dtype=torch.long)
        y[healthy:] = 1
        return x + 1.2 * y[:, None], y

    def with_one(x):
        return torch.cat([x, x.new_ones(len(x), 1)], -1)

    def fit(x, y, weights=None):
        W = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
        solver = torch.optim.LBFGS(
            [W], max_iter=60, line_search_fn="strong_wolfe", tolerance_grad=1e-10
        )
        size = len(y) if weights is None else weights[y].sum()

        def loss():
            solver.zero_grad()
            logits = (with_one(x) @ W)[None]
            value = total_loss(logits, y[None], class_weights_V=weights) / size
            value = value + 1e-6 * W.square().sum()
            value.backward()
            return value

        solver.step(loss)
        return W.detach()

    def judge(W, x, y, shift=0.0):
        p = (with_one(x) @ W - torch.tensor([0.0, shift], dtype=torch.float64)).softmax(-1)[:, 1]
        called, ill = p > 0.5, y == 1
        return {
            "right": (called == ill).double().mean().item(),
            "ill people found": called[ill].double().mean().item(),
            "mean probability of ill": p.mean().item(),
        }

    def draw(seed):
        rng = torch.Generator().manual_seed(seed)
        return people(1900, 100, rng), people(9500, 500, rng), rng

    return draw, fit, judge


@app.cell
def _():
    rare_weight = mo.ui.slider(
        steps=[1, 2, 5, 10, 19], value=5, label="Weight $w$ of the rare class", show_value=True
    )
    rare_weight
    return (rare_weight,)


@app.cell
def _(draw, fit, judge, rare_weight):
    w = rare_weight.value
    (x_learn, y_learn), (x_judge, y_judge), _rng = draw(0)
    weighted = fit(x_learn, y_learn, torch.tensor([1.0, w], dtype=torch.float64))
    repeated = torch.cat([torch.arange(1900), torch.arange(1900, 2000).repeat(w)])
    copies = fit(x_learn[repeated], y_learn[repeated])
    result = judge(weighted, x_judge, y_judge)
    mo.vstack(
        [
            bar_chart(
                [{"measure": name, "share": share} for name, share in result.items()],
                "measure",
                "share",
                title=f"10,000 people, 5% of them ill, weight {w}",
                y_range=(0, 1),
            ),
            claim(
                "TR-04",
                f"Weight {w} and {w} copies of every rare case give the same classifier: they are one sum, written in two ways.",
                torch.allclose(weighted, copies, atol=1e-6),
            ),
        ]
    )
    return


@app.cell
def _(draw, fit, judge):
    weights_19 = torch.tensor([1.0, 19.0], dtype=torch.float64)
    outcomes = []
    for _seed in range(5):
        (_x, _y), (_xt, _yt), _rng = draw(_seed)
        _plain, _weighted = fit(_x, _y), fit(_x, _y, weights_19)
        _chosen = torch.multinomial(weights_19[_y], 3800, replacement=True, generator=_rng)
        outcomes.append(
            {
                "plain": judge(_plain, _xt, _yt),
                "class weights": judge(_weighted, _xt, _yt),
                "resampled": judge(fit(_x[_chosen], _y[_chosen]), _xt, _yt),
                "class weights, corrected": judge(_weighted, _xt, _yt, shift=math.log(19)),
            }
        )
    means = {
        way: {k: sum(o[way][k] for o in outcomes) / 5 for k in outcomes[0][way]}
        for way in outcomes[0]
    }
    mo.vstack(
        [
            table([{"loss": way} | numbers for way, numbers in means.items()]),
            details(
                claim(
                    "TR-04",
                    f"In each of five repetitions: weight 19 finds {means['class weights']['ill people found']:.0%} of the ill instead of "
                    f"{means['plain']['ill people found']:.0%}, and drawing the rare class 19 times as often does about the same. The price: "
                    f"fewer calls are right, and the probabilities are no longer true. On average they say {means['class weights']['mean probability of ill']:.0%} "
                    "ill where 5% are.",
                    all(
                        o["class weights"]["ill people found"]
                        > o["plain"]["ill people found"] + 0.4
                        and abs(
                            o["resampled"]["ill people found"]
                            - o["class weights"]["ill people found"]
                        )
                        < 0.1
                        and o["class weights"]["right"] < o["plain"]["right"] - 0.1
                        and o["class weights"]["mean probability of ill"] > 0.2
                        and abs(o["plain"]["mean probability of ill"] - 0.05) < 0.015
                        for o in outcomes
                    ),
                ),
                claim(
                    "TR-04 RG-10",
                    "Here, where a linear classifier can be exactly right, both remedies only move the bar. Subtract $\\log 19$ from the logit of the rare class, and the probabilities "
                    f"are true again: {means['class weights, corrected']['mean probability of ill']:.1%} on average.",
                    all(
                        abs(o["class weights, corrected"]["mean probability of ill"] - 0.05) < 0.015
                        for o in outcomes
                    ),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    def check(names):
        cost = names["cross_entropy"]
        vector = torch.tensor
        value = cost(vector([0.0, 1.0, 0.0]), vector([0.2, 0.5, 0.3]))
        assert torch.is_tensor(value), "Return a tensor."
        assert value.dim() == 0, "Return a single number: sum over the entries."
        assert abs(value.item() - math.log(2)) < 1e-6, (
            "The event of probability 0.5 happened: it costs log 2 = 0.693 nats. Sign? Natural logarithm?"
        )
        mixed = cost(vector([0.5, 0.5]), vector([0.25, 0.75])).item()
        assert abs(mixed - 0.8370) < 1e-4, (
            "For y = (0.5, 0.5) and p = (0.25, 0.75) it is 0.837 nats."
        )
        value = cost(vector([1.0, 0.0]), vector([1.0, 0.0])).item()
        assert not math.isnan(value), (
            "A sure and right forecast gives nan: 0 times log 0. What never happens should add 0; see torch.xlogy."
        )
        assert abs(value) < 1e-6, "A sure and right forecast costs nothing."
        value = cost(vector([0.0, 1.0]), vector([1.0, 0.0])).item()
        assert value == math.inf, "A sure and wrong forecast costs infinitely much."

    exercise = Exercise(
        lesson="cross_entropy",
        task="Write `cross_entropy(y, p)` in nats for two vectors that each sum to 1. Zeros are allowed in both.",
        starter="""
    def cross_entropy(y, p):
        return -(y * p.log()).sum()
    """,
        solution="""
    def cross_entropy(y, p):
        return -torch.xlogy(y, p).sum()  # y log p, and 0 where y is 0
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
    own_text = text_field("the people of the united states")
    own_text
    return (own_text,)


@app.cell
def _(own_text, run_path):
    mo.stop(run_path is None, no_run())
    own = fenchel.load(run_path, dtype=torch.float32)
    ids = torch.tensor(token_ids(own_text.value, own.tokenizer, min(32, own.config.context)))
    with torch.no_grad():
        own_logits = own.model(ids[None, :-1]).double()
    surprises = target_losses(own_logits, ids[None, 1:])[0]
    own_p = own_logits[0].softmax(-1).gather(-1, ids[1:, None])[:, 0]
    together = own_p.log().sum()  # the product itself may be too small for a float
    vocabulary = own_logits.shape[-1]
    mo.vstack(
        [
            bar_chart(
                [
                    {"token": f"{i}: {own.tokenizer.decode([token])}", "surprise in nats": s}
                    for i, (token, s) in enumerate(
                        zip(ids[1:].tolist(), surprises.tolist(), strict=True), start=1
                    )
                ],
                "token",
                "surprise in nats",
                title="The surprise of your model at each token, given those before",
            ),
            claim(
                "TR-01 TR-03",
                f"The surprises add up to {surprises.sum().item():.3f} nats: the whole phrase has probability {together.exp().item():.3g} after its "
                f"first token. The mean, {surprises.mean().item():.3f}, is what training lowers; a uniform guess over your {vocabulary:,} tokens "
                f"would pay {math.log(vocabulary):.3f}.",
                torch.isclose(surprises.sum(), -together)
                and torch.isclose(surprises.sum(), total_loss(own_logits, ids[None, 1:])),
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        r"The truth is the best forecast *on average over new cases*. A network that has seen its few cases often enough can lower the "
        r"training loss by being surer than it should: then a low loss does not mean true probabilities. A probability of exactly 0 makes the loss infinite "
        r"as soon as the event happens. And the slope $p - y$ holds for softmax followed by the logarithm; with another map or another cost it is another formula."
    )
    return


@app.cell
def _():
    footer("cross_entropy")
    return


if __name__ == "__main__":
    app.run()
