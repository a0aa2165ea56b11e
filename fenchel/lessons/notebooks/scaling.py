"""Scaling laws, adapters, retrieval and experts: four ways to a better model."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Scaling laws, adapters, retrieval and experts",
)

with app.setup:
    import copy
    import math
    import statistics
    from itertools import pairwise

    import marimo as mo
    import torch
    from torch.nn.functional import cross_entropy, normalize

    import fenchel
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
    from fenchel.model import forward_flops
    from fenchel.model.lora import add_lora, merge
    from fenchel.model.mlp import MixtureOfExperts, balance


@app.cell
def _():
    header("scaling")
    return


@app.cell
def _():
    guess = question(
        "You may spend a hundred times as much computing on training. What should grow?",
        ["the model, on the same text", "the text, with the same model", "both"],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "both",
        "A large model that has read little and a small one that has read much both stop early. In the "
        "fit of Hoffmann et al. (2022) the best model is then about 8 times as large, and its text about 12 times as long.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## One budget, two things to buy

    A cook with a fixed budget buys ingredients and hours in the kitchen. Ingredients without time
    spoil; time without ingredients is idle. Each helps less and less, so the best menu needs both.

    For a language model let $N$ be the number of its parameters and $D$ the number of tokens it is
    trained on. A training step costs about six operations per parameter and token: two forward,
    four backward. So the computing is $C \approx 6ND$. In many experiments the loss (in nats per token,
    $-\log$ of the probability that the model gave to the right token) was close to

    $$L(N, D) = E + \frac{A}{N^{\alpha}} + \frac{B}{D^{\beta}} .$$

    $E$ is the entropy of the text itself, which no model can go below; the second term is what a
    model of finite size cannot express, the third what a finite text cannot teach. Hoffmann et al.
    published $E = 1.69$, $A = 406.4$, $B = 410.7$, $\alpha = 0.34$, $\beta = 0.28$ for their models and
    texts. ($\beta$ is an exponent here, and $D$ counts tokens, as in their paper; in other lessons the letters mean other things.) Move the budget.
    """)
    return


@app.cell
def _():
    budget = mo.ui.slider(
        17.0, 25.0, step=0.5, value=21.0, label=r"Budget: $\log_{10} C$", show_value=True
    )
    budget
    return (budget,)


