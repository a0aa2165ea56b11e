"""Multilayer perceptrons and backpropagation by hand, checked against automatic differentiation."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Multilayer perceptrons and backpropagation by hand",
)

with app.setup:
    import math

    import marimo as mo
    import torch
    from torch.autograd.functional import jacobian

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
        proof,
        question,
        run_picker,
        table,
        what_breaks,
    )

    ACTIVATIONS = {
        "sigmoid": (torch.sigmoid, lambda z: torch.sigmoid(z) * (1 - torch.sigmoid(z))),
        "ReLU": (torch.relu, lambda z: (z > 0).to(z.dtype)),
        "tanh": (torch.tanh, lambda z: 1 - torch.tanh(z) ** 2),
    }


@app.cell
def _():
    header("backpropagation")
    return


@app.cell
def _():
    guess = question(
        "A network turns inputs into outputs, layer by layer, each with a matrix of weights. The output is wrong. Which "
        "way does the error travel, and what does it meet on the way?",
        [
            "from input to output, through the same matrices",
            "from output to input, through the same matrices transposed",
            "from output to input, through the inverse matrices",
        ],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "from output to input, through the same matrices transposed",
        "A weight that passed a signal forwards passes the blame backwards, with the same factor. Seen from the "
        "output, rows and columns change places. Nothing is inverted: the question is who contributed, and not what the "
        "input should have been.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## A price list: the linear model

    Each row of a table $X$ is a shopping basket, each column a kind of goods. You know what every basket cost in
    each of a few shops, but not the prices. Guess a price list $W$ (one column per shop) and a fee $b$, and
    compute the bills:

    $$\hat Y = X W + b .$$

    Entry by entry: amount times price, added over the goods, plus the fee. This is what the product $XW$ of two tables
    (*matrices*) means. $X$ has $N$ rows (samples) and one column per feature; $W$ has one row per feature and one column per output, so $\hat
    Y$ has one row per sample and one column per output. $b$ is added to every row. How bad is the guess? Take the
    squared difference from the true bills $Y$, added over the outputs ($\|\cdot\|^2$ is the sum of the squares of a row) and averaged over the
    samples ($\sum$ says: add), the *mean squared error*:

    $$L = \frac1N \sum_{i=1}^N \| Y_i - \hat Y_i \|^2 .$$

    To improve a price, look at all baskets that contain the goods: a bill that is too high calls for a lower price,
    in proportion to the amount bought. Written for all prices at once,

    $$\frac{\partial L}{\partial W} = \frac2N X^\top (\hat Y - Y), \qquad
    \frac{\partial L}{\partial b} = \frac2N \sum_i (\hat Y_i - Y_i).$$

    $X^\top$ is $X$ with rows and columns exchanged, *transposed*. Then take a step of learning rate $\eta$ against both.
    """)
    return


