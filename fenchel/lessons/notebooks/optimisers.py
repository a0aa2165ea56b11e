"""Optimisers, schedules and clipping: Adam, weight decay, warm-up, decay of the rate."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Optimisers, schedules and clipping",
)

with app.setup:
    import math
    from itertools import pairwise

    import marimo as mo
    import torch

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
    from fenchel.optim import (
        adam_l2,
        adamw,
        beta2_warmup,
        clip_,
        constant,
        inverse_sqrt,
        sgd,
        warmup_cosine,
        warmup_hold,
    )


@app.cell
def _():
    header("optimisers")
    return


@app.cell
def _():
    guess = question(
        "Two weights get a steady gradient, one of 1, the other of a millionth. How much smaller is Adam's step for the second?",
        ["a million times", "a thousand times", "hardly smaller at all"],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "hardly smaller at all",
        "Adam divides each gradient by its own usual size. What shortens a step is disagreement: gradients that change "
        "from batch to batch.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Adam: each weight in its own units

    You hike with maps in feet, metres and fathoms, and nobody says which is which. A slope of 300 may be steep or flat. Look
    instead at how today's slope compares with the slopes *this map* usually shows: divided by its usual size, every map speaks of the
    same thing. Adam does this for each weight. It keeps two running averages of the gradient $g$, one of $g$ itself
    and one of its square:

    $$\begin{aligned}
    m &\leftarrow \beta_1 m + (1 - \beta_1)\, g, & \hat m &= m / (1 - \beta_1^t), \\
    v &\leftarrow \beta_2 v + (1 - \beta_2)\, g^2, & \hat v &= v / (1 - \beta_2^t),
    \end{aligned}$$

    $$\theta \leftarrow \theta - \eta\, \frac{\hat m}{\sqrt{\hat v} + \varepsilon} .$$

    $\theta$ is the weight, $t$ counts the steps from 1, $\eta$ is the learning rate; $\beta_1 = 0.9$, $\beta_2 = 0.999$ and
    $\varepsilon = 10^{-8}$ by custom. The averages start at 0, so at first they are too small; dividing by $1 - \beta^t$ corrects
    exactly that. Choose a size and a noise for the gradients of a thousand weights:
    """)
    return


@app.cell
def _():
    noise = mo.ui.slider(
        steps=[0.0, 0.25, 0.5, 1.0, 2.0, 3.0],
        value=0.5,
        label="Noise $s$, relative to the mean",
        show_value=True,
    )
    size = mo.ui.slider(
        steps=[1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3],
        value=1.0,
        label="Size of the gradient",
        show_value=True,
    )
    mo.vstack([noise, size])
    return noise, size


