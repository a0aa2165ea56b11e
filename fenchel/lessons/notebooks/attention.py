"""Attention from similarity: scores, weights, mixtures, and the scale of the scores."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Attention from similarity",
)

with app.setup:
    import math

    import marimo as mo
    import torch

    import fenchel
    from fenchel.attention import (
        entropy,
        scale_warning,
        self_attention,
        self_attention_vjp,
        trace,
    )
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


@app.function
def matrix(rows):
    """A float64 tensor of numbers set by hand."""
    return torch.tensor(rows, dtype=torch.float64)


@app.function
def draw(*shape, seed=0):
    """Normal numbers, the same at every visit."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


@app.cell
def _():
    header("attention")
    return


@app.cell
def _():
    guess = question(
        "A *token* (a word or a piece of one) is compared with 64 others by dot products of $d$ numbers. $d$ grows "
        "from 16 to 1024, not rescaled. What happens to its weights?",
        [
            "they spread over more tokens",
            "almost all weight goes to one token",
            "nothing: softmax ignores the scale",
        ],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "almost all weight goes to one token",
        r"A sum of more terms varies more: scores spread like $\sqrt d$, and softmax turns a lead of "
        "a few points into everything. You can watch it below, in the section on the scale.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## A library: one question, many books

    How many minutes does an egg boil? Four books answer differently. Trust each by how well it fits your question, and
    average the answers.

    * Your **query** $q$: how much about kitchens, how much about the outdoors.
    * Each book has a label of the same kind, its **key** $k_i$, and an answer, its **value** $v_i$.
    * The **dot product** scores the fit, $s_i = q \cdot k_i = \sum_c q_c k_{ic}$; softmax makes shares, and they mix the values:

    $$p_i = \frac{e^{s_i}}{\sum_j e^{s_j}}, \qquad o = \sum_i p_i v_i .$$

    That is attention. *Move the sliders: no book changes, only what you look for.*
    """)
    return


@app.cell
def _():
    kitchen = mo.ui.slider(0.0, 3.0, step=0.5, value=1.0, label="About kitchens", show_value=True)
    outdoors = mo.ui.slider(
        0.0, 3.0, step=0.5, value=0.0, label="About the outdoors", show_value=True
    )
    mo.vstack([kitchen, outdoors])
    return kitchen, outdoors


@app.cell
def _(kitchen, outdoors):
    books = ["cookbook", "camping", "mountains", "poems"]
    labels = matrix([[3.0, 0.0], [1.0, 2.0], [0.0, 3.0], [0.0, 0.0]])
    minutes = matrix([[6.0], [8.0], [12.0], [1.0]])

    def ask(q):
        """The answer and the shares of the books."""
        return fenchel.attend(q, labels, minutes, scale=1.0, return_weights=True)

    blend, shares = ask(matrix([[kitchen.value, outdoors.value]]))
    _scores = [kitchen.value * a + outdoors.value * b for a, b in labels.tolist()]
    _sum = sum(math.exp(s) for s in _scores)
    _by_hand = sum(
        math.exp(s) / _sum * v for s, (v,) in zip(_scores, minutes.tolist(), strict=True)
    )
    _books = [
        {
            "book": b,
            "key (kitchens, outdoors)": f"({k[0]:g}, {k[1]:g})",
            "score": s,
            "share": w,
            "value (minutes)": v,
        }
        for b, k, s, w, (v,) in zip(
            books, labels.tolist(), _scores, shares[0].tolist(), minutes.tolist(), strict=True
        )
    ]
    _cook, _climb = (ask(matrix([q]))[0].item() for q in ([3.0, 0.0], [0.0, 3.0]))
    mo.vstack(
        [
            mo.md(f"**Your answer: {blend.item():.2f} minutes.**"),
            table(_books),
            bar_chart(_books, "book", "share", title="Shares of the books", y_range=(0, 1)),
            claim(
                "AT-01 AT-02 AT-03",
                f"Worked out number by number, scores, shares and average give {_by_hand:.4f} minutes, "
                "and so does `fenchel.attend`.",
                math.isclose(_by_hand, blend.item(), rel_tol=1e-12),
            ),
            details(
                claim(
                    "AT-11 AT-43",
                    f"A question for the kitchen alone gives {_cook:.2f} minutes, one for the outdoors alone "
                    f"{_climb:.2f}: the query says what is looked for, the keys what is on offer.",
                    abs(_cook - 6) < 0.1 and abs(_climb - 12) < 0.3,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## A room: everybody asks at once

    Put the words of a sentence into a room. Each has a question, a label and something to say, so each
    is asker and book: **self-attention**. Below, only *bank* asks: *who here has a topic?* Words with a topic say so in
    their key, and in their value whether it is water or money. A line is as thick as the weight. *Choose another word,
    another sentence; then change softmax to sparsemax: how many lines are left, and at which temperature do they come back?*
    """)
    return


