"""Hypothesis tests: what a nat of divergence means."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Hypothesis tests: what a nat means",
)

with app.setup:
    import math
    from itertools import pairwise

    import marimo as mo
    import numpy as np
    import torch

    import fenchel
    from fenchel.choice.hypothesis_test import (
        chernoff_information,
        divergence,
        divergence_upper,
        evidence,
        large_deviation,
        pinsker_upper,
        sample_size_lower,
        tilted,
        total_variation,
        total_variation_upper,
    )
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
    header("hypothesis_tests")
    return


@app.cell
def _():
    guess = question(
        "A machine draws one of three cards again and again. Honest, it draws them with the chances 0.50, 0.30, 0.20. "
        "Tilted by a softmax, it draws them with 0.31, 0.28, 0.41. How many draws does it take to tell the tilted machine "
        "from the honest one, if an honest machine may be accused in 1 case of 100 and a tilted one overlooked in 1 of 10?",
        ["about 5", "about 50", "about 500"],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "about 50",
        "One number rules it, the divergence $\\mathrm{KL}(p \\| u) = 0.1228$ of the two distributions: the risk of a false "
        "alarm falls roughly like $e^{-0.1228\\,m}$ with the number $m$ of draws. Softmax is the choice that spends this "
        "number best ([priors and budgets](../priors_and_budgets/)), and that is one answer to *why softmax?*",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Catching a tilted machine

    The cards have the scores 0, 1 and 3. The *null hypothesis* is that the machine is honest and draws from the prior $u$; the *alternative*, that it
    draws from $p_i = u_i e^{\beta z_i} / Z$, the softmax with $\beta = 0.3918$. After each draw of card $i$ write down $\log (p_i / u_i)$: positive if the card is
    evidence for a tilt, negative if it is evidence against. Add these up, and sound the alarm if the sum is large.

    It can go wrong in two ways: a *false alarm* (honest, but accused) and a *miss* (tilted, but not noticed). By a theorem of Neyman and
    Pearson no test with as few false alarms misses less often. *Draw more cards: when do the two bells part?*
    """)
    return


@app.cell
def _():
    draws = mo.ui.slider(
        steps=[1, 2, 5, 10, 20, 40, 80, 160],
        value=20,
        label="Number $m$ of draws",
        show_value=True,
    )
    draws
    return (draws,)


@app.cell
def _():
    u = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    z = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    rare = large_deviation(z, 1.5, u.log())

    def sums(law, m):
        """The chance of each sum of m scores 0, 1 or 3: 3 m + 1 numbers."""
        one = np.array([law[0], law[1], 0.0, law[2]])
        chances = np.array([1.0])
        for _ in range(m):
            chances = np.convolve(chances, one)
        return chances

    def false_alarm(m, miss=0.1):
        """Of the best test that misses with the probability ``miss``."""
        honest, tilt = sums(u, m), sums(rare.p, m)
        below = np.cumsum(tilt)
        edge = int(np.searchsorted(below, miss, side="right"))
        before = below[edge - 1] if edge else 0.0
        share = (miss - before) / tilt[edge]  # of the sum at the edge, counted as no alarm
        return float(honest[edge + 1 :].sum() + (1 - share) * honest[edge])

    def threshold_alarm(m, miss=0.1):
        """Of a plain threshold on the sum that misses with at most the probability ``miss``."""
        edge = int(np.searchsorted(np.cumsum(sums(rare.p, m)), miss, side="right"))
        return float(sums(u, m)[edge:].sum())

    return false_alarm, rare, sums, threshold_alarm, u, z


@app.cell
def _(draws, rare, sums, u):
    m = draws.value
    honest, tilt = sums(u, m), sums(rare.p, m)
    # Alarm where the tilt is the likelier: the largest possible 1 - miss - false alarm.
    advantage = float(np.clip(tilt - honest, 0, None).sum())
    ceiling = math.sqrt(m * rare.rate.item() / 2)
    _keep = [i for i in range(3 * m + 1) if max(honest[i], tilt[i]) > 1e-5]
    mo.vstack(
        [
            line_chart(
                [
                    {
                        "mean score of the draws": i / m,
                        "probability, largest = 1": float(q[i] / q.max()),
                        "machine": name,
                    }
                    for name, q in (("honest, u", honest), ("tilted, p", tilt))
                    for i in _keep
                ],
                "mean score of the draws",
                "probability, largest = 1",
                "machine",
                title=f"Mean score of {m} draws",
                y_range=(0, 1.05),
                points=m < 10,
                x_range=(0, 3),
            ),
            claim(
                "SM-44 E100",
                f"The most that a test on {m} draws can gain over guessing, 1 minus both risks, is {advantage:.3f}. Pinsker's "
                f"inequality bounds it by $\\sqrt{{m\\,\\mathrm{{KL}}/2}} = {ceiling:.3f}$ (above 1 this says nothing).",
                advantage <= ceiling,
            ),
        ]
    )
    return