@app.cell
def _(budget):
    A, B, E, alpha, beta = 406.4, 410.7, 1.69, 0.34, 0.28

    def law(N, D):
        return E + A / N**alpha + B / D**beta

    def best_size(C):
        """The N of the smallest loss with C = 6 N D, from the condition alpha A/N^alpha = beta B/D^beta."""
        return (alpha * A / (beta * B)) ** (1 / (alpha + beta)) * (C / 6) ** (beta / (alpha + beta))

    C = 10**budget.value
    sizes = [10 ** (k / 20) for k in range(100, 280)]
    _losses = [law(N, C / 6 / N) for N in sizes]
    _rows = [
        {"parameters N": N, "loss": loss}
        for N, loss in zip(sizes, _losses, strict=True)
        if loss < min(_losses) + 1.5
    ]
    N_best = best_size(C)
    D_best = C / 6 / N_best
    _found = sizes[_losses.index(min(_losses))]
    _hundred = best_size(100 * C) / N_best
    mo.vstack(
        [
            line_chart(
                _rows,
                "parameters N",
                "loss",
                title=f"Loss at C = {number(C, 2)} operations",
                log_x=True,
                x_range=(1e5, 1e13),
                y_range=(1.6, 6.5),
                here=[{"parameters N": N_best, "loss": law(N_best, D_best)}],
            ),
            table(
                [
                    {
                        "best N": number(N_best, 3),
                        "its text D": number(D_best, 3),
                        "size term": A / N_best**alpha,
                        "text term": B / D_best**beta,
                        "loss": law(N_best, D_best),
                    }
                ]
            ),
            claim(
                "PD-12",
                f"The lowest point of the curve is at {number(_found, 2)} parameters; the formula below says {number(N_best, 2)}. "
                f"A hundred times the budget multiplies the best $N$ by {_hundred:.1f} and $D$ by "
                f"{100 / _hundred:.1f}: both grow.",
                abs(math.log10(_found / N_best)) <= 0.026
                and math.isclose(_hundred, 100 ** (beta / (alpha + beta)))
                and _hundred > 4
                and 100 / _hundred > 4
                and math.isclose(alpha * A / N_best**alpha, beta * B / D_best**beta),
            ),
        ]
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            Make the model one percent larger. The size term $A/N^\alpha$ falls by about $\alpha$ percent of itself (a calculator gives $1.01^{-0.34} = 0.9966$, a loss
            of 0.34 percent). But the budget is
            fixed, so the text becomes one percent shorter, and the text term $B/D^\beta$ rises by about $\beta$ percent of
            itself. At the best point neither this exchange nor its opposite pays, so the two amounts are equal:
            $\alpha A/N^\alpha = \beta B/D^\beta$. Now let the budget grow. If only $N$ grew, the left side would
            fall and the right side would not: the balance is lost. Both must grow. Should $\alpha = \beta$, both
            terms stay balanced when $N$ and $D$ grow by the same factor, the square root of the budget's.""",
        undergraduate=r"""
            Insert $D = C/6N$ and differentiate with respect to $\log N$:
            $-\alpha A N^{-\alpha} + \beta B (6N/C)^{\beta} = 0$. Both terms are exponentials of $\log N$, one falling and one rising, so the loss is convex in $\log N$
            and the zero is the minimum:
            $N^* = \left(\frac{\alpha A}{\beta B}\right)^{\frac{1}{\alpha+\beta}} \left(\frac{C}{6}\right)^{\frac{\beta}{\alpha+\beta}}$ and
            $D^* \propto C^{\frac{\alpha}{\alpha+\beta}}$. With the published constants the powers are 0.45 and 0.55; and
            $L - E \propto C^{-\alpha\beta/(\alpha+\beta)}$, a power of 0.15: to halve the reducible loss takes about 90 times the computing.""",
        research=r"""
            Kaplan et al. (2020) fitted $N^* \propto C^{0.73}$, Hoffmann et al. (2022) close to $C^{0.5}$ by three methods, which gives
            roughly 20 tokens per parameter at their scale. Later analyses trace the gap to the counting of embedding and
            head parameters, to warm-up, and to schedules that did not match the length of the run; a refit of the third method
            (Besiroglu et al. 2024) moves the constants above. So take the exponents as properties of a family of
            models, a text and a recipe. $C = 6ND$ leaves out the scores of attention, $12 L n M$ operations per token in training, small while the
            context is short against the width (`fenchel.model.training_flops` counts them). Neither law counts the cost of using the model: who serves many requests trains a smaller one for longer.""",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## A scaling law of your own, in seconds

    Real laws take months of computing. Here is a toy whose entropy is *known*: a source of 64
    symbols in which the next symbol depends on the present one only, by a table of probabilities.
    The loss of a model is then the entropy plus a gap that can be computed exactly, the
    *divergence* between the true table and the predictions, zero only for a perfect model.

    Below, transformers of four sizes train on endless text, and one size on short texts. Three
    repetitions, each with its own start, show how far a measured exponent can be trusted.
    """)
    return


@app.cell
def _():
    VOCABULARY = 64

    def source(seed):
        """A table of next-symbol probabilities whose logits have a spectrum k^-0.75."""
        g = torch.Generator().manual_seed(seed)
        U, W = (
            torch.linalg.qr(torch.randn(64, 64, generator=g, dtype=torch.float64))[0]
            for _ in range(2)
        )
        s = torch.arange(1, 65, dtype=torch.float64) ** -0.75
        return torch.softmax((U * (160 * s / s.norm())) @ W.T, -1)

    def text(P, rows, length, g):
        """``rows`` lines of ``length`` symbols drawn from the table."""
        x = torch.randint(VOCABULARY, (rows,), generator=g)
        line = [x]
        for _ in range(length - 1):
            x = torch.multinomial(P[x], 1, generator=g)[:, 0]
            line.append(x)
        return torch.stack(line, 1)

    def small_model(width, seed):
        config = fenchel.ModelConfig(
            vocabulary=VOCABULARY,
            context=32,
            width=width,
            layers=1,
            heads=1,
            hidden=2 * width,
            tied=False,
        )
        return fenchel.Transformer(config, generator=torch.Generator().manual_seed(seed))

    def gap(P, lines, q):
        """Mean divergence of predictions q from the true table: loss minus entropy, in nats."""
        p = P[lines]
        return (torch.xlogy(p, p) - torch.xlogy(p, q.double())).sum(-1).mean().item()

    def predictions(model, lines):
        with torch.no_grad():
            return model(lines).softmax(-1)

    def fit(model, lines, steps, g, watch=None, marks=()):
        """Train with Adam on random lines; the gap at the marks."""
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimiser = torch.optim.Adam(trainable, lr=1e-2)
        gaps = {}
        for step in range(1, steps + 1):
            batch = lines[torch.randint(len(lines), (16,), generator=g)]
            loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            if step in marks:
                gaps[step] = gap(*watch, predictions(model, watch[1]))
        return gaps

    def parameters(model, only_trainable=False):
        return sum(p.numel() for p in model.parameters() if p.requires_grad or not only_trainable)

    def power(x, y):
        """The slope a of the line through log x, log y: y is about x^a."""
        return statistics.linear_regression(
            [math.log(v) for v in x], [math.log(v) for v in y]
        ).slope

    P = source(100)
    stationary = torch.linalg.matrix_power(P, 200)[0]
    entropy_rate = -(stationary @ torch.xlogy(P, P).sum(-1)).item()
    return (
        P,
        entropy_rate,
        fit,
        gap,
        parameters,
        power,
        predictions,
        small_model,
        source,
        text,
    )


@app.cell
def _(by_size, by_text, entropy_rate, power):
    N_list, D_list = list(by_size[0]), list(by_text[0])
    at_end = {N: statistics.mean(run[N][160] for run in by_size) for N in N_list}
    at_text = {D: statistics.mean(run[D] for run in by_text) for D in D_list}
    N_powers = [power(N_list, [run[N][160] for N in N_list]) for run in by_size]
    D_powers = [power(D_list, [run[D] for D in D_list]) for run in by_text]

    def _range(powers):
        return f"{statistics.mean(powers):.2f} (from {min(powers):.2f} to {max(powers):.2f})"

    mo.vstack(
        [
            line_chart(
                [
                    {"number": x, "gap in nats": y, "of": name}
                    for name, found in (
                        ("parameters, endless text", at_end),
                        ("tokens, 1,688 parameters", at_text),
                    )
                    for x, y in found.items()
                ],
                "number",
                "gap in nats",
                "of",
                title="Loss minus entropy",
                log_x=True,
                log_y=True,
                points=True,
            ),
            claim(
                "PD-12",
                f"The source has {entropy_rate:.3f} nats per symbol; no model is below it. The gap falls with every "
                f"larger size, as a power {_range(N_powers)}, and with the length of the text, as a power "
                f"{_range(D_powers)}. A toy: the exponents belong to this source and these models.",
                0 < entropy_rate < math.log(64)
                and all(
                    a > b > 0 for run in by_size for a, b in pairwise(run[N][160] for N in N_list)
                )
                and all(a > b > 0 for run in by_text for a, b in pairwise(run.values()))
                and all(-1.1 < a < -0.5 for a in N_powers)
                and all(-0.7 < a < -0.25 for a in D_powers),
            ),
        ]
    )
    return (N_list,)


@app.cell
def _(N_list, by_size, marks, power):
    curves = {
        N: {6 * N * 512 * step: statistics.mean(run[N][step] for run in by_size) for step in marks}
        for N in N_list
    }

    def best_within(C):
        """The smallest gap, and its size, among all that was reached with at most C operations."""
        return min((g, N) for N, curve in curves.items() for cost, g in curve.items() if cost <= C)

    budgets = [3e7, 1e8, 4e8, 1.6e9]
    winners = [best_within(C) for C in budgets]
    C_power = power(budgets, [g for g, _ in winners])
    mo.vstack(
        [
            line_chart(
                [
                    {"operations C": cost, "gap in nats": g, "parameters": f"{N:,}"}
                    for N, curve in curves.items()
                    for cost, g in curve.items()
                ],
                "operations C",
                "gap in nats",
                "parameters",
                title="The gap while training goes on",
                log_x=True,
                log_y=True,
                points=True,
            ),
            table(
                [
                    {"budget C": number(C, 2), "best size": f"{N:,}", "gap": g}
                    for C, (g, N) in zip(budgets, winners, strict=True)
                ]
            ),
            details(
                claim(
                    "PD-12",
                    "Read it from below: for each budget another curve is the lowest one. With more computing the best size "
                    f"grows from {winners[0][1]:,} to {winners[-1][1]:,} parameters, and its text grows too. Along the best "
                    f"points the gap falls like $C^{{{C_power:.2f}}}$.",
                    all(a[1] <= b[1] and a[0] > b[0] for a, b in pairwise(winners))
                    and winners[0][1] < winners[-1][1]
                    and budgets[0] / winners[0][1] < budgets[-1] / winners[-1][1]
                    and C_power < 0,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Adapters: a small change to a large model

    A suit is altered at a few seams; nobody weaves new cloth. *LoRA* (low-rank adaptation) leaves each trained
    matrix $W$ as it is and learns a thin correction beside it:

    $$W' = W + \frac{a}{r}\, B A .$$

    $W$ has $O$ rows and $I$ columns; the matrix $A$ has $r$ rows, $B$ has $r$ columns (they have nothing to do with the constants above), $r$ is the *rank*, and $a$ a fixed
    factor. $B$ starts at zero, so at first nothing changes. Instead of $I \cdot O$ numbers only
    $r(I + O)$ are learnt.
    """)
    return