@app.cell
def _():
    _draw = torch.Generator().manual_seed(0)
    X, Y, W = (
        torch.randn(*shape, dtype=torch.float64, generator=_draw)
        for shape in ((8, 4), (8, 3), (4, 3))
    )
    b = torch.randn(3, dtype=torch.float64, generator=_draw)

    def mean_squares(W, b):
        return ((Y - (X @ W + b)) ** 2).sum() / len(X)

    _error = X @ W + b - Y
    dW, db = 2 / len(X) * X.T @ _error, 2 / len(X) * _error.sum(0)
    auto_W, auto_b = jacobian(mean_squares, (W, b))
    of_torch = jacobian(lambda W: torch.nn.functional.mse_loss(X @ W + b, Y), W)
    _rows = torch.stack([sum(X[i, k] * W[k] for k in range(4)) + b for i in range(8)])
    _loop = sum(((Y[i] - _rows[i]) ** 2).sum() for i in range(8)) / 8
    _W, _b, loss_path = W, b, []
    for _ in range(800):
        _e = X @ _W + _b - Y
        loss_path.append(mean_squares(_W, _b).item())
        _W, _b = _W - 0.1 * 2 / 8 * X.T @ _e, _b - 0.1 * 2 / 8 * _e.sum(0)
    _with_ones = torch.cat([X, torch.ones(8, 1, dtype=torch.float64)], 1)
    _exact = torch.linalg.lstsq(_with_ones, Y).solution
    mo.vstack(
        [
            claim(
                "BP-03 DV-04",
                "Automatic differentiation (the program applies the rules for slopes to each step of a computation; torch's is called "
                "*autograd*) gives the two gradients above. A gradient has the shape of its variable: "
                f"$4 \\times 3$ for $W$, {len(db)} numbers for $b$.",
                torch.allclose(auto_W, dW)
                and torch.allclose(auto_b, db)
                and auto_W.shape == W.shape,
            ),
            details(
                claim(
                    "BP-01",
                    "Shapes: $(8 \\times 4)(4 \\times 3)$ gives $8 \\times 3$, and each row is its basket times the price list, plus $b$.",
                    (X @ W + b).shape == (8, 3) and torch.allclose(X @ W + b, _rows),
                ),
                claim(
                    "BP-02",
                    f"The loss, written as loops over samples, is {_loop:.4f}; with matrices the same.",
                    torch.isclose(mean_squares(W, b), _loop),
                ),
                claim(
                    "BP-04",
                    r"800 updates $W - \eta\,\partial L/\partial W$, $b - \eta\,\partial L/\partial b$ with $\eta = 0.1$ lower "
                    f"the loss from {loss_path[0]:.3f} to {loss_path[-1]:.5f}; no price list does better than "
                    f"{mean_squares(_exact[:4], _exact[4]):.5f}.",
                    torch.allclose(torch.cat([_W, _b[None]]), _exact, atol=1e-3),
                ),
                claim(
                    "E22",
                    "Mind the average. `torch.nn.functional.mse_loss` divides by samples *and* outputs, here $8 \\cdot 3$. Its gradient is "
                    f"{(of_torch / dW).mean():.4f} times this one.",
                    torch.allclose(of_torch, dW / 3),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Gears: the chain rule

    One gear turns the next, which turns a third. If the first makes the second turn 3 times as fast, and the second
    makes the third turn twice as fast, then the first drives the third 6 times as fast: rates along a chain *multiply*. If
    $g$ depends on $x$ and $f$ on $g$, and $\frac{df}{dx}$ is another way to write the slope $f'(x)$,

    $$\frac{df}{dx} = \frac{df}{dg} \cdot \frac{dg}{dx}.$$

    If several chains lead from $x$ to $f$, their products are *added*. For a matrix $X$ whose entries act on $f$ through
    all the entries of a matrix $Y$:

    $$\frac{\partial f}{\partial X_{ij}} = \sum_{k} \sum_{l} \frac{\partial f}{\partial Y_{kl}}\,
    \frac{\partial Y_{kl}}{\partial X_{ij}} .$$

    The sum runs over the *entries* $(k, l)$ of $Y$: one chain through each of them.
    """)
    return


@app.cell
def _():
    _x = torch.linspace(-2, 2, 41, dtype=torch.float64)
    _outer_times_inner = torch.cos(_x**2) * 2 * _x
    _direct = jacobian(lambda x: torch.sin(x**2).sum(), _x)
    _draw = torch.Generator().manual_seed(1)
    _X = torch.randn(3, 4, dtype=torch.float64, generator=_draw)
    _A = torch.randn(2, 3, dtype=torch.float64, generator=_draw)

    def _inner(X):
        return torch.tanh(_A @ X) * (_A @ X)

    def _outer(Y):
        return (Y**3).sum() + Y[0, 0] * Y[1, 2]

    _through = jacobian(_inner, _X)  # [k, l, i, j]
    _parts = jacobian(_outer, _inner(_X))
    _summed = torch.einsum("kl,klij->ij", _parts, _through)
    _whole = jacobian(lambda X: _outer(_inner(X)), _X)
    _h = 1e-6
    _poked = torch.zeros(3, 4, dtype=torch.float64)
    for _i in range(3):
        for _j in range(4):
            _e = torch.zeros_like(_X)
            _e[_i, _j] = _h
            _poked[_i, _j] = (_outer(_inner(_X + _e)) - _outer(_inner(_X - _e))) / (2 * _h)
    mo.vstack(
        [
            claim(
                "DV-05",
                r"For $\sin(x^2)$ the product $\cos(x^2) \cdot 2x$ is the slope at 41 places. (The slope of $\sin$ is $\cos$.)",
                torch.allclose(_outer_times_inner, _direct),
            ),
            details(
                claim(
                    "DV-11 E76",
                    f"Through a $2 \\times 4$ matrix $Y$, the {_through[:, :, 0, 0].numel()} chains to each entry of a $3 \\times 4$ matrix $X$ "
                    "add up to its gradient. One chain alone does not: the sum is over all entries.",
                    torch.allclose(_summed, _whole)
                    and not torch.allclose(_parts[0, 0] * _through[0, 0], _whole, rtol=0.1),
                ),
                claim(
                    "DV-04",
                    f"The gradient of a function of a $3 \\times 4$ matrix is a $3 \\times 4$ matrix: moving its {_poked.numel()} entries one at a "
                    "time measures the same numbers.",
                    _whole.shape == (3, 4) and torch.allclose(_poked, _whole, atol=1e-6),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## One hidden layer

    A straight line cannot follow a bent curve, and a price list of price lists is only another price list. Put a bend
    between them. A light switch, a dimmer: each hidden unit adds up its inputs and passes the sum through a fixed bent function,
    its *activation* $\sigma$ (sigma). On a given stretch, enough such units together come as close as
    you like to any unbroken curve. Forwards:

    $$\begin{aligned}
    Z_1 &= X W_1 + b_1, & A_1 &= \sigma(Z_1), \\
    Z_2 &= A_1 W_2 + b_2, & \hat Y &= Z_2 .
    \end{aligned}$$

    The sums $Z_1$, $Z_2$ are called *pre-activations*, $A_1$ the activations.

    Backwards, the blame is handed down like a complaint in a restaurant: from the guest to the waiter, from the waiter to
    the cook, to each according to their part. $\delta$ stands for blame, and $*$ for the product entry by entry:

    $$\begin{aligned}
    \delta_2 &= 2(\hat Y - Y) & \delta_1 &= (\delta_2 W_2^\top) * \sigma'(Z_1) \\[0.4em]
    \frac{\partial L}{\partial W_2} &= \frac1N A_1^\top \delta_2 & \frac{\partial L}{\partial W_1} &= \frac1N X^\top \delta_1 \\[0.4em]
    \frac{\partial L}{\partial b_2} &= \frac1N \sum_i \delta_{2,i} & \frac{\partial L}{\partial b_1} &= \frac1N \sum_i \delta_{1,i}
    \end{aligned}$$

    $\sigma'$ is the slope of the activation: a unit that is flat where it stands passes no blame on.
    """)
    return


@app.function
def by_hand(X, Y, weights, activation):
    """The forward and the backward pass of a network with one hidden layer: loss, deltas, gradients."""
    W1, b1, W2, b2 = weights
    sigma, slope = ACTIVATIONS[activation]
    N = len(X)
    Z1 = X @ W1 + b1
    A1 = sigma(Z1)
    Z2 = A1 @ W2 + b2
    loss = ((Y - Z2) ** 2).sum() / N
    delta2 = 2 * (Z2 - Y)
    delta1 = (delta2 @ W2.T) * slope(Z1)
    gradients = X.T @ delta1 / N, delta1.sum(0) / N, A1.T @ delta2 / N, delta2.sum(0) / N
    return loss, (delta1, delta2), gradients


@app.function
def fresh_weights(features, hidden, outputs, seed):
    """Random weights W1, b1, W2, b2."""
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn(*shape, dtype=torch.float64, generator=draw) / math.sqrt(shape[0])
        for shape in ((features, hidden), (1, hidden), (hidden, outputs), (1, outputs))
    ]


@app.cell
def _():
    activation = mo.ui.dropdown(list(ACTIVATIONS), value="tanh", label=r"Activation $\sigma$")
    hidden = mo.ui.slider(
        steps=[1, 2, 4, 8, 16, 32], value=8, label="Hidden units", show_value=True
    )
    mo.vstack([hidden, activation])
    return activation, hidden


@app.cell
def _(activation, hidden):
    toy_X = torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]
    toy_Y = torch.sin(2 * toy_X)
    weights = fresh_weights(1, hidden.value, 1, seed=0)
    fit_losses = []
    for _ in range(1000):
        _loss, _, _gradients = by_hand(toy_X, toy_Y, weights, activation.value)
        fit_losses.append(_loss.item())
        weights = [w - 0.05 * g for w, g in zip(weights, _gradients, strict=True)]
    _fitted = (
        ACTIVATIONS[activation.value][0](toy_X @ weights[0] + weights[1]) @ weights[2] + weights[3]
    )
    mo.vstack(
        [
            line_chart(
                [
                    {"x": x, "y": y, "line": name}
                    for name, ys in (("data", toy_Y), ("network", _fitted))
                    for x, y in zip(toy_X[:, 0].tolist(), ys[:, 0].tolist(), strict=True)
                ],
                "x",
                "y",
                "line",
                title=f"After 1,000 steps by hand the loss is {fit_losses[-1]:.4f}",
                y_range=(-1.3, 1.3),
            ),
            claim(
                "BP-10",
                f"Updating all four, $W_1, b_1, W_2, b_2$, with one $\\eta = 0.05$ lowers the loss from {fit_losses[0]:.3f} to "
                f"{fit_losses[-1]:.4f}.",
                fit_losses[-1] < fit_losses[0],
            ),
        ]
    )
    return


@app.cell
def _():
    _z = torch.linspace(-4, 4, 161, dtype=torch.float64)
    _shown = ("sigmoid", "ReLU")
    _values = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    mo.vstack(
        [
            line_chart(
                [
                    {"z": z, "value": v, "function": label}
                    for name in _shown
                    for label, ys in (
                        (name, ACTIVATIONS[name][0](_z)),
                        (f"slope of {name}", ACTIVATIONS[name][1](_z)),
                    )
                    for z, v in zip(_z.tolist(), ys.tolist(), strict=True)
                ],
                "z",
                "value",
                "function",
                title="Two activations and their slopes",
            ),
            details(
                claim(
                    "NB-22",
                    r"ReLU is $\max(0, z)$, with slope 0 or 1. The sigmoid is $1/(1 + e^{-z})$, a dimmer between 0 and 1, with slope "
                    r"$\sigma(1 - \sigma)$, at most $\frac14$. The third in the menu, $\tanh$, is a sigmoid stretched to lie between $-1$ and 1, "
                    r"$\tanh z = 2\sigma(2z) - 1$, with slope $1 - \tanh^2 z$.",
                    torch.allclose(ACTIVATIONS["ReLU"][0](_values), _values.clamp(min=0))
                    and torch.allclose(
                        ACTIVATIONS["sigmoid"][0](_values), 1 / (1 + (-_values).exp())
                    )
                    and torch.isclose(ACTIVATIONS["sigmoid"][1](_z).max(), _z.new_tensor(0.25))
                    and torch.allclose(ACTIVATIONS["tanh"][0](_z), 2 * torch.sigmoid(2 * _z) - 1)
                    and all(
                        torch.allclose(
                            jacobian(lambda z, name=name: ACTIVATIONS[name][0](z).sum(), _z),
                            ACTIVATIONS[name][1](_z),
                        )
                        for name in ACTIVATIONS
                    ),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    _draw = torch.Generator().manual_seed(2)
    N = 6
    inputs = torch.randn(N, 4, dtype=torch.float64, generator=_draw)
    targets = torch.randn(N, 3, dtype=torch.float64, generator=_draw)
    start = fresh_weights(4, 5, 3, seed=3)

    def forward(X, weights, sigma):
        """Every intermediate value of the forward pass."""
        W1, b1, W2, b2 = weights
        Z1 = X @ W1 + b1
        A1 = sigma(Z1)
        Z2 = A1 @ W2 + b2
        return Z1, A1, Z2

    def compared(name):
        """By hand and by autograd, for one activation: gradients, and deltas as N dL/dZ."""
        weights = [w.clone().requires_grad_() for w in start]
        Z1, _, Z2 = forward(inputs, weights, ACTIVATIONS[name][0])
        for z in (Z1, Z2):
            z.retain_grad()
        (((targets - Z2) ** 2).sum() / N).backward()
        _, deltas, gradients = by_hand(inputs, targets, start, name)
        found = [w.grad.reshape(g.shape) for w, g in zip(weights, gradients, strict=True)]
        return gradients, found, deltas, (N * Z1.grad, N * Z2.grad)

    checked = {name: compared(name) for name in ACTIVATIONS}
    _gradients, _found, _deltas, _slopes = checked["sigmoid"]
    without_2 = [g / 2 for g in _gradients]
    _ratios = [(f / g).mean().item() for f, g in zip(_found, without_2, strict=True)]
    _Z1, _A1, _Z2 = forward(inputs, start, torch.sigmoid)
    _by_loops = torch.stack(
        [
            torch.sigmoid(
                torch.stack([inputs[i] @ start[0][:, j] + start[1][0, j] for j in range(5)])
            )
            @ start[2]
            + start[3][0]
            for i in range(N)
        ]
    )
    _h = 1e-6
    _moved = _Z1.clone()
    _moved[2, 1] += _h
    _poked = (
        ((targets - (torch.sigmoid(_moved) @ start[2] + start[3])) ** 2).sum()
        - ((targets - _Z2) ** 2).sum()
    ) / (N * _h)
    mo.vstack(
        [
            mo.md("### Checked against automatic differentiation"),
            claim(
                "BP-06 BP-07 BP-08 BP-09",
                "Backwards: for sigmoid, ReLU and tanh, all four gradients agree with autograd, the largest difference being "
                f"{max((f - g).abs().max().item() for gs, fs, *_ in checked.values() for f, g in zip(fs, gs, strict=True)):.0e}.",
                all(
                    torch.allclose(f, g, atol=1e-12)
                    for gs, fs, *_ in checked.values()
                    for f, g in zip(fs, gs, strict=True)
                ),
            ),
            details(
                claim(
                    "BP-05",
                    f"Forwards, unit by unit in loops: the same $\\hat Y$ ({N} samples, 4 features, 5 hidden units, 3 outputs).",
                    torch.allclose(_Z2, _by_loops),
                ),
                claim(
                    "BP-06 E22",
                    r"The factor 2 belongs to the loss $\frac1N \sum \|\cdot\|^2$. Starting from $\hat Y - Y$ alone, autograd is "
                    f"{', '.join(f'{r:.3f}' for r in _ratios)} times as large for $W_1, b_1, W_2, b_2$. The 2 disappears only if the loss "
                    r"is defined with $\frac1{2N}$.",
                    all(torch.allclose(f, 2 * g) for f, g in zip(_found, without_2, strict=True))
                    and all(round(r, 3) == 2.0 for r in _ratios),
                ),
                claim(
                    "BP-15",
                    r"What $\delta$ means: how strongly the loss of a sample reacts to a pre-activation, $\delta = N\,\partial L/\partial Z$. "
                    f"Moving one entry of $Z_1$ by a millionth changes $L$ at the rate {_poked:.5f}; $\\delta_1/N$ has {_deltas[0][2, 1] / N:.5f} there.",
                    all(
                        torch.allclose(d, s, atol=1e-12)
                        for *_, ds, ss in checked.values()
                        for d, s in zip(ds, ss, strict=True)
                    )
                    and abs(_poked - _deltas[0][2, 1] / N) < 1e-5,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    _draw = torch.Generator().manual_seed(4)
    _x = torch.randn(1, 4, dtype=torch.float64, generator=_draw)
    _weights = [w.requires_grad_() for w in fresh_weights(4, 5, 3, seed=5)]
    _W1, _b1, _W2, _b2 = _weights
    _y = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)

    def _row_formulas(loss_of):
        """The four formulas and autograd, given z2 -> loss."""
        z1 = _x @ _W1 + _b1
        h1 = torch.sigmoid(z1)
        z2 = h1 @ _W2 + _b2
        (row,) = torch.autograd.grad(loss_of(z2), z2, retain_graph=True)
        d1 = (row @ _W2.T) * h1 * (1 - h1)
        formulas = _x.T @ d1, d1, h1.T @ row, row
        return row, z2, formulas, torch.autograd.grad(loss_of(z2), _weights)

    def _squares(z):
        return ((_y - z) ** 2).sum()

    def _quartic(z):
        return ((_y - z) ** 4).sum() + z[0, 0] * z[0, 1]

    def _crossentropy(z):
        return -(_y * torch.log_softmax(z, -1)).sum()

    _results = [_row_formulas(loss) for loss in (_squares, _quartic, _crossentropy)]
    _row, _z2, *_ = _results[2]
    _p = torch.softmax(_z2, -1).detach().requires_grad_()
    (_by_output,) = torch.autograd.grad(-(_y * _p.log()).sum(), _p)
    details(
        mo.md(r"""
    Books often write a single sample as a row $x$, with $W_1$ of shape $d_\text{in} \times d_\text{hidden}$ and $W_2$ of shape
    $d_\text{hidden} \times d_\text{out}$:

    $$\begin{aligned}
    z_1 &= x W_1 + b_1, & h_1 &= \sigma(z_1), \\
    z_2 &= h_1 W_2 + b_2, & \hat y &= z_2 .
    \end{aligned}$$

    Then everything follows from the one row $\partial L/\partial z_2$, whatever the loss:

    $$\begin{aligned}
    \frac{\partial L}{\partial W_2} &= h_1^\top \frac{\partial L}{\partial z_2}, &
    \frac{\partial L}{\partial b_2} &= \frac{\partial L}{\partial z_2}, \\[0.4em]
    \frac{\partial L}{\partial W_1} &= x^\top \frac{\partial L}{\partial b_1}, &
    \frac{\partial L}{\partial b_1} &= \Big(\frac{\partial L}{\partial z_2} W_2^\top\Big) * \sigma'(z_1).
    \end{aligned}$$

    Easily mistaken: $\partial L/\partial z_2 = \partial L/\partial \hat y$ holds only because the output is $z_2$ itself. A
    classifier puts a softmax $p$ ([softmax](../softmax/)) behind $z_2$; with [cross-entropy](../cross_entropy/) against the true class $y$ (a row with a single
    1) the row is $p - y$.
    """),
        claim(
            "BP-11 BP-13 BP-14 E30",
            "For three losses (squares, a quartic with a product, cross-entropy) the four formulas agree with autograd, biases included.",
            all(
                torch.allclose(f, g, atol=1e-12)
                for *_, formulas, found in _results
                for f, g in zip(formulas, found, strict=True)
            ),
        ),
        claim(
            "BP-12 E30",
            r"With the identity output and squares, $\partial L/\partial z_2 = 2(\hat y - y)$. With a softmax output, $\hat y = p$, the row is "
            f"$p - y$ = ({', '.join(f'{v:.3f}' for v in _row[0].tolist())}), while $\\partial L/\\partial \\hat y$ = "
            f"({', '.join(f'{v + 0.0:.3f}' for v in _by_output[0].tolist())}) is something else.",
            torch.allclose(_results[0][0], 2 * (_results[0][1] - _y))
            and torch.allclose(_row, _p - _y)
            and not torch.allclose(_row, _by_output, atol=0.1),
        ),
        title="One sample, any loss",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## From the slope to the network, in one figure

    A slope is one number. With two inputs there are two slopes, an arrow. With a matrix of weights there is one slope per
    weight, a matrix of the same shape. In a network there are several matrices, and the chain rule connects them: values go
    forwards (blue), blame goes backwards (orange).
    """)
    return


@app.cell
def _():
    blue, orange = "#0072b2", "#d55e00"
    forwards = [("X", "Z1"), ("Z1", "A1"), ("A1", "Z2"), ("Z2", "L")]
    backwards = [("L", "δ2"), ("δ2", "δ1"), ("δ2", "∂W2"), ("δ2", "∂b2"), ("δ1", "∂W1"), ("δ1", "∂b1")]  # fmt: skip
    _at = {
        "X": (30, 40), "Z1": (105, 40), "A1": (175, 40), "Z2": (245, 40), "L": (320, 40),
        "δ2": (245, 110), "δ1": (105, 110),
        "∂W2": (215, 180), "∂b2": (280, 180), "∂W1": (75, 180), "∂b1": (140, 180),
    }  # fmt: skip

    def arrow(x1, y1, x2, y2, colour, gap=0.0):
        """A line with an arrowhead, which stops ``gap`` before both ends."""
        length = math.hypot(x2 - x1, y2 - y1)
        dx, dy = (x2 - x1) / length, (y2 - y1) / length
        x1, y1, x2, y2 = x1 + gap * dx, y1 + gap * dy, x2 - gap * dx, y2 - gap * dy
        bx, by = x2 - 9 * dx, y2 - 9 * dy
        return (
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{bx:.1f}" y2="{by:.1f}" stroke="{colour}" stroke-width="2"/>'
            f'<polygon points="{x2:.1f},{y2:.1f} {bx - 4 * dy:.1f},{by + 4 * dx:.1f} {bx + 4 * dy:.1f},{by - 4 * dx:.1f}" '
            f'fill="{colour}"/>'
        )

    def text(x, y, words, size=14):
        return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="middle" fill="currentColor">{words}</text>'

    def panel(title, width, body):
        return (
            f'<svg viewBox="0 0 {width} 205" style="width:{width}px;max-width:100%;height:auto" role="img" '
            f'aria-label="{title}">{text(width // 2, 14, title, 13)}{body}</svg>'
        )

    def grid(x, y, colour):
        cells = (
            f'<rect x="{x + 18 * j}" y="{y + 18 * i}" width="16" height="16" fill="none" stroke="{colour}"/>'
            for i in range(3)
            for j in range(4)
        )
        return "".join(cells)

    def box(x, y, words):
        return (
            f'<rect x="{x - 19}" y="{y - 13}" width="38" height="26" rx="5" fill="none" stroke="currentColor"/>'
            + text(x, y + 5, words)
        )

    _curve = " ".join(f"{20 + 2 * t},{185 - (t - 40) ** 2 / 13:.0f}" for t in range(2, 79, 4))
    slope_panel = panel(
        "1. One input: a slope",
        220,
        f'<polyline points="{_curve}" fill="none" stroke="{blue}" stroke-width="2"/>'
        f'<circle cx="160" cy="116" r="4" fill="{orange}"/>'
        + arrow(160, 116, 138, 167, orange)
        + text(187, 150, "downhill"),
    )
    gradient_panel = panel(
        "2. Two inputs: an arrow",
        220,
        "".join(
            f'<ellipse cx="110" cy="112" rx="{r}" ry="{0.6 * r:.0f}" fill="none" stroke="{blue}"/>'
            for r in (25, 50, 75, 100)
        )
        + arrow(165, 71, 124, 103, orange)
        + text(186, 66, "−∇f"),
    )
    matrix_panel = panel(
        "3. A matrix: a matrix of slopes",
        220,
        grid(20, 70, blue) + grid(130, 70, orange) + text(55, 150, "W") + text(165, 150, "∂L/∂W")
        + text(110, 180, "the same shape", 12),
    )  # fmt: skip
    network_panel = panel(
        "4. A network: chains of them",
        350,
        "".join(arrow(*_at[a], *_at[b], blue, 20) for a, b in forwards)
        + "".join(arrow(*_at[a], *_at[b], orange, 20) for a, b in backwards)
        + "".join(box(*_at[name], name) for name in _at),
    )
    mo.vstack(
        [
            mo.Html(
                '<div style="display:flex;flex-wrap:wrap;gap:1.5em;align-items:flex-end">'
                f"{slope_panel}{gradient_panel}{matrix_panel}{network_panel}</div>"
            ),
            mo.accordion(
                {
                    "Table: the arrows of panel 4": table(
                        [
                            {"from": a, "to": b, "direction": way}
                            for way, edges in (("forwards", forwards), ("backwards", backwards))
                            for a, b in edges
                        ]
                    )
                }
            ),
        ]
    )
    return backwards, forwards, network_panel


@app.cell
def _(backwards, forwards, network_panel):
    # The order in which autograd computes the gradients of the quantities in the figure.
    arrived = []
    _weights = [w.requires_grad_() for w in fresh_weights(4, 5, 3, seed=6)]
    _W1, _b1, _W2, _b2 = _weights
    _Z1 = torch.ones(2, 4, dtype=torch.float64) @ _W1 + _b1
    _Z2 = torch.sigmoid(_Z1) @ _W2 + _b2
    _L = (_Z2**2).sum()
    for _name, _value in (("L", _L), ("δ2", _Z2), ("δ1", _Z1), ("∂W1", _W1), ("∂b1", _b1), ("∂W2", _W2), ("∂b2", _b2)):  # fmt: skip
        _value.register_hook(lambda _, name=_name: arrived.append(name))
    _L.backward()
    _place = {name: k for k, name in enumerate(arrived)}
    claim(
        "BP-16 PD-24 E23",
        f"The orange arrows point as the computation runs. Autograd finished its gradients in the order {', '.join(arrived)}: "
        r"from $\delta_2$ to $\delta_1$, and from $\delta_1$ to the gradients of $W_1$ and $b_1$; never the other way round.",
        all(_place[a] < _place[b] for a, b in backwards)
        and {"δ2", "δ1", "∂W1", "∂b1"} <= set(_place)
        and ("δ2", "δ1") in backwards
        and [a for a, _ in forwards] == ["X", "Z1", "A1", "Z2"]
        and network_panel.count("<polygon") == len(forwards) + len(backwards),
    )
    return


@app.cell
def _():
    _draw = torch.Generator().manual_seed(7)
    _A, _X, _B, _M, _G = (
        torch.randn(*shape, dtype=torch.float64, generator=_draw)
        for shape in ((2, 3), (3, 4), (4, 5), (4, 3), (2, 5))
    )

    def _columns(matrix):
        return matrix.T.reshape(-1)

    _product = _A @ _X @ _B
    by_columns = (
        (torch.kron(_B.T.contiguous(), _A) @ _columns(_X) - _columns(_product)).norm().item()
    )
    by_rows = (torch.kron(_A, _B.T.contiguous()) @ _X.flatten() - _product.flatten()).norm().item()
    mixed = (torch.kron(_B.T.contiguous(), _A) @ _X.flatten() - _product.flatten()).norm().item()
    _through = jacobian(lambda X: (_G * torch.sin(_A @ X @ _B)).sum(), _X)
    _trace = jacobian(lambda X: torch.trace(_M @ X), _X)
    details(
        mo.md(r"""
    Exchange desks: euros become dollars at one desk, dollars become yen at the next. To know what a yen at the end is worth in
    euros at the start, walk back through the desks. A product $Y = A X B$ is two desks, one on each side of $X$, and the way back
    meets them transposed:

    $$Y = A X B: \quad \frac{\partial f}{\partial X} = A^\top \frac{\partial f}{\partial Y} B^\top .$$

    Two more words. The *trace* $\mathrm{tr}$ is the sum of the diagonal. $\mathrm{vec}$ writes a matrix as one long column, and there are two
    ways to read it off: column after column, or row after row as torch's `flatten` does. The *Kronecker product* $A \otimes B$ is the
    large matrix of all products of an entry of $A$ with an entry of $B$. $\nabla_X$ is the matrix of the slopes in the entries of $X$.

    $$\begin{aligned}
    \nabla_X \mathrm{tr}(A X) &= A^\top, \\
    \nabla_X \|X\|_F^2 &= 2X, \\
    \mathrm{tr}(A B) &= \mathrm{vec}(A^\top)^\top \mathrm{vec}(B), \\
    \text{by columns:} \quad \mathrm{vec}(A X B) &= (B^\top \otimes A)\, \mathrm{vec}(X), \\
    \text{by rows:} \quad \mathrm{vec}(A X B) &= (A \otimes B^\top)\, \mathrm{vec}(X).
    \end{aligned}$$

    $\|X\|_F^2$ is the sum of the squares of all entries.
    """),
        claim(
            "DV-06",
            r"For a function of $Y = AXB$, autograd gives $A^\top (\partial f/\partial Y) B^\top$.",
            torch.allclose(_through, _A.T @ (_G * torch.cos(_product)) @ _B.T),
        ),
        claim(
            "DV-07 DV-08 PD-08",
            r"$\nabla_X \mathrm{tr}(AX) = A^\top$, and $\nabla_X \|X\|_F^2 = 2X$.",
            torch.allclose(_trace, _M.T)
            and torch.allclose(jacobian(lambda X: (X**2).sum(), _X), 2 * _X),
        ),
        claim(
            "DV-09",
            f"$\\mathrm{{tr}}(AB) = {torch.trace(_M @ _X):.4f}$, and so is the product of the two long vectors, in either order of reading.",
            torch.isclose(torch.trace(_M @ _X), _columns(_M.T) @ _columns(_X))
            and torch.isclose(torch.trace(_M @ _X), _M.T.flatten() @ _X.flatten()),
        ),
        claim(
            "DV-10 E75",
            f"By columns $B^\\top \\otimes A$ is off by {by_columns:.0e}, by rows $A \\otimes B^\\top$ by {by_rows:.0e}. The first formula "
            f"with torch's `flatten` is off by {mixed:.1f}: it fits in shape and is wrong. Say which order you mean.",
            by_columns < 1e-12 and by_rows < 1e-12 and mixed > 1,
        ),
        title="Five tools for matrices",
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            *One weight.* Take one sample, one hidden unit, one output: $\hat y = w_2\, \sigma(w_1 x)$ and $L = (\hat y - y)^2$. Move
            $\hat y$ a little, by $\varepsilon$: $L$ grows by $2(\hat y - y)\,\varepsilon$ (and $\varepsilon^2$, which is tiny). That is
            $\delta_2$ times $\varepsilon$. Move $w_2$ by $\varepsilon$: $\hat y$ moves by $\varepsilon$ times $\sigma(w_1 x)$, so $L$ by
            $\delta_2\, \sigma(w_1 x)\, \varepsilon$. *Blame times what came in.*
            Move the sum $w_1 x$ by $\varepsilon$: the activation moves by its slope times $\varepsilon$, $\hat y$ by $w_2$ times that: $\delta_1 =
            \delta_2\, w_2\, \sigma'$. Move $w_1$: the sum moves by $x\,\varepsilon$, so $L$ by $\delta_1\, x\, \varepsilon$. Blame times what
            came in, again.

            *Many.* With several outputs, a hidden unit gets blame from each, through the weight between them, and adds it up: that is
            the product with $W_2^\top$. With several samples, average.""",
        undergraduate=r"""
            Write $dL = \langle G, dZ \rangle$ with $\langle U, V \rangle = \mathrm{tr}(U^\top V)$, so that $G = \partial L/\partial Z$. For $Z_2 = A_1 W_2 + \mathbf 1
            b_2$: $dZ_2 = dA_1 W_2 + A_1 dW_2 + \mathbf 1\, db_2$, hence $\langle G_2, A_1 dW_2 \rangle = \langle A_1^\top G_2, dW_2
            \rangle$, $\langle G_2, \mathbf 1\, db_2\rangle = \langle \mathbf 1^\top G_2, db_2 \rangle$ and $\langle G_2, dA_1 W_2\rangle = \langle G_2 W_2^\top,
            dA_1\rangle$. With $dA_1 = \sigma'(Z_1) * dZ_1$, $G_1 = (G_2 W_2^\top) * \sigma'(Z_1)$. Here $G = \delta/N$. The
            other identities are the same move: $\langle G, A\,dX\,B\rangle = \langle A^\top G B^\top, dX \rangle$. For softmax and
            cross-entropy, $L = \log \sum_j e^{z_j} - z_k$ with $k$ the true class, so $\partial L/\partial z = p - y$.""",
        research=r"""
            Reverse mode computes $J_1^\top J_2^\top \cdots J_n^\top g$ from the right, one vector-Jacobian product per operation: a
            scalar's whole gradient for a small multiple of the cost of the value, whatever the number of weights (Baur and Strassen
            1983), at the price of keeping the activations; checkpointing trades some of it back. Forward mode has the opposite
            order and suits few inputs. The rule is independent of coordinates: it is the pull-back of covectors, which is why
            transposes appear and no inverses. In `fenchel`, attention carries its own hand-written rule in both directions
            (`fenchel.attend_jvp`), derived the same way and tested against autograd.""",
    )
    return


@app.cell
def _():
    def check(names):
        gradients = names["gradients"]
        draw = torch.Generator().manual_seed(11)
        X, Y, W1, b1, W2, b2 = (
            torch.randn(*shape, dtype=torch.float64, generator=draw)
            for shape in ((7, 3), (7, 2), (3, 4), (4,), (4, 2), (2,))
        )

        def loss(W1, b1, W2, b2):
            return ((torch.tanh(X @ W1 + b1) @ W2 + b2 - Y) ** 2).sum() / len(X)

        expected = jacobian(loss, (W1, b1, W2, b2))
        found = gradients(X, Y, W1, b1, W2, b2)
        assert len(found) == 4, "Return four gradients: dW1, db1, dW2, db2."
        hints = {
            "dW2": "Is the factor 2 of the loss there, and the division by N?",
            "db2": "Add delta2 over the samples and divide by N.",
            "db1": "delta1 is (delta2 @ W2.T) times the slope of tanh at Z1, which is 1 - A1**2.",
            "dW1": "It is X.T @ delta1 / N.",
        }
        by_name = dict(
            zip(("dW1", "db1", "dW2", "db2"), zip(found, expected, strict=True), strict=True)
        )
        for name, hint in hints.items():
            mine, right = by_name[name]
            assert mine.shape == right.shape, (
                f"{name} should have the shape of its variable, {tuple(right.shape)}."
            )
            assert torch.allclose(mine, right), f"{name} differs from autograd. {hint}"

    exercise = Exercise(
        lesson="backpropagation",
        task="Write the backward pass of a tanh network for the loss `((Y - Yhat) ** 2).sum() / N`. "
        "The starter has the right outline; two factors are missing. In code `@` is the product of matrices, `*` that of entries, "
        "`.T` the transpose and `.sum(0)` the sum over the rows.",
        starter="""
    def gradients(X, Y, W1, b1, W2, b2):
        N = len(X)
        A1 = torch.tanh(X @ W1 + b1)
        Yhat = A1 @ W2 + b2
        delta2 = Yhat - Y
        delta1 = delta2 @ W2.T
        return X.T @ delta1 / N, delta1.sum(0) / N, A1.T @ delta2 / N, delta2.sum(0) / N
    """,
        solution="""
    def gradients(X, Y, W1, b1, W2, b2):
        N = len(X)
        A1 = torch.tanh(X @ W1 + b1)
        Yhat = A1 @ W2 + b2
        delta2 = 2 * (Yhat - Y)
        delta1 = (delta2 @ W2.T) * (1 - A1**2)
        return X.T @ delta1 / N, delta1.sum(0) / N, A1.T @ delta2 / N, delta2.sum(0) / N
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
    own = fenchel.load(run_path, dtype=torch.float64)
    _text = "we the people of the united states"
    ids = torch.tensor([own.tokenizer.encode_whole(_text)[: own.config.context]])
    order, blame = [], {}
    _handles = []
    for _number, _block in enumerate(own.model.blocks):

        def _watch(_module, _inputs, output, number=_number):
            def arrive(gradient):
                order.append(number)
                blame[number] = gradient.norm().item()

            (output[0] if isinstance(output, tuple) else output).register_hook(arrive)

        _handles.append(_block.register_forward_hook(_watch))
    logits = own.model(ids[:, :-1])
    logits.retain_grad()
    torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]).backward()
    for _handle in _handles:
        _handle.remove()
    _count = ids.shape[1] - 1
    _widest = max(
        (w for w in own.model.parameters() if w.grad is not None),
        key=lambda w: w.grad.abs().max().item(),
    )
    _entry = _widest.grad.abs().argmax()
    steepest = _widest.grad.flatten()[_entry]

    @torch.no_grad()
    def loss_with(change):
        # One weight is moved and put back.
        flat = _widest.view(-1)
        flat[_entry] += change
        value = torch.nn.functional.cross_entropy(own.model(ids[:, :-1])[0], ids[0, 1:]).item()
        flat[_entry] -= change
        return value

    felt = (loss_with(1e-5) - loss_with(-1e-5)) / 2e-5
    p_minus_y = torch.softmax(logits[0].detach(), -1)
    p_minus_y[torch.arange(_count), ids[0, 1:]] -= 1
    mo.vstack(
        [
            mo.md(
                f"Your model on *{_text}*, {_count} predictions. The bars show how much blame (the length of $\\partial L/\\partial$ of the output "
                "of a layer) arrives at each layer. It starts on the right and travels to the left."
            ),
            bar_chart(
                [{"layer": str(n + 1), "length of the gradient": blame[n]} for n in sorted(blame)],
                "layer",
                "length of the gradient",
                title="Blame that arrives at each layer of your model",
            ),
            claim(
                "BP-12 E30",
                "At the *logits*, the scores that enter the last softmax, the error of your model is $(p - y)/N$, as for every softmax with cross-entropy.",
                torch.allclose(logits.grad[0], p_minus_y / _count, atol=1e-10),
            ),
            details(
                claim(
                    "E23 BP-16",
                    f"The gradients arrived in the order: layer {', '.join(str(n + 1) for n in order)}.",
                    order == sorted(order, reverse=True) and len(order) == len(own.model.blocks),
                ),
                claim(
                    "DV-04",
                    "Every weight has its own slope. For the weight with the steepest one, backpropagation says "
                    f"{steepest.item():.6f}; two measurements beside it give {felt:.6f}.",
                    math.isclose(steepest.item(), felt, rel_tol=1e-3),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        r"The formulas hold for this loss and this output: another average ($\frac1{2N}$, or over outputs as well) changes "
        r"every factor, another output changes $\delta_2$. Transposing assumes rows as samples; with columns as samples every product "
        r"is mirrored. ReLU has no slope at 0, and programs choose 0 there. And a correct gradient may still be useless: where a sigmoid is nearly "
        r"flat, $\sigma' \le \frac14$ is nearly 0, and after many such layers little blame arrives."
    )
    return


@app.cell
def _():
    footer("backpropagation")
    return


if __name__ == "__main__":
    app.run()
