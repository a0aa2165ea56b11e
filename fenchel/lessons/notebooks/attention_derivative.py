"""The derivative of attention: forward, backward, checked by differences, with its neighbours."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="The derivative of attention",
)

with app.setup:
    import math
    from itertools import product

    import marimo as mo
    import torch
    from torch.autograd.functional import jvp
    from torch.nn import functional

    import fenchel
    from fenchel.attention import attend_vjp, self_attention, self_attention_vjp
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
        text_field,
        token_ids,
        what_breaks,
        words_and_weights,
    )
    from fenchel.sensitivity import remainder
    from fenchel.sensitivity.layers import ActivationLayer, NormLayer


@app.function
def matrix(rows):
    """A float64 tensor of numbers set by hand."""
    return torch.tensor(rows, dtype=torch.float64)


@app.function
def draw(*shape, seed=0):
    """Normal numbers, the same at every visit."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


@app.function
def rows_as_text(m):
    """One string per row, which does not break."""
    return ["\u00a0".join(f"{round(x, 4) + 0.0:g}" for x in row) for row in m.tolist()]


@app.cell
def _():
    header("attention_derivative")
    return


@app.cell
def _():
    guess = question(
        "Two tokens, three numbers each, one loss. The gradient of the keys is a table of two rows and three columns: how "
        "does the loss change if a number of a key changes? What do you know about its rows before computing anything?",
        [
            "they are equal",
            "the second is minus the first",
            "nothing",
        ],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "the second is minus the first",
        "Moving both keys by the same amount adds the same number to the scores of a query, and softmax does not notice. So the "
        "two rows must cancel. With more keys, the rows sum to zero.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Two reasons why the output moves

    At a mixing desk, what you hear changes for two reasons: somebody moves the faders, or a singer sings differently.
    Attention is such a desk. Its faders are the weights $p$, its singers the values $v$, and the output is the mix $o = p\,v$.

    Nudge the input a little, by $dq, dk, dv$. The letter $d$ marks a small change. Then

    $$dz = \frac{dq\,k^\top + q\,dk^\top}{\sqrt{d_k}},$$

    $$do = \underbrace{(J\,dz)\,v}_{\text{faders}} + \underbrace{p\,dv}_{\text{singers}} .$$

    $z = q k^\top/\sqrt{d_k}$ are the scores. $J$ says how weights react to scores: more to one means less to the others,
    $J = \mathrm{diag}(p) - p\,p^\top$ for each row ([softmax](../softmax/); $\mathrm{diag}(p)$ is the table with $p$ on its diagonal and zeros elsewhere, $p\,p^\top$
    the table of all products $p_i p_j$). A product of two things that both move changes by *first moved times second* plus
    *first times second moved*; that is all that happens here, twice. The tiny product of the two changes is left out.

    How good is it? Choose what is nudged, and how far. The prediction is the formula; the truth is attention computed again.
    """)
    return


@app.cell
def _():
    nudged = mo.ui.dropdown(
        ["everything", "queries", "keys", "values"], value="everything", label="Nudge"
    )
    size = mo.ui.slider(
        steps=[0.01, 0.03, 0.1, 0.3, 1.0, 3.0], value=0.3, label="Size $h$", show_value=True
    )
    mo.vstack([nudged, size])
    return nudged, size


@app.cell
def _():
    q, k, v = draw(1, 3, seed=22), draw(4, 3, seed=23), draw(4, 2, seed=24)
    dq, dk, dv = draw(1, 3, seed=25), draw(4, 3, seed=26), draw(4, 2, seed=27)
    return dk, dq, dv, k, q, v


@app.cell
def _(dk, dq, dv, k, nudged, q, size, v):
    _on = nudged.value
    _moves = tuple(
        size.value * move if _on in (name, "everything") else None
        for name, move in (("queries", dq), ("keys", dk), ("values", dv))
    )
    _after = [x if m is None else x + m for x, m in zip((q, k, v), _moves, strict=True)]
    _truth = (fenchel.attend(*_after) - fenchel.attend(q, k, v))[0]
    move = fenchel.attend_jvp((q, k, v), _moves)
    _auto = jvp(
        lambda *x: fenchel.attend(*x, backend="reference"),
        (q, k, v),
        tuple(
            torch.zeros_like(x) if m is None else m for x, m in zip((q, k, v), _moves, strict=True)
        ),
    )[1]
    _apart = (move.total[0] - _truth).norm() / _truth.norm()
    mo.vstack(
        [
            bar_chart(
                [
                    {"entry of the output": str(i), "change / h": x / size.value, "by": name}
                    for name, part in (
                        ("truth", _truth),
                        ("faders", move.choosing[0]),
                        ("singers", move.values[0]),
                        ("prediction", move.total[0]),
                    )
                    for i, x in enumerate(part.tolist())
                ],
                "entry of the output",
                "change / h",
                "by",
                title=f"Change of the output per unit of nudge: {_on}, h = {size.value:g}",
                y_range=(-0.5, 2.5),
            ),
            mo.md(f"Prediction and truth differ by **{100 * _apart:.1f} %** of the change."),
            claim(
                "DV-24",
                "The prediction, faders plus singers, is the derivative that automatic differentiation finds in this direction.",
                torch.allclose(move.total, _auto, atol=1e-12),
            ),
            details(
                claim(
                    "DV-24",
                    "Values alone are predicted exactly, however far they move: the mix is a sum of shares times values, and the "
                    "shares stay. Only the faders bend.",
                    torch.allclose(
                        fenchel.attend_jvp((q, k, v), (None, None, 3.0 * dv)).total,
                        fenchel.attend(q, k, v + 3.0 * dv) - fenchel.attend(q, k, v),
                        atol=1e-12,
                    ),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## How to recognise a correct derivative

    Halve the nudge. A correct prediction leaves an error that is a *quarter*: what was left out is a product of two small
    changes. A wrong prediction leaves an error that is a *half*: it is wrong by a fixed share of the change. Drawn with
    both axes in powers of ten, the first is a line of slope 2, the second a line of slope 1. The test needs no second formula.

    We use it on a loss $L$, one number, as a function of the table $S$ of all scores. $G$ is its **gradient**, the table of its slopes:

    $$L(S + dS) = L(S) + \langle G, dS \rangle + \text{a remainder},$$

    where $\langle G, dS\rangle$ multiplies entry by entry and adds up.
    """)
    return