@app.cell
def _():
    rank = mo.ui.slider(steps=[1, 2, 4, 8, 16, 64], value=8, label="Rank $r$", show_value=True)
    rank
    return (rank,)


@app.cell
def _(rank):
    _widths = (128, 512, 2048, 4096)
    _shares = {M: rank.value * 2 * M / M**2 for M in _widths}
    bar_chart(
        [
            {"width of a square matrix": f"{M:,}", "learnt numbers, percent": 100 * share}
            for M, share in _shares.items()
        ],
        "width of a square matrix",
        "learnt numbers, percent",
        title=f"Numbers that an adapter of rank {rank.value} learns, of those in the matrix",
        y_range=(0, 100),
    )
    return


@app.cell
def _(P, base, fit, gap, parameters, predictions, source, text, unseen):
    # A dialect: 16 of the 64 symbols are followed by other ones than before.
    dialect = P.clone()
    dialect[:16] = source(107)[:16]
    _g = torch.Generator().manual_seed(3)
    dialect_text = text(dialect, 256, 33, _g)
    dialect_unseen = text(dialect, 48, 32, _g)

    def _gaps(model):
        return (
            gap(dialect, dialect_unseen, predictions(model, dialect_unseen)),
            gap(P, unseen, predictions(model, unseen)),
        )

    _adapted = copy.deepcopy(base)
    add_lora(
        _adapted,
        rank=2,
        targets=("qkv", "out", "gate", "up", "down"),
        generator=torch.Generator().manual_seed(0),
    )
    _fresh = (predictions(_adapted, unseen) - predictions(base, unseen)).abs().max().item()
    _learnt, _all = parameters(_adapted, only_trainable=True), parameters(base)
    _frozen = [p.clone() for n, p in _adapted.named_parameters() if "lora" not in n]
    fit(_adapted, dialect_text, 80, torch.Generator().manual_seed(4))
    _kept = all(
        torch.equal(a, b)
        for a, b in zip(
            _frozen, (p for n, p in _adapted.named_parameters() if "lora" not in n), strict=True
        )
    )
    _full = copy.deepcopy(base)
    fit(_full, dialect_text, 80, torch.Generator().manual_seed(4))
    _rows = [
        {
            "model": name,
            "learnt numbers": n,
            "gap, dialect": _gaps(m)[0],
            "gap, old source": _gaps(m)[1],
        }
        for name, n, m in (
            ("as trained", 0, base),
            ("adapters of rank 2", _learnt, _adapted),
            ("all numbers trained", _all, _full),
        )
    ]
    _before = predictions(_adapted, unseen)
    merge(_adapted)
    _merged = (predictions(_adapted, unseen) - _before).abs().max().item()
    mo.vstack(
        [
            mo.md(
                "The largest model from above meets a *dialect*: a quarter of the symbols are followed by other "
                "ones. It trains on 8,192 new symbols."
            ),
            table(_rows),
            claim(
                "PD-13",
                f"Fresh adapters change no prediction (difference {_fresh:g}). {_learnt} numbers of {_all:,} then "
                f"take the gap on the dialect from {_rows[0]['gap, dialect']:.2f} to {_rows[1]['gap, dialect']:.2f} while all old "
                "numbers stay. Training everything learns the dialect better, and forgets more of the old source.",
                _fresh == 0
                and _kept
                and _learnt < _all / 5
                and _rows[1]["gap, dialect"] < 0.7 * _rows[0]["gap, dialect"]
                and _rows[2]["gap, dialect"] < _rows[1]["gap, dialect"]
                and _rows[2]["gap, old source"] > _rows[1]["gap, old source"],
            ),
            details(
                claim(
                    "PD-13",
                    f"Added into $W$, the adapter is gone and the predictions are the same (to {_merged:.0e}): the model is as "
                    "small and as fast as before.",
                    _merged < 1e-5 and not any("lora" in n for n, _ in _adapted.named_parameters()),
                ),
            ),
        ]
    )
    return dialect, dialect_text, dialect_unseen