@app.function
def adam_moves(gradients, rate=1.0, beta1=0.9, beta2=0.999, epsilon=1e-8, corrected=True):
    """The moves of Adam, written out, for a list of gradients (numbers or tensors)."""
    m = v = 0.0
    moves = []
    for t, g in enumerate(gradients, start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        mh = m / (1 - beta1**t) if corrected else m
        vh = v / (1 - beta2**t) if corrected else v
        moves.append(rate * mh / (vh**0.5 + epsilon))
    return moves


@app.cell
def _(noise, size):
    def _mean_step(s):
        draw = torch.Generator().manual_seed(0)
        gradients = size.value * (
            1 + s * torch.randn(300, 1000, dtype=torch.float64, generator=draw)
        )
        return torch.stack(adam_moves(gradients)[200:]).mean().item()

    _measured = {s: _mean_step(s) for s in (0.0, 0.25, 0.5, 1.0, 2.0, 3.0)}
    mean_step = _measured[noise.value]
    _theory = 1 / math.sqrt(1 + noise.value**2)
    mo.vstack(
        [
            line_chart(
                [
                    {"noise": s, "mean step in units of the rate": step, "line": name}
                    for name, steps in (
                        ("measured", _measured),
                        ("theory", {k / 10: 1 / math.sqrt(1 + k * k / 100) for k in range(31)}),
                    )
                    for s, step in steps.items()
                ],
                "noise",
                "mean step in units of the rate",
                "line",
                title=f"Gradients of size {size.value:g} with noise {noise.value:g}: mean step {mean_step:.3f}",
                y_range=(0, 1.1),
                here=[{"noise": noise.value, "mean step in units of the rate": mean_step}],
            ),
            claim(
                "OP-11 E68",
                f"The mean step is {mean_step:.4f} rates; theory says $1/\\sqrt{{1 + s^2}} = {_theory:.4f}$, whatever the size.",
                math.isclose(mean_step, _theory, rel_tol=0.03),
            ),
        ]
    )
    return


@app.cell
def _():
    steady = {c: adam_moves([c] * 40) for c in (1e-3, 1.0, 1e3)}
    raw = adam_moves([1.0] * 40, corrected=False)
    millionth = adam_moves([1e-6] * 40)
    _formula = [(1 - 0.9**t) / math.sqrt(1 - 0.999**t) for t in range(1, 41)]
    mo.vstack(
        [
            line_chart(
                [
                    {"step": t, "step in units of the rate": x, "averages": name}
                    for name, steps in (("corrected", steady[1.0]), ("as they are", raw))
                    for t, x in enumerate(steps, start=1)
                ],
                "step",
                "step in units of the rate",
                "averages",
                title="A constant gradient: Adam's steps with and without bias correction",
            ),
            details(
                claim(
                    "OP-11 E68",
                    r"$v$ measures how *large* gradients are, not how much they change: constant gradients of $10^{-3}$, 1 and $10^3$ all give "
                    f"steps of {steady[1e-3][0]:.3f}, {steady[1.0][0]:.3f} and {steady[1e3][0]:.3f} rates. A millionth still gives {millionth[0]:.2f}; the missing "
                    r"hundredth is the $\varepsilon$ below the fraction.",
                    all(
                        math.isclose(x, 1.0, rel_tol=1e-4)
                        for steps in steady.values()
                        for x in steps
                    )
                    and all(math.isclose(x, 1 / 1.01, rel_tol=1e-6) for x in millionth),
                ),
                claim(
                    "OP-10 E68",
                    f"Without the correction the first step would be {raw[0]:.2f} rates and the {raw.index(max(raw)) + 1}th "
                    f"{max(raw):.2f}. With it the first step is one full rate: the correction prevents a leap, it is not a cautious start.",
                    round(raw[0], 2) == 3.16
                    and round(max(raw), 2) == 6.57
                    and raw.index(max(raw)) + 1 == 12
                    and all(
                        math.isclose(a, b, rel_tol=1e-6) for a, b in zip(raw, _formula, strict=True)
                    )
                    and abs(steady[1.0][0] - 1) < 1e-6,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Schedules: pull out, drive, brake

    You do not start a car at full speed, and you brake before you park. *Warm-up*: the averages of Adam mean little after few
    gradients, so begin with short steps. *Decay*: near the end the noise of the batches keeps the weights shaking, and shorter
    steps let them settle. With $T_w$ steps of warm-up, $T$ steps in all and the highest rate $\eta_{\max}$:

    $$\begin{aligned}
    \text{warm-up:} \quad & \eta_{\max} \min(t / T_w, 1) \\
    \text{cosine:} \quad & \eta_{\max} \tfrac12 \Big(1 + \cos \pi \tfrac{t - T_w}{T - T_w}\Big) \\
    \text{original:} \quad & d^{-1/2} \min(t^{-1/2},\; t\, T_w^{-3/2})
    \end{aligned}$$

    The cosine holds for $T_w \le t \le T$. The last one is that of the first Transformer; $d$ is the width of the model.
    """)
    return


@app.cell
def _():
    share = mo.ui.slider(
        steps=[0, 2, 5, 10, 20, 40], value=10, label="Steps of warm-up, of 100", show_value=True
    )
    share
    return (share,)


@app.cell
def _(share):
    schedules = {
        "constant": constant(),
        "cosine": warmup_cosine(share.value, 100),
        "plateau, then linear": warmup_hold(share.value, 100),
        "original": inverse_sqrt(share.value),
    }
    _values = {name: [factor(t) for t in range(101)] for name, factor in schedules.items()}
    _w = share.value
    mo.vstack(
        [
            line_chart(
                [
                    {"step": t, "rate over its peak": x, "schedule": name}
                    for name, values in _values.items()
                    for t, x in enumerate(values)
                ],
                "step",
                "rate over its peak",
                "schedule",
                title=f"Four schedules with {_w} steps of warm-up",
                y_range=(0, 1.05),
            ),
            claim(
                "OP-17 OP-18 OP-19 OP-22",
                "The rate rises in equal steps to its peak, then follows the cosine down to 0, without a jump where the two meet.",
                all(math.isclose(_values["cosine"][t], (t + 1) / _w) for t in range(_w))
                and all(
                    math.isclose(
                        _values["cosine"][t],
                        0.5 * (1 + math.cos(math.pi * (t - _w) / (100 - _w))),
                        abs_tol=1e-12,
                    )
                    for t in range(_w, 101)
                )
                and all(
                    abs(b - a) <= max(1 / max(_w, 1), 0.03) + 1e-12
                    for a, b in pairwise(_values["cosine"][max(_w - 1, 0) :])
                )
                and all(max(values) <= 1 + 1e-12 for values in _values.values()),
            ),
        ]
    )
    return


@app.cell
def _():
    _T, _Tw = 100, 10

    def _printed(t):
        """The formula of the cosine, used for every t."""
        return 0.5 * (1 + math.cos(math.pi * (t - _Tw) / (_T - _Tw)))

    _cosine = warmup_cosine(_Tw, _T)
    _floor = warmup_cosine(_Tw, _T, final=0.1)

    def _original(t, d=512, Tw=4000):
        return d**-0.5 * min(t**-0.5, t * Tw**-1.5)

    _peak = max(_original(t) for t in range(1, 20000))
    _ours = inverse_sqrt(4000)
    try:
        _original(0)
        _undefined = False
    except ZeroDivisionError:
        _undefined = True
    beta2 = beta2_warmup(2000)
    _windows = [1 / (1 - beta2(t)) for t in (0, 1000, 2000, 5000)]
    mo.vstack(
        [
            mo.md("### Where the formulas end"),
            details(
                claim(
                    "OP-18 E69",
                    f"Counted from $t = 0$, the warm-up begins with a rate of 0, a wasted step; here it begins with $1/T_w = {_cosine(0):g}$. "
                    f"Past $T$ the cosine would rise again, to {_printed(2 * _T - _Tw):g} at $2T - T_w$; here it stays at {_cosine(2 * _T - _Tw):g}, "
                    f"or at a smallest rate that you choose, such as {_floor(500):g}.",
                    min(0 / _Tw, 1) == 0
                    and _cosine(0) == 0.1
                    and _printed(2 * _T - _Tw) == 1.0
                    and _cosine(2 * _T - _Tw) == _cosine(_T) == 0.0
                    and math.isclose(_floor(500), 0.1),
                ),
                claim(
                    "OP-20 E70",
                    f"The original schedule peaks at $t = T_w$: {_peak:.3e} for width 512 and 4,000 steps of warm-up. At $t = 0$ it is undefined; "
                    "here steps count from 0 and it starts at $t + 1$. It is one option among others: today's large models mostly use warm-up and cosine, "
                    "or a plateau and a linear end.",
                    f"{_peak:.3e}" == "6.988e-04"
                    and math.isclose(_original(4000), _peak)
                    and _undefined
                    and all(
                        math.isclose(_ours(t) * _peak, _original(t + 1))
                        for t in (0, 100, 3999, 9999)
                    ),
                ),
                claim(
                    "OP-15 E25",
                    r"$\beta_2$ can be warmed up too. It *rises*, from 0.99 to 0.999, because 0.99 is the smaller number: the averaging window "
                    rf"$1/(1 - \beta_2)$ grows from {_windows[0]:.0f} steps to {_windows[2]:.0f}. Early gradients, which change fast, are forgotten sooner. "
                    "That it helps is an experience, and not a theorem.",
                    [round(beta2(t), 3) for t in (0, 2000, 5000)] == [0.99, 0.999, 0.999]
                    and all(beta2(t + 1) >= beta2(t) for t in range(3000))
                    and [round(w) for w in _windows] == [100, 550, 1000, 1000],
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Clipping: a speed limit

    One strange batch can give a gradient a hundred times too long. A speed limiter changes how fast you go and not where:

    $$g \leftarrow g \cdot \min\Big(1, \frac{c}{\|g\|}\Big).$$

    $\|g\|$ is the length of the gradient of *all* parameters together, $c$ the limit.
    """)
    return


@app.cell
def _():
    limit = mo.ui.slider(
        steps=[1.0, 5.0, 20.0, 50.0, 100.0], value=5.0, label="Limit $c$", show_value=True
    )
    limit
    return (limit,)


@app.cell
def _(limit):
    def _with_gradients(*gradients):
        parameters = []
        for g in gradients:
            p = torch.nn.Parameter(torch.zeros(len(g), dtype=torch.float64))
            p.grad = torch.tensor(g, dtype=torch.float64)
            parameters.append(p)
        return parameters

    def _joined(parameters):
        return torch.cat([p.grad for p in parameters])

    _both = _with_gradients([30.0, 0.0], [-40.0])
    _before = _joined(_both)
    _norm = clip_(_both, limit.value)
    _after = _joined(_both)
    _worked = _with_gradients([30.0, 0.0], [-40.0])
    clip_(_worked, 5.0)
    _zero = _with_gradients([0.0, 0.0])
    _bad = _with_gradients([3.0, 4.0], [math.nan])
    _norms = clip_(_zero, 5.0), clip_(_bad, 5.0)
    try:
        min(1, 5.0 / 0.0)
        _fails = False
    except ZeroDivisionError:
        _fails = True
    mo.vstack(
        [
            line_chart(
                [
                    {"first entry": x, "last entry": y, "line": name}
                    for name, line in (
                        ("after clipping", [(0.0, 0.0), (_after[0].item(), _after[2].item())]),
                        ("before", [(0.0, 0.0), (_before[0].item(), _before[2].item())]),
                        (
                            f"length {limit.value:g}",
                            [
                                (limit.value * math.cos(t / 20), -limit.value * math.sin(t / 20))
                                for t in range(32)
                            ],
                        ),
                    )
                    for x, y in line
                ],
                "first entry",
                "last entry",
                "line",
                title="The gradient as an arrow, before and after",
                x_range=(-5, 50),
                y_range=(-50, 5),
                here=[{"first entry": _after[0].item(), "last entry": _after[2].item()}],
                square=True,
            ),
            table(
                [
                    {"parameter": name, "before": b, "after": a}
                    for name, b, a in zip(
                        ("first, entry 1", "first, entry 2", "second"),
                        _before.tolist(),
                        _after.tolist(),
                        strict=True,
                    )
                ]
            ),
            claim(
                "OP-23",
                f"Two parameters, one norm: {_norm:g} before, {_after.norm():.4g} after a limit of {limit.value:g}. The direction stays.",
                math.isclose(_norm, 50.0)
                and math.isclose(_after.norm().item(), min(50.0, limit.value), rel_tol=1e-6)
                and torch.isclose(
                    torch.nn.functional.cosine_similarity(_before, _after, dim=0),
                    _before.new_tensor(1.0),
                ),
            ),
            details(
                claim(
                    "OP-24",
                    f"A norm of 50 and a limit of 5 give the factor {(_joined(_worked) / _before)[0]:.4f}.",
                    torch.allclose(_joined(_worked), 0.1 * _before, rtol=1e-6),
                ),
                claim(
                    "E71",
                    "Two cases need a guard. A gradient of 0 would divide by 0: it stays 0. A norm that is not a number cannot be repaired by a factor: "
                    f"`clip_` returns {_norms[1]} and touches nothing, so that the trainer can skip the step and name the parameter.",
                    _fails
                    and _norms[0] == 0.0
                    and torch.equal(_joined(_zero), torch.zeros(2, dtype=torch.float64))
                    and math.isnan(_norms[1])
                    and _bad[0].grad.tolist() == [3.0, 4.0],
                ),
            ),
        ]
    )
    return


@app.function
def bumpy(theta):
    """A gradient that is no multiple of theta and changes with it."""
    return torch.sin(3 * theta) + 0.3 * theta + 0.1


@app.function
def by_library(rule, steps=50, gradient=bumpy, start=(0.7, -1.3, 2.0), **settings):
    """Where an optimiser of the library ends."""
    theta = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimiser = rule([theta], **settings)
    for _ in range(steps):
        theta.grad = gradient(theta.detach())
        optimiser.step()
    return theta.detach()


@app.function
def by_formula(decay, place, rate=0.05, steps=50):
    """The same by hand; the decay goes "inside" the averages, "beside" them, or "outside"."""
    theta = torch.tensor([0.7, -1.3, 2.0], dtype=torch.float64)
    m = v = torch.zeros_like(theta)
    for t in range(1, steps + 1):
        g = bumpy(theta) + (decay * theta if place == "inside" else 0.0)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        move = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        if place == "outside":
            theta = (1 - rate * decay) * theta - rate * move
        elif place == "beside":
            theta = theta - rate * (move + decay * theta)
        else:
            theta = theta - rate * move
    return theta


@app.cell
def _():
    mo.md(r"""
    ## Weight decay: a rubber band

    A model with too much freedom learns its examples by heart, noise included. Tie a rubber band from every weight to 0: only weights
    that the data pull again and again stay large. Let $\lambda$ be the strength of the band. For plain descent there is one way to
    write it. Adding $\frac\lambda2 \|\theta\|^2$ (half of $\lambda$ times the sum of the squared weights) to the loss adds
    $\lambda\theta$ to the gradient, and a step first shrinks the weight by the share $\eta\lambda$. For Adam there are two ways, and they are two methods
    ($\nabla L$ is the gradient of the loss):

    $$\begin{aligned}
    \text{Adam with L2:} \quad & g = \nabla L + \lambda\theta \;\text{ enters } m \text{ and } v \\
    \text{AdamW:} \quad & \theta \leftarrow (1 - \eta\lambda)\,\theta - \eta\, \frac{\hat m}{\sqrt{\hat v} + \varepsilon}
    \end{aligned}$$

    In the first, the band is divided by $\sqrt{\hat v}$ like everything else: a weight with large gradients hardly feels it. In
    AdamW every weight feels the same.
    """)
    return


@app.cell
def _():
    _inside, _outside, _beside = (by_formula(0.3, p) for p in ("inside", "outside", "beside"))
    _plain = by_library(adamw, lr=0.05)
    _l2 = by_library(adam_l2, lr=0.05, weight_decay=0.3)
    _w = by_library(adamw, lr=0.05, weight_decay=0.3)

    def _kept(rule, size):
        signs = iter([1.0, -1.0] * 50)
        return by_library(
            rule,
            100,
            lambda x: size * next(signs) * torch.ones_like(x),
            (3.0,),
            lr=0.001,
            weight_decay=1.0,
        ).item()

    kept = {
        (rule.__name__, size): _kept(rule, size)
        for rule in (adamw, adam_l2)
        for size in (1.0, 100.0)
    }
    _shrunk = by_library(sgd, gradient=torch.zeros_like, lr=0.1, weight_decay=0.5, steps=10)
    mo.vstack(
        [
            claim(
                "OP-12 OP-13",
                "With decay $0.3$: the formula with $\\lambda\\theta$ inside the averages is `adam_l2`, the one outside is `adamw`.",
                torch.allclose(_inside, _l2, atol=1e-12)
                and torch.allclose(_outside, _w, atol=1e-12),
            ),
            table(
                [
                    {
                        "rule": rule,
                        "size of the gradients": size,
                        "weight after 100 steps, from 3": x,
                    }
                    for (rule, size), x in kept.items()
                ]
            ),
            details(
                claim(
                    "OP-09",
                    "Adam written out and `fenchel.optim.adamw` without decay agree after 50 steps on three weights.",
                    torch.allclose(by_formula(0.0, "inside"), _plain, atol=1e-12),
                ),
                claim(
                    "E24",
                    r"Easily mistaken: $\theta - \eta\,(\hat m/(\sqrt{\hat v} + \varepsilon) + \lambda\theta)$ looks like L2 but is AdamW with its "
                    f"terms collected (largest difference {(_beside - _outside).abs().max():.0e}). True L2 ends elsewhere, "
                    f"{(_inside - _outside).abs().max():.3f} away.",
                    (_beside - _outside).abs().max() < 1e-12
                    and (_inside - _outside).abs().max() > 0.05,
                ),
                claim(
                    "OP-14",
                    "Gradients that alternate in sign pull nowhere; only the decay is left. AdamW takes "
                    f"{3 - kept['adamw', 1.0]:.3f} off a weight of 3 with gradients of size 1 and {3 - kept['adamw', 100.0]:.3f} at size 100. "
                    f"With L2 it is {3 - kept['adam_l2', 1.0]:.3f} and {3 - kept['adam_l2', 100.0]:.3f}.",
                    math.isclose(kept["adamw", 1.0], kept["adamw", 100.0], rel_tol=1e-4)
                    and 3 - kept["adam_l2", 100.0] < 0.1 * (3 - kept["adam_l2", 1.0]),
                ),
                claim(
                    "RG-11",
                    "Without any gradient, plain descent with decay 0.5 and rate 0.1 multiplies a weight by $0.95$ per step.",
                    torch.allclose(
                        _shrunk, torch.tensor([0.7, -1.3, 2.0], dtype=torch.float64) * 0.95**10
                    ),
                ),
            ),
        ]
    )
    return


@app.function
def small_run(factor, seed=0, rate=1e-2, steps=100):
    """AdamW on a small transformer whose text counts in Fibonacci's way modulo 16: RMS of the updates, losses."""
    draw = torch.Generator().manual_seed(seed)
    config = fenchel.ModelConfig(vocabulary=16, width=32, layers=1, heads=2, context=10)
    model = fenchel.Transformer(config, generator=draw)
    weights = list(model.parameters())
    optimiser = adamw(weights, lr=rate)
    sizes, losses = [], []
    for step in range(steps):
        ids = torch.randint(16, (16, 10), generator=draw)
        for k in range(2, 10):
            ids[:, k] = (ids[:, k - 1] + ids[:, k - 2]) % 16
        logits = model(ids[:, :-1])[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten())
        optimiser.zero_grad()
        loss.backward()
        before = torch.nn.utils.parameters_to_vector(weights).detach()
        pulled = torch.cat([w.grad.flatten() for w in weights]).abs() > 1e-6
        optimiser.param_groups[0]["lr"] = rate * factor(step)
        optimiser.step()
        moved = torch.nn.utils.parameters_to_vector(weights).detach() - before
        sizes.append((moved[pulled] / rate).square().mean().sqrt().item())
        losses.append(loss.item())
    return sizes, losses


@app.cell
def _():
    runs = {
        "constant, no warm-up": small_run(constant()),
        "warm-up, then constant": small_run(warmup_hold(30, 10**6)),
        "warm-up and cosine": small_run(warmup_cosine(30, 100)),
        "original": small_run(inverse_sqrt(30)),
    }
    _end = {name: sum(losses[-10:]) / 10 for name, (_, losses) in runs.items()}
    bare, warm = runs["constant, no warm-up"], runs["warm-up, then constant"]
    mo.vstack(
        [
            mo.md(r"""
            ## The first steps of a real model

            A transformer with one layer learns a sequence in which each token is the sum of the two before it, modulo 16. AdamW, rate
            0.01, 100 steps, four schedules; the loss is in nats, the unit of surprise with natural logarithms. After a single gradient $\hat m / \sqrt{\hat v}$ is just its sign, so *every* weight moves by the whole
            rate, all at once. Later gradients disagree and updates shrink by themselves.
            """),
            line_chart(
                [
                    {"step": t, "RMS of the update over the rate": x, "schedule": name}
                    for name, (sizes, _) in runs.items()
                    for t, x in enumerate(sizes)
                ],
                "step",
                "RMS of the update over the rate",
                "schedule",
                title="Update sizes (root mean square over the weights that have a gradient)",
            ),
            line_chart(
                [
                    {"step": t, "loss in nats": x, "schedule": name}
                    for name, (_, losses) in runs.items()
                    for t, x in enumerate(losses)
                    if t % 2 == 0
                ],
                "step",
                "loss in nats",
                "schedule",
                title="Loss under four schedules",
            ),
            claim(
                "OP-27",
                f"Without warm-up the first update is {bare[0][0]:.3f} rates, the largest of all; the last ten average {sum(bare[0][-10:]) / 10:.2f}. With 30 steps of "
                f"warm-up it is {warm[0][0]:.3f}, and none exceeds {max(warm[0]):.2f}.",
                math.isclose(bare[0][0], 1.0, abs_tol=0.02)
                and max(bare[0]) <= bare[0][0] + 1e-3
                and sum(bare[0][-10:]) / 10 < 0.5
                and math.isclose(warm[0][0], 1 / 30, abs_tol=0.002)
                and max(warm[0]) < 0.7,
            ),
            details(
                claim(
                    "OP-21 OP-27",
                    f"The early leap costs something here: mean loss of the last ten steps {_end['constant, no warm-up']:.2f} without warm-up, and "
                    f"{_end['warm-up, then constant']:.2f}, {_end['warm-up and cosine']:.2f} and {_end['original']:.2f} for the three schedules with it (constant, cosine, original). "
                    "Warm-up won with all five seeds that were tried. The three differ less among themselves, and 100 steps say nothing about long runs.",
                    all(
                        _end[name] < _end["constant, no warm-up"] - 0.1
                        for name in runs
                        if name != "constant, no warm-up"
                    ),
                ),
            ),
        ]
    )
    return


@app.function
def errors_after_decay(rule, decays, *, uneven, seed=0, problems=8):
    """Error on new data (decays, problems) of linear fits with more weights than examples."""
    n, d, steps, rate = 40, 60, 300, 0.05
    draw = torch.Generator().manual_seed(seed)
    scale = (
        torch.logspace(-1, 1, d, dtype=torch.float64)
        if uneven
        else torch.ones(d, dtype=torch.float64)
    )
    X = torch.randn(problems, n, d, dtype=torch.float64, generator=draw) * scale
    w = torch.randn(problems, d, dtype=torch.float64, generator=draw) / scale
    Y = (X @ w[..., None]) + torch.randn(problems, n, 1, dtype=torch.float64, generator=draw)
    gram, cross = 2 / n * X.mT @ X, 2 / n * X.mT @ Y
    fits = [torch.nn.Parameter(torch.zeros_like(w)) for _ in decays]
    groups = [{"params": [p], "weight_decay": each} for each, p in zip(decays, fits, strict=True)]
    optimiser = rule(groups, lr=rate)
    factor = warmup_cosine(20, steps)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * factor(step)
        for p in fits:
            p.grad = torch.baddbmm(-cross, gram, p.detach()[..., None])[..., 0]
        optimiser.step()
    return torch.stack([(((p.detach() - w) * scale) ** 2).sum(-1) for p in fits])


@app.cell
def _():
    _grid = {
        "adamw": (adamw, (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)),
        "adam_l2": (adam_l2, (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)),
    }
    found = {
        (features, name): errors_after_decay(rule, decays, uneven=features == "uneven")
        for features in ("even", "uneven")
        for name, (rule, decays) in _grid.items()
    }
    _best = {key: errors[1:].mean(1).min().item() for key, errors in found.items()}
    _none = {features: found[features, "adamw"][0].mean().item() for features in ("even", "uneven")}
    mo.vstack(
        [
            mo.md(r"""
            ## Which decay generalises better?

            A comparison is fair only if each method may choose its own $\lambda$. Eight linear problems with 60 weights and 40 noisy
            examples, so that learning by heart is easy, and a second set of eight in which the features differ in scale by up to 100 times.
            The error is that on new data, for the best $\lambda$ of each grid.
            """),
            bar_chart(
                [
                    {"features": features, "error on new data": value, "method": method}
                    for features in ("even", "uneven")
                    for method, value in (
                        ("no decay", _none[features]),
                        ("AdamW", _best[features, "adamw"]),
                        ("Adam with L2", _best[features, "adam_l2"]),
                    )
                ],
                "features",
                "error on new data",
                "method",
                title="Error on new data, mean of eight problems",
            ),
            claim(
                "OP-14 RG-11",
                "Decay helps on both sets. Which kind is better depends on the problem: on even features Adam with L2 "
                f"({_best['even', 'adam_l2']:.1f} against {_best['even', 'adamw']:.1f}), because it truly minimises the loss plus the band; on uneven ones "
                f"AdamW ({_best['uneven', 'adamw']:.1f} against {_best['uneven', 'adam_l2']:.1f}), because one band for all scales fits none of them. "
                "(Six draws of both sets agreed.) In a transformer the gradients of different weights differ much in size, as in the second set; AdamW is the custom there.",
                all(value < _none[features] for (features, _), value in _best.items())
                and _best["even", "adam_l2"] < _best["even", "adamw"]
                and _best["uneven", "adamw"] < _best["uneven", "adam_l2"],
            ),
        ]
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            *Why the size drops out.* Multiply every gradient by 1,000. Then $m$, an average of gradients, grows 1,000 times, $v$, an
            average of squares, a million times, and $\sqrt v$ 1,000 times. The quotient stays.

            *Why noise shortens steps.* Let gradients be $1 + s$ and $1 - s$, equally often. The average of $g$ is 1. The average of the
            squares is $\frac12\big((1+s)^2 + (1-s)^2\big) = 1 + s^2$. The step is $1 / \sqrt{1 + s^2}$.

            *Why $1 - \beta^t$.* With the constant gradient 1, an average that starts at 0 and keeps the share $\beta$ misses 1 by $\beta$ after one
            step, by $\beta^2$ after two, by $\beta^t$ after $t$. So it is $1 - \beta^t$, and dividing by that gives 1. The first uncorrected step is
            $0.1 / \sqrt{0.001} = 3.16$.""",
        undergraduate=r"""
            $m_t = (1 - \beta_1) \sum_{k \le t} \beta_1^{t-k} g_k$, so $\mathbb E\, m_t = (1 - \beta_1^t)\, \mathbb E\, g$ for a stationary sequence, and likewise
            $\mathbb E\, v_t = (1 - \beta_2^t)\, \mathbb E\, g^2$ with $\mathbb E\, g^2 = \mu^2 + \sigma^2$. For a constant $g$ the uncorrected step is
            $\eta\,(1 - \beta_1^t)/\sqrt{1 - \beta_2^t}$, largest at $t = 12$.

            *L2 and decay.* In gradient descent $\theta - \eta(\nabla L + \lambda\theta) = (1 - \eta\lambda)\theta - \eta\nabla L$: the same. In Adam the term
            $\lambda\theta$ passes through $1/\sqrt{\hat v}$, an effective decay $\lambda/\sqrt{\hat v_i}$ for weight $i$. A stationary
            point of Adam with L2 is one of $L + \frac\lambda2\|\theta\|^2$; one of AdamW solves $\hat m / \sqrt{\hat v} = -\lambda\theta$ instead.

            *Clipping* is the projection of $g$ onto the ball of radius $c$.""",
        research=r"""
            Adam without averages is sign descent, steepest descent in the maximum norm; $\beta_1, \beta_2$ smooth it (Kingma and Ba 2015; Balles and Hennig
            2018). Decoupled decay (Loshchilov and Hutter 2019) is, for slowly varying $\hat v$, descent with the penalty
            $\frac\lambda2 \theta^\top \mathrm{diag}(\sqrt{\hat v})\, \theta$. The variance of $1/\sqrt{\hat v_t}$ in the first steps is one
            reason for warm-up (Liu et al. 2020); large curvature at the start is another. A rising $\beta_2$ makes Adam's divisor $1 - \beta_2^t$ too small, so
            steps come out slightly short, never long (`fenchel/optim/schedule.py` has the bound). Clipping by the global norm
            acts before Adam's division, which hides it: scaling *all* gradients of *all* steps changes nothing, scaling those of one step does.""",
    )
    return


@app.cell
def _():
    def check(names):
        moves = names["adam"]([2.0] * 5, 0.1)
        assert len(moves) == 5, "Return one move per gradient."
        assert abs(moves[0] - 0.3162) > 1e-3, (
            "The first move is 3.16 times the rate: the averages start at 0. Divide m by 1 - 0.9**t and v by 1 - 0.999**t, with t from 1."
        )
        assert all(abs(x - 0.1) < 1e-6 for x in moves), (
            f"A constant gradient should give moves of one rate, 0.1; yours are {', '.join(f'{x:.4f}' for x in moves)}."
        )
        gradients = [1.0, -2.0, 0.5, 4.0, -1.0, 0.25]
        mine = names["adam"](gradients, 0.01)
        for t, (found, right) in enumerate(
            zip(mine, adam_moves(gradients, 0.01), strict=True), start=1
        ):
            assert abs(found - right) < 1e-8, (
                f"Move {t} for changing gradients should be {right:.6f}, yours is {found:.6f}."
            )

    exercise = Exercise(
        lesson="optimisers",
        task="Write `adam(gradients, rate)`: the list of what Adam subtracts from one weight, for a list of gradients. "
        "The starter has the averages; the correction is missing.",
        starter="""
    def adam(gradients, rate):
        m = v = 0.0
        moves = []
        for g in gradients:
            m = 0.9 * m + 0.1 * g
            v = 0.999 * v + 0.001 * g * g
            moves.append(rate * m / (math.sqrt(v) + 1e-8))
        return moves
    """,
        solution="""
    def adam(gradients, rate):
        m = v = 0.0
        moves = []
        for t, g in enumerate(gradients, start=1):
            m = 0.9 * m + 0.1 * g
            v = 0.999 * v + 0.001 * g * g
            mh, vh = m / (1 - 0.9**t), v / (1 - 0.999**t)
            moves.append(rate * mh / (math.sqrt(vh) + 1e-8))
        return moves
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
    torch.nn.functional.cross_entropy(own.model(ids[:, :-1])[0], ids[0, 1:]).backward()
    trained = [(name, w) for name, w in own.model.named_parameters() if w.grad is not None]
    _gradients = [w.grad.clone() for _, w in trained]
    _before = [w.detach().clone() for _, w in trained]
    _optimiser = adamw([w for _, w in trained], lr=1e-3)
    _optimiser.step()
    _moves = [(w.detach() - b) / 1e-3 for (_, w), b in zip(trained, _before, strict=True)]
    _sizes = [g.square().mean().sqrt().item() for g in _gradients]
    _shown = [k for k, s in enumerate(_sizes) if s > 0][:12]
    _exact = all(
        torch.allclose(m, -g / (g.abs() + 1e-8), atol=1e-6)
        for m, g in zip(_moves, _gradients, strict=True)
    )
    _total = math.sqrt(sum(g.square().sum().item() for g in _gradients))
    _norm = clip_([w for _, w in trained], _total / 10)
    _left = math.sqrt(sum(w.grad.square().sum().item() for _, w in trained))
    mo.vstack(
        [
            mo.md(
                f"One gradient of your model on *{_text}*, and the first step of AdamW from it. The sizes are root mean squares over the entries of each tensor."
            ),
            table(
                [
                    {
                        "tensor": trained[k][0],
                        "size of the gradient": _sizes[k],
                        "size of Adam's step over the rate": _moves[k]
                        .square()
                        .mean()
                        .sqrt()
                        .item(),
                    }
                    for k in _shown
                ]
            ),
            claim(
                "OP-11 E68",
                f"The gradients of these tensors differ in size by a factor of {max(_sizes[k] for k in _shown) / min(_sizes[k] for k in _shown):.0f}. "
                r"Every entry moves by $|g| / (|g| + \varepsilon)$ rates: one rate wherever $|g|$ is well above $10^{-8}$.",
                _exact,
            ),
            details(
                claim(
                    "OP-23",
                    f"The gradient of your whole model has the norm {_norm:.3f}; clipped to a tenth of it, {_left:.4f}.",
                    math.isclose(_norm, _total, rel_tol=1e-6)
                    and math.isclose(_left, _total / 10, rel_tol=1e-3),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        r"Gradients near $\varepsilon = 10^{-8}$ are no longer rescaled: a weight whose gradient is $10^{-9}$ takes a tenth of a step. In 16-bit numbers "
        r"that border comes sooner. The noise law needs many steps of a steady mean; a gradient that changes because the *landscape* changes is a "
        r"different matter, since $v$ remembers a thousand steps and lags behind. And no schedule is best in general: the right warm-up and the right end depend on "
        r"the model, the batch and the number of steps."
    )
    return


@app.cell
def _():
    footer("optimisers")
    return


if __name__ == "__main__":
    app.run()