@app.cell
def _(false_alarm, rare, threshold_alarm, u, z):
    counts = [20, 80, 320, 640]
    rates = [-math.log(false_alarm(n)) / n for n in counts]
    other_way = divergence(u, rare.p)
    both = chernoff_information(rare.p, u)
    needed = next(n for n in range(1, 400) if false_alarm(n) <= 0.01)
    by_threshold = next(n for n in range(1, 400) if threshold_alarm(n) <= 0.01)
    first = sample_size_lower(rare.rate, 0.01).item()
    least = 8 * math.log(100) / (rare.beta.item() ** 2 * 9)
    tv = total_variation(rare.p, u)
    _g = torch.Generator().manual_seed(0)
    _z = 3 * torch.randn(2000, 6, dtype=torch.float64, generator=_g)
    _prior = 2 * torch.randn(2000, 6, dtype=torch.float64, generator=_g)
    _t = tilted(_z, 0.7, _prior)
    _tv = total_variation(_t.p, _prior.softmax(-1))
    mo.vstack(
        [
            line_chart(
                [
                    {"draws": n, "-log(false alarm) / draws": r, "what": name}
                    for n, exact in zip(counts, rates, strict=True)
                    for name, r in (
                        ("exact, 10 % misses", exact),
                        ("KL(p || u)", rare.rate.item()),
                    )
                ],
                "draws",
                "-log(false alarm) / draws",
                "what",
                title="The exponent of false alarms",
                y_range=(0.08, 0.13),
                log_x=True,
                points=True,
            ),
            claim(
                "SM-44 E95",
                "**Chernoff and Stein.** With misses held at 10 %, $-\\frac1m \\log(\\text{false alarm})$ is "
                f"{', '.join(f'{r:.3f}' for r in rates)} at {', '.join(map(str, counts))} draws, rising towards "
                f"$\\mathrm{{KL}}(p \\| u) = {rare.rate.item():.4f}$. That is what the divergence from the prior measures.",
                [round(r, 3) for r in rates] == [0.084, 0.087, 0.098, 0.104]
                and round(rare.rate.item(), 4) == 0.1228
                and all(a < b for a, b in pairwise([*rates, rare.rate.item()])),
            ),
            claim(
                "E100 E95",
                "**Mind the direction.** $\\mathrm{KL}(p\\|u)$ is the exponent of false alarms at fixed misses. Exchange the roles, and "
                f"misses at fixed false alarms fall with the other divergence, $\\mathrm{{KL}}(u\\|p) = {other_way.item():.4f}$. If both "
                f"must fall together, the exponent is the Chernoff information, {both.item():.4f}.",
                round(other_way.item(), 4) == 0.1123
                and round(both.item(), 4) == 0.0296
                and both < min(other_way, rare.rate),
            ),
            claim(
                "SM-44 E100",
                f"**How many draws.** Estimate: $\\log(1/\\delta)/\\mathrm{{KL}}$, with $\\delta$ the risk of a false alarm; for $\\delta = 0.01$ it is {first:.1f} draws. It is never less than "
                f"$8 \\log(1/\\delta) / (\\beta\\,\\mathrm{{range}}(z))^2 = {least:.1f}$ (range: largest minus smallest score). Counted exactly, with at most 10 % misses, "
                f"a plain threshold on the sum needs {by_threshold} draws; {needed} are enough if a sum that lies exactly at the threshold is decided by lot.",
                first >= least and first < needed <= by_threshold == 56 and needed == 55,
            ),
            details(
                claim(
                    "E95 SM-44",
                    f"**One draw.** $p$ and $u$ differ by at most {tv.item():.3f} in the probability of any event (*total variation*), below "
                    f"$\\sqrt{{\\mathrm{{KL}}/2}} = {pinsker_upper(rare.rate).item():.3f}$. And scores that lie within a range $r$ cannot buy much: "
                    "$\\mathrm{KL} \\le \\beta^2 r^2/8$ and total variation $\\le \\beta r/4$, checked on 2,000 random scores and priors.",
                    tv <= pinsker_upper(rare.rate)
                    and tv <= total_variation_upper(z, rare.beta)
                    and (_t.divergence <= divergence_upper(_z, 0.7)).all()
                    and (_tv <= total_variation_upper(_z, 0.7)).all()
                    and (_tv <= pinsker_upper(_t.divergence)).all(),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            Why add up logarithms of $p_i/u_i$? A run of draws has the chance $u_{i_1} u_{i_2} \cdots$ under the honest machine and
            $p_{i_1} p_{i_2} \cdots$ under the tilted one. You may call some runs an alarm. Each run that you add to the alarms costs its honest chance (more false
            alarms) and earns its tilted chance (fewer misses). So buy the runs with the best ratio of earning to cost first, until the
            allowed false alarms are spent: nobody can earn more for the same cost. The ratio is $\frac{p_{i_1}}{u_{i_1}} \cdot \frac{p_{i_2}}{u_{i_2}} \cdots$, and its
            logarithm is the sum.""",
        undergraduate=r"""
            Neyman and Pearson: let $A$ be the alarms of the threshold test on $p/u \ge t$ and $B$ those of another test with
            $u(B) \le u(A)$. Then $p(A) - p(B) \ge t\,(u(A) - u(B)) \ge 0$, since $p - t u \ge 0$ inside $A$ and $\le 0$ outside. Stein's lemma: under $p$ the
            mean of $\log(p/u)$ is $\mathrm{KL}(p\|u)$, so by the law of large numbers a threshold at $m(\mathrm{KL} - \varepsilon)$ is passed with probability tending
            to 1; and $u(A) = E_p[\mathbf 1_A\, u/p] \le e^{-m(\mathrm{KL} - \varepsilon)}$. No test does better, by the same change of measure.""",
        research=r"""
            The exponents are large deviations of one cumulant generating function, $\Lambda(\beta) = \log E_u e^{\beta z}$: Stein's is
            $\mathrm{KL}(p\|u) = \beta\Lambda'(\beta) - \Lambda(\beta)$, Chernoff's the value where both errors balance, Sanov's the infimum of KL over the event, attained
            by tilting (Cover and Thomas 2006, chapter 11). The correction to Stein at fixed misses is of order $1/\sqrt m$ (Strassen 1962), which is why 20
            draws are a third below the limit.""",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## The least unlikely way to an unlikely mean

    An honest machine has the mean score $0.5 \cdot 0 + 0.3 \cdot 1 + 0.2 \cdot 3 = 0.9$. Suppose that over many draws it showed 1.5 or more. That is
    unlikely, but it can happen, in many ways. Which way is the least unlikely? Sanov's theorem: the draws then look as if they came from the
    distribution nearest to $u$ with mean 1.5, nearest in the sense of KL. And that is a softmax: among all distributions with mean 1.5 it has the
    least divergence, because this is the budget problem read backwards.
    """)
    return


@app.cell
def _(rare, sums, u, z):
    def given_rare(m, c=1.5):
        """The law of one draw among m with mean score c or more, and -log P / m of that event."""
        least = math.ceil(c * m)
        tail = sums(u, m)[least:].sum()
        others = sums(u, m - 1)
        law = [float(u[i]) * others[max(0, least - int(z[i])) :].sum() / tail for i in range(3)]
        return [float(x) for x in law], -math.log(tail) / m

    lengths = [4, 10, 20, 40, 80, 160, 320, 640]
    conditional = [given_rare(n) for n in lengths]
    _law, _rate = conditional[-1]
    mo.vstack(
        [
            line_chart(
                [
                    {"draws": n, "probability": w, "card": f"score {s}"}
                    for n, (law, _) in zip(lengths, conditional, strict=True)
                    for s, w in zip((0, 1, 3), law, strict=True)
                ],
                "draws",
                "probability",
                "card",
                title="One draw, given a mean of 1.5 or more",
                y_range=(0.2, 0.6),
                log_x=True,
                points=True,
            ),
            claim(
                "SM-45 E95",
                f"The softmax with mean 1.5 has $\\beta = {rare.beta.item():.4f}$, weights "
                f"({', '.join(f'{w:.3f}' for w in rare.p.tolist())}) and divergence {rare.rate.item():.4f}. Counted exactly at 640 draws, a draw "
                f"follows ({', '.join(f'{w:.3f}' for w in _law)}), and the event has $-\\frac1m \\log P = {_rate:.3f}$.",
                round(rare.beta.item(), 4) == 0.3918
                and [round(w, 3) for w in rare.p.tolist()] == [0.314, 0.279, 0.407]
                and round(rare.rate.item(), 4) == 0.1228
                and [round(w, 3) for w in _law] == [0.313, 0.279, 0.408]
                and round(_rate, 3) == 0.128,
            ),
        ]
    )
    return


@app.cell
def _(u, z):
    likelihood = (0.3918 * z).exp()
    posterior = u * likelihood / (u * likelihood).sum()
    weight_of_evidence = evidence(z, 0.3918, u.log())
    best_guess = [fenchel.Softmax(b).weights(z, u.log()).argmax().item() for b in (0.1, 50.0)]
    details(
        mo.md(r"""
            A doctor knows how common each illness is (the prior $u_i$) and how well each explains the symptoms (the likelihood). Bayes' rule:
            multiply the two and divide by the sum. Read "key $i$ is the relevant one" for the illness and $e^{\beta z_i}$ for the likelihood (a common factor would cancel).
            """),
        claim(
            "SM-46",
            "The posterior is softmax with the prior. The *evidence* for $i$, $\\log(p_i/u_i) = \\beta z_i - \\log Z$, is "
            f"{', '.join(f'{e:+.3f}' for e in weight_of_evidence.tolist())}: what the test above adds up. For small $\\beta$ the guess "
            "follows the prior, for large $\\beta$ the best score: the most probable explanation.",
            torch.allclose(posterior, fenchel.Softmax(0.3918).weights(z, u.log()))
            and torch.allclose(weight_of_evidence, (posterior / u).log())
            and best_guess == [0, 2],
        ),
        title="The reading of Bayes",
    )
    return


@app.cell
def _():
    def check(names):
        tilt = names["tilt"]
        z = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
        u = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
        for c in (1.5, 1.0, 2.5):
            beta = float(tilt(z, u, c))
            assert beta >= 0, "beta is not negative: c is above the mean under the prior."
            w = u * torch.exp(beta * z)
            mean = float((w / w.sum()) @ z)
            assert abs(mean - c) < 1e-6, (
                f"For c = {c} your beta = {beta:.4f} gives the mean {mean:.4f}: "
                f"beta is too {'large' if mean > c else 'small'}."
            )

    exercise = Exercise(
        lesson="hypothesis_tests",
        task="Write `tilt(z, u, c)`: the $\\beta \\ge 0$ at which the softmax with prior `u` has the mean score `c`. The mean rises with "
        "$\\beta$, so halve an interval again and again. For the cards and $c = 1.5$ it is 0.3918.",
        starter="""
    def tilt(z, u, c):
        low, high = 0.0, 50.0
        for _ in range(100):
            beta = (low + high) / 2
            weights = u * torch.exp(beta * z)
            mean = (weights / weights.sum()) @ z
            high = beta  # or low = beta?
        return beta
    """,
        solution="""
    def tilt(z, u, c):
        low, high = 0.0, 50.0
        for _ in range(100):
            beta = (low + high) / 2
            weights = u * torch.exp(beta * z)
            mean = (weights / weights.sum()) @ z
            if mean < c:
                low = beta
            else:
                high = beta
        return beta
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
    per_head = []
    for _layer, _call in calls.items():
        _, _w = fenchel.attend(_call.q, _call.k, _call.v, **_call.spec, return_weights=True)
        _last = _w[0, :, -1].double()  # what the last token gives to each token: (heads, tokens)
        _sum = _last.sum(-1, keepdim=True)  # a sink may take a part, or all of it
        _last = torch.where(_sum > 0, _last / _sum, 1 / _last.shape[-1])
        for _head, _p in enumerate(_last, 1):
            _uniform = torch.full_like(_p, 1 / len(_p))
            per_head.append(
                {
                    "head": f"{_layer + 1}.{_head}",
                    "KL from uniform, nats": divergence(_p, _uniform).item(),
                    "one draw, TV": total_variation(_p, _uniform).item(),
                    "draws to tell, 1 %": sample_size_lower(divergence(_p, _uniform), 0.01).item(),
                }
            )
    _tokens = ids.shape[1]
    mo.vstack(
        [
            mo.md(
                f"Your model reads *we the people of the united states* ({_tokens} tokens). At the last position each *head* (one of several attentions "
                "that run side by side, [masks and heads](../masks_and_heads/)) gives weights to these tokens. How far are they from a uniform choice? The label is layer.head."
            ),
            bar_chart(per_head, "head", "KL from uniform, nats", title="Divergence of each head"),
            claim(
                "SM-44 SM-38",
                f"No head exceeds $\\log {_tokens} = {math.log(_tokens):.2f}$ nats, that of a hard choice, and Pinsker's inequality holds "
                "in each.",
                all(
                    row["KL from uniform, nats"] <= math.log(_tokens) + 1e-9
                    and row["one draw, TV"]
                    <= math.sqrt(max(row["KL from uniform, nats"], 0.0) / 2) + 1e-6
                    for row in per_head
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        r"The draws must be independent and the two hypotheses fixed beforehand: then KL is an exponent. A model computes a weighted *mean* of "
        r"values and draws nothing, so for attention the test is a way to measure, not what happens. And "
        r"$\log(1/\delta)/\mathrm{KL}$ is a first-order estimate: at 20 draws the exponent is a third below its limit."
    )
    return


@app.cell
def _():
    footer("hypothesis_tests")
    return


if __name__ == "__main__":
    app.run()