@app.cell
def _():
    S, direction, _V, _R = (
        draw(4, 6, seed=7),
        draw(4, 6, seed=8),
        draw(6, 3, seed=9),
        draw(4, 3, seed=10),
    )

    def loss_of(scores):
        return (_R * (torch.softmax(scores, -1) @ _V)).sum().reshape(1)

    _P = torch.softmax(S, -1)
    G = fenchel.Softmax().jacobian_product(_P, _R @ _V.T)
    right = remainder(loss_of, S, direction)
    _forgot = _R @ _V.T  # the gradient of the weights, as if softmax were not there
    _before = loss_of(S)
    _h = right.h
    _wrong, _own = (
        torch.stack(
            [
                (loss_of(S + h * direction) - _before - h * (g * direction).sum()).abs()[0]
                for h in _h
            ]
        )
        for g in (_forgot, G)
    )
    _slope = (_wrong[3] / _wrong[7]).log2().item() / 4
    _quarter = (_own[4:8] / _own[5:9]).tolist()
    mo.vstack(
        [
            line_chart(
                [
                    {"nudge h": h, "error": e, "gradient": name}
                    for name, errors in (("right", _own), ("softmax forgotten", _wrong))
                    for h, e in zip(_h.tolist(), errors.tolist(), strict=True)
                ],
                "nudge h",
                "error",
                "gradient",
                title="Error of the first-order prediction",
                log_x=True,
                log_y=True,
                points=True,
            ),
            claim(
                "DV-29",
                f"The remainder falls with slope {right.slope:.3f}, and a wrong gradient with slope {_slope:.3f}. Halving the nudge "
                f"divides the right error by {_quarter[0]:.2f}, {_quarter[1]:.2f}, {_quarter[2]:.2f}: towards 4.",
                abs(right.slope - 2) < 0.05
                and abs(_slope - 1) < 0.05
                and torch.allclose(_own, right.error, rtol=1e-3, atol=1e-12)
                and all(abs(x - 4) < 0.3 for x in _quarter),
            ),
            details(
                claim(
                    "DV-28",
                    f"Each row of $G$ sums to zero (largest sum {G.sum(-1).abs().max():.0e}): raising all scores of a query alike "
                    "changes nothing. The gradient that forgets softmax lacks this.",
                    G.sum(-1).abs().max() < 1e-12 and _forgot.sum(-1).abs().max() > 0.1,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## The other direction: who is to blame?

    Training asks backwards. The loss is too high: which of a million numbers should change, and by how much?
    Think of a bill. The loss sends a bill to the output, the output passes it on to weights and values, the weights to the
    scores, the scores to queries and keys. Each step divides its bill by one rule: *slopes multiply along a path and add
    where paths meet*.

    $G_O$ is the bill that arrives at the outputs, one number per entry. Then, step by step backwards:

    $$G_V = P^\top G_O, \qquad G_P = G_O V^\top,$$

    $$G_S = P * (G_P - m), \qquad m_r = \textstyle\sum_j P_{rj} G_{P,rj},$$

    $$G_Q = \frac{G_S K}{\sqrt{d_k}}, \qquad G_K = \frac{G_S^\top Q}{\sqrt{d_k}} .$$

    $P$ are the weights, and $*$ multiplies entry by entry. The middle line is $J$ again, applied to each row $r$: a key pays for being
    better or worse than the average $m_r$.
    """)
    return


@app.cell
def _():
    bills = {
        "the example: 1 0 1 and 0 1 0": [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]],
        "only token 0: 1 0 1": [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]],
        "only token 1: 0 1 0": [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]],
    }
    bill = mo.ui.dropdown(bills, value="the example: 1 0 1 and 0 1 0", label="$G_O$")
    bill
    return (bill,)


@app.cell
def _(bill):
    Q2 = matrix([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    K2 = matrix([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    V2 = matrix([[2.0, 0.0, 1.0], [1.0, 1.0, 0.0]])

    def by_hand(Q, K, V, G_O):
        """The five steps, without any library function but softmax."""
        c = Q.shape[-1] ** -0.5
        P = torch.softmax(c * Q @ K.T, -1)
        G_V, G_P = P.T @ G_O, G_O @ V.T
        G_S = P * (G_P - (P * G_P).sum(-1, keepdim=True))
        return {"G_V": G_V, "G_P": G_P, "G_S": G_S, "G_Q": c * G_S @ K, "G_K": c * G_S.T @ Q}

    G_O = matrix(bill.value)
    _now = by_hand(Q2, K2, V2, G_O)
    _lib = attend_vjp((Q2, K2, V2), G_O)
    _leaves = [x.clone().requires_grad_() for x in (Q2, K2, V2)]
    _auto = torch.autograd.grad((G_O * fenchel.attend(*_leaves)).sum(), _leaves)
    _J = [torch.diag(p) - torch.outer(p, p) for p in torch.softmax(Q2 @ K2.T / 3**0.5, -1)]
    mo.vstack(
        [
            table(
                [
                    {"step": name, "row 0": rows_as_text(x)[0], "row 1": rows_as_text(x)[1]}
                    for name, x in _now.items()
                ]
            ),
            claim(
                "DV-18",
                "By hand, by `attend_vjp` and by automatic differentiation: the same numbers, "
                f"to {max((a - _now[n]).abs().max().item() for a, n in zip(_auto, ('G_Q', 'G_K', 'G_V'), strict=True)):.0e}. "
                r"The middle step is $(\mathrm{diag}(p) - p p^\top)\, G_{P,r}$ for each row.",
                all(
                    torch.allclose(a, _now[n], atol=1e-12)
                    and torch.allclose(b, _now[n], atol=1e-12)
                    for a, b, n in zip(
                        _auto, (_lib.q, _lib.k, _lib.v), ("G_Q", "G_K", "G_V"), strict=True
                    )
                )
                and torch.allclose(_lib.weights, _now["G_P"], atol=1e-12)
                and torch.allclose(
                    torch.stack([J @ g for J, g in zip(_J, _now["G_P"], strict=True)]),
                    _now["G_S"],
                    atol=1e-12,
                ),
            ),
            claim(
                "DV-28",
                "Whatever bill arrives, the rows of $G_S$ sum to zero, and so the rows of $G_K$ cancel: with two keys, the second is "
                "minus the first.",
                _now["G_S"].sum(-1).abs().max() < 1e-12
                and torch.allclose(_now["G_K"][1], -_now["G_K"][0], atol=1e-12),
            ),
        ]
    )
    return K2, Q2, V2, by_hand


@app.cell
def _(K2, Q2, V2, by_hand):
    _x = by_hand(Q2, K2, V2, matrix([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]))

    def _digits(name, digits):
        return (_x[name].round(decimals=digits) + 0.0).tolist()

    mo.vstack(
        [
            details(
                claim(
                    "DV-19 E20",
                    f"Check the example with a calculator. $G_V$ = [0.360 0.5 0.360; 0.640 0.5 0.640]: the first weight is "
                    f"{_x['G_V'][0, 0]:.5f}, which rounds to 0.360.",
                    _digits("G_V", 3) == [[0.360, 0.5, 0.360], [0.640, 0.5, 0.640]]
                    and f"{_x['G_V'][0, 0]:.4f} {_x['G_V'][1, 0]:.4f}" == "0.3595 0.6405",
                ),
                claim(
                    "DV-20",
                    "$G_P$ = [3 1; 0 1], $G_S$ = [0.4605 -0.4605; -0.25 0.25], $G_Q$ = [0 0.2659 -0.2659; 0 -0.1443 0.1443], "
                    "$G_K$ = [0.2659 -0.1443 0.1216; -0.2659 0.1443 -0.1216].",
                    _digits("G_P", 4) == [[3, 1], [0, 1]]
                    and _digits("G_S", 4) == [[0.4605, -0.4605], [-0.25, 0.25]]
                    and _digits("G_Q", 4) == [[0, 0.2659, -0.2659], [0, -0.1443, 0.1443]]
                    and _digits("G_K", 4)
                    == [[0.2659, -0.1443, 0.1216], [-0.2659, 0.1443, -0.1216]],
                ),
                claim(
                    "DV-22",
                    "A check that costs nothing: each gradient has the shape of what it belongs to.",
                    all(
                        _x[f"G_{n}"].shape == t.shape for n, t in (("Q", Q2), ("K", K2), ("V", V2))
                    ),
                ),
            ),
            proof(
                school=r"""
                    *Values.* Token 0 mixes $0.36\,v_0 + 0.64\,v_1$. Raise an entry of $v_0$ by 1 and this output rises by 0.36. Its
                    bill is passed on with the factor 0.36, the weight; bills from several outputs add. That is $G_V = P^\top G_O$.

                    *Weights.* Raise the weight of $v_1$ by 1 and the output gains $v_1$; the loss changes by the bill
                    times $v_1$, entry by entry. That is $G_P = G_O V^\top$.

                    *Scores.* Raise the score of key $j$ a little, by $\varepsilon$. Its weight gains about $\varepsilon p_j$, and all weights then
                    shrink by the factor $1 - \varepsilon p_j$ so that they sum to 1 again. The loss changes by $\varepsilon p_j$ times *slope of key $j$ minus average slope*.
                    If all slopes are equal, the average is each of them, and nothing changes.

                    *Queries.* A score is query times key, divided by $\sqrt{d_k}$. Raise an entry of the query by 1: the score rises by the
                    entry of the key, divided by $\sqrt{d_k}$. A query has one score per key, so the bills of its scores add: $G_Q = G_S K/\sqrt{d_k}$, and with the roles
                    exchanged $G_K = G_S^\top Q/\sqrt{d_k}$.""",
                undergraduate=r"""
                    For fixed $G_O$ put $L = \langle G_O, P V\rangle$ and take differentials.
                    $dL = \langle G_O, P\,dV\rangle + \langle G_O, dP\,V\rangle
                    = \langle P^\top G_O, dV\rangle + \langle G_O V^\top, dP\rangle$. For a row, $dp = J\,ds$ with
                    $J = \mathrm{diag}(p) - pp^\top$, and $\langle g, J\,ds\rangle = \langle J g, ds\rangle$ because $J$ is symmetric. Hence
                    $G_{S,r} = J_r G_{P,r} = p_r * (g_r - \langle p_r, g_r\rangle)$. Last, $dS = c\,(dQ\,K^\top + Q\,dK^\top)$ with
                    $c = 1/\sqrt{d_k}$ gives $G_Q = c\,G_S K$, $G_K = c\,G_S^\top Q$. Since $J \mathbf 1 = 0$, $G_S \mathbf 1 = 0$, so
                    $\mathbf 1^\top G_K = c\,(G_S \mathbf 1)^\top Q = 0$.""",
                research=r"""
                    The mean $m_r = \langle P_r, G_{P,r}\rangle$ equals $\langle G_{O,r}, O_r\rangle$, so a backward pass needs no sum over a whole row of $P$: FlashAttention (Dao et al. 2022) keeps $O$ and
                    the log-sum-exp of each row, and recomputes $P$ tile by tile. For the Tsallis entropy with exponent $\alpha$ (entmax), $J$ is $\beta(\mathrm{diag}(s) - s s^\top/\sum s)$ with
                    $s = p^{2-\alpha}$ on the support, where the support does not change; all else stays (`fenchel.attention.derivative`). The same argument gives the
                    second derivative, where $J$ itself moves.""",
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Do not trust, measure

    The formulas can be checked without knowing any. Change one number by $+h$ and by $-h$, compute the loss twice, divide the difference
    by $2h$: that is nearly its slope. With a large $h$ the curve bends between the two points; with a tiny $h$ the rounding of the computer counts. In between lies a
    step that gives nine or ten digits.
    """)
    return


@app.cell
def _():
    step = mo.ui.slider(
        steps=[10.0**-i for i in range(12, 0, -1)], value=1e-5, label="Step $h$", show_value=True
    )
    step
    return (step,)


@app.cell
def _(by_hand):
    _at = [draw(4, 3, seed=11), draw(5, 3, seed=12), draw(5, 2, seed=13)]
    _g = draw(4, 2, seed=14)
    _exact = by_hand(*_at, _g)
    _exact = [_exact["G_Q"], _exact["G_K"], _exact["G_V"]]

    def _difference(h):
        """Every entry of the gradients by two evaluations each."""
        out = []
        for n, x in enumerate(_at):
            slopes = torch.empty_like(x)
            for index in product(*map(range, x.shape)):
                ends = []
                for sign in (1.0, -1.0):
                    moved = [y.clone() for y in _at]
                    moved[n][index] += sign * h
                    ends.append((_g * fenchel.attend(*moved)).sum())
                slopes[index] = (ends[0] - ends[1]) / (2 * h)
            out.append(slopes)
        return out

    errors_by_step = {
        10.0**-i: max(
            (a - b).abs().max().item() for a, b in zip(_difference(10.0**-i), _exact, strict=True)
        )
        for i in range(12, 0, -1)
    }
    return (errors_by_step,)


@app.cell
def _(errors_by_step, step):
    _best = min(errors_by_step, key=lambda h: errors_by_step[h])
    mo.vstack(
        [
            mo.md(
                f"At $h$ = {number(step.value)} the worst of the 37 slopes is off by **{number(errors_by_step[step.value], 2)}**."
            ),
            line_chart(
                [{"step h": h, "largest error": e} for h, e in errors_by_step.items()],
                "step h",
                "largest error",
                title="Error of finite differences against the step",
                y_range=(1e-11, 1e-2),
                here=[{"step h": step.value, "largest error": errors_by_step[step.value]}],
                log_x=True,
                log_y=True,
                points=True,
            ),
            claim(
                "DV-21",
                f"The best step, {_best:g}, agrees with the formulas to {errors_by_step[_best]:.0e}. Steps ten times larger err by "
                "the square, a hundred times more; steps much smaller lose digits again.",
                errors_by_step[_best] < 1e-9
                and 50 < errors_by_step[1e-1] / errors_by_step[1e-2] < 150
                and errors_by_step[1e-12] > 100 * errors_by_step[_best],
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Self-attention: one input, three roles

    In self-attention the token table $X$ makes queries, keys and values, so a nudge $\tilde X$ of the tokens moves the
    faders in two ways and the singers in a third. With $A = W_Q W_K^\top/\sqrt{d_k}$, scores $S = X A X^\top$ and $\sigma$
    for softmax of rows, the output $\mathrm{Att}(X) = \sigma(S)\,X W_V$ changes, to first order, by

    $$d\mathrm{Att}\cdot\tilde X = M X W_V + \sigma(S)\,\tilde X W_V,$$

    $$M_i = J_i\,\big(X A^\top \tilde x_i + \tilde X A^\top x_i\big) .$$

    $x_i$ is token $i$ as a column, and $M_i$ the column that becomes row $i$ of $M$: its first term is *token $i$ asks differently*, the second
    *the others offer something else*.

    Backwards, the bills of the three roles add:

    $$G_X = G_Q W_Q^\top + G_K W_K^\top + G_V W_V^\top,$$

    $$G_{W_Q} = X^\top G_Q, \qquad G_{W_K} = X^\top G_K,$$

    $$G_{W_V} = X^\top G_V .$$
    """)
    return


@app.cell
def _():
    X, W_Q, W_K, W_V = (
        draw(5, 4, seed=15),
        draw(4, 3, seed=16),
        draw(4, 3, seed=17),
        draw(4, 2, seed=18),
    )
    X_dot, R = draw(5, 4, seed=19), draw(5, 2, seed=20)
    A = W_Q @ W_K.T / 3**0.5
    sigma = torch.softmax(X @ A @ X.T, -1)
    _J = torch.diag_embed(sigma) - sigma[:, :, None] * sigma[:, None, :]
    _dS = (X @ A.T @ X_dot.T + X_dot @ A.T @ X.T).T  # row i is what J_i acts on
    _M, _M_transposed = (torch.einsum("ijk,ik->ij", J, _dS) for J in (_J, _J.transpose(1, 2)))
    total = _M @ X @ W_V + sigma @ X_dot @ W_V
    _auto = torch.func.jvp(
        lambda x: self_attention(x, W_Q, W_K, W_V, backend="reference"), (X,), (X_dot,)
    )[1]
    _parts = fenchel.attend_jvp(
        (X @ W_Q, X @ W_K, X @ W_V), (X_dot @ W_Q, X_dot @ W_K, X_dot @ W_V)
    )
    back = self_attention_vjp(X, W_Q, W_K, W_V, R)
    _leaves = [t.clone().requires_grad_() for t in (X, W_Q, W_K, W_V)]
    _grads = torch.autograd.grad((R * self_attention(*_leaves)).sum(), _leaves)
    _operator = fenchel.self_attention_jacobian(X, W_Q, W_K, W_V)
    _of_qkv = fenchel.attention_jacobian(X @ W_Q, X @ W_K, X @ W_V)
    _pushed = _of_qkv @ (X_dot @ W_Q, X_dot @ W_K, X_dot @ W_V)
    mo.vstack(
        [
            claim(
                "DV-24 DV-26",
                r"Forward and backward are one table read in two directions: $\langle R, d\mathrm{Att}\cdot\tilde X\rangle$ = "
                f"{(R * total).sum():.6f} and $\\langle G_X, \\tilde X\\rangle$ = {(back.X * X_dot).sum():.6f}.",
                torch.isclose((R * total).sum(), (back.X * X_dot).sum(), atol=1e-11)
                and torch.allclose(_operator.T @ R, back.X, atol=1e-11),
            ),
            details(
                claim(
                    "DV-24",
                    f"Formula and forward-mode automatic differentiation agree to {(total - _auto).abs().max():.0e}; so do the two parts of "
                    "`attend_jvp`, and the operator `attention_jacobian`, which never writes the whole table of slopes down.",
                    torch.allclose(total, _auto, atol=1e-12)
                    and torch.allclose(_parts.choosing, _M @ X @ W_V, atol=1e-12)
                    and torch.allclose(_pushed, total, atol=1e-12),
                ),
                claim(
                    "E12 DV-30",
                    r"One symbol is enough: $\sigma$ for softmax, $J$ for its derivative. A transpose on $J$ may be written or left out, since $J = "
                    r"\mathrm{diag}(p) - pp^\top$ is symmetric (the lesson *Softmax* derives it). Which bounds follow, and that none holds for all "
                    "inputs, is in Kim, Papamakarios and Mnih, *The Lipschitz constant of self-attention*, 2021, Theorem 3.1, and in the next lesson.",
                    torch.allclose(_M, _M_transposed, atol=1e-12)
                    and torch.allclose(
                        torch.func.jacrev(lambda s: torch.softmax(s, -1))((X @ A @ X.T)[0]),
                        _J[0],
                        atol=1e-12,
                    ),
                ),
                claim(
                    "DV-26 DV-22",
                    f"The four gradients of $\\langle R, \\mathrm{{Att}}(X)\\rangle$ in closed form match autograd to "
                    f"{max((a - b).abs().max().item() for a, b in zip(back, _grads, strict=True)):.0e}, each in the shape of its variable.",
                    all(
                        a.shape == b.shape and torch.allclose(a, b, atol=1e-11)
                        for a, b in zip(back, _grads, strict=True)
                    ),
                ),
            ),
        ]
    )
    return R, W_K, W_Q, W_V, X


@app.cell
def _(R, W_K, W_Q, W_V, X):
    _leaves = [t.clone().requires_grad_() for t in (W_Q, W_K)]
    _S = X @ _leaves[0] @ _leaves[1].T @ X.T
    _S.retain_grad()
    (R * (torch.softmax(_S, -1) @ X @ W_V)).sum().backward()
    _G = attend_vjp((X @ W_Q, X @ W_K, X @ W_V), R, scale=1.0).scores
    _T = X.T @ _G @ X
    _shift = X + 5.0 * torch.ones(5, 1, dtype=torch.float64) * draw(1, 4, seed=21)
    details(
        mo.md(r"""
    Write the scores without the root, $S = X W_Q W_K^\top X^\top$. Both tables meet the same middle piece. With $G$ the gradient of the loss in $S$,

    $$T = X^\top G X,$$

    $$\frac{\partial L}{\partial W_Q} = T\,W_K, \qquad \frac{\partial L}{\partial W_K} = T^\top W_Q .$$

    $\partial L/\partial W_Q$ is another way to write the gradient of $L$ in $W_Q$.

    $T$ has one row and one column per feature of a token. It asks: *which pair of features should attract each other more?* [Score descent](../score_descent/) builds an optimiser
    on it.
    """),
        claim(
            "DV-27",
            f"$T W_K$ and $T^\\top W_Q$ are the gradients of autograd, to "
            f"{max((_T @ W_K - _leaves[0].grad).abs().max().item(), (_T.T @ W_Q - _leaves[1].grad).abs().max().item()):.0e}.",
            torch.allclose(_G, _S.grad, atol=1e-12)
            and torch.allclose(_T @ W_K, _leaves[0].grad, atol=1e-11)
            and torch.allclose(_T.T @ W_Q, _leaves[1].grad, atol=1e-11),
        ),
        claim(
            "DV-28 DV-27",
            r"Through softmax $G \mathbf 1 = 0$ ($\mathbf 1$ is a column of ones), so a vector added to every token on the side of the keys drops out: "
            r"$X^\top G (X + \mathbf 1 c^\top) = X^\top G X$.",
            _G.sum(-1).abs().max() < 1e-12 and torch.allclose(X.T @ _G @ _shift, _T, atol=1e-10),
        ),
        title="What the query and key tables have in common",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## The neighbours: four more backward rules

    A block has other parts. A bill $g$ passes through each of them by a short rule; no table of slopes is ever built.

    | layer | forward | backward |
    | --- | --- | --- |
    | GELU | $x\,\Phi(x)$ | $g\,(\Phi(x) + x\,\varphi(x))$ |
    | LayerNorm | $\hat x\,\gamma + b$ | $\big(u - \bar u - \hat x\,\overline{u \hat x}\big)/s$, $u = \gamma g$ |
    | RMSNorm | $\hat x\,\gamma$ | $\big(u - \hat x\,\overline{u \hat x}\big)/r$, $u = \gamma g$ |
    | RoPE | rotate by $\theta$ | rotate by $-\theta$ |
    """)
    return


@app.cell
def _():
    neighbour = mo.ui.dropdown(
        ["gelu", "layer norm", "rms norm", "rope"], value="gelu", label="Layer"
    )
    neighbour
    return (neighbour,)


@app.cell
def _():
    _x, _g, _gamma, _b = (
        draw(5, 8, seed=22),
        draw(5, 8, seed=23),
        1 + 0.3 * draw(8, seed=24),
        draw(8, seed=25),
    )
    _eps, _where = 1e-5, torch.arange(5)

    def _mean(y):
        return y.mean(-1, keepdim=True)

    _Phi = (1 + torch.erf(_x / 2**0.5)) / 2
    _phi = torch.exp(-_x.square() / 2) / math.sqrt(2 * math.pi)
    _s = (_x.var(-1, keepdim=True, correction=0) + _eps).sqrt()
    _r = (_mean(_x.square()) + _eps).sqrt()
    _u = _gamma * _g
    _hat, _hat_r = (_x - _mean(_x)) / _s, _x / _r

    def _rope(y, sign=1):
        return fenchel.rotary(y[None, None], sign * _where)[0, 0]

    _layers = {
        "gelu": functional.gelu,
        "layer norm": lambda y: functional.layer_norm(y, (8,), _gamma, _b, _eps),
        "rms norm": lambda y: functional.rms_norm(y, (8,), _gamma, _eps),
        "rope": _rope,
    }
    _written = {
        "gelu": _g * (_Phi + _x * _phi),
        "layer norm": (_u - _mean(_u) - _hat * _mean(_u * _hat)) / _s,
        "rms norm": (_u - _hat_r * _mean(_u * _hat_r)) / _r,
        "rope": _rope(_g, -1),
    }
    _library = {
        "gelu": ActivationLayer("gelu").jacobian(_x).T @ _g,
        "layer norm": NormLayer(_gamma, _b, _eps).jacobian(_x).T @ _g,
        "rms norm": NormLayer(_gamma, None, _eps, "rms").jacobian(_x).T @ _g,
        "rope": _rope(_g, -1),
    }
    pulled = {}
    for _name, _f in _layers.items():
        _leaf = _x.clone().requires_grad_()
        pulled[_name] = torch.autograd.grad((_g * _f(_leaf)).sum(), _leaf)[0]
    off = {name: (pulled[name] - _written[name]).abs().max().item() for name in pulled}
    bill_before, bill_after = _g, _written
    rules_hold = all(
        off[name] < 1e-12 and torch.allclose(_written[name], _library[name], atol=1e-12)
        for name in off
    )
    along = {
        "layer norm": (_written["layer norm"] * _hat).sum(-1).abs().max().item(),
        "rms norm": (_written["rms norm"] * _hat_r).sum(-1).abs().max().item(),
    }
    lengths_kept = torch.allclose(_written["rope"].norm(dim=-1), _g.norm(dim=-1))
    return along, bill_after, bill_before, lengths_kept, off, rules_hold


@app.cell
def _(along, bill_after, bill_before, lengths_kept, neighbour, off, rules_hold):
    mo.vstack(
        [
            bar_chart(
                [
                    {"entry": str(i), "bill": x, "side": side}
                    for side, part in (
                        ("arrives", bill_before[3]),
                        ("is passed on", bill_after[neighbour.value][3]),
                    )
                    for i, x in enumerate(part.tolist())
                ],
                "entry",
                "bill",
                "side",
                title=f"The bill of one token before and after {neighbour.value}",
                y_range=(-2, 2),
            ),
            details(
                mo.md(r"""
                $\Phi(x)$ is the area below the bell curve to the left of $x$, and $\varphi(x)$ its height there. $\theta$ is an angle that grows with the position. A bar is the mean over a token's entries. $\hat x$ is the token after division by its spread $s$ (LayerNorm, mean
                removed first) or its size $r$ (RMSNorm), $\gamma$ the learned gain and $b$ the learned bias. Both $s$ and $r$ are roots to whose inside a tiny $\varepsilon$ is added, so that
                neither is ever 0. [Positions](../positions/) and [norms](../blocks/) treat these layers in full; here only their derivatives count. A norm layer ignores how long a token is, so no bill may ask for a longer one: the part along $\hat x$
                is taken out.
                """),
                claim(
                    "DV-31",
                    "Each rule against autograd, largest difference: "
                    + ", ".join(f"{name} {x:.0e}" for name, x in off.items())
                    + ".",
                    rules_hold,
                ),
                claim(
                    "DV-31",
                    "Norm layers pass on nothing along the token itself (at most "
                    f"{max(along.values()):.0e}, and not 0 only because of the $\\varepsilon$ in the root), and a rotation keeps the length of the bill.",
                    max(along.values()) < 1e-3 and lengths_kept,
                ),
                title="What the letters mean, and checks",
            ),
        ]
    )
    return


@app.cell
def _(K2, Q2, V2):
    def check(names):
        backward = names["backward"]
        for at in (
            (Q2, K2, V2, matrix([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])),
            (draw(4, 3, seed=30), draw(6, 3, seed=31), draw(6, 2, seed=32), draw(4, 2, seed=33)),
        ):
            got = backward(*at)
            assert isinstance(got, tuple), "Return three tensors: G_Q, G_K, G_V."
            assert len(got) == 3, "Return three tensors: G_Q, G_K, G_V."
            for name, g, x in zip(("G_Q", "G_K", "G_V"), got, at[:3], strict=True):
                assert torch.is_tensor(g), f"{name} should be a tensor."
                assert g.shape == x.shape, (
                    f"{name} must have the shape of its variable, {tuple(x.shape)}."
                )
            right = attend_vjp(at[:3], at[3])
            assert torch.allclose(got[2], right.v), "G_V is not right yet: P transposed times G_O."
            Q, K, V, G_O = at
            forgot = (G_O @ V.T) @ K / Q.shape[-1] ** 0.5
            assert not torch.allclose(got[0], forgot), (
                "You passed G_P on as if it were G_S: take the average of each row off, weighted by P, "
                "and multiply by P."
            )
            assert torch.allclose(got[0], right.q), (
                "G_Q is not right yet. Do the rows of G_S sum to zero? Is the root of d_k there?"
            )
            assert torch.allclose(got[1], right.k), "G_K is not right yet: G_S transposed times Q."

    exercise = Exercise(
        lesson="attention_derivative",
        task="Complete `backward(Q, K, V, G_O)`: it returns the gradients `G_Q, G_K, G_V` of attention, without autograd. The step "
        "through softmax is missing.",
        starter="""
    def backward(Q, K, V, G_O):
        c = Q.shape[-1] ** -0.5
        P = torch.softmax(c * Q @ K.T, -1)
        G_V = P.T @ G_O
        G_P = G_O @ V.T
        G_S = G_P
        return c * G_S @ K, c * G_S.T @ Q, G_V
    """,
        solution="""
    def backward(Q, K, V, G_O):
        c = Q.shape[-1] ** -0.5
        P = torch.softmax(c * Q @ K.T, -1)
        G_V = P.T @ G_O
        G_P = G_O @ V.T
        average = (P * G_P).sum(-1, keepdim=True)
        G_S = P * (G_P - average)  # better or worse than the average of the row
        return c * G_S @ K, c * G_S.T @ Q, G_V
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
    _ids = token_ids(own_text.value, own.tokenizer, min(24, own.config.context))
    own_tokens = [own.tokenizer.decode([each]).strip() for each in _ids]
    calls = []
    with torch.no_grad():
        own.model(
            torch.tensor([_ids]),
            observe=lambda layer, *qkv: calls.append(
                own.model.attention_call(layer, *(x.double() for x in qkv))
            ),
        )
    _last = calls[-1]
    _at = tuple(x.detach() for x in _last[:3])
    _moves = tuple(
        x.norm() * m / m.norm()
        for x, m in zip(_at, (draw(*x.shape, seed=50 + i) for i, x in enumerate(_at)), strict=True)
    )
    _both = fenchel.attend_jvp(_at, _moves, **_last.spec)
    _g = draw(*_both.total.shape, seed=60)
    own_back = attend_vjp(_at, _g, **_last.spec)
    _leaves = [x.clone().requires_grad_() for x in _at]
    _out = fenchel.attend(*_leaves, **_last.spec, backend="reference")
    _auto = torch.autograd.grad((_g * _out).sum(), _leaves)
    _forward, _backward = (
        (_g * _both.total).sum(),
        sum((a * b).sum() for a, b in zip(own_back[:3], _moves, strict=True)),
    )
    mo.vstack(
        [
            mo.md(
                f"The last layer of your model on {len(_ids)} tokens. Queries, keys and values are nudged at random, all by the same "
                "share of their size: which cause moves the output of each head more?"
            ),
            bar_chart(
                [
                    {"head": str(h), "size of the change": part[0, h].norm().item(), "cause": cause}
                    for cause, part in (("faders", _both.choosing), ("singers", _both.values))
                    for h in range(part.shape[1])
                ],
                "head",
                "size of the change",
                "cause",
                title="The two causes, per head",
            ),
            claim(
                "DV-18 DV-28",
                "The five steps give the gradients of your layer as autograd does, and the rows of its score gradient sum to zero "
                f"(largest sum {own_back.scores.sum(-1).abs().max():.0e}).",
                all(
                    torch.allclose(a, b, rtol=1e-4, atol=1e-6 * b.abs().max().item() + 1e-12)
                    for a, b in zip(own_back[:3], _auto, strict=True)
                )
                and own_back.scores.sum(-1).abs().max() <= 1e-6 * (1 + own_back.scores.abs().max()),
            ),
            details(
                claim(
                    "DV-24 DV-26",
                    f"Forward, the nudge changes the loss by {_forward:.6g}; backward, the bills for it add up to {_backward:.6g}.",
                    torch.isclose(_forward, _backward, rtol=1e-5, atol=1e-8),
                ),
            ),
        ]
    )
    return calls, own, own_tokens


@app.cell
def _(calls, own, own_tokens):
    own_maps = torch.stack(
        [
            fenchel.attend(*each[:3], **each.spec, return_weights=True)[1][
                0, ..., -len(own_tokens) :
            ]
            for each in calls
        ]
    )  # a sink is the first key
    own_words = words_and_weights(own_tokens, own_maps, causal=own.config.kind == "decoder")
    mo.vstack(
        [
            mo.md(
                "Does the token with the largest weight also move the output most? Choose a head and a token that reads."
            ),
            own_words,
        ]
    )
    return own_maps, own_words


@app.cell
def _(calls, own_maps, own_tokens, own_words):
    _layer, _head = divmod(own_words.state["head"], own_maps.shape[1])
    _query, _call = own_words.state["word"], calls[_layer]
    _width = _call.v.shape[-1]
    _g = _call.v.new_zeros(_width, *_call.q.shape[1:3], _width)
    _g[:, _head, _query] = torch.eye(_width)  # one row of the Jacobian per coordinate of the output
    _rows = attend_vjp(tuple(x.expand(_width, *x.shape[1:]) for x in _call[:3]), _g, **_call.spec)
    _by_key, _by_value = (
        x.sum(1)[:, -len(own_tokens) :].square().sum((0, 2)).sqrt()  # the other groups have slope 0
        for x in (_rows.k, _rows.v)
    )
    _p = own_maps[_layer, _head, _query]
    _seen = [
        (f"{i}: {token}", w, k)
        for i, (token, w, k) in enumerate(
            zip(
                own_tokens,
                _p.tolist(),
                (_by_key / _by_key.sum().clamp(min=1e-30)).tolist(),
                strict=True,
            )
        )
    ]
    mo.vstack(
        [
            bar_chart(
                [
                    {"token": token, "share": share, "nudge": nudge}
                    for token, w, k in _seen
                    for nudge, share in (("its value (the weight)", w), ("its key", k))
                ],
                "token",
                "share",
                "nudge",
                title=f"Who moves what “{own_tokens[_query]}” takes from head {_layer + 1}.{_head + 1}",
                y_range=(0, 1),
            ),
            claim(
                "DV-18 DV-24",
                f"A nudge to the value of a token moves the output by its weight times the nudge, for “{own_tokens[int(_p.argmax())]}” "
                f"{_p.max():.3f}. A nudge to a key moves it most for “{own_tokens[int(_by_key.argmax())]}”, by up to {_by_key.max():.3g} times the nudge: "
                "a key is heard only where there is weight, and value to gain or lose.",
                torch.allclose(_by_value, _p * _width**0.5, rtol=1e-6, atol=1e-9)
                and (_by_key[_p == 0] == 0).all(),
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        r"A derivative is a statement about small nudges. At $h = 3$ above the prediction fails, and no formula is wrong. It also needs a smooth map: at a kink (ReLU at 0, "
        "sparse weights that just become zero) the slope from the left is not that from the right, and the line of slope 2 bends. And it says nothing about how "
        "large slopes can get: in attention the rows of $G_S$ are multiplied by keys and queries, which have no largest size. That is the next lesson."
    )
    return


@app.cell
def _():
    footer("attention_derivative")
    return


if __name__ == "__main__":
    app.run()