@app.cell
def _():
    mo.md(r"""
    ## Retrieval: looking it up

    A doctor who has forgotten a drug opens the handbook. Nothing in the doctor's head changes. A model can do the
    same: store, for each place of a new text, the vector $k_i$ that the model had there and the token $y_i$ that
    came next. To predict, take the present vector $q$ and find the entries with the largest $q \cdot k_i$ (below, all vectors are scaled to length 1):
    *maximum inner product search*. Softmax over the best of them gives weights to the tokens that followed, a second
    opinion $p_\text{memory}$, and the two are mixed:

    $$p = (1 - \lambda)\, p_\text{model} + \lambda\, p_\text{memory} .$$

    That is attention over a memory outside the model, restricted to the largest scores.
    """)
    return


@app.cell
def _():
    share = mo.ui.slider(
        0.0, 1.0, step=0.05, value=0.5, label=r"Share of the memory $\lambda$", show_value=True
    )
    share
    return (share,)


@app.cell
def _(base, dialect, dialect_text, dialect_unseen, gap, predictions):
    _memory = dialect_text[:128]
    with torch.no_grad():
        keys = normalize(base(_memory[:, :-1], return_hidden=True).flatten(0, 1), dim=-1)
        queries = normalize(base(dialect_unseen, return_hidden=True), dim=-1)
    followers = _memory[:, 1:].flatten()
    scores = queries @ keys.T
    _best = scores.topk(64, dim=-1)
    _weights = fenchel.Softmax(beta=20.0).weights(_best.values).double()
    from_memory = torch.zeros(*scores.shape[:2], 64, dtype=torch.float64).scatter_add_(
        2, followers[_best.indices], _weights
    )
    from_model = predictions(base, dialect_unseen).double()

    def mixed_gap(weight):
        return gap(dialect, dialect_unseen, (1 - weight) * from_model + weight * from_memory)

    mixed = {k / 20: mixed_gap(k / 20) for k in range(20)}
    # By hand for a few queries: every key, one after another.
    _exact = all(
        max(range(len(keys)), key=lambda i, q=q: (q @ keys[i]).item()) == row.argmax().item()
        or math.isclose(row.max().item(), max((q @ k).item() for k in keys), abs_tol=1e-6)
        for q, row in zip(queries[0, :3], scores[0, :3], strict=True)
    )
    mo.vstack(
        [
            details(
                claim(
                    "PD-14 GE-12",
                    f"Among {len(keys):,} stored places the search is exact: one matrix product finds what comparing one by "
                    f"one finds. With half of the weight on the memory the gap falls from {mixed[0.0]:.2f} to {mixed[0.5]:.2f} nats, "
                    "and not one number of the model has changed.",
                    _exact and mixed[0.5] < 0.6 * mixed[0.0] and mixed[0.25] < mixed[0.0],
                ),
            ),
        ]
    )
    return from_memory, from_model, mixed, mixed_gap