@app.cell
def words_and_weights():
    topics = {"fisherman": [1.0, 0.0], "cashier": [0.0, 1.0]}

    def meet(words, choice=None):
        """Outputs and weights of the words of a sentence."""
        v = matrix([topics.get(w, [0.0, 0.0]) for w in words])
        k = matrix([[float(w in topics)] for w in words])
        q = matrix([[5.0 * (w == "bank")] for w in words])
        return fenchel.attend(q, k, v, choice=choice or fenchel.Softmax(), return_weights=True)

    sentences = [
        f"the old {who} the bank and waits".split()
        for who in ("fisherman sits on", "cashier works in")
    ]
    room = Scene(
        "words_and_weights",
        {"text": 0, "head": 0, "word": 6, "map": "softmax", "T": 1.0},
        texts=[
            {
                "name": each[2],
                "tokens": each,
                "heads": [{"name": "1", "weights": meet(each)[1].tolist()}],
            }
            for each in sentences
        ],
        causal=False,
        maps=True,
        places=all_places(
            text=range(2),
            word=range(9),
            map=["softmax", "entmax", "sparsemax"],
            T=[0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0],
        ),
    )
    room
    return meet, room, sentences, topics


@app.cell
def _(meet, room, sentences, topics):
    _maps = {
        "softmax": fenchel.Softmax,
        "entmax": lambda beta: fenchel.Entmax(1.5, beta),
        "sparsemax": fenchel.Sparsemax,
    }
    _words = sentences[room.state["text"]]
    _out, _weights = meet(_words, _maps[room.state["map"]](1 / room.state["T"]))
    _row, _asks = _weights[room.state["word"]], room.state["word"]
    _most = _row.max().item()
    _fish, _cash = (meet(each)[0][each.index("bank")] for each in sentences)
    mo.vstack(
        [
            mo.md(
                f"In *{' '.join(_words)}* the word *{_words[_asks]}* leaves as **water {_out[_asks, 0]:.2f}, money {_out[_asks, 1]:.2f}**."
            ),
            claim(
                "AT-11 AT-43",
                f"The same word gets two meanings: beside a fisherman it is {_fish[0]:.2f} water and "
                f"{_fish[1]:.2f} money, beside a cashier {_cash[0]:.2f} and {_cash[1]:.2f}.",
                _fish[0] > 0.9 and _cash[1] > 0.9 and _fish[1] == 0 and _cash[0] == 0,
            ),
            details(
                claim(
                    "AT-02 AT-03",
                    f"The shares that *{_words[_asks]}* gives sum to 1, the largest is {_most:.3f}, and what it "
                    "takes away is the average of the values by these shares.",
                    abs(_row.sum().item() - 1) < 1e-9
                    and torch.allclose(
                        _out[_asks], _row @ matrix([topics.get(w, [0.0, 0.0]) for w in _words])
                    ),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## All rows in one formula

    Write the queries below one another as the rows of a table $Q$, likewise the keys $K$ and the values $V$. One
    formula then does for all rows what the library did for one:

    $$O = \mathrm{softmax}\!\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V .$$

    $K^\top$ is $K$ with rows and columns exchanged, so entry $(i, j)$ of $Q K^\top$ is the dot product of query $i$
    with key $j$. $d_k$ is the length of a query; why its root divides, we see soon. Softmax acts on each row alone, and the product with $V$ mixes the values by the weights of that row.

    | | rows | columns |
    | --- | --- | --- |
    | $Q$ | $n$ askers | $d_k$ |
    | $K$ | $m$ that are asked | $d_k$ |
    | $V$ | $m$ | $d_v$ |
    | $O$ | $n$ | $d_v$ |

    In self-attention $n = m$. In *cross-attention* one text asks another, and they may differ.
    """)
    return


@app.cell
def _():
    Q, K, V = draw(5, 4, seed=1), draw(7, 4, seed=2), draw(7, 3, seed=3)
    _steps = trace(Q, K, V)
    _rows = []
    for _q in Q:
        _e = ((K @ _q) / 4**0.5).exp()
        _rows.append((_e / _e.sum()) @ V)
    _refused = ""
    try:
        fenchel.attend(Q, K[:, :3], V)
    except ValueError as _error:
        _refused = str(_error)
    mo.vstack(
        [
            claim(
                "AT-04 AT-37",
                "Row by row or as one product of matrices: the outputs are the same.",
                torch.allclose(torch.stack(_rows), fenchel.attend(Q, K, V), atol=1e-12),
            ),
            details(
                claim(
                    "AT-05 AT-06",
                    "5 queries and 7 keys of width 4, 7 values of width 3: an output of 5 rows and 3 columns. Widths that "
                    f"do not fit are refused: *{_refused}*",
                    fenchel.attend(Q, K, V).shape == (5, 3) and "4" in _refused and "3" in _refused,
                ),
                claim(
                    "AT-07",
                    "`trace` returns every step: compatibility $QK^\\top$, scaled scores, weights, output. Each follows "
                    "from the one before.",
                    torch.allclose(_steps.compatibility, Q @ K.T)
                    and torch.allclose(_steps.scores, _steps.compatibility / 2)
                    and torch.allclose(_steps.weights, torch.softmax(_steps.scores, -1))
                    and torch.allclose(_steps.outputs, _steps.weights @ V),
                ),
            ),
        ]
    )
    return K, Q, V


@app.cell
def _():
    mo.md(r"""
    ## Once with pencil and paper

    Two tokens, three numbers each, one token per row:

    $$Q = \begin{pmatrix} 1 & 0 & 1 \\ 0 & 1 & 1 \end{pmatrix}, \quad K = \begin{pmatrix} 1 & 1 & 0 \\ 1 & 0 & 1 \end{pmatrix}, \quad V = \begin{pmatrix} 2 & 0 & 1 \\ 1 & 1 & 0 \end{pmatrix}.$$

    Follow the steps with a calculator, then switch on the *causal mask*: token 0
    may then use only itself, token 1 both. A forbidden pair gets the score $-\infty$, and $e^{-\infty} = 0$.
    """)
    return


@app.cell
def _():
    visible = mo.ui.dropdown(["all keys", "causal mask"], value="all keys", label="Visible")
    visible
    return (visible,)


@app.cell
def _(visible):
    Q2 = matrix([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    K2 = matrix([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    V2 = matrix([[2.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    _causal = visible.value == "causal mask"
    _steps = trace(Q2, K2, V2, prior=fenchel.Causal() if _causal else None)

    def _text(rows):
        return ["\u00a0".join(f"{x:.3f}" for x in row) for row in rows.tolist()]

    _names = {
        "Q Kᵀ": _steps.compatibility,
        "divided by √3": _steps.scores,
        "mask": _steps.log_prior,
        "weights": _steps.weights,
        "output": _steps.outputs,
    }
    _plain, _masked = trace(Q2, K2, V2), trace(Q2, K2, V2, prior=fenchel.Causal())
    _e = _plain.scores.exp()

    def _digits(got, expected):
        return got.round(decimals=3).tolist() == expected

    mo.vstack(
        [
            table(
                [
                    {"step": name, "token 0": _text(x)[0], "token 1": _text(x)[1]}
                    for name, x in _names.items()
                ]
            ),
            claim(
                "AT-39 AT-41 E17 E18 PD-02",
                "Without a mask: $QK^\\top$ = [1 2; 1 1], scores [0.577 1.155; 0.577 0.577], weights "
                "[0.360 0.640; 0.5 0.5], outputs [1.360 0.640 0.360; 1.5 0.5 0.5].",
                _plain.compatibility.tolist() == [[1, 2], [1, 1]]
                and _digits(_plain.scores, [[0.577, 1.155], [0.577, 0.577]])
                and _digits(_plain.weights, [[0.360, 0.640], [0.5, 0.5]])
                and _digits(_plain.outputs, [[1.360, 0.640, 0.360], [1.5, 0.5, 0.5]]),
            ),
            details(
                claim(
                    "AT-40 AT-21 AT-22",
                    "With the causal mask token 0 keeps its own value, [2 0 1]; token 1 stays at [1.5 0.5 0.5].",
                    _digits(_masked.outputs, [[2.0, 0.0, 1.0], [1.5, 0.5, 0.5]]),
                ),
                claim(
                    "E17 E18 E19",
                    f"Round once, at the end. The first weight is {_plain.weights[0, 0]:.5f}: rounded 0.360, truncated 0.359. "
                    f"Rounding early errs too: $e^{{1.155}}$ = {math.exp(1.155):.3f}, but the exact score gives "
                    f"{_e[0, 1]:.3f}; the second row of exponentials sums to {_e[1].sum():.4f}, so 3.563.",
                    f"{_plain.weights[0, 0]:.5f}" == "0.35954"
                    and f"{math.exp(1.155):.3f}" == "3.174"
                    and f"{_e[0, 1]:.3f}" == "3.173"
                    and f"{_e[1].sum():.4f}" == "3.5626",
                ),
            ),
        ]
    )
    return K2, Q2, V2


@app.cell
def _():
    mo.md(r"""
    ## Why divide by $\sqrt{d_k}$?

    Toss a coin 100 times: heads one step right, tails one step left. You end about 10 steps away, not
    100 and not 0. Ten thousand tosses: about 100 steps. A sum of $d$ random terms has the size $\sqrt d$.

    A dot product of two unrelated vectors is such a sum of $d_k$ terms. So longer vectors have larger scores,
    without being more alike. Softmax sees differences: a spread of 1 is a mild preference, a spread of 32
    gives one token everything. Dividing by $\sqrt{d_k}$ makes the spread the same for every width.

    How even are the weights? The **entropy** $-\sum_i p_i \log p_i$ measures it, in nats: 0 if one token has
    everything, $\log 64 = 4.16$ if 64 tokens share evenly.
    """)
    return


@app.cell
def _():
    d_k = mo.ui.slider(
        steps=[4, 16, 64, 256, 1024], value=64, label="Width $d_k$ of a query", show_value=True
    )
    d_k
    return (d_k,)


@app.cell
def _():
    measured = []
    first_row = {}
    for _d in (4, 16, 64, 256, 1024):
        _q, _k = draw(2, 16, 64, _d)
        for _name, _scale in (("unscaled", 1.0), ("scaled", _d**-0.5)):
            _p = fenchel.attend(_q, _k, _k, scale=_scale, return_weights=True)[1]
            first_row[_d, _name] = _p[0, 0].sort(descending=True).values[:8].tolist()
            measured.append(
                {
                    "width": _d,
                    "scores": _name,
                    "entropy (nats)": entropy(_p).mean().item(),
                    "largest weight": _p.amax(-1).mean().item(),
                    "slope": fenchel.Softmax().sensitivity(_p).median().item(),
                }
            )
    return first_row, measured


@app.cell
def _(d_k, first_row, measured):
    _here = {row["scores"]: row for row in measured if row["width"] == d_k.value}
    mo.vstack(
        [
            bar_chart(
                [
                    {"rank": str(i + 1), "weight": w, "scores": name}
                    for name in ("unscaled", "scaled")
                    for i, w in enumerate(first_row[d_k.value, name])
                ],
                "rank",
                "weight",
                "scores",
                title=f"The eight largest of 64 weights at width {d_k.value}",
                y_range=(0, 1),
            ),
            mo.md(
                f"Unscaled, the largest weight is on average **{_here['unscaled']['largest weight']:.2f}** "
                f"and the entropy {_here['unscaled']['entropy (nats)']:.2f}; scaled, "
                f"**{_here['scaled']['largest weight']:.2f}** and {_here['scaled']['entropy (nats)']:.2f}."
            ),
        ]
    )
    return


@app.cell
def _(measured):
    _at = {(row["width"], row["scores"]): row for row in measured}
    _widths = (4, 16, 64, 256, 1024)
    _free = [_at[d, "unscaled"]["entropy (nats)"] for d in _widths]
    _held = [_at[d, "scaled"]["entropy (nats)"] for d in _widths]
    _slope = {key: row["slope"] for key, row in _at.items()}
    _alike = draw(6, 3)
    _even = fenchel.attend(_alike, _alike, _alike, scale=0.0)
    mo.vstack(
        [
            line_chart(
                measured,
                "width",
                "entropy (nats)",
                "scores",
                title="Entropy against the width",
                log_x=True,
                points=True,
            ),
            claim(
                "AT-19",
                f"64 tokens, width 64: entropy {_free[2]:.2f} unscaled and {_held[2]:.2f} scaled, of at most "
                f"{math.log(64):.2f}. Unscaled it falls with every width; scaled it stays.",
                abs(_free[2] - 0.55) < 0.03
                and abs(_held[2] - 3.68) < 0.03
                and _free == sorted(_free, reverse=True)
                and max(_held) - min(_held) < 0.1,
            ),
            claim(
                "E81",
                "This is called *attention collapse*: too **low** entropy. The other extreme is a failure too: with equal "
                "weights every token gets the same output, and the tokens cannot be told apart.",
                _free[-1] < 0.2 and torch.allclose(_even, _even[:1].expand_as(_even)),
            ),
            details(
                claim(
                    "E32",
                    "Does learning stop? Only late. How strongly do the weights react to a small change of the scores "
                    "(median over rows of the strongest reaction)? At first *more* without scaling: "
                    f"{_slope[16, 'unscaled']:.2f} against {_slope[16, 'scaled']:.2f} at width 16, {_slope[64, 'unscaled']:.2f} "
                    f"against {_slope[64, 'scaled']:.2f} at 64. Then the reaction vanishes: {_slope[256, 'unscaled']:.3f} at 256, "
                    f"{_slope[1024, 'unscaled']:.4f} at 1024. Watch entropy and the largest weight, not the gradient.",
                    all(_slope[d, "unscaled"] > 1.5 * _slope[d, "scaled"] for d in (16, 64))
                    and _slope[256, "unscaled"] < 0.5 * _slope[256, "scaled"]
                    and _slope[1024, "unscaled"] < 0.01 * _slope[1024, "scaled"],
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    _q, _k = 1.5 * draw(2, 100_000, 64)
    _centred = (_q * _k).sum(-1).var().item()
    _shifted = ((_q + 1) * (_k + 1)).sum(-1).var().item()
    _rule = 64 * (1.5**4 + 2 * 1.5**2)
    mo.vstack(
        [
            details(
                claim(
                    "AT-17",
                    r"The *variance* is the mean squared distance from the mean. Entries independent, with mean 0 and "
                    r"variance $\sigma^2$: one score has the variance $d_k \sigma^4$. For "
                    rf"$\sigma = 1.5$, $d_k = 64$ that is 324; 100,000 pairs give {_centred:.1f}. After division by "
                    rf"$\sqrt{{d_k}}$ it is $\sigma^4$ = {1.5**4:.2f}, and the sample has {_centred / 64:.2f}.",
                    64 * 1.5**4 == 324 and abs(_centred / 324 - 1) < 0.02,
                ),
                claim(
                    "AT-18 E31",
                    r"The mean must be zero. With means $\mu$ the variance is "
                    r"$d_k(\sigma_q^2 \sigma_k^2 + \sigma_q^2 \mu_k^2 + \sigma_k^2 \mu_q^2)$: with all means 1 it is "
                    rf"{_rule:g}, not 324 (measured {_shifted:.0f}). And $\sigma^2$ is the variance; $\sigma$ is its root, the "
                    "standard deviation.",
                    _rule == 612 and abs(_shifted / 612 - 1) < 0.02 and _shifted > 1.5 * 324,
                ),
            ),
            proof(
                school=r"""
                    Let each of the $d$ terms be $+1$ or $-1$, with equal chance and independently. Square the sum:
                    $(x_1 + \dots + x_d)^2$ has $d$ squares, each equal to 1, and many mixed products $x_i x_j$. A mixed
                    product is $+1$ as often as $-1$, so on average it adds nothing. The average square of the sum is $d$, and
                    its typical size is $\sqrt d$. Divide by $\sqrt d$ and the typical size is 1, whatever $d$ is.
                    If the terms lean to one side, the mixed products no longer cancel: that is why the mean must be 0.""",
                undergraduate=r"""
                    $q \cdot k = \sum_c q_c k_c$ is a sum of $d_k$ independent terms, so variances add. For one term,
                    $\mathrm{Var}(q k) = E[q^2]E[k^2] - \mu_q^2 \mu_k^2
                    = (\sigma_q^2 + \mu_q^2)(\sigma_k^2 + \mu_k^2) - \mu_q^2\mu_k^2$, which is
                    $\sigma_q^2\sigma_k^2 + \sigma_q^2\mu_k^2 + \sigma_k^2\mu_q^2$. It is the variance of **one** entry of
                    $QK^\top$, over random queries and keys. Entries of a row share their query and are not independent.
                    Given $q$ they are, with variance $|q|^2\sigma_k^2$.""",
                research=r"""
                    The argument is about initialisation (Vaswani et al. 2017). After training $q$ and $k$ are correlated,
                    $q \cdot k$ can grow like $d_k$, and $\mu$P uses $1/d_k$ for that reason (Yang, Hu, Babuschkin et al. 2021). Growth of
                    the largest logit and loss of entropy precede instability (Zhai et al. 2023); normalised queries and
                    keys bound it. The opposite limit, repeated averaging, loses rank doubly exponentially with depth
                    without skip connections (Dong, Cordonnier and Loukas 2021).""",
            ),
        ]
    )
    return


@app.cell
def _():
    settings = {
        "as it should be": {},
        "nothing divides": {"scale": 1.0},
        "√512, the width of the model": {"scale": 512**-0.5},
        "1/√64 as scale and as β": {"choice": fenchel.Softmax(beta=64**-0.5)},
        "temperature 2 twice": {"scale": 0.5 / 8, "choice": fenchel.Softmax(beta=0.5)},
    }
    _q, _k = draw(2, 1, 8, 64, 64)
    found = {name: scale_warning(_q, _k, **spec) for name, spec in settings.items()}
    spread_out = {
        name: entropy(fenchel.attend(_q, _k, _k, **spec, return_weights=True)[1]).mean().item()
        for name, spec in settings.items()
    }
    _small = draw(3, 1, 1, 5, 64, seed=4)
    _usual = fenchel.attend(*_small)
    _T = 64**0.5
    _other = [
        fenchel.attend(*_small, scale=1.0, choice=fenchel.Softmax(beta=1 / _T)),
        torch.softmax(_small[0] @ _small[1].mT / _T, -1) @ _small[2],
        fenchel.attend(*_small, scale=1 / _T, choice=fenchel.Softmax(beta=1.0)),
    ]
    details(
        mo.md(r"""
        The factor in front of the scores has many names: $1/\sqrt{d_k}$, inverse temperature $\beta$, $1/T$, $1/\tau$,
        $\lambda$. They are one knob. If two places in the code both turn it, it is turned twice, and no error is raised. A
        detector of the library reads the numbers and the weights:
        """),
        table(
            [
                {
                    "setting": name,
                    "entropy (nats)": spread_out[name],
                    "the detector says": found[name] or "nothing wrong",
                }
                for name in settings
            ]
        ),
        claim(
            "AT-20",
            "A missing factor and the width of the model in place of that of a head are both found; the right "
            "setting is left alone.",
            found["as it should be"] is None
            and "missing" in str(found["nothing divides"])
            and "d_model" in str(list(found.values())[2]),
        ),
        claim(
            "SM-12",
            f"A factor applied twice is found in both forms. The weights become too even: entropy "
            f"{list(spread_out.values())[3]:.2f} instead of {spread_out['as it should be']:.2f}.",
            all("twice" in str(list(found.values())[i]) for i in (3, 4))
            and list(spread_out.values())[3] > spread_out["as it should be"] + 0.3,
        ),
        claim(
            "E103",
            r"Standard attention is $\beta = 1/\sqrt{d_k}$ with no other temperature: three spellings of it agree.",
            all(torch.allclose(o, _usual, atol=1e-12) for o in _other),
        ),
        title="One knob, many names",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Where queries, keys and values come from

    A token arrives as a row $x$ of $d$ numbers, its *hidden state*. Three tables of learned numbers turn it into
    three roles, as one person can be described by what they seek, what they offer and what they
    say:

    $$Q = X W_Q, \qquad K = X W_K, \qquad V = X W_V .$$

    $X$ has one row per token; $W_Q$ and $W_K$ have $d$ rows and $d_k$ columns, usually $d_k < d$. The scores
    depend on $X$ and on *one* table $A$:

    $$P = X A X^\top, \qquad A = \frac{W_Q W_K^\top}{\sqrt{d_k}},$$

    $$\mathrm{Att}(X) = \mathrm{softmax}(P)\, X W_V .$$
    """)
    return


@app.cell
def _():
    details(
        mo.md(
            r"Written for one token as a column $h$, the query is $q = W_Q^\top h$: only the convention differs, rows or columns."
        ),
        title="Rows or columns",
    )
    return


@app.cell
def _():
    X, W_Q, W_K, W_V = draw(5, 4), draw(4, 3, seed=1), draw(4, 3, seed=2), draw(4, 4, seed=3)
    att = self_attention(X, W_Q, W_K, W_V)
    _A = W_Q @ W_K.T / 3**0.5
    _short = torch.softmax(X @ _A @ X.T, -1) @ X @ W_V
    _wrong = torch.softmax(X @ (W_Q @ W_K.T / 4**0.5) @ X.T, -1) @ X @ W_V
    _P = X @ _A @ X.T
    _unit = torch.eye(5, dtype=torch.float64)
    _by_row = torch.stack([torch.softmax(_P.T @ _unit[i], 0) @ X @ W_V for i in range(5)])
    _per_token = []
    for _t in range(5):
        _q, _ks, _vs = W_Q.T @ X[_t], [W_K.T @ h for h in X], [W_V.T @ h for h in X]
        _w = torch.softmax(torch.stack([_q @ k / 3**0.5 for k in _ks]), 0)
        _per_token.append(sum(w * v for w, v in zip(_w, _vs, strict=True)))
    _order = torch.tensor([3, 0, 4, 1, 2])
    _narrow = draw(4, 2, seed=5)
    _W_O = draw(2, 4, seed=6)
    _refused = False
    try:
        X + self_attention(X, W_Q, W_K, _narrow)
    except RuntimeError:
        _refused = True
    mo.vstack(
        [
            claim(
                "AT-35",
                "Exchange the tokens and the outputs are exchanged in the same way, nothing else: attention alone "
                "carries no information about the order of words. ([Positions](../positions/) change that.)",
                torch.allclose(self_attention(X[_order], W_Q, W_K, W_V), att[_order], atol=1e-12),
            ),
            details(
                claim(
                    "AT-13 AT-14 E09",
                    rf"Both forms agree to {(att - _short).abs().max():.0e}. The root belongs to $d_k = 3$, the width of a query; "
                    rf"with the width of the stream, $d = 4$, the outputs are off by {(att - _wrong).abs().max():.2f}.",
                    torch.allclose(att, _short, atol=1e-12) and (att - _wrong).abs().max() > 0.01,
                ),
                claim(
                    "AT-15 AT-16",
                    r"Row $i$ alone is $\mathrm{softmax}(P^\top e_i)^\top X W_V$, where $e_i$ picks row $i$. Without the root, "
                    r"$X W_Q W_K^\top X^\top$ is just $Q K^\top$.",
                    torch.allclose(_by_row, att, atol=1e-12)
                    and torch.allclose(X @ W_Q @ W_K.T @ X.T, (X @ W_Q) @ (X @ W_K).T),
                ),
                claim(
                    "AT-08 AT-37 E103",
                    "Token by token, with columns $k_i = W_K^\\top h_i$ in place of rows, the result is the same.",
                    torch.allclose(torch.stack(_per_token), att, atol=1e-12),
                ),
                claim(
                    "AT-09 E99",
                    r"The token keeps what it had: $h_\text{new} = h + O$, a *residual connection*. That needs outputs as "
                    r"wide as $h$: values of width 2 cannot be added to 4 numbers, until an output table $W_O$ (2 x 4) widens them.",
                    _refused
                    and (X + self_attention(X, W_Q, W_K, _narrow) @ _W_O).shape == X.shape
                    and (X + att).shape == X.shape,
                ),
            ),
            proof(
                school=r"""
                    Why does the order not matter? Each output is a sum over all tokens of share times value. A sum does not
                    change when its terms change places, and the share of a token depends on what it is, not on where
                    it stands. So if two words swap seats, their outputs swap seats, and no other output changes.""",
                undergraduate=r"""
                    For a permutation matrix $\Pi$: $P(\Pi X) = \Pi P \Pi^\top$. Softmax of rows commutes with permuting rows and
                    columns, so $\mathrm{Att}(\Pi X) = \Pi\,\mathrm{softmax}(P)\,\Pi^\top \Pi X W_V = \Pi\,\mathrm{Att}(X)$, since
                    $\Pi^\top\Pi = I$.""",
                research=r"""
                    The map is defined on point clouds, and extends to measures:
                    $x \mapsto \int e^{x A y^\top} y W_V\,d\mu(y) / \int e^{x A y^\top}\,d\mu(y)$, which is how mean-field limits of
                    transformers are set up. A causal mask breaks the symmetry, so decoders can infer positions without being
                    given any. Only $A$, of rank at most $d_k$, enters the scores: $W_Q$ and $W_K$ have a
                    $GL(d_k)$ gauge freedom, which [score descent](../score_descent/) uses.""",
            ),
        ]
    )
    return W_K, W_Q, W_V, X


@app.cell
def _():
    mo.md(r"""
    ## Searching, softly

    A search engine returns the entry whose key has the largest dot product with the query: *maximum inner product
    search*. Attention averages over all entries instead. With a larger $\beta$ (a lower temperature) the average leans
    to the best one.
    """)
    return


@app.cell
def _():
    beta = mo.ui.slider(
        steps=[0.0, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0],
        value=1.0,
        label=r"$\beta$",
        show_value=True,
    )
    beta
    return (beta,)


@app.cell
def _(beta):
    found_scores = matrix([1.0, 2.0, 1.9])

    def _weights(b):
        return fenchel.Softmax(beta=b).weights(found_scores)

    _top = [_weights(b).max().item() for b in (1.0, 10.0, 100.0, 1000.0)]
    _here = torch.softmax(beta.value * found_scores, 0)
    _q, _k, _v = draw(1, 4, seed=12), draw(9, 4, seed=13), draw(9, 2, seed=14)
    _best = _v[(_q @ _k.T).argmax()]
    _sharp = fenchel.attend(_q, _k, _v, choice=fenchel.Softmax(beta=1e4))[0]
    mo.vstack(
        [
            bar_chart(
                [
                    {"score of the entry": str(s), "weight": w}
                    for s, w in zip(found_scores.tolist(), _here.tolist(), strict=True)
                ],
                "score of the entry",
                "weight",
                title=f"Weights at β = {beta.value:g}",
                y_range=(0, 1),
            ),
            details(
                claim(
                    "AT-36 E44",
                    "Scores 1, 2 and 1.9: the best has the weight "
                    f"{_top[0]:.2f} at $\\beta = 1$, {_top[1]:.2f} at 10, {_top[2]:.5f} at 100, {_top[3]:g} at 1000. Attention is a *soft* "
                    "search; it returns the best entry only as $\\beta$ grows without end.",
                    [round(_top[0], 2), round(_top[1], 2), round(_top[2], 5), round(_top[3], 6)]
                    == [0.44, 0.73, 0.99995, 1.0]
                    and torch.allclose(_sharp, _best, atol=1e-9)
                    and not torch.allclose(fenchel.attend(_q, _k, _v)[0], _best, atol=1e-2),
                ),
            ),
        ]
    )
    return


@app.cell
def _(W_K, W_Q, W_V, X):
    _R = draw(5, 4, seed=30)
    _back = self_attention_vjp(X, W_Q, W_K, W_V, _R)
    _leaves = [t.clone().requires_grad_() for t in (X, W_Q, W_K, W_V)]
    _auto = torch.autograd.grad((_R * self_attention(*_leaves)).sum(), _leaves)
    details(
        mo.md(
            "To learn, every number in every table needs a slope: how much does the "
            "loss change if this number changes? The table of these slopes is the *gradient*. Which shape "
            "has it? Say it before you read on."
        ),
        table(
            [
                {
                    "of": name,
                    "shape": " x ".join(map(str, t.shape)),
                    "gradient": " x ".join(map(str, g.shape)),
                }
                for name, t, g in zip(
                    ("X", "W_Q", "W_K", "W_V"), (X, W_Q, W_K, W_V), _back, strict=True
                )
            ]
        ),
        claim(
            "DV-22 E82",
            r"Each gradient has the shape of its table: $G_V$ that of $V$, and so on.",
            all(
                g.shape == t.shape and torch.allclose(g, a, atol=1e-10)
                for g, t, a in zip(_back, (X, W_Q, W_K, W_V), _auto, strict=True)
            ),
        ),
        title="Check your understanding",
    )
    return


@app.cell
def _(K2, Q2, V2):
    def check(names):
        attention = names["attention"]
        o = attention(Q2, K2, V2)
        assert torch.is_tensor(o), "Return a tensor."
        assert o.shape == V2.shape, f"The output has one row per query: expected {tuple(V2.shape)}."
        for scale in (1.0, 3**-0.5):
            assert not torch.allclose(o, torch.softmax(scale * Q2 @ K2.T, 0) @ V2), (
                "The weights of each query must sum to 1: softmax runs along a row, the last axis."
            )
        assert not torch.allclose(o, fenchel.attend(Q2, K2, V2, scale=1.0)), (
            "Divide the scores by the root of d_k, the number of columns of Q."
        )
        for n, m, d, e in ((2, 2, 3, 3), (7, 4, 5, 2), (3, 9, 16, 4)):
            q, k, v = draw(n, d, seed=40), draw(m, d, seed=41), draw(m, e, seed=42)
            assert torch.allclose(attention(q, k, v), fenchel.attend(q, k, v)), (
                f"It differs for {n} queries and {m} keys of width {d}: is the root taken of d_k = {d}?"
            )

    exercise = Exercise(
        lesson="attention",
        task="Mend `attention(Q, K, V)`: all rows of the formula at once. The starter has two mistakes: one in the scores, one in the "
        "direction in which the weights sum to 1.",
        starter="""
    def attention(Q, K, V):
        scores = Q @ K.T
        return torch.softmax(scores, 0) @ V
    """,
        solution="""
    def attention(Q, K, V):
        scores = Q @ K.T / Q.shape[1] ** 0.5
        return torch.softmax(scores, -1) @ V
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
    own_text = text_field("we the people of the united states, in order to form a")
    own_text
    return (own_text,)


@app.cell
def _(own_text, run_path):
    mo.stop(run_path is None, no_run())
    own = fenchel.load(run_path, dtype=torch.float32)
    _ids = torch.tensor([token_ids(own_text.value, own.tokenizer, min(24, own.config.context))])
    _calls = {}

    def _observe(layer, q, k, v):
        _calls[layer] = own.model.attention_call(layer, q, k, v)

    with torch.no_grad():
        own.model(_ids, observe=_observe)
    _rows = []
    for _layer, _call in _calls.items():
        _even = {}
        for _name, _spec in (("as trained", {}), ("not divided", {"scale": 1.0})):
            _, _p = fenchel.attend(
                _call.q, _call.k, _call.v, **{**_call.spec, **_spec}, return_weights=True
            )
            _even[_name] = entropy(_p.double())[0].mean(-1).tolist()
        _rows += [
            {"head": f"{_layer + 1}.{_head}", "entropy (nats)": h, "scores": name}
            for name, values in _even.items()
            for _head, h in enumerate(values, 1)
        ]
    _free = [row["entropy (nats)"] for row in _rows if row["scores"] == "not divided"]
    _held = [row["entropy (nats)"] for row in _rows if row["scores"] == "as trained"]
    mo.vstack(
        [
            mo.md(
                f"The model has {own.config.layers} layers of {own.config.heads} heads, each of width $d_k = {own.config.head_width}$ (0.1 is the second head of "
                f"the first layer). It reads {_ids.shape[1]} tokens. What if nobody divided its scores by $\\sqrt{{d_k}}$?"
            ),
            bar_chart(
                _rows,
                "head",
                "entropy (nats)",
                "scores",
                title="How evenly the heads attend",
                y_range=(0, 3),
            ),
            claim(
                "AT-19 AT-02",
                "In every head the weights become less even, on average over the heads "
                f"{sum(_free) / len(_free):.2f} instead of {sum(_held) / len(_held):.2f} nats. The [whole model](/model) shows every weight, "
                "for a text of your own.",
                all(a <= b + 1e-6 for a, b in zip(_free, _held, strict=True)),
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        r"The rule $1/\sqrt{d_k}$ assumes queries and keys with independent entries and mean 0, as before training. After training "
        "they are related on purpose, and scores can grow again: watch the entropy. The symmetry under "
        "exchange of tokens ends with the first mask or position."
    )
    return


@app.cell
def _():
    footer("attention")
    return


if __name__ == "__main__":
    app.run()