@app.cell
def _(from_memory, from_model, mixed, mixed_gap, share):
    _least = min(mixed, key=mixed.get)
    _p = (1 - share.value) * from_model + share.value * from_memory
    mo.vstack(
        [
            line_chart(
                [{"share of the memory": w, "gap in nats": g} for w, g in mixed.items()],
                "share of the memory",
                "gap in nats",
                title="The dialect, without any training",
                x_range=(0, 1),
                here=[{"share of the memory": share.value}],
            ),
            mo.md(
                f"At $\\lambda = {share.value:.2f}$ the gap is **{mixed_gap(share.value):.3f} nats**; "
                f"the best share here is {_least:.2f}. The memory alone ($\\lambda = 1$) gives probability 0 to whatever it has "
                "not seen, which costs infinitely much when it comes."
            ),
            claim(
                "PD-14",
                "Every mixture is a distribution, and at each step from 0 to 0.95 the gap is finite.",
                torch.allclose(_p.sum(-1), torch.ones(1, dtype=torch.float64))
                and all(math.isfinite(g) for g in mixed.values())
                and 0 < _least < 1,
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Experts: many departments, few of them at work

    In a hospital a patient is sent to one or two of many departments. The hospital is large; each visit is short.
    A *mixture of experts* has $X$ feed-forward layers instead of one. A small *router* scores them, softmax turns scores
    into weights $p_e$, and each token uses only the $k$ best:

    $$y = \sum_{e \in \text{top } k} w_e\, \mathrm{MLP}_e(x), \qquad w_e = \frac{p_e}{\sum_{\text{top } k} p} .$$
    """)
    return


@app.cell
def _():
    router_beta = mo.ui.slider(
        steps=[0.1, 0.5, 1.0, 2.0, 5.0, 20.0, 100.0],
        value=1.0,
        label=r"Sharpness of the router $\beta$",
        show_value=True,
    )
    router_beta
    return (router_beta,)


@app.cell
def _(router_beta):
    _z = torch.tensor([1.0, 1.3, 0.2, 1.3, -0.5, 0.9], dtype=torch.float64)
    _p = fenchel.Softmax(beta=router_beta.value).weights(_z)
    _u = torch.tensor([0.1, 0.3, 0.1, 0.1, 0.2, 0.2], dtype=torch.float64)
    _limit = fenchel.Softmax(beta=5000.0).weights(_z, _u.log())
    _hard = fenchel.Hard().weights(_z, _u.log())
    mo.vstack(
        [
            bar_chart(
                [{"expert": f"{e}", "weight": w} for e, w in enumerate(_p.tolist())],
                "expert",
                "weight",
                title="Weights of the router, experts 1 and 3 tied",
                y_range=(0, 1),
            ),
            claim(
                "PD-15 SM-40",
                "As $\\beta$ grows, softmax becomes *hard routing*: all weight on the best score. Ties are split in proportion to "
                f"the prior $u$: with $u = 0.3$ and $0.1$ the two best experts get {_hard[1]:.2f} and {_hard[3]:.2f}. The "
                "order of the experts is the same at every $\\beta$.",
                torch.allclose(_limit, _hard, atol=1e-9)
                and torch.allclose(_hard, _hard.new_tensor([0, 0.75, 0, 0.25, 0, 0]))
                and _p.argmax() in (1, 3)
                and (_p.diff().sign() == _z.diff().sign()).all(),
            ),
        ]
    )
    return


@app.cell
def _():
    _config = fenchel.ModelConfig(
        vocabulary=64, width=16, layers=1, heads=1, experts=6, experts_per_token=2, mlp="gelu"
    )
    _g = torch.Generator().manual_seed(0)
    _layer = MixtureOfExperts(_config).double()
    with torch.no_grad():
        for _w in _layer.parameters():
            _w.copy_(torch.randn(_w.shape, generator=_g, dtype=torch.float64) / 4)
    _x = torch.randn(1, 40, 16, generator=_g, dtype=torch.float64)
    _p = _layer.router(_x).softmax(-1)
    _every = torch.stack(
        [
            torch.nn.functional.gelu(_x @ up.T) @ down.T
            for up, down in zip(_layer.up, _layer.down, strict=True)
        ],
        -1,
    )
    _top = _p.topk(2, dim=-1)
    _w = torch.zeros_like(_p).scatter_(-1, _top.indices, _top.values)
    _w = _w / _w.sum(-1, keepdim=True)
    _by_hand = (_every * _w.unsqueeze(-2)).sum(-1)
    _cost = {
        X: forward_flops(
            fenchel.ModelConfig(
                vocabulary=64, width=64, layers=1, experts=X, experts_per_token=2, mlp="gelu"
            ),
            64,
        ).mlp
        for X in (4, 16)
    }
    _size = {X: X * 2 * 64 * 256 for X in (4, 16)}
    _scores = torch.zeros(400, 4, dtype=torch.float64)
    _scores[:, 0] = 2.0
    _scores.requires_grad_()
    _weights = _scores.softmax(-1)
    _one = torch.zeros(400, 1, dtype=torch.long)
    _crowded = balance(_weights, _one)
    (_slope,) = torch.autograd.grad(_crowded, _scores)
    _even = balance(torch.full((4, 4), 0.25, dtype=torch.float64), torch.arange(4)[:, None])
    _below = balance(
        torch.tensor([[0.6, 0.4, 0.0], [0.0, 0.4, 0.6]], dtype=torch.float64).repeat(3, 1),
        torch.tensor([[0], [2]]).repeat(3, 1),
    )
    _odd = balance(
        torch.tensor([[0.51, 0.49, 0.0], [0.51, 0.49, 0.0], [0.0, 0.49, 0.51]]).double(),
        torch.tensor([[0], [0], [2]]),
    )
    mo.vstack(
        [
            claim(
                "PD-15",
                f"From 4 to 16 experts the parameters grow {_size[16] / _size[4]:g}-fold and the operations per token by "
                f"{100 * (_cost[16] / _cost[4] - 1):.1f} %, the scores of the router.",
                _size[16] == 4 * _size[4] and 1 < _cost[16] / _cost[4] < 1.05,
            ),
            details(
                claim(
                    "PD-15",
                    "The layer equals the sum written out with all six experts and zero weight on four of them; it computes only "
                    "the two that count.",
                    torch.allclose(_layer(_x), _by_hand, atol=1e-12),
                ),
                claim(
                    "PD-15",
                    "A few experts tend to take all tokens. The *balance* $X \\sum_e f_e P_e$ ($f_e$ the fraction of choices that fell on "
                    f"$e$, $P_e$ its mean weight) is added to the loss: {_even:.2f} for even use, {_crowded:.2f} here, where all tokens choose "
                    "one of four. Its slope lowers the score of the crowded expert and raises the others. It is no distance: "
                    f"where choices and weights favour different experts it can be below 1, such as {_odd:.2f}.",
                    math.isclose(_even.item(), 1.0)
                    and math.isclose(_crowded.item(), 4 * _weights[0, 0].item())
                    and (_slope[:, 0] > 0).all()
                    and (_slope[:, 1:] < 0).all()
                    and _odd < 1
                    and _below < 1,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    _width, _window, _layers = 32, 4, 3
    _model = fenchel.Transformer(
        fenchel.ModelConfig(
            vocabulary=64,
            context=32,
            width=_width,
            layers=_layers,
            heads=2,
            windows=(_window,),
            initial="xavier",
        ),
        generator=torch.Generator().manual_seed(0),
    ).double()
    _ids = torch.randint(64, (1, 32), generator=torch.Generator().manual_seed(1))
    _last = _model(_ids)[0, -1]
    reach = []
    with torch.no_grad():
        for _t in range(32):
            _other = _ids.clone()
            _other[0, _t] = (_ids[0, _t] + 1) % 64
            reach.append((_model(_other)[0, -1] - _last).abs().max().item())
    _seen = [31 - t for t, change in enumerate(reach) if change > 0]
    mo.vstack(
        [
            mo.md(r"""
    ## Other architectures: looking at less

    The last lesson showed patterns that score few pairs. Information still travels, as a rumour does: each layer
    carries it one window further.
    """),
            bar_chart(
                [
                    {"tokens back": f"{31 - t}", "change of the last logits": change}
                    for t, change in enumerate(reach)
                    if t >= 16
                ],
                "tokens back",
                "change of the last logits",
                title="Change one token: does the end notice?",
            ),
            details(
                claim(
                    "PD-16",
                    f"{_layers} layers with windows of {_window} keys see {max(_seen)} tokens back, {_layers} times "
                    f"{_window - 1}, and not one further. Full attention sees everything in one layer and pays for all pairs; "
                    "linear attention ([efficient attention](../efficient_attention/)) carries a state of fixed size instead.",
                    max(_seen) == _layers * (_window - 1) and len(_seen) == max(_seen) + 1,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    def check(names):
        exponent = names["exponent"]
        g = torch.Generator().manual_seed(0)
        for true, entropy in ((0.34, 0.0), (0.34, 1.7), (0.8, 2.0)):
            sizes = [1e3, 1e4, 1e5, 1e6, 1e7]
            noise = (0.01 * torch.randn(5, generator=g)).exp().tolist()
            losses = [entropy + 50 * N**-true * e for N, e in zip(sizes, noise, strict=True)]
            found = float(exponent(sizes, losses, entropy))
            assert found > 0, "The exponent is positive when the loss falls: mind the sign."
            assert entropy == 0 or abs(found - true) < 0.02 or found > true / 2, (
                "Subtract the entropy first: the loss itself is no power law, it ends at a floor."
            )
            assert abs(found - true) < 0.02, (
                f"Expected about {true}, got {found:.3f}. A power is a line in logarithms of both sides."
            )

    exercise = Exercise(
        lesson="scaling",
        task="Write `exponent(sizes, losses, entropy)`: the $a$ with loss $=$ entropy $+\\ c \\cdot$ size$^{-a}$, by the slope of a "
        "straight line. `statistics.linear_regression(x, y).slope` or sums by hand.",
        starter="""
    import statistics

    def exponent(sizes, losses, entropy):
        x = [math.log(N) for N in sizes]
        y = [math.log(loss) for loss in losses]
        return -statistics.linear_regression(x, y).slope
    """,
        solution="""
    import statistics

    def exponent(sizes, losses, entropy):
        x = [math.log(N) for N in sizes]
        y = [math.log(loss - entropy) for loss in losses]  # the part that can still fall
        return -statistics.linear_regression(x, y).slope
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
def _(parameters, run_path):
    mo.stop(run_path is None, no_run())
    own = fenchel.load(run_path, dtype=torch.float32)
    _ids = torch.tensor([own.tokenizer.encode_whole("the people of the")[: own.config.context]])
    _N = parameters(own.model)
    _per_token = forward_flops(own.config, own.config.context).total / own.config.context
    with torch.no_grad():
        _before = own.model(_ids)
    _adapted = copy.deepcopy(own.model)
    own_maps = add_lora(_adapted, rank=2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _after = _adapted(_ids)
    _learnt = parameters(_adapted, only_trainable=True)
    mo.vstack(
        [
            mo.md(
                f"Your model has $N = {_N:,}$ parameters. A forward pass takes {_per_token:,.0f} operations per token, "
                f"{_per_token / _N:.2f} per parameter: the rule says 2, attention adds to it, and rows of an embedding that are "
                f"only looked up take away. Hoffmann et al. found roughly 20 tokens per parameter best at their scale; here that is a text of {20 * _N:,} tokens."
            ),
            bar_chart(
                [
                    {"what learns": "everything", "numbers": _N},
                    {"what learns": "adapters, rank 2", "numbers": _learnt},
                ],
                "what learns",
                "numbers",
                title="Numbers that learn",
            ),
            claim(
                "PD-13",
                f"Adapters of rank 2 on {len(own_maps)} maps of your model: {_learnt:,} numbers learn, "
                f"{100 * _learnt / _N:.1f} % of all, and as long as they are fresh no logit changes.",
                torch.equal(_before, _after) and 0 < _learnt < _N,
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        r"A power law is a summary of what was measured, not a law of nature: outside the range of the fit nothing is promised, "
        r"and another text, tokenizer or recipe has other constants. It speaks of the loss, not of a skill that appears or does not. "
        r"Adapters of low rank cannot make every change; retrieval helps as far as similar vectors are followed by similar tokens; and experts "
        r"save operations, not memory: all of them must be loaded."
    )
    return


@app.cell
def _(P, fit, parameters, small_model, text):
    # The cells that train stand last, so that the rest of the page appears before they are done.
    marks = (10, 20, 40, 80, 160)
    endless = text(P, 6144, 33, torch.Generator().manual_seed(0))
    unseen = text(P, 48, 32, torch.Generator().manual_seed(9))
    by_size, base = [], None
    for _seed in range(3):
        by_size.append({})
        for _width in (2, 4, 8, 16):
            _model = small_model(_width, _seed)
            by_size[-1][parameters(_model)] = fit(
                _model, endless, 160, torch.Generator().manual_seed(_seed), (P, unseen), marks
            )
        base = base or _model
    return base, by_size, endless, marks, unseen


@app.cell
def _(P, endless, fit, small_model, unseen):
    by_text = []
    for _seed in range(3):
        by_text.append({})
        for _lines in (32, 64, 128, 256):
            _gaps = fit(
                small_model(8, _seed),
                endless[:_lines],
                90,
                torch.Generator().manual_seed(_seed),
                (P, unseen),
                (30, 45, 60, 90),
            )
            # A short text is learnt by heart if training goes on; its best moment counts.
            by_text[-1][32 * _lines] = min(_gaps.values())
    return (by_text,)


@app.cell
def _():
    footer("scaling")
    return


if __name__ == "__main__":
    app.run()
